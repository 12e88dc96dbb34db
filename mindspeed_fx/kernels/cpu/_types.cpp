// bfloat16 and float16, which are stored as 16 bits and computed with in float32. float16's instructions (F16C) are on
// every processor with AVX2.

#include <immintrin.h>
#include <type_traits>

namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Allowed {  // of a mask: what is not allowed is -inf
  uint8_t byte;
};
enum Type : int64_t { FLOAT32, BFLOAT16, FLOAT16, ALLOWED };  // kernels/cpu/attention_flash.py, TYPES

// Calls f with a null pointer to the type.
template <class F>
void with_type(int64_t type, F f) {
  if (type == FLOAT32) f(static_cast<float*>(nullptr));
  if (type == BFLOAT16) f(static_cast<BFloat16*>(nullptr));
  if (type == FLOAT16) f(static_cast<Float16*>(nullptr));
}

void widen(const float* from, int64_t n, float* to) { std::copy_n(from, n, to); }

void widen(const BFloat16* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i].bits) << 16;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

void widen(const Float16* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < n; ++i) to[i] = _cvtsh_ss(from[i].bits);
}

void widen(const Allowed* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i].byte ? 0.0f : NEVER;
}

void narrow(const float* from, int64_t n, float* to) { std::copy_n(from, n, to); }

// To the nearest, ties to even, as ATen rounds.
void narrow(const float* from, int64_t n, BFloat16* to) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to[i].bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;  // the sum carries a NaN's bits into the sign
  }
}

void narrow(const float* from, int64_t n, Float16* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; ++i) to[i].bits = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}

template <class E>
void widen_rows(const E* from, int64_t ld, int64_t rows, int64_t cols, float* to, int64_t ld_to) {
  for (int64_t r = 0; r < rows; ++r) widen(from + r * ld, cols, to + r * ld_to);
}

template <class E>
void narrow_rows(const float* from, int64_t ld, int64_t rows, int64_t cols, E* to, int64_t ld_to) {
  for (int64_t r = 0; r < rows; ++r) narrow(from + r * ld, cols, to + r * ld_to);
}

// Rows of a tile in float32: where they lie, or, of another type, in ``copy`` [rows, cols].
inline std::pair<const float*, int64_t> as_float(const float* from, int64_t ld, int64_t, int64_t, float*) { return {from, ld}; }

template <class E>
std::pair<const float*, int64_t> as_float(const E* from, int64_t ld, int64_t rows, int64_t cols, float* copy) {
  widen_rows(from, ld, rows, cols, copy, cols);
  return {copy, cols};
}

// to [cols, rows] = from [rows, cols] * factor, of any two types
template <class E, class G>
void transpose(const E* from, int64_t ld, int64_t rows, int64_t cols, G* to, int64_t ld_to, float factor = 1.0f) {
  constexpr int64_t S = 16;  // a square of which both sides fill whole vectors
  float square[S][S], turned[S][S];
  for (int64_t r = 0; r < rows; r += S)
    for (int64_t c = 0; c < cols; c += S) {
      const int64_t height = std::min(S, rows - r), width = std::min(S, cols - c);
      for (int64_t y = 0; y < height; ++y) widen(from + (r + y) * ld + c, width, square[y]);
      for (int64_t x = 0; x < S; ++x)
        for (int64_t y = 0; y < S; ++y) turned[x][y] = square[y][x] * factor;
      for (int64_t x = 0; x < width; ++x) narrow(turned[x], height, to + (c + x) * ld_to + r);
    }
}

}  // namespace
