// One row by one thread, all layers: what `MLP.cuda_source` gives users to call in kernels of their own.
//
// Every thread of a warp reads the same weight at the same time, and keeps its row's activations to itself: in registers where
// a layer is narrow, else in local memory. The same one order of summation as every schedule's, and so the same bits.
// weights: packed in vectors, in any address space. Loaded by C++, not by load_vector, which needs global memory.
#pragma once
#include "softmax.cuh"

constexpr int THREAD_GROUP = 64;  // products that a thread computes without a loop, so that registers hold their activations
constexpr int X_UNROLL = FEATURES_IN <= THREAD_GROUP ? THREAD_GROUP : 8;

// Groups of the widest layer among 0, 2, 4, ... or 1, 3, 5, ...; at least one, as C++ has no empty array.
__device__ constexpr long long thread_row_groups(int parity) {
    long long most = 1;
    for (int l = parity; l <= LAST_HELD; l += 2) most = vectors(sizes[l]) > most ? vectors(sizes[l]) : most;
    return most;
}

// The scale of a row of N numbers: the 32 sums that scale_of_row has in the lanes of a warp, added in the same order.
template <int N>
__device__ __forceinline__ RowScale scale_of_row_alone(const T* numbers) {
    T largest = numbers[0];
#pragma unroll 1
    for (int j = 1; j < N; ++j) largest = larger(largest, numbers[j]);
    T sums[32] = {};
#pragma unroll 1
    for (int first = 0; first < N; first += 32)
#pragma unroll
        for (int lane = 0; lane < 32; ++lane)
            if (first + lane < N) sums[lane] = add(sums[lane], softmax_term(numbers[first + lane], largest));
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2)
#pragma unroll
        for (int lane = 0; lane < apart; ++lane) sums[lane] = add(sums[lane], sums[lane + apart]);
    return row_scale(largest, sums[0]);
}

// Compute layer L and all that follow it. in holds the activations of layer L; out is free.
template <int L>
__device__ __forceinline__ void thread_layers(const Vector* weights, Group* in, Group* out, S* y) {
    using Here = Layer<L>;
#pragma unroll 1
    for (int j = 0; j < Here::N; ++j) {
        T sum = dot<Here::K, THREAD_GROUP>(Here::bias_of(weights, j), [in](int i) { return in[i]; }, [&](int i) {
            return weights[Here::WEIGHTS_AT + static_cast<long long>(i) * Here::N + j];
        });
        if constexpr (Here::K == 0 && !biases[L]) sum = T(0);  // an empty sum
        const T v = activate<L>(sum);
        if constexpr (L == depth - 1 && OVER_ROW) reinterpret_cast<T*>(out)[j] = v;
        else if constexpr (L == depth - 1) y[j] = narrow(v);
        else reinterpret_cast<T*>(out)[j] = stored(v);
    }
    if constexpr (L < depth - 1) {
        thread_layers<L + 1>(weights, out, in, y);
    } else if constexpr (OVER_ROW && Here::N > 0) {
        const T* const numbers = reinterpret_cast<const T*>(out);
        const RowScale scale = scale_of_row_alone<Here::N>(numbers);
#pragma unroll 1
        for (int j = 0; j < Here::N; ++j) y[j] = narrow(scale.result(numbers[j]));
    }
}

// x (FEATURES_IN) and y (FEATURES_OUT) may overlap: all of x is read before any of y is written.
__device__ __forceinline__ void thread_row(const X* x, S* y, const Vector* weights) {
    Group even[thread_row_groups(0)];
    Group odd[thread_row_groups(1)];
#pragma unroll X_UNROLL
    for (int k = 0; k < FEATURES_IN; ++k) reinterpret_cast<T*>(even)[k] = convert(x[k]);
    thread_layers<0>(weights, even, odd, y);
}
