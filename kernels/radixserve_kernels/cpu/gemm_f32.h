// float32 products by vector instructions, on every processor, of weights in float32, bfloat16 or float16. Each sum
// runs over k in order, whatever the number of rows: a product row has the same bits in a batch of any size.
//
// 16-bit weights are widened: in registers where all rows fit into one pass over a panel, else a panel
// at a time into memory that stays in the cache.
#pragma once

#include "panels.h"

// Of rows in T and weights in W.
template <class T, class W = T> class VectorF32 {
  public:
    static constexpr int ROW_UNIT = ROWS;  // of a block of rows, see block_rows in layers.h

    // Bytes of a row of x that are in use at a time.
    static int64_t row_bytes(int64_t depth) { return depth / k_splits(depth) * int64_t(sizeof(float)); }

    // out[row][panel * PANEL ...] = x [rows][stride] times each panel; added to `out` with ADD.
    template <bool ADD>
    static void gemm_into(const float *x, int64_t stride, int rows, const Panels<float> &panels,
                             float *out, int64_t out_stride) {
        constexpr Output OUT = ADD ? Add : Store;
        NoPrefetch no_prefetch;
        int panel = 0;
        if (rows * 4 <= ROWS)  // too few rows to hide the latency of the sums: four panels at a time
            for (; panel + 4 <= panels.count; panel += 4)
                tile_rows<4, OUT>(rows, x, stride, panels[panel], panels.size, panels.depth,
                                  out + panel * PANEL, out_stride, no_prefetch);
        for (; panel < panels.count; panel++)
            for_row_blocks(rows, [&](int first, int some) {
                tile_rows<1, OUT>(some, x + first * stride, stride, panels[panel], panels.size, panels.depth,
                                  out + first * out_stride + panel * PANEL, out_stride, no_prefetch);
            });
    }

    // Calls epilogue(row, panel, low, high) with each row's sums over a panel's two vectors of columns.
    // With more than FEW_ROWS rows the memory at `tile` is prefetched for the epilogue's writes.
    template <class Epilogue>
    static void packed_gemm(const T *narrow_x, int64_t narrow_stride, int rows, const Panels<W> &panels,
                               const OutputTile &tile, Epilogue &&epilogue) {
        int64_t stride = narrow_stride;
        const float *x = widened_rows(narrow_x, stride, rows, panels.depth);
        if (rows <= FEW_ROWS) return few_rows_gemm(x, stride, rows, panels, epilogue);
        const int blocks = (rows + ROWS - 1) / ROWS;
        const int panel_lines = FETCH_DEPTH * PANEL * int(sizeof(W)) / 64;
        const int64_t depth = panels.depth;
        // Panels [start, end), rows of K [k, k + deep); partial: sums [panel][rows][PANEL], if K is split.
        auto part = [&](int start, int end, int64_t k, int64_t deep, float *partial) {
            alignas(64) float block_sums[ROWS * PANEL];
            const bool is_last = k + deep == depth;
            for (int panel = start; panel < end; panel++) {
                const W *narrow = panels[panel] + k * PANEL;
                const float *from = widened_panel(narrow, deep);
                Prefetcher<FETCH_ROWS> prefetcher{(const char *)(narrow + panels.size)};
                if (panel + 1 < end) prefetcher.lines = (panel_lines + blocks - 1) / blocks;
                for_row_blocks(rows, [&](int first, int some) {
                    float *sums = partial ? partial + (int64_t(panel - start) * rows + first) * PANEL : block_sums;
                    const OutputTile next{(char *)(sums + some * PANEL), sizeof(float) * PANEL,
                                          sizeof(float) * PANEL};
                    is_last ? prefetcher.writes(tile, first, some, panel) : prefetcher.writes(next, 0, some, 0);
                    auto multiply = [&](auto output) {
                        tile_rows<1, output>(some, x + first * stride + k, stride, from, 0, deep, sums, PANEL,
                                             prefetcher);
                    };
                    k ? multiply(OutputConstant<Accumulate>()) : multiply(OutputConstant<Store>());
                    for (int m = 0; m < some && is_last; m++)
                        epilogue(first + m, panel, load(sums + m * PANEL), load(sums + m * PANEL + LANES));
                });
            }
        };
        const int64_t splits = k_splits(depth);
        if (splits == 1) return part(0, panels.count, 0, depth, nullptr);
        float *partial = thread_scratch<float>(int64_t(rows) * min(panels.count, SPLIT_PANELS) * PANEL);
        for (int start = 0; start < panels.count; start += SPLIT_PANELS)
            for (int64_t i = 0, k = 0, next; i < splits; i++, k = next) {
                next = i + 1 == splits ? depth : depth * (i + 1) / splits / DEPTH * DEPTH;
                part(start, min(panels.count, start + SPLIT_PANELS), k, next - k, partial);
            }
    }

  private:
    static constexpr int STEPS = 6;          // of k, without a branch
    static constexpr int BOUND_BY_READS = 4;  // rows whose arithmetic takes less time than reading the panel
    static constexpr int FETCH_DEPTH = 36;   // rows of k between two calls of fetch
    static constexpr int FETCH_ROWS = 2;     // output rows of a call of fetch
    // Up to here a panel is read once, from memory: 16 bits are widened in registers.
    static constexpr int FEW_ROWS = sizeof(W) == 2 && LANES != 16 ? ROWS / 2 : ROWS;
    static constexpr int SPLIT_PANELS = 128;  // panels whose partial sums are held at a time

    // Number of parts that K is cut into, each multiplied with all panels before the next: a shallower
    // part leaves room for more rows of x in the cache.
    static int64_t k_splits(int64_t depth) { return depth < 2048 ? 1 : depth / 768; }

    // -- 16 bits to float32; float32 stays where it is

    // x [rows][depth]; `stride` becomes that of the result.
    static const float *widened_rows(const T *x, int64_t &stride, int rows, int64_t depth) {
        if constexpr (sizeof(T) == 4) {
            return x;
        } else {
            static thread_local Scratch scratch;
            const int64_t size = depth + 16;  // an odd number of cache lines
            float *to = scratch.get<float>(rows * size);
            for (int m = 0; m < rows; m++) widen(x + m * stride, depth, to + m * size);
            stride = size;
            return to;
        }
    }

    // Rows of K of a panel from `panel` on, [depth][PANEL].
    static const float *widened_panel(const W *panel, int64_t depth) {
        if constexpr (sizeof(W) == 4) {
            return panel;
        } else {
            static thread_local Scratch scratch;
            float *to = scratch.get<float>(depth * PANEL);
            widen_panel(panel, depth, to);
            return to;
        }
    }

    static void widen_panel(const half *panel, int64_t depth, float *to) {
        for (int64_t i = 0; i < depth * PANEL; i += LANES) store(to + i, load(panel + i));
    }
    static void widen_panel(const bf16 *panel, int64_t depth, float *to) {
        for (int64_t k = 0; k < depth; k += DEPTH, panel += DEPTH * PANEL)
            for (int i = 0; i < DEPTH; i += 2, to += 2 * PANEL)
                for (int n = 0; n < PANEL; n += LANES) {
                    const uvec pairs = load_pairs(panel + panel_offset<bf16>(i, n));
                    store(to + n, low_halves(pairs));
                    store(to + PANEL + n, high_halves(pairs));
                }
    }

    // M rows of x [M][stride] times P panels, to out[M][P * PANEL].
    template <int M, int P, Output OUT, class Number, class Fetch>
    static void tile(const float *x, int64_t stride, const Number *panel, int64_t panel_size, int64_t depth,
                     float *out, int64_t out_stride, Fetch &caller_prefetcher) {
        constexpr int N = 2 * P;
        constexpr bool FETCHES = std::is_same<Fetch, Prefetcher<FETCH_ROWS>>::value;
        constexpr bool READS = std::is_same<Fetch, PanelPrefetch>::value;
        Fetch prefetcher = caller_prefetcher;  // a copy stays in registers
        vec sums[M][N] = {};
        if (OUT == Accumulate)
            for (int m = 0; m < M; m++)
                for (int n = 0; n < N; n++) sums[m][n] = load(out + m * out_stride + n * LANES);
        const float *three_rows[(M + 2) / 3];  // row m is three_rows[m / 3][m % 3 * stride]: no pointer spills
        for (int i = 0; i < (M + 2) / 3; i++) three_rows[i] = x + 3 * i * stride;
        for (int64_t k = 0; k < depth;) {
            prefetcher.fetch();
            const int64_t end = FETCHES ? min<int64_t>(k + FETCH_DEPTH, depth) : depth;
            auto step = [&](int i) {
                vec w[N];
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    const Number *from = panel + (n / 2) * panel_size + i * PANEL + (n % 2) * LANES;
                    if (READS) prefetch_panel<M <= BOUND_BY_READS, LANES * int(sizeof(Number))>(from);
                    w[n] = load(from);
                }
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    vec one = broadcast(three_rows[m / 3][m % 3 * stride + i]);
#pragma GCC unroll 8
                    for (int n = 0; n < N; n++)
                        sums[m][n] = FETCHES || READS ? fmadd(sums[m][n], one, w[n]) : sums[m][n] + one * w[n];
                }
            };
            auto advance = [&](int steps) {
#pragma GCC unroll 4
                for (int i = 0; i < (M + 2) / 3; i++) three_rows[i] += steps;
                panel += steps * PANEL, k += steps;
            };
            for (; (FETCHES || READS) && k + STEPS <= end; advance(STEPS)) {
#pragma GCC unroll 6
                for (int i = 0; i < STEPS; i++) step(i);
            }
            for (; k < end; advance(1)) step(0);
        }
        caller_prefetcher = prefetcher;
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                float *to = out + m * out_stride + n * LANES;
                store(to, OUT == Add ? load(to) + sums[m][n] : sums[m][n]);
            }
    }

    // `tile` for up to ROWS / P rows.
    template <int P, Output OUT, class Number, class Fetch>
    static void tile_rows(int rows, const float *x, int64_t stride, const Number *panel, int64_t panel_size,
                          int64_t depth, float *out, int64_t out_stride, Fetch &prefetcher) {
        with_row_count<ROWS / P>(rows, [&](auto count) {
            tile<count, P, OUT>(x, stride, panel, panel_size, depth, out, out_stride, prefetcher);
        });
    }

    // `tile` for bfloat16 panels, which are widened in registers.
    template <int M, int P>
    static void widening_tile(const float *x, int64_t stride, const bf16 *panel, int64_t panel_size, int64_t depth,
                            float *out, int64_t out_stride) {
        constexpr int N = 2 * P;
        vec sums[M][N] = {};
        for (int64_t k = 0; k < depth; k += DEPTH, panel += DEPTH * PANEL)
            for (int i = 0; i < DEPTH; i += 2, x += 2) {
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    const bf16 *from = panel + (n / 2) * panel_size + panel_offset<bf16>(i, n % 2 * LANES);
                    if (n % 2 == 0 || LANES == 16) prefetch<64, 3>(from + 1024);
                    const uvec pairs = load_pairs(from);
                    const vec low = low_halves(pairs), high = high_halves(pairs);
#pragma GCC unroll 12
                    for (int m = 0; m < M; m++) {
                        sums[m][n] += broadcast(x[m * stride]) * low;
                        sums[m][n] += broadcast(x[m * stride + 1]) * high;
                    }
                }
            }
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) store(out + m * out_stride + n * LANES, sums[m][n]);
    }

    // P panels for all rows, out[rows][P * PANEL]. Panels of vectors one at a time: what is read is then one
    // stream, which goes on from panel to panel.
    template <int P, class Number>
    static void few_rows_panels(const float *x, int64_t stride, int rows, const Number *panel, int64_t panel_size,
                                int64_t depth, float *out) {
        PanelPrefetch panel_prefetch;
        tile_rows<P, Store>(rows, x, stride, panel, panel_size, depth, out, P * PANEL, panel_prefetch);
    }

    template <int P>
    static void few_rows_panels(const float *x, int64_t stride, int rows, const bf16 *panel, int64_t panel_size,
                                int64_t depth, float *out) {
        with_row_count<FEW_ROWS>(rows, [&](auto count) {
            if constexpr (count * P <= ROWS)
                widening_tile<count, P>(x, stride, panel, panel_size, depth, out, P * PANEL);
        });
    }

    // See packed_gemm, for up to FEW_ROWS rows.
    template <class Epilogue>
    static void few_rows_gemm(const float *x, int64_t stride, int rows, const Panels<W> &panels,
                                 Epilogue &&epilogue) {
        alignas(64) float sums[ROWS * PANEL];
        constexpr bool IS_WIDENED = std::is_same<W, bf16>::value;  // such panels are read several at a time
        const int most = !IS_WIDENED ? 1 : rows * 4 <= ROWS ? 4 : rows * 2 <= ROWS ? 2 : 1;
        for (int panel = 0; panel < panels.count;) {
            const W *from = panels[panel];
            const int some = panels.count - panel >= most ? most : 1;
            auto multiply = [&](auto count) {
                few_rows_panels<count>(x, stride, rows, from, panels.size, panels.depth, sums);
            };
            if (some == 1)
                multiply(std::integral_constant<int, 1>());
            else if constexpr (IS_WIDENED)
                some == 4 ? multiply(std::integral_constant<int, 4>()) : multiply(std::integral_constant<int, 2>());
            for (int p = 0; p < some; p++, panel++)
                for (int m = 0; m < rows; m++) {
                    const float *row = sums + (m * some + p) * PANEL;
                    epilogue(m, panel, load(row), load(row + LANES));
                }
        }
    }
};
