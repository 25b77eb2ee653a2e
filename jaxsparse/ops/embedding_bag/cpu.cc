// SPDX-License-Identifier: Apache-2.0
// `embedding_bag` on CPUs: rows go from the table to the bag, and no array of all rows is made.

#include "huge_pages.h"
#include "native.h"
#include "segment_sum/grouped_sum.h"

namespace jaxsparse {
namespace {

// Which optional arguments there are; `cpu.py` says the same.
enum Present : int64_t { kRows = 1, kOffsets = 2, kWeights = 4, kScale = 8 };

template <typename T>
struct TableTerms {
  const T* table;
  int64_t num_rows;
  int64_t dim;
  const int32_t* rows;  // [num_slots] or null
  int64_t num_slots;
  const int32_t* slots;
  const float* weights;  // by term, or null

  int64_t row_bytes(int64_t dim) const { return dim * sizeof(T); }

  JS_INLINE const T* row(int64_t j) const {
    int64_t row = slots[j];
    if (rows != nullptr) {
      if (row < 0 || row >= num_slots) return nullptr;
      row = rows[row];
    }
    return row < 0 || row >= num_rows ? nullptr : table + row * dim;
  }
  JS_INLINE float factor(int64_t j) const { return weights == nullptr ? 1.0f : weights[j]; }
};

JS_CLONES
void short_bags(const TableTerms<float>& terms, const Groups& bags, const Parts<float>& out,
                const float* scale, int64_t first, int64_t last, LongGroups& noted) {
  sum_short_groups(terms, bags, out, scale, terms.dim, first, last, noted);
}

JS_CLONES
void short_bags(const TableTerms<uint16_t>& terms, const Groups& bags, const Parts<float>& out,
                const float* scale, int64_t first, int64_t last, LongGroups& noted) {
  sum_short_groups(terms, bags, out, scale, terms.dim, first, last, noted);
}

JS_CLONES
void bag_block(const TableTerms<float>& terms, int64_t begin, int64_t end, double* partial) {
  sum_terms(terms, begin, end, terms.dim, 1.0f, partial, kTermsAhead);
}

JS_CLONES
void bag_block(const TableTerms<uint16_t>& terms, int64_t begin, int64_t end, double* partial) {
  sum_terms(terms, begin, end, terms.dim, 1.0f, partial, kTermsAhead);
}

template <typename T>
void pool(const TableTerms<T>& terms, const Groups& bags, const Parts<float>& out,
          const float* scale) {
  sum_groups(
      bags, out, scale, terms.dim,
      [&](int64_t first, int64_t last, LongGroups& noted) {
        short_bags(terms, bags, out, scale, first, last, noted);
      },
      [&](int64_t begin, int64_t end, double* partial) { bag_block(terms, begin, end, partial); });
}

ffi::Error embedding_bag(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> rows,
                         ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::S32> offsets,
                         ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::F32> scale,
                         ffi::RemainingRets results, int64_t present) {
  const int64_t num_rows = table.dimensions()[0], dim = table.dimensions()[1];
  use_huge_pages(table.untyped_data(), table.size_bytes());
  std::vector<float*> arrays;
  std::vector<int64_t> sizes;
  for (size_t part = 0; part < results.size(); ++part) {
    auto result = results.get<ffi::Buffer<ffi::F32>>(part);
    if (!result.has_value()) return result.error();
    arrays.push_back((*result)->typed_data());
    sizes.push_back((*result)->dimensions()[0]);
  }
  const Parts<float> out(arrays, sizes, dim);
  const Groups bags{present & kOffsets ? offsets.typed_data() : nullptr, out.num_rows(),
                    static_cast<int64_t>(slots.element_count())};
  const float* scales = present & kScale ? scale.typed_data() : nullptr;
  const auto run = [&](auto* data) {
    using T = std::remove_pointer_t<decltype(data)>;
    pool(TableTerms<T>{data, num_rows, dim, present & kRows ? rows.typed_data() : nullptr,
                       static_cast<int64_t>(rows.element_count()), slots.typed_data(),
                       present & kWeights ? weights.typed_data() : nullptr},
         bags, out, scales);
  };
  if (table.element_type() == ffi::F32) {
    run(static_cast<float*>(table.untyped_data()));
  } else {
    run(static_cast<uint16_t*>(table.untyped_data()));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsparse

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_embedding_bag, jaxsparse::embedding_bag,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingRets()
                                  .Attr<int64_t>("present"));
