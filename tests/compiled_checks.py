# SPDX-License-Identifier: Apache-2.0
"""The compiled train step as facts that can be asserted: memory, aliasing, instructions.

Programs are compiled from abstract arguments, so tables of any size cost nothing, and for GPUs
that are not there (`tests.gpu_target`): the environment that compiles those has no pytest, so this
module does without and `print_gpu_facts` hands what it found to the tests as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse as js
from jaxsparse.packed_batch import PackedBatch
from jaxsparse.prepared import prepare_ids
from jaxsparse.train.step import state_spec, train_step
from tests import program_cache

BATCH = 64
NUM_DENSE = 3
NUM_FEATURES = (13, 26, 100)

CAPACITY = 1 << 16
"""More than any batch needs: the top rung, for the need depends on where its rows lie."""

NUM_KEYS = 1000
"""Keys of the batch are below."""

MIN_ROWS = 1_000_000
"""Rows a device holds of every table: more than any other array of these steps has elements, and
so many that GPU schedules, which weigh arrays by their size, do not change with ten times more."""

GPU_SLACK_BYTES = 4096
"""Most by which temporaries may change with the schedule where a GPU step has several slabs: they
are then of different size now and then, by multiples of 256 bytes and in either direction."""

# ---- programs ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HeavyBall:
    """A rule of the user's own."""

    learning_rate: float = dataclasses.field(compare=False)

    def init_slots(self, num_rows, dim):
        return {"velocity": jnp.zeros((num_rows, dim), jnp.float32)}

    def update(self, w, slots, g, lr, step):
        velocity = 0.5 * slots["velocity"] + g
        return w - lr * velocity, {"velocity": velocity}


class Tower(nnx.Module):
    """A small dense model whose number of parameters does not depend on that of features."""

    def __init__(self, width):
        self.hidden = nnx.Linear(width, 8, rngs=nnx.Rngs(0))
        self.logit = nnx.Linear(8 + NUM_DENSE, 1, rngs=nnx.Rngs(1))

    def __call__(self, acts, dense, train=False):
        flat = [act.reshape(act.shape[0], -1) for act in acts.values()]
        hidden = jax.nn.relu(self.hidden(jnp.concatenate(flat, axis=1)))
        return self.logit(jnp.concatenate([hidden, dense], axis=1))[:, 0]


RULES = {
    "sgd": js.SGD(0.1),
    "adagrad": js.Adagrad(0.1, l2=0.01),
    "rowwise_adagrad": js.RowwiseAdagrad(0.1, weight_decay=0.01),
    "adam": js.Adam(0.1),
    "adam_per_row": js.Adam(0.1, per_row_count=True),
    "ftrl": js.Ftrl(0.1),
    "heavy_ball": HeavyBall(0.1),
}


def collection(mesh, tables, ragged):
    """One feature a table; every ``ragged``-th is ragged and weighted, the others one id."""
    features = [js.FeatureSpec(f"f_{table.name}", table, combiner="mean") for table in tables]
    emb = js.EmbeddingCollection(
        features, mesh=mesh, exchange=js.Exchange(capacity=CAPACITY), device_bytes=2**40
    )
    rng = np.random.default_rng(0)
    columns = {}
    for index, feature in enumerate(features):
        if index % ragged == 0:
            values = rng.integers(0, NUM_KEYS, 2 * BATCH)
            weights = np.ones(values.size, np.float32) if index % (2 * ragged) == 0 else None
            columns[feature.name] = js.Ragged.from_lengths(values, np.full(BATCH, 2), weights)
        else:
            columns[feature.name] = rng.integers(0, NUM_KEYS, BATCH)
    return emb, columns


def sharded(mesh, name, rule, factor, dim=16, **options):
    """A table of which every device holds a part."""
    size = mesh.size * MIN_ROWS * factor
    return js.TableSpec(
        name,
        vocabulary_size=size,
        embedding_dim=dim,
        optimizer=rule,
        placement="sharded",
        **options,
    )


def whole(placement, name, rule, factor, dim=16, **options):
    """A table that is not cut."""
    return js.TableSpec(
        name,
        vocabulary_size=MIN_ROWS * factor,
        embedding_dim=dim,
        optimizer=rule,
        placement=placement,
        **options,
    )


def one_rule(mesh, rule, factor):
    """A single sharded table."""
    return collection(mesh, [sharded(mesh, "t", RULES[rule], factor)], ragged=1)


def every_rule(mesh, factor):
    """A sharded slab of each rule."""
    tables = [
        sharded(mesh, name, rule, factor, dim)
        for dim, (name, rule) in enumerate(RULES.items(), start=4)
    ]
    return collection(mesh, tables, ragged=2)


def every_placement(mesh, factor):
    """Replicated and single tables, a frozen one, and two tables in one slab."""
    tables = [
        whole("replicated", "copied", js.Adagrad(0.1), factor, 4),
        whole("replicated", "copied_too", js.Adam(0.1, per_row_count=True), factor, 5),
        whole("single", "single", js.Ftrl(0.1), factor, 6),
        sharded(mesh, "frozen", js.SGD(0.1), factor, 7, trainable=False),
        sharded(mesh, "first", js.RowwiseAdagrad(0.1), factor, 8),
        sharded(mesh, "second", js.RowwiseAdagrad(0.2), factor, 8),
        whole("single", "third", js.RowwiseAdagrad(0.2), factor, 8),
    ]
    return collection(mesh, tables, ragged=3)


def bfloat16(mesh, factor):
    """Half-precision tables."""
    tables = [
        sharded(mesh, "cut", js.RowwiseAdagrad(0.1), factor, dtype="bfloat16"),
        whole("replicated", "copied", js.RowwiseAdagrad(0.1), factor, dtype="bfloat16"),
    ]
    return collection(mesh, tables, ragged=2)


def many_features(mesh, count):
    """``count`` features, each of its own table, in one sharded and one replicated slab."""
    rule = js.Adagrad(0.1)
    tables = [
        whole("replicated", f"t{index}", rule, 1, 8)
        if index % 4 == 0
        else sharded(mesh, f"t{index}", rule, 1, 8)
        for index in range(count)
    ]
    return collection(mesh, tables, ragged=2)


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


# ---- reading ----------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b(?:pred|[suf]\d+|bf16|f8\w*|c\d+)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")


def _num_elements(dims):
    """Of dimensions as text, ``3,4``."""
    return math.prod(int(dim) for dim in dims.split(",") if dim)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a compiled program."""

    name: str
    opcode: str
    result: str
    """Shape, or tuple of shapes."""
    line: str

    @property
    def most_elements(self) -> int:
        """Elements of the largest array of the result."""
        return max(map(_num_elements, _ARRAY.findall(self.result)), default=0)


def instructions(text):
    """All instructions of all computations, those inside fusions and loops too."""
    found = []
    for line in text.splitlines():
        match = _INSTRUCTION.match(_COMMENT.sub("", line))
        if match is None:
            continue
        rest = match[3]
        if rest.startswith("("):
            end = _end_of_tuple(rest)
            result, rest = rest[:end], rest[end:]
        else:
            result, _, rest = rest.partition(" ")
        opcode = rest.strip().partition("(")[0]
        found.append(Instruction(match[2], opcode, result, line.strip()))
    return found


def _end_of_tuple(text):
    """Where the parenthesis closes that ``text`` begins with."""
    depth = 0
    for end, char in enumerate(text, start=1):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return end
    raise ValueError(f"no end: {text}")


CARRIES = {"parameter", "get-tuple-element", "tuple", "bitcast", "fusion", "while", "call"}
"""Opcodes that hand a table on. What a fusion, loop or call does is read inside of it."""

UPDATES = {"scatter", "dynamic-update-slice"}
"""Opcodes that write rows into the table they are given, in place unless there is a copy."""


def num_updates(instruction):
    """Arrays that an instruction updates: one, or those that a kernel is given to write into.

    A kernel that also has a result of its own counts as none.
    """
    if instruction.opcode in UPDATES:
        return 1
    if instruction.opcode != "custom-call":
        return 0
    aliased = len(re.findall(r"\{\d*\}: \(\d+, \{\}", instruction.line))
    return aliased if aliased == len(_ARRAY.findall(instruction.result)) else 0


COLLECTIVES = ("all-to-all", "all-reduce", "all-gather", "reduce-scatter", "collective-permute")


def table_sized(fact):
    """Instructions whose result holds an array of at least a table's number of rows."""
    return [i for i in instructions(fact["text"]) if i.most_elements >= fact["min_rows"]]


def count_collectives(fact):
    """Number of collectives by kind; a start and its done are one."""
    counts = Counter(i.opcode.removesuffix("-start") for i in instructions(fact["text"]))
    return {kind: counts[kind] for kind in COLLECTIVES}


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
    header = _COMMENT.sub("", fact["text"].partition("\n")[0])
    arguments = _ARRAY.findall(re.search(r"entry_computation_layout=\{\((.*?)\)->", header)[1])
    aliased = {int(n) for n in re.findall(r": \((\d+), \{\}, (?:may|must)-alias\)", header)}
    tables = {n for n, a in enumerate(arguments) if _num_elements(a) >= fact["min_rows"]}
    assert len(tables) == len(fact["arrays"]), (tables, fact["arrays"])
    assert tables <= aliased, f"arguments {tables - aliased} are not aliased: {header[:2000]}"


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
