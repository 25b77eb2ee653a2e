// SPDX-License-Identifier: Apache-2.0
#include "huge_pages.h"

#include <algorithm>
#include <mutex>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace jaxsparse {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kLeast = 16 * kHugePage;  // a smaller table's pages fit the translation cache
constexpr size_t kMostSeen = 1024;

struct Table {
  const void* data;
  int64_t bytes;
  bool operator==(const Table& other) const { return data == other.data && bytes == other.bytes; }
};

// Whether a table is new; the oldest are forgotten.
bool is_new(const Table& table) {
  static std::mutex mutex;
  static std::vector<Table>* const seen = new std::vector<Table>;
  std::lock_guard<std::mutex> lock(mutex);
  if (std::find(seen->begin(), seen->end(), table) != seen->end()) return false;
  if (seen->size() == kMostSeen) seen->erase(seen->begin());
  seen->push_back(table);
  return true;
}

}  // namespace

void use_huge_pages(const void* data, int64_t bytes) {
  if (bytes < kLeast || !is_new({data, bytes})) return;
#ifdef __linux__
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  void* const from = reinterpret_cast<void*>(begin);
  if (end <= begin || madvise(from, end - begin, MADV_HUGEPAGE) != 0) return;
  // At once; without it (before Linux 6.1) the kernel does so in its own time.
  constexpr int kCollapse = 25;
  madvise(from, end - begin, kCollapse);
#endif
}

}  // namespace jaxsparse
