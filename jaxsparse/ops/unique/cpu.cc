// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "native.h"
#include "unique/radix.h"

namespace jaxsparse {
namespace {

// Sorts the words of real rows; `Word` is the smallest that holds row and index.
template <typename Word>
void unique_rows(const int32_t* rows, int64_t n, int64_t num_rows, int32_t* distinct,
                 int32_t* order, int32_t* offsets) {
  const int index_bits = bit_length(n > 0 ? n - 1 : 0);
  const Word index_mask = static_cast<Word>((uint64_t{1} << index_bits) - 1);
  const std::unique_ptr<Word[]> words(new Word[2 * n]);
  int64_t real = 0;
  uint64_t seen = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] < 0 || rows[i] >= num_rows) continue;
    words[real++] = static_cast<Word>(static_cast<uint64_t>(rows[i]) << index_bits | i);
    seen |= rows[i];
  }
  const Word* sorted = sort_words(words.get(), words.get() + n, real, index_bits, bit_length(seen));
  int64_t count = 0, last = -1;
  for (int64_t i = 0; i < real; ++i) {
    const int64_t row = static_cast<int64_t>(static_cast<uint64_t>(sorted[i]) >> index_bits);
    order[i] = static_cast<int32_t>(sorted[i] & index_mask);
    if (row == last) continue;
    last = row;
    distinct[count] = static_cast<int32_t>(row);
    offsets[count++] = static_cast<int32_t>(i);
  }
  std::fill(distinct + count, distinct + n, static_cast<int32_t>(num_rows));
  std::fill(offsets + count, offsets + n + 1, static_cast<int32_t>(real));
  for (int64_t i = 0, next = real; next < n; ++i) {
    if (rows[i] < 0 || rows[i] >= num_rows) order[next++] = static_cast<int32_t>(i);
  }
}

ffi::Error unique_impl(ffi::Buffer<ffi::S32> rows, int64_t num_rows,
                       ffi::ResultBuffer<ffi::S32> distinct, ffi::ResultBuffer<ffi::S32> order,
                       ffi::ResultBuffer<ffi::S32> offsets) {
  const int64_t n = rows.element_count();
  const bool is_small = bit_length(n) + bit_length(num_rows) <= 32;
  (is_small ? unique_rows<uint32_t> : unique_rows<uint64_t>)(
      rows.typed_data(), n, num_rows, distinct->typed_data(), order->typed_data(),
      offsets->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsparse

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_unique, jaxsparse::unique_impl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<int64_t>("num_rows")
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());
