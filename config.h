// config.h: run configuration: one table of options -> JSON file, flags, --help, range checks.
//
// CONFIG_OPTIONS names every option once; options.h makes the rest of it. Values come, each overriding the one before,
// from the defaults, from the preset and the keys of a JSON file, and from the preset and the keys given as flags.
// config_read() reads and checks each value by itself; config_check() checks them together and resolves what follows
// from other values, so that afterwards no option means "automatic" and config_write() names the same run again.
#ifndef CONFIG_H
#define CONFIG_H

#include <stddef.h>
#include "ops_limits.h"
#include "options.h"
#include "profile.h"

// Model shapes: name, n_layer, n_head, n_embd, context_length; all with GPT-2's vocabulary of 50257.
// GPT-2: Radford et al. 2019. GPT-3: Brown et al. 2020, Table 2.1, all layers with dense attention. Two of its rows do
// not divide: 1.3B has 24 heads in a width of 2048, here 16 of 128; 13B has a width of 5140, here 40 heads * 128 =
// 5120.
#define CONFIG_PRESETS(P)               \
    P("gpt2-124M", 12, 12, 768, 1024)   \
    P("gpt2-350M", 24, 16, 1024, 1024)  \
    P("gpt2-774M", 36, 20, 1280, 1024)  \
    P("gpt2-1558M", 48, 25, 1600, 1024) \
    P("gpt3-125M", 12, 12, 768, 2048)   \
    P("gpt3-350M", 24, 16, 1024, 2048)  \
    P("gpt3-760M", 24, 16, 1536, 2048)  \
    P("gpt3-1.3B", 24, 16, 2048, 2048)  \
    P("gpt3-2.7B", 32, 32, 2560, 2048)  \
    P("gpt3-6.7B", 32, 32, 4096, 2048)  \
    P("gpt3-13B", 40, 40, 5120, 2048)   \
    P("gpt3-175B", 96, 96, 12288, 2048)

#define CONFIG_PRESET_NAME(name, n_layer, n_head, n_embd, context_length) "|" name

// clang-format off
// section, type, key, default, allowed values, help
#define CONFIG_OPTIONS(O) \
    O(model, CHOICE, preset, "", "" CONFIG_PRESETS(CONFIG_PRESET_NAME), "a published shape; keys given beside it override it") \
    O(model, INTEGER, n_layer, "4", "[1, 1000]", "transformer blocks") \
    O(model, INTEGER, n_head, "4", "[1, 1024]", "attention heads; they divide n_embd") \
    O(model, INTEGER, n_embd, "128", "[1, 65536]", "width of the model, channels") \
    O(model, INTEGER, context_length, "64", "[1, 1048576]", "positions that the model knows, tokens") \
    O(model, INTEGER, vocab_size, "256", "[1, 16777216]", "distinct tokens; 256 for text read as bytes") \
    O(model, NUMBER, dropout, "0", "[0, 0.99]", "fraction dropped of embedding, attention and residual") \
    O(data, TEXT, train_data, "", "", "token shards (*.bin, may be a glob), or a text file read as bytes") \
    O(data, TEXT, val_data, "", "", "the same, for validation; none: no validation") \
    O(data, TEXT, tokenizer, "", "", "vocabulary file that turns tokens into text; none: tokens are bytes") \
    O(data, TEXT, hellaswag, "", "", "choices between four endings, in llm.c's file format; none: no such evaluation") \
    O(batch, INTEGER, micro_batch, "12", "[1, 1048576]", "sequences per data-parallel rank and forward pass") \
    O(batch, INTEGER, sequence_length, "0", "[0, 1048576]", "tokens per sequence; 0: the model's context_length") \
    O(batch, INTEGER, tokens_per_step, "0", "[0, 1099511627776]", "tokens per step over all ranks; 0: one micro-batch on each") \
    O(parallel, CHOICE, strategy, "ddp", "ddp|zero1|zero2|zero3|tp|fsdp", "how ranks share the work; fsdp is another name for zero3") \
    O(parallel, INTEGER, shard_group, "0", "[0, 1048576]|node", "zero3: ranks that shard together, groups hold replicas; 0: all ranks; node: those of a machine") \
    O(parallel, INTEGER, tensor_parallel, "1", "[1, 1024]", "ranks that split each layer") \
    O(parallel, BOOLEAN, sequence_parallel, "false", "", "tensor-parallel ranks split layer norms by position") \
    O(parallel, INTEGER, pipeline_parallel, "1", "[1, 1024]", "stages that the layers are split into") \
    O(parallel, INTEGER, pipeline_chunks, "1", "[1, 1024]", "groups of layers per stage, interleaved") \
    O(parallel, INTEGER, prefetch, "1", "[0, 1000]", "zero3: uses of a unit that are gathered ahead") \
    O(parallel, BOOLEAN, reshard_after_forward, "true", "", "zero3: free gathered parameters between forward and backward") \
    O(parallel, BOOLEAN, overlap, "true", "", "communicate while computing") \
    O(parallel, BOOLEAN, deterministic, "true", "", "same bits whatever the strategy; the CPU always is") \
    O(optimizer, NUMBER, learning_rate, "1e-3", "(0, 1000]", "highest learning rate, after warm-up") \
    O(optimizer, NUMBER, min_learning_rate, "1e-4", "[0, 1000]", "where the schedule ends; not given: a tenth of learning_rate") \
    O(optimizer, CHOICE, schedule, "cosine", "constant|linear|cosine|wsd", "of the learning rate; wsd: warm-up, stable, linear decay") \
    O(optimizer, INTEGER, warmup_steps, "100", "[0, 1e9]", "steps of linear warm-up; a shorter run ends within it") \
    O(optimizer, INTEGER, decay_steps, "0", "[0, 1e9]", "wsd: steps of decay at the end; 0: a fifth of all") \
    O(optimizer, NUMBER, beta1, "0.9", "[0, 0.999999]", "AdamW: decay of the first moment") \
    O(optimizer, NUMBER, beta2, "0.99", "[0, 0.999999]", "AdamW: decay of the second moment") \
    O(optimizer, NUMBER, epsilon, "1e-8", "[1e-30, 1]", "AdamW: added to the root of the second moment") \
    O(optimizer, NUMBER, weight_decay, "0.1", "[0, 1000]", "AdamW: decay of matrices, times the learning rate") \
    O(optimizer, NUMBER, grad_clip, "1", "[0, 1e30]", "largest norm of the gradient; 0: any") \
    O(optimizer, INTEGER, max_bad_steps, "10", "[1, 1e9]", "non-finite steps in a row that end the run") \
    O(numerics, CHOICE, precision, "bf16", "fp32|bf16", "of parameters and activations") \
    O(numerics, CHOICE, gradient_dtype, "auto", "auto|bf16|fp32", "of gradients; auto: as precision") \
    O(numerics, BOOLEAN, master_weights, "true", "", "bf16: the optimizer keeps parameters in fp32") \
    O(numerics, BOOLEAN, tf32, "false", "", "fp32 on GPUs: products on tensor cores, with 10 bits of mantissa") \
    O(numerics, BOOLEAN, matmul_tune, "false", "", "GPUs: time candidates for each product; another run may choose, and round, differently") \
    O(memory, TEXT, recompute, "none", "", "activations computed again in backward: none, or full: blocks keep only their input") \
    O(memory, TEXT, offload, "none", "", "what is kept in host memory") \
    O(memory, INTEGER, classifier_chunks, "1", "[1, 1048576]", "parts in which the logits are computed") \
    O(run, INTEGER, steps, "2000", "[1, 1e9]", "optimizer steps") \
    O(run, INTEGER, seed, "1337", "[0, 9007199254740991]", "of initialisation, data order, dropout and samples") \
    O(run, INTEGER, nproc, "1", "[1, 4096]", "ranks to start on this machine") \
    O(run, INTEGER, val_every, "250", "[0, 1e9]", "steps between validations; 0: none") \
    O(run, INTEGER, val_steps, "0", "[0, 1e9]", "steps' worth of data (tokens_per_step) in a validation; 0: the whole split") \
    O(run, INTEGER, hellaswag_every, "0", "[0, 1e9]", "steps between evaluations on hellaswag; 0: none") \
    O(run, BOOLEAN, eval_only, "false", "", "no training: evaluate the weights of init_from, or the checkpoint of resume, and end") \
    O(run, INTEGER, sample_every, "0", "[0, 1e9]", "steps between samples of text; 0: none") \
    O(run, INTEGER, sample_tokens, "200", "[1, 1048576]", "length of a sample, tokens") \
    O(run, NUMBER, sample_temperature, "0.8", "[0.001, 100]", "of a sample: above 1 more random, below 1 less") \
    O(run, INTEGER, sample_top_k, "40", "[0, 16777216]", "a sample draws from the k likeliest tokens; 0: from all") \
    O(run, TEXT, sample_prompt, "", "", "how a sample begins") \
    O(run, INTEGER, log_every, "0", "[0, 1e9]", "steps between progress lines; 0: a line every two seconds") \
    O(run, TEXT, log_dir, "", "", "directory for metrics, summary and checkpoints; none: nothing is written") \
    O(run, INTEGER, timeout, "300", "[1, 1e6]", "seconds that a rank waits for the others before the run fails") \
    O(run, INTEGER, check_replicas, "0", "[0, 1e9]", "steps between checks that ranks hold the same; 0: none") \
    O(run, INTEGER, trace, "0", "[0, 1e9]", "step whose streams are recorded, in log_dir/trace.json; 0: none") \
    O(run, TEXT, profile_steps, "", "", "A:B, the steps that a GPU's profiler records (nsys --capture-range=cudaProfilerApi); none: as it likes") \
    O(planning, BOOLEAN, plan, "false", "", "print what the run would take under every strategy, and end") \
    O(planning, INTEGER, world_size, "0", "[0, 1048576]", "plan: ranks; 0: nproc") \
    O(planning, NUMBER, device_memory, "80", "(0, 1e6]", "plan: memory of a device, GB (1e9 bytes)") \
    O(planning, NUMBER, plan_parameters, "0", "[0, 1e18]", "plan: model state of so many parameters, without a shape; 0: of the model") \
    O(planning, TEXT, plan_json, "", "", "plan: write it to this file too") \
    O(checkpoint, INTEGER, checkpoint_every, "0", "[0, 1e9]", "steps between checkpoints; 0: none") \
    O(checkpoint, INTEGER, checkpoint_keep, "2", "[1, 1e9]", "newest checkpoints that are kept") \
    O(checkpoint, INTEGER, checkpoint_major_every, "0", "[0, 1e9]", "steps between checkpoints that are kept for good; 0: none") \
    O(checkpoint, BOOLEAN, checkpoint_async, "true", "", "write checkpoints while training goes on") \
    O(checkpoint, TEXT, resume, "never", "", "auto: go on from the newest checkpoint in log_dir, if any; or the directory of one") \
    O(checkpoint, TEXT, init_from, "", "", "weights to begin with: a checkpoint, a Hugging Face GPT-2, an llm.c model; none: random; a model's shape that is not given is theirs") \
    O(exporting, TEXT, export, "", "", "directory to write as a Hugging Face GPT-2, from the weights of --from, and end") \
    O(exporting, TEXT, export_llmc, "", "", "file to write as an llm.c model, from the weights of --from, and end") \
    O(exporting, TEXT, from, "", "", "export: the weights, whatever init_from takes") \
    O(exporting, CHOICE, export_dtype, "fp32", "fp32|bf16|fp16", "export: the type that is written")
// clang-format on

// C++ keeps the name of one option to itself: its field is called differently.
#define export export_directory

// CONFIG_n_layer and so on: the place of each option in the table.
#define CONFIG_ID(section, type, key, initial, allowed, help) CONFIG_##key,
typedef enum { CONFIG_OPTIONS(CONFIG_ID) CONFIG_COUNT } ConfigId;

#define CONFIG_FIELD_INTEGER(key) int64_t key;
#define CONFIG_FIELD_NUMBER(key) double key;
#define CONFIG_FIELD_BOOLEAN(key) bool key;
#define CONFIG_FIELD_TEXT(key) char key[OPTION_TEXT_SIZE];
#define CONFIG_FIELD_CHOICE(key) char key[OPTION_CHOICE_SIZE];
#define CONFIG_FIELD(section, type, key, initial, allowed, help) CONFIG_FIELD_##type(key)

typedef struct {
    CONFIG_OPTIONS(CONFIG_FIELD) // a field per option, named as its key

    // What follows from the options, set by config_check().
    int64_t data_parallel;               // ranks that share the batch
    int64_t shard_ranks;                 // of them, those among which state is sharded
    int64_t micro_batches;               // forward and backward passes per step on each of them
    int64_t padded_vocab_size;           // a multiple of 128 per tensor-parallel rank
    int64_t profile_first, profile_last; // steps, counted from 1; 0: none

    unsigned char sources[CONFIG_COUNT]; // OptionSource of each option: config->sources[CONFIG_n_layer]
    char file[OPTION_TEXT_SIZE];         // the JSON file; "" if none
    bool help;                           // --help was given: nothing else has been read
} Config;

static inline OptionTable config_table(Config *config) {
#define CONFIG_OPTION(section, type, key, initial, allowed, help) \
    {#section, #key, OPTION_##type, offsetof(Config, key), initial, allowed, help},
    static const Option options[] = {CONFIG_OPTIONS(CONFIG_OPTION)};
#undef CONFIG_OPTION
    OptionTable table = {options, CONFIG_COUNT, config, config->sources, config->file};
    return table;
}
#undef export

// Gives the shape of the preset to the keys that come from an earlier source than the preset itself.
static inline void config_apply_preset(Config *config, OptionSource source) {
    typedef struct {
        const char *name;
        int64_t n_layer, n_head, n_embd, context_length;
    } Preset;
#define CONFIG_PRESET(name, n_layer, n_head, n_embd, context_length) {name, n_layer, n_head, n_embd, context_length},
    static const Preset presets[] = {CONFIG_PRESETS(CONFIG_PRESET)};
#undef CONFIG_PRESET
    if (config->sources[CONFIG_preset] != source) return;
    for (size_t p = 0; p < sizeof presets / sizeof presets[0]; p++) {
        if (strcmp(presets[p].name, config->preset) != 0) continue;
        const int ids[] = {CONFIG_n_layer, CONFIG_n_head, CONFIG_n_embd, CONFIG_context_length, CONFIG_vocab_size};
        int64_t *fields[] = {&config->n_layer, &config->n_head, &config->n_embd, &config->context_length,
                             &config->vocab_size};
        const int64_t values[] = {presets[p].n_layer, presets[p].n_head, presets[p].n_embd, presets[p].context_length,
                                  50257};
        for (int i = 0; i < 5; i++) {
            if (config->sources[ids[i]] >= source) continue;
            *fields[i] = values[i];
            config->sources[ids[i]] = FROM_PRESET;
        }
    }
}

// Reads the command line and the JSON file that it names. Each value is checked by itself.
// With config->help set nothing else was read: print config_help().
static inline bool config_read(Config *config, int argc, char **argv, Error *error) {
    memset(config, 0, sizeof *config);
    OptionTable table = config_table(config);
    options_set_defaults(&table);
    const char *file = NULL;
    if (!options_read_flags(&table, argc, argv, false, &file, &config->help, error)) return false;
    if (config->help) return true;
    if (file != NULL) {
        if (strlen(file) >= sizeof config->file)
            return error_set(error, "%.60s...: this file name has %zu bytes, %zu at most are needed", file,
                             strlen(file), sizeof config->file - 1);
        snprintf(config->file, sizeof config->file, "%s", file);
        if (!options_read_file(&table, "published", error)) return false;
        config_apply_preset(config, FROM_FILE);
    }
    if (!options_read_flags(&table, argc, argv, true, &file, &config->help, error)) return false;
    config_apply_preset(config, FROM_FLAG);
    return true;
}

// Whether the program is asked to export weights, and for nothing else.
static inline bool config_exports(const Config *config) {
    return config->export_directory[0] != '\0' || config->export_llmc[0] != '\0' || config->from[0] != '\0';
}

// What --help prints.
static inline void config_help(FILE *out) {
    Config config;
    memset(&config, 0, sizeof config);
    OptionTable table = config_table(&config);
    fprintf(out,
            "usage: ./train_gpt [CONFIG.json] [--flag value | --flag=value]...\n"
            "       ./train_gpt --export DIRECTORY --from WEIGHTS\n"
            "\n"
            "Pretrains a GPT. The file holds the options below as {\"section\": {\"key\": value}},\n"
            "a key being the flag with underscores. Flags override the file; of a flag given twice the last counts.\n"
            "--preset replaces the whole shape of the file's model. A boolean flag without a value means true.\n");
    options_help(&table, out);
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks that look at several options

// Begins a message about option `id` as the user gave it: file and section.key, flag, or section.key of a default.
__attribute__((format(printf, 4, 5))) static inline bool config_error(const Config *config, ConfigId id, Error *error,
                                                                      const char *format, ...) {
    Config copy = *config;
    OptionTable table = config_table(&copy);
    char where[256], what[768];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return error_set(error, "%s: %s", option_where(&table, id, (OptionSource)config->sources[id], where), what);
}

// The options that are planned but not built, each with the values that are.
static inline bool config_check_built(Config *config, Error *error) {
    typedef struct {
        ConfigId id;
        const char *built;
    } Built;
    static const Built limits[] = {
        {CONFIG_recompute, "none|full"},
        {CONFIG_offload, "none"},
    };
    OptionTable table = config_table(config);
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        char value[OPTION_TEXT_SIZE];
        option_value_text(&table, limits[i].id, value);
        if (!option_is_choice(limits[i].built, value))
            return config_error(config, limits[i].id, error, "%.60s is not built yet, so far there is only %s", value,
                                limits[i].built);
    }
    return true;
}

static inline bool config_check_model(Config *config, Error *error) {
    if (config->n_embd % config->n_head != 0) {
        int64_t below = config->n_head, above = config->n_head;
        while (config->n_embd % below != 0) below--;
        while (above < config->n_embd && config->n_embd % above != 0) above++;
        if (above > config->n_embd) above = below; // more heads than channels
        char nearest[64];
        snprintf(nearest, sizeof nearest, above == below ? "%lld" : "%lld or %lld", (long long)below, (long long)above);
        return config_error(config, CONFIG_n_head, error,
                            "%lld heads do not divide n_embd %lld evenly, the nearest that do: %s",
                            (long long)config->n_head, (long long)config->n_embd, nearest);
    }
    if (config->n_embd / config->n_head > OPS_MAX_HEAD_DIM && !config->plan)
        return config_error(
            config, CONFIG_n_head, error,
            "%lld heads of n_embd %lld have %lld channels each, on GPUs at most %d are possible: at least "
            "%lld heads are needed",
            (long long)config->n_head, (long long)config->n_embd, (long long)(config->n_embd / config->n_head),
            OPS_MAX_HEAD_DIM, (long long)((config->n_embd + OPS_MAX_HEAD_DIM - 1) / OPS_MAX_HEAD_DIM));
    int64_t multiple = 128 * config->tensor_parallel;
    config->padded_vocab_size = (config->vocab_size + multiple - 1) / multiple * multiple;
    return true;
}

// The numbers from 1 to `most` that divide both a and b, as text.
static inline const char *config_common_divisors(int64_t a, int64_t b, int64_t most, char text[256]) {
    text[0] = '\0';
    for (int64_t d = 1; d <= most && d <= a && strlen(text) < 256 - 24; d++)
        if (a % d == 0 && b % d == 0) snprintf(text + strlen(text), 24, "%s%lld", d > 1 ? ", " : "", (long long)d);
    return text;
}

// The grid of ranks: world_size = tensor_parallel * data_parallel * pipeline_parallel.
static inline bool config_check_grid(Config *config, int world_size, Error *error) {
    char legal[256];
    const bool tensor_only = strcmp(config->strategy, "tp") == 0;
    if (tensor_only && config->tensor_parallel != world_size) {
        if (config->sources[CONFIG_tensor_parallel] != FROM_DEFAULT)
            return config_error(config, CONFIG_tensor_parallel, error,
                                "strategy tp splits each layer over all %d ranks, %lld differs from that; with another "
                                "strategy it may be fewer",
                                world_size, (long long)config->tensor_parallel);
        config->tensor_parallel = world_size;
    }
    const int64_t T = config->tensor_parallel, P = config->pipeline_parallel, V = config->pipeline_chunks;
    if (config->n_head % T != 0)
        return config_error(config, tensor_only ? CONFIG_strategy : CONFIG_tensor_parallel, error,
                            "%lld ranks cannot share n_head %lld evenly, a head is never cut; what divides: %s",
                            (long long)T, (long long)config->n_head,
                            config_common_divisors(config->n_head, config->n_head, config->n_head, legal));
    if (P > config->n_layer)
        return config_error(config, CONFIG_pipeline_parallel, error,
                            "%lld stages need a layer each, n_layer is %lld; at most that is needed", (long long)P,
                            (long long)config->n_layer);
    if (world_size % (T * P) != 0)
        return config_error(
            config, P > 1 && world_size % P != 0 ? CONFIG_pipeline_parallel : CONFIG_tensor_parallel, error,
            "tensor_parallel %lld times pipeline_parallel %lld do not divide the %d ranks; the numbers "
            "that do: %s",
            (long long)T, (long long)P, world_size, config_common_divisors(world_size, world_size, world_size, legal));
    if (V > 1 && P == 1)
        return config_error(config, CONFIG_pipeline_chunks, error,
                            "%lld groups of layers are interleaved between stages, but pipeline_parallel is 1; without "
                            "a pipeline 1 is needed",
                            (long long)V);
    if (P * V > config->n_layer)
        return config_error(config, CONFIG_pipeline_chunks, error,
                            "%lld stages of %lld groups need a layer each, n_layer is %lld; at most %lld groups are "
                            "needed",
                            (long long)P, (long long)V, (long long)config->n_layer, (long long)(config->n_layer / P));
    if (config->sequence_parallel && T == 1)
        return config_error(config, CONFIG_sequence_parallel, error,
                            "true shares rows among tensor-parallel ranks, but tensor_parallel is 1; false is needed");
    config->data_parallel = world_size / (T * P);
    return true;
}

static inline bool config_check_batch(Config *config, int world_size, Error *error) {
    if (config->sources[CONFIG_nproc] == FROM_FLAG && config->nproc != world_size)
        return config_error(config, CONFIG_nproc, error,
                            "%lld ranks to start, but this is already one of %d ranks; leave --nproc out",
                            (long long)config->nproc, world_size);
    config->nproc = world_size;

    if (config->sequence_length == 0) config->sequence_length = config->context_length;
    if (config->sequence_length > config->context_length)
        return config_error(config, CONFIG_sequence_length, error,
                            "%lld is longer than the model's context_length %lld, at most that is needed",
                            (long long)config->sequence_length, (long long)config->context_length);
    int64_t rows = config->micro_batch * config->sequence_length;
    if (rows > INT32_MAX)
        return config_error(
            config, CONFIG_micro_batch, error,
            "%lld sequences of sequence_length %lld are more than 2^31 tokens in one pass, at most %lld "
            "sequences are needed",
            (long long)config->micro_batch, (long long)config->sequence_length,
            (long long)(INT32_MAX / config->sequence_length));
    if (config->classifier_chunks > rows)
        return config_error(config, CONFIG_classifier_chunks, error,
                            "%lld is more than the %lld tokens of a micro-batch, at most that is needed",
                            (long long)config->classifier_chunks, (long long)rows);
    int64_t unit = rows * config->data_parallel;
    if (config->tokens_per_step == 0) config->tokens_per_step = unit;
    if (config->tokens_per_step % unit != 0) {
        int64_t below = config->tokens_per_step / unit * unit;
        char nearest[64];
        snprintf(nearest, sizeof nearest, below > 0 ? "%lld or %lld" : "%lld", (long long)(below > 0 ? below : unit),
                 (long long)(below + unit));
        return config_error(config, CONFIG_tokens_per_step, error,
                            "%lld is not a multiple of micro_batch %lld * sequence_length %lld * %lld data-parallel "
                            "ranks = %lld tokens, the nearest: %s",
                            (long long)config->tokens_per_step, (long long)config->micro_batch,
                            (long long)config->sequence_length, (long long)config->data_parallel, (long long)unit,
                            nearest);
    }
    config->micro_batches = config->tokens_per_step / unit;
    if (config->sequence_parallel && config->sequence_length % config->tensor_parallel != 0)
        return config_error(config, CONFIG_sequence_parallel, error,
                            "tensor_parallel %lld ranks cannot share sequence_length %lld evenly, the nearest: %lld",
                            (long long)config->tensor_parallel, (long long)config->sequence_length,
                            (long long)(config->sequence_length / config->tensor_parallel * config->tensor_parallel));
    if (config->pipeline_chunks > 1 && config->micro_batches % config->pipeline_parallel != 0) {
        const int64_t P = config->pipeline_parallel, below = config->micro_batches / P * P;
        char nearest[64];
        snprintf(nearest, sizeof nearest, below > 0 ? "%lld or %lld" : "%lld",
                 (long long)((below > 0 ? below : P) * unit), (long long)((below + P) * unit));
        return config_error(
            config, CONFIG_pipeline_chunks, error,
            "%lld needs micro-batches in multiples of pipeline_parallel %lld, there are %lld; the nearest "
            "tokens_per_step: %s",
            (long long)config->pipeline_chunks, (long long)P, (long long)config->micro_batches, nearest);
    }
    return true;
}

static inline bool config_check_schedule(Config *config, Error *error) {
    if (config->sources[CONFIG_min_learning_rate] == FROM_DEFAULT)
        config->min_learning_rate = config->learning_rate / 10;
    if (config->min_learning_rate > config->learning_rate)
        return config_error(config, CONFIG_min_learning_rate, error,
                            "%g is above learning_rate %g, at most that is needed", config->min_learning_rate,
                            config->learning_rate);
    if (strcmp(config->schedule, "wsd") == 0) {
        int64_t room = config->steps > config->warmup_steps ? config->steps - config->warmup_steps : 0;
        if (config->decay_steps == 0) config->decay_steps = config->steps / 5 < room ? config->steps / 5 : room;
        if (config->decay_steps > room)
            return config_error(config, CONFIG_decay_steps, error,
                                "%lld is more than the %lld of steps %lld that warmup_steps %lld leaves, at most those "
                                "are needed",
                                (long long)config->decay_steps, (long long)room, (long long)config->steps,
                                (long long)config->warmup_steps);
    }
    return true;
}

static inline bool config_check_numerics(Config *config, Error *error) {
    bool bf16 = strcmp(config->precision, "bf16") == 0;
    if (strcmp(config->gradient_dtype, "auto") == 0)
        memcpy(config->gradient_dtype, config->precision, sizeof config->gradient_dtype);
    if (!bf16 && strcmp(config->gradient_dtype, "bf16") == 0)
        return config_error(config, CONFIG_gradient_dtype, error,
                            "bf16 needs precision bf16, with fp32 use fp32 or auto");
    return true;
}

static inline bool config_check_profile(Config *config, Error *error) {
    config->profile_first = config->profile_last = 0;
    const char *text = config->profile_steps;
    if (text[0] == '\0') return true;
    char *end = NULL;
    errno = 0;
    const long long first = strtoll(text, &end, 10);
    const bool pair = end > text && *end == ':';
    const char *second = pair ? end + 1 : text;
    const long long last = strtoll(second, &end, 10);
    // strtoll also takes blanks and signs.
    if (!pair || end == second || *end != '\0' || text[strspn(text, "0123456789:")] != '\0' || errno != 0 ||
        first < 1 || last < first || last > config->steps)
        return config_error(config, CONFIG_profile_steps, error,
                            "\"%.40s\" is not A:B with 1 <= A <= B <= steps %lld, for instance 3:5", text,
                            (long long)config->steps);
    if (!profile_supported())
        return config_error(config, CONFIG_profile_steps, error,
                            "%.40s: this program is not built for GPUs, whose profiler it would start; \"\" is needed",
                            text);
    config->profile_first = first;
    config->profile_last = last;
    return true;
}

// shard_group: 0 becomes all data-parallel ranks, node those of a machine.
static inline bool config_check_sharding(Config *config, int node_ranks, Error *error) {
    const int64_t n = config->data_parallel;
    if (config->shard_group < 0) { // of the ranks of a node, tensor ranks are no replicas of one another
        const int64_t node = node_ranks > config->tensor_parallel ? node_ranks / config->tensor_parallel : 1;
        config->shard_group = node < n ? node : n;
    }
    config->shard_ranks = config->shard_group == 0 ? n : config->shard_group;
    if (config->shard_ranks != n && strcmp(config->strategy, "zero3") != 0)
        return config_error(config, CONFIG_shard_group, error,
                            "%lld of %lld ranks: only zero3 shards in groups, strategy %s needs 0",
                            (long long)config->shard_group, (long long)n, config->strategy);
    if (n % config->shard_ranks == 0) return true;
    char legal[256] = "";
    for (int64_t g = 1; g <= n && strlen(legal) < sizeof legal - 24; g++)
        if (n % g == 0) snprintf(legal + strlen(legal), 24, "%s%lld", g > 1 ? ", " : "", (long long)g);
    return config_error(config, CONFIG_shard_group, error,
                        "%lld does not divide the %lld data-parallel ranks; what does: %s",
                        (long long)config->shard_group, (long long)n, legal);
}

static inline bool config_check_checkpoints(Config *config, Error *error) {
    const int64_t every = config->checkpoint_every, major = config->checkpoint_major_every;
    if (config->resume[0] == '\0')
        return config_error(config, CONFIG_resume, error,
                            "\"\": never, auto or the directory of a checkpoint is needed");
    if (strcmp(config->resume, "auto") == 0 && config->log_dir[0] == '\0')
        return config_error(config, CONFIG_resume, error, "auto looks for checkpoints in log_dir, which is needed");
    if (strcmp(config->resume, "auto") != 0 && strcmp(config->resume, "never") != 0 && config->init_from[0] != '\0')
        return config_error(config, CONFIG_init_from, error,
                            "%.200s are weights to begin anew with, but resume goes on from %.200s; one of them is "
                            "needed (or --resume auto, which begins anew only where there is no checkpoint)",
                            config->init_from, config->resume);
    if (every > 0 && config->log_dir[0] == '\0')
        return config_error(config, CONFIG_checkpoint_every, error,
                            "checkpoints are written to log_dir, which is needed");
    if (major > 0 && (every == 0 || major % every != 0))
        return config_error(config, CONFIG_checkpoint_major_every, error,
                            "%lld is not a multiple of checkpoint_every %lld: only checkpoints that are written can be "
                            "kept",
                            (long long)major, (long long)every);
    return true;
}

static inline bool config_check_evaluation(Config *config, Error *error) {
    if (config->hellaswag_every > 0 && config->hellaswag[0] == '\0')
        return config_error(config, CONFIG_hellaswag_every, error,
                            "%lld: there are no examples, --hellaswag FILE is needed",
                            (long long)config->hellaswag_every);
    if (!config->eval_only) return true;
    if (config->init_from[0] == '\0' && strcmp(config->resume, "never") == 0)
        return config_error(config, CONFIG_eval_only, error,
                            "random weights are not evaluated: --init-from PATH, or --resume auto or DIR, is needed");
    if (config->val_data[0] == '\0' && config->hellaswag[0] == '\0' && config->sample_every == 0)
        return config_error(config, CONFIG_eval_only, error,
                            "there is nothing to evaluate on: --val-data, --hellaswag or --sample-every 1 is needed");
    config->checkpoint_every = config->checkpoint_major_every = 0; // nothing changes
    return true;
}

// Checks options against each other and against the number of ranks (node_ranks of them on a machine), and resolves
// those that follow from others: afterwards sequence_length, tokens_per_step, min_learning_rate, gradient_dtype and so
// on are what the run uses.
static inline bool config_check(Config *config, int world_size, int node_ranks, Error *error) {
    if (strcmp(config->strategy, "fsdp") == 0) snprintf(config->strategy, sizeof config->strategy, "zero3");
    if (!config_check_built(config, error) || !config_check_numerics(config, error)) return false;
    if (config->plan && config->plan_parameters > 0) return true; // arithmetic alone: neither shape nor batch
    if (!config_check_grid(config, world_size, error) || !config_check_model(config, error) ||
        !config_check_batch(config, world_size, error) || !config_check_schedule(config, error) ||
        !config_check_sharding(config, node_ranks, error) || !config_check_profile(config, error))
        return false;
    if (config->plan) return true; // which reads no data
    if (config->train_data[0] == '\0' && !config->eval_only)
        return config_error(config, CONFIG_train_data, error,
                            "no training data: give --train-data FILE (scripts/quickstart.sh prepares some)");
    if (config->val_data[0] == '\0') config->val_every = 0; // nothing to validate on
    if (config->trace > 0 && config->log_dir[0] == '\0')
        return config_error(config, CONFIG_trace, error, "step %lld is recorded in log_dir, which is needed",
                            (long long)config->trace);
    if (config->trace > config->steps)
        return config_error(config, CONFIG_trace, error, "step %lld is beyond the last, steps is %lld",
                            (long long)config->trace, (long long)config->steps);
    return config_check_evaluation(config, error) && config_check_checkpoints(config, error);
}

// ---------------------------------------------------------------------------------------------------------------------
// The resolved configuration, and the learning rate

// Writes the complete configuration as JSON; a run from this file is the same run. The file appears only when complete.
static inline bool config_write(const Config *config, const char *path, Error *error) {
    Config copy = *config;
    OptionTable table = config_table(&copy);
    char *json = options_to_json(&table);
    size_t room = strlen(path) + sizeof ".new";
    char *new_path = (char *)malloc(room);
    if (new_path == NULL) die("no memory for the configuration");
    snprintf(new_path, room, "%s.new", path);
    FILE *file = fopen(new_path, "w");
    bool ok = file != NULL && fputs(json, file) >= 0;
    if (file != NULL) ok = fclose(file) == 0 && ok;
    ok = ok && rename(new_path, path) == 0;
    if (!ok) {
        error_set(error, "%s: cannot be written: %s", path, strerror(errno));
        if (file != NULL) remove(new_path);
    }
    free(new_path);
    free(json);
    return ok;
}

// The learning rate of a step, counted from 0: linear warm-up, lr (step + 1) / warmup_steps, then by schedule. linear
// and cosine reach min_learning_rate at step `steps`, one after the last, as nanoGPT does; wsd stays at the highest
// rate and falls linearly in the last decay_steps (Haegele et al. 2024 compare shapes of this decay).
static inline double config_learning_rate(const Config *config, int64_t step) {
    double high = config->learning_rate, low = config->min_learning_rate;
    if (step < config->warmup_steps) return high * (double)(step + 1) / (double)config->warmup_steps;
    if (strcmp(config->schedule, "constant") == 0) return high;
    bool wsd = strcmp(config->schedule, "wsd") == 0;
    int64_t start = wsd ? config->steps - config->decay_steps : config->warmup_steps;
    if (step < start) return high;
    if (step >= config->steps) return low;
    double ratio = (double)(step - start) / (double)(config->steps - start);
    if (strcmp(config->schedule, "cosine") == 0)
        return low + 0.5 * (1.0 + cos(3.14159265358979323846 * ratio)) * (high - low);
    return high + ratio * (low - high);
}

#endif
