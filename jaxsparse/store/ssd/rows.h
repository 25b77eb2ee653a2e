// SPDX-License-Identifier: Apache-2.0
// Rows of segments on their way from a block of bytes to the caller's array.
#pragma once

#include <cstdint>
#include <cstring>

#include "crc32c.h"

namespace jaxsparse {

constexpr int kRowBits = 24;  // of a location: the row in its segment (layout.py)
constexpr int64_t kRowMask = (int64_t{1} << kRowBits) - 1;

// What went wrong; a positive number is an errno.
constexpr int64_t kShort = -1;   // the file ends before the row does
constexpr int64_t kDamaged = -2;  // the checksum differs

// Rows of one segment that are asked for, in ascending order of location.
struct Wanted {
  const int64_t* locations;
  const int64_t* targets;  // rows of `out`
  uint8_t* out;
  int64_t row_bytes;
};

// Takes rows first .. last - 1 of `wanted` from bytes whose begin is that of row `base`; the first
// damaged one, or -1.
inline int64_t take_rows(const Wanted& wanted, const uint32_t* crcs, int64_t first, int64_t last,
                         const uint8_t* bytes, int64_t base) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t row = wanted.locations[i] & kRowMask;
    const uint8_t* from = bytes + (row - base) * wanted.row_bytes;
    if (crc32c_row(from, wanted.row_bytes, wanted.locations[i]) != crcs[row]) return i;
    std::memcpy(wanted.out + wanted.targets[i] * wanted.row_bytes, from, wanted.row_bytes);
  }
  return -1;
}

}  // namespace jaxsparse
