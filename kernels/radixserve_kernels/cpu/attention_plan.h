// The work of one step's attention: jobs, and the tasks that threads take.
//
// A job is some queries against one run of a page table. A token whose keys are spread over several jobs,
// as with shared prefixes, carries its softmax state (maximum, sum, unnormalised output) from one to the
// next: jobs of one level have no token in common, levels run one after another.
#pragma once

#include <vector>

#include "threads.h"

constexpr int MAX_TASK_ROWS = 768;  // queries x query heads of a K/V head that share a packed block, about
constexpr int MIN_TASK_ROWS = 192;  // the same where several threads share the work
constexpr int SMALL_JOB_ROWS = 128;  // up to here a job's K/V heads are read side by side, as they lie
constexpr int64_t FAR_BYTES = 8 << 20;
constexpr int64_t PARTITION_KEYS = 1024;  // whose softmax is one: see attention_task.h

enum JobFlags { CAUSAL = 1, BEGINS = 2, ENDS = 4 };

// One step's jobs; all arrays are borrowed until the step is over.
struct Jobs {
    int64_t num_jobs, num_levels, num_tokens;
    const int64_t *level_indptr;  // [num_levels + 1] jobs of level w: [w, w + 1)
    const int64_t *query_indptr;  // [num_jobs + 1] queries of job j in query_tokens
    const int64_t *query_tokens;  // index among the step's tokens
    const int64_t *first_page;    // [num_jobs] index into page_ids
    const int64_t *num_keys;      // [num_jobs] with CAUSAL the last query sees all of them, the one
                                  // before it all but the last ...
    const int64_t *flags;         // [num_jobs] CAUSAL; BEGINS: the first job of its tokens; ENDS: the last
    const int64_t *first_key;     // [num_jobs] position of its first key
    const int64_t *positions;     // [num_tokens]
    const int64_t *last_seen;     // [num_tokens] the last position that each sees in bidirectional layers, not before its
                                  // own and never falling in a row; null: its own
    const int32_t *page_ids;
    int64_t page_size;
};

struct Heads {
    int64_t num_heads, num_kv_heads, dim;
    float scale;  // of the scores
    int64_t group() const { return num_heads / num_kv_heads; }
};

// What a layer's attention needs beyond causal attention to all earlier positions, see
// attention_features.py; 0 and null ask for nothing.
struct Features {
    int64_t window = 0, chunk = 0;  // positions that a query sees, its own the last; of its chunk
    int64_t is_bidirectional = 0;   // queries see positions after their own, see Jobs::last_seen
    float soft_cap = 0;             // scores s become soft_cap * tanh(s / soft_cap)
    const float *sinks = nullptr;   // [num_heads] scores without a value

    bool has_span() const { return window || chunk; }
    // The first position that a query sees.
    int64_t first_seen(int64_t position) const {
        const int64_t of_window = window ? position + 1 - window : 0;
        const int64_t of_chunk = chunk ? position / chunk * chunk : 0;
        return of_window > of_chunk ? of_window : of_chunk;
    }
};

// Some queries of a job and some K/V heads.
struct Task {
    int64_t job, first_head, num_heads, first_query, num_queries;
    bool is_split = false;  // a Split does the same, where the layer can be split
};

// A job of few rows and many keys, whose keys are spread over the threads: see attention_split.h.
struct Split {
    Task task;  // all queries and K/V heads
    int64_t level, num_keys;
    int64_t origin;      // position of its first key
    int64_t unit_heads;  // K/V heads that a thread reads at a time

    int64_t num_partitions() const { return (origin + num_keys - 1) / PARTITION_KEYS - origin / PARTITION_KEYS + 1; }
    // The p-th partition has the keys from key(p) to key(p + 1), counted from the job's first.
    int64_t key(int64_t partition) const {
        const int64_t key = (origin / PARTITION_KEYS + partition) * PARTITION_KEYS - origin;
        return key < 0 ? 0 : min(key, num_keys);
    }
    int64_t num_units() const { return num_partitions() * (task.num_heads / unit_heads); }
};

constexpr int64_t SPLIT_ROWS = 8;     // of a K/V head, up to which a job is split
constexpr int64_t SPLIT_KEYS = 1024;  // from which on it is

struct Plan {
    Jobs jobs;
    std::vector<Task> tasks;
    std::vector<size_t> level_ends;  // [num_levels] in tasks
    std::vector<Split> splits;
    double key_rows = 0;             // sum of keys x queries x query heads
    bool has_state = false;          // some tokens are served by several jobs
    bool is_far = false;             // K and V of a layer exceed the caches

    Plan(const Jobs &jobs, const Heads &heads) : jobs(jobs) {
        const int64_t rows = max_threads > 1 ? MIN_TASK_ROWS : MAX_TASK_ROWS;
        const int64_t most = (rows + heads.group() - 1) / heads.group();
        int64_t num_keys = 0;
        for (int64_t level = 0; level < jobs.num_levels; level++) {
            double level_rows = 0;
            for (int64_t job = jobs.level_indptr[level]; job < jobs.level_indptr[level + 1]; job++)
                level_rows += double(jobs.query_indptr[job + 1] - jobs.query_indptr[job]) * jobs.num_keys[job];
            for (int64_t job = jobs.level_indptr[level]; job < jobs.level_indptr[level + 1]; job++) {
                int64_t count = jobs.query_indptr[job + 1] - jobs.query_indptr[job];
                has_state |= (jobs.flags[job] & (BEGINS | ENDS)) != (BEGINS | ENDS);
                num_keys += jobs.num_keys[job];
                key_rows += double(count) * jobs.num_keys[job] * heads.num_heads;
                const bool is_small = max_threads == 1 && count * heads.group() <= SMALL_JOB_ROWS;
                const int64_t some = is_small ? heads.num_kv_heads : 1;
                // Whole, it would keep some threads waiting for others.
                const bool is_split = max_threads > 1 && count * heads.group() <= SPLIT_ROWS &&
                                      jobs.num_keys[job] >= SPLIT_KEYS &&
                                      4.0 * max_threads * count * jobs.num_keys[job] > level_rows;
                if (is_split) {
                    const int64_t all = heads.num_kv_heads;
                    Split split{{job, 0, all, 0, count}, level, jobs.num_keys[job], jobs.first_key[job], all};
                    if (split.num_partitions() < 4 * max_threads) split.unit_heads = 1;  // or some threads would wait
                    splits.push_back(split);
                }
                // Parts of nearly equal size: up to a third larger than `most` rather than one part more.
                const int64_t parts = (3 * count + 4 * most - 1) / (4 * most);
                for (int64_t part = 0; part < parts; part++) {
                    const int64_t first = count * part / parts, last = count * (part + 1) / parts;
                    for (int64_t head = 0; head < heads.num_kv_heads; head += some)
                        tasks.push_back({job, head, some, first, last - first, is_split});
                }
            }
            level_ends.push_back(tasks.size());
        }
        is_far = num_keys * heads.num_kv_heads * heads.dim * 4 > FAR_BYTES;
    }
};
