// place.h: a process's place among the ranks, and the threads that it computes with.
//
// A rank learns its place from the variables of whatever started it; place_starts() is the table of them. How ranks
// then meet is the device's matter (bootstrap.h).
#ifndef PLACE_H
#define PLACE_H

#include <errno.h>
#include <limits.h>
#include <omp.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include "cpu/machine.h"
#include "error.h"

// A way of starting ranks: what it is known by, and what it calls a rank's numbers.
typedef struct {
    const char *name;     // for messages
    const char *marks[2]; // variables that are set where ranks were started this way; NULL: no second one
    const char *rank, *world_size;
    const char *local_rank, *local_size; // may be missing: one machine
    bool mpi;                            // MPI was told of these ranks, so that it can connect them
} PlaceStart;

typedef struct {
    int rank, world_size;
    int local_rank, local_size; // among the ranks of this machine
    bool launched;              // one of several ranks that something else started; else free to start some
    const PlaceStart *start;    // what started them; NULL: nothing did
} Place;

// Set to the launcher's process id in the ranks that are started with --nproc: by launch_ranks(), through mpirun, and
// by spawn_ranks().
#define LAUNCH_MARK "TRAIN_GPT_LAUNCHER"
#define SPAWN_MARK "TRAIN_GPT_SPAWNED"

// ---------------------------------------------------------------------------------------------------------------------
// The place

// Reads a whole number from low to high from a variable. What may follow it: SLURM_STEP_TASKS_PER_NODE has a tail,
// "2(x3),1" for two tasks on each of three nodes and one on the next; the first node's number is taken.
static inline bool place_number(const char *variable, int low, int high, const char *tail, int *number, Error *error) {
    const char *text = getenv(variable);
    if (text == NULL) return error_set(error, "%s is not set, though other variables of a rank are", variable);
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || (*end != '\0' && strchr(tail, *end) == NULL) || errno != 0 || value < low || value > high)
        return error_set(error, "%s is \"%.40s\", a whole number from %d to %d is needed", variable, text, low, high);
    *number = (int)value;
    return true;
}

#define PLACE_OPEN_MPI \
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
#define PLACE_SLURM "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
#define PLACE_PMI "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
#define PLACE_RANK "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"

// Every way of starting ranks, the innermost first: srun starts mpirun, or torchrun on each node, and not the other way
// round. A batch script's own shell has SLURM_PROCID, too, but no step; what srun starts with MPI support also has a
// rank in PMIx or PMI. NULL at the end.
static inline const PlaceStart *place_starts(void) {
    static const PlaceStart starts[] = {
        {"--nproc", {SPAWN_MARK, NULL}, PLACE_RANK, false},
        {"torchrun", {"TORCHELASTIC_RUN_ID", "RANK"}, PLACE_RANK, false},
        {"mpirun", {"OMPI_COMM_WORLD_RANK", NULL}, PLACE_OPEN_MPI, true},
        {"srun --mpi=pmix", {"SLURM_STEP_NUM_TASKS", "PMIX_RANK"}, PLACE_SLURM, true},
        {"srun --mpi=pmi2", {"SLURM_STEP_NUM_TASKS", "PMI_RANK"}, PLACE_SLURM, true},
        {"srun without --mpi", {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}, PLACE_SLURM, false},
        {"MPICH's mpirun", {"PMI_RANK", "PMI_SIZE"}, PLACE_PMI, true},
        {"RANK and WORLD_SIZE", {"RANK", "WORLD_SIZE"}, PLACE_RANK, false},
        {NULL, {NULL, NULL}, NULL, NULL, NULL, NULL, false},
    };
    return starts;
}

static inline bool place_started(const PlaceStart *start) {
    return getenv(start->marks[0]) != NULL && (start->marks[1] == NULL || getenv(start->marks[1]) != NULL);
}

// Whether the numbers are those that srun gave.
static inline bool place_by_slurm(const Place *place) {
    return place->start != NULL && strcmp(place->start->rank, "SLURM_PROCID") == 0;
}

static inline bool place_read(const PlaceStart *start, Place *place, Error *error) {
    if (!place_number(start->world_size, 1, INT_MAX, "", &place->world_size, error) ||
        !place_number(start->rank, 0, place->world_size - 1, "", &place->rank, error))
        return false;
    place->local_rank = place->rank;
    place->local_size = place->world_size;
    const char *local_size = getenv(start->local_size);
    if (local_size != NULL && !place_number(start->local_size, 1, place->world_size, "(,", &place->local_size, error))
        return false;
    const bool varies = local_size != NULL && strchr(local_size, ',') != NULL; // then other nodes may have more ranks
    return getenv(start->local_rank) == NULL ||
           place_number(start->local_rank, 0, (varies ? place->world_size : place->local_size) - 1, "",
                        &place->local_rank, error);
}

// This process's place. One of several ranks is made known to error.h, and dies with what started it.
// error->text is set where the variables make no sense.
static inline Place place_from_environment(Error *error) {
    Place place = {0, 1, 0, 1, false, NULL};
    const PlaceStart *start = place_starts();
    bool told = false;
    // A world of one, as a plain `srun -n 1` makes, says nothing: it leaves --nproc free to start ranks.
    for (; start->name != NULL && place.world_size == 1; start++) {
        if (!place_started(start)) continue;
        told = true;
        if (!place_read(start, &place, error)) return place;
        place.start = start;
    }
    if (!told && getenv(LAUNCH_MARK) != NULL)
        error_set(error, "mpirun started a rank without telling it its place; is it Open MPI's mpirun?");
    place.launched = place.world_size > 1;
    if (place.launched) {
        error_identify(place.rank, place.world_size);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    } else {
        place.start = NULL;
    }
    return place;
}

// ---------------------------------------------------------------------------------------------------------------------
// Threads

// Unless OMP_NUM_THREADS says otherwise, ranks share the cores of their machine, each with at least one thread. A rank
// that was bound has fewer cores than its parent, and those are its own.
static inline int threads_wanted(const Place *place) {
    if (getenv("OMP_NUM_THREADS") != NULL) return omp_get_max_threads();
    cpu_set_t own, parent;
    const bool bound = place->launched && sched_getaffinity(0, sizeof own, &own) == 0 &&
                       sched_getaffinity(getppid(), sizeof parent, &parent) == 0 &&
                       CPU_COUNT(&own) < CPU_COUNT(&parent);
    return machine_cores() / (bound ? 1 : place->local_size);
}

// Sets the number of threads that the calling thread's parallel regions have. It has to be what they are granted:
// oneDNN divides its work by omp_get_max_threads(), and the shares of threads that do not come would be left undone. So
// OpenMP may not give fewer as it sees fit, nor none because of OMP_MAX_ACTIVE_LEVELS, and OMP_THREAD_LIMIT is asked by
// trying.
static inline void set_threads(const Place *place) {
    const int wanted = threads_wanted(place), limit = omp_get_thread_limit();
    int granted = 1;
    omp_set_dynamic(0);
    if (omp_get_max_active_levels() < 1) omp_set_max_active_levels(1);
    omp_set_num_threads(wanted < 1 ? 1 : wanted < limit ? wanted : limit);
#pragma omp parallel
#pragma omp master
    granted = omp_get_num_threads();
    omp_set_num_threads(granted);
}

// Threads that this process computes with.
static inline int place_threads(void) {
    return omp_get_max_threads();
}

#endif
