// The C interface, see cpu_library.py. No function takes Python's lock; running out of memory ends the
// process. is_bf16: numbers are bfloat16, else float32.
#include "argmax.h"
#include "cascade.h"
#include "decoder.h"

#if defined(RADIXSERVE_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
static bool request_amx() {
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
}
#else
static bool request_amx() { return false; }
#endif

bool has_amx = false;
thread_local int max_threads = 1;

// call(zero) with a zero of the number type.
template <class Call> static auto with_type(int is_bf16, Call &&call) {
    return is_bf16 ? call(bf16{}) : call(0.0f);
}

// Attention over a plan's jobs, with its memory.
struct AttentionRunner {
    std::vector<ThreadScratch> scratches;
    Scratch state;
};

struct NativePlan {
    Heads heads;
    StepJobs step;
    Plan plan;
    NativePlan(const HostIndex &rows, const Heads &heads, bool shares, int64_t merge_tokens)
        : heads(heads), step(rows, shares, merge_tokens), plan(step.jobs, heads) {}
};

extern "C" {

// Called once, before anything else.
void radixserve_start() { has_amx = request_amx(); }
// bfloat16 products: 2 by AMX, 1 by AVX-512's instructions for them, 0 widened to float32.
int radixserve_bf16() { return std::is_same<Operand<bf16>, float>::value ? 0 : has_amx ? 2 : 1; }
void radixserve_use_amx(int use) { has_amx = use && request_amx(); }
int radixserve_lanes() { return LANES; }
void radixserve_set_threads(int count) { max_threads = count < 1 ? 1 : count; }

// Elements of a packed weight [columns, depth].
int64_t radixserve_packed_size(int is_bf16, int64_t columns, int64_t depth) {
    return round_up(columns, PANEL) * (is_bf16 ? padded_depth<bf16>(depth) : depth);
}

// weight [columns][depth] to `panels`, which are zero.
void radixserve_pack(int is_bf16, const void *weight, int64_t columns, int64_t depth, void *panels) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        const int64_t size = padded_depth<T>(depth) * PANEL;
        for (int64_t n = 0; n < columns; n++)
            for (int64_t k = 0; k < depth; k++)
                ((T *)panels)[n / PANEL * size + panel_offset<T>(k, int(n % PANEL))] =
                    ((const T *)weight)[n * depth + k];
    });
}

// out [rows][columns] = x [rows][stride] W^T + bias; stride >= the padded depth, zeros after depth.
void radixserve_linear(int is_bf16, const void *x, int64_t stride, int64_t rows, const void *weight, void *out) {
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        const Weight<T> &w = *(const Weight<T> *)weight;
        linear<T, T>((const T *)x, stride, rows, w, nullptr, (T *)out, w.columns);
    });
}

void *radixserve_plan(const HostIndex *rows, const Heads *heads, int shares, int64_t merge_tokens) {
    return new NativePlan(*rows, *heads, shares, merge_tokens);
}
// Replaces a plan in place.
void radixserve_reset_plan(void *plan, const HostIndex *rows, const Heads *heads, int shares,
                           int64_t merge_tokens) {
    ((NativePlan *)plan)->~NativePlan();
    new (plan) NativePlan(*rows, *heads, shares, merge_tokens);
}
// Arrays of *jobs live as long as the plan, the page ids as long as the rows.
void radixserve_jobs(const void *plan, Jobs *jobs) { *jobs = ((const NativePlan *)plan)->step.jobs; }
void radixserve_delete_plan(void *plan) { delete (NativePlan *)plan; }

void *radixserve_attention() { return new AttentionRunner; }
void radixserve_delete_attention(void *attention) { delete (AttentionRunner *)attention; }

// q, out [tokens][heads][dim] with a stride between tokens; k, v [slots][kv_heads][dim].
void radixserve_attend(int is_bf16, void *attention, void *plan, const void *q, int64_t q_stride, const void *k,
                       const void *v, void *out, int64_t out_stride, float scale) {
    NativePlan *native = (NativePlan *)plan;
    AttentionRunner *runner = (AttentionRunner *)attention;
    native->heads.scale = scale;
    with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        Attention<T>(native->plan, native->heads)
            .run((const T *)q, q_stride, (const T *)k, (const T *)v, (T *)out, out_stride, runner->scratches,
                 runner->state);
    });
}

int64_t radixserve_argmax(const float *x, int64_t rows, int64_t columns, int64_t *ids) {
    return argmax_rows(x, rows, columns, ids);
}

// layers: Layer<T> [num_layers]; head: Weight<T>.
void *radixserve_decoder(int is_bf16, const DecoderShape *shape, const void *layers, const void *embedding,
                         const void *norm, const void *head) {
    return with_type(is_bf16, [&](auto zero) -> AnyDecoder * {
        using T = decltype(zero);
        return new FusedDecoder<T>(*shape, (const Layer<T> *)layers, (const T *)embedding, (const T *)norm,
                                   *(const Weight<T> *)head);
    });
}
void radixserve_delete_decoder(void *decoder) { delete (AnyDecoder *)decoder; }

void radixserve_run(void *decoder, const Step *step, void *plan, void *kv, int64_t layer_size) {
    ((AnyDecoder *)decoder)->run(*step, ((NativePlan *)plan)->plan, kv, layer_size);
}
}
