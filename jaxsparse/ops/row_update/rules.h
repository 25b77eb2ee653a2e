// SPDX-License-Identifier: Apache-2.0
// The shipped rules on one row: the formulas of jaxsparse/optimizers, operation for operation.
#pragma once

#include <cmath>
#include <cstdint>

#include "native.h"

#if defined(__GNUC__)
#define JS_RULE_INLINE inline __attribute__((always_inline))
#else
#define JS_RULE_INLINE inline
#endif

// `moved` may be `w` itself, and slots are written where they are read: element by element.
#if defined(__clang__)
#define JS_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define JS_ELEMENTWISE _Pragma("GCC ivdep")
#else
#define JS_ELEMENTWISE
#endif

namespace jaxsparse {

enum RuleKind : int64_t { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2, kAdam = 3, kFtrl = 4 };

// Hyper-parameters, in the order `cpu.py` gives them.
struct RuleOptions {
  int64_t kind;
  float l2, weight_decay;
  bool catch_up, per_row_count;
  float eps;
  float b1, one_minus_b1, b2, one_minus_b2;  // Adam
  double log_b1, log_b2;                     // of the float64 values
  bool b1_is_zero, b2_is_zero;
  float beta, l1, proximal_l2;  // FTRL
};

constexpr int32_t kNever = -1;  // last_step of a row that was never touched

JS_RULE_INLINE float ratio_or_zero(float numerator, float denominator) {
  return denominator == 0.0f ? 0.0f : numerator / (denominator == 0.0f ? 1.0f : denominator);
}

// 1 - base**count, of a float64 logarithm.
inline float one_minus_power(bool is_zero, double log_base, int32_t count) {
  if (is_zero) return 1.0f;
  return static_cast<float>(-std::expm1(static_cast<double>(count) * log_base));
}

// (1 - rate)**num_steps - 1; a rate above 1 decays to 0.
inline float change_after(float rate, int32_t num_steps) {
  if (!(num_steps > 0)) return 0.0f;
  const float least = rate < 1.0f || rate != rate ? rate : 1.0f;
  const double log_kept = std::log1p(-static_cast<double>(least));
  return static_cast<float>(std::expm1(static_cast<double>(num_steps) * log_kept));
}

// l2 and decoupled decay: new gradients into `g_out`, rows into `w_out`.
JS_RULE_INLINE void decay_row(const RuleOptions& rule, const float* w, const float* g, float lr,
                              float change, int64_t dim, float* w_out, float* g_out) {
  if (rule.l2 > 0.0f) {
    JS_ELEMENTWISE
    for (int64_t c = 0; c < dim; ++c) g_out[c] = g[c] + rule.l2 * w[c];
  } else {
    std::memcpy(g_out, g, dim * sizeof(float));
  }
  if (rule.weight_decay == 0.0f) {
    if (w_out != w) std::memcpy(w_out, w, dim * sizeof(float));
  } else if (rule.catch_up) {
    JS_ELEMENTWISE
    for (int64_t c = 0; c < dim; ++c) w_out[c] = w[c] + change * w[c];
  } else {
    const float rate = lr * rule.weight_decay;
    JS_ELEMENTWISE
    for (int64_t c = 0; c < dim; ++c) w_out[c] = w[c] - rate * w[c];
  }
}

JS_RULE_INLINE void sgd_row(const float* w, const float* g, float lr, int64_t dim, float* moved) {
  JS_ELEMENTWISE
  for (int64_t c = 0; c < dim; ++c) moved[c] = w[c] - lr * g[c];
}

JS_RULE_INLINE void adagrad_row(const RuleOptions& rule, const float* w, const float* g, float lr,
                                int64_t dim, float* accumulator, float* moved) {
  JS_ELEMENTWISE
  for (int64_t c = 0; c < dim; ++c) {
    const float sum = accumulator[c] + g[c] * g[c];
    accumulator[c] = sum;
    moved[c] = w[c] - lr * ratio_or_zero(g[c], std::sqrt(sum) + rule.eps);
  }
}

// Mean of squares: 16 sums, added in a fixed tree.
JS_RULE_INLINE float mean_square(const float* g, int64_t dim) {
  double sums[16] = {};
  int64_t column = 0;
  for (; column + 16 <= dim; column += 16) {
    for (int lane = 0; lane < 16; ++lane) {
      const float square = g[column + lane] * g[column + lane];
      sums[lane] += static_cast<double>(square);
    }
  }
  for (int lane = 0; column + lane < dim; ++lane) {
    const float square = g[column + lane] * g[column + lane];
    sums[lane] += static_cast<double>(square);
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return static_cast<float>(sums[0] / static_cast<double>(dim));
}

JS_RULE_INLINE void rowwise_row(const RuleOptions& rule, const float* w, const float* g, float lr,
                                int64_t dim, float* accumulator, float* moved) {
  const float sum = *accumulator + mean_square(g, dim);
  *accumulator = sum;
  const float root = std::sqrt(sum) + rule.eps;
  JS_ELEMENTWISE
  for (int64_t c = 0; c < dim; ++c) moved[c] = w[c] - lr * ratio_or_zero(g[c], root);
}

JS_RULE_INLINE void adam_row(const RuleOptions& rule, const float* w, const float* g, float lr,
                             float correction1, float correction2, int64_t dim, float* m,
                             float* v, float* moved) {
  JS_ELEMENTWISE
  for (int64_t c = 0; c < dim; ++c) {
    const float first = rule.b1 * m[c] + rule.one_minus_b1 * g[c];
    const float second = rule.b2 * v[c] + rule.one_minus_b2 * (g[c] * g[c]);
    m[c] = first;
    v[c] = second;
    const float root = std::sqrt(second / correction2);
    moved[c] = w[c] - lr * ratio_or_zero(first / correction1, root + rule.eps);
  }
}

// While the rate is 0 nothing moves.
JS_RULE_INLINE void ftrl_row(const RuleOptions& rule, const float* w, const float* g, float lr,
                             int64_t dim, float* z, float* n, float* moved) {
  if (lr == 0.0f) {
    if (moved != w) std::memcpy(moved, w, dim * sizeof(float));
    return;
  }
  const float proximal = rule.proximal_l2 * lr;
  JS_ELEMENTWISE
  for (int64_t c = 0; c < dim; ++c) {
    const float square = g[c] * g[c];
    const float root = std::sqrt(n[c]), n_new = n[c] + square;
    const float root_new = std::sqrt(n_new);
    const float sigma = ratio_or_zero(square, lr * (root_new + root));
    const float z_new = z[c] + g[c] - sigma * w[c];
    const float denominator = rule.beta + root_new + proximal;
    const float excess = std::fabs(z_new) - rule.l1;
    // NaN has to come through all of these.
    const float sign = z_new > 0.0f ? 1.0f : z_new < 0.0f ? -1.0f : z_new;
    const float shrunk = sign * (excess < 0.0f ? 0.0f : excess);
    const float to = -lr * ratio_or_zero(shrunk, denominator);
    z[c] = z_new;
    n[c] = n_new;
    moved[c] = denominator != 0.0f ? to : w[c];
  }
}

}  // namespace jaxsparse
