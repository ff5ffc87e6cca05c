// ops_table.cu: the table of ops_table.h, filled with the operations of the device that this is compiled for.
// OPS_TABLE is the name of the table.
#include <stdlib.h>
#include <string.h>
#include "ops_table.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#ifdef TRAIN_GPT_EMULATOR
#include "emulator.h"
#endif

enum { GUARD_BYTES = 256, GUARD = 0xa5 };

// An Ops whose workspace has been moved between guards.
typedef struct {
    Ops ops; // first, so that a pointer to it is one to this
    Memory memory;
    cudaStream_t stream;
    void *own;              // the workspace that ops_init() allocated
    unsigned char *guarded; // ours: guard, workspace, guard; or NULL
} Context;

static void *allocate(size_t bytes) {
    void *memory = NULL;
    cuda_check(cudaMalloc(&memory, bytes));
    return memory;
}

static void release(void *memory) {
    cuda_check(cudaFree(memory));
}

static void upload(void *device, const void *host, size_t bytes) {
    cuda_check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
}

static void download(void *host, const void *device, size_t bytes) {
    cuda_check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
}

static void synchronize(void) {
    cuda_check(cudaDeviceSynchronize());
}

static void forbid(const void *memory, size_t bytes, int on) {
#if defined(__SANITIZE_ADDRESS__)
    if (on)
        ASAN_POISON_MEMORY_REGION(memory, bytes);
    else
        ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
#else
    (void)memory;
    (void)bytes;
    (void)on;
#endif
}

static void *open_ops(const OpsShape *shape, int guarded) {
    Context *context = (Context *)calloc(1, sizeof *context);
    if (context == NULL) die("no memory");
    cuda_check(cudaStreamCreate(&context->stream));
    ops_init(&context->ops, &context->memory, shape, NULL, context->stream);
    if (!guarded) return context;
    size_t bytes = context->ops.workspace_bytes;
    context->own = context->ops.workspace;
    context->guarded = (unsigned char *)allocate(bytes + 2 * GUARD_BYTES);
    cuda_check(cudaMemset(context->guarded, GUARD, bytes + 2 * GUARD_BYTES));
    context->ops.workspace = context->guarded + GUARD_BYTES;
    forbid(context->guarded, GUARD_BYTES, 1);
    forbid(context->guarded + GUARD_BYTES + bytes, GUARD_BYTES, 1);
    return context;
}

static void close_ops(void *ops) {
    Context *context = (Context *)ops;
    synchronize();
    if (context->guarded != NULL) {
        context->ops.workspace = context->own;
        forbid(context->guarded, context->ops.workspace_bytes + 2 * GUARD_BYTES, 0);
        release(context->guarded);
    }
    ops_free(&context->ops);
    cuda_check(cudaStreamDestroy(context->stream));
    free(context);
}

static void poison_workspace(void *ops) {
    Context *context = (Context *)ops;
    if (context->ops.workspace_bytes == 0) return;
    cuda_check(cudaMemset(context->ops.workspace, 0xff, context->ops.workspace_bytes)); // NaN in every format
    synchronize();
}

static int workspace_guards_hold(void *ops) {
    Context *context = (Context *)ops;
    size_t bytes = context->ops.workspace_bytes;
    unsigned char *after = context->guarded + GUARD_BYTES + bytes, guards[2 * GUARD_BYTES];
    forbid(context->guarded, bytes + 2 * GUARD_BYTES, 0);
    download(guards, context->guarded, GUARD_BYTES);
    download(guards + GUARD_BYTES, after, GUARD_BYTES);
    forbid(context->guarded, GUARD_BYTES, 1);
    forbid(after, GUARD_BYTES, 1);
    for (size_t i = 0; i < sizeof guards; i++)
        if (guards[i] != GUARD) return 0;
    return 1;
}

#ifdef TRAIN_GPT_EMULATOR
static void thread_order(const char *order) {
    if (!emulator_set_threads(order)) die("no order of threads is called %s", order);
}

static void traffic_reset(void) {
    emulator_counts_reset();
}

static void traffic_read(Traffic *traffic) {
    emulator_counts(&traffic->read, &traffic->written, &traffic->launches);
}
#endif

#define OPS ((Ops *)ops)
#define X(p) ((floatX *)(p))
#define G(p) ((gradX *)(p))
#define F(p) ((float *)(p))
#define CX(p) ((const floatX *)(p))
#define CG(p) ((const gradX *)(p))
#define CF(p) ((const float *)(p))
#define CI(p) ((const int *)(p))

static void t_embedding_forward(void *ops, void *out, const void *tokens, const void *wte, const void *wpe, int B,
                                int T, int C, const Vocabulary *vocabulary, const Dropout *dropout) {
    embedding_forward(OPS, X(out), CI(tokens), CX(wte), CX(wpe), B, T, C, *vocabulary, *dropout);
}

static void t_wpe_backward(void *ops, void *dwpe, const void *dout, int B, int T, int C, int positions,
                           int accumulate) {
    wpe_backward(OPS, G(dwpe), CX(dout), B, T, C, positions, accumulate);
}

static void t_wte_backward(void *ops, void *dwte, const void *dout, const void *tokens, int B, int T, int C,
                           const Vocabulary *vocabulary) {
    wte_backward(OPS, G(dwte), CX(dout), CI(tokens), B, T, C, *vocabulary);
}

static void t_layernorm_forward(void *ops, void *out, void *mean, void *rstd, const void *inp, const void *weight,
                                const void *bias, size_t rows, int C) {
    layernorm_forward(OPS, X(out), F(mean), F(rstd), CX(inp), CX(weight), CX(bias), rows, C);
}

static void t_residual_layernorm_forward(void *ops, void *residual, void *out, void *mean, void *rstd, const void *inp,
                                         const void *branch, const void *weight, const void *bias, size_t rows, int C,
                                         const Dropout *dropout) {
    residual_layernorm_forward(OPS, X(residual), X(out), F(mean), F(rstd), CX(inp), CX(branch), CX(weight), CX(bias),
                               rows, C, *dropout);
}

static void t_layernorm_backward(void *ops, void *dinp, int dinp_zero, void *dweight, void *dbias, const void *dout,
                                 const void *inp, const void *weight, const void *mean, const void *rstd, size_t rows,
                                 int C, int accumulate) {
    layernorm_backward(OPS, X(dinp), dinp_zero, G(dweight), G(dbias), CX(dout), CX(inp), CX(weight), CF(mean), CF(rstd),
                       rows, C, accumulate);
}

static void t_residual_forward(void *ops, void *out, const void *inp, const void *branch, size_t n,
                               const Dropout *dropout) {
    residual_forward(OPS, X(out), CX(inp), CX(branch), n, *dropout);
}

static void t_dropout_backward(void *ops, void *dinp, const void *dout, size_t n, const Dropout *dropout) {
    dropout_backward(OPS, X(dinp), CX(dout), n, *dropout);
}

static void t_matmul_forward(void *ops, void *out, const void *inp, const void *weight, const void *bias, size_t rows,
                             int C, int OC) {
    matmul_forward(OPS, X(out), CX(inp), CX(weight), CX(bias), rows, C, OC);
}

static void t_matmul_gelu_forward(void *ops, void *pre, void *out, const void *inp, const void *weight,
                                  const void *bias, size_t rows, int C, int OC) {
    matmul_gelu_forward(OPS, X(pre), X(out), CX(inp), CX(weight), CX(bias), rows, C, OC);
}

static void t_matmul_backward_input(void *ops, void *dinp, const void *dout, const void *weight, size_t rows, int C,
                                    int OC) {
    matmul_backward_input(OPS, X(dinp), CX(dout), CX(weight), rows, C, OC);
}

static void t_matmul_gelu_backward_input(void *ops, void *dpre, const void *dout, const void *weight, const void *pre,
                                         size_t rows, int C, int OC) {
    matmul_gelu_backward_input(OPS, X(dpre), CX(dout), CX(weight), CX(pre), rows, C, OC);
}

static void t_matmul_backward_weight(void *ops, void *dweight, void *dbias, const void *inp, const void *dout,
                                     size_t rows, int C, int OC, int accumulate) {
    matmul_backward_weight(OPS, G(dweight), G(dbias), CX(inp), CX(dout), rows, C, OC, accumulate);
}

static void t_attention_forward(void *ops, void *out, void *lse, const void *qkv, int B, int T, int NH, int HS,
                                const Dropout *dropout) {
    attention_forward(OPS, X(out), F(lse), CX(qkv), B, T, NH, HS, *dropout);
}

static void t_attention_backward(void *ops, void *dqkv, const void *dout, const void *qkv, const void *out,
                                 const void *lse, int B, int T, int NH, int HS, const Dropout *dropout) {
    attention_backward(OPS, X(dqkv), CX(dout), CX(qkv), CX(out), CF(lse), B, T, NH, HS, *dropout);
}

static void t_classifier(void *ops, void *logits, void *losses, const void *targets, size_t rows, int V, int Vp,
                         float scale, int want_gradient) {
    classifier(OPS, X(logits), F(losses), CI(targets), rows, V, Vp, scale, want_gradient);
}

static void t_bias_backward(void *ops, void *dbias, const void *dout, size_t rows, int OC, int accumulate) {
    bias_backward(OPS, G(dbias), CX(dout), rows, OC, accumulate);
}

static void t_classifier_statistics(void *ops, void *statistics, const void *logits, const void *targets, size_t rows,
                                    int Vp, const Vocabulary *vocabulary) {
    classifier_statistics(OPS, F(statistics), CX(logits), CI(targets), rows, Vp, *vocabulary);
}

static void t_classifier_sliced(void *ops, void *logits, void *losses, const void *targets, const void *all, int ranks,
                                size_t rows, int Vp, const Vocabulary *vocabulary, float scale, int want_gradient) {
    classifier_sliced(OPS, X(logits), F(losses), CI(targets), CF(all), ranks, rows, Vp, *vocabulary, scale,
                      want_gradient);
}

static void t_sum_values(void *ops, void *sum, const void *x, size_t n, int accumulate) {
    sum_values(OPS, (double *)sum, CF(x), n, accumulate);
}

static void t_sum_of_squares(void *ops, void *sum, const void *x, size_t n, int accumulate) {
    sum_of_squares(OPS, (double *)sum, CG(x), n, accumulate);
}

static void t_accumulate_gradient(void *ops, void *sum, const void *x, size_t n) {
    accumulate_gradient(OPS, G(sum), CG(x), n, ((Context *)ops)->stream);
}

static void t_adamw_update(void *ops, const AdamW *hyper, void *params, void *master, void *m, void *v,
                           const void *grads, size_t n, size_t n_decay) {
    adamw_update(OPS, hyper, X(params), F(master), F(m), F(v), CG(grads), n, n_decay);
}

const OpsTable OPS_TABLE = {
    OPS_DEVICE,
    open_ops,
    close_ops,
    workspace_guards_hold,
    poison_workspace,
    allocate,
    release,
    upload,
    download,
    synchronize,
    forbid,
#ifdef TRAIN_GPT_EMULATOR
    thread_order,
    traffic_reset,
    traffic_read,
#else
    NULL,
    NULL,
    NULL,
#endif
    t_embedding_forward,
    t_wpe_backward,
    t_wte_backward,
    t_layernorm_forward,
    t_residual_layernorm_forward,
    t_layernorm_backward,
    t_residual_forward,
    t_dropout_backward,
    t_matmul_forward,
    t_matmul_gelu_forward,
    t_matmul_backward_input,
    t_matmul_gelu_backward_input,
    t_matmul_backward_weight,
    t_attention_forward,
    t_attention_backward,
    t_classifier,
    t_bias_backward,
    t_classifier_statistics,
    t_classifier_sliced,
    t_sum_values,
    t_sum_of_squares,
    t_accumulate_gradient,
    t_adamw_update,
};
