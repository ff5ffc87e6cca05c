// shared_memory.h: collectives among the ranks of one node, through a segment of shared memory.
//
// Every rank has a slot in each of three buffers. A buffer of the program goes through the slots in pieces: at step k
// each rank copies piece k in, reduces its share of piece k - 1, and copies piece k - 2 out, then all meet at a
// barrier. The three touch different buffers, so one barrier per piece is enough, and the pieces are small enough to
// stay in the cache. Pieces are numbered through all collectives of a communicator, so none needs a barrier at its end:
// a buffer is used again three pieces later, when everybody has passed the barrier behind its last use.
//
// Slots are written in one of two ways: through the cache, where the reader's core shares one with the writer's; or
// past it, where not: there a store to a line that the other core has read takes ten times as long (two core complexes
// of an EPYC: 2.2 GB/s, past the cache 28). A rank times both now and then, and takes the faster: it may be moved.
#ifndef CPU_SHARED_MEMORY_H
#define CPU_SHARED_MEMORY_H

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "peers.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum {
    SHARED_BUFFERS = 3,
    SHARED_SLOT_BYTES = 1 << 19,        // of a rank's slot; a multiple of every element's size
    SHARED_SEGMENT_BYTES = 24 << 20,    // slots shrink rather than that a segment passes this:
    SHARED_SLOT_BYTES_LEAST = 16 << 10, // containers often have 64 MB in /dev/shm
    SHARED_BLOCK_BYTES = 4 << 10,       // of a sum, which goes to two places while the first-level cache has it
    SHARED_TIMED_BYTES = 32 << 10,      // a write of fewer is not timed
    SHARED_TIMED_PIECES = 64,           // of so many pieces, the first two are written in the two ways
    SHARED_SPINS = 200                  // looks before a waiting rank sleeps, with a core of its own
};

typedef struct {
    uint64_t token; // segment.h
    char pad0[56];
    uint32_t arrived; // ranks at the barrier
    char pad1[60];
    uint32_t generation; // barriers passed
    char pad2[60];
    uint32_t waits[1]; // of each rank that has had to wait at a barrier: the generation behind it
} SharedControl;

typedef enum { SHARED_CACHED, SHARED_STREAMED, SHARED_WAYS } SharedWay; // of writing to a slot

typedef struct {
    int rank, ranks;
    const int *members; // (ranks), their ranks in the run
    int spins;
    size_t slot_bytes, mapped_bytes;
    SharedControl *control;
    char *slots;                 // [buffer][rank][slot_bytes]
    uint64_t piece;              // pieces so far
    const void **inputs;         // [ranks]; scratch
    double seconds[SHARED_WAYS]; // per byte, when last timed; 0: not yet
} SharedMemory;

static inline char *shared_slot(const SharedMemory *shared, uint64_t piece, int rank) {
    return shared->slots + ((piece % SHARED_BUFFERS) * (size_t)shared->ranks + (size_t)rank) * shared->slot_bytes;
}

// memcpy past the cache.
static inline void shared_stream(char *to, const char *from, size_t bytes) {
#if defined(__SSE2__)
    const size_t head = collective_piece(bytes, 0, (64 - ((uintptr_t)to & 63)) & 63), whole = (bytes - head) / 64 * 64;
    memcpy(to, from, head);
    for (size_t i = head; i < head + whole; i += 64)
        for (size_t j = i; j < i + 64; j += 16)
            _mm_stream_si128((__m128i *)(to + j), _mm_loadu_si128((const __m128i *)(from + j)));
    memcpy(to + head + whole, from + head + whole, bytes - head - whole);
    _mm_sfence();
#else
    memcpy(to, from, bytes);
#endif
}

// How to write piece `piece`. Through the cache costs the reader less, so it is preferred while it takes no more than
// twice as long.
static inline SharedWay shared_way(const SharedMemory *shared, uint64_t piece) {
    if (piece % SHARED_TIMED_PIECES < SHARED_WAYS) return (SharedWay)(piece % SHARED_TIMED_PIECES);
    return shared->seconds[SHARED_CACHED] > 2 * shared->seconds[SHARED_STREAMED] ? SHARED_STREAMED : SHARED_CACHED;
}

// Writes to this rank's slot.
static inline void shared_write(SharedMemory *shared, SharedWay way, char *to, const char *from, size_t bytes) {
    const bool timed = bytes >= SHARED_TIMED_BYTES;
    const double begin = timed ? watchdog_clock() : 0;
    if (way == SHARED_STREAMED)
        shared_stream(to, from, bytes);
    else
        memcpy(to, from, bytes);
    if (timed) shared->seconds[way] = (watchdog_clock() - begin) / (double)bytes;
}

static inline void shared_close(SharedMemory *shared) {
    if (shared->control != NULL) munmap(shared->control, shared->mapped_bytes);
    free(shared->inputs);
    memset(shared, 0, sizeof *shared);
}

// Opens a segment for the ranks of `mpi`, which all call this; members: their ranks in the run. False, on all of them,
// if they are not on one node, or if there is no room (then rank 0 of the program says so, once).
static inline bool shared_open(SharedMemory *shared, MPI_Comm mpi, const int *members, int rank, int ranks) {
    memset(shared, 0, sizeof *shared);
    MPI_Comm node;
    int on_node = 0;
    MPI_Comm_split_type(mpi, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
    MPI_Comm_size(node, &on_node);
    MPI_Comm_free(&node);
    const char *wanted = getenv("TRAIN_GPT_SHARED_MEMORY");
    int all, one = on_node == ranks && !(wanted != NULL && strcmp(wanted, "0") == 0);
    MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_MIN, mpi);
    if (!all) return false;

    shared->rank = rank;
    shared->ranks = ranks;
    shared->members = members;
    size_t slot = (size_t)SHARED_SEGMENT_BYTES / SHARED_BUFFERS / (size_t)ranks / 4096 * 4096;
    if (slot > SHARED_SLOT_BYTES) slot = SHARED_SLOT_BYTES;
    if (slot < SHARED_SLOT_BYTES_LEAST) slot = SHARED_SLOT_BYTES_LEAST;
    shared->slot_bytes = slot;
    const size_t header = (sizeof(SharedControl) + (size_t)ranks * sizeof(uint32_t) + 4095) / 4096 * 4096;
    shared->mapped_bytes = header + SHARED_BUFFERS * (size_t)ranks * slot; // slots start on a page
    shared->inputs = (const void **)calloc((size_t)ranks, sizeof *shared->inputs);
    // Spinning pays only while every rank has a core to spin on. Ranks may be bound to a core each.
    cpu_set_t own, together;
    CPU_ZERO(&own);
    sched_getaffinity(0, sizeof own, &own);
    MPI_Allreduce(&own, &together, (int)sizeof own, MPI_BYTE, MPI_BOR, mpi);
    shared->spins = CPU_COUNT(&together) >= ranks ? SHARED_SPINS : 1;

    int problem = 0;
    shared->control = (SharedControl *)segment_open(mpi, shared->mapped_bytes, &problem);
    one = shared->control != NULL && shared->inputs != NULL;
    MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_MIN, mpi);
    if (all) {
        shared->slots = (char *)shared->control + header;
        return true;
    }
    static bool said = false;
    int world_rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    if (world_rank == 0 && !said) {
        said = true;
        fprintf(stderr, "train_gpt: note: no shared memory for %d ranks (%.0f MB in /dev/shm: %s); using plain MPI\n",
                ranks, (double)shared->mapped_bytes / 1e6,
                problem != 0 ? strerror(problem) : "not shared by all of them");
    }
    shared_close(shared);
    return false;
}

// Says whom this rank waits for at a barrier: who has come is waiting, too.
static inline void shared_look(const SharedMemory *shared, const Collective *collective, uint32_t generation,
                               Patience *patience) {
    PeerList missing;
    memset(&missing, 0, sizeof missing);
    for (int r = 0; r < shared->ranks; r++)
        if (__atomic_load_n(&shared->control->waits[r], __ATOMIC_ACQUIRE) != generation + 1)
            peer_list_add(&missing, shared->members[r]);
    peers_look(collective, &missing, patience);
}

// Returns when all ranks have come. The last one wakes the others, who look for a moment and then sleep, so that ranks
// that outnumber the cores give way.
static inline void shared_barrier(SharedMemory *shared, const Collective *collective) {
    SharedControl *control = shared->control;
    uint32_t generation = __atomic_load_n(&control->generation, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&control->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)shared->ranks) {
        __atomic_store_n(&control->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&control->generation, generation + 1, __ATOMIC_RELEASE);
        syscall(SYS_futex, &control->generation, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        return;
    }
    for (int spin = 0; spin < shared->spins; spin++) {
        if (__atomic_load_n(&control->generation, __ATOMIC_ACQUIRE) != generation) return;
        sched_yield();
    }
    Patience patience = patience_begin();
    __atomic_store_n(&control->waits[shared->rank], generation + 1, __ATOMIC_RELEASE);
    for (int looks = 0; __atomic_load_n(&control->generation, __ATOMIC_ACQUIRE) == generation; looks++) {
        if (looks > 0) shared_look(shared, collective, generation, &patience);
        struct timespec pause = {0, PEERS_LOOK_MS * 1000000L};
        syscall(SYS_futex, &control->generation, FUTEX_WAIT, generation, &pause, NULL, 0);
    }
}

// All-reduce, or reduce to a root. A rank puts what the others sum into its slot, and sums its own slice, which it
// reads where it is; the sum goes to that slice of its slot, so that nobody writes where another has just written. Its
// own slice of the result a rank keeps while the cache has it, and fetches the others' later.
static inline void shared_all_reduce(SharedMemory *shared, const Collective *c) {
    size_t size = rank_sum_type_bytes(c->type), most = shared->slot_bytes / size;
    size_t pieces = (c->count + most - 1) / most;
    bool receives = c->kind == COLLECTIVE_ALL_REDUCE || c->root == shared->rank;
    for (size_t k = 0; k < pieces + 2; k++) {
        if (k < pieces) {
            size_t first = k * most, n = collective_piece(c->count, first, most);
            size_t begin = collective_slice(n, shared->rank, shared->ranks) * size;
            size_t end = collective_slice(n, shared->rank + 1, shared->ranks) * size;
            char *slot = shared_slot(shared, shared->piece + k, shared->rank);
            SharedWay way = shared_way(shared, shared->piece + k);
            shared_write(shared, way, slot, c->send + first * size, begin);
            shared_write(shared, way, slot + end, c->send + first * size + end, n * size - end);
        }
        if (k >= 1 && k - 1 < pieces) {
            size_t first = (k - 1) * most, n = collective_piece(c->count, first, most);
            size_t begin = collective_slice(n, shared->rank, shared->ranks);
            size_t end = collective_slice(n, shared->rank + 1, shared->ranks);
            char block[SHARED_BLOCK_BYTES], *slot = shared_slot(shared, shared->piece + k - 1, shared->rank);
            SharedWay way = shared_way(shared, shared->piece + k - 1);
            for (size_t at = begin; at < end; at += sizeof block / size) {
                size_t m = collective_piece(end, at, sizeof block / size);
                for (int rank = 0; rank < shared->ranks; rank++)
                    shared->inputs[rank] = shared_slot(shared, shared->piece + k - 1, rank) + at * size;
                shared->inputs[shared->rank] = c->send + (first + at) * size;
                char *sum = receives ? c->recv + (first + at) * size : block;
                rank_sum(sum, shared->inputs, shared->ranks, m, c->type, c->op);
                shared_write(shared, way, slot + at * size, sum, m * size);
            }
        }
        if (k >= 2 && receives) {
            size_t first = (k - 2) * most, n = collective_piece(c->count, first, most);
            for (int rank = 0; rank < shared->ranks; rank++) {
                size_t begin = collective_slice(n, rank, shared->ranks) * size;
                size_t end = collective_slice(n, rank + 1, shared->ranks) * size;
                if (rank != shared->rank)
                    memcpy(c->recv + first * size + begin, shared_slot(shared, shared->piece + k - 2, rank) + begin,
                           end - begin);
            }
        }
        if (k < pieces + 1) shared_barrier(shared, c);
    }
    shared->piece += pieces;
}

// A slot holds a piece for every other rank; the rank's own part is read where it is.
static inline void shared_reduce_scatter(SharedMemory *shared, const Collective *c) {
    size_t size = rank_sum_type_bytes(c->type), most = shared->slot_bytes / size / (size_t)shared->ranks;
    size_t pieces = (c->count + most - 1) / most;
    for (size_t k = 0; k < pieces + 1; k++) {
        if (k < pieces) {
            size_t first = k * most, n = collective_piece(c->count, first, most);
            char *slot = shared_slot(shared, shared->piece + k, shared->rank);
            for (int rank = 0; rank < shared->ranks; rank++)
                if (rank != shared->rank)
                    shared_write(shared, shared_way(shared, shared->piece + k), slot + (size_t)rank * most * size,
                                 c->send + ((size_t)rank * c->count + first) * size, n * size);
        }
        if (k >= 1) {
            size_t first = (k - 1) * most, n = collective_piece(c->count, first, most);
            for (int rank = 0; rank < shared->ranks; rank++)
                shared->inputs[rank] =
                    shared_slot(shared, shared->piece + k - 1, rank) + (size_t)shared->rank * most * size;
            shared->inputs[shared->rank] = c->send + ((size_t)shared->rank * c->count + first) * size;
            rank_sum(c->recv + first * size, shared->inputs, shared->ranks, n, c->type, c->op);
        }
        if (k < pieces) shared_barrier(shared, c);
    }
    shared->piece += pieces;
}

// All-gather, and broadcast, which is an all-gather in which only the root has something to give.
static inline void shared_all_gather(SharedMemory *shared, const Collective *c) {
    size_t bytes = c->count * rank_sum_type_bytes(c->type), most = shared->slot_bytes;
    size_t pieces = (bytes + most - 1) / most;
    bool broadcast = c->kind == COLLECTIVE_BROADCAST;
    bool gives = !broadcast || c->root == shared->rank;
    char *own = c->recv + (broadcast ? 0 : (size_t)shared->rank * bytes);
    if (gives && own != c->send) memcpy(own, c->send, bytes);
    for (size_t k = 0; k < pieces + 1; k++) {
        if (k < pieces && gives) {
            size_t first = k * most, n = collective_piece(bytes, first, most);
            shared_write(shared, shared_way(shared, shared->piece + k),
                         shared_slot(shared, shared->piece + k, shared->rank), own + first, n);
        }
        if (k >= 1) {
            size_t first = (k - 1) * most, n = collective_piece(bytes, first, most);
            for (int rank = 0; rank < shared->ranks; rank++)
                if (rank != shared->rank && (!broadcast || rank == c->root))
                    memcpy(c->recv + (broadcast ? 0 : (size_t)rank * bytes) + first,
                           shared_slot(shared, shared->piece + k - 1, rank), n);
        }
        if (k < pieces) shared_barrier(shared, c);
    }
    shared->piece += pieces;
}

static inline void shared_collective(SharedMemory *shared, const Collective *c) {
    if (c->kind == COLLECTIVE_ALL_REDUCE || c->kind == COLLECTIVE_REDUCE)
        shared_all_reduce(shared, c);
    else if (c->kind == COLLECTIVE_REDUCE_SCATTER)
        shared_reduce_scatter(shared, c);
    else
        shared_all_gather(shared, c);
}

#endif
