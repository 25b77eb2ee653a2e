# SPDX-License-Identifier: Apache-2.0
"""What the passes of several processes do together, on the thread that runs their programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxsparse.agreement import raise_together
from jaxsparse.data.batch import Batch
from jaxsparse.lockstep import Lockstep
from jaxsparse.packed_batch import PackedBatch
from jaxsparse.store.key_exchange import KeyExchange
from jaxsparse.store.planner import Planner


class Together:
    """Keys once a pass, sizes once a batch, errors whenever one may have come up."""

    def __init__(self, keys: KeyExchange, lockstep: Lockstep) -> None:
        """Has told nothing yet.

        Args:
            keys: of the batches; the planner reads from it.
            lockstep: ships the batches.
        """
        self._keys, self._lockstep = keys, lockstep
        self.ends = False
        """Set it, from any thread of any process, for no further pass."""

    def exchange(self, planner: Planner, error: BaseException | None) -> None:
        """Tells the keys that the next pass is planned from; a collective.

        Raises:
            Exception: ``error``, or where another process has one a RuntimeError.
        """
        count = planner.num_wanted - planner.num_ahead - len(self._keys)
        ends = self._keys.exchange(count, error, self.ends)
        planner.is_ended = planner.is_ended or ends

    def raise_together(self, error: BaseException | None) -> None:
        """Raises where any process has an error; a collective."""
        raise_together(self._lockstep.emb.mesh, error)

    def batches(self, own: Iterator[Any]) -> Iterator[tuple[Batch, PackedBatch]]:
        """What is shipped of prepared batches, until no process has any; a collective each."""
        return self._lockstep.batches(own)
