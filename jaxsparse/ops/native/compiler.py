# SPDX-License-Identifier: Apache-2.0
"""Compiles the C++ kernels once a machine: sources in, path of a shared library out."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax
import jaxlib.version

OPS = Path(__file__).resolve().parents[1]
"""The folder of all operations."""
PACKAGE = OPS.parent
FOLDERS = (OPS, PACKAGE / "store")
"""Each has folders with C++ files; those of the store are compiled into the same library."""

COMPILERS = ("g++", "c++", "clang++")
"""Tried in order, after what ``CXX`` names."""

# No contraction to fused multiply-adds: one result on every instruction set. Loops with roots and
# divisions become vector code where no error number and no trap have to be kept in order.
MATHS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-Wno-psabi", *MATHS)


class NoNativeLibrary(Exception):
    """The library cannot be had; the message says why."""


def sources() -> list[Path]:
    """The C++ files, of every operation and of the store."""
    return _files("*.cc")


def _files(pattern: str) -> list[Path]:
    return sorted(file for folder in FOLDERS for file in folder.glob(f"*/{pattern}"))


def build() -> Path:
    """The compiled library, from the cache or made now.

    Raises:
        NoNativeLibrary: there is no compiler, or it failed, or there is no place for the library.
    """
    compiler = _compiler()
    path = cache_folder() / f"kernels-{_key(compiler)}.so"
    if _is_whole(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / "lock"):
            if not _is_whole(path):  # another process may have made it meanwhile
                _compile(compiler, path)
    except OSError as error:
        raise NoNativeLibrary(f"{path.parent} cannot be written: {error}") from error
    return path


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``JAXSPARSE_CACHE_DIR``, or the user's cache.

    Raises:
        NoNativeLibrary: neither is there.
    """
    named = os.environ.get("JAXSPARSE_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(named).expanduser() if named else Path(base).expanduser() / "jaxsparse"
    except RuntimeError as error:
        # A container's user may have no home, nor a line in the list of users.
        raise NoNativeLibrary(
            f"this user has no home folder ({error}); name one for the compiled kernels in "
            "JAXSPARSE_CACHE_DIR"
        ) from error


def _is_whole(path: Path) -> bool:
    """Whether the library is there as it was written: a shortened one ends the process that
    loads it."""
    try:
        return _digest_file(path).read_text() == _digest_of(path)
    except OSError:
        return False


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    tried = named or ", ".join(COMPILERS)
    raise NoNativeLibrary(f"no C++ compiler was found ({tried}); install g++, or name one in CXX")


def _key(compiler: str) -> str:
    """Names everything the library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    facts = [version, platform.machine(), jaxlib.version.__version__, *FLAGS]
    digest = hashlib.sha256("\n".join(facts).encode())
    for source in sorted([*sources(), *_files("*.h")]):
        digest.update(str(source.relative_to(PACKAGE)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: str, path: Path) -> None:
    print(
        "jaxsparse: compiling the CPU kernels, once on this machine (under a minute)",
        file=sys.stderr,
    )
    includes = [f"-I{Path(__file__).parent}", f"-I{OPS}", f"-isystem{jax.ffi.include_dir()}"]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [Path(folder) / f"{number}.o" for number in range(len(sources()))]
        commands = [
            [compiler, *FLAGS, *includes, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources(), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        library = Path(folder) / "kernels.so"
        _run([compiler, "-shared", "-o", str(library), *map(str, objects), "-pthread"])
        # The digest last, and of the new file: until then the library is taken for none.
        digest = _digest_of(library)
        library.replace(path)
        _digest_file(path).write_text(digest)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoNativeLibrary(
            f"{Path(command[0]).name} ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Of several processes that start at once one compiles, the others wait for it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
