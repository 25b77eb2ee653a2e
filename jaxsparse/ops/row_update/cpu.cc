// SPDX-License-Identifier: Apache-2.0
// `row_update` on CPUs: every touched row and its slots are read once and written where they are.

#include <atomic>
#include <vector>

#include "huge_pages.h"
#include "native.h"
#include "quantize/stochastic.h"
#include "row_update/rules.h"

namespace jaxsparse {
namespace {

constexpr int64_t kBytesPerTask = 1 << 18;
constexpr int64_t kBytesAhead = 8192;  // of rows to come that are prefetched

// One call: what `cpu.py` passes. T is float, or uint16_t for bfloat16.
template <typename T>
struct Update {
  RuleOptions rule;
  int64_t num_rows, dim, num_touched;
  const int32_t* rows;
  const float* grads;
  // First row of each table, ascending; without any, rates and noise are by entry of `rows`.
  const int32_t* starts;
  int64_t num_tables;
  const float* rates;
  const uint32_t* noise;  // what rounding depends on; of a table, what is added to its rows
  int32_t step;
  uint32_t step_key;
  float correction1, correction2;  // of Adam, by the global step
  T* slab;
  float* first;   // [R, D], or [R] of row-wise Adagrad
  float* second;  // [R, D]
  int32_t* count;
  int32_t* last_step;
};

// Where rate and noise of an entry are: at its table, or at itself. Rows mostly come in ascending
// order: the last table is tried first.
struct PlaceOf {
  const int32_t* starts;
  int64_t num_tables;
  int64_t table = 0;

  JS_RULE_INLINE int64_t of(int64_t k, int32_t row) {
    if (num_tables == 0) return k;
    const bool below = row < starts[table];
    if (below || (table + 1 < num_tables && row >= starts[table + 1])) {
      table = std::max<int64_t>(std::upper_bound(starts, starts + num_tables, row) - starts, 1) - 1;
    }
    return table;
  }
};

JS_RULE_INLINE void prefetch(const void* row, int64_t bytes) {
  const char* at = static_cast<const char*>(row);
  bytes = std::min<int64_t>(bytes, 2048);
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(at + byte, 1);
  __builtin_prefetch(at + bytes - 1, 1);
}

template <typename T>
JS_RULE_INLINE void prefetch_touched(const Update<T>& update, int64_t k) {
  const int64_t row = update.rows[k];
  if (row < 0 || row >= update.num_rows) return;
  const int64_t kind = update.rule.kind, dim = update.dim;
  prefetch(update.slab + row * dim, dim * sizeof(T));
  if (kind == kRowwiseAdagrad) {
    __builtin_prefetch(update.first + row, 1);
  } else if (update.first != nullptr) {
    prefetch(update.first + row * dim, dim * sizeof(float));
  }
  if (update.second != nullptr) prefetch(update.second + row * dim, dim * sizeof(float));
}

// Applies the rule to one row: `w` to `moved`, which may be the same.
template <int64_t kKind, bool kWrite, typename T>
JS_RULE_INLINE void move_row(const Update<T>& update, int64_t row, const float* w, const float* g,
                             float lr, float* scratch, float* moved) {
  const RuleOptions& rule = update.rule;
  const int64_t dim = update.dim;
  if (kKind != kFtrl && (rule.l2 > 0.0f || rule.weight_decay != 0.0f)) {
    float change = 0.0f;
    if (rule.catch_up) {
      const int32_t last = update.last_step[row];
      // Unsigned: a counter that was set far back must not overflow.
      const auto absent = static_cast<int32_t>(static_cast<uint32_t>(update.step) -
                                               static_cast<uint32_t>(last));
      change = change_after(lr * rule.weight_decay, last == kNever ? 1 : absent);
      if (kWrite) update.last_step[row] = update.step;
    }
    decay_row(rule, w, g, lr, change, dim, scratch, scratch + dim);
    w = scratch;
    g = scratch + dim;
  }
  if (kKind == kSgd) {
    sgd_row(w, g, lr, dim, moved);
  } else if (kKind == kAdagrad) {
    adagrad_row<kWrite>(rule, w, g, lr, dim, update.first + row * dim, moved);
  } else if (kKind == kRowwiseAdagrad) {
    rowwise_row<kWrite>(rule, w, g, lr, dim, update.first + row, moved);
  } else if (kKind == kAdam) {
    float correction1 = update.correction1, correction2 = update.correction2;
    if (rule.per_row_count) {
      const auto count = static_cast<int32_t>(static_cast<uint32_t>(update.count[row]) + 1u);
      correction1 = one_minus_power(rule.b1_is_zero, rule.log_b1, count);
      correction2 = one_minus_power(rule.b2_is_zero, rule.log_b2, count);
      if (kWrite) update.count[row] = count;
    }
    adam_row<kWrite>(rule, w, g, lr, correction1, correction2, dim, update.first + row * dim,
                     update.second + row * dim, moved);
  } else {
    ftrl_row<kWrite>(rule, w, g, lr, dim, update.first + row * dim, update.second + row * dim,
                     moved);
  }
}

JS_RULE_INLINE bool is_finite_row(const float* values, int64_t dim) {
  uint32_t largest = 0;
  for (int64_t c = 0; c < dim; ++c) {
    uint32_t bits;
    std::memcpy(&bits, values + c, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  return largest < 0x7f800000u;
}

JS_RULE_INLINE bool is_finite_row(const uint16_t* values, int64_t dim) {
  uint16_t largest = 0;
  for (int64_t c = 0; c < dim; ++c) {
    largest = std::max<uint16_t>(largest, values[c] & 0x7fffu);
  }
  return largest < 0x7f80u;
}

// `scratch [4 * dim]`: the moved row, the decayed row and gradient, the rounded row.
template <int64_t kKind, bool kWrite>
JS_RULE_INLINE int64_t move_rows(const Update<float>& update, int64_t begin, int64_t end,
                                 float* scratch) {
  const int64_t dim = update.dim;
  const int64_t ahead = std::clamp<int64_t>(kBytesAhead / (dim * 8 + 1), 1, 32);
  PlaceOf places{update.starts, update.num_tables};
  int64_t bad = 0;
  for (int64_t k = begin; k < end; ++k) {
    if (k + ahead < end) prefetch_touched(update, k + ahead);
    const int32_t row = update.rows[k];
    if (row < 0 || row >= update.num_rows) continue;
    float* w = update.slab + static_cast<int64_t>(row) * dim;
    float* moved = kWrite ? w : scratch;
    const float lr = update.rates[places.of(k, row)];
    move_row<kKind, kWrite>(update, row, w, update.grads + k * dim, lr, scratch + dim, moved);
    if (!kWrite) bad += !is_finite_row(moved, dim);
  }
  return bad;
}

template <int64_t kKind, bool kWrite>
JS_RULE_INLINE int64_t move_rows(const Update<uint16_t>& update, int64_t begin, int64_t end,
                                 float* scratch) {
  const int64_t dim = update.dim;
  const int64_t ahead = std::clamp<int64_t>(kBytesAhead / (dim * 8 + 1), 1, 32);
  PlaceOf places{update.starts, update.num_tables};
  auto* const rounded = reinterpret_cast<uint16_t*>(scratch + 3 * dim);
  int64_t bad = 0;
  for (int64_t k = begin; k < end; ++k) {
    if (k + ahead < end) prefetch_touched(update, k + ahead);
    const int32_t row = update.rows[k];
    if (row < 0 || row >= update.num_rows) continue;
    uint16_t* stored = update.slab + row * dim;
    for (int64_t c = 0; c < dim; ++c) scratch[c] = from_bfloat16(stored[c]);
    const int64_t place = places.of(k, row);
    const uint32_t base = update.num_tables == 0 ? 0u : static_cast<uint32_t>(row);
    move_row<kKind, kWrite>(update, row, scratch, update.grads + k * dim, update.rates[place],
                            scratch + dim, scratch);
    const uint32_t row_key = stochastic_row_key(update.step_key, base + update.noise[place]);
    stochastic_bf16_row(scratch, dim, row_key, kWrite ? stored : rounded);
    if (!kWrite) bad += !is_finite_row(rounded, dim);
  }
  return bad;
}

template <bool kWrite, typename T>
JS_RULE_INLINE int64_t by_rule(const Update<T>& update, int64_t begin, int64_t end,
                               float* scratch) {
  switch (update.rule.kind) {
    case kSgd: return move_rows<kSgd, kWrite>(update, begin, end, scratch);
    case kAdagrad: return move_rows<kAdagrad, kWrite>(update, begin, end, scratch);
    case kRowwiseAdagrad: return move_rows<kRowwiseAdagrad, kWrite>(update, begin, end, scratch);
    case kAdam: return move_rows<kAdam, kWrite>(update, begin, end, scratch);
    default: return move_rows<kFtrl, kWrite>(update, begin, end, scratch);
  }
}

JS_CLONES
int64_t write_some(const Update<float>& update, int64_t begin, int64_t end, float* scratch) {
  return by_rule<true>(update, begin, end, scratch);
}
JS_CLONES
int64_t write_some(const Update<uint16_t>& update, int64_t begin, int64_t end, float* scratch) {
  return by_rule<true>(update, begin, end, scratch);
}
JS_CLONES
int64_t check_some(const Update<float>& update, int64_t begin, int64_t end, float* scratch) {
  return by_rule<false>(update, begin, end, scratch);
}
JS_CLONES
int64_t check_some(const Update<uint16_t>& update, int64_t begin, int64_t end, float* scratch) {
  return by_rule<false>(update, begin, end, scratch);
}

template <typename T>
int64_t run(const Update<T>& update, bool write) {
  std::atomic<int64_t> bad{0};
  const int64_t grain = std::max<int64_t>(kBytesPerTask / (update.dim * 12 + 64), 16);
  parallel_for(update.num_touched, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(4 * update.dim);
    bad += write ? write_some(update, begin, end, scratch.data())
                 : check_some(update, begin, end, scratch.data());
  });
  return bad;
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
  ffi::Buffer<ffi::S32> rows;
  ffi::Buffer<ffi::F32> grads;
  ffi::Buffer<ffi::S32> starts;
  ffi::Buffer<ffi::F32> rates;
  ffi::Buffer<ffi::U32> noise;
  ffi::Buffer<ffi::S32> step;
};

template <typename T>
int64_t run_on(const Inputs& in, const RuleOptions& rule, uint32_t seed, int64_t num_rows,
               const std::vector<void*>& arrays, bool write) {
  Update<T> update{};
  update.rule = rule;
  update.num_rows = num_rows;
  update.num_touched = in.grads.dimensions()[0];
  update.dim = in.grads.dimensions()[1];
  update.rows = in.rows.typed_data();
  update.grads = in.grads.typed_data();
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
  return run(update, write);
}

size_t num_arrays(const RuleOptions& rule) {
  return 1 + (rule.kind != kSgd) + (rule.kind == kAdam || rule.kind == kFtrl) +
         rule.per_row_count + rule.catch_up;
}

// Slab and slots among the arguments; the first says how many rows there are and their dtype.
ffi::Error move(const Inputs& in, ffi::RemainingArgs tables, int64_t kind,
                ffi::Span<const double> options, int64_t seed, bool write, int64_t& bad) {
  if (options.size() != kNumOptions) return ffi::Error::InvalidArgument("row_update: options");
  const RuleOptions rule = options_of(kind, options);
  if (tables.size() != num_arrays(rule)) return ffi::Error::InvalidArgument("row_update: slots");
  std::vector<void*> arrays;
  for (size_t index = 0; index < tables.size(); ++index) {
    ffi::AnyBuffer table = *tables.get<ffi::AnyBuffer>(index);
    use_huge_pages(table.untyped_data(), table.size_bytes());
    arrays.push_back(table.untyped_data());
  }
  const ffi::AnyBuffer slab = *tables.get<ffi::AnyBuffer>(0);
  const int64_t num_rows = slab.dimensions()[0];
  const auto as = static_cast<uint32_t>(seed);
  bad = slab.element_type() == ffi::F32
            ? run_on<float>(in, rule, as, num_rows, arrays, write)
            : run_on<uint16_t>(in, rule, as, num_rows, arrays, write);
  return ffi::Error::Success();
}

ffi::Error row_update(ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::F32> grads,
                      ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::F32> rates,
                      ffi::Buffer<ffi::U32> noise, ffi::Buffer<ffi::S32> step,
                      ffi::Buffer<ffi::PRED> enabled, ffi::RemainingArgs tables,
                      ffi::RemainingRets results, int64_t kind, ffi::Span<const double> options,
                      int64_t seed) {
  for (size_t index = 0; index < tables.size(); ++index) {
    auto to = results.get<ffi::AnyBuffer>(index);
    const auto from = tables.get<ffi::AnyBuffer>(index);
    if (!to.has_value() || !from.has_value() || (*to)->untyped_data() != from->untyped_data()) {
      return ffi::Error::Internal("row_update: a table is not updated in place");
    }
  }
  if (!*enabled.typed_data()) return ffi::Error::Success();
  int64_t bad = 0;
  return move({rows, grads, starts, rates, noise, step}, tables, kind, options, seed, true, bad);
}

ffi::Error count_not_finite(ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::F32> grads,
                            ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::F32> rates,
                            ffi::Buffer<ffi::U32> noise, ffi::Buffer<ffi::S32> step,
                            ffi::RemainingArgs tables, ffi::Result<ffi::Buffer<ffi::S32>> count,
                            int64_t kind, ffi::Span<const double> options, int64_t seed) {
  int64_t bad = 0;
  const ffi::Error error =
      move({rows, grads, starts, rates, noise, step}, tables, kind, options, seed, false, bad);
  *count->typed_data() = static_cast<int32_t>(bad);
  return error;
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
