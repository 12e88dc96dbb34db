// bfloat16 and float16, which are stored as 16 bits and computed with in float32. float16's instructions (F16C) are on
// every processor with AVX2.

#include <type_traits>
#include <vector>

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
struct Bit {  // of a mask to multiply with: 1, or 0
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

void widen(const Bit* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i].byte ? 1.0f : 0.0f;
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

// Calls f with two sizes of at most SQUARE, as constants where both are: loops over them are then a few vectors.
template <class F>
void with_sizes(int64_t rows, int64_t cols, F f) {
  constexpr std::integral_constant<int64_t, SQUARE> whole;
  rows == SQUARE && cols == SQUARE ? f(whole, whole) : f(rows, cols);
}

// to [cols, rows] = from [rows, cols] * factor, of any two types
template <class E, class G>
void transpose(const E* from, int64_t ld, int64_t rows, int64_t cols, G* to, int64_t ld_to, float factor = 1.0f) {
  float square[SQUARE][SQUARE], turned[SQUARE][SQUARE];
  for (int64_t r = 0; r < rows; r += SQUARE)
    for (int64_t c = 0; c < cols; c += SQUARE)
      with_sizes(std::min(SQUARE, rows - r), std::min(SQUARE, cols - c), [&](auto height, auto width) {
        for (int64_t y = 0; y < height; ++y) widen(from + (r + y) * ld + c, width, square[y]);
        turn(square, sizeof(square[0]), turned, sizeof(turned[0]));
        for (int64_t x = 0; x < width; ++x) {
          for (int64_t y = 0; y < height; ++y) turned[x][y] *= factor;
          narrow(turned[x], height, to + (c + x) * ld_to + r);
        }
      });
}

// Tiles of bfloat16, multiplied by the processor's instruction for pairs of them. The second operand has two rows side by
// side in each column, [rows / 2, cols, 2] ("VNNI"); a missing last row is zero. float32 is rounded on the way.

// c [m, n] (+)= a [m, k] b [k, n]; ``b`` in pairs of rows, and k even.
void product(int64_t m, int64_t n, int64_t k, const BFloat16* a, int64_t lda, const BFloat16* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, reinterpret_cast<const c10::BFloat16*>(a), reinterpret_cast<const c10::BFloat16*>(b), c, true);
}

inline const BFloat16* as_bfloat16(const BFloat16* from, int64_t, BFloat16*) { return from; }

inline const BFloat16* as_bfloat16(const float* from, int64_t n, BFloat16* copy) {
  narrow(from, n, copy);
  return copy;
}

void narrow_rows(const BFloat16* from, int64_t ld, int64_t rows, int64_t cols, BFloat16* to, int64_t ld_to) {
  for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * ld, cols, to + r * ld_to);
}

typedef uint32_t Pair __attribute__((may_alias));  // two of bfloat16

// pairs [cols] = of two rows
void pair(const BFloat16* first, const BFloat16* second, int64_t cols, Pair* pairs) {
  for (int64_t c = 0; c < cols; ++c) pairs[c] = first[c].bits | static_cast<uint32_t>(second[c].bits) << 16;
}

void pair(const float* first, const float* second, int64_t cols, Pair* pairs) {
  int64_t c = 0;
#ifdef __AVX512BF16__  // rounds to zero what is subnormal, as products of pairs take it
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (; c + 16 <= cols; c += 16) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(second + c), _mm512_loadu_ps(first + c));
    _mm512_storeu_si512(pairs + c, _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(both)));
  }
#endif
  BFloat16 copy[2][SQUARE];
  for (; c < cols; c += SQUARE) {
    const int64_t width = std::min(SQUARE, cols - c);
    narrow(first + c, width, copy[0]);
    narrow(second + c, width, copy[1]);
    pair(copy[0], copy[1], width, pairs + c);
  }
}

// to [rows / 2, cols] of pairs = from [rows, cols]
template <class E>
void pair_rows(const E* from, int64_t ld, int64_t rows, int64_t cols, BFloat16* to, int64_t ld_to) {
  const std::vector<E> zeros(rows % 2 ? cols : 0);
  for (int64_t r = 0; r < rows; r += 2) pair(from + r * ld, r + 1 < rows ? from + (r + 1) * ld : zeros.data(), cols, reinterpret_cast<Pair*>(to + r * ld_to));
}

// to [cols / 2, rows] of pairs = from [rows, cols]: what is side by side stays so.
template <class E>
void pair_columns(const E* from, int64_t ld, int64_t rows, int64_t cols, BFloat16* to, int64_t ld_to) {
  uint32_t square[SQUARE][SQUARE], turned[SQUARE][SQUARE];
  for (int64_t r = 0; r < rows; r += SQUARE)
    for (int64_t c = 0; c < cols; c += 2 * SQUARE) {
      const int64_t left = std::min(2 * SQUARE, cols - c);
      with_sizes(std::min(SQUARE, rows - r), parts(left, 2), [&](auto height, auto pairs) {
        const int64_t width = left % 2 ? left : 2 * pairs;
        BFloat16 copy[2 * SQUARE];
        for (int64_t y = 0; y < height; ++y) {
          if (width % 2) square[y][pairs - 1] = 0;
          std::memcpy(square[y], as_bfloat16(from + (r + y) * ld + c, width, copy), width * sizeof(BFloat16));
        }
        turn(square, sizeof(square[0]), turned, sizeof(turned[0]));
        for (int64_t x = 0; x < pairs; ++x) std::memcpy(to + (c / 2 + x) * 2 * ld_to + 2 * r, turned[x], height * sizeof(uint32_t));
      });
    }
}

}  // namespace

// Whether pairs of bfloat16 can be multiplied here: oneDNN has no other way to be asked.
extern "C" int multiplies_pairs() {
  try {
    alignas(64) BFloat16 a[16 * 16] = {}, b[16 * 16] = {};
    alignas(64) float c[16 * 16] = {};
    product(16, 16, 16, a, 16, b, 16, c, 16, false);
    at::native::cpublas::brgemm_release(true);
    return 1;
  } catch (...) {
    return 0;
  }
}
