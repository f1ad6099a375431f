// Attention over pages: the tasks of a plan, level by level, each by the reader that suits its size.
//
// A job's keys are read once for all its queries and all query heads of a K/V head.
#pragma once

#include "attention_amx.h"
#include "attention_packed.h"

template <class T> class Attention {
  public:
    Attention(const Plan &plan, const Heads &heads) : plan(plan), jobs(plan.jobs), heads(heads) {}

    // q, out: [tokens, heads, dim] with a stride between tokens; k, v: [slots, kv_heads, dim].
    void run(const T *q, int64_t q_stride, const T *k, const T *v, T *out, int64_t out_stride,
             std::vector<ThreadScratch> &scratches, Scratch &state_scratch) {
        this->q = q, this->q_stride = q_stride, this->out = out, this->out_stride = out_stride;
        if (scratches.size() < size_t(max_threads)) scratches.resize(max_threads);
        if (plan.has_state)
            partial_state = state_scratch.get<float>(jobs.num_tokens * heads.num_heads * (heads.dim + 2));
        const PagedKv<T> kv(plan, heads, k, v);
        size_t first = 0;
        int threads = threads_for(4.0 * plan.key_rows * heads.dim);
        for (size_t end : plan.level_ends) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
            for (size_t i = first; i < end; i++)
                attend(kv, plan.tasks[i], i + 1 < end ? &plan.tasks[i + 1] : nullptr, scratches[thread_index()]);
            first = end;
        }
    }

  private:
    const Plan &plan;
    const Jobs &jobs;
    const Heads &heads;
    const T *q = nullptr;
    T *out = nullptr;
    int64_t q_stride = 0, out_stride = 0;
    float *partial_state = nullptr;  // [tokens][heads][dim + 2] between levels: acc, row_max, sum

    // `next` is likely to follow, or null.
    void attend(const PagedKv<T> &kv, const Task &task, const Task *next, ThreadScratch &scratch) {
        const int64_t group = heads.group(), rows = task.num_queries * group, dim = heads.dim;
        const int64_t depth = padded_depth<Operand<T>>(dim), width = round_up(dim, PANEL);
        const int64_t *tokens = jobs.query_tokens + jobs.query_indptr[task.job] + task.first_query;
        const int64_t num_queries = jobs.query_indptr[task.job + 1] - jobs.query_indptr[task.job];
        const bool causal = jobs.flags[task.job] & CAUSAL;
        const int64_t num_keys = jobs.num_keys[task.job], seen = num_keys - num_queries + task.first_query + 1;
        const int64_t total = rows * task.num_heads;
        const HeadState<T> all{scratch.queries.get<Operand<T>>(total * depth), scratch.acc.get<float>(total * width),
                               scratch.row_max.get<float>(total), scratch.sums.get<float>(total * LANES)};
        const int64_t end = causal ? seen + task.num_queries - 1 : num_keys;
        const bool begins = jobs.flags[task.job] & BEGINS;
        const TaskState<T> state{task, group, rows, depth, width, seen, end, causal, begins, all};
        for (int64_t head = 0; head < task.num_heads; head++) load_state(state, head, tokens);
        read_keys(kv, state, next, is_direct<T>(num_queries * group, dim), scratch);
        for (int64_t head = 0; head < task.num_heads; head++) store_state(state, head, tokens);
    }

    void read_keys(const PagedKv<T> &kv, const TaskState<T> &state, const Task *next, bool direct,
                   ThreadScratch &scratch) {
        if (!direct) return PackedReader<T>(kv, state, next, scratch).run();
#if defined(RADIXSERVE_AMX)
        if constexpr (std::is_same<T, bf16>::value)
            if (has_amx) return attend_amx(kv, state, next, scratch);
#endif
        attend_direct(kv, state, next, scratch);
    }

    float *partial_state_of(int64_t token, int64_t head) {
        return partial_state + (token * heads.num_heads + head) * (heads.dim + 2);
    }

    // Queries of one head, and the softmax state of earlier jobs.
    void load_state(const TaskState<T> &state, int64_t head_of_task, const int64_t *tokens) {
        const int64_t first = (state.task.first_head + head_of_task) * state.group, dim = heads.dim;
        const HeadState<T> part = state.head(head_of_task);
        for (int64_t row = 0; row < state.rows; row++) {
            const int64_t token = tokens[row / state.group], head = first + row % state.group;
            Operand<T> *query = part.queries + row * state.depth;
            widen(q + token * q_stride + head * dim, dim, query);
            if (state.depth > dim) memset((void *)(query + dim), 0, (state.depth - dim) * sizeof(*query));
            part.row_max[row] = LOWEST;
            store(part.sums + row * LANES, vec{});
            if (state.begins) continue;
            const float *from = partial_state_of(token, head);
            float *acc = part.acc + row * state.width;
            memcpy(acc, from, dim * sizeof(float));
            memset(acc + dim, 0, (state.width - dim) * sizeof(float));
            part.row_max[row] = from[dim], part.sums[row * LANES] = from[dim + 1];
        }
    }

    // The finished output of one head, or its softmax state for later jobs.
    void store_state(const TaskState<T> &state, int64_t head_of_task, const int64_t *tokens) {
        const int64_t first = (state.task.first_head + head_of_task) * state.group, dim = heads.dim;
        const HeadState<T> part = state.head(head_of_task);
        const bool ends = jobs.flags[state.task.job] & ENDS;
        for (int64_t row = 0; row < state.rows; row++) {
            const int64_t token = tokens[row / state.group], head = first + row % state.group;
            const float *from = part.acc + row * state.width;
            const float sum = reduce_add(load(part.sums + row * LANES));
            if (!ends) {
                float *to = partial_state_of(token, head);
                memcpy(to, from, dim * sizeof(float));
                to[dim] = part.row_max[row], to[dim + 1] = sum;
                continue;
            }
            T *to = out + token * out_stride + head * dim;
            const float share = 1.0f / sum;
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d) * broadcast(share));
            for (; d < dim; d++) store1(to + d, from[d] * share);
        }
    }
};
