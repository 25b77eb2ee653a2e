// SPDX-License-Identifier: Apache-2.0
// `bag_gradients` and plain sums by group on CPUs: gradients are read where they lie, one array a
// feature, and never concatenated.

#include "native.h"
#include "segment_sum/grouped_sum.h"

namespace jaxsparse {
namespace {

// Which optional arguments there are; `cpu.py` says the same.
enum Present : int64_t { kBags = 1, kWeights = 2, kScale = 4 };

struct GradientTerms {
  const Parts<const float>* grads;
  const int32_t* bags;  // by term, or null: term j is bag j
  const int32_t* ids;   // by term, where there are weights
  const float* weights;  // by id, or null
  int64_t num_weights;
  const float* scale;  // by bag, or null

  int64_t row_bytes(int64_t dim) const { return dim * sizeof(float); }

  JS_INLINE int64_t bag(int64_t j) const { return bags == nullptr ? j : bags[j]; }
  JS_INLINE const float* row(int64_t j) const {
    const int64_t at = bag(j);
    return at < 0 || at >= grads->num_rows() ? nullptr : grads->row(at);
  }
  // Of terms with a row only.
  JS_INLINE float factor(int64_t j) const {
    float factor = scale == nullptr ? 1.0f : scale[bag(j)];
    if (weights != nullptr) {
      const int64_t id = ids[j];
      factor *= id < 0 || id >= num_weights ? 0.0f : weights[id];
    }
    return factor;
  }
};

JS_CLONES
void short_groups(const GradientTerms& terms, const Groups& groups, const Parts<float>& out,
                  int64_t dim, int64_t first, int64_t last, LongGroups& noted) {
  sum_short_groups(terms, groups, out, nullptr, dim, first, last, noted);
}

JS_CLONES
void group_block(const GradientTerms& terms, int64_t dim, int64_t begin, int64_t end,
                 double* partial) {
  sum_terms(terms, begin, end, dim, 1.0f, partial);
}

ffi::Error bag_gradients(ffi::Buffer<ffi::S32> offsets, ffi::Buffer<ffi::S32> bags,
                         ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights,
                         ffi::Buffer<ffi::F32> scale, ffi::RemainingArgs parts,
                         ffi::Result<ffi::Buffer<ffi::F32>> sums, int64_t present) {
  const int64_t num_groups = sums->dimensions()[0], dim = sums->dimensions()[1];
  std::vector<const float*> arrays;
  std::vector<int64_t> sizes;
  for (size_t index = 0; index < parts.size(); ++index) {
    auto part = parts.get<ffi::Buffer<ffi::F32>>(index);
    if (!part.has_value()) return part.error();
    arrays.push_back(part->typed_data());
    sizes.push_back(part->dimensions()[0]);
  }
  const Parts<const float> grads(arrays, sizes, dim);
  const Parts<float> out({sums->typed_data()}, {num_groups}, dim);
  const int64_t num_terms = present & kBags ? bags.element_count() : grads.num_rows();
  const Groups groups{offsets.typed_data(), num_groups, num_terms};
  const GradientTerms terms{&grads,
                            present & kBags ? bags.typed_data() : nullptr,
                            ids.typed_data(),
                            present & kWeights ? weights.typed_data() : nullptr,
                            static_cast<int64_t>(weights.element_count()),
                            present & kScale ? scale.typed_data() : nullptr};
  sum_groups(
      groups, out, nullptr, dim,
      [&](int64_t first, int64_t last, LongGroups& noted) {
        short_groups(terms, groups, out, dim, first, last, noted);
      },
      [&](int64_t begin, int64_t end, double* partial) {
        group_block(terms, dim, begin, end, partial);
      });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsparse

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_bag_gradients, jaxsparse::bag_gradients,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("present"));
