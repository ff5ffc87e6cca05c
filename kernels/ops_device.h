// ops_device.h (CUDA): the context of the operations and their workspace; the operations stand in the files included.
//
// Every operation launches its kernels on the compute stream, in order, and returns at once. The workspace is scratch
// of one operation at a time; its size, and every order of summation, is a function of the shape alone, so that any GPU
// gives the same bits and a plan needs none.
#ifndef OPS_DEVICE_H
#define OPS_DEVICE_H

#include <stdbool.h>
#include <string.h>
#include "layout.h"
#include "cublaslt.cuh"

#define OPS_DEVICE "cuda"

struct Ops {
    cudaStream_t stream;
    Memory *memory;
    OpsShape shape;
    OpsOptions options;
    void *workspace; // scratch of one operation at a time
    size_t workspace_bytes;
    CublasLt cublaslt;
};

struct OpsChoices {
    CublasLtChoices products;
};

#include "adamw.cuh"
#include "attention.cuh"
#include "classifier.cuh"
#include "dropout.cuh"
#include "embedding.cuh"
#include "layernorm.cuh"
#include "matmul.cuh"
#include "reduce.cuh"

// What the hungriest operation needs.
static inline size_t ops_workspace_bytes(const OpsShape *shape) {
    const size_t needs[] = {attention_workspace(shape), wte_backward_workspace(shape),
                            layernorm_backward_workspace(shape), matmul_workspace(shape), vector_sums_workspace()};
    size_t most = 0;
    for (size_t i = 0; i < sizeof needs / sizeof needs[0]; i++)
        if (needs[i] > most) most = needs[i];
    return most;
}

OP void ops_init(Ops *ops, Memory *memory, const OpsShape *shape, const OpsOptions *options, cudaStream_t stream) {
    memset(ops, 0, sizeof *ops);
    ops->stream = stream;
    ops->memory = memory;
    ops->shape = *shape;
    if (options != NULL) ops->options = *options;
    ops->workspace_bytes = ops_workspace_bytes(shape);
    ops->workspace = memory_alloc(memory, MEMORY_WORKSPACE, ops->workspace_bytes);
    cublaslt_open(&ops->cublaslt, memory, &ops->options);
}

OP void ops_free(Ops *ops) {
    cublaslt_close(&ops->cublaslt, ops->memory);
    memory_free(ops->memory, MEMORY_WORKSPACE, ops->workspace, ops->workspace_bytes);
}

#endif
