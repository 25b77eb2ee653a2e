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
  int32_t* inverse;  // of the whole device, by place
};

struct Range {
  int64_t least, most;
};

JS_CLONES Range range_of(const int64_t* codes, int64_t count, Range range) {
  for (int64_t i = 0; i < count; ++i) {
    range.least = std::min(range.least, codes[i]);
    range.most = std::max(range.most, codes[i]);
  }
  return range;
}

// `place` of an id is its place in the buffer, `index` its number among the table's ids.
template <typename Word>
JS_INLINE int64_t group_codes(const Piece* pieces, int64_t num_pieces, int64_t size, int64_t least,
                    int code_bits, int index_bits, const Buffers& out) {
  thread_local std::vector<Word> scratch;
  thread_local std::vector<int32_t> places;
  scratch.resize(std::max<size_t>(scratch.size(), 2 * size));
  places.resize(std::max<size_t>(places.size(), size));
  Word* const words = scratch.data();
  int32_t* const place_of = places.data();
  int64_t index = 0;
  for (int64_t p = 0; p < num_pieces; ++p) {
    const int64_t* const codes = pieces[p].codes;
    const int64_t shift = pieces[p].place - index;
    for (const int64_t end = index + pieces[p].count, begin = index; index < end; ++index) {
      const uint64_t code = static_cast<uint64_t>(codes[index - begin] - least);
      words[index] = static_cast<Word>(code << index_bits | static_cast<uint64_t>(index));
      place_of[index] = static_cast<int32_t>(index + shift);
    }
  }
  const Word* const sorted = sort_words(words, words + size, size, index_bits, code_bits);
  const Word mask = static_cast<Word>((uint64_t{1} << index_bits) - 1);
  int64_t found = 0, last = -1;
  for (int64_t k = 0; k < size; ++k) {
    const int64_t code = static_cast<int64_t>(static_cast<uint64_t>(sorted[k]) >> index_bits);
    const int32_t place = place_of[sorted[k] & mask];
    // Written always and kept where the code is a new one: skewed batches mispredict branches.
    out.codes[found] = least + code;
    out.starts[found] = static_cast<int32_t>(k);
    found += code != last;
    last = code;
    out.order[k] = place;
    out.inverse[place] = static_cast<int32_t>(found - 1);
  }
  return found;
}

// Half the memory where code and index fit: sorting is bound by it.
JS_CLONES int64_t group_narrow(const Piece* pieces, int64_t num_pieces, int64_t size, int64_t least,
                               int code_bits, int index_bits, const Buffers& out) {
  return group_codes<uint32_t>(pieces, num_pieces, size, least, code_bits, index_bits, out);
}

JS_CLONES int64_t group_wide(const Piece* pieces, int64_t num_pieces, int64_t size, int64_t least,
                             int code_bits, int index_bits, const Buffers& out) {
  return group_codes<uint64_t>(pieces, num_pieces, size, least, code_bits, index_bits, out);
}

// Groups one table's codes into `out`; false where code and index do not fit a word.
bool sort_group(const Piece* pieces, int64_t num_pieces, const Sizes& sizes, Group& group,
                const Buffers& out) {
  Range range{INT64_MAX, 0};
  for (int64_t p = 0; p < num_pieces; ++p) {
    range = range_of(pieces[p].codes, pieces[p].count, range);
  }
  group.bounds.assign(sizes.num_owners + 1, 0);
  if (group.size == 0) return true;
  const int code_bits = bit_length(range.most - range.least);
  const int index_bits = bit_length(group.size - 1);
  if (range.least < 0 || code_bits + index_bits > 64) return false;
  const auto sort = code_bits + index_bits <= 32 ? group_narrow : group_wide;
  const int64_t found =
      sort(pieces, num_pieces, group.size, range.least, code_bits, index_bits, out);
  for (int64_t owner = 1; owner <= sizes.num_owners; ++owner) {
    const int64_t end = owner * sizes.rows_per_shard;
    const int64_t* const past =
        std::lower_bound(out.codes + group.bounds[owner - 1], out.codes + found, end);
    group.bounds[owner] = owner == sizes.num_owners ? found : past - out.codes;
  }
  return true;
}

// Where the distinct codes and the ids of a table that one owner has begin on a device.
struct Run {
  int64_t codes, ids;
};

// Moves a group to its final places: one run an owner.
void place_group(const Piece* pieces, int64_t num_pieces, const Sizes& sizes, const Group& group,
                 const Run* runs, const Buffers& from, const Buffers& to) {
  thread_local std::vector<int32_t> shifts;
  const int64_t found = group.bounds[sizes.num_owners];
  shifts.resize(std::max<size_t>(shifts.size(), found));
  for (int64_t owner = 0; owner < sizes.num_owners; ++owner) {
    const int64_t begin = group.bounds[owner], end = group.bounds[owner + 1];
    if (begin == end) continue;
    const int64_t past = end == found ? group.size : from.starts[end];
    const int64_t first_id = from.starts[begin];
    std::copy(from.order + first_id, from.order + past, to.order + runs[owner].ids);
    std::copy(from.codes + begin, from.codes + end, to.codes + runs[owner].codes);
    const int32_t id_shift = static_cast<int32_t>(runs[owner].ids - first_id);
    int32_t* const starts = to.starts + runs[owner].codes;
    for (int64_t u = begin; u < end; ++u) starts[u - begin] = from.starts[u] + id_shift;
    std::fill(shifts.begin() + begin, shifts.begin() + end,
              static_cast<int32_t>(runs[owner].codes - begin));
  }
  for (int64_t p = 0; p < num_pieces; ++p) {
    int32_t* const inverse = to.inverse + pieces[p].place;
    if (sizes.num_owners == 1) {
      const int32_t shift = static_cast<int32_t>(runs[0].codes);
      for (int64_t i = 0; i < pieces[p].count; ++i) inverse[i] += shift;
    } else {
      for (int64_t i = 0; i < pieces[p].count; ++i) inverse[i] += shifts[inverse[i]];
    }
  }
}

}  // namespace
}  // namespace jaxsparse

// Groups the equal codes of every device.
//
// pieces [num_devices, num_pieces]: by table, and in the order of the buffer within one; those of
// table t are table_pieces[t] .. table_pieces[t + 1]. Tables in the order of their rows in the slab.
// stride: ids of each device that the results have room for.
// Results, by device: order [stride], codes [stride], starts [stride + 1], inverse [num_places],
// bounds [num_owners + 1]; as `Grouped` in batch.py.
// Returns 0, or 1 where code and index do not fit a word.
extern "C" int64_t jaxsparse_distinct(const void* pieces_, const int64_t* table_pieces,
                                      int64_t num_devices, int64_t num_tables, int64_t num_owners,
                                      int64_t rows_per_shard, int64_t stride, int64_t num_places,
                                      int32_t* order, int64_t* codes, int32_t* starts,
                                      int32_t* inverse, int64_t* bounds) {
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
  for (int64_t device = 0; device < num_devices; ++device) {
    const Group& last = groups[(device + 1) * num_tables - 1];
    if (last.begin + last.size == num_places) continue;
    std::fill(inverse + device * num_places, inverse + (device + 1) * num_places, -1);
  }
  const int64_t total = num_devices * stride;
  // Kept from batch to batch: fresh memory costs a page fault every 4 KiB.
  thread_local std::vector<int32_t> ids;
  thread_local std::vector<int64_t> rows;
  ids.resize(std::max<size_t>(ids.size(), 2 * total));
  rows.resize(std::max<size_t>(rows.size(), total));
  int32_t* const all_ids = ids.data();  // workers have vectors of their own by these names
  int64_t* const all_rows = rows.data();
  const auto unplaced = [&](int64_t g) {
    const int64_t begin = g / num_tables * stride + groups[g].begin;
    return Buffers{all_ids + begin, all_rows + begin, all_ids + total + begin,
                   inverse + g / num_tables * num_places};
  };
  const auto own_pieces = [&](int64_t g) {
    return pieces + g / num_tables * num_pieces + table_pieces[g % num_tables];
  };
  const auto own_count = [&](int64_t g) {
    return table_pieces[g % num_tables + 1] - table_pieces[g % num_tables];
  };
  std::atomic<bool> fits{true};
  parallel_for(num_groups, 1, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      if (!sort_group(own_pieces(g), own_count(g), sizes, groups[g], unplaced(g))) fits = false;
    }
  });
  if (!fits) return 1;
  std::vector<Run> runs(num_groups * num_owners);
  for (int64_t device = 0; device < num_devices; ++device) {
    Run next{0, 0};
    int64_t* const owner_bounds = bounds + device * (num_owners + 1);
    for (int64_t owner = 0; owner < num_owners; ++owner) {
      owner_bounds[owner] = next.codes;
      for (int64_t g = device * num_tables; g < (device + 1) * num_tables; ++g) {
        runs[g * num_owners + owner] = next;
        const Group& group = groups[g];
        const int64_t begin = group.bounds[owner], end = group.bounds[owner + 1];
        if (begin == end) continue;
        const int32_t* const from = unplaced(g).starts;
        next.codes += end - begin;
        next.ids += (end == group.bounds[num_owners] ? group.size : from[end]) - from[begin];
      }
    }
    owner_bounds[num_owners] = next.codes;
    starts[device * (stride + 1) + next.codes] = static_cast<int32_t>(next.ids);
  }
  parallel_for(num_groups, 1, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      const int64_t device = g / num_tables;
      const Buffers to{order + device * stride, codes + device * stride,
                       starts + device * (stride + 1), inverse + device * num_places};
      place_group(own_pieces(g), own_count(g), sizes, groups[g], &runs[g * num_owners],
                  unplaced(g), to);
    }
  });
  return 0;
}
