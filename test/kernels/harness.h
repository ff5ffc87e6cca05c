// harness.h: one case of one operation, run on the CPU and on the device under test, and what is held against it.
//
// A case is an operation and a level of each of its factors (shape, dropout, ...). Its operation's setup() fills
// buffers with fresh random inputs, call() makes the one call; the harness runs it on the CPU, and on the device once
// for each order of threads and once again. Then:
//  - every element that an operation must write is written: outputs hold NaN before;
//  - nothing else is: guards of 256 bytes stand around every buffer and the workspace, and inputs keep their bits;
//  - outputs agree with the CPU's: in the norm, and each element within a larger bound;
//  - all runs on the device give the same bits;
//  - kernels move as many bytes as they state, where the device counts them.
//
// Two bounds for a buffer, by its type. Relative norm: fp32 1e-5, bf16 1e-2, unless setup() asks for less; double
// 1e-12. Element, as an error in one of a million is invisible in the norm: |got - want| relative to |want| + the root
// mean square of want, or of the 64 elements around it where that is larger (the first rows of attention). An element
// of bf16 is off by up to 2^-8 where the CPU and the device round to opposite sides, and a sum of rounded products
// (attention) errs more in single elements than in the norm: 4 times 2^-8, or 8 where setup() says so, and 100 times
// the norm's bound in fp32.
#ifndef HARNESS_H
#define HARNESS_H

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "ops_table.h"

// ------------------------------------------------------------------------------------------------------------- factors

typedef enum {
    F_B,          // sequences
    F_T,          // positions
    F_C,          // channels
    F_OC,         // output channels
    F_NH,         // heads
    F_HS,         // head dimension
    F_V,          // vocabulary
    F_N,          // elements of a vector
    F_DROPOUT,    // rate in percent
    F_ACCUMULATE, // 0, 1
    F_VARIANT,    // what else an operation can be asked for
    F_SHIFT,      // elements from a 16-byte boundary to where buffers begin
    FACTORS
} Factor;

static const char *const factor_names[FACTORS] = {"B", "T", "C",       "OC",         "NH",      "HS",
                                                  "V", "n", "dropout", "accumulate", "variant", "shift"};

enum { MAX_LEVELS = 8, MAX_BUFFERS = 10, GUARD_BYTES = 256, GUARD = 0x5a, NEIGHBOURS = 64 };

typedef struct {
    int count; // 0: the operation does not have this factor
    int level[MAX_LEVELS];
} Levels;

// ------------------------------------------------------------------------------------------------------------- buffers

typedef enum { TYPE_X, TYPE_GRAD, TYPE_FLOAT, TYPE_DOUBLE, TYPE_INT } Type;
typedef enum { INPUT, OUTPUT, UPDATED } Role; // read; written in full; read and written

typedef struct {
    const char *name;
    Type type;
    Role role;
    size_t n, bytes;
    double norm_bound, element_bound;
    unsigned char *initial, *expected, *got, *first; // host: what it holds before, after on the CPU, on the device
    unsigned char *on_cpu, *on_device;               // device memory, guards included
} Buffer;

// Bytes that kernels state: exactly so many, or up to `most` more.
typedef struct {
    uint64_t read, written, most_read, most_written;
} Stated;

struct Operation;

typedef struct {
    const struct Operation *operation;
    int value[FACTORS];
    uint64_t seed; // of the inputs
    // What follows is filled by setup().
    Buffer buffers[MAX_BUFFERS];
    int n_buffers;
    OpsShape shape; // for which the operations are opened
    Dropout dropout;
    AdamW adamw;
    size_t n_decay;
} Case;

typedef struct Operation {
    const char *name;
    Levels levels[FACTORS];
    void (*setup)(Case *c);
    // memory[i] is buffer i; NULL for what setup() did not make
    void (*call)(const OpsTable *table, void *ops, const Case *c, void *const *memory);
    bool (*traffic)(const Case *c, Stated *stated); // false, or NULL: nothing is stated
    // About how many elements the operation works on: what it costs. INFINITY: there is no such case.
    double (*size)(const Case *c);
} Operation;

static inline size_t type_bytes(Type type) {
    switch (type) {
    case TYPE_X:
        return sizeof(floatX);
    case TYPE_GRAD:
        return sizeof(gradX);
    case TYPE_DOUBLE:
        return sizeof(double);
    default:
        return 4;
    }
}

static inline bool type_is_bf16(Type type) {
    return type_bytes(type) == 2;
}

static inline double type_value(Type type, const void *data, size_t i) {
    switch (type) {
    case TYPE_X:
        return (double)floatX_to_float(((const floatX *)data)[i]);
    case TYPE_GRAD:
        return (double)gradX_to_float(((const gradX *)data)[i]);
    case TYPE_FLOAT:
        return (double)((const float *)data)[i];
    case TYPE_DOUBLE:
        return ((const double *)data)[i];
    default:
        return (double)((const int *)data)[i];
    }
}

static inline void *checked_malloc(size_t bytes) {
    void *memory = malloc(bytes + 1);
    if (memory == NULL) die("no memory for %zu bytes", bytes);
    return memory;
}

// Adds a buffer to the case; outputs hold NaN. The next index is its place in call()'s memory.
static inline Buffer *add_buffer(Case *c, const char *name, Type type, Role role, size_t n) {
    if (c->n_buffers == MAX_BUFFERS) die("too many buffers");
    Buffer *buffer = &c->buffers[c->n_buffers++];
    memset(buffer, 0, sizeof *buffer);
    buffer->name = name;
    buffer->type = type;
    buffer->role = role;
    buffer->n = n;
    buffer->bytes = n * type_bytes(type);
    buffer->norm_bound = type_is_bf16(type) ? 1e-2 : type == TYPE_DOUBLE ? 1e-12 : 1e-5;
    buffer->element_bound = type_is_bf16(type) ? 4.0 / 256.0 : 100.0 * buffer->norm_bound;
    buffer->initial = (unsigned char *)checked_malloc(buffer->bytes);
    memset(buffer->initial, 0xff, buffer->bytes);
    return buffer;
}

// A place without a buffer: NULL in call()'s memory.
static inline void add_nothing(Case *c) {
    Buffer *buffer = &c->buffers[c->n_buffers++];
    memset(buffer, 0, sizeof *buffer);
}

// ------------------------------------------------------------------------------------------------------------- numbers

static inline uint64_t case_draw(Case *c) {
    c->seed += 0x9e3779b97f4a7c15ull;
    return random_mix(c->seed);
}

static inline int draw_below(Case *c, int n) {
    return (int)(case_draw(c) % (uint64_t)n);
}

// Nearly normal: the sum of four uniform numbers, which is quick to draw and stays within 3.5 deviations.
static inline float draw_normal(Case *c) {
    uint64_t bits = case_draw(c);
    int sum = (int)(bits & 0xffff) + (int)(bits >> 16 & 0xffff) + (int)(bits >> 32 & 0xffff) + (int)(bits >> 48);
    return (float)(sum - 2 * 0xffff) * (1.0f / 37837.0f); // the deviation of the sum: 65536 sqrt(4 / 12)
}

static inline void set_value(Buffer *buffer, size_t i, float value) {
    switch (buffer->type) {
    case TYPE_X:
        ((floatX *)buffer->initial)[i] = floatX_from(value);
        break;
    case TYPE_GRAD:
        ((gradX *)buffer->initial)[i] = gradX_from(value);
        break;
    case TYPE_FLOAT:
        ((float *)buffer->initial)[i] = value;
        break;
    case TYPE_DOUBLE:
        ((double *)buffer->initial)[i] = (double)value;
        break;
    case TYPE_INT:
        ((int *)buffer->initial)[i] = (int)value;
        break;
    }
}

static inline void fill_normal(Case *c, Buffer *buffer, float mean, float deviation) {
    for (size_t i = 0; i < buffer->n; i++) set_value(buffer, i, mean + deviation * draw_normal(c));
}

// One element in a thousand, and at least one, becomes `times` as large: what trained models' activations look like.
static inline void add_outliers(Case *c, Buffer *buffer, float times) {
    for (size_t k = 0; k < buffer->n / 1000 + 1; k++) {
        size_t i = case_draw(c) % buffer->n;
        set_value(buffer, i, (float)type_value(buffer->type, buffer->initial, i) * times);
    }
}

static inline Buffer *add_normal(Case *c, const char *name, Type type, Role role, size_t n, float mean,
                                 float deviation) {
    Buffer *buffer = add_buffer(c, name, type, role, n);
    fill_normal(c, buffer, mean, deviation);
    return buffer;
}

// A gradient that is overwritten or, accumulating, added to.
static inline Buffer *add_gradient(Case *c, const char *name, Type type, size_t n, int accumulate, float deviation) {
    if (accumulate) return add_normal(c, name, type, UPDATED, n, 0.0f, deviation);
    return add_buffer(c, name, type, OUTPUT, n);
}

// ------------------------------------------------------------------------------------------------------------- a case

static inline const char *case_name(const Case *c) {
    static char name[256];
    int length = snprintf(name, sizeof name, "%s", c->operation->name);
    for (int f = 0; f < FACTORS; f++)
        if (c->operation->levels[f].count > 0)
            length += snprintf(name + length, sizeof name - (size_t)length, "/%s=%d", factor_names[f], c->value[f]);
    return name;
}

static inline double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// What went wrong with a case: lines that are printed after its own.
typedef struct {
    int count;
    char text[4096];
} Failures;

__attribute__((format(printf, 2, 3))) static inline void failed(Failures *failures, const char *format, ...) {
    size_t used = strlen(failures->text);
    va_list arguments;
    va_start(arguments, format);
    used += (size_t)snprintf(failures->text + used, sizeof failures->text - used, "    ");
    if (used < sizeof failures->text) vsnprintf(failures->text + used, sizeof failures->text - used, format, arguments);
    va_end(arguments);
    used = strlen(failures->text);
    if (used + 1 < sizeof failures->text) strcpy(failures->text + used, "\n");
    failures->count++;
}

// Of the guard before a buffer.
static inline size_t guard_before(const Case *c, const Buffer *buffer) {
    bool shifted = c->operation->levels[F_SHIFT].count > 0;
    return GUARD_BYTES + (shifted ? (size_t)c->value[F_SHIFT] * type_bytes(buffer->type) : 0);
}

static inline size_t guarded_bytes(const Case *c, const Buffer *buffer) {
    return guard_before(c, buffer) + buffer->bytes + GUARD_BYTES;
}

static inline void allocate_buffers(const OpsTable *table, Case *c, bool cpu) {
    for (int i = 0; i < c->n_buffers; i++) {
        Buffer *buffer = &c->buffers[i];
        if (buffer->name == NULL) continue;
        unsigned char *memory = (unsigned char *)table->allocate(guarded_bytes(c, buffer));
        *(cpu ? &buffer->on_cpu : &buffer->on_device) = memory;
    }
}

static inline void forbid_guards(const OpsTable *table, const Case *c, const Buffer *buffer,
                                 const unsigned char *memory, int on) {
    table->forbid(memory, guard_before(c, buffer), on);
    table->forbid(memory + guard_before(c, buffer) + buffer->bytes, GUARD_BYTES, on);
}

// The CPU's operations, opened for this shape and all before: its workspace takes long to allocate. As it grows with
// the square of C, C is that of the widest products: sums over so many channels of up to 512 rows of layer norms four
// times as wide have room in it.
enum { CPU_CHANNELS = 4200 };

static inline void *cpu_ops(const OpsTable *cpu, const OpsShape *shape) {
    static void *ops = NULL;
    static OpsShape largest = {1, 1, 1, 1, 1, 1, 1};
    const int C = shape->C < CPU_CHANNELS ? shape->C : CPU_CHANNELS;
    const int wanted[] = {shape->B, shape->T, C, shape->V, shape->Vp, shape->logit_rows};
    int *const have[] = {&largest.B, &largest.T, &largest.C, &largest.V, &largest.Vp, &largest.logit_rows};
    bool fits = ops != NULL;
    for (int i = 0; i < 6; i++) {
        if (wanted[i] <= *have[i]) continue;
        *have[i] = wanted[i];
        fits = false;
    }
    if (fits) return ops;
    if (ops != NULL) cpu->close(ops);
    return ops = cpu->open(&largest, 0); // with one head, the largest there is
}

// Runs the case once on a device. What every buffer holds then goes to `expected` or, on the device under test, `got`.
static inline void run_once(const OpsTable *table, void *ops, Case *c, bool cpu, const char *run, Failures *failures) {
    void *memory[MAX_BUFFERS];
    size_t largest = 0;
    for (int i = 0; i < c->n_buffers; i++)
        if (c->buffers[i].bytes > largest) largest = c->buffers[i].bytes;
    unsigned char *staging = (unsigned char *)checked_malloc(largest + 3 * GUARD_BYTES);
    for (int i = 0; i < c->n_buffers; i++) {
        Buffer *buffer = &c->buffers[i];
        memory[i] = NULL;
        if (buffer->name == NULL) continue;
        unsigned char *at = cpu ? buffer->on_cpu : buffer->on_device;
        memset(staging, GUARD, guarded_bytes(c, buffer));
        memcpy(staging + guard_before(c, buffer), buffer->initial, buffer->bytes);
        table->upload(at, staging, guarded_bytes(c, buffer));
        forbid_guards(table, c, buffer, at, 1);
        memory[i] = at + guard_before(c, buffer);
    }
    if (!cpu) table->poison_workspace(ops);
    table->synchronize();
    if (table->traffic_reset != NULL) table->traffic_reset();
    c->operation->call(table, ops, c, memory);
    table->synchronize();
    if (!cpu && !table->workspace_guards_hold(ops)) failed(failures, "%s: written outside the workspace", run);
    for (int i = 0; i < c->n_buffers; i++) {
        Buffer *buffer = &c->buffers[i];
        if (buffer->name == NULL) continue;
        const unsigned char *at = cpu ? buffer->on_cpu : buffer->on_device;
        forbid_guards(table, c, buffer, at, 0);
        table->download(staging, at, guarded_bytes(c, buffer));
        size_t before = guard_before(c, buffer);
        for (size_t k = 0; k < guarded_bytes(c, buffer); k++) {
            if (k == before) k += buffer->bytes;
            if (staging[k] == GUARD) continue;
            failed(failures, "%s: written %s %s", run, k < before ? "before" : "after", buffer->name);
            break;
        }
        unsigned char *after = cpu ? buffer->expected : buffer->got;
        memcpy(after, staging + before, buffer->bytes);
        if (buffer->role == INPUT && memcmp(after, buffer->initial, buffer->bytes) != 0)
            failed(failures, "%s: input %s has been changed", run, buffer->name);
    }
    free(staging);
}

// The error of a buffer's norm, and the largest of an element.
static inline void compare(const Buffer *buffer, double *norm_error, double *element_error, size_t *worst,
                           size_t *not_finite) {
    double difference = 0.0, norm = 0.0;
    *element_error = 0.0;
    *worst = *not_finite = 0;
    for (size_t i = 0; i < buffer->n; i++) {
        double want = type_value(buffer->type, buffer->expected, i);
        double got = type_value(buffer->type, buffer->got, i);
        if (isnan(got) && !isnan(want)) {
            if (++*not_finite == 1) *worst = i;
            continue;
        }
        difference += (got - want) * (got - want);
        norm += want * want;
    }
    *norm_error = sqrt(difference) / (norm > 0.0 ? sqrt(norm) : 1.0);
    if (*not_finite > 0) return;
    for (size_t first = 0; first < buffer->n; first += NEIGHBOURS) {
        size_t end = first + NEIGHBOURS < buffer->n ? first + NEIGHBOURS : buffer->n;
        double squares = 0.0;
        for (size_t i = first; i < end; i++) squares += pow(type_value(buffer->type, buffer->expected, i), 2.0);
        double typical = sqrt(fmax(squares / (double)(end - first), norm / (double)buffer->n));
        for (size_t i = first; i < end; i++) {
            double want = type_value(buffer->type, buffer->expected, i);
            double error = fabs(type_value(buffer->type, buffer->got, i) - want);
            if (typical > 0.0) error /= fabs(want) + typical;
            if (!(error <= *element_error)) {
                *element_error = error;
                *worst = i;
            }
        }
    }
}

// Index of the first element whose bits differ, or n.
static inline size_t first_difference(const Buffer *buffer) {
    size_t size = type_bytes(buffer->type);
    if (memcmp(buffer->got, buffer->first, buffer->bytes) == 0) return buffer->n;
    for (size_t i = 0; i < buffer->n; i++)
        if (memcmp(buffer->got + i * size, buffer->first + i * size, size) != 0) return i;
    return buffer->n;
}

static inline void check_traffic(const OpsTable *table, const Case *c, Failures *failures, char *report, size_t room) {
    report[0] = '\0';
    if (table->traffic_read == NULL) return;
    Traffic counted;
    Stated stated = {0, 0, 0, 0};
    table->traffic_read(&counted);
    snprintf(report, room, "  read %" PRIu64 " written %" PRIu64 " in %" PRIu64 " launches", counted.read,
             counted.written, counted.launches);
    if (c->operation->traffic == NULL || !c->operation->traffic(c, &stated)) return;
    if (counted.read - stated.read > stated.most_read || counted.written - stated.written > stated.most_written)
        failed(failures,
               "reads %" PRIu64 " bytes, writes %" PRIu64 "; stated: %" PRIu64 " (+ %" PRIu64 "), %" PRIu64
               " (+ %" PRIu64 ")",
               counted.read, counted.written, stated.read, stated.most_read, stated.written, stated.most_written);
}

// Runs the case, prints its line, and returns whether it passed. `orders`: one run for each order of threads.
static inline bool run_case(const OpsTable *cpu, const OpsTable *device, Case *c, const char *const *orders, int runs) {
    double start = seconds_now();
    Failures failures = {0, ""};
    c->operation->setup(c);
    for (int i = 0; i < c->n_buffers; i++) {
        Buffer *buffer = &c->buffers[i];
        buffer->expected = (unsigned char *)checked_malloc(buffer->bytes);
        buffer->got = (unsigned char *)checked_malloc(buffer->bytes);
        buffer->first = (unsigned char *)checked_malloc(buffer->bytes);
    }
    allocate_buffers(cpu, c, true);
    run_once(cpu, cpu_ops(cpu, &c->shape), c, true, "CPU", &failures);

    char traffic[128] = "", line[1024] = "";
    size_t length = 0;
    void *ops = device->open(&c->shape, 1);
    allocate_buffers(device, c, false);
    for (int run = 0; run < runs; run++) {
        if (device->thread_order != NULL) device->thread_order(orders[run]);
        run_once(device, ops, c, false, orders[run], &failures);
        for (int i = 0; i < c->n_buffers; i++) {
            Buffer *buffer = &c->buffers[i];
            if (run == 0) memcpy(buffer->first, buffer->got, buffer->bytes);
            if (buffer->name == NULL || buffer->role == INPUT) continue;
            size_t different = first_difference(buffer);
            if (different < buffer->n)
                failed(&failures, "%s: %s[%zu] = %.9g, but %.9g in order %s", orders[run], buffer->name, different,
                       type_value(buffer->type, buffer->got, different),
                       type_value(buffer->type, buffer->first, different), orders[0]);
        }
        if (run > 0) continue;
        check_traffic(device, c, &failures, traffic, sizeof traffic);
        for (int i = 0; i < c->n_buffers; i++) {
            Buffer *buffer = &c->buffers[i];
            if (buffer->name == NULL || buffer->role == INPUT) continue;
            double norm_error, element_error;
            size_t worst, not_finite;
            compare(buffer, &norm_error, &element_error, &worst, &not_finite);
            if (not_finite > 0)
                failed(&failures, "%s: %zu of %zu elements are NaN, the first is %zu", buffer->name, not_finite,
                       buffer->n, worst);
            else if (!(norm_error <= buffer->norm_bound) || !(element_error <= buffer->element_bound))
                failed(&failures, "%s: error %.2e of %.0e in the norm, %.2e of %.0e at %zu: %.9g, not %.9g",
                       buffer->name, norm_error, buffer->norm_bound, element_error, buffer->element_bound, worst,
                       type_value(buffer->type, buffer->got, worst), type_value(buffer->type, buffer->expected, worst));
            length += (size_t)snprintf(line + length, sizeof line - length, " %s %.1e", buffer->name, norm_error);
        }
    }
    device->close(ops);
    printf("%s %s:%s%s  %.0f ms\n%s", failures.count ? "FAIL" : "ok  ", case_name(c), line, traffic,
           (seconds_now() - start) * 1e3, failures.text);
    fflush(stdout);
    for (int i = 0; i < c->n_buffers; i++) {
        Buffer *buffer = &c->buffers[i];
        free(buffer->initial);
        free(buffer->expected);
        free(buffer->got);
        free(buffer->first);
        if (buffer->on_cpu != NULL) cpu->release(buffer->on_cpu);
        if (buffer->on_device != NULL) device->release(buffer->on_device);
    }
    return failures.count == 0;
}

#endif
