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
    size_t t = round_up((size_t)T, ATTENTION_ROWS), hs = round_up((size_t)HS, TILE_PAD);
    return 2 * t * hs + ATTENTION_ROWS * (2 * hs + t);
}

static inline size_t attention_backward_floats(int T, int HS) {
    size_t t = round_up((size_t)T, ATTENTION_ROWS), hs = round_up((size_t)HS, TILE_PAD);
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
    for (int t = 0; t < rows; t++) {
        float *to = matrix + (size_t)t * padded_width;
        const floatX *from = src + (size_t)t * stride;
#pragma omp simd
        for (int d = 0; d < width; d++) to[d] = floatX_to_float(from[d]) * scale;
        for (size_t d = (size_t)width; d < padded_width; d++) to[d] = 0.0f;
    }
    memset(matrix + (size_t)rows * padded_width, 0, (size_t)(padded_rows - rows) * padded_width * sizeof(float));
}

// rows of dst, `stride` apart, = rows of matrix, times scale.
static inline void attention_store(floatX *dst, size_t stride, const float *matrix, size_t padded_width, int rows,
                                   int width, float scale) {
    for (int t = 0; t < rows; t++) {
        floatX *to = dst + (size_t)t * stride;
        const float *from = matrix + (size_t)t * padded_width;
#pragma omp simd
        for (int d = 0; d < width; d++) to[d] = floatX_from(from[d] * scale);
    }
}

// The transpose of a padded matrix: to (width, rows), from (rows, width).   rows and width are multiples of 16
static inline void attention_transpose(float *to, const float *from, int rows, size_t width) {
    for (int t = 0; t < rows; t += TILE_LANES)
        for (size_t d = 0; d < width; d += TILE_LANES)
            tile_transpose(to + d * (size_t)rows + t, (size_t)rows, from + (size_t)t * width + d, width);
}

// The mask's element (b, h, t, 0).
static inline uint64_t attention_mask_index(Dropout dropout, int b, int h, int t, int T) {
    return dropout.first + (uint64_t)b * dropout.sequence_stride +
           ((uint64_t)h * (uint64_t)T + (uint64_t)t) * (uint64_t)T;
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
    size_t HSp = round_up((size_t)HS, TILE_PAD), C = (size_t)NH * (size_t)HS, matrix = (size_t)Tp * HSp;
    float scale = 1.0f / sqrtf((float)HS);
#pragma omp parallel for schedule(dynamic, 1) num_threads(ops->threads)
    for (int item = 0; item < B * NH; item++) {
        float *keys = (float *)ops->workspace + (size_t)omp_get_thread_num() * attention_forward_floats(T, HS);
        float *values = keys + matrix, *queries = values + matrix, *result = queries + ATTENTION_ROWS * HSp;
        float *scores = result + ATTENTION_ROWS * HSp;
        int b = item / NH, h = item % NH;
        const floatX *q = qkv + (size_t)b * (size_t)T * 3 * C + (size_t)h * (size_t)HS;
        attention_copy(values, q + C, 3 * C, T, HS, Tp, HSp, 1.0f);
        attention_transpose(keys, values, Tp, HSp);
        attention_copy(values, q + 2 * C, 3 * C, T, HS, Tp, HSp, 1.0f);
        for (int start = 0; start < T; start += ATTENTION_ROWS) {
            int rows = (int)smaller((size_t)(T - start), ATTENTION_ROWS), seen = start + ATTENTION_ROWS;
            attention_copy(queries, q + (size_t)start * 3 * C, 3 * C, rows, HS, ATTENTION_ROWS, HSp, scale);
            tile_product(scores, (size_t)Tp, queries, HSp, 1, keys, (size_t)Tp, ATTENTION_ROWS, seen, HS, 0);
            float inverse[ATTENTION_ROWS];
            for (int i = 0; i < rows; i++) {
                int t = start + i;
                float *p = scores + (size_t)i * (size_t)Tp;
                // Keys after the query get probability 0. Whole blocks keep the loops free of remainders.
                for (int s = t + 1; s < seen; s++) p[s] = -INFINITY;
                float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
                for (int s = 0; s < seen; s++) largest = p[s] > largest ? p[s] : largest;
#pragma omp simd reduction(+ : sum)
                for (int s = 0; s < seen; s++) {
                    p[s] = fast_exp(p[s] - largest);
                    sum += p[s];
                }
                inverse[i] = 1.0f / sum;
                lse[(size_t)item * (size_t)T + (size_t)t] = largest + logf(sum);
                if (dropout.rate != 0.0f)
                    attention_dropout(p, t + 1, dropout, attention_mask_index(dropout, b, h, t, T));
            }
            tile_product(result, HSp, scores, (size_t)Tp, 1, values, HSp, ATTENTION_ROWS, (int)HSp, seen, 0);
            for (int i = 0; i < rows; i++) {
                floatX *o = out + ((size_t)b * (size_t)T + (size_t)(start + i)) * C + (size_t)h * (size_t)HS;
                const float *r = result + (size_t)i * HSp;
#pragma omp simd
                for (int d = 0; d < HS; d++) o[d] = floatX_from(r[d] * inverse[i]);
            }
        }
    }
}

// With p the probabilities, m the dropout factors and D = sum over d of dout * out:
//   dv = (p m)^T dout;   ds = p (m (dout v^T) - D);   dq = ds k / sqrt(HS);   dk = ds^T q / sqrt(HS)
OP void attention_backward(Ops *ops, floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out,
                           const float *lse, int B, int T, int NH, int HS, Dropout dropout) {
    int Tp = (int)round_up((size_t)T, ATTENTION_ROWS);
    size_t HSp = round_up((size_t)HS, TILE_PAD), C = (size_t)NH * (size_t)HS, matrix = (size_t)Tp * HSp;
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
        attention_copy(keys, q + 2 * C, 3 * C, T, HS, Tp, HSp, 1.0f);
        attention_transpose(values_transposed, keys, Tp, HSp);
        attention_copy(keys, q + C, 3 * C, T, HS, Tp, HSp, 1.0f);
        attention_transpose(keys_transposed, keys, Tp, HSp);
        memset(dkeys, 0, 2 * matrix * sizeof(float));
        for (int start = 0; start < T; start += ATTENTION_ROWS) {
            int rows = (int)smaller((size_t)(T - start), ATTENTION_ROWS), seen = start + ATTENTION_ROWS;
            const floatX *dout_block = dout + first_out + (size_t)start * C;
            const floatX *out_block = out + first_out + (size_t)start * C;
            attention_copy(queries, q + (size_t)start * 3 * C, 3 * C, rows, HS, ATTENTION_ROWS, HSp, scale);
            attention_copy(dresult, dout_block, C, rows, HS, ATTENTION_ROWS, HSp, 1.0f);
            // D and lse; rows of padding have zero queries and dout, so that whatever their p, ds and p^T dout are
            // zero.
            float dots[ATTENTION_ROWS] = {0}, row_lse[ATTENTION_ROWS] = {0};
            for (int i = 0; i < rows; i++) {
                const float *d_o = dresult + (size_t)i * HSp;
                const floatX *o = out_block + (size_t)i * C;
                float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                for (int d = 0; d < HS; d++) dot += d_o[d] * floatX_to_float(o[d]);
                dots[i] = dot;
                row_lse[i] = lse[(size_t)item * (size_t)T + (size_t)(start + i)];
            }
            for (int key = 0; key < seen; key += ATTENTION_KEYS) {
                int width = (int)smaller((size_t)(seen - key), ATTENTION_KEYS);
                tile_product(p, ATTENTION_KEYS, queries, HSp, 1, keys_transposed + key, (size_t)Tp, ATTENTION_ROWS,
                             width, HS, 0);
                tile_product(dp, ATTENTION_KEYS, dresult, HSp, 1, values_transposed + key, (size_t)Tp, ATTENTION_ROWS,
                             width, HS, 0);
                for (int i = 0; i < ATTENTION_ROWS; i++) {
                    float *p_row = p + i * ATTENTION_KEYS, *dp_row = dp + i * ATTENTION_KEYS;
                    float l = row_lse[i], dot = dots[i], factors[ATTENTION_KEYS];
                    for (int s = start + i + 1 > key ? start + i + 1 - key : 0; s < width; s++) p_row[s] = -INFINITY;
                    dropout_factors(factors, width, dropout,
                                    attention_mask_index(dropout, b, h, start + i, T) + (uint64_t)key);
#pragma omp simd
                    for (int s = 0; s < width; s++) {
                        float probability = fast_exp(p_row[s] - l);
                        p_row[s] = probability * factors[s];
                        dp_row[s] = probability * (dp_row[s] * factors[s] - dot);
                    }
                }
                tile_product(dqueries, HSp, dp, ATTENTION_KEYS, 1, keys + (size_t)key * HSp, HSp, ATTENTION_ROWS,
                             (int)HSp, width, key != 0);
                tile_product(dkeys + (size_t)key * HSp, HSp, dp, 1, ATTENTION_KEYS, queries, HSp, width, (int)HSp,
                             ATTENTION_ROWS, 1);
                tile_product(dvalues + (size_t)key * HSp, HSp, p, 1, ATTENTION_KEYS, dresult, HSp, width, (int)HSp,
                             ATTENTION_ROWS, 1);
            }
            attention_store(dqkv + first + (size_t)start * 3 * C, 3 * C, dqueries, HSp, rows, HS, scale);
        }
        attention_store(dqkv + first + C, 3 * C, dkeys, HSp, T, HS, 1.0f);
        attention_store(dqkv + first + 2 * C, 3 * C, dvalues, HSp, T, HS, 1.0f);
    }
}

#endif
