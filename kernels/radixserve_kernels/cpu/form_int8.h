// Weights of signed 8 bits with a scale of 16 bits for 32 of them: of a block the scales [PANEL], then
// the numbers [8][PANEL][4]. GGUF's Q8_0 exactly.
#pragma once

#include "quantized.h"

struct FormInt8 {
    static constexpr int64_t SCALE_BYTES = PANEL * sizeof(half), BLOCK_BYTES = SCALE_BYTES + PANEL * BLOCK;
    static constexpr int ROWS = LANES == 16 ? 8 : 4, LIMIT = IntegerDot::LIMIT;

    static void pack(const PlainWeight &weight, int64_t column, int64_t b, uint8_t *block, int n) {
        ((half *)block)[n] = ((const half *)weight.scales)[column * num_blocks(weight.depth) + b];
        uint8_t numbers[BLOCK];
        block_numbers(weight, column, b, numbers);
        for (int k = 0; k < BLOCK; k += 4) memcpy(block + SCALE_BYTES + lane_offset(k, n), numbers + k, 4);
    }
    static float value_at(const uint8_t *block, int n, int k) {
        return to_f32(((const half *)block)[n]) * float(int8_t(block[SCALE_BYTES + lane_offset(k, n)]));
    }

#if defined(RADIXSERVE_BYTE_PRODUCTS)
    template <int M, class Row>
    [[gnu::always_inline]] static void add_block(const uint8_t *block, Row &&row, ByteSums<M> &sums) {
        const int8_t *numbers = (const int8_t *)block + SCALE_BYTES;
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            int8x16_t w[4];
            load_four(numbers, w);
            sums.add(part, w, row);
        }
    }
#else
    template <int M>
    static void add_block(const uint8_t *block, const int8_t *x, int64_t stride, ivec (&sums)[M][2]) {
        block += SCALE_BYTES;
#pragma GCC unroll 8
        for (int k = 0; k < BLOCK; k += 4, block += 4 * PANEL) {
            const IntegerDot::Operand w[2] = {IntegerDot::prepare(load_lanes(block)),
                                              IntegerDot::prepare(load_lanes(block + 4 * LANES))};
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                int32_t four;
                memcpy(&four, x + m * stride + k, 4);
                for (int n = 0; n < 2; n++) {
                    sums[m][n] = IntegerDot::add(sums[m][n], w[n], broadcast_int(four));
                    pin(sums[m][n]);
                }
            }
        }
    }

    template <int M>
    static void add_block(const uint8_t *block, const int16_t *x, int64_t stride, ivec (&sums)[M][2]) {
        block += SCALE_BYTES;
#pragma GCC unroll 8
        for (int k = 0; k < BLOCK; k += 4, block += 4 * PANEL) {
            const words bytes[2] = {(words)load_lanes(block), (words)load_lanes(block + 4 * LANES)};
            const words even[2] = {bytes[0] << 8 >> 8, bytes[1] << 8 >> 8}, odd[2] = {bytes[0] >> 8, bytes[1] >> 8};
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                int32_t pairs[2];
                memcpy(pairs, x + m * stride + k, 8);
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++)
                    for (int n = 0; n < 2; n++) {
                        sums[m][n] = add_words(sums[m][n], i ? odd[n] : even[n], broadcast_int(pairs[i]));
                        pin(sums[m][n]);
                    }
            }
        }
    }

#endif

    static vec scales(const uint8_t *block, int n) { return load((const half *)block + n); }
    static ivec start(const RowBlock &x) { return IntegerDot::OFFSET ? broadcast_int(x.offset) : ivec{}; }
    static vec add_scaled(vec scales, ivec sum, const RowBlock &x, vec total) {
        return total + to_float(sum) * (scales * broadcast(x.scale));
    }
};
