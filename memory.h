// memory.h: the device allocator: every byte tagged by what it is for.
//
// Buffers are allocated once, while a run is built, and live until it ends; there is no allocation in a step. A Memory
// can also be opened for planning: then memory_alloc() counts and returns NULL. The plan of a run is therefore the
// same code as the run: build it with a planning Memory and read the counts.
//
// Collectives run faster on memory that their library has allocated and knows (NCCL user guide, "User Buffer
// Registration"). So what they work on comes from an allocator that comm.h names, and a Memory remembers its buffers.
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

// Whether collectives work on memory of this tag.
static inline bool memory_tag_is_communicated(MemoryTag tag) {
    return tag == MEMORY_PARAMETERS || tag == MEMORY_GRADIENTS || tag == MEMORY_COMMUNICATION;
}

typedef struct MemoryBuffer {
    void *pointer;
    size_t bytes;
    MemoryTag tag;
    bool foreign; // from Memory's allocate, not from cudaMalloc
    struct MemoryBuffer *next;
} MemoryBuffer;

typedef struct {
    bool planning;             // count only
    size_t bytes[MEMORY_TAGS]; // allocated now, by tag
    size_t total;              // their sum
    size_t peak;               // the largest sum so far
    MemoryBuffer *buffers;     // allocated now, the newest first
    // The allocator of what collectives work on, and its counterpart; NULL: cudaMalloc.
    cudaError_t (*allocate)(void **pointer, size_t bytes);
    cudaError_t (*release)(void *pointer);
} Memory;

// Device memory for `bytes` bytes, zeroed for every stream; NULL when planning or when bytes is 0. Dies if there is not
// enough.
static inline void *memory_alloc(Memory *memory, MemoryTag tag, size_t bytes) {
    memory->bytes[tag] += bytes;
    memory->total += bytes;
    if (memory->total > memory->peak) memory->peak = memory->total;
    if (memory->planning || bytes == 0) return NULL;
    MemoryBuffer *buffer = (MemoryBuffer *)calloc(1, sizeof *buffer);
    if (buffer == NULL) die("no memory for the list of buffers");
    buffer->bytes = bytes;
    buffer->tag = tag;
    buffer->foreign = memory->allocate != NULL && memory_tag_is_communicated(tag) &&
                      memory->allocate(&buffer->pointer, bytes) == cudaSuccess;
    if (!buffer->foreign) {
        const cudaError_t status = cudaMalloc(&buffer->pointer, bytes);
        if (status != cudaSuccess)
            die("no room for %.1f MB of %s on top of the %.1f MB allocated: %s", (double)bytes / 1e6,
                memory_tag_name(tag), (double)(memory->total - bytes) / 1e6, cudaGetErrorString(status));
    }
    buffer->next = memory->buffers;
    memory->buffers = buffer;
    cuda_check(cudaMemset(buffer->pointer, 0, bytes));
    cuda_check(cudaStreamSynchronize(NULL)); // streams that do not wait for the NULL stream may use it at once
    return buffer->pointer;
}

// Gives back `bytes` bytes that memory_alloc(memory, tag, bytes) returned.
static inline void memory_free(Memory *memory, MemoryTag tag, void *pointer, size_t bytes) {
    memory->bytes[tag] -= bytes;
    memory->total -= bytes;
    if (pointer == NULL) return;
    MemoryBuffer **link = &memory->buffers;
    while (*link != NULL && (*link)->pointer != pointer) link = &(*link)->next;
    MemoryBuffer *buffer = *link;
    if (buffer == NULL) die("a buffer of %zu bytes of %s was not allocated here", bytes, memory_tag_name(tag));
    *link = buffer->next;
    cuda_check(buffer->foreign ? memory->release(pointer) : cudaFree(pointer));
    free(buffer);
}

// Gives back all that is still allocated.
static inline void memory_close(Memory *memory) {
    while (memory->buffers != NULL)
        memory_free(memory, memory->buffers->tag, memory->buffers->pointer, memory->buffers->bytes);
}

#endif
