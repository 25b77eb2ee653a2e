// SPDX-License-Identifier: Apache-2.0
// The loop over touched rows: every row and its slots are read once and written where they are.

#include "row_update/update.h"

#include "quantize/stochastic.h"

namespace jaxsparse {
namespace {

constexpr int64_t kBytesAhead = 8192;  // of rows to come that are prefetched

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
    if (k + ahead < update.num_touched) prefetch_touched(update, k + ahead);
    const int32_t row = update.rows[k];
    if (row < 0 || row >= update.num_rows) continue;
    float* w = update.slab + static_cast<int64_t>(row) * dim;
    float* moved = kWrite ? w : scratch;
    const float lr = update.rates[places.of(k, row)];
    move_row<kKind, kWrite>(update, row, w, update.grads + (k - update.first_grad) * dim, lr, scratch + dim, moved);
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
    if (k + ahead < update.num_touched) prefetch_touched(update, k + ahead);
    const int32_t row = update.rows[k];
    if (row < 0 || row >= update.num_rows) continue;
    uint16_t* stored = update.slab + row * dim;
    for (int64_t c = 0; c < dim; ++c) scratch[c] = from_bfloat16(stored[c]);
    const int64_t place = places.of(k, row);
    const uint32_t base = update.num_tables == 0 ? 0u : static_cast<uint32_t>(row);
    move_row<kKind, kWrite>(update, row, scratch, update.grads + (k - update.first_grad) * dim, update.rates[place],
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

}  // namespace

JS_CLONES
int64_t move_entries(const Update<float>& update, int64_t begin, int64_t end, float* scratch) {
  return by_rule<true>(update, begin, end, scratch);
}
JS_CLONES
int64_t move_entries(const Update<uint16_t>& update, int64_t begin, int64_t end, float* scratch) {
  return by_rule<true>(update, begin, end, scratch);
}
JS_CLONES
int64_t count_entries(const Update<float>& update, int64_t begin, int64_t end, float* scratch) {
  return by_rule<false>(update, begin, end, scratch);
}
JS_CLONES
int64_t count_entries(const Update<uint16_t>& update, int64_t begin, int64_t end, float* scratch) {
  return by_rule<false>(update, begin, end, scratch);
}

}  // namespace jaxsparse
