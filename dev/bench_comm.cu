// bench_comm.cu: how fast the ranks of this machine exchange data, collective by collective, through comm.h.
//
//   bench_comm --nproc N [--megabytes M]
//
// Bus bandwidth is what a rank sends under a ring, over the time: 2 (N-1)/N of the buffer for all-reduce, (N-1)/N for
// the two others, so that figures for different N compare with the speed of a link. 1 GB is 1e9 bytes.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "comm.h"
#include "launch.h"
#include "log.h"

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    int nproc = 1, megabytes = 256;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--nproc") == 0) nproc = atoi(argv[i + 1]);
        if (strcmp(argv[i], "--megabytes") == 0) megabytes = atoi(argv[i + 1]);
    }
    if (nproc < 1 || megabytes < 1) {
        fprintf(stderr, "usage: bench_comm --nproc N [--megabytes M]\n");
        return EXIT_INPUT;
    }
    Error error = {""};
    const Place place = place_from_environment(&error);
    if (error.text[0] != '\0' || !bootstrap_check(&place, place.world_size, &error)) die_input(&error);
    if (!place.launched && nproc > 1) return bootstrap_launch(nproc, argv);
    const int ranks = place.launched ? place.world_size : 1;
    error_identify(place.rank, ranks);
    int devices = 0;
    cuda_check(cudaGetDeviceCount(&devices));
    cuda_check(cudaSetDevice(place.local_rank % devices));
    bootstrap_meet(&place, 300, &error);
    cudaStream_t stream;
    cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Memory memory;
    memset(&memory, 0, sizeof memory);
    Comm comm;
    const CommOptions options = {{1, ranks, 1}, ranks, false, 300, false};
    comm_init(&comm, &memory, place.rank, &options, NULL, stream);

    const size_t elements = (size_t)megabytes * 1000000 / 2, part = elements / (size_t)ranks / 64 * 64;
    char *buffer = (char *)memory_alloc(&memory, MEMORY_GRADIENTS, part * (size_t)ranks * 2);
    enum { REPEATS = 9 };
    char summary[256] = "";
    for (int kind = COMM_ALL_REDUCE; kind <= COMM_ALL_GATHER; kind++) {
        double seconds[REPEATS];
        const CommCounts before = comm.counts;
        for (int i = -2; i < REPEATS; i++) {
            comm_barrier(&comm);
            const double begin = now_seconds();
            char *mine = buffer + (size_t)place.rank * part * 2;
            if (kind == COMM_ALL_REDUCE)
                comm_all_reduce(&comm, &comm.data, buffer, part * (size_t)ranks, ncclBfloat16);
            else if (kind == COMM_REDUCE_SCATTER)
                comm_reduce_scatter(&comm, &comm.data, mine, buffer, part, ncclBfloat16);
            else
                comm_all_gather(&comm, &comm.data, buffer, mine, part, ncclBfloat16);
            cuda_check(cudaStreamSynchronize(stream));
            if (i >= 0) seconds[i] = now_seconds() - begin;
        }
        qsort(seconds, REPEATS, sizeof seconds[0], compare);
        const CommCounts counts = comm_counts_since(&comm, &before);
        const double bytes = (double)counts.kind[kind].bus_bytes / (REPEATS + 2);
        const size_t used = strlen(summary);
        snprintf(summary + used, sizeof summary - used, "%s%s %.2f GB/s", used > 0 ? ", " : "", comm_kind_name(kind),
                 bytes / seconds[REPEATS / 2] * 1e-9);
    }
    if (place.rank == 0) printf("%d ranks, %d MB in bf16, bus bandwidth: %s\n", ranks, megabytes, summary);
    comm_free(&comm);
    return 0;
}
