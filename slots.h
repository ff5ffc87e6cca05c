// slots.h: transient full-size buffers, for units whose state is sharded while compute needs it in full.
//
// A slot holds one unit at a time. wte has one of its own (its gradient is alive from the head's backward to the
// embedding's); all other units share a few, of the size of the largest, used in turn so that collectives have time.
// Two events say when a slot may be used: what is written by one stream is read by the other, and the other way round.
#ifndef SLOTS_H
#define SLOTS_H

#include <cuda_runtime.h>
#include "error.h"
#include "layout.h"
#include "memory.h"

static inline void *table_alloc(size_t count, size_t size) {
    void *table = calloc(count, size);
    if (table == NULL) die("no room for the table of units");
    return table;
}

// A transient full-size buffer of one unit.
typedef struct {
    void *data;
    int unit;          // that it holds, or -1
    cudaEvent_t ready; // communication: the gather into it, or the reduction out of it, is done
    cudaEvent_t done;  // compute: it has been read, or written, for the last time
} Slot;

typedef struct {
    Slot *slots; // 0 is wte's
    int count;
    int next; // where the search for a free one begins: buffers are used in turn, so that collectives have time
} Slots;

// Slots for wte and for `others` units at a time, of the size of the largest of them.
static inline void slots_init(Slots *slots, const Layout *layout, Memory *memory, int others, size_t element_bytes) {
    size_t largest = 0;
    for (int u = 0; u < layout->n_units; u++)
        if (u != layout->wte && layout->units[u].size > largest) largest = layout->units[u].size;
    const int units = layout->n_units - (layout->wte >= 0);
    slots->count = 1 + (others < units ? others : units);
    slots->slots = (Slot *)table_alloc((size_t)slots->count, sizeof(Slot));
    slots->next = 1;
    for (int i = 0; i < slots->count; i++) {
        const size_t size = i > 0 ? largest : layout->wte >= 0 ? layout->units[layout->wte].size : 0;
        slots->slots[i].unit = -1;
        slots->slots[i].data = memory_alloc(memory, MEMORY_COMMUNICATION, size * element_bytes);
        if (memory->planning) continue;
        cuda_check(cudaEventCreateWithFlags(&slots->slots[i].ready, cudaEventDisableTiming));
        cuda_check(cudaEventCreateWithFlags(&slots->slots[i].done, cudaEventDisableTiming));
    }
}

static inline void slots_free(Slots *slots, bool planning) {
    for (int i = 0; i < slots->count && !planning; i++) {
        cuda_check(cudaEventDestroy(slots->slots[i].ready));
        cuda_check(cudaEventDestroy(slots->slots[i].done));
    }
    free(slots->slots);
}

// A free slot for a unit, now its; NULL if there is none.
static inline Slot *slots_take(Slots *slots, const Layout *layout, int unit, int *slot_of_unit) {
    int i = 0;
    if (unit != layout->wte) {
        int tries = slots->count - 1;
        for (i = slots->next; tries > 0 && slots->slots[i].unit >= 0; tries--) i = i + 1 < slots->count ? i + 1 : 1;
        if (tries == 0) return NULL;
        slots->next = i + 1 < slots->count ? i + 1 : 1;
    }
    if (slots->slots[i].unit >= 0) return NULL;
    slots->slots[i].unit = unit;
    slot_of_unit[unit] = i;
    return &slots->slots[i];
}

static inline void slots_give_back(Slots *slots, int unit, int *slot_of_unit) {
    slots->slots[slot_of_unit[unit]].unit = -1;
    slot_of_unit[unit] = -1;
}

#endif
