# SPDX-License-Identifier: Apache-2.0
"""The compiled train step as facts that can be asserted: memory, aliasing, instructions.

Programs are compiled from abstract arguments, so tables of any size cost nothing, and for GPUs
that are not there (`tests.gpu_target`): the environment that compiles those has no pytest, so this
module does without and `print_gpu_facts` hands what it found to the tests as JSON.
"""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse as js
from jaxsparse.packed_batch import PackedBatch
from jaxsparse.prepared import prepare_ids
from jaxsparse.train.step import state_spec, train_step
from tests import program_cache
from tests.compiled_models import (
    CAPACITY,
    NUM_DENSE,
    NUM_FEATURES,
    RULES,
    Tower,
    bfloat16,
    every_placement,
    many_features,
    one_rule,
)
from tests.program_text import CARRIES, arguments, count_collectives, num_updates, table_sized

GPU_SLACK_BYTES = 4096
"""Most by which temporaries may change with the schedule where a GPU step has several slabs: they
are then of different size now and then, by multiples of 256 bytes and in either direction."""

# ---- compiling --------------------------------------------------------------------------------


def abstract_state(trainer):
    """The train state as shapes with shardings; nothing is allocated."""
    shapes = jax.eval_shape(trainer.init, jax.random.key(0))
    return _with_shardings(shapes, state_spec(trainer.emb, shapes), trainer.emb.mesh)


def abstract_batch(emb, columns, num_dense=NUM_DENSE, capacity=CAPACITY):
    """A packed batch as shapes with shardings."""
    # Devices that are only compiled for belong to no process: all of them are taken as ours.
    prepared = prepare_ids(emb.feature_specs, emb._encoders, emb.num_shards, columns, {})
    needs = prepared.needs()
    ids = prepared.pack(emb._shapes(capacity)(needs), needs, emb.path)
    samples = ids.padded_samples
    batch = PackedBatch(
        ids,
        dense=np.zeros((samples, num_dense), np.float32),
        labels=np.zeros(samples, np.float32),
        weights=np.ones(samples, np.float32),
    )
    return _with_shardings(batch, batch.spec(emb), emb.mesh)


def _with_shardings(tree, spec, mesh):
    return jax.tree.map(
        lambda x, cut: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, cut)),
        tree,
        spec,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def make_trainer(emb):
    width = sum(feature.table.embedding_dim for feature in emb.features)
    return js.Trainer(Tower(width), emb, optimizer=optax.adam(1e-3))


def compile_trainer(trainer, columns, **options):
    """A trainer's step for a batch of ``columns``; options are those of `abstract_batch`."""
    state, batch = abstract_state(trainer), abstract_batch(trainer.emb, columns, **options)
    # Optimising the machine code takes most of the time on CPU and changes no instruction.
    level = {"xla_backend_optimization_level": 0}
    return train_step.lower(trainer.program, state, batch).compile(compiler_options=level)


def facts(emb, columns):
    """Everything the checks below need to know of a compiled step, as JSON types."""
    start = time.perf_counter()
    with program_cache.switched_off():
        compiled = compile_trainer(make_trainer(emb), columns)
    return facts_of(emb, compiled, time.perf_counter() - start)


def facts_of(emb, compiled, seconds):
    """`facts` of a step that took so long to compile."""
    memory = compiled.memory_analysis()
    state = jax.eval_shape(emb.init, jax.random.key(0))
    arrays = []
    for slab, weights, slots in zip(emb.layout.slabs, state.slabs, state.slots, strict=True):
        for name, array in {"weights": weights, **slots}.items():
            shape = [slab.rows_per_shard, *array.shape[1:]]
            size = math.prod(shape) * array.dtype.itemsize
            moved = slab.trainable
            arrays.append({"name": f"{slab.name} {name}", "bytes": size, "moved": moved})
    return {
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "arrays": arrays,
        "routed_slabs": sum(not slab.replicated for slab in emb.layout.slabs),
        "routed_trainable": sum(s.trainable and not s.replicated for s in emb.layout.slabs),
        "copied_trainable": sum(s.trainable and s.replicated for s in emb.layout.slabs),
        "min_rows": min(slab.rows_per_shard for slab in emb.layout.slabs),
        "compile_seconds": round(seconds, 2),
        "text": compiled.as_text(),
    }


# ---- checks -----------------------------------------------------------------------------------


def check_no_table_is_made(fact):
    """No copy, no gradient and no other array of a table's size: tables are only handed on and
    written into. By induction every table-sized value is then an argument of the step; a second
    use of one after its update would need a copy, which is no allowed opcode."""
    sized = [i for i in table_sized(fact) if i.opcode not in CARRIES]
    wrong = [i.line[:300] for i in sized if num_updates(i) == 0]
    assert not wrong, f"{len(wrong)} table-sized values are made:\n" + "\n".join(wrong)
    moved = sum(array["moved"] for array in fact["arrays"])
    found = sum(map(num_updates, sized))
    assert found == moved, f"{found} updates of {moved} arrays:\n{[i.line[:200] for i in sized]}"


def check_aliased(fact):
    """Every slab and slot of the result lies in the buffer of the argument it came from."""
    size = sum(array["bytes"] for array in fact["arrays"])
    assert size <= fact["aliased_bytes"], (size, fact["aliased_bytes"])
    sizes, aliased = arguments(fact["text"])
    tables = {n for n, size in enumerate(sizes) if size >= fact["min_rows"]}
    assert len(tables) == len(fact["arrays"]), (tables, fact["arrays"])
    assert tables <= aliased, f"arguments {tables - aliased} are not aliased: {fact['text'][:2000]}"


def check_same_temporaries(small, large, slack_bytes=0):
    """Temporaries do not grow with tables, whose arguments do tenfold."""
    sizes = [sum(array["bytes"] for array in fact["arrays"]) for fact in (small, large)]
    # An addressing has a little padding, which is not tenfold.
    assert abs(sizes[1] / sizes[0] - 10) < 0.01, sizes
    assert large["argument_bytes"] - small["argument_bytes"] == sizes[1] - sizes[0]
    temporaries = [fact["temporary_bytes"] for fact in (small, large)]
    assert abs(temporaries[1] - temporaries[0]) <= slack_bytes, temporaries


def check_collectives(fact, num_devices):
    """Addresses, vectors and gradients of each routed slab travel once; nothing else does."""
    counts = count_collectives(fact)
    if num_devices == 1:
        # XLA for CPU keeps sums over one device.
        assert {kind for kind, count in counts.items() if count} <= {"all-reduce"}, counts
        return
    assert counts["all-to-all"] == 2 * fact["routed_slabs"] + fact["routed_trainable"], counts
    # The weight of the batch, the dense gradients, and the loss: each one collective.
    assert counts["all-reduce"] == 3, counts
    # Rows and gradients of each replicated slab; GPUs may gather both, or all, together.
    gathers = 2 * fact["copied_trainable"]
    assert min(gathers, 1) <= counts["all-gather"] <= gathers, counts
    assert counts["reduce-scatter"] == counts["collective-permute"] == 0, counts


# ---- for GPUs ---------------------------------------------------------------------------------


def gpu_programs():
    """Collections and columns of the programs for 8 and 2 x 4 H200, by name."""
    from tests.gpu_target import H200, gpu_devices, h200_mesh

    mesh = h200_mesh()
    two_nodes = js.make_mesh(nodes=2, devices=gpu_devices(H200, num_nodes=2, per_node=4))
    found = {f"{count} features": many_features(mesh, count) for count in NUM_FEATURES}
    for factor in (1, 10):
        for rule in RULES:
            found[f"{rule} x{factor}"] = one_rule(mesh, rule, factor)
        found[f"every_placement x{factor}"] = every_placement(mesh, factor)
        found[f"bfloat16 x{factor}"] = bfloat16(mesh, factor)
    return found | {"2x4": bfloat16(two_nodes, 1)}


def print_gpu_facts():
    """For `tests.gpu_target.run_for_gpu`; the compiler leaves the interpreter to other threads."""
    programs = gpu_programs()
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda program: facts(*program), programs.values())
        print(json.dumps(dict(zip(programs, found, strict=True))))
