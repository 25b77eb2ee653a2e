# SPDX-License-Identifier: Apache-2.0
"""What is checked before a program is built or run: rules, meshes, states, steps."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxsparse.hashing import Hashed
from jaxsparse.layout import Layout
from jaxsparse.optimizers import SparseOptimizer
from jaxsparse.resident import ResidentTable, most_rows
from jaxsparse.row_grads import RowGrads
from jaxsparse.specs import FeatureSpec
from jaxsparse.state import EmbeddingState

MAX_STEP = 2**31 - 2
"""Largest global step: rules count updates as step + 1 in int32."""

STORED_KEYS = "threefry2x32"
"""Kind of key that rows of stored tables are drawn from: it is two words, the same everywhere."""

SLOT_DTYPES = ("float32", "int32")


def check_mesh(mesh: object) -> None:
    """Raises where ``mesh`` is no mesh of devices, or has names XLA cannot take."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"EmbeddingCollection: mesh must be a jax.sharding.Mesh (js.make_mesh()), got {mesh!r}"
        )
    for name in mesh.axis_names:
        if not (isinstance(name, str) and name.isascii() and name.isprintable() and name):
            raise ValueError(
                f"EmbeddingCollection: mesh axes need names of printable ASCII, got {name!r}"
            )


def check_rule(table: str, rule: SparseOptimizer, dim: int) -> None:
    """Raises where a rule does not keep to `SparseOptimizer`'s shapes and dtypes.

    Both functions are traced on abstract rows; nothing is computed.
    """
    shared: Any = rule  # hashable: `TableSpec` has seen to it
    _check_rule(table, shared, dim)


@functools.lru_cache(maxsize=256)
def _check_rule(table: str, rule: Any, dim: int) -> None:
    owner = f"TableSpec {table!r}: optimizer {type(rule).__name__}"
    num_rows, num_distinct = 7, 5

    def slots_of(count: int) -> Any:
        return jax.eval_shape(lambda: rule.init_slots(count, dim))

    slots = slots_of(num_rows)
    if not isinstance(slots, dict):
        raise TypeError(f"{owner}: init_slots must return a dict of arrays, got {slots!r}")
    for name, slot in slots.items():
        shape, dtype = tuple(slot.shape), jnp.dtype(slot.dtype).name
        if shape not in ((num_rows,), (num_rows, dim)) or dtype not in SLOT_DTYPES:
            raise ValueError(
                f"{owner}: slot {name!r} of {num_rows} rows must be [{num_rows}] or "
                f"[{num_rows}, {dim}], {' or '.join(SLOT_DTYPES)}, got {dtype}{list(shape)}"
            )
    rows = jax.ShapeDtypeStruct((num_distinct, dim), jnp.float32)
    rate = jax.ShapeDtypeStruct((num_distinct, 1), jnp.float32)
    before = (rows, slots_of(num_distinct))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    after = jax.eval_shape(rule.update, *before, rows, rate, step)
    want, got = (_described(tree) for tree in (before, after))
    if want != got:
        raise ValueError(
            f"{owner}: update must return (rows, slots) as they came, expected {want}, got {got}"
        )


def _described(tree: Any) -> dict[str, str]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        f"result{jax.tree_util.keystr(path)}": f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in flat
    }


def layout_fingerprint(layout: Layout) -> str:
    """Names the place of every row of every table, and its slots; the same in every process."""
    facts: list[object] = [layout.num_shards]
    for slab in layout.slabs:
        facts += [slab.name, slab.rows_per_shard, slab.trainable, type(slab.optimizer).__name__]
        for block in slab.tables:
            facts += [block.spec.name, block.spec.vocabulary_size]
            facts += [block.placement, block.shard, block.offset, block.rows]
            if isinstance(block.spec, ResidentTable):
                origin = block.spec.origin
                facts += [type(origin.keys).__name__, most_rows(origin), block.spec.default_row]
    text = repr(facts)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def refuse_key_rules(rules: Iterable[tuple[FeatureSpec, Hashed | None, Hashed | None]]) -> None:
    """Raises for the first feature whose ids were packed by another rule.

    Args:
        rules: by feature, the rule of the ids and that of the collection.
    """
    for feature, packed, here in rules:
        if packed != here:
            raise ValueError(
                f"ids of feature {feature.name!r} were packed where {_rule_text(packed)}; in table "
                f"{feature.table.name!r} of this collection {_rule_text(here)}: pack them with it"
            )


def _rule_text(rule: Hashed | None) -> str:
    if rule is None:
        return "keys are rows"
    return f"keys are hashed (seed {rule.seed}, {rule.num_exact_keys} exact keys)"


def float32_rows(table: str, rows: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Values to write into a table, as float32.

    Raises:
        TypeError: they are no real numbers.
        ValueError: one is not finite, or beyond float32.
    """
    given = np.asarray(rows)
    if given.dtype.kind not in "fiu" and given.dtype != jnp.bfloat16:
        raise TypeError(f"write {table!r}: rows must be real numbers, got {given.dtype}")
    with np.errstate(over="ignore"):
        values = given.astype(np.float32)
    bad = ~np.isfinite(values)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"write {table!r}: every value must be a finite float32, got {given[where]} at "
            f"{list(where)}"
        )
    return values


def check_state(state: Any, fingerprint: str) -> None:
    """Raises where a state belongs to another collection, or its buffers were donated."""
    if not isinstance(state, EmbeddingState):
        raise TypeError(f"expected an EmbeddingState, from init, got {type(state).__name__}")
    if state.layout != fingerprint:
        raise ValueError(
            "the state was made by another collection: its tables, placements or mesh differ. "
            "Make one with this collection's init, or load a checkpoint into it"
        )
    check_alive(state)


def check_alive(tree: Any) -> None:
    """Raises where an array was donated: on several devices its use can end the process."""
    for leaf in jax.tree.leaves(tree):
        concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if concrete and leaf.is_deleted():
            raise ValueError(
                "this state was donated to an earlier update; use the one that returned"
            )


def check_row_grads(row_grads: Any, num_rows: tuple[int, ...]) -> None:
    """Raises where a sparse gradient belongs to another collection."""
    if not isinstance(row_grads, RowGrads):
        raise TypeError(f"expected RowGrads, from row_grads, got {type(row_grads).__name__}")
    if row_grads.num_rows != num_rows:
        raise ValueError(
            "the row gradients were made by another collection: rows per device of its slabs are "
            f"{num_rows}, theirs {row_grads.num_rows}"
        )


def checked_step(step: Any) -> jax.Array:
    """A global step as an int32 scalar.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is negative or too large for int32.
    """
    if isinstance(step, jax.Array):
        if not jnp.issubdtype(step.dtype, jnp.integer):
            raise TypeError(f"step must be an integer, got {step.dtype}")
        converted: jax.Array = jnp.asarray(step, jnp.int32)
        return converted
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an integer, got {step!r}") from None
    if not 0 <= number <= MAX_STEP:
        raise ValueError(f"step must be in 0..{MAX_STEP}, got {number}")
    return jnp.asarray(number, jnp.int32)


def check_key(key: Any, is_stored: bool = False) -> None:
    """Raises where ``key`` is not a typed JAX key, or not one that a row store can go on with."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(f"init needs a typed key such as jax.random.key(0), got {key!r}")
    if is_stored and str(jax.random.key_impl(key)) != STORED_KEYS:
        raise ValueError(
            f"init of tables with Dynamic keys or tiers needs a key of {STORED_KEYS}, such as "
            f"jax.random.key(0, impl={STORED_KEYS!r}): rows are drawn from its two words at any "
            f"time; got {jax.random.key_impl(key)}"
        )
