# SPDX-License-Identifier: Apache-2.0
"""Operations under the embedding layer: one folder an operation, one meaning each."""
