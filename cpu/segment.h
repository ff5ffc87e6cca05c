// segment.h: memory that the ranks of one node share.
#ifndef CPU_SEGMENT_H
#define CPU_SEGMENT_H

// Without MPI's C++ interface.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <errno.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

// Opens `bytes` bytes for the ranks of `mpi`, which all call this: zeros, but for the first eight bytes, which are
// taken (they tell this segment from any other of the same name). NULL on all ranks if there is no room, or if they are
// not on one node; then *problem is an errno that rank 0 met, or 0. Nothing keeps the segment's name once it is open,
// so a killed run leaves nothing behind.
static inline void *segment_open(MPI_Comm mpi, size_t bytes, int *problem) {
    struct {
        char name[56];
        uint64_t token;
        int error; // errno of rank 0
    } offer;
    int file = -1, rank = 0;
    MPI_Comm_rank(mpi, &rank);
    memset(&offer, 0, sizeof offer);
    if (rank == 0) {
        struct timespec time;
        clock_gettime(CLOCK_REALTIME, &time);
        offer.token = (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec + ((uint64_t)getpid() << 40);
        snprintf(offer.name, sizeof offer.name, "/train_gpt.%d.%llx", (int)getpid(), (unsigned long long)offer.token);
        file = shm_open(offer.name, O_CREAT | O_EXCL | O_RDWR, 0600);
        // posix_fallocate, not ftruncate: a page without room behind it would kill whoever touches it.
        offer.error = file < 0 ? errno : posix_fallocate(file, 0, (off_t)bytes);
    }
    MPI_Bcast(&offer, (int)sizeof offer, MPI_BYTE, 0, mpi);
    if (rank != 0 && offer.error == 0) file = shm_open(offer.name, O_RDWR, 0);
    void *mapping = MAP_FAILED;
    if (file >= 0 && offer.error == 0)
        mapping = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    if (file >= 0) close(file);
    uint64_t *token = (uint64_t *)mapping;
    if (mapping != MAP_FAILED && rank == 0) __atomic_store_n(token, offer.token, __ATOMIC_RELEASE);
    MPI_Barrier(mpi);
    int all, one = mapping != MAP_FAILED && __atomic_load_n(token, __ATOMIC_ACQUIRE) == offer.token;
    MPI_Allreduce(&one, &all, 1, MPI_INT, MPI_MIN, mpi);
    if (rank == 0 && offer.name[0] != '\0') shm_unlink(offer.name);
    *problem = offer.error;
    if (all) return mapping;
    if (mapping != MAP_FAILED) munmap(mapping, bytes);
    return NULL;
}

#endif
