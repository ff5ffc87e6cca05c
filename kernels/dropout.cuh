// dropout.cuh: dropout masks, drawn again in the backward pass from (key, index) and never stored; the residual
// addition, and dropout's backward pass.
//
// Global memory, with s = sizeof(floatX), for each element:
//   residual_forward  reads 2 s, writes s
//   dropout_backward  reads s, writes s
#ifndef DROPOUT_CUH
#define DROPOUT_CUH

#include <math.h>
#include "vector.cuh"

// A Dropout (ops.h) as kernels use it. An element is kept where its random word is at least `threshold`.
typedef struct {
    uint64_t key, first, sequence_stride;
    uint32_t threshold; // ceil(rate * 2^32): the comparison of ops.h in integers; 0 where nothing is dropped
    float scale;        // 1 / (1 - rate)
} DropoutMask;

static inline DropoutMask dropout_mask(const Dropout *dropout) {
    DropoutMask mask;
    mask.key = dropout->key;
    mask.first = dropout->first;
    mask.sequence_stride = dropout->sequence_stride;
    mask.threshold = (uint32_t)ceil((double)dropout->rate * 4294967296.0);
    mask.scale = 1.0f / (1.0f - dropout->rate);
    return mask;
}

// factors[i] = scale where element index + i of the buffer is kept, else 0.
template <int N>
static __device__ __forceinline__ void dropout_factors(float (&factors)[N], const DropoutMask &mask, uint64_t index) {
    uint32_t words[N] = {0};
    if (mask.threshold != 0) random_words<N>(words, mask.key, mask.first + index);
#pragma unroll
    for (int i = 0; i < N; i++) factors[i] = words[i] >= mask.threshold ? mask.scale : 0.0f;
}

struct ResidualPass {
    floatX *out;
    const floatX *inp, *branch;
    DropoutMask mask;
    template <int N> __device__ __forceinline__ void at(size_t i) const {
        float x[N], y[N], factors[N];
        load_floats<N>(x, inp + i);
        load_floats<N>(y, branch + i);
        dropout_factors<N>(factors, mask, i);
#pragma unroll
        for (int j = 0; j < N; j++) x[j] += factors[j] * y[j];
        store_floats<N>(out + i, x);
    }
};

OP void residual_forward(Ops *ops, floatX *out, const floatX *inp, const floatX *branch, size_t n, Dropout dropout) {
    RANGE("residual_forward");
    const ResidualPass pass = {out, inp, branch, dropout_mask(&dropout)};
    vector_pass(pass, n, aligned16(out, inp, branch), ops->stream);
}

struct DropoutBackwardPass {
    floatX *dinp;
    const floatX *dout;
    DropoutMask mask;
    template <int N> __device__ __forceinline__ void at(size_t i) const {
        float d[N], factors[N];
        load_floats<N>(d, dout + i);
        dropout_factors<N>(factors, mask, i);
#pragma unroll
        for (int j = 0; j < N; j++) d[j] *= factors[j];
        store_floats<N>(dinp + i, d);
    }
};

OP void dropout_backward(Ops *ops, floatX *dinp, const floatX *dout, size_t n, Dropout dropout) {
    RANGE("dropout_backward");
    const DropoutBackwardPass pass = {dinp, dout, dropout_mask(&dropout)};
    vector_pass(pass, n, aligned16(dinp, dout), ops->stream);
}

#endif
