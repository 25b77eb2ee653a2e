# SPDX-License-Identifier: Apache-2.0
"""Rows beyond the device: key index, memory and disk tiers. ``embedding`` never imports it."""
