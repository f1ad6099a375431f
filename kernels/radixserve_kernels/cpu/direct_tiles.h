// Attention of a few rows by AMX, to keys and values as they lie in their pages: see direct.h.
//
// Sixteen keys are the upper matrix of a product, the queries of a head the lower one: so the keys, of
// which there are many, need no packing. Nor do values, as the lower matrix: where it has pairs of
// features side by side, weights next to zeros pick the even ones, zeros next to weights the odd ones.
#pragma once

#include "direct.h"
#include "transpose.h"

#if defined(RADIXSERVE_AMX)

constexpr int TILE_KEYS = 16;

// Keys or values of a tile: each of `size` elements, `stride` elements behind the one before it.
struct KeyTile {
    const bf16 *first;
    int64_t stride;
};

inline bool at_equal_distances(const int64_t *places) {
    for (int j = 2; j < TILE_KEYS; j++)
        if (places[j] - places[j - 1] != places[1] - places[0]) return false;
    return true;
}

// Sixteen of them, at most `count` of which exist; if they do not lie at equal distances, or fewer than
// sixteen exist, they are copied to `room` [16][size], with zeros.
inline KeyTile tile_of(const bf16 *from, const int64_t *places, int64_t count, int64_t size, bf16 *room) {
    if (count >= TILE_KEYS && at_equal_distances(places)) return {from + places[0], places[1] - places[0]};
    for (int j = 0; j < TILE_KEYS; j++) {
        if (j < count)
            memcpy((void *)(room + j * size), from + places[j], size * sizeof(bf16));
        else
            memset((void *)(room + j * size), 0, size * sizeof(bf16));
    }
    return {room, size};
}

// The next one or two tiles of `count` keys or values that are left; `room` [32][size]. How many.
inline int tiles_of(const bf16 *from, const int64_t *places, int64_t count, int64_t size, bf16 *room,
                    KeyTile (&tiles)[2]) {
    tiles[0] = tile_of(from, places, count, size, room);
    if (count <= TILE_KEYS) return 1;
    tiles[1] = tile_of(from, places + TILE_KEYS, count - TILE_KEYS, size, room + TILE_KEYS * size);
    return 2;
}

// Keys or values that will be read after some others: asked for in the order in which they lie, so that
// the processor goes on by itself, and as many lines with each tile as a tile has.
class ComingRows {
  public:
    // `count` rows of `size` elements, at from + places[...].
    ComingRows(const bf16 *from, const int64_t *places, int64_t count, int64_t size)
        : from((const char *)from), places(places), end(places + count), bytes(size * 2) {}
    void fetch() {
        for (int lines = TILE_KEYS; lines && places < end; lines--) {
            __builtin_prefetch(from + *places * 2 + at, 0, 2);
            at += 64;
            if (at == bytes) at = 0, places++;
        }
    }

  private:
    const char *from;
    const int64_t *places, *end;
    int64_t bytes, at = 0;
};

// Queries [rows][depth] as the lower matrix of a product: [dim / 32][16 pairs of features][rows][2].
inline void pair_queries(const bf16 *queries, int64_t depth, int64_t rows, int64_t dim, bf16 *pairs) {
    for (int64_t d = 0; d < dim; d += 2, pairs += 2 * rows)
        for (int64_t row = 0; row < rows; row++) memcpy((void *)(pairs + 2 * row), queries + row * depth + d, 4);
}

inline void configure_scores(int rows) {
    const int wide = 4 * rows;
    configure_tiles(FOR_SCORES + rows, {16, 16, 16, 16, 16, 0, 0, 0}, {wide, wide, 64, 64, wide, 0, 0, 0});
}

// Scores of one or two tiles of keys for the rows of a head: [16 or 32][rows].
template <bool TWO>
inline void score_tiles(const bf16 *pairs, int64_t rows, const KeyTile *keys, int64_t at, int64_t dim,
                        float *scores, ComingRows &coming) {
    _tile_zero(0);
    if (TWO) _tile_zero(1);
    for (int64_t d = at; d < at + dim; d += 32, pairs += 32 * rows) {
        coming.fetch();
        _tile_loadd(2, keys[0].first + d, keys[0].stride * 2);
        _tile_loadd(4, pairs, rows * 4);
        _tile_dpbf16ps(0, 2, 4);
        if (!TWO) continue;
        coming.fetch();
        _tile_loadd(3, keys[1].first + d, keys[1].stride * 2);
        _tile_dpbf16ps(1, 3, 4);
    }
    _tile_stored(0, scores, rows * 4);
    if (TWO) _tile_stored(1, scores + TILE_KEYS * rows, rows * 4);
}

// A row's weights of the keys of a tile, as the upper matrix of a product: for even features, and
// `odd` elements behind, for odd ones.
inline void spread_weights(const bf16 *weights, uint32_t *even, int64_t odd) {
    const __m512i some = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)weights));
    _mm512_storeu_si512(even, some);
    _mm512_storeu_si512(even + odd, _mm512_slli_epi32(some, 16));
}

inline void configure_mixing(int rows) {
    configure_tiles(FOR_MIXING + rows, {rows, rows, rows, rows, rows, rows, 16, 16},
                    {64, 64, 64, 64, 64, 64, 64, 64});
}

// Adds one or two tiles of values, weighed, to mixed[row][features], where of 32 features the 16 even
// ones come first. Weights: [tile][even, odd][rows][16].
template <bool TWO>
inline void mix_tiles(const uint32_t *weights, int64_t rows, const KeyTile *values, int64_t at, int64_t dim,
                      float *mixed, int64_t width, ComingRows &coming) {
    const int64_t size = rows * TILE_KEYS;
    _tile_loadd(2, weights, 64);
    _tile_loadd(3, weights + size, 64);
    if (TWO) {
        _tile_loadd(4, weights + 2 * size, 64);
        _tile_loadd(5, weights + 3 * size, 64);
    }
    for (int64_t d = 0; d < dim; d += 32, mixed += 32) {
        _tile_loadd(0, mixed, width * 4);
        _tile_loadd(1, mixed + 16, width * 4);
        coming.fetch();
        _tile_loadd(6, values[0].first + at + d, values[0].stride * 2);
        _tile_dpbf16ps(0, 2, 6);
        _tile_dpbf16ps(1, 3, 6);
        if (TWO) {
            coming.fetch();
            _tile_loadd(7, values[1].first + at + d, values[1].stride * 2);
            _tile_dpbf16ps(0, 4, 7);
            _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, mixed, width * 4);
        _tile_stored(1, mixed + 16, width * 4);
    }
}

// Of every 32 floats of `mixed` those that `first` picks, then those that `second` does.
inline void reorder(float *mixed, int64_t dim, __m512i first, __m512i second) {
    for (int64_t d = 0; d < dim; d += 32) {
        const __m512 low = (__m512)load(mixed + d), high = (__m512)load(mixed + d + 16);
        store(mixed + d, (vec)_mm512_permutex2var_ps(low, first, high));
        store(mixed + d + 16, (vec)_mm512_permutex2var_ps(low, second, high));
    }
}

// Features in the order of mix_tiles, and back.
inline void part_features(float *mixed, int64_t dim) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    reorder(mixed, dim, even, _mm512_add_epi32(even, _mm512_set1_epi32(1)));
}

inline void join_features(float *mixed, int64_t dim) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    reorder(mixed, dim, first, _mm512_add_epi32(first, _mm512_set1_epi32(8)));
}

#endif
