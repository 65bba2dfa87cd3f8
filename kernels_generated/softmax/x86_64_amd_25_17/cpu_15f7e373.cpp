// softmax / cpu: y = softmax(x) over each row; x and y are [M, N] float32.
// PASSES=3, ROWS=1, SPLIT=rows, UNROLL=1, WIDTH=full
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

inline float find_largest(const float* x, int64_t N) {
  Vector largest = broadcast(-INFINITY);
  int64_t j = 0;
  for (; j + LANES <= N; j += LANES) largest = larger(largest, load(x + j));
  if (j < N) largest = larger(largest, load_part(x + j, N - j, -INFINITY));
  return maximum(largest);
}

// y = exp(x - largest); returns the sum of y.
inline float exponentiate(const float* x, float* y, int64_t N, float largest) {
  Vector total = {};
  int64_t j = 0;
  for (; j + LANES <= N; j += LANES) {
    const Vector power = exponential(load(x + j) - largest);
    store(y + j, power);
    total += power;
  }
  if (j < N) {
    const Vector power = exponential(load_part(x + j, N - j, -INFINITY) - largest);
    store_part(y + j, N - j, power);
    total += power;
  }
  return sum(total);
}

inline void scale(float* y, int64_t N, float factor) {
  int64_t j = 0;
  for (; j + LANES <= N; j += LANES) store(y + j, load(y + j) * factor);
  for (; j < N; ++j) y[j] *= factor;
}

}  // namespace

extern "C" void softmax(const float* x, float* y, int64_t M, int64_t N) {
#pragma omp parallel for
  for (int64_t i = 0; i < M; ++i) {
    const float largest = find_largest(x + i * N, N);
    const float total = exponentiate(x + i * N, y + i * N, N, largest);
    scale(y + i * N, N, 1 / total);
  }
}
