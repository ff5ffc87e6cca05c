// ops_table.h: the operations of one device as a table of functions, so that one program can hold two devices.
//
// ops.h declares every operation once, and what a compilation gets is its device's. ops_table.cu is therefore compiled
// twice, for the device under test (kernels/, by g++ or nvcc) and for the CPU (cpu/, by gcc), and exports a table each
// time. What the two compile differently (Ops, floatX, streams) passes as void *; Dropout, Vocabulary and AdamW are the
// same plain structs in both. Pointers are device memory of that table's device.
#ifndef OPS_TABLE_H
#define OPS_TABLE_H

#include <stddef.h>
#include <stdint.h>
#include "ops.h"

// Global memory that kernels have touched since traffic_reset(), in bytes, and how many were launched.
typedef struct {
    uint64_t read, written, launches;
} Traffic;

typedef struct {
    const char *device;

    // An Ops for a shape. With `guarded`, its workspace stands between guards: does anything stand wrong in them? And
    // the workspace filled with NaN.
    void *(*open)(const OpsShape *shape, int guarded);
    void (*close)(void *ops);
    int (*workspace_guards_hold)(void *ops);
    void (*poison_workspace)(void *ops);

    void *(*allocate)(size_t bytes);
    void (*release)(void *memory);
    void (*upload)(void *device, const void *host, size_t bytes);
    void (*download)(void *host, const void *device, size_t bytes);
    void (*synchronize)(void);
    // Under AddressSanitizer: touching these bytes is an error from here on (on = 1), or no longer.
    void (*forbid)(const void *memory, size_t bytes, int on);

    // NULL where the device has no such choice: the order in which threads run, "ascending", "descending" or
    // "random:SEED"; and the count of memory traffic.
    void (*thread_order)(const char *order);
    void (*traffic_reset)(void);
    void (*traffic_read)(Traffic *traffic);

    void (*embedding_forward)(void *ops, void *out, const void *tokens, const void *wte, const void *wpe, int B, int T,
                              int C, const Vocabulary *vocabulary, const Dropout *dropout);
    void (*wpe_backward)(void *ops, void *dwpe, const void *dout, int B, int T, int C, int positions, int accumulate);
    void (*wte_backward)(void *ops, void *dwte, const void *dout, const void *tokens, int B, int T, int C,
                         const Vocabulary *vocabulary);
    void (*layernorm_forward)(void *ops, void *out, void *mean, void *rstd, const void *inp, const void *weight,
                              const void *bias, size_t rows, int C);
    void (*residual_layernorm_forward)(void *ops, void *residual, void *out, void *mean, void *rstd, const void *inp,
                                       const void *branch, const void *weight, const void *bias, size_t rows, int C,
                                       const Dropout *dropout);
    void (*layernorm_backward)(void *ops, void *dinp, int dinp_zero, void *dweight, void *dbias, const void *dout,
                               const void *inp, const void *weight, const void *mean, const void *rstd, size_t rows,
                               int C, int accumulate);
    void (*residual_forward)(void *ops, void *out, const void *inp, const void *branch, size_t n,
                             const Dropout *dropout);
    void (*dropout_backward)(void *ops, void *dinp, const void *dout, size_t n, const Dropout *dropout);
    void (*matmul_forward)(void *ops, void *out, const void *inp, const void *weight, const void *bias, size_t rows,
                           int C, int OC);
    void (*matmul_gelu_forward)(void *ops, void *pre, void *out, const void *inp, const void *weight, const void *bias,
                                size_t rows, int C, int OC);
    void (*matmul_backward_input)(void *ops, void *dinp, const void *dout, const void *weight, size_t rows, int C,
                                  int OC);
    void (*matmul_gelu_backward_input)(void *ops, void *dpre, const void *dout, const void *weight, const void *pre,
                                       size_t rows, int C, int OC);
    void (*matmul_backward_weight)(void *ops, void *dweight, void *dbias, const void *inp, const void *dout,
                                   size_t rows, int C, int OC, int accumulate);
    void (*attention_forward)(void *ops, void *out, void *lse, const void *qkv, int B, int T, int NH, int HS,
                              const Dropout *dropout);
    void (*attention_backward)(void *ops, void *dqkv, const void *dout, const void *qkv, const void *out,
                               const void *lse, int B, int T, int NH, int HS, const Dropout *dropout);
    void (*classifier)(void *ops, void *logits, void *losses, const void *targets, size_t rows, int V, int Vp,
                       float scale, int want_gradient);
    void (*bias_backward)(void *ops, void *dbias, const void *dout, size_t rows, int OC, int accumulate);
    void (*classifier_statistics)(void *ops, void *statistics, const void *logits, const void *targets, size_t rows,
                                  int Vp, const Vocabulary *vocabulary);
    void (*classifier_sliced)(void *ops, void *logits, void *losses, const void *targets, const void *all, int ranks,
                              size_t rows, int Vp, const Vocabulary *vocabulary, float scale, int want_gradient);
    void (*sum_values)(void *ops, void *sum, const void *x, size_t n, int accumulate);
    void (*sum_of_squares)(void *ops, void *sum, const void *x, size_t n, int accumulate);
    void (*accumulate_gradient)(void *ops, void *sum, const void *x, size_t n);
    void (*adamw_update)(void *ops, const AdamW *hyper, void *params, void *master, void *m, void *v, const void *grads,
                         size_t n, size_t n_decay);
} OpsTable;

#ifdef __cplusplus
extern "C" {
#endif
extern const OpsTable cpu_table;    // ops_table.cu for the CPU
extern const OpsTable device_table; // ops_table.cu for the device under test
#ifdef __cplusplus
}
#endif

#endif
