# SPDX-License-Identifier: Apache-2.0
"""Combinations of options for the exactness tests, and the collections and batches they mean.

A *program* is one collection on one mesh, compiled once: it has the levels of `PROGRAM` and a few
features, each with its levels of `FEATURE`. A *combination* is one feature with its program.

Frozen tables never move and bfloat16 ones are compared loosely: as levels of a factor they would
hide what they are crossed with. So every combination trains a float32 table (`PLAIN`), and some
programs of the covering array have one table more, of `VEILED`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np

import jaxsparse as js

PROGRAM = {
    "mesh": ("1", "2", "3", "4", "8", "2x2", "2x4"),
    "rung": ("tight", "slack", "top"),
    "call": ("jit", "shard_map"),
    "batch": ("even", "uneven", "one"),
}
FEATURE = {
    "rule": ("sgd", "adagrad", "rowwise_adagrad", "adam", "adam_per_row", "ftrl", "momentum"),
    "rate": ("float", "schedule"),
    "decay": (False, True),
    "placement": ("sharded", "replicated", "single", "auto"),
    "keys": ("identity", "ignore", "hashed"),
    "combiner": ("sum", "mean", "sqrtn", None),
    "form": ("one", "matrix", "padded", "ragged", "weighted", "weighted_padded"),
    "truncate": ("error", "head", "tail"),
    "beside": ("nothing", "shared", "stacked"),
}
FACTORS = {**PROGRAM, **FEATURE}
PLAIN = {"dtype": "float32", "trainable": True}
VEILED = ({"dtype": "float32", "trainable": False}, {"dtype": "bfloat16", "trainable": True})
SIZES = ((70_001, 4), (300, 8), (1_000, 5))
"""Rows and dim of the tables of combinations."""
VEILED_SIZE = (200, 6)

PADDING = 999_999_999
IGNORED = 888_888_888
MAX_LENGTH = 4
"""Where bags are cut: a power of 4, so that 1 / sqrt(length) is exact."""


# ---- covering array ---------------------------------------------------------------------------


def pairs_of(row):
    """All pairs of (factor, level) in ``row``, factors in the order of `FACTORS`."""
    assigned = [(name, row[name]) for name in FACTORS if name in row]
    return set(itertools.combinations(assigned, 2))


def all_pairs():
    """Every pair of levels of two different factors."""
    levels = [[(name, level) for level in FACTORS[name]] for name in FACTORS]
    return {
        pair
        for one, other in itertools.combinations(levels, 2)
        for pair in itertools.product(one, other)
    }


def _greedy_row(rng, fixed, uncovered):
    """A row that agrees with ``fixed`` and covers many uncovered pairs."""
    row = dict(fixed)
    usable = [p for p in uncovered if all(row.get(name, level) == level for name, level in p)]
    if usable:
        row.update(rng.choice(sorted(usable, key=repr)))
    names = [name for name in FACTORS if name not in row]
    rng.shuffle(names)
    for name in names:
        levels = list(FACTORS[name])
        rng.shuffle(levels)
        row[name] = max(levels, key=lambda x: len(pairs_of({**row, name: x}) & uncovered))
    return row


def covering_programs(seed, tries=8):
    """Programs of three `PLAIN` features, whose combinations cover every pair of levels, and in
    some one `VEILED`: frozen and bfloat16 tables, each with every rule and placement."""
    rng = random.Random(seed)
    uncovered = all_pairs()
    programs = []
    while uncovered:
        rows = []
        for size in SIZES:
            fixed = {name: rows[0][name] for name in PROGRAM} if rows else {}
            found = [_greedy_row(rng, fixed, uncovered) for _ in range(tries)]
            best = max(found, key=lambda row: len(pairs_of(row) & uncovered))
            rows.append({**best, **PLAIN, "size": size})
            uncovered -= pairs_of(best)
        programs.append(rows)
    for index in range(len(VEILED) * len(FEATURE["rule"])):
        # Two of them in the first programs, which always run, the others in the last.
        rows = programs[1 - index]
        rows.append(_veiled_row(rng, rows[0], index))
    return programs


def _veiled_row(rng, program, index):
    turn, kind = divmod(index, len(VEILED))
    levels = {name: rng.choice(levels) for name, levels in FEATURE.items()}
    levels |= {name: FEATURE[name][turn % len(FEATURE[name])] for name in ("rule", "placement")}
    common = {name: program[name] for name in PROGRAM}
    return {**common, **levels, **VEILED[kind], "size": VEILED_SIZE}


def random_programs(seed, count):
    """Programs of one `PLAIN` feature, every level and the size drawn uniformly."""
    rng = random.Random(seed)
    return [
        [
            {
                **{name: rng.choice(levels) for name, levels in FACTORS.items()},
                **PLAIN,
                "size": rng.choice(SIZES),
            }
        ]
        for _ in range(count)
    ]


# ---- specs ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Momentum:
    """A rule of the user's own: heavy ball."""

    learning_rate: object
    l2: float = 0.0

    def init_slots(self, num_rows, dim):
        return {"velocity": jnp.full((num_rows, dim), 0.125, jnp.float32)}

    def update(self, w, slots, g, lr, step):
        velocity = 0.5 * slots["velocity"] + g + self.l2 * w
        return w - lr * velocity, {"velocity": velocity}


def momentum_oracle(l2):
    def rule(w, slots, g, lr, step):
        velocity = 0.5 * slots["velocity"] + g + l2 * w
        return w - lr * velocity, {"velocity": velocity}

    return rule


def halving(step):
    """A schedule of powers of two."""
    return jnp.where(step < 2, 0.25, 0.125)


RULES = {
    "sgd": (js.SGD, "sgd", {}),
    "adagrad": (js.Adagrad, "adagrad", {}),
    "rowwise_adagrad": (js.RowwiseAdagrad, "rowwise_adagrad", {}),
    "adam": (js.Adam, "adam", {}),
    "adam_per_row": (js.Adam, "adam", {"per_row_count": True}),
    "ftrl": (js.Ftrl, "ftrl", {"l1": 0.05}),
    "momentum": (Momentum, "momentum", {}),
}


def hyperparameters(row):
    """Keyword arguments of the rule, for package and oracle alike."""
    given = dict(RULES[row["rule"]][2])
    if row["decay"]:
        given["l2"] = 0.03125
        if row["rule"] in ("sgd", "adagrad", "rowwise_adagrad", "adam", "adam_per_row"):
            given |= {"weight_decay": 0.0625, "catch_up_decay": row["rule"] == "rowwise_adagrad"}
    return given


def rate_of(row, factor=1.0):
    return halving if row["rate"] == "schedule" else 0.25 * factor


def table_of(row, name, vocabulary_size, dim, factor=1.0):
    keys = {
        "identity": js.Identity(),
        "ignore": js.Identity(out_of_range="ignore"),
        "hashed": js.Hashed(seed=7),
    }
    return js.TableSpec(
        name,
        vocabulary_size=vocabulary_size,
        embedding_dim=dim,
        optimizer=RULES[row["rule"]][0](rate_of(row, factor), **hyperparameters(row)),
        keys=keys[row["keys"]],
        placement=row["placement"],
        dtype=row["dtype"],
        trainable=row["trainable"],
    )


def oracle_table_of(row, dim, factor=1.0):
    """The same for `OracleCollection`, but for the rows."""
    given, rule = hyperparameters(row), RULES[row["rule"]][1]
    table = {"dim": dim, "learning_rate": rate_of(row, factor), "trainable": row["trainable"]}
    if rule == "momentum":
        slots = {"velocity": np.full(dim, 0.125)}
        return {**table, "rule": momentum_oracle(given.get("l2", 0.0)), "slots": slots}
    return {**table, "rule": rule, **given}


def feature_of(row, name, table):
    pads = row["form"] in ("padded", "weighted_padded")
    cut = row["truncate"] != "error"
    max_length = 16 if row["combiner"] is None else None
    return js.FeatureSpec(
        name,
        table,
        combiner=row["combiner"],
        max_length=MAX_LENGTH if cut else max_length,
        truncate=row["truncate"],
        padding_id=PADDING if pads else None,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A program: its collection, and the combination each feature and table comes from."""

    emb: js.EmbeddingCollection
    rows: dict
    """Levels by feature."""
    oracle_tables: dict


def build(program, mesh, exchange=None):
    """The collection of a program's features, with what stands beside them."""
    features, rows, tables = [], {}, {}
    for row, letter in zip(program, "abcd", strict=False):
        size, dim = row["size"]
        table = table_of(row, f"t_{letter}", size, dim)
        features.append(feature_of(row, letter, table))
        rows[letter] = row
        tables[table.name] = oracle_table_of(row, dim)
        if row["beside"] == "nothing":
            continue
        other, twin = table, {**row, **_twin(row)}
        if row["beside"] == "stacked":
            other = table_of(row, f"u_{letter}", 50, dim, factor=0.5)
            tables[other.name] = oracle_table_of(row, dim, factor=0.5)
        features.append(feature_of(twin, letter * 2, other))
        rows[letter * 2] = twin
    emb = js.EmbeddingCollection(features, mesh=mesh, exchange=exchange or js.Exchange())
    return Case(emb, rows, tables)


def _twin(row):
    """Another combiner and form for the second feature of a slab."""
    combiners = FEATURE["combiner"]
    combiner = combiners[(combiners.index(row["combiner"]) + 1) % len(combiners)]
    return {
        "combiner": combiner,
        "form": "weighted" if row["form"] in ("one", "matrix", "ragged") else "one",
    }


def make_mesh(name):
    if "x" not in name:
        return js.make_mesh(devices=jax.devices()[: int(name)])
    nodes, size = map(int, name.split("x"))
    return js.make_mesh(nodes=nodes, devices=jax.devices()[: nodes * size])


# ---- batches ----------------------------------------------------------------------------------

SKEWS = ("uniform", "zipf", "one_shard", "one_row")
"""Skew of the keys of successive steps."""


def num_samples(row, num_devices):
    even = -(-16 // num_devices) * num_devices
    return {"even": even, "uneven": even - 1, "one": 1}[row["batch"]]


def bag_shapes(rng, row, count):
    """Per bag a list of booleans: True is a key to look up, False one that stands for nothing.

    Bags that ``mean`` and ``sqrtn`` divide by their length end up with 0, 1, 4 or 16 ids under
    SGD: then results of dyadic inputs stay dyadic. At least one key is looked up.
    """
    holes = row["form"] in ("padded", "weighted_padded") or row["keys"] == "ignore"
    cut = row["truncate"] != "error"
    dyadic = row["rule"] == "sgd" and row["combiner"] in ("mean", "sqrtn")
    width = {"one": 1, "matrix": 6 if cut else 4, "padded": 6}.get(row["form"])
    shapes = []
    for _ in range(count):
        choices = (0, 1, 4, 16) if dyadic else (0, 1, 2, 3, 5, 16)
        if dyadic and cut:
            choices = (0, 1, 4, 7)
        if width is not None:
            choices = [n for n in choices if n <= width] if holes else [width]
        real = int(rng.choice(choices))
        missing = width - real if width is not None else int(rng.integers(0, 3)) * holes
        missing = min(missing, 16 - real) if row["combiner"] is None and width is None else missing
        shapes.append(list(rng.permutation([True] * real + [False] * missing)))
    if not any(map(any, shapes)):
        return bag_shapes(rng, row, count)
    return shapes


def draw_keys(rng, case, feature, skew, count):
    """Valid keys of one feature, as skewed as asked."""
    table = case.emb.feature_specs[feature].table
    size = table.vocabulary_size
    if skew == "uniform":
        return rng.integers(0, size, count)
    if skew == "zipf":
        return (rng.zipf(1.3, count) - 1) % size
    if skew == "one_row":
        return np.full(count, rng.integers(0, size))
    slab, index = case.emb.layout.find(table.name)
    keys = np.arange(min(size, 4000))
    rows = table.keys.rows(keys, size)
    shard, _ = slab.tables[index].locate(rows, case.emb.num_shards)
    return rng.choice(keys[shard == shard[rng.integers(keys.size)]], count)


def make_batch(rng, case, shapes, skew):
    """One batch for `pack`, and the same for the oracle, with rows in the place of keys.

    Args:
        rng: draws keys and weights.
        case: the program.
        shapes: `bag_shapes` by feature.
        skew: one of `SKEWS`.
    """
    features, oracle_batch = {}, {}
    for name, row in case.rows.items():
        lengths = [len(bag) for bag in shapes[name]]
        real = np.array([r for bag in shapes[name] for r in bag], bool)
        keys = np.full(real.size, PADDING)
        if row["keys"] == "ignore":
            pads = row["form"] in ("padded", "weighted_padded")
            keys = np.where(rng.random(real.size) < 0.5 * pads, PADDING, IGNORED)
        keys[real] = draw_keys(rng, case, name, skew, int(real.sum()))
        weights = None
        if row["form"] in ("weighted", "weighted_padded"):
            weights = rng.choice(np.float32([-1, 0, 0.5, 1, 1.5]), real.size)
        features[name] = _as_input(row, keys, lengths, weights)
        table = case.emb.feature_specs[name].table
        rows = np.full(real.size, -1)
        rows[real] = table.keys.rows(keys[real], table.vocabulary_size)
        bags = _split(rows, lengths)
        oracle_batch[name] = bags if weights is None else (bags, _split(weights, lengths))
    return features, oracle_batch


def _as_input(row, keys, lengths, weights):
    if row["form"] == "one":
        return keys.astype(np.int32)
    if row["form"] in ("matrix", "padded"):
        return keys.reshape(len(lengths), -1)
    return js.Ragged.from_lengths(keys, lengths, weights)


def _split(flat, lengths):
    return [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]


def oracle_feature_of(case, name):
    spec = case.emb.feature_specs[name]
    return {
        "name": name,
        "table": spec.table.name,
        "combiner": spec.combiner,
        "max_length": spec.max_length,
        "truncate": spec.truncate,
        "padding_id": -1,
    }
