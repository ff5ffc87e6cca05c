// bootstrap.h (CUDA): how ranks meet: over MPI, before NCCL can carry anything.
//
// MPI tells all ranks whether each has a GPU of its own, and hands round what NCCL needs to connect them. Afterwards it
// is idle until the end.
#ifndef CUDA_BOOTSTRAP_H
#define CUDA_BOOTSTRAP_H

// Without MPI's C++ interface.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>
#include <stdbool.h>
#include <string.h>
#include "error.h"

// Whether this build can run so many ranks.
static inline bool bootstrap_check(int world_size, Error *error) {
    (void)world_size;
    (void)error;
    return true;
}

// What a rank tells the others.
typedef struct {
    Error error;
    unsigned char gpu[16]; // that it took: the universally unique number
    char host[64];
} BootstrapRank;

// Looks for what keeps these ranks from a run: the first error of any, or a GPU that two have taken.
static inline bool bootstrap_compare(const BootstrapRank *ranks, int world_size, Error *error) {
    for (int r = 0; r < world_size; r++)
        if (ranks[r].error.text[0] != '\0')
            return error_set(error, "rank %d on %s: %s", r, ranks[r].host, ranks[r].error.text);
    for (int r = 1; r < world_size; r++)
        for (int s = 0; s < r; s++) {
            if (memcmp(ranks[r].gpu, ranks[s].gpu, sizeof ranks[r].gpu) != 0) continue;
            int same = 0;
            for (int t = 0; t < world_size; t++) same += memcmp(ranks[t].gpu, ranks[s].gpu, sizeof ranks[s].gpu) == 0;
            return error_set(
                error, "%d ranks on %s have taken 1 GPU, ranks %d and %d among them: a rank needs a GPU of its own",
                same, ranks[s].host, s, r);
        }
    return true;
}

// Ends the run, with one line, if any rank has an error to tell, or if two have made the same GPU current.
static inline void bootstrap_meet(int rank, int world_size, const Error *error) {
    if (world_size == 1) {
        if (error->text[0] != '\0') die_input(error);
        return;
    }
    int level = 0, ranks = 0, number = 0, device = 0;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level) != MPI_SUCCESS) die("MPI does not start");
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &number);
    if (ranks != world_size || number != rank)
        die("this process is rank %d of %d, but MPI started it as %d of %d", rank, world_size, number, ranks);
    BootstrapRank mine, *all = (BootstrapRank *)calloc((size_t)world_size, sizeof(BootstrapRank));
    if (all == NULL) die("no room for what %d ranks say", world_size);
    memset(&mine, 0, sizeof mine);
    mine.error = *error;
    memcpy(mine.host, error_identity()->host, sizeof mine.host);
    struct cudaDeviceProp properties;
    if (error->text[0] == '\0') {
        cuda_check(cudaGetDevice(&device));
        cuda_check(cudaGetDeviceProperties(&properties, device));
        memcpy(mine.gpu, &properties.uuid, sizeof mine.gpu);
    }
    if (MPI_Allgather(&mine, (int)sizeof mine, MPI_BYTE, all, (int)sizeof mine, MPI_BYTE, MPI_COMM_WORLD) !=
        MPI_SUCCESS)
        die("the ranks cannot meet over MPI");
    Error found = {""};
    const bool ok = bootstrap_compare(all, world_size, &found);
    free(all);
    if (ok) return;
    if (rank == 0) fprintf(stderr, "train_gpt: error: %s\n", found.text);
    MPI_Barrier(MPI_COMM_WORLD); // a launcher kills the others as soon as one is gone
    fflush(NULL);
    _exit(EXIT_INPUT);
}

// Rank 0's; after bootstrap_meet().
static inline ncclUniqueId bootstrap_id(int rank, int world_size) {
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    if (rank == 0) nccl_check(ncclGetUniqueId(&id));
    if (world_size > 1 && MPI_Bcast(&id, (int)sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD) != MPI_SUCCESS)
        die("NCCL's identifier cannot be handed round");
    return id;
}

// After the last communicator.
static inline void bootstrap_close(void) {
    int started = 0;
    MPI_Initialized(&started);
    if (started) MPI_Finalize();
}

#endif
