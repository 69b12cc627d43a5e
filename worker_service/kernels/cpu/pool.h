// The threads of one process, and how they share the work of one call.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace stepwire {

class Thread;

// OpenMP is not used: torch brings a runtime of its own, and two of them fight for the cores.
// A thread that waits spins for a bounded time and then sleeps, so that an idle pool costs nothing
// and a crowded machine is not made worse.
class Pool {
 public:
  // `threads` counts the calling thread. With `pin`, the others are bound to the cores this process
  // may use, the first left to the caller. Throws what std::thread throws.
  Pool(int threads, int spin_us, bool pin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }

  // Runs body(thread) on all threads that have a core now, and returns when all are done. One call at a time.
  //
  // They go through the same phases, see Thread::split. A phase is over when its work is done, whoever did it: a thread
  // that has lost its core is waited for only while it holds a part, and passes over what was done without it.
  // So between two phases a thread writes only to memory of its own, and what it makes there counts only if it then
  // gets a part of the next one.
  template <class F>
  void run(F&& body) {
    using Body = std::remove_reference_t<F>;
    start([](void* context, Thread& thread) { (*static_cast<Body*>(context))(thread); }, &body);
  }

 private:
  friend class Thread;
  using Entry = void (*)(void*, Thread&);
  void start(Entry entry, void* context);
  void close();
  void work(int number);
  bool enter(uint32_t job);
  void leave();
  void finish(uint32_t phase);
  void wait_finished(uint32_t phase);
  uint32_t wait_change(std::atomic<uint32_t>& word, uint32_t seen);

  const int size_;
  const int64_t spin_ns_;
  Entry entry_ = nullptr;
  void* context_ = nullptr;
  uint32_t first_phase_ = 0;
  // Each on a line of its own: they are written by one thread while others read.
  alignas(64) std::atomic<uint32_t> job_{0};
  // Which job is open, if any, above the number of threads inside it.
  alignas(64) std::atomic<uint64_t> inside_{0};
  alignas(64) std::atomic<uint32_t> left_{0};
  // The phase above the first item that nobody has taken; items of it that are done.
  alignas(64) std::atomic<uint64_t> next_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<bool> closing_{false};
  std::vector<std::thread> threads_;
};

// One thread inside of Pool::run.
class Thread {
 public:
  Thread(Pool& pool, int number, uint32_t phase) : number(number), pool_(pool), phase_(phase) {}

  const int number;  // from 0, the caller's
  int pool_size() const { return pool_.size(); }

  // A phase, of all threads alike: f(begin, end) over parts of [0, count); returns when all of them are done. A part
  // is a share of what is left, and `most` at most, so a thread that lost its core for a while holds up only what
  // it had begun.
  template <class F>
  void split(int count, F&& f, int most = 1 << 30) {
    if (count <= 0) return;
    const uint32_t phase = phase_++;
    uint64_t next = pool_.next_.load(std::memory_order_acquire);
    for (;;) {
      if ((uint32_t)(next >> 32) != phase) return;
      const int begin = (int)(uint32_t)next;
      if (begin >= count) break;
      const int left = count - begin, size = pool_.size();
      int take = size == 1 ? left : left / (2 * size);
      take = take < 1 ? 1 : take > most ? most : take;
      if (!pool_.next_.compare_exchange_weak(next, next + take, std::memory_order_acquire)) continue;
      f(begin, begin + take);
      if (pool_.done_.fetch_add(take, std::memory_order_acq_rel) + take == count) return pool_.finish(phase);
      next = pool_.next_.load(std::memory_order_acquire);
    }
    pool_.wait_finished(phase);
  }

 private:
  Pool& pool_;
  uint32_t phase_;
};

}  // namespace stepwire
