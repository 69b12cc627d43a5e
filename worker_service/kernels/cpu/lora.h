// What adapters add to the products of a layer: scaling * (x * A^T) * B^T, for the rows that have one.
// Methods that take a Thread are called inside of Pool::run, by all threads alike.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "plan.h"

namespace stepwire {

// A layer's modules, in the order of SwFactors.
enum Module { kQuery, kKey, kValue, kOutput, kGate, kUp, kDown, kModules };

// Accumulators of one element of x * A^T, which take its steps in turn, and of one of the product with B^T.
// They are added in one order, so that a row's values are the same whatever other rows there are.
constexpr int kShrinkChains = 4, kExpandChains = 2;
constexpr int kShrinkRows = 3;
// How many lines ahead A is asked for: what is read of A and B at once is too short for the processor to see what comes.
constexpr int kLinesAhead = 16;

// 16 columns of x * A^T for R rows; `steps` is a multiple of kShrinkChains. Asks for A where it `comes_first` to it.
template <class T, int R>
void shrink_rows(const Row<T>* x, ptrdiff_t stride, const T* a, int steps, Row<T>* to, ptrdiff_t to_stride, bool comes_first) {
  using P = Product<T>;
  Floats sum[R][kShrinkChains];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kShrinkChains; ++c) sum[r][c] = Floats{};
  for (int s = 0; s < steps; s += kShrinkChains)
#pragma GCC unroll 4
    for (int c = 0; c < kShrinkChains; ++c) {
      const T* column = a + (ptrdiff_t)(s + c) * kLanes * P::depth;
      if (comes_first) ask(reinterpret_cast<const char*>(column) + kLinesAhead * 64);
      const typename P::Packed values = P::packed(column);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        sum[r][c] = P::add(sum[r][c], values, P::broadcast(x + r * stride + (ptrdiff_t)(s + c) * P::depth));
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) store(to + r * to_stride, (sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]));
}

// Where each module of a product ends in it, in vectors of 16 columns; 0 for one that is not there.
struct ProductEnds {
  int at[3];
};

// The changes of one product: those of one to three modules of a layer, side by side in its columns.
template <class T>
struct ProductDelta {
  const SwFactors* const* rows;  // by row of the chunk: its adapter's factors of all layers, or null
  Rows<const Row<T>> shrunk;     // x * A^T, `width` columns for each module
  int width, first;              // `first`: the product's first module among those of all layers
  ProductEnds ends;

  // Adds to the columns of two neighbouring vectors of a row; beyond the product's there is nothing to add.
  SW_INLINE void add_panel(int row, int panel, Floats& low, Floats& high) const {
    if (!rows[row]) return;
    const Place place = find(2 * panel);
    if (place.module < 0) return;
    if (2 * panel + 1 < ends.at[place.module]) {
      Floats* const sums[2] = {&low, &high};
      expand<2>(row, place, sums);
    } else {
      add(row, 2 * panel, low);
      add(row, 2 * panel + 1, high);
    }
  }

  // To those of one.
  SW_INLINE void add(int row, int vector, Floats& sum) const {
    if (!rows[row]) return;
    const Place place = find(vector);
    Floats* const sums[1] = {&sum};
    if (place.module >= 0) expand<1>(row, place, sums);
  }

  // A vector of the product: its module, -1 beyond the last, and its place among that one's.
  struct Place {
    int module, vector;
  };

  SW_INLINE Place find(int vector) const {
    int module = 0, begin = 0;
    for (; vector >= ends.at[module]; ++module) {
      if (module == 2 || !ends.at[module + 1]) return {-1, 0};
      begin = ends.at[module];
    }
    return {module, vector - begin};
  }

  template <int V>
  SW_INLINE void expand(int row, Place place, Floats* const (&sums)[V]) const {
    using P = Product<T>;
    const SwFactors& factors = rows[row][first + place.module];
    if (!factors.a) return;
    const int steps = factors.rank / P::depth;
    const ptrdiff_t size = (ptrdiff_t)factors.rank * kLanes;
    const T* b = static_cast<const T*>(factors.b) + place.vector * size;
    const Row<T>* x = shrunk[row] + place.module * width;
    if (row == 0 || rows[row - 1] != rows[row])  // The first row with an adapter asks for what comes next, for all.
      for (ptrdiff_t at = V * size; at < 2 * V * size; at += 64 / (ptrdiff_t)sizeof(T)) ask(b + at);
    Floats change[V][kExpandChains] = {};
    for (int s = 0; s < steps; s += kExpandChains)
#pragma GCC unroll 2
      for (int c = 0; c < kExpandChains; ++c) {
        const typename P::Packed value = P::broadcast(x + (s + c) * P::depth);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          const T* column = b + v * size + (s + c) * kLanes * P::depth;
          change[v][c] = P::add(change[v][c], P::packed(column), value);
        }
      }
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
      *sums[v] = stepwire::fma(splat(factors.scaling), change[v][0] + change[v][1], *sums[v]);
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
  ProductDelta<T> shrink(Thread& thread, const Chunk& chunk, int layer, Module module, const ProductEnds& ends,
                         Rows<const Row<T>> x, int depth) {
    const int first = layer * kModules + module, count = ends.at[2] ? 3 : ends.at[1] ? 2 : 1;
    const int blocks = width_ / kLanes, steps = depth / Product<T>::depth;
    const ptrdiff_t stride = kMostModules * width_;
    thread.split((int)chunk.pieces.size() * count * blocks, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        const Piece& piece = chunk.pieces[i / (count * blocks)];
        const int which = i / blocks % count, block = i % blocks;
        const SwFactors& factors = piece.factors[first + which];
        if (!factors.a || block * kLanes >= factors.rank) continue;
        const T* a = static_cast<const T*>(factors.a) + (ptrdiff_t)block * depth * kLanes;
        for_tiles<kShrinkRows>(piece.count, [&](int offset, auto height) {
          const int row = piece.first + offset;
          Row<T>* to = shrunk_.data() + row * stride + which * width_ + block * kLanes;
          shrink_rows<T, height>(x[row], x.stride, a, steps, to, stride, offset == 0);
        });
      }
    });
    return {rows_.data() + chunk.first, {shrunk_.data(), stride}, width_, first, ends};
  }

 private:
  static constexpr int kMostModules = 3;
  std::vector<const SwFactors*> rows_;
  std::vector<Row<T>> shrunk_;
  int width_ = 0;
};

}  // namespace stepwire
