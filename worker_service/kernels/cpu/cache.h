// Where keys and values lie. The cache is one buffer [blocks][layers][keys | values][kv heads][block], and
// a block is packed as the products take it: keys [head_dim / depth][positions][depth], so that a
// vector holds 16 positions, values [positions / depth][head_dim][depth].
#pragma once

#include <cstddef>
#include <cstdint>

#include "tile.h"

namespace stepwire {

struct CacheShape {
  int num_layers, num_kv_heads, head_dim, block_size;
};

// One layer's keys and values of one head, for one sequence.
template <class T>
struct HeadCache {
  T* base;  // keys of the head in block 0
  ptrdiff_t block_stride, value_offset;
  const int32_t* table;
  int block_size, head_dim;

  HeadCache(void* cache, const CacheShape& shape, int layer, int head, const int32_t* block_table)
      : table(block_table), block_size(shape.block_size), head_dim(shape.head_dim) {
    const ptrdiff_t size = (ptrdiff_t)shape.block_size * shape.head_dim;
    value_offset = shape.num_kv_heads * size;
    block_stride = shape.num_layers * 2 * value_offset;
    base = static_cast<T*>(cache) + layer * 2 * value_offset + head * size;
  }

  // The packed column of `position`, a multiple of 16: the next ones follow; steps are key_stride() apart.
  T* keys(int position) const { return block(position) + (position % block_size) * Product<T>::depth; }
  ptrdiff_t key_stride() const { return (ptrdiff_t)block_size * Product<T>::depth; }

  // The packed rows from `position` on, a multiple of 16; steps are value_stride() apart.
  T* values(int position) const {
    return block(position) + value_offset + (ptrdiff_t)(position % block_size) * head_dim;
  }
  ptrdiff_t value_stride() const { return (ptrdiff_t)head_dim * Product<T>::depth; }

  // Asks for the lines that `write` will touch: a key goes to as many as it has pairs.
  void ask_to_write(int position) const {
    const T* key = block(position) + (position % block_size) * Product<T>::depth;
    for (int d = 0; d < head_dim; d += Product<T>::depth) ask(key + d / Product<T>::depth * key_stride());
  }

  // Stores one position's key and value [head_dim]. Positions of a block are written in order, by one
  // thread: the first of a pair zeroes its partner, so that what a former owner of the block left
  // there, which may be no number, is never multiplied.
  void write(int position, const T* key, const T* value) const {
    constexpr int depth = Product<T>::depth;
    T* to_key = block(position) + (position % block_size) * depth;
    for (int d = 0; d < head_dim; d += depth) {
      memcpy(to_key, key + d, sizeof(T) * depth);
      to_key += key_stride();
    }
    const int within = position % block_size;
    T* to_value = block(position) + value_offset + (ptrdiff_t)(within / depth) * value_stride();
    if constexpr (depth == 1) {
      memcpy(to_value, value, sizeof(T) * head_dim);
    } else {
      uint32_t* pairs = reinterpret_cast<uint32_t*>(to_value);
      if (within % 2 == 0)
        for (int d = 0; d < head_dim; ++d) pairs[d] = value[d].bits;
      else
        for (int d = 0; d < head_dim; ++d) pairs[d] = (pairs[d] & 0xffffu) | ((uint32_t)value[d].bits << 16);
    }
  }

 private:
  T* block(int position) const { return base + table[position / block_size] * block_stride; }
};

}  // namespace stepwire
