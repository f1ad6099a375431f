// Attention over pages: the tasks of a plan, level by level. Defined in attention.cpp.
//
// A job's keys are read once for all its queries and all query heads of a K/V head.
#pragma once

#include "attention_split.h"

// T: queries, and what K and V are widened to where they are stored otherwise; A: the output.
template <class T, class A> class Attention {
  public:
    Attention(const Plan &plan, const Heads &heads) : plan(plan), jobs(plan.jobs), heads(heads) {}

    // Nanoseconds of one thread for a layer.
    double work() const { return price(4.0 * plan.key_rows * heads.dim, 0); }

    // Called once before any thread runs.
    void prepare(std::vector<ThreadScratch> &scratches, Scratch &state_scratch, Scratch &split_scratch);

    // q, out: [tokens, heads, dim] with a stride between tokens. page_ids: window pages in the places of the plan's
    // pages, or null.
    void run(const TeamThread &thread, const T *q, int64_t q_stride, const LayerKV &memory, A *out, int64_t out_stride,
             const Features &features, const int32_t *page_ids);

  private:
    const Plan &plan;
    const Jobs &jobs;
    const Heads &heads;
    Features features;  // of the layer
    const T *q = nullptr;
    A *out = nullptr;
    int64_t q_stride = 0, out_stride = 0;
    ThreadScratch *scratches = nullptr;  // of each thread
    bool is_rotated = false;        // whether K and V are multiplied with a Hadamard matrix: see stored_kv.h
    bool rotates_queries = false;   // whether `load_state` does so with queries: see attention_int8.h
    bool splits = false;            // whether the plan's splits are done as such
    float *split_buffer = nullptr;  // of all splits, one after the other
    float *partial_state = nullptr;  // [tokens][heads][partial_size] between levels

    int64_t depth() const { return padded_depth<Operand<T>>(heads.dim); }
    int64_t width() const { return round_up(heads.dim, PANEL); }
    const int64_t *tokens_of(const Task &task) const {
        return jobs.query_tokens + jobs.query_indptr[task.job] + task.first_query;
    }
    // Of the keys [begin, end) of the task's job, or of those of them that any query sees.
    TaskState<T> make_state(const Task &task, ThreadScratch &scratch, int64_t begin, int64_t end) const;
    HeadState<T> own_buffers(const Task &task, ThreadScratch &scratch) const;
    // One thread's part of the split jobs of a level, after its tasks; `claimed` comes after these.
    void run_splits(const TeamThread &thread, const PagedKv<T> &kv, int64_t level, int64_t num_tasks, int64_t claimed);
    void read_unit(const PagedKv<T> &kv, const Split &split, const SplitBuffers &buffers, int64_t unit,
                   ThreadScratch &scratch);
    void merge_partitions(const Split &split, const SplitBuffers &buffers, ThreadScratch &scratch);
    // call(split, its buffers). Returns the floats of all buffers.
    template <class Call> int64_t for_splits(Call &&call) const;
    // `next` is likely to follow, or null.
    void attend(const PagedKv<T> &kv, const Task &task, const Task *next, ThreadScratch &scratch);
    void read_keys(const PagedKv<T> &kv, const TaskState<T> &state, const Task *next, ThreadScratch &scratch);
    // Floats of a row's saved state: acc, row_max and sums of `part`, then of `merged`.
    int64_t partial_size() const { return 2 * (heads.dim + 1 + LANES); }
    float *partial_state_of(int64_t token, int64_t head) const;
    void save_row(const TaskState<T> &state, const HeadState<T> &of_head, int64_t row, float *to) const;
    void restore_row(const TaskState<T> &state, const HeadState<T> &of_head, int64_t row, const float *from) const;
    // The first key that each of a task's queries sees, and the least of them.
    int64_t find_first_seen(const Task &task, const int64_t *tokens, int64_t *first_seen) const;
    // `TaskState::seen_each`, in `seen`.
    const int64_t *find_seen(const Task &task, const int64_t *tokens, int64_t *seen) const;
    // Queries of one head, and the softmax state of earlier jobs.
    void load_state(const TaskState<T> &state, int64_t head_of_task);
    // The finished output of one head, or its softmax state for later jobs.
    void store_state(const TaskState<T> &state, int64_t head_of_task);
};
