// Several decode steps in one go: each row's best token goes into the next step.
#pragma once

#include <chrono>

#include "argmax.h"
#include "cascade.h"
#include "decoder.h"

// Rows of one token each that take `num_steps` steps together; their pages reach to the end of the last
// one. What the caller gives is borrowed until `decode_steps` returns.
struct DecodeSteps {
    int64_t num_rows, num_steps, page_size, num_end_ids;
    const int64_t *token_ids;   // [R] the tokens of the first step
    const int64_t *start;       // [R] their positions
    const int64_t *first_page;  // [R] where each row's pages begin in page_ids
    const int32_t *page_ids;
    const int64_t *end_ids;  // no step follows one that draws any of these
    const float *rotations;  // of every position
    float *logits;           // [R][vocab] of the last step
    const int32_t *hurry;    // not zero, whenever that is: no further step
    int64_t *drawn;          // [num_steps][R] what comes out
    double plan_seconds, draw_seconds;
};

// Returns how many steps count: all; those up to one that drew an end id, or behind which there was a
// hurry; or those before one in which the best logit of some row is not finite.
template <class T>
int64_t decode_steps(DecodeSteps &wanted, FusedDecoder<T> &decoder, bool shares, int64_t merge_tokens, T *kv,
                     int64_t layer_size) {
    using Clock = std::chrono::steady_clock;
    const auto seconds = [](Clock::duration time) { return std::chrono::duration<double>(time).count(); };
    const int64_t count = wanted.num_rows, page_size = wanted.page_size;
    std::vector<int64_t> index(6 * count + 1);
    int64_t *position = index.data(), *length = position + count, *slot = length + count;
    int64_t *token_id = slot + count, *token = token_id + count;
    for (int64_t row = 0; row < count; row++)
        position[row] = wanted.start[row], token_id[row] = wanted.token_ids[row];
    for (int64_t row = 0; row <= count; row++) token[row] = row;
    const HostIndex rows{count, page_size, position, token, wanted.first_page, wanted.page_ids, length};
    const Step step{count, count, token_id, position, slot, token, wanted.rotations, wanted.logits};
    wanted.plan_seconds = wanted.draw_seconds = 0;
    for (int64_t done = 0;;) {
        const auto began = Clock::now();
        for (int64_t row = 0; row < count; row++) {
            const int32_t *pages = wanted.page_ids + wanted.first_page[row];
            slot[row] = pages[position[row] / page_size] * page_size + position[row] % page_size;
            length[row] = position[row] + 1;
        }
        const StepJobs jobs(rows, shares, merge_tokens);
        const Plan plan(jobs.jobs, decoder.heads());
        const auto planned = Clock::now();
        decoder.run(step, plan, kv, layer_size);
        const auto computed = Clock::now();
        int64_t *drawn = wanted.drawn + done * count;
        const int64_t num_broken = argmax_rows(wanted.logits, count, decoder.shape.vocab, drawn);
        bool ends = false;
        for (int64_t row = 0; row < count; row++) {
            for (int64_t i = 0; i < wanted.num_end_ids; i++) ends |= drawn[row] == wanted.end_ids[i];
            token_id[row] = drawn[row], position[row]++;
        }
        wanted.plan_seconds += seconds(planned - began);
        wanted.draw_seconds += seconds(Clock::now() - computed);
        if (num_broken) return done;
        ends |= __atomic_load_n(wanted.hurry, __ATOMIC_RELAXED) != 0;
        if (++done == wanted.num_steps || ends) return done;
    }
}
