# SPDX-License-Identifier: Apache-2.0
"""What jaxsparse must compute, in numpy float64: dicts of rows and loops, no code of the package.

Written from the formulas, to be read and believed, not to be fast. ``tests/test_oracle.py`` checks
it by hand-computed numbers and that it imports numpy and the standard library only.

A batch is ``{feature: bags}`` or ``{feature: (bags, weights)}``: a list of lists of keys, and a
list of lists of floats of the same lengths.
"""

from __future__ import annotations

import collections
import math

import numpy as np

# Hyper-parameters of each rule and their defaults; `learning_rate` has none.
DECAY = {"l2": 0.0, "weight_decay": 0.0, "catch_up_decay": False}
RULES = {
    "sgd": DECAY,
    "adagrad": {**DECAY, "initial_accumulator": 0.1, "eps": 1e-8},
    "rowwise_adagrad": {**DECAY, "initial_accumulator": 0.1, "eps": 1e-8},
    "adam": {**DECAY, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "per_row_count": False},
    "ftrl": {"beta": 1.0, "l1": 0.0, "l2": 0.0},
}

Id = collections.namedtuple("Id", "position place key weight")
"""An id that is looked up: its index in the user's flat values, its place in the bag's result (of
use where there is no combiner), its key, its weight."""


# ---- comparison -------------------------------------------------------------------------------


def assert_scaled(got, want, abs_terms):
    """A float32 sum: ``|got - want| <= 1e-6 * sum of |terms|``, element by element."""
    tiny = float(np.finfo(np.float32).tiny)
    _assert_within(got, want, 1e-6 * np.asarray(abs_terms, np.float64) + tiny)


def assert_rows(got, want, step_size):
    """Moved rows: within 1e-5 of the step's size and 2 float32 ulp of the row.

    Args:
        got: ``[..., D]`` float32.
        want: ``[..., D]`` float64.
        step_size: size of all steps since the rows were equal; as ``want`` or broadcastable.
    """
    ulp = np.spacing(np.abs(np.asarray(want)).astype(np.float32)).astype(np.float64)
    _assert_within(got, want, 1e-5 * np.asarray(step_size, np.float64) + 2 * ulp)


def _assert_within(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, the oracle has {want.shape}"
    if got.size == 0:
        return
    tolerance = np.broadcast_to(tolerance, want.shape)
    excess = np.abs(got - want) / tolerance
    excess = np.where(np.isnan(excess), np.inf, excess)  # a NaN is never close
    at = tuple(int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
    assert excess[at] <= 1.0, (
        f"{int((excess > 1).sum())} of {excess.size} differ; worst at {at}: "
        f"got {got[at]!r}, want {want[at]!r}, tolerance {tolerance[at]:.3g}"
    )


# ---- bags -------------------------------------------------------------------------------------


def split_batch(entry):
    """``(bags, weights)`` of a batch entry; all weights 1.0 where it has none."""
    if isinstance(entry, tuple):
        bags, weights = entry
    else:
        bags, weights = entry, [[1.0] * len(bag) for bag in entry]
    assert [len(bag) for bag in bags] == [len(bag) for bag in weights]
    return bags, weights


def looked_up(entry, *, padding_id=None, max_length=None, truncate="error", keep_places=False):
    """The ids each bag looks up: padding removed, then cut to ``max_length``.

    With ``keep_places`` padding before an id keeps its place, as without a combiner; otherwise
    the gaps are closed. Padding behind the last id never counts.

    Returns:
        One list of `Id` per bag, and the number of the user's values (padding included).
    """
    bags, weights = split_batch(entry)
    result, position = [], 0
    for bag, bag_weights in zip(bags, weights, strict=True):
        ids = []
        for place, (key, weight) in enumerate(zip(bag, bag_weights, strict=True)):
            if padding_id is None or key != padding_id:
                ids.append(Id(position, place if keep_places else len(ids), key, float(weight)))
            position += 1
        length = ids[-1].place + 1 if ids else 0
        if max_length is not None and length > max_length:
            if truncate == "error":
                raise ValueError(f"a bag of {length} ids, max_length {max_length}")
            first = length - max_length if truncate == "tail" else 0
            ids = [id_._replace(place=id_.place - first) for id_ in ids]
            ids = [id_ for id_ in ids if 0 <= id_.place < max_length]
        result.append(ids)
    return result, position


def combiner_scale(combiner, length):
    """What the sum of a bag of ``length`` > 0 ids is multiplied by."""
    return {"sum": 1.0, "mean": 1.0 / length, "sqrtn": 1.0 / math.sqrt(length)}[combiner]


def pooled_lookup(entry, rows, dim, combiner="sum", max_length=None, **options):
    """Pooled ``[B, D]``, or ``[B, max_length, D]`` where ``combiner`` is None, from rows by key.

    Returns:
        The values and the sums of the absolute terms, both float64.
    """
    bags, _ = looked_up(entry, max_length=max_length, keep_places=combiner is None, **options)
    shape = (len(bags), dim) if combiner else (len(bags), max_length, dim)
    value, absolute = np.zeros(shape), np.zeros(shape)
    for b, ids in enumerate(bags):
        for _, i, key, weight in ids:
            at = b if combiner else (b, i)
            scale = combiner_scale(combiner, len(ids)) if combiner else 1.0
            value[at] += scale * weight * rows[key]
            absolute[at] += np.abs(scale * weight * rows[key])
    return value, absolute


def pooled_row_grads(entry, grad, dim, combiner="sum", max_length=None, **options):
    """Gradient of each key's row, summed over its occurrences: ``{key: (sum [D], abs [D])}``."""
    bags, _ = looked_up(entry, max_length=max_length, keep_places=combiner is None, **options)
    result = {}
    for b, ids in enumerate(bags):
        for _, i, key, weight in ids:
            scale = combiner_scale(combiner, len(ids)) if combiner else 1.0
            term = scale * weight * np.asarray(grad[b] if combiner else grad[b][i], np.float64)
            total, absolute = result.get(key, (np.zeros(dim), np.zeros(dim)))
            result[key] = (total + term, absolute + np.abs(term))
    return result


def pooled_weight_grads(entry, grad, rows, combiner="sum", max_length=None, **options):
    """Gradient of each per-id weight ``[N]`` in the order of the user's values, and abs sums.

    Padding and ids cut off get 0.
    """
    bags, num_values = looked_up(
        entry, max_length=max_length, keep_places=combiner is None, **options
    )
    value, absolute = np.zeros(num_values), np.zeros(num_values)
    for b, ids in enumerate(bags):
        for position, i, key, _ in ids:
            scale = combiner_scale(combiner, len(ids)) if combiner else 1.0
            out = np.asarray(grad[b] if combiner else grad[b][i], np.float64)
            for d in range(len(out)):
                value[position] += scale * out[d] * rows[key][d]
                absolute[position] += abs(scale * out[d] * rows[key][d])
    return value, absolute


# ---- rules ------------------------------------------------------------------------------------


def hyperparameters(rule, given):
    """Defaults of ``rule`` overridden by ``given``; an unknown name is an error."""
    unknown = set(given) - set(RULES[rule])
    assert not unknown, f"{rule} has no {sorted(unknown)}"
    return {**RULES[rule], **given}


def initial_slots(rule, dim, **given):
    """Slots of one row that was never touched: ``[D]`` arrays or scalars by name."""
    h = hyperparameters(rule, given)
    slots = {}
    if rule == "adagrad":
        slots["accumulator"] = np.full(dim, float(h["initial_accumulator"]))
    elif rule == "rowwise_adagrad":
        slots["accumulator"] = float(h["initial_accumulator"])
    elif rule == "adam":
        slots["m"], slots["v"] = np.zeros(dim), np.zeros(dim)
        if h["per_row_count"]:
            slots["count"] = 0
    elif rule == "ftrl":
        slots["z"], slots["n"] = np.zeros(dim), np.zeros(dim)
    if h.get("catch_up_decay"):
        slots["last_step"] = -1
    return slots


def update_row(rule, w, slots, g, lr, step, **given):
    """One update of one row by the rule named ``rule``.

    Args:
        rule: a key of `RULES`.
        w: ``[D]`` row before.
        slots: as `initial_slots` made them or this function left them.
        g: ``[D]`` summed gradient.
        lr: learning rate of this step.
        step: global step; 0 is the first update.
        **given: hyper-parameters that differ from the defaults.

    Returns:
        New row and new slots; the arguments are left alone.
    """
    h = hyperparameters(rule, given)
    w, g, slots = np.array(w, np.float64), np.array(g, np.float64), dict(slots)
    if rule == "ftrl":
        return _ftrl(w, slots, g, lr, **h)
    g = g + h["l2"] * w
    num_decays = 1
    if h["catch_up_decay"]:
        if slots["last_step"] != -1:
            num_decays = step - slots["last_step"]
        slots["last_step"] = step
    for _ in range(num_decays):
        w = w - lr * h["weight_decay"] * w
    if rule == "sgd":
        return w - lr * g, slots
    if rule == "adagrad":
        slots["accumulator"] = slots["accumulator"] + g**2
        return w - lr * _divide(g, np.sqrt(slots["accumulator"]) + h["eps"]), slots
    if rule == "rowwise_adagrad":
        slots["accumulator"] = slots["accumulator"] + sum(g**2) / len(g)
        root = math.sqrt(slots["accumulator"])
        return w - lr * _divide(g, np.full(len(g), root) + h["eps"]), slots
    assert rule == "adam"
    t = step + 1
    if h["per_row_count"]:
        t = slots["count"] = slots["count"] + 1
    m = slots["m"] = h["b1"] * slots["m"] + (1 - h["b1"]) * g
    v = slots["v"] = h["b2"] * slots["v"] + (1 - h["b2"]) * g**2
    m_hat, v_hat = m / (1 - h["b1"] ** t), v / (1 - h["b2"] ** t)
    return w - lr * _divide(m_hat, np.sqrt(v_hat) + h["eps"]), slots


def _divide(numerator, denominator):
    """Quotients; 0/0 is 0, because it must move nothing."""
    return np.array(
        [0.0 if p == 0 and q == 0 else p / q for p, q in zip(numerator, denominator, strict=True)]
    )


def _ftrl(w, slots, g, lr, *, beta, l1, l2):
    z, n = np.array(slots["z"]), np.array(slots["n"])
    for d in range(len(w)):
        sigma = (math.sqrt(n[d] + g[d] ** 2) - math.sqrt(n[d])) / lr
        z[d] += g[d] - sigma * w[d]
        n[d] += g[d] ** 2
        denominator = (beta + math.sqrt(n[d])) / lr + l2
        if denominator == 0.0:
            continue
        sign = 1.0 if z[d] > 0 else -1.0
        w[d] = 0.0 if abs(z[d]) <= l1 else -(z[d] - sign * l1) / denominator
    return w, {"z": z, "n": n}


# ---- collection -------------------------------------------------------------------------------


class OracleCollection:
    """Tables and features of a collection.

    Args:
        tables: by name: ``dim``, ``rows`` ``{key: [D]}``, ``rule``, ``learning_rate`` (float or
            function of the step), hyper-parameters of the rule, and ``trainable`` (True).
            ``rule`` is a key of `RULES`, or a function ``(w, slots, g, lr, step) -> (w, slots)``
            beside ``slots``, the initial slots of a row ({}).
        features: dicts with ``name``, ``table`` (a name), and where they differ from the defaults
            ``combiner`` ("sum"), ``max_length``, ``truncate`` ("error"), ``padding_id``.

    ``rows``, ``slots`` and ``travel`` (size of all steps of a row so far) are
    ``{table: {key: …}}`` and change at each `update`.
    """

    def __init__(self, tables, features):
        self.tables = {name: dict(table) for name, table in tables.items()}
        self.features = [
            {"combiner": "sum", "max_length": None, "truncate": "error", "padding_id": None, **f}
            for f in features
        ]
        self.rows, self.slots, self.travel = {}, {}, {}
        for name, table in self.tables.items():
            rows = table.pop("rows")
            self.rows[name] = {key: np.array(row, np.float64) for key, row in rows.items()}
            assert all(row.shape == (table["dim"],) for row in self.rows[name].values())
            self.slots[name], self.travel[name] = {}, {}

    def _bags(self, feature):
        names = ("combiner", "max_length", "truncate", "padding_id")
        return {name: feature[name] for name in names}

    def lookup(self, batch):
        """``{feature: (activations, abs)}``."""
        return {
            f["name"]: pooled_lookup(
                batch[f["name"]],
                self.rows[f["table"]],
                self.tables[f["table"]]["dim"],
                **self._bags(f),
            )
            for f in self.features
        }

    def row_grads(self, batch, grads):
        """``{table: {key: (sum [D], abs [D])}}`` over all features of each table."""
        result = {name: {} for name in self.tables}
        for f in self.features:
            dim = self.tables[f["table"]]["dim"]
            total = result[f["table"]]
            grad = grads[f["name"]]
            found = pooled_row_grads(batch[f["name"]], grad, dim, **self._bags(f))
            for key, (value, absolute) in found.items():
                before = total.get(key, (np.zeros(dim), np.zeros(dim)))
                total[key] = (before[0] + value, before[1] + absolute)
        return result

    def weight_grads(self, batch, grads):
        """``{feature: (gradients [N], abs [N])}`` of the features whose entry has weights."""
        return {
            f["name"]: pooled_weight_grads(
                batch[f["name"]], grads[f["name"]], self.rows[f["table"]], **self._bags(f)
            )
            for f in self.features
            if isinstance(batch[f["name"]], tuple)
        }

    def update(self, batch, grads, step):
        """Moves each touched row once.

        Returns:
            ``{table: {key: size of the row's step}}``, the largest move of any of its elements.
        """
        sizes = {}
        for name, found in self.row_grads(batch, grads).items():
            sizes[name] = {}
            if not self.tables[name].get("trainable", True):
                continue
            for key, (g, _) in found.items():
                before = self.rows[name][key]
                self.rows[name][key], self.slots[name][key] = self._move(name, key, g, step)
                size = float(np.max(np.abs(self.rows[name][key] - before)))
                sizes[name][key] = size
                self.travel[name][key] = self.travel[name].get(key, 0.0) + size
        return sizes

    def _move(self, name, key, g, step):
        table = self.tables[name]
        rule, lr = table["rule"], table["learning_rate"]
        lr = float(lr(step)) if callable(lr) else lr
        w, slots = self.rows[name][key], self.slots[name].get(key, self._new_slots(name))
        if callable(rule):
            return rule(w, slots, g, lr, step)
        return update_row(rule, w, slots, g, lr, step, **self._hyperparameters(name))

    def _hyperparameters(self, name):
        own = ("dim", "rule", "learning_rate", "trainable")
        return {field: value for field, value in self.tables[name].items() if field not in own}

    def _new_slots(self, name):
        table = self.tables[name]
        if callable(table["rule"]):
            return dict(table.get("slots", {}))
        return initial_slots(table["rule"], table["dim"], **self._hyperparameters(name))

    def read(self, table, keys):
        """Rows ``[n, D]`` of a table."""
        dim = self.tables[table]["dim"]
        return np.array([self.rows[table][key] for key in keys]).reshape(len(keys), dim)

    def read_slots(self, table, keys):
        """Slots of rows by name, ``[n, D]`` or ``[n]``; as new for keys never touched."""
        new = self._new_slots(table)
        found = [self.slots[table].get(key, new) for key in keys]
        return {name: np.array([slots[name] for slots in found]) for name in new}

    def travelled(self, table, keys):
        """Size ``[n, 1]`` of all steps each row has made, 0 if none: `assert_rows` wants it."""
        return np.array([[self.travel[table].get(key, 0.0)] for key in keys]).reshape(-1, 1)
