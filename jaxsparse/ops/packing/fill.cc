// SPDX-License-Identifier: Apache-2.0
// The arrays that are shipped, of the chosen sizes, from the grouped codes. Their meaning is that of
// `SlabIds` and `BagPlan`; numpy fills them in packing.py.
#include <vector>

#include "native.h"

namespace jaxsparse {
namespace {

// Ids handled at a time.
constexpr int64_t kGrain = 8192;

// One feature of a slab; fields and order are those of `FeatureBags` in host.py.
struct FeatureBags {
  int64_t base;    // first bag
  int64_t width;   // bags per sample
  int64_t num_ids; // per sample, of a fixed feature
  int64_t is_unpooled;
  const int64_t* splits;    // of a ragged feature, [B + 1]; else null
  const int64_t* position;  // places of its ids in unpooled bags; null: 0, 1, ...
};

struct Span {
  const FeatureBags& feature;
  int64_t samples;
  int32_t* bag_of;       // of the device
  int32_t* bag_offsets;  // of the device
};

void fixed_bags(const Span& span, int64_t place) {
  const FeatureBags& f = span.feature;
  int64_t bag = f.base;
  for (int64_t sample = 0; sample < span.samples; ++sample) {
    for (int64_t w = 0; w < f.width; ++w) {
      span.bag_offsets[bag + w] =
          static_cast<int32_t>(place + (f.is_unpooled ? std::min(w, f.num_ids) : 0));
    }
    for (int64_t i = 0; i < f.num_ids; ++i) {
      span.bag_of[place++] = static_cast<int32_t>(bag + (f.is_unpooled ? i : 0));
    }
    bag += f.width;
  }
}

// The samples from `first` on, of `num_bags` there are.
void ragged_bags(const Span& span, int64_t place, int64_t first, int64_t num_bags) {
  const FeatureBags& f = span.feature;
  int64_t bag = f.base;
  for (int64_t sample = first; sample < first + span.samples; ++sample, bag += f.width) {
    const int64_t begin = f.splits[std::min(sample, num_bags)];
    const int64_t end = f.splits[std::min(sample + 1, num_bags)];
    if (!f.is_unpooled) {
      span.bag_offsets[bag] = static_cast<int32_t>(place);
      for (int64_t i = begin; i < end; ++i) span.bag_of[place++] = static_cast<int32_t>(bag);
      continue;
    }
    int64_t i = begin;
    for (int64_t w = 0; w < f.width; ++w) {
      span.bag_offsets[bag + w] = static_cast<int32_t>(place);
      if (i < end && (f.position ? f.position[i] : i - begin) == w) {
        span.bag_of[place++] = static_cast<int32_t>(bag + w);
        ++i;
      }
    }
  }
}

}  // namespace
}  // namespace jaxsparse

// Bag of each id, and first id of each bag.
//
// places [num_devices, num_features + 1]: where each feature's ids begin in the device's buffer, and
// where the last one's end. bag_of [num_devices, num_ids] is num_bags behind that;
// bag_offsets [num_devices, num_bags + 1].
extern "C" void jaxsparse_fill_bags(const void* features_, const int64_t* places,
                                    int64_t num_devices, int64_t num_features, int64_t samples,
                                    int64_t num_samples, int64_t num_ids, int64_t num_bags,
                                    int32_t* bag_of, int32_t* bag_offsets) {
  using namespace jaxsparse;
  const FeatureBags* const features = static_cast<const FeatureBags*>(features_);
  parallel_for(num_devices * (num_features + 1), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t device = i / (num_features + 1), f = i % (num_features + 1);
      const int64_t place = places[i];
      int32_t* const bags = bag_of + device * num_ids;
      int32_t* const offsets = bag_offsets + device * (num_bags + 1);
      if (f == num_features) {
        std::fill(bags + place, bags + num_ids, static_cast<int32_t>(num_bags));
        offsets[num_bags] = static_cast<int32_t>(place);
        continue;
      }
      const Span span{features[f], samples, bags, offsets};
      if (features[f].splits == nullptr) {
        fixed_bags(span, place);
      } else {
        ragged_bags(span, place, device * samples, num_samples);
      }
    }
  });
}

// Rows asked of each owner, the row of each id, and ids by row.
//
// order, codes, starts, bounds: of `jaxsparse_distinct`, with room for `stride` ids a device.
// bag_of: null where bag and place of an id are one. rows [num_devices, K] with K = num_owners *
// capacity, inverse [num_devices, num_ids], row_offsets [num_devices, K + 1]; row_bags and row_ids
// [num_devices, num_ids]; the last three may be null.
extern "C" void jaxsparse_fill_rows(int64_t num_devices, int64_t num_owners, int64_t capacity,
                                    int64_t rows_per_shard, int64_t stride, int64_t num_ids,
                                    int64_t num_bags, const int32_t* order, const int64_t* codes,
                                    const int32_t* starts, const int64_t* bounds,
                                    const int32_t* bag_of, int32_t* rows, int32_t* inverse,
                                    int32_t* row_offsets, int32_t* row_bags, int32_t* row_ids) {
  using namespace jaxsparse;
  const int64_t num_rows = num_owners * capacity;
  const int64_t chunks = (stride + kGrain - 1) / kGrain;
  // Places that no group fills.
  for (int64_t device = 0; device < num_devices; ++device) {
    const int64_t* const own_bounds = bounds + device * (num_owners + 1);
    const int32_t* const own_starts = starts + device * (stride + 1);
    const int64_t real = own_starts[own_bounds[num_owners]];
    for (int64_t owner = 0; owner < num_owners; ++owner) {
      const int64_t count = own_bounds[owner + 1] - own_bounds[owner];
      const int64_t begin = device * num_rows + owner * capacity + count;
      std::fill(rows + begin, rows + begin + capacity - count,
                static_cast<int32_t>(rows_per_shard));
      if (row_offsets == nullptr) continue;
      std::fill(row_offsets + begin + device, row_offsets + begin + device + capacity - count,
                own_starts[own_bounds[owner + 1]]);
    }
    if (row_offsets) row_offsets[(device + 1) * (num_rows + 1) - 1] = static_cast<int32_t>(real);
    if (real == num_ids) continue;
    const int64_t first = device * num_ids, last = first + num_ids;
    std::fill(inverse + first, inverse + last, static_cast<int32_t>(num_rows));
    if (row_bags) std::fill(row_bags + first + real, row_bags + last, static_cast<int32_t>(num_bags));
    if (row_ids) std::fill(row_ids + first + real, row_ids + last, static_cast<int32_t>(num_ids));
  }
  parallel_for(num_devices * chunks, 1, [&](int64_t first_chunk, int64_t last_chunk) {
    for (int64_t c = first_chunk; c < last_chunk; ++c) {
      const int64_t device = c / chunks, first_id = c % chunks * kGrain;
      const int64_t* const own_bounds = bounds + device * (num_owners + 1);
      const int32_t* const own_starts = starts + device * (stride + 1);
      const int32_t* const own_order = order + device * stride;
      const int64_t* const own_codes = codes + device * stride;
      const int32_t* const end = own_starts + own_bounds[num_owners];
      // Groups that begin in this chunk.
      int64_t u = std::lower_bound(own_starts, end, first_id) - own_starts;
      const int64_t last_u = std::lower_bound(own_starts, end, first_id + kGrain) - own_starts;
      int64_t owner = std::upper_bound(own_bounds, own_bounds + num_owners, u) - own_bounds - 1;
      for (; u < last_u; ++u) {
        while (own_bounds[owner + 1] <= u) ++owner;
        const int64_t slot = owner * capacity + u - own_bounds[owner];
        rows[device * num_rows + slot] =
            static_cast<int32_t>(own_codes[u] - owner * rows_per_shard);
        if (row_offsets) row_offsets[device * (num_rows + 1) + slot] = own_starts[u];
        for (int64_t j = own_starts[u]; j < own_starts[u + 1]; ++j) {
          const int32_t place = own_order[j];
          inverse[device * num_ids + place] = static_cast<int32_t>(slot);
          if (row_bags) {
            row_bags[device * num_ids + j] =
                bag_of ? bag_of[device * num_ids + place] : place;
          }
          if (row_ids) row_ids[device * num_ids + j] = place;
        }
      }
    }
  });
}
