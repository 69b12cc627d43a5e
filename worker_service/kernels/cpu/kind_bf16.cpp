#include "decoder.h"

namespace stepwire {

Decoder* make_decoder_bf16(Pool& pool, const SwModel& model) { return new TypedDecoder<bf16>(pool, model); }

void linear_bf16(Pool& pool, const void* x, int64_t rows, const void* weight, const float* bias, int depth,
                 int columns, void* y) {
  linear<bf16>(pool, static_cast<const bf16*>(x), rows, static_cast<const bf16*>(weight), bias, depth, columns,
               static_cast<bf16*>(y));
}

void quantised_linear_bf16(Pool& pool, const void* x, int64_t rows, const SwQuantised& weight, const float* bias,
                           int columns, void* y) {
  quantised_linear<bf16>(pool, static_cast<const bf16*>(x), rows, weight, bias, columns, static_cast<bf16*>(y));
}

}  // namespace stepwire
