// export.h: writing weights in other people's formats: `train_gpt --export DIRECTORY --from WEIGHTS`.
//
// Trains nothing and starts no ranks. What is written comes, tensor by tensor, from anything that weights.h opens, a
// checkpoint of any grid of ranks in particular; no more than about one tensor is in memory.
#ifndef EXPORT_H
#define EXPORT_H

#include <unistd.h>
#include "config.h"
#include "weights.h"

// Weights on their way into a type.
typedef struct {
    Weights *weights;
    FloatType type;
} ExportSource;

// A WeightsRead: refuses what the type cannot hold.
static inline bool export_deliver(void *context, int id, size_t first, size_t count, float *out, Error *error) {
    const ExportSource *source = (const ExportSource *)context;
    if (!weights_read(source->weights, id, first, count, out, error)) return false;
    if (source->type != FLOAT_F16) return true; // bf16 has fp32's range
    const float most = 65504;
    for (size_t i = 0; i < count; i++)
        if (fabsf(out[i]) > most && isfinite(out[i]))
            return error_set(error, "%s: %s has the weight %g, which is beyond fp16's range; bf16 or fp32 is needed",
                             source->weights->path, weights_tensor(&source->weights->layout, id)->name, out[i]);
    return true;
}

// Where an export goes. Its temporary file is held from before anything is read until the last file has its name, so
// that two exports to one target never write the same file.
typedef struct {
    const char *directory; // of Hugging Face's kind, or NULL: an llm.c file
    char *temporary;
    int lock;  // or -1
    bool made; // the directory, by this export
} ExportTarget;

static inline void export_release(ExportTarget *target) {
    if (target->lock >= 0) close(target->lock);
    free(target->temporary);
}

// Gives up: what claiming has made is removed. Closing comes last, so that what is removed is our own.
static inline void export_abandon(ExportTarget *target) {
    if (target->lock >= 0) unlink(target->temporary);
    if (target->made) rmdir(target->directory);
    export_release(target);
}

static inline bool export_claim_directory(ExportTarget *target, const char *directory, Error *error) {
    if (!huggingface_may_replace(directory, error)) return false;
    target->directory = directory;
    target->made = mkdir(directory, 0755) == 0;
    if (!target->made && errno != EEXIST) return error_set(error, "%s: cannot be made: %s", directory, strerror(errno));
    target->temporary = path_join(directory, "/", "config.json.tmp"); // which is renamed last
    target->lock = file_claim(target->temporary, directory, error);
    return target->lock >= 0;
}

static inline bool export_claim_file(ExportTarget *target, const char *file, const char *from, Error *error) {
    if (!llmc_may_replace(file, from, error)) return false;
    target->temporary = path_join(file, ".", "tmp");
    target->lock = file_claim(target->temporary, file, error);
    return target->lock >= 0;
}

static inline bool export_check(const Config *config, Error *error) {
    const char *directory = config->export_directory, *file = config->export_llmc; // "": not asked for
    // An export evaluates, trains and plans nothing.
    const struct {
        bool given;
        ConfigId id;
    } others[] = {{config->plan, CONFIG_plan},
                  {config->eval_only, CONFIG_eval_only},
                  {config->init_from[0] != '\0', CONFIG_init_from},
                  {strcmp(config->resume, "never") != 0, CONFIG_resume}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (others[i].given)
            return config_error(config, others[i].id, error,
                                "an export does nothing else and takes its weights from --from alone; leave one out");
    if (config->from[0] == '\0')
        return config_error(
            config, CONFIG_from, error,
            "no weights to export: give --from a checkpoint, a Hugging Face directory or an llm.c file");
    if (directory[0] == '\0' && file[0] == '\0')
        return config_error(config, CONFIG_from, error,
                            "%.200s are weights to export, --export DIRECTORY or --export-llmc FILE is needed",
                            config->from);
    if (file[0] != '\0' && strcmp(config->export_dtype, "fp16") == 0)
        return config_error(config, CONFIG_export_dtype, error, "fp16: llm.c's models are in fp32 or bf16");
    size_t directory_length = strlen(directory);
    const size_t file_length = strlen(file);
    while (directory_length > 1 && directory[directory_length - 1] == '/') directory_length--;
    if (file_length > 0 && file[file_length - 1] == '/')
        return config_error(config, CONFIG_export_llmc, error, "%.200s: ends in a slash, the name of a file is needed",
                            file);
    if (file_length > 0 && file_length == directory_length && memcmp(file, directory, file_length) == 0)
        return config_error(config, CONFIG_export_llmc, error,
                            "%.200s: is the directory of --export too, another name is needed", file);
    const char *slash = strrchr(file, '/');
    if (directory_length > 0 && strcmp(slash != NULL ? slash + 1 : file, "model.safetensors") == 0)
        return config_error(config, CONFIG_export_llmc, error,
                            "%.200s: is the name of a file of --export, another name is needed", file);
    return true;
}

static inline void export_print(const char *path, const char *name) {
    char *file = path_join(path, name[0] != '\0' ? "/" : "", name);
    struct stat status;
    if (stat(file, &status) == 0) printf("%s: %lld bytes\n", file, (long long)status.st_size);
    free(file);
}

// Exports as configured; prints what was written. Returns an exit code.
static inline int export_run(const Config *config) {
    Error error = {""};
    Weights weights;
    const char *directory = config->export_directory, *file = config->export_llmc; // "": not asked for
    ExportTarget targets[2] = {{NULL, NULL, -1, false}, {NULL, NULL, -1, false}};
    if (!export_check(config, &error)) die_input(&error);
    if ((directory[0] != '\0' && !export_claim_directory(&targets[0], directory, &error)) ||
        (file[0] != '\0' && !export_claim_file(&targets[1], file, config->from, &error)) ||
        !weights_open(&weights, config->from, &error) || !weights_verify(&weights, 0, 1, &error)) {
        for (int i = 0; i < 2; i++) export_abandon(&targets[i]);
        die_input(&error);
    }
    const FloatType type = strcmp(config->export_dtype, "fp32") == 0   ? FLOAT_F32
                           : strcmp(config->export_dtype, "bf16") == 0 ? FLOAT_BF16
                                                                       : FLOAT_F16;
    ExportSource source = {&weights, type};
    const ModelShape *shape = &weights.shape;
    printf("%s: %d layers, %d heads, %d wide, context %d, vocabulary %d: %zu parameters\n", config->from,
           shape->n_layer, shape->n_head, shape->n_embd, shape->context_length, shape->vocab_size,
           model_parameters(shape));
    fflush(stdout);
    bool ok = directory[0] == '\0' || huggingface_export(directory, shape, type, export_deliver, &source, &error);
    if (!ok && targets[0].made) rmdir(directory);
    export_release(&targets[0]);
    if (!ok) export_abandon(&targets[1]);
    if (!ok) die("%s", error.text);
    if (directory[0] != '\0') {
        export_print(directory, "config.json");
        export_print(directory, "model.safetensors");
    }
    ok = file[0] == '\0' || llmc_export(file, shape, type, export_deliver, &source, &error);
    export_release(&targets[1]);
    if (!ok) die("%s", error.text);
    if (file[0] != '\0') export_print(file, "");
    weights_close(&weights);
    return 0;
}

#endif
