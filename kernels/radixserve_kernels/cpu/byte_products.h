// Products of signed bytes by arm64's instructions for them. Empty on other processors.
//
// By the dot product of four bytes a vector of weights holds four of k of each of LANES columns; by the matrix product,
// which multiplies two rows with two columns, eight of k of two columns: see lane_offset in quantized.h.
#pragma once

#include "integer_dot.h"
#include "panels.h"

#if defined(RADIXSERVE_BYTE_PRODUCTS)

// Adds the products of M rows of x, 32 numbers each, with a panel's columns to `sums`. weights(i): the i-th of 16 vectors.
#if defined(__ARM_FEATURE_MATMUL_INT8)
template <int M, class Weights>
inline void add_byte_products(Weights &&weights, const int8_t *x, int64_t stride, ivec (&sums)[M][2]) {
    int32x4_t products[(M + 1) / 2][LANES] = {};  // of two rows and two columns
#pragma GCC unroll 4
    for (int step = 0; step < 4; step++) {
        int8x16_t w[LANES];
#pragma GCC unroll 4
        for (int pair = 0; pair < LANES; pair++) w[pair] = weights(step * LANES + pair);
#pragma GCC unroll 4
        for (int m = 0; m < M; m += 2) {
            const int8_t *from = x + m * stride + 8 * step;
            const int8x8_t first = vld1_s8(from);
            const int8x16_t rows = vcombine_s8(first, m + 1 < M ? vld1_s8(from + stride) : first);
#pragma GCC unroll 4
            for (int pair = 0; pair < LANES; pair++)
                products[m / 2][pair] = vmmlaq_s32(products[m / 2][pair], rows, w[pair]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            const int64x2_t low = (int64x2_t)products[m / 2][2 * n], high = (int64x2_t)products[m / 2][2 * n + 1];
            sums[m][n] += (ivec)(m % 2 ? vzip2q_s64(low, high) : vzip1q_s64(low, high));
        }
}
#else
template <int M, class Weights>
inline void add_byte_products(Weights &&weights, const int8_t *x, int64_t stride, ivec (&sums)[M][2]) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        int8x16_t rows[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) rows[m] = vld1q_s8(x + m * stride + 16 * half);
        auto multiply = [&](auto four) {
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                const int8x16_t w = weights(half * 8 + four * 2 + n);
#pragma GCC unroll 4
                for (int m = 0; m < M; m++)
                    sums[m][n] = (ivec)vdotq_laneq_s32((int32x4_t)sums[m][n], w, rows[m], decltype(four)::value);
            }
        };
        multiply(std::integral_constant<int, 0>()), multiply(std::integral_constant<int, 1>());
        multiply(std::integral_constant<int, 2>()), multiply(std::integral_constant<int, 3>());
    }
}
#endif
#endif
