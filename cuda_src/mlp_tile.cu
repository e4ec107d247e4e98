// mlp_tile: many rows a block, all layers in one launch, all weights in shared memory.
//
//   y = act(... act(act(x @ W1 + b1) @ W2 + b2) ...)      x (batch, K), y (batch, N)
//
// Grid (at most one block a multiprocessor,), block (32 * MLP_WARPS,). The block puts all weights and biases into shared
// memory once. Then each warp takes tiles of ROWS_PER_WARP rows through all layers by itself: its activations lie in
// two slabs of its own, and no warp waits for another. The bits are those of mlp_row.
//
// When the planner picks it: batches large enough to pay for loading all weights, that is more than a few rows a
// multiprocessor. Limits: all weights and two neighbouring layers' activations of the warps must fit in shared memory.
//
// Options beside those of common.cuh and tile.cuh:
//   MLP_WARPS         warps a block
//   MLP_COLUMNS       the most columns that a lane computes at a time
//   MLP_SHARED_BYTES  dynamic shared memory that the launch gives; checked against what the kernel lays out
#include "tile.cuh"
#include "softmax.cuh"

// --- Shared memory: every layer's weights and bias; then, for each warp, the activations of even and of odd layers ------

// Columns of a weight matrix in shared memory: the lanes of a warp read them 8 at a time.
__device__ constexpr int columns(int layer) { return (sizes[layer + 1] + COLUMN_GROUPS - 1) / COLUMN_GROUPS * COLUMN_GROUPS; }
__device__ constexpr long long weight_values(int layer) { return values(sizes[layer]) * columns(layer); }
__device__ constexpr long long layer_values(int layer) {
    return weight_values(layer) + (biases[layer] ? values(columns(layer)) : 0);
}
__device__ constexpr long long values_before(int layer) {
    long long sum = 0;
    for (int l = 0; l < layer; ++l) sum += layer_values(l);
    return sum;
}
// Pieces of the widest layer among 0, 2, 4, ... or 1, 3, 5, ...; the last layer's activations go straight to y, but for softmax.
__device__ constexpr long long slab_pieces(int parity) {
    long long widest = 0;
    for (int l = parity; l <= LAST_HELD; l += 2) widest = values(sizes[l]) > widest ? values(sizes[l]) : widest;
    return slab_of(static_cast<int>(widest) * VT);
}
constexpr long long SLABS_AT = values_before(depth);
constexpr long long SLAB_PIECES = slab_pieces(0) + slab_pieces(1);
static_assert(SLABS_AT * 16 + MLP_WARPS * SLAB_PIECES * static_cast<long long>(sizeof(Piece)) == MLP_SHARED_BYTES,
              "the plan and the kernel disagree");

extern __shared__ Values shared[];

// --- Weights to shared memory -------------------------------------------------------------------------------------------

template <int L>
__device__ __forceinline__ void load_matrix(const Weights& weights) {
    using Here = Layer<L>;
    Values* const to = shared + values_before(L);
#if MLP_PACKED
    constexpr int SPLIT = V / VT;  // Values in a Vector
    constexpr int COUNT = vectors(Here::K) * Here::N;
#pragma unroll 8
    for (int i = threadIdx.x; i < COUNT; i += MLP_WARPS * LANES) {
        const Vector from = load_vector(weights + Here::WEIGHTS_AT + i);
#pragma unroll
        for (int s = 0; s < SPLIT; ++s) {
            Values v;
#pragma unroll
            for (int e = 0; e < VT; ++e) v.v[e] = convert(from.v[s * VT + e]);
            const int k = i / Here::N * SPLIT + s;
            if (SPLIT == 1 || k < values(Here::K)) to[k * columns(L) + i % Here::N] = v;
        }
    }
#else
    for (int i = threadIdx.x; i < values(Here::K) * Here::N; i += MLP_WARPS * LANES) {
        Values v;
#pragma unroll
        for (int e = 0; e < VT; ++e) {
            const int k = i / Here::N * VT + e;
            v.v[e] = k < Here::K ? convert(weights.weight[L][k * weights.k_stride[L] + i % Here::N * weights.j_stride[L]]) : T(0);
        }
        to[i / Here::N * columns(L) + i % Here::N] = v;
    }
#endif
    constexpr int PADDING = columns(L) - Here::N;
    if constexpr (PADDING > 0)  // read, and multiplied into sums that nobody stores
        for (int i = threadIdx.x; i < values(Here::K) * PADDING; i += MLP_WARPS * LANES)
            to[i / PADDING * columns(L) + Here::N + i % PADDING] = Values{};
}

template <int L>
__device__ __forceinline__ void load_weights(const Weights& weights) {
    using Here = Layer<L>;
    if constexpr (Here::K * Here::N > 0) load_matrix<L>(weights);
    if constexpr (biases[L]) {
        T* const bias = reinterpret_cast<T*>(shared + values_before(L) + weight_values(L));
        for (int j = threadIdx.x; j < columns(L); j += MLP_WARPS * LANES) bias[j] = j < Here::N ? Here::bias_of(weights, j) : T(0);
    }
    if constexpr (L + 1 < depth) load_weights<L + 1>(weights);
}

// --- Rows of x to a slab ------------------------------------------------------------------------------------------------

// Four neighbouring features of a row, -0 past the last one.
struct Quad { T v[4]; };

template <bool WIDE>
__device__ __forceinline__ Quad load_quad(const RowOfX& x, int k) {
    Quad q;
    if constexpr (WIDE) {
        struct alignas(4 * sizeof(X)) Quad_of_x { X v[4]; };
        const Quad_of_x raw = *reinterpret_cast<const Quad_of_x*>(x.start + k * static_cast<int>(sizeof(X)));
#pragma unroll
        for (int e = 0; e < 4; ++e) q.v[e] = convert(raw.v[e]);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) q.v[e] = k + e < FEATURES_IN ? x[k + e] : -T(0);
    }
    return q;
}

constexpr int QUADS = (FEATURES_IN + 3) / 4;
constexpr int ROWS_PER_LANE = ROWS_PER_WARP / 8;  // of x: lanes 0 .. 3 of four read neighbouring quads of one row
constexpr int QUADS_PER_LANE = (QUADS + 3) / 4;   // of each of them

// What a lane loads of a tile's rows 0 .. last of x; the rows after them repeat row last.
struct PartOfX {
    const X* x;
    const Rows& rows;
    bool wide;  // whole aligned quads
    int lane;
    unsigned int first = opaque(element_at(4 * (lane % 4), row(0)));  // the element of a slab that it writes first

    __device__ __forceinline__ int row(int i) const { return lane / 4 % 4 + lane / 16 * 4 + 8 * i; }
    __device__ __forceinline__ bool exists(int n) const { return QUADS % 4 == 0 || 4 * n + lane % 4 < QUADS; }
    __device__ __forceinline__ Quad load(long long first_row, int last, int i, int n) const {
        const RowOfX from = row_of_x(x, rows, first_row + (row(i) < last ? row(i) : last));
        const int k = 4 * (4 * n + lane % 4);
        return wide ? load_quad<true>(from, k) : load_quad<false>(from, k);
    }
    __device__ __forceinline__ void store(const Quad& q, Piece* slab, int i, int n) const {
        constexpr int WRITTEN = values(FEATURES_IN) * VT;
        T* const to = reinterpret_cast<T*>(slab) + first;
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (WRITTEN % 4 == 0 || 4 * (4 * n + lane % 4) + e < WRITTEN)
                to[element_at(16 * n + e, 8 * i)] = q.v[e];
    }
};

// The columns of layer L that a lane computes, and how many of them at a time.
template <int L>
struct Columns {
    static constexpr int PER_LANE = columns(L) / COLUMN_GROUPS;
    static constexpr int PASSES = PER_LANE > 0 ? (PER_LANE + MLP_COLUMNS - 1) / MLP_COLUMNS : 1;
    static constexpr int C = (PER_LANE + PASSES - 1) / PASSES;
};

// The rows of the next tile are requested before the last layer of this one, which hides the way from memory, if registers
// have room for them beside that layer's sums: what another layer's take.
constexpr bool AHEAD = 4 * QUADS_PER_LANE * ROWS_PER_LANE + (2 * MLP_ROWS + VT) * Columns<depth - 1>::C <= (2 * MLP_ROWS + VT) * MLP_COLUMNS;

template <bool HELD = AHEAD>
struct NextRows {
    Quad quads[ROWS_PER_LANE][QUADS_PER_LANE > 0 ? QUADS_PER_LANE : 1];

    __device__ __forceinline__ void request(const PartOfX& part, long long first_row, int last) {
#pragma unroll
        for (int i = 0; i < ROWS_PER_LANE; ++i)
#pragma unroll
            for (int n = 0; n < QUADS_PER_LANE; ++n)
                if (part.exists(n)) quads[i][n] = part.load(first_row, last, i, n);
    }
    __device__ __forceinline__ void store_to(Piece* slab, const PartOfX& part) const {
#pragma unroll
        for (int i = 0; i < ROWS_PER_LANE; ++i)
#pragma unroll
            for (int n = 0; n < QUADS_PER_LANE; ++n)
                if (part.exists(n)) part.store(quads[i][n], slab, i, n);
    }
};

template <>
struct NextRows<false> {
    long long first_row;
    int last;

    __device__ __forceinline__ void request(const PartOfX&, long long first, int last_of_them) {
        first_row = first;
        last = last_of_them;
    }
    __device__ __forceinline__ void store_to(Piece* slab, const PartOfX& part) const {
#pragma unroll
        for (int i = 0; i < ROWS_PER_LANE; ++i)
#pragma unroll 4
            for (int n = 0; n < QUADS_PER_LANE; ++n)
                if (part.exists(n)) part.store(part.load(first_row, last, i, n), slab, i, n);
    }
};

// --- One layer after the other --------------------------------------------------------------------------------------------

// Whether the first block of a sum without bias is computed apart, which saves adding it to -0, but costs code: more than a few
// kB that all warps go through are read too slowly (canonical net, 2^20 rows: 338.5 us without, 336.3 so, 348.8 for all layers).
template <int L>
constexpr bool FIRST_APART = !biases[L] && Layer<L>::K >= SUM_BLOCK && MLP_ROWS * Columns<L>::C <= 20;

// What a lane computes: the rows of group g, and the first of the columns.
struct Lane { int index, g, column; };

// Whether a hidden layer's activation is taken of numbers that are in the slab already: one after the other, so that its code
// is there once for each row of a piece, not for each number of a lane.
template <int L>
constexpr bool IN_LOOP = is_long(activations[L]);

// A number's partner in the order of softmax.cuh, of lanes whose column groups differ by 4, 2 or 1: COLUMN_LANES of tile.cuh.
template <class Join>
__device__ __forceinline__ T joined(T v, Join join) {
#pragma unroll
    for (int bit = 2; bit >= 0; --bit) v = join(v, __shfl_xor_sync(0xffffffffu, v, 1 << COLUMN_LANES[bit]));
    return v;
}

// softmax of a warp's rows 0 .. last, whose N numbers are in a slab. A lane takes one piece of rows at a time, and of these its
// group's columns, which are four of the 32 sums.
template <int N>
__device__ __forceinline__ void softmax_rows(const Piece* slab, Y* y, const Rows& rows, long long first_row, int last,
                                             const Lane& lane) {
    constexpr int ROUNDS = (N + COLUMN_GROUPS - 1) / COLUMN_GROUPS;
#pragma unroll 1
    for (int p = 0; p < PIECES; ++p) {
        const auto at = [&](int i) {
            const int j = lane.column + i * COLUMN_GROUPS;
            return slab[row_at(j < N ? j : N - 1) + p * 4 + lane.g];
        };
        Piece largest = at(0);
#pragma unroll 1
        for (int i = 1; i < ROUNDS; ++i) {
            const Piece v = at(i);
#pragma unroll
            for (int e = 0; e < PIECE; ++e) largest.v[e] = larger(largest.v[e], v.v[e]);
        }
#pragma unroll
        for (int e = 0; e < PIECE; ++e) largest.v[e] = joined(largest.v[e], larger);
        T sum[4][PIECE] = {};
#pragma unroll 1
        for (int i = 0; i < ROUNDS; i += 4) {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                if (lane.column + (i + q) * COLUMN_GROUPS >= N) break;
                const Piece v = at(i + q);
#pragma unroll
                for (int e = 0; e < PIECE; ++e) sum[q][e] = add(sum[q][e], softmax_term(v.v[e], largest.v[e]));
            }
        }
#pragma unroll
        for (int e = 0; e < PIECE; ++e) {
            const T both = add(add(sum[0][e], sum[2][e]), add(sum[1][e], sum[3][e]));
            const RowScale scale = row_scale(largest.v[e], joined(both, [](T a, T b) { return add(a, b); }));
            const int r = row_of(lane.g, p, e);
            if (r <= last) {
                const RowOfY to = row_of_y(y, rows, first_row + r);
#pragma unroll 1
                for (int j = lane.column; j < N; j += COLUMN_GROUPS)
                    to.set(j, scale.result(reinterpret_cast<const T*>(slab)[element_at(j, r)]));
            }
        }
    }
}

// Compute layer L and all that follow for a warp's rows 0 .. last. in holds the activations of layer L; out is free.
template <int L, class BeforeLast>
__device__ __forceinline__ void run_layers(Piece* in, Piece* out, S* y, const Rows& rows, long long first_row, int last,
                                           const Lane& lane, const BeforeLast& before_last) {
    using Here = Layer<L>;
    constexpr int K = Here::K, N = Here::N;
    constexpr bool LAST = L == depth - 1;
    if constexpr (LAST) before_last();
    if constexpr (N > 0) {
        constexpr int PER_LANE = Columns<L>::PER_LANE, PASSES = Columns<L>::PASSES, C = Columns<L>::C;
#pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass) {
            // The last pass may begin a little earlier, so that all are as wide: what is computed twice has the same bits.
            const int first = (PASSES * C == PER_LANE ? pass * C : (pass + 1 < PASSES ? pass * C : PER_LANE - C)) * COLUMN_GROUPS + lane.column;
            const Values* weights = shared + values_before(L) + first;
            T sum[MLP_ROWS][C];
#pragma unroll
            for (int c = 0; c < C; ++c) {
                T start = K == 0 ? T(0) : -T(0);  // an empty sum is +0
                if constexpr (biases[L])
                    start = reinterpret_cast<const T*>(shared + values_before(L) + weight_values(L))[first + c * COLUMN_GROUPS];
#pragma unroll
                for (int r = 0; r < MLP_ROWS; ++r) sum[r][c] = start;
            }
            const Piece* pieces = in + lane.g;
            const auto advance = [&] {
                pieces += row_at(SUM_BLOCK);
                weights += SUM_BLOCK / VT * columns(L);
            };
            if constexpr (FIRST_APART<L>) {
                sum_block<SUM_BLOCK, C>(sum, pieces, weights, columns(L));
                advance();
            }
#pragma unroll 1
            for (int block = FIRST_APART<L>; block < K / SUM_BLOCK; ++block) {
                add_block<SUM_BLOCK, C>(sum, pieces, weights, columns(L));
                advance();
            }
            if constexpr (K % SUM_BLOCK != 0) add_block<K % SUM_BLOCK, C>(sum, pieces, weights, columns(L));
#pragma unroll
            for (int p = 0; p < PIECES; ++p) {
                if constexpr (LAST && !OVER_ROW) {
#pragma unroll
                    for (int e = 0; e < PIECE; ++e) {
                        const int r = row_of(lane.g, p, e);
                        if (r > last) continue;
                        const RowOfY to = row_of_y(y, rows, first_row + r);
#pragma unroll
                        for (int c = 0; c < C; ++c) {
                            const int j = first + c * COLUMN_GROUPS;
                            if (N % COLUMN_GROUPS == 0 || j < N) to.set(j, activate<L>(sum[p * PIECE + e][c]));
                        }
                    }
                } else {
                    Piece* const to = out + row_at(first) + p * 4 + lane.g;
#pragma unroll
                    for (int c = 0; c < C; ++c) {
                        Piece h;
#pragma unroll
                        for (int e = 0; e < PIECE; ++e) {
                            const T v = sum[p * PIECE + e][c];
                            h.v[e] = LAST || IN_LOOP<L> ? v : stored(activate<L>(v));
                        }
                        const int j = first + c * COLUMN_GROUPS;
                        if (N % COLUMN_GROUPS == 0 || j < N) to[row_at(c * COLUMN_GROUPS)] = h;
                    }
                }
            }
            if constexpr (!LAST && IN_LOOP<L>) {
                // Of what this lane has just put there.
#pragma unroll 1
                for (int i = 0; i < PIECES * C; ++i) {
                    const int c = i / PIECES;
                    if (N % COLUMN_GROUPS != 0 && first + c * COLUMN_GROUPS >= N) break;
                    Piece* const here = out + row_at(first + c * COLUMN_GROUPS) + i % PIECES * 4 + lane.g;
                    Piece h = *here;
#pragma unroll
                    for (int e = 0; e < PIECE; ++e) h.v[e] = stored(activate<L>(h.v[e]));
                    *here = h;
                }
            }
        }
    }
    if constexpr (LAST && OVER_ROW && N > 0) {
        __syncwarp();
        softmax_rows<N>(out, y, rows, first_row, last, lane);
    }
    if constexpr (!LAST) {
        if constexpr (N % VT != 0) {  // past the last feature: -0
            for (int i = lane.index; i < (VT - N % VT) * ROWS_PER_WARP; i += LANES)
                reinterpret_cast<T*>(out)[element_at(N + i / ROWS_PER_WARP, i % ROWS_PER_WARP)] = -T(0);
        }
        __syncwarp();
        run_layers<L + 1>(out, in, y, rows, first_row, last, lane, before_last);
    }
}

extern "C" __global__ void __launch_bounds__(MLP_WARPS * LANES, 1)
mlp_tile(const X* __restrict__ x,   // (batch, K), read through rows
         S* __restrict__ y,         // (batch, N), written through rows
         const Weights weights,     // packed, or the caller's arrays
         const Rows rows) {         // the batch size and, unless contiguous, the strides of x and y
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    load_weights<0>(weights);

    const Lane groups = {lane, static_cast<int>(opaque(row_group(lane))), static_cast<int>(opaque(column_group(lane)))};
    Piece* const even = reinterpret_cast<Piece*>(shared + SLABS_AT) + warp * SLAB_PIECES;
    Piece* const odd = even + slab_pieces(0);
    const bool wide = MLP_BATCH_DIMS == 0 && FEATURES_IN % 4 == 0 && reinterpret_cast<unsigned long long>(x) % (4 * sizeof(X)) == 0;
    const PartOfX part = {x, rows, wide, lane};
    NextRows<> next;
    // Neighbouring tiles go to neighbouring blocks, so that few tiles keep many multiprocessors busy.
    const long long step = static_cast<long long>(gridDim.x) * MLP_WARPS * ROWS_PER_WARP;
    long long first_row = (blockIdx.x + static_cast<long long>(gridDim.x) * warp) * ROWS_PER_WARP;
    const auto last_of = [&](long long first) {
        const long long left = rows.batch - first;
        return left < ROWS_PER_WARP ? static_cast<int>(left) - 1 : ROWS_PER_WARP - 1;
    };
    if (first_row < rows.batch) next.request(part, first_row, last_of(first_row));
    __syncthreads();
    for (; first_row < rows.batch; first_row += step) {
        next.store_to(even, part);
        __syncwarp();
        run_layers<0>(even, odd, y, rows, first_row, last_of(first_row), groups, [&] {
            if (first_row + step < rows.batch) next.request(part, first_row + step, last_of(first_row + step));
        });
        __syncwarp();  // the next tile overwrites what this one reads
    }
}
