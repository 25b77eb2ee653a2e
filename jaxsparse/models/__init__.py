# SPDX-License-Identifier: Apache-2.0
"""Dense models that read pooled embeddings; any other `flax.nnx.Module` serves as well."""

from jaxsparse.models.dlrm import DLRM

__all__ = ["DLRM"]
