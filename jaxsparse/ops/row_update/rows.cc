// SPDX-License-Identifier: Apache-2.0
// Rows of a slab or slot read and written as bytes, for rules that no kernel knows.

#include "huge_pages.h"
#include "native.h"

namespace jaxsparse {
namespace {

constexpr int64_t kBytesPerTask = 1 << 18;
constexpr int64_t kAhead = 8;  // rows prefetched

int64_t bytes_per_row(const ffi::AnyBuffer& array) {
  int64_t bytes = ffi::ByteWidth(array.element_type());
  for (size_t axis = 1; axis < array.dimensions().size(); ++axis) bytes *= array.dimensions()[axis];
  return bytes;
}

// step(k, row) of every entry whose row lies in [0, num_rows), with those to come prefetched.
template <typename Step, typename Outside>
void for_rows(ffi::Buffer<ffi::S32> rows, const char* table, int64_t num_rows, int64_t bytes,
              Step&& step, Outside&& outside) {
  const int32_t* at = rows.typed_data();
  const auto is_row = [&](int32_t row) { return row >= 0 && row < num_rows; };
  const int64_t grain = std::max<int64_t>(kBytesPerTask / (bytes + 16), 16);
  parallel_for(rows.element_count(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (k + kAhead < end && is_row(at[k + kAhead])) {
        const char* next = table + at[k + kAhead] * bytes;
        for (int64_t byte = 0; byte < std::min<int64_t>(bytes, 1024); byte += 64) {
          __builtin_prefetch(next + byte);
        }
      }
      if (is_row(at[k])) {
        step(k, at[k]);
      } else {
        outside(k);
      }
    }
  });
}

ffi::Error read_rows(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> rows,
                     ffi::Result<ffi::AnyBuffer> values) {
  const int64_t bytes = bytes_per_row(table);
  const auto* from = static_cast<const char*>(table.untyped_data());
  auto* to = static_cast<char*>(values->untyped_data());
  for_rows(
      rows, from, table.dimensions()[0], bytes,
      [&](int64_t k, int64_t row) { std::memcpy(to + k * bytes, from + row * bytes, bytes); },
      [&](int64_t k) { std::memset(to + k * bytes, 0, bytes); });
  return ffi::Error::Success();
}

ffi::Error write_rows(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> rows, ffi::AnyBuffer values,
                      ffi::Buffer<ffi::PRED> enabled, ffi::Result<ffi::AnyBuffer> written) {
  if (written->untyped_data() != table.untyped_data()) {
    return ffi::Error::Internal("write_rows: a table is not written in place");
  }
  if (!*enabled.typed_data()) return ffi::Error::Success();
  const int64_t bytes = bytes_per_row(table);
  use_huge_pages(table.untyped_data(), table.size_bytes());
  auto* to = static_cast<char*>(table.untyped_data());
  const auto* from = static_cast<const char*>(values.untyped_data());
  for_rows(
      rows, to, table.dimensions()[0], bytes,
      [&](int64_t k, int64_t row) { std::memcpy(to + row * bytes, from + k * bytes, bytes); },
      [](int64_t) {});
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsparse

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_read_rows, jaxsparse::read_rows,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_write_rows, jaxsparse::write_rows,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Ret<xla::ffi::AnyBuffer>());
