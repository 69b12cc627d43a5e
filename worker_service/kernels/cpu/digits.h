// Inputs of a product as integers: of each span of inputs a scale, and multiples of it in signed bytes.
#pragma once

#include <cmath>
#include <cstddef>

#include "api.h"
#include "vec.h"

namespace stepwire {

using Bytes = int8_t __attribute__((vector_size(16)));
using Shorts = int16_t __attribute__((vector_size(32)));

// What a span's integers are multiplied by, and their sum; of three bytes that of the last is kept apart. And the sum
// of the inputs that they stand for.
struct SpanTotal {
  float scale;
  int32_t total, last_total;
  float sum;
};

// Rows of integers x = scale * (b0 * 256^(n-1) + ... + b(n-1)), each byte from -128 to 127.
struct Digits {
  int num_bytes;
  bool joined;              // two bytes as one integer of 16 bits
  int8_t* bytes;            // [rows][num_bytes][inputs]; joined [rows][inputs] of two, of each four the third second
  SpanTotal* totals;        // [rows][spans]
  ptrdiff_t inputs, spans;  // of a row

  int8_t* row_bytes(int row) const { return bytes + (ptrdiff_t)row * num_bytes * inputs; }
  SpanTotal* row_totals(int row) const { return totals + row * spans; }
};

SW_INLINE Floats absolute(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

// To the nearest integer, ties to even below 2^22 and away from 0 above.
SW_INLINE Ints nearest(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#else
  const Floats magic = splat(12582912.0f);
  const Floats half = (Floats)(((Words)x & 0x80000000u) | 0x3f000000u);
  const Ints small = (Ints)((x + magic) - magic == x) | (Ints)(absolute(x) < 4194304.0f);
  const Floats even = (x + magic) - magic;
  return __builtin_convertvector(small ? even : x + half, Ints);
#endif
}

// The least power of two of which `largest` is at most 127 * 256^(n-1) + ... + 127 times; and 1 over it.
struct Step {
  float size, inverse;
};

SW_INLINE Step step_for(float largest, int num_bytes) {
  // The bytes reach 127 + 127/256 + ... of 128: beyond that it takes a larger step.
  const float scaled = largest * 1.0040f;
  uint32_t bits;
  memcpy(&bits, &scaled, sizeof bits);
  int exponent = (int)(bits >> 23) - 127;
  // Not so small that the inverse were infinite: what is below counts as 0.
  exponent = (exponent < -100 ? -100 : exponent) - (num_bytes * 8 - 2);
  const uint32_t up = (uint32_t)(exponent + 127) << 23, down = (uint32_t)(127 - exponent) << 23;
  Step step;
  memcpy(&step.size, &up, sizeof up);
  memcpy(&step.inverse, &down, sizeof down);
  return step;
}

SW_INLINE int32_t sum_lanes(Ints value) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) value[i] += value[i + width];
  return value[0];
}

SW_INLINE void store_bytes(int8_t* to, Ints values) {
#if defined(__AVX512F__)
  const __m128i narrow = _mm512_cvtepi32_epi8((__m512i)values);
#else
  const Bytes narrow = __builtin_convertvector(values, Bytes);
#endif
  memcpy(to, &narrow, sizeof narrow);
}

// Of each four the first and third, then the others: as the products of 16 bits take them.
SW_INLINE void store_joined(int8_t* to, Ints values) {
  constexpr Ints kOrder = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
  const Shorts narrow = __builtin_convertvector(__builtin_shuffle(values, kOrder), Shorts);
  memcpy(to, &narrow, sizeof narrow);
}

// The low byte, as signed, leaves `value`, which is 256 times smaller then.
SW_INLINE Ints take_byte(Ints& value) {
  const Ints low = (value << 24) >> 24;
  value = (value - low) >> 8;
  return low;
}

// Largest magnitude of x[begin, end), multiples of 16; `bad` is no number from then on when one of them is none, or
// infinite. Beyond `depth` there are zeros.
template <class U>
SW_INLINE float largest_magnitude(const U* x, int begin, int end, int depth, Floats& bad) {
  Floats top = Floats{};
  for (int at = begin; at < end; at += kLanes) {
    const Floats value = load_part(x, at, depth);
    bad += value - value;
    top = max(top, absolute(value));
  }
  return max_lanes(top);
}

// One row x [depth], in the order of the weight's inputs, into row `row` of `to`.
template <class U>
void take_digits(const U* x, int depth, const SwQuantised& weight, const Digits& to, int row) {
  const int rounding = weight.rounding, last_byte = to.num_bytes - 1;
  int8_t* bytes = to.row_bytes(row);
  SpanTotal* totals = to.row_totals(row);
  Floats bad = Floats{};
  float scale = 1;
  for (int span = 0; span < to.spans; ++span) {
    const int begin = span * weight.span, end = begin + weight.span;
    float inverse = 1;
    if (rounding == SW_ROUND_NOTHING) {
      const Step step = step_for(largest_magnitude(x, begin, end, depth, bad), to.num_bytes);
      scale = step.size, inverse = step.inverse;
    } else if (begin % weight.rounding_group == 0) {
      const float largest = largest_magnitude(x, begin, begin + weight.rounding_group, depth, bad);
      scale = largest > 0 ? largest / 127.0f : 1.0f;
    }
    Ints total = Ints{}, last_total = Ints{};
    for (int at = begin; at < end; at += kLanes) {
      const Floats value = load_part(x, at, depth);
      Ints left;
      if (rounding == SW_ROUND_NOTHING) {
        left = nearest(value * inverse);
      } else {
        Floats scaled = value / scale;
        scaled = scaled < -128.0f ? splat(-128.0f) : scaled > 127.0f ? splat(127.0f) : scaled;
        left = nearest(scaled);
      }
      if (last_byte < 2) total += left;
      if (to.joined) {
        store_joined(bytes + 2 * at, left);
        continue;
      }
      for (int place = last_byte; place > 0; --place) {
        const Ints low = take_byte(left);
        if (place == 2) last_total += low, total += left;
        store_bytes(bytes + place * to.inputs + at, low);
      }
      store_bytes(bytes + at, left);
    }
    const int32_t sum = sum_lanes(total), last_sum = sum_lanes(last_total);
    // Scales are powers of two where sums are asked for: rounded once, if at all, fused or not.
    const float all = last_byte < 2 ? (float)sum : (float)((int64_t)sum * 256 + last_sum);
    totals[span] = {scale, sum, last_sum, all * scale};
  }
  // Shows in every sum of the row.
  if (!(sum_lanes(bad) == 0)) totals[0].scale = NAN;
}

}  // namespace stepwire
