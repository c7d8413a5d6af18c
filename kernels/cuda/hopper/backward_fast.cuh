// Fast steps of Note [Fast steps], for a thread of a warpgroup that holds S^T and dP^T of 64 keys and 64 queries.
#pragma once

#include "hopper/backward.cuh"

namespace backward {

constexpr int AT_ONCE = 2;  // blocks of 8 queries whose exponentials are computed side by side

// Element i of the accumulator: key `row` + 8 (i / 2 % 2) of the tile, query `first` + 8 (i / 4) + i % 2.
struct At {
  int row;
  int first;
  __device__ __forceinline__ static At of_thread(int half) {
    const int thread = ptx::thread_index();
    return {thread / 32 * 16 + thread % 32 / 4, STEP * half + 2 * (thread % 4)};
  }
  __device__ __forceinline__ Place operator()(int i) const { return {first + 8 * (i / 4) + i % 2, row + 8 * (i / 2 % 2)}; }
};

// Hidden entries of a thread: element i is one if limit[i / 2 % 2] > 8 (i / 4) + i % 2.
struct Limits {
  int limit[2];
  __device__ __forceinline__ Limits(const Hidden& hidden, const At& at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.row + 8 * h;
      limit[h] = hidden.diagonal ? row - at.first : row < hidden.rows ? -1 : TILE;
    }
  }
  __device__ __forceinline__ bool operator()(int i) const { return limit[i / 2 % 2] > 8 * (i / 4) + i % 2; }
};

// P^T of the queries of one block of 32, packed, from accumulators of S^T. k0 and k1: 2^eK of the thread's keys.
template <int BLOCK>
__device__ __forceinline__ void fast_probabilities(uint32_t (&a)[16], const float (&x)[32], const float4* score, float k0,
                                                   float k1) {
#pragma unroll
  for (int n = 4 * BLOCK; n < 4 * BLOCK + 4; n += AT_ONCE) {
    constexpr int N = 4 * AT_ONCE;
    float s[N], c[N], k[N];
    uint32_t bits[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float4 of = score[4 * (n + i / 4)];
      s[i] = E4M3 ? __fmul_rn(x[4 * n + i], i % 4 < 2 ? k0 : k1) : x[4 * n + i];
      c[i] = i % 2 == 0 ? of.x : of.y;
      k[i] = i % 2 == 0 ? of.z : of.w;
    }
    exp2_bits<F>(bits, s, c, k);
#pragma unroll
    for (int i = 0; i < N; i += 2) a[2 * n + i / 2] = pair_numbers<F>(bits[i], bits[i + 1]);
  }
}

// X^T of all queries, packed, from P^T and accumulators of dP^T. v0 and v1: 2^e of V of the thread's keys.
__device__ __forceinline__ void fast_gradients(uint32_t (&x)[16], const uint32_t (&a)[16], const float (&dp)[32],
                                               const float2* delta, const float (&of_dout)[2], float v0, float v1) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 minus = delta[4 * n];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float f = E4M3 ? __fmul_rn(h == 0 ? v0 : v1, of_dout[n / 4]) : 1.0f;
      const int i = 4 * n + 2 * h;
      const float low = __fmul_rn(unpack(a, i), __fmaf_rn(dp[i], f, minus.x));
      const float high = __fmul_rn(unpack(a, i + 1), __fmaf_rn(dp[i + 1], f, minus.y));
      x[i / 2] = round_pair(low, high);
    }
  }
}

__device__ __forceinline__ void hide_scores(float (&x)[32], const Limits& limits) {
#pragma unroll
  for (int i = 0; i < 32; ++i) x[i] = limits(i) ? HIDDEN_SCORE : x[i];
}

}  // namespace backward
