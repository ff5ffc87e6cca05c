// embedding.h: token and position embeddings, forward and backward.
#ifndef CPU_EMBEDDING_H
#define CPU_EMBEDDING_H

#include "convert.h"
#include "dropout.h"

OP void embedding_forward(Ops *ops, floatX *out, const int *tokens, const floatX *wte, const floatX *wpe, int B, int T,
                          int C, Vocabulary vocabulary, Dropout dropout) {
    size_t rows = (size_t)B * (size_t)T;
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t row = 0; row < rows; row++) {
        const int local = tokens[row] - vocabulary.first;
        if (local < 0 || local >= vocabulary.count) {
            memset(out + row * (size_t)C, 0, (size_t)C * sizeof(floatX)); // all bits 0 is 0.0
            continue;
        }
        const floatX *token = wte + (size_t)local * (size_t)C;
        const floatX *position = wpe + row % (size_t)T * (size_t)C;
        for (int start = 0; start < C; start += DROPOUT_CHUNK) {
            float factors[DROPOUT_CHUNK];
            int count = (int)smaller((size_t)(C - start), DROPOUT_CHUNK);
            size_t offset = row * (size_t)C + (size_t)start;
            dropout_factors(factors, count, dropout, dropout.first + offset);
            floatX *o = out + offset;
            const floatX *x = token + start, *y = position + start;
#pragma omp simd
            for (int i = 0; i < count; i++)
                o[i] = floatX_from(factors[i] * (floatX_to_float(x[i]) + floatX_to_float(y[i])));
        }
    }
}

enum { EMBEDDING_STRIP = 256 }; // channels that are summed at once, on the stack

OP void wpe_backward(Ops *ops, gradX *dwpe, const floatX *dout, int B, int T, int C, int positions, int accumulate) {
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (int t = 0; t < positions; t++) {
        for (int start = 0; start < C; start += EMBEDDING_STRIP) {
            float sums[EMBEDDING_STRIP] = {0};
            int count = (int)smaller((size_t)(C - start), EMBEDDING_STRIP);
            for (int b = 0; b < B && t < T; b++) {
                const floatX *d = dout + ((size_t)b * (size_t)T + (size_t)t) * (size_t)C + start;
                for (int i = 0; i < count; i++) sums[i] += floatX_to_float(d[i]);
            }
            gradX *g = dwpe + (size_t)t * (size_t)C + start;
            if (accumulate)
                for (int i = 0; i < count; i++) g[i] = gradX_from(gradX_to_float(g[i]) + sums[i]);
            else
                for (int i = 0; i < count; i++) g[i] = gradX_from(sums[i]);
        }
    }
}

// Rows sorted by token (counting sort, so in the order of rows within a token): first[v] .. first[v + 1) of `order`.
static inline size_t wte_backward_workspace(const OpsShape *shape) {
    return ((size_t)shape->Vp + 2 + (size_t)shape->B * (size_t)shape->T) * sizeof(uint32_t);
}

OP void wte_backward(Ops *ops, gradX *dwte, const floatX *dout, const int *tokens, int B, int T, int C,
                     Vocabulary vocabulary) {
    size_t rows = (size_t)B * (size_t)T, V = (size_t)vocabulary.count;
    // While rows are placed, next[v] walks from first[v] to first[v + 1]; counting two places up leaves `first` right.
    uint32_t *first = (uint32_t *)ops->workspace, *next = first + 1, *order = first + V + 2;
    memset(first, 0, (V + 2) * sizeof(uint32_t));
    for (size_t row = 0; row < rows; row++) {
        const size_t local = (size_t)(tokens[row] - vocabulary.first); // below first: huge
        if (local < V) first[local + 2]++;
    }
    for (size_t v = 0; v < V; v++) first[v + 2] += first[v + 1];
    for (size_t row = 0; row < rows; row++) {
        const size_t local = (size_t)(tokens[row] - vocabulary.first);
        if (local < V) order[next[local]++] = (uint32_t)row;
    }
#pragma omp parallel for schedule(dynamic, 64) num_threads(ops->threads)
    for (size_t v = 0; v < V; v++) {
        if (first[v] == first[v + 1]) continue;
        for (int start = 0; start < C; start += EMBEDDING_STRIP) {
            float sums[EMBEDDING_STRIP] = {0};
            int count = (int)smaller((size_t)(C - start), EMBEDDING_STRIP);
            for (uint32_t k = first[v]; k < first[v + 1]; k++) {
                const floatX *d = dout + (size_t)order[k] * (size_t)C + start;
                for (int i = 0; i < count; i++) sums[i] += floatX_to_float(d[i]);
            }
            gradX *g = dwte + v * (size_t)C + start;
            for (int i = 0; i < count; i++) g[i] = gradX_from(gradX_to_float(g[i]) + sums[i]);
        }
    }
}

#endif
