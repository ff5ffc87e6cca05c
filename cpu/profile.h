// profile.h (CPU): marks for a GPU's profiler; here there is none to read them.
#ifndef CPU_PROFILE_H
#define CPU_PROFILE_H

#include <stdbool.h>

// Whether profile_start() has a meaning.
static inline bool profile_supported(void) {
    return false;
}

static inline void profile_start(void) {}
static inline void profile_stop(void) {}

static inline void range_push(const char *name) {
    (void)name;
}
static inline void range_pop(void) {}

// A range that ends with the block that this stands in, for operations.
#define RANGE(name) ((void)0)

#endif
