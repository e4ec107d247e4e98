// Hopper's own instructions (sm_90a), one function each: wgmma, bulk copies, and the barriers they complete on.
//
// wgmma: the four warps of a warpgroup multiply 64 rows x one k-step of A, in registers, by a k-step x N of B, in shared
// memory, and add to 64 x N sums in registers. A lane's registers are those of mma.sync for its warp's 16 rows.
#pragma once
#include "tensor.cuh"

// --- wgmma --------------------------------------------------------------------------------------------------------------

// The matrix descriptor of a k-step of B as the layout "tensor" has it, without swizzle: 128 bytes from one k half to the
// other, 256 bytes from 8 columns to the next; addresses and distances in units of 16 bytes.
__device__ __forceinline__ unsigned long long descriptor_of(const void* b) {
    return (shared_address(b) >> 4 & 0x3fffull) | 128ull >> 4 << 16 | 256ull >> 4 << 32;
}

// Registers written by other instructions before are visible to the wgmma after it.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

#define WGMMA_MATH_tf32 "k8.f32.tf32.tf32 "
#define WGMMA_MATH_split3 "k16.f32.f16.f16 "
#define WGMMA_MATH_float16 "k16.f32.f16.f16 "
#define WGMMA_MATH_bfloat16 "k16.f32.bf16.bf16 "
#define WGMMA_TAIL_tf32 ";\n\t}"
#define WGMMA_TAIL_split3 ", 0;\n\t}"  // B is not transposed
#define WGMMA_TAIL_float16 ", 0;\n\t}"
#define WGMMA_TAIL_bfloat16 ", 0;\n\t}"
#define WGMMA_JOIN_(a, b) a##b
#define WGMMA_JOIN(a, b) WGMMA_JOIN_(a, b)

#define WGMMA_SUM(i) "+f"(s[i][0]), "+f"(s[i][1]), "+f"(s[i][2]), "+f"(s[i][3])
// s (+)= A B for TILES x 8 columns. add 0: the sums begin with these products.
template <int TILES>
struct Wgmma;

// A0 .. A3, B and ADD: the numbers of the operands that follow the sums.
#define WGMMA(TILES, N, A0, A1, A2, A3, B, ADD)                                                                          \
    template <>                                                                                                          \
    struct Wgmma<TILES> {                                                                                                \
        static __device__ __forceinline__ void multiply(float (&s)[TILES][4], const unsigned int (&a)[4],                \
                                                        unsigned long long b, int add) {                                 \
            asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " ADD ", 0;\n\t"                                          \
                         "wgmma.mma_async.sync.aligned.m64n" N WGMMA_JOIN(WGMMA_MATH_, MLP_MATH) "{"                     \
                         WGMMA_JOIN(WGMMA_REGISTERS_, TILES) "}, "                                                       \
                         "{" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1" WGMMA_JOIN(WGMMA_TAIL_, MLP_MATH)            \
                         : WGMMA_JOIN(WGMMA_SUMS_, TILES)                                                                \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                \
        }                                                                                                                \
    };

#define WGMMA_REGISTERS_1 "%0, %1, %2, %3"
#define WGMMA_REGISTERS_2 WGMMA_REGISTERS_1 ", %4, %5, %6, %7"
#define WGMMA_REGISTERS_3 WGMMA_REGISTERS_2 ", %8, %9, %10, %11"
#define WGMMA_REGISTERS_4 WGMMA_REGISTERS_3 ", %12, %13, %14, %15"
#define WGMMA_REGISTERS_5 WGMMA_REGISTERS_4 ", %16, %17, %18, %19"
#define WGMMA_REGISTERS_6 WGMMA_REGISTERS_5 ", %20, %21, %22, %23"
#define WGMMA_REGISTERS_7 WGMMA_REGISTERS_6 ", %24, %25, %26, %27"
#define WGMMA_REGISTERS_8 WGMMA_REGISTERS_7 ", %28, %29, %30, %31"
#define WGMMA_REGISTERS_9 WGMMA_REGISTERS_8 ", %32, %33, %34, %35"
#define WGMMA_REGISTERS_10 WGMMA_REGISTERS_9 ", %36, %37, %38, %39"
#define WGMMA_REGISTERS_11 WGMMA_REGISTERS_10 ", %40, %41, %42, %43"
#define WGMMA_REGISTERS_12 WGMMA_REGISTERS_11 ", %44, %45, %46, %47"
#define WGMMA_REGISTERS_13 WGMMA_REGISTERS_12 ", %48, %49, %50, %51"
#define WGMMA_REGISTERS_14 WGMMA_REGISTERS_13 ", %52, %53, %54, %55"
#define WGMMA_REGISTERS_15 WGMMA_REGISTERS_14 ", %56, %57, %58, %59"
#define WGMMA_REGISTERS_16 WGMMA_REGISTERS_15 ", %60, %61, %62, %63"
#define WGMMA_SUMS_1 WGMMA_SUM(0)
#define WGMMA_SUMS_2 WGMMA_SUMS_1, WGMMA_SUM(1)
#define WGMMA_SUMS_3 WGMMA_SUMS_2, WGMMA_SUM(2)
#define WGMMA_SUMS_4 WGMMA_SUMS_3, WGMMA_SUM(3)
#define WGMMA_SUMS_5 WGMMA_SUMS_4, WGMMA_SUM(4)
#define WGMMA_SUMS_6 WGMMA_SUMS_5, WGMMA_SUM(5)
#define WGMMA_SUMS_7 WGMMA_SUMS_6, WGMMA_SUM(6)
#define WGMMA_SUMS_8 WGMMA_SUMS_7, WGMMA_SUM(7)
#define WGMMA_SUMS_9 WGMMA_SUMS_8, WGMMA_SUM(8)
#define WGMMA_SUMS_10 WGMMA_SUMS_9, WGMMA_SUM(9)
#define WGMMA_SUMS_11 WGMMA_SUMS_10, WGMMA_SUM(10)
#define WGMMA_SUMS_12 WGMMA_SUMS_11, WGMMA_SUM(11)
#define WGMMA_SUMS_13 WGMMA_SUMS_12, WGMMA_SUM(12)
#define WGMMA_SUMS_14 WGMMA_SUMS_13, WGMMA_SUM(13)
#define WGMMA_SUMS_15 WGMMA_SUMS_14, WGMMA_SUM(14)
#define WGMMA_SUMS_16 WGMMA_SUMS_15, WGMMA_SUM(15)

WGMMA(1, "8", "%4", "%5", "%6", "%7", "%8", "%9")
WGMMA(2, "16", "%8", "%9", "%10", "%11", "%12", "%13")
WGMMA(3, "24", "%12", "%13", "%14", "%15", "%16", "%17")
WGMMA(4, "32", "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA(5, "40", "%20", "%21", "%22", "%23", "%24", "%25")
WGMMA(6, "48", "%24", "%25", "%26", "%27", "%28", "%29")
WGMMA(7, "56", "%28", "%29", "%30", "%31", "%32", "%33")
WGMMA(8, "64", "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA(9, "72", "%36", "%37", "%38", "%39", "%40", "%41")
WGMMA(10, "80", "%40", "%41", "%42", "%43", "%44", "%45")
WGMMA(11, "88", "%44", "%45", "%46", "%47", "%48", "%49")
WGMMA(12, "96", "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA(13, "104", "%52", "%53", "%54", "%55", "%56", "%57")
WGMMA(14, "112", "%56", "%57", "%58", "%59", "%60", "%61")
WGMMA(15, "120", "%60", "%61", "%62", "%63", "%64", "%65")
WGMMA(16, "128", "%64", "%65", "%66", "%67", "%68", "%69")

// --- Bulk copies and their barriers ---------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(unsigned long long* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
// Barriers that were set up are visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Copy bytes, a multiple of 16, between addresses that are multiples of 16; the barrier's phase ends when they are there.
__device__ __forceinline__ void load_bulk(void* to, const void* from, unsigned int bytes, unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned long long* barrier, unsigned int phase) {
    asm volatile(
        "{\n\t.reg .pred done;\n\twait:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra wait;\n\t}" ::"r"(
            shared_address(barrier)),
        "r"(phase)
        : "memory");
}

// Shared memory that threads wrote is visible to the copy engine and to wgmma.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void store_bulk(void* to, const void* from, unsigned int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\tcp.async.bulk.commit_group;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
// Of this thread's bulk stores, what they read may be overwritten.
__device__ __forceinline__ void store_bulk_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Of this thread's bulk stores, all is written.
__device__ __forceinline__ void store_bulk_whole() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
