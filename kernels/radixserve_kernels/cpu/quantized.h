// Products with weights of 8 or 4 bits: activations are rounded to 8 or 16 bits, a block of 32 numbers of a row
// at a time, blocks are summed in integers, and the sums of blocks are added in float32 in the order of k.
// A row's result therefore has the same bits whatever rows are beside it, with any number of threads.
//
// A weight W [N, K] is stored in panels of PANEL of its rows, block after block of 32 of k:
//   the numbers of a form and their scales, see form_int8.h and form_int4.h
#pragma once

#include "byte_products.h"
#include "panels.h"

constexpr int BLOCK = 32;

inline int64_t num_blocks(int64_t depth) { return (depth + BLOCK - 1) / BLOCK; }

// What belongs to 32 numbers of a row: x = scale * (its integer).
struct RowBlock {
    float scale, scaled_sum;  // scaled_sum: scale times the sum of the integers
    int32_t offset;           // with which sums of products begin, see IntegerDot
};

// Rows of activations in 8 bits or in 16: `bits`.
struct QuantizedRows {
    const int8_t *numbers;   // [rows][blocks][BLOCK] int8_t or int16_t, see quantize_row
    const RowBlock *blocks;  // [rows][blocks]
    int64_t num_blocks;
    int bits;
    QuantizedRows from(int64_t row) const {
        return {numbers + row * num_blocks * BLOCK * bits / 8, blocks + row * num_blocks, num_blocks, bits};
    }
};

// The numbers of a block in 8 bits.
inline void store_numbers(const ivec *numbers, int8_t *out) {
#if defined(__aarch64__)
    for (int i = 0; i < BLOCK / LANES; i += 4, out += 4 * LANES) {
        const int32x4_t *four = (const int32x4_t *)(numbers + i);
        const int16x8_t low = vuzp1q_s16((int16x8_t)four[0], (int16x8_t)four[1]);
        const int16x8_t high = vuzp1q_s16((int16x8_t)four[2], (int16x8_t)four[3]);
        vst1q_s8(out, vuzp1q_s8((int8x16_t)low, (int8x16_t)high));
    }
#else
    typedef int8_t narrow __attribute__((vector_size(LANES)));
    for (int i = 0; i < BLOCK / LANES; i++) {
        const narrow some = __builtin_convertvector(numbers[i], narrow);
        memcpy(out + i * LANES, &some, LANES);
    }
#endif
}

#if defined(RADIXSERVE_BYTE_PRODUCTS)
constexpr int MOST_WORD = 32639;  // 127 * 256 + 127

// In two parts of 8 bits, number = 256 * high + low: all high ones, then the low ones.
inline void store_numbers(const ivec *numbers, int16_t *out) {
    ivec high[BLOCK / LANES], low[BLOCK / LANES];
    for (int i = 0; i < BLOCK / LANES; i++) high[i] = (numbers[i] + 128) >> 8, low[i] = numbers[i] - (high[i] << 8);
    store_numbers(high, (int8_t *)out), store_numbers(low, (int8_t *)out + BLOCK);
}
#else
constexpr int MOST_WORD = 32767;

// In 16 bits, of each four in the order 0 2 1 3: the order of pairs that IntegerDot::add_words multiplies.
inline void store_numbers(const ivec *numbers, int16_t *out) {
    uint64_t pairs[BLOCK / 2];
    memcpy(pairs, numbers, sizeof pairs);
    for (int i = 0; i < BLOCK / 4; i++) {
        const uint64_t low = 0x0000ffff0000ffff, four = (pairs[2 * i] & low) | (pairs[2 * i + 1] & low) << 16;
        memcpy(out + 4 * i, &four, 8);
    }
}
#endif

// One row to `numbers`, zeros after the last column. In 8 bits the largest number of a block becomes -limit, 127 or 128,
// and the others, to 127, what lies nearest; in 16 bits the largest becomes -MOST_WORD.
// A block with a number that is not finite gets such a scale, so that it is seen in the result.
template <class Number, class T>
void quantize_row(const T *x, int64_t depth, int limit, Number *numbers, RowBlock *blocks) {
    constexpr int VECTORS = BLOCK / LANES, HIGHEST = sizeof(Number) == 1 ? 127 : MOST_WORD;
    const float lowest = sizeof(Number) == 1 ? float(limit) : float(MOST_WORD);
    for (int64_t k = 0; k < depth; k += BLOCK, numbers += BLOCK, blocks++) {
        vec some[VECTORS], most = {}, least = {}, odd = {};
        if (k + BLOCK <= depth) {
            for (int i = 0; i < VECTORS; i++) some[i] = load(x + k + i * LANES);
        } else {
            float left[BLOCK] = {};
            for (int64_t j = k; j < depth; j++) left[j - k] = to_f32(x[j]);
            memcpy(some, left, sizeof some);
        }
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) {
            most = max(most, some[i]), least = max(least, -some[i]), odd += some[i] - some[i];
        }
        const float above = reduce_max(most), below = reduce_max(least);
        const float largest = above > below ? -above : below;
        const bool is_zero = !(above > 1e-30f || below > 1e-30f);
        const vec inverse = broadcast(is_zero ? 0.0f : lowest / largest);
        ivec rounded[VECTORS], sums = {};
        for (int i = 0; i < VECTORS; i++) {
            rounded[i] = (ivec)(some[i] * inverse + broadcast(12582912.0f)) - 0x4b400000;
            rounded[i] = min(rounded[i], broadcast_int(HIGHEST));
            sums += rounded[i];
        }
        store_numbers(rounded, numbers);
        const int32_t sum = reduce_add(sums);
        const float scale = (is_zero ? 0.0f : largest / lowest) + reduce_add(odd);
        *blocks = {scale, scale * float(sum), sizeof(Number) == 1 ? -IntegerDot::OFFSET * sum : 0};
    }
}

// The numbers of a weight before it is packed.
struct PlainWeight {
    const uint8_t *numbers;        // [columns][depth], one a byte
    const void *scales, *minimums;  // [columns][num_blocks(depth)] of the form's type; or null
    int64_t columns, depth;
};

// The numbers of block b of a column, zeros after the last.
inline void block_numbers(const PlainWeight &weight, int64_t column, int64_t b, uint8_t *numbers) {
    const int64_t count = min<int64_t>(weight.depth - b * BLOCK, BLOCK);
    if (count < BLOCK) memset(numbers, 0, BLOCK);
    memcpy(numbers, weight.numbers + column * weight.depth + b * BLOCK, count);
}

// Panels that one row is multiplied with at a time: arm64 then does once for all of them what a block of x needs.
#if defined(RADIXSERVE_BYTE_PRODUCTS)
constexpr int PANELS_OF_ROW = 4;
#else
constexpr int PANELS_OF_ROW = 1;
#endif

// A form of weights. Panels are of num_blocks(depth) * block_bytes.
struct QuantizedForm {
    int64_t block_bytes;  // of a panel
    int limit;            // see quantize_row
    // `panels` are zero.
    void (*pack)(const PlainWeight &weight, uint8_t *panels);
    // Column n of a panel, widened, to out [depth].
    void (*widen_column)(const uint8_t *panel, int n, int64_t depth, float *out);
    // sums [panels][rows][PANEL] = x [rows] times panels of x.num_blocks blocks: one, or PANELS_OF_ROW and one row.
    void (*multiply)(const QuantizedRows &x, int rows, const uint8_t *panels, int count, float *sums);
};

// Index of element k of column n among the bytes of a block in which the four of a lane are successive k; or the eight of
// half a vector, see byte_products.h.
inline int lane_offset(int k, int n) {
    constexpr int SIZE = HAS_MATRIX_PRODUCTS ? 8 : 4;
    return k / SIZE * (SIZE * PANEL) + n * SIZE + k % SIZE;
}

inline ivec load_lanes(const uint8_t *from) {
    ivec x;
    memcpy(&x, from, sizeof x);
    return x;
}

extern Reading reading_one_row, reading_rows;  // of panels, for one row of x, and for several

// The functions of a form that is written as a class:
//   BLOCK_BYTES                                  of a panel
//   ROWS, LIMIT                                  of x in one pass; see quantize_row
//   pack(weight, column, block, panel block, n)  packs 32 numbers and their scale
//   value_at(panel block, n, k)                  one number
//   start(row block)                             of integer sums
//   add_block<M>(panel block, x, stride, sums)   integers of M rows, in 8 bits or, where they are not split, in 16; or
//   add_block(panel block, row, byte sums)       the same where they are split, see byte_products.h
//   add_scaled(scales, sum, row block, total)    total plus the scaled sum
template <class Form> struct FormFunctions {
    static void pack(const PlainWeight &weight, uint8_t *panels) {
        const int64_t blocks = num_blocks(weight.depth), size = blocks * Form::BLOCK_BYTES;
        for (int64_t column = 0; column < weight.columns; column++)
            for (int64_t b = 0; b < blocks; b++)
                Form::pack(weight, column, b, panels + column / PANEL * size + b * Form::BLOCK_BYTES,
                          int(column % PANEL));
    }

    static void widen_column(const uint8_t *panel, int n, int64_t depth, float *out) {
        for (int64_t k = 0; k < depth; k++)
            out[k] = Form::value_at(panel + k / BLOCK * Form::BLOCK_BYTES, n, int(k % BLOCK));
    }

    template <int M, class Number, Reading READING, int PANELS = 1>
    static void tile(const QuantizedRows &x, const uint8_t *panel, float *out) {
        const Number *numbers = (const Number *)x.numbers;
        const int64_t stride = x.num_blocks * BLOCK;
        vec totals[PANELS * M][2] = {};
        for (int64_t b = 0; b < x.num_blocks; b++, panel += Form::BLOCK_BYTES) {
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) {
                const uint8_t *block = panel + p * x.num_blocks * Form::BLOCK_BYTES;
#if defined(RADIXSERVE_BYTE_PRODUCTS)
                if (p) asm("" : "+r"(block) : "w"(totals[p * M - 1][1]));  // else the compiler mixes panels, and spills
#endif
                if (READING == NEAR) prefetch<Form::BLOCK_BYTES, 3>(block + 2048);
                if (READING == FAR) prefetch<Form::BLOCK_BYTES, 2>(block + 8192);
                ivec sums[M][2];
#if defined(RADIXSERVE_BYTE_PRODUCTS)
                constexpr int PARTS = sizeof(Number);  // of 8 bits, high ones first
                const int8_t *parts = (const int8_t *)(numbers + b * BLOCK);
                ByteSums<M * PARTS> bytes;
                Form::add_block(block, [&](int m) { return parts + m / PARTS * PARTS * stride + m % PARTS * BLOCK; }, bytes);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < 2; n++)
                        sums[m][n] = PARTS == 1 ? bytes.of(m, n) : (bytes.of(2 * m, n) << 8) + bytes.of(2 * m + 1, n);
#else
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = Form::start(x.blocks[m * x.num_blocks + b]);
                Form::template add_block<M>(block, numbers + b * BLOCK, stride, sums);
#endif
                for (int n = 0; n < 2; n++) {
                    const auto scales = Form::scales(block, n * LANES);
#pragma GCC unroll 12
                    for (int m = 0; m < M; m++) {
                        vec &total = totals[p * M + m][n];
                        total = Form::add_scaled(scales, sums[m][n], x.blocks[m * x.num_blocks + b], total);
                    }
                }
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < PANELS * M; m++) store2(out + m * PANEL, totals[m][0], totals[m][1]);
    }

    template <int M, class Number, int PANELS = 1>
    static void tile(const QuantizedRows &x, Reading reading, const uint8_t *panel, float *out) {
        if (reading == NEAR) tile<M, Number, NEAR, PANELS>(x, panel, out);
        else if (reading == FAR) tile<M, Number, FAR, PANELS>(x, panel, out);
        else tile<M, Number, PLAIN, PANELS>(x, panel, out);
    }

    template <class Number>
    static void multiply_numbers(const QuantizedRows &x, int rows, const uint8_t *panels, int count, float *sums) {
        if (PANELS_OF_ROW > 1 && count > 1)
            return tile<1, Number, PANELS_OF_ROW>(x, reading_one_row, panels, sums);
        for_row_blocks(rows, [&](int first, int some) {
            with_row_count<Form::ROWS>(some, [&](auto m) {
                const Reading reading = first ? PLAIN : m == 1 ? reading_one_row : reading_rows;
                tile<m, Number>(x.from(first), reading, panels, sums + first * PANEL);
            });
        }, Form::ROWS);
    }

    static void multiply(const QuantizedRows &x, int rows, const uint8_t *panels, int count, float *sums) {
        if (x.bits == 16) multiply_numbers<int16_t>(x, rows, panels, count, sums);
        else multiply_numbers<int8_t>(x, rows, panels, count, sums);
    }

    static constexpr QuantizedForm functions = {Form::BLOCK_BYTES, Form::LIMIT, pack, widen_column, multiply};
};
