#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>

#include "vec.h"

namespace stepwire {

namespace {

constexpr uint64_t kOpen = uint64_t{1} << 31, kCount = kOpen - 1;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

}  // namespace

Pool::Pool(int threads, int spin_us, bool pin) : size_(threads), spin_ns_(spin_us * int64_t{1000}) {
  std::vector<int> cores = pin ? allowed_cores() : std::vector<int>{};
  threads_.reserve(size_);
  for (int thread = 1; thread < size_; ++thread) {
    try {
      threads_.emplace_back([this, thread] { work(thread); });
    } catch (...) {
      close();  // threads that are not joined would end the process
      throw;
    }
    pthread_setname_np(threads_.back().native_handle(), "stepwire-cpu");
    if ((int)cores.size() < size_) continue;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[thread], &set);
    pthread_setaffinity_np(threads_.back().native_handle(), sizeof set, &set);
  }
}

Pool::~Pool() { close(); }

void Pool::close() {
  closing_.store(true, std::memory_order_relaxed);
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::start(Entry entry, void* context) {
  entry_ = entry;
  context_ = context;
  first_phase_ = phase_.load(std::memory_order_relaxed);
  const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
  inside_.store((uint64_t)job << 32 | kOpen, std::memory_order_release);
  job_.store(job, std::memory_order_release);
  job_.notify_all();
  Thread thread(*this, 0, first_phase_);
  entry(context, thread);
  // From here on nobody enters; whoever is inside may still look at what belongs to the caller.
  uint32_t left = left_.load(std::memory_order_acquire);
  uint64_t inside = inside_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (; inside & kCount; inside = inside_.load(std::memory_order_acquire)) left = wait_change(left_, left);
}

void Pool::work(int number) {
  uint32_t seen = 0;
  for (;;) {
    seen = wait_change(job_, seen);
    if (closing_.load(std::memory_order_relaxed)) return;
    if (!enter(seen)) continue;
    Thread thread(*this, number, first_phase_);
    entry_(context_, thread);
    leave();
  }
}

// False when the job is over.
bool Pool::enter(uint32_t job) {
  uint64_t inside = inside_.load(std::memory_order_acquire);
  do {
    if ((uint32_t)(inside >> 32) != job || !(inside & kOpen)) return false;
  } while (!inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire));
  return true;
}

void Pool::leave() {
  inside_.fetch_sub(1, std::memory_order_release);
  left_.fetch_add(1, std::memory_order_release);
  left_.notify_all();
}

// All of a phase is done: the next one begins.
void Pool::finish(uint32_t phase) {
  done_.store(0, std::memory_order_relaxed);
  next_.store((uint64_t)(phase + 1) << 32, std::memory_order_release);
  phase_.store(phase + 1, std::memory_order_release);
  phase_.notify_all();
}

// Returns also when later phases are over.
void Pool::wait_finished(uint32_t phase) { wait_change(phase_, phase); }

uint32_t Pool::wait_change(std::atomic<uint32_t>& word, uint32_t seen) {
  int64_t until = 0;
  for (int tries = 1;; ++tries) {
    uint32_t value = word.load(std::memory_order_acquire);
    if (value != seen) return value;
    pause_cpu();
    if (tries % 64) continue;
    int64_t now = now_ns();
    if (until == 0) until = now + spin_ns_;
    if (now < until) continue;
    word.wait(seen, std::memory_order_acquire);
  }
}

}  // namespace stepwire
