// mpi_exchange.h: collectives among ranks on any nodes: MPI carries the bytes, the sums are made here.
//
// MPI's own reductions keep no order, so a reduction is an exchange, in which every rank gets all ranks' parts for its
// slice, and a sum in rank order. The exchange is made of plain sends and receives, which is as much traffic as a
// reduce-scatter, and lets a rank that waits give way to others and watch the clock. All functions return MPI's code.
#ifndef CPU_MPI_EXCHANGE_H
#define CPU_MPI_EXCHANGE_H

// Without MPI's C++ interface.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <cuda_runtime.h>
#include <mpi.h>
#include <sched.h>
#include <string.h>
#include "peers.h"

enum {
    MPI_EXCHANGE_STAGING_BYTES = 4 << 20, // what a reduction receives before it is summed
    MPI_EXCHANGE_MESSAGE_BYTES = 1 << 28, // MPI counts in int, so long messages are sent in pieces
    MPI_EXCHANGE_MESSAGES = 2048          // messages under way
};

typedef struct {
    int rank, ranks;
    const int *members;    // (ranks), their ranks in the run
    MPI_Comm comm;         // MPI_COMM_NULL: not open
    char *staging;         // MPI_EXCHANGE_STAGING_BYTES
    const void **inputs;   // [ranks]; scratch
    MPI_Request *requests; // [MPI_EXCHANGE_MESSAGES]
    int *sources;          // of each request: who is to send, or -1 - who is to receive
    int messages;          // requests in use
} MpiExchange;

// Takes over `comm`; members: its ranks' ranks in the run. False: no memory. Sends and receives are possible now,
// collectives after mpi_exchange_stage().
static inline bool mpi_exchange_open(MpiExchange *exchange, MPI_Comm comm, const int *members, int rank, int ranks) {
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    exchange->rank = rank;
    exchange->ranks = ranks;
    exchange->members = members;
    exchange->comm = comm;
    exchange->messages = 0;
    exchange->staging = NULL;
    exchange->inputs = (const void **)calloc((size_t)ranks, sizeof *exchange->inputs);
    exchange->requests = (MPI_Request *)malloc(MPI_EXCHANGE_MESSAGES * sizeof *exchange->requests);
    exchange->sources = (int *)calloc(MPI_EXCHANGE_MESSAGES, sizeof *exchange->sources);
    if (exchange->inputs == NULL || exchange->requests == NULL || exchange->sources == NULL) return false;
    memset(exchange->requests, 0, MPI_EXCHANGE_MESSAGES * sizeof *exchange->requests);
    return true;
}

// Device memory, for its huge pages: MPI copies between processes a third faster from them.
static inline bool mpi_exchange_stage(MpiExchange *exchange) {
    void *staging;
    if (cudaMalloc(&staging, MPI_EXCHANGE_STAGING_BYTES) != cudaSuccess) return false;
    exchange->staging = (char *)staging;
    return true;
}

// All ranks call this.
static inline void mpi_exchange_close(MpiExchange *exchange) {
    cudaFree(exchange->staging);
    free(exchange->inputs);
    free(exchange->requests);
    free(exchange->sources);
    MPI_Comm_free(&exchange->comm);
}

enum { MPI_EXCHANGE_TAG_COLLECTIVE = 1, MPI_EXCHANGE_TAG_SEND_RECV = 2 };

static inline size_t mpi_exchange_messages(size_t bytes) {
    return (bytes + MPI_EXCHANGE_MESSAGE_BYTES - 1) / MPI_EXCHANGE_MESSAGE_BYTES;
}

// Starts sending `bytes` bytes to a rank, or (recv not NULL) receiving them from it. Ends in mpi_exchange_finish().
static inline int mpi_exchange_start(MpiExchange *exchange, const char *send, char *recv, size_t bytes, int peer,
                                     int tag) {
    for (size_t first = 0; first < bytes; first += MPI_EXCHANGE_MESSAGE_BYTES) {
        int n = (int)collective_piece(bytes, first, MPI_EXCHANGE_MESSAGE_BYTES);
        MPI_Request *request = &exchange->requests[exchange->messages];
        int code = recv != NULL ? MPI_Irecv(recv + first, n, MPI_BYTE, peer, tag, exchange->comm, request)
                                : MPI_Isend(send + first, n, MPI_BYTE, peer, tag, exchange->comm, request);
        if (code != MPI_SUCCESS) return code;
        exchange->sources[exchange->messages] = recv != NULL ? peer : -1 - peer;
        exchange->messages++;
    }
    return MPI_SUCCESS;
}

// Says whom this rank waits for: those who have not sent; only if all have, those who have not received.
static inline void mpi_exchange_look(const MpiExchange *exchange, const Collective *c, Patience *patience) {
    PeerList missing;
    memset(&missing, 0, sizeof missing);
    for (int receives = 1; receives >= 0 && missing.count == 0; receives--)
        for (int i = 0; i < exchange->messages; i++) {
            const int source = exchange->sources[i];
            int done = 1;
            if ((source >= 0) != (receives == 1)) continue;
            MPI_Request_get_status(exchange->requests[i], &done, MPI_STATUS_IGNORE);
            if (!done) peer_list_add(&missing, exchange->members[source >= 0 ? source : -1 - source]);
        }
    peers_look(c, &missing, patience);
}

// Waits for everything that was started.
static inline int mpi_exchange_finish(MpiExchange *exchange, const Collective *c) {
    Patience patience = patience_begin();
    for (int looks = 0, done = 0;; looks++) {
        int code = MPI_Testall(exchange->messages, exchange->requests, &done, MPI_STATUSES_IGNORE);
        if (code != MPI_SUCCESS) return code;
        if (done) break;
        // First give way to whoever has work, then sleep, ever longer: nobody answers faster for being asked more.
        if (looks < 256) {
            sched_yield();
            continue;
        }
        struct timespec pause = {0, looks < 512 ? 20000 : 200000};
        nanosleep(&pause, NULL);
        if (looks % 64 != 0 || watchdog_clock() - patience.looked < 1e-3 * PEERS_LOOK_MS) continue;
        mpi_exchange_look(exchange, c, &patience);
    }
    exchange->messages = 0;
    return MPI_SUCCESS;
}

// Cuts the staging buffer into room for `*room` elements of every rank, and returns rank's.
static inline char *mpi_exchange_staging(MpiExchange *exchange, size_t size, int rank, size_t *room) {
    *room = (size_t)MPI_EXCHANGE_STAGING_BYTES / (size_t)exchange->ranks / size;
    return exchange->staging + (size_t)rank * *room * size;
}

// All-reduce, or reduce to a root, piece by piece: every rank sums its slice, then hands it out.
static inline int mpi_exchange_all_reduce(MpiExchange *exchange, const Collective *c) {
    size_t size = rank_sum_type_bytes(c->type), room;
    char *sum = mpi_exchange_staging(exchange, size, exchange->rank, &room); // nothing is received there
    size_t most = room * (size_t)exchange->ranks;
    int code = MPI_SUCCESS;
    for (size_t first = 0; first < c->count && code == MPI_SUCCESS; first += most) {
        size_t n = collective_piece(c->count, first, most);
        size_t begin = collective_slice(n, exchange->rank, exchange->ranks);
        size_t own = collective_slice(n, exchange->rank + 1, exchange->ranks) - begin;
        const char *send = c->send + first * size;
        char *recv = c->recv == NULL ? NULL : c->recv + first * size;
        for (int peer = 0; peer < exchange->ranks && code == MPI_SUCCESS; peer++) {
            char *part = mpi_exchange_staging(exchange, size, peer, &room);
            exchange->inputs[peer] = peer == exchange->rank ? send + begin * size : part;
            if (peer != exchange->rank)
                code = mpi_exchange_start(exchange, NULL, part, own * size, peer, MPI_EXCHANGE_TAG_COLLECTIVE);
        }
        for (int peer = 0; peer < exchange->ranks && code == MPI_SUCCESS; peer++) {
            size_t from = collective_slice(n, peer, exchange->ranks),
                   to = collective_slice(n, peer + 1, exchange->ranks);
            if (peer != exchange->rank)
                code = mpi_exchange_start(exchange, send + from * size, NULL, (to - from) * size, peer,
                                          MPI_EXCHANGE_TAG_COLLECTIVE);
        }
        if (code == MPI_SUCCESS) code = mpi_exchange_finish(exchange, c);
        if (code != MPI_SUCCESS) break;
        rank_sum(sum, exchange->inputs, exchange->ranks, own, c->type, c->op);

        bool everybody = c->kind == COLLECTIVE_ALL_REDUCE, receives = everybody || c->root == exchange->rank;
        if (receives) memcpy(recv + begin * size, sum, own * size);
        for (int peer = 0; peer < exchange->ranks && code == MPI_SUCCESS; peer++) {
            size_t from = collective_slice(n, peer, exchange->ranks),
                   to = collective_slice(n, peer + 1, exchange->ranks);
            if (peer != exchange->rank && receives)
                code = mpi_exchange_start(exchange, NULL, recv + from * size, (to - from) * size, peer,
                                          MPI_EXCHANGE_TAG_COLLECTIVE);
        }
        for (int peer = 0; peer < exchange->ranks && code == MPI_SUCCESS; peer++)
            if (peer != exchange->rank && (everybody || c->root == peer))
                code = mpi_exchange_start(exchange, sum, NULL, own * size, peer, MPI_EXCHANGE_TAG_COLLECTIVE);
        if (code == MPI_SUCCESS) code = mpi_exchange_finish(exchange, c);
    }
    return code;
}

static inline int mpi_exchange_reduce_scatter(MpiExchange *exchange, const Collective *c) {
    size_t size = rank_sum_type_bytes(c->type), room;
    mpi_exchange_staging(exchange, size, 0, &room);
    int code = MPI_SUCCESS;
    for (size_t first = 0; first < c->count && code == MPI_SUCCESS; first += room) {
        size_t n = collective_piece(c->count, first, room);
        for (int peer = 0; peer < exchange->ranks && code == MPI_SUCCESS; peer++) {
            char *part = mpi_exchange_staging(exchange, size, peer, &room);
            exchange->inputs[peer] = peer == exchange->rank ? c->send + ((size_t)peer * c->count + first) * size : part;
            if (peer != exchange->rank)
                code = mpi_exchange_start(exchange, NULL, part, n * size, peer, MPI_EXCHANGE_TAG_COLLECTIVE);
        }
        for (int peer = 0; peer < exchange->ranks && code == MPI_SUCCESS; peer++)
            if (peer != exchange->rank)
                code = mpi_exchange_start(exchange, c->send + ((size_t)peer * c->count + first) * size, NULL, n * size,
                                          peer, MPI_EXCHANGE_TAG_COLLECTIVE);
        if (code == MPI_SUCCESS) code = mpi_exchange_finish(exchange, c);
        if (code == MPI_SUCCESS) rank_sum(c->recv + first * size, exchange->inputs, exchange->ranks, n, c->type, c->op);
    }
    return code;
}

// All-gather, and broadcast, which is an all-gather in which only the root has something to give.
static inline int mpi_exchange_all_gather(MpiExchange *exchange, const Collective *c) {
    size_t bytes = c->count * rank_sum_type_bytes(c->type);
    bool broadcast = c->kind == COLLECTIVE_BROADCAST, gives = !broadcast || c->root == exchange->rank;
    size_t stride = broadcast ? 0 : bytes;
    char *own = c->recv + (size_t)exchange->rank * stride;
    if (gives && own != c->send) memcpy(own, c->send, bytes);
    int code = MPI_SUCCESS;
    for (size_t first = 0; first < bytes && code == MPI_SUCCESS; first += MPI_EXCHANGE_MESSAGE_BYTES) {
        size_t n = collective_piece(bytes, first, MPI_EXCHANGE_MESSAGE_BYTES);
        for (int peer = 0; peer < exchange->ranks && code == MPI_SUCCESS; peer++)
            if (peer != exchange->rank && (!broadcast || c->root == peer))
                code = mpi_exchange_start(exchange, NULL, c->recv + (size_t)peer * stride + first, n, peer,
                                          MPI_EXCHANGE_TAG_COLLECTIVE);
        for (int peer = 0; peer < exchange->ranks && code == MPI_SUCCESS; peer++)
            if (peer != exchange->rank && gives)
                code = mpi_exchange_start(exchange, own + first, NULL, n, peer, MPI_EXCHANGE_TAG_COLLECTIVE);
        if (code == MPI_SUCCESS) code = mpi_exchange_finish(exchange, c);
    }
    return code;
}

static inline int mpi_exchange_collective(MpiExchange *exchange, const Collective *c) {
    if (c->kind == COLLECTIVE_ALL_REDUCE || c->kind == COLLECTIVE_REDUCE) return mpi_exchange_all_reduce(exchange, c);
    if (c->kind == COLLECTIVE_REDUCE_SCATTER) return mpi_exchange_reduce_scatter(exchange, c);
    return mpi_exchange_all_gather(exchange, c);
}

#endif
