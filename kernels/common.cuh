// common.cuh: what the kernels share: vector access to global memory, conversions, sums within warps and blocks,
// dropout factors, launches.
//
// Rules for kernels, which the emulator relies on: launch through launch(); dynamic shared memory through
// DYNAMIC_SHARED; global memory through the load and store functions here or cp_async16 (they are counted, and check
// alignment); every thread of a block reaches the same __syncthreads(), so no early return before one; explicit warp
// masks; __syncwarp() where lanes exchange through shared memory (a shuffle does not order it); no block waits for
// another; no atomics on floating point, whose order is chance.
//
// Buffers begin on 16-byte boundaries, as every tensor of the layout and every activation does. A row of C elements is
// accessed 16 bytes at a time where C allows (kernels are templates over N, the elements of one access: pack<T>() or
// 1).
#ifndef COMMON_CUH
#define COMMON_CUH

#include "error.h"
#include "profile.h"
#include "ptx.cuh"
#include "random.h"

// ------------------------------------------------------------------------------------------------- types and memory

// N elements that are loaded and stored at once: 16 bytes, or one element.
template <class T, int N> struct alignas(sizeof(T) * N) Pack {
    T value[N];
    __device__ __forceinline__ T &operator[](int i) { return value[i]; }
    __device__ __forceinline__ const T &operator[](int i) const { return value[i]; }
};

// How many elements 16 bytes hold.
template <class T> static constexpr __host__ __device__ int pack() {
    return (int)(16 / sizeof(T));
}

// How a pack is accessed: as it is, or bypassing caches where it is used once.
enum class Cache { keep, stream };

template <int N, Cache cache = Cache::keep, class T> static __device__ __forceinline__ Pack<T, N> load(const T *from) {
    Pack<T, N> result;
    count_read(sizeof result);
    if constexpr (sizeof result == 16) {
        check_aligned(from, 16);
        int4 bits;
        if (cache == Cache::stream)
            bits = __ldcs(reinterpret_cast<const int4 *>(from));
        else
            bits = *reinterpret_cast<const int4 *>(from);
        memcpy(&result, &bits, 16);
    } else {
        for (int i = 0; i < N; i++) result[i] = from[i];
    }
    return result;
}

template <int N, Cache cache = Cache::keep, class T>
static __device__ __forceinline__ void store(T *to, const Pack<T, N> &pack) {
    count_write(sizeof pack);
    if constexpr (sizeof pack == 16) {
        check_aligned(to, 16);
        int4 bits;
        memcpy(&bits, &pack, 16);
        if (cache == Cache::stream)
            __stcs(reinterpret_cast<int4 *>(to), bits);
        else
            *reinterpret_cast<int4 *>(to) = bits;
    } else {
        for (int i = 0; i < N; i++) to[i] = pack[i];
    }
}

template <class T> static __device__ __forceinline__ T load_one(const T *from) {
    count_read(sizeof(T));
    return *from;
}

template <class T> static __device__ __forceinline__ void store_one(T *to, T value) {
    count_write(sizeof(T));
    *to = value;
}

static __device__ __forceinline__ float to_float(float x) {
    return x;
}
static __device__ __forceinline__ float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
template <class T> static __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16(x);
}

// ------------------------------------------------------------------------------------------------------------- sums

enum { WARP = 32 };
#define ALL_LANES 0xffffffffu

// The sum over the warp, in every lane, in an order that does not depend on timing.
template <class T> static __device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

static __device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}

// The sum over a block whose threads are a multiple of 32, in every thread. `parts`: shared memory, an element per
// warp. Ends with a barrier: parts may be used again at once.
template <class T> static __device__ __forceinline__ T block_sum(T value, T *parts) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    value = warp_sum(value);
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    value = warp_sum(lane < warps ? parts[lane] : (T)0);
    __syncthreads();
    return value;
}

static __device__ __forceinline__ float block_max(float value, float *parts) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    value = warp_max(value);
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    value = warp_max(lane < warps ? parts[lane] : parts[0]);
    __syncthreads();
    return value;
}

// ---------------------------------------------------------------------------------------------------------- launches

static inline size_t divide_up(size_t a, size_t b) {
    return (a + b - 1) / b;
}

// A grid of `blocks` in x; more than 2^31 - 1 cannot be launched.
static inline cudaLaunchConfig_t launch_config(size_t blocks, int threads, size_t shared_bytes, cudaStream_t stream) {
    if (blocks > 0x7fffffff) die("a kernel of %zu blocks cannot be launched", blocks);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks, 1, 1);
    config.blockDim = dim3((unsigned)threads, 1, 1);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return config;
}

// Launches kernel(arguments...). Arguments are converted to the kernel's parameter types, so a template kernel is
// named with its template arguments.
#define launch(config, ...) cuda_check(cudaLaunchKernelEx(&(config), __VA_ARGS__))

#endif
