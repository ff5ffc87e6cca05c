// attention.h: causal self-attention, forward and backward, without the (B, NH, T, T) matrix.
//
// A thread works on one (sequence, head) at a time: it copies the head's queries, keys and values from qkv into fp32
// matrices of its workspace, padded with zeros to whole tiles, and walks over blocks of ATTENTION_ROWS queries. Forward
// keeps a block's scores against all keys up to its own; backward recomputes probabilities from lse, in tiles of
// ATTENTION_KEYS keys. Tiles above the diagonal are never computed. Every sum belongs to one thread and has one order.
#ifndef CPU_ATTENTION_H
#define CPU_ATTENTION_H

#include "convert.h"
#include "dropout.h"
#include "exp.h"
#include "tile.h"

enum { ATTENTION_ROWS = 32, ATTENTION_KEYS = 128 };

// Floats of a thread's workspace. forward: k^T, v, and q, out, scores of a block; backward: k, k^T, v^T, dk, dv, and q,
// dout, dq, probabilities, gradients of scores of a block.
static inline size_t attention_forward_floats(int T, int HS) {
    size_t t = round_up((size_t)T, ATTENTION_ROWS), hs = round_up((size_t)HS, TILE_LANES);
    return 2 * t * hs + ATTENTION_ROWS * (2 * hs + t);
}

static inline size_t attention_backward_floats(int T, int HS) {
    size_t t = round_up((size_t)T, ATTENTION_ROWS), hs = round_up((size_t)HS, TILE_LANES);
    return 5 * t * hs + ATTENTION_ROWS * (3 * hs + 2 * ATTENTION_KEYS);
}

static inline size_t attention_workspace(const OpsShape *shape, int threads) {
    size_t forward = attention_forward_floats(shape->T, shape->C / shape->NH);
    size_t backward = attention_backward_floats(shape->T, shape->C / shape->NH);
    return (size_t)threads * larger(forward, backward) * sizeof(float);
}

// matrix (padded_rows, padded_width) = rows of src, `stride` apart, times scale; zeros around it.
static inline void attention_copy(float *matrix, const floatX *src, size_t stride, int rows, int width, int padded_rows,
                                  size_t padded_width, float scale) {
    for (int t = 0; t < padded_rows; t++) {
        float *to = matrix + (size_t)t * padded_width;
        const floatX *from = src + (size_t)t * stride;
        int n = t < rows ? width : 0;
        for (int d = 0; d < n; d++) to[d] = x_to_float(from[d]) * scale;
        for (size_t d = (size_t)n; d < padded_width; d++) to[d] = 0.0f;
    }
}

// The same, transposed: matrix (padded_width, padded_rows).
static inline void attention_copy_transposed(float *matrix, const floatX *src, size_t stride, int rows, int width,
                                             int padded_rows, size_t padded_width) {
    for (size_t d = 0; d < padded_width; d++) {
        float *to = matrix + d * (size_t)padded_rows;
        int n = d < (size_t)width ? rows : 0;
        for (int t = 0; t < n; t++) to[t] = x_to_float(src[(size_t)t * stride + d]);
        for (int t = n; t < padded_rows; t++) to[t] = 0.0f;
    }
}

// values[s] *= dropout factor of mask element `index` + s
static inline void attention_dropout(float *values, int count, Dropout dropout, uint64_t index) {
    for (int start = 0; start < count; start += DROPOUT_CHUNK) {
        float factors[DROPOUT_CHUNK];
        int n = (int)smaller((size_t)(count - start), DROPOUT_CHUNK);
        dropout_factors(factors, n, dropout, index + (uint64_t)start);
        for (int i = 0; i < n; i++) values[start + i] *= factors[i];
    }
}

OP void attention_forward(Ops *ops, floatX *out, float *lse, const floatX *qkv, int B, int T, int NH, int HS,
                          Dropout dropout) {
    int Tp = (int)round_up((size_t)T, ATTENTION_ROWS);
    size_t HSp = round_up((size_t)HS, TILE_LANES), C = (size_t)NH * (size_t)HS, matrix = (size_t)Tp * HSp;
    float scale = 1.0f / sqrtf((float)HS);
#pragma omp parallel for schedule(dynamic, 1) num_threads(ops->threads)
    for (int item = 0; item < B * NH; item++) {
        float *keys = (float *)ops->workspace + (size_t)omp_get_thread_num() * attention_forward_floats(T, HS);
        float *values = keys + matrix, *queries = values + matrix, *result = queries + ATTENTION_ROWS * HSp;
        float *scores = result + ATTENTION_ROWS * HSp;
        int b = item / NH, h = item % NH;
        const floatX *q = qkv + (size_t)b * (size_t)T * 3 * C + (size_t)h * (size_t)HS;
        attention_copy_transposed(keys, q + C, 3 * C, T, HS, Tp, HSp);
        attention_copy(values, q + 2 * C, 3 * C, T, HS, Tp, HSp, 1.0f);
        for (int start = 0; start < T; start += ATTENTION_ROWS) {
            int rows = (int)smaller((size_t)(T - start), ATTENTION_ROWS), seen = start + ATTENTION_ROWS;
            attention_copy(queries, q + (size_t)start * 3 * C, 3 * C, rows, HS, ATTENTION_ROWS, HSp, scale);
            tile_product(scores, (size_t)Tp, queries, HSp, 1, keys, (size_t)Tp, ATTENTION_ROWS, seen, HS, 0);
            float inverse[ATTENTION_ROWS] = {0};
            for (int i = 0; i < ATTENTION_ROWS; i++) {
                float *p = scores + (size_t)i * (size_t)Tp;
                int t = start + i, count = i < rows ? t + 1 : 0; // keys 0..t; none in padding
                float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
                for (int s = 0; s < count; s++) largest = p[s] > largest ? p[s] : largest;
#pragma omp simd reduction(+ : sum)
                for (int s = 0; s < count; s++) {
                    p[s] = fast_exp(p[s] - largest);
                    sum += p[s];
                }
                for (int s = count; s < seen; s++) p[s] = 0.0f;
                if (count == 0) continue;
                inverse[i] = 1.0f / sum;
                lse[(size_t)item * (size_t)T + (size_t)t] = largest + logf(sum);
                if (dropout.rate != 0.0f)
                    attention_dropout(p, count, dropout,
                                      dropout.first + ((uint64_t)item * (uint64_t)T + (uint64_t)t) * (uint64_t)T);
            }
            tile_product(result, HSp, scores, (size_t)Tp, 1, values, HSp, ATTENTION_ROWS, (int)HSp, seen, 0);
            for (int i = 0; i < rows; i++) {
                floatX *o = out + ((size_t)b * (size_t)T + (size_t)(start + i)) * C + (size_t)h * (size_t)HS;
                for (int d = 0; d < HS; d++) o[d] = float_to_x(result[(size_t)i * HSp + (size_t)d] * inverse[i]);
            }
        }
    }
}

// With p the probabilities, m the dropout factors and D = sum over d of dout * out:
//   dv = (p m)^T dout;   ds = p (m (dout v^T) - D);   dq = ds k / sqrt(HS);   dk = ds^T q / sqrt(HS)
OP void attention_backward(Ops *ops, floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                           const float *lse, int B, int T, int NH, int HS, Dropout dropout) {
    int Tp = (int)round_up((size_t)T, ATTENTION_ROWS);
    size_t HSp = round_up((size_t)HS, TILE_LANES), C = (size_t)NH * (size_t)HS, matrix = (size_t)Tp * HSp;
    float scale = 1.0f / sqrtf((float)HS);
#pragma omp parallel for schedule(dynamic, 1) num_threads(ops->threads)
    for (int item = 0; item < B * NH; item++) {
        float *keys = (float *)ops->workspace + (size_t)omp_get_thread_num() * attention_backward_floats(T, HS);
        float *keys_transposed = keys + matrix, *values_transposed = keys_transposed + matrix;
        float *dkeys = values_transposed + matrix, *dvalues = dkeys + matrix;
        float *queries = dvalues + matrix, *dresult = queries + ATTENTION_ROWS * HSp;
        float *dqueries = dresult + ATTENTION_ROWS * HSp, *p = dqueries + ATTENTION_ROWS * HSp;
        float *dp = p + ATTENTION_ROWS * ATTENTION_KEYS;
        int b = item / NH, h = item % NH;
        size_t first = (size_t)b * (size_t)T * 3 * C + (size_t)h * (size_t)HS;
        size_t first_out = (size_t)b * (size_t)T * C + (size_t)h * (size_t)HS;
        const floatX *q = qkv + first;
        attention_copy(keys, q + C, 3 * C, T, HS, Tp, HSp, 1.0f);
        attention_copy_transposed(keys_transposed, q + C, 3 * C, T, HS, Tp, HSp);
        attention_copy_transposed(values_transposed, q + 2 * C, 3 * C, T, HS, Tp, HSp);
        memset(dkeys, 0, 2 * matrix * sizeof(float));
        for (int start = 0; start < T; start += ATTENTION_ROWS) {
            int rows = (int)smaller((size_t)(T - start), ATTENTION_ROWS), seen = start + ATTENTION_ROWS;
            const floatX *dout_block = dout + first_out + (size_t)start * C;
            const floatX *out_block = out + first_out + (size_t)start * C;
            attention_copy(queries, q + (size_t)start * 3 * C, 3 * C, rows, HS, ATTENTION_ROWS, HSp, scale);
            attention_copy(dresult, dout_block, C, rows, HS, ATTENTION_ROWS, HSp, 1.0f);
            float dots[ATTENTION_ROWS]; // D
            for (int i = 0; i < rows; i++) {
                float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                for (int d = 0; d < HS; d++)
                    dot += dresult[(size_t)i * HSp + (size_t)d] * x_to_float(out_block[(size_t)i * C + (size_t)d]);
                dots[i] = dot;
            }
            for (int key = 0; key < seen; key += ATTENTION_KEYS) {
                int width = (int)smaller((size_t)(seen - key), ATTENTION_KEYS);
                tile_product(p, ATTENTION_KEYS, queries, HSp, 1, keys_transposed + key, (size_t)Tp, ATTENTION_ROWS,
                             width, HS, 0);
                tile_product(dp, ATTENTION_KEYS, dresult, HSp, 1, values_transposed + key, (size_t)Tp, ATTENTION_ROWS,
                             width, HS, 0);
                for (int i = 0; i < ATTENTION_ROWS; i++) {
                    float *p_row = p + i * ATTENTION_KEYS, *dp_row = dp + i * ATTENTION_KEYS;
                    int t = start + i, count = i < rows ? t + 1 - key : 0; // keys key..t; none in padding
                    count = count < width ? count : width;
                    if (count > 0) {
                        float row_lse = lse[(size_t)item * (size_t)T + (size_t)t], dot = dots[i];
                        float factors[ATTENTION_KEYS];
                        dropout_factors(factors, count, dropout,
                                        dropout.first + ((uint64_t)item * (uint64_t)T + (uint64_t)t) * (uint64_t)T +
                                            (uint64_t)key);
#pragma omp simd
                        for (int s = 0; s < count; s++) {
                            float probability = fast_exp(p_row[s] - row_lse);
                            p_row[s] = probability * factors[s];
                            dp_row[s] = probability * (dp_row[s] * factors[s] - dot);
                        }
                    }
                    for (int s = count > 0 ? count : 0; s < width; s++) p_row[s] = dp_row[s] = 0.0f;
                }
                tile_product(dqueries, HSp, dp, ATTENTION_KEYS, 1, keys + (size_t)key * HSp, HSp, ATTENTION_ROWS,
                             (int)HSp, width, key != 0);
                tile_product(dkeys + (size_t)key * HSp, HSp, dp, 1, ATTENTION_KEYS, queries, HSp, width, (int)HSp,
                             ATTENTION_ROWS, 1);
                tile_product(dvalues + (size_t)key * HSp, HSp, p, 1, ATTENTION_KEYS, dresult, HSp, width, (int)HSp,
                             ATTENTION_ROWS, 1);
            }
            for (int i = 0; i < rows; i++)
                for (int d = 0; d < HS; d++)
                    dqkv[first + (size_t)(start + i) * 3 * C + (size_t)d] =
                        float_to_x(dqueries[(size_t)i * HSp + (size_t)d] * scale);
        }
        for (int t = 0; t < T; t++) {
            floatX *dk = dqkv + first + (size_t)t * 3 * C + C, *dv = dk + C;
            for (int d = 0; d < HS; d++) dk[d] = float_to_x(dkeys[(size_t)t * HSp + (size_t)d]);
            for (int d = 0; d < HS; d++) dv[d] = float_to_x(dvalues[(size_t)t * HSp + (size_t)d]);
        }
    }
}

#endif
