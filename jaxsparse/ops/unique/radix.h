// SPDX-License-Identifier: Apache-2.0
// Sorting of (key, index) pairs that share one word: key above, index below.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace jaxsparse {

// Widest digit, in bits: 2048 counters are 8 KiB, a quarter of a core's first cache.
constexpr int kMaxDigitBits = 11;

// Fewer words than this are compared: clearing counters would cost more.
constexpr int64_t kFewWords = 128;

inline int bit_length(uint64_t value) { return value == 0 ? 0 : 64 - __builtin_clzll(value); }

// Inlined into callers that are compiled for several instruction sets (JS_CLONES).
#define JS_INLINE inline __attribute__((always_inline))

// Occurrences of each digit of `width` bits, from bit `low` on. With the number of digits known the
// compiler unrolls the loop over them.
template <int passes, typename Word>
JS_INLINE void count_digits(const Word* words, int64_t n, int low, int width,
                  uint32_t (*counts)[1 << kMaxDigitBits]) {
  const Word mask = static_cast<Word>((1 << width) - 1);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t key = static_cast<uint64_t>(words[i]) >> low;
    for (int pass = 0; pass < passes; ++pass) {
      ++counts[pass][static_cast<Word>(key >> (pass * width)) & mask];
    }
  }
}

// Sorts words by the bits from `low` on, of which `bits` vary; the lower ones must be ascending
// already, so that the result is that of a full sort. Digit by digit from the lowest (LSD radix).
// Returns where the sorted words are: `words` or `spare`.
template <typename Word>
JS_INLINE Word* sort_words(Word* words, Word* spare, int64_t n, int low, int bits) {
  if (n <= kFewWords) {
    std::sort(words, words + n);
    return words;
  }
  if (bits == 0) return words;
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int width = (bits + passes - 1) / passes;
  const int64_t buckets = int64_t{1} << width;
  const Word mask = static_cast<Word>(buckets - 1);
  uint32_t counts[6][1 << kMaxDigitBits];  // 64 bits are at most 6 digits
  for (int pass = 0; pass < passes; ++pass) {
    std::memset(counts[pass], 0, sizeof(uint32_t) * buckets);
  }
  switch (passes) {
    case 1: count_digits<1>(words, n, low, width, counts); break;
    case 2: count_digits<2>(words, n, low, width, counts); break;
    case 3: count_digits<3>(words, n, low, width, counts); break;
    case 4: count_digits<4>(words, n, low, width, counts); break;
    case 5: count_digits<5>(words, n, low, width, counts); break;
    default: count_digits<6>(words, n, low, width, counts);
  }
  for (int pass = 0; pass < passes; ++pass) {
    uint32_t* const places = counts[pass];
    const int shift = low + pass * width;
    if (places[(words[0] >> shift) & mask] == n) continue;  // the digit is the same in all words
    uint32_t sum = 0;
    for (int64_t bucket = 0; bucket < buckets; ++bucket) {
      const uint32_t count = places[bucket];
      places[bucket] = sum;
      sum += count;
    }
    for (int64_t i = 0; i < n; ++i) {
      const Word word = words[i];
      spare[places[(word >> shift) & mask]++] = word;
    }
    std::swap(words, spare);
  }
  return words;
}

}  // namespace jaxsparse
