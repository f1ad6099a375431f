// Matrix products with a weight that was laid out once: x [M, K] times W [N, K] transposed.
//
// A weight lies in panels of PANEL of its N rows, padded with zeros:
//   float   panel[k][PANEL]
//   bf16    panel[k / 32][PANEL / 16][16][16][2]: tiles of 16 pairs of k by 16 columns, which AMX
//           takes as they are and AVX-512's bfloat16 dot product row by row
// A row of the result depends on its own row of x alone, to the bit: every sum runs over k in the
// same order however many rows there are.
#pragma once

#include <type_traits>

#include "crew.h"

constexpr int PANEL = 2 * LANES;  // columns
constexpr int ROWS = LANES == 16 ? 12 : 4;  // of x in one pass over a panel: what the registers hold
constexpr int DEPTH = 32;  // k of a bf16 panel is padded to a multiple of it

#if defined(__AVX512BF16__) && defined(__AVX512F__)
constexpr bool HAS_BF16 = true;
#if defined(__AMX_BF16__)
#define RADIXSERVE_AMX
#endif
#else
constexpr bool HAS_BF16 = false;
#endif

extern bool has_tiles;  // whether the system lets this process use AMX

template <class T> inline int64_t padded_depth(int64_t k);
template <> inline int64_t padded_depth<float>(int64_t k) { return k; }
template <> inline int64_t padded_depth<bf16>(int64_t k) { return round_up(k, DEPTH); }

// Where element k of column n of a panel lies.
template <class T> inline int64_t place(int64_t k, int n);
template <> inline int64_t place<float>(int64_t k, int n) { return k * PANEL + n; }
template <> inline int64_t place<bf16>(int64_t k, int n) {
    return (k / 32) * (32 * PANEL) + (n / 16) * 512 + (k % 32 / 2) * 32 + (n % 16) * 2 + k % 2;
}

inline void release_tiles();

// A case for each number of rows that one pass may have.
#define RADIXSERVE_ROWS                                                                            \
    RADIXSERVE_CASE(1) RADIXSERVE_CASE(2) RADIXSERVE_CASE(3) RADIXSERVE_CASE(4)                     \
    RADIXSERVE_CASE(5) RADIXSERVE_CASE(6) RADIXSERVE_CASE(7) RADIXSERVE_CASE(8)                     \
    RADIXSERVE_CASE(9) RADIXSERVE_CASE(10) RADIXSERVE_CASE(11) RADIXSERVE_CASE(12)

// Where the results of panel p go: row m's begin at first + m * stride + p * size, all in bytes.
struct Place {
    char *first;
    int64_t stride, size;
};

// Lines of memory that are asked for one by one during a product, to be there when their turn comes:
// `lines` of what lies at `next` with each call, and AT_ONCE of `rows` that will be written. Asked for in
// a burst they would hold up the loads of the product.
template <int AT_ONCE> struct Ahead {
    const char *next = nullptr;
    int lines = 0;
    char *row = nullptr;
    int64_t row_stride = 0, row_bytes = 0;
    int rows = 0;

    // What `count` rows from `first` on will write of a panel.
    void writes(const Place &place, int64_t first, int count, int panel) {
        row = place.first + first * place.stride + panel * place.size;
        row_stride = place.stride, row_bytes = place.size, rows = count;
    }
    void fetch() {
        for (int i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 2
        for (int m = 0; m < AT_ONCE && rows > 0; m++, row += row_stride, rows--)
            for (int64_t i = 0; i < row_bytes; i += 64) __builtin_prefetch(row + i, 1);
    }
};

// Nothing to ask for: a product of what is at hand.
struct Nothing {
    void fetch() {}
};

// The panels themselves, a little ahead of where they are read: see ask_ahead.
struct Near {
    void fetch() {}
};

// What becomes of what lies where a product is put: replaced; added to; or the sums go on from it, which
// to the bit is one longer sum.
enum Start { REPLACES, ADDS_TO, GOES_ON };

// Asks for BYTES at `from`, one to two thousand bytes behind what is being read: for few rows what
// counts is to read the weight as fast as the memory gives it, and farther ahead it gives less.
template <int BYTES, int LEVEL> inline void ask_ahead(const void *from) {
#pragma GCC unroll 32
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch((const char *)from + i, 0, LEVEL);
}

// -- float --------------------------------------------------------------------------------------

constexpr int STEPS = 6;  // of k, without a branch
constexpr int FETCH_DEPTH = 36;  // between two calls of fetch, each of which interrupts the arithmetic
constexpr int FETCH_ROWS = 2;  // with each: early enough where a row of x is short

// M rows with P panels, to out[M][P * PANEL]. Row m of x is at
// three_rows[m / 3][m % 3 * stride]: few pointers, so that none is spilled.
template <int M, int P, Start START, class Fetch>
inline void float_tile(const float *x, int64_t stride, const float *panel, int64_t panel_size,
                       int64_t depth, float *out, int64_t out_stride, Fetch &lent) {
    constexpr int N = 2 * P;
    constexpr bool FETCHES = std::is_same<Fetch, Ahead<FETCH_ROWS>>::value;
    constexpr bool NEAR = std::is_same<Fetch, Near>::value;
    Fetch ahead = lent;  // in registers
    vec sums[M][N] = {};
    if (START == GOES_ON)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) sums[m][n] = load(out + m * out_stride + n * LANES);
    const float *three_rows[(M + 2) / 3];
    for (int i = 0; i < (M + 2) / 3; i++) three_rows[i] = x + 3 * i * stride;
    for (int64_t k = 0; k < depth;) {
        ahead.fetch();
        const int64_t end = FETCHES ? least<int64_t>(k + FETCH_DEPTH, depth) : depth;
        auto step = [&](int i) {
            vec w[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                const float *from = panel + (n / 2) * panel_size + i * PANEL + (n % 2) * LANES;
                if (NEAR) ask_ahead<LANES * 4, 3>(from + 512);
                w[n] = load(from);
            }
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                vec one = fill(three_rows[m / 3][m % 3 * stride + i]);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    sums[m][n] = FETCHES ? plus_product(sums[m][n], one, w[n]) : sums[m][n] + one * w[n];
            }
        };
        auto advance = [&](int steps) {
#pragma GCC unroll 4
            for (int i = 0; i < (M + 2) / 3; i++) three_rows[i] += steps;
            panel += steps * PANEL, k += steps;
        };
        for (; FETCHES && k + STEPS <= end; advance(STEPS)) {
#pragma GCC unroll 6
            for (int i = 0; i < STEPS; i++) step(i);
        }
        for (; k < end; advance(1)) step(0);
    }
    lent = ahead;
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            float *to = out + m * out_stride + n * LANES;
            store(to, START == ADDS_TO ? load(to) + sums[m][n] : sums[m][n]);
        }
}

template <int P, Start START, class Fetch>
inline void float_rows(int rows, const float *x, int64_t stride, const float *panel, int64_t panel_size,
                       int64_t depth, float *out, int64_t out_stride, Fetch &ahead) {
    switch (rows) {
#define RADIXSERVE_CASE(M)                                                                         \
    case M:                                                                                        \
        if constexpr (M * P <= ROWS)                                                               \
            float_tile<M, P, START>(x, stride, panel, panel_size, depth, out, out_stride, ahead);   \
        break;
        RADIXSERVE_ROWS
#undef RADIXSERVE_CASE
    }
}

// Rows in blocks of nearly equal size, at most `most`, each calling block(first, count).
template <class Block> inline void in_blocks(int rows, Block &&block, int most = ROWS) {
    const int blocks = (rows + most - 1) / most;
    for (int b = 0; b < blocks; b++) {
        const int first = int(int64_t(rows) * b / blocks), last = int(int64_t(rows) * (b + 1) / blocks);
        block(first, last - first);
    }
}

// Products of some rows with `count` panels: out[row][panel * PANEL ...], added to it with ADDS.
template <bool ADDS>
inline void product_into(const float *x, int64_t stride, int rows, const float *panels,
                         int64_t panel_size, int count, int64_t depth, float *out, int64_t out_stride) {
    constexpr Start START = ADDS ? ADDS_TO : REPLACES;
    Nothing ahead;
    int panel = 0;
    if (rows * 4 <= ROWS)  // too few rows to hide the latency of the sums: four panels at a time
        for (; panel + 4 <= count; panel += 4)
            float_rows<4, START>(rows, x, stride, panels + panel * panel_size, panel_size, depth,
                                out + panel * PANEL, out_stride, ahead);
    for (; panel < count; panel++)
        in_blocks(rows, [&](int first, int some) {
            float_rows<1, START>(some, x + first * stride, stride, panels + panel * panel_size,
                                panel_size, depth, out + first * out_stride + panel * PANEL,
                                out_stride, ahead);
        });
}

constexpr int FEW_ROWS_OF_FLOAT = 24, FEW_ROWS_DEPTH = 64;

// P panels for all rows, out[rows][P * PANEL]; more than one block of rows takes turns with each part of
// a panel, while that is in the first-level cache.
template <int P>
inline void few_rows_panels(const float *x, int64_t stride, int rows, const float *panel,
                            int64_t panel_size, int64_t depth, float *out) {
    const int64_t width = P * PANEL, part = rows * P <= ROWS ? depth : FEW_ROWS_DEPTH;
    for (int64_t k = 0; k < depth; k += part) {
        const int64_t deep = least(depth - k, part);
        auto block = [&](int first, int some) {
            Near near;
            Nothing nothing;
            auto multiply = [&](auto start, auto &fetch) {
                float_rows<P, start>(some, x + first * stride + k, stride, panel + k * PANEL, panel_size, deep,
                                     out + first * width, width, fetch);
            };
            using First = std::integral_constant<Start, REPLACES>;
            using Later = std::integral_constant<Start, GOES_ON>;
            if (first)  // by then the part is at hand
                k ? multiply(Later(), nothing) : multiply(First(), nothing);
            else
                k ? multiply(Later(), near) : multiply(First(), near);
        };
        in_blocks(rows, block, ROWS / P);
    }
}

// See panels_product, for up to FEW_ROWS_OF_FLOAT rows.
template <class Epilogue>
inline void few_rows_product(const float *x, int64_t stride, int rows, const float *panels,
                             int64_t panel_size, int count, int64_t depth, Epilogue &&epilogue) {
    alignas(64) float sums[2 * FEW_ROWS_OF_FLOAT * PANEL];  // or of four panels with fewer rows
    const int most = rows * 4 <= ROWS ? 4 : 2;
    for (int panel = 0; panel < count;) {
        const float *from = panels + panel * panel_size;
        const int some = count - panel >= most ? most : 1;
        if (some == 4)
            few_rows_panels<4>(x, stride, rows, from, panel_size, depth, sums);
        else if (some == 2)
            few_rows_panels<2>(x, stride, rows, from, panel_size, depth, sums);
        else
            few_rows_panels<1>(x, stride, rows, from, panel_size, depth, sums);
        for (int p = 0; p < some; p++, panel++)
            for (int m = 0; m < rows; m++) {
                const float *row = sums + (m * some + p) * PANEL;
                epilogue(m, panel, load(row), load(row + LANES));
            }
    }
}

// In how many parts of its depth a weight is multiplied, one part after the other for all panels: of a
// shallow part more rows of x stay in the cache.
template <class T> inline int64_t depth_parts(int64_t) { return 1; }
template <> inline int64_t depth_parts<float>(int64_t depth) { return depth < 2048 ? 1 : depth / 768; }

constexpr int PARTED = 128;  // panels whose sums are kept from one part to the next

inline float *kept_sums(int64_t count) {
    static thread_local Room room;
    return room.of<float>(count);
}

// Calls epilogue(row, panel, low, high) with each row's sums over a panel's two vectors of columns;
// unless there are few rows, the memory that it will write is asked for before.
template <class Epilogue>
inline void panels_product(const float *x, int64_t stride, int rows, const float *panels,
                           int64_t panel_size, int count, int64_t depth, const Place &place,
                           Epilogue &&epilogue) {
    if (rows <= FEW_ROWS_OF_FLOAT)
        return few_rows_product(x, stride, rows, panels, panel_size, count, depth, epilogue);
    const int blocks = (rows + ROWS - 1) / ROWS;
    const int panel_lines = FETCH_DEPTH * PANEL * int(sizeof(float)) / 64;
    // Panels [start, end), and of them what lies from k on.
    auto part = [&](int start, int end, int64_t k, int64_t deep, float *kept) {
        alignas(64) float own[ROWS * PANEL];
        const bool last = k + deep == depth;
        for (int panel = start; panel < end; panel++) {
            const float *from = panels + panel * panel_size + k * PANEL;
            Ahead<FETCH_ROWS> ahead{(const char *)(from + panel_size)};
            if (panel + 1 < end) ahead.lines = (panel_lines + blocks - 1) / blocks;
            in_blocks(rows, [&](int first, int some) {
                float *sums = kept ? kept + (int64_t(panel - start) * rows + first) * PANEL : own;
                const Place next{(char *)(sums + some * PANEL), sizeof(float) * PANEL, sizeof(float) * PANEL};
                last ? ahead.writes(place, first, some, panel) : ahead.writes(next, 0, some, 0);
                auto multiply = [&](auto begin) {
                    float_rows<1, begin>(some, x + first * stride + k, stride, from, panel_size, deep,
                                         sums, PANEL, ahead);
                };
                if (k)
                    multiply(std::integral_constant<Start, GOES_ON>());
                else
                    multiply(std::integral_constant<Start, REPLACES>());
                for (int m = 0; m < some && last; m++)
                    epilogue(first + m, panel, load(sums + m * PANEL), load(sums + m * PANEL + LANES));
            });
        }
    };
    const int64_t parts = depth_parts<float>(depth);
    if (parts == 1) return part(0, count, 0, depth, nullptr);
    float *kept = kept_sums(int64_t(rows) * least(count, PARTED) * PANEL);
    for (int start = 0; start < count; start += PARTED)
        for (int64_t i = 0, k = 0, next; i < parts; i++, k = next) {
            next = depth * (i + 1) / parts;
            part(start, least(count, start + PARTED), k, next - k, kept);
        }
}

// -- bfloat16 -----------------------------------------------------------------------------------

#if defined(__AVX512BF16__) && defined(__AVX512F__)

constexpr int TILE_ROWS = 768;  // whose sums are kept at a time
constexpr int TILE_FETCH_ROWS = 2;  // one by one the last of many rows would come too late

#if defined(RADIXSERVE_AMX)
struct TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t width[16] = {};
    uint8_t rows[16] = {};
};

// Products of up to 32 rows with one panel, added to out[rows][PANEL] or, with `starts`, put there.
// Sums lie in tiles 0 to 3, rows of x in 4 and 5, the panel in 6 and 7.
template <class Fetch>
inline void tile_product(const bf16 *x, int64_t stride, int rows, const bf16 *panel, int64_t depth,
                         float *out, int64_t out_stride, bool starts, Fetch &ahead) {
    const int64_t bytes = stride * 2, out_bytes = out_stride * 4;
    float *out_below = out + 16 * out_stride;
    const bf16 *below = x + 16 * stride;
    const bool two = rows > 16;
    if (starts) {
        _tile_zero(0);
        _tile_zero(1);
    } else {
        _tile_loadd(0, out, out_bytes);
        _tile_loadd(1, out + 16, out_bytes);
    }
    if (two) {
        if (starts) {
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(2, out_below, out_bytes);
            _tile_loadd(3, out_below + 16, out_bytes);
        }
        for (int64_t k = 0; k < depth; k += 32, panel += 32 * PANEL) {
            _tile_loadd(6, panel, 64);
            _tile_loadd(4, x + k, bytes);
            _tile_dpbf16ps(0, 4, 6);
            ahead.fetch();
            _tile_loadd(7, panel + 512, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, below + k, bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, out_below, out_bytes);
        _tile_stored(3, out_below + 16, out_bytes);
    } else {
        for (int64_t k = 0; k < depth; k += 32, panel += 32 * PANEL) {
            _tile_loadd(6, panel, 64);
            _tile_loadd(4, x + k, bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panel + 512, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
}

// What tiles are configured for; the number of rows is added.
enum TileUse { FOR_PANEL = 0, FOR_TWO_PANELS = 100, FOR_SCORES = 200, FOR_MIXING = 300 };

inline thread_local int tiles_for = 0;  // this thread's

// Tiles of so many rows and bytes a row. Whoever calls for products calls release_tiles when it is done
// with them: between operations the tiles are everybody's.
inline void configure_tiles(int use, const int (&rows)[8], const int (&bytes)[8]) {
    if (tiles_for == use) return;
    tiles_for = use;
    TileConfig config;
    for (int i = 0; i < 8; i++) {
        config.rows[i] = uint8_t(rows[i]);
        config.width[i] = uint16_t(rows[i] ? bytes[i] : 0);
    }
    // GCC believes that only the first bytes are read, and would leave out writing the others.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

// For the product of up to 32 rows with a panel: the upper 16 and the rest.
inline void configure_tiles(int rows) {
    const int upper = least(rows, 16), lower = rows - upper;
    configure_tiles(FOR_PANEL + rows, {upper, upper, lower, lower, upper, lower, 16, 16},
                    {64, 64, 64, 64, 64, 64, 64, 64});
}

// -- up to 32 rows, see ask_ahead

constexpr int FEW_TILE_ROWS = 32;

// x [rows][stride] in tiles, one after the other: [depth / 32][first 16 rows][32], then the rest alike.
inline void tiles_of_rows(const bf16 *x, int64_t stride, int rows, int64_t depth, bf16 *tiles) {
    for (int top = 0; top < rows; top += 16, tiles += 16 * depth) {
        const int some = least(rows - top, 16);
        for (int m = 0; m < some; m++)
            for (int64_t k = 0; k < depth; k += 32)
                memcpy((void *)(tiles + k * some + m * 32), x + (top + m) * stride + k, 64);
    }
}

// Products of up to 16 rows with two panels, out[2][rows][PANEL].
inline void two_panels(const bf16 *x, int rows, const bf16 *panel, int64_t panel_size, int64_t depth,
                       float *out) {
    configure_tiles(FOR_TWO_PANELS + rows, {rows, rows, rows, rows, rows, 0, 16, 16},
                    {64, 64, 64, 64, 64, 0, 64, 64});
    const bf16 *other = panel + panel_size;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += 32, x += 32 * rows, panel += 32 * PANEL, other += 32 * PANEL) {
        _tile_loadd(4, x, 64);
        ask_ahead<1024, 3>(panel + 512);
        _tile_loadd(6, panel, 64);
        _tile_dpbf16ps(0, 4, 6);
        ask_ahead<1024, 3>(panel + 1024);
        _tile_loadd(7, panel + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        ask_ahead<1024, 3>(other + 512);
        _tile_loadd(6, other, 64);
        _tile_dpbf16ps(2, 4, 6);
        ask_ahead<1024, 3>(other + 1024);
        _tile_loadd(7, other + 512, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, out, PANEL * 4);
    _tile_stored(1, out + 16, PANEL * 4);
    _tile_stored(2, out + rows * PANEL, PANEL * 4);
    _tile_stored(3, out + rows * PANEL + 16, PANEL * 4);
}

// Products of up to 32 rows with one panel, out[rows][PANEL].
inline void one_panel(const bf16 *x, int rows, const bf16 *panel, int64_t depth, float *out) {
    const int upper = least(rows, 16), lower = rows - upper;
    const bf16 *below = x + 16 * depth;
    configure_tiles(rows);
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += 32, panel += 32 * PANEL) {
        ask_ahead<1024, 2>(panel + 1024);
        _tile_loadd(6, panel, 64);
        _tile_loadd(4, x + k * upper, 64);
        _tile_dpbf16ps(0, 4, 6);
        ask_ahead<1024, 2>(panel + 1024 + 512);
        _tile_loadd(7, panel + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (!lower) continue;
        _tile_loadd(5, below + k * lower, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, PANEL * 4);
    _tile_stored(1, out + 16, PANEL * 4);
    if (lower) {
        _tile_stored(2, out + 16 * PANEL, PANEL * 4);
        _tile_stored(3, out + 16 * PANEL + 16, PANEL * 4);
    }
}

// -- more rows

constexpr int64_t TILE_DEPTH = 256;  // of a panel that stays in the first-level cache

// One panel with all rows; after(first, count) is called when some rows' sums are complete.
template <class Fetch, class After>
inline void panel_by_tiles(const bf16 *x, int64_t stride, int rows, const bf16 *panel, int64_t depth,
                           float *out, int64_t out_stride, bool adds, Fetch ahead, After &&after) {
    const int whole = rows / 32 * 32;
    if (whole) configure_tiles(32);
    for (int64_t k = 0; whole && k < depth; k += TILE_DEPTH)
        for (int row = 0; row < whole; row += 32) {
            tile_product(x + row * stride + k, stride, 32, panel + k * PANEL,
                         least(depth - k, TILE_DEPTH), out + row * out_stride, out_stride, !adds && !k,
                         ahead);
            if (k + TILE_DEPTH >= depth) after(row, 32);
        }
    if (whole == rows) return;
    configure_tiles(rows - whole);
    tile_product(x + whole * stride, stride, rows - whole, panel, depth, out + whole * out_stride,
                 out_stride, !adds, ahead);
    after(whole, rows - whole);
}
#endif

template <int M, bool ADDS, class Fetch>
inline void pair_tile(const bf16 *x, int64_t stride, const bf16 *panel, int64_t depth, float *out,
                      int64_t out_stride, Fetch &ahead) {
    __m512 sums[M][2] = {};
    for (int64_t k = 0; k < depth; k += 32, panel += 32 * PANEL) {
        ahead.fetch();
        for (int pair = 0; pair < 16; pair++) {
            __m512bh low = (__m512bh)_mm512_loadu_si512(panel + pair * 32);
            __m512bh high = (__m512bh)_mm512_loadu_si512(panel + 512 + pair * 32);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                int32_t two;
                memcpy(&two, x + m * stride + k + 2 * pair, 4);
                __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                sums[m][0] = _mm512_dpbf16_ps(sums[m][0], both, low);
                sums[m][1] = _mm512_dpbf16_ps(sums[m][1], both, high);
            }
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 2; n++) {
            float *to = out + m * out_stride + n * LANES;
            store(to, ADDS ? load(to) + (vec)sums[m][n] : (vec)sums[m][n]);
        }
}

template <bool ADDS, class Fetch>
inline void pair_rows(int rows, const bf16 *x, int64_t stride, const bf16 *panel, int64_t depth,
                      float *out, int64_t out_stride, Fetch &ahead) {
    switch (rows) {
#define RADIXSERVE_CASE(M)                                                                         \
    case M:                                                                                        \
        return pair_tile<M, ADDS>(x, stride, panel, depth, out, out_stride, ahead);
        RADIXSERVE_ROWS
#undef RADIXSERVE_CASE
    }
}

template <bool ADDS>
inline void product_into(const bf16 *x, int64_t stride, int rows, const bf16 *panels,
                         int64_t panel_size, int count, int64_t depth, float *out,
                         int64_t out_stride) {
    for (int panel = 0; panel < count; panel++) {
        const bf16 *from = panels + panel * panel_size;
        float *to = out + panel * PANEL;
#if defined(RADIXSERVE_AMX)
        if (has_tiles) {
            panel_by_tiles(x, stride, rows, from, depth, to, out_stride, ADDS, Nothing(), [](int, int) {});
            continue;
        }
#endif
        Nothing ahead;
        in_blocks(rows, [&](int first, int some) {
            pair_rows<ADDS>(some, x + first * stride, stride, from, depth, to + first * out_stride,
                            out_stride, ahead);
        });
    }
}

#if defined(RADIXSERVE_AMX)
// Where this thread keeps some rows in tiles.
inline bf16 *room_for_tiles(int64_t count) {
    static thread_local Room room;
    return room.of<bf16>(count);
}

// See panels_product, for up to FEW_TILE_ROWS rows.
template <class Epilogue>
inline void few_rows_product(const bf16 *x, int64_t stride, int rows, const bf16 *panels,
                             int64_t panel_size, int count, int64_t depth, Epilogue &&epilogue) {
    alignas(64) float sums[FEW_TILE_ROWS * PANEL];
    bf16 *tiles = room_for_tiles(rows * depth);
    tiles_of_rows(x, stride, rows, depth, tiles);
    const int at_once = rows <= 16 ? 2 : 1;
    for (int panel = 0; panel < count; panel += at_once) {
        const bf16 *from = panels + panel * panel_size;
        const int some = least(count - panel, at_once);
        if (some == 2)
            two_panels(tiles, rows, from, panel_size, depth, sums);
        else
            one_panel(tiles, rows, from, depth, sums);
        for (int p = 0; p < some; p++)
            for (int m = 0; m < rows; m++) {
                const float *row = sums + (p * rows + m) * PANEL;
                epilogue(m, panel + p, load(row), load(row + LANES));
            }
    }
    release_tiles();
}
#endif

template <class Epilogue>
inline void panels_product(const bf16 *x, int64_t stride, int rows, const bf16 *panels,
                           int64_t panel_size, int count, int64_t depth, const Place &place,
                           Epilogue &&epilogue) {
#if defined(RADIXSERVE_AMX)
    if (has_tiles && rows <= FEW_TILE_ROWS)
        return few_rows_product(x, stride, rows, panels, panel_size, count, depth, epilogue);
#endif
    alignas(64) static thread_local float sums[TILE_ROWS * PANEL];
    for (int top = 0; top < rows; top += TILE_ROWS) {
        const int some = least(rows - top, TILE_ROWS);
        const bf16 *here = x + top * stride;
        for (int panel = 0; panel < count; panel++) {
            const bf16 *from = panels + panel * panel_size;
            auto after = [&](int first, int number) {
                for (int m = first; m < first + number; m++)
                    epilogue(top + m, panel, load(sums + m * PANEL), load(sums + m * PANEL + LANES));
            };
#if defined(RADIXSERVE_AMX)
            if (has_tiles) {
                // The next panel has as many lines as it is deep: each block of 32 rows asks for a share.
                const int lines = some > 32 && panel + 1 < count ? (1024 + some - 1) / some : 0;
                Ahead<TILE_FETCH_ROWS> ahead{(const char *)(from + panel_size), least(lines, 8)};
                ahead.writes(place, top, some, panel);
                panel_by_tiles(here, stride, some, from, depth, sums, PANEL, false, ahead, after);
                continue;
            }
#endif
            Ahead<1> ahead{(const char *)(from + panel_size)};
            const int blocks = (some + ROWS - 1) / ROWS, lines = 32 * PANEL * int(sizeof(bf16)) / 64;
            if (panel + 1 < count) ahead.lines = (lines + blocks - 1) / blocks;
            in_blocks(some, [&](int first, int number) {
                ahead.writes(place, top + first, number, panel);
                pair_rows<false>(number, here + first * stride, stride, from, depth,
                                 sums + first * PANEL, PANEL, ahead);
                after(first, number);
            });
        }
    }
    release_tiles();
}

#else  // no bfloat16 arithmetic: nobody calls this, see HAS_BF16

template <bool ADDS>
inline void product_into(const bf16 *, int64_t, int, const bf16 *, int64_t, int, int64_t, float *,
                         int64_t) {}

template <class Epilogue>
inline void panels_product(const bf16 *, int64_t, int, const bf16 *, int64_t, int, int64_t,
                           const Place &, Epilogue &&) {}

#endif

inline void release_tiles() {
#if defined(RADIXSERVE_AMX)
    if (!tiles_for) return;
    tiles_for = 0;
    _tile_release();
#endif
}
