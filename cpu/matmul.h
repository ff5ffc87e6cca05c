// matmul.h: the products of linear layers, with bias, GELU and accumulation.
//
// fp32: oneDNN reads and writes the tensors themselves.
// bf16: products are summed in fp32 in the workspace, a block of MATMUL_ROWS rows or a strip of the layer's outputs at
// a time, and rounded once when what follows (bias, GELU, accumulation) has been applied. Where the processor has no
// bf16 instructions, operands are converted to fp32, a block and a strip at a time, and multiplied in fp32.
#ifndef CPU_MATMUL_H
#define CPU_MATMUL_H

#include "convert.h"
#include "gelu.h"
#include "onednn.h"
#include "reduce.h"

enum { MATMUL_ROWS = 1024 };

#if defined(PRECISION_FP32)
enum { MATMUL_BF16 = 0 };
#else
enum { MATMUL_BF16 = 1 };
#endif

// The workspace: fp32 sums, and copies of operands. No layer but the head is wider than 4 C.
typedef struct {
    float *sums;  // (MATMUL_ROWS, 4 C), or a strip of weights: at most 4 C * C
    float *x, *w; // fp32 copies of a block of inputs and a strip of weights
    void *y;      // copy of a block or strip of dout: fp32, or bf16 made dense
    size_t bytes; // of all
    int strip_y;  // the widest strip that y holds for all rows, when bf16
} MatmulWorkspace;

static inline MatmulWorkspace matmul_workspace(const OpsShape *shape, bool has_bf16, void *base) {
    MatmulWorkspace space;
    memset(&space, 0, sizeof space);
    if (!MATMUL_BF16) return space;
    size_t C = (size_t)shape->C, rows = larger((size_t)shape->B * (size_t)shape->T, (size_t)shape->logit_rows);
    size_t block = smaller(rows, MATMUL_ROWS) * 4 * C, weights = 4 * C * C;
    space.strip_y = (int)smaller(4 * C, 1024);
    size_t sizes[4]; // in bytes
    sizes[0] = larger(block, weights) * sizeof(float);
    sizes[1] = has_bf16 ? 0 : block * sizeof(float);
    sizes[2] = has_bf16 ? 0 : weights * sizeof(float);
    sizes[3] = has_bf16 ? rows * (size_t)space.strip_y * sizeof(floatX) : block * sizeof(float);
    char *at[4];
    for (int i = 0; i < 4; i++) {
        at[i] = base == NULL ? NULL : (char *)base + space.bytes;
        space.bytes += round_up(sizes[i], 64);
    }
    space.sums = (float *)at[0];
    space.x = (float *)at[1];
    space.w = (float *)at[2];
    space.y = at[3];
    return space;
}

// How many of a layer's OC outputs are worked on at once: their weights and sums must fit the workspace.
static inline int matmul_strip(const OpsShape *shape, int C, int OC) {
    size_t model_C = (size_t)shape->C;
    if ((size_t)C > 4 * model_C) die("a layer with %d inputs exceeds the workspace's 4 x %d", C, shape->C);
    return (int)smaller((size_t)OC, smaller(4 * model_C, 4 * model_C * model_C / (size_t)C));
}

#if !defined(PRECISION_FP32)

// to (rows, width) = columns first .. first + width of from (rows, stride), in fp32.
static inline void matmul_widen(Ops *ops, float *to, const floatX *from, size_t rows, int width, size_t stride) {
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t row = 0; row < rows; row++) {
        float *t = to + row * (size_t)width;
        const floatX *f = from + row * stride;
#pragma omp simd
        for (int i = 0; i < width; i++) t[i] = floatX_to_float(f[i]);
    }
}

// out = x w^T + bias, and gelu_out = gelu of that before it is rounded, unless NULL.
static inline void matmul_forward_bf16(Ops *ops, floatX *out, floatX *gelu_out, const floatX *inp, const floatX *weight,
                                       const floatX *bias, size_t rows, int C, int OC) {
    MatmulWorkspace space = matmul_workspace(&ops->shape, ops->has_bf16, ops->workspace);
    int strip = matmul_strip(&ops->shape, C, OC);
    for (size_t row = 0; row < rows; row += MATMUL_ROWS) {
        size_t n = smaller(rows - row, MATMUL_ROWS);
        const floatX *x = inp + row * (size_t)C;
        if (!ops->has_bf16) matmul_widen(ops, space.x, x, n, C, (size_t)C);
        for (int first = 0; first < OC; first += strip) {
            int width = OC - first < strip ? OC - first : strip;
            const floatX *w = weight + (size_t)first * (size_t)C;
            if (ops->has_bf16) {
                onednn_product(&ops->onednn, PRODUCT_FORWARD, dnnl_bf16, dnnl_f32, dnnl_data_type_undef, (void *)x,
                               (void *)w, space.sums, NULL, n, C, width);
            } else {
                matmul_widen(ops, space.w, w, (size_t)width, C, (size_t)C);
                onednn_sgemm(PRODUCT_FORWARD, space.x, space.w, space.sums, n, C, width, 0);
            }
#pragma omp parallel for schedule(static) num_threads(ops->threads)
            for (size_t i = 0; i < n; i++) {
                float *sums = space.sums + i * (size_t)width;
                size_t offset = (row + i) * (size_t)OC + (size_t)first;
                floatX *o = out + offset;
                if (bias != NULL)
                    for (int j = 0; j < width; j++) sums[j] += floatX_to_float(bias[first + j]);
                for (int j = 0; j < width; j++) o[j] = floatX_from(sums[j]);
                if (gelu_out != NULL) {
                    floatX *g = gelu_out + offset;
                    for (int j = 0; j < width; j++) g[j] = floatX_from(gelu(sums[j]));
                }
            }
        }
    }
}

// dinp = dout weight, times gelu'(pre) unless pre is NULL.
static inline void matmul_backward_input_bf16(Ops *ops, floatX *dinp, const floatX *dout, const floatX *weight,
                                              const floatX *pre, size_t rows, int C, int OC) {
    MatmulWorkspace space = matmul_workspace(&ops->shape, ops->has_bf16, ops->workspace);
    int strip = matmul_strip(&ops->shape, C, OC);
    for (size_t row = 0; row < rows; row += MATMUL_ROWS) {
        size_t n = smaller(rows - row, MATMUL_ROWS);
        const floatX *y = dout + row * (size_t)OC;
        if (ops->has_bf16) {
            onednn_product(&ops->onednn, PRODUCT_BACKWARD_INPUT, dnnl_bf16, dnnl_f32, dnnl_data_type_undef, space.sums,
                           (void *)weight, (void *)y, NULL, n, C, OC);
        } else {
            for (int first = 0; first < OC; first += strip) {
                int width = OC - first < strip ? OC - first : strip;
                matmul_widen(ops, (float *)space.y, y + first, n, width, (size_t)OC);
                matmul_widen(ops, space.w, weight + (size_t)first * (size_t)C, (size_t)width, C, (size_t)C);
                onednn_sgemm(PRODUCT_BACKWARD_INPUT, space.sums, space.w, (float *)space.y, n, C, width, first != 0);
            }
        }
#pragma omp parallel for schedule(static) num_threads(ops->threads)
        for (size_t i = 0; i < n; i++) {
            const float *sums = space.sums + i * (size_t)C;
            floatX *o = dinp + (row + i) * (size_t)C;
            if (pre != NULL) {
                const floatX *p = pre + (row + i) * (size_t)C;
                for (int j = 0; j < C; j++) o[j] = floatX_from(sums[j] * gelu_derivative(floatX_to_float(p[j])));
            } else
                for (int j = 0; j < C; j++) o[j] = floatX_from(sums[j]);
        }
    }
}

static inline void matmul_backward_weight_bf16(Ops *ops, gradX *dweight, const floatX *inp, const floatX *dout,
                                               size_t rows, int C, int OC, int accumulate) {
    MatmulWorkspace space = matmul_workspace(&ops->shape, ops->has_bf16, ops->workspace);
    int strip = matmul_strip(&ops->shape, C, OC);
    if (ops->has_bf16 && strip < OC && strip > space.strip_y) strip = space.strip_y;
    for (int first = 0; first < OC; first += strip) {
        int width = OC - first < strip ? OC - first : strip;
        if (ops->has_bf16) {
            const floatX *y = dout;
            if (strip < OC) { // the primitive wants dense matrices
#pragma omp parallel for schedule(static) num_threads(ops->threads)
                for (size_t row = 0; row < rows; row++)
                    memcpy((floatX *)space.y + row * (size_t)width, dout + row * (size_t)OC + first,
                           (size_t)width * sizeof(floatX));
                y = (const floatX *)space.y;
            }
            onednn_product(&ops->onednn, PRODUCT_BACKWARD_WEIGHT, dnnl_bf16, dnnl_f32, dnnl_data_type_undef,
                           (void *)inp, space.sums, (void *)y, NULL, rows, C, width);
        } else {
            for (size_t row = 0; row < rows; row += MATMUL_ROWS) {
                size_t n = smaller(rows - row, MATMUL_ROWS);
                matmul_widen(ops, space.x, inp + row * (size_t)C, n, C, (size_t)C);
                matmul_widen(ops, (float *)space.y, dout + row * (size_t)OC + first, n, width, (size_t)OC);
                onednn_sgemm(PRODUCT_BACKWARD_WEIGHT, space.x, space.sums, (float *)space.y, n, C, width, row != 0);
            }
        }
        gradX *g = dweight + (size_t)first * (size_t)C;
        const float *sums = space.sums;
        size_t count = (size_t)width * (size_t)C;
        if (accumulate) {
#pragma omp parallel for simd schedule(static) num_threads(ops->threads)
            for (size_t i = 0; i < count; i++) g[i] = gradX_from(gradX_to_float(g[i]) + sums[i]);
        } else {
#pragma omp parallel for simd schedule(static) num_threads(ops->threads)
            for (size_t i = 0; i < count; i++) g[i] = gradX_from(sums[i]);
        }
    }
}

#endif

OP void matmul_forward(Ops *ops, floatX *out, const floatX *inp, const floatX *weight, const floatX *bias, size_t rows,
                       int C, int OC) {
#if defined(PRECISION_FP32)
    onednn_product(&ops->onednn, PRODUCT_FORWARD, dnnl_f32, dnnl_f32, dnnl_f32, (void *)inp, (void *)weight, out,
                   (void *)bias, rows, C, OC);
#else
    matmul_forward_bf16(ops, out, NULL, inp, weight, bias, rows, C, OC);
#endif
}

OP void matmul_gelu_forward(Ops *ops, floatX *pre, floatX *out, const floatX *inp, const floatX *weight,
                            const floatX *bias, size_t rows, int C, int OC) {
#if defined(PRECISION_FP32)
    matmul_forward(ops, pre, inp, weight, bias, rows, C, OC);
    size_t n = rows * (size_t)OC;
#pragma omp parallel for simd schedule(static) num_threads(ops->threads)
    for (size_t i = 0; i < n; i++) out[i] = gelu(pre[i]);
#else
    matmul_forward_bf16(ops, pre, out, inp, weight, bias, rows, C, OC);
#endif
}

OP void matmul_backward_input(Ops *ops, floatX *dinp, const floatX *dout, const floatX *weight, size_t rows, int C,
                              int OC) {
#if defined(PRECISION_FP32)
    (void)ops;
    onednn_sgemm(PRODUCT_BACKWARD_INPUT, dinp, (float *)weight, (float *)dout, rows, C, OC, 0);
#else
    matmul_backward_input_bf16(ops, dinp, dout, weight, NULL, rows, C, OC);
#endif
}

OP void matmul_gelu_backward_input(Ops *ops, floatX *dpre, const floatX *dout, const floatX *weight, const floatX *pre,
                                   size_t rows, int C, int OC) {
#if defined(PRECISION_FP32)
    matmul_backward_input(ops, dpre, dout, weight, rows, C, OC);
    size_t n = rows * (size_t)C;
#pragma omp parallel for simd schedule(static) num_threads(ops->threads)
    for (size_t i = 0; i < n; i++) dpre[i] *= gelu_derivative(pre[i]);
#else
    matmul_backward_input_bf16(ops, dpre, dout, weight, pre, rows, C, OC);
#endif
}

OP void matmul_backward_weight(Ops *ops, gradX *dweight, gradX *dbias, const floatX *inp, const floatX *dout,
                               size_t rows, int C, int OC, int accumulate) {
    if (dbias != NULL) column_sums(ops, dbias, dout, rows, (size_t)OC, accumulate);
#if defined(PRECISION_FP32)
    onednn_sgemm(PRODUCT_BACKWARD_WEIGHT, (float *)inp, dweight, (float *)dout, rows, C, OC, accumulate);
#else
    matmul_backward_weight_bf16(ops, dweight, inp, dout, rows, C, OC, accumulate);
#endif
}

OP void bias_backward(Ops *ops, gradX *dbias, const floatX *dout, size_t rows, int OC, int accumulate) {
    column_sums(ops, dbias, dout, rows, (size_t)OC, accumulate);
}

#endif
