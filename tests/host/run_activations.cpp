// Activations of numbers, compiled for the host:  run_activations INPUT OUTPUT
//
// INPUT: records of an int64 (the place in enum class Act), an int64 count, the parameter and count numbers, all of MLP_T.
// OUTPUT gets count numbers a record.
#include "common.cuh"

#include <array>
#include <fstream>
#include <utility>
#include <vector>

using Function = T (*)(T, T);

template <std::size_t... I>
constexpr std::array<Function, sizeof...(I)> functions(std::index_sequence<I...>) {
    return {activation<static_cast<Act>(I)>...};
}

int main(int, char** argv) {
    constexpr auto table = functions(std::make_index_sequence<static_cast<std::size_t>(Act::softmax)>{});
    std::ifstream in(argv[1], std::ios::binary);
    std::ofstream out(argv[2], std::ios::binary);
    long long head[2];
    while (in.read(reinterpret_cast<char*>(head), sizeof(head))) {
        T parameter;
        std::vector<T> v(head[1]);
        in.read(reinterpret_cast<char*>(&parameter), sizeof(T));
        in.read(reinterpret_cast<char*>(v.data()), static_cast<std::streamsize>(v.size() * sizeof(T)));
        for (T& number : v) number = table.at(head[0])(number, parameter);
        out.write(reinterpret_cast<const char*>(v.data()), static_cast<std::streamsize>(v.size() * sizeof(T)));
    }
    return out ? 0 : 1;
}
