// dropout.h: dropout masks, the residual addition, and dropout's backward pass. A mask is drawn again in the backward
// pass, from (key, index), and never stored.
#ifndef CPU_DROPOUT_H
#define CPU_DROPOUT_H

#include "convert.h"

enum { DROPOUT_CHUNK = 1024 }; // elements whose factors are drawn at once, on the stack

// factors[i] = 1 / (1 - rate) where element `index` + i of the tensor is kept, else 0.   count <= DROPOUT_CHUNK
static inline void dropout_factors(float *factors, int count, Dropout dropout, uint64_t index) {
    if (dropout.rate == 0.0f) {
        for (int i = 0; i < count; i++) factors[i] = 1.0f;
        return;
    }
    uint32_t words[DROPOUT_CHUNK + 8];
    int skip = (int)(index & 3);
    for (int c = 0; 4 * c < skip + count; c++) {
        Random4 r = random4(dropout.key, (index >> 2) + (uint64_t)c);
        for (int j = 0; j < 4; j++) words[4 * c + j] = r.word[j];
    }
    // word >= rate * 2^32, in integers
    uint32_t threshold = (uint32_t)ceil((double)dropout.rate * 4294967296.0);
    float scale = 1.0f / (1.0f - dropout.rate);
    for (int i = 0; i < count; i++) factors[i] = words[skip + i] >= threshold ? scale : 0.0f;
}

OP void residual_forward(Ops *ops, floatX *out, const floatX *inp, const floatX *branch, size_t n, Dropout dropout) {
    size_t chunks = (n + DROPOUT_CHUNK - 1) / DROPOUT_CHUNK;
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        float factors[DROPOUT_CHUNK];
        size_t start = chunk * DROPOUT_CHUNK;
        int count = (int)smaller(n - start, DROPOUT_CHUNK);
        dropout_factors(factors, count, dropout, dropout.first + start);
        floatX *o = out + start;
        const floatX *x = inp + start, *y = branch + start;
#pragma omp simd
        for (int i = 0; i < count; i++) o[i] = floatX_from(floatX_to_float(x[i]) + factors[i] * floatX_to_float(y[i]));
    }
}

OP void dropout_backward(Ops *ops, floatX *dinp, const floatX *dout, size_t n, Dropout dropout) {
    size_t chunks = (n + DROPOUT_CHUNK - 1) / DROPOUT_CHUNK;
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        float factors[DROPOUT_CHUNK];
        size_t start = chunk * DROPOUT_CHUNK;
        int count = (int)smaller(n - start, DROPOUT_CHUNK);
        dropout_factors(factors, count, dropout, dropout.first + start);
        floatX *o = dinp + start;
        const floatX *d = dout + start;
#pragma omp simd
        for (int i = 0; i < count; i++) o[i] = floatX_from(factors[i] * floatX_to_float(d[i]));
    }
}

#endif
