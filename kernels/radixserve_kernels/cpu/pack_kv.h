// Packing of keys and values, given row by row, into the panels of panels.h.
#pragma once

#include "lane_scores.h"
#include "panels.h"

// words[i] holds the word `at + i` of each of LANES keys, in words of 32 bits.
inline void transpose_words(const uint32_t *const *keys, int64_t at, uvec (&words)[4]) {
#if defined(__AVX512F__)
    __m512 rows[4];  // keys i, i + 4, i + 8, i + 12
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_castps128_ps512(_mm_loadu_ps((const float *)keys[i] + at));
        rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps((const float *)keys[i + 4] + at), 1);
        rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps((const float *)keys[i + 8] + at), 2);
        rows[i] = _mm512_insertf32x4(rows[i], _mm_loadu_ps((const float *)keys[i + 12] + at), 3);
    }
    const __m512d a = (__m512d)_mm512_unpacklo_ps(rows[0], rows[1]), b = (__m512d)_mm512_unpackhi_ps(rows[0], rows[1]);
    const __m512d c = (__m512d)_mm512_unpacklo_ps(rows[2], rows[3]), d = (__m512d)_mm512_unpackhi_ps(rows[2], rows[3]);
    words[0] = (uvec)_mm512_unpacklo_pd(a, c), words[1] = (uvec)_mm512_unpackhi_pd(a, c);
    words[2] = (uvec)_mm512_unpacklo_pd(b, d), words[3] = (uvec)_mm512_unpackhi_pd(b, d);
#elif defined(__AVX__)
    __m256 rows[4];  // keys i, i + 4
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_castps128_ps256(_mm_loadu_ps((const float *)keys[i] + at));
        rows[i] = _mm256_insertf128_ps(rows[i], _mm_loadu_ps((const float *)keys[i + 4] + at), 1);
    }
    const __m256d a = (__m256d)_mm256_unpacklo_ps(rows[0], rows[1]), b = (__m256d)_mm256_unpackhi_ps(rows[0], rows[1]);
    const __m256d c = (__m256d)_mm256_unpacklo_ps(rows[2], rows[3]), d = (__m256d)_mm256_unpackhi_ps(rows[2], rows[3]);
    words[0] = (uvec)_mm256_unpacklo_pd(a, c), words[1] = (uvec)_mm256_unpackhi_pd(a, c);
    words[2] = (uvec)_mm256_unpacklo_pd(b, d), words[3] = (uvec)_mm256_unpackhi_pd(b, d);
#elif defined(__aarch64__)
    uint32x4_t rows[4];
    for (int i = 0; i < 4; i++) rows[i] = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)(keys[i] + at)));
    const uint64x2_t a = (uint64x2_t)vzip1q_u32(rows[0], rows[1]), b = (uint64x2_t)vzip2q_u32(rows[0], rows[1]);
    const uint64x2_t c = (uint64x2_t)vzip1q_u32(rows[2], rows[3]), d = (uint64x2_t)vzip2q_u32(rows[2], rows[3]);
    words[0] = (uvec)vzip1q_u64(a, c), words[1] = (uvec)vzip2q_u64(a, c);
    words[2] = (uvec)vzip1q_u64(b, d), words[3] = (uvec)vzip2q_u64(b, d);
#else
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < LANES; j++) words[i][j] = keys[j][at + i];
#endif
}

// words[i] holds the i-th word of each of LANES keys from the number `at` on, of `count` words that are left.
template <class T>
inline void transpose_words(const T *const *keys, int64_t at, int64_t count, uvec (&words)[LANES == 16 ? 16 : 4]) {
#if defined(__AVX512F__)
    asm volatile("" ::: "memory");  // else GCC keeps all pointers in vector registers, where each costs more than a load
    const __mmask16 mask = count >= 16 ? 0xffff : (1u << count) - 1;
    __m512d quads[4][4];  // [g][w]: the words w, w + 4, w + 8, w + 12 of the keys 4 * g to 4 * g + 3
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
        __m512 rows[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) rows[i] = _mm512_maskz_loadu_ps(mask, keys[4 * g + i] + at);
        const __m512d a = (__m512d)_mm512_unpacklo_ps(rows[0], rows[1]), b = (__m512d)_mm512_unpackhi_ps(rows[0], rows[1]);
        const __m512d c = (__m512d)_mm512_unpacklo_ps(rows[2], rows[3]), d = (__m512d)_mm512_unpackhi_ps(rows[2], rows[3]);
        quads[g][0] = _mm512_unpacklo_pd(a, c), quads[g][1] = _mm512_unpackhi_pd(a, c);
        quads[g][2] = _mm512_unpacklo_pd(b, d), quads[g][3] = _mm512_unpackhi_pd(b, d);
    }
#pragma GCC unroll 4
    for (int w = 0; w < 4; w++) {
        const __m512d a = _mm512_shuffle_f64x2(quads[0][w], quads[1][w], 0x44);
        const __m512d b = _mm512_shuffle_f64x2(quads[0][w], quads[1][w], 0xee);
        const __m512d c = _mm512_shuffle_f64x2(quads[2][w], quads[3][w], 0x44);
        const __m512d d = _mm512_shuffle_f64x2(quads[2][w], quads[3][w], 0xee);
        words[w] = (uvec)_mm512_shuffle_f64x2(a, c, 0x88), words[4 + w] = (uvec)_mm512_shuffle_f64x2(a, c, 0xdd);
        words[8 + w] = (uvec)_mm512_shuffle_f64x2(b, d, 0x88), words[12 + w] = (uvec)_mm512_shuffle_f64x2(b, d, 0xdd);
    }
#else
    transpose_words((const uint32_t *const *)keys, at * int64_t(sizeof(T)) / 4, words);
#endif
}

// to[c * stride + r] = rows[r][column + c] for 16 rows and some columns of 32 bits, a multiple of four.
inline void transpose_16(const uint32_t *const *rows, int64_t column, uint32_t *to, int64_t stride,
                         int columns = 16) {
    for (int c = 0; c < columns; c += 4)
        for (int r = 0; r < 16; r += LANES) {
            uvec words[4];
            transpose_words(rows + r, column + c, words);
            for (int i = 0; i < 4; i++) memcpy(to + (c + i) * stride + r, &words[i], sizeof words[i]);
        }
}

// pack_keys for scores by lanes, see lane_scores.h: the features of lane 0 come first, those of lane 7 last.
template <class T, class Fetch>
inline void pack_keys_by_lanes(const T *const *keys, int64_t count, int64_t dim, float *panels, Fetch &&fetch) {
    constexpr int PARTS = 4 / sizeof(T);  // numbers in a word
    for (int64_t first = 0; first < count; first += PANEL)
        for (int64_t d = 0; d < dim; d += 4 * PARTS)
            for (int j = 0; j < PANEL; j += LANES) {
                fetch(1);
                uvec words[4];
                transpose_words((const uint32_t *const *)keys + first + j, d / PARTS, words);
                const int64_t lane = d / PARTS % 8, at = d / (8 * PARTS) * PARTS;
                for (int i = 0; i < 4; i++) {
                    float *to = panels + first * dim + ((lane + i) * (dim / 8) + at) * PANEL + j;
                    if (PARTS == 1) {
                        store(to, (vec)words[i]);
                    } else {
                        store(to, low_halves(words[i]));
                        store(to + PANEL, high_halves(words[i]));
                    }
                }
            }
}

// Keys, each [dim], to panels of PANEL keys: depth padded_depth(dim), zeros after dim.
// `keys` has a multiple of PANEL entries. fetch(n) is called for every n times two lines that are read.
template <class T, class Fetch>
inline void pack_keys(const T *const *keys, int64_t count, int64_t dim, float *panels, Fetch &&fetch) {
    if (has_lane_scores(dim)) return pack_keys_by_lanes(keys, count, dim, panels, fetch);
    for (int64_t first = 0; first < count; first += PANEL) {
        float *panel = panels + first * dim;
        int64_t d = 0;
        if (PANEL % 16 == 0)
            for (; d + 16 <= dim; d += 16)
                for (int j = 0; j < PANEL; j += 16) {
                    fetch(2 * sizeof(T));
                    const uint32_t *rows[16];
                    uint32_t widened[sizeof(T) == 2 ? 16 : 1][16];
                    for (int i = 0; i < 16; i++) {
                        const T *from = keys[first + j + i] + d;
                        if (sizeof(T) == 2) convert((const bf16 *)from, 16, (float *)widened[i]);
                        rows[i] = sizeof(T) == 2 ? widened[i] : (const uint32_t *)from;
                    }
                    transpose_16(rows, 0, (uint32_t *)panel + d * PANEL + j, PANEL);
                }
        for (; d < dim; d++)
            for (int j = 0; j < PANEL; j++) panel[d * PANEL + j] = to_f32(keys[first + j][d]);
    }
}

template <class Fetch>
inline void pack_keys(const bf16 *const *keys, int64_t count, int64_t dim, bf16 *panels, Fetch &&fetch) {
    const int64_t depth = padded_depth<bf16>(dim);
    for (int64_t first = 0; first < count; first += PANEL) {
        bf16 *panel = panels + first * depth;
        int64_t d = 0;
        for (; d + 32 <= dim; d += 32)
            for (int j = 0; j < PANEL; j += 16) {
                fetch(8);
                transpose_16(reinterpret_cast<const uint32_t *const *>(keys + first + j), d / 2,
                             reinterpret_cast<uint32_t *>(panel + panel_offset<bf16>(d, j)), 16);
            }
        for (; d < depth; d++)
            for (int j = 0; j < PANEL; j++)
                panel[panel_offset<bf16>(d, j)] = d < dim ? keys[first + j][d] : bf16{0};
    }
}

// `count` values, each [dim], to the first rows of panels of PANEL features and depth `depth`; zeros after
// dim. With bf16 `count` is a multiple of DEPTH. Values are read row by row, as they lie in memory.
template <class T, class Fetch>
inline void pack_values(const T *const *values, int64_t count, int64_t dim, int64_t depth,
                        float *panels, Fetch &&fetch) {
    for (int64_t k = 0; k < count; k++) {
        for (int64_t first = 0; first < dim; first += PANEL) {
            fetch(1);
            const T *from = values[k] + first;
            float *to = panels + first * depth + k * PANEL;
            const int width = int(min<int64_t>(dim - first, PANEL));
            if (width == PANEL) {
                store(to, load(from));
                store(to + LANES, load(from + LANES));
            } else {
                for (int n = 0; n < PANEL; n++) to[n] = n < width ? to_f32(from[n]) : 0.0f;
            }
        }
    }
}

template <class Fetch>
inline void pack_values(const bf16 *const *values, int64_t count, int64_t dim, int64_t depth,
                        bf16 *panels, Fetch &&fetch) {
    for (int64_t k = 0; k < count; k += 2) {
        for (int64_t first = 0; first < dim; first += PANEL) {
            fetch(1);
            const bf16 *even = values[k] + first, *odd = values[k + 1] + first;
            bf16 *panel = panels + first * depth;
            const int width = int(min<int64_t>(dim - first, PANEL));
            if (width == PANEL && LANES == 16) {
                for (int n = 0; n < PANEL; n += LANES) {
                    uvec low = zero_extend(*(const unaligned_half *)(even + n));
                    uvec high = zero_extend(*(const unaligned_half *)(odd + n));
                    uvec both = low | (high << 16);
                    memcpy(panel + panel_offset<bf16>(k, n), &both, sizeof both);
                }
            } else {
                for (int n = 0; n < PANEL; n++) {
                    panel[panel_offset<bf16>(k, n)] = n < width ? even[n] : bf16{0};
                    panel[panel_offset<bf16>(k + 1, n)] = n < width ? odd[n] : bf16{0};
                }
            }
        }
    }
}
