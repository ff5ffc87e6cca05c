// onednn.h: matrix products by oneDNN's C API, versions 2 and 3, which differ in how a primitive is described.
//
// The three products of a linear layer with x (rows, C), w (OC, C), y (rows, OC), all row-major and dense:
//   PRODUCT_FORWARD         y = x w^T + bias
//   PRODUCT_BACKWARD_INPUT  x = y w
//   PRODUCT_BACKWARD_WEIGHT w = y^T x
// Three of oneDNN's ways, by what is fastest for plain row-major matrices: bf16 goes through the inner product
// primitive; fp32 forward through the matmul primitive, which shares work among threads better, the more so the longer
// the sums (3072 inputs to 768 outputs: 214 GFLOP/s on two cores against 173); fp32 backward through dnnl_sgemm, which
// can add to its result. A primitive is made the first time that a shape is seen and kept.
//
// Nothing here allocates once a shape has been seen, but oneDNN's kernels take packing buffers of a few megabytes from
// malloc at each call. So malloc must keep freed memory (mallopt, at the program's start), or each call pays for fresh
// pages.
//
// oneDNN may split a sum over its threads: bits repeat for the same number of threads, not across numbers.
#ifndef CPU_ONEDNN_H
#define CPU_ONEDNN_H

#include <oneapi/dnnl/dnnl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include "error.h"

typedef enum { PRODUCT_FORWARD, PRODUCT_BACKWARD_INPUT, PRODUCT_BACKWARD_WEIGHT } ProductKind;

typedef struct {
    ProductKind kind;
    dnnl_data_type_t operand_type, result_type;
    dnnl_data_type_t bias_type; // dnnl_data_type_undef: no bias. Forward only
    dnnl_dim_t rows, C, OC;
} ProductShape;

typedef struct {
    ProductShape shape;
    dnnl_primitive_t primitive;
    dnnl_memory_t x, w, y, bias; // re-pointed at each call
} Product;

// More shapes than a run has: four layers' sizes and the head, three kinds, whole and last chunks. A program that uses
// more keeps working; the product that was made longest ago is then made anew.
enum { ONEDNN_PRODUCTS = 128 };

typedef struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    Product products[ONEDNN_PRODUCTS];
    int made; // products made so far; number i stands in slot i % ONEDNN_PRODUCTS
} OneDnn;

#define dnnl_check(call)                                                                \
    do {                                                                                \
        dnnl_status_t status_ = (call);                                                 \
        if (status_ != dnnl_success) die("oneDNN: %s: status %d", #call, (int)status_); \
    } while (0)

// Whether this processor multiplies bf16 natively. TRAIN_GPT_CPU_BF16=0 in the environment says no, for tests.
static inline bool onednn_has_bf16(void) {
    const char *choice = getenv("TRAIN_GPT_CPU_BF16");
    if (choice != NULL && strcmp(choice, "0") == 0) return false;
    // The values are sets of bits; the AVX-512 ones with bf16 contain those of avx512_core_bf16.
    int isa = (int)dnnl_get_effective_cpu_isa(), needed = (int)dnnl_cpu_isa_avx512_core_bf16;
    return (isa & needed) == needed;
}

static inline void onednn_open(OneDnn *self) {
    memset(self, 0, sizeof *self);
    dnnl_check(dnnl_engine_create(&self->engine, dnnl_cpu, 0));
    dnnl_check(dnnl_stream_create(&self->stream, self->engine, dnnl_stream_default_flags));
}

static inline void onednn_destroy(Product *product) {
    dnnl_primitive_destroy(product->primitive);
    dnnl_memory_destroy(product->x);
    dnnl_memory_destroy(product->w);
    dnnl_memory_destroy(product->y);
    if (product->bias != NULL) dnnl_memory_destroy(product->bias);
    memset(product, 0, sizeof *product);
}

static inline void onednn_close(OneDnn *self) {
    for (int i = 0; i < self->made && i < ONEDNN_PRODUCTS; i++) onednn_destroy(&self->products[i]);
    dnnl_stream_destroy(self->stream);
    dnnl_engine_destroy(self->engine);
}

// A dense row-major matrix (columns > 0) or a vector (columns 0). The description is what dnnl_memory_create wants, a
// pointer in both versions: version 2 fills a structure that the caller owns, version 3 allocates one.
#if DNNL_VERSION_MAJOR >= 3
typedef struct {
    dnnl_memory_desc_t handle;
} OneDnnMatrix;
#define onednn_pointer(matrix) ((matrix)->handle)
static inline void onednn_describe(OneDnnMatrix *matrix, dnnl_dim_t rows, dnnl_dim_t columns, dnnl_data_type_t type) {
    dnnl_dims_t dims = {rows, columns};
    dnnl_check(dnnl_memory_desc_create_with_tag(&matrix->handle, columns > 0 ? 2 : 1, dims, type,
                                                columns > 0 ? dnnl_ab : dnnl_a));
}
// The transpose of a dense row-major matrix (columns, rows).
static inline void onednn_describe_transpose(OneDnnMatrix *matrix, dnnl_dim_t rows, dnnl_dim_t columns,
                                             dnnl_data_type_t type) {
    dnnl_dims_t dims = {rows, columns};
    dnnl_check(dnnl_memory_desc_create_with_tag(&matrix->handle, 2, dims, type, dnnl_ba));
}
static inline void onednn_forget(OneDnnMatrix *matrix) {
    dnnl_memory_desc_destroy(matrix->handle);
}
#else
typedef struct {
    dnnl_memory_desc_t structure;
} OneDnnMatrix;
#define onednn_pointer(matrix) (&(matrix)->structure)
static inline void onednn_describe(OneDnnMatrix *matrix, dnnl_dim_t rows, dnnl_dim_t columns, dnnl_data_type_t type) {
    dnnl_dims_t dims = {rows, columns};
    dnnl_check(dnnl_memory_desc_init_by_tag(&matrix->structure, columns > 0 ? 2 : 1, dims, type,
                                            columns > 0 ? dnnl_ab : dnnl_a));
}
static inline void onednn_describe_transpose(OneDnnMatrix *matrix, dnnl_dim_t rows, dnnl_dim_t columns,
                                             dnnl_data_type_t type) {
    dnnl_dims_t dims = {rows, columns};
    dnnl_check(dnnl_memory_desc_init_by_tag(&matrix->structure, 2, dims, type, dnnl_ba));
}
static inline void onednn_forget(OneDnnMatrix *matrix) {
    (void)matrix;
}
#endif

// The primitive descriptor of `kind`; `hint` is the forward one, which the backward kinds want.
static inline dnnl_primitive_desc_t onednn_primitive_desc(OneDnn *self, ProductKind kind, OneDnnMatrix *x,
                                                          OneDnnMatrix *w, OneDnnMatrix *bias, OneDnnMatrix *y,
                                                          dnnl_primitive_desc_t hint) {
    dnnl_primitive_desc_t result;
#if DNNL_VERSION_MAJOR >= 3
    if (kind == PRODUCT_FORWARD)
        dnnl_check(dnnl_inner_product_forward_primitive_desc_create(
            &result, self->engine, dnnl_forward_training, onednn_pointer(x), onednn_pointer(w),
            bias != NULL ? onednn_pointer(bias) : NULL, onednn_pointer(y), NULL));
    else if (kind == PRODUCT_BACKWARD_INPUT)
        dnnl_check(dnnl_inner_product_backward_data_primitive_desc_create(
            &result, self->engine, onednn_pointer(x), onednn_pointer(w), onednn_pointer(y), hint, NULL));
    else
        dnnl_check(dnnl_inner_product_backward_weights_primitive_desc_create(
            &result, self->engine, onednn_pointer(x), onednn_pointer(w), NULL, onednn_pointer(y), hint, NULL));
#else
    dnnl_inner_product_desc_t description;
    if (kind == PRODUCT_FORWARD)
        dnnl_check(dnnl_inner_product_forward_desc_init(&description, dnnl_forward_training, onednn_pointer(x),
                                                        onednn_pointer(w), bias != NULL ? onednn_pointer(bias) : NULL,
                                                        onednn_pointer(y)));
    else if (kind == PRODUCT_BACKWARD_INPUT)
        dnnl_check(dnnl_inner_product_backward_data_desc_init(&description, onednn_pointer(x), onednn_pointer(w),
                                                              onednn_pointer(y)));
    else
        dnnl_check(dnnl_inner_product_backward_weights_desc_init(&description, onednn_pointer(x), onednn_pointer(w),
                                                                 NULL, onednn_pointer(y)));
    dnnl_check(dnnl_primitive_desc_create(&result, &description, NULL, self->engine, hint));
#endif
    return result;
}

// Makes the primitive, and memory objects for its matrices; forgets the descriptions.
static inline void onednn_keep(OneDnn *self, Product *product, dnnl_primitive_desc_t description, OneDnnMatrix *x,
                               OneDnnMatrix *w, OneDnnMatrix *bias, OneDnnMatrix *y) {
    dnnl_check(dnnl_primitive_create(&product->primitive, description));
    dnnl_primitive_desc_destroy(description);
    OneDnnMatrix *matrices[4] = {x, w, y, bias};
    dnnl_memory_t *memories[4] = {&product->x, &product->w, &product->y, &product->bias};
    for (int i = 0; i < 4; i++) {
        if (matrices[i] == NULL) continue;
        dnnl_check(dnnl_memory_create(memories[i], onednn_pointer(matrices[i]), self->engine, DNNL_MEMORY_NONE));
        onednn_forget(matrices[i]);
    }
}

// y = x w^T + bias as a product of matrices, x (rows, C) and the transpose of w, with bias as a row.
static inline void onednn_create_matmul(OneDnn *self, Product *product, const ProductShape *shape) {
    OneDnnMatrix x, w, y, bias;
    onednn_describe(&x, shape->rows, shape->C, shape->operand_type);
    onednn_describe_transpose(&w, shape->C, shape->OC, shape->operand_type);
    onednn_describe(&y, shape->rows, shape->OC, shape->result_type);
    bool with_bias = shape->bias_type != dnnl_data_type_undef;
    if (with_bias) onednn_describe(&bias, 1, shape->OC, shape->bias_type);
    dnnl_primitive_desc_t description;
#if DNNL_VERSION_MAJOR >= 3
    dnnl_check(dnnl_matmul_primitive_desc_create(&description, self->engine, onednn_pointer(&x), onednn_pointer(&w),
                                                 with_bias ? onednn_pointer(&bias) : NULL, onednn_pointer(&y), NULL));
#else
    dnnl_matmul_desc_t matmul;
    dnnl_check(dnnl_matmul_desc_init(&matmul, onednn_pointer(&x), onednn_pointer(&w),
                                     with_bias ? onednn_pointer(&bias) : NULL, onednn_pointer(&y)));
    dnnl_check(dnnl_primitive_desc_create(&description, &matmul, NULL, self->engine, NULL));
#endif
    onednn_keep(self, product, description, &x, &w, with_bias ? &bias : NULL, &y);
}

static inline void onednn_create_inner_product(OneDnn *self, Product *product, const ProductShape *shape) {
    ProductKind kind = shape->kind;
    dnnl_data_type_t in = shape->operand_type, out = shape->result_type;
    OneDnnMatrix x, w, y, bias;
    onednn_describe(&x, shape->rows, shape->C, kind == PRODUCT_BACKWARD_INPUT ? out : in);
    onednn_describe(&w, shape->OC, shape->C, kind == PRODUCT_BACKWARD_WEIGHT ? out : in);
    onednn_describe(&y, shape->rows, shape->OC, kind == PRODUCT_FORWARD ? out : in);
    bool with_bias = shape->bias_type != dnnl_data_type_undef;
    if (with_bias) onednn_describe(&bias, shape->OC, 0, shape->bias_type);
    dnnl_primitive_desc_t hint = NULL;
    if (kind != PRODUCT_FORWARD) {
        OneDnnMatrix hint_x, hint_w, hint_y;
        onednn_describe(&hint_x, shape->rows, shape->C, in);
        onednn_describe(&hint_w, shape->OC, shape->C, in);
        onednn_describe(&hint_y, shape->rows, shape->OC, in);
        hint = onednn_primitive_desc(self, PRODUCT_FORWARD, &hint_x, &hint_w, NULL, &hint_y, NULL);
        onednn_forget(&hint_x);
        onednn_forget(&hint_w);
        onednn_forget(&hint_y);
    }
    dnnl_primitive_desc_t description = onednn_primitive_desc(self, kind, &x, &w, with_bias ? &bias : NULL, &y, hint);
    onednn_keep(self, product, description, &x, &w, with_bias ? &bias : NULL, &y);
    if (hint != NULL) dnnl_primitive_desc_destroy(hint);
}

static inline Product *onednn_find(OneDnn *self, const ProductShape *shape) {
    for (int i = 0; i < self->made && i < ONEDNN_PRODUCTS; i++) {
        const ProductShape *s = &self->products[i].shape;
        if (s->rows == shape->rows && s->C == shape->C && s->OC == shape->OC && s->kind == shape->kind &&
            s->operand_type == shape->operand_type && s->result_type == shape->result_type &&
            s->bias_type == shape->bias_type)
            return &self->products[i];
    }
    Product *product = &self->products[self->made % ONEDNN_PRODUCTS];
    if (self->made >= ONEDNN_PRODUCTS) onednn_destroy(product);
    product->shape = *shape;
    if (shape->kind == PRODUCT_FORWARD && shape->operand_type == dnnl_f32)
        onednn_create_matmul(self, product, shape);
    else
        onednn_create_inner_product(self, product, shape);
    // Kept from overflowing: any number that is a multiple beyond the table's length means the same.
    self->made = self->made + 1 < 2 * ONEDNN_PRODUCTS ? self->made + 1 : ONEDNN_PRODUCTS;
    return product;
}

// Runs one product. Which of x, w, y is the result follows from the kind; the two others are not written.
static inline void onednn_product(OneDnn *self, ProductKind kind, dnnl_data_type_t operand_type,
                                  dnnl_data_type_t result_type, dnnl_data_type_t bias_type, void *x, void *w, void *y,
                                  void *bias, size_t rows, int C, int OC) {
    ProductShape shape;
    shape.kind = kind;
    shape.operand_type = operand_type;
    shape.result_type = result_type;
    shape.bias_type = bias != NULL ? bias_type : dnnl_data_type_undef;
    shape.rows = (dnnl_dim_t)rows;
    shape.C = C;
    shape.OC = OC;
    Product *product = onednn_find(self, &shape);
    dnnl_check(dnnl_memory_set_data_handle(product->x, x));
    dnnl_check(dnnl_memory_set_data_handle(product->w, w));
    dnnl_check(dnnl_memory_set_data_handle(product->y, y));
    if (bias != NULL) dnnl_check(dnnl_memory_set_data_handle(product->bias, bias));
    dnnl_exec_arg_t arguments[4];
    arguments[0].arg = kind == PRODUCT_BACKWARD_INPUT ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC;
    arguments[0].memory = product->x;
    arguments[1].arg = kind == PRODUCT_BACKWARD_WEIGHT ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS;
    arguments[1].memory = product->w;
    arguments[2].arg = kind == PRODUCT_FORWARD ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST;
    arguments[2].memory = product->y;
    arguments[3].arg = DNNL_ARG_BIAS;
    arguments[3].memory = product->bias;
    dnnl_check(dnnl_primitive_execute(product->primitive, self->stream, bias != NULL ? 4 : 3, arguments));
    dnnl_check(dnnl_stream_wait(self->stream));
}

// The three products in fp32; accumulate: added to the result.
static inline void onednn_sgemm(ProductKind kind, float *x, float *w, float *y, size_t rows, int C, int OC,
                                int accumulate) {
    dnnl_dim_t R = (dnnl_dim_t)rows;
    float beta = accumulate ? 1.0f : 0.0f;
    if (kind == PRODUCT_FORWARD)
        dnnl_check(dnnl_sgemm('N', 'T', R, OC, C, 1.0f, x, C, w, C, beta, y, OC));
    else if (kind == PRODUCT_BACKWARD_INPUT)
        dnnl_check(dnnl_sgemm('N', 'N', R, C, OC, 1.0f, y, OC, w, C, beta, x, C));
    else
        dnnl_check(dnnl_sgemm('T', 'N', OC, C, R, 1.0f, y, OC, x, C, beta, w, C));
}

#endif
