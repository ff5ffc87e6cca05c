// evaluate.h: what a model has learnt: its loss on validation data, its accuracy on HellaSwag, a sample of text.
//
// All ranks call these together and take part in every forward pass, of batches no larger than those of training: what
// evaluation takes is within the memory that is planned. Data-parallel ranks share the work; results are the same on
// all ranks, whatever their number (but for rounding). Now and then the ranks ask one another whether any was asked to
// stop: then an evaluation is given up.
#ifndef EVALUATE_H
#define EVALUATE_H

#include "config.h"
#include "dataloader.h"
#include "hellaswag.h"
#include "launch.h"
#include "plan.h"
#include "tokenizer.h"

// Whether any rank was asked to stop, agreed among all; asked now and then during what takes long.
static inline bool stop_agreed(Trainer *trainer) {
    const char mine = stop_requested() != 0;
    const char *all = (const char *)comm_gather(&trainer->comm, &mine, 1);
    bool stop = false;
    for (int r = 0; r < trainer->comm.world_size; r++) stop = stop || all[r];
    return stop;
}

enum { STOP_EVERY = 16 }; // forward passes between questions whether to stop

// A batch of the size of training's micro-batches, to be filled with inputs and targets.
static inline MicroBatch evaluation_batch(const Config *config) {
    MicroBatch batch;
    memset(&batch, 0, sizeof batch);
    batch.B = (int)config->micro_batch;
    batch.T = (int)config->sequence_length;
    batch.only_row = -1;
    return batch;
}

// The mean loss over the validation data. *stopped: given up, because a stop was asked for.
static inline double evaluate_loss(Trainer *trainer, const Config *config, Validation *validation, bool *stopped) {
    double sum = 0;
    for (int64_t k = 0; k < validation->batches; k++) {
        if (k % STOP_EVERY == STOP_EVERY - 1 && (*stopped = stop_agreed(trainer))) return 0;
        MicroBatch batch = evaluation_batch(config);
        Error error = {""};
        if (!validation_read(validation, k, &batch.inputs, &batch.targets, &error)) die("%s", error.text);
        pipeline_forward(&trainer->pipeline, &batch);
        sum += gpt_loss(&trainer->model);
    }
    const double *all = (const double *)comm_gather(&trainer->comm, &sum, sizeof sum);
    double total = 0;
    for (int r = 0; r < trainer->comm.world_size; r++) total += all[r];
    return total / (double)validation->tokens;
}

// The rows of HellaSwag that a data-parallel rank computes: of examples rank, rank + D, ... four each, one after the
// other, in batches that hold several examples or a part of one.
typedef struct {
    Hellaswag *examples;
    int rank, ranks;       // data-parallel
    int loaded;            // the example whose rows stand here, -1: none
    int *inputs, *targets; // (4, T)
    int label;
} HellaswagRows;

// Which of the four row `row` of this rank is, its example's rows being loaded; -1: it has none, others have.
static inline int hellaswag_row(HellaswagRows *rows, int64_t row) {
    const int64_t example = row / HELLASWAG_CHOICES * rows->ranks + rows->rank;
    Error error = {""};
    if (example >= rows->examples->count) return -1;
    if (example != rows->loaded &&
        !hellaswag_read(rows->examples, (int)example, rows->inputs, rows->targets, &rows->label, &error))
        die("%s", error.text);
    rows->loaded = (int)example;
    return (int)(row % HELLASWAG_CHOICES);
}

// How many of the examples are answered right. *stopped: given up, because a stop was asked for.
static inline int64_t evaluate_hellaswag(Trainer *trainer, const Config *config, Hellaswag *examples, bool *stopped) {
    const int B = (int)config->micro_batch, T = (int)config->sequence_length, D = trainer->comm.data.size;
    const size_t row_tokens = (size_t)T, tokens = (size_t)B * row_tokens,
                 example_tokens = HELLASWAG_CHOICES * row_tokens;
    HellaswagRows rows = {examples, trainer->comm.data.rank, D, -1, NULL, NULL, 0};
    int *ints = (int *)table_alloc(2 * (tokens + example_tokens), sizeof(int));
    float *losses = (float *)table_alloc(tokens + example_tokens, sizeof(float));
    int *inputs = ints, *targets = inputs + tokens;
    float *example_losses = losses + tokens;
    rows.inputs = targets + tokens;
    rows.targets = rows.inputs + example_tokens;
    const int64_t count = (int64_t)HELLASWAG_CHOICES * ((examples->count + D - 1) / D); // rows, of the rank with most
    int64_t correct = 0;
    int passes = 0;
    for (int64_t first = 0; first < count && !*stopped; first += B) {
        if (passes++ % STOP_EVERY == STOP_EVERY - 1 && (*stopped = stop_agreed(trainer))) break;
        MicroBatch batch = evaluation_batch(config);
        batch.inputs = inputs;
        batch.targets = targets;
        for (int b = 0; b < B; b++) {
            int *row_inputs = inputs + (size_t)b * row_tokens, *row_targets = targets + (size_t)b * row_tokens;
            const int choice = first + b < count ? hellaswag_row(&rows, first + b) : -1;
            for (size_t t = 0; t < row_tokens; t++) {
                const size_t at = (size_t)(choice < 0 ? 0 : choice) * row_tokens + t;
                row_inputs[t] = choice < 0 ? 0 : rows.inputs[at];
                row_targets[t] = choice < 0 ? -1 : rows.targets[at];
            }
        }
        pipeline_forward(&trainer->pipeline, &batch);
        if (!gpt_losses(&trainer->model, tokens, losses)) continue; // another rank's are counted
        for (int b = 0; b < B && first + b < count; b++) {
            const int choice = hellaswag_row(&rows, first + b);
            if (choice < 0) break;
            memcpy(example_losses + (size_t)choice * row_tokens, losses + (size_t)b * row_tokens,
                   row_tokens * sizeof(float));
            if (choice == HELLASWAG_CHOICES - 1)
                correct += hellaswag_answer(example_losses, rows.targets, T) == rows.label;
        }
    }
    free(ints);
    free(losses);
    if (*stopped) return 0;
    const int64_t *all = (const int64_t *)comm_gather(&trainer->comm, &correct, sizeof correct);
    correct = 0;
    for (int r = 0; r < trainer->comm.world_size; r++) correct += all[r];
    return correct;
}

// Prints a sample of text. Every rank draws the same tokens; rank 0 prints.
// *stopped: it ended early, because a stop was asked for.
static inline void evaluate_sample(Trainer *trainer, const Config *config, const Tokenizer *tokenizer, int64_t step,
                                   bool *stopped) {
    const int T = (int)config->sequence_length, V = (int)config->vocab_size;
    const int grain = 64 * (int)config->tensor_parallel; // lengths are rounded up so that few shapes occur
    const uint64_t key = random_key((uint64_t)config->seed, RANDOM_SAMPLE, (uint64_t)step, 0);
    int *text = (int *)calloc((size_t)(config->sample_tokens + T), sizeof(int)), count = 0;
    int *targets = (int *)malloc((size_t)T * sizeof(int));
    float *logits = (float *)malloc((size_t)V * sizeof(float));
    if (text == NULL || targets == NULL || logits == NULL) die("no room for a sample");
    for (int t = 0; t < T; t++) targets[t] = -1;
    Error error = {""};
    if (!tokenizer_encode_prompt(tokenizer, config->sample_prompt, text, T, &count, &error)) die("%s", error.text);
    for (int64_t i = 0; i < config->sample_tokens && !*stopped; i++) {
        if (i % STOP_EVERY == STOP_EVERY - 1) *stopped = stop_agreed(trainer);
        // The last T tokens are the context; after them stands padding, which a causal model does not see.
        const int length = count < T ? count : T, first = count - length;
        const int rounded = (int)round_up((size_t)length, (size_t)grain);
        MicroBatch batch;
        memset(&batch, 0, sizeof batch);
        batch.B = 1;
        batch.T = rounded < T ? rounded : T;
        batch.inputs = text + first;
        batch.targets = targets;
        batch.only_row = length - 1;
        pipeline_forward(&trainer->pipeline, &batch);
        gpt_logits(&trainer->model, logits);
        text[count++] =
            sample_token(logits, V, config->sample_temperature, (int)config->sample_top_k, key, (uint64_t)i);
    }
    if (trainer->comm.rank == 0) {
        printf("--- sample after %lld steps ---\n", (long long)step);
        tokenizer_print(tokenizer, text, count, stdout);
        printf("\n---\n");
        fflush(stdout);
    }
    free(text);
    free(targets);
    free(logits);
}

#endif
