// SPDX-License-Identifier: Apache-2.0
// Reads in flight through io_uring, by its system calls alone.
#pragma once

#include <cstdint>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define JS_IO_URING 1
#else
#define JS_IO_URING 0
#endif

struct io_uring_sqe;
struct io_uring_cqe;

namespace jaxsparse {

// One user at a time.
class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring();

  // Whether a ring of `depth` (a power of two) can be had here and reads: a kernel may lack
  // io_uring, and a container's filter may forbid it.
  bool open(uint32_t depth);

  // Notes a read; it starts with the next `wait`. At most `depth` may be on their way.
  void read(uint64_t tag, int fd, void* to, uint32_t bytes, int64_t offset);

  // Starts what is noted and waits for `least` reads to end; 0 or an errno.
  int wait(uint32_t least);

  // Takes the end of a read: its tag and the bytes read, or minus an errno.
  bool next(uint64_t* tag, int32_t* result);

 private:
  bool map(void* parameters);
  bool reads();

  int fd_ = -1;
  uint32_t noted_ = 0;
  void* sq_ = nullptr;
  void* cq_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
  uint64_t sq_bytes_ = 0, cq_bytes_ = 0, sqes_bytes_ = 0;
  uint32_t *sq_tail_ = nullptr, *sq_mask_ = nullptr, *sq_array_ = nullptr;
  uint32_t *cq_head_ = nullptr, *cq_tail_ = nullptr, *cq_mask_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
};

}  // namespace jaxsparse
