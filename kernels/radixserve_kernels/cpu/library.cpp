// The C interface, see cpu_ops.py. Nothing here keeps Python's lock; running out of memory ends the
// process.
#include <cstdio>

#include "steps.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
static bool ask_for_tiles() {
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
}
#else
static bool ask_for_tiles() { return false; }
#endif

bool has_tiles = false;
thread_local int max_threads = 1;

template <class T>
static void pack(const T *weight, int64_t columns, int64_t depth, T *panels) {
    const int64_t size = padded_depth<T>(depth) * PANEL;
    memset((void *)panels, 0, (columns + PANEL - 1) / PANEL * size * sizeof(T));
    for (int64_t n = 0; n < columns; n++)
        for (int64_t k = 0; k < depth; k++)
            panels[n / PANEL * size + place<T>(k, int(n % PANEL))] = weight[n * depth + k];
}

template <class T> struct Attender {
    std::vector<Desk<T>> desks;
    Room state;
};

struct NativePlan {
    Heads heads;
    StepJobs step;
    Plan plan;
    NativePlan(const Rows &rows, const Heads &heads, bool shares, int64_t merge_tokens)
        : heads(heads), step(rows, shares, merge_tokens), plan(step.jobs, heads) {}
};

extern "C" {

// Once, before anything else.
void radixserve_start() { has_tiles = ask_for_tiles(); }
// 2: bfloat16 by AMX, 1: by AVX-512, 0: float only.
int radixserve_bf16() { return !HAS_BF16 ? 0 : has_tiles ? 2 : 1; }
void radixserve_use_tiles(int use) { has_tiles = use && ask_for_tiles(); }
int radixserve_lanes() { return LANES; }
void radixserve_set_threads(int count) { max_threads = count < 1 ? 1 : count; }

int64_t radixserve_packed_size(int is_bf16, int64_t columns, int64_t depth) {
    return round_up(columns, PANEL) * (is_bf16 ? padded_depth<bf16>(depth) : depth);
}

void radixserve_pack(int is_bf16, const void *weight, int64_t columns, int64_t depth, void *panels) {
    if (is_bf16)
        pack((const bf16 *)weight, columns, depth, (bf16 *)panels);
    else
        pack((const float *)weight, columns, depth, (float *)panels);
}

// out [rows][columns] = x [rows][stride] W^T; stride at least the padded depth, zeros behind depth.
void radixserve_linear(int is_bf16, const void *x, int64_t stride, int64_t rows, const void *panels,
                       const void *bias, int64_t columns, int64_t depth, void *out) {
    if (is_bf16) {
        Weight<bf16> w{(const bf16 *)panels, (const bf16 *)bias, columns, depth};
        linear<bf16, bf16>((const bf16 *)x, stride, rows, w, nullptr, (bf16 *)out, columns);
    } else {
        Weight<float> w{(const float *)panels, (const float *)bias, columns, depth};
        linear<float, float>((const float *)x, stride, rows, w, nullptr, (float *)out, columns);
    }
}

void *radixserve_plan(const Rows *rows, const Heads *heads, int shares, int64_t merge_tokens) {
    return new NativePlan(*rows, *heads, shares, merge_tokens);
}
// The plan of another step in the place of one.
void radixserve_renew_plan(void *plan, const Rows *rows, const Heads *heads, int shares,
                           int64_t merge_tokens) {
    ((NativePlan *)plan)->~NativePlan();
    new (plan) NativePlan(*rows, *heads, shares, merge_tokens);
}
// Arrays of *jobs live as long as the plan, the page ids as long as the rows.
void radixserve_jobs(const void *plan, Jobs *jobs) { *jobs = ((const NativePlan *)plan)->step.jobs; }
void radixserve_end_plan(void *plan) { delete (NativePlan *)plan; }

void *radixserve_attender(int is_bf16) {
    return is_bf16 ? (void *)new Attender<bf16> : (void *)new Attender<float>;
}
void radixserve_end_attender(int is_bf16, void *attender) {
    if (is_bf16)
        delete (Attender<bf16> *)attender;
    else
        delete (Attender<float> *)attender;
}

void radixserve_attend(int is_bf16, void *attender, void *plan, const void *q, int64_t q_stride,
                       const void *k, const void *v, void *out, int64_t out_stride, float scale) {
    NativePlan *native = (NativePlan *)plan;
    native->heads.scale = scale;
    auto attend = [&](auto zero) {
        using T = decltype(zero);
        auto *desk = (Attender<T> *)attender;
        if (desk->desks.size() < size_t(max_threads)) desk->desks.resize(max_threads);
        Attention<T>(native->plan, native->heads)
            .run((const T *)q, q_stride, (const T *)k, (const T *)v, (T *)out, out_stride, desk->desks,
                 desk->state);
    };
    if (is_bf16)
        attend(bf16{});
    else
        attend(0.0f);
}

int64_t radixserve_best(const float *x, int64_t rows, int64_t columns, int64_t *ids) {
    return best_of_rows(x, rows, columns, ids);
}

void *radixserve_decoder(int is_bf16, const DecoderShape *shape, const LayerPointers *layers,
                         const void *embedding, const void *norm, const void *head) {
    if (is_bf16)
        return new Decoder<bf16>(*shape, layers, (const bf16 *)embedding, (const bf16 *)norm,
                                 (const bf16 *)head);
    return new Decoder<float>(*shape, layers, (const float *)embedding, (const float *)norm,
                              (const float *)head);
}

void radixserve_end_decoder(int is_bf16, void *decoder) {
    if (is_bf16)
        delete (Decoder<bf16> *)decoder;
    else
        delete (Decoder<float> *)decoder;
}

void radixserve_run(int is_bf16, void *decoder, const Step *step, void *plan, void *kv,
                    int64_t layer_size) {
    const Plan &jobs = ((NativePlan *)plan)->plan;
    if (is_bf16)
        ((Decoder<bf16> *)decoder)->run(*step, jobs, (bf16 *)kv, layer_size);
    else
        ((Decoder<float> *)decoder)->run(*step, jobs, (float *)kv, layer_size);
}

int64_t radixserve_decode_steps(int is_bf16, void *decoder, DecodeSteps *wanted, int shares,
                                int64_t merge_tokens, void *kv, int64_t layer_size) {
    if (is_bf16)
        return decode_steps(*wanted, *(Decoder<bf16> *)decoder, shares, merge_tokens, (bf16 *)kv, layer_size);
    return decode_steps(*wanted, *(Decoder<float> *)decoder, shares, merge_tokens, (float *)kv, layer_size);
}
}
