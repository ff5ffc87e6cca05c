// emulator_warp.h: operations of a warp, and asynchronous copies. Part of emulator.cpp.
//
// The last lane to arrive at an operation completes it for all of them: one switch per lane, and an operation is
// atomic.
#ifndef CPU_EMULATOR_WARP_H
#define CPU_EMULATOR_WARP_H

#include "emulator_block.h"

namespace {

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

} // namespace

// --------------------------------------------------------------------------------------------------------- for kernels

int emulator_lane() {
    return (int)block->lane;
}

void emulator_warp_barrier(unsigned mask, EmulatorLine caller) {
#ifdef EMULATOR_TSAN
    char *order = &block->sync->warp[block->warp_index][block->sync->warp_turn[thread_number()] ^= 1];
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

#endif
