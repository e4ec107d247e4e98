// Tensor cores for a host C++ compiler: what cuda_src/ptx.cuh says of mma.sync, the conversions and the loads around it.
// cuda_on_host.h includes this at its end.
//
// mma: each lane of the warp deposits its A and B fragments, meets the others at the warp's barrier, and sums its four
// results from exact products, in float32, in the order of k. A lane that goes on to the next mma writes another buffer, so
// one barrier is enough.
#pragma once

struct MmaBuffer {
    unsigned int a[32][4], b[32][2];
};
inline MmaBuffer mma_buffers[32][2];
inline unsigned int ballots[32][2][32];
inline thread_local unsigned int mma_turn = 0, ballot_turn = 0;

inline unsigned int __ballot_sync(unsigned int, bool yes) {
    unsigned int* const votes = ballots[threadIdx.x / 32][ballot_turn++ % 2];
    votes[threadIdx.x % 32] = yes;
    __syncwarp();
    unsigned int mask = 0;
    for (int l = 0; l < 32; ++l) mask |= votes[l] << l;
    return mask;
}
inline int __ffs(unsigned int v) { return __builtin_ffs(static_cast<int>(v)); }

inline unsigned int round_to_tf32(float v) {
    const unsigned int bits = __float_as_uint(v);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu;
    if ((bits & 0x7fffffffu) == 0x7f800000u) return bits;
    return (bits + 0x1000u) & 0xffffe000u;
}

inline float largest_magnitude(float largest, float v) {
    return std::isnan(largest) || std::isnan(v) ? __uint_as_float(0x7fffffffu) : std::max(largest, std::fabs(v));
}

inline unsigned int half_pair(float first, float second) {
    const auto bits = [](float v) {
        const _Float16 half = static_cast<_Float16>(v);
        unsigned short r;
        std::memcpy(&r, &half, sizeof(r));
        return static_cast<unsigned int>(r);
    };
    return bits(first) | bits(second) << 16;
}

inline unsigned int bfloat16_pair(float first, float second) {
    const auto bits = [](float v) {
        const unsigned int b = __float_as_uint(v);
        if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
        return (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
    };
    return bits(first) | bits(second) << 16;
}

inline unsigned int relu_round_to_tf32(float v) { return round_to_tf32(relu(v)); }
inline unsigned int relu_half_pair(float first, float second) { return half_pair(relu(first), relu(second)); }
inline unsigned int relu_bfloat16_pair(float first, float second) { return bfloat16_pair(relu(first), relu(second)); }

// Where row `row` of A and column `column` of B have element k: the figures of the PTX manual. 2-byte numbers: m16n8k16;
// 4-byte numbers: m16n8k8.
template <int BYTES>
float element_of_a(const MmaBuffer& from, int row, int k, float (*number)(unsigned int)) {
    if constexpr (BYTES == 4) {
        return number(from.a[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]);
    } else {
        const unsigned int pair = from.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
        return number(pair >> (k % 2 * 16) & 0xffffu);
    }
}
template <int BYTES>
float element_of_b(const MmaBuffer& from, int k, int column, float (*number)(unsigned int)) {
    if constexpr (BYTES == 4) {
        return number(from.b[column * 4 + k % 4][k / 4]);
    } else {
        const unsigned int pair = from.b[column * 4 + k % 8 / 2][k / 8];
        return number(pair >> (k % 2 * 16) & 0xffffu);
    }
}

template <int BYTES>
void mma_on_host(float (&sum)[4], const unsigned int (&a)[4], const unsigned int (&b)[2], float (*number)(unsigned int)) {
    const int lane = threadIdx.x % 32;
    MmaBuffer& buffer = mma_buffers[threadIdx.x / 32][mma_turn++ % 2];
    std::memcpy(buffer.a[lane], a, sizeof(a));
    std::memcpy(buffer.b[lane], b, sizeof(b));
    __syncwarp();
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        for (int k = 0; k < 32 / BYTES; ++k)
            sum[e] = std::fma(element_of_a<BYTES>(buffer, row, k, number), element_of_b<BYTES>(buffer, k, column, number), sum[e]);
    }
}

inline float number_of_tf32(unsigned int bits) { return __uint_as_float(bits & 0xffffe000u); }
inline float number_of_half(unsigned int bits) {
    const unsigned short narrow = static_cast<unsigned short>(bits);
    _Float16 v;
    std::memcpy(&v, &narrow, sizeof(v));
    return static_cast<float>(v);
}
inline float number_of_bfloat16(unsigned int bits) { return __uint_as_float(bits << 16); }

inline void mma_tf32(float (&sum)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    mma_on_host<4>(sum, a, b, number_of_tf32);
}
inline void mma_half(float (&sum)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    mma_on_host<2>(sum, a, b, number_of_half);
}
inline void mma_bfloat16(float (&sum)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    mma_on_host<2>(sum, a, b, number_of_bfloat16);
}

inline unsigned int load_word(const void* address) {
    unsigned int r;
    std::memcpy(&r, address, sizeof(r));
    return r;
}
inline void load_pair(float (&v)[2], const float* address) { std::memcpy(v, address, sizeof(v)); }

using SharedAddress = const char*;
inline SharedAddress shared_address(const void* address) { return static_cast<const char*>(address); }
inline const char* opaque(const char* v) { return v; }
inline unsigned int opaque(unsigned int v) { return v; }
inline void load_shared_pair(float (&v)[2], SharedAddress address) { std::memcpy(v, address, sizeof(v)); }

// A lane gives the address of "its" 16 bytes; what it gets are 4 bytes from each half of a tile.
inline void load_b_tile(unsigned int (&b)[2], SharedAddress address) {
    const int lane = threadIdx.x % 32;
    for (int h = 0; h < 2; ++h) b[h] = load_word(address - lane * 16 + h * 128 + lane * 4);
}
inline void load_b_tiles(unsigned int (&b0)[2], unsigned int (&b1)[2], SharedAddress address) {
    load_b_tile(b0, address);
    load_b_tile(b1, address + 256);
}
