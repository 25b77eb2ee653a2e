# SPDX-License-Identifier: Apache-2.0
"""Rows of a table summed by bag, without an array of all of them."""
