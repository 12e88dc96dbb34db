// Flash attention: forward, and backward from its log-sum-exp. See kernels/cpu/attention_flash.py.
//
// All is computed in float32. Tiles of another type E are widened where they enter, results rounded where they leave; the
// gradients of keys and values, to which many tiles add, are float32 and the caller rounds them.
// Tiles of scores are kept transposed, [key, query]: statistics of a query then lie side by side, so that every loop over
// a tile is a plain vector loop and nothing is summed across a vector. Tiles are multiplied by oneDNN's small matrix
// product, which is made for sizes at which the BLAS still unpacks its arguments.

namespace {

constexpr int64_t T = 64;  // queries and keys of a tile: three tiles stay in a first-level cache of 48 KiB

template <class E>
struct View {  // [batch, head, row, *], the last dimension contiguous
  E* data;
  int64_t batch, head, row;
  E* at(int64_t b, int64_t h, int64_t r = 0) const { return data + b * batch + h * head + r * row; }
};

struct Mask {  // [batch, heads, queries, keys], the last dimension contiguous, any stride 0; or null
  int64_t type, batch, head, row;
  const void* data;
};

struct Problem {
  int64_t batch, heads, kv_heads, queries, keys, dim, v_dim, causal, window, threads, gradient_heads, type;
  float scale, softcap;
  Mask mask;
};

template <class E>
View<E> view(int index, void* const* data, const int64_t* strides) {
  return {static_cast<E*>(data[index]), strides[3 * index], strides[3 * index + 1], strides[3 * index + 2]};
}

int64_t tiles(int64_t rows) { return parts(rows, T); }

template <class E>
constexpr int64_t COPIES = std::is_same_v<E, float> ? 0 : 1;  // of a tile in float32

struct Tile {
  int64_t q0, nq, k0, nk;
};

// Tiles of keys that some query of [q0, q0 + nq) sees: [first, second).
std::pair<int64_t, int64_t> seen(const Problem& n, int64_t q0, int64_t nq) {
  const int64_t high = n.causal ? std::min(n.keys, q0 + nq) : n.keys;
  const int64_t low = n.window ? std::max<int64_t>(0, q0 - n.window + 1) : 0;
  return {low / T, std::max(low / T, tiles(high))};
}

// Scores of keys that a query does not see become -inf.
void hide(float* s, const Tile& t, const Problem& n) {
  const bool after = n.causal && t.k0 + t.nk - 1 > t.q0, before = n.window && t.k0 < t.q0 + t.nq - n.window;
  for (int64_t k = 0; k < t.nk && (after || before); ++k) {
    if (after) std::fill(s + k * T, s + k * T + std::clamp<int64_t>(t.k0 + k - t.q0, 0, t.nq), NEVER);
    if (before) std::fill(s + k * T + std::clamp<int64_t>(t.k0 + k + n.window - t.q0, 0, t.nq), s + k * T + t.nq, NEVER);
  }
}

// Adds a tile of the mask to the scores; ``work`` holds a tile.
void add_mask(const Mask& m, int64_t b, int64_t h, const Tile& t, float* s, float* work) {
  const auto add = [&](auto* type) {
    const auto* from = static_cast<decltype(type)>(const_cast<void*>(m.data)) + b * m.batch + h * m.head + t.q0 * m.row + t.k0;
    if (m.row == 0) {  // the same for every query
      widen(from, t.nk, work);
      for (int64_t y = 0; y < t.nk; ++y)
        for (int64_t c = 0; c < t.nq; ++c) s[y * T + c] += work[y];
      return;
    }
    transpose(from, m.row, t.nq, t.nk, work, T);
    for (int64_t y = 0; y < t.nk; ++y)
      for (int64_t c = 0; c < t.nq; ++c) s[y * T + c] += work[y * T + c];
  };
  if (m.type == ALLOWED)
    add(static_cast<Allowed*>(nullptr));
  else
    with_type(m.type, add);
}

// data, strides: q, k, v, out, lse, sinks, packed [batch, kv_heads, tiles of keys, v_dim, T]; sinks may be null.
template <class E>
bool forward(const Problem& n, void* const* data, const int64_t* strides) {
  const View q = view<E>(0, data, strides), k = view<E>(1, data, strides), v = view<E>(2, data, strides), out = view<E>(3, data, strides);
  const View lse = view<float>(4, data, strides);
  const float* sinks = static_cast<const float*>(data[5]);
  float* packed = static_cast<float*>(data[6]);
  const int64_t query_tiles = tiles(n.queries), key_tiles = tiles(n.keys), group = n.heads / n.kv_heads;
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(n.threads)
  {
    const Buffer work(T * T + (COPIES<E> * std::max(n.dim, T) + n.dim + n.v_dim + 4) * T, failed);
    const int64_t batches = has_all(failed) ? n.batch : 0;
#pragma omp for collapse(3)
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t h = 0; h < n.kv_heads; ++h)
        for (int64_t j = 0; j < key_tiles; ++j)
          transpose(v.at(b, h, j * T), v.row, std::min(T, n.keys - j * T), n.v_dim, packed + ((b * n.kv_heads + h) * key_tiles + j) * n.v_dim * T, T);
    float* s = work.data;
    float *qt = s + T * T, *sum_v = qt + n.dim * T, *top = sum_v + n.v_dim * T, *sum = top + T, *shrink = sum + T, *high = shrink + T, *copy = high + T;
#pragma omp for collapse(3) schedule(dynamic, 1)
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t h = 0; h < n.heads; ++h)
        for (int64_t back = 1; back <= query_tiles; ++back) {  // the last rows, which see the most keys, first
          const int64_t q0 = (query_tiles - back) * T, nq = std::min(T, n.queries - q0);
          const auto [low, end] = seen(n, q0, nq);
          transpose(q.at(b, h, q0), q.row, nq, n.dim, qt, T, n.scale);
          std::fill(top, top + T, sinks ? sinks[h] : NEVER);
          std::fill(sum, sum + T, sinks ? 1.0f : 0.0f);
          if (low == end) std::fill(sum_v, sum_v + n.v_dim * T, 0.0f);
          for (int64_t j = low; j < end; ++j) {
            const Tile t{q0, nq, j * T, std::min(T, n.keys - j * T)};
            const auto [keys, key_row] = as_float(k.at(b, h / group, t.k0), k.row, t.nk, n.dim, copy);
            product(t.nk, nq, n.dim, keys, key_row, qt, T, s, T, false);
            if (n.softcap)
              for (int64_t x = 0; x < t.nk * T; ++x) s[x] = n.softcap * tangent(s[x] / n.softcap);
            if (n.mask.data) add_mask(n.mask, b, h, t, s, copy);
            hide(s, t, n);
            std::copy(top, top + T, high);
            for (int64_t y = 0; y < t.nk; ++y)
              for (int64_t c = 0; c < nq; ++c) high[c] = std::max(high[c], s[y * T + c]);
            for (int64_t c = 0; c < nq; ++c) {
              const float to = high[c] == NEVER ? 0.0f : high[c];
              shrink[c] = exponential(top[c] - to);
              sum[c] *= shrink[c];
              top[c] = high[c];
              high[c] = to;
            }
            for (int64_t y = 0; y < t.nk; ++y)
              for (int64_t c = 0; c < nq; ++c) {
                const float e = exponential(s[y * T + c] - high[c]);
                s[y * T + c] = e;
                sum[c] += e;
              }
            if (j > low)
              for (int64_t x = 0; x < n.v_dim; ++x)
                for (int64_t c = 0; c < nq; ++c) sum_v[x * T + c] *= shrink[c];
            product(n.v_dim, nq, t.nk, packed + ((b * n.kv_heads + h / group) * key_tiles + j) * n.v_dim * T, T, s, T, sum_v, T, j > low);
          }
          for (int64_t c = 0; c < nq; ++c) {
            *lse.at(b, h, q0 + c) = top[c] + std::log(sum[c]);
            shrink[c] = sum[c] == 0.0f ? 0.0f : 1.0f / sum[c];  // a row that sees no key is zero
          }
          for (int64_t x = 0; x < n.v_dim; ++x)
            for (int64_t c = 0; c < nq; ++c) sum_v[x * T + c] *= shrink[c];
          transpose(sum_v, T, n.v_dim, nq, out.at(b, h, q0), out.row);
        }
  }
  return failed;
}

// data, strides: grad, q, k, v, out, lse, dq, dk, dv. dk and dv are float32 and have gradient_heads heads: a multiple of kv_heads that divides heads.
template <class E>
bool backward(const Problem& n, void* const* data, const int64_t* strides) {
  const View grad = view<E>(0, data, strides), q = view<E>(1, data, strides), k = view<E>(2, data, strides), v = view<E>(3, data, strides), out = view<E>(4, data, strides),
             dq = view<E>(6, data, strides);
  const View lse = view<float>(5, data, strides), dk = view<float>(7, data, strides), dv = view<float>(8, data, strides);
  const int64_t query_tiles = tiles(n.queries), key_tiles = tiles(n.keys), group = n.heads / n.gradient_heads, share = n.gradient_heads / n.kv_heads;
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(n.threads)
  {
    const Buffer work(key_tiles * T * n.dim + 3 * T * T + (2 * n.dim + n.v_dim + 2 + COPIES<E> * (2 * n.dim + 3 * n.v_dim + T)) * T, failed);
    const int64_t batches = has_all(failed) ? n.batch : 0;
    float* kt = work.data;
    float *p = kt + key_tiles * T * n.dim, *ds = p + T * T, *bend = ds + T * T, *qt = bend + T * T, *dqt = qt + n.dim * T, *gt = dqt + n.dim * T;
    float *delta = gt + n.v_dim * T, *top = delta + T, *q_copy = top + T, *k_copy = q_copy + n.dim * T;
    float *grad_copy = k_copy + n.dim * T, *out_copy = grad_copy + n.v_dim * T, *v_copy = out_copy + n.v_dim * T, *mask = v_copy + n.v_dim * T;
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t g = 0; g < n.gradient_heads; ++g) {
        for (int64_t j = 0; j < key_tiles; ++j) transpose(k.at(b, g / share, j * T), k.row, std::min(T, n.keys - j * T), n.dim, kt + j * T * n.dim, T);
        for (int64_t key = n.causal || !n.queries ? query_tiles * T : n.keys; key < n.keys; ++key) {  // keys that no query sees
          std::fill_n(dk.at(b, g, key), n.dim, 0.0f);
          std::fill_n(dv.at(b, g, key), n.v_dim, 0.0f);
        }
        for (int64_t h = g * group; h < (g + 1) * group; ++h)
          for (int64_t i = 0; i < query_tiles; ++i) {
            const int64_t q0 = i * T, nq = std::min(T, n.queries - q0);
            const auto [low, end] = seen(n, q0, nq);
            const auto [qi, q_row] = as_float(q.at(b, h, q0), q.row, nq, n.dim, q_copy);
            const auto [gi, grad_row] = as_float(grad.at(b, h, q0), grad.row, nq, n.v_dim, grad_copy);
            const auto [oi, out_row] = as_float(out.at(b, h, q0), out.row, nq, n.v_dim, out_copy);
            transpose(qi, q_row, nq, n.dim, qt, T, n.scale);
            transpose(gi, grad_row, nq, n.v_dim, gt, T);
            for (int64_t c = 0; c < nq; ++c) {
              const float *o = oi + c * out_row, *x = gi + c * grad_row, l = *lse.at(b, h, q0 + c);
              float total = 0.0f;
#pragma omp simd reduction(+ : total)
              for (int64_t e = 0; e < n.v_dim; ++e) total += x[e] * o[e];
              delta[c] = total;
              top[c] = l == NEVER ? 0.0f : l;
            }
            if (low == end)
              for (int64_t c = 0; c < nq; ++c) std::fill_n(dq.at(b, h, q0 + c), n.dim, E{});
            for (int64_t j = low; j < end; ++j) {
              const Tile t{q0, nq, j * T, std::min(T, n.keys - j * T)};
              const auto [keys, key_row] = as_float(k.at(b, g / share, t.k0), k.row, t.nk, n.dim, k_copy);
              const auto [values, value_row] = as_float(v.at(b, g / share, t.k0), v.row, t.nk, n.v_dim, v_copy);
              product(t.nk, nq, n.dim, keys, key_row, qt, T, p, T, false);
              product(t.nk, nq, n.v_dim, values, value_row, gt, T, ds, T, false);
              if (n.softcap)
                for (int64_t x = 0; x < t.nk * T; ++x) {
                  const float bent = tangent(p[x] / n.softcap);
                  p[x] = n.softcap * bent;
                  bend[x] = 1.0f - bent * bent;
                }
              if (n.mask.data) add_mask(n.mask, b, h, t, p, mask);
              hide(p, t, n);
              for (int64_t y = 0; y < t.nk; ++y)
                for (int64_t c = 0; c < nq; ++c) {
                  const float e = exponential(p[y * T + c] - top[c]);
                  p[y * T + c] = e;
                  ds[y * T + c] = e * (ds[y * T + c] - delta[c]) * n.scale;
                }
              if (n.softcap)
                for (int64_t x = 0; x < t.nk * T; ++x) ds[x] *= bend[x];
              const bool first = h == g * group && i == (n.causal ? j : 0);  // of the queries that see these keys
              product(t.nk, n.v_dim, nq, p, T, gi, grad_row, dv.at(b, g, t.k0), dv.row, !first);
              product(t.nk, n.dim, nq, ds, T, qi, q_row, dk.at(b, g, t.k0), dk.row, !first);
              product(n.dim, nq, t.nk, kt + j * T * n.dim, T, ds, T, dqt, T, j > low);
            }
            if (low != end) transpose(dqt, T, n.dim, nq, dq.at(b, h, q0), dq.row);
          }
      }
  }
  return failed;
}

}  // namespace

// Both return 1 where there is no memory for the work buffers, and have then written nothing that counts.
extern "C" int attention_forward(const Problem* problem, void* const* data, const int64_t* strides) {
  bool failed = false;
  with_type(problem->type, [&](auto* type) { failed = forward<std::remove_pointer_t<decltype(type)>>(*problem, data, strides); });
  return failed;
}

extern "C" int attention_backward(const Problem* problem, void* const* data, const int64_t* strides) {
  bool failed = false;
  with_type(problem->type, [&](auto* type) { failed = backward<std::remove_pointer_t<decltype(type)>>(*problem, data, strides); });
  return failed;
}
