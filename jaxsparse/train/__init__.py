# SPDX-License-Identifier: Apache-2.0
"""Training: metrics, the step and the loop around it."""
