#include "decoder.h"

namespace stepwire {

Decoder* make_decoder_f32(Pool& pool, const SwModel& model) { return new TypedDecoder<float>(pool, model); }

void linear_f32(Pool& pool, const void* x, int64_t rows, const void* weight, const float* bias, int depth,
                 int columns, void* y) {
  linear<float>(pool, static_cast<const float*>(x), rows, static_cast<const float*>(weight), bias, depth, columns,
                static_cast<float*>(y));
}

void quantised_linear_f32(Pool& pool, const void* x, int64_t rows, const SwQuantised& weight, const float* bias,
                          int columns, void* y) {
  quantised_linear<float>(pool, static_cast<const float*>(x), rows, weight, bias, columns, static_cast<float*>(y));
}

}  // namespace stepwire
