// golden.h: reads a golden file of dev/reference.py, which explains what is in it and why it is so small.
//
// The reference values of one model: the loss, the norm and random projections of every tensor's gradient, and losses
// and norms of some AdamW steps, computed in float64. Weights and batches are not stored: golden_weights() and
// golden_batch() compute them from a hash, as dev/reference.py does, and golden_checksums_agree() tells whether both
// sides mean the same numbers. Tensors are known by the ids of layout.h: wte 0, wpe 1, block l 2 + 12 l + k, final
// layer norm 2 + 12 L + k; matrices are (outputs, inputs), and nothing is padded.
#ifndef GOLDEN_H
#define GOLDEN_H

#include <cjson/cJSON.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "error.h"
#include "random.h"

enum { GOLDEN_PROJECTIONS = 64 };

typedef struct {
    char name[64];
    size_t size;                            // elements
    double norm;                            // of the first step's gradient, before clipping
    double projections[GOLDEN_PROJECTIONS]; // its inner products with vectors of signs
} GoldenTensor;

typedef struct {
    double loss;          // mean over the tokens of the step's batch, before the step's update
    double gradient_norm; // over all tensors, before clipping
} GoldenStep;

typedef struct {
    int V, C, NH, L, B, T, context_length;
    uint64_t seed;
    int weight_exponent;
    uint64_t weights_checksum, tokens_checksum;
    float learning_rate, beta1, beta2, epsilon, weight_decay; // decay on matrices only
    float grad_clip;                                          // gradients are scaled by clip / norm when norm > clip
    int n_steps, n_tensors;
    GoldenStep *steps;
    GoldenTensor *tensors; // by id
} Golden;

// Hash streams; to each is added a tensor's id or a step's number.
typedef enum {
    GOLDEN_WEIGHTS,
    GOLDEN_SIGNS,
    GOLDEN_TOKENS,
    GOLDEN_CHECK_WEIGHTS,
    GOLDEN_CHECK_TOKENS,
} GoldenStream;

static inline uint64_t golden_key(const Golden *golden, GoldenStream stream, int number) {
    return random_mix(random_mix(golden->seed) + ((uint64_t)stream << 32) + (uint64_t)number);
}

// Word `index` of a stream.
static inline uint64_t golden_word(uint64_t key, size_t index) {
    return random_mix(key + (uint64_t)index);
}

static inline double golden_number(const cJSON *object, const char *key, const char *path, Error *error) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (cJSON_IsNumber(item)) return item->valuedouble;
    error_set(error, "%s: no number \"%s\"", path, key);
    return 0;
}

static inline uint64_t golden_hexadecimal(const cJSON *object, const char *key, const char *path, Error *error) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (cJSON_IsString(item)) return strtoull(item->valuestring, NULL, 16);
    error_set(error, "%s: no digits \"%s\"", path, key);
    return 0;
}

static inline void golden_parse_tensor(GoldenTensor *tensor, const cJSON *json, const char *path, Error *error) {
    const cJSON *name = cJSON_GetObjectItemCaseSensitive(json, "name");
    snprintf(tensor->name, sizeof tensor->name, "%s", cJSON_IsString(name) ? name->valuestring : "?");
    tensor->norm = golden_number(json, "norm", path, error);
    tensor->size = 1;
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(json, "shape")) tensor->size *= (size_t)item->valuedouble;
    int n = 0;
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(json, "projections")) {
        if (n < GOLDEN_PROJECTIONS) tensor->projections[n] = item->valuedouble;
        n++;
    }
    if (n != GOLDEN_PROJECTIONS) error_set(error, "%s: %d projections of %s", path, n, tensor->name);
}

static inline void golden_parse(Golden *golden, const cJSON *json, const char *path, Error *error) {
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(json, "shape");
    golden->V = (int)golden_number(shape, "vocab_size", path, error);
    golden->C = (int)golden_number(shape, "n_embd", path, error);
    golden->NH = (int)golden_number(shape, "n_head", path, error);
    golden->L = (int)golden_number(shape, "n_layer", path, error);
    golden->B = (int)golden_number(shape, "micro_batch", path, error);
    golden->T = (int)golden_number(shape, "sequence_length", path, error);
    golden->context_length = (int)golden_number(shape, "context_length", path, error);
    golden->seed = (uint64_t)golden_number(json, "seed", path, error);
    golden->weight_exponent = (int)golden_number(json, "weight_exponent", path, error);
    golden->weights_checksum = golden_hexadecimal(json, "weights_checksum", path, error);
    golden->tokens_checksum = golden_hexadecimal(json, "tokens_checksum", path, error);
    const cJSON *optimizer = cJSON_GetObjectItemCaseSensitive(json, "optimizer");
    golden->learning_rate = (float)golden_number(optimizer, "learning_rate", path, error);
    golden->beta1 = (float)golden_number(optimizer, "beta1", path, error);
    golden->beta2 = (float)golden_number(optimizer, "beta2", path, error);
    golden->epsilon = (float)golden_number(optimizer, "epsilon", path, error);
    golden->weight_decay = (float)golden_number(optimizer, "weight_decay", path, error);
    golden->grad_clip = (float)golden_number(optimizer, "grad_clip", path, error);

    const cJSON *steps = cJSON_GetObjectItemCaseSensitive(json, "steps");
    const cJSON *tensors = cJSON_GetObjectItemCaseSensitive(json, "tensors");
    const int n_steps = cJSON_GetArraySize(steps), n_tensors = cJSON_GetArraySize(tensors);
    if (n_steps < 1 || n_tensors != 4 + 12 * golden->L) {
        error_set(error, "%s: %d steps and %d tensors for %d layers", path, n_steps, n_tensors, golden->L);
        return;
    }
    golden->steps = (GoldenStep *)calloc((size_t)n_steps, sizeof(GoldenStep));
    golden->tensors = (GoldenTensor *)calloc((size_t)n_tensors, sizeof(GoldenTensor));
    if (golden->steps == NULL || golden->tensors == NULL) {
        error_set(error, "%s: no room for its tensors", path);
        return;
    }
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, steps) {
        GoldenStep *step = &golden->steps[golden->n_steps++];
        step->loss = golden_number(item, "loss", path, error);
        step->gradient_norm = golden_number(item, "gradient_norm", path, error);
    }
    cJSON_ArrayForEach(item, tensors) {
        golden_parse_tensor(&golden->tensors[golden->n_tensors++], item, path, error);
    }
}

static inline void golden_free(Golden *golden) {
    free(golden->steps);
    free(golden->tensors);
    memset(golden, 0, sizeof *golden);
}

// Reads the golden file at `path`. On false, `error` says what is wrong and there is nothing to free.
static inline bool golden_read(Golden *golden, const char *path, Error *error) {
    memset(golden, 0, sizeof *golden);
    FILE *file = fopen(path, "rb");
    if (file == NULL) return error_set(error, "%s: cannot be opened", path);
    enum { LIMIT = 1 << 24 }; // bytes: far beyond any golden file
    char *text = (char *)malloc(LIMIT);
    const size_t length = text != NULL ? fread(text, 1, LIMIT, file) : 0;
    fclose(file);
    cJSON *json = length > 0 && length < LIMIT ? cJSON_ParseWithLength(text, length) : NULL;
    free(text);
    if (json == NULL) return error_set(error, "%s: not JSON", path);
    golden_parse(golden, json, path, error);
    cJSON_Delete(json);
    if (error->text[0] == '\0') return true;
    golden_free(golden);
    return false;
}

// Whether a tensor is a matrix (weight decay applies), the weight of a layer norm, or a bias.
typedef enum { GOLDEN_MATRIX, GOLDEN_NORM, GOLDEN_BIAS } GoldenKind;

static inline GoldenKind golden_kind(const Golden *golden, int id) {
    if (id < 2) return GOLDEN_MATRIX;
    const int in_unit = (id - 2) % 12;
    if (id >= 2 + 12 * golden->L) return in_unit == 0 ? GOLDEN_NORM : GOLDEN_BIAS;
    if (in_unit < 4) return GOLDEN_MATRIX;
    return in_unit == 6 || in_unit == 9 ? GOLDEN_NORM : GOLDEN_BIAS;
}

// A tensor's initial values, all of them: exact in float and in bf16.   out (size)
static inline void golden_weights(const Golden *golden, int id, float *out) {
    const uint64_t key = golden_key(golden, GOLDEN_WEIGHTS, id);
    const GoldenKind kind = golden_kind(golden, id);
    const float scale = ldexpf(1.0f, kind == GOLDEN_NORM ? -7 : kind == GOLDEN_BIAS ? -10 : golden->weight_exponent);
    for (size_t i = 0; i < golden->tensors[id].size; i++) {
        const int top = (int)(golden_word(key, i) >> 57); // 0 ... 127
        out[i] = (float)(kind == GOLDEN_NORM ? 96 + top / 2 : 2 * top - 127) * scale;
    }
}

// The batch of a step, counted from 0: windows of T + 1 tokens, targets one ahead.   tokens, targets (B, T)
static inline void golden_batch(const Golden *golden, int step, int *tokens, int *targets) {
    const uint64_t key = golden_key(golden, GOLDEN_TOKENS, step), V = (uint64_t)golden->V;
    for (int b = 0; b < golden->B; b++) {
        for (int t = 0; t <= golden->T; t++) {
            const uint64_t word = golden_word(key, (size_t)b * ((size_t)golden->T + 1) + (size_t)t);
            const uint64_t low = (word & 0xffffffffu) % V, high = (word >> 32) % V;
            const int token = (int)(low < high ? low : high);
            if (t < golden->T) tokens[b * golden->T + t] = token;
            if (t > 0) targets[b * golden->T + t - 1] = token;
        }
    }
}

static inline uint64_t golden_checksum(const Golden *golden, GoldenStream stream, int number, const uint32_t *values,
                                       size_t n) {
    const uint64_t key = golden_key(golden, stream, number);
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += random_mix(golden_word(key, i) + values[i]);
    return sum;
}

// Whether weights and batches computed here are the ones that the reference used. False also when memory is short.
static inline bool golden_checksums_agree(const Golden *golden) {
    uint64_t weights_sum = 0, tokens_sum = 0;
    for (int id = 0; id < golden->n_tensors; id++) {
        const size_t size = golden->tensors[id].size;
        float *weights = (float *)malloc(size * sizeof(float));
        uint32_t *bits = (uint32_t *)malloc(size * sizeof(uint32_t));
        if (weights != NULL && bits != NULL) {
            golden_weights(golden, id, weights);
            memcpy(bits, weights, size * sizeof(uint32_t));
            weights_sum += golden_checksum(golden, GOLDEN_CHECK_WEIGHTS, id, bits, size);
        }
        free(weights);
        free(bits);
    }
    const size_t rows = (size_t)golden->B * (size_t)golden->T;
    int *batch = (int *)malloc(2 * rows * sizeof(int));
    for (int step = 0; step < golden->n_steps && batch != NULL; step++) {
        golden_batch(golden, step, batch, batch + rows);
        tokens_sum +=
            golden_checksum(golden, GOLDEN_CHECK_TOKENS, step, (const uint32_t *)(const void *)batch, 2 * rows);
    }
    free(batch);
    return weights_sum == golden->weights_checksum && tokens_sum == golden->tokens_checksum;
}

// Inner products of x with the tensor's vectors of signs: bit j of element i's word tells whether projection j adds or
// subtracts x[i]. Summed by the value of each byte of the words first: 8 sums per element instead of 64.   x (size)
static inline void golden_project(const Golden *golden, int id, const float *x, double out[GOLDEN_PROJECTIONS]) {
    double by_byte[8][256];
    memset(by_byte, 0, sizeof by_byte);
    const uint64_t key = golden_key(golden, GOLDEN_SIGNS, id);
    for (size_t i = 0; i < golden->tensors[id].size; i++) {
        const uint64_t word = golden_word(key, i);
        for (int byte = 0; byte < 8; byte++) by_byte[byte][(word >> (8 * byte)) & 255] += (double)x[i];
    }
    for (int j = 0; j < GOLDEN_PROJECTIONS; j++) {
        out[j] = 0;
        for (int value = 0; value < 256; value++)
            out[j] += (value >> (j % 8)) & 1 ? by_byte[j / 8][value] : -by_byte[j / 8][value];
    }
}

// The estimated norm of (gradient - the reference's gradient), within some 10 % (dev/reference.py argues it). NaN where
// the gradient holds one.   gradient (size)
static inline double golden_gradient_error(const Golden *golden, int id, const float *gradient) {
    double projections[GOLDEN_PROJECTIONS], squares = 0;
    golden_project(golden, id, gradient, projections);
    for (int j = 0; j < GOLDEN_PROJECTIONS; j++) {
        const double difference = projections[j] - golden->tensors[id].projections[j];
        squares += difference * difference;
    }
    return sqrt(squares / GOLDEN_PROJECTIONS);
}

#endif
