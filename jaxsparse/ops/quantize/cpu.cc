// SPDX-License-Identifier: Apache-2.0
// `stochastic_round_bf16` on the CPU.

#include <cstdint>

#include "quantize/stochastic.h"
#include "native.h"
#include "xla/ffi/api/ffi.h"

namespace jaxsparse {
namespace {

constexpr int64_t kRowsPerTask = 64;

JS_CLONES
void round_rows(const float* values, const int32_t* rows, int64_t begin, int64_t end, int64_t dim,
                uint32_t step_key, uint16_t* rounded) {
  for (int64_t k = begin; k < end; ++k) {
    const uint32_t row_key = stochastic_row_key(step_key, static_cast<uint32_t>(rows[k]));
    stochastic_bf16_row(values + k * dim, dim, row_key, rounded + k * dim);
  }
}

ffi::Error stochastic_round(ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> rows,
                            ffi::Buffer<ffi::U32> seed, ffi::Buffer<ffi::S32> step,
                            ffi::ResultBuffer<ffi::BF16> rounded) {
  const int64_t num_rows = values.dimensions()[0];
  const int64_t dim = values.dimensions()[1];
  const uint32_t step_key =
      stochastic_step_key(*seed.typed_data(), static_cast<uint32_t>(*step.typed_data()));
  auto* out = reinterpret_cast<uint16_t*>(rounded->untyped_data());
  parallel_for(num_rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    round_rows(values.typed_data(), rows.typed_data(), begin, end, dim, step_key, out);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsparse

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_stochastic_round, jaxsparse::stochastic_round,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::BF16>>());
