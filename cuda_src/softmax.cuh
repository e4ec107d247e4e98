// softmax and log_softmax of a row of outputs: e^(v_j - m) / sum_k e^(v_k - m), m the largest, and the logarithm of it.
//
// One order of the sum, so that every schedule of precision "ieee" gives the same bits: 32 sums, each of the terms of every
// 32nd feature, ascending, from +0; then sums 16 apart are added, then 8, 4, 2 and 1 apart.
//
// A row with NaN or +inf, or of -inf alone, is NaN: some term is, and so is the sum.
#pragma once
#include "common.cuh"

constexpr Act OUT_ACT = activations[depth - 1];
constexpr bool OVER_ROW = is_over_row(OUT_ACT);

__device__ __forceinline__ T larger(T a, T b) { return a < b ? b : a; }
__device__ __forceinline__ T softmax_term(T v, T largest) { return exp(add(v, -largest)); }

// The last index of activations that lie in shared memory as numbers of the arithmetic: that of the last layer's inputs, or of
// its outputs where a function of all of them follows.
constexpr int LAST_HELD = OVER_ROW ? depth : depth - 1;

// What makes results of a row's numbers: its largest, and 1 / sum or log(sum).
struct RowScale {
    T largest, of_sum;

    __device__ __forceinline__ T result(T v) const {
        if constexpr (OUT_ACT == Act::softmax) return softmax_term(v, largest) * of_sum;
        else return add(add(v, -largest), -of_sum);
    }
};

__device__ __forceinline__ RowScale row_scale(T largest, T sum) {
    if constexpr (OUT_ACT == Act::softmax) return {largest, divide(T(1), sum)};
    else return {largest, log(sum)};
}

// The scale of a row of N numbers, found by a warp: at(i) gives number lane + 32 i. UNROLL: 1, or more than N / 32 where
// numbers are in registers.
template <int N, int UNROLL = 1, class At>
__device__ __forceinline__ RowScale scale_of_row(int lane, At at) {
    constexpr unsigned int WHOLE_WARP = 0xffffffffu;
    constexpr int ROUNDS = (N + 31) / 32;
    T largest = at(0);  // past the end, that of a number which some lane has
#pragma unroll UNROLL
    for (int i = 1; i < ROUNDS; ++i)
        if (N % 32 == 0 || lane + 32 * i < N) largest = larger(largest, at(i));
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) largest = larger(largest, __shfl_xor_sync(WHOLE_WARP, largest, mask));
    T sum = T(0);
#pragma unroll UNROLL
    for (int i = 0; i < ROUNDS; ++i)
        if (N % 32 == 0 || lane + 32 * i < N) sum = add(sum, softmax_term(at(i), largest));
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum = add(sum, __shfl_xor_sync(WHOLE_WARP, sum, mask));
    return row_scale(largest, sum);
}

// All lanes of a warp: the results of a row whose N numbers are in shared memory.
template <int N>
__device__ __forceinline__ void softmax_to(const RowOfY& y, const T* numbers, int lane) {
    const RowScale scale = scale_of_row<N>(lane, [=](int i) { return numbers[lane + 32 * i < N ? lane + 32 * i : N - 1]; });
#pragma unroll 1
    for (int j = lane; j < N; j += 32) y.set(j, scale.result(numbers[j]));
}
