// plan.h: what a run is made of, and what it will take before anything is allocated.
//
// trainer_build() puts a run together from its configuration: layout, communicators, ops, sharded state, model. Given a
// planning Memory, the same code only counts: so the plan of a run is the run itself, walked without computing, and
// cannot drift from it. A run whose bytes differ from its plan's is a bug.
#ifndef PLAN_H
#define PLAN_H

#include <cjson/cJSON.h>
#include <errno.h>
#include "begin.h"
#include "checkpoint.h"
#include "comm.h"
#include "config.h"
#include "gpt.h"
#include "layout.h"
#include "memory.h"
#include "ops.h"
#include "pipeline_parallel.h"
#include "tensor_parallel.h"
#include "zero.h"

// ---------------------------------------------------------------------------------------------------------------------
// Numbers as JSON

// A JSON number that reads back as the same float (%.9g); JSON has no infinities and no NaN: null.
static inline const char *json_float(double x, char *text, size_t size) {
    if (isfinite(x))
        snprintf(text, size, "%.9g", x);
    else
        snprintf(text, size, "null");
    return text;
}

static inline void json_add_exact(cJSON *object, const char *key, double x) {
    char text[32];
    cJSON_AddRawToObject(object, key, json_float(x, text, sizeof text));
}

// Integers are written as they are: through a double they would lose digits above 2^53.
static inline void json_add_integer(cJSON *object, const char *key, uint64_t n) {
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)n);
    cJSON_AddRawToObject(object, key, text);
}

static inline void json_add_memory(cJSON *parent, const char *key, const Memory *memory) {
    cJSON *object = cJSON_AddObjectToObject(parent, key);
    for (int tag = 0; tag < MEMORY_TAGS; tag++) json_add_integer(object, memory_tag_name(tag), memory->bytes[tag]);
    json_add_integer(object, "peak", memory->peak);
}

static inline cJSON *json_add_counts(cJSON *parent, const char *key, const CommCounts *counts) {
    cJSON *object = cJSON_AddObjectToObject(parent, key);
    for (int kind = 0; kind < COMM_KINDS; kind++) {
        cJSON *one = cJSON_AddObjectToObject(object, comm_kind_name(kind));
        json_add_integer(one, "calls", counts->kind[kind].calls);
        json_add_integer(one, "payload_bytes", counts->kind[kind].payload_bytes);
        json_add_integer(one, "bus_bytes", counts->kind[kind].bus_bytes);
    }
    return object;
}

// ---------------------------------------------------------------------------------------------------------------------
// A run and its plan

typedef struct {
    Memory memory;
    Layout layout;
    Comm comm;
    Ops ops;
    Zero zero;
    TensorParallel tensor;
    GPT model;
    Pipeline pipeline;
} Trainer;

// Every rank chooses among algorithms by timing, which warms all of them up alike; rank 0's choices count.
static inline void trainer_tune(Trainer *trainer, const Config *config) {
    if (!config->matmul_tune) return;
    ops_tune(&trainer->ops);
    if (trainer->comm.planning) return;
    OpsChoices *choices = (OpsChoices *)table_alloc(1, sizeof(OpsChoices));
    ops_choices_get(&trainer->ops, choices);
    comm_broadcast(&trainer->comm, 0, choices, sizeof *choices);
    ops_choices_set(&trainer->ops, choices);
    free(choices);
}

// Builds one rank's part of a run, or counts what it takes. The trainer must not be moved afterwards.
static inline void trainer_build(Trainer *trainer, const Config *config, int rank, bool planning, cudaStream_t compute,
                                 cudaStream_t communication) {
    memset(trainer, 0, sizeof *trainer);
    trainer->memory.planning = planning;
    const ModelShape shape = config_shape(config);
    const int B = (int)config->micro_batch, T = (int)config->sequence_length, chunks = (int)config->classifier_chunks;
    const int P = (int)config->pipeline_parallel, V = (int)config->pipeline_chunks, M = (int)config->micro_batches;
    const Strategy *strategy = strategy_find(config->strategy);
    if (strategy == NULL) die("no strategy is called %s", config->strategy);

    const CommOptions ranks = {{(int)config->tensor_parallel, (int)config->data_parallel, P},
                               (int)config->shard_ranks,
                               V > 1,
                               config->timeout,
                               config->deterministic};
    comm_init(&trainer->comm, &trainer->memory, rank, &ranks, compute, communication);
    const LayoutCut cut = {trainer->comm.data.size,    trainer->comm.tensor.size, trainer->comm.tensor.rank, P, V,
                           trainer->comm.pipeline_rank};
    layout_init(&trainer->layout, &shape, &cut);
    tensor_parallel_init(&trainer->tensor, &trainer->layout, &trainer->comm, config->sequence_parallel);
    const OpsShape largest = {
        B, T, shape.n_embd, shape.n_head, shape.vocab_size, trainer->tensor.vocab_rows, gpt_logit_rows(B, T, chunks)};
    const OpsOptions choices = {config->tf32, config->matmul_tune};
    ops_init(&trainer->ops, &trainer->memory, &largest, &choices, compute);
    trainer_tune(trainer, config);
    const ZeroOptions sharding = {(int)config->prefetch,  config->reshard_after_forward, config->overlap,
                                  config->master_weights, trainer->tensor.sequence,      !config->eval_only};
    zero_init(&trainer->zero, &trainer->memory, &trainer->layout, strategy, &sharding, &trainer->comm, &trainer->ops,
              compute, (uint64_t)config->seed);

    const int n_items = 2 * V * M;
    PipelineItem *items = (PipelineItem *)table_alloc((size_t)n_items, sizeof(PipelineItem));
    int *alive = (int *)table_alloc((size_t)V, sizeof(int));
    pipeline_schedule(P, V, trainer->comm.pipeline_rank, M, items);
    pipeline_alive(items, n_items, V, alive);
    for (int c = 0; c < V && config->eval_only; c++) alive[c] = 1;
    // Without a backward, blocks keep nothing for it.
    const bool recompute = config->eval_only || strcmp(config->recompute, "full") == 0;
    const GPTOptions options = {B, T, chunks, (float)config->dropout, recompute, (uint64_t)config->seed};
    gpt_init(&trainer->model, &trainer->memory, &trainer->layout, &trainer->ops, &trainer->zero, &trainer->tensor,
             alive, &options);
    free(alive);
    pipeline_init(&trainer->pipeline, &trainer->comm, &trainer->model, items, n_items, M);
    comm_register(&trainer->comm, &trainer->memory);
}

static inline void trainer_free(Trainer *trainer) {
    pipeline_free(&trainer->pipeline);
    gpt_free(&trainer->model);
    zero_free(&trainer->zero);
    ops_free(&trainer->ops);
    comm_free(&trainer->comm);
    memory_close(&trainer->memory);
    layout_free(&trainer->layout);
}

typedef struct {
    Memory memory;            // bytes by tag, and the peak
    CommCounts communication; // of one training step of this rank
    size_t padded_parameters; // of this rank
    size_t snapshot_bytes;    // host memory that checkpoints take
} Plan;

// The plan of one rank: builds the run without allocating and walks the uses of one step, if there are any, without
// computing.
static inline Plan plan_rank(const Config *config, int rank) {
    Trainer trainer;
    Plan plan;
    trainer_build(&trainer, config, rank, true, NULL, NULL);
    if (!config->eval_only) {
        pipeline_plan_step(&trainer.pipeline, (int)config->micro_batch, (int)config->sequence_length);
        zero_step(&trainer.zero, NULL, 0, NULL, false);
    }
    plan.memory = trainer.memory;
    plan.communication = trainer.comm.counts;
    plan.padded_parameters = trainer.layout.size;
    plan.snapshot_bytes = checkpoint_snapshot_bytes(config, &trainer.zero);
    trainer_free(&trainer);
    return plan;
}

// The plan of the rank with the highest peak: stages differ, their ranks do not; but for the snapshot's bytes, which
// are those of the rank that takes most: what tensor ranks hold in common is saved by the first.
static inline Plan plan_fullest(const Config *config) {
    Plan fullest = plan_rank(config, 0);
    size_t snapshot_bytes = fullest.snapshot_bytes;
    for (int p = 1; p < config->pipeline_parallel; p++) {
        const Plan plan = plan_rank(config, p * (int)(config->tensor_parallel * config->data_parallel));
        if (plan.memory.peak > fullest.memory.peak) fullest = plan;
        if (plan.snapshot_bytes > snapshot_bytes) snapshot_bytes = plan.snapshot_bytes;
    }
    fullest.snapshot_bytes = snapshot_bytes;
    return fullest;
}

// ---------------------------------------------------------------------------------------------------------------------
// The plan at the prompt

// Bytes of model state per parameter and rank by the arithmetic of the ZeRO paper, for any number of parameters:
// parameters and gradients in their types, optimizer state in fp32, each in full or 1/n of it.
static inline double plan_state_bytes(const Strategy *strategy, bool master_weights, double parameters, int n) {
    const bool masters = sizeof(floatX) < sizeof(float) && master_weights;
    const double optimizer = masters ? 12 : 8;
    return parameters *
           ((double)sizeof(floatX) / (strategy->shard_params ? n : 1) +
            (double)sizeof(gradX) / (strategy->shard_grads ? n : 1) + optimizer / (strategy->shard_optimizer ? n : 1));
}

static inline size_t plan_state(const Memory *memory) {
    return memory->bytes[MEMORY_PARAMETERS] + memory->bytes[MEMORY_GRADIENTS] + memory->bytes[MEMORY_OPTIMIZER];
}

// What filling and emptying the pipeline adds to the time of a step, as a share of it without: (P - 1) / (V M).
static inline double plan_bubble(const Config *config) {
    return (double)(config->pipeline_parallel - 1) / ((double)config->pipeline_chunks * (double)config->micro_batches);
}

// What Korthikanti et al. (2022, equations 1, 2 and 4) give for the activations of a layer and micro-batch, bytes in
// 16-bit: s b h (34 + 5 a s / h) for all; with T tensor ranks s b h (10 + 24 / T + 5 a s / (h T)), and with sequence
// parallelism all of it over T. The term with a s stands for attention's scores, which are not stored here, and goes.
static inline double plan_activations_published(const Config *config, bool scores) {
    const double s = (double)config->sequence_length, b = (double)config->micro_batch, h = (double)config->n_embd;
    const double T = (double)config->tensor_parallel, a = (double)config->n_head;
    const double quadratic = scores ? 5 * a * s / h / T : 0;
    return s * b * h * ((config->sequence_parallel ? 10 / T : 10) + 24 / T + quadratic);
}

static inline void plan_print_header(const Config *config, size_t parameters, size_t padded, int world_size) {
    printf("plan for %d ranks, %s, gradients in %s%s\n", world_size, config->precision, config->gradient_dtype,
           sizeof(floatX) < sizeof(float) && !config->master_weights ? ", no master weights" : "");
    printf("model: %lld layers, %lld heads, %lld wide, context %lld, vocabulary %lld: %zu parameters, %zu padded%s\n",
           (long long)config->n_layer, (long long)config->n_head, (long long)config->n_embd,
           (long long)config->context_length, (long long)config->vocab_size, parameters, padded,
           config->tensor_parallel * config->pipeline_parallel > 1 ? " on a rank" : "");
    if (config->tensor_parallel * config->pipeline_parallel > 1)
        printf("grid: %lld tensor%s x %lld data x %lld pipeline ranks\n", (long long)config->tensor_parallel,
               config->sequence_parallel ? " (sequence)" : "", (long long)config->data_parallel,
               (long long)config->pipeline_parallel);
    if (config->pipeline_parallel > 1)
        printf(
            "pipeline: %lld chunks of layers a stage; filling and emptying it adds (P - 1)/(V M) = %.1f %% to a step\n",
            (long long)config->pipeline_chunks, 100 * plan_bubble(config));
    printf("batch: %lld tokens a step, %lld micro-batches of %lld x %lld tokens a rank; recompute %s\n",
           (long long)config->tokens_per_step, (long long)config->micro_batches, (long long)config->micro_batch,
           (long long)config->sequence_length, config->recompute);
    printf(
        "activations of a layer and micro-batch by Korthikanti et al. (2022): %.3f MB with attention's scores, %.3f MB "
        "without\n\n",
        plan_activations_published(config, true) / 1e6, plan_activations_published(config, false) / 1e6);
}

// The model state of plan_parameters parameters: arithmetic only.
static inline void plan_parameters_only(const Config *config, int world_size, cJSON *json) {
    printf("model state of %.4g parameters on %d ranks, %s\n\n  %-8s %14s %22s\n", config->plan_parameters, world_size,
           config->precision, "strategy", "GB a rank", "bytes a parameter");
    for (int i = 0; i < STRATEGIES; i++) {
        const Strategy *strategy = strategy_number(i);
        const double bytes = plan_state_bytes(strategy, config->master_weights, config->plan_parameters, world_size);
        printf("  %-8s %14.4g %22.4f   %s\n", strategy->name, bytes / 1e9, bytes / config->plan_parameters,
               bytes <= config->device_memory * 1e9 ? "fits" : "does not fit");
        cJSON *one = cJSON_AddObjectToObject(json, strategy->name);
        cJSON_AddNumberToObject(one, "model_state_bytes", bytes);
        cJSON_AddBoolToObject(one, "fits", bytes <= config->device_memory * 1e9);
    }
}

// What every strategy takes of the busiest rank, and what it sends in a step.
static inline void plan_strategies(const Config *config, int world_size, cJSON *json) {
    enum { MB = 1000000 };
    Plan plans[STRATEGIES];
    for (int i = 0; i < STRATEGIES; i++) {
        Config one = *config;
        snprintf(one.strategy, sizeof one.strategy, "%s", strategy_number(i)->name);
        if (!strategy_number(i)->shard_params) one.shard_ranks = one.data_parallel; // only zero3 shards in groups
        plans[i] = plan_fullest(&one);
    }
    const ModelShape shape = config_shape(config);
    const size_t parameters = model_parameters(&shape), padded = plans[0].padded_parameters;
    plan_print_header(config, parameters, padded, world_size);
    json_add_integer(json, "parameters", parameters);
    json_add_integer(json, "padded_parameters", padded);
    json_add_integer(json, "tensor_parallel", (uint64_t)config->tensor_parallel);
    json_add_integer(json, "data_parallel", (uint64_t)config->data_parallel);
    json_add_integer(json, "pipeline_parallel", (uint64_t)config->pipeline_parallel);
    json_add_exact(json, "pipeline_bubble", plan_bubble(config));
    printf("  %-26s", "MB a rank (1e6 bytes)");
    for (int i = 0; i < STRATEGIES; i++) printf(" %14s", strategy_number(i)->name);
    for (int tag = 0; tag < MEMORY_TAGS; tag++) {
        printf("\n  %-26s", memory_tag_name(tag));
        for (int i = 0; i < STRATEGIES; i++) printf(" %14.3f", (double)plans[i].memory.bytes[tag] / MB);
    }
    printf("\n  %-26s", "peak");
    for (int i = 0; i < STRATEGIES; i++) printf(" %14.3f", (double)plans[i].memory.peak / MB);
    printf("\n  %-26s", "model state");
    for (int i = 0; i < STRATEGIES; i++) printf(" %14.3f", (double)plan_state(&plans[i].memory) / MB);
    printf("\n  %-26s", "bytes a padded parameter");
    for (int i = 0; i < STRATEGIES; i++)
        printf(" %14.4f", (double)plan_state(&plans[i].memory) / (double)plans[i].padded_parameters);
    printf("\n  fits in %-18.4g", config->device_memory);
    for (int i = 0; i < STRATEGIES; i++)
        printf(" %14s", (double)plans[i].memory.peak <= config->device_memory * 1e9 ? "yes" : "no");
    if (config->checkpoint_every > 0) {
        printf("\n  %-26s", config->checkpoint_async ? "host: checkpoint snapshot" : "host: checkpoint copy");
        for (int i = 0; i < STRATEGIES; i++) printf(" %14.3f", (double)plans[i].snapshot_bytes / MB);
    }
    printf("\n\n  %-26s", "sent by a rank in a step");
    for (int kind = 0; kind < COMM_SCALARS; kind++) {
        bool any = false;
        for (int i = 0; i < STRATEGIES; i++) any = any || plans[i].communication.kind[kind].calls > 0;
        if (!any) continue;
        printf("\n  %-26s", comm_kind_name(kind));
        for (int i = 0; i < STRATEGIES; i++)
            printf(" %8llu calls", (unsigned long long)plans[i].communication.kind[kind].calls);
        printf("\n  %-26s", "  payload MB");
        for (int i = 0; i < STRATEGIES; i++)
            printf(" %14.3f", (double)plans[i].communication.kind[kind].payload_bytes / MB);
        printf("\n  %-26s", "  sent MB");
        for (int i = 0; i < STRATEGIES; i++)
            printf(" %14.3f", (double)plans[i].communication.kind[kind].bus_bytes / MB);
    }
    printf("\n");
    for (int i = 0; i < STRATEGIES; i++) {
        cJSON *one = cJSON_AddObjectToObject(json, strategy_number(i)->name);
        json_add_memory(one, "memory_bytes", &plans[i].memory);
        json_add_integer(one, "model_state_bytes", plan_state(&plans[i].memory));
        json_add_integer(one, "snapshot_bytes", plans[i].snapshot_bytes);
        json_add_counts(one, "communication_per_step", &plans[i].communication);
        cJSON_AddBoolToObject(one, "fits", (double)plans[i].memory.peak <= config->device_memory * 1e9);
    }
}

// --plan: prints the plan, writes it to plan_json if that is given; allocates nothing on a device. Returns an exit
// code.
static inline int plan_run(const Config *config, int world_size) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "device", OPS_DEVICE);
    json_add_integer(json, "world_size", (uint64_t)world_size);
    cJSON_AddStringToObject(json, "precision", config->precision);
    if (config->plan_parameters > 0)
        plan_parameters_only(config, world_size, json);
    else
        plan_strategies(config, world_size, json);
    int code = 0;
    if (config->plan_json[0] != '\0') {
        char *text = cJSON_Print(json);
        FILE *file = text == NULL ? NULL : fopen(config->plan_json, "w");
        const bool written = file != NULL && fprintf(file, "%s\n", text) > 0;
        if ((file != NULL && fclose(file) != 0) || !written) {
            fprintf(stderr, "train_gpt: error: plan_json: cannot write %s: %s\n", config->plan_json, strerror(errno));
            code = EXIT_INPUT;
        }
        cJSON_free(text);
    }
    cJSON_Delete(json);
    return code;
}

#endif
