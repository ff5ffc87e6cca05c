// safetensors.h: reading and writing safetensors files, in which Hugging Face and others keep tensors.
//
// The format, little-endian: 8 bytes, the length N of the header; N bytes of JSON,
//   {"__metadata__": {"key": "text"}, "NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...},
// blanks allowed after it; then the bytes of the tensors, row-major, at those offsets from the end of the header. The
// tensors cover these bytes without overlaps, gaps or a rest. A shape may be [] (one element) or have zeros (none).
//
// Files are untrusted: everything that the header says is checked when a file is opened, before anything of a tensor is
// read, and what is allocated is proportional to the header's bytes, which the file really has. Elements are read as
// fp32 from F32, F16 and BF16; tensors of the other known types are listed and can be skipped.
//
// Writing takes a table of tensors and then their elements in that order, in pieces of any size; it needs no memory
// beyond the header. As in Hugging Face's own files the header is padded by blanks to a multiple of 8 bytes.
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include "files.h"
#include "floats.h"
#include "json.h"

enum {
    SAFETENSORS_HEADER_LIMIT = 100000000, // bytes of a header, as in Hugging Face's reader
    SAFETENSORS_MAX_RANK = 8              // dimensions of a tensor
};

// The element types that the format has. Those with a FloatType can be read.
typedef struct {
    const char *name;
    int bytes;
    int float_type; // FloatType, or -1
} SafetensorsType;

static inline const SafetensorsType *safetensors_types(int *count) {
    static const SafetensorsType types[] = {
        {"F32", 4, FLOAT_F32}, {"BF16", 2, FLOAT_BF16}, {"F16", 2, FLOAT_F16}, // at the place of their FloatType
        {"F64", 8, -1},        {"I64", 8, -1},          {"I32", 4, -1},        {"I16", 2, -1}, {"I8", 1, -1},
        {"U64", 8, -1},        {"U32", 4, -1},          {"U16", 2, -1},        {"U8", 1, -1},  {"BOOL", 1, -1},
        {"F8_E4M3", 1, -1},    {"F8_E5M2", 1, -1},      {"F8_E8M0", 1, -1},    {"C64", 8, -1},
    };
    *count = (int)(sizeof types / sizeof types[0]);
    return types;
}

typedef struct {
    char *name;
    const SafetensorsType *type;
    int rank;
    uint64_t shape[SAFETENSORS_MAX_RANK];
    uint64_t elements;
    uint64_t first, bytes; // where its data begins, from the start of the file, and how long it is
} SafetensorsTensor;

typedef struct {
    InputFile file;
    int count;
    SafetensorsTensor *tensors;  // by position in the file
    SafetensorsTensor **by_name; // the same, by name
} Safetensors;

// ---------------------------------------------------------------------------------------------------------------------
// Opening a file

static inline void safetensors_close(Safetensors *st) {
    for (int i = 0; i < st->count; i++) free(st->tensors[i].name);
    free(st->tensors);
    free(st->by_name);
    input_close(&st->file);
    st->tensors = NULL;
    st->by_name = NULL;
    st->count = 0;
}

// "[2, 3]"
static inline const char *safetensors_shape_text(const SafetensorsTensor *tensor, char text[256]) {
    size_t length = (size_t)snprintf(text, 256, "[");
    for (int i = 0; i < tensor->rank; i++)
        length += (size_t)snprintf(text + length, 256 - length, "%s%llu", i > 0 ? ", " : "",
                                   (unsigned long long)tensor->shape[i]);
    snprintf(text + length, 256 - length, "]");
    return text;
}

// Sets elements and bytes from shape and type; false where they pass 2^63.
static inline bool safetensors_measure(SafetensorsTensor *tensor) {
    uint64_t elements = 1;
    bool ok = true;
    for (int i = 0; i < tensor->rank; i++) ok = !__builtin_mul_overflow(elements, tensor->shape[i], &elements) && ok;
    tensor->elements = elements;
    ok = ok && !__builtin_mul_overflow(elements, (uint64_t)tensor->type->bytes, &tensor->bytes);
    return ok && tensor->bytes <= INT64_MAX;
}

static inline bool safetensors_entry_error(const char *path, const char *name, const char *what, Error *error) {
    return error_set(error, "%s: tensor %.*s: %s", path, (int)JSON_NAME_SHOWN, name, what);
}

// Reads one entry of the header; data: the bytes that follow the header.
static inline bool safetensors_read_entry(SafetensorsTensor *tensor, const cJSON *entry, uint64_t data,
                                          const char *path, Error *error) {
    const char *name = entry->string;
    if (!cJSON_IsObject(entry)) return safetensors_entry_error(path, name, "its entry is not an object", error);
    const cJSON *type = NULL, *shape = NULL, *offsets = NULL, *item = NULL;
    cJSON_ArrayForEach(item, entry) {
        const cJSON **field = strcmp(item->string, "dtype") == 0          ? &type
                              : strcmp(item->string, "shape") == 0        ? &shape
                              : strcmp(item->string, "data_offsets") == 0 ? &offsets
                                                                          : NULL;
        if (field == NULL) return safetensors_entry_error(path, name, "its entry has an unknown key", error);
        if (*field != NULL) return safetensors_entry_error(path, name, "its entry has a key twice", error);
        *field = item;
    }
    if (!cJSON_IsString(type)) return safetensors_entry_error(path, name, "has no dtype", error);
    if (!cJSON_IsArray(shape)) return safetensors_entry_error(path, name, "has no shape", error);
    if (!cJSON_IsArray(offsets)) return safetensors_entry_error(path, name, "has no data_offsets", error);

    int types = 0;
    const SafetensorsType *known = safetensors_types(&types);
    for (int i = 0; i < types; i++)
        if (strcmp(known[i].name, type->valuestring) == 0) tensor->type = &known[i];
    if (tensor->type == NULL)
        return error_set(error, "%s: tensor %.*s: its dtype %.20s is not known", path, (int)JSON_NAME_SHOWN, name,
                         type->valuestring);
    cJSON_ArrayForEach(item, shape) {
        if (tensor->rank == SAFETENSORS_MAX_RANK)
            return safetensors_entry_error(path, name, "has more than 8 dimensions", error);
        if (!json_count(item, &tensor->shape[tensor->rank++]))
            return safetensors_entry_error(path, name, "its shape has something that is not a size", error);
    }
    char text[256];
    if (!safetensors_measure(tensor))
        return error_set(error, "%s: tensor %.*s: its shape %s is too large", path, (int)JSON_NAME_SHOWN, name,
                         safetensors_shape_text(tensor, text));
    uint64_t begin = 0, end = 0;
    const cJSON *first = offsets->child, *second = first == NULL ? NULL : first->next;
    if (second == NULL || second->next != NULL || !json_count(first, &begin) || !json_count(second, &end))
        return safetensors_entry_error(path, name, "its data_offsets are not two positions", error);
    if (begin > end || end > data)
        return error_set(
            error, "%s: tensor %.*s: its data_offsets [%llu, %llu] are not within the file's %llu bytes of data", path,
            (int)JSON_NAME_SHOWN, name, (unsigned long long)begin, (unsigned long long)end, (unsigned long long)data);
    if (end - begin != tensor->bytes)
        return error_set(error, "%s: tensor %.*s: shape %s of %s takes %llu bytes, but its data_offsets give it %llu",
                         path, (int)JSON_NAME_SHOWN, name, safetensors_shape_text(tensor, text), tensor->type->name,
                         (unsigned long long)tensor->bytes, (unsigned long long)(end - begin));
    tensor->first = begin; // from the end of the header, so far
    tensor->name = strdup(name);
    if (tensor->name == NULL) die("no memory for the names in %s", path);
    return true;
}

static inline bool safetensors_read_metadata(const cJSON *metadata, const char *path, Error *error) {
    if (!cJSON_IsObject(metadata)) return error_set(error, "%s: its __metadata__ is not an object", path);
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, metadata) {
        if (!cJSON_IsString(item))
            return error_set(error, "%s: its __metadata__ has %.*s, which is not a text", path, (int)JSON_NAME_SHOWN,
                             item->string);
    }
    return json_unique(metadata, path, "its __metadata__", error);
}

static inline int safetensors_compare_places(const void *a, const void *b) {
    const SafetensorsTensor *x = (const SafetensorsTensor *)a, *y = (const SafetensorsTensor *)b;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1; // empty tensors stand before what begins there
    return strcmp(x->name, y->name);
}

static inline int safetensors_compare_names(const void *a, const void *b) {
    return strcmp((*(SafetensorsTensor *const *)a)->name, (*(SafetensorsTensor *const *)b)->name);
}

// Reads the entries, and checks that they cover the `data` bytes after the header once.
static inline bool safetensors_read_entries(Safetensors *st, const cJSON *header, uint64_t header_end, uint64_t data,
                                            Error *error) {
    const char *path = st->file.path;
    size_t entries = 0;
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, header) entries++; // fewer than the header has bytes, so an int holds them
    st->tensors = (SafetensorsTensor *)calloc(entries + 1, sizeof(SafetensorsTensor));
    st->by_name = (SafetensorsTensor **)calloc(entries + 1, sizeof(SafetensorsTensor *));
    if (st->tensors == NULL || st->by_name == NULL) die("no memory for the %zu tensors of %s", entries, path);
    cJSON_ArrayForEach(item, header) {
        const bool is_metadata = strcmp(item->string, "__metadata__") == 0;
        if (is_metadata ? !safetensors_read_metadata(item, path, error)
                        : !safetensors_read_entry(&st->tensors[st->count], item, data, path, error))
            return false;
        st->count += !is_metadata;
    }
    qsort(st->tensors, (size_t)st->count, sizeof st->tensors[0], safetensors_compare_places);
    uint64_t covered = 0;
    for (int i = 0; i < st->count; i++) {
        SafetensorsTensor *tensor = &st->tensors[i];
        if (tensor->first < covered)
            return error_set(error, "%s: tensors %.*s and %.*s overlap", path, (int)JSON_NAME_SHOWN,
                             st->tensors[i - 1].name, (int)JSON_NAME_SHOWN, tensor->name);
        if (tensor->first > covered)
            return error_set(error, "%s: %llu bytes before tensor %.*s belong to no tensor", path,
                             (unsigned long long)(tensor->first - covered), (int)JSON_NAME_SHOWN, tensor->name);
        covered += tensor->bytes;
        tensor->first += header_end;
        st->by_name[i] = tensor;
    }
    if (covered != data)
        return error_set(error, "%s: %llu bytes at its end belong to no tensor", path,
                         (unsigned long long)(data - covered));
    qsort(st->by_name, (size_t)st->count, sizeof st->by_name[0], safetensors_compare_names);
    return true;
}

static inline bool safetensors_read_header(Safetensors *st, Error *error) {
    const InputFile *file = &st->file;
    uint64_t length = 0;
    if (file->bytes < 8)
        return error_set(error, "%s: is truncated: it has %lld bytes, the length of a safetensors header alone has 8",
                         file->path, (long long)file->bytes);
    if (!input_read(file, &length, 8, 0, error)) return false;
    if (length > SAFETENSORS_HEADER_LIMIT)
        return error_set(error,
                         "%s: is not a safetensors file: its header would have %llu bytes, %d at most are possible",
                         file->path, (unsigned long long)length, (int)SAFETENSORS_HEADER_LIMIT);
    if ((int64_t)length > file->bytes - 8)
        return error_set(error, "%s: is truncated: its header has %llu bytes, but %lld are left in the file",
                         file->path, (unsigned long long)length, (long long)(file->bytes - 8));
    char *text = (char *)malloc(length + 1);
    if (text == NULL) die("no memory for the header of %s", file->path);
    text[length] = '\0';
    cJSON *header = NULL;
    if (input_read(file, text, length, 8, error)) {
        if (text[0] != '{')
            error_set(error, "%s: is not a safetensors file: its header does not begin with {", file->path);
        else
            header = json_parse(text, length, file->path, "its header", error);
    }
    free(text);
    const uint64_t header_end = 8 + length;
    const bool ok =
        header != NULL && safetensors_read_entries(st, header, header_end, (uint64_t)file->bytes - header_end, error);
    cJSON_Delete(header);
    return ok;
}

// Opens a file and checks its header. On an error nothing remains open.
static inline bool safetensors_open(Safetensors *st, const char *path, Error *error) {
    memset(st, 0, sizeof *st);
    if (!input_open(&st->file, path, error)) return false;
    const bool ok = safetensors_read_header(st, error);
    if (!ok) safetensors_close(st);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading tensors

// The tensor of this name, or NULL.
static inline const SafetensorsTensor *safetensors_find(const Safetensors *st, const char *name) {
    int low = 0, high = st->count;
    while (low < high) {
        const int middle = low + (high - low) / 2, order = strcmp(st->by_name[middle]->name, name);
        if (order == 0) return st->by_name[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

// Reads elements [first, first + count) as fp32.   out (count)
static inline bool safetensors_read(const Safetensors *st, const SafetensorsTensor *tensor, uint64_t first,
                                    uint64_t count, float *out, Error *error) {
    if (tensor->type->float_type < 0)
        return error_set(error, "%s: tensor %.*s is of type %s; F32, F16 and BF16 can be read", st->file.path,
                         (int)JSON_NAME_SHOWN, tensor->name, tensor->type->name);
    if (first > tensor->elements || count > tensor->elements - first)
        return error_set(error, "%s: tensor %.*s has no elements %llu to %llu", st->file.path, (int)JSON_NAME_SHOWN,
                         tensor->name, (unsigned long long)first, (unsigned long long)(first + count));
    const FloatType type = (FloatType)tensor->type->float_type;
    const uint64_t size = (uint64_t)tensor->type->bytes;
    if (type == FLOAT_F32)
        return input_read(&st->file, out, count * size, (int64_t)(tensor->first + first * size), error);
    uint16_t chunk[FLOATS_CHUNK];
    for (uint64_t done = 0; done < count;) {
        const uint64_t n = floats_chunk(count - done);
        if (!input_read(&st->file, chunk, n * size, (int64_t)(tensor->first + (first + done) * size), error))
            return false;
        floats_decode(type, chunk, n, out + done);
        done += n;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

typedef struct {
    OutputFile file;
    const SafetensorsTensor *tensors; // the caller's table
    int count, current;
    uint64_t done; // bytes of the current tensor
} SafetensorsWriter;

// Describes a tensor for a writer's table.   shape (rank)
static inline SafetensorsTensor safetensors_describe(char *name, FloatType type, int rank, const uint64_t *shape) {
    SafetensorsTensor tensor;
    memset(&tensor, 0, sizeof tensor);
    int types = 0;
    tensor.name = name;
    tensor.type = &safetensors_types(&types)[type];
    tensor.rank = rank;
    for (int i = 0; i < rank; i++) tensor.shape[i] = shape[i];
    if (!safetensors_measure(&tensor)) die("tensor %s is too large for a file", name);
    return tensor;
}

static inline void safetensors_put_text(FILE *out, const char *text) {
    cJSON *item = cJSON_CreateString(text);
    char *quoted = item == NULL ? NULL : cJSON_PrintUnformatted(item);
    if (quoted == NULL) die("no memory for the header of a safetensors file");
    fputs(quoted, out);
    cJSON_free(quoted);
    cJSON_Delete(item);
}

// The header of a table, its length in front; to be freed.
static inline char *safetensors_header(const SafetensorsTensor *tensors, int count, const char *const *metadata,
                                       size_t *length) {
    char *header = NULL;
    FILE *out = open_memstream(&header, length);
    if (out == NULL) die("no memory for the header of a safetensors file");
    fwrite("\0\0\0\0\0\0\0", 1, 8, out);
    fputc('{', out);
    if (metadata != NULL) {
        fputs("\"__metadata__\":{", out);
        for (int i = 0; metadata[i] != NULL; i += 2) {
            if (i > 0) fputc(',', out);
            safetensors_put_text(out, metadata[i]);
            fputc(':', out);
            safetensors_put_text(out, metadata[i + 1]);
        }
        fputs(count > 0 ? "}," : "}", out);
    }
    uint64_t offset = 0;
    for (int i = 0; i < count; i++) {
        const SafetensorsTensor *tensor = &tensors[i];
        if (i > 0) fputc(',', out);
        safetensors_put_text(out, tensor->name);
        fprintf(out, ":{\"dtype\":\"%s\",\"shape\":[", tensor->type->name);
        for (int d = 0; d < tensor->rank; d++)
            fprintf(out, "%s%llu", d > 0 ? "," : "", (unsigned long long)tensor->shape[d]);
        fprintf(out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)offset,
                (unsigned long long)(offset + tensor->bytes));
        offset += tensor->bytes;
    }
    fputc('}', out);
    fflush(out);
    while (*length % 8 != 0) {
        fputc(' ', out);
        fflush(out);
    }
    if (fclose(out) != 0) die("no memory for the header of a safetensors file");
    const uint64_t json = *length - 8;
    memcpy(header, &json, 8);
    return header;
}

// Creates a file of these tensors and writes its header. metadata: key, text, key, text, ..., NULL; or NULL for none.
// The table must stay as it is until safetensors_finish(), which must be called, also when writing fails.
static inline bool safetensors_create(SafetensorsWriter *writer, const char *path, const SafetensorsTensor *tensors,
                                      int count, const char *const *metadata, Error *error) {
    writer->tensors = tensors;
    writer->count = count;
    writer->current = 0;
    writer->done = 0;
    if (!output_open(&writer->file, path, error)) return false;
    size_t length = 0;
    char *header = safetensors_header(tensors, count, metadata, &length);
    const bool ok = output_write(&writer->file, header, length, error);
    free(header);
    return ok;
}

// Bytes that the current tensor still takes; 0 when all tensors are complete.
static inline uint64_t safetensors_room(SafetensorsWriter *writer) {
    while (writer->current < writer->count && writer->done == writer->tensors[writer->current].bytes) {
        writer->current++;
        writer->done = 0;
    }
    return writer->current < writer->count ? writer->tensors[writer->current].bytes - writer->done : 0;
}

// Appends bytes to the current tensor, as they are to stand in the file; none may pass its end.
static inline bool safetensors_write_bytes(SafetensorsWriter *writer, const void *data, uint64_t bytes, Error *error) {
    if (bytes > safetensors_room(writer)) die("%s: more bytes than its tensor has", writer->file.path);
    writer->done += bytes;
    return output_write(&writer->file, data, bytes, error);
}

// Appends elements to the current tensor, converted from fp32 to its type (F32, BF16 or F16); none may pass its end.
static inline bool safetensors_write(SafetensorsWriter *writer, const float *values, uint64_t count, Error *error) {
    uint16_t chunk[FLOATS_CHUNK];
    for (uint64_t done = 0; done < count;) {
        if (safetensors_room(writer) == 0) die("%s: more elements than its tensors have", writer->file.path);
        const FloatType type = (FloatType)writer->tensors[writer->current].type->float_type;
        if (type == FLOAT_F32) return safetensors_write_bytes(writer, values + done, (count - done) * 4, error);
        const uint64_t n = floats_chunk(count - done);
        floats_encode(type, values + done, n, chunk);
        if (!safetensors_write_bytes(writer, chunk, n * 2, error)) return false;
        done += n;
    }
    return true;
}

// Ends the file: true if it is complete and has reached the disk. What stopped its writer early is kept as the error.
static inline bool safetensors_finish(SafetensorsWriter *writer, Error *error) {
    if (!writer->file.failed && safetensors_room(writer) > 0) {
        error_set(error, "%s: tensor %s was not written to its end", writer->file.path,
                  writer->tensors[writer->current].name);
        writer->file.failed = true;
    }
    return output_finish(&writer->file, error);
}

#endif
