#include "quantised.h"

#include <array>
#include <utility>

namespace stepwire {

namespace {

// sum + the products of four unsigned bytes of each lane of w with four signed ones of a.
SW_INLINE Ints dot(Ints sum, Words w, Ints a) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)a);
#elif defined(__AVX2__)
  // Even and odd bytes as 16 bits, of which pairs are multiplied and added.
  using Shorts = int16_t __attribute__((vector_size(64)));
  const Shorts even = (Shorts)((Words)a << 8) >> 8, odd = (Shorts)a >> 8;
  const Words low = w & 0x00ff00ffu, high = (w >> 8) & 0x00ff00ffu;
  __m256i parts[2][4];
  memcpy(parts[0], &low, 64), memcpy(parts[0] + 2, &high, 64);
  memcpy(parts[1], &even, 64), memcpy(parts[1] + 2, &odd, 64);
  __m256i sums[2];
  for (int i = 0; i < 2; ++i)
    sums[i] = _mm256_add_epi32(_mm256_madd_epi16(parts[0][i], parts[1][i]),
                               _mm256_madd_epi16(parts[0][i + 2], parts[1][i + 2]));
  Ints added;
  memcpy(&added, sums, 64);
  return sum + added;
#else
  for (int i = 0; i < 4; ++i) sum += (Ints)((w >> (8 * i)) & 0xffu) * ((a << (24 - 8 * i)) >> 24);
  return sum;
#endif
}

// sum + the products of two integers of 16 bits of each lane of w with those of a.
SW_INLINE Ints dot_joined(Ints sum, Words w, Ints a) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)a);
#elif defined(__AVX2__)
  __m256i parts[2][2], sums[2];
  memcpy(parts[0], &w, 64), memcpy(parts[1], &a, 64);
  for (int i = 0; i < 2; ++i) sums[i] = _mm256_madd_epi16(parts[0][i], parts[1][i]);
  Ints added;
  memcpy(&added, sums, 64);
  return sum + added;
#else
  return sum + (Ints)(w & 0xffffu) * ((a << 16) >> 16) + (Ints)(w >> 16) * (a >> 16);
#endif
}

SW_INLINE Words load_words(const uint8_t* from) {
  Words value;
  memcpy(&value, from, sizeof value);
  return value;
}

SW_INLINE Ints splat_int(const int8_t* from) {
  int32_t value;
  memcpy(&value, from, sizeof value);
  return Ints{} + value;
}

SW_INLINE Ints load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  using Narrow = uint8_t __attribute__((vector_size(16)));
  Narrow value;
  memcpy(&value, from, sizeof value);
  return __builtin_convertvector(value, Ints);
#endif
}

SW_INLINE Floats load_numbers(const void* numbers, int type, ptrdiff_t at) {
  if (type == SW_F32) return load(static_cast<const float*>(numbers) + at);
  if (type == SW_BF16) return load(static_cast<const bf16*>(numbers) + at);
  return load(static_cast<const f16*>(numbers) + at);
}

// Where the 32 columns of a group lie, by groups and by what scales are stored of.
struct GroupPlace {
  ptrdiff_t group, scale;
};

SW_INLINE GroupPlace place_of(const SwQuantised& weight, int panel, int group) {
  if (weight.groups_of_scale == 1) {
    const ptrdiff_t at = ((ptrdiff_t)panel * weight.groups + group) * kPanel;
    return {at, at};
  }
  const int scales = weight.groups / weight.groups_of_scale;
  return {((ptrdiff_t)panel * weight.groups + group) * kPanel,
          ((ptrdiff_t)panel * scales + group / weight.groups_of_scale) * kPanel};
}

// Of 16 columns from `column` on. A product with a factor is exact: eleven bits and seven.
SW_INLINE Floats load_scales(const SwQuantised& weight, GroupPlace at, int column) {
  const Floats scales = load_numbers(weight.scales, weight.scale_type, at.scale + column);
  return weight.factors ? scales * load(weight.factors + at.group + column) : scales;
}

SW_INLINE Floats load_minima(const SwQuantised& weight, GroupPlace at, int column) {
  const Floats minima = load_numbers(weight.minima, weight.scale_type, at.scale + column);
  return weight.minimum_factors ? minima * load(weight.minimum_factors + at.group + column) : minima;
}

SW_INLINE Ints load_zeros(const SwQuantised& weight, GroupPlace at, int column) {
  return weight.zeros ? load_bytes(weight.zeros + at.group + column) : Ints{} + weight.zero;
}

SW_INLINE Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }

// The sums of one span's integers: of R rows by the bytes of their inputs, for two vectors of columns.
template <int N, int R>
struct ByteSums {
  static constexpr int kRows = R, kInputBytes = 1;
  Ints sum[R][N][2];

  SW_INLINE void clear() { memset(sum, 0, sizeof sum); }

  // What the zero points take away: of three bytes that of the first two is kept apart, for it would not fit.
  SW_INLINE void begin(const SpanTotal* totals, ptrdiff_t spans, const Ints (&zero)[2]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const SpanTotal& of = totals[r * spans];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        if (N > 1) sum[r][0][v] = Ints{};
        sum[r][N > 1 ? 1 : 0][v] = zero[v] * -of.total;
        if (N == 3) sum[r][2][v] = zero[v] * -of.last_total;
      }
    }
  }

  // Four inputs, or eight of 4 bits, at `from` of the first row's first byte.
  template <int Bits>
  SW_INLINE void add(const int8_t* from, ptrdiff_t inputs, const Words (&words)[2]) {
    if constexpr (Bits == 8) {
      add_four(from, inputs, words);
    } else {
      add_four(from, inputs, {words[0] & 0x0f0f0f0fu, words[1] & 0x0f0f0f0fu});
      add_four(from + 4, inputs, {(words[0] >> 4) & 0x0f0f0f0fu, (words[1] >> 4) & 0x0f0f0f0fu});
    }
  }

  SW_INLINE void add_four(const int8_t* from, ptrdiff_t inputs, const Words (&words)[2]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int place = 0; place < N; ++place) {
        const Ints input = splat_int(from + (r * N + place) * inputs);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) sum[r][place][v] = dot(sum[r][place][v], words[v], input);
      }
  }

  SW_INLINE Floats value(int r, int v) const {
    if constexpr (N == 1) return to_floats(sum[r][0][v]);
    const Floats first = to_floats((sum[r][0][v] << 8) + sum[r][N > 1 ? 1 : 0][v]);
    if constexpr (N == 2) return first;
    return fma(first, splat(256.0f), to_floats(sum[r][N - 1][v]));
  }
};

// The same sums of inputs of two bytes as integers of 16 bits. With one accumulator each, twice the rows share what is
// read of the weight; but its values are widened, which takes longer than to read them where rows are few.
template <int R>
struct JoinedSums {
  static constexpr int kRows = R, kInputBytes = 2;
  Ints sum[R][2];

  SW_INLINE void clear() { memset(sum, 0, sizeof sum); }

  SW_INLINE void begin(const SpanTotal* totals, ptrdiff_t spans, const Ints (&zero)[2]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) sum[r][v] = zero[v] * -totals[r * spans].total;
  }

  template <int Bits>
  SW_INLINE void add(const int8_t* from, ptrdiff_t inputs, const Words (&words)[2]) {
    constexpr int kShifts[4] = {0, 8, 4, 12};  // which bring a pair of values to the low bits, pair by pair
#pragma GCC unroll 4
    for (int pair = 0; pair < 16 / Bits; ++pair) {
      constexpr uint32_t kValues = Bits == 8 ? 0x00ff00ffu : 0x000f000fu;
      const Words pairs[2] = {(words[0] >> kShifts[pair]) & kValues, (words[1] >> kShifts[pair]) & kValues};
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Ints input = splat_int(from + r * 2 * inputs + pair * 4);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) sum[r][v] = dot_joined(sum[r][v], pairs[v], input);
      }
    }
  }

  SW_INLINE Floats value(int r, int v) const { return to_floats(sum[r][v]); }
};

template <class Sums, int Bits>
void multiply_quantised(const Digits& x, int row, const SwQuantised& weight, int panel, float (*sums)[kPanel]) {
  constexpr int R = Sums::kRows, kInputs = 32 / Bits;  // of two vectors
  constexpr ptrdiff_t kStepBytes = kPanel * 4;
  const int spans = weight.inputs / weight.span, spans_of_group = spans / weight.groups;
  const uint8_t* words = weight.words + (ptrdiff_t)panel * (weight.inputs / kInputs) * kStepBytes;
  const int8_t* inputs = x.row_bytes(row);
  const SpanTotal* totals = x.row_totals(row);
  const bool has_zero = weight.zeros || weight.zero, is_one_span = spans_of_group == 1;
  Floats total[R][2] = {}, part[R][2];
  for (int group = 0; group < weight.groups; ++group) {
    const GroupPlace at = place_of(weight, panel, group);
    const Ints zero[2] = {load_zeros(weight, at, 0), load_zeros(weight, at, kLanes)};
    const Floats scale[2] = {load_scales(weight, at, 0), load_scales(weight, at, kLanes)};
    if (!is_one_span)
      for (auto& of_row : part) of_row[0] = of_row[1] = Floats{};
    for (int span = 0; span < spans_of_group; ++span, ++totals) {
      Sums sum;
      has_zero ? sum.begin(totals, x.spans, zero) : sum.clear();
      for (int i = 0; i < weight.span; i += kInputs) {
        const Words both[2] = {load_words(words), load_words(words + 64)};
        sum.template add<Bits>(inputs, x.inputs, both);
        words += kStepBytes;
        inputs += kInputs * Sums::kInputBytes;
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const Floats value = sum.value(r, v), size = splat(totals[r * x.spans].scale);
          if (is_one_span)
            total[r][v] = fma(value * size, scale[v], total[r][v]);
          else
            part[r][v] = fma(value, size, part[r][v]);
        }
    }
    if (!is_one_span)
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2; ++v) total[r][v] = fma(part[r][v], scale[v], total[r][v]);
    if (!weight.minima) continue;
    // Each is added as often as the group's inputs sum up to.
    const Floats minimum[2] = {load_minima(weight, at, 0), load_minima(weight, at, kLanes)};
    const SpanTotal* first = totals - spans_of_group;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      float sum = first[r * x.spans].sum;
      for (int span = 1; span < spans_of_group; ++span) sum += first[r * x.spans + span].sum;
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) total[r][v] = fma(splat(sum), minimum[v], total[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) store(sums[r] + v * kLanes, total[r][v]);
}

template <int R>
using OneByte = ByteSums<1, R>;
template <int R>
using TwoBytes = ByteSums<2, R>;
template <int R>
using ThreeBytes = ByteSums<3, R>;

template <template <int> class Sums, int Bits, int... R>
constexpr auto tiles_of(std::integer_sequence<int, R...>) {
  return std::array<QuantisedTile, sizeof...(R)>{multiply_quantised<Sums<R + 1>, Bits>...};
}

template <template <int> class Sums, int MostRows>
QuantisedTile tile_of(int bits, int rows) {
  static constexpr auto of_8 = tiles_of<Sums, 8>(std::make_integer_sequence<int, MostRows>{});
  static constexpr auto of_4 = tiles_of<Sums, 4>(std::make_integer_sequence<int, MostRows>{});
  return (bits == 8 ? of_8 : of_4)[rows - 1];
}

}  // namespace

QuantisedTile quantised_tile(const Digits& x, int bits, int rows) {
  if (x.joined) return tile_of<JoinedSums, kTileRows>(bits, rows);
  switch (x.num_bytes) {
    case 1:
      return tile_of<OneByte, most_quantised_rows(1)>(bits, rows);
    case 2:
      return tile_of<TwoBytes, most_quantised_rows(2)>(bits, rows);
    default:
      return tile_of<ThreeBytes, most_quantised_rows(3)>(bits, rows);
  }
}

void unpack_row(const SwQuantised& weight, int row, float* to) {
  const int panel = row / kPanel, column = row % kPanel, size = weight.inputs / weight.groups;
  const int inputs_of_step = 32 / weight.bits;
  const uint8_t* words = weight.words + (ptrdiff_t)panel * weight.inputs * kPanel * weight.bits / 8 + column * 4;
  for (int group = 0; group < weight.groups; ++group) {
    const GroupPlace at = place_of(weight, panel, group);
    const int half = column / kLanes * kLanes, lane = column % kLanes;
    const float scale = load_scales(weight, at, half)[lane];
    const float minimum = weight.minima ? load_minima(weight, at, half)[lane] : 0.0f;
    const int zero = load_zeros(weight, at, half)[lane];
    for (int i = group * size; i < (group + 1) * size; ++i) {
      const int step = i / inputs_of_step, within = i % inputs_of_step;
      const uint8_t word = words[step * (ptrdiff_t)kPanel * 4 + within % 4];
      const int value = weight.bits == 8 ? word : within < 4 ? word & 15 : word >> 4;
      const int place = weight.order ? weight.order[i] : i;
      if (place >= 0 && place < weight.depth) to[place] = scale * (float)(value - zero) + minimum;
    }
  }
}

}  // namespace stepwire
