// What adapters add to the products of a layer: scaling * (x * A^T) * B^T, for the rows that have one.
// Methods that take a Pool are called inside of Pool::run, by all threads alike.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "plan.h"

namespace stepwire {

// A layer's modules, in the order of SwFactors.
enum Module { kQuery, kKey, kValue, kOutput, kGate, kUp, kDown, kModules };

// Accumulators of one element of x * A^T: each sums its own quarter of the columns, and they are added in
// one order, so that a row's values are the same whatever other rows there are.
constexpr int kQuarters = 4;
constexpr int kShrinkRows = 3;

// 16 columns of x * A^T for R rows; `steps` is a multiple of kQuarters.
template <class T, int R>
void shrink_rows(const T* x, ptrdiff_t stride, const T* a, int steps, T* to, ptrdiff_t to_stride) {
  using P = Product<T>;
  const int part = steps / kQuarters;
  Floats sum[R][kQuarters];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int q = 0; q < kQuarters; ++q) sum[r][q] = Floats{};
  for (int s = 0; s < part; ++s)
#pragma GCC unroll 4
    for (int q = 0; q < kQuarters; ++q) {
      const ptrdiff_t at = (ptrdiff_t)q * part + s;
      const typename P::Packed column = P::packed(a + at * kLanes * P::depth);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        sum[r][q] = P::add(sum[r][q], column, P::broadcast(x + r * stride + at * P::depth));
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    store(to + r * to_stride, (sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]));
}

// Where each module of a product ends in it, in vectors of 16 columns; 0 for one that is not there.
struct ProductEnds {
  int at[3];
};

// The changes of one product: those of one to three modules of a layer, side by side in its columns.
template <class T>
struct ProductDelta {
  const SwFactors* const* rows;  // by row of the chunk: its adapter's factors of all layers, or null
  Rows<const T> shrunk;          // x * A^T, `width` columns for each module
  int width, first;              // `first`: the product's first module among those of all layers
  ProductEnds ends;

  // Adds to 16 columns of a row; beyond the product's there is nothing to add.
  SW_INLINE void add(int row, int vector, Floats& sum) const {
    using P = Product<T>;
    if (!rows[row]) return;
    int module = 0, begin = 0;
    for (; vector >= ends.at[module]; ++module) {
      if (module == 2 || !ends.at[module + 1]) return;
      begin = ends.at[module];
    }
    const SwFactors& factors = rows[row][first + module];
    if (!factors.a) return;
    const int steps = factors.rank / P::depth;
    const T* b = static_cast<const T*>(factors.b) + (ptrdiff_t)(vector - begin) * factors.rank * kLanes;
    const T* x = shrunk[row] + module * width;
    Floats change = {};
    for (int s = 0; s < steps; ++s)
      change = P::add(change, P::packed(b + s * kLanes * P::depth), P::broadcast(x + s * P::depth));
    sum = fma(splat(factors.scaling), change, sum);
  }

  SW_INLINE void add_panel(int row, int panel, Floats& low, Floats& high) const {
    add(row, 2 * panel, low);
    add(row, 2 * panel + 1, high);
  }
};

// Of one call: which rows have which adapter, and working memory.
template <class T>
class Adapters {
 public:
  // Takes the batch's runs over; not inside of Pool::run.
  void take(const SwBatch& batch, int num_layers) {
    if (!batch.num_runs) return;
    rows_.assign(batch.num_tokens, nullptr);
    int most = 1;
    for (int i = 0; i < batch.num_runs; ++i) {
      const SwRun& run = batch.runs[i];
      std::fill_n(rows_.begin() + run.first, run.count, run.factors);
      for (int at = 0; at < num_layers * kModules; ++at)
        if (run.factors[at].a) most = std::max(most, run.factors[at].rank);
    }
    width_ = (most + kLanes - 1) / kLanes * kLanes;
    shrunk_.resize((size_t)kChunk * kMostModules * width_);
  }

  // x * A^T of a product's modules, for the chunk's rows that have an adapter; with a barrier at the end.
  ProductDelta<T> shrink(Pool& pool, const Chunk& chunk, int layer, Module module, const ProductEnds& ends,
                         Rows<const T> x, int depth) {
    const int first = layer * kModules + module, count = ends.at[2] ? 3 : ends.at[1] ? 2 : 1;
    const int blocks = width_ / kLanes, steps = depth / Product<T>::depth;
    const ptrdiff_t stride = kMostModules * width_;
    pool.split((int)chunk.pieces.size() * count * blocks, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        const Piece& piece = chunk.pieces[i / (count * blocks)];
        const int which = i / blocks % count, block = i % blocks;
        const SwFactors& factors = piece.factors[first + which];
        if (!factors.a || block * kLanes >= factors.rank) continue;
        const T* a = static_cast<const T*>(factors.a) + (ptrdiff_t)block * depth * kLanes;
        for_tiles<kShrinkRows>(piece.count, [&](int offset, auto height) {
          const int row = piece.first + offset;
          T* to = shrunk_.data() + row * stride + which * width_ + block * kLanes;
          shrink_rows<T, height>(x[row], x.stride, a, steps, to, stride);
        });
      }
    });
    return {rows_.data() + chunk.first, {shrunk_.data(), stride}, width_, first, ends};
  }

 private:
  static constexpr int kMostModules = 3;
  std::vector<const SwFactors*> rows_;
  std::vector<T> shrunk_;
  int width_ = 0;
};

}  // namespace stepwire
