// Runs a kernel that was compiled for the host:  run_kernel INPUT OUTPUT
//
// INPUT: twelve int64 (grid; bytes of x, y, weights and rows; how far the memory of x and y lies past a multiple of 16
// bytes; at which of their bytes the first elements of x and y are; for kernels that take rounds of rows, their last three
// arguments), then the bytes of x, y, weights and rows. OUTPUT gets the bytes of y. Every array has memory of its own, exactly as large as it is, so that AddressSanitizer sees an access
// beyond it.
// With MLP_PACKED == 0 the weights are the struct Weights with offsets in bytes for pointers, then the data.
#include KERNEL_FILE

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

// Options: KERNEL_FILE, KERNEL; THREADS a block; SHARED_BYTES of dynamic shared memory
#if SHARED_BYTES
using SharedElement = std::remove_reference_t<decltype(shared[0])>;
SharedElement shared[SHARED_BYTES / sizeof(SharedElement)];
#else
char no_memory[1];
#define shared no_memory
#endif

struct Buffer {
    Buffer(std::ifstream& in, long long bytes, long long past) : bytes(bytes) {
        memory = static_cast<char*>(std::malloc(bytes + past));
        start = memory + past;
        in.read(start, bytes);
    }
    ~Buffer() { std::free(memory); }
    long long bytes;
    char* memory;
    char* start;
};

// Kernels take four arguments; those that compute rounds of rows take three numbers more.
template <class Kernel>
void call(Kernel kernel, const X* x, Y* y, const Weights& weights, const Rows& rows, const long long* round) {
    if constexpr (std::is_invocable_v<Kernel, const X*, Y*, Weights, Rows>) kernel(x, y, weights, rows);
    else kernel(x, y, weights, rows, round[0], round[1], round[2]);
}

int main(int, char** argv) {
    std::ifstream in(argv[1], std::ios::binary);
    long long head[12];
    in.read(reinterpret_cast<char*>(head), sizeof(head));
    Buffer x(in, head[1], head[5]), y(in, head[2], head[6]), w(in, head[3], 0), r(in, head[4], 0);
    if (!in) return 2;
    Rows rows;
    if (r.bytes != sizeof(rows)) return 3;
    std::memcpy(&rows, r.start, sizeof(rows));
#if MLP_PACKED
    const Weights weights = reinterpret_cast<const Vector*>(w.start);
#else
    Weights weights;
    std::memcpy(&weights, w.start, sizeof(weights));
    for (int l = 0; l < depth; ++l) {
        weights.weight[l] = reinterpret_cast<const S*>(w.start + reinterpret_cast<std::intptr_t>(weights.weight[l]));
        weights.bias[l] = reinterpret_cast<const S*>(w.start + reinterpret_cast<std::intptr_t>(weights.bias[l]));
    }
#endif
    const unsigned int grid = static_cast<unsigned int>(head[0]);
    std::barrier<> barrier(THREADS), between_blocks(THREADS);
    block_barrier = &barrier;
    std::vector<std::unique_ptr<Warp>> warps;
    for (int w = 0; w < THREADS / 32; ++w) warps.push_back(std::make_unique<Warp>(32));
    std::vector<std::thread> threads;
    for (unsigned int t = 0; t < THREADS; ++t)
        threads.emplace_back([&, t] {
            warp_of_thread = warps[t / 32].get();
            blockDim = {THREADS, 1, 1};
            gridDim = {grid, 1, 1};
            threadIdx = {t, 0, 0};
            for (unsigned int b = 0; b < grid; ++b) {
                blockIdx = {b, 0, 0};
                between_blocks.arrive_and_wait();
                if (t == 0) std::memset(static_cast<void*>(shared), 0xff, sizeof(shared));  // NaN, not another block's
                between_blocks.arrive_and_wait();
                const X* const from = reinterpret_cast<const X*>(x.start + head[7]);
                Y* const to = reinterpret_cast<Y*>(y.start + head[8]);
                call(KERNEL, from, to, weights, rows, head + 9);
            }
        });
    for (auto& thread : threads) thread.join();
    std::ofstream(argv[2], std::ios::binary).write(y.start, y.bytes);
    return 0;
}
