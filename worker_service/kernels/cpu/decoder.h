// A decoder's layers over a packed batch. Methods that take a Pool are called inside of Pool::run, by all
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
        normed_(std::max(kChunk, kOwnRows * pool.size()), model.hidden_size),
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

  void forward(const SwBatch& batch, const int64_t* token_ids, void* hidden, int first, int last,
               const SwHead* head) override {
    std::vector<Chunk> chunks;
    if (first < last) chunks = plan_chunks(batch, model_.block_size, heads_per_group_);
    T* rows = static_cast<T*>(hidden);
    adapters_.take(batch, model_.num_layers);
    if (head) best_.assign((size_t)pool_.size() * (head->token_ids ? head->num_rows : 0), Best{});
    pool_.run([&](Pool& pool, int thread) {
      clock_.start(thread);
      if (token_ids) {
        embed(pool, thread, token_ids, batch.num_tokens, rows);
        clock_.took(thread, SW_EMBED);
      }
      for (int layer = first; layer < last; ++layer)
        for (const Chunk& chunk : chunks) {
          T* part = rows + (ptrdiff_t)chunk.first * model_.hidden_size;
          attention(pool, thread, batch, chunk, layer, part, nullptr);
          mlp(pool, thread, layer, chunk, part, nullptr);
        }
      if (head) classify(pool, thread, rows, *head);
    });
  }

  void attention_half(const SwBatch& batch, int layer, const void* hidden, void* partial) override {
    const auto chunks = plan_chunks(batch, model_.block_size, heads_per_group_);
    adapters_.take(batch, model_.num_layers);
    pool_.run([&](Pool& pool, int thread) {
      clock_.start(thread);
      for (const Chunk& chunk : chunks) {
        const ptrdiff_t offset = (ptrdiff_t)chunk.first * model_.hidden_size;
        T* rows = const_cast<T*>(static_cast<const T*>(hidden)) + offset;  // only read when there is a partial
        attention(pool, thread, batch, chunk, layer, rows, static_cast<T*>(partial) + offset);
      }
    });
  }

  void mlp_half(const SwBatch& batch, int layer, const void* hidden, void* partial) override {
    std::vector<Chunk> chunks;
    for (int first = 0; first < batch.num_tokens; first += kChunk) {
      const int count = std::min(kChunk, batch.num_tokens - first);
      chunks.push_back({first, count, {}, {}, plan_pieces(batch, first, count)});
    }
    adapters_.take(batch, model_.num_layers);
    pool_.run([&](Pool& pool, int thread) {
      clock_.start(thread);
      for (const Chunk& chunk : chunks) {
        const ptrdiff_t offset = (ptrdiff_t)chunk.first * model_.hidden_size;
        T* rows = const_cast<T*>(static_cast<const T*>(hidden)) + offset;
        mlp(pool, thread, layer, chunk, rows, static_cast<T*>(partial) + offset);
      }
    });
  }

  void add_branch(int layer, bool is_mlp, int num_tokens, void* hidden, const void* partial) override {
    const float* weight = is_mlp ? layers_[layer].post_mlp_norm : layers_[layer].post_attention_norm;
    pool_.run([&](Pool& pool, int thread) {
      clock_.start(thread);
      join(pool, thread, num_tokens, {static_cast<T*>(hidden), model_.hidden_size},
           {static_cast<const T*>(partial), model_.hidden_size}, weight);
    });
  }

  void time(int64_t* sums) override { clock_.set(sums); }

 private:
  using Delta = std::optional<ProductDelta<T>>;

  // Rows of working memory.
  struct Buffer {
    Buffer(int rows, int columns) : stride(padded(columns)), data(new (std::align_val_t(64)) T[rows * stride]()) {}
    ~Buffer() { ::operator delete[](data, std::align_val_t(64)); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Rows<T> rows() const { return {data, stride}; }
    Rows<const T> read() const { return {data, stride}; }
    const ptrdiff_t stride;
    T* const data;
  };

  void embed(Pool& pool, int thread, const int64_t* token_ids, int num_tokens, T* hidden) {
    const int size = model_.hidden_size;
    if (model_.quantised_embedding) return embed_quantised(pool, thread, token_ids, num_tokens, hidden);
    pool.split(num_tokens, [&](int begin, int end) {
      for (int token = begin; token < end; ++token) {
        const T* from = static_cast<const T*>(model_.embedding) + token_ids[token] * size;
        for (int i = 0; i < size; i += kLanes)
          store(hidden + (ptrdiff_t)token * size + i, load(from + i) * model_.embedding_scale);
      }
    });
  }

  void embed_quantised(Pool& pool, int thread, const int64_t* token_ids, int num_tokens, T* hidden) {
    const int size = model_.hidden_size;
    float* row = unpacked_.data() + (ptrdiff_t)thread * size;
    pool.split(num_tokens, [&](int begin, int end) {
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
  void multiply(Pool& pool, int thread, Rows<const T> x, int count, const void* plain, const SwQuantised* quantised,
                int depth, int num_panels, Done&& done) {
    if (!quantised) return gemm(pool, x, count, static_cast<const T*>(plain), depth, num_panels, done);
    quantised_gemm(pool, digits_.take(pool, thread, x, count, *quantised), count, *quantised, num_panels, done);
  }

  // The attention branch of a chunk's tokens: joined to `hidden`, or left in `partial` when that is given.
  void attention(Pool& pool, int thread, const SwBatch& batch, const Chunk& chunk, int number, T* hidden,
                 T* partial) {
    const SwLayer& layer = layers_[number];
    const Rows<const T> normed = normalise(pool, thread, chunk.count, hidden, layer.input_norm);
    const Rows<T> qkv = qkv_.rows();
    const int queries = num_attended_ / kLanes, keys = (num_qkv_ - num_attended_) / 2 / kLanes;
    const Delta delta =
        shrink(pool, chunk, number, kQuery, {queries, queries + keys, queries + 2 * keys}, normed, model_.hidden_size);
    multiply(pool, thread, normed, chunk.count, layer.qkv, layer.quantised_qkv, model_.hidden_size, panels(num_qkv_),
             [&](int row, int panel, Floats low, Floats high) {
               add_panel(layer.qkv_bias, panel, num_qkv_, low, high);
               if (delta) delta->add_panel(row, panel, low, high);
               store_panel(qkv[row], panel, num_qkv_, low, high);
             });
    clock_.took(thread, SW_QKV);
    model_.rounds_cache ? attend_chunk<int8_t>(pool, thread, batch, chunk, number)
                        : attend_chunk<T>(pool, thread, batch, chunk, number);
    const Delta added =
        shrink(pool, chunk, number, kOutput, {model_.hidden_size / kLanes, 0, 0}, attended_.read(), num_attended_);
    const Weight weight{layer.output, layer.quantised_output, layer.output_bias, num_attended_, SW_O_PROJ};
    project(pool, thread, attended_.read(), chunk.count, weight, added, layer.post_attention_norm, hidden, partial);
  }

  // Stores the keys and values of a chunk, in elements of type E, and attends.
  template <class E>
  void attend_chunk(Pool& pool, int thread, const SwBatch& batch, const Chunk& chunk, int number) {
    const SwLayer& layer = layers_[number];
    const CacheShape shape{model_.num_layers, model_.num_kv_heads, model_.head_dim, model_.block_size};
    auto cache_of = [&](const Span& span, int head) {
      return HeadCache<T, E>(model_.cache, shape, number, head, batch.tables + span.sequence * batch.table_stride);
    };
    const int kv_heads = model_.num_kv_heads, tasks = (int)chunk.queries.size() * kv_heads;
    pool.split((int)chunk.writes.size() * kv_heads, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        const Span& span = chunk.writes[i / kv_heads];
        if (i + 1 < end) {
          const Span& next = chunk.writes[(i + 1) / kv_heads];
          cache_of(next, (i + 1) % kv_heads).ask_to_write(next.position);
        }
        write_keys(layer, span, i % kv_heads, cache_of(span, i % kv_heads));
      }
    });
    clock_.took(thread, SW_WRITE_KV);
    const AttentionRule rule{model_.num_heads, kv_heads, model_.head_dim, layer.window, model_.scale, model_.softcap};
    auto attend_some = [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        const Span& span = chunk.queries[i / kv_heads];
        const int following = i + 1 < tasks ? i + 1 : i;
        const Span& next = chunk.queries[following / kv_heads];
        const int begin = first_seen(rule, next);
        const Group<E> after(cache_of(next, following % kv_heads), begin / kGroup * kGroup, begin,
                             next.position + next.count);
        take_queries(layer, span, i % kv_heads, scratch_[thread]);
        attend(rule, span, cache_of(span, i % kv_heads), after, scratch_[thread]);
        leave_attended(span, i % kv_heads, scratch_[thread]);
      }
    };
    pool.split(tasks, attend_some, std::max(1, tasks / (8 * pool.size())));
    clock_.took(thread, SW_ATTENTION);
  }

  // The other branch; as above.
  void mlp(Pool& pool, int thread, int number, const Chunk& chunk, T* hidden, T* partial) {
    const SwLayer& layer = layers_[number];
    const int inner_size = model_.inner_size, count = chunk.count;
    const Rows<const T> normed = normalise(pool, thread, count, hidden, layer.mlp_norm);
    const Rows<T> inner = inner_.rows();
    const int vectors = inner_size / kLanes;
    const Delta delta = shrink(pool, chunk, number, kGate, {vectors, 2 * vectors, 0}, normed, model_.hidden_size);
    multiply(pool, thread, normed, count, layer.gate_up, layer.quantised_gate_up, model_.hidden_size,
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
    clock_.took(thread, SW_GATE_UP);
    const Delta added = shrink(pool, chunk, number, kDown, {model_.hidden_size / kLanes, 0, 0}, inner_.read(), inner_size);
    const Weight weight{layer.down, layer.quantised_down, layer.down_bias, inner_size, SW_DOWN};
    project(pool, thread, inner_.read(), count, weight, added, layer.post_mlp_norm, hidden, partial);
  }

  // What the adapters of a chunk's rows change of a product; nothing, at no cost, where none has one.
  Delta shrink(Pool& pool, const Chunk& chunk, int layer, Module first, const ProductEnds& ends, Rows<const T> x,
               int depth) {
    if (chunk.pieces.empty()) return std::nullopt;
    return adapters_.shrink(pool, chunk, layer, first, ends, x, depth);
  }

  // Rows ready for a product: each thread makes a few for itself, which takes less time than to wait for
  // the others; many are shared.
  Rows<const T> normalise(Pool& pool, int thread, int count, const T* hidden, const float* weight) {
    const int size = model_.hidden_size;
    const bool own = count <= kOwnRows;
    const Rows<T> to{normed_.rows()[own ? thread * kOwnRows : 0], normed_.stride};
    auto make = [&](int begin, int end) {
      for (int i = begin; i < end; ++i) rms_norm(hidden + (ptrdiff_t)i * size, weight, size, model_.eps, to[i]);
    };
    own ? make(0, count) : pool.split(count, make);
    clock_.took(thread, SW_NORMS);
    return {to.data, to.stride};
  }

  struct Weight {
    const void* plain;
    const SwQuantised* quantised;
    const float* bias;
    int depth, op;
  };

  // The product that ends a branch.
  void project(Pool& pool, int thread, Rows<const T> x, int count, const Weight& weight, const Delta& delta,
               const float* post_norm, T* hidden, T* partial) {
    const int size = model_.hidden_size;
    // Without a norm of its own the branch is added before it is rounded.
    const bool adds = !partial && !post_norm;
    const Rows<T> to = adds ? Rows<T>{hidden, size} : partial ? Rows<T>{partial, size} : branch_.rows();
    multiply(pool, thread, x, count, weight.plain, weight.quantised, weight.depth, panels(size),
             [&](int row, int panel, Floats low, Floats high) {
               add_panel(weight.bias, panel, size, low, high);
               if (delta) delta->add_panel(row, panel, low, high);
               add_panel(adds ? to[row] : nullptr, panel, size, low, high);
               store_panel(to[row], panel, size, low, high);
             });
    clock_.took(thread, weight.op);
    if (!partial && post_norm) join(pool, thread, count, {hidden, size}, branch_.read(), post_norm);
  }

  void join(Pool& pool, int thread, int count, Rows<T> hidden, Rows<const T> branch, const float* weight) {
    pool.split(count, [&](int begin, int end) {
      for (int i = begin; i < end; ++i)
        stepwire::add_branch(hidden[i], branch[i], weight, model_.hidden_size, model_.eps);
    });
    clock_.took(thread, SW_NORMS);
  }

  // Puts one head, normalised and rotated for its position, at `to`. `head` counts queries, then keys.
  void prepare_head(const SwLayer& layer, const T* token, int head, int position, T* to) const {
    const bool is_key = head >= model_.num_heads;
    const int size = model_.head_dim, place = is_key ? head - model_.num_heads : head;
    const T* from = token + head * size;
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
    alignas(64) T key[kMostHeadDim];
    for (int i = 0; i < span.count; ++i) {
      const T* token = qkv_.read()[span.first + i];
      prepare_head(layer, token, model_.num_heads + kv_head, span.position + i, key);
      cache.write(span.position + i, key,
                  token + (model_.num_heads + model_.num_kv_heads + kv_head) * model_.head_dim);
    }
  }

  void take_queries(const SwLayer& layer, const Span& span, int kv_head, AttentionScratch<T>& scratch) const {
    T* to = scratch.queries.data();
    for (int i = 0; i < span.count; ++i)
      for (int head = 0; head < heads_per_group_; ++head, to += model_.head_dim)
        prepare_head(layer, qkv_.read()[span.first + i], kv_head * heads_per_group_ + head, span.position + i, to);
  }

  void leave_attended(const Span& span, int kv_head, const AttentionScratch<T>& scratch) const {
    const int width = heads_per_group_ * model_.head_dim;
    for (int i = 0; i < span.count; ++i) {
      T* to = attended_.rows()[span.first + i] + kv_head * width;
      for (int d = 0; d < width; d += kLanes) store(to + d, load(&scratch.out[(size_t)i * width + d]));
    }
  }

  // Final norm and head of chosen rows.
  void classify(Pool& pool, int thread, const T* hidden, const SwHead& head) {
    const int size = model_.hidden_size, vocab = model_.vocab_size;
    Best* best = best_.data() + (size_t)thread * head.num_rows;
    for (int first = 0; first < head.num_rows; first += kChunk) {
      const int count = std::min<int64_t>(kChunk, head.num_rows - first);
      pool.split(count, [&](int begin, int end) {
        for (int i = begin; i < end; ++i)
          rms_norm(hidden + head.rows[first + i] * size, model_.final_norm, size, model_.eps, normed_.rows()[i]);
      });
      clock_.took(thread, SW_NORMS);
      multiply(pool, thread, normed_.read(), count, model_.head, model_.quantised_head, size, panels(vocab),
               [&](int row, int panel, Floats low, Floats high) {
                 low = cap(low, model_.logit_softcap);
                 high = cap(high, model_.logit_softcap);
                 if (head.logits) store_panel(head.logits + (first + row) * (int64_t)vocab, panel, vocab, low, high);
                 if (head.token_ids) find_best(best[first + row], panel * kPanel, vocab, low, high);
               });
      clock_.took(thread, SW_HEAD);
    }
    if (!head.token_ids || thread != 0) return;
    for (int64_t row = 0; row < head.num_rows; ++row) merge_best(row, head);
  }

  void merge_best(int64_t row, const SwHead& head) const {
    Best all = best_[row];
    for (int thread = 1; thread < pool_.size(); ++thread) {
      const Best& one = best_[thread * head.num_rows + row];
      all.infinite += one.infinite;
      if (one.value > all.value || (one.value == all.value && one.token_id < all.token_id))
        all = {one.value, one.token_id, all.infinite};
    }
    head.token_ids[row] = all.token_id;
    head.finite[row] = all.infinite == 0;
  }

  Pool& pool_;
  const SwModel model_;
  const std::vector<SwLayer> layers_;
  const int heads_per_group_, num_qkv_, num_attended_;
  const Buffer normed_, qkv_, attended_, inner_, branch_;
  QuantisedInputs<T> digits_;
  std::vector<AttentionScratch<T>> scratch_;
  std::vector<float> unpacked_;  // [threads, hidden_size], where the embedding is quantised
  std::vector<Best> best_;
  Adapters<T> adapters_;
  OperatorClock clock_;
};

}  // namespace stepwire
