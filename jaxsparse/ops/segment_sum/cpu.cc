// SPDX-License-Identifier: Apache-2.0
// `bag_gradients` and plain sums by group on CPUs.

#include "native.h"
#include "segment_sum/gradient_terms.h"

namespace jaxsparse {

JS_CLONES
void sum_gradients(const GradientTerms& terms, const Groups& groups, const Rows& out,
                   int64_t first, int64_t last, LongGroups& noted) {
  sum_short_groups(terms, groups, out, nullptr, out.dim, first, last, noted);
}

JS_CLONES
void sum_gradient_block(const GradientTerms& terms, int64_t dim, int64_t begin, int64_t end,
                        double* partial) {
  sum_terms(terms, begin, end, dim, 1.0f, partial, kTermsAhead);
}

namespace {

ffi::Error bag_gradients(ffi::Buffer<ffi::S32> offsets, ffi::Buffer<ffi::S32> bags,
                         ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights,
                         ffi::Buffer<ffi::F32> scale, ffi::RemainingArgs parts,
                         ffi::Result<ffi::Buffer<ffi::F32>> sums, int64_t present) {
  const int64_t dim = sums->dimensions()[1];
  auto grads = gradient_parts(parts, 0, dim);
  if (!grads.has_value()) return grads.error();
  const GradientInputs in{offsets, bags, ids, weights, scale, present};
  const GradientTerms terms = in.terms(*grads);
  const Groups groups = in.groups(*grads);
  const Rows out{sums->typed_data(), 0, dim};
  sum_groups(
      groups, out, nullptr, dim,
      [&](int64_t first, int64_t last, LongGroups& noted) {
        read_ahead(terms, groups, first, last, dim);
        sum_gradients(terms, groups, out, first, last, noted);
      },
      [&](int64_t begin, int64_t end, double* partial) {
        sum_gradient_block(terms, dim, begin, end, partial);
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
