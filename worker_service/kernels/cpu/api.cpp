#include "api.h"

#include <new>
#include <system_error>

#include "kinds.h"

using namespace stepwire;

namespace {

const Kind& kind_of(int32_t dtype) { return dtype == SW_F32 ? kFloat32 : dtype == SW_BF16 ? kBfloat16 : kFloat16; }

Decoder& decoder_of(void* decoder) { return *static_cast<Decoder*>(decoder); }

// No exception may leave a C function: it would end the process. A thread that cannot be had is a system_error.
template <class F>
auto made(F&& make) -> decltype(make()) {
  try {
    return make();
  } catch (const std::bad_alloc&) {
  } catch (const std::system_error&) {
  }
  return nullptr;
}

// Only the calling thread may allocate inside of `compute`, and not inside of Pool::run: the others would wait for it.
template <class F>
bool done(F&& compute) {
  try {
    compute();
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace

void* sw_pool_create(int32_t threads, int32_t spin_us, int32_t pin) {
  return made([&] { return new Pool(threads, spin_us, pin != 0); });
}

void sw_pool_destroy(void* pool) { delete static_cast<Pool*>(pool); }

bool sw_linear(void* pool, int32_t dtype, const void* x, int64_t rows, const void* weight, const float* bias,
               int32_t in, int32_t out, void* y) {
  return done([&] {
    kind_of(dtype).linear(*static_cast<Pool*>(pool), x, rows, weight, bias, in, out, y);
  });
}

bool sw_quantised_linear(void* pool, int32_t dtype, const void* x, int64_t rows, const SwQuantised* weight,
                         const float* bias, int32_t out, void* y) {
  return done([&] {
    kind_of(dtype).quantised_linear(*static_cast<Pool*>(pool), x, rows, *weight, bias, out, y);
  });
}

void* sw_decoder_create(void* pool, const SwModel* model) {
  return made([&] {
    Pool& threads = *static_cast<Pool*>(pool);
    return kind_of(model->dtype).make_decoder(threads, *model);
  });
}

void sw_decoder_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

void sw_decoder_time(void* decoder, int64_t* sums) { decoder_of(decoder).time(sums); }

bool sw_forward(void* decoder, const SwBatch* batch, const int64_t* token_ids, float* hidden, int32_t first,
                int32_t last, const SwHead* head) {
  return done([&] { decoder_of(decoder).forward(*batch, token_ids, hidden, first, last, head); });
}

bool sw_attention_half(void* decoder, const SwBatch* batch, int32_t layer, const float* hidden, void* partial) {
  return done([&] { decoder_of(decoder).attention_half(*batch, layer, hidden, partial); });
}

bool sw_mlp_half(void* decoder, const SwBatch* batch, int32_t layer, const float* hidden, void* partial) {
  return done([&] { decoder_of(decoder).mlp_half(*batch, layer, hidden, partial); });
}

bool sw_add_branch(void* decoder, int32_t layer, int32_t is_mlp, int32_t num_tokens, float* hidden,
                   const void* partial) {
  return done([&] { decoder_of(decoder).add_branch(layer, is_mlp != 0, num_tokens, hidden, partial); });
}
