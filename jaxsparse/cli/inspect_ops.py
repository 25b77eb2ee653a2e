# SPDX-License-Identifier: Apache-2.0
"""``jaxsparse inspect --ops``: which implementation each operation takes here, and why."""

from __future__ import annotations

import dataclasses
import json

import jax

from jaxsparse.ops.paths import choices


def run_inspect_ops(*, only_json: bool) -> int:
    """Prints a line an operation; returns the exit code."""
    platform = jax.default_backend()
    found = choices(platform)
    if not only_json:
        print(f"operations on {platform} ({jax.devices()[0].device_kind}):")
        width = max(len(choice.op) for choice in found)
        for choice in found:
            print(f"  {choice.op:{width}}  {choice.path:6}  {choice.why}")
    told = [dataclasses.asdict(choice) for choice in found]
    print(json.dumps({"platform": platform, "ops": told}), flush=True)
    return 0
