// Products of floats by AMX, which multiplies bfloat16 alone: a float is exactly the sum of three bfloat16,
// its upper, middle and lower part, and of the nine products of the parts of two floats the six that
// matter are added up. With many rows that takes two thirds of the time of the float units, and errs half
// as much as their one long sum.
//
// A row of the result depends on its own row of x, and on whether there are more than FEW_ROWS_TO_SPLIT.
// What is infinite, or of x 3.39e38 and more, gives NaN; of numbers below 1e-33 the lower parts are lost.
#pragma once

#include "product.h"

constexpr int PARTS = 3;
constexpr int FEW_ROWS_TO_SPLIT = 47;  // for up to so many it takes too long to split the weight

// How deep parts of a weight are multiplied one after the other, see depth_parts.
inline int64_t split_parts(int64_t depth) { return depth < 1536 ? 1 : depth / 768; }

#if defined(RADIXSERVE_AMX)

inline bool splits_floats() { return has_tiles; }

constexpr int64_t STEP_SIZE = PARTS * 2 * 512;  // elements of 32 rows, or columns, in one step of 32 k

// 32 successive floats of a row: each part the nearest bfloat16 to what is left, so that what the products
// leave out has no bias.
inline void split_row(vec low, vec high, bf16 *tiles) {
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; part++, tiles += 2 * 512) {
        store_both(tiles, low, high);
        low -= rounded_to<bf16>(low), high -= rounded_to<bf16>(high);
    }
}

// x [rows][stride], up to 32 rows, in tiles: [depth / 32][PARTS][upper and lower 16 rows][32].
inline void split_rows(const float *x, int64_t stride, int rows, int64_t depth, bf16 *tiles) {
    const int upper = least(rows, 16);
    for (int m = 0; m < rows; m++, x += stride) {
        bf16 *to = m < upper ? tiles + m * 32 : tiles + 512 + (m - upper) * 32;
        int64_t k = 0;
        for (; k + 32 <= depth; k += 32, to += STEP_SIZE)
            split_row(load(x + k), load(x + k + LANES), to);
        if (k == depth) continue;
        float rest[32] = {};
        memcpy(rest, x + k, (depth - k) * sizeof(float));
        split_row(load(rest), load(rest + LANES), to);
    }
}

// Two rows of k of a panel, or `deep` of them, in tiles [PARTS][2][16][16][2], where they are one row of 16.
// Parts are cut off, not rounded, which takes half the instructions.
inline void split_pair(const float *panel, int64_t deep, bf16 *tiles) {
    const uvec bits = uvec{} + 0xffff0000;  // of a bfloat16
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
        vec first = {}, second = {};
        if (deep > 0) first = load(panel + n * LANES);
        if (deep > 1) second = load(panel + PANEL + n * LANES);
#pragma GCC unroll 3
        for (int part = 0; part < PARTS; part++) {
            _mm512_store_si512(tiles + (part * 2 + n) * 512,
                               (__m512i)(((uvec)second & bits) | ((uvec)first >> 16)));
            first -= (vec)((uvec)first & bits), second -= (vec)((uvec)second & bits);
        }
    }
}

// Up to 32 rows of k of a panel. Done in one go: between products its stores would hold up their loads.
inline void split_step(const float *panel, int64_t deep, bf16 *tiles) {
    for (int64_t k = 0; k < 32; k += 2) split_pair(panel + k * PANEL, deep - k, tiles + k * 16);
}

// Asked for bit by bit during a product: `lines` of what is split next, and the rows that will be written.
struct AheadOfSplit {
    const char *next = nullptr;
    int64_t lines = 0;
    int at_once = 1;
    Ahead<1> written;

    void fetch() {
        for (int i = 0; i < at_once && lines > 0; i++, lines--, next += 64) __builtin_prefetch(next, 0, 2);
        written.fetch();
    }
};

// One step of 32 k: rows of x, TWO tiles of them or one, with the columns of a panel, added to the sums in
// tiles 0 to 3. Of two successive products one operand is the same.
template <bool TWO, class Fetch>
inline void split_products(const bf16 *x, const bf16 *panel, Fetch &ahead) {
    enum { UPPER = 0, MIDDLE = 1024, LOWER = 2048 };
    auto rows = [&](int part) __attribute__((always_inline)) {
        _tile_loadd(4, x + part, 64);
        if (TWO) _tile_loadd(5, x + part + 512, 64);
    };
    auto columns = [&](int part) __attribute__((always_inline)) {
        _tile_loadd(6, panel + part, 64);
        _tile_loadd(7, panel + part + 512, 64);
    };
    auto multiply = [&]() __attribute__((always_inline)) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        ahead.fetch();
        if (!TWO) return;
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    };
    rows(UPPER), columns(LOWER), multiply();
    columns(UPPER), multiply();
    rows(LOWER), multiply();
    rows(MIDDLE), multiply();
    columns(MIDDLE), multiply();
    rows(UPPER), multiply();
}

template <bool TWO> inline void start_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if (!TWO) return;
    _tile_zero(2);
    _tile_zero(3);
}

template <bool TWO> inline void load_sums(const float *from) {
    _tile_loadd(0, from, PANEL * 4);
    _tile_loadd(1, from + 16, PANEL * 4);
    if (!TWO) return;
    _tile_loadd(2, from + 16 * PANEL, PANEL * 4);
    _tile_loadd(3, from + 16 * PANEL + 16, PANEL * 4);
}

template <bool TWO> inline void store_sums(float *to) {
    _tile_stored(0, to, PANEL * 4);
    _tile_stored(1, to + 16, PANEL * 4);
    if (!TWO) return;
    _tile_stored(2, to + 16 * PANEL, PANEL * 4);
    _tile_stored(3, to + 16 * PANEL + 16, PANEL * 4);
}

// `steps` steps for up to 32 rows; the sums are in out[rows][PANEL], put there if this `starts` them.
template <bool TWO, class Fetch>
inline void split_block(const bf16 *x, const bf16 *panel, int64_t steps, float *out, bool starts, Fetch &ahead) {
    starts ? start_sums<TWO>() : load_sums<TWO>(out);
    for (int64_t k = 0; k < steps; k++, x += STEP_SIZE, panel += STEP_SIZE)
        split_products<TWO>(x, panel, ahead);
    store_sums<TWO>(out);
}

constexpr int64_t SPLIT_STEPS = 3;  // of a panel that stay in the first-level cache

// See panels_product.
template <class Epilogue>
inline void split_product(const float *x, int64_t stride, int rows, const float *panels, int64_t panel_size,
                          int count, int64_t depth, const Place &place, Epilogue &&epilogue) {
    alignas(64) bf16 panel_tiles[SPLIT_STEPS * STEP_SIZE];
    const int64_t blocks = (rows + 31) / 32, all = (depth + 31) / 32, parts = split_parts(depth);
    const int64_t most = (all + parts - 1) / parts, at_once = rows < 128 ? 2 : SPLIT_STEPS;
    bf16 *tiles = room_for_tiles(blocks * most * STEP_SIZE);
    const int64_t sums_size = blocks * 32 * PANEL;
    const int together = parts > 1 ? least(count, PARTED) : count;
    float *sums = kept_sums(sums_size * (parts > 1 ? together : 1));
    AheadOfSplit ahead;
    ahead.at_once = int((64 + blocks * 6 - 1) / (blocks * 6));  // of a step's lines with one of 6 products
    // The steps [k, k + steps) of a panel, whose sums are in `kept`.
    auto multiply = [&](int panel, int64_t k, int64_t steps, const bf16 *x_tiles, float *kept) {
        const float *from = panels + panel * panel_size + k * 32 * PANEL;
        for (int64_t i = 0; i < steps; i++)
            split_step(from + i * 32 * PANEL, depth - (k + i) * 32, panel_tiles + i * STEP_SIZE);
        for (int row = 0; row < rows; row += 32, x_tiles += most * STEP_SIZE, kept += 32 * PANEL) {
            const int some = least(rows - row, 32);
            configure_tiles(some);
            if (some > 16)
                split_block<true>(x_tiles, panel_tiles, steps, kept, !k, ahead);
            else
                split_block<false>(x_tiles, panel_tiles, steps, kept, !k, ahead);
            for (int m = 0; m < some && k + steps == all; m++)
                epilogue(row + m, panel, load(kept + m * PANEL), load(kept + m * PANEL + LANES));
        }
    };
    // Panels [start, end), of them and of x the steps [first, behind).
    auto part = [&](int start, int end, int64_t first, int64_t behind) {
        for (int row = 0; row < rows; row += 32)
            split_rows(x + row * stride + first * 32, stride, least(rows - row, 32),
                       least(depth, behind * 32) - first * 32, tiles + row / 32 * most * STEP_SIZE);
        for (int panel = start; panel < end; panel++) {
            if (behind == all) ahead.written.writes(place, 0, rows, panel);
            for (int64_t k = first, next; k < behind; k = next) {
                next = least(behind, k + at_once);
                const bool more = next < behind;
                const float *then = panels + (panel + !more) * panel_size + (more ? next : first) * 32 * PANEL;
                ahead.next = (const char *)then;
                ahead.lines = more || panel + 1 < end ? at_once * 64 : 0;
                multiply(panel, k, next - k, tiles + (k - first) * STEP_SIZE,
                         sums + (parts > 1 ? (panel - start) * sums_size : 0));
            }
        }
    };
    for (int start = 0; start < count; start += together)
        for (int64_t first = 0; first < all; first += most)
            part(start, least(count, start + together), first, least(all, first + most));
    release_tiles();
}

#else

inline bool splits_floats() { return false; }

template <class Epilogue>
inline void split_product(const float *, int64_t, int, const float *, int64_t, int, int64_t, const Place &,
                          Epilogue &&) {}

#endif
