// SPDX-License-Identifier: Apache-2.0
// The functions of `KeyIndex`: see __init__.py for what each does.
#include "index.h"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <vector>

namespace jaxsparse::key_index {
namespace {

int64_t count_distinct_missing(const uint64_t* wanted, const int32_t* rows, int64_t n) {
  std::vector<uint64_t> missing;
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] < 0) missing.push_back(wanted[i]);
  }
  std::sort(missing.begin(), missing.end());
  return std::unique(missing.begin(), missing.end()) - missing.begin();
}

// What the functions below return; counts and positions are not negative.
constexpr int64_t kDone = -1, kNoMemory = -2;

template <typename Work>
int64_t guarded(Work&& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace
}  // namespace jaxsparse::key_index

using jaxsparse::key_index::guarded;
using jaxsparse::key_index::Index;
using jaxsparse::key_index::kDone;
using Reading = std::shared_lock<std::shared_mutex>;
using Writing = std::unique_lock<std::shared_mutex>;

extern "C" {

// Null where there is no memory.
Index* jaxsparse_index_new() { return new (std::nothrow) Index; }
void jaxsparse_index_free(Index* index) { delete index; }

// sizes [4]: live keys, rows ever handed out, freed rows, bytes.
void jaxsparse_index_sizes(Index* index, int64_t* sizes) {
  const Reading lock(index->mutex);
  sizes[0] = index->keys.num_live();
  sizes[1] = index->keys.high_water();
  sizes[2] = static_cast<int64_t>(index->keys.free().size());
  sizes[3] = index->num_bytes();
}

void jaxsparse_index_find(Index* index, const uint64_t* keys, int64_t n, int32_t* rows) {
  const Reading lock(index->mutex);
  index->find(keys, n, rows);
}

// Returns kDone, or how many keys there would be where that is more than `capacity`; then nothing
// has changed.
int64_t jaxsparse_index_insert(Index* index, const uint64_t* keys, int64_t n, int64_t capacity,
                               int32_t* rows) {
  return guarded([&]() -> int64_t {
    const Writing lock(index->mutex);
    const int64_t live = index->keys.num_live();
    if (live + n > capacity) {
      // All of them may be new and different, but seldom are.
      index->find(keys, n, rows);
      const int64_t missing = std::count_if(rows, rows + n, [](int32_t row) { return row < 0; });
      if (missing == 0) return kDone;
      if (live + missing > capacity) {
        const int64_t need = live + jaxsparse::key_index::count_distinct_missing(keys, rows, n);
        if (need > capacity) return need;
      }
    }
    index->insert(keys, n, rows);
    return kDone;
  });
}

// Returns kDone, or the position of the first row that is not live; then nothing has changed.
int64_t jaxsparse_index_remove(Index* index, const int32_t* rows, int64_t n) {
  return guarded([&]() -> int64_t {
    const Writing lock(index->mutex);
    index->keys.reserve_free(n);
    for (int64_t i = 0; i < n; ++i) {
      if (index->keys.is_live(rows[i])) {
        index->keys.flip_live(rows[i]);  // so that a row named twice is found as well
        continue;
      }
      for (int64_t back = 0; back < i; ++back) index->keys.flip_live(rows[back]);
      return i;
    }
    index->remove(rows, n);
    return kDone;
  });
}

// Returns kDone, or the position of the first row that is not live.
int64_t jaxsparse_index_keys_of(Index* index, const int32_t* rows, int64_t n, uint64_t* keys) {
  const Reading lock(index->mutex);
  constexpr int64_t kAhead = 32;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n && index->keys.is_live(rows[i + kAhead])) {
      index->keys.prefetch(rows[i + kAhead]);
    }
    if (!index->keys.is_live(rows[i])) return i;
    keys[i] = index->keys[rows[i]];
  }
  return kDone;
}

// keys [rows ever handed out], free [freed rows]: as `sizes` told. Returns kDone, or 0 where the
// index has changed since.
int64_t jaxsparse_index_save(Index* index, int64_t num_rows, int64_t num_free, uint64_t* keys,
                             int32_t* free) {
  const Reading lock(index->mutex);
  const std::vector<int32_t>& freed = index->keys.free();
  if (num_rows != index->keys.high_water() || num_free != static_cast<int64_t>(freed.size())) {
    return 0;
  }
  const jaxsparse::key_index::KeysByRow& by_row = index->keys;
  for (int64_t row = 0; row < num_rows; ++row) keys[row] = by_row[row];
  std::copy(freed.begin(), freed.end(), free);
  return kDone;
}

// Fills a new index with the arrays of a snapshot; `free` holds different rows of `keys`. Returns
// kDone, or a row whose key another row has too.
int64_t jaxsparse_index_restore(Index* index, const uint64_t* keys, int64_t num_rows,
                                const int32_t* free, int64_t num_free) {
  return guarded([&]() -> int64_t {
    const Writing lock(index->mutex);
    index->keys.fill(keys, num_rows, free, num_free);
    return index->enter_all();
  });
}

}  // extern "C"
