// The threads of one process, and how they share the work of one call.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace stepwire {

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

  // Runs body(pool, thread) on all threads, and returns when all are done. One call at a time.
  template <class F>
  void run(F&& body) {
    using Body = std::remove_reference_t<F>;
    start([](void* context, Pool& pool, int thread) { (*static_cast<Body*>(context))(pool, thread); }, &body);
  }

  // For use inside of run(), by all threads alike: waits until all have come here.
  void barrier();

  // For use inside of run(), by all threads alike: f(begin, end) over parts of [0, count), then a
  // barrier. A part is a share of what is left, and `most` at most, so a thread that lost its core
  // for a while holds up only what it had begun.
  template <class F>
  void split(int count, F&& f, int most = 1 << 30) {
    int begin = next_.load(std::memory_order_relaxed);
    while (begin < count) {
      int left = count - begin, take = size_ == 1 ? left : left / (2 * size_);
      take = take < 1 ? 1 : take > most ? most : take;
      if (!next_.compare_exchange_weak(begin, begin + take, std::memory_order_relaxed)) continue;
      f(begin, begin + take);
      begin = next_.load(std::memory_order_relaxed);
    }
    barrier();
  }

 private:
  using Entry = void (*)(void*, Pool&, int);
  void start(Entry entry, void* context);
  void close();
  void work(int thread);
  uint32_t wait_change(std::atomic<uint32_t>& word, uint32_t seen);

  const int size_;
  const int64_t spin_ns_;
  Entry entry_ = nullptr;
  void* context_ = nullptr;
  // Each on a line of its own: they are written by one thread while others read.
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> next_{0};
  std::atomic<bool> closing_{false};
  std::vector<std::thread> threads_;
};

}  // namespace stepwire
