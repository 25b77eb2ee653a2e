# SPDX-License-Identifier: Apache-2.0
"""The command ``jaxsparse``."""

from jaxsparse.cli.command import main

__all__ = ["main"]
