// SPDX-License-Identifier: Apache-2.0
// The keys of an index by row, which rows are live, and the freed ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pages.h"

namespace jaxsparse::key_index {

class KeysByRow {
 public:
  uint64_t& operator[](int64_t row) { return keys_[row >> kShift][row & kMask]; }
  uint64_t operator[](int64_t row) const { return keys_[row >> kShift][row & kMask]; }
  void prefetch(int64_t row) const { __builtin_prefetch(&keys_[row >> kShift][row & kMask]); }

  int64_t high_water() const { return high_water_; }
  int64_t num_live() const { return high_water_ - static_cast<int64_t>(free_.size()); }
  const std::vector<int32_t>& free() const { return free_; }

  bool is_live(int64_t row) const {
    return row >= 0 && row < high_water_ && (live_word(row) >> (row & 63) & 1) != 0;
  }
  void flip_live(int64_t row) { live_word(row) ^= uint64_t{1} << (row & 63); }

  // The row that `take` gives next; its memory is there.
  int32_t next_row() {
    if (!free_.empty()) return free_.back();
    make_room(high_water_ + 1, 0);
    return static_cast<int32_t>(high_water_);
  }
  // The memory of the row that is taken `ahead` rows from now; a new row's is at hand anyway.
  void prefetch_next(int64_t ahead) const {
    if (ahead < static_cast<int64_t>(free_.size())) prefetch(free_[free_.size() - 1 - ahead]);
  }
  // Gives `next_row` to a key.
  void take(uint64_t key) {
    const int32_t row = next_row();
    if (free_.empty()) {
      ++high_water_;
      const int64_t chunk = row >> kShift;
      if ((high_water_ & kMask) == 0 && chunk < kFirstHuge) chunks_[chunk].collapse();
    } else {
      free_.pop_back();
    }
    (*this)[row] = key;
    flip_live(row);
  }

  // Room for the freed rows of a call, before anything is changed.
  void reserve_free(int64_t count) {
    const size_t need = free_.size() + count;
    // By a quarter, not to twice the size: freed rows may be most of a large index.
    if (need > free_.capacity()) free_.reserve(std::max(need, free_.size() + free_.size() / 4));
  }
  // Of a row whose live bit is off already.
  void release(int32_t row) {
    (*this)[row] = 0;
    free_.push_back(row);
  }

  // Takes the contents of a snapshot into an empty index; `free` holds different rows of `keys`.
  void fill(const uint64_t* keys, int64_t high_water, const int32_t* free, int64_t num_free) {
    make_room(high_water, high_water >> kShift);
    free_.assign(free, free + num_free);
    high_water_ = high_water;
    for (int64_t begin = 0; begin < high_water; begin += kMask + 1) {
      const int64_t count = std::min(kMask + 1, high_water - begin);
      std::copy(keys + begin, keys + begin + count, keys_[begin >> kShift]);
      for (int64_t i = 0; i < count; i += 64) {
        live_word(begin + i) = count - i < 64 ? (uint64_t{1} << (count - i)) - 1 : ~uint64_t{0};
      }
    }
    for (const int32_t row : free_) {
      flip_live(row);
      (*this)[row] = 0;
    }
  }

  int64_t num_bytes() const {
    const size_t page = high_water_ >> kShift < kFirstHuge ? kPage : kHugePage;
    const size_t keys = round_up(high_water_ * sizeof(uint64_t), page);
    return keys + live_.size() * kWords * sizeof(uint64_t) + free_.capacity() * sizeof(int32_t);
  }

 private:
  // Pieces of 2 MiB: growing moves no key, and a full piece is one huge page.
  static constexpr int kShift = 18;
  static constexpr int64_t kMask = (int64_t{1} << kShift) - 1;
  // From here on a piece is a huge page before it is full: it is little beside those before it.
  static constexpr int64_t kFirstHuge = 16;
  static constexpr size_t kWords = (size_t{1} << kShift) / 64;

  uint64_t& live_word(int64_t row) { return live_[row >> kShift][(row & kMask) >> 6]; }
  uint64_t live_word(int64_t row) const { return live_[row >> kShift][(row & kMask) >> 6]; }

  // The first `num_full` pieces are going to be filled at once.
  void make_room(int64_t num_rows, int64_t num_full) {
    while (static_cast<int64_t>(keys_.size()) << kShift < num_rows) {
      // Each list has what belongs to it before `keys_` says so.
      const int64_t number = keys_.size();
      const bool at_once = number < num_full || number >= kFirstHuge;
      if (chunks_.size() == keys_.size()) chunks_.push_back(Pages::huge(at_once));
      if (live_.size() == keys_.size()) live_.emplace_back(kWords);
      keys_.push_back(static_cast<uint64_t*>(chunks_.back().data()));
    }
  }

  std::vector<Pages> chunks_;
  std::vector<uint64_t*> keys_;
  std::vector<std::vector<uint64_t>> live_;
  std::vector<int32_t> free_;
  int64_t high_water_ = 0;
};

}  // namespace jaxsparse::key_index
