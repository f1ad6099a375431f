// Matrix products x [M, K] times a packed weight W [N, K] transposed, by the best level of the processor.
//
// A level is a class with the interface of VectorF32. A row of the result depends on its own row of x
// alone, to the bit: every sum runs over k in the same order for any number of rows.
#pragma once

#include "gemm_amx.h"
#include "gemm_bf16_arm.h"
#include "gemm_f32.h"

// Calls call(level) with an object of the level that multiplies numbers of type T.
template <class T, class Call> inline void with_level(Call &&call) {
#if defined(RADIXSERVE_BF16)
    if constexpr (sizeof(T) == 2) {
#if defined(RADIXSERVE_AMX)
        if (has_amx) return call(AmxBf16());
#endif
        return call(VectorBf16());
    } else
#elif defined(RADIXSERVE_BF16_WEIGHTS)
    if constexpr (sizeof(T) == 2) return call(MatrixBf16());
    else
#endif
        call(VectorF32<T>());
}

// Whether bf16 panels are multiplied by a level alone that reads panels without memory for an empty second vector.
#if defined(RADIXSERVE_BF16) && !defined(RADIXSERVE_AMX)
constexpr bool HAS_COMPACT_PANELS = true;
#else
constexpr bool HAS_COMPACT_PANELS = false;
#endif

// The type in which attention multiplies keys and values of type T: without instructions for bfloat16 they
// are widened when they are read.
#if defined(RADIXSERVE_BF16)
template <class T> using Operand = T;
#else
template <class T> using Operand = float;
#endif
