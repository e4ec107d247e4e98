// The CUDA names that the kernels use, with a meaning for a host C++ compiler, so that the unmodified .cu files
// compile and run block by block: one real thread a CUDA thread, a std::barrier for __syncthreads().
// Force-included (-include) before a .cu file; run_kernel.cpp has the main function.
#pragma once

#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index { unsigned int x, y, z; };
inline thread_local Index threadIdx, blockIdx, gridDim;

inline std::barrier<>* block_barrier = nullptr;
inline void __syncthreads() { block_barrier->arrive_and_wait(); }

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

using std::memcpy;

// What cuda_src/ptx.cuh has for the GPU.
inline double widen(float v) { return v; }
inline float half_to_float(unsigned short bits) {
    _Float16 v;
    std::memcpy(&v, &bits, sizeof(v));
    return static_cast<float>(v);
}
template <class Vector>
inline Vector load_vector(const Vector* address) { return *address; }
