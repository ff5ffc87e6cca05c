// Every operation of the device against a loop in double precision over the same (rounded) inputs, forward and
// backward; the references' own gradients against numerical ones; odd sizes; accumulation; masks; and the same bits for
// any number of threads.
//
// Tolerances are relative errors of norms. fp32: sums of a few hundred terms of rounding 6e-8 stay below 2e-6.
// bf16: rounding once to 8 significant bits errs by at most 2^-8 of an element, and over many elements of any smooth
// distribution by 1.4e-3 to 1.7e-3 in the norm. A result that is rounded once is held to that, so that a second
// rounding (1.7e-3 times root 2) shows.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>
#include <sys/wait.h>
#include <unistd.h>
#include "ops.h"

#if defined(PRECISION_FP32)
enum { BF16 = 0 };
#else
enum { BF16 = 1 };
#endif
enum { GRAD_BF16 = sizeof(gradX) == 2 };
static const double FLOAT_TOLERANCE = 2e-6;

static double tolerance(bool bf16, size_t n) {
    if (!bf16) return FLOAT_TOLERANCE;
    return n < 500 ? 1.0 / 256.0 : 1.9e-3;
}

// Buffers

static void *poisoned(size_t bytes) {
    void *pointer = malloc(bytes + 1);
    assert_non_null(pointer);
    memset(pointer, 0xff, bytes); // NaN in fp32, bf16 and double
    return pointer;
}
#define NEW(type, n) ((type *)poisoned((size_t)(n) * sizeof(type)))

// A tensor as the operation sees it, and what its elements are in double.
typedef struct {
    size_t n;
    floatX *x;
    double *d;
} Values;

static Values tensor(size_t n, uint64_t key, double mean, double deviation) {
    Values t = {n, NEW(floatX, n), NEW(double, n)};
    for (size_t i = 0; i < n; i++) {
        t.x[i] = floatX_from((float)(mean + deviation * (double)random_normal(key, i)));
        t.d[i] = (double)floatX_to_float(t.x[i]);
    }
    return t;
}

static void drop(Values *t) {
    free(t->x);
    free(t->d);
}

static double *doubles(size_t n) {
    double *d = NEW(double, n);
    for (size_t i = 0; i < n; i++) d[i] = 0.0;
    return d;
}

static double relative_error(const double *got, const double *want, size_t n) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return sqrt(difference) / (norm > 0.0 ? sqrt(norm) : 1.0);
}

static void check_at(const char *what, const double *got, const double *want, size_t n, double allowed, int line) {
    double error = relative_error(got, want, n);
    if (getenv("TEST_OPS_VERBOSE")) print_message("  %-32s line %4d  error %.2e of %.1e\n", what, line, error, allowed);
    if (!(error <= allowed)) fail_msg("%s, line %d: relative error %.3e, allowed %.1e", what, line, error, allowed);
}

static void check_x_at(const char *what, const floatX *got, const double *want, size_t n, double allowed, int line) {
    double *d = NEW(double, n);
    for (size_t i = 0; i < n; i++) d[i] = (double)floatX_to_float(got[i]);
    check_at(what, d, want, n, allowed, line);
    free(d);
}

static void check_g_at(const char *what, const gradX *got, const double *want, size_t n, double allowed, int line) {
    double *d = NEW(double, n);
    for (size_t i = 0; i < n; i++) d[i] = (double)gradX_to_float(got[i]);
    check_at(what, d, want, n, allowed, line);
    free(d);
}

static void check_f_at(const char *what, const float *got, const double *want, size_t n, double allowed, int line) {
    double *d = NEW(double, n);
    for (size_t i = 0; i < n; i++) d[i] = (double)got[i];
    check_at(what, d, want, n, allowed, line);
    free(d);
}
#define check_x(got, want, n) check_x_at(#got, got, want, n, tolerance(BF16, n), __LINE__)
#define check_g(got, want, n) check_g_at(#got, got, want, n, tolerance(GRAD_BF16, n), __LINE__)
#define check_f(got, want, n) check_f_at(#got, got, want, n, FLOAT_TOLERANCE, __LINE__)

// A gradient buffer with something in it: NaN, or numbers to add to, whose doubles go into `want`.
static gradX *grad_buffer(double *want, size_t n, int accumulate) {
    gradX *g = NEW(gradX, n);
    if (accumulate)
        for (size_t i = 0; i < n; i++) {
            g[i] = gradX_from(random_normal(77, i));
            want[i] += (double)gradX_to_float(g[i]);
        }
    return g;
}

static double mask_factor(Dropout dropout, uint64_t i) {
    if (dropout.rate == 0.0f) return 1.0;
    bool kept = (double)random_u32(dropout.key, dropout.first + i) >= (double)dropout.rate * 4294967296.0;
    return kept ? 1.0 / (1.0 - (double)dropout.rate) : 0.0;
}

static Memory memory;

static Ops *open_ops(int B, int T, int C, int NH, int V, int Vp, int logit_rows) {
    Ops *ops = (Ops *)malloc(sizeof(Ops));
    OpsShape shape = {B, T, C, NH, V, Vp, logit_rows};
    ops_init(ops, &memory, &shape, NULL, NULL);
    if (ops->workspace_bytes > 0) memset(ops->workspace, 0xff, ops->workspace_bytes);
    return ops;
}

static void close_ops(Ops *ops) {
    ops_free(ops);
    free(ops);
}

// The exponential and GELU

static double gelu_reference(double x) {
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

static double gelu_derivative_reference(double x) {
    double t = tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x));
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x);
}

static void test_exp(void **state) {
    (void)state;
    double worst = 0.0;
    for (int i = -8660000; i <= 8872000; i++) {
        float x = (float)i * 1e-5f;
        double want = exp((double)x), error = fabs((double)fast_exp(x) - want) / want;
        if (error > worst) worst = error;
    }
    if (worst > 1.5 * 1.1920929e-7) fail_msg("relative error %g", worst);
    assert_true(fast_exp(0.0f) == 1.0f);
    assert_true(fast_exp(-INFINITY) == 0.0f);
    assert_true(fast_exp(-1e30f) == 0.0f);
    assert_true(fast_exp(-86.7f) == 0.0f);
    assert_true(fast_exp(-86.6f) > 0.0f);
    assert_true(isinf(fast_exp(INFINITY)) && isinf(fast_exp(88.73f)) && !isinf(fast_exp(88.72f)));
    assert_true(isnan(fast_exp(NAN)));
}

static void test_gelu(void **state) {
    (void)state;
    for (int i = -200000; i <= 200000; i++) {
        float x = (float)i * 1e-4f;
        double want = gelu_reference((double)x), derivative = gelu_derivative_reference((double)x);
        // The argument 2u of the exponential is rounded to 1e-7 of itself. Near the left end GELU is below 1e-30, and
        // the reference has lost all digits to cancellation.
        double two_u = fabs(2.0 * sqrt(2.0 / M_PI) * ((double)x + 0.044715 * pow((double)x, 3.0)));
        if (!(fabs((double)gelu(x) - want) <= 1e-7 * (4.0 + 2.0 * two_u) * fabs(want) + 1e-14))
            fail_msg("gelu(%g) = %g, not %g", (double)x, (double)gelu(x), want);
        if (!(fabs((double)gelu_derivative(x) - derivative) <= 2e-6)) fail_msg("gelu'(%g)", (double)x);
    }
    for (double x = -6.0; x < 6.0; x += 0.37) {
        double numerical = (gelu_reference(x + 1e-5) - gelu_reference(x - 1e-5)) / 2e-5;
        assert_true(fabs(numerical - gelu_derivative_reference(x)) < 1e-8);
    }
    assert_true(isnan(gelu(NAN)) && isnan(gelu_derivative(NAN)));
    assert_true(gelu(1e30f) == 1e30f && gelu(-1e10f) == 0.0f);
}

// Embedding

static Vocabulary whole_vocabulary(int V) {
    Vocabulary all = {0, V};
    return all;
}

// Ranks that hold slices of the vocabulary: their embeddings add up to the whole one's, to the bit, and their gradients
// are the rows of the whole one's. The last slice is empty, and one begins within the padding.
static void test_embedding_slices(void **state) {
    (void)state;
    enum { B = 3, T = 11, C = 20, V = 37, SLICE = 16, SLICES = 4, N = B * T * C };
    Ops *ops = open_ops(B, T, C, 1, SLICE * SLICES, SLICE * SLICES, 1);
    Dropout dropout = {0.2f, 5, 3, 0};
    Values wte = tensor(SLICE * SLICES * C, 1, 0, 1), wpe = tensor(T * C, 2, 0, 1), dout = tensor(N, 3, 0, 1);
    int tokens[B * T];
    for (size_t i = 0; i < B * T; i++) tokens[i] = (int)(random_u32(4, i) % V);
    floatX *out = NEW(floatX, N), *part = NEW(floatX, N), *sum = NEW(floatX, N);
    gradX *dwte = NEW(gradX, SLICE * SLICES * C), *dslice = NEW(gradX, SLICE * C);
    for (size_t i = 0; i < SLICE * SLICES * C; i++) dwte[i] = gradX_from(0.5f);
    embedding_forward(ops, out, tokens, wte.x, wpe.x, B, T, C, whole_vocabulary(V), dropout);
    wte_backward(ops, dwte, dout.x, tokens, B, T, C, whole_vocabulary(V));
    for (int slice = 0; slice < SLICES; slice++) {
        const int left = V - slice * SLICE;
        Vocabulary mine = {slice * SLICE, left < 0 ? 0 : left < SLICE ? left : SLICE};
        embedding_forward(ops, part, tokens, wte.x + slice * SLICE * C, wpe.x, B, T, C, mine, dropout);
        for (size_t i = 0; i < N; i++)
            sum[i] = slice == 0 ? part[i] : floatX_from(floatX_to_float(sum[i]) + floatX_to_float(part[i]));
        for (size_t i = 0; i < SLICE * C; i++) dslice[i] = gradX_from(0.5f);
        wte_backward(ops, dslice, dout.x, tokens, B, T, C, mine);
        assert_memory_equal(dslice, dwte + slice * SLICE * C, SLICE * C * sizeof(gradX));
    }
    for (size_t i = 0; i < N; i++) assert_true(floatX_to_float(sum[i]) == floatX_to_float(out[i])); // -0 equals 0
    drop(&wte), drop(&wpe), drop(&dout);
    free(out), free(part), free(sum), free(dwte), free(dslice);
    close_ops(ops);
}

static void test_embedding(void **state) {
    (void)state;
    int shapes[][4] = {{3, 7, 5, 11}, {1, 1, 1, 3}, {2, 9, 257, 128}, {4, 64, 33, 2}}; // B, T, C, Vp
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++)
        for (int variant = 0; variant < 2; variant++) {
            int B = shapes[k][0], T = shapes[k][1], C = shapes[k][2], Vp = shapes[k][3], positions = T + 3;
            Ops *ops = open_ops(B, T, C, 1, Vp, Vp, 1);
            Dropout dropout = {variant ? 0.3f : 0.0f, 5, 3, 0};
            size_t rows = (size_t)(B * T), n = rows * (size_t)C;
            Values wte = tensor((size_t)(Vp * C), 1, 0, 1), wpe = tensor((size_t)(positions * C), 2, 0, 1);
            Values dout = tensor(n, 3, 0, 1);
            int *tokens = NEW(int, rows);
            for (size_t i = 0; i < rows; i++) tokens[i] = (int)(random_u32(4, i) % (uint32_t)Vp);
            floatX *out = NEW(floatX, n);
            double *want = doubles(n), *want_wte = doubles(wte.n), *want_wpe = doubles(wpe.n);
            for (size_t row = 0; row < rows; row++)
                for (int c = 0; c < C; c++) {
                    size_t i = row * (size_t)C + (size_t)c, token = (size_t)(tokens[row] * C + c);
                    size_t position = row % (size_t)T * (size_t)C + (size_t)c;
                    want[i] = mask_factor(dropout, i) * (wte.d[token] + wpe.d[position]);
                    want_wte[token] += dout.d[i];
                    want_wpe[position] += dout.d[i];
                }
            gradX *dwte = grad_buffer(want_wte, wte.n, 1), *dwpe = grad_buffer(want_wpe, wpe.n, variant);
            embedding_forward(ops, out, tokens, wte.x, wpe.x, B, T, C, whole_vocabulary(Vp), dropout);
            check_x(out, want, n);
            wpe_backward(ops, dwpe, dout.x, B, T, C, positions, variant);
            check_g(dwpe, want_wpe, wpe.n);
            wte_backward(ops, dwte, dout.x, tokens, B, T, C, whole_vocabulary(Vp));
            check_g(dwte, want_wte, wte.n);
            drop(&wte), drop(&wpe), drop(&dout);
            free(tokens), free(out), free(want), free(want_wte), free(want_wpe), free(dwte), free(dwpe);
            close_ops(ops);
        }
}

// Layer norm

static void layernorm_reference(double *out, double *mean, double *rstd, const double *x, const double *w,
                                const double *b, size_t rows, int C) {
    for (size_t row = 0; row < rows; row++) {
        double m = 0.0, v = 0.0;
        for (int c = 0; c < C; c++) m += x[row * (size_t)C + (size_t)c] / C;
        for (int c = 0; c < C; c++) v += pow(x[row * (size_t)C + (size_t)c] - m, 2.0) / C;
        mean[row] = m;
        rstd[row] = 1.0 / sqrt(v + 1e-5);
        for (int c = 0; c < C; c++)
            out[row * (size_t)C + (size_t)c] = (x[row * (size_t)C + (size_t)c] - m) * rstd[row] * w[c] + b[c];
    }
}

static void layernorm_backward_reference(double *dx, double *dw, double *db, const double *dy, const double *x,
                                         const double *w, const double *mean, const double *rstd, size_t rows, int C) {
    for (size_t row = 0; row < rows; row++) {
        double sum = 0.0, sum_norm = 0.0;
        for (int c = 0; c < C; c++) {
            size_t i = row * (size_t)C + (size_t)c;
            double norm = (x[i] - mean[row]) * rstd[row];
            sum += dy[i] * w[c] / C;
            sum_norm += dy[i] * w[c] * norm / C;
            dw[c] += dy[i] * norm;
            db[c] += dy[i];
        }
        for (int c = 0; c < C; c++) {
            size_t i = row * (size_t)C + (size_t)c;
            dx[i] += (dy[i] * w[c] - sum - (x[i] - mean[row]) * rstd[row] * sum_norm) * rstd[row];
        }
    }
}

static double dot(const double *a, const double *b, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static void test_layernorm_reference(void **state) {
    (void)state;
    enum { ROWS = 3, C = 7 };
    Values x = tensor(ROWS * C, 1, 0.5, 1), w = tensor(C, 2, 1, 0.3), b = tensor(C, 3, 0, 1);
    Values dy = tensor(ROWS * C, 4, 0, 1);
    double mean[ROWS], rstd[ROWS], out[ROWS * C], dx[ROWS * C] = {0}, dw[C] = {0}, db[C] = {0}, got[ROWS * C + 2 * C];
    double numerical[ROWS * C + 2 * C];
    layernorm_reference(out, mean, rstd, x.d, w.d, b.d, ROWS, C);
    layernorm_backward_reference(dx, dw, db, dy.d, x.d, w.d, mean, rstd, ROWS, C);
    memcpy(got, dx, sizeof dx), memcpy(got + ROWS * C, dw, sizeof dw), memcpy(got + ROWS * C + C, db, sizeof db);
    for (int i = 0; i < ROWS * C + 2 * C; i++) {
        double *p = i < ROWS * C ? x.d + i : i < ROWS * C + C ? w.d + i - ROWS * C : b.d + i - ROWS * C - C;
        double value = *p, up, down;
        *p = value + 1e-5, layernorm_reference(out, mean, rstd, x.d, w.d, b.d, ROWS, C), up = dot(out, dy.d, dy.n);
        *p = value - 1e-5, layernorm_reference(out, mean, rstd, x.d, w.d, b.d, ROWS, C), down = dot(out, dy.d, dy.n);
        *p = value;
        numerical[i] = (up - down) / 2e-5;
    }
    check_at("layer norm", got, numerical, ROWS * C + 2 * C, 1e-8, __LINE__);
    drop(&x), drop(&w), drop(&b), drop(&dy);
}

static void test_layernorm(void **state) {
    (void)state;
    int shapes[][2] = {{1, 1}, {5, 3}, {17, 64}, {100, 33}, {70, 768}, {9, 1600}, {1300, 65}}; // rows, C
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++)
        for (int variant = 0; variant < 2; variant++) {
            size_t rows = (size_t)shapes[k][0];
            int C = shapes[k][1];
            size_t n = rows * (size_t)C;
            Ops *ops = open_ops((int)rows, 1, C, 1, 2, 2, 1);
            Values x = tensor(n, 1, 0.5, 1), branch = tensor(n, 6, 0, 1), w = tensor((size_t)C, 2, 1, 0.3);
            Values b = tensor((size_t)C, 3, 0, 1), dy = tensor(n, 4, 0, 1), dx = tensor(n, 5, 0, 1);
            floatX *out = NEW(floatX, n), *residual = NEW(floatX, n);
            float *mean = NEW(float, rows), *rstd = NEW(float, rows);
            double *want = doubles(n), *want_mean = doubles(rows), *want_rstd = doubles(rows);
            layernorm_reference(want, want_mean, want_rstd, x.d, w.d, b.d, rows, C);
            layernorm_forward(ops, out, mean, rstd, x.x, w.x, b.x, rows, C);
            check_x(out, want, n);
            check_f(mean, want_mean, rows);
            check_f(rstd, want_rstd, rows);

            // backward; with one channel the gradient of x is zero but for rounding
            double *want_w = doubles((size_t)C), *want_b = doubles((size_t)C), *want_dx = doubles(n);
            if (!variant) memcpy(want_dx, dx.d, n * sizeof(double));
            layernorm_backward_reference(want_dx, want_w, want_b, dy.d, x.d, w.d, want_mean, want_rstd, rows, C);
            gradX *dw = grad_buffer(want_w, (size_t)C, variant), *db = grad_buffer(want_b, (size_t)C, variant);
            if (variant) memset(dx.x, 0xff, n * sizeof(floatX));
            layernorm_backward(ops, dx.x, variant, dw, db, dy.x, x.x, w.x, mean, rstd, rows, C, variant);
            if (C > 1) check_x(dx.x, want_dx, n);
            if (C > 1) check_g(dw, want_w, (size_t)C);
            check_g(db, want_b, (size_t)C);

            // fused with the residual; the layer norm is that of the rounded residual
            Dropout dropout = {variant ? 0.25f : 0.0f, 11, 1, 0};
            for (size_t i = 0; i < n; i++) want[i] = x.d[i] + mask_factor(dropout, i) * branch.d[i];
            memset(out, 0xff, n * sizeof(floatX));
            memset(mean, 0xff, rows * sizeof(float)), memset(rstd, 0xff, rows * sizeof(float));
            residual_layernorm_forward(ops, residual, out, mean, rstd, x.x, branch.x, w.x, b.x, rows, C, dropout);
            check_x(residual, want, n);
            for (size_t i = 0; i < n; i++) want_dx[i] = (double)floatX_to_float(residual[i]);
            layernorm_reference(want, want_mean, want_rstd, want_dx, w.d, b.d, rows, C);
            check_x(out, want, n);
            check_f(mean, want_mean, rows);
            check_f(rstd, want_rstd, rows);
            drop(&x), drop(&branch), drop(&w), drop(&b), drop(&dy), drop(&dx);
            free(out), free(residual), free(mean), free(rstd), free(want), free(want_mean), free(want_rstd);
            free(want_w), free(want_b), free(want_dx), free(dw), free(db);
            close_ops(ops);
        }
}

// Residual, dropout

static void test_residual_and_dropout(void **state) {
    (void)state;
    size_t sizes[] = {1, 7, 1024, 4099, 50000};
    for (size_t k = 0; k < 5; k++)
        for (int variant = 0; variant < 2; variant++) {
            size_t n = sizes[k];
            Ops *ops = open_ops(1, 1, 8, 1, 2, 2, 1);
            Dropout dropout = {variant ? 0.1f : 0.0f, 9, 4294967290ull, 0}; // the index passes 2^32
            Values x = tensor(n, 1, 0, 1), y = tensor(n, 2, 0, 1);
            double *want = doubles(n);
            floatX *out = NEW(floatX, n);
            for (size_t i = 0; i < n; i++) want[i] = mask_factor(dropout, i) * y.d[i];
            dropout_backward(ops, out, y.x, n, dropout);
            check_x(out, want, n);
            for (size_t i = 0; i < n; i++) want[i] += x.d[i];
            residual_forward(ops, out, x.x, y.x, n, dropout);
            check_x(out, want, n);
            residual_forward(ops, x.x, x.x, y.x, n, dropout); // in place
            assert_memory_equal(x.x, out, n * sizeof(floatX));
            dropout_backward(ops, out, y.x, n, dropout);
            dropout_backward(ops, y.x, y.x, n, dropout);
            assert_memory_equal(y.x, out, n * sizeof(floatX));
            drop(&x), drop(&y);
            free(want), free(out);
            close_ops(ops);
        }
}

// How many are dropped; and that a batch in two halves draws the same mask.
static void test_dropout_statistics_and_splits(void **state) {
    (void)state;
    size_t n = 200000, half = 77777;
    Ops *ops = open_ops(4, 10, 24, 2, 2, 2, 1);
    floatX *ones = NEW(floatX, n), *whole = NEW(floatX, n), *parts = NEW(floatX, n);
    for (size_t i = 0; i < n; i++) ones[i] = floatX_from(1.0f);
    float rates[] = {0.1f, 0.5f, 0.9f};
    for (int k = 0; k < 3; k++) {
        Dropout dropout = {rates[k], 1234, 17, 0}, second = {rates[k], 1234, 17 + half, 0};
        dropout_backward(ops, whole, ones, n, dropout);
        dropout_backward(ops, parts, ones, half, dropout);
        dropout_backward(ops, parts + half, ones, n - half, second);
        assert_memory_equal(whole, parts, n * sizeof(floatX));
        size_t kept = 0;
        for (size_t i = 0; i < n; i++) {
            float value = floatX_to_float(whole[i]);
            assert_true(value == 0.0f || value == floatX_to_float(floatX_from(1.0f / (1.0f - rates[k]))));
            kept += value != 0.0f;
        }
        double expected = (double)n * (1.0 - (double)rates[k]);
        double deviation = sqrt((double)n * (double)rates[k] * (1.0 - (double)rates[k]));
        assert_true(fabs((double)kept - expected) < 5.0 * deviation);
    }
    // attention and embedding, by sequences
    enum { B = 4, T = 10, NH = 2, HS = 12, C = NH * HS };
    Values qkv = tensor(B * T * 3 * C, 3, 0, 1);
    float lse[B * NH * T];
    uint64_t stride = (uint64_t)(NH * T * T);
    Dropout dropout = {0.5f, 99, 5, stride}, second = {0.5f, 99, 5 + 2 * stride, stride};
    attention_forward(ops, whole, lse, qkv.x, B, T, NH, HS, dropout);
    attention_forward(ops, parts, lse, qkv.x, 2, T, NH, HS, dropout);
    attention_forward(ops, parts + 2 * T * C, lse, qkv.x + 2 * T * 3 * C, 2, T, NH, HS, second);
    assert_memory_equal(whole, parts, B * T * C * sizeof(floatX));
    int tokens[B * T] = {0};
    Dropout embedding_second = {0.5f, 99, 5 + 2 * T * C, 0};
    embedding_forward(ops, whole, tokens, qkv.x, qkv.x, B, T, C, whole_vocabulary(1), dropout);
    embedding_forward(ops, parts, tokens, qkv.x, qkv.x, 2, T, C, whole_vocabulary(1), dropout);
    embedding_forward(ops, parts + 2 * T * C, tokens, qkv.x, qkv.x, 2, T, C, whole_vocabulary(1), embedding_second);
    assert_memory_equal(whole, parts, B * T * C * sizeof(floatX));
    drop(&qkv);
    free(ones), free(whole), free(parts);
    close_ops(ops);
}

// Linear layers

static void matmul_reference(double *y, const double *x, const double *w, const double *b, size_t rows, int C, int OC) {
    for (size_t row = 0; row < rows; row++)
        for (int o = 0; o < OC; o++)
            y[row * (size_t)OC + (size_t)o] =
                (b != NULL ? b[o] : 0.0) + dot(x + row * (size_t)C, w + (size_t)o * (size_t)C, (size_t)C);
}

static void matmul_case(int model_C, size_t rows, int C, int OC, int with_bias, int accumulate) {
    Ops *ops = open_ops((int)rows, 1, model_C, 1, 2, 2, 1);
    size_t n_x = rows * (size_t)C, n_y = rows * (size_t)OC, n_w = (size_t)OC * (size_t)C;
    Values x = tensor(n_x, 1, 0, 1), w = tensor(n_w, 2, 0, 0.1), b = tensor((size_t)OC, 3, 0, 1);
    Values dy = tensor(n_y, 4, 0, 1), pre = tensor(n_x, 5, 0, 1);
    double *y = doubles(n_y), *dx = doubles(n_x), *dw = doubles(n_w), *db = doubles((size_t)OC);
    matmul_reference(y, x.d, w.d, with_bias ? b.d : NULL, rows, C, OC);
    for (size_t row = 0; row < rows; row++)
        for (int o = 0; o < OC; o++) {
            double d = dy.d[row * (size_t)OC + (size_t)o];
            db[o] += d;
            for (int c = 0; c < C; c++) {
                dx[row * (size_t)C + (size_t)c] += d * w.d[(size_t)o * (size_t)C + (size_t)c];
                dw[(size_t)o * (size_t)C + (size_t)c] += d * x.d[row * (size_t)C + (size_t)c];
            }
        }
    floatX *out = NEW(floatX, n_y), *out_pre = NEW(floatX, n_y), *out_gelu = NEW(floatX, n_y);
    matmul_forward(ops, out, x.x, w.x, with_bias ? b.x : NULL, rows, C, OC);
    check_x(out, y, n_y);
    matmul_gelu_forward(ops, out_pre, out_gelu, x.x, w.x, with_bias ? b.x : NULL, rows, C, OC);
    check_x(out_pre, y, n_y);
    for (size_t i = 0; i < n_y; i++) y[i] = gelu_reference(y[i]);
    check_x(out_gelu, y, n_y);

    floatX *dinp = NEW(floatX, n_x);
    matmul_backward_input(ops, dinp, dy.x, w.x, rows, C, OC);
    check_x(dinp, dx, n_x);
    memset(dinp, 0xff, n_x * sizeof(floatX));
    matmul_gelu_backward_input(ops, dinp, dy.x, w.x, pre.x, rows, C, OC);
    for (size_t i = 0; i < n_x; i++) dx[i] *= gelu_derivative_reference(pre.d[i]);
    check_x(dinp, dx, n_x);

    gradX *dweight = grad_buffer(dw, n_w, accumulate), *dbias = grad_buffer(db, (size_t)OC, accumulate);
    matmul_backward_weight(ops, dweight, with_bias ? dbias : NULL, x.x, dy.x, rows, C, OC, accumulate);
    check_g(dweight, dw, n_w);
    if (with_bias) check_g(dbias, db, (size_t)OC);
    drop(&x), drop(&w), drop(&b), drop(&dy), drop(&pre);
    free(y), free(dx), free(dw), free(db), free(out), free(out_pre), free(out_gelu), free(dinp), free(dweight),
        free(dbias);
    close_ops(ops);
}

static void test_matmul(void **state) {
    (void)state;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        matmul_case(8, 1, 8, 8, 1, accumulate);
        matmul_case(1, 1, 1, 1, 1, accumulate);
        matmul_case(5, 13, 5, 15, 1, accumulate);
        matmul_case(5, 13, 20, 5, 1, accumulate);
        matmul_case(33, 50, 33, 132, 0, accumulate);
        matmul_case(64, 40, 64, 1000, 0, accumulate); // a head: many strips
        matmul_case(16, 2500, 16, 48, 1, accumulate); // many blocks of rows
        matmul_case(16, 1100, 64, 16, 1, accumulate);
        matmul_case(1600, 3, 1600, 1600, 1, accumulate);
        matmul_case(160, 33, 640, 160, 1, accumulate);
    }
}

// The same where bf16 is only a storage format.
static void test_matmul_without_bf16(void **state) {
    setenv("TRAIN_GPT_CPU_BF16", "0", 1);
    Ops *ops = open_ops(1, 1, 8, 1, 2, 2, 1);
    assert_false(ops->has_bf16);
    close_ops(ops);
    test_matmul(state);
    unsetenv("TRAIN_GPT_CPU_BF16");
}

// More shapes than the table of primitives holds.
static void test_matmul_many_shapes(void **state) {
    (void)state;
    enum { C = 3, OC = 2, MOST = 300 };
    Ops *ops = open_ops(MOST, 1, C, 1, 2, 2, 1);
    Values x = tensor(MOST * C, 1, 0, 1), w = tensor(OC * C, 2, 0, 1);
    double *y = doubles(MOST * OC);
    matmul_reference(y, x.d, w.d, NULL, MOST, C, OC);
    floatX *out = NEW(floatX, MOST * OC);
    for (int round = 0; round < 2; round++)
        for (size_t rows = 1; rows <= MOST; rows++) {
            memset(out, 0xff, MOST * OC * sizeof(floatX));
            matmul_forward(ops, out, x.x, w.x, NULL, rows, C, OC);
            check_x(out, y, rows * OC);
        }
    drop(&x), drop(&w);
    free(y), free(out);
    close_ops(ops);
}

// Attention

static void attention_reference(double *out, double *lse, const double *qkv, int B, int T, int NH, int HS,
                                Dropout dropout) {
    int C = NH * HS;
    double *p = doubles((size_t)T);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++)
            for (int t = 0; t < T; t++) {
                const double *q = qkv + ((size_t)b * T + t) * 3 * C + h * HS;
                double largest = -INFINITY, sum = 0.0, *o = out + ((size_t)b * T + t) * C + h * HS;
                for (int s = 0; s <= t; s++) {
                    p[s] = dot(q, qkv + ((size_t)b * T + s) * 3 * C + C + h * HS, (size_t)HS) / sqrt(HS);
                    largest = p[s] > largest ? p[s] : largest;
                }
                for (int s = 0; s <= t; s++) sum += p[s] = exp(p[s] - largest);
                lse[(b * NH + h) * T + t] = largest + log(sum);
                for (int d = 0; d < HS; d++) o[d] = 0.0;
                for (int s = 0; s <= t; s++) {
                    double factor = mask_factor(dropout, ((uint64_t)(b * NH + h) * T + t) * T + s);
                    for (int d = 0; d < HS; d++)
                        o[d] += factor * p[s] / sum * qkv[((size_t)b * T + s) * 3 * C + 2 * C + h * HS + d];
                }
            }
    free(p);
}

static void attention_backward_reference(double *dqkv, const double *dout, const double *qkv, int B, int T, int NH,
                                         int HS, Dropout dropout) {
    int C = NH * HS;
    double *p = doubles((size_t)T), *dp = doubles((size_t)T);
    for (size_t i = 0; i < (size_t)B * T * 3 * C; i++) dqkv[i] = 0.0;
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++)
            for (int t = 0; t < T; t++) {
                size_t at_t = ((size_t)b * T + t) * 3 * C + h * HS;
                const double *d_o = dout + ((size_t)b * T + t) * C + h * HS;
                double largest = -INFINITY, sum = 0.0, total = 0.0;
                for (int s = 0; s <= t; s++) {
                    p[s] = dot(qkv + at_t, qkv + ((size_t)b * T + s) * 3 * C + C + h * HS, (size_t)HS) / sqrt(HS);
                    largest = p[s] > largest ? p[s] : largest;
                }
                for (int s = 0; s <= t; s++) sum += p[s] = exp(p[s] - largest);
                for (int s = 0; s <= t; s++) {
                    size_t at_s = ((size_t)b * T + s) * 3 * C + h * HS;
                    double factor = mask_factor(dropout, ((uint64_t)(b * NH + h) * T + t) * T + s);
                    p[s] /= sum;
                    dp[s] = factor * dot(d_o, qkv + at_s + 2 * C, (size_t)HS);
                    total += p[s] * dp[s];
                    for (int d = 0; d < HS; d++) dqkv[at_s + 2 * C + d] += factor * p[s] * d_o[d];
                }
                for (int s = 0; s <= t; s++) {
                    size_t at_s = ((size_t)b * T + s) * 3 * C + h * HS;
                    double ds = p[s] * (dp[s] - total) / sqrt(HS);
                    for (int d = 0; d < HS; d++) {
                        dqkv[at_t + d] += ds * qkv[at_s + C + d];
                        dqkv[at_s + C + d] += ds * qkv[at_t + d];
                    }
                }
            }
    free(p), free(dp);
}

static void test_attention_reference(void **state) {
    (void)state;
    enum { B = 2, T = 5, NH = 2, HS = 3, C = NH * HS };
    for (int variant = 0; variant < 2; variant++) {
        Dropout dropout = {variant ? 0.4f : 0.0f, 8, 2, NH * T * T};
        Values qkv = tensor(B * T * 3 * C, 1, 0, 1), dout = tensor(B * T * C, 2, 0, 1);
        double out[B * T * C], lse[B * NH * T], dqkv[B * T * 3 * C], numerical[B * T * 3 * C];
        attention_backward_reference(dqkv, dout.d, qkv.d, B, T, NH, HS, dropout);
        for (size_t i = 0; i < qkv.n; i++) {
            double value = qkv.d[i];
            qkv.d[i] = value + 1e-5;
            attention_reference(out, lse, qkv.d, B, T, NH, HS, dropout);
            numerical[i] = dot(out, dout.d, dout.n);
            qkv.d[i] = value - 1e-5;
            attention_reference(out, lse, qkv.d, B, T, NH, HS, dropout);
            numerical[i] = (numerical[i] - dot(out, dout.d, dout.n)) / 2e-5;
            qkv.d[i] = value;
        }
        check_at("attention", dqkv, numerical, qkv.n, 1e-8, __LINE__);
        drop(&qkv), drop(&dout);
    }
}

static void test_attention(void **state) {
    (void)state;
    // B, T, NH, HS
    int shapes[][4] = {{1, 1, 1, 1},    {2, 1, 3, 5},    {2, 13, 2, 5},   {1, 33, 1, 33}, {3, 64, 4, 32},
                       {1, 131, 2, 64}, {2, 40, 25, 64}, {1, 300, 1, 16}, {1, 257, 2, 40}};
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++)
        for (int variant = 0; variant < 2; variant++) {
            int B = shapes[k][0], T = shapes[k][1], NH = shapes[k][2], HS = shapes[k][3], C = NH * HS;
            Ops *ops = open_ops(B, T, C, NH, 2, 2, 1);
            Dropout dropout = {variant ? 0.2f : 0.0f, 8, 3, (uint64_t)(NH * T * T)};
            size_t n = (size_t)(B * T * C);
            Values qkv = tensor(3 * n, 1, 0, 1.5), dout = tensor(n, 2, 0, 1);
            double *want = doubles(n), *want_lse = doubles((size_t)(B * NH * T)), *want_d = doubles(3 * n);
            attention_reference(want, want_lse, qkv.d, B, T, NH, HS, dropout);
            attention_backward_reference(want_d, dout.d, qkv.d, B, T, NH, HS, dropout);
            floatX *out = NEW(floatX, n), *dqkv = NEW(floatX, 3 * n);
            float *lse = NEW(float, B *NH *T);
            attention_forward(ops, out, lse, qkv.x, B, T, NH, HS, dropout);
            check_x(out, want, n);
            check_f(lse, want_lse, (size_t)(B * NH * T));
            attention_backward(ops, dqkv, dout.x, qkv.x, out, lse, B, T, NH, HS, dropout);
            // D is taken from the rounded output: in bf16 a second rounding, in the difference that gives ds.
            // At T = 1, where dq and dk vanish, that difference is all there is of them: v alone tells.
            check_x_at("dqkv", dqkv, want_d, 3 * n, BF16 ? 4e-3 : 2e-6, __LINE__);
            drop(&qkv), drop(&dout);
            free(want), free(want_lse), free(want_d), free(out), free(dqkv), free(lse);
            close_ops(ops);
        }
}

// Classifier

static double classifier_reference(double *dlogits, const double *logits, int target, int V, int Vp, double scale) {
    double largest = -INFINITY, sum = 0.0;
    for (int i = 0; i < Vp; i++) dlogits[i] = 0.0;
    if (target == -1) return 0.0;
    for (int i = 0; i < V; i++) largest = logits[i] > largest ? logits[i] : largest;
    for (int i = 0; i < V; i++) sum += exp(logits[i] - largest);
    for (int i = 0; i < V; i++) dlogits[i] = (exp(logits[i] - largest) / sum - (i == target)) * scale;
    return log(sum) + largest - logits[target];
}

static void test_classifier(void **state) {
    (void)state;
    double z[6] = {0.3, -1.0, 2.0, 0.5, 0, 0}, dz[6], scrap[6];
    classifier_reference(dz, z, 2, 4, 6, 0.7);
    for (int i = 0; i < 6; i++) {
        double value = z[i];
        z[i] = value + 1e-5;
        double up = classifier_reference(scrap, z, 2, 4, 6, 0.7);
        z[i] = value - 1e-5;
        double numerical = 0.7 * (up - classifier_reference(scrap, z, 2, 4, 6, 0.7)) / 2e-5;
        z[i] = value;
        assert_true(fabs(numerical - dz[i]) < 1e-9);
    }
    int shapes[][3] = {{1, 1, 1}, {5, 65, 128}, {7, 256, 256}, {3, 50257, 50304}, {40, 1000, 1024}}; // rows, V, Vp
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++) {
        size_t rows = (size_t)shapes[k][0];
        int V = shapes[k][1], Vp = shapes[k][2];
        size_t n = rows * (size_t)Vp;
        Ops *ops = open_ops((int)rows, 1, 8, 1, V, Vp, (int)rows);
        Values logits = tensor(n, 1, 2, 3);
        for (size_t row = 0; row < rows; row++) // what a product with zero rows of wte never gives, but must not matter
            for (int i = V; i < Vp; i++) logits.x[row * (size_t)Vp + (size_t)i] = floatX_from(1000.0f);
        int *targets = NEW(int, rows);
        float *losses = NEW(float, rows);
        double *want = doubles(n), *want_losses = doubles(rows);
        for (size_t row = 0; row < rows; row++) {
            targets[row] = row % 4 == 3 ? -1 : (int)(random_u32(2, row) % (uint32_t)V);
            want_losses[row] =
                classifier_reference(want + row * (size_t)Vp, logits.d + row * (size_t)Vp, targets[row], V, Vp, 0.01);
        }
        floatX *copy = NEW(floatX, n);
        memcpy(copy, logits.x, n * sizeof(floatX));
        classifier(ops, logits.x, losses, targets, rows, V, Vp, 0.01f, 0);
        assert_memory_equal(copy, logits.x, n * sizeof(floatX));
        check_f(losses, want_losses, rows);
        memset(losses, 0xff, rows * sizeof(float));
        classifier(ops, logits.x, losses, targets, rows, V, Vp, 0.01f, 1);
        check_f(losses, want_losses, rows);
        check_x(logits.x, want, n);
        for (size_t row = 0; row < rows; row++)
            for (int i = 0; i < Vp; i++)
                if (i >= V || targets[row] == -1)
                    assert_true(floatX_to_float(logits.x[row * (size_t)Vp + (size_t)i]) == 0.0f);
        // What is not a number must be seen.
        targets[0] = 0;
        for (int i = 0; i < Vp; i++) logits.x[i] = floatX_from(i == V - 1 ? NAN : 0.0f);
        classifier(ops, logits.x, losses, targets, 1, V, Vp, 0.01f, 1);
        assert_true(isnan(losses[0]));
        drop(&logits);
        free(targets), free(losses), free(want), free(want_losses), free(copy);
        close_ops(ops);
    }
}

// Sums

static void test_sums(void **state) {
    (void)state;
    size_t sizes[] = {0, 1, 5, 4096, 4097, 100003, 5000011};
    Ops *ops = open_ops(1, 1, 8, 1, 2, 2, 1);
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        size_t n = sizes[k];
        float *f = NEW(float, n);
        gradX *g = NEW(gradX, n);
        long double exact_sum = 0.0L, exact_squares = 0.0L;
        for (size_t i = 0; i < n; i++) {
            f[i] = (float)(random_mix(i) >> 40) * 1e-6f;
            g[i] = gradX_from(f[i] - 8.0f);
            exact_sum += (long double)f[i];
            exact_squares += (long double)gradX_to_float(g[i]) * (long double)gradX_to_float(g[i]);
        }
        double sum = (double)exact_sum, squares = (double)exact_squares;
        double got = NAN;
        sum_values(ops, &got, f, n, 0);
        assert_true(fabs(got - sum) <= 1e-12 * sum);
        sum_values(ops, &got, f, n, 1);
        assert_true(fabs(got - 2.0 * sum) <= 2e-12 * sum);
        got = NAN;
        sum_of_squares(ops, &got, g, n, 0);
        assert_true(fabs(got - squares) <= 1e-12 * squares);
        sum_of_squares(ops, &got, g, n, 1);
        assert_true(fabs(got - 2.0 * squares) <= 2e-12 * squares);
        if (n > 0) {
            g[n / 2] = gradX_from(INFINITY);
            sum_of_squares(ops, &got, g, n, 0);
            assert_true(isinf(got));
        }
        free(f), free(g);
    }
    close_ops(ops);
}

// AdamW

static void test_adamw(void **state) {
    (void)state;
    Ops *ops = open_ops(1, 1, 8, 1, 2, 2, 1);
    size_t n = 5003, n_decay = 3001;
    for (int with_master = BF16; with_master < 2; with_master++) {
        AdamW hyper = {3e-3f, 0.9f, 0.95f, 1e-3f, 0.1f, 0.37f, 0, 0, 0}; // an epsilon that matters
        Values p = tensor(n, 1, 0, 1);
        float *master = with_master ? NEW(float, n) : NULL, *m = NEW(float, n), *v = NEW(float, n);
        double *want = doubles(n), *want_m = doubles(n), *want_v = doubles(n);
        gradX *g = NEW(gradX, n);
        for (size_t i = 0; i < n; i++) {
            m[i] = v[i] = 0.0f;
            if (with_master) master[i] = random_normal(2, i);
            want[i] = with_master ? (double)master[i] : p.d[i];
        }
        for (int step = 1; step <= 5; step++) {
            hyper.step = step;
            for (size_t i = 0; i < n; i++) g[i] = gradX_from(0.1f * random_normal((uint64_t)step, i));
            for (size_t i = 0; i < n; i++) {
                double grad = (double)gradX_to_float(g[i]) * (double)hyper.grad_scale;
                want_m[i] = (double)hyper.beta1 * want_m[i] + (1.0 - (double)hyper.beta1) * grad;
                want_v[i] = (double)hyper.beta2 * want_v[i] + (1.0 - (double)hyper.beta2) * grad * grad;
                if (i < n_decay) want[i] -= (double)hyper.learning_rate * (double)hyper.weight_decay * want[i];
                want[i] -= (double)hyper.learning_rate * (want_m[i] / (1.0 - pow((double)hyper.beta1, step))) /
                           (sqrt(want_v[i] / (1.0 - pow((double)hyper.beta2, step))) + (double)hyper.epsilon);
            }
            adamw_update(ops, &hyper, p.x, master, m, v, g, n, n_decay);
            check_f(m, want_m, n);
            check_f(v, want_v, n);
            check_x(p.x, want, n);
            if (with_master) check_f(master, want, n);
        }
        for (size_t i = 0; i < n && with_master; i++)
            assert_true(floatX_to_float(p.x[i]) == floatX_to_float(floatX_from(master[i])));
        drop(&p);
        free(master), free(m), free(v), free(want), free(want_m), free(want_v), free(g);
    }
    close_ops(ops);
}

#if !defined(PRECISION_FP32)
// bf16 parameters without masters: each is one of the two neighbours of the exact value, which is their mean; the draw
// depends on key and index, not on how a tensor is cut.
static void test_adamw_rounds_stochastically(void **state) {
    (void)state;
    enum { N = 100000, CUT = 33333 };
    Ops *ops = open_ops(1, 1, 8, 1, 2, 2, 1);
    floatX *p = NEW(floatX, N), *q = NEW(floatX, N);
    float *m = NEW(float, N), *v = NEW(float, N);
    gradX *g = NEW(gradX, N);
    AdamW hyper = {1e-3f, 0.9f, 0.95f, 1e-12f, 0.0f, 1.0f, 1, random_key(1, RANDOM_ROUND, 1, 5), 77};
    for (int cut = 0; cut < 2; cut++) {
        for (size_t i = 0; i < N; i++) {
            (cut ? q : p)[i] = floatX_from(1.0f);
            g[i] = gradX_from(0.5f);
            m[i] = v[i] = 0.0f;
        }
        if (cut) {
            adamw_update(ops, &hyper, q, NULL, m, v, g, CUT, 0);
            hyper.round_first += CUT;
            adamw_update(ops, &hyper, q + CUT, NULL, m + CUT, v + CUT, g + CUT, N - CUT, 0);
        } else {
            adamw_update(ops, &hyper, p, NULL, m, v, g, N, 0);
        }
    }
    assert_memory_equal(p, q, N * sizeof(floatX));
    double sum = 0;
    for (size_t i = 0; i < N; i++) {
        double x = (double)floatX_to_float(p[i]);
        assert_true(x == 1.0 || x == 1.0 - 1.0 / 256);
        sum += x;
    }
    // The first step moves by the learning rate. Five standard deviations of the mean of N draws between neighbours.
    assert_true(fabs(sum / N - (1.0 - 1e-3)) < 5.0 * sqrt(0.256 * 0.744 / N) / 256);
    free(p), free(q), free(m), free(v), free(g);
    close_ops(ops);
}
#endif

static void test_accumulate_gradient(void **state) {
    (void)state;
    Ops *ops = open_ops(1, 1, 8, 1, 2, 2, 1);
    cudaStream_t beside;
    assert_int_equal(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), cudaSuccess);
    size_t n = 5003;
    gradX *sum = NEW(gradX, n), *x = NEW(gradX, n), *want = NEW(gradX, n);
    for (size_t i = 0; i < n; i++) {
        sum[i] = gradX_from(random_normal(1, i));
        x[i] = gradX_from(random_normal(2, i));
        want[i] = gradX_from(gradX_to_float(sum[i]) + gradX_to_float(x[i]));
    }
    accumulate_gradient(ops, sum, x, n, beside);
    assert_int_equal(cudaStreamSynchronize(beside), cudaSuccess);
    assert_memory_equal(sum, want, n * sizeof(gradX));
    assert_int_equal(cudaStreamDestroy(beside), cudaSuccess);
    free(sum), free(x), free(want);
    close_ops(ops);
}

// The same bits for any number of threads, and again

enum { BITS_BYTES = 4 << 20 };

// The classifier of ranks that hold columns: with the statistics of all, each has the loss of the whole and its columns
// of the gradient. The last slice is all padding; the target is in any, or -1.
static void test_classifier_slices(void **state) {
    (void)state;
    enum { ROWS = 7, V = 300, SLICE = 128, SLICES = 4, Vp = SLICE * SLICES };
    Ops *ops = open_ops(1, ROWS, 1, 1, V, Vp, ROWS);
    Values x = tensor(ROWS * Vp, 1, 0, 3);
    int targets[ROWS] = {0, 299, -1, 128, 127, 256, 17};
    float losses[ROWS], losses_slice[ROWS], all[SLICES * ROWS * 3];
    floatX *whole = NEW(floatX, ROWS * Vp), *slice = NEW(floatX, SLICES * ROWS * SLICE);
    memcpy(whole, x.x, ROWS * Vp * sizeof(floatX));
    classifier(ops, whole, losses, targets, ROWS, V, Vp, 0.1f, 1);
    for (int pass = 0; pass < 2; pass++)
        for (int s = 0; s < SLICES; s++) {
            const int left = V - s * SLICE;
            Vocabulary mine = {s * SLICE, left < 0 ? 0 : left < SLICE ? left : SLICE};
            floatX *columns = slice + s * ROWS * SLICE;
            if (pass == 0) {
                for (int row = 0; row < ROWS; row++)
                    memcpy(columns + row * SLICE, x.x + row * Vp + s * SLICE, SLICE * sizeof(floatX));
                classifier_statistics(ops, all + s * ROWS * 3, columns, targets, ROWS, SLICE, mine);
                continue;
            }
            memset(losses_slice, 0xFF, sizeof losses_slice);
            classifier_sliced(ops, columns, losses_slice, targets, all, SLICES, ROWS, SLICE, mine, 0.1f, 1);
            double error = 0, norm = 1e-30;
            for (int row = 0; row < ROWS; row++) {
                assert_true(fabsf(losses_slice[row] - losses[row]) <= 1e-6f * (1.0f + fabsf(losses[row])));
                for (int i = 0; i < SLICE; i++) {
                    double got = floatX_to_float(columns[row * SLICE + i]);
                    double want = floatX_to_float(whole[row * Vp + s * SLICE + i]);
                    error += (got - want) * (got - want);
                    norm += want * want;
                    if (i >= mine.count || targets[row] == -1) assert_true(got == 0.0);
                }
            }
            // One rounding to bf16 of factors that differ in the last bit of fp32.
            assert_true(sqrt(error / norm) < (BF16 ? 1e-3 : 1e-6));
        }
    drop(&x);
    free(whole), free(slice);
    close_ops(ops);
}

// A rank that holds some of the heads draws their part of the mask.
static void test_attention_slices_draw_the_same_mask(void **state) {
    (void)state;
    enum { B = 2, T = 19, NH = 4, HS = 8, C = NH * HS, HALF = C / 2 };
    Ops *ops = open_ops(B, T, C, NH, 2, 2, 1);
    Dropout dropout = {0.3f, 8, 77, NH * T * T};
    Values qkv = tensor(B * T * 3 * C, 1, 0, 1);
    floatX *whole = NEW(floatX, B * T * C), *half = NEW(floatX, B * T * HALF), *part = NEW(floatX, B * T * 3 * HALF);
    float lse[B * NH * T];
    attention_forward(ops, whole, lse, qkv.x, B, T, NH, HS, dropout);
    for (int rank = 0; rank < 2; rank++) {
        for (size_t i = 0; i < B * T * 3; i++)
            memcpy(part + i * HALF, qkv.x + i * C + rank * HALF, HALF * sizeof(floatX));
        Dropout mine = dropout;
        mine.first += (uint64_t)(rank * NH / 2 * T * T);
        attention_forward(ops, half, lse, part, B, T, NH / 2, HS, mine);
        for (size_t i = 0; i < B * T; i++)
            assert_memory_equal(half + i * HALF, whole + i * C + rank * HALF, HALF * sizeof(floatX));
    }
    drop(&qkv);
    free(whole), free(half), free(part);
    close_ops(ops);
}

// Runs every operation that is not a product of oneDNN and returns the bytes of all results.
static size_t run_all(int threads, char *bits) {
    omp_set_num_threads(threads);
    enum { B = 3, T = 75, NH = 3, HS = 20, C = NH * HS, V = 190, Vp = 256, ROWS = B * T };
    Ops *ops = open_ops(B, T, C, NH, V, Vp, ROWS);
    Dropout dropout = {0.1f, 3, 1, NH * T * T};
    size_t n = ROWS * C;
    Values x = tensor(n, 1, 0, 1), y = tensor(n, 2, 0, 1), w = tensor(C, 3, 1, 0.1), b = tensor(C, 4, 0, 1);
    Values qkv = tensor(3 * n, 5, 0, 1), wte = tensor(Vp * C, 6, 0, 1), logits = tensor(ROWS * Vp, 7, 0, 1);
    int tokens[ROWS];
    for (size_t i = 0; i < ROWS; i++) tokens[i] = (int)(random_u32(8, i) % 20);
    char *at = bits;
    memset(bits, 0, BITS_BYTES);
#define TAKE(type, name, count)                            \
    type *name = (type *)at;                               \
    at += ((size_t)(count) * sizeof(type) + 63) / 64 * 64; \
    assert_true(at <= bits + BITS_BYTES)
    TAKE(floatX, out, n);
    TAKE(floatX, residual, n);
    TAKE(float, mean, ROWS);
    TAKE(float, rstd, ROWS);
    TAKE(gradX, dw, C);
    TAKE(gradX, db, C);
    TAKE(floatX, embedded, n);
    TAKE(gradX, dwte, Vp * C);
    TAKE(gradX, dwpe, T * C);
    TAKE(floatX, attended, n);
    TAKE(float, lse, ROWS *NH);
    TAKE(floatX, dqkv, 3 * n);
    TAKE(floatX, dlogits, ROWS * Vp);
    TAKE(float, losses, ROWS);
    TAKE(floatX, dx, n);
    TAKE(gradX, sums, C);
    TAKE(double, scalars, 2);
    TAKE(float, master, n);
    TAKE(float, m, n);
    TAKE(float, v, n);
    TAKE(gradX, g, n);
    residual_layernorm_forward(ops, residual, out, mean, rstd, x.x, y.x, w.x, b.x, ROWS, C, dropout);
    layernorm_backward(ops, dx, 1, dw, db, y.x, residual, w.x, mean, rstd, ROWS, C, 0);
    embedding_forward(ops, embedded, tokens, wte.x, wte.x, B, T, C, whole_vocabulary(Vp), dropout);
    wte_backward(ops, dwte, x.x, tokens, B, T, C, whole_vocabulary(Vp));
    wpe_backward(ops, dwpe, x.x, B, T, C, T, 0);
    attention_forward(ops, attended, lse, qkv.x, B, T, NH, HS, dropout);
    attention_backward(ops, dqkv, x.x, qkv.x, attended, lse, B, T, NH, HS, dropout);
    memcpy(dlogits, logits.x, logits.n * sizeof(floatX));
    classifier(ops, dlogits, losses, tokens, ROWS, V, Vp, 0.1f, 1);
    column_sums(ops, sums, x.x, ROWS, C, 0);
    for (size_t i = 0; i < n; i++) g[i] = gradX_from((float)x.d[i]);
    sum_of_squares(ops, scalars, g, n, 0);
    sum_values(ops, scalars + 1, losses, ROWS, 0);
    AdamW hyper = {1e-3f, 0.9f, 0.99f, 1e-8f, 0.1f, 1.0f, 1, 0, 0};
    adamw_update(ops, &hyper, x.x, master, m, v, g, n, n / 2);
    drop(&x), drop(&y), drop(&w), drop(&b), drop(&qkv), drop(&wte), drop(&logits);
    close_ops(ops);
    return (size_t)(at - bits);
}

static void test_bits_do_not_depend_on_threads(void **state) {
    (void)state;
    int threads = omp_get_max_threads(), counts[] = {1, 2, 3, 8, 2};
    char *first = NEW(char, BITS_BYTES), *other = NEW(char, BITS_BYTES);
    size_t bytes = run_all(1, first);
    for (int k = 0; k < 5; k++) {
        assert_int_equal(run_all(counts[k], other), bytes);
        assert_memory_equal(first, other, bytes);
    }
    omp_set_num_threads(threads);
    free(first), free(other);
}

// Products of oneDNN repeat for the same number of threads.
static void test_matmul_repeats(void **state) {
    (void)state;
    enum { ROWS = 200, C = 96, OC = 288 };
    Values x = tensor(ROWS * C, 1, 0, 1), w = tensor(OC * C, 2, 0, 1), b = tensor(OC, 3, 0, 1);
    Values dy = tensor(ROWS * OC, 4, 0, 1);
    size_t sizes[5] = {ROWS * OC * sizeof(floatX), ROWS * OC * sizeof(floatX), ROWS * C * sizeof(floatX),
                       OC * C * sizeof(gradX), OC * sizeof(gradX)};
    void *results[2][5];
    for (int run = 0; run < 2; run++) {
        Ops *ops = open_ops(ROWS, 1, C, 1, 2, 2, 1);
        for (int i = 0; i < 5; i++) results[run][i] = poisoned(sizes[i]);
        void **r = results[run];
        matmul_gelu_forward(ops, (floatX *)r[0], (floatX *)r[1], x.x, w.x, b.x, ROWS, C, OC);
        matmul_backward_input(ops, (floatX *)r[2], dy.x, w.x, ROWS, C, OC);
        matmul_backward_weight(ops, (gradX *)r[3], (gradX *)r[4], x.x, dy.x, ROWS, C, OC, 0);
        close_ops(ops);
    }
    for (int i = 0; i < 5; i++) {
        assert_memory_equal(results[0][i], results[1][i], sizes[i]);
        free(results[0][i]), free(results[1][i]);
    }
    drop(&x), drop(&w), drop(&b), drop(&dy);
}

// A planning Memory counts what a real one allocates; all is given back.
static void test_workspace_is_planned(void **state) {
    (void)state;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        if (!bf16) setenv("TRAIN_GPT_CPU_BF16", "0", 1);
        OpsShape shape = {4, 100, 96, 3, 1000, 1024, 400};
        Memory plan = {0}, real = {0};
        plan.planning = true;
        Ops planned, ops;
        ops_init(&planned, &plan, &shape, NULL, NULL);
        ops_init(&ops, &real, &shape, NULL, NULL);
        assert_true(plan.bytes[MEMORY_WORKSPACE] > 0);
        assert_int_equal(plan.bytes[MEMORY_WORKSPACE], real.bytes[MEMORY_WORKSPACE]);
        assert_int_equal(plan.total, plan.bytes[MEMORY_WORKSPACE]);
        ops_free(&planned);
        ops_free(&ops);
        assert_int_equal(plan.total, 0);
        assert_int_equal(real.total, 0);
        unsetenv("TRAIN_GPT_CPU_BF16");
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_gelu),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_embedding_slices),
        cmocka_unit_test(test_classifier_slices),
        cmocka_unit_test(test_attention_slices_draw_the_same_mask),
        cmocka_unit_test(test_layernorm_reference),
        cmocka_unit_test(test_layernorm),
        cmocka_unit_test(test_residual_and_dropout),
        cmocka_unit_test(test_dropout_statistics_and_splits),
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_matmul_without_bf16),
        cmocka_unit_test(test_matmul_many_shapes),
        cmocka_unit_test(test_attention_reference),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_classifier),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_adamw),
#if !defined(PRECISION_FP32)
        cmocka_unit_test(test_adamw_rounds_stochastically),
#endif
        cmocka_unit_test(test_accumulate_gradient),
        cmocka_unit_test(test_bits_do_not_depend_on_threads),
        cmocka_unit_test(test_matmul_repeats),
        cmocka_unit_test(test_workspace_is_planned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
