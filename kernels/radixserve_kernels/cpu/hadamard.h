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
#else
    vec swapped;
    for (int i = 0; i < LANES; i++) swapped[i] = x[i ^ distance];
    return swapped;
#endif
}

// The sign bit in lanes whose index has the bit `distance`.
inline uvec upper_signs(int distance) {
    uvec signs;
    for (int i = 0; i < LANES; i++) signs[i] = i & distance ? 0x80000000u : 0;
    return signs;
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
    for (int64_t i = 0; i < dim; i += LANES) {
        vec some = load(x + i);
#pragma GCC unroll 4
        for (int distance = 1; distance < LANES; distance *= 2)
            some = swap_lanes(some, distance) + (vec)((uvec)some ^ upper_signs(distance));
        store(x + i, some);
    }
    for (int64_t distance = LANES; distance < size; distance *= 2)
        for (int64_t first = 0; first < dim; first += 2 * distance)
            for (int64_t i = first; i < first + distance; i += LANES) {
                const vec low = load(x + i), high = load(x + i + distance);
                store(x + i, low + high), store(x + i + distance, low - high);
            }
    for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(x + i) * broadcast(scale));
}
