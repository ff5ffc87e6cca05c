// cuda_runtime.h (test): what kernels/cuda/bootstrap.h and device.h use, for a machine with TEST_GPUS GPUs. TEST_GPU,
// if set, is the one that every number stands for.
#ifndef TEST_CUDA_RUNTIME_H
#define TEST_CUDA_RUNTIME_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { cudaSuccess = 0, cudaErrorInvalidDevice = 101 } cudaError_t;

typedef struct {
    char bytes[16];
} cudaUUID_t;

struct cudaDeviceProp {
    char name[256];
    cudaUUID_t uuid;
    int major, minor;
};

static int test_device = 0;

static inline const char *cudaGetErrorString(cudaError_t status) {
    return status == cudaSuccess ? "no error" : "invalid device ordinal";
}
static inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = atoi(getenv("TEST_GPUS"));
    return cudaSuccess;
}
static inline cudaError_t cudaDriverGetVersion(int *version) {
    *version = 12080;
    return cudaSuccess;
}
static inline cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 12080;
    return cudaSuccess;
}
static inline cudaError_t cudaGetDevice(int *device) {
    *device = test_device;
    return cudaSuccess;
}
static inline cudaError_t cudaSetDevice(int device) {
    test_device = device;
    return device < atoi(getenv("TEST_GPUS")) ? cudaSuccess : cudaErrorInvalidDevice;
}
static inline cudaError_t cudaFree(void *) {
    return cudaSuccess;
}
static inline cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    properties->major = 9;
    const char *same = getenv("TEST_GPU"), *node = getenv("TEST_NODE");
    properties->uuid.bytes[0] = (char)(same != NULL ? atoi(same) : device);
    properties->uuid.bytes[15] = (char)(node != NULL ? atoi(node) : 0);
    return cudaSuccess;
}

#endif
