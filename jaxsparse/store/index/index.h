// SPDX-License-Identifier: Apache-2.0
// 64-bit keys to row numbers: slots in parts, keys by row.
//
// Every call works through its keys in blocks and asks for the memory of a whole block before it
// reads any of it: the reads of a block wait together, not one after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <shared_mutex>

#include "keys_by_row.h"
#include "slots.h"

namespace jaxsparse::key_index {

class Index {
 public:
  std::shared_mutex mutex;  // searches share it
  KeysByRow keys;

  void find(const uint64_t* wanted, int64_t n, int32_t* rows) const {
    uint64_t hashes[kBlock];
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = std::min(kBlock, n - begin);
      start(wanted + begin, count, hashes);
      int32_t* const out = rows + begin;
      look(count, hashes, out);
      for (int64_t i = 0; i < count; ++i) {
        if (out[i] < 0 || keys[out[i]] == wanted[begin + i]) continue;
        out[i] = part(hashes[i]).find(wanted[begin + i], hashes[i], keys).row;
      }
    }
  }

  void insert(const uint64_t* wanted, int64_t n, int32_t* rows) {
    uint64_t hashes[kBlock];
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = std::min(kBlock, n - begin);
      start(wanted + begin, count, hashes);
      for (int64_t i = 0; i < count; ++i) keys.prefetch_next(i);
      look(count, hashes, rows + begin);
      for (int64_t i = 0; i < count; ++i) rows[begin + i] = insert_one(wanted[begin + i], hashes[i]);
    }
  }

  // Of live rows whose live bits are off already.
  void remove(const int32_t* rows, int64_t n) {
    uint64_t hashes[kBlock];
    int32_t found[kBlock];
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = std::min(kBlock, n - begin);
      for (int64_t i = 0; i < count; ++i) keys.prefetch(rows[begin + i]);
      uint64_t own[kBlock];
      for (int64_t i = 0; i < count; ++i) own[i] = keys[rows[begin + i]];
      start(own, count, hashes);
      look(count, hashes, found);
      for (int64_t i = 0; i < count; ++i) {
        parts_[part_of(hashes[i])].remove(rows[begin + i], keys);
        keys.release(rows[begin + i]);
      }
    }
  }

  // Enters the live rows of a snapshot into an empty index (restore.cc). Returns -1, or a row whose
  // key another row has too.
  int64_t enter_all();

  int64_t num_bytes() const {
    int64_t total = sizeof *this + keys.num_bytes();
    for (const Slots& slots : parts_) total += slots.num_bytes();
    return total;
  }

 private:
  static constexpr int64_t kBlock = 64;

  const Slots& part(uint64_t hash) const { return parts_[part_of(hash)]; }

  void start(const uint64_t* wanted, int64_t count, uint64_t* hashes) const {
    for (int64_t i = 0; i < count; ++i) {
      hashes[i] = hash_of(wanted[i]);
      __builtin_prefetch(part(hashes[i]).home(hashes[i]));
    }
  }

  // The first row that each hash may be of, its key on the way.
  void look(int64_t count, const uint64_t* hashes, int32_t* rows) const {
    for (int64_t i = 0; i < count; ++i) {
      rows[i] = part(hashes[i]).candidate(hashes[i]);
      if (rows[i] >= 0) keys.prefetch(rows[i]);
    }
  }

  int32_t insert_one(uint64_t key, uint64_t hash) {
    const int number = part_of(hash);
    Slots& slots = parts_[number];
    Slots::Found found = slots.find(key, hash, keys);
    if (found.row >= 0) return found.row;
    const int32_t row = keys.next_row();
    if (slots.is_full()) {
      slots.grow(number, keys);
      found.place = slots.empty_place(hash);
    }
    keys.take(key);
    slots.put(found.place, hash, row);
    return row;
  }

  Slots parts_[kNumParts];
};

}  // namespace jaxsparse::key_index
