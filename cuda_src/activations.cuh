// The activation table, CUDA side; cupymlp/activations.py is the other, with the formulas, the limits and what each may be off.
//
// NaN stays NaN: comparisons are written so that it falls through. relu, relu6, leaky_relu, softsign, hard_sigmoid, hard_swish
// and squareplus take single IEEE operations in the order written here and keep subnormal numbers. The others call CUDA's
// functions, which with -ftz=true, as CuPy compiles, take subnormal numbers for zero and give none.
#pragma once

enum class Act {
    identity, relu, leaky_relu, elu, celu, selu, gelu, gelu_tanh, silu, tanh, sigmoid, softplus, softsign, sin, exp,
    hard_sigmoid, hard_swish, relu6, squareplus, softmax, log_softmax
};

// Functions of a whole row of outputs: softmax.cuh.
__device__ constexpr bool is_over_row(Act act) { return act == Act::softmax || act == Act::log_softmax; }

// Whether it takes so many instructions that kernels have it in a loop instead of side by side for all numbers of a lane.
__device__ constexpr bool is_long(Act act) {
    return act != Act::identity && act != Act::relu && act != Act::leaky_relu && act != Act::relu6 && !is_over_row(act);
}

__device__ __forceinline__ T at_least(T v, T low) { return v < low ? low : v; }
__device__ __forceinline__ T at_most(T v, T high) { return v > high ? high : v; }
__device__ __forceinline__ T hard_sigmoid(T v) { return product(at_most(at_least(add(v, T(3)), T(0)), T(6)), T(1.0 / 6)); }

// CUDA's sinf reduces large arguments in local memory, by code that must not be there for every number of a lane.
__device__ __noinline__ inline float sine_of_large(float v) { return sinf(v); }

// sin v = +-sin r or +-cos r, v = r + k pi / 2: k up to 2^20, whose products with the first part of pi / 2 leave an exact
// difference. Both are b + b r^2 P(r^2), b = r or 1, with P interpolated at four of Chebyshev's points: off by less than 2 ulp.
__device__ __forceinline__ float sine(float v) {
    if (fabs(v) > 1e6f) return sine_of_large(v);
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: the sum is rounded to a whole number, in its lowest bits
    const float shifted = fused_multiply_add(v, 0.6366197466850281f, ROUND);
    const float k = shifted - ROUND;
    const bool odd = __float_as_uint(shifted) & 1u;
    float r = fused_multiply_add(k, -1.5707963705062866f, v);
    r = fused_multiply_add(k, 4.371138828673793e-08f, r);
    r = fused_multiply_add(k, 1.7151245100058819e-15f, r);
    const float square = product(r, r);
    float p = odd ? 2.4463452064082958e-05f : 2.724962087086169e-06f;
    p = fused_multiply_add(p, square, odd ? -0.0013887586537748575f : -0.00019840084132738411f);
    p = fused_multiply_add(p, square, odd ? 0.04166664928197861f : 0.008333331905305386f);
    p = fused_multiply_add(p, square, odd ? -0.5f : -0.1666666716337204f);
    const float base = odd ? 1.0f : r;
    const float size = fused_multiply_add(product(base, square), p, base);
    return __uint_as_float(__float_as_uint(size) ^ (__float_as_uint(shifted) & 2u) << 30);
}
__device__ __forceinline__ double sine(double v) { return sin(v); }

// log(1 + x), 0 <= x <= 1: for float32 s P(s^2) = 2 atanh s, s = x / (2 + x), with P interpolated at five of Chebyshev's points:
// off by less than 3.5 ulp, in a third of the instructions of log1pf.
__device__ __forceinline__ float log1p_of_fraction(float x) {
    const float s = x * reciprocal(x + 2.0f);
    const float square = s * s;
    float p = 0.28157779574394226f;
    p = fused_multiply_add(p, square, 0.27965158224105835f);
    p = fused_multiply_add(p, square, 0.4002459645271301f);
    p = fused_multiply_add(p, square, 0.6666632294654846f);
    p = fused_multiply_add(p, square, 2.0f);
    return s * p;
}
__device__ __forceinline__ double log1p_of_fraction(double x) { return log1p(x); }

// erfc(a / sqrt 2) / 2, 0 <= a: for float32 the polynomial of cupymlp/_normal_tail.py, half as many instructions as erfcf.
__device__ __forceinline__ float normal_tail(float a) {
    constexpr float COEFFICIENTS[] = {
        0.09441064130196894f, -0.1703976886287224f, 0.12437922446719132f, -0.07170807057673206f, 0.03086542634901529f,
        -0.00848831044854525f, 0.0005040076364525382f, 0.0006298207928571364f, -0.00017872835520125923f,
        -3.575377247438331e-05f, 1.9431029927982555e-05f};
    const float t = (a - 4.0f) * reciprocal(a + 4.0f);
    float p = COEFFICIENTS[10];
#pragma unroll
    for (int i = 9; i >= 0; --i) p = fused_multiply_add(p, t, COEFFICIENTS[i]);
    return p * exp(a * a * -0.5f);
}
__device__ __forceinline__ double normal_tail(double a) { return 0.5 * erfc(0.70710678118654752440 * a); }

template <Act ACT>
__device__ __forceinline__ T activation(T v, T parameter) {
    if constexpr (ACT == Act::relu) {
        return relu(v);
    } else if constexpr (ACT == Act::leaky_relu) {
        return is_negative(v) ? product(v, parameter) : v;
    } else if constexpr (ACT == Act::elu) {
        return v > T(0) ? v : parameter * expm1(v);
    } else if constexpr (ACT == Act::celu) {
        return v > T(0) ? v : parameter * expm1(divide(v, parameter));
    } else if constexpr (ACT == Act::selu) {
        constexpr T SCALE = 1.0507009873554804935, SCALE_ALPHA = 1.7580993408473768600;
        return v > T(0) ? SCALE * v : SCALE_ALPHA * expm1(v);
    } else if constexpr (ACT == Act::gelu) {
        // v (1 - tail) or v tail: no term cancels another.
        const T a = at_most(fabs(v), T(50));  // where the tail is 0 already: infinity times 0 would be NaN
        return relu(v) - a * normal_tail(a);
    } else if constexpr (ACT == Act::gelu_tanh) {
        // (1 + tanh t) / 2 is 1 / (1 + e^(-2t)), whose terms do not cancel.
        const T w = at_least(v, T(-30));  // where it is -0 already: -inf times 0 would be NaN
        const T cubic = fused_multiply_add(T(0.044715) * w, w, T(1));
        return w * reciprocal(T(1) + exp(T(-1.5957691216057307118) * w * cubic));
    } else if constexpr (ACT == Act::silu) {
        const T w = at_least(v, T(-1000));  // where it is -0 already
        return w * reciprocal(T(1) + exp(-w));
    } else if constexpr (ACT == Act::tanh) {
        return tanh(v);
    } else if constexpr (ACT == Act::sigmoid) {
        return reciprocal(T(1) + exp(-v));
    } else if constexpr (ACT == Act::softplus) {
        return relu(v) + log1p_of_fraction(exp(-fabs(v)));
    } else if constexpr (ACT == Act::softsign) {
        constexpr T FAR = 1.2676506002282294015e30;  // 2^100, where it is 1 already: inf / inf would be NaN
        const T w = at_most(at_least(v, -FAR), FAR);
        return divide(w, add(fabs(w), T(1)));
    } else if constexpr (ACT == Act::sin) {
        return sine(product(v, parameter));
    } else if constexpr (ACT == Act::exp) {
        return exp(v);
    } else if constexpr (ACT == Act::hard_sigmoid) {
        return hard_sigmoid(v);
    } else if constexpr (ACT == Act::hard_swish) {
        const T w = at_least(v, T(-3));
        return product(w, hard_sigmoid(w));
    } else if constexpr (ACT == Act::relu6) {
        return at_most(relu(v), T(6));
    } else if constexpr (ACT == Act::squareplus) {
        const T a = fabs(v);
        const T root = a < T(1152921504606846976) ? square_root(fused_multiply_add(a, a, T(4))) : a;  // the square stays finite
        const T positive = fused_multiply_add(T(0.5), a, product(T(0.5), root));
        return v < T(0) ? divide(T(1), positive) : positive;  // f(-v) = 1 / f(v), without cancellation
    } else {
        return v;  // identity; and those of a row, which come afterwards
    }
}
