// The state of one attention task, access to paged K and V, and the online softmax (Milakov and
// Gimelshein 2018; Dao et al. 2022).
//
// What a query attends to has the same bits however its keys are read: alone or with other rows, as they lie or
// packed, in one job or in several, by one thread or by many. Keys lie on one grid that begins at position 0. Units of
// LANES keys have one step of the softmax each; weighted values are added key after key; PARTITION_KEYS keys, a
// partition, have one maximum, and finished partitions are merged in order. Jobs are cut between units (see
// `job_grid`), blocks of KEYS are a matter of speed alone.
#pragma once

#include "attention_plan.h"
#include "gemm.h"
#include "stored_kv.h"

// Of a block, at most: they are scored, then weighted. With AVX-512 whole blocks fill a partition.
constexpr int KEYS = LANES == 16 ? 256 : 192;
constexpr float LOWEST = -3.0e38f;
constexpr float HIDDEN = -1.0e30f;  // a score outside of a window: no exponent of it overflows
constexpr float LOG2_E = 1.44269504f;
constexpr float MAX_WEIGHT = 256.0f;  // of a lane's sum: beyond it weights lose accuracy

// Tokens of which a job's first position is a multiple, in every number type: a tile of AMX holds 32 keys.
inline int64_t job_grid() { return has_amx ? 32 : 16; }

// Buffers of one thread.
struct ThreadScratch {
    Scratch queries, keys, values, scores, weights, acc, row_max, sums, zeros, pairs, untransposed;
    Scratch merged, merged_max, merged_sums, first_seen, seen;
    Scratch key_rows, value_rows, key_scales, value_scales;  // of a block, widened: see stored_kv.h
    Scratch rotated_query, query_parts, query_starts, query_scales, key_numbers;  // see attention_int8.h
};

// The softmax state of some keys, of the rows of a task.
struct SoftmaxState {
    float *acc;      // [rows][width] unnormalised output
    float *row_max;  // [rows] base 2; LOWEST: no key was seen
    float *sums;     // [rows][LANES] of weights

    SoftmaxState from_row(int64_t row, int64_t width) const {
        return {acc + row * width, row_max + row, sums + row * LANES};
    }
    // Of one row: no key was seen.
    void clear(int64_t width) const {
        *row_max = LOWEST;
        store(sums, vec{});
        memset(acc, 0, width * sizeof(float));
    }
};

// Merges the state of a row's finished partition into that of the partitions before it, and clears it. Not inlined:
// then all readers round alike.
__attribute__((noinline)) inline void merge_partition(const SoftmaxState &part, const SoftmaxState &merged, int64_t width) {
    if (*part.row_max == LOWEST) return;
    vec old = {}, more = broadcast(1);
    const bool is_first = *merged.row_max == LOWEST;
    if (!is_first) {
        const float rise = *part.row_max - *merged.row_max;
        old = broadcast(1), more = fast_exp2<float>(broadcast(rise > 0 ? -rise : rise));
        if (rise > 0) std::swap(old, more);
    }
    if (!(*part.row_max <= *merged.row_max)) *merged.row_max = *part.row_max;
    for (int64_t d = 0; d < width; d += LANES) {
        const vec before = is_first ? vec{} : load(merged.acc + d);
        store(merged.acc + d, before * old + load(part.acc + d) * more);
        store(part.acc + d, vec{});
    }
    store(merged.sums, (is_first ? vec{} : load(merged.sums)) * old + load(part.sums) * more);
    store(part.sums, vec{});
    *part.row_max = LOWEST;
}

// The rows of one K/V head in a task: queries, and the softmax state of the keys seen so far.
template <class T> struct HeadState {
    Operand<T> *queries;  // [rows][depth]
    SoftmaxState part;    // of the partition that is being read
    SoftmaxState merged;  // of those before it; `acc` is undefined while no key was seen
};

// A task in progress. Its rows are queries x query heads of a K/V head, `group` for each query.
template <class T> struct TaskState {
    const Task &task;
    const int64_t group, rows, depth, width;
    const int64_t origin;     // position of the job's first key; keys are counted from there
    const int64_t seen;       // keys up to the first query's own
    const int64_t begin, end;   // the keys to read
    const int64_t *first_seen;  // [queries] the first key that each sees, or null: all from 0
    const int64_t *seen_each;   // [queries] keys up to the last that each sees, ascending; null: see `causal`
    const bool causal;        // each query sees one key more than the one before it; else all see all
    const bool begins;        // there is no earlier state
    const HeadState<T> all;   // all heads, one after another

    HeadState<T> head(int64_t head) const {
        const int64_t row = head * rows;
        return {all.queries + row * depth, all.part.from_row(row, width), all.merged.from_row(row, width)};
    }
    int64_t query_of(int64_t row) const { return row < group ? 0 : row / group; }  // mostly without a division
    int64_t seen_by(int64_t row) const {
        if (__builtin_expect(seen_each != nullptr, 0)) return seen_each[query_of(row)];
        return causal ? seen + query_of(row) : end;
    }
    int64_t first_seen_by(int64_t row) const { return first_seen ? first_seen[query_of(row)] : 0; }
    // The end of the block of up to `keys` that begins with the key `from`.
    int64_t block_end(int64_t from, int64_t keys = KEYS) const {
        const int64_t of_partition = round_up(origin + from + 1, PARTITION_KEYS) - origin;
        return min(from + keys, min(of_partition, end));
    }
    // Called before a block is read: merges the partition that ends before it.
    void begin_block(int64_t from) const {
        if ((origin + from) % PARTITION_KEYS || origin + from == 0) return;
        for (int64_t row = 0; row < rows * task.num_heads; row++)
            merge_partition(all.part.from_row(row, width), all.merged.from_row(row, width), width);
    }
    // Whether none of the rows [top, end) sees a key before `key`.
    bool is_hidden(int64_t top, int64_t end, int64_t key) const {
        for (int64_t i = top / group; first_seen && i <= (end - 1) / group; i++)
            if (first_seen[i] < key) return false;
        return first_seen;
    }
};

// The scales of the keys and values of a block that are stored as integers, [heads][KEYS] each; null: they have none.
struct BlockScales {
    float *keys = nullptr, *values = nullptr;

    BlockScales of_head(int64_t head) const {
        return keys ? BlockScales{keys + head * KEYS, values + head * KEYS} : BlockScales();
    }
    BlockScales from_key(int64_t key) const { return keys ? BlockScales{keys + key, values + key} : BlockScales(); }
};

// K and V of one layer by page, and what a step does with them.
template <class T> struct PagedKv {
    const Plan &plan;
    const Heads &heads;
    const Features &features;
    const KvType type;           // of what is stored
    const char *k, *v;           // [slots, kv_heads, head_bytes]
    const int64_t head_bytes, slot_bytes;
    const int32_t *page_ids;     // of the layer, where the plan has its own
    const float exponent_scale;  // of scores, for exponents to the base 2

    PagedKv(const Plan &plan, const Heads &heads, const Features &features, const LayerKV &kv,
            const int32_t *page_ids)
        : plan(plan), heads(heads), features(features), type(KvType(kv.type)), k((const char *)kv.k),
          v((const char *)kv.v), head_bytes(stored_bytes<T>(type, heads.dim)),
          slot_bytes(heads.num_kv_heads * head_bytes),
          page_ids(page_ids ? page_ids : plan.jobs.page_ids), exponent_scale(heads.scale * LOG2_E) {}

    // Bytes of a number as it is stored.
    int64_t number_bytes() const { return type == INT8_KV ? 1 : head_bytes / heads.dim; }

    // Scales of blocks of the task, if what is stored has some.
    BlockScales scales(const Task &task, ThreadScratch &scratch) const {
        if (type != INT8_KV) return {};
        const int64_t size = task.num_heads * KEYS;
        return {scratch.key_scales.get<float>(size), scratch.value_scales.get<float>(size)};
    }

    // Offset in bytes in k of a key of the task's job and first head, and in v of its value.
    int64_t key_offset(const Task &task, int64_t key) const {
        const int32_t *pages = page_ids + plan.jobs.first_page[task.job];
        const int64_t size = plan.jobs.page_size;
        const int64_t slot = size == 1 ? pages[key] : pages[key / size] * size + key % size;
        return slot * slot_bytes + task.first_head * head_bytes;
    }

    // key_offset of the keys [first, end), at most KEYS. Returns their number.
    int64_t key_offsets(const Task &task, int64_t first, int64_t end, int64_t *offsets) const {
        const int32_t *pages = page_ids + plan.jobs.first_page[task.job];
        const int64_t size = plan.jobs.page_size, step = slot_bytes;
        const int64_t count = min<int64_t>(end - first, KEYS), head = task.first_head * head_bytes;
        if (size == 1) {
            for (int64_t j = 0; j < count; j++) offsets[j] = pages[first + j] * step + head;
            return count;
        }
        int64_t page = first / size, offset = first % size;
        for (int64_t j = 0; j < count; page++, offset = 0)
            for (; offset < size && j < count; offset++, j++)
                offsets[j] = (pages[page] * size + offset) * step + head;
        return count;
    }

    // key_offsets of the block of up to `keys` that is likely to be read after the one that ends at `from`: of the
    // same task, or of `next`, whose keys follow those of the task.
    int64_t next_offsets(const TaskState<T> &state, int64_t from, int64_t keys, const Task *next,
                         int64_t *offsets) const {
        if (from < state.end) return key_offsets(state.task, from, state.block_end(from, keys), offsets);
        const int64_t first = from - state.end;
        if (!next || next->num_heads != state.task.num_heads || first >= plan.jobs.num_keys[next->job]) return 0;
        return key_offsets(*next, first, min(plan.jobs.num_keys[next->job], first + keys), offsets);
    }

    // Softmax weights of a row of the task and of the `count` keys from `from` on, by the layer's features; zeros up to
    // `deep`. `scores` may be overwritten. `scales`: of the block's keys and values in the row's head. `part`: of the
    // row. flush(first, end): adds the values weighted so far, those of keys [first, end) of the block, to `part`.
    template <class Flush>
    void softmax_row(const TaskState<T> &state, int64_t row, int64_t from, int64_t count, int64_t deep, float *scores,
                     Operand<T> *weights, const BlockScales &scales, const SoftmaxState &part, Flush &&flush) const {
        const int64_t visible = min(state.seen_by(row) - from, count), first = state.first_seen_by(row) - from;
        if (visible <= 0 || first >= visible) {
            memset((void *)weights, 0, deep * sizeof(*weights));
            return;
        }
        if (scales.keys)
            for (int64_t j = 0; j < visible; j += LANES) store(scores + j, load(scores + j) * load(scales.keys + j));
        if (features.soft_cap) cap_scores(scores, visible);
        int64_t begin = 0;
        if (first > 0) {  // units before the first key are left out, the rest of its own weighs nothing
            begin = first / LANES * LANES;
            memset((void *)weights, 0, begin * sizeof(*weights));
            for (int64_t j = begin; j < first; j++) scores[j] = HIDDEN;
        }
        online_softmax(scores, weights, scales.values, begin, visible, part, state.width, flush);
        if (first > begin) memset((void *)(weights + begin), 0, (first - begin) * sizeof(*weights));
        const int64_t end = round_up(visible, LANES);
        if (end < deep) memset((void *)(weights + end), 0, (deep - end) * sizeof(*weights));
    }

  private:
    // Weights of the keys [begin, end), relative to `row_max`: the maximum of the partition's first unit, raised only
    // when a unit's weights become too large. Then the state so far is scaled down.
    template <class Flush>
    void online_softmax(const float *scores, Operand<T> *weights, const float *scales, int64_t begin, int64_t end,
                        const SoftmaxState &part, int64_t width, Flush &&flush) const {
        float &row_max = *part.row_max;
        if (row_max == LOWEST) row_max = max_score(scores + begin, min<int64_t>(end - begin, LANES));
        const vec sums = load(part.sums);
        const vec after = exp_weights(scores, weights, scales, begin, end, row_max, sums);
        if (!any_above(after, MAX_WEIGHT)) return store(part.sums, after);
        raise_by_units(scores, weights, scales, begin, end, part, width, flush);  // sums only grow: some unit is the first
    }

    // online_softmax unit by unit.
    template <class Flush>
    __attribute__((noinline)) void raise_by_units(const float *scores, Operand<T> *weights, const float *scales,
                                                  int64_t begin, int64_t end, const SoftmaxState &part, int64_t width,
                                                  Flush &&flush) const {
        float &row_max = *part.row_max;
        int64_t flushed = begin;
        for (int64_t j = begin; j < end; j += LANES) {
            const int64_t count = min<int64_t>(end - j, LANES);
            vec after = exp_weights(scores, weights, scales, j, j + count, row_max, load(part.sums));
            const float top = any_above(after, MAX_WEIGHT) ? max_score(scores + j, count) : LOWEST;
            if (!(top <= row_max)) {  // or NaN, which has to show
                if (flushed < j) flush(flushed, j);
                memset((void *)(weights + flushed), 0, (j - flushed) * sizeof(*weights));
                flushed = j;
                const vec factor = broadcast(__builtin_exp2f(row_max - top));
                row_max = top;
                store(part.sums, load(part.sums) * factor);
                for (int64_t d = 0; d < width; d += LANES) store(part.acc + d, load(part.acc + d) * factor + vec{});  // + 0: no -0, to which a weight of 0 would add
                after = exp_weights(scores, weights, scales, j, j + count, row_max, load(part.sums));
            }
            store(part.sums, after);
        }
    }

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

    // 2 ^ (score * exponent_scale - row_max) of keys [begin, end) to `weights`, times the values' scales if there are
    // some; returns `total` and the sum of the powers, lane by lane.
    vec exp_weights(const float *scores, Operand<T> *weights, const float *scales, int64_t begin, int64_t end,
                    float row_max, vec total) const {
        const int64_t whole = begin + (end - begin) / LANES * LANES;
        const vec shift = broadcast(-row_max), scale = broadcast(exponent_scale);
        for (int64_t j = begin; j < whole; j += LANES) {
            const vec weight = fast_exp2<T>(load(scores + j) * scale + shift);
            total += weight;
            store(weights + j, scales ? weight * load(scales + j) : weight);
        }
        if (whole < end) {
            const vec weight = mask_tail(fast_exp2<T>(load(scores + whole) * scale + shift), end - whole, 0);
            total += weight;
            store(weights + whole, scales ? mask_tail(weight * load(scales + whole), end - whole, 0) : weight);
        }
        return total;
    }
};
