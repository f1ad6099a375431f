// Reads rows of K and V in the order of some slots, and does nothing else with them.
#include <cstdint>

typedef uint64_t words __attribute__((vector_size(64), aligned(1), may_alias));

template <int LEVEL>
static void prefetch_row(const char *row, int64_t row_bytes) {
    for (int64_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(row + b, 0, LEVEL);
    if (row_bytes % 64) __builtin_prefetch(row + row_bytes - 1, 0, LEVEL);
}

template <int LEVEL, int TIMES>
static uint64_t read(const char *k, const char *v, const int32_t *slots, int64_t count, int64_t row_bytes,
                     int64_t ahead) {
    words of_k = {}, of_v = {};
    const int64_t whole = row_bytes / 64 * 64, last = row_bytes - 64;  // a row's last words may be read twice
    for (int64_t i = 0; i < count; i++) {
        const char *key = k + slots[i] * row_bytes, *value = v + slots[i] * row_bytes;
        for (int64_t later = ahead; later <= TIMES * ahead && ahead; later += ahead) {
            prefetch_row<LEVEL>(k + slots[i + later] * row_bytes, row_bytes);
            prefetch_row<LEVEL>(v + slots[i + later] * row_bytes, row_bytes);
        }
        for (int64_t b = 0; b < whole; b += 64) of_k ^= *(const words *)(key + b), of_v ^= *(const words *)(value + b);
        if (whole < row_bytes) of_k ^= *(const words *)(key + last), of_v ^= *(const words *)(value + last);
    }
    const words all = of_k ^ of_v;
    return all[0] ^ all[1] ^ all[2] ^ all[3] ^ all[4] ^ all[5] ^ all[6] ^ all[7];
}

// k, v: [slots][row_bytes]; slots: [count + times * ahead]. Rows are prefetched `ahead` rows before they are read, 0: not
// at all; into the first cache level, or with is_far into the second, there up to three `times`: also twice and three
// times as far ahead.
extern "C" uint64_t read_rows(const char *k, const char *v, const int32_t *slots, int64_t count, int64_t row_bytes,
                              int64_t ahead, int64_t is_far, int64_t times) {
    const auto run = times == 3 ? read<2, 3> : times == 2 ? read<2, 2> : is_far ? read<2, 1> : read<3, 1>;
    return run(k, v, slots, count, row_bytes, ahead);
}
