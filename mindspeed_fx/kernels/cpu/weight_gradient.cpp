// out [m, n] (+)= scale a^T b of a [k, m] and b [k, n] in float32, contiguous. See kernels/weight_gradient.py.
//
// Every tile of a is transposed once, b is copied once into panels whose rows lie side by side, and both then stay in a
// second-level cache for as long as they are used.

// packed: n * k floats. Returns 1 where there is no memory.
extern "C" int weight_gradient(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* out, float* packed, float scale, int64_t add, int64_t threads) {
  const int64_t row_tiles = parts(m, ROWS), panels = parts(n, COLUMNS), steps = parts(k, DEPTH);
  // Few rows leave threads without work: then several share a tile of a, each with panels of its own.
  const int64_t groups = std::clamp<int64_t>(parts(2 * threads, row_tiles), 1, panels), share = parts(panels, groups);
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(threads)
  {
#pragma omp for collapse(2)
    for (int64_t j = 0; j < panels; ++j)
      for (int64_t y = 0; y < k; ++y) {
        const int64_t width = std::min(COLUMNS, n - j * COLUMNS);
        std::copy_n(b + y * n + j * COLUMNS, width, packed + j * COLUMNS * k + y * width);
      }
    const Buffer work(ROWS * DEPTH, failed);
    const int64_t all = has_all(failed) ? row_tiles : 0;
    float* at = work.data;
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t i = 0; i < all; ++i)
      for (int64_t g = 0; g < groups; ++g)
        for (int64_t c = 0; c < steps; ++c) {
          const int64_t rows = std::min(ROWS, m - i * ROWS), depth = std::min(DEPTH, k - c * DEPTH);
          transpose(a + c * DEPTH * m + i * ROWS, m, depth, rows, at, DEPTH, scale);
          for (int64_t j = g * share; j < std::min(panels, (g + 1) * share); ++j) {
            const int64_t width = std::min(COLUMNS, n - j * COLUMNS);
            product(rows, width, depth, at, DEPTH, packed + j * COLUMNS * k + c * DEPTH * width, width, out + i * ROWS * n + j * COLUMNS, n, add || c > 0);
          }
        }
  }
  return failed;
}
