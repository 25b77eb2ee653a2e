# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the key index at a small size: what it checks holds, and all that is no time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import index
from benchmarks.index_keys import distinct_keys
from jaxsparse.ops.native import library

MACHINE = {"cpu", "cores", "load_average", "device", "jax", "python", "commit"}
RATES = {"hits", "misses", "insertions", "reinsertions", "removals", "restored", "distinct_rows"}


def test_keys_differ_in_and_between_series():
    keys = np.concatenate([distinct_keys(series, 0, 50_000) for series in range(3)])
    assert np.unique(keys).size == keys.size
    assert np.array_equal(distinct_keys(1, 100, 200), keys[50_100:50_200])


@pytest.mark.slow
@pytest.mark.skipif(not library.is_available(), reason="the sizes are those of the native index")
def test_the_index_s_result(tmp_path, monkeypatch, capsys):
    out = tmp_path / "index.json"
    sizes = ["--rounds", "2", "--keys", "200000", "--most-keys", "2000000", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["index", *sizes])
    index.main()
    result = json.loads(out.read_text())
    assert (result["benchmark"], result["implementation"]) == ("index", "native")
    assert set(result["machine"]) == MACHINE and set(result["keys_per_s"]) == RATES
    assert all(rate > 0 for rate in result["keys_per_s"].values())
    assert len(result["batch_ms"]) == 3 and result["worst_batch_of_a_round"] >= 1
    met = {one["what"]: one["met"] for one in result["requirements"]}
    assert len(met) == 8
    assert met["bytes a key, any size"] and met["bytes a key of the process, any size"]
    table = capsys.readouterr().out
    assert "; native; 200,000 keys, batches of 65,536" in table
    assert all(what in table for what in met)
