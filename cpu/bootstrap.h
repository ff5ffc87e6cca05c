// bootstrap.h (CPU): how ranks meet. Here NCCL's stand-in is MPI itself (nccl.h), so nothing has to travel before it.
#ifndef CPU_BOOTSTRAP_H
#define CPU_BOOTSTRAP_H

#include <nccl.h>
#include <stdbool.h>
#include "error.h"

// Whether this build can run so many ranks.
static inline bool bootstrap_check(int world_size, Error *error) {
    (void)world_size;
    (void)error;
    return true;
}

// Ends the run if any rank has an error to tell. A CPU has none so early.
static inline void bootstrap_meet(int rank, int world_size, const Error *error) {
    (void)rank;
    (void)world_size;
    (void)error;
}

// The same on all ranks, without asking.
static inline ncclUniqueId bootstrap_id(int rank, int world_size) {
    (void)rank;
    (void)world_size;
    ncclUniqueId id;
    nccl_check(ncclGetUniqueId(&id));
    return id;
}

// After the last communicator, which has ended MPI.
static inline void bootstrap_close(void) {}

#endif
