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
// Of columns that are sliced over ranks: statistics read U s, the second half reads and writes Vp s.
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

static inline int classifier_threads(int columns, int N) {
    const size_t warps = divide_up((size_t)columns, (size_t)WARP * (size_t)N);
    return warps * WARP < CLASSIFIER_MOST_THREADS ? (int)warps * WARP : CLASSIFIER_MOST_THREADS;
}

OP void classifier(Ops *ops, floatX *logits, float *losses, const int *targets, size_t rows, int V, int Vp, float scale,
                   int want_gradient) {
    RANGE("classifier");
    constexpr int N = pack<floatX>();
    const bool packed = Vp % N == 0;
    cudaLaunchConfig_t config = launch_config(rows, classifier_threads(V, packed ? N : 1), 0, ops->stream);
    if (packed)
        launch(config, classifier_kernel<N>, logits, losses, targets, V, Vp, scale, want_gradient);
    else
        launch(config, classifier_kernel<1>, logits, losses, targets, V, Vp, scale, want_gradient);
}

// ---------------------------------------------------------------------------------------------------- sliced columns

// The largest logit of a row's first V columns, and the sum of exp(x - largest), in every thread; -FLT_MAX and 0 where
// V is 0. parts: shared memory, an element per warp.
template <int N>
static __device__ __forceinline__ void classifier_row_statistics(float *largest, float *sum, const floatX *x, int V,
                                                                 float *parts) {
    float most = -FLT_MAX, total = 0.0f;
    for (int i = (int)threadIdx.x * N; i < V; i += (int)blockDim.x * N) {
        float values[N];
        load_floats<N>(values, x + i);
        float now = most;
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (i + j >= V) values[j] = -INFINITY; // padding in the last pack
            now = fmaxf(now, values[j]);
        }
        if (now > most) total *= softmax_exp(most - now);
        most = now;
#pragma unroll
        for (int j = 0; j < N; j++) total += softmax_exp(values[j] - most);
    }
    *largest = block_max(most, parts);
    *sum = block_sum(total * softmax_exp(most - *largest), parts);
}

template <int N>
static __global__ void __launch_bounds__(CLASSIFIER_MOST_THREADS)
    classifier_statistics_kernel(float *statistics, const floatX *logits, const int *targets, int Vp,
                                 Vocabulary vocabulary) {
    __shared__ float parts[WARP];
    const size_t row = blockIdx.x;
    const floatX *x = logits + row * (size_t)Vp;
    float largest, sum;
    classifier_row_statistics<N>(&largest, &sum, x, vocabulary.count, parts);
    if (threadIdx.x > 0) return;
    const int target = load_one(targets + row);
    const int local = target - vocabulary.first;
    const bool here = target >= 0 && local >= 0 && local < vocabulary.count;
    store_one(statistics + 3 * row, largest);
    store_one(statistics + 3 * row + 1, sum);
    store_one(statistics + 3 * row + 2, here ? to_float(load_one(x + local)) : 0.0f);
}

template <int N>
static __global__ void __launch_bounds__(CLASSIFIER_MOST_THREADS)
    classifier_sliced_kernel(floatX *logits, float *losses, const int *targets, const float *all, int ranks,
                             size_t rows, int Vp, Vocabulary vocabulary, float scale, int want_gradient) {
    const size_t row = blockIdx.x;
    floatX *x = logits + row * (size_t)Vp;
    const int target = load_one(targets + row), local = target - vocabulary.first;
    float largest = -FLT_MAX, sum = 0.0f, target_logit = 0.0f;
    for (int r = 0; r < ranks; r++) { // few numbers, the same for all threads
        const float *theirs = all + ((size_t)r * rows + row) * 3;
        largest = fmaxf(largest, load_one(theirs));
        target_logit += load_one(theirs + 2);
    }
    for (int r = 0; r < ranks; r++) {
        const float *theirs = all + ((size_t)r * rows + row) * 3;
        sum += load_one(theirs + 1) * softmax_exp(load_one(theirs) - largest);
    }
    if (threadIdx.x == 0) store_one(losses + row, target == -1 ? 0.0f : logf(sum) + largest - target_logit);
    if (!want_gradient) return;
    const float factor = target == -1 ? 0.0f : scale / sum;
    for (int i = (int)threadIdx.x * N; i < Vp; i += (int)blockDim.x * N) {
        float values[N];
        load_floats<N, Cache::stream>(values, x + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const bool counts = i + j < vocabulary.count && target != -1;
            values[j] = counts ? softmax_exp(values[j] - largest) * factor : 0.0f;
            if (counts && i + j == local) values[j] -= scale;
        }
        store_floats<N>(x + i, values);
    }
}

OP void classifier_statistics(Ops *ops, float *statistics, const floatX *logits, const int *targets, size_t rows,
                              int Vp, Vocabulary vocabulary) {
    RANGE("classifier_statistics");
    constexpr int N = pack<floatX>();
    const bool packed = Vp % N == 0;
    cudaLaunchConfig_t config = launch_config(rows, classifier_threads(Vp, packed ? N : 1), 0, ops->stream);
    if (packed)
        launch(config, classifier_statistics_kernel<N>, statistics, logits, targets, Vp, vocabulary);
    else
        launch(config, classifier_statistics_kernel<1>, statistics, logits, targets, Vp, vocabulary);
}

OP void classifier_sliced(Ops *ops, floatX *logits, float *losses, const int *targets, const float *all, int ranks,
                          size_t rows, int Vp, Vocabulary vocabulary, float scale, int want_gradient) {
    RANGE("classifier_sliced");
    constexpr int N = pack<floatX>();
    const bool packed = Vp % N == 0;
    cudaLaunchConfig_t config = launch_config(rows, classifier_threads(Vp, packed ? N : 1), 0, ops->stream);
    if (packed)
        launch(config, classifier_sliced_kernel<N>, logits, losses, targets, all, ranks, rows, Vp, vocabulary, scale,
               want_gradient);
    else
        launch(config, classifier_sliced_kernel<1>, logits, losses, targets, all, ranks, rows, Vp, vocabulary, scale,
               want_gradient);
}

#endif
