// Attention of a few rows by AMX, to keys and values as they lie in their pages: see attention_direct.h.
//
// Sixteen keys are the upper matrix of a product and the queries of a head the lower one: the keys, of which
// there are many, need no packing. Values are the lower matrix: where that has pairs of features side by side,
// weights next to zeros select the even features, zeros next to weights the odd ones. So a tile sums in another order
// than with packed values, where two keys make a pair.
#pragma once

#include "attention_direct.h"
#include "pack_kv.h"

#if defined(RADIXSERVE_AMX)

constexpr int TILE_KEYS = 16;

// Keys or values of a tile: one starts `stride` elements after the other.
struct KeyTile {
    const bf16 *first;
    int64_t stride;
};

inline bool is_strided(const int64_t *offsets) {
    for (int j = 2; j < TILE_KEYS; j++)
        if (offsets[j] - offsets[j - 1] != offsets[1] - offsets[0]) return false;
    return true;
}

// The tile of the next 16 keys or values, `count` of which exist. If they do not lie at equal distances, or
// fewer exist, they are copied to `copies` [16][size], with zeros.
inline KeyTile make_tile(const char *from, const int64_t *offsets, int64_t count, int64_t size, bf16 *copies) {
    if (count >= TILE_KEYS && is_strided(offsets))
        return {(const bf16 *)(from + offsets[0]), (offsets[1] - offsets[0]) / int64_t(sizeof(bf16))};
    for (int j = 0; j < TILE_KEYS; j++) {
        if (j < count)
            memcpy((void *)(copies + j * size), from + offsets[j], size * sizeof(bf16));
        else
            memset((void *)(copies + j * size), 0, size * sizeof(bf16));
    }
    return {copies, size};
}

// The next one or two tiles of `count` keys or values that are left; `copies` [32][size]. Returns their number.
inline int make_tiles(const char *from, const int64_t *offsets, int64_t count, int64_t size, bf16 *copies,
                    KeyTile (&tiles)[2]) {
    tiles[0] = make_tile(from, offsets, count, size, copies);
    if (count <= TILE_KEYS) return 1;
    tiles[1] = make_tile(from, offsets + TILE_KEYS, count - TILE_KEYS, size, copies + TILE_KEYS * size);
    return 2;
}

// Queries [rows][depth] as the lower matrix of a product: [dim / 32][16 pairs of features][rows][2].
inline void pack_query_pairs(const bf16 *queries, int64_t depth, int64_t rows, int64_t dim, bf16 *pairs) {
    for (int64_t d = 0; d < dim; d += 2, pairs += 2 * rows)
        for (int64_t row = 0; row < rows; row++) memcpy((void *)(pairs + 2 * row), queries + row * depth + d, 4);
}

inline void configure_qk(int rows) {
    const int wide = 4 * rows;
    configure_tiles(FOR_QK + rows, {16, 16, 16, 16, 16, 0, 0, 0}, {wide, wide, 64, 64, wide, 0, 0, 0});
}

// Scores of one or two tiles of keys for the rows of a head: [16 or 32][rows].
template <bool TWO>
inline void qk_tiles(const bf16 *pairs, int64_t rows, const KeyTile *keys, int64_t at, int64_t dim,
                        float *scores, RowPrefetcher &prefetcher) {
    _tile_zero(0);
    if (TWO) _tile_zero(1);
    for (int64_t d = at; d < at + dim; d += 32, pairs += 32 * rows) {
        prefetcher.fetch(TILE_KEYS);
        _tile_loadd(2, keys[0].first + d, keys[0].stride * 2);
        _tile_loadd(4, pairs, rows * 4);
        _tile_dpbf16ps(0, 2, 4);
        if (!TWO) continue;
        prefetcher.fetch(TILE_KEYS);
        _tile_loadd(3, keys[1].first + d, keys[1].stride * 2);
        _tile_dpbf16ps(1, 3, 4);
    }
    _tile_stored(0, scores, rows * 4);
    if (TWO) _tile_stored(1, scores + TILE_KEYS * rows, rows * 4);
}

// One row's weights of the keys of a tile, as the upper matrix of a product: for the even features to `even`,
// for the odd ones to even + odd.
inline void expand_weights(const bf16 *weights, uint32_t *even, int64_t odd) {
    const __m512i some = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)weights));
    _mm512_storeu_si512(even, some);
    _mm512_storeu_si512(even + odd, _mm512_slli_epi32(some, 16));
}

inline void configure_pv(int rows) {
    configure_tiles(FOR_PV + rows, {rows, rows, rows, rows, rows, rows, 16, 16},
                    {64, 64, 64, 64, 64, 64, 64, 64});
}

// Adds one or two tiles of weighted values to acc[row][features], where of 32 features the 16 even ones come
// first. Weights: [tile][even, odd][rows][16].
template <bool TWO>
inline void pv_tiles(const uint32_t *weights, int64_t rows, const KeyTile *values, int64_t at, int64_t dim,
                      float *acc, int64_t width, RowPrefetcher &prefetcher) {
    const int64_t size = rows * TILE_KEYS;
    _tile_loadd(2, weights, 64);
    _tile_loadd(3, weights + size, 64);
    if (TWO) {
        _tile_loadd(4, weights + 2 * size, 64);
        _tile_loadd(5, weights + 3 * size, 64);
    }
    for (int64_t d = 0; d < dim; d += 32, acc += 32) {
        _tile_loadd(0, acc, width * 4);
        _tile_loadd(1, acc + 16, width * 4);
        prefetcher.fetch(TILE_KEYS);
        _tile_loadd(6, values[0].first + at + d, values[0].stride * 2);
        _tile_dpbf16ps(0, 2, 6);
        _tile_dpbf16ps(1, 3, 6);
        if (TWO) {
            prefetcher.fetch(TILE_KEYS);
            _tile_loadd(7, values[1].first + at + d, values[1].stride * 2);
            _tile_dpbf16ps(0, 4, 7);
            _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, acc, width * 4);
        _tile_stored(1, acc + 16, width * 4);
    }
}

// Permutes every 32 floats of `acc`: those that `first` selects, then those that `second` does.
inline void reorder(float *acc, int64_t dim, __m512i first, __m512i second) {
    for (int64_t d = 0; d < dim; d += 32) {
        const __m512 low = (__m512)load(acc + d), high = (__m512)load(acc + d + 16);
        store(acc + d, (vec)_mm512_permutex2var_ps(low, first, high));
        store(acc + d + 16, (vec)_mm512_permutex2var_ps(low, second, high));
    }
}

// Features in the order of pv_tiles, and back.
inline void split_even_odd(float *acc, int64_t dim) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    reorder(acc, dim, even, _mm512_add_epi32(even, _mm512_set1_epi32(1)));
}

inline void merge_even_odd(float *acc, int64_t dim) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    reorder(acc, dim, first, _mm512_add_epi32(first, _mm512_set1_epi32(8)));
}

// Scores of a block for all heads and rows of a task, [heads][rows][KEYS].
inline void qk_amx(const PagedKv<bf16> &kv, const TaskState<bf16> &state, const int64_t *offsets, int64_t count,
                   const bf16 *pairs, float *scores, ThreadScratch &scratch) {
    const int64_t rows = state.rows, num_heads = state.task.num_heads, dim = kv.heads.dim, size = num_heads * dim;
    const int64_t num_bytes = num_heads * kv.head_bytes;
    bf16 *copies = scratch.keys.get<bf16>(2 * TILE_KEYS * size);
    float *untransposed = scratch.untransposed.get<float>(num_heads * 2 * TILE_KEYS * rows + TILE_KEYS);
    configure_qk(int(rows));
    for (int64_t j = 0; j < count; j += 2 * TILE_KEYS) {
        const int64_t done = min(j + 2 * TILE_KEYS, count);
        RowPrefetcher prefetcher(kv.k, offsets + done, count - done, num_bytes);
        if (done == count) prefetcher = RowPrefetcher(kv.v, offsets, count, num_bytes);
        KeyTile tiles[2];
        const int number = make_tiles(kv.k, offsets + j, count - j, size, copies, tiles);
        for (int64_t head = 0; head < num_heads; head++) {
            const bf16 *queries = pairs + head * rows * dim;
            float *to = untransposed + head * 2 * TILE_KEYS * rows;
            if (number == 2)
                qk_tiles<true>(queries, rows, tiles, head * dim, dim, to, prefetcher);
            else
                qk_tiles<false>(queries, rows, tiles, head * dim, dim, to, prefetcher);
        }
        for (int64_t head = 0; head < num_heads; head++)
            for (int i = 0; i < number; i++) {
                const uint32_t *lines[TILE_KEYS];
                for (int key = 0; key < TILE_KEYS; key++)
                    lines[key] = (const uint32_t *)(untransposed + ((head * 2 + i) * TILE_KEYS + key) * rows);
                transpose_16(lines, 0, (uint32_t *)(scores + head * rows * KEYS + j + i * TILE_KEYS),
                             KEYS, int(round_up(rows, 4)));
            }
    }
}

// Adds the weighted values of a block to the outputs. The values of the next block's keys at `later` are read
// next, after their keys.
inline void pv_amx(const PagedKv<bf16> &kv, const TaskState<bf16> &state, const int64_t *offsets, int64_t count,
                   const uint32_t *expanded, const int64_t *later, int64_t num_later, ThreadScratch &scratch) {
    const int64_t rows = state.rows, num_heads = state.task.num_heads, dim = kv.heads.dim, size = num_heads * dim;
    const int64_t num_bytes = num_heads * kv.head_bytes;
    bf16 *copies = scratch.keys.get<bf16>(2 * TILE_KEYS * size);
    configure_pv(int(rows));
    for (int64_t j = 0; j < count; j += 2 * TILE_KEYS) {
        const int64_t done = min(j + 2 * TILE_KEYS, count);
        RowPrefetcher prefetcher(kv.v, offsets + done, count - done, num_bytes);
        if (done == count) prefetcher = RowPrefetcher(kv.k, later, num_later, num_bytes);
        KeyTile tiles[2];
        const int number = make_tiles(kv.v, offsets + j, count - j, size, copies, tiles);
        for (int64_t head = 0; head < num_heads; head++) {
            const uint32_t *weights = expanded + (head * KEYS + j) * 2 * rows;
            float *acc = state.head(head).part.acc;
            if (number == 2)
                pv_tiles<true>(weights, rows, tiles, head * dim, dim, acc, state.width, prefetcher);
            else
                pv_tiles<false>(weights, rows, tiles, head * dim, dim, acc, state.width, prefetcher);
        }
    }
}

// Adds the weighted values of some keys to the output of one row, as pv_tiles has it.
inline void pv_row(const bf16 *weights, const char *v, const int64_t *offsets, int64_t count, int64_t at, int64_t dim,
                   float *acc) {
    for (int64_t j = 0; j < count; j++) {
        const vec weight = broadcast(to_f32(weights[j]));
        for (int64_t d = 0; d < dim; d += 32) {
            const uvec pairs = load_pairs((const bf16 *)(v + offsets[j]) + at + d);
            store(acc + d, load(acc + d) + weight * low_halves(pairs));
            store(acc + d + LANES, load(acc + d + LANES) + weight * high_halves(pairs));
        }
    }
}

inline void attend_amx(const PagedKv<bf16> &kv, const TaskState<bf16> &state, const Task *next,
                       ThreadScratch &scratch) {
    const Task &task = state.task;
    const int64_t num_heads = task.num_heads, rows = state.rows, dim = kv.heads.dim, size = num_heads * dim;
    bf16 *pairs = scratch.pairs.get<bf16>(size * rows);
    // Three spare rows: qk_amx writes rows by fours, each over the surplus of the ones before it.
    float *scores = scratch.scores.get<float>((num_heads * rows + 3) * KEYS);
    bf16 *weights = scratch.weights.get<bf16>(KEYS);
    const int64_t expanded_size = KEYS * 2 * rows;
    uint32_t *expanded = scratch.expanded.get<uint32_t>(num_heads * expanded_size);
    for (int64_t head = 0; head < num_heads; head++) {
        const HeadState<bf16> of_head = state.head(head);
        pack_query_pairs(of_head.queries, state.depth, rows, dim, pairs + head * rows * dim);
        for (int64_t row = 0; row < rows; row++) {
            split_even_odd(of_head.part.acc + row * state.width, dim);
            split_even_odd(of_head.merged.acc + row * state.width, dim);
        }
    }
    int64_t offsets_of[2][KEYS], *offsets = offsets_of[0], *later = offsets_of[1];  // of a block and of the next one
    int64_t from = state.begin, num_later = 0;
    int64_t count = from < state.end ? kv.key_offsets(task, from, state.block_end(from), offsets) : 0;
    for (; from < state.end; from += count, count = num_later, std::swap(offsets, later)) {
        state.begin_block(from);
        qk_amx(kv, state, offsets, count, pairs, scores, scratch);
        num_later = kv.next_offsets(state, from + count, KEYS, next, later);
        for (int64_t head = 0; head < num_heads; head++) {
            for (int64_t row = 0; row < rows; row++) {
                const SoftmaxState part = state.head(head).part.from_row(row, state.width);
                kv.softmax_row(state, row, from, count, padded_depth<bf16>(count),
                               scores + (head * rows + row) * KEYS, weights, BlockScales(), part,
                               [&](int64_t first, int64_t end) {
                                   pv_row(weights + first, kv.v, offsets + first, end - first, head * dim, dim, part.acc);
                               });
                uint32_t *to = expanded + head * expanded_size + row * TILE_KEYS;
                for (int64_t j = 0; j < count; j += TILE_KEYS, to += 2 * rows * TILE_KEYS)
                    expand_weights(weights + j, to, rows * TILE_KEYS);
            }
        }
        pv_amx(kv, state, offsets, count, expanded, later, num_later, scratch);
    }
    release_tiles();
    for (int64_t head = 0; head < num_heads; head++)
        for (int64_t row = 0; row < rows; row++) {
            merge_even_odd(state.head(head).part.acc + row * state.width, dim);
            merge_even_odd(state.head(head).merged.acc + row * state.width, dim);
        }
}

#endif
