// Attention of many rows: keys and values are packed block by block and multiplied as weights are.
#pragma once

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
        weights = scratch.weights.get<Number>(SCORE_ROWS * KEYS);
        zeros = scratch.zeros.get<T>(state.width);
    }

    void run() {
        for (int64_t from = state.first_block(KEYS); from < state.end; from += KEYS) {
            const int64_t count = min<int64_t>(state.end - from, KEYS), used = padded_depth<Number>(count);
            for (int64_t some = 0; some < count; some += PACK_KEYS) {
                KvPrefetcher soon = prefetch.for_packing(from + some);
                pack(from + some, min(count - some, int64_t(PACK_KEYS)), keys + some * state.depth,
                     values + some * PANEL, used, soon);
            }
            KvPrefetcher next_block = prefetch.for_softmax(from);
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
            size = task.num_heads * kv.heads.dim * int64_t(sizeof(T));
        }
        void fetch(int lines) {
            for (; lines && key < end; lines--) {
                if (!at) offset = kv->key_offset(*task, key) * int64_t(sizeof(T));
                __builtin_prefetch((const char *)kv->k + offset + at, 0, 2);
                __builtin_prefetch((const char *)kv->v + offset + at, 0, 2);
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
            const int64_t lines = KEYS * state.task.num_heads * kv.heads.dim * int64_t(sizeof(T)) / 64;
            row_lines = rows * MAX_PREFETCH_LINES < lines ? 0 : int((lines + rows - 1) / rows);
        }
        KvPrefetcher for_packing(int64_t key) const {
            return row_lines ? KvPrefetcher() : KvPrefetcher(kv, state.task, key + PACK_KEYS, PACK_KEYS);
        }
        KvPrefetcher for_softmax(int64_t from) const {
            if (row_lines && from + KEYS < state.end) return KvPrefetcher(kv, state.task, from + KEYS, KEYS);
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
    Number *weights;        // [SCORE_ROWS][KEYS]
    const T *zeros;

    // Packs `count` keys and values from `first` on for each head of the task: the heads of a row lie side
    // by side in memory.
    void pack(int64_t first, int64_t count, Number *keys, Number *values, int64_t used, KvPrefetcher &prefetcher) const {
        const int64_t padded = round_up(count, PANEL), deep = padded_depth<Number>(count);
        const T *key_rows[PACK_KEYS], *value_rows[PACK_KEYS];
        auto fetch = [&](int lines) { prefetcher.fetch(lines); };
        for (int64_t head = 0; head < task.num_heads; head++) {
            for (int64_t j = 0; j < PACK_KEYS; j++) {
                const int64_t at = j < count && !head ? kv.key_offset(task, first + j) : 0;
                key_rows[j] = j >= count ? zeros : head ? key_rows[j] + dim : kv.k + at;
                value_rows[j] = j >= count ? zeros : head ? value_rows[j] + dim : kv.v + at;
            }
            pack_keys(key_rows, padded, dim, keys + head * KEYS * state.depth, fetch);
            pack_values(value_rows, deep, dim, used, values + head * KEYS * state.width, fetch);
        }
    }

    // Scores, weights and outputs of the rows [top, top + SCORE_ROWS) of a head for the packed block.
    void attend_rows(int64_t from, int64_t count, int64_t used, int64_t head, int64_t top,
                     KvPrefetcher &prefetcher) const {
        const HeadState<T> part = state.head(head);
        const int some = int(min<int64_t>(state.rows - top, SCORE_ROWS));
        const int64_t reach = min(state.seen_by(top + some - 1) - from, count);
        if (reach <= 0 || state.is_hidden(top, top + some, from + count)) return;
        const int64_t depth = state.depth, width = state.width, deep = min(padded_depth<Number>(reach), used);
        const bool starts = state.begins && !from && !state.first_seen;
        const int num_panels = int((reach + PANEL - 1) / PANEL);
        const Panels<Number> key_panels{keys + head * KEYS * depth, PANEL * depth, num_panels, depth};
        const Panels<Number> value_panels{values + head * KEYS * width, PANEL * used, int(width / PANEL), deep};
        with_level<Number>([&](auto level) {
            level.template gemm_into<false>(part.queries + top * depth, depth, some, key_panels, scores, KEYS);
        });
        for (int m = 0; m < some; m++) {
            const int64_t row = top + m;
            prefetcher.fetch(prefetch.row_lines);
            kv.softmax_row(state, row, from, count, deep, scores + m * KEYS, weights + m * KEYS, part.row_max[row],
                           part.sums + row * LANES, starts ? nullptr : part.acc + row * width, width);
        }
        with_level<Number>([&](auto level) {
            float *out = part.acc + top * width;
            if (starts)
                level.template gemm_into<false>(weights, KEYS, some, value_panels, out, width);
            else
                level.template gemm_into<true>(weights, KEYS, some, value_panels, out, width);
        });
    }
};
