// error.h: how a run ends badly: who (rank, host), what, where; exit codes.
//
// Two kinds of error, two ways out.
//  - Bad input (configuration, data, checkpoint): the function that finds it fills an Error and returns false; nothing
//    has been written yet. The caller ends with die_input(), which prints one line on rank 0 and exits with EXIT_INPUT.
//    Functions that read input never exit by themselves, so that all ranks can first agree on what went wrong.
//  - A failure during the run (a collective, a full disk, a bad token found late): die() prints who, what and where,
//    on whichever rank it happens, and exits with EXIT_RUN.
#ifndef ERROR_H
#define ERROR_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    EXIT_RUN = 1,      // a failure during the run
    EXIT_INPUT = 2,    // bad configuration, data or checkpoint; nothing was written
    EXIT_STOPPED = 75, // stopped by a signal, at the end of a step; running again continues (EX_TEMPFAIL)
};

// What is wrong with an input: one line, empty while nothing is.
typedef struct {
    char text[1024];
} Error;

// Who this process is, for messages. Set once at start (launch.h); rank 0 of 1 until then.
typedef struct {
    int rank;
    int world_size;
    char host[64];
} ErrorIdentity;

static inline ErrorIdentity *error_identity(void) {
    static ErrorIdentity identity = {0, 1, ""};
    return &identity;
}

static inline void error_identify(int rank, int world_size) {
    ErrorIdentity *self = error_identity();
    self->rank = rank;
    self->world_size = world_size;
    if (gethostname(self->host, sizeof self->host - 1) != 0) snprintf(self->host, sizeof self->host, "unknown host");
}

// Describes what is wrong with an input; returns false, so that a reader can `return error_set(error, ...)`.
// The first description is kept: what follows from an error is not news.
__attribute__((format(printf, 2, 3))) static inline bool error_set(Error *error, const char *format, ...) {
    if (error->text[0] != '\0') return false;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    for (char *c = error->text; *c != '\0'; c++)
        if ((unsigned char)*c < ' ' || *c == 127) *c = '?'; // it may quote a line break, and is one line all the same
    return false;
}

// Ends the process because of bad input. All ranks see the same input, so rank 0 speaks for them.
__attribute__((noreturn)) static inline void die_input(const Error *error) {
    if (error_identity()->rank == 0) fprintf(stderr, "train_gpt: error: %s\n", error->text);
    fflush(NULL);
    _exit(EXIT_INPUT);
}

// Says one line: who, what and where. happened: "failed".
static inline void error_say(const char *happened, const char *what, const char *file, int line) {
    const ErrorIdentity *self = error_identity();
    fflush(stdout);
    if (self->world_size > 1)
        fprintf(stderr, "train_gpt: rank %d of %d on %s %s: %s (%s:%d)\n", self->rank, self->world_size, self->host,
                happened, what, file, line);
    else
        fprintf(stderr, "train_gpt: %s: %s (%s:%d)\n", happened, what, file, line);
    fflush(stderr);
}

// Ends the process because the run failed. _exit, not exit: other threads may be inside a collective, and handlers that
// wait for them would hang. The launcher then takes the other ranks down.
__attribute__((noreturn, format(printf, 3, 4))) static inline void die_at(const char *file, int line,
                                                                          const char *format, ...) {
    char what[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    error_say("failed", what, file, line);
    _exit(EXIT_RUN);
}

#define die(...) die_at(__FILE__, __LINE__, __VA_ARGS__)

// Checks a call of the CUDA runtime or of NCCL; use where those headers are included.
#define cuda_check(call)                                                               \
    do {                                                                               \
        cudaError_t status_ = (call);                                                  \
        if (status_ != cudaSuccess) die("%s: %s", #call, cudaGetErrorString(status_)); \
    } while (0)

#define nccl_check(call)                                                               \
    do {                                                                               \
        ncclResult_t status_ = (call);                                                 \
        if (status_ != ncclSuccess) die("%s: %s", #call, ncclGetErrorString(status_)); \
    } while (0)

#endif
