// How the new tokens of one call are cut into work.
#pragma once

#include <algorithm>
#include <vector>

#include "api.h"
#include "attention.h"

namespace stepwire {

// Tokens that go through a layer together: few enough that what is between two products stays in the
// cache, many enough that reading the weights again costs nothing.
constexpr int kChunk = 256;

// Rows of a chunk that are multiplied with one adapter's first factors by one thread.
constexpr int kPieceRows = 24;
struct Piece {
  const SwFactors* factors;
  int first, count;
};

// One chunk's share of the packed batch. Spans count tokens from the chunk's first.
struct Chunk {
  int first, count;
  std::vector<Span> writes;   // none crosses a block, so that one thread writes a block
  std::vector<Span> queries;  // longest first, so that no thread begins a long one last
  std::vector<Piece> pieces;  // of the runs with an adapter
  // Tokens whose hidden states are wanted after the last layer, their queries, and the place of the first one then.
  std::vector<int> wanted;
  std::vector<Span> wanted_queries;
  int first_wanted = 0;
};

inline std::vector<Piece> plan_pieces(const SwBatch& batch, int first, int count) {
  std::vector<Piece> pieces;
  for (int i = 0; i < batch.num_runs; ++i) {
    const SwRun& run = batch.runs[i];
    const int end = std::min(run.first + run.count, first + count);
    for (int at = std::max(run.first, first); at < end; at += kPieceRows)
      pieces.push_back({run.factors, at - first, std::min(kPieceRows, end - at)});
  }
  return pieces;
}

inline void sort_by_work(std::vector<Span>& spans) {
  std::stable_sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return (int64_t)(a.position + a.count) * a.count > (int64_t)(b.position + b.count) * b.count;
  });
}

// A sequence that reads blocks which another one fills in the same call comes after that one.
inline std::vector<Chunk> plan_chunks(const SwBatch& batch, int block_size, int heads_per_group) {
  const int tile = std::max(1, kQueryRows / heads_per_group);
  std::vector<Chunk> chunks;
  int sequence = 0, wanted = 0;
  for (int first = 0; first < batch.num_tokens; first += kChunk) {
    Chunk chunk{first, std::min(kChunk, batch.num_tokens - first)};
    chunk.pieces = plan_pieces(batch, first, chunk.count);
    chunk.first_wanted = wanted;
    const int end = first + chunk.count;
    for (int token = first; token < end;) {
      while (batch.query_start[sequence + 1] <= token) ++sequence;
      const int stop = std::min(end, batch.query_start[sequence + 1]);
      const int position = batch.computed[sequence] + token - batch.query_start[sequence];
      for (int at = token; at < stop;) {
        const int here = position + at - token;
        const int count = std::min(stop - at, block_size - here % block_size);
        chunk.writes.push_back({sequence, at - first, count, here, at - first});
        at += count;
      }
      for (int at = token; at < stop; at += tile)
        chunk.queries.push_back({sequence, at - first, std::min(tile, stop - at), position + at - token, at - first});
      for (int before = -2; wanted < batch.num_wanted && batch.wanted[wanted] < stop; ++wanted) {
        const int at = (int)batch.wanted[wanted];
        if (at == before + 1 && chunk.wanted_queries.back().count < tile)
          ++chunk.wanted_queries.back().count;
        else
          chunk.wanted_queries.push_back({sequence, at - first, 1, position + at - token, (int)chunk.wanted.size()});
        chunk.wanted.push_back(at - first);
        before = at;
      }
      token = stop;
    }
    sort_by_work(chunk.queries);
    sort_by_work(chunk.wanted_queries);
    chunks.push_back(std::move(chunk));
  }
  return chunks;
}

}  // namespace stepwire
