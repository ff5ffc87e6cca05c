// export.h: writing weights in other people's formats: `train_gpt --export DIRECTORY --from WEIGHTS`.
//
// Trains nothing and starts no ranks. What is written comes, tensor by tensor, from anything that weights.h opens, a
// checkpoint of any grid of ranks in particular; no more than about one tensor is in memory.
#ifndef EXPORT_H
#define EXPORT_H

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

static inline bool export_check(const Config *config, Error *error) {
    if (config->from[0] == '\0')
        return config_error(
            config, CONFIG_from, error,
            "no weights to export: give --from a checkpoint, a Hugging Face directory or an llm.c file");
    if (config->export_directory[0] == '\0' && config->export_llmc[0] == '\0')
        return config_error(config, CONFIG_from, error,
                            "%.200s are weights to export, --export DIRECTORY or --export-llmc FILE is needed",
                            config->from);
    if (config->export_llmc[0] != '\0' && strcmp(config->export_dtype, "fp16") == 0)
        return config_error(config, CONFIG_export_dtype, error, "fp16: llm.c's models are in fp32 or bf16");
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
    if (!export_check(config, &error) || (directory[0] != '\0' && !huggingface_may_replace(directory, &error)) ||
        (file[0] != '\0' && !llmc_may_replace(file, config->from, &error)) ||
        !weights_open(&weights, config->from, &error) || !weights_verify(&weights, 0, 1, &error))
        die_input(&error);
    const FloatType type = strcmp(config->export_dtype, "fp32") == 0   ? FLOAT_F32
                           : strcmp(config->export_dtype, "bf16") == 0 ? FLOAT_BF16
                                                                       : FLOAT_F16;
    ExportSource source = {&weights, type};
    const ModelShape *shape = &weights.shape;
    printf("%s: %d layers, %d heads, %d wide, context %d, vocabulary %d: %zu parameters\n", config->from,
           shape->n_layer, shape->n_head, shape->n_embd, shape->context_length, shape->vocab_size,
           model_parameters(shape));
    fflush(stdout);
    if (directory[0] != '\0') {
        if (!huggingface_export(directory, shape, type, export_deliver, &source, &error)) die("%s", error.text);
        export_print(directory, "config.json");
        export_print(directory, "model.safetensors");
    }
    if (file[0] != '\0') {
        if (!llmc_export(file, shape, type, export_deliver, &source, &error)) die("%s", error.text);
        export_print(file, "");
    }
    weights_close(&weights);
    return 0;
}

#endif
