// vector.cuh: what kernels over rows and vectors share: N elements as floats whatever their type, N random words in a
// row, and passes over vectors.
#ifndef VECTOR_CUH
#define VECTOR_CUH

#include "common.cuh"

// values[i] = from[i]: accesses of 16 bytes where N elements fill them, else of one element.
template <int N, Cache cache = Cache::keep, class T>
static __device__ __forceinline__ void load_floats(float (&values)[N], const T *from) {
    constexpr int M = N < pack<T>() ? 1 : pack<T>();
    static_assert(N % M == 0, "whole accesses");
#pragma unroll
    for (int i = 0; i < N; i += M) {
        const Pack<T, M> part = load<M, cache>(from + i);
#pragma unroll
        for (int j = 0; j < M; j++) values[i + j] = to_float(part[j]);
    }
}

// to[i] = values[i], rounded.
template <int N, Cache cache = Cache::keep, class T>
static __device__ __forceinline__ void store_floats(T *to, const float (&values)[N]) {
    constexpr int M = N < pack<T>() ? 1 : pack<T>();
    static_assert(N % M == 0, "whole accesses");
#pragma unroll
    for (int i = 0; i < N; i += M) {
        Pack<T, M> part;
#pragma unroll
        for (int j = 0; j < M; j++) part[j] = from_float<T>(values[i + j]);
        store<M, cache>(to + i, part);
    }
}

// words[i] = random_u32(key, first + i). Four neighbours share a random4(), so N words lie in at most N / 4 + 1 of
// them.
template <int N>
static __device__ __forceinline__ void random_words(uint32_t (&words)[N], uint64_t key, uint64_t first) {
    constexpr int GROUPS = (N + 3) / 4;
    const int skip = (int)(first & 3);
    uint32_t drawn[4 * GROUPS + 4];
#pragma unroll
    for (int group = 0; group <= GROUPS; group++) {
        // The last group is reached only by a start inside the first one. One word never leaves its group.
        if (group == GROUPS && (N == 1 || skip == 0)) break;
        const Random4 four = random4(key, (first >> 2) + (uint64_t)group);
#pragma unroll
        for (int j = 0; j < 4; j++) drawn[4 * group + j] = four.word[j];
    }
    // drawn[skip + i], selected by the bits of skip: an array indexed at run time would live in local memory.
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t even = skip & 2 ? drawn[i + 2] : drawn[i], odd = skip & 2 ? drawn[i + 3] : drawn[i + 1];
        words[i] = skip & 1 ? odd : even;
    }
}

// ------------------------------------------------------------------------------------------------------------- passes

// A pass over vectors is a struct of what it works on, with a function for N neighbouring elements, i and up:
//   template <int N> __device__ void at(size_t i) const
// A thread takes as many elements as 16 bytes of floatX hold; those that are left at the end are taken one by one. So
// one launch covers any n, and any n fits a grid. Half a multiprocessor's threads at least are to be resident at once:
// that many loads hide the latency of memory.
enum { VECTOR_THREADS = 256, VECTOR_RESIDENT = 4, VECTOR_MOST_BLOCKS = 1 << 20 };

template <int N, class Pass>
static __global__ void __launch_bounds__(VECTOR_THREADS, VECTOR_RESIDENT)
    vector_pass_kernel(const Pass pass, size_t n) {
    const size_t stride = (size_t)gridDim.x * VECTOR_THREADS * N;
    for (size_t i = ((size_t)blockIdx.x * VECTOR_THREADS + threadIdx.x) * N; i < n; i += stride) {
        if (i + N <= n)
            pass.template at<N>(i);
        else
            for (size_t j = i; j < n; j++) pass.template at<1>(j);
    }
}

// aligned: all vectors begin on 16-byte boundaries. A whole tensor always does; a part of one begins anywhere.
template <class Pass> static inline void vector_pass(const Pass &pass, size_t n, bool aligned, cudaStream_t stream) {
    if (n == 0) return;
    const int N = aligned ? pack<floatX>() : 1;
    const size_t needed = divide_up(n, (size_t)VECTOR_THREADS * (size_t)N), most = VECTOR_MOST_BLOCKS;
    cudaLaunchConfig_t config = launch_config(needed < most ? needed : most, VECTOR_THREADS, 0, stream);
    if (aligned)
        launch(config, vector_pass_kernel<pack<floatX>(), Pass>, pass, n);
    else
        launch(config, vector_pass_kernel<1, Pass>, pass, n);
}

// Whether all of these are multiples of 16.
template <class... Pointers> static inline bool aligned16(Pointers... pointers) {
    return ((((uintptr_t)pointers & 15) | ...) == 0);
}

#endif
