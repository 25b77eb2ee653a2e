# SPDX-License-Identifier: Apache-2.0
"""SIGTERM as a request that the loop can take up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_sigterm(act: Callable[[], None] | None) -> Iterator[None]:
    """Inside the block SIGTERM does not end the process: it calls ``act``.

    Args:
        act: None changes nothing, as does being outside the main thread.
    """
    if act is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
