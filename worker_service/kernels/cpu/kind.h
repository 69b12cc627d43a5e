// A type's functions, from the templates.
#pragma once

#include "decoder.h"

namespace stepwire {

template <class T>
constexpr Kind kind_of() {
  return {
      [](Pool& pool, const SwModel& model) -> Decoder* { return new TypedDecoder<T>(pool, model); },
      [](Pool& pool, const void* x, int64_t rows, const void* weight, const float* bias, int depth, int columns, void* y) {
        linear<T>(pool, static_cast<const T*>(x), rows, static_cast<const T*>(weight), bias, depth, columns,
                  static_cast<T*>(y));
      },
      [](Pool& pool, const void* x, int64_t rows, const SwQuantised& weight, const float* bias, int columns, void* y) {
        quantised_linear<T>(pool, static_cast<const T*>(x), rows, weight, bias, columns, static_cast<T*>(y));
      },
  };
}

}  // namespace stepwire
