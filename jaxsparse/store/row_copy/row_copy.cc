// SPDX-License-Identifier: Apache-2.0
// Rows from anywhere in one array to anywhere in another.
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kAhead = 8;  // rows; what lies anywhere is on its way while others are copied
constexpr int64_t kLine = 64;

inline int64_t at(const int64_t* rows, int64_t i) { return rows ? rows[i] : i; }

}  // namespace

extern "C" {

// Row to_rows[i] of `to` = row from_rows[i] of `from`, `bytes` of each; without numbers row i.
// Strides are in bytes. -1, or the first i of which a row is outside; nothing is copied then.
int64_t jaxsparse_row_copy(uint8_t* to, int64_t to_stride, int64_t to_size, const int64_t* to_rows,
                           const uint8_t* from, int64_t from_stride, int64_t from_size,
                           const int64_t* from_rows, int64_t n, int64_t bytes) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t target = at(to_rows, i), source = at(from_rows, i);
    if (target < 0 || target >= to_size || source < 0 || source >= from_size) return i;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      const uint8_t* source = from + at(from_rows, i + kAhead) * from_stride;
      uint8_t* target = to + at(to_rows, i + kAhead) * to_stride;
      for (int64_t line = 0; line < bytes; line += kLine) {
        if (from_rows) __builtin_prefetch(source + line);
        if (to_rows) __builtin_prefetch(target + line, 1);
      }
    }
    std::memcpy(to + at(to_rows, i) * to_stride, from + at(from_rows, i) * from_stride, bytes);
  }
  return -1;
}
}
