// SPDX-License-Identifier: Apache-2.0
// `row_update` on CPUs: what XLA calls.

#include <atomic>
#include <vector>

#include "huge_pages.h"
#include "native.h"
#include "quantize/stochastic.h"
#include "row_update/update.h"
#include "segment_sum/gradient_terms.h"

namespace jaxsparse {
namespace {

constexpr int64_t kBytesAtOnce = 1 << 13;  // of sums

// body(begin, end, scratch) on threads.
template <typename T, typename Body>
void parallel_entries(const Update<T>& update, Body&& body) {
  const int64_t grain = std::max<int64_t>(kBytesPerTask / (update.dim * 12 + 64), 16);
  parallel_for(update.num_touched, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(kScratchRows * update.dim);
    body(begin, end, scratch.data());
  });
}

// Sums of a few entries' gradients are made and used while they are in the first cache: no array of
// all sums is written and read.
template <typename T>
void sum_and_move(const Update<T>& update, const GradientTerms& terms, const Groups& groups) {
  const int64_t dim = update.dim;
  const int64_t at_once = std::clamp<int64_t>(kBytesAtOnce / (dim * sizeof(float)), 1, 256);
  std::vector<int64_t> long_ones;
  for (int64_t k = 0; k < groups.num_groups; ++k) {
    if (groups.end(k) - groups.begin(k) > kBlock) long_ones.push_back(k);
  }
  std::vector<float> long_sums(long_ones.size() * dim);
  sum_long_groups(
      groups, long_ones, dim,
      [&](int64_t begin, int64_t end, double* partial) {
        sum_gradient_block(terms, dim, begin, end, partial);
      },
      [&](size_t n, const double* sums) { std::copy(sums, sums + dim, &long_sums[n * dim]); });
  parallel_groups(groups, dim, [&](int64_t first, int64_t last) {
    read_ahead(terms, groups, first, last, dim);
    std::vector<float> memory((kScratchRows + at_once) * dim);
    float* const sums = memory.data() + kScratchRows * dim;
    Update<T> some = update;
    some.grads = sums;
    for (int64_t k = first; k < last; k += at_once) {
      const int64_t end = std::min(k + at_once, last);
      LongGroups noted;
      sum_gradients(terms, groups, Rows{sums, k, dim}, k, end, noted);
      for (const int64_t group : noted.groups) {
        const auto n = std::lower_bound(long_ones.begin(), long_ones.end(), group);
        const float* const from = &long_sums[(n - long_ones.begin()) * dim];
        std::copy(from, from + dim, sums + (group - k) * dim);
      }
      some.first_grad = k;
      move_entries(some, k, end, memory.data());
    }
  });
}

RuleOptions options_of(int64_t kind, ffi::Span<const double> p) {
  RuleOptions rule{};
  rule.kind = kind;
  rule.l2 = static_cast<float>(p[0]);
  rule.weight_decay = static_cast<float>(p[1]);
  rule.catch_up = p[2] != 0;
  rule.per_row_count = p[3] != 0;
  rule.eps = static_cast<float>(p[4]);
  rule.b1 = static_cast<float>(p[5]);
  rule.one_minus_b1 = static_cast<float>(1.0 - p[5]);
  rule.b2 = static_cast<float>(p[6]);
  rule.one_minus_b2 = static_cast<float>(1.0 - p[6]);
  rule.b1_is_zero = p[5] == 0;
  rule.b2_is_zero = p[6] == 0;
  rule.log_b1 = std::log(p[5]);
  rule.log_b2 = std::log(p[6]);
  rule.beta = static_cast<float>(p[7]);
  rule.l1 = static_cast<float>(p[8]);
  rule.proximal_l2 = static_cast<float>(p[9]);
  return rule;
}

constexpr size_t kNumOptions = 10;

struct Inputs {
  ffi::Buffer<ffi::S32> rows, starts;
  ffi::Buffer<ffi::F32> rates;
  ffi::Buffer<ffi::U32> noise;
  ffi::Buffer<ffi::S32> step;
};

template <typename T>
Update<T> make_update(const Inputs& in, const RuleOptions& rule, uint32_t seed, int64_t num_rows,
                      int64_t dim, const std::vector<void*>& arrays) {
  Update<T> update{};
  update.rule = rule;
  update.num_rows = num_rows;
  update.num_touched = in.rows.element_count();
  update.dim = dim;
  update.rows = in.rows.typed_data();
  update.starts = in.starts.typed_data();
  update.num_tables = in.starts.element_count();
  update.rates = in.rates.typed_data();
  update.noise = in.noise.typed_data();
  update.step = *in.step.typed_data();
  update.step_key = stochastic_step_key(seed, static_cast<uint32_t>(update.step));
  // Of the global step, which a row's own count replaces.
  const auto count = static_cast<int32_t>(static_cast<uint32_t>(update.step) + 1u);
  update.correction1 = one_minus_power(rule.b1_is_zero, rule.log_b1, count);
  update.correction2 = one_minus_power(rule.b2_is_zero, rule.log_b2, count);
  // In the order of `cpu.py`: slab, float slots, count, last_step.
  size_t next = 0;
  update.slab = static_cast<T*>(arrays[next++]);
  if (rule.kind != kSgd) update.first = static_cast<float*>(arrays[next++]);
  if (rule.kind == kAdam || rule.kind == kFtrl) update.second = static_cast<float*>(arrays[next++]);
  if (rule.per_row_count) update.count = static_cast<int32_t*>(arrays[next++]);
  if (rule.catch_up) update.last_step = static_cast<int32_t*>(arrays[next++]);
  return update;
}

size_t num_arrays(const RuleOptions& rule) {
  return 1 + (rule.kind != kSgd) + (rule.kind == kAdam || rule.kind == kFtrl) +
         rule.per_row_count + rule.catch_up;
}

// Calls run(update) with slab and slots, the first of `args`; the slab says how many rows there are
// and their dtype.
template <typename Run>
ffi::Error with_update(const Inputs& in, ffi::RemainingArgs args, int64_t kind,
                       ffi::Span<const double> options, int64_t seed, Run&& run) {
  if (options.size() != kNumOptions) return ffi::Error::InvalidArgument("row_update: options");
  const RuleOptions rule = options_of(kind, options);
  if (args.size() < num_arrays(rule)) return ffi::Error::InvalidArgument("row_update: slots");
  std::vector<void*> arrays;
  for (size_t index = 0; index < num_arrays(rule); ++index) {
    ffi::AnyBuffer table = *args.get<ffi::AnyBuffer>(index);
    use_huge_pages(table.untyped_data(), table.size_bytes());
    arrays.push_back(table.untyped_data());
  }
  const ffi::AnyBuffer slab = *args.get<ffi::AnyBuffer>(0);
  const int64_t num_rows = slab.dimensions()[0], dim = slab.dimensions()[1];
  const auto as = static_cast<uint32_t>(seed);
  if (slab.element_type() == ffi::F32) {
    return run(make_update<float>(in, rule, as, num_rows, dim, arrays));
  }
  return run(make_update<uint16_t>(in, rule, as, num_rows, dim, arrays));
}

bool is_in_place(ffi::RemainingArgs tables, ffi::RemainingRets results) {
  for (size_t index = 0; index < results.size(); ++index) {
    auto to = results.get<ffi::AnyBuffer>(index);
    const auto from = tables.get<ffi::AnyBuffer>(index);
    if (!to.has_value() || !from.has_value() || (*to)->untyped_data() != from->untyped_data()) {
      return false;
    }
  }
  return true;
}

ffi::Error not_in_place() {
  return ffi::Error::Internal("row_update: a table is not updated in place");
}

ffi::Error row_update(ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::F32> grads,
                      ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::F32> rates,
                      ffi::Buffer<ffi::U32> noise, ffi::Buffer<ffi::S32> step,
                      ffi::Buffer<ffi::PRED> enabled, ffi::RemainingArgs tables,
                      ffi::RemainingRets results, int64_t kind, ffi::Span<const double> options,
                      int64_t seed) {
  if (!is_in_place(tables, results)) return not_in_place();
  if (!*enabled.typed_data()) return ffi::Error::Success();
  return with_update({rows, starts, rates, noise, step}, tables, kind, options, seed,
                     [&](auto update) {
                       update.grads = grads.typed_data();
                       parallel_entries(update, [&](int64_t begin, int64_t end, float* scratch) {
                         move_entries(update, begin, end, scratch);
                       });
                       return ffi::Error::Success();
                     });
}

ffi::Error row_update_by_bags(ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::S32> offsets,
                              ffi::Buffer<ffi::S32> bags, ffi::Buffer<ffi::S32> ids,
                              ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::F32> scale,
                              ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::F32> rates,
                              ffi::Buffer<ffi::U32> noise, ffi::Buffer<ffi::S32> step,
                              ffi::Buffer<ffi::PRED> enabled, ffi::RemainingArgs args,
                              ffi::RemainingRets results, int64_t present, int64_t kind,
                              ffi::Span<const double> options, int64_t seed) {
  if (!is_in_place(args, results)) return not_in_place();
  if (!*enabled.typed_data()) return ffi::Error::Success();
  const GradientInputs in{offsets, bags, ids, weights, scale, present};
  return with_update({rows, starts, rates, noise, step}, args, kind, options, seed,
                     [&](auto update) -> ffi::Error {
                       auto grads = gradient_parts(args, results.size(), update.dim);
                       if (!grads.has_value()) return grads.error();
                       const Groups groups = in.groups(*grads);
                       if (groups.num_groups != update.num_touched) {
                         return ffi::Error::InvalidArgument("row_update: offsets");
                       }
                       sum_and_move(update, in.terms(*grads), groups);
                       return ffi::Error::Success();
                     });
}

ffi::Error count_not_finite(ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::F32> grads,
                            ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::F32> rates,
                            ffi::Buffer<ffi::U32> noise, ffi::Buffer<ffi::S32> step,
                            ffi::RemainingArgs tables, ffi::Result<ffi::Buffer<ffi::S32>> count,
                            int64_t kind, ffi::Span<const double> options, int64_t seed) {
  return with_update({rows, starts, rates, noise, step}, tables, kind, options, seed,
                     [&](auto update) {
                       update.grads = grads.typed_data();
                       std::atomic<int64_t> bad{0};
                       parallel_entries(update, [&](int64_t begin, int64_t end, float* scratch) {
                         bad += count_entries(update, begin, end, scratch);
                       });
                       *count->typed_data() = static_cast<int32_t>(bad);
                       return ffi::Error::Success();
                     });
}

}  // namespace
}  // namespace jaxsparse

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_row_update, jaxsparse::row_update,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("kind")
                                  .Attr<xla::ffi::Span<const double>>("options")
                                  .Attr<int64_t>("seed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_row_update_by_bags, jaxsparse::row_update_by_bags,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("present")
                                  .Attr<int64_t>("kind")
                                  .Attr<xla::ffi::Span<const double>>("options")
                                  .Attr<int64_t>("seed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxsparse_count_not_finite, jaxsparse::count_not_finite,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<int64_t>("kind")
                                  .Attr<xla::ffi::Span<const double>>("options")
                                  .Attr<int64_t>("seed"));
