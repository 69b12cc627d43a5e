// The one inner product that everything uses: R rows of activations times V vectors of packed columns.
#pragma once

#include <cstddef>
#include <type_traits>

#include "vec.h"

namespace stepwire {

// How a type is multiplied. Packed operands hold `depth` values of k for each column side by side, as
// vdpbf16ps takes them: "one step" advances k by `depth`. Rows that are multiplied with them are of type `Row`.
template <class T>
struct Product;

template <class T>
using Row = typename Product<T>::Row;

template <>
struct Product<float> {
  static constexpr int depth = 1;
  using Row = float;
  using Packed = Floats;
  static SW_INLINE Packed packed(const float* from) { return load(from); }
  static SW_INLINE Packed broadcast(const float* from) { return splat(*from); }
  static SW_INLINE Floats add(Floats sum, Packed a, Packed b) { return fma(a, b, sum); }
};

template <>
struct Product<bf16> {
  static constexpr int depth = 2;
  using Row = bf16;
  using Packed = Words;
  static SW_INLINE Packed packed(const bf16* from) {
    Words value;
    memcpy(&value, from, sizeof value);
    return value;
  }
  static SW_INLINE Packed broadcast(const bf16* from) {
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return Words{} + pair;
  }
  static SW_INLINE Floats add(Floats sum, Packed a, Packed b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = fma((Floats)(a << 16), (Floats)(b << 16), sum);
    return fma((Floats)(a & 0xffff0000u), (Floats)(b & 0xffff0000u), sum);
#endif
  }
};

// Numbers of 16 bits in memory, float32 where they are multiplied, and so are the rows.
template <>
struct Product<f16> : Product<float> {
  static SW_INLINE Packed packed(const f16* from) { return load(from); }
};

struct Nothing {
  SW_INLINE void operator()(int) const {}
};

// Sums of one tile, held in registers. An element's sum goes over k in order, in one accumulator: its
// value is the same whatever R, V and the position in the tile are. All determinism rests on that.
template <class T, int R, int V>
struct Tile {
  using P = Product<T>;
  Floats sum[R][V];

  SW_INLINE void clear() {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = Floats{};
  }

  // Adds `steps` steps: `a` holds the rows, `lda` apart; vector v of step s is at b[v] + s * stride.
  // each_step(s) is for asking memory for what will be needed later.
  template <class F = Nothing>
  SW_INLINE void add(const Row<T>* a, ptrdiff_t lda, const T* const (&b)[V], ptrdiff_t stride, int steps,
                     F&& each_step = F{}) {
    ptrdiff_t at = 0;
    for (int s = 0; s < steps; ++s, at += stride) {
      typename P::Packed columns[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) columns[v] = P::packed(b[v] + at);
      each_step(s);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        typename P::Packed row = P::broadcast(a + r * lda + s * P::depth);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = P::add(sum[r][v], columns[v], row);
      }
    }
  }
};

// Calls f(std::integral_constant<int, n>) for n in [1, Max].
template <int Max, class F>
SW_INLINE void dispatch(int n, F&& f) {
  if constexpr (Max > 1) {
    if (n < Max) return dispatch<Max - 1>(n, f);
  }
  f(std::integral_constant<int, Max>{});
}

// Cuts `count` rows into tiles of nearly equal height, at most `most`: 13 as 7 + 6, not 12 + 1. Calls f(first, height).
template <class F>
SW_INLINE void cut_rows(int count, int most, F&& f) {
  const int tiles = (count + most - 1) / most;
  for (int i = 0, first = 0; i < tiles; ++i) {
    const int height = (count - first) / (tiles - i);
    f(first, height);
    first += height;
  }
}

// The same with the height as a constant, as dispatch gives it.
template <int Max, class F>
SW_INLINE void for_tiles(int count, F&& f) {
  cut_rows(count, Max, [&](int first, int height) { dispatch<Max>(height, [&](auto rows) { f(first, rows); }); });
}

}  // namespace stepwire
