// The forms of packed weights, as Python numbers them. Their functions are a library of their own, forms.cpp,
// which is compiled when a model first has such weights.
#pragma once

#include "quantized.h"

// DENSE: numbers of the model's type; FLOAT16: beside activations in float32; COMPACT: as DENSE, of bf16 activations alone,
// without memory for an empty second vector of the last panel where HAS_COMPACT_PANELS.
enum WeightForm { DENSE, INT8, INT4, INT4_FLOAT, FLOAT16, COMPACT };

extern const QuantizedForm *const *quantized_forms;  // [FLOAT16]; null before the first of such weights

inline const QuantizedForm &quantized_form(int64_t form) { return *quantized_forms[form]; }
