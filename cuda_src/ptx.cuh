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

// v, or +0 if v <= 0: NaN stays NaN, -0 becomes +0, subnormal numbers are told from zero.
__device__ __forceinline__ float relu(float v) {
    float r;
#if __CUDA_ARCH__ >= 800
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(r) : "f"(v));
#else
    asm("{\n\t.reg .pred n;\n\tsetp.le.f32 n, %1, 0f00000000;\n\tselp.f32 %0, 0f00000000, %1, n;\n\t}" : "=f"(r) : "f"(v));
#endif
    return r;
}

// The float16 number nearest to v, ties to even, as bits. They leave through a 32-bit register: ptxas 13.0 takes the store of
// the low byte of a 16-bit one for a conversion to an 8-bit integer (F2I.U8.F16 in the listing).
__device__ __forceinline__ unsigned short float_to_half(float v) {
    unsigned int r;
    asm("{\n\t.reg .b16 h;\n\tcvt.rn.f16.f32 h, %1;\n\tmov.b32 %0, {h, 0};\n\t}" : "=r"(r) : "f"(v));
    return static_cast<unsigned short>(r);
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

// a * b to nearest, subnormal numbers kept.
__device__ __forceinline__ float product(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// a / b and the square root to nearest, subnormal numbers kept.
__device__ __forceinline__ float divide(float a, float b) {
    float r;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float square_root(float v) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// 1 / v, off by an ulp at most; 0 where that is below 2^-126.
__device__ __forceinline__ float reciprocal(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// --- sm_80 and newer: what tensor cores take --------------------------------------------------------------

// The bits of v rounded to the 11 significant bits of tf32; ties to even, or on GPUs before sm_90, which would take three
// instructions instead of one, away from zero.
__device__ __forceinline__ unsigned int round_to_tf32(float v) {
    unsigned int r;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
#endif
    return r;
}

// The larger of largest, which is not negative, and |v|; a positive NaN if one is NaN.
__device__ __forceinline__ float largest_magnitude(float largest, float v) {
    float r;
    asm("{\n\t.reg .f32 a;\n\tabs.f32 a, %2;\n\tmax.NaN.f32 %0, %1, a;\n\t}" : "=f"(r) : "f"(largest), "f"(v));
    return r;
}

// 2 v, or +0 if v <= 0: v + |v|, on the pipe of additions, where there is more room than on that of comparisons.
__device__ __forceinline__ float relu_doubled(float v) {
    float r;
    asm("{\n\t.reg .f32 a;\n\tabs.f32 a, %1;\n\tadd.rn.f32 %0, %1, a;\n\t}" : "=f"(r) : "f"(v));
    return r;
}

// round_to_tf32, half_pair and bfloat16_pair of relu of the numbers.
__device__ __forceinline__ unsigned int relu_round_to_tf32(float v) {
#if __CUDA_ARCH__ >= 900
    unsigned int r;
    asm("cvt.rn.relu.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
    return r;
#else
    return round_to_tf32(relu(v));
#endif
}
__device__ __forceinline__ unsigned int relu_half_pair(float first, float second) {
    unsigned int r;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}
__device__ __forceinline__ unsigned int relu_bfloat16_pair(float first, float second) {
    unsigned int r;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}

// Two float16 or bfloat16 numbers, nearest to first (bits 0 .. 15) and second (16 .. 31), ties to even.
__device__ __forceinline__ unsigned int half_pair(float first, float second) {
    unsigned int r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}
__device__ __forceinline__ unsigned int bfloat16_pair(float first, float second) {
    unsigned int r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}

// sum += A B, of 16 rows x 8 columns, with float32 sums: a lane's fragments as the PTX manual lays them out, for k of 8 (tf32)
// or 16 (float16, bfloat16).
__device__ __forceinline__ void mma_tf32(float (&sum)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_half(float (&sum)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_bfloat16(float (&sum)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// An address as ldmatrix and ld.shared take it.
using SharedAddress = unsigned int;
__device__ __forceinline__ SharedAddress shared_address(const void* address) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(address));
}

// The same value, which the compiler does not know to be the same: so it adds constants to it where they are used, as parts of
// instructions, and does not keep a register for each sum through a loop.
__device__ __forceinline__ unsigned int opaque(unsigned int v) {
    asm volatile("mov.b32 %0, %0;" : "+r"(v));
    return v;
}
__device__ __forceinline__ const char* opaque(const char* v) {
    asm volatile("mov.b64 %0, %0;" : "+l"(v));
    return v;
}

// A lane's B fragments of one or two column tiles that lie in shared memory one behind the other, each as [2 halves][8
// columns][16 bytes]. address: the first one's, plus 16 times the lane. volatile: not to be kept from one tile of rows to
// the next.
__device__ __forceinline__ void load_b_tile(unsigned int (&b)[2], SharedAddress address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(address));
}
__device__ __forceinline__ void load_b_tiles(unsigned int (&b0)[2], unsigned int (&b1)[2], SharedAddress address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b0[0]), "=r"(b0[1]), "=r"(b1[0]), "=r"(b1[1])
                 : "r"(address));
}

__device__ __forceinline__ void load_shared_pair(float (&v)[2], SharedAddress address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(address));
}

// Two neighbouring numbers, of shared or global memory, that no thread writes meanwhile. volatile for the same reason.
__device__ __forceinline__ void load_pair(float (&v)[2], const float* address) {
    asm volatile("ld.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "l"(address));
}

// 4 bytes of global memory that no thread writes meanwhile.
__device__ __forceinline__ unsigned int load_word(const void* address) {
    unsigned int r;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(r) : "l"(address));
    return r;
}
