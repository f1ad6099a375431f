// Layers with a state, in place of attention or beside it: gated delta nets, Mamba-2's state spaces and gated short
// convolutions. The first two have a short convolution and a recurrence over tokens.
//
// Of each value head a matrix S [k_dim][v_dim] in float32 is the state. A token with k, q and v, a decay d and a rate b
// makes of it
//
//     S' = d S + k (b (v - d k^T S))^T,   out = q^T S'               in a delta net, where k and q are normed
//     S' = d S + k (b v)^T,               out = q^T S' + skip v      in a state space, whose B, C and x are k, q and v
//
// The first is computed as d q^T S + (q k) (b (v - d k^T S)), so that S is read once before it is written. Every sum runs
// over the rows of S in one order, and tokens come one after the other: the bits do not depend on how a prompt is divided.
#pragma once

#include "layers.h"

enum RecurrenceKind { DELTA_NET, STATE_SPACE };

// The weights of a layer, as Python passes them; see cpu_recurrent.py. The layer's fused product gives each token, from
// column `first` on, q | k [k_heads * k_dim] | v | z [v_heads * v_dim] | b | a [v_heads]; that of a state space no a.
struct Recurrence {
    int64_t kind, k_heads, v_heads, k_dim, v_dim, kernel, first;
    int64_t norm_size;        // values that are normed together; 0: none are
    int64_t gates_first;      // z multiplies values before they are normed
    const float *conv;        // [kernel][2 k_heads k_dim + v_heads v_dim]
    const float *conv_bias;   // [2 k_heads k_dim + v_heads v_dim] or null
    const float *decay;       // [v_heads] -exp(A_log)
    const float *dt_bias;     // [v_heads]
    const float *skip;        // [v_heads] or null
    const float *norm;        // [v_heads * v_dim] or null
    float least_step, most_step, step_scale, z_scale;  // of a state space
    float out_scale;          // of what the layer adds to the residual
    int64_t keys() const { return k_heads * k_dim; }
    int64_t values() const { return v_heads * v_dim; }
    int64_t channels() const { return 2 * keys() + values(); }
    int64_t columns() const { return channels() + values() + 2 * v_heads; }  // with room for both of b and a
    double flops() const { return 8.0 * values() * k_dim + 40.0 * columns(); }  // of a token
};

// The states of a layer, of all ids: [states][kernel - 1][channels] inputs of the convolution, the oldest first, and
// [states][v_heads][k_dim][v_dim].
struct LayerStates {
    float *inputs, *matrices;
};

// Tokens [start, end) of a step; after them the state goes into `kept_in` too, if that is not negative.
struct StatePiece {
    int64_t start, end, kept_in;
};

// Pieces [first, last) of one row: it begins with the state `from`, with zeros if that is negative, and leaves `to`.
struct StateRow {
    int64_t from, to, first, last;
};

struct StepStates {
    const LayerStates *layers;  // in the order of the layers that have states
    const StateRow *rows;
    const StatePiece *pieces;
    int64_t num_rows;
};

constexpr int64_t CHANNEL_VECS = 4;  // of a convolution, computed together
constexpr int64_t CHANNEL_GRAIN = CHANNEL_VECS * LANES;
constexpr int64_t MAX_KERNEL = 8;

// The convolution of one row over CHANNEL_GRAIN channels from `first` on, in place, then silu.
inline void convolve(const Recurrence &net, const StepStates &states, const StateRow &row, float *inputs, float *rows,
                     int64_t stride, int64_t first) {
    const int64_t channels = net.channels(), before = net.kernel - 1, size = before * channels;
    vec window[MAX_KERNEL][CHANNEL_VECS], weights[MAX_KERNEL][CHANNEL_VECS], bias[CHANNEL_VECS];
    for (int64_t v = 0; v < CHANNEL_VECS; v++) {
        const int64_t c = first + v * LANES;
        bias[v] = net.conv_bias ? load_tail(net.conv_bias, c, channels) : vec{};
        for (int64_t t = 0; t < before; t++)
            window[t][v] = row.from < 0 ? vec{} : load_tail(inputs + row.from * size + t * channels, c, channels);
        for (int64_t t = 0; t < net.kernel; t++) weights[t][v] = load_tail(net.conv + t * channels, c, channels);
    }
    auto keep = [&](int64_t id) {
        for (int64_t t = 0; t < before; t++)
            for (int64_t v = 0; v < CHANNEL_VECS; v++)
                store_tail(inputs + id * size + t * channels, first + v * LANES, channels, window[t][v]);
    };
    for (int64_t number = row.first; number < row.last; number++) {
        const StatePiece &piece = states.pieces[number];
        for (int64_t i = piece.start; i < piece.end; i++)
            for (int64_t v = 0; v < CHANNEL_VECS; v++) {
                float *to = rows + i * stride;
                const vec x = load_tail(to, first + v * LANES, channels);
                vec sum = fmadd(bias[v], x, weights[before][v]);
                for (int64_t t = 0; t < before; t++) sum = fmadd(sum, window[t][v], weights[t][v]);
                for (int64_t t = 0; t + 1 < before; t++) window[t][v] = window[t + 1][v];
                if (before) window[before - 1][v] = x;
                store_tail(to, first + v * LANES, channels, activate<float>(SILU, sum));
            }
        if (piece.kept_in >= 0) keep(piece.kept_in);
    }
    keep(row.to);
}

// Products read rows up to a multiple of DEPTH columns.
template <class A> inline void zero_padding(A *row, int64_t columns) {
    for (int64_t i = columns; i < round_up(columns, DEPTH); i++) store1(row + i, 0);
}

// A gated short convolution, as Python passes it. Its fused product gives each token b | c | x [channels].
struct ShortConv {
    int64_t channels, kernel;
    const float *weights;  // [kernel][channels]
};

// out = c * convolution of b * x, of one row over a vector of channels. The state is the products before.
template <class A>
void short_convolve(const ShortConv &conv, const StepStates &states, const StateRow &row, float *inputs, const float *rows,
                    int64_t stride, int64_t c, A *out, int64_t out_stride) {
    const int64_t channels = conv.channels, before = conv.kernel - 1, size = before * channels;
    vec window[MAX_KERNEL], weights[MAX_KERNEL];
    for (int64_t t = 0; t < before; t++)
        window[t] = row.from < 0 ? vec{} : load_tail(inputs + row.from * size + t * channels, c, channels);
    for (int64_t t = 0; t < conv.kernel; t++) weights[t] = load_tail(conv.weights + t * channels, c, channels);
    auto keep = [&](int64_t id) {
        for (int64_t t = 0; t < before; t++) store_tail(inputs + id * size + t * channels, c, channels, window[t]);
    };
    for (int64_t number = row.first; number < row.last; number++) {
        const StatePiece &piece = states.pieces[number];
        for (int64_t i = piece.start; i < piece.end; i++) {
            const float *b = rows + i * stride;
            const vec x = load_tail(b, c, channels) * load_tail(b + 2 * channels, c, channels);
            vec sum = x * weights[before];
            for (int64_t t = 0; t < before; t++) sum = fmadd(sum, window[t], weights[t]);
            for (int64_t t = 0; t + 1 < before; t++) window[t] = window[t + 1];
            if (before) window[before - 1] = x;
            store_tail(out + i * out_stride, c, channels, load_tail(b + channels, c, channels) * sum);
        }
        if (piece.kept_in >= 0) keep(piece.kept_in);
    }
    keep(row.to);
}

inline float softplus(float x) { return x > 20 ? x : __builtin_log1pf(__builtin_expf(x)); }

// Of a state space: makes rates of b, and decays in the place of a.
inline void prepare_steps(const Recurrence &net, float *row) {
    float *b = row + net.channels() + net.values(), *a = b + net.v_heads;
    for (int64_t h = 0; h < net.v_heads; h++) {
        float step = softplus(b[h] * net.step_scale + net.dt_bias[h]);
        step = step < net.least_step ? net.least_step : step;  // in this order NaN stays NaN
        step = step > net.most_step ? net.most_step : step;
        b[h] = step, a[h] = __builtin_expf(net.decay[h] * step);
    }
}

// Of a delta net: norms q and k of each head, q over sqrt(k_dim) too, and makes rates of b and decays of a. In place.
inline void prepare_token(const Recurrence &net, float *row) {
    if (net.kind == STATE_SPACE) return prepare_steps(net, row);
    const float scale = 1.0f / __builtin_sqrtf(float(net.k_dim));
    for (int64_t h = 0; h < 2 * net.k_heads; h++) {
        float *x = row + h * net.k_dim, rest = 0;
        vec squares = {};
        int64_t i = 0;
        for (; i + LANES <= net.k_dim; i += LANES) squares += load(x + i) * load(x + i);
        for (; i < net.k_dim; i++) rest += x[i] * x[i];
        float factor = 1.0f / __builtin_sqrtf(reduce_add(squares) + rest + 1e-6f);
        if (h < net.k_heads) factor *= scale;
        for (i = 0; i < net.k_dim; i++) x[i] *= factor;
    }
    float *b = row + net.channels() + net.values(), *a = b + net.v_heads;
    for (int64_t h = 0; h < net.v_heads; h++) {
        a[h] = __builtin_expf(net.decay[h] * softplus(a[h] + net.dt_bias[h]));
        b[h] = precise_sigmoid(b[h]);
    }
}

// The recurrence of one row and head over WIDTH vectors of columns from `column` on; `out` replaces v. `load_at` and
// `store_at` (pointer, vector) stop at the last column.
template <RecurrenceKind KIND, int WIDTH, class Load, class Store>
void recur(const Recurrence &net, const StepStates &states, const StateRow &row, float *matrices, float *rows,
           int64_t stride, int64_t head, int64_t column, Load &&load_at, Store &&store_at) {
    const int64_t k_dim = net.k_dim, v_dim = net.v_dim, matrix = k_dim * v_dim, size = net.v_heads * matrix;
    const int64_t q_at = head / (net.v_heads / net.k_heads) * k_dim, k_at = net.keys() + q_at;
    const int64_t v_at = 2 * net.keys() + head * v_dim + column;
    const int64_t b_at = net.channels() + net.values() + head, a_at = b_at + net.v_heads;
    auto state = [&](int64_t id) { return matrices + id * size + head * matrix + column; };
    float *s = state(row.to);
    auto copy = [&](const float *from, float *to) {
        for (int64_t i = 0; i < k_dim; i++)
            for (int w = 0; w < WIDTH; w++)
                store_at(to + i * v_dim, w, from ? load_at(from + i * v_dim, w) : vec{});
    };
    if (row.from != row.to) copy(row.from < 0 ? nullptr : state(row.from), s);
    for (int64_t number = row.first; number < row.last; number++) {
        const StatePiece &piece = states.pieces[number];
        for (int64_t token = piece.start; token < piece.end; token++) {
            float *values = rows + token * stride;
            const float *q = values + q_at, *k = values + k_at;
            const vec decay = broadcast(values[a_at]), rate = broadcast(values[b_at]);
            vec by_k[WIDTH] = {}, by_q[WIDTH] = {}, products = {}, delta[WIDTH];
            if (KIND == STATE_SPACE) {
                for (int w = 0; w < WIDTH; w++) delta[w] = load_at(values + v_at, w) * rate;
                for (int64_t i = 0; i < k_dim; i++) {
                    const vec k_i = broadcast(k[i]), q_i = broadcast(q[i]);
                    for (int w = 0; w < WIDTH; w++) {
                        const vec x = fmadd(decay * load_at(s + i * v_dim, w), k_i, delta[w]);
                        store_at(s + i * v_dim, w, x);
                        by_q[w] = fmadd(by_q[w], x, q_i);
                    }
                }
                const vec skip = broadcast(net.skip[head]);
                for (int w = 0; w < WIDTH; w++)
                    store_at(values + v_at, w, fmadd(by_q[w], skip, load_at(values + v_at, w)));
                continue;
            }
            float rest = 0;
            int64_t i = 0;
            for (; i + LANES <= k_dim; i += LANES) products += load(q + i) * load(k + i);
            for (; i < k_dim; i++) rest += q[i] * k[i];
            for (i = 0; i < k_dim; i++) {
                const vec k_i = broadcast(k[i]), q_i = broadcast(q[i]);
                for (int w = 0; w < WIDTH; w++) {
                    const vec x = load_at(s + i * v_dim, w);
                    by_k[w] = fmadd(by_k[w], x, k_i), by_q[w] = fmadd(by_q[w], x, q_i);
                }
            }
            const vec dot = broadcast(reduce_add(products) + rest);
            for (int w = 0; w < WIDTH; w++) {
                delta[w] = (load_at(values + v_at, w) - decay * by_k[w]) * rate;
                store_at(values + v_at, w, decay * by_q[w] + dot * delta[w]);
            }
            for (i = 0; i < k_dim; i++) {
                const vec k_i = broadcast(k[i]);
                for (int w = 0; w < WIDTH; w++)
                    store_at(s + i * v_dim, w, fmadd(decay * load_at(s + i * v_dim, w), k_i, delta[w]));
            }
        }
        if (piece.kept_in >= 0) copy(s, state(piece.kept_in));
    }
}

// out = what the recurrence gave, normed in groups and times silu(z), in the order of the layer. Changes the row.
template <class A> void gate_token(const Recurrence &net, float eps, float *row, A *out) {
    float *values = row + 2 * net.keys();
    const float *z = row + net.channels();
    const int64_t size = net.values(), group = net.norm_size ? net.norm_size : size;
    const vec z_scale = broadcast(net.z_scale);
    auto gate = [&](auto *to) {
        for (int64_t i = 0; i < size; i += LANES)
            store_tail(to, i, size, load_tail(values, i, size) * activate<float>(SILU, load_tail(z, i, size) * z_scale));
    };
    auto norm = [&](auto *to) {
        for (int64_t i = 0; i < size; i += group) norm_row(RMS_NORM, values + i, net.norm + i, group, eps, to + i);
    };
    if (!net.norm_size)
        gate(out);
    else if (net.gates_first)
        gate(values), norm(out);
    else
        norm(values), gate(out);
    zero_padding(out, size);
}

template <class A>
void run_short_conv(const TeamThread &thread, const ShortConv &conv, const StepStates &states, const LayerStates &layer,
                    int64_t tokens, const float *rows, int64_t stride, A *out, int64_t out_stride) {
    const int64_t blocks = (conv.channels + LANES - 1) / LANES;
    thread.share(states.num_rows * blocks, price(16.0 * tokens * conv.channels, 0), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++)
            short_convolve(conv, states, states.rows[i / blocks], layer.inputs, rows, stride, i % blocks * LANES, out,
                           out_stride);
    }, 4);
    thread.barrier();
    thread.share(tokens, 0, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) zero_padding(out + i * out_stride, conv.channels);
    });
    thread.barrier();
}

// The recurrence of all rows and heads.
template <RecurrenceKind KIND>
void run_heads(const TeamThread &thread, const Recurrence &net, const StepStates &states, const LayerStates &layer,
               int64_t tokens, float *rows, int64_t stride) {
    constexpr int WIDTH = 4;
    const int64_t strips = (net.v_dim + WIDTH * LANES - 1) / (WIDTH * LANES), each = net.v_heads * strips;
    const double bytes = 8.0 * states.num_rows * net.values() * net.k_dim;
    thread.share(states.num_rows * each, price(8.0 * tokens * net.values() * net.k_dim, bytes), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const StateRow &row = states.rows[i / each];
            const int64_t head = i % each / strips, column = i % strips * WIDTH * LANES, left = net.v_dim - column;
            if (left >= WIDTH * LANES)
                recur<KIND, WIDTH>(net, states, row, layer.matrices, rows, stride, head, column,
                                   [](const float *x, int w) { return load(x + w * LANES); },
                                   [](float *x, int w, vec y) { store(x + w * LANES, y); });
            else
                recur<KIND, WIDTH>(net, states, row, layer.matrices, rows, stride, head, column,
                                   [=](const float *x, int w) { return load_tail(x, w * LANES, left); },
                                   [=](float *x, int w, vec y) { store_tail(x, w * LANES, left, y); });
        }
    });
    thread.barrier();
}

// What the layer's output product multiplies, [tokens][v_heads * v_dim] in `out`, of what its fused product gave.
template <class A>
void run_recurrence(const TeamThread &thread, const Recurrence &net, const StepStates &states, const LayerStates &layer,
                    int64_t tokens, float eps, float *rows, int64_t stride, A *out, int64_t out_stride) {
    rows += net.first;
    const int64_t blocks = (net.channels() + CHANNEL_GRAIN - 1) / CHANNEL_GRAIN;
    thread.share(states.num_rows * blocks, price(20.0 * tokens * net.channels(), 0), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            convolve(net, states, states.rows[i / blocks], layer.inputs, rows, stride, i % blocks * CHANNEL_GRAIN);
        }
    });
    thread.barrier();
    thread.share(tokens, price(10.0 * tokens * net.keys(), 0), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) prepare_token(net, rows + i * stride);
    });
    thread.barrier();
    if (net.kind == DELTA_NET)
        run_heads<DELTA_NET>(thread, net, states, layer, tokens, rows, stride);
    else
        run_heads<STATE_SPACE>(thread, net, states, layer, tokens, rows, stride);
    thread.share(tokens, price(40.0 * tokens * net.values(), 0), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) gate_token(net, eps, rows + i * stride, out + i * out_stride);
    });
    thread.barrier();
}
