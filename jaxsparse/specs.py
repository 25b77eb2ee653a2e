# SPDX-License-Identifier: Apache-2.0
"""What the user declares: tables, features and the exchange, validated where they are made."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from jaxsparse.dynamic import MAX_CAPACITY, Dynamic
from jaxsparse.hashing import Hashed, Identity
from jaxsparse.initializers import Initializer, uniform
from jaxsparse.optimizers import Adagrad, SparseOptimizer
from jaxsparse.tiers import Tiers

Combiner = Literal["sum", "mean", "sqrtn"]
Placement = Literal["auto", "sharded", "replicated", "single"]
Truncate = Literal["error", "head", "tail"]

TABLE_DTYPES = ("float32", "bfloat16")

MAX_NAME_BYTES = 64
"""Names become names of files, where each byte may take three."""


def _one_of(owner: str, field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{owner}: {field} must be one of {allowed}, got {value!r}")


def is_positive_int(value: object) -> bool:
    """Whether ``value`` is an int above 0; a bool is not."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_int and value > 0  # type: ignore[operator]


def _positive(owner: str, field: str, value: object) -> None:
    if not is_positive_int(value):
        raise ValueError(f"{owner}: {field} must be a positive int, got {value!r}")


def _check_name(owner: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{owner}: name must be a non-empty str, got {name!r}")
    num_bytes = len(name.encode(errors="surrogatepass"))
    if num_bytes > MAX_NAME_BYTES or any("\ud800" <= c <= "\udfff" for c in name):
        raise ValueError(
            f"{owner}: name must be valid text of at most {MAX_NAME_BYTES} bytes in UTF-8, "
            f"got {name!r} ({num_bytes} bytes)"
        )


def _is_key(value: object) -> bool:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return bool(-(2**63) <= value < 2**64)
    return value is None or isinstance(value, str)


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """One embedding table, logically ``[vocabulary_size, embedding_dim]``.

    >>> TableSpec("item", vocabulary_size=1000, embedding_dim=8).placement
    'auto'
    """

    name: str
    """Unique among the tables of a collection."""

    _: dataclasses.KW_ONLY

    # Typed for its readers: only a table of Dynamic keys has none, and layouts never see it.
    vocabulary_size: int = None  # type: ignore[assignment]
    """Number of rows; None with `Dynamic` keys."""

    embedding_dim: int
    """Width of a row, in elements."""

    optimizer: SparseOptimizer = Adagrad(0.05)
    """Rule that moves the rows a step touches."""

    keys: Identity | Hashed | Dynamic = Identity()
    """How 64-bit keys become rows; `Dynamic` keys need a `jaxsparse.RowStore`."""

    placement: Placement = "auto"
    """``sharded`` by row over the mesh, ``replicated``, on a ``single`` shard, or the planner's."""

    dtype: Any = jnp.float32
    """float32 or bfloat16, whose updates are rounded at random; slots are always float32. The
    rounding depends on a row's place, which is not fixed where a `jaxsparse.RowStore` moves rows:
    such tables are float32."""

    initializer: Initializer = uniform(0.05)
    """Draws one initial row from its own key."""

    trainable: bool = True
    """False freezes the rows: looked up, never moved, without slots."""

    tiers: Tiers | None = None
    """How many rows lie on devices, in the host's memory and on disks; None keeps all of them on
    the devices. Tiers need a `jaxsparse.RowStore`."""

    def __post_init__(self) -> None:
        """Validates and normalises the fields."""
        _check_name("TableSpec", self.name)
        owner = f"TableSpec {self.name!r}"
        _positive(owner, "embedding_dim", self.embedding_dim)
        _one_of(owner, "placement", self.placement, get_args(Placement))
        dtype = np.dtype(self.dtype)
        _one_of(owner, "dtype", dtype.name, TABLE_DTYPES)
        object.__setattr__(self, "dtype", dtype)
        if not isinstance(self.keys, Identity | Hashed | Dynamic):
            raise TypeError(
                f"{owner}: keys must be Identity(), Hashed() or Dynamic(), got {self.keys!r}"
            )
        if not isinstance(self.keys, Dynamic):
            _positive(owner, "vocabulary_size", self.vocabulary_size)
        try:
            self.keys.check(self.vocabulary_size)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from error
        for field in ("optimizer", "initializer"):
            try:
                hash(getattr(self, field))
            except TypeError as error:
                raise TypeError(
                    f"{owner}: {field} must be hashable, such as a frozen dataclass: {error}"
                ) from error
        self._check_stored(owner)
        if not isinstance(self.optimizer, SparseOptimizer):
            raise TypeError(
                f"{owner}: optimizer needs init_slots and update "
                f"(see jaxsparse.optimizers.SparseOptimizer), got {self.optimizer!r}"
            )

    @property
    def is_stored(self) -> bool:
        """Whether a `jaxsparse.RowStore` has to bring the rows of a batch to the devices."""
        return isinstance(self.keys, Dynamic) or self.tiers is not None

    def _check_stored(self, owner: str) -> None:
        """What only tables of a row store have to keep to."""
        if self.tiers is not None and not isinstance(self.tiers, Tiers):
            raise TypeError(f"{owner}: tiers must be js.Tiers(...) or None, got {self.tiers!r}")
        if not self.is_stored:
            return
        if self.dtype != np.float32:
            raise ValueError(
                f"{owner}: dtype must be float32 with Dynamic keys or tiers, got {self.dtype}: "
                "the rounding of bfloat16 rows depends on a place that they would not keep"
            )
        if not isinstance(self.keys, Dynamic) and self.vocabulary_size > MAX_CAPACITY:
            raise ValueError(
                f"{owner}: with tiers vocabulary_size must be at most {MAX_CAPACITY}, got "
                f"{self.vocabulary_size}; Dynamic keys or Hashed into fewer rows take any key"
            )


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """One feature: bags of keys looked up in a table. Features may share a table.

    >>> item = TableSpec("item", vocabulary_size=10, embedding_dim=4)
    >>> FeatureSpec("clicked", item, combiner="mean").combiner
    'mean'
    """

    name: str
    """Unique among the features of a collection; the key in batches and activations."""

    table: TableSpec
    """The table its keys address."""

    _: dataclasses.KW_ONLY

    combiner: Combiner | None = "sum"
    """How a bag becomes one vector: ``sum``; ``mean`` (sum / length); ``sqrtn`` (sum / sqrt of
    the length), the length counting ids, not weights; None keeps ``[max_length, D]`` per bag."""

    max_length: int | None = None
    """Most ids in a bag; None is no limit (``combiner=None`` needs one)."""

    truncate: Truncate = "error"
    """What happens to longer bags: refused, or cut to their first (``head``) or last (``tail``)."""

    padding_id: int | str | None = None
    """Key that stands for "nothing" in the input; it looks nothing up and counts nowhere."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        _check_name("FeatureSpec", self.name)
        owner = f"FeatureSpec {self.name!r}"
        if not isinstance(self.table, TableSpec):
            raise TypeError(f"{owner}: table must be a TableSpec, got {self.table!r}")
        _one_of(owner, "combiner", self.combiner, (*get_args(Combiner), None))
        _one_of(owner, "truncate", self.truncate, get_args(Truncate))
        if not _is_key(self.padding_id):
            raise ValueError(
                f"{owner}: padding_id must be a 64-bit int, a str or None, got {self.padding_id!r}"
            )
        if self.max_length is not None:
            _positive(owner, "max_length", self.max_length)
        elif self.combiner is None:
            raise ValueError(f"{owner}: combiner=None needs max_length, the L of [B, L, D]")
        elif self.truncate != "error":
            raise ValueError(f"{owner}: truncate={self.truncate!r} needs max_length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """How rows travel between devices.

    >>> Exchange(capacity=512).capacity
    512
    """

    capacity: int | None = None
    """Rows per (source, owner) pair and slab; None lets each batch choose the smallest rung of
    the ladder that fits. A fixed capacity below a batch's need is an error, never a loss."""

    wire_dtype: Any = None
    """dtype of vectors and gradients while they travel. None is the exact float32; ``bfloat16``
    halves the bytes and **gives up exactness**: results then depend on the mesh."""

    def __post_init__(self) -> None:
        """Validates and normalises the fields."""
        if self.capacity is not None:
            _positive("Exchange", "capacity", self.capacity)
        if self.wire_dtype is not None:
            dtype = np.dtype(self.wire_dtype)
            _one_of("Exchange", "wire_dtype", dtype.name, ("float32", "bfloat16", "float16"))
            object.__setattr__(self, "wire_dtype", dtype)
