// SPDX-License-Identifier: Apache-2.0
// Scattered rows of segment files: many small reads in flight, each row checked as it arrives.
#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "ring.h"
#include "rows.h"

namespace jaxsparse {
namespace {

constexpr int64_t kBlock = 4096;        // bytes; direct reads begin and end at such
constexpr int64_t kGap = 4096;          // bytes not asked for that are cheaper than a second read
constexpr int64_t kMost = 64 << 10;     // bytes of a read of several rows
constexpr int64_t kScratch = 32 << 20;  // bytes of all buffers, unless rows are huge
constexpr int64_t kLeastDepth = 4;
constexpr int64_t kReap = 8;  // ends waited for at a time: fewer system calls
constexpr int kThreads = 32;

struct Request {
  int fd;
  int64_t offset;
  int64_t bytes;   // read
  int64_t needed;  // of them; the file may end behind the last row
  int64_t group;
  int64_t first, last;  // of the rows asked for
};

// Arguments of a call.
struct Job {
  Wanted wanted;
  bool direct;
  const int64_t* starts;  // [groups + 1]: rows of group g are starts[g] .. starts[g + 1] - 1
  const int64_t* fds;
  const int64_t* data;  // offset of row 0 in the file, by group
  const int64_t* crcs;  // addresses, by group
  std::vector<Request> requests;
};

struct Failure {
  std::atomic<int64_t> kind{0};
  int64_t at = -1;
  void note(int64_t what, int64_t where) {
    int64_t none = 0;
    if (kind.compare_exchange_strong(none, what)) at = where;
  }
};

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<uint8_t, Free>;

Buffer aligned(int64_t bytes) {
  return Buffer(static_cast<uint8_t*>(std::aligned_alloc(kBlock, bytes)));
}

// One request for rows whose bytes lie close to each other.
void plan(Job& job, int64_t groups) {
  const Wanted& wanted = job.wanted;
  const int64_t align = job.direct ? kBlock : 1;
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = job.starts[g]; i < job.starts[g + 1]; ++i) {
      const int64_t begin = job.data[g] + (wanted.locations[i] & kRowMask) * wanted.row_bytes;
      const int64_t end = begin + wanted.row_bytes;
      const int64_t stop = (end + align - 1) / align * align;
      if (i > job.starts[g]) {
        Request& open = job.requests.back();
        const int64_t room = begin - (open.offset + open.bytes);
        if (room <= kGap && stop - open.offset <= kMost) {
          open.bytes = stop - open.offset;
          open.needed = end - open.offset;
          open.last = i + 1;
          continue;
        }
      }
      const int64_t start = begin / align * align;
      job.requests.push_back({static_cast<int>(job.fds[g]), start, stop - start, end - start, g, i,
                              i + 1});
    }
  }
}

// The rest of a read that came short; 0, an errno or kShort.
int64_t complete(const Request& request, uint8_t* buffer, int64_t got, bool direct) {
  while (got < request.needed) {
    if (direct) got = got / kBlock * kBlock;
    const ssize_t more =
        pread(request.fd, buffer + got, request.bytes - got, request.offset + got);
    if (more < 0 && errno == EINTR) continue;
    if (more < 0) return errno;
    if (more == 0 || (direct && got + more < request.needed)) return kShort;
    got += more;
  }
  return 0;
}

// What became of a read: `result` bytes, or minus an errno. Hands its rows out.
void finish(const Job& job, const Request& request, uint8_t* buffer, int64_t result,
            Failure& failure) {
  const bool again = result == -EINTR || result == -EAGAIN;
  const int64_t wrong = result < 0 && !again
                            ? -result
                            : complete(request, buffer, again ? 0 : result, job.direct);
  if (wrong) return failure.note(wrong, request.first);
  const int64_t base = job.data[request.group];
  const auto* crcs = reinterpret_cast<const uint32_t*>(job.crcs[request.group]);
  // `take_rows` wants the address of a row: that of row 0 lies before the buffer.
  const int64_t row = job.wanted.locations[request.first] & kRowMask;
  const uint8_t* bytes = buffer + (base + row * job.wanted.row_bytes - request.offset);
  const int64_t bad = take_rows(job.wanted, crcs, request.first, request.last, bytes, row);
  if (bad >= 0) failure.note(kDamaged, bad);
}

int64_t slot_bytes(const Job& job) {
  int64_t most = kBlock;
  for (const Request& request : job.requests) most = std::max(most, request.bytes);
  return (most + kBlock - 1) / kBlock * kBlock;
}

// Reads on threads, for where there is no io_uring.
void read_on_threads(const Job& job, Failure& failure) {
  const int64_t count = job.requests.size(), slot = slot_bytes(job);
  std::atomic<int64_t> taken{0};
  auto work = [&] {
    Buffer buffer = aligned(slot);
    if (!buffer) return failure.note(ENOMEM, 0);
    for (int64_t i; (i = taken++) < count && !failure.kind;) {
      finish(job, job.requests[i], buffer.get(), 0, failure);
    }
  };
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < std::min<int64_t>(kThreads, (count + 3) / 4); ++i) {
    try {
      threads.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // as many as the system gives
    }
  }
  work();
  for (auto& thread : threads) thread.join();
}

}  // namespace

// A ring and its buffers, or neither where there is none; one user at a time.
class Reader {
 public:
  explicit Reader(int64_t depth) : depth_(depth) {}

  bool open_ring() { return ring_.open(static_cast<uint32_t>(depth_)); }

  // `ended(request, buffer, result)` for each of `count` reads, in any order; 0 or an errno.
  template <typename Get, typename Ended>
  int64_t run(int64_t count, int64_t slot, Get&& get, Ended&& ended) {
    const int64_t depth = std::clamp(kScratch / slot, kLeastDepth, depth_);
    if (!reserve(slot * depth)) return ENOMEM;
    std::vector<int64_t> free(depth), request_of(depth);
    for (int64_t i = 0; i < depth; ++i) free[i] = i;
    int64_t sent = 0, pending = 0;
    while (sent < count || pending) {
      for (; sent < count && !free.empty(); ++sent, ++pending, free.pop_back()) {
        const int64_t at = free.back();
        request_of[at] = sent;
        const Request& request = get(sent);
        ring_.read(at, request.fd, scratch_.get() + at * slot,
                   static_cast<uint32_t>(request.bytes), request.offset);
      }
      const int error = ring_.wait(static_cast<uint32_t>(std::min(pending, kReap)));
      if (error) return error;
      uint64_t at;
      for (int32_t result; ring_.next(&at, &result); --pending) {
        ended(get(request_of[at]), scratch_.get() + at * slot, result);
        free.push_back(static_cast<int64_t>(at));
      }
    }
    return 0;
  }

 private:
  bool reserve(int64_t bytes) {
    if (bytes > reserved_) {
      scratch_ = aligned(bytes);
      reserved_ = scratch_ ? bytes : 0;
    }
    return bytes <= reserved_;
  }

  int64_t depth_;
  Buffer scratch_;  // outlives the ring
  int64_t reserved_ = 0;
  Ring ring_;
};

}  // namespace jaxsparse

using jaxsparse::Reader;

extern "C" {

// A reader, or 0 where io_uring is not to be had.
int64_t jaxsparse_segment_reader(int64_t depth) {
  auto reader = std::make_unique<Reader>(depth);
  return reader->open_ring() ? reinterpret_cast<int64_t>(reader.release()) : 0;
}

int64_t jaxsparse_segment_reader_close(Reader* reader) {
  delete reader;
  return 0;
}

// Rows out[targets[i]] = the row at locations[i] (ascending), groups of one file each; without a
// reader on threads. 0, or what failed (rows.h) and in failed[0] at which i.
int64_t jaxsparse_segment_read(Reader* reader, int64_t direct, int64_t row_bytes, int64_t groups,
                            const int64_t* starts, const int64_t* fds, const int64_t* data,
                            const int64_t* crcs, const int64_t* locations, const int64_t* targets,
                            uint8_t* out, int64_t* failed) {
  jaxsparse::Job job{{locations, targets, out, row_bytes}, direct != 0, starts, fds, data, crcs,
                     {}};
  jaxsparse::plan(job, groups);
  jaxsparse::Failure failure;
  if (reader == nullptr) {
    jaxsparse::read_on_threads(job, failure);
  } else {
    const int64_t error = reader->run(
        job.requests.size(), jaxsparse::slot_bytes(job),
        [&](int64_t i) -> const jaxsparse::Request& { return job.requests[i]; },
        [&](const jaxsparse::Request& request, uint8_t* buffer, int32_t result) {
          if (!failure.kind) jaxsparse::finish(job, request, buffer, result, failure);
        });
    if (error) failure.note(error, 0);
  }
  failed[0] = failure.at;
  return failure.kind;
}

// Rows of one segment out of bytes that begin with row `base`: as `jaxsparse_segment_read`.
int64_t jaxsparse_segment_take(const uint8_t* bytes, int64_t base, int64_t row_bytes,
                            const uint32_t* crcs, int64_t n, const int64_t* locations,
                            const int64_t* targets, uint8_t* out, int64_t* failed) {
  failed[0] = jaxsparse::take_rows({locations, targets, out, row_bytes}, crcs, 0, n, bytes, base);
  return failed[0] < 0 ? 0 : jaxsparse::kDamaged;
}

// What the disk can do: n reads of `bytes` each, what they read dropped; 0 or an errno.
int64_t jaxsparse_segment_blocks(Reader* reader, int64_t n, const int64_t* fds,
                              const int64_t* offsets, int64_t bytes) {
  std::vector<jaxsparse::Request> requests(n);
  for (int64_t i = 0; i < n; ++i) {
    requests[i] = {static_cast<int>(fds[i]), offsets[i], bytes, bytes, 0, i, i + 1};
  }
  int64_t failed = 0;
  const int64_t error = reader->run(
      n, bytes, [&](int64_t i) -> const jaxsparse::Request& { return requests[i]; },
      [&](const jaxsparse::Request&, uint8_t*, int32_t result) {
        if (result != bytes) failed = result < 0 ? -result : EIO;
      });
  return error ? error : failed;
}
}
