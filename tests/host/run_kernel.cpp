// Runs a kernel that was compiled for the host:  run_kernel INPUT OUTPUT
//
// INPUT: nine int64 (grid; bytes of x, y, weights and rows; how far the memory of x and y lies past a multiple of 16
// bytes; at which of their bytes the first elements of x and y are), then the bytes of x, y, weights and rows. OUTPUT gets
// the bytes of y. Every array has memory of its own, exactly as large as it is, so that AddressSanitizer sees an access
// beyond it.
// With MLP_PACKED == 0 the weights are the struct Weights with offsets in bytes for pointers, then the data.
#include KERNEL_FILE

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

Vector shared[MLP_SHARED_BYTES / 16 + (MLP_SHARED_BYTES == 0)];

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

int main(int, char** argv) {
    std::ifstream in(argv[1], std::ios::binary);
    long long head[9];
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
        weights.weight[l] = reinterpret_cast<const T*>(w.start + reinterpret_cast<std::intptr_t>(weights.weight[l]));
        weights.bias[l] = reinterpret_cast<const T*>(w.start + reinterpret_cast<std::intptr_t>(weights.bias[l]));
    }
#endif
    const unsigned int grid = static_cast<unsigned int>(head[0]);
    std::barrier<> barrier(MLP_BLOCK), between_blocks(MLP_BLOCK);
    block_barrier = &barrier;
    std::vector<std::thread> threads;
    for (unsigned int t = 0; t < MLP_BLOCK; ++t)
        threads.emplace_back([&, t] {
            for (unsigned int b = 0; b < grid; ++b) {
                threadIdx = {t, 0, 0};
                blockIdx = {b, 0, 0};
                gridDim = {grid, 1, 1};
                between_blocks.arrive_and_wait();
                if (t == 0) std::memset(static_cast<void*>(shared), 0xff, sizeof(shared));  // NaN, not another block's
                between_blocks.arrive_and_wait();
                KERNEL(reinterpret_cast<const X*>(x.start + head[7]), reinterpret_cast<T*>(y.start + head[8]), weights, rows);
            }
        });
    for (auto& thread : threads) thread.join();
    std::ofstream(argv[2], std::ios::binary).write(y.start, y.bytes);
    return 0;
}
