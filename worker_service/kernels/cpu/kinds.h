// One entry for each type of number, each compiled in a file of its own, at the same time as the others.
#pragma once

#include "api.h"
#include "pool.h"

namespace stepwire {

// A decoder's layers over a packed batch; see api.h.
class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual void forward(const SwBatch& batch, const int64_t* token_ids, float* hidden, int first, int last,
                       const SwHead* head) = 0;
  virtual void attention_half(const SwBatch& batch, int layer, const float* hidden, void* partial) = 0;
  virtual void mlp_half(const SwBatch& batch, int layer, const float* hidden, void* partial) = 0;
  virtual void time(int64_t* sums) = 0;
  virtual void add_branch(int layer, bool is_mlp, int num_tokens, float* hidden, const void* partial) = 0;
};

// A type's functions; see api.h.
struct Kind {
  Decoder* (*make_decoder)(Pool& pool, const SwModel& model);
  void (*linear)(Pool& pool, const void* x, int64_t rows, const void* weight, const float* bias, int depth, int columns,
                 void* y);
  void (*quantised_linear)(Pool& pool, const void* x, int64_t rows, const SwQuantised& weight, const float* bias,
                           int columns, void* y);
};

extern const Kind kFloat32, kBfloat16, kFloat16;

}  // namespace stepwire
