// Vectors of floats in the machine's own width, bfloat16, and powers of two. GCC's and clang's vector types:
// the compiler chooses the instructions.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t half_vec __attribute__((vector_size(LANES * 2)));
typedef uint16_t loose_half __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

inline vec fill(float x) { return x - vec{}; }  // x - 0, not x + 0: that would have to turn -0 into 0
inline vec load(const float *from) { return *reinterpret_cast<const loose_vec *>(from); }
inline void store(float *to, vec x) { *reinterpret_cast<loose_vec *>(to) = x; }

// sum + a * b; with AVX-512 in the register of `sum`: in a long loop without branches GCC would move sums
// about and spill them.
inline vec plus_product(vec sum, vec a, vec b) {
#if defined(__AVX512F__)
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    return sum + a * b;
#endif
}

// 16 bits each to 32: GCC makes five instructions of the conversion where one does it.
inline uvec spread(half_vec bits) {
#if defined(__AVX512F__)
    return (uvec)_mm512_cvtepu16_epi32((__m256i)bits);
#else
    return __builtin_convertvector(bits, uvec);
#endif
}

inline vec load(const bf16 *from) {
    return (vec)(spread(*reinterpret_cast<const loose_half *>(from)) << 16);
}

// To the nearest bfloat16, ties to even; a NaN stays one.
inline half_vec narrow(vec x) {
#if defined(__AVX512BF16__)
    return (half_vec)_mm512_cvtneps_pbh((__m512)x);
#else
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec quiet = (bits >> 16) | 0x40;
    return __builtin_convertvector((uvec)(x == x ? (ivec)rounded : (ivec)quiet), half_vec);
#endif
}

inline void store(bf16 *to, vec x) { *reinterpret_cast<loose_half *>(to) = narrow(x); }

inline void store_both(float *to, vec low, vec high) { store(to, low), store(to + LANES, high); }
inline void store_both(bf16 *to, vec low, vec high) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
    store(to, low), store(to + LANES, high);
#endif
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
inline void put(float *to, float x) { *to = x; }
inline void put(bf16 *to, float x) { to->bits = narrow(fill(x))[0]; }

// x as it is after a round trip through T.
template <class T> inline vec rounded_to(vec x);
template <> inline vec rounded_to<float>(vec x) { return x; }
template <> inline vec rounded_to<bf16>(vec x) {
    return (vec)(spread(narrow(x)) << 16);
}

inline vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

inline float sum_of(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

inline float max_of(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = most > x[i] ? most : x[i];
    return most;
#endif
}

// x, but for lanes from `count` on.
inline vec cut(vec x, int64_t count, float others) {
#if defined(__AVX512F__)
    return (vec)_mm512_mask_mov_ps(_mm512_set1_ps(others), __mmask16((1u << count) - 1), (__m512)x);
#else
    for (int64_t i = count; i < LANES; i++) x[i] = others;
    return x;
#endif
}

// Whether a lane of x is above a limit, or a NaN.
inline bool any_above(vec x, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_NLE_UQ);
#else
    return !(max_of(x) <= limit);
#endif
}

inline bool any_equal(vec x, float value) {
#if defined(__AVX512F__)
    return _mm512_cmpeq_ps_mask((__m512)x, _mm512_set1_ps(value));
#else
    const ivec equal = (ivec)(x == fill(value));
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= equal[i];
    return any;
#endif
}

// 2 to the power of x, for weights of type T: float within 2 units in the last place, bf16 to 8e-5.
// About 0 below -126, 1e38 or more above 127.
template <class T> inline vec exp2_of(vec x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    const vec r = (vec)_mm512_reduce_ps((__m512)x, 9);  // x - floor(x)
    vec y;
    if (sizeof(T) == 2) {
        y = fill(7.80245195e-2f) * r + fill(2.26067178e-1f);
        y = y * r + fill(6.95833522e-1f);
        y = y * r + fill(9.99925221e-1f);
    } else {
        y = fill(1.87757664e-3f) * r + fill(8.98934047e-3f);
        y = y * r + fill(5.58263174e-2f);
        y = y * r + fill(2.40153617e-1f);
        y = y * r + fill(6.93153073e-1f);
        y = y * r + fill(9.99999925e-1f);
    }
    return (vec)_mm512_scalef_ps((__m512)y, (__m512)x);  // y times 2 to the power of floor(x)
#else
    x = larger(fill(-126.0f), -larger(fill(-127.0f), -x));  // in this order a NaN stays one
    const vec magic = fill(12582912.0f);
    vec n = x + magic;
    ivec power = ((ivec)n - 0x4b400000) << 23;
    vec r = x - (n - magic), y;
    if (sizeof(T) == 2) {
        y = fill(9.6181291e-3f) * r + fill(5.5504109e-2f);
    } else {
        y = fill(1.5353362e-4f) * r + fill(1.3398874e-3f);
        y = y * r + fill(9.6184374e-3f);
        y = y * r + fill(5.5503325e-2f);
    }
    y = y * r + fill(2.4022648e-1f);
    y = y * r + fill(6.9314720e-1f);
    y = y * r + fill(1.0f);
    return (vec)((ivec)y + power);
#endif
}

// x / y; for results of type bf16 to 7e-5.
template <class T> inline vec quotient(vec x, vec y) {
#if defined(__AVX512F__)
    if (sizeof(T) == 2) return x * (vec)_mm512_rcp14_ps((__m512)y);
#endif
    return x / y;
}

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
template <class N> inline N least(N a, N b) { return a < b ? a : b; }
