/* The numbers contract as a plain C loop: what every ieee kernel must equal, bit for bit.
 *
 * For each output, fused multiply-adds over blocks of 16 consecutive k, ascending, each block from +0; the block sums
 * are added, ascending, to the bias, or to the first block's sum where there is none. An empty sum is +0.
 *
 * weights: (K, N) of each layer in C order, layer after layer; biases: (N) of the layers that have one.
 * activations: 0 identity, 1 relu. x: (rows, K) in C order; y: (rows, N). scratch: 2 * (the widest layer).
 */
#include <math.h>
#include <stddef.h>

#define FORWARD(NAME, T, FMA)                                                                                        \
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
                    out[j] = activations[layer] == 1 && sum < 0 ? 0 : sum;                                           \
                }                                                                                                    \
                w += (size_t)K * N;                                                                                  \
                if (has_bias[layer]) b += N;                                                                         \
                in = out;                                                                                            \
            }                                                                                                        \
        }                                                                                                            \
    }

FORWARD(forward_float32, float, fmaf)
FORWARD(forward_float64, double, fma)
