// SPDX-License-Identifier: Apache-2.0
// Keys of a batch become codes (shard * rows_per_shard + local row), feature by feature. The
// meaning is that of jaxsparse/{hashing,addressing,layout,encode}.py; what they would refuse makes
// the feature's status 1, and they are asked again, for the message.
#include <vector>

#include "native.h"

namespace jaxsparse {
namespace {

// Fields and order are those of `Feature` in host.py; all are 8 bytes wide.
struct Feature {
  // What the collection knows.
  uint64_t vocabulary_size;
  uint64_t is_hashed;
  uint64_t is_seeded;
  uint64_t mixed_seed;
  uint64_t num_exact;
  const int64_t* exact_position;  // the arrays of `ExactIndex`
  const uint64_t* exact_fingerprint;
  uint64_t exact_shift;
  uint64_t exact_mask;
  const uint16_t* permutation;
  uint64_t column_size;
  uint64_t num_columns;
  uint64_t block_rows;  // on each shard; 0 where the table lies whole on one
  uint64_t first_code;  // code of position 0
  uint64_t rows_per_shard;
  uint64_t is_ignoring;  // keys outside the table are left out
  uint64_t is_unpooled;
  uint64_t max_length;  // 0: no limit
  uint64_t truncation;  // of longer bags: 0 is an error, 1 keeps the head, 2 the tail
  // What the batch has.
  const void* keys;
  int64_t num_keys;
  uint64_t is_int32;  // else 64 bits
  uint64_t is_filtered;  // by padding, range or length
  uint64_t has_padding;
  uint64_t padding;
  int64_t num_bags;
  const int64_t* splits;  // null: `width` keys each
  int64_t width;
  // Results.
  int64_t* codes;
  int64_t* out_splits;
  int64_t* lengths;
  int64_t* index;
  int64_t* position;
  int64_t ignored;
  int64_t status;
};

// Keys coded at a time.
constexpr int64_t kGrain = 8192;

inline uint64_t multiply_high(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

// Quotients by a constant without a division: the estimate is at most 1 below.
struct Divisor {
  explicit Divisor(uint64_t d) : divisor(d), inverse(d ? ~uint64_t{0} / d : 0) {}
  uint64_t quotient(uint64_t x) const {
    const uint64_t estimate = multiply_high(x, inverse);
    return estimate + (x - estimate * divisor >= divisor);
  }
  uint64_t divisor, inverse;
};

inline uint64_t mix64(uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

inline uint32_t fmix32(uint32_t h) {
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// One feature's map from keys to codes. How its table is laid out is known to the compiler: the
// kernels run a few nanoseconds a key, and branches would be a third of them.
template <bool is_hashed, bool is_one_column, bool is_cut>
class Coder {
 public:
  explicit Coder(const Feature& feature)
      : f(feature),
        buckets(f.vocabulary_size - f.num_exact),
        column(f.column_size),
        block(f.block_rows) {}

  // Whether the key has a row.
  bool has(uint64_t key) const { return is_hashed || key < f.vocabulary_size; }

  // The code of a key that has one.
  int64_t code(uint64_t key) const { return locate(is_hashed ? hashed_row(mix64(key)) : key); }

 private:
  uint64_t hashed_row(uint64_t fingerprint) const {
    for (uint64_t slot = fingerprint >> f.exact_shift; f.num_exact > 0;
         slot = (slot + 1) & f.exact_mask) {
      if (f.exact_position[slot] < 0) break;
      if (f.exact_fingerprint[slot] == fingerprint) return f.exact_position[slot];
    }
    const uint64_t hash = f.is_seeded ? mix64(fingerprint ^ f.mixed_seed) : fingerprint;
    return hash - buckets.quotient(hash) * buckets.divisor + f.num_exact;
  }

  int64_t locate(uint64_t row) const {
    uint64_t position;
    if (is_one_column) {
      position = f.permutation[row];
    } else {
      const uint64_t q = column.quotient(row);
      const uint64_t rotation = (fmix32(static_cast<uint32_t>(q)) * f.column_size) >> 32;
      const uint64_t place = f.permutation[row - q * f.column_size] + rotation;
      // Modulo the column's size: below it the subtraction wraps to a huge number.
      position = std::min(place, place - f.column_size) * f.num_columns + q;
    }
    if (!is_cut) return static_cast<int64_t>(f.first_code + position);
    const uint64_t shard = block.quotient(position);
    return static_cast<int64_t>(f.first_code + shard * f.rows_per_shard + position -
                                shard * f.block_rows);
  }

  const Feature f;
  const Divisor buckets, column, block;
};

template <typename Key>
inline uint64_t bits_of(Key key) {
  return static_cast<uint64_t>(static_cast<int64_t>(key));  // -1 is 2^64 - 1 in every width
}

// Every key has a row, and every bag is taken whole.
template <typename Key, typename CoderOf>
bool code_all(const Feature& f, int64_t begin, int64_t end) {
  const CoderOf coder(f);
  const Key* const keys = static_cast<const Key*>(f.keys);
  int64_t* const codes = f.codes;
  for (int64_t i = begin; i < end; ++i) {
    const uint64_t key = bits_of(keys[i]);
    if (!coder.has(key)) return false;
    codes[i] = coder.code(key);
  }
  return true;
}

// Whether bags are those of the keys there are: a reader may have filled its arrays anew since they
// were checked.
bool are_whole(const Feature& f) {
  bool is_ascending = f.splits[0] == 0 && f.splits[f.num_bags] == f.num_keys;
  for (int64_t bag = 0; bag < f.num_bags; ++bag) {
    is_ascending &= f.splits[bag] <= f.splits[bag + 1];
  }
  return is_ascending;
}

// Leaves out padding and ignored keys, then cuts long bags.
template <typename Key, typename CoderOf>
bool code_bags(Feature& f) {
  const CoderOf coder(f);
  const Key* keys = static_cast<const Key*>(f.keys);
  if (f.splits && !are_whole(f)) return false;
  int64_t out = 0;
  f.ignored = 0;
  f.out_splits[0] = 0;
  for (int64_t bag = 0; bag < f.num_bags; ++bag) {
    const int64_t begin = f.splits ? f.splits[bag] : bag * f.width;
    const int64_t end = f.splits ? f.splits[bag + 1] : begin + f.width;
    const int64_t first = out;
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t key = bits_of(keys[i]);
      if (f.has_padding && key == f.padding) continue;
      if (!coder.has(key)) {
        if (!f.is_ignoring) return false;
        ++f.ignored;
        continue;
      }
      f.codes[out] = coder.code(key);
      f.index[out] = i;
      f.position[out] = f.is_unpooled ? i - begin : out - first;
      ++out;
    }
    int64_t length = out > first ? f.position[out - 1] + 1 : 0;
    const int64_t limit = static_cast<int64_t>(f.max_length);
    if (limit > 0 && length > limit) {
      if (f.truncation == 0) return false;
      const int64_t cut = f.truncation == 2 ? length - limit : 0;
      int64_t kept = first;
      for (int64_t i = first; i < out; ++i) {
        const int64_t position = f.position[i] - cut;
        if (position < 0 || position >= limit) continue;
        f.codes[kept] = f.codes[i];
        f.index[kept] = f.index[i];
        f.position[kept++] = position;
      }
      out = kept;
      length = out > first ? f.position[out - 1] + 1 : 0;
    }
    f.lengths[bag] = length;
    f.out_splits[bag + 1] = out;
  }
  return true;
}

// Bags that are taken whole; false where one is too long.
bool copy_bags(Feature& f) {
  if (!are_whole(f)) return false;
  uint64_t longest = 0;
  f.out_splits[0] = 0;
  for (int64_t bag = 0; bag < f.num_bags; ++bag) {
    f.out_splits[bag + 1] = f.splits[bag + 1];
    f.lengths[bag] = f.splits[bag + 1] - f.splits[bag];
    longest = std::max(longest, static_cast<uint64_t>(f.lengths[bag]));
  }
  return f.max_length == 0 || longest <= f.max_length;
}

// Keys `begin` to `end` of a feature; all of them where it is filtered, its bags where end < 0.
struct Task {
  int64_t feature, begin, end;
};

template <typename CoderOf>
bool run_as(const Task& task, Feature& f) {
  if (f.is_filtered) {
    return (f.is_int32 ? code_bags<int32_t, CoderOf> : code_bags<int64_t, CoderOf>)(f);
  }
  return (f.is_int32 ? code_all<int32_t, CoderOf> : code_all<int64_t, CoderOf>)(f, task.begin,
                                                                                task.end);
}

template <bool is_hashed>
bool run_on(const Task& task, Feature& f) {
  if (f.num_columns == 1) {
    return (f.block_rows ? run_as<Coder<is_hashed, true, true>>
                         : run_as<Coder<is_hashed, true, false>>)(task, f);
  }
  return (f.block_rows ? run_as<Coder<is_hashed, false, true>>
                       : run_as<Coder<is_hashed, false, false>>)(task, f);
}

bool run(const Task& task, Feature& f) {
  if (task.end < 0) return copy_bags(f);
  return (f.is_hashed ? run_on<true> : run_on<false>)(task, f);
}

}  // namespace
}  // namespace jaxsparse

// Codes the keys of `features`; see `Feature` for what goes in and out.
extern "C" void jaxsparse_encode(void* features, int64_t num_features) {
  using namespace jaxsparse;
  Feature* const all = static_cast<Feature*>(features);
  std::vector<Task> tasks;
  for (int64_t i = 0; i < num_features; ++i) {
    all[i].status = 0;
    if (all[i].is_filtered) {
      tasks.push_back({i, 0, 0});
      continue;
    }
    if (all[i].splits) tasks.push_back({i, 0, -1});
    for (int64_t begin = 0; begin < all[i].num_keys; begin += kGrain) {
      tasks.push_back({i, begin, std::min(begin + kGrain, all[i].num_keys)});
    }
  }
  std::vector<uint8_t> is_good(tasks.size());
  parallel_for(tasks.size(), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) is_good[i] = run(tasks[i], all[tasks[i].feature]);
  });
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (!is_good[i]) all[tasks[i].feature].status = 1;
  }
}
