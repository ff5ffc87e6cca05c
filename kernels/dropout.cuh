// dropout.cuh: dropout masks, drawn again in the backward pass from (key, index) and never stored; the residual
// addition, and dropout's backward pass.
#ifndef DROPOUT_CUH
#define DROPOUT_CUH

#include <math.h>
#include "common.cuh"

// A Dropout (ops.h) as kernels use it. An element is kept where its random word is at least `threshold`.
typedef struct {
    uint64_t key, first;
    uint32_t threshold; // ceil(rate * 2^32): the comparison of ops.h in integers
    float scale;        // 1 / (1 - rate)
} DropoutMask;

static inline DropoutMask dropout_mask(const Dropout *dropout) {
    DropoutMask mask;
    mask.key = dropout->key;
    mask.first = dropout->first;
    mask.threshold = (uint32_t)ceil((double)dropout->rate * 4294967296.0);
    mask.scale = 1.0f / (1.0f - dropout->rate);
    return mask;
}

// factors[i] = scale where element index + i of the buffer is kept, else 0. Four elements share a random4().
template <int N>
static __device__ __forceinline__ void dropout_factors(float (&factors)[N], const DropoutMask &mask, uint64_t index) {
    uint64_t at = mask.first + index;
    Random4 words = random4(mask.key, at >> 2);
#pragma unroll
    for (int i = 0; i < N; i++, at++) {
        if (i > 0 && (at & 3) == 0) words = random4(mask.key, at >> 2);
        // Selected, not indexed: an array indexed at run time would live in local memory.
        const uint32_t low = (at & 1) ? words.word[1] : words.word[0], high = (at & 1) ? words.word[3] : words.word[2];
        factors[i] = ((at & 2) ? high : low) >= mask.threshold ? mask.scale : 0.0f;
    }
}

#endif
