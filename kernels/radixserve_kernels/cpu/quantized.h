// Products with weights of 8 or 4 bits: activations are rounded to 8 bits, a block of 32 numbers of a row
// at a time, blocks are summed in integers, and the sums of blocks are added in float32 in the order of k.
// A row's result therefore has the same bits whatever rows are beside it, with any number of threads.
//
// A weight W [N, K] is stored in panels of PANEL of its rows, block after block of 32 of k:
//   scales [PANEL] (and minimums [PANEL]), then the numbers of a form, see form_int8.h and form_int4.h
#pragma once

#include "integer_dot.h"
#include "panels.h"

constexpr int BLOCK = 32;

inline int64_t num_blocks(int64_t depth) { return (depth + BLOCK - 1) / BLOCK; }

// What belongs to 32 numbers of a row: x = scale * (its integer).
struct RowBlock {
    float scale, scaled_sum;
    int32_t sum;  // of the integers; scaled_sum: times scale
};

// Rows of activations in 8 bits.
struct QuantizedRows {
    const int8_t *numbers;   // [rows][blocks][BLOCK], zeros after the last column
    const RowBlock *blocks;  // [rows][blocks]
    int64_t num_blocks;
    QuantizedRows from(int64_t row) const {
        return {numbers + row * num_blocks * BLOCK, blocks + row * num_blocks, num_blocks};
    }
};

// One row. The largest number of a block becomes -limit, 127 or 128, and the others, to 127, what lies nearest.
// A block with a number that is not finite gets such a scale, so that it is seen in the result.
template <class T>
void quantize_row(const T *x, int64_t depth, int limit, int8_t *numbers, RowBlock *blocks) {
    constexpr int VECTORS = BLOCK / LANES;
    for (int64_t k = 0; k < depth; k += BLOCK, numbers += BLOCK, blocks++) {
        vec some[VECTORS], most = {}, least = {}, odd = {};
        for (int i = 0; i < VECTORS; i++) {
            const int64_t at = k + i * LANES;
            some[i] = vec{};
            if (at + LANES <= depth) some[i] = load(x + at);
            else
                for (int64_t j = at; j < depth; j++) some[i][j - at] = to_f32(x[j]);
            most = max(most, some[i]), least = max(least, -some[i]), odd += some[i] - some[i];
        }
        const float above = reduce_max(most), below = reduce_max(least);
        const float largest = above > below ? -above : below;
        const bool is_zero = !(above > 1e-30f || below > 1e-30f);
        const vec inverse = broadcast(is_zero ? 0.0f : float(limit) / largest);
        ivec sums = {};
        for (int i = 0; i < VECTORS; i++) {
            ivec rounded = (ivec)(some[i] * inverse + broadcast(12582912.0f)) - 0x4b400000;
            rounded = rounded < 127 ? rounded : broadcast_int(127);
            sums += rounded;
            for (int j = 0; j < LANES; j++) numbers[i * LANES + j] = int8_t(rounded[j]);
        }
        int32_t sum = 0;
        for (int i = 0; i < LANES; i++) sum += sums[i];
        const float scale = (is_zero ? 0.0f : largest / float(limit)) + reduce_add(odd);
        *blocks = {scale, scale * float(sum), sum};
    }
}

// One row in two parts of 8 bits, together nearly 16: the rounded row, and what rounding has left of it, rounded too.
// The second part follows the first in `numbers` and `blocks`.
template <class T>
void quantize_row_finely(const T *x, int64_t depth, int limit, int8_t *numbers, RowBlock *blocks) {
    const int64_t count = num_blocks(depth);
    for (int64_t b = 0; b < count; b++) {
        const int64_t some = min<int64_t>(depth - b * BLOCK, BLOCK);
        const T *from = x + b * BLOCK;
        int8_t *own = numbers + b * BLOCK;
        quantize_row(from, some, limit, own, blocks + b);
        float rest[BLOCK];
        for (int64_t k = 0; k < some; k++) rest[k] = to_f32(from[k]) - blocks[b].scale * float(own[k]);
        quantize_row(rest, some, limit, own + count * BLOCK, blocks + count + b);
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

// A form of weights. Panels are of num_blocks(depth) * block_bytes.
struct QuantizedForm {
    int64_t block_bytes;  // of a panel
    int limit;            // see quantize_row
    // `panels` are zero.
    void (*pack)(const PlainWeight &weight, uint8_t *panels);
    // Column n of a panel, widened, to out [depth].
    void (*widen_column)(const uint8_t *panel, int n, int64_t depth, float *out);
    // sums [rows][PANEL] = x [rows] times a panel; x.num_blocks blocks.
    void (*multiply)(const QuantizedRows &x, int rows, const uint8_t *panel, float *sums);
};

// Index of element k of column n among the bytes of a block in which the four of a lane are successive k.
inline int lane_offset(int k, int n) { return k / 4 * (4 * PANEL) + n * 4 + k % 4; }

inline ivec load_lanes(const uint8_t *from) {
    ivec x;
    memcpy(&x, from, sizeof x);
    return x;
}

// The functions of a form that is written as a class:
//   BLOCK_BYTES                                  of a panel
//   ROWS, LIMIT                                  of x in one pass; see quantize_row
//   pack(weight, column, block, panel block, n)  packs 32 numbers and their scale
//   value_at(panel block, n, k)                  one number
//   add_block<M>(panel block, x, stride, sums)   integers of M rows
//   add_scaled(panel block, part, sum, block, total)   total plus the scaled sum
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

    template <int M, bool READS_MEMORY>
    static void tile(const QuantizedRows &x, const uint8_t *panel, float *out) {
        const int64_t stride = x.num_blocks * BLOCK;
        vec totals[M][2] = {};
        for (int64_t b = 0; b < x.num_blocks; b++, panel += Form::BLOCK_BYTES) {
            if (READS_MEMORY) prefetch<Form::BLOCK_BYTES, 3>(panel + 2048);
            ivec sums[M][2] = {};
            Form::template add_block<M>(panel, x.numbers + b * BLOCK, stride, sums);
            for (int n = 0; n < 2; n++) {
                const auto scales = Form::scales(panel, n * LANES);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++)
                    totals[m][n] = Form::add_scaled(scales, sums[m][n], x.blocks[m * x.num_blocks + b], totals[m][n]);
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) store2(out + m * PANEL, totals[m][0], totals[m][1]);
    }

    static void multiply(const QuantizedRows &x, int rows, const uint8_t *panel, float *sums) {
        for_row_blocks(rows, [&](int first, int some) {
            with_row_count<Form::ROWS>(some, [&](auto count) {
                if (first == 0) tile<count, true>(x, panel, sums);
                else tile<count, false>(x.from(first), panel, sums + first * PANEL);
            });
        }, Form::ROWS);
    }

    static constexpr QuantizedForm functions = {Form::BLOCK_BYTES, Form::LIMIT, pack, widen_column, multiply};
};
