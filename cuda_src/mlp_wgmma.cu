// mlp_wgmma: many rows a block on Hopper's tensor cores, all layers in one launch, all weights in shared memory.
//
//   y = act(... act(act(x @ W1 + b1) @ W2 + b2) ...)      x (batch, K), y (batch, N)
//
// Grid (at most one block a multiprocessor,), block (128 * MLP_WARPGROUPS,). A warpgroup takes tiles of 64 rows through all
// layers; a warp has 16 of them. Activations never leave registers: the sums of one layer are the next one's A fragments
// (tensor.cuh). x comes through a ring of two bulk copies a warp, so that the next rows are on their way while these are
// computed, and y leaves by bulk copies; where x or y is not contiguous and aligned, the warp copies element by
// element between the same places and memory.
//
// When the planner picks it: tf32, split3, and float16 or bfloat16 networks, on sm_90a. Limits: widths up to 128 (after
// the first layer), and everything in shared memory.
//
// Options beside those of common.cuh and tensor.cuh:
//   MLP_WARPGROUPS    warpgroups a block
//   MLP_SHARED_BYTES  dynamic shared memory that the launch gives; checked against what the kernel lays out
#include "hopper.cuh"
#include "plain_row.cuh"

constexpr int WARPS = 4 * MLP_WARPGROUPS;
constexpr int ROWS = 16;  // of a warp
constexpr int STAGES = 2;

// --- Shared memory: barriers, weights; then, for each warp, its ring, its results, and what plain_row needs -----------------

__device__ constexpr long long rounded(long long bytes) { return (bytes + 127) / 128 * 128; }
constexpr long long BARRIERS = 1 + WARPS * STAGES;
constexpr long long WEIGHTS_AT = rounded(8 * BARRIERS);
constexpr long long WARPS_AT = WEIGHTS_AT + rounded(STAGED_BYTES);
constexpr long long X_BYTES = ROWS * FEATURES_IN * static_cast<long long>(sizeof(X));
constexpr long long Y_BYTES = ROWS * FEATURES_OUT * static_cast<long long>(sizeof(S));
constexpr long long RESULTS_AT = STAGES * rounded(X_BYTES);
constexpr long long SCRATCH_AT = RESULTS_AT + rounded(Y_BYTES);
constexpr long long WARP_BYTES = SCRATCH_AT + (SPLIT ? rounded(PLAIN_ROW_BYTES) : 0);
static_assert(WARPS_AT + WARPS * WARP_BYTES == MLP_SHARED_BYTES, "the plan and the kernel disagree");

extern __shared__ __align__(128) char shared[];

// What a lane knows of where it is.
struct Place {
    int g, t;                // its rows g and g + 8 of the warp's, and which of their columns
    const char* packed;      // the weights in shared memory
};

// --- Layer 0's activations ------------------------------------------------------------------------------------------------

constexpr int TILES_0 = k_tiles(0);

// The lane's features of row g or g + 8, four of each 16.
struct RowOfQuads { Quad q[TILES_0 > 0 ? TILES_0 : 1]; };

__device__ __forceinline__ void numbers_of(float (&v)[4], const RowOfQuads (&rows)[2], int fragment) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int e = 0; e < 2; ++e) v[2 * r + e] = convert(rows[r].q[fragment / 2].v[fragment % 2 * 2 + e]);
}

// Whether x holds just what tensor cores take.
template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;
constexpr bool X_AS_IT_IS = MATH != Math::tf32 && !SPLIT && same<X, S>;

__device__ __forceinline__ Fragment fragment_of_x(const RowOfQuads (&rows)[2], int fragment) {
    Fragment f;
    if constexpr (X_AS_IT_IS) {
#pragma unroll
        for (int r = 0; r < 2; ++r) memcpy(&f.r[r], &rows[r].q[fragment / 2].v[fragment % 2 * 2], sizeof(f.r[r]));
    } else {
        float v[4];
        numbers_of(v, rows, fragment);
        f = fragment_of(v);
    }
    return f;
}

// --- A layer ----------------------------------------------------------------------------------------------------------------

// The A registers of k-step s: of the high (PART 0) or low parts.
template <int PART, int COUNT>
__device__ __forceinline__ void registers_of(unsigned int (&a)[4], const Fragment (&f)[COUNT], int s) {
    if constexpr (MATH == Math::tf32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = f[s].r[i];
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = f[2 * s + i / 2].r[2 * PART + i % 2];
    }
}

// sums = A W of layer L, in the order that tensor.cuh gives.
template <int L, int COUNT>
__device__ __forceinline__ void multiply(float (&sums)[column_tiles(L)][4], const Fragment (&f)[COUNT], const char* packed) {
    constexpr int TILES = column_tiles(L), STEPS = k_steps(L), STEP_BYTES = TILES * TILE_BYTES;
    const unsigned long long weights = descriptor_of(packed + weights_at(L));
    constexpr unsigned long long LOW = part_bytes(L) / 16;
    wgmma_fence();
    if constexpr (SPLIT) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            unsigned int high[4], low[4];
            registers_of<0>(high, f, s);
            registers_of<1>(low, f, s);
            Wgmma<TILES>::multiply(sums, low, weights + s * STEP_BYTES / 16, s > 0);
            Wgmma<TILES>::multiply(sums, high, weights + LOW + s * STEP_BYTES / 16, 1);
        }
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        unsigned int a[4];
        registers_of<0>(a, f, s);
        Wgmma<TILES>::multiply(sums, a, weights + s * STEP_BYTES / 16, SPLIT || s > 0);
    }
    wgmma_commit();
    wgmma_wait();
}

// What split3 remembers of the lane's rows: by which power of two the present layer's input, or its sums, were divided, and
// whether all inputs were finite so far.
struct RowState {
    int exponent[2];
    bool finite[2];
};

// split3: a layer's input rows, whose largest numbers the lanes know in part.
__device__ __forceinline__ void look_at_rows(RowState& state, float (&down)[2], const Largest& largest) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const unsigned int bits = largest_of_row(largest.row[r]);
        state.finite[r] = state.finite[r] && is_finite(bits);
        const int exponent = exponent_of(bits);
        state.exponent[r] += exponent;
        down[r] = power_of_two(-exponent);
    }
}

// The sums of layer L to fragments of layer L + 1, or to results.
template <int L, class Results>
__device__ __forceinline__ void run_layers(const Fragment (&f)[2 * k_tiles(L) > 0 ? 2 * k_tiles(L) : 1], RowState& state, const Place& at,
                                           const Results& results) {
    constexpr int TILES = column_tiles(L);
    float sums[TILES][4] = {};
    if constexpr (k_steps(L) > 0) multiply<L>(sums, f, at.packed);
    constexpr bool DOUBLED = STAYS_SCALED<L> && activations[L] == Act::relu;
    if constexpr (SPLIT) {
        const int of_weights = exponent_of_weights(at.packed, L) - DOUBLED;
#pragma unroll
        for (int r = 0; r < 2; ++r) state.exponent[r] += of_weights;
    }
    if constexpr (!STAYS_SCALED<L>) {
        Scale scale[2] = {};
        if constexpr (SPLIT) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                scale[r] = scale_of(state.exponent[r]);
                state.exponent[r] = 0;
            }
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const Pair bias = biases_of<L>(at.packed, j, at.t);
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[j][e] = linear<L>(sums[j][e], scale[e / 2], bias.v[e % 2]);
        }
    }
    if constexpr (L == depth - 1 && OVER_ROW) {
        SoftmaxOfRows rows;
        rows.begin();
#pragma unroll
        for (int j = 0; j < TILES; ++j) rows.look(sums[j], j, at.t);
        rows.end_look();
#pragma unroll
        for (int j = 0; j < TILES; ++j) rows.add_terms(sums[j], j, at.t);
        rows.end_sum();
#pragma unroll
        for (int j = 0; j < TILES; ++j) rows.results(sums[j]);
        results(sums);
    } else if constexpr (L == depth - 1) {
#pragma unroll
        for (int j = 0; j < TILES; ++j) activate_all<L>(sums[j]);
        results(sums);
    } else {
        Fragment next[2 * k_tiles(L + 1)] = {};
        if constexpr (SPLIT) {
            Largest largest = {};
            float down[2];
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                if constexpr (DOUBLED) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[j][e] = relu_doubled(sums[j][e]);
                } else {
                    activate_all<L>(sums[j]);
                }
                clear_padding<L>(sums[j], j, at.t);
                if constexpr (!FIXED_SCALE<L>) include(largest, sums[j]);
            }
            if constexpr (FIXED_SCALE<L>) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    state.exponent[r] += FIXED_EXPONENT<L>;
                    down[r] = power_of_two(-FIXED_EXPONENT<L>);
                }
            } else {
                look_at_rows(state, down, largest);
            }
#pragma unroll
            for (int j = 0; j < TILES; ++j) next[j] = split(sums[j], down);
        } else {
#pragma unroll
            for (int j = 0; j < TILES; ++j) next[j] = hidden_fragment<L>(sums[j], j, at.t);
        }
        run_layers<L + 1>(next, state, at, results);
    }
}

extern "C" __global__ void __launch_bounds__(128 * MLP_WARPGROUPS, 1)
mlp_wgmma(const X* __restrict__ x,   // (batch, K), read through rows
          S* __restrict__ y,         // (batch, N), written through rows
          const Weights weights,     // in the layout "tensor"
          const Rows rows) {         // the batch size and, unless contiguous, the strides of x and y
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const char* const packed = shared + WEIGHTS_AT;
    unsigned long long* const barriers = reinterpret_cast<unsigned long long*>(shared);
    unsigned long long* const arrived = barriers + 1 + warp * STAGES;  // of the warp's ring
    char* const mine = shared + WARPS_AT + warp * WARP_BYTES;

    const bool x_by_bulk = MLP_BATCH_DIMS == 0 && X_BYTES > 0 && reinterpret_cast<unsigned long long>(x) % 16 == 0;
    const bool y_by_bulk = MLP_BATCH_DIMS == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;

    // Tiles of 16 rows: a warpgroup takes four neighbouring ones. Neighbouring fours go to neighbouring blocks. 32 bits are
    // enough to count them.
    const unsigned int tiles = static_cast<unsigned int>((rows.batch + ROWS - 1) / ROWS);
    const int in_last = static_cast<int>(rows.batch - (tiles - 1ll) * ROWS);
    const unsigned int step = gridDim.x * WARPS;
    const unsigned int begin = (blockIdx.x + gridDim.x * (warp / 4)) * 4 + warp % 4;
    const auto rows_in = [&](unsigned int tile) { return tile + 1 < tiles ? ROWS : tile + 1 == tiles ? in_last : 0; };
    const auto by_bulk = [&](int count, int row_bytes) { return row_bytes % 16 == 0 ? count > 0 : count > 0 && count * row_bytes % 16 == 0; };
    const auto request = [&](unsigned int tile, int stage) {
        const int count = rows_in(tile);
        if (lane == 0 && x_by_bulk && by_bulk(count, X_BYTES / ROWS))
            load_bulk(mine + stage * rounded(X_BYTES), reinterpret_cast<const char*>(x) + tile * X_BYTES, count * (X_BYTES / ROWS),
                      arrived + stage);
    };

    if (threadIdx.x == 0) {
        for (int i = 0; i < BARRIERS; ++i) barrier_init(barriers + i);
        barrier_init_fence();
        load_bulk(shared + WEIGHTS_AT, weights, STAGED_BYTES, barriers);
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < STAGES; ++s) request(begin + s * step, s);
    barrier_wait(barriers, 0);

    const Place at = {lane / 4, lane % 4, packed};
    const bool weights_finite = !SPLIT || weights_are_finite(packed);
    int stage = 0;
    unsigned int phase = 0;
    for (unsigned int tile = begin; tile - warp % 4 < tiles; tile += step) {  // the same trips for all four warps
        const long long first_row = static_cast<long long>(tile) * ROWS;
        char* const rows_of_x = mine + stage * rounded(X_BYTES);
        const int count = rows_in(tile);  // rows past it hold what they may, and are not stored
        if (x_by_bulk && by_bulk(count, X_BYTES / ROWS)) {
            barrier_wait(arrived + stage, phase);
        } else {
#pragma unroll 1
            for (int i = lane; i < count * FEATURES_IN; i += 32) {
                const RowOfX from = row_of_x(x, rows, first_row + i / FEATURES_IN);
                reinterpret_cast<X*>(rows_of_x)[i] = load<MLP_X_ACCESS, X>(from.start + i % FEATURES_IN * from.step);
            }
        }
        __syncwarp();
        RowOfQuads in[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const RowOfX row = {rows_of_x + (at.g + 8 * r) * static_cast<int>(FEATURES_IN * sizeof(X)), static_cast<long long>(sizeof(X))};
#pragma unroll
            for (int u = 0; u < TILES_0; ++u) in[r].q[u] = load_quad<FEATURES_IN % 4 == 0>(row, 16 * u + 4 * at.t);
        }
        __syncwarp();
        request(tile + STAGES * step, stage);
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }

        RowState state = {{0, 0}, {true, true}};
        Fragment f[2 * TILES_0 > 0 ? 2 * TILES_0 : 1] = {};
        float down[2] = {};
        if constexpr (SPLIT) {
            Largest largest = {};
#pragma unroll
            for (int j = 0; j < 2 * TILES_0; ++j) {
                float v[4];
                numbers_of(v, in, j);
                include(largest, v);
            }
            look_at_rows(state, down, largest);
        }
#pragma unroll
        for (int j = 0; j < 2 * TILES_0; ++j) {
            if constexpr (SPLIT) {
                float v[4];
                numbers_of(v, in, j);
                f[j] = split(v, down);
            } else {
                f[j] = fragment_of_x(in, j);
            }
        }

        run_layers<0>(f, state, at, [&](const float (&sums)[column_tiles(depth - 1)][4]) {
            constexpr int TILES = column_tiles(depth - 1);
            char* const results = mine + RESULTS_AT;
            if (lane == 0) store_bulk_wait();
            __syncwarp();
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const RowOfY row = {results + (at.g + 8 * r) * static_cast<int>(FEATURES_OUT * sizeof(S)), static_cast<long long>(sizeof(S))};
#pragma unroll
                for (int j = 0; j < TILES; ++j)
                    store_pair<FEATURES_OUT % 2 == 0>(row, 8 * j + 2 * at.t, sums[j][2 * r], sums[j][2 * r + 1]);
            }
            async_fence();
            __syncwarp();
            if (y_by_bulk && by_bulk(count, Y_BYTES / ROWS)) {
                if (lane == 0) store_bulk(reinterpret_cast<char*>(y) + tile * Y_BYTES, results, count * (Y_BYTES / ROWS));
            } else {
#pragma unroll 1
                for (int i = lane; i < count * FEATURES_OUT; i += 32) {
                    const RowOfY to = row_of_y(y, rows, first_row + i / FEATURES_OUT);
                    store<MLP_Y_ACCESS>(to.start + i % FEATURES_OUT * to.step, reinterpret_cast<const S*>(results)[i]);
                }
                __syncwarp();
            }
        });

        if constexpr (SPLIT) {
            const unsigned int odd[2] = {__ballot_sync(0xffffffffu, !(state.finite[0] && weights_finite)),
                                         __ballot_sync(0xffffffffu, !(state.finite[1] && weights_finite))};
            if ((odd[0] | odd[1]) != 0) {
                if (lane == 0) store_bulk_whole();  // these rows are written again
                __syncwarp();
#pragma unroll 1
                for (int r = 0; r < ROWS; ++r) {  // lane 4 g knows of rows g and g + 8
                    if (((r < 8 ? odd[0] : odd[1]) >> r % 8 * 4 & 1) == 0 || r >= count) continue;
                    plain_row(row_of_x(x, rows, first_row + r), row_of_y(y, rows, first_row + r),
                              reinterpret_cast<const Vector*>(reinterpret_cast<const char*>(weights) + VECTORS_AT),
                              reinterpret_cast<Group*>(mine + SCRATCH_AT));
                }
            }
        }
    }
    if (lane == 0) store_bulk_whole();  // shared memory is read until then
}
