// Where the time of a decoder's calls goes, for profiles.
#pragma once

#include <chrono>

#include "api.h"

namespace stepwire {

// Takes times while it has somewhere to add them; else it costs a look at a pointer. Operators end with a barrier, or
// are what each thread does for itself, so the first thread's clock tells for all.
class OperatorClock {
 public:
  // Adds nanoseconds to sums[SW_NUM_OPERATORS] from now on; null ends that.
  void set(int64_t* sums) { sums_ = sums; }

  // A call begins.
  void start(int thread) {
    if (sums_ && thread == 0) last_ = now();
  }

  // An operator has ended: what has passed since the one before, or the call's begin, was its time.
  void took(int thread, int op) {
    if (!sums_ || thread != 0) return;
    const int64_t time = now();
    sums_[op] += time - last_;
    last_ = time;
  }

 private:
  static int64_t now() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
  }

  int64_t* sums_ = nullptr;
  int64_t last_ = 0;
};

}  // namespace stepwire
