// mlp_layer: one layer a launch, a tile of rows and columns a block.
//
//   y = act(x @ W + b)      x (rows, K), y (rows, N): a network of one layer
//
// The layer schedule launches it once a layer, each time compiled for that layer alone: equal layers share a kernel. Hidden
// activations are contiguous arrays (rows, width) of the storage type. Grid (row tiles * column tiles,), block
// (32 * MLP_ROW_WARPS * MLP_COLUMN_WARPS,): a warp computes ROWS_PER_WARP rows of MLP_COLUMNS * 8 columns. Chunks of
// MLP_CHUNK consecutive k of the tile's rows and columns go through shared memory in two stages: while one is multiplied the
// next is on its way from global memory. The bits are those of mlp_row.
//
// When the planner picks it: layers so wide that the weights outgrow shared memory. Limits: none but memory for the
// hidden activations.
//
// Options beside those of common.cuh (of one layer) and tile.cuh:
//   MLP_COLUMNS                       columns a lane
//   MLP_ROW_WARPS, MLP_COLUMN_WARPS   warps of a block, along the rows and along the columns
//   MLP_CHUNK                         k of a stage, a multiple of SUM_BLOCK
//   MLP_BLOCKS                        blocks that share a multiprocessor: what registers are limited for
//   MLP_SHARED_BYTES                  dynamic shared memory that the launch gives; checked against what the kernel lays out
#include "tile.cuh"

static_assert(depth == 1, "a launch computes one layer");
static_assert(MLP_CHUNK % SUM_BLOCK == 0, "a chunk is made of whole blocks of the sum");

constexpr int K = FEATURES_IN;
constexpr int N = FEATURES_OUT;
constexpr int WARPS = MLP_ROW_WARPS * MLP_COLUMN_WARPS;
constexpr int BLOCK_ROWS = MLP_ROW_WARPS * ROWS_PER_WARP;
constexpr int BLOCK_COLUMNS = MLP_COLUMN_WARPS * MLP_COLUMNS * COLUMN_GROUPS;
constexpr int COLUMN_TILES = (N + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
constexpr int CHUNKS = (K + MLP_CHUNK - 1) / MLP_CHUNK;

// --- Shared memory: two stages, each the slabs of the row warps and the weights [k / VT][column][VT] of a chunk -------------

constexpr int SLAB_PIECES = slab_of(MLP_CHUNK);
constexpr int SLABS_VALUES = MLP_ROW_WARPS * SLAB_PIECES * static_cast<int>(sizeof(Piece)) / 16;
constexpr int STAGE_VALUES = SLABS_VALUES + MLP_CHUNK / VT * BLOCK_COLUMNS;
static_assert(2 * 16 * STAGE_VALUES == MLP_SHARED_BYTES, "the plan and the kernel disagree");

extern __shared__ Values shared[];

// --- A thread's share of a chunk, on its way from global to shared memory ---------------------------------------------------

struct alignas(4 * sizeof(X) <= 16 ? 4 * sizeof(X) : 16) QuadOfX { X v[4]; };  // four neighbouring features of a row

// Rows. A warp takes 8 rows of a slab and 16 of k at a time: lanes 0 .. 3 of four read neighbouring quads of one row.
constexpr int ROW_UNITS = BLOCK_ROWS / 8;
constexpr int UNITS = ROW_UNITS * (MLP_CHUNK / 16);
constexpr int UNITS_PER_WARP = (UNITS + WARPS - 1) / WARPS;

struct RowsShare {
    RowOfX from[UNITS_PER_WARP];
    QuadOfX quad[UNITS_PER_WARP];

    static __device__ __forceinline__ int slab(int unit) { return unit % ROW_UNITS / (ROWS_PER_WARP / 8); }
    static __device__ __forceinline__ int row_in_slab(int unit, int lane) {
        return lane / 4 % 4 + lane / 16 * 4 + 8 * (unit % (ROWS_PER_WARP / 8));
    }
    static __device__ __forceinline__ int k_in_chunk(int unit, int lane) { return unit / ROW_UNITS * 16 + lane % 4 * 4; }

    // Rows beyond the last one repeat it: what is computed of them is not stored.
    __device__ __forceinline__ RowsShare(const X* x, const Rows& rows, long long x_first, long long tile_row, long long count,
                                         int lane, int warp) {
#pragma unroll
        for (int n = 0; n < UNITS_PER_WARP; ++n) {
            const int unit = warp + n * WARPS;
            const long long row = tile_row + slab(unit) * ROWS_PER_WARP + row_in_slab(unit, lane);
            from[n] = row_of_x(x, rows, x_first + (row < count ? row : count - 1));
        }
    }

    // wide: every quad is aligned, and K is a multiple of 4.
    __device__ __forceinline__ void load(int chunk, bool wide, int lane, int warp) {
#pragma unroll
        for (int n = 0; n < UNITS_PER_WARP; ++n) {
            const int unit = warp + n * WARPS;
            if (UNITS % WARPS != 0 && unit >= UNITS) break;
            const int k = chunk * MLP_CHUNK + k_in_chunk(unit, lane);
            if (K % 4 == 0 && wide) {
                const char* const address = from[n].start + k * static_cast<long long>(sizeof(X));
                if (K % MLP_CHUNK == 0 || k < K) quad[n] = *reinterpret_cast<const QuadOfX*>(address);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (K % MLP_CHUNK == 0 || k + e < K) quad[n].v[e] = from[n].raw(k + e);
            }
        }
    }

    __device__ __forceinline__ void store_to(Values* stage, int chunk, int lane, int warp) const {
        T* const to = reinterpret_cast<T*>(stage);
#pragma unroll
        for (int n = 0; n < UNITS_PER_WARP; ++n) {
            const int unit = warp + n * WARPS;
            if (UNITS % WARPS != 0 && unit >= UNITS) break;
            const int k = k_in_chunk(unit, lane);
            T* const here = to + slab(unit) * SLAB_PIECES * PIECE;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool inside = K % MLP_CHUNK == 0 || chunk * MLP_CHUNK + k + e < K;
                here[element_at(k + e, row_in_slab(unit, lane))] = inside ? convert(quad[n].v[e]) : -T(0);
            }
        }
    }
};

// Weights: Vector i of neighbouring columns by neighbouring threads.
constexpr int SPLIT = V / VT;  // Values in a Vector
constexpr int WEIGHT_VECTORS = MLP_CHUNK / V * BLOCK_COLUMNS;
constexpr int VECTORS_PER_THREAD = (WEIGHT_VECTORS + WARPS * LANES - 1) / (WARPS * LANES);

struct WeightsShare {
    Vector vector[VECTORS_PER_THREAD];

    __device__ __forceinline__ void load(const Weights& weights, int chunk, int first_column) {
#pragma unroll
        for (int n = 0; n < VECTORS_PER_THREAD; ++n) {
            const int at = threadIdx.x + n * (WARPS * LANES);
            if (WEIGHT_VECTORS % (WARPS * LANES) != 0 && at >= WEIGHT_VECTORS) break;
            const int i = chunk * (MLP_CHUNK / V) + at / BLOCK_COLUMNS;
            const int j = first_column + at % BLOCK_COLUMNS;
            const bool inside = (K % MLP_CHUNK == 0 || i < vectors(K)) && (N % BLOCK_COLUMNS == 0 || j < N);
            if (inside) vector[n] = Layer<0>::weights_of(weights, i, j);
            else vector[n] = Vector{};
        }
    }

    __device__ __forceinline__ void store_to(Values* stage) const {
        Values* const to = stage + SLABS_VALUES;
#pragma unroll
        for (int n = 0; n < VECTORS_PER_THREAD; ++n) {
            const int at = threadIdx.x + n * (WARPS * LANES);
            if (WEIGHT_VECTORS % (WARPS * LANES) != 0 && at >= WEIGHT_VECTORS) break;
#pragma unroll
            for (int s = 0; s < SPLIT; ++s) {
                Values v;
#pragma unroll
                for (int e = 0; e < VT; ++e) v.v[e] = convert(vector[n].v[s * VT + e]);
                to[(at / BLOCK_COLUMNS * SPLIT + s) * BLOCK_COLUMNS + at % BLOCK_COLUMNS] = v;
            }
        }
    }
};

// --- The products of a stage --------------------------------------------------------------------------------------------------

// COUNT products. rows, w: as in tile.cuh. Small blocks are unrolled, so that they overlap.
template <int COUNT, int UNROLL = (MLP_ROWS * MLP_COLUMNS > 16 ? 1 : COUNT / SUM_BLOCK + 1)>
__device__ __forceinline__ void add_chunk(T (&sum)[MLP_ROWS][MLP_COLUMNS], const Piece* rows, const Values* w) {
    constexpr int WHOLE = COUNT / SUM_BLOCK * SUM_BLOCK;
#pragma unroll UNROLL
    for (int k = 0; k < WHOLE; k += SUM_BLOCK)
        add_block<SUM_BLOCK, MLP_COLUMNS>(sum, rows + row_at(k), w + k / VT * BLOCK_COLUMNS, BLOCK_COLUMNS);
    if constexpr (COUNT > WHOLE)
        add_block<COUNT - WHOLE, MLP_COLUMNS>(sum, rows + row_at(WHOLE), w + WHOLE / VT * BLOCK_COLUMNS, BLOCK_COLUMNS);
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES, MLP_BLOCKS)
mlp_layer(const X* __restrict__ x,     // (.., K), read through rows
          Y* __restrict__ y,           // (.., N), written through rows
          const Weights weights,       // packed, or the caller's array
          const Rows rows,             // the strides of x and y, unless contiguous
          const long long x_first,     // the row of x that is computed first
          const long long y_first,     // the row of y that it is written to
          const long long count) {     // rows to compute
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int row_warp = warp % MLP_ROW_WARPS, column_warp = warp / MLP_ROW_WARPS;
    const int g = row_group(lane);
    // Neighbouring blocks share their rows, so that x comes from the L2 cache.
    const long long tile_row = blockIdx.x / COLUMN_TILES * static_cast<long long>(BLOCK_ROWS);
    if (tile_row >= count) return;  // the last round has fewer rows
    const int tile_column = blockIdx.x % COLUMN_TILES * BLOCK_COLUMNS;
    const int lane_column = column_warp * (MLP_COLUMNS * COLUMN_GROUPS) + column_group(lane);

    T sum[MLP_ROWS][MLP_COLUMNS];
#pragma unroll
    for (int c = 0; c < MLP_COLUMNS; ++c) {
        const int j = tile_column + lane_column + c * COLUMN_GROUPS;
        T start = -T(0);
        if constexpr (biases[0]) start = Layer<0>::bias_of(weights, j < N ? j : N - 1);
        else if constexpr (K == 0) start = T(0);  // an empty sum
#pragma unroll
        for (int r = 0; r < MLP_ROWS; ++r) sum[r][c] = start;
    }

    if constexpr (K > 0) {
        const bool wide = MLP_X_ACCESS == Access::contiguous && reinterpret_cast<unsigned long long>(x) % alignof(QuadOfX) == 0;
        RowsShare rows_share(x, rows, x_first, tile_row, count, lane, warp);
        WeightsShare weights_share;
        rows_share.load(0, wide, lane, warp);
        weights_share.load(weights, 0, tile_column);
        rows_share.store_to(shared, 0, lane, warp);
        weights_share.store_to(shared);
        __syncthreads();
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const Values* const stage = shared + chunk % 2 * STAGE_VALUES;
            Values* const next = shared + (chunk + 1) % 2 * STAGE_VALUES;
            // The last chunk is loaded twice: under a condition, the compiler moves the loads down to where they are used,
            // which is too late; so it does without the fence.
            const bool more = chunk + 1 < CHUNKS;
            const int ahead = more ? chunk + 1 : chunk;
            if (CHUNKS > 1) {
                rows_share.load(ahead, wide, lane, warp);
                weights_share.load(weights, ahead, tile_column);
                asm volatile("" ::: "memory");
            }
            const Piece* const pieces = reinterpret_cast<const Piece*>(stage) + row_warp * SLAB_PIECES + g;
            const Values* const w = stage + SLABS_VALUES + lane_column;
            constexpr int LAST = K - (CHUNKS - 1) * MLP_CHUNK;  // k of the last chunk
            if (LAST == MLP_CHUNK || more) add_chunk<MLP_CHUNK>(sum, pieces, w);
            else add_chunk<LAST>(sum, pieces, w);
            if (CHUNKS > 1) {
                rows_share.store_to(next, ahead, lane, warp);
                weights_share.store_to(next);
                __syncthreads();  // the next stage is complete, and this one is free
            }
        }
    }

#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
#pragma unroll
        for (int e = 0; e < PIECE; ++e) {
            const long long row = tile_row + row_warp * ROWS_PER_WARP + row_of(g, p, e);
            if (row >= count) continue;
            const RowOfY to = row_of_y(y, rows, y_first + row);
#pragma unroll
            for (int c = 0; c < MLP_COLUMNS; ++c) {
                const int j = tile_column + lane_column + c * COLUMN_GROUPS;
                if (N % BLOCK_COLUMNS == 0 || j < N) to.set(j, activate<0>(sum[p * PIECE + e][c]));
            }
        }
    }
}
