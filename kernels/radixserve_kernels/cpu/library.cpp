// The C interface, see cpu_library.py. No function takes Python's lock. Those that need memory return 1, or null for
// a pointer, where there is none. RADIXSERVE_NUMBER is the type of all numbers, float or bf16; is_bf16 says it once
// more, and RADIXSERVE_IS_BF16 is defined with the latter.
#include "cascade.h"
#include "decoder.h"
#include "sample.h"

#include <algorithm>
#include <optional>

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
const QuantizedForm *const *quantized_forms = nullptr;

// call(zero) with a zero of the number type.
template <class Call> static auto with_type(int is_bf16, Call &&call) {
    if (bool(is_bf16) != std::is_same<RADIXSERVE_NUMBER, bf16>::value) abort();
    return call(RADIXSERVE_NUMBER{});
}

// Whether `call` found no memory.
template <class Call> static int lacks_memory(Call &&call) {
    try {
        call();
        return 0;
    } catch (const std::exception &) {
        return 1;
    }
}

// What `make` returns, null where there is no memory.
template <class Make> static void *make_or_null(Make &&make) {
    void *made = nullptr;
    lacks_memory([&] { made = make(); });
    return made;
}

// Attention over a plan's jobs, with its memory.
struct AttentionRunner {
    std::vector<ThreadScratch> scratches;
    Scratch split;
    Scratch state;
};

struct NativePlan {
    Heads heads;
    StepJobs step;
    Plan plan;
    NativePlan(const AttentionMetadata &rows, const Heads &heads, int64_t merge_tokens, bool is_exact)
        : heads(heads), step(rows, is_exact ? job_grid() : 1, merge_tokens), plan(step.jobs, heads) {}
};

// The plan of borrowed rows, made when it is first used after they were marked as new.
struct AnyPlan {
    AttentionMetadata *rows;
    const Heads heads;
    const int64_t merge_tokens;  // see SharedPages; negative: rows share no pages
    const bool is_exact;
    std::optional<NativePlan> made;  // empty after it could not be replaced

    NativePlan &get() {
        if (rows->is_new) made.emplace(*rows, heads, merge_tokens, is_exact), rows->is_new = 0;
        return made.value();
    }
};
static NativePlan &native(void *plan) { return ((AnyPlan *)plan)->get(); }
static bool is_compact(int kind) { return HAS_COMPACT_PANELS && kind == 3; }
static void use_threads(int64_t count) { max_threads = count < 1 ? 1 : int(count); }

#pragma GCC visibility push(default)
extern "C" {

// Called once, before anything else.
void radixserve_start() { has_amx = request_amx(); }
// bfloat16 products: 3 by arm64's instructions for them, those with weights, 2 by AMX, 1 by AVX-512's, 0 widened to
// float32.
int radixserve_bf16() {
#if defined(RADIXSERVE_BF16_WEIGHTS)
    return 3;
#else
    return std::is_same<Operand<bf16>, float>::value ? 0 : has_amx ? 2 : 1;
#endif
}
void radixserve_use_amx(int use) { has_amx = use && request_amx(); }
int radixserve_lanes() { return LANES; }
void radixserve_set_threads(int count) { use_threads(count); }

// Elements of a packed weight [columns, depth]. kind: 0 float32, 1 bfloat16, 2 float16, 3 bfloat16 as COMPACT.
int64_t radixserve_packed_size(int kind, int64_t columns, int64_t depth) {
    const bool is_bf16 = kind == 1 || kind == 3;
    return round_up(columns, is_compact(kind) ? LANES : PANEL) * (is_bf16 ? padded_depth<bf16>(depth) : depth);
}

// Ranks that a vector of an adapter's b has room for, see lora.h.
int64_t radixserve_lora_depth(int is_bf16, int64_t ranks) {
    return with_type(is_bf16, [&](auto zero) { return lora_depth<decltype(zero)>(ranks); });
}

// weight [columns][depth] to `panels`, which are zero.
void radixserve_pack(int kind, const void *weight, int64_t columns, int64_t depth, void *panels) {
    auto pack = [&](auto zero) {
        using T = decltype(zero);
        const int64_t size = padded_depth<T>(depth) * PANEL;
        const int64_t first_compact = is_compact(kind) && columns % PANEL <= LANES ? columns / PANEL * PANEL : columns;
        for (int64_t n = 0; n < columns; n++)
            for (int64_t k = 0; k < depth; k++) {
                const int64_t missing = n < first_compact ? 0 : k / DEPTH * DEPTH * LANES;
                ((T *)panels)[n / PANEL * size + panel_offset<T>(k, int(n % PANEL)) - missing] =
                    ((const T *)weight)[n * depth + k];
            }
    };
    kind == 2 ? pack(half{}) : with_type(kind != 0, pack);
}

// Products of 8 and 4 bits: by arm64's matrix instructions 4, its dot product 3, VNNI 2, sums of pairs 1, vector
// operations of the compiler 0.
int radixserve_integer_dot() { return IntegerDot::LEVEL; }
// forms: what radixserve_forms of forms.cpp returns.
void radixserve_use_forms(const void *forms) { quantized_forms = (const QuantizedForm *const *)forms; }

// out [rows][columns] = x [rows][stride] W^T + bias; stride >= the padded depth, zeros after depth.
int radixserve_linear(int is_bf16, const void *x, int64_t stride, int64_t rows, const void *weight, void *out) {
    return lacks_memory([&] { with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        const Weight<T> &w = *(const Weight<T> *)weight;
        int64_t columns = 0;
        for (const Weight<T> *part = &w; part; part = part->next) columns += part->columns;
        this_team().run(num_threads_for(price(2 * rows * w.num_numbers(), w.num_bytes())), [&](const TeamThread &thread) {
            linear<T>(thread, (const T *)x, stride, rows, w, nullptr, (T *)out, columns);
        });
    }); });
}

// out [rows][columns] float32 = experts of x [rows][stride]; see radixserve_linear.
int radixserve_experts(int is_bf16, const void *experts, const void *x, int64_t stride, int64_t rows, float *out) {
    return lacks_memory([&] { with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        static thread_local ExpertMlp<T, T> own;
        ExpertMlp<T, T> &mlp = own;  // also in the other threads
        const Experts<T> &some = *(const Experts<T> *)experts;
        mlp.prepare(some, rows);
        memset(out, 0, rows * some.hidden() * sizeof(float));
        this_team().run(num_threads_for(some.work(rows)), [&](const TeamThread &thread) {
            mlp.run(thread, some, (const T *)x, stride, rows, out, some.hidden(), 1);
        });
    }); });
}

// A plan for `rows`, now and each time that they are marked as new.
void *radixserve_plan(AttentionMetadata *rows, const Heads *heads, int64_t merge_tokens, int is_exact) {
    return make_or_null([&] { return new AnyPlan{rows, *heads, merge_tokens, bool(is_exact), {}}; });
}
// Tokens of which the first position of a job is a multiple.
int radixserve_job_grid() { return int(job_grid()); }
// Arrays of *jobs live as long as the plan, the page ids as long as the rows.
int radixserve_jobs(void *plan, Jobs *jobs) {
    return lacks_memory([&] { *jobs = native(plan).step.jobs; });
}
void radixserve_delete_plan(void *plan) { delete (AnyPlan *)plan; }

void *radixserve_attention() {
    return make_or_null([] { return new AttentionRunner; });
}
void radixserve_delete_attention(void *attention) { delete (AttentionRunner *)attention; }

// q, out [tokens][heads][dim] with a stride between tokens. page_ids: window pages in the places of the plan's pages, or
// null.
int radixserve_attend(int is_bf16, void *attention, void *plan, const void *q, int64_t q_stride, const LayerKV *kv,
                      void *out, int64_t out_stride, float scale, const Features *features, const int32_t *page_ids) {
    AttentionRunner *runner = (AttentionRunner *)attention;
    return lacks_memory([&] { with_type(is_bf16, [&](auto zero) {
        using T = decltype(zero);
        NativePlan &step = native(plan);
        step.heads.scale = scale;
        Attention<T, T> attention(step.plan, step.heads);
        const Features needs = features ? *features : Features();
        attention.prepare(runner->scratches, runner->state, runner->split);
        this_team().run(num_threads_for(attention.work()), [&](const TeamThread &thread) {
            attention.run(thread, (const T *)q, q_stride, *kv, (T *)out, out_stride, needs, page_ids);
        });
    }); });
}

int64_t radixserve_argmax(const float *x, int64_t rows, int64_t columns, int64_t *ids) {
    return argmax_rows(x, rows, columns, ids);
}

// masks [.][stride] words; mask_of [rows]: the mask of each row of x [rows][columns], -1 for none. ids [rows]: -1
// where a mask allows nothing. Returns how many of the best values are not finite or not there.
int64_t radixserve_argmax_allowed(const float *x, int64_t rows, int64_t columns, const uint32_t *masks,
                                  int64_t stride, const int64_t *mask_of, int64_t *ids) {
    int64_t num_broken = 0;
    for (int64_t row = 0; row < rows; row++, x += columns) {
        if (mask_of[row] < 0) {
            num_broken += argmax_rows(x, 1, columns, ids + row);
            continue;
        }
        const int64_t at = ids[row] = argmax_allowed(x, columns, masks + mask_of[row] * stride);
        num_broken += at < 0 || x[at] - x[at] != 0;
    }
    return num_broken;
}

// Tokens sampled of x [rows][columns], with masks as above: the best one where temperature [rows] is 0 or where that is
// not finite or not there; returns how many of the best are not. uniform [rows] in (0, 1); sums: a number for each row
// and SAMPLE_BLOCK columns.
int64_t radixserve_sample(const float *x, int64_t rows, int64_t columns, const uint32_t *masks, int64_t stride,
                        const int64_t *mask_of, const float *temperature, const double *uniform, double *sums,
                        int64_t *ids) {
    const int64_t num_blocks = (columns + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK;
    const double ns = rows * price(20.0 * columns, 8.0 * columns);
    std::atomic<int64_t> num_broken{0};
    this_team().run(num_threads_for(ns), [&](const TeamThread &thread) {
        thread.share(rows, ns, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) {
                const float *values = x + row * columns;
                const uint32_t *mask = mask_of[row] < 0 ? nullptr : masks + mask_of[row] * stride;
                int64_t &at = ids[row];
                if (mask)
                    at = argmax_allowed(values, columns, mask);
                else
                    argmax_rows(values, 1, columns, &at);
                if (at < 0 || values[at] - values[at] != 0)
                    num_broken++;
                else if (temperature[row] > 0)
                    at = sample_token(values, columns, mask, values[at], temperature[row], uniform[row],
                                    sums + row * num_blocks);
            }
        });
    });
    return num_broken;
}

// A copy of x [rows][columns] with -inf where the row's mask, as above, allows nothing.
void radixserve_copy_allowed(const float *x, int64_t rows, int64_t columns, const uint32_t *masks, int64_t stride,
                             const int64_t *mask_of, float *to) {
    for (int64_t row = 0; row < rows; row++, x += columns, to += columns)
        if (mask_of[row] < 0)
            std::copy(x, x + columns, to);
        else
            copy_allowed(x, columns, masks + mask_of[row] * stride, to);
}

// layers: Layer<T> [num_layers]; embedding, head: Weight<T>; norm: float32; layer_inputs: LayerInputs<T> or null.
void *radixserve_decoder(int is_bf16, const DecoderShape *shape, const void *layers, const void *embedding,
                         const void *norm, const void *head, const void *layer_inputs) {
    return make_or_null([&] { return with_type(is_bf16, [&](auto zero) -> AnyDecoder * {
        using T = decltype(zero);
        const DecoderWeights<T> weights(*shape, (const Layer<T> *)layers, *(const Weight<T> *)embedding,
                                        (const float *)norm, *(const Weight<T> *)head,
                                        (const LayerInputs<T> *)layer_inputs);
        if (weights.is_quantized) return new FusedDecoder<T, float>(*shape, weights);  // rounded to 8 bits, once
        return new FusedDecoder<T, T>(*shape, weights);
    }); });
}
void radixserve_delete_decoder(void *decoder) { delete (AnyDecoder *)decoder; }

int radixserve_run(void *decoder, const Step *step, void *plan, const LayerKV *kv) {
    use_threads(step->num_threads);
    return lacks_memory([&] { ((AnyDecoder *)decoder)->run(*step, native(plan).plan, kv); });
}

// For tests: the allocation of working memory after `count` more ones fails, once.
void radixserve_fail_allocation(int64_t count) { allocations_left = count; }
}
#pragma GCC visibility pop
