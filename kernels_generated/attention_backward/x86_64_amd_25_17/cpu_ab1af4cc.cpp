// attention_backward / cpu: dQ, dK and dV of O = softmax(scale * Q K^T) V; P = exp(scale * Q K^T
// - lse) is computed anew for a tile of queries and a tile of keys at a time
// BUFFER=block, LEFT_LAYOUT=none, LOOP=keys, MICRO_ROWS=6, MICRO_VECTORS=2, PAD=0,
// PARALLEL=heads, PASSES=1, RIGHT_LAYOUT=transposed, ROW_LAYOUT=none, SCHEDULE=static,
// SCORES=rows, TILE_K=96, TILE_Q=96, UNROLL=1
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;  // floats in a vector
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef float UnalignedVector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const UnalignedVector*>(from); }

inline void store(float* to, Vector value) { *reinterpret_cast<UnalignedVector*>(to) = value; }

inline Vector broadcast(float value) { return value - Vector{}; }

typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

// exp(x) for x <= 88 as 2^n * exp(r), |r| <= log(2) / 2; 0 below the smallest normal number.
inline Vector exponential(Vector x) {
  constexpr float LOG2_E = 0x1.715476p+0f;
  constexpr float LOG_2_HIGH = 0x1.63p-1f;  // few bits: n * LOG_2_HIGH is exact
  constexpr float LOG_2_LOW = -0x1.bd0106p-13f;
  constexpr float ROUND = 0x1.8p23f + 127;  // leaves n + 127, the exponent's bits, in the low bits
  constexpr float SMALLEST = -0x1.5d589ep+6f;  // log(FLT_MIN)
  const Vector rounded = x * LOG2_E + ROUND;
  const Vector n = rounded - ROUND;
  const Vector r = (x - n * LOG_2_HIGH) - n * LOG_2_LOW;
  Vector polynomial = r * 0x1.6a2352p-10f + 0x1.123a6cp-7f;
  polynomial = polynomial * r + 0x1.5558f4p-5f;
  polynomial = polynomial * r + 0x1.555490p-3f;
  polynomial = polynomial * r + 0x1.fffffcp-2f;
  polynomial = polynomial * r + 1.0f;
  polynomial = polynomial * r + 1.0f;
  const Vector power = reinterpret_cast<Vector>(reinterpret_cast<Words>(rounded) << 23);
  return x < SMALLEST ? Vector{} : polynomial * power;
}

// Floats on a 64-byte boundary, freed when they go out of scope.
struct Scratch {
  explicit Scratch(int64_t count)
      : data(static_cast<float*>(std::aligned_alloc(64, (count / 16 + 1) * 64))) {
    if (data == nullptr) std::abort();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data); }

  float* const data;
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The register tile: MICRO_ROWS x PANEL sums.
constexpr int64_t MICRO_ROWS = 6;
constexpr int64_t MICRO_VECTORS = 2;
constexpr int64_t PANEL = MICRO_VECTORS * LANES;

constexpr int64_t TILE_Q = round_up(96, MICRO_ROWS);  // queries of a tile
constexpr int64_t TILE_K = round_up(96, MICRO_ROWS);  // keys of a tile
constexpr int64_t SPAN_K = round_up(TILE_K, PANEL);

// The scores of two tiles: a row for every query, a column for every key.
constexpr int64_t SCORE_STRIDE = SPAN_K;
constexpr int64_t SCORE_COUNT = TILE_Q * SCORE_STRIDE;

struct Problem {
  const float* q;      // [B, H, S, D]
  const float* k;      // [B, KV, T, D]
  const float* v;      // [B, KV, T, D]
  const float* lse;    // [B, H, S]
  const float* d_o;    // [B, H, S, D]
  const float* delta;  // [B, H, S], dot products of the rows of O and dO
  float* dq;           // [B, H, S, D]
  float* dk;           // [B, KV, T, D]
  float* dv;           // [B, KV, T, D]
  int64_t B, H, S, D, KV, T;
  bool causal;
  float scale;

  int64_t width() const { return round_up(D, PANEL); }  // of a row of gradients in scratch
  int64_t group() const { return H / KV; }  // heads of Q that share a head of K and V
  int64_t query_tiles() const { return (S + TILE_Q - 1) / TILE_Q; }  // of a head
  int64_t key_tiles() const { return (T + TILE_K - 1) / TILE_K; }
};

// Queries of a head and their output gradients, as the products read them.
struct QueryTile {
  int64_t first, count;
  int64_t row;  // of the first one in [B, H, S]
  const float *q, *d_o;
  const float *q_rows, *d_o_rows;
};

// Keys and values of a head, as the products read them.
struct KeyTile {
  int64_t first, count;
  int64_t row;  // of the first one in [B, KV, T]
  float *k, *v;  // [D, SPAN_K]
  const float* k_rows;
};

// Rows `first` to `first + COUNT` of a [rows, D] matrix; past its end, its last row again.
template <int64_t COUNT>
struct RowGroup {
  RowGroup(const float* matrix, int64_t rows, int64_t D, int64_t first) {
    for (int64_t m = 0; m < COUNT; ++m) row[m] = matrix + smaller(first + m, rows - 1) * D;
  }

  const float* row[COUNT];
};

// The rows of a [rows, D] matrix as columns [D, SPAN_K], with 0 up to a whole panel.
inline void transpose_rows(const float* from, int64_t rows, int64_t D, float* columns) {
  for (int64_t n = 0; n < round_up(rows, PANEL); ++n) {
    float* to = columns + n;
    for (int64_t d = 0; d < D; ++d) to[d * SPAN_K] = n < rows ? from[n * D + d] : 0.0f;
  }
}

// Columns `first` to `first + PANEL` of a [rows, D] matrix; those it lacks are 0.
inline void copy_panel(const float* from, int64_t rows, int64_t D, int64_t first, float* panel) {
  for (int64_t row = 0; row < rows; ++row, panel += PANEL) {
    const float* source = from + row * D + first;
    if (first + PANEL <= D) {
      std::memcpy(panel, source, PANEL * sizeof(float));
    } else {
      for (int64_t n = 0; n < PANEL; ++n) panel[n] = first + n < D ? source[n] : 0.0f;
    }
  }
}

// sums[m][n] = sum over i < depth of left(m, i) * right[i][n], kept in registers; every vector of
// sums then goes to finish(m, n, sum).
template <class Left, class Finish>
inline void multiply_tile(Left left, const float* right, int64_t stride, int64_t depth,
                          Finish finish) {
  Vector sums[MICRO_ROWS][MICRO_VECTORS] = {};
  for (int64_t i = 0; i < depth; ++i) {
    Vector row[MICRO_VECTORS];
#pragma GCC unroll 2
    for (int64_t n = 0; n < MICRO_VECTORS; ++n) row[n] = load(right + i * stride + n * LANES);
#pragma GCC unroll 6
    for (int64_t m = 0; m < MICRO_ROWS; ++m) {
      const Vector factor = broadcast(left(m, i));
#pragma GCC unroll 2
      for (int64_t n = 0; n < MICRO_VECTORS; ++n) sums[m][n] += factor * row[n];
    }
  }
#pragma GCC unroll 6
  for (int64_t m = 0; m < MICRO_ROWS; ++m) {
#pragma GCC unroll 2
    for (int64_t n = 0; n < MICRO_VECTORS; ++n) finish(m, n * LANES, sums[m][n]);
  }
}

// A tile of queries and a tile of keys, as the products read them.
struct Operands {
  const Problem& problem;
  const int64_t D = problem.D;
  Scratch k{SPAN_K * D};
  Scratch v{SPAN_K * D};

  KeyTile keys(int64_t kv_head, int64_t tile) const {
    const int64_t first = tile * TILE_K;
    const int64_t row = kv_head * problem.T + first;
    return {first,
            smaller(TILE_K, problem.T - first),
            row,
            k.data,
            v.data,
            problem.k + row * D};
  }

  // `tile` counts through the heads of Q that share the head of K and V.
  QueryTile queries(int64_t kv_head, int64_t tile) const {
    const int64_t head = kv_head * problem.group() + tile / problem.query_tiles();
    const int64_t first = tile % problem.query_tiles() * TILE_Q;
    const int64_t row = head * problem.S + first;
    return {first,
            smaller(TILE_Q, problem.S - first),
            row,
            problem.q + row * D,
            problem.d_o + row * D,
            problem.q + row * D,
            problem.d_o + row * D};
  }

  void pack(const KeyTile& tile) {
    const int64_t offset = tile.row * D;
    transpose_rows(problem.k + offset, tile.count, D, tile.k);
    transpose_rows(problem.v + offset, tile.count, D, tile.v);
  }
};

// What one thread works with, beside the operands.
struct Workspace {
  const Problem& problem;
  Scratch p{SCORE_COUNT};  // scores, then the probabilities P
  Scratch ds{SCORE_COUNT};  // dP, then dS
  Scratch dk{TILE_K * problem.width()};  // [TILE_K, width], not yet times scale
  Scratch dv{TILE_K * problem.width()};
  // The last panel of a tile's rows, if D is no multiple of PANEL.
  Scratch last_panel{(TILE_Q > TILE_K ? TILE_Q : TILE_K) * PANEL};
};

// The products of rows of two tiles that see each other; query i sees the first `edge + i` keys.
// Not inlined, so that scores and dP share one copy of the code.
[[gnu::noinline]] void multiply_tiles(const float* queries, int64_t query_count, const float* keys,
                                      int64_t key_count, int64_t edge, int64_t D,
                                      float* products) {
  for (int64_t key = 0; key < key_count; key += PANEL) {
    const float* right = keys + key;
    const int64_t stride = SPAN_K;
    for (int64_t query = 0; query < query_count; query += MICRO_ROWS) {
      if (key >= edge + query + MICRO_ROWS - 1) continue;  // hidden from all of them
      const RowGroup<MICRO_ROWS> left(queries, query_count, D, query);
      float* tile = products + query * SCORE_STRIDE + key;
      multiply_tile([=](int64_t m, int64_t d) { return left.row[m][d]; },
                    right, stride, D, [=](int64_t m, int64_t n, Vector sum) {
                      store(tile + m * SCORE_STRIDE + n, sum);
                    });
    }
  }
}

// P and dS = P * (dP - delta) of two tiles; both are 0 where a query does not see a key.
inline void differentiate(const Problem& problem, const QueryTile& queries, const KeyTile& keys,
                          int64_t edge, Workspace& work) {
  float* const p = work.p.data;
  float* const ds = work.ds.data;
  const int64_t D = problem.D;
  multiply_tiles(queries.q, queries.count, keys.k, keys.count, edge, D, p);
  multiply_tiles(queries.d_o, queries.count, keys.v, keys.count, edge, D, ds);
  for (int64_t query = 0; query < queries.count; ++query) {
    float* const p_row = p + query * SCORE_STRIDE;
    float* const ds_row = ds + query * SCORE_STRIDE;
    const float lse = problem.lse[queries.row + query];
    const float delta = problem.delta[queries.row + query];
    const int64_t seen = edge + query < 0 ? 0 : smaller(edge + query, keys.count);
    for (int64_t i = 0; i < seen; i += LANES) {
      const Vector power = exponential(load(p_row + i) * problem.scale - lse);
      store(p_row + i, power);
      store(ds_row + i, power * (load(ds_row + i) - delta));
    }
    for (int64_t i = seen; i < keys.count; ++i) p_row[i] = ds_row[i] = 0.0f;
  }
}

// dq += dS K for two tiles.
inline void add_query_gradients(const Problem& problem, const QueryTile& queries,
                                const KeyTile& keys, int64_t edge, Workspace& work, float* dq) {
  const int64_t width = problem.width();
  for (int64_t panel = 0; panel < width; panel += PANEL) {
    const float* right = keys.k_rows + panel;
    int64_t stride = problem.D;
    if (panel + PANEL > problem.D) {
      copy_panel(keys.k_rows, keys.count, problem.D, panel, work.last_panel.data);
      right = work.last_panel.data;
      stride = PANEL;
    }
    for (int64_t query = 0; query < queries.count; query += MICRO_ROWS) {
      const int64_t seen = smaller(keys.count, edge + query + MICRO_ROWS - 1);
      const float* left = work.ds.data + query * SCORE_STRIDE;
      float* tile = dq + query * width + panel;
      multiply_tile([=](int64_t m, int64_t key) { return left[m * SCORE_STRIDE + key]; },
                    right, stride, seen, [=](int64_t m, int64_t n, Vector sum) {
                      float* to = tile + m * width + n;
                      store(to, load(to) + sum);
                    });
    }
  }
}

// sums += weights^T rows for two tiles: dv with P and dO, dk with dS and Q. Not inlined, either.
[[gnu::noinline]] void add_key_gradients(const Problem& problem, const float* weights,
                                         const float* rows, int64_t queries, int64_t keys,
                                         int64_t edge, Workspace& work, float* sums) {
  const int64_t width = problem.width();
  for (int64_t panel = 0; panel < width; panel += PANEL) {
    const float* right = rows + panel;
    int64_t stride = problem.D;
    if (panel + PANEL > problem.D) {
      copy_panel(rows, queries, problem.D, panel, work.last_panel.data);
      right = work.last_panel.data;
      stride = PANEL;
    }
    for (int64_t key = 0; key < keys; key += MICRO_ROWS) {
      const int64_t hidden = key < edge ? 0 : key - edge + 1;  // queries that see no such key
      const float* left = weights + hidden * SCORE_STRIDE + key;
      float* tile = sums + key * width + panel;
      multiply_tile([=](int64_t m, int64_t query) { return left[query * SCORE_STRIDE + m]; },
                    right + hidden * stride, stride, queries - hidden,
                    [=](int64_t m, int64_t n, Vector sum) {
                      float* to = tile + m * width + n;
                      store(to, load(to) + sum);
                    });
    }
  }
}

inline void store_rows(const float* sums, int64_t rows, const Problem& problem, float factor,
                       float* to) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = sums + row * problem.width();
    for (int64_t d = 0; d < problem.D; ++d) to[row * problem.D + d] = factor * from[d];
  }
}

// Writes dk and dv of a tile of keys; adds its part to dq, [tiles, TILE_Q, width].
inline void visit_queries(const Problem& problem, int64_t kv_head, int64_t key_tile,
                          Operands& operands, Workspace& work, float* dq) {
  const int64_t D = problem.D;
  const int64_t width = problem.width();
  const int64_t offset = problem.T - problem.S;
  KeyTile keys = operands.keys(kv_head, key_tile);
  operands.pack(keys);
  const int64_t count = keys.count;
  std::memset(work.dk.data, 0, TILE_K * width * sizeof(float));
  std::memset(work.dv.data, 0, TILE_K * width * sizeof(float));
  const int64_t first_query = problem.causal && keys.first > offset ? keys.first - offset : 0;
  for (int64_t member = 0; member < problem.group(); ++member) {
    const int64_t end = (member + 1) * problem.query_tiles();
    for (int64_t tile = end - problem.query_tiles() + first_query / TILE_Q; tile < end; ++tile) {
      const QueryTile queries = operands.queries(kv_head, tile);
      // The first query sees `edge` keys of the tile, each further query one more.
      const int64_t edge = problem.causal ? queries.first + offset + 1 - keys.first : count;
      keys.count = smaller(count, round_up(edge + queries.count - 1, MICRO_ROWS));
      differentiate(problem, queries, keys, edge, work);
      add_key_gradients(problem, work.p.data, queries.d_o_rows, queries.count, keys.count, edge,
                        work, work.dv.data);
      add_key_gradients(problem, work.ds.data, queries.q_rows, queries.count, keys.count, edge,
                        work, work.dk.data);
      add_query_gradients(problem, queries, keys, edge, work, dq + tile * TILE_Q * width);
    }
  }
  store_rows(work.dk.data, count, problem, problem.scale, problem.dk + keys.row * D);
  store_rows(work.dv.data, count, problem, 1.0f, problem.dv + keys.row * D);
}

// delta[row] = dot(o[row], d_o[row])
inline void multiply_rows(const float* o, const float* d_o, int64_t rows, int64_t D,
                          float* delta) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = row * D; d < (row + 1) * D; ++d) sum += o[d] * d_o[d];
    delta[row] = sum;
  }
}

}  // namespace

extern "C" void attention_backward(const float* q, const float* k, const float* v, const float* o,
                                   const float* lse, const float* d_o, float* dq, float* dk,
                                   float* dv, int64_t B, int64_t H, int64_t S, int64_t D,
                                   int64_t KV, int64_t T, int32_t causal, double scale) {
  const Scratch delta(B * H * S);
  multiply_rows(o, d_o, B * H * S, D, delta.data);
  const Problem problem{q, k, v, lse, d_o, delta.data, dq, dk, dv, B, H, S, D, KV, T,
                        causal != 0, static_cast<float>(scale)};
  const int64_t key_tiles = problem.key_tiles();
  const int64_t query_tiles = problem.group() * problem.query_tiles();
  const int64_t size = TILE_Q * problem.width();  // of dq of a tile
#pragma omp parallel
  {
    Operands operands{problem};
    Workspace work{problem};
    const Scratch dq_sums(query_tiles * size);
#pragma omp for schedule(static, 1)
    for (int64_t kv_head = 0; kv_head < B * KV; ++kv_head) {
      std::memset(dq_sums.data, 0, query_tiles * size * sizeof(float));
      for (int64_t tile = 0; tile < key_tiles; ++tile) {
        visit_queries(problem, kv_head, tile, operands, work, dq_sums.data);
      }
      for (int64_t tile = 0; tile < query_tiles; ++tile) {
        const QueryTile queries = operands.queries(kv_head, tile);
        const float* sums = dq_sums.data + tile * size;
        store_rows(sums, queries.count, problem, problem.scale, dq + queries.row * D);
      }
    }
  }
}
