// Attention of up to 16 rows by AMX, to keys and values of which only the values are packed, 32 at a time.
//
// Sixteen keys are the upper matrix of a product and the queries of a head the lower one: the keys, of which
// there are many, need no packing. Every sum has the order of the packed product, so a row has the same bits either way.
#pragma once

#include <algorithm>
#include <optional>

#include "attention_int8.h"
#include "pack_kv.h"

#if defined(RADIXSERVE_AMX)

constexpr int TILE_KEYS = 16;

// Prefetches rows line by line in the order in which they lie, so that the processor's own prefetcher follows.
class RowPrefetcher {
  public:
    // `count` rows of `size` bytes, at from + offsets[...].
    RowPrefetcher(const char *from, const int64_t *offsets, int64_t count, int64_t size)
        : from(from), offsets(offsets), end(offsets + count), size(size) {}
    // NEAR: into the first cache level, else into the second.
    template <bool NEAR = false> void fetch(int lines) {
        for (; lines && offsets < end; lines--) {
            __builtin_prefetch(from + *offsets + at, 0, NEAR ? 3 : 2);
            at += 64;
            if (at >= size) at = 0, offsets++;
        }
    }

  private:
    const char *from;
    const int64_t *offsets, *end;
    int64_t size, at = 0;
};

// Keys of a tile: one starts `stride` elements after the other.
struct KeyTile {
    const bf16 *first;
    int64_t stride;
};

inline bool is_strided(const int64_t *offsets) {
    for (int j = 2; j < TILE_KEYS; j++)
        if (offsets[j] - offsets[j - 1] != offsets[1] - offsets[0]) return false;
    return true;
}

// The tile of the next 16 keys, `count` of which exist. If they do not lie at equal distances, or
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

// The next one or two tiles of `count` keys that are left; `copies` [32][size]. Returns their number.
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

// Prefetches in its order whatever integer_scores asks for. Inlined: GCC drops calls that do nothing but prefetch.
struct EachLine {
    RowPrefetcher &prefetcher;
    __attribute__((always_inline)) void fetch_twice(int64_t, int64_t) const { prefetcher.fetch<true>(1); }
};

// Scores of a block of keys in 8 bits, which have `scales`.
inline void qk_int8(const PagedKv<bf16> &kv, const TaskState<bf16> &state, const int64_t *offsets, int64_t count,
                    const IntegerQueries &queries, const BlockScales &scales, const char *zeros, float *scores) {
    const char *keys[KEYS];
    for (int64_t j = 0; j < round_up(count, SCORED_KEYS); j++) keys[j] = j < count ? kv.k + offsets[j] : zeros;
    const int64_t rows = state.rows, num_heads = state.task.num_heads, size = num_heads * kv.head_bytes;
    for (int64_t head = 0; head < num_heads; head++)
        load_scales(keys, head * kv.head_bytes + kv.heads.dim, count, scales.of_head(head).keys);
    for (int64_t j = 0; j < count; j += SCORED_KEYS) {
        const int64_t done = min<int64_t>(j + SCORED_KEYS, count);
        RowPrefetcher prefetcher(kv.k, offsets + done, count - done, size);
        if (done == count) prefetcher = RowPrefetcher(kv.v, offsets, count, size);
        for (int64_t head = 0; head < num_heads; head++)
            integer_scores(queries, head * rows, rows, keys + j, head * kv.head_bytes, scales.of_head(head).keys + j,
                           scores + head * rows * KEYS + j, KEYS, EachLine{prefetcher});
    }
}

inline void configure_pv(int rows) {
    configure_tiles(FOR_PV + rows, {rows, rows, 0, 0, rows, 0, 16, 16}, {64, 64, 0, 0, 64, 0, 64, 64});
}

// Values of one or all heads of a task, 32 of which are weighted at a time.
struct ValueTiles {
    const PagedKv<bf16> &kv;
    int64_t first_head, num_heads;
    const char *zeros;
    bf16 *panels;  // [num_heads * dim / PANEL][DEPTH x PANEL]

    // Packs the next 32 of `count` values that are left.
    void pack(const int64_t *offsets, int64_t count, RowPrefetcher &prefetcher) const {
        const char *values[DEPTH];
        const int64_t at = first_head * kv.head_bytes;
        for (int j = 0; j < DEPTH; j++) values[j] = j < count ? kv.v + offsets[j] + at : zeros;
        if (kv.type == INT8_KV) {
            prefetcher.fetch(int(DEPTH * ((num_heads * kv.head_bytes + 63) / 64)));
            for (int64_t head = 0; head < num_heads; head++)
                pack_integer_values(values, DEPTH, head * kv.head_bytes, kv.heads.dim, DEPTH,
                                    panels + head * kv.heads.dim * DEPTH);
            return;
        }
        pack_values((const bf16 *const *)values, DEPTH, num_heads * kv.heads.dim, DEPTH, panels,
                    [&](int lines) { prefetcher.fetch(2 * lines); });
    }

    // Adds them, weighted, to a head's rows of `acc`. weights: [rows][KEYS], of the first of them.
    void add(int64_t head, const bf16 *weights, int64_t rows, float *acc, int64_t width) const {
        const bf16 *panel = panels + head * kv.heads.dim * DEPTH;
        configure_pv(int(rows));
        _tile_loadd(4, weights, KEYS * 2);
        for (int64_t d = 0; d < kv.heads.dim; d += PANEL, acc += PANEL, panel += DEPTH * PANEL) {
            _tile_loadd(0, acc, width * 4);
            _tile_loadd(1, acc + LANES, width * 4);
            _tile_loadd(6, panel, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panel + DEPTH * LANES, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_stored(0, acc, width * 4);
            _tile_stored(1, acc + LANES, width * 4);
        }
    }
};

inline void attend_amx(const PagedKv<bf16> &kv, const TaskState<bf16> &state, const Task *next,
                       ThreadScratch &scratch) {
    const Task &task = state.task;
    const int64_t num_heads = task.num_heads, rows = state.rows, dim = kv.heads.dim, size = num_heads * dim;
    const int64_t num_bytes = num_heads * kv.head_bytes;
    // Three spare rows: qk_amx writes rows by fours, each over the surplus of the ones before it.
    float *scores = scratch.scores.get<float>((num_heads * rows + 3) * KEYS);
    bf16 *weights = scratch.weights.get<bf16>((num_heads * rows + 1) * KEYS), *flushed = weights + num_heads * rows * KEYS;
    bf16 *pairs = scratch.pairs.get<bf16>(size * rows);
    const char *zeros = scratch.zeros.get<char>(std::max(num_bytes, size * 2));
    const ValueTiles all_values{kv, 0, num_heads, zeros, scratch.values.get<bf16>(2 * size * DEPTH)};
    const BlockScales scales = kv.scales(task, scratch);
    std::optional<IntegerQueries> queries;
    if (kv.type == INT8_KV) queries.emplace(state, dim, scratch);
    for (int64_t head = 0; !queries && head < num_heads; head++)
        pack_query_pairs(state.head(head).queries, state.depth, rows, dim, pairs + head * rows * dim);
    int64_t offsets_of[2][KEYS], *offsets = offsets_of[0], *later = offsets_of[1];  // of a block and of the next one
    int64_t from = state.begin, num_later = 0;
    int64_t count = from < state.end ? kv.key_offsets(task, from, state.block_end(from), offsets) : 0;
    for (; from < state.end; from += count, count = num_later, std::swap(offsets, later)) {
        state.begin_block(from);
        if (queries)
            qk_int8(kv, state, offsets, count, *queries, scales, zeros, scores);
        else
            qk_amx(kv, state, offsets, count, pairs, scores, scratch);
        num_later = kv.next_offsets(state, from + count, KEYS, next, later);
        for (int64_t head = 0; head < num_heads; head++) {
            const BlockScales of_block{nullptr, scales.of_head(head).values};  // scores have the keys' scales
            for (int64_t j = 0; of_block.values && j < count; j++)
                of_block.values[j] = load_scale(kv.v + offsets[j] + head * kv.head_bytes + dim);
            for (int64_t row = head * rows; row < (head + 1) * rows; row++) {
                const SoftmaxState part = state.all.part.from_row(row, state.width);
                kv.softmax_row(state, row - head * rows, from, count, padded_depth<bf16>(count), scores + row * KEYS,
                               weights + row * KEYS, of_block, part, [&](int64_t first, int64_t end) {
                                   ValueTiles values{kv, head, 1, zeros, all_values.panels + size * DEPTH};
                                   memset((void *)flushed, 0, KEYS * sizeof(bf16));
                                   memcpy((void *)(flushed + first), weights + row * KEYS + first, (end - first) * sizeof(bf16));
                                   for (int64_t j = first / DEPTH * DEPTH; j < end; j += DEPTH) {
                                       RowPrefetcher no_prefetcher(kv.v, offsets, 0, num_bytes);
                                       values.pack(offsets + j, count - j, no_prefetcher);
                                       values.add(0, flushed + j, 1, part.acc, state.width);
                                   }
                               });
            }
        }
        for (int64_t j = 0; j < count; j += DEPTH) {
            const int64_t done = min<int64_t>(j + DEPTH, count);
            RowPrefetcher prefetcher(kv.v, offsets + done, count - done, num_bytes);
            if (done == count) prefetcher = RowPrefetcher(kv.k, later, num_later, num_bytes);
            all_values.pack(offsets + j, count - j, prefetcher);
            for (int64_t head = 0; head < num_heads; head++)
                all_values.add(head, weights + head * rows * KEYS + j, rows, state.head(head).part.acc, state.width);
        }
    }
    release_tiles();
}

#endif
