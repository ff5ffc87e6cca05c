// emulator_block.h: a block of a kernel: its threads as fibers, its barriers. Part of emulator.cpp.
//
// A warp runs until all its threads wait or have ended, then the next one.
#ifndef CPU_EMULATOR_BLOCK_H
#define CPU_EMULATOR_BLOCK_H

#include "emulator.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include "emulator_fiber.h"

namespace {

enum { WARP = 32, THREADS = 1024, WARPS = THREADS / WARP, COPIES = 64 };

// ------------------------------------------------------------------------------------------------------------ settings

[[noreturn]] void refuse_setting(const char *variable, const char *value) {
    fprintf(stderr, "emulator: %s=%s is not one of the values in cpu/emulator.h\n", variable, value);
    exit(2);
}

// Whether the word is random:SEED.
bool random_seed(const char *word, uint64_t *seed) {
    if (strncmp(word, "random:", 7) != 0) return false;
    char *end;
    const uint64_t number = strtoull(word + 7, &end, 10);
    if (end == word + 7 || *end != '\0') return false;
    *seed = number;
    return true;
}

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
        if ((value = getenv("TRAIN_GPT_THREADS")) != NULL && !set_order(value))
            refuse_setting("TRAIN_GPT_THREADS", value);
        if ((value = getenv("TRAIN_GPT_CP_ASYNC")) != NULL && !set_copies(value))
            refuse_setting("TRAIN_GPT_CP_ASYNC", value);
        if ((value = getenv("TRAIN_GPT_BLOCKS")) != NULL) {
            blocks_unordered = strcmp(value, "unordered") == 0;
            if (!blocks_unordered && strcmp(value, "ordered") != 0) refuse_setting("TRAIN_GPT_BLOCKS", value);
        }
#if !defined(__SANITIZE_ADDRESS__) && !defined(EMULATOR_TSAN)
        const char *threads = getenv("OMP_NUM_THREADS");
        workers = threads != NULL && atoi(threads) > 0 ? atoi(threads) : machine_cores();
        if ((value = getenv("TRAIN_GPT_EMULATOR_WORKERS")) != NULL && (workers = atoi(value)) < 1)
            refuse_setting("TRAIN_GPT_EMULATOR_WORKERS", value);
#endif
    }
    bool set_order(const char *word) {
        const bool ascending = strcmp(word, "ascending") == 0;
        if (ascending || strcmp(word, "descending") == 0) {
            order = ascending ? ASCENDING : DESCENDING;
            copies = DEFERRED;
            return true;
        }
        if (!random_seed(word, &seed)) return false;
        order = RANDOM;
        copies = EITHER;
        return true;
    }
    bool set_copies(const char *word) {
        const char *const words[] = {"deferred", "eager", "random"};
        for (int i = 0; i < 3; i++)
            if (strcmp(word, words[i]) == 0) return copies = (When)i, true;
        return false;
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

// Addresses that stand for what orders threads, for ThreadSanitizer. A barrier alternates between two, so that a thread
// that has passed one does not order itself with those that arrive at the next. A block has its own: what orders its
// threads must not order two blocks.
struct Sync {
    char barrier[2], warp[WARPS][2];
    unsigned char barrier_turn[THREADS], warp_turn[THREADS];
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
    Sync *sync;
    char begin, end;
    // Which half of `fibers` the block uses. Unordered blocks alternate: a thread of the one before that took part in a
    // barrier of this one would order the two.
    unsigned half;
#endif
    Lane lanes[THREADS];
    Warp warp_states[WARPS];
    Copy copies[THREADS][COPIES];
    Fiber fibers[2 * THREADS], *idle[THREADS];
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

void create_fiber(Fiber *fiber) {
    if (!fiber_create(fiber, fiber_main, block->fibers_made++)) emulator_die("no memory for the stack of a thread");
}

Fiber *take_fiber() {
#ifdef EMULATOR_TSAN // a thread that ThreadSanitizer knows for each thread of the block
    return &block->fibers[block->half * THREADS + thread_number()];
#else
    if (block->fibers_idle > 0) return block->idle[--block->fibers_idle];
    Fiber *fiber = &block->fibers[block->fibers_made];
    create_fiber(fiber);
    return fiber;
#endif
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
    char *order = &block->sync->barrier[block->sync->barrier_turn[self] ^= 1];
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

// ------------------------------------------------------------------------------------------------------------- running

void finish_copies(unsigned keep, bool all); // emulator_warp.h

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
        for (uint32_t waiting = warp.in_operation; waiting != 0; waiting &= waiting - 1) {
            const Lane &other = block->lanes[block->warp_index * WARP + (unsigned)__builtin_ctz(waiting)];
            if (other.mask >> block->lane & 1)
                emulator_die("lane %u has ended, but lane %d waits for it in an operation of lanes %08x at %s:%d",
                             block->lane, __builtin_ctz(waiting), other.mask, other.caller.file, other.caller.line);
        }
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
    // Here, by nobody's fiber: a thread is ordered after the one that created it.
    block->half = settings().blocks_unordered && !block->half;
    for (Fiber *fiber = &block->fibers[block->half * THREADS], *end = fiber + threads; fiber < end; fiber++)
        if (fiber->stack == NULL) create_fiber(fiber);
    block->sync = (Sync *)calloc(1, sizeof(Sync));
    if (block->sync == NULL) emulator_die("no memory for a block");
    if (!settings().blocks_unordered || first) __tsan_release(&block->begin);
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
    free(block->sync); // and with it what its addresses stood for
    if (!settings().blocks_unordered) __tsan_acquire(&block->end);
#endif
}

} // namespace

// ------------------------------------------------------------------------------------------------------------ messages

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

// --------------------------------------------------------------------------------------------------------- for kernels

void *emulator_dynamic_shared() {
    return block->shared;
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

#endif
