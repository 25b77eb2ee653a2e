# SPDX-License-Identifier: Apache-2.0
"""The whole DLRM step compiled for GPUs that are not there, as facts that can be asserted.

Runs in the compile environment (`tests.gpu_target`), which has no pytest; prints JSON.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import tempfile
import time

BATCH = 4096
NUM_TABLES = 26
DIM = 64
NUM_DENSE = 13
ROWS_PER_DEVICE = 400_000
"""So many that no other array of the step has as many elements as a slab has rows."""

STEPS = {
    "1x8": ("H200", 1, 1),
    "1x8 x10": ("H200", 1, 10),
    "2x8": ("H200", 2, 1),
    "2x8 x10": ("H200", 2, 10),
    "A100": ("A100", 1, 1),
}
"""By name: kind of GPU, nodes of eight, and factor on the rows of every table."""

DENSE_DOT = re.compile(r"fusion\(.*calls=%gemm_fusion|__cublas\$|\bdot\(")


def print_facts():
    """Compiles every step; prints JSON by name."""
    folder = pathlib.Path(tempfile.mkdtemp())
    # Read when jax is imported.
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text=false"
    try:
        facts = {}
        for name, step in STEPS.items():
            facts[name] = _facts(folder, *step)
            for path in folder.glob("*.ptx"):  # the next step's have the same names
                path.unlink()
    finally:
        shutil.rmtree(folder)
    print(json.dumps(facts))


def _facts(folder, kind, num_nodes, factor):
    import jax
    import optax

    import jaxsparse as js
    from jaxsparse.models import DLRM
    from tests import compiled_checks as checks
    from tests import gpu_target
    from tests.compiled_kernels import kernels_of

    devices = gpu_target.gpu_devices(getattr(gpu_target, kind), num_nodes)
    nodes = {} if num_nodes == 1 else {"nodes": num_nodes}
    mesh = js.make_mesh(devices=devices, **nodes)
    emb, columns = _collection(mesh, factor)
    model = DLRM.for_features(
        emb.features, num_dense=NUM_DENSE, bottom=(512, 256, DIM), top=(512, 256)
    )
    trainer = js.Trainer(model, emb, optimizer=optax.adagrad(0.01))
    start = time.perf_counter()
    # What of the program goes by the default backend is to go as on a GPU.
    default_backend, jax.default_backend = jax.default_backend, lambda: "gpu"
    try:
        compiled = checks.compile_trainer(
            trainer, columns, num_dense=NUM_DENSE, capacity=emb.exchange.capacity
        )
    finally:
        jax.default_backend = default_backend
    fact = checks.facts_of(emb, compiled, time.perf_counter() - start)
    fact["kernels"] = kernels_of(folder, "train_step")
    fact["overlap"] = overlap(fact["text"])
    return fact


def _collection(mesh, factor):
    import numpy as np

    import jaxsparse as js

    tables = [
        js.TableSpec(
            f"t{number}",
            vocabulary_size=ROWS_PER_DEVICE * mesh.size * factor,
            embedding_dim=DIM,
            optimizer=js.Adagrad(0.01),
            placement="sharded",
        )
        for number in range(NUM_TABLES)
    ]
    features = [js.FeatureSpec(table.name, table) for table in tables]
    emb = js.EmbeddingCollection(
        features, mesh=mesh, exchange=js.Exchange(capacity=4000), device_bytes=2**40
    )
    rng = np.random.default_rng(0)
    return emb, {table.name: rng.integers(0, 1000, BATCH) for table in tables}


def overlap(text):
    """By all-to-all of the scheduled program, in order: its result and the dense dots that are
    issued while it is under way."""
    entry = text[text.index("\nENTRY ") :]
    lines = entry[: entry.index("\n}")].splitlines()
    under_way, found = {}, []
    for line in lines:
        name = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)", line)
        if name is None:
            continue
        if re.search(r"\ball-to-all-start\(", line):
            under_way[name[1]] = {"result": name[2][:160], "dots": 0}
            found.append(under_way[name[1]])
        elif done := re.search(r"\ball-to-all-done\(.*?%([\w.\-]+)", line):
            under_way.pop(done[1], None)
        elif DENSE_DOT.search(line):
            for exchange in under_way.values():
                exchange["dots"] += 1
    return found
