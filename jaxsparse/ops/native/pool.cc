// SPDX-License-Identifier: Apache-2.0
// The threads of all kernels of a process.
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif
#ifndef _WIN32
#include <pthread.h>
#endif

#include "native.h"

namespace jaxsparse {
namespace {

struct Job {
  Chunk chunk;
  void* context;
  int64_t num_chunks;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;
};

int64_t allowed_threads() {
  if (const char* text = std::getenv("JAXSPARSE_NATIVE_THREADS")) {
    return std::max<int64_t>(std::atoll(text), 1);
  }
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(CPU_COUNT(&set), 1);
#endif
  return std::max<int64_t>(std::thread::hardware_concurrency(), 1);
}

// Takes chunks of a job until none is left. The last one to finish wakes the caller.
void work(Job& job) {
  for (;;) {
    const int64_t chunk = job.next.fetch_add(1);
    if (chunk >= job.num_chunks) return;
    job.chunk(job.context, chunk);
    if (job.done.fetch_add(1) + 1 == job.num_chunks) {
      std::lock_guard<std::mutex> lock(job.mutex);
      job.finished.notify_all();
    }
  }
}

// Its workers start with the first job.
class Pool {
 public:
  void offer(const std::shared_ptr<Job>& job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (; num_workers_ < num_threads() - 1; ++num_workers_) {
        std::thread([this] { serve(); }).detach();
      }
      jobs_.push_back(job);
    }
    change_.notify_all();
  }

  void withdraw(const std::shared_ptr<Job>& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto place = std::find(jobs_.begin(), jobs_.end(), job);
    if (place != jobs_.end()) jobs_.erase(place);
  }

 private:
  void serve() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        change_.wait(lock, [this] { return !jobs_.empty(); });
        job = jobs_.front();
        // A job whose chunks are all taken leaves the queue; its caller waits for the begun ones.
        if (job->next.load() >= job->num_chunks) {
          jobs_.pop_front();
          continue;
        }
      }
      work(*job);
    }
  }

  std::mutex mutex_;
  std::condition_variable change_;
  std::deque<std::shared_ptr<Job>> jobs_;
  int64_t num_workers_ = 0;
};

// Made when the library is loaded, and never destroyed: at the end of a process workers may still
// wait in it.
std::atomic<Pool*> the_pool{new Pool};

const int64_t num_allowed = allowed_threads();

#ifndef _WIN32
// A fork copies none of the workers, and a lock as it is: if another thread holds it just then,
// nobody lets go of it in the child. So the child gets a pool of its own.
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { the_pool = new Pool; });
#endif

}  // namespace

int64_t num_threads() { return num_allowed; }

void run_chunks(int64_t num_chunks, Chunk chunk, void* context) {
  const auto job = std::make_shared<Job>();
  job->chunk = chunk;
  job->context = context;
  job->num_chunks = num_chunks;
  Pool& pool = *the_pool;
  pool.offer(job);
  work(*job);
  pool.withdraw(job);
  // A begun chunk is mostly about to end: sleeping and waking would cost more than it.
  for (int spin = 0; spin < 2000; ++spin) {
    if (job->done.load() == num_chunks) return;
    std::this_thread::yield();
  }
  std::unique_lock<std::mutex> lock(job->mutex);
  job->finished.wait(lock, [&] { return job->done.load() == num_chunks; });
}

}  // namespace jaxsparse

extern "C" int64_t jaxsparse_num_threads() { return jaxsparse::num_threads(); }

// The sum of 0..n-1, taken in pieces on all threads: shows that every piece is run once.
extern "C" int64_t jaxsparse_count_chunks(int64_t n, int64_t grain) {
  std::atomic<int64_t> total{0};
  jaxsparse::parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    int64_t sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += i;
    total += sum;
  });
  return total.load();
}
