# SPDX-License-Identifier: Apache-2.0
"""How fast input is, against the training it feeds: ``python -m benchmarks.pipeline``.

The model is that of ``examples/criteo.toml`` (DLRM, dim 16, 26 features, batch 4,096), one device.
Every round measures all of it, in an order that alternates; ratios are taken inside a round, and
their median over rounds is reported, so that what else the machine does falls on both sides.

- ``memory``: training from arrays in memory, shuffled.
- ``parquet``, ``criteo_tsv``: the pipeline alone, from shuffled files to packed batches.
- ``train_parquet``: training from the Parquet files.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from benchmarks.report import ROOT, describe_machine, machine, run
from jaxsparse.cli.resolve import make_collection, make_trainer, resolve
from jaxsparse.cli.run_config import RunConfig, load_config
from jaxsparse.data import (
    ArrayDataset,
    ColumnSchema,
    Prefetcher,
    StreamDataset,
    stream_criteo,
    stream_files,
)
from jaxsparse.data.criteo import CATEGORIES, INTEGERS
from jaxsparse.data.joining import join_batches
from jaxsparse.data.stream import SHUFFLE_ROWS
from jaxsparse.train import Trainer

RUN = ROOT / "examples" / "criteo.toml"
REQUIRED = {"parquet": 2.0, "criteo_tsv": 1.0, "train_parquet": 0.9}
"""Least ratio to training from memory."""

SCHEMA = ColumnSchema(dense=INTEGERS, features={name: name for name in CATEGORIES})


def write_data(folder: pathlib.Path, num_rows: int, seed: int = 0) -> None:
    """The same rows as Criteo's text and as Parquet; keys skewed as in click logs."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(num_rows) < 0.25).astype(np.int64)
    integers = (rng.random((len(INTEGERS), num_rows)) ** 4 * 1000).astype(np.int64)
    keys = (rng.random((len(CATEGORIES), num_rows)) ** 6 * 2**32).astype(np.int64)
    digits = [column.astype(">u4").tobytes().hex().encode() for column in keys]
    texts = [np.frombuffer(column, "S8").astype(str) for column in digits]
    text = {"label": labels, **dict(zip(INTEGERS, integers, strict=True))}
    csv.write_csv(
        pa.table(text | dict(zip(CATEGORIES, texts, strict=True))),
        folder / "train.tsv",
        csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none"),
    )
    dense = np.log1p(integers).astype(np.float32)
    columns = {"label": labels, **dict(zip(INTEGERS, dense, strict=True))}
    parquet.write_table(
        pa.table(columns | dict(zip(CATEGORIES, keys, strict=True))),
        folder / "train.parquet",
        row_group_size=1 << 16,
    )


class Bench:
    """A trainer, its state, and the same rows in memory and in files."""

    def __init__(self, folder: pathlib.Path, num_rows: int, assignments: list[str]) -> None:
        """Writes the files and compiles the step."""
        write_data(folder, num_rows)
        config, source = load_config(RUN, ["mesh.devices=1", *assignments])
        self.config: RunConfig = resolve(config, source)
        self.trainer: Trainer = make_trainer(self.config, make_collection(self.config))
        size, self.folder = self.config.train.batch_size, folder
        options: dict[str, Any] = {"shuffle": True, "seed": 0}
        # Two windows at least: rows that fit one are decoded once, and this is to decode them.
        window = {"shuffle_rows": min(SHUFFLE_ROWS, num_rows // 2)}
        self.parquet = stream_files(folder / "train.parquet", SCHEMA, size, **options, **window)
        self.criteo_tsv = stream_criteo(folder / "train.tsv", size, **options, **window)
        self.memory = ArrayDataset(join_batches(list(self.parquet)), size, **options)
        self.state = self.trainer.init(jax.random.key(0))
        for dataset in (self.memory, self.parquet):
            self.train(dataset)

    def train(self, dataset: Any) -> dict[str, float]:
        """Trains for a pass."""
        result = self.trainer.fit(
            dataset, epochs=1, state=self.state, log_every=10**9, progress=False
        )
        jax.block_until_ready(result.state)
        self.state = result.state
        return {"input_wait": result.history[-1]["input_wait"]}

    def pack(self, dataset: StreamDataset) -> dict[str, float]:
        """Packs the batches of a pass, on a thread as `Trainer.fit` does."""
        for packed in Prefetcher(dataset, self.trainer.pack):
            jax.block_until_ready(packed)
        return {}

    def parts(self) -> dict[str, Callable[[], dict[str, float]]]:
        """What is measured, by name."""
        return {
            "memory": lambda: self.train(self.memory),
            "parquet": lambda: self.pack(self.parquet),
            "criteo_tsv": lambda: self.pack(self.criteo_tsv),
            "train_parquet": lambda: self.train(self.parquet),
        }


def timed(part: Callable[[], dict[str, float]], num_rows: int) -> dict[str, float]:
    """Samples a second of wall time, and CPU microseconds a sample over all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    told = part()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"samples_per_s": num_rows / wall, "cpu_us_per_sample": cpu / num_rows * 1e6, **told}


def measure(num_rows: int, rounds: int, assignments: list[str] | None = None) -> dict[str, Any]:
    """All rates and ratios.

    Args:
        num_rows: of the data; a part of a round is one pass over them.
        rounds: how many.
        assignments: changes to ``examples/criteo.toml``, for tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(pathlib.Path(folder), num_rows, assignments or [])
        parts = bench.parts()
        measured = []
        for number in range(rounds):
            names = list(parts)[:: 1 if number % 2 == 0 else -1]
            told = {name: timed(parts[name], num_rows) for name in names}
            measured.append({name: told[name] for name in parts})
    speeds = [{name: told["samples_per_s"] for name, told in one.items()} for one in measured]
    ratios = {
        name: statistics.median(one[name] / one["memory"] for one in speeds) for name in REQUIRED
    }
    return {
        "benchmark": "pipeline",
        "machine": machine(),
        "batch_size": bench.config.train.batch_size,
        "rows": num_rows,
        "median": {
            name: {key: statistics.median(one[name][key] for one in measured) for key in told}
            for name, told in measured[0].items()
        },
        "ratios": ratios,
        "required": REQUIRED,
        "met": {name: ratios[name] >= least for name, least in REQUIRED.items()},
        "rounds": measured,
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{describe_machine(result)}; {result['rows']:,} rows, {len(result['rounds'])} rounds",
        f"{'':14s}  samples/s  CPU us  ratio  least input wait",
    ]
    for name, told in result["median"].items():
        ratio = least = wait = ""
        if name in REQUIRED:
            ratio, least = f"{result['ratios'][name]:.2f}", f"{REQUIRED[name]:.1f}"
        if "input_wait" in told:
            wait = f"{told['input_wait']:.1%}"
        lines.append(
            f"{name:14s} {told['samples_per_s']:10,.0f} {told['cpu_us_per_sample']:7.1f} "
            f"{ratio:>6s} {least:>6s} {wait:>10s}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measures; 1 where a ratio is not reached."""
    result = run(__doc__, measure, table, num_rows=64 * 4096)
    return 0 if all(result["met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
