// Kimi Delta Attention, forward and backward, a tile of tokens at a time. See kernels/cpu/kimi_delta_attention.py.
// Letters are those of kernels/kimi_delta_attention.py, arguments and helpers those of gated_delta_rule.cpp. As there W
// is not needed: with S known, N = (I + A)^-1 X with X = beta (v - (k e^c) S), solved by substitution.
//
// A decay e^(c_i - c_j) is no quotient, nor of a difference of c, which strong gates make inexact. Within a block it is
// a product of gates e^g; between halves of 16 tokens, then 32, it is ``rise`` times ``fall``, which sums of gates give
// for a block, and one more product for twice as many tokens.
//
// Backward, with dO and the gradient dS' of the state after the tile:
//     dN = P^T dO + (k e^(c_C - c)) dS';  dX = (I + A)^-T dN;  dA = -dX N^T;  dP = dO N^T
//     dS = e^(c_C) dS' - (k e^c)^T (beta dX) + scale (q e^c)^T dO
// Gradients of k as a row of pairs (with that through k e^c) and as a column (with that through k e^(c_C - c)) are kept
// apart until c has its own: dc = q dq + k (dk_rows - dk_columns).

namespace { namespace kimi {

constexpr int64_t BLOCK = 16;  // tokens whose pairs are taken one by one

// Numbers below the smallest normal one are zero meanwhile: decays make them, and gates of -5 took ten times as long.
struct FlushSmall {
  FlushSmall() { _mm_setcsr(before | 0x8040); }
  ~FlushSmall() { _mm_setcsr(before); }
  const unsigned before = _mm_getcsr();
};

// Of the tile at hand; [t, k_dim] where nothing else is said.
struct Tile {
  Keys keys;
  float *gates, *rise, *fall;  // e^g; decay from before a half to a token, from it to the end: at last e^c, e^(c_C - c)
  float *last, *beta;          // e^(c_C) [k_dim]; [t]
  float* decayed;              // [2 t, k_dim] of k, then q: times e^c, or as halves of pairs need them
  float *spare, *system;       // [2 t, k_dim], or [k_dim or t, v_dim]; -A or -A^T [t, t]
  Tile(const DeltaRule& p, Shelf& s) : keys(p, s) {
    for (float** x : {&gates, &rise, &fall}) *x = s.take(ROWS * p.k_dim);
    last = s.take(p.k_dim), beta = s.take(ROWS), decayed = s.take(2 * ROWS * p.k_dim);
    spare = s.take(std::max({2 * ROWS * p.k_dim, ROWS * p.v_dim, p.k_dim * p.v_dim})), system = s.take(ROWS * ROWS);
  }
};

struct Place {  // a tile of a head
  const DeltaRule& p;
  int64_t b, h;
  Tokens x;
  void read(const Sequence& s, int64_t width, float* to) const { read_rows(s, b, h, x.first, x.n, x.t, width, to); }
  void write(const Sequence& s, int64_t width, const float* y) const { write_rows(s, b, h, x.first, x.n, width, y); }
};

void multiply(const float* x, const float* y, int64_t n, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = x[i] * y[i];
}

void add_product(const float* x, const float* y, int64_t n, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] += x[i] * y[i];
}

// to [rows, width] = x, each row times a factor of its own
void scale_rows(const float* x, const float* factors, int64_t rows, int64_t width, float* to) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = i * width; c < (i + 1) * width; ++c) to[c] = factors[i] * x[c];
}

// Calls f with (start, middle, end) of every two halves that follow each other, of which the last may be short.
template <class F>
void with_halves(int64_t t, int64_t size, F f) {
  for (int64_t start = 0; start + size < t; start += 2 * size) f(start, start + size, std::min(start + 2 * size, t));
}

// Gates, with ``rise`` and ``fall`` of blocks.
void read_gates(const Place& at, const Tile& w) {
  const int64_t t = at.x.t, d = at.p.k_dim;
  at.read(at.p.g, d, w.gates);
  std::fill_n(w.last, d, 0.0f);
  for (int64_t low = 0; low < t; low += BLOCK) {
    const int64_t end = low + BLOCK;
    std::copy_n(w.gates + low * d, BLOCK * d, w.rise + low * d);
    std::copy_n(w.gates + (low + 1) * d, (BLOCK - 1) * d, w.fall + low * d);
    std::fill_n(w.fall + (end - 1) * d, d, 0.0f);
    for (int64_t i = low + 1; i < end; ++i) add_row(w.rise + i * d, w.rise + (i - 1) * d, d, 1.0f);
    for (int64_t i = end - 2; i >= low; --i) add_row(w.fall + i * d, w.fall + (i + 1) * d, d, 1.0f);
    add_row(w.last, w.rise + (end - 1) * d, d, 1.0f);
  }
  for (float* y : {w.gates, w.rise, w.fall})
    for (int64_t i = 0; i < t * d; ++i) y[i] = exponential(y[i]);
  for (int64_t i = 0; i < d; ++i) w.last[i] = exponential(w.last[i]);
}

void read_tile(const Place& at, const Tile& w) {
  const auto& [p, b, h, x] = at;
  w.keys.read(p, b, h, x);
  for (int64_t i = 0; i < x.t; ++i) w.beta[i] = i < x.n ? number(p.beta, b, h, x.first + i) : 0.0f;
  read_gates(at, w);
}

// ``rise`` and ``fall`` of halves become those of twice as many tokens.
void merge_halves(int64_t d, int64_t t, int64_t size, const Tile& w) {
  with_halves(t, size, [&](int64_t start, int64_t middle, int64_t end) {
    const float *early = w.rise + (middle - 1) * d, *late = w.rise + (end - 1) * d;
    for (int64_t i = start; i < middle; ++i) multiply(w.fall + i * d, late, d, w.fall + i * d);
    for (int64_t i = middle; i < end; ++i) multiply(w.rise + i * d, early, d, w.rise + i * d);
  });
}

// k of earlier halves up to their ends, k and q of later halves from there.
void decay_halves(int64_t d, int64_t t, int64_t size, const Tile& w) {
  with_halves(t, size, [&](int64_t start, int64_t middle, int64_t end) {
    const float *rows = w.keys.rows, *rise = w.rise + middle * d;
    multiply(rows + start * d, w.fall + start * d, size * d, w.decayed + start * d);
    for (int64_t of : {middle * d, (t + middle) * d}) multiply(rows + of, rise, (end - middle) * d, w.decayed + of);
  });
}

// k e^c and q e^c, once ``rise`` is e^c.
void decay_rows(int64_t d, int64_t t, const Tile& w) {
  for (int64_t of : {int64_t(0), t * d}) multiply(w.keys.rows + of, w.rise, t * d, w.decayed + of);
}

// Pairs within a block from ``low`` on. [2 t, t]: of k, then of q, whose pairs with themselves have no decay.
void block_products(int64_t d, int64_t t, int64_t low, const Tile& w, float* products) {
  const float *keys = w.keys.rows, *queries = keys + t * d;
  float* early = w.spare;  // k_j up to token i
  for (int64_t j = low; j < low + BLOCK; ++j) {
    products[(t + j) * t + j] = dot(queries + j * d, keys + j * d, d);
    std::copy_n(keys + j * d, d, early);
    for (int64_t i = j + 1; i < low + BLOCK; ++i) {
      const float *gate = w.gates + i * d, *key = keys + i * d, *query = queries + i * d;
      float of_key = 0.0f, of_query = 0.0f;
#pragma omp simd reduction(+ : of_key, of_query)
      for (int64_t c = 0; c < d; ++c) {
        early[c] *= gate[c];
        of_key += early[c] * key[c];
        of_query += early[c] * query[c];
      }
      products[i * t + j] = of_key;
      products[(t + i) * t + j] = of_query;
    }
  }
}

// <k, k> below the diagonal and, under it, P [2 t, t]; afterwards ``rise`` and ``fall`` are those of the tile, and
// ``decayed`` is k e^c and q e^c.
void pair_products(const DeltaRule& p, int64_t t, const Tile& w, float* products) {
  const int64_t d = p.k_dim;
  std::fill_n(products, 2 * t * t, 0.0f);
  for (int64_t low = 0; low < t; low += BLOCK) block_products(d, t, low, w, products);
  for (int64_t size = BLOCK; size < t; size *= 2) {
    decay_halves(d, t, size, w);
    with_halves(t, size, [&](int64_t start, int64_t middle, int64_t end) {
      transpose(w.decayed + start * d, d, size, d, w.spare, size);
      for (int64_t first : {middle, t + middle})
        product(end - middle, size, d, w.decayed + first * d, d, w.spare, size, products + first * t + start, t, false);
    });
    merge_halves(d, t, size, w);
  }
  scale_row(products + t * t, t * t, p.scale);
  decay_rows(d, t, w);
}

// errors = v - (k e^c) S and values = N, both [t, v_dim], from (k e^c) S in ``values``.
void new_values(const Place& at, const Tile& w, const float* products, float* errors, float* values) {
  const int64_t t = at.x.t, e = at.p.v_dim;
  for (int64_t i = 0; i < t; ++i)
    for (int64_t j = 0; j < i; ++j) w.system[i * t + j] = -w.beta[i] * products[i * t + j];
  at.read(at.p.v, e, errors);
  add_row(errors, values, t * e, -1.0f);
  scale_rows(errors, w.beta, t, e, values);
  solve(w.system, t, e, values);
}

// to = e^(c_C) S + (k e^(c_C - c))^T N
void next_state(const DeltaRule& p, int64_t t, const Tile& w, const float* values, const float* from, float* to) {
  multiply(w.keys.rows, w.fall, t * p.k_dim, w.spare);
  transpose(w.spare, p.k_dim, t, p.k_dim, w.keys.turned, t);
  scale_rows(from, w.last, p.k_dim, p.v_dim, to);
  product(p.k_dim, p.v_dim, t, w.keys.turned, t, values, p.v_dim, to, p.v_dim, true);
}

struct Forward : Tile {
  float *values, *errors;  // [2 t, v_dim]: N, then the result; [t, v_dim]
  Forward(const DeltaRule& p, Shelf& s) : Tile(p, s) {
    values = s.take(2 * ROWS * p.v_dim), errors = s.take(ROWS * p.v_dim);
  }
};

void forward_tile(const Place& at, const Forward& w, float* state) {
  const DeltaRule& p = at.p;
  const int64_t t = at.x.t, e = p.v_dim;
  float *products = w.keys.products, *out = w.values + t * e;
  read_tile(at, w);
  pair_products(p, t, w, products);
  product(2 * t, e, p.k_dim, w.decayed, p.k_dim, state, e, w.values, e, false);
  new_values(at, w, products, w.errors, w.values);
  scale_row(out, t * e, p.scale);
  product(t, e, t, products + t * t, t, w.values, e, out, e, true);
  at.write(p.out, e, out);
  next_state(p, t, w, w.values, state, state);
}

void forward_head(const DeltaRule& p, int64_t b, int64_t h, const Forward& w) {
  const FlushSmall flush;
  const int64_t size = p.k_dim * p.v_dim, head = b * p.heads + h;
  float* state = p.state + head * size;
  for (int64_t first = 0; first < p.seq; first += ROWS) {
    if (first % p.span == 0) std::copy_n(state, size, p.starts + (head * spans(p) + first / p.span) * size);
    forward_tile({p, b, h, tile(first, p.seq)}, w, state);
  }
}

// What is kept of a tile of the span: S before it, v - (k e^c) S, N, and the pairs [2 t, t].
struct Kept {
  float *state, *errors, *values, *products;
  Kept(const DeltaRule& p, Shelf& s) {
    state = s.take(p.k_dim * p.v_dim), errors = s.take(ROWS * p.v_dim), values = s.take(ROWS * p.v_dim);
    products = s.take(2 * ROWS * ROWS);
  }
};

struct Backward : Tile {
  std::vector<Kept> tiles;
  float* grads;                   // [2 t, v_dim]: dN, then dX, then -beta dX; below dO, then scale dO
  float *drows, *dearly, *dlast;  // [2 t, k_dim] of k, q as rows of pairs; [t, k_dim] of k as columns; [k_dim] of c_C
  float *dpairs, *turned;         // [2 t, t], gradients of <k, k> and <q, k>; [t, 2 t], the same turned, or P^T [t, t]
  Backward(const DeltaRule& p, Shelf& s) : Tile(p, s), dpairs(keys.products) {
    for (int64_t first = 0; first < std::min(p.span, p.seq); first += ROWS) tiles.emplace_back(p, s);
    grads = s.take(2 * ROWS * p.v_dim), drows = s.take(2 * ROWS * p.k_dim), dearly = s.take(ROWS * p.k_dim);
    turned = s.take(2 * ROWS * ROWS), dlast = s.take(p.k_dim);
  }
};

// Errors, new values, states and pairs of the tiles of a span.
void forward_again(const DeltaRule& p, int64_t b, int64_t h, int64_t first, int64_t end, const Backward& w) {
  for (int64_t i = 0; first < end; first += ROWS, ++i) {
    const Place at{p, b, h, tile(first, end)};
    const int64_t t = at.x.t, d = p.k_dim, e = p.v_dim;
    const Kept& kept = w.tiles[i];
    read_tile(at, w);
    pair_products(p, t, w, kept.products);
    product(t, e, d, w.decayed, d, kept.state, e, kept.values, e, false);
    new_values(at, w, kept.products, kept.errors, kept.values);
    if (first + ROWS < end) next_state(p, t, w, kept.values, kept.state, w.tiles[i + 1].state);
  }
}

// dX in place of dN, and dO below it.
void solve_gradients(const Place& at, const Kept& kept, const Backward& w, const float* dstate) {
  const int64_t t = at.x.t, d = at.p.k_dim, e = at.p.v_dim;
  float* dout = w.grads + t * e;
  multiply(w.keys.rows, w.fall, t * d, w.spare);
  product(t, e, d, w.spare, d, dstate, e, w.grads, e, false);
  at.read(at.p.out, e, dout);
  transpose(kept.products + t * t, t, t, t, w.turned, t);
  product(t, e, t, w.turned, t, dout, e, w.grads, e, true);
  transpose(kept.products, t, t, t, w.system, t);
  for (int64_t j = 0; j < t; ++j)
    for (int64_t i = 0; i < t; ++i) w.system[j * t + i] *= -w.beta[i];
  solve_transposed(w.system, t, e, w.grads);
}

// ``dpairs`` and ``turned`` from dX and dO; writes the gradients of beta and of v, and leaves -beta dX and scale dO.
void value_gradients(const Place& at, const Kept& kept, const Backward& w) {
  const auto& [p, b, h, x] = at;
  const int64_t t = x.t, e = p.v_dim;
  transpose(kept.values, e, t, e, w.spare, t);
  product(2 * t, t, e, w.grads, e, w.spare, t, w.dpairs, t, false);
  for (int64_t i = 0; i < t; ++i) {
    float *row = w.grads + i * e, *dpairs = w.dpairs + i * t;
    const float dbeta = dot(row, kept.errors + i * e, e) - dot(dpairs, kept.products + i * t, i);
    if (i < x.n) number(p.dbeta, b, h, x.first + i) = dbeta;
    scale_row(dpairs, t, -w.beta[i]);
    scale_row(row, e, w.beta[i]);
  }
  at.write(p.dv, e, w.grads);
  scale_row(w.grads, t * e, -1.0f);
  scale_row(w.grads + t * e, t * e, p.scale);
  scale_row(w.dpairs + t * t, t * t, p.scale);
  transpose(w.dpairs, t, 2 * t, t, w.turned, 2 * t);
}

// Gradients through the state before the tile and after it; ``dstate`` becomes that of the one before.
void state_gradients(const DeltaRule& p, int64_t t, const Kept& kept, const Backward& w, float* dstate) {
  const int64_t d = p.k_dim, e = p.v_dim;
  transpose(kept.state, e, d, e, w.spare, d);
  product(2 * t, d, e, w.grads, e, w.spare, d, w.drows, d, false);
  for (int64_t of : {int64_t(0), t * d}) multiply(w.drows + of, w.rise, t * d, w.drows + of);
  for (int64_t c = 0; c < d; ++c) w.dlast[c] = w.last[c] * dot(dstate + c * e, kept.state + c * e, e);
  transpose(dstate, e, d, e, w.spare, d);
  product(t, d, e, kept.values, e, w.spare, d, w.dearly, d, false);
  multiply(w.dearly, w.fall, t * d, w.dearly);
  for (int64_t i = 0; i < t; ++i) add_product(w.dearly + i * d, w.keys.rows + i * d, d, w.dlast);
  scale_rows(dstate, w.last, d, e, dstate);
  transpose(w.decayed, d, 2 * t, d, w.spare, 2 * t);
  product(d, e, 2 * t, w.spare, 2 * t, w.grads, e, dstate, e, true);
}

// Of pairs within a block; <q_i, k_i> is left out.
void block_gradients(int64_t d, int64_t t, int64_t low, const Backward& w) {
  const float *keys = w.keys.rows, *queries = keys + t * d;
  float *early = w.spare, *column = w.spare + d;  // k_j up to token i, and the gradient of that
  for (int64_t j = low; j < low + BLOCK; ++j) {
    const float *of_keys = w.turned + j * 2 * t, *of_queries = of_keys + t;
    std::copy_n(keys + j * d, d, early);
    for (int64_t i = j + 1; i < low + BLOCK; ++i) {
      const float *gate = w.gates + i * d, of_key = of_keys[i], of_query = of_queries[i];
      float *dkey = w.drows + i * d, *dquery = w.drows + (t + i) * d;
#pragma omp simd
      for (int64_t c = 0; c < d; ++c) {
        early[c] *= gate[c];
        dkey[c] += of_key * early[c];
        dquery[c] += of_query * early[c];
      }
    }
    std::fill_n(column, d, 0.0f);
    for (int64_t i = low + BLOCK - 1; i > j; --i) {
      const float *gate = w.gates + i * d, *key = keys + i * d, *query = queries + i * d;
      const float of_key = of_keys[i], of_query = of_queries[i];
#pragma omp simd
      for (int64_t c = 0; c < d; ++c) column[c] = (column[c] + of_key * key[c] + of_query * query[c]) * gate[c];
    }
    add_row(w.dearly + j * d, column, d, 1.0f);
  }
}

// Of pairs between halves.
void half_gradients(int64_t d, int64_t t, int64_t size, const Backward& w) {
  decay_halves(d, t, size, w);
  with_halves(t, size, [&](int64_t start, int64_t middle, int64_t end) {
    const int64_t late = end - middle;
    const float* turned = w.turned + start * 2 * t + middle;
    float* columns = w.spare + start * d;
    for (int64_t first : {middle, t + middle}) {
      float* rows = w.spare + first * d;
      product(late, d, size, w.dpairs + first * t + start, t, w.decayed + start * d, d, rows, d, false);
      add_product(rows, w.rise + middle * d, late * d, w.drows + first * d);
      product(size, d, late, turned + first - middle, 2 * t, w.decayed + first * d, d, columns, d, first != middle);
    }
    add_product(columns, w.fall + start * d, size * d, w.dearly + start * d);
  });
}

// Gradients of g, k and q, from those of rows, columns and c_C.
void write_gradients(const Place& at, const Backward& w) {
  const int64_t t = at.x.t, d = at.p.k_dim;
  float* dgates = w.spare;
  for (int64_t i = t - 1; i >= 0; --i) {
    const float *key = w.keys.rows + i * d, *query = key + t * d, *dearly = w.dearly + i * d;
    float *dkey = w.drows + i * d, *dquery = dkey + t * d, *dgate = dgates + i * d;
    const float own = w.dpairs[(t + i) * t + i];
    std::copy_n(i < t - 1 ? dgate + d : w.dlast, d, dgate);
#pragma omp simd
    for (int64_t c = 0; c < d; ++c) {
      dgate[c] += key[c] * (dkey[c] - dearly[c]) + query[c] * dquery[c];
      dkey[c] += dearly[c] + own * query[c];
      dquery[c] += own * key[c];
    }
  }
  for (int64_t i = 0; i < 2 * t && at.p.normalized; ++i) {
    const float *key = w.keys.rows + i * d, along = dot(w.drows + i * d, key, d), root = w.keys.roots[i];
    for (int64_t c = 0; c < d; ++c) w.drows[i * d + c] = (w.drows[i * d + c] - key[c] * along) * root;
  }
  at.write(at.p.dg, d, dgates);
  at.write(at.p.dk, d, w.drows);
  at.write(at.p.dq, d, w.drows + t * d);
}

// ``dstate`` is the gradient of the state after the tile, and becomes that of the one before it.
void backward_tile(const Place& at, const Kept& kept, const Backward& w, float* dstate) {
  const int64_t t = at.x.t, d = at.p.k_dim;
  read_tile(at, w);
  for (int64_t size = BLOCK; size < t; size *= 2) merge_halves(d, t, size, w);
  decay_rows(d, t, w);
  solve_gradients(at, kept, w, dstate);
  value_gradients(at, kept, w);
  state_gradients(at.p, t, kept, w, dstate);
  read_gates(at, w);
  for (int64_t low = 0; low < t; low += BLOCK) block_gradients(d, t, low, w);
  for (int64_t size = BLOCK; size < t; size *= 2) {
    half_gradients(d, t, size, w);
    merge_halves(d, t, size, w);
  }
  write_gradients(at, w);
}

void backward_head(const DeltaRule& p, int64_t b, int64_t h, const Backward& w) {
  const FlushSmall flush;
  const int64_t size = p.k_dim * p.v_dim, head = b * p.heads + h;
  for (int64_t span = spans(p) - 1; span >= 0; --span) {
    const int64_t low = span * p.span, end = std::min(p.seq, low + p.span);
    std::copy_n(p.starts + (head * spans(p) + span) * size, size, w.tiles[0].state);
    forward_again(p, b, h, low, end, w);
    for (int64_t i = parts(end - low, ROWS) - 1; i >= 0; --i)
      backward_tile({p, b, h, tile(low + i * ROWS, end)}, w.tiles[i], w, p.state + head * size);
  }
}

}}  // namespace kimi

// As delta_rule_forward and delta_rule_backward, with gates and their gradients [batch, heads, seq, k_dim].
extern "C" int kimi_delta_forward(const DeltaRule* p) { return delta_rule<kimi::Forward>(*p, kimi::forward_head); }
extern "C" int kimi_delta_backward(const DeltaRule* p) { return delta_rule<kimi::Backward>(*p, kimi::backward_head); }
