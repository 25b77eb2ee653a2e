# SPDX-License-Identifier: Apache-2.0
"""Several processes on this machine as one job: ``jaxsparse launch``.

Every process is the leader of a process group of its own. When one fails, the others, which may
wait for it in a collective for ever, are ended as groups, so that nothing they started stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from jaxsparse.distributed import COORDINATOR, LAUNCHED, NUM_PROCESSES, PROCESS_ID

POLL_S = 0.1
LAST_WORDS_S = 5.0
"""How long the others may go on after one failed: they tell what they met."""
TERM_S = 5.0
"""How long a process may take to end after SIGTERM before it is killed."""

NOISE = b"[Gloo] Rank "
"""Lines the CPU transport prints on stdout when it connects."""


@dataclasses.dataclass
class _Child:
    index: int
    process: subprocess.Popen[bytes]
    readers: list[threading.Thread]
    num_forwarded: int = 0
    """Signals of the launcher that it was sent."""

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def launch(
    command: Sequence[str],
    num_processes: int,
    devices_per_process: int = 1,
    *,
    out: Any = None,
    err: Any = None,
) -> int:
    """Runs a command in several processes that `jaxsparse.distributed.initialize` makes one job.

    Lines are passed on as they come, with ``[process] `` before them; what process 0 writes to
    stdout, the result, is left as it is. SIGTERM and SIGINT are forwarded to all.

    Args:
        command: program and arguments, the same for all.
        num_processes: how many.
        devices_per_process: CPU devices of each; on a machine with GPUs, how many of them.
        out: binary stream for stdout; default this process's.
        err: the same for stderr.

    Returns:
        0 if all ended so, else the code of the first that failed (128 + the number of the signal
        that ended it).

    Raises:
        ValueError: a count is below 1.
    """
    for name, count in (
        ("num_processes", num_processes),
        ("devices_per_process", devices_per_process),
    ):
        if count < 1:
            raise ValueError(f"launch: {name} must be at least 1, got {count}")
    out, err = out or sys.stdout.buffer, err or sys.stderr.buffer
    address = f"127.0.0.1:{_free_port()}"
    children: list[_Child] = []
    lock = threading.Lock()
    with _forwarding(children) as forward:
        try:
            for index in range(num_processes):
                environment = child_environment(
                    os.environ, index, num_processes, devices_per_process, address
                )
                children.append(_start(command, index, environment, out, err, lock))
                forward(children[-1])  # what came while it was started
            return _wait(children, err, lock)
        finally:
            _end(children)


def child_environment(
    base: Mapping[str, str], index: int, count: int, devices: int, address: str
) -> dict[str, str]:
    """The environment of one process.

    >>> made = child_environment({}, 1, 2, 4, "127.0.0.1:99")
    >>> made["JAXSPARSE_PROCESS_ID"], made["JAX_LOCAL_DEVICE_IDS"]
    ('1', '4,5,6,7')
    """
    # Flags of the caller that force devices would win over the number asked for.
    flags = [
        flag
        for flag in base.get("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform_device_count")
    ]
    return {
        **base,
        "XLA_FLAGS": " ".join(flags),
        COORDINATOR: address,
        NUM_PROCESSES: str(count),
        PROCESS_ID: str(index),
        LAUNCHED: "1",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(index * devices + d) for d in range(devices)),
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _start(
    command: Sequence[str],
    index: int,
    environment: Mapping[str, str],
    out: IO[bytes],
    err: IO[bytes],
    lock: threading.Lock,
) -> _Child:
    process = subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    prefix = f"[{index}] ".encode()
    streams = ((process.stdout, out, prefix if index else b""), (process.stderr, err, prefix))
    readers = [
        threading.Thread(target=_pass_on, args=(*stream, lock), daemon=True) for stream in streams
    ]
    for reader in readers:
        reader.start()
    return _Child(index, process, readers)


def _pass_on(source: IO[bytes], target: IO[bytes], prefix: bytes, lock: threading.Lock) -> None:
    with source:
        for line in source:
            if line.startswith(NOISE):
                continue
            with lock, contextlib.suppress(BrokenPipeError):
                target.write(prefix + line)
                target.flush()


def _wait(children: Sequence[_Child], err: IO[bytes], lock: threading.Lock) -> int:
    """Waits for all, or for the first that fails."""
    while True:
        codes = [child.process.poll() for child in children]
        failed = [child for child, code in zip(children, codes, strict=True) if code]
        if failed:
            break
        if None not in codes:
            _drain(children)
            return 0
        time.sleep(POLL_S)
    deadline = time.monotonic() + LAST_WORDS_S
    while time.monotonic() < deadline and any(c.process.poll() is None for c in children):
        time.sleep(POLL_S)
    left = [child for child in children if child.process.poll() is None]
    _end(children)
    _drain(children)
    first = failed[0]
    how = f"process {first.index} ended with {_describe(first.process.returncode)}"
    others = f"; ended the {len(left)} still running" if left else ""
    with lock:
        err.write(f"jaxsparse launch: {how}{others}\n".encode())
        err.flush()
    code = first.process.returncode
    return int(code if code > 0 else 128 - code)


def _describe(code: int) -> str:
    return f"code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"


def _end(children: Sequence[_Child]) -> None:
    """Ends every process and whatever else is in its group."""
    for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
        running = [child for child in children if child.process.poll() is None]
        for child in running:
            child.signal(number)
        deadline = time.monotonic() + wait_s
        for child in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        if child.process.returncode:  # what it had started may still be there
            child.signal(signal.SIGKILL)


def _drain(children: Sequence[_Child]) -> None:
    for child in children:
        for reader in child.readers:
            reader.join(TERM_S)


@contextlib.contextmanager
def _forwarding(children: Sequence[_Child]) -> Iterator[Callable[[_Child], None]]:
    """Passes SIGTERM and SIGINT on while the job runs; only the main thread may.

    Yields what passes on to one child the signals that it has not had yet.
    """
    received: list[int] = []

    def forward(child: _Child) -> None:
        # A signal may come between any two lines: first counted, then sent, none is sent twice.
        while child.num_forwarded < len(received):
            child.num_forwarded += 1
            child.signal(received[child.num_forwarded - 1])

    def receive(number: int, _: Any) -> None:
        received.append(number)
        for child in children:
            forward(child)

    if threading.current_thread() is not threading.main_thread():
        yield forward
        return
    before = {n: signal.signal(n, receive) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield forward
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
