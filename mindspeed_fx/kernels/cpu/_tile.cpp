// What the kernels of this folder share. Its files are one source, in the order of their names.
//
// Tiles are multiplied by oneDNN's small matrix product ("brgemm"), which ATen exports. Its declaration is repeated here:
// the header, ATen/native/CPUBlas.h, includes more than takes all of these files to compile.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
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

// to [cols, rows] = from [rows, cols] * factor
void transpose(const float* from, int64_t ld, int64_t rows, int64_t cols, float* to, int64_t ld_to, float factor = 1.0f) {
  constexpr int64_t S = 16;  // a square of which both sides fill whole vectors
  float square[S][S];
  for (int64_t r = 0; r < rows; r += S)
    for (int64_t c = 0; c < cols; c += S) {
      const int64_t height = std::min(S, rows - r), width = std::min(S, cols - c);
      if (height == S && width == S) {
        for (int64_t y = 0; y < S; ++y)
          for (int64_t x = 0; x < S; ++x) square[y][x] = from[(r + y) * ld + c + x] * factor;
        for (int64_t x = 0; x < S; ++x)
          for (int64_t y = 0; y < S; ++y) to[(c + x) * ld_to + r + y] = square[y][x];
      } else {
        for (int64_t y = 0; y < height; ++y)
          for (int64_t x = 0; x < width; ++x) to[(c + x) * ld_to + r + y] = from[(r + y) * ld + c + x] * factor;
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
