// Attention over pages, each task by the reader that suits its size.
#include "attention.h"

#include <algorithm>

#include "attention_amx.h"
#include "attention_packed.h"

template <class T, class A>
void Attention<T, A>::run(const TeamThread &thread, const T *q, int64_t q_stride, const LayerKV &memory, A *out,
                          int64_t out_stride, const Features &features, const int32_t *page_ids) {
    Attention own = *this;
    own.q = q, own.q_stride = q_stride, own.out = out, own.out_stride = out_stride, own.features = features;
    const PagedKv<T> kv(plan, heads, features, memory, page_ids);
    own.is_rotated = kv.type == INT8_KV;
    own.rotates_queries = own.is_rotated && !has_integer_scores(kv);
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
TaskState<T> Attention<T, A>::make_state(const Task &task, ThreadScratch &scratch, int64_t begin, int64_t end) const {
    const int64_t group = heads.group(), rows = task.num_queries * group;
    const int64_t num_queries = jobs.query_indptr[task.job + 1] - jobs.query_indptr[task.job];
    const bool causal = jobs.flags[task.job] & CAUSAL, begins = jobs.flags[task.job] & BEGINS;
    const int64_t num_keys = jobs.num_keys[task.job], seen = num_keys - num_queries + task.first_query + 1;
    int64_t *first_seen = features.has_span() ? scratch.first_seen.get<int64_t>(task.num_queries) : nullptr;
    const int64_t first = first_seen ? find_first_seen(task, tokens_of(task), first_seen) / job_grid() * job_grid() : 0;
    const int64_t *seen_each = nullptr;
    if (causal && features.is_bidirectional && jobs.last_seen)
        seen_each = find_seen(task, tokens_of(task), scratch.seen.get<int64_t>(task.num_queries));
    const int64_t most = seen_each ? seen_each[task.num_queries - 1] : causal ? seen + task.num_queries - 1 : num_keys;
    return {task, group, rows, depth(), width(), jobs.first_key[task.job], seen, first > begin ? first : begin,
            min(end, most), first_seen, seen_each, causal, begins, own_buffers(task, scratch)};
}

template <class T, class A>
HeadState<T> Attention<T, A>::own_buffers(const Task &task, ThreadScratch &scratch) const {
    const int64_t total = task.num_queries * heads.group() * task.num_heads;
    return {scratch.queries.get<Operand<T>>(total * depth()),
            {scratch.acc.get<float>(total * width()), scratch.row_max.get<float>(total),
             scratch.sums.get<float>(total * LANES)},
            {scratch.merged.get<float>(total * width()), scratch.merged_max.get<float>(total),
             scratch.merged_sums.get<float>(total * LANES)}};
}

template <class T, class A>
void Attention<T, A>::attend(const PagedKv<T> &kv, const Task &task, const Task *next, ThreadScratch &scratch) {
    const TaskState<T> state = make_state(task, scratch, 0, jobs.num_keys[task.job]);
    for (int64_t head = 0; head < task.num_heads; head++) load_state(state, head);
    read_keys(kv, state, next, scratch);
    for (int64_t head = 0; head < task.num_heads; head++) store_state(state, head);
}

template <class T, class A>
void Attention<T, A>::run_splits(const TeamThread &thread, const PagedKv<T> &kv, int64_t level, int64_t num_tasks,
                                  int64_t claimed) {
    ThreadScratch &scratch = scratches[thread.index];
    int64_t first = num_tasks;
    for_splits([&](const Split &split, const SplitBuffers &buffers) {
        if (split.level != level) return;
        const int64_t num_units = split.num_units();
        for (; claimed < first + num_units; claimed = thread.claim()) {
            read_unit(kv, split, buffers, claimed - first, scratch);
            if (buffers.num_done->fetch_add(1) + 1 == num_units) merge_partitions(split, buffers, scratch);
        }
        first += num_units;
    });
    thread.barrier();
}

template <class T, class A>
void Attention<T, A>::read_unit(const PagedKv<T> &kv, const Split &split, const SplitBuffers &buffers, int64_t unit,
                                ThreadScratch &scratch) {
    const int64_t partition = unit % split.num_partitions();
    Task task = split.task;
    task.first_head = unit / split.num_partitions() * split.unit_heads, task.num_heads = split.unit_heads;
    const TaskState<T> state = make_state(task, scratch, split.key(partition), split.key(partition + 1));
    float *to = buffers.states + (partition * split.task.num_heads + task.first_head) * state.rows * partial_size();
    for (int64_t head = 0; head < task.num_heads; head++) {
        load_state(state, head);
        for (int64_t row = 0; partition && row < state.rows; row++) {  // the job's earlier state is in the first
            state.head(head).part.from_row(row, state.width).clear(state.width);
            state.head(head).merged.row_max[row] = LOWEST;
        }
    }
    read_keys(kv, state, nullptr, scratch);
    for (int64_t head = 0; head < task.num_heads; head++)
        for (int64_t row = 0; row < state.rows; row++, to += partial_size()) save_row(state, state.head(head), row, to);
}

template <class T, class A>
void Attention<T, A>::merge_partitions(const Split &split, const SplitBuffers &buffers, ThreadScratch &scratch) {
    const TaskState<T> state = make_state(split.task, scratch, 0, split.num_keys);
    const int64_t num_rows = split.task.num_heads * state.rows, dim = heads.dim;
    for (int64_t row = 0; row < num_rows; row++) {
        const float *from = buffers.states + row * partial_size();
        restore_row(state, state.all, row, from);
        const SoftmaxState part = state.all.part.from_row(row, state.width);
        for (int64_t partition = 1; partition < split.num_partitions(); partition++) {
            merge_partition(part, state.all.merged.from_row(row, state.width), state.width);
            from += num_rows * partial_size();
            memcpy(part.acc, from, dim * sizeof(float));
            *part.row_max = from[dim];
            store(part.sums, load(from + dim + 1));
        }
    }
    buffers.num_done->store(0);
    for (int64_t head = 0; head < split.task.num_heads; head++) store_state(state, head);
}

template <class T, class A> template <class Call> int64_t Attention<T, A>::for_splits(Call &&call) const {
    int64_t size = 0;
    for (const Split &split : plan.splits) {
        const SplitBuffers buffers(split_buffer + size, split,
                                   split.task.num_queries * heads.group() * partial_size());
        size += buffers.num_floats;
        call(split, buffers);
    }
    return size;
}

template <class T, class A>
void Attention<T, A>::prepare(std::vector<ThreadScratch> &scratches, Scratch &state_scratch,
                              Scratch &split_scratch) {
    if (scratches.size() < size_t(max_threads)) scratches.resize(max_threads);
    this->scratches = scratches.data();
    splits = !plan.splits.empty() && work() > 2 * MIN_PHASE_NS;
    if (splits) {
        split_buffer = split_scratch.get<float>(for_splits([](const Split &, const SplitBuffers &) {}));
        for_splits([](const Split &, const SplitBuffers &buffers) { new (buffers.num_done) std::atomic<int64_t>(0); });
    }
    if (plan.has_state) partial_state = state_scratch.get<float>(jobs.num_tokens * heads.num_heads * partial_size());
}

template <class T, class A>
void Attention<T, A>::read_keys(const PagedKv<T> &kv, const TaskState<T> &state, const Task *next,
                                ThreadScratch &scratch) {
    const int64_t job = state.task.job, num_queries = jobs.query_indptr[job + 1] - jobs.query_indptr[job];
    // By tiles the bits are those of the packed product: other readers of few rows have another order.
    if (!is_direct<T>(num_queries * heads.group(), heads.dim) ||
        (is_by_tiles<T>() && kv.type != SAME_KV && !has_integer_scores(kv)))
        return PackedReader<T>(kv, state, next, scratch).run();
#if defined(RADIXSERVE_AMX)
    if constexpr (std::is_same<T, bf16>::value)
        if (has_amx) return attend_amx(kv, state, next, scratch);
#endif
    if (reads_integers(kv)) return attend_int8(kv, state, next, scratch);
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
const int64_t *Attention<T, A>::find_seen(const Task &task, const int64_t *tokens, int64_t *seen) const {
    for (int64_t i = 0; i < task.num_queries; i++)
        seen[i] = jobs.last_seen[tokens[i]] + 1 - jobs.first_key[task.job];
    return seen;
}

template <class T, class A>
float *Attention<T, A>::partial_state_of(int64_t token, int64_t head) const {
    return partial_state + (token * heads.num_heads + head) * partial_size();
}

template <class T, class A>
void Attention<T, A>::save_row(const TaskState<T> &state, const HeadState<T> &of_head, int64_t row, float *to) const {
    for (const SoftmaxState *some : {&of_head.part, &of_head.merged}) {
        const SoftmaxState from = some->from_row(row, state.width);
        to[heads.dim] = *from.row_max;
        if (*from.row_max != LOWEST || some == &of_head.part) {
            memcpy(to, from.acc, heads.dim * sizeof(float));
            store(to + heads.dim + 1, load(from.sums));
        }
        to += partial_size() / 2;
    }
}

template <class T, class A>
void Attention<T, A>::restore_row(const TaskState<T> &state, const HeadState<T> &of_head, int64_t row,
                                  const float *from) const {
    for (const SoftmaxState *some : {&of_head.part, &of_head.merged}) {
        const SoftmaxState to = some->from_row(row, state.width);
        *to.row_max = from[heads.dim];
        if (*to.row_max != LOWEST || some == &of_head.part) {
            memcpy(to.acc, from, heads.dim * sizeof(float));
            memset(to.acc + heads.dim, 0, (state.width - heads.dim) * sizeof(float));
            store(to.sums, load(from + heads.dim + 1));
        }
        from += partial_size() / 2;
    }
}

template <class T, class A>
void Attention<T, A>::load_state(const TaskState<T> &state, int64_t head_of_task) {
    const int64_t *tokens = tokens_of(state.task);
    const int64_t first = (state.task.first_head + head_of_task) * state.group, dim = heads.dim;
    const HeadState<T> of_head = state.head(head_of_task);
    static thread_local Scratch scratch;
    float *rotated = rotates_queries ? scratch.get<float>(dim) : nullptr;
    for (int64_t row = 0; row < state.rows; row++) {
        const int64_t token = tokens[row / state.group], head = first + row % state.group;
        Operand<T> *query = of_head.queries + row * state.depth;
        const T *from = q + token * q_stride + head * dim;
        if (rotates_queries) {
            convert_wide(from, dim, rotated);
            multiply_hadamard(rotated, dim);
            round_to(rotated, dim, query);
        } else {
            convert(from, dim, query);
        }
        if (state.depth > dim) memset((void *)(query + dim), 0, (state.depth - dim) * sizeof(*query));
        if (state.begins) {
            of_head.part.from_row(row, state.width).clear(state.width);
            of_head.merged.row_max[row] = LOWEST;
        } else {
            restore_row(state, of_head, row, partial_state_of(token, head));
        }
    }
}

template <class T, class A>
void Attention<T, A>::store_state(const TaskState<T> &state, int64_t head_of_task) {
    const int64_t *tokens = tokens_of(state.task);
    const int64_t first = (state.task.first_head + head_of_task) * state.group, dim = heads.dim;
    const HeadState<T> of_head = state.head(head_of_task);
    const bool ends = jobs.flags[state.task.job] & ENDS;
    for (int64_t row = 0; row < state.rows; row++) {
        const int64_t token = tokens[row / state.group], head = first + row % state.group;
        if (!ends) {
            save_row(state, of_head, row, partial_state_of(token, head));
            continue;
        }
        SoftmaxState from = of_head.part.from_row(row, state.width);
        if (of_head.merged.row_max[row] != LOWEST) {
            const SoftmaxState merged = of_head.merged.from_row(row, state.width);
            merge_partition(from, merged, state.width);
            from = merged;
        }
        if (is_rotated) multiply_hadamard(from.acc, dim);
        A *to = out + token * out_stride + head * dim;
        float sum = reduce_add(load(from.sums));
        if (features.sinks) sum += __builtin_exp2f(features.sinks[head] * LOG2_E - *from.row_max);
        const float share = 1.0f / sum;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) store(to + d, load(from.acc + d) * broadcast(share));
        for (; d < dim; d++) store1(to + d, from.acc[d] * share);
    }
}

template class Attention<RADIXSERVE_NUMBER, float>;
#if defined(RADIXSERVE_IS_BF16)
template class Attention<bf16, bf16>;
#endif
