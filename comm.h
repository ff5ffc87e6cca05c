// comm.h: the grid of ranks, its communicators, and every collective, counted.
//
// Every byte that ranks exchange passes through here, on one communication stream, so that what a step sends can be
// counted exactly (contract: the counts match the table of strategies). Collectives only ever sum; who waits for whom
// is said with events by the caller. A Comm can also be opened for planning: it then counts and sends nothing, for any
// number of ranks.
#ifndef COMM_H
#define COMM_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nccl.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include "bootstrap.h"
#include "error.h"
#include "memory.h"
#include "random.h"

typedef enum {
    COMM_ALL_REDUCE,
    COMM_REDUCE_SCATTER,
    COMM_ALL_GATHER,
    COMM_SEND,
    COMM_RECV,
    COMM_SCALARS, // loss, norm, stop flag: counted apart
    COMM_KINDS
} CommKind;

static inline const char *comm_kind_name(int kind) {
    static const char *const names[COMM_KINDS] = {"all_reduce", "reduce_scatter", "all_gather",
                                                  "send",       "recv",           "scalars"};
    return names[kind];
}

// What one rank sends. payload_bytes: the size of the full buffer that the collective works on. bus_bytes: what this
// rank sends under a ring: 2 (N-1)/N of the payload for all-reduce, (N-1)/N for reduce-scatter and all-gather.
typedef struct {
    uint64_t calls, payload_bytes, bus_bytes;
} CommCount;

typedef struct {
    CommCount kind[COMM_KINDS];
} CommCounts;

// Ranks that exchange data along one axis of the grid.
typedef struct {
    ncclComm_t nccl;
    int id; // of the axis: the same on all ranks
    int rank, size;
} Group;

enum { COMM_MAX_MESSAGE = 64 }; // bytes that a rank may give to comm_gather()

typedef struct {
    int rank, world_size;
    Group world;
    Group data;    // the data-parallel ranks; so far the whole world
    Group shard;   // those among which state is sharded: all of data, or shard_group consecutive ones
    Group replica; // those that hold the same shards: one of each shard group
    bool planning;
    cudaStream_t stream; // every collective runs here
    CommCounts counts;
    uint64_t sequence;  // a checksum of what was called on which group and in what order: the same on all ranks
    bool deterministic; // an all-reduce has the bits of a reduce-scatter
    int64_t timeout;    // seconds that this rank waits for the others
    char *message;      // device: what comm_gather() and comm_broadcast() send and receive
    char *staging;      // host, pinned: the same; what they return
    void **handles;     // of registered buffers: handles[i] with communicator handle_owners[i]
    ncclComm_t *handle_owners;
    int n_handles;
} Comm;

static inline size_t comm_type_bytes(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 4;
    }
}

// The allocator of memory that collectives work on.
static inline cudaError_t comm_allocate(void **pointer, size_t bytes) {
    return ncclMemAlloc(pointer, bytes) == ncclSuccess ? cudaSuccess : cudaErrorMemoryAllocation;
}
static inline cudaError_t comm_release(void *pointer) {
    return ncclMemFree(pointer) == ncclSuccess ? cudaSuccess : cudaErrorInvalidValue;
}

// The communicator of a group whose ranks have one color within `parent`: that of the parent if it has no more ranks,
// for each takes memory on a GPU.
static inline void comm_split(const Group *parent, int color, int key, Group *group) {
    if (group->size == parent->size)
        group->nccl = parent->nccl;
    else
        nccl_check(ncclCommSplit(parent->nccl, color, key, &group->nccl, NULL));
}

// Opens the communicators of this rank; shard_group divides world_size; with memory->planning nothing is opened, and
// `stream` is not used. A rank that waits for the others for longer than `timeout` seconds dies (NCCL's interface has
// no such setting; the CPU device, which knows what it waits for, reads it from the environment).
static inline void comm_init(Comm *comm, Memory *memory, int rank, int world_size, int shard_group, int64_t timeout,
                             cudaStream_t stream) {
    memset(comm, 0, sizeof *comm);
    comm->rank = rank;
    comm->world_size = world_size;
    comm->planning = memory->planning;
    comm->timeout = timeout;
    comm->stream = stream;
    comm->world.rank = comm->data.rank = rank;
    comm->world.size = comm->data.size = world_size;
    comm->data.id = 1;
    comm->shard.id = 2;
    comm->replica.id = 3;
    comm->shard.rank = rank % shard_group;
    comm->shard.size = shard_group;
    comm->replica.rank = rank / shard_group;
    comm->replica.size = world_size / shard_group;
    memory->allocate = comm_allocate;
    memory->release = comm_release;
    size_t message_bytes = ((size_t)world_size + 1) * COMM_MAX_MESSAGE;
    if (message_bytes < sizeof(Error)) message_bytes = sizeof(Error);
    comm->message = (char *)memory_alloc(memory, MEMORY_COMMUNICATION, message_bytes);
    if (comm->planning) return;
    char seconds[32];
    snprintf(seconds, sizeof seconds, "%lld", (long long)timeout);
    setenv("TRAIN_GPT_TIMEOUT", seconds, 1);
    cuda_check(cudaMallocHost((void **)&comm->staging, message_bytes));
    const ncclUniqueId id = bootstrap_id(rank, world_size);
    ncclResult_t status = ncclCommInitRank(&comm->world.nccl, world_size, id, rank);
    if (status != ncclSuccess)
        die("cannot join the other ranks: %s (%s)", ncclGetErrorString(status), ncclGetLastError(NULL));
    comm_split(&comm->world, 0, rank, &comm->data);
    comm_split(&comm->data, comm->replica.rank, rank, &comm->shard);
    comm_split(&comm->data, comm->shard.rank, rank, &comm->replica);
}

// Registers what collectives will work on with the communicators of sharding and of replicas, which do all of a step's
// work (the data-parallel one is that of sharding where all ranks shard together, and unused elsewhere). A buffer that
// cannot be registered serves as it is.
static inline void comm_register(Comm *comm, const Memory *memory) {
    if (comm->planning) return;
    const Group *const groups[] = {&comm->shard, &comm->replica};
    size_t count = 0;
    for (const MemoryBuffer *buffer = memory->buffers; buffer != NULL; buffer = buffer->next) count += buffer->foreign;
    comm->handles = (void **)calloc(2 * count + 1, sizeof(void *));
    comm->handle_owners = (ncclComm_t *)calloc(2 * count + 1, sizeof(ncclComm_t));
    if (comm->handles == NULL || comm->handle_owners == NULL) die("no room for %zu registered buffers", count);
    for (int g = 0; g < 2; g++)
        for (const MemoryBuffer *buffer = memory->buffers; buffer != NULL; buffer = buffer->next) {
            if (groups[g]->size == 1 || !buffer->foreign) continue;
            void *handle = NULL;
            const ncclResult_t status = ncclCommRegister(groups[g]->nccl, buffer->pointer, buffer->bytes, &handle);
            if (status != ncclSuccess || handle == NULL) continue;
            comm->handle_owners[comm->n_handles] = groups[g]->nccl;
            comm->handles[comm->n_handles++] = handle;
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Waiting

typedef struct {
    double begin; // 0: not looked yet
    int looks;
} CommPatience;

static inline double comm_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// One look at what has `status`: false if it is done. Ends the run where NCCL reports an error, and where other ranks
// have been waited for too long: a second later than a device that watches its own collectives, and knows more. Gives
// way to other threads first, then sleeps briefly.
static inline bool comm_look(const Comm *comm, CommPatience *patience, cudaError_t status, const char *what) {
    if (status == cudaSuccess) return false;
    if (patience->looks++ % 64 == 0 || status != cudaErrorNotReady) {
        const Group *const groups[] = {&comm->world, &comm->data, &comm->shard, &comm->replica};
        for (int i = 0; i < 4; i++) {
            ncclResult_t error = ncclSuccess;
            nccl_check(ncclCommGetAsyncError(groups[i]->nccl, &error));
            if (error != ncclSuccess && error != ncclInProgress)
                die("%s: %s (%s)", what, ncclGetErrorString(error), ncclGetLastError(groups[i]->nccl));
        }
        if (status != cudaErrorNotReady) die("%s: %s", what, cudaGetErrorString(status));
        const double now = comm_seconds();
        if (patience->begin == 0) patience->begin = now;
        if (comm->world_size > 1 && now - patience->begin > (double)comm->timeout + 1)
            die("%s: not there after this rank has waited %.0f s", what, now - patience->begin);
    }
    if (patience->looks < 512) {
        sched_yield();
    } else {
        const struct timespec pause = {0, 20000};
        nanosleep(&pause, NULL);
    }
    return true;
}

// Wait until everything queued on a stream, or what an event was recorded behind, is done. `what` is for messages.
// Whoever waits with cudaStreamSynchronize() for something that waits for other ranks waits for ever if one is gone; so
// nothing in a step does, and nothing copies to memory that is not pinned, which would wait likewise.
static inline void comm_wait(const Comm *comm, cudaStream_t stream, const char *what) {
    CommPatience patience = {0, 0};
    while (comm_look(comm, &patience, cudaStreamQuery(stream), what)) continue;
}

static inline void comm_wait_event(const Comm *comm, cudaEvent_t event, const char *what) {
    CommPatience patience = {0, 0};
    while (comm_look(comm, &patience, cudaEventQuery(event), what)) continue;
}

// Closes the communicators; every rank must call it.
static inline void comm_free(Comm *comm) {
    if (comm->planning) return;
    comm_wait(comm, comm->stream, "the last collectives");
    for (int i = 0; i < comm->n_handles; i++) nccl_check(ncclCommDeregister(comm->handle_owners[i], comm->handles[i]));
    Group *const groups[] = {&comm->replica, &comm->shard, &comm->data, &comm->world};
    for (int i = 0; i < 4; i++) {
        bool shared = false; // with one that is closed later
        for (int j = i + 1; j < 4; j++) shared = shared || groups[j]->nccl == groups[i]->nccl;
        if (!shared) nccl_check(ncclCommDestroy(groups[i]->nccl));
    }
    bootstrap_close();
    cuda_check(cudaFreeHost(comm->staging));
    free(comm->handles);
    free(comm->handle_owners);
}

// ---------------------------------------------------------------------------------------------------------------------
// Collectives

static inline void comm_count(Comm *comm, CommKind kind, const Group *group, uint64_t payload_bytes) {
    const uint64_t passes = kind == COMM_ALL_REDUCE ? 2 : 1, n = (uint64_t)group->size;
    const bool point_to_point = kind == COMM_SEND || kind == COMM_RECV;
    CommCount *count = &comm->counts.kind[kind];
    count->calls++;
    count->payload_bytes += payload_bytes;
    // Buffers are padded so that n divides them: the division is exact.
    count->bus_bytes += point_to_point ? payload_bytes : passes * (n - 1) * (payload_bytes / n);
    comm->sequence = random_mix(comm->sequence + payload_bytes * COMM_KINDS + (uint64_t)kind) + (uint64_t)group->id;
}

// buffer[i] = sum over the group's ranks, in place, on the communication stream.   count elements
// NCCL may sum an all-reduce in an order of its own. Where bits matter it is made of the reduce-scatter that other
// strategies use, and an all-gather; the group's ranks divide count.
static inline void comm_all_reduce(Comm *comm, const Group *group, void *buffer, size_t count, ncclDataType_t type) {
    comm_count(comm, COMM_ALL_REDUCE, group, count * comm_type_bytes(type));
    if (comm->planning) return;
    if (!comm->deterministic) {
        nccl_check(ncclAllReduce(buffer, buffer, count, type, ncclSum, group->nccl, comm->stream));
        return;
    }
    const size_t part = count / (size_t)group->size;
    char *own = (char *)buffer + (size_t)group->rank * part * comm_type_bytes(type);
    nccl_check(ncclReduceScatter(buffer, own, part, type, ncclSum, group->nccl, comm->stream));
    nccl_check(ncclAllGather(own, buffer, part, type, group->nccl, comm->stream));
}

// shard = this rank's part of the sum of `full` over the group's ranks, in rank order. full: group->size parts of
// `count` elements; shard: one, anywhere, or this rank's part of full.
static inline void comm_reduce_scatter(Comm *comm, const Group *group, void *shard, const void *full, size_t count,
                                       ncclDataType_t type) {
    comm_count(comm, COMM_REDUCE_SCATTER, group, count * (size_t)group->size * comm_type_bytes(type));
    if (comm->planning) return;
    nccl_check(ncclReduceScatter(full, shard, count, type, ncclSum, group->nccl, comm->stream));
}

// full = every rank's shard, in rank order. shard: `count` elements, anywhere, or this rank's part of full.
static inline void comm_all_gather(Comm *comm, const Group *group, void *full, const void *shard, size_t count,
                                   ncclDataType_t type) {
    comm_count(comm, COMM_ALL_GATHER, group, count * (size_t)group->size * comm_type_bytes(type));
    if (comm->planning) return;
    nccl_check(ncclAllGather(shard, full, count, type, group->nccl, comm->stream));
}

// Collectives between these two are launched together: on a GPU small ones cost their launch more than their bytes.
static inline void comm_begin_group(const Comm *comm) {
    if (!comm->planning) nccl_check(ncclGroupStart());
}
static inline void comm_end_group(const Comm *comm) {
    if (!comm->planning) nccl_check(ncclGroupEnd());
}

// Every rank's `bytes` bytes, in rank order, to every rank: returns world_size times `bytes`, valid until the next
// call. Host memory; waits until everything queued on the communication stream, and this, is done. For scalars and
// flags: counted apart.
static inline const void *comm_gather(Comm *comm, const void *mine, size_t bytes) {
    if (bytes > COMM_MAX_MESSAGE) die("a message of %zu bytes is too long", bytes);
    const size_t all_bytes = bytes * (size_t)comm->world_size;
    comm_count(comm, COMM_SCALARS, &comm->world, all_bytes);
    if (comm->planning) return NULL;
    char *all = comm->message + COMM_MAX_MESSAGE, *answers = comm->staging + COMM_MAX_MESSAGE;
    memcpy(comm->staging, mine, bytes);
    cuda_check(cudaMemcpyAsync(comm->message, comm->staging, bytes, cudaMemcpyHostToDevice, comm->stream));
    nccl_check(ncclAllGather(comm->message, all, bytes, ncclUint8, comm->world.nccl, comm->stream));
    cuda_check(cudaMemcpyAsync(answers, all, all_bytes, cudaMemcpyDeviceToHost, comm->stream));
    comm_wait(comm, comm->stream, "the collectives of this step and the scalars of all ranks");
    return answers;
}

// Gives every rank what `root` has in `data`: host memory, at most as much as an Error. Waits for it.
static inline void comm_broadcast(Comm *comm, int root, void *data, size_t bytes) {
    if (bytes > sizeof(Error)) die("a broadcast of %zu bytes is too long", bytes);
    memcpy(comm->staging, data, bytes);
    cuda_check(cudaMemcpyAsync(comm->message, comm->staging, bytes, cudaMemcpyHostToDevice, comm->stream));
    nccl_check(ncclBroadcast(comm->message, comm->message, bytes, ncclUint8, root, comm->world.nccl, comm->stream));
    cuda_check(cudaMemcpyAsync(comm->staging, comm->message, bytes, cudaMemcpyDeviceToHost, comm->stream));
    comm_wait(comm, comm->stream, "a broadcast");
    memcpy(data, comm->staging, bytes);
}

// All ranks learn whether any of them found bad input. If so, all get the message of the lowest such rank, and false.
static inline bool comm_agree(Comm *comm, Error *error) {
    const char bad = error->text[0] != '\0';
    const char *all = (const char *)comm_gather(comm, &bad, 1);
    int first = 0;
    while (first < comm->world_size && !all[first]) first++;
    if (first == comm->world_size) return true;
    comm_broadcast(comm, first, error, sizeof *error);
    return false;
}

// Returns when every rank has called it.
static inline void comm_barrier(Comm *comm) {
    const char here = 1;
    comm_gather(comm, &here, 1);
}

// Ends all ranks for a reason that all of them know: rank 0 says it, and none leaves before it is said. (A launcher
// kills the others as soon as one is gone.)
__attribute__((noreturn, format(printf, 3, 4))) static inline void comm_die_together(Comm *comm, int exit_code,
                                                                                     const char *format, ...) {
    if (comm->rank == 0) {
        fflush(stdout);
        va_list arguments;
        va_start(arguments, format);
        fprintf(stderr, "train_gpt: error: ");
        vfprintf(stderr, format, arguments);
        fprintf(stderr, "\n");
        va_end(arguments);
    }
    comm_barrier(comm);
    fflush(NULL);
    _exit(exit_code);
}

// What has been counted since `before`, a copy of comm->counts.
static inline CommCounts comm_counts_since(const Comm *comm, const CommCounts *before) {
    CommCounts since = comm->counts;
    for (int kind = 0; kind < COMM_KINDS; kind++) {
        since.kind[kind].calls -= before->kind[kind].calls;
        since.kind[kind].payload_bytes -= before->kind[kind].payload_bytes;
        since.kind[kind].bus_bytes -= before->kind[kind].bus_bytes;
    }
    return since;
}

// The sum of every rank's counts.
static inline CommCounts comm_sum_counts(Comm *comm, const CommCounts *mine) {
    CommCounts total;
    memset(&total, 0, sizeof total);
    for (int kind = 0; kind < COMM_KINDS; kind++) {
        const CommCount *all = (const CommCount *)comm_gather(comm, &mine->kind[kind], sizeof(CommCount));
        for (int r = 0; r < comm->world_size; r++) {
            total.kind[kind].calls += all[r].calls;
            total.kind[kind].payload_bytes += all[r].payload_bytes;
            total.kind[kind].bus_bytes += all[r].bus_bytes;
        }
    }
    return total;
}

#endif
