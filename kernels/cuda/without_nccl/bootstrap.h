// bootstrap.h (CUDA, without NCCL): a build in which no other rank can be met.
#ifndef CUDA_WITHOUT_NCCL_BOOTSTRAP_H
#define CUDA_WITHOUT_NCCL_BOOTSTRAP_H

#include <nccl.h>
#include <stdbool.h>
#include "error.h"
#include "place.h"

// Whether this build can run so many ranks.
static inline bool bootstrap_check(const Place *place, int world_size, Error *error) {
    (void)place;
    if (world_size == 1) return true;
    return error_set(error,
                     "%d ranks need NCCL, which this program was built without; install it and build again, or use "
                     "--nproc 1",
                     world_size);
}

// Not called: bootstrap_check() has refused.
static inline int bootstrap_launch(int nproc, char **argv) {
    (void)argv;
    die("%d ranks need NCCL", nproc);
}

static inline void bootstrap_meet(const Place *place, double timeout, const Error *error) {
    (void)place;
    (void)timeout;
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
