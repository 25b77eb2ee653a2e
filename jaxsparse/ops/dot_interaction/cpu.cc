// SPDX-License-Identifier: Apache-2.0
// Pairwise dots of F separate arrays [b, D], forward and backward, without stacking them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "native.h"

namespace jaxsparse {
namespace dots {

// Measured on two cores of an AMD EPYC 9004, F = 27, D = 64.
constexpr int kRows = 4;          // vectors whose sums are in registers at a time
constexpr int64_t kColumns = 64;  // of each vector, held in the first cache at a time
constexpr int64_t kSamples = 32;  // a task: about 100 us

constexpr int64_t kPadding = 8;
constexpr int64_t kSlack = 16;  // floats that may be read past the end of an array

struct Shape {
  Shape(int64_t count, int64_t dim)
      : count(count), dim(dim), padded((count + kPadding - 1) / kPadding * kPadding) {}

  int64_t num_pairs() const { return count * (count - 1) / 2; }

  int64_t count;   // vectors F
  int64_t dim;     // D
  int64_t padded;  // F up to a multiple of kPadding
};

struct Scratch {
  explicit Scratch(const Shape& shape)
      : memory(kColumns + (kColumns + shape.padded) * shape.padded + 2 * kSlack),
        zeros(memory.data()),
        packed(memory.data() + kColumns),
        square(packed + kColumns * shape.padded + kSlack) {}

  std::vector<float> memory;  // starts as zeros
  const float* zeros;         // [kColumns]
  float* packed;              // [kColumns, padded], or [padded, kColumns]
  float* square;              // [padded, padded]
};

}  // namespace dots
}  // namespace jaxsparse

#if defined(__clang__) || __GNUC__ >= 12
#define JS_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int JsQuadIndex __attribute__((vector_size(16)));
#define JS_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, JsQuadIndex{__VA_ARGS__})
#endif

#define JS_ISA plain
#define JS_TARGET
#define JS_WIDTH 4
#include "dot_interaction/kernel.h"

#if defined(__x86_64__)
#define JS_ISA avx2
#define JS_TARGET __attribute__((target("avx2")))
#define JS_WIDTH 8
#include "dot_interaction/kernel.h"

#define JS_ISA avx512
#define JS_TARGET __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw")))
#define JS_WIDTH 16
#include "dot_interaction/kernel.h"
#endif

namespace jaxsparse {
namespace dots {
namespace {

struct Kernels {
  decltype(&plain::forward) forward;
  decltype(&plain::backward) backward;
};

Kernels choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")) {
    return {avx512::forward, avx512::backward};
  }
  if (__builtin_cpu_supports("avx2")) return {avx2::forward, avx2::backward};
#endif
  return {plain::forward, plain::backward};
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

// F arrays of one shape.
struct Vectors {
  std::vector<const float*> data;
  int64_t num_samples = 0;
  int64_t dim = 0;
};

// Those from argument `first` on.
ffi::ErrorOr<Vectors> read_vectors(ffi::RemainingArgs args, size_t first) {
  Vectors vectors;
  for (size_t i = first; i < args.size(); ++i) {
    const auto buffer = args.get<ffi::BufferR2<ffi::F32>>(i);
    if (!buffer.has_value()) return ffi::Unexpected(buffer.error());
    vectors.num_samples = buffer->dimensions()[0];
    vectors.dim = buffer->dimensions()[1];
    vectors.data.push_back(buffer->typed_data());
  }
  return vectors;
}

ffi::Error forward(ffi::RemainingArgs args, ffi::ResultBufferR2<ffi::F32> dots) {
  const auto vectors = read_vectors(args, 0);
  if (!vectors.has_value()) return vectors.error();
  const Shape shape(vectors->data.size(), vectors->dim);
  float* const to = dots->typed_data();
  parallel_for(vectors->num_samples, kSamples, [&](int64_t begin, int64_t end) {
    Scratch scratch(shape);
    kernels().forward(shape, vectors->data.data(), begin, end, scratch, to);
  });
  return ffi::Error::Success();
}

ffi::Error backward(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const auto grads = args.get<ffi::BufferR2<ffi::F32>>(0);
  if (!grads.has_value()) return grads.error();
  const auto vectors = read_vectors(args, 1);
  if (!vectors.has_value()) return vectors.error();
  std::vector<float*> results;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto result = rets.get<ffi::BufferR2<ffi::F32>>(i);
    if (!result.has_value()) return result.error();
    results.push_back((*result)->typed_data());
  }
  const Shape shape(vectors->data.size(), vectors->dim);
  parallel_for(vectors->num_samples, kSamples, [&](int64_t begin, int64_t end) {
    Scratch scratch(shape);
    kernels().backward(shape, vectors->data.data(), grads->typed_data(), begin, end, scratch,
                       results.data());
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dots
}  // namespace jaxsparse

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_dot_interaction, jaxsparse::dots::forward,
                              xla::ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_dot_interaction_grad, jaxsparse::dots::backward,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets());
