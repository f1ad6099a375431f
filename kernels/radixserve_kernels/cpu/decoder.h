// All layers of a decoder in one call, from token ids to logits.
#pragma once

#include <algorithm>
#include <deque>

#include "recurrent.h"
#include "experts.h"
#include "lora.h"

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
    std::vector<LayerInputs<T>> inputs;  // of layers that have some, or empty
    double num_numbers, num_bytes;  // of all products
    bool is_quantized;              // any of them

    DecoderWeights(const DecoderShape &shape, const Layer<T> *layers, const Weight<T> &embedding,
                   const float *norm, const Weight<T> &head, const LayerInputs<T> *layer_inputs)
        : layers(layers, layers + shape.num_layers), embedding(embedding), norm(norm), head(head),
          num_numbers(head.num_numbers()), num_bytes(head.num_bytes()), is_quantized(head.is_quantized()) {
        auto count = [&](const Weight<T> &w) {
            if (w.panels) num_numbers += w.num_numbers(), num_bytes += w.num_bytes(), is_quantized |= w.is_quantized();
        };
        for (const Layer<T> &layer : this->layers) {
            for (const Weight<T> *w : {&layer.qkv, &layer.o, &layer.beside, &layer.mlp.gate_up, &layer.mlp.down}) count(*w);
            if (layer.own_input) count(layer.own_input->gate), count(layer.own_input->up);
            if (layer.mlp.experts) is_quantized |= layer.mlp.experts->is_quantized();
            if (layer.experts_beside) is_quantized |= layer.experts_beside->experts->is_quantized();
        }
        if (layer_inputs) inputs.push_back(*layer_inputs), count(layer_inputs->projection);
    }
};

// Owns the activations; borrows weights and K/V pool. Runs one step at a time.
// T: weights and queries; A: activations where they are multiplied.
template <class T, class A> class FusedDecoder : public AnyDecoder, private DecoderWeights<T> {
  public:
    FusedDecoder(const DecoderShape &shape, const DecoderWeights<T> &weights) : DecoderWeights<T>(weights), shape(shape) {
        for (const Layer<T> &layer : layers) {
            size_t place = 0;
            for (; layer.attends() && place < head_shapes.size(); place++)
                if (head_shapes[place].num_kv_heads == layer.num_kv_heads && head_shapes[place].dim == layer.head_dim) break;
            if (layer.attends() && place == head_shapes.size())
                head_shapes.push_back({shape.num_heads, layer.num_kv_heads, layer.head_dim, shape.attention_scale});
            shape_of_layer.push_back(place);
        }
        state_scratches.resize(head_shapes.size()), split_scratches.resize(head_shapes.size());
    }

    void run(const Step &step, const Plan &plan, const LayerKV *kv) override {
        const int64_t tokens = step.num_tokens;
        int64_t q = shape.num_heads * shape.head_dim, qkv = q + 2 * shape.num_kv_heads * shape.head_dim;
        double mixing = 0;
        for (const Layer<T> &layer : layers) {
            if (layer.has_gate) qkv = std::max(qkv, 2 * (shape.num_heads + layer.num_kv_heads) * layer.head_dim);
            if (layer.short_conv)
                q = std::max(q, layer.short_conv->channels), qkv = std::max(qkv, 3 * layer.short_conv->channels);
            if (!layer.recurrence) continue;
            const Recurrence &net = *layer.recurrence;
            q = std::max(q, net.values() + (layer.attends() ? beside_at() : 0));
            qkv = std::max(qkv, net.first + net.columns()), mixing += price(net.flops() * tokens, 0);
        }
        std::deque<Plan> plans;  // for heads that the step's plan is not for
        std::deque<Attention<T, A>> attentions;
        for (size_t place = 0; place < head_shapes.size(); place++) {
            const Heads &heads = head_shapes[place];
            const bool is_planned = heads.num_kv_heads == shape.num_kv_heads;
            if (!is_planned) plans.emplace_back(plan.jobs, heads);
            attentions.emplace_back(is_planned ? plan : plans.back(), heads);
            attentions.back().prepare(scratches, state_scratches[place], split_scratches[place]);
        }
        residual_stride = row_size<float>(shape.hidden), hidden_stride = row_size<A>(shape.hidden);
        qkv_stride = row_size<float>(qkv), q_stride = row_size<A>(q), inner_stride = row_size<A>(shape.intermediate);
        for (const LayerInputs<T> &own : this->inputs) {
            inner_stride = std::max(inner_stride, row_size<A>(own.size));
            inputs_stride = row_size<float>(own.size * int64_t(layers.size()));
            layer_inputs = inputs_scratch.get<float>(tokens * inputs_stride);
        }
        residual = residual_scratch.get<float>(tokens * residual_stride);
        if (layers[0].post_attention_norm || layers[0].post_mlp_norm)  // each layer is as the first
            projected = projected_scratch.get<float>(tokens * residual_stride);
        input = input_scratch.get<A>(tokens * hidden_stride);
        qkv_rows = qkv_scratch.get<float>(tokens * qkv_stride), attended = attended_scratch.get<A>(tokens * q_stride);
        inner = inner_scratch.get<A>(tokens * inner_stride);
        adapters.prepare((const LoraGroup<T> *)step.adapters, step.num_adapters, tokens, layers.size());
        double ns = price(2 * tokens * this->num_numbers, this->num_bytes) + mixing + adapters.work();
        for (size_t number = 0; number < layers.size(); number++) {
            const Layer<T> &layer = layers[number];
            if (layer.attends()) ns += attentions[shape_of_layer[number]].work();
            const Experts<T> *experts = layer.experts_beside ? layer.experts_beside->experts : layer.mlp.experts;
            if (experts) expert_mlp.prepare(*experts, tokens), ns += experts->work(tokens);
            if (layer.experts_beside)
                router_input = router_scratch.get<A>(tokens * hidden_stride),
                expert_rows = expert_scratch.get<float>(tokens * residual_stride);
        }
        this_team().run(num_threads_for(ns), [&](const TeamThread &thread) {
            run_layers(thread, step, attentions, kv);
        });
    }

  private:
    const DecoderShape shape;
    using Weights = DecoderWeights<T>;
    using Weights::layers, Weights::embedding, Weights::norm, Weights::head;
    // Rows of activations. The padding after a row's last column is zero and is never written.
    Scratch residual_scratch, projected_scratch, input_scratch, qkv_scratch, attended_scratch, inner_scratch;
    Scratch inputs_scratch, router_scratch, expert_scratch;
    std::vector<Heads> head_shapes;      // the distinct ones of the layers
    std::vector<size_t> shape_of_layer;  // of layers that attend
    std::deque<Scratch> state_scratches, split_scratches;  // of each of head_shapes
    std::vector<ThreadScratch> scratches;
    ExpertMlp<T, A> expert_mlp;
    LoraRows<T> adapters;
    float *residual = nullptr, *qkv_rows = nullptr;
    float *projected = nullptr;  // by o or down, where a norm follows
    A *input = nullptr;          // of the next product
    A *attended = nullptr, *inner = nullptr;
    float *layer_inputs = nullptr, *expert_rows = nullptr;
    A *router_input = nullptr;
    int64_t inputs_stride = 0;
    int64_t residual_stride = 0, hidden_stride = 0, qkv_stride = 0, q_stride = 0, inner_stride = 0;

    // Row `id` of an embedding times a factor.
    static void embed(const Weight<T> &rows, int64_t id, int64_t size, float factor, float *to) {
        if (rows.form == DENSE) {
            convert(rows.panels + id * size, size, to);
        } else if (rows.form == FLOAT16) {
            const half *panel = rows.template slice<half>(0, rows.num_panels())[id / PANEL];
            for (int64_t k = 0; k < size; k++) to[k] = to_f32(panel[panel_offset<half>(k, int(id % PANEL))]);
        } else {
            const QuantizedForm &form = quantized_form(rows.form);
            const int64_t panel_bytes = num_blocks(size) * form.block_bytes;
            form.widen_column((const uint8_t *)rows.panels + id / PANEL * panel_bytes, int(id % PANEL), size, to);
        }
        if (factor != 1)
            for (int64_t k = 0; k < size; k++) to[k] *= factor;
    }

    // The layers' own inputs of each token, from its embedding in the residual.
    void make_layer_inputs(const TeamThread &thread, const Step &step, const LayerInputs<T> &own) {
        const int64_t tokens = step.num_tokens, size = own.size * int64_t(layers.size());
        make_input(thread, tokens, nullptr, nullptr);
        linear<float>(thread, input, hidden_stride, tokens, own.projection, nullptr, layer_inputs, inputs_stride,
                      own.projection_scale);
        thread.share(tokens, price(24.0 * tokens * size, 0), [&](int64_t first, int64_t last) {
            static thread_local Scratch row_scratch;
            float *row = row_scratch.get<float>(size);
            for (int64_t i = first; i < last; i++) {
                embed(own.rows, step.input_ids[i], size, own.rows_scale, row);
                for (int64_t start = 0; start < size; start += own.size) {
                    float *to = layer_inputs + i * inputs_stride + start;
                    norm_row(RMS_NORM, to, own.norm, own.size, shape.eps, to);
                    for (int64_t k = 0; k < own.size; k++) to[k] = (to[k] + row[start + k]) * own.scale;
                }
            }
        });
        thread.barrier();
    }

    // Makes `projected` of what a layer's own input adds to the residual, which is in `input`.
    void add_layer_input(const TeamThread &thread, int64_t count, size_t number) {
        const LayerInput<T> &own = *layers[number].own_input;
        const int64_t size = this->inputs[0].size;
        activated_linear(thread, input, hidden_stride, count, own.gate, GELU_TANH, inner, inner_stride);
        thread.share(count, price(8.0 * count * size, 0), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                A *to = inner + i * inner_stride;
                const float *with = layer_inputs + i * inputs_stride + int64_t(number) * size;
                for (int64_t k = 0; k < size; k += LANES)
                    store_tail(to, k, size, load_tail(to, k, size) * load_tail(with, k, size));
                zero_padding(to, size);
            }
        });
        thread.barrier();
        linear<float>(thread, inner, inner_stride, count, own.up, nullptr, projected, residual_stride);
    }

    // Adds what experts beside the MLP give to `projected`, what the MLP gave.
    void add_experts_beside(const TeamThread &thread, int64_t count, const ExpertsBeside<T> &beside) {
        const int64_t hidden = shape.hidden;
        thread.share(count, price(40.0 * count * hidden, 0), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                const float *row = residual + i * residual_stride;
                norm_row(RMS_NORM, row, beside.router_norm, hidden, shape.eps, router_input + i * hidden_stride);
                norm_row(RMS_NORM, row, beside.pre_norm, hidden, shape.eps, input + i * hidden_stride);
                memset(expert_rows + i * residual_stride, 0, hidden * sizeof(float));
            }
        });
        thread.barrier();
        expert_mlp.run(thread, *beside.experts, input, hidden_stride, count, expert_rows, residual_stride, 1, router_input);
        thread.share(count, price(40.0 * count * hidden, 0), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                float *to = projected + i * residual_stride, *more = expert_rows + i * residual_stride;
                norm_row(RMS_NORM, to, beside.post_mlp_norm, hidden, shape.eps, to);
                norm_row(RMS_NORM, more, beside.post_norm, hidden, shape.eps, more);
                for (int64_t k = 0; k < hidden; k++) to[k] += more[k];
            }
        });
        thread.barrier();
    }

    __attribute__((noinline)) void run_layers(const TeamThread &thread, const Step &step,
                                              std::deque<Attention<T, A>> &attentions, const LayerKV *kv) {
        const int64_t tokens = step.num_tokens;
        thread.share(tokens, price(0, 2.0 * tokens * shape.hidden * sizeof(float)), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                float *to = residual + i * residual_stride;
                if (step.given_rows && step.given_rows[i] >= 0)
                    memcpy(to, given(step, i, 0), shape.hidden * sizeof(float));
                else
                    embed(embedding, step.input_ids[i], shape.hidden, shape.embedding_scale, to);
            }
        });
        thread.barrier();
        for (const LayerInputs<T> &own : this->inputs) make_layer_inputs(thread, step, own);
        make_input(thread, tokens, nullptr, layers[0].pre_attention_norm);
        const LayerStates *states = step.states ? step.states->layers : nullptr;
        for (size_t number = 0; number < layers.size(); number++) {
            const Layer<T> &layer = layers[number];
            const bool is_last = number + 1 == layers.size();
            if (layer.mixes()) {
                const auto lora = adapters.term(thread, number, &LoraLayer<T>::qkv, false, input, hidden_stride);
                linear<float>(thread, input, hidden_stride, tokens, layer.qkv, nullptr, qkv_rows, qkv_stride, 1, lora.get());
            }
            if (layer.attends()) attend(thread, step, layer, attentions[shape_of_layer[number]], kv[layer.kv_layer]);
            if (layer.recurrence)
                run_recurrence(thread, *layer.recurrence, *step.states, *states++, tokens, shape.eps, qkv_rows, qkv_stride,
                               attended + (layer.attends() ? beside_at() : 0), q_stride);
            else if (layer.short_conv)
                run_short_conv(thread, *layer.short_conv, *step.states, *states++, tokens, qkv_rows, qkv_stride, attended,
                               q_stride);
            if (is_last) {  // after the last attention only sampled tokens matter
                if (thread.index == 0) keep_sampled(step, !layer.mixes()), adapters.keep_sampled();
                thread.barrier();
            }
            const int64_t count = is_last ? step.num_sampled : tokens;
            if (layer.mixes()) {
                add_mixed(thread, count, layer, number);
                if (layer.has_mlp() && !shape.has_parallel_residual)
                    make_input(thread, count, layer.post_attention_norm, layer.pre_mlp_norm);
            }
            if (layer.has_mlp()) add_mlp(thread, count, layer, number);
            if (layer.experts_beside) add_experts_beside(thread, count, *layer.experts_beside);
            const float *post_norm = layer.has_mlp() ? layer.post_mlp_norm : layer.post_attention_norm;
            if (layer.own_input) {
                make_input(thread, count, post_norm, nullptr);
                add_layer_input(thread, count, number);
                post_norm = layer.own_input->norm;
            }
            if (int64_t(number) + 1 < step.num_given) {
                if (post_norm) make_input(thread, count, post_norm, nullptr), post_norm = nullptr;
                add_given(thread, step, number + 1);
            }
            make_input(thread, count, post_norm, is_last ? norm : layers[number + 1].pre_attention_norm,
                       float(layer.scale));
        }
        linear<float>(thread, input, hidden_stride, step.num_sampled, head, nullptr, step.logits, shape.vocab,
                      shape.logit_scale);
        if (shape.logit_soft_cap) cap_logits(thread, step.logits, step.num_sampled * shape.vocab);
    }

    // Part `number` of what is given for token i.
    const float *given(const Step &step, int64_t i, int64_t number) const {
        return step.given + (step.given_rows[i] * step.num_given + number) * shape.hidden;
    }

    // Adds a later part of what is given to the residual, after another layer than the last.
    void add_given(const TeamThread &thread, const Step &step, int64_t number) {
        thread.share(step.num_tokens, price(2.0 * step.num_tokens * shape.hidden, 0), [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                if (step.given_rows[i] < 0) continue;
                const float *from = given(step, i, number);
                float *to = residual + i * residual_stride;
                for (int64_t k = 0; k < shape.hidden; k++) to[k] += from[k];
            }
        });
        thread.barrier();
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
        if (!layer.has_gate && !step.states && head_shapes.size() == 1) return;
        const int64_t size = shape.num_heads * layer.head_dim, start = size + 2 * layer.num_stored() * layer.head_dim;
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
            if (layer_inputs)
                memcpy(layer_inputs + i * inputs_stride, layer_inputs + from * inputs_stride, inputs_stride * sizeof(float));
            if (shape.has_parallel_residual || is_mlp_alone)
                memcpy(input + i * hidden_stride, input + from * hidden_stride, shape.hidden * sizeof(A));
        }
    }

    // Adds scale x W^T to the residual; where it is normed before, `make_input` does so, without the scale.
    void add_product(const TeamThread &thread, const A *x, int64_t stride, int64_t count, const Weight<T> &w,
                     const float *post_norm, float scale, const LoraTerm<T> *lora = nullptr) {
        if (post_norm)
            linear<float>(thread, x, stride, count, w, nullptr, projected, residual_stride, 1, lora);
        else
            linear<float>(thread, x, stride, count, w, residual, residual, residual_stride, scale * shape.residual_scale,
                          lora);
    }

    // What adapters add to a product after a layer's attention.
    LoraTerm<T> lora(const TeamThread &thread, size_t number, LoraProduct<T> LoraLayer<T>::*product, const A *x,
                        int64_t stride) const {
        return adapters.term(thread, number, product, number + 1 == layers.size(), x, stride);
    }

    void add_mixed(const TeamThread &thread, int64_t count, const Layer<T> &layer, size_t number) {
        const float scale = layer.attends() ? shape.attention_out_scale : layer.recurrence ? layer.recurrence->out_scale : 1;
        const LoraTerm<T> more = lora(thread, number, &LoraLayer<T>::o, attended, q_stride);
        add_product(thread, attended, q_stride, count, layer.o, layer.post_attention_norm, scale, more.get());
        if (layer.beside.columns)
            add_product(thread, attended + beside_at(), q_stride, count, layer.beside, nullptr, layer.recurrence->out_scale);
    }

    void add_mlp(const TeamThread &thread, int64_t count, const Layer<T> &layer, size_t number) {
        if (layer.mlp.experts)
            return expert_mlp.run(thread, *layer.mlp.experts, input, hidden_stride, count, residual, residual_stride,
                                  shape.residual_scale);
        const LoraTerm<T> to_gate_up = lora(thread, number, &LoraLayer<T>::gate_up, input, hidden_stride);
        if (shape.has_gated_mlp)
            gated_linear(thread, input, hidden_stride, count, layer.mlp.gate_up, Activation(shape.activation),
                         shape.gate_scale, inner, inner_stride, to_gate_up.get()), pad_inner(thread, count, layer.mlp.down.depth);
        else
            activated_linear(thread, input, hidden_stride, count, layer.mlp.gate_up, Activation(shape.activation), inner,
                             inner_stride);
        const LoraTerm<T> to_down = lora(thread, number, &LoraLayer<T>::down, inner, inner_stride);
        add_product(thread, inner, inner_stride, count, layer.mlp.down, layer.post_mlp_norm, shape.mlp_out_scale, to_down.get());
    }

    // Zeros after the columns of an MLP that is narrower than others.
    void pad_inner(const TeamThread &thread, int64_t count, int64_t size) {
        if (size == shape.intermediate) return;
        if (thread.index == 0)
            for (int64_t i = 0; i < count; i++) zero_padding(inner + i * inner_stride, size);
        thread.barrier();
    }

    // Adds the norm of `projected` to the residual, if there is a post_norm, and makes the next product's input.
    // scale: of the residual, with what was added.
    void make_input(const TeamThread &thread, int64_t count, const float *post_norm, const float *next_norm,
                    float scale = 1) {
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
                for (int64_t k = 0; scale != 1 && k < shape.hidden; k++) row[k] *= scale;
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
        const int64_t dim = layer.head_dim, kv_heads = layer.num_stored(), num_rotated = shape.num_heads + kv_heads;
        const int64_t kv = kv_heads * dim, slot_bytes = kv_heads * stored_bytes<T>(type, dim);
        const float *rotations = layer.rotary < 0 ? nullptr : step.rotations[layer.rotary];
        const double ns = price(16.0 * step.num_tokens * num_rotated * dim, 0);
        thread.share(step.num_tokens, ns, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                float *row = qkv_rows + i * qkv_stride, *k = row + shape.num_heads * dim;
                if (i + 1 < last) {
                    const int64_t slot = slots[i + 1] * slot_bytes;
                    for (int64_t at = 0; at < slot_bytes; at += 64) {
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
                for (int64_t h = 0; layer.has_v_norm && h < kv_heads; h++)
                    norm_qk(k + kv + h * dim, layer.qk_norm + (num_rotated + h) * dim, dim);
                store_heads<T>(type, k, kv_heads, dim, k_slots + slots[i] * slot_bytes);
                store_heads<T>(type, k + kv, kv_heads, dim, v_slots + slots[i] * slot_bytes);
                if (sizeof(T) != sizeof(float)) round_to(row, shape.num_heads * dim, (T *)row);
            }
        });
        thread.barrier();
    }
    void norm_qk(float *x, const float *weight, int64_t size) const {
        norm_row(NormType(shape.norm_type), x, weight, size, shape.eps, x);
    }
};
