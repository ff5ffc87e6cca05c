// operations.h: for every operation of ops.h its factors, its inputs, its call, and the bytes that its kernels state.
#ifndef OPERATIONS_H
#define OPERATIONS_H

#include "harness.h"
#include "traffic.h"

static inline size_t padded_vocabulary(size_t V) {
    return (V + 127) / 128 * 128;
}

static inline void set_dropout(Case *c) {
    c->dropout.rate = 0.01f * (float)LEVEL(F_DROPOUT);
    c->dropout.key = 0x1234567890abcdefull;
    c->dropout.first = (1ull << 33) + 7; // beyond 32 bits, and no multiple of the generator's four
    // Of a model with one head more than this rank has.
    c->dropout.sequence_stride = (uint64_t)(AT(F_NH) + 1) * AT(F_T) * AT(F_T);
}

// The tokens that the rank holds: all, or a slice in the middle.
static inline Vocabulary held_vocabulary(const Case *c, bool sliced) {
    const int V = LEVEL(F_V);
    Vocabulary all = {0, V}, middle = {V / 4, V / 2};
    return sliced ? middle : all;
}

static inline void set_shape(Case *c, size_t C, size_t NH, size_t V) {
    OpsShape shape = {LEVEL(F_B), LEVEL(F_T), (int)C, (int)NH, (int)V, (int)padded_vocabulary(V), (int)ROWS};
    c->shape = shape;
}

// Tokens as text has them: a third are one token, few are frequent and most are rare; the last one occurs.
static inline void add_tokens(Case *c, size_t V) {
    Buffer *tokens = add_buffer(c, "tokens", TYPE_INT, INPUT, ROWS);
    for (size_t i = 0; i < tokens->n; i++) {
        double u = (double)(case_draw(c) >> 40) / 16777216.0;
        int token = draw_below(c, 3) == 0 ? (int)V / 2 : (int)((double)V * u * u * u);
        ((int *)tokens->initial)[i] = i == 0 ? (int)V - 1 : token;
    }
}

static inline double size_rows(const Case *c) {
    return (double)(ROWS * AT(F_C));
}

// ---------------------------------------------------------------------------------------------------------- embedding

static void setup_embedding_forward(Case *c) {
    set_shape(c, AT(F_C), 1, AT(F_V));
    set_dropout(c);
    add_buffer(c, "out", TYPE_X, OUTPUT, ROWS * AT(F_C));
    add_tokens(c, AT(F_V));
    add_normal(c, "wte", TYPE_X, INPUT, padded_vocabulary(AT(F_V)) * AT(F_C), 0.0f, 0.02f);
    add_normal(c, "wpe", TYPE_X, INPUT, (AT(F_T) + 3) * AT(F_C), 0.0f, 0.02f);
}

// variant 1: a slice of the vocabulary.
static void call_embedding_forward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    const Vocabulary held = held_vocabulary(c, LEVEL(F_VARIANT));
    table->embedding_forward(ops, m[0], m[1], m[2], m[3], LEVEL(F_B), LEVEL(F_T), LEVEL(F_C), &held, &c->dropout);
}

static double size_embedding(const Case *c) {
    return size_rows(c) + (double)(AT(F_V) * AT(F_C));
}

// variant 1: the model has more positions than the batch.
static size_t positions(const Case *c) {
    return AT(F_T) + (LEVEL(F_VARIANT) ? 37 : 0);
}

static void setup_wpe_backward(Case *c) {
    set_shape(c, AT(F_C), 1, 1);
    add_gradient(c, "dwpe", TYPE_GRAD, positions(c) * AT(F_C), LEVEL(F_ACCUMULATE), 1.0f);
    add_normal(c, "dout", TYPE_X, INPUT, ROWS * AT(F_C), 0.0f, 1.0f);
}

static void call_wpe_backward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->wpe_backward(ops, m[0], m[1], LEVEL(F_B), LEVEL(F_T), LEVEL(F_C), (int)positions(c), LEVEL(F_ACCUMULATE));
}

static void setup_wte_backward(Case *c) {
    set_shape(c, AT(F_C), 1, AT(F_V));
    add_normal(c, "dwte", TYPE_GRAD, UPDATED, padded_vocabulary(AT(F_V)) * AT(F_C), 0.0f, 1.0f);
    add_normal(c, "dout", TYPE_X, INPUT, ROWS * AT(F_C), 0.0f, 1.0f);
    add_tokens(c, AT(F_V));
}

static void call_wte_backward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    const Vocabulary held = held_vocabulary(c, LEVEL(F_VARIANT));
    table->wte_backward(ops, m[0], m[1], m[2], LEVEL(F_B), LEVEL(F_T), LEVEL(F_C), &held);
}

// ---------------------------------------------------------------------------------------------------------- layer norm

static void add_weight_and_bias(Case *c) {
    add_normal(c, "weight", TYPE_X, INPUT, AT(F_C), 1.0f, 0.3f);
    add_normal(c, "bias", TYPE_X, INPUT, AT(F_C), 0.0f, 0.02f);
}

// Sums over rows end in a pass over 32 partial sums of each channel, however few there are.
static double size_layernorm(const Case *c) {
    return AT(F_C) > CPU_CHANNELS && ROWS > 512 ? INFINITY : size_rows(c) + 8.0 * (double)AT(F_C);
}

static void setup_layernorm_forward(Case *c) {
    set_shape(c, AT(F_C), 1, 1);
    add_buffer(c, "out", TYPE_X, OUTPUT, ROWS * AT(F_C));
    add_buffer(c, "mean", TYPE_FLOAT, OUTPUT, ROWS);
    add_buffer(c, "rstd", TYPE_FLOAT, OUTPUT, ROWS);
    add_outliers(c, add_normal(c, "inp", TYPE_X, INPUT, ROWS * AT(F_C), 0.3f, 1.5f), 30.0f);
    add_weight_and_bias(c);
}

static void call_layernorm_forward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->layernorm_forward(ops, m[0], m[1], m[2], m[3], m[4], m[5], ROWS, LEVEL(F_C));
}

static void setup_residual_layernorm_forward(Case *c) {
    set_shape(c, AT(F_C), 1, 1);
    set_dropout(c);
    add_buffer(c, "residual", TYPE_X, OUTPUT, ROWS * AT(F_C));
    add_buffer(c, "out", TYPE_X, OUTPUT, ROWS * AT(F_C));
    Buffer *mean = add_buffer(c, "mean", TYPE_FLOAT, OUTPUT, ROWS);
    Buffer *rstd = add_buffer(c, "rstd", TYPE_FLOAT, OUTPUT, ROWS);
    // Scaled by dropout, the sum may or may not be fused with the product, and one element in 2^16 of the bf16 residual
    // is then rounded to the other side: 2^-8 of an element, 1e-4 of the mean of 64.
    if (type_is_bf16(TYPE_X) && LEVEL(F_DROPOUT) > 0) mean->norm_bound = rstd->norm_bound = 3e-4;
    add_outliers(c, add_normal(c, "inp", TYPE_X, INPUT, ROWS * AT(F_C), 0.3f, 1.5f), 30.0f);
    add_normal(c, "branch", TYPE_X, INPUT, ROWS * AT(F_C), 0.0f, 0.5f);
    add_weight_and_bias(c);
}

static void call_residual_layernorm_forward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->residual_layernorm_forward(ops, m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], ROWS, LEVEL(F_C),
                                      &c->dropout);
}

// variant 1: dinp is written, not added to.
static void setup_layernorm_backward(Case *c) {
    size_t C = AT(F_C);
    set_shape(c, C, 1, 1);
    add_gradient(c, "dinp", TYPE_X, ROWS * C, !LEVEL(F_VARIANT), 1.0f);
    add_gradient(c, "dweight", TYPE_GRAD, C, LEVEL(F_ACCUMULATE), 1.0f);
    add_gradient(c, "dbias", TYPE_GRAD, C, LEVEL(F_ACCUMULATE), 1.0f);
    add_normal(c, "dout", TYPE_X, INPUT, ROWS * C, 0.0f, 1.0f);
    Buffer *inp = add_normal(c, "inp", TYPE_X, INPUT, ROWS * C, 0.3f, 1.5f);
    add_outliers(c, inp, 30.0f);
    add_normal(c, "weight", TYPE_X, INPUT, C, 1.0f, 0.3f);
    Buffer *mean = add_buffer(c, "mean", TYPE_FLOAT, INPUT, ROWS);
    Buffer *rstd = add_buffer(c, "rstd", TYPE_FLOAT, INPUT, ROWS);
    for (size_t row = 0; row < ROWS; row++) {
        double sum = 0.0, squares = 0.0;
        for (size_t i = 0; i < C; i++) sum += type_value(TYPE_X, inp->initial, row * C + i);
        for (size_t i = 0; i < C; i++) {
            double centred = type_value(TYPE_X, inp->initial, row * C + i) - sum / (double)C;
            squares += centred * centred;
        }
        set_value(mean, row, (float)(sum / (double)C));
        set_value(rstd, row, (float)(1.0 / sqrt(squares / (double)C + 1e-5)));
    }
}

static void call_layernorm_backward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->layernorm_backward(ops, m[0], LEVEL(F_VARIANT), m[1], m[2], m[3], m[4], m[5], m[6], m[7], ROWS, LEVEL(F_C),
                              LEVEL(F_ACCUMULATE));
}

// ------------------------------------------------------------------------------------------------ residual and dropout

// variant 1: in place, out is inp.
static void setup_residual_forward(Case *c) {
    set_shape(c, AT(F_C), 1, 1);
    set_dropout(c);
    add_gradient(c, "out", TYPE_X, ROWS * AT(F_C), LEVEL(F_VARIANT), 1.0f);
    if (LEVEL(F_VARIANT))
        add_nothing(c);
    else
        add_normal(c, "inp", TYPE_X, INPUT, ROWS * AT(F_C), 0.0f, 1.0f);
    add_normal(c, "branch", TYPE_X, INPUT, ROWS * AT(F_C), 0.0f, 1.0f);
}

static void call_residual_forward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->residual_forward(ops, m[0], LEVEL(F_VARIANT) ? m[0] : m[1], m[2], ROWS * AT(F_C), &c->dropout);
}

// variant 1: in place, dinp is dout.
static void setup_dropout_backward(Case *c) {
    set_shape(c, AT(F_C), 1, 1);
    set_dropout(c);
    add_gradient(c, "dinp", TYPE_X, ROWS * AT(F_C), LEVEL(F_VARIANT), 1.0f);
    if (LEVEL(F_VARIANT))
        add_nothing(c);
    else
        add_normal(c, "dout", TYPE_X, INPUT, ROWS * AT(F_C), 0.0f, 1.0f);
}

static void call_dropout_backward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->dropout_backward(ops, m[0], LEVEL(F_VARIANT) ? m[0] : m[1], ROWS * AT(F_C), &c->dropout);
}

// -------------------------------------------------------------------------------------------------------------- matmul

enum { HEAD = 50304 }; // the head's output channels, GPT-2's padded vocabulary; no other layer is wider than 4 C

static void set_matmul_shape(Case *c) {
    if (AT(F_OC) == HEAD)
        set_shape(c, AT(F_C), 1, HEAD);
    else
        set_shape(c, AT(F_C) * 4 < AT(F_OC) ? AT(F_OC) / 4 : AT(F_C), 1, 1);
}

// variant 1: without bias.
static void add_bias(Case *c) {
    if (LEVEL(F_VARIANT))
        add_nothing(c);
    else
        add_normal(c, "bias", TYPE_X, INPUT, AT(F_OC), 0.0f, 0.5f);
}

static void setup_matmul_forward(Case *c) {
    set_matmul_shape(c);
    add_buffer(c, "out", TYPE_X, OUTPUT, ROWS * AT(F_OC));
    add_normal(c, "inp", TYPE_X, INPUT, ROWS * AT(F_C), 0.0f, 1.0f);
    add_normal(c, "weight", TYPE_X, INPUT, AT(F_OC) * AT(F_C), 0.0f, 0.05f);
    add_bias(c);
}

static void call_matmul_forward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->matmul_forward(ops, m[0], m[1], m[2], m[3], ROWS, LEVEL(F_C), LEVEL(F_OC));
}

static void setup_matmul_gelu_forward(Case *c) {
    set_matmul_shape(c);
    add_buffer(c, "pre", TYPE_X, OUTPUT, ROWS * AT(F_OC));
    add_buffer(c, "out", TYPE_X, OUTPUT, ROWS * AT(F_OC));
    add_normal(c, "inp", TYPE_X, INPUT, ROWS * AT(F_C), 0.0f, 1.0f);
    add_normal(c, "weight", TYPE_X, INPUT, AT(F_OC) * AT(F_C), 0.0f, 0.05f);
    add_normal(c, "bias", TYPE_X, INPUT, AT(F_OC), 0.0f, 0.5f);
}

static void call_matmul_gelu_forward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->matmul_gelu_forward(ops, m[0], m[1], m[2], m[3], m[4], ROWS, LEVEL(F_C), LEVEL(F_OC));
}

static void setup_matmul_backward_input(Case *c) {
    set_matmul_shape(c);
    add_buffer(c, "dinp", TYPE_X, OUTPUT, ROWS * AT(F_C));
    add_normal(c, "dout", TYPE_X, INPUT, ROWS * AT(F_OC), 0.0f, 1.0f);
    add_normal(c, "weight", TYPE_X, INPUT, AT(F_OC) * AT(F_C), 0.0f, 0.05f);
}

static void call_matmul_backward_input(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->matmul_backward_input(ops, m[0], m[1], m[2], ROWS, LEVEL(F_C), LEVEL(F_OC));
}

static void setup_matmul_gelu_backward_input(Case *c) {
    set_matmul_shape(c);
    add_buffer(c, "dpre", TYPE_X, OUTPUT, ROWS * AT(F_C));
    add_normal(c, "dout", TYPE_X, INPUT, ROWS * AT(F_OC), 0.0f, 1.0f);
    add_normal(c, "weight", TYPE_X, INPUT, AT(F_OC) * AT(F_C), 0.0f, 0.05f);
    add_outliers(c, add_normal(c, "pre", TYPE_X, INPUT, ROWS * AT(F_C), 0.0f, 1.0f), 10.0f);
}

static void call_matmul_gelu_backward_input(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->matmul_gelu_backward_input(ops, m[0], m[1], m[2], m[3], ROWS, LEVEL(F_C), LEVEL(F_OC));
}

static void setup_matmul_backward_weight(Case *c) {
    set_matmul_shape(c);
    add_gradient(c, "dweight", TYPE_GRAD, AT(F_OC) * AT(F_C), LEVEL(F_ACCUMULATE), 1.0f);
    if (LEVEL(F_VARIANT))
        add_nothing(c);
    else
        add_gradient(c, "dbias", TYPE_GRAD, AT(F_OC), LEVEL(F_ACCUMULATE), 1.0f);
    add_normal(c, "inp", TYPE_X, INPUT, ROWS * AT(F_C), 0.0f, 1.0f);
    add_normal(c, "dout", TYPE_X, INPUT, ROWS * AT(F_OC), 0.0f, 1.0f);
}

static void call_matmul_backward_weight(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->matmul_backward_weight(ops, m[0], m[1], m[2], m[3], ROWS, LEVEL(F_C), LEVEL(F_OC), LEVEL(F_ACCUMULATE));
}

// The head has no bias.
static double size_matmul(const Case *c) {
    if (AT(F_OC) == HEAD && c->operation->levels[F_VARIANT].count > 0 && !LEVEL(F_VARIANT)) return INFINITY;
    return (double)ROWS * (double)(AT(F_C) + AT(F_OC)) +
           (double)AT(F_C) * (double)AT(F_OC) * (2.0 + (double)ROWS / 64.0);
}

// ----------------------------------------------------------------------------------------------------------- attention

// Probabilities are rounded to bf16 for the tensor cores, and the errors of several keys add.
static void allow_sums_of_rounded(Buffer *buffer) {
    if (type_is_bf16(buffer->type)) buffer->element_bound = 8.0 / 256.0;
}

// variant 1: queries and keys three times as large, so that a softmax is nearly one key's.
static void add_qkv(Case *c) {
    size_t C = AT(F_NH) * AT(F_HS);
    Buffer *qkv = add_normal(c, "qkv", TYPE_X, INPUT, ROWS * 3 * C, 0.0f, 1.0f);
    if (!LEVEL(F_VARIANT)) return;
    for (size_t i = 0; i < qkv->n; i++)
        if (i / C % 3 < 2) set_value(qkv, i, 3.0f * (float)type_value(TYPE_X, qkv->initial, i));
}

static void setup_attention_forward(Case *c) {
    size_t C = AT(F_NH) * AT(F_HS);
    set_shape(c, C, AT(F_NH), 1);
    set_dropout(c);
    allow_sums_of_rounded(add_buffer(c, "out", TYPE_X, OUTPUT, ROWS * C));
    add_buffer(c, "lse", TYPE_FLOAT, OUTPUT, ROWS * AT(F_NH));
    add_qkv(c);
}

static void call_attention_forward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->attention_forward(ops, m[0], m[1], m[2], LEVEL(F_B), LEVEL(F_T), LEVEL(F_NH), LEVEL(F_HS), &c->dropout);
}

// out and lse belong to qkv: the CPU's forward pass makes them.
static void setup_attention_backward(Case *c) {
    size_t C = AT(F_NH) * AT(F_HS);
    set_shape(c, C, AT(F_NH), 1);
    set_dropout(c);
    allow_sums_of_rounded(add_buffer(c, "dqkv", TYPE_X, OUTPUT, ROWS * 3 * C));
    add_normal(c, "dout", TYPE_X, INPUT, ROWS * C, 0.0f, 1.0f);
    add_qkv(c);
    Buffer *out = add_buffer(c, "out", TYPE_X, INPUT, ROWS * C);
    Buffer *lse = add_buffer(c, "lse", TYPE_FLOAT, INPUT, ROWS * AT(F_NH));
    void *ops = cpu_ops(&cpu_table, &c->shape), *memory[5];
    for (int i = 2; i < 5; i++) {
        memory[i] = cpu_table.allocate(c->buffers[i].bytes);
        cpu_table.upload(memory[i], c->buffers[i].initial, c->buffers[i].bytes);
    }
    cpu_table.attention_forward(ops, memory[3], memory[4], memory[2], LEVEL(F_B), LEVEL(F_T), LEVEL(F_NH), LEVEL(F_HS),
                                &c->dropout);
    cpu_table.synchronize();
    cpu_table.download(out->initial, memory[3], out->bytes);
    cpu_table.download(lse->initial, memory[4], lse->bytes);
    for (int i = 2; i < 5; i++) cpu_table.release(memory[i]);
}

static void call_attention_backward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->attention_backward(ops, m[0], m[1], m[2], m[3], m[4], LEVEL(F_B), LEVEL(F_T), LEVEL(F_NH), LEVEL(F_HS),
                              &c->dropout);
}

static double size_attention(const Case *c) {
    return (double)(ROWS * AT(F_NH) * (AT(F_HS) + 8)) * (3.0 + (double)AT(F_T) / 16.0);
}

// ---------------------------------------------------------------------------------------------------------- classifier

// variant 1: want_gradient. What stands in padding columns must not matter: NaN.
static void setup_classifier(Case *c) {
    size_t V = AT(F_V), Vp = padded_vocabulary(V);
    set_shape(c, 1, 1, V);
    Buffer *logits = add_buffer(c, "logits", TYPE_X, LEVEL(F_VARIANT) ? UPDATED : INPUT, ROWS * Vp);
    for (size_t row = 0; row < ROWS; row++) {
        for (size_t i = 0; i < V; i++) set_value(logits, row * Vp + i, 3.0f * draw_normal(c));
        size_t outlier = row * Vp + case_draw(c) % V;
        set_value(logits, outlier, 10.0f * (float)type_value(TYPE_X, logits->initial, outlier));
    }
    add_buffer(c, "losses", TYPE_FLOAT, OUTPUT, ROWS);
    Buffer *targets = add_buffer(c, "targets", TYPE_INT, INPUT, ROWS);
    for (size_t row = 0; row < ROWS; row++)
        ((int *)targets->initial)[row] = row % 7 == 5 ? -1 : row % 7 == 6 ? (int)V - 1 : draw_below(c, (int)V);
}

static void call_classifier(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    int V = LEVEL(F_V), Vp = (int)padded_vocabulary(AT(F_V));
    table->classifier(ops, m[0], m[1], m[2], ROWS, V, Vp, 1.0f / (float)ROWS, LEVEL(F_VARIANT));
}

static double size_classifier(const Case *c) {
    return (double)(ROWS * padded_vocabulary(AT(F_V)));
}

// Columns that are sliced over two ranks, of which this one holds the middle of the vocabulary.
static void setup_classifier_statistics(Case *c) {
    setup_classifier(c);
    c->buffers[0].role = INPUT;
    c->buffers[1].role = INPUT; // losses, which nobody reads or writes
    add_buffer(c, "statistics", TYPE_FLOAT, OUTPUT, ROWS * 3);
}

static void call_classifier_statistics(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    const Vocabulary held = held_vocabulary(c, true);
    table->classifier_statistics(ops, m[3], m[0], m[2], ROWS, (int)padded_vocabulary(AT(F_V)), &held);
}

static void setup_classifier_sliced(Case *c) {
    setup_classifier(c);
    const Vocabulary held = held_vocabulary(c, true);
    const int Vp = (int)padded_vocabulary(AT(F_V));
    Buffer *all = add_buffer(c, "all", TYPE_FLOAT, INPUT, 2 * ROWS * 3);
    void *ops = cpu_ops(&cpu_table, &c->shape), *logits = cpu_table.allocate(c->buffers[0].bytes);
    void *targets = cpu_table.allocate(c->buffers[2].bytes), *statistics = cpu_table.allocate(ROWS * 3 * sizeof(float));
    cpu_table.upload(logits, c->buffers[0].initial, c->buffers[0].bytes);
    cpu_table.upload(targets, c->buffers[2].initial, c->buffers[2].bytes);
    cpu_table.classifier_statistics(ops, statistics, logits, targets, ROWS, Vp, &held);
    cpu_table.synchronize();
    cpu_table.download(all->initial + ROWS * 3 * sizeof(float), statistics, ROWS * 3 * sizeof(float));
    for (size_t row = 0; row < ROWS; row++) { // the other rank's
        const int target = ((const int *)c->buffers[2].initial)[row] - held.first;
        set_value(all, 3 * row, 2.0f + draw_normal(c));
        set_value(all, 3 * row + 1, 1.0f + (float)draw_below(c, 100));
        set_value(all, 3 * row + 2, target >= 0 && target < held.count ? 0.0f : 1.0f + draw_normal(c));
    }
    cpu_table.release(logits), cpu_table.release(targets), cpu_table.release(statistics);
}

static void call_classifier_sliced(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    const Vocabulary held = held_vocabulary(c, true);
    table->classifier_sliced(ops, m[0], m[1], m[2], m[3], 2, ROWS, (int)padded_vocabulary(AT(F_V)), &held,
                             1.0f / (float)ROWS, LEVEL(F_VARIANT));
}

static void setup_bias_backward(Case *c) {
    set_shape(c, AT(F_C), 1, 1);
    add_gradient(c, "dbias", TYPE_GRAD, AT(F_C), LEVEL(F_ACCUMULATE), 1.0f);
    add_normal(c, "dout", TYPE_X, INPUT, ROWS * AT(F_C), 0.0f, 1.0f);
}

static void call_bias_backward(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->bias_backward(ops, m[0], m[1], ROWS, LEVEL(F_C), LEVEL(F_ACCUMULATE));
}

// ------------------------------------------------------------------------------------------------------------- vectors

static double size_vector(const Case *c) {
    return (double)AT(F_N);
}

static void set_small_shape(Case *c) {
    OpsShape shape = {1, 1, 1, 1, 1, 1, 1};
    c->shape = shape;
}

static void setup_sum_values(Case *c) {
    set_small_shape(c);
    add_gradient(c, "sum", TYPE_DOUBLE, 1, LEVEL(F_ACCUMULATE), 100.0f);
    add_normal(c, "x", TYPE_FLOAT, INPUT, AT(F_N), 1.0f, 1.0f);
}

static void call_sum_values(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->sum_values(ops, m[0], m[1], AT(F_N), LEVEL(F_ACCUMULATE));
}

static void setup_sum_of_squares(Case *c) {
    set_small_shape(c);
    add_gradient(c, "sum", TYPE_DOUBLE, 1, LEVEL(F_ACCUMULATE), 100.0f);
    add_outliers(c, add_normal(c, "x", TYPE_GRAD, INPUT, AT(F_N), 0.0f, 0.01f), 30.0f);
}

static void call_sum_of_squares(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->sum_of_squares(ops, m[0], m[1], AT(F_N), LEVEL(F_ACCUMULATE));
}

static void setup_accumulate_gradient(Case *c) {
    set_small_shape(c);
    add_normal(c, "sum", TYPE_GRAD, UPDATED, AT(F_N), 0.0f, 1.0f);
    add_normal(c, "x", TYPE_GRAD, INPUT, AT(F_N), 0.0f, 1.0f);
}

static void call_accumulate_gradient(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    (void)ops;
    table->accumulate_gradient(ops, m[0], m[1], AT(F_N));
}

// variant % 3: decay applies to nothing, to the first part, to everything. From 3 on: with masters. The learning rate
// is large, so that an error in the step shows beside the parameter.
static void setup_adamw_update(Case *c) {
    size_t n = AT(F_N);
    int masters = LEVEL(F_VARIANT) / 3;
    set_small_shape(c);
    AdamW adamw = {0.1f, 0.9f, 0.99f, 1e-8f, 0.5f, 0.7f, LEVEL(F_VARIANT) % 2 ? 1000 : 1, 0xfedcba0987654321ull, 0};
    adamw.round_first = (1ull << 34) + (LEVEL(F_VARIANT) % 2 ? 5 : 64);
    c->adamw = adamw;
    c->n_decay = n * (AT(F_VARIANT) % 3) / 2;
    if (masters) {
        add_buffer(c, "params", TYPE_X, OUTPUT, n);
        add_normal(c, "master", TYPE_FLOAT, UPDATED, n, 0.0f, 0.5f);
    } else {
        Buffer *params = add_normal(c, "params", TYPE_X, UPDATED, n, 0.0f, 0.5f);
        // Rounded with the same random bits, all but a few parameters in 2^16 come out alike: other bits give 2e-3.
        if (type_is_bf16(TYPE_X)) params->norm_bound = 3e-4;
        add_nothing(c);
    }
    add_normal(c, "m", TYPE_FLOAT, UPDATED, n, 0.0f, 0.01f);
    Buffer *v = add_normal(c, "v", TYPE_FLOAT, UPDATED, n, 0.0f, 0.01f);
    for (size_t i = 0; i < n; i++) ((float *)v->initial)[i] *= ((float *)v->initial)[i];
    add_outliers(c, add_normal(c, "grads", TYPE_GRAD, INPUT, n, 0.0f, 0.01f), 30.0f);
}

static void call_adamw_update(const OpsTable *table, void *ops, const Case *c, void *const *m) {
    table->adamw_update(ops, &c->adamw, m[0], m[1], m[2], m[3], m[4], AT(F_N), c->n_decay);
}

// ------------------------------------------------------------------------------------------------------------ the
// table

// Levels of a factor: how many, and which.
// clang-format off
#define NONE {0, {0}}
#define TWO {2, {0, 1}}
#define B_LEVELS {2, {1, 3}}
#define T_LEVELS {5, {1, 63, 64, 1000, 1024}}
#define T_OF_ATTENTION {7, {1, 63, 64, 65, 200, 1000, 1024}} // 200: several tiles, and cheap
#define C_LEVELS {6, {64, 65, 257, 768, 1600, 4096}}
#define C_OF_LAYERNORM {8, {64, 65, 257, 768, 1600, 4096, 8193, 8200}} // the last exceed what is kept in registers
#define OC_LEVELS {4, {64, 65, 768, HEAD}}
#define OC_OF_GELU {3, {64, 65, 768}}
#define HEADS {2, {1, 2}}
#define HS_LEVELS {6, {64, 80, 128, 40, 96, 5}}
#define V_LEVELS {3, {65, 257, 50257}}
#define N_LEVELS {7, {1, 63, 64, 65, 1000, 4099, 1000003}}
#define DROPOUTS {2, {0, 10}}
#if defined(PRECISION_FP32)
#define ADAMW_VARIANTS {3, {0, 1, 2}} // fp32 has no masters
#else
#define ADAMW_VARIANTS {6, {0, 1, 2, 3, 4, 5}}
#endif
// clang-format on

// Products are the library's.
#define traffic_matmul_forward NULL
#define traffic_matmul_gelu_forward NULL
#define traffic_matmul_backward_input NULL
#define traffic_matmul_gelu_backward_input NULL
#define traffic_matmul_backward_weight NULL
#define FUNCTIONS(name, size) setup_##name, call_##name, traffic_##name, size

// Levels in the order of Factor: B, T, C, OC, NH, HS, V, n, dropout, accumulate, variant, shift.
static const Operation operations[] = {
    {"embedding_forward",
     {B_LEVELS, T_LEVELS, C_LEVELS, NONE, NONE, NONE, V_LEVELS, NONE, DROPOUTS, NONE, TWO, NONE},
     FUNCTIONS(embedding_forward, size_embedding)},
    {"wpe_backward",
     {B_LEVELS, T_LEVELS, C_LEVELS, NONE, NONE, NONE, NONE, NONE, NONE, TWO, TWO, NONE},
     FUNCTIONS(wpe_backward, size_rows)},
    {"wte_backward",
     {B_LEVELS, T_LEVELS, C_LEVELS, NONE, NONE, NONE, V_LEVELS, NONE, NONE, NONE, TWO, NONE},
     FUNCTIONS(wte_backward, size_embedding)},
    {"layernorm_forward",
     {B_LEVELS, T_LEVELS, C_OF_LAYERNORM, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE},
     FUNCTIONS(layernorm_forward, size_layernorm)},
    {"residual_layernorm_forward",
     {B_LEVELS, T_LEVELS, C_OF_LAYERNORM, NONE, NONE, NONE, NONE, NONE, DROPOUTS, NONE, NONE, NONE},
     FUNCTIONS(residual_layernorm_forward, size_layernorm)},
    {"layernorm_backward",
     {B_LEVELS, T_LEVELS, C_OF_LAYERNORM, NONE, NONE, NONE, NONE, NONE, NONE, TWO, TWO, NONE},
     FUNCTIONS(layernorm_backward, size_layernorm)},
    {"residual_forward",
     {B_LEVELS, T_LEVELS, C_LEVELS, NONE, NONE, NONE, NONE, NONE, DROPOUTS, NONE, TWO, TWO},
     FUNCTIONS(residual_forward, size_rows)},
    {"dropout_backward",
     {B_LEVELS, T_LEVELS, C_LEVELS, NONE, NONE, NONE, NONE, NONE, DROPOUTS, NONE, TWO, TWO},
     FUNCTIONS(dropout_backward, size_rows)},
    {"matmul_forward",
     {B_LEVELS, T_LEVELS, C_LEVELS, OC_LEVELS, NONE, NONE, NONE, NONE, NONE, NONE, TWO, NONE},
     FUNCTIONS(matmul_forward, size_matmul)},
    {"matmul_gelu_forward",
     {B_LEVELS, T_LEVELS, C_LEVELS, OC_OF_GELU, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE},
     FUNCTIONS(matmul_gelu_forward, size_matmul)},
    {"matmul_backward_input",
     {B_LEVELS, T_LEVELS, C_LEVELS, OC_LEVELS, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE},
     FUNCTIONS(matmul_backward_input, size_matmul)},
    {"matmul_gelu_backward_input",
     {B_LEVELS, T_LEVELS, C_LEVELS, OC_OF_GELU, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE},
     FUNCTIONS(matmul_gelu_backward_input, size_matmul)},
    {"matmul_backward_weight",
     {B_LEVELS, T_LEVELS, C_LEVELS, OC_LEVELS, NONE, NONE, NONE, NONE, NONE, TWO, TWO, NONE},
     FUNCTIONS(matmul_backward_weight, size_matmul)},
    {"attention_forward",
     {B_LEVELS, T_OF_ATTENTION, NONE, NONE, HEADS, HS_LEVELS, NONE, NONE, DROPOUTS, NONE, TWO, NONE},
     FUNCTIONS(attention_forward, size_attention)},
    {"attention_backward",
     {B_LEVELS, T_OF_ATTENTION, NONE, NONE, HEADS, HS_LEVELS, NONE, NONE, DROPOUTS, NONE, TWO, NONE},
     FUNCTIONS(attention_backward, size_attention)},
    {"classifier",
     {B_LEVELS, T_LEVELS, NONE, NONE, NONE, NONE, V_LEVELS, NONE, NONE, NONE, TWO, NONE},
     FUNCTIONS(classifier, size_classifier)},
    {"bias_backward",
     {B_LEVELS, T_LEVELS, C_LEVELS, NONE, NONE, NONE, NONE, NONE, NONE, TWO, NONE, NONE},
     setup_bias_backward,
     call_bias_backward,
     NULL,
     size_rows},
    {"classifier_statistics",
     {B_LEVELS, T_LEVELS, NONE, NONE, NONE, NONE, V_LEVELS, NONE, NONE, NONE, NONE, NONE},
     setup_classifier_statistics,
     call_classifier_statistics,
     NULL,
     size_classifier},
    {"classifier_sliced",
     {B_LEVELS, T_LEVELS, NONE, NONE, NONE, NONE, V_LEVELS, NONE, NONE, NONE, TWO, NONE},
     setup_classifier_sliced,
     call_classifier_sliced,
     NULL,
     size_classifier},
    {"sum_values",
     {NONE, NONE, NONE, NONE, NONE, NONE, NONE, N_LEVELS, NONE, TWO, NONE, NONE},
     FUNCTIONS(sum_values, size_vector)},
    {"sum_of_squares",
     {NONE, NONE, NONE, NONE, NONE, NONE, NONE, N_LEVELS, NONE, TWO, NONE, NONE},
     FUNCTIONS(sum_of_squares, size_vector)},
    {"accumulate_gradient",
     {NONE, NONE, NONE, NONE, NONE, NONE, NONE, N_LEVELS, NONE, NONE, NONE, TWO},
     FUNCTIONS(accumulate_gradient, size_vector)},
    {"adamw_update",
     {NONE, NONE, NONE, NONE, NONE, NONE, NONE, N_LEVELS, NONE, NONE, ADAMW_VARIANTS, TWO},
     FUNCTIONS(adamw_update, size_vector)},
};
enum { OPERATIONS = sizeof operations / sizeof operations[0] };

#endif
