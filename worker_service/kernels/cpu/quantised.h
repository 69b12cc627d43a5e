// y = x * W^T for a weight of few bits a value, packed once: see SwQuantised in api.h.
//
// Inputs become integers too: of each span of inputs the multiples of one power of two, in two or three
// signed bytes (see digits.h). Within a span everything is then a sum of integers, exact in any order, and
// spans and groups are added in float32, in their order. So what a row gets depends on nothing but the row,
// and is the same whichever instructions the CPU has.
#pragma once

#include "quantised_inputs.h"

namespace stepwire {

// sums[r] = the 32 columns of row r of a tile; `x` and `panel` count from the first.
using QuantisedTile = void (*)(const Digits& x, int row, const SwQuantised& weight, int panel, float (*sums)[kPanel]);

// Rows whose sums, an accumulator for each byte of an input, fit the registers beside what is multiplied.
constexpr int most_quantised_rows(int num_bytes) { return kTileRows / num_bytes; }

// The product of a tile of `rows` rows, at most the above.
QuantisedTile quantised_tile(int num_bytes, int bits, int rows);

// The weight's row `row`, float32 [depth].
void unpack_row(const SwQuantised& weight, int row, float* to);

// As gemm, and done is called alike.
template <class Done>
void quantised_gemm(Pool& pool, const Digits& x, int num_rows, const SwQuantised& weight, int num_panels, Done&& done) {
  const int most = most_quantised_rows(x.num_bytes);
  const int row_blocks = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
  pool.split(row_blocks * num_panels, [&](int begin, int end) {
    alignas(64) float sums[kTileRows][kPanel];
    for (int i = begin; i < end; ++i) {
      const int panel = i % num_panels, block = i / num_panels;
      const int first = (int)((int64_t)num_rows * block / row_blocks);
      const int count = (int)((int64_t)num_rows * (block + 1) / row_blocks) - first;
      const int tiles = (count + most - 1) / most;
      for (int tile = 0, row = 0; tile < tiles; ++tile) {
        const int height = (count - row) / (tiles - tile);
        quantised_tile(x.num_bytes, weight.bits, height)(x, first + row, weight, panel, sums);
        for (int r = 0; r < height; ++r) done(first + row + r, panel, load(sums[r]), load(sums[r] + kLanes));
        row += height;
      }
    }
  });
}

// The plain product, as linear.
template <class T>
void quantised_linear(Pool& pool, const T* x, int64_t rows, const SwQuantised& weight, const float* bias, int columns,
                      T* y) {
  QuantisedInputs<T> inputs(pool.size(), (int)rows, {&weight});
  pool.run([&](Pool& all, int thread) {
    const Digits digits = inputs.take(all, thread, Rows<const T>{x, weight.depth}, (int)rows, weight);
    quantised_gemm(all, digits, (int)rows, weight, panels(columns), [&](int row, int panel, Floats low, Floats high) {
      add_panel(bias, panel, columns, low, high);
      store_panel(y + (ptrdiff_t)row * columns, panel, columns, low, high);
    });
  });
}

}  // namespace stepwire
