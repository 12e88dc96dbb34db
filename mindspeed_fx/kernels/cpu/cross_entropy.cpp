// Losses of rows of logits and the gradients of the logits, in float32. See kernels/linear_cross_entropy_work.py.
//
// A row is read from memory once: what comes after finds it in a second-level cache.

namespace {

constexpr int64_t LANES = 64;  // partial maxima and sums of a row, enough to hide the latency of an addition

// f over x[0], x[1] ... with one partial result per lane, which combine joins.
template <class F, class C>
float fold(float* x, int64_t n, float start, F f, C combine) {
  float lane[LANES];
  std::fill(lane, lane + LANES, start);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
#pragma omp simd
    for (int64_t l = 0; l < LANES; ++l) lane[l] = f(lane[l], x[i + l], i + l);
  for (int64_t l = 0; i < n; ++i, ++l) lane[l] = f(lane[l], x[i], i);
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t l = 0; l < half; ++l) lane[l] = combine(lane[l], lane[l + half]);
  return lane[0];
}

}  // namespace

// losses [rows]; d [rows, vocab] the gradients of sum(upstream * losses), may be the logits themselves, or null; upstream
// [rows] or null for ones. The logits are overwritten.
extern "C" int cross_entropy(int64_t rows, int64_t vocab, float* logits, float* d, const int64_t* target, const float* upstream, float* losses, float smoothing, float z_loss, float softcap, int64_t threads) {
  const auto larger = [](float a, float b) { return std::max(a, b); };
  const auto plus = [](float a, float b) { return a + b; };
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    float *x = logits + r * vocab, *g = d ? d + r * vocab : nullptr;
    if (softcap)
      for (int64_t i = 0; i < vocab; ++i) x[i] = softcap * tangent(x[i] / softcap);
    const float top = fold(x, vocab, NEVER, [](float a, float b, int64_t) { return std::max(a, b); }, larger);
    const float mean = smoothing ? fold(x, vocab, 0.0f, [](float a, float b, int64_t) { return a + b; }, plus) / vocab : 0.0f;
    const float picked = x[target[r]];
    const bool keep = g && !softcap;  // exponentials, in the place of the logits; with a soft-cap its slope needs those
    const float sum = keep ? fold(x, vocab, 0.0f, [=](float a, float b, int64_t i) { return a + (g[i] = exponential(b - top)); }, plus)
                           : fold(x, vocab, 0.0f, [=](float a, float b, int64_t) { return a + exponential(b - top); }, plus);
    const float lse = top + std::log(sum);
    losses[r] = lse - (1.0f - smoothing) * picked - smoothing * mean + z_loss * lse * lse;
    if (!g) continue;
    const float up = upstream ? upstream[r] : 1.0f, factor = up * (1.0f + 2.0f * z_loss * lse), even = up * smoothing / vocab;
    if (keep) {
      const float over = factor / sum;
      for (int64_t i = 0; i < vocab; ++i) g[i] = g[i] * over - even;
      g[target[r]] -= up * (1.0f - smoothing);
    } else {
      const float slope = 1.0f - (picked / softcap) * (picked / softcap);
#pragma omp simd
      for (int64_t i = 0; i < vocab; ++i) g[i] = (exponential(x[i] - lse) * factor - even) * (1.0f - (x[i] / softcap) * (x[i] / softcap));
      g[target[r]] -= up * (1.0f - smoothing) * slope;
    }
  }
  return 0;
}
