// SPDX-License-Identifier: Apache-2.0
// One update of the touched rows of a table on CPUs: what it is made of, and the loop over rows.
#pragma once

#include "native.h"
#include "row_update/rules.h"

namespace jaxsparse {

// One call: what `cpu.py` passes. T is float, or uint16_t for bfloat16.
template <typename T>
struct Update {
  RuleOptions rule;
  int64_t num_rows, dim, num_touched;
  const int32_t* rows;
  const float* grads;  // [num_touched, dim], or of the entries from `first_grad` on
  int64_t first_grad;
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

  const float* gradient(int64_t k) const { return grads + (k - first_grad) * dim; }
};

constexpr int64_t kScratchRows = 6;

// Moves the rows of entries begin .. end, or counts those that would not be finite; `scratch` has
// kScratchRows * dim numbers. Functions of several versions.
int64_t move_entries(const Update<float>& update, int64_t begin, int64_t end, float* scratch);
int64_t move_entries(const Update<uint16_t>& update, int64_t begin, int64_t end, float* scratch);
int64_t count_entries(const Update<float>& update, int64_t begin, int64_t end, float* scratch);
int64_t count_entries(const Update<uint16_t>& update, int64_t begin, int64_t end, float* scratch);

}  // namespace jaxsparse
