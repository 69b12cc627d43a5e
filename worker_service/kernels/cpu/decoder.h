// A decoder's layers over a packed batch. Methods that take a Thread are called inside of Pool::run, by all
// threads alike.
#pragma once

#include <optional>

#include "best.h"
#include "clock.h"
#include "kinds.h"
#include "lora.h"
#include "plan.h"
#include "quantised.h"

namespace stepwire {

// Up to so many rows each thread normalises all of them for itself.
constexpr int kOwnRows = 64;

template <class T>
class TypedDecoder final : public Decoder {
 public:
  TypedDecoder(Pool& pool, const SwModel& model)
      : pool_(pool),
        model_(model),
        layers_(model.layers, model.layers + model.num_layers),
        heads_per_group_(model.num_heads / model.num_kv_heads),
        num_qkv_((model.num_heads + 2 * model.num_kv_heads) * model.head_dim),
        num_attended_(model.num_heads * model.head_dim),
        normed_(kChunk + kOwnRows * pool.size(), model.hidden_size),
        qkv_(kChunk, num_qkv_),
        attended_(kChunk, num_attended_),
        inner_(kChunk, model.inner_size),
        branch_(kChunk, model.hidden_size),
        digits_(pool.size(), kChunk, quantised_weights(model)),
        scratch_(pool.size()),
        unpacked_(model.quantised_embedding ? (size_t)pool.size() * model.hidden_size : 0) {
    const int rows = std::max(kQueryRows / heads_per_group_, 1) * heads_per_group_;
    for (auto& scratch : scratch_) scratch.resize(rows, model.head_dim, model.rounds_cache != 0);
  }

  void forward(const SwBatch& batch, const int64_t* token_ids, float* hidden, int first, int last,
               const SwHead* head) override {
    std::vector<Chunk> chunks;
    if (first < last) chunks = plan_chunks(batch, model_.block_size, heads_per_group_);
    adapters_.take(batch, model_.num_layers);
    if (head) best_.assign((size_t)pool_.size() * (head->token_ids ? head->num_rows : 0), Best{});
    pool_.run([&](Thread& thread) {
      clock_.start(thread.number);
      if (token_ids) {
        embed(thread, token_ids, batch.num_tokens, hidden);
        clock_.took(thread.number, SW_EMBED);
      }
      for (int layer = first; layer < last; ++layer)
        for (const Chunk& chunk : chunks) {
          if (batch.wanted && layer + 1 == last) {
            layer_of_wanted(thread, batch, chunk, layer, hidden);
            continue;
          }
          float* part = hidden + (ptrdiff_t)chunk.first * model_.hidden_size;
          attention(thread, batch, chunk, layer, part, nullptr);
          mlp(thread, layer, chunk, part, nullptr);
        }
      if (head) classify(thread, hidden, *head);
    });
  }

  void attention_half(const SwBatch& batch, int layer, const float* hidden, void* partial) override {
    const auto chunks = plan_chunks(batch, model_.block_size, heads_per_group_);
    adapters_.take(batch, model_.num_layers);
    pool_.run([&](Thread& thread) {
      clock_.start(thread.number);
      for (const Chunk& chunk : chunks) {
        const ptrdiff_t offset = (ptrdiff_t)chunk.first * model_.hidden_size;
        // Only read when there is a partial.
        float* rows = const_cast<float*>(hidden) + offset;
        attention(thread, batch, chunk, layer, rows, static_cast<T*>(partial) + offset);
      }
    });
  }

  void mlp_half(const SwBatch& batch, int layer, const float* hidden, void* partial) override {
    std::vector<Chunk> chunks;
    for (int first = 0; first < batch.num_tokens; first += kChunk) {
      const int count = std::min(kChunk, batch.num_tokens - first);
      chunks.push_back({first, count, {}, {}, plan_pieces(batch, first, count)});
    }
    adapters_.take(batch, model_.num_layers);
    pool_.run([&](Thread& thread) {
      clock_.start(thread.number);
      for (const Chunk& chunk : chunks) {
        const ptrdiff_t offset = (ptrdiff_t)chunk.first * model_.hidden_size;
        float* rows = const_cast<float*>(hidden) + offset;
        mlp(thread, layer, chunk, rows, static_cast<T*>(partial) + offset);
      }
    });
  }

  void add_branch(int layer, bool is_mlp, int num_tokens, float* hidden, const void* partial) override {
    const float* weight = is_mlp ? layers_[layer].post_mlp_norm : layers_[layer].post_attention_norm;
    pool_.run([&](Thread& thread) {
      clock_.start(thread.number);
      join(thread, num_tokens, {hidden, model_.hidden_size},
           Rows<const T>{static_cast<const T*>(partial), model_.hidden_size}, weight);
    });
  }

  void time(int64_t* sums) override { clock_.set(sums); }

 private:
  using Value = Row<T>;  // of what products read
  using Delta = std::optional<ProductDelta<T>>;

  void embed(Thread& thread, const int64_t* token_ids, int num_tokens, float* hidden) {
    const int size = model_.hidden_size;
    if (model_.quantised_embedding) return embed_quantised(thread, token_ids, num_tokens, hidden);
    thread.split(num_tokens, [&](int begin, int end) {
      for (int token = begin; token < end; ++token) {
        const T* from = static_cast<const T*>(model_.embedding) + token_ids[token] * size;
        for (int i = 0; i < size; i += kLanes)
          store(hidden + (ptrdiff_t)token * size + i, load(from + i) * model_.embedding_scale);
      }
    });
  }

  void embed_quantised(Thread& thread, const int64_t* token_ids, int num_tokens, float* hidden) {
    const int size = model_.hidden_size;
    float* row = unpacked_.data() + (ptrdiff_t)thread.number * size;
    thread.split(num_tokens, [&](int begin, int end) {
      for (int token = begin; token < end; ++token) {
        unpack_row(*model_.quantised_embedding, token_ids[token], row);
        for (int i = 0; i < size; i += kLanes)
          store(hidden + (ptrdiff_t)token * size + i, load(row + i) * model_.embedding_scale);
      }
    });
  }

  static std::vector<const SwQuantised*> quantised_weights(const SwModel& model) {
    std::vector<const SwQuantised*> found{model.quantised_head};
    for (int i = 0; i < model.num_layers; ++i) {
      const SwLayer& layer = model.layers[i];
      found.insert(found.end(), {layer.quantised_qkv, layer.quantised_output, layer.quantised_gate_up,
                                 layer.quantised_down});
    }
    return found;
  }

  // A product with whichever of the two weights there is; as gemm.
  template <class Done>
  void multiply(Thread& thread, Rows<const Value> x, int count, const void* plain, const SwQuantised* quantised,
                int depth, int num_panels, Done&& done) {
    if (!quantised) return gemm<T>(thread, x, count, static_cast<const T*>(plain), depth, num_panels, done);
    quantised_gemm(thread, digits_.take(thread, x, count, *quantised), count, *quantised, num_panels, done);
  }

  // The attention branch of a chunk's tokens: joined to `hidden`, or left in `partial` when that is given.
  void attention(Thread& thread, const SwBatch& batch, const Chunk& chunk, int number, float* hidden, T* partial) {
    project_heads(thread, chunk, number, hidden);
    attend_chunk(thread, batch, chunk, chunk.queries, number);
    project_attended(thread, chunk, number, hidden, partial);
  }

  // Both branches of a chunk's tokens, of which the ones that are wanted are left, one after the other, at their place
  // in the batch's `hidden`.
  void layer_of_wanted(Thread& thread, const SwBatch& batch, const Chunk& chunk, int number, float* hidden) {
    const ptrdiff_t size = model_.hidden_size;
    project_heads(thread, chunk, number, hidden + chunk.first * size);
    attend_chunk(thread, batch, chunk, chunk.wanted_queries, number);
    float* const to = hidden + chunk.first_wanted * size;
    thread.split(chunk.wanted.empty() ? 0 : 1, [&](int, int) {
      for (size_t i = 0; i < chunk.wanted.size(); ++i)
        memmove(to + i * size, hidden + (chunk.first + chunk.wanted[i]) * size, sizeof(float) * size);
    });
    const Chunk wanted{chunk.first_wanted, (int)chunk.wanted.size()};
    project_attended(thread, wanted, number, to, nullptr);
    mlp(thread, number, wanted, to, nullptr);
  }

  // Queries, keys and values of a chunk's tokens.
  void project_heads(Thread& thread, const Chunk& chunk, int number, const float* hidden) {
    const SwLayer& layer = layers_[number];
    const Rows<const Value> normed = normalise(thread, chunk.count, hidden, layer.input_norm);
    const Rows<Value> qkv = qkv_.rows();
    const int queries = num_attended_ / kLanes, keys = (num_qkv_ - num_attended_) / 2 / kLanes;
    const Delta delta =
        shrink(thread, chunk, number, kQuery, {queries, queries + keys, queries + 2 * keys}, normed, model_.hidden_size);
    multiply(thread, normed, chunk.count, layer.qkv, layer.quantised_qkv, model_.hidden_size, panels(num_qkv_),
             [&](int row, int panel, Floats low, Floats high) {
               add_panel(layer.qkv_bias, panel, num_qkv_, low, high);
               if (delta) delta->add_panel(row, panel, low, high);
               store_panel(qkv[row], panel, num_qkv_, low, high);
             });
    clock_.took(thread.number, SW_QKV);
  }

  // Puts a chunk's keys and values into the cache, and lets some of its queries attend.
  void attend_chunk(Thread& thread, const SwBatch& batch, const Chunk& chunk, const std::vector<Span>& queries,
                    int number) {
    model_.rounds_cache ? attend_in<int8_t>(thread, batch, chunk, queries, number)
                        : attend_in<T>(thread, batch, chunk, queries, number);
  }

  // In a cache of elements of type E.
  template <class E>
  void attend_in(Thread& thread, const SwBatch& batch, const Chunk& chunk, const std::vector<Span>& queries,
                 int number) {
    const SwLayer& layer = layers_[number];
    const CacheShape shape{model_.num_layers, model_.num_kv_heads, model_.head_dim, model_.block_size};
    auto cache_of = [&](const Span& span, int head) {
      return HeadCache<T, E>(model_.cache, shape, number, head, batch.tables + span.sequence * batch.table_stride);
    };
    const int kv_heads = model_.num_kv_heads;
    thread.split((int)chunk.writes.size() * kv_heads, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        const Span& span = chunk.writes[i / kv_heads];
        if (i + 1 < end) {
          const Span& next = chunk.writes[(i + 1) / kv_heads];
          cache_of(next, (i + 1) % kv_heads).ask_to_write(next.position);
        }
        write_keys(layer, span, i % kv_heads, cache_of(span, i % kv_heads));
      }
    });
    clock_.took(thread.number, SW_WRITE_KV);
    const AttentionRule rule{model_.num_heads, kv_heads, model_.head_dim, layer.window, model_.scale, model_.softcap};
    const int tasks = (int)queries.size() * kv_heads;
    auto attend_some = [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        const Span& span = queries[i / kv_heads];
        const int following = i + 1 < tasks ? i + 1 : i;
        const Span& next = queries[following / kv_heads];
        const int begin = first_seen(rule, next);
        const Group<E> after(cache_of(next, following % kv_heads), begin / kGroup * kGroup, begin,
                             next.position + next.count);
        take_queries(layer, span, i % kv_heads, scratch_[thread.number]);
        attend(rule, span, cache_of(span, i % kv_heads), after, scratch_[thread.number]);
        leave_attended(span, i % kv_heads, scratch_[thread.number]);
      }
    };
    thread.split(tasks, attend_some, std::max(1, tasks / (8 * thread.pool_size())));
    clock_.took(thread.number, SW_ATTENTION);
  }

  void project_attended(Thread& thread, const Chunk& chunk, int number, float* hidden, T* partial) {
    const SwLayer& layer = layers_[number];
    const Delta added =
        shrink(thread, chunk, number, kOutput, {model_.hidden_size / kLanes, 0, 0}, attended_.read(), num_attended_);
    const Weight weight{layer.output, layer.quantised_output, layer.output_bias, num_attended_, SW_O_PROJ};
    project(thread, attended_.read(), chunk.count, weight, added, layer.post_attention_norm, hidden, partial);
  }

  // The other branch; as above.
  void mlp(Thread& thread, int number, const Chunk& chunk, float* hidden, T* partial) {
    const SwLayer& layer = layers_[number];
    const int inner_size = model_.inner_size, count = chunk.count;
    const Rows<const Value> normed = normalise(thread, count, hidden, layer.mlp_norm);
    const Rows<Value> inner = inner_.rows();
    const int vectors = inner_size / kLanes;
    const Delta delta = shrink(thread, chunk, number, kGate, {vectors, 2 * vectors, 0}, normed, model_.hidden_size);
    multiply(thread, normed, count, layer.gate_up, layer.quantised_gate_up, model_.hidden_size,
             inner_size / kLanes, [&](int row, int panel, Floats gate, Floats up) {
               if (layer.gate_up_bias) {
                 gate += load(layer.gate_up_bias + panel * kLanes);
                 up += load(layer.gate_up_bias + inner_size + panel * kLanes);
               }
               if (delta) {
                 delta->add(row, panel, gate);
                 delta->add(row, vectors + panel, up);
               }
               store(inner[row] + panel * kLanes, (model_.is_gelu ? gelu(gate) : silu(gate)) * up);
             });
    clock_.took(thread.number, SW_GATE_UP);
    const Delta added = shrink(thread, chunk, number, kDown, {model_.hidden_size / kLanes, 0, 0}, inner_.read(), inner_size);
    const Weight weight{layer.down, layer.quantised_down, layer.down_bias, inner_size, SW_DOWN};
    project(thread, inner_.read(), count, weight, added, layer.post_mlp_norm, hidden, partial);
  }

  // What the adapters of a chunk's rows change of a product; nothing, at no cost, where none has one.
  Delta shrink(Thread& thread, const Chunk& chunk, int layer, Module first, const ProductEnds& ends, Rows<const Value> x,
               int depth) {
    if (chunk.pieces.empty()) return std::nullopt;
    return adapters_.shrink(thread, chunk, layer, first, ends, x, depth);
  }

  // Rows ready for a product: each thread makes a few for itself, which takes less time than to wait for
  // the others; many are shared.
  Rows<const Value> normalise(Thread& thread, int count, const float* hidden, const float* weight) {
    const int size = model_.hidden_size;
    const bool own = count <= kOwnRows;
    const Rows<Value> to{normed_.rows()[own ? kChunk + thread.number * kOwnRows : 0], normed_.stride};
    auto make = [&](int begin, int end) {
      for (int i = begin; i < end; ++i) rms_norm(hidden + (ptrdiff_t)i * size, weight, size, model_.eps, to[i]);
    };
    own ? make(0, count) : thread.split(count, make);
    clock_.took(thread.number, SW_NORMS);
    return {to.data, to.stride};
  }

  struct Weight {
    const void* plain;
    const SwQuantised* quantised;
    const float* bias;
    int depth, op;
  };

  // The product that ends a branch.
  void project(Thread& thread, Rows<const Value> x, int count, const Weight& weight, const Delta& delta,
               const float* post_norm, float* hidden, T* partial) {
    const int size = model_.hidden_size;
    auto into = [&](auto to, bool adds) {
      multiply(thread, x, count, weight.plain, weight.quantised, weight.depth, panels(size),
               [&](int row, int panel, Floats low, Floats high) {
                 add_panel(weight.bias, panel, size, low, high);
                 if (delta) delta->add_panel(row, panel, low, high);
                 add_panel(adds ? to[row] : nullptr, panel, size, low, high);
                 store_panel(to[row], panel, size, low, high);
               });
    };
    // Without a norm of its own the branch is added before it is rounded.
    if (!partial && !post_norm) into(Rows<float>{hidden, size}, true);
    else if (partial) into(Rows<T>{partial, size}, false);
    else into(branch_.rows(), false);
    clock_.took(thread.number, weight.op);
    if (!partial && post_norm) join(thread, count, {hidden, size}, branch_.read(), post_norm);
  }

  template <class U>
  void join(Thread& thread, int count, Rows<float> hidden, Rows<const U> branch, const float* weight) {
    thread.split(count, [&](int begin, int end) {
      for (int i = begin; i < end; ++i)
        stepwire::add_branch(hidden[i], branch[i], weight, model_.hidden_size, model_.eps);
    });
    clock_.took(thread.number, SW_NORMS);
  }

  // Puts one head, normalised and rotated for its position, at `to`. `head` counts queries, then keys.
  void prepare_head(const SwLayer& layer, const Value* token, int head, int position, Value* to) const {
    const bool is_key = head >= model_.num_heads;
    const int size = model_.head_dim, place = is_key ? head - model_.num_heads : head;
    const Value* from = token + head * size;
    const float* weight = is_key ? layer.key_norm : layer.query_norm;
    float scale = 1;
    if (weight && model_.norm_whole) {
      const int whole = (is_key ? model_.num_kv_heads : model_.num_heads) * size;
      scale = inverse_rms(sum_squares(from - place * size, whole), whole, model_.eps);
      weight += place * size;
    } else if (weight) {
      scale = inverse_rms(sum_squares(from, size), size, model_.eps);
    }
    const ptrdiff_t angles = (ptrdiff_t)position * layer.rotary_half;
    norm_and_rotate(from, {size, layer.rotary_half}, weight, scale, layer.cos + angles, layer.sin + angles, to);
  }

  void write_keys(const SwLayer& layer, const Span& span, int kv_head, const auto& cache) const {
    alignas(64) Value key[kMostHeadDim];
    for (int i = 0; i < span.count; ++i) {
      const Value* token = qkv_.read()[span.first + i];
      prepare_head(layer, token, model_.num_heads + kv_head, span.position + i, key);
      cache.write(span.position + i, key,
                  token + (model_.num_heads + model_.num_kv_heads + kv_head) * model_.head_dim);
    }
  }

  void take_queries(const SwLayer& layer, const Span& span, int kv_head, AttentionScratch<T>& scratch) const {
    Value* to = scratch.queries.data();
    for (int i = 0; i < span.count; ++i)
      for (int head = 0; head < heads_per_group_; ++head, to += model_.head_dim)
        prepare_head(layer, qkv_.read()[span.first + i], kv_head * heads_per_group_ + head, span.position + i, to);
  }

  void leave_attended(const Span& span, int kv_head, const AttentionScratch<T>& scratch) const {
    const int width = heads_per_group_ * model_.head_dim;
    for (int i = 0; i < span.count; ++i) {
      Value* to = attended_.rows()[span.to + i] + kv_head * width;
      for (int d = 0; d < width; d += kLanes) store(to + d, load(&scratch.out[(size_t)i * width + d]));
    }
  }

  // Final norm and head of chosen rows.
  void classify(Thread& thread, const float* hidden, const SwHead& head) {
    const int size = model_.hidden_size, vocab = model_.vocab_size;
    Best* best = best_.data() + (size_t)thread.number * head.num_rows;
    for (int first = 0; first < head.num_rows; first += kChunk) {
      const int count = std::min<int64_t>(kChunk, head.num_rows - first);
      thread.split(count, [&](int begin, int end) {
        for (int i = begin; i < end; ++i) {
          const int64_t row = head.rows ? head.rows[first + i] : first + i;
          rms_norm(hidden + row * size, model_.final_norm, size, model_.eps, normed_.rows()[i]);
        }
      });
      clock_.took(thread.number, SW_NORMS);
      multiply(thread, normed_.read(), count, model_.head, model_.quantised_head, size, panels(vocab),
               [&](int row, int panel, Floats low, Floats high) {
                 low = cap(low, model_.logit_softcap);
                 high = cap(high, model_.logit_softcap);
                 if (head.logits) store_panel(head.logits + (first + row) * (int64_t)vocab, panel, vocab, low, high);
                 if (head.token_ids) best[first + row].take(panel, vocab, low, high);
               });
      clock_.took(thread.number, SW_HEAD);
    }
    if (!head.token_ids || thread.number != 0) return;
    for (int64_t row = 0; row < head.num_rows; ++row) merge_best(row, head);
  }

  void merge_best(int64_t row, const SwHead& head) const {
    Best all = best_[row];
    for (int thread = 1; thread < pool_.size(); ++thread) all.merge(best_[thread * head.num_rows + row]);
    head.token_ids[row] = all.token_id;
    head.finite[row] = all.is_finite();
  }

  Pool& pool_;
  const SwModel model_;
  const std::vector<SwLayer> layers_;
  const int heads_per_group_, num_qkv_, num_attended_;
  const Buffer<Value> normed_, qkv_, attended_, inner_, branch_;
  QuantisedInputs<Value> digits_;
  std::vector<AttentionScratch<T>> scratch_;
  std::vector<float> unpacked_;  // [threads, hidden_size], where the embedding is quantised
  std::vector<Best> best_;
  Adapters<T> adapters_;
  OperatorClock clock_;
};

}  // namespace stepwire
