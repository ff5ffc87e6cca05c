// bootstrap.h (CUDA, one rank): of a build without NCCL or without MPI, where no other rank can be met.
// TRAIN_GPT_MISSING: what the build was made without, as a text.
#ifndef CUDA_ONE_RANK_BOOTSTRAP_H
#define CUDA_ONE_RANK_BOOTSTRAP_H

#include <nccl.h>
#include <stdbool.h>
#include "error.h"

// Whether this build can run so many ranks.
static inline bool bootstrap_check(int world_size, Error *error) {
    if (world_size == 1) return true;
    return error_set(error,
                     "%d ranks need " TRAIN_GPT_MISSING
                     ", which this program was built without; install it and build again, or use --nproc 1",
                     world_size);
}

static inline void bootstrap_meet(int rank, int world_size, const Error *error) {
    (void)rank;
    (void)world_size;
    if (error->text[0] != '\0') die_input(error);
}

static inline ncclUniqueId bootstrap_id(int rank, int world_size) {
    (void)rank;
    (void)world_size;
    ncclUniqueId id;
    nccl_check(ncclGetUniqueId(&id));
    return id;
}

static inline void bootstrap_close(void) {}

#endif
