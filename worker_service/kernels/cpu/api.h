// The C interface: what worker_service/kernels/abi.py mirrors with ctypes. Nothing is checked here;
// the binding checks types, shapes and positions, the runtime checks block ids.
// What cannot be had for want of memory, or of threads, is null; a call that computes answers false.
#pragma once

#include <cstdint>

extern "C" {

// How the inputs of a quantised product are rounded before it.
enum { SW_ROUND_NOTHING, SW_ROUND_GROUPS };
// Types of numbers.
enum { SW_F32, SW_BF16, SW_F16 };

// What a decoder's time goes to; of attention, the writing of keys and values apart.
enum {
  SW_EMBED,
  SW_NORMS,
  SW_QKV,
  SW_WRITE_KV,
  SW_ATTENTION,
  SW_O_PROJ,
  SW_GATE_UP,
  SW_DOWN,
  SW_HEAD,
  SW_NUM_OPERATORS
};

// A weight [out, depth] of few bits a value: scale * (word - zero) + minimum. Its inputs stand in `order`, in groups of
// equal size, and are filled up so that groups are whole spans, of which one after the other is computed.
struct SwQuantised {
  const uint8_t* words;  // 8 bits: [panels][inputs / 4][32 columns][4]; 4 bits: [panels][inputs / 8][32][4], the first
                         // four of eight inputs in the low halves
  const void* scales;    // [panels][groups / groups_of_scale][32]
  const void* minima;    // likewise; null where all are 0
  // By which a group's scale, and its minimum, is multiplied: [panels][groups][32]; null for 1.
  const int8_t *factors, *minimum_factors;
  const uint8_t* zeros;  // likewise; null where all are `zero`
  const int32_t* order;  // [inputs] which input stands at each place, below 0 for none; null where each in its own
  int32_t bits, inputs, depth, groups, groups_of_scale, span, zero, scale_type;
  int32_t rounding, rounding_group;  // to int8: the group is a multiple of the span
};

struct SwLayer {
  const void *qkv, *output, *gate_up, *down;  // packed, see gemm.h; of gate_up, 16 rows of each alternate
  // Each in place of the one above that is null then; the rows likewise.
  const SwQuantised *quantised_qkv, *quantised_output, *quantised_gate_up, *quantised_down;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
  // Null where a family has none. The post norms act on a branch before it joins the residual.
  const float *input_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm, *query_norm, *key_norm;
  const float *cos, *sin;  // [positions, rotary_half]
  int32_t window;          // positions seen, the query's own among them; 0 for all
  int32_t rotary_half;
};

struct SwModel {
  int32_t dtype;
  int32_t hidden_size, num_heads, num_kv_heads, head_dim, inner_size, num_layers, vocab_size;
  int32_t is_gelu;            // else SiLU
  int32_t norm_whole;         // query and key norms over the whole projection, not each head
  int32_t block_size;
  int32_t rounds_cache;  // keys and values to int8, with a scale for each head of each position
  float eps, scale, softcap, embedding_scale, logit_softcap;
  const SwLayer* layers;
  const void* embedding;   // [vocab_size, hidden_size], not packed; null beyond the first stage
  const SwQuantised* quantised_embedding;  // in place of it
  const float* final_norm;  // null before the last stage, as is head
  const void* head;
  const SwQuantised* quantised_head;  // in place of it
  void* cache;
};

// What an adapter adds to one module of a layer; `a` is null where it adds nothing.
struct SwFactors {
  const void* a;  // [ceil(rank / 16)][in / depth][16][depth]
  const void* b;  // [ceil(out / 16)][rank / depth][16][depth]
  int32_t rank;   // a multiple of 2 * depth
  float scaling;
};

// Tokens [first, first + count) of a batch that have one adapter.
struct SwRun {
  const SwFactors* factors;  // [num_layers][7]: query, key, value, output, gate, up, down
  int32_t first, count;
};

// The new tokens of all sequences, one after the other.
struct SwBatch {
  int32_t num_sequences, num_tokens;
  const int32_t* query_start;  // [num_sequences + 1]
  const int32_t* computed;     // [num_sequences] positions that are in the cache already
  const int32_t* tables;       // [num_sequences, table_stride] block ids
  int64_t table_stride;
  const SwRun* runs;  // [num_runs], which do not overlap; other tokens have no adapter
  int32_t num_runs;
  // Rows of hidden that are wanted after the last layer of a call, in rising order: they are left in its first
  // `num_wanted` rows, and nothing is of use in the others. Null for all, where they are; null when there are runs.
  const int64_t* wanted;
  int64_t num_wanted;
};

// What to do with chosen rows: logits, or the largest one's index; null what is not wanted.
struct SwHead {
  const int64_t* rows;  // [num_rows] of hidden; null for the first ones
  int64_t num_rows;
  float* logits;        // [num_rows, vocab_size]
  int64_t* token_ids;   // [num_rows]
  uint8_t* finite;      // [num_rows] whether all its logits are
};

void* sw_pool_create(int32_t threads, int32_t spin_us, int32_t pin);
void sw_pool_destroy(void* pool);

// Collectives of ranks on one machine over memory that all map, see shared.h: rank 0's file holds `sw_shared_bytes`.
// To open answers null where it cannot be mapped. The others answer 0, or what became of another rank: 1 it has left,
// 2 its process has ended, 3 it did not come in time.
int64_t sw_shared_bytes(int32_t size, int64_t part_bytes);
void* sw_shared_open(int32_t file, int32_t rank, int32_t size, int64_t part_bytes, const int32_t* processes,
                     int32_t spin_us, int64_t timeout_ms);
void sw_shared_close(void* shared);
int32_t sw_shared_sum(void* shared, int32_t dtype, void* values, int64_t count);
int32_t sw_shared_gather(void* shared, const void* mine, int64_t bytes, void* all);
int32_t sw_shared_broadcast(void* shared, void* values, int64_t bytes);

bool sw_linear(void* pool, int32_t dtype, const void* x, int64_t rows, const void* weight, const float* bias,
               int32_t in, int32_t out, void* y);

bool sw_quantised_linear(void* pool, int32_t dtype, const void* x, int64_t rows, const SwQuantised* weight,
                         const float* bias, int32_t out, void* y);

void* sw_decoder_create(void* pool, const SwModel* model);
void sw_decoder_destroy(void* decoder);

// From now on each call adds the nanoseconds of its operators to sums[SW_NUM_OPERATORS]; null ends that.
void sw_decoder_time(void* decoder, int64_t* sums);

// Token ids, layers [first, last) and head in one call; ids, or the head, may be null to leave them out. Hidden states
// [tokens, hidden_size] are float32 whatever the weights are, so that what many layers add to them is not lost.
bool sw_forward(void* decoder, const SwBatch* batch, const int64_t* token_ids, float* hidden, int32_t first,
                int32_t last, const SwHead* head);

// One branch of a layer without its residual, into `partial` [tokens, hidden_size], and its joining.
bool sw_attention_half(void* decoder, const SwBatch* batch, int32_t layer, const float* hidden, void* partial);
bool sw_mlp_half(void* decoder, const SwBatch* batch, int32_t layer, const float* hidden, void* partial);
bool sw_add_branch(void* decoder, int32_t layer, int32_t is_mlp, int32_t num_tokens, float* hidden,
                   const void* partial);
}
