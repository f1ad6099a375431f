// The MLP of a mixture of experts: each token goes to the few experts that its router chooses, and all rows of
// an expert are multiplied together. A token's result depends on its own row alone, to the bit: its experts'
// outputs are added in the order of its own choice.
#pragma once

#include <cmath>

#include "layers.h"

// As Python passes them, see `Routing` of experts.py. The shared expert, which every token has, is the last.
template <class T> struct Experts {
    Weight<T> router;                  // hidden to num_experts, and the gate of the shared expert
    const Weight<T> *gate_up, *down;   // of each expert; gate and up interleaved as for `gated_linear`
    int64_t num_experts, top_k;        // without the shared one
    int64_t has_shared, has_shared_gate, renormalizes, has_sigmoid, is_gated;
    const float *choice_bias;          // [num_experts] is added to sigmoids where experts are chosen; or null
    float alpha, limit;                // swiglu_alpha and swiglu_limit of the clamped swiglu; limit 0: silu
    float sum_eps, scale;              // of weights
    const float *expert_scale;         // [num_experts] of weights, or null
    int64_t has_gelu;                  // in its tanh form, in place of silu
    int64_t num_slots() const { return top_k + has_shared; }  // experts of a token
    int64_t num_all() const { return num_experts + has_shared; }
    int64_t num_logits() const { return num_experts + (has_shared && has_shared_gate); }
    // What experts are chosen by.
    float key(int64_t expert, float logit) const {
        if (!has_sigmoid) return logit;
        return precise_sigmoid(logit) + (choice_bias ? choice_bias[expert] : 0.0f);
    }
    int64_t hidden() const { return router.depth; }
    bool is_quantized() const { return gate_up[0].is_quantized() || down[0].is_quantized(); }
    // Nanoseconds of one thread for so many tokens.
    double work(int64_t tokens) const {
        const double pairs = double(tokens) * num_slots(), used = pairs < num_all() ? pairs : num_all();
        double numbers = 0, bytes = 0;
        for (const Weight<T> *w : {&gate_up[num_all() - 1], &down[num_all() - 1]})  // the largest
            numbers += w->num_numbers(), bytes += w->num_bytes();
        return price(2 * pairs * numbers, used * bytes);
    }
};

// The rows of one expert, which follow each other.
struct ExpertRows {
    int64_t expert, first, count;
    int64_t inner;   // first element of `inner`
    int64_t blocks;  // first block of inner rows in 8 bits
};

// The products of one layer's experts. Owns its scratch; is used for one layer after the other.
// T: weights; A: activations where they are multiplied.
template <class T, class A> class ExpertMlp {
  public:
    // Called once before any thread runs; the largest of `tokens` and of the layers.
    void prepare(const Experts<T> &experts, int64_t tokens) {
        const int64_t rows = tokens * experts.num_slots(), hidden = experts.hidden();
        logits = logits_scratch.template get<A>(tokens * experts.num_logits());
        weights = weight_scratch.template get<float>(rows);
        ids = id_scratch.template get<int32_t>(rows), place = place_scratch.template get<int32_t>(rows);
        out_rows = out_scratch.template get<float>(rows * row_size<float>(hidden));
        const int64_t last = experts.num_all() - 1;
        const int64_t inner = experts.down[0].depth, shared = experts.has_shared ? experts.down[last].depth : 0;
        inner_rows = inner_scratch.template get<A>(tokens * (experts.top_k * row_size<A>(inner) + row_size<A>(shared)));
        x_rows = x_scratch.template get<A>(rows * row_size<A>(hidden));
        if (!experts.is_quantized()) return;
        const int64_t inner_blocks = tokens * (experts.top_k * num_blocks(inner) + num_blocks(shared));
        const int64_t blocks = -min(-rows * num_blocks(hidden), -inner_blocks);
        numbers = number_scratch.template get<int8_t>(blocks * BLOCK);
        row_blocks = block_scratch.template get<RowBlock>(blocks);
    }

    // out += scale * what the experts make of x [tokens][stride]. router_x: what they are chosen by, where it is not x.
    void run(const TeamThread &thread, const Experts<T> &experts, const A *x, int64_t stride, int64_t tokens,
             float *out, int64_t out_stride, float scale, const A *router_x = nullptr) {
        if (!tokens) return;
        const int64_t slots = experts.num_slots(), rows = tokens * slots, hidden = experts.hidden();
        linear<A>(thread, router_x ? router_x : x, stride, tokens, experts.router, nullptr, logits, experts.num_logits());
        thread.share(tokens, price(40.0 * tokens * experts.num_all(), 0), [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; token++)
                choose(experts, logits + token * experts.num_logits(), ids + token * slots, weights + token * slots);
        });
        thread.barrier();
        if (thread.index == 0) group(experts, tokens);
        thread.barrier();
        gather(thread, experts, x, stride, tokens);
        share_panels(thread, experts.gate_up, [&](const ExpertRows &some, int64_t first, int64_t last) {
            gate_up(experts, some, first, last);
        });
        quantize_inner(thread, experts, rows);
        share_panels(thread, experts.down, [&](const ExpertRows &some, int64_t first, int64_t last) {
            down(experts, some, first, last);
        });
        const int64_t out_size = row_size<float>(hidden);
        thread.share(tokens, price(2.0 * rows * hidden, 4.0 * rows * hidden), [&](int64_t first, int64_t last) {
            for (int64_t token = first; token < last; token++)
                for (int64_t column = 0; column < hidden; column += LANES) {
                    vec sum = {};
                    for (int64_t i = token * slots; i < (token + 1) * slots; i++)
                        sum += broadcast(weights[i]) * load(out_rows + place[i] * out_size + column);
                    float *to = out + token * out_stride;
                    store_tail(to, column, hidden, load_tail(to, column, hidden) + sum * broadcast(scale));
                }
        });
        thread.barrier();
    }

  private:
    static constexpr int64_t GRAIN = 4;       // panels of a part, see `dense_gemm`
    static constexpr int64_t FIXED_ROWS = 8;  // as many rows cost what reading a panel does

    Scratch logits_scratch, weight_scratch, id_scratch, place_scratch, x_scratch, inner_scratch, out_scratch;
    Scratch number_scratch, block_scratch;
    std::vector<ExpertRows> groups;  // of the experts that have rows
    std::vector<int64_t> counts;
    A *logits = nullptr;       // [tokens][num_logits]
    float *weights = nullptr;  // [tokens][num_slots]
    int32_t *ids = nullptr, *place = nullptr;  // [tokens][num_slots] expert, and its row below
    A *x_rows = nullptr, *inner_rows = nullptr;  // by expert: inputs, and what down multiplies
    float *out_rows = nullptr;
    int8_t *numbers = nullptr;  // x_rows or inner_rows in 8 bits
    RowBlock *row_blocks = nullptr;

    // The best of a token's experts, best first; of equal ones the first. Numbers that are not finite are seen in
    // the weights.
    static void choose(const Experts<T> &experts, const A *logits, int32_t *ids, float *weights) {
        int64_t found = 0;
        for (int64_t e = 0; e < experts.num_experts; e++) {
            const float key = experts.key(e, to_f32(logits[e]));
            int64_t at = found;
            while (at && (key > weights[at - 1] || (key != key && weights[at - 1] == weights[at - 1]))) at--;
            if (at == experts.top_k) continue;
            found = min(found + 1, experts.top_k);
            for (int64_t i = found - 1; i > at; i--) ids[i] = ids[i - 1], weights[i] = weights[i - 1];
            ids[at] = int32_t(e), weights[at] = key;
        }
        if (experts.has_sigmoid)
            weigh_sigmoids(experts, logits, ids, weights);
        else
            weigh_softmax(experts, logits, weights);
        for (int64_t i = 0; i < experts.top_k && experts.scale != 1; i++) weights[i] *= experts.scale;
        for (int64_t i = 0; i < experts.top_k && experts.expert_scale; i++) weights[i] *= experts.expert_scale[ids[i]];
        if (experts.has_shared) {
            ids[experts.top_k] = int32_t(experts.num_experts);
            weights[experts.top_k] =
                experts.has_shared_gate ? precise_sigmoid(to_f32(logits[experts.num_experts])) : 1.0f;
        }
    }

    static void weigh_sigmoids(const Experts<T> &experts, const A *logits, const int32_t *ids, float *weights) {
        float sum = 0;
        for (int64_t i = 0; i < experts.top_k; i++) sum += weights[i] = precise_sigmoid(to_f32(logits[ids[i]]));
        for (int64_t i = 0; i < experts.top_k && experts.renormalizes; i++) weights[i] /= sum + experts.sum_eps;
    }

    // weights: logits of the chosen experts, best first.
    static void weigh_softmax(const Experts<T> &experts, const A *logits, float *weights) {
        const float row_max = weights[0];
        float sum = 0;
        for (int64_t e = 0; e < experts.num_experts && !experts.renormalizes; e++)
            sum += std::exp(to_f32(logits[e]) - row_max);
        for (int64_t i = 0; i < experts.top_k; i++) {
            weights[i] = std::exp(weights[i] - row_max);
            if (experts.renormalizes) sum += weights[i];
        }
        for (int64_t i = 0; i < experts.top_k; i++) weights[i] /= sum;
    }

    // Places for the rows of all experts. One thread.
    void group(const Experts<T> &experts, int64_t tokens) {
        const int64_t slots = experts.num_slots();
        counts.assign(experts.num_all(), 0);
        for (int64_t i = 0; i < tokens * slots; i++) place[i] = int32_t(counts[ids[i]]++);
        groups.clear();
        int64_t first = 0, inner = 0, blocks = 0;
        for (int64_t e = 0; e < experts.num_all(); e++) {
            const int64_t count = counts[e], depth = experts.down[e].depth;
            counts[e] = first;
            if (!count) continue;
            groups.push_back({e, first, count, inner, blocks});
            first += count, inner += count * row_size<A>(depth), blocks += count * num_blocks(depth);
        }
        for (int64_t i = 0; i < tokens * slots; i++) place[i] += int32_t(counts[ids[i]]);
    }

    // The rows of x by expert.
    void gather(const TeamThread &thread, const Experts<T> &experts, const A *x, int64_t stride, int64_t tokens) {
        const int64_t slots = experts.num_slots(), rows = tokens * slots, hidden = experts.hidden();
        const int64_t size = row_size<A>(hidden), blocks = num_blocks(hidden);
        const bool quantizes = experts.gate_up[0].is_quantized();
        const double ns = price((quantizes ? 8.0 : 0.0) * rows * hidden, 2.0 * sizeof(A) * rows * hidden);
        thread.share(rows, ns, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                const A *from = x + i / slots * stride;
                if (quantizes)
                    quantize_row(from, hidden, quantized_form(experts.gate_up[ids[i]].form).limit,
                                 numbers + place[i] * blocks * BLOCK, row_blocks + place[i] * blocks);
                else
                    memcpy(x_rows + place[i] * size, from, hidden * sizeof(A));
            }
        });
        thread.barrier();
    }

    void quantize_inner(const TeamThread &thread, const Experts<T> &experts, int64_t rows) {
        if (!experts.down[0].is_quantized()) return;
        thread.share(rows, price(8.0 * rows * experts.down[0].depth, 0), [&](int64_t first, int64_t last) {
            for (const ExpertRows &some : groups) {
                const int64_t depth = experts.down[some.expert].depth, blocks = num_blocks(depth);
                const int64_t begin = first > some.first ? first - some.first : 0;
                for (int64_t i = begin; i < min(last - some.first, some.count); i++) {
                    const int64_t block = some.blocks + i * blocks;
                    quantize_row(inner_rows + some.inner + i * row_size<A>(depth), depth,
                                 quantized_form(experts.down[some.expert].form).limit, numbers + block * BLOCK,
                                 row_blocks + block);
                }
            }
        });
        thread.barrier();
    }

    // body(rows, first panel, last panel): all panels of all experts that have rows, in parts of equal price.
    template <class Body> void share_panels(const TeamThread &thread, const Weight<T> *experts, Body &&body) const {
        int64_t units = 0;
        double ns = 0;
        auto each = [&](const ExpertRows &some) { return (some.count + FIXED_ROWS) * experts[some.expert].depth; };
        auto grains = [&](const ExpertRows &some) { return (experts[some.expert].num_panels() + GRAIN - 1) / GRAIN; };
        for (const ExpertRows &some : groups) {
            const Weight<T> &w = experts[some.expert];
            units += each(some) * grains(some);
            ns += price(2 * some.count * w.num_numbers(), w.num_bytes());
        }
        thread.share(units, ns, [&](int64_t first, int64_t last) {
            int64_t start = 0;
            for (const ExpertRows &some : groups) {
                const int64_t size = each(some), count = grains(some), panels = experts[some.expert].num_panels();
                auto grain_from = [&](int64_t unit) {  // the first that begins there or later
                    return unit <= start ? 0 : min((unit - start + size - 1) / size, count);
                };
                const int64_t begin = grain_from(first), end = grain_from(last);
                if (begin < end) body(some, begin * GRAIN, min(end * GRAIN, panels));
                start += size * count;
            }
        });
        thread.barrier();
    }

    // Panels [first, last) of one expert's weight times its rows.
    template <class Epilogue>
    void multiply(const Weight<T> &w, const A *x, int64_t stride, int64_t block, int64_t count, int64_t first,
                  int64_t last, const OutputTile &tile, Epilogue &&epilogue) const {
        if (w.form == DENSE)
            return with_dense_level<A, T>(
                [&](auto level) { dense_panels<T>(level, x, stride, count, w, first, last, tile, epilogue); });
        if constexpr (std::is_same<T, float>::value)
            if (w.form == FLOAT16)
                return dense_panels<half>(VectorF32<float, half>(), x, stride, count, w, first, last, tile, epilogue);
        const QuantizedRows rows{numbers + block * BLOCK, row_blocks + block, num_blocks(w.depth), 8};
        quantized_panels<T>(rows, count, w, first, last, nullptr, epilogue);
    }

    void gate_up(const Experts<T> &experts, const ExpertRows &some, int64_t first, int64_t last) const {
        const Weight<T> &w = experts.gate_up[some.expert];
        const int64_t size = row_size<A>(w.depth), out_size = row_size<A>(experts.down[some.expert].depth);
        const int64_t panel = experts.is_gated ? LANES : PANEL;  // columns that one gives
        A *out = inner_rows + some.inner;
        if (last == w.num_panels())  // what a product reads after the last column is zero
            for (int64_t i = 0, end = last * panel; i < some.count && end < out_size; i++)
                memset((void *)(out + i * out_size + end), 0, (out_size - end) * sizeof(A));
        const OutputTile tile{(char *)out, out_size * int64_t(sizeof(A)), panel * int64_t(sizeof(A))};
        if (!experts.is_gated)
            return multiply(w, x_rows + some.first * size, size, some.first * num_blocks(w.depth), some.count, first, last,
                            tile, [&](int64_t row, int64_t column, vec low, vec high) {
                                A *to = out + row * out_size;
                                store_tail(to, column, out_size, activate<A>(RELU2, low));
                                store_tail(to, column + LANES, out_size, activate<A>(RELU2, high));
                            });
        multiply(w, x_rows + some.first * size, size, some.first * num_blocks(w.depth), some.count, first, last, tile,
                 [&](int64_t row, int64_t column, vec gate, vec up) {
                     if (w.bias) {
                         gate += load_tail(w.bias, column, w.columns);
                         up += load_tail(w.bias, column + LANES, w.columns);
                     }
                     const vec product = experts.limit      ? clamped_swiglu(experts, gate, up)
                                         : experts.has_gelu ? activate<A>(GELU_TANH, gate) * up
                                                            : swish(gate, 1) * up;
                     store_tail(out + row * out_size, column / 2, out_size, product);
                 });
    }

    void down(const Experts<T> &experts, const ExpertRows &some, int64_t first, int64_t last) const {
        const Weight<T> &w = experts.down[some.expert];
        const int64_t size = row_size<A>(w.depth), out_size = row_size<float>(w.columns);
        float *out = out_rows + some.first * out_size;
        const OutputTile tile{(char *)out, out_size * 4, PANEL * 4};
        multiply(w, inner_rows + some.inner, size, some.blocks, some.count, first, last, tile,
                 [&](int64_t row, int64_t column, vec low, vec high) {
                     if (w.bias) {
                         low += load_tail(w.bias, column, w.columns);
                         high += load_tail(w.bias, column + LANES, w.columns);
                     }
                     store_tail(out + row * out_size, column, out_size, low);
                     store_tail(out + row * out_size, column + LANES, out_size, high);
                 });
    }

    // x * sigmoid(alpha * x)
    static vec swish(vec x, float alpha) {
        vec exponent = x * broadcast(-1.44269504f * alpha);
        exponent = exponent < broadcast(126.0f) ? exponent : broadcast(126.0f);
        return divide<A>(x, broadcast(1.0f) + fast_exp2<A>(exponent));
    }
    static vec clamped_swiglu(const Experts<T> &experts, vec gate, vec up) {
        const vec limit = broadcast(experts.limit);
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up;
        up = up < -limit ? -limit : up;
        return (up + broadcast(1.0f)) * swish(gate, experts.alpha);
    }
};
