// op_times.h: for dev/bench.sh: included before train_gpt.cu, it times every operation of every step.
//
// Each operation of ops.h is replaced by a macro that calls it between two looks at the clock, so what is timed is the
// program itself, on the data and in the order of a real step. At the end of the run, a line of JSON for each operation
// and shape goes to the file named by TRAIN_GPT_OP_TIMES: calls, milliseconds a step (median over the steps after the
// second), and the bytes and operations that it cannot avoid, from which dev/bench.py works out floors. A step begins
// with the embedding's forward pass, so a run must have one micro-batch a step.
//
// Bytes: each tensor that is read or written, once. Operations: 2 per multiplication and addition of a matrix product;
// attention counts what the causal mask leaves.
#ifndef DEV_OP_TIMES_H
#define DEV_OP_TIMES_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include "ops.h"

enum { OP_TIMES_ENTRIES = 64, OP_TIMES_STEPS = 256, OP_TIMES_WARM_UP = 2 };

typedef struct {
    char name[96];
    int calls[OP_TIMES_STEPS];
    double seconds[OP_TIMES_STEPS];
    double bytes, operations; // of the first step
} OpTimesEntry;

typedef struct {
    OpTimesEntry entries[OP_TIMES_ENTRIES];
    int n_entries, steps; // steps begun
    double begun[OP_TIMES_STEPS];
    long faults[OP_TIMES_STEPS]; // minor page faults of the process when the step began
} OpTimes;

static inline double op_times_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int op_times_compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double op_times_median(double *values, int n) {
    qsort(values, (size_t)n, sizeof values[0], op_times_compare);
    return n == 0 ? 0.0 : values[n / 2];
}

static OpTimes op_times;

// The step that the file ends with is the one before the last, which is known to be complete.
static void op_times_write(void) {
    const char *path = getenv("TRAIN_GPT_OP_TIMES");
    FILE *file = path == NULL || op_times.steps == 0 ? NULL : fopen(path, "w");
    if (file == NULL) return;
    double values[OP_TIMES_STEPS];
    const int first = OP_TIMES_WARM_UP, end = op_times.steps - 1;
    int n = 0;
    for (int step = first; step < end; step++) values[n++] = op_times.begun[step + 1] - op_times.begun[step];
    fprintf(file, "{\"step_ms\": %.4f, ", 1e3 * op_times_median(values, n));
    n = 0;
    for (int step = first; step < end; step++)
        values[n++] = (double)(op_times.faults[step + 1] - op_times.faults[step]);
    fprintf(file, "\"faults\": %.0f}\n", op_times_median(values, n));
    for (int i = 0; i < op_times.n_entries; i++) {
        const OpTimesEntry *entry = &op_times.entries[i];
        n = 0;
        for (int step = first; step < end; step++) values[n++] = entry->seconds[step];
        fprintf(file, "{\"name\": \"%s\", \"calls\": %d, \"ms\": %.4f, \"bytes\": %.0f, \"operations\": %.0f}\n",
                entry->name, end > first ? entry->calls[first] : 0, 1e3 * op_times_median(values, n), entry->bytes,
                entry->operations);
    }
    fclose(file);
}

static inline void op_times_step(void) {
    if (op_times.steps == 0) atexit(op_times_write);
    if (op_times.steps == OP_TIMES_STEPS) return;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    op_times.faults[op_times.steps] = usage.ru_minflt;
    op_times.begun[op_times.steps++] = op_times_now();
}

static inline void op_times_add(double begin, const char *name, double bytes, double operations) {
    const double seconds = op_times_now() - begin;
    if (op_times.steps == 0) return;
    int i = 0;
    while (i < op_times.n_entries && strcmp(op_times.entries[i].name, name) != 0) i++;
    if (i == OP_TIMES_ENTRIES) return;
    OpTimesEntry *entry = &op_times.entries[i];
    if (i == op_times.n_entries) {
        op_times.n_entries++;
        snprintf(entry->name, sizeof entry->name, "%s", name);
    }
    if (op_times.steps == 1) {
        entry->bytes += bytes;
        entry->operations += operations;
    }
    entry->calls[op_times.steps - 1]++;
    entry->seconds[op_times.steps - 1] += seconds;
}

#define OP_TIMES(call, bytes_, operations_, ...)                              \
    do {                                                                      \
        char name_[96];                                                       \
        snprintf(name_, sizeof name_, __VA_ARGS__);                           \
        const double begin_ = op_times_now();                                 \
        call;                                                                 \
        op_times_add(begin_, name_, (double)(bytes_), (double)(operations_)); \
    } while (0)

enum { OP_TIMES_X = sizeof(floatX), OP_TIMES_G = sizeof(gradX) };

#define embedding_forward(ops, out, tokens, wte, wpe, B, T, C, vocabulary, dropout)           \
    do {                                                                                      \
        op_times_step();                                                                      \
        OP_TIMES(embedding_forward(ops, out, tokens, wte, wpe, B, T, C, vocabulary, dropout), \
                 3.0 * (B) * (T) * (C)*OP_TIMES_X, 0, "embedding forward");                   \
    } while (0)
#define wpe_backward(ops, dwpe, dout, B, T, C, positions, accumulate)       \
    OP_TIMES(wpe_backward(ops, dwpe, dout, B, T, C, positions, accumulate), \
             ((double)(B) * (T)*OP_TIMES_X + (double)(positions)*OP_TIMES_G) * (C), 0, "position embedding backward")
#define wte_backward(ops, dwte, dout, tokens, B, T, C, vocabulary)       \
    OP_TIMES(wte_backward(ops, dwte, dout, tokens, B, T, C, vocabulary), \
             (double)(B) * (T) * (C) * (OP_TIMES_X + 2 * OP_TIMES_G), 0, "token embedding backward")
#define layernorm_forward(ops, out, mean, rstd, inp, weight, bias, rows, C)                                         \
    OP_TIMES(layernorm_forward(ops, out, mean, rstd, inp, weight, bias, rows, C), 2.0 * (rows) * (C)*OP_TIMES_X, 0, \
             "layer norm forward")
#define residual_layernorm_forward(ops, residual, out, mean, rstd, inp, branch, weight, bias, rows, C, dropout)       \
    OP_TIMES(residual_layernorm_forward(ops, residual, out, mean, rstd, inp, branch, weight, bias, rows, C, dropout), \
             4.0 * (rows) * (C)*OP_TIMES_X, 0, "residual, layer norm forward")
#define layernorm_backward(ops, dinp, dinp_zero, dweight, dbias, dout, inp, weight, mean, rstd, rows, C, accumulate)  \
    OP_TIMES(                                                                                                         \
        layernorm_backward(ops, dinp, dinp_zero, dweight, dbias, dout, inp, weight, mean, rstd, rows, C, accumulate), \
        4.0 * (rows) * (C)*OP_TIMES_X, 0, "layer norm backward")
#define residual_forward(ops, out, inp, branch, n, dropout) \
    OP_TIMES(residual_forward(ops, out, inp, branch, n, dropout), 3.0 * (n)*OP_TIMES_X, 0, "residual forward")
#define matmul_forward(ops, out, inp, weight, bias, rows, C, OC)                                                   \
    OP_TIMES(matmul_forward(ops, out, inp, weight, bias, rows, C, OC),                                             \
             ((double)(rows) * ((C) + (OC)) + (double)(C) * (OC)) * OP_TIMES_X, 2.0 * (double)(rows) * (C) * (OC), \
             "matmul forward %d -> %d", C, OC)
#define matmul_gelu_forward(ops, pre, out, inp, weight, bias, rows, C, OC)            \
    OP_TIMES(matmul_gelu_forward(ops, pre, out, inp, weight, bias, rows, C, OC),      \
             ((double)(rows) * ((C) + 2.0 * (OC)) + (double)(C) * (OC)) * OP_TIMES_X, \
             2.0 * (double)(rows) * (C) * (OC), "matmul and GELU forward %d -> %d", C, OC)
#define matmul_backward_input(ops, dinp, dout, weight, rows, C, OC)                                                \
    OP_TIMES(matmul_backward_input(ops, dinp, dout, weight, rows, C, OC),                                          \
             ((double)(rows) * ((C) + (OC)) + (double)(C) * (OC)) * OP_TIMES_X, 2.0 * (double)(rows) * (C) * (OC), \
             "matmul backward, input %d <- %d", C, OC)
#define matmul_gelu_backward_input(ops, dpre, dout, weight, pre, rows, C, OC)         \
    OP_TIMES(matmul_gelu_backward_input(ops, dpre, dout, weight, pre, rows, C, OC),   \
             ((double)(rows) * (2.0 * (C) + (OC)) + (double)(C) * (OC)) * OP_TIMES_X, \
             2.0 * (double)(rows) * (C) * (OC), "matmul and GELU backward, input %d <- %d", C, OC)
#define matmul_backward_weight(ops, dweight, dbias, inp, dout, rows, C, OC, accumulate)       \
    OP_TIMES(matmul_backward_weight(ops, dweight, dbias, inp, dout, rows, C, OC, accumulate), \
             (double)(rows) * ((C) + (OC)) * OP_TIMES_X + (double)(C) * (OC)*OP_TIMES_G,      \
             2.0 * (double)(rows) * (C) * (OC), "matmul backward, weight %d x %d", OC, C)
#define attention_forward(ops, out, lse, qkv, B, T, NH, HS, dropout)                                                 \
    OP_TIMES(attention_forward(ops, out, lse, qkv, B, T, NH, HS, dropout), 4.0 * (B) * (T) * (NH) * (HS)*OP_TIMES_X, \
             2.0 * (B) * (NH) * (T) * ((T) + 1.0) * (HS), "attention forward")
#define attention_backward(ops, dqkv, dout, qkv, out, lse, B, T, NH, HS, dropout)                   \
    OP_TIMES(attention_backward(ops, dqkv, dout, qkv, out, lse, B, T, NH, HS, dropout),             \
             8.0 * (B) * (T) * (NH) * (HS)*OP_TIMES_X, 5.0 * (B) * (NH) * (T) * ((T) + 1.0) * (HS), \
             "attention backward")
#define classifier(ops, logits, losses, targets, rows, V, Vp, scale, want_gradient)       \
    OP_TIMES(classifier(ops, logits, losses, targets, rows, V, Vp, scale, want_gradient), \
             2.0 * (double)(rows) * (Vp)*OP_TIMES_X, 0, "classifier")
#define sum_of_squares(ops, sum, x, n, accumulate) \
    OP_TIMES(sum_of_squares(ops, sum, x, n, accumulate), (double)(n)*OP_TIMES_G, 0, "gradient norm")
#define adamw_update(ops, hyper, params, master, m, v, grads, n, n_decay)       \
    OP_TIMES(adamw_update(ops, hyper, params, master, m, v, grads, n, n_decay), \
             (double)(n) * (OP_TIMES_G + 16.0 + ((master) != NULL ? 8.0 + OP_TIMES_X : 2.0 * OP_TIMES_X)), 0, "AdamW")

#endif
