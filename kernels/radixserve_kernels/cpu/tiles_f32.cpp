// See tiles_f32.h.
#include "lane_scores.h"
#include "tiles_f32.h"

static constexpr int STEPS = 6;  // of k, without a branch
static constexpr int BOUND_BY_READS = 4;  // rows whose arithmetic takes less time than reading the panel

// M rows of x [M][stride] times P panels, to out[M][P * PANEL].
template <int M, int P, class W, class Fetch>
static void tile(Output output, const float *x, int64_t stride, const W *panel, int64_t panel_size, int64_t depth,
                 float *out, int64_t out_stride, Fetch &caller_prefetcher) {
    constexpr int N = 2 * P;
    constexpr bool FETCHES = std::is_same<Fetch, PrefetcherF32>::value;
    constexpr bool READS = std::is_same<Fetch, PanelPrefetch>::value;
    Fetch prefetcher = caller_prefetcher;  // a copy stays in registers
    alignas(64) static constexpr float zeros[N * LANES] = {};  // no branch around the sums: it would spill registers
    const float *start = output == Accumulate ? out : zeros;
    const int64_t start_stride = output == Accumulate ? out_stride : 0;
    vec sums[M][N];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[m][n] = load(start + m * start_stride + n * LANES);
    const float *three_rows[(M + 2) / 3];  // row m is three_rows[m / 3][m % 3 * stride]: no pointer spills
    for (int i = 0; i < (M + 2) / 3; i++) three_rows[i] = x + 3 * i * stride;
    for (int64_t k = 0; k < depth;) {
        prefetcher.fetch();
        const int64_t end = FETCHES ? min<int64_t>(k + FETCH_DEPTH, depth) : depth;
        auto step = [&](int i) {
            vec w[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                const W *from = panel + (n / 2) * panel_size + i * PANEL + (n % 2) * LANES;
                if (READS) prefetch_panel<M <= BOUND_BY_READS, LANES * int(sizeof(W))>(from);
                w[n] = load(from);
            }
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                vec one = broadcast(three_rows[m / 3][m % 3 * stride + i]);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
                    sums[m][n] = FETCHES || READS ? fmadd(sums[m][n], one, w[n]) : sums[m][n] + one * w[n];
            }
        };
        auto advance = [&](int steps) {
#pragma GCC unroll 4
            for (int i = 0; i < (M + 2) / 3; i++) three_rows[i] += steps;
            panel += steps * PANEL, k += steps;
        };
        for (; (FETCHES || READS) && k + STEPS <= end; advance(STEPS)) {
#pragma GCC unroll 6
            for (int i = 0; i < STEPS; i++) step(i);
        }
        for (; k < end; advance(1)) step(0);
    }
    caller_prefetcher = prefetcher;
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(out + m * out_stride + n * LANES, sums[m][n]);
}

// `tile` for bfloat16 panels, which are widened in registers.
template <int M, int P>
static void widening_tile(const float *x, int64_t stride, const bf16 *panel, int64_t panel_size, int64_t depth,
                          float *out, int64_t out_stride) {
    constexpr int N = 2 * P, AHEAD = 2048;  // bytes
    constexpr int64_t TILE = DEPTH * PANEL * sizeof(bf16);
    vec sums[M][N] = {};
    for (int64_t k = 0; k < depth; k += DEPTH, panel += DEPTH * PANEL) {
        // After the end of these panels the next P follow, each of which begins P panels after the one that ends.
        const bool is_next = (depth - k) / DEPTH * TILE <= AHEAD;
        const int64_t ahead = AHEAD / int(sizeof(bf16)) + (is_next ? (P - 1) * panel_size : 0);
        for (int i = 0; i < DEPTH; i += 2, x += 2) {
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                const bf16 *from = panel + (n / 2) * panel_size + panel_offset<bf16>(i, n % 2 * LANES);
                if (n % 2 == 0 || LANES == 16) prefetch<64, 3>(from + ahead);
                const uvec pairs = load_pairs(from);
                const vec low = low_halves(pairs), high = high_halves(pairs);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    sums[m][n] += broadcast(x[m * stride]) * low;
                    sums[m][n] += broadcast(x[m * stride + 1]) * high;
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(out + m * out_stride + n * LANES, sums[m][n]);
}

// See tile_rows_by_lanes. Sums of lanes are added as soon as both are finished; meanwhile one waits in memory.
template <int M, int PARTS>
static void lane_tile(const float *x, int64_t stride, const float *panel, int64_t depth, float *out,
                      int64_t out_stride) {
    static constexpr int ORDER[8] = {0, 2, 1, 3, 4, 6, 5, 7};
    vec waiting[3][M][2];
    for (int i = 0; i < 8; i++) {
        vec sums[M][2] = {};
        const float *from = panel + ORDER[i] * (depth / 8) * PANEL;
        for (int64_t k = ORDER[i] * PARTS; k < depth; k += 8 * PARTS)
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++, from += PANEL) {
                const vec low = load(from), high = load(from + LANES);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    const vec feature = broadcast(x[m * stride + k + part]);
                    sums[m][0] += feature * low, sums[m][1] += feature * high;
                }
            }
        auto add_waiting = [&](int level) {
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) sums[m][0] += waiting[level][m][0], sums[m][1] += waiting[level][m][1];
        };
        if (i % 2) add_waiting(0);
        if (i % 4 == 3) add_waiting(1);
        if (i == 7) add_waiting(2);
        const int level = i % 2 == 0 ? 0 : i % 4 == 1 ? 1 : 2;  // of the sums that wait now
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
            if (i < 7) waiting[level][m][0] = sums[m][0], waiting[level][m][1] = sums[m][1];
            else store2(out + m * out_stride, sums[m][0], sums[m][1]);
    }
}

template <int P>
void tile_rows_f32(Output output, int rows, const float *x, int64_t stride, const float *panel, int64_t panel_size,
                   int64_t depth, float *out, int64_t out_stride) {
    NoPrefetch no_prefetch;
    with_row_count<ROWS / P>(rows, [&](auto count) {
        tile<count, P>(output, x, stride, panel, panel_size, depth, out, out_stride, no_prefetch);
    });
}

void tile_rows_f32(Output output, int rows, const float *x, int64_t stride, const float *panel, int64_t depth,
                   float *out, PrefetcherF32 &prefetcher) {
    with_row_count<ROWS, ROWS / 2>(rows, [&](auto count) {
        tile<count, 1>(output, x, stride, panel, 0, depth, out, PANEL, prefetcher);
    });
}

// Panels of vectors one at a time: what is read is then one stream, which goes on from panel to panel.
template <int P, class W>
static void few_rows_panels(const float *x, int64_t stride, int rows, const W *panel, int64_t panel_size, int64_t depth,
                            float *out) {
    PanelPrefetch panel_prefetch;
    with_row_count<few_rows<W>()>(rows, [&](auto count) {
        tile<count, P>(Store, x, stride, panel, panel_size, depth, out, P * PANEL, panel_prefetch);
    });
}

template <int P>
static void few_rows_panels(const float *x, int64_t stride, int rows, const bf16 *panel, int64_t panel_size,
                            int64_t depth, float *out) {
    with_row_count<few_rows<bf16>() * P <= ROWS ? few_rows<bf16>() : ROWS / P>(rows, [&](auto count) {
        widening_tile<count, P>(x, stride, panel, panel_size, depth, out, P * PANEL);
    });
}

template <int P, class W>
void few_rows_panels_f32(const float *x, int64_t stride, int rows, const W *panel, int64_t panel_size, int64_t depth,
                         float *out) {
    few_rows_panels<P>(x, stride, rows, panel, panel_size, depth, out);
}

template <int PARTS>
void tile_rows_by_lanes(int rows, const float *x, int64_t stride, const float *panel, int64_t depth, float *out,
                        int64_t out_stride) {
    with_row_count<ROWS>(rows, [&](auto count) {
        lane_tile<count, PARTS>(x, stride, panel, depth, out, out_stride);
    });
}

#if defined(RADIXSERVE_LANE_SCORES)
template void tile_rows_by_lanes<4 / sizeof(RADIXSERVE_NUMBER)>(int, const float *, int64_t, const float *, int64_t,
                                                                float *, int64_t);
#endif
template void tile_rows_f32<1>(Output, int, const float *, int64_t, const float *, int64_t, int64_t, float *, int64_t);
template void tile_rows_f32<4>(Output, int, const float *, int64_t, const float *, int64_t, int64_t, float *, int64_t);

#define RADIXSERVE_FEW_ROWS(P, W) \
    template void few_rows_panels_f32<P, W>(const float *, int64_t, int, const W *, int64_t, int64_t, float *);
RADIXSERVE_FEW_ROWS(1, RADIXSERVE_NUMBER)
#if defined(RADIXSERVE_IS_BF16)
RADIXSERVE_FEW_ROWS(2, bf16)
RADIXSERVE_FEW_ROWS(4, bf16)
#else  // weights in float16 are a form beside activations in float32
RADIXSERVE_FEW_ROWS(1, half)
#endif
