// The gated delta rule, forward and backward, a tile of tokens at a time. See kernels/cpu/gated_delta_rule.py; letters as
// at the top of kernels/gated_delta_rule.py.
//
// Since a head's tiles follow each other anyway, W is not needed: with S known, N = (I + A)^-1 X with X = beta (v - e^c k S),
// solved by substitution. Of a tile of keys and queries, k k^T and q k^T are made once for the heads that share it. What a
// tile needs stays in the second-level cache; all is float32, and rows after the last token are zero and change nothing.
//
// Backward, with dO and the gradient dS' of the state after the tile, and Z = k dS':
//     dN = P^T dO + e^(c_C - c) Z;  dX = (I + A)^-T dN;  dA = -dX N^T;  dP = dO N^T
//     dS = e^(c_C) dS' - k^T (e^c beta dX) + scale q^T (e^c dO)
// Gradients of k and q are [k_dim, tokens] until the heads that share them are done, since S (..)^T then takes S as it lies.

namespace {

struct Sequence {  // [batch, heads, seq, *], the last dimension contiguous
  char* data;
  int64_t type, batch, head, row;  // strides in elements
};

struct DeltaRule {
  int64_t batch, heads, key_heads, seq, k_dim, v_dim, span, threads;
  int64_t together;  // heads that a thread takes: some, or all, that share a key
  int64_t gated, normalized;
  float scale, eps;
  float *state, *starts;  // [batch, heads, k_dim, v_dim], of the first or last token; [batch, heads, spans, k_dim, v_dim]
  Sequence q, k, v, out, dq, dk, dv;  // out: of the backward its gradient; dq and dk have heads / together heads
  Sequence g, beta, dg, dbeta;        // float32, no last dimension
};

void read_rows(const Sequence& x, int64_t b, int64_t h, int64_t first, int64_t rows, int64_t padded_rows, int64_t width, float* to) {
  with_type(x.type, [&](auto* type) {
    widen_rows(reinterpret_cast<decltype(type)>(x.data) + b * x.batch + h * x.head + first * x.row, x.row, rows, width, to, width);
  });
  std::fill(to + rows * width, to + padded_rows * width, 0.0f);
}

void write_rows(const Sequence& x, int64_t b, int64_t h, int64_t first, int64_t rows, int64_t width, const float* from) {
  with_type(x.type, [&](auto* type) {
    narrow_rows(from, width, rows, width, reinterpret_cast<decltype(type)>(x.data) + b * x.batch + h * x.head + first * x.row, x.row);
  });
}

float& number(const Sequence& x, int64_t b, int64_t h, int64_t token) {
  return reinterpret_cast<float*>(x.data)[b * x.batch + h * x.head + token * x.row];
}

float dot(const float* a, const float* b, int64_t n) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void scale_row(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// Work memory of a thread, handed out in whole lines of the cache; without memory it only counts.
class Shelf {
 public:
  explicit Shelf(float* data) : data(data) {}
  float* take(int64_t floats) {
    float* first = data ? data + used : nullptr;
    used += padded(floats);
    return first;
  }
  float* const data;
  int64_t used = 0;
};

struct Tokens {  // of a tile: n from ``first`` on, t rows with the zeros after them
  int64_t first, n, t;
};

// k and q of a tile and what is made of them.
struct Keys {
  float *rows, *roots;  // [2 t, k_dim]: k, then q; 1 / sqrt(sum(x^2) + eps) of each row
  float* turned;        // [k_dim, t] of k, or [k_dim, 2 t] of k and q
  float* products;      // [2 t, t]: k k^T, then q k^T; or [t, 2 t]: k k^T and k q^T side by side

  Keys(const DeltaRule& p, Shelf& shelf) : rows(shelf.take(2 * ROWS * p.k_dim)), roots(shelf.take(2 * ROWS)), turned(shelf.take(2 * ROWS * p.k_dim)), products(shelf.take(2 * ROWS * ROWS)) {}

  void read(const DeltaRule& p, int64_t b, int64_t h, const Tokens& x) const {
    read_rows(p.k, b, h, x.first, x.n, x.t, p.k_dim, rows);
    read_rows(p.q, b, h, x.first, x.n, x.t, p.k_dim, rows + x.t * p.k_dim);
    for (int64_t i = 0; i < 2 * x.t && p.normalized; ++i) {
      float* row = rows + i * p.k_dim;
      roots[i] = i % x.t < x.n ? 1.0f / std::sqrt(dot(row, row, p.k_dim) + p.eps) : 0.0f;
      scale_row(row, p.k_dim, roots[i]);
    }
  }
};

// The gates of a tile for one head.
struct Gates {
  float sums[ROWS], beta[ROWS], grow[ROWS], rest[ROWS], last;  // c, e^c, e^(c_C - c), e^(c_C)

  Gates(const DeltaRule& p, int64_t b, int64_t h, const Tokens& x) {
    float sum = 0.0f;
    for (int64_t i = 0; i < x.t; ++i) {
      sum += p.gated && i < x.n ? number(p.g, b, h, x.first + i) : 0.0f;
      sums[i] = sum;
      beta[i] = i < x.n ? number(p.beta, b, h, x.first + i) : 0.0f;
    }
    for (int64_t i = 0; i < x.t; ++i) {
      grow[i] = exponential(sums[i]);
      rest[i] = exponential(sum - sums[i]);
    }
    last = grow[x.t - 1];
  }
};

constexpr int64_t BLOCK_ROWS = 16;  // of a triangular system that are solved one by one

void add_row(float* x, const float* y, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) x[i] += factor * y[i];
}

// x [t, width] = (I + A)^-1 x, of -A [t, t] below the diagonal.
void solve(const float* minus_a, int64_t t, int64_t width, float* x) {
  for (int64_t low = 0; low < t; low += BLOCK_ROWS) {
    if (low) product(BLOCK_ROWS, width, low, minus_a + low * t, t, x, width, x + low * width, width, true);
    for (int64_t i = low + 1; i < low + BLOCK_ROWS; ++i)
      for (int64_t j = low; j < i; ++j) add_row(x + i * width, x + j * width, width, minus_a[i * t + j]);
  }
}

// x [t, width] = (I + A)^-T x, of A^T [t, t] above the diagonal, negated too.
void solve_transposed(const float* minus_a, int64_t t, int64_t width, float* x) {
  for (int64_t low = t - BLOCK_ROWS; low >= 0; low -= BLOCK_ROWS) {
    const int64_t end = low + BLOCK_ROWS;
    if (end < t) product(BLOCK_ROWS, width, t - end, minus_a + low * t + end, t, x + end * width, width, x + low * width, width, true);
    for (int64_t i = end - 2; i >= low; --i)
      for (int64_t j = i + 1; j < end; ++j) add_row(x + i * width, x + j * width, width, minus_a[i * t + j]);
  }
}

// errors = v - e^c k S and values = N, both [t, v_dim], from k S in ``values`` and v in ``errors``.
void find_new_values(const DeltaRule& p, const Gates& gates, const float* minus_a, int64_t t, float* errors, float* values) {
  for (int64_t i = 0; i < t; ++i) {
    float *error = errors + i * p.v_dim, *value = values + i * p.v_dim;
    for (int64_t x = 0; x < p.v_dim; ++x) {
      error[x] -= gates.grow[i] * value[x];
      value[x] = gates.beta[i] * error[x];
    }
  }
  solve(minus_a, t, p.v_dim, values);
}

// to = e^(c_C) S + k^T (e^(c_C - c) N), with k^T in rows of ``ld``; ``rest`` holds the factor on k^T.
void next_state(const DeltaRule& p, const Gates& gates, const float* turned, int64_t ld, int64_t t, const float* values, const float* from, float* to, float* rest) {
  for (int64_t i = 0; i < t; ++i)
    for (int64_t x = 0; x < p.v_dim; ++x) rest[i * p.v_dim + x] = gates.rest[i] * values[i * p.v_dim + x];
  for (int64_t x = 0; x < p.k_dim * p.v_dim; ++x) to[x] = gates.last * from[x];
  product(p.k_dim, p.v_dim, t, turned, ld, rest, p.v_dim, to, p.v_dim, true);
}

Tokens tile(int64_t first, int64_t end) {
  const int64_t n = std::min(ROWS, end - first);
  return {first, n, padded(n)};
}

int64_t spans(const DeltaRule& p) { return parts(p.seq, p.span); }

struct ForwardWork {
  Keys keys;
  float *system, *scores, *values, *errors, *rest;
  ForwardWork(const DeltaRule& p, Shelf& s) : keys(p, s), system(s.take(ROWS * ROWS)), scores(s.take(ROWS * ROWS)), values(s.take(2 * ROWS * p.v_dim)), errors(s.take(ROWS * p.v_dim)), rest(s.take(ROWS * p.v_dim)) {}
};

void forward_tile(const DeltaRule& p, int64_t b, int64_t h, const Tokens& x, const ForwardWork& w, float* state) {
  const int64_t t = x.t;
  const Gates gates(p, b, h, x);
  for (int64_t i = 0; i < t; ++i) {
    const float *keys = w.keys.products + i * t, *queries = keys + t * t;
    for (int64_t j = 0; j < padded(i + 1); ++j) {
      const float decay = exponential(gates.sums[i] - gates.sums[j]);
      w.system[i * t + j] = -gates.beta[i] * decay * keys[j];
      w.scores[i * t + j] = p.scale * decay * queries[j];
    }
    std::fill(w.scores + i * t + i + 1, w.scores + (i + 1) * t, 0.0f);
  }
  product(2 * t, p.v_dim, p.k_dim, w.keys.rows, p.k_dim, state, p.v_dim, w.values, p.v_dim, false);
  read_rows(p.v, b, h, x.first, x.n, t, p.v_dim, w.errors);
  find_new_values(p, gates, w.system, t, w.errors, w.values);
  float* out = w.values + t * p.v_dim;
  for (int64_t i = 0; i < t; ++i) scale_row(out + i * p.v_dim, p.v_dim, p.scale * gates.grow[i]);
  product(t, p.v_dim, t, w.scores, t, w.values, p.v_dim, out, p.v_dim, true);
  write_rows(p.out, b, h, x.first, x.n, p.v_dim, out);
  next_state(p, gates, w.keys.turned, t, t, w.values, state, state, w.rest);
}

void forward_heads(const DeltaRule& p, int64_t b, int64_t h, const ForwardWork& w) {
  const int64_t size = p.k_dim * p.v_dim;
  for (int64_t span = 0; span < spans(p); ++span) {
    for (int64_t i = b * p.heads + h; i < b * p.heads + h + p.together; ++i)
      std::copy_n(p.state + i * size, size, p.starts + (i * spans(p) + span) * size);
    const int64_t end = std::min(p.seq, (span + 1) * p.span);
    for (int64_t first = span * p.span; first < end; first += ROWS) {
      const Tokens x = tile(first, end);
      w.keys.read(p, b, h * p.key_heads / p.heads, x);
      transpose(w.keys.rows, p.k_dim, x.t, p.k_dim, w.keys.turned, x.t);
      product(2 * x.t, x.t, p.k_dim, w.keys.rows, p.k_dim, w.keys.turned, x.t, w.keys.products, x.t, false);
      for (int64_t i = h; i < h + p.together; ++i) forward_tile(p, b, i, x, w, p.state + (b * p.heads + i) * size);
    }
  }
}

// What is kept of a tile of the span: for all heads that share its keys, and for the head at hand.
struct Kept {
  Keys keys;
  float *dturned, *dproducts;      // like ``turned`` and ``products``
  float *state, *errors, *values;  // S before it, v - e^c k S, N
  Kept(const DeltaRule& p, Shelf& s) : keys(p, s), dturned(s.take(2 * ROWS * p.k_dim)), dproducts(s.take(2 * ROWS * ROWS)), state(s.take(p.k_dim * p.v_dim)), errors(s.take(ROWS * p.v_dim)), values(s.take(ROWS * p.v_dim)) {}
};

struct BackwardWork {
  std::vector<Kept> tiles;
  float *system, *scores, *decay;  // -A or -A^T, P^T, D^T
  float *grads, *turned;           // [2 t, v_dim]: dN, then dX, and dO below; [v_dim, 2 t] of the same
  float *dpairs, *dkeys;           // [t, 2 t]: -dA^T and dP^T; [k_dim, 2 t]: gradients of k and q before their factors
  BackwardWork(const DeltaRule& p, Shelf& s) {
    for (int64_t first = 0; first < std::min(p.span, p.seq); first += ROWS) tiles.emplace_back(p, s);
    system = s.take(ROWS * ROWS), scores = s.take(ROWS * ROWS), decay = s.take(ROWS * ROWS);
    grads = s.take(2 * ROWS * p.v_dim), turned = s.take(2 * ROWS * p.v_dim);
    dpairs = s.take(2 * ROWS * ROWS), dkeys = s.take(2 * ROWS * p.k_dim);
  }
};

// Gradients of what keys and queries have in common for all heads that share them, and of their norm.
void finish_keys(const DeltaRule& p, int64_t b, int64_t h, int64_t group, const Tokens& x, const Kept& kept, const BackwardWork& w) {
  const int64_t t = x.t, d = p.k_dim;
  float *rows = w.dkeys, *turned = w.dpairs;
  transpose(kept.dturned, 2 * t, d, 2 * t, rows, d);
  for (int64_t j = 0; j < t; ++j)  // d(k q^T) as it is needed for q, and d(k k^T) + its transpose
    for (int64_t i = 0; i < t; ++i) turned[i * t + j] = kept.dproducts[j * 2 * t + t + i];
  for (int64_t j = 0; j < t; ++j) {
    kept.dproducts[j * 2 * t + j] = 0.0f;
    for (int64_t i = j + 1; i < t; ++i) kept.dproducts[i * 2 * t + j] = kept.dproducts[j * 2 * t + i];
  }
  product(t, d, 2 * t, kept.dproducts, 2 * t, kept.keys.rows, d, rows, d, true);
  product(t, d, t, turned, t, kept.keys.rows, d, rows + t * d, d, true);
  for (int64_t i = 0; i < 2 * t && p.normalized; ++i) {
    const float *key = kept.keys.rows + i * d, along = dot(rows + i * d, key, d), root = kept.keys.roots[i];
    for (int64_t c = 0; c < d; ++c) rows[i * d + c] = (rows[i * d + c] - key[c] * along) * root;
  }
  write_rows(p.dk, b, group, x.first, x.n, d, rows);
  write_rows(p.dq, b, group, x.first, x.n, d, rows + t * d);
}

// Pairs of tokens j <= i, in row j: from -dA^T and dP^T in w.dpairs, adds the gradients of k k^T and k q^T, of c and of beta.
void pair_gradients(const DeltaRule& p, const Gates& gates, int64_t t, const Kept& kept, const BackwardWork& w, float* dsums, float* dbeta) {
  for (int64_t j = 0; j < t; ++j) {
    const float *minus_da = w.dpairs + j * 2 * t, *dp = minus_da + t, *decay = w.decay + j * t, *keys = kept.keys.products + j * 2 * t, *scores = w.scores + j * t;
    float *dkeys = kept.dproducts + j * 2 * t, *dqueries = dkeys + t, sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = j / BLOCK_ROWS * BLOCK_ROWS; i < t; ++i) {
      const float da = -minus_da[i] * decay[i], of_beta = da * keys[i], both = of_beta * gates.beta[i] + dp[i] * scores[i];
      dbeta[i] += of_beta;
      dsums[i] += both;
      sum += both;
      dkeys[i] += da * gates.beta[i];
      dqueries[i] += p.scale * dp[i] * decay[i];
    }
    dsums[j] -= sum;
  }
}

// ``dstate`` is the gradient of the state after the tile, and becomes that of the one before it.
void backward_tile(const DeltaRule& p, int64_t b, int64_t h, const Tokens& x, const Kept& kept, const BackwardWork& w, float* dstate) {
  const int64_t t = x.t, d = p.k_dim, e = p.v_dim;
  const Gates gates(p, b, h, x);
  float *dvalues = w.grads, *dout = w.grads + t * e;
  float dsums[ROWS] = {}, dbeta[ROWS] = {};
  for (int64_t j = 0; j < t; ++j) {
    const float *keys = kept.keys.products + j * 2 * t, *queries = keys + t;
    const int64_t low = j / BLOCK_ROWS * BLOCK_ROWS;
    float* decay = w.decay + j * t;
    std::fill(w.scores + j * t, w.scores + j * t + low, 0.0f);
    for (int64_t i = low; i < t; ++i) decay[i] = i < j ? 0.0f : exponential(gates.sums[i] - gates.sums[j]);
    for (int64_t i = low; i < t; ++i) {
      w.system[j * t + i] = -gates.beta[i] * decay[i] * keys[i];
      w.scores[j * t + i] = p.scale * decay[i] * queries[i];
    }
  }
  product(t, e, d, kept.keys.rows, d, dstate, e, dvalues, e, false);
  float sum = 0.0f;  // of gradients of c, from the last token on
  for (int64_t i = 0; i < t && p.gated; ++i) {
    const float rest = gates.rest[i] * dot(dvalues + i * e, kept.values + i * e, e);
    dsums[i] -= rest;
    sum += rest;
  }
  for (int64_t i = 0; i < t; ++i) scale_row(dvalues + i * e, e, gates.rest[i]);
  read_rows(p.out, b, h, x.first, x.n, t, e, dout);
  product(t, e, t, w.scores, t, dout, e, dvalues, e, true);
  solve_transposed(w.system, t, e, dvalues);

  transpose(w.grads, e, 2 * t, e, w.turned, 2 * t);
  product(t, 2 * t, e, kept.values, e, w.turned, 2 * t, w.dpairs, 2 * t, false);
  pair_gradients(p, gates, t, kept, w, dsums, dbeta);

  product(d, 2 * t, e, kept.state, e, w.turned, 2 * t, w.dkeys, 2 * t, false);
  float factor[2 * ROWS], along[2 * ROWS] = {};  // of d(k S) and d(q S); along: the gradient's part along k and q
  for (int64_t i = 0; i < t; ++i) factor[i] = -gates.grow[i] * gates.beta[i], factor[t + i] = p.scale * gates.grow[i];
  for (int64_t c = 0; c < d; ++c)
    for (int64_t i = 0; i < 2 * t; ++i) {
      const float grad = w.dkeys[c * 2 * t + i] * factor[i];
      kept.dturned[c * 2 * t + i] += grad;
      along[i] += grad * kept.keys.turned[c * 2 * t + i];
    }

  for (int64_t i = 0; i < t; ++i) {
    dbeta[i] += dot(dvalues + i * e, kept.errors + i * e, e);
    scale_row(dvalues + i * e, e, gates.beta[i]);
    scale_row(kept.values + i * e, e, gates.rest[i]);
  }
  write_rows(p.dv, b, h, x.first, x.n, e, dvalues);
  transpose(kept.values, e, t, e, w.turned, t);
  product(d, t, e, dstate, e, w.turned, t, kept.dturned, 2 * t, true);

  for (int64_t i = 0; i < t; ++i) {
    scale_row(dvalues + i * e, e, -gates.grow[i]);
    scale_row(dout + i * e, e, factor[t + i]);
  }
  if (p.gated) sum += gates.last * dot(dstate, kept.state, d * e);
  scale_row(dstate, d * e, gates.last);
  product(d, e, 2 * t, kept.keys.turned, 2 * t, w.grads, e, dstate, e, true);

  for (int64_t i = t - 1; i >= 0; --i) {
    sum += dsums[i] + along[i] + along[t + i];
    if (i < x.n && p.gated) number(p.dg, b, h, x.first + i) = sum;
    if (i < x.n) number(p.dbeta, b, h, x.first + i) = dbeta[i];
  }
}

// Errors, new values and states of the tiles of a span.
void forward_again(const DeltaRule& p, int64_t b, int64_t h, int64_t first, int64_t end, const BackwardWork& w) {
  for (int64_t i = 0; first < end; first += ROWS, ++i) {
    const Tokens x = tile(first, end);
    const Kept& kept = w.tiles[i];
    const Gates gates(p, b, h, x);
    for (int64_t y = 0; y < x.t; ++y)
      for (int64_t j = 0; j < padded(y + 1); ++j)
        w.system[y * x.t + j] = -gates.beta[y] * exponential(gates.sums[y] - gates.sums[j]) * kept.keys.products[y * 2 * x.t + j];
    product(x.t, p.v_dim, p.k_dim, kept.keys.rows, p.k_dim, kept.state, p.v_dim, kept.values, p.v_dim, false);
    read_rows(p.v, b, h, x.first, x.n, x.t, p.v_dim, kept.errors);
    find_new_values(p, gates, w.system, x.t, kept.errors, kept.values);
    if (x.first + ROWS < end) next_state(p, gates, kept.keys.turned, 2 * x.t, x.t, kept.values, kept.state, w.tiles[i + 1].state, w.grads);
  }
}

void backward_heads(const DeltaRule& p, int64_t b, int64_t h, const BackwardWork& w) {
  const int64_t size = p.k_dim * p.v_dim, d = p.k_dim;
  for (int64_t span = spans(p) - 1; span >= 0; --span) {
    const int64_t low = span * p.span, end = std::min(p.seq, low + p.span), number_of_tiles = parts(end - low, ROWS);
    for (int64_t i = 0; i < number_of_tiles; ++i) {
      const Tokens x = tile(low + i * ROWS, end);
      const Kept& kept = w.tiles[i];
      kept.keys.read(p, b, h * p.key_heads / p.heads, x);
      transpose(kept.keys.rows, d, 2 * x.t, d, kept.keys.turned, 2 * x.t);
      product(x.t, 2 * x.t, d, kept.keys.rows, d, kept.keys.turned, 2 * x.t, kept.keys.products, 2 * x.t, false);
      for (int64_t j = 0; j < x.t; ++j) kept.keys.products[j * 2 * x.t + j] = 0.0f;  // A is below the diagonal
      std::fill_n(kept.dturned, 2 * x.t * d, 0.0f);
      std::fill_n(kept.dproducts, 2 * x.t * x.t, 0.0f);
    }
    for (int64_t own = h; own < h + p.together; ++own) {
      std::copy_n(p.starts + ((b * p.heads + own) * spans(p) + span) * size, size, w.tiles[0].state);
      forward_again(p, b, own, low, end, w);
      for (int64_t i = number_of_tiles - 1; i >= 0; --i) backward_tile(p, b, own, tile(low + i * ROWS, end), w.tiles[i], w, p.state + (b * p.heads + own) * size);
    }
    for (int64_t i = 0; i < number_of_tiles; ++i) finish_keys(p, b, h, h / p.together, tile(low + i * ROWS, end), w.tiles[i], w);
  }
}

template <class Work, class F>
int delta_rule(const DeltaRule& p, F heads) {
  Shelf counted(nullptr);
  const Work counting(p, counted);
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(p.threads)
  {
    const Buffer buffer(counted.used, failed);
    const int64_t batches = has_all(failed) ? p.batch : 0;
    Shelf shelf(buffer.data);
    const Work work(p, shelf);
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t h = 0; h < p.heads; h += p.together) heads(p, b, h, work);
  }
  return failed;
}

}  // namespace

// Both return 1 where there is no memory. ``state`` is that of the start and becomes that of the end; of the backward the
// gradient of the end, which becomes that of the start.
extern "C" int delta_rule_forward(const DeltaRule* p) { return delta_rule<ForwardWork>(*p, forward_heads); }

extern "C" int delta_rule_backward(const DeltaRule* p) { return delta_rule<BackwardWork>(*p, backward_heads); }
