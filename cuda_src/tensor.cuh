// What the tensor-core schedules share, mma and wgmma: the packed layout "tensor", which k a lane's registers stand for, and
// the arithmetic around the products, so that both give results within the same bound.
//
// Option: MLP_MATH  tf32, split3 (float32 networks), float16 or bfloat16 (networks of that dtype)
//
// A warp computes 16 rows at a time. Lane l has g = l / 4 and t = l % 4, and holds, of 16 rows x 8 k, four numbers:
//   v[0], v[1]: row g, two k;  v[2], v[3]: row g + 8, the same two k.
// They are a lane's sums of 16 rows x 8 columns as mma and wgmma leave them. As activations they become a Fragment: what the
// next layer multiplies, without a word from another lane. Fragments j = 2u and 2u + 1 make the 16 x 16 tile u. Their k:
//   layer 0:          features 16u + 4t + 2 (j % 2) + 0, 1: so a lane reads four neighbouring features of x
//   the other layers: columns 8j + 2t + 0, 1 of the layer before
//
// --- The packed layout --------------------------------------------------------------------------------------------------
// cupymlp/_pack.py writes, all parts at multiples of 16 bytes:
//   int exponent[depth]: split3: that of the power of two by which a layer's weights were divided; else 0
//   int finite: 1 if no weight and no bias is infinite or NaN
//   then, layer after layer:
//     the weights, PARTS times (split3: high, then low), as [k-steps][columns / 8][2 halves][8 columns][16 bytes];
//       a k-step has STEP_K k. 16 bytes hold neighbouring slots of a column: half h slots 8h .. 8h + 7 (2-byte numbers) or
//       4h .. 4h + 3 (tf32: float32 rounded to 11 bits)
//     the bias, if there is one, as float32
//   split3: then the float32 weights and biases, as common.cuh has them packed.
// K is rounded up to a multiple of 16 and N of 8; everything past them is 0.
//
// Slots: which k a slot of k-step s stands for follows from the fragments above and from the manual's A fragments:
//   layer 0,          2 bytes: slots 2t, 2t + 1, 2t + 8, 2t + 9: k = 16s + 4t + 0, 1, 2, 3
//                     4 bytes: slots t, t + 4: k = 16 (s / 2) + 4t + 2 (s % 2) + 0, 1
//   the other layers, 2 bytes: slot i: k = 16s + i;   4 bytes: slots t, t + 4: k = 8s + 2t + 0, 1
#pragma once
#include "softmax.cuh"

#if !MLP_PACKED
#error "tensor-core kernels read packed weights"
#endif

enum class Math { tf32, split3, float16, bfloat16 };
constexpr Math MATH = Math::MLP_MATH;
constexpr bool SPLIT = MATH == Math::split3;
static_assert(sizeof(S) == (MATH == Math::tf32 || SPLIT ? 4 : 2) && sizeof(T) == 4, "the network's dtype fits MLP_MATH");

constexpr int PARTS = SPLIT ? 2 : 1;
constexpr int ELEMENT_BYTES = MATH == Math::tf32 ? 4 : 2;
constexpr int STEP_K = 32 / ELEMENT_BYTES;
constexpr int TILE_BYTES = 256;  // one k-step of 8 columns

__device__ constexpr int k_tiles(int layer) { return (sizes[layer] + 15) / 16; }           // of 16 k
__device__ constexpr int k_steps(int layer) { return k_tiles(layer) * (16 / STEP_K); }
__device__ constexpr int column_tiles(int layer) { return (sizes[layer + 1] + 7) / 8; }    // of 8 columns
__device__ constexpr long long part_bytes(int layer) {
    return static_cast<long long>(k_steps(layer)) * column_tiles(layer) * TILE_BYTES;
}
__device__ constexpr long long layer_bytes(int layer) {
    return PARTS * part_bytes(layer) + (biases[layer] ? column_tiles(layer) * 32 : 0);
}
__device__ constexpr long long weights_at(int layer) {
    long long sum = (4 * (depth + 1) + 15) / 16 * 16;
    for (int l = 0; l < layer; ++l) sum += layer_bytes(l);
    return sum;
}
__device__ constexpr long long bias_at(int layer) { return weights_at(layer) + PARTS * part_bytes(layer); }
constexpr long long STAGED_BYTES = weights_at(depth);  // all that tensor cores need
constexpr long long VECTORS_AT = STAGED_BYTES;         // split3: the float32 weights

__device__ __forceinline__ int exponent_of_weights(const char* packed, int layer) {
    return reinterpret_cast<const int*>(packed)[layer];
}
__device__ __forceinline__ bool weights_are_finite(const char* packed) {
    return reinterpret_cast<const int*>(packed)[depth] != 0;
}

// The biases of columns 8 * tile + 2t + 0, 1; zeros where the layer has none.
struct Pair { float v[2]; };
template <int L>
__device__ __forceinline__ Pair biases_of(const char* packed, int tile, int t) {
    Pair pair = {};
    if constexpr (biases[L]) load_pair(pair.v, reinterpret_cast<const float*>(packed + bias_at(L)) + tile * 8 + t * 2);
    return pair;
}

// --- Fragments ----------------------------------------------------------------------------------------------------------
// Register e of an A fragment of the manual (four registers): 2-byte numbers, k of 16: fragments 2u and 2u + 1 give
// {r[0], r[1]} each; tf32, k of 8: one fragment gives all four. split3: r[0], r[1] are high parts, r[2], r[3] low ones.

constexpr int FRAGMENT_REGISTERS = ELEMENT_BYTES * PARTS;
struct alignas(4 * FRAGMENT_REGISTERS) Fragment { unsigned int r[FRAGMENT_REGISTERS]; };

// The activations that tensor cores see, of tf32, float16 and bfloat16 networks: one rounding of v, or of relu(v).
template <bool RELU = false>
__device__ __forceinline__ Fragment fragment_of(const float (&v)[4]) {
    Fragment f;
    if constexpr (MATH == Math::tf32) {
        constexpr auto round = RELU ? relu_round_to_tf32 : round_to_tf32;
#pragma unroll
        for (int e = 0; e < 4; ++e) f.r[e % 2 * 2 + e / 2] = round(v[e]);
    } else {
        constexpr auto round = MATH == Math::float16 ? (RELU ? relu_half_pair : half_pair) : (RELU ? relu_bfloat16_pair : bfloat16_pair);
#pragma unroll
        for (int r = 0; r < 2; ++r) f.r[r] = round(v[2 * r], v[2 * r + 1]);
    }
    return f;
}

// --- split3 -------------------------------------------------------------------------------------------------------------
// A row h of a layer's input, true float32 numbers, is divided by 2^e so that its largest is in [2^14, 2^15), the top of
// float16's range, and the weight matrix so that its largest is in [1, 2); each number v becomes high = float16(v) and
// low = float16(v - high). Per layer one accumulator gets, from 0,
//   for each k-step, ascending: low * high, then high * low   (activations * weights)
//   then for each k-step, ascending: high * high
// since accumulators truncate: small products first. Undone by scaled_back. A row with an infinity or a NaN in the input of
// any layer, and every row if some weight or bias is not finite, is computed by plain_row instead; so whether it is depends
// on the row alone.

// The largest |v| of each of the lane's two rows, even and odd columns apart: short chains; NaN if there is one.
struct Largest { float row[2][2]; };

__device__ __forceinline__ void include(Largest& largest, const float (&v)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) largest.row[e / 2][e % 2] = largest_magnitude(largest.row[e / 2][e % 2], v[e]);
}

// Of the whole row, from its four lanes, as bits, which compare as the numbers do; those of a NaN are the largest.
__device__ __forceinline__ unsigned int largest_of_row(const float (&largest)[2]) {
    unsigned int bits = max(__float_as_uint(largest[0]), __float_as_uint(largest[1]));
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
    return max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
}

__device__ __forceinline__ bool is_finite(unsigned int largest) { return largest < 0x7f800000u; }

// The e of a row; at least -126, so that 2^-e is a float32 number.
constexpr int TOP = 14;
__device__ __forceinline__ int exponent_of(unsigned int largest) {
    return max(static_cast<int>(largest >> 23) - 127 - TOP, -126);
}
__device__ __forceinline__ float power_of_two(int exponent) {  // -126 .. 127
    return __uint_as_float(static_cast<unsigned int>(exponent + 127) << 23);
}

// down: 2^-e of row g and of row g + 8.
__device__ __forceinline__ Fragment split(const float (&v)[4], const float (&down)[2]) {
    Fragment f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float a = product(v[2 * r], down[r]), b = product(v[2 * r + 1], down[r]);
        const unsigned int high = half_pair(a, b);
        const float high_a = half_to_float(static_cast<unsigned short>(high & 0xffffu));
        const float high_b = half_to_float(static_cast<unsigned short>(high >> 16));
        f.r[r] = high;
        f.r[FRAGMENT_REGISTERS - 2 + r] = half_pair(fused_multiply_add(high_a, -1.0f, a), fused_multiply_add(high_b, -1.0f, b));
    }
    return f;
}

// How a row's sums are multiplied by 2^(e of the row + e of the weights): in two halves, so that neither the powers nor what
// is between them leaves float32's range unless the result does.
struct Scale { float first, second; };
__device__ __forceinline__ Scale scale_of(int exponent) {
    exponent = min(max(exponent, -252), 254);  // beyond, a result is 0 or infinite either way
    const int half = exponent >> 1;
    return {power_of_two(half), power_of_two(exponent - half)};
}

// Whether a hidden layer's sums need not be scaled back, because what follows them commutes with positive factors: then the
// exponent of its rows is carried on.
template <int L>
constexpr bool STAYS_SCALED = SPLIT && L < depth - 1 && !biases[L] &&
                              (activations[L] == Act::relu || activations[L] == Act::identity);

// And whether its rows are then divided by a fixed power of two, which brings even the largest sum that can be under 2^15, and
// not by that of their largest number, which takes time to find. Two layers in a row at most: each of them leaves most rows
// 2^5 .. 2^8 below that.
__device__ constexpr int log2_up(int n) {
    int log = 0;
    while (1 << log < n) ++log;
    return log;
}
template <int L>
constexpr bool FIXED_SCALE = STAYS_SCALED<L> && L % 3 != 2 && sizes[L] <= 128;
template <int L>
constexpr int FIXED_EXPONENT = 1 + log2_up(sizes[L]) + (activations[L] == Act::relu);  // relu_doubled

// --- A layer's result ---------------------------------------------------------------------------------------------------

// From an accumulator: scaled back (split3), the bias added.
template <int L>
__device__ __forceinline__ float linear(float sum, const Scale& scale, float bias) {
    if constexpr (SPLIT) {
        sum = product(sum, scale.first);
        if constexpr (biases[L]) return fused_multiply_add(sum, scale.second, bias);
        else return product(sum, scale.second);
    } else if constexpr (biases[L]) {
        return add(sum, bias);
    } else {
        return sum;
    }
}

// Of four numbers.
template <int L>
__device__ __forceinline__ void activate_all(float (&v)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = activate<L>(v[e]);
    if constexpr (is_long(activations[L])) __syncwarp();
}

// A hidden layer's padded columns are 0, whatever a sum of infinities made of them. tile: of 8 columns.
template <int L>
__device__ __forceinline__ void clear_padding(float (&v)[4], int tile, int t) {
    constexpr int N = sizes[L + 1];
    if constexpr (N % 8 != 0) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (tile * 8 + 2 * t + e % 2 >= N) v[e] = 0.0f;
    }
}

// Linear results of a hidden layer to what the next one multiplies; not for split3, which looks at whole rows first.
template <int L>
__device__ __forceinline__ Fragment hidden_fragment(float (&v)[4], int tile, int t) {
    if constexpr (activations[L] == Act::relu) {
        clear_padding<L>(v, tile, t);
        return fragment_of<true>(v);
    } else {
        activate_all<L>(v);
        clear_padding<L>(v, tile, t);
        return fragment_of(v);
    }
}

// --- softmax ------------------------------------------------------------------------------------------------------------
// Of a lane's rows g and g + 8 of a 16-row tile, whose columns the four lanes of a row have among them. The order of the sum:
// each lane's even columns and its odd ones, ascending, from +0; these two; then lanes 1 and 2 apart.

struct SoftmaxOfRows {
    float largest[2];
    float sum[2][2];
    RowScale scale[2];

    // v: four linear results, columns 8 * tile + 2t + 0, 1 of row g, then of row g + 8.
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = __uint_as_float(0xff800000u);  // -infinity
            sum[r][0] = sum[r][1] = 0.0f;
        }
    }
    __device__ __forceinline__ void look(const float (&v)[4], int tile, int t) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (exists(tile, t, e)) largest[e / 2] = larger(largest[e / 2], v[e]);
    }
    __device__ __forceinline__ void end_look() {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int mask = 1; mask < 4; mask *= 2) largest[r] = larger(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], mask));
    }
    __device__ __forceinline__ void add_terms(const float (&v)[4], int tile, int t) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (exists(tile, t, e)) sum[e / 2][e % 2] = add(sum[e / 2][e % 2], softmax_term(v[e], largest[e / 2]));
    }
    __device__ __forceinline__ void end_sum() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float all = add(sum[r][0], sum[r][1]);
#pragma unroll
            for (int mask = 1; mask < 4; mask *= 2) all = add(all, __shfl_xor_sync(0xffffffffu, all, mask));
            scale[r] = row_scale(largest[r], all);
        }
    }
    __device__ __forceinline__ void results(float (&v)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = scale[e / 2].result(v[e]);
    }

    // Past the last column there is nothing to look at.
    static __device__ __forceinline__ bool exists(int tile, int t, int e) {
        return FEATURES_OUT % 8 == 0 || tile * 8 + 2 * t + e % 2 < FEATURES_OUT;
    }
};

// --- x and y ------------------------------------------------------------------------------------------------------------

// Four neighbouring features of a row of x, as they are in memory; 0 past the last one.
struct alignas(4 * sizeof(X)) Quad { X v[4]; };

template <bool WIDE>
__device__ __forceinline__ Quad load_quad(const RowOfX& x, int k) {
    Quad q{};
    if constexpr (WIDE) {  // contiguous, whole and aligned
        if (k < FEATURES_IN) q = *reinterpret_cast<const Quad*>(x.start + k * static_cast<int>(sizeof(X)));
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (k + e < FEATURES_IN) q.v[e] = load<MLP_X_ACCESS, X>(x.start + (k + e) * x.step);
    }
    return q;
}

// Whether WIDE is allowed.
__device__ __forceinline__ bool x_is_wide(const X* x) {
    return MLP_BATCH_DIMS == 0 && FEATURES_IN % 4 == 0 && reinterpret_cast<unsigned long long>(x) % sizeof(Quad) == 0;
}

// Results of one row in columns j and j + 1. PAIRED: as one store; contiguous and aligned.
struct alignas(2 * sizeof(S)) PairOfY { S v[2]; };

template <bool PAIRED>
__device__ __forceinline__ void store_pair(const RowOfY& y, int j, float first, float second) {
    if constexpr (PAIRED) {
        PairOfY p;
        if constexpr (MATH == Math::float16 || MATH == Math::bfloat16) {
            const unsigned int bits = MATH == Math::float16 ? half_pair(first, second) : bfloat16_pair(first, second);
            memcpy(&p, &bits, sizeof(p));
        } else {
            p.v[0] = narrow(first);
            p.v[1] = narrow(second);
        }
        if (j < FEATURES_OUT) *reinterpret_cast<PairOfY*>(y.start + j * static_cast<int>(sizeof(S))) = p;
    } else {
        if (j < FEATURES_OUT) y.set(j, first);
        if (j + 1 < FEATURES_OUT) y.set(j + 1, second);
    }
}

// Whether PAIRED is allowed.
__device__ __forceinline__ bool y_is_paired(const S* y) {
    return MLP_BATCH_DIMS == 0 && FEATURES_OUT % 2 == 0 && reinterpret_cast<unsigned long long>(y) % sizeof(PairOfY) == 0;
}
