// What the kernels of this folder share. Its files are one source, in the order of their names.
//
// Tiles are multiplied by oneDNN's small matrix product ("brgemm"), which ATen exports. Its declaration is repeated here:
// the header, ATen/native/CPUBlas.h, includes more than takes all of these files to compile.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <limits>
#include <new>
#include <utility>

namespace c10 {
struct BFloat16;
}
namespace at::native::cpublas {
void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const float* a, const float* b, float* c, bool vnni);
void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool vnni);
void brgemm_release(bool vnni);
}  // namespace at::native::cpublas

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int64_t ROWS = 64, DEPTH = 256, COLUMNS = 128;  // of a tile of a large product's result, and of one small product

int64_t parts(int64_t of, int64_t size) { return (of + size - 1) / size; }

int64_t padded(int64_t size) { return parts(size, 16) * 16; }  // few sizes of products: each is compiled when it is met

// A thread's work buffer, or null where there is no memory: an exception must not leave a parallel region. All threads ask
// ``has_all`` before they share work, and all get one answer. ``pairs``: whether its tiles are pairs of bfloat16.
class Buffer {
 public:
  Buffer(int64_t floats, std::atomic<bool>& failed, bool pairs = false) : pairs(pairs), data(static_cast<float*>(::operator new(floats * sizeof(float), std::align_val_t(64), std::nothrow))) {
    if (!data) failed = true;
  }
  ~Buffer() {
    at::native::cpublas::brgemm_release(pairs);
    if (data) ::operator delete(data, std::align_val_t(64));
  }
  Buffer(const Buffer&) = delete;
  const bool pairs;
  float* const data;
};

bool has_all(const std::atomic<bool>& failed) {
#pragma omp barrier
  return !failed;
}

// c [m, n] (+)= a [m, k] b [k, n]
void product(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, false);
}

constexpr int64_t SQUARE = 16;  // rows and columns of which both fill whole vectors

// to = from^T, of SQUARE x SQUARE numbers of 32 bits; ``from_step`` and ``to_step`` are bytes from row to row.
inline void turn(const void* from, int64_t from_step, void* to, int64_t to_step) {
  const char* in = static_cast<const char*>(from);
  char* out = static_cast<char*>(to);
#ifdef __AVX512F__
  __m512i x[SQUARE], y[SQUARE];  // rows are merged with their neighbours, then pairs, fours and eights of them
  for (int64_t i = 0; i < SQUARE; ++i) x[i] = _mm512_loadu_si512(in + i * from_step);
  for (int64_t i = 0; i < SQUARE; i += 2) y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  for (int64_t i = 0; i < SQUARE; i += 4)
    for (int64_t k = 0; k < 2; ++k) {
      x[i + 2 * k] = _mm512_unpacklo_epi64(y[i + k], y[i + k + 2]);
      x[i + 2 * k + 1] = _mm512_unpackhi_epi64(y[i + k], y[i + k + 2]);
    }
  constexpr int EVEN = 0x88, ODD = 0xdd;
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t k = 0; k < SQUARE; k += 8) {
      y[i + k] = _mm512_shuffle_i32x4(x[i + k], x[i + k + 4], EVEN);
      y[i + k + 4] = _mm512_shuffle_i32x4(x[i + k], x[i + k + 4], ODD);
    }
  for (int64_t i = 0; i < 8; ++i) {
    _mm512_storeu_si512(out + i * to_step, _mm512_shuffle_i32x4(y[i], y[i + 8], EVEN));
    _mm512_storeu_si512(out + (i + 8) * to_step, _mm512_shuffle_i32x4(y[i], y[i + 8], ODD));
  }
#else
  uint32_t rows[SQUARE][SQUARE];
  for (int64_t i = 0; i < SQUARE; ++i) std::memcpy(rows[i], in + i * from_step, sizeof(rows[i]));
  for (int64_t i = 0; i < SQUARE; ++i) {
    uint32_t column[SQUARE];
    for (int64_t k = 0; k < SQUARE; ++k) column[k] = rows[k][i];
    std::memcpy(out + i * to_step, column, sizeof(column));
  }
#endif
}

// to [cols, rows] = from [rows, cols] * factor
void transpose(const float* from, int64_t ld, int64_t rows, int64_t cols, float* to, int64_t ld_to, float factor = 1.0f) {
  for (int64_t r = 0; r < rows; r += SQUARE)
    for (int64_t c = 0; c < cols; c += SQUARE) {
      const int64_t height = std::min(SQUARE, rows - r), width = std::min(SQUARE, cols - c);
      const float* in = from + r * ld + c;
      float* out = to + c * ld_to + r;
      if (height == SQUARE && width == SQUARE) {
        turn(in, ld * sizeof(float), out, ld_to * sizeof(float));
        for (int64_t x = 0; x < SQUARE && factor != 1.0f; ++x)
          for (int64_t y = 0; y < SQUARE; ++y) out[x * ld_to + y] *= factor;
      } else {
        for (int64_t y = 0; y < height; ++y)
          for (int64_t x = 0; x < width; ++x) out[x * ld_to + y] = in[y * ld + x] * factor;
      }
    }
}

// e^x to 2 units in the last place, and 0 below the smallest normal number. Cephes, expf.
inline float exponential(float x) {
  const float n = std::nearbyint(x * 1.44269504088896341f);
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(std::max(n, -126.0f)) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < -87.0f ? 0.0f : p * power;
}

inline float tangent(float x) { return 1.0f - 2.0f / (exponential(2.0f * std::min(x, 20.0f)) + 1.0f); }

}  // namespace
