// The CUDA names that the kernels use, with a meaning for a host C++ compiler, so that the unmodified .cu files
// compile and run block by block: one real thread a CUDA thread, a std::barrier for __syncthreads() and one a warp for
// __syncwarp(). A warp's threads run apart, so that ThreadSanitizer sees what lanes exchange without a barrier.
// Force-included (-include) before a .cu file; run_kernel.cpp has the main function.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

struct Index { unsigned int x, y, z; };
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

struct Warp {
    explicit Warp(int lanes) : barrier(lanes) {}
    std::barrier<> barrier;
    unsigned long long exchanged[32];
};
inline thread_local Warp* warp_of_thread = nullptr;
inline std::barrier<>* block_barrier = nullptr;
inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __syncwarp(unsigned int = 0xffffffffu) { warp_of_thread->barrier.arrive_and_wait(); }

// Lane l's result is what lane `from` gave. All lanes of the warp take part.
template <class Value>
Value exchange(Value v, unsigned int from) {
    static_assert(sizeof(Value) <= sizeof(unsigned long long));
    std::memcpy(&warp_of_thread->exchanged[threadIdx.x % 32], &v, sizeof(v));
    __syncwarp();
    std::memcpy(&v, &warp_of_thread->exchanged[from % 32], sizeof(v));
    __syncwarp();
    return v;
}
template <class Value>
Value __shfl_xor_sync(unsigned int, Value v, int lane_mask) { return exchange(v, threadIdx.x % 32 ^ lane_mask); }
template <class Value>
Value __shfl_sync(unsigned int, Value v, int lane) { return exchange(v, lane); }

inline float __fmaf_ieee_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }

inline unsigned int __float_as_uint(float v) {
    unsigned int bits;
    std::memcpy(&bits, &v, sizeof(bits));
    return bits;
}
inline float __uint_as_float(unsigned int bits) {
    float v;
    std::memcpy(&v, &bits, sizeof(v));
    return v;
}

// With these, what comes of a function of the network's arithmetic is of that type.
using std::erfc;
using std::exp;
using std::expm1;
using std::fabs;
using std::log;
using std::log1p;
using std::max;
using std::memcpy;
using std::min;
using std::sin;
using std::sqrt;
using std::tanh;

// What cuda_src/ptx.cuh has for the GPU.
inline double widen(float v) { return v; }
inline float relu(float v) { return v <= 0.0f ? 0.0f : v; }
inline float divide(float a, float b) { return a / b; }
inline float square_root(float v) { return std::sqrt(v); }
inline float reciprocal(float v) { return 1.0f / v; }
inline float product(float a, float b) { return a * b; }
inline float half_to_float(unsigned short bits) {
    _Float16 v;
    std::memcpy(&v, &bits, sizeof(v));
    return static_cast<float>(v);
}
inline unsigned short float_to_half(float v) {
    const _Float16 half = static_cast<_Float16>(v);
    unsigned short bits;
    std::memcpy(&bits, &half, sizeof(bits));
    return bits;
}
template <class Vector>
inline Vector load_vector(const Vector* address) { return *address; }

#include "mma_on_host.h"
