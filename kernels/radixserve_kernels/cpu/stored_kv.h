// K and V as a pool stores them: in the number type of the queries, in bfloat16, or in integers of 8 bits.
//
// A token's head in 8 bits is multiplied with a Hadamard matrix (hadamard.h) and stored as [dim] integers of -127 to 127
// and their scale, a bfloat16. It depends on the head's own numbers alone. Readers multiply the integers, which both
// number types represent exactly, with queries that are multiplied with the same matrix; a key's scale multiplies its
// score, a value's scale its weight. The matrix turns the sum of weighted values back.
#pragma once

#include "hadamard.h"

// SAME_KV: the number type T of the library.
enum KvType { SAME_KV, BFLOAT16_KV, INT8_KV };

constexpr int64_t SCALE_BYTES = 2;
constexpr float LEAST_KV = 1e-30f;  // below it a head is stored as zeros

// Memory of a layer, [slots][kv_heads][stored_bytes] each.
struct LayerKV {
    void *k, *v;
    int64_t has_window_pages, type;
};

// Bytes of a head of a token.
template <class T> inline int64_t stored_bytes(KvType type, int64_t dim) {
    return type == INT8_KV ? dim + SCALE_BYTES : dim * int64_t(type == BFLOAT16_KV ? sizeof(bf16) : sizeof(T));
}

inline float load_scale(const char *from) {
    bf16 scale;
    memcpy(&scale, from, SCALE_BYTES);
    return to_f32(scale);
}

// The nearest integers of numbers below 2^22, ties to even.
inline ivec round_lanes(vec x) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX__)
    return (ivec)_mm256_cvtps_epi32((__m256)x);
#elif defined(__aarch64__)
    return (ivec)vcvtnq_s32_f32((float32x4_t)x);
#else
    ivec rounded;
    for (int i = 0; i < LANES; i++) rounded[i] = int32_t(__builtin_rintf(x[i]));
    return rounded;
#endif
}

inline vec load(const int8_t *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#elif defined(__aarch64__)
    int32_t four;
    memcpy(&four, from, 4);
    return (vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
#else
    vec x;
    for (int i = 0; i < LANES; i++) x[i] = float(from[i]);
    return x;
#endif
}

// A head in 8 bits; x is overwritten. The scale is rounded up, so that no number is cut off; it is NaN where a number is
// not finite.
inline void store_int8(float *x, int64_t dim, char *to) {
    multiply_hadamard(x, dim);
    vec most = {}, odd = {};
    int64_t i = 0;
    float largest = 0, rest = 0;
    for (; i + LANES <= dim; i += LANES) {
        const vec some = load(x + i);
        most = max(most, max(some, -some)), odd += some - some;
    }
    for (; i < dim; i++) {
        const float size = __builtin_fabsf(x[i]);
        largest = size > largest ? size : largest, rest += x[i] - x[i];
    }
    const float of_vectors = reduce_max(most);
    largest = of_vectors > largest ? of_vectors : largest;
    const float broken = reduce_add(odd) + rest;  // 0, or NaN
    float scale = largest >= LEAST_KV ? largest / 127.0f : 0.0f;
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits + 0xffffu) & 0xffff0000u;
    memcpy(&scale, &bits, sizeof bits);
    const float inverse = scale > 0 && broken == 0 ? 1.0f / scale : 0.0f;
    int8_t *numbers = (int8_t *)to;
    for (i = 0; i < dim; i += LANES) {
        const int64_t count = min<int64_t>(dim - i, LANES);
        vec some = {};
        if (count == LANES) some = load(x + i);
        else memcpy(&some, x + i, count * sizeof(float));
        ivec rounded = round_lanes(some * broadcast(inverse));
#if defined(__AVX512F__)
        if (broken == 0 && count == LANES) {
            _mm_storeu_si128((__m128i *)(numbers + i), _mm512_cvtsepi32_epi8((__m512i)rounded));
            continue;
        }
#endif
        for (int64_t j = 0; j < count; j++) numbers[i + j] = broken == 0 ? int8_t(rounded[j]) : 0;
    }
    const uint16_t stored = broken == 0 ? uint16_t(bits >> 16) : 0x7fc0;
    memcpy(to + dim, &stored, SCALE_BYTES);
}

// Stores the heads of a token, x [num_heads][dim], which may be overwritten.
template <class T> void store_heads(KvType type, float *x, int64_t num_heads, int64_t dim, char *to) {
    if (type == SAME_KV) return round_to(x, num_heads * dim, (T *)to);
    if (type == BFLOAT16_KV) return round_to(x, num_heads * dim, (bf16 *)to);
    for (int64_t head = 0; head < num_heads; head++, x += dim, to += dim + SCALE_BYTES) store_int8(x, dim, to);
}

// Numbers of T without a loss: integers of 8 bits, or bfloat16.
template <class T, class Stored> inline void widen(const Stored *from, int64_t count, T *to) {
    int64_t i = 0;
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2)
        for (; i + 2 * LANES <= count; i += 2 * LANES) store2(to + i, load(from + i), load(from + i + LANES));
#endif
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    for (; i < count; i++) {
        if constexpr (sizeof(Stored) == 1) store1(to + i, float(from[i]));
        else store1(to + i, to_f32(from[i]));
    }
}

// Widens the stored heads of a token to `to` [num_heads][dim]; the scale of each goes to scales[head * stride].
template <class T>
inline void widen_heads(KvType type, const char *from, int64_t num_heads, int64_t dim, T *to, float *scales,
                        int64_t stride) {
    if (type == BFLOAT16_KV) return widen((const bf16 *)from, num_heads * dim, to);
    for (int64_t head = 0; head < num_heads; head++, from += dim + SCALE_BYTES, to += dim) {
        widen((const int8_t *)from, dim, to);
        scales[head * stride] = load_scale(from + dim);
    }
}
