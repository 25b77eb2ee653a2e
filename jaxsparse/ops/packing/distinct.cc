// SPDX-License-Identifier: Apache-2.0
// Equal codes of a device are grouped, table by table: tables own disjoint ranges of a slab's rows,
// so each is sorted by itself, on its own thread and within a core's caches.
#include <atomic>
#include <memory>
#include <vector>

#include "native.h"
#include "unique/radix.h"

namespace jaxsparse {
namespace {

// A feature's codes on one device: `count` of them, at `place` in the device's id buffer.
struct Piece {
  const int64_t* codes;
  int64_t count;
  int64_t place;
};

struct Sizes {
  int64_t num_owners, rows_per_shard;
};

// One table on one device: a part of the device's buffers, before it is moved to its final place.
struct Group {
  int64_t begin = 0;  // of its ids, among the device's
  int64_t size = 0;   // ids
  std::vector<int64_t> bounds;  // [S + 1]: first distinct code of each owner
};

struct Buffers {
  int32_t* order;
  int64_t* codes;
  int32_t* starts;
};

template <typename Word>
int64_t group_codes(const Piece* pieces, int64_t num_pieces, int64_t size, int64_t least,
                    int code_bits, int index_bits, const Buffers& out) {
  thread_local std::vector<Word> scratch;
  thread_local std::vector<int32_t> places;
  scratch.resize(std::max<size_t>(scratch.size(), 2 * size));
  Word* const words = scratch.data();
  int64_t i = 0;
  for (int64_t p = 0; p < num_pieces; ++p) {
    const Piece& piece = pieces[p];
    for (int64_t j = 0; j < piece.count; ++j, ++i) {
      const uint64_t code = static_cast<uint64_t>(piece.codes[j] - least);
      words[i] = static_cast<Word>(code << index_bits | static_cast<uint64_t>(i));
    }
  }
  if (num_pieces > 1) {
    places.resize(std::max<size_t>(places.size(), size));
    i = 0;
    for (int64_t p = 0; p < num_pieces; ++p) {
      for (int64_t j = 0; j < pieces[p].count; ++j) places[i++] = pieces[p].place + j;
    }
  }
  const Word* sorted = sort_words(words, words + size, size, index_bits, code_bits);
  const Word mask = static_cast<Word>((uint64_t{1} << index_bits) - 1);
  int64_t found = 0, last = -1;
  for (int64_t k = 0; k < size; ++k) {
    const int64_t code = static_cast<int64_t>(static_cast<uint64_t>(sorted[k]) >> index_bits);
    const int64_t index = static_cast<int64_t>(sorted[k] & mask);
    out.order[k] = static_cast<int32_t>(num_pieces > 1 ? places[index] : pieces[0].place + index);
    // Written always and kept where the code is a new one: skewed batches mispredict branches.
    out.codes[found] = least + code;
    out.starts[found] = static_cast<int32_t>(k);
    found += code != last;
    last = code;
  }
  return found;
}

// Groups one table's codes into `out`; false where code and index do not fit a word.
bool sort_group(const Piece* pieces, int64_t num_pieces, const Sizes& sizes, Group& group,
                const Buffers& out) {
  int64_t least = INT64_MAX, most = 0;
  for (int64_t p = 0; p < num_pieces; ++p) {
    for (int64_t j = 0; j < pieces[p].count; ++j) {
      least = std::min(least, pieces[p].codes[j]);
      most = std::max(most, pieces[p].codes[j]);
    }
  }
  group.bounds.assign(sizes.num_owners + 1, 0);
  if (group.size == 0) return true;
  const int code_bits = bit_length(most - least), index_bits = bit_length(group.size - 1);
  if (least < 0 || code_bits + index_bits > 64) return false;
  const auto sort = code_bits + index_bits <= 32 ? group_codes<uint32_t> : group_codes<uint64_t>;
  const int64_t found =
      sort(pieces, num_pieces, group.size, least, code_bits, index_bits, out);
  for (int64_t owner = 1; owner <= sizes.num_owners; ++owner) {
    const int64_t end = owner * sizes.rows_per_shard;
    const int64_t* const past =
        std::lower_bound(out.codes + group.bounds[owner - 1], out.codes + found, end);
    group.bounds[owner] = owner == sizes.num_owners ? found : past - out.codes;
  }
  return true;
}

}  // namespace
}  // namespace jaxsparse

// Groups the equal codes of every device.
//
// pieces [num_devices, num_pieces]: by table, and in the order of the buffer within one; those of
// table t are table_pieces[t] .. table_pieces[t + 1]. Tables in the order of their rows in the slab.
// stride: ids of each device that the results have room for.
// Results, by device: order [stride], codes [stride], starts [stride + 1], bounds [num_owners + 1];
// as `Distinct` in packing.py.
// Returns 0, or 1 where code and index do not fit a word.
extern "C" int64_t jaxsparse_distinct(const void* pieces_, const int64_t* table_pieces,
                                      int64_t num_devices, int64_t num_tables, int64_t num_owners,
                                      int64_t rows_per_shard, int64_t stride, int32_t* order,
                                      int64_t* codes, int32_t* starts, int64_t* bounds) {
  using namespace jaxsparse;
  const Piece* const pieces = static_cast<const Piece*>(pieces_);
  const int64_t num_pieces = table_pieces[num_tables];
  const Sizes sizes{num_owners, rows_per_shard};
  const int64_t num_groups = num_devices * num_tables;
  const std::unique_ptr<Group[]> groups(new Group[num_groups]);
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t device = g / num_tables, table = g % num_tables;
    if (table > 0) groups[g].begin = groups[g - 1].begin + groups[g - 1].size;
    for (int64_t p = table_pieces[table]; p < table_pieces[table + 1]; ++p) {
      groups[g].size += pieces[device * num_pieces + p].count;
    }
  }
  const int64_t total = num_devices * stride;
  const std::unique_ptr<int32_t[]> ids(new int32_t[2 * total]);
  const std::unique_ptr<int64_t[]> rows(new int64_t[total]);
  const auto buffers_of = [&](int64_t g) {
    const int64_t begin = g / num_tables * stride + groups[g].begin;
    return Buffers{ids.get() + begin, rows.get() + begin, ids.get() + total + begin};
  };
  std::atomic<bool> fits{true};
  parallel_for(num_groups, 1, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      const Piece* own =
          pieces + g / num_tables * num_pieces + table_pieces[g % num_tables];
      const int64_t count = table_pieces[g % num_tables + 1] - table_pieces[g % num_tables];
      if (!sort_group(own, count, sizes, groups[g], buffers_of(g))) fits = false;
    }
  });
  if (!fits) return 1;
  // Final places: by owner, then by table.
  struct Run {
    int64_t codes, ids;
  };
  std::vector<Run> runs(num_groups * num_owners);
  for (int64_t device = 0; device < num_devices; ++device) {
    Run next{0, 0};
    int64_t* const owner_bounds = bounds + device * (num_owners + 1);
    for (int64_t owner = 0; owner < num_owners; ++owner) {
      owner_bounds[owner] = next.codes;
      for (int64_t table = 0; table < num_tables; ++table) {
        const int64_t g = device * num_tables + table;
        const Group& group = groups[g];
        const int32_t* const from = buffers_of(g).starts;
        const int64_t begin = group.bounds[owner], end = group.bounds[owner + 1];
        runs[g * num_owners + owner] = next;
        if (begin == end) continue;
        const int64_t past = end == group.bounds[num_owners] ? group.size : from[end];
        next.codes += end - begin;
        next.ids += past - from[begin];
      }
    }
    owner_bounds[num_owners] = next.codes;
    starts[device * (stride + 1) + next.codes] = static_cast<int32_t>(next.ids);
  }
  parallel_for(num_groups, 1, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      const int64_t device = g / num_tables;
      const Group& group = groups[g];
      const Buffers from = buffers_of(g);
      for (int64_t owner = 0; owner < num_owners; ++owner) {
        const int64_t begin = group.bounds[owner], end = group.bounds[owner + 1];
        if (begin == end) continue;
        const Run run = runs[g * num_owners + owner];
        const int64_t past = end == group.bounds[num_owners] ? group.size : from.starts[end];
        const int64_t first_id = from.starts[begin];
        std::copy(from.order + first_id, from.order + past, order + device * stride + run.ids);
        std::copy(from.codes + begin, from.codes + end, codes + device * stride + run.codes);
        int32_t* const to = starts + device * (stride + 1) + run.codes;
        const int32_t shift = static_cast<int32_t>(run.ids - first_id);
        for (int64_t u = begin; u < end; ++u) to[u - begin] = from.starts[u] + shift;
      }
    }
  });
  return 0;
}
