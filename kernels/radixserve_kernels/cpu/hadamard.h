// Products of heads with Hadamard matrices: they spread a large number over its head, so that 8 bits with one scale lose
// less. The matrix is orthogonal and its own inverse.
#pragma once

#include <cmath>

#include "vectors.h"

// x[i ^ distance] of each lane; distance: a power of two below LANES.
inline vec swap_lanes(vec x, int distance) {
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (vec)_mm512_permutexvar_ps(_mm512_xor_si512(lanes, _mm512_set1_epi32(distance)), (__m512)x);
#elif defined(__AVX2__)
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (vec)_mm256_permutevar8x32_ps((__m256)x, _mm256_xor_si256(lanes, _mm256_set1_epi32(distance)));
#elif defined(__aarch64__)
    const float32x4_t lanes = (float32x4_t)x;
    return (vec)(distance == 1 ? vrev64q_f32(lanes) : vextq_f32(lanes, lanes, 2));
#else
    vec swapped;
    for (int i = 0; i < LANES; i++) swapped[i] = x[i ^ distance];
    return swapped;
#endif
}

// Sums and differences of the lanes whose indices differ in the bit DISTANCE.
template <int DISTANCE> inline vec add_lanes(vec x) {
    uvec signs;  // of the upper of two lanes
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) signs[i] = i & DISTANCE ? 0x80000000u : 0;
    return swap_lanes(x, DISTANCE) + (vec)((uvec)x ^ signs);
}

// The product of LANES numbers, not scaled.
inline vec multiply_lanes(vec x) {
    x = add_lanes<2>(add_lanes<1>(x));
    if constexpr (LANES > 4) x = add_lanes<4>(x);
    if constexpr (LANES > 8) x = add_lanes<8>(x);
    return x;
}

// Multiplies x [dim], in place, with a Hadamard matrix of each block of `size` numbers, the largest power of two that
// divides dim. Sums have one order at all levels, that of stored_kv.py.
inline void multiply_hadamard(float *x, int64_t dim) {
    const int64_t size = dim & -dim;
    if (size == 1) return;
    const float scale = float(std::sqrt(1.0 / double(size)));
    if (size < LANES) {
        for (int64_t distance = 1; distance < size; distance *= 2)
            for (int64_t i = 0; i < dim; i++)
                if (!(i & distance)) {
                    const float low = x[i], high = x[i + distance];
                    x[i] = low + high, x[i + distance] = low - high;
                }
        for (int64_t i = 0; i < dim; i++) x[i] *= scale;
        return;
    }
    int64_t distance = LANES;
    if (size >= 4 * LANES) {  // four vectors at a time, which stay in registers
        distance = 4 * LANES;
        const vec factor = broadcast(size == distance ? scale : 1.0f);
        for (int64_t i = 0; i < dim; i += 4 * LANES) {
            float *from = x + i;
            const vec a = multiply_lanes(load(from)), b = multiply_lanes(load(from + LANES));
            const vec c = multiply_lanes(load(from + 2 * LANES)), d = multiply_lanes(load(from + 3 * LANES));
            const vec ab = a + b, cd = c + d, a_b = a - b, c_d = c - d;
            store(from, (ab + cd) * factor), store(from + LANES, (a_b + c_d) * factor);
            store(from + 2 * LANES, (ab - cd) * factor), store(from + 3 * LANES, (a_b - c_d) * factor);
        }
        if (size == distance) return;
    } else {
        for (int64_t i = 0; i < dim; i += LANES) store(x + i, multiply_lanes(load(x + i)));
    }
    for (; distance < size; distance *= 2)
        for (int64_t first = 0; first < dim; first += 2 * distance)
            for (int64_t i = first; i < first + distance; i += LANES) {
                const vec low = load(x + i), high = load(x + i + distance);
                store(x + i, low + high), store(x + i + distance, low - high);
            }
    for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(x + i) * broadcast(scale));
}
