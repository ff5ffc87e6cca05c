// weights_kind.h: what a kind of file (or directory) of weights has to offer, and what all kinds share.
//
// Whatever the kind, elements are asked for by tensor id and position in the unsliced, unpadded tensor, both as
// layout.h numbers them: matrices are (outputs, inputs), query/key/value is (3, heads, head_dim, C). So any rank of any
// grid fills exactly its own pieces, and a kind alone knows how its files order them.
#ifndef WEIGHTS_KIND_H
#define WEIGHTS_KIND_H

#include "files.h"
#include "floats.h"
#include "layout.h"

typedef struct Weights Weights;

typedef struct {
    const char *name; // in messages: "a Hugging Face directory (...)"
    bool (*recognises)(const char *path);
    // Checks everything, calls weights_set_shape(), and sets state. close() is called also when this fails.
    bool (*open)(Weights *weights, Error *error);
    // Checks what takes long, the work shared by `ranks` ranks; NULL: nothing is left to check.
    bool (*verify)(Weights *weights, int rank, int ranks, Error *error);
    // Reads elements [first, first + count), which the tensor has.   out (count)
    bool (*read)(Weights *weights, const Tensor *tensor, size_t first, size_t count, float *out, Error *error);
    void (*close)(Weights *weights);
} WeightsKind;

// A source of weights, from one thread at a time.
struct Weights {
    const WeightsKind *kind;
    char *path;
    ModelShape shape;
    Layout layout; // of the whole model on one rank; units NULL until the shape is known
    void *state;   // the kind's own
};

// Delivers elements [first, first + count) of a tensor, for exports.   out (count)
typedef bool (*WeightsRead)(void *context, int tensor, size_t first, size_t count, float *out, Error *error);

enum { WEIGHTS_CHUNK = 1 << 20 }; // elements that an export asks for at a time

// The tensor with this id in a layout of the whole model.
static inline const Tensor *weights_tensor(const Layout *whole, int id) {
    const int L = whole->shape.n_layer, block = id - 2;
    if (block < 0) return &whole->units[id].tensors[0];
    if (block < BLOCK_TENSORS * L) return &whole->units[2 + block / BLOCK_TENSORS].tensors[block % BLOCK_TENSORS];
    return &whole->units[2 + L].tensors[block - BLOCK_TENSORS * L];
}

static inline int weights_tensors(const ModelShape *shape) {
    return 2 + BLOCK_TENSORS * shape->n_layer + FINAL_TENSORS;
}

static inline size_t weights_elements(const Tensor *tensor) {
    return tensor->outer * tensor->sliced_full * tensor->inner;
}

// Inputs of a matrix of a block, whose shape is (outputs, inputs); 0 for all other tensors.
static inline size_t weights_inputs(const ModelShape *shape, int id) {
    const int block = id - 2, k = block % BLOCK_TENSORS;
    if (block < 0 || block >= BLOCK_TENSORS * shape->n_layer || k > MLPPROJ_WEIGHT) return 0;
    return (size_t)shape->n_embd * (k == MLPPROJ_WEIGHT ? 4 : 1);
}

// Takes a shape that a file states, if a model can have it: the ranges are those of the configuration.
static inline bool weights_take_shape(ModelShape *shape, const char *path, int64_t n_layer, int64_t n_head,
                                      int64_t n_embd, int64_t context_length, int64_t vocab_size, Error *error) {
    const char *const names[] = {"n_layer", "n_head", "n_embd", "context_length", "vocab_size"};
    const int64_t values[] = {n_layer, n_head, n_embd, context_length, vocab_size};
    const int64_t limits[] = {1000, 1024, 65536, 1048576, 16777216};
    for (int i = 0; i < 5; i++)
        if (values[i] < 1 || values[i] > limits[i])
            return error_set(error, "%s: its %s is %lld, 1 to %lld are possible", path, names[i], (long long)values[i],
                             (long long)limits[i]);
    if (n_embd % n_head != 0)
        return error_set(error, "%s: its n_head %lld does not divide its n_embd %lld", path, (long long)n_head,
                         (long long)n_embd);
    shape->n_layer = (int)n_layer;
    shape->n_head = (int)n_head;
    shape->n_embd = (int)n_embd;
    shape->context_length = (int)context_length;
    shape->vocab_size = (int)vocab_size;
    return true;
}

// Called by a kind when its file is known to hold a model of this shape: what this allocates is in proportion to it.
static inline void weights_set_shape(Weights *weights, const ModelShape *shape) {
    const LayoutCut cut = layout_whole(1);
    weights->shape = *shape;
    layout_init(&weights->layout, shape, &cut);
}

#endif
