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

// Bags of a pooled feature: lengths vary too much for branches, so each bag is written as if it had
// four ids, and the next one writes over what is too many.
void pooled_bags(const Span& span, int64_t place, const int64_t* splits, int64_t num_bags) {
  constexpr int64_t kAtOnce = 4;
  int32_t* const offsets = span.bag_offsets + span.feature.base;
  const int64_t shift = place - splits[0], end = splits[num_bags] + shift;
  for (int64_t bag = 0; bag < num_bags; ++bag) {
    offsets[bag] = static_cast<int32_t>(splits[bag] + shift);
  }
  std::fill(offsets + num_bags, offsets + span.samples, static_cast<int32_t>(end));
  for (int64_t bag = 0; bag < num_bags; ++bag) {
    const int32_t number = static_cast<int32_t>(span.feature.base + bag);
    int64_t i = splits[bag] + shift;
    const int64_t past = splits[bag + 1] + shift;
    if (i + kAtOnce <= end) {
      for (int64_t j = 0; j < kAtOnce; ++j) span.bag_of[i + j] = number;
      i += kAtOnce;
    }
    for (; i < past; ++i) span.bag_of[i] = number;
  }
}

void unpooled_bags(const Span& span, int64_t place, const int64_t* splits, int64_t num_bags,
                   const int64_t* position) {
  const int64_t width = span.feature.width;
  int64_t bag = span.feature.base;
  for (int64_t sample = 0; sample < span.samples; ++sample, bag += width) {
    int64_t i = splits[std::min(sample, num_bags)];
    const int64_t begin = i, end = splits[std::min(sample + 1, num_bags)];
    for (int64_t w = 0; w < width; ++w) {
      span.bag_offsets[bag + w] = static_cast<int32_t>(place);
      if (i < end && (position ? position[i] : i - begin) == w) {
        span.bag_of[place++] = static_cast<int32_t>(bag + w);
        ++i;
      }
    }
  }
}

// The samples from `first` on, of `num_samples` there are.
void ragged_bags(const Span& span, int64_t place, int64_t first, int64_t num_samples) {
  const FeatureBags& f = span.feature;
  first = std::min(first, num_samples);
  const int64_t num_bags = std::min(span.samples, num_samples - first);
  if (f.is_unpooled) {
    unpooled_bags(span, place, f.splits + first, num_bags, f.position);
  } else {
    pooled_bags(span, place, f.splits + first, num_bags);
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
// order, codes, starts, index, bounds: of `jaxsparse_distinct`, with room for `stride` ids and
// `num_places` places a device. bag_of: null where bag and place of an id are one.
// rows [num_devices, K] with K = num_owners * capacity, inverse [num_devices, num_ids], row_offsets
// [num_devices, K + 1], row_bags and row_ids (may be null) [num_devices, num_ids].
extern "C" void jaxsparse_fill_rows(int64_t num_devices, int64_t num_owners, int64_t capacity,
                                    int64_t rows_per_shard, int64_t stride, int64_t num_places,
                                    int64_t num_ids, int64_t num_bags, const int32_t* order,
                                    const int64_t* codes, const int32_t* starts,
                                    const int32_t* index, const int64_t* bounds,
                                    const int32_t* bag_of, int32_t* rows, int32_t* inverse,
                                    int32_t* row_offsets, int32_t* row_bags, int32_t* row_ids) {
  using namespace jaxsparse;
  const int64_t num_rows = num_owners * capacity;
  // Places of the distinct codes of each device.
  std::vector<int32_t> slots(num_owners > 1 ? num_devices * stride : 0);
  parallel_for(num_devices * num_owners, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t device = i / num_owners, owner = i % num_owners;
      const int64_t* const own = bounds + device * (num_owners + 1) + owner;
      const int64_t* const from = codes + device * stride;
      const int32_t* const from_starts = starts + device * (stride + 1);
      int32_t* const to = rows + device * num_rows + owner * capacity;
      int32_t* const offsets = row_offsets + device * (num_rows + 1) + owner * capacity;
      const int64_t count = own[1] - own[0];
      for (int64_t u = 0; u < count; ++u) {
        to[u] = static_cast<int32_t>(from[own[0] + u] - owner * rows_per_shard);
        offsets[u] = from_starts[own[0] + u];
      }
      std::fill(to + count, to + capacity, static_cast<int32_t>(rows_per_shard));
      std::fill(offsets + count, offsets + capacity, from_starts[own[1]]);
      if (owner == num_owners - 1) offsets[capacity] = from_starts[own[1]];
      if (num_owners == 1) continue;
      int32_t* const own_slots = slots.data() + device * stride + own[0];
      for (int64_t u = 0; u < count; ++u) {
        own_slots[u] = static_cast<int32_t>(owner * capacity + u);
      }
    }
  });
  const int64_t chunks = (num_ids + kGrain - 1) / kGrain;
  parallel_for(num_devices * chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      const int64_t device = c / chunks;
      const int64_t begin = c % chunks * kGrain, end = std::min(begin + kGrain, num_ids);
      const int64_t real = starts[device * (stride + 1) + bounds[(device + 1) * (num_owners + 1) - 1]];
      const int32_t* const own_order = order + device * stride;
      const int32_t* const own_index = index + device * num_places;
      const int32_t* const own_slots = slots.data() + device * stride;
      const int32_t* const own_bags = bag_of ? bag_of + device * num_ids : nullptr;
      int32_t* const own_inverse = inverse + device * num_ids;
      for (int64_t i = begin; i < std::min(end, num_places); ++i) {
        const int32_t u = own_index[i];
        own_inverse[i] = u < 0 ? static_cast<int32_t>(num_rows) : num_owners > 1 ? own_slots[u] : u;
      }
      for (int64_t i = std::max(begin, num_places); i < end; ++i) {
        own_inverse[i] = static_cast<int32_t>(num_rows);
      }
      for (int64_t j = begin; j < std::min(end, real); ++j) {
        row_bags[device * num_ids + j] = bag_of ? own_bags[own_order[j]] : own_order[j];
        if (row_ids) row_ids[device * num_ids + j] = own_order[j];
      }
      for (int64_t j = std::max(begin, real); j < end; ++j) {
        row_bags[device * num_ids + j] = static_cast<int32_t>(num_bags);
        if (row_ids) row_ids[device * num_ids + j] = static_cast<int32_t>(num_ids);
      }
    }
  });
}

// Bag lengths, transposed: lengths[f] is [num_samples], or null where all bags have sizes[f] ids;
// result [padded_samples, num_features], 0 behind the samples.
extern "C" void jaxsparse_fill_lengths(const int64_t* const* lengths, const int64_t* sizes,
                                       int64_t num_features, int64_t num_samples,
                                       int64_t padded_samples, int32_t* result) {
  constexpr int64_t kSamples = 256;
  jaxsparse::parallel_for(padded_samples, kSamples, [&](int64_t first, int64_t last) {
    const int64_t real = std::min(last, num_samples);
    for (int64_t f = 0; f < num_features; ++f) {
      for (int64_t i = first; i < real; ++i) {
        const int64_t length = lengths[f] ? lengths[f][i] : sizes[f];
        result[i * num_features + f] = static_cast<int32_t>(length);
      }
    }
    std::fill(result + std::max(first, real) * num_features, result + last * num_features, 0);
  });
}
