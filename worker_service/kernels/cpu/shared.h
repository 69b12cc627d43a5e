// Collectives of processes that share memory: each writes its part, and reads everybody's once all have come.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace stepwire {

// One rank's view of the memory, which all ranks map. All make the same calls in the same order.
//
// A call goes in rounds. In each a rank writes up to `part_bytes` into a part of its own, says so, and reads the parts
// when all have said so. A rank that has come to the next round has read them, so two parts a rank, used in turn, are
// enough. Sums are made in the order of ranks by every rank, so all have the same bits.
class SharedMemory {
 public:
  enum Outcome : int32_t { kDone, kLeft, kEnded, kTimedOut };

  // Takes a mapping of `bytes_of(size, part_bytes)` over. `processes` holds a file descriptor of each rank's process,
  // which polls as readable once it has ended, or below 0 for none.
  SharedMemory(void* memory, int rank, int size, int64_t part_bytes, const int32_t* processes, int spin_us,
               int64_t timeout_ms);
  // Says that this rank has left, so that nobody waits for it, and unmaps.
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  static int64_t bytes_of(int size, int64_t part_bytes);

  template <class T>
  Outcome sum(T* values, int64_t count);
  Outcome gather(const char* mine, int64_t bytes, char* all);  // all: [size, bytes]
  Outcome broadcast(char* values, int64_t bytes);              // rank 0's

 private:
  struct alignas(64) Rank {
    std::atomic<uint32_t> round;
    std::atomic<uint32_t> sleepers;
    std::atomic<uint32_t> has_left;
  };

  Rank& rank_of(int rank) { return static_cast<Rank*>(memory_)[1 + rank]; }  // the first line is the caller's
  char* part_of(int rank);
  Outcome meet();
  Outcome wait_for(int rank);
  bool has_ended(int rank) const;

  void* const memory_;
  const int rank_, size_;
  const int64_t part_bytes_, spin_ns_, timeout_ns_;
  const std::vector<int32_t> processes_;
  uint32_t round_ = 1;
};

}  // namespace stepwire
