// Low-rank products of adapters: to what a layer's own weight gives for a row, its adapter adds b (a x).
//
// a x of all rows that have an adapter comes first. The base's product then is one call for all rows; the sums of a panel,
// still in the first-level cache, go on over the ranks of each row's adapter: there is no second pass over the output.
// A row's bits depend on its own x and adapter alone: every sum runs over k, then over the ranks, in one order.
#pragma once

#include <algorithm>

#include "layers.h"

// As Python passes them. Without columns of `a` the adapter leaves the weight as it is.
template <class T> struct LoraProduct {
    Weight<T> a;  // [rank, depth], of bf16 in the form COMPACT
    // b with the adapter's factor: for each vector of the base weight's columns the ranks from firsts[vector] on, `count`
    // of them, in which all that are not zero lie. float [vectors][count][LANES]; bf16 [vectors][count / 2][LANES][2].
    const T *b;
    const int32_t *firsts;
    int64_t vectors, count;
    double num_numbers() const { return a.num_numbers() + double(vectors) * LANES * count; }
    double num_bytes() const { return a.num_bytes() + double(vectors) * LANES * count * sizeof(T); }
};

// Ranks that a vector of b has room for, see LoraProduct.
template <class T> inline int64_t lora_depth(int64_t ranks) {
    return sizeof(T) == sizeof(float) ? ranks : round_up(ranks, has_amx ? DEPTH : 2);
}

template <class T> struct LoraLayer {
    LoraProduct<T> qkv, o, gate_up, down;
};

// The rows of one adapter in a step, ascending: their places among all tokens, and among the sampled ones.
template <class T> struct LoraGroup {
    const LoraLayer<T> *layers;
    const int64_t *tokens, *sampled;
    int64_t num_tokens, num_sampled;
};

// What adapters add to a product. T: of their weights, to which x and a x are rounded.
template <class T> struct LoraTerm {
    const LoraGroup<T> *groups;
    const int32_t *group_of;  // of each row, -1: none
    size_t layer;
    LoraProduct<T> LoraLayer<T>::*product;
    const T *low;  // [rows][stride] a x; null: no row has one
    int64_t stride;
    int64_t first_panel;  // of the weight that is multiplied, among the columns of all

    const LoraTerm *get() const { return low ? this : nullptr; }
    LoraTerm from(int64_t panel) const {
        LoraTerm term = *this;
        term.first_panel += panel;
        return term;
    }

    // Whether `deltas` is for so many rows: their product is bound by reading its weight, and what interrupts that costs
    // more than its own time.
    static bool has_deltas(int64_t rows) { return rows <= Deltas::ROWS && !uses_amx(); }

    // What adapters add to few rows from `row` on over panels [first, last), [count][(last - first) * PANEL].
    void deltas(int64_t row, int64_t count, int64_t first, int64_t last, float *to) const {
        const int64_t size = (last - first) * PANEL;
        for_groups(row, count, [&](int64_t top, int64_t some, const LoraProduct<T> *of) {
            float *own = to + (top - row) * size;
            if (!of) return std::fill(own, own + some * size, -0.0f);  // which changes no bit of what it is added to
            with_row_count<Deltas::ROWS>(int(some), [&](auto rows) {
                for (int64_t panel = first; panel < last; panel++, own += PANEL)
                    rank_sums<rows>(*of, top, panel, [&](int m, int n, vec sum) { store(own + m * size + n * LANES, sum); });
            });
        });
    }

    // Adds it to the sums of any number of rows over a panel, [count][sums_stride].
    void add(int64_t row, int64_t count, int64_t panel, float *sums, int64_t sums_stride) const {
        for_groups(row, count, [&](int64_t top, int64_t some, const LoraProduct<T> *of) {
            if (!of) return;
            float *own = sums + (top - row) * sums_stride;
#if defined(RADIXSERVE_AMX)
            if constexpr (sizeof(T) == 2)
                if (uses_amx()) {
                    const int64_t vector = 2 * (first_panel + panel);
                    return AmxBf16::continue_sums(low + top * stride, stride, int(some), of->b + vector * of->count * LANES,
                                                  of->firsts + vector, of->count, own, sums_stride);
                }
#endif
            for_row_blocks(int(some), [&](int first, int block) {
                float *to = own + first * sums_stride;
                with_row_count<ROWS>(block, [&](auto rows) {
                    rank_sums<rows>(*of, top + first, panel, [&](int m, int n, vec sum) {
                        float *at = to + m * sums_stride + n * LANES;
                        store(at, load(at) + sum);
                    });
                });
            });
        });
    }

    // Called after a product whose level does not release tiles itself.
    void finish() const {
#if defined(RADIXSERVE_AMX)
        release_tiles();
#endif
    }

  private:
    static constexpr int RANKS = sizeof(T) == sizeof(float) ? 1 : 2;  // at a time

    static bool uses_amx() { return sizeof(T) == 2 && has_amx; }

    // Calls call(first row, rows, product or null) for successive rows of one adapter.
    template <class Call> void for_groups(int64_t row, int64_t count, Call &&call) const {
        for (int64_t first = row, last; first < row + count; first = last) {
            const int32_t group = group_of[first];
            for (last = first + 1; last < row + count && group_of[last] == group;) last++;
            const LoraProduct<T> *of = group < 0 ? nullptr : &(groups[group].layers[layer].*product);
            call(first, last - first, of && of->a.columns ? of : nullptr);
        }
    }

    // Calls take(m, n, sum) with the sums over the ranks of M rows from `row` on and vector n of a panel.
    template <int M, class Take>
    void rank_sums(const LoraProduct<T> &of, int64_t row, int64_t panel, Take &&take) const {
        const int64_t vector = 2 * (first_panel + panel), count = of.count;
        const T *from[2] = {low + row * stride + of.firsts[vector], low + row * stride + of.firsts[vector + 1]};
        const T *b = of.b + vector * count * LANES;
        prefetch<64, 2>(of.firsts + vector + 32);  // the first rows find neither these nor b in the cache
        vec own[M][2] = {};
        for (int64_t k = 0; k < count; k += RANKS) {
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                const T *w = b + (n * count + k) * LANES;
                prefetch<64, 2>((const char *)w + 2048);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) own[m][n] = add_ranks(own[m][n], from[n] + m * stride + k, w);
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
            for (int n = 0; n < 2; n++) take(m, n, own[m][n]);
    }

    static vec add_ranks(vec sum, const float *low, const float *b) { return fmadd(sum, broadcast(*low), load(b)); }
    static vec add_ranks(vec sum, const bf16 *low, const bf16 *b) {
#if defined(RADIXSERVE_BF16)
        int32_t two;
        memcpy(&two, low, 4);
        return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(b), (__m512bh)_mm512_set1_epi32(two));
#else
        const uvec pairs = load_pairs(b);
        sum = fmadd(sum, broadcast(to_f32(low[0])), low_halves(pairs));
        return fmadd(sum, broadcast(to_f32(low[1])), high_halves(pairs));
#endif
    }
};

// The adapters of one step.
template <class T> class LoraRows {
  public:
    using Product = LoraProduct<T> LoraLayer<T>::*;

    // Called once before any thread runs.
    void prepare(const LoraGroup<T> *of, int64_t num_groups, int64_t num_tokens, size_t num_layers) {
        groups = of, count = num_groups, work_ns = 0;
        if (!count) return;
        int64_t most = 0;
        for (int64_t g = 0; g < count; g++)
            for (size_t layer = 0; layer < num_layers; layer++)
                for (Product product : {&LoraLayer<T>::qkv, &LoraLayer<T>::o, &LoraLayer<T>::gate_up, &LoraLayer<T>::down}) {
                    const LoraProduct<T> &own = groups[g].layers[layer].*product;
                    most = std::max(most, own.a.columns);
                    if (own.a.columns) work_ns += price(2 * groups[g].num_tokens * own.num_numbers(), own.num_bytes());
                }
        stride = row_size<T>(round_up(most, PANEL));
        shared_low = low_scratch.get<T>(num_tokens * stride);
        group_of.resize(num_tokens);
        find_groups(false);
    }
    // Nanoseconds of one thread.
    double work() const { return work_ns; }

    // The rows of the last layer's products from here on are the sampled ones, moved to the front.
    void keep_sampled() { find_groups(true); }

    // What adapters add to a product of x; a x is computed. is_sampled: rows are the sampled ones.
    template <class A>
    LoraTerm<T> term(const TeamThread &thread, size_t layer, Product product, bool is_sampled, const A *x,
                     int64_t x_stride) const {
        LoraTerm<T> made{groups, group_of.data(), layer, product, nullptr, stride, 0};
        int64_t total = 0;
        double ns = 0;
        auto each = [&](auto &&call) {
            for (int64_t g = 0; g < count; g++) {
                const LoraProduct<T> &of = groups[g].layers[layer].*product;
                const int64_t rows = is_sampled ? groups[g].num_sampled : groups[g].num_tokens;
                if (of.a.columns && rows) call(of.a, is_sampled ? groups[g].sampled : groups[g].tokens, rows);
            }
        };
        each([&](const Weight<T> &a, const int64_t *, int64_t rows) {
            total += rows, ns += price(2 * rows * a.num_numbers(), a.num_bytes());
        });
        if (!total) return made;
        if (total <= OWN_ROWS || thread.size == 1) {
            static thread_local Scratch own_scratch;
            T *low = own_scratch.get<T>(int64_t(group_of.size()) * stride);
            each([&](const Weight<T> &a, const int64_t *rows, int64_t num) { multiply(a, rows, num, x, x_stride, low); });
            made.low = low;
            return made;
        }
        thread.share(total, ns, [&](int64_t first, int64_t last) {
            int64_t start = 0;
            each([&](const Weight<T> &a, const int64_t *rows, int64_t num) {
                const int64_t begin = std::max<int64_t>(first - start, 0), end = min(last - start, num);
                if (begin < end) multiply(a, rows + begin, end - begin, x, x_stride, shared_low);
                start += num;
            });
        });
        thread.barrier();
        made.low = shared_low;
        return made;
    }

  private:
    static constexpr int64_t OWN_ROWS = 8;  // up to so many, each thread of a team computes a x of all of them

    const LoraGroup<T> *groups = nullptr;
    int64_t count = 0;
    double work_ns = 0;
    Scratch low_scratch;
    T *shared_low = nullptr;  // [tokens][stride]
    int64_t stride = 0;
    std::vector<int32_t> group_of;  // of each row, -1: none

    void find_groups(bool is_sampled) {
        std::fill(group_of.begin(), group_of.end(), -1);
        for (int64_t g = 0; g < count; g++) {
            const int64_t *rows = is_sampled ? groups[g].sampled : groups[g].tokens;
            for (int64_t i = 0; i < (is_sampled ? groups[g].num_sampled : groups[g].num_tokens); i++)
                group_of[rows[i]] = int32_t(g);
        }
    }

    // low [row][stride] = a x of some rows.
    template <class A>
    void multiply(const Weight<T> &a, const int64_t *rows, int64_t num, const A *x, int64_t x_stride, T *low) const {
        static thread_local Scratch x_scratch;
        const T *from;
        if (std::is_same<A, T>::value && rows[num - 1] - rows[0] == num - 1) {
            from = (const T *)(x + rows[0] * x_stride);
        } else {  // they lie apart, or are not rounded
            const int64_t depth = padded_depth<T>(a.depth), own_stride = row_size<T>(depth);
            T *gathered = x_scratch.get<T>(num * own_stride);
            for (int64_t i = 0; i < num; i++) narrow(x + rows[i] * x_stride, depth, gathered + i * own_stride);
            from = gathered, x_stride = own_stride;
        }
        const OutputTile tile{(char *)(low + rows[0] * stride), stride * int64_t(sizeof(T)), PANEL * int64_t(sizeof(T))};
        with_level<T>([&](auto level) {
            dense_panels<T>(level, from, x_stride, num, a, 0, a.num_panels(), tile,
                            [&](int64_t row, int64_t column, vec first, vec second) {
                                store2(low + rows[row] * stride + column, first, second);
                            });
        });
    }

    static void narrow(const T *from, int64_t depth, T *to) { memcpy(to, from, depth * sizeof(T)); }
    template <class A> static void narrow(const A *from, int64_t depth, T *to) {
        for (int64_t k = 0; k < depth; k += 2 * LANES) store2(to + k, load(from + k), load(from + k + LANES));
    }
};
