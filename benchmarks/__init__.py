# SPDX-License-Identifier: Apache-2.0
"""Measurements; each module runs by ``python -m benchmarks.NAME`` from the root."""
