// Sums of products of integers: weights of 8 bits, four in each lane of a vector, times numbers of 8 or 16 bits. All levels
// give the same sums: nothing is rounded and nothing saturates.
#pragma once

#include "vectors.h"

inline ivec broadcast_int(int32_t x) { return x - ivec{}; }

// Keeps a sum in its register: GCC would multiply first, add later, and spill what is between.
inline void pin(ivec &sum) {
#if defined(__x86_64__)
    asm("" : "+v"(sum));
#else
    (void)sum;
#endif
}
inline ivec min(ivec a, ivec b) {
#if defined(__aarch64__)
    return (ivec)vminq_s32((int32x4_t)a, (int32x4_t)b);
#else
    return a < b ? a : b;
#endif
}
inline vec to_float(ivec x) { return __builtin_convertvector(x, vec); }

typedef int16_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t uwords __attribute__((vector_size(LANES * 4)));

// sum plus the products of the two words of each lane of `w` and of x. By vpmaddwd 16 bits take as long as 8 do, or less;
// by VNNI twice as long.
inline ivec add_words(ivec sum, words w, ivec x) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
    return sum + (ivec)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (ivec)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__AVX2__)
    return sum + (ivec)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__aarch64__)
    const int16x8_t a = (int16x8_t)w, b = (int16x8_t)x;
    return sum + (ivec)vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
#else
    return sum + ((ivec)w << 16 >> 16) * (x << 16 >> 16) + ((ivec)w >> 16) * (x >> 16);
#endif
}

// arm64's products of bytes, see byte_products.h: numbers of 16 bits are stored in two parts of 8, high and low.
#if defined(__ARM_FEATURE_DOTPROD)
#define RADIXSERVE_BYTE_PRODUCTS
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool HAS_MATRIX_PRODUCTS = true;
#else
constexpr bool HAS_MATRIX_PRODUCTS = false;
#endif

// The four bytes of each lane of `w`, times those of x, which are -LIMIT to 127.
//
//   Operand prepare(w)         signed weights as `add` takes them, once for all rows
//   add(sum, operand, x)       one more product of signed weights
//   OFFSET                     what `add` has added to each weight: sums begin with -OFFSET times the sum of x
//   add_nibbles(sum, w, x)     one more product of weights of 0 to 15
//   finish_nibbles(sum)        of up to 32 such weights a lane
//   LIMIT                      x of signed weights may be -LIMIT, 127 or 128; those of nibbles -128
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
struct IntegerDot {
    static constexpr int LEVEL = 2, LIMIT = 128, OFFSET = 128;
    typedef ivec Operand;
    static ivec dot(ivec sum, ivec w, ivec x) {
#if defined(__AVX512F__)
        return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else
        return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#endif
    }
    static Operand prepare(ivec w) { return w ^ broadcast_int(int32_t(0x80808080)); }  // plus OFFSET
    static ivec add(ivec sum, Operand w, ivec x) { return dot(sum, w, x); }
    static ivec add_nibbles(ivec sum, ivec w, ivec x) { return dot(sum, w, x); }
    static ivec finish_nibbles(ivec sum) { return sum; }
};
#elif defined(__AVX512BW__)
struct IntegerDot {
    static constexpr int LEVEL = 1, LIMIT = 127, OFFSET = 0;  // -128 has no negative
    struct Operand {
        __m512i magnitude;
        __mmask64 is_negative;
    };
    static __m512i pairs(__m512i sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
    static Operand prepare(ivec w) { return {_mm512_abs_epi8((__m512i)w), _mm512_movepi8_mask((__m512i)w)}; }
    static ivec add(ivec sum, const Operand &w, ivec x) {
        const __m512i same = (__m512i)x;
        const __m512i turned = _mm512_mask_sub_epi8(same, w.is_negative, _mm512_setzero_si512(), same);
        return sum + (ivec)pairs(_mm512_maddubs_epi16(w.magnitude, turned));
    }
    static ivec add_nibbles(ivec sum, ivec w, ivec x) {
        return (ivec)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
    }
    static ivec finish_nibbles(ivec sum) { return (ivec)pairs((__m512i)sum); }
};
#elif defined(__AVX2__)
struct IntegerDot {
    static constexpr int LEVEL = 1, LIMIT = 127, OFFSET = 0;  // -128 has no negative
    struct Operand {
        __m256i magnitude, sign;
    };
    static __m256i pairs(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
    static Operand prepare(ivec w) { return {_mm256_abs_epi8((__m256i)w), (__m256i)w}; }
    static ivec add(ivec sum, const Operand &w, ivec x) {
        return sum + (ivec)pairs(_mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8((__m256i)x, w.sign)));
    }
    // Sums of 16 bits: two products of up to 15 * 128, eight times.
    static ivec add_nibbles(ivec sum, ivec w, ivec x) {
        return (ivec)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
    }
    static ivec finish_nibbles(ivec sum) { return (ivec)pairs((__m256i)sum); }
};
#elif defined(RADIXSERVE_BYTE_PRODUCTS)
struct IntegerDot {
    static constexpr int LEVEL = HAS_MATRIX_PRODUCTS ? 4 : 3, LIMIT = 128, OFFSET = 0;
};
#elif defined(__aarch64__)
struct IntegerDot {
    static constexpr int LEVEL = 1, LIMIT = 127, OFFSET = 0;  // two products of -128 and -128 exceed 16 bits
    typedef ivec Operand;
    static Operand prepare(ivec w) { return w; }
    static ivec add(ivec sum, Operand w, ivec x) {
        const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
        const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
        return (ivec)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
    }
    static ivec add_nibbles(ivec sum, ivec w, ivec x) { return add(sum, w, x); }
    static ivec finish_nibbles(ivec sum) { return sum; }
};
#else
struct IntegerDot {
    static constexpr int LEVEL = 0, LIMIT = 128, OFFSET = 0;
    typedef ivec Operand;
    static Operand prepare(ivec w) { return w; }
    static ivec add(ivec sum, Operand w, ivec x) {
        for (int i = 0; i < 32; i += 8) sum += (w << (24 - i) >> 24) * (x << (24 - i) >> 24);
        return sum;
    }
    static ivec add_nibbles(ivec sum, ivec w, ivec x) { return add(sum, w, x); }
    static ivec finish_nibbles(ivec sum) { return sum; }
};
#endif
