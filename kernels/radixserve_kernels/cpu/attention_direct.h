// Attention of a few rows to keys and values as they lie in their pages, by AVX-512: packing them would cost
// a single query more than all of its arithmetic. Other processors pack always.
//
// The sums of a score run over the lanes first, then across them: their last bits differ from those of
// gemm.h.
#pragma once

#include "attention_task.h"

constexpr int FOUR = 4;  // rows, keys or vectors of one step: 16 sums in registers

// Up to so many rows a job is faster without packing: measured, and with AMX the rows of a tile.
template <class T> inline int64_t direct_rows() { return sizeof(Operand<T>) == 4 ? 24 : has_amx ? 16 : 8; }

// Features that are multiplied at a time, one register of them.
template <class T> constexpr int64_t DIRECT_STEP = 64 / sizeof(Operand<T>);

// Whether a job of `rows` rows and heads of `dim` features is read without packing.
template <class T> inline bool is_direct(int64_t rows, int64_t dim) {
#if defined(__AVX512F__)
    return rows <= direct_rows<T>() && dim % DIRECT_STEP<T> == 0;
#else
    return false;
#endif
}

// Values of one head, and what to prefetch meanwhile: one line of `next` for each line of them.
template <class T> struct Values {
    const T *const *rows;  // [count, for pairs rounded up to even] each value begins at rows[...] + at
    const T *const *next;  // as many
    int64_t count, at, dim;
};

#if defined(__AVX512F__)

// A register of numbers, in the type in which they are multiplied with those of the second argument.
inline __m512 load_step(const float *from, const float *) { return _mm512_loadu_ps(from); }
inline __m512 load_step(const bf16 *from, const float *) { return (__m512)load(from); }
inline __m512 add_products(__m512 sum, const float *a, __m512 b) {
    return _mm512_fmadd_ps(_mm512_loadu_ps(a), b, sum);
}

#if defined(__AVX512BF16__)
inline __m512bh load_step(const bf16 *from, const bf16 *) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512 add_products(__m512 sum, const bf16 *a, __m512bh b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a), b);
}
#endif

// Sums of four lanes each, in every quarter of the register: (a, b, c, d).
inline __m512 reduce_quarters(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_castps_pd(ab), high = _mm512_castps_pd(cd);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
}

// Scores of four keys, which begin at keys[...] + at, for H rows, to scores[row * stride + key].
template <int H, class T>
inline void qk_dot4(const Operand<T> *queries, int64_t depth, const T *const *keys, int64_t at, int64_t dim,
                       float *scores, int64_t stride) {
    __m512 sums[H][FOUR] = {};
    for (int64_t d = 0; d < dim; d += DIRECT_STEP<T>) {
        decltype(load_step(keys[0], queries)) some[FOUR];
#pragma GCC unroll 4
        for (int k = 0; k < FOUR; k++) some[k] = load_step(keys[k] + at + d, queries);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++)
#pragma GCC unroll 4
            for (int k = 0; k < FOUR; k++)
                sums[h][k] = add_products(sums[h][k], queries + h * depth + d, some[k]);
    }
    __m512 rows[FOUR] = {};
#pragma GCC unroll 4
    for (int h = 0; h < H; h++) rows[h] = reduce_quarters(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(rows[0], rows[1], 0x44),
                                     _mm512_shuffle_f32x4(rows[0], rows[1], 0xee));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(rows[2], rows[3], 0x44),
                                      _mm512_shuffle_f32x4(rows[2], rows[3], 0xee));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                                     _mm512_shuffle_f32x4(low, high, 0xdd));
    _mm_storeu_ps(scores, _mm512_castps512_ps128(all));
    if (H > 1) _mm_storeu_ps(scores + stride, _mm512_extractf32x4_ps(all, 1));
    if (H > 2) _mm_storeu_ps(scores + 2 * stride, _mm512_extractf32x4_ps(all, 2));
    if (H > 3) _mm_storeu_ps(scores + 3 * stride, _mm512_extractf32x4_ps(all, 3));
}

// acc[row][d ...] += the weighted sum of the values, for H rows and V vectors from d on.
template <int H, int V, class T>
inline void pv_vectors(const float *weights, int64_t stride, const Values<T> &values, int64_t d,
                        float *acc, int64_t width) {
    const int64_t at = values.at + d;
    __m512 sums[H][V];
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) sums[h][v] = _mm512_loadu_ps(acc + h * width + d + v * 16);
    for (int64_t k = 0; k < values.count; k++) {
        __m512 some[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            some[v] = load_step(values.rows[k] + at + v * 16, weights);
            __builtin_prefetch(values.next[k] + d + v * 16, 0, 2);
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            const __m512 weight = _mm512_set1_ps(weights[h * stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[h][v] = _mm512_fmadd_ps(weight, some[v], sums[h][v]);
        }
    }
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) _mm512_storeu_ps(acc + h * width + d + v * 16, sums[h][v]);
}

template <int H, class T>
inline void pv_gemm(const float *weights, int64_t stride, const Values<T> &values, float *acc,
                int64_t width) {
    int64_t d = 0;
    for (; d + 64 <= values.dim; d += 64) pv_vectors<H, 4>(weights, stride, values, d, acc, width);
    for (; d + 32 <= values.dim; d += 32) pv_vectors<H, 2>(weights, stride, values, d, acc, width);
    for (; d < values.dim; d += 16) pv_vectors<H, 1>(weights, stride, values, d, acc, width);
}

#if defined(__AVX512BF16__)
// V lines of 32 features. Two values at a time, their features interleaved for the dot product of pairs: in
// every quarter of a line the lower four features come first, then the upper four.
template <int H, int V>
inline void pv_vectors(const bf16 *weights, int64_t stride, const Values<bf16> &values, int64_t d,
                        float *acc, int64_t width) {
    const int64_t at = values.at + d;
    __m512 sums[H][2 * V] = {};
    for (int64_t k = 0; k < values.count; k += 2) {
        __m512i some[2 * V];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
            const __m512i even = _mm512_loadu_si512(values.rows[k] + at + v * 32);
            const __m512i odd = _mm512_loadu_si512(values.rows[k + 1] + at + v * 32);
            __builtin_prefetch(values.next[k] + d + v * 32, 0, 2);
            __builtin_prefetch(values.next[k + 1] + d + v * 32, 0, 2);
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
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) {
            float *to = acc + h * width + d + v * 32;
            const __m512 low = sums[h][2 * v], high = sums[h][2 * v + 1];
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_permutex2var_ps(low, first, high)));
            to += 16;
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_permutex2var_ps(low, second, high)));
        }
}

template <int H>
inline void pv_gemm(const bf16 *weights, int64_t stride, const Values<bf16> &values, float *acc,
                int64_t width) {
    int64_t d = 0;
    for (; d + 64 <= values.dim; d += 64) pv_vectors<H, 2>(weights, stride, values, d, acc, width);
    for (; d < values.dim; d += 32) pv_vectors<H, 1>(weights, stride, values, d, acc, width);
}
#endif

// Splits rows into fours: call(first row, their number as a constant).
template <class Call> inline void for_row_quads(int64_t rows, Call &&call) {
    for (int64_t row = 0; row < rows; row += FOUR)
        with_row_count<FOUR>(int(min<int64_t>(rows - row, FOUR)), [&](auto count) { call(row, count); });
}

// Scores of a block of keys for all heads and rows of a task, [heads][rows][DIRECT_KEYS]. The block's values
// are prefetched meanwhile, four of one head's size with each head.
template <class T>
void qk_direct(const TaskState<T> &state, const T *const *keys, const T *const *values, int64_t count,
               int64_t dim, float *scores) {
    const int64_t num_heads = state.task.num_heads, size = num_heads * dim, line = 64 / sizeof(T);
    for (int64_t j = 0; j < count; j += FOUR) {
        int64_t key = j, offset = 0;  // of the values
        for (int64_t head = 0; head < num_heads; head++) {
            for (int64_t i = 0; i < FOUR * dim; i += line) {
                __builtin_prefetch(values[key] + offset, 0, 2);
                offset += line;
                if (offset == size) offset = 0, key++;
            }
            for_row_quads(state.rows, [&](int64_t row, auto some) {
                qk_dot4<some, T>(state.head(head).queries + row * state.depth, state.depth, keys + j, head * dim, dim,
                              scores + (head * state.rows + row) * DIRECT_KEYS + j, DIRECT_KEYS);
            });
        }
    }
}

// The values are prefetched while keys are scored, the next keys while values are weighted: in the order in
// which they lie, so that the processor's own prefetcher follows.
template <class T>
void attend_direct(const PagedKv<T> &kv, const TaskState<T> &state, const Task *next, ThreadScratch &scratch) {
    const Task &task = state.task;
    const int64_t rows = state.rows, dim = kv.heads.dim, size = task.num_heads * dim;
    float *scores = scratch.scores.get<float>(task.num_heads * rows * DIRECT_KEYS);
    Operand<T> *weights = scratch.weights.get<Operand<T>>(rows * DIRECT_KEYS);
    const T *zeros = scratch.zeros.get<T>(size);
    const T *keys[DIRECT_KEYS], *values[DIRECT_KEYS], *later[DIRECT_KEYS];
    int64_t offsets[DIRECT_KEYS];
    const int64_t first = state.first_block(DIRECT_KEYS);
    int64_t count = first < state.end ? kv.key_offsets(task, first, state.end, offsets) : 0, num_later = 0;
    for (int64_t from = first; from < state.end; from += DIRECT_KEYS, count = num_later) {
        for (int64_t j = 0; j < DIRECT_KEYS; j++) {  // zeros after the last one, to whole fours
            keys[j] = j < count ? kv.k + offsets[j] : zeros;
            values[j] = j < count ? kv.v + offsets[j] : zeros;
        }
        qk_direct(state, keys, values, count, dim, scores);
        const bool starts = state.begins && !from && !state.first_seen;
        int64_t key = 0, at = 0;
        num_later = kv.next_offsets(state, from, next, offsets);
        for (int64_t head = 0; head < task.num_heads; head++) {
            const HeadState<T> part = state.head(head);
            for (int64_t row = 0; row < rows; row++)
                kv.softmax_row(state, row, from, count, padded_depth<Operand<T>>(count),
                               scores + (head * rows + row) * DIRECT_KEYS, weights + row * DIRECT_KEYS,
                               part.row_max[row], part.sums + row * LANES,
                               starts ? nullptr : part.acc + row * state.width, state.width);
            for (int64_t j = 0; j < DIRECT_KEYS; j++) {
                later[j] = key < num_later ? kv.k + offsets[key] + at : zeros;
                at += dim;
                if (at == size) at = 0, key++;
            }
            const Values<T> block{values, later, count, head * dim, dim};
            if (starts) memset(part.acc, 0, rows * state.width * sizeof(float));
            for_row_quads(rows, [&](int64_t row, auto some) {
                pv_gemm<some>(weights + row * DIRECT_KEYS, DIRECT_KEYS, block, part.acc + row * state.width,
                              state.width);
            });
        }
    }
}

#else

template <class T>
void attend_direct(const PagedKv<T> &, const TaskState<T> &, const Task *, ThreadScratch &) {}

#endif
