// nccl.h (test): NCCL's identifier, which ranks have to hand round.
#ifndef TEST_NCCL_H
#define TEST_NCCL_H

#include <stdio.h>
#include <sys/random.h>

typedef enum { ncclSuccess = 0, ncclSystemError = 2 } ncclResult_t;

typedef struct {
    char internal[128];
} ncclUniqueId;

static inline const char *ncclGetErrorString(ncclResult_t) {
    return "an error";
}

// All of its bytes matter.
static inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    return getrandom(id, sizeof *id, 0) == (ssize_t)sizeof *id ? ncclSuccess : ncclSystemError;
}

#endif
