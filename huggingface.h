// huggingface.h: directories of GPT-2 models as Hugging Face's transformers has them, read and written.
//
// Such a directory holds config.json (the shape, and what sets a model apart from GPT-2, which is refused by name) and
// model.safetensors, or model.safetensors.index.json, whose weight_map names several such files. Tensors are named as
// in HUGGINGFACE_BLOCK_NAMES, all with or all without "transformer." in front, in fp32, bf16 or fp16. The four matrices
// of a block belong to Conv1D layers and are stored (inputs, outputs), the transpose of ours; c_attn's outputs are
// query, key, value, each (heads, head_dim), as in layout.h. The head is tied: lm_head.weight may be there if it equals
// wte.weight. The buffers attn.bias and attn.masked_bias hold the causal mask and are ignored; anything else that is
// not a tensor of the model is an error.
//
// A block of rows of the last matrix is kept, transposed, so reading one in order touches the file in long pieces.
// What is written loads in transformers: names with "transformer.", sorted, without lm_head.weight.
#ifndef HUGGINGFACE_H
#define HUGGINGFACE_H

#include <dirent.h>
#include "safetensors.h"
#include "weights_kind.h"

enum {
    HUGGINGFACE_NAME = 64,         // bytes of a tensor's name
    HUGGINGFACE_FILES = 256,       // files of a model, at most: they are all open
    HUGGINGFACE_WINDOW = 16 << 20, // elements of the block of rows that is kept
    HUGGINGFACE_LINES = 16         // lines of a file that are transposed at a time
};

static const char *const HUGGINGFACE_BLOCK_NAMES[BLOCK_TENSORS] = { // in the order of BlockTensor
    "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight",
    "attn.c_attn.bias",   "mlp.c_fc.bias",      "ln_1.weight",     "ln_1.bias",
    "attn.c_proj.bias",   "ln_2.weight",        "ln_2.bias",       "mlp.c_proj.bias"};

// Where a tensor of the model is.
typedef struct {
    const Safetensors *file;
    const SafetensorsTensor *tensor;
} HuggingfacePlace;

typedef struct {
    Safetensors *files;
    int n_files;
    HuggingfacePlace *places; // by tensor id
    // Rows [window_first, window_first + window_rows) of matrix window_id, (outputs, inputs).
    float *window;
    size_t window_limit; // elements it may hold; a row at least
    size_t window_room;  // elements there is memory for
    int window_id;       // -1: none
    size_t window_first, window_rows;
} Huggingface;

static inline const char *huggingface_name(char name[HUGGINGFACE_NAME], const char *prefix, const ModelShape *shape,
                                           int id) {
    const int block = id - 2, last = BLOCK_TENSORS * shape->n_layer;
    if (block < 0)
        snprintf(name, HUGGINGFACE_NAME, "%s%s", prefix, id == 0 ? "wte.weight" : "wpe.weight");
    else if (block < last)
        snprintf(name, HUGGINGFACE_NAME, "%sh.%d.%s", prefix, block / BLOCK_TENSORS,
                 HUGGINGFACE_BLOCK_NAMES[block % BLOCK_TENSORS]);
    else
        snprintf(name, HUGGINGFACE_NAME, "%s%s", prefix, block - last == LNF_WEIGHT ? "ln_f.weight" : "ln_f.bias");
    return name;
}

// The shape that a tensor has in a file.
static inline int huggingface_shape(uint64_t shape[2], const ModelShape *model, const Tensor *tensor) {
    const size_t elements = weights_elements(tensor), inputs = weights_inputs(model, tensor->id);
    const size_t C = (size_t)model->n_embd;
    if (!tensor->matrix) {
        shape[0] = elements;
        return 1;
    }
    shape[0] = inputs > 0 ? inputs : elements / C; // embeddings are not transposed
    shape[1] = inputs > 0 ? elements / inputs : C;
    return 2;
}

// ---------------------------------------------------------------------------------------------------------------------
// config.json

static inline bool huggingface_config_count(const cJSON *config, const char *key, const char *path, int64_t *value,
                                            Error *error) {
    uint64_t count = 0;
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(config, key);
    if (item == NULL) return error_set(error, "%s: %s is missing", path, key);
    if (!json_count(item, &count)) return error_set(error, "%s: %s is not a whole number, 0 or more", path, key);
    *value = (int64_t)count;
    return true;
}

// What transformers can vary and GPT-2 has not. A key that is missing means the default, which is GPT-2's.
static inline bool huggingface_check_config(const cJSON *config, const ModelShape *shape, const char *path,
                                            Error *error) {
    typedef struct {
        const char *key;
        const char *values; // "a|b": one of these texts, "true", "false", or NULL: the number
        double number;
    } Needed;
    const Needed needed[] = {
        {"model_type", "gpt2", 0},
        {"activation_function", "gelu_new|gelu_pytorch_tanh", 0}, // GELU's approximation by tanh
        {"n_inner", NULL, 4.0 * shape->n_embd},
        {"layer_norm_epsilon", NULL, 1e-5},
        {"scale_attn_weights", "true", 0},
        {"scale_attn_by_inverse_layer_idx", "false", 0},
        {"add_cross_attention", "false", 0},
        {"tie_word_embeddings", "true", 0},
    };
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(config, needed[i].key);
        if (item == NULL || cJSON_IsNull(item)) continue;
        const char *text = cJSON_IsString(item) ? item->valuestring : cJSON_IsTrue(item) ? "true" : "false";
        const bool is_text = cJSON_IsString(item) || cJSON_IsBool(item);
        const bool ok = needed[i].values != NULL
                            ? is_text && option_is_choice(needed[i].values, text)
                            : cJSON_IsNumber(item) && fabs(item->valuedouble - needed[i].number) <= 1e-9;
        if (ok) continue;
        char number[32];
        return error_set(error, "%s: %s is not %s, so this is not a GPT-2", path, needed[i].key,
                         needed[i].values != NULL ? needed[i].values : option_number_text(number, needed[i].number));
    }
    return true;
}

static inline bool huggingface_read_config(const char *directory, ModelShape *shape, Error *error) {
    char *path = path_join(directory, "/", "config.json");
    cJSON *config = json_read_file(path, error);
    int64_t n_layer = 0, n_head = 0, n_embd = 0, positions = 0, vocab_size = 0;
    const bool ok = config != NULL && huggingface_config_count(config, "n_layer", path, &n_layer, error) &&
                    huggingface_config_count(config, "n_head", path, &n_head, error) &&
                    huggingface_config_count(config, "n_embd", path, &n_embd, error) &&
                    huggingface_config_count(config, "n_positions", path, &positions, error) &&
                    huggingface_config_count(config, "vocab_size", path, &vocab_size, error) &&
                    weights_take_shape(shape, path, n_layer, n_head, n_embd, positions, vocab_size, error) &&
                    huggingface_check_config(config, shape, path, error);
    cJSON_Delete(config);
    free(path);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// Opening

static inline bool huggingface_open_file(Huggingface *hf, const char *directory, const char *name, Error *error) {
    char *path = path_join(directory, "/", name);
    const bool ok = safetensors_open(&hf->files[hf->n_files], path, error);
    hf->n_files += ok;
    free(path);
    return ok;
}

// Opens the files that the index names, each once. A name is that of a file beside the index, and no path.
static inline bool huggingface_open_index(Huggingface *hf, const char *directory, const char *path, Error *error) {
    cJSON *index = json_read_file(path, error);
    if (index == NULL) return false;
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(index, "weight_map"), *item = NULL;
    const char *names[HUGGINGFACE_FILES];
    bool ok = cJSON_IsObject(map) || error_set(error, "%s: has no weight_map", path);
    cJSON_ArrayForEach(item, map) {
        if (!ok) break;
        const char *name = cJSON_IsString(item) ? item->valuestring : "";
        bool known = false;
        for (int i = hf->n_files - 1; i >= 0 && !known; i--) known = strcmp(names[i], name) == 0;
        if (known) continue;
        if (name[0] == '\0' || name[0] == '.' || strchr(name, '/') != NULL)
            ok = error_set(error, "%s: \"%.*s\" is not the name of a file in this directory", path,
                           (int)JSON_NAME_SHOWN, name);
        else if (hf->n_files == HUGGINGFACE_FILES)
            ok = error_set(error, "%s: names more than %d files", path, (int)HUGGINGFACE_FILES);
        else {
            names[hf->n_files] = name;
            ok = huggingface_open_file(hf, directory, name, error);
        }
    }
    cJSON_Delete(index);
    return ok;
}

static inline bool huggingface_open_files(Huggingface *hf, const char *directory, Error *error) {
    char *single = path_join(directory, "/", "model.safetensors");
    char *index = path_join(single, "", ".index.json");
    struct stat status;
    bool ok;
    if (stat(single, &status) != 0 && stat(index, &status) == 0)
        ok = huggingface_open_index(hf, directory, index, error);
    else
        ok = huggingface_open_file(hf, directory, "model.safetensors", error);
    free(single);
    free(index);
    return ok;
}

// Finds a tensor in the files. False only where two files have it.
static inline bool huggingface_find(const Huggingface *hf, const char *name, HuggingfacePlace *place, Error *error) {
    place->tensor = NULL;
    for (int i = 0; i < hf->n_files; i++) {
        const SafetensorsTensor *found = safetensors_find(&hf->files[i], name);
        if (found == NULL) continue;
        if (place->tensor != NULL)
            return error_set(error, "%s: has tensor %s, which %s has too", hf->files[i].file.path, name,
                             place->file->file.path);
        place->file = &hf->files[i];
        place->tensor = found;
    }
    return true;
}

static inline bool huggingface_check_tensor(const HuggingfacePlace *place, int rank, const uint64_t *shape,
                                            Error *error) {
    const SafetensorsTensor *tensor = place->tensor;
    bool same = tensor->rank == rank;
    for (int i = 0; i < rank && same; i++) same = tensor->shape[i] == shape[i];
    char has[256], needs[256];
    if (!same) {
        SafetensorsTensor needed = *tensor;
        needed.rank = rank;
        for (int i = 0; i < rank; i++) needed.shape[i] = shape[i];
        return error_set(error, "%s: tensor %s has shape %s, config.json makes it %s", place->file->file.path,
                         tensor->name, safetensors_shape_text(tensor, has), safetensors_shape_text(&needed, needs));
    }
    if (tensor->type->float_type < 0)
        return error_set(error, "%s: tensor %s is of type %s; F32, F16 and BF16 can be read", place->file->file.path,
                         tensor->name, tensor->type->name);
    return true;
}

// A head of its own must be the embedding, which is all that this program has.
static inline bool huggingface_check_head(const HuggingfacePlace *wte, const HuggingfacePlace *head, Error *error) {
    float *a = (float *)malloc(2 * FLOATS_CHUNK * sizeof(float));
    if (a == NULL) die("no memory to read %s", wte->file->file.path);
    float *b = a + FLOATS_CHUNK;
    bool ok = huggingface_check_tensor(head, wte->tensor->rank, wte->tensor->shape, error);
    for (uint64_t first = 0; first < wte->tensor->elements && ok; first += FLOATS_CHUNK) {
        const uint64_t n = floats_chunk(wte->tensor->elements - first);
        ok = safetensors_read(wte->file, wte->tensor, first, n, a, error) &&
             safetensors_read(head->file, head->tensor, first, n, b, error);
        if (ok && memcmp(a, b, n * sizeof(float)) != 0)
            ok = error_set(error, "%s: lm_head.weight differs from %s; only a tied head is supported",
                           head->file->file.path, wte->tensor->name);
    }
    free(a);
    return ok;
}

static inline bool huggingface_is_buffer(const char *name) {
    static const char *const ends[] = {".attn.bias", ".attn.masked_bias"};
    for (int i = 0; i < 2; i++) {
        const size_t length = strlen(name), end = strlen(ends[i]);
        if (length > end && strcmp(name + length - end, ends[i]) == 0) return true;
    }
    return false;
}

// Finds every tensor of the model, and checks that the files hold nothing else that matters.
static inline bool huggingface_place_tensors(Weights *weights, const char *prefix, Error *error) {
    Huggingface *hf = (Huggingface *)weights->state;
    const ModelShape *shape = &weights->shape;
    const int n = weights_tensors(shape);
    char name[HUGGINGFACE_NAME];
    hf->places = (HuggingfacePlace *)calloc((size_t)n, sizeof(HuggingfacePlace));
    if (hf->places == NULL) die("no memory for the tensors of %s", weights->path);
    for (int id = 0; id < n; id++) {
        HuggingfacePlace *place = &hf->places[id];
        uint64_t dimensions[2];
        const int rank = huggingface_shape(dimensions, shape, weights_tensor(&weights->layout, id));
        if (!huggingface_find(hf, huggingface_name(name, prefix, shape, id), place, error)) return false;
        if (place->tensor == NULL) return error_set(error, "%s: tensor %s is missing", weights->path, name);
        if (!huggingface_check_tensor(place, rank, dimensions, error)) return false;
    }
    HuggingfacePlace head;
    if (!huggingface_find(hf, "lm_head.weight", &head, error)) return false;
    if (head.tensor != NULL && !huggingface_check_head(&hf->places[0], &head, error)) return false;
    // All that was found and what is ignored, against all that there is.
    int known = n + (head.tensor != NULL), all = 0;
    for (int f = 0; f < hf->n_files; f++) {
        all += hf->files[f].count;
        for (int i = 0; i < hf->files[f].count; i++) known += huggingface_is_buffer(hf->files[f].tensors[i].name);
    }
    if (known == all) return true;
    // Which one is it? Rarely asked, so it may take long.
    for (int f = 0; f < hf->n_files; f++)
        for (int i = 0; i < hf->files[f].count; i++) {
            const SafetensorsTensor *tensor = &hf->files[f].tensors[i];
            bool is_known = tensor == head.tensor || huggingface_is_buffer(tensor->name);
            for (int id = 0; id < n && !is_known; id++) is_known = tensor == hf->places[id].tensor;
            if (!is_known)
                return error_set(error, "%s: has tensor %.*s, which a GPT-2 of n_layer %d does not have",
                                 hf->files[f].file.path, (int)JSON_NAME_SHOWN, tensor->name, shape->n_layer);
        }
    return true;
}

static inline bool huggingface_recognises(const char *path) {
    char *config = path_join(path, "/", "config.json");
    struct stat status;
    const bool there = stat(config, &status) == 0;
    free(config);
    return there;
}

static inline bool huggingface_open(Weights *weights, Error *error) {
    Huggingface *hf = (Huggingface *)calloc(1, sizeof(Huggingface));
    if (hf == NULL) die("no memory to open %s", weights->path);
    weights->state = hf;
    hf->window_id = -1;
    hf->window_limit = HUGGINGFACE_WINDOW;
    hf->files = (Safetensors *)calloc(HUGGINGFACE_FILES, sizeof(Safetensors));
    if (hf->files == NULL) die("no memory to open %s", weights->path);
    ModelShape shape;
    if (!huggingface_read_config(weights->path, &shape, error) || !huggingface_open_files(hf, weights->path, error))
        return false;
    int64_t tensors = 0;
    for (int f = 0; f < hf->n_files; f++) tensors += hf->files[f].count;
    if (tensors < weights_tensors(&shape))
        return error_set(error, "%s: holds %lld tensors, but a GPT-2 of n_layer %d has %d", weights->path,
                         (long long)tensors, shape.n_layer, weights_tensors(&shape));
    weights_set_shape(weights, &shape);
    HuggingfacePlace wte;
    if (!huggingface_find(hf, "transformer.wte.weight", &wte, error)) return false;
    return huggingface_place_tensors(weights, wte.tensor != NULL ? "transformer." : "", error);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

// Fills the window with rows of a matrix, the first of them `row`, as many as it may hold.
static inline bool huggingface_fill_window(Huggingface *hf, int id, size_t row, size_t outputs, size_t inputs,
                                           Error *error) {
    const HuggingfacePlace *place = &hf->places[id];
    const size_t most = hf->window_limit < inputs ? 1 : hf->window_limit / inputs, left = outputs - row;
    const size_t rows = left < most ? left : most;
    if (rows * inputs > hf->window_room) {
        free(hf->window);
        hf->window_room = rows * inputs;
        hf->window = (float *)malloc(hf->window_room * sizeof(float));
        if (hf->window == NULL) die("no memory for %zu elements of %s", hf->window_room, place->tensor->name);
    }
    float *lines = (float *)malloc(HUGGINGFACE_LINES * rows * sizeof(float));
    if (lines == NULL) die("no memory for %zu rows of %s", rows, place->tensor->name);
    hf->window_id = -1;
    bool ok = true;
    for (size_t k = 0; k < inputs && ok; k += HUGGINGFACE_LINES) {
        const size_t n = inputs - k < (size_t)HUGGINGFACE_LINES ? inputs - k : (size_t)HUGGINGFACE_LINES;
        for (size_t i = 0; i < n && ok; i++)
            ok = safetensors_read(place->file, place->tensor, (k + i) * outputs + row, rows, lines + i * rows, error);
        for (size_t r = 0; r < rows && ok; r++)
            for (size_t i = 0; i < n; i++) hf->window[r * inputs + k + i] = lines[i * rows + r];
    }
    free(lines);
    if (ok) hf->window_id = id;
    hf->window_first = row;
    hf->window_rows = rows;
    return ok;
}

static inline bool huggingface_read(Weights *weights, const Tensor *tensor, size_t first, size_t count, float *out,
                                    Error *error) {
    Huggingface *hf = (Huggingface *)weights->state;
    const HuggingfacePlace *place = &hf->places[tensor->id];
    const size_t inputs = weights_inputs(&weights->shape, tensor->id);
    if (inputs == 0) return safetensors_read(place->file, place->tensor, first, count, out, error);
    while (count > 0) {
        const size_t row = first / inputs;
        if (hf->window_id != tensor->id || row < hf->window_first || row >= hf->window_first + hf->window_rows) {
            if (!huggingface_fill_window(hf, tensor->id, row, weights_elements(tensor) / inputs, inputs, error))
                return false;
        }
        const size_t begin = first - hf->window_first * inputs, room = hf->window_rows * inputs - begin;
        const size_t n = count < room ? count : room;
        memcpy(out, hf->window + begin, n * sizeof(float));
        first += n;
        out += n;
        count -= n;
    }
    return true;
}

static inline void huggingface_close(Weights *weights) {
    Huggingface *hf = (Huggingface *)weights->state;
    if (hf == NULL) return;
    for (int i = 0; i < hf->n_files; i++) safetensors_close(&hf->files[i]);
    free(hf->files);
    free(hf->places);
    free(hf->window);
    free(hf);
}

static const WeightsKind HUGGINGFACE_KIND = {"a Hugging Face directory (config.json and model.safetensors)",
                                             huggingface_recognises,
                                             huggingface_open,
                                             NULL,
                                             huggingface_read,
                                             huggingface_close};

// ---------------------------------------------------------------------------------------------------------------------
// Writing

// Appends a tensor: as it is, a chunk at a time; a matrix of a block as a whole, transposed.
static inline bool huggingface_write_tensor(SafetensorsWriter *writer, const ModelShape *shape, const Tensor *tensor,
                                            WeightsRead read, void *context, Error *error) {
    const size_t elements = weights_elements(tensor), inputs = weights_inputs(shape, tensor->id);
    const size_t outputs = inputs > 0 ? elements / inputs : 0;
    const size_t chunk = inputs > 0 || elements < (size_t)WEIGHTS_CHUNK ? elements : (size_t)WEIGHTS_CHUNK;
    float *buffer = (float *)malloc((chunk + HUGGINGFACE_LINES * outputs) * sizeof(float));
    if (buffer == NULL) die("no memory for the %zu elements of %s", chunk, tensor->name);
    float *lines = buffer + chunk;
    bool ok = true;
    for (size_t first = 0; first < elements && ok; first += chunk) {
        const size_t n = elements - first < chunk ? elements - first : chunk;
        ok = read(context, tensor->id, first, n, buffer, error);
        if (ok && inputs == 0) ok = safetensors_write(writer, buffer, n, error);
    }
    for (size_t k = 0; k < inputs && ok; k += HUGGINGFACE_LINES) {
        const size_t n = inputs - k < (size_t)HUGGINGFACE_LINES ? inputs - k : (size_t)HUGGINGFACE_LINES;
        for (size_t r = 0; r < outputs; r++)
            for (size_t i = 0; i < n; i++) lines[i * outputs + r] = buffer[r * inputs + k + i];
        ok = safetensors_write(writer, lines, n * outputs, error);
    }
    free(buffer);
    return ok;
}

// A tensor's id and its place in the sorted file.
typedef struct {
    char name[HUGGINGFACE_NAME];
    int id;
} HuggingfaceEntry;

static inline int huggingface_compare_entries(const void *a, const void *b) {
    return strcmp(((const HuggingfaceEntry *)a)->name, ((const HuggingfaceEntry *)b)->name);
}

static inline bool huggingface_write_weights(const char *path, const ModelShape *shape, FloatType type,
                                             WeightsRead read, void *context, Error *error) {
    Layout whole;
    const LayoutCut cut = layout_whole(1);
    layout_init(&whole, shape, &cut);
    const int n = weights_tensors(shape);
    HuggingfaceEntry *entries = (HuggingfaceEntry *)malloc((size_t)n * sizeof(HuggingfaceEntry));
    SafetensorsTensor *tensors = (SafetensorsTensor *)malloc((size_t)n * sizeof(SafetensorsTensor));
    if (entries == NULL || tensors == NULL) die("no memory for the names of %d tensors", n);
    for (int id = 0; id < n; id++) {
        huggingface_name(entries[id].name, "transformer.", shape, id);
        entries[id].id = id;
    }
    qsort(entries, (size_t)n, sizeof entries[0], huggingface_compare_entries);
    for (int i = 0; i < n; i++) {
        uint64_t dimensions[2];
        const int rank = huggingface_shape(dimensions, shape, weights_tensor(&whole, entries[i].id));
        tensors[i] = safetensors_describe(entries[i].name, type, rank, dimensions);
    }
    static const char *const metadata[] = {"format", "pt", NULL}; // transformers insists on it
    SafetensorsWriter writer;
    bool ok = safetensors_create(&writer, path, tensors, n, metadata, error);
    for (int i = 0; i < n && ok; i++)
        ok = huggingface_write_tensor(&writer, shape, weights_tensor(&whole, entries[i].id), read, context, error);
    ok = safetensors_finish(&writer, error) && ok;
    free(entries);
    free(tensors);
    layout_free(&whole);
    return ok;
}

static inline bool huggingface_write_config(const char *path, const ModelShape *shape, FloatType type, Error *error) {
    // GPT-2's end-of-text token; other vocabularies have none that we know, and transformers would assume this one.
    const char *end_of_text = shape->vocab_size == 50257 ? "50256" : "null";
    static const char *const types[] = {"float32", "bfloat16", "float16"}; // by FloatType
    char text[1024];
    const int length = snprintf(text, sizeof text,
                                "{\n"
                                "  \"activation_function\": \"gelu_new\",\n"
                                "  \"architectures\": [\"GPT2LMHeadModel\"],\n"
                                "  \"attn_pdrop\": 0.0,\n"
                                "  \"bos_token_id\": %s,\n"
                                "  \"embd_pdrop\": 0.0,\n"
                                "  \"eos_token_id\": %s,\n"
                                "  \"initializer_range\": 0.02,\n"
                                "  \"layer_norm_epsilon\": 1e-05,\n"
                                "  \"model_type\": \"gpt2\",\n"
                                "  \"n_ctx\": %d,\n"
                                "  \"n_embd\": %d,\n"
                                "  \"n_head\": %d,\n"
                                "  \"n_inner\": null,\n"
                                "  \"n_layer\": %d,\n"
                                "  \"n_positions\": %d,\n"
                                "  \"resid_pdrop\": 0.0,\n"
                                "  \"tie_word_embeddings\": true,\n"
                                "  \"torch_dtype\": \"%s\",\n"
                                "  \"vocab_size\": %d\n"
                                "}\n",
                                end_of_text, end_of_text, shape->context_length, shape->n_embd, shape->n_head,
                                shape->n_layer, shape->context_length, types[type], shape->vocab_size);
    OutputFile file;
    const bool ok = output_open(&file, path, error) && output_write(&file, text, (size_t)length, error);
    return output_finish(&file, error) && ok;
}

// Whether a config.json is that of a GPT-2.
static inline bool huggingface_is_gpt2(const char *directory) {
    Error unread = {""};
    char *path = path_join(directory, "/", "config.json");
    cJSON *config = json_read_file(path, &unread);
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(config, "model_type");
    const bool is_gpt2 = cJSON_IsString(type) && strcmp(type->valuestring, "gpt2") == 0;
    cJSON_Delete(config);
    free(path);
    return is_gpt2;
}

// Whether a directory may be exported to: there is none, it is empty, or it holds a GPT-2, or what an export that was
// interrupted has left: model.safetensors gets its name before config.json does.
static inline bool huggingface_may_replace(const char *directory, Error *error) {
    enum { CONFIG, WEIGHTS, CONFIG_NEW, WEIGHTS_NEW, OWN };
    static const char *const own[OWN] = {"config.json", "model.safetensors", "config.json.tmp",
                                         "model.safetensors.tmp"};
    DIR *list = opendir(directory);
    if (list == NULL)
        return errno == ENOENT || error_set(error, "%s: cannot be exported to: %s", directory, strerror(errno));
    char other[JSON_NAME_SHOWN] = "";
    bool has[OWN] = {false, false, false, false};
    for (const struct dirent *entry; (entry = readdir(list)) != NULL;) {
        bool known = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
        for (int i = 0; i < OWN; i++)
            if (strcmp(entry->d_name, own[i]) == 0) known = has[i] = true;
        if (!known) snprintf(other, sizeof other, "%.*s", (int)JSON_NAME_SHOWN - 1, entry->d_name);
    }
    closedir(list);
    const bool whole = has[CONFIG] && has[WEIGHTS] && huggingface_is_gpt2(directory);
    const char *foreign = whole                              ? ""
                          : other[0] != '\0'                 ? other
                          : has[CONFIG]                      ? own[CONFIG]
                          : has[WEIGHTS] && !has[CONFIG_NEW] ? own[WEIGHTS]
                                                             : "";
    return foreign[0] == '\0' ||
           error_set(error, "%s: holds %s and no export: it is not overwritten; name an empty directory, or a new one",
                     directory, foreign);
}

// Writes a model as a Hugging Face directory, in fp32, bf16 or fp16; makes the directory if there is none. Each file
// appears only when complete. Memory: the largest matrix of a block, in fp32.
static inline bool huggingface_export(const char *directory, const ModelShape *shape, FloatType type, WeightsRead read,
                                      void *context, Error *error) {
    const bool made = mkdir(directory, 0755) == 0;
    if (!made && errno != EEXIST) return error_set(error, "%s: cannot be made: %s", directory, strerror(errno));
    char *weights = path_join(directory, "/", "model.safetensors"), *weights_new = path_join(weights, ".", "tmp");
    char *config = path_join(directory, "/", "config.json"), *config_new = path_join(config, ".", "tmp");
    const bool ok = huggingface_write_weights(weights_new, shape, type, read, context, error) &&
                    huggingface_write_config(config_new, shape, type, error) &&
                    file_publish(weights_new, weights, error) && file_publish(config_new, config, error);
    if (!ok) {
        unlink(weights_new);
        unlink(config_new);
        if (made) rmdir(directory);
    }
    free(weights);
    free(weights_new);
    free(config);
    free(config_new);
    return ok;
}

#endif
