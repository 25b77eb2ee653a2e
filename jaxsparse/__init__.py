# SPDX-License-Identifier: Apache-2.0
"""jaxsparse: training huge sparse models in JAX, exactly.

Glossary. *key*: 64-bit feature value as it arrives. *row*: address of an embedding in a table.
*bag*: the keys of one feature of one sample. *table*: logical ``[vocabulary_size,
embedding_dim]``. *slots*: per-row optimizer state. *slab*: the one physical array of all tables
of equal (dim, dtype, optimizer). *shard*: a device's part of a slab. *rung*: a static exchange
capacity. Shapes: B batch, F features, L ids in a bag, N ids in all, U distinct ids, D dim,
R rows, S shards.
"""

from jaxsparse import allocator

# First of all: threads choose their heap when they start, and the import of pyarrow starts one.
allocator.keep_pages()

from jaxsparse import data
from jaxsparse.ckpt import CheckpointError, CheckpointManager, SaveError
from jaxsparse.data.batch import Batch
from jaxsparse.dynamic import (
    LFU,
    LRU,
    TTL,
    BloomAdmission,
    CountAdmission,
    Dynamic,
    L2Norm,
    ProbabilityAdmission,
)
from jaxsparse.embedding import EmbeddingCollection
from jaxsparse.hashing import (
    HASH_VERSION,
    CollisionStatistics,
    Hashed,
    Identity,
    collision_statistics,
    fingerprint64,
)
from jaxsparse.initializers import constant, normal, uniform
from jaxsparse.ladder import Ladder
from jaxsparse.local import Residuals
from jaxsparse.mesh import make_mesh
from jaxsparse.optimizers import (
    SGD,
    Adagrad,
    Adam,
    Ftrl,
    RowwiseAdagrad,
    SparseOptimizer,
)
from jaxsparse.packed import PackedIds
from jaxsparse.planner import Plan, plan
from jaxsparse.ragged import Ragged
from jaxsparse.row_grads import RowGrads, merge_row_grads, row_grads_norm, scale_row_grads
from jaxsparse.specs import Exchange, FeatureSpec, TableSpec
from jaxsparse.state import EmbeddingState
from jaxsparse.store import RowStore, StoreFullError
from jaxsparse.tiers import Tiers
from jaxsparse.train import (
    BinaryMetrics,
    FitEvent,
    FitResult,
    KeepBest,
    PackedBatch,
    ProfileSteps,
    StreamingAUC,
    Trainer,
    TrainState,
    sum_grads,
)
from jaxsparse.vocabulary import KeyCounts

__all__ = [
    "HASH_VERSION",
    "LFU",
    "LRU",
    "SGD",
    "TTL",
    "Adagrad",
    "Adam",
    "Batch",
    "BinaryMetrics",
    "BloomAdmission",
    "CheckpointError",
    "CheckpointManager",
    "CollisionStatistics",
    "CountAdmission",
    "Dynamic",
    "EmbeddingCollection",
    "EmbeddingState",
    "Exchange",
    "FeatureSpec",
    "FitEvent",
    "FitResult",
    "Ftrl",
    "Hashed",
    "Identity",
    "KeepBest",
    "KeyCounts",
    "L2Norm",
    "Ladder",
    "PackedBatch",
    "PackedIds",
    "Plan",
    "ProbabilityAdmission",
    "ProfileSteps",
    "Ragged",
    "Residuals",
    "RowGrads",
    "RowStore",
    "RowwiseAdagrad",
    "SaveError",
    "SparseOptimizer",
    "StoreFullError",
    "StreamingAUC",
    "TableSpec",
    "Tiers",
    "TrainState",
    "Trainer",
    "collision_statistics",
    "constant",
    "data",
    "fingerprint64",
    "make_mesh",
    "merge_row_grads",
    "normal",
    "plan",
    "row_grads_norm",
    "scale_row_grads",
    "sum_grads",
    "uniform",
]


def __dir__() -> list[str]:
    """The public names: submodules that imports have left here are not."""
    return __all__
