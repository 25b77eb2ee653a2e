# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse check``: the same steps on one device and on many must give the same state."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsparse.ckpt import state_leaves
from jaxsparse.cli.resolve import config_errors, make_features, resolve
from jaxsparse.cli.row_disks import open_trainer
from jaxsparse.cli.run_config import RunConfig, load_config
from jaxsparse.cli.splits import check_files, load_split
from jaxsparse.cli.tell import tell
from jaxsparse.config import ConfigError
from jaxsparse.data import Batch
from jaxsparse.distributed import check_collectives
from jaxsparse.mesh import make_mesh
from jaxsparse.plan_text import counted
from jaxsparse.train import Trainer, TrainState
from jaxsparse.train.report import json_safe

STEPS = 10
TOLERANCE = 1e-3
"""Of the largest change of a leaf. Rounding leaves about 1e-5; a lost or doubled id leaves .1."""

Leaves = dict[str, npt.NDArray[Any]]


def run_check(
    run: str | None, assignments: Sequence[str], tolerance: float, *, only_json: bool
) -> int:
    """Prints the largest difference by leaf; returns 1 where one is above the tolerance.

    In a job of several processes, none of which could run on one device alone, it compares the
    collectives with numpy instead.
    """
    if jax.process_count() > 1:
        check_collectives(make_mesh())
        tell(
            f"collectives between {len(jax.devices())} devices of {jax.process_count()} processes "
            "are right"
        )
        return 0
    config, source = load_config(run, assignments)
    with config_errors(source):
        config = resolve(config, source)
        check_files(config)
        count = config.mesh.devices or len(jax.devices())
        if count < 2:
            raise ConfigError(
                "check compares one device with several and only one is there; "
                "--devices 4 forces four CPU devices"
            )
        train = load_split(config, "train", make_features(config))
        assert train is not None, "every kind of data has a train split"
    batches = list(itertools.islice(train.dataset, STEPS))
    steps = counted(len(batches), "step")
    tell(f"{steps} of {config.train.batch_size} on 1 device and on {count} devices")
    with config_errors(source):
        start, alone = _train(config, 1, batches)
        _, together = _train(config, None, batches)
    differences = compare(start, alone, together)
    return report(differences, tolerance, count, only_json=only_json)


def _train(
    config: RunConfig, num_devices: int | None, batches: Sequence[Batch]
) -> tuple[Leaves, Leaves]:
    """Leaves of the state before and after the batches."""
    with open_trainer(config, num_devices) as trainer:
        state = trainer.init(jax.random.key(config.run.seed))
        for batch in batches:
            state, _ = trainer.step(state, batch)
        store = trainer.store
        keys = {} if store is None else {n: store.keys(n) for n in trainer.emb.stored_tables}
        end = _leaves(trainer, state, keys)
        # Only now is it known which rows of a row store to look at.
        return _leaves(trainer, trainer.init(jax.random.key(config.run.seed)), keys), end


def _leaves(trainer: Trainer, state: TrainState, keys: Mapping[str, npt.NDArray[Any]]) -> Leaves:
    """All leaves; tables of a row store by their keys."""
    tables, store = state.embeddings, trainer.store
    leaves: Leaves = state_leaves(trainer.emb, state, store)
    for name, some in keys.items():
        assert store is not None
        leaves[f"tables/{name}/rows"] = store.read(tables, name, some)
        for slot, values in store.read_slots(tables, name, some).items():
            leaves[f"tables/{name}/slot.{slot}"] = values
    return leaves


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of one leaf."""

    leaf: str
    largest: float
    """Largest absolute difference of its values."""
    change: float
    """Largest absolute change of its values by the steps."""

    @property
    def share(self) -> float:
        """``largest / change``; inf where a leaf differs that did not change."""
        if self.largest == 0:
            return 0.0
        return self.largest / self.change if self.change else float("inf")


def compare(
    start: Mapping[str, Any], alone: Mapping[str, Any], together: Mapping[str, Any]
) -> list[Difference]:
    """Differences of all leaves, the largest share first.

    >>> start, one, two = ({"w": np.float32([x, 1.0])} for x in (0.0, 2.0, 2.5))
    >>> compare(start, one, two)
    [Difference(leaf='w', largest=0.5, change=2.0)]
    """
    differences = [
        Difference(name, _largest(alone[name], together[name]), _largest(start[name], alone[name]))
        for name in alone
    ]
    return sorted(differences, key=lambda d: -d.share)


def _largest(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    if not a.size:
        return 0.0
    difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return float(np.where(np.isnan(difference), np.inf, difference).max())


def report(
    differences: Sequence[Difference], tolerance: float, num_devices: int, *, only_json: bool
) -> int:
    """Prints the table and the verdict, or both as JSON; returns the exit code."""
    bad = [d.leaf for d in differences if not d.share <= tolerance]
    if only_json:
        largest = {d.leaf: d.share for d in differences}
        verdict = {"agree": not bad, "devices": num_devices, "tolerance": tolerance}
        print(json.dumps({**verdict, "differ": bad, "shares": json_safe(largest)}))
        return 1 if bad else 0
    _print_table(differences)
    differ = f"differ by more than {tolerance:g} of their change: {', '.join(bad)}"
    agreed = f"all {len(differences)} leaves agree within {tolerance:g} of their change"
    print(f"1 device and {num_devices} devices: {differ if bad else agreed}")
    return 1 if bad else 0


def _print_table(differences: Sequence[Difference]) -> None:
    """Leaves that neither changed nor differ are counted."""
    shown = [d for d in differences if d.largest or d.change]
    width = max([len("leaf"), *(len(d.leaf) for d in shown)])
    print(f"{'leaf':{width}}  {'difference':>10}  {'change':>10}  {'share':>8}")
    for d in shown:
        print(f"{d.leaf:{width}}  {d.largest:>10.2e}  {d.change:>10.2e}  {d.share:>8.1e}")
    if rest := len(differences) - len(shown):
        print(f"{rest} more that the steps did not change, equal on both")
