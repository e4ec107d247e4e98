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

// Where piece q of row k of a slab is, in pieces. The bits of q are swapped around by k, so that the lanes' stores of
// activations (neighbouring k and g), those of x (every fourth k) and the loads spread over the banks of shared memory.
__device__ __forceinline__ constexpr int swap_of(int k) {
    return (k / 4 & 3) ^ (PIECES == 1 ? k & 2 : (k & 3) << 1);
}
__device__ __forceinline__ int piece_at(int k, int q) { return k * (ROWS_PER_WARP / PIECE) + (q ^ swap_of(k)); }
__device__ __forceinline__ int element_at(int k, int row) { return piece_at(k, row / PIECE) * PIECE + row % PIECE; }

// The row, among a warp's, of element e of a lane's piece p.
__device__ __forceinline__ int row_of(int g, int p, int e) { return (p * 4 + g) * PIECE + e; }

// One block of the sum, from +0: the products of COUNT consecutive k, from first (a multiple of SUM_BLOCK) on, for each row
// of the lane and each of C columns. w: the weights of vector first / VT of the lane's first column; its next column is
// 8 Values further, the next VT of k a stride.
template <int COUNT, int C>
__device__ __forceinline__ void sum_block(T (&block)[MLP_ROWS][C], const Piece* slab, int first, int g, const Values* w,
                                          int stride) {
    static_assert(COUNT <= SUM_BLOCK && SUM_BLOCK == 16, "the swapping in piece_at repeats every 16 of k");
    const Piece* const rows = slab + first * (ROWS_PER_WARP / PIECE);
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
            for (int p = 0; p < PIECES; ++p)  // piece_at(k, 4 * p + g), with what depends on the lane apart
                h[p] = rows[k * (ROWS_PER_WARP / PIECE) + (p * 4 ^ (swap_of(k) & 4)) + (g ^ (swap_of(k) & 3))];
            // A multiply-add takes a cycle more if two of its operands lie in one of the registers' four banks. With rows
            // innermost neighbours share a weight, which is then read once; it lies in bank e and row r of h in bank r % 4,
            // as 16-byte loads put them, so the row that is first with a new weight is one of another bank. And the weights
            // are loaded last to first. (Of the canonical net's multiply-adds with 4 rows and 8 columns 28 % were late in the
            // plain order, 11 % are in this one, by the listing of ptxas 13.0.)
#pragma unroll
            for (int c = 0; c < C; ++c)
#pragma unroll
                for (int i = 0; i < MLP_ROWS; ++i) {
                    const int r = ((c % 2 ? MLP_ROWS - 1 - i : i) + e + 2) % MLP_ROWS;
                    const T before = k == 0 ? T(0) : block[r][c];
                    block[r][c] = fused_multiply_add(h[r / PIECE].v[r % PIECE], weights[c].v[e], before);
                }
        }
    }
}

// One block of the sum, added to sum.
template <int COUNT, int C>
__device__ __forceinline__ void add_block(T (&sum)[MLP_ROWS][C], const Piece* slab, int first, int g, const Values* w,
                                          int stride) {
    T block[MLP_ROWS][C];
    sum_block<COUNT, C>(block, slab, first, g, w, stride);
#pragma unroll
    for (int r = 0; r < MLP_ROWS; ++r)
#pragma unroll
        for (int c = 0; c < C; ++c) sum[r][c] = add(sum[r][c], block[r][c]);
}
