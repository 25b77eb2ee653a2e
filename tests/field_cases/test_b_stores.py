# SPDX-License-Identifier: Apache-2.0
"""Field cases B of keys in row stores that are saved and exported."""

import numpy as np

import jaxsparse as js
from jaxsparse.ckpt.rows import export_rows
from tests.store.checkpoints import save
from tests.store.stores import Stored, dynamic


def test_b08_the_largest_keys_are_exported_with_their_rows(tmp_path):
    keys = np.array([2**63 - 1, 2**63, 2**64 - 1, 0, 1], np.uint64)
    with Stored([js.FeatureSpec("f", dynamic("t", tiers=js.Tiers(device_rows=5)))]) as trained:
        trained.train([{"f": keys}, {"f": np.arange(10, 14, dtype=np.uint64)}])
        want = trained.read(keys)
        path = save(trained, tmp_path / "saved")
    assert export_rows(path, "t", tmp_path / "rows.npz") == 9
    with np.load(tmp_path / "rows.npz") as file:
        found = dict(zip(file["keys"].view(np.uint64).tolist(), file["vectors"], strict=True))
    assert [found[key].tobytes() for key in keys.tolist()] == [row.tobytes() for row in want]
