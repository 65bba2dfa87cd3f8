// softmax_backward / cpu: dx = y * (dy - sum(y * dy)) over each row; y, dy and dx are [M, N]
// float32.
// SPLIT=rows, UNROLL=1, WIDTH=half
#include <cstdint>

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 8;  // floats in a vector
#elif defined(__AVX__)
constexpr int64_t LANES = 4;
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

inline float sum(Vector values) {
  float result = values[0];
  for (int64_t lane = 1; lane < LANES; ++lane) result += values[lane];
  return result;
}

inline float dot(const float* y, const float* dy, int64_t N) {
  Vector total = {};
  int64_t j = 0;
  for (; j + LANES <= N; j += LANES) total += load(y + j) * load(dy + j);
  if (j < N) total += load_part(y + j, N - j, 0) * load_part(dy + j, N - j, 0);
  return sum(total);
}

inline void differentiate(const float* y, const float* dy, float* dx, int64_t N, float total) {
  int64_t j = 0;
  for (; j + LANES <= N; j += LANES) store(dx + j, load(y + j) * (load(dy + j) - total));
  for (; j < N; ++j) dx[j] = y[j] * (dy[j] - total);
}

}  // namespace

extern "C" void softmax_backward(
    const float* y, const float* dy, float* dx, int64_t M, int64_t N) {
#pragma omp parallel for
  for (int64_t i = 0; i < M; ++i) {
    const float total = dot(y + i * N, dy + i * N, N);
    differentiate(y + i * N, dy + i * N, dx + i * N, N, total);
  }
}
