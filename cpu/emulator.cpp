// emulator.cpp: runs what emulator.h launches: blocks on several OS threads, in the order of the settings.
#include "emulator.h"
#include <link.h>
#include <signal.h>
#include "emulator_block.h"
#include "emulator_warp.h"
#include "random.h"

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;
__thread EmulatorBytes emulator_bytes;

namespace {

enum { POISONED_BLOCKS = 2 }; // the first blocks of each launch on each OS thread find NaN in shared memory

// ------------------------------------------------------------------------------------------------------- shared memory

#ifndef __SANITIZE_ADDRESS__
// This OS thread's thread-local variables of the executable: the shared variables of all kernels, and a few others.
struct Range {
    char *begin;
    size_t bytes;
};

int find_thread_locals(dl_phdr_info *info, size_t, void *range) {
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_TLS)
            *(Range *)range = {(char *)info->dlpi_tls_data, info->dlpi_phdr[i].p_memsz};
    return 1; // the first is the executable
}

Range thread_locals() {
    Range range = {NULL, 0};
    dl_iterate_phdr(find_thread_locals, &range);
    return range;
}
#endif

#if !defined(__SANITIZE_ADDRESS__) && !defined(EMULATOR_TSAN)
// Fills static shared memory with NaN. It is among the executable's thread-local variables; of the others, an OS thread
// that does nothing but run blocks needs those that are kept here.
void poison_shared() {
    struct {
        uint3 thread, block_index, block_size, grid;
        EmulatorBytes bytes;
        Block *state;
    } kept = {threadIdx, blockIdx, blockDim, gridDim, emulator_bytes, block};
    const Range range = thread_locals();
    memset(range.begin, 0xff, range.bytes);
    threadIdx = kept.thread;
    blockIdx = kept.block_index;
    blockDim = kept.block_size;
    gridDim = kept.grid;
    emulator_bytes = kept.bytes;
    block = kept.state;
}
#else // it is elsewhere, or the calling thread's other variables are needed
void poison_shared() {}
#endif

// ------------------------------------------------------------------------------------------------- running a launch

uint64_t total_read, total_written, total_launches; // atomic

uint64_t common_divisor(uint64_t a, uint64_t b) {
    return b == 0 ? a : common_divisor(b, a % b);
}

// Blocks in the order of the threads: block i of it is `first + i * stride`, modulo the number of blocks.
struct Share {
    const EmulatorLaunch *launch;
    uint64_t blocks, next; // next: atomic
    uint64_t first, stride;
};

void share_out(Share *share, const EmulatorLaunch *launch) {
    static uint64_t launches = 0;
    const Settings &how = settings();
    share->launch = launch;
    share->blocks = (uint64_t)launch->grid.x * launch->grid.y * launch->grid.z;
    share->next = 0;
    share->first = how.order == DESCENDING ? share->blocks - 1 : 0;
    share->stride = how.order == DESCENDING ? share->blocks - 1 : 1;
    if (how.order != RANDOM) return;
    const uint64_t word = (how.seed + ++launches) * 0x9e3779b97f4a7c15ull;
    share->first = (word >> 32) % share->blocks;
    share->stride = (word & 0xffffffffu) % share->blocks;
    while (common_divisor(share->stride, share->blocks) != 1) share->stride++;
}

// Runs blocks of the launch until none are left.
void run_blocks(Share *share, int worker) {
    const EmulatorLaunch &launch = *share->launch;
    const dim3 shape = launch.block, grid = launch.grid;
    if (block == NULL) {
        void *memory =
            mmap(NULL, sizeof(Block), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) emulator_die("no memory for a block");
        block = (Block *)memory;
    }
    block->launch = &launch;
    block->random = (settings().seed * 0x9e3779b97f4a7c15ull + share->first * 31 + (uint64_t)worker) | 1;
    for (int i = 0; i < 4; i++) draw();
    fiber_of_thread(&block->scheduler);
    blockDim = shape;
    gridDim = grid;
    emulator_bytes = {0, 0};
    block->threads = shape.x * shape.y * shape.z;
    block->warps = (block->threads + WARP - 1) / WARP;
    if (memcmp(&block->shape, &shape, sizeof shape) != 0) {
        for (unsigned t = 0; t < block->threads; t++)
            block->lanes[t].index = {t % shape.x, t / shape.x % shape.y, t / shape.x / shape.y};
        block->shape = shape;
    }
    // Of the exact size, so that AddressSanitizer sees an access past the end.
    block->shared = NULL;
    if (launch.shared_bytes > 0 && posix_memalign(&block->shared, 128, launch.shared_bytes) != 0)
        emulator_die("no memory for %zu bytes of dynamic shared memory", launch.shared_bytes);
#ifdef EMULATOR_TSAN
    if (settings().blocks_unordered) { // one block uses what another has used
        if (block->shared != NULL)
            AnnotateBenignRaceSized(__FILE__, __LINE__, block->shared, launch.shared_bytes, "shared memory");
        static const Range range = thread_locals();
        static bool annotated = false;
        if (!annotated) AnnotateBenignRaceSized(__FILE__, __LINE__, range.begin, range.bytes, "shared memory");
        annotated = true;
    }
#endif
    uint64_t i;
    for (int done = 0; (i = __atomic_fetch_add(&share->next, 1, __ATOMIC_RELAXED)) < share->blocks; done++) {
        const uint64_t b = (uint64_t)((share->first + (unsigned __int128)i * share->stride) % share->blocks);
        if (done < POISONED_BLOCKS) {
            poison_shared();
            if (block->shared != NULL) memset(block->shared, 0xff, launch.shared_bytes);
        }
        run_block({(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y), (unsigned)(b / grid.x / grid.y)},
                  done == 0);
    }
#ifdef EMULATOR_TSAN
    if (settings().blocks_unordered) __tsan_acquire(&block->end);
#endif
    free(block->shared);
    block->launch = NULL;
    __atomic_fetch_add(&total_read, emulator_bytes.read, __ATOMIC_RELAXED);
    __atomic_fetch_add(&total_written, emulator_bytes.written, __ATOMIC_RELAXED);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(EMULATOR_TSAN)

// OS threads that run blocks and nothing else.
struct Workers {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t submission = PTHREAD_COND_INITIALIZER, progress = PTHREAD_COND_INITIALIZER;
    int started = 0, busy = 0;
    int wanted = 0;          // workers 0 to wanted - 1 take part in the launch
    uint64_t generation = 0; // counts launches
    Share *share = NULL;
} workers;

void *worker_main(void *number) {
    const int self = (int)(intptr_t)number;
    uint64_t seen = 0;
    pthread_mutex_lock(&workers.mutex);
    for (;;) {
        while (workers.generation == seen || self >= workers.wanted || workers.share == NULL) {
            if (self >= workers.wanted) seen = workers.generation;
            pthread_cond_wait(&workers.submission, &workers.mutex);
        }
        seen = workers.generation;
        Share *share = workers.share;
        pthread_mutex_unlock(&workers.mutex);
        run_blocks(share, self);
        pthread_mutex_lock(&workers.mutex);
        if (--workers.busy == 0) pthread_cond_signal(&workers.progress);
    }
    return NULL;
}

void run_share(Share *share) {
    pthread_mutex_lock(&workers.mutex);
    workers.wanted = (uint64_t)settings().workers < share->blocks ? settings().workers : (int)share->blocks;
    while (workers.started < workers.wanted) {
        pthread_t thread;
        sigset_t all, before;
        sigfillset(&all); // signals are for the main thread
        pthread_sigmask(SIG_SETMASK, &all, &before);
        const int failed = pthread_create(&thread, NULL, worker_main, (void *)(intptr_t)workers.started);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (failed) emulator_die("no thread for the emulator");
        pthread_detach(thread);
        workers.started++;
    }
    workers.share = share;
    workers.generation++;
    workers.busy = workers.wanted;
    pthread_cond_broadcast(&workers.submission);
    while (workers.busy > 0) pthread_cond_wait(&workers.progress, &workers.mutex);
    workers.share = NULL;
    pthread_mutex_unlock(&workers.mutex);
}

#else // one thread, the caller's: sanitizers see the order of launches, and `static` shared memory is of one block

void run_share(Share *share) {
    run_blocks(share, 0);
}

#endif

// Runs the launch, now.
void run_launch(const EmulatorLaunch *launch) {
    Share share;
    share_out(&share, launch);
    run_share(&share);
    __atomic_fetch_add(&total_launches, 1, __ATOMIC_RELAXED);
}

// --------------------------------------------------------------------------------------------------------- attributes

struct Attribute {
    const void *kernel;
    size_t shared_bytes;
} attributes[256];
int attributes_used;

enum { SHARED_DEFAULT = 48 << 10, SHARED_MOST = 163 << 10 }; // of compute capability 8.0

size_t shared_limit(const void *kernel) {
    for (int i = 0; i < attributes_used; i++)
        if (attributes[i].kernel == kernel) return attributes[i].shared_bytes;
    return SHARED_DEFAULT;
}

} // namespace

#include "emulator_stream.h"

cudaError_t emulator_set_attribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cpu_result(cudaSuccess);
    if (value < 0 || value > SHARED_MOST) return cpu_result(cudaErrorInvalidValue);
    int i = 0;
    while (i < attributes_used && attributes[i].kernel != kernel) i++;
    if (i == (int)(sizeof attributes / sizeof attributes[0])) return cpu_result(cudaErrorMemoryAllocation);
    if (i == attributes_used) attributes_used++;
    attributes[i] = {kernel, (size_t)value};
    return cudaSuccess;
}

cudaError_t emulator_submit(const EmulatorLaunch &launch, cudaStream_t stream) {
    const dim3 block_size = launch.block, grid = launch.grid;
    const uint64_t threads = (uint64_t)block_size.x * block_size.y * block_size.z;
    if (threads == 0 || block_size.x > THREADS || block_size.y > THREADS || block_size.z > 64 || threads > THREADS ||
        grid.x == 0 || grid.x > INT_MAX || grid.y == 0 || grid.y > 65535 || grid.z == 0 || grid.z > 65535 ||
        launch.shared_bytes > shared_limit(launch.kernel)) {
        launch.release(launch.call);
        return cpu_result(cudaErrorInvalidConfiguration);
    }
    const std::shared_ptr<void> call(launch.call, launch.release);
    Lock lock;
    return cpu_result(submit(stream, launch.text, [launch, call] {
        run_launch(&launch);
        return cudaSuccess;
    }));
}

extern "C" {

void emulator_counts_reset(void) {
    total_read = total_written = total_launches = 0;
}

void emulator_counts(uint64_t *read, uint64_t *written, uint64_t *launches) {
    *read = total_read;
    *written = total_written;
    *launches = total_launches;
}

bool emulator_set_threads(const char *order) {
    return settings().set_order(order);
}

bool emulator_set_cp_async(const char *when) {
    return settings().set_copies(when);
}

bool emulator_set_streams(const char *policy) {
    Lock lock;
    return device().set_policy(policy);
}

void emulator_set_blocks_unordered(bool unordered) {
    settings().blocks_unordered = unordered;
}
}
