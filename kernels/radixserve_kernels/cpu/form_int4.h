// Weights of 0 to 15 with a scale and a minimum for 32 of them: weight = scale * number + minimum. Of a
// block the numbers [4][PANEL][4], in the low halves of the bytes those of the first 16 of k, in the high halves those of
// the last, then the scales [PANEL] and the minimums [PANEL]: memory is read in the order of addresses.
//
// Scale: half holds GGUF's Q4_0 and Q4_1 exactly; float also Q4_K, whose scales are products.
#pragma once

#include "quantized.h"

template <class Scale> struct FormInt4 {
    static constexpr int64_t NUMBER_BYTES = PANEL * BLOCK / 2, BLOCK_BYTES = NUMBER_BYTES + 2 * PANEL * sizeof(Scale);
    static constexpr int ROWS = LANES == 16 ? 8 : 4, LIMIT = 128;

    static void pack(const PlainWeight &weight, int64_t column, int64_t b, uint8_t *block, int n) {
        const int64_t at = column * num_blocks(weight.depth) + b;
        Scale *scales = (Scale *)(block + NUMBER_BYTES);
        scales[n] = ((const Scale *)weight.scales)[at], scales[PANEL + n] = ((const Scale *)weight.minimums)[at];
        uint8_t numbers[BLOCK];
        block_numbers(weight, column, b, numbers);
        for (int k = 0; k < BLOCK / 2; k += 4) {
            uint32_t low, high;
            memcpy(&low, numbers + k, 4), memcpy(&high, numbers + BLOCK / 2 + k, 4);
            low |= high << 4;  // no number exceeds 15
            memcpy(block + lane_offset(k, n), &low, 4);
        }
    }
    static float value_at(const uint8_t *block, int n, int k) {
        const int both = block[lane_offset(k % 16, n)], number = k < 16 ? both & 15 : both >> 4;
        const Scale *scales = (const Scale *)(block + NUMBER_BYTES);
        return to_f32(scales[n]) * float(number) + to_f32(scales[PANEL + n]);
    }

#if defined(RADIXSERVE_BYTE_PRODUCTS)
    template <int M, class Row>
    [[gnu::always_inline]] static void add_block(const uint8_t *block, Row &&row, ByteSums<M> &sums) {
        const int8_t *numbers = (const int8_t *)block;
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            int8x16_t both[4], low[4], high[4];
            load_four(numbers, both);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                low[i] = vandq_s8(both[i], vdupq_n_s8(15));
                high[i] = (int8x16_t)vshrq_n_u8((uint8x16_t)both[i], 4);
            }
            sums.add(part, low, row), sums.add(part + 2, high, row);
        }
    }
#else
    template <int M>
    static void add_block(const uint8_t *block, const int8_t *x, int64_t stride, ivec (&sums)[M][2]) {
        const ivec low = broadcast_int(0x0f0f0f0f);
#pragma GCC unroll 4
        for (int k = 0; k < BLOCK / 2; k += 4, block += 4 * PANEL) {
            const ivec both[2] = {load_lanes(block), load_lanes(block + 4 * LANES)};
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                const ivec w[2] = {(part ? both[0] >> 4 : both[0]) & low, (part ? both[1] >> 4 : both[1]) & low};
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    int32_t four;
                    memcpy(&four, x + m * stride + k + part * (BLOCK / 2), 4);
                    for (int n = 0; n < 2; n++) {
                        sums[m][n] = IntegerDot::add_nibbles(sums[m][n], w[n], broadcast_int(four));
                        pin(sums[m][n]);
                    }
                }
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
            for (int n = 0; n < 2; n++) sums[m][n] = IntegerDot::finish_nibbles(sums[m][n]);
    }

    template <int M>
    static void add_block(const uint8_t *block, const int16_t *x, int64_t stride, ivec (&sums)[M][2]) {
        const uwords low = (uwords)broadcast_int(0x000f000f);
#pragma GCC unroll 4
        for (int k = 0; k < BLOCK / 2; k += 4, block += 4 * PANEL) {
            const uwords both[2] = {(uwords)load_lanes(block), (uwords)load_lanes(block + 4 * LANES)};
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) {  // of x: k and k + 2, k + 1 and k + 3, and 16 later
                uwords w[2];
                for (int n = 0; n < 2; n++) {
                    w[n] = both[n] >> (part % 2 * 8 + part / 2 * 4);
                    if (part < 3) w[n] &= low;
                }
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    int32_t pair;
                    memcpy(&pair, x + m * stride + k + part / 2 * (BLOCK / 2) + part % 2 * 2, 4);
                    for (int n = 0; n < 2; n++) {
                        sums[m][n] = add_words(sums[m][n], (words)w[n], broadcast_int(pair));
                        pin(sums[m][n]);
                    }
                }
            }
        }
    }

#endif

    struct Scales {
        vec scales, minimums;
    };
    static Scales scales(const uint8_t *block, int n) {
        const Scale *scales = (const Scale *)(block + NUMBER_BYTES);
        return {load(scales + n), load(scales + PANEL + n)};
    }
    static ivec start(const RowBlock &) { return ivec{}; }
    static vec add_scaled(const Scales &w, ivec sum, const RowBlock &x, vec total) {
        total = total + to_float(sum) * (w.scales * broadcast(x.scale));
        return total + w.minimums * broadcast(x.scaled_sum);
    }
};
