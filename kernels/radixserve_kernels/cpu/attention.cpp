// Attention over pages, each task by the reader that suits its size.
#include "attention.h"

#include "attention_amx.h"
#include "attention_packed.h"

template <class T, class A>
void Attention<T, A>::run(const TeamThread &thread, const T *q, int64_t q_stride, const T *k, const T *v, A *out,
                          int64_t out_stride, const Features &features) {
    Attention own = *this;
    own.q = q, own.q_stride = q_stride, own.out = out, own.out_stride = out_stride, own.features = features;
    const PagedKv<T> kv(plan, heads, features, k, v);
    const bool is_shared = work() > 2 * MIN_PHASE_NS;  // else thread 0 does it alone
    size_t first = 0;
    for (size_t end : plan.level_ends) {
        while (is_shared || thread.index == 0) {
            const size_t i = first + size_t(thread.claim());
            if (i >= end) break;
            own.attend(kv, plan.tasks[i], i + 1 < end ? &plan.tasks[i + 1] : nullptr, scratches[thread.index]);
        }
        first = end;
        thread.barrier();
    }
}

template <class T, class A>
void Attention<T, A>::attend(const PagedKv<T> &kv, const Task &task, const Task *next, ThreadScratch &scratch) {
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
    int64_t *first_seen = features.has_span() ? scratch.first_seen.get<int64_t>(task.num_queries) : nullptr;
    const int64_t first = first_seen ? find_first_seen(task, tokens, first_seen) : 0;
    const TaskState<T> state{task, group, rows, depth, width, seen, end, first, first_seen, causal, begins, all};
    for (int64_t head = 0; head < task.num_heads; head++) load_state(state, head, tokens);
    read_keys(kv, state, next, is_direct<T>(num_queries * group, dim, exact), scratch);
    for (int64_t head = 0; head < task.num_heads; head++) store_state(state, head, tokens);
}

template <class T, class A>
void Attention<T, A>::read_keys(const PagedKv<T> &kv, const TaskState<T> &state, const Task *next, bool direct,
                             ThreadScratch &scratch) {
    if (!direct) return PackedReader<T>(kv, state, next, scratch).run();
#if defined(RADIXSERVE_AMX)
    if constexpr (std::is_same<T, bf16>::value)
        if (has_amx) return attend_amx(kv, state, next, scratch);
#endif
    attend_direct(kv, state, next, scratch);
}

template <class T, class A>
int64_t Attention<T, A>::find_first_seen(const Task &task, const int64_t *tokens, int64_t *first_seen) const {
    const int64_t first_key = jobs.first_key[task.job];
    int64_t least = INT64_MAX;
    for (int64_t i = 0; i < task.num_queries; i++) {
        const int64_t first = features.first_seen(jobs.positions[tokens[i]]) - first_key;
        first_seen[i] = first > 0 ? first : 0;
        least = min(least, first_seen[i]);
    }
    return least;
}

template <class T, class A>
float *Attention<T, A>::partial_state_of(int64_t token, int64_t head) const {
    return partial_state + (token * heads.num_heads + head) * partial_size();
}

template <class T, class A>
void Attention<T, A>::load_state(const TaskState<T> &state, int64_t head_of_task, const int64_t *tokens) {
    const int64_t first = (state.task.first_head + head_of_task) * state.group, dim = heads.dim;
    const HeadState<T> part = state.head(head_of_task);
    for (int64_t row = 0; row < state.rows; row++) {
        const int64_t token = tokens[row / state.group], head = first + row % state.group;
        Operand<T> *query = part.queries + row * state.depth;
        widen(q + token * q_stride + head * dim, dim, query);
        if (state.depth > dim) memset((void *)(query + dim), 0, (state.depth - dim) * sizeof(*query));
        part.row_max[row] = LOWEST;
        store(part.sums + row * LANES, vec{});
        float *acc = part.acc + row * state.width;
        if (state.begins) {
            if (state.first_seen) memset(acc, 0, state.width * sizeof(float));  // perhaps no key is read
            continue;
        }
        const float *from = partial_state_of(token, head);
        memcpy(acc, from, dim * sizeof(float));
        memset(acc + dim, 0, (state.width - dim) * sizeof(float));
        part.row_max[row] = from[dim];
        store(part.sums + row * LANES, load(from + dim + 1));
    }
}

template <class T, class A>
void Attention<T, A>::store_state(const TaskState<T> &state, int64_t head_of_task, const int64_t *tokens) {
    const int64_t first = (state.task.first_head + head_of_task) * state.group, dim = heads.dim;
    const HeadState<T> part = state.head(head_of_task);
    const bool ends = jobs.flags[state.task.job] & ENDS;
    for (int64_t row = 0; row < state.rows; row++) {
        const int64_t token = tokens[row / state.group], head = first + row % state.group;
        const float *from = part.acc + row * state.width;
        if (!ends) {
            float *to = partial_state_of(token, head);
            memcpy(to, from, dim * sizeof(float));
            to[dim] = part.row_max[row];
            store(to + dim + 1, load(part.sums + row * LANES));
            continue;
        }
        A *to = out + token * out_stride + head * dim;
        float sum = reduce_add(load(part.sums + row * LANES));
        if (features.sinks) sum += __builtin_exp2f(features.sinks[head] * LOG2_E - part.row_max[row]);
        const float share = 1.0f / sum;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d) * broadcast(share));
        for (; d < dim; d++) store1(to + d, from[d] * share);
    }
}

template class Attention<RADIXSERVE_NUMBER, float>;
template class Attention<RADIXSERVE_NUMBER, bf16>;
