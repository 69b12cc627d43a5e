#include "shared.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>

#include "api.h"
#include "vec.h"

namespace stepwire {

namespace {

// How long a rank sleeps before it looks whether the one that it waits for is still there.
constexpr int64_t kLookNs = 10'000'000;

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

// Not std::atomic's wait and notify: these are for the threads of one process.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, int64_t most_ns) {
  timespec time{most_ns / 1'000'000'000, most_ns % 1'000'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Values [0, count) of all parts into `to`, in order of rank.
template <class T>
void add_parts(T* to, const T* const* parts, int size, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Floats sum = load(parts[0] + i);
    for (int rank = 1; rank < size; ++rank) sum += load(parts[rank] + i);
    store(to + i, sum);
  }
  if (i == count) return;
  const int at = static_cast<int>(i), size_of_part = static_cast<int>(count);
  Floats sum = load_part(parts[0], at, size_of_part);
  for (int rank = 1; rank < size; ++rank) sum += load_part(parts[rank], at, size_of_part);
  store_part(to + i, sum, size_of_part - at);
}

}  // namespace

SharedMemory::SharedMemory(void* memory, int rank, int size, int64_t part_bytes, const int32_t* processes,
                           int spin_us, int64_t timeout_ms)
    : memory_(memory),
      rank_(rank),
      size_(size),
      part_bytes_(part_bytes),
      spin_ns_(spin_us * int64_t{1000}),
      timeout_ns_(timeout_ms * 1'000'000),
      processes_(processes, processes + size) {}

SharedMemory::~SharedMemory() {
  rank_of(rank_).has_left.store(1);
  wake_all(rank_of(rank_).round);
  munmap(memory_, bytes_of(size_, part_bytes_));
}

int64_t SharedMemory::bytes_of(int size, int64_t part_bytes) {
  return (1 + size) * sizeof(Rank) + 2 * size * part_bytes;
}

char* SharedMemory::part_of(int rank) {
  char* parts = static_cast<char*>(memory_) + (1 + size_) * sizeof(Rank);
  return parts + (2 * rank + round_ % 2) * part_bytes_;
}

template <class T>
SharedMemory::Outcome SharedMemory::sum(T* values, int64_t count) {
  const int64_t most = part_bytes_ / sizeof(T);
  std::vector<const T*> parts(size_);
  for (int64_t done = 0; done < count; done += most) {
    const int64_t part = std::min(most, count - done);
    memcpy(part_of(rank_), values + done, part * sizeof(T));
    if (Outcome outcome = meet()) return outcome;
    for (int rank = 0; rank < size_; ++rank) parts[rank] = reinterpret_cast<const T*>(part_of(rank));
    add_parts(values + done, parts.data(), size_, part);
    ++round_;
  }
  return kDone;
}

SharedMemory::Outcome SharedMemory::gather(const char* mine, int64_t bytes, char* all) {
  for (int64_t done = 0; done < bytes; done += part_bytes_) {
    const int64_t part = std::min(part_bytes_, bytes - done);
    memcpy(part_of(rank_), mine + done, part);
    if (Outcome outcome = meet()) return outcome;
    for (int rank = 0; rank < size_; ++rank) memcpy(all + rank * bytes + done, part_of(rank), part);
    ++round_;
  }
  return kDone;
}

SharedMemory::Outcome SharedMemory::broadcast(char* values, int64_t bytes) {
  for (int64_t done = 0; done < bytes; done += part_bytes_) {
    const int64_t part = std::min(part_bytes_, bytes - done);
    if (rank_ == 0) memcpy(part_of(0), values + done, part);
    if (Outcome outcome = meet()) return outcome;
    if (rank_ != 0) memcpy(values + done, part_of(0), part);
    ++round_;
  }
  return kDone;
}

SharedMemory::Outcome SharedMemory::meet() {
  Rank& mine = rank_of(rank_);
  mine.round.store(round_);
  // Whoever adds itself after this has looked finds the round there before it sleeps.
  if (mine.sleepers.load()) wake_all(mine.round);
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_)
      if (Outcome outcome = wait_for(rank)) return outcome;
  return kDone;
}

SharedMemory::Outcome SharedMemory::wait_for(int rank) {
  Rank& other = rank_of(rank);
  // A rank is at most one round ahead; the difference stays right where the numbers begin anew.
  auto has_come = [&](uint32_t round) { return static_cast<int32_t>(round - round_) >= 0; };
  int64_t begin = 0;
  for (int tries = 1;; ++tries) {
    uint32_t round = other.round.load(std::memory_order_acquire);
    if (has_come(round)) return kDone;
    pause_cpu();
    if (tries % 64) continue;
    const int64_t now = now_ns();
    if (begin == 0) begin = now;
    if (now - begin < spin_ns_) continue;
    if (other.has_left.load()) return has_come(other.round.load()) ? kDone : kLeft;
    if (now - begin > timeout_ns_) return kTimedOut;
    other.sleepers.fetch_add(1);
    sleep_on(other.round, round, kLookNs);
    other.sleepers.fetch_sub(1);
    if (has_ended(rank) && !has_come(other.round.load())) return kEnded;
    tries = 63;
  }
}

bool SharedMemory::has_ended(int rank) const {
  pollfd process{processes_[rank], POLLIN, 0};
  return processes_[rank] >= 0 && poll(&process, 1, 0) > 0;
}

}  // namespace stepwire

using stepwire::SharedMemory;

int64_t sw_shared_bytes(int32_t size, int64_t part_bytes) { return SharedMemory::bytes_of(size, part_bytes); }

void* sw_shared_open(int32_t file, int32_t rank, int32_t size, int64_t part_bytes, const int32_t* processes,
                     int32_t spin_us, int64_t timeout_ms) {
  void* memory = mmap(nullptr, SharedMemory::bytes_of(size, part_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  return new SharedMemory(memory, rank, size, part_bytes, processes, spin_us, timeout_ms);
}

void sw_shared_close(void* shared) { delete static_cast<SharedMemory*>(shared); }

int32_t sw_shared_sum(void* shared, int32_t dtype, void* values, int64_t count) {
  auto& memory = *static_cast<SharedMemory*>(shared);
  if (dtype == SW_BF16) return memory.sum(static_cast<stepwire::bf16*>(values), count);
  if (dtype == SW_F16) return memory.sum(static_cast<stepwire::f16*>(values), count);
  return memory.sum(static_cast<float*>(values), count);
}

int32_t sw_shared_gather(void* shared, const void* mine, int64_t bytes, void* all) {
  return static_cast<SharedMemory*>(shared)->gather(static_cast<const char*>(mine), bytes, static_cast<char*>(all));
}

int32_t sw_shared_broadcast(void* shared, void* values, int64_t bytes) {
  return static_cast<SharedMemory*>(shared)->broadcast(static_cast<char*>(values), bytes);
}
