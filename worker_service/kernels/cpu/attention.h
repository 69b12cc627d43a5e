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

// Tokens [first, first + count) of the packed batch, all of one sequence, the first at `position`; what they attend to
// is left from row `to` on.
struct Span {
  int sequence, first, count, position, to;
};

inline int first_seen(const AttentionRule& rule, const Span& span) {
  return rule.window > 0 && span.position >= rule.window ? span.position - rule.window + 1 : 0;
}

// Vectors [first, last) of a group of positions: four of keys, and the rows of values that belong to them.
template <class E>
struct Group {
  const E *keys[4], *values[4];
  int first, last;
  int steps_of_last;  // of values; what follows in the last vector was never written

  // Of positions [begin, end) those of the group that starts at `start`. A vector that holds none of
  // them stands for another that does: reading it is harmless, and its scores are masked.
  template <class T>
  Group(const HeadCache<T, E>& cache, int start, int begin, int end) {
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

  // Of the same positions, at other places.
  template <class Other>
  explicit Group(const Group<Other>& other)
      : first(other.first), last(other.last), steps_of_last(other.steps_of_last) {}
};

// A group of a rounded cache with its codes as numbers of T, which hold them exactly, packed likewise. The
// scales multiply scores and weights, which are float32 until then.
template <class T>
struct OpenedGroup {
  std::vector<T> keys, values;
  float key_scales[kGroup], value_scales[kGroup];
  int head_dim = 0;

  void resize(int size) {
    head_dim = size;
    keys.resize((size_t)kGroup * size);
    values.resize((size_t)kGroup * size);
  }
  ptrdiff_t key_stride() const { return (ptrdiff_t)kGroup * Product<T>::depth; }
  ptrdiff_t value_stride() const { return (ptrdiff_t)head_dim * Product<T>::depth; }

  // Those of `group`, which starts at position `start`, while memory is asked for the next one's.
  Group<T> open(const HeadCache<T, int8_t>& cache, const Group<int8_t>& group, int start, const Group<int8_t>& next) {
    constexpr int depth = Product<T>::depth, width = kLanes * depth;
    for (int v = group.first; v < group.last; ++v) {
      T* to = keys.data() + v * width;
      for (int s = 0; s < head_dim / depth; ++s) {
        const int8_t* from = group.keys[v] + s * cache.key_stride();
        for (int i = 0; i < width; i += kLanes) store(to + s * key_stride() + i, load(from + i));
        ask(next.keys[v] + s * cache.key_stride());
      }
      to = values.data() + (ptrdiff_t)v * kLanes * head_dim;
      for (int i = 0; i < kLanes * head_dim; i += kLanes) store(to + i, load(group.values[v] + i));
      for (int i = 0; i < kLanes * head_dim; i += 64) ask(next.values[v] + i);
      memcpy(key_scales + v * kLanes, cache.key_scales(start + v * kLanes), sizeof(Floats));
      memcpy(value_scales + v * kLanes, cache.value_scales(start + v * kLanes), sizeof(Floats));
    }
    Group<T> opened(group);
    for (int v = 0; v < 4; ++v) {
      const int held = v >= group.first && v < group.last ? v : group.first;
      opened.keys[v] = keys.data() + held * width;
      opened.values[v] = values.data() + (ptrdiff_t)held * kLanes * head_dim;
    }
    return opened;
  }
};

// What one thread needs to attend; allocated once.
template <class T>
struct AttentionScratch {
  std::vector<float> scores, out, level;
  std::vector<Row<T>> queries, weights;
  std::vector<Floats, std::allocator<Floats>> total;
  OpenedGroup<T> opened;

  void resize(int rows, int head_dim, bool rounds_cache) {
    if (rounds_cache) opened.resize(head_dim);
    scores.resize((size_t)rows * kGroup);
    weights.resize((size_t)rows * kGroup);
    out.resize((size_t)rows * head_dim);
    queries.resize((size_t)rows * head_dim);
    level.resize(rows);
    total.resize(rows);
  }
};

// How far above what a row's weights are relative to, in powers of two, scores may lie before that is raised.
constexpr float kSlack = 8;

// Scores [kGroup] of one row become weights, of which those in [low, high) count, relative to `level`, about the row's
// maximum; total and output are brought to the same scale where that changes. `scales`, of a rounded cache, may be null.
template <class T>
__attribute__((noinline)) void update_row(const float* scores, int low, int high, const AttentionRule& rule,
                                          const OpenedGroup<T>* scales, float& level, Floats& total, float* out,
                                          Row<T>* weights) {
  if (low >= kGroup || high <= 0) {
    memset(static_cast<void*>(weights), 0, sizeof(Row<T>) * kGroup);
    return;
  }
  const Floats lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const bool whole = low <= 0 && high >= kGroup;
  const float first = low, end = high;
  // Powers of two are the cheaper ones.
  const float scale = rule.softcap > 0 ? kLog2E : rule.scale * kLog2E;
  Floats score[4], top = splat(-1e30f);
  for (int v = 0; v < 4; ++v) {
    score[v] = load(scores + v * kLanes);
    if (scales) score[v] *= load(scales->key_scales + v * kLanes);
    if (rule.softcap > 0) score[v] = cap(score[v] * rule.scale, rule.softcap);
    if (!whole) {
      Floats place = lanes + (float)(v * kLanes);
      score[v] = ((place >= first) & (place < end)) ? score[v] : splat(-1e30f);
    }
    top = max(top, score[v]);
  }
  if (any_above(top * scale, level + kSlack)) {
    const float now = max_lanes(top) * scale;
    const Floats factor = exp2(splat(level - now));
    level = now;
    total *= factor;
    for (int d = 0; d < rule.head_dim; d += kLanes) store(out + d, load(out + d) * factor);
  }
  for (int v = 0; v < 4; ++v) {
    Floats weight = exp2(fma(score[v], splat(scale), splat(-level)));
    if (!whole) {
      Floats place = lanes + (float)(v * kLanes);
      weight = ((place >= first) & (place < end)) ? weight : Floats{};
    }
    total += weight;
    // What lies behind the last position, as a scale too, may be no number.
    if (scales) weight = weight > 0 ? weight * load(scales->value_scales + v * kLanes) : Floats{};
    store(weights + v * kLanes, weight);
  }
}

// scores [rows, kGroup] = queries [rows, head_dim] * keys, while the next group's keys are asked for.
template <class T, class Cache>
void score_group(const Cache& cache, const Group<T>& group, const Group<T>& next, const Row<T>* queries,
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
template <class T, int V, class Cache>
void add_values(const Cache& cache, const Group<T>& group, const Group<T>& next, const Row<T>* weights,
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

// Takes one group of positions, from `start` on, into the output of a span.
template <class T, class Cache>
void attend_group(const AttentionRule& rule, const Span& span, int start, const Cache& cache, const Group<T>& group,
                  const Group<T>& next, const OpenedGroup<T>* scales, AttentionScratch<T>& scratch) {
  const int share = rule.num_heads / rule.num_kv_heads, rows = span.count * share, head_dim = rule.head_dim;
  score_group(cache, group, next, scratch.queries.data(), rows, scratch.scores.data());
  for (int row = 0; row < rows; ++row) {
    const int position = span.position + row / share;
    const int low = rule.window > 0 ? position - rule.window + 1 - start : 0;
    update_row<T>(&scratch.scores[row * kGroup], low, position + 1 - start, rule, scales, scratch.level[row],
               scratch.total[row], &scratch.out[(size_t)row * head_dim], &scratch.weights[row * kGroup]);
  }
  int dim = 0;
  for (; dim + 4 * kLanes <= head_dim; dim += 4 * kLanes)
    add_values<T, 4>(cache, group, next, scratch.weights.data(), rows, dim, scratch.out.data());
  for (; dim < head_dim; dim += kLanes)
    add_values<T, 1>(cache, group, next, scratch.weights.data(), rows, dim, scratch.out.data());
}

// Attends with scratch.queries [span.count * heads of the group, head_dim], rows of a token adjacent,
// and leaves the result in scratch.out, normalised. `after` is what this thread will read then: blocks
// lie scattered, which no processor foresees, so memory is asked for them one group ahead.
template <class T, class E>
void attend(const AttentionRule& rule, const Span& span, const HeadCache<T, E>& cache, const Group<E>& after,
            AttentionScratch<T>& scratch) {
  const int share = rule.num_heads / rule.num_kv_heads, rows = span.count * share, head_dim = rule.head_dim;
  const int begin = first_seen(rule, span), end = span.position + span.count;
  std::fill_n(scratch.out.begin(), (size_t)rows * head_dim, 0.0f);
  std::fill_n(scratch.level.begin(), rows, -1e30f);
  std::fill_n(scratch.total.begin(), rows, Floats{});
  Group<E> group(cache, begin / kGroup * kGroup, begin, end);
  for (int start = begin / kGroup * kGroup; start < end; start += kGroup) {
    const Group<E> next = start + kGroup < end ? Group<E>(cache, start + kGroup, begin, end) : after;
    if constexpr (HeadCache<T, E>::is_rounded) {
      const Group<T> opened = scratch.opened.open(cache, group, start, next);
      attend_group<T>(rule, span, start, scratch.opened, opened, opened, &scratch.opened, scratch);
    } else {
      attend_group<T>(rule, span, start, cache, group, next, nullptr, scratch);
    }
    group = next;
  }
  for (int row = 0; row < rows; ++row) {
    const float total = 1.0f / sum_lanes(scratch.total[row]);
    float* out = &scratch.out[(size_t)row * head_dim];
    for (int d = 0; d < head_dim; d += kLanes) store(out + d, load(out + d) * total);
  }
}

}  // namespace stepwire
