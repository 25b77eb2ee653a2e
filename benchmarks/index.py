# SPDX-License-Identifier: Apache-2.0
"""The key index on one core: ``python -m benchmarks.index``.

Batches of 65,536 keys into an index that grows from nothing, searches in it, insertion into rows
that were freed, a snapshot restored, and the distinct rows of a batch; in a process of its own the
bytes a key at every size. What comes back is compared with what it has to be.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.index_keys import distinct_keys
from benchmarks.index_memory import BATCH, measure_alone
from benchmarks.report import (
    RESULTS,
    Result,
    describe_machine,
    grid,
    machine,
    requirement,
    save,
    summary,
)
from jaxsparse.store.index import KeyIndex, RowMarks, distinct_rows

NUM_KEYS = 10_000_000
LEAST_KEYS, MOST_KEYS = 1_000_000, 50_000_000
"""Sizes between which bytes a key are looked at."""
ROUNDS = 3
SEARCHES = 40
"""Batches of each kind a round."""
BATCH_IDS, ZIPF = 106_496, 1.2
"""Of a batch whose distinct rows are counted: 4096 samples of 26 features."""

Keys = npt.NDArray[np.uint64]


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What comes back, and seconds."""
    start = time.perf_counter()
    outcome = work()
    return outcome, time.perf_counter() - start


def batches(keys: Keys) -> list[Keys]:
    """Whole batches, and what is left."""
    return [keys[begin : begin + BATCH] for begin in range(0, keys.size, BATCH)]


def grown(keys: Keys) -> tuple[KeyIndex, list[float]]:
    """An index of keys, and the seconds of each batch."""
    index = KeyIndex(2**31 - 2)
    seconds = []
    for number, batch in enumerate(batches(keys)):
        rows, spent = timed(lambda batch=batch: index.insert(batch))  # type: ignore[misc]
        assert np.array_equal(rows, np.arange(rows.size) + number * BATCH)
        seconds.append(spent)
    return index, seconds


def searched(index: KeyIndex, keys: Keys, rng: np.random.Generator) -> dict[str, float]:
    """Keys a second of searches, in an index of ``keys``."""
    told = {}
    for name, pool in (("hits", keys), ("misses", distinct_keys(1, 0, keys.size))):
        seconds = []
        for _ in range(SEARCHES):
            drawn = rng.integers(0, keys.size, BATCH)
            wanted = pool[drawn]
            rows, spent = timed(lambda wanted=wanted: index.find(wanted))  # type: ignore[misc]
            assert np.array_equal(rows, drawn if name == "hits" else np.full(BATCH, -1))
            seconds.append(spent)
        told[name] = BATCH / statistics.median(seconds)
    return told


def reused(index: KeyIndex, rng: np.random.Generator) -> dict[str, float]:
    """Keys a second of removing half of the rows, and of inserting as many keys again."""
    size, num_bytes = len(index), index.nbytes
    freed = rng.permutation(size)[: size // 2].astype(np.int32)
    removing = sum(
        timed(lambda part=part: index.remove(part))[1]  # type: ignore[misc]
        for part in np.array_split(freed, max(1, freed.size // BATCH))
    )
    given, inserting = [], 0.0
    for batch in batches(distinct_keys(2, 0, freed.size)):
        rows, spent = timed(lambda batch=batch: index.insert(batch))  # type: ignore[misc]
        given.append(rows)
        inserting += spent
    assert np.array_equal(np.concatenate(given), freed[::-1]) and len(index) == size
    # The list of freed rows has up to a quarter of room; hardly a part has more keys than before.
    assert index.nbytes <= 1.02 * num_bytes + 5 * freed.size, "the index should not have grown"
    return {"removals": freed.size / removing, "reinsertions": freed.size / inserting}


def restored(index: KeyIndex) -> dict[str, float]:
    """Keys a second of a restored snapshot."""
    arrays = index.arrays()
    again, spent = timed(lambda: KeyIndex.from_arrays(2**31 - 2, arrays))
    some = arrays["keys"][:: max(1, len(index) // 1000)]
    assert np.array_equal(again.find(some), index.find(some)) and len(again) == len(index)
    return {"restored": len(index) / spent}


def counted(num_rows: int, rng: np.random.Generator) -> dict[str, float]:
    """Ids a second of `distinct_rows`."""
    marks = RowMarks()
    seconds = []
    for _ in range(SEARCHES):
        rows = (rng.zipf(ZIPF, BATCH_IDS) * 7919 % num_rows).astype(np.int32)
        found, spent = timed(lambda rows=rows: distinct_rows(rows, marks))  # type: ignore[misc]
        assert np.array_equal(found.rows[found.inverse], rows)
        seconds.append(spent)
    return {"distinct_rows": BATCH_IDS / statistics.median(seconds)}


def one_round(keys: Keys, seed: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of each batch of the growing index, and the rates of all else."""
    rng = np.random.default_rng(seed)
    index, seconds = grown(keys)
    rates = {**searched(index, keys, rng), **restored(index), **counted(keys.size, rng)}
    return seconds, {**rates, **reused(index, rng)}


def measure(
    rounds: int = ROUNDS,
    num_keys: int = NUM_KEYS,
    least_keys: int = LEAST_KEYS,
    most_keys: int = MOST_KEYS,
) -> Result:
    """All rates, and the bytes.

    Args:
        rounds: as many to quote.
        num_keys: of the index whose rates are measured.
        least_keys: from which on bytes a key are looked at.
        most_keys: to which on bytes a key are looked at.
    """
    keys = distinct_keys(0, 0, num_keys)
    taken = [one_round(keys, seed) for seed in range(rounds)]
    # What else the machine does hits a batch in one round, the work of the batch in all.
    batch_seconds = np.array([seconds for seconds, _ in taken])
    whole = slice(max(1, num_keys // BATCH))  # without the rest, which is shorter
    growing = np.median(batch_seconds, axis=0)[whole]
    rates = {name: statistics.median(one[name] for _, one in taken) for name in taken[0][1]}
    rates["insertions"] = num_keys / float(np.median(batch_seconds.sum(axis=1)))
    result = {
        "benchmark": "index",
        "machine": machine(),
        "implementation": KeyIndex(1).implementation,
        "rounds": rounds,
        "num_keys": num_keys,
        "batch": BATCH,
        "keys_per_s": rates,
        "worst_batch": float(growing.max() / np.median(growing)),
        "worst_batch_of_a_round": float(batch_seconds[:, whole].max() / np.median(batch_seconds)),
        "batch_ms": [round(float(seconds) * 1e3, 3) for seconds in growing],
        "memory": measure_alone(least_keys, most_keys),
    }
    return {**result, "requirements": _requirements(result)}


def _requirements(result: Result) -> list[Result]:
    size = f"{result['num_keys']:,} keys"
    least = {
        "hits": 12e6,
        "misses": 12e6,
        "insertions": 5e6,
        "reinsertions": 10e6,
        "restored": 30e6,
    }
    rates = [
        requirement(f"{name} a second, {size}", result["keys_per_s"][name], limit)
        for name, limit in least.items()
    ]
    worst = result["memory"]["worst"]
    most = (
        ("worst batch of insertions over the median", result["worst_batch"], 3.0),
        ("bytes a key, any size", worst["own"]["bytes"], 17.0),
        ("bytes a key of the process, any size", worst["resident"]["bytes"], 22.0),
    )
    return [*rates, *(requirement(what, got, limit, at_least=False) for what, got, limit in most)]


def table(result: Result) -> str:
    """The result for people."""
    rows = [["", "M keys/s"]]
    rows += [[name, f"{rate / 1e6:.1f}"] for name, rate in result["keys_per_s"].items()]
    head = (
        f"{describe_machine(result)}; {result['implementation']}; {result['num_keys']:,} keys, "
        f"batches of {result['batch']:,}"
    )
    return "\n".join([head, grid(rows), summary(result["requirements"])])


def main() -> Result:
    """Measures, prints and keeps the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="as many to quote")
    parser.add_argument("--keys", type=int, default=NUM_KEYS, help="keys of the index")
    parser.add_argument("--least-keys", type=int, default=LEAST_KEYS, help="for bytes a key")
    parser.add_argument("--most-keys", type=int, default=MOST_KEYS, help="for bytes a key")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "index.json")
    options = parser.parse_args()
    result = measure(options.rounds, options.keys, options.least_keys, options.most_keys)
    save(result, options.out)
    print(table(result))
    return result


if __name__ == "__main__":
    main()
