// Attention of few rows to many keys: the keys are spread over the threads, with the bits that one thread computes.
//
// All threads meet after each phase: scores of every block; weights of each row, in order, since those of a block
// depend on the maximum so far; weighted values of every block, which the last thread adds up in order.
#pragma once

#include "attention_direct.h"

constexpr int64_t UNIT_BLOCKS = 2;  // that a thread takes at a time

// Memory that all threads share for a split job.
template <class T> struct SplitBuffers {
    int64_t num_blocks, stride;
    HeadState<T> state;
    float *factors;         // [rows][blocks] of the sums of the blocks before
    float *scores;          // [rows][stride]
    Operand<T> *weights;    // [rows][stride]
    float *partial;         // [blocks][rows][width] weighted values
    std::atomic<int64_t> *num_done;  // units that are weighted
    int64_t num_floats = 0;

    // `rows` of all heads.
    SplitBuffers(float *memory, const Split &split, int64_t rows, int64_t depth, int64_t width)
        : num_blocks((split.num_keys + KEYS - 1) / KEYS), stride(num_blocks * KEYS) {
        auto take = [&](auto *&part, int64_t count) {
            part = (std::remove_reference_t<decltype(part)>)(memory + num_floats);
            num_floats += round_up(count * int64_t(sizeof(*part)), 64) / 4;
        };
        take(state.queries, rows * depth), take(state.acc, rows * width), take(state.row_max, rows);
        take(state.sums, rows * LANES), take(factors, rows * num_blocks), take(scores, rows * stride);
        take(weights, rows * stride), take(partial, num_blocks * rows * width), take(num_done, 1);
    }
};

// One thread's part of the split jobs of a level.
template <class T> class SplitReader {
  public:
    SplitReader(const PagedKv<T> &kv, const TeamThread &thread, ThreadScratch &scratch)
        : kv(kv), thread(thread), scratch(scratch), dim(kv.heads.dim),
          zeros(scratch.zeros.get<T>(kv.heads.num_kv_heads * dim)) {}

    static int64_t num_units(const SplitBuffers<T> &buffers) {
        return (buffers.num_blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
    }

    void score(const TaskState<T> &state, const SplitBuffers<T> &buffers, int64_t unit) {
        for_blocks(kv.k, state, buffers, unit, [&](int64_t block, const T *const *keys, int64_t count, auto &soon) {
            qk_block(state, keys, count, dim, buffers.scores + block * KEYS, buffers.stride, soon);
        });
    }

    // The rows of one head.
    void online_softmax(const TaskState<T> &state, const SplitBuffers<T> &buffers, int64_t head) {
        const HeadState<T> part = state.head(head);
        for (int64_t row = 0; row < state.rows; row++)
            for (int64_t from = state.first_block(KEYS); from < state.end; from += KEYS) {
                const int64_t at = head * state.rows + row, count = min<int64_t>(state.end - from, KEYS);
                float factor[LANES];
                store(factor, broadcast(1));
                float *scores = buffers.scores + at * buffers.stride + from;
                Operand<T> *weights = buffers.weights + at * buffers.stride + from;
                kv.softmax_row(state, row, from, count, padded_depth<Operand<T>>(count), scores, weights,
                               part.row_max[row], part.sums + row * LANES, factor, LANES);
                buffers.factors[at * buffers.num_blocks + from / KEYS] = factor[0];
            }
    }

    void pv_gemm(const TaskState<T> &state, const SplitBuffers<T> &buffers, int64_t unit) {
        const int64_t rows = state.task.num_heads * state.rows;
        for_blocks(kv.v, state, buffers, unit, [&](int64_t block, const T *const *values, int64_t count, auto &soon) {
            for (int64_t head = 0; head < state.task.num_heads; head++) {
                const int64_t at = head * state.rows;
                const Operand<T> *weights = buffers.weights + at * buffers.stride + block * KEYS;
                pv_block(state, head, weights, buffers.stride, values, count, dim, false,
                         buffers.partial + (block * rows + at) * state.width, soon);
            }
        });
    }

    // The rows of one head.
    void add(const TaskState<T> &state, const SplitBuffers<T> &buffers, int64_t head) {
        const int64_t rows = state.task.num_heads * state.rows, width = state.width;
        for (int64_t row = 0; row < state.rows; row++)
            for (int64_t block = state.first_block(KEYS) / KEYS; block * KEYS < state.end; block++) {
                const int64_t at = head * state.rows + row;
                float *acc = state.head(head).acc + row * width;
                const float *more = buffers.partial + (block * rows + at) * width;
                const float factor = buffers.factors[at * buffers.num_blocks + block];
                if (state.begins && !block && !state.first_seen) {
                    memcpy(acc, more, dim * sizeof(float));
                    continue;
                }
                if (factor != 1)
                    for (int64_t d = 0; d < dim; d += LANES) store(acc + d, load(acc + d) * broadcast(factor));
                for (int64_t d = 0; d < dim; d += LANES) store(acc + d, load(acc + d) + load(more + d));
            }
    }

  private:
    const PagedKv<T> &kv;
    const TeamThread &thread;
    ThreadScratch &scratch;
    const int64_t dim;
    const T *zeros;

    // call(block, rows [KEYS] of `from`, their number, prefetcher) for the blocks of a unit that are seen.
    template <class Call>
    void for_blocks(const T *from, const TaskState<T> &state, const SplitBuffers<T> &buffers, int64_t unit,
                    Call &&call) {
        const T *rows[KEYS];
        int64_t offsets_of[2][KEYS], *offsets = offsets_of[0], *later = offsets_of[1];
        auto find = [&](int64_t block, int64_t *offsets) {
            return block < buffers.num_blocks ? kv.key_offsets(state.task, block * KEYS, state.end, offsets) : 0;
        };
        const int64_t first = unit * UNIT_BLOCKS, end = min(first + UNIT_BLOCKS, buffers.num_blocks);
        int64_t count = find(first, offsets), num_later = 0;
        for (int64_t block = first; block < end; block++, count = num_later, std::swap(offsets, later)) {
            // After the last one this thread is likely to take a unit that is as many further as there are threads.
            num_later = find(block + 1 < end ? block + 1 : first + thread.size * UNIT_BLOCKS, later);
            RowPrefetcher<T> prefetcher(from, later, num_later, state.task.num_heads * dim);
            if (block < state.first / KEYS) continue;
            point_at(rows, from, offsets, count, zeros);
            call(block, rows, count, prefetcher);
        }
    }
};
