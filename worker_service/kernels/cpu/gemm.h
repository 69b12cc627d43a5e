// y = x * W^T for a weight that was packed once: [columns / 32][k / depth][32][depth], see tile.h.
#pragma once

#include <algorithm>
#include <new>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "tile.h"

namespace stepwire {

constexpr int kPanel = 2 * kLanes;  // columns of W^T that are packed together

template <class T>
struct Rows {
  T* data;
  ptrdiff_t stride;
  T* operator[](ptrdiff_t row) const { return data + row * stride; }
};

// Space between rows such that the same place of many rows does not fall into one set of the cache.
inline ptrdiff_t padded(ptrdiff_t size) { return ((size + 31) / 32 | 1) * 32; }

// Rows of working memory.
template <class T>
struct Buffer {
  Buffer(int rows, int columns) : stride(padded(columns)), data(new (std::align_val_t(64)) T[rows * stride]()) {}
  ~Buffer() { ::operator delete[](data, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Rows<T> rows() const { return {data, stride}; }
  Rows<const T> read() const { return {data, stride}; }
  const ptrdiff_t stride;
  T* const data;
};

// Twelve rows and one panel need 24 accumulators; two registers of columns and one of a row remain.
constexpr int kTileRows = 12;
// Rows of x that a panel goes over while it is in the cache; few enough that these are there as well.
constexpr int kRowsAtOnce = 256;

// How far ahead a tile asks memory for its own panel, and from how many rows on: with fewer there is
// little to do but to read, and the processor keeps up best by itself.
constexpr int kAheadBytes = 8192;
constexpr int kAheadRows = 5;

// sums[r] = the 32 columns of row r. Not inlined: there are twelve heights and many callers, and a tile
// costs far more than to store and load its sums. Each step asks for so many lines at `ahead`.
template <class T, int R, int Lines>
__attribute__((noinline)) void multiply_panel(const Row<T>* x, ptrdiff_t stride, const T* panel, int steps,
                                              const char* ahead, float (*sums)[kPanel]) {
  const T* const vectors[2] = {panel, panel + kLanes * Product<T>::depth};
  Tile<T, R, 2> tile;
  tile.clear();
  tile.add(x, stride, vectors, kPanel * Product<T>::depth, steps, [&](int s) {
    for (int line = 0; line < Lines; ++line) ask(ahead + (s * Lines + line) * 64);
  });
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store(sums[r], tile.sum[r][0]);
    store(sums[r] + kLanes, tile.sum[r][1]);
  }
}

// A phase: calls part(panel, first, count) for each panel with all rows, some at a time.
template <class Part>
void for_panels(Thread& thread, int num_rows, int num_panels, Part&& part) {
  const int row_blocks = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
  thread.split(row_blocks * num_panels, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const int block = i / num_panels;
      const int first = (int)((int64_t)num_rows * block / row_blocks);
      part(i % num_panels, first, (int)((int64_t)num_rows * (block + 1) / row_blocks) - first);
    }
  });
}

// A phase: calls done(row, panel, low, high) once for each row and panel: its sums of 16 + 16 columns.
template <class T, class Done>
void gemm(Thread& thread, Rows<const Row<T>> x, int num_rows, const T* weight, int depth, int num_panels, Done&& done) {
  const int steps = depth / Product<T>::depth;
  for_panels(thread, num_rows, num_panels, [&](int panel, int first, int count) {
    alignas(64) float sums[kTileRows][kPanel];
    const T* columns = weight + (ptrdiff_t)panel * depth * kPanel;
    int tiles = 0;
    for_tiles<kTileRows>(count, [&](int offset, auto height) {
      const int row = first + offset;
      // A step reads two lines of its panel. Where a panel serves several tiles, memory can rest while
      // the later ones are computed; so the first two fetch the next panel, a line each step.
      const char* here = reinterpret_cast<const char*>(columns);
      if (count <= kTileRows) {
        multiply_panel<T, height, (height < kAheadRows ? 0 : 2)>(x[row], x.stride, columns, steps,
                                                                 here + kAheadBytes, sums);
      } else if (tiles++ < 2) {
        multiply_panel<T, height, 1>(x[row], x.stride, columns, steps, here + (steps * tiles + steps) * 64, sums);
      } else {
        multiply_panel<T, height, 0>(x[row], x.stride, columns, steps, here, sums);
      }
      for (int r = 0; r < height; ++r) done(row + r, panel, load(sums[r]), load(sums[r] + kLanes));
    });
  });
}

inline int panels(int columns) { return (columns + kPanel - 1) / kPanel; }

// Adds one panel's columns of a row of `size`, such as a bias; a null row adds nothing.
template <class U>
SW_INLINE void add_panel(const U* row, int panel, int size, Floats& low, Floats& high) {
  if (!row) return;
  low += load_part(row, panel * kPanel, size);
  high += load_part(row, panel * kPanel + kLanes, size);
}

// Writes up to 32 columns of one row, rounded to U, the last panel's surplus left out.
template <class U>
SW_INLINE void store_panel(U* row, int panel, int num_columns, Floats low, Floats high) {
  U* to = row + panel * kPanel;
  int left = num_columns - panel * kPanel;
  if (left >= kPanel) {
    store(to, low);
    store(to + kLanes, high);
  } else if (left > kLanes) {
    store(to, low);
    store_part(to + kLanes, high, left - kLanes);
  } else {
    store_part(to, low, left);
  }
}

// Rows x [count, depth], without space between them, as products read them.
template <class T>
class InputRows {
 public:
  InputRows(const T* x, int64_t count, int depth) {
    if constexpr (std::is_same_v<T, Row<T>>) {
      rows = {x, depth};
    } else {
      const int64_t size = count * depth;
      converted_.resize(size);
      for (int64_t i = 0; i < size; i += kLanes)
        store_part(&converted_[i], load_part(x, i, size), std::min<int64_t>(kLanes, size - i));
      rows = {converted_.data(), depth};
    }
  }

  Rows<const Row<T>> rows;

 private:
  std::vector<Row<T>> converted_;
};

// The plain product, y = x * W^T + bias; x and y without space between rows.
template <class T>
void linear(Pool& pool, const T* x, int64_t rows, const T* weight, const float* bias, int depth, int columns, T* y) {
  const InputRows<T> from(x, rows, depth);
  pool.run([&](Thread& thread) {
    gemm<T>(thread, from.rows, (int)rows, weight, depth, panels(columns),
         [&](int row, int panel, Floats low, Floats high) {
           add_panel(bias, panel, columns, low, high);
           store_panel(y + (ptrdiff_t)row * columns, panel, columns, low, high);
         });
  });
}

}  // namespace stepwire
