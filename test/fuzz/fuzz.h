// fuzz.h: what the fuzz targets share: the input as a file, and the rules that a reader of untrusted files must keep.
//
// - It never ends the process: die() aborts here, which libFuzzer reports.
// - It never allocates beyond the size class of its files: no allocation above FUZZ_BASE + FUZZ_SINGLE times the input,
//   and FUZZ_BASE + FUZZ_TOTAL times the input in all. cJSON takes 64 bytes and a name for a value that may be written
//   in two characters, hence the factors; that is what the header's true size costs.
// - AddressSanitizer and UndefinedBehaviorSanitizer see the rest.
#ifndef FUZZ_H
#define FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#define _exit(code) abort()
#include "error.h"

enum { FUZZ_BASE = 256 << 10, FUZZ_SINGLE = 32, FUZZ_TOTAL = 256 };

int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void *, size_t),
                                              void (*free_hook)(const volatile void *));

// A reader at work.
static struct {
    bool active;
    size_t single, total; // limits, bytes
    size_t allocated;     // so far
} fuzz_memory;

static void fuzz_malloc_hook(const volatile void *pointer, size_t size) {
    (void)pointer;
    if (!fuzz_memory.active) return;
    fuzz_memory.allocated += size;
    if (size <= fuzz_memory.single && fuzz_memory.allocated <= fuzz_memory.total) return;
    fuzz_memory.active = false;
    fprintf(stderr, "fuzz.h: an allocation of %zu bytes, %zu in all; at most %zu and %zu are allowed\n", size,
            fuzz_memory.allocated, fuzz_memory.single, fuzz_memory.total);
    abort();
}

static void fuzz_free_hook(const volatile void *pointer) {
    (void)pointer;
}

static char fuzz_folder[64];

static void fuzz_remove_folder(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", fuzz_folder);
    if (system(command) != 0) fprintf(stderr, "%s could not be removed\n", fuzz_folder);
}

// Where the target may put files; in memory if the machine has such a place.
static const char *fuzz_path(const char *name) {
    static char paths[4][128];
    static int next;
    if (fuzz_folder[0] == '\0') {
        snprintf(fuzz_folder, sizeof fuzz_folder, "%s/fuzzXXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
        if (mkdtemp(fuzz_folder) == NULL) abort();
        atexit(fuzz_remove_folder);
        __sanitizer_install_malloc_and_free_hooks(fuzz_malloc_hook, fuzz_free_hook);
    }
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", fuzz_folder, name);
    return path;
}

static const char *fuzz_file(const char *name, const uint8_t *data, size_t size) {
    const char *path = fuzz_path(name);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, size, file) != size || fclose(file) != 0) abort();
    return path;
}

// Around the code under test.
static inline void fuzz_begin(size_t input) {
    fuzz_memory.single = FUZZ_BASE + FUZZ_SINGLE * input;
    fuzz_memory.total = FUZZ_BASE + FUZZ_TOTAL * input;
    fuzz_memory.allocated = 0;
    fuzz_memory.active = true;
}

static inline void fuzz_end(void) {
    fuzz_memory.active = false;
}

// What must be true.
#define fuzz_check(condition)                                                         \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                  \
        }                                                                             \
    } while (0)

#endif
