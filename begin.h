// begin.h: the shape of the model that a run begins with.
//
// Keys of the shape that nobody has given (no file, preset or flag) take the shape of the checkpoint that the run goes
// on from, or of the weights of init_from. That comes before everything else that is checked or follows from the
// configuration, on the launcher and on every rank alike. The weights themselves are loaded later: resume.h.
#ifndef BEGIN_H
#define BEGIN_H

#include "config.h"
#include "manifest.h"
#include "weights.h"

static inline ModelShape config_shape(const Config *config) {
    const ModelShape shape = {(int)config->n_layer, (int)config->n_head, (int)config->n_embd,
                              (int)config->context_length, (int)config->vocab_size};
    return shape;
}

static inline void config_take_shape(Config *config, const ModelShape *shape) {
    const int ids[] = {CONFIG_n_layer, CONFIG_n_head, CONFIG_n_embd, CONFIG_context_length, CONFIG_vocab_size};
    int64_t *fields[] = {&config->n_layer, &config->n_head, &config->n_embd, &config->context_length,
                         &config->vocab_size};
    const int values[] = {shape->n_layer, shape->n_head, shape->n_embd, shape->context_length, shape->vocab_size};
    for (int i = 0; i < 5; i++)
        if (config->sources[ids[i]] == FROM_DEFAULT) *fields[i] = values[i];
}

// The shape of a checkpoint that is named. Its files come first: without them a manifest may say anything.
static inline bool begin_named_shape(const char *directory, ModelShape *shape, Error *error) {
    Manifest manifest;
    if (!manifest_read(&manifest, directory, error)) return false;
    const bool ok = manifest_check_files(&manifest, directory, error);
    *shape = manifest.shape;
    manifest_free(&manifest);
    return ok;
}

// The shape of the newest checkpoint of log_dir whose manifest can be read. *count: of all that there are.
static inline bool begin_newest_shape(const Config *config, int *count, ModelShape *shape) {
    uint64_t *steps = list_steps(config->log_dir, count);
    bool found = false;
    for (int i = 0; i < *count && !found; i++) {
        char name[STEP_NAME];
        Error damage = {""};
        step_name(steps[i], "", name);
        char *path = path_join(config->log_dir, "/", name);
        found = manifest_read_shape(path, shape, &damage);
        free(path);
    }
    free(steps);
    return found;
}

// Takes the shape of what the run begins with. It is an error if that cannot be read, but for the checkpoints that auto
// looks for: resume_find() says what is wrong with them. Weights of another shape than what is given are an error too.
static inline bool begin_take_shape(Config *config, Error *error) {
    ModelShape shape;
    int count = 0;
    const bool newest = strcmp(config->resume, "auto") == 0, never = strcmp(config->resume, "never") == 0;
    if (!newest && !never && !begin_named_shape(config->resume, &shape, error)) return false;
    const bool found = newest ? begin_newest_shape(config, &count, &shape) : !never;
    if (found) config_take_shape(config, &shape);
    if (found || count > 0 || config->init_from[0] == '\0') return true;
    Weights weights;
    if (!weights_open(&weights, config->init_from, error)) return false;
    config_take_shape(config, &weights.shape);
    shape = config_shape(config);
    const bool ok = weights_compare(&weights, &shape, error);
    weights_close(&weights);
    return ok;
}

#endif
