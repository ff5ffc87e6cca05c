// reduce.cuh: sums in an order that depends on shapes alone: over the rows of a matrix, and over a vector; and the sum
// of two vectors.
//
// Work is cut into blocks by the shape; the blocks' sums are left in the workspace, and a second kernel adds them in
// order. So every GPU gives the same bits, however many blocks it runs at once.
//
// Global memory, with s = sizeof(floatX), g = sizeof(gradX):
//   column_sums          reads rows width s and writes 4 width blocks, then reads those; writes width g (reads them too
//                        when accumulating); blocks = column_blocks(rows)
//   sum_values           reads 4 n; and 8 bytes written and read for each of vector_blocks(n) blocks
//   sum_of_squares       reads g n; the same
//   accumulate_gradient  reads 2 g, writes g for each element
#ifndef REDUCE_CUH
#define REDUCE_CUH

#include "vector.cuh"

// --------------------------------------------------------------------------------------------------- sums over columns

// grad[j] (+)= sum over blocks of partial[block][j], j < columns. Columns from `width` on belong to a second gradient.
// A thread block takes 32 columns; its warps take every FINISH_WARPS-th row each, and the first warp adds theirs.
enum { FINISH_WARPS = 32 };

static __global__ void __launch_bounds__(FINISH_WARPS *WARP)
    column_sums_finish_kernel(gradX *grad, gradX *second, const float *partial, size_t blocks, size_t columns,
                              size_t width, int accumulate) {
    __shared__ float sums[FINISH_WARPS][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size_t column = (size_t)blockIdx.x * WARP + lane;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (size_t block = warp; block < blocks; block += FINISH_WARPS)
            sum += load_one(partial + block * columns + column);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < columns) {
        float total = 0.0f;
#pragma unroll 8
        for (int i = 0; i < FINISH_WARPS; i++) total += sums[i][lane];
        gradX *to = column < width ? grad + column : second + (column - width);
        if (accumulate) total += to_float(load_one(to));
        store_one(to, from_float<gradX>(total));
    }
}

static inline void column_sums_finish(Ops *ops, gradX *grad, gradX *second, const float *partial, size_t blocks,
                                      size_t columns, size_t width, int accumulate) {
    cudaLaunchConfig_t config = launch_config(divide_up(columns, WARP), FINISH_WARPS * WARP, 0, ops->stream);
    launch(config, column_sums_finish_kernel, grad, second, partial, blocks, columns, width, accumulate);
}

// A thread block sums a block of rows, 32 N columns wide. COLUMN_BLOCKS of rows, times the blocks that lie side by
// side, fill a GPU several times.
enum { COLUMN_BLOCKS = 128, COLUMN_BLOCK_ROWS = 32, COLUMN_WARPS = 8 };

static inline size_t column_block_rows(size_t rows) {
    const size_t share = divide_up(rows, COLUMN_BLOCKS), least = COLUMN_BLOCK_ROWS;
    return share > least ? share : least;
}

static inline size_t column_blocks(size_t rows) {
    return divide_up(rows, column_block_rows(rows));
}

static inline size_t column_sums_workspace(size_t width) {
    return COLUMN_BLOCKS * width * sizeof(float);
}

// partial[block][j] = sum of x[row][j] over the rows of a block (blockIdx.y, as there are at most COLUMN_BLOCKS)
template <int N>
static __global__ void __launch_bounds__(COLUMN_WARPS *WARP)
    column_sums_kernel(float *partial, const floatX *x, size_t rows, size_t width, size_t block_rows) {
    __shared__ float sums[COLUMN_WARPS][WARP * N];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size_t tile = (size_t)blockIdx.x * (WARP * N), column = tile + (size_t)lane * N;
    const size_t first = blockIdx.y * block_rows;
    const size_t end = first + block_rows < rows ? first + block_rows : rows;
    float sum[N] = {0};
    if (column < width) {
#pragma unroll 4
        for (size_t row = first + warp; row < end; row += COLUMN_WARPS) {
            float values[N];
            load_floats<N, Cache::stream>(values, x + row * width + column);
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += values[i];
        }
    }
    // Element i of a lane lies at i * 32 + lane: neighbouring lanes use neighbouring banks.
#pragma unroll
    for (int i = 0; i < N; i++) sums[warp][i * WARP + lane] = sum[i];
    __syncthreads();
    for (int j = threadIdx.x; j < WARP * N; j += COLUMN_WARPS * WARP) {
        if (tile + j >= width) continue;
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < COLUMN_WARPS; i++) total += sums[i][j % N * WARP + j / N];
        store_one(partial + blockIdx.y * width + tile + j, total);
    }
}

// grad[j] (+)= sum over rows of x[row][j].   x (rows, width); uses column_sums_workspace(width)
static inline void column_sums(Ops *ops, gradX *grad, const floatX *x, size_t rows, size_t width, int accumulate) {
    constexpr int N = pack<floatX>();
    float *partial = (float *)ops->workspace;
    const size_t blocks = column_blocks(rows), block_rows = column_block_rows(rows);
    const bool packed = width % N == 0;
    cudaLaunchConfig_t config =
        launch_config(divide_up(width, packed ? WARP * N : WARP), COLUMN_WARPS * WARP, 0, ops->stream);
    config.gridDim.y = (unsigned)blocks;
    if (packed)
        launch(config, column_sums_kernel<N>, partial, x, rows, width, block_rows);
    else
        launch(config, column_sums_kernel<1>, partial, x, rows, width, block_rows);
    column_sums_finish(ops, grad, NULL, partial, blocks, width, width, accumulate);
}

// ------------------------------------------------------------------------------------------------- sums over a vector

enum { SUM_BLOCKS = 1024, SUM_BLOCK_SIZE = 4096, SUM_THREADS = 256 };

static inline size_t vector_sums_workspace(void) {
    return SUM_BLOCKS * sizeof(double);
}

// Elements of a block: SUM_BLOCK_SIZE of them or a multiple, so that blocks begin on 16-byte boundaries.
static inline size_t vector_block_size(size_t n) {
    return divide_up(divide_up(n, SUM_BLOCKS), SUM_BLOCK_SIZE) * SUM_BLOCK_SIZE;
}

static inline size_t vector_blocks(size_t n) {
    return n == 0 ? 0 : divide_up(n, vector_block_size(n));
}

struct SumOfValues {
    static __device__ __forceinline__ double term(double x) { return x; }
};
struct SumOfSquares {
    static __device__ __forceinline__ double term(double x) { return x * x; }
};

// partial[block] = sum of term(x[i]) over a block
template <class Sum, class T>
static __global__ void __launch_bounds__(SUM_THREADS)
    vector_sum_kernel(double *partial, const T *x, size_t n, size_t block_size) {
    __shared__ double parts[SUM_THREADS / WARP];
    constexpr int N = pack<T>();
    const size_t first = blockIdx.x * block_size, end = first + block_size < n ? first + block_size : n;
    double sum = 0.0;
#pragma unroll 4
    for (size_t i = first + threadIdx.x * N; i + N <= end; i += SUM_THREADS * N) {
        float values[N];
        load_floats<N>(values, x + i);
#pragma unroll
        for (int j = 0; j < N; j++) sum += Sum::term((double)values[j]);
    }
    // What is left of the vector is less than a pack.
    const size_t left = end / N * N + threadIdx.x;
    if (left < end) sum += Sum::term((double)to_float(load_one(x + left)));
    sum = block_sum(sum, parts);
    if (threadIdx.x == 0) store_one(partial + blockIdx.x, sum);
}

// *sum (+)= sum of partial[0..blocks)
static __global__ void __launch_bounds__(SUM_THREADS)
    vector_sum_finish_kernel(double *sum, const double *partial, size_t blocks, int accumulate) {
    __shared__ double parts[SUM_THREADS / WARP];
    double total = 0.0;
    for (size_t block = threadIdx.x; block < blocks; block += SUM_THREADS) total += load_one(partial + block);
    total = block_sum(total, parts);
    if (threadIdx.x == 0) store_one(sum, accumulate ? load_one(sum) + total : total);
}

template <class Sum, class T>
static inline void vector_sum(Ops *ops, double *sum, const T *x, size_t n, int accumulate) {
    double *partial = (double *)ops->workspace;
    const size_t blocks = vector_blocks(n);
    if (blocks > 0) {
        cudaLaunchConfig_t config = launch_config(blocks, SUM_THREADS, 0, ops->stream);
        launch(config, vector_sum_kernel<Sum, T>, partial, x, n, vector_block_size(n));
    }
    cudaLaunchConfig_t config = launch_config(1, SUM_THREADS, 0, ops->stream);
    launch(config, vector_sum_finish_kernel, sum, partial, blocks, accumulate);
}

OP void sum_values(Ops *ops, double *sum, const float *x, size_t n, int accumulate) {
    RANGE("sum_values");
    vector_sum<SumOfValues>(ops, sum, x, n, accumulate);
}

OP void sum_of_squares(Ops *ops, double *sum, const gradX *x, size_t n, int accumulate) {
    RANGE("sum_of_squares");
    vector_sum<SumOfSquares>(ops, sum, x, n, accumulate);
}

// ------------------------------------------------------------------------------------------------- sum of two vectors

struct AccumulatePass {
    gradX *sum;
    const gradX *x;
    template <int N> __device__ __forceinline__ void at(size_t i) const {
        float total[N], values[N];
        load_floats<N>(total, sum + i);
        load_floats<N>(values, x + i);
#pragma unroll
        for (int j = 0; j < N; j++) total[j] += values[j];
        store_floats<N>(sum + i, total);
    }
};

// Runs beside the computation, on a stream of its own, so it may not touch the workspace.
OP void accumulate_gradient(Ops *ops, gradX *sum, const gradX *x, size_t n, cudaStream_t stream) {
    RANGE("accumulate_gradient");
    (void)ops;
    const AccumulatePass pass = {sum, x};
    vector_pass(pass, n, aligned16(sum, x), stream);
}

#endif
