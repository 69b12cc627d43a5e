// Where keys and values lie. The cache is one buffer [blocks][layers][keys | values][kv heads][block], and
// a block is packed as the products take it: keys [head_dim / depth][positions][depth], so that a
// vector holds 16 positions, values [positions / depth][head_dim][depth]. Elements are numbers of the
// model's type, or int8 codes: then scales, float [positions], are behind them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ops.h"
#include "tile.h"

namespace stepwire {

struct CacheShape {
  int num_layers, num_kv_heads, head_dim, block_size;
};

// codes [size] = x over the scale that is answered, of which the largest is 127 long; size is a multiple of 16.
template <class T>
inline float round_to_codes(const T* x, int size, int8_t* codes) {
  Floats top{};
  for (int i = 0; i < size; i += kLanes) {
    const Floats value = load(x + i);
    top = max(top, value < 0 ? -value : value);
  }
  const float scale = max_lanes(top) / 127.0f;
  const Floats divisor = splat(scale > 0 ? scale : 1.0f), magic = splat(12582912.0f);
  for (int i = 0; i < size; i += kLanes) {
    const Floats whole = (load(x + i) / divisor + magic) - magic;  // as exp2 does, see vec.h
    const auto narrow = __builtin_convertvector(__builtin_convertvector(whole, Ints), Codes);
    memcpy(codes + i, &narrow, sizeof narrow);
  }
  return scale;
}

// One layer's keys and values of one head, for one sequence, in elements of type E.
template <class T, class E = T>
struct HeadCache {
  static constexpr bool is_rounded = !std::is_same_v<T, E>;

  E* base;  // keys of the head in block 0
  ptrdiff_t block_stride, value_offset;
  const int32_t* table;
  int block_size, head_dim;

  HeadCache(void* cache, const CacheShape& shape, int layer, int head, const int32_t* block_table)
      : table(block_table), block_size(shape.block_size), head_dim(shape.head_dim) {
    const ptrdiff_t size = (ptrdiff_t)shape.block_size * (shape.head_dim + (is_rounded ? sizeof(float) : 0));
    value_offset = shape.num_kv_heads * size;
    block_stride = shape.num_layers * 2 * value_offset;
    base = static_cast<E*>(cache) + layer * 2 * value_offset + head * size;
  }

  // The packed column of `position`, a multiple of 16: the next ones follow; steps are key_stride() apart.
  E* keys(int position) const { return block(position) + (position % block_size) * Product<T>::depth; }
  ptrdiff_t key_stride() const { return (ptrdiff_t)block_size * Product<T>::depth; }

  // The packed rows from `position` on, a multiple of 16; steps are value_stride() apart.
  E* values(int position) const {
    return block(position) + value_offset + (ptrdiff_t)(position % block_size) * head_dim;
  }
  ptrdiff_t value_stride() const { return (ptrdiff_t)head_dim * Product<T>::depth; }

  // The scales from `position` on, of a rounded cache.
  float* key_scales(int position) const { return scales(block(position)) + position % block_size; }
  float* value_scales(int position) const { return scales(block(position) + value_offset) + position % block_size; }

  // Asks for the lines that `write` will touch: a key goes to as many as it has pairs.
  void ask_to_write(int position) const {
    const E* key = block(position) + (position % block_size) * Product<T>::depth;
    for (int d = 0; d < head_dim; d += Product<T>::depth) ask(key + d / Product<T>::depth * key_stride());
  }

  // Stores one position's key and value [head_dim]. Positions of a block are written in order, by one
  // thread: the first of a pair zeroes its partner, so that what a former owner of the block left
  // there, which may be no number, is never multiplied.
  void write(int position, const Row<T>* key, const Row<T>* value) const {
    if constexpr (is_rounded) {
      alignas(64) int8_t codes[2][kMostHeadDim];
      *key_scales(position) = round_to_codes(key, head_dim, codes[0]);
      *value_scales(position) = round_to_codes(value, head_dim, codes[1]);
      write_elements(position, codes[0], codes[1]);
    } else if constexpr (std::is_same_v<E, Row<T>>) {
      write_elements(position, key, value);
    } else {
      alignas(64) E elements[2][kMostHeadDim];
      for (int d = 0; d < head_dim; d += kLanes) {
        store(elements[0] + d, load(key + d));
        store(elements[1] + d, load(value + d));
      }
      write_elements(position, elements[0], elements[1]);
    }
  }

 private:
  void write_elements(int position, const E* key, const E* value) const {
    constexpr int depth = Product<T>::depth;
    E* to_key = block(position) + (position % block_size) * depth;
    for (int d = 0; d < head_dim; d += depth) {
      memcpy(to_key, key + d, sizeof(E) * depth);
      to_key += key_stride();
    }
    const int within = position % block_size;
    E* to_value = block(position) + value_offset + (ptrdiff_t)(within / depth) * value_stride();
    if constexpr (depth == 1) {
      memcpy(to_value, value, sizeof(E) * head_dim);
    } else if constexpr (is_rounded) {
      for (int d = 0; d < head_dim; ++d) {
        to_value[2 * d + within % 2] = value[d];
        if (within % 2 == 0) to_value[2 * d + 1] = 0;
      }
    } else {
      uint32_t* pairs = reinterpret_cast<uint32_t*>(to_value);
      if (within % 2 == 0)
        for (int d = 0; d < head_dim; ++d) pairs[d] = value[d].bits;
      else
        for (int d = 0; d < head_dim; ++d) pairs[d] = (pairs[d] & 0xffffu) | ((uint32_t)value[d].bits << 16);
    }
  }

  // Of the keys or values of one block.
  float* scales(E* elements) const {
    return reinterpret_cast<float*>(elements + (ptrdiff_t)block_size * head_dim);
  }

  E* block(int position) const { return base + table[position / block_size] * block_stride; }
};

}  // namespace stepwire
