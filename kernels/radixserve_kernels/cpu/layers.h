// A decoder's layers from end to end: norms, projections, rotation, attention, MLP.
//
// Values are rounded to the model's type where PyTorch's operations round them, except that sums stay in
// float32 throughout.
#pragma once

#include <memory>

#include "attention.h"

// A packed weight [columns, depth], as Python passes it.
template <class T> struct Weight {
    const T *panels;  // [ceil(columns / PANEL)][padded_depth(depth) * PANEL]
    const T *bias;    // [columns] or null
    int64_t columns, depth;
    int num_panels() const { return int((columns + PANEL - 1) / PANEL); }
    Panels<T> slice(int first, int last) const {
        const int64_t deep = padded_depth<T>(depth), size = deep * PANEL;
        return {panels + first * size, size, last - first, deep};
    }
};

// One layer's weights, as Python passes them.
template <class T> struct Layer {
    const T *input_norm;  // [hidden]
    const T *qk_norm;     // [num_heads + num_kv_heads, head_dim] or null
    const T *post_norm;   // [hidden]
    Weight<T> qkv, o, gate_up, down;
};

struct DecoderShape {
    int64_t num_layers, num_heads, num_kv_heads, head_dim, hidden, intermediate, vocab;
    float eps;
};

// The inputs and the output of one step.
struct Step {
    int64_t num_tokens, num_sampled;
    const int64_t *input_ids, *positions, *slots;  // [num_tokens]
    const int64_t *sampled;                        // [num_sampled] tokens, ascending
    const float *rotations;  // [positions][head_dim / 2][2] cosine and sine
    float *logits;           // [num_sampled][vocab]
};

constexpr int64_t BLOCK_BYTES = 1100 << 10;  // of the second-level cache, for rows of x

// Elements of a row of activations: an odd number of cache lines, so that the same columns of successive
// rows do not map to the same cache sets.
template <class T> inline int64_t row_size(int64_t columns) {
    const int64_t line = 64 / sizeof(T);
    return ((columns + line - 1) / line | 1) * line;
}

// Rows of x that are multiplied with a panel while both are in the cache: `rows` in parts of equal size,
// since the weight is read once for each part, rounded up to a multiple of `unit`.
inline int block_rows(int64_t rows, int64_t row_bytes, int unit) {
    const int64_t fitting = min<int64_t>(1536, (BLOCK_BYTES + row_bytes - 1) / row_bytes);
    const int64_t parts = (rows + fitting - 1) / fitting;
    return int(round_up((rows + parts - 1) / parts, unit));
}

// Calls epilogue(row, first column, low, high) for all of x W^T, also for padding columns after the last one
// of the weight. `tile` is where it writes.
template <class T, class Epilogue>
void gemm(const T *x, int64_t stride, int64_t rows, const Weight<T> &w, const OutputTile &tile,
          Epilogue &&epilogue) {
    if (!rows) return;
    const int count = w.num_panels();
    const int64_t depth = padded_depth<T>(w.depth);
    const int threads = threads_for(2.0 * rows * count * PANEL * depth + 2.0 * count * PANEL * depth);
    with_level<T>([&](auto level) {
        const int most = block_rows(rows, level.row_bytes(depth), level.ROW_UNIT);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            const int64_t members = team_size(), me = thread_index();
            const int first = int(count * me / members), last = int(count * (me + 1) / members);
            for (int64_t top = 0; top < rows; top += most)
                level.panels_product(
                    x + top * stride, stride, int(min<int64_t>(rows - top, most)), w.slice(first, last),
                    OutputTile{tile.first + top * tile.stride + first * tile.size, tile.stride, tile.size},
                    [&](int m, int panel, vec low, vec high) {
                        epilogue(top + m, int64_t(first + panel) * PANEL, low, high);
                    });
        }
    });
}

// One vector of a row, cut off after the last column.
template <class T> inline void store_tail(T *row, int64_t column, int64_t columns, vec x) {
    if (column + LANES <= columns) return store(row + column, x);
    for (int64_t i = column; i < columns; i++) store1(row + i, x[i - column]);
}

template <class T> inline vec load_tail(const T *row, int64_t column, int64_t columns) {
    if (column + LANES <= columns) return load(row + column);
    vec x = {};
    for (int64_t i = column; i < columns; i++) x[i - column] = to_f32(row[i]);
    return x;
}

// out = x W^T (+ bias) (+ residual, which may be out itself).
template <class T, class Out>
void linear(const T *x, int64_t stride, int64_t rows, const Weight<T> &w, const T *residual, Out *out,
            int64_t out_stride) {
    const OutputTile tile{(char *)out, out_stride * int64_t(sizeof(Out)), PANEL * int64_t(sizeof(Out))};
    gemm(x, stride, rows, w, tile, [&](int64_t row, int64_t column, vec low, vec high) {
        if (column + PANEL <= w.columns && !w.bias) {
            if (residual) {
                const T *with = residual + row * out_stride + column;
                low += load(with), high += load(with + LANES);
            }
            return store2(out + row * out_stride + column, low, high);
        }
        const vec parts[2] = {low, high};
        for (int i = 0; i < 2; i++, column += LANES) {
            vec sum = parts[i];
            if (w.bias) sum += load_tail(w.bias, column, w.columns);
            if (residual) sum += load_tail(residual + row * out_stride, column, w.columns);
            store_tail(out + row * out_stride, column, w.columns, sum);
        }
    });
}

// out = silu(gate) * up, for a weight whose panels hold LANES rows of gate and as many of up.
template <class T>
void silu_gate_up(const T *x, int64_t stride, int64_t rows, const Weight<T> &w, T *out, int64_t out_stride) {
    const OutputTile tile{(char *)out, out_stride * int64_t(sizeof(T)), LANES * int64_t(sizeof(T))};
    gemm(x, stride, rows, w, tile, [&](int64_t row, int64_t column, vec gate, vec up) {
        if (w.bias) {
            gate += load_tail(w.bias, column, w.columns);
            up += load_tail(w.bias, column + LANES, w.columns);
        }
        gate = rounded_to<T>(gate), up = rounded_to<T>(up);
        vec exponent = gate * broadcast(-1.44269504f);
        exponent = exponent < broadcast(126.0f) ? exponent : broadcast(126.0f);
        const vec silu = divide<T>(gate, broadcast(1.0f) + fast_exp2<T>(exponent));
        store_tail(out + row * out_stride, column / 2, out_stride, rounded_to<T>(silu) * up);
    });
}

template <class T>
void rms_norm(const T *x, const T *weight, int64_t size, float eps, T *out) {
    vec squares = {}, more = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
        const vec a = load(x + i), b = load(x + i + LANES);
        squares += a * a, more += b * b;
    }
    squares += more;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    for (; i < size; i++) rest += to_f32(x[i]) * to_f32(x[i]);
    const float scale = 1.0f / __builtin_sqrtf((reduce_add(squares) + rest) / float(size) + eps);
    for (i = 0; i + LANES <= size; i += LANES)
        store(out + i, rounded_to<T>(load(x + i) * broadcast(scale)) * load(weight + i));
    for (; i < size; i++) store1(out + i, rounded_to<T>(broadcast(to_f32(x[i]) * scale))[0] * to_f32(weight[i]));
}

// Rotates the pairs (2i, 2i + 1) of a head in place: rotation [dim / 2][2] cosine and sine.
template <class T> void rotate(T *x, const float *rotation, int64_t dim) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + LANES <= dim; i += LANES) {
        __m512 both = _mm512_loadu_ps(rotation + i), pair = (__m512)load(x + i);
        __m512 cosine = _mm512_moveldup_ps(both), sine = _mm512_movehdup_ps(both);
        __m512 swapped = _mm512_permute_ps(pair, 0xb1);
        store(x + i, (vec)_mm512_fmaddsub_ps(pair, cosine, _mm512_mul_ps(swapped, sine)));
    }
#elif defined(__AVX2__) && defined(__FMA__)
    for (; i + LANES <= dim; i += LANES) {
        __m256 both = _mm256_loadu_ps(rotation + i), pair = (__m256)load(x + i);
        __m256 cosine = _mm256_moveldup_ps(both), sine = _mm256_movehdup_ps(both);
        __m256 swapped = _mm256_permute_ps(pair, 0xb1);
        store(x + i, (vec)_mm256_fmaddsub_ps(pair, cosine, _mm256_mul_ps(swapped, sine)));
    }
#endif
    for (; i < dim; i += 2) {
        float a = to_f32(x[i]), b = to_f32(x[i + 1]);
        store1(x + i, a * rotation[i] - b * rotation[i + 1]);
        store1(x + i + 1, a * rotation[i + 1] + b * rotation[i]);
    }
}
