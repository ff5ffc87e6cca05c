// ops_device.h (CPU): the context of the operations and their workspace; the operations stand in the files included.
//
// Operations run on the calling thread, which is the compute stream, and on the OpenMP threads that it leads: as many
// as OpenMP would use when ops_init() is called.
#ifndef CPU_OPS_DEVICE_H
#define CPU_OPS_DEVICE_H

#include <math.h>
#include <omp.h>
#include <stdbool.h>
#include <string.h>
#include "error.h"
#include "onednn.h"

#define OPS_DEVICE "cpu"

struct Ops {
    cudaStream_t stream;
    Memory *memory;
    OpsShape shape;
    int threads;
    bool has_bf16;   // bf16 products run on bf16 instructions
    void *workspace; // scratch of one operation at a time
    size_t workspace_bytes;
    OneDnn onednn;
};

// There is nothing to choose.
struct OpsChoices {
    char none;
};

#include "adamw.h"
#include "attention.h"
#include "classifier.h"
#include "embedding.h"
#include "layernorm.h"
#include "matmul.h"
#include "reduce.h"

// What the hungriest operation needs: a function of the shape, the precision, the number of threads, and whether the
// processor has bf16 instructions.
static inline size_t ops_workspace_bytes(const OpsShape *shape, int threads, bool has_bf16) {
    size_t widest = 4 * (size_t)shape->C; // of the vectors that are summed over rows
    size_t needs[6];
    needs[0] = attention_workspace(shape, threads);
    needs[1] = classifier_workspace(shape, threads);
    needs[2] = wte_backward_workspace(shape);
    needs[3] = column_sums_workspace(widest);
    needs[4] = matmul_workspace(shape, has_bf16, NULL).bytes;
    needs[5] = vector_sums_workspace();
    size_t most = 0;
    for (int i = 0; i < 6; i++) most = larger(most, needs[i]);
    return most;
}

OP void ops_init(Ops *ops, Memory *memory, const OpsShape *shape, const OpsOptions *options, cudaStream_t stream) {
    (void)options;
    memset(ops, 0, sizeof *ops);
    ops->stream = stream;
    ops->memory = memory;
    ops->shape = *shape;
    ops->threads = omp_get_max_threads();
    ops->has_bf16 = onednn_has_bf16();
    ops->workspace_bytes = ops_workspace_bytes(shape, ops->threads, ops->has_bf16);
    ops->workspace = memory_alloc(memory, MEMORY_WORKSPACE, ops->workspace_bytes);
    if (!memory->planning) onednn_open(&ops->onednn);
}

OP void ops_free(Ops *ops) {
    if (!ops->memory->planning) onednn_close(&ops->onednn);
    memory_free(ops->memory, MEMORY_WORKSPACE, ops->workspace, ops->workspace_bytes);
}

OP void ops_tune(Ops *ops) {
    (void)ops;
}
OP void ops_choices_get(const Ops *ops, OpsChoices *choices) {
    (void)ops;
    choices->none = 0;
}
OP void ops_choices_set(Ops *ops, const OpsChoices *choices) {
    (void)ops;
    (void)choices;
}

#endif
