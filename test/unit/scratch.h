// scratch.h: for tests of file formats: a folder of its own, files in it, errors that must say something.
#ifndef SCRATCH_H
#define SCRATCH_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "error.h"

static char scratch_folder[256];

// A path in the folder; good until the eighth call after it.
static inline char *scratch(const char *name) {
    static char paths[8][512];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", scratch_folder, name);
    return path;
}

static inline void scratch_write(const char *name, const void *bytes, size_t size) {
    FILE *file = fopen(scratch(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

// A whole file, with a 0 after it; to be freed.
static inline char *read_whole(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) fail_msg("%s cannot be read", path);
    struct stat status;
    assert_int_equal(fstat(fileno(file), &status), 0);
    *size = (size_t)status.st_size;
    char *bytes = (char *)malloc(*size + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *size, file), *size);
    bytes[*size] = '\0';
    fclose(file);
    return bytes;
}

static inline void assert_same_files(const char *a, const char *b) {
    size_t size_a, size_b;
    char *bytes_a = read_whole(a, &size_a), *bytes_b = read_whole(b, &size_b);
    if (size_a != size_b) fail_msg("%s has %zu bytes, %s has %zu", a, size_a, b, size_b);
    for (size_t i = 0; i < size_a; i++)
        if (bytes_a[i] != bytes_b[i]) fail_msg("%s and %s differ at byte %zu", a, b, i);
    free(bytes_a);
    free(bytes_b);
}

static inline void assert_error(const Error *error, const char *part) {
    if (strstr(error->text, part) == NULL) fail_msg("the error is '%s', but should say '%s'", error->text, part);
    assert_null(strchr(error->text, '\n'));
}

static inline int scratch_make(void **state) {
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(scratch_folder, sizeof scratch_folder, "%.200s/test_formatsXXXXXX",
             base != NULL && base[0] != '\0' ? base : "/tmp");
    return mkdtemp(scratch_folder) == NULL ? -1 : 0;
}

static inline int scratch_remove(void **state) {
    (void)state;
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", scratch_folder);
    return system(command);
}

#endif
