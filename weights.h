// weights.h: one way to read a model's weights, whatever kind of file or directory they stand in.
//
//   Weights weights;
//   weights_open(&weights, path, &error)                   recognises the kind, checks everything, knows weights.shape
//   weights_verify(&weights, rank, ranks, &error)          checks what takes long, shared by the ranks
//   weights_compare(&weights, &shape, &error)              is it the model that is configured?
//   weights_read(&weights, id, first, count, out, &error)  elements by global index (layout.h), as fp32
//   weights_close(&weights)
//
// Kinds: a checkpoint (checkpoint_weights.h), a directory of Hugging Face's GPT-2 (huggingface.h), a model file of
// llm.c (llmc.h); another kind is one more entry in WEIGHTS_KINDS. The last two can be written too, from anything that
// delivers elements: huggingface_export(), llmc_export(). An open Weights is such a source: weights_deliver().
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include "checkpoint_weights.h"
#include "huggingface.h"
#include "llmc.h"
#include "weights_kind.h"

static const WeightsKind *const WEIGHTS_KINDS[] = {&CHECKPOINT_KIND, &HUGGINGFACE_KIND,
                                                   &LLMC_KIND}; // the first that recognises a path

static inline void weights_close(Weights *weights) {
    if (weights->kind != NULL) weights->kind->close(weights);
    if (weights->layout.units != NULL) layout_free(&weights->layout);
    free(weights->path);
    memset(weights, 0, sizeof *weights);
}

// Opens what is at a path. On an error nothing remains open.
static inline bool weights_open(Weights *weights, const char *path, Error *error) {
    memset(weights, 0, sizeof *weights);
    struct stat status;
    if (stat(path, &status) != 0) return error_set(error, "%s: cannot be read: %s", path, strerror(errno));
    const int count = (int)(sizeof WEIGHTS_KINDS / sizeof WEIGHTS_KINDS[0]);
    for (int i = 0; i < count && weights->kind == NULL; i++)
        if (WEIGHTS_KINDS[i]->recognises(path)) weights->kind = WEIGHTS_KINDS[i];
    if (weights->kind == NULL) {
        char known[512] = "";
        for (int i = 0; i < count; i++)
            snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i > 0 ? ", " : "",
                     WEIGHTS_KINDS[i]->name);
        return error_set(error, "%s: holds no weights of a known kind; known are: %s", path, known);
    }
    weights->path = path_join(path, "", "");
    const bool ok = weights->kind->open(weights, error);
    if (!ok) weights_close(weights);
    return ok;
}

// Checks what opening leaves out: a checkpoint's checksums. Of `ranks` ranks each does a share; all must succeed.
static inline bool weights_verify(Weights *weights, int rank, int ranks, Error *error) {
    return weights->kind->verify == NULL || weights->kind->verify(weights, rank, ranks, error);
}

// Reads elements [first, first + count) of the tensor with this id.   out (count)
static inline bool weights_read(Weights *weights, int id, size_t first, size_t count, float *out, Error *error) {
    if (id < 0 || id >= weights_tensors(&weights->shape)) die("%s: no tensor has the id %d", weights->path, id);
    const Tensor *tensor = weights_tensor(&weights->layout, id);
    const size_t elements = weights_elements(tensor);
    if (first > elements || count > elements - first)
        die("%s: tensor %d has %zu elements, not %zu + %zu", weights->path, id, elements, first, count);
    return weights->kind->read(weights, tensor, first, count, out, error);
}

// The same as a WeightsRead; the context is the Weights.
static inline bool weights_deliver(void *context, int id, size_t first, size_t count, float *out, Error *error) {
    return weights_read((Weights *)context, id, first, count, out, error);
}

// Whether the weights are those of a model of this shape. Names every key that differs.
static inline bool weights_compare(const Weights *weights, const ModelShape *shape, Error *error) {
    const char *const keys[] = {"n_layer", "n_head", "n_embd", "context_length", "vocab_size"};
    const ModelShape *has = &weights->shape;
    const int there[] = {has->n_layer, has->n_head, has->n_embd, has->context_length, has->vocab_size};
    const int wanted[] = {shape->n_layer, shape->n_head, shape->n_embd, shape->context_length, shape->vocab_size};
    char text[512] = "";
    for (int i = 0; i < 5; i++)
        if (there[i] != wanted[i])
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s %d, but %d is configured",
                     text[0] != '\0' ? "; " : "", keys[i], there[i], wanted[i]);
    return text[0] == '\0' || error_set(error, "%s: has %s", weights->path, text);
}

#endif
