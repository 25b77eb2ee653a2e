// SPDX-License-Identifier: Apache-2.0
#include "ring.h"

#if JS_IO_URING

#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <initializer_list>

namespace jaxsparse {
namespace {

// Older headers lack the names of newer flags; a kernel that does not know one refuses it.
constexpr uint32_t kClamp = 1u << 4;         // IORING_SETUP_CLAMP, 5.6
constexpr uint32_t kCoopTaskrun = 1u << 8;  // IORING_SETUP_COOP_TASKRUN, 5.19: fewer interrupts

void* map_ring(int fd, uint64_t bytes, uint64_t offset) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
  return at == MAP_FAILED ? nullptr : at;
}

uint32_t* word(void* base, uint32_t offset) {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(base) + offset);
}

}  // namespace

Ring::~Ring() {
  if (sqes_) munmap(sqes_, sqes_bytes_);
  if (cq_) munmap(cq_, cq_bytes_);
  if (sq_) munmap(sq_, sq_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

bool Ring::open(uint32_t depth) {
  io_uring_params parameters;
  for (uint32_t flags : {kClamp | kCoopTaskrun, kClamp}) {
    std::memset(&parameters, 0, sizeof parameters);
    parameters.flags = flags;
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &parameters));
    if (fd_ >= 0) break;
  }
  if (fd_ < 0 || parameters.sq_entries < depth) return false;
  fcntl(fd_, F_SETFD, FD_CLOEXEC);
  return map(&parameters) && reads();
}

bool Ring::map(void* parameters) {
  const auto& p = *static_cast<io_uring_params*>(parameters);
  sq_bytes_ = p.sq_off.array + p.sq_entries * sizeof(uint32_t);
  cq_bytes_ = p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe);
  sqes_bytes_ = p.sq_entries * sizeof(io_uring_sqe);
  sq_ = map_ring(fd_, sq_bytes_, IORING_OFF_SQ_RING);
  cq_ = map_ring(fd_, cq_bytes_, IORING_OFF_CQ_RING);
  sqes_ = static_cast<io_uring_sqe*>(map_ring(fd_, sqes_bytes_, IORING_OFF_SQES));
  if (!sq_ || !cq_ || !sqes_) return false;
  sq_tail_ = word(sq_, p.sq_off.tail);
  sq_mask_ = word(sq_, p.sq_off.ring_mask);
  sq_array_ = word(sq_, p.sq_off.array);
  cq_head_ = word(cq_, p.cq_off.head);
  cq_tail_ = word(cq_, p.cq_off.tail);
  cq_mask_ = word(cq_, p.cq_off.ring_mask);
  cqes_ = reinterpret_cast<io_uring_cqe*>(static_cast<char*>(cq_) + p.cq_off.cqes);
  return true;
}

// IORING_OP_READ is of 5.6, and rings may be allowed where reads are not.
bool Ring::reads() {
  const int zero = ::open("/dev/zero", O_RDONLY | O_CLOEXEC);
  if (zero < 0) return false;
  char to[16];
  uint64_t tag = 0;
  int32_t result = -1;
  read(7, zero, to, sizeof to, 0);
  const bool done = wait(1) == 0 && next(&tag, &result);
  ::close(zero);
  return done && tag == 7 && result == static_cast<int32_t>(sizeof to);
}

void Ring::read(uint64_t tag, int fd, void* to, uint32_t bytes, int64_t offset) {
  const uint32_t tail = *sq_tail_;  // written by this side alone
  const uint32_t index = tail & *sq_mask_;
  io_uring_sqe& entry = sqes_[index];
  std::memset(&entry, 0, sizeof entry);
  entry.opcode = IORING_OP_READ;
  entry.fd = fd;
  entry.addr = reinterpret_cast<uint64_t>(to);
  entry.len = bytes;
  entry.off = static_cast<uint64_t>(offset);
  entry.user_data = tag;
  sq_array_[index] = index;
  __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
  ++noted_;
}

int Ring::wait(uint32_t least) {
  do {
    const long done = syscall(__NR_io_uring_enter, fd_, noted_, least, IORING_ENTER_GETEVENTS,
                              nullptr, 0);
    if (done >= 0) {
      noted_ -= static_cast<uint32_t>(done);
    } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
      return errno;
    }
  } while (noted_);
  return 0;
}

bool Ring::next(uint64_t* tag, int32_t* result) {
  const uint32_t head = *cq_head_;
  if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
  const io_uring_cqe& entry = cqes_[head & *cq_mask_];
  *tag = entry.user_data;
  *result = entry.res;
  __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}

}  // namespace jaxsparse

#else

namespace jaxsparse {

Ring::~Ring() = default;
bool Ring::open(uint32_t) { return false; }
void Ring::read(uint64_t, int, void*, uint32_t, int64_t) {}
int Ring::wait(uint32_t) { return 0; }
bool Ring::next(uint64_t*, int32_t*) { return false; }

}  // namespace jaxsparse

#endif
