// Collectives in the emulator's streams, on as many ranks as mpirun starts: each rank has an order of its own, and all
// come to the same sums. `collectives [MISSING]`: without the wait for the gradients, or for their sum.
#include "check.h"
#include <nccl.h>

static __global__ void fill_kernel(float *to, float value, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = value + (float)(i % 7);
}

static __global__ void count_wrong_kernel(int *wrong, const float *sums, float expected, int ranks, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && sums[i] != expected + (float)(i % 7 * ranks)) atomicAdd(wrong, 1);
}

int main(int argc, char **argv) {
    enum { N = 5000, BUFFERS = 3, ROUNDS = 12 };
    const char *missing = argc > 1 ? argv[1] : "";
    const char *rank_text = getenv("OMPI_COMM_WORLD_RANK"), *size_text = getenv("OMPI_COMM_WORLD_SIZE");
    const int rank = rank_text != NULL ? atoi(rank_text) : 0, ranks = size_text != NULL ? atoi(size_text) : 1;
    ncclUniqueId id;
    ncclComm_t comm, half;
    nccl_check(ncclGetUniqueId(&id));
    nccl_check(ncclCommInitRank(&comm, ranks, id, rank));
    nccl_check(ncclCommSplit(comm, 0, rank, &half, NULL));
    cudaStream_t compute, communication;
    cuda_check(cudaStreamCreate(&compute));
    cuda_check(cudaStreamCreateWithFlags(&communication, cudaStreamNonBlocking));
    float *buffers[BUFFERS];
    cudaEvent_t ready[BUFFERS], done[BUFFERS];
    int *wrong = device_array<int>(1), found;
    cuda_check(cudaMemset(wrong, 0, sizeof(int)));
    for (int i = 0; i < BUFFERS; i++) {
        buffers[i] = device_array<float>(N);
        cuda_check(cudaEventCreateWithFlags(&ready[i], cudaEventDisableTiming));
        cuda_check(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
    }
    cudaLaunchConfig_t config = launch_config(divide_up(N, 128), 128, 0, compute);
    for (int round = 0; round < ROUNDS; round++) {
        float expected = 0.0f;
        for (int r = 0; r < ranks; r++) expected += (float)(round * 10 + r);
        for (int i = 0; i < BUFFERS; i++) {
            launch(config, fill_kernel, buffers[i], (float)(round * 10 + rank), N);
            cuda_check(cudaEventRecord(ready[i], compute));
            if (strcmp(missing, "ready") != 0) cuda_check(cudaStreamWaitEvent(communication, ready[i], 0));
            nccl_check(
                ncclAllReduce(buffers[i], buffers[i], N, ncclFloat32, ncclSum, i == 1 ? half : comm, communication));
            cuda_check(cudaEventRecord(done[i], communication));
        }
        for (int i = 0; i < BUFFERS; i++) {
            if (strcmp(missing, "done") != 0) cuda_check(cudaStreamWaitEvent(compute, done[i], 0));
            launch(config, count_wrong_kernel, wrong, buffers[i], expected, ranks, N);
        }
    }
    cuda_check(cudaMemcpyAsync(&found, wrong, sizeof found, cudaMemcpyDeviceToHost, compute));
    cuda_check(cudaDeviceSynchronize());
    nccl_check(ncclCommDestroy(half));
    nccl_check(ncclCommDestroy(comm));
    printf("rank %d: %s\n", rank, found == 0 ? "passed" : "wrong sums");
    return 0; // not found: mpirun would end the other ranks before they have said theirs
}
