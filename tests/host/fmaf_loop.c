/* The numbers contract as a plain C loop: what every ieee kernel must equal, bit for bit.
 *
 * For each output, fused multiply-adds over blocks of 16 consecutive k, ascending, each block from +0; the block sums
 * are added, ascending, to the bias, or to the first block's sum where there is none. An empty sum is +0.
 *
 * float16 and bfloat16 networks: the same in float, and each layer's outputs are rounded, after the activation. Their arrays
 * come and go as float.
 *
 * weights: (K, N) of each layer in C order, layer after layer; biases: (N) of the layers that have one.
 * activations: 0 identity, 1 relu. x: (rows, K) in C order; y: (rows, N). scratch: 2 * (the widest layer).
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static float round_to_float16(float v) { return (float)(_Float16)v; }

/* To nearest, ties to even, on the bits: an overflow carries into the exponent of infinity. */
static float round_to_bfloat16(float v) {
    uint32_t bits;
    if (isnan(v)) return v;
    memcpy(&bits, &v, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    memcpy(&v, &bits, sizeof bits);
    return v;
}

#define FORWARD(NAME, T, FMA, ROUND)                                                                                 \
    void NAME(int depth, const int* sizes, const int* activations, const int* has_bias, const T* weights,            \
              const T* biases, const T* x, T* y, long long rows, T* scratch, int widest) {                           \
        for (long long row = 0; row < rows; ++row) {                                                                 \
            const T* w = weights;                                                                                    \
            const T* b = biases;                                                                                     \
            const T* in = x + row * sizes[0];                                                                        \
            for (int layer = 0; layer < depth; ++layer) {                                                            \
                const int K = sizes[layer], N = sizes[layer + 1];                                                    \
                T* out = layer == depth - 1 ? y + row * N : scratch + (layer % 2) * widest;                          \
                for (int j = 0; j < N; ++j) {                                                                        \
                    T sum = has_bias[layer] ? b[j] : 0;                                                              \
                    for (int start = 0; start < K; start += 16) {                                                    \
                        T block = 0;                                                                                 \
                        for (int k = start; k < K && k < start + 16; ++k)                                            \
                            block = FMA(in[k], w[(size_t)k * N + j], block);                                         \
                        sum = start == 0 && !has_bias[layer] ? block : sum + block;                                  \
                    }                                                                                                \
                    out[j] = ROUND(activations[layer] == 1 && sum <= 0 ? 0 : sum);                                    \
                }                                                                                                    \
                w += (size_t)K * N;                                                                                  \
                if (has_bias[layer]) b += N;                                                                         \
                in = out;                                                                                            \
            }                                                                                                        \
        }                                                                                                            \
    }

FORWARD(forward_float32, float, fmaf, )
FORWARD(forward_float64, double, fma, )
FORWARD(forward_float16, float, fmaf, round_to_float16)
FORWARD(forward_bfloat16, float, fmaf, round_to_bfloat16)
