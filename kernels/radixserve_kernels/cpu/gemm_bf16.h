// bfloat16 products by AVX-512's dot product of pairs, summed in float32. Empty on other processors, and on those
// where widening to float32 is faster: RADIXSERVE_WIDEN_BF16.
#pragma once

#include "panels.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__) && !defined(RADIXSERVE_WIDEN_BF16)
#define RADIXSERVE_BF16

constexpr int BF16_ROW_UNIT = 96;      // of a block of rows, see block_rows in layers.h
constexpr int BF16_BOUND_BY_READS = 3;  // rows whose arithmetic takes less time than reading the panel
constexpr int BF16_SUM_ROWS = 768;     // rows whose sums over one panel are held at a time

// Rows of x [][stride].
struct Bf16Rows {
    const bf16 *first;
    int64_t stride;
};

// Calls block(first row, number of rows, panel, sums [BF16_SUM_ROWS][PANEL]) for every panel.
template <class Block> inline void for_bf16_blocks(int rows, const Panels<bf16> &panels, Block &&block) {
    alignas(64) static thread_local float sums[BF16_SUM_ROWS * PANEL];
    for (int top = 0; top < rows; top += BF16_SUM_ROWS)
        for (int panel = 0; panel < panels.count; panel++)
            block(top, min(rows - top, BF16_SUM_ROWS), panel, sums);
}

// The interface of VectorF32.
class VectorBf16 {
  public:
    static constexpr int ROW_UNIT = BF16_ROW_UNIT;
    using Rows = Bf16Rows;
    static Rows read_rows(const bf16 *x, int64_t stride, int, int64_t) { return {x, stride}; }
    static int64_t row_bytes(int64_t depth) { return depth * int64_t(sizeof(bf16)); }

    template <Output OUT>
    static void gemm_into(const bf16 *x, int64_t stride, int rows, const Panels<bf16> &panels, float *out,
                             int64_t out_stride) {
        NoPrefetch no_prefetch;
        for (int panel = 0; panel < panels.count; panel++)
            for_row_blocks(rows, [&](int first, int some) {
                tile_rows<OUT>(some, x + first * stride, stride, panels, panel, out + panel * PANEL + first * out_stride,
                               out_stride, no_prefetch);
            });
    }

    template <class Epilogue>
    static void packed_gemm(const Rows &of, int rows, const Panels<bf16> &panels, const OutputTile &tile,
                            Epilogue &&epilogue) {
        const bf16 *x = of.first;
        const int64_t stride = of.stride;
        if (rows <= ROWS) return few_rows_gemm(x, stride, rows, panels, epilogue);
        for_bf16_blocks(rows, panels, [&](int top, int count, int panel, float *sums) {
            Prefetcher<1> prefetcher{(const char *)(panels[panel] + panels.size)};
            const int blocks = (count + ROWS - 1) / ROWS, lines = 32 * PANEL * int(sizeof(bf16)) / 64;
            if (panel + 1 < panels.count) prefetcher.lines = (lines + blocks - 1) / blocks;
            for_row_blocks(count, [&](int first, int some) {
                prefetcher.writes(tile, top + first, some, panel);
                tile_rows<Store>(some, x + (top + first) * stride, stride, panels, panel, sums + first * PANEL, PANEL,
                                 prefetcher);
                epilogue(top + first, some, panel, sums + first * PANEL, PANEL);
            });
        });
    }

  private:
    // See packed_gemm, for one block of rows: panels are read once, from memory.
    template <class Epilogue>
    static void few_rows_gemm(const bf16 *x, int64_t stride, int rows, const Panels<bf16> &panels,
                              Epilogue &&epilogue) {
        alignas(64) float sums[ROWS * PANEL];
        PanelPrefetch prefetcher;
        for (int panel = 0; panel < panels.count; panel++) {
            tile_rows<Store>(rows, x, stride, panels, panel, sums, PANEL, prefetcher);
            epilogue(0, rows, panel, sums, PANEL);
        }
    }

    // `panel_sums` in the order of addresses, for rows whose arithmetic takes less time than reading the panel: the
    // two vectors of a pair of k lie 1 KiB apart, which the processor's own prefetcher does not follow.
    template <int M, int N>
    static void panel_sums_in_order(const bf16 *x, int64_t stride, const bf16 *panel, int64_t step, int64_t depth,
                                    __m512 (&sums)[M][2]) {
        for (int64_t k = 0; k < depth; k += 32, panel += N == 2 ? 0 : step - 32 * LANES)
#pragma GCC unroll 2
            for (int n = 0; n < N; n++)
#pragma GCC unroll 4
                for (int pair = 0; pair < 16; pair++, panel += 32) {
                    prefetch<64, 2>((const char *)panel + 1536);
                    const __m512bh w = (__m512bh)_mm512_loadu_si512(panel);
#pragma GCC unroll 4
                    for (int m = 0; m < M; m++)
                        sums[m][n] = _mm512_dpbf16_ps(sums[m][n], both_of(x + m * stride + k + 2 * pair), w);
                }
    }

    // A pair of k in all lanes.
    static __m512bh both_of(const bf16 *x) {
        int32_t two;
        memcpy(&two, x, 4);
        return (__m512bh)_mm512_set1_epi32(two);
    }

    // M rows of x times N vectors of one panel. step: numbers of the panel for 32 of k, where N is 1.
    template <int M, int N, class Fetch>
    static void panel_sums(const bf16 *x, int64_t stride, const bf16 *panel, int64_t step, int64_t depth,
                           __m512 (&sums)[M][2], Fetch &prefetcher) {
        for (int64_t k = 0; k < depth; k += 32, panel += N == 2 ? 32 * PANEL : step) {
            prefetcher.fetch();
            for (int pair = 0; pair < 16; pair++) {
                if (std::is_same<Fetch, PanelPrefetch>::value) {
                    prefetch_panel<false, 64>(panel + pair * 32);
                    if (N == 2) prefetch_panel<false, 64>(panel + 512 + pair * 32);
                }
                __m512bh low = (__m512bh)_mm512_loadu_si512(panel + pair * 32);
                __m512bh high = (__m512bh)_mm512_loadu_si512(panel + 512 + pair * 32);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    const __m512bh both = both_of(x + m * stride + k + 2 * pair);
                    sums[m][0] = _mm512_dpbf16_ps(sums[m][0], both, low);
                    if (N == 2) sums[m][1] = _mm512_dpbf16_ps(sums[m][1], both, high);
                }
            }
        }
    }

    // M rows of x times one panel, to out[M][PANEL]. N: vectors of the panel with columns; the other one's sums are zeros.
    template <int M, int N, Output OUT, class Fetch>
    static void tile(const bf16 *x, int64_t stride, const bf16 *panel, int64_t step, int64_t depth, float *out,
                     int64_t out_stride, Fetch &prefetcher) {
        __m512 sums[M][2] = {};
#pragma GCC unroll 12
        for (int m = 0; OUT == Accumulate && m < M; m++)
            for (int n = 0; n < 2; n++) sums[m][n] = (__m512)load(out + m * out_stride + n * LANES);
        if constexpr (M <= BF16_BOUND_BY_READS && std::is_same<Fetch, PanelPrefetch>::value)
            panel_sums_in_order<M, N>(x, stride, panel, step, depth, sums);
        else
            panel_sums<M, N>(x, stride, panel, step, depth, sums, prefetcher);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
            for (int n = 0; n < 2; n++) store(out + m * out_stride + n * LANES, (vec)sums[m][n]);
    }

    template <Output OUT, class Fetch>
    static void tile_rows(int rows, const bf16 *x, int64_t stride, const Panels<bf16> &panels, int panel, float *out,
                          int64_t out_stride, Fetch &prefetcher) {
        const bf16 *from = panels[panel];
        const bool is_half = OUT == Store && panels.is_half(panel);
        const int64_t step = is_half && panels.is_last_compact ? 32 * LANES : 32 * PANEL;
        with_row_count<ROWS>(rows, [&](auto count) {
            if (is_half) tile<count, 1, OUT>(x, stride, from, step, panels.depth, out, out_stride, prefetcher);
            else tile<count, 2, OUT>(x, stride, from, step, panels.depth, out, out_stride, prefetcher);
        });
    }
};
#endif
