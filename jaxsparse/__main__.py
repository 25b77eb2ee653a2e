# SPDX-License-Identifier: Apache-2.0
"""``python -m jaxsparse`` is the command ``jaxsparse``."""

from __future__ import annotations

import sys

from jaxsparse.cli import main

if __name__ == "__main__":
    sys.exit(main())
