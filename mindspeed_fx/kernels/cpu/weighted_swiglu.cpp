// silu(gate) * up * weight and its gradients, row by row, in one pass each. See kernels/cpu/weighted_swiglu.py.

namespace {

constexpr int64_t PIECE = 512;  // elements of a row that are widened at a time: they stay in the first-level cache

struct Rows {
  char* data;
  int64_t stride;  // of rows, in elements

  template <class E>
  E* row(int64_t r, E*) const {
    return reinterpret_cast<E*>(data) + r * stride;
  }
};

struct Gate {
  int64_t rows, width, threads, type;
  Rows gate, up, out;      // out: of the product
  Rows grad, dgate, dup;   // of the gradients
  const float* weight;     // [rows]
  float* dweight;          // [rows]
};

// None below -88, where the exponential would overflow: what is left there times the largest number would be some.
inline float sigmoid(float x) { return x < -88.0f ? 0.0f : 1.0f / (1.0f + exponential(-x)); }

template <class E>
void multiply_row(const Gate& p, int64_t r, E* type) {
  const E *gate = p.gate.row(r, type), *up = p.up.row(r, type);
  E* out = p.out.row(r, type);
  const float weight = p.weight[r];
  float g[PIECE], u[PIECE];
  for (int64_t first = 0; first < p.width; first += PIECE) {
    const int64_t n = std::min(PIECE, p.width - first);
    widen(gate + first, n, g);
    widen(up + first, n, u);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) g[i] = g[i] * sigmoid(g[i]) * u[i] * weight;
    narrow(g, n, out + first);
  }
}

template <class E>
void gradients_of_row(const Gate& p, int64_t r, E* type) {
  const E *grad = p.grad.row(r, type), *gate = p.gate.row(r, type), *up = p.up.row(r, type);
  E *dgate = p.dgate.row(r, type), *dup = p.dup.row(r, type);
  const float weight = p.weight[r];
  float d[PIECE], g[PIECE], u[PIECE], sum = 0.0f;
  for (int64_t first = 0; first < p.width; first += PIECE) {
    const int64_t n = std::min(PIECE, p.width - first);
    widen(grad + first, n, d);
    widen(gate + first, n, g);
    widen(up + first, n, u);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) {
      const float s = sigmoid(g[i]), silu = g[i] * s, scaled = d[i] * weight;
      sum += d[i] * silu * u[i];
      g[i] = scaled * u[i] * s * (1.0f + g[i] * (1.0f - s));
      u[i] = scaled * silu;
    }
    narrow(g, n, dgate + first);
    narrow(u, n, dup + first);
  }
  p.dweight[r] = sum;
}

}  // namespace

extern "C" int gate_product(const Gate* p) {
#pragma omp parallel for num_threads(p->threads)
  for (int64_t r = 0; r < p->rows; ++r) with_type(p->type, [&](auto* type) { multiply_row(*p, r, type); });
  return 0;
}

extern "C" int gate_gradient(const Gate* p) {
#pragma omp parallel for num_threads(p->threads)
  for (int64_t r = 0; r < p->rows; ++r) with_type(p->type, [&](auto* type) { gradients_of_row(*p, r, type); });
  return 0;
}
