// SPDX-License-Identifier: Apache-2.0
// Zeroed memory whose size in the process is what was asked for, and which goes back to the system.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace jaxsparse::key_index {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

inline size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Larger pieces are mappings of their own: a heap keeps the holes that growing tables leave.
class Pages {
 public:
  Pages() = default;
  explicit Pages(size_t bytes) : bytes_(bytes) {
    if (bytes_ < kLeastMapping) {
      data_ = std::calloc(bytes_, 1);
      if (data_ == nullptr) throw std::bad_alloc();
    } else {
      bytes_ = round_up(bytes_, kPage);
      data_ = map(bytes_, kPopulate);
    }
  }
  // As much as a huge page: one such page if `at_once`, where it can be had; else of ordinary ones,
  // of which only the touched take memory, until `collapse`.
  static Pages huge(bool at_once) {
    Pages pages;
    char* const from = static_cast<char*>(map(2 * kHugePage, 0));
    const size_t before = round_up(reinterpret_cast<uintptr_t>(from), kHugePage) -
                          reinterpret_cast<uintptr_t>(from);
    if (before > 0) munmap(from, before);
    if (before < kHugePage) munmap(from + before + kHugePage, kHugePage - before);
    pages.data_ = from + before;
    pages.bytes_ = kHugePage;
#ifdef __linux__
    if (at_once) madvise(pages.data_, kHugePage, MADV_HUGEPAGE);
#else
    (void)at_once;
#endif
    return pages;
  }
  Pages(Pages&& other) noexcept { swap(other); }
  Pages& operator=(Pages&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Pages() {
    if (bytes_ < kLeastMapping) {
      std::free(data_);
    } else {
      munmap(data_, bytes_);
    }
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Asks for one page of 2 MiB in place of 512: a random read walks no page table then. Changes no
  // content; where it cannot be had nothing happens.
  void collapse() const {
#ifdef __linux__
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1
    if (madvise(data_, bytes_, MADV_HUGEPAGE) == 0) madvise(data_, bytes_, kCollapse);
#endif
  }

 private:
  static constexpr size_t kLeastMapping = 4 * kPage;

#ifdef MAP_POPULATE
  static constexpr int kPopulate = MAP_POPULATE;  // in one go, not fault by fault
#else
  static constexpr int kPopulate = 0;
#endif

  static void* map(size_t bytes, int flags) {
    void* const data =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    return data;
  }
  void swap(Pages& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace jaxsparse::key_index
