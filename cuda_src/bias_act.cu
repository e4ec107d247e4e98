// bias_act: an activation of an array, with a bias added first; rounded to the storage type once.
//
//   y = act(x + b)      x (rows, N), y (rows, N), b (N): a network "of one layer" N to N whose product is x already
//
// The matmul schedule launches it after each of cuBLAS's products, and, without a bias and with Act::identity, to copy an x
// that cuBLAS cannot read (strided, unaligned, narrower) into a contiguous array. x and y may be one array.
//
// Grid (any,), block (MLP_BLOCK,). Limits: none.
//
// Options beside those of common.cuh, with MLP_PACKED=0 (only the bias of Weights is read):
//   MLP_BLOCK   threads a block
#include "common.cuh"

static_assert(depth == 1 && FEATURES_IN == FEATURES_OUT, "rows are as wide as they come");
static_assert(!MLP_PACKED, "the bias comes as an array");

constexpr int N = FEATURES_OUT;
constexpr int QUADS = (N + 3) / 4;  // of four neighbouring features; a thread takes one at a time

struct alignas(4 * sizeof(X) <= 16 ? 4 * sizeof(X) : 16) QuadOfX { X v[4]; };
struct alignas(4 * sizeof(S) <= 16 ? 4 * sizeof(S) : 16) QuadOfY { S v[4]; };

// WIDE: x and y are contiguous, and every quad is aligned.
template <bool WIDE>
__device__ __forceinline__ void apply(const X* x, S* y, const Weights& weights, const Rows& rows, long long x_first,
                                      long long y_first, long long count) {
    const long long step = static_cast<long long>(gridDim.x) * MLP_BLOCK;
    for (long long i = static_cast<long long>(blockIdx.x) * MLP_BLOCK + threadIdx.x; i < count * QUADS; i += step) {
        const long long row = i / QUADS;
        const int j = static_cast<int>(i % QUADS) * 4;
        const RowOfX from = row_of_x(x, rows, x_first + row);
        const RowOfY to = row_of_y(y, rows, y_first + row);
        QuadOfX in;
        if constexpr (WIDE) {
            in = *reinterpret_cast<const QuadOfX*>(from.start + j * static_cast<long long>(sizeof(X)));
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (j + e < N) in.v[e] = from.raw(j + e);
        }
        QuadOfY out;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (!WIDE && j + e >= N) continue;
            T v = convert(in.v[e]);
            if constexpr (biases[0]) v = add(v, Layer<0>::bias_of(weights, j + e));
            v = activate<0>(v);
            if constexpr (WIDE) out.v[e] = narrow(v);
            else to.set(j + e, v);
        }
        if constexpr (WIDE) *reinterpret_cast<QuadOfY*>(to.start + j * static_cast<long long>(sizeof(S))) = out;
    }
}

extern "C" __global__ void __launch_bounds__(MLP_BLOCK)
bias_act(const X* x,                // (.., N), read through rows
         S* y,                      // (.., N), written through rows
         const Weights weights,     // the bias
         const Rows rows,           // the strides of x and y, unless contiguous
         const long long x_first,   // the row of x that is read first
         const long long y_first,   // the row of y that it is written to
         const long long count) {   // rows
    const bool x_aligned = reinterpret_cast<unsigned long long>(x) % alignof(QuadOfX) == 0;
    const bool y_aligned = reinterpret_cast<unsigned long long>(y) % alignof(QuadOfY) == 0;
    const bool wide = N % 4 == 0 && MLP_BATCH_DIMS == 0 && x_aligned && y_aligned;
    if (wide) apply<true>(x, y, weights, rows, x_first, y_first, count);
    else apply<false>(x, y, weights, rows, x_first, y_first, count);
}
