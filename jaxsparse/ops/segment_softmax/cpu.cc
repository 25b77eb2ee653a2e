// SPDX-License-Identifier: Apache-2.0
// Softmax within ragged segments, and its gradient.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "native.h"

namespace jaxsparse {
namespace softmax {
namespace {

constexpr int64_t kLanes = 16;        // accumulators of a sum, added in a fixed tree
constexpr int64_t kBlock = 256;       // scores whose sums are float; those of blocks are double
constexpr int64_t kSegmentsPerTask = 64;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

#define JS_SOFTMAX_INLINE inline __attribute__((always_inline))

// e^x for x <= 0 within 2 ulp, 0 where that is no normal number; NaN stays NaN. After Cephes' expf
// (Moshier). The C library's differs between machines, and is not cut into vectors.
JS_SOFTMAX_INLINE float exp_of_negative(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves a whole number
  const float shifted = x * 1.44269504088896341f + kRound;
  const float whole = shifted - kRound;
  const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  int32_t bits, round_bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&round_bits, &kRound, sizeof round_bits);
  const int32_t scale_bits = static_cast<int32_t>(static_cast<uint32_t>(bits - round_bits + 127)
                                                  << 23);
  float scale;
  std::memcpy(&scale, &scale_bits, sizeof scale);
  return x < -87.0f ? 0.0f : p * scale;
}

JS_SOFTMAX_INLINE float sum_of_lanes(float* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

// The next scores, up to kBlock, and behind them `filler` up to whole lanes; returns how many.
JS_SOFTMAX_INLINE int64_t read_block(const float* from, int64_t n, float filler, float* block) {
  const int64_t length = std::min(n, kBlock);
  std::memcpy(block, from, length * sizeof(float));
  for (int64_t k = length; k % kLanes != 0; ++k) block[k] = filler;
  return length;
}

JS_SOFTMAX_INLINE float largest_of(const float* scores, int64_t n) {
  float lanes[kLanes], block[kBlock];
  for (int64_t l = 0; l < kLanes; ++l) lanes[l] = -kInfinity;
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t length = read_block(scores + at, n - at, -kInfinity, block);
    for (int64_t k = 0; k < length; k += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) lanes[l] = std::max(lanes[l], block[k + l]);
    }
  }
  return *std::max_element(lanes, lanes + kLanes);
}

JS_CLONES
void softmax_segment(const float* scores, int64_t n, float* shares) {
  const float largest = largest_of(scores, n);
  // Where all are -inf their powers are zeros, which stay so.
  const float shift = largest == -kInfinity ? 0.0f : largest;
  double total = 0;
  float block[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t length = read_block(scores + at, n - at, -kInfinity, block);
    float lanes[kLanes] = {};
    for (int64_t k = 0; k < length; k += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) {
        block[k + l] = exp_of_negative(block[k + l] - shift);
        lanes[l] += block[k + l];
      }
    }
    total += sum_of_lanes(lanes);
    std::memcpy(shares + at, block, length * sizeof(float));
  }
  if (total == 0) return;
  const float divisor = static_cast<float>(total);
  for (int64_t k = 0; k < n; ++k) shares[k] /= divisor;
}

JS_CLONES
void softmax_segment_grads(const float* grads, const float* shares, int64_t n, float* results) {
  double total = 0;
  float share[kBlock], grad[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t length = read_block(shares + at, n - at, 0.0f, share);
    read_block(grads + at, n - at, 0.0f, grad);
    float lanes[kLanes] = {};
    for (int64_t k = 0; k < length; k += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) {
        lanes[l] += share[k + l] == 0.0f ? 0.0f : share[k + l] * grad[k + l];
      }
    }
    total += sum_of_lanes(lanes);
  }
  const float mean = static_cast<float>(total);
  for (int64_t k = 0; k < n; ++k) {
    results[k] = shares[k] == 0.0f ? 0.0f : shares[k] * (grads[k] - mean);
  }
}

// run(begin, n) for each segment that is not empty; offsets are brought into 0 .. num_scores.
template <typename Run>
void for_segments(ffi::BufferR1<ffi::S32> offsets, int64_t num_scores, float* results, Run&& run) {
  std::memset(results, 0, num_scores * sizeof(float));
  const int32_t* const ends = offsets.typed_data();
  const int64_t num_segments = static_cast<int64_t>(offsets.element_count()) - 1;
  parallel_for(num_segments, kSegmentsPerTask, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = std::clamp<int64_t>(ends[s], 0, num_scores);
      const int64_t end = std::clamp<int64_t>(ends[s + 1], 0, num_scores);
      if (begin < end) run(begin, end - begin);
    }
  });
}

ffi::Error forward(ffi::BufferR1<ffi::F32> scores, ffi::BufferR1<ffi::S32> offsets,
                   ffi::ResultBufferR1<ffi::F32> shares) {
  const float* const from = scores.typed_data();
  float* const to = shares->typed_data();
  for_segments(offsets, scores.element_count(), to, [&](int64_t begin, int64_t n) {
    softmax_segment(from + begin, n, to + begin);
  });
  return ffi::Error::Success();
}

ffi::Error backward(ffi::BufferR1<ffi::F32> grads, ffi::BufferR1<ffi::F32> shares,
                    ffi::BufferR1<ffi::S32> offsets, ffi::ResultBufferR1<ffi::F32> results) {
  const float *const from = grads.typed_data(), *const of = shares.typed_data();
  float* const to = results->typed_data();
  for_segments(offsets, grads.element_count(), to, [&](int64_t begin, int64_t n) {
    softmax_segment_grads(from + begin, of + begin, n, to + begin);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace softmax
}  // namespace jaxsparse

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_segment_softmax, jaxsparse::softmax::forward,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_segment_softmax_grad, jaxsparse::softmax::backward,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::F32>>());
