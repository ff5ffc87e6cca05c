// bootstrap.h (CPU): how ranks meet. Here NCCL's stand-in is MPI itself (nccl.h), so nothing has to travel before it.
#ifndef CPU_BOOTSTRAP_H
#define CPU_BOOTSTRAP_H

#include <nccl.h>
#include <stdbool.h>
#include "error.h"
#include "launch.h"
#include "place.h"

// Whether this build can run so many ranks: those that were started have to be known to MPI.
static inline bool bootstrap_check(const Place *place, int world_size, Error *error) {
    if (world_size == 1 || !place->launched || place->start->mpi) return true;
    return error_set(error,
                     "%d ranks were started by %s, but on CPUs they meet through MPI: start them with srun --mpi=pmix "
                     "or mpirun, or on one machine with --nproc",
                     world_size, place->start->name);
}

// Starts ranks on this machine for --nproc, and returns the run's exit code.
static inline int bootstrap_launch(int nproc, char **argv) {
    return launch_ranks(nproc, argv);
}

// Ends the run if any rank has an error to tell. A CPU has none so early.
static inline void bootstrap_meet(const Place *place, double timeout, const Error *error) {
    (void)place;
    (void)timeout;
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
