// profile.h (CUDA): named ranges for a profiler's timeline (NVTX), and which part of a run it records.
//
// Ranges nest, belong to the host thread, and say when work was queued; a profiler relates kernels to them. Without a
// profiler a range costs a few nanoseconds. The toolkit's NVTX is headers alone: it loads its library when there is
// one.
#ifndef CUDA_PROFILE_H
#define CUDA_PROFILE_H

#include <cuda_profiler_api.h>
#include <stdbool.h>
#include "error.h"

#if defined(__has_include)
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define PROFILE_NVTX
#endif
#endif

// Whether profile_start() has a meaning.
static inline bool profile_supported(void) {
    return true;
}

// What a profiler records that was told to wait for the program (nsys profile --capture-range=cudaProfilerApi).
static inline void profile_start(void) {
    cuda_check(cudaProfilerStart());
}
static inline void profile_stop(void) {
    cuda_check(cudaProfilerStop());
}

static inline void range_push(const char *name) {
#ifdef PROFILE_NVTX
    nvtxRangePushA(name);
#else
    (void)name;
#endif
}

static inline void range_pop(void) {
#ifdef PROFILE_NVTX
    nvtxRangePop();
#endif
}

// A range that ends with the block that this stands in, however it is left; for operations.
struct Range {
    explicit Range(const char *name) { range_push(name); }
    ~Range() { range_pop(); }
};
#define RANGE(name) Range range_(name)

#endif
