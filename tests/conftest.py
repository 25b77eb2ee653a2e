# SPDX-License-Identifier: Apache-2.0
"""Eight CPU devices, no silent rank promotion, 64-bit numbers off: before jax makes any array."""

from __future__ import annotations

import os

NUM_DEVICES = 8

# The GPU job sets JAX_PLATFORMS itself; everywhere else a stray accelerator must not decide.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# LLVM's level stays what users have: at 2, jax 0.12 gives other bits on some rungs.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flag = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

from tests import program_cache  # noqa: E402 - imports no jax

program_cache.start()

import hypothesis  # noqa: E402 - the flags above are read when jax is imported
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_x64", False)

# Compiling inside an example takes longer than any deadline; a failure prints how to repeat it.
# The same examples in every CI run: a red one must come from the change that it judges.
hypothesis.settings.register_profile(
    "jaxsparse",
    deadline=None,
    database=None,
    print_blob=True,
    derandomize="CI" in os.environ,
)
hypothesis.settings.load_profile("jaxsparse")


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The eight devices; fails where something imported jax before the flags were set."""
    found = jax.devices()
    assert len(found) == NUM_DEVICES, f"expected {NUM_DEVICES} devices, got {found}"
    return found
