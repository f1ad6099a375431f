// All layers of a Llama-like decoder in one call, from token ids to logits.
#pragma once

#include "layers.h"

// The type-independent interface of FusedDecoder.
struct AnyDecoder {
    virtual ~AnyDecoder() = default;
    // kv: [layers][2][slots][kv_heads][head_dim], `layer_size` elements a layer, half of it K.
    virtual void run(const Step &step, const Plan &plan, void *kv, int64_t layer_size) = 0;
};

// Owns the activations; borrows weights and K/V pool. Runs one step at a time.
template <class T> class FusedDecoder : public AnyDecoder {
  public:
    FusedDecoder(const DecoderShape &shape, const Layer<T> *layers, const T *embedding, const T *norm,
                 const Weight<T> &head)
        : shape(shape), layers(layers, layers + shape.num_layers), embedding(embedding), norm(norm), head(head) {}

    void run(const Step &step, const Plan &plan, void *kv, int64_t layer_size) override {
        const int64_t tokens = step.num_tokens, dim = shape.head_dim;
        const int64_t q = shape.num_heads * dim, qkv = q + 2 * shape.num_kv_heads * dim;
        const Heads heads{shape.num_heads, shape.num_kv_heads, dim, 1.0f / __builtin_sqrtf(float(dim))};
        hidden_stride = row_size<T>(shape.hidden), qkv_stride = row_size<T>(qkv);
        const int64_t q_stride = row_size<T>(q), inner_stride = row_size<T>(shape.intermediate);
        x = x_scratch.get<T>(tokens * hidden_stride), normed = normed_scratch.get<T>(tokens * hidden_stride);
        T *qkv_rows = qkv_scratch.get<T>(tokens * qkv_stride), *attended = attended_scratch.get<T>(tokens * q_stride);
        T *inner = inner_scratch.get<T>(tokens * inner_stride);
        for (int64_t i = 0; i < tokens; i++)
            memcpy(x + i * hidden_stride, embedding + step.input_ids[i] * shape.hidden, shape.hidden * sizeof(T));
        Attention<T> attention(plan, heads);
        for (size_t number = 0; number < layers.size(); number++) {
            const Layer<T> &layer = layers[number];
            T *k_slots = (T *)kv + number * layer_size, *v_slots = k_slots + layer_size / 2;
            rms_norm_rows(x, tokens, layer.input_norm);
            linear<T, T>(normed, hidden_stride, tokens, layer.qkv, nullptr, qkv_rows, qkv_stride);
            rope_and_store(step, layer, qkv_rows, k_slots, v_slots);
            attention.run(qkv_rows, qkv_stride, k_slots, v_slots, attended, q_stride, scratches, state_scratch);
            int64_t count = tokens;
            if (number + 1 == layers.size()) {  // after the last attention only sampled tokens matter
                count = step.num_sampled;
                for (int64_t i = 0; i < count; i++) {
                    if (step.sampled[i] == i) continue;
                    memcpy(attended + i * q_stride, attended + step.sampled[i] * q_stride, q * sizeof(T));
                    memcpy(x + i * hidden_stride, x + step.sampled[i] * hidden_stride, shape.hidden * sizeof(T));
                }
            }
            linear<T, T>(attended, q_stride, count, layer.o, x, x, hidden_stride);
            rms_norm_rows(x, count, layer.post_norm);
            silu_gate_up<T>(normed, hidden_stride, count, layer.gate_up, inner, inner_stride);
            linear<T, T>(inner, inner_stride, count, layer.down, x, x, hidden_stride);
        }
        rms_norm_rows(x, step.num_sampled, norm);
        linear<T, float>(normed, hidden_stride, step.num_sampled, head, nullptr, step.logits, shape.vocab);
    }

  private:
    const DecoderShape shape;
    const std::vector<Layer<T>> layers;
    const T *embedding, *norm;
    const Weight<T> head;
    // Rows of activations. The padding after a row's last column is zero and is never written.
    Scratch x_scratch, normed_scratch, qkv_scratch, attended_scratch, inner_scratch, state_scratch;
    std::vector<ThreadScratch> scratches;
    T *x = nullptr, *normed = nullptr;
    int64_t hidden_stride = 0, qkv_stride = 0;

    void rms_norm_rows(const T *from, int64_t count, const T *weight) {
        const int threads = threads_for(16.0 * count * shape.hidden);
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t i = 0; i < count; i++)
            rms_norm(from + i * hidden_stride, weight, shape.hidden, shape.eps, normed + i * hidden_stride);
    }

    // Normalises and rotates q and k, and stores k and v in the tokens' slots.
    void rope_and_store(const Step &step, const Layer<T> &layer, T *qkv_rows, T *k_slots, T *v_slots) {
        const int64_t dim = shape.head_dim, num_rotated = shape.num_heads + shape.num_kv_heads;
        const int64_t kv = shape.num_kv_heads * dim;
        const int threads = threads_for(16.0 * step.num_tokens * num_rotated * dim);
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t i = 0; i < step.num_tokens; i++) {
            T *row = qkv_rows + i * qkv_stride;
            if (i + 1 < step.num_tokens) {
                const int64_t slot = step.slots[i + 1] * kv, line = 64 / sizeof(T);
                for (int64_t at = 0; at < kv; at += line) {
                    __builtin_prefetch(k_slots + slot + at, 1);
                    __builtin_prefetch(v_slots + slot + at, 1);
                }
            }
            const float *rotation = step.rotations + step.positions[i] * dim;
            for (int64_t h = 0; h < num_rotated; h++) {
                T *head = row + h * dim;
                if (layer.qk_norm) rms_norm(head, layer.qk_norm + h * dim, dim, shape.eps, head);
                rotate(head, rotation, dim);
            }
            const T *k = row + shape.num_heads * dim;
            memcpy(k_slots + step.slots[i] * kv, k, kv * sizeof(T));
            memcpy(v_slots + step.slots[i] * kv, k + kv, kv * sizeof(T));
        }
    }
};
