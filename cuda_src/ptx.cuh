// Instructions that CUDA C++ has no portable name for, one function each.
//
// Only a CUDA compiler reads this file. Where the kernels are compiled for the host (tests/host), a
// header of the same function names stands in for it.
//
// CuPy appends -ftz=true to every compile, which turns ordinary float32 arithmetic, comparisons and
// conversions into forms that flush subnormal numbers to zero. Inline PTX is immune to that option.
#pragma once

// float32 to float64, exact, subnormal numbers kept.
__device__ __forceinline__ double widen(float v) {
    double r;
    asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(v));
    return r;
}

// The float16 number with these bits, as float32, exact.
__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
    return r;
}

// 16 bytes of global memory that no thread writes meanwhile. volatile: the loads happen in the order of the
// source, which puts the weights that are needed first at the head of the queue. Not ld.global.nc: ptxas moves that
// across barriers, pulls later layers' weights to the front and spills.
__device__ __forceinline__ Vector load_vector(const Vector* address) {
    uint4 bits;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address));
    Vector r;
    memcpy(&r, &bits, sizeof(r));
    return r;
}
