// All layers of a decoder in one call, from token ids to logits.
#pragma once

#include <algorithm>

#include "recurrent.h"
#include "experts.h"

// The type-independent interface of FusedDecoder.
struct AnyDecoder {
    virtual ~AnyDecoder() = default;
    virtual void run(const Step &step, const Plan &plan, const LayerKV *kv) = 0;  // kv: of each layer
};

// What a decoder multiplies with.
template <class T> struct DecoderWeights {
    std::vector<Layer<T>> layers;
    Weight<T> embedding;  // rows [vocab][hidden], or a packed weight of a form
    const float *norm;
    Weight<T> head;
    double num_numbers, num_bytes;  // of all products
    bool is_quantized;              // any of them

    DecoderWeights(const DecoderShape &shape, const Layer<T> *layers, const Weight<T> &embedding,
                   const float *norm, const Weight<T> &head)
        : layers(layers, layers + shape.num_layers), embedding(embedding), norm(norm), head(head),
          num_numbers(head.num_numbers()), num_bytes(head.num_bytes()), is_quantized(head.is_quantized()) {
        for (const Layer<T> &layer : this->layers)
            for (const Weight<T> *w : {&layer.qkv, &layer.o, &layer.beside, &layer.mlp.gate_up, &layer.mlp.down})
                if (w->panels)
                    num_numbers += w->num_numbers(), num_bytes += w->num_bytes(), is_quantized |= w->is_quantized();
        for (const Layer<T> &layer : this->layers)
            if (layer.mlp.experts) is_quantized |= layer.mlp.experts->is_quantized();
    }
};

// Owns the activations; borrows weights and K/V pool. Runs one step at a time.
// T: weights and queries; A: activations where they are multiplied.
template <class T, class A> class FusedDecoder : public AnyDecoder, private DecoderWeights<T> {
  public:
    FusedDecoder(const DecoderShape &shape, const DecoderWeights<T> &weights) : DecoderWeights<T>(weights), shape(shape) {}

    void run(const Step &step, const Plan &plan, const LayerKV *kv) override {
        const int64_t tokens = step.num_tokens, dim = shape.head_dim;
        int64_t q = shape.num_heads * dim, qkv = q + 2 * shape.num_kv_heads * dim;
        double mixing = 0;
        for (const Layer<T> &layer : layers) {
            if (layer.has_gate) qkv = std::max(qkv, 2 * (shape.num_heads + shape.num_kv_heads) * dim);
            if (layer.short_conv)
                q = std::max(q, layer.short_conv->channels), qkv = std::max(qkv, 3 * layer.short_conv->channels);
            if (!layer.recurrence) continue;
            const Recurrence &net = *layer.recurrence;
            q = std::max(q, net.values() + (layer.attends() ? beside_at() : 0));
            qkv = std::max(qkv, net.first + net.columns()), mixing += price(net.flops() * tokens, 0);
        }
        const Heads heads{shape.num_heads, shape.num_kv_heads, dim, shape.attention_scale};
        Attention<T, A> attention(plan, heads);
        attention.prepare(scratches, state_scratch);
        residual_stride = row_size<float>(shape.hidden), hidden_stride = row_size<A>(shape.hidden);
        qkv_stride = row_size<float>(qkv), q_stride = row_size<A>(q), inner_stride = row_size<A>(shape.intermediate);
        residual = residual_scratch.get<float>(tokens * residual_stride);
        if (layers[0].post_attention_norm || layers[0].post_mlp_norm)  // each layer is as the first
            projected = projected_scratch.get<float>(tokens * residual_stride);
        input = input_scratch.get<A>(tokens * hidden_stride);
        qkv_rows = qkv_scratch.get<float>(tokens * qkv_stride), attended = attended_scratch.get<A>(tokens * q_stride);
        inner = inner_scratch.get<A>(tokens * inner_stride);
        double ns = price(2 * tokens * this->num_numbers, this->num_bytes) + attention.work() * layers.size() + mixing;
        for (const Layer<T> &layer : layers)
            if (layer.mlp.experts) expert_mlp.prepare(*layer.mlp.experts, tokens), ns += layer.mlp.experts->work(tokens);
        this_team().run(num_threads_for(ns), [&](const TeamThread &thread) {
            run_layers(thread, step, attention, kv);
        });
    }

  private:
    const DecoderShape shape;
    using Weights = DecoderWeights<T>;
    using Weights::layers, Weights::embedding, Weights::norm, Weights::head;
    // Rows of activations. The padding after a row's last column is zero and is never written.
    Scratch residual_scratch, projected_scratch, input_scratch, qkv_scratch, attended_scratch, inner_scratch;
    Scratch state_scratch;
    std::vector<ThreadScratch> scratches;
    ExpertMlp<T, A> expert_mlp;
    float *residual = nullptr, *qkv_rows = nullptr;
    float *projected = nullptr;  // by o or down, where a norm follows
    A *input = nullptr;          // of the next product
    A *attended = nullptr, *inner = nullptr;
    int64_t residual_stride = 0, hidden_stride = 0, qkv_stride = 0, q_stride = 0, inner_stride = 0;

    void embed(int64_t id, float *to) const {
        if (embedding.form == DENSE) {
            convert(embedding.panels + id * shape.hidden, shape.hidden, to);
        } else if (embedding.form == FLOAT16) {
            const half *panel = embedding.template slice<half>(0, embedding.num_panels())[id / PANEL];
            for (int64_t k = 0; k < shape.hidden; k++) to[k] = to_f32(panel[panel_offset<half>(k, int(id % PANEL))]);
        } else {
            const QuantizedForm &form = quantized_form(embedding.form);
            const int64_t panel_bytes = num_blocks(shape.hidden) * form.block_bytes;
            form.widen_column((const uint8_t *)embedding.panels + id / PANEL * panel_bytes, int(id % PANEL),
                              shape.hidden, to);
        }
        if (shape.embedding_scale != 1)
            for (int64_t k = 0; k < shape.hidden; k++) to[k] *= shape.embedding_scale;
    }

    __attribute__((noinline)) void run_layers(const TeamThread &thread, const Step &step, Attention<T, A> &attention,
                                              const LayerKV *kv) {
        const int64_t tokens = step.num_tokens;
        thread.share(tokens, price(0, 2.0 * tokens * shape.hidden * sizeof(float)), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) embed(step.input_ids[i], residual + i * residual_stride);
        });
        thread.barrier();
        make_input(thread, tokens, nullptr, layers[0].pre_attention_norm);
        const LayerStates *states = step.states ? step.states->layers : nullptr;
        for (size_t number = 0; number < layers.size(); number++) {
            const Layer<T> &layer = layers[number];
            const bool is_last = number + 1 == layers.size();
            if (layer.mixes()) linear<float>(thread, input, hidden_stride, tokens, layer.qkv, nullptr, qkv_rows, qkv_stride);
            if (layer.attends()) attend(thread, step, layer, attention, *kv++);
            if (layer.recurrence)
                run_recurrence(thread, *layer.recurrence, *step.states, *states++, tokens, shape.eps, qkv_rows, qkv_stride,
                               attended + (layer.attends() ? beside_at() : 0), q_stride);
            else if (layer.short_conv)
                run_short_conv(thread, *layer.short_conv, *step.states, *states++, tokens, qkv_rows, qkv_stride, attended,
                               q_stride);
            if (is_last) {  // after the last attention only sampled tokens matter
                if (thread.index == 0) keep_sampled(step, !layer.mixes());
                thread.barrier();
            }
            const int64_t count = is_last ? step.num_sampled : tokens;
            if (layer.mixes()) {
                add_mixed(thread, count, layer);
                if (layer.has_mlp() && !shape.has_parallel_residual)
                    make_input(thread, count, layer.post_attention_norm, layer.pre_mlp_norm);
            }
            if (layer.has_mlp()) add_mlp(thread, count, layer);
            make_input(thread, count, layer.has_mlp() ? layer.post_mlp_norm : layer.post_attention_norm,
                       is_last ? norm : layers[number + 1].pre_attention_norm);
        }
        linear<float>(thread, input, hidden_stride, step.num_sampled, head, nullptr, step.logits, shape.vocab,
                      shape.logit_scale);
        if (shape.logit_soft_cap) cap_logits(thread, step.logits, step.num_sampled * shape.vocab);
    }

    // Where a row of `attended` has what a recurrence beside attention gives.
    int64_t beside_at() const { return row_size<A>(shape.num_heads * shape.head_dim); }

    // Attention over the rows of q, k and v, times the sigmoid of its gate.
    void attend(const TeamThread &thread, const Step &step, const Layer<T> &layer, Attention<T, A> &attention,
                const LayerKV &kv) {
        const bool in_window_pages = kv.has_window_pages;
        rope_and_store(thread, step, layer, kv, in_window_pages ? step.window_slots : step.slots);
        attention.run(thread, (const T *)qkv_rows, qkv_stride * sizeof(float) / sizeof(T), kv, attended, q_stride,
                      layer.features, in_window_pages ? step.window_page_ids : nullptr);
        if (!layer.has_gate && !step.states) return;
        const int64_t size = shape.num_heads * shape.head_dim, start = size + 2 * shape.num_kv_heads * shape.head_dim;
        thread.share(step.num_tokens, price(24.0 * step.num_tokens * size, 0), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                A *to = attended + i * q_stride;
                for (int64_t k = 0; k < size && layer.has_gate; k += LANES) {
                    const vec gate = load_tail(qkv_rows + i * qkv_stride + start, k, size);
                    store_tail(to, k, size, load_tail(to, k, size) * sigmoid(gate));
                }
                zero_padding(to, size);  // a layer without attention has more columns
            }
        });
        thread.barrier();
    }

    // Moves the sampled tokens' rows to the front.
    void keep_sampled(const Step &step, bool is_mlp_alone) {
        for (int64_t i = 0; i < step.num_sampled; i++) {
            const int64_t from = step.sampled[i];
            if (from == i) continue;
            memcpy(attended + i * q_stride, attended + from * q_stride, q_stride * sizeof(A));
            memcpy(residual + i * residual_stride, residual + from * residual_stride, shape.hidden * sizeof(float));
            if (shape.has_parallel_residual || is_mlp_alone)
                memcpy(input + i * hidden_stride, input + from * hidden_stride, shape.hidden * sizeof(A));
        }
    }

    // Adds scale x W^T to the residual; where it is normed before, `make_input` does so, without the scale.
    void add_product(const TeamThread &thread, const A *x, int64_t stride, int64_t count, const Weight<T> &w,
                     const float *post_norm, float scale) {
        if (post_norm)
            linear<float>(thread, x, stride, count, w, nullptr, projected, residual_stride);
        else
            linear<float>(thread, x, stride, count, w, residual, residual, residual_stride, scale * shape.residual_scale);
    }

    void add_mixed(const TeamThread &thread, int64_t count, const Layer<T> &layer) {
        const float scale = layer.attends() ? shape.attention_out_scale : layer.recurrence ? layer.recurrence->out_scale : 1;
        add_product(thread, attended, q_stride, count, layer.o, layer.post_attention_norm, scale);
        if (layer.beside.columns)
            add_product(thread, attended + beside_at(), q_stride, count, layer.beside, nullptr, layer.recurrence->out_scale);
    }

    void add_mlp(const TeamThread &thread, int64_t count, const Layer<T> &layer) {
        if (layer.mlp.experts)
            return expert_mlp.run(thread, *layer.mlp.experts, input, hidden_stride, count, residual, residual_stride,
                                  shape.residual_scale);
        if (shape.has_gated_mlp)
            gated_linear(thread, input, hidden_stride, count, layer.mlp.gate_up, Activation(shape.activation),
                         shape.gate_scale, inner, inner_stride);
        else
            activated_linear(thread, input, hidden_stride, count, layer.mlp.gate_up, Activation(shape.activation), inner,
                             inner_stride);
        add_product(thread, inner, inner_stride, count, layer.mlp.down, layer.post_mlp_norm, shape.mlp_out_scale);
    }

    // Adds the norm of `projected` to the residual, if there is a post_norm, and makes the next product's input.
    void make_input(const TeamThread &thread, int64_t count, const float *post_norm, const float *next_norm) {
        const NormType type = NormType(shape.norm_type);
        const double ns = price((post_norm ? 34.0 : 16.0) * count * shape.hidden, 0);
        thread.share(count, ns, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                float *row = residual + i * residual_stride;
                if (post_norm) {
                    float *with = projected + i * residual_stride;
                    norm_row(type, with, post_norm, shape.hidden, shape.eps, with);
                    for (int64_t k = 0; k < shape.hidden; k++) row[k] += with[k] * shape.residual_scale;
                }
                A *to = input + i * hidden_stride;
                if (next_norm)
                    norm_row(type, row, next_norm, shape.hidden, shape.eps, to);
                else
                    for (int64_t k = 0; k < shape.hidden; k += LANES)
                        store_tail(to, k, shape.hidden, load_tail(row, k, shape.hidden));
            }
        });
        thread.barrier();
    }

    void cap_logits(const TeamThread &thread, float *logits, int64_t count) {
        const vec cap = broadcast(shape.logit_soft_cap), inverse = broadcast(1 / shape.logit_soft_cap);
        thread.share(count, price(40.0 * count, 0), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i += LANES)
                store_tail(logits, i, last, cap * tanh(load_tail(logits, i, last) * inverse));
        });
        thread.barrier();
    }

    // Normalises and rotates q and k, rounds q in its place, and rounds k and v to the tokens' slots.
    void rope_and_store(const TeamThread &thread, const Step &step, const Layer<T> &layer, const LayerKV &memory,
                        const int64_t *slots) {
        const KvType type = KvType(memory.type);
        char *k_slots = (char *)memory.k, *v_slots = (char *)memory.v;
        const int64_t dim = shape.head_dim, num_rotated = shape.num_heads + shape.num_kv_heads;
        const int64_t kv = shape.num_kv_heads * dim, size = shape.num_kv_heads * stored_bytes<T>(type, dim);
        const float *rotations = layer.rotary < 0 ? nullptr : step.rotations[layer.rotary];
        const double ns = price(16.0 * step.num_tokens * num_rotated * dim, 0);
        thread.share(step.num_tokens, ns, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                float *row = qkv_rows + i * qkv_stride, *k = row + shape.num_heads * dim;
                if (i + 1 < last) {
                    const int64_t slot = slots[i + 1] * size;
                    for (int64_t at = 0; at < size; at += 64) {
                        __builtin_prefetch(k_slots + slot + at, 1);
                        __builtin_prefetch(v_slots + slot + at, 1);
                    }
                }
                if (layer.qk_norm && shape.has_whole_qk_norm) {
                    norm_qk(row, layer.qk_norm, k - row);
                    norm_qk(k, layer.qk_norm + (k - row), kv);
                }
                for (int64_t h = 0; h < num_rotated; h++) {
                    float *head = row + h * dim;
                    if (layer.qk_norm && !shape.has_whole_qk_norm) norm_qk(head, layer.qk_norm + h * dim, dim);
                    if (rotations) rotate(head, rotations + step.positions[i] * dim, dim);
                }
                store_heads<T>(type, k, shape.num_kv_heads, dim, k_slots + slots[i] * size);
                store_heads<T>(type, k + kv, shape.num_kv_heads, dim, v_slots + slots[i] * size);
                if (sizeof(T) != sizeof(float)) round_to(row, shape.num_heads * dim, (T *)row);
            }
        });
        thread.barrier();
    }
    void norm_qk(float *x, const float *weight, int64_t size) const {
        norm_row(NormType(shape.norm_type), x, weight, size, shape.eps, x);
    }
};
