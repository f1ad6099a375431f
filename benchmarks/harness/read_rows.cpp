// Reads rows of K and V in the order of some slots, and does nothing else with them.
#include <cstdint>

typedef uint64_t words __attribute__((vector_size(64), aligned(1), may_alias));

// k, v: [slots][row_bytes]; slots: [count + ahead]. Rows are prefetched `ahead` rows before they are read, 0: not at all.
extern "C" uint64_t read_rows(const char *k, const char *v, const int32_t *slots, int64_t count, int64_t row_bytes,
                              int64_t ahead) {
    words sums[4] = {};
    const int64_t whole = row_bytes / 64 * 64;
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = slots[i] * row_bytes, later = slots[i + ahead] * row_bytes;
        for (int64_t b = 0; b < whole; b += 64) {
            if (ahead) __builtin_prefetch(k + later + b, 0, 3), __builtin_prefetch(v + later + b, 0, 3);
            sums[b / 64 % 2] ^= *(const words *)(k + at + b), sums[2 + b / 64 % 2] ^= *(const words *)(v + at + b);
        }
        if (whole == row_bytes) continue;
        const int64_t last = row_bytes - 64;  // overlaps what was read
        if (ahead) __builtin_prefetch(k + later + row_bytes - 1, 0, 3), __builtin_prefetch(v + later + row_bytes - 1, 0, 3);
        sums[0] ^= *(const words *)(k + at + last), sums[2] ^= *(const words *)(v + at + last);
    }
    const words all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    return all[0] ^ all[1] ^ all[2] ^ all[3] ^ all[4] ^ all[5] ^ all[6] ^ all[7];
}
