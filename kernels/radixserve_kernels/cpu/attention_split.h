// Attention of few rows to many keys: partitions of the keys are spread over the threads, and merged in order by
// whichever thread finishes last, with the bits that one thread computes.
#pragma once

#include "attention_task.h"

// Memory that all threads share for a split job.
struct SplitBuffers {
    float *states;                   // [partitions][heads][rows][partial_size] the state after each
    std::atomic<int64_t> *num_done;  // units that were read
    int64_t num_floats;

    // head_floats: of the states of a K/V head.
    SplitBuffers(float *memory, const Split &split, int64_t head_floats)
        : states(memory + 16), num_done((std::atomic<int64_t> *)memory),
          num_floats(16 + round_up(split.num_partitions() * split.task.num_heads * head_floats, 16)) {}
};
