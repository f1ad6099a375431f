// The best token of each row of logits, and what a grammar forbids.
#pragma once

#include <limits>

#include "vectors.h"

// The index of the first maximum of each row of x [rows][columns], or of its first NaN, to ids [rows].
// Returns how many of these values are not finite.
inline int64_t argmax_rows(const float *x, int64_t rows, int64_t columns, int64_t *ids) {
    int64_t num_not_finite = 0;
    for (int64_t row = 0; row < rows; row++, x += columns) {
        constexpr int FOUR_VECTORS = 4 * LANES;
        vec most[4], odd[4] = {};  // odd: NaN once any value is not finite
        for (vec &one : most) one = broadcast(x[0]);
        int64_t i = 0;
        for (; i + FOUR_VECTORS <= columns; i += FOUR_VECTORS)
            for (int j = 0; j < 4; j++) {
                const vec some = load(x + i + j * LANES);
                most[j] = max(most[j], some), odd[j] += some - some;
            }
        float top = reduce_max(max(max(most[0], most[1]), max(most[2], most[3])));
        float rest = reduce_add(odd[0] + odd[1] + odd[2] + odd[3]);
        for (; i < columns; i++) top = x[i] > top ? x[i] : top, rest += x[i] - x[i];
        int64_t at = 0;
        if (rest != rest) {
            for (at = 0; at < columns && x[at] == x[at];) at++;
            if (at == columns) {
                at = 0;
                for (i = 1; i < columns; i++) at = x[i] > x[at] ? i : at;
            }
        } else {
            while (at + LANES <= columns && !any_equal(load(x + at), top)) at += LANES;
            while (x[at] != top) at++;
        }
        ids[row] = at;
        num_not_finite += x[at] - x[at] != 0;
    }
    return num_not_finite;
}

inline bool is_allowed(const uint32_t *mask, int64_t at) { return mask[at / 32] >> (at % 32) & 1; }

// The index of the first maximum, or of the first NaN, among the values of x [columns] that mask allows: bit
// i % 32 of word i / 32. -1 where it allows none. Words without a bit cost nothing but their reading.
inline int64_t argmax_allowed(const float *x, int64_t columns, const uint32_t *mask) {
    float top = 0;
    int64_t at = -1;
    for (int64_t first = 0; first < columns; first += 32) {
        const uint32_t word = mask[first / 32];
        if (!word) continue;
        if (at >= 0 && first + 32 <= columns) {
            const float *values = x + first;
            float some[32];
            if (word != 0xFFFFFFFF) {  // the best so far in place of what is not allowed
                for (int i = 0; i < 32; i++) some[i] = word >> i & 1 ? values[i] : top;
                values = some;
            }
            vec most = load(values), odd = most - most;
            for (int i = LANES; i < 32; i += LANES) {
                const vec next = load(values + i);
                most = max(most, next), odd += next - next;
            }
            const float rest = reduce_add(odd);
            if (rest == rest && !(reduce_max(most) > top)) continue;
        }
        for (int64_t i = first; i < columns && i < first + 32; i++)
            if (is_allowed(mask, i)) {
                if (x[i] != x[i]) return i;
                if (at < 0 || x[i] > top) top = x[i], at = i;
            }
    }
    return at;
}

// x [columns] as it is where mask, as above, allows it, -inf elsewhere.
inline void copy_allowed(const float *x, int64_t columns, const uint32_t *mask, float *to) {
    constexpr float NEVER = -std::numeric_limits<float>::infinity();
    for (int64_t first = 0; first < columns; first += 32, x += 32, to += 32) {
        const uint32_t word = mask[first / 32];
        if (columns - first < 32)
            for (int i = 0; i < columns - first; i++) to[i] = word >> i & 1 ? x[i] : NEVER;
        else if (!word)
            for (int i = 0; i < 32; i++) to[i] = NEVER;
        else
            for (int i = 0; i < 32; i++) to[i] = word >> i & 1 ? x[i] : NEVER;
    }
}
