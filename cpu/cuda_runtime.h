// cuda_runtime.h (CPU): the part of the CUDA runtime that the program uses, with the toolkit's names and meaning.
//
//  - Device memory is host memory, allocated once and touched at once, in huge pages where the kernel has them: a first
//    touch costs far more than the arithmetic on it, so no page may fault in a step.
//  - The NULL stream and those of cudaStreamCreate() are executed by the calling thread, at the call: eager execution
//  is
//    one of the orders that CUDA allows. Only one thread at a time may use such a stream.
//  - A cudaStreamNonBlocking stream has a worker thread that executes its queue in order, so that communication
//  overlaps
//    computation. Idle workers sleep. The queue is bounded and nothing is allocated per call; a full queue blocks.
//  - An event is a ticket: a stream and how many of its items have to be finished. Recording it again replaces the
//    ticket; waits that are queued already keep the older one.
//  - The first failure of a worker is sticky: nothing that is queued executes any more, and every call that
//  synchronises
//    returns the error.
#ifndef CPU_CUDA_RUNTIME_H
#define CPU_CUDA_RUNTIME_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "machine.h"
#include "stream.h"

// The toolkit's values.
typedef enum {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
} cudaMemcpyKind;

enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem;
    int multiProcessorCount; // cores that the process may use
    int major, minor;        // no compute capability: 0.0
};

typedef struct CUevent_st *cudaEvent_t;
typedef void (*cudaHostFn_t)(void *user_data);

struct CUevent_st {
    bool timing;
    pthread_mutex_t mutex;
    CpuTicket ticket;
    uint64_t records; // number of the last record; 0: never recorded
    uint64_t stamped; // number of the record that `time` belongs to
    struct timespec time;
    cudaEvent_t next; // in the list of free events
};

typedef struct {
    pthread_mutex_t mutex; // guards the lists
    cudaStream_t streams;
    cudaEvent_t free_events;
} CpuDevice;

CPU_SHARED CpuDevice *cpu_device(void) {
    static CpuDevice device = {PTHREAD_MUTEX_INITIALIZER, NULL, NULL};
    return &device;
}

// ------------------------------------------------------------------------------------------------------------ errors

CPU_SHARED cudaError_t *cpu_last_error(void) {
    static __thread cudaError_t last = cudaSuccess;
    return &last;
}

// Every call ends with this: a failure is remembered for cudaGetLastError().
static inline cudaError_t cpu_result(cudaError_t status) {
    if (status != cudaSuccess && status != cudaErrorNotReady) *cpu_last_error() = status;
    return status;
}

// The calling thread's last error, which it clears; a sticky error stays.
static inline cudaError_t cudaGetLastError(void) {
    cudaError_t status = *cpu_last_error();
    *cpu_last_error() = cudaSuccess;
    return cpu_sticky_error() != cudaSuccess ? cpu_sticky_error() : status;
}

typedef struct {
    cudaError_t status;
    const char *name, *text;
} CpuErrorText;

static inline const CpuErrorText *cpu_error_text(cudaError_t status) {
    static const CpuErrorText texts[] = {
        {cudaSuccess, "cudaSuccess", "no error"},
        {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
        {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
        {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration of a launch"},
        {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device number"},
        {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid stream or event"},
        {cudaErrorNotReady, "cudaErrorNotReady", "not finished yet"},
        {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "an operation on a stream failed"},
        {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
    };
    size_t last = sizeof texts / sizeof texts[0] - 1;
    for (size_t i = 0; i < last; i++)
        if (texts[i].status == status) return &texts[i];
    return &texts[last];
}

static inline const char *cudaGetErrorName(cudaError_t status) {
    return cpu_error_text(status)->name;
}
static inline const char *cudaGetErrorString(cudaError_t status) {
    return cpu_error_text(status)->text;
}

// ------------------------------------------------------------------------------------------------------------ device

static inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}

static inline cudaError_t cudaSetDevice(int device) {
    return cpu_result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

static inline cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

static inline cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    machine_memory(free_bytes, total_bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    if (device != 0) return cpu_result(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    size_t free_bytes;
    machine_name(properties->name, sizeof properties->name);
    machine_memory(&free_bytes, &properties->totalGlobalMem);
    properties->multiProcessorCount = machine_cores();
    return cudaSuccess;
}

// A copy, or a fill, as an item of a stream.
typedef struct {
    void *destination;
    const void *source; // NULL: set to `value`
    size_t bytes;
    int value;
} CpuTransfer;

static inline cudaError_t cpu_transfer(void *argument) {
    CpuTransfer *transfer = (CpuTransfer *)argument;
    if (transfer->source == NULL)
        memset(transfer->destination, transfer->value, transfer->bytes);
    else if (transfer->source != transfer->destination)
        memcpy(transfer->destination, transfer->source, transfer->bytes);
    return cudaSuccess;
}

#ifdef TRAIN_GPT_EMULATOR

// Memory and streams of the emulator: emulator_stream.h.
enum { CPU_EVENT_IS_AN_ITEM = 1 };
cudaError_t cudaMalloc(void **pointer, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaMallocHost(void **pointer, size_t bytes);
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user_data);
cudaError_t cudaMemcpyAsync(void *destination, const void *source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemcpy(void *destination, const void *source, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemsetAsync(void *destination, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemset(void *destination, int value, size_t bytes);

#else

enum { CPU_EVENT_IS_AN_ITEM = 0 };

// ------------------------------------------------------------------------------------------------------------ memory

enum { CPU_PAGE = 4096, CPU_HUGE_PAGE = 2 << 20 };

// Stands at the start of the page before an allocation.
typedef struct {
    uint64_t magic;
    size_t bytes; // of the mapping, this page included
} CpuAllocation;

#define CPU_ALLOCATION_MAGIC 0x6370756d656d6f72ull

// Zeroed memory, aligned to a page, or to a huge page if it is as large as one.
static inline cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    if (pointer == NULL) return cpu_result(cudaErrorInvalidValue);
    *pointer = NULL;
    if (bytes == 0) return cudaSuccess;
    // The kernel promises more memory than there is and kills who uses it; so ask first.
    size_t available, total;
    machine_memory(&available, &total);
    if (bytes > available) return cpu_result(cudaErrorMemoryAllocation);
    size_t aligned_bytes = (bytes + CPU_PAGE - 1) / CPU_PAGE * CPU_PAGE;
    size_t alignment = bytes >= CPU_HUGE_PAGE ? CPU_HUGE_PAGE : CPU_PAGE;
    size_t mapped = aligned_bytes + CPU_PAGE + alignment;
    void *mapping = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return cpu_result(cudaErrorMemoryAllocation);
    uintptr_t begin = (uintptr_t)mapping, end = begin + mapped;
    uintptr_t start = (begin + CPU_PAGE + alignment - 1) / alignment * alignment;
    if (start - CPU_PAGE > begin) munmap(mapping, start - CPU_PAGE - begin);
    if (end > start + aligned_bytes) munmap((void *)(start + aligned_bytes), end - start - aligned_bytes);
    CpuAllocation *header = (CpuAllocation *)(start - CPU_PAGE);
    header->magic = CPU_ALLOCATION_MAGIC;
    header->bytes = aligned_bytes + CPU_PAGE;
    if (alignment == CPU_HUGE_PAGE) madvise((void *)start, aligned_bytes, MADV_HUGEPAGE); // merely advice
    for (size_t i = 0; i < aligned_bytes; i += CPU_PAGE) ((volatile char *)start)[i] = 0;
    *pointer = (void *)start;
    return cudaSuccess;
}

static inline cudaError_t cudaDeviceSynchronize(void);

// Waits for the device first, as the toolkit's does: queued work may still use the memory.
static inline cudaError_t cudaFree(void *pointer) {
    if (pointer == NULL) return cudaSuccess;
    CpuAllocation *header = (CpuAllocation *)((uintptr_t)pointer - CPU_PAGE);
    if ((uintptr_t)pointer % CPU_PAGE != 0 || header->magic != CPU_ALLOCATION_MAGIC)
        return cpu_result(cudaErrorInvalidValue);
    cudaError_t status = cudaDeviceSynchronize();
    header->magic = 0;
    munmap(header, header->bytes);
    return status;
}

static inline cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    return cudaMalloc(pointer, bytes);
}
static inline cudaError_t cudaFreeHost(void *pointer) {
    return cudaFree(pointer);
}

// ----------------------------------------------------------------------------------------------------------- streams

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    if (stream == NULL || (flags & ~(unsigned)cudaStreamNonBlocking) != 0) return cpu_result(cudaErrorInvalidValue);
    *stream = NULL;
    CpuDevice *device = cpu_device();
    bool worker = (flags & cudaStreamNonBlocking) != 0;
    pthread_mutex_lock(&device->mutex);
    cudaStream_t created = device->streams;
    while (created != NULL && !(created->free && created->worker == worker)) created = created->next;
    if (created == NULL) {
        created = (cudaStream_t)calloc(1, sizeof *created);
        CpuItem *queue = created == NULL || !worker ? NULL : (CpuItem *)malloc(CPU_QUEUE * sizeof(CpuItem));
        if (created == NULL || (worker && queue == NULL)) {
            free(created);
            pthread_mutex_unlock(&device->mutex);
            return cpu_result(cudaErrorMemoryAllocation);
        }
        if (worker) memset(queue, 0, CPU_QUEUE * sizeof(CpuItem)); // so that no page faults later
        pthread_mutex_init(&created->mutex, NULL);
        pthread_cond_init(&created->submission, NULL);
        pthread_cond_init(&created->progress, NULL);
        created->worker = worker;
        created->queue = queue;
        created->next = device->streams;
        device->streams = created;
    }
    created->free = false;
    created->closing = false;
    int failed = 0;
    if (worker) { // signals are for the main thread
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        failed = pthread_create(&created->thread, NULL, cpu_stream_worker, created);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        created->free = failed != 0;
    }
    pthread_mutex_unlock(&device->mutex);
    if (failed) return cpu_result(cudaErrorUnknown);
    *stream = created;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

// Priorities have no meaning here: both ends of the range are 0.
static inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)priority;
    return cudaStreamCreateWithFlags(stream, flags);
}

// Finishes the stream's work first.
static inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (stream == NULL || stream->free) return cpu_result(cudaErrorInvalidResourceHandle);
    if (stream->worker) {
        pthread_mutex_lock(&stream->mutex);
        stream->closing = true;
        pthread_cond_signal(&stream->submission);
        pthread_mutex_unlock(&stream->mutex);
        pthread_join(stream->thread, NULL);
    }
    pthread_mutex_lock(&cpu_device()->mutex);
    stream->free = true;
    pthread_mutex_unlock(&cpu_device()->mutex);
    return cudaSuccess;
}

static inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    CpuTicket ticket = cpu_stream_ticket(stream);
    cpu_ticket_wait(&ticket);
    return cpu_result(cpu_sticky_error());
}

static inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (!cpu_ticket_passed(cpu_stream_ticket(stream))) return cudaErrorNotReady;
    return cpu_result(cpu_sticky_error());
}

static inline cudaError_t cudaDeviceSynchronize(void) {
    CpuDevice *device = cpu_device();
    pthread_mutex_lock(&device->mutex);
    cudaStream_t stream = device->streams; // only ever grows at its head
    pthread_mutex_unlock(&device->mutex);
    for (; stream != NULL; stream = stream->next) {
        CpuTicket ticket = cpu_stream_ticket(stream);
        cpu_ticket_wait(&ticket);
    }
    return cpu_result(cpu_sticky_error());
}

typedef struct {
    cudaHostFn_t function;
    void *user_data;
} CpuHostCall;

static inline cudaError_t cpu_host_call(void *argument) {
    CpuHostCall *call = (CpuHostCall *)argument;
    call->function(call->user_data);
    return cudaSuccess;
}

static inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user_data) {
    if (function == NULL) return cpu_result(cudaErrorInvalidValue);
    CpuHostCall call = {function, user_data};
    return cpu_result(cpu_stream_run(stream, cpu_host_call, &call, sizeof call));
}

// ------------------------------------------------------------------------------------------------------------ copies

static inline cudaError_t cudaMemcpyAsync(void *destination, const void *source, size_t bytes, cudaMemcpyKind kind,
                                          cudaStream_t stream) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cpu_result(cudaErrorInvalidValue);
    if (bytes == 0) return cudaSuccess;
    if (destination == NULL || source == NULL) return cpu_result(cudaErrorInvalidValue);
    CpuTransfer transfer = {destination, source, bytes, 0};
    return cpu_result(cpu_stream_run(stream, cpu_transfer, &transfer, sizeof transfer));
}

static inline cudaError_t cudaMemcpy(void *destination, const void *source, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(destination, source, bytes, kind, NULL);
}

static inline cudaError_t cudaMemsetAsync(void *destination, int value, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    if (destination == NULL) return cpu_result(cudaErrorInvalidValue);
    CpuTransfer transfer = {destination, NULL, bytes, value};
    return cpu_result(cpu_stream_run(stream, cpu_transfer, &transfer, sizeof transfer));
}

static inline cudaError_t cudaMemset(void *destination, int value, size_t bytes) {
    return cudaMemsetAsync(destination, value, bytes, NULL);
}

#endif

// ------------------------------------------------------------------------------------------------------------ events

static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    if (event == NULL) return cpu_result(cudaErrorInvalidValue);
    *event = NULL;
    CpuDevice *device = cpu_device();
    pthread_mutex_lock(&device->mutex);
    cudaEvent_t created = device->free_events;
    if (created != NULL) device->free_events = created->next;
    pthread_mutex_unlock(&device->mutex);
    if (created == NULL) {
        created = (cudaEvent_t)calloc(1, sizeof *created);
        if (created == NULL) return cpu_result(cudaErrorMemoryAllocation);
        pthread_mutex_init(&created->mutex, NULL);
    }
    created->timing = (flags & cudaEventDisableTiming) == 0;
    *event = created;
    return cudaSuccess;
}

static inline cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

static inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (event == NULL) return cpu_result(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&event->mutex);
    event->ticket.stream = NULL; // as one that was never recorded
    event->records++;            // a time stamp still queued is not for its next owner
    pthread_mutex_unlock(&event->mutex);
    pthread_mutex_lock(&cpu_device()->mutex);
    event->next = cpu_device()->free_events;
    cpu_device()->free_events = event;
    pthread_mutex_unlock(&cpu_device()->mutex);
    return cudaSuccess;
}

typedef struct {
    cudaEvent_t event;
    uint64_t record;
} CpuStamp;

static inline cudaError_t cpu_stamp(void *argument) {
    CpuStamp *stamp = (CpuStamp *)argument;
    pthread_mutex_lock(&stamp->event->mutex);
    if (stamp->record == stamp->event->records) { // else recorded again since
        clock_gettime(CLOCK_MONOTONIC, &stamp->event->time);
        stamp->event->stamped = stamp->record;
    }
    pthread_mutex_unlock(&stamp->event->mutex);
    return cudaSuccess;
}

static inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (event == NULL) return cpu_result(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&event->mutex);
    CpuStamp stamp = {event, ++event->records};
    pthread_mutex_unlock(&event->mutex);
    const bool item = event->timing || CPU_EVENT_IS_AN_ITEM;
    cudaError_t status = item ? cpu_stream_run(stream, cpu_stamp, &stamp, sizeof stamp) : cudaSuccess;
    CpuTicket ticket = cpu_stream_ticket(stream);
    pthread_mutex_lock(&event->mutex);
    event->ticket = ticket;
    pthread_mutex_unlock(&event->mutex);
    return cpu_result(status);
}

static inline CpuTicket cpu_event_ticket(cudaEvent_t event) {
    pthread_mutex_lock(&event->mutex);
    CpuTicket ticket = event->ticket;
    pthread_mutex_unlock(&event->mutex);
    return ticket;
}

static inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    if (event == NULL) return cpu_result(cudaErrorInvalidResourceHandle);
    if (flags != 0) return cpu_result(cudaErrorInvalidValue);
    return cpu_result(cpu_stream_wait(stream, cpu_event_ticket(event)));
}

static inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event == NULL) return cpu_result(cudaErrorInvalidResourceHandle);
    CpuTicket ticket = cpu_event_ticket(event);
    cpu_ticket_wait(&ticket);
    return cpu_result(cpu_sticky_error());
}

static inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event == NULL) return cpu_result(cudaErrorInvalidResourceHandle);
    if (!cpu_ticket_passed(cpu_event_ticket(event))) return cudaErrorNotReady;
    return cpu_result(cpu_sticky_error());
}

// Milliseconds from the last record of `start` to the last record of `stop`.
static inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t stop) {
    if (ms == NULL) return cpu_result(cudaErrorInvalidValue);
    if (start == NULL || stop == NULL || !start->timing || !stop->timing)
        return cpu_result(cudaErrorInvalidResourceHandle);
    if (!cpu_ticket_passed(cpu_event_ticket(start)) || !cpu_ticket_passed(cpu_event_ticket(stop)))
        return cudaErrorNotReady;
    if (start->stamped == 0 || start->stamped != start->records || stop->stamped == 0 || stop->stamped != stop->records)
        return cpu_result(cudaErrorInvalidResourceHandle); // never recorded
    *ms = (float)((double)(stop->time.tv_sec - start->time.tv_sec) * 1e3 +
                  (double)(stop->time.tv_nsec - start->time.tv_nsec) * 1e-6);
    return cudaSuccess;
}

#ifdef TRAIN_GPT_EMULATOR
#include "emulator.h" // kernels and their launches
#endif

#endif
