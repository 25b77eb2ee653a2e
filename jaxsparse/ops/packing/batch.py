# SPDX-License-Identifier: Apache-2.0
"""What packing works on: one slab's ids of one batch, spread over a process's devices.

A device's id buffer has the slab's features one after another, fixed ones first; a feature's ids
there are those of the device's samples. Behind the last id the buffer is padding.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

NOTHING = -1
"""Code of an id that looks nothing up."""


@dataclasses.dataclass(slots=True)  # not frozen: made for every feature of every batch
class SlabFeature:
    """One feature's ids of all samples of a process."""

    codes: Int64s
    """``[n]``, contiguous: shard * rows_per_shard + local row."""
    table: int
    """Index of its table in the slab; a table's codes are its own, and ascend with the index."""
    width: int
    """Bags per sample: 1, or the places of an unpooled bag."""
    is_unpooled: bool
    num_ids: int | None
    """Ids per sample; None where they differ."""
    splits: Int64s | None = None
    """``[B + 1]``: first id of each sample, where they differ."""
    position: Int64s | None = None
    """``[n]``: place of each id in its bag; None is 0, 1, ... in every one."""


@dataclasses.dataclass(frozen=True)
class DeviceIds:
    """The ids of a slab, by device."""

    features: tuple[SlabFeature, ...]
    """F of them, in buffer order."""
    num_devices: int
    num_owners: int
    """S: parts the slab is cut into, as this batch sees it."""
    rows_per_shard: int
    """R."""
    samples: int
    """b: samples per device."""
    num_samples: int
    """B: real samples of all devices."""
    cuts: Int64s
    """``[F, num_devices + 1]``: codes of feature f on device d are ``cuts[f, d]`` to
    ``cuts[f, d + 1]``."""
    places: Int64s
    """``[num_devices, F + 1]``: where each feature begins in the device's buffer, and the end."""

    @property
    def num_places(self) -> int:
        """Places in use on the fullest device."""
        return int(self.places[:, -1].max())

    @property
    def num_bags(self) -> int:
        """O."""
        return self.samples * sum(feature.width for feature in self.features)


@dataclasses.dataclass(frozen=True)
class Distinct:
    """The distinct codes of one device and slab."""

    order: Int64s | Int32s
    """``[n]``: buffer places of real ids, grouped by code, ascending within a group."""
    codes: Int64s
    """``[U]``, ascending, hence grouped by owner."""
    starts: Int64s | Int32s
    """``[U + 1]``: first entry of each group in ``order``."""
    bounds: Int64s
    """``[S + 1]``: first code of each owner."""

    @property
    def counts(self) -> Int64s:
        """``[U]``: ids of each code."""
        return np.diff(self.starts).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """`Distinct` of all devices; entries behind a device's last are undefined.

    Rooms are those of the fullest device: n ids, and as many places as its buffer has before the
    padding at its end.
    """

    order: Int32s
    """``[num_devices, n]``."""
    codes: Int64s
    """``[num_devices, n]``."""
    starts: Int32s
    """``[num_devices, n + 1]``."""
    inverse: Int32s
    """``[num_devices, places]``: index of the code of the id at each place; -1 where there is no
    id."""
    bounds: Int64s
    """``[num_devices, S + 1]``."""

    def of(self, device: int) -> Distinct:
        """One device's, as views."""
        num_codes = self.bounds[device, -1]
        starts = self.starts[device, : num_codes + 1]
        order = self.order[device, : starts[-1]]
        return Distinct(order, self.codes[device, :num_codes], starts, self.bounds[device])


@dataclasses.dataclass(frozen=True)
class RowArrays:
    """Arrays about distinct rows, ``K = S * C`` places for them a device; all int32."""

    rows: Int32s
    """``[num_devices, K]``: local rows, ascending by owner, padded with R."""
    inverse: Int32s
    """``[num_devices, M]``: place of each id's row, K for padding."""
    row_offsets: Int32s
    """``[num_devices, K + 1]``: first entry of each row in the two below."""
    row_bags: Int32s
    """``[num_devices, M]``: bags of ids, grouped by row; O behind the last."""
    row_ids: Int32s | None
    """``[num_devices, M]``: buffer places of those ids; M behind the last."""
