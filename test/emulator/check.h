// check.h: what the emulator's tests share: a check that says where it failed, and functions that launch.
#ifndef CHECK_H
#define CHECK_H

#include "common.cuh"

#define CHECK(condition)                                               \
    do {                                                               \
        if (!(condition)) die("%s: not so: %s", __func__, #condition); \
    } while (0)

static inline void check_status(cudaError_t status, cudaError_t expected, const char *what, int line) {
    if (status != expected)
        die("line %d: %s is %s, not %s", line, what, cudaGetErrorName(status), cudaGetErrorName(expected));
}
#define EXPECT(call, expected) check_status(call, expected, #call, __LINE__)

template <class T> static inline T *device_array(size_t count) {
    T *array;
    cuda_check(cudaMalloc(&array, count * sizeof(T)));
    return array;
}

// Launches kernel(arguments...) and waits for it.
#define RUN(blocks, threads, shared_bytes, ...)                                                    \
    do {                                                                                           \
        cudaLaunchConfig_t config_ = launch_config((size_t)(blocks), threads, shared_bytes, NULL); \
        launch(config_, __VA_ARGS__);                                                              \
        cuda_check(cudaDeviceSynchronize());                                                       \
    } while (0)

#endif
