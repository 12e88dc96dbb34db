// What the kernels of this folder share. Its files are one source, in the order of their names.
//
// Tiles are multiplied by oneDNN's small matrix product ("brgemm"), which ATen exports. Its declaration is repeated here:
// the header, ATen/native/CPUBlas.h, includes more than takes all of these files to compile.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

namespace at::native::cpublas {
void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const float* a, const float* b, float* c, bool vnni);
void brgemm_release(bool vnni);
}  // namespace at::native::cpublas

namespace {

float* buffer(int64_t floats) { return static_cast<float*>(::operator new(floats * sizeof(float), std::align_val_t(64))); }

void release(float* data) {
  at::native::cpublas::brgemm_release(false);
  ::operator delete(data, std::align_val_t(64));
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

}  // namespace
