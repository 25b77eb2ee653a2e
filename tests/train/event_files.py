# SPDX-License-Identifier: Apache-2.0
"""Reads TensorBoard's event files as TensorBoard does."""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Iterator

from tensorboardX.proto import event_pb2


def read_scalars(folder: pathlib.Path) -> dict[str, dict[int, float]]:
    """Values by tag and step; what came before a restart at a step loses that step and later."""
    scalars: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in events(path.read_bytes()):
            if event.session_log.status == event_pb2.SessionLog.START:
                for values in scalars.values():
                    for step in [step for step in values if step >= event.step]:
                        del values[step]
            for value in event.summary.value:
                assert event.step not in scalars.get(value.tag, {}), "told twice"
                scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    return scalars


def events(data: bytes) -> Iterator[event_pb2.Event]:
    """The records of a file: length, its checksum, event, its checksum."""
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
