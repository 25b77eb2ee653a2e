// SPDX-License-Identifier: Apache-2.0
// The pairwise dots of samples and their gradient, for one instruction set.
//
// Included once per instruction set, with JS_ISA (a namespace), JS_TARGET (the function attribute)
// and JS_WIDTH (floats a register holds) defined, and so without a guard. JS_CLONES does not serve
// here: vectors would be cut to the width of the default target before the function is copied.
//
// Results do not depend on the width: each element has an accumulator of its own, which adds its
// terms in the order of their index.

#define JS_INLINE static inline __attribute__((always_inline)) JS_TARGET

namespace jaxsparse {
namespace dots {
namespace JS_ISA {

typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));

// Transposes 4 x 4 floats; `from[i]` is row i, row j is written to `to + j * stride`.
JS_INLINE void transpose_quads(const float* const from[4], float* to, int64_t stride) {
  const Quad r0 = *reinterpret_cast<const Quad*>(from[0]);
  const Quad r1 = *reinterpret_cast<const Quad*>(from[1]);
  const Quad r2 = *reinterpret_cast<const Quad*>(from[2]);
  const Quad r3 = *reinterpret_cast<const Quad*>(from[3]);
  const Quad low01 = JS_SHUFFLE(r0, r1, 0, 4, 1, 5), high01 = JS_SHUFFLE(r0, r1, 2, 6, 3, 7);
  const Quad low23 = JS_SHUFFLE(r2, r3, 0, 4, 1, 5), high23 = JS_SHUFFLE(r2, r3, 2, 6, 3, 7);
  *reinterpret_cast<Quad*>(to) = JS_SHUFFLE(low01, low23, 0, 1, 4, 5);
  *reinterpret_cast<Quad*>(to + stride) = JS_SHUFFLE(low01, low23, 2, 3, 6, 7);
  *reinterpret_cast<Quad*>(to + 2 * stride) = JS_SHUFFLE(high01, high23, 0, 1, 4, 5);
  *reinterpret_cast<Quad*>(to + 3 * stride) = JS_SHUFFLE(high01, high23, 2, 3, 6, 7);
}

// to[i][l] = sum over k < n of left[k * left_stride + i] * right[k * right_stride + l], for kRows
// rows i and `Lanes` columns l, added to what is there if `add`. Only the first `rows` and
// `columns` are written; the others are computed from padding or neighbours.
template <int Lanes>
JS_INLINE void outer_products(const float* left, int64_t left_stride, const float* right,
                              int64_t right_stride, int64_t n, bool add, int64_t rows,
                              int64_t columns, float* const to[kRows]) {
  constexpr int kWidth = Lanes < JS_WIDTH ? Lanes : JS_WIDTH;
  constexpr int kVecs = Lanes / kWidth;
  typedef float Vec __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
  Vec sums[kRows][kVecs] = {};
  for (int64_t k = 0; k < n; ++k, left += left_stride, right += right_stride) {
    Vec terms[kVecs];
    for (int v = 0; v < kVecs; ++v) terms[v] = *reinterpret_cast<const Vec*>(right + v * kWidth);
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVecs; ++v) sums[i][v] = sums[i][v] + left[i] * terms[v];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    if (i >= rows) break;
    if (columns < Lanes) {
      std::memcpy(to[i], &sums[i][0], columns * sizeof(float));
      continue;
    }
    for (int v = 0; v < kVecs; ++v) {
      Vec* const place = reinterpret_cast<Vec*>(to[i] + v * kWidth);
      *place = add ? *place + sums[i][v] : sums[i][v];
    }
  }
}

// `width` columns of a sample's vectors, from `offset` on, as `packed [width, padded]`.
JS_INLINE void pack_columns(const Shape& shape, const float* const* vectors, int64_t offset,
                            int64_t width, Scratch& scratch) {
  const int64_t stride = shape.padded;
  for (int64_t f0 = 0; f0 < stride; f0 += 4) {
    const float* rows[4];
    for (int64_t i = 0; i < 4; ++i) {
      rows[i] = f0 + i < shape.count ? vectors[f0 + i] + offset : scratch.zeros;
    }
    float* to = scratch.packed + f0;
    int64_t d = 0;
    for (; d + 4 <= width; d += 4, to += 4 * stride) {
      transpose_quads(rows, to, stride);
      for (int64_t i = 0; i < 4; ++i) rows[i] += 4;
    }
    for (; d < width; ++d, to += stride) {
      for (int64_t i = 0; i < 4; ++i) to[i] = *rows[i]++;
    }
  }
}

// The dots of kRows vectors, from f0 on, with those before them; over the packed columns.
JS_INLINE void forward_rows(const Shape& shape, int64_t f0, int64_t width, bool add,
                            Scratch& scratch) {
  const int64_t stride = shape.padded;
  const int64_t columns = std::min(f0 + kRows, shape.count) - 1;
  for (int64_t g0 = 0; g0 < columns;) {
    const float *left = scratch.packed + f0, *right = scratch.packed + g0;
    float* to[kRows];
    for (int64_t i = 0; i < kRows; ++i) to[i] = scratch.square + (f0 + i) * stride + g0;
    if (columns - g0 > 8) {
      outer_products<16>(left, stride, right, stride, width, add, kRows, 16, to);
      g0 += 16;
    } else {
      outer_products<8>(left, stride, right, stride, width, add, kRows, 8, to);
      g0 += 8;
    }
  }
}

JS_INLINE void forward_sample(const Shape& shape, const float* const* vectors, int64_t sample,
                              Scratch& scratch, float* dots) {
  for (int64_t d0 = 0; d0 < shape.dim; d0 += kColumns) {
    const int64_t width = std::min(kColumns, shape.dim - d0);
    pack_columns(shape, vectors, sample * shape.dim + d0, width, scratch);
    for (int64_t f0 = 0; f0 < shape.count; f0 += kRows) {
      forward_rows(shape, f0, width, d0 > 0, scratch);
    }
  }
  for (int64_t f = 1; f < shape.count; ++f) {
    std::memcpy(dots, scratch.square + f * shape.padded, f * sizeof(float));
    dots += f;
  }
}

// The triangle as a symmetric square; its diagonal and padding are zero and stay so.
JS_INLINE void fill_square(const Shape& shape, const float* triangle, float* square) {
  const int64_t stride = shape.padded;
  for (int64_t f = 0; f < shape.count; ++f) {
    std::memcpy(square + f * stride, triangle, f * sizeof(float));
    triangle += f;
  }
  for (int64_t f0 = 0; f0 < shape.count; f0 += 4) {
    for (int64_t g0 = 0; g0 < f0; g0 += 4) {
      const float* rows[4];
      for (int64_t i = 0; i < 4; ++i) rows[i] = square + (f0 + i) * stride + g0;
      transpose_quads(rows, square + g0 * stride + f0, stride);
    }
    for (int64_t i = 0; i < 4; ++i) {
      for (int64_t j = i + 1; j < 4; ++j) {
        square[(f0 + i) * stride + f0 + j] = square[(f0 + j) * stride + f0 + i];
      }
    }
  }
}

// Gradients of kRows vectors, from f0 on: `width` columns from `offset` on, packed side by side.
JS_INLINE void backward_rows(const Shape& shape, int64_t f0, int64_t offset, int64_t width,
                             Scratch& scratch, float* const* results) {
  const int64_t rows = std::min<int64_t>(kRows, shape.count - f0);
  const float* const left = scratch.square + f0;
  for (int64_t d = 0; d < width;) {
    const float* const right = scratch.packed + d;
    float* to[kRows];
    for (int64_t i = 0; i < kRows; ++i) {
      to[i] = results[std::min(f0 + i, shape.count - 1)] + offset + d;
    }
    if (width - d > 8) {
      outer_products<16>(left, shape.padded, right, kColumns, shape.count, false, rows, width - d,
                         to);
      d += 16;
    } else {
      outer_products<8>(left, shape.padded, right, kColumns, shape.count, false, rows, width - d,
                        to);
      d += 8;
    }
  }
}

JS_INLINE void backward_sample(const Shape& shape, const float* const* vectors, int64_t sample,
                               const float* grads, Scratch& scratch, float* const* results) {
  fill_square(shape, grads, scratch.square);
  for (int64_t d0 = 0; d0 < shape.dim; d0 += kColumns) {
    const int64_t width = std::min(kColumns, shape.dim - d0);
    const int64_t offset = sample * shape.dim + d0;
    // In one place, so that whole registers can be read at the end of a row.
    for (int64_t g = 0; g < shape.count; ++g) {
      std::memcpy(scratch.packed + g * kColumns, vectors[g] + offset, width * sizeof(float));
    }
    for (int64_t f0 = 0; f0 < shape.count; f0 += kRows) {
      backward_rows(shape, f0, offset, width, scratch, results);
    }
  }
}

// More arrays are read than the hardware sees as streams.
template <int Write>
JS_INLINE void fetch_sample(const Shape& shape, const float* const* vectors, int64_t sample) {
  for (int64_t f = 0; f < shape.count; ++f) {
    const float* const row = vectors[f] + sample * shape.dim;
    for (int64_t d = 0; d < shape.dim; d += 16) __builtin_prefetch(row + d, Write, 2);
  }
}

JS_TARGET void forward(const Shape& shape, const float* const* vectors, int64_t begin, int64_t end,
                       Scratch& scratch, float* dots) {
  for (int64_t sample = begin; sample < end; ++sample) {
    if (sample + 1 < end) fetch_sample<0>(shape, vectors, sample + 1);
    forward_sample(shape, vectors, sample, scratch, dots + sample * shape.num_pairs());
  }
}

JS_TARGET void backward(const Shape& shape, const float* const* vectors, const float* grads,
                        int64_t begin, int64_t end, Scratch& scratch, float* const* results) {
  for (int64_t sample = begin; sample < end; ++sample) {
    if (sample + 1 < end) {
      fetch_sample<0>(shape, vectors, sample + 1);
      fetch_sample<1>(shape, results, sample + 1);
    }
    backward_sample(shape, vectors, sample, grads + sample * shape.num_pairs(), scratch, results);
  }
}

}  // namespace JS_ISA
}  // namespace dots
}  // namespace jaxsparse

#undef JS_INLINE
#undef JS_ISA
#undef JS_TARGET
#undef JS_WIDTH
