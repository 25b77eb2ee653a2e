# SPDX-License-Identifier: Apache-2.0
"""A rule applied to the touched rows of a table, in place."""
