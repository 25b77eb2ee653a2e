// SPDX-License-Identifier: Apache-2.0
#include "crc32c.h"

#include <cstring>

namespace jaxsparse {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

// tables[k][b]: the checksum of byte b with k zero bytes after it.
struct Tables {
  uint32_t at[8][256];
  Tables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
      at[0][byte] = crc;
    }
    for (int k = 1; k < 8; ++k)
      for (int byte = 0; byte < 256; ++byte)
        at[k][byte] = (at[k - 1][byte] >> 8) ^ at[0][at[k - 1][byte] & 255];
  }
};

uint32_t by_table(uint32_t crc, const uint8_t* data, size_t size) {
  static const Tables tables;
  const auto& t = tables.at;
  for (; size >= 8; data += 8, size -= 8) {
    // Byte by byte, so that the order of bytes in a word does not matter.
    const uint32_t low = crc ^ (data[0] | data[1] << 8 | data[2] << 16 | uint32_t{data[3]} << 24);
    crc = t[7][low & 255] ^ t[6][low >> 8 & 255] ^ t[5][low >> 16 & 255] ^ t[4][low >> 24] ^
          t[3][data[4]] ^ t[2][data[5]] ^ t[1][data[6]] ^ t[0][data[7]];
  }
  for (; size; ++data, --size) crc = (crc >> 8) ^ t[0][(crc ^ *data) & 255];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t crc, const uint8_t* data,
                                                          size_t size) {
  uint64_t wide = crc;
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; size; ++data, --size) crc = __builtin_ia32_crc32qi(crc, *data);
  return crc;
}

bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#else
uint32_t by_instruction(uint32_t crc, const uint8_t* data, size_t size) {
  return by_table(crc, data, size);
}

bool has_instruction() { return false; }
#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
  static const bool instruction = has_instruction();
  const auto* bytes = static_cast<const uint8_t*>(data);
  return ~(instruction ? by_instruction : by_table)(~crc, bytes, size);
}

}  // namespace jaxsparse

extern "C" {

int64_t jaxsparse_crc32c(const void* data, int64_t size, int64_t by_table) {
  if (by_table) {
    return static_cast<uint32_t>(
        ~jaxsparse::by_table(~0u, static_cast<const uint8_t*>(data), size));
  }
  return jaxsparse::crc32c(0, data, size);
}

// Checksums of rows [n, row_bytes] that go to `locations` [n].
int64_t jaxsparse_crc32c_rows(const uint8_t* rows, int64_t n, int64_t row_bytes,
                              const int64_t* locations, uint32_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = jaxsparse::crc32c_row(rows + i * row_bytes, row_bytes, locations[i]);
  }
  return 0;
}
}
