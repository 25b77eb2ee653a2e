# SPDX-License-Identifier: Apache-2.0
"""CPU devices by force: what ``--devices`` does."""

from __future__ import annotations

import jax

from jaxsparse.config import ConfigError


def force_cpu_devices(count: int | None) -> None:
    """Makes jax show ``count`` CPU devices; has to come before its first computation.

    Raises:
        ConfigError: the count is not positive, or jax has started with fewer devices.
    """
    if count is None:
        return
    if count < 1:
        raise ConfigError(f"--devices: must be >= 1, got {count}")
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        there = len(jax.devices())
        if there < count:
            raise ConfigError(
                f"--devices: {count} asked for, but jax has started with {there}"
            ) from None
