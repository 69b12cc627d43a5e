// What happens to a row between the products. All of it computes in float32 and rounds once, at the end.
#pragma once

#include <cmath>

#include "vec.h"

namespace stepwire {

// The sum of squares of `size` values, a multiple of 16.
template <class T>
SW_INLINE float sum_squares(const T* x, int size) {
  Floats sum = Floats{};
  for (int i = 0; i < size; i += kLanes) {
    Floats value = load(x + i);
    sum = fma(value, value, sum);
  }
  return sum_lanes(sum);
}

SW_INLINE float inverse_rms(float squares, int size, float eps) { return 1.0f / std::sqrt(squares / size + eps); }

// y = x / rms(x) * weight; a null weight only copies.
template <class T>
inline void rms_norm(const float* x, const float* weight, int size, float eps, T* y) {
  if (!weight) {
    for (int i = 0; i < size; i += kLanes) store(y + i, load(x + i));
    return;
  }
  Floats scale = splat(inverse_rms(sum_squares(x, size), size, eps));
  for (int i = 0; i < size; i += kLanes) store(y + i, load(x + i) * scale * load(weight + i));
}

// residual += branch, normalised first when a weight is given.
template <class T>
inline void add_branch(float* residual, const T* branch, const float* weight, int size, float eps) {
  if (!weight) {
    for (int i = 0; i < size; i += kLanes) store(residual + i, load(residual + i) + load(branch + i));
    return;
  }
  Floats scale = splat(inverse_rms(sum_squares(branch, size), size, eps));
  for (int i = 0; i < size; i += kLanes)
    store(residual + i, fma(load(branch + i) * scale, load(weight + i), load(residual + i)));
}

constexpr int kMostHeadDim = 512;

// What is done to each query and key head: its norm, then its rotation.
struct HeadRule {
  int head_dim;
  int rotary_half;  // pairs that are rotated: element i with i + rotary_half
};

// to = rotate(head * scale * weight), where scale is 1 / rms or 1. A null weight stands for no norm.
// head_dim is a multiple of 16.
template <class T>
inline void norm_and_rotate(const T* head, const HeadRule& rule, const float* weight, float scale, const float* cos,
                            const float* sin, T* to) {
  alignas(64) float value[kMostHeadDim];
  for (int i = 0; i < rule.head_dim; i += kLanes) {
    Floats x = load(head + i);
    store(value + i, weight ? x * scale * load(weight + i) : x);
  }
  float *low = value, *high = value + rule.rotary_half;
  int i = 0;
  for (; i + kLanes <= rule.rotary_half; i += kLanes) {
    Floats a = load(low + i), b = load(high + i), c = load(cos + i), s = load(sin + i);
    store(low + i, fma(-b, s, a * c));
    store(high + i, fma(a, s, b * c));
  }
  for (; i < rule.rotary_half; ++i) {
    float a = low[i], b = high[i];
    low[i] = a * cos[i] - b * sin[i];
    high[i] = b * cos[i] + a * sin[i];
  }
  for (int i = 0; i < rule.head_dim; i += kLanes) store(to + i, load(value + i));
}

}  // namespace stepwire
