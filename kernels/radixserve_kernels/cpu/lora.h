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
    Weight<T> a;  // [rank, depth]
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

// What adapters add to a product. T: weights; A: activations where they are multiplied.
template <class T, class A> struct LoraTerm {
    const LoraGroup<T> *groups;
    const int32_t *group_of;  // of each row, -1: none
    size_t layer;
    LoraProduct<T> LoraLayer<T>::*product;
    const A *low;  // [rows][stride] a x; null: no row has one
    int64_t stride;
    int64_t first_panel;  // of the weight that is multiplied, among the columns of all

    const LoraTerm *get() const { return low ? this : nullptr; }
    LoraTerm from(int64_t panel) const {
        LoraTerm term = *this;
        term.first_panel += panel;
        return term;
    }

    // The sums of `count` rows from `row` on over a panel, [count][sums_stride], go on over the ranks of their adapters.
    void add(int64_t row, int64_t count, int64_t panel, float *sums, int64_t sums_stride) const {
        for (int64_t first = row, last; first < row + count; first = last) {
            for (last = first + 1; last < row + count && group_of[last] == group_of[first];) last++;
            if (group_of[first] < 0) continue;
            const LoraProduct<T> &of = groups[group_of[first]].layers[layer].*product;
            if (!of.a.columns) continue;
            const int64_t vector = 2 * (first_panel + panel);
            const T *b = of.b + vector * of.count * LANES;
            float *own = sums + (first - row) * sums_stride;
#if defined(RADIXSERVE_AMX)
            if constexpr (sizeof(A) == 2)
                if (has_amx && of.count % DEPTH == 0) {
                    AmxBf16::continue_sums(low + first * stride, stride, int(last - first), b, of.firsts + vector, of.count,
                                           own, sums_stride);
                    continue;
                }
#endif
            for_row_blocks(int(last - first), [&](int top, int some) {
                with_row_count<ROWS>(some, [&](auto rows) {
                    continue_sums<rows>(low + (first + top) * stride, stride, b, of.firsts + vector, of.count,
                                        own + top * sums_stride, sums_stride);
                });
            });
        }
    }

  private:
    static constexpr int RANKS = sizeof(T) == sizeof(float) ? 1 : 2;  // at a time

    template <int M>
    static void continue_sums(const A *low, int64_t stride, const T *b, const int32_t *firsts, int64_t count, float *sums,
                              int64_t sums_stride) {
        const A *from[2] = {low + firsts[0], low + firsts[1]};
        const T *vectors[2] = {b, b + count * LANES};
        prefetch<64, 2>(firsts + 32);  // the first rows find neither these nor b in the cache
        vec own[M][2];
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
            for (int n = 0; n < 2; n++) own[m][n] = load(sums + m * sums_stride + n * LANES);
        for (int64_t k = 0; k < count; k += RANKS) {
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                const T *w = vectors[n] + k * LANES;
                prefetch<64, 2>((const char *)w + 2048);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) own[m][n] = add_ranks(own[m][n], from[n] + m * stride + k, w);
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
            for (int n = 0; n < 2; n++) store(sums + m * sums_stride + n * LANES, own[m][n]);
    }

    static vec add_ranks(vec sum, const A *low, const float *b) { return fmadd(sum, broadcast(to_f32(*low)), load(b)); }
    static vec add_ranks(vec sum, const A *low, const bf16 *b) {
#if defined(RADIXSERVE_BF16)
        if constexpr (sizeof(A) == 2) {
            int32_t two;
            memcpy(&two, low, 4);
            return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(b), (__m512bh)_mm512_set1_epi32(two));
        }
#endif
        const uvec pairs = load_pairs(b);
        sum = fmadd(sum, broadcast(to_f32(low[0])), low_halves(pairs));
        return fmadd(sum, broadcast(to_f32(low[1])), high_halves(pairs));
    }
};

// The adapters of one step.
template <class T, class A> class LoraRows {
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
        stride = row_size<A>(round_up(most, PANEL));
        shared_low = low_scratch.get<A>(num_tokens * stride);
        group_of.resize(num_tokens);
        find_groups(false);
    }
    // Nanoseconds of one thread.
    double work() const { return work_ns; }

    // The rows of the last layer's products from here on are the sampled ones, moved to the front.
    void keep_sampled() { find_groups(true); }

    // What adapters add to a product of x; a x is computed. is_sampled: rows are the sampled ones.
    LoraTerm<T, A> term(const TeamThread &thread, size_t layer, Product product, bool is_sampled, const A *x,
                        int64_t x_stride) const {
        LoraTerm<T, A> made{groups, group_of.data(), layer, product, nullptr, stride, 0};
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
            A *low = own_scratch.get<A>(int64_t(group_of.size()) * stride);
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
    A *shared_low = nullptr;  // [tokens][stride]
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
    void multiply(const Weight<T> &a, const int64_t *rows, int64_t num, const A *x, int64_t x_stride, A *low) const {
        static thread_local Scratch x_scratch;
        const A *from = x + rows[0] * x_stride;
        if (rows[num - 1] - rows[0] != num - 1) {  // they lie apart
            A *gathered = x_scratch.get<A>(num * x_stride);
            for (int64_t i = 0; i < num; i++) memcpy(gathered + i * x_stride, x + rows[i] * x_stride, x_stride * sizeof(A));
            from = gathered;
        }
        const OutputTile tile{(char *)(low + rows[0] * stride), stride * int64_t(sizeof(A)), PANEL * int64_t(sizeof(A))};
        with_dense_level<A, T>([&](auto level) {
            dense_panels<T>(level, from, x_stride, num, a, 0, a.num_panels(), tile,
                            [&](int64_t row, int64_t column, vec first, vec second) {
                                store2(low + rows[row] * stride + column, first, second);
                            });
        });
    }
};
