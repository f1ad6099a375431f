// float32 products by vector instructions, on every processor, of weights in float32, bfloat16 or float16. Each sum
// runs over k in order, whatever the number of rows: a product row has the same bits in a batch of any size.
//
// 16-bit weights are widened: in registers where all rows fit into one pass over a panel, else a panel
// at a time into memory that stays in the cache.
#pragma once

#include "tiles_f32.h"

// Of rows in T and weights in W.
template <class T, class W = T> class VectorF32 {
  public:
    static constexpr int ROW_UNIT = ROWS;  // of a block of rows, see block_rows in layers.h

    // Rows of x in float32, [][stride].
    struct Rows {
        const float *first;
        int64_t stride;
    };
    // `rows` rows of x [][stride], in memory of this thread until the next call, or where they are.
    static Rows read_rows(const T *x, int64_t stride, int rows, int64_t depth) {
        if constexpr (sizeof(T) == 4) {
            return {x, stride};
        } else {
            static thread_local Scratch scratch;
            const int64_t size = depth + 16;  // an odd number of cache lines
            float *to = scratch.get<float>(rows * size);
            for (int m = 0; m < rows; m++) convert(x + m * stride, depth, to + m * size);
            return {to, size};
        }
    }

    // Bytes of a row of x that are in use at a time.
    static int64_t row_bytes(int64_t depth) { return depth / k_splits(depth) * int64_t(sizeof(float)); }

    // out[row][panel * PANEL ...] = x [rows][stride] times each panel, or with Accumulate its sums go on.
    template <Output OUT>
    static void gemm_into(const float *x, int64_t stride, int rows, const Panels<float> &panels,
                             float *out, int64_t out_stride) {
        int panel = 0;
        if (rows * 4 <= ROWS)  // too few rows to hide the latency of the sums: four panels at a time
            for (; panel + 4 <= panels.count; panel += 4)
                tile_rows_f32<4>(OUT, rows, x, stride, panels[panel], panels.size, panels.depth, out + panel * PANEL,
                                 out_stride);
        for (; panel < panels.count; panel++)
            for_row_blocks(rows, [&](int first, int some) {
                tile_rows_f32<1>(OUT, some, x + first * stride, stride, panels[panel], panels.size, panels.depth,
                                 out + first * out_stride + panel * PANEL, out_stride);
            });
    }

    // Calls epilogue(first row, rows, panel, sums, stride) for each panel with the sums of some rows, [rows][stride],
    // which it may change.
    // With more than FEW_ROWS rows the memory at `tile` is prefetched for the epilogue's writes.
    template <class Epilogue>
    static void packed_gemm(const Rows &of, int rows, const Panels<W> &panels, const OutputTile &tile,
                            Epilogue &&epilogue) {
        const float *x = of.first;
        const int64_t stride = of.stride;
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
                PrefetcherF32 prefetcher{(const char *)(narrow + panels.size)};
                if (panel + 1 < end) prefetcher.lines = (panel_lines + blocks - 1) / blocks;
                for_row_blocks(rows, [&](int first, int some) {
                    float *sums = partial ? partial + (int64_t(panel - start) * rows + first) * PANEL : block_sums;
                    const OutputTile next{(char *)(sums + some * PANEL), sizeof(float) * PANEL,
                                          sizeof(float) * PANEL};
                    is_last ? prefetcher.writes(tile, first, some, panel) : prefetcher.writes(next, 0, some, 0);
                    tile_rows_f32(k ? Accumulate : Store, some, x + first * stride + k, stride, from, deep, sums,
                                  prefetcher);
                    if (is_last) epilogue(first, some, panel, sums, PANEL);
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
    static constexpr int FEW_ROWS = few_rows<W>();
    static constexpr int SPLIT_PANELS = 128;  // panels whose partial sums are held at a time

    // Number of parts that K is cut into, each multiplied with all panels before the next: a shallower
    // part leaves room for more rows of x in the cache.
    static int64_t k_splits(int64_t depth) { return depth < 2048 ? 1 : depth / 768; }

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

    // See packed_gemm, for up to FEW_ROWS rows.
    template <class Epilogue>
    static void few_rows_gemm(const float *x, int64_t stride, int rows, const Panels<W> &panels,
                                 Epilogue &&epilogue) {
        alignas(64) float sums[ROWS * PANEL];
        constexpr bool IS_WIDENED = std::is_same<W, bf16>::value;  // such panels are read several at a time
        const int most = !IS_WIDENED ? 1 : rows * 4 <= ROWS ? 4 : rows * 2 <= ROWS ? 2 : 1;
        for (int panel = 0; panel < panels.count;) {
            const W *from = panels[panel];
            const int left = min(panels.count - panel, most), some = left == 3 ? 2 : left;
            auto multiply = [&](auto count) {
                few_rows_panels_f32<count>(x, stride, rows, from, panels.size, panels.depth, sums);
            };
            if (some == 1)
                multiply(std::integral_constant<int, 1>());
            else if constexpr (IS_WIDENED)
                some == 4 ? multiply(std::integral_constant<int, 4>()) : multiply(std::integral_constant<int, 2>());
            for (int p = 0; p < some; p++, panel++) epilogue(0, rows, panel, sums + p * PANEL, some * PANEL);
        }
    }
};
