// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding of float32 to bfloat16, for every kernel that writes bfloat16 rows.
//
// The noise is a function of (seed, step, row, column) alone: the same on resume, on any number of
// threads and in `xla.py`, bit for bit. Integers only, so no floating-point mode matters.

#ifndef JAXSPARSE_OPS_QUANTIZE_STOCHASTIC_H_
#define JAXSPARSE_OPS_QUANTIZE_STOCHASTIC_H_

#include <cstdint>
#include <cstring>

namespace jaxsparse {

#if defined(__GNUC__)
// Forced: a kernel that is compiled for several instruction sets must have its own copies.
#define JS_STOCHASTIC_INLINE inline __attribute__((always_inline))
#else
#define JS_STOCHASTIC_INLINE inline
#endif

// The finalizer of MurmurHash3 (Appleby): a bijection whose every output bit depends on every
// input bit.
JS_STOCHASTIC_INLINE uint32_t mix32(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  x ^= x >> 16;
  return x;
}

// Once a call.
JS_STOCHASTIC_INLINE uint32_t stochastic_step_key(uint32_t seed, uint32_t step) {
  return mix32(mix32(seed + 0x9E3779B9u) ^ step);
}

// Once a row.
JS_STOCHASTIC_INLINE uint32_t stochastic_row_key(uint32_t step_key, uint32_t row) {
  return mix32(step_key ^ row);
}

// Bits of the bfloat16 that `value`, at `column` of the row, rounds to.
JS_STOCHASTIC_INLINE uint16_t stochastic_bf16(float value, uint32_t row_key, uint32_t column) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t noise = mix32(row_key + column * 0x9E3779B9u) >> 16;
  // A carry out of the lower half is the step up in magnitude. Nothing carries out of infinity.
  const uint32_t rounded = (bits + noise) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
}

// A row of `dim` columns.
JS_STOCHASTIC_INLINE void stochastic_bf16_row(const float* values, int64_t dim, uint32_t row_key,
                                              uint16_t* rounded) {
  for (int64_t column = 0; column < dim; ++column) {
    rounded[column] = stochastic_bf16(values[column], row_key, static_cast<uint32_t>(column));
  }
}

}  // namespace jaxsparse

#endif  // JAXSPARSE_OPS_QUANTIZE_STOCHASTIC_H_
