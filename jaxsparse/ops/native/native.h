// SPDX-License-Identifier: Apache-2.0
// What all CPU kernels share: threads, several instruction sets in one library, bfloat16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

// One version of a function per instruction set, chosen when the library is loaded. Results do not
// depend on the choice: -ffp-contract=off, and every sum over a row has a fixed tree.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define JS_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JS_CLONES
#endif

namespace jaxsparse {

namespace ffi = xla::ffi;

using Chunk = void (*)(void* context, int64_t chunk);

// Runs chunk(context, i) for i in 0..num_chunks-1, on the caller and the pool's workers; returns
// when all are done. Callers may be many at once: each takes chunks of its own job and waits for
// begun ones only, so none depends on a worker being free.
void run_chunks(int64_t num_chunks, Chunk chunk, void* context);

// Threads that may work at the same time, the caller among them.
int64_t num_threads();

// body(begin, end) over 0..n, cut every `grain`: the cuts do not depend on the number of threads.
template <typename Body>
void parallel_for(int64_t n, int64_t grain, Body&& body) {
  grain = std::max<int64_t>(grain, 1);
  const int64_t num_chunks = (n + grain - 1) / grain;
  if (num_chunks <= 1 || num_threads() == 1) {
    // In the same pieces as on threads: a body may keep sums by piece.
    for (int64_t begin = 0; begin < n; begin += grain) body(begin, std::min(begin + grain, n));
    return;
  }
  auto run = [&](int64_t chunk) {
    const int64_t begin = chunk * grain;
    body(begin, std::min(begin + grain, n));
  };
  using Run = decltype(run);
  run_chunks(
      num_chunks, [](void* context, int64_t chunk) { (*static_cast<Run*>(context))(chunk); },
      &run);
}

inline float from_bfloat16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// To nearest, ties to even; NaN stays NaN.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace jaxsparse
