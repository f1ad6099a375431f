// Tiles of float32 products: a block of rows of x times panels, as many of either as registers hold. They are
// compiled by themselves, tiles_f32.cpp, at the same time as what calls them.
#pragma once

#include "panels.h"

constexpr int FETCH_DEPTH = 36;  // rows of k between two calls of fetch
using PrefetcherF32 = Prefetcher<2>;

// Rows of x up to which a panel is read once, from memory: 16 bits are widened in registers.
template <class W> constexpr int few_rows() { return sizeof(W) == 2 && LANES != 16 ? ROWS / 2 : ROWS; }

// Up to ROWS / P rows of x [rows][stride] times P panels that are in the cache, to out[rows][P * PANEL]. P: 1, 4.
template <int P>
void tile_rows_f32(Output output, int rows, const float *x, int64_t stride, const float *panel, int64_t panel_size,
                   int64_t depth, float *out, int64_t out_stride);

// ROWS / 2 to ROWS rows times one panel, to out[rows][PANEL].
void tile_rows_f32(Output output, int rows, const float *x, int64_t stride, const float *panel, int64_t depth,
                   float *out, PrefetcherF32 &prefetcher);

// Up to few_rows<W>() rows times P panels that are read from memory, to out[rows][P * PANEL]. P: 1, and
// of bfloat16 2 and 4, with no more rows than ROWS / P.
template <int P, class W>
void few_rows_panels_f32(const float *x, int64_t stride, int rows, const W *panel, int64_t panel_size, int64_t depth,
                         float *out);

// Up to ROWS rows of x times one panel of keys that are packed by lanes, to out[rows][PANEL]: see lane_scores.h.
// PARTS: numbers in a word of the keys as they were stored.
template <int PARTS>
void tile_rows_by_lanes(int rows, const float *x, int64_t stride, const float *panel, int64_t depth, float *out,
                        int64_t out_stride);
