// nccl.h (CPU): the part of NCCL that the program uses, with NCCL's names and meaning, over MPI and shared memory.
//
//  - A communicator of one rank moves data and never starts MPI. Otherwise the ranks are those of MPI_COMM_WORLD, which
//    is started by the first ncclCommInitRank() and ended with the last communicator.
//  - A collective runs on the stream it is given, in that stream's order. Collectives of one communicator run in the
//    order of their calls, whatever their streams.
//  - Reductions go in rank order (rank_sum.h), so all-reduce has the bits of reduce-scatter and all-gather, and so has
//    every run of them. MPI's own reductions keep no order; here MPI only carries bytes.
//  - Ranks of one node exchange through shared memory (shared_memory.h), unless TRAIN_GPT_SHARED_MEMORY=0. The bits are
//    the same. Sends and receives always use MPI.
//  - Nothing is allocated here once a communicator exists (MPI itself may). Waiting ranks give way to others, and end
//    the process when they have waited for the time set by cpu_nccl_set_timeout(), saying what they wait in, from
//    purpose_now() at the call, and for whom (peers.h).
#ifndef CPU_NCCL_H
#define CPU_NCCL_H

#include <cuda_runtime.h>
#include <stdarg.h>
#include "mpi_exchange.h"
#include "shared_memory.h"

#define NCCL_MAJOR 2
#define NCCL_MINOR 19
#define NCCL_VERSION_CODE (NCCL_MAJOR * 10000 + NCCL_MINOR * 100) // the interface that this is a part of
#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_SPLIT_NOCOLOR -1

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;

typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef struct ncclConfig ncclConfig_t; // there is nothing to configure: pass NULL

enum { NCCL_GROUP_CALLS = 256 }; // sends and receives in a group

typedef struct ncclComm {
    int rank, ranks;
    int *members;        // (ranks), their ranks in the run; NULL: one rank
    MpiExchange mpi;     // open if there are several ranks
    SharedMemory shared; // open if shared.ranks > 0: then collectives go through it
    CpuTicket last;      // of the last call
    int async_error;     // ncclResult_t of a worker; atomic
    char message[512];   // its text, complete before async_error is set
} * ncclComm_t;

// ------------------------------------------------------------------------------------------------------------ errors

static inline const char *ncclGetErrorString(ncclResult_t status) {
    static const char *const texts[] = {"no error",         "unhandled cuda error", "system error", "internal error",
                                        "invalid argument", "invalid usage",        "remote error", "in progress"};
    return (unsigned)status < sizeof texts / sizeof texts[0] ? texts[status] : "unknown error";
}

enum { NCCL_TEXT = 256 };
static inline char *nccl_last_text(void) {
    static __thread char text[NCCL_TEXT] = "";
    return text;
}

// What went wrong last: in a worker of `comm`, or in a call of this thread.
static inline const char *ncclGetLastError(ncclComm_t comm) {
    if (comm != NULL && __atomic_load_n(&comm->async_error, __ATOMIC_ACQUIRE) != ncclSuccess) return comm->message;
    return nccl_last_text();
}

__attribute__((format(printf, 2, 3))) static inline ncclResult_t nccl_fail(ncclResult_t status, const char *format,
                                                                           ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(nccl_last_text(), NCCL_TEXT, format, arguments);
    va_end(arguments);
    return status;
}

// A failed MPI call inside a collective: on a worker the communicator keeps it for ncclCommGetAsyncError().
static inline cudaError_t nccl_mpi_failed(ncclComm_t comm, int code, CollectiveKind kind, const Purpose *purpose) {
    char text[MPI_MAX_ERROR_STRING] = "", what[PURPOSE_TEXT];
    int length = 0;
    MPI_Error_string(code, text, &length);
    if (__atomic_load_n(&comm->async_error, __ATOMIC_ACQUIRE) == ncclSuccess) {
        snprintf(comm->message, sizeof comm->message, "%s: %s failed on rank %d of %d: %.180s",
                 purpose_text(purpose, what), collective_name(kind), comm->rank, comm->ranks, text);
        __atomic_store_n(&comm->async_error, ncclRemoteError, __ATOMIC_RELEASE);
    }
    return cudaErrorLaunchFailure;
}

static inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *status) {
    if (comm == NULL || status == NULL) return nccl_fail(ncclInvalidArgument, "communicator or result is NULL");
    *status = (ncclResult_t)__atomic_load_n(&comm->async_error, __ATOMIC_ACQUIRE);
    return ncclSuccess;
}

// How long ranks wait for one another inside a collective before the process ends; 300 s unless set.
static inline void cpu_nccl_set_timeout(double seconds) {
    *collective_timeout() = seconds;
}

// ------------------------------------------------------------------------------------------------------ communicators

static inline ncclResult_t ncclGetVersion(int *version) {
    if (version == NULL) return nccl_fail(ncclInvalidArgument, "version is NULL");
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

// Constant: it stands for MPI_COMM_WORLD.
static inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    if (id == NULL) return nccl_fail(ncclInvalidArgument, "id is NULL");
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "MPI_COMM_WORLD");
    return ncclSuccess;
}

static inline ncclResult_t ncclMemAlloc(void **pointer, size_t bytes) {
    return cudaMalloc(pointer, bytes) == cudaSuccess
               ? ncclSuccess
               : nccl_fail(ncclUnhandledCudaError, "no room for %zu bytes", bytes);
}

static inline ncclResult_t ncclMemFree(void *pointer) {
    return cudaFree(pointer) == cudaSuccess ? ncclSuccess : nccl_fail(ncclUnhandledCudaError, "cudaFree failed");
}

// Registration is a hint for network hardware: nothing to do.
static inline ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t bytes, void **handle) {
    (void)bytes;
    if (comm == NULL || buffer == NULL || handle == NULL) return nccl_fail(ncclInvalidArgument, "argument is NULL");
    *handle = buffer;
    return ncclSuccess;
}

static inline ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
    return comm == NULL || handle == NULL ? nccl_fail(ncclInvalidArgument, "argument is NULL") : ncclSuccess;
}

// Communicators that use MPI and exist now.
static inline int *nccl_mpi_users(void) {
    static int users = 0;
    return &users;
}

// A communicator over `mpi`, which it takes over; MPI_COMM_NULL: of one rank.
static inline ncclResult_t nccl_open(ncclComm_t *opened, MPI_Comm mpi, int rank, int ranks) {
    ncclComm_t comm = (ncclComm_t)calloc(1, sizeof *comm);
    if (comm == NULL) return nccl_fail(ncclSystemError, "no memory for a communicator");
    comm->rank = rank;
    comm->ranks = ranks;
    comm->mpi.comm = MPI_COMM_NULL;
    if (mpi != MPI_COMM_NULL) {
        comm->members = (int *)calloc((size_t)ranks, sizeof *comm->members);
        if (comm->members == NULL) return nccl_fail(ncclSystemError, "no memory for the numbers of %d ranks", ranks);
        MPI_Allgather(&peers_all()->rank, 1, MPI_INT, comm->members, 1, MPI_INT, mpi);
        if (!mpi_exchange_open(&comm->mpi, mpi, comm->members, rank, ranks) ||
            (!shared_open(&comm->shared, mpi, comm->members, rank, ranks) && !mpi_exchange_stage(&comm->mpi)))
            return nccl_fail(ncclSystemError, "no memory for a communicator of %d ranks", ranks);
        ++*nccl_mpi_users();
    }
    *opened = comm;
    return ncclSuccess;
}

// The communicator of all ranks; all of them call this. With MPI, ranks and rank have to be those of MPI_COMM_WORLD.
static inline ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    (void)id;
    if (comm == NULL) return nccl_fail(ncclInvalidArgument, "comm is NULL");
    *comm = NULL;
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return nccl_fail(ncclInvalidArgument, "rank %d of %d does not exist", rank, ranks);
    if (ranks == 1) return nccl_open(comm, MPI_COMM_NULL, 0, 1);
    if (ranks > MPI_EXCHANGE_MESSAGES / 2)
        return nccl_fail(ncclInvalidArgument, "%d ranks are more than %d", ranks, MPI_EXCHANGE_MESSAGES / 2);
    int started = 0, ended = 0, level = 0, world_ranks = 0, world_rank = 0;
    MPI_Finalized(&ended);
    if (ended) return nccl_fail(ncclInvalidUsage, "MPI has ended with the last communicator and cannot start again");
    MPI_Initialized(&started);
    if (started)
        MPI_Query_thread(&level);
    else if (MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level) != MPI_SUCCESS)
        return nccl_fail(ncclSystemError, "MPI does not start");
    if (level < MPI_THREAD_MULTIPLE)
        return nccl_fail(ncclSystemError, "this MPI does not let several threads use it (MPI_THREAD_MULTIPLE)");
    MPI_Comm_size(MPI_COMM_WORLD, &world_ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    if (world_ranks != ranks || world_rank != rank)
        return nccl_fail(ncclInvalidArgument, "rank %d of %d asked for, but MPI started this process as %d of %d", rank,
                         ranks, world_rank, world_ranks);
    MPI_Comm mpi;
    if (MPI_Comm_dup(MPI_COMM_WORLD, &mpi) != MPI_SUCCESS) return nccl_fail(ncclSystemError, "MPI_Comm_dup failed");
    if (peers_all()->ranks == 0 && !peers_open(mpi, rank, ranks))
        return nccl_fail(ncclSystemError, "no memory for the names of %d hosts", ranks);
    return nccl_open(comm, mpi, rank, ranks);
}

// Ranks of one color get a communicator of their own, ordered by key; NCCL_SPLIT_NOCOLOR: none.
static inline ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *split, ncclConfig_t *config) {
    if (comm == NULL || split == NULL || config != NULL)
        return nccl_fail(ncclInvalidArgument, "comm or split is NULL, or config is not");
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR) return nccl_fail(ncclInvalidArgument, "color %d is negative", color);
    *split = NULL;
    if (comm->ranks == 1) return color < 0 ? ncclSuccess : nccl_open(split, MPI_COMM_NULL, 0, 1);
    cpu_ticket_wait(&comm->last);
    MPI_Comm mpi;
    if (MPI_Comm_split(comm->mpi.comm, color < 0 ? MPI_UNDEFINED : color, key, &mpi) != MPI_SUCCESS)
        return nccl_fail(ncclSystemError, "MPI_Comm_split failed");
    if (mpi == MPI_COMM_NULL) return ncclSuccess;
    int rank, ranks;
    MPI_Comm_rank(mpi, &rank);
    MPI_Comm_size(mpi, &ranks);
    if (ranks == 1) MPI_Comm_free(&mpi); // which sets it to MPI_COMM_NULL
    return nccl_open(split, mpi, rank, ranks);
}

static inline ncclResult_t ncclCommCount(const ncclComm_t comm, int *ranks) {
    if (comm == NULL || ranks == NULL) return nccl_fail(ncclInvalidArgument, "argument is NULL");
    *ranks = comm->ranks;
    return ncclSuccess;
}

static inline ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    if (comm == NULL || rank == NULL) return nccl_fail(ncclInvalidArgument, "argument is NULL");
    *rank = comm->rank;
    return ncclSuccess;
}

// Finishes the communicator's work first; all its ranks call this.
static inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (comm == NULL) return nccl_fail(ncclInvalidArgument, "comm is NULL");
    cpu_ticket_wait(&comm->last);
    if (comm->mpi.comm != MPI_COMM_NULL) {
        shared_close(&comm->shared);
        mpi_exchange_close(&comm->mpi);
        if (--*nccl_mpi_users() == 0) {
            peers_close();
            MPI_Finalize();
        }
    }
    free(comm->members);
    free(comm);
    return ncclSuccess;
}

// For a process about to end because of an error: waits for nobody, so gives nothing back, as a worker may be at work.
static inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
    return comm == NULL ? nccl_fail(ncclInvalidArgument, "comm is NULL") : ncclSuccess;
}

// -------------------------------------------------------------------------------------------------------- collectives

// What goes into a stream's queue.
typedef struct {
    ncclComm_t comm;
    Collective collective;
} NcclCall;

static inline cudaError_t nccl_execute(void *argument) {
    const NcclCall *call = (const NcclCall *)argument;
    ncclComm_t comm = call->comm;
    const Collective *c = &call->collective;
    int code = MPI_SUCCESS;
    if (comm->ranks == 1) {
        if (c->recv != c->send) memcpy(c->recv, c->send, c->count * rank_sum_type_bytes(c->type));
    } else if (comm->shared.ranks > 0) {
        shared_collective(&comm->shared, c);
    } else {
        code = mpi_exchange_collective(&comm->mpi, c);
    }
    return code == MPI_SUCCESS ? cudaSuccess : nccl_mpi_failed(comm, code, c->kind, &c->purpose);
}

// Puts work of a communicator into a stream, behind the communicator's earlier work in whatever stream that is.
static inline ncclResult_t nccl_submit(ncclComm_t comm, cudaStream_t stream, CpuFunction function, void *arguments,
                                       size_t arguments_bytes) {
    cudaError_t status = cpu_stream_wait(stream, comm->last);
    if (status == cudaSuccess) status = cpu_stream_run(stream, function, arguments, arguments_bytes);
    if (status == cudaSuccess) status = cpu_sticky_error();
    comm->last = cpu_stream_ticket(stream);
    if (status == cudaSuccess) return ncclSuccess;
    if (__atomic_load_n(&comm->async_error, __ATOMIC_ACQUIRE) != ncclSuccess)
        return nccl_fail((ncclResult_t)comm->async_error, "%s", comm->message);
    return nccl_fail(ncclUnhandledCudaError, "a stream failed: %s", cudaGetErrorString(status));
}

// Checks the arguments of a collective and submits it.
static inline ncclResult_t nccl_collective(CollectiveKind kind, const void *send, void *recv, size_t count,
                                           ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                                           cudaStream_t stream) {
    const char *name = collective_name(kind);
    if (comm == NULL) return nccl_fail(ncclInvalidArgument, "%s: communicator is NULL", name);
    size_t size = rank_sum_type_bytes(type);
    if (size == 0) return nccl_fail(ncclInvalidArgument, "%s: type %d is not supported", name, (int)type);
    if ((unsigned)op >= ncclAvg) return nccl_fail(ncclInvalidArgument, "%s: operation %d is not supported", name, op);
    if (root < 0 || root >= comm->ranks)
        return nccl_fail(ncclInvalidArgument, "%s: root %d is not one of %d ranks", name, root, comm->ranks);
    if (count > SIZE_MAX / size / (size_t)comm->ranks)
        return nccl_fail(ncclInvalidArgument, "%s: %zu elements cannot be", name, count);
    if (count == 0) return ncclSuccess;
    bool sends = kind != COLLECTIVE_BROADCAST || root == comm->rank;
    bool receives = kind != COLLECTIVE_REDUCE || root == comm->rank;
    if ((sends && send == NULL) || (receives && recv == NULL))
        return nccl_fail(ncclInvalidArgument, "%s: buffer is NULL", name);
    NcclCall call;
    memset(&call, 0, sizeof call);
    call.comm = comm;
    call.collective.kind = kind;
    call.collective.root = root;
    call.collective.send = (const char *)send;
    call.collective.recv = (char *)recv;
    call.collective.count = count;
    call.collective.type = type;
    call.collective.op = op;
    call.collective.purpose = *purpose_now();
    return nccl_submit(comm, stream, nccl_execute, &call, sizeof call);
}

// recv[i] = sum over ranks of send[i], i < count.   May be in place: recv == send.
static inline ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                                         ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return nccl_collective(COLLECTIVE_ALL_REDUCE, send, recv, count, type, op, 0, comm, stream);
}

// recv[i] on rank r = sum over ranks of send[r * count + i], i < count.   In place: recv == send + r * count.
static inline ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
                                             ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return nccl_collective(COLLECTIVE_REDUCE_SCATTER, send, recv, count, type, op, 0, comm, stream);
}

// recv[r * count + i] = send[i] of rank r, i < count.   In place: send == recv + r * count.
static inline ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
                                         ncclComm_t comm, cudaStream_t stream) {
    return nccl_collective(COLLECTIVE_ALL_GATHER, send, recv, count, type, ncclSum, 0, comm, stream);
}

// recv[i] = send[i] of the root; the others' send is not read.
static inline ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                                         ncclComm_t comm, cudaStream_t stream) {
    return nccl_collective(COLLECTIVE_BROADCAST, send, recv, count, type, ncclSum, root, comm, stream);
}

// As all-reduce, on the root; the others' recv is not written.
static inline ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                      int root, ncclComm_t comm, cudaStream_t stream) {
    return nccl_collective(COLLECTIVE_REDUCE, send, recv, count, type, op, root, comm, stream);
}

// --------------------------------------------------------------------------------------------------- send and receive

// A send or receive of the group that is open. All of a group are started before any is waited for.
typedef struct {
    ncclComm_t comm;
    cudaStream_t stream;
    const char *send; // NULL: a receive
    char *recv;
    size_t bytes;
    int peer;
    bool done; // submitted
    Purpose purpose;
} NcclMessage;

typedef struct {
    int depth; // of nested groups
    int messages;
    NcclMessage message[NCCL_GROUP_CALLS];
} NcclGroup;

static inline NcclGroup *nccl_group(void) {
    static __thread NcclGroup group;
    return &group;
}

static inline cudaError_t nccl_execute_start(void *argument) {
    const NcclMessage *m = (const NcclMessage *)argument;
    int code = mpi_exchange_start(&m->comm->mpi, m->send, m->recv, m->bytes, m->peer, MPI_EXCHANGE_TAG_SEND_RECV);
    return code == MPI_SUCCESS ? cudaSuccess : nccl_mpi_failed(m->comm, code, COLLECTIVE_SEND_RECV, &m->purpose);
}

static inline cudaError_t nccl_execute_finish(void *argument) {
    const NcclCall *call = (const NcclCall *)argument;
    int code = mpi_exchange_finish(&call->comm->mpi, &call->collective);
    return code == MPI_SUCCESS ? cudaSuccess
                               : nccl_mpi_failed(call->comm, code, COLLECTIVE_SEND_RECV, &call->collective.purpose);
}

// What a rank sends to itself is copied: the k-th send to the k-th receive. Returns whether there was a receive.
static inline bool nccl_pair_with_self(NcclGroup *group, NcclMessage *send, NcclMessage **paired) {
    for (int i = 0; i < group->messages; i++) {
        NcclMessage *m = &group->message[i];
        if (m->done || m->send != NULL || m->comm != send->comm || m->peer != send->peer) continue;
        *paired = m;
        return true;
    }
    return false;
}

static inline ncclResult_t nccl_run_group(NcclGroup *group) {
    for (int i = 0; i < group->messages; i++) { // within oneself
        NcclMessage *m = &group->message[i], *to = NULL;
        if (m->peer != m->comm->rank || m->send == NULL) continue;
        if (!nccl_pair_with_self(group, m, &to) || to->bytes != m->bytes)
            return nccl_fail(ncclInvalidUsage, "rank %d sends %zu bytes to itself and receives none like that",
                             m->comm->rank, m->bytes);
        CpuTransfer transfer = {to->recv, m->send, m->bytes, 0};
        m->done = to->done = true;
        ncclResult_t status = nccl_submit(m->comm, m->stream, cpu_transfer, &transfer, sizeof transfer);
        if (status != ncclSuccess) return status;
    }
    for (int i = 0; i < group->messages; i++) { // start everything, in all communicators
        NcclMessage *m = &group->message[i];
        if (m->done) continue;
        if (m->peer == m->comm->rank)
            return nccl_fail(ncclInvalidUsage, "rank %d receives from itself and sends nothing", m->peer);
        ncclResult_t status = nccl_submit(m->comm, m->stream, nccl_execute_start, m, sizeof *m);
        if (status != ncclSuccess) return status;
    }
    for (int i = 0; i < group->messages; i++) { // then wait, once in each communicator
        NcclMessage *m = &group->message[i];
        if (m->done) continue;
        NcclCall call;
        memset(&call, 0, sizeof call);
        call.comm = m->comm;
        call.collective.kind = COLLECTIVE_SEND_RECV;
        call.collective.type = ncclUint8;
        call.collective.purpose = m->purpose;
        for (int j = i; j < group->messages; j++) {
            if (group->message[j].comm != m->comm || group->message[j].done) continue;
            call.collective.count += group->message[j].bytes;
            group->message[j].done = true;
        }
        ncclResult_t status = nccl_submit(m->comm, m->stream, nccl_execute_finish, &call, sizeof call);
        if (status != ncclSuccess) return status;
    }
    return ncclSuccess;
}

// Groups exist for sends and receives, so that exchanges do not deadlock. A collective in a group runs at its call.
static inline ncclResult_t ncclGroupStart(void) {
    nccl_group()->depth++;
    return ncclSuccess;
}

static inline ncclResult_t ncclGroupEnd(void) {
    NcclGroup *group = nccl_group();
    if (group->depth == 0) return nccl_fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group->depth > 0) return ncclSuccess;
    ncclResult_t status = nccl_run_group(group);
    group->messages = 0;
    return status;
}

static inline ncclResult_t nccl_send_recv(const void *send, void *recv, size_t count, ncclDataType_t type, int peer,
                                          ncclComm_t comm, cudaStream_t stream) {
    if (comm == NULL) return nccl_fail(ncclInvalidArgument, "send or receive: communicator is NULL");
    size_t size = rank_sum_type_bytes(type);
    if (size == 0) return nccl_fail(ncclInvalidArgument, "send or receive: type %d is not supported", (int)type);
    if (peer < 0 || peer >= comm->ranks)
        return nccl_fail(ncclInvalidArgument, "send or receive: peer %d is not one of %d ranks", peer, comm->ranks);
    if (count == 0) return ncclSuccess;
    if (send == NULL && recv == NULL) return nccl_fail(ncclInvalidArgument, "send or receive: buffer is NULL");
    if (count > SIZE_MAX / size) return nccl_fail(ncclInvalidArgument, "%zu elements cannot be", count);
    NcclGroup *group = nccl_group();
    size_t under_way = mpi_exchange_messages(count * size);
    for (int i = 0; i < group->messages; i++) {
        if (group->message[i].comm != comm) continue;
        under_way += mpi_exchange_messages(group->message[i].bytes);
        if (group->message[i].stream != stream)
            return nccl_fail(ncclInvalidUsage, "a group uses one stream for each communicator");
    }
    if (group->messages == NCCL_GROUP_CALLS || under_way > MPI_EXCHANGE_MESSAGES)
        return nccl_fail(ncclInvalidUsage, "too many sends and receives in a group");
    ncclGroupStart(); // a call outside of any group is a group by itself
    NcclMessage *m = &group->message[group->messages++];
    memset(m, 0, sizeof *m);
    m->comm = comm;
    m->stream = stream;
    m->send = (const char *)send;
    m->recv = (char *)recv;
    m->bytes = count * size;
    m->peer = peer;
    m->purpose = *purpose_now();
    return ncclGroupEnd();
}

static inline ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                    cudaStream_t stream) {
    return nccl_send_recv(send, NULL, count, type, peer, comm, stream);
}

static inline ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                    cudaStream_t stream) {
    return nccl_send_recv(NULL, recv, count, type, peer, comm, stream);
}

#endif
