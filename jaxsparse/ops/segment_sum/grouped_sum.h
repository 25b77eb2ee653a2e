// SPDX-License-Identifier: Apache-2.0
// Sums of rows by group, for `embedding_bag` (rows of a table, by bag) and for its transpose
// (gradients of bags, by row).
//
// Terms are added in float64, in the order given, and rounded once: 10^5 equal ones lose nothing.
// A group longer than a block is cut into blocks that threads share. Where the cuts are depends on
// the group alone, so neither threads nor instruction sets change a bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

#include "native.h"

#if defined(__GNUC__)
// Forced: what is not inlined into a function of several versions is compiled for the oldest CPU.
#define JS_INLINE inline __attribute__((always_inline))
#else
#define JS_INLINE inline
#endif

namespace jaxsparse {

constexpr int64_t kBlock = 2048;           // terms
constexpr int64_t kBytesPerTask = 1 << 18;  // read and written, roughly
constexpr int64_t kTermsAhead = 32;        // of a block
constexpr int64_t kBytesAhead = 1 << 14;    // prefetched, of terms to come; of 4 KiB .. 16 KiB the
                                           // last is best on Zen 4, by a quarter

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x4 __attribute__((vector_size(32)));  // 64 bytes go through memory without AVX-512
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x4 __attribute__((vector_size(8)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

JS_INLINE f32x4 load4(const float* from) {
  f32x4 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

JS_INLINE f32x4 load4(const uint16_t* from) {  // bfloat16
  u16x4 halves;
  std::memcpy(&halves, from, sizeof halves);
  const u32x4 bits = __builtin_convertvector(halves, u32x4) << 16;
  f32x4 value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

JS_INLINE f32x8 load8(const float* from) {
  f32x8 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

JS_INLINE f32x8 load8(const uint16_t* from) {  // bfloat16
  u16x8 halves;
  std::memcpy(&halves, from, sizeof halves);
  const u32x8 bits = __builtin_convertvector(halves, u32x8) << 16;
  f32x8 value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

JS_INLINE float load1(const float* from) { return *from; }
JS_INLINE float load1(const uint16_t* from) { return from_bfloat16(*from); }

JS_INLINE void store4(f64x4 sum, float scale, float* to) {
  const f32x4 value = __builtin_convertvector(sum, f32x4) * scale;
  std::memcpy(to, &value, sizeof value);
}
JS_INLINE void store4(f64x4 sum, float, double* to) { std::memcpy(to, &sum, sizeof sum); }

template <typename T>
JS_INLINE void prefetch_row(const T* row, int64_t dim) {
  const auto at = reinterpret_cast<uintptr_t>(row);
  const uintptr_t end = at + std::min<int64_t>(dim * sizeof(T), kBytesAhead / 4);
  // Into the second level: the queue before the first is too short for that many lines. Rows need
  // not begin where a line does.
  for (uintptr_t line = at / 64 * 64; line < end; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);
  }
}

// Rows of several arrays [parts_f, dim] as if of their concatenation.
template <typename T>
class Parts {
 public:
  Parts(const std::vector<T*>& arrays, const std::vector<int64_t>& sizes, int64_t dim)
      : dim_(dim) {
    for (const int64_t size : sizes) {
      num_rows_ += size;
      stride_ = std::gcd(stride_, size);
    }
    stride_ = std::max<int64_t>(stride_, 1);
    while ((int64_t{1} << (shift_ - 31)) < stride_) ++shift_;
    inverse_ = ((uint64_t{1} << shift_) + stride_ - 1) / stride_;
    blocks_.reserve(num_rows_ / stride_);
    for (size_t part = 0; part < arrays.size(); ++part) {
      for (int64_t row = 0; row < sizes[part]; row += stride_) {
        blocks_.push_back(arrays[part] + row * dim);
      }
    }
  }

  int64_t num_rows() const { return num_rows_; }

  JS_INLINE T* row(int64_t index) const {
    // index / stride_ without a division: exact below 2^31.
    const auto block = static_cast<int64_t>(static_cast<uint64_t>(index) * inverse_ >> shift_);
    return blocks_[block] + (index - block * stride_) * dim_;
  }

 private:
  int64_t dim_;
  int64_t num_rows_ = 0;
  int64_t stride_ = 0;  // divides every part
  uint64_t inverse_ = 0;
  int shift_ = 31;
  std::vector<T*> blocks_;
};

// Rows `first` and on of one array.
struct Rows {
  float* rows;
  int64_t first, dim;

  JS_INLINE float* row(int64_t k) const { return rows + (k - first) * dim; }
};

// Group k is terms begin(k) .. end(k). Offsets are not trusted.
struct Groups {
  const int32_t* offsets;  // [num_groups + 1], or null: group k is term k
  int64_t num_groups;
  int64_t num_terms;

  JS_INLINE int64_t begin(int64_t k) const {
    return offsets == nullptr ? k : std::clamp<int64_t>(offsets[k], 0, num_terms);
  }
  JS_INLINE int64_t end(int64_t k) const {
    return offsets == nullptr ? std::min(k + 1, num_terms)
                              : std::clamp<int64_t>(offsets[k + 1], begin(k), num_terms);
  }
  // Groups and terms before group k: what work is measured with.
  int64_t work(int64_t k) const { return k + begin(k); }
  // The first group with at least `work` before it.
  int64_t at_work(int64_t wanted) const {
    int64_t low = 0, high = num_groups;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (work(middle) < wanted) low = middle + 1; else high = middle;
    }
    return low;
  }
};

// ---- one sum -----------------------------------------------------------------------------------
// Terms has row(j), a pointer or null for a term that adds nothing, and factor(j).

// `ahead`: how many terms before its turn a row is fetched; 0 where the caller does so.
template <int kVectors, typename Terms, typename Out>
JS_INLINE void sum_columns(const Terms& terms, int64_t begin, int64_t end, int64_t column,
                           float scale, Out* out, int64_t ahead) {
  f64x4 sums[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) sums[v] = f64x4{};
  for (int64_t j = begin; j < end; ++j) {
    if (ahead > 0 && j + ahead < end) {
      const auto* next = terms.row(j + ahead);
      if (next != nullptr) prefetch_row(next + column, 4 * kVectors);
    }
    const auto* row = terms.row(j);
    if (row == nullptr) continue;
    const float factor = terms.factor(j);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sums[v] += __builtin_convertvector(load4(row + column + 4 * v) * factor, f64x4);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store4(sums[v], scale, out + column + 4 * v);
}

template <typename Terms, typename Out>
JS_INLINE void sum_terms(const Terms& terms, int64_t begin, int64_t end, int64_t dim, float scale,
                         Out* out, int64_t ahead = 0) {
  int64_t column = 0;
  for (; column + 32 <= dim; column += 32) {
    sum_columns<8>(terms, begin, end, column, scale, out, ahead);
  }
  for (; column + 8 <= dim; column += 8) {
    sum_columns<2>(terms, begin, end, column, scale, out, ahead);
  }
  for (; column < dim; ++column) {
    double sum = 0;
    for (int64_t j = begin; j < end; ++j) {
      const auto* row = terms.row(j);
      if (row != nullptr) sum += static_cast<double>(load1(row + column) * terms.factor(j));
    }
    out[column] = sizeof(Out) == sizeof(float) ? static_cast<float>(sum) * scale : sum;
  }
}

template <typename Terms>
JS_INLINE void copy_term(const Terms& terms, int64_t j, int64_t dim, float scale, float* out) {
  const auto* row = terms.row(j);
  if (row == nullptr) {
    std::memset(out, 0, dim * sizeof(float));
    return;
  }
  const float factor = terms.factor(j);
  int64_t column = 0;
  for (; column + 64 <= dim; column += 64) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      const f32x8 value = load8(row + column + 8 * v) * factor * scale;
      std::memcpy(out + column + 8 * v, &value, sizeof value);
    }
  }
  for (; column + 8 <= dim; column += 8) {
    const f32x8 value = load8(row + column) * factor * scale;
    std::memcpy(out + column, &value, sizeof value);
  }
  for (; column < dim; ++column) out[column] = load1(row + column) * factor * scale;
}

// Groups of one term each: group k is term k.
template <typename Terms, typename Out>
JS_INLINE void copy_terms(const Terms& terms, const Groups& groups, const Out& out,
                          const float* scale, int64_t dim, int64_t first, int64_t last) {
  const int64_t ahead = std::clamp<int64_t>(kBytesAhead / (terms.row_bytes(dim) + 1), 1, 64);
  const int64_t end = std::min(last, groups.num_terms);
  for (int64_t k = first; k < end; ++k) {
    if (k + ahead < groups.num_terms) {
      if (const auto* row = terms.row(k + ahead)) prefetch_row(row, dim);
    }
    copy_term(terms, k, dim, scale == nullptr ? 1.0f : scale[k], out.row(k));
  }
  for (int64_t k = std::max(first, end); k < last; ++k) {
    std::memset(out.row(k), 0, dim * sizeof(float));
  }
}

// ---- all sums ----------------------------------------------------------------------------------

struct LongGroups {
  std::mutex mutex;
  std::vector<int64_t> groups;

  void add(int64_t group) {
    std::lock_guard<std::mutex> lock(mutex);
    groups.push_back(group);
  }
};

// Groups first .. last but for the long ones, which are noted. `out` has row(k), `scale` may be
// null. To be called from a function of several versions (JS_CLONES).
template <typename Terms, typename Out>
JS_INLINE void sum_short_groups(const Terms& terms, const Groups& groups, const Out& out,
                                const float* scale, int64_t dim, int64_t first, int64_t last,
                                LongGroups& noted) {
  if (groups.offsets == nullptr) return copy_terms(terms, groups, out, scale, dim, first, last);
  const int64_t ahead = std::clamp<int64_t>(kBytesAhead / (terms.row_bytes(dim) + 1), 1, 64);
  for (int64_t k = first; k < last; ++k) {
    const int64_t begin = groups.begin(k), end = groups.end(k);
    if (end - begin > kBlock) {
      noted.add(k);
      continue;
    }
    for (int64_t j = begin + ahead; j < std::min(end + ahead, groups.num_terms); ++j) {
      if (const auto* row = terms.row(j)) prefetch_row(row, dim);
    }
    float* to = out.row(k);
    const float by = scale == nullptr ? 1.0f : scale[k];
    if (end - begin == 1) {
      copy_term(terms, begin, dim, by, to);
    } else if (end == begin) {
      std::memset(to, 0, dim * sizeof(float));
    } else {
      sum_terms(terms, begin, end, dim, by, to);
    }
  }
}

// Groups of more than a block, each cut into blocks: put(n, sums) takes the float64 sums [dim] of
// the n-th. block(begin, end, partial), a function of several versions, sums terms.
template <typename Block, typename Put>
void sum_long_groups(const Groups& groups, const std::vector<int64_t>& which, int64_t dim,
                     Block&& block, Put&& put) {
  struct Piece {
    int64_t begin, end;
  };
  std::vector<Piece> pieces;
  for (const int64_t k : which) {
    for (int64_t begin = groups.begin(k); begin < groups.end(k); begin += kBlock) {
      pieces.push_back({begin, std::min(begin + kBlock, groups.end(k))});
    }
  }
  std::vector<double> partial(pieces.size() * dim);
  parallel_for(pieces.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) block(pieces[p].begin, pieces[p].end, &partial[p * dim]);
  });
  double* from = partial.data();
  for (size_t n = 0; n < which.size(); ++n) {
    const int64_t size = groups.end(which[n]) - groups.begin(which[n]);
    const int64_t count = (size + kBlock - 1) / kBlock;
    for (int64_t p = 1; p < count; ++p) {
      for (int64_t column = 0; column < dim; ++column) from[column] += from[p * dim + column];
    }
    put(n, from);
    from += count * dim;
  }
}

// body(first, last): groups on threads, cut by work.
template <typename Body>
void parallel_groups(const Groups& groups, int64_t dim, Body&& body) {
  const int64_t work = groups.work(groups.num_groups);
  const int64_t grain = std::max<int64_t>(kBytesPerTask / (dim * sizeof(float) + 16), 16);
  parallel_for(work, grain, [&](int64_t begin, int64_t end) {
    // Of all cuts the last is at num_groups, where all work is before it.
    body(groups.at_work(begin), end == work ? groups.num_groups : groups.at_work(end));
  });
}

// short_groups(first, last, noted), a function of several versions, calls `sum_short_groups`.
template <typename Out, typename Short, typename Block>
void sum_groups(const Groups& groups, const Out& out, const float* scale, int64_t dim,
                Short&& short_groups, Block&& block) {
  LongGroups noted;
  parallel_groups(groups, dim,
                  [&](int64_t first, int64_t last) { short_groups(first, last, noted); });
  sum_long_groups(groups, noted.groups, dim, block, [&](size_t n, const double* sums) {
    float* to = out.row(noted.groups[n]);
    const float by = scale == nullptr ? 1.0f : scale[noted.groups[n]];
    for (int64_t c = 0; c < dim; ++c) to[c] = static_cast<float>(sums[c]) * by;
  });
}

}  // namespace jaxsparse
