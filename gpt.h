// gpt.h: the model: activations, forward and backward.
//
// GPT-2: learned positions, layer norm before attention and MLP (epsilon 1e-5), biases everywhere, tanh GELU, head tied
// to wte (Radford et al. 2019; GPT-3 has the same shape, Brown et al. 2020). The vocabulary is padded and the padding
// is masked out of the softmax. Forward and backward are written out by hand, one unit at a time; the model walks the
// list of uses (zero.h) and never knows how parameters are sharded, nor, but for who holds which rows and heads, that
// other ranks have slices of its layers (tensor_parallel.h).
//
// A rank computes chunks of consecutive blocks, the first with the embeddings, the last with the head and the loss; all
// in one unless the model is cut into pipeline stages. A chunk keeps the activations of as many micro-batches as are
// alive at once, in slots used in turn. All activations stand in one arena, allocated once. With a planning Memory
// nothing is computed, but uses and exchanges are walked and counted.
//
// Shapes: B sequences of T tokens, rows = B T, own = those of them that this rank computes between matrices (all,
// unless sequence parallelism shares them), C channels, S tensor ranks.
#ifndef GPT_H
#define GPT_H

#include "layout.h"
#include "memory.h"
#include "ops.h"
#include "profile.h"
#include "random.h"
#include "tensor_parallel.h"
#include "zero.h"

// What a block's forward keeps for its backward.
typedef struct {
    floatX *ln1;                                      // (own, C)
    floatX *qkv;                                      // (rows, 3C/S)
    floatX *att;                                      // (rows, C/S)
    floatX *residual;                                 // (own, C) input + attention branch
    floatX *ln2;                                      // (own, C)
    floatX *mlp;                                      // (rows, 4C/S) before GELU
    floatX *mlp_gelu;                                 // (rows, 4C/S)
    float *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd; // (own)
    float *lse;                                       // (B, NH/S, T)
} BlockActivations;

// One micro-batch in one chunk.
typedef struct {
    int *inputs, *targets;    // (rows): of the first and the last chunk
    floatX *x;                // (n_layers + 1, own, C): inputs of the blocks, and the last one's output
    BlockActivations *blocks; // (n_layers); with recompute all are the same memory
} Activations;

typedef struct {
    int count; // micro-batches that are alive at once
    Activations *slot;
} ChunkActivations;

typedef struct {
    const Layout *layout;
    Ops *ops;
    Zero *zero;
    TensorParallel *tp;
    bool planning;
    int B, T; // the largest batch
    int logit_rows;
    float dropout;
    bool recompute; // blocks keep only their input, and compute the rest again in backward
    uint64_t seed;

    char *arena;
    size_t arena_bytes;
    ChunkActivations *chunks; // (layout->n_chunks)
    floatX *lnf;              // (own, C)
    float *lnf_mean, *lnf_rstd;
    floatX *logits;    // (logit_rows, Vp/S): a chunk of rows; becomes its gradient
    float *losses;     // (rows)
    float *statistics; // (1 + S, logit_rows, 3) of the softmax; NULL with one tensor rank
    double *loss_sum;

    // Gradients of activations, alive within one block, except dx that flows through all.
    floatX *dx[2];     // (own, C) of the residual stream; with a pipeline two in turn, one may be on its way
    floatX *branch;    // (rows, C) output of a branch in forward; its input's gradient in backward
    floatX *wide;      // (rows, 4C/S)
    floatX *masked;    // (own, C) dx under a dropout mask; NULL without dropout
    floatX *gathered;  // (rows, C) input of a pair of matrices; NULL without sequence parallelism
    floatX *dgathered; // (rows, C) gradient of its output; NULL without sequence parallelism

    // Host, pinned. Tokens pass through two buffers in turn, so that the host prepares a micro-batch while the one
    // before is still being copied; copied[i]: staging[i] may be written again.
    int *staging[2]; // (2, rows) each: inputs, then targets
    cudaEvent_t copied[2];
    int uploads;  // so far
    double *loss; // what gpt_loss() reads
    floatX *row;  // (Vp/S) what gpt_logits() reads
} GPT;

// One micro-batch of a pass.
typedef struct {
    int B, T;
    const int *inputs, *targets; // host, (B, T); targets -1: not counted
    int micro;
    bool train;              // backward too
    bool last_micro;         // gradients are complete after it
    int only_row;            // >= 0: compute the logits of this row alone, no loss; -1: all rows
    float loss_scale;        // 1 / (tokens of the global batch)
    int64_t step;            // for dropout
    uint64_t first_sequence; // index of the first sequence in the global batch, for dropout
} MicroBatch;

enum { SITE_EMBEDDING, SITE_ATTENTION, SITE_ATTPROJ, SITE_MLPPROJ, SITES };

static inline size_t arena_carve(size_t *used, size_t bytes) {
    const size_t at = *used;
    *used += round_up(bytes, 256);
    return at;
}

// Lays out the arena: sets every pointer when the arena exists; always returns the bytes that it takes.
static inline size_t gpt_carve(GPT *model) {
    const Layout *layout = model->layout;
    const size_t rows = (size_t)model->B * (size_t)model->T, C = (size_t)layout->shape.n_embd;
    const size_t own = tp_rows(model->tp, rows), S = (size_t)model->tp->size;
    const size_t n = rows * C * sizeof(floatX), n_own = own * C * sizeof(floatX);
    const size_t heads = (size_t)layout->shape.n_head / S;
    const bool pipeline = layout->cut.pipeline_parallel > 1;
    BlockActivations shared; // with recompute
    bool has_shared = false;
    size_t used = 0;
#define CARVE(field, type, bytes)                                           \
    do {                                                                    \
        const size_t at_ = arena_carve(&used, bytes);                       \
        field = model->arena ? (type *)(void *)(model->arena + at_) : NULL; \
    } while (0)
    memset(&shared, 0, sizeof shared);
    for (int c = 0; c < layout->n_chunks; c++) {
        const Chunk *chunk = &layout->chunks[c];
        for (int i = 0; i < model->chunks[c].count; i++) {
            Activations *a = &model->chunks[c].slot[i];
            if (chunk->first) CARVE(a->inputs, int, rows * sizeof(int));
            if (chunk->last) CARVE(a->targets, int, rows * sizeof(int));
            CARVE(a->x, floatX, ((size_t)chunk->n_layers + 1) * n_own);
            for (int l = 0; l < chunk->n_layers; l++) {
                BlockActivations *block = &a->blocks[l];
                if (has_shared) {
                    *block = shared;
                    continue;
                }
                CARVE(block->ln1, floatX, n_own);
                CARVE(block->qkv, floatX, 3 * n / S);
                CARVE(block->att, floatX, n / S);
                CARVE(block->residual, floatX, n_own);
                CARVE(block->ln2, floatX, n_own);
                CARVE(block->mlp, floatX, 4 * n / S);
                CARVE(block->mlp_gelu, floatX, 4 * n / S);
                CARVE(block->ln1_mean, float, own * sizeof(float));
                CARVE(block->ln1_rstd, float, own * sizeof(float));
                CARVE(block->ln2_mean, float, own * sizeof(float));
                CARVE(block->ln2_rstd, float, own * sizeof(float));
                CARVE(block->lse, float, rows *heads * sizeof(float));
                shared = *block;
                has_shared = model->recompute;
            }
        }
    }
    if (layout->final >= 0) {
        CARVE(model->lnf, floatX, n_own);
        CARVE(model->lnf_mean, float, own * sizeof(float));
        CARVE(model->lnf_rstd, float, own * sizeof(float));
        CARVE(model->logits, floatX, (size_t)model->logit_rows * (size_t)model->tp->vocab_rows * sizeof(floatX));
        CARVE(model->losses, float, rows * sizeof(float));
        if (S > 1) CARVE(model->statistics, float, (1 + S) * (size_t)model->logit_rows * 3 * sizeof(float));
    }
    CARVE(model->loss_sum, double, sizeof(double));
    CARVE(model->dx[0], floatX, n_own);
    model->dx[1] = model->dx[0];
    if (pipeline) CARVE(model->dx[1], floatX, n_own);
    CARVE(model->branch, floatX, n);
    CARVE(model->wide, floatX, 4 * n / S);
    if (model->dropout > 0) CARVE(model->masked, floatX, n_own);
    if (model->tp->sequence) {
        CARVE(model->gathered, floatX, n);
        CARVE(model->dgathered, floatX, n);
    }
#undef CARVE
    return used;
}

// The rows of one classifier chunk: the logits of `chunks` equal parts of B T rows are never alive together.
static inline int gpt_logit_rows(int B, int T, int chunks) {
    return (B * T + chunks - 1) / chunks;
}

// The uses of one pass of a micro-batch through a chunk, in order; returns their number. uses NULL: only counts. train:
// a backward will follow a forward. wte and wpe are used together at the beginning; the backward of wte and wpe needs
// no parameters. The head's part of wte's gradient is completed by the embedding's backward, if that is on this rank.
static inline int gpt_list_uses(const Layout *layout, const Chunk *chunk, bool backward, bool train, int micro,
                                Use *uses) {
    int n = 0;
#define USE(unit_, kind_, reads_, read_again_, completes_) \
    do {                                                   \
        if (uses != NULL) {                                \
            uses[n].unit = unit_;                          \
            uses[n].kind = kind_;                          \
            uses[n].micro = micro;                         \
            uses[n].reads = reads_;                        \
            uses[n].read_again = read_again_;              \
            uses[n].completes = completes_;                \
        }                                                  \
        n++;                                               \
    } while (0)
    if (!backward) {
        if (chunk->first) {
            USE(layout->wte, USE_FORWARD, true, chunk->last, false);
            USE(layout->wpe, USE_FORWARD, true, false, false);
        }
        for (int l = 0; l < chunk->n_layers; l++) USE(chunk->first_unit + l, USE_FORWARD, true, train, false);
        if (chunk->last) {
            USE(layout->final, USE_FORWARD, true, train, false);
            USE(layout->wte, USE_HEAD, true, false, train && !chunk->first);
        }
        return n;
    }
    if (chunk->last) USE(layout->final, USE_BACKWARD, true, false, true);
    for (int l = chunk->n_layers - 1; l >= 0; l--) USE(chunk->first_unit + l, USE_BACKWARD, true, false, true);
    if (chunk->first) {
        USE(layout->wpe, USE_BACKWARD, false, false, true);
        USE(layout->wte, USE_BACKWARD, false, false, true);
    }
#undef USE
    return n;
}

// What a run chooses.
typedef struct {
    int B, T; // the largest micro-batch
    int classifier_chunks;
    float dropout;
    bool recompute;
    uint64_t seed;
} GPTOptions;

// Allocates the activations. alive: of each chunk, the micro-batches whose activations it keeps at once.
static inline void gpt_init(GPT *model, Memory *memory, const Layout *layout, Ops *ops, Zero *zero, TensorParallel *tp,
                            const int *alive, const GPTOptions *options) {
    memset(model, 0, sizeof *model);
    model->layout = layout;
    model->ops = ops;
    model->zero = zero;
    model->tp = tp;
    model->planning = memory->planning;
    model->B = options->B;
    model->T = options->T;
    model->logit_rows = gpt_logit_rows(options->B, options->T, options->classifier_chunks);
    model->dropout = options->dropout;
    model->recompute = options->recompute;
    model->seed = options->seed;
    model->chunks = (ChunkActivations *)table_alloc((size_t)layout->n_chunks, sizeof(ChunkActivations));
    for (int c = 0; c < layout->n_chunks; c++) {
        model->chunks[c].count = alive[c];
        model->chunks[c].slot = (Activations *)table_alloc((size_t)alive[c], sizeof(Activations));
        for (int i = 0; i < alive[c]; i++)
            model->chunks[c].slot[i].blocks =
                (BlockActivations *)table_alloc((size_t)layout->chunks[c].n_layers, sizeof(BlockActivations));
    }
    model->arena_bytes = gpt_carve(model);
    model->arena = (char *)memory_alloc(memory, MEMORY_ACTIVATIONS, model->arena_bytes);
    gpt_carve(model);
    if (memory->planning) return;
    const size_t rows = (size_t)model->B * (size_t)model->T;
    for (int i = 0; i < 2; i++) {
        cuda_check(cudaMallocHost((void **)&model->staging[i], 2 * rows * sizeof(int)));
        cuda_check(cudaEventCreateWithFlags(&model->copied[i], cudaEventDisableTiming));
    }
    cuda_check(cudaMallocHost((void **)&model->loss, sizeof(double)));
    cuda_check(cudaMallocHost((void **)&model->row, (size_t)tp->vocab_rows * sizeof(floatX)));
}

static inline void gpt_free(GPT *model) {
    for (int i = 0; i < 2 && model->loss != NULL; i++) {
        cuda_check(cudaFreeHost(model->staging[i]));
        cuda_check(cudaEventDestroy(model->copied[i]));
    }
    if (model->loss != NULL) cuda_check(cudaFreeHost(model->loss));
    if (model->row != NULL) cuda_check(cudaFreeHost(model->row));
    for (int c = 0; c < model->layout->n_chunks; c++) {
        for (int i = 0; i < model->chunks[c].count; i++) free(model->chunks[c].slot[i].blocks);
        free(model->chunks[c].slot);
    }
    free(model->chunks);
}

// The activations of a micro-batch in a chunk.
static inline Activations *gpt_activations(const GPT *model, int chunk, int micro) {
    return &model->chunks[chunk].slot[micro % model->chunks[chunk].count];
}

// Dropout at one place of the model; `per_sequence` elements of it belong to one sequence of the whole model.
static inline Dropout gpt_dropout(const GPT *model, const MicroBatch *batch, int layer, int site, size_t per_sequence) {
    Dropout dropout = {0, 0, 0, 0};
    if (!batch->train || model->dropout == 0) return dropout;
    dropout.rate = model->dropout;
    dropout.key = random_key(model->seed, RANDOM_DROPOUT, (uint64_t)batch->step, (uint64_t)(layer * SITES + site));
    dropout.first = batch->first_sequence * per_sequence;
    return dropout;
}

// On the residual stream: of this rank's rows.
static inline Dropout gpt_residual_dropout(const GPT *model, const MicroBatch *batch, int layer, int site) {
    const size_t C = (size_t)model->layout->shape.n_embd, T = (size_t)batch->T;
    Dropout dropout = gpt_dropout(model, batch, layer, site, T * C);
    dropout.first += tp_first_row(model->tp, (size_t)batch->B * T) * C;
    return dropout;
}

// On the embedding's sum, before it is shared: of all rows.
static inline Dropout gpt_embedding_dropout(const GPT *model, const MicroBatch *batch) {
    return gpt_dropout(model, batch, 0, SITE_EMBEDDING, (size_t)batch->T * (size_t)model->layout->shape.n_embd);
}

// On attention's probabilities: of this rank's heads.
static inline Dropout gpt_attention_dropout(const GPT *model, const MicroBatch *batch, int layer) {
    const size_t TT = (size_t)batch->T * (size_t)batch->T, heads = (size_t)model->layout->shape.n_head;
    Dropout dropout = gpt_dropout(model, batch, layer, SITE_ATTENTION, heads * TT);
    dropout.sequence_stride = heads * TT;
    dropout.first += heads / (size_t)model->tp->size * (size_t)model->tp->rank * TT;
    return dropout;
}

// Input `layer`, counted within the chunk, of its blocks; n_layers: the last one's output.
static inline floatX *gpt_block_input(const GPT *model, const Activations *a, int layer) {
    const size_t rows = tp_rows(model->tp, (size_t)model->B * (size_t)model->T);
    return model->planning ? NULL : a->x + (size_t)layer * rows * (size_t)model->layout->shape.n_embd;
}

// A tensor of a unit within its parameters or its gradients.
#define TENSOR(base, unit, index) ((base) + (unit)->tensors[index].offset)
// An operation, unless the run is only planned.
#define COMPUTE(call)               \
    do {                            \
        if (!model->planning) call; \
    } while (0)

// again: in backward, for the activations alone, which do not include the block's output.
static inline void gpt_forward_block(GPT *model, const MicroBatch *batch, const Activations *slot, int index,
                                     const Unit *unit, const floatX *params, bool again) {
    Ops *ops = model->ops;
    TensorParallel *tp = model->tp;
    const int B = batch->B, T = batch->T, C = model->layout->shape.n_embd, S = tp->size;
    const int NH = model->layout->shape.n_head / S, HS = C / model->layout->shape.n_head, layer = unit->layer;
    const size_t rows = (size_t)B * (size_t)T, own = tp_rows(tp, rows);
    const BlockActivations *a = &slot->blocks[index];
    const floatX *x = gpt_block_input(model, slot, index);
    floatX *out = gpt_block_input(model, slot, index + 1);
    // The bias of a matrix that is cut by rows is added once.
    const floatX *attproj_bias = tp->rank == 0 ? TENSOR(params, unit, ATTPROJ_BIAS) : NULL;
    const floatX *mlpproj_bias = tp->rank == 0 ? TENSOR(params, unit, MLPPROJ_BIAS) : NULL;

    COMPUTE(layernorm_forward(ops, a->ln1, a->ln1_mean, a->ln1_rstd, x, TENSOR(params, unit, LN1_WEIGHT),
                              TENSOR(params, unit, LN1_BIAS), own, C));
    const floatX *input = tp_gather(tp, model->gathered, a->ln1, rows, C);
    COMPUTE(matmul_forward(ops, a->qkv, input, TENSOR(params, unit, QKV_WEIGHT), TENSOR(params, unit, QKV_BIAS), rows,
                           C, 3 * C / S));
    COMPUTE(attention_forward(ops, a->att, a->lse, a->qkv, B, T, NH, HS, gpt_attention_dropout(model, batch, layer)));
    COMPUTE(
        matmul_forward(ops, model->branch, a->att, TENSOR(params, unit, ATTPROJ_WEIGHT), attproj_bias, rows, C / S, C));
    const floatX *branch = tp_reduce(tp, model->branch, rows, C);
    COMPUTE(residual_layernorm_forward(ops, a->residual, a->ln2, a->ln2_mean, a->ln2_rstd, x, branch,
                                       TENSOR(params, unit, LN2_WEIGHT), TENSOR(params, unit, LN2_BIAS), own, C,
                                       gpt_residual_dropout(model, batch, layer, SITE_ATTPROJ)));
    input = tp_gather(tp, model->gathered, a->ln2, rows, C);
    COMPUTE(matmul_gelu_forward(ops, a->mlp, a->mlp_gelu, input, TENSOR(params, unit, MLP_WEIGHT),
                                TENSOR(params, unit, MLP_BIAS), rows, C, 4 * C / S));
    if (again) return;
    COMPUTE(matmul_forward(ops, model->branch, a->mlp_gelu, TENSOR(params, unit, MLPPROJ_WEIGHT), mlpproj_bias, rows,
                           4 * C / S, C));
    branch = tp_reduce(tp, model->branch, rows, C);
    COMPUTE(residual_forward(ops, out, a->residual, branch, own * (size_t)C,
                             gpt_residual_dropout(model, batch, layer, SITE_MLPPROJ)));
}

// The gradient that enters a branch: dx, or dx under the branch's dropout mask.
static inline const floatX *gpt_branch_gradient(GPT *model, const floatX *dx, size_t n, Dropout dropout) {
    if (dropout.rate == 0) return dx;
    COMPUTE(dropout_backward(model->ops, model->masked, dx, n, dropout));
    return model->masked;
}

// The gradients of a matrix that is cut by rows, whose output had the gradient dout: all rows of it, and mine. The bias
// is held by all ranks: with sequence parallelism each sums over its own rows, and the ranks' sums are added later,
// with those of everything else that they hold in common (zero.h).   inp (rows, IN)
static inline void gpt_row_parallel_weight(GPT *model, gradX *dweight, gradX *dbias, const floatX *inp,
                                           const floatX *dout, const floatX *mine, size_t rows, int IN,
                                           int accumulate) {
    const int C = model->layout->shape.n_embd;
    const bool sequence = model->tp->sequence;
    COMPUTE(matmul_backward_weight(model->ops, dweight, sequence ? NULL : dbias, inp, dout, rows, IN, C, accumulate));
    if (sequence) COMPUTE(bias_backward(model->ops, dbias, mine, tp_rows(model->tp, rows), C, accumulate));
}

// dx: in, the gradient of the block's output; out, of its input.
static inline void gpt_backward_block(GPT *model, const MicroBatch *batch, const Chunk *chunk, const Activations *slot,
                                      int index, const Unit *unit, const floatX *params, gradX *grads, floatX *dx,
                                      int accumulate) {
    Ops *ops = model->ops;
    TensorParallel *tp = model->tp;
    const int B = batch->B, T = batch->T, C = model->layout->shape.n_embd, S = tp->size;
    const int NH = model->layout->shape.n_head / S, HS = C / model->layout->shape.n_head, layer = unit->layer;
    const size_t rows = (size_t)B * (size_t)T, own = tp_rows(tp, rows), n = own * (size_t)C;
    const BlockActivations *a = &slot->blocks[index];
    // The activations of the model's last block are still there: its backward follows its forward.
    if (model->recompute && !(chunk->last && index + 1 == chunk->n_layers))
        gpt_forward_block(model, batch, slot, index, unit, params, true);

    // MLP branch
    const floatX *dout = gpt_branch_gradient(model, dx, n, gpt_residual_dropout(model, batch, layer, SITE_MLPPROJ));
    const floatX *dall = tp_gather(tp, model->dgathered, dout, rows, C);
    COMPUTE(matmul_gelu_backward_input(ops, model->wide, dall, TENSOR(params, unit, MLPPROJ_WEIGHT), a->mlp, rows,
                                       4 * C / S, C));
    gpt_row_parallel_weight(model, TENSOR(grads, unit, MLPPROJ_WEIGHT), TENSOR(grads, unit, MLPPROJ_BIAS), a->mlp_gelu,
                            dall, dout, rows, 4 * C / S, accumulate);
    COMPUTE(
        matmul_backward_input(ops, model->branch, model->wide, TENSOR(params, unit, MLP_WEIGHT), rows, C, 4 * C / S));
    const floatX *input = tp_gather(tp, model->gathered, a->ln2, rows, C);
    COMPUTE(matmul_backward_weight(ops, TENSOR(grads, unit, MLP_WEIGHT), TENSOR(grads, unit, MLP_BIAS), input,
                                   model->wide, rows, C, 4 * C / S, accumulate));
    const floatX *branch = tp_reduce(tp, model->branch, rows, C);
    COMPUTE(layernorm_backward(ops, dx, 0, TENSOR(grads, unit, LN2_WEIGHT), TENSOR(grads, unit, LN2_BIAS), branch,
                               a->residual, TENSOR(params, unit, LN2_WEIGHT), a->ln2_mean, a->ln2_rstd, own, C,
                               accumulate));

    // Attention branch
    dout = gpt_branch_gradient(model, dx, n, gpt_residual_dropout(model, batch, layer, SITE_ATTPROJ));
    dall = tp_gather(tp, model->dgathered, dout, rows, C);
    COMPUTE(matmul_backward_input(ops, model->branch, dall, TENSOR(params, unit, ATTPROJ_WEIGHT), rows, C / S, C));
    gpt_row_parallel_weight(model, TENSOR(grads, unit, ATTPROJ_WEIGHT), TENSOR(grads, unit, ATTPROJ_BIAS), a->att, dall,
                            dout, rows, C / S, accumulate);
    COMPUTE(attention_backward(ops, model->wide, model->branch, a->qkv, a->att, a->lse, B, T, NH, HS,
                               gpt_attention_dropout(model, batch, layer)));
    COMPUTE(
        matmul_backward_input(ops, model->branch, model->wide, TENSOR(params, unit, QKV_WEIGHT), rows, C, 3 * C / S));
    input = tp_gather(tp, model->gathered, a->ln1, rows, C);
    COMPUTE(matmul_backward_weight(ops, TENSOR(grads, unit, QKV_WEIGHT), TENSOR(grads, unit, QKV_BIAS), input,
                                   model->wide, rows, C, 3 * C / S, accumulate));
    branch = tp_reduce(tp, model->branch, rows, C);
    COMPUTE(layernorm_backward(ops, dx, 0, TENSOR(grads, unit, LN1_WEIGHT), TENSOR(grads, unit, LN1_BIAS), branch,
                               gpt_block_input(model, slot, index), TENSOR(params, unit, LN1_WEIGHT), a->ln1_mean,
                               a->ln1_rstd, own, C, accumulate));
}

// The embeddings' sum, under dropout. Tensor ranks hold rows of wte each: whoever has the token contributes all of it,
// position and mask included, the others zero, so that the sum has the bits of one rank's.
static inline void gpt_embed(GPT *model, const MicroBatch *batch, const Activations *slot, const floatX *wte,
                             const floatX *wpe) {
    TensorParallel *tp = model->tp;
    const int C = model->layout->shape.n_embd;
    const size_t rows = (size_t)batch->B * (size_t)batch->T;
    floatX *x = gpt_block_input(model, slot, 0), *sum = tp->sequence ? model->branch : x;
    COMPUTE(embedding_forward(model->ops, sum, slot->inputs, wte, wpe, batch->B, batch->T, C, tp->vocabulary,
                              gpt_embedding_dropout(model, batch)));
    const floatX *mine = tp_reduce(tp, sum, rows, C);
    if (mine != x)
        COMPUTE(cuda_check(cudaMemcpyAsync(x, mine, tp_rows(tp, rows) * (size_t)C * sizeof(floatX),
                                           cudaMemcpyDeviceToDevice, model->zero->compute)));
}

// The head, the loss and, when training, their backward, in chunks of rows: the logits of a chunk become their own
// gradient at once, so that (rows, Vp) need never exist. Leaves the gradient of the final layer norm's output in
// branch.
static inline void gpt_head(GPT *model, const MicroBatch *batch, const Activations *slot, const floatX *wte,
                            gradX *dwte, int accumulate) {
    Ops *ops = model->ops;
    TensorParallel *tp = model->tp;
    const int C = model->layout->shape.n_embd, V = model->layout->shape.vocab_size, Vp = tp->vocab_rows;
    const size_t rows = (size_t)batch->B * (size_t)batch->T;
    const floatX *lnf = tp_gather(tp, model->gathered, model->lnf, rows, C);
    if (batch->only_row >= 0) {
        COMPUTE(matmul_forward(ops, model->logits, lnf + (size_t)batch->only_row * (size_t)C, wte, NULL, 1, C, Vp));
        return;
    }
    for (size_t first = 0; first < rows; first += (size_t)model->logit_rows) {
        const size_t left = rows - first, chunk = left < (size_t)model->logit_rows ? left : (size_t)model->logit_rows;
        COMPUTE(matmul_forward(ops, model->logits, lnf + first * (size_t)C, wte, NULL, chunk, C, Vp));
        tp_classifier(tp, ops, model->logits, model->losses + first, model->statistics, slot->targets + first, chunk, V,
                      batch->loss_scale, batch->train, model->planning);
        if (!batch->train) continue;
        COMPUTE(matmul_backward_input(ops, model->branch + first * (size_t)C, model->logits, wte, chunk, C, Vp));
        COMPUTE(matmul_backward_weight(ops, dwte, NULL, lnf + first * (size_t)C, model->logits, chunk, C, Vp,
                                       accumulate || first > 0));
    }
    if (batch->train) tp_reduce(tp, model->branch, rows, C);
    COMPUTE(sum_values(ops, model->loss_sum, model->losses, rows, batch->micro > 0));
}

static inline void gpt_final(GPT *model, const MicroBatch *batch, const Activations *slot, const Chunk *chunk,
                             const Unit *unit, bool backward, const floatX *params, gradX *grads, floatX *dx,
                             int accumulate) {
    const int C = model->layout->shape.n_embd;
    const size_t rows = (size_t)batch->B * (size_t)batch->T, own = tp_rows(model->tp, rows);
    const floatX *last = gpt_block_input(model, slot, chunk->n_layers), *weight = TENSOR(params, unit, LNF_WEIGHT);
    if (!backward) {
        COMPUTE(layernorm_forward(model->ops, model->lnf, model->lnf_mean, model->lnf_rstd, last, weight,
                                  TENSOR(params, unit, LNF_BIAS), own, C));
        return;
    }
    const floatX *dout = model->planning ? NULL : model->branch + tp_first_row(model->tp, rows) * (size_t)C;
    COMPUTE(layernorm_backward(model->ops, dx, 1, TENSOR(grads, unit, LNF_WEIGHT), TENSOR(grads, unit, LNF_BIAS), dout,
                               last, weight, model->lnf_mean, model->lnf_rstd, own, C, accumulate));
}

// The embeddings' backward: wpe first, which asks for the rows of all ranks; wte then finds them where they were put.
static inline void gpt_embedding_backward(GPT *model, const MicroBatch *batch, const Activations *slot,
                                          const Unit *unit, gradX *grads, floatX *dx, int accumulate) {
    TensorParallel *tp = model->tp;
    const int B = batch->B, T = batch->T, C = model->layout->shape.n_embd;
    const size_t rows = (size_t)B * (size_t)T;
    if (unit->kind == UNIT_WPE) {
        Dropout dropout = gpt_residual_dropout(model, batch, 0, SITE_EMBEDDING);
        if (dropout.rate > 0) COMPUTE(dropout_backward(model->ops, dx, dx, tp_rows(tp, rows) * (size_t)C, dropout));
        const floatX *dout = tp_gather(tp, model->dgathered, dx, rows, C);
        COMPUTE(wpe_backward(model->ops, grads, dout, B, T, C, model->layout->shape.context_length, accumulate));
        return;
    }
    if (!accumulate) // the head is on another rank: nothing has been written yet
        COMPUTE(cuda_check(cudaMemsetAsync(grads, 0, unit->size * sizeof(gradX), model->zero->compute)));
    const floatX *dout = tp->sequence ? model->dgathered : dx;
    COMPUTE(wte_backward(model->ops, grads, dout, slot->inputs, B, T, C, tp->vocabulary));
}

// Passes a micro-batch through a chunk, forward or backward, walking its uses, `uses` to `uses` + n of the pass that
// zero_begin() was given. dx, backward: in, the gradient of the chunk's output (unless it is the last); out, that of
// its input. The loss summed over the micro-batches so far (from batch->micro 0 on) is then on the device: gpt_loss().
static inline void gpt_pass(GPT *model, const MicroBatch *batch, int chunk_number, const Use *uses, int n, floatX *dx) {
    Zero *zero = model->zero;
    const Layout *layout = model->layout;
    const Chunk *chunk = &layout->chunks[chunk_number];
    const Activations *slot = gpt_activations(model, chunk_number, batch->micro);
    const floatX *wte = NULL;
    for (int i = 0; i < n; i++) {
        const Use *use = &uses[i];
        const Unit *unit = &layout->units[use->unit];
        const bool backward = use->kind == USE_BACKWARD;
        const bool writes = batch->train && (backward || use->kind == USE_HEAD);
        const floatX *params = use->reads ? zero_acquire_params(zero, use->unit) : NULL;
        int accumulate = 0;
        gradX *grads = writes ? zero_acquire_grads(zero, use->unit, &accumulate) : NULL;
        if (unit->kind == UNIT_WTE && use->kind == USE_FORWARD) { // read together with wpe, the next use
            wte = params;
            continue;
        }
        const int span = trace_begin(model->tp->comm->trace, TRACE_COMPUTE, zero->compute, "%s %s, micro-batch %d",
                                     use_name(use->kind), unit->name, batch->micro);
        range_push(use_name(use->kind));
        range_push(unit->name);
        if (unit->kind == UNIT_FINAL)
            gpt_final(model, batch, slot, chunk, unit, backward, params, grads, dx, accumulate);
        else if (use->kind == USE_HEAD)
            gpt_head(model, batch, slot, params, grads, accumulate);
        else if (unit->kind == UNIT_BLOCK && backward)
            gpt_backward_block(model, batch, chunk, slot, use->unit - chunk->first_unit, unit, params, grads, dx,
                               accumulate);
        else if (unit->kind == UNIT_BLOCK)
            gpt_forward_block(model, batch, slot, use->unit - chunk->first_unit, unit, params, false);
        else if (backward)
            gpt_embedding_backward(model, batch, slot, unit, grads, dx, accumulate);
        else
            gpt_embed(model, batch, slot, wte, params);
        range_pop();
        range_pop();
        trace_end(model->tp->comm->trace, span, zero->compute);
        if (unit->kind == UNIT_WPE && !backward) zero_release_params(zero, layout->wte);
        if (use->reads) zero_release_params(zero, use->unit);
        if (use->completes) zero_release_grads(zero, use->unit, batch->last_micro);
    }
}

// Gives a chunk the tokens of a micro-batch: the first needs inputs, the last targets. The caller's are read now.
static inline void gpt_upload(GPT *model, const MicroBatch *batch, int chunk_number) {
    const Chunk *chunk = &model->layout->chunks[chunk_number];
    if (model->planning || (!chunk->first && !chunk->last)) return;
    const Activations *slot = gpt_activations(model, chunk_number, batch->micro);
    const size_t tokens = (size_t)batch->B * (size_t)batch->T, bytes = tokens * sizeof(int);
    const int i = model->uploads++ % 2;
    cudaStream_t compute = model->zero->compute;
    int *inputs = model->staging[i], *targets = inputs + tokens;
    comm_wait_event(model->zero->comm, model->copied[i], "the micro-batch before the last");
    if (chunk->first) {
        memcpy(inputs, batch->inputs, bytes);
        cuda_check(cudaMemcpyAsync(slot->inputs, inputs, bytes, cudaMemcpyHostToDevice, compute));
    }
    if (chunk->last) {
        memcpy(targets, batch->targets, bytes);
        cuda_check(cudaMemcpyAsync(slot->targets, targets, bytes, cudaMemcpyHostToDevice, compute));
    }
    cuda_check(cudaEventRecord(model->copied[i], compute));
}

// Where the sum of losses since the last micro-batch 0 is, over the tokens of this rank: device memory; NULL on ranks
// that have none, or whose losses another tensor rank counts.
static inline const double *gpt_loss_sum(const GPT *model) {
    return model->layout->final < 0 || model->tp->rank > 0 ? NULL : model->loss_sum;
}

// The same on the host, 0 for NULL. Waits for the compute stream.
static inline double gpt_loss(GPT *model) {
    cudaStream_t compute = model->zero->compute;
    const double *sum = gpt_loss_sum(model);
    if (sum == NULL) return 0;
    cuda_check(cudaMemcpyAsync(model->loss, sum, sizeof(double), cudaMemcpyDeviceToHost, compute));
    comm_wait(model->zero->comm, compute, "the loss");
    return *model->loss;
}

// The loss of every token of the last pass: out (rows), host; what its targets do not count means nothing. False on
// ranks where gpt_loss_sum() is NULL: out is left alone. Waits for the compute stream.
static inline bool gpt_losses(GPT *model, size_t rows, float *out) {
    if (gpt_loss_sum(model) == NULL) return false;
    cudaStream_t compute = model->zero->compute;
    cuda_check(cudaMemcpyAsync(out, model->losses, rows * sizeof(float), cudaMemcpyDeviceToHost, compute));
    comm_wait(model->zero->comm, compute, "the losses of tokens");
    return true;
}

// The logits of the row that the last pass asked for with only_row, on every rank: out (V), host. Ranks that hold parts
// of the vocabulary, or none of the head, learn them from those of the first data-parallel rank. Waits for the streams.
static inline void gpt_logits(GPT *model, float *out) {
    enum { PART = 128 }; // rows of a slice are a multiple of it
    Comm *comm = model->tp->comm;
    const int V = model->layout->shape.vocab_size, rows = model->tp->vocab_rows, S = model->tp->size;
    const int last_stage = (comm->grid.pipeline - 1) * comm->grid.data * S;
    const bool alone = S * comm->grid.pipeline == 1;
    if (model->layout->final >= 0) {
        cudaStream_t compute = model->zero->compute;
        cuda_check(
            cudaMemcpyAsync(model->row, model->logits, (size_t)rows * sizeof(floatX), cudaMemcpyDeviceToHost, compute));
        comm_wait(comm, compute, "the logits");
    }
    for (int first = 0; first < V; first += PART) {
        const int count = V - first < PART ? V - first : PART, owner = first / rows;
        float values[PART];
        if (model->layout->final >= 0 && owner == model->tp->rank)
            for (int i = 0; i < count; i++) values[i] = floatX_to_float(model->row[first % rows + i]);
        if (!alone) comm_broadcast(comm, last_stage + owner, values, sizeof values);
        memcpy(out + first, values, (size_t)count * sizeof(float));
    }
}

#endif
