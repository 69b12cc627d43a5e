// Sixteen floats at a time, by GCC's vector extensions: one AVX-512 register, two of AVX2, four of NEON.
// Only the products that decide the speed are written as intrinsics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#define SW_INLINE inline __attribute__((always_inline))

namespace stepwire {

constexpr int kLanes = 16;

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));
using Codes = int8_t __attribute__((vector_size(16)));

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

SW_INLINE Floats splat(float value) { return Floats{} + value; }

SW_INLINE Floats load(const float* from) {
  Floats value;
  memcpy(&value, from, sizeof value);
  return value;
}

SW_INLINE Floats load(const bf16* from) {
  Halves bits;
  memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

SW_INLINE Floats load(const f16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  __m256 halves[2];
  for (int i = 0; i < 2; ++i)
    halves[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8 * i)));
  Floats value;
  memcpy(&value, halves, sizeof value);
  return value;
#else
  Halves bits;
  memcpy(&bits, from, sizeof bits);
  const Words wide = __builtin_convertvector(bits, Words), size = (wide & 0x7fffu) << 13;
  const Words finite = (Words)((Floats)size * 0x1p112f), is_finite = (Words)(size < (0x7c00u << 13));
  return (Floats)(((finite & is_finite) | ((size | 0x7f800000u) & ~is_finite)) | ((wide & 0x8000u) << 16));
#endif
}

SW_INLINE Floats load(const int8_t* from) {
  Codes codes;
  memcpy(&codes, from, sizeof codes);
  return __builtin_convertvector(__builtin_convertvector(codes, Ints), Floats);
}

SW_INLINE void store(float* to, Floats value) { memcpy(to, &value, sizeof value); }

// Rounds to nearest, ties to even.
SW_INLINE void store(bf16* to, Floats value) {
#if defined(__AVX512BF16__)
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
#else
  Words bits = (Words)value;
  Words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  Words quiet = (bits >> 16) | 0x40u;
  Words is_nan = (Words)(value != value);
  Halves rounded = __builtin_convertvector((nearest & ~is_nan) | (quiet & is_nan), Halves);
#endif
  memcpy(to, &rounded, sizeof rounded);
}

// Likewise; what lies beyond 65504 becomes infinite.
SW_INLINE void store(f16* to, Floats value) {
#if defined(__AVX512F__)
  const __m256i rounded = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  __m256 halves[2];
  memcpy(halves, &value, sizeof value);
  __m128i rounded[2];
  for (int i = 0; i < 2; ++i) rounded[i] = _mm256_cvtps_ph(halves[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Words sign = ((Words)value >> 16) & 0x8000u, size = (Words)value & 0x7fffffffu;
  Words normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  normal = normal > 0x7c00u ? Words{} + 0x7c00u : normal;
  // Added to 1/2, the last bit of which is the least float16, it is rounded as that is.
  const Words tiny = (Words)((Floats)size + 0.5f) - 0x3f000000u;
  const Words is_tiny = (Words)(size < (113u << 23)), is_nan = (Words)(value != value);
  const Words number = (tiny & is_tiny) | (normal & ~is_tiny);
  const Halves rounded = __builtin_convertvector(((number & ~is_nan) | (0x7e00u & is_nan)) | sign, Halves);
#endif
  memcpy(to, &rounded, sizeof rounded);
}

SW_INLINE float to_float(float value) { return value; }

SW_INLINE float to_float(bf16 value) {
  const uint32_t bits = (uint32_t)value.bits << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <class T>
SW_INLINE void store_part(T* to, Floats value, int count) {
  T lanes[kLanes];
  store(lanes, value);
  if (count > 0) memcpy(static_cast<void*>(to), lanes, sizeof(T) * count);
}

// Sixteen values from row[at] on, those beyond `size` taken as 0.
template <class T>
SW_INLINE Floats load_part(const T* row, int64_t at, int64_t size) {
  if (at + kLanes <= size) return load(row + at);
  T lanes[kLanes] = {};
  if (at < size) memcpy(static_cast<void*>(lanes), row + at, sizeof(T) * (size - at));
  return load(lanes);
}

// a * b + c. AVX2 and NEON get their fused form from the compiler's contraction.
SW_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// Of numbers; where one is NaN, b.
SW_INLINE Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// Both fold halves on halves, so that the order of the additions is fixed.
SW_INLINE float sum_lanes(Floats value) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) value[i] += value[i + width];
  return value[0];
}

SW_INLINE float max_lanes(Floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  float largest = value[0];
  for (int i = 1; i < kLanes; ++i) largest = value[i] > largest ? value[i] : largest;
  return largest;
#endif
}

SW_INLINE bool any_above(Floats value, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)value, (__m512)splat(limit), _CMP_GT_OQ) != 0;
#else
  return max_lanes(value) > limit;
#endif
}

// 2^x to about two units in the last place: 2^n * 2^r with |r| <= 1/2, 2^r by its series. NaN stays NaN; beyond what has
// a normal result it is the nearest that has, or what it would be without bounds.
SW_INLINE Floats exp2(Floats x) {
#if defined(__AVX512DQ__)
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const Floats r = (Floats)_mm512_reduce_ps((__m512)x, kNearest);  // 0 where x is infinite
#else
  x = max(splat(-126.0f), x);
  x = x > 127.0f ? splat(127.0f) : x;
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const Floats shifted = x + magic;
  const Floats r = x - (shifted - magic);
#endif
  Floats p = splat(1.5403530e-4f);
  p = fma(p, r, splat(1.3333558e-3f));
  p = fma(p, r, splat(9.6181291e-3f));
  p = fma(p, r, splat(5.5504109e-2f));
  p = fma(p, r, splat(2.4022651e-1f));
  p = fma(p, r, splat(6.9314718e-1f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512DQ__)
  return (Floats)_mm512_scalef_ps((__m512)p, _mm512_roundscale_ps((__m512)x, kNearest));
#else
  return (Floats)((Ints)p + ((Ints)shifted << 23));
#endif
}

constexpr float kLog2E = 1.44269504f;

SW_INLINE Floats exp(Floats x) { return exp2(x * kLog2E); }

SW_INLINE Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

SW_INLINE Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// The tanh form of GELU.
SW_INLINE Floats gelu(Floats x) {
  Floats inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanh(inner));
}

SW_INLINE Floats cap(Floats x, float limit) { return limit > 0 ? limit * tanh(x / limit) : x; }

// Asks for a line of memory, to come into the second-level cache. By hand, because GCC takes a function
// that only prefetches for one without effect, and drops it.
SW_INLINE void ask(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line)));
#elif defined(__aarch64__)
  asm volatile("prfm pldl2keep, %0" : : "Q"(*static_cast<const char*>(line)));
#endif
}

SW_INLINE void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace stepwire
