// Attention to keys and values in 8 bits as they lie in their pages, where the processor has AVX2.
//
// With VNNI a query is multiplied with the matrix of hadamard.h and rounded to 16 bits, in two parts of 8:
// q = scale * (256 * high + low). Its products with a key's integers, to which 128 is added, are summed in 32 bits, which
// no order changes, so that a score has the same bits whether keys lie in their pages or are packed. With AVX2 a query is
// rounded so that float32 sums are exact too: packed keys are multiplied as float32, others as integers of 16 bits. At
// other levels keys are widened in registers, and scores are summed over the features in order. Values are widened in
// registers too, and weighted as others are.
#pragma once

#include <cmath>

#include "attention_direct.h"
#include "integer_dot.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define RADIXSERVE_VNNI
constexpr bool HAS_INTEGER_SCORES = true, WIDENS_KEYS = false;
#elif defined(__AVX2__)
constexpr bool HAS_INTEGER_SCORES = false, WIDENS_KEYS = true;
#else
constexpr bool HAS_INTEGER_SCORES = false, WIDENS_KEYS = false;
#endif

constexpr int64_t MAX_INTEGER_DIM = 512;  // 127 * 32,639 * 512 fits into 32 bits
constexpr bool ROUNDS_QUERIES = HAS_LANE_SCORES;  // see RoundedQuery
constexpr int64_t MAX_ROUNDED_DIM = ROUNDS_QUERIES ? 2048 : INT64_MAX;
constexpr int64_t QUERY_CHUNK = 64;       // numbers of a query whose high parts lie before their low ones

template <class T> inline bool has_integer_scores(const PagedKv<T> &kv) {
    return HAS_INTEGER_SCORES && kv.type == INT8_KV && kv.heads.dim % 16 == 0 && kv.heads.dim <= MAX_INTEGER_DIM;
}

// Whether keys in 8 bits are read as they are stored: as integers, or widened in registers.
template <class T> inline bool reads_integers(const PagedKv<T> &kv) {
    const int64_t dim = kv.heads.dim;
    return has_integer_scores(kv) || (WIDENS_KEYS && kv.type == INT8_KV && dim % 16 == 0 && dim <= MAX_ROUNDED_DIM);
}

// Queries of a task, rounded for products of integers.
struct IntegerQueries {
    int8_t *parts;    // [heads * rows][chunks][high, low][QUERY_CHUNK]; zeros after dim
    int32_t *starts;  // [heads * rows] what sums start from: -128 times the query's sum
    float *scales;    // [heads * rows]
    int64_t dim, chunks;

    template <class T>
    IntegerQueries(const TaskState<T> &state, int64_t dim, ThreadScratch &scratch)
        : dim(dim), chunks((dim + QUERY_CHUNK - 1) / QUERY_CHUNK) {
        const int64_t total = state.rows * state.task.num_heads;
        parts = scratch.query_parts.get<int8_t>(total * chunks * 2 * QUERY_CHUNK);
        starts = scratch.query_starts.get<int32_t>(total);
        scales = scratch.query_scales.get<float>(total);
        float *rotated = scratch.rotated_query.get<float>(dim);
        for (int64_t row = 0; row < total; row++) {
            convert_wide(state.all.queries + row * state.depth, dim, rotated);
            multiply_hadamard(rotated, dim);
            round(rotated, row);
        }
    }

    const int8_t *chunk(int64_t row, int64_t chunk) const { return parts + (row * chunks + chunk) * 2 * QUERY_CHUNK; }

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
        scales[row] = (is_zero ? 0.0f : largest / 32639.0f) + reduce_add(odd);  // NaN where a number is not finite
        ivec sum = {};
#if defined(RADIXSERVE_VNNI)
        int8_t *to = parts + row * chunks * 2 * QUERY_CHUNK;
        memset(to + (chunks - 1) * 2 * QUERY_CHUNK, 0, 2 * QUERY_CHUNK);
        for (int64_t d = 0; d < dim; d += LANES) {
            const ivec rounded = round_lanes(load(query + d) * inverse), high = (rounded + 128) >> 8;
            int8_t *lanes = to + d / QUERY_CHUNK * 2 * QUERY_CHUNK + d % QUERY_CHUNK;
            _mm_storeu_si128((__m128i *)lanes, _mm512_cvtepi32_epi8((__m512i)high));
            _mm_storeu_si128((__m128i *)(lanes + QUERY_CHUNK), _mm512_cvtepi32_epi8((__m512i)(rounded - (high << 8))));
            sum += rounded;
        }
        starts[row] = -128 * _mm512_reduce_add_epi32((__m512i)sum);
#endif
    }
};

// A query's numbers as multiples of a power of two, of which 127 times the sum of their sizes is at most 2^24 and none
// needs more than 16 bits: its products with integers of 8 bits add up in float32 without rounding. Up to
// MAX_ROUNDED_DIM numbers.
class RoundedQuery {
  public:
    RoundedQuery(const float *query, int64_t dim) {
        vec sum = {}, most = {};
        for (int64_t d = 0; d < dim; d += LANES) {
            const vec some = load(query + d), size = max(some, -some);
            sum += size, most = max(most, size);
        }
        const float total = reduce_add(sum), largest = 8 * reduce_max(most), bound = total > largest ? total : largest;
        if (total >= LEAST_KV) unit = std::ldexp(1.0f, std::ilogb(bound) - 16), inverse = 1 / unit;
        if (!(total - total == 0)) unit = total - total;  // NaN where a number is not finite
    }
    float unit = 0;  // the power of two; 0 of a query of zeros
    ivec numbers(const float *query) const { return round_lanes(load(query) * broadcast(inverse)); }
    vec rounded(const float *query) const { return to_float(numbers(query)) * broadcast(unit); }

  private:
    float inverse = 0;
};

#if defined(__AVX2__)

// The i-th of the four numbers in each lane.
inline vec widen_number(uvec words, int i) { return to_float((ivec)(words << (24 - 8 * i)) >> 24); }

// Keys in their pages that are scored at once.
#if defined(RADIXSERVE_VNNI)
constexpr int SCORED_KEYS = 16;
#else
constexpr int SCORED_KEYS = ROUNDS_QUERIES ? 8 : PANEL;
#endif

#if defined(RADIXSERVE_VNNI)

// The first `count` of 64 numbers of 16 keys, plus 128: lane i of 128 bits of words[g][quarter] has a quarter of those
// of key 4 * i + g.
inline void load_quarters(const char *const *keys, int64_t at, int64_t count, __m512i (&words)[4][4]) {
    const __m512i offset = _mm512_set1_epi8(-128);
    const __mmask64 mask = count >= 64 ? ~__mmask64(0) : (__mmask64(1) << count) - 1;
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
        __m512i rows[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const char *from = keys[4 * i + g] + at;
            rows[i] = count >= 64 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8(mask, from);
            rows[i] = _mm512_xor_si512(rows[i], offset);
        }
        const __m512i a = _mm512_shuffle_i32x4(rows[0], rows[1], 0x44), b = _mm512_shuffle_i32x4(rows[0], rows[1], 0xee);
        const __m512i c = _mm512_shuffle_i32x4(rows[2], rows[3], 0x44), d = _mm512_shuffle_i32x4(rows[2], rows[3], 0xee);
        words[g][0] = _mm512_shuffle_i32x4(a, c, 0x88), words[g][1] = _mm512_shuffle_i32x4(a, c, 0xdd);
        words[g][2] = _mm512_shuffle_i32x4(b, d, 0x88), words[g][3] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

// Adds the products of `words` with a part of a query's chunk.
inline void add_quarters(const int8_t *part, const __m512i (&words)[4][4], __m512i (&sums)[4]) {
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; quarter++) {
        const __m512i numbers = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(part + quarter * 16)));
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) sums[g] = _mm512_dpbusd_epi32(sums[g], words[g][quarter], numbers);
    }
}

// Scores of 16 keys, whose numbers begin at keys[...] + at and have `scales`, for `rows` rows from `first` on.
// Meanwhile later keys are prefetched, see LaterRows.
template <class Later>
inline void integer_scores(const IntegerQueries &queries, int64_t first, int64_t rows, const char *const *keys,
                           int64_t at, const float *scales, float *scores, int64_t stride, const Later &later) {
    __m512i sums_of_rows[16][4];
    for (int64_t chunk = 0; chunk < queries.chunks; chunk++) {
        const int64_t d = chunk * QUERY_CHUNK;
        __m512i words[4][4];
        load_quarters(keys, at + d, queries.dim - d, words);
        for (int64_t row = 0; row < rows; row++) {
            const int8_t *query = queries.chunk(first + row, chunk);
            __m512i sums[4] = {};
            for (int64_t i = row; i < 16; i += rows)  // a part with each row: a burst would be dropped
                later.fetch_twice(i, at + d), later.fetch_twice(i, at + d + 64);  // keys are not aligned
            add_quarters(query, words, sums);
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                sums[g] = _mm512_slli_epi32(sums[g], 8);
                if (chunk) sums[g] = _mm512_add_epi32(sums[g], sums_of_rows[row][g]);
            }
            add_quarters(query + QUERY_CHUNK, words, sums);
            if (chunk + 1 < queries.chunks) {
#pragma GCC unroll 4
                for (int g = 0; g < 4; g++) sums_of_rows[row][g] = sums[g];
                continue;
            }
            auto add_32 = [](__m512i a, __m512i b) {
                return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            };
            const __m512i low = add_32(sums[0], sums[1]), high = add_32(sums[2], sums[3]);
            const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
            const __m512i score = _mm512_add_epi32(all, _mm512_set1_epi32(queries.starts[first + row]));
            store(scores + row * stride,
                  (vec)_mm512_cvtepi32_ps(score) * broadcast(queries.scales[first + row]) * load(scales));
        }
    }
}

#elif !defined(RADIXSERVE_LANE_SCORES)

// The same, times 2^24: by an instruction less.
inline vec widen_raised(uvec words, int i) {
    ivec places = broadcast_int(0x00808080);
    for (int lane = 0; lane < LANES; lane++) places[lane] |= (lane % 4 * 4 + i) << 24;
    return to_float((ivec)_mm512_shuffle_epi8((__m512i)words, (__m512i)places));
}

// Scores of PANEL keys, whose numbers begin at keys[...] + at and have `scales`, for H rows.
template <int H>
inline void widened_scores(const float *queries, int64_t depth, const char *const *keys, int64_t at, int64_t dim,
                           const float *scales, float *scores, int64_t stride, const LaterRows &later) {
    vec sums[H][2] = {};
    for (int64_t d = 0; d < dim; d += 16) {
        for (int j = 0; j < PANEL && d % 64 == 0; j++) later.fetch_twice(j, at + d);
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            const uint32_t *from[LANES];
            for (int i = 0; i < LANES; i++) from[i] = (const uint32_t *)(keys[n * LANES + i] + at + d);
            uvec words[4];
            transpose_words(from, 0, words);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const vec numbers = widen_raised(words[i / 4], i % 4);
#pragma GCC unroll 4
                for (int h = 0; h < H; h++) sums[h][n] = sums[h][n] + broadcast(queries[h * depth + d + i]) * numbers;
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++)
            store(scores + h * stride + n * LANES, sums[h][n] * broadcast(0x1p-24f) * load(scales + n * LANES));
}

#else

// Rounded queries of a task as integers of 16 bits.
struct Int16Queries {
    int16_t *numbers;  // [heads * rows][dim]
    float *units;      // [heads * rows]

    template <class T> Int16Queries(const TaskState<T> &state, int64_t dim, ThreadScratch &scratch) {
        const int64_t total = state.rows * state.task.num_heads;
        numbers = scratch.query_parts.get<int16_t>(total * dim), units = scratch.query_scales.get<float>(total);
        for (int64_t row = 0; row < total; row++) {
            const float *query = state.all.queries + row * state.depth;
            const RoundedQuery rounded(query, dim);
            units[row] = rounded.unit;
            for (int64_t d = 0; d < dim; d += LANES) {
                const __m256i some = (__m256i)rounded.numbers(query + d);
                _mm_storeu_si128((__m128i *)(numbers + row * dim + d),
                                 _mm_packs_epi32(_mm256_castsi256_si128(some), _mm256_extracti128_si256(some, 1)));
            }
        }
    }
};

// Scores of eight keys, whose numbers begin at keys[...] + at and have `scales`, for H rows of integers with their units.
// Meanwhile later keys are prefetched.
template <int H>
inline void integer_scores(const int16_t *queries, const float *units, const char *const *keys, int64_t at, int64_t dim,
                           const float *scales, float *scores, int64_t stride, const LaterRows &later) {
    constexpr int K = H <= 3 ? 4 : 2;  // keys at a time: bounded by registers
    for (int first = 0; first < 8; first += K) {
        __m256i sums[H][K] = {};
        for (int64_t d = 0; d < dim; d += 16) {
            for (int k = 0; k < K && d % 64 == 0; k++)
                later.fetch(first + k, at + d), later.fetch(first + k, at + d + 64);  // rows are not aligned
#pragma GCC unroll 4
            for (int k = 0; k < K; k++) {
                const __m256i key = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(keys[first + k] + at + d)));
#pragma GCC unroll 4
                for (int h = 0; h < H; h++) {
                    const __m256i query = _mm256_loadu_si256((const __m256i *)(queries + h * dim + d));
                    sums[h][k] = _mm256_add_epi32(sums[h][k], _mm256_madd_epi16(key, query));
                }
            }
        }
        auto sum_lanes = [](__m256i a, __m256i b, __m256i c, __m256i d) {
            const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
            return _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
        };
#pragma GCC unroll 4
        for (int h = 0; h < H; h += 4 / K) {
            float *to = scores + h * stride + first;
            if constexpr (K == 4) {
                const __m128 sum = sum_lanes(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
                _mm_storeu_ps(to, _mm_mul_ps(_mm_mul_ps(sum, _mm_set1_ps(units[h])), _mm_loadu_ps(scales + first)));
            } else {
                const __m128 of_keys = (__m128)_mm_loaddup_pd((const double *)(scales + first));
                const __m128 of_rows = _mm_setr_ps(units[h], units[h], units[h + 1], units[h + 1]);
                const __m128 sum = sum_lanes(sums[h][0], sums[h][1], sums[h + 1][0], sums[h + 1][1]);
                const __m128 two_rows = _mm_mul_ps(_mm_mul_ps(sum, of_rows), of_keys);
                _mm_storel_pi((__m64 *)to, two_rows), _mm_storeh_pi((__m64 *)(to + stride), two_rows);
            }
        }
    }
}

#endif

// Adds weighted values to out[row][d ...], key after key, for H rows and V vectors of numbers from d on, which begin at
// values[...] + at.
template <int H, int V>
inline void integer_values(const Operand<float> *weights, int64_t stride, const char *const *values, int64_t count,
                           int64_t at, float *out, int64_t width, const LaterRows &later) {
    vec sums[H][V];
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[h][v] = load(out + h * width + v * LANES);
    for (int64_t k = 0; k < count; k++) {
        later.fetch_twice(k, at), later.fetch_twice(k, at + 64);
#if defined(RADIXSERVE_LANE_SCORES)
        vec weight[H];
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) weight[h] = broadcast(weights[h * stride + k]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const vec some = load((const int8_t *)values[k] + at + v * LANES);
#pragma GCC unroll 4
            for (int h = 0; h < H; h++) sums[h][v] = add_product(sums[h][v], weight[h], some);
        }
#else
        vec some[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) some[v] = load((const int8_t *)values[k] + at + v * LANES);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            const vec weight = broadcast(weights[h * stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[h][v] = sums[h][v] + weight * some[v];
        }
#endif
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(out + h * width + v * LANES, sums[h][v]);
}

#if defined(RADIXSERVE_BF16)
// V times 16 numbers of two keys as pairs of bfloat16, that of the odd key in the upper half of a lane.
template <int V> inline void widen_pairs(const char *even, const char *odd, uvec (&pairs)[V]) {
#if defined(__AVX512VBMI__)
    if constexpr (V == 4) {
        // The bytes of the bfloat16 of 0 to 127, and where a number of either key comes from: halves of a vector's
        // lanes lie such that their bytes, interleaved with each other, come in order.
        struct Tables {
            alignas(64) uint8_t low[128] = {}, high[128] = {}, first[64] = {}, second[64] = {};
            constexpr Tables() {
                for (int x = 1; x < 128; x++) {
                    int power = 0;
                    while (x >> (power + 1)) power++;
                    const int bits = (127 + power) << 7 | ((x << (7 - power)) & 127);
                    low[x] = uint8_t(bits), high[x] = uint8_t(bits >> 8);
                }
                for (int i = 0; i < 64; i++) {
                    const int d = i / 16 * 4 + i % 8 / 2 + i % 16 / 8 * 16;
                    first[i] = uint8_t(d + i % 2 * 64), second[i] = uint8_t(d + 32 + i % 2 * 64);
                }
            }
        };
        static constexpr Tables tables;
        const __m512i low[2] = {_mm512_load_si512(tables.low), _mm512_load_si512(tables.low + 64)};
        const __m512i high[2] = {_mm512_load_si512(tables.high), _mm512_load_si512(tables.high + 64)};
        const __m512i places[2] = {_mm512_load_si512(tables.first), _mm512_load_si512(tables.second)};
        const __m512i of_even = _mm512_loadu_si512(even), of_odd = _mm512_loadu_si512(odd);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512i numbers = _mm512_permutex2var_epi8(of_even, places[half], of_odd);
            const __m512i size = _mm512_abs_epi8(numbers);
            const __m512i lower = _mm512_permutex2var_epi8(low[0], size, low[1]);
            const __m512i upper = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high[0], size, high[1]), numbers,
                                                            _mm512_set1_epi8(-128), 0xf8);  // with the sign
            pairs[2 * half] = (uvec)_mm512_unpacklo_epi8(lower, upper);
            pairs[2 * half + 1] = (uvec)_mm512_unpackhi_epi8(lower, upper);
        }
        return;
    }
#endif
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
        const uvec of_even = (uvec)load((const int8_t *)even + v * LANES);
        const uvec of_odd = (uvec)load((const int8_t *)odd + v * LANES);
        pairs[v] = of_odd | (of_even >> 16);  // a small integer has no lower half
    }
}

// integer_values of two keys at a time.
template <int H, int V>
inline void integer_values(const bf16 *weights, int64_t stride, const char *const *values, int64_t count, int64_t at,
                           float *out, int64_t width, const LaterRows &later) {
    __m512 sums[H][V];
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sums[h][v] = (__m512)load(out + h * width + v * LANES);
    for (int64_t k = 0; k < count; k += 2) {
        uvec some[V];
        widen_pairs<V>(values[k] + at, values[k + 1] + at, some);
        later.fetch_twice(k, at), later.fetch_twice(k + 1, at);
        later.fetch_twice(k, at + 64), later.fetch_twice(k + 1, at + 64);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            int32_t both;
            memcpy(&both, weights + h * stride + k, 4);
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[h][v] = _mm512_dpbf16_ps(sums[h][v], weight, (__m512bh)some[v]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(out + h * width + v * LANES, (vec)sums[h][v]);
}
#endif

template <int H, class Number>
inline void integer_value_rows(const Number *weights, int64_t stride, const char *const *values, int64_t count,
                               int64_t at, int64_t dim, float *out, int64_t width, const LaterRows &later) {
    constexpr int V = vectors_at_once(H);
    int64_t d = 0;
    for (; d + V * LANES <= dim; d += V * LANES)
        integer_values<H, V>(weights, stride, values, count, at + d, out + d, width, later);
    for (; d < dim; d += LANES)
        integer_values<H, 1>(weights, stride, values, count, at + d, out + d, width, later);
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
#if defined(RADIXSERVE_VNNI)
    const IntegerQueries queries(state, dim, scratch);
#elif defined(RADIXSERVE_LANE_SCORES)
    const Int16Queries queries(state, dim, scratch);
#endif
    const char *keys[KEYS], *values[KEYS];
    // Blocks half as large again as of other types: measured.
    LaterBlocks<T> blocks(kv, state, direct_keys(HAS_INTEGER_SCORES ? size * 2 / 3 : size), next);
    for (int64_t from = state.begin; from < state.end; from += blocks.step()) {
        const int64_t *offsets = blocks.offsets(0), count = blocks.count(0);
        state.begin_block(from);
        for (int64_t j = 0; j < round_up(count, PANEL); j++) {
            keys[j] = j < count ? kv.k + offsets[j] : zeros;
            values[j] = j < count ? kv.v + offsets[j] : zeros;
        }
        const LaterRows later_keys = blocks.rows(kv.k), later_values = blocks.rows(kv.v);
        for (int64_t head = 0; head < task.num_heads; head++)
            load_scales(keys, head * kv.head_bytes + dim, count, scales.of_head(head).keys);
        for (int64_t j = 0; j < count; j += SCORED_KEYS)
            for (int64_t head = 0; head < task.num_heads; head++)
#if defined(RADIXSERVE_VNNI)
                integer_scores(queries, head * rows, rows, keys + j, head * kv.head_bytes, scales.of_head(head).keys + j,
                               scores + head * rows * KEYS + j, KEYS, later_keys.from_row(j));
#elif defined(RADIXSERVE_LANE_SCORES)
                for_row_quads(rows, [&](int64_t row, auto some) {
                    integer_scores<some>(queries.numbers + (head * rows + row) * dim, queries.units + head * rows + row,
                                         keys + j, head * kv.head_bytes, dim, scales.of_head(head).keys + j,
                                         scores + (head * rows + row) * KEYS + j, KEYS, later_keys.from_row(j));
                });
#else
                for_row_quads(rows, [&](int64_t row, auto some) {
                    widened_scores<some>(state.head(head).queries + row * state.depth, state.depth, keys + j,
                                         head * kv.head_bytes, dim, scales.of_head(head).keys + j,
                                         scores + (head * rows + row) * KEYS + j, KEYS, later_keys.from_row(j));
                });
#endif
        for (int64_t head = 0; head < task.num_heads; head++) {
            const HeadState<T> of_head = state.head(head);
            const int64_t at = head * kv.head_bytes;
            const BlockScales of_values{nullptr, scales.of_head(head).values};  // the scores have the keys'
            load_scales(values, at + dim, count, of_values.values);
            for (int64_t row = 0; row < rows; row++) {
                const SoftmaxState part = of_head.part.from_row(row, state.width);
                Operand<T> *row_weights = weights + row * KEYS;
                kv.softmax_row(state, row, from, count, padded_depth<Operand<T>>(count),
                               scores + (head * rows + row) * KEYS, row_weights, of_values, part,
                               [&](int64_t first, int64_t end) {
                                   integer_value_rows<1>(row_weights + first, KEYS, values + first, end - first, at, dim,
                                                         part.acc, state.width, no_prefetcher(kv.v, offsets + first));
                               });
            }
            for_row_quads(rows, [&](int64_t row, auto some) {
                integer_value_rows<some>(weights + row * KEYS, KEYS, values, count, at, dim,
                                         of_head.part.acc + row * state.width, state.width, later_values);
            });
        }
    }
}

// -- packed keys and values: `count` of them, whose numbers begin at rows[...] + at

// Keys, `count` a multiple of PANEL, as panels: with VNNI [dim / 4][PANEL][4] of numbers plus 128, else as pack_keys does.
template <class Number>
inline void pack_integer_keys(const char *const *rows, int64_t count, int64_t at, int64_t dim, Number *panels) {
    for (int64_t first = 0; first < count; first += PANEL, panels += PANEL * dim)
        for (int64_t d = 0; d < dim; d += 16)
            for (int n = 0; n < PANEL; n += LANES) {
                const uint32_t *from[LANES];
                for (int i = 0; i < LANES; i++) from[i] = (const uint32_t *)(rows[first + n + i] + at + d);
                uvec words[4];
                transpose_words(from, 0, words);
                if constexpr (sizeof(Number) == 1) {
                    for (int i = 0; i < 4; i++) {
                        words[i] ^= broadcast_int(int32_t(0x80808080));
                        memcpy(panels + (d / 4 + i) * PANEL * 4 + n * 4, &words[i], sizeof words[i]);
                    }
                } else {
#pragma GCC unroll 16
                    for (int i = 0; i < 16; i++) store(panels + (d + i) * PANEL + n, widen_number(words[i / 4], i % 4));
                }
            }
}

#if defined(RADIXSERVE_VNNI)
inline ivec load_words(const char *from) { return *reinterpret_cast<const unaligned_ivec *>(from); }
// Four bytes in each lane.
inline ivec repeat_word(const void *from) {
    int32_t word;
    memcpy(&word, from, 4);
    return broadcast_int(word);
}

// The sums of H rows from `row` on and two vectors of keys as scores, to scores[...][KEYS].
template <int H>
inline void store_scores(const IntegerQueries &queries, int64_t row, const ivec (&sums)[H][2], const float *scales,
                         float *scores) {
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++)
            store(scores + h * KEYS + n * LANES,
                  to_float(sums[h][n]) * broadcast(queries.scales[row + h]) * load(scales + n * LANES));
}

// Scores of a panel of packed keys, which have `scales`, for H rows from `row` on.
template <int H>
inline void packed_integer_scores(const IntegerQueries &queries, int64_t row, const char *panel, const float *scales,
                                  float *scores) {
    ivec sums[H][2] = {};
    ivec high[H][2] = {};
    const int8_t *rows[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; h++) rows[h] = queries.chunk(row + h, 0);
    for (int64_t d = 0, at = 0; d < queries.dim; d += QUERY_CHUNK, at += QUERY_CHUNK) {
        const int64_t end = at + min<int64_t>(queries.dim - d, QUERY_CHUNK);
        for (; at < end; at += 4, panel += 2 * sizeof(ivec)) {
            const __m512i keys[2] = {(__m512i)load_words(panel), (__m512i)load_words(panel + sizeof(ivec))};
#pragma GCC unroll 4
            for (int h = 0; h < H; h++) {
                const __m512i upper = (__m512i)repeat_word(rows[h] + at);
                const __m512i lower = (__m512i)repeat_word(rows[h] + at + QUERY_CHUNK);
#pragma GCC unroll 2
                for (int n = 0; n < 2; n++) {
                    high[h][n] = (ivec)_mm512_dpbusd_epi32((__m512i)high[h][n], keys[n], upper);
                    sums[h][n] = (ivec)_mm512_dpbusd_epi32((__m512i)sums[h][n], keys[n], lower);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) sums[h][n] += (high[h][n] << 8) + broadcast_int(queries.starts[row + h]);
    store_scores<H>(queries, row, sums, scales, scores);
}

// The same of `num_panels` panels for rows [row, row + count).
inline void packed_integer_scores(const IntegerQueries &queries, int64_t row, int64_t count, const char *panels,
                                  int num_panels, const float *scales, float *scores) {
    for (int panel = 0; panel < num_panels; panel++, panels += PANEL * queries.dim)
        for_row_quads(count, [&](int64_t first, auto some) {
            packed_integer_scores<some>(queries, row + first, panels, scales + panel * PANEL,
                                        scores + first * KEYS + panel * PANEL);
        });
}

#endif  // RADIXSERVE_VNNI

#else

template <class T> void attend_int8(const PagedKv<T> &, const TaskState<T> &, const Task *, ThreadScratch &) {}
inline void load_scales(const char *const *, int64_t, int64_t, float *) {}
template <class Number> inline void pack_integer_keys(const char *const *, int64_t, int64_t, int64_t, Number *) {}

#endif

#if !defined(RADIXSERVE_VNNI)
inline void packed_integer_scores(const IntegerQueries &, int64_t, int64_t, const char *, int, const float *, float *) {}
#endif

// Values as pack_values packs them.
inline void pack_integer_values(const char *const *rows, int64_t count, int64_t at, int64_t dim, int64_t depth,
                                float *panels) {
    for (int64_t k = 0; k < count; k++) {
        const int8_t *from = (const int8_t *)rows[k] + at;
        for (int64_t d = 0; d < round_up(dim, PANEL); d += LANES) {
            float *to = panels + d / PANEL * PANEL * depth + k * PANEL + d % PANEL;
            if (d + LANES <= dim) store(to, load(from + d));
            else for (int n = 0; n < LANES; n++) to[n] = d + n < dim ? float(from[d + n]) : 0.0f;
        }
    }
}

#if defined(RADIXSERVE_BF16)
inline void pack_integer_values(const char *const *rows, int64_t count, int64_t at, int64_t dim, int64_t depth,
                                bf16 *panels) {
    for (int64_t k = 0; k < count; k += 2) {
        const char *even = rows[k] + at, *odd = rows[k + 1] + at;
        auto put = [&](int64_t d, uvec pairs) {
            bf16 *panel = panels + d / PANEL * PANEL * depth;
            memcpy((void *)(panel + panel_offset<bf16>(k, int(d % PANEL))), &pairs, sizeof pairs);
        };
        int64_t d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES) {
            uvec pairs[4];
            widen_pairs<4>(even + d, odd + d, pairs);
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) put(d + v * LANES, pairs[v]);
        }
        for (; d < round_up(dim, PANEL); d += LANES) {
            uvec pairs[1] = {};
            if (d < dim) widen_pairs<1>(even + d, odd + d, pairs);  // dim is a multiple of LANES
            put(d, pairs[0]);
        }
    }
}
#endif
