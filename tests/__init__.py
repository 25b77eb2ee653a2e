# SPDX-License-Identifier: Apache-2.0
"""Tests; a package so that they can share modules, as `from tests.oracle import ...`."""
