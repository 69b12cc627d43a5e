// y = x * W^T for a weight of few bits a value, packed once: see SwQuantised in api.h.
//
// Inputs become integers too: of each span of inputs the multiples of one power of two, in two or three
// signed bytes (see digits.h). Within a span everything is then a sum of integers, exact in any order, and
// spans and groups are added in float32, in their order. So what a row gets depends on nothing but the row.
#pragma once

#include "quantised_inputs.h"

namespace stepwire {

// sums[r] = the 32 columns of row r of a tile; `x` and `panel` count from the first.
using QuantisedTile = void (*)(const Digits& x, int row, const SwQuantised& weight, int panel, float (*sums)[kPanel]);

// Rows whose sums, an accumulator for each byte of an input, fit the registers beside what is multiplied.
constexpr int most_quantised_rows(int num_bytes) { return kTileRows / num_bytes; }

// The most rows of a tile of such inputs.
inline int most_rows_of(const Digits& x) { return x.joined ? kTileRows : most_quantised_rows(x.num_bytes); }

// The product of a tile of `rows` rows, at most the above.
QuantisedTile quantised_tile(const Digits& x, int bits, int rows);

// The weight's row `row`, float32 [depth].
void unpack_row(const SwQuantised& weight, int row, float* to);

// As gemm, and done is called alike.
template <class Done>
void quantised_gemm(Thread& thread, const Digits& x, int num_rows, const SwQuantised& weight, int num_panels,
                    Done&& done) {
  for_panels(thread, num_rows, num_panels, [&](int panel, int first, int count) {
    alignas(64) float sums[kTileRows][kPanel];
    cut_rows(count, most_rows_of(x), [&](int offset, int height) {
      const int row = first + offset;
      quantised_tile(x, weight.bits, height)(x, row, weight, panel, sums);
      for (int r = 0; r < height; ++r) done(row + r, panel, load(sums[r]), load(sums[r] + kLanes));
    });
  });
}

// The plain product, as linear.
template <class T>
void quantised_linear(Pool& pool, const T* x, int64_t rows, const SwQuantised& weight, const float* bias, int columns,
                      T* y) {
  const InputRows<T> from(x, rows, weight.depth);
  QuantisedInputs<Row<T>> inputs(pool.size(), (int)rows, {&weight});
  pool.run([&](Thread& thread) {
    const Digits digits = inputs.take(thread, from.rows, (int)rows, weight);
    quantised_gemm(thread, digits, (int)rows, weight, panels(columns), [&](int row, int panel, Floats low, Floats high) {
      add_panel(bias, panel, columns, low, high);
      store_panel(y + (ptrdiff_t)row * columns, panel, columns, low, high);
    });
  });
}

}  // namespace stepwire
