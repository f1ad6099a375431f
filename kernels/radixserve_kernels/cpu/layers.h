// A decoder's layers from end to end: norms, projections, rotation, attention, MLP.
//
// What is rounded to the model's type and when is
// as in PyTorch, operation by operation, but for sums, which are kept in float throughout.
#pragma once

#include <memory>

#include "attention.h"

template <class T> struct Weight {
    const T *panels;  // [ceil(columns / PANEL)][padded_depth(depth) * PANEL]
    const T *bias;    // [columns] or null
    int64_t columns, depth;
    int64_t num_panels() const { return (columns + PANEL - 1) / PANEL; }
    int64_t panel_size() const { return padded_depth<T>(depth) * PANEL; }
};

struct LayerPointers {
    const void *input_norm, *qkv, *qkv_bias, *qk_norm, *o, *o_bias, *post_norm, *gate_up,
        *gate_up_bias, *down, *down_bias;
};

struct DecoderShape {
    int64_t num_layers, num_heads, num_kv_heads, head_dim, hidden, intermediate, vocab;
    float eps;
};

// What changes with every step.
struct Step {
    int64_t num_tokens, num_sampled;
    const int64_t *input_ids, *positions, *slots;  // [num_tokens]
    const int64_t *sampled;                        // [num_sampled] tokens, ascending
    const float *rotations;  // [positions][head_dim / 2][2] cosine and sine
    float *logits;           // [num_sampled][vocab]
};

constexpr int64_t BLOCK_BYTES = 1100 << 10;  // of the second-level cache, for rows of x

// Elements of a row of activations: whole cache lines, an odd number of them, so that the same
// columns of successive rows do not compete for the same places of the cache.
template <class T> inline int64_t row_size(int64_t columns) {
    const int64_t line = 64 / sizeof(T);
    return ((columns + line - 1) / line | 1) * line;
}

// Rows of x that are multiplied with a panel while it is in the cache, and themselves stay there: of
// `rows` a part of equal size, since the weight is read again for each part, and a multiple of `unit`.
inline int block_rows(int64_t rows, int64_t row_bytes, int unit) {
    const int64_t fitting = least<int64_t>(1536, (BLOCK_BYTES + row_bytes - 1) / row_bytes);
    const int64_t parts = (rows + fitting - 1) / fitting;
    return int(round_up((rows + parts - 1) / parts, unit));
}

// epilogue(row, first column, low, high); columns may lie behind the last one of the weight. `place` is
// where it will write.
template <class T, class Epilogue>
void multiply(const T *x, int64_t stride, int64_t rows, const Weight<T> &w, const Place &place,
              Epilogue &&epilogue) {
    if (!rows) return;  // of a step behind which nothing is drawn
    const int64_t depth = padded_depth<T>(w.depth), count = w.num_panels();
    const int64_t row_bytes = depth / depth_parts<T>(depth) * int64_t(sizeof(T));
    const int most = block_rows(rows, row_bytes, sizeof(T) == 4 ? ROWS : 96);
    const int crew = crew_for(2.0 * rows * count * PANEL * depth + 2.0 * count * PANEL * depth);
#pragma omp parallel num_threads(crew) if (crew > 1)
    {
        const int64_t members = crew_size(), me = crew_member();
        const int64_t first = count * me / members, last = count * (me + 1) / members;
        for (int64_t top = 0; top < rows; top += most)
            panels_product(x + top * stride, stride, int(least<int64_t>(rows - top, most)),
                           w.panels + first * w.panel_size(), w.panel_size(), int(last - first), depth,
                           Place{place.first + top * place.stride + first * place.size, place.stride, place.size},
                           [&](int m, int panel, vec low, vec high) {
                               epilogue(top + m, (first + panel) * PANEL, low, high);
                           });
    }
}

// One vector of a row, cut off behind the last column.
template <class T> inline void store_some(T *row, int64_t column, int64_t columns, vec x) {
    if (column + LANES <= columns) return store(row + column, x);
    for (int64_t i = column; i < columns; i++) put(row + i, x[i - column]);
}

template <class T> inline vec load_some(const T *row, int64_t column, int64_t columns) {
    if (column + LANES <= columns) return load(row + column);
    vec x = {};
    for (int64_t i = column; i < columns; i++) x[i - column] = widen(row[i]);
    return x;
}

// out = x W^T (+ bias) (+ plus, which may be out itself).
template <class T, class Out>
void linear(const T *x, int64_t stride, int64_t rows, const Weight<T> &w, const T *plus, Out *out,
            int64_t out_stride) {
    const Place place{(char *)out, out_stride * int64_t(sizeof(Out)), PANEL * int64_t(sizeof(Out))};
    multiply(x, stride, rows, w, place, [&](int64_t row, int64_t column, vec low, vec high) {
        if (column + PANEL <= w.columns && !w.bias) {
            if (plus) {
                const T *with = plus + row * out_stride + column;
                low += load(with), high += load(with + LANES);
            }
            return store_both(out + row * out_stride + column, low, high);
        }
        const vec parts[2] = {low, high};
        for (int i = 0; i < 2; i++, column += LANES) {
            vec sum = parts[i];
            if (w.bias) sum += load_some(w.bias, column, w.columns);
            if (plus) sum += load_some(plus + row * out_stride, column, w.columns);
            store_some(out + row * out_stride, column, w.columns, sum);
        }
    });
}

// out = silu(gate) * up, for a weight whose panels hold LANES rows of gate and as many of up.
template <class T>
void gated(const T *x, int64_t stride, int64_t rows, const Weight<T> &w, T *out, int64_t out_stride) {
    const Place place{(char *)out, out_stride * int64_t(sizeof(T)), LANES * int64_t(sizeof(T))};
    multiply(x, stride, rows, w, place, [&](int64_t row, int64_t column, vec gate, vec up) {
        if (w.bias) {
            gate += load_some(w.bias, column, w.columns);
            up += load_some(w.bias, column + LANES, w.columns);
        }
        gate = rounded_to<T>(gate), up = rounded_to<T>(up);
        const vec exponent = gate * fill(-1.44269504f);
        vec silu = quotient<T>(gate, fill(1.0f) + exp2_of<T>(exponent < fill(126.0f) ? exponent : fill(126.0f)));
        store_some(out + row * out_stride, column / 2, out_stride, rounded_to<T>(silu) * up);
    });
}

template <class T>
void norm_row(const T *x, const T *weight, int64_t size, float eps, T *out) {
    vec squares = {}, more = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
        const vec a = load(x + i), b = load(x + i + LANES);
        squares += a * a, more += b * b;
    }
    squares += more;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    for (; i < size; i++) rest += widen(x[i]) * widen(x[i]);
    const float scale = 1.0f / __builtin_sqrtf((sum_of(squares) + rest) / float(size) + eps);
    for (i = 0; i + LANES <= size; i += LANES)
        store(out + i, rounded_to<T>(load(x + i) * fill(scale)) * load(weight + i));
    for (; i < size; i++) put(out + i, rounded_to<T>(fill(widen(x[i]) * scale))[0] * widen(weight[i]));
}

// Pairs (2i, 2i + 1) of a head turned by the angles of a position, in place.
template <class T> void rotate(T *x, const float *turns, int64_t dim) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + LANES <= dim; i += LANES) {
        __m512 both = _mm512_loadu_ps(turns + i), pair = (__m512)load(x + i);
        __m512 cosine = _mm512_moveldup_ps(both), sine = _mm512_movehdup_ps(both);
        __m512 swapped = _mm512_permute_ps(pair, 0xb1);
        store(x + i, (vec)_mm512_fmaddsub_ps(pair, cosine, _mm512_mul_ps(swapped, sine)));
    }
#endif
    for (; i < dim; i += 2) {
        float a = widen(x[i]), b = widen(x[i + 1]);
        put(x + i, a * turns[i] - b * turns[i + 1]);
        put(x + i + 1, a * turns[i + 1] + b * turns[i]);
    }
}

// Runs one step at a time; owns the activations, borrows weights and K/V pool.
template <class T> class Decoder {
  public:
    Decoder(const DecoderShape &shape, const LayerPointers *pointers, const T *embedding, const T *norm,
            const T *head)
        : shape(shape), embedding(embedding), norm(norm) {
        const int64_t q = shape.num_heads * shape.head_dim, kv = shape.num_kv_heads * shape.head_dim;
        auto of = [](const void *panels, const void *bias, int64_t columns, int64_t depth) {
            return Weight<T>{(const T *)panels, (const T *)bias, columns, depth};
        };
        for (int64_t i = 0; i < shape.num_layers; i++) {
            const LayerPointers &p = pointers[i];
            const int64_t inner = 2 * round_up(shape.intermediate, LANES);
            layers.push_back({(const T *)p.input_norm, (const T *)p.qk_norm, (const T *)p.post_norm,
                              of(p.qkv, p.qkv_bias, q + 2 * kv, shape.hidden),
                              of(p.o, p.o_bias, shape.hidden, q),
                              of(p.gate_up, p.gate_up_bias, inner, shape.hidden),
                              of(p.down, p.down_bias, shape.hidden, shape.intermediate)});
        }
        this->head = of(head, nullptr, shape.vocab, shape.hidden);
    }

    int64_t vocab_size() const { return shape.vocab; }
    Heads heads() const {
        return {shape.num_heads, shape.num_kv_heads, shape.head_dim,
                1.0f / __builtin_sqrtf(float(shape.head_dim))};
    }

    // kv: [layers][2][slots][kv_heads][head_dim], `layer_size` elements a layer, half of it K.
    void run(const Step &step, const Plan &plan, T *kv, int64_t layer_size) {
        const int64_t tokens = step.num_tokens, dim = shape.head_dim;
        const int64_t q = shape.num_heads * dim, qkv = q + 2 * shape.num_kv_heads * dim;
        const Heads heads = this->heads();
        wide = row_size<T>(shape.hidden), q_wide = row_size<T>(q), qkv_wide = row_size<T>(qkv);
        inner_wide = row_size<T>(shape.intermediate);
        x = rows(hidden_room, tokens, wide), normed = rows(normed_room, tokens, wide);
        T *heads_of = rows(qkv_room, tokens, qkv_wide), *mixed = rows(mixed_room, tokens, q_wide);
        inner = rows(inner_room, tokens, inner_wide);
        if (desks.size() < size_t(max_threads)) desks.resize(max_threads);
        for (int64_t i = 0; i < tokens; i++)
            memcpy(x + i * wide, embedding + step.input_ids[i] * shape.hidden, shape.hidden * sizeof(T));
        Attention<T> attention(plan, heads);
        for (size_t number = 0; number < layers.size(); number++) {
            const Layer &layer = layers[number];
            T *k_slots = kv + number * layer_size, *v_slots = k_slots + layer_size / 2;
            norm_rows(x, tokens, layer.input_norm);
            linear<T, T>(normed, wide, tokens, layer.qkv, nullptr, heads_of, qkv_wide);
            place_heads(step, layer, heads_of, k_slots, v_slots);
            attention.run(heads_of, qkv_wide, k_slots, v_slots, mixed, q_wide, desks, state_room);
            int64_t count = tokens;
            if (number + 1 == layers.size()) {  // from here on every token is on its own
                count = step.num_sampled;
                for (int64_t i = 0; i < count; i++) {
                    if (step.sampled[i] == i) continue;
                    memcpy(mixed + i * q_wide, mixed + step.sampled[i] * q_wide, q * sizeof(T));
                    memcpy(x + i * wide, x + step.sampled[i] * wide, shape.hidden * sizeof(T));
                }
            }
            linear<T, T>(mixed, q_wide, count, layer.o, x, x, wide);
            norm_rows(x, count, layer.post_norm);
            gated<T>(normed, wide, count, layer.gate_up, inner, inner_wide);
            linear<T, T>(inner, inner_wide, count, layer.down, x, x, wide);
        }
        norm_rows(x, step.num_sampled, norm);
        linear<T, float>(normed, wide, step.num_sampled, head, nullptr, step.logits, shape.vocab);
    }

  private:
    struct Layer {
        const T *input_norm, *qk_norm, *post_norm;
        Weight<T> qkv, o, gate_up, down;
    };
    DecoderShape shape;
    std::vector<Layer> layers;
    const T *embedding, *norm;
    Weight<T> head;
    Room hidden_room, normed_room, qkv_room, mixed_room, inner_room, state_room;
    std::vector<Desk<T>> desks;
    T *x = nullptr, *normed = nullptr, *inner = nullptr;
    int64_t wide = 0, q_wide = 0, qkv_wide = 0, inner_wide = 0;

    // What lies behind a row's last column is zero, and stays so: nobody writes there.
    T *rows(Room &room, int64_t count, int64_t width) { return room.template of<T>(count * width); }

    void norm_rows(const T *from, int64_t count, const T *weight) {
        const int crew = crew_for(16.0 * count * shape.hidden);
#pragma omp parallel for num_threads(crew) if (crew > 1)
        for (int64_t i = 0; i < count; i++)
            norm_row(from + i * wide, weight, shape.hidden, shape.eps, normed + i * wide);
    }

    // Norm and rotate q and k, and put k and v into the tokens' slots.
    void place_heads(const Step &step, const Layer &layer, T *heads_of, T *k_slots, T *v_slots) {
        const int64_t dim = shape.head_dim, turned = shape.num_heads + shape.num_kv_heads;
        const int64_t kv = shape.num_kv_heads * dim;
        const int crew = crew_for(16.0 * step.num_tokens * turned * dim);
#pragma omp parallel for num_threads(crew) if (crew > 1)
        for (int64_t i = 0; i < step.num_tokens; i++) {
            T *row = heads_of + i * qkv_wide;
            if (i + 1 < step.num_tokens) {
                const int64_t slot = step.slots[i + 1] * kv, line = 64 / sizeof(T);
                for (int64_t at = 0; at < kv; at += line) {
                    __builtin_prefetch(k_slots + slot + at, 1);
                    __builtin_prefetch(v_slots + slot + at, 1);
                }
            }
            const float *turns = step.rotations + step.positions[i] * dim;
            for (int64_t h = 0; h < turned; h++) {
                T *one = row + h * dim;
                if (layer.qk_norm) norm_row(one, layer.qk_norm + h * dim, dim, shape.eps, one);
                rotate(one, turns, dim);
            }
            const T *k = row + shape.num_heads * dim;
            memcpy(k_slots + step.slots[i] * kv, k, kv * sizeof(T));
            memcpy(v_slots + step.slots[i] * kv, k + kv, kv * sizeof(T));
        }
    }
};
