// attention.h: causal self-attention, forward and backward, without the (B, NH, T, T) matrix.
//
// A thread works on one (sequence, head) at a time: it copies the head's queries, keys and values from qkv into fp32
// matrices of its workspace, padded with zeros to whole tiles, and walks over blocks of ATTENTION_ROWS queries. Forward
// keeps a block's scores against all keys up to its own; backward recomputes probabilities from lse, in tiles of
// ATTENTION_KEYS keys. Tiles above the diagonal are never computed. Every sum belongs to one thread and has one order.
//
// In bf16, products of two tensors that are stored as bf16 (q k^T and dout v^T) are made of them as they are, in words
// of two, where the processor can (tile.h); probabilities and gradients of scores are never rounded to bf16.
#ifndef CPU_ATTENTION_H
#define CPU_ATTENTION_H

#include "convert.h"
#include "dropout.h"
#include "exp.h"
#include "tile.h"

enum { ATTENTION_ROWS = 16, ATTENTION_KEYS = 128 };

// Elements of a word.
enum { ATTENTION_PAIRS = sizeof(floatX) == 2 && TILE_HAS_PAIRS, ATTENTION_PER_WORD = ATTENTION_PAIRS ? 2 : 1 };

static inline size_t attention_words(int HS) {
    return round_up(((size_t)HS + ATTENTION_PER_WORD - 1) / ATTENTION_PER_WORD, TILE_PAD);
}

// Floats of a thread's workspace. forward: k as words, transposed, v, and of a block q, as words, out, scores. A matrix
// that is to be transposed first stands where a larger one will be.
static inline size_t attention_forward_floats(int T, int HS) {
    size_t t = round_up((size_t)T, ATTENTION_ROWS), hs = round_up((size_t)HS, TILE_PAD), words = attention_words(HS);
    return t * words + t * hs + ATTENTION_ROWS * (words + hs + t);
}

// backward: k^T and v^T as words, k, dk, dv, and of a block q and dout, both also as words, dq, probabilities,
// gradients of scores.
static inline size_t attention_backward_floats(int T, int HS) {
    size_t t = round_up((size_t)T, ATTENTION_ROWS), hs = round_up((size_t)HS, TILE_PAD), words = attention_words(HS);
    return 2 * t * words + 3 * t * hs + ATTENTION_ROWS * (2 * words + 3 * hs + 2 * ATTENTION_KEYS);
}

static inline size_t attention_workspace(const OpsShape *shape, int threads) {
    size_t forward = attention_forward_floats(shape->T, shape->C / shape->NH);
    size_t backward = attention_backward_floats(shape->T, shape->C / shape->NH);
    return (size_t)threads * larger(forward, backward) * sizeof(float);
}

// matrix (padded_rows, padded_width) = rows of src, `stride` apart, in fp32; zeros around it.
static inline void attention_copy(float *matrix, const floatX *src, size_t stride, int rows, int width, int padded_rows,
                                  size_t padded_width) {
    for (int t = 0; t < rows; t++) {
        float *to = matrix + (size_t)t * padded_width;
        const floatX *from = src + (size_t)t * stride;
#pragma omp simd
        for (int d = 0; d < width; d++) to[d] = floatX_to_float(from[d]);
        for (size_t d = (size_t)width; d < padded_width; d++) to[d] = 0.0f;
    }
    memset(matrix + (size_t)rows * padded_width, 0, (size_t)(padded_rows - rows) * padded_width * sizeof(float));
}

// The same as words: matrix (padded_rows, words).
static inline void attention_copy_words(float *matrix, const floatX *src, size_t stride, int rows, int width,
                                        int padded_rows, size_t words) {
    if (!ATTENTION_PAIRS) {
        attention_copy(matrix, src, stride, rows, width, padded_rows, words);
        return;
    }
    size_t used = (size_t)width * sizeof(floatX), all = words * sizeof(float);
    for (int t = 0; t < rows; t++) {
        char *to = (char *)(matrix + (size_t)t * words);
        memcpy(to, src + (size_t)t * stride, used);
        memset(to + used, 0, all - used);
    }
    memset(matrix + (size_t)rows * words, 0, (size_t)(padded_rows - rows) * all);
}

// c (M, N) = a b, both of words, over `words`.
static inline void attention_product(float *c, size_t ldc, const float *a, const float *b, size_t ldb, int M, int N,
                                     size_t words) {
    if (ATTENTION_PAIRS)
        tile_product_pairs(c, ldc, a, words, b, ldb, M, N, (int)words);
    else
        tile_product(c, ldc, a, words, 1, b, ldb, M, N, (int)words, 0);
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
    size_t HSp = round_up((size_t)HS, TILE_PAD), words = attention_words(HS), C = (size_t)NH * (size_t)HS;
    float scale = 1.0f / sqrtf((float)HS);
#pragma omp parallel for schedule(dynamic, 1) num_threads(ops->threads)
    for (int item = 0; item < B * NH; item++) {
        float *keys = (float *)ops->workspace + (size_t)omp_get_thread_num() * attention_forward_floats(T, HS);
        float *values = keys + (size_t)Tp * words, *queries = values + (size_t)Tp * HSp;
        float *result = queries + ATTENTION_ROWS * words;
        float *scores = result + ATTENTION_ROWS * HSp;
        int b = item / NH, h = item % NH;
        const floatX *q = qkv + (size_t)b * (size_t)T * 3 * C + (size_t)h * (size_t)HS;
        attention_copy_words(values, q + C, 3 * C, T, HS, Tp, words);
        attention_transpose(keys, values, Tp, words);
        attention_copy(values, q + 2 * C, 3 * C, T, HS, Tp, HSp);
        for (int start = 0; start < T; start += ATTENTION_ROWS) {
            int rows = (int)smaller((size_t)(T - start), ATTENTION_ROWS), seen = start + ATTENTION_ROWS;
            attention_copy_words(queries, q + (size_t)start * 3 * C, 3 * C, rows, HS, ATTENTION_ROWS, words);
            attention_product(scores, (size_t)Tp, queries, keys, (size_t)Tp, ATTENTION_ROWS, seen, words);
            float inverse[ATTENTION_ROWS];
            for (int i = 0; i < rows; i++) {
                int t = start + i;
                float *p = scores + (size_t)i * (size_t)Tp;
                // Keys after the query get probability 0. Whole blocks keep the loops free of remainders.
                for (int s = t + 1; s < seen; s++) p[s] = -INFINITY;
                float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
                for (int s = 0; s < seen; s++) largest = p[s] > largest ? p[s] : largest;
                largest *= scale;
#pragma omp simd reduction(+ : sum)
                for (int s = 0; s < seen; s++) {
                    p[s] = fast_exp(p[s] * scale - largest);
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
    size_t HSp = round_up((size_t)HS, TILE_PAD), words = attention_words(HS), C = (size_t)NH * (size_t)HS;
    size_t matrix = (size_t)Tp * HSp;
    float scale = 1.0f / sqrtf((float)HS);
#pragma omp parallel for schedule(dynamic, 1) num_threads(ops->threads)
    for (int item = 0; item < B * NH; item++) {
        float *keys = (float *)ops->workspace + (size_t)omp_get_thread_num() * attention_backward_floats(T, HS);
        float *dkeys = keys + matrix, *dvalues = dkeys + matrix, *keys_transposed = dvalues + matrix;
        float *values_transposed = keys_transposed + (size_t)Tp * words;
        float *query_words = values_transposed + (size_t)Tp * words;
        float *dresult_words = query_words + ATTENTION_ROWS * words, *queries = dresult_words + ATTENTION_ROWS * words;
        float *dresult = queries + ATTENTION_ROWS * HSp, *dqueries = dresult + ATTENTION_ROWS * HSp;
        float *p = dqueries + ATTENTION_ROWS * HSp, *dp = p + ATTENTION_ROWS * ATTENTION_KEYS;
        int b = item / NH, h = item % NH;
        size_t first = (size_t)b * (size_t)T * 3 * C + (size_t)h * (size_t)HS;
        size_t first_out = (size_t)b * (size_t)T * C + (size_t)h * (size_t)HS;
        const floatX *q = qkv + first;
        attention_copy_words(keys, q + 2 * C, 3 * C, T, HS, Tp, words);
        attention_transpose(values_transposed, keys, Tp, words);
        attention_copy_words(keys, q + C, 3 * C, T, HS, Tp, words);
        attention_transpose(keys_transposed, keys, Tp, words);
        attention_copy(keys, q + C, 3 * C, T, HS, Tp, HSp);
        memset(dkeys, 0, 2 * matrix * sizeof(float));
        for (int start = 0; start < T; start += ATTENTION_ROWS) {
            int rows = (int)smaller((size_t)(T - start), ATTENTION_ROWS), seen = start + ATTENTION_ROWS;
            const floatX *dout_block = dout + first_out + (size_t)start * C;
            const floatX *out_block = out + first_out + (size_t)start * C;
            const floatX *q_block = q + (size_t)start * 3 * C;
            attention_copy_words(query_words, q_block, 3 * C, rows, HS, ATTENTION_ROWS, words);
            attention_copy_words(dresult_words, dout_block, C, rows, HS, ATTENTION_ROWS, words);
            attention_copy(queries, q_block, 3 * C, rows, HS, ATTENTION_ROWS, HSp);
            attention_copy(dresult, dout_block, C, rows, HS, ATTENTION_ROWS, HSp);
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
                attention_product(p, ATTENTION_KEYS, query_words, keys_transposed + key, (size_t)Tp, ATTENTION_ROWS,
                                  width, words);
                attention_product(dp, ATTENTION_KEYS, dresult_words, values_transposed + key, (size_t)Tp,
                                  ATTENTION_ROWS, width, words);
                for (int i = 0; i < ATTENTION_ROWS; i++) {
                    float *p_row = p + i * ATTENTION_KEYS, *dp_row = dp + i * ATTENTION_KEYS;
                    float l = row_lse[i], dot = dots[i], factors[ATTENTION_KEYS];
                    for (int s = start + i + 1 > key ? start + i + 1 - key : 0; s < width; s++) p_row[s] = -INFINITY;
                    dropout_factors(factors, width, dropout,
                                    attention_mask_index(dropout, b, h, start + i, T) + (uint64_t)key);
#pragma omp simd
                    for (int s = 0; s < width; s++) {
                        float probability = fast_exp(p_row[s] * scale - l);
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
        attention_store(dqkv + first + C, 3 * C, dkeys, HSp, T, HS, scale);
        attention_store(dqkv + first + 2 * C, 3 * C, dvalues, HSp, T, HS, 1.0f);
    }
}

#endif
