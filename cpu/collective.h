// collective.h: a collective at work: what it is told, how its buffer is cut, and how long it may wait.
#ifndef CPU_COLLECTIVE_H
#define CPU_COLLECTIVE_H

#include <stddef.h>
#include "error.h"
#include "rank_sum.h"
#include "watchdog.h"

typedef enum {
    COLLECTIVE_ALL_REDUCE,
    COLLECTIVE_REDUCE_SCATTER,
    COLLECTIVE_ALL_GATHER,
    COLLECTIVE_BROADCAST,
    COLLECTIVE_REDUCE,
    COLLECTIVE_SEND_RECV
} CollectiveKind;

// `count` is as NCCL's call of that kind counts; `send` and `recv` are NULL where a rank has none.
typedef struct {
    CollectiveKind kind;
    int root;
    const char *send;
    char *recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    Purpose purpose; // for messages
} Collective;

static inline const char *collective_name(CollectiveKind kind) {
    static const char *const names[] = {"all-reduce", "reduce-scatter", "all-gather",
                                        "broadcast",  "reduce",         "send and receive"};
    return names[kind];
}

// The first element of slice `slice` when `count` elements are cut into `slices`; slice `slices` starts at the end.
static inline size_t collective_slice(size_t count, int slice, int slices) {
    return count / (size_t)slices * (size_t)slice + count % (size_t)slices * (size_t)slice / (size_t)slices;
}

// Elements (or bytes) of the piece that starts at `first` when `total` are taken at most `most` at a time.
static inline size_t collective_piece(size_t total, size_t first, size_t most) {
    return total - first < most ? total - first : most;
}

// How long a rank waits for the others before it gives up, in seconds: TRAIN_GPT_TIMEOUT, which comm.h sets from the
// option `timeout`.
static inline double *collective_timeout(void) {
    static double seconds = 0;
    if (seconds == 0) {
        const char *text = getenv("TRAIN_GPT_TIMEOUT");
        seconds = text != NULL && atof(text) > 0 ? atof(text) : 300;
    }
    return &seconds;
}

#endif
