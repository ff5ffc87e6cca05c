// device.h (CUDA): which GPU a rank computes on: one process per GPU, counted by the ranks of a machine.
//
// Some job schedulers show each rank its own GPU alone, as number 0. So a rank that sees one GPU takes it, and whether
// two ranks took the same one is found out when they meet (bootstrap.h).
#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include "error.h"

// The kernels use instructions of compute capability 8.0: cp.async, and mma on bf16.
enum { DEVICE_LEAST_MAJOR = 8 };

// GPUs that this process sees; 0 and an error where there is none.
static inline int device_count(Error *error) {
    int count = 0, driver = 0, runtime = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess && count > 0) return count;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0)
        error_set(error, "no GPU answers: no CUDA driver is installed. make DEVICE=cpu builds for CPUs");
    else
        error_set(error,
                  "no GPU answers: %s (the driver is for CUDA %d.%d, this program for %d.%d). make DEVICE=cpu builds "
                  "for CPUs",
                  status == cudaSuccess ? "none is visible" : cudaGetErrorString(status), driver / 1000,
                  driver / 10 % 100, runtime / 1000, runtime / 10 % 100);
    return 0;
}

static inline bool device_refuse(int ranks, int gpus, Error *error) {
    return error_set(error, "%d ranks on a machine with %d GPU%s: a rank needs a GPU of its own; start %d at most",
                     ranks, gpus, gpus == 1 ? "" : "s", gpus);
}

// Whether this machine can take so many ranks, before they are started.
static inline bool device_check(int ranks, Error *error) {
    const int gpus = device_count(error);
    return gpus > 0 && (ranks <= gpus || device_refuse(ranks, gpus, error));
}

// The GPU of a rank, made current.
static inline bool device_choose(int local_rank, int local_size, int *device, Error *error) {
    const int gpus = device_count(error);
    if (gpus == 0) return false;
    if (local_size > gpus && gpus > 1) return device_refuse(local_size, gpus, error);
    *device = gpus > 1 ? local_rank : 0;
    if (*device >= gpus) return device_refuse(local_rank + 1, gpus, error);
    struct cudaDeviceProp properties;
    cudaError_t status = cudaGetDeviceProperties(&properties, *device);
    if (status == cudaSuccess && properties.major < DEVICE_LEAST_MAJOR)
        return error_set(error,
                         "GPU %d, %s, has compute capability %d.%d; %d.0 is needed. make DEVICE=cpu builds for CPUs",
                         *device, properties.name, properties.major, properties.minor, (int)DEVICE_LEAST_MAJOR);
    if (status == cudaSuccess) status = cudaSetDevice(*device);
    if (status == cudaSuccess) status = cudaFree(NULL); // creates the context: a GPU that is not well says so here
    if (status != cudaSuccess)
        return error_set(error, "GPU %d cannot be used: %s", *device, cudaGetErrorString(status));
    return true;
}

#endif
