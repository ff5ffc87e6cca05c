// llmc.h: model files of llm.c, read and written.
//
// The format, little-endian: a header of 256 int32: magic 20240326; version, 3 for fp32 and 5 for bf16; context length;
// vocabulary V; layers L; heads; width C; padded vocabulary Vp; zeros. Then all tensors, without padding between them:
// wte (Vp, C) and wpe; then of every tensor of a block all L layers, in the order of LLMC_BLOCK_ORDER; then the last
// layer norm. Matrices are (outputs, inputs), as in layout.h. Rows V to Vp of wte belong to no token: they are skipped
// when read, and written as zeros, Vp being the next multiple of 128.
#ifndef LLMC_H
#define LLMC_H

#include "weights_kind.h"

enum {
    LLMC_MAGIC = 20240326,
    LLMC_VERSION_FP32 = 3,
    LLMC_VERSION_BF16 = 5,
    LLMC_HEADER_INTS = 256,
    LLMC_HEADER_BYTES = 256 * 4,
    LLMC_VOCAB_MULTIPLE = 128
};

static const BlockTensor LLMC_BLOCK_ORDER[BLOCK_TENSORS] = {LN1_WEIGHT,     LN1_BIAS,     QKV_WEIGHT,     QKV_BIAS,
                                                            ATTPROJ_WEIGHT, ATTPROJ_BIAS, LN2_WEIGHT,     LN2_BIAS,
                                                            MLP_WEIGHT,     MLP_BIAS,     MLPPROJ_WEIGHT, MLPPROJ_BIAS};

typedef struct {
    InputFile file;
    FloatType type;
    size_t padded_vocab;
} Llmc;

// Elements before a tensor in the file.
static inline size_t llmc_place(const Layout *whole, size_t padded_vocab, int id) {
    const size_t L = (size_t)whole->shape.n_layer, C = (size_t)whole->shape.n_embd;
    const int block = id - 2, last = 2 + BLOCK_TENSORS * whole->shape.n_layer;
    if (id == 0) return 0;
    size_t place = padded_vocab * C;
    if (id == 1) return place;
    place += (size_t)whole->shape.context_length * C;
    for (int i = 0; i < BLOCK_TENSORS; i++) {
        const int k = (int)LLMC_BLOCK_ORDER[i];
        const size_t elements = weights_elements(weights_tensor(whole, 2 + k));
        if (id < last && block % BLOCK_TENSORS == k) return place + (size_t)(block / BLOCK_TENSORS) * elements;
        place += L * elements;
    }
    return place + (id == last ? 0 : C);
}

static inline bool llmc_recognises(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISREG(status.st_mode);
}

static inline bool llmc_open(Weights *weights, Error *error) {
    Llmc *llmc = (Llmc *)calloc(1, sizeof(Llmc));
    if (llmc == NULL) die("no memory to open %s", weights->path);
    llmc->file.fd = -1;
    weights->state = llmc;
    const char *path = weights->path;
    int32_t header[LLMC_HEADER_INTS];
    if (!input_open(&llmc->file, path, error)) return false;
    if (llmc->file.bytes < LLMC_HEADER_BYTES)
        return error_set(error, "%s: is truncated: it has %lld bytes, the header of an llm.c model alone has %d", path,
                         (long long)llmc->file.bytes, (int)LLMC_HEADER_BYTES);
    if (!input_read(&llmc->file, header, sizeof header, 0, error)) return false;
    if (__builtin_bswap32((uint32_t)header[0]) == LLMC_MAGIC)
        return error_set(error, "%s: is an llm.c model in the other byte order; write it little-endian", path);
    if (header[0] != LLMC_MAGIC)
        return error_set(error, "%s: is not an llm.c model: its first number is %d, not %d", path, header[0],
                         (int)LLMC_MAGIC);
    if (header[1] != LLMC_VERSION_FP32 && header[1] != LLMC_VERSION_BF16)
        return error_set(error, "%s: is an llm.c model of version %d; versions 3 (fp32) and 5 (bf16) are known", path,
                         header[1]);
    llmc->type = header[1] == LLMC_VERSION_FP32 ? FLOAT_F32 : FLOAT_BF16;
    ModelShape shape;
    if (!weights_take_shape(&shape, path, header[4], header[5], header[6], header[2], header[3], error)) return false;
    if (header[7] < header[3])
        return error_set(error, "%s: its padded vocabulary is %d, smaller than its vocabulary of %d", path, header[7],
                         header[3]);
    llmc->padded_vocab = (size_t)header[7];
    // Far below 2^63: the ranges of a shape see to that.
    const size_t elements =
        model_parameters(&shape) + (llmc->padded_vocab - (size_t)shape.vocab_size) * (size_t)shape.n_embd;
    const int64_t expected = LLMC_HEADER_BYTES + (int64_t)(elements * float_type_size(llmc->type));
    if (llmc->file.bytes != expected)
        return error_set(error, "%s: is %s: its header says %zu parameters, so %lld bytes, but it has %lld", path,
                         llmc->file.bytes < expected ? "truncated" : "foreign", elements, (long long)expected,
                         (long long)llmc->file.bytes);
    weights_set_shape(weights, &shape);
    return true;
}

static inline bool llmc_read(Weights *weights, const Tensor *tensor, size_t first, size_t count, float *out,
                             Error *error) {
    const Llmc *llmc = (const Llmc *)weights->state;
    const size_t size = float_type_size(llmc->type);
    size_t place = llmc_place(&weights->layout, llmc->padded_vocab, tensor->id) + first;
    if (llmc->type == FLOAT_F32)
        return input_read(&llmc->file, out, count * size, LLMC_HEADER_BYTES + (int64_t)(place * size), error);
    uint16_t chunk[FLOATS_CHUNK];
    for (size_t n; count > 0; out += n, place += n, count -= n) {
        n = floats_chunk(count);
        if (!input_read(&llmc->file, chunk, n * size, LLMC_HEADER_BYTES + (int64_t)(place * size), error)) return false;
        floats_decode(llmc->type, chunk, n, out);
    }
    return true;
}

static inline void llmc_close(Weights *weights) {
    Llmc *llmc = (Llmc *)weights->state;
    if (llmc != NULL) input_close(&llmc->file);
    free(llmc);
}

static const WeightsKind LLMC_KIND = {"an llm.c model file", llmc_recognises, llmc_open, NULL, llmc_read, llmc_close};

// ---------------------------------------------------------------------------------------------------------------------
// Writing

// Appends a tensor, asking for a chunk at a time.   buffer, raw (WEIGHTS_CHUNK)
static inline bool llmc_write_tensor(OutputFile *file, const Tensor *tensor, FloatType type, WeightsRead read,
                                     void *context, float *buffer, void *raw, Error *error) {
    const size_t elements = weights_elements(tensor);
    for (size_t first = 0; first < elements; first += WEIGHTS_CHUNK) {
        const size_t left = elements - first, n = left < (size_t)WEIGHTS_CHUNK ? left : (size_t)WEIGHTS_CHUNK;
        if (!read(context, tensor->id, first, n, buffer, error)) return false;
        floats_encode(type, buffer, n, raw);
        if (!output_write(file, raw, n * float_type_size(type), error)) return false;
    }
    return true;
}

// Whether a file may be replaced: nothing is there, or a model of llm.c, or the beginning of one that was interrupted.
static inline bool llmc_is_ours(const char *path, bool may_be_empty, Error *error) {
    struct stat status;
    if (lstat(path, &status) != 0) return true;
    InputFile file;
    int32_t magic = 0;
    Error unread = {""};
    bool ok = input_open(&file, path, &unread);
    if (ok && !(may_be_empty && file.bytes == 0))
        ok = input_read(&file, &magic, sizeof magic, 0, &unread) && magic == LLMC_MAGIC;
    input_close(&file);
    return ok || error_set(error, "%s: is there and no llm.c model: it is not overwritten; name another file", path);
}

// Whether a path may be exported to, from `from`: what is written first stands in PATH.tmp, which must not be the
// source, nor something of somebody's own.
static inline bool llmc_may_replace(const char *path, const char *from, Error *error) {
    struct stat source, target;
    char *temporary = path_join(path, ".", "tmp");
    bool ok = llmc_is_ours(path, false, error) && llmc_is_ours(temporary, true, error);
    if (ok && stat(from, &source) == 0 && stat(temporary, &target) == 0 && source.st_dev == target.st_dev &&
        source.st_ino == target.st_ino)
        ok = error_set(error, "%s: is where %s is written first: it cannot be its source; name another file", from,
                       path);
    free(temporary);
    return ok;
}

// Writes a model as an llm.c file, in fp32 or bf16 (the format has no other). The file appears only when complete.
static inline bool llmc_export(const char *path, const ModelShape *shape, FloatType type, WeightsRead read,
                               void *context, Error *error) {
    Layout whole;
    const LayoutCut cut = layout_whole(1);
    layout_init(&whole, shape, &cut);
    const size_t C = (size_t)shape->n_embd, V = (size_t)shape->vocab_size, Vp = round_up(V, LLMC_VOCAB_MULTIPLE);
    int32_t header[LLMC_HEADER_INTS] = {LLMC_MAGIC,
                                        type == FLOAT_F32 ? LLMC_VERSION_FP32 : LLMC_VERSION_BF16,
                                        shape->context_length,
                                        shape->vocab_size,
                                        shape->n_layer,
                                        shape->n_head,
                                        shape->n_embd,
                                        (int32_t)Vp};
    float *buffer = (float *)malloc(WEIGHTS_CHUNK * sizeof(float));
    void *raw = malloc(WEIGHTS_CHUNK * float_type_size(type));
    float *zeros = (float *)calloc(C, sizeof(float)); // all bits 0 are zero in every type
    if (buffer == NULL || raw == NULL || zeros == NULL) die("no memory to write %s", path);
    char *temporary = path_join(path, ".", "tmp");
    OutputFile file;
    bool ok = output_open(&file, temporary, error) && output_write(&file, header, sizeof header, error) &&
              llmc_write_tensor(&file, weights_tensor(&whole, 0), type, read, context, buffer, raw, error);
    for (size_t row = V; row < Vp && ok; row++) ok = output_write(&file, zeros, C * float_type_size(type), error);
    ok = ok && llmc_write_tensor(&file, weights_tensor(&whole, 1), type, read, context, buffer, raw, error);
    for (int i = 0; i < BLOCK_TENSORS && ok; i++)
        for (int layer = 0; layer < shape->n_layer && ok; layer++)
            ok = llmc_write_tensor(&file, weights_tensor(&whole, 2 + BLOCK_TENSORS * layer + (int)LLMC_BLOCK_ORDER[i]),
                                   type, read, context, buffer, raw, error);
    for (int k = 0; k < FINAL_TENSORS && ok; k++)
        ok = llmc_write_tensor(&file, weights_tensor(&whole, 2 + BLOCK_TENSORS * shape->n_layer + k), type, read,
                               context, buffer, raw, error);
    ok = output_finish(&file, error) && ok;
    ok = ok && file_publish(temporary, path, error);
    if (!ok) unlink(temporary);
    free(temporary);
    free(buffer);
    free(raw);
    free(zeros);
    layout_free(&whole);
    return ok;
}

#endif
