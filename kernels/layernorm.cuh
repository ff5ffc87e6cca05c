// layernorm.cuh: layer normalisation (Ba, Kiros, Hinton, 2016), forward, fused with the residual addition, and
// backward.
//
// A thread block, the team, works on one row after the other. A thread keeps what it has of a row in registers, so that
// a row is read once: 4 accesses forward, 2 backward, of up to 256 threads (more where C is no multiple of an access).
// That is enough for C up to 8192 forward and 4096 backward in bf16, half of it in fp32 or where C is no such multiple.
// What is beyond is read again.
//
// Global memory, with s = sizeof(floatX), g = sizeof(gradX), for each row of C channels (weight and bias, which all
// rows share, come from caches; the team has `warps` warps):
//   layernorm_forward           reads C s, and 2 C s of weight and bias; writes C s + 8
//   residual_layernorm_forward  reads 2 C s, and 2 C s of weight and bias; writes 2 C s + 8
//   layernorm_backward          reads 3 C s + 8 warps (2 C s + 8 warps with dinp_zero), writes C s; and for each of
//                               layernorm_blocks() blocks of rows reads C s of weight, writes and reads 8 C; 2 C g are
//                               written at last (read too when accumulating)
#ifndef LAYERNORM_CUH
#define LAYERNORM_CUH

#include "dropout.cuh"
#include "reduce.cuh"

enum { LAYERNORM_MOST_WARPS = 8, LAYERNORM_MOST_THREADS = LAYERNORM_MOST_WARPS * WARP };

template <int N> static constexpr __host__ __device__ int forward_packs() {
    return N == 1 ? 16 : 4;
}
template <int N> static constexpr __host__ __device__ int backward_packs() {
    return N == 1 ? 8 : 2;
}

// Warps of a team whose threads keep `packs` accesses of N elements.
static inline int layernorm_warps(int C, int N, int packs) {
    const size_t warps = divide_up((size_t)C, (size_t)WARP * (size_t)N * (size_t)packs);
    return warps < LAYERNORM_MOST_WARPS ? (int)warps : LAYERNORM_MOST_WARPS;
}

// values[k] = its sum over the team, in every thread. parts: shared memory, which stays in use until the team's next
// barrier.
template <int K> static __device__ __forceinline__ void team_sums(float (&values)[K], float (*parts)[K]) {
    const int warps = blockDim.x / WARP;
#pragma unroll
    for (int k = 0; k < K; k++) values[k] = warp_sum(values[k]);
    if (warps == 1) return;
    if (threadIdx.x % WARP == 0)
        for (int k = 0; k < K; k++) parts[threadIdx.x / WARP][k] = values[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; k++) {
        values[k] = 0.0f;
        for (int i = 0; i < warps; i++) values[k] += parts[i][k];
    }
}

// ------------------------------------------------------------------------------------------------------------- forward

// Rows of a thread block: more than one, as blocks start at a limited rate.
enum { LAYERNORM_FORWARD_ROWS = 4 };

// Elements `at` and up of what is normalised: of inp, or of inp + dropout(branch), rounded and stored in residual.
template <int N, bool RESIDUAL>
static __device__ __forceinline__ Pack<floatX, N>
layernorm_input(floatX *residual, const floatX *inp, const floatX *branch, size_t at, const DropoutMask &mask) {
    Pack<floatX, N> x = load<N>(inp + at);
    if (RESIDUAL) {
        const Pack<floatX, N> y = load<N>(branch + at);
        float factors[N];
        dropout_factors<N>(factors, mask, at);
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = from_float<floatX>(to_float(x[j]) + factors[j] * to_float(y[j]));
        store<N>(residual + at, x);
    }
    return x;
}

template <int N> static __device__ __forceinline__ float sum_of(const Pack<floatX, N> &x) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) sum += to_float(x[j]);
    return sum;
}

template <int N> static __device__ __forceinline__ float squares_of(const Pack<floatX, N> &x, float mean) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float centred = to_float(x[j]) - mean;
        sum += centred * centred;
    }
    return sum;
}

template <int N>
static __device__ __forceinline__ void layernorm_output(floatX *out, const Pack<floatX, N> &x, const floatX *weight,
                                                        const floatX *bias, float mean, float rstd) {
    const Pack<floatX, N> w = load<N>(weight), b = load<N>(bias);
    Pack<floatX, N> y;
#pragma unroll
    for (int j = 0; j < N; j++)
        y[j] = from_float<floatX>((to_float(x[j]) - mean) * rstd * to_float(w[j]) + to_float(b[j]));
    store<N>(out, y);
}

template <int N, bool RESIDUAL>
static __global__ void __launch_bounds__(LAYERNORM_MOST_THREADS)
    layernorm_forward_kernel(floatX *residual, floatX *out, float *mean, float *rstd, const floatX *inp,
                             const floatX *branch, const floatX *weight, const floatX *bias, size_t rows, int C,
                             DropoutMask mask) {
    constexpr int PACKS = forward_packs<N>();
    __shared__ float parts[2][LAYERNORM_MOST_WARPS][1];
    const int step = (int)blockDim.x * N, begin = (int)threadIdx.x * N, beyond = begin + PACKS * step;
    const floatX *again = RESIDUAL ? residual : inp; // where what is normalised can be read again
    const size_t first = (size_t)blockIdx.x * LAYERNORM_FORWARD_ROWS;
    const size_t end = first + LAYERNORM_FORWARD_ROWS < rows ? first + LAYERNORM_FORWARD_ROWS : rows;
    for (size_t row = first; row < end; row++) {
        const size_t offset = row * (size_t)C;
        Pack<floatX, N> kept[PACKS];
        float sum[1] = {0.0f}, squares[1] = {0.0f};
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int i = begin + p * step;
            if (i < C) kept[p] = layernorm_input<N, RESIDUAL>(residual, inp, branch, offset + i, mask);
        }
#pragma unroll
        for (int p = 0; p < PACKS; p++)
            if (begin + p * step < C) sum[0] += sum_of<N>(kept[p]);
#pragma unroll 1
        for (int i = beyond; i < C; i += step)
            sum[0] += sum_of<N>(layernorm_input<N, RESIDUAL>(residual, inp, branch, offset + i, mask));
        team_sums<1>(sum, parts[0]);
        const float m = sum[0] / (float)C;
#pragma unroll
        for (int p = 0; p < PACKS; p++)
            if (begin + p * step < C) squares[0] += squares_of<N>(kept[p], m);
#pragma unroll 1
        for (int i = beyond; i < C; i += step) squares[0] += squares_of<N>(load<N>(again + offset + i), m);
        team_sums<1>(squares, parts[1]);
        const float s = 1.0f / sqrtf(squares[0] / (float)C + 1e-5f);
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int i = begin + p * step;
            if (i < C) layernorm_output<N>(out + offset + i, kept[p], weight + i, bias + i, m, s);
        }
#pragma unroll 1
        for (int i = beyond; i < C; i += step)
            layernorm_output<N>(out + offset + i, load<N>(again + offset + i), weight + i, bias + i, m, s);
        if (threadIdx.x == 0) {
            store_one(mean + row, m);
            store_one(rstd + row, s);
        }
    }
}

template <int N, bool RESIDUAL>
static inline void layernorm_forward_launch(Ops *ops, floatX *residual, floatX *out, float *mean, float *rstd,
                                            const floatX *inp, const floatX *branch, const floatX *weight,
                                            const floatX *bias, size_t rows, int C, const Dropout *dropout) {
    cudaLaunchConfig_t config = launch_config(divide_up(rows, LAYERNORM_FORWARD_ROWS),
                                              WARP * layernorm_warps(C, N, forward_packs<N>()), 0, ops->stream);
    launch(config, layernorm_forward_kernel<N, RESIDUAL>, residual, out, mean, rstd, inp, branch, weight, bias, rows, C,
           dropout_mask(dropout));
}

OP void layernorm_forward(Ops *ops, floatX *out, float *mean, float *rstd, const floatX *inp, const floatX *weight,
                          const floatX *bias, size_t rows, int C) {
    RANGE("layernorm_forward");
    constexpr int N = pack<floatX>();
    const Dropout none = {0.0f, 0, 0, 0};
    if (C % N == 0)
        layernorm_forward_launch<N, false>(ops, NULL, out, mean, rstd, inp, NULL, weight, bias, rows, C, &none);
    else
        layernorm_forward_launch<1, false>(ops, NULL, out, mean, rstd, inp, NULL, weight, bias, rows, C, &none);
}

OP void residual_layernorm_forward(Ops *ops, floatX *residual, floatX *out, float *mean, float *rstd, const floatX *inp,
                                   const floatX *branch, const floatX *weight, const floatX *bias, size_t rows, int C,
                                   Dropout dropout) {
    RANGE("residual_layernorm_forward");
    constexpr int N = pack<floatX>();
    if (C % N == 0)
        layernorm_forward_launch<N, true>(ops, residual, out, mean, rstd, inp, branch, weight, bias, rows, C, &dropout);
    else
        layernorm_forward_launch<1, true>(ops, residual, out, mean, rstd, inp, branch, weight, bias, rows, C, &dropout);
}

// ------------------------------------------------------------------------------------------------------------ backward

// A team works on a block of consecutive rows and keeps the sums for dweight and dbias of its channels in registers;
// they are rows of `partial` (blocks, 2, C). So many warps fill a GPU a few times, whatever its size.
enum { LAYERNORM_BACKWARD_WARPS = 2048, LAYERNORM_BLOCK_ROWS = 8 };

static inline int layernorm_backward_warps(int C) {
    constexpr int N = pack<floatX>();
    return C % N == 0 ? layernorm_warps(C, N, backward_packs<N>()) : layernorm_warps(C, 1, backward_packs<1>());
}

static inline size_t layernorm_block_rows(size_t rows, int C) {
    const size_t most = LAYERNORM_BACKWARD_WARPS / (size_t)layernorm_backward_warps(C); // blocks
    const size_t share = divide_up(rows, most), least = LAYERNORM_BLOCK_ROWS;
    return share > least ? share : least;
}

static inline size_t layernorm_blocks(size_t rows, int C) {
    return divide_up(rows, layernorm_block_rows(rows, C));
}

// For any number of rows up to the shape's: fewer rows do not always make fewer blocks.
static inline size_t layernorm_backward_workspace(const OpsShape *shape) {
    const size_t rows = (size_t)shape->B * (size_t)shape->T;
    const size_t most = LAYERNORM_BACKWARD_WARPS / (size_t)layernorm_backward_warps(shape->C);
    const size_t blocks = divide_up(rows, LAYERNORM_BLOCK_ROWS);
    return (blocks < most ? blocks : most) * 2 * (size_t)shape->C * sizeof(float);
}

// With norm = (inp - mean) * rstd and d = dout * weight:
//   dinp += (d - mean(d) - norm * mean(d * norm)) * rstd;   dweight = sum dout * norm;   dbias = sum dout
// These add to the sums that a row needs, and to those of its channels.
template <int N>
static __device__ __forceinline__ void layernorm_backward_sums(float (&sums)[2], float (&dweight)[N], float (&dbias)[N],
                                                               const Pack<floatX, N> &dy, const Pack<floatX, N> &x,
                                                               const Pack<floatX, N> &w, float m, float s) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float norm = (to_float(x[j]) - m) * s, dy_j = to_float(dy[j]), d = dy_j * to_float(w[j]);
        sums[0] += d;
        sums[1] += d * norm;
        dweight[j] += dy_j * norm;
        dbias[j] += dy_j;
    }
}

template <int N>
static __device__ __forceinline__ void
layernorm_backward_output(floatX *dinp, const Pack<floatX, N> &dx, const Pack<floatX, N> &dy, const Pack<floatX, N> &x,
                          const Pack<floatX, N> &w, float m, float s, float mean_d, float mean_dnorm) {
    Pack<floatX, N> result;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float norm = (to_float(x[j]) - m) * s, d = to_float(dy[j]) * to_float(w[j]);
        result[j] = from_float<floatX>(to_float(dx[j]) + (d - mean_d - norm * mean_dnorm) * s);
    }
    store<N>(dinp, result);
}

// What dinp holds already: zeros where it is to be written.
template <int N>
static __device__ __forceinline__ Pack<floatX, N> layernorm_backward_input(const floatX *dinp, int dinp_zero) {
    Pack<floatX, N> zeros;
#pragma unroll
    for (int j = 0; j < N; j++) zeros[j] = from_float<floatX>(0.0f);
    return dinp_zero ? zeros : load<N>(dinp);
}

template <int N>
static __global__ void __launch_bounds__(LAYERNORM_MOST_THREADS)
    layernorm_backward_kernel(floatX *dinp, int dinp_zero, float *partial, const floatX *dout, const floatX *inp,
                              const floatX *weight, const float *mean, const float *rstd, size_t rows, int C,
                              size_t block_rows) {
    constexpr int PACKS = backward_packs<N>();
    __shared__ float parts[2][LAYERNORM_MOST_WARPS][2];
    const int lane = threadIdx.x % WARP;
    const int step = (int)blockDim.x * N, begin = (int)threadIdx.x * N, beyond = begin + PACKS * step;
    const size_t first = (size_t)blockIdx.x * block_rows, end = first + block_rows < rows ? first + block_rows : rows;
    float *weight_sums = partial + (size_t)blockIdx.x * 2 * (size_t)C, *bias_sums = weight_sums + C;
    Pack<floatX, N> w[PACKS];
    float dweight[PACKS][N], dbias[PACKS][N];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (begin + p * step < C) w[p] = load<N>(weight + begin + p * step);
#pragma unroll
        for (int j = 0; j < N; j++) dweight[p][j] = dbias[p][j] = 0.0f;
    }
    for (size_t row = first; row < end; row++) {
        const size_t offset = row * (size_t)C;
        Pack<floatX, N> dy[PACKS], x[PACKS], dx[PACKS];
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int i = begin + p * step;
            if (i >= C) continue;
            dy[p] = load<N>(dout + offset + i);
            x[p] = load<N>(inp + offset + i);
            dx[p] = layernorm_backward_input<N>(dinp + offset + i, dinp_zero);
        }
        float statistic = 0.0f;
        if (lane < 2) statistic = load_one((lane == 0 ? mean : rstd) + row);
        const float m = __shfl_sync(ALL_LANES, statistic, 0), s = __shfl_sync(ALL_LANES, statistic, 1);
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int p = 0; p < PACKS; p++)
            if (begin + p * step < C) layernorm_backward_sums<N>(sums, dweight[p], dbias[p], dy[p], x[p], w[p], m, s);
                // Channels beyond the registers have their sums in memory.
#pragma unroll 1
        for (int i = beyond; i < C; i += step) {
            float dw[N] = {0}, db[N] = {0};
            if (row > first) {
                load_floats<N>(dw, weight_sums + i);
                load_floats<N>(db, bias_sums + i);
            }
            layernorm_backward_sums<N>(sums, dw, db, load<N>(dout + offset + i), load<N>(inp + offset + i),
                                       load<N>(weight + i), m, s);
            store_floats<N>(weight_sums + i, dw);
            store_floats<N>(bias_sums + i, db);
        }
        team_sums<2>(sums, parts[row % 2]);
        const float mean_d = sums[0] / (float)C, mean_dnorm = sums[1] / (float)C;
#pragma unroll
        for (int p = 0; p < PACKS; p++)
            if (begin + p * step < C)
                layernorm_backward_output<N>(dinp + offset + begin + p * step, dx[p], dy[p], x[p], w[p], m, s, mean_d,
                                             mean_dnorm);
#pragma unroll 1
        for (int i = beyond; i < C; i += step)
            layernorm_backward_output<N>(dinp + offset + i, layernorm_backward_input<N>(dinp + offset + i, dinp_zero),
                                         load<N>(dout + offset + i), load<N>(inp + offset + i), load<N>(weight + i), m,
                                         s, mean_d, mean_dnorm);
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int i = begin + p * step;
        if (i >= C) continue;
        store_floats<N>(weight_sums + i, dweight[p]);
        store_floats<N>(bias_sums + i, dbias[p]);
    }
}

OP void layernorm_backward(Ops *ops, floatX *dinp, int dinp_zero, gradX *dweight, gradX *dbias, const floatX *dout,
                           const floatX *inp, const floatX *weight, const float *mean, const float *rstd, size_t rows,
                           int C, int accumulate) {
    RANGE("layernorm_backward");
    constexpr int N = pack<floatX>();
    float *partial = (float *)ops->workspace;
    const size_t blocks = layernorm_blocks(rows, C), block_rows = layernorm_block_rows(rows, C);
    cudaLaunchConfig_t config = launch_config(blocks, WARP * layernorm_backward_warps(C), 0, ops->stream);
    if (C % N == 0)
        launch(config, layernorm_backward_kernel<N>, dinp, dinp_zero, partial, dout, inp, weight, mean, rstd, rows, C,
               block_rows);
    else
        launch(config, layernorm_backward_kernel<1>, dinp, dinp_zero, partial, dout, inp, weight, mean, rstd, rows, C,
               block_rows);
    column_sums_finish(ops, dweight, dbias, partial, blocks, 2 * (size_t)C, (size_t)C, accumulate);
}

#endif
