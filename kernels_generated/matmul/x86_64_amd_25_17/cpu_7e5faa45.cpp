// matmul / cpu: C = activation(A B + bias) in float32; A [M, K], B [K, N] or its transpose, and C
// [M, N] are row-major.
// BUFFER=single, LAYOUT=panel_b, MICRO_M=6, MICRO_VECTORS=4, ORDER=columns_inside, PREFETCH=0,
// SPLIT=columns, TILE_K=512, TILE_M=96, TILE_N=128, UNROLL=1, WIDTH=full
#include <omp.h>

#include <cstdint>
#include <cstdlib>

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

// The first `count` floats at `from`; the other lanes hold `fill`.
inline Vector load_part(const float* from, int64_t count, float fill) {
  float lanes[LANES];
  for (int64_t lane = 0; lane < LANES; ++lane) lanes[lane] = lane < count ? from[lane] : fill;
  return load(lanes);
}

inline void store_part(float* to, int64_t count, Vector value) {
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = value[lane];
}

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

constexpr int64_t VECTORS = 4;
constexpr int64_t MICRO_M = 6;  // a register tile of C is [MICRO_M, MICRO_N]
constexpr int64_t MICRO_N = VECTORS * LANES;
constexpr int64_t TILE_M = 96;
constexpr int64_t TILE_N = 128;
constexpr int64_t TILE_K = 512;
constexpr int64_t B_STRIP = TILE_K * MICRO_N;  // [TILE_K, MICRO_N]
constexpr int64_t B_PANEL = (TILE_N + MICRO_N - 1) / MICRO_N * B_STRIP;

inline int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

struct Range {
  int64_t begin, end;
};

// This thread's part of `extent`, cut at multiples of `unit`.
inline Range share(int64_t extent, int64_t unit) {
  const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
  const int64_t units = (extent + unit - 1) / unit;
  return {smaller(extent, units * thread / threads * unit),
          smaller(extent, units * (thread + 1) / threads * unit)};
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

// Packs B [depth, width] into strips of MICRO_N columns, row by row; 0 past the last column.
// The element of row p and column j lies at b[p * stride_p + j * stride_j].
void pack_b(const float* b, int64_t stride_p, int64_t stride_j, int64_t depth, int64_t width,
            float* panel) {
  for (int64_t j = 0; j < width; j += MICRO_N, panel += B_STRIP) {
    const int64_t columns = smaller(MICRO_N, width - j);
    if (stride_j != 1) {
      for (int64_t column = 0; column < MICRO_N; ++column) {
        const float* from = b + smaller(j + column, width - 1) * stride_j;
        for (int64_t p = 0; p < depth; ++p) {
          panel[p * MICRO_N + column] = column < columns ? from[p * stride_p] : 0.0f;
        }
      }
      continue;
    }
    for (int64_t p = 0; p < depth; ++p) {
      const float* from = b + p * stride_p + j;
      float* to = panel + p * MICRO_N;
      if (columns == MICRO_N) {
        for (int64_t v = 0; v < VECTORS; ++v) store(to + v * LANES, load(from + v * LANES));
      } else {
        for (int64_t column = 0; column < columns; ++column) to[column] = from[column];
        for (int64_t column = columns; column < MICRO_N; ++column) to[column] = 0.0f;
      }
    }
  }
}

// C [MICRO_M, MICRO_N] (+)= A [MICRO_M, depth] * B [depth, MICRO_N], in registers.
// Past the last of `rows` it reads the last one again.
void multiply_registers(const float* a, int64_t a_stride, const float* b,
                        float* c, int64_t c_stride, int64_t depth, bool accumulate, int64_t rows) {
  Vector sums[MICRO_M][VECTORS] = {};
  const float* a_rows[MICRO_M];
  for (int64_t i = 0; i < MICRO_M; ++i) a_rows[i] = a + smaller(i, rows - 1) * a_stride;
  for (int64_t p = 0; p < depth; ++p) {
    const float* b_row = b + p * MICRO_N;
    for (int64_t i = 0; i < MICRO_M; ++i) {
      for (int64_t v = 0; v < VECTORS; ++v) {
        sums[i][v] += a_rows[i][p] * load(b_row + v * LANES);
      }
    }
  }
#pragma GCC unroll 6
  for (int64_t i = 0; i < MICRO_M; ++i) {
    for (int64_t v = 0; v < VECTORS; ++v) {
      float* to = c + i * c_stride + v * LANES;
      store(to, accumulate ? load(to) + sums[i][v] : sums[i][v]);
    }
  }
}

// The same where C ends after `rows` and `columns`: part of a whole tile that is made aside.
void multiply_edge(const float* a, int64_t a_stride, const float* b,
                   float* c, int64_t c_stride, int64_t depth, bool accumulate, int64_t rows,
                   int64_t columns) {
  float tile[MICRO_M * MICRO_N];
  multiply_registers(a, a_stride, b, tile, MICRO_N, depth, false, rows);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      float& to = c[i * c_stride + j];
      to = accumulate ? to + tile[i * MICRO_N + j] : tile[i * MICRO_N + j];
    }
  }
}

// C [height, width] (+)= A [height, depth] * B [depth, width], one register tile after the other.
void multiply_tile(const float* a, int64_t a_stride, const float* b,
                   float* c, int64_t c_stride, int64_t height, int64_t width, int64_t depth,
                   bool accumulate) {
  for (int64_t i = 0; i < height; i += MICRO_M) {
    for (int64_t j = 0; j < width; j += MICRO_N) {
      const int64_t rows = smaller(MICRO_M, height - i), columns = smaller(MICRO_N, width - j);
      const float* a_i = a + i * a_stride;
      const float* b_j = b + j / MICRO_N * B_STRIP;
      float* to = c + i * c_stride + j;
      if (rows == MICRO_M && columns == MICRO_N) {
        multiply_registers(a_i, a_stride, b_j, to, c_stride, depth, accumulate, rows);
      } else {
        multiply_edge(a_i, a_stride, b_j, to, c_stride, depth, accumulate, rows, columns);
      }
    }
  }
}

enum Activation : int32_t { NONE, RELU, GELU, SILU };

inline Vector activate(Vector x, int32_t activation) {
  if (activation == RELU) return x < 0.0f ? Vector{} : x;  // NaN stays NaN
  if (activation == SILU) {
    const Vector lowest = -x > 88.0f ? Vector{} + 88.0f : -x;
    return x / (1.0f + exponential(lowest));
  }
  if (activation == GELU) {
    // 1 - erf(z) for z >= 0 within 1.5e-7: Abramowitz and Stegun, 7.1.26
    const Vector z = (x < 0.0f ? -x : x) * 0.70710678f;
    const Vector t = 1.0f / (1.0f + 0.3275911f * z);
    Vector rest = t * 1.061405429f - 1.453152027f;
    rest = rest * t + 1.421413741f;
    rest = rest * t - 0.284496736f;
    rest = (rest * t + 0.254829592f) * t * exponential(-z * z);
    return x * (x < 0.0f ? 0.5f * rest : 1.0f - 0.5f * rest);
  }
  return x;
}

// What follows the product: C [height, width] = activation(C + bias).
void finish(float* c, int64_t c_stride, int64_t height, int64_t width, const float* bias,
            int32_t activation) {
  for (int64_t i = 0; i < height; ++i) {
    float* row = c + i * c_stride;
    for (int64_t j = 0; j < width; j += LANES) {
      const int64_t count = width - j;
      const bool whole = count >= LANES;
      Vector x = whole ? load(row + j) : load_part(row + j, count, 0.0f);
      if (bias) x += whole ? load(bias + j) : load_part(bias + j, count, 0.0f);
      x = activate(x, activation);
      if (whole) {
        store(row + j, x);
      } else {
        store_part(row + j, count, x);
      }
    }
  }
}

}  // namespace

extern "C" void matmul(const float* a, const float* b, const float* bias, float* c, int64_t M,
                       int64_t K, int64_t N, int32_t activation, int32_t transposed_b,
                       int32_t /* allow_tf32: these products are those of float32 */) {
  const int64_t b_p = transposed_b ? 1 : N, b_j = transposed_b ? K : 1;  // strides of B
  // Finishes a tile of C that the products up to p + TILE_K have been added to.
  const auto finish_tile = [&](int64_t i, int64_t j, int64_t height, int64_t width, int64_t p) {
    if (p + TILE_K < K || (!bias && activation == NONE)) return;
    finish(c + i * N + j, N, height, width, bias ? bias + j : nullptr, activation);
  };
  const int64_t depths = K > 0 ? (K + TILE_K - 1) / TILE_K : 1;  // K = 0: one empty step clears C
  Scratch b_panels(omp_get_max_threads() * B_PANEL);
#pragma omp parallel
  {
    const Range rows = {0, M}, columns = share(N, MICRO_N);
    float* b_panel = b_panels.data + omp_get_thread_num() * B_PANEL;
    for (int64_t j = columns.begin; j < columns.end; j += TILE_N) {
      const int64_t width = smaller(TILE_N, columns.end - j);
      for (int64_t step = 0; step < depths; ++step) {
        const int64_t p = step * TILE_K, depth = smaller(TILE_K, K - p);
        pack_b(b + p * b_p + j * b_j, b_p, b_j, depth, width, b_panel);
        for (int64_t i = rows.begin; i < rows.end; i += TILE_M) {
          const int64_t height = smaller(TILE_M, rows.end - i);
          multiply_tile(a + i * K + p, K, b_panel, c + i * N + j, N, height, width, depth, p > 0);
          finish_tile(i, j, height, width, p);
        }
      }
    }
  }
}
