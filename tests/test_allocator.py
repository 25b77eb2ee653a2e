# SPDX-License-Identifier: Apache-2.0
"""Steps find the pages of the one before; settings of the user's own stay."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jaxsparse import allocator

ROOT = pathlib.Path(__file__).resolve().parents[1]

FAULTS = """
import resource, statistics
import jaxsparse
import jax, jax.numpy as jnp

def num_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

# Temporaries of 72 MB: more than glibc ever keeps by itself.
run = jax.jit(lambda x, i: jnp.zeros((3000, 3000)).at[i].add(x)[i[::9]])
x, i = jnp.arange(3000.0), jnp.arange(3000)[::-1]
faults = []
for _ in range(30):
    before = num_faults()
    run(x, i).block_until_ready()
    faults.append(num_faults() - before)
# It takes some runs until every block has its place.
print(jaxsparse.allocator.keep_pages(), int(statistics.median(faults[15:])))
"""


def faults_of_a_run(**settings: str) -> tuple[str, int]:
    """Whether settings were made, and the usual page faults of a run of a program."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **settings}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    made, faults = done.stdout.split()
    return made, int(faults)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a matter of glibc")
def test_a_run_finds_the_pages_of_the_one_before() -> None:
    made, faults = faults_of_a_run()
    left_alone, many = faults_of_a_run(JAXSPARSE_ALLOCATOR="0")
    assert (made, left_alone) == ("True", "False")
    print(f"page faults of a run: {faults} with the settings, {many} without")
    assert faults < many / 20


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which nothing speaks against the settings, whatever this one is."""
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv(allocator.SWITCH, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("JAXSPARSE_ALLOCATOR", "0", "JAXSPARSE_ALLOCATOR=0"),
        ("MALLOC_ARENA_MAX", "4", "the environment has settings of its own: MALLOC_ARENA_MAX"),
        (
            "GLIBC_TUNABLES",
            "glibc.malloc.arena_max=2",
            "the environment has settings of its own: GLIBC_TUNABLES",
        ),
    ],
)
def test_what_the_user_has_set_stays(
    plain: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    plain.setenv(name, value)
    assert allocator.why_not() == why


@pytest.mark.parametrize(
    ("platforms", "plugin", "is_left"),
    [("cpu", "there", False), ("cuda,cpu", None, True), (None, "there", True), (None, None, False)],
)
def test_only_for_cpus(
    plain: pytest.MonkeyPatch, platforms: str | None, plugin: str | None, is_left: bool
) -> None:
    found = jax.config.jax_platforms
    plain.setattr(allocator.importlib.util, "find_spec", lambda name: plugin)
    jax.config.update("jax_platforms", platforms)
    try:
        why = allocator.why_not()
    finally:
        jax.config.update("jax_platforms", found)
    expected = "jax computes on another platform than the CPU" if is_left else None
    assert sys.platform != "linux" or why == expected


def test_another_system_is_left_alone(plain: pytest.MonkeyPatch) -> None:
    plain.setattr(sys, "platform", "darwin")
    assert allocator.why_not() == "the C library is not glibc"
