// The largest of a row's logits, without storing them.
#pragma once

#include <cmath>

#include "gemm.h"

namespace stepwire {

// A thread's largest logit of a row so far, and a value that is not 0 once one was not finite.
struct Best {
  float value = -INFINITY;
  int32_t token_id = 0;
  float infinite = 0;
};

// A thread's panels come in rising order, so that of equal logits the first one stays.
inline void find_best(Best& best, int column, int vocab, Floats low, Floats high) {
  if (column + kPanel > vocab) {
    const Floats lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float left = vocab - column;
    low = lanes < left ? low : splat(-INFINITY);
    high = lanes + (float)kLanes < left ? high : splat(-INFINITY);
    // Columns that do not exist are no infinite logits.
    best.infinite += sum_lanes(lanes < left ? low - low : Floats{}) +
                     sum_lanes(lanes + (float)kLanes < left ? high - high : Floats{});
  } else {
    best.infinite += sum_lanes((low - low) + (high - high));
  }
  if (!(max_lanes(max(low, high)) > best.value)) return;
  for (int i = 0; i < kPanel; ++i) {
    const float value = i < kLanes ? low[i] : high[i - kLanes];
    if (value > best.value) best = {value, column + i, best.infinite};
  }
}

}  // namespace stepwire
