// classifier.cuh: softmax cross-entropy over the vocabulary, loss and gradient in place.
//
// A thread block works on a row: one pass finds the largest logit and the sum of exponentials together (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018); the second reads the row again, from the caches, from
// its end, whose logits were used last, and writes the gradient over it.
//
// Global memory, with s = sizeof(floatX), U = V rounded up to 16 / s (V where Vp is no multiple of that), for each row:
//   with want_gradient  reads 2 U s + s + 4, writes Vp s + 4
//   without             reads U s + s + 4, writes 4
//   target -1           reads 4, writes 4, and Vp s with want_gradient
#ifndef CLASSIFIER_CUH
#define CLASSIFIER_CUH

#include <float.h>
#include "vector.cuh"

// Two blocks of so many threads fill a multiprocessor of 2048, and their rows are few enough for the cache between the
// passes: 2 rows of 100 KB on each of 132 multiprocessors are half of an H100's.
enum { CLASSIFIER_MOST_THREADS = 1024 };

// e^x. Rounding the product costs x * 2^-24 of the result, less than 1e-6 of it where it counts: e^-16 is 1e-7 of e^0.
static __device__ __forceinline__ float softmax_exp(float x) {
    return exp2_approx(x * 1.4426950408889634f);
}

template <int N>
static __global__ void __launch_bounds__(CLASSIFIER_MOST_THREADS)
    classifier_kernel(floatX *logits, float *losses, const int *targets, int V, int Vp, float scale,
                      int want_gradient) {
    __shared__ float parts[WARP];
    __shared__ int shared_target;
    __shared__ float shared_logit; // of the target
    const size_t row = blockIdx.x;
    floatX *x = logits + row * (size_t)Vp;
    const int step = (int)blockDim.x * N, begin = (int)threadIdx.x * N;
    if (threadIdx.x == 0) {
        shared_target = load_one(targets + row);
        if (shared_target != -1) shared_logit = to_float(load_one(x + shared_target));
    }
    __syncthreads();
    const int target = shared_target;
    if (target == -1) {
        float zeros[N] = {0};
        if (want_gradient)
            for (int i = begin; i < Vp; i += step) store_floats<N>(x + i, zeros);
        if (threadIdx.x == 0) store_one(losses + row, 0.0f);
        return;
    }
    // The lowest number, not -infinity, whose difference from a logit of -infinity would be no number.
    float largest = -FLT_MAX, sum = 0.0f;
    int i = begin;
#pragma unroll 2
    for (; i < V; i += step) {
        float values[N];
        load_floats<N>(values, x + i);
        float most = largest;
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (i + j >= V) values[j] = -INFINITY; // padding in the last pack
            most = fmaxf(most, values[j]);
        }
        if (most > largest) sum *= softmax_exp(largest - most);
        largest = most;
#pragma unroll
        for (int j = 0; j < N; j++) sum += softmax_exp(values[j] - largest);
    }
    const float row_largest = block_max(largest, parts);
    const float row_sum = block_sum(sum * softmax_exp(largest - row_largest), parts);
    if (threadIdx.x == 0) store_one(losses + row, logf(row_sum) + row_largest - shared_logit);
    if (!want_gradient) return;
    const float factor = scale / row_sum;
    for (int k = i; k < Vp; k += step) {
        const float zeros[N] = {0};
        store_floats<N>(x + k, zeros);
    }
#pragma unroll 2
    for (i -= step; i >= 0; i -= step) {
        float values[N];
        load_floats<N, Cache::stream>(values, x + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            values[j] = softmax_exp(values[j] - row_largest) * factor;
            if (i + j >= V) values[j] = 0.0f;
            if (i + j == target) values[j] -= scale;
        }
        store_floats<N>(x + i, values);
    }
}

OP void classifier(Ops *ops, floatX *logits, float *losses, const int *targets, size_t rows, int V, int Vp, float scale,
                   int want_gradient) {
    constexpr int N = pack<floatX>();
    const bool packed = Vp % N == 0;
    const size_t warps = divide_up((size_t)V, (size_t)WARP * (packed ? N : 1));
    const int threads = warps * WARP < CLASSIFIER_MOST_THREADS ? (int)warps * WARP : CLASSIFIER_MOST_THREADS;
    cudaLaunchConfig_t config = launch_config(rows, threads, 0, ops->stream);
    if (packed)
        launch(config, classifier_kernel<N>, logits, losses, targets, V, Vp, scale, want_gradient);
    else
        launch(config, classifier_kernel<1>, logits, losses, targets, V, Vp, scale, want_gradient);
}

#endif
