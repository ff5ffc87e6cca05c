// ops.h: the layer operations and the optimizer: what a device must supply.
//
// The functions are declared here, once, with their shapes; the device's folder (the Makefile's include path: cpu/ or
// kernels/) defines them in ops_device.h. All buffers are device memory. Sums run in fp32 or better whatever the
// storage type, and values are rounded to floatX only where an operation stores its result. Every operation is
// deterministic: the same inputs give the same bits, and the order of summation over rows or elements depends on the
// shape alone, never on the number of threads.
//
// Shapes: B sequences, T positions, rows = B * T, C channels, NH heads of HS = C / NH, V tokens in the vocabulary, Vp
// the same padded. Sizes are in elements. `accumulate`: 0 overwrites the gradient (whatever it held), 1 adds to it.
#ifndef OPS_H
#define OPS_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>
#include "memory.h"
#include "random.h"

// floatX: parameters and activations. gradX: gradients of parameters. One choice per compilation (Makefile).
#if defined(PRECISION_BF16)
typedef __nv_bfloat16 floatX;
typedef __nv_bfloat16 gradX;
#elif defined(PRECISION_BF16_GRADFP32)
typedef __nv_bfloat16 floatX;
typedef float gradX;
#elif defined(PRECISION_FP32)
typedef float floatX;
typedef float gradX;
#else
#error "define one of PRECISION_FP32, PRECISION_BF16, PRECISION_BF16_GRADFP32"
#endif

// Conversions on the host, for what fills or reads buffers outside the ops.
#if defined(PRECISION_FP32)
static inline floatX floatX_from(float x) {
    return x;
}
static inline float floatX_to_float(floatX x) {
    return x;
}
#else
static inline floatX floatX_from(float x) {
    return __float2bfloat16(x);
}
static inline float floatX_to_float(floatX x) {
    return __bfloat162float(x);
}
#endif

#ifndef OP
#define OP static inline
#endif

// The largest shapes that the operations will see; they size the workspace.
typedef struct {
    int B, T, C, NH, V, Vp;
    int logit_rows; // rows of one classifier chunk
} OpsShape;

// What a run chooses. The CPU device has no use for either.
typedef struct {
    bool tf32;        // fp32: products on tensor cores, which keep 10 bits of the mantissa
    bool matmul_tune; // choose the algorithm of each product by timing candidates, not by the library's guess
} OpsOptions;

// The device's context: the compute stream, the workspace, handles of its libraries. Defined by ops_device.h.
typedef struct Ops Ops;
typedef struct OpsChoices OpsChoices;

// Dropout of one tensor: element i of the buffer at hand is element first + i of the tensor as it stands in the global
// batch, so that a mask depends neither on ranks nor on micro-batches. rate 0: no dropout, nothing is drawn.
// An element is kept where random_u32(key, index) >= rate * 2^32, and kept ones are scaled by 1 / (1 - rate).
typedef struct {
    float rate;
    uint64_t key;             // random_key(seed, RANDOM_DROPOUT, step, site)
    uint64_t first;           // index of the buffer's first element
    uint64_t sequence_stride; // attention: from a sequence to the next, since a rank may hold some of the heads
} Dropout;

// The rows of wte, tokens [first, first + count) of the vocabulary, that this rank holds; all, or a slice per tensor
// rank. The last slices may be short, or empty, where padding begins.
typedef struct {
    int first, count;
} Vocabulary;

// Opens the operations for shapes up to `shape`. Allocates the workspace, through `memory`. When memory->planning, only
// that allocation is counted, and the context cannot compute.
OP void ops_init(Ops *ops, Memory *memory, const OpsShape *shape, const OpsOptions *options, cudaStream_t stream);
OP void ops_free(Ops *ops);

// With options.matmul_tune: chooses the algorithm of every product of the model by timing, and how it was chosen can be
// carried from one rank to the others, so that all compute alike (OpsChoices: bytes, defined by ops_device.h).
// Otherwise nothing. Call it after ops_init(), before anything else is allocated.
OP void ops_tune(Ops *ops);
OP void ops_choices_get(const Ops *ops, OpsChoices *choices);
OP void ops_choices_set(Ops *ops, const OpsChoices *choices);

// out[b,t,:] = dropout(wte[tokens[b,t] - first,:] + wpe[t,:]), 0 where this rank does not hold the token: the sum over
// tensor ranks is the whole.   out (B, T, C), tokens (B, T), wte (>= count, C), wpe (>= T, C)
OP void embedding_forward(Ops *ops, floatX *out, const int *tokens, const floatX *wte, const floatX *wpe, int B, int T,
                          int C, Vocabulary vocabulary, Dropout dropout);
// dwpe[t,:] (+)= sum over b of dout[b,t,:].   dwpe (positions, C); rows from T on are zeroed unless accumulating
OP void wpe_backward(Ops *ops, gradX *dwpe, const floatX *dout, int B, int T, int C, int positions, int accumulate);
// dwte[tokens[b,t] - first,:] += dout[b,t,:] for the tokens that this rank holds, always added (the head's gradient is
// there already). Occurrences of a token are summed in fp32, in the order of rows, and rounded once.
//   dwte (>= count, C)
OP void wte_backward(Ops *ops, gradX *dwte, const floatX *dout, const int *tokens, int B, int T, int C,
                     Vocabulary vocabulary);

// out = (inp - mean) * rstd * weight + bias over C; variance is biased, epsilon 1e-5.   mean, rstd (rows)
OP void layernorm_forward(Ops *ops, floatX *out, float *mean, float *rstd, const floatX *inp, const floatX *weight,
                          const floatX *bias, size_t rows, int C);
// residual = inp + dropout(branch), rounded; out = layer norm of residual.   all (rows, C)
OP void residual_layernorm_forward(Ops *ops, floatX *residual, floatX *out, float *mean, float *rstd, const floatX *inp,
                                   const floatX *branch, const floatX *weight, const floatX *bias, size_t rows, int C,
                                   Dropout dropout);
// dinp += gradient through the layer norm (dinp holds the gradient of the residual path: read, added to, rounded once);
// dinp_zero != 0: dinp is written, not added to. dweight, dbias (C) (+)= sums over rows, in an order fixed by shape.
OP void layernorm_backward(Ops *ops, floatX *dinp, int dinp_zero, gradX *dweight, gradX *dbias, const floatX *dout,
                           const floatX *inp, const floatX *weight, const float *mean, const float *rstd, size_t rows,
                           int C, int accumulate);

// out = inp + dropout(branch).   n elements; out may be inp
OP void residual_forward(Ops *ops, floatX *out, const floatX *inp, const floatX *branch, size_t n, Dropout dropout);
// dinp = dropout's mask and scale applied to dout.   dinp may be dout
OP void dropout_backward(Ops *ops, floatX *dinp, const floatX *dout, size_t n, Dropout dropout);

// out = inp weight^T + bias.   out (rows, OC), inp (rows, C), weight (OC, C), bias (OC) or NULL
OP void matmul_forward(Ops *ops, floatX *out, const floatX *inp, const floatX *weight, const floatX *bias, size_t rows,
                       int C, int OC);
// pre = inp weight^T + bias; out = gelu(pre), tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
OP void matmul_gelu_forward(Ops *ops, floatX *pre, floatX *out, const floatX *inp, const floatX *weight,
                            const floatX *bias, size_t rows, int C, int OC);
// dinp = dout weight.   dinp (rows, C), dout (rows, OC); written, not added to
OP void matmul_backward_input(Ops *ops, floatX *dinp, const floatX *dout, const floatX *weight, size_t rows, int C,
                              int OC);
// dpre = (dout weight) * gelu'(pre).   dpre, pre (rows, C), dout (rows, OC)
OP void matmul_gelu_backward_input(Ops *ops, floatX *dpre, const floatX *dout, const floatX *weight, const floatX *pre,
                                   size_t rows, int C, int OC);
// dweight (+)= dout^T inp; dbias (+)= sums of dout over rows.   dweight (OC, C), dbias (OC) or NULL
OP void matmul_backward_weight(Ops *ops, gradX *dweight, gradX *dbias, const floatX *inp, const floatX *dout,
                               size_t rows, int C, int OC, int accumulate);

// dbias (+)= sums of dout over rows.   dbias (OC), dout (rows, OC)
OP void bias_backward(Ops *ops, gradX *dbias, const floatX *dout, size_t rows, int OC, int accumulate);

// Causal self-attention, out = softmax(q k^T / sqrt(HS)) v per head, dropout on the softmax's result. Never holds
// (B, NH, T, T). qkv (B, T, 3, NH, HS), out (B, T, NH, HS), lse (B, NH, T) fp32: log of the softmax's denominator.
// Element (b, h, t, s) of the dropout mask has index b * dropout.sequence_stride + (h * T + t) * T + s, counted from
// dropout.first.
OP void attention_forward(Ops *ops, floatX *out, float *lse, const floatX *qkv, int B, int T, int NH, int HS,
                          Dropout dropout);
// dqkv (B, T, 3, NH, HS) is written, not added to.
OP void attention_backward(Ops *ops, floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                           const float *lse, int B, int T, int NH, int HS, Dropout dropout);

// Cross-entropy of a softmax over the first V of Vp columns. losses[row] = -log p[target], 0 where target is -1.
// With want_gradient, logits are overwritten by their gradient, (p - onehot) * scale, 0 in padding columns and in rows
// whose target is -1. scale: 1 / (tokens in the global batch).   logits (rows, Vp), targets (rows), losses (rows) fp32
OP void classifier(Ops *ops, floatX *logits, float *losses, const int *targets, size_t rows, int V, int Vp, float scale,
                   int want_gradient);

// The same for a vocabulary whose columns are sliced over ranks, in two halves. First each rank's statistics of its own
// columns: statistics[row] = {maximum, sum of exp(x - maximum), logit of the target or 0 if it is not here}. Then, with
// those of all ranks, the loss, the same on every rank, and the gradient of the rank's columns.
//   logits (rows, Vp), the first vocabulary.count columns count; statistics (rows, 3), all (ranks, rows, 3)
OP void classifier_statistics(Ops *ops, float *statistics, const floatX *logits, const int *targets, size_t rows,
                              int Vp, Vocabulary vocabulary);
OP void classifier_sliced(Ops *ops, floatX *logits, float *losses, const int *targets, const float *all, int ranks,
                          size_t rows, int Vp, Vocabulary vocabulary, float scale, int want_gradient);

// *sum (+)= sum of x[0..n), in double.   sum: device memory
OP void sum_values(Ops *ops, double *sum, const float *x, size_t n, int accumulate);
// *sum (+)= sum of x[i]^2, in double; the order depends on n alone.
OP void sum_of_squares(Ops *ops, double *sum, const gradX *x, size_t n, int accumulate);

// sum += x, in fp32, rounded once; on `stream`, which need not be the compute stream.   n elements
OP void accumulate_gradient(Ops *ops, gradX *sum, const gradX *x, size_t n, cudaStream_t stream);

// One AdamW step (Loshchilov, Hutter, ICLR 2019; the bias-corrected form that PyTorch uses), in fp32:
//   g = grad * grad_scale; m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
//   p = p (1 - lr * decay) - lr * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + epsilon)
// on master, which is then rounded to params; master NULL (fp32 only): on params. decay applies to elements [0,
// n_decay).
typedef struct {
    float learning_rate, beta1, beta2, epsilon, weight_decay;
    float grad_scale; // what clipping multiplies gradients by
    int64_t step;     // counts from 1
    uint64_t round_key, round_first;
} AdamW;
OP void adamw_update(Ops *ops, const AdamW *hyper, floatX *params, float *master, float *m, float *v,
                     const gradX *grads, size_t n, size_t n_decay);

#include "ops_device.h"

#endif
