// Gradients of silu(gate) * up * weight, row by row, in one pass. See kernels/cpu/gate_gradient.py.

namespace {

constexpr int64_t PIECE = 512;  // elements of a row that are widened at a time: they stay in the first-level cache

struct Gate {
  int64_t rows, width, threads, type;
  const char *grad, *gate, *up;
  int64_t grad_row, gate_row, up_row;  // strides of rows, in elements
  char *dgate, *dup;
  int64_t dgate_row, dup_row;
  const float* weight;  // [rows], or null for ones
  float* dweight;       // [rows], or null
};

template <class E>
void gradients_of_row(const Gate& p, int64_t r, E*) {
  const E* grad = reinterpret_cast<const E*>(p.grad) + r * p.grad_row;
  const E* gate = reinterpret_cast<const E*>(p.gate) + r * p.gate_row;
  const E* up = reinterpret_cast<const E*>(p.up) + r * p.up_row;
  E* dgate = reinterpret_cast<E*>(p.dgate) + r * p.dgate_row;
  E* dup = reinterpret_cast<E*>(p.dup) + r * p.dup_row;
  const float weight = p.weight ? p.weight[r] : 1.0f;
  float d[PIECE], g[PIECE], u[PIECE], sum = 0.0f;
  for (int64_t first = 0; first < p.width; first += PIECE) {
    const int64_t n = std::min(PIECE, p.width - first);
    widen(grad + first, n, d);
    widen(gate + first, n, g);
    widen(up + first, n, u);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) {
      const float s = 1.0f / (1.0f + exponential(std::min(-g[i], 88.0f))), silu = g[i] * s;
      const float scaled = d[i] * weight;
      sum += d[i] * silu * u[i];
      g[i] = scaled * u[i] * s * (1.0f + g[i] * (1.0f - s));
      u[i] = scaled * silu;
    }
    narrow(g, n, dgate + first);
    narrow(u, n, dup + first);
  }
  if (p.dweight) p.dweight[r] = sum;
}

}  // namespace

extern "C" int gate_gradient(const Gate* p) {
#pragma omp parallel for num_threads(p->threads)
  for (int64_t r = 0; r < p->rows; ++r) with_type(p->type, [&](auto* type) { gradients_of_row(*p, r, type); });
  return 0;
}
