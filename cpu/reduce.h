// reduce.h: sums in an order that depends on shapes alone: over the rows of a matrix, and over a vector.
//
// Work is cut into blocks by the shape, each block is summed by one thread in order, and the blocks' sums are added in
// order. So any number of threads gives the same bits.
#ifndef CPU_REDUCE_H
#define CPU_REDUCE_H

#include "convert.h"

// Sums over rows: at most COLUMN_BLOCKS blocks of rows. Their sums are rows of `partial` (blocks, width) in the
// workspace.
enum { COLUMN_BLOCKS = 64, COLUMN_BLOCK_ROWS = 16 };

static inline size_t column_block_rows(size_t rows) {
    return larger((rows + COLUMN_BLOCKS - 1) / COLUMN_BLOCKS, COLUMN_BLOCK_ROWS);
}

static inline size_t column_blocks(size_t rows) {
    return (rows + column_block_rows(rows) - 1) / column_block_rows(rows);
}

static inline size_t column_sums_workspace(size_t width) {
    return COLUMN_BLOCKS * width * sizeof(float);
}

// grad[j] (+)= sum over blocks of partial[block][j]; consecutive blocks are `stride` floats apart.
static inline void column_sums_finish(Ops *ops, gradX *grad, const float *partial, size_t blocks, size_t stride,
                                      size_t width, int accumulate) {
    enum { STRIP = 256 };
    size_t strips = (width + STRIP - 1) / STRIP;
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t strip = 0; strip < strips; strip++) {
        float sums[STRIP];
        size_t first = strip * STRIP;
        int count = (int)smaller(width - first, STRIP);
        for (int j = 0; j < count; j++) sums[j] = 0.0f;
        for (size_t block = 0; block < blocks; block++)
            for (int j = 0; j < count; j++) sums[j] += partial[block * stride + first + (size_t)j];
        gradX *g = grad + first;
        if (accumulate)
            for (int j = 0; j < count; j++) g[j] = gradX_from(gradX_to_float(g[j]) + sums[j]);
        else
            for (int j = 0; j < count; j++) g[j] = gradX_from(sums[j]);
    }
}

// grad[j] (+)= sum over rows of x[row][j].   x (rows, width)
static inline void column_sums(Ops *ops, gradX *grad, const floatX *x, size_t rows, size_t width, int accumulate) {
    float *partial = (float *)ops->workspace;
    size_t per_block = column_block_rows(rows), blocks = column_blocks(rows);
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t block = 0; block < blocks; block++) {
        float *sums = partial + block * width;
        memset(sums, 0, width * sizeof(float));
        size_t end = smaller((block + 1) * per_block, rows);
        for (size_t row = block * per_block; row < end; row++) {
            const floatX *values = x + row * width;
#pragma omp simd
            for (size_t j = 0; j < width; j++) sums[j] += floatX_to_float(values[j]);
        }
    }
    column_sums_finish(ops, grad, partial, blocks, width, width, accumulate);
}

// Sums over a vector: at most VECTOR_BLOCKS blocks; the blocks' sums stand in the workspace.
enum { VECTOR_BLOCKS = 1024, VECTOR_BLOCK_SIZE = 4096 };

static inline size_t vector_block_size(size_t n) {
    return larger((n + VECTOR_BLOCKS - 1) / VECTOR_BLOCKS, VECTOR_BLOCK_SIZE);
}

static inline size_t vector_sums_workspace(void) {
    return VECTOR_BLOCKS * sizeof(double);
}

static inline void vector_sum_finish(double *sum, const double *partial, size_t blocks, int accumulate) {
    double total = accumulate ? *sum : 0.0;
    for (size_t block = 0; block < blocks; block++) total += partial[block];
    *sum = total;
}

OP void sum_values(Ops *ops, double *sum, const float *x, size_t n, int accumulate) {
    double *partial = (double *)ops->workspace;
    size_t size = vector_block_size(n), blocks = (n + size - 1) / size;
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t block = 0; block < blocks; block++) {
        size_t end = smaller((block + 1) * size, n);
        double total = 0.0;
#pragma omp simd reduction(+ : total)
        for (size_t i = block * size; i < end; i++) total += (double)x[i];
        partial[block] = total;
    }
    vector_sum_finish(sum, partial, blocks, accumulate);
}

OP void sum_of_squares(Ops *ops, double *sum, const gradX *x, size_t n, int accumulate) {
    double *partial = (double *)ops->workspace;
    size_t size = vector_block_size(n), blocks = (n + size - 1) / size;
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t block = 0; block < blocks; block++) {
        size_t end = smaller((block + 1) * size, n);
        double total = 0.0;
#pragma omp simd reduction(+ : total)
        for (size_t i = block * size; i < end; i++) {
            double value = (double)gradX_to_float(x[i]);
            total += value * value;
        }
        partial[block] = total;
    }
    vector_sum_finish(sum, partial, blocks, accumulate);
}

typedef struct {
    gradX *sum;
    const gradX *x;
    size_t n;
} AccumulateArguments;

static inline cudaError_t accumulate_run(void *arguments) {
    const AccumulateArguments *a = (const AccumulateArguments *)arguments;
#pragma omp simd
    for (size_t i = 0; i < a->n; i++) a->sum[i] = gradX_from(gradX_to_float(a->sum[i]) + gradX_to_float(a->x[i]));
    return cudaSuccess;
}

// In one thread: it runs beside the computation, whose threads have the cores.
OP void accumulate_gradient(Ops *ops, gradX *sum, const gradX *x, size_t n, cudaStream_t stream) {
    (void)ops;
    AccumulateArguments arguments = {sum, x, n};
    cuda_check(cpu_stream_run(stream, accumulate_run, &arguments, sizeof arguments));
}

#endif
