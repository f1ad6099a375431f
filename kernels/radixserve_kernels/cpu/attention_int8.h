// Attention to keys and values in 8 bits by products of integers, where the processor has VNNI.
//
// A query is multiplied with the matrix of hadamard.h and rounded to 16 bits, in two parts of 8: q = scale * (256 * high + low). Its products with a key's integers are
// summed in 32 bits, which no order changes, so that a score has the same bits whether keys lie in their pages or are
// packed. Values are widened in registers and weighted as others are.
#pragma once

#include "attention_direct.h"
#include "integer_dot.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr bool HAS_INTEGER_SCORES = true;
#else
constexpr bool HAS_INTEGER_SCORES = false;
#endif

constexpr int64_t MAX_INTEGER_DIM = 512;  // 127 * 32,639 * 512 fits into 32 bits
constexpr int WORD_KEYS = 16;             // whose words of four numbers lie side by side

template <class T> inline bool has_integer_scores(const PagedKv<T> &kv) {
    return HAS_INTEGER_SCORES && kv.type == INT8_KV && kv.heads.dim % 16 == 0 && kv.heads.dim <= MAX_INTEGER_DIM;
}

// Queries of a task in two parts of 8 bits.
struct IntegerQueries {
    int8_t *parts;    // [heads * rows][dim / 4][high, low][4]
    int32_t *starts;  // [heads * rows][high, low] what sums start from: keys are multiplied with 128 added to them
    float *scales;    // [heads * rows]
    int64_t dim;

    template <class T> IntegerQueries(const TaskState<T> &state, int64_t dim, ThreadScratch &scratch) : dim(dim) {
        const int64_t total = state.rows * state.task.num_heads;
        parts = scratch.query_parts.get<int8_t>(total * dim * 2);
        starts = scratch.query_starts.get<int32_t>(total * 2);
        scales = scratch.query_scales.get<float>(total);
        float *rotated = scratch.rotated_query.get<float>(dim);
        for (int64_t row = 0; row < total; row++) {
            convert_wide(state.all.queries + row * state.depth, dim, rotated);
            multiply_hadamard(rotated, dim);
            round(rotated, row);
        }
    }

  private:
    void round(const float *query, int64_t row) {
        vec most = {}, odd = {};
        for (int64_t d = 0; d < dim; d += LANES) {
            const vec some = load(query + d);
            most = max(most, max(some, -some)), odd += some - some;
        }
        const float largest = reduce_max(most);
        const bool is_zero = !(largest >= LEAST_KV);
        const vec inverse = broadcast(is_zero ? 0.0f : 32639.0f / largest);
        int8_t *to = parts + row * dim * 2;
        int32_t high_sum = 0, low_sum = 0;
        for (int64_t d = 0; d < dim; d += LANES) {
            const ivec rounded = round_lanes(load(query + d) * inverse), high = (rounded + 128) >> 8;
            const ivec low = rounded - (high << 8);
            for (int i = 0; i < LANES; i++) {
                int8_t *four = to + (d + i) / 4 * 8 + (d + i) % 4;
                four[0] = int8_t(high[i]), four[4] = int8_t(low[i]);
                high_sum += int8_t(high[i]), low_sum += int8_t(low[i]);
            }
        }
        starts[2 * row] = -128 * high_sum, starts[2 * row + 1] = -128 * low_sum;
        scales[row] = (is_zero ? 0.0f : largest / 32639.0f) + reduce_add(odd);  // NaN where a number is not finite
    }
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// Adds the products of the four numbers in each lane of `words`, plus 128, to both parts of H rows.
template <int H, int N>
inline void add_words(const int8_t *const (&rows)[H], int64_t at, const __m512i (&words)[N], __m512i (&sums)[H][N][2]) {
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            int32_t four;
            memcpy(&four, rows[h] + at * 8 + part * 4, 4);
#pragma GCC unroll 2
            for (int n = 0; n < N; n++)
                sums[h][n][part] = _mm512_dpbusd_epi32(sums[h][n][part], words[n], _mm512_set1_epi32(four));
        }
}

template <int H, int N>
inline void begin_sums(const IntegerQueries &queries, int64_t row, const int8_t *(&rows)[H], __m512i (&sums)[H][N][2]) {
    for (int h = 0; h < H; h++) {
        rows[h] = queries.parts + (row + h) * queries.dim * 2;
        for (int n = 0; n < N; n++)
            for (int part = 0; part < 2; part++)
                sums[h][n][part] = _mm512_set1_epi32(queries.starts[2 * (row + h) + part]);
    }
}

template <int H, int N>
inline void finish_sums(const IntegerQueries &queries, int64_t row, const __m512i (&sums)[H][N][2], float *scores,
                        int64_t stride) {
    for (int h = 0; h < H; h++)
        for (int n = 0; n < N; n++) {
            const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[h][n][0], 8), sums[h][n][1]);
            store(scores + h * stride + n * LANES,
                  (vec)_mm512_cvtepi32_ps(sum) * broadcast(queries.scales[row + h]));
        }
}

// Scores of N times 16 keys, of which numbers begin at keys[...] + at, for H rows.
template <int H, int N>
inline void integer_scores(const IntegerQueries &queries, int64_t row, const char *const *keys, int64_t at,
                           float *scores, int64_t stride, RowPrefetcher &shared_prefetcher) {
    RowPrefetcher prefetcher = shared_prefetcher;
    const int8_t *rows[H];
    __m512i sums[H][N][2];
    begin_sums(queries, row, rows, sums);
    const __m512i offset = _mm512_set1_epi8(-128);
    for (int64_t d = 0; d < queries.dim; d += 16) {
        prefetcher.fetch<true>(N * 5);  // lines that are read, and those that a row begins or ends within
        uvec words[N][4];
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) {
            const uint32_t *from[LANES];
            for (int i = 0; i < LANES; i++) from[i] = (const uint32_t *)(keys[n * LANES + i] + at + d);
            transpose_words(from, 0, words[n]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m512i some[N];
            for (int n = 0; n < N; n++) some[n] = _mm512_xor_si512((__m512i)words[n][i], offset);
            add_words<H, N>(rows, d / 4 + i, some, sums);
        }
    }
    shared_prefetcher = prefetcher;
    finish_sums(queries, row, sums, scores, stride);
}

// Adds weighted values to out[row][d ...], key after key, for H rows and V vectors of numbers from d on, which begin at
// values[...] + at.
template <int H, int V>
inline void integer_values(const Operand<float> *weights, int64_t stride, const char *const *values, int64_t count,
                           int64_t at, float *out, int64_t width, RowPrefetcher &shared_prefetcher) {
    RowPrefetcher prefetcher = shared_prefetcher;
    vec sums[H][V];
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) sums[h][v] = load(out + h * width + v * LANES);
    for (int64_t k = 0; k < count; k++) {
        vec some[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) some[v] = load((const int8_t *)values[k] + at + v * LANES);
        prefetcher.fetch<true>((V * LANES + 63) / 64);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            const vec weight = broadcast(weights[h * stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[h][v] = sums[h][v] + weight * some[v];
        }
    }
    shared_prefetcher = prefetcher;
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) store(out + h * width + v * LANES, sums[h][v]);
}

#if defined(RADIXSERVE_BF16)
// The same two keys at a time: the number of an odd key in the upper half of a lane, that of an even one in the lower.
template <int H, int V>
inline void integer_values(const bf16 *weights, int64_t stride, const char *const *values, int64_t count, int64_t at,
                           float *out, int64_t width, RowPrefetcher &shared_prefetcher) {
    RowPrefetcher prefetcher = shared_prefetcher;
    __m512 sums[H][V];
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) sums[h][v] = (__m512)load(out + h * width + v * LANES);
    for (int64_t k = 0; k < count; k += 2) {
        __m512i some[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const uvec even = (uvec)load((const int8_t *)values[k] + at + v * LANES);
            const uvec odd = (uvec)load((const int8_t *)values[k + 1] + at + v * LANES);
            some[v] = (__m512i)(odd | (even >> 16));  // a small integer has no lower half
        }
        prefetcher.fetch<true>((2 * V * LANES + 63) / 64 + 1);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            int32_t both;
            memcpy(&both, weights + h * stride + k, 4);
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[h][v] = _mm512_dpbf16_ps(sums[h][v], weight, (__m512bh)some[v]);
        }
    }
    shared_prefetcher = prefetcher;
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) store(out + h * width + v * LANES, (vec)sums[h][v]);
}
#endif

template <int H, class Number>
inline void integer_value_rows(const Number *weights, int64_t stride, const char *const *values, int64_t count,
                               int64_t at, int64_t dim, float *out, int64_t width, RowPrefetcher &prefetcher) {
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        integer_values<H, 4>(weights, stride, values, count, at + d, out + d, width, prefetcher);
    for (; d < dim; d += LANES)
        integer_values<H, 1>(weights, stride, values, count, at + d, out + d, width, prefetcher);
}

// Scales of `count` keys or values, up to a multiple of 8, which lie at rows[...] + at.
inline void load_scales(const char *const *rows, int64_t at, int64_t count, float *to) {
    for (int64_t j = 0; j < count; j += 8) {
        __m128i some = _mm_setzero_si128();
        auto scale = [&](int i) { uint16_t x; memcpy(&x, rows[j + i] + at, 2); return int(x); };
        some = _mm_insert_epi16(some, scale(0), 0), some = _mm_insert_epi16(some, scale(1), 1);
        some = _mm_insert_epi16(some, scale(2), 2), some = _mm_insert_epi16(some, scale(3), 3);
        some = _mm_insert_epi16(some, scale(4), 4), some = _mm_insert_epi16(some, scale(5), 5);
        some = _mm_insert_epi16(some, scale(6), 6), some = _mm_insert_epi16(some, scale(7), 7);
        _mm256_storeu_ps(to + j, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(some), 16)));
    }
}

// As attend_direct.
template <class T>
void attend_int8(const PagedKv<T> &kv, const TaskState<T> &state, const Task *next, ThreadScratch &scratch) {
    const Task &task = state.task;
    const int64_t rows = state.rows, dim = kv.heads.dim, size = task.num_heads * kv.head_bytes;
    float *scores = scratch.scores.get<float>(task.num_heads * rows * KEYS);
    Operand<T> *weights = scratch.weights.get<Operand<T>>(rows * KEYS);
    const char *zeros = scratch.zeros.get<char>(size);
    const BlockScales scales = kv.scales(task, scratch);
    const IntegerQueries queries(state, dim, scratch);
    const char *keys[KEYS], *values[KEYS];
    int64_t offsets_of[2][KEYS], *offsets = offsets_of[0], *later = offsets_of[1];  // of a block and of the next one
    int64_t from = state.begin, num_later = 0;
    int64_t count = from < state.end ? kv.key_offsets(task, from, state.block_end(from, DIRECT_KEYS), offsets) : 0;
    for (; from < state.end; from += count, count = num_later, std::swap(offsets, later)) {
        state.begin_block(from);
        for (int64_t j = 0; j < round_up(count, PANEL); j++) {
            keys[j] = j < count ? kv.k + offsets[j] : zeros;
            values[j] = j < count ? kv.v + offsets[j] : zeros;
        }
        num_later = kv.next_offsets(state, from + count, DIRECT_KEYS, next, later);
        RowPrefetcher prefetcher(kv.v, offsets, count, size);
        for (int64_t j = 0; j < count; j += PANEL)
            for (int64_t head = 0; head < task.num_heads; head++)
                for_row_quads(rows, [&](int64_t row, auto some) {
                    float *to = scores + (head * rows + row) * KEYS + j;
                    const int64_t at = head * kv.head_bytes, of_head = head * rows + row;
                    if (count - j > LANES)
                        integer_scores<some, 2>(queries, of_head, keys + j, at, to, KEYS, prefetcher);
                    else
                        integer_scores<some, 1>(queries, of_head, keys + j, at, to, KEYS, prefetcher);
                });
        prefetcher = RowPrefetcher(kv.k, later, num_later, size);
        for (int64_t head = 0; head < task.num_heads; head++) {
            const HeadState<T> of_head = state.head(head);
            const int64_t at = head * kv.head_bytes;
            const BlockScales of_block = scales.of_head(head);
            load_scales(keys, at + dim, count, of_block.keys);
            load_scales(values, at + dim, count, of_block.values);
            for (int64_t row = 0; row < rows; row++) {
                const SoftmaxState part = of_head.part.from_row(row, state.width);
                Operand<T> *row_weights = weights + row * KEYS;
                kv.softmax_row(state, row, from, count, padded_depth<Operand<T>>(count),
                               scores + (head * rows + row) * KEYS, row_weights, of_block, part,
                               [&](int64_t first, int64_t end) {
                                   RowPrefetcher no_prefetcher(kv.v, offsets, 0, size);
                                   integer_value_rows<1>(row_weights + first, KEYS, values + first, end - first, at, dim,
                                                         part.acc, state.width, no_prefetcher);
                               });
            }
            for_row_quads(rows, [&](int64_t row, auto some) {
                integer_value_rows<some>(weights + row * KEYS, KEYS, values, count, at, dim,
                                         of_head.part.acc + row * state.width, state.width, prefetcher);
            });
        }
    }
}

// Packs the numbers of keys, `count` a multiple of PANEL, plus 128, to panels [dim / 4][PANEL][4].
inline void pack_integer_keys(const char *const *keys, int64_t count, int64_t dim, uint8_t *panels) {
    const uvec offset = (uvec)_mm512_set1_epi8(-128);
    for (int64_t first = 0; first < count; first += PANEL, panels += PANEL * dim)
        for (int64_t d = 0; d < dim; d += 16)
            for (int n = 0; n < PANEL; n += LANES) {
                const uint32_t *from[LANES];
                for (int i = 0; i < LANES; i++) from[i] = (const uint32_t *)(keys[first + n + i] + d);
                uvec words[4];
                transpose_words(from, 0, words);
                for (int i = 0; i < 4; i++) {
                    words[i] ^= offset;
                    memcpy(panels + ((d / 4 + i) * PANEL + n) * 4, &words[i], sizeof words[i]);
                }
            }
}

// Scores of `num_panels` panels of packed keys for rows [row, row + count), to scores[row * KEYS + key].
inline void packed_integer_scores(const IntegerQueries &queries, int64_t row, int64_t count, const uint8_t *panels,
                                  int num_panels, float *scores) {
    for (int panel = 0; panel < num_panels; panel++, panels += PANEL * queries.dim)
        for_row_quads(count, [&](int64_t first, auto some) {
            const int8_t *rows[some];
            __m512i sums[some][2][2];
            begin_sums(queries, row + first, rows, sums);
            for (int64_t word = 0; word < queries.dim / 4; word++) {
                const __m512i both[2] = {_mm512_loadu_si512(panels + word * PANEL * 4),
                                         _mm512_loadu_si512(panels + word * PANEL * 4 + 64)};
                add_words<some, 2>(rows, word, both, sums);
            }
            finish_sums(queries, row + first, sums, scores + first * KEYS + panel * PANEL, KEYS);
        });
}

#else

template <class T> void attend_int8(const PagedKv<T> &, const TaskState<T> &, const Task *, ThreadScratch &) {}
inline void pack_integer_keys(const char *const *, int64_t, int64_t, uint8_t *) {}
inline void packed_integer_scores(const IntegerQueries &, int64_t, int64_t, const uint8_t *, int, float *) {}

#endif
