// SPDX-License-Identifier: Apache-2.0
// A snapshot back into an index. The keys of a part are entered one after the other, so that the
// cache holds its slots: each at random places of all parts would be read from memory.
#include <algorithm>
#include <cstdint>
#include <memory>

#include "index.h"

namespace jaxsparse::key_index {
namespace {

// Rows that are sorted by part at once: enough of each part, in memory small beside the index.
constexpr int64_t kLeastTile = int64_t{1} << 18;
int64_t tile_of(int64_t num_rows) { return std::max(kLeastTile, num_rows / 8); }

// The live rows of a tile and the hashes of their keys, by part.
class Tile {
 public:
  explicit Tile(int64_t size) : hashes_(new uint64_t[size]), rows_(new int32_t[size]) {}

  void sort(const KeysByRow& keys, int64_t begin, int64_t end) {
    std::fill(ends_, ends_ + kNumParts + 1, 0);
    for (int64_t row = begin; row < end; ++row) {
      ends_[part_of(hash_of(keys[row])) + 1] += keys.is_live(row);
    }
    // Where each part begins; placing its rows moves that to where it ends.
    for (int part = 0; part < kNumParts; ++part) ends_[part + 1] += ends_[part];
    for (int64_t row = begin; row < end; ++row) {
      if (!keys.is_live(row)) continue;
      const uint64_t hash = hash_of(keys[row]);
      const int64_t place = ends_[part_of(hash)]++;
      hashes_[place] = hash;
      rows_[place] = static_cast<int32_t>(row);
    }
  }

  // Returns -1, or a row whose key is there already.
  int64_t enter(Slots* parts, const KeysByRow& keys) const {
    constexpr int64_t kAhead = 16;
    int64_t i = 0;
    for (int part = 0; part < kNumParts; ++part) {
      for (const int64_t end = ends_[part]; i < end; ++i) {
        if (i + kAhead < end) __builtin_prefetch(parts[part].home(hashes_[i + kAhead]), 1);
        const Slots::Found found = parts[part].find_hash(hashes_[i], keys);
        if (found.row >= 0) return rows_[i];
        parts[part].put(found.place, hashes_[i], rows_[i]);
      }
    }
    return -1;
  }

 private:
  std::unique_ptr<uint64_t[]> hashes_;
  std::unique_ptr<int32_t[]> rows_;
  int64_t ends_[kNumParts + 1];
};

}  // namespace

int64_t Index::enter_all() {
  const int64_t num_rows = keys.high_water();
  int64_t sizes[kNumParts] = {};
  for (int64_t row = 0; row < num_rows; ++row) {
    sizes[part_of(hash_of(keys[row]))] += keys.is_live(row);
  }
  for (int part = 0; part < kNumParts; ++part) parts_[part].reserve(part, sizes[part], num_rows);
  const int64_t size = std::min(num_rows, tile_of(num_rows));
  Tile tile(size);
  for (int64_t begin = 0; begin < num_rows; begin += size) {
    tile.sort(keys, begin, std::min(begin + size, num_rows));
    const int64_t twice = tile.enter(parts_, keys);
    if (twice >= 0) return twice;
  }
  return -1;
}

}  // namespace jaxsparse::key_index
