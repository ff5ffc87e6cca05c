// layout.h: the flat layout: units, tensors, padding, tensor-parallel slices; one table that every other file uses.
//
// The model is a list of units: wte, wpe, one per transformer block, the final layer norm. A unit is the grain of
// everything that is sharded, gathered, reduced or saved. Inside a unit matrices come first and vectors last, so that
// weight decay covers one range; tensors start on 64-element boundaries; a unit is padded to a multiple of D x 64
// elements, D data-parallel ranks, so that every unit divides evenly. Parameters, gradients, masters and both moments
// are all addressed by this table; the shard of unit u on rank r of N is [r * size/N, (r+1) * size/N) of the unit, and
// a rank's buffer of shards holds them in unit order, so unit u starts at offset[u]/N there.
//
// The global index of an element (for hashes, initialisation, random numbers) is its tensor's id and its position in
// the unsliced, unpadded tensor; padding has none and takes no part in anything: it is zero and stays zero.
//
// Shapes and sizes are in elements. Nothing here allocates device memory or knows a precision.
#ifndef LAYOUT_H
#define LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "error.h"

enum { LAYOUT_ALIGN = 64 }; // elements

// The shape of the whole model.
typedef struct {
    int n_layer, n_head, n_embd;
    int context_length; // positions that wpe has
    int vocab_size;     // V
} ModelShape;

// How many ranks each axis has. Rank numbers run fastest along the tensor axis, then data, then pipeline: tensor ranks,
// who exchange most, are neighbours on a node, and stages, who exchange least, may be on different ones.
typedef struct {
    int tensor, data, pipeline;
} Grid;

// How the model is cut, and which part a rank holds. The blocks are cut into P V stages of consecutive ones; rank p of
// the pipeline holds stages p, p + P, ..., p + (V - 1) P: its chunks.
typedef struct {
    int data_parallel;                                     // D: units are padded for this many shards
    int tensor_parallel, tensor_rank;                      // tensors are sliced
    int pipeline_parallel, pipeline_chunks, pipeline_rank; // P, V, p
} LayoutCut;

typedef enum { UNIT_WTE, UNIT_WPE, UNIT_BLOCK, UNIT_FINAL } UnitKind;

// Tensors of a block, in their order: matrices first; then vectors, those that tensor ranks hold in full last, so that
// they too are one range.
typedef enum {
    QKV_WEIGHT,     // (3, heads, head_dim, C)
    ATTPROJ_WEIGHT, // (C, C)
    MLP_WEIGHT,     // (4C, C)
    MLPPROJ_WEIGHT, // (C, 4C)
    QKV_BIAS,       // (3, heads, head_dim)
    MLP_BIAS,       // (4C)
    LN1_WEIGHT,     // (C)
    LN1_BIAS,       // (C)
    ATTPROJ_BIAS,   // (C)
    LN2_WEIGHT,     // (C)
    LN2_BIAS,       // (C)
    MLPPROJ_BIAS,   // (C)
    BLOCK_TENSORS
} BlockTensor;
enum { LNF_WEIGHT = 0, LNF_BIAS = 1, FINAL_TENSORS = 2, MAX_TENSORS = BLOCK_TENSORS };

typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL } TensorInit;

// A tensor, seen as (outer, sliced, inner): at most the middle dimension is sliced over tensor ranks or padded.
typedef struct {
    const char *name; // within the unit, for instance "qkv_weight"
    int id;           // the same on every cut: wte 0, wpe 1, block l: 2 + 12 l + k, final: 2 + 12 L + k
    size_t outer, inner;
    size_t sliced;       // this rank's extent of the middle dimension, padding included
    size_t sliced_full;  // its extent in the unsliced, unpadded tensor
    size_t sliced_first; // where this rank's slice begins
    size_t offset;       // from the start of the unit
    size_t size;         // outer * sliced * inner
    bool matrix;         // takes weight decay
    bool is_sliced;      // tensor ranks hold different slices; otherwise all hold it in full
    TensorInit init;
    float init_std;
} Tensor;

typedef struct {
    char name[32]; // "wte", "wpe", "block 3", "lnf"
    UnitKind kind;
    int layer; // of a block
    int n_tensors;
    Tensor tensors[MAX_TENSORS];
    size_t offset;     // of the unit in a full flat buffer
    size_t size;       // padded: a multiple of D * 64
    size_t decay_size; // elements [0, decay_size) are matrices (or padding between them)
    size_t replicated; // elements [replicated, size) are the same on all tensor ranks; size: none
} Unit;

// Blocks of a stage that follow one another in the model.
typedef struct {
    int stage;       // of P V
    int first_layer; // blocks [first_layer, first_layer + n_layers)
    int n_layers;
    int first_unit;   // of its blocks
    bool first, last; // begins with the embeddings; ends with the final layer norm and the head
} Chunk;

typedef struct {
    ModelShape shape;
    LayoutCut cut;
    int padded_vocab; // rows of this rank's wte times tensor_parallel
    int n_units;
    Unit *units;
    int wte, wpe, final; // unit numbers, -1 where a rank does not hold them
    int n_chunks;
    Chunk *chunks;
    size_t parameters; // of the whole model, without any padding
    size_t size;       // padded_parameters: the sum of this rank's padded units
} Layout;

static inline size_t round_up(size_t n, size_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

static inline LayoutCut layout_whole(int data_parallel) {
    LayoutCut cut = {data_parallel, 1, 0, 1, 1, 0};
    return cut;
}

// Where stage `stage` of `stages` begins: its blocks are those from here to where the next begins; stage `stages`: L.
// Every stage has a block at least (stages <= L, config.h checks), and time is balanced: a block costs its 12 C^2
// parameters a token, and the head on the last stage costs V C, as if it were a few blocks. What cannot be shared
// evenly goes to later stages, since earlier ones keep more micro-batches alive.
static inline int layout_stage_begin(const ModelShape *shape, int stages, int stage) {
    const int L = shape->n_layer;
    if (stage == stages || stages == 1) return stage == 0 ? 0 : L;
    const double head = (double)shape->vocab_size / (12.0 * (double)shape->n_embd);
    int last = 1; // blocks of the last stage: as many as do not make it the slowest
    double best = 1e300;
    for (int blocks = 1; blocks <= L - (stages - 1); blocks++) {
        const double others = ceil((double)(L - blocks) / (stages - 1)), slowest = fmax(blocks + head, others);
        if (slowest > best) continue;
        best = slowest;
        last = blocks;
    }
    const int each = (L - last) / (stages - 1), more = (L - last) % (stages - 1); // the last `more` have one more
    const int longer = stage - (stages - 1 - more);
    return stage * each + (longer > 0 ? longer : 0);
}

// Appends a tensor of (outer, full, inner) to a unit; slices > 1: this rank's slice of the middle dimension, which
// padded_full (a multiple of slices) covers.
static inline void layout_add_tensor(Unit *unit, const char *name, int id, size_t outer, size_t full,
                                     size_t padded_full, size_t inner, int slices, int slice, TensorInit init,
                                     float init_std) {
    Tensor *tensor = &unit->tensors[unit->n_tensors++];
    tensor->name = name;
    tensor->id = id;
    tensor->outer = outer;
    tensor->inner = inner;
    tensor->sliced = padded_full / (size_t)slices;
    tensor->sliced_full = full;
    tensor->sliced_first = tensor->sliced * (size_t)slice;
    tensor->offset = round_up(unit->size, LAYOUT_ALIGN);
    tensor->size = outer * tensor->sliced * inner;
    tensor->matrix = init == INIT_NORMAL;
    tensor->is_sliced = slices > 1;
    tensor->init = init;
    tensor->init_std = init_std;
    unit->size = tensor->offset + tensor->size;
    if (tensor->matrix) unit->decay_size = round_up(unit->size, LAYOUT_ALIGN);
}

static inline Unit *layout_add_unit(Layout *layout, UnitKind kind, int layer) {
    Unit *unit = &layout->units[layout->n_units++];
    memset(unit, 0, sizeof *unit);
    unit->kind = kind;
    unit->layer = layer;
    static const char *const names[] = {"wte", "wpe", "block", "lnf"};
    if (kind == UNIT_BLOCK)
        snprintf(unit->name, sizeof unit->name, "block %d", layer);
    else
        snprintf(unit->name, sizeof unit->name, "%s", names[kind]);
    return unit;
}

static inline void layout_close_unit(Layout *layout, Unit *unit) {
    unit->size = round_up(unit->size, (size_t)layout->cut.data_parallel * LAYOUT_ALIGN);
    unit->replicated = unit->size;
    for (int t = unit->n_tensors - 1; t >= 0 && !unit->tensors[t].is_sliced; t--)
        unit->replicated = unit->tensors[t].offset;
    unit->offset = layout->size;
    layout->size += unit->size;
}

// The number of parameters of a model: (V + T) C + L (12 C^2 + 13 C) + 2 C.
static inline size_t model_parameters(const ModelShape *shape) {
    size_t C = (size_t)shape->n_embd, L = (size_t)shape->n_layer;
    return ((size_t)shape->vocab_size + (size_t)shape->context_length) * C + L * (12 * C * C + 13 * C) + 2 * C;
}

// GPT-2's initialisation: N(0, 0.02); projections into the residual stream are scaled by 1/sqrt(2L).
#define INIT_STD 0.02f

static inline void layout_add_block(Layout *layout, int layer) {
    const ModelShape *shape = &layout->shape;
    const size_t C = (size_t)shape->n_embd, H = (size_t)shape->n_head, hd = C / H; // hd: head_dim
    const int S = layout->cut.tensor_parallel, s = layout->cut.tensor_rank, id = 2 + BLOCK_TENSORS * layer;
    const float residual_std = INIT_STD / sqrtf(2.0f * (float)shape->n_layer);
    Unit *unit = layout_add_unit(layout, UNIT_BLOCK, layer);
    // Column-parallel tensors are sliced on their output, row-parallel ones on their input, the rest is replicated.
    layout_add_tensor(unit, "qkv_weight", id + QKV_WEIGHT, 3, H, H, hd * C, S, s, INIT_NORMAL, INIT_STD);
    layout_add_tensor(unit, "attproj_weight", id + ATTPROJ_WEIGHT, C, H, H, hd, S, s, INIT_NORMAL, residual_std);
    layout_add_tensor(unit, "mlp_weight", id + MLP_WEIGHT, 1, 4 * C, 4 * C, C, S, s, INIT_NORMAL, INIT_STD);
    layout_add_tensor(unit, "mlpproj_weight", id + MLPPROJ_WEIGHT, C, 4 * C, 4 * C, 1, S, s, INIT_NORMAL, residual_std);
    layout_add_tensor(unit, "qkv_bias", id + QKV_BIAS, 3, H, H, hd, S, s, INIT_ZERO, 0);
    layout_add_tensor(unit, "mlp_bias", id + MLP_BIAS, 1, 4 * C, 4 * C, 1, S, s, INIT_ZERO, 0);
    layout_add_tensor(unit, "ln1_weight", id + LN1_WEIGHT, 1, C, C, 1, 1, 0, INIT_ONE, 0);
    layout_add_tensor(unit, "ln1_bias", id + LN1_BIAS, 1, C, C, 1, 1, 0, INIT_ZERO, 0);
    layout_add_tensor(unit, "attproj_bias", id + ATTPROJ_BIAS, 1, C, C, 1, 1, 0, INIT_ZERO, 0);
    layout_add_tensor(unit, "ln2_weight", id + LN2_WEIGHT, 1, C, C, 1, 1, 0, INIT_ONE, 0);
    layout_add_tensor(unit, "ln2_bias", id + LN2_BIAS, 1, C, C, 1, 1, 0, INIT_ZERO, 0);
    layout_add_tensor(unit, "mlpproj_bias", id + MLPPROJ_BIAS, 1, C, C, 1, 1, 0, INIT_ZERO, 0);
    layout_close_unit(layout, unit);
}

// Builds the table for one rank's cut of a model. The caller guarantees that tensor_parallel divides n_head
// (config.h checks). layout_free() gives the table back.
static inline void layout_init(Layout *layout, const ModelShape *shape, const LayoutCut *cut) {
    memset(layout, 0, sizeof *layout);
    layout->shape = *shape;
    layout->cut = *cut;
    layout->parameters = model_parameters(shape);
    const int P = cut->pipeline_parallel, stages = P * cut->pipeline_chunks;
    layout->n_chunks = cut->pipeline_chunks;
    layout->chunks = (Chunk *)calloc((size_t)layout->n_chunks, sizeof(Chunk));
    layout->units = (Unit *)malloc(((size_t)shape->n_layer + 3) * sizeof(Unit));
    if (layout->units == NULL || layout->chunks == NULL) die("no room for the table of units");
    layout->wte = layout->wpe = layout->final = -1;
    const bool first_stage = cut->pipeline_rank == 0, last_stage = cut->pipeline_rank == P - 1;
    const size_t C = (size_t)shape->n_embd, V = (size_t)shape->vocab_size;
    const int S = cut->tensor_parallel, s = cut->tensor_rank, L = shape->n_layer;
    const size_t Vp = round_up(V, 128 * (size_t)S);
    layout->padded_vocab = (int)Vp;
    if (first_stage || last_stage) { // the head is tied to wte, so both ends hold it
        layout->wte = layout->n_units;
        Unit *unit = layout_add_unit(layout, UNIT_WTE, 0);
        layout_add_tensor(unit, "wte", 0, 1, V, Vp, C, S, s, INIT_NORMAL, INIT_STD);
        layout_close_unit(layout, unit);
    }
    if (first_stage) {
        layout->wpe = layout->n_units;
        Unit *unit = layout_add_unit(layout, UNIT_WPE, 0);
        size_t positions = (size_t)shape->context_length;
        layout_add_tensor(unit, "wpe", 1, 1, positions, positions, C, 1, 0, INIT_NORMAL, INIT_STD);
        layout_close_unit(layout, unit);
    }
    for (int c = 0; c < layout->n_chunks; c++) {
        Chunk *chunk = &layout->chunks[c];
        chunk->stage = c * P + cut->pipeline_rank;
        chunk->first_layer = layout_stage_begin(shape, stages, chunk->stage);
        chunk->n_layers = layout_stage_begin(shape, stages, chunk->stage + 1) - chunk->first_layer;
        chunk->first_unit = layout->n_units;
        chunk->first = chunk->stage == 0;
        chunk->last = chunk->stage == stages - 1;
        for (int l = 0; l < chunk->n_layers; l++) layout_add_block(layout, chunk->first_layer + l);
    }
    if (last_stage) {
        layout->final = layout->n_units;
        Unit *unit = layout_add_unit(layout, UNIT_FINAL, 0);
        const int id = 2 + BLOCK_TENSORS * L;
        layout_add_tensor(unit, "lnf_weight", id + LNF_WEIGHT, 1, C, C, 1, 1, 0, INIT_ONE, 0);
        layout_add_tensor(unit, "lnf_bias", id + LNF_BIAS, 1, C, C, 1, 1, 0, INIT_ZERO, 0);
        layout_close_unit(layout, unit);
    }
}

static inline void layout_free(Layout *layout) {
    free(layout->units);
    free(layout->chunks);
    layout->units = NULL;
    layout->chunks = NULL;
}

// A run of consecutive local elements of a tensor that are also consecutive in the unsliced, unpadded tensor.
typedef struct {
    size_t local;  // position in this rank's slice of the tensor
    size_t global; // position in the unsliced, unpadded tensor
    size_t count;
} TensorRun;

// The runs of a tensor: one per outer index, or one for all where nothing is sliced or padded. Returns false past the
// last. Padding rows belong to no run.
static inline bool tensor_run(const Tensor *tensor, size_t index, TensorRun *run) {
    const bool whole = tensor->sliced == tensor->sliced_full;
    if (index >= (whole ? 1 : tensor->outer)) return false;
    const size_t room = tensor->sliced_full > tensor->sliced_first ? tensor->sliced_full - tensor->sliced_first : 0;
    const size_t rows = tensor->sliced < room ? tensor->sliced : room;
    run->local = index * tensor->sliced * tensor->inner;
    run->global = (index * tensor->sliced_full + tensor->sliced_first) * tensor->inner;
    run->count = whole ? tensor->size : rows * tensor->inner;
    return true;
}

// A part of a unit that has elements of one tensor, consecutive globally too.
typedef struct {
    const Tensor *tensor;
    size_t at;     // position in the unit
    size_t global; // position in the unsliced, unpadded tensor
    size_t count;
} Piece;

// Where a walk over pieces stands; {0, 0} to begin.
typedef struct {
    int tensor;
    size_t run;
} PieceCursor;

// The next piece of the elements [first, end) of a unit, padding left out; false when there is none.
static inline bool unit_next_piece(const Unit *unit, size_t first, size_t end, PieceCursor *cursor, Piece *piece) {
    for (; cursor->tensor < unit->n_tensors; cursor->tensor++, cursor->run = 0) {
        const Tensor *tensor = &unit->tensors[cursor->tensor];
        TensorRun run;
        while (tensor_run(tensor, cursor->run++, &run)) {
            const size_t begin = tensor->offset + run.local;
            const size_t from = begin > first ? begin : first;
            const size_t to = begin + run.count < end ? begin + run.count : end;
            if (from >= to) continue;
            piece->tensor = tensor;
            piece->at = from;
            piece->global = run.global + (from - begin);
            piece->count = to - from;
            return true;
        }
    }
    return false;
}

// Elements [first, first + count) of a unit, which stand at `at` of a buffer.
typedef struct {
    size_t first, count, at;
} Held;

// The part of a unit that one rank of a grid alone answers for in sums, hashes and checkpoints: 1/N of it, inside its
// shard of the shard_group ranks that share it. What tensor ranks hold in common is the first one's, and wte, which
// both ends of a pipeline hold, is the first stage's. `at` counts from the unit's beginning.
static inline Held unit_own(const Unit *unit, const Grid *grid, int shard_group, int rank) {
    const int tensor_rank = rank % grid->tensor, data_rank = rank / grid->tensor % grid->data;
    const int shard_rank = data_rank % shard_group, replica = data_rank / shard_group;
    const bool copy = unit->kind == UNIT_WTE && rank / grid->tensor / grid->data > 0;
    const size_t limit = copy ? 0 : tensor_rank > 0 ? unit->replicated : unit->size;
    Held own;
    own.count = unit->size / (size_t)grid->data;
    own.first = unit->size / (size_t)shard_group * (size_t)shard_rank + own.count * (size_t)replica;
    if (own.first + own.count > limit) own.count = own.first < limit ? limit - own.first : 0;
    own.at = own.first;
    return own;
}

#endif
