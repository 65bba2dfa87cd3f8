// matmul / cpu: C = A B in float32; A [M, K], B [K, N] and C [M, N] are row-major.
// BUFFER=direct, LAYOUT=none, MICRO_M=8, MICRO_VECTORS=1, ORDER=columns_inside, PREFETCH=0,
// SPLIT=rows, TILE_K=512, TILE_M=168, TILE_N=256, UNROLL=8, WIDTH=full
#include <omp.h>

#include <cstdint>

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

constexpr int64_t VECTORS = 1;
constexpr int64_t MICRO_M = 8;  // a register tile of C is [MICRO_M, MICRO_N]
constexpr int64_t MICRO_N = VECTORS * LANES;
constexpr int64_t TILE_M = 168;
constexpr int64_t TILE_N = 256;
constexpr int64_t TILE_K = 512;

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

// C [MICRO_M, MICRO_N] (+)= A [MICRO_M, depth] * B [depth, MICRO_N], in registers.
void multiply_registers(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                        float* c, int64_t c_stride, int64_t depth, bool accumulate) {
  Vector sums[MICRO_M][VECTORS] = {};
#pragma GCC unroll 8
  for (int64_t p = 0; p < depth; ++p) {
    const float* b_row = b + p * b_stride;
    for (int64_t i = 0; i < MICRO_M; ++i) {
      for (int64_t v = 0; v < VECTORS; ++v) {
        sums[i][v] += a[i * a_stride + p] * load(b_row + v * LANES);
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < MICRO_M; ++i) {
    for (int64_t v = 0; v < VECTORS; ++v) {
      float* to = c + i * c_stride + v * LANES;
      store(to, accumulate ? load(to) + sums[i][v] : sums[i][v]);
    }
  }
}

// The same where C ends after `rows` and `columns`.
void multiply_edge(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                   float* c, int64_t c_stride, int64_t depth, bool accumulate, int64_t rows,
                   int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    float sums[MICRO_N] = {};
    for (int64_t p = 0; p < depth; ++p) {
      for (int64_t j = 0; j < columns; ++j) sums[j] += a[i * a_stride + p] * b[p * b_stride + j];
    }
    for (int64_t j = 0; j < columns; ++j) {
      float& to = c[i * c_stride + j];
      to = accumulate ? to + sums[j] : sums[j];
    }
  }
}

// C [height, width] (+)= A [height, depth] * B [depth, width], one register tile after the other.
void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                   float* c, int64_t c_stride, int64_t height, int64_t width, int64_t depth,
                   bool accumulate) {
  for (int64_t i = 0; i < height; i += MICRO_M) {
    for (int64_t j = 0; j < width; j += MICRO_N) {
      const int64_t rows = smaller(MICRO_M, height - i), columns = smaller(MICRO_N, width - j);
      const float* a_i = a + i * a_stride;
      const float* b_j = b + j;
      float* to = c + i * c_stride + j;
      if (rows == MICRO_M && columns == MICRO_N) {
        multiply_registers(a_i, a_stride, b_j, b_stride, to, c_stride, depth, accumulate);
      } else {
        multiply_edge(a_i, a_stride, b_j, b_stride, to, c_stride, depth, accumulate, rows,
                      columns);
      }
    }
  }
}

}  // namespace

extern "C" void matmul(const float* a, const float* b, float* c, int64_t M, int64_t K, int64_t N) {
  const int64_t depths = K > 0 ? (K + TILE_K - 1) / TILE_K : 1;  // K = 0: one empty step clears C
#pragma omp parallel
  {
    const Range rows = share(M, MICRO_M), columns = {0, N};
    for (int64_t j = columns.begin; j < columns.end; j += TILE_N) {
      const int64_t width = smaller(TILE_N, columns.end - j);
      for (int64_t step = 0; step < depths; ++step) {
        const int64_t p = step * TILE_K, depth = smaller(TILE_K, K - p);
        for (int64_t i = rows.begin; i < rows.end; i += TILE_M) {
          const int64_t height = smaller(TILE_M, rows.end - i);
          multiply_tile(a + i * K + p, K, b + p * N + j, N, c + i * N + j, N, height, width, depth,
                        p > 0);
        }
      }
    }
  }
}
