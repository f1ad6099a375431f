// Attention of a few rows to keys and values as they lie in their pages: packing them would cost a single query
// more than all of its arithmetic.
//
// Every sum runs in the order of the packed product, so a row has the same bits either way: a score over the features,
// with keys transposed in registers, or with AVX2 as in lane_scores.h; an output over the keys of a block.
#pragma once

#include "attention_task.h"
#include "lane_scores.h"
#include "pack_kv.h"

constexpr int FOUR = 4;  // rows of one step
constexpr int64_t DIRECT_KEYS = 64;  // of a block, at most
// Bytes of a block's keys, about: two blocks with their values, or with AVX2 one and the next keys, fit into L1.
constexpr int64_t DIRECT_BYTES = (LANES == 16 ? 6 : 12) << 10;

// Keys of a block, of which a row has `size` bytes: what is prefetched a block ahead is still in L1. Measured.
inline int64_t direct_keys(int64_t size) {
    const int64_t keys = DIRECT_BYTES / size / 16 * 16;
    return keys < 16 ? 16 : min(keys, DIRECT_KEYS);
}

// How many of `count` keys of a block are read at once. Keys that lie a multiple of SET_BYTES apart, as those of many
// sequences that decode together may, share sets of the first cache level, where few of them fit. Measured.
constexpr int64_t SET_BYTES = 4096;
inline int64_t fitting_keys(const int64_t *offsets, int64_t count) {
    if (count <= 16) return count;
    const int64_t distance = offsets[1] - offsets[0];
    return distance % SET_BYTES || offsets[2] - offsets[1] != distance ? count : 16;
}

// Whether bfloat16 is multiplied by AMX: see attention_amx.h.
template <class T> inline bool is_by_tiles() { return has_amx && sizeof(Operand<T>) == 2; }

// Whether a job of `rows` rows and heads of `dim` features is read without packing keys: up to as many rows as that is
// faster, measured, and with AMX up to those of a tile.
template <class T> inline bool is_direct(int64_t rows, int64_t dim) {
    return rows <= (is_by_tiles<T>() ? 16 : LANES == 16 ? 8 : 12) && dim % (64 / int64_t(sizeof(Operand<T>))) == 0;
}

// Keys or values of one head: each begins at rows[...] + at.
template <class T> struct HeadRows {
    const T *const *rows;
    int64_t count, at, dim;
};

// Prefetches rows line by line in the order in which they lie, so that the processor's own prefetcher follows.
class LinePrefetcher {
  public:
#if defined(RADIXSERVE_LANE_SCORES)
    // `count` rows of `size` bytes, at from + offsets[...].
    LinePrefetcher(const char *from, const int64_t *offsets, int64_t count, int64_t size)
        : from(from), offsets(offsets), end(offsets + count), size(size), line(from + size), row_end(line) {}
    // NEAR: into the first cache level, for readers whose blocks fit there; else into the second. After the last row it
    // comes again: that takes fewer instructions than an end.
    template <bool NEAR> void fetch(int lines) {
#pragma GCC unroll 8
        for (int i = 0; i < lines; i++, line += 64) {
            if (line >= row_end) {
                if (offsets < end) row_end = from + *offsets++ + size;
                line = row_end - size;
            }
            __builtin_prefetch(line, 0, NEAR ? 3 : 2);
        }
    }
#else
    LinePrefetcher(const char *from, const int64_t *offsets, int64_t count, int64_t size)
        : from(from), offsets(offsets), end(offsets + count), size(size) {}
    template <bool NEAR> void fetch(int lines) {
        for (; lines && offsets < end; lines--) {
            __builtin_prefetch(from + *offsets + at, 0, NEAR ? 3 : 2);
            at += 64;
            if (at >= size) at = 0, offsets++;
        }
    }
#endif

  private:
    const char *from;
    const int64_t *offsets, *end;
#if defined(RADIXSERVE_LANE_SCORES)
    int64_t size;
    const char *line, *row_end;  // the next line to prefetch, in a row that ends there
#else
    int64_t size, at = 0;
#endif
};

// Prefetches keys or values of whole blocks: those that are read next and, with AVX-512, those after them, which the next
// prefetcher asks for once more. A processor that waits for as many lines as it can may drop a prefetch, as EPYC does: of
// lines that were asked for once, many are not there when they are read.
class RowPrefetcher {
  public:
    RowPrefetcher(const LinePrefetcher &next, const LinePrefetcher &after) : next(next), after(after) {}
    RowPrefetcher(const char *from, const int64_t *offsets, int64_t count, int64_t size)
        : RowPrefetcher({from, offsets, count, size}, {from, offsets, 0, size}) {}
    // NEAR: into the first cache level, for readers whose blocks fit there; else into the second.
    // ALTERNATES: a line of each rather than all lines of both. Which is faster is measured.
    template <bool NEAR = false, bool ALTERNATES = false> void fetch(int lines) {
        if (LANES < 16) return next.fetch<NEAR>(lines);
        const int step = ALTERNATES ? 1 : lines;
        for (; lines > 0; lines -= step) next.fetch<NEAR>(step), after.fetch<NEAR>(step);
    }

  private:
    LinePrefetcher next, after;
};

// Prefetches the first byte of each row that begins in another page of memory than the row before it, and the last byte
// where that is in a page of its own. The processor then looks up the addresses of several pages at the same time; where
// it meets them one by one while it computes, it waits for each. Inlined: GCC drops calls that do nothing but prefetch.
__attribute__((always_inline)) inline void touch_pages(const char *from, const int64_t *offsets, int64_t count,
                                                       int64_t size) {
    constexpr int PAGE_BITS = 12;
    uintptr_t last = 0;
    for (int64_t j = 0; j < count; j++) {
        const char *row = from + offsets[j], *end = row + size - 1;
        if ((uintptr_t)row >> PAGE_BITS != last) __builtin_prefetch(row);
        last = (uintptr_t)end >> PAGE_BITS;
        if ((uintptr_t)row >> PAGE_BITS != last) __builtin_prefetch(end);
    }
}

// touch_pages of the keys and values of the next block, rows of `size` bytes. Not where they follow those of this block
// in bfloat16, which is slower then; float32 is faster. Measured.
template <class T>
__attribute__((always_inline)) inline void touch_block(const PagedKv<T> &kv, const int64_t *offsets, int64_t count,
                                                       const int64_t *later, int64_t num_later, int64_t size) {
    if (!HAS_LANE_SCORES || !num_later) return;
    if (sizeof(T) == 2 && later[num_later - 1] - offsets[count - 1] == num_later * kv.slot_bytes) return;
    touch_pages(kv.k, later, num_later, size);
    touch_pages(kv.v, later, num_later, size);
}

// sum + a query's numbers times those in a word of 32 bits of each key.
template <class T> inline vec add_word(vec sum, const Operand<T> *query, uvec word) {
    if constexpr (sizeof(T) == 4) {
        return sum + broadcast(query[0]) * (vec)word;
    } else if constexpr (sizeof(Operand<T>) == 4) {
        sum = sum + broadcast(query[0]) * low_halves(word);
        return sum + broadcast(query[1]) * high_halves(word);
    } else {
#if defined(RADIXSERVE_BF16)
        int32_t both;
        memcpy(&both, query, 4);
        return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(both), (__m512bh)word);
#endif
    }
}

// Scores of N vectors of keys from `first` on for H rows, to scores[row * stride + key].
template <int H, int N, class T>
inline void qk_panel(const Operand<T> *queries, int64_t depth, const HeadRows<T> &keys, int64_t first, float *scores,
                     int64_t stride, RowPrefetcher &shared_prefetcher) {
    constexpr int64_t NUMBERS = 4 / sizeof(T), STEP = 4 * NUMBERS;
    RowPrefetcher prefetcher = shared_prefetcher;  // a copy stays in registers
    vec sums[H][N] = {};
    for (int64_t d = 0; d < keys.dim; d += STEP) {
        prefetcher.fetch<true, sizeof(T) == 4>(N * LANES / 4);  // as much as is read
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) {
            uvec words[4];
            transpose_words((const uint32_t *const *)keys.rows + first + n * LANES, (keys.at + d) / NUMBERS, words);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
                for (int h = 0; h < H; h++)
                    sums[h][n] = add_word<T>(sums[h][n], queries + h * depth + d + i * NUMBERS, words[i]);
        }
    }
    shared_prefetcher = prefetcher;
    for (int h = 0; h < H; h++)
        for (int n = 0; n < N; n++) store(scores + h * stride + first + n * LANES, sums[h][n]);
}

// Vectors of features that `rows` rows sum at a time: bounded by registers.
constexpr int vectors_at_once(int rows) {
    if (HAS_LANE_SCORES) return rows == 1 ? 8 : rows <= 3 ? 4 : 2;
    return LANES == 16 || rows <= 2 ? 4 : 2;
}

#if !defined(RADIXSERVE_LANE_SCORES)
// Adds the weighted values to out[row][d ...], key after key, for H rows and V vectors from d on.
template <int H, int V, class T>
inline void pv_vectors(const float *weights, int64_t stride, const HeadRows<T> &values, int64_t d, float *out,
                       int64_t width, RowPrefetcher &shared_prefetcher) {
    RowPrefetcher prefetcher = shared_prefetcher;
    const int64_t at = values.at + d;
    vec sums[H][V];
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) sums[h][v] = load(out + h * width + d + v * LANES);
    for (int64_t k = 0; k < values.count; k++) {
        vec some[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) some[v] = load(values.rows[k] + at + v * LANES);
        prefetcher.fetch<true, sizeof(T) == 4>((V * LANES * sizeof(T) + 63) / 64);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            const vec weight = broadcast(weights[h * stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[h][v] = sums[h][v] + weight * some[v];
        }
    }
    shared_prefetcher = prefetcher;
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) store(out + h * width + d + v * LANES, sums[h][v]);
}

template <int H, class T>
inline void pv_rows(const float *weights, int64_t stride, const HeadRows<T> &values, float *out,
                    int64_t width, RowPrefetcher &prefetcher) {
    constexpr int V = vectors_at_once(H);
    int64_t d = 0;
    for (; d + V * LANES <= values.dim; d += V * LANES)
        pv_vectors<H, V>(weights, stride, values, d, out, width, prefetcher);
    for (; d < values.dim; d += LANES) pv_vectors<H, 1>(weights, stride, values, d, out, width, prefetcher);
}

#else
// Adds the weighted values to out[row][d ...], key after key, for H rows and V vectors from d on.
template <int H, int V, class T>
inline void pv_vectors(const float *weights, int64_t stride, const HeadRows<T> &values, int64_t d, float *out,
                       int64_t width, RowPrefetcher &shared_prefetcher) {
    constexpr int PARTS = 4 / sizeof(T);  // vectors of features from one vector of words
    RowPrefetcher prefetcher = shared_prefetcher;
    const int64_t at = values.at + d;
    vec sums[H][V];
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v += PARTS) load_parts<T>(out + h * width + d + v * LANES, &sums[h][v]);
    for (int64_t k = 0; k < values.count; k++) {
        vec weight[H];
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) weight[h] = broadcast(weights[h * stride + k]);
        prefetcher.fetch<true>((V * LANES * sizeof(T) + 63) / 64);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const vec numbers = load_part(values.rows[k] + at + v / PARTS * PARTS * LANES, v % PARTS);
#pragma GCC unroll 4
            for (int h = 0; h < H; h++) sums[h][v] = add_product(sums[h][v], weight[h], numbers);
        }
    }
    shared_prefetcher = prefetcher;
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v += PARTS) store_parts<T>(out + h * width + d + v * LANES, &sums[h][v]);
}

template <int H, class T>
inline void pv_rows(const float *weights, int64_t stride, const HeadRows<T> &values, float *out, int64_t width,
                    RowPrefetcher &prefetcher) {
    constexpr int V = vectors_at_once(H), LEAST = 4 / sizeof(T);
    int64_t d = 0;
    for (; d + V * LANES <= values.dim; d += V * LANES)
        pv_vectors<H, V>(weights, stride, values, d, out, width, prefetcher);
    for (; d < values.dim; d += LEAST * LANES) pv_vectors<H, LEAST>(weights, stride, values, d, out, width, prefetcher);
}
#endif

#if defined(RADIXSERVE_BF16)
// V lines of 32 features. Two values at a time, their features interleaved for the dot product of pairs: in
// every quarter of a line the lower four features come first, then the upper four.
template <int H, int V>
inline void pv_vectors(const bf16 *weights, int64_t stride, const HeadRows<bf16> &values, int64_t d, float *out,
                       int64_t width, RowPrefetcher &shared_prefetcher) {
    RowPrefetcher prefetcher = shared_prefetcher;
    const int64_t at = values.at + d;
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(4));
    __m512 sums[H][2 * V];
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) {
            const float *from = out + h * width + d + v * 32;
            const __m512 low = (__m512)load(from), high = (__m512)load(from + LANES);
            sums[h][2 * v] = _mm512_permutex2var_ps(low, lower, high);
            sums[h][2 * v + 1] = _mm512_permutex2var_ps(low, upper, high);
        }
    for (int64_t k = 0; k < values.count; k += 2) {
        __m512i some[2 * V];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
            const __m512i even = _mm512_loadu_si512(values.rows[k] + at + v * 32);
            const __m512i odd = _mm512_loadu_si512(values.rows[k + 1] + at + v * 32);
            prefetcher.fetch<true>(2);
            some[2 * v] = _mm512_unpacklo_epi16(even, odd);
            some[2 * v + 1] = _mm512_unpackhi_epi16(even, odd);
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            int32_t both;
            memcpy(&both, weights + h * stride + k, 4);
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * V; v++)
                sums[h][v] = _mm512_dpbf16_ps(sums[h][v], weight, (__m512bh)some[v]);
        }
    }
    shared_prefetcher = prefetcher;
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) {
            float *to = out + h * width + d + v * 32;
            const vec low = (vec)_mm512_permutex2var_ps(sums[h][2 * v], first, sums[h][2 * v + 1]);
            const vec high = (vec)_mm512_permutex2var_ps(sums[h][2 * v], second, sums[h][2 * v + 1]);
            store2(to, low, high);
        }
}

template <int H>
inline void pv_rows(const bf16 *weights, int64_t stride, const HeadRows<bf16> &values, float *out, int64_t width,
                    RowPrefetcher &prefetcher) {
    int64_t d = 0;
    for (; d + 64 <= values.dim; d += 64) pv_vectors<H, 2>(weights, stride, values, d, out, width, prefetcher);
    for (; d < values.dim; d += 32) pv_vectors<H, 1>(weights, stride, values, d, out, width, prefetcher);
}
#endif

// Splits rows into fours: call(first row, their number as a constant).
template <class Call> inline void for_row_quads(int64_t rows, Call &&call) {
    for (int64_t row = 0; row < rows; row += FOUR)
        with_row_count<FOUR>(int(min<int64_t>(rows - row, FOUR)), [&](auto count) { call(row, count); });
}

// Keys or values of a block: zeros after the last one, up to a whole panel.
template <class T> inline void point_at(const T *(&rows)[KEYS], const char *from, const int64_t *offsets, int64_t count,
                                        const T *zeros) {
    for (int64_t j = 0; j < round_up(count, PANEL); j++) rows[j] = j < count ? (const T *)(from + offsets[j]) : zeros;
}

// The same of what is stored otherwise, widened to `widened` [count][heads][dim].
template <class T>
inline void point_at_widened(const PagedKv<T> &kv, int64_t num_heads, const T *(&rows)[KEYS], const char *from,
                             const int64_t *offsets, int64_t count, const T *zeros, T *widened, float *scales) {
    const int64_t size = num_heads * kv.heads.dim;
    for (int64_t j = 0; j < count; j++)
        widen_heads(kv.type, from + offsets[j], num_heads, kv.heads.dim, widened + j * size, scales + j, KEYS);
    for (int64_t j = 0; j < round_up(count, PANEL); j++) rows[j] = j < count ? widened + j * size : zeros;
}

// Scores of a block for all heads and rows of a task, [heads][rows][KEYS].
template <class T>
void qk_block(const TaskState<T> &state, const T *const *keys, int64_t count, int64_t dim, float *scores,
              RowPrefetcher &prefetcher) {
    for (int64_t j = 0; j < count; j += PANEL)
        for (int64_t head = 0; head < state.task.num_heads; head++)
            for_row_quads(state.rows, [&](int64_t row, auto some) {
                const Operand<T> *queries = state.head(head).queries + row * state.depth;
                float *to = scores + (head * state.rows + row) * KEYS;
#if defined(RADIXSERVE_LANE_SCORES)
                for (int64_t k = 0; k < min<int64_t>(count - j, PANEL); k += LANES)
                    lane_scores<some>(queries, state.depth, keys + j + k, head * dim, dim, to + j + k, KEYS, prefetcher);
#else
                const HeadRows<T> of_head{keys, count, head * dim, dim};
                if (count - j > LANES)
                    qk_panel<some, 2, T>(queries, state.depth, of_head, j, to, KEYS, prefetcher);
                else
                    qk_panel<some, 1, T>(queries, state.depth, of_head, j, to, KEYS, prefetcher);
#endif
            });
}

// Adds the weighted values of a block to the outputs of one head's rows.
template <class T>
void pv_block(const TaskState<T> &state, int64_t head, const Operand<T> *weights, const T *const *values,
              int64_t count, int64_t dim, RowPrefetcher &prefetcher) {
    for_row_quads(state.rows, [&](int64_t row, auto some) {
        pv_rows<some>(weights + row * KEYS, KEYS, HeadRows<T>{values, count, head * dim, dim},
                      state.head(head).part.acc + row * state.width, state.width, prefetcher);
    });
}

// While a block's keys are scored, its values and the next keys are prefetched; while its values are weighted, the next
// keys and their values.
template <class T>
void attend_direct(const PagedKv<T> &kv, const TaskState<T> &state, const Task *next, ThreadScratch &scratch) {
    const Task &task = state.task;
    const int64_t rows = state.rows, dim = kv.heads.dim, size = task.num_heads * dim;
    float *scores = scratch.scores.get<float>(task.num_heads * rows * KEYS);
    Operand<T> *weights = scratch.weights.get<Operand<T>>(rows * KEYS);
    const int64_t num_bytes = task.num_heads * kv.head_bytes;  // of a row as it is stored
    const int64_t most = direct_keys(num_bytes);
    const T *zeros = scratch.zeros.get<T>(size);
    const T *keys[KEYS], *values[KEYS];
    const BlockScales scales = kv.scales(task, scratch);
#if defined(RADIXSERVE_LANE_SCORES)
    arrange_queries<T>(state.all.queries, rows * task.num_heads, state.depth, dim);
#endif
    T *widened_keys = nullptr, *widened_values = nullptr;
    if (kv.type != SAME_KV) {
        widened_keys = scratch.key_rows.get<T>(most * size);
        widened_values = scratch.value_rows.get<T>(most * size);
    }
    int64_t offsets_of[2][KEYS], *offsets = offsets_of[0], *later = offsets_of[1];  // of a block and of the next one
    int64_t from = state.begin, num_later = 0;
    int64_t count = from < state.end ? kv.key_offsets(task, from, state.block_end(from, most), offsets) : 0;
    count = fitting_keys(offsets, count);
    for (; from < state.end; from += count, count = num_later, std::swap(offsets, later)) {
        state.begin_block(from);
        if (widened_keys) {
            point_at_widened(kv, task.num_heads, keys, kv.k, offsets, count, zeros, widened_keys, scales.keys);
        } else {
            point_at(keys, kv.k, offsets, count, zeros);
            point_at(values, kv.v, offsets, count, zeros);
        }
        num_later = fitting_keys(later, kv.next_offsets(state, from + count, most, next, later));
        touch_block(kv, offsets, count, later, num_later, num_bytes);
        const LinePrefetcher next_keys(kv.k, later, num_later, num_bytes);
        RowPrefetcher prefetcher({kv.v, offsets, count, num_bytes}, next_keys);
        qk_block(state, keys, count, dim, scores, prefetcher);
        prefetcher = {next_keys, {kv.v, later, num_later, num_bytes}};
        if (widened_values)
            point_at_widened(kv, task.num_heads, values, kv.v, offsets, count, zeros, widened_values, scales.values);
        for (int64_t head = 0; head < task.num_heads; head++) {
            const HeadState<T> of_head = state.head(head);
            for (int64_t row = 0; row < rows; row++) {
                const SoftmaxState part = of_head.part.from_row(row, state.width);
                Operand<T> *row_weights = weights + row * KEYS;
                kv.softmax_row(state, row, from, count, padded_depth<Operand<T>>(count),
                               scores + (head * rows + row) * KEYS, row_weights, scales.of_head(head), part,
                               [&](int64_t first, int64_t end) {
                                   RowPrefetcher no_prefetcher(kv.v, offsets, 0, num_bytes);
                                   pv_rows<1>(row_weights + first, KEYS,
                                              HeadRows<T>{values + first, end - first, head * dim, dim}, part.acc,
                                              state.width, no_prefetcher);
                               });
            }
            pv_block(state, head, weights, values, count, dim, prefetcher);
        }
    }
}
