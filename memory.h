// memory.h: the device allocator: every byte tagged by what it is for.
//
// Buffers are allocated once, while a run is built, and live until it ends; there is no allocation in a step. A Memory
// can also be opened for planning: then memory_alloc() counts and returns NULL. The plan of a run is therefore the
// same code as the run: build it with a planning Memory and read the counts.
#ifndef MEMORY_H
#define MEMORY_H

#include <cuda_runtime.h>
#include <stddef.h>
#include "error.h"

typedef enum {
    MEMORY_PARAMETERS,    // this rank's persistent parameters
    MEMORY_GRADIENTS,     // this rank's persistent gradients
    MEMORY_OPTIMIZER,     // this rank's masters and moments
    MEMORY_ACTIVATIONS,   // what forward keeps for backward, and the gradients that flow between layers
    MEMORY_COMMUNICATION, // transient full-size buffers of sharded strategies, staging for collectives
    MEMORY_WORKSPACE,     // scratch of the ops
    MEMORY_TAGS
} MemoryTag;

static inline const char *memory_tag_name(int tag) {
    static const char *const names[MEMORY_TAGS] = {"parameters",  "gradients",     "optimizer",
                                                   "activations", "communication", "workspace"};
    return names[tag];
}

typedef struct {
    bool planning;             // count only
    size_t bytes[MEMORY_TAGS]; // allocated now, by tag
    size_t total;              // their sum
    size_t peak;               // the largest sum so far
} Memory;

// Device memory for `bytes` bytes, zeroed; NULL when planning or when bytes is 0. Dies if there is not enough.
static inline void *memory_alloc(Memory *memory, MemoryTag tag, size_t bytes) {
    memory->bytes[tag] += bytes;
    memory->total += bytes;
    if (memory->total > memory->peak) memory->peak = memory->total;
    if (memory->planning || bytes == 0) return NULL;
    void *pointer = NULL;
    cudaError_t status = cudaMalloc(&pointer, bytes);
    if (status != cudaSuccess)
        die("no room for %.1f MB of %s on top of the %.1f MB allocated: %s", (double)bytes / 1e6, memory_tag_name(tag),
            (double)(memory->total - bytes) / 1e6, cudaGetErrorString(status));
    cuda_check(cudaMemset(pointer, 0, bytes));
    return pointer;
}

// Gives back `bytes` bytes that memory_alloc(memory, tag, bytes) returned.
static inline void memory_free(Memory *memory, MemoryTag tag, void *pointer, size_t bytes) {
    memory->bytes[tag] -= bytes;
    memory->total -= bytes;
    if (pointer != NULL) cuda_check(cudaFree(pointer));
}

#endif
