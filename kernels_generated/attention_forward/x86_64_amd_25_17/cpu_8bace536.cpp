// attention_forward / cpu: O = softmax(scale * Q K^T) V, a tile of queries against one block of
// keys after another
// BUFFER=block, LEFT_LAYOUT=none, MICRO_ROWS=6, MICRO_VECTORS=2, PAD=0, PARALLEL=tiles,
// RESCALE=pass, RIGHT_LAYOUT=transposed, SCHEDULE=static, SCORES=columns, TILE_K=96, TILE_Q=96,
// UNROLL=1, V_LAYOUT=none
#include <cmath>
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

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

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
constexpr int64_t SPAN_Q = round_up(TILE_Q, PANEL);
constexpr int64_t TILE_K = round_up(96, MICRO_ROWS);  // keys of a block

// The scores of a block lie transposed: a row for every key, a column for every query.
constexpr int64_t SCORE_STRIDE = SPAN_Q;
constexpr int64_t SCORE_COUNT = TILE_K * SCORE_STRIDE;

struct Problem {
  const float* q;  // [B, H, S, D]
  const float* k;  // [B, KV, T, D]
  const float* v;  // [B, KV, T, D]
  float* o;        // [B, H, S, D]
  float* lse;      // [B, H, S]
  int64_t B, H, S, D, KV, T;
  bool causal;
  float scale;

  int64_t width() const { return round_up(D, PANEL); }  // of a row of outputs in scratch
  int64_t tiles() const { return (S + TILE_Q - 1) / TILE_Q; }
};

// Rows `first` to `first + COUNT` of a [rows, D] matrix; past its end, its last row again.
template <int64_t COUNT>
struct RowGroup {
  RowGroup(const float* matrix, int64_t rows, int64_t D, int64_t first) {
    for (int64_t m = 0; m < COUNT; ++m) row[m] = matrix + smaller(first + m, rows - 1) * D;
  }

  const float* row[COUNT];
};

// The rows of a [rows, D] matrix times scale as columns [D, SPAN_Q], with 0 up to a whole panel.
inline void transpose_rows(const float* from, int64_t rows, int64_t D, float scale,
                           float* columns) {
  for (int64_t n = 0; n < round_up(rows, PANEL); ++n) {
    float* to = columns + n;
    for (int64_t d = 0; d < D; ++d) to[d * SPAN_Q] = n < rows ? scale * from[n * D + d] : 0.0f;
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

// What one thread works with.
struct Workspace {
  const Problem& problem;
  Scratch scores{SCORE_COUNT};
  Scratch outputs{TILE_Q * problem.width()};  // [TILE_Q, width], not yet divided by the totals
  Scratch maxima{SPAN_Q};  // of the scores that each query has met
  Scratch totals{SPAN_Q};  // of their exponentials
  Scratch rescales{SPAN_Q};  // what a larger maximum makes of the earlier outputs
  Scratch queries{SPAN_Q * problem.D};  // [D, SPAN_Q], times scale
  Scratch last_panel{TILE_K * PANEL};  // of a block of values, if D is no multiple of PANEL
};

// The scores of a tile of queries for a block of keys; query i sees the first `edge + i` of them.
inline void score_block(const Problem& problem, const float* queries, int64_t query_count,
                        const float* keys, int64_t key_count, int64_t edge, float* scores) {
  const int64_t D = problem.D;
  for (int64_t query = 0; query < query_count; query += PANEL) {
    const int64_t seen = smaller(key_count, edge + query + PANEL - 1);
    for (int64_t key = 0; key < seen; key += MICRO_ROWS) {
      const RowGroup<MICRO_ROWS> left(keys, key_count, D, key);
      float* tile = scores + key * SCORE_STRIDE + query;
      multiply_tile(
          [=](int64_t m, int64_t d) { return left.row[m][d]; },
          queries + query, SPAN_Q, D,
          [=](int64_t m, int64_t n, Vector sum) { store(tile + m * SCORE_STRIDE + n, sum); });
    }
  }
}

// Turns the scores of a block into exponentials below each query's maximum; hidden ones become 0.
inline void exponentiate_block(int64_t queries, int64_t keys, int64_t edge, Workspace& work) {
  float* scores = work.scores.data;
  for (int64_t key = edge > 0 ? edge : 0; key < keys; ++key) {
    const int64_t hidden = smaller(key - edge + 1, SPAN_Q);
    for (int64_t i = 0; i < hidden; ++i) scores[key * SCORE_STRIDE + i] = -INFINITY;
  }
  for (int64_t query = 0; query < queries; query += LANES) {
    const Vector before = load(work.maxima.data + query);
    Vector maximum = before;
    for (int64_t key = 0; key < keys; ++key) {
      maximum = larger(maximum, load(scores + key * SCORE_STRIDE + query));
    }
    // A query that has seen no key yet keeps the maximum -inf, which must not be subtracted.
    const Vector base = maximum == -INFINITY ? Vector{} : maximum;
    Vector total = {};
    for (int64_t key = 0; key < keys; ++key) {
      float* score = scores + key * SCORE_STRIDE + query;
      const Vector power = exponential(load(score) - base);
      store(score, power);
      total += power;
    }
    const Vector rescale = exponential(before - base);
    store(work.maxima.data + query, maximum);
    store(work.rescales.data + query, rescale);
    store(work.totals.data + query, load(work.totals.data + query) * rescale + total);
  }
}

inline void rescale_outputs(int64_t queries, int64_t width, Workspace& work) {
  for (int64_t query = 0; query < queries; ++query) {
    const float rescale = work.rescales.data[query];
    if (rescale == 1.0f) continue;
    float* row = work.outputs.data + query * width;
    for (int64_t d = 0; d < width; d += LANES) store(row + d, load(row + d) * rescale);
  }
}

// outputs += exponentials * V for a tile of queries and a block of values.
inline void add_values(const Problem& problem, int64_t queries, const float* values, int64_t keys,
                       int64_t edge, Workspace& work) {
  const int64_t width = problem.width();
  for (int64_t panel = 0; panel < width; panel += PANEL) {
    const float* right = values + panel;
    int64_t stride = problem.D;
    if (panel + PANEL > problem.D) {
      copy_panel(values, keys, problem.D, panel, work.last_panel.data);
      right = work.last_panel.data;
      stride = PANEL;
    }
    for (int64_t query = 0; query < queries; query += MICRO_ROWS) {
      const int64_t seen = smaller(keys, edge + query + MICRO_ROWS - 1);
      const float* left = work.scores.data + query;
      float* tile = work.outputs.data + query * width + panel;
      multiply_tile(
          [=](int64_t m, int64_t key) { return left[key * SCORE_STRIDE + m]; },
          right, stride, seen, [=](int64_t m, int64_t n, Vector sum) {
            float* to = tile + m * width + n;
            store(to, load(to) + sum);
          });
    }
  }
}

inline void store_tile(const Problem& problem, int64_t queries, float* o, float* lse,
                       const Workspace& work) {
  for (int64_t query = 0; query < queries; ++query) {
    const float total = work.totals.data[query];
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;  // a query that sees no key gets 0
    const float* row = work.outputs.data + query * problem.width();
    for (int64_t d = 0; d < problem.D; ++d) o[query * problem.D + d] = row[d] * factor;
    lse[query] = work.maxima.data[query] + std::log(total);
  }
}

// Writes the outputs of tile `tile` of a head of Q.
inline void attend_tile(const Problem& problem, int64_t head, int64_t tile, Workspace& work) {
  const int64_t D = problem.D;
  const int64_t T = problem.T;
  const int64_t first = tile * TILE_Q;
  const int64_t queries = smaller(TILE_Q, problem.S - first);
  const int64_t row = head * problem.S + first;
  const int64_t kv_head = head / (problem.H / problem.KV);
  const float* q = work.queries.data;
  transpose_rows(problem.q + row * D, queries, D, problem.scale, work.queries.data);
  for (int64_t i = 0; i < SPAN_Q; ++i) {
    work.maxima.data[i] = -INFINITY;
    work.totals.data[i] = 0.0f;
    work.rescales.data[i] = 1.0f;
  }
  std::memset(work.outputs.data, 0, TILE_Q * problem.width() * sizeof(float));

  // The first query sees keys 0 to edge - 1, each further query one key more.
  const int64_t edge = problem.causal ? first + T - problem.S + 1 : T;
  const int64_t end = smaller(T, edge + queries - 1);
  for (int64_t key = 0; key < end; key += TILE_K) {
    const int64_t keys = smaller(TILE_K, end - key);
    const float* k = problem.k + (kv_head * T + key) * D;
    const float* v = problem.v + (kv_head * T + key) * D;
    score_block(problem, q, queries, k, keys, edge - key, work.scores.data);
    exponentiate_block(queries, keys, edge - key, work);
    rescale_outputs(queries, problem.width(), work);
    add_values(problem, queries, v, keys, edge - key, work);
  }
  store_tile(problem, queries, problem.o + row * D, problem.lse + row, work);
}

}  // namespace

extern "C" void attention_forward(const float* q, const float* k, const float* v, float* o,
                                  float* lse, int64_t B, int64_t H, int64_t S, int64_t D,
                                  int64_t KV, int64_t T, int32_t causal, double scale) {
  const Problem problem{q, k, v, o, lse, B, H, S, D, KV, T,
                        causal != 0, static_cast<float>(scale)};
  const int64_t tiles = problem.tiles();
#pragma omp parallel
  {
    Workspace work{problem};
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < B * H * tiles; ++unit) {
      attend_tile(problem, unit / tiles, unit % tiles, work);
    }
  }
}
