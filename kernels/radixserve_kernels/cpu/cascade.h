// The attention jobs of a step: first the page prefixes that several rows share, where that pays, node by
// node of the tree that they form; then the unique rest of each row.
// The nodes are those of radixserve/attention/cuda/cascade.py.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "attention_plan.h"

// The record of a step's rows, see attention_metadata.py; all arrays are borrowed until the step is over.
struct AttentionMetadata {
    int64_t num_rows, page_size;
    const int64_t *start;       // [R] position of each row's first new token
    const int64_t *qo_indptr;   // [R + 1] new tokens of each row
    const int64_t *kv_indptr;   // [R + 1] pages of each row in kv_indices
    const int32_t *kv_indices;  // page ids
    const int64_t *seq_lens;    // [R] tokens after the step
    const int64_t *last_seen;   // [T] as in Jobs, or null
    int64_t is_new;             // whether no plan was made of them
};

// Pages [first, end) that all of `rows` share.
struct SharedNode {
    std::vector<int64_t> rows;
    int64_t first, end, level;
};

class SharedPages {
  public:
    // A node pays where (rows - 1) x tokens > rows x merge_tokens; it ends at a multiple of `boundary` tokens.
    SharedPages(const AttentionMetadata &step, int64_t merge_tokens, int64_t boundary)
        : step(step), merge_tokens(merge_tokens), unit(boundary / std::gcd(boundary, step.page_size)) {
        std::vector<int64_t> all(step.num_rows);
        for (int64_t r = 0; r < step.num_rows; r++) all[r] = r;
        descend(all, 0, 0, 0);
        std::stable_sort(nodes.begin(), nodes.end(), [](const SharedNode &a, const SharedNode &b) {
            return a.level < b.level;
        });
    }
    std::vector<SharedNode> nodes;  // parents before their children

  private:
    struct Visit {
        std::vector<int64_t> rows;
        int64_t first, depth, level;  // first page that is not covered, first page that is not compared
    };
    const AttentionMetadata &step;
    const int64_t merge_tokens, unit;  // unit: pages that a node's end is a multiple of
    std::vector<Visit> pending;

    int64_t num_full_pages(int64_t row) const { return step.start[row] / step.page_size; }
    const int32_t *pages(int64_t row) const { return step.kv_indices + step.kv_indptr[row]; }

    void descend(const std::vector<int64_t> &all, int64_t first, int64_t depth, int64_t level) {
        pending.push_back({all, first, depth, level});
        while (!pending.empty()) {
            Visit visit = std::move(pending.back());
            pending.pop_back();
            std::vector<int64_t> &rows = visit.rows;
            rows.erase(std::remove_if(rows.begin(), rows.end(),
                                      [&](int64_t r) { return num_full_pages(r) <= visit.depth; }),
                       rows.end());
            std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) {
                return pages(a)[visit.depth] < pages(b)[visit.depth];
            });
            for (size_t from = 0, to; from < rows.size(); from = to) {
                const int32_t page = pages(rows[from])[visit.depth];
                for (to = from + 1; to < rows.size() && pages(rows[to])[visit.depth] == page;) to++;
                if (to - from > 1) visit_group({rows.begin() + from, rows.begin() + to}, visit);
            }
        }
    }

    void visit_group(const std::vector<int64_t> &group, const Visit &visit) {
        int64_t end = num_full_pages(group[0]);
        const int32_t *reference = pages(group[0]);
        for (int64_t row : group) {
            end = min(end, num_full_pages(row));
            const int32_t *row_pages = pages(row);
            if (memcmp(row_pages + visit.depth, reference + visit.depth, (end - visit.depth) * 4) == 0) continue;
            int64_t same = visit.depth;
            while (same < end && row_pages[same] == reference[same]) same++;
            end = same;
        }
        const int64_t count = int64_t(group.size());
        const int64_t last = end / unit * unit, tokens = (last - visit.first) * step.page_size;
        if ((count - 1) * tokens > count * merge_tokens) {
            nodes.push_back({group, visit.first, last, visit.level});
            pending.push_back({group, last, end, visit.level + 1});
        } else {
            pending.push_back({group, visit.first, end, visit.level});
        }
    }
};

// A step's `Jobs`, with the arrays that they point to.
class StepJobs {
  public:
    // See SharedPages; merge_tokens: negative where no pages are shared.
    StepJobs(const AttentionMetadata &step, int64_t boundary, int64_t merge_tokens) {
        std::vector<int64_t> covered(step.num_rows, 0);
        query_indptr.push_back(0);
        if (merge_tokens >= 0 && step.num_rows > 1) {
            SharedPages shared(step, merge_tokens, boundary);
            int64_t level = -1;
            for (const SharedNode &node : shared.nodes) {
                if (node.level != level) level_indptr.push_back(int64_t(flags.size()));
                level = node.level;
                for (int64_t row : node.rows) {
                    add_tokens(step, row);
                    covered[row] = node.end;
                }
                add_job(step.kv_indptr[node.rows[0]] + node.first,
                        (node.end - node.first) * step.page_size, node.first * step.page_size,
                        node.level ? 0 : BEGINS);
            }
        }
        level_indptr.push_back(int64_t(flags.size()));
        for (int64_t row = 0; row < step.num_rows; row++) {
            add_tokens(step, row);
            const int64_t first = covered[row] * step.page_size, begins = covered[row] ? 0 : BEGINS;
            add_job(step.kv_indptr[row] + covered[row], step.seq_lens[row] - first, first, CAUSAL | ENDS | begins);
            for (int64_t i = 0; i < step.qo_indptr[row + 1] - step.qo_indptr[row]; i++)
                positions.push_back(step.start[row] + i);
        }
        level_indptr.push_back(int64_t(flags.size()));
        jobs = {int64_t(flags.size()),  int64_t(level_indptr.size()) - 1,
                step.qo_indptr[step.num_rows], level_indptr.data(),
                query_indptr.data(),    query_tokens.data(),
                first_page.data(),      num_keys.data(),
                flags.data(),           first_key.data(),
                positions.data(),       step.last_seen,
                step.kv_indices,        step.page_size};
    }
    StepJobs(const StepJobs &) = delete;
    Jobs jobs;

  private:
    std::vector<int64_t> level_indptr, query_indptr, query_tokens, first_page, num_keys, flags, first_key, positions;

    void add_tokens(const AttentionMetadata &step, int64_t row) {
        for (int64_t t = step.qo_indptr[row]; t < step.qo_indptr[row + 1]; t++) query_tokens.push_back(t);
    }
    void add_job(int64_t page, int64_t keys, int64_t position, int64_t flag) {
        query_indptr.push_back(int64_t(query_tokens.size()));
        first_page.push_back(page), num_keys.push_back(keys), flags.push_back(flag);
        first_key.push_back(position);
    }
};
