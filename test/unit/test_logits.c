// Weights of other programs through the program's own trainer: logits, and steps of training, against PyTorch's.
//
//   test_logits                        the models in test/golden/hf, against expected.json beside them
//   test_logits WEIGHTS TOKEN...       prints the logits behind each token, a line of numbers for each, in fp32
//
// Bounds: what fp32 leaves of float64. Logits there are up to 4 in size and sums of 8 products; losses and norms carry
// the errors of up to 4 AdamW steps.
#define PRECISION_FP32
#include "begin.h"
#include "plan.h"
#include "resume.h"
#include "scratch.h"

#define GOLDEN TEST_DIR "/golden/hf/"

static void open_model(Trainer *trainer, const char *path, int B, int T) {
    static Config config;
    Error error = {""};
    char b[16], t[16];
    snprintf(b, sizeof b, "%d", B);
    snprintf(t, sizeof t, "%d", T);
    const char *words[] = {"train_gpt", "--init-from",  path,   "--micro-batch", b,      "--sequence-length",
                           t,           "--train-data", "none", "--precision",   "fp32", NULL};
    if (!config_read(&config, 11, (char **)words, &error) || !begin_take_shape(&config, &error) ||
        !config_check(&config, 1, 1, &error))
        fail_msg("%s", error.text);
    cudaStream_t compute, communication;
    cuda_check(cudaStreamCreate(&compute));
    cuda_check(cudaStreamCreateWithFlags(&communication, cudaStreamNonBlocking));
    trainer_build(trainer, &config, 0, false, compute, communication);
    // Whatever is read before it is written must show.
    cuda_check(cudaMemset(trainer->model.arena, 0xFF, trainer->model.arena_bytes));
    Weights weights;
    if (!begin_open(&weights, path, &trainer->layout.shape, &trainer->comm, &error) ||
        !zero_load_weights(&trainer->zero, &weights, &error))
        fail_msg("%s", error.text);
    weights_close(&weights);
}

// The logits behind every token of one sequence.   tokens (T), out (T, V)
static void read_logits(Trainer *trainer, const int *tokens, int T, float *out) {
    int *targets = calloc((size_t)T, sizeof(int));
    for (int t = 0; t < T; t++) {
        MicroBatch batch = {.B = 1, .T = T, .inputs = tokens, .targets = targets, .only_row = t};
        pipeline_forward(&trainer->pipeline, &batch);
        gpt_logits(&trainer->model, out + (size_t)t * (size_t)trainer->layout.shape.vocab_size);
    }
    free(targets);
}

static cJSON *expected(void) {
    size_t size;
    char *text = read_whole(GOLDEN "expected.json", &size);
    cJSON *root = cJSON_Parse(text);
    assert_non_null(root);
    free(text);
    return root;
}

static double number(const cJSON *root, const char *list, int i) {
    const cJSON *item = cJSON_GetArrayItem(cJSON_GetObjectItem(root, list), i);
    assert_true(cJSON_IsNumber(item));
    return item->valuedouble;
}

// A step's inputs and targets, (B, T) each.
static void read_batch(const cJSON *root, int step, int B, int T, int *inputs, int *targets) {
    for (int b = 0; b < B; b++) {
        const cJSON *row = cJSON_GetArrayItem(cJSON_GetArrayItem(cJSON_GetObjectItem(root, "batches"), step), b);
        for (int t = 0; t <= T; t++) {
            const int token = cJSON_GetArrayItem(row, t)->valueint;
            if (t < T) inputs[b * T + t] = token;
            if (t > 0) targets[b * T + t - 1] = token;
        }
    }
}

static void test_model(void **state) {
    enum { B = 3, T = 8, V = 13, STEPS = 4 };
    const char *path = *state;
    cJSON *root = expected();
    Trainer trainer;
    open_model(&trainer, path, B, T);
    int inputs[B * T], targets[B * T];
    float logits[T * V];
    double worst = 0;
    read_batch(root, 0, B, T, inputs, targets);
    for (int b = 0; b < B; b++) {
        memset(logits, 0xFF, sizeof logits); // NaNs
        read_logits(&trainer, inputs + b * T, T, logits);
        for (int i = 0; i < T * V; i++) {
            const double error = fabs((double)logits[i] - number(root, "logits", b * T * V + i));
            if (!(error <= 1e-5)) fail_msg("logit %d of row %d is off by %g", i, b, error);
            if (error > worst) worst = error;
        }
    }
    print_message("  %s: worst logit off by %.1e\n", path, worst);
    double worst_loss = 0, worst_norm = 0;
    for (int step = 0; step < STEPS; step++) {
        read_batch(root, step, B, T, inputs, targets);
        MicroBatch batch = {.B = B,
                            .T = T,
                            .inputs = inputs,
                            .targets = targets,
                            .only_row = -1,
                            .loss_scale = 1.0f / (B * T),
                            .step = step};
        AdamW hyper = {.learning_rate = 1e-3f, .beta1 = 0.9f, .beta2 = 0.99f, .epsilon = 1e-8f, .weight_decay = 0.1f};
        pipeline_begin_step(&trainer.pipeline);
        for (int i = 0; i < trainer.pipeline.n_items; i++) pipeline_run(&trainer.pipeline, i, &batch);
        const StepResult result = zero_step(&trainer.zero, &hyper, 1.0, gpt_loss_sum(&trainer.model), false);
        const double loss = result.loss_sum / (B * T), want = number(root, "losses", step);
        const double norm = number(root, "norms", step);
        const double loss_error = fabs(loss - want) / want, norm_error = fabs(result.grad_norm - norm) / norm;
        if (!(loss_error <= 1e-5) || !(norm_error <= 1e-5))
            fail_msg("step %d: loss %.9g, not %.9g; norm %.9g, not %.9g", step, loss, want, result.grad_norm, norm);
        if (loss_error > worst_loss) worst_loss = loss_error;
        if (norm_error > worst_norm) worst_norm = norm_error;
    }
    print_message("  %d steps: worst loss off by %.1e, norm by %.1e\n", (int)STEPS, worst_loss, worst_norm);
    cJSON_Delete(root);
    trainer_free(&trainer);
}

static int print_logits(int argc, char **argv) {
    const int T = argc - 2;
    int *tokens = calloc((size_t)T, sizeof(int));
    for (int t = 0; t < T; t++) tokens[t] = atoi(argv[2 + t]);
    Trainer trainer;
    open_model(&trainer, argv[1], 1, T);
    const int V = trainer.layout.shape.vocab_size;
    for (int t = 0; t < T; t++)
        if (tokens[t] < 0 || tokens[t] >= V) die("token %d is not one of %d", tokens[t], V);
    float *logits = calloc((size_t)T * (size_t)V, sizeof(float));
    read_logits(&trainer, tokens, T, logits);
    for (int i = 0; i < T * V; i++) printf("%.9g%c", (double)logits[i], i % V == V - 1 ? '\n' : ' ');
    free(logits);
    free(tokens);
    trainer_free(&trainer);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2) return print_logits(argc, argv);
    struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(test_model, GOLDEN "fp32"),
        cmocka_unit_test_prestate(test_model, GOLDEN "sharded"),
        cmocka_unit_test_prestate(test_model, GOLDEN "buffers"),
        cmocka_unit_test_prestate(test_model, GOLDEN "fp32.bin"),
    };
    return cmocka_run_group_tests_name("logits", tests, NULL, NULL);
}
