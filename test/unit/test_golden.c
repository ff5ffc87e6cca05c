// test_golden.c: the model against PyTorch: loss, every gradient, and some AdamW steps, from the golden files that
// dev/reference.py makes. Compiled once per precision.
//
//   test_golden_PRECISION                all files of test/golden, or of the folder that GOLDEN_DIR names
//   test_golden_PRECISION FILE...        these files; `dev/reference.py --case` makes one for any shape
//
// The reference is computed in float64 from weights that are exact in bf16, so every difference is the program's own.
// Bounds in fp32: loss 1e-6 relative, gradient of every tensor 1e-5 of its norm, losses of the steps 1e-5. In bf16:
// loss 1e-3, or 3e-3 where a single token leaves nothing to average over; gradients 2e-2, which holds when values are
// rounded to bf16 between operations only: operations that compute in double and round there are off by 1.3e-2 at most.
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <glob.h>

#include "pipeline_parallel.h"
#include "golden.h"

typedef struct {
    double loss, loss_one_token; // relative
    double gradient;             // of a tensor, and of the global norm, relative
    double step_loss, step_norm; // relative, after AdamW steps
} Bounds;

// fp32: gradients enter the steps with an error near 1e-6. bf16: early AdamW steps are nearly lr * sign(gradient), so
// bf16's errors in small elements become whole updates, and the paths part: operations in double, rounded in between,
// are off by up to 5e-3 in losses and 2e-2 in norms. The bounds are twice that. The optimizer's formula is held by
// fp32's bounds; these hold that bf16 runs keep masters in fp32 and round them right.
#ifdef PRECISION_FP32
static const Bounds bounds = {1e-6, 1e-6, 1e-5, 1e-5, 1e-5};
#else
static const Bounds bounds = {1e-3, 3e-3, 2e-2, 1e-2, 5e-2};
#endif

// A model on one rank. Its device memory lives as long as the program, as in a run.
typedef struct {
    Memory memory;
    Comm comm;
    Ops ops;
    Layout layout;
    Zero zero;
    TensorParallel tensor;
    GPT model;
    Pipeline pipeline;
} Run;

static void run_open(Run *run, const Golden *golden) {
    memset(run, 0, sizeof *run);
    const ModelShape shape = {golden->L, golden->NH, golden->C, golden->context_length, golden->V};
    const LayoutCut cut = layout_whole(1);
    cudaStream_t compute, communication;
    cuda_check(cudaStreamCreate(&compute));
    cuda_check(cudaStreamCreateWithFlags(&communication, cudaStreamNonBlocking));
    layout_init(&run->layout, &shape, &cut);
    const CommOptions ranks = {{1, 1, 1}, 1, false, 60, true};
    comm_init(&run->comm, &run->memory, 0, &ranks, compute, communication);
    tensor_parallel_init(&run->tensor, &run->layout, &run->comm, false);
    const int rows = golden->B * golden->T;
    const OpsShape largest = {golden->B, golden->T, golden->C, golden->NH, golden->V, run->layout.padded_vocab, rows};
    ops_init(&run->ops, &run->memory, &largest, NULL, compute);
    const ZeroOptions sharding = {1, true, true, true, false, true};
    zero_init(&run->zero, &run->memory, &run->layout, strategy_find("ddp"), &sharding, &run->comm, &run->ops, compute,
              1);
    const GPTOptions options = {golden->B, golden->T, 1, 0, false, 1};
    const int alive = 1;
    gpt_init(&run->model, &run->memory, &run->layout, &run->ops, &run->zero, &run->tensor, &alive, &options);
    PipelineItem *items = (PipelineItem *)table_alloc(2, sizeof(PipelineItem));
    pipeline_schedule(1, 1, 0, 1, items);
    pipeline_init(&run->pipeline, &run->comm, &run->model, items, 2, 1);
    // Whatever is read before it is written must show: all ones are NaN in every floating-point type.
    cuda_check(cudaMemset(run->model.arena, 0xFF, run->model.arena_bytes));
}

static void run_close(Run *run) {
    pipeline_free(&run->pipeline);
    gpt_free(&run->model);
    zero_free(&run->zero);
    ops_free(&run->ops);
    comm_free(&run->comm);
    layout_free(&run->layout);
}

// The layout's tensor of this id, and where it begins in the flat buffers.
static const Tensor *find_tensor(const Layout *layout, int id, size_t *offset) {
    *offset = 0;
    for (int u = 0; u < layout->n_units; u++) {
        const Unit *unit = &layout->units[u];
        for (int t = 0; t < unit->n_tensors; t++) {
            *offset = unit->offset + unit->tensors[t].offset;
            if (unit->tensors[t].id == id) return &unit->tensors[t];
        }
    }
    fail_msg("the layout has no tensor %d", id);
    return NULL;
}

// Hashed weights into parameters and masters; NaN into the tensors' gradients, which the first backward must
// overwrite. Padding keeps its zeros. On one rank without slices a tensor is contiguous, its padding rows at the end.
static void fill(Run *run, const Golden *golden) {
    Zero *zero = &run->zero;
    for (int id = 0; id < golden->n_tensors; id++) {
        size_t offset;
        const Tensor *tensor = find_tensor(&run->layout, id, &offset);
        const size_t size = golden->tensors[id].size;
        const char *short_name = strchr(golden->tensors[id].name, '.');
        assert_string_equal(tensor->name, short_name != NULL ? short_name + 1 : golden->tensors[id].name);
        assert_true(size == tensor->outer * tensor->sliced_full * tensor->inner && size <= tensor->size);
        float *values = malloc(size * sizeof *values);
        floatX *params = malloc(size * sizeof *params);
        assert_true(values != NULL && params != NULL);
        golden_weights(golden, id, values);
        for (size_t i = 0; i < size; i++) params[i] = floatX_from(values[i]);
        cuda_check(cudaMemcpy(zero->params + offset, params, size * sizeof *params, cudaMemcpyHostToDevice));
        if (zero->master != NULL)
            cuda_check(cudaMemcpy(zero->master + offset, values, size * sizeof *values, cudaMemcpyHostToDevice));
        cuda_check(cudaMemset(zero->grads + offset, 0xFF, tensor->size * sizeof(gradX)));
        free(values);
        free(params);
    }
}

static float gradient_value(const gradX *x) {
#ifdef PRECISION_BF16
    return __bfloat162float(*x);
#else
    return *x;
#endif
}

// Prints a value that is out of bounds; returns 1 for it. NaN is out of bounds.
static int exceeds(const char *what, double error, double bound) {
    if (error <= bound) return 0;
    print_error("%s: %.2e is above %.2e\n", what, error, bound);
    return 1;
}

// Every tensor's gradient. A tensor whose gradient is below a thousandth of the whole gradient's norm is held to the
// absolute error that would be allowed there: such a gradient is a small difference of large terms, or in theory zero,
// and carries their rounding errors; in clipping and in the norm it counts for nothing. (The keys' bias has gradient
// zero, because a softmax does not see it, but is a part of qkv_bias, which has not.)
static int check_gradients(Run *run, const Golden *golden) {
    int failures = 0;
    double worst = 0;
    for (int id = 0; id < golden->n_tensors; id++) {
        const GoldenTensor *expected = &golden->tensors[id];
        size_t offset;
        const Tensor *tensor = find_tensor(&run->layout, id, &offset);
        gradX *grads = malloc(tensor->size * sizeof *grads);
        float *values = malloc(expected->size * sizeof *values);
        assert_true(grads != NULL && values != NULL);
        cuda_check(cudaMemcpy(grads, run->zero.grads + offset, tensor->size * sizeof *grads, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < expected->size; i++) values[i] = gradient_value(&grads[i]);
        int padding = 0;
        for (size_t i = expected->size; i < tensor->size; i++) padding += gradient_value(&grads[i]) != 0;
        failures += exceeds("non-zero gradients of padding rows", padding, 0);
        const double floor = 1e-3 * golden->steps[0].gradient_norm;
        const double norm = expected->norm > floor ? expected->norm : floor;
        const double error = golden_gradient_error(golden, id, values) / norm;
        if (!(error <= worst)) worst = error;
        failures += exceeds(expected->name, error, bounds.gradient);
        free(grads);
        free(values);
    }
    print_message("  worst gradient of a tensor: %.1e\n", worst);
    return failures;
}

static double relative(double value, double expected) {
    return fabs(value - expected) / fabs(expected);
}

static void test_file(void **state) {
    const char *path = *state;
    Golden golden;
    Error error = {""};
    if (!golden_read(&golden, path, &error)) fail_msg("%s", error.text);
    if (!golden_checksums_agree(&golden)) fail_msg("%s: other weights or batches than dev/reference.py had", path);
    Run run;
    run_open(&run, &golden);
    fill(&run, &golden);

    const int rows = golden.B * golden.T;
    int *tokens = malloc((size_t)rows * sizeof(int)), *targets = malloc((size_t)rows * sizeof(int));
    assert_true(tokens != NULL && targets != NULL);
    const double loss_bound = rows == 1 ? bounds.loss_one_token : bounds.loss;
    double worst_loss = 0, worst_norm = 0;
    int failures = 0;
    for (int step = 0; step < golden.n_steps; step++) {
        const GoldenStep *expected = &golden.steps[step];
        golden_batch(&golden, step, tokens, targets);
        MicroBatch batch = {.B = golden.B,
                            .T = golden.T,
                            .inputs = tokens,
                            .targets = targets,
                            .train = true,
                            .last_micro = true,
                            .only_row = -1,
                            .loss_scale = 1.0f / (float)rows,
                            .step = step + 1};
        AdamW hyper = {.learning_rate = golden.learning_rate,
                       .beta1 = golden.beta1,
                       .beta2 = golden.beta2,
                       .epsilon = golden.epsilon,
                       .weight_decay = golden.weight_decay,
                       .step = step + 1};
        pipeline_begin_step(&run.pipeline);
        for (int i = 0; i < run.pipeline.n_items; i++) pipeline_run(&run.pipeline, i, &batch);
        const double loss_sum = gpt_loss(&run.model);
        if (step == 0) failures += check_gradients(&run, &golden);
        const StepResult result = zero_step(&run.zero, &hyper, (double)golden.grad_clip, run.model.loss_sum, false);
        const double loss_error = relative(loss_sum / rows, expected->loss);
        const double norm_error = relative(result.grad_norm, expected->gradient_norm);
        if (step == 0) {
            print_message("  loss %.6f, off by %.1e; norm %.4f, off by %.1e\n", loss_sum / rows, loss_error,
                          result.grad_norm, norm_error);
            failures += exceeds("loss", loss_error, loss_bound);
            failures += exceeds("gradient norm", norm_error, bounds.gradient);
        }
        if (!(loss_error <= worst_loss)) worst_loss = loss_error;
        if (!(norm_error <= worst_norm)) worst_norm = norm_error;
        failures += exceeds("a step's loss", loss_error, bounds.step_loss);
        failures += exceeds("a step's gradient norm", norm_error, bounds.step_norm);
    }
    print_message("  worst of %d AdamW steps: loss %.1e, norm %.1e\n", golden.n_steps, worst_loss, worst_norm);
    free(tokens);
    free(targets);
    run_close(&run);
    golden_free(&golden);
    assert_int_equal(failures, 0);
}

// The estimate that the gradients are judged by: exact for one element's error, within 36 % (four standard deviations)
// for an error spread over a tensor.
static void test_estimate(void **state) {
    (void)state;
    enum { SIZE = 5000 };
    GoldenTensor tensor;
    memset(&tensor, 0, sizeof tensor);
    tensor.size = SIZE;
    Golden golden;
    memset(&golden, 0, sizeof golden);
    golden.seed = 7;
    golden.tensors = &tensor;
    static float reference[SIZE], x[SIZE];
    double squares = 0;
    for (int i = 0; i < SIZE; i++) reference[i] = random_normal(1, (uint64_t)i);
    golden_project(&golden, 0, reference, tensor.projections);
    assert_true(golden_gradient_error(&golden, 0, reference) == 0);
    memcpy(x, reference, sizeof x);
    x[4321] += 0.25f;
    assert_true(fabs(golden_gradient_error(&golden, 0, x) - (double)(x[4321] - reference[4321])) < 1e-12);
    for (int i = 0; i < SIZE; i++) {
        x[i] = reference[i] + 1e-5f * random_normal(2, (uint64_t)i);
        squares += (double)(x[i] - reference[i]) * (double)(x[i] - reference[i]);
    }
    assert_true(fabs(golden_gradient_error(&golden, 0, x) / sqrt(squares) - 1) < 0.36);
    x[3] = NAN;
    assert_true(isnan(golden_gradient_error(&golden, 0, x)));
}

int main(int argc, char **argv) {
    glob_t found = {0};
    char **files = argv + 1;
    size_t n = (size_t)(argc - 1);
    if (argc == 1) {
        char pattern[4096];
        const char *folder = getenv("GOLDEN_DIR");
        snprintf(pattern, sizeof pattern, "%s/*.json", folder != NULL ? folder : TEST_DIR "/golden");
        if (glob(pattern, 0, NULL, &found) != 0) {
            fprintf(stderr, "no golden files: %s\n", pattern);
            return 1;
        }
        files = found.gl_pathv;
        n = found.gl_pathc;
    }
    struct CMUnitTest *tests = calloc(n + 1, sizeof *tests);
    if (tests == NULL) return 1;
    tests[0] = (struct CMUnitTest)cmocka_unit_test(test_estimate);
    for (size_t i = 0; i < n; i++) {
        const char *slash = strrchr(files[i], '/');
        tests[i + 1].name = slash != NULL ? slash + 1 : files[i];
        tests[i + 1].test_func = test_file;
        tests[i + 1].initial_state = files[i];
    }
    const int failed = _cmocka_run_group_tests("golden", tests, n + 1, NULL, NULL);
    free(tests);
    globfree(&found);
    return failed;
}
