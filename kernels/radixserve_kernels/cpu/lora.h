// Low-rank products of adapters: to what a layer's own weight gives for a row, its adapter adds b (a x).
//
// The base's products stay one call for all rows. A row's bits depend on its own x and adapter alone: every sum runs
// over k in one order, whatever rows and panels a thread has.
#pragma once

#include <algorithm>

#include "layers.h"

// As Python passes them. a [rank, depth], b [columns, rank], with the adapter's factor; without columns where the
// adapter leaves the weight as it is. `b` has its columns in the order of the base's weight.
template <class T> struct LoraProduct {
    Weight<T> a, b;
    double num_numbers() const { return a.num_numbers() + b.num_numbers(); }
    double num_bytes() const { return a.num_bytes() + b.num_bytes(); }
};

template <class T> struct LoraLayer {
    LoraProduct<T> qkv, o, gate_up, down;
};

// The rows of one adapter in a step, ascending: their places among all tokens, and among the sampled ones.
template <class T> struct LoraGroup {
    const LoraLayer<T> *layers;
    const int64_t *tokens, *sampled;
    int64_t num_tokens, num_sampled;
};

// The adapters of one step. T: weights; A: activations where they are multiplied.
template <class T, class A> class LoraRows {
  public:
    using Product = LoraProduct<T> LoraLayer<T>::*;

    // Called once before any thread runs. delta_stride: of the widest gate_up.
    void prepare(const LoraGroup<T> *of, int64_t num_groups, int64_t num_tokens, int64_t columns) {
        groups = of, count = num_groups;
        if (!count) return;
        delta_stride = row_size<float>(columns);
        delta = delta_scratch.get<float>(num_tokens * delta_stride);
        adapted.assign(num_tokens, 0);
        view = {delta, delta_stride, adapted.data()};
        for (int64_t g = 0; g < count; g++)
            for (int64_t i = 0; i < groups[g].num_tokens; i++) adapted[groups[g].tokens[i]] = 1;
    }
    // Nanoseconds of one thread.
    double work(size_t num_layers) const {
        double ns = 0;
        for (int64_t g = 0; g < count; g++)
            for (size_t layer = 0; layer < num_layers; layer++)
                for (Product product : {&LoraLayer<T>::qkv, &LoraLayer<T>::o, &LoraLayer<T>::gate_up, &LoraLayer<T>::down}) {
                    const LoraProduct<T> &of = groups[g].layers[layer].*product;
                    if (of.a.columns) ns += price(2 * groups[g].num_tokens * of.num_numbers(), of.num_bytes());
                }
        return ns;
    }

    // The rows of the last layer's products from here on are the sampled ones, moved to the front.
    void keep_sampled() {
        std::fill(adapted.begin(), adapted.end(), uint8_t(0));
        for (int64_t g = 0; g < count; g++)
            for (int64_t i = 0; i < groups[g].num_sampled; i++) adapted[groups[g].sampled[i]] = 1;
    }

    // out += scale * b (a x) for the rows of adapters. is_sampled: rows are the sampled ones.
    void add(const TeamThread &thread, size_t layer, Product product, bool is_sampled, const A *x, int64_t stride,
             float *out, int64_t out_stride, float scale = 1) const {
        const vec factor = broadcast(scale);
        run(thread, layer, product, is_sampled, x, stride, out, out_stride,
            [&](float *to, int64_t column, int64_t columns, vec low, vec high) {
                low *= factor, high *= factor;
                if (column + PANEL <= columns) return store2(to + column, load(to + column) + low, load(to + column + LANES) + high);
                store_tail(to, column, columns, load_tail(to, column, columns) + low);
                store_tail(to, column + LANES, columns, load_tail(to, column + LANES, columns) + high);
            });
    }

    // What adapters add to the rows of gate and up, before their activation; null where there are none.
    const LoraDelta *gate_up(const TeamThread &thread, size_t layer, bool is_sampled, const A *x, int64_t stride) {
        if (!count) return nullptr;
        for (int64_t g = 0; g < count && thread.index == 0; g++) {
            if (groups[g].layers[layer].gate_up.a.columns) continue;
            for (int64_t i = 0; i < num_rows(g, is_sampled); i++)
                memset(delta + rows_of(g, is_sampled)[i] * delta_stride, 0, delta_stride * sizeof(float));
        }
        const bool has_met = run(thread, layer, &LoraLayer<T>::gate_up, is_sampled, x, stride, delta, delta_stride,
                                 [&](float *to, int64_t column, int64_t, vec low, vec high) { store2(to + column, low, high); });
        if (!has_met) thread.barrier();
        return &view;
    }

  private:
    static constexpr int64_t BLOCK_ROWS = 64;
    static constexpr int64_t FEW_ROWS = 8;  // up to so many, threads share the panels of b and all compute a x

    const LoraGroup<T> *groups = nullptr;
    int64_t count = 0;
    Scratch delta_scratch;
    float *delta = nullptr;  // [rows][delta_stride] of gate_up
    int64_t delta_stride = 0;
    std::vector<uint8_t> adapted;  // whether a row has an adapter
    LoraDelta view{};

    int64_t num_rows(int64_t group, bool is_sampled) const {
        return is_sampled ? groups[group].num_sampled : groups[group].num_tokens;
    }
    const int64_t *rows_of(int64_t group, bool is_sampled) const {
        return is_sampled ? groups[group].sampled : groups[group].tokens;
    }

    // write(row of out, column, columns, low, high) for the product of every row that has an adapter. Whether there is
    // one: then the threads have met at the end.
    template <class Write>
    bool run(const TeamThread &thread, size_t layer, Product product, bool is_sampled, const A *x, int64_t stride,
             float *out, int64_t out_stride, Write &&write) const {
        int64_t total = 0, panels = 0;
        double ns = 0;
        auto each = [&](auto &&call) {
            for (int64_t g = 0; g < count; g++) {
                const LoraProduct<T> &of = groups[g].layers[layer].*product;
                const int64_t rows = num_rows(g, is_sampled);
                if (of.a.columns && rows) call(of, rows_of(g, is_sampled), rows);
            }
        };
        each([&](const LoraProduct<T> &of, const int64_t *, int64_t rows) {
            total += rows, panels += of.b.num_panels(), ns += price(2 * rows * of.num_numbers(), of.num_bytes());
        });
        if (!total) return false;
        const bool by_rows = total > FEW_ROWS;
        thread.share(by_rows ? total : panels, ns, [&](int64_t first, int64_t last) {
            int64_t start = 0;
            each([&](const LoraProduct<T> &of, const int64_t *rows, int64_t num) {
                const int64_t size = by_rows ? num : of.b.num_panels();
                const int64_t begin = first > start ? first - start : 0, end = min(last - start, size);
                if (begin < end) {
                    if (by_rows) multiply(of, rows + begin, end - begin, 0, of.b.num_panels(), x, stride, out, out_stride, write);
                    else multiply(of, rows, num, begin, end, x, stride, out, out_stride, write);
                }
                start += size;
            });
        });
        thread.barrier();
        return true;
    }

    // Panels [first, last) of b times a x, of some rows.
    template <class Write>
    static void multiply(const LoraProduct<T> &of, const int64_t *rows, int64_t count, int64_t first, int64_t last,
                         const A *x, int64_t stride, float *out, int64_t out_stride, Write &&write) {
        static thread_local Scratch x_scratch, low_scratch;
        const A *from = x + rows[0] * stride;
        if (rows[count - 1] - rows[0] != count - 1) {  // they lie apart
            A *gathered = x_scratch.get<A>(count * stride);
            for (int64_t i = 0; i < count; i++) memcpy(gathered + i * stride, x + rows[i] * stride, stride * sizeof(A));
            from = gathered;
        }
        const int64_t size = row_size<A>(round_up(of.a.columns, PANEL));
        A *low_rank = low_scratch.get<A>(count * size);
        memset((void *)low_rank, 0, count * size * sizeof(A));
        with_dense_level<A, T>([&](auto level) {
            const int64_t most = round_up(BLOCK_ROWS, level.ROW_UNIT);  // whose rows of out stay in the cache
            if (count <= FEW_ROWS) fetch(of.a, 0, of.a.num_panels()), fetch(of.b, first, last);
            for (int64_t top = 0; top < count; top += most) {
                const int64_t some = min(count - top, most);
                A *t = low_rank + top * size;
                dense_panels<T>(level, from + top * stride, stride, some, of.a, 0, of.a.num_panels(),
                                OutputTile{(char *)t, size * int64_t(sizeof(A)), PANEL * int64_t(sizeof(A))},
                                [&](int64_t row, int64_t column, vec low, vec high) {
                                    store(t + row * size + column, low), store(t + row * size + column + LANES, high);
                                });
                dense_panels<T>(level, t, size, some, of.b, first, last,
                                OutputTile{(char *)(out + rows[top] * out_stride), out_stride * 4, PANEL * 4},
                                [&](int64_t row, int64_t column, vec low, vec high) {
                                    write(out + rows[top + row] * out_stride, column, of.b.columns, low, high);
                                });
            }
        });
    }

    // Prefetches panels: few rows multiply them faster than they come one by one.
    static void fetch(const Weight<T> &w, int64_t first, int64_t last) {
        const Panels<T> panels = w.template slice<T>(int(first), int(last));
        const char *from = (const char *)panels.first, *end = from + (last - first) * panels.size * int64_t(sizeof(T));
        for (; from < end; from += 64) __builtin_prefetch(from, 0, 2);
    }
};
