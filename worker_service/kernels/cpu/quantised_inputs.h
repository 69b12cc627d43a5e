// The inputs of quantised products as integers, in memory that is allocated once.
#pragma once

#include <algorithm>
#include <new>
#include <type_traits>
#include <vector>

#include "digits.h"
#include "gemm.h"

namespace stepwire {

// Up to so many rows each thread takes apart all of them for itself, which costs less than to wait for the others.
constexpr int kOwnDigitRows = 3;

// Bytes of an input: sixteen bits over the largest of a span where it has eight, twenty-four where it has more.
template <class T>
constexpr int bytes_of_input(const SwQuantised& weight) {
  return weight.rounding != SW_ROUND_NOTHING ? 1 : std::is_same_v<T, bf16> ? 2 : 3;
}

template <class T>
class QuantisedInputs {
 public:
  // For products with `weights`, null ones left out, of up to `most_rows` rows.
  QuantisedInputs(int threads, int most_rows, const std::vector<const SwQuantised*>& weights)
      : most_rows_(most_rows) {
    for (const SwQuantised* weight : weights) {
      if (!weight) continue;
      bytes_ = std::max(bytes_, (size_t)bytes_of_input<T>(*weight) * weight->inputs);
      spans_ = std::max(spans_, (size_t)(weight->inputs / weight->span));
      if (weight->order) ordered_ = std::max(ordered_, (size_t)weight->inputs);
    }
    const size_t rows = most_rows + kOwnDigitRows * threads;
    data_.resize(rows * bytes_);
    totals_.resize(rows * spans_);
    in_order_.resize(threads * ordered_);
  }

  // x [count, weight.depth], which all threads see or each has for itself; for use inside of Pool::run by all of
  // them alike. What was taken before must not be in use any more.
  Digits take(Thread& thread, Rows<const T> x, int count, const SwQuantised& weight) {
    const bool own = count <= kOwnDigitRows;
    const size_t first = own ? most_rows_ + thread.number * kOwnDigitRows : 0;
    const int num_bytes = bytes_of_input<T>(weight), spans = weight.inputs / weight.span;
    // A few rows wait for memory, many for what is done with it: see JoinedSums.
    const bool joined = num_bytes == 2 && !own;
    const Digits to{num_bytes, joined, data_.data() + first * bytes_, totals_.data() + first * spans_, weight.inputs, spans};
    auto take_some = [&](int begin, int end) {
      for (int row = begin; row < end; ++row) {
        if (weight.order)
          take_digits(put_in_order(thread.number, x[row], weight), weight.inputs, weight, to, row);
        else
          take_digits(x[row], weight.depth, weight, to, row);
      }
    };
    own ? take_some(0, count) : thread.split(count, take_some);
    return to;
  }

 private:
  const float* put_in_order(int thread, const T* x, const SwQuantised& weight) {
    float* to = in_order_.data() + thread * ordered_;
    for (int i = 0; i < weight.inputs; ++i) to[i] = weight.order[i] < 0 ? 0.0f : to_float(x[weight.order[i]]);
    return to;
  }

  const size_t most_rows_;
  size_t bytes_ = 0, spans_ = 0, ordered_ = 0;
  std::vector<int8_t> data_;
  std::vector<SpanTotal> totals_;
  std::vector<float> in_order_;
};

}  // namespace stepwire
