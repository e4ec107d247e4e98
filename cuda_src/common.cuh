// What every schedule shares: the network's constants, the four kernel arguments, the activations and the
// dot product in the one order of summation that gives every schedule the same bits.
//
// The network arrives as -D options, written by cupymlp/plan.py:
//   MLP_S            storage type of weights, biases, hidden activations and outputs: float, double, half_bits, bfloat16_bits
//   MLP_T            type of the arithmetic: double for double, else float
//   MLP_SIZES        K, hidden widths ..., N
//   MLP_ACTIVATIONS  one Act:: a layer         MLP_PARAMETERS  one number of type MLP_T a layer, 0 where there is none
//   MLP_BIASES       one 0 or 1 a layer
//   MLP_PACKED       1: one packed weight buffer; 0: the caller's own weight arrays, through strides
//   MLP_X_T          element type of x: a C type, or half_bits, bfloat16_bits
//   MLP_Y_T          element type of y: MLP_S, or MLP_T for sums that another kernel reads
//   MLP_X_ACCESS     Access:: of x            MLP_Y_ACCESS   Access:: of y
//   MLP_BATCH_DIMS   leading axes described by Rows; 0 when x and y are both contiguous
#pragma once

struct half_bits { unsigned short bits; };
struct bfloat16_bits { unsigned short bits; };

using S = MLP_S;
using T = MLP_T;

constexpr int V = 16 / sizeof(S);  // elements of storage in 16 bytes: 8 of a half type, 4 float or 2 double

struct alignas(16) Vector { S v[V]; };  // of weights
struct alignas(16) Group { T v[V]; };   // the activations that meet one Vector of weights

#ifdef __CUDACC__
#include "ptx.cuh"
#endif

// --- Arithmetic that keeps subnormal numbers --------------------------------------------------------------
// For float32 there is more in ptx.cuh: operators obey -ftz.

__device__ __forceinline__ float fused_multiply_add(float a, float b, float c) { return __fmaf_ieee_rn(a, b, c); }
__device__ __forceinline__ double fused_multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

// a + b. For float32 by an FMA, because __fadd_rn obeys -ftz and __fmaf_ieee_rn does not.
__device__ __forceinline__ float add(float a, float b) { return __fmaf_ieee_rn(a, 1.0f, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }

__device__ __forceinline__ double product(double a, double b) { return a * b; }
__device__ __forceinline__ double divide(double a, double b) { return a / b; }
__device__ __forceinline__ double reciprocal(double v) { return 1.0 / v; }
__device__ __forceinline__ double square_root(double v) { return sqrt(v); }

// Whether the sign is set: of NaN, too, and of -0 for float32, whose comparison with 0 obeys -ftz.
__device__ __forceinline__ bool is_negative(float v) { return __float_as_uint(v) >> 31 != 0; }
__device__ __forceinline__ bool is_negative(double v) { return v < 0.0; }

// v, or +0 if v <= 0: NaN stays. For float32 in ptx.cuh.
__device__ __forceinline__ double relu(double v) { return v <= 0.0 ? 0.0 : v; }

#include "activations.cuh"

// How an array is read or written: rows that follow each other without gaps; any strides; any strides at
// addresses that are no multiple of the element size (a field of a packed record, a byte buffer's view).
enum class Access { contiguous, strided, unaligned };

constexpr int sizes[] = {MLP_SIZES};
constexpr int depth = sizeof(sizes) / sizeof(sizes[0]) - 1;
constexpr Act activations[] = {MLP_ACTIVATIONS};
constexpr T parameters[] = {MLP_PARAMETERS};
constexpr bool biases[] = {MLP_BIASES};
constexpr int FEATURES_IN = sizes[0];
constexpr int FEATURES_OUT = sizes[depth];
static_assert(depth >= 1, "a network has at least one layer");
static_assert(sizeof(activations) / sizeof(activations[0]) == depth, "one activation a layer");
static_assert(sizeof(parameters) / sizeof(parameters[0]) == depth, "one parameter a layer");
static_assert(sizeof(biases) / sizeof(biases[0]) == depth, "one bias flag a layer");

__device__ constexpr long long vectors(long long elements) { return (elements + V - 1) / V; }

// --- Packed weights -------------------------------------------------------------------------------------
// cupymlp/_pack.py writes, layer after layer, each part rounded up to whole vectors:
//   the weights as [vectors(K)][N][V]: vector (k / V, j) holds W[k .. k + V - 1][j], so that neighbouring
//   threads, which compute neighbouring j, read neighbouring vectors;
//   the bias as [N], if the layer has one.
// Elements past K or N are zero in memory and are never used in arithmetic.

__device__ constexpr long long weight_vectors(int layer) { return vectors(sizes[layer]) * sizes[layer + 1]; }
__device__ constexpr long long layer_vectors(int layer) {
    return weight_vectors(layer) + (biases[layer] ? vectors(sizes[layer + 1]) : 0);
}
__device__ constexpr long long first_vector(int layer) {
    long long sum = 0;
    for (int l = 0; l < layer; ++l) sum += layer_vectors(l);
    return sum;
}

// --- Kernel arguments: (const X* x, Y* y, Weights weights, Rows rows) -----------------------------------

using X = MLP_X_T;
using Y = MLP_Y_T;

#if MLP_PACKED
using Weights = const Vector*;
#else
struct Weights {               // one entry a layer; strides in elements
    const S* weight[depth];    // W[k][j] at weight + k * k_stride + j * j_stride
    const S* bias[depth];      // b[j] at bias + j * bias_stride; unused where the layer has none
    long long k_stride[depth];
    long long j_stride[depth];
    long long bias_stride[depth];
};
#endif

#if MLP_BATCH_DIMS == 0
struct Rows { long long batch; };
#else
struct Rows {                            // strides in bytes
    long long batch;                     // the product of shape
    long long x_feature, y_feature;      // from one feature to the next
    long long shape[MLP_BATCH_DIMS];     // leading axes, slowest first
    long long x_stride[MLP_BATCH_DIMS];
    long long y_stride[MLP_BATCH_DIMS];
};

__device__ __forceinline__ long long row_offset(const Rows& rows, const long long* stride, long long row) {
    long long offset = 0;
#pragma unroll
    for (int d = MLP_BATCH_DIMS - 1; d >= 0; --d) {
        offset += (row % rows.shape[d]) * stride[d];
        row /= rows.shape[d];
    }
    return offset;
}
#endif

// --- Conversions: x and storage to T, exact or in NumPy's rounding; T to storage, to nearest even -----------

template <class From>
__device__ __forceinline__ T convert(From v) {
    return static_cast<T>(v);
}
__device__ __forceinline__ T convert(float v) {
    if constexpr (sizeof(T) == sizeof(double)) return widen(v);
    else return v;
}
__device__ __forceinline__ T convert(half_bits v) { return convert(half_to_float(v.bits)); }
__device__ __forceinline__ T convert(bfloat16_bits v) {
    return convert(__uint_as_float(static_cast<unsigned int>(v.bits) << 16));
}

__device__ __forceinline__ T narrow_to(T, T v) { return v; }
__device__ __forceinline__ half_bits narrow_to(half_bits, float v) { return {float_to_half(v)}; }
// On the bits, so that it needs no instruction of a recent GPU: round to nearest even; a NaN stays one.
__device__ __forceinline__ bfloat16_bits narrow_to(bfloat16_bits, float v) {
    const unsigned int bits = __float_as_uint(v);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const unsigned int rounded = nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
    return {static_cast<unsigned short>(rounded >> 16)};
}
__device__ __forceinline__ S narrow(T v) { return narrow_to(S{}, v); }

template <Access ACCESS, class Element>
__device__ __forceinline__ Element load(const char* address) {
    if constexpr (ACCESS == Access::unaligned) {
        Element v;
        memcpy(&v, address, sizeof(Element));
        return v;
    } else {
        return *reinterpret_cast<const Element*>(address);
    }
}

template <Access ACCESS>
__device__ __forceinline__ void store(char* address, Y v) {
    if constexpr (ACCESS == Access::unaligned) memcpy(address, &v, sizeof(Y));
    else *reinterpret_cast<Y*>(address) = v;
}

// One row of x or y. Element k of it is row_of_x(...)[k], however the array is laid out.
struct RowOfX {
    const char* start;
    long long step;
    __device__ __forceinline__ X raw(int k) const { return load<MLP_X_ACCESS, X>(start + k * step); }
    __device__ __forceinline__ T operator[](int k) const { return convert(raw(k)); }
};

__device__ __forceinline__ RowOfX row_of_x(const X* x, const Rows& rows, long long row) {
    const char* base = reinterpret_cast<const char*>(x);
#if MLP_BATCH_DIMS > 0
    if constexpr (MLP_X_ACCESS != Access::contiguous) return {base + row_offset(rows, rows.x_stride, row), rows.x_feature};
#endif
    return {base + row * static_cast<long long>(FEATURES_IN * sizeof(X)), static_cast<long long>(sizeof(X))};
}

struct RowOfY {
    char* start;
    long long step;
    __device__ __forceinline__ void set(int j, T v) const { store<MLP_Y_ACCESS>(start + j * step, narrow_to(Y{}, v)); }
};

__device__ __forceinline__ RowOfY row_of_y(Y* y, const Rows& rows, long long row) {
    char* base = reinterpret_cast<char*>(y);
#if MLP_BATCH_DIMS > 0
    if constexpr (MLP_Y_ACCESS != Access::contiguous) return {base + row_offset(rows, rows.y_stride, row), rows.y_feature};
#endif
    return {base + row * static_cast<long long>(FEATURES_OUT * sizeof(Y)), static_cast<long long>(sizeof(Y))};
}

// The activation of layer L; for those of a row, v.
template <int L>
__device__ __forceinline__ T activate(T v) {
    constexpr T PARAMETER = parameters[L];
    return activation<activations[L]>(v, PARAMETER);
}

// What the next layer reads: the activation as storage holds it, one rounding a layer.
__device__ __forceinline__ T stored(T v) { return convert(narrow(v)); }

// --- A layer's weights ------------------------------------------------------------------------------------

template <int L>
struct Layer {
    static constexpr int K = sizes[L];
    static constexpr int N = sizes[L + 1];
    static constexpr long long WEIGHTS_AT = first_vector(L);
    static constexpr long long BIAS_AT = WEIGHTS_AT + weight_vectors(L);

    // Vector i of the weights of output j: W[V * i .. V * i + V - 1][j], zero past K.
    static __device__ __forceinline__ Vector weights_of(const Weights& weights, int i, int j) {
#if MLP_PACKED
        return load_vector(weights + WEIGHTS_AT + static_cast<long long>(i) * N + j);
#else
        const S* column = weights.weight[L] + j * weights.j_stride[L];
        Vector r;
#pragma unroll
        for (int e = 0; e < V; ++e) {
            const int k = i * V + e;
            r.v[e] = k < K ? column[k * weights.k_stride[L]] : S{};
        }
        return r;
#endif
    }

    // The bias of output j; -0 where the layer has none.
    static __device__ __forceinline__ T bias_of(const Weights& weights, int j) {
        if constexpr (!biases[L]) return -T(0);
#if MLP_PACKED
        else return convert(reinterpret_cast<const S*>(weights + BIAS_AT)[j]);
#else
        else return convert(weights.bias[L][j * weights.bias_stride[L]]);
#endif
    }
};

// --- The order of summation -------------------------------------------------------------------------------
// sum over k of h[k] * w[k]: fused multiply-adds over blocks of 16 consecutive k, ascending, each block from
// +0; then the block sums, ascending, added to the bias. A layer without a bias starts from -0, the exact
// identity of addition: its sum is the first block's.

constexpr int SUM_BLOCK = 16;

// A COUNT of products starting at k = V * first (a multiple of SUM_BLOCK), added to sum. h(i) and w(i) give
// vector i of the activations and of the weights. All weights are asked for before the first is used.
template <int COUNT, class H, class W>
__device__ __forceinline__ T add_products(T sum, int first, H h, W w) {
    constexpr int CHAINS = (COUNT + SUM_BLOCK - 1) / SUM_BLOCK;  // blocks summed side by side: FMAs take their time
    T block[CHAINS];
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) block[c] = T(0);
    constexpr int VECTORS = (COUNT + V - 1) / V;
    Vector weights[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) weights[i] = w(first + i);
#pragma unroll
    for (int i = 0; i < SUM_BLOCK; i += V) {
#pragma unroll
        for (int c = 0; c < CHAINS; ++c) {
            const int k = c * SUM_BLOCK + i;
            if (k < COUNT) {
                const Group hv = h(first + k / V);
#pragma unroll
                for (int e = 0; e < V; ++e)
                    if (k + e < COUNT) block[c] = fused_multiply_add(hv.v[e], convert(weights[k / V].v[e]), block[c]);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) sum = add(sum, block[c]);
    return sum;
}

// All K products of one output, added to its bias (or to -0), GROUP of them at a time: a multiple of SUM_BLOCK. A
// larger GROUP has more weights on their way and takes more registers; the bits are the same.
template <int K, int GROUP, class H, class W>
__device__ __forceinline__ T dot(T bias, H h, W w) {
    static_assert(GROUP % SUM_BLOCK == 0, "groups are made of whole blocks");
    T sum = bias;
    if constexpr (K > GROUP) {
#pragma unroll 1
        for (int first = 0; first < K / GROUP * (GROUP / V); first += GROUP / V)
            sum = add_products<GROUP>(sum, first, h, w);
        if constexpr (K % GROUP != 0)
            sum = add_products<K % GROUP>(sum, K / GROUP * (GROUP / V), h, w);
    } else if constexpr (K > 0) {
        sum = add_products<K>(sum, 0, h, w);
    }
    return sum;
}
