// Attention of a few rows to keys and values as they lie in their pages. Packing them, as for products
// of many rows, would cost a single query more than all of its arithmetic.
//
// The sums of a score run over the lanes first, then across them: to the last bits they differ from
// those of product.h.
#pragma once

#include <type_traits>

#include "product.h"

constexpr int FOUR = 4;  // rows, keys or vectors that are worked on together: 16 sums in registers

// Up to how many rows a job does not pay for packing: measured, and with AMX what a tile holds.
template <class T> inline int64_t direct_rows() { return sizeof(T) == 4 ? 24 : has_tiles ? 16 : 8; }

// Whether a job of so many rows, with heads of this size, is for the code here.
template <class T> inline bool is_direct(int64_t rows, int64_t dim) {
#if defined(__AVX512F__)
    return rows <= direct_rows<T>() && dim % int64_t(64 / sizeof(T)) == 0;
#else
    return false;
#endif
}

// Some values, and what to ask the memory for meanwhile: one line of `next` for each line of them.
template <class T> struct Values {
    const T *const *rows;  // each value begins at rows[...] + at; with bf16 an even number of them
    const T *const *next;  // as many
    int64_t count, at, dim;
};

#if defined(__AVX512F__)

inline __m512 add_products(__m512 sum, const float *a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_loadu_ps(a), _mm512_castsi512_ps(b), sum);
}

#if defined(__AVX512BF16__)
inline __m512 add_products(__m512 sum, const bf16 *a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a), (__m512bh)b);
}
#else
inline __m512 add_products(__m512 sum, const bf16 *, __m512i) { return sum; }  // see HAS_BF16
#endif

// The lanes of four vectors summed up, in each quarter apart: (a, b, c, d) four times.
inline __m512 fold(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_castps_pd(ab), high = _mm512_castps_pd(cd);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
}

// Scores of four keys, which begin at keys[...] + at, for H rows: scores[row * stride + key].
template <int H, class T>
inline void score_four(const T *queries, int64_t depth, const T *const *keys, int64_t at, int64_t dim,
                       float *scores, int64_t stride) {
    __m512 sums[H][FOUR] = {};
    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) {
        __m512i some[FOUR];
#pragma GCC unroll 4
        for (int k = 0; k < FOUR; k++) some[k] = _mm512_loadu_si512(keys[k] + at + d);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++)
#pragma GCC unroll 4
            for (int k = 0; k < FOUR; k++)
                sums[h][k] = add_products(sums[h][k], queries + h * depth + d, some[k]);
    }
    __m512 rows[FOUR] = {};
#pragma GCC unroll 4
    for (int h = 0; h < H; h++) rows[h] = fold(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
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

// mixed[row][d ...] += the weighted sum of the values, for H rows and V vectors from d on.
template <int H, int V>
inline void mix_vectors(const float *weights, int64_t stride, const Values<float> &values, int64_t d,
                        float *mixed, int64_t width) {
    const int64_t at = values.at + d;
    __m512 sums[H][V];
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) sums[h][v] = _mm512_loadu_ps(mixed + h * width + d + v * 16);
    for (int64_t k = 0; k < values.count; k++) {
        __m512 some[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            some[v] = _mm512_loadu_ps(values.rows[k] + at + v * 16);
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
        for (int v = 0; v < V; v++) _mm512_storeu_ps(mixed + h * width + d + v * 16, sums[h][v]);
}

template <int H>
inline void mix(const float *weights, int64_t stride, const Values<float> &values, float *mixed,
                int64_t width) {
    int64_t d = 0;
    for (; d + 64 <= values.dim; d += 64) mix_vectors<H, 4>(weights, stride, values, d, mixed, width);
    for (; d + 32 <= values.dim; d += 32) mix_vectors<H, 2>(weights, stride, values, d, mixed, width);
    for (; d < values.dim; d += 16) mix_vectors<H, 1>(weights, stride, values, d, mixed, width);
}

#if defined(__AVX512BF16__)
// V lines of 32 features. Two values at a time, their features side by side as the dot product of
// pairs wants them: in every quarter of a line the lower four features come first, then the upper.
template <int H, int V>
inline void mix_vectors(const bf16 *weights, int64_t stride, const Values<bf16> &values, int64_t d,
                        float *mixed, int64_t width) {
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
            float *to = mixed + h * width + d + v * 32;
            const __m512 low = sums[h][2 * v], high = sums[h][2 * v + 1];
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_permutex2var_ps(low, first, high)));
            to += 16;
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_permutex2var_ps(low, second, high)));
        }
}

template <int H>
inline void mix(const bf16 *weights, int64_t stride, const Values<bf16> &values, float *mixed,
                int64_t width) {
    int64_t d = 0;
    for (; d + 64 <= values.dim; d += 64) mix_vectors<H, 2>(weights, stride, values, d, mixed, width);
    for (; d < values.dim; d += 32) mix_vectors<H, 1>(weights, stride, values, d, mixed, width);
}
#else
template <int H>
inline void mix(const bf16 *, int64_t, const Values<bf16> &, float *, int64_t) {}
#endif

// As many rows as there are, four at a time: call(first row, their number as a constant).
template <class Call> inline void by_fours(int64_t rows, Call &&call) {
    for (int64_t row = 0; row < rows; row += FOUR) switch (rows - row) {
        case 1: call(row, std::integral_constant<int, 1>()); break;
        case 2: call(row, std::integral_constant<int, 2>()); break;
        case 3: call(row, std::integral_constant<int, 3>()); break;
        default: call(row, std::integral_constant<int, 4>());
        }
}

#else

template <int H, class T>
inline void score_four(const T *, int64_t, const T *const *, int64_t, int64_t, float *, int64_t) {}
template <int H, class T>
inline void mix(const T *, int64_t, const Values<T> &, float *, int64_t) {}
template <class Call> inline void by_fours(int64_t, Call &&) {}

#endif
