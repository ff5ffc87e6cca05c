// manifest.h: what stands in a checkpoint's manifest.json, and which checkpoints a directory holds.
//
//   LOG_DIR/step_00000100/rank_00000.safetensors   a file per rank of the run that wrote it: checkpoint.h
//   LOG_DIR/step_00000100/manifest.json            says of which run, after which step; sizes and checksums of all
//   files LOG_DIR/latest                                 a text file: the name of the newest complete one, for scripts
//
// A checkpoint is written as step_00000100.new and renamed when complete; an old one is renamed to *.old before it is
// removed. What has the name step_00000100 is therefore whole, unless something outside damaged it: sizes and checksums
// tell. Manifests are untrusted: every field is checked before it is used.
#ifndef MANIFEST_H
#define MANIFEST_H

#include <dirent.h>
#include "config.h"
#include "dataset.h"
#include "files.h"
#include "json.h"
#include "layout.h"

enum {
    MANIFEST_FORMAT = 1,
    MANIFEST_MAX_RANKS = 8192, // so that a manifest stays below OPTIONS_FILE_LIMIT
    STEP_NAME = 32             // bytes of a checkpoint's name
};

typedef struct {
    uint64_t bytes, checksum;
} ManifestFile;

typedef struct {
    uint64_t step, updates, bad_steps;
    ModelShape shape;
    Grid grid;
    int shard_group, pipeline_chunks; // with the grid: which part each file holds
    DatasetIdentity data;             // of the training data
    uint64_t seed, tokens_per_step, sequence_length;
    uint64_t log_bytes; // of metrics.jsonl up to this step
    double train_loss;  // of this step; NaN: none
    int n_files;
    ManifestFile *files; // of rank 0, 1, ...
    cJSON *config;       // the configuration of the run that wrote it
} Manifest;

static inline void manifest_free(Manifest *manifest) {
    free(manifest->files);
    cJSON_Delete(manifest->config);
    manifest->files = NULL;
    manifest->config = NULL;
}

static inline void step_name(uint64_t step, const char *suffix, char name[STEP_NAME]) {
    snprintf(name, STEP_NAME, "step_%08llu%s", (unsigned long long)step, suffix);
}

// The step of a name such as step_00000100; false for any other name. suffix: what has to follow, "" for a complete
// one.
static inline bool step_of_name(const char *name, const char *suffix, uint64_t *step) {
    char expected[STEP_NAME];
    if (strncmp(name, "step_", 5) != 0) return false;
    *step = strtoull(name + 5, NULL, 10);
    step_name(*step, suffix, expected);
    return strcmp(name, expected) == 0;
}

// The last name of a path to a directory, if it is short enough to be a checkpoint's.
static inline bool directory_name(const char *path, char name[STEP_NAME]) {
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && path[begin - 1] != '/') begin--;
    if (end - begin >= STEP_NAME) return false;
    memcpy(name, path + begin, end - begin);
    name[end - begin] = '\0';
    return true;
}

// What is saved of every unit, and the names of its tensors: "block 3.m".
enum { STATE_PARAMS, STATE_M, STATE_V, STATES };

static inline const char *state_name(int state) {
    static const char *const names[STATES] = {"params", "m", "v"};
    return names[state];
}

static inline void state_tensor_name(const Unit *unit, int state, char name[48]) {
    snprintf(name, 48, "%s.%s", unit->name, state_name(state));
}

// DIRECTORY/rank_00007.safetensors, to be freed.
static inline char *rank_path(const char *directory, int rank) {
    char name[48];
    snprintf(name, sizeof name, "rank_%05d.safetensors", rank);
    return path_join(directory, "/", name);
}

// ---------------------------------------------------------------------------------------------------------------------
// manifest.json

// The whole numbers, each with its place in the file and its range.
typedef struct {
    const char *section, *key; // section "": the file itself
    uint64_t *value;           // or
    int *number;
    uint64_t low, high;
} ManifestField;

enum { MANIFEST_FIELDS = 18 };

static inline void manifest_fields(Manifest *m, ManifestField fields[MANIFEST_FIELDS]) {
    const uint64_t most = 9007199254740992ull; // 2^53
    const ManifestField all[MANIFEST_FIELDS] = {
        {"", "step", &m->step, NULL, 0, 1000000000},
        {"", "updates", &m->updates, NULL, 0, 1000000000},
        {"", "bad_steps", &m->bad_steps, NULL, 0, 1000000000},
        {"", "log_bytes", &m->log_bytes, NULL, 0, most},
        {"model", "n_layer", NULL, &m->shape.n_layer, 1, 1000},
        {"model", "n_head", NULL, &m->shape.n_head, 1, 1024},
        {"model", "n_embd", NULL, &m->shape.n_embd, 1, 65536},
        {"model", "context_length", NULL, &m->shape.context_length, 1, 1048576},
        {"model", "vocab_size", NULL, &m->shape.vocab_size, 1, 16777216},
        {"grid", "tensor_parallel", NULL, &m->grid.tensor, 1, 1024},
        {"grid", "data_parallel", NULL, &m->grid.data, 1, MANIFEST_MAX_RANKS},
        {"grid", "pipeline_parallel", NULL, &m->grid.pipeline, 1, 1024},
        {"grid", "pipeline_chunks", NULL, &m->pipeline_chunks, 1, 1024},
        {"grid", "shard_group", NULL, &m->shard_group, 1, MANIFEST_MAX_RANKS},
        {"data", "bytes", &m->data.bytes, NULL, 1, most},
        {"data", "seed", &m->seed, NULL, 0, most},
        {"data", "tokens_per_step", &m->tokens_per_step, NULL, 1, 1099511627776},
        {"data", "sequence_length", &m->sequence_length, NULL, 1, 1048576},
    };
    memcpy(fields, all, sizeof all);
}

static inline void manifest_put(cJSON *object, const char *key, uint64_t n) {
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)n);
    cJSON_AddRawToObject(object, key, text);
}

static inline void manifest_put_hash(cJSON *object, const char *key, uint64_t hash) {
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
    cJSON_AddStringToObject(object, key, text);
}

// Writes DIRECTORY/manifest.json. options: the configuration as JSON.
static inline bool manifest_write(Manifest *manifest, const char *directory, const char *options, Error *error) {
    cJSON *root = cJSON_CreateObject();
    manifest_put(root, "format", MANIFEST_FORMAT);
    ManifestField fields[MANIFEST_FIELDS];
    manifest_fields(manifest, fields);
    for (int i = 0; i < MANIFEST_FIELDS; i++) {
        const ManifestField *field = &fields[i];
        cJSON *section = root;
        if (field->section[0] != '\0') {
            section = cJSON_GetObjectItemCaseSensitive(root, field->section);
            if (section == NULL) section = cJSON_AddObjectToObject(root, field->section);
        }
        manifest_put(section, field->key, field->value != NULL ? *field->value : (uint64_t)*field->number);
    }
    manifest_put_hash(cJSON_GetObjectItemCaseSensitive(root, "data"), "hash", manifest->data.hash);
    if (isfinite(manifest->train_loss)) cJSON_AddNumberToObject(root, "train_loss", manifest->train_loss);
    cJSON_AddRawToObject(root, "config", options);
    cJSON *files = cJSON_AddArrayToObject(root, "files");
    for (int r = 0; r < manifest->n_files; r++) {
        cJSON *file = cJSON_CreateObject();
        manifest_put(file, "bytes", manifest->files[r].bytes);
        manifest_put_hash(file, "checksum", manifest->files[r].checksum);
        cJSON_AddItemToArray(files, file);
    }
    char *text = cJSON_Print(root), *path = path_join(directory, "/", "manifest.json");
    if (text == NULL) die("no memory for %s", path);
    OutputFile file;
    if (output_open(&file, path, error)) output_write(&file, text, strlen(text), error);
    const bool ok = output_finish(&file, error);
    cJSON_free(text);
    cJSON_Delete(root);
    free(path);
    return ok;
}

static inline bool manifest_hash(const cJSON *object, const char *key, uint64_t *hash) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (!cJSON_IsString(item) || strlen(item->valuestring) != 16 || strspn(item->valuestring, "0123456789abcdef") != 16)
        return false;
    *hash = strtoull(item->valuestring, NULL, 16);
    return true;
}

static inline bool manifest_read_files(Manifest *manifest, const cJSON *root, const char *path, Error *error) {
    const cJSON *files = cJSON_GetObjectItemCaseSensitive(root, "files"), *item = NULL;
    const int ranks = manifest->grid.tensor * manifest->grid.data * manifest->grid.pipeline;
    if (!cJSON_IsArray(files) || cJSON_GetArraySize(files) != ranks)
        return error_set(error, "%s: \"files\" does not list a file for each of the %d ranks", path, ranks);
    manifest->files = (ManifestFile *)calloc((size_t)ranks, sizeof(ManifestFile));
    if (manifest->files == NULL) die("no memory for the files of %s", path);
    cJSON_ArrayForEach(item, files) {
        ManifestFile *file = &manifest->files[manifest->n_files++];
        if (!json_unique(item, path, "an entry of \"files\"", error)) return false;
        if (!json_count(cJSON_GetObjectItemCaseSensitive(item, "bytes"), &file->bytes) ||
            !manifest_hash(item, "checksum", &file->checksum))
            return error_set(error, "%s: entry %d of \"files\" has no bytes and checksum", path, manifest->n_files - 1);
    }
    return true;
}

static inline bool manifest_read_root(Manifest *manifest, cJSON *root, const char *path, Error *error) {
    uint64_t format = 0;
    if (!json_count(cJSON_GetObjectItemCaseSensitive(root, "format"), &format) || format != MANIFEST_FORMAT)
        return error_set(error, "%s: its \"format\" is not %d, the only one that is known", path, MANIFEST_FORMAT);
    static const char *const sections[] = {"model", "grid", "data", "config"};
    for (int i = 0; i < 4; i++) {
        const cJSON *section = cJSON_GetObjectItemCaseSensitive(root, sections[i]);
        if (!cJSON_IsObject(section)) return error_set(error, "%s: has no object \"%s\"", path, sections[i]);
        if (!json_unique(section, path, sections[i], error)) return false;
    }
    ManifestField fields[MANIFEST_FIELDS];
    manifest_fields(manifest, fields);
    for (int i = 0; i < MANIFEST_FIELDS; i++) {
        const ManifestField *field = &fields[i];
        const cJSON *section =
            field->section[0] == '\0' ? root : cJSON_GetObjectItemCaseSensitive(root, field->section);
        uint64_t value = 0;
        if (!json_count(cJSON_GetObjectItemCaseSensitive(section, field->key), &value) || value < field->low ||
            value > field->high)
            return error_set(error, "%s: %s%s\"%s\" is not a number from %llu to %llu", path, field->section,
                             field->section[0] != '\0' ? "." : "", field->key, (unsigned long long)field->low,
                             (unsigned long long)field->high);
        if (field->value != NULL)
            *field->value = value;
        else
            *field->number = (int)value;
    }
    if (!manifest_hash(cJSON_GetObjectItemCaseSensitive(root, "data"), "hash", &manifest->data.hash))
        return error_set(error, "%s: data.\"hash\" is not 16 hexadecimal digits", path);
    const Grid *grid = &manifest->grid;
    if ((int64_t)grid->tensor * grid->data * grid->pipeline > MANIFEST_MAX_RANKS ||
        grid->data % manifest->shard_group != 0 || manifest->shape.n_head % grid->tensor != 0 ||
        manifest->shape.n_embd % manifest->shape.n_head != 0 ||
        grid->pipeline * manifest->pipeline_chunks > manifest->shape.n_layer)
        return error_set(error, "%s: its grid of ranks is not possible", path);
    const cJSON *loss = cJSON_GetObjectItemCaseSensitive(root, "train_loss");
    manifest->train_loss = cJSON_IsNumber(loss) ? loss->valuedouble : NAN;
    if (!manifest_read_files(manifest, root, path, error)) return false;
    manifest->config = cJSON_DetachItemFromObjectCaseSensitive(root, "config");
    return true;
}

// Reads DIRECTORY/manifest.json. On an error nothing remains allocated.
static inline bool manifest_read(Manifest *manifest, const char *directory, Error *error) {
    memset(manifest, 0, sizeof *manifest);
    char *path = path_join(directory, "/", "manifest.json");
    cJSON *root = json_read_file(path, error);
    bool ok = root != NULL && manifest_read_root(manifest, root, path, error);
    uint64_t named = 0;
    char name[STEP_NAME];
    if (ok && directory_name(directory, name) && step_of_name(name, "", &named) && named != manifest->step)
        ok = error_set(error, "%s: is of step %llu, its directory is named %s", path,
                       (unsigned long long)manifest->step, name);
    if (!ok) manifest_free(manifest);
    cJSON_Delete(root);
    free(path);
    return ok;
}

// The shape of the model of the checkpoint in a directory.
static inline bool manifest_read_shape(const char *directory, ModelShape *shape, Error *error) {
    Manifest manifest;
    if (!manifest_read(&manifest, directory, error)) return false;
    *shape = manifest.shape;
    manifest_free(&manifest);
    return true;
}

// Checks that the files are there, of the right size.
static inline bool manifest_check_files(const Manifest *manifest, const char *directory, Error *error) {
    bool ok = true;
    for (int r = 0; r < manifest->n_files && ok; r++) {
        InputFile file;
        char *path = rank_path(directory, r);
        ok = input_open(&file, path, error);
        if (ok && (uint64_t)file.bytes != manifest->files[r].bytes)
            ok = error_set(error, "%s: has %lld bytes, not the %llu that were written", path, (long long)file.bytes,
                           (unsigned long long)manifest->files[r].bytes);
        input_close(&file);
        free(path);
    }
    return ok;
}

// Checks that the files are there, of the right size; of every `ranks`th, from `rank` on, the checksum too.
static inline bool manifest_verify(const Manifest *manifest, const char *directory, int rank, int ranks, Error *error) {
    enum { PIECE = 1 << 20 };
    if (!manifest_check_files(manifest, directory, error)) return false;
    char *piece = (char *)malloc(PIECE);
    if (piece == NULL) die("no memory to read %s", directory);
    bool ok = true;
    for (int r = rank; r < manifest->n_files && ok; r += ranks) {
        InputFile file;
        char *path = rank_path(directory, r);
        ok = input_open(&file, path, error);
        Checksum sum;
        checksum_begin(&sum);
        for (int64_t at = 0; ok && at < file.bytes; at += PIECE) {
            const size_t count = file.bytes - at < PIECE ? (size_t)(file.bytes - at) : (size_t)PIECE;
            ok = input_read(&file, piece, count, at, error);
            if (ok) checksum_add(&sum, piece, count);
        }
        if (ok && checksum_value(&sum) != manifest->files[r].checksum)
            ok = error_set(error, "%s: is damaged: its checksum is %016llx, not %016llx", path,
                           (unsigned long long)checksum_value(&sum), (unsigned long long)manifest->files[r].checksum);
        input_close(&file);
        free(path);
    }
    free(piece);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// What may differ between the run that wrote a checkpoint and the one that goes on

// What must be the same; the message names the field.
static inline bool manifest_check(const Manifest *m, const char *directory, const Config *config,
                                  const DatasetIdentity *data, Error *error) {
    typedef struct {
        const char *name;
        uint64_t theirs, ours;
        const char *why;
    } Same;
    const Same fields[] = {
        {"n_layer", (uint64_t)m->shape.n_layer, (uint64_t)config->n_layer, "the model must be the same"},
        {"n_head", (uint64_t)m->shape.n_head, (uint64_t)config->n_head, "the model must be the same"},
        {"n_embd", (uint64_t)m->shape.n_embd, (uint64_t)config->n_embd, "the model must be the same"},
        {"context_length", (uint64_t)m->shape.context_length, (uint64_t)config->context_length,
         "the model must be the same"},
        {"vocab_size", (uint64_t)m->shape.vocab_size, (uint64_t)config->vocab_size, "the model must be the same"},
        {"seed", m->seed, (uint64_t)config->seed, "the order of the data depends on it"},
        {"tokens_per_step", m->tokens_per_step, (uint64_t)config->tokens_per_step,
         "the place in the data depends on it, whatever the ranks and micro-batches that share it"},
        {"sequence_length", m->sequence_length, (uint64_t)config->sequence_length,
         "the place in the data depends on it"},
    };
    enum { MODEL_FIELDS = 5 }; // all that an evaluation needs
    const size_t count = config->eval_only ? (size_t)MODEL_FIELDS : sizeof fields / sizeof fields[0];
    for (size_t i = 0; i < count; i++)
        if (fields[i].theirs != fields[i].ours)
            return error_set(error, "%s: was written with %s %llu, this run has %llu; %s", directory, fields[i].name,
                             (unsigned long long)fields[i].theirs, (unsigned long long)fields[i].ours, fields[i].why);
    if (config->eval_only) return true;
    if (m->data.bytes != data->bytes)
        return error_set(error, "%s: train_data had %llu bytes, this run's %s has %llu; the data must be the same",
                         directory, (unsigned long long)m->data.bytes, config->train_data,
                         (unsigned long long)data->bytes);
    if (m->data.hash != data->hash)
        return error_set(error, "%s: train_data had another content than this run's %s; the data must be the same",
                         directory, config->train_data);
    if (m->step > (uint64_t)config->steps)
        return error_set(error, "%s: was written after step %llu, but steps is %lld; at least that is needed",
                         directory, (unsigned long long)m->step, (long long)config->steps);
    return true;
}

// The options that differ and may: "learning_rate 0.001 -> 0.0003, ..."; "" if none. To be freed.
static inline char *manifest_changes(const Manifest *manifest, const Config *config) {
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    Config copy = *config;
    OptionTable table = config_table(&copy);
    char *json = options_to_json(&table);
    cJSON *ours = cJSON_Parse(json);
    if (out == NULL || ours == NULL) die("no memory to compare configurations");
    for (int i = 0; i < table.count; i++) {
        const Option *option = &table.options[i];
        const bool told = strcmp(option->section, "batch") == 0 || strcmp(option->section, "parallel") == 0 ||
                          strcmp(option->section, "optimizer") == 0 || strcmp(option->section, "numerics") == 0 ||
                          strcmp(option->key, "steps") == 0 || strcmp(option->key, "nproc") == 0 ||
                          strcmp(option->key, "dropout") == 0;
        if (!told) continue;
        const cJSON *before = cJSON_GetObjectItemCaseSensitive(
            cJSON_GetObjectItemCaseSensitive(manifest->config, option->section), option->key);
        const cJSON *now =
            cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(ours, option->section), option->key);
        if (cJSON_Compare(before, now, true)) continue;
        char *was = before == NULL ? NULL : cJSON_PrintUnformatted(before), *is = cJSON_PrintUnformatted(now);
        fflush(out);
        fprintf(out, "%s%s %.60s -> %.60s", length > 0 ? ", " : "", option->key, was != NULL ? was : "(none)",
                is != NULL ? is : "");
        cJSON_free(was);
        cJSON_free(is);
        fflush(out);
    }
    if (fclose(out) != 0) die("no memory to compare configurations");
    cJSON_Delete(ours);
    free(json);
    for (char *c = text; *c != '\0'; c++)
        if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
    return text;
}

// ---------------------------------------------------------------------------------------------------------------------
// The checkpoints of a directory

static inline int compare_steps(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x < y) - (x > y);
}

// The steps after which a directory has checkpoints, the newest first, to be freed; none if it is not there.
static inline uint64_t *list_steps(const char *directory, int *count) {
    uint64_t *steps = (uint64_t *)malloc(sizeof(uint64_t));
    size_t room = 1, n = 0;
    DIR *list = opendir(directory);
    for (const struct dirent *entry; list != NULL && (entry = readdir(list)) != NULL;) {
        uint64_t step;
        if (!step_of_name(entry->d_name, "", &step)) continue;
        if (n == room) steps = (uint64_t *)realloc(steps, (room *= 2) * sizeof(uint64_t));
        if (steps == NULL) die("no memory for the checkpoints of %s", directory);
        steps[n++] = step;
    }
    if (list != NULL) closedir(list);
    if (steps == NULL) die("no memory for the checkpoints of %s", directory);
    qsort(steps, n, sizeof steps[0], compare_steps);
    *count = (int)n;
    return steps;
}

// Removes a directory and the files in it; what cannot be removed stays.
static inline void remove_directory(const char *directory) {
    DIR *list = opendir(directory);
    for (const struct dirent *entry; list != NULL && (entry = readdir(list)) != NULL;)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlinkat(dirfd(list), entry->d_name, 0);
    if (list != NULL) closedir(list);
    rmdir(directory);
}

// Removes the checkpoint after `step`: it loses its name first, so that a half removed one is never taken for whole.
static inline void remove_step(const char *directory, uint64_t step) {
    char name[STEP_NAME], old[STEP_NAME];
    step_name(step, "", name);
    step_name(step, ".old", old);
    char *path = path_join(directory, "/", name), *aside = path_join(directory, "/", old);
    remove_directory(aside);
    if (rename(path, aside) == 0) remove_directory(aside);
    free(path);
    free(aside);
}

// Removes what interrupted runs have left half written or half removed.
static inline void remove_leftovers(const char *directory) {
    DIR *list = opendir(directory);
    for (const struct dirent *entry; list != NULL && (entry = readdir(list)) != NULL;) {
        uint64_t step;
        if (!step_of_name(entry->d_name, ".new", &step) && !step_of_name(entry->d_name, ".old", &step)) continue;
        char *path = path_join(directory, "/", entry->d_name);
        remove_directory(path);
        free(path);
    }
    if (list != NULL) closedir(list);
}

#endif
