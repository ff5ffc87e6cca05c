// gpt.h: the model: activations, forward and backward.
//
// GPT-2: learned positions, layer norm before attention and MLP (epsilon 1e-5), biases everywhere, tanh GELU, head tied
// to wte (Radford et al. 2019; GPT-3 has the same shape, Brown et al. 2020). The vocabulary is padded to a multiple of
// 128 and the padding is masked out of the softmax. Forward and backward are written out by hand, one unit at a time;
// the model walks the list of uses (zero.h) and never knows how parameters are sharded.
//
// All activations stand in one arena, allocated once. Shapes: B sequences of T tokens, rows = B T, C channels.
#ifndef GPT_H
#define GPT_H

#include "layout.h"
#include "memory.h"
#include "ops.h"
#include "profile.h"
#include "random.h"
#include "zero.h"

// What a block's forward keeps for its backward.
typedef struct {
    floatX *ln1;                                      // (rows, C)
    floatX *qkv;                                      // (rows, 3C)
    floatX *att;                                      // (rows, C)
    floatX *residual;                                 // (rows, C) input + attention branch
    floatX *ln2;                                      // (rows, C)
    floatX *mlp;                                      // (rows, 4C) before GELU
    floatX *mlp_gelu;                                 // (rows, 4C)
    float *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd; // (rows)
    float *lse;                                       // (B, NH, T)
} BlockActivations;

typedef struct {
    const Layout *layout;
    Ops *ops;
    Zero *zero;
    int B, T; // the largest batch
    int logit_rows;
    float dropout;
    bool recompute; // blocks keep only their input, and compute the rest again in backward
    uint64_t seed;

    char *arena;
    size_t arena_bytes;
    int *inputs, *targets;    // (rows)
    floatX *x;                // (L + 1, rows, C): inputs of the blocks, and of the final layer norm
    BlockActivations *blocks; // (L); with recompute all are the same memory
    floatX *lnf;              // (rows, C)
    float *lnf_mean, *lnf_rstd;
    floatX *logits; // (logit_rows, Vp): a chunk; becomes its gradient
    float *losses;  // (rows)
    double *loss_sum;

    // Gradients of activations, alive within one block, except dx that flows through all.
    floatX *dx;     // (rows, C) of the residual stream
    floatX *branch; // (rows, C) output of a branch in forward; its input's gradient in backward
    floatX *wide;   // (rows, 4C)
    floatX *masked; // (rows, C) dx under a dropout mask; NULL without dropout

    Use *train, *forward; // the uses of a step, all its micro-batches, and of a pass that only goes forward
    int n_train, n_forward;
    int micro_uses; // of one micro-batch of a step

    // Host, pinned. Tokens pass through two buffers in turn, so that the host prepares a micro-batch while the one
    // before is still being copied; copied[i]: staging[i] may be written again.
    int *staging[2]; // (2, rows) each: inputs, then targets
    cudaEvent_t copied[2];
    int uploads;  // so far
    double *loss; // what gpt_loss() reads
    floatX *row;  // (V) what gpt_logits() reads
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
    const size_t rows = (size_t)model->B * (size_t)model->T, C = (size_t)model->layout->shape.n_embd;
    const size_t n = rows * C * sizeof(floatX), heads = (size_t)model->layout->shape.n_head;
    const int L = model->layout->shape.n_layer;
    size_t used = 0;
#define CARVE(field, type, bytes)                                           \
    do {                                                                    \
        const size_t at_ = arena_carve(&used, bytes);                       \
        field = model->arena ? (type *)(void *)(model->arena + at_) : NULL; \
    } while (0)
    CARVE(model->inputs, int, rows * sizeof(int));
    CARVE(model->targets, int, rows * sizeof(int));
    CARVE(model->x, floatX, ((size_t)L + 1) * n);
    for (int l = 0; l < L; l++) {
        BlockActivations *block = &model->blocks[l];
        if (model->recompute && l > 0) {
            *block = model->blocks[0];
            continue;
        }
        CARVE(block->ln1, floatX, n);
        CARVE(block->qkv, floatX, 3 * n);
        CARVE(block->att, floatX, n);
        CARVE(block->residual, floatX, n);
        CARVE(block->ln2, floatX, n);
        CARVE(block->mlp, floatX, 4 * n);
        CARVE(block->mlp_gelu, floatX, 4 * n);
        CARVE(block->ln1_mean, float, rows * sizeof(float));
        CARVE(block->ln1_rstd, float, rows * sizeof(float));
        CARVE(block->ln2_mean, float, rows * sizeof(float));
        CARVE(block->ln2_rstd, float, rows * sizeof(float));
        CARVE(block->lse, float, rows *heads * sizeof(float));
    }
    CARVE(model->lnf, floatX, n);
    CARVE(model->lnf_mean, float, rows * sizeof(float));
    CARVE(model->lnf_rstd, float, rows * sizeof(float));
    CARVE(model->logits, floatX, (size_t)model->logit_rows * (size_t)model->layout->padded_vocab * sizeof(floatX));
    CARVE(model->losses, float, rows * sizeof(float));
    CARVE(model->loss_sum, double, sizeof(double));
    CARVE(model->dx, floatX, n);
    CARVE(model->branch, floatX, n);
    CARVE(model->wide, floatX, 4 * n);
    if (model->dropout > 0) CARVE(model->masked, floatX, n);
#undef CARVE
    return used;
}

// The rows of one classifier chunk: the logits of `chunks` equal parts of B T rows are never alive together.
static inline int gpt_logit_rows(int B, int T, int chunks) {
    return (B * T + chunks - 1) / chunks;
}

// The uses of a pass, in order: forward, and backward if `train`, of each micro-batch; returns their number. uses NULL:
// only counts. wte and wpe are used together at the beginning; the backward of wte and wpe needs no parameters.
static inline int gpt_list_uses(const Layout *layout, int micro_batches, bool train, Use *uses) {
    int n = 0;
    const int L = layout->shape.n_layer, first = layout->first_block;
#define USE(unit_, kind_, reads_, read_again_) \
    do {                                       \
        if (uses != NULL) {                    \
            uses[n].unit = unit_;              \
            uses[n].kind = kind_;              \
            uses[n].micro = micro;             \
            uses[n].reads = reads_;            \
            uses[n].read_again = read_again_;  \
        }                                      \
        n++;                                   \
    } while (0)
    for (int micro = 0; micro < micro_batches; micro++) {
        USE(layout->wte, USE_FORWARD, true, true);
        USE(layout->wpe, USE_FORWARD, true, false);
        for (int l = 0; l < L; l++) USE(first + l, USE_FORWARD, true, train);
        USE(layout->final, USE_FORWARD, true, train);
        USE(layout->wte, USE_HEAD, true, false);
        if (!train) continue;
        USE(layout->final, USE_BACKWARD, true, false);
        for (int l = L - 1; l >= 0; l--) USE(first + l, USE_BACKWARD, true, false);
        USE(layout->wpe, USE_BACKWARD, false, false);
        USE(layout->wte, USE_BACKWARD, false, false);
    }
#undef USE
    return n;
}

// What a run chooses.
typedef struct {
    int B, T;          // the largest micro-batch
    int micro_batches; // of a step
    int classifier_chunks;
    float dropout;
    bool recompute;
    uint64_t seed;
} GPTOptions;

// Allocates the activations.
static inline void gpt_init(GPT *model, Memory *memory, const Layout *layout, Ops *ops, Zero *zero,
                            const GPTOptions *options) {
    memset(model, 0, sizeof *model);
    model->layout = layout;
    model->ops = ops;
    model->zero = zero;
    model->B = options->B;
    model->T = options->T;
    model->logit_rows = gpt_logit_rows(options->B, options->T, options->classifier_chunks);
    model->dropout = options->dropout;
    model->recompute = options->recompute;
    model->seed = options->seed;
    const size_t L = (size_t)layout->shape.n_layer;
    model->n_train = gpt_list_uses(layout, options->micro_batches, true, NULL);
    model->micro_uses = model->n_train / options->micro_batches;
    model->n_forward = gpt_list_uses(layout, 1, false, NULL);
    model->blocks = (BlockActivations *)calloc(L, sizeof(BlockActivations));
    model->train = (Use *)calloc((size_t)model->n_train, sizeof(Use));
    model->forward = (Use *)calloc((size_t)model->n_forward, sizeof(Use));
    if (model->blocks == NULL || model->train == NULL || model->forward == NULL)
        die("no room for a model of %zu blocks", L);
    gpt_list_uses(layout, options->micro_batches, true, model->train);
    gpt_list_uses(layout, 1, false, model->forward);
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
    cuda_check(cudaMallocHost((void **)&model->row, (size_t)layout->shape.vocab_size * sizeof(floatX)));
}

static inline void gpt_free(GPT *model) {
    for (int i = 0; i < 2 && model->loss != NULL; i++) {
        cuda_check(cudaFreeHost(model->staging[i]));
        cuda_check(cudaEventDestroy(model->copied[i]));
    }
    if (model->loss != NULL) cuda_check(cudaFreeHost(model->loss));
    if (model->row != NULL) cuda_check(cudaFreeHost(model->row));
    free(model->blocks);
    free(model->train);
    free(model->forward);
}

// Dropout at one place of the model; `per_sequence` elements of it belong to one sequence.
static inline Dropout gpt_dropout(const GPT *model, const MicroBatch *batch, int layer, int site, size_t per_sequence) {
    Dropout dropout = {0, 0, 0};
    if (!batch->train || model->dropout == 0) return dropout;
    dropout.rate = model->dropout;
    dropout.key = random_key(model->seed, RANDOM_DROPOUT, (uint64_t)batch->step, (uint64_t)(layer * SITES + site));
    dropout.first = batch->first_sequence * per_sequence;
    return dropout;
}

static inline Dropout gpt_residual_dropout(const GPT *model, const MicroBatch *batch, int layer, int site) {
    return gpt_dropout(model, batch, layer, site, (size_t)batch->T * (size_t)model->layout->shape.n_embd);
}

static inline Dropout gpt_attention_dropout(const GPT *model, const MicroBatch *batch, int layer) {
    const size_t T = (size_t)batch->T;
    return gpt_dropout(model, batch, layer, SITE_ATTENTION, (size_t)model->layout->shape.n_head * T * T);
}

static inline floatX *gpt_block_input(const GPT *model, int layer) {
    const size_t n = (size_t)model->B * (size_t)model->T * (size_t)model->layout->shape.n_embd;
    return model->x + (size_t)layer * n;
}

// Before the first micro-batch of a step.
static inline void gpt_begin_step(GPT *model) {
    zero_begin(model->zero, model->train, model->n_train);
}

// A tensor of a unit within its parameters or its gradients.
#define TENSOR(base, unit, index) ((base) + (unit)->tensors[index].offset)

// again: in backward, for the activations alone, which do not include the block's output.
static inline void gpt_forward_block(GPT *model, const MicroBatch *batch, const Unit *unit, const floatX *params,
                                     bool again) {
    Ops *ops = model->ops;
    const int B = batch->B, T = batch->T, C = model->layout->shape.n_embd, NH = model->layout->shape.n_head;
    const int layer = unit->layer;
    const size_t rows = (size_t)B * (size_t)T;
    BlockActivations *a = &model->blocks[layer];
    const floatX *x = gpt_block_input(model, layer);
    floatX *out = gpt_block_input(model, layer + 1);

    layernorm_forward(ops, a->ln1, a->ln1_mean, a->ln1_rstd, x, TENSOR(params, unit, LN1_WEIGHT),
                      TENSOR(params, unit, LN1_BIAS), rows, C);
    matmul_forward(ops, a->qkv, a->ln1, TENSOR(params, unit, QKV_WEIGHT), TENSOR(params, unit, QKV_BIAS), rows, C,
                   3 * C);
    attention_forward(ops, a->att, a->lse, a->qkv, B, T, NH, C / NH, gpt_attention_dropout(model, batch, layer));
    matmul_forward(ops, model->branch, a->att, TENSOR(params, unit, ATTPROJ_WEIGHT), TENSOR(params, unit, ATTPROJ_BIAS),
                   rows, C, C);
    residual_layernorm_forward(ops, a->residual, a->ln2, a->ln2_mean, a->ln2_rstd, x, model->branch,
                               TENSOR(params, unit, LN2_WEIGHT), TENSOR(params, unit, LN2_BIAS), rows, C,
                               gpt_residual_dropout(model, batch, layer, SITE_ATTPROJ));
    matmul_gelu_forward(ops, a->mlp, a->mlp_gelu, a->ln2, TENSOR(params, unit, MLP_WEIGHT),
                        TENSOR(params, unit, MLP_BIAS), rows, C, 4 * C);
    if (again) return;
    matmul_forward(ops, model->branch, a->mlp_gelu, TENSOR(params, unit, MLPPROJ_WEIGHT),
                   TENSOR(params, unit, MLPPROJ_BIAS), rows, 4 * C, C);
    residual_forward(ops, out, a->residual, model->branch, rows * (size_t)C,
                     gpt_residual_dropout(model, batch, layer, SITE_MLPPROJ));
}

// The gradient that enters a branch: dx, or dx under the branch's dropout mask.
static inline const floatX *gpt_branch_gradient(GPT *model, size_t n, Dropout dropout) {
    if (dropout.rate == 0) return model->dx;
    dropout_backward(model->ops, model->masked, model->dx, n, dropout);
    return model->masked;
}

// dx: in, the gradient of the block's output; out, of its input.
static inline void gpt_backward_block(GPT *model, const MicroBatch *batch, const Unit *unit, const floatX *params,
                                      gradX *grads, int accumulate) {
    Ops *ops = model->ops;
    const int B = batch->B, T = batch->T, C = model->layout->shape.n_embd, NH = model->layout->shape.n_head;
    const int layer = unit->layer;
    const size_t rows = (size_t)B * (size_t)T, n = rows * (size_t)C;
    BlockActivations *a = &model->blocks[layer];
    // The last block's activations are still there.
    if (model->recompute && layer + 1 < model->layout->shape.n_layer)
        gpt_forward_block(model, batch, unit, params, true);

    // MLP branch
    const floatX *dout = gpt_branch_gradient(model, n, gpt_residual_dropout(model, batch, layer, SITE_MLPPROJ));
    matmul_gelu_backward_input(ops, model->wide, dout, TENSOR(params, unit, MLPPROJ_WEIGHT), a->mlp, rows, 4 * C, C);
    matmul_backward_weight(ops, TENSOR(grads, unit, MLPPROJ_WEIGHT), TENSOR(grads, unit, MLPPROJ_BIAS), a->mlp_gelu,
                           dout, rows, 4 * C, C, accumulate);
    matmul_backward_input(ops, model->branch, model->wide, TENSOR(params, unit, MLP_WEIGHT), rows, C, 4 * C);
    matmul_backward_weight(ops, TENSOR(grads, unit, MLP_WEIGHT), TENSOR(grads, unit, MLP_BIAS), a->ln2, model->wide,
                           rows, C, 4 * C, accumulate);
    layernorm_backward(ops, model->dx, 0, TENSOR(grads, unit, LN2_WEIGHT), TENSOR(grads, unit, LN2_BIAS), model->branch,
                       a->residual, TENSOR(params, unit, LN2_WEIGHT), a->ln2_mean, a->ln2_rstd, rows, C, accumulate);

    // Attention branch
    dout = gpt_branch_gradient(model, n, gpt_residual_dropout(model, batch, layer, SITE_ATTPROJ));
    matmul_backward_input(ops, model->branch, dout, TENSOR(params, unit, ATTPROJ_WEIGHT), rows, C, C);
    matmul_backward_weight(ops, TENSOR(grads, unit, ATTPROJ_WEIGHT), TENSOR(grads, unit, ATTPROJ_BIAS), a->att, dout,
                           rows, C, C, accumulate);
    attention_backward(ops, model->wide, model->branch, a->qkv, a->att, a->lse, B, T, NH, C / NH,
                       gpt_attention_dropout(model, batch, layer));
    matmul_backward_input(ops, model->branch, model->wide, TENSOR(params, unit, QKV_WEIGHT), rows, C, 3 * C);
    matmul_backward_weight(ops, TENSOR(grads, unit, QKV_WEIGHT), TENSOR(grads, unit, QKV_BIAS), a->ln1, model->wide,
                           rows, C, 3 * C, accumulate);
    layernorm_backward(ops, model->dx, 0, TENSOR(grads, unit, LN1_WEIGHT), TENSOR(grads, unit, LN1_BIAS), model->branch,
                       gpt_block_input(model, layer), TENSOR(params, unit, LN1_WEIGHT), a->ln1_mean, a->ln1_rstd, rows,
                       C, accumulate);
}

// The head, the loss and, when training, their backward, in chunks of rows: the logits of a chunk become their own
// gradient at once, so that (rows, Vp) need never exist. Leaves the gradient of the final layer norm's output in
// branch.
static inline void gpt_head(GPT *model, const MicroBatch *batch, const floatX *wte, gradX *dwte, int accumulate) {
    Ops *ops = model->ops;
    const int C = model->layout->shape.n_embd, V = model->layout->shape.vocab_size, Vp = model->layout->padded_vocab;
    const size_t rows = (size_t)batch->B * (size_t)batch->T;
    if (batch->only_row >= 0) {
        const floatX *row = model->lnf + (size_t)batch->only_row * (size_t)C;
        matmul_forward(ops, model->logits, row, wte, NULL, 1, C, Vp);
        return;
    }
    for (size_t first = 0; first < rows; first += (size_t)model->logit_rows) {
        const size_t left = rows - first, chunk = left < (size_t)model->logit_rows ? left : (size_t)model->logit_rows;
        const floatX *lnf = model->lnf + first * (size_t)C;
        matmul_forward(ops, model->logits, lnf, wte, NULL, chunk, C, Vp);
        classifier(ops, model->logits, model->losses + first, model->targets + first, chunk, V, Vp, batch->loss_scale,
                   batch->train);
        if (!batch->train) continue;
        matmul_backward_input(ops, model->branch + first * (size_t)C, model->logits, wte, chunk, C, Vp);
        matmul_backward_weight(ops, dwte, NULL, lnf, model->logits, chunk, C, Vp, accumulate || first > 0);
    }
    sum_values(ops, model->loss_sum, model->losses, rows, batch->micro > 0);
}

// Computes one use. `grads` and `accumulate` are meaningful where the use writes gradients.
static inline void gpt_compute_use(GPT *model, const MicroBatch *batch, const Use *use, const floatX *params,
                                   const floatX *wte, gradX *grads, int accumulate) {
    Ops *ops = model->ops;
    const Layout *layout = model->layout;
    const Unit *unit = &layout->units[use->unit];
    const int B = batch->B, T = batch->T, C = layout->shape.n_embd;
    const size_t rows = (size_t)B * (size_t)T;
    const floatX *last = gpt_block_input(model, layout->shape.n_layer);
    const Dropout embedding = gpt_residual_dropout(model, batch, 0, SITE_EMBEDDING);
    switch (unit->kind) {
    case UNIT_WPE:
        if (use->kind == USE_FORWARD)
            embedding_forward(ops, model->x, model->inputs, wte, params, B, T, C, embedding);
        else
            wpe_backward(ops, grads, model->dx, B, T, C, layout->shape.context_length, accumulate);
        break;
    case UNIT_WTE:
        if (use->kind == USE_HEAD) gpt_head(model, batch, params, grads, accumulate);
        if (use->kind == USE_BACKWARD) wte_backward(ops, grads, model->dx, model->inputs, B, T, C);
        break;
    case UNIT_BLOCK:
        if (use->kind == USE_FORWARD)
            gpt_forward_block(model, batch, unit, params, false);
        else
            gpt_backward_block(model, batch, unit, params, grads, accumulate);
        if (use->kind == USE_BACKWARD && unit->layer == 0 && embedding.rate > 0)
            dropout_backward(ops, model->dx, model->dx, rows * (size_t)C, embedding);
        break;
    case UNIT_FINAL:
        if (use->kind == USE_FORWARD)
            layernorm_forward(ops, model->lnf, model->lnf_mean, model->lnf_rstd, last, TENSOR(params, unit, LNF_WEIGHT),
                              TENSOR(params, unit, LNF_BIAS), rows, C);
        else
            layernorm_backward(ops, model->dx, 1, TENSOR(grads, unit, LNF_WEIGHT), TENSOR(grads, unit, LNF_BIAS),
                               model->branch, last, TENSOR(params, unit, LNF_WEIGHT), model->lnf_mean, model->lnf_rstd,
                               rows, C, accumulate);
        break;
    }
}

// Walks the uses of one micro-batch: those of micro-batch `micro` of a step, or of a forward pass. batch NULL: computes
// nothing, for a plan. Afterwards the loss summed over the micro-batches so far (from batch->micro 0 on) is on the
// device: gpt_loss().
static inline void gpt_walk(GPT *model, const MicroBatch *batch, const Use *uses, int n_uses, bool train,
                            bool last_micro) {
    static const char *const kinds[] = {"forward", "head", "backward"}; // by UseKind
    Zero *zero = model->zero;
    const Layout *layout = model->layout;
    const floatX *wte = NULL;
    for (int i = 0; i < n_uses; i++) {
        const Use *use = &uses[i];
        const bool writes = train && (use->kind == USE_BACKWARD || use->kind == USE_HEAD);
        const floatX *params = use->reads ? zero_acquire_params(zero, use->unit) : NULL;
        int accumulate = 0;
        gradX *grads = writes ? zero_acquire_grads(zero, use->unit, &accumulate) : NULL;
        if (use->unit == layout->wte && use->kind == USE_FORWARD) { // read together with wpe, the next use
            wte = params;
            continue;
        }
        if (batch != NULL) {
            range_push(kinds[use->kind]);
            range_push(layout->units[use->unit].name);
            gpt_compute_use(model, batch, use, params, wte, grads, accumulate);
            range_pop();
            range_pop();
        }
        if (use->unit == layout->wpe && use->kind == USE_FORWARD) zero_release_params(zero, layout->wte);
        if (use->reads) zero_release_params(zero, use->unit);
        // The head's part of wte's gradient is completed by the embedding's backward, and reduced once.
        if (writes && use->kind == USE_BACKWARD) zero_release_grads(zero, use->unit, last_micro);
    }
}

// Copies a micro-batch's tokens to the device. The caller's are read now.
static inline void gpt_upload(GPT *model, const MicroBatch *batch) {
    const size_t tokens = (size_t)batch->B * (size_t)batch->T, bytes = tokens * sizeof(int);
    const int i = model->uploads++ % 2;
    cudaStream_t compute = model->zero->compute;
    int *staging = model->staging[i];
    comm_wait_event(model->zero->comm, model->copied[i], "the micro-batch before the last");
    memcpy(staging, batch->inputs, bytes);
    memcpy(staging + tokens, batch->targets, bytes);
    cuda_check(cudaMemcpyAsync(model->inputs, staging, bytes, cudaMemcpyHostToDevice, compute));
    cuda_check(cudaMemcpyAsync(model->targets, staging + tokens, bytes, cudaMemcpyHostToDevice, compute));
    cuda_check(cudaEventRecord(model->copied[i], compute));
}

// A micro-batch of a step (after gpt_begin_step(), micro-batches in order), or a forward pass.
static inline void gpt_micro_batch(GPT *model, const MicroBatch *batch) {
    gpt_upload(model, batch);
    if (batch->train) {
        gpt_walk(model, batch, model->train + batch->micro * model->micro_uses, model->micro_uses, true,
                 batch->last_micro);
    } else {
        zero_begin(model->zero, model->forward, model->n_forward);
        gpt_walk(model, batch, model->forward, model->n_forward, false, false);
    }
}

// The uses of a whole step, without computing: what a plan counts.
static inline void gpt_plan_step(GPT *model) {
    gpt_begin_step(model);
    for (int first = 0; first < model->n_train; first += model->micro_uses)
        gpt_walk(model, NULL, model->train + first, model->micro_uses, true,
                 first + model->micro_uses == model->n_train);
}

// The sum of losses since the last micro-batch 0, over the tokens of this rank. Waits for the compute stream.
static inline double gpt_loss(GPT *model) {
    cudaStream_t compute = model->zero->compute;
    cuda_check(cudaMemcpyAsync(model->loss, model->loss_sum, sizeof(double), cudaMemcpyDeviceToHost, compute));
    comm_wait(model->zero->comm, compute, "the loss");
    return *model->loss;
}

// The logits of the row that the last micro-batch asked for with only_row: out (V), host. Waits for the compute stream.
static inline void gpt_logits(GPT *model, float *out) {
    const size_t V = (size_t)model->layout->shape.vocab_size;
    cudaStream_t compute = model->zero->compute;
    cuda_check(cudaMemcpyAsync(model->row, model->logits, V * sizeof(floatX), cudaMemcpyDeviceToHost, compute));
    comm_wait(model->zero->comm, compute, "the logits");
    for (size_t i = 0; i < V; i++) out[i] = floatX_to_float(model->row[i]);
}

#endif
