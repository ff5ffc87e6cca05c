// stream.h: what executes a stream: its worker thread, the queue of work, and tickets to wait for it.
//
// A stream without a worker executes at the call, in the calling thread. A worker executes its queue in order and
// sleeps while there is nothing to do. A ticket names a stream and how many of its items have to be finished; to wait
// for an event, or for everything submitted so far, is to wait for a ticket. The first failure of a worker is sticky:
// after it items are passed over, so that nobody waits for ever, and waiting returns the error.
#ifndef CPU_STREAM_H
#define CPU_STREAM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// The toolkit's values.
typedef enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719,
    cudaErrorUnknown = 999
} cudaError_t;

typedef struct CUstream_st *cudaStream_t;

// What a stream executes. An error ends the stream's work for good.
typedef cudaError_t (*CpuFunction)(void *arguments);

typedef struct {
    cudaStream_t stream; // NULL: nothing to wait for
    uint64_t finished;   // passed when the stream has finished so many items
} CpuTicket;

// A function that holds state: one for the whole program, where the language can say so.
#ifdef __cplusplus
#define CPU_SHARED inline
#else
#define CPU_SHARED static inline
#endif

CPU_SHARED int *cpu_sticky_error_cell(void) {
    static int error = cudaSuccess; // atomic
    return &error;
}

static inline cudaError_t cpu_sticky_error(void) {
    return (cudaError_t)__atomic_load_n(cpu_sticky_error_cell(), __ATOMIC_ACQUIRE);
}

static inline void cpu_set_sticky_error(cudaError_t status) {
    int none = cudaSuccess;
    __atomic_compare_exchange_n(cpu_sticky_error_cell(), &none, (int)status, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

#ifdef TRAIN_GPT_EMULATOR

// Streams of the emulator have no threads, and are run in orders of its choice: emulator_stream.h, which defines these
// with the meaning that they have below. Arguments may be of any size, and the NULL stream has tickets too.
cudaError_t cpu_stream_run(cudaStream_t stream, CpuFunction function, void *arguments, size_t arguments_bytes);
CpuTicket cpu_stream_ticket(cudaStream_t stream);
bool cpu_ticket_passed(CpuTicket ticket); // asking often enough makes it pass
cudaError_t cpu_ticket_wait(void *ticket);
cudaError_t cpu_stream_wait(cudaStream_t stream, CpuTicket ticket);

#else

enum { CPU_QUEUE = 512, CPU_ARGUMENTS = 120 }; // items of a queue; bytes of an item's arguments

typedef struct {
    CpuFunction function;
    uint64_t arguments[CPU_ARGUMENTS / 8];
} CpuItem;

// Streams and events are never given back to the system: tickets may still name a destroyed stream, and items a
// destroyed event. They are kept for the next create, their counters running on, so that old tickets stay finished.
struct CUstream_st {
    bool worker;  // has a thread of its own; otherwise the caller executes, and nothing below is used
    bool free;    // destroyed
    bool closing; // the worker ends when its queue is empty
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t submission, progress; // submitted or closing changed; finished changed
    uint64_t submitted, finished;        // items ever; item i stands in queue[i % CPU_QUEUE]
    CpuItem *queue;
    cudaStream_t next; // in the list of all streams
};

static inline bool cpu_stream_has_worker(cudaStream_t stream) {
    return stream != NULL && stream->worker;
}

#ifdef TRAIN_GPT_STREAM_DELAY
// For tests: before each item a worker sleeps for up to half a millisecond, at random from the seed in the environment
// variable TRAIN_GPT_STREAM_DELAY, so that a missing event shows.
static inline void cpu_stream_delay(uint64_t *state) {
    const char *seed = getenv("TRAIN_GPT_STREAM_DELAY");
    if (seed == NULL) return;
    if (*state == 0) *state = strtoull(seed, NULL, 10) * 2 + 1;
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    struct timespec pause = {0, (long)((*state >> 33) % 500000)};
    nanosleep(&pause, NULL);
}
#endif

static inline void *cpu_stream_worker(void *argument) {
    cudaStream_t stream = (cudaStream_t)argument;
#ifdef TRAIN_GPT_STREAM_DELAY
    uint64_t delay_state = 0;
#endif
    pthread_mutex_lock(&stream->mutex);
    for (;;) {
        while (stream->finished == stream->submitted && !stream->closing)
            pthread_cond_wait(&stream->submission, &stream->mutex);
        if (stream->finished == stream->submitted) break;
        CpuItem *item = &stream->queue[stream->finished % CPU_QUEUE]; // stays in place until it counts as finished
        pthread_mutex_unlock(&stream->mutex);
#ifdef TRAIN_GPT_STREAM_DELAY
        cpu_stream_delay(&delay_state);
#endif
        if (cpu_sticky_error() == cudaSuccess) {
            cudaError_t status = item->function(item->arguments);
            if (status != cudaSuccess) cpu_set_sticky_error(status);
        }
        pthread_mutex_lock(&stream->mutex);
        stream->finished++;
        pthread_cond_broadcast(&stream->progress);
    }
    pthread_mutex_unlock(&stream->mutex);
    return NULL;
}

// Executes function(arguments) in the order of the stream: at once, or by its worker on a copy of the arguments.
// At most CPU_ARGUMENTS bytes, aligned like a pointer. For what the device itself is made of: collectives, operations.
static inline cudaError_t cpu_stream_run(cudaStream_t stream, CpuFunction function, void *arguments,
                                         size_t arguments_bytes) {
    if (arguments_bytes > CPU_ARGUMENTS) return cudaErrorInvalidValue;
    if (!cpu_stream_has_worker(stream)) return function(arguments);
    pthread_mutex_lock(&stream->mutex);
    while (stream->submitted - stream->finished == CPU_QUEUE) pthread_cond_wait(&stream->progress, &stream->mutex);
    CpuItem *item = &stream->queue[stream->submitted % CPU_QUEUE];
    item->function = function;
    memcpy(item->arguments, arguments, arguments_bytes);
    stream->submitted++;
    pthread_cond_signal(&stream->submission);
    pthread_mutex_unlock(&stream->mutex);
    return cudaSuccess;
}

// The ticket of everything submitted to the stream so far.
static inline CpuTicket cpu_stream_ticket(cudaStream_t stream) {
    CpuTicket ticket = {NULL, 0};
    if (!cpu_stream_has_worker(stream)) return ticket;
    pthread_mutex_lock(&stream->mutex);
    ticket.stream = stream;
    ticket.finished = stream->submitted;
    pthread_mutex_unlock(&stream->mutex);
    return ticket;
}

static inline bool cpu_ticket_passed(CpuTicket ticket) {
    if (ticket.stream == NULL) return true;
    pthread_mutex_lock(&ticket.stream->mutex);
    bool passed = ticket.stream->finished >= ticket.finished;
    pthread_mutex_unlock(&ticket.stream->mutex);
    return passed;
}

// Blocks the calling thread until the ticket has passed.
static inline cudaError_t cpu_ticket_wait(void *argument) {
    CpuTicket ticket = *(CpuTicket *)argument;
    if (ticket.stream == NULL) return cudaSuccess;
    pthread_mutex_lock(&ticket.stream->mutex);
    while (ticket.stream->finished < ticket.finished)
        pthread_cond_wait(&ticket.stream->progress, &ticket.stream->mutex);
    pthread_mutex_unlock(&ticket.stream->mutex);
    return cpu_sticky_error();
}

// What is submitted to the stream from now on waits for the ticket.
static inline cudaError_t cpu_stream_wait(cudaStream_t stream, CpuTicket ticket) {
    if (ticket.stream == NULL || ticket.stream == stream) return cudaSuccess;
    return cpu_stream_run(stream, cpu_ticket_wait, &ticket, sizeof ticket);
}

#endif
#endif
