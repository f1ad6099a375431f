// Products of signed bytes by arm64's instructions for them. Empty on other processors.
//
// By the dot product of four bytes a vector of weights holds four of k of each of LANES columns; by the matrix product,
// which multiplies two rows with two columns, eight of k of two columns: see lane_offset in quantized.h.
#pragma once

#include "integer_dot.h"
#include "panels.h"

#if defined(RADIXSERVE_BYTE_PRODUCTS)

// Sums of products of M rows of x, 32 numbers each, with a panel's columns. Always inlined: sums stay in registers.
template <int M> class ByteSums {
  public:
    // Adds the products of the part-th eight numbers of each row, which begin at row(m), with four vectors of weights.
    template <class Row> [[gnu::always_inline]] void add(int part, const int8x16_t (&w)[4], Row &&row) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
#pragma GCC unroll 4
        for (int m = 0; m < M; m += 2) {
            const int8_t *first = row(m) + 8 * part;
            const int8x16_t rows = m + 1 < M ? vcombine_s8(vld1_s8(first), vld1_s8(row(m + 1) + 8 * part))
                                             : (int8x16_t)vld1q_dup_s64((const int64_t *)first);
#pragma GCC unroll 4
            for (int pair = 0; pair < LANES; pair++) sums[m / 2][pair] = vmmlaq_s32(sums[m / 2][pair], rows, w[pair]);
        }
#else
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            if constexpr (M <= 2) {  // two parts at a time: the compiler loads them once
                const int8x16_t two = vld1q_s8(row(m) + part / 2 * 16);
#pragma GCC unroll 2
                for (int n = 0; n < 2; n++) {
                    const int32x4_t sum = sums[m][n];
                    sums[m][n] = part % 2 ? vdotq_laneq_s32(vdotq_laneq_s32(sum, w[n], two, 2), w[2 + n], two, 3)
                                          : vdotq_laneq_s32(vdotq_laneq_s32(sum, w[n], two, 0), w[2 + n], two, 1);
                }
            } else {
                const int8x8_t eight = vld1_s8(row(m) + 8 * part);
#pragma GCC unroll 2
                for (int n = 0; n < 2; n++)
                    sums[m][n] = vdotq_lane_s32(vdotq_lane_s32(sums[m][n], w[n], eight, 0), w[2 + n], eight, 1);
            }
        }
#endif
    }

    // Row m's, of the n-th half of the columns.
    [[gnu::always_inline]] ivec of(int m, int n) const {
#if defined(__ARM_FEATURE_MATMUL_INT8)
        const int64x2_t low = (int64x2_t)sums[m / 2][2 * n], high = (int64x2_t)sums[m / 2][2 * n + 1];
        return (ivec)(m % 2 ? vzip2q_s64(low, high) : vzip1q_s64(low, high));
#else
        return (ivec)sums[m][n];
#endif
    }

  private:
#if defined(__ARM_FEATURE_MATMUL_INT8)
    int32x4_t sums[(M + 1) / 2][LANES] = {};  // of two rows and two columns
#else
    int32x4_t sums[M][2] = {};
#endif
};

// The next 64 bytes, by one instruction, which also moves the pointer: the compiler is not to see that one.
[[gnu::always_inline]] inline void load_four(const int8_t *&from, int8x16_t (&to)[4]) {
    const int8x16x4_t four = vld1q_s8_x4(from);
    from += 64;
    asm("" : "+r"(from));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) to[i] = four.val[i];
}
#endif
