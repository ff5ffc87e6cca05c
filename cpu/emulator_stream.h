// emulator_stream.h: memory and streams of the emulator. Part of emulator.cpp.
//
// A stream is a queue that the host's thread works off, so that whatever order CUDA allows can be chosen, and chosen
// again. An item may run when it heads its stream and all tickets it waits for have passed. Which of those runs, and
// when, is the policy (TRAIN_GPT_STREAMS):
//  - eager: whatever may run does so at once;
//  - latest: only what the host waits for, and what that waits for;
//  - random:SEED: any that may, at random moments.
// A result that depends on the policy lacks a wait.
//
// What CUDA says about who waits for whom (Runtime API, "API synchronization behavior" and "Stream synchronization
// behavior") holds to the letter, and no further:
//  - An item of the NULL stream waits for all that blocking streams hold when it is submitted, and theirs for it.
//    Streams of cudaStreamNonBlocking have no part in that.
//  - Launches, fills, and copies between device buffers are asynchronous, cudaMemcpy() included. So are copies between
//    device and pinned memory, by cudaMemcpyAsync().
//  - What pageable memory holds when a copy to the device is called is what arrives, maybe later. A copy to pageable
//    memory, and one between host buffers, is complete when the call returns.
//
// An item may block: a collective waits for the other ranks. As every rank has its collectives in one stream, in one
// order, some rank can always go on.
#ifndef CPU_EMULATOR_STREAM_H
#define CPU_EMULATOR_STREAM_H

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

struct Item {
    const char *name;
    std::function<cudaError_t()> run;
    std::vector<CpuTicket> waits;
};

struct CUstream_st {
    bool blocking;
    bool destroyed; // by its user; it still runs what it holds, and is used again afterwards, its counters running on
    uint64_t submitted, finished;
    std::deque<Item> items;
};

enum class Policy { EAGER, LATEST, RANDOM };

struct Allocation {
    size_t bytes;
    bool device; // else pinned host memory
};

struct Device {
    pthread_mutex_t mutex; // held while items run, so that one thread at a time does
    Policy policy = Policy::EAGER;
    uint64_t random = 1;
    std::vector<cudaStream_t> streams; // [0]: the NULL stream
    std::map<const char *, Allocation> allocations;

    Device() {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
        pthread_mutex_init(&mutex, &attributes);
        streams.push_back(new CUstream_st{true, false, 0, 0, {}});
        const char *value = getenv("TRAIN_GPT_STREAMS");
        if (value != NULL && !set_policy(value)) refuse_setting("TRAIN_GPT_STREAMS", value);
    }

    bool set_policy(const char *word) {
        uint64_t seed;
        if (strcmp(word, "eager") == 0) return policy = Policy::EAGER, true;
        if (strcmp(word, "latest") == 0) return policy = Policy::LATEST, true;
        if (!random_seed(word, &seed)) return false;
        policy = Policy::RANDOM;
        const char *rank = getenv("OMPI_COMM_WORLD_RANK"); // ranks differ
        random = random_mix(seed * 1000 + (rank != NULL ? (uint64_t)atoi(rank) : 0)) | 1;
        return true;
    }

    uint64_t draw(uint64_t below) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        return (random >> 33) % below;
    }
};

static Device &device() {
    static Device *only = new Device; // never destroyed: the program may end while streams hold items
    return *only;
}

struct Lock {
    Lock() { pthread_mutex_lock(&device().mutex); }
    ~Lock() { pthread_mutex_unlock(&device().mutex); }
};

// NULL: there is no such stream.
static cudaStream_t stream_of(cudaStream_t handle) {
    if (handle == NULL) return device().streams[0];
    for (cudaStream_t stream : device().streams)
        if (stream == handle && !stream->destroyed && stream != device().streams[0]) return stream;
    return NULL;
}

// ------------------------------------------------------------------------------------------------------------ running

static bool passed(const CpuTicket &ticket) {
    return ticket.stream == NULL || ticket.stream->finished >= ticket.finished;
}

// What the head of the stream waits for; NULL: it may run.
static const CpuTicket *obstacle(cudaStream_t stream) {
    for (const CpuTicket &ticket : stream->items.front().waits)
        if (!passed(ticket)) return &ticket;
    return NULL;
}

static void step(cudaStream_t stream) {
    Item item = std::move(stream->items.front());
    stream->items.pop_front();
    if (cpu_sticky_error() == cudaSuccess) {
        const cudaError_t status = item.run();
        if (status != cudaSuccess) cpu_set_sticky_error(status);
    }
    stream->finished++;
}

[[noreturn]] static void stuck() {
    fprintf(stderr, "\nemulator: no stream can go on; each one's next item:\n");
    const std::vector<cudaStream_t> &streams = device().streams;
    for (size_t i = 0; i < streams.size(); i++) {
        if (streams[i]->items.empty()) continue;
        fprintf(stderr, "  stream %zu, of %zu items: %s\n", i, streams[i]->items.size(), streams[i]->items[0].name);
        const CpuTicket *ticket = obstacle(streams[i]);
        for (size_t k = 0; ticket != NULL && k < streams.size(); k++)
            if (streams[k] == ticket->stream)
                fprintf(stderr, "    waits for item %llu of stream %zu, which has finished %llu of %llu\n",
                        (unsigned long long)ticket->finished, k, (unsigned long long)streams[k]->finished,
                        (unsigned long long)streams[k]->submitted);
    }
    abort();
}

// One of the streams whose head may run, at random; NULL: there is none.
static cudaStream_t any_able() {
    std::vector<cudaStream_t> able;
    for (cudaStream_t stream : device().streams)
        if (!stream->items.empty() && obstacle(stream) == NULL) able.push_back(stream);
    return able.empty() ? NULL : able[device().draw(able.size())];
}

// The stream whose head has to run first for `ticket` to pass.
static cudaStream_t first_needed(const CpuTicket *ticket) {
    for (;;) {
        cudaStream_t stream = ticket->stream;
        if (stream->items.empty()) stuck();
        ticket = obstacle(stream);
        if (ticket == NULL) return stream;
    }
}

static void step_towards(const CpuTicket &ticket) {
    cudaStream_t stream = device().policy == Policy::RANDOM ? any_able() : first_needed(&ticket);
    if (stream == NULL) stuck();
    step(stream);
}

static cudaError_t run_until(const CpuTicket &ticket) {
    while (!passed(ticket)) step_towards(ticket);
    return cpu_sticky_error();
}

// What the policy lets run by itself.
static void run_some() {
    switch (device().policy) {
    case Policy::EAGER:
        for (bool progress = true; progress;) {
            progress = false;
            for (size_t i = 0; i < device().streams.size(); i++)
                for (cudaStream_t stream = device().streams[i]; !stream->items.empty() && obstacle(stream) == NULL;) {
                    step(stream);
                    progress = true;
                }
        }
        break;
    case Policy::LATEST:
        break;
    case Policy::RANDOM:
        while (device().draw(4) == 0) {
            cudaStream_t stream = any_able();
            if (stream == NULL) break;
            step(stream);
        }
    }
}

static CpuTicket ticket_of(cudaStream_t stream) {
    return {stream, stream->submitted};
}

static cudaError_t submit(cudaStream_t handle, const char *name, std::function<cudaError_t()> run,
                          CpuTicket wait = {NULL, 0}) {
    cudaStream_t stream = stream_of(handle), legacy = device().streams[0];
    if (stream == NULL) return cudaErrorInvalidResourceHandle;
    Item item = {name, std::move(run), {}};
    if (!passed(wait)) item.waits.push_back(wait);
    if (stream == legacy) {
        for (cudaStream_t other : device().streams)
            if (other != legacy && other->blocking && !other->items.empty()) item.waits.push_back(ticket_of(other));
    } else if (stream->blocking && !legacy->items.empty()) {
        item.waits.push_back(ticket_of(legacy));
    }
    stream->items.push_back(std::move(item));
    stream->submitted++;
    run_some();
    return cpu_sticky_error();
}

// --------------------------------------------------------------------------------- for what the device is made of

cudaError_t cpu_stream_run(cudaStream_t stream, CpuFunction function, void *arguments, size_t arguments_bytes) {
    Lock lock;
    const char *bytes = (const char *)arguments;
    std::vector<char> copy(bytes, bytes + arguments_bytes);
    return submit(stream, "event, collective or library call",
                  [function, copy]() mutable { return function(copy.data()); });
}

CpuTicket cpu_stream_ticket(cudaStream_t handle) {
    Lock lock;
    cudaStream_t stream = stream_of(handle);
    return stream != NULL ? ticket_of(stream) : CpuTicket{NULL, 0};
}

bool cpu_ticket_passed(CpuTicket ticket) {
    Lock lock;
    if (passed(ticket)) return true;
    step_towards(ticket);
    return device().policy == Policy::RANDOM && passed(ticket);
}

cudaError_t cpu_ticket_wait(void *ticket) {
    Lock lock;
    return run_until(*(const CpuTicket *)ticket);
}

cudaError_t cpu_stream_wait(cudaStream_t stream, CpuTicket ticket) {
    Lock lock;
    if (ticket.stream == NULL || ticket.stream == stream_of(stream)) return cudaSuccess;
    return submit(
        stream, "wait for an event", [] { return cudaSuccess; }, ticket);
}

// ------------------------------------------------------------------------------------------------------------ memory

// Of the exact size, so that AddressSanitizer sees an access past the end, and full of NaN.
static cudaError_t allocate(void **pointer, size_t bytes, bool on_device) {
    if (pointer == NULL) return cpu_result(cudaErrorInvalidValue);
    *pointer = NULL;
    if (bytes == 0) return cudaSuccess;
    size_t available, total;
    machine_memory(&available, &total); // the kernel promises more than there is
    if (bytes > available || posix_memalign(pointer, 256, bytes) != 0) {
        *pointer = NULL;
        return cpu_result(cudaErrorMemoryAllocation);
    }
    memset(*pointer, 0xff, bytes);
    Lock lock;
    device().allocations[(const char *)*pointer] = {bytes, on_device};
    return cudaSuccess;
}

// Waits for the device first, as the toolkit's does.
static cudaError_t release(void *pointer, bool on_device) {
    if (pointer == NULL) return cudaSuccess;
    Lock lock;
    auto found = device().allocations.find((const char *)pointer);
    if (found == device().allocations.end() || found->second.device != on_device)
        return cpu_result(cudaErrorInvalidValue);
    const cudaError_t status = cudaDeviceSynchronize();
    device().allocations.erase(found);
    free(pointer);
    return status;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    return allocate(pointer, bytes, true);
}
cudaError_t cudaFree(void *pointer) {
    return release(pointer, true);
}
cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    return allocate(pointer, bytes, false);
}
cudaError_t cudaFreeHost(void *pointer) {
    return release(pointer, false);
}

enum class Place { DEVICE, PINNED, PAGEABLE, NOWHERE };

// Where [pointer, pointer + bytes) is; NOWHERE if it leaves the allocation that it begins in.
static Place place_of(const void *pointer, size_t bytes) {
    auto after = device().allocations.upper_bound((const char *)pointer);
    if (after == device().allocations.begin()) return Place::PAGEABLE;
    const auto &[begin, allocation] = *--after;
    const size_t offset = (size_t)((const char *)pointer - begin);
    if (offset >= allocation.bytes) return Place::PAGEABLE;
    if (bytes > allocation.bytes - offset) return Place::NOWHERE;
    return allocation.device ? Place::DEVICE : Place::PINNED;
}

// ----------------------------------------------------------------------------------------------------------- streams

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    if (stream == NULL || (flags & ~(unsigned)cudaStreamNonBlocking) != 0) return cpu_result(cudaErrorInvalidValue);
    Lock lock;
    cudaStream_t created = NULL;
    for (cudaStream_t old : device().streams)
        if (old->destroyed && old->items.empty()) created = old;
    if (created == NULL) {
        created = new CUstream_st{false, false, 0, 0, {}};
        device().streams.push_back(created);
    }
    created->blocking = flags != cudaStreamNonBlocking;
    created->destroyed = false;
    *stream = created;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

// Priorities have no meaning here: both ends of the range are 0.
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}

// Returns at once; what the stream holds will still run.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Lock lock;
    cudaStream_t stream = handle == NULL ? NULL : stream_of(handle);
    if (stream == NULL) return cpu_result(cudaErrorInvalidResourceHandle);
    stream->destroyed = true;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Lock lock;
    cudaStream_t stream = stream_of(handle);
    return cpu_result(stream == NULL ? cudaErrorInvalidResourceHandle : run_until(ticket_of(stream)));
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Lock lock;
    cudaStream_t stream = stream_of(handle);
    if (stream == NULL) return cpu_result(cudaErrorInvalidResourceHandle);
    return cpu_ticket_passed(ticket_of(stream)) ? cpu_result(cpu_sticky_error()) : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize(void) {
    Lock lock;
    for (size_t i = 0; i < device().streams.size(); i++) run_until(ticket_of(device().streams[i]));
    return cpu_result(cpu_sticky_error());
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user_data) {
    if (function == NULL) return cpu_result(cudaErrorInvalidValue);
    Lock lock;
    return cpu_result(submit(stream, "host function", [=] {
        function(user_data);
        return cudaSuccess;
    }));
}

// ------------------------------------------------------------------------------------------------------------ copies

// `wait`: by cudaMemcpy().
static cudaError_t copy(void *destination, const void *source, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                        bool wait) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidValue;
    if (bytes == 0) return cudaSuccess;
    if (destination == NULL || source == NULL) return cudaErrorInvalidValue;
    Lock lock;
    const Place to = place_of(destination, bytes), from = place_of(source, bytes);
    if (to == Place::NOWHERE || from == Place::NOWHERE) return cudaErrorInvalidValue;
    const bool to_device = to == Place::DEVICE, from_device = from == Place::DEVICE;
    const bool says_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool says_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (to_device != says_to || from_device != says_from)) return cudaErrorInvalidValue;
    const bool captured = from == Place::PAGEABLE && to_device;
    CpuTransfer transfer = {destination, source, bytes, 0};
    std::shared_ptr<std::vector<char>> held;
    if (captured) {
        held = std::make_shared<std::vector<char>>((const char *)source, (const char *)source + bytes);
        transfer.source = held->data();
    }
    if (wait && captured) { // the stream comes to rest before the copy begins
        const cudaError_t status = run_until(ticket_of(stream_of(stream)));
        if (status != cudaSuccess) return status;
    }
    cudaError_t status = submit(stream, "copy", [transfer, held]() mutable { return cpu_transfer(&transfer); });
    const bool both_host = !to_device && !from_device;
    const bool waits = both_host || to == Place::PAGEABLE || (wait && !captured && !(to_device && from_device));
    if (status == cudaSuccess && waits) status = run_until(ticket_of(stream_of(stream)));
    return status;
}

cudaError_t cudaMemcpyAsync(void *destination, const void *source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return cpu_result(copy(destination, source, bytes, kind, stream, false));
}

cudaError_t cudaMemcpy(void *destination, const void *source, size_t bytes, cudaMemcpyKind kind) {
    return cpu_result(copy(destination, source, bytes, kind, NULL, true));
}

cudaError_t cudaMemsetAsync(void *destination, int value, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    Lock lock;
    const Place place = place_of(destination, bytes);
    if (place != Place::DEVICE && place != Place::PINNED) return cpu_result(cudaErrorInvalidValue);
    CpuTransfer transfer = {destination, NULL, bytes, value};
    cudaError_t status = submit(stream, "fill", [transfer]() mutable { return cpu_transfer(&transfer); });
    if (status == cudaSuccess && place == Place::PINNED) status = run_until(ticket_of(stream_of(stream)));
    return cpu_result(status);
}

cudaError_t cudaMemset(void *destination, int value, size_t bytes) {
    return cudaMemsetAsync(destination, value, bytes, NULL);
}

#endif
