// Attention of a few queries of one sequence to all that they may see of one key-value head.
//
// Keys are taken in groups of 64 positions that start at multiples of 64, whatever the query, and a
// running softmax is brought up to date after each group. What a query gets depends on its position
// alone: not on how the prompt was cut, nor on the other queries of its tile.
#pragma once

#include <vector>

#include "cache.h"
#include "gemm.h"
#include "ops.h"

namespace stepwire {

constexpr int kGroup = 4 * kLanes;
// Rows of a tile that share what is read of the cache; four vectors by six rows fill the registers.
constexpr int kQueryRows = 48;
constexpr int kScoreRows = 6;

struct AttentionRule {
  int num_heads, num_kv_heads, head_dim;
  int window;  // positions that a query sees, itself among them; 0 for all
  float scale, softcap;
};

// Tokens [first, first + count) of the packed batch, all of one sequence, the first at `position`.
struct Span {
  int sequence, first, count, position;
};

inline int first_seen(const AttentionRule& rule, const Span& span) {
  return rule.window > 0 && span.position >= rule.window ? span.position - rule.window + 1 : 0;
}

// Vectors [first, last) of a group of positions: four of keys, and the rows of values that belong to them.
template <class T>
struct Group {
  const T *keys[4], *values[4];
  int first, last;
  int steps_of_last;  // of values; what follows in the last vector was never written

  // Of positions [begin, end) those of the group that starts at `start`. A vector that holds none of
  // them stands for another that does: reading it is harmless, and its scores are masked.
  Group(const HeadCache<T>& cache, int start, int begin, int end) {
    constexpr int depth = Product<T>::depth;
    const int seen = std::min(end - start, kGroup);
    first = begin > start ? (begin - start) / kLanes : 0;
    last = (seen + kLanes - 1) / kLanes;
    steps_of_last = (seen - (last - 1) * kLanes + depth - 1) / depth;
    for (int v = 0; v < 4; ++v) {
      const int position = start + (v >= first && v < last ? v : first) * kLanes;
      keys[v] = cache.keys(position);
      values[v] = cache.values(position);
    }
  }
};

// What one thread needs to attend; allocated once.
template <class T>
struct AttentionScratch {
  std::vector<float> scores, out, highest;
  std::vector<T> queries, weights;
  std::vector<Floats, std::allocator<Floats>> total;

  void resize(int rows, int head_dim) {
    scores.resize((size_t)rows * kGroup);
    weights.resize((size_t)rows * kGroup);
    out.resize((size_t)rows * head_dim);
    queries.resize((size_t)rows * head_dim);
    highest.resize(rows);
    total.resize(rows);
  }
};

// Scores [kGroup] of one row become weights, of which those in [low, high) count; the row's maximum,
// total and output are brought to the same scale.
template <class T>
__attribute__((noinline)) void update_row(const float* scores, int low, int high, const AttentionRule& rule,
                                          float& highest, Floats& total, float* out, T* weights) {
  if (low >= kGroup || high <= 0) {
    memset(static_cast<void*>(weights), 0, sizeof(T) * kGroup);
    return;
  }
  const Floats lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const bool whole = low <= 0 && high >= kGroup;
  const float first = low, end = high;
  // Powers of two are the cheaper ones.
  const float scale = rule.softcap > 0 ? rule.scale : rule.scale * kLog2E;
  Floats score[4], top = splat(-1e30f);
  for (int v = 0; v < 4; ++v) {
    score[v] = load(scores + v * kLanes) * scale;
    if (rule.softcap > 0) score[v] = cap(score[v], rule.softcap) * kLog2E;
    if (!whole) {
      Floats place = lanes + (float)(v * kLanes);
      score[v] = ((place >= first) & (place < end)) ? score[v] : splat(-1e30f);
    }
    top = max(top, score[v]);
  }
  const float before = highest, now = std::fmax(before, max_lanes(top));
  highest = now;
  if (now != before) {
    const Floats factor = exp2(splat(before - now));
    total *= factor;
    for (int d = 0; d < rule.head_dim; d += kLanes) store(out + d, load(out + d) * factor);
  }
  for (int v = 0; v < 4; ++v) {
    Floats weight = exp2(score[v] - now);
    if (!whole) {
      Floats place = lanes + (float)(v * kLanes);
      weight = ((place >= first) & (place < end)) ? weight : Floats{};
    }
    total += weight;
    store(weights + v * kLanes, weight);
  }
}

// scores [rows, kGroup] = queries [rows, head_dim] * keys, while the next group's keys are asked for.
template <class T>
void score_group(const HeadCache<T>& cache, const Group<T>& group, const Group<T>& next, const T* queries,
                 int num_rows, float* scores) {
  for_tiles<kScoreRows>(num_rows, [&](int offset, auto height) {
    constexpr int R = height;
    Tile<T, R, 4> tile;
    tile.clear();
    tile.add(queries + (ptrdiff_t)offset * cache.head_dim, cache.head_dim, group.keys, cache.key_stride(),
             cache.head_dim / Product<T>::depth, [&](int s) {
               if (offset > 0) return;
#pragma GCC unroll 4
               for (int v = 0; v < 4; ++v) ask(next.keys[v] + s * cache.key_stride());
             });
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) store(scores + (offset + r) * kGroup + v * kLanes, tile.sum[r][v]);
  });
}

// out [rows, head_dim] += weights [rows, kGroup] * values, of V vectors from `dim` on; likewise.
template <class T, int V>
void add_values(const HeadCache<T>& cache, const Group<T>& group, const Group<T>& next, const T* weights,
                int num_rows, int dim, float* out) {
  constexpr int depth = Product<T>::depth;
  for_tiles<kScoreRows>(num_rows, [&](int offset, auto height) {
    constexpr int R = height;
    Tile<T, R, V> tile;
    float* to = out + (ptrdiff_t)offset * cache.head_dim + dim;
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) tile.sum[r][v] = load(to + r * cache.head_dim + v * kLanes);
    for (int i = group.first; i < group.last; ++i) {
      const T* vectors[V];
      for (int v = 0; v < V; ++v) vectors[v] = group.values[i] + (dim + v * kLanes) * depth;
      const int steps = i + 1 < group.last ? kLanes / depth : group.steps_of_last;
      tile.add(weights + offset * kGroup + i * kLanes, kGroup, vectors, cache.value_stride(), steps, [&](int s) {
        if (offset > 0) return;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) ask(next.values[i] + s * cache.value_stride() + (dim + v * kLanes) * depth);
      });
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(to + r * cache.head_dim + v * kLanes, tile.sum[r][v]);
  });
}

// Attends with scratch.queries [span.count * heads of the group, head_dim], rows of a token adjacent,
// and leaves the result in scratch.out, normalised. `after` is what this thread will read then: blocks
// lie scattered, which no processor foresees, so memory is asked for them one group ahead.
template <class T>
void attend(const AttentionRule& rule, const Span& span, const HeadCache<T>& cache, const Group<T>& after,
            AttentionScratch<T>& scratch) {
  const int share = rule.num_heads / rule.num_kv_heads, rows = span.count * share, head_dim = rule.head_dim;
  const int begin = first_seen(rule, span), end = span.position + span.count;
  std::fill_n(scratch.out.begin(), (size_t)rows * head_dim, 0.0f);
  std::fill_n(scratch.highest.begin(), rows, -1e30f);
  std::fill_n(scratch.total.begin(), rows, Floats{});
  Group<T> group(cache, begin / kGroup * kGroup, begin, end);
  for (int start = begin / kGroup * kGroup; start < end; start += kGroup) {
    const Group<T> next = start + kGroup < end ? Group<T>(cache, start + kGroup, begin, end) : after;
    score_group(cache, group, next, scratch.queries.data(), rows, scratch.scores.data());
    for (int row = 0; row < rows; ++row) {
      const int position = span.position + row / share;
      const int low = rule.window > 0 ? position - rule.window + 1 - start : 0;
      update_row(&scratch.scores[row * kGroup], low, position + 1 - start, rule, scratch.highest[row],
                 scratch.total[row], &scratch.out[(size_t)row * head_dim], &scratch.weights[row * kGroup]);
    }
    int dim = 0;
    for (; dim + 4 * kLanes <= head_dim; dim += 4 * kLanes)
      add_values<T, 4>(cache, group, next, scratch.weights.data(), rows, dim, scratch.out.data());
    for (; dim < head_dim; dim += kLanes)
      add_values<T, 1>(cache, group, next, scratch.weights.data(), rows, dim, scratch.out.data());
    group = next;
  }
  for (int row = 0; row < rows; ++row) {
    const float total = 1.0f / sum_lanes(scratch.total[row]);
    float* out = &scratch.out[(size_t)row * head_dim];
    for (int d = 0; d < head_dim; d += kLanes) store(out + d, load(out + d) * total);
  }
}

}  // namespace stepwire
