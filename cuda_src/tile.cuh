// The inner product of a warp, many rows at a time, in the one order of summation: what mlp_tile and mlp_layer share.
//
// A warp computes ROWS_PER_WARP rows. Its lanes are 4 row groups by 8 column groups: a lane computes the MLP_ROWS rows of
// its row group g for columns c, c + 8, c + 16, ..., C of them at a time. Per k a lane reads MLP_ROWS activations and,
// once every VT of k, C vectors of weights from shared memory, for MLP_ROWS * C multiply-adds.
//
// Activations lie in shared memory as a slab [k][row], so that a lane's rows are one or two vectors; weights as
// [k / VT][column][VT]. k runs to a multiple of VT: past K the weights are 0 and the activations -0, whose product -0 is the
// exact identity of addition.
//
// Options: MLP_ROWS  rows a lane: 8, 4 or 2
#pragma once
#include "common.cuh"

constexpr int VT = 16 / sizeof(T);      // elements of arithmetic in 16 bytes: 4 float or 2 double
struct alignas(16) Values { T v[VT]; };

__device__ constexpr long long values(long long elements) { return (elements + VT - 1) / VT; }

constexpr int LANES = 32;
constexpr int COLUMN_GROUPS = 8;
constexpr int ROWS_PER_WARP = 4 * MLP_ROWS;
constexpr int PIECE = MLP_ROWS < VT ? MLP_ROWS : VT;  // rows that a lane reads at once
constexpr int PIECES = MLP_ROWS / PIECE;              // of row group g: pieces g, g + 4
static_assert(MLP_ROWS % PIECE == 0 && PIECES <= 2, "a lane's rows are one or two pieces");

struct alignas(PIECE * sizeof(T)) Piece { T v[PIECE]; };

// The groups of a lane. Of two lanes that differ in bit 0 both read the same activations, of two that differ in bit 1 the
// same weights: so a half-warp's 16-byte loads take one pass through shared memory, not two.
__device__ __forceinline__ int row_group(int lane) { return (lane >> 1 & 1) | (lane >> 2 & 2); }
__device__ __forceinline__ int column_group(int lane) { return (lane & 1) | (lane >> 1 & 2) | (lane >> 2 & 4); }
constexpr int COLUMN_LANES[] = {0, 2, 4};  // the bits of a lane that bits 0, 1 and 2 of its column group are

// Where row k of a slab begins, in pieces. Gaps spread over the banks of shared memory what lanes store at once: pieces of
// four neighbouring k, and numbers of x of every fourth k. What depends on k is a constant wherever k is one.
constexpr int ROW_PIECES = 4 * PIECES;
constexpr bool WHOLE_VECTORS = sizeof(Piece) == 16;
constexpr int FOUR_ROWS = 4 * ROW_PIECES + (WHOLE_VECTORS ? 2 : 4);
__device__ __forceinline__ constexpr int row_at(int k) {
    return k / 4 * FOUR_ROWS + k % 4 * ROW_PIECES + (WHOLE_VECTORS ? k & 2 : 0);
}
__device__ constexpr int slab_of(int rows) { return (rows + 3) / 4 * FOUR_ROWS; }  // pieces
__device__ __forceinline__ constexpr int element_at(int k, int row) { return row_at(k) * PIECE + row; }

// The row, among a warp's, of element e of a lane's piece p.
__device__ __forceinline__ int row_of(int g, int p, int e) { return (p * 4 + g) * PIECE + e; }

// One block of the sum, from +0: the products of COUNT consecutive k for each row of the lane and each of C columns. rows: the
// lane's first piece of the first k. w: the lane's first column of the first VT of k; its next column is 8 Values further,
// the next VT of k a stride.
template <int COUNT, int C>
__device__ __forceinline__ void sum_block(T (&block)[MLP_ROWS][C], const Piece* rows, const Values* w, int stride) {
    static_assert(COUNT <= SUM_BLOCK && SUM_BLOCK % 4 == 0, "row_at has a block's rows where it has those of the first one");
    constexpr int VECTORS = (COUNT + VT - 1) / VT;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        Values weights[C];
#pragma unroll
        for (int c = C - 1; c >= 0; --c) weights[c] = w[c * COLUMN_GROUPS + i * stride];
#pragma unroll
        for (int e = 0; e < VT; ++e) {
            const int k = i * VT + e;
            Piece h[PIECES];
#pragma unroll
            for (int p = 0; p < PIECES; ++p) h[p] = rows[row_at(k) + 4 * p];
            // Their order is free. Registers have few ports, and which operands are read together is up to ptxas, which takes
            // this order as a hint: with 8 rows, where a weight then serves 8 neighbours, columns one after the other are
            // faster (canonical net, 2^20 rows: 341 us against 359), with 4 rows rows are (334 against 337).
#pragma unroll
            for (int n = 0; n < MLP_ROWS * C; ++n) {
                const int c = MLP_ROWS == 8 ? n / MLP_ROWS : n % C;
                const int r = MLP_ROWS == 8 ? ((c % 2 ? MLP_ROWS - 1 - n % MLP_ROWS : n % MLP_ROWS) + e + 2) % MLP_ROWS : n / C;
                const T before = k == 0 ? T(0) : block[r][c];
                block[r][c] = fused_multiply_add(h[r / PIECE].v[r % PIECE], weights[c].v[e], before);
            }
        }
    }
}

// One block of the sum, added to sum.
template <int COUNT, int C>
__device__ __forceinline__ void add_block(T (&sum)[MLP_ROWS][C], const Piece* rows, const Values* w, int stride) {
    T block[MLP_ROWS][C];
    sum_block<COUNT, C>(block, rows, w, stride);
#pragma unroll
    for (int r = 0; r < MLP_ROWS; ++r)
#pragma unroll
        for (int c = 0; c < C; ++c) sum[r][c] = add(sum[r][c], block[r][c]);
}
