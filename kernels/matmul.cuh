// matmul.cuh: linear layers by cuBLASLt, with bias, GELU, its derivative and bias gradients in the product's epilogue
// where the library has them, else as kernels after it; and the choice of algorithms by timing.
//
// Each product is 2 rows C OC operations. With s = sizeof(floatX) and g = sizeof(gradX), what it must read and write:
//   matmul_forward              s (rows C + OC C [+ OC])           s rows OC
//   matmul_gelu_forward         s (rows C + OC C [+ OC])           2 s rows OC
//   matmul_backward_input       s (rows OC + OC C)                 s rows C
//   matmul_gelu_backward_input  s (rows OC + OC C + rows C)        s rows C
//   matmul_backward_weight      s rows (OC + C) [+ g OC C]         g OC C [+ g OC]
// (brackets: bias; accumulating). Apart from the product, in addition:
//   bias           reads s (rows OC + rows OC), the bias again for each element; writes s rows OC
//   GELU, forward  reads s rows OC, writes s rows OC; backward: reads 2 s rows C, writes s rows C (gelu.cuh)
//   bias gradient  column_sums() (reduce.cuh) reads dout again
// A product for which the library has no algorithm at all is computed by a thread for each element of the result, which
// reads 2 s for each of its products: right, and slow.
//
// Bias gradients are left to the epilogue only when they overwrite: it cannot add, and a detour would round twice.
#ifndef MATMUL_CUH
#define MATMUL_CUH

#include "gelu.cuh"
#include "reduce.cuh"
#include "vector.cuh"

static inline size_t matmul_workspace(const OpsShape *shape) {
    return column_sums_workspace(4 * (size_t)shape->C); // the widest bias
}

// ------------------------------------------------------------------------------------------ what the library has not

enum { PRODUCT_THREADS = 256 };

// out[i, j] (+)= sum over k of left[i * left_row + k * left_step] right[j * right_column + k * right_step]
template <class Out>
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    product_kernel(Out *out, const floatX *left, const floatX *right, size_t rows, size_t columns, size_t depth,
                   size_t left_row, size_t left_step, size_t right_column, size_t right_step, int accumulate) {
    const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * columns) return;
    left += at / columns * left_row;
    right += at % columns * right_column;
    float sum = 0.0f;
    for (size_t k = 0; k < depth; k++)
        sum += to_float(load_one(left + k * left_step)) * to_float(load_one(right + k * right_step));
    if (accumulate) sum += to_float(load_one(out + at));
    store_one(out + at, from_float<Out>(sum));
}

static inline void product_apart(Ops *ops, LinearKind kind, int accumulate, const CublasLtOperands *operands,
                                 size_t rows, int C, int OC) {
    const size_t c = (size_t)C, oc = (size_t)OC;
    const floatX *x = (const floatX *)operands->x, *w = (const floatX *)operands->w, *y = (const floatX *)operands->y;
    const size_t results = kind == LINEAR_FORWARD ? rows * oc : kind == LINEAR_BACKWARD_INPUT ? rows * c : oc * c;
    const cudaLaunchConfig_t config =
        launch_config(divide_up(results, PRODUCT_THREADS), PRODUCT_THREADS, 0, ops->stream);
    if (kind == LINEAR_FORWARD)
        launch(config, product_kernel<floatX>, (floatX *)operands->y, x, w, rows, oc, c, c, (size_t)1, c, (size_t)1, 0);
    else if (kind == LINEAR_BACKWARD_INPUT)
        launch(config, product_kernel<floatX>, (floatX *)operands->x, y, w, rows, c, oc, oc, (size_t)1, (size_t)1, c,
               0);
    else
        launch(config, product_kernel<gradX>, (gradX *)operands->w, y, x, oc, c, rows, (size_t)1, oc, (size_t)1, c,
               accumulate);
}

// A product without an epilogue.
static inline void product(Ops *ops, LinearKind kind, int accumulate, const CublasLtOperands *operands, size_t rows,
                           int C, int OC) {
    if (!cublaslt_product(&ops->cublaslt, kind, CUBLASLT_EPILOGUE_DEFAULT, accumulate, operands, rows, C, OC,
                          ops->stream))
        product_apart(ops, kind, accumulate, operands, rows, C, OC);
}

struct AddBiasPass {
    floatX *out;
    const floatX *bias;
    size_t OC;
    template <int N> __device__ __forceinline__ void at(size_t i) const {
        float value[N], b[N];
        load_floats<N>(value, out + i);
        load_floats<N>(b, bias + i % OC);
#pragma unroll
        for (int j = 0; j < N; j++) value[j] += b[j];
        store_floats<N>(out + i, value);
    }
};

// out[i, :] += bias.   out (rows, OC)
static inline void add_bias(Ops *ops, floatX *out, const floatX *bias, size_t rows, int OC) {
    const AddBiasPass pass = {out, bias, (size_t)OC};
    vector_pass(pass, rows * (size_t)OC, OC % pack<floatX>() == 0 && aligned16(out, bias), ops->stream);
}

// -------------------------------------------------------------------------------------------------------- operations

OP void matmul_forward(Ops *ops, floatX *out, const floatX *inp, const floatX *weight, const floatX *bias, size_t rows,
                       int C, int OC) {
    RANGE("matmul_forward");
    const CublasLtOperands operands = {(void *)inp, (void *)weight, out, (void *)bias, NULL};
    if (bias != NULL && cublaslt_product(&ops->cublaslt, LINEAR_FORWARD, CUBLASLT_EPILOGUE_BIAS, 0, &operands, rows, C,
                                         OC, ops->stream))
        return;
    product(ops, LINEAR_FORWARD, 0, &operands, rows, C, OC);
    if (bias != NULL) add_bias(ops, out, bias, rows, OC);
}

OP void matmul_gelu_forward(Ops *ops, floatX *pre, floatX *out, const floatX *inp, const floatX *weight,
                            const floatX *bias, size_t rows, int C, int OC) {
    RANGE("matmul_gelu_forward");
    const CublasLtOperands operands = {(void *)inp, (void *)weight, out, (void *)bias, pre};
    const cublasLtEpilogue_t epilogue = bias != NULL ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    if (cublaslt_product(&ops->cublaslt, LINEAR_FORWARD, epilogue, 0, &operands, rows, C, OC, ops->stream)) return;
    matmul_forward(ops, pre, inp, weight, bias, rows, C, OC);
    gelu_forward_pass(ops, out, pre, rows * (size_t)OC);
}

OP void matmul_backward_input(Ops *ops, floatX *dinp, const floatX *dout, const floatX *weight, size_t rows, int C,
                              int OC) {
    RANGE("matmul_backward_input");
    const CublasLtOperands operands = {dinp, (void *)weight, (void *)dout, NULL, NULL};
    product(ops, LINEAR_BACKWARD_INPUT, 0, &operands, rows, C, OC);
}

OP void matmul_gelu_backward_input(Ops *ops, floatX *dpre, const floatX *dout, const floatX *weight, const floatX *pre,
                                   size_t rows, int C, int OC) {
    RANGE("matmul_gelu_backward_input");
    const CublasLtOperands operands = {dpre, (void *)weight, (void *)dout, NULL, (void *)pre};
    if (cublaslt_product(&ops->cublaslt, LINEAR_BACKWARD_INPUT, CUBLASLT_EPILOGUE_DGELU, 0, &operands, rows, C, OC,
                         ops->stream))
        return;
    matmul_backward_input(ops, dpre, dout, weight, rows, C, OC);
    gelu_backward_pass(ops, dpre, pre, rows * (size_t)C);
}

OP void matmul_backward_weight(Ops *ops, gradX *dweight, gradX *dbias, const floatX *inp, const floatX *dout,
                               size_t rows, int C, int OC, int accumulate) {
    RANGE("matmul_backward_weight");
    const CublasLtOperands operands = {(void *)inp, dweight, (void *)dout, dbias, NULL};
    if (dbias != NULL && !accumulate &&
        cublaslt_product(&ops->cublaslt, LINEAR_BACKWARD_WEIGHT, CUBLASLT_EPILOGUE_BGRADB, 0, &operands, rows, C, OC,
                         ops->stream))
        return;
    product(ops, LINEAR_BACKWARD_WEIGHT, accumulate, &operands, rows, C, OC);
    if (dbias != NULL) {
        if (column_sums_workspace((size_t)OC) > ops->workspace_bytes)
            die("the gradient of a bias of %d exceeds the workspace, which is made for 4 x %d", OC, ops->shape.C);
        column_sums(ops, dbias, dout, rows, (size_t)OC, accumulate);
    }
}

// ------------------------------------------------------------------------------------------------------------ tuning

typedef enum {
    CALL_FORWARD,
    CALL_GELU_FORWARD,
    CALL_BACKWARD_INPUT,
    CALL_GELU_BACKWARD_INPUT,
    CALL_BACKWARD_WEIGHT
} MatmulOp;

// A call of an operation on scratch.
typedef struct {
    Ops *ops;
    void *x, *w, *y, *pre, *bias;
    MatmulOp op;
    int with_bias, accumulate;
    size_t rows;
    int C, OC;
} MatmulCall;

static inline bool matmul_call(void *argument) {
    const MatmulCall *c = (const MatmulCall *)argument;
    floatX *x = (floatX *)c->x, *w = (floatX *)c->w, *y = (floatX *)c->y, *pre = (floatX *)c->pre;
    void *bias = c->with_bias ? c->bias : NULL;
    switch (c->op) {
    case CALL_FORWARD:
        matmul_forward(c->ops, y, x, w, (floatX *)bias, c->rows, c->C, c->OC);
        break;
    case CALL_GELU_FORWARD:
        matmul_gelu_forward(c->ops, pre, y, x, w, (floatX *)bias, c->rows, c->C, c->OC);
        break;
    case CALL_BACKWARD_INPUT:
        matmul_backward_input(c->ops, x, y, w, c->rows, c->C, c->OC);
        break;
    case CALL_GELU_BACKWARD_INPUT:
        matmul_gelu_backward_input(c->ops, x, y, w, pre, c->rows, c->C, c->OC);
        break;
    case CALL_BACKWARD_WEIGHT:
        matmul_backward_weight(c->ops, (gradX *)c->w, (gradX *)bias, x, y, c->rows, c->C, c->OC, c->accumulate);
        break;
    }
    return true;
}

// Times the algorithms of the call's products, then the call with its epilogue fused and apart; keeps what is fastest.
static inline void matmul_tune_call(MatmulCall *call) {
    CublasLt *cublaslt = &call->ops->cublaslt;
    cublaslt->fused = NULL;
    const float fused = cublaslt_time(matmul_call, call, call->ops->stream);
    CublasLtPlan *plan = cublaslt->fused;
    if (plan == NULL) return;
    const int choice = plan->choice;
    plan->choice = CUBLASLT_APART;
    const float apart = cublaslt_time(matmul_call, call, call->ops->stream);
    if (fused <= apart) plan->choice = choice;
}

static inline void matmul_tune_layer(MatmulCall *call, size_t rows, int C, int OC, int with_bias, int gelu_after,
                                     int gelu_before) {
    call->rows = rows;
    call->C = C;
    call->OC = OC;
    call->with_bias = with_bias;
    call->accumulate = 0;
    call->op = gelu_after ? CALL_GELU_FORWARD : CALL_FORWARD;
    matmul_tune_call(call);
    call->op = gelu_before ? CALL_GELU_BACKWARD_INPUT : CALL_BACKWARD_INPUT;
    matmul_tune_call(call);
    call->op = CALL_BACKWARD_WEIGHT;
    for (call->accumulate = 0; call->accumulate < 2; call->accumulate++) matmul_tune_call(call);
}

// With OpsOptions.matmul_tune: chooses the algorithm of every product of a training step by timing, before the first
// one, on scratch that is given back. Products that are seen later take the heuristic's first algorithm. Ranks may
// time differently: ops_choices_get() on one, ops_choices_set() on the others.
// When planning, the scratch is counted. Call it before other memory is allocated, so that it raises no peak.
OP void ops_tune(Ops *ops) {
    if (!ops->options.matmul_tune) return;
    const OpsShape *shape = &ops->shape;
    const size_t rows = (size_t)shape->B * (size_t)shape->T, C = (size_t)shape->C, Vp = (size_t)shape->Vp;
    const size_t logit_rows = (size_t)shape->logit_rows, last_rows = rows % logit_rows;
    const size_t logits = logit_rows * Vp, wide = rows * 4 * C;
    // Weights, or their gradients, whose elements may be larger.
    const size_t weights = (Vp > 4 * C ? Vp : 4 * C) * C;
    const size_t sizes[5] = {wide * sizeof(floatX), weights * sizeof(float),
                             (logits > wide ? logits : wide) * sizeof(floatX), wide * sizeof(floatX),
                             4 * C * sizeof(float)};
    size_t offsets[5], bytes = 0;
    for (int i = 0; i < 5; i++) {
        offsets[i] = bytes;
        bytes += divide_up(sizes[i], 256) * 256;
    }
    char *scratch = (char *)memory_alloc(ops->memory, MEMORY_WORKSPACE, bytes);
    if (!ops->memory->planning) {
        // Small numbers, 0.0115 in bf16 as in fp32: no infinities however often they are added up.
        cuda_check(cudaMemsetAsync(scratch, 0x3c, bytes, ops->stream));
        MatmulCall call;
        memset(&call, 0, sizeof call);
        call.ops = ops;
        call.x = scratch + offsets[0];
        call.w = scratch + offsets[1];
        call.y = scratch + offsets[2];
        call.pre = scratch + offsets[3];
        call.bias = scratch + offsets[4];
        ops->cublaslt.tuning = true;
        matmul_tune_layer(&call, rows, shape->C, 3 * shape->C, 1, 0, 0); // query, key, value
        matmul_tune_layer(&call, rows, shape->C, shape->C, 1, 0, 0);     // after attention
        matmul_tune_layer(&call, rows, shape->C, 4 * shape->C, 1, 1, 0); // MLP, with GELU between its layers
        matmul_tune_layer(&call, rows, 4 * shape->C, shape->C, 1, 0, 1);
        matmul_tune_layer(&call, logit_rows, shape->C, shape->Vp, 0, 0, 0); // the head
        if (last_rows != 0) matmul_tune_layer(&call, last_rows, shape->C, shape->Vp, 0, 0, 0);
        ops->cublaslt.tuning = false;
        cuda_check(cudaStreamSynchronize(ops->stream));
    }
    memory_free(ops->memory, MEMORY_WORKSPACE, scratch, bytes);
}

OP void ops_choices_get(const Ops *ops, OpsChoices *choices) {
    cublaslt_choices_get(&ops->cublaslt, &choices->products);
}
OP void ops_choices_set(Ops *ops, const OpsChoices *choices) {
    cublaslt_choices_set(&ops->cublaslt, &choices->products);
}

OP void bias_backward(Ops *ops, gradX *dbias, const floatX *dout, size_t rows, int OC, int accumulate) {
    RANGE("bias_backward");
    column_sums(ops, dbias, dout, rows, (size_t)OC, accumulate);
}

#endif
