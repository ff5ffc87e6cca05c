// attention.cuh: causal self-attention, forward and backward, without the (B, NH, T, T) matrix.
//
// The kernels stand in attention_forward.cuh, attention_backward.cuh (bf16) and attention_fp32.cuh, each a template
// over the head dimension, rounded up to 64, 80, 96 or 128, and over whether there is dropout. They read queries, keys
// and values where they stand in qkv. The only scratch memory is D, a float for each row of out and head.
#ifndef ATTENTION_CUH
#define ATTENTION_CUH

#include "attention_backward.cuh"
#include "attention_forward.cuh"
#include "attention_fp32.cuh"

// Bytes of the workspace: D (B, NH, T), from the first kernel of the backward pass to the second.
static inline size_t attention_workspace(const OpsShape *shape) {
    return (size_t)shape->B * (size_t)shape->NH * (size_t)shape->T * sizeof(float);
}

// Calls run<WIDTH, DROPOUT>(arguments...) for this head dimension.
#define ATTENTION_WIDTH(run, WIDTH, rate, ...) \
    do {                                       \
        if ((rate) == 0.0f)                    \
            run<WIDTH, false>(__VA_ARGS__);    \
        else                                   \
            run<WIDTH, true>(__VA_ARGS__);     \
    } while (0)

#define ATTENTION_RUN(run, HS, NH, rate, ...)                                                              \
    do {                                                                                                   \
        if ((HS) <= 64)                                                                                    \
            ATTENTION_WIDTH(run, 64, rate, __VA_ARGS__);                                                   \
        else if ((HS) <= 80)                                                                               \
            ATTENTION_WIDTH(run, 80, rate, __VA_ARGS__);                                                   \
        else if ((HS) <= 96)                                                                               \
            ATTENTION_WIDTH(run, 96, rate, __VA_ARGS__);                                                   \
        else if ((HS) <= 128)                                                                              \
            ATTENTION_WIDTH(run, 128, rate, __VA_ARGS__);                                                  \
        else                                                                                               \
            die("heads of n_embd / n_head = %d / %d = %d channels: the GPU's attention takes at most 128", \
                (HS) * (NH), NH, HS);                                                                      \
    } while (0)

OP void attention_forward(Ops *ops, floatX *out, float *lse, const floatX *qkv, int B, int T, int NH, int HS,
                          Dropout dropout) {
    RANGE("attention_forward");
    ATTENTION_RUN(attention_forward_run, HS, NH, dropout.rate, ops->stream, out, lse, qkv, B, T, NH, HS,
                  dropout_mask(&dropout));
}

OP void attention_backward(Ops *ops, floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                           const float *lse, int B, int T, int NH, int HS, Dropout dropout) {
    RANGE("attention_backward");
    ATTENTION_RUN(attention_backward_run, HS, NH, dropout.rate, ops->stream, (float *)ops->workspace, dqkv, dout, qkv,
                  out, lse, B, T, NH, HS, dropout_mask(&dropout));
}

#endif
