// bootstrap.h (CUDA): how ranks meet before NCCL can carry anything: over TCP (rendezvous.h), or over MPI where mpirun
// started them and nobody said where to meet. TRAIN_GPT_MPI: 1 if the build has MPI, else 0.
//
// All ranks learn whether each has a GPU of its own, and get what NCCL needs to connect them. From then on those that
// met over TCP watch over one another (control_line.h); MPI is idle until the end.
#ifndef CUDA_BOOTSTRAP_H
#define CUDA_BOOTSTRAP_H

#include <cuda_runtime.h>
#include <nccl.h>
#include <stdbool.h>
#include <string.h>
#include "control_line.h"
#include "error.h"
#include "meeting_point.h"
#include "place.h"
#include "rendezvous.h"
#include "spawn.h"
#include "watchdog.h"

// The ways of the ranks to one another.
typedef struct {
    bool mpi; // MPI's; else TCP
    Rendezvous ranks;
    ControlLine line;
} Bootstrap;

static inline Bootstrap *bootstrap_self(void) {
    static Bootstrap self;
    return &self;
}

static inline bool bootstrap_by_mpi(const Place *place) {
    return TRAIN_GPT_MPI && place->start->mpi && !place_by_slurm(place) && getenv("MASTER_ADDR") == NULL;
}

// Whether this build can run so many ranks, and those that were started can find one another.
static inline bool bootstrap_check(const Place *place, int world_size, Error *error) {
    MeetingPoint point;
    return world_size == 1 || !place->launched || bootstrap_by_mpi(place) || meeting_point(place, &point, error);
}

// Starts ranks on this machine for --nproc, and returns the run's exit code.
static inline int bootstrap_launch(int nproc, char **argv) {
    return spawn_ranks(nproc, argv);
}

#if TRAIN_GPT_MPI

// Without MPI's C++ interface.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

static inline void bootstrap_mpi_open(int rank, int world_size) {
    int level = 0, ranks = 0, number = 0;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level) != MPI_SUCCESS) die("MPI does not start");
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &number);
    if (ranks != world_size || number != rank)
        die("this process is rank %d of %d, but MPI started it as %d of %d", rank, world_size, number, ranks);
}

static inline void bootstrap_mpi_gather(const void *mine, size_t bytes, void *all) {
    if (MPI_Gather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD) != MPI_SUCCESS)
        die("the ranks cannot meet over MPI");
}

static inline void bootstrap_mpi_broadcast(void *data, size_t bytes) {
    if (MPI_Bcast(data, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD) != MPI_SUCCESS) die("the ranks cannot meet over MPI");
}

static inline void bootstrap_mpi_close(void) {
    MPI_Finalize();
}

#else

// Not called: bootstrap_by_mpi() says no.
static inline void bootstrap_mpi_open(int rank, int world_size) {
    die("rank %d of %d needs MPI", rank, world_size);
}
static inline void bootstrap_mpi_gather(const void *, size_t, void *) {}
static inline void bootstrap_mpi_broadcast(void *, size_t) {}
static inline void bootstrap_mpi_close(void) {}

#endif

// Ends this rank, which cannot meet the others; silently where rank 0 has told it why, and says so itself.
__attribute__((noreturn)) static inline void bootstrap_fail(const Error *error) {
    if (!bootstrap_self()->ranks.told) die("%s", error->text);
    fflush(NULL);
    _exit(EXIT_RUN);
}

// Every rank's bytes to rank 0, and rank 0's to every rank.
static inline void bootstrap_gather(const void *mine, size_t bytes, void *all) {
    Error error = {""};
    if (bootstrap_self()->mpi)
        bootstrap_mpi_gather(mine, bytes, all);
    else if (!rendezvous_gather(&bootstrap_self()->ranks, mine, bytes, all, &error))
        bootstrap_fail(&error);
}

static inline void bootstrap_broadcast(void *data, size_t bytes) {
    Error error = {""};
    if (bootstrap_self()->mpi)
        bootstrap_mpi_broadcast(data, bytes);
    else if (!rendezvous_broadcast(&bootstrap_self()->ranks, data, bytes, &error))
        bootstrap_fail(&error);
}

// What a rank tells rank 0.
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

// Lets the ranks meet, each waiting `timeout` seconds at most. Ends the run, with one line, if not all of them come, if
// any has an error to tell, or if two have made the same GPU current.
static inline void bootstrap_meet(const Place *place, double timeout, const Error *error) {
    Bootstrap *self = bootstrap_self();
    const int rank = place->rank, world_size = place->world_size;
    if (world_size == 1) {
        if (error->text[0] != '\0') die_input(error);
        return;
    }
    self->mpi = bootstrap_by_mpi(place);
    Error found = {""};
    MeetingPoint point;
    if (self->mpi) {
        watchdog_begin("has not met the other ranks", timeout); // MPI itself waits for ever
        bootstrap_mpi_open(rank, world_size);
    } else {
        if (!meeting_point(place, &point, &found)) die_input(&found);
        if (!rendezvous_open(&self->ranks, &point, rank, world_size, timeout, &found))
            bootstrap_fail(error->text[0] != '\0' ? error : &found);
    }
    BootstrapRank mine, *all = (BootstrapRank *)calloc((size_t)world_size, sizeof(BootstrapRank));
    if (all == NULL) die("no room for what %d ranks say", world_size);
    memset(&mine, 0, sizeof mine);
    mine.error = *error;
    memcpy(mine.host, error_identity()->host, sizeof mine.host);
    struct cudaDeviceProp properties;
    int device = 0;
    if (error->text[0] == '\0') {
        cuda_check(cudaGetDevice(&device));
        cuda_check(cudaGetDeviceProperties(&properties, device));
        memcpy(mine.gpu, &properties.uuid, sizeof mine.gpu);
    }
    bootstrap_gather(&mine, sizeof mine, all);
    if (rank == 0 && !bootstrap_compare(all, world_size, &found)) fprintf(stderr, "train_gpt: error: %s\n", found.text);
    free(all);
    bootstrap_broadcast(&found, sizeof found); // said before any rank ends, for a launcher then ends the others
    if (found.text[0] == '\0') return;
    fflush(NULL);
    _exit(EXIT_INPUT);
}

// Rank 0's; after bootstrap_meet(), once. From now on a rank that is lost ends all.
static inline ncclUniqueId bootstrap_id(int rank, int world_size) {
    Bootstrap *self = bootstrap_self();
    ncclUniqueId id;
    memset(&id, 0, sizeof id);
    if (rank == 0) nccl_check(ncclGetUniqueId(&id));
    if (world_size == 1) return id;
    bootstrap_broadcast(&id, sizeof id);
    if (!self->mpi) control_start(&self->line, &self->ranks);
    return id;
}

// After the last communicator.
static inline void bootstrap_close(void) {
    Bootstrap *self = bootstrap_self();
    if (self->mpi) bootstrap_mpi_close();
    control_stop(&self->line);
    rendezvous_close(&self->ranks);
    memset(self, 0, sizeof *self);
}

#endif
