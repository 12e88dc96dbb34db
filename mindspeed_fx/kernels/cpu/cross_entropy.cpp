// Losses of rows of logits and the gradients of the logits, computed in float32. See kernels/linear_cross_entropy_work.py.
//
// A row is read from memory once: what comes after finds it in a second-level cache, where one of 16 bits is widened.

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

struct Settings {
  float smoothing, z_loss, softcap;
};

// The loss of the logits x, which are overwritten; g, the gradient of up * loss, may be x, or null.
float loss_of_row(float* x, float* g, int64_t vocab, int64_t target, float up, const Settings& s) {
  const auto larger = [](float a, float b) { return std::max(a, b); };
  const auto plus = [](float a, float b) { return a + b; };
  if (s.softcap)
    for (int64_t i = 0; i < vocab; ++i) x[i] = s.softcap * tangent(x[i] / s.softcap);
  const float top = fold(x, vocab, NEVER, [](float a, float b, int64_t) { return std::max(a, b); }, larger);
  const float mean = s.smoothing ? fold(x, vocab, 0.0f, [](float a, float b, int64_t) { return a + b; }, plus) / vocab : 0.0f;
  const float picked = x[target];
  const bool keep = g && !s.softcap;  // exponentials, in the place of the logits; with a soft-cap its slope needs those
  const float sum = keep ? fold(x, vocab, 0.0f, [=](float a, float b, int64_t i) { return a + (g[i] = exponential(b - top)); }, plus)
                         : fold(x, vocab, 0.0f, [=](float a, float b, int64_t) { return a + exponential(b - top); }, plus);
  const float lse = top + std::log(sum);
  const float factor = up * (1.0f + 2.0f * s.z_loss * lse), even = up * s.smoothing / vocab;
  if (keep) {
    const float over = factor / sum;
    for (int64_t i = 0; i < vocab; ++i) g[i] = g[i] * over - even;
    g[target] -= up * (1.0f - s.smoothing);
  } else if (g) {
    const float softcap = s.softcap, slope = 1.0f - (picked / softcap) * (picked / softcap);
#pragma omp simd
    for (int64_t i = 0; i < vocab; ++i) g[i] = (exponential(x[i] - lse) * factor - even) * (1.0f - (x[i] / softcap) * (x[i] / softcap));
    g[target] -= up * (1.0f - s.smoothing) * slope;
  }
  return lse - (1.0f - s.smoothing) * picked - s.smoothing * mean + s.z_loss * lse * lse;
}

}  // namespace

// losses [rows], zero where a target is below zero, as the gradients there are; d [rows, vocab] the gradients of
// sum(upstream * losses), may be the logits themselves, or null; upstream [rows] or null for ones. Logits in float32 are
// overwritten. ``type`` is that of logits and d. Returns 1 where there is no memory.
extern "C" int cross_entropy(int64_t type, int64_t rows, int64_t vocab, void* logits, void* d, const int64_t* target, const float* upstream, float* losses, float smoothing, float z_loss, float softcap, int64_t threads) {
  const Settings settings = {smoothing, z_loss, softcap};
  std::atomic<bool> failed{false};
  with_type(type, [&](auto* null) {
    using E = std::remove_pointer_t<decltype(null)>;
    constexpr bool is_wide = std::is_same_v<E, float>;
#pragma omp parallel num_threads(threads)
    {
      const Buffer work(is_wide ? 1 : vocab, failed);
      const int64_t all = has_all(failed) ? rows : 0;
#pragma omp for
      for (int64_t r = 0; r < all; ++r) {
        E *from = static_cast<E*>(logits) + r * vocab, *to = d ? static_cast<E*>(d) + r * vocab : nullptr;
        const float up = upstream ? upstream[r] : 1.0f;
        if (target[r] < 0) {
          losses[r] = 0.0f;
          if (to) std::memset(to, 0, vocab * sizeof(E));
          continue;
        }
        if constexpr (is_wide) {
          losses[r] = loss_of_row(from, to, vocab, target[r], up, settings);
        } else {
          widen(from, vocab, work.data);
          losses[r] = loss_of_row(work.data, to ? work.data : nullptr, vocab, target[r], up, settings);
          if (to) narrow(work.data, vocab, to);
        }
      }
    }
  });
  return failed;
}
