// Flash attention: forward, and backward from its log-sum-exp. See kernels/cpu/attention_flash.py.
//
// All is computed in float32. Tiles of another type E are widened where they enter, results rounded where they leave; the
// gradients of keys and values, to which many tiles add, are float32 and the caller rounds them. Where the processor
// multiplies pairs of bfloat16, tiles of that type enter products as they are (M), with weights and their gradients rounded.
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
  int64_t batch, heads, kv_heads, queries, keys, dim, v_dim, causal, window, threads, gradient_heads, type, pairs;
  float scale, softcap, kept;  // what dropout multiplies the weights with that it keeps
  Mask mask, keep;
};

template <class E>
View<E> view(int index, void* const* data, const int64_t* strides) {
  return {static_cast<E*>(data[index]), strides[3 * index], strides[3 * index + 1], strides[3 * index + 2]};
}

int64_t tiles(int64_t rows) { return parts(rows, T); }

template <class E>
constexpr int64_t COPIES = std::is_same_v<E, float> ? 0 : 1;  // of a tile in float32, beside one of the mask

struct Tile {
  int64_t q0, nq, k0, nk;
};

// How tiles enter a product a [m, k] b [k, n] whose operands are of type M: what is made of a tile x [rows, cols] lies in
// ``to``, with rows of T where no other length is given; or x is taken as it is.
template <class M>
struct Operand;

template <>
struct Operand<float> {
  static int64_t depth(int64_t k) { return k; }
  template <class E>
  static std::pair<const float*, int64_t> first(const E* x, int64_t ld, int64_t rows, int64_t cols, float* to) {  // a = x
    return as_float(x, ld, rows, cols, to);
  }
  template <class E>
  static std::pair<const float*, int64_t> second(const E* x, int64_t ld, int64_t rows, int64_t cols, float* to, int64_t = T) {  // b = x
    return as_float(x, ld, rows, cols, to);
  }
  template <class E>
  static void first_turned(const E* x, int64_t ld, int64_t rows, int64_t cols, float* to) {  // a = x^T
    transpose(x, ld, rows, cols, to, T);
  }
  template <class E>
  static void second_turned(const E* x, int64_t ld, int64_t rows, int64_t cols, float* to, float factor = 1.0f) {  // b = x^T * factor, or
    transpose(x, ld, rows, cols, to, T, factor);
  }
  static void scale(float*, int64_t, float) {}  // the factor here, on the product
};

template <>
struct Operand<BFloat16> {
  static int64_t depth(int64_t k) { return k + k % 2; }  // what is added is zero
  static std::pair<const BFloat16*, int64_t> first(const BFloat16* x, int64_t ld, int64_t, int64_t, BFloat16*) { return {x, ld}; }
  static std::pair<const BFloat16*, int64_t> first(const float* x, int64_t ld, int64_t rows, int64_t cols, BFloat16* to) {
    narrow_rows(x, ld, rows, cols, to, T);
    end_pairs(to, rows, cols);
    return {to, T};
  }
  template <class E>
  static std::pair<const BFloat16*, int64_t> second(const E* x, int64_t ld, int64_t rows, int64_t cols, BFloat16* to, int64_t ld_to = T) {
    pair_rows(x, ld, rows, cols, to, ld_to);
    return {to, ld_to};
  }
  static void first_turned(const BFloat16* x, int64_t ld, int64_t rows, int64_t cols, BFloat16* to) {
    transpose(x, ld, rows, cols, to, T);
    end_pairs(to, cols, rows);
  }
  static void second_turned(const BFloat16* x, int64_t ld, int64_t rows, int64_t cols, BFloat16* to, float = 1.0f) {
    pair_columns(x, ld, rows, cols, to, T);
  }
  static void scale(float* x, int64_t n, float factor) {
    for (int64_t i = 0; i < n; ++i) x[i] *= factor;
  }

 private:
  static void end_pairs(BFloat16* to, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows && cols % 2; ++r) to[r * T + cols] = BFloat16{};
  }
};

// As in attention.py.
constexpr float FAR = 4096.0f;

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

// Adds a tile of the mask to the scores, or sets those that it does not allow, be they NaN; ``work`` holds a tile.
void add_mask(const Mask& m, int64_t b, int64_t h, const Tile& t, float* s, float* work) {
  const auto add = [&](auto* type) {
    constexpr bool SETS = std::is_same_v<decltype(type), Allowed*>;
    const auto masked = [](float score, float mask) { return !SETS ? score + mask : mask < 0.0f ? mask : score; };
    const auto* from = static_cast<decltype(type)>(const_cast<void*>(m.data)) + b * m.batch + h * m.head + t.q0 * m.row + t.k0;
    if (m.row == 0) {  // the same for every query
      widen(from, t.nk, work);
      for (int64_t y = 0; y < t.nk; ++y)
        for (int64_t c = 0; c < t.nq; ++c) s[y * T + c] = masked(s[y * T + c], work[y]);
      return;
    }
    transpose(from, m.row, t.nq, t.nk, work, T);
    for (int64_t y = 0; y < t.nk; ++y)
      for (int64_t c = 0; c < t.nq; ++c) s[y * T + c] = masked(s[y * T + c], work[y * T + c]);
  };
  if (m.type == ALLOWED)
    add(static_cast<Allowed*>(nullptr));
  else
    with_type(m.type, add);
}

// Whether a boolean mask, or anything else, lets some query of the tile see some key of it.
bool sees(const Mask& m, int64_t b, int64_t h, const Tile& t) {
  if (!m.data || m.type != ALLOWED) return true;
  const auto* from = static_cast<const uint8_t*>(m.data) + b * m.batch + h * m.head + t.q0 * m.row + t.k0;
  uint8_t any = 0;
  for (int64_t r = 0; r < (m.row ? t.nq : 1); ++r)
    for (int64_t c = 0; c < t.nk; ++c) any |= from[r * m.row + c];
  return any;
}

// to [key, query] = what dropout multiplies the weights of a tile with
void factors(const Problem& n, int64_t b, int64_t h, const Tile& t, float* to) {
  const auto* from = static_cast<const Bit*>(n.keep.data) + b * n.keep.batch + h * n.keep.head + t.q0 * n.keep.row + t.k0;
  transpose(from, n.keep.row, t.nq, t.nk, to, T, n.kept);
}

// data, strides: q, k, v, out, lse, sinks, packed [batch, kv_heads, tiles of keys, v_dim, T]; sinks may be null.
template <class E, class M>
bool forward(const Problem& n, void* const* data, const int64_t* strides) {
  const View q = view<E>(0, data, strides), k = view<E>(1, data, strides), v = view<E>(2, data, strides), out = view<E>(3, data, strides);
  const View lse = view<float>(4, data, strides);
  using O = Operand<M>;
  const float* sinks = static_cast<const float*>(data[5]);
  M* packed = static_cast<M*>(data[6]);
  const int64_t query_tiles = tiles(n.queries), key_tiles = tiles(n.keys), group = n.heads / n.kv_heads;
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(n.threads)
  {
    const int64_t copies = std::max(COPIES<E> * n.dim, T);
    const Buffer work(2 * T * T + (copies + n.dim + n.v_dim + 4) * T, failed, !std::is_same_v<M, float>);
    const int64_t batches = has_all(failed) ? n.batch : 0;
#pragma omp for collapse(3)
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t h = 0; h < n.kv_heads; ++h)
        for (int64_t j = 0; j < key_tiles; ++j)
          O::first_turned(v.at(b, h, j * T), v.row, std::min(T, n.keys - j * T), n.v_dim, packed + ((b * n.kv_heads + h) * key_tiles + j) * n.v_dim * T);
    float *s = work.data, *sum_v = s + T * T, *top = sum_v + n.v_dim * T, *sum = top + T, *shrink = sum + T, *high = shrink + T, *copy = high + T;
    float* operands = copy + copies * T;
    M *qt = reinterpret_cast<M*>(operands), *weights_copy = reinterpret_cast<M*>(operands + n.dim * T);
#pragma omp for collapse(3) schedule(dynamic, 1)
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t h = 0; h < n.heads; ++h)
        for (int64_t back = 1; back <= query_tiles; ++back) {  // the last rows, which see the most keys, first
          const int64_t q0 = (query_tiles - back) * T, nq = std::min(T, n.queries - q0);
          const auto [low, end] = seen(n, q0, nq);
          O::second_turned(q.at(b, h, q0), q.row, nq, n.dim, qt, n.scale);
          std::fill(top, top + T, sinks ? sinks[h] : NEVER);
          std::fill(sum, sum + T, sinks ? 1.0f : 0.0f);
          bool started = false;
          for (int64_t j = low; j < end; ++j) {
            const Tile t{q0, nq, j * T, std::min(T, n.keys - j * T)};
            if (!sees(n.mask, b, h, t)) continue;
            const auto [keys, key_row] = O::first(k.at(b, h / group, t.k0), k.row, t.nk, n.dim, reinterpret_cast<M*>(copy));
            product(t.nk, nq, n.dim, keys, key_row, qt, T, s, T, false);
            O::scale(s, t.nk * T, n.scale);
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
            if (started)
              for (int64_t x = 0; x < n.v_dim; ++x)
                for (int64_t c = 0; c < nq; ++c) sum_v[x * T + c] *= shrink[c];
            if (n.keep.data) {  // the sum is of all
              factors(n, b, h, t, copy);
              for (int64_t y = 0; y < t.nk; ++y)
                for (int64_t c = 0; c < nq; ++c) s[y * T + c] *= copy[y * T + c];
            }
            const auto [weights, weights_row] = O::second(s, T, t.nk, nq, weights_copy);
            product(n.v_dim, nq, O::depth(t.nk), packed + ((b * n.kv_heads + h / group) * key_tiles + j) * n.v_dim * T, T, weights, weights_row, sum_v, T, started);
            started = true;
          }
          if (!started) std::fill(sum_v, sum_v + n.v_dim * T, 0.0f);
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
template <class E, class M>
bool backward(const Problem& n, void* const* data, const int64_t* strides) {
  const View grad = view<E>(0, data, strides), q = view<E>(1, data, strides), k = view<E>(2, data, strides), v = view<E>(3, data, strides), out = view<E>(4, data, strides),
             dq = view<E>(6, data, strides);
  const View lse = view<float>(5, data, strides), dk = view<float>(7, data, strides), dv = view<float>(8, data, strides);
  using O = Operand<M>;
  const int64_t query_tiles = tiles(n.queries), key_tiles = tiles(n.keys), group = n.heads / n.gradient_heads, share = n.gradient_heads / n.kv_heads;
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(n.threads)
  {
    const Buffer work(key_tiles * T * n.dim + 6 * T * T + (3 * n.dim + 2 * n.v_dim + 3 + COPIES<E> * (2 * n.dim + 3 * n.v_dim) + T) * T, failed, !std::is_same_v<M, float>);
    const int64_t batches = has_all(failed) ? n.batch : 0;
    float *p = work.data, *ds = p + T * T, *bend = ds + T * T, *dqt = bend + T * T, *delta = dqt + n.dim * T, *top = delta + T, *share_of = top + T, *operands = share_of + T;
    M *kt = reinterpret_cast<M*>(operands), *qt = kt + key_tiles * T * n.dim, *gt = qt + n.dim * T, *p_copy = gt + n.v_dim * T, *ds_copy = p_copy + T * T;
    M *ds_pairs = ds_copy + T * T, *q_pairs = ds_pairs + T * T, *grad_pairs = q_pairs + n.dim * T;
    float* q_copy = operands + (key_tiles + 2) * T * n.dim + 3 * T * T + 2 * n.v_dim * T;
    float *k_copy = q_copy + n.dim * T, *grad_copy = k_copy + n.dim * T, *out_copy = grad_copy + n.v_dim * T, *v_copy = out_copy + n.v_dim * T, *mask = COPIES<E> ? v_copy + n.v_dim * T : q_copy;
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t g = 0; g < n.gradient_heads; ++g) {
        for (int64_t j = 0; j < key_tiles; ++j) O::first_turned(k.at(b, g / share, j * T), k.row, std::min(T, n.keys - j * T), n.dim, kt + j * T * n.dim);
        const bool may_skip = n.mask.data && n.mask.type == ALLOWED;  // tiles between others: all are added to zeros
        for (int64_t key = may_skip || !n.queries ? 0 : n.causal ? query_tiles * T : n.keys; key < n.keys; ++key) {  // keys that no query sees
          std::fill_n(dk.at(b, g, key), n.dim, 0.0f);
          std::fill_n(dv.at(b, g, key), n.v_dim, 0.0f);
        }
        for (int64_t h = g * group; h < (g + 1) * group; ++h)
          for (int64_t i = 0; i < query_tiles; ++i) {
            const int64_t q0 = i * T, nq = std::min(T, n.queries - q0);
            const auto [low, end] = seen(n, q0, nq);
            const auto [qi, q_row] = O::second(q.at(b, h, q0), q.row, nq, n.dim, std::is_same_v<M, float> ? reinterpret_cast<M*>(q_copy) : q_pairs, n.dim);
            const auto [gi, grad_row] = as_float(grad.at(b, h, q0), grad.row, nq, n.v_dim, grad_copy);
            const auto [grads, grads_row] = [&, gi = gi, grad_row = grad_row] {
              if constexpr (std::is_same_v<M, float>)
                return std::pair(gi, grad_row);
              else
                return O::second(grad.at(b, h, q0), grad.row, nq, n.v_dim, grad_pairs, n.v_dim);
            }();
            const auto [oi, out_row] = as_float(out.at(b, h, q0), out.row, nq, n.v_dim, out_copy);
            O::second_turned(q.at(b, h, q0), q.row, nq, n.dim, qt, n.scale);
            O::second_turned(grad.at(b, h, q0), grad.row, nq, n.v_dim, gt);
            for (int64_t c = 0; c < nq; ++c) {
              const float *o = oi + c * out_row, *x = gi + c * grad_row, l = *lse.at(b, h, q0 + c);
              float total = 0.0f;
#pragma omp simd reduction(+ : total)
              for (int64_t e = 0; e < n.v_dim; ++e) total += x[e] * o[e];
              delta[c] = total;
              top[c] = l == NEVER ? 0.0f : l;
            }
            const auto score = [&](const Tile& t) {  // into p, and the soft-cap's slopes into bend
              const auto [keys, key_row] = O::first(k.at(b, g / share, t.k0), k.row, t.nk, n.dim, reinterpret_cast<M*>(k_copy));
              product(t.nk, nq, n.dim, keys, key_row, qt, T, p, T, false);
              O::scale(p, t.nk * T, n.scale);
              if (n.softcap)
                for (int64_t x = 0; x < t.nk * T; ++x) {
                  const float bent = tangent(p[x] / n.softcap);
                  p[x] = n.softcap * bent;
                  bend[x] = 1.0f - bent * bent;
                }
              if (n.mask.data) add_mask(n.mask, b, h, t, p, mask);
              hide(p, t, n);
            };
            bool far = false;  // numbers of a mask hide a row whole: its log-sum-exp does not tell the sum
            for (int64_t c = 0; c < nq; ++c) far |= n.mask.data && n.mask.type != ALLOWED && std::fabs(top[c]) > FAR;
            std::fill(share_of, share_of + T, 1.0f);
            if (far) {
              std::fill(share_of, share_of + T, 0.0f);
              for (int64_t j = low; j < end; ++j) {
                const Tile t{q0, nq, j * T, std::min(T, n.keys - j * T)};
                score(t);
                for (int64_t y = 0; y < t.nk; ++y)
                  for (int64_t c = 0; c < nq; ++c) share_of[c] += exponential(p[y * T + c] - top[c]);
              }
              for (int64_t c = 0; c < nq; ++c) {  // in a step of a ring it is of more keys than are here
                const float size = std::fabs(top[c]);
                const bool is_of_all = std::fabs(std::log(share_of[c])) <= 4.0f * std::numeric_limits<float>::epsilon() * size;
                share_of[c] = size > FAR && is_of_all ? 1.0f / share_of[c] : 1.0f;
              }
            }
            bool started = false;
            for (int64_t j = low; j < end; ++j) {
              const Tile t{q0, nq, j * T, std::min(T, n.keys - j * T)};
              if (!sees(n.mask, b, h, t)) continue;
              const auto [values, value_row] = O::first(v.at(b, g / share, t.k0), v.row, t.nk, n.v_dim, reinterpret_cast<M*>(v_copy));
              product(t.nk, nq, n.v_dim, values, value_row, gt, T, ds, T, false);
              score(t);
              if (n.keep.data) {
                factors(n, b, h, t, mask);
                for (int64_t x = 0; x < t.nk * T; ++x) ds[x] *= mask[x];
              }
              for (int64_t y = 0; y < t.nk; ++y)
                for (int64_t c = 0; c < nq; ++c) {
                  const float e = exponential(p[y * T + c] - top[c]) * share_of[c];
                  p[y * T + c] = e;
                  ds[y * T + c] = e * (ds[y * T + c] - delta[c]) * n.scale;
                }
              if (n.keep.data)
                for (int64_t x = 0; x < t.nk * T; ++x) p[x] *= mask[x];
              if (n.softcap)
                for (int64_t x = 0; x < t.nk * T; ++x) ds[x] *= bend[x];
              const bool first = !may_skip && h == g * group && i == (n.causal ? j : 0);  // of the queries that see these keys
              const auto [weights, weights_row] = O::first(p, T, t.nk, nq, p_copy);
              product(t.nk, n.v_dim, O::depth(nq), weights, weights_row, grads, grads_row, dv.at(b, g, t.k0), dv.row, !first);
              const auto [slopes, slopes_row] = O::first(ds, T, t.nk, nq, ds_copy);
              product(t.nk, n.dim, O::depth(nq), slopes, slopes_row, qi, q_row, dk.at(b, g, t.k0), dk.row, !first);
              const auto [turned, turned_row] = O::second(ds, T, t.nk, nq, ds_pairs);
              product(n.dim, nq, O::depth(t.nk), kt + j * T * n.dim, T, turned, turned_row, dqt, T, started);
              started = true;
            }
            if (started)
              transpose(dqt, T, n.dim, nq, dq.at(b, h, q0), dq.row);
            else
              for (int64_t c = 0; c < nq; ++c) std::fill_n(dq.at(b, h, q0 + c), n.dim, E{});
          }
      }
  }
  return failed;
}

}  // namespace

// Both return 1 where there is no memory for the work buffers, and have then written nothing that counts. Pairs need even
// widths: their rows are taken as they lie.
template <class F>
void with_types(const Problem& n, F f) {
  if (n.type == BFLOAT16 && n.pairs && n.dim % 2 == 0 && n.v_dim % 2 == 0)
    f(static_cast<BFloat16*>(nullptr), static_cast<BFloat16*>(nullptr));
  else
    with_type(n.type, [&](auto* type) { f(type, static_cast<float*>(nullptr)); });
}

extern "C" int attention_forward(const Problem* problem, void* const* data, const int64_t* strides) {
  bool failed = false;
  with_types(*problem, [&](auto* type, auto* tile) {
    failed = forward<std::remove_pointer_t<decltype(type)>, std::remove_pointer_t<decltype(tile)>>(*problem, data, strides);
  });
  return failed;
}

extern "C" int attention_backward(const Problem* problem, void* const* data, const int64_t* strides) {
  bool failed = false;
  with_types(*problem, [&](auto* type, auto* tile) {
    failed = backward<std::remove_pointer_t<decltype(type)>, std::remove_pointer_t<decltype(tile)>>(*problem, data, strides);
  });
  return failed;
}
