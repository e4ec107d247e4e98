// One row by one warp, by plain multiply-adds in the one order of summation: what mlp_row computes, for the rows that
// split3 cannot take to the tensor cores, so that infinities and NaN come out as precision "ieee" has them.
#pragma once
#include "softmax.cuh"

// Groups of the widest layer among 0, 2, 4, ... or 1, 3, 5, ...
__device__ constexpr long long plain_row_groups(int parity) {
    int widest = 0;
    for (int l = parity; l <= LAST_HELD; l += 2) widest = sizes[l] > widest ? sizes[l] : widest;
    return vectors(widest);
}
constexpr long long PLAIN_ROW_BYTES = (plain_row_groups(0) + plain_row_groups(1)) * static_cast<long long>(sizeof(Group));

// Compute layer L and all that follow it. in holds the activations of layer L, visible to the warp; out is free.
template <int L>
__device__ __forceinline__ void plain_layers(const Vector* weights, Group* in, Group* out, const RowOfY& y, int lane) {
    using Here = Layer<L>;
#pragma unroll 1
    for (int j = lane; j < Here::N; j += 32) {
        T sum = dot<Here::K, SUM_BLOCK>(Here::bias_of(weights, j), [in](int i) { return in[i]; },
                                        [&](int i) { return Here::weights_of(weights, i, j); });
        if constexpr (Here::K == 0 && !biases[L]) sum = T(0);  // an empty sum
        const T v = activate<L>(sum);
        if constexpr (L == depth - 1 && OVER_ROW) reinterpret_cast<T*>(out)[j] = v;
        else if constexpr (L == depth - 1) y.set(j, v);
        else reinterpret_cast<T*>(out)[j] = stored(v);
    }
    if constexpr (L < depth - 1) {
        __syncwarp();
        plain_layers<L + 1>(weights, out, in, y, lane);
    } else if constexpr (OVER_ROW) {
        __syncwarp();
        softmax_to<Here::N>(y, reinterpret_cast<const T*>(out), lane);
    }
}

// All lanes of a warp call this together, with the same row. weights: packed in vectors. scratch: PLAIN_ROW_BYTES of shared
// memory that the warp has to itself. Not inlined, so that rows that hardly ever occur do not take registers from the rest; a
// template, so that only kernels that call it have it.
template <int FIRST = 0>
__device__ __noinline__ void plain_row(RowOfX x, RowOfY y, const Vector* weights, Group* scratch) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // scratch may have held something else
#pragma unroll 1
    for (int k = lane; k < FEATURES_IN; k += 32) reinterpret_cast<T*>(scratch)[k] = x[k];
    __syncwarp();
    plain_layers<FIRST>(weights, scratch, scratch + plain_row_groups(0), y, lane);
    __syncwarp();
}
