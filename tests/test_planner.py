# SPDX-License-Identifier: Apache-2.0
"""Plans: placements, bytes that agree with the arrays, balanced load, refusals."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse.layout import make_layout
from jaxsparse.optimizers import SGD, Adagrad, Adam, Ftrl, RowwiseAdagrad
from jaxsparse.planner import (
    REPLICATED_MAX_BYTES,
    Plan,
    load_of,
    plan,
    slot_bytes,
    weight_bytes,
)
from jaxsparse.specs import FeatureSpec, TableSpec


def _table(name: str, rows: int = 1000, dim: int = 16, **kwargs: object) -> TableSpec:
    return TableSpec(name, vocabulary_size=rows, embedding_dim=dim, **kwargs)  # type: ignore[arg-type]


def _single(name: str, rows: int = 1000, **kwargs: object) -> TableSpec:
    return _table(name, rows, placement="single", **kwargs)


MIXED = [
    _table("big", 1_000_003),
    _table("other_rule", 200_000, optimizer=Adam(0.1, per_row_count=True)),
    _table("half", 100_000, dim=32, dtype="bfloat16", optimizer=RowwiseAdagrad(0.1)),
    _table("frozen", 50_000, trainable=False),
    _table("tiny", 7),
    _table("copy", 3000, placement="replicated", optimizer=Ftrl(0.1)),
    _single("s0", 30_000),
    _single("s1", 20_000),
    _single("s2", 10_000, optimizer=SGD(0.1)),
]


def test_auto_replicates_small_tables_and_shards_the_rest() -> None:
    rows = REPLICATED_MAX_BYTES // (16 * 4)
    made = plan([_table("small", rows), _table("large", rows + 1), _single("s")], 4)
    assert dict(made.placements) == {"small": "replicated", "large": "sharded", "s": "single"}
    assert dict(made.shard_of) == {"s": 0}


def test_auto_on_one_device_is_sharded() -> None:
    made = plan([_table("small", 3), _table("copy", 3, placement="replicated")], 1)
    assert dict(made.placements) == {"small": "sharded", "copy": "replicated"}


def test_c20_slots_are_sized_by_the_rule_not_by_the_weights_dtype() -> None:
    table = _table("t", 1000, dtype="bfloat16", optimizer=Adam(0.1))
    assert weight_bytes(table, 1000) + slot_bytes(table, 1000) == 160_000
    (held,) = plan([table], 1).bytes_per_device
    assert held == 160_000
    slots = table.optimizer.init_slots(1000, 16)
    real = jnp.zeros((1000, 16), jnp.bfloat16).nbytes + sum(s.nbytes for s in slots.values())
    assert held == real


@dataclasses.dataclass(frozen=True)
class _Lamb:
    """A rule of the user's own, with slots of three shapes and dtypes."""

    learning_rate: float = 0.1

    def init_slots(self, num_rows: int, dim: int) -> dict[str, jax.Array]:
        shape = num_rows, dim
        count = jnp.zeros(num_rows, jnp.int32)
        return {"m": jnp.zeros(shape), "v": jnp.zeros(shape), "count": count}

    def update(self, w, slots, g, lr, step):  # type: ignore[no-untyped-def]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("rule", "slot_bytes_per_row"),
    [
        (SGD(0.1), 0),
        (Adagrad(0.1), 64),
        (RowwiseAdagrad(0.1), 4),
        (Adam(0.1), 128),
        (Adam(0.1, per_row_count=True), 132),
        (Ftrl(0.1), 128),
        (_Lamb(), 132),
    ],
    ids=lambda value: type(value).__name__,
)
def test_slot_bytes_of_every_rule(rule: object, slot_bytes_per_row: int) -> None:
    for dtype in ("float32", "bfloat16"):
        table = _table("t", optimizer=rule, dtype=dtype)
        assert slot_bytes(table, 1000) == 1000 * slot_bytes_per_row
    assert slot_bytes(_table("t", optimizer=rule, trainable=False), 1000) == 0


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_bytes_are_those_of_the_arrays(num_shards: int) -> None:
    made = plan(MIXED, num_shards)
    real = 0
    for slab in make_layout(MIXED, num_shards, made).slabs:
        real += np.zeros((slab.rows_per_shard, slab.dim), slab.dtype).nbytes
        if slab.trainable:
            slots = slab.optimizer.init_slots(slab.rows_per_shard, slab.dim)
            real += sum(s.nbytes for s in slots.values())
    assert made.bytes_per_device == (real,) * num_shards
    assert made.layout == make_layout(MIXED, num_shards, made)


def test_bytes_by_kind() -> None:
    tables = [
        _table("a", 1000, placement="sharded"),
        _single("s", 10),
        _table("r", 4, placement="replicated"),
    ]
    made = plan(tables, 2)
    rows = 500 + 10 + 4
    by_kind = dict(made.bytes_by_kind)
    for what in ("weights", "slots"):
        assert by_kind["sharded", what] == (500 * 64,) * 2
        assert by_kind["single", what] == (10 * 64, 0)
        assert by_kind["replicated", what] == (4 * 64,) * 2
    assert by_kind["padding", ""] == (0, 10 * 128)
    assert made.bytes_per_device == (rows * 128,) * 2


def test_planned_load_is_within_four_thirds_of_the_best() -> None:
    rng = np.random.default_rng(7)
    worst = 0.0
    for case in range(100):
        m, k = int(rng.integers(1, 11)), int(rng.integers(2, 4))
        loads = rng.integers(1, 100, m) if case % 2 else rng.pareto(1.0, m) + 0.01
        tables = [_single(f"t{i}") for i in range(m)]
        made = plan(tables, k, load={t.name: x for t, x in zip(tables, loads, strict=True)})
        choices = np.array(list(itertools.product(range(k), repeat=m)))
        best = np.max([(choices == s) @ loads for s in range(k)], axis=0).min()
        planned = [sum(loads[i] for i in range(m) if made.shard_of[f"t{i}"] == s) for s in range(k)]
        np.testing.assert_allclose(planned, made.load, rtol=1e-12)
        worst = max(worst, max(planned) / best)
    print(f"worst planned load / best possible: {worst:.3f}")
    assert worst <= 4 / 3


def test_load_counts_every_table() -> None:
    tables = [_table("a"), _single("s"), _single("t"), _table("r", placement="replicated")]
    made = plan(tables, 2, load={"a": 10.0, "s": 5.0, "t": 3.0, "r": 2.0})
    assert made.load == (11.0, 9.0)
    assert made.balance == pytest.approx(1.1)
    assert plan(tables, 2, load=dict.fromkeys("astr", 0.0)).balance == 1.0


def test_tables_nobody_asks_for_are_spread_by_rows() -> None:
    tables = [_single(f"t{i}", rows) for i, rows in enumerate([50, 40, 30, 20])]
    made = plan(tables, 2, load={t.name: 0.0 for t in tables})
    assert made.layout.slabs[0].rows_per_shard == 70


def test_memory_comes_before_load_where_only_that_fits() -> None:
    """By load the two long tables share a shard; by rows they do not."""
    rows = {"hot": 10, "long0": 1000, "long1": 1000}
    tables = [_single(name, count) for name, count in rows.items()]
    load = {"hot": 10.0, "long0": 1.0, "long1": 1.0}
    free = plan(tables, 2, load=load)
    assert free.shard_of["long0"] == free.shard_of["long1"] != free.shard_of["hot"]
    tight = plan(tables, 2, load=load, device_bytes=1100 * 128)
    assert tight.shard_of["long0"] != tight.shard_of["long1"]
    assert max(tight.bytes_per_device) == 1010 * 128


def test_what_cannot_fit_is_refused_with_need_and_have() -> None:
    table = _table("whale", 1_000_000)
    need = 125_000 * 16 * 8 + 16 * 8  # the order of 1,000,000 rows has a few empty places
    with pytest.raises(
        ValueError,
        match=r"each of the 8 devices needs 15\.3 MiB \(16,0.* bytes\) and has 9\.8 KiB "
        r"\(10,000 bytes\); largest on a device: 'whale' sharded 15\.3 MiB.*Use more devices",
    ):
        plan([table, _table("small", 3)], 8, device_bytes=10_000)
    assert plan([table], 8, device_bytes=need).bytes_per_device[0] <= need


def test_too_many_rows_for_a_shard() -> None:
    with pytest.raises(ValueError, match=r"needs 5,000,.* rows on a shard, a shard can have"):
        plan([_table("t", 5 * 10**9)], 1)
    with pytest.raises(ValueError, match="needs 3,000,"):
        plan([_single("t", 3 * 10**9)], 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shards": 0}, "num_shards must be at least 1, got 0"),
        ({"load": {"a": 1.0}}, r"lacks \['b'\], does not know \[\]"),
        ({"load": {"a": 1.0, "b": 1.0, "c": 1.0}}, r"lacks \[\], does not know \['c'\]"),
        ({"load": {"a": 1.0, "b": -1.0}}, "load of 'b' must be finite and >= 0, got -1.0"),
        ({"load": {"a": float("nan"), "b": 1.0}}, "load of 'a' must be finite"),
        ({"tables": [_table("a"), _table("a", 5)]}, r"must be unique, \['a'\] are not"),
    ],
)
def test_malformed_arguments(arguments: dict[str, object], message: str) -> None:
    given = {"tables": [_table("a"), _table("b")], "num_shards": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        plan(**given)  # type: ignore[arg-type]


def test_load_of_features() -> None:
    item, user = _table("item", dim=8), _table("user", dim=4)
    features = [
        FeatureSpec("shown", item),
        FeatureSpec("clicked", item, max_length=20),
        FeatureSpec("user", user),
    ]
    assert load_of(features) == {"item": 21 * 8.0, "user": 4.0}
    assert load_of(features, {"clicked": 2.5}) == {"item": 3.5 * 8, "user": 4.0}


def test_describe() -> None:
    made: Plan = plan(MIXED, 8, device_bytes=80 * 2**30)
    text = made.describe()
    print(text)
    lines = text.splitlines()
    assert lines[0] == "9 tables in 7 slabs on 8 devices, each with 80.0 GiB"
    assert lines[2].split()[:4] == ["table", "placement", "rows", "dim"]
    assert ["s0", "single", "on", "0", "30,000"] in [line.split()[:5] for line in lines]
    devices = [line.split()[0] for line in lines if line[:1].isdigit()][1:]
    assert devices == ["0", "1", "2", "3-7"]  # alike devices share a line
    assert f"({sum(made.bytes_per_device):,})" in lines[-2]
    assert lines[-2].endswith(f"load balance (fullest / mean): {made.balance:.3f}")
    assert lines[-1].startswith("load: embedding values read per sample (ids x dim)")
    assert plan([_table("a", 2)], 1).describe().startswith("1 table in 1 slab on 1 device\n")


def test_describe_counts_the_tables_it_leaves_out() -> None:
    text = plan([_table(f"t{i}", 2) for i in range(50)], 2).describe()
    assert "... and 10 more" in text


def test_no_tables() -> None:
    made = plan([], 3)
    assert made.bytes_per_device == (0, 0, 0) and made.balance == 1.0
    assert made.describe().startswith("0 tables in 0 slabs on 3 devices")
