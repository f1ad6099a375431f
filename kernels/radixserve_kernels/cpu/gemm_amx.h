// bfloat16 products by AMX: tiles of 16 rows of 32 numbers, summed in float32. Empty on other processors.
#pragma once

#include "gemm_bf16.h"

extern bool has_amx;  // whether the operating system lets this process use AMX

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512F__)
#define RADIXSERVE_AMX

struct TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t width[16] = {};
    uint8_t rows[16] = {};
};

// Purpose of the current tile configuration; the number of rows is added to it.
enum TileUse { FOR_PANEL = 0, FOR_TWO_PANELS = 100, FOR_QK = 200, FOR_PV = 300 };

inline thread_local int tile_use = 0;  // of this thread; 0: tiles are released

// Configures tiles 0 to 7: rows, and bytes of a row. The caller calls release_tiles at the end of its
// operation: between operations the tiles belong to any library of the process.
inline void configure_tiles(int use, const int (&rows)[8], const int (&bytes)[8]) {
    if (tile_use == use) return;
    tile_use = use;
    TileConfig config;
    for (int i = 0; i < 8; i++) {
        config.rows[i] = uint8_t(rows[i]);
        config.width[i] = uint16_t(rows[i] ? bytes[i] : 0);
    }
    // GCC assumes that only the first bytes are read, and would drop the writes of the others.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

inline void release_tiles() {
    if (!tile_use) return;
    tile_use = 0;
    _tile_release();
}

// Tiles 0 and 1 hold sums [16][PANEL] of the upper rows, 2 and 3 of the lower rows or of another panel.
inline void zero_upper() {
    _tile_zero(0);
    _tile_zero(1);
}
inline void zero_lower() {
    _tile_zero(2);
    _tile_zero(3);
}
inline void load_upper(const float *from, int64_t bytes) {
    _tile_loadd(0, from, bytes);
    _tile_loadd(1, from + 16, bytes);
}
inline void load_lower(const float *from, int64_t bytes) {
    _tile_loadd(2, from, bytes);
    _tile_loadd(3, from + 16, bytes);
}
inline void store_upper(float *to, int64_t bytes) {
    _tile_stored(0, to, bytes);
    _tile_stored(1, to + 16, bytes);
}
inline void store_lower(float *to, int64_t bytes) {
    _tile_stored(2, to, bytes);
    _tile_stored(3, to + 16, bytes);
}

// The interface of VectorF32.
class AmxBf16 {
  public:
    static constexpr int ROW_UNIT = BF16_ROW_UNIT;
    using Rows = Bf16Rows;
    static Rows read_rows(const bf16 *x, int64_t stride, int, int64_t) { return {x, stride}; }
    static int64_t row_bytes(int64_t depth) { return depth * int64_t(sizeof(bf16)); }

    template <Output OUT>
    static void gemm_into(const bf16 *x, int64_t stride, int rows, const Panels<bf16> &panels, float *out,
                             int64_t out_stride) {
        for (int panel = 0; panel < panels.count; panel++)
            panel_gemm(x, stride, rows, panels[panel], panels.depth, out + panel * PANEL, out_stride, OUT == Accumulate,
                          NoPrefetch(), [](int, int) {});
    }

    template <class Epilogue>
    static void packed_gemm(const Rows &of, int rows, const Panels<bf16> &panels, const OutputTile &tile,
                            Epilogue &&epilogue) {
        const bf16 *x = of.first;
        const int64_t stride = of.stride;
        if (rows <= FEW_ROWS) return few_rows_gemm(x, stride, rows, panels, epilogue);
        for_bf16_blocks(rows, panels, [&](int top, int count, int panel, float *sums) {
            // The next panel has as many lines as it is deep: each block of 32 rows fetches a share.
            const int lines = count > 32 && panel + 1 < panels.count ? (1024 + count - 1) / count : 0;
            Prefetcher<FETCH_ROWS> prefetcher{(const char *)(panels[panel] + panels.size), min(lines, 8)};
            prefetcher.writes(tile, top, count, panel);
            panel_gemm(x + top * stride, stride, count, panels[panel], panels.depth, sums, PANEL, false,
                          prefetcher,
                          [&](int first, int some) { epilogue(top + first, some, panel, sums + first * PANEL, PANEL); });
        });
        release_tiles();
    }

    // The sums of some rows over a panel, [rows][sums_stride], go on over `count` of k, a multiple of 32: those of its
    // vector n with x + firsts[n] and tiles [count / 2][16][2] of b.
    static void continue_sums(const bf16 *x, int64_t stride, int rows, const bf16 *b, const int32_t *firsts, int64_t count,
                              float *sums, int64_t sums_stride) {
        for (int top = 0; top < rows; top += 32, x += 32 * stride, sums += 32 * sums_stride) {
            const bool has_lower = rows - top > 16;
            float *below = sums + 16 * sums_stride;
            configure(min(rows - top, 32));
            load_upper(sums, sums_stride * 4);
            if (has_lower) load_lower(below, sums_stride * 4);
            for (int n = 0; n < 2; n++)
                for (int64_t k = 0; k < count; k += 32) {
                    const bf16 *from = x + firsts[n] + k;
                    _tile_loadd(6, b + (n * count + k) * 16, 64);
                    _tile_loadd(4, from, stride * 2);
                    if (has_lower) _tile_loadd(5, from + 16 * stride, stride * 2);
                    if (n == 0) _tile_dpbf16ps(0, 4, 6);
                    else _tile_dpbf16ps(1, 4, 6);
                    if (has_lower && n == 0) _tile_dpbf16ps(2, 5, 6);
                    else if (has_lower) _tile_dpbf16ps(3, 5, 6);
                }
            store_upper(sums, sums_stride * 4);
            if (has_lower) store_lower(below, sums_stride * 4);
        }
    }

  private:
    static constexpr int FEW_ROWS = 32;
    static constexpr int FETCH_ROWS = 2;         // output rows of a call of fetch
    static constexpr int64_t TILE_DEPTH = 256;  // rows of k of a panel that stay in the first-level cache

    // Tiles for up to 32 rows and one panel: rows of x in tiles 4 and 5, the panel in 6 and 7.
    static void configure(int rows) {
        const int upper = min(rows, 16), lower = rows - upper;
        configure_tiles(FOR_PANEL + rows, {upper, upper, lower, lower, upper, lower, 16, 16},
                        {64, 64, 64, 64, 64, 64, 64, 64});
    }

    // Up to 32 rows times one panel, to out[rows][PANEL], or added to it unless `starts`.
    template <class Fetch>
    static void tile_gemm(const bf16 *x, int64_t stride, int rows, const bf16 *panel, int64_t depth,
                             float *out, int64_t out_stride, bool starts, Fetch &prefetcher) {
        const int64_t bytes = stride * 2, out_bytes = out_stride * 4;
        float *out_below = out + 16 * out_stride;
        const bf16 *below = x + 16 * stride;
        starts ? zero_upper() : load_upper(out, out_bytes);
        if (rows > 16) {
            starts ? zero_lower() : load_lower(out_below, out_bytes);
            for (int64_t k = 0; k < depth; k += 32, panel += 32 * PANEL) {
                _tile_loadd(6, panel, 64);
                _tile_loadd(4, x + k, bytes);
                _tile_dpbf16ps(0, 4, 6);
                prefetcher.fetch();
                _tile_loadd(7, panel + 512, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, below + k, bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            store_lower(out_below, out_bytes);
        } else {
            for (int64_t k = 0; k < depth; k += 32, panel += 32 * PANEL) {
                _tile_loadd(6, panel, 64);
                _tile_loadd(4, x + k, bytes);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, panel + 512, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
        }
        store_upper(out, out_bytes);
    }

    // One panel times all rows; after(first, count) is called when the sums of some rows are complete.
    template <class Fetch, class After>
    static void panel_gemm(const bf16 *x, int64_t stride, int rows, const bf16 *panel, int64_t depth,
                              float *out, int64_t out_stride, bool adds, Fetch prefetcher, After &&after) {
        const int whole = rows / 32 * 32;
        for (int64_t k = 0; whole && k < depth; k += TILE_DEPTH)
            for (int row = 0; row < whole; row += 32) {
                configure(32);  // `after` may have used the tiles
                tile_gemm(x + row * stride + k, stride, 32, panel + k * PANEL, min(depth - k, TILE_DEPTH),
                             out + row * out_stride, out_stride, !adds && !k, prefetcher);
                if (k + TILE_DEPTH >= depth) after(row, 32);
            }
        if (whole == rows) return;
        configure(rows - whole);
        tile_gemm(x + whole * stride, stride, rows - whole, panel, depth, out + whole * out_stride,
                     out_stride, !adds, prefetcher);
        after(whole, rows - whole);
    }

    // -- up to FEW_ROWS rows: bound by reading the weight, see `prefetch`

    // x [rows][stride] in tiles, one after the other: [depth / 32][first 16 rows][32], then the rest alike.
    static void pack_rows(const bf16 *x, int64_t stride, int rows, int64_t depth, bf16 *tiles) {
        for (int top = 0; top < rows; top += 16, tiles += 16 * depth) {
            const int some = min(rows - top, 16);
            for (int m = 0; m < some; m++)
                for (int64_t k = 0; k < depth; k += 32)
                    memcpy((void *)(tiles + k * some + m * 32), x + (top + m) * stride + k, 64);
        }
    }

    // Up to 16 packed rows times two panels, out[2][rows][PANEL].
    static void two_panels(const bf16 *x, int rows, const bf16 *panel, int64_t panel_size, int64_t depth,
                           float *out) {
        configure_tiles(FOR_TWO_PANELS + rows, {rows, rows, rows, rows, rows, 0, 16, 16},
                        {64, 64, 64, 64, 64, 0, 64, 64});
        const bf16 *other = panel + panel_size;
        zero_upper();
        zero_lower();
        for (int64_t k = 0; k < depth; k += 32, x += 32 * rows, panel += 32 * PANEL, other += 32 * PANEL) {
            _tile_loadd(4, x, 64);
            prefetch<1024, 3>(panel + 512);
            _tile_loadd(6, panel, 64);
            _tile_dpbf16ps(0, 4, 6);
            prefetch<1024, 3>(panel + 1024);
            _tile_loadd(7, panel + 512, 64);
            _tile_dpbf16ps(1, 4, 7);
            prefetch<1024, 3>(other + 512);
            _tile_loadd(6, other, 64);
            _tile_dpbf16ps(2, 4, 6);
            prefetch<1024, 3>(other + 1024);
            _tile_loadd(7, other + 512, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        store_upper(out, PANEL * 4);
        store_lower(out + rows * PANEL, PANEL * 4);
    }

    // Up to 32 packed rows times one panel, out[rows][PANEL].
    static void one_panel(const bf16 *x, int rows, const bf16 *panel, int64_t depth, float *out) {
        const int upper = min(rows, 16), lower = rows - upper;
        const bf16 *below = x + 16 * depth;
        configure(rows);
        zero_upper();
        if (lower) zero_lower();
        for (int64_t k = 0; k < depth; k += 32, panel += 32 * PANEL) {
            prefetch<1024, 2>(panel + 1024);
            _tile_loadd(6, panel, 64);
            _tile_loadd(4, x + k * upper, 64);
            _tile_dpbf16ps(0, 4, 6);
            prefetch<1024, 2>(panel + 1024 + 512);
            _tile_loadd(7, panel + 512, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (!lower) continue;
            _tile_loadd(5, below + k * lower, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        store_upper(out, PANEL * 4);
        if (lower) store_lower(out + 16 * PANEL, PANEL * 4);
    }

    template <class Epilogue>
    static void few_rows_gemm(const bf16 *x, int64_t stride, int rows, const Panels<bf16> &panels,
                                 Epilogue &&epilogue) {
        alignas(64) float sums[FEW_ROWS * PANEL];
        bf16 *tiles = thread_scratch<bf16>(rows * panels.depth);
        pack_rows(x, stride, rows, panels.depth, tiles);
        const int at_once = rows <= 16 ? 2 : 1;
        for (int panel = 0; panel < panels.count; panel += at_once) {
            const int some = min(panels.count - panel, at_once);
            if (some == 2)
                two_panels(tiles, rows, panels[panel], panels.size, panels.depth, sums);
            else
                one_panel(tiles, rows, panels[panel], panels.depth, sums);
            for (int p = 0; p < some; p++) epilogue(0, rows, panel + p, sums + p * rows * PANEL, PANEL);
        }
        release_tiles();
    }
};
#else
inline void release_tiles() {}
#endif
