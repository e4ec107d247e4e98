// mlp_mma: many rows a warp on tensor cores by mma.sync, all layers in one launch.
//
//   y = act(... act(act(x @ W1 + b1) @ W2 + b2) ...)      x (batch, K), y (batch, N)
//
// Grid (at most one block a multiprocessor,), block (32 * MLP_WARPS,). Each warp takes tiles of ROWS = 16 * MLP_TILES rows
// through all layers by itself, and no warp waits for another. A lane's sums of one layer are its fragments of the next, so
// activations never pass between lanes: they stay in registers, or, where layers are too wide for that, in a part of
// shared memory that the lane has to itself. Precisions tf32 and split3 of float32 networks; float16 and bfloat16 networks with
// float32 sums and one rounding a layer.
//
// When the planner picks it: batches large enough to pay for loading all weights, from sm_80 on. Limits: where activations
// are in shared memory, two neighbouring layers' of one warp must fit. Weights that do not fit are read from global memory.
//
// Options beside those of common.cuh and tensor.cuh:
//   MLP_WARPS         warps a block
//   MLP_TILES         16-row tiles that a warp computes at a time: 1 or 2
//   MLP_REGISTERS     1: activations in registers; 0: in shared memory
//   MLP_PREFETCH      1: the next rows of x are on their way while these are computed (with MLP_REGISTERS)
//   MLP_STAGED        1: weights in shared memory; 0: in global memory (not with MLP_REGISTERS: too many addresses)
//   MLP_CHUNK         8-column tiles that are summed at a time, where activations are in shared memory
//   MLP_SHARED_BYTES  dynamic shared memory that the launch gives; checked against what the kernel lays out
#include "tensor.cuh"
#include "plain_row.cuh"

static_assert(MLP_STAGED || !MLP_REGISTERS, "activations in registers want weights in shared memory");

constexpr int TILES = MLP_TILES;
constexpr int ROWS = 16 * TILES;
constexpr int LANES = 32;
constexpr unsigned int WARP = 0xffffffffu;
constexpr int K_UNROLL = MLP_REGISTERS ? 1 << 20 : 2;  // registers need constant indices

// --- Shared memory: the staged weights; then, for each warp, activations of even and of odd layers, which is also where
// plain_row computes ---------------------------------------------------------------------------------------------------------

__device__ constexpr int fragments(int layer) { return 2 * k_tiles(layer); }
__device__ constexpr long long slab_bytes(int parity) {
    int most = 0;
    for (int l = parity; l < depth; l += 2) most = fragments(l) > most ? fragments(l) : most;
    return static_cast<long long>(most) * TILES * LANES * static_cast<long long>(sizeof(Fragment));
}
constexpr long long SLABS_AT = MLP_STAGED ? STAGED_BYTES : 0;
constexpr long long SLAB_BYTES = slab_bytes(0) + slab_bytes(1);
constexpr long long PLAIN_BYTES = SPLIT ? PLAIN_ROW_BYTES : 0;
constexpr long long WARP_BYTES = MLP_REGISTERS || PLAIN_BYTES > SLAB_BYTES ? PLAIN_BYTES : SLAB_BYTES;
constexpr long long USED_BYTES = SLABS_AT + MLP_WARPS * WARP_BYTES;
static_assert(STAGED_BYTES < 1ll << 31, "offsets of packed weights are ints");
static_assert((USED_BYTES > 16 ? USED_BYTES : 16) == MLP_SHARED_BYTES, "the plan and the kernel disagree");

extern __shared__ Vector shared[];

// --- A lane's activations: fragment j of tile m -------------------------------------------------------------------------

template <int L>
struct InRegisters {
    Fragment fragment[TILES][fragments(L) > 0 ? fragments(L) : 2];
    __device__ __forceinline__ Fragment get(int m, int j) const { return fragment[m][j]; }
    __device__ __forceinline__ void set(int m, int j, const Fragment& f) { fragment[m][j] = f; }
};

struct InShared {
    Fragment* start;  // the lane's
    __device__ __forceinline__ Fragment get(int m, int j) const { return start[(j * TILES + m) * LANES]; }
    __device__ __forceinline__ void set(int m, int j, const Fragment& f) { start[(j * TILES + m) * LANES] = f; }
};

#if MLP_REGISTERS
template <int L>
struct Activations : InRegisters<L> {
    __device__ __forceinline__ explicit Activations(char*) {}
};
#else
template <int L>
struct Activations : InShared {
    __device__ __forceinline__ explicit Activations(char* slabs)
        : InShared{reinterpret_cast<Fragment*>(slabs + (L % 2 ? slab_bytes(0) : 0)) + threadIdx.x % LANES} {}
};
#endif

// What a lane knows of its rows g and g + 8 of each tile.
struct LaneRows {
    int exponent[TILES][2];  // split3: of the powers of two by which this layer's inputs were divided
    unsigned int plain;      // bit 2m + r: row g + 8r of tile m is to be computed by plain_row
};

// split3: four activations as they are, until their rows' largest are known: complete makes the fragment of them.
__device__ __forceinline__ Fragment as_they_are(const float (&v)[4]) {
    Fragment f;
#pragma unroll
    for (int e = 0; e < 4; ++e) f.r[e % FRAGMENT_REGISTERS] = __float_as_uint(v[e]);
    return f;
}

template <int L>
__device__ __forceinline__ void complete(Activations<L>& in, const Largest (&largest)[TILES], LaneRows& lane_rows) {
    if constexpr (SPLIT) {
        float down[TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const unsigned int bits = largest_of_row(largest[m].row[r]);
                if (!is_finite(bits)) lane_rows.plain |= 1u << (2 * m + r);
                lane_rows.exponent[m][r] = exponent_of(bits);
                down[m][r] = power_of_two(-lane_rows.exponent[m][r]);
            }
#pragma unroll K_UNROLL
        for (int j = 0; j < fragments(L); ++j)
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                const Fragment f = in.get(m, j);
                float v[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) v[e] = __uint_as_float(f.r[e % FRAGMENT_REGISTERS]);
                in.set(m, j, split(v, down[m]));
            }
    }
}

// --- Rows of x ----------------------------------------------------------------------------------------------------------

// Rows beyond the batch repeat its last one.
__device__ __forceinline__ RowOfX lanes_row_of_x(const X* x, const Rows& rows, long long first_row, int m, int r, int lane) {
    const long long row = first_row + 16 * m + 8 * r + lane / 4;
    return row_of_x(x, rows, row < rows.batch ? row : rows.batch - 1);
}

__device__ __forceinline__ void put_quads(Activations<0>& to, Largest (&largest)[TILES], int m, int u, const Quad (&q)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float v[4] = {convert(q[0].v[2 * h]), convert(q[0].v[2 * h + 1]), convert(q[1].v[2 * h]),
                            convert(q[1].v[2 * h + 1])};
        if constexpr (SPLIT) include(largest[m], v);
        to.set(m, 2 * u + h, SPLIT ? as_they_are(v) : fragment_of(v));
    }
}

#if MLP_REGISTERS
// A lane's part of ROWS rows of x.
struct Input {
    Quad quad[TILES][k_tiles(0) > 0 ? k_tiles(0) : 1][2];

    template <bool WIDE>
    __device__ __forceinline__ void load(const X* x, const Rows& rows, long long first_row, int lane) {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const RowOfX from = lanes_row_of_x(x, rows, first_row, m, r, lane);
#pragma unroll
                for (int u = 0; u < k_tiles(0); ++u) quad[m][u][r] = load_quad<WIDE>(from, 16 * u + 4 * (lane % 4));
            }
    }
    __device__ __forceinline__ void put_to(Activations<0>& to, Largest (&largest)[TILES]) const {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int u = 0; u < k_tiles(0); ++u) put_quads(to, largest, m, u, quad[m][u]);
    }
};
#else
template <bool WIDE>
__device__ __forceinline__ void load_rows(Activations<0>& to, Largest (&largest)[TILES], const X* x, const Rows& rows,
                                          long long first_row, int lane) {
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
        const RowOfX from[2] = {lanes_row_of_x(x, rows, first_row, m, 0, lane), lanes_row_of_x(x, rows, first_row, m, 1, lane)};
#pragma unroll 4
        for (int u = 0; u < k_tiles(0); ++u) {
            const int k = 16 * u + 4 * (lane % 4);
            const Quad q[2] = {load_quad<WIDE>(from[0], k), load_quad<WIDE>(from[1], k)};
            put_quads(to, largest, m, u, q);
        }
    }
}
#endif

// --- Products -----------------------------------------------------------------------------------------------------------

// The A fragments of k-step s. PART, here and below: 0, or for split3 0 (high) or 1 (low).
template <int PART, int L>
__device__ __forceinline__ void a_registers(unsigned int (&a)[4], const Activations<L>& in, int m, int s) {
    if constexpr (MATH == Math::tf32) {
        const Fragment f = in.get(m, s);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = f.r[i];
    } else {
        const Fragment f[2] = {in.get(m, 2 * s), in.get(m, 2 * s + 1)};
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = f[i / 2].r[2 * PART + i % 2];
    }
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    if constexpr (MATH == Math::tf32) mma_tf32(sum, a, b);
    else if constexpr (MATH == Math::bfloat16) mma_bfloat16(sum, a, b);
    else mma_half(sum, a, b);
}

// Where a lane reads packed weights: in shared or in global memory.
#if MLP_STAGED
using Address = SharedAddress;
#else
using Address = const char*;
#endif
struct LaneWeights {
    Address tiles;   // of B, with the lane's part of an address added
    Address biases;  // of columns 8j + 2t, with that of t added

    // Not known to be the same for every tile of rows.
    __device__ __forceinline__ LaneWeights again() const { return {opaque(tiles), opaque(biases)}; }
};

__device__ __forceinline__ LaneWeights weights_of_lane(const char* packed, int lane) {
#if MLP_STAGED
    const SharedAddress start = shared_address(packed);
    return {start + lane * 16, start + lane % 4 * 8};
#else
    return {packed + lane * 4, packed + lane % 4 * 8};
#endif
}

// A lane's B fragments of COUNT <= 2 neighbouring column tiles.
template <int COUNT>
__device__ __forceinline__ void b_registers(unsigned int (&b)[2][2], Address tiles) {
#if MLP_STAGED
    if constexpr (COUNT == 2) load_b_tiles(b[0], b[1], tiles);
    else load_b_tile(b[0], tiles);
#else
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h) b[c][h] = load_word(tiles + c * TILE_BYTES + h * (TILE_BYTES / 2));
#endif
}

template <int L>
__device__ __forceinline__ Pair bias_pair(Address biases_at_t, int tile) {
    Pair pair = {};
    if constexpr (biases[L]) {
        const Address address = biases_at_t + (static_cast<int>(bias_at(L)) + tile * 32);
#if MLP_STAGED
        load_shared_pair(pair.v, address);
#else
        load_pair(pair.v, reinterpret_cast<const float*>(address));
#endif
    }
    return pair;
}

// The compiler would keep weights in registers that are read twice, or for the next rows, and spill others: no load passes
// this.
__device__ __forceinline__ void hold_no_weights() { __syncwarp(); }

// sum += the products of k-step s, for C column tiles from `tiles` on.
template <int A_PART, int L, int C>
__device__ __forceinline__ void add_step(float (&sum)[TILES][C][4], const Activations<L>& in, int s, Address tiles) {
    unsigned int a[TILES][4];
#pragma unroll
    for (int m = 0; m < TILES; ++m) a_registers<A_PART>(a[m], in, m, s);
#pragma unroll
    for (int c = 0; c + 1 < C; c += 2) {
        unsigned int b[2][2];
        b_registers<2>(b, tiles + c * TILE_BYTES);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int m = 0; m < TILES; ++m) multiply_add(sum[m][c + i], a[m], b[i]);
    }
    if constexpr (C % 2 != 0) {
        unsigned int b[2][2];
        b_registers<1>(b, tiles + (C - 1) * TILE_BYTES);
#pragma unroll
        for (int m = 0; m < TILES; ++m) multiply_add(sum[m][C - 1], a[m], b[0]);
    }
}

// All products of a layer for C column tiles from `first` on, in the order that tensor.cuh gives.
template <int L, int C>
__device__ __forceinline__ void multiply(float (&sum)[TILES][C][4], const Activations<L>& in, Address tiles, int first) {
    constexpr int STEP = column_tiles(L) * TILE_BYTES;
    const Address high = tiles + (static_cast<int>(weights_at(L)) + first * TILE_BYTES);
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[m][c][e] = 0.0f;
    hold_no_weights();
    if constexpr (SPLIT) {
        const Address low = high + static_cast<int>(part_bytes(L));
#pragma unroll K_UNROLL
        for (int s = 0; s < k_steps(L); ++s) {
            add_step<1>(sum, in, s, high + s * STEP);
            add_step<0>(sum, in, s, low + s * STEP);
        }
        hold_no_weights();
    }
#pragma unroll K_UNROLL
    for (int s = 0; s < k_steps(L); ++s) add_step<0>(sum, in, s, high + s * STEP);
}

// --- One layer after the other ------------------------------------------------------------------------------------------

// Column tiles that are summed at a time.
__device__ constexpr int passes(int layer) { return MLP_REGISTERS ? 1 : (column_tiles(layer) + MLP_CHUNK - 1) / MLP_CHUNK; }
__device__ constexpr int chunk(int layer) {
    return column_tiles(layer) == 0 ? 1 : (column_tiles(layer) + passes(layer) - 1) / passes(layer);
}
template <int L>
using Sums = float[TILES][chunk(L)][4];

// What all layers are told.
struct Context {
    const char* packed;  // the header of the packed weights, in shared or global memory
    LaneWeights weights;
    char* slabs;         // the warp's
    S* y;
    const Rows& rows;
    long long first_row;
    bool paired;
    int lane;
};

// Results of some column tiles of the last layer to y.
template <bool PAIRED, int L>
__device__ __forceinline__ void store_results(const Sums<L>& v, const Context& context, int first, unsigned int plain) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const long long row = context.first_row + 16 * m + 8 * r + context.lane / 4;
            if (row >= context.rows.batch || (plain >> (2 * m + r) & 1u)) continue;
            const RowOfY to = row_of_y(context.y, context.rows, row);
#pragma unroll
            for (int c = 0; c < chunk(L); ++c)
                store_pair<PAIRED>(to, (first + c) * 8 + context.lane % 4 * 2, v[m][c][2 * r], v[m][c][2 * r + 1]);
        }
}

// Compute all columns of layer L, but for the activation; take(v, first) gets chunk(L) column tiles at a time.
template <int L, class Take>
__device__ __forceinline__ void run_layer(const Activations<L>& in, const LaneRows& lane_rows, const Context& context,
                                          Take take) {
    constexpr int COLUMN_TILES = column_tiles(L);
    constexpr int PASSES = passes(L), C = chunk(L);
    Scale scale[TILES][2] = {};
    if constexpr (SPLIT) {
        const int exponent = exponent_of_weights(context.packed, L);
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) scale[m][r] = scale_of(lane_rows.exponent[m][r] + exponent);
    }
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) {
        // The last pass may begin a little earlier, so that all are as wide: what is computed twice has the same bits.
        const int first = PASSES * C == COLUMN_TILES ? pass * C : min(pass * C, COLUMN_TILES - C);
        Sums<L> sum;
        multiply<L>(sum, in, context.weights.tiles, first);
#pragma unroll
        for (int c = 0; c < C; ++c) {
            const Pair bias = bias_pair<L>(context.weights.biases, first + c);
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[m][c][e] = linear<L>(sum[m][c][e], scale[m][e / 2], bias.v[e % 2]);
        }
        take(sum, first);
    }
}

// Results of some column tiles of a hidden layer become the next one's input.
template <int L>
__device__ __forceinline__ void keep(Activations<L + 1>& out, Largest (&largest)[TILES], Sums<L>& v, int first, int lane) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int c = 0; c < chunk(L); ++c) {
            if constexpr (SPLIT) {
                activate_all<L>(v[m][c]);
                clear_padding<L>(v[m][c], first + c, lane % 4);
                include(largest[m], v[m][c]);
                out.set(m, first + c, as_they_are(v[m][c]));
            } else {
                out.set(m, first + c, hidden_fragment<L>(v[m][c], first + c, lane % 4));
            }
        }
}

template <int L>
__device__ __forceinline__ void store_chunk(const Sums<L>& v, const Context& context, int first, unsigned int plain) {
    if (context.paired) store_results<true, L>(v, context, first, plain);
    else store_results<false, L>(v, context, first, plain);
}

// Call f(numbers of a column tile, that tile, m) for all column tiles of v from `next` on.
template <int L, class F>
__device__ __forceinline__ void for_tiles(Sums<L>& v, int first, int next, F f) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int c = 0; c < chunk(L); ++c)
            if (passes(L) == 1 || first + c >= next) f(v[m][c], first + c, m);
}

// The last layer, if softmax follows. Where its columns take more passes than one, all of them are summed three times: there is
// no place for the sums of a row.
template <int L>
__device__ __forceinline__ void run_softmax(const Activations<L>& in, LaneRows& lane_rows, const Context& context) {
    SoftmaxOfRows rows[TILES];
    const int t = context.lane % 4;
    int next = 0;  // the first column tile whose terms are not in the sum
#pragma unroll
    for (int m = 0; m < TILES; ++m) rows[m].begin();
    const auto look = [&](Sums<L>& v, int first) {
        for_tiles<L>(v, first, 0, [&](const float(&tile)[4], int at, int m) { rows[m].look(tile, at, t); });
    };
    const auto end_look = [&] {
#pragma unroll
        for (int m = 0; m < TILES; ++m) rows[m].end_look();
    };
    const auto add_terms = [&](Sums<L>& v, int first) {
        for_tiles<L>(v, first, next, [&](const float(&tile)[4], int at, int m) { rows[m].add_terms(tile, at, t); });
        next = first + chunk(L);
    };
    const auto end_sum = [&] {
#pragma unroll
        for (int m = 0; m < TILES; ++m) rows[m].end_sum();
    };
    const auto finish = [&](Sums<L>& v, int first) {
        for_tiles<L>(v, first, 0, [&](float(&tile)[4], int, int m) { rows[m].results(tile); });
        store_chunk<L>(v, context, first, lane_rows.plain);
    };
    if constexpr (passes(L) == 1) {
        run_layer<L>(in, lane_rows, context, [&](Sums<L>& v, int first) {
            look(v, first);
            end_look();
            add_terms(v, first);
            end_sum();
            finish(v, first);
        });
    } else {
        run_layer<L>(in, lane_rows, context, look);
        end_look();
        run_layer<L>(in, lane_rows, context, add_terms);
        end_sum();
        run_layer<L>(in, lane_rows, context, finish);
    }
}

template <int L>
__device__ __forceinline__ void run_layers(const Activations<L>& in, LaneRows& lane_rows, const Context& context) {
    if constexpr (L == depth - 1 && OVER_ROW) {
        if constexpr (column_tiles(L) > 0) run_softmax<L>(in, lane_rows, context);
    } else if constexpr (L == depth - 1) {
        if constexpr (column_tiles(L) > 0)
            run_layer<L>(in, lane_rows, context, [&](Sums<L>& v, int first) {
#pragma unroll
                for (int m = 0; m < TILES; ++m)
#pragma unroll
                    for (int c = 0; c < chunk(L); ++c) activate_all<L>(v[m][c]);
                store_chunk<L>(v, context, first, lane_rows.plain);
            });
    } else {
        Activations<L + 1> out(context.slabs);
        Largest largest[TILES] = {};
        if constexpr (column_tiles(L) > 0)
            run_layer<L>(in, lane_rows, context, [&](Sums<L>& v, int first) { keep<L>(out, largest, v, first, context.lane); });
        if constexpr (column_tiles(L) % 2 != 0)
#pragma unroll
            for (int m = 0; m < TILES; ++m) out.set(m, column_tiles(L), Fragment{});
        complete<L + 1>(out, largest, lane_rows);
        run_layers<L + 1>(out, lane_rows, context);
    }
}

// Rows that are not for tensor cores, one after the other. All lanes together.
__device__ __forceinline__ void compute_plain_rows(unsigned int plain, const X* x, const char* packed, const Context& context) {
    const Vector* const weights = reinterpret_cast<const Vector*>(packed + VECTORS_AT);
    if (__ballot_sync(WARP, plain != 0) == 0) return;
#pragma unroll 1
    for (int i = 0; i < 2 * TILES; ++i) {
        unsigned int groups = __ballot_sync(WARP, context.lane % 4 == 0 && (plain >> i & 1u));
#pragma unroll 1
        for (; groups != 0; groups &= groups - 1) {
            const long long row = context.first_row + 8 * i + __ffs(groups) / 4;
            if (row < context.rows.batch)
                plain_row(row_of_x(x, context.rows, row), row_of_y(context.y, context.rows, row), weights,
                          reinterpret_cast<Group*>(context.slabs));
        }
    }
}

extern "C" __global__ void __launch_bounds__(MLP_WARPS * LANES, 1)
mlp_mma(const X* __restrict__ x,   // (batch, K), read through rows
        S* __restrict__ y,         // (batch, N), written through rows
        const Weights weights,     // packed as tensor.cuh says
        const Rows rows) {         // the batch size and, unless contiguous, the strides of x and y
    const int warp = threadIdx.x / LANES;
    const char* const in_memory = reinterpret_cast<const char*>(weights);
#if MLP_STAGED
#pragma unroll 8
    for (int i = threadIdx.x; i < STAGED_BYTES / 16; i += MLP_WARPS * LANES) shared[i] = load_vector(weights + i);
    const char* const packed = reinterpret_cast<const char*>(shared);
#else
    const char* const packed = in_memory;
#endif
    const LaneWeights lane_weights = weights_of_lane(packed, threadIdx.x % LANES);
    char* const slabs = reinterpret_cast<char*>(shared) + SLABS_AT + warp * WARP_BYTES;
    const bool wide = x_is_wide(x);
    const bool paired = y_is_paired(y);
    const unsigned int all_plain = SPLIT && !weights_are_finite(in_memory) ? (1u << (2 * TILES)) - 1 : 0u;
    // Neighbouring tiles go to neighbouring blocks, so that few tiles keep many multiprocessors busy.
    const long long step = static_cast<long long>(gridDim.x) * MLP_WARPS;
    long long tile = blockIdx.x + static_cast<long long>(gridDim.x) * warp;
#if MLP_REGISTERS
    Input input;
    const auto load = [&](long long of, int lane) {
        if (wide) input.template load<true>(x, rows, of * ROWS, lane);
        else input.template load<false>(x, rows, of * ROWS, lane);
    };
    if (MLP_PREFETCH) load(tile, threadIdx.x % LANES);
#endif
    __syncthreads();
    for (; tile * ROWS < rows.batch; tile += step) {
        const int lane = opaque(threadIdx.x) % LANES;  // with what follows from it
        const Context context = {packed, lane_weights.again(), slabs, y, rows, tile * ROWS, paired, lane};
        LaneRows lane_rows = {{}, all_plain};
        Largest largest[TILES] = {};
        Activations<0> in(slabs);
#if MLP_REGISTERS
        if (!MLP_PREFETCH) load(tile, lane);
        input.put_to(in, largest);
        if (MLP_PREFETCH) load(tile + step, lane);
#else
        if (wide) load_rows<true>(in, largest, x, rows, context.first_row, lane);
        else load_rows<false>(in, largest, x, rows, context.first_row, lane);
#endif
        complete<0>(in, largest, lane_rows);
        run_layers<0>(in, lane_rows, context);
        if constexpr (SPLIT) compute_plain_rows(lane_rows.plain, x, in_memory, context);
    }
}
