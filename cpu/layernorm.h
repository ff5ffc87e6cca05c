// layernorm.h: layer normalisation (Ba, Kiros, Hinton, 2016), forward, fused with the residual addition, and backward.
#ifndef CPU_LAYERNORM_H
#define CPU_LAYERNORM_H

#include "convert.h"
#include "dropout.h"
#include "reduce.h"

static inline void layernorm_row(floatX *out, float *mean, float *rstd, const floatX *inp, const floatX *weight,
                                 const floatX *bias, int C) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < C; i++) sum += floatX_to_float(inp[i]);
    float m = sum / (float)C;
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < C; i++) {
        float centred = floatX_to_float(inp[i]) - m;
        squares += centred * centred;
    }
    float s = 1.0f / sqrtf(squares / (float)C + 1e-5f);
#pragma omp simd
    for (int i = 0; i < C; i++)
        out[i] = floatX_from((floatX_to_float(inp[i]) - m) * s * floatX_to_float(weight[i]) + floatX_to_float(bias[i]));
    *mean = m;
    *rstd = s;
}

OP void layernorm_forward(Ops *ops, floatX *out, float *mean, float *rstd, const floatX *inp, const floatX *weight,
                          const floatX *bias, size_t rows, int C) {
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t row = 0; row < rows; row++)
        layernorm_row(out + row * (size_t)C, mean + row, rstd + row, inp + row * (size_t)C, weight, bias, C);
}

OP void residual_layernorm_forward(Ops *ops, floatX *residual, floatX *out, float *mean, float *rstd, const floatX *inp,
                                   const floatX *branch, const floatX *weight, const floatX *bias, size_t rows, int C,
                                   Dropout dropout) {
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t row = 0; row < rows; row++) {
        floatX *sum = residual + row * (size_t)C;
        for (int start = 0; start < C; start += DROPOUT_CHUNK) {
            float factors[DROPOUT_CHUNK];
            int count = (int)smaller((size_t)(C - start), DROPOUT_CHUNK);
            size_t offset = row * (size_t)C + (size_t)start;
            dropout_factors(factors, count, dropout, dropout.first + offset);
            floatX *o = residual + offset;
            const floatX *x = inp + offset, *y = branch + offset;
#pragma omp simd
            for (int i = 0; i < count; i++)
                o[i] = floatX_from(floatX_to_float(x[i]) + factors[i] * floatX_to_float(y[i]));
        }
        layernorm_row(out + row * (size_t)C, mean + row, rstd + row, sum, weight, bias, C);
    }
}

// With norm = (inp - mean) * rstd and d = dout * weight:
//   dinp += (d - mean(d) - norm * mean(d * norm)) * rstd;   dweight = sum dout * norm;   dbias = sum dout
OP void layernorm_backward(Ops *ops, floatX *dinp, int dinp_zero, gradX *dweight, gradX *dbias, const floatX *dout,
                           const floatX *inp, const floatX *weight, const float *mean, const float *rstd, size_t rows,
                           int C, int accumulate) {
    float *partial = (float *)ops->workspace;
    size_t per_block = column_block_rows(rows), blocks = column_blocks(rows), width = (size_t)C;
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t block = 0; block < blocks; block++) {
        float *weight_sums = partial + block * 2 * width, *bias_sums = weight_sums + width;
        memset(weight_sums, 0, 2 * width * sizeof(float));
        size_t end = smaller((block + 1) * per_block, rows);
        for (size_t row = block * per_block; row < end; row++) {
            const floatX *x = inp + row * width, *dy = dout + row * width;
            floatX *dx = dinp + row * width;
            float m = mean[row], s = rstd[row];
            float sum = 0.0f, sum_norm = 0.0f;
#pragma omp simd reduction(+ : sum, sum_norm)
            for (int i = 0; i < C; i++) {
                float norm = (floatX_to_float(x[i]) - m) * s, dy_i = floatX_to_float(dy[i]);
                float d = dy_i * floatX_to_float(weight[i]);
                sum += d;
                sum_norm += d * norm;
                weight_sums[i] += dy_i * norm;
                bias_sums[i] += dy_i;
            }
            float mean_d = sum / (float)C, mean_dnorm = sum_norm / (float)C;
            if (dinp_zero) {
#pragma omp simd
                for (int i = 0; i < C; i++) {
                    float norm = (floatX_to_float(x[i]) - m) * s,
                          d = floatX_to_float(dy[i]) * floatX_to_float(weight[i]);
                    dx[i] = floatX_from((d - mean_d - norm * mean_dnorm) * s);
                }
            } else {
#pragma omp simd
                for (int i = 0; i < C; i++) {
                    float norm = (floatX_to_float(x[i]) - m) * s,
                          d = floatX_to_float(dy[i]) * floatX_to_float(weight[i]);
                    dx[i] = floatX_from(floatX_to_float(dx[i]) + (d - mean_d - norm * mean_dnorm) * s);
                }
            }
        }
    }
    column_sums_finish(ops, dweight, partial, blocks, 2 * width, width, accumulate);
    column_sums_finish(ops, dbias, partial + width, blocks, 2 * width, width, accumulate);
}

#endif
