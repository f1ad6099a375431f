// The layout of packed weights, and what the matrix products of all processor levels share.
//
// A weight W [N, K] is stored in panels of PANEL of its N rows, padded with zeros:
//   float, half  panel[k][PANEL]
//   bf16    panel[k / 32][PANEL / 16][16][16][2]: tiles of 16 pairs of k by 16 columns, the operand
//           format of AMX; AVX-512's bfloat16 dot product reads the same tiles row by row, and other
//           processors find in each 32 bits of a vector one column's numbers for two successive k
#pragma once

#include <type_traits>
#include <utility>

#include "threads.h"

constexpr int PANEL = 2 * LANES;            // columns of a panel
#if defined(__aarch64__)
constexpr int ROWS = 8;  // rows of x in one pass over a panel
#else
constexpr int ROWS = LANES == 16 ? 12 : 6;  // the same: bounded by registers
#endif
constexpr int DEPTH = 32;                   // K of a bf16 panel is padded to a multiple of it

template <class T> inline int64_t padded_depth(int64_t k);
template <> inline int64_t padded_depth<float>(int64_t k) { return k; }
template <> inline int64_t padded_depth<half>(int64_t k) { return k; }
template <> inline int64_t padded_depth<bf16>(int64_t k) { return round_up(k, DEPTH); }

// Index of element k of column n in its panel.
template <class T> inline int64_t panel_offset(int64_t k, int n);
template <> inline int64_t panel_offset<float>(int64_t k, int n) { return k * PANEL + n; }
template <> inline int64_t panel_offset<half>(int64_t k, int n) { return k * PANEL + n; }
template <> inline int64_t panel_offset<bf16>(int64_t k, int n) {
    constexpr int WIDTH = PANEL < 16 ? PANEL : 16;
    return (k / 32) * (32 * PANEL) + (n / WIDTH) * (32 * WIDTH) + (k % 32 / 2) * (2 * WIDTH) + (n % WIDTH) * 2 +
           k % 2;
}

// Successive panels of a weight, or of packed keys or values.
template <class T> struct Panels {
    const T *first;
    int64_t size;  // elements from one panel to the next
    int count;
    int64_t depth;  // padded K
    bool is_last_half = false;     // whether the last one has columns in its first vector alone
    bool is_last_compact = false;  // of bf16: whether that one has no memory for its second vector
    const T *operator[](int64_t panel) const { return first + panel * size; }
    bool is_half(int panel) const { return is_last_half && panel + 1 == count; }
};

// Destination of a product: row m of panel p is written at first + m * stride + p * size, in bytes.
struct OutputTile {
    char *first;
    int64_t stride, size;
};

// How a product combines with its destination: overwrite it, or continue its sums, which to the bit is one
// longer sum.
enum Output { Store, Accumulate };

// -- prefetch policies: fetch() is called once for each step of a product

// Spreads prefetches over a product: with each call `lines` cache lines from `next` on, and AT_ONCE of
// the output rows. Issued in a burst they would delay the product's own loads.
template <int AT_ONCE> struct Prefetcher {
    const char *next = nullptr;
    int lines = 0;
    char *row = nullptr;
    int64_t row_stride = 0, row_bytes = 0;
    int rows = 0;

    // Sets the output rows to those of `count` rows from `first` on, of one panel.
    void writes(const OutputTile &tile, int64_t first, int count, int panel) {
        row = tile.first + first * tile.stride + panel * tile.size;
        row_stride = tile.stride, row_bytes = tile.size, rows = count;
    }
    void fetch() {
        for (int i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 2
        for (int m = 0; m < AT_ONCE && rows > 0; m++, row += row_stride, rows--)
            for (int64_t i = 0; i < row_bytes; i += 64) __builtin_prefetch(row + i, 1);
    }
};

// For operands that are in the cache.
struct NoPrefetch {
    void fetch() {}
};

// Prefetches the panels themselves ahead of where they are loaded: see `prefetch_panel`.
struct PanelPrefetch {
    void fetch() {}
};

// Prefetches BYTES from `from` on: with few rows a product is bound by reading the weight.
template <int BYTES, int LEVEL> inline void prefetch(const void *from) {
#pragma GCC unroll 32
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch((const char *)from + i, 0, LEVEL);
}

// What is prefetched of what comes from memory: a little ahead into the first cache, far ahead into the second, or
// nothing, for processors whose own prefetcher does better alone. Measured by cpu_reading.py.
enum Reading { NEAR, FAR, PLAIN };

// For a panel that is read once, from memory. Near: into the first cache level. Far: into the second, which pays
// where the arithmetic takes about as long as reading. Which of them is measured, as are the distances.
template <bool IS_NEAR, int BYTES> inline void prefetch_panel(const void *from) {
    prefetch<BYTES, IS_NEAR ? 3 : 2>((const char *)from + (IS_NEAR ? 2048 : 8192));
}

// -- blocks of rows

// Splits rows into blocks of nearly equal size, at most `max_rows`: block(first, count).
template <class Block> inline void for_row_blocks(int rows, Block &&block, int max_rows = ROWS) {
    const int blocks = (rows + max_rows - 1) / max_rows;
    for (int b = 0; b < blocks; b++) {
        const int first = int(int64_t(rows) * b / blocks), last = int(int64_t(rows) * (b + 1) / blocks);
        block(first, last - first);
    }
}

template <int LEAST, class Call, int... M>
inline void with_row_count(int rows, Call &&call, std::integer_sequence<int, M...>) {
    (void)((rows == LEAST + M && (call(std::integral_constant<int, LEAST + M>()), true)) || ...);
}

// Calls call(rows), LEAST <= rows <= MAX, with the number as a compile-time constant.
template <int MAX, int LEAST = 1, class Call> inline void with_row_count(int rows, Call &&call) {
    with_row_count<LEAST>(rows, call, std::make_integer_sequence<int, MAX - LEAST + 1>());
}
