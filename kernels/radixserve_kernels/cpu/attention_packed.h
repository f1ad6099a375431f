// Attention of many rows: keys and values are packed block by block and multiplied as weights are.
#pragma once

#include <algorithm>
#include <optional>

#include "attention_int8.h"
#include "attention_task.h"
#include "pack_kv.h"

constexpr int PACK_KEYS = 32;           // packed at a time
constexpr int SCORE_ROWS = 96;          // rows of one product
constexpr int MAX_PREFETCH_LINES = 4;   // with each row, of K and of V

template <class T> class PackedReader {
    using Number = Operand<T>;

  public:
    PackedReader(const PagedKv<T> &kv, const TaskState<T> &state, const Task *next, ThreadScratch &scratch)
        : kv(kv), state(state), task(state.task), prefetch(kv, state, next), dim(kv.heads.dim) {
        keys = scratch.keys.get<Number>(task.num_heads * KEYS * state.depth);
        values = scratch.values.get<Number>(task.num_heads * KEYS * state.width);
        scores = scratch.scores.get<float>(SCORE_ROWS * KEYS);
        weights = scratch.weights.get<Number>((SCORE_ROWS + 1) * KEYS);
        zeros = (const T *)scratch.zeros.get<char>(
            std::max(state.width * int64_t(sizeof(T)), task.num_heads * kv.head_bytes));
        scales = kv.scales(task, scratch);
        if (kv.type == SAME_KV) return;
        if (has_integer_scores(kv)) {
            queries.emplace(state, dim, scratch);
            key_numbers = scratch.key_numbers.get<char>(task.num_heads * KEYS * dim);
        }
        if (reads_integers(kv)) {
            round_queries();
            return;
        }
        widened_keys = scratch.key_rows.get<T>(PACK_KEYS * task.num_heads * dim);
        widened_values = scratch.value_rows.get<T>(PACK_KEYS * task.num_heads * dim);
    }

    void run() {
        for (int64_t from = state.begin, end; from < state.end; from = end) {
            state.begin_block(from);
            end = state.block_end(from);
            const int64_t count = end - from, used = padded_depth<Number>(count);
            for (int64_t some = 0; some < count; some += PACK_KEYS) {
                KvPrefetcher soon = prefetch.for_packing(from + some);
                pack(from + some, min(count - some, int64_t(PACK_KEYS)), keys + some * state.depth,
                     values + some * PANEL, used, scales.from_key(some),
                     key_numbers + (queries ? some * dim : 0), soon);
            }
            KvPrefetcher next_block = prefetch.for_softmax(end);
            for (int64_t head = 0; head < task.num_heads; head++)
                for (int64_t top = 0; top < state.rows; top += SCORE_ROWS)
                    attend_rows(from, count, used, head, top, next_block);
        }
        release_tiles();
    }

  private:
    // Prefetches keys and values of a task line by line: rows of pages lie apart, where the processor does
    // not predict them, and a burst would delay other loads.
    class KvPrefetcher {
      public:
        KvPrefetcher() = default;
        KvPrefetcher(const PagedKv<T> &kv, const Task &task, int64_t first, int64_t count)
            : kv(&kv), task(&task), key(first), end(first) {
            if (kv.plan.is_far || task.num_queries > 1) end = min(first + count, kv.plan.jobs.num_keys[task.job]);
            size = task.num_heads * kv.head_bytes;
        }
        void fetch(int lines) {
            for (; lines && key < end; lines--) {
                if (!at) offset = kv->key_offset(*task, key);
                __builtin_prefetch(kv->k + offset + at, 0, 2);
                __builtin_prefetch(kv->v + offset + at, 0, 2);
                at += 64;
                if (at >= size) at = 0, key++;
            }
        }

      private:
        const PagedKv<T> *kv = nullptr;
        const Task *task = nullptr;
        int64_t key = 0, end = 0, size = 0, at = 0, offset = 0;
    };

    // Policy: with enough rows the next block is prefetched between the rows of the softmax, since packing
    // has too little work to hide the latency; with fewer rows the next keys are, during packing.
    struct PrefetchPolicy {
        const PagedKv<T> &kv;
        const TaskState<T> &state;
        const Task *next;  // likely to follow, or null
        int row_lines;     // lines with each row of the softmax; 0: prefetch during packing

        PrefetchPolicy(const PagedKv<T> &kv, const TaskState<T> &state, const Task *next)
            : kv(kv), state(state), next(next) {
            const int64_t rows = state.rows * state.task.num_heads;
            const int64_t lines = KEYS * state.task.num_heads * kv.head_bytes / 64;
            row_lines = rows * MAX_PREFETCH_LINES < lines ? 0 : int((lines + rows - 1) / rows);
        }
        KvPrefetcher for_packing(int64_t key) const {
            return row_lines ? KvPrefetcher() : KvPrefetcher(kv, state.task, key + PACK_KEYS, PACK_KEYS);
        }
        KvPrefetcher for_softmax(int64_t from) const {
            if (row_lines && from < state.end) return KvPrefetcher(kv, state.task, from, KEYS);
            return row_lines && next ? KvPrefetcher(kv, *next, 0, KEYS) : KvPrefetcher();
        }
    };

    const PagedKv<T> &kv;
    const TaskState<T> &state;
    const Task &task;
    const PrefetchPolicy prefetch;
    const int64_t dim;
    Number *keys, *values;  // of a block, in panels: [heads][KEYS x depth], [heads][KEYS x width]
    float *scores;          // [SCORE_ROWS][KEYS]
    Number *weights;        // [SCORE_ROWS + 1][KEYS], the last of them for `flush`
    const T *zeros;
    T *widened_keys = nullptr, *widened_values = nullptr;  // [PACK_KEYS][heads][dim] of what is stored otherwise
    BlockScales scales;
    std::optional<IntegerQueries> queries;  // where keys are multiplied as the integers that are stored
    char *key_numbers = nullptr;            // of a block, in panels: [heads][KEYS x dim]

    // Packs `count` keys and values from `first` on for each head of the task: the heads of a row lie side
    // by side in memory.
    void pack(int64_t first, int64_t count, Number *keys, Number *values, int64_t used, const BlockScales &scales,
              char *numbers, KvPrefetcher &prefetcher) const {
        if (reads_integers(kv)) return pack_numbers(first, count, keys, values, used, scales, numbers, prefetcher);
        const int64_t padded = round_up(count, PANEL), deep = padded_depth<Number>(count);
        const T *key_rows[PACK_KEYS], *value_rows[PACK_KEYS];
        auto fetch = [&](int lines) { prefetcher.fetch(lines); };
        if (widened_keys) widen_rows(first, count, scales);
        const int64_t size = task.num_heads * dim;
        for (int64_t head = 0; head < task.num_heads; head++) {
            for (int64_t j = 0; j < PACK_KEYS; j++) {
                if (j >= count) {
                    key_rows[j] = value_rows[j] = zeros;
                } else if (head) {
                    key_rows[j] += dim, value_rows[j] += dim;
                } else if (widened_keys) {
                    key_rows[j] = widened_keys + j * size, value_rows[j] = widened_values + j * size;
                } else {
                    const int64_t offset = kv.key_offset(task, first + j);
                    key_rows[j] = (const T *)(kv.k + offset), value_rows[j] = (const T *)(kv.v + offset);
                }
            }
            pack_keys(key_rows, padded, dim, keys + head * KEYS * state.depth, fetch);
            pack_values(value_rows, deep, dim, used, values + head * KEYS * state.width, fetch);
        }
    }

    void round_queries() const {
        for (int64_t row = 0; row < state.rows * task.num_heads && ROUNDS_QUERIES; row++) {
            float *query = (float *)(state.all.queries + row * state.depth);
            const RoundedQuery rounded(query, dim);
            for (int64_t d = 0; d < dim; d += LANES) store(query + d, rounded.rounded(query + d));
        }
    }

    void widen_rows(int64_t first, int64_t count, const BlockScales &scales) const {
        const int64_t size = task.num_heads * dim;
        for (int64_t j = 0; j < count; j++) {
            const int64_t offset = kv.key_offset(task, first + j);
            widen_heads(kv.type, kv.k + offset, task.num_heads, dim, widened_keys + j * size, scales.keys + j, KEYS);
            widen_heads(kv.type, kv.v + offset, task.num_heads, dim, widened_values + j * size, scales.values + j, KEYS);
        }
    }

    // `pack` of integers, which are widened to be packed, or stay integers as keys.
    void pack_numbers(int64_t first, int64_t count, Number *keys, Number *values, int64_t used, const BlockScales &scales,
                      char *numbers, KvPrefetcher &prefetcher) const {
        int64_t offsets[PACK_KEYS];
        const char *key_rows[PACK_KEYS], *value_rows[PACK_KEYS];
        kv.key_offsets(task, first, first + count, offsets);
        for (int64_t j = 0; j < PACK_KEYS; j++) {
            key_rows[j] = j < count ? kv.k + offsets[j] : (const char *)zeros;
            value_rows[j] = j < count ? kv.v + offsets[j] : (const char *)zeros;
        }
        for (int64_t head = 0; head < task.num_heads; head++) {
            const int64_t at = head * kv.head_bytes;
            prefetcher.fetch(16);
            load_scales(key_rows, at + dim, count, scales.keys + head * KEYS);
            load_scales(value_rows, at + dim, count, scales.values + head * KEYS);
            if (queries)
                pack_integer_keys(key_rows, round_up(count, PANEL), at, dim, numbers + head * KEYS * dim);
            else if constexpr (sizeof(Number) == 4)  // else there are `queries`
                pack_integer_keys(key_rows, round_up(count, PANEL), at, dim, keys + head * KEYS * state.depth);
            prefetcher.fetch(16);
            pack_integer_values(value_rows, padded_depth<Number>(count), at, dim, used, values + head * KEYS * state.width);
        }
    }

    // Scores, weights and outputs of the rows [top, top + SCORE_ROWS) of a head for the packed block.
    void attend_rows(int64_t from, int64_t count, int64_t used, int64_t head, int64_t top,
                     KvPrefetcher &prefetcher) const {
        const HeadState<T> of_head = state.head(head);
        const int some = int(min<int64_t>(state.rows - top, SCORE_ROWS));
        const int64_t reach = min(state.seen_by(top + some - 1) - from, count);
        if (reach <= 0 || state.is_hidden(top, top + some, from + count)) return;
        const int64_t depth = state.depth, width = state.width, deep = min(padded_depth<Number>(reach), used);
        const int num_panels = int((reach + PANEL - 1) / PANEL);
        const Panels<Number> key_panels{keys + head * KEYS * depth, PANEL * depth, num_panels, depth};
        const Panels<Number> value_panels{values + head * KEYS * width, PANEL * used, int(width / PANEL), deep};
        if (queries)
            packed_integer_scores(*queries, head * state.rows + top, some, key_numbers + head * KEYS * dim,
                                  num_panels, scales.of_head(head).keys, scores);
        else
            multiply_keys(of_head.queries + top * depth, some, key_panels);
        BlockScales weight_scales = scales.of_head(head);
        if (queries) weight_scales.keys = nullptr;  // the scores have them
        for (int m = 0; m < some; m++) {
            const int64_t row = top + m;
            const SoftmaxState part = of_head.part.from_row(row, width);
            prefetcher.fetch(prefetch.row_lines);
            kv.softmax_row(state, row, from, count, deep, scores + m * KEYS, weights + m * KEYS, weight_scales, part,
                           [&](int64_t first, int64_t end) {
                               flush(weights + m * KEYS, first, end, value_panels, part.acc);
                           });
        }
        with_level<Number>([&](auto level) {
            level.template gemm_into<Accumulate>(weights, KEYS, some, value_panels, of_head.part.acc + top * width,
                                                 width);
        });
    }

    // Scores of some rows for packed keys.
    void multiply_keys(const Number *queries, int rows, const Panels<Number> &key_panels) const {
        if constexpr (HAS_LANE_SCORES)
            if (has_lane_scores(dim) && !reads_integers(kv)) {
                for (int panel = 0; panel < key_panels.count; panel++)
                    for_row_blocks(rows, [&](int first, int count) {
                        tile_rows_by_lanes<4 / sizeof(T)>(count, queries + first * state.depth, state.depth,
                                                          key_panels[panel], dim, scores + first * KEYS + panel * PANEL,
                                                          KEYS);
                    });
                return;
            }
        with_level<Number>([&](auto level) {
            level.template gemm_into<Store>(queries, state.depth, rows, key_panels, scores, KEYS);
        });
    }

    // Adds a row's values of the keys [first, end) of the block to its output.
    void flush(const Number *row_weights, int64_t first, int64_t end, const Panels<Number> &value_panels,
               float *acc) const {
        Number *some = weights + SCORE_ROWS * KEYS;
        memset((void *)some, 0, KEYS * sizeof(*some));
        memcpy((void *)(some + first), row_weights + first, (end - first) * sizeof(*some));
        with_level<Number>([&](auto level) {
            level.template gemm_into<Accumulate>(some, KEYS, 1, value_panels, acc, state.width);
        });
    }
};
