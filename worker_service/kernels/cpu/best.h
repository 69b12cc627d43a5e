// The largest of a row's logits, found panel by panel.
#pragma once

#include <cmath>

#include "gemm.h"

namespace stepwire {

struct Best {
  float value = -INFINITY;
  int32_t token_id = 0;
  Floats infinite = {};  // a value that is not 0 once a logit was not finite

  // Takes one panel of a row of `vocab` logits in. Panels come in rising order, so that of equal logits the first one
  // stays.
  SW_INLINE void take(int panel, int vocab, Floats low, Floats high) {
    const int column = panel * kPanel;
    Floats not_finite = (low - low) + (high - high);
    if (column + kPanel > vocab) {
      // Columns that do not exist are no infinite logits.
      const Floats lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      const float left = vocab - column;
      const auto is_low = lanes < left, is_high = lanes + (float)kLanes < left;
      not_finite = (is_low ? low - low : Floats{}) + (is_high ? high - high : Floats{});
      low = is_low ? low : splat(-INFINITY);
      high = is_high ? high : splat(-INFINITY);
    }
    infinite += not_finite;
    if (!(max_lanes(max(low, high)) > value)) return;
    for (int i = 0; i < kPanel; ++i) {
      const float one = i < kLanes ? low[i] : high[i - kLanes];
      if (one > value) value = one, token_id = column + i;
    }
  }

  // Takes what was found in other panels of the same row in.
  void merge(const Best& other) {
    infinite += other.infinite;
    if (other.value > value || (other.value == value && other.token_id < token_id))
      value = other.value, token_id = other.token_id;
  }

  bool is_finite() const { return sum_lanes(infinite) == 0; }
};

}  // namespace stepwire
