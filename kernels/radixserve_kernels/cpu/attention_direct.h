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
constexpr int QK_ROWS = LANES == 16 ? 8 : FOUR;  // the same of scores: bounded by registers
constexpr int64_t DIRECT_KEYS = 64;  // of a block, at most
constexpr int64_t DIRECT_BYTES = 12 << 10;  // of a block's keys, about. Measured.

// Keys of a block, of which a row has `size` bytes.
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

// Prefetches rows of the two or three blocks after one that is read, in step with it: with a line of a row the same line
// of the row in its place. Into the second cache level: a processor that reads these lines from there need not wait, but
// with as many lines under way as the first level can wait for (on EPYC) every other load waits for them. Each line is
// asked for two or three times, since a processor drops a prefetch into the second level where it waits for as many
// lines as it can.
class LaterRows {
  public:
    // Offsets of as many rows as the block has at most; number_bytes: of a number as it is stored.
    LaterRows(const char *from, int64_t number_bytes, const int64_t *next, const int64_t *after)
        : from(from), number_bytes(number_bytes), next(next), after(after) {}
#if defined(__AVX512F__)
    LaterRows(const char *from, int64_t number_bytes, const int64_t *next, const int64_t *after, const int64_t *third)
        : from(from), number_bytes(number_bytes), next(next), after(after), third(third) {}
    // The line of the row's number `at`.
    void fetch(int64_t row, int64_t at) const {
        const char *in_all = from + at * number_bytes;
        const char *in_next = in_all + next[row], *in_after = in_all + after[row], *in_third = in_all + third[row];
        fetch_line(in_next), fetch_line(in_after), fetch_line(in_third);
    }
    // Not in the third block: for rows in 8 bits, most of whose lines are asked for with two heads each.
    void fetch_twice(int64_t row, int64_t at) const {
        const char *in_both = from + at * number_bytes;
        const char *in_next = in_both + next[row], *in_after = in_both + after[row];
        fetch_line(in_after), fetch_line(in_next);
    }
    LaterRows from_row(int64_t row) const { return {from, number_bytes, next + row, after + row, third + row}; }
#else
    // The line of the row's number `at`.
    void fetch(int64_t row, int64_t at) const {
        __builtin_prefetch(from + after[row] + at * number_bytes, 0, 2);
        __builtin_prefetch(from + next[row] + at * number_bytes, 0, 2);
    }
#if defined(__AVX2__)
    void fetch_twice(int64_t row, int64_t at) const { fetch(row, at); }
#endif
    LaterRows from_row(int64_t row) const { return {from, number_bytes, next + row, after + row}; }
#endif

  private:
    const char *from;
    int64_t number_bytes;
    const int64_t *next, *after;
#if defined(__AVX512F__)
    const int64_t *third = after;

    // Volatile, so that it stays among the products that it is to run beside: GCC would move it.
    static void fetch_line(const char *line) { asm volatile("prefetcht1 %0" ::"m"(*line)); }
#endif
};

// Offsets of the keys of the block that is read and of those after it, of up to `most` keys each.
template <class T> class LaterBlocks {
  public:
    LaterBlocks(const PagedKv<T> &kv, const TaskState<T> &state, int64_t most, const Task *next)
        : kv(kv), state(state), next(next), most(most), last(state.begin) {
        if (last < state.end)
            for (int i = 0; i < NUM_BLOCKS; i++) append(i);
    }
    // The i-th block after the one that is read.
    const int64_t *offsets(int i) const { return blocks[(first + i) % NUM_BLOCKS].offsets; }
    int64_t count(int i) const { return blocks[(first + i) % NUM_BLOCKS].count; }
#if defined(__AVX512F__)
    LaterRows rows(const char *from) const { return {from, kv.number_bytes(), offsets(1), offsets(2), offsets(3)}; }
#else
    LaterRows rows(const char *from) const { return {from, kv.number_bytes(), offsets(1), offsets(2)}; }
#endif
    // The next block is read from now on. Returns the number of keys of the one that was.
    int64_t step() {
        const int64_t read = count(0);
        append(first);
        first = (first + 1) % NUM_BLOCKS;
        return read;
    }

  private:
#if defined(__AVX512F__)
    static constexpr int NUM_BLOCKS = 4;
#else
    static constexpr int NUM_BLOCKS = 3;
#endif
    struct Block {
        int64_t offsets[DIRECT_KEYS], count = 0;
    };
    const PagedKv<T> &kv;
    const TaskState<T> &state;
    const Task *next;
    const int64_t most;
    int64_t last;   // the key after the last block
    int first = 0;  // the block that is read
    Block blocks[NUM_BLOCKS];

    void append(int i) {
        Block &block = blocks[i];
        block.count = fitting_keys(block.offsets, kv.next_offsets(state, last, most, next, block.offsets));
        last += block.count;
        for (int64_t j = block.count; j < most; j++) block.offsets[j] = block.count ? block.offsets[block.count - 1] : 0;
    }
};

// For readers of what is in the cache.
inline LaterRows no_prefetcher(const char *from, const int64_t *offsets) { return {from, 0, offsets, offsets}; }

// sum + a query's numbers times those in a word of 32 bits of each key.
template <class T> inline vec add_word(vec sum, const Operand<T> *query, uvec word) {
    if constexpr (sizeof(T) == 4) {
        return sum + broadcast(query[0]) * (vec)word;
    } else if constexpr (sizeof(Operand<T>) == 4) {
        sum = sum + broadcast(query[0]) * low_halves(word);
        return sum + broadcast(query[1]) * high_halves(word);
    } else {
#if defined(RADIXSERVE_BF16)
        // As an operand in memory: GCC would broadcast by an instruction of its own.
        asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(word), "m"(*(const int32_t *)query));
        return sum;
#endif
    }
}

// Scores of LANES keys for H rows, to scores[row * stride + key]. The keys begin at keys[...] + at.
template <int H, class T>
inline void qk_panel(const Operand<T> *queries, int64_t depth, const T *const *keys, int64_t at, int64_t dim,
                     float *scores, int64_t stride, const LaterRows &later) {
    constexpr int WORDS = LANES == 16 ? 16 : 4;  // of a key at a time
    constexpr int64_t NUMBERS = 4 / sizeof(T), STEP = WORDS * NUMBERS;
    vec sums[H] = {};
    for (int64_t d = 0; d < dim; d += STEP) {
        const bool begins_line = WORDS == 16 || (at + d) * sizeof(T) % 64 == 0;
        uvec words[WORDS];
        transpose_words(keys, at + d, (dim - d) / NUMBERS, words);
#pragma GCC unroll 16
        for (int i = 0; i < WORDS; i++) {
            if (STEP * sizeof(Operand<T>) > 64 && d + i * NUMBERS >= dim) break;  // half a line is left, see is_direct
            for (int j = i; j < LANES && begins_line; j += WORDS) later.fetch(j, at + d);
#pragma GCC unroll 8
            for (int h = 0; h < H; h++)
                sums[h] = add_word<T>(sums[h], queries + h * depth + d + i * NUMBERS, words[i]);
        }
    }
    for (int h = 0; h < H; h++) store(scores + h * stride, sums[h]);
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
                       int64_t width, const LaterRows &later) {
    const int64_t at = values.at + d;
    vec sums[H][V];
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) sums[h][v] = load(out + h * width + d + v * LANES);
    for (int64_t k = 0; k < values.count; k++) {
        vec some[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) some[v] = load(values.rows[k] + at + v * LANES);
#pragma GCC unroll 4
        for (int v = 0; v < V; v += 64 / (LANES * sizeof(T))) later.fetch(k, at + v * LANES);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            const vec weight = broadcast(weights[h * stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[h][v] = sums[h][v] + weight * some[v];
        }
    }
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) store(out + h * width + d + v * LANES, sums[h][v]);
}

template <int H, class T>
inline void pv_rows(const float *weights, int64_t stride, const HeadRows<T> &values, float *out,
                    int64_t width, const LaterRows &later) {
    constexpr int V = vectors_at_once(H);
    int64_t d = 0;
    for (; d + V * LANES <= values.dim; d += V * LANES)
        pv_vectors<H, V>(weights, stride, values, d, out, width, later);
    for (; d < values.dim; d += LANES) pv_vectors<H, 1>(weights, stride, values, d, out, width, later);
}

#else
// Adds the weighted values to out[row][d ...], key after key, for H rows and V vectors from d on.
template <int H, int V, class T>
inline void pv_vectors(const float *weights, int64_t stride, const HeadRows<T> &values, int64_t d, float *out,
                       int64_t width, const LaterRows &later) {
    constexpr int PARTS = 4 / sizeof(T);  // vectors of features from one vector of words
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
#pragma GCC unroll 4
        for (int v = 0; v < V; v += 64 / (LANES * sizeof(T))) later.fetch(k, at + v * LANES);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const vec numbers = load_part(values.rows[k] + at + v / PARTS * PARTS * LANES, v % PARTS);
#pragma GCC unroll 4
            for (int h = 0; h < H; h++) sums[h][v] = add_product(sums[h][v], weight[h], numbers);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v += PARTS) store_parts<T>(out + h * width + d + v * LANES, &sums[h][v]);
}

template <int H, class T>
inline void pv_rows(const float *weights, int64_t stride, const HeadRows<T> &values, float *out, int64_t width,
                    const LaterRows &later) {
    constexpr int V = vectors_at_once(H), LEAST = 4 / sizeof(T);
    int64_t d = 0;
    for (; d + V * LANES <= values.dim; d += V * LANES)
        pv_vectors<H, V>(weights, stride, values, d, out, width, later);
    for (; d < values.dim; d += LEAST * LANES) pv_vectors<H, LEAST>(weights, stride, values, d, out, width, later);
}
#endif

#if defined(RADIXSERVE_BF16)
// V lines of 32 features. Two values at a time, their features interleaved for the dot product of pairs: in
// every quarter of a line the lower four features come first, then the upper four.
template <int H, int V>
inline void pv_vectors(const bf16 *weights, int64_t stride, const HeadRows<bf16> &values, int64_t d, float *out,
                       int64_t width, const LaterRows &later) {
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
            __m512i even = _mm512_loadu_si512(values.rows[k] + at + v * 32);
            __m512i odd = _mm512_loadu_si512(values.rows[k + 1] + at + v * 32);
            asm("" : "+v"(even), "+v"(odd));  // else GCC loads each twice
            later.fetch(k, at + v * 32), later.fetch(k + 1, at + v * 32);
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
                    const LaterRows &later) {
    int64_t d = 0;
    for (; d + 64 <= values.dim; d += 64) pv_vectors<H, 2>(weights, stride, values, d, out, width, later);
    for (; d < values.dim; d += 32) pv_vectors<H, 1>(weights, stride, values, d, out, width, later);
}
#endif

// Splits rows into fours, or as many: call(first row, their number as a constant).
template <int AT_ONCE = FOUR, class Call> inline void for_row_quads(int64_t rows, Call &&call) {
    for (int64_t row = 0; row < rows; row += AT_ONCE)
        with_row_count<AT_ONCE>(int(min<int64_t>(rows - row, AT_ONCE)), [&](auto count) { call(row, count); });
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
              const LaterRows &later) {
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t head = 0; head < state.task.num_heads; head++)
            for_row_quads<QK_ROWS>(state.rows, [&](int64_t row, auto some) {
                const Operand<T> *queries = state.head(head).queries + row * state.depth;
                float *to = scores + (head * state.rows + row) * KEYS + j;
#if defined(RADIXSERVE_LANE_SCORES)
                lane_scores<some>(queries, state.depth, keys + j, head * dim, dim, to, KEYS, later.from_row(j));
#else
                qk_panel<some>(queries, state.depth, keys + j, head * dim, dim, to, KEYS, later.from_row(j));
#endif
            });
}

// Adds the weighted values of a block to the outputs of one head's rows.
template <class T>
void pv_block(const TaskState<T> &state, int64_t head, const Operand<T> *weights, const T *const *values,
              int64_t count, int64_t dim, const LaterRows &later) {
    for_row_quads(state.rows, [&](int64_t row, auto some) {
        pv_rows<some>(weights + row * KEYS, KEYS, HeadRows<T>{values, count, head * dim, dim},
                      state.head(head).part.acc + row * state.width, state.width, later);
    });
}

// While a block's keys are scored, later keys are prefetched; while its values are weighted, later values.
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
    LaterBlocks blocks(kv, state, most, next);
    for (int64_t from = state.begin; from < state.end; from += blocks.step()) {
        const int64_t *offsets = blocks.offsets(0), count = blocks.count(0);
        state.begin_block(from);
        if (widened_keys) {
            point_at_widened(kv, task.num_heads, keys, kv.k, offsets, count, zeros, widened_keys, scales.keys);
        } else {
            point_at(keys, kv.k, offsets, count, zeros);
            point_at(values, kv.v, offsets, count, zeros);
        }
        const LaterRows later_keys = blocks.rows(kv.k), later_values = blocks.rows(kv.v);
        qk_block(state, keys, count, dim, scores, later_keys);
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
                                   pv_rows<1>(row_weights + first, KEYS,
                                              HeadRows<T>{values + first, end - first, head * dim, dim}, part.acc,
                                              state.width, no_prefetcher(kv.v, offsets + first));
                               });
            }
            pv_block(state, head, weights, values, count, dim, later_values);
        }
    }
}
