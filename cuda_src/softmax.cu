// softmax: softmax or log_softmax of the rows of an array, with a bias added first; rounded to the storage type once.
//
//   y = softmax(x + b)      x (rows, N), y (rows, N), b (N): a network "of one layer" N to N whose product is x already
//
// The schedules layer and matmul launch it last, on sums of the arithmetic's type. A warp takes a row at a time. x and y may be
// one array.
//
// Grid (any,), block (MLP_BLOCK,). Limits: none.
//
// Options beside those of common.cuh, with MLP_PACKED=0 (only the bias of Weights is read):
//   MLP_BLOCK   threads a block, a multiple of 32
#include "softmax.cuh"

static_assert(depth == 1 && FEATURES_IN == FEATURES_OUT, "rows are as wide as they come");
static_assert(OVER_ROW && !MLP_PACKED, "a function of rows; the bias comes as an array");

constexpr int N = FEATURES_OUT;
constexpr int ROUNDS = (N + 31) / 32;
constexpr bool HELD = sizeof(T) * ROUNDS <= 32;  // a lane's numbers in registers; more are read three times

// This lane's numbers of a row, lane + 32 i; past the end the last one.
struct Numbers {
    const RowOfX& x;
    const Weights& weights;
    int lane;
    __device__ __forceinline__ T operator()(int i) const {
        const int j = lane + 32 * i < N ? lane + 32 * i : N - 1;
        const T v = x[j];
        if constexpr (biases[0]) return add(v, Layer<0>::bias_of(weights, j));
        else return v;
    }
};

extern "C" __global__ void __launch_bounds__(MLP_BLOCK)
softmax(const X* x,                // (.., N), read through rows
        Y* y,                      // (.., N), written through rows
        const Weights weights,     // the bias
        const Rows rows,           // the strides of x and y, unless contiguous
        const long long x_first,   // the row of x that is read first
        const long long y_first,   // the row of y that it is written to
        const long long count) {   // rows
    constexpr int WARPS = MLP_BLOCK / 32;
    const int lane = threadIdx.x % 32;
    const long long step = static_cast<long long>(gridDim.x) * WARPS;
    for (long long row = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32; row < count; row += step) {
        const RowOfX from = row_of_x(x, rows, x_first + row);
        const RowOfY to = row_of_y(y, rows, y_first + row);
        const Numbers numbers = {from, weights, lane};
        if constexpr (HELD) {
            T held[ROUNDS];
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) held[i] = numbers(i);
            const RowScale scale = scale_of_row<N, ROUNDS>(lane, [&](int i) { return held[i]; });
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i)
                if (N % 32 == 0 || lane + 32 * i < N) to.set(lane + 32 * i, scale.result(held[i]));
        } else {
            const RowScale scale = scale_of_row<N>(lane, numbers);
#pragma unroll 1
            for (int i = 0; lane + 32 * i < N; ++i) to.set(lane + 32 * i, scale.result(numbers(i)));
        }
    }
}
