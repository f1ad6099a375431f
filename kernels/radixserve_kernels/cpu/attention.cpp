// Attention over pages, each task by the reader that suits its size.
#include "attention.h"

#include <algorithm>

#include "attention_amx.h"
#include "attention_packed.h"
#include "attention_split.h"

template <class T, class A>
void Attention<T, A>::run(const TeamThread &thread, const T *q, int64_t q_stride, const T *k, const T *v, A *out,
                          int64_t out_stride, const Features &features, const int32_t *page_ids) {
    Attention own = *this;
    own.q = q, own.q_stride = q_stride, own.out = out, own.out_stride = out_stride, own.features = features;
    const PagedKv<T> kv(plan, heads, features, k, v, page_ids);
    const bool is_shared = work() > 2 * MIN_PHASE_NS;  // else thread 0 does it alone
    size_t first = 0;
    for (size_t level = 0; level < plan.level_ends.size(); level++) {
        const size_t end = plan.level_ends[level];
        int64_t claimed = 0;
        while (is_shared || thread.index == 0) {
            claimed = thread.claim();
            const size_t i = first + size_t(claimed);
            if (i >= end) break;
            const Task &task = plan.tasks[i];
            if (!(splits && task.is_split))
                own.attend(kv, task, i + 1 < end ? &plan.tasks[i + 1] : nullptr, scratches[thread.index]);
        }
        const bool has_split = std::any_of(plan.splits.begin(), plan.splits.end(),
                                           [&](const Split &split) { return split.level == int64_t(level); });
        if (splits && has_split)
            own.run_splits(thread, kv, int64_t(level), int64_t(end - first), claimed);
        else
            thread.barrier();
        first = end;
    }
}

template <class T, class A>
TaskState<T> Attention<T, A>::make_state(const Task &task, const HeadState<T> &all, ThreadScratch &scratch) const {
    const int64_t group = heads.group(), rows = task.num_queries * group;
    const int64_t num_queries = jobs.query_indptr[task.job + 1] - jobs.query_indptr[task.job];
    const bool causal = jobs.flags[task.job] & CAUSAL, begins = jobs.flags[task.job] & BEGINS;
    const int64_t num_keys = jobs.num_keys[task.job], seen = num_keys - num_queries + task.first_query + 1;
    const int64_t end = causal ? seen + task.num_queries - 1 : num_keys;
    int64_t *first_seen = features.has_span() ? scratch.first_seen.get<int64_t>(task.num_queries) : nullptr;
    const int64_t first = first_seen ? find_first_seen(task, tokens_of(task), first_seen) : 0;
    return {task, group, rows, depth(), width(), seen, end, first, first_seen, causal, begins, all};
}

template <class T, class A>
HeadState<T> Attention<T, A>::own_buffers(const Task &task, ThreadScratch &scratch) const {
    const int64_t total = task.num_queries * heads.group() * task.num_heads;
    return {scratch.queries.get<Operand<T>>(total * depth()), scratch.acc.get<float>(total * width()),
            scratch.row_max.get<float>(total), scratch.sums.get<float>(total * LANES)};
}

template <class T, class A>
void Attention<T, A>::attend(const PagedKv<T> &kv, const Task &task, const Task *next, ThreadScratch &scratch) {
    const TaskState<T> state = make_state(task, own_buffers(task, scratch), scratch);
    const int64_t rows = (jobs.query_indptr[task.job + 1] - jobs.query_indptr[task.job]) * heads.group();
    for (int64_t head = 0; head < task.num_heads; head++) load_state(state, head);
    read_keys(kv, state, next, is_direct<T>(rows, heads.dim, exact), scratch);
    for (int64_t head = 0; head < task.num_heads; head++) store_state(state, head);
}

template <class T, class A>
void Attention<T, A>::run_splits(const TeamThread &thread, const PagedKv<T> &kv, int64_t level, int64_t num_tasks,
                                  int64_t claimed) {
    ThreadScratch &scratch = scratches[thread.index];
    SplitReader<T> reader(kv, thread, scratch);
    // Spreads call(split's task, its buffers, part) over the threads; `first` is the claim of the first part.
    auto share = [&](int64_t first, int64_t claimed, auto &&num_parts, auto &&call) {
        for_splits([&](const Split &split, const SplitBuffers<T> &buffers) {
            if (split.level != level) return;
            const int64_t parts = num_parts(buffers);
            for (; claimed < first + parts; claimed = thread.claim()) call(split.task, buffers, claimed - first);
            first += parts;
        });
        thread.barrier();
    };
    share(num_tasks, claimed, reader.num_units, [&](const Task &task, const SplitBuffers<T> &buffers, int64_t unit) {
        const TaskState<T> state = make_state(task, own_buffers(task, scratch), scratch);
        for (int64_t head = 0; head < task.num_heads; head++) load_state(state, head);  // the queries
        reader.score(state, buffers, unit);
    });
    const auto num_heads = [&](const SplitBuffers<T> &) { return heads.num_kv_heads; };
    share(0, thread.claim(), num_heads, [&](const Task &task, const SplitBuffers<T> &buffers, int64_t head) {
        const TaskState<T> state = make_state(task, buffers.state, scratch);
        load_state(state, head);
        reader.online_softmax(state, buffers, head);
        if (!head) buffers.num_done->store(0);
    });
    share(0, thread.claim(), reader.num_units, [&](const Task &task, const SplitBuffers<T> &buffers, int64_t unit) {
        const TaskState<T> state = make_state(task, buffers.state, scratch);
        reader.pv_gemm(state, buffers, unit);
        if (buffers.num_done->fetch_add(1) + 1 < reader.num_units(buffers)) return;
        for (int64_t head = 0; head < task.num_heads; head++) {  // the last one adds up
            reader.add(state, buffers, head);
            store_state(state, head);
        }
    });
}

template <class T, class A> template <class Call> int64_t Attention<T, A>::for_splits(Call &&call) const {
    int64_t size = 0;
    for (const Split &split : plan.splits) {
        const int64_t rows = split.task.num_queries * heads.num_heads;
        const SplitBuffers<T> buffers(split_buffer + size, split, rows, depth(), width());
        size += buffers.num_floats;
        call(split, buffers);
    }
    return size;
}

template <class T, class A>
void Attention<T, A>::prepare(std::vector<ThreadScratch> &scratches, Scratch &state_scratch) {
    if (scratches.size() < size_t(max_threads)) scratches.resize(max_threads);
    this->scratches = scratches.data();
    splits = !plan.splits.empty() && work() > 2 * MIN_PHASE_NS && !is_by_tiles<T>() &&
             is_direct<T>(SPLIT_ROWS, heads.dim, exact);
    if (splits) split_buffer = scratches[0].split.get<float>(for_splits([](const Split &, const SplitBuffers<T> &) {}));
    if (plan.has_state) partial_state = state_scratch.get<float>(jobs.num_tokens * heads.num_heads * partial_size());
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
void Attention<T, A>::load_state(const TaskState<T> &state, int64_t head_of_task) {
    const int64_t *tokens = tokens_of(state.task);
    const int64_t first = (state.task.first_head + head_of_task) * state.group, dim = heads.dim;
    const HeadState<T> part = state.head(head_of_task);
    for (int64_t row = 0; row < state.rows; row++) {
        const int64_t token = tokens[row / state.group], head = first + row % state.group;
        Operand<T> *query = part.queries + row * state.depth;
        convert(q + token * q_stride + head * dim, dim, query);
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
void Attention<T, A>::store_state(const TaskState<T> &state, int64_t head_of_task) {
    const int64_t *tokens = tokens_of(state.task);
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
#if defined(RADIXSERVE_IS_BF16)
template class Attention<bf16, bf16>;
#endif
