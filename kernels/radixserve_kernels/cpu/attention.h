// Attention over pages, by jobs: some queries against one run of a page table.
//
// A job's keys are packed block by block and read once for all its queries and all query heads of a
// K/V head, by an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). A token whose keys
// are spread over several jobs, as with shared prefixes, carries its maximum, sum and mixed values
// from one to the next: jobs of one wave have no token in common, waves follow each other.
#pragma once

#include <vector>

#include "crew.h"
#include "direct_tiles.h"
#include "transpose.h"

constexpr int KEYS = 192;         // in a block
constexpr int DIRECT_KEYS = 128;  // in a block that is not packed
constexpr int SOME_KEYS = 32;     // packed at a time
constexpr int TASK_ROWS = 768;    // about so many queries x query heads of a K/V head share a packed block
constexpr int LEAST_ROWS = 192;   // of a task that leaves work to other threads
constexpr int FEW_ROWS = 128;     // of a job whose K/V heads are better read side by side, as they lie
constexpr int SCORE_ROWS = 96;    // of them in one product
constexpr int MOST_LINES = 4;     // of what comes next that are asked for with a row, of K and of V
constexpr int64_t FAR_BYTES = 8 << 20;
constexpr float LOWEST = -3.0e38f;
constexpr float MOST_WEIGHT = 256.0f;  // of a lane's sum: beyond it weights lose accuracy

enum JobFlags { CAUSAL = 1, BEGINS = 2, ENDS = 4 };

// As it comes from the host; all arrays are borrowed until the step is over.
struct Jobs {
    int64_t num_jobs, num_waves, num_tokens;
    const int64_t *wave_indptr;   // [num_waves + 1] wave w's jobs are [w, w + 1)
    const int64_t *query_indptr;  // [num_jobs + 1] job j's queries in query_tokens
    const int64_t *query_tokens;  // among the step's tokens
    const int64_t *first_page;    // [num_jobs] index into page_ids
    const int64_t *num_keys;      // [num_jobs] with CAUSAL the last query sees all of them, the one
                                  // before it all but the last ...
    const int64_t *flags;         // [num_jobs] CAUSAL; BEGINS: nothing seen before; ENDS: all seen
    const int32_t *page_ids;
    int64_t page_size;
};

struct Heads {
    int64_t num_heads, num_kv_heads, dim;
    float scale;
    int64_t group() const { return num_heads / num_kv_heads; }
};

// Some queries of a job and some K/V heads.
struct Task {
    int64_t job, first_head, num_heads, first_query, num_queries;
};

struct Plan {
    Jobs jobs;
    std::vector<Task> tasks;
    std::vector<size_t> wave_ends;
    double key_rows = 0;     // sum of keys x queries x query heads
    bool has_state = false;  // some tokens are served by several jobs
    bool is_far = false;     // K and V of a layer are more than the caches hold

    Plan(const Jobs &jobs, const Heads &heads) : jobs(jobs) {
        const int64_t rows = max_threads > 1 ? LEAST_ROWS : TASK_ROWS;
        const int64_t most = (rows + heads.group() - 1) / heads.group();
        int64_t num_keys = 0;
        for (int64_t wave = 0; wave < jobs.num_waves; wave++) {
            for (int64_t job = jobs.wave_indptr[wave]; job < jobs.wave_indptr[wave + 1]; job++) {
                int64_t count = jobs.query_indptr[job + 1] - jobs.query_indptr[job];
                has_state |= (jobs.flags[job] & (BEGINS | ENDS)) != (BEGINS | ENDS);
                num_keys += jobs.num_keys[job];
                key_rows += double(count) * jobs.num_keys[job] * heads.num_heads;
                const bool is_small = max_threads == 1 && count * heads.group() <= FEW_ROWS;
                const int64_t some = is_small ? heads.num_kv_heads : 1;
                // Of nearly equal size, at most a third larger than `most` rather than one part more.
                const int64_t parts = (3 * count + 4 * most - 1) / (4 * most);
                for (int64_t part = 0; part < parts; part++) {
                    const int64_t first = count * part / parts, last = count * (part + 1) / parts;
                    for (int64_t head = 0; head < heads.num_kv_heads; head += some)
                        tasks.push_back({job, head, some, first, last - first});
                }
            }
            wave_ends.push_back(tasks.size());
        }
        is_far = num_keys * heads.num_kv_heads * heads.dim * 4 > FAR_BYTES;
    }
};

// What one thread needs for a task.
template <class T> struct Desk {
    Room queries, keys, values, scores, weights, mixed, highest, sums, zeros, pairs, unturned, spread;
};

template <class T> class Attention {
  public:
    Attention(const Plan &plan, const Heads &heads)
        : plan(plan), jobs(plan.jobs), heads(heads), exponent_scale(heads.scale * 1.44269504f) {}

    // q, out: [tokens, heads, dim] with a stride a token; k, v: [slots, kv_heads, dim].
    void run(const T *q, int64_t q_stride, const T *k, const T *v, T *out, int64_t out_stride,
             std::vector<Desk<T>> &desks, Room &state) {
        this->q = q, this->q_stride = q_stride, this->out = out, this->out_stride = out_stride;
        this->k = k, this->v = v;
        if (plan.has_state)
            kept = state.of<float>(jobs.num_tokens * heads.num_heads * (heads.dim + 2));
        size_t first = 0;
        int crew = crew_for(4.0 * plan.key_rows * heads.dim);
        for (size_t end : plan.wave_ends) {
#pragma omp parallel for num_threads(crew) schedule(dynamic, 1) if (crew > 1)
            for (size_t i = first; i < end; i++)
                attend(plan.tasks[i], i + 1 < end ? &plan.tasks[i + 1] : nullptr, desks[crew_member()]);
            first = end;
        }
    }

  private:
    const Plan &plan;
    const Jobs &jobs;
    const Heads &heads;
    const float exponent_scale;
    const T *q = nullptr, *k = nullptr, *v = nullptr;
    T *out = nullptr;
    int64_t q_stride = 0, out_stride = 0;
    float *kept = nullptr;

    // The rows of one K/V head in a task: what is asked and what has been found so far.
    struct Part {
        T *queries;      // [rows][depth]
        float *mixed;    // [rows][width]
        float *highest;  // [rows]
        float *sums;     // [rows][LANES]
    };

    // A task under way. Its rows are queries x query heads of a K/V head, `group` of a query.
    struct Work {
        const Task &task;
        const int64_t group, rows, depth, width;
        const int64_t seen, end;  // keys that its first query sees, and that its last one does
        const bool causal;        // each query sees one more than the one before it; or all see all
        const bool begins;        // nothing was found before
        const Part whole;         // of all heads, one after the other

        Part part(int64_t head) const {
            const int64_t at = head * rows;
            return {whole.queries + at * depth, whole.mixed + at * width, whole.highest + at,
                    whole.sums + at * LANES};
        }
        int64_t seen_by(int64_t row) const { return causal ? seen + row / group : end; }
    };

    // Keys and values of a task that are asked for line by line, to be there when they are packed: rows
    // of pages lie apart, so that the processor cannot guess them, and a burst would hold up the rest.
    class Coming {
      public:
        Coming() = default;
        Coming(const Attention &all, const Task &task, int64_t first, int64_t count)
            : all(&all), task(&task), key(first), end(first) {
            if (all.plan.is_far || task.num_queries > 1)
                end = least(first + count, all.jobs.num_keys[task.job]);
            size = task.num_heads * all.heads.dim * int64_t(sizeof(T));
        }
        void fetch(int lines) {
            for (; lines && key < end; lines--) {
                if (!at) place = all->place_of(*task, key) * int64_t(sizeof(T));
                __builtin_prefetch((const char *)all->k + place + at, 0, 2);
                __builtin_prefetch((const char *)all->v + place + at, 0, 2);
                at += 64;
                if (at >= size) at = 0, key++;
            }
        }

      private:
        const Attention *all = nullptr;
        const Task *task = nullptr;
        int64_t key = 0, end = 0, size = 0, at = 0, place = 0;
    };

    // `next` is likely to follow.
    void attend(const Task &task, const Task *next, Desk<T> &desk) {
        const int64_t group = heads.group(), rows = task.num_queries * group, dim = heads.dim;
        const int64_t depth = padded_depth<T>(dim), width = round_up(dim, PANEL);
        const int64_t *tokens = jobs.query_tokens + jobs.query_indptr[task.job] + task.first_query;
        const int64_t all = jobs.query_indptr[task.job + 1] - jobs.query_indptr[task.job];
        const bool causal = jobs.flags[task.job] & CAUSAL;
        const int64_t num_keys = jobs.num_keys[task.job], seen = num_keys - all + task.first_query + 1;
        const int64_t total = rows * task.num_heads;
        const Part whole{desk.queries.template of<T>(total * depth), desk.mixed.template of<float>(total * width),
                         desk.highest.template of<float>(total), desk.sums.template of<float>(total * LANES)};
        const int64_t end = causal ? seen + task.num_queries - 1 : num_keys;
        const bool begins = jobs.flags[task.job] & BEGINS;
        const Work work{task, group, rows, depth, width, seen, end, causal, begins, whole};
        for (int64_t head = 0; head < task.num_heads; head++) begin(work, head, tokens);
        if (!is_direct<T>(all * group, dim))
            read_packed(work, next, desk);
        else if (!read_by_tiles(work, next, desk))
            read_directly(work, next, desk);
        for (int64_t head = 0; head < task.num_heads; head++) finish(work, head, tokens);
    }

    // Where there are rows enough, the keys and values of the next block are asked for between rows:
    // while they are packed there is too little to do to hide how far away they lie.
    void read_packed(const Work &work, const Task *next, Desk<T> &desk) {
        const Task &task = work.task;
        const int64_t all_rows = work.rows * task.num_heads;
        const int64_t block_lines = KEYS * task.num_heads * heads.dim * int64_t(sizeof(T)) / 64;
        const int row_lines = all_rows * MOST_LINES < block_lines ? 0 : int((block_lines + all_rows - 1) / all_rows);
        const int64_t depth = work.depth, width = work.width;
        T *keys = desk.keys.template of<T>(task.num_heads * KEYS * depth);
        T *values = desk.values.template of<T>(task.num_heads * KEYS * width);
        float *scores = desk.scores.template of<float>(SCORE_ROWS * KEYS);
        T *weights = desk.weights.template of<T>(SCORE_ROWS * KEYS);
        const T *zeros = desk.zeros.template of<T>(width);
        for (int64_t from = 0; from < work.end; from += KEYS) {
            const int64_t count = least<int64_t>(work.end - from, KEYS), used = padded_depth<T>(count);
            for (int64_t some = 0; some < count; some += SOME_KEYS) {
                Coming soon;
                if (!row_lines) soon = Coming(*this, task, from + some + SOME_KEYS, SOME_KEYS);
                pack(task, from + some, least(count - some, int64_t(SOME_KEYS)), zeros, keys + some * depth,
                     KEYS * depth, values + some * PANEL, KEYS * width, used, soon);
            }
            Coming coming;
            if (row_lines && from + KEYS < work.end)
                coming = Coming(*this, task, from + KEYS, KEYS);
            else if (row_lines && next)
                coming = Coming(*this, *next, 0, KEYS);
            for (int64_t head = 0; head < task.num_heads; head++) {
                const T *own_keys = keys + head * KEYS * depth, *own_values = values + head * KEYS * width;
                const Part part = work.part(head);
                for (int64_t top = 0; top < work.rows; top += SCORE_ROWS) {
                    const int some = int(least<int64_t>(work.rows - top, SCORE_ROWS));
                    const int64_t reach = least(work.seen_by(top + some - 1) - from, count);
                    if (reach <= 0) continue;
                    const int64_t deep = least(padded_depth<T>(reach), used);
                    const bool starts = work.begins && !from;
                    product_into<false>(part.queries + top * depth, depth, some, own_keys, PANEL * depth,
                                        int((reach + PANEL - 1) / PANEL), depth, scores, KEYS);
                    for (int m = 0; m < some; m++) {
                        const int64_t row = top + m;
                        coming.fetch(row_lines);
                        weigh(scores + m * KEYS, weights + m * KEYS, least(work.seen_by(row) - from, count),
                              deep, part.highest[row], part.sums + row * LANES,
                              starts ? nullptr : part.mixed + row * width, width);
                    }
                    auto mix_all = [&](auto adds) {
                        product_into<adds>(weights, KEYS, some, own_values, PANEL * used, int(width / PANEL),
                                           deep, part.mixed + top * width, width);
                    };
                    if (starts)
                        mix_all(std::false_type());
                    else
                        mix_all(std::true_type());
                }
            }
        }
        release_tiles();
    }

    // For few rows. While keys are scored their values are asked for, while values are mixed the keys
    // of the next block: in the order in which they lie, so that the processor goes on by itself.
    void read_directly(const Work &work, const Task *next, Desk<T> &desk) {
        const Task &task = work.task;
        const int64_t rows = work.rows, dim = heads.dim, size = task.num_heads * dim;
        float *scores = desk.scores.template of<float>(task.num_heads * rows * DIRECT_KEYS);
        T *weights = desk.weights.template of<T>(rows * DIRECT_KEYS);
        const T *zeros = desk.zeros.template of<T>(size);
        const T *keys[DIRECT_KEYS], *values[DIRECT_KEYS], *later[DIRECT_KEYS];
        int64_t places[DIRECT_KEYS];
        int64_t count = find_places(task, 0, work.end, places);
        for (int64_t from = 0; from < work.end; from += DIRECT_KEYS) {
            for (int64_t j = 0; j < DIRECT_KEYS; j++) {  // behind the last one zeros, to whole fours
                keys[j] = j < count ? k + places[j] : zeros;
                values[j] = j < count ? v + places[j] : zeros;
            }
            score_keys(work, keys, values, count, scores);
            const bool starts = work.begins && !from;
            int64_t coming = 0, key = 0, at = 0;
            if (from + DIRECT_KEYS < work.end)
                coming = find_places(task, from + DIRECT_KEYS, work.end, places);
            else if (next && next->num_heads == task.num_heads)
                coming = find_places(*next, 0, jobs.num_keys[next->job], places);
            for (int64_t head = 0; head < task.num_heads; head++) {
                const Part part = work.part(head);
                for (int64_t row = 0; row < rows; row++)
                    weigh(scores + (head * rows + row) * DIRECT_KEYS, weights + row * DIRECT_KEYS,
                          least(work.seen_by(row) - from, count), padded_depth<T>(count), part.highest[row],
                          part.sums + row * LANES, starts ? nullptr : part.mixed + row * work.width, work.width);
                for (int64_t j = 0; j < DIRECT_KEYS; j++) {
                    later[j] = key < coming ? k + places[key] + at : zeros;
                    at += dim;
                    if (at == size) at = 0, key++;
                }
                const Values<T> block{values, later, count, head * dim, dim};
                if (starts) memset(part.mixed, 0, rows * work.width * sizeof(float));
                by_fours(rows, [&](int64_t row, auto some) {
                    mix<some>(weights + row * DIRECT_KEYS, DIRECT_KEYS, block, part.mixed + row * work.width,
                              work.width);
                });
            }
            count = coming;
        }
    }

    // For few rows by AMX, where there is that. Whether it was done.
    bool read_by_tiles(const Work &work, const Task *next, Desk<T> &desk) {
#if defined(RADIXSERVE_AMX)
        if constexpr (std::is_same<T, bf16>::value) {
            if (!has_tiles) return false;
            const Task &task = work.task;
            const int64_t num_heads = task.num_heads, rows = work.rows, dim = heads.dim, size = num_heads * dim;
            T *pairs = desk.pairs.template of<T>(size * rows);
            // Behind the last row room for three more: rows come by fours, each over the ones before it.
            float *scores = desk.scores.template of<float>((num_heads * rows + 3) * DIRECT_KEYS);
            T *weights = desk.weights.template of<T>(DIRECT_KEYS);
            const int64_t spread_size = DIRECT_KEYS * 2 * rows;
            uint32_t *spread = desk.spread.template of<uint32_t>(num_heads * spread_size);
            for (int64_t head = 0; head < num_heads; head++) {
                const Part part = work.part(head);
                pair_queries(part.queries, work.depth, rows, dim, pairs + head * rows * dim);
                for (int64_t row = 0; row < rows; row++) {
                    float *mixed = part.mixed + row * work.width;
                    if (work.begins) memset(mixed, 0, work.width * sizeof(float));
                    part_features(mixed, dim);
                }
            }
            int64_t places_of[2][DIRECT_KEYS];  // of a block and of the next one
            int64_t count = find_places(task, 0, work.end, places_of[0]), num_later = 0;
            for (int64_t from = 0; from < work.end; from += DIRECT_KEYS, count = num_later) {
                const int64_t *places = places_of[from / DIRECT_KEYS % 2];
                int64_t *later = places_of[(from / DIRECT_KEYS + 1) % 2];
                score_by_tiles(work, places, count, pairs, scores, desk);
                num_later = 0;
                if (from + DIRECT_KEYS < work.end)
                    num_later = find_places(task, from + DIRECT_KEYS, work.end, later);
                else if (next && next->num_heads == num_heads)
                    num_later = find_places(*next, 0, jobs.num_keys[next->job], later);
                for (int64_t head = 0; head < num_heads; head++) {
                    const Part part = work.part(head);
                    for (int64_t row = 0; row < rows; row++) {
                        weigh(scores + (head * rows + row) * DIRECT_KEYS, weights,
                              least(work.seen_by(row) - from, count), padded_depth<T>(count), part.highest[row],
                              part.sums + row * LANES, part.mixed + row * work.width, work.width);
                        uint32_t *to = spread + head * spread_size + row * TILE_KEYS;
                        for (int64_t j = 0; j < count; j += TILE_KEYS, to += 2 * rows * TILE_KEYS)
                            spread_weights(weights + j, to, rows * TILE_KEYS);
                    }
                }
                mix_by_tiles(work, places, count, spread, later, num_later, desk);
            }
            release_tiles();
            for (int64_t head = 0; head < num_heads; head++)
                for (int64_t row = 0; row < rows; row++)
                    join_features(work.part(head).mixed + row * work.width, dim);
            return true;
        }
#endif
        return false;
    }

#if defined(RADIXSERVE_AMX)
    // Scores of a block for all heads and rows of a task: [heads][rows][DIRECT_KEYS].
    void score_by_tiles(const Work &work, const int64_t *places, int64_t count, const T *pairs, float *scores,
                        Desk<T> &desk) const {
        const int64_t rows = work.rows, num_heads = work.task.num_heads, dim = heads.dim, size = num_heads * dim;
        T *copies = desk.keys.template of<T>(2 * TILE_KEYS * size);
        float *unturned = desk.unturned.template of<float>(num_heads * 2 * TILE_KEYS * rows + TILE_KEYS);
        configure_scores(int(rows));
        for (int64_t j = 0; j < count; j += 2 * TILE_KEYS) {
            const int64_t met = least(j + 2 * TILE_KEYS, count);
            ComingRows coming(k, places + met, count - met, size);
            if (met == count) coming = ComingRows(v, places, count, size);
            KeyTile tiles[2];
            const int number = tiles_of(k, places + j, count - j, size, copies, tiles);
            for (int64_t head = 0; head < num_heads; head++) {
                const T *own = pairs + head * rows * dim;
                float *to = unturned + head * 2 * TILE_KEYS * rows;
                if (number == 2)
                    score_tiles<true>(own, rows, tiles, head * dim, dim, to, coming);
                else
                    score_tiles<false>(own, rows, tiles, head * dim, dim, to, coming);
            }
            for (int64_t head = 0; head < num_heads; head++)
                for (int i = 0; i < number; i++) {
                    const uint32_t *lines[TILE_KEYS];
                    for (int key = 0; key < TILE_KEYS; key++)
                        lines[key] = (const uint32_t *)(unturned + ((head * 2 + i) * TILE_KEYS + key) * rows);
                    transpose_16(lines, 0, (uint32_t *)(scores + head * rows * DIRECT_KEYS + j + i * TILE_KEYS),
                                 DIRECT_KEYS, int(round_up(rows, 4)));
                }
        }
    }

    // Adds the weighed values of a block to what is mixed.
    void mix_by_tiles(const Work &work, const int64_t *places, int64_t count, const uint32_t *spread,
                      const int64_t *later, int64_t num_later, Desk<T> &desk) const {
        const int64_t rows = work.rows, num_heads = work.task.num_heads, dim = heads.dim, size = num_heads * dim;
        T *copies = desk.keys.template of<T>(2 * TILE_KEYS * size);
        configure_mixing(int(rows));
        for (int64_t j = 0; j < count; j += 2 * TILE_KEYS) {
            const int64_t met = least(j + 2 * TILE_KEYS, count);
            ComingRows coming(v, places + met, count - met, size);
            if (met == count) coming = ComingRows(k, later, num_later, size);
            KeyTile tiles[2];
            const int number = tiles_of(v, places + j, count - j, size, copies, tiles);
            for (int64_t head = 0; head < num_heads; head++) {
                const uint32_t *own = spread + (head * DIRECT_KEYS + j) * 2 * rows;
                float *mixed = work.part(head).mixed;
                if (number == 2)
                    mix_tiles<true>(own, rows, tiles, head * dim, dim, mixed, work.width, coming);
                else
                    mix_tiles<false>(own, rows, tiles, head * dim, dim, mixed, work.width, coming);
            }
        }
    }
#endif

    // Scores of a block for all heads and rows of a task: [heads][rows][DIRECT_KEYS].
    void score_keys(const Work &work, const T *const *keys, const T *const *values, int64_t count,
                    float *scores) const {
        const int64_t num_heads = work.task.num_heads, dim = heads.dim, size = num_heads * dim;
        const int64_t line = 64 / sizeof(T);
        for (int64_t j = 0; j < count; j += FOUR) {
            int64_t key = j, place = 0;  // of the values: four of one head's size with each head
            for (int64_t head = 0; head < num_heads; head++) {
                for (int64_t i = 0; i < FOUR * dim; i += line) {
                    __builtin_prefetch(values[key] + place, 0, 2);
                    place += line;
                    if (place == size) place = 0, key++;
                }
                by_fours(work.rows, [&](int64_t row, auto some) {
                    score_four<some>(work.part(head).queries + row * work.depth, work.depth, keys + j,
                                     head * dim, dim, scores + (head * work.rows + row) * DIRECT_KEYS + j,
                                     DIRECT_KEYS);
                });
            }
        }
    }

    // Where the keys from `first` on begin in k, for the task's first head: of one block at most, and
    // none from `end` on. Returns how many.
    int64_t find_places(const Task &task, int64_t first, int64_t end, int64_t *places) const {
        const int32_t *pages = jobs.page_ids + jobs.first_page[task.job];
        const int64_t size = jobs.page_size, step = heads.num_kv_heads * heads.dim;
        const int64_t count = least<int64_t>(end - first, DIRECT_KEYS), head = task.first_head * heads.dim;
        int64_t page = first / size, offset = first % size;
        for (int64_t j = 0; j < count; page++, offset = 0)
            for (; offset < size && j < count; offset++, j++)
                places[j] = (pages[page] * size + offset) * step + head;
        return count;
    }

    // Packs `count` keys and values from `first` on, for each head of the task: all of a row's heads
    // lie side by side, and are read while they are at hand.
    void pack(const Task &task, int64_t first, int64_t count, const T *zeros, T *keys, int64_t keys_stride,
              T *values, int64_t values_stride, int64_t used, Coming &coming) const {
        const int64_t dim = heads.dim, padded = round_up(count, PANEL), deep = padded_depth<T>(count);
        const T *key_rows[SOME_KEYS], *value_rows[SOME_KEYS];
        auto ahead = [&](int lines) { coming.fetch(lines); };
        for (int64_t head = 0; head < task.num_heads; head++) {
            for (int64_t j = 0; j < SOME_KEYS; j++) {
                const int64_t at = j < count && !head ? place_of(task, first + j) : 0;
                key_rows[j] = j >= count ? zeros : head ? key_rows[j] + dim : k + at;
                value_rows[j] = j >= count ? zeros : head ? value_rows[j] + dim : v + at;
            }
            pack_keys(key_rows, padded, dim, keys + head * keys_stride, ahead);
            pack_values(value_rows, deep, dim, used, values + head * values_stride, ahead);
        }
    }

    // Where a key of the task's job and first head begins in k, and its value in v.
    int64_t place_of(const Task &task, int64_t key) const {
        const int32_t *pages = jobs.page_ids + jobs.first_page[task.job];
        const int64_t size = jobs.page_size;
        const int64_t slot = size == 1 ? pages[key] : pages[key / size] * size + key % size;
        return (slot * heads.num_kv_heads + task.first_head) * heads.dim;
    }

    // One row's weights of a block's keys, zeros from `visible` to `deep`. They are relative to
    // `highest`, the row's maximum as far as it was looked for: in its first block, and wherever a
    // weight would become too large. Then what was mixed before, if there is anything, is scaled
    // down. Exponents are to the base 2; `sums` has a sum for each lane.
    void weigh(const float *scores, T *weights, int64_t visible, int64_t deep, float &highest, float *sums,
               float *mixed, int64_t width) {
        if (visible <= 0) {
            memset((void *)weights, 0, deep * sizeof(T));
            return;
        }
        vec total = {};
        const bool is_first = highest == LOWEST;
        if (!is_first) total = weights_of(scores, weights, visible, highest);
        if (is_first || any_above(total, MOST_WEIGHT)) {
            const float top = largest_of(scores, visible);
            if (!(top <= highest)) {  // a NaN shows as well
                const float factor = __builtin_exp2f(highest - top);
                highest = top;
                store(sums, load(sums) * fill(factor));
                for (int64_t d = 0; mixed && d < width; d += LANES)
                    store(mixed + d, load(mixed + d) * fill(factor));
            }
            total = weights_of(scores, weights, visible, highest);
        }
        store(sums, load(sums) + total);
        const int64_t end = round_up(visible, LANES);
        if (end < deep) memset((void *)(weights + end), 0, (deep - end) * sizeof(T));
    }

    float largest_of(const float *scores, int64_t visible) const {
        const int64_t whole = visible / LANES * LANES, rest = visible - whole;
        vec most = rest ? cut(load(scores + whole), rest, LOWEST) : fill(LOWEST);
        for (int64_t j = 0; j < whole; j += LANES) most = larger(most, load(scores + j));
        return max_of(most) * exponent_scale;
    }

    // The weights of some scores relative to one of `highest`; their sum, lane by lane.
    vec weights_of(const float *scores, T *weights, int64_t visible, float highest) const {
        const int64_t whole = visible / LANES * LANES, rest = visible - whole;
        const vec shift = fill(-highest), scale = fill(exponent_scale);
        vec total = {};
        for (int64_t j = 0; j < whole; j += LANES) {
            const vec weight = exp2_of<T>(load(scores + j) * scale + shift);
            total += weight;
            store(weights + j, weight);
        }
        if (rest) {
            const vec weight = cut(exp2_of<T>(load(scores + whole) * scale + shift), rest, 0);
            total += weight;
            store(weights + whole, weight);
        }
        return total;
    }

    float *kept_of(int64_t token, int64_t head) {
        return kept + (token * heads.num_heads + head) * (heads.dim + 2);
    }

    void begin(const Work &work, int64_t head_of_task, const int64_t *tokens) {
        const int64_t first = (work.task.first_head + head_of_task) * work.group, dim = heads.dim;
        const Part part = work.part(head_of_task);
        for (int64_t row = 0; row < work.rows; row++) {
            const int64_t token = tokens[row / work.group], head = first + row % work.group;
            T *query = part.queries + row * work.depth;
            memcpy((void *)query, q + token * q_stride + head * dim, dim * sizeof(T));
            if (work.depth > dim) memset((void *)(query + dim), 0, (work.depth - dim) * sizeof(T));
            part.highest[row] = LOWEST;
            store(part.sums + row * LANES, vec{});
            if (work.begins) continue;
            const float *from = kept_of(token, head);
            float *mixed = part.mixed + row * work.width;
            memcpy(mixed, from, dim * sizeof(float));
            memset(mixed + dim, 0, (work.width - dim) * sizeof(float));
            part.highest[row] = from[dim], part.sums[row * LANES] = from[dim + 1];
        }
    }

    void finish(const Work &work, int64_t head_of_task, const int64_t *tokens) {
        const int64_t first = (work.task.first_head + head_of_task) * work.group, dim = heads.dim;
        const Part part = work.part(head_of_task);
        const bool ends = jobs.flags[work.task.job] & ENDS;
        for (int64_t row = 0; row < work.rows; row++) {
            const int64_t token = tokens[row / work.group], head = first + row % work.group;
            const float *from = part.mixed + row * work.width;
            if (!ends) {
                float *to = kept_of(token, head);
                memcpy(to, from, dim * sizeof(float));
                to[dim] = part.highest[row], to[dim + 1] = sum_of(load(part.sums + row * LANES));
                continue;
            }
            T *to = out + token * out_stride + head * dim;
            const float share = 1.0f / sum_of(load(part.sums + row * LANES));
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d) * fill(share));
            for (; d < dim; d++) put(to + d, from[d] * share);
        }
    }
};
