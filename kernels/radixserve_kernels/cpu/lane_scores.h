// Scores of the AVX2 level: a query's products with a key are summed lane by lane, as a vector of the key's features
// holds them, then the lanes. Keys need no transposing where they lie in their pages; packed keys give the same bits.
//
// Lane i sums the features i, i + 8, ... in order; of two in a word of 32 bits, as of bfloat16, those of the words i,
// i + 8, ... The lanes are added as ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)).
#pragma once

#include "vectors.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define RADIXSERVE_LANE_SCORES
constexpr bool HAS_LANE_SCORES = true;
#else
constexpr bool HAS_LANE_SCORES = false;
#endif

// Whether scores of heads of `dim` features are summed so.
inline bool has_lane_scores(int64_t dim) { return HAS_LANE_SCORES && dim % 16 == 0; }

#if defined(RADIXSERVE_LANE_SCORES)

// sum + a * b, in the register of `sum`: GCC would move and spill the sums.
inline vec add_product(vec sum, vec a, vec b) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}

// Eight numbers from words of 32 bits at `from`: float32, or of two bfloat16 in each the lower one or the upper one (part
// 0 or 1). The words are loaded for each part and the mask stays in memory, so that one register is enough.
inline vec load_part(const float *from, int) { return load(from); }
inline vec load_part(const bf16 *from, int part) {
    constexpr uint32_t UPPER = 0xffff0000;
    alignas(32) static constexpr uint32_t mask[8] = {UPPER, UPPER, UPPER, UPPER, UPPER, UPPER, UPPER, UPPER};
    const unaligned_ivec &words = *reinterpret_cast<const unaligned_ivec *>(from);
    vec numbers;
    if (part)
        asm("vmovdqa %2, %0\n\tvpand %1, %0, %0" : "=x"(numbers) : "m"(words), "m"(mask));
    else
        asm("vmovdqu %1, %0\n\tvpslld $16, %0, %0" : "=x"(numbers) : "m"(words));
    return numbers;
}

// Features at `from`, as load_part holds those of T: a vector, or a pair of even and odd ones. And back.
template <class T> inline void load_parts(const float *from, vec *parts) {
    if constexpr (sizeof(T) == 4) {
        parts[0] = load(from);
    } else {
        const __m256 low = (__m256)load(from), high = (__m256)load(from + LANES);
        parts[0] = (vec)_mm256_permute4x64_pd((__m256d)_mm256_shuffle_ps(low, high, 0x88), 0xd8);
        parts[1] = (vec)_mm256_permute4x64_pd((__m256d)_mm256_shuffle_ps(low, high, 0xdd), 0xd8);
    }
}
template <class T> inline void store_parts(float *to, const vec *parts) {
    if constexpr (sizeof(T) == 4) {
        store(to, parts[0]);
    } else {
        const __m256 low = _mm256_unpacklo_ps((__m256)parts[0], (__m256)parts[1]);
        const __m256 high = _mm256_unpackhi_ps((__m256)parts[0], (__m256)parts[1]);
        store2(to, (vec)_mm256_permute2f128_ps(low, high, 0x20), (vec)_mm256_permute2f128_ps(low, high, 0x31));
    }
}

// Orders queries [rows][depth] as load_part orders keys in T.
template <class T> inline void arrange_queries(float *queries, int64_t rows, int64_t depth, int64_t dim) {
    for (int64_t row = 0; row < rows && sizeof(T) == 2; row++)
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            float *features = queries + row * depth + d;
            vec parts[2];
            load_parts<T>(features, parts);
            store2(features, parts[0], parts[1]);
        }
}

// The sums of the lanes of each of four vectors.
inline __m128 add_lanes(vec a, vec b, vec c, vec d) {
    auto add_32 = [](vec x, vec y) {
        return (__m256d)_mm256_add_ps(_mm256_unpacklo_ps((__m256)x, (__m256)y), _mm256_unpackhi_ps((__m256)x, (__m256)y));
    };
    const __m256d ab = add_32(a, b), cd = add_32(c, d);
    const __m256 all = _mm256_add_ps((__m256)_mm256_unpacklo_pd(ab, cd), (__m256)_mm256_unpackhi_pd(ab, cd));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// Scores of eight keys, which begin at keys[...] + at, for H rows of arranged queries, to scores[row * stride + key].
// later.fetch(key, number) is called for each line of a key.
template <int H, class T, class Later>
inline void lane_scores(const float *queries, int64_t depth, const T *const *keys, int64_t at, int64_t dim,
                        float *scores, int64_t stride, const Later &later) {
    constexpr int K = H == 1 ? 8 : H <= 3 ? 4 : 2;  // keys at a time: bounded by registers
    constexpr int PARTS = 4 / sizeof(T);            // vectors of features from one vector of words
    for (int first = 0; first < 8; first += K) {
        vec sums[H][K] = {};
        for (int64_t d = 0; d < dim; d += PARTS * LANES) {
#pragma GCC unroll 8
            for (int k = 0; k < K && d * sizeof(T) % 64 == 0; k++) later.fetch(first + k, at + d);
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) {
                vec query[H];
#pragma GCC unroll 4
                for (int h = 0; h < H; h++) query[h] = load(queries + h * depth + d + part * LANES);
#pragma GCC unroll 8
                for (int k = 0; k < K; k++) {
                    const vec numbers = load_part(keys[first + k] + at + d, part);
#pragma GCC unroll 4
                    for (int h = 0; h < H; h++) sums[h][k] = add_product(sums[h][k], query[h], numbers);
                }
            }
        }
        if constexpr (K == 2) {
#pragma GCC unroll 2
            for (int h = 0; h < H; h += 2) {
                const __m128 two_rows = add_lanes(sums[h][0], sums[h][1], sums[h + 1][0], sums[h + 1][1]);
                _mm_storel_pi((__m64 *)(scores + h * stride + first), two_rows);
                _mm_storeh_pi((__m64 *)(scores + (h + 1) * stride + first), two_rows);
            }
        } else {
#pragma GCC unroll 3
            for (int h = 0; h < H; h++)
#pragma GCC unroll 2
                for (int k = 0; k < K; k += 4)
                    _mm_storeu_ps(scores + h * stride + first + k,
                                  add_lanes(sums[h][k], sums[h][k + 1], sums[h][k + 2], sums[h][k + 3]));
        }
    }
}

#endif
