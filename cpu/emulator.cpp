// emulator.cpp: runs what emulator.h launches: threads of a block as fibers, warps, barriers, tensor cores' products,
// asynchronous copies; blocks on several OS threads.
//
// A warp runs until all its threads wait or have ended, then the next one. The last lane to arrive at an operation of
// the warp completes it for all of them: one switch per lane, and an operation is atomic.
#include "emulator.h"
#include <errno.h>
#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include "emulator_fiber.h"

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;
__thread EmulatorBytes emulator_bytes;

namespace {

enum { WARP = 32, THREADS = 1024, WARPS = THREADS / WARP, COPIES = 64 };
enum { POISONED_BLOCKS = 2 }; // the first blocks of each launch on each OS thread find NaN in shared memory

// ------------------------------------------------------------------------------------------------------------ settings

enum Order { ASCENDING, DESCENDING, RANDOM };
enum When { DEFERRED, EAGER, EITHER };

struct Settings {
    Order order = ASCENDING;
    When copies = DEFERRED;
    uint64_t seed = 1;
    bool blocks_unordered = false;
    int workers = 1;

    Settings() {
        const char *value;
        if ((value = getenv("TRAIN_GPT_THREADS")) != NULL && !set_order(value)) refuse("TRAIN_GPT_THREADS", value);
        if ((value = getenv("TRAIN_GPT_CP_ASYNC")) != NULL && !set_copies(value)) refuse("TRAIN_GPT_CP_ASYNC", value);
        if ((value = getenv("TRAIN_GPT_BLOCKS")) != NULL) {
            blocks_unordered = strcmp(value, "unordered") == 0;
            if (!blocks_unordered && strcmp(value, "ordered") != 0) refuse("TRAIN_GPT_BLOCKS", value);
        }
#if !defined(__SANITIZE_ADDRESS__) && !defined(EMULATOR_TSAN)
        const char *threads = getenv("OMP_NUM_THREADS");
        workers = threads != NULL && atoi(threads) > 0 ? atoi(threads) : machine_cores();
        if ((value = getenv("TRAIN_GPT_EMULATOR_WORKERS")) != NULL && (workers = atoi(value)) < 1)
            refuse("TRAIN_GPT_EMULATOR_WORKERS", value);
#endif
    }
    bool set_order(const char *word) {
        const bool ascending = strcmp(word, "ascending") == 0;
        if (ascending || strcmp(word, "descending") == 0) {
            order = ascending ? ASCENDING : DESCENDING;
            copies = DEFERRED;
            return true;
        }
        char *end;
        if (strncmp(word, "random:", 7) != 0) return false;
        const uint64_t number = strtoull(word + 7, &end, 10);
        if (end == word + 7 || *end != '\0') return false;
        order = RANDOM;
        copies = EITHER;
        seed = number;
        return true;
    }
    bool set_copies(const char *word) {
        const char *const words[] = {"deferred", "eager", "random"};
        for (int i = 0; i < 3; i++)
            if (strcmp(word, words[i]) == 0) return copies = (When)i, true;
        return false;
    }
    [[noreturn]] static void refuse(const char *variable, const char *value) {
        fprintf(stderr, "emulator: %s=%s is not one of the values in cpu/emulator.h\n", variable, value);
        exit(2);
    }
};

Settings &settings() {
    static Settings all;
    return all;
}

// ------------------------------------------------------------------------------------------------------- one block

enum Kind : uint8_t { NOTHING, BARRIER, WARP_BARRIER, SHUFFLE, BALLOT, MMA, LDMATRIX };

// A thread of the block that runs now.
struct Lane {
    Fiber *fiber; // while it waits
    uint3 index;  // its threadIdx
    uint32_t mask;
    EmulatorLine caller; // of the operation it waits in, or did last
    uint32_t group;      // asynchronous copies: groups closed so far
    uint16_t copies;     // that have not happened yet
    Kind kind;
};

struct Copy {
    void *to;
    const void *from;
    uint32_t bytes, group;
};

struct Warp {
    uint32_t exist, unstarted, ready, in_operation, at_barrier, exited; // sets of lanes
    uint64_t in[WARP], out[WARP];
    int source[WARP];
    uint32_t a[WARP][4], b[WARP][2], matrix[4][WARP];
    float d[WARP][4];
};

// What an OS thread needs to run blocks; zero when created.
struct Block {
    const EmulatorLaunch *launch; // NULL between launches
    Warp *warp;                   // that of the running thread
    unsigned lane, warp_index;    // of the running thread
    unsigned threads, warps;
    unsigned at_barrier, exited; // how many
    int any, all, count;         // what the threads at the barrier brought
    int any_result, all_result, count_result;
    void *shared; // dynamic
    uint64_t random;
    dim3 shape; // that lanes' indices are set for
    Fiber scheduler, *running;
    unsigned fibers_made, fibers_idle;
#ifdef EMULATOR_TSAN
    // Addresses that stand for what orders threads. A barrier alternates between two, so that a thread that has
    // passed one does not order itself with those that arrive at the next.
    char barrier_order[2], warp_order[WARPS][2], begin, end;
    unsigned char barrier_turn[THREADS], warp_turn[THREADS];
    unsigned shift; // thread t of the block is taken for thread t + shift, so that equal threads of two blocks differ
#endif
    Lane lanes[THREADS];
    Warp warp_states[WARPS];
    Copy copies[THREADS][COPIES];
    Fiber fibers[THREADS], *idle[THREADS];
};

__thread Block *block; // of this OS thread

unsigned thread_number() {
    return block->warp_index * WARP + block->lane;
}

uint64_t draw() {
    uint64_t x = block->random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return block->random = x;
}

// One of the lanes of the set, which is not empty.
unsigned pick(uint32_t lanes) {
    const Order order = settings().order;
    if (order == ASCENDING) return (unsigned)__builtin_ctz(lanes);
    if (order == DESCENDING) return 31 - (unsigned)__builtin_clz(lanes);
    for (unsigned skip = (unsigned)(draw() % (unsigned)__builtin_popcount(lanes)); skip > 0; skip--) lanes &= lanes - 1;
    return (unsigned)__builtin_ctz(lanes);
}

void fiber_main();

Fiber *take_fiber() {
#ifdef EMULATOR_TSAN // a thread that ThreadSanitizer knows for each thread of the block
    Fiber *fiber = &block->fibers[(thread_number() + block->shift) % block->threads];
    if (fiber->stack != NULL) return fiber;
#else
    if (block->fibers_idle > 0) return block->idle[--block->fibers_idle];
    Fiber *fiber = &block->fibers[block->fibers_made];
#endif
    if (!fiber_create(fiber, fiber_main, block->fibers_made++)) emulator_die("no memory for the stack of a thread");
    return fiber;
}

void give_fiber(Fiber *fiber) {
#ifndef EMULATOR_TSAN
    block->idle[block->fibers_idle++] = fiber;
#else
    (void)fiber;
#endif
}

void select_lane(unsigned lane) {
    block->lane = lane;
    threadIdx = block->lanes[thread_number()].index;
}

void go_to(Fiber *from, Fiber *to) {
    block->running = to;
    fiber_switch(from, to);
}

// Starts or resumes a lane of the current warp.
void enter(Fiber *from, unsigned lane) {
    Warp &warp = *block->warp;
    const uint32_t bit = 1u << lane;
    select_lane(lane);
    Fiber *to;
    if (warp.unstarted & bit) {
        warp.unstarted &= ~bit;
        to = take_fiber();
    } else {
        warp.ready &= ~bit;
        to = block->lanes[thread_number()].fiber;
    }
    go_to(from, to);
}

// The running thread cannot go on: something else does.
void wait_here() {
    Fiber *self = block->lanes[thread_number()].fiber = block->running;
    const uint32_t others = block->warp->unstarted | block->warp->ready;
    if (others != 0)
        enter(self, pick(others));
    else
        go_to(self, &block->scheduler);
}

// In random order, now and then lets other warps go first.
void yield() {
    if (settings().order != RANDOM || draw() % 8 != 0) return;
    block->warp->ready |= 1u << block->lane;
    Fiber *self = block->lanes[thread_number()].fiber = block->running;
    go_to(self, &block->scheduler);
}

// ------------------------------------------------------------------------------------------------------------ barriers

void release_barrier() {
    for (unsigned i = 0; i < block->warps; i++) {
        block->warp_states[i].ready |= block->warp_states[i].at_barrier;
        block->warp_states[i].at_barrier = 0;
    }
    block->any_result = block->any;
    block->all_result = block->all;
    block->count_result = block->count;
    block->at_barrier = 0;
    block->any = block->count = 0;
    block->all = 1;
}

void arrive(EmulatorLine caller) {
    const unsigned self = thread_number();
    const uint32_t bit = 1u << block->lane;
    block->lanes[self].caller = caller;
    block->lanes[self].kind = BARRIER;
#ifdef EMULATOR_TSAN
    char *order = &block->barrier_order[block->barrier_turn[self] ^= 1];
    __tsan_release(order);
#endif
    block->warp->at_barrier |= bit;
    if (++block->at_barrier + block->exited < block->threads) {
        wait_here();
    } else {
        if (block->exited > 0)
            emulator_die("%u threads wait at __syncthreads(), but %u have ended", block->at_barrier, block->exited);
        for (unsigned t = 0; t < block->threads; t++)
            if (block->lanes[t].caller.line != caller.line)
                emulator_die("the threads of a block met at different __syncthreads()");
        release_barrier();
        block->warp->ready &= ~bit;
        yield();
    }
#ifdef EMULATOR_TSAN
    __tsan_acquire(order);
#endif
}

// ---------------------------------------------------------------------------------------------- operations of a warp

// The running lane takes part in an operation of the lanes in `mask`; the last to arrive calls complete(warp, lanes).
template <class Complete> void warp_operation(uint32_t mask, Kind kind, EmulatorLine caller, const Complete &complete) {
    Warp &warp = *block->warp;
    Lane *lanes = &block->lanes[block->warp_index * WARP];
    const uint32_t bit = 1u << block->lane;
    if (!(mask & bit))
        emulator_die("lane %u takes part in an operation of lanes %08x at %s:%d", block->lane, mask, caller.file,
                     caller.line);
    const uint32_t members = mask & warp.exist;
    Lane &self = lanes[block->lane];
    self.mask = mask;
    self.kind = kind;
    self.caller = caller;
    if (members & warp.exited)
        emulator_die("lanes %08x of an operation of lanes %08x at %s:%d have ended", members & warp.exited, mask,
                     caller.file, caller.line);
    warp.in_operation |= bit;
    if ((warp.in_operation & members) != members) {
        wait_here();
        return;
    }
    for (uint32_t rest = members; rest != 0; rest &= rest - 1) {
        const int other = __builtin_ctz(rest);
        if (lanes[other].mask != mask || lanes[other].kind != kind || lanes[other].caller.line != caller.line)
            emulator_die("lanes of a warp met at different operations: lane %u at %s:%d (lanes %08x), lane %d at %s:%d "
                         "(lanes %08x)",
                         block->lane, caller.file, caller.line, mask, other, lanes[other].caller.file,
                         lanes[other].caller.line, lanes[other].mask);
    }
    complete(warp, members);
    warp.in_operation &= ~members;
    warp.ready |= members & ~bit;
    yield();
}

// ------------------------------------------------------------------------------------------------- asynchronous copies

// What the kernel's code does to memory through the emulator, for ThreadSanitizer, which does not see this file.
void note_access(const void *read, void *written, size_t bytes) {
#ifdef EMULATOR_TSAN
    if (read != NULL) __tsan_read_range((void *)read, bytes);
    if (written != NULL) __tsan_write_range(written, bytes);
#else
    (void)read, (void)written, (void)bytes;
#endif
}

void copy_now(void *to, const void *from, size_t bytes) {
    note_access(from, NULL, bytes);
    note_access(NULL, to, 16);
    unsigned char whole[16] = {0};
    for (size_t i = 0; i < bytes; i++) whole[i] = ((const unsigned char *)from)[i];
    for (size_t i = 0; i < 16; i++) ((volatile unsigned char *)to)[i] = whole[i];
}

// Does the copies of this thread's closed groups but the newest `keep`; with `all`, of the open group too.
void finish_copies(unsigned keep, bool all) {
    const unsigned self = thread_number();
    Lane &lane = block->lanes[self];
    Copy *copies = block->copies[self];
    uint16_t kept = 0;
    for (uint16_t i = 0; i < lane.copies; i++) {
        if (all || lane.group - copies[i].group > keep)
            copy_now(copies[i].to, copies[i].from, copies[i].bytes);
        else
            copies[kept++] = copies[i];
    }
    lane.copies = kept;
}

// -------------------------------------------------------------------------------------------------- running a block

// A fiber runs one thread of the block after the other; a thread that waits keeps it, and others go on in other fibers.
void fiber_main() {
    fiber_started();
    Fiber *self = block->running;
    for (;;) {
        Lane &lane = block->lanes[thread_number()];
#ifdef EMULATOR_TSAN
        __tsan_acquire(&block->begin);
#endif
        block->launch->run(block->launch->call);
        if (lane.copies > 0) finish_copies(0, true);
        lane.group = 0;
#ifdef EMULATOR_TSAN
        __tsan_release(&block->end);
#endif
        Warp &warp = *block->warp;
        warp.exited |= 1u << block->lane;
        block->exited++;
        if (block->at_barrier > 0 && block->at_barrier + block->exited == block->threads)
            emulator_die("%u threads wait at __syncthreads(), but %u have ended", block->at_barrier, block->exited);
        const uint32_t others = warp.unstarted | warp.ready;
        if (others == 0) {
            give_fiber(self);
            go_to(self, &block->scheduler);
            continue;
        }
        const unsigned next = pick(others);
#ifndef EMULATOR_TSAN
        if (warp.unstarted >> next & 1) { // the next thread on this stack: no switch
            warp.unstarted &= ~(1u << next);
            select_lane(next);
            continue;
        }
#endif
        give_fiber(self);
        enter(self, next);
    }
}

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

void run_block(uint3 index, bool first) {
    const unsigned threads = block->threads;
    blockIdx = index;
    block->at_barrier = block->exited = 0;
    block->any = block->count = 0;
    block->all = 1;
    for (unsigned i = 0; i < block->warps; i++) {
        Warp &warp = block->warp_states[i];
        warp.exist = threads - i * WARP >= WARP ? 0xffffffffu : (1u << (threads - i * WARP)) - 1;
        warp.unstarted = warp.exist;
        warp.ready = warp.in_operation = warp.at_barrier = warp.exited = 0;
    }
#ifdef EMULATOR_TSAN
    if (!settings().blocks_unordered || first) __tsan_release(&block->begin);
    block->shift = settings().blocks_unordered ? (unsigned)(draw() % threads) : 0;
#else
    (void)first;
#endif
    while (block->exited < threads) {
        bool progress = false;
        const Order order = settings().order;
        const unsigned start = order == RANDOM ? (unsigned)(draw() % block->warps) : 0;
        const bool down = order == DESCENDING || (order == RANDOM && draw() % 2 == 0);
        for (unsigned k = 0; k < block->warps; k++) {
            const unsigned i = (start + (down ? block->warps - 1 - k : k)) % block->warps;
            Warp &warp = block->warp_states[i];
            const uint32_t able = warp.unstarted | warp.ready;
            if (able == 0) continue;
            progress = true;
            block->warp = &warp;
            block->warp_index = i;
            enter(&block->scheduler, pick(able));
        }
        if (!progress) emulator_die("no thread of the block can go on");
    }
#ifdef EMULATOR_TSAN
    if (!settings().blocks_unordered) __tsan_acquire(&block->end);
#endif
}

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

// ------------------------------------------------------------------------------------------------------- what is
// called

static const char *state_of(unsigned thread) {
    const Warp &warp = block->warp_states[thread / WARP];
    const uint32_t bit = 1u << thread % WARP;
    if (warp.unstarted & bit) return "not started";
    if (warp.exited & bit) return "ended";
    if (warp.at_barrier & bit) return "at __syncthreads()";
    if (warp.in_operation & bit) return "in an operation of the warp";
    return "running or ready";
}

void emulator_die(const char *format, ...) {
    fflush(stdout);
    fprintf(stderr, "\nemulator: ");
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    if (block != NULL && block->launch != NULL) {
        const EmulatorLaunch &launch = *block->launch;
        fprintf(stderr, "  kernel: %s\n  launched at %s:%d, grid (%u, %u, %u), block (%u, %u, %u)\n", launch.text,
                launch.caller.file, launch.caller.line, launch.grid.x, launch.grid.y, launch.grid.z, launch.block.x,
                launch.block.y, launch.block.z);
        fprintf(stderr, "  blockIdx (%u, %u, %u), threadIdx (%u, %u, %u)\n", blockIdx.x, blockIdx.y, blockIdx.z,
                threadIdx.x, threadIdx.y, threadIdx.z);
        // Threads in a row that do the same share a line.
        for (unsigned first = 0, last; first < block->threads; first = last) {
            const char *state = state_of(first);
            const int line = block->lanes[first].caller.line;
            last = first + 1;
            while (last < block->threads && state_of(last) == state && block->lanes[last].caller.line == line) last++;
            fprintf(stderr, "  threads %u to %u: %s", first, last - 1, state);
            if (strncmp(state, "at", 2) == 0 || strncmp(state, "in", 2) == 0)
                fprintf(stderr, ", %s:%d", block->lanes[first].caller.file, line);
            fprintf(stderr, "\n");
        }
    }
    fflush(stderr);
    abort();
}

void emulator_barrier(EmulatorLine caller) {
    arrive(caller);
}
int emulator_barrier_or(int value, EmulatorLine caller) {
    block->any |= value != 0;
    arrive(caller);
    return block->any_result;
}
int emulator_barrier_and(int value, EmulatorLine caller) {
    block->all &= value != 0;
    arrive(caller);
    return block->all_result;
}
int emulator_barrier_count(int value, EmulatorLine caller) {
    block->count += value != 0;
    arrive(caller);
    return block->count_result;
}

int emulator_lane() {
    return (int)block->lane;
}

void emulator_warp_barrier(unsigned mask, EmulatorLine caller) {
#ifdef EMULATOR_TSAN
    char *order = &block->warp_order[block->warp_index][block->warp_turn[thread_number()] ^= 1];
    __tsan_release(order);
#endif
    warp_operation(mask, WARP_BARRIER, caller, [](Warp &, uint32_t) {});
#ifdef EMULATOR_TSAN
    __tsan_acquire(order);
#endif
}

uint64_t emulator_shuffle(unsigned mask, uint64_t bits, int source, EmulatorLine caller) {
    Warp &warp = *block->warp;
    const unsigned lane = block->lane;
    warp.in[lane] = bits;
    warp.source[lane] = source;
    warp_operation(mask, SHUFFLE, caller, [caller](Warp &all, uint32_t members) {
        for (uint32_t rest = members; rest != 0; rest &= rest - 1) {
            const int to = __builtin_ctz(rest), from = all.source[to];
            if (!(members >> from & 1))
                emulator_die("shuffle at %s:%d: lane %d reads lane %d, which takes no part", caller.file, caller.line,
                             to, from);
            all.out[to] = all.in[from];
        }
    });
    return warp.out[lane];
}

unsigned emulator_ballot(unsigned mask, bool value, EmulatorLine caller) {
    Warp &warp = *block->warp;
    const unsigned lane = block->lane;
    warp.in[lane] = value;
    warp_operation(mask, BALLOT, caller, [](Warp &all, uint32_t members) {
        uint32_t votes = 0;
        for (uint32_t rest = members; rest != 0; rest &= rest - 1)
            votes |= (uint32_t)all.in[__builtin_ctz(rest)] << __builtin_ctz(rest);
        for (uint32_t rest = members; rest != 0; rest &= rest - 1) all.out[__builtin_ctz(rest)] = votes;
    });
    return (unsigned)warp.out[lane];
}

static float from_bf16(uint32_t half) {
    return __uint_as_float(half << 16);
}

// The fragments of all lanes put together (ptx.cuh says which lane holds what), multiplied, and taken apart again. A
// product of two bf16 is exact in fp32, so it does not matter whether it is fused into the addition.
static void multiply_tile(Warp &warp) {
    typedef float Row __attribute__((vector_size(32)));
    float a[16][16];
    Row b[16], d[16];
    for (int lane = 0; lane < WARP; lane++) {
        const int group = lane / 4, pair = lane % 4 * 2;
        for (int r = 0; r < 4; r++) {
            float *to = &a[group + (r & 1) * 8][pair + (r >> 1) * 8];
            to[0] = from_bf16(warp.a[lane][r]);
            to[1] = from_bf16(warp.a[lane][r] >> 16);
        }
        for (int r = 0; r < 2; r++) {
            b[pair + r * 8][group] = from_bf16(warp.b[lane][r]);
            b[pair + r * 8 + 1][group] = from_bf16(warp.b[lane][r] >> 16);
        }
        for (int i = 0; i < 4; i++) d[group + (i >> 1) * 8][pair + (i & 1)] = warp.d[lane][i];
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++) d[i] += a[i][k] * b[k];
    for (int lane = 0; lane < WARP; lane++) {
        const int group = lane / 4, pair = lane % 4 * 2;
        for (int i = 0; i < 4; i++) warp.d[lane][i] = d[group + (i >> 1) * 8][pair + (i & 1)];
    }
}

void emulator_mma_m16n8k16(float *d, const uint32_t *a, const uint32_t *b, EmulatorLine caller) {
    Warp &warp = *block->warp;
    const unsigned lane = block->lane;
    memcpy(warp.a[lane], a, sizeof warp.a[lane]);
    memcpy(warp.b[lane], b, sizeof warp.b[lane]);
    memcpy(warp.d[lane], d, sizeof warp.d[lane]);
    warp_operation(0xffffffffu, MMA, caller, [](Warp &all, uint32_t members) {
        if (members != 0xffffffffu) emulator_die("mma in a warp of fewer than 32 threads");
        multiply_tile(all);
    });
    memcpy(d, warp.d[lane], sizeof warp.d[lane]);
}

void emulator_ldmatrix_x4(uint32_t *r, const void *row, bool transposed, EmulatorLine caller) {
    if ((uintptr_t)row % 16 != 0) emulator_die("ldmatrix: the address %p of a row is not aligned to 16 bytes", row);
    note_access(row, NULL, 16);
    Warp &warp = *block->warp;
    const unsigned lane = block->lane;
    warp.in[lane] = (uint64_t)row;
    warp_operation(0xffffffffu, LDMATRIX, caller, [transposed](Warp &all, uint32_t members) {
        if (members != 0xffffffffu) emulator_die("ldmatrix in a warp of fewer than 32 threads");
        for (int i = 0; i < WARP; i++) { // row i % 8 of matrix i / 8
            const uint16_t *from = (const uint16_t *)all.in[i];
            uint16_t *matrix = (uint16_t *)all.matrix[i / 8]; // element e of lane l stands at [2 l + e]
            for (int column = 0; column < 8; column++)
                matrix[transposed ? column * 8 + i % 8 : i % 8 * 8 + column] = from[column];
        }
    });
    for (int i = 0; i < 4; i++) r[i] = warp.matrix[i][lane];
}

void emulator_cp_async16(void *shared, const void *global, int bytes) {
    if (bytes < 0 || bytes > 16) emulator_die("cp.async of %d bytes", bytes);
    if ((uintptr_t)shared % 16 != 0 || (bytes > 0 && (uintptr_t)global % 16 != 0))
        emulator_die("cp.async: an address is not aligned to 16 bytes (shared %p, global %p)", shared, global);
    emulator_bytes.read += (uint64_t)bytes;
    const When when = settings().copies;
    if (when == EAGER || (when == EITHER && draw() % 2 == 0)) {
        copy_now(shared, global, (size_t)bytes);
        return;
    }
    // The hardware may write at any time from here to the wait.
    note_access(global, NULL, (size_t)bytes);
    note_access(NULL, shared, 16);
    const unsigned self = thread_number();
    Lane &lane = block->lanes[self];
    if (lane.copies == COPIES) emulator_die("more than %d copies of one thread under way", COPIES);
    block->copies[self][lane.copies++] = {shared, global, (uint32_t)bytes, lane.group};
}

void emulator_cp_async_commit() {
    block->lanes[thread_number()].group++;
}

void emulator_cp_async_wait(int groups) {
    finish_copies((unsigned)groups, false);
}

void *emulator_dynamic_shared() {
    return block->shared;
}

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
    cudaError_t status = cudaStreamSynchronize(stream);
    run_launch(&launch);
    launch.release(launch.call);
    return status;
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

void emulator_set_blocks_unordered(bool unordered) {
    settings().blocks_unordered = unordered;
}
}
