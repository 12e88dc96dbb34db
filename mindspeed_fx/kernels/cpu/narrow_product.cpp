// out = round(scale a b + bias), or out += scale a b in float32, of operands in any of the types; sums are float32. See
// kernels/cpu/narrow_product.py.
//
// Operands are laid out a block at a time, so that no copy of either is as large as it is. The product is oneDNN's small
// one: in float32, into which blocks are widened, or, where the processor has the instruction, of pairs of bfloat16.

namespace {

constexpr int64_t BLOCK = 1 << 20;  // elements of b that are laid out at a time: they stay in a third-level cache

struct Matrix {
  const char* data;
  int64_t type, batch, row, col;  // strides in elements; of row and col one is 1
};

struct Product {
  int64_t batch, m, n, k, threads, add, pairs;
  Matrix a, b, out;
  const float* bias;  // [n] or null
  float* packed;      // [batch > 1 ? threads : 1, depth, columns of a block]
  float scale;
};

// Columns of b that are laid out at a time: whole panels.
int64_t block_columns(int64_t n, int64_t k) {
  return std::clamp<int64_t>(BLOCK / std::max<int64_t>(1, padded(k)) / COLUMNS, 1, parts(n, COLUMNS)) * COLUMNS;
}

template <class T>
void clear_around(int64_t rows, int64_t cols, T* to, int64_t ld, int64_t padded_rows, int64_t padded_cols) {
  for (int64_t y = 0; y < rows; ++y) std::fill(to + y * ld + cols, to + y * ld + padded_cols, T{});
  for (int64_t y = rows; y < padded_rows; ++y) std::fill_n(to + y * ld, padded_cols, T{});
}

// to [rows, cols] of ld = the matrix from (r, c) on; zero up to padded_rows and padded_cols.
template <class T>
void lay_out(const Matrix& x, int64_t b, int64_t r, int64_t c, int64_t rows, int64_t cols, T* to, int64_t ld, int64_t padded_rows, int64_t padded_cols) {
  with_type(x.type, [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    const auto* from = reinterpret_cast<const E*>(x.data) + b * x.batch + r * x.row + c * x.col;
    if constexpr (std::is_same_v<T, float>) {
      x.col == 1 ? widen_rows(from, x.row, rows, cols, to, ld) : transpose(from, x.col, cols, rows, to, ld);
    } else if constexpr (!std::is_same_v<E, Float16>) {
      x.col == 1 ? narrow_rows(from, x.row, rows, cols, to, ld) : transpose(from, x.col, cols, rows, to, ld);
    }
  });
  clear_around(rows, cols, to, ld, padded_rows, padded_cols);
}

// A tile of the second operand, as its product wants it.
void lay_out_second(const Matrix& x, int64_t b, int64_t r, int64_t c, int64_t rows, int64_t cols, float* to) {
  lay_out(x, b, r, c, rows, cols, to, COLUMNS, padded(rows), padded(cols));
}

void lay_out_second(const Matrix& x, int64_t b, int64_t r, int64_t c, int64_t rows, int64_t cols, BFloat16* to) {
  with_type(x.type, [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    const auto* from = reinterpret_cast<const E*>(x.data) + b * x.batch + r * x.row + c * x.col;
    if constexpr (!std::is_same_v<E, Float16>)
      x.col == 1 ? pair_rows(from, x.row, rows, cols, to, COLUMNS) : pair_columns(from, x.col, cols, rows, to, COLUMNS);
  });
  clear_around(parts(rows, 2), 2 * cols, to, 2 * COLUMNS, padded(rows) / 2, 2 * padded(cols));
}

// One row of the result from its sums.
void put(const Product& p, int64_t b, int64_t row, int64_t first, int64_t width, float* sums) {
  for (int64_t x = 0; x < width; ++x) sums[x] *= p.scale;
  if (p.bias)
    for (int64_t x = 0; x < width; ++x) sums[x] += p.bias[first + x];
  with_type(p.out.type, [&](auto* type) {
    auto* to = reinterpret_cast<decltype(type)>(const_cast<char*>(p.out.data)) + b * p.out.batch + row * p.out.row + first;
    if (p.add) {
      float before[COLUMNS];
      widen(to, width, before);
      for (int64_t x = 0; x < width; ++x) sums[x] += before[x];
    }
    narrow(sums, width, to);
  });
}

// ``T`` is the type of tiles.
template <class T>
bool multiply(const Product& p, int64_t b, int64_t threads, T* packed) {
  const int64_t columns = block_columns(p.n, p.k), row_tiles = parts(p.m, ROWS), steps = parts(p.k, DEPTH), deep = padded(p.k);
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(threads)
  {
    const Buffer work(ROWS * DEPTH + ROWS * columns, failed, std::is_same_v<T, BFloat16>);
    const int64_t all = has_all(failed) ? p.n : 0;
    T* at = reinterpret_cast<T*>(work.data);
    float* sums = work.data + ROWS * DEPTH;  // [panels, ROWS, COLUMNS]
    for (int64_t first = 0; first < all; first += columns) {
      const int64_t width = std::min(columns, p.n - first), panels = parts(width, COLUMNS);
#pragma omp for collapse(2)
      for (int64_t j = 0; j < panels; ++j)
        for (int64_t c = 0; c < steps; ++c) {
          const int64_t depth = std::min(DEPTH, p.k - c * DEPTH), cols = std::min(COLUMNS, width - j * COLUMNS);
          lay_out_second(p.b, b, c * DEPTH, first + j * COLUMNS, depth, cols, packed + j * COLUMNS * deep + c * DEPTH * COLUMNS);
        }
      // Few rows leave threads without work: then several share a tile of a, each with panels of its own.
      const int64_t groups = std::clamp<int64_t>(parts(2 * threads, row_tiles), 1, panels), share = parts(panels, groups);
#pragma omp for collapse(2) schedule(dynamic, 1)
      for (int64_t i = 0; i < row_tiles; ++i)
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t rows = std::min(ROWS, p.m - i * ROWS), end = std::min(panels, (g + 1) * share);
          for (int64_t c = 0; c < steps; ++c) {
            const int64_t depth = std::min(DEPTH, p.k - c * DEPTH);
            lay_out(p.a, b, i * ROWS, c * DEPTH, rows, depth, at, DEPTH, padded(rows), padded(depth));
            for (int64_t j = g * share; j < end; ++j)
              product(padded(rows), padded(std::min(COLUMNS, width - j * COLUMNS)), padded(depth), at, DEPTH, packed + j * COLUMNS * deep + c * DEPTH * COLUMNS, COLUMNS, sums + (j - g * share) * ROWS * COLUMNS, COLUMNS, c > 0);
          }
          for (int64_t j = g * share; j < end; ++j)
            for (int64_t y = 0; y < rows; ++y)
              put(p, b, i * ROWS + y, first + j * COLUMNS, std::min(COLUMNS, width - j * COLUMNS), sums + ((j - g * share) * ROWS + y) * COLUMNS);
        }
    }
  }
  return failed;
}

bool multiply(const Product& p, int64_t b, int64_t threads, float* packed) {
  return p.pairs ? multiply<BFloat16>(p, b, threads, reinterpret_cast<BFloat16*>(packed)) : multiply<float>(p, b, threads, packed);
}

}  // namespace

// Floats that the caller sets aside in ``packed``.
extern "C" int64_t narrow_product_floats(const Product* p) {
  return (p->batch > 1 ? p->threads : 1) * padded(p->k) * block_columns(p->n, p->k);
}

// Returns 1 where there is no memory.
extern "C" int narrow_product(const Product* problem) {
  const Product p = *problem;
  if (p.batch == 1) return multiply(p, 0, p.threads, p.packed);
  const int64_t floats = padded(p.k) * block_columns(p.n, p.k);
  std::atomic<bool> failed{false};
#pragma omp parallel for num_threads(p.threads)
  for (int64_t t = 0; t < p.threads; ++t)
    for (int64_t b = t; b < p.batch; b += p.threads)
      if (multiply(p, b, 1, p.packed + t * floats)) failed = true;
  return failed;
}
