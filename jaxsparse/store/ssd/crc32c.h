// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli, RFC 3720 appendix B.4), as tensorstore, zarr 3 and iSCSI have it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxsparse {

// Of `size` bytes that follow those whose checksum is `crc` (0: nothing before).
uint32_t crc32c(uint32_t crc, const void* data, size_t size);

// Of a row and the place it was stored at: a row that lies in another's place is found out too.
inline uint32_t crc32c_row(const void* row, size_t row_bytes, int64_t location) {
  return crc32c(crc32c(0, row, row_bytes), &location, sizeof location);
}

}  // namespace jaxsparse
