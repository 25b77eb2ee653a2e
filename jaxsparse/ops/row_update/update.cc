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

// Slots of one row, or copies of them.
struct RowSlots {
  float* first;
  float* second;
  int32_t* count;
  int32_t* last_step;
};

// Numbers a row has of the first slot.
template <typename T>
JS_RULE_INLINE int64_t width(const Update<T>& update) {
  return update.rule.kind == kRowwiseAdagrad ? 1 : update.dim;
}

template <typename T>
JS_RULE_INLINE RowSlots slots_of(const Update<T>& update, int64_t row) {
  return {update.first == nullptr ? nullptr : update.first + row * width(update),
          update.second == nullptr ? nullptr : update.second + row * update.dim,
          update.count == nullptr ? nullptr : update.count + row,
          update.last_step == nullptr ? nullptr : update.last_step + row};
}

// Applies the rule to one row: `w` to `moved`, which may be the same, and slots where they are.
template <int64_t kKind, typename T>
JS_RULE_INLINE void move_row(const Update<T>& update, const RowSlots& slots, const float* w,
                             const float* g, float lr, float* scratch, float* moved) {
  const RuleOptions& rule = update.rule;
  const int64_t dim = update.dim;
  if (kKind != kFtrl && (rule.l2 > 0.0f || rule.weight_decay != 0.0f)) {
    float change = 0.0f;
    if (rule.catch_up) {
      const int32_t last = *slots.last_step;
      // Unsigned: a counter that was set far back must not overflow.
      const auto absent = static_cast<int32_t>(static_cast<uint32_t>(update.step) -
                                               static_cast<uint32_t>(last));
      change = change_after(lr * rule.weight_decay, last == kNever ? 1 : absent);
      *slots.last_step = update.step;
    }
    decay_row(rule, w, g, lr, change, dim, scratch, scratch + dim);
    w = scratch;
    g = scratch + dim;
  }
  if (kKind == kSgd) {
    sgd_row(w, g, lr, dim, moved);
  } else if (kKind == kAdagrad) {
    adagrad_row(rule, w, g, lr, dim, slots.first, moved);
  } else if (kKind == kRowwiseAdagrad) {
    rowwise_row(rule, w, g, lr, dim, slots.first, moved);
  } else if (kKind == kAdam) {
    float correction1 = update.correction1, correction2 = update.correction2;
    if (rule.per_row_count) {
      const auto count = static_cast<int32_t>(static_cast<uint32_t>(*slots.count) + 1u);
      correction1 = one_minus_power(rule.b1_is_zero, rule.log_b1, count);
      correction2 = one_minus_power(rule.b2_is_zero, rule.log_b2, count);
      *slots.count = count;
    }
    adam_row(rule, w, g, lr, correction1, correction2, dim, slots.first, slots.second, moved);
  } else {
    ftrl_row(rule, w, g, lr, dim, slots.first, slots.second, moved);
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

// What a row's slots would become is written to copies of them.
struct SlotCopies {
  float* rows;  // [2, dim]
  int32_t numbers[2];

  template <typename T>
  JS_RULE_INLINE RowSlots of(const Update<T>& update, int64_t row) {
    RowSlots slots = slots_of(update, row);
    if (slots.first != nullptr) slots.first = copy(slots.first, width(update), rows);
    if (slots.second != nullptr) slots.second = copy(slots.second, update.dim, rows + update.dim);
    if (slots.count != nullptr) slots.count = copy(slots.count, 1, numbers);
    if (slots.last_step != nullptr) slots.last_step = copy(slots.last_step, 1, numbers + 1);
    return slots;
  }

  template <typename Number>
  JS_RULE_INLINE static Number* copy(const Number* from, int64_t size, Number* to) {
    std::memcpy(to, from, size * sizeof(Number));
    return to;
  }
};

template <typename T>
JS_RULE_INLINE bool are_finite(const Update<T>& update, const RowSlots& slots) {
  return (slots.first == nullptr || is_finite_row(slots.first, width(update))) &&
         (slots.second == nullptr || is_finite_row(slots.second, update.dim));
}

// One row, from where it is stored and back, or into `scratch` and `slots` that are copies; whether
// all of it is finite is told of copies only.
template <int64_t kKind, bool kWrite>
JS_RULE_INLINE bool move_stored(const Update<float>& update, int64_t k, int64_t row, int64_t place,
                                const RowSlots& slots, float* scratch) {
  float* const w = update.slab + row * update.dim;
  float* const moved = kWrite ? w : scratch;
  move_row<kKind>(update, slots, w, update.gradient(k), update.rates[place],
                  scratch + update.dim, moved);
  return kWrite || is_finite_row(moved, update.dim);
}

template <int64_t kKind, bool kWrite>
JS_RULE_INLINE bool move_stored(const Update<uint16_t>& update, int64_t k, int64_t row,
                                int64_t place, const RowSlots& slots, float* scratch) {
  const int64_t dim = update.dim;
  uint16_t* const stored = update.slab + row * dim;
  uint16_t* const rounded = kWrite ? stored : reinterpret_cast<uint16_t*>(scratch + 3 * dim);
  for (int64_t c = 0; c < dim; ++c) scratch[c] = from_bfloat16(stored[c]);
  move_row<kKind>(update, slots, scratch, update.gradient(k), update.rates[place], scratch + dim,
                  scratch);
  const uint32_t base = update.num_tables == 0 ? 0u : static_cast<uint32_t>(row);
  const uint32_t row_key = stochastic_row_key(update.step_key, base + update.noise[place]);
  stochastic_bf16_row(scratch, dim, row_key, rounded);
  return kWrite || is_finite_row(rounded, dim);
}

// `scratch [kScratchRows * dim]`: the moved row, the decayed row and gradient, the rounded row,
// copies of two slots.
template <int64_t kKind, bool kWrite, typename T>
JS_RULE_INLINE int64_t move_rows(const Update<T>& update, int64_t begin, int64_t end,
                                 float* scratch) {
  const int64_t ahead = std::clamp<int64_t>(kBytesAhead / (update.dim * 8 + 1), 1, 32);
  PlaceOf places{update.starts, update.num_tables};
  SlotCopies copies{scratch + 4 * update.dim, {}};
  int64_t bad = 0;
  for (int64_t k = begin; k < end; ++k) {
    if (k + ahead < update.num_touched) prefetch_touched(update, k + ahead);
    const int32_t row = update.rows[k];
    if (row < 0 || row >= update.num_rows) continue;
    const RowSlots slots = kWrite ? slots_of(update, row) : copies.of(update, row);
    const int64_t place = places.of(k, row);
    const bool is_finite = move_stored<kKind, kWrite>(update, k, row, place, slots, scratch);
    if (!kWrite) bad += !is_finite || !are_finite(update, slots);
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
