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

// Sorts words by the bits from `low` on, of which `bits` vary; the lower ones must be ascending
// already, so that the result is that of a full sort. Digit by digit from the lowest (LSD radix).
// Returns where the sorted words are: `words` or `spare`.
template <typename Word>
Word* sort_words(Word* words, Word* spare, int64_t n, int low, int bits) {
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
  for (int64_t i = 0; i < n; ++i) {
    Word key = words[i] >> low;
    for (int pass = 0; pass < passes; ++pass, key >>= width) ++counts[pass][key & mask];
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
    for (int64_t i = 0; i < n; ++i) spare[places[(words[i] >> shift) & mask]++] = words[i];
    std::swap(words, spare);
  }
  return words;
}

}  // namespace jaxsparse
