// Products of bfloat16 weights by arm64's instructions for them: two rows times two columns and four of k at a time, and
// a row that is left by the dot product of pairs. Both add the pairs of a column in the order of k, so a row has the
// same bits either way. Empty on other processors.
#pragma once

#include "panels.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define RADIXSERVE_BF16_WEIGHTS

// The interface of VectorF32, of products with weights.
class MatrixBf16 {
  public:
    static constexpr int ROW_UNIT = ROWS;
    struct Rows {
        const bf16 *first;
        int64_t stride;
    };
    static Rows read_rows(const bf16 *x, int64_t stride, int, int64_t) { return {x, stride}; }
    static int64_t row_bytes(int64_t depth) { return depth * int64_t(sizeof(bf16)); }

    template <class Epilogue>
    static void packed_gemm(const Rows &x, int rows, const Panels<bf16> &panels, const OutputTile &,
                            Epilogue &&epilogue) {
        for (int panel = 0; panel < panels.count; panel++)
            for_row_blocks(rows, [&](int first, int some) {
                with_row_count<ROWS>(some, [&](auto count) {
                    vec sums[count][2];
                    first == 0 ? tile<count, PanelPrefetch>(x, 0, panels[panel], panels.depth, sums)
                               : tile<count, NoPrefetch>(x, first, panels[panel], panels.depth, sums);
                    epilogue(first, int(count), panel, (float *)sums, PANEL);
                });
            });
    }

  private:
    static bfloat16x8_t load_8(const bf16 *from) { return vreinterpretq_bf16_u16(vld1q_u16((const uint16_t *)from)); }
    static bfloat16x8_t zip(bfloat16x8_t a, bfloat16x8_t b, bool is_upper) {
        const uint32x4_t low = (uint32x4_t)a, high = (uint32x4_t)b;
        return (bfloat16x8_t)(is_upper ? vzip2q_u32(low, high) : vzip1q_u32(low, high));
    }

    // M rows of x, from `first` on, times one panel.
    template <int M, class Fetch>
    static void tile(const Rows &x, int first, const bf16 *panel, int64_t depth, vec (&sums)[M][2]) {
        const bf16 *row = x.first + first * x.stride;
        float32x4_t pairs[M / 2 + 1][LANES] = {};  // of two rows and two columns; last of them the row that is left
        for (int64_t k = 0; k < depth; k += 4, row += 4, panel += 4 * PANEL) {
            if (std::is_same<Fetch, PanelPrefetch>::value) prefetch_panel<true, 64>(panel);
            bfloat16x8_t w[2][2];  // [k and k + 1, k + 2 and k + 3][half of the columns]
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) w[i / 2][i % 2] = load_8(panel + i * 2 * LANES);
#pragma GCC unroll 6
            for (int m = 0; m + 1 < M; m += 2) {
                const uint16x4_t upper = vld1_u16((const uint16_t *)(row + m * x.stride));
                const uint16x4_t lower = vld1_u16((const uint16_t *)(row + (m + 1) * x.stride));
                const bfloat16x8_t rows = (bfloat16x8_t)vcombine_u16(upper, lower);
#pragma GCC unroll 4
                for (int i = 0; i < LANES; i++)
                    pairs[m / 2][i] = vbfmmlaq_f32(pairs[m / 2][i], rows, zip(w[0][i / 2], w[1][i / 2], i % 2));
            }
            if constexpr (M % 2) {
                const bfloat16x4_t last = (bfloat16x4_t)vld1_u16((const uint16_t *)(row + (M - 1) * x.stride));
#pragma GCC unroll 2
                for (int n = 0; n < 2; n++) {
                    pairs[M / 2][n] = vbfdotq_lane_f32(pairs[M / 2][n], w[0][n], last, 0);
                    pairs[M / 2][n] = vbfdotq_lane_f32(pairs[M / 2][n], w[1][n], last, 1);
                }
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                const float64x2_t low = (float64x2_t)pairs[m / 2][2 * n], high = (float64x2_t)pairs[m / 2][2 * n + 1];
                sums[m][n] = m == M - 1 && M % 2 ? (vec)pairs[m / 2][n]
                                                 : (vec)(m % 2 ? vzip2q_f64(low, high) : vzip1q_f64(low, high));
            }
    }
};
#endif
