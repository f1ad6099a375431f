// The C interface of the forms of packed weights, see forms.h; a form is added here and in a file of its own.
#include "form_int4.h"
#include "form_int8.h"
#include "forms.h"

#include <ctime>

Reading reading_one_row = NEAR, reading_rows = NEAR;

static const QuantizedForm *const forms[FLOAT16] = {
    nullptr,
    &FormFunctions<FormInt8>::functions,
    &FormFunctions<FormInt4<half>>::functions,
    &FormFunctions<FormInt4<float>>::functions,
};
const QuantizedForm *const *quantized_forms = forms;

#pragma GCC visibility push(default)
extern "C" {

const void *radixserve_forms() { return forms; }
// Bytes of a weight [columns, depth] packed in a form.
int64_t radixserve_form_bytes(int64_t form, int64_t columns, int64_t depth) {
    return round_up(columns, PANEL) / PANEL * num_blocks(depth) * quantized_form(form).block_bytes;
}
void radixserve_use_reading(int one_row, int rows) { reading_one_row = Reading(one_row), reading_rows = Reading(rows); }
// CPU seconds of products of `rows` rows of 64 blocks, 16-bit numbers, with all whole panels in `size` bytes.
double radixserve_time_reading(int64_t form, int rows, const uint8_t *panels, int64_t size) {
    constexpr int64_t BLOCKS = 64;
    const int64_t panel = BLOCKS * quantized_form(form).block_bytes;
    std::vector<int16_t> numbers(rows * BLOCKS * BLOCK, 1);
    std::vector<RowBlock> blocks(rows * BLOCKS, RowBlock{1.0f, 1.0f, 0});
    std::vector<float> sums(rows * PANEL);
    const QuantizedRows x = {(const int8_t *)numbers.data(), blocks.data(), BLOCKS, 16};
    const clock_t start = clock();
    for (int64_t at = 0; at + panel <= size; at += panel) quantized_form(form).multiply(x, rows, panels + at, 1, sums.data());
    return double(clock() - start) / CLOCKS_PER_SEC;
}
// To `panels`, which are zero.
void radixserve_pack_form(int64_t form, const PlainWeight *weight, void *panels) {
    quantized_form(form).pack(*weight, (uint8_t *)panels);
}
}
#pragma GCC visibility pop
