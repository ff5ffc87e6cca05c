// nccl.h (CUDA, without NCCL): the part of NCCL's interface that the program uses, for one rank: what the only rank
// sends is what it receives.
#ifndef CUDA_WITHOUT_NCCL_H
#define CUDA_WITHOUT_NCCL_H

#include <cuda_runtime.h>
#include <stdlib.h>
#include <string.h>

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;

#define NCCL_SPLIT_NOCOLOR -1

typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9
} ncclDataType_t;

typedef enum { ncclSum = 0 } ncclRedOp_t;

typedef struct {
    char internal[128];
} ncclUniqueId;

typedef struct ncclComm {
    int unused;
} * ncclComm_t;

static inline const char *ncclGetErrorString(ncclResult_t status) {
    return status == ncclSuccess        ? "no error"
           : status == ncclInvalidUsage ? "several ranks need NCCL, which this program was built without"
                                        : "unhandled cuda error";
}

static inline const char *ncclGetLastError(ncclComm_t) {
    return cudaGetErrorString(cudaPeekAtLastError());
}

static inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    return ncclSuccess;
}

static inline ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId, int) {
    if (ranks != 1) return ncclInvalidUsage;
    *comm = (ncclComm_t)calloc(1, sizeof **comm);
    return *comm != NULL ? ncclSuccess : ncclSystemError;
}

static inline ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t *split, void *) {
    return ncclCommInitRank(split, 1, ncclUniqueId(), 0);
}

static inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    free(comm);
    return ncclSuccess;
}

static inline ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *status) {
    *status = ncclSuccess;
    return ncclSuccess;
}

// Nothing to share with anybody: cudaMalloc serves.
static inline ncclResult_t ncclMemAlloc(void **pointer, size_t bytes) {
    return cudaMalloc(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

static inline ncclResult_t ncclMemFree(void *pointer) {
    return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

static inline ncclResult_t ncclCommRegister(ncclComm_t, void *, size_t, void **handle) {
    *handle = NULL;
    return ncclSuccess;
}

static inline ncclResult_t ncclCommDeregister(ncclComm_t, void *) {
    return ncclSuccess;
}

static inline ncclResult_t ncclGroupStart(void) {
    return ncclSuccess;
}

static inline ncclResult_t ncclGroupEnd(void) {
    return ncclSuccess;
}

static inline ncclResult_t nccl_copy(const void *send, void *recv, size_t count, ncclDataType_t type,
                                     cudaStream_t stream) {
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2}; // by ncclDataType_t
    if (send == recv || count == 0) return ncclSuccess;
    return cudaMemcpyAsync(recv, send, count * bytes[type], cudaMemcpyDeviceToDevice, stream) == cudaSuccess
               ? ncclSuccess
               : ncclUnhandledCudaError;
}

static inline ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t,
                                         ncclComm_t, cudaStream_t stream) {
    return nccl_copy(send, recv, count, type, stream);
}

static inline ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
                                             ncclRedOp_t, ncclComm_t, cudaStream_t stream) {
    return nccl_copy(send, recv, count, type, stream);
}

static inline ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t,
                                         cudaStream_t stream) {
    return nccl_copy(send, recv, count, type, stream);
}

static inline ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int,
                                         ncclComm_t, cudaStream_t stream) {
    return nccl_copy(send, recv, count, type, stream);
}

// One rank has nobody to send to.
static inline ncclResult_t ncclSend(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
    return ncclInvalidUsage;
}
static inline ncclResult_t ncclRecv(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
    return ncclInvalidUsage;
}

#endif
