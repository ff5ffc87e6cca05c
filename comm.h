// comm.h: the grid of ranks, its communicators, and every collective, counted.
//
// Every byte that ranks exchange passes through here, so that what a step sends can be counted exactly (contract: the
// counts match the table of strategies). Collectives only ever sum; each group has the stream on which they run, and
// who waits for whom is said with events by the caller. A Comm can also be opened for planning: it then counts and
// sends nothing, for any number of ranks.
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
#include "layout.h"
#include "memory.h"
#include "random.h"
#include "trace.h"
#include "watchdog.h"

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
    int first, stride;   // its ranks in the run are first, first + stride, ...
    cudaStream_t stream; // where its collectives run
    TraceTrack track;    // where a trace shows them
    const char *what;    // the next ones are for: a unit's name, or a text that stays
} Group;

// A way between two neighbouring stages: the sender is rank 0 of a group of two. Each has a stream of its own, so that
// what is sent first arrives first and nothing else waits.
enum { FORWARD_IN, FORWARD_OUT, BACKWARD_IN, BACKWARD_OUT, CHANNELS };

enum { COMM_MAX_MESSAGE = 64 }; // bytes that a rank may give to comm_gather()

// An exchange that has been put into a stream. `event` stands behind it there.
typedef struct {
    Purpose purpose;
    int kind;
    uint64_t payload_bytes;
    int first, stride, size; // of the group
    cudaStream_t stream;
    cudaEvent_t event;
} CommCall;

enum {
    COMM_CALLS = 1024,     // that are remembered
    COMM_GRACE_SECONDS = 2 // that a device which watches its own collectives, and knows more, is given to say so
};

typedef struct {
    int rank, world_size;
    Grid grid;
    int pipeline_rank; // this rank's stage
    Group world;
    Group data;    // ranks that hold the same slices of the same stage
    Group shard;   // of those, the ones among which state is sharded: all, or shard_group consecutive ones
    Group replica; // of those, the ones that hold the same shards: one of each shard group
    Group tensor;  // ranks that hold slices of the same layers
    Group tied;    // the first and the last stage, who both hold wte; size 1 on other stages, and without a pipeline
    Group channels[CHANNELS]; // to and from the neighbouring stages; size 0: there is no such
    bool planning;
    cudaStream_t stream; // world, data, shard, replica, tied
    CommCounts counts;
    uint64_t
        sequence; // a checksum of what was called on which group and in what order: the same on all ranks of a stage
    bool deterministic; // an all-reduce has the bits of a reduce-scatter
    int64_t timeout;    // seconds that this rank waits for the others
    char *message;      // device: what comm_gather() and comm_broadcast() send and receive
    char *staging;      // host, pinned: the same; what they return
    void **handles;     // of registered buffers: handles[i] with communicator handle_owners[i]
    ncclComm_t *handle_owners;
    int n_handles;
    const char *phase; // of the run, and the step in it: for messages
    int64_t step;
    CommCall *calls;           // (COMM_CALLS): call n, counted from 0, is calls[n % COMM_CALLS]
    uint64_t issued, recorded; // calls put into streams; calls whose events are, too
    uint64_t oldest;           // the first that may not be done
    bool grouped;              // between comm_begin_group() and comm_end_group()
    Trace *trace;              // of the step at hand, or NULL
    int span;                  // of the call at hand in it
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

static inline Group comm_group(int id, int rank, int size, int first, int stride, cudaStream_t stream) {
    Group group;
    memset(&group, 0, sizeof group);
    group.id = id;
    group.rank = rank;
    group.size = size;
    group.first = first;
    group.stride = stride;
    group.stream = stream;
    group.track = TRACE_COMMUNICATION;
    group.what = "all ranks";
    return group;
}

// What comes next is part of this: "step", 17. phase: a text that stays; step -1: none.
static inline void comm_phase(Comm *comm, const char *phase, int64_t step) {
    comm->phase = phase;
    comm->step = step;
}

// The next collectives of data-parallel ranks are for this unit.
static inline void comm_name(Comm *comm, const char *unit) {
    comm->data.what = comm->shard.what = comm->replica.what = unit;
}

// Opens the ways between stages. wrap: from the last to the first too, where a rank holds several stages. A rank takes
// part in two links, to its left and to its right, so they are opened in three turns: links of even and of odd number,
// and the last.
static inline void comm_open_channels(Comm *comm, bool wrap) {
    const int P = comm->grid.pipeline, p = comm->pipeline_rank, column = comm->rank % (comm->world_size / P);
    for (int direction = 0; direction < 2 && P > 1; direction++)
        for (int turn = 0; turn < 3; turn++) {
            const int right = p == P - 1 ? 2 : p % 2, left_link = p == 0 ? P - 1 : p - 1;
            const int left = left_link == P - 1 ? 2 : left_link % 2;
            const bool at_right = turn == right, exists = turn < 2 || wrap; // this rank begins the link
            const bool takes_part = exists && (at_right || turn == left);
            const bool sends = at_right == (direction == 0);
            const int link = at_right ? p : left_link, kind = 2 * direction + (sends ? 1 : 0); // FORWARD_IN, ...
            Group *channel = &comm->channels[kind];
            if (takes_part) {
                const int ranks = comm->world_size / P; // of a stage
                *channel = comm_group(8 + kind, sends ? 0 : 1, 2, column + (link == P - 1 ? 0 : link * ranks),
                                      link == P - 1 ? (P - 1) * ranks : ranks, NULL);
                channel->track = (TraceTrack)(TRACE_CHANNELS + kind);
                channel->what = "stage boundary";
            }
            if (comm->planning) continue;
            const int color = takes_part ? link * (comm->world_size / P) + column : NCCL_SPLIT_NOCOLOR;
            ncclComm_t opened = NULL;
            nccl_check(ncclCommSplit(comm->world.nccl, color, sends ? 0 : 1, &opened, NULL));
            if (!takes_part) continue;
            channel->nccl = opened;
            cuda_check(cudaStreamCreateWithFlags(&channel->stream, cudaStreamNonBlocking));
        }
}

// What a run chooses.
typedef struct {
    Grid grid;
    int shard_group;      // divides grid.data
    bool pipeline_chunks; // a rank holds several stages
    int64_t timeout;      // seconds that a rank waits for the others
    bool deterministic;   // an all-reduce has the bits of a reduce-scatter
} CommOptions;

// Opens the communicators of this rank; with memory->planning nothing is opened, and the streams are not used:
// `compute` for what tensor ranks exchange, `communication` for the rest. A rank that waits for the others for longer
// than `timeout` seconds dies (NCCL's interface has no such setting; the CPU device, which knows what and whom it waits
// for, reads it from the environment).
static inline void comm_init(Comm *comm, Memory *memory, int rank, const CommOptions *options, cudaStream_t compute,
                             cudaStream_t communication) {
    memset(comm, 0, sizeof *comm);
    const Grid grid = options->grid;
    const int shard_group = options->shard_group, world_size = grid.tensor * grid.data * grid.pipeline;
    const int tensor_rank = rank % grid.tensor, data_rank = rank / grid.tensor % grid.data;
    comm->rank = rank;
    comm->world_size = world_size;
    comm->grid = grid;
    comm->pipeline_rank = rank / grid.tensor / grid.data;
    comm->planning = memory->planning;
    comm->stream = communication;
    const int T = grid.tensor, G = shard_group, row = rank - tensor_rank, column = row - data_rank * T + tensor_rank;
    comm->world = comm_group(0, rank, world_size, 0, 1, communication);
    comm->data = comm_group(1, data_rank, grid.data, column, T, communication);
    comm->shard = comm_group(2, data_rank % G, G, column + data_rank / G * G * T, T, communication);
    comm->replica = comm_group(3, data_rank / G, grid.data / G, column + data_rank % G * T, G * T, communication);
    comm->tensor = comm_group(4, tensor_rank, T, row, 1, compute);
    comm->tensor.track = TRACE_TENSOR;
    const bool first = comm->pipeline_rank == 0, last = comm->pipeline_rank == grid.pipeline - 1;
    const bool is_tied = grid.pipeline > 1 && (first || last);
    const int stage_ranks = T * grid.data;
    comm->tied = comm_group(5, is_tied && last ? 1 : 0, is_tied ? 2 : 1, rank % stage_ranks,
                            (grid.pipeline - 1) * stage_ranks, communication);
    comm->timeout = options->timeout;
    comm->deterministic = options->deterministic;
    comm_phase(comm, "start", -1);
    comm->tensor.what = comm->tied.what = "wte";
    memory->allocate = comm_allocate;
    memory->release = comm_release;
    size_t message_bytes = ((size_t)world_size + 1) * COMM_MAX_MESSAGE;
    if (message_bytes < sizeof(Error)) message_bytes = sizeof(Error);
    comm->message = (char *)memory_alloc(memory, MEMORY_COMMUNICATION, message_bytes);
    if (comm->planning) {
        comm_open_channels(comm, options->pipeline_chunks);
        return;
    }
    char seconds[32];
    snprintf(seconds, sizeof seconds, "%lld", (long long)options->timeout);
    setenv("TRAIN_GPT_TIMEOUT", seconds, 1);
    cuda_check(cudaMallocHost((void **)&comm->staging, message_bytes));
    comm->calls = (CommCall *)calloc(COMM_CALLS, sizeof(CommCall));
    if (comm->calls == NULL) die("no memory for what the last collectives were");
    for (int i = 0; i < COMM_CALLS; i++)
        cuda_check(cudaEventCreateWithFlags(&comm->calls[i].event, cudaEventDisableTiming));
    const ncclUniqueId id = bootstrap_id(rank, world_size);
    ncclResult_t status = ncclCommInitRank(&comm->world.nccl, world_size, id, rank);
    if (status != ncclSuccess)
        die("cannot join the other ranks: %s (%s)", ncclGetErrorString(status), ncclGetLastError(NULL));
    // Ranks with the same color come together.
    comm_split(&comm->world, column, rank, &comm->data);
    comm_split(&comm->data, comm->replica.rank, rank, &comm->shard);
    comm_split(&comm->data, comm->shard.rank, rank, &comm->replica);
    comm_split(&comm->world, row, rank, &comm->tensor);
    if (grid.pipeline > 1) {
        const int color = is_tied ? rank % stage_ranks : NCCL_SPLIT_NOCOLOR;
        nccl_check(ncclCommSplit(comm->world.nccl, color, rank, &comm->tied.nccl, NULL));
    }
    comm_open_channels(comm, options->pipeline_chunks);
    watchdog_end(); // the ranks have met
}

// The groups of this rank that have a communicator, those last whose communicator others may share.
enum { COMM_GROUPS = 6 + CHANNELS };
static inline int comm_groups(const Comm *comm, const Group **groups) {
    const Group *const all[COMM_GROUPS] = {
        &comm->channels[0], &comm->channels[1], &comm->channels[2], &comm->channels[3], &comm->tied,
        &comm->tensor,      &comm->replica,     &comm->shard,       &comm->data,        &comm->world};
    int n = 0;
    for (int i = 0; i < COMM_GROUPS; i++)
        if (all[i]->nccl != NULL) groups[n++] = all[i];
    return n;
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
    Patience wait; // for call `oldest`
    uint64_t oldest;
    int looks;
} CommPatience;

static inline double comm_seconds(void) {
    return watchdog_clock();
}

// Passes over the calls that are done: comm->oldest is not, or is comm->recorded. Each has a stream's order only, so
// later ones may be done as well.
static inline void comm_pass_done(Comm *comm) {
    if (comm->issued - comm->oldest > COMM_CALLS) comm->oldest = comm->issued - COMM_CALLS;
    while (comm->oldest < comm->recorded && cudaEventQuery(comm->calls[comm->oldest % COMM_CALLS].event) == cudaSuccess)
        comm->oldest++;
}

// The run ends, as call comm->oldest has not been done for so many seconds. NCCL's communicators are not aborted: that
// would wait for NCCL's own threads, and the end of the process frees all that they hold.
static inline void comm_say(const Comm *comm, const char *happened, const char *what, double waited) {
    const CommCall *call = &comm->calls[comm->oldest % COMM_CALLS];
    char purpose[PURPOSE_TEXT], stride[32] = "", text[3 * PURPOSE_TEXT];
    if (call->stride > 1 && call->size > 2) snprintf(stride, sizeof stride, " in steps of %d", call->stride);
    snprintf(text, sizeof text, "%s: %s of %.3g MB: waited %.0f s for ranks %d %s %d%s, and so for %s",
             purpose_text(&call->purpose, purpose), comm_kind_name(call->kind), (double)call->payload_bytes / 1e6,
             waited, call->first, call->size > 2 ? "to" : "and", call->first + (call->size - 1) * call->stride, stride,
             what);
    error_say(happened, text, __FILE__, __LINE__);
}

// One look at what has `status`: false if it is done. Ends the run where NCCL reports an error, and where a collective
// has been waited for too long. Gives way to other threads first, then sleeps briefly.
static inline bool comm_look(Comm *comm, CommPatience *patience, cudaError_t status, const char *what) {
    if (status == cudaSuccess) return false;
    if (patience->looks++ % 64 == 0 || status != cudaErrorNotReady) {
        const Group *groups[COMM_GROUPS];
        const int n = comm_groups(comm, groups);
        for (int i = 0; i < n; i++) {
            ncclResult_t error = ncclSuccess;
            nccl_check(ncclCommGetAsyncError(groups[i]->nccl, &error));
            if (error != ncclSuccess && error != ncclInProgress) {
                const Purpose purpose = {what, comm->phase, comm->step};
                char text[PURPOSE_TEXT];
                die("%s: %s (%s)", purpose_text(&purpose, text), ncclGetErrorString(error),
                    ncclGetLastError(groups[i]->nccl));
            }
        }
        if (status != cudaErrorNotReady) die("%s: %s", what, cudaGetErrorString(status));
        comm_pass_done(comm);
        const bool waits = comm->oldest < comm->recorded; // else this rank computes
        if (patience->looks == 1 || !waits || patience->oldest != comm->oldest) {
            patience->wait = patience_begin();
            patience->oldest = comm->oldest;
        }
        const double waited = patience_waited(&patience->wait);
        if (comm->world_size > 1 && waited > (double)(comm->timeout + COMM_GRACE_SECONDS)) {
            comm_say(comm, "failed", what, waited);
            _exit(EXIT_RUN);
        }
        // Later than a device that knows whom it waits for, and whether another rank has said so.
        if (watchdog_asked(waited, 0.5)) comm_say(comm, "was asked to stop while it waited", what, waited);
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
static inline void comm_wait(Comm *comm, cudaStream_t stream, const char *what) {
    CommPatience patience = {{0, 0}, 0, 0};
    while (comm_look(comm, &patience, cudaStreamQuery(stream), what)) continue;
}

static inline void comm_wait_event(Comm *comm, cudaEvent_t event, const char *what) {
    CommPatience patience = {{0, 0}, 0, 0};
    while (comm_look(comm, &patience, cudaEventQuery(event), what)) continue;
}

// Waits for everything that this rank has been given to exchange.
static inline void comm_finish(Comm *comm) {
    comm_wait(comm, comm->stream, "the last collectives");
    for (int i = 0; i < CHANNELS; i++)
        if (comm->channels[i].size > 0) comm_wait(comm, comm->channels[i].stream, "the neighbouring stages");
}

// Closes the communicators; every rank must call it.
static inline void comm_free(Comm *comm) {
    if (comm->planning) return;
    comm_finish(comm);
    watchdog_begin("has not parted from the other ranks", (double)comm->timeout);
    for (int i = 0; i < comm->n_handles; i++) nccl_check(ncclCommDeregister(comm->handle_owners[i], comm->handles[i]));
    const Group *groups[COMM_GROUPS];
    const int n = comm_groups(comm, groups);
    for (int i = 0; i < n; i++) {
        bool shared = false; // with one that is closed later
        for (int j = i + 1; j < n; j++) shared = shared || groups[j]->nccl == groups[i]->nccl;
        if (!shared) nccl_check(ncclCommDestroy(groups[i]->nccl));
    }
    for (int i = 0; i < CHANNELS; i++)
        if (comm->channels[i].size > 0) cuda_check(cudaStreamDestroy(comm->channels[i].stream));
    bootstrap_close();
    watchdog_end();
    for (int i = 0; i < COMM_CALLS; i++) cuda_check(cudaEventDestroy(comm->calls[i].event));
    cuda_check(cudaFreeHost(comm->staging));
    free(comm->calls);
    free(comm->handles);
    free(comm->handle_owners);
}

// ---------------------------------------------------------------------------------------------------------------------
// Collectives

// Before and after a call of NCCL. The first that ranks make on a communicator connects them, and waits meanwhile.
static inline void comm_issue(Comm *comm, CommKind kind, const Group *group, uint64_t payload_bytes) {
    CommCall *call = &comm->calls[comm->issued++ % COMM_CALLS];
    Purpose *purpose = purpose_now();
    purpose->what = group->what;
    purpose->phase = comm->phase;
    purpose->step = comm->step;
    call->purpose = *purpose;
    call->kind = kind;
    call->payload_bytes = payload_bytes;
    call->first = group->first;
    call->stride = group->stride;
    call->size = group->size;
    call->stream = group->stream;
    watchdog_begin("a call of NCCL has not returned", (double)(comm->timeout + COMM_GRACE_SECONDS));
}

static inline void comm_issued(Comm *comm) {
    if (comm->grouped) return; // it is put into its stream when the group ends
    watchdog_end();
    for (; comm->recorded < comm->issued; comm->recorded++) {
        const CommCall *call = &comm->calls[comm->recorded % COMM_CALLS];
        cuda_check(cudaEventRecord(call->event, call->stream));
    }
}

// Counts a call. Unless the run is only planned, returns true: it is to be made, between comm_count() and comm_done().
static inline bool comm_count(Comm *comm, CommKind kind, const Group *group, uint64_t payload_bytes) {
    const uint64_t passes = kind == COMM_ALL_REDUCE ? 2 : 1, n = (uint64_t)group->size;
    const bool point_to_point = kind == COMM_SEND || kind == COMM_RECV;
    CommCount *count = &comm->counts.kind[kind];
    count->calls++;
    count->payload_bytes += payload_bytes;
    // (n-1)/n of it, without overflow; flat buffers are padded so that n divides them.
    const uint64_t share = (n - 1) * (payload_bytes / n) + (n - 1) * (payload_bytes % n) / n;
    count->bus_bytes += point_to_point ? payload_bytes : passes * share;
    comm->sequence = random_mix(comm->sequence + payload_bytes * COMM_KINDS + (uint64_t)kind) + (uint64_t)group->id;
    if (comm->planning) return false;
    comm->span = trace_begin(comm->trace, group->track, group->stream, "%s %s, %.3g MB", comm_kind_name(kind),
                             group->what, (double)payload_bytes / 1e6);
    comm_issue(comm, kind, group, payload_bytes);
    return true;
}

static inline void comm_done(Comm *comm, const Group *group) {
    comm_issued(comm);
    trace_end(comm->trace, comm->span, group->stream);
}

// buffer[i] = sum over the group's ranks, in place, on the group's stream.   count elements
// NCCL may sum an all-reduce in an order of its own. Where bits matter it is made of the reduce-scatter that other
// strategies use, and an all-gather, if the group's ranks divide count.
static inline void comm_all_reduce(Comm *comm, const Group *group, void *buffer, size_t count, ncclDataType_t type) {
    if (!comm_count(comm, COMM_ALL_REDUCE, group, count * comm_type_bytes(type))) return;
    const size_t part = count / (size_t)group->size;
    if (!comm->deterministic || part * (size_t)group->size != count) {
        nccl_check(ncclAllReduce(buffer, buffer, count, type, ncclSum, group->nccl, group->stream));
    } else {
        char *own = (char *)buffer + (size_t)group->rank * part * comm_type_bytes(type);
        nccl_check(ncclReduceScatter(buffer, own, part, type, ncclSum, group->nccl, group->stream));
        nccl_check(ncclAllGather(own, buffer, part, type, group->nccl, group->stream));
    }
    comm_done(comm, group);
}

// shard = this rank's part of the sum of `full` over the group's ranks, in rank order. full: group->size parts of
// `count` elements; shard: one, anywhere, or this rank's part of full.
static inline void comm_reduce_scatter(Comm *comm, const Group *group, void *shard, const void *full, size_t count,
                                       ncclDataType_t type) {
    if (!comm_count(comm, COMM_REDUCE_SCATTER, group, count * (size_t)group->size * comm_type_bytes(type))) return;
    nccl_check(ncclReduceScatter(full, shard, count, type, ncclSum, group->nccl, group->stream));
    comm_done(comm, group);
}

// full = every rank's shard, in rank order. shard: `count` elements, anywhere, or this rank's part of full.
static inline void comm_all_gather(Comm *comm, const Group *group, void *full, const void *shard, size_t count,
                                   ncclDataType_t type) {
    if (!comm_count(comm, COMM_ALL_GATHER, group, count * (size_t)group->size * comm_type_bytes(type))) return;
    nccl_check(ncclAllGather(shard, full, count, type, group->nccl, group->stream));
    comm_done(comm, group);
}

// Sends to, or receives from, the neighbouring stage at the other end of a channel.   count elements
static inline void comm_send(Comm *comm, const Group *channel, const void *buffer, size_t count, ncclDataType_t type) {
    if (!comm_count(comm, COMM_SEND, channel, count * comm_type_bytes(type))) return;
    nccl_check(ncclSend(buffer, count, type, 1, channel->nccl, channel->stream));
    comm_done(comm, channel);
}

static inline void comm_recv(Comm *comm, const Group *channel, void *buffer, size_t count, ncclDataType_t type) {
    if (!comm_count(comm, COMM_RECV, channel, count * comm_type_bytes(type))) return;
    nccl_check(ncclRecv(buffer, count, type, 0, channel->nccl, channel->stream));
    comm_done(comm, channel);
}

// Collectives between these two are launched together: on a GPU small ones cost their launch more than their bytes.
static inline void comm_begin_group(Comm *comm) {
    if (comm->planning) return;
    comm->grouped = true;
    nccl_check(ncclGroupStart());
}
static inline void comm_end_group(Comm *comm) {
    if (comm->planning) return;
    nccl_check(ncclGroupEnd());
    comm->grouped = false;
    comm_issued(comm);
}

// Every rank's `bytes` bytes, in rank order, to every rank: returns world_size times `bytes`, valid until the next
// call. Host memory; waits until everything queued on the communication stream, and this, is done. For scalars and
// flags: counted apart. Their purpose is that of comm->world, which this resets.
static inline const void *comm_gather(Comm *comm, const void *mine, size_t bytes) {
    if (bytes > COMM_MAX_MESSAGE) die("a message of %zu bytes is too long", bytes);
    const size_t all_bytes = bytes * (size_t)comm->world_size;
    if (!comm_count(comm, COMM_SCALARS, &comm->world, all_bytes)) return NULL;
    char *all = comm->message + COMM_MAX_MESSAGE, *answers = comm->staging + COMM_MAX_MESSAGE;
    memcpy(comm->staging, mine, bytes);
    cuda_check(cudaMemcpyAsync(comm->message, comm->staging, bytes, cudaMemcpyHostToDevice, comm->stream));
    nccl_check(ncclAllGather(comm->message, all, bytes, ncclUint8, comm->world.nccl, comm->stream));
    comm_done(comm, &comm->world);
    cuda_check(cudaMemcpyAsync(answers, all, all_bytes, cudaMemcpyDeviceToHost, comm->stream));
    comm_wait(comm, comm->stream, "the collectives of this step and the scalars of all ranks");
    comm->world.what = "all ranks";
    return answers;
}

// Gives every rank what `root` has in `data`: host memory, a piece after the other. Waits for it.
static inline void comm_broadcast(Comm *comm, int root, void *data, size_t bytes) {
    for (size_t done = 0; done < bytes; done += sizeof(Error)) {
        const size_t piece = bytes - done < sizeof(Error) ? bytes - done : sizeof(Error);
        char *at = (char *)data + done;
        memcpy(comm->staging, at, piece);
        cuda_check(cudaMemcpyAsync(comm->message, comm->staging, piece, cudaMemcpyHostToDevice, comm->stream));
        comm_issue(comm, COMM_SCALARS, &comm->world, piece);
        nccl_check(ncclBroadcast(comm->message, comm->message, piece, ncclUint8, root, comm->world.nccl, comm->stream));
        comm_issued(comm);
        cuda_check(cudaMemcpyAsync(comm->staging, comm->message, piece, cudaMemcpyDeviceToHost, comm->stream));
        comm_wait(comm, comm->stream, "a broadcast");
        memcpy(at, comm->staging, piece);
    }
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
