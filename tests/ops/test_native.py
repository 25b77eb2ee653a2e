# SPDX-License-Identifier: Apache-2.0
"""The native library: built once, left out where told, and missed only once and with a reason."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import threading

import jax
import pytest

import jaxsparse as js
from jaxsparse.ops import paths
from jaxsparse.ops.native import compiler, library

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

TELL = """
import sys
from jaxsparse.ops.native import library
from jaxsparse.ops.paths import path_of
print(library.is_available(), path_of("cpu"), library.is_available())
print(library.why_not())
try:
    library.load()
except RuntimeError as error:
    print(error)
"""


def told(**environment: str) -> tuple[list[str], str]:
    """Lines printed by a process of its own, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", TELL],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_process_without_a_compiler_runs_on_xla_and_says_so_once(tmp_path):
    out, err = told(PATH=str(tmp_path), JAXSPARSE_CACHE_DIR=str(tmp_path), CXX="")
    why = "no C++ compiler was found (g++, c++, clang++); install g++, or name one in CXX"
    assert out == ["False xla False", why, f"the native kernels are not there: {why}"]
    warning = "jaxsparse runs without its native CPU kernels, on XLA, which is slower: "
    assert err.count(warning) == 1 and why in err


def test_a_named_compiler_is_the_only_one_tried(tmp_path):
    out, _ = told(CXX="no-such-compiler", JAXSPARSE_CACHE_DIR=str(tmp_path))
    assert out[1].startswith("no C++ compiler was found (no-such-compiler)")


def test_a_compiler_that_fails_is_told_with_its_words(tmp_path):
    fake = tmp_path / "broken-cxx"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no header' >&2\nexit 3\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    out, err = told(CXX=str(fake), JAXSPARSE_CACHE_DIR=str(tmp_path))
    assert out[:2] == ["False xla False", "broken-cxx ended with 3: no header"]
    assert "compiling the CPU kernels, once on this machine" in err


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    out, _ = told(JAXSPARSE_CACHE_DIR=str(tmp_path / "file"))
    assert out[1].startswith(f"{tmp_path}/file cannot be written: ")


@pytest.mark.skipif(not library.is_available(), reason="no native library here")
@pytest.mark.parametrize("num_bytes", [0, 60_000])
def test_a_damaged_library_is_built_again(tmp_path, monkeypatch, num_bytes):
    """A shortened library would end the process that loads it."""
    whole = compiler.build().read_bytes()
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", str(tmp_path))
    built = []

    def put(_, path):
        built.append(path)
        path.write_bytes(whole)
        path.with_suffix(".sha256").write_text(hashlib.sha256(whole).hexdigest())

    monkeypatch.setattr(compiler, "_compile", put)
    path = compiler.build()
    assert compiler.build() == path and len(built) == 1
    path.write_bytes(whole[:num_bytes])
    assert compiler.build() == path and len(built) == 2
    assert path.read_bytes() == whole


def test_a_user_without_a_home_runs_on_xla(monkeypatch):
    """As in a container under a number that no list of users has."""

    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("JAXSPARSE_CACHE_DIR", raising=False)
    monkeypatch.setattr(pathlib.Path, "expanduser", homeless)
    with pytest.raises(compiler.NoNativeLibrary, match=r"no home folder .* JAXSPARSE_CACHE_DIR"):
        compiler.build()


def test_a_named_cache_may_be_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAXSPARSE_CACHE_DIR", "~/kernels")
    assert compiler.cache_folder() == tmp_path / "kernels"


def test_kernels_left_out_on_purpose_are_no_news(tmp_path):
    out, err = told(JAXSPARSE_NATIVE="0", JAXSPARSE_CACHE_DIR=str(tmp_path))
    assert out[:2] == ["False xla False", "JAXSPARSE_NATIVE=0 leaves them out"]
    assert err == "" and not list(tmp_path.iterdir())


def test_the_library_is_built_once_and_has_every_handler():
    if not shutil.which("g++"):
        pytest.skip("no g++ here")
    assert library.is_available() and library.why_not() is None
    assert compiler.build() == compiler.build()
    assert isinstance(library.load(), ctypes.CDLL)
    for name in library.handler_names():
        assert getattr(library.load(), name)
    assert paths.path_of("cpu") == "native"


def test_many_callers_at_once_share_the_pool():
    """Each call runs all of its chunks, whatever the others do."""
    count = library.load().jaxsparse_count_chunks
    count.restype = ctypes.c_int64
    wrong = []

    def call():
        for _ in range(200):
            total = count(ctypes.c_int64(1000), ctypes.c_int64(7))
            if total != 1000 * 999 // 2:
                wrong.append(total)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads) and not wrong


FORK = """
import ctypes, os, signal, threading
from jaxsparse.ops.native import library

count = library.load().jaxsparse_count_chunks
count.restype = ctypes.c_int64
few, many = ctypes.c_int64(64), ctypes.c_int64(1)

def call():
    while True:
        count(few, many)

for _ in range(4):
    threading.Thread(target=call, daemon=True).start()
ends = []
for _ in range(300):
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # whose handler here is the system's: it ends the process
        os._exit(0 if count(few, many) == 64 * 63 // 2 else 1)
    ends.append(os.waitpid(child, 0)[1])
print(len(ends), sum(map(bool, ends)), flush=True)
os._exit(0)  # the threads never end
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_computes_though_its_parent_was_in_the_middle():
    """As workers that read data do; whatever lock the parent's threads held."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        cwd=REPOSITORY,
        env={**os.environ, "JAXSPARSE_NATIVE_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["300", "0"], done.stdout + done.stderr


def test_a_block_may_leave_the_kernels_out():
    mesh = js.make_mesh(devices=jax.devices()[:1])
    table = js.TableSpec("t", vocabulary_size=10, embedding_dim=2)
    features = [js.FeatureSpec("f", table)]
    with library.left_out():
        assert not library.is_available()
        assert "left_out" in library.why_not()
        left = js.EmbeddingCollection(features, mesh=mesh)
        assert left.path == "xla"
    there = js.EmbeddingCollection(features, mesh=mesh)
    assert there.path == "native"
    # Collections on different paths are different programs.
    assert there != left and left.path == "xla"
