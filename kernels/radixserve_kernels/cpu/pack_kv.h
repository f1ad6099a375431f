// Packing of keys and values, given row by row, into the panels of panels.h.
#pragma once

#include "panels.h"

// to[c * stride + r] = rows[r][column + c] for 16 rows and some columns of 32 bits, a multiple of four.
inline void transpose_16(const uint32_t *const *rows, int64_t column, uint32_t *to, int64_t stride,
                         int columns = 16) {
#if defined(__AVX512F__)
    for (int c = 0; c < columns; c += 4) {
        __m512 lanes[4];  // row i, i + 4, i + 8, i + 12
        for (int i = 0; i < 4; i++) {
            const float *from[4];
            for (int j = 0; j < 4; j++)
                from[j] = reinterpret_cast<const float *>(rows[i + 4 * j] + column + c);
            __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(from[0]));
            x = _mm512_insertf32x4(x, _mm_loadu_ps(from[1]), 1);
            x = _mm512_insertf32x4(x, _mm_loadu_ps(from[2]), 2);
            lanes[i] = _mm512_insertf32x4(x, _mm_loadu_ps(from[3]), 3);
        }
        __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(lanes[0], lanes[1]));
        __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(lanes[0], lanes[1]));
        __m512d d = _mm512_castps_pd(_mm512_unpacklo_ps(lanes[2], lanes[3]));
        __m512d e = _mm512_castps_pd(_mm512_unpackhi_ps(lanes[2], lanes[3]));
        _mm512_storeu_pd(to + c * stride, _mm512_unpacklo_pd(a, d));
        _mm512_storeu_pd(to + (c + 1) * stride, _mm512_unpackhi_pd(a, d));
        _mm512_storeu_pd(to + (c + 2) * stride, _mm512_unpacklo_pd(b, e));
        _mm512_storeu_pd(to + (c + 3) * stride, _mm512_unpackhi_pd(b, e));
    }
#elif defined(__AVX__)
    for (int r = 0; r < 16; r += 4)
        for (int c = 0; c < columns; c += 4) {
            __m128 x[4];
            for (int i = 0; i < 4; i++) x[i] = _mm_loadu_ps(reinterpret_cast<const float *>(rows[r + i] + column + c));
            _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
            for (int i = 0; i < 4; i++) _mm_storeu_ps(reinterpret_cast<float *>(to + (c + i) * stride + r), x[i]);
        }
#else
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < columns; c++) to[c * stride + r] = rows[r][column + c];
#endif
}

// Keys, each [dim], to panels of PANEL keys: depth padded_depth(dim), zeros after dim.
// `keys` has a multiple of PANEL entries. fetch(n) is called for every n times two lines that are read.
template <class T, class Fetch>
inline void pack_keys(const T *const *keys, int64_t count, int64_t dim, float *panels, Fetch &&fetch) {
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
                        if (sizeof(T) == 2) widen((const bf16 *)from, 16, (float *)widened[i]);
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
