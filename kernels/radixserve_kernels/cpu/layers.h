// A decoder's layers from end to end: norms, projections, rotation, attention, MLP.
//
// Activations are rounded to the model's type where they are multiplied and where K and V are stored; all
// sums, those of the residual too, stay in float32.
#pragma once

#include "attention.h"
#include "forms.h"

// A packed weight [columns, depth], as Python passes it.
template <class T> struct Weight {
    const T *panels;     // [ceil(columns / PANEL)][padded_depth(depth) * PANEL], or those of a form
    const T *bias;       // [columns] or null
    const Weight *next;  // a weight of the same depth whose columns follow, in another form; or null
    int64_t columns, depth, form;
    int64_t activation_bits;  // to which a quantised form's rows of x are rounded: 8 or 16
    int num_panels() const { return int((columns + PANEL - 1) / PANEL); }
    bool is_dense() const { return form == DENSE || form == FLOAT16 || form == COMPACT; }
    bool is_quantized() const { return !is_dense() || (next && next->is_quantized()); }
    double num_numbers() const { return double(columns) * depth + (next ? next->num_numbers() : 0); }
    double num_bytes() const {
        const double each = form == FLOAT16 ? sizeof(half) : sizeof(T);
        const double own = is_dense()
                               ? each * double(columns) * depth
                               : double(num_panels()) * num_blocks(depth) * quantized_form(form).block_bytes;
        return own + (next ? next->num_bytes() : 0);
    }
    // Of dense panels, as numbers of type W.
    template <class W> Panels<W> slice(int first, int last) const {
        const int64_t deep = padded_depth<W>(depth), size = deep * PANEL;
        const bool is_last_half = last == num_panels() && columns % PANEL && columns % PANEL <= LANES;
        return {(const W *)panels + first * size, size, last - first, deep, is_last_half, HAS_COMPACT_PANELS && form == COMPACT};
    }
};

// A gated MLP, as Python passes it.
template <class T> struct Experts;

template <class T> struct Mlp {
    Weight<T> gate_up, down;
    const Experts<T> *experts;  // instead, or null
};

// Experts beside the MLP, as Python passes them: both read the residual, each with a norm of its own, and what they give
// is normed and added before post_mlp_norm.
template <class T> struct ExpertsBeside {
    const Experts<T> *experts;
    // [hidden]: of the router's input and the experts', of what the MLP gives and of what the experts give.
    const float *router_norm, *pre_norm, *post_mlp_norm, *post_norm;
};

// Of a layer with an input of its own for each token, as Python passes it: the layer ends with
// residual += norm(up(gelu(gate(residual)) * input)).
template <class T> struct LayerInput {
    Weight<T> gate, up;
    const float *norm;  // [hidden]
};

// The inputs of all layers, as Python passes them: [token][layer][size], scale * (rows of the token * rows_scale +
// norm(projection(embedded token) * projection_scale)).
template <class T> struct LayerInputs {
    Weight<T> rows;  // as the embedding
    Weight<T> projection;
    const float *norm;  // [size]
    int64_t size;
    float rows_scale, projection_scale, scale;
};

struct Recurrence;
struct ShortConv;
struct StepStates;

// One layer's weights and what its attention needs, as Python passes them; see decoder_layer.py.
template <class T> struct Layer {
    // [hidden] or null: before and after attention and the MLP, the latter of what they add to the residual.
    const float *pre_attention_norm, *post_attention_norm, *pre_mlp_norm, *post_mlp_norm;
    const float *qk_norm;  // [num_heads + num_kv_heads, head_dim] or null
    Weight<T> qkv, o;  // qkv without columns: the layer is an MLP alone
    Weight<T> beside;  // as o, of a recurrence beside attention; without columns where there is none
    Mlp<T> mlp;        // without columns and experts: the layer has none
    Features features;
    int64_t rotary;  // index of Step.rotations, -1: q and k are not rotated
    int64_t has_gate;  // the columns of qkv after v are logits of factors of what attention gives
    const Recurrence *recurrence;  // instead of attention or beside it, or null
    const ShortConv *short_conv;   // instead of attention, or null
    int64_t num_kv_heads, head_dim;  // of attention
    int64_t kv_layer;   // index of its K and V in memory
    int64_t stores_kv;  // else an earlier layer does: qkv gives q alone
    int64_t has_v_norm;  // qk_norm goes on with [num_kv_heads, head_dim] of v
    const ExpertsBeside<T> *experts_beside;  // or null
    const LayerInput<T> *own_input;          // or null
    double scale;  // of the residual after the layer
    int64_t num_stored() const { return stores_kv ? num_kv_heads : 0; }
    bool mixes() const { return qkv.columns; }
    bool attends() const { return mixes() && !short_conv && (!recurrence || beside.columns); }
    bool has_mlp() const { return mlp.experts || mlp.gate_up.columns; }
};

enum NormType { RMS_NORM, LAYER_NORM };
enum Activation { SILU, GELU_TANH, RELU2 };

struct DecoderShape {
    int64_t num_layers, num_heads, num_kv_heads, head_dim, hidden, intermediate, vocab;
    int64_t norm_type, activation;
    int64_t has_whole_qk_norm;  // of all heads together
    int64_t has_parallel_residual;  // the MLP reads what attention reads
    int64_t has_gated_mlp;
    float eps, attention_scale, embedding_scale, residual_scale, logit_scale, logit_soft_cap;  // 0: no cap
    float attention_out_scale, gate_scale, mlp_out_scale;
};

// The inputs and the output of one step.
struct Step {
    int64_t num_tokens, num_sampled;
    const int64_t *input_ids, *positions, *slots;  // [num_tokens]
    const int64_t *sampled;                        // [num_sampled] tokens, ascending
    const float *const *rotations;  // of each rotary [positions][head_dim / 2][2] cosine and sine
    float *logits;                  // [num_sampled][vocab]
    // As `slots` and the plan's page ids, of layers that have window pages; null where none has.
    const int64_t *window_slots;
    const int32_t *window_page_ids;
    const StepStates *states;  // of layers with recurrent states; null where none has any
    const void *adapters;      // LoraGroup [num_adapters] of rows that have an adapter, see lora.h
    int64_t num_adapters;
    const int64_t *given_rows;  // [num_tokens] of tokens whose embeddings are given, else -1; null: of none
    const float *given;         // [rows][num_given][hidden] these embeddings, and what is added after the first layers
    int64_t num_given;
    int64_t num_threads;
};

template <class T> struct LoraTerm;  // what adapters add to a product, see lora.h; in products null for nothing

constexpr int64_t BLOCK_BYTES = 1100 << 10;  // of the second-level cache, for rows of x

// Elements of a row of activations: an odd number of cache lines, so that the same columns of successive
// rows do not map to the same cache sets.
template <class T> inline int64_t row_size(int64_t columns) {
    const int64_t line = 64 / sizeof(T);
    return (round_up(columns, DEPTH) / line | 1) * line;
}

// Rows of x that are multiplied with a panel while both are in the cache: `rows` in parts of equal size,
// since the weight is read once for each part, rounded up to a multiple of `unit`.
inline int block_rows(int64_t rows, int64_t row_bytes, int unit) {
    const int64_t fitting = min<int64_t>(1536, (BLOCK_BYTES + row_bytes - 1) / row_bytes);
    const int64_t parts = (rows + fitting - 1) / fitting;
    return int(round_up((rows + parts - 1) / parts, unit));
}

constexpr int64_t OWN_ROWS = 4;  // rows of x up to which each thread of a team quantises all of them
constexpr int64_t QUANTIZED_ROWS = 256;  // rows of x in 8 bits that a panel is multiplied with at a time

// What adapters add to few rows of x over some panels: computed before these panels are read.
struct Deltas {
    static constexpr int ROWS = 4;
    static constexpr int64_t NUMBERS = 4096;  // at most, in the first-level cache
    const float *first = nullptr;             // [rows][stride], null: nothing was computed before
    int64_t stride = 0;
    Deltas of(int64_t row, int64_t panel) const { return first ? Deltas{first + row * stride + panel * PANEL, stride} : *this; }
};

// Calls part(first, last, deltas) for all panels [first, last) or, where adapters add to few rows, some of them at a time.
template <class T, class Part>
inline void with_deltas(const LoraTerm<T> *lora, int64_t row, int64_t count, int64_t first, int64_t last, Part &&part) {
    if (!lora || !lora->has_deltas(count)) return part(first, last, Deltas());
    alignas(64) float numbers[Deltas::NUMBERS];
    for (int64_t next; first < last; first = next) {
        next = min(last, first + Deltas::NUMBERS / (count * PANEL));
        lora->deltas(row, count, first, next, numbers);
        part(first, next, Deltas{numbers, (next - first) * PANEL});
    }
}

// Calls epilogue(row, first column, low, high) for the sums of `count` rows over a panel, [count][stride], with what
// adapters add to them. deltas: of these rows over this panel.
template <class T, class Epilogue>
inline void finish_rows(float *sums, int64_t stride, int64_t row, int64_t count, int64_t panel, const LoraTerm<T> *lora,
                        Deltas deltas, Epilogue &&epilogue) {
    if (lora && !deltas.first) lora->add(row, count, panel, sums, stride);
    for (int64_t i = 0; i < count; i++, sums += stride, deltas.first += deltas.stride) {
        vec low = load(sums), high = load(sums + LANES);
        if (deltas.first) low += load(deltas.first), high += load(deltas.first + LANES);
        epilogue(row + i, panel * PANEL, low, high);
    }
}

// Panels [first, last) of a weight in one of the other forms, see `gemm`.
template <class T, class Epilogue>
void quantized_panels(const QuantizedRows &x, int64_t rows, const Weight<T> &w, int64_t first, int64_t last,
                      const LoraTerm<T> *lora, Epilogue &&epilogue) {
    alignas(64) float sums[QUANTIZED_ROWS * PANEL];
    const QuantizedForm &form = quantized_form(w.form);
    const int64_t panel_bytes = num_blocks(w.depth) * form.block_bytes;
    const int64_t most = QUANTIZED_ROWS * 8 / x.bits;
    for (int64_t top = 0; top < rows; top += most)
        with_deltas(lora, top, min(rows - top, most), first, last, [&](int64_t start, int64_t end, const Deltas &deltas) {
            const int some = int(min(rows - top, most)), at_once = some == 1 ? PANELS_OF_ROW : 1;
            for (int64_t panel = start; panel < end;) {
                const int count = end - panel < at_once ? 1 : at_once;
                form.multiply(x.from(top), some, (const uint8_t *)w.panels + panel * panel_bytes, count, sums);
                for (int i = 0; i < count; i++, panel++)
                    finish_rows(sums + i * PANEL, PANEL, top, some, panel, lora, deltas.of(0, panel - start), epilogue);
            }
        });
    if (lora) lora->finish();
}

// `gemm` for the other forms.
template <class A, class T, class Epilogue>
void quantized_gemm(const TeamThread &thread, const A *x, int64_t stride, int64_t rows, const Weight<T> &w,
                    const LoraTerm<T> *lora, Epilogue &&epilogue) {
    static thread_local Scratch own_numbers, own_blocks;
    const bool is_shared = thread.size > 1 && rows > OWN_ROWS;
    Scratch &number_scratch = is_shared ? thread.state.scratches[0] : own_numbers;
    Scratch &block_scratch = is_shared ? thread.state.scratches[1] : own_blocks;
    const QuantizedForm &form = quantized_form(w.form);
    const int64_t blocks = num_blocks(w.depth), panel_bytes = blocks * form.block_bytes;
    const int64_t row_bytes = blocks * BLOCK * w.activation_bits / 8;
    if (is_shared) {  // one thread makes room
        if (thread.index == 0) number_scratch.get<int8_t>(rows * row_bytes), block_scratch.get<RowBlock>(rows * blocks);
        thread.barrier();
    }
    int8_t *numbers = number_scratch.get<int8_t>(rows * row_bytes);
    RowBlock *row_blocks = block_scratch.get<RowBlock>(rows * blocks);
    auto quantize = [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            int8_t *own = numbers + row * row_bytes;
            RowBlock *own_blocks = row_blocks + row * blocks;
            if (w.activation_bits == 16) quantize_row(x + row * stride, w.depth, 0, (int16_t *)own, own_blocks);
            else quantize_row(x + row * stride, w.depth, form.limit, own, own_blocks);
        }
    };
    if (is_shared) {
        thread.share(rows, price(8.0 * rows * w.depth, 0), quantize);
        thread.barrier();
    } else {
        quantize(0, rows);
    }
    const QuantizedRows quantized{numbers, row_blocks, blocks, int(w.activation_bits)};
    const double ns = price(0.25 * w.activation_bits * rows * w.columns * w.depth, double(w.num_panels()) * panel_bytes);
    thread.share(w.num_panels(), ns, [&](int64_t first, int64_t last) {
        quantized_panels(quantized, rows, w, first, last, lora, epilogue);
    });
    thread.barrier();
}

// The rows of x that a thread multiplies at present, as its level reads them: claimed parts of a product that are of
// the same rows widen them once.
template <class Level> struct HeldRows {
    int64_t first = -1;
    typename Level::Rows rows = {};
};

// Panels [first, last) of a weight in numbers of type W times `count` rows from `top` on, by a level that multiplies
// them, see `gemm`.
template <class W, class Level, class A, class T, class Epilogue>
void dense_block(Level level, HeldRows<Level> &held, const A *x, int64_t stride, int64_t top, int64_t count,
                 const Weight<T> &w, int64_t first, int64_t last, const OutputTile &tile, const LoraTerm<T> *lora,
                 Epilogue &&epilogue) {
    if (held.first != top)
        held.rows = level.read_rows(x + top * stride, stride, int(count), padded_depth<W>(w.depth)), held.first = top;
    with_deltas(lora, top, count, first, last, [&](int64_t start, int64_t end, const Deltas &deltas) {
        level.packed_gemm(
            held.rows, int(count), w.template slice<W>(int(start), int(end)),
            OutputTile{tile.first + top * tile.stride + start * tile.size, tile.stride, tile.size},
            [&](int m, int some, int panel, float *sums, int64_t sums_stride) {
                finish_rows(sums, sums_stride, top + m, some, start + panel, lora, deltas.of(m, panel), epilogue);
            });
    });
}

// `dense_block` for all of `rows` rows.
template <class W, class Level, class A, class T, class Epilogue>
void dense_panels(Level level, const A *x, int64_t stride, int64_t rows, const Weight<T> &w, int64_t first, int64_t last,
                  const OutputTile &tile, Epilogue &&epilogue) {
    const int64_t most = block_rows(rows, level.row_bytes(padded_depth<W>(w.depth)), level.ROW_UNIT);
    HeldRows<Level> held;
    for (int64_t top = 0; top < rows; top += most)
        dense_block<W, Level, A, T>(level, held, x, stride, top, min(rows - top, most), w, first, last, tile, nullptr, epilogue);
}

// Calls call(level) with the level that multiplies rows in A with weights in T.
template <class A, class T, class Call> void with_dense_level(Call &&call) {
    if constexpr (std::is_same<A, T>::value) with_level<T>(call);
    else call(VectorF32<A, T>());
}

// `gemm` for numbers of type W. Parts are of one block of rows after the other, of which each thread reads the rows
// once.
template <class W, class Level, class A, class T, class Epilogue>
void dense_gemm(Level level, const TeamThread &thread, const A *x, int64_t stride, int64_t rows, const Weight<T> &w,
                const OutputTile &tile, const LoraTerm<T> *lora, Epilogue &&epilogue) {
    const int64_t deep = padded_depth<W>(w.depth), panels = w.num_panels();
    const int64_t most = block_rows(rows, level.row_bytes(deep), level.ROW_UNIT), blocks = (rows + most - 1) / most;
    const double numbers = double(panels) * PANEL * deep;
    HeldRows<Level> held;
    thread.share(blocks * panels, price(2 * rows * numbers, sizeof(W) * numbers), [&](int64_t first, int64_t last) {
        for (int64_t next; first < last; first = next) {
            const int64_t start = first / panels * panels, top = first / panels * most;
            next = min(last, start + panels);
            dense_block<W>(level, held, x, stride, top, min(rows - top, most), w, first - start, next - start, tile,
                           lora, epilogue);
        }
    }, blocks == 1 ? 2 : 1);  // few rows read two or four panels at a time
    thread.barrier();
}

// Calls epilogue(row, first column, low, high) for all of x W^T, also for padding columns after the last one
// of the weight. `tile` is where it writes.
template <class A, class T, class Epilogue>
void gemm(const TeamThread &thread, const A *x, int64_t stride, int64_t rows, const Weight<T> &w, const OutputTile &tile,
          const LoraTerm<T> *lora, Epilogue &&epilogue) {
    if (!rows) return;
    if (w.form == DENSE)
        return with_dense_level<A, T>(
            [&](auto level) { dense_gemm<T>(level, thread, x, stride, rows, w, tile, lora, epilogue); });
    if constexpr (std::is_same<T, float>::value)
        if (w.form == FLOAT16)
            return dense_gemm<half>(VectorF32<float, half>(), thread, x, stride, rows, w, tile, lora, epilogue);
    quantized_gemm(thread, x, stride, rows, w, lora, epilogue);
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

// out = (x W^T + bias) * scale + residual, which may be out itself; bias and residual may be null.
template <class Out, class A, class T>
void linear(const TeamThread &thread, const A *x, int64_t stride, int64_t rows, const Weight<T> &w,
            const Out *residual, Out *out, int64_t out_stride, float scale = 1, const LoraTerm<T> *lora = nullptr) {
    if (w.next && lora) {
        const LoraTerm<T> more = lora->from(w.num_panels());
        linear<Out>(thread, x, stride, rows, *w.next, residual ? residual + w.columns : nullptr, out + w.columns,
                    out_stride, scale, &more);
    } else if (w.next) {
        linear<Out>(thread, x, stride, rows, *w.next, residual ? residual + w.columns : nullptr, out + w.columns,
                    out_stride, scale);
    }
    const OutputTile tile{(char *)out, out_stride * int64_t(sizeof(Out)), PANEL * int64_t(sizeof(Out))};
    const vec factor = broadcast(scale);
    gemm(thread, x, stride, rows, w, tile, lora, [&](int64_t row, int64_t column, vec low, vec high) {
        if (column + PANEL <= w.columns && !w.bias) {
            low *= factor, high *= factor;
            if (residual) {
                const Out *with = residual + row * out_stride + column;
                low += load(with), high += load(with + LANES);
            }
            return store2(out + row * out_stride + column, low, high);
        }
        const vec parts[2] = {low, high};
        for (int i = 0; i < 2; i++, column += LANES) {
            vec sum = parts[i];
            if (w.bias) sum += load_tail(w.bias, column, w.columns);
            sum *= factor;
            if (residual) sum += load_tail(residual + row * out_stride, column, w.columns);
            store_tail(out + row * out_stride, column, w.columns, sum);
        }
    });
}

// silu(x) = x sigmoid(x); gelu in its tanh form is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)); relu2 is relu(x)^2.
template <class A> inline vec activate(Activation activation, vec x) {
    if (activation == RELU2) {
        const vec y = max(vec{}, x);  // in this order NaN stays NaN
        return y * y;
    }
    const vec of = activation == SILU ? x : x * (broadcast(1.5957691216f) + broadcast(0.0713548163f) * x * x);
    vec exponent = of * broadcast(-1.44269504f);
    exponent = exponent < broadcast(126.0f) ? exponent : broadcast(126.0f);
    return divide<A>(x, broadcast(1.0f) + fast_exp2<A>(exponent));
}

inline vec sigmoid(vec x) {
    vec exponent = x * broadcast(-1.44269504f);
    exponent = exponent < broadcast(126.0f) ? exponent : broadcast(126.0f);
    return divide<float>(broadcast(1.0f), broadcast(1.0f) + fast_exp2<float>(exponent));
}

inline float precise_sigmoid(float x) { return 1 / (1 + __builtin_expf(-x)); }

// out = activation(x W^T + bias).
template <class A, class T>
void activated_linear(const TeamThread &thread, const A *x, int64_t stride, int64_t rows, const Weight<T> &w,
                      Activation activation, A *out, int64_t out_stride) {
    const OutputTile tile{(char *)out, out_stride * int64_t(sizeof(A)), PANEL * int64_t(sizeof(A))};
    gemm<A, T>(thread, x, stride, rows, w, tile, nullptr, [&](int64_t row, int64_t column, vec low, vec high) {
        if (w.bias) low += load_tail(w.bias, column, w.columns), high += load_tail(w.bias, column + LANES, w.columns);
        store_tail(out + row * out_stride, column, out_stride, activate<A>(activation, low));
        store_tail(out + row * out_stride, column + LANES, out_stride, activate<A>(activation, high));
    });
}

// out = activation(scale * gate) * up, for a weight whose panels hold LANES rows of gate and as many of up.
template <class A, class T>
void gated_linear(const TeamThread &thread, const A *x, int64_t stride, int64_t rows, const Weight<T> &w,
                  Activation activation, float scale, A *out, int64_t out_stride,
                  const LoraTerm<T> *lora = nullptr) {
    const vec factor = broadcast(scale);
    const OutputTile tile{(char *)out, out_stride * int64_t(sizeof(T)), LANES * int64_t(sizeof(A))};
    gemm(thread, x, stride, rows, w, tile, lora, [&](int64_t row, int64_t column, vec gate, vec up) {
        if (w.bias) {
            gate += load_tail(w.bias, column, w.columns);
            up += load_tail(w.bias, column + LANES, w.columns);
        }
        store_tail(out + row * out_stride, column / 2, out_stride, activate<A>(activation, gate * factor) * up);
    });
}

// out = weight * x / sqrt(mean(x^2) + eps); LAYER_NORM: of x less its mean. `out` may be x.
template <class Out>
void norm_row(NormType type, const float *x, const float *weight, int64_t size, float eps, Out *out) {
    vec squares = {}, more = {};
    float rest = 0, mean = 0;
    int64_t i = 0;
    if (type == LAYER_NORM) {
        vec sums = {};
        for (; i + LANES <= size; i += LANES) sums += load(x + i);
        for (; i < size; i++) rest += x[i];
        mean = (reduce_add(sums) + rest) / float(size);
        i = 0, rest = 0;
    }
    const vec center = broadcast(mean);
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
        const vec a = load(x + i) - center, b = load(x + i + LANES) - center;
        squares += a * a, more += b * b;
    }
    squares += more;
    for (; i + LANES <= size; i += LANES) {
        const vec a = load(x + i) - center;
        squares += a * a;
    }
    for (; i < size; i++) rest += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.0f / __builtin_sqrtf((reduce_add(squares) + rest) / float(size) + eps);
    for (i = 0; i + LANES <= size; i += LANES)
        store(out + i, (load(x + i) - center) * broadcast(scale) * load(weight + i));
    for (; i < size; i++) store1(out + i, (x[i] - mean) * scale * weight[i]);
}

// Rotates the pairs (2i, 2i + 1) of a head in place: rotation [dim / 2][2] cosine and sine.
inline void rotate(float *x, const float *rotation, int64_t dim) {
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
        const float a = x[i], b = x[i + 1];
        x[i] = a * rotation[i] - b * rotation[i + 1];
        x[i + 1] = a * rotation[i + 1] + b * rotation[i];
    }
}
