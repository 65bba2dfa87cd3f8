// softmax / cpu: y = softmax(x) over each row; x and y are [M, N] float32.
// PASSES=2, ROWS=1, SPLIT=rows, UNROLL=8, WIDTH=full
#include <cfloat>
#include <cmath>
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

// The first `count` floats at `from`; the other lanes hold `fill`.
inline Vector load_part(const float* from, int64_t count, float fill) {
  float lanes[LANES];
  for (int64_t lane = 0; lane < LANES; ++lane) lanes[lane] = lane < count ? from[lane] : fill;
  return load(lanes);
}

inline void store_part(float* to, int64_t count, Vector value) {
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = value[lane];
}

inline Vector broadcast(float value) { return value - Vector{}; }

inline float maximum(Vector values) {
  float result = values[0];
  for (int64_t lane = 1; lane < LANES; ++lane) {
    result = values[lane] > result ? values[lane] : result;
  }
  return result;
}

inline float sum(Vector values) {
  float result = values[0];
  for (int64_t lane = 1; lane < LANES; ++lane) result += values[lane];
  return result;
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

inline Vector larger(Vector x, Vector y) { return x > y ? x : y; }

constexpr int64_t UNROLL = 8;  // vectors taken side by side
constexpr int64_t STEP = UNROLL * LANES;

// The largest number of a row, or -FLT_MAX, and the sum of exp(x - largest).
struct Summary {
  float largest, sum;
};

// Each lane keeps its own maximum and scales its sum whenever the maximum grows. The first maximum
// is finite, so that no lane that has met nothing but -inf subtracts -inf from itself.
inline Summary summarize(const float* x, int64_t N) {
  Vector largest = broadcast(-FLT_MAX), total = {};
  int64_t j = 0;
  for (; j + STEP <= N; j += STEP) {
    Vector next = largest;
    for (int64_t u = 0; u < UNROLL; ++u) next = larger(next, load(x + j + u * LANES));
    total *= exponential(largest - next);
    for (int64_t u = 0; u < UNROLL; ++u) total += exponential(load(x + j + u * LANES) - next);
    largest = next;
  }
  while (j < N) {
    const Vector values = j + LANES <= N ? load(x + j) : load_part(x + j, N - j, -INFINITY);
    const Vector next = larger(largest, values);
    total = total * exponential(largest - next) + exponential(values - next);
    largest = next;
    j += LANES;
  }
  const float row_largest = maximum(largest);
  return {row_largest, sum(total * exponential(largest - row_largest))};
}

// y = exp(x - largest) / sum.
inline void normalize(const float* x, float* y, int64_t N, Summary row) {
  const float factor = 1 / row.sum;
  int64_t j = 0;
  for (; j + STEP <= N; j += STEP) {
    for (int64_t u = 0; u < UNROLL; ++u) {
      store(y + j + u * LANES, exponential(load(x + j + u * LANES) - row.largest) * factor);
    }
  }
  for (; j + LANES <= N; j += LANES) store(y + j, exponential(load(x + j) - row.largest) * factor);
  if (j < N) {
    const Vector values = load_part(x + j, N - j, -INFINITY);
    store_part(y + j, N - j, exponential(values - row.largest) * factor);
  }
}

}  // namespace

extern "C" void softmax(const float* x, float* y, int64_t M, int64_t N) {
#pragma omp parallel for
  for (int64_t i = 0; i < M; ++i) {
    normalize(x + i * N, y + i * N, N, summarize(x + i * N, N));
  }
}
