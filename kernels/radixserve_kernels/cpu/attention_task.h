// The state of one attention task, access to paged K and V, and the online softmax (Milakov and
// Gimelshein 2018; Dao et al. 2022).
#pragma once

#include "attention_plan.h"
#include "gemm.h"

constexpr int KEYS = 192;  // of a block
constexpr float LOWEST = -3.0e38f;
constexpr float HIDDEN = -1.0e30f;  // a score outside of a window: no exponent of it overflows
constexpr float LOG2_E = 1.44269504f;
constexpr float MAX_WEIGHT = 256.0f;  // of a lane's sum: beyond it weights lose accuracy

// Buffers of one thread.
struct ThreadScratch {
    Scratch queries, keys, values, scores, weights, acc, row_max, sums, zeros, pairs, untransposed, expanded;
    Scratch first_seen, split;
};

// The rows of one K/V head in a task: queries, and the softmax state of the keys seen so far.
template <class T> struct HeadState {
    Operand<T> *queries;  // [rows][depth]
    float *acc;           // [rows][width] unnormalised output
    float *row_max;       // [rows] base 2
    float *sums;          // [rows][LANES] of weights
};

// A task in progress. Its rows are queries x query heads of a K/V head, `group` for each query.
template <class T> struct TaskState {
    const Task &task;
    const int64_t group, rows, depth, width;
    const int64_t seen, end;  // keys up to the first query's own, and up to the last one's
    const int64_t first;      // key that any query sees first
    const int64_t *first_seen;  // [queries] the first key that each sees, or null: all from 0
    const bool causal;        // each query sees one key more than the one before it; else all see all
    const bool begins;        // there is no earlier state
    const HeadState<T> all;   // all heads, one after another

    HeadState<T> head(int64_t head) const {
        const int64_t at = head * rows;
        return {all.queries + at * depth, all.acc + at * width, all.row_max + at, all.sums + at * LANES};
    }
    int64_t seen_by(int64_t row) const { return causal ? seen + row / group : end; }
    int64_t first_seen_by(int64_t row) const { return first_seen ? first_seen[row / group] : 0; }
    // Where the first block of `size` keys begins that any query sees; blocks lie where they lie without windows.
    int64_t first_block(int64_t size) const { return first / size * size; }
    // Whether none of the rows [top, end) sees a key before `key`.
    bool is_hidden(int64_t top, int64_t end, int64_t key) const {
        for (int64_t i = top / group; first_seen && i <= (end - 1) / group; i++)
            if (first_seen[i] < key) return false;
        return first_seen;
    }
};

// K and V of one layer by page, k and v [slots, kv_heads, dim], and what a step does with them.
template <class T> struct PagedKv {
    const Plan &plan;
    const Heads &heads;
    const Features &features;
    const T *k, *v;
    const int32_t *page_ids;     // of the layer, where the plan has its own
    const float exponent_scale;  // of scores, for exponents to the base 2

    PagedKv(const Plan &plan, const Heads &heads, const Features &features, const T *k, const T *v,
            const int32_t *page_ids)
        : plan(plan), heads(heads), features(features), k(k), v(v),
          page_ids(page_ids ? page_ids : plan.jobs.page_ids), exponent_scale(heads.scale * LOG2_E) {}

    // Index in k of a key of the task's job and first head, and in v of its value.
    int64_t key_offset(const Task &task, int64_t key) const {
        const int32_t *pages = page_ids + plan.jobs.first_page[task.job];
        const int64_t size = plan.jobs.page_size;
        const int64_t slot = size == 1 ? pages[key] : pages[key / size] * size + key % size;
        return (slot * heads.num_kv_heads + task.first_head) * heads.dim;
    }

    // key_offset of the keys [first, end), at most KEYS. Returns their number.
    int64_t key_offsets(const Task &task, int64_t first, int64_t end, int64_t *offsets) const {
        const int32_t *pages = page_ids + plan.jobs.first_page[task.job];
        const int64_t size = plan.jobs.page_size, step = heads.num_kv_heads * heads.dim;
        const int64_t count = min<int64_t>(end - first, KEYS), head = task.first_head * heads.dim;
        int64_t page = first / size, offset = first % size;
        for (int64_t j = 0; j < count; page++, offset = 0)
            for (; offset < size && j < count; offset++, j++)
                offsets[j] = (pages[page] * size + offset) * step + head;
        return count;
    }

    // key_offsets of the block that is likely to be read after the one at `from`: of the same task, or the
    // first block of `next`.
    int64_t next_offsets(const TaskState<T> &state, int64_t from, const Task *next, int64_t *offsets) const {
        if (from + KEYS < state.end)
            return key_offsets(state.task, from + KEYS, state.end, offsets);
        if (next && next->num_heads == state.task.num_heads)
            return key_offsets(*next, 0, plan.jobs.num_keys[next->job], offsets);
        return 0;
    }

    // online_softmax of a row of the task and the `count` keys from `from` on, by the layer's features; `scores`
    // may be overwritten.
    void softmax_row(const TaskState<T> &state, int64_t row, int64_t from, int64_t count, int64_t deep, float *scores,
                     Operand<T> *weights, float &row_max, float *sums, float *acc, int64_t width) const {
        int64_t visible = min(state.seen_by(row) - from, count), first = state.first_seen_by(row) - from;
        if (features.soft_cap && visible > 0) cap_scores(scores, visible);
        if (first > 0) {  // whole registers of keys before the first are left out, the rest of one weighs nothing
            if (first >= visible) visible = first = 0;
            const int64_t whole = first / LANES * LANES;
            memset((void *)weights, 0, whole * sizeof(*weights));
            for (int64_t j = whole; j < first; j++) scores[j] = HIDDEN;
            online_softmax(scores + whole, weights + whole, visible - whole, deep - whole, row_max, sums, acc, width);
            memset((void *)(weights + whole), 0, (first - whole) * sizeof(*weights));
            return;
        }
        online_softmax(scores, weights, visible, deep, row_max, sums, acc, width);
    }

    // Softmax weights of one row of a block of keys, zeros from `visible` to `deep`. Weights are relative to
    // `row_max`: the maximum of the row's first block, raised only when a weight would become too large. Then
    // `acc`, if it holds a state, and `sums` [LANES] are scaled down.
    void online_softmax(const float *scores, Operand<T> *weights, int64_t visible, int64_t deep, float &row_max,
                        float *sums, float *acc, int64_t width) const {
        if (visible <= 0) {
            memset((void *)weights, 0, deep * sizeof(*weights));
            return;
        }
        vec total = {};
        const bool is_first = row_max == LOWEST;
        if (!is_first) total = exp_weights(scores, weights, visible, row_max);
        if (is_first || any_above(total, MAX_WEIGHT)) {
            const float top = max_score(scores, visible);
            if (!(top <= row_max)) {  // or NaN, which has to show
                const float factor = __builtin_exp2f(row_max - top);
                row_max = top;
                store(sums, load(sums) * broadcast(factor));
                for (int64_t d = 0; acc && d < width; d += LANES)
                    store(acc + d, load(acc + d) * broadcast(factor));
            }
            total = exp_weights(scores, weights, visible, row_max);
        }
        store(sums, load(sums) + total);
        const int64_t end = round_up(visible, LANES);
        if (end < deep) memset((void *)(weights + end), 0, (deep - end) * sizeof(*weights));
    }

  private:
    // Soft-capped, in the unit that exponent_scale expects.
    void cap_scores(float *scores, int64_t count) const {
        const vec inner = broadcast(heads.scale / features.soft_cap), outer = broadcast(features.soft_cap / heads.scale);
        for (int64_t j = 0; j < count; j += LANES) store(scores + j, tanh(load(scores + j) * inner) * outer);
    }

    float max_score(const float *scores, int64_t visible) const {
        const int64_t whole = visible / LANES * LANES, rest = visible - whole;
        vec most = rest ? mask_tail(load(scores + whole), rest, LOWEST) : broadcast(LOWEST);
        for (int64_t j = 0; j < whole; j += LANES) most = max(most, load(scores + j));
        return reduce_max(most) * exponent_scale;
    }

    // 2 ^ (score * exponent_scale - row_max) to `weights`; returns their sum, lane by lane.
    vec exp_weights(const float *scores, Operand<T> *weights, int64_t visible, float row_max) const {
        const int64_t whole = visible / LANES * LANES, rest = visible - whole;
        const vec shift = broadcast(-row_max), scale = broadcast(exponent_scale);
        vec total = {};
        for (int64_t j = 0; j < whole; j += LANES) {
            const vec weight = fast_exp2<T>(load(scores + j) * scale + shift);
            total += weight;
            store(weights + j, weight);
        }
        if (rest) {
            const vec weight = mask_tail(fast_exp2<T>(load(scores + whole) * scale + shift), rest, 0);
            total += weight;
            store(weights + whole, weight);
        }
        return total;
    }
};
