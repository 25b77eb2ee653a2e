# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels for CPUs: compiled on first use, optional, one library for all operations."""
