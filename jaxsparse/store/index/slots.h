// SPDX-License-Identifier: Apache-2.0
// One part of a hash table: row numbers by hash, in slots of four bytes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "keys_by_row.h"
#include "pages.h"

namespace jaxsparse::key_index {

// A bijection of 64-bit words in which every bit of the key turns every bit of the hash
// (finalizer of MurmurHash3, A. Appleby, public domain).
inline uint64_t hash_of(uint64_t key) {
  key ^= key >> 33;
  key *= 0xff51afd7ed558ccdu;
  key ^= key >> 33;
  key *= 0xc4ceb9fe1a85ec53u;
  return key ^ key >> 33;
}

// Of a hash: bits 63..56 choose the part, 55..24 the place in it, 31..0 are compared in the slot.
// No part gets much beyond 2^24 slots, so that bits 31..24 hardly move the place.
constexpr int kNumParts = 256;
inline int part_of(uint64_t hash) { return static_cast<int>(hash >> 56); }

// A slot holds row + 1 in its lower bits and bits of the hash above them; 0 is an empty slot, so no
// key is special. Linear probing; a removed slot is closed up, so there are no tombstones.
class Slots {
 public:
  static constexpr double kMostLoad = 0.7;
  static constexpr double kGrowth = 1.6;

  // The most keys of a part of a size, and the slots of that size. Parts differ in the fraction of
  // a growth by which their sizes are ahead, so that they grow one after the other.
  static int64_t slots_at(int part, int level) {
    return static_cast<int64_t>(
        16 * std::pow(kGrowth, level + static_cast<double>(part) / kNumParts));
  }
  static int64_t keys_at(int64_t num_slots) { return static_cast<int64_t>(kMostLoad * num_slots); }

  int64_t num_bytes() const { return pages_.bytes(); }
  bool is_full() const { return room_ == 0; }

  const uint32_t* home(uint64_t hash) const { return slots_ + place_of(hash); }

  // The row of the first slot that may be the key's, or -1: then the key is not there.
  int32_t candidate(uint64_t hash) const {
    const uint32_t tags = ~row_mask_;
    for (uint32_t place = place_of(hash);; place = after(place)) {
      const uint32_t slot = slots_[place];
      if (slot == 0) return -1;
      if (((slot ^ static_cast<uint32_t>(hash)) & tags) == 0) return row_in(slot);
    }
  }

  struct Found {
    int32_t row;     // -1 where the key is not there
    uint32_t place;  // its slot, or the empty one where the search ended
  };
  // By hash alone: equal hashes are equal keys.
  Found find_hash(uint64_t hash, const KeysByRow& keys) const {
    return search(hash, [&](int32_t row) { return hash_of(keys[row]) == hash; });
  }
  Found find(uint64_t key, uint64_t hash, const KeysByRow& keys) const {
    return search(hash, [&](int32_t row) { return keys[row] == key; });
  }

  // Puts a row into the empty slot that `find` ended at. The part must not be full.
  void put(uint32_t place, uint64_t hash, int32_t row) {
    if (static_cast<uint32_t>(row) >= row_mask_) widen_rows(row);
    slots_[place] = (static_cast<uint32_t>(hash) & ~row_mask_) | static_cast<uint32_t>(row + 1);
    --room_;
  }

  // Another size; `find` has to be asked again for places.
  void grow(int part, const KeysByRow& keys) {
    Slots larger;
    larger.level_ = level_ + 1;
    while (keys_at(slots_at(part, larger.level_)) <= used()) ++larger.level_;
    larger.allocate(part, keys.high_water());
    // Two batches in turn: the keys of one are on the way while the other's move.
    constexpr uint32_t kBatch = 32;
    int32_t rows[2][kBatch];
    int counts[2] = {0, 0};
    int turn = 0;
    for (uint32_t begin = 0; begin < num_slots_; begin += kBatch, turn ^= 1) {
      const uint32_t end = std::min(begin + kBatch, num_slots_);
      int count = 0;
      for (uint32_t place = begin; place < end; ++place) {
        rows[turn][count] = row_in(slots_[place]);
        count += slots_[place] != 0;  // no branch: half of them would be guessed wrong
      }
      for (int i = 0; i < count; ++i) keys.prefetch(rows[turn][i]);
      counts[turn] = count;
      larger.put_all(rows[turn ^ 1], counts[turn ^ 1], keys);
    }
    larger.put_all(rows[turn ^ 1], counts[turn ^ 1], keys);
    *this = std::move(larger);
  }

  // Makes an empty part as large as growing would have made it for so many keys.
  void reserve(int part, int64_t num_keys, int64_t high_water) {
    while (keys_at(slots_at(part, level_)) < num_keys) ++level_;
    allocate(part, high_water);
  }

  // The first empty slot for a hash.
  uint32_t empty_place(uint64_t hash) const {
    uint32_t place = place_of(hash);
    while (slots_[place] != 0) place = after(place);
    return place;
  }

  // Takes a row out that is there. What its neighbours hold moves up so that no search ends early.
  void remove(int32_t row, const KeysByRow& keys) {
    uint32_t hole = place_of(hash_of(keys[row]));
    while (row_in(slots_[hole]) != row) hole = after(hole);
    for (uint32_t place = after(hole); slots_[place] != 0; place = after(place)) {
      const uint32_t home = place_of(hash_of(keys[row_in(slots_[place])]));
      if (distance(home, place) < distance(hole, place)) continue;
      slots_[hole] = slots_[place];
      hole = place;
    }
    slots_[hole] = 0;
    ++room_;
  }

 private:
  template <typename IsIts>
  Found search(uint64_t hash, IsIts&& is_its) const {
    const uint32_t tags = ~row_mask_;
    for (uint32_t place = place_of(hash);; place = after(place)) {
      const uint32_t slot = slots_[place];
      if (slot == 0) return {-1, place};
      if (((slot ^ static_cast<uint32_t>(hash)) & tags) != 0) continue;
      if (is_its(row_in(slot))) return {row_in(slot), place};
    }
  }

  uint32_t place_of(uint64_t hash) const {
    return static_cast<uint32_t>((hash >> 24 & 0xffffffffu) * num_slots_ >> 32);
  }
  uint32_t after(uint32_t place) const { return place + 1 == num_slots_ ? 0 : place + 1; }
  uint32_t distance(uint32_t from, uint32_t to) const {
    return to >= from ? to - from : to + num_slots_ - from;
  }
  int32_t row_in(uint32_t slot) const { return static_cast<int32_t>(slot & row_mask_) - 1; }
  int64_t used() const { return keys_at(num_slots_) - room_; }

  void allocate(int part, int64_t high_water) {
    num_slots_ = static_cast<uint32_t>(slots_at(part, level_));
    room_ = static_cast<uint32_t>(keys_at(num_slots_));
    pages_ = Pages(num_slots_ * sizeof(uint32_t));
    slots_ = static_cast<uint32_t*>(pages_.data());
    // Bits for the rows there will be when the part grows next, and some more.
    int bits = 16;
    while (bits < 31 && (int64_t{1} << bits) < high_water + high_water / 2) ++bits;
    row_mask_ = (uint32_t{1} << bits) - 1;
  }

  void put_all(const int32_t* rows, int count, const KeysByRow& keys) {
    for (int i = 0; i < count; ++i) {
      const uint64_t hash = hash_of(keys[rows[i]]);
      put(empty_place(hash), hash, rows[i]);
    }
  }

  // Gives bits of the hash to the rows; seldom needed, see `allocate`.
  void widen_rows(int32_t row) {
    uint32_t mask = row_mask_;
    while (static_cast<uint32_t>(row) >= mask) mask = mask * 2 + 1;
    const uint32_t given = mask ^ row_mask_;
    for (uint32_t place = 0; place < num_slots_; ++place) slots_[place] &= ~given;
    row_mask_ = mask;
  }

  // Before the first key: one slot that stays empty, as there is no room.
  static inline uint32_t none_ = 0;
  uint32_t* slots_ = &none_;
  uint32_t num_slots_ = 1, room_ = 0, row_mask_ = 0xffff;
  int level_ = -1;
  Pages pages_;
};

}  // namespace jaxsparse::key_index
