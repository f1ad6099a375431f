// Vectors of float32 in the width of the processor, bfloat16, and powers of two. The types are vector types
// of GCC and clang: the compiler chooses the instructions.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float unaligned_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef int32_t unaligned_ivec __attribute__((vector_size(LANES * 4), aligned(1), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t half_vec __attribute__((vector_size(LANES * 2)));
typedef uint16_t unaligned_half __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

inline vec broadcast(float x) { return x - vec{}; }  // x - 0: with x + 0 the compiler would have to turn -0 into 0
inline vec load(const float *from) { return *reinterpret_cast<const unaligned_vec *>(from); }
inline void store(float *to, vec x) { *reinterpret_cast<unaligned_vec *>(to) = x; }

// sum + a * b; with AVX-512 in the register of `sum`: in a long loop without branches GCC would move and
// spill the sums.
inline vec fmadd(vec sum, vec a, vec b) {
#if defined(__AVX512F__)
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    return sum + a * b;
#endif
}

// 16 bits to 32 of each lane, by one instruction: GCC would use five.
inline uvec zero_extend(half_vec bits) {
#if defined(__AVX512F__)
    return (uvec)_mm512_cvtepu16_epi32((__m256i)bits);
#elif defined(__AVX2__)
    return (uvec)_mm256_cvtepu16_epi32((__m128i)bits);
#elif defined(__aarch64__)
    return (uvec)vmovl_u16((uint16x4_t)bits);
#else
    return __builtin_convertvector(bits, uvec);
#endif
}

// The low 16 bits of each lane.
inline half_vec truncate_lanes(uvec bits) {
#if defined(__AVX512F__)
    return (half_vec)_mm512_cvtepi32_epi16((__m512i)bits);
#elif defined(__AVX2__)
    const __m256i low = (__m256i)(bits & 0xffff);
    return (half_vec)_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
#else
    return __builtin_convertvector(bits, half_vec);
#endif
}

// The bfloat16 in the low and in the high half of each lane.
inline vec low_halves(uvec pairs) { return (vec)(pairs << 16); }
inline vec high_halves(uvec pairs) { return (vec)(pairs & 0xffff0000u); }
inline uvec load_pairs(const bf16 *from) {
    uvec pairs;
    memcpy(&pairs, from, sizeof pairs);
    return pairs;
}

inline vec load(const bf16 *from) {
    return (vec)(zero_extend(*reinterpret_cast<const unaligned_half *>(from)) << 16);
}

// The nearest bfloat16, ties to even; NaN stays NaN.
inline half_vec to_bf16(vec x) {
#if defined(__AVX512BF16__)
    return (half_vec)_mm512_cvtneps_pbh((__m512)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (half_vec)vcvt_bf16_f32((float32x4_t)x);
#else
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec quiet = (bits >> 16) | 0x40;
    return truncate_lanes((uvec)(x == x ? (ivec)rounded : (ivec)quiet));
#endif
}

inline void store(bf16 *to, vec x) { *reinterpret_cast<unaligned_half *>(to) = to_bf16(x); }

inline void store2(float *to, vec low, vec high) { store(to, low), store(to + LANES, high); }
inline void store2(bf16 *to, vec low, vec high) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
    store(to, low), store(to + LANES, high);
#endif
}

inline float to_f32(float x) { return x; }
inline float to_f32(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
inline void store1(float *to, float x) { *to = x; }
inline void store1(bf16 *to, float x) { to->bits = to_bf16(broadcast(x))[0]; }

struct half {  // float16
    uint16_t bits;
};

inline float to_f32(half x) {
    const uint32_t magnitude = (x.bits & 0x7fffu) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
    uint32_t bits = magnitude + ((127 - 15) << 23);
    if ((x.bits & 0x7c00) == 0x7c00) bits = magnitude | 0x7f800000;
    float out;
    memcpy(&out, &bits, 4);
    if (!(x.bits & 0x7c00)) out = float(x.bits & 0x3ff) * 5.9604644775390625e-8f;  // 2 to the power of -24
    memcpy(&bits, &out, 4);
    bits |= sign;
    memcpy(&out, &bits, 4);
    return out;
}

inline vec load(const half *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vld1_f16((const float16_t *)from));
#else
    vec x;
    for (int i = 0; i < LANES; i++) x[i] = to_f32(from[i]);
    return x;
#endif
}

// `count` numbers in the type in which they are multiplied.
template <class T> inline void convert(const T *from, int64_t count, T *to) {
    memcpy((void *)to, from, count * sizeof(T));
}
inline void convert(const bf16 *from, int64_t count, float *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    for (; i < count; i++) to[i] = to_f32(from[i]);
}

// `count` numbers to float32.
inline void convert_wide(const float *from, int64_t count, float *to) { memcpy(to, from, count * sizeof(float)); }
inline void convert_wide(const bf16 *from, int64_t count, float *to) { convert(from, count, to); }

// `count` numbers to a type, which may be in place.
inline void round_to(const float *from, int64_t count, float *to) { memcpy(to, from, count * sizeof(float)); }
inline void round_to(const float *from, int64_t count, bf16 *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    for (; i < count; i++) store1(to + i, from[i]);
}

inline vec max(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__aarch64__)
    return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return a > b ? a : b;
#endif
}

// b where a lane of either is NaN.
inline vec min(vec a, vec b) {
#if defined(__AVX__) && !defined(__AVX512F__)
    return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

inline float reduce_add(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#elif defined(__aarch64__)
    return vaddvq_f32((float32x4_t)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

inline int32_t reduce_add(ivec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__aarch64__)
    return vaddvq_s32((int32x4_t)x);
#else
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

inline float reduce_max(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX__)
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#elif defined(__aarch64__)
    return vmaxvq_f32((float32x4_t)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = most > x[i] ? most : x[i];
    return most;
#endif
}

// The first `count` lanes of x, `others` in the remaining ones.
inline vec mask_tail(vec x, int64_t count, float others) {
#if defined(__AVX512F__)
    return (vec)_mm512_mask_mov_ps(_mm512_set1_ps(others), __mmask16((1u << count) - 1), (__m512)x);
#elif defined(__aarch64__)
    const ivec lanes = {0, 1, 2, 3};
    return lanes < int32_t(count) ? x : broadcast(others);
#else
    for (int64_t i = count; i < LANES; i++) x[i] = others;
    return x;
#endif
}

// Whether any lane of x is above `limit` or NaN.
inline bool any_above(vec x, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_NLE_UQ);
#elif defined(__AVX__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(limit), _CMP_NLE_UQ));
#elif defined(__aarch64__)
    return vminvq_u32(vcleq_f32((float32x4_t)x, vdupq_n_f32(limit))) == 0;
#else
    return !(reduce_max(x) <= limit);
#endif
}

inline bool any_equal(vec x, float value) {
#if defined(__AVX512F__)
    return _mm512_cmpeq_ps_mask((__m512)x, _mm512_set1_ps(value));
#elif defined(__aarch64__)
    return vmaxvq_u32(vceqq_f32((float32x4_t)x, vdupq_n_f32(value)));
#else
    const ivec equal = (ivec)(x == broadcast(value));
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= equal[i];
    return any;
#endif
}

// 2 to the power of x for softmax weights of type T: within 2 units in the last place for float, to 8e-5
// for bf16. About 0 below -126, 1e38 or more above 127.
template <class T> inline vec fast_exp2(vec x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    const vec r = (vec)_mm512_reduce_ps((__m512)x, 9);  // x - floor(x)
    vec y;
    if (sizeof(T) == 2) {
        y = broadcast(7.80245195e-2f) * r + broadcast(2.26067178e-1f);
        y = y * r + broadcast(6.95833522e-1f);
        y = y * r + broadcast(9.99925221e-1f);
    } else {
        y = broadcast(1.87757664e-3f) * r + broadcast(8.98934047e-3f);
        y = y * r + broadcast(5.58263174e-2f);
        y = y * r + broadcast(2.40153617e-1f);
        y = y * r + broadcast(6.93153073e-1f);
        y = y * r + broadcast(9.99999925e-1f);
    }
    return (vec)_mm512_scalef_ps((__m512)y, (__m512)x);  // y times 2 to the power of floor(x)
#else
    x = max(broadcast(-126.0f), min(broadcast(127.0f), x));  // in this order NaN stays NaN
    const vec magic = broadcast(12582912.0f);
    vec n = x + magic;
    ivec power = (ivec)n << 23;  // the bits of `magic` are shifted out
    vec r = x - (n - magic), y;
    if (sizeof(T) == 2) {
        y = broadcast(9.6181291e-3f) * r + broadcast(5.5504109e-2f);
    } else {
        y = broadcast(1.5353362e-4f) * r + broadcast(1.3398874e-3f);
        y = y * r + broadcast(9.6184374e-3f);
        y = y * r + broadcast(5.5503325e-2f);
    }
    y = y * r + broadcast(2.4022648e-1f);
    y = y * r + broadcast(6.9314720e-1f);
    y = y * r + broadcast(1.0f);
    return (vec)((ivec)y + power);
#endif
}

// tanh(x) as a quotient of polynomials, to a few units in the last place; NaN stays NaN.
inline vec tanh(vec x) {
    const vec limit = broadcast(7.90531110763549805f);
    x = max(-limit, -max(-limit, -x));
    const vec s = x * x;
    vec over = broadcast(-2.76076847742355e-16f) * s + broadcast(2.00018790482477e-13f);
    over = over * s + broadcast(-8.60467152213735e-11f);
    over = over * s + broadcast(5.12229709037114e-08f);
    over = over * s + broadcast(1.48572235717979e-05f);
    over = over * s + broadcast(6.37261928875436e-04f);
    over = over * s + broadcast(4.89352455891786e-03f);
    vec under = broadcast(1.19825839466702e-06f) * s + broadcast(1.18534705686654e-04f);
    under = under * s + broadcast(2.26843463243900e-03f);
    under = under * s + broadcast(4.89352518554385e-03f);
    return x * over / under;
}

// x / y; with a relative error of 7e-5 for T = bf16.
template <class T> inline vec divide(vec x, vec y) {
#if defined(__AVX512F__)
    if (sizeof(T) == 2) return x * (vec)_mm512_rcp14_ps((__m512)y);
#endif
    return x / y;
}

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
template <class N> inline N min(N a, N b) { return a < b ? a : b; }
