// SPDX-License-Identifier: Apache-2.0
// Gradients of bags as terms of the sums by distinct row. They are read where they lie, one array a
// feature, and never concatenated.
#pragma once

#include "native.h"
#include "segment_sum/grouped_sum.h"

namespace jaxsparse {

// Which optional arguments there are; `cpu.py` says the same.
enum GradientPresence : int64_t { kBags = 1, kTermWeights = 2, kBagScale = 4 };

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

// Arguments `first` and on: gradients of the bags of each feature.
inline ffi::ErrorOr<Parts<const float>> gradient_parts(ffi::RemainingArgs args, size_t first,
                                                       int64_t dim) {
  std::vector<const float*> arrays;
  std::vector<int64_t> sizes;
  for (size_t index = first; index < args.size(); ++index) {
    auto part = args.get<ffi::Buffer<ffi::F32>>(index);
    if (!part.has_value()) return ffi::Unexpected(part.error());
    arrays.push_back(part->typed_data());
    sizes.push_back(part->dimensions()[0]);
  }
  return Parts<const float>(arrays, sizes, dim);
}

// The other arguments, as XLA passes them.
struct GradientInputs {
  ffi::Buffer<ffi::S32> offsets, bags, ids;
  ffi::Buffer<ffi::F32> weights, scale;
  int64_t present;

  GradientTerms terms(const Parts<const float>& grads) const {
    return {&grads,
            present & kBags ? bags.typed_data() : nullptr,
            ids.typed_data(),
            present & kTermWeights ? weights.typed_data() : nullptr,
            static_cast<int64_t>(weights.element_count()),
            present & kBagScale ? scale.typed_data() : nullptr};
  }
  Groups groups(const Parts<const float>& grads) const {
    const int64_t num_terms = present & kBags ? bags.element_count() : grads.num_rows();
    return {offsets.typed_data(), static_cast<int64_t>(offsets.element_count()) - 1, num_terms};
  }
};

// Gradients of a table's ids are read in the order of its rows, which is none in memory: caches do
// not see it coming, and prefetches are too few at a time to hide it. So each task first reads a
// stretch that later ones need, from its first byte to its last, as long as the order of terms is
// roughly that of memory: with tables of their own the features follow one another in both.
constexpr int64_t kStretchAhead = 1 << 19;  // bytes before they are needed
constexpr int64_t kStretchNear = 1 << 21;   // that a row lies from its place by order, at most

inline void read_ahead(const GradientTerms& terms, const Groups& groups, int64_t first,
                       int64_t last, int64_t dim) {
  if (terms.bags == nullptr || first == last || dim < 1) return;  // null: in order as it is
  const int64_t begin = groups.begin(first), end = groups.end(last - 1);
  if (begin == end) return;
  const int64_t num_rows = terms.grads->num_rows();
  const int64_t num_terms = groups.end(groups.num_groups - 1);
  const int64_t row_bytes = terms.row_bytes(dim);
  const int64_t from = begin * num_rows / num_terms, to = end * num_rows / num_terms;
  const int64_t near = kStretchNear / row_bytes, ahead = kStretchAhead / row_bytes;
  for (int64_t j = begin; j < end; j += 8) {
    if (terms.bags[j] < from - near || terms.bags[j] > to + near) return;
  }
  const int64_t past = std::min(to + ahead, num_rows);
  for (int64_t row = begin == 0 ? 0 : from + ahead; row < past; ++row) {
    const auto* const line = reinterpret_cast<const volatile char*>(terms.grads->row(row));
    for (int64_t byte = 0; byte < row_bytes; byte += 64) static_cast<void>(line[byte]);
  }
}

// Functions of several versions: sums of groups first .. last but for the long ones, and the sum of
// some terms in float64.
void sum_gradients(const GradientTerms& terms, const Groups& groups, const Rows& out,
                   int64_t first, int64_t last, LongGroups& noted);
void sum_gradient_block(const GradientTerms& terms, int64_t dim, int64_t begin, int64_t end,
                        double* partial);

}  // namespace jaxsparse
