// The C interface of the forms of packed weights, see forms.h; a form is added here and in a file of its own.
#include "form_int4.h"
#include "form_int8.h"
#include "forms.h"

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
// To `panels`, which are zero.
void radixserve_pack_form(int64_t form, const PlainWeight *weight, void *panels) {
    quantized_form(form).pack(*weight, (uint8_t *)panels);
}
}
#pragma GCC visibility pop
