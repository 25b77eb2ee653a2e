# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels compiled for GPUs that are not there, as facts that can be asserted.

Runs in the compile environment (`tests.gpu_target`), which has no pytest: `print_facts` hands what
it found to the tests as JSON. One process compiles all kernels for one kind of GPU.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter

FLOAT32_DIMS = (1, 7, 64, 100, 1024)
BFLOAT16_DIMS = (8, 37, 128)
HUGE_ROWS = 50_000_000
"""Rows of a table with more than 2^31 elements at 100 columns."""


def programs():
    """By name: a function, its arguments' shapes, and which of them are donated.

    Names end with dtype and number of columns.
    """
    import jax
    import jax.numpy as jnp

    import jaxsparse as js
    from jaxsparse.ops.dot_interaction import dot_interaction
    from jaxsparse.ops.embedding_bag import embedding_bag
    from jaxsparse.ops.row_update import RowTables, count_not_finite, row_update
    from jaxsparse.ops.segment_sum import bag_gradients
    from jaxsparse.ops.unique import unique

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    bags, ids, distinct = 4000, 10_000, 5000
    found = {}

    def add_bag(name, rows, dim, dtype):
        table = jax.ShapeDtypeStruct((rows, dim), dtype)
        more = i32(distinct), i32(ids), i32(bags + 1), f32(ids), f32(bags)

        def run(*args):
            parts = (bags // 2, bags // 2)
            return embedding_bag(*args, parts=parts, implementation="triton")

        found[f"{name}_{dtype}_{dim}"] = run, (table, *more), ()

    def add_update(name, rule, rows, dim, dtype):
        tables = RowTables(i32(3), f32(3), jax.ShapeDtypeStruct((3,), jnp.uint32))
        slots = jax.eval_shape(lambda: rule.init_slots(rows, dim))
        state = jax.ShapeDtypeStruct((rows, dim), dtype), slots
        more = i32(distinct), f32(distinct, dim), tables, i32()

        def update(*args):
            *args, enabled = args
            return row_update(rule, *args, enabled=enabled, seed=7, implementation="triton")

        def count(*args):
            return count_not_finite(rule, *args, seed=7, implementation="triton")

        enabled = jax.ShapeDtypeStruct((), jnp.bool_)
        found[f"update_{name}_{dtype}_{dim}"] = update, (*state, *more, enabled), (0, 1)
        if name == "adam":
            found[f"count_{dtype}_{dim}"] = count, (*state, *more), ()

    def gather(table, slots):
        return embedding_bag(table, None, slots, implementation="triton")

    def sums(*args):
        return bag_gradients(*args, implementation="triton")

    def dots(vectors):
        def total(vectors):
            return dot_interaction(vectors, implementation="triton").sum()

        return jax.value_and_grad(total)(vectors)

    for dim in FLOAT32_DIMS:
        add_bag("bag", 100_000, dim, "float32")
    for dim in BFLOAT16_DIMS:
        add_bag("bag", 100_000, dim, "bfloat16")
    add_bag("huge", HUGE_ROWS, 100, "float32")
    found["gather_float32_64"] = gather, (f32(100_000, 64), i32(ids)), ()
    for dim in (7, 64):
        parts = f32(bags, dim), f32(bags, dim)
        found[f"sums_float32_{dim}"] = (
            sums,
            (parts, i32(distinct + 1), i32(ids), i32(ids), f32(ids), f32(2 * bags)),
            (),
        )
    full = {"l2": 0.1, "weight_decay": 0.1, "catch_up_decay": True}
    rules = {
        "sgd": js.SGD(0.1),
        "adagrad": js.Adagrad(0.1, **full),
        "rowwise": js.RowwiseAdagrad(0.1, **full),
        "adam": js.Adam(0.1, per_row_count=True, **full),
        "ftrl": js.Ftrl(0.1),
    }
    for name, rule in rules.items():
        add_update(name, rule, 100_000, 64, "float32")
        add_update(name, rule, 100_000, 8, "bfloat16")
    add_update("adam", rules["adam"], 100_000, 37, "float32")
    add_update("adagrad", rules["adagrad"], HUGE_ROWS, 100, "float32")
    for count, dim in ((27, 64), (70, 13)):
        found[f"dots_{count}_float32_{dim}"] = dots, (tuple([f32(300, dim)] * count),), ()
    found["unique_int32_1"] = (
        lambda rows: unique(rows, 100_000, implementation="triton"),
        (i32(1 << 17),),
        (),
    )
    return found


def print_facts(target_name):
    """Compiles every program inside a ``shard_map`` for eight GPUs; prints JSON by program."""
    folder = pathlib.Path(tempfile.mkdtemp())
    # Read when jax is imported.
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text=false"
    facts = {}
    try:
        for name, program in programs().items():
            facts[name] = _facts(name, program, target_name, folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(facts))


def _facts(name, program, target_name, folder):
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from tests import gpu_target

    run, arguments, donated = program
    devices = np.array(gpu_target.gpu_devices(getattr(gpu_target, target_name)))
    mesh = jax.sharding.Mesh(devices, ("shard",))
    cut, whole = PartitionSpec("shard"), PartitionSpec()
    specs = jax.tree.map(lambda x: cut if x.shape else whole, arguments)

    def local(*args):
        out = run(*args)
        return jax.tree.map(lambda x: x if x.shape else x[None], out)

    local.__name__ = name
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=cut, check_vma=False)
    sharded.__name__ = name
    inputs = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            (x.shape[0] * mesh.size, *x.shape[1:]) if x.shape else x.shape,
            x.dtype,
            sharding=NamedSharding(mesh, spec),
        ),
        arguments,
        specs,
    )
    compiled = jax.jit(sharded, donate_argnums=donated).lower(*inputs).compile()
    memory = compiled.memory_analysis()
    state = jax.tree.leaves([arguments[index] for index in donated])
    return {
        "state_bytes": sum(x.size * x.dtype.itemsize for x in state),
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "kernels": kernels_of(folder, name),
        "opcodes": Counter(
            re.findall(r"^\s+(?:ROOT )?%\S+ = .*? ([a-z][\w\-]*)\(", compiled.as_text(), re.M)
        ),
    }


def kernels_of(folder, name):
    """Functions of a dumped program's PTX: accesses to memory, and what ptxas says if there is
    one."""
    found = {}
    for path in folder.glob(f"*.jit_{name}.*.ptx"):
        text = path.read_text()
        used = _registers(path, text)
        for function in text.split(".visible .entry ")[1:]:
            entry = function.partition("(")[0]
            found[entry] = {
                "accesses": Counter(re.findall(r"\b(?:ld|st)\.global[.\w]*", function)),
                "wide": len(
                    re.findall(r"\b(?:mul|mad)\.wide\.[us]32\s[^;]*, [14]00[,;]", function)
                ),
                "atomics": len(re.findall(r"\b(?:atom|red)\.", function)),
                "depot": ".local" in function,
                **used.get(entry, {}),
            }
    return found


def _registers(path, text):
    ptxas = shutil.which("ptxas") or next(
        map(str, pathlib.Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/*/bin/ptxas")),
        None,
    )
    target = re.search(r"^\.target (\w+)", text, re.M)
    if ptxas is None or target is None:
        return {}
    command = [ptxas, f"-arch={target[1]}", "-v", str(path), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        entry: {"spilled_bytes": int(stores) + int(loads), "registers": int(registers)}
        for entry, stores, loads, registers in re.findall(
            r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
            r".*?Used (\d+) registers",
            said,
            re.S,
        )
    }
