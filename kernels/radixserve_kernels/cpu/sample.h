// A token sampled with a temperature, by inverting the cumulative distribution in the order of the vocabulary.
#pragma once

#include "argmax.h"

constexpr int64_t SAMPLE_BLOCK = 256;  // tokens whose weights are summed first

// The weights of `count` <= SAMPLE_BLOCK tokens: 2 to the power of (x - top) * scale where mask allows one, 0 elsewhere
// and below 2 to the power of -126. mask may be null. Returns their sum; weights has room for SAMPLE_BLOCK.
inline float sample_weights(const float *x, int64_t count, const uint32_t *mask, float top, float scale, float *weights) {
    constexpr float NEVER = -std::numeric_limits<float>::infinity();
    vec sum = {};
    for (int64_t first = 0; first < count; first += 32) {
        const uint32_t word = mask ? mask[first / 32] : 0xFFFFFFFF;
        if (!word) {
            for (int i = 0; i < 32; i++) weights[first + i] = 0;
            continue;
        }
        const float *values = x + first;
        float some[32];
        if (word != 0xFFFFFFFF || count - first < 32) {
            copy_allowed(values, count - first < 32 ? count - first : 32, &word, some);
            for (int64_t i = count - first; i < 32; i++) some[i] = NEVER;
            values = some;
        }
        for (int i = 0; i < 32; i += LANES) {
            const vec power = (load(values + i) - broadcast(top)) * broadcast(scale);
            const vec weight = power >= broadcast(-126.0f) ? fast_exp2<float>(power) : vec{};
            store(weights + first + i, weight), sum += weight;
        }
    }
    return reduce_add(sum);
}

// A token of x [columns], whose largest allowed value is the finite `top`: the first up to which more than `uniform`,
// in (0, 1), of the weight lies. sums: room for a number a block. One of weight zero is never sampled.
inline int64_t sample_token(const float *x, int64_t columns, const uint32_t *mask, float top, float temperature,
                          double uniform, double *sums) {
    const float scale = 1.44269504f / temperature;
    float weights[SAMPLE_BLOCK];
    auto sum_block = [&](int64_t block) {
        const int64_t first = block * SAMPLE_BLOCK, rest = columns - first;
        const uint32_t *words = mask ? mask + first / 32 : nullptr;
        return sample_weights(x + first, rest < SAMPLE_BLOCK ? rest : SAMPLE_BLOCK, words, top, scale, weights);
    };
    const int64_t num_blocks = (columns + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
    double total = 0;
    for (int64_t block = 0; block < num_blocks; block++) total += sums[block] = sum_block(block);
    const double point = uniform * total;
    int64_t chosen = 0;
    double before = 0, mass = 0;  // of the blocks before the chosen one, and before this one
    for (int64_t block = 0; block < num_blocks && mass <= point; mass += sums[block++])
        if (sums[block] > 0) chosen = block, before = mass;
    sum_block(chosen);
    int64_t at = 0;
    mass = before;
    for (int64_t i = 0; i < SAMPLE_BLOCK && chosen * SAMPLE_BLOCK + i < columns && mass <= point; mass += weights[i++])
        if (weights[i] > 0) at = i;
    return chosen * SAMPLE_BLOCK + at;
}
