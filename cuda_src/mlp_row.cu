// mlp_row: one block computes one row, all layers in one launch.
//
//   y[row] = act(... act(act(x[row] @ W1 + b1) @ W2 + b2) ...)      x (batch, K), y (batch, N)
//
// Grid (batch,), block (MLP_BLOCK,): thread t computes outputs t, t + MLP_BLOCK, ... of every layer. The row's
// activations live in shared memory. Nothing of one row depends on another, so this kernel is also the
// executable specification: a new schedule must give its bits.
//
// When the planner picks it: small batches, where latency is everything. Each weight is used once, by one thread, so
// the weights go straight to that thread's registers: those of the first layers all at once, before anything is waited
// for (HELD layers, while registers last), the others' when their layer is computed, MLP_GROUP products at a time.
// Limits: one row's activations (two neighbouring layers of it) must fit in shared memory.
//
// Options beside those of common.cuh:
//   MLP_BLOCK         threads a block
//   MLP_GROUP         products whose weights a thread asks for at a time in the layers that are not held
//   MLP_HELD          how many layers, from the first, are held in registers from the start
//   MLP_SHARED_BYTES  dynamic shared memory that the launch gives; checked against what the kernel lays out
#include "softmax.cuh"

static_assert(0 <= MLP_HELD && MLP_HELD <= depth, "no more layers are held than there are");

// --- Shared memory: the activations of even layers, then of odd layers ------------------------------------------

// Groups of the widest layer among 0, 2, 4, ... or 1, 3, 5, ...; the last layer's go straight to y, but for softmax.
__device__ constexpr long long activation_vectors(int parity) {
    int widest = 0;
    for (int l = parity; l <= LAST_HELD; l += 2) widest = sizes[l] > widest ? sizes[l] : widest;
    return vectors(widest);
}
static_assert((activation_vectors(0) + activation_vectors(1)) * static_cast<long long>(sizeof(Group)) == MLP_SHARED_BYTES,
              "the plan and the kernel disagree");

extern __shared__ Group shared[];

// Call f(i, p) for i = threadIdx.x + p * MLP_BLOCK below COUNT. The trip count is a constant, so that loops over
// it unroll and full rounds need no test.
template <int COUNT, int UNROLL, class F>
__device__ __forceinline__ void share_among_threads(F f) {
    constexpr int ROUNDS = COUNT / MLP_BLOCK;
    constexpr int REST = COUNT % MLP_BLOCK;
    const int t = threadIdx.x;
#pragma unroll UNROLL
    for (int p = 0; p < ROUNDS; ++p) f(t + p * MLP_BLOCK, p);
    if constexpr (REST > 0)
        if (t < REST) f(t + ROUNDS * MLP_BLOCK, ROUNDS);
}

// --- Weights that a thread holds ----------------------------------------------------------------------------------

template <int L>
struct Share : Layer<L> {
    using Layer<L>::K;
    using Layer<L>::N;
    static constexpr int PER_THREAD = (N + MLP_BLOCK - 1) / MLP_BLOCK;  // outputs a thread computes
    static constexpr bool HELD = L < MLP_HELD && K > 0 && N > 0;        // an empty layer has nothing to hold
};

// What a thread holds of layer L: the weights and biases of its outputs, or nothing.
template <int L, bool HELD = Share<L>::HELD>
struct Held {
    __device__ __forceinline__ explicit Held(const Weights&) {}
};

template <int L>
struct Held<L, true> {
    using Here = Share<L>;
    static constexpr int VECTORS = vectors(Here::K);
    Vector weight[Here::PER_THREAD][VECTORS];
    T bias[Here::PER_THREAD];

    __device__ __forceinline__ explicit Held(const Weights& weights) {
        share_among_threads<Here::N, Here::PER_THREAD>([&](int j, int p) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) weight[p][i] = Here::weights_of(weights, i, j);
            bias[p] = Here::bias_of(weights, j);
        });
    }
};

// What a thread holds of layers L, L + 1, ...
template <int L, bool END = (L == depth)>
struct HeldFrom {
    Held<L> here;
    HeldFrom<L + 1> next;
    __device__ __forceinline__ explicit HeldFrom(const Weights& weights) : here(weights), next(weights) {}
};

template <int L>
struct HeldFrom<L, true> {
    __device__ __forceinline__ explicit HeldFrom(const Weights&) {}
};

// --- A row of x -------------------------------------------------------------------------------------------------

// This thread's share of a row: its elements, requested early, or, if they are many, only where they are.
constexpr int X_PER_THREAD = (FEATURES_IN + MLP_BLOCK - 1) / MLP_BLOCK;

template <int COUNT = X_PER_THREAD, bool FEW = (COUNT > 0 && COUNT <= 8)>
struct InputShare {
    T element[COUNT];
    __device__ __forceinline__ explicit InputShare(const RowOfX& x) {
        share_among_threads<FEATURES_IN, COUNT>([&](int k, int p) { element[p] = x[k]; });
    }
    __device__ __forceinline__ void store_to(T* to) const {
        share_among_threads<FEATURES_IN, COUNT>([&](int k, int p) { to[k] = element[p]; });
    }
};

template <int COUNT>
struct InputShare<COUNT, false> {
    RowOfX x;
    __device__ __forceinline__ explicit InputShare(const RowOfX& x) : x(x) {}
    __device__ __forceinline__ void store_to(T* to) const {
        share_among_threads<FEATURES_IN, 8>([&](int k, int) { to[k] = x[k]; });
    }
};

// --- One layer after the other ----------------------------------------------------------------------------------

// Compute layer L and all that follow it. in holds the activations of layer L, complete and visible; out is free.
template <int L>
__device__ __forceinline__ void run_layers(const HeldFrom<L>& held, const Weights& weights, Group* in, Group* out,
                                           const RowOfY& y) {
    using Here = Share<L>;
    constexpr int HELD_GROUP = (Here::K + SUM_BLOCK - 1) / SUM_BLOCK * SUM_BLOCK;  // registers need constant indices
    const auto h = [in](int i) { return in[i]; };
    share_among_threads<Here::N, Here::HELD ? Here::PER_THREAD : 1>([&](int j, int p) {
        T sum;
        if constexpr (Here::HELD) {
            sum = dot<Here::K, HELD_GROUP>(held.here.bias[p], h, [&](int i) { return held.here.weight[p][i]; });
        } else {
            sum = dot<Here::K, MLP_GROUP>(Here::bias_of(weights, j), h, [&](int i) { return Here::weights_of(weights, i, j); });
        }
        if constexpr (Here::K == 0 && !biases[L]) sum = T(0);  // an empty sum
        const T v = activate<L>(sum);
        if constexpr (L == depth - 1 && OVER_ROW) reinterpret_cast<T*>(out)[j] = v;
        else if constexpr (L == depth - 1) y.set(j, v);
        else reinterpret_cast<T*>(out)[j] = stored(v);
    });
    if constexpr (L < depth - 1) {
        __syncthreads();
        run_layers<L + 1>(held.next, weights, out, in, y);
    } else if constexpr (OVER_ROW && Here::N > 0) {
        __syncthreads();
        const T* const numbers = reinterpret_cast<const T*>(out);
        const int lane = threadIdx.x % 32;
        // Each warp for itself: the terms of more warps than one would have to pass a barrier.
        const RowScale scale = scale_of_row<Here::N>(lane, [=](int i) { return numbers[lane + 32 * i < Here::N ? lane + 32 * i : Here::N - 1]; });
        share_among_threads<Here::N, 1>([&](int j, int) { y.set(j, scale.result(numbers[j])); });
    }
}

extern "C" __global__ void __launch_bounds__(MLP_BLOCK, 1)
mlp_row(const X* __restrict__ x,   // (batch, K), read through rows
        S* __restrict__ y,         // (batch, N), written through rows
        const Weights weights,     // packed, or the caller's arrays
        const Rows rows) {         // the batch size and, unless contiguous, the strides of x and y
    constexpr long long ODD_AT = activation_vectors(0);
    Group* const even = shared;
    Group* const odd = shared + ODD_AT;

    // Everything is requested before anything is waited for. The grid has no more blocks than there are rows.
    long long row = blockIdx.x;
    InputShare<> input(row_of_x(x, rows, row));
    const HeldFrom<0> held(weights);

    while (true) {
        input.store_to(reinterpret_cast<T*>(even));
        __syncthreads();
        run_layers<0>(held, weights, even, odd, row_of_y(y, rows, row));
        row += gridDim.x;  // a grid holds at most 2**31 - 1 blocks; for more rows a block takes several
        if (row >= rows.batch) break;
        input = InputShare<>(row_of_x(x, rows, row));
        __syncthreads();  // the next row overwrites what this one reads
    }
}
