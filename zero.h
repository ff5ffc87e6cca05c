// zero.h: data parallelism: DDP, ZeRO-1/2/3 (FSDP), hybrid sharding: how parameters, gradients and optimizer state are
// sliced over the ranks, and which collectives run when (Rajbhandari et al., SC 2020; Zhao et al., VLDB 2023).
//
// The model never names a strategy. A pass over the model is a list of uses (unit, kind, micro-batch), in order, and
// the model walks it through
//     zero_acquire_params(unit)               full parameters of the unit, gathered if sharded; gathers the next uses
//     zero_release_params(unit)               they may be freed again
//     zero_acquire_grads(unit, &accumulate)   a full-size buffer for the unit's gradient
//     zero_release_grads(unit, last_micro)    launches the reduction on the communication stream
//     zero_step()                             norm, clip, AdamW on this rank's slice, then what must be gathered
//
// A strategy is three booleans: which of parameters, gradients and optimizer state are cut into one shard per rank of
// the shard group. Everything follows from them. State that is sharded lives in buffers of shards; where compute needs
// it in full there are slots (slots.h), transient buffers of one unit each.
//
// Compute waits on events, per unit or slot, never on the device; collectives wait on events for compute. The norm of
// the gradient is summed from one partial sum per rank, in rank order, each over 1/N of every unit, under every
// strategy, so that it has the same bits whether gradients are replicated or not.
#ifndef ZERO_H
#define ZERO_H

#include "comm.h"
#include "layout.h"
#include "memory.h"
#include "ops.h"
#include "profile.h"
#include "random.h"
#include "slots.h"

// One row per strategy: what is cut into one shard per rank. What is not is held in full by every rank.
typedef struct {
    const char *name;
    bool shard_params, shard_grads, shard_optimizer;
} Strategy;

enum { STRATEGIES = 4 };

static inline const Strategy *strategy_number(int i) {
    static const Strategy strategies[STRATEGIES] = {{"ddp", false, false, false},
                                                    {"zero1", false, false, true},
                                                    {"zero2", false, true, true},
                                                    {"zero3", true, true, true}};
    return &strategies[i];
}

// tp has one data-parallel rank: nothing is cut further.
static inline const Strategy *strategy_find(const char *name) {
    if (strcmp(name, "tp") == 0) return strategy_number(0);
    for (int i = 0; i < STRATEGIES; i++)
        if (strcmp(strategy_number(i)->name, name) == 0) return strategy_number(i);
    return NULL;
}

typedef enum { USE_FORWARD, USE_HEAD, USE_BACKWARD } UseKind;

static inline const char *use_name(UseKind kind) {
    static const char *const names[] = {"forward", "head", "backward"};
    return names[kind];
}

typedef struct {
    int unit;
    UseKind kind;
    int micro;       // micro-batch
    bool reads;      // needs the unit's parameters
    bool read_again; // and so will a later use of this micro-batch
    bool completes;  // the gradient that this micro-batch gives to the unit
} Use;

// What a run chooses beside the strategy.
typedef struct {
    int prefetch;               // uses that are gathered ahead
    bool reshard_after_forward; // false: gathered parameters stay until their backward
    bool overlap;               // false: compute waits for every collective at once
    bool master_weights;        // false: bf16 parameters are updated in place, with stochastic rounding
    bool sequence_parallel;     // tensor ranks share the rows between matrices
    bool trains;                // false: only forward passes; there are parameters, nothing else
} ZeroOptions;

typedef struct {
    const Layout *layout;
    const Strategy *strategy;
    ZeroOptions options;
    Comm *comm;
    Ops *ops;
    cudaStream_t compute;
    uint64_t seed;

    // Persistent state: in full, or this rank's shards (see zero_held()).
    floatX *params;
    gradX *grads;
    float *master; // NULL unless zero_has_masters()
    float *m, *v;  // NULL where nothing is trained

    Slots param_slots, grad_slots; // empty where the state is held in full
    int *param_slot, *grad_slot;   // by unit: the slot that holds it, or -1

    const Use *uses; // of the pass
    int n_uses, cursor;

    bool *accumulate;            // by unit: its gradient holds a part of this step's already
    cudaEvent_t *grads_written;  // by unit, compute
    cudaEvent_t *grads_reduced;  // by unit, communication
    cudaEvent_t *params_updated; // by unit, compute
    cudaEvent_t *params_ready;   // by unit, communication: gathered after the update (state in full)
    double *sum_of_squares;      // device: this rank's partial sum of the norm
    double *scalars;             // host, pinned: this rank's loss and partial norm of a step
    int64_t updates;             // AdamW steps taken: skipped steps do not count
} Zero;

// What all ranks know after a step.
typedef struct {
    double loss_sum;  // over the tokens of the global batch
    double grad_norm; // before clipping
    bool updated;     // false: loss or norm is not finite, and nothing was changed
    bool stop;        // some rank asked to stop
} StepResult;

// ---------------------------------------------------------------------------------------------------------------------
// Where things are

// The part of a unit that this rank holds of state that is sharded or not, and where it stands in its buffer.
static inline Held zero_held(const Zero *zero, const Unit *unit, bool sharded) {
    Held held = {0, unit->size, unit->offset};
    if (!sharded) return held;
    const Group *shard = &zero->comm->shard;
    held.count = unit->size / (size_t)shard->size;
    held.first = held.count * (size_t)shard->rank;
    held.at = unit->offset / (size_t)shard->size;
    return held;
}

// The part of a unit that this rank alone answers for (unit_own()), and where it stands in its buffer.
static inline Held zero_own(const Zero *zero, const Unit *unit, bool sharded) {
    const Held held = zero_held(zero, unit, sharded);
    Held own = unit_own(unit, &zero->comm->grid, zero->comm->shard.size, zero->comm->rank);
    own.at = held.at + (own.first - held.first);
    return own;
}

// Whether the optimizer keeps the parameters in fp32: in fp32 they are their own masters.
static inline bool zero_has_masters(const ZeroOptions *options) {
    return sizeof(floatX) < sizeof(float) && options->master_weights && options->trains;
}

static inline size_t zero_state_size(const Zero *zero, bool sharded) {
    return sharded ? zero->layout->size / (size_t)zero->comm->shard.size : zero->layout->size;
}

static inline ncclDataType_t param_type(void) {
    return sizeof(floatX) == sizeof(float) ? ncclFloat32 : ncclBfloat16;
}
static inline ncclDataType_t grad_type(void) {
    return sizeof(gradX) == sizeof(float) ? ncclFloat32 : ncclBfloat16;
}

// ---------------------------------------------------------------------------------------------------------------------
// Opening

static inline void zero_record(const Zero *zero, cudaEvent_t event, cudaStream_t stream) {
    if (!zero->comm->planning) cuda_check(cudaEventRecord(event, stream));
}

static inline void zero_wait(const Zero *zero, cudaStream_t stream, cudaEvent_t event) {
    if (!zero->comm->planning) cuda_check(cudaStreamWaitEvent(stream, event, 0));
}

// The communication stream has been given a collective: records that it is done; without overlap compute waits now.
static inline void zero_launched(const Zero *zero, cudaEvent_t event) {
    zero_record(zero, event, zero->comm->stream);
    if (!zero->options.overlap) zero_wait(zero, zero->compute, event);
}

static inline cudaEvent_t *zero_events(const Zero *zero) {
    cudaEvent_t *events = (cudaEvent_t *)table_alloc((size_t)zero->layout->n_units, sizeof(cudaEvent_t));
    for (int u = 0; u < zero->layout->n_units && !zero->comm->planning; u++)
        cuda_check(cudaEventCreateWithFlags(&events[u], cudaEventDisableTiming));
    return events;
}

static inline void zero_free_events(const Zero *zero, cudaEvent_t *events) {
    for (int u = 0; u < zero->layout->n_units && !zero->comm->planning; u++) cuda_check(cudaEventDestroy(events[u]));
    free(events);
}

// Allocates this rank's parameters, gradients and optimizer state.
static inline void zero_init(Zero *zero, Memory *memory, const Layout *layout, const Strategy *strategy,
                             const ZeroOptions *options, Comm *comm, Ops *ops, cudaStream_t compute, uint64_t seed) {
    memset(zero, 0, sizeof *zero);
    zero->layout = layout;
    zero->strategy = strategy;
    zero->options = *options;
    zero->comm = comm;
    zero->ops = ops;
    zero->compute = compute;
    zero->seed = seed;
    const size_t params = zero_state_size(zero, strategy->shard_params);
    const size_t grads = options->trains ? zero_state_size(zero, strategy->shard_grads) : 0;
    const size_t optimizer = options->trains ? zero_state_size(zero, strategy->shard_optimizer) : 0;
    zero->params = (floatX *)memory_alloc(memory, MEMORY_PARAMETERS, params * sizeof(floatX));
    zero->grads = (gradX *)memory_alloc(memory, MEMORY_GRADIENTS, grads * sizeof(gradX));
    if (zero_has_masters(options))
        zero->master = (float *)memory_alloc(memory, MEMORY_OPTIMIZER, optimizer * sizeof(float));
    zero->m = (float *)memory_alloc(memory, MEMORY_OPTIMIZER, optimizer * sizeof(float));
    zero->v = (float *)memory_alloc(memory, MEMORY_OPTIMIZER, optimizer * sizeof(float));
    zero->sum_of_squares = (double *)memory_alloc(memory, MEMORY_WORKSPACE, sizeof(double));
    // In use: the unit at hand and those gathered ahead; or, where they stay until their backward, all. The gradient of
    // one unit is written while that of the one before is reduced.
    const int ahead = options->reshard_after_forward ? options->prefetch + 1 : layout->n_units;
    if (strategy->shard_params) slots_init(&zero->param_slots, layout, memory, ahead, sizeof(floatX));
    if (strategy->shard_grads && options->trains) slots_init(&zero->grad_slots, layout, memory, 2, sizeof(gradX));

    const size_t units = (size_t)layout->n_units;
    zero->param_slot = (int *)table_alloc(units, sizeof(int));
    zero->grad_slot = (int *)table_alloc(units, sizeof(int));
    for (size_t u = 0; u < units; u++) zero->param_slot[u] = zero->grad_slot[u] = -1;
    zero->accumulate = (bool *)table_alloc(units, sizeof(bool));
    zero->grads_written = zero_events(zero);
    zero->grads_reduced = zero_events(zero);
    zero->params_updated = zero_events(zero);
    zero->params_ready = zero_events(zero);
    if (!comm->planning) cuda_check(cudaMallocHost((void **)&zero->scalars, 2 * sizeof(double)));
}

static inline void zero_free(Zero *zero) {
    slots_free(&zero->param_slots, zero->comm->planning);
    slots_free(&zero->grad_slots, zero->comm->planning);
    zero_free_events(zero, zero->grads_written);
    zero_free_events(zero, zero->grads_reduced);
    zero_free_events(zero, zero->params_updated);
    zero_free_events(zero, zero->params_ready);
    free(zero->param_slot);
    free(zero->grad_slot);
    free(zero->accumulate);
    if (!zero->comm->planning) cuda_check(cudaFreeHost(zero->scalars));
}

enum { ZERO_CHUNK = 1 << 18 }; // elements that pass through the host at a time

// Delivers elements [first, first + count) of a tensor, counted as in the whole model.   out (count)
typedef bool (*ZeroSource)(void *context, const Tensor *tensor, size_t first, size_t count, float *out, Error *error);

// Fills the masters and the parameters that this rank holds with what a source delivers, element by global index;
// padding stays zero.
static inline bool zero_fill(Zero *zero, ZeroSource source, void *context, Error *error) {
    float *values = (float *)table_alloc(ZERO_CHUNK, sizeof(float));
    floatX *rounded = (floatX *)table_alloc(ZERO_CHUNK, sizeof(floatX));
    bool ok = true;
    for (int u = 0; u < zero->layout->n_units && ok; u++) {
        const Unit *unit = &zero->layout->units[u];
        const Held params = zero_held(zero, unit, zero->strategy->shard_params);
        const Held masters = zero_held(zero, unit, zero->strategy->shard_optimizer); // within what params hold
        PieceCursor cursor = {0, 0};
        Piece piece;
        while (ok && unit_next_piece(unit, params.first, params.first + params.count, &cursor, &piece)) {
            for (size_t done = 0; done < piece.count && ok; done += ZERO_CHUNK) {
                const size_t left = piece.count - done, count = left < (size_t)ZERO_CHUNK ? left : (size_t)ZERO_CHUNK;
                const size_t at = piece.at + done;
                ok = source(context, piece.tensor, piece.global + done, count, values, error);
                if (!ok) break;
#pragma omp parallel for
                for (size_t i = 0; i < count; i++) rounded[i] = floatX_from(values[i]);
                cuda_check(cudaMemcpy(zero->params + params.at + (at - params.first), rounded, count * sizeof(floatX),
                                      cudaMemcpyHostToDevice));
                if (zero->master == NULL) continue;
                const size_t begin = at > masters.first ? at : masters.first, last = masters.first + masters.count;
                const size_t end = at + count < last ? at + count : last;
                if (begin < end)
                    cuda_check(cudaMemcpy(zero->master + masters.at + (begin - masters.first), values + (begin - at),
                                          (end - begin) * sizeof(float), cudaMemcpyHostToDevice));
            }
        }
    }
    cuda_check(cudaStreamSynchronize(NULL)); // the communication stream does not wait for the NULL stream
    free(values);
    free(rounded);
    return ok;
}

// GPT-2's initialisation: every element depends on (seed, tensor, global index) alone. A ZeroSource.
static inline bool zero_random(void *context, const Tensor *tensor, size_t first, size_t count, float *out,
                               Error *error) {
    (void)error;
    const Zero *zero = (const Zero *)context;
    const uint64_t key = random_key(zero->seed, RANDOM_INIT, (uint64_t)tensor->id, 0);
#pragma omp parallel for
    for (size_t i = 0; i < count; i++)
        out[i] = tensor->init == INIT_NORMAL ? tensor->init_std * random_normal(key, first + i)
                 : tensor->init == INIT_ONE  ? 1.0f
                                             : 0.0f;
    return true;
}

static inline void zero_init_params(Zero *zero) {
    Error error = {""};
    zero_fill(zero, zero_random, zero, &error);
}

// ---------------------------------------------------------------------------------------------------------------------
// A pass

// Before the first use of a pass, whose uses are given, all micro-batches of a step or one forward pass.
static inline void zero_begin(Zero *zero, const Use *uses, int n_uses) {
    zero->uses = uses;
    zero->n_uses = n_uses;
    zero->cursor = -1;
    for (int u = 0; u < zero->layout->n_units; u++) zero->accumulate[u] = false;
}

// Starts gathering a unit into a slot, unless it is there. False if no slot is free.
static inline bool zero_gather(Zero *zero, int unit) {
    if (zero->param_slot[unit] >= 0) return true;
    Slot *slot = slots_take(&zero->param_slots, zero->layout, unit, zero->param_slot);
    if (slot == NULL) return false;
    const Held shard = zero_held(zero, &zero->layout->units[unit], true);
    zero_wait(zero, zero->comm->stream, slot->done); // what it held has been read
    zero_wait(zero, zero->comm->stream, zero->params_updated[unit]);
    comm_name(zero->comm, zero->layout->units[unit].name);
    comm_all_gather(zero->comm, &zero->comm->shard, slot->data, zero->params + shard.at, shard.count, param_type());
    zero_launched(zero, slot->ready);
    return true;
}

// Full parameters of a unit for the next use of the pass that reads any, ready for the compute stream.
static inline const floatX *zero_acquire_params(Zero *zero, int unit) {
    do zero->cursor++;
    while (zero->cursor < zero->n_uses && !zero->uses[zero->cursor].reads);
    if (zero->cursor >= zero->n_uses || zero->uses[zero->cursor].unit != unit)
        die("%s is used out of the order of the pass", zero->layout->units[unit].name);
    zero->comm->tensor.what = zero->layout->units[unit].name; // for what is computed with them
    if (!zero->strategy->shard_params) {
        zero_wait(zero, zero->compute, zero->params_ready[unit]); // after the last update
        return zero->params + zero->layout->units[unit].offset;
    }
    if (!zero_gather(zero, unit)) die("no slot is free for %s", zero->layout->units[unit].name);
    Slot *slot = &zero->param_slots.slots[zero->param_slot[unit]];
    zero_wait(zero, zero->compute, slot->ready);
    for (int i = zero->cursor + 1, ahead = 0; i < zero->n_uses && ahead < zero->options.prefetch; i++)
        if (zero->uses[i].reads) {
            zero_gather(zero, zero->uses[i].unit);
            ahead++;
        }
    return (const floatX *)slot->data;
}

// The compute stream has been given the last operation that reads the unit's parameters in this use. A gathered unit is
// kept if its next use lies within those that are gathered ahead, or until its backward where that was asked for.
static inline void zero_release_params(Zero *zero, int unit) {
    if (!zero->strategy->shard_params) return;
    zero_record(zero, zero->param_slots.slots[zero->param_slot[unit]].done, zero->compute);
    int use = zero->cursor; // of this unit: wte is released together with wpe, after it
    while (zero->uses[use].unit != unit) use--;
    if (!zero->options.reshard_after_forward && zero->uses[use].read_again) return;
    for (int i = zero->cursor + 1, ahead = 0; i < zero->n_uses && ahead < zero->options.prefetch; i++)
        if (zero->uses[i].reads) {
            if (zero->uses[i].unit == unit) return;
            ahead++;
        }
    slots_give_back(&zero->param_slots, unit, zero->param_slot);
}

// Zeroes what stands between the tensors of a unit and after them: a slot may hold another unit's gradient there, and
// padding must take no part in the norm.
static inline void zero_clear_padding(Zero *zero, const Unit *unit, gradX *grads) {
    size_t end = 0;
    for (int t = 0; t <= unit->n_tensors; t++) {
        const size_t next = t < unit->n_tensors ? unit->tensors[t].offset : unit->size;
        if (next > end && !zero->comm->planning)
            cuda_check(cudaMemsetAsync(grads + end, 0, (next - end) * sizeof(gradX), zero->compute));
        if (t < unit->n_tensors) end = next + unit->tensors[t].size;
    }
}

// A full-size buffer for the unit's gradient. *accumulate: 0, the buffer holds nothing yet and must be overwritten;
// 1, add to it.
static inline gradX *zero_acquire_grads(Zero *zero, int unit, int *accumulate) {
    if (!zero->strategy->shard_grads) {
        *accumulate = zero->accumulate[unit];
        zero->accumulate[unit] = true;
        return zero->grads + zero->layout->units[unit].offset;
    }
    *accumulate = zero->grad_slot[unit] >= 0; // wte's, between the head and the embedding
    if (*accumulate) return (gradX *)zero->grad_slots.slots[zero->grad_slot[unit]].data;
    Slot *slot = slots_take(&zero->grad_slots, zero->layout, unit, zero->grad_slot);
    if (slot == NULL) die("no slot is free for the gradient of %s", zero->layout->units[unit].name);
    zero_wait(zero, zero->compute, slot->ready); // what it held has been reduced
    zero_clear_padding(zero, &zero->layout->units[unit], (gradX *)slot->data);
    return (gradX *)slot->data;
}

// Reduces the gradient of one micro-batch out of its slot and adds it to this rank's shard.
static inline void zero_reduce_slot(Zero *zero, int unit, bool last_micro) {
    Comm *comm = zero->comm;
    Slot *slot = &zero->grad_slots.slots[zero->grad_slot[unit]];
    const Held shard = zero_held(zero, &zero->layout->units[unit], true);
    gradX *sum = zero->grads + shard.at, *full = (gradX *)slot->data, *part = full + shard.first;
    const bool first_micro = !zero->accumulate[unit];
    zero->accumulate[unit] = true;
    comm_reduce_scatter(comm, &comm->shard, first_micro ? sum : part, full, shard.count, grad_type());
    if (!first_micro && !comm->planning) accumulate_gradient(zero->ops, sum, part, shard.count, comm->stream);
    if (last_micro && comm->replica.size > 1) comm_all_reduce(comm, &comm->replica, sum, shard.count, grad_type());
    zero_launched(zero, slot->ready);
    slots_give_back(&zero->grad_slots, unit, zero->grad_slot);
}

// With sequence parallelism a tensor rank has the part of its own rows in the gradients of what tensor ranks hold in
// common in a block or the final layer norm: sums them. (Those of the embeddings come from all rows.)
static inline void zero_sum_replicated(Zero *zero, const Unit *unit, gradX *grads) {
    if (!zero->options.sequence_parallel || (unit->kind != UNIT_BLOCK && unit->kind != UNIT_FINAL)) return;
    comm_all_reduce(zero->comm, &zero->comm->tensor, grads + unit->replicated, unit->size - unit->replicated,
                    grad_type());
}

// The compute stream has been given the last operation that writes the unit's gradient of a micro-batch. last_micro: it
// is complete for this step. Gradients in full are reduced once, when complete; sharded ones with every micro-batch.
static inline void zero_release_grads(Zero *zero, int unit, bool last_micro) {
    const Unit *table = &zero->layout->units[unit];
    const bool sharded = zero->strategy->shard_grads;
    if (!sharded && !last_micro) return;
    zero_sum_replicated(zero, table,
                        sharded ? (gradX *)zero->grad_slots.slots[zero->grad_slot[unit]].data
                                : zero->grads + table->offset);
    zero_record(zero, zero->grads_written[unit], zero->compute);
    zero_wait(zero, zero->comm->stream, zero->grads_written[unit]);
    gradX *full = zero->grads + table->offset;
    comm_name(zero->comm, table->name);
    if (sharded) {
        zero_reduce_slot(zero, unit, last_micro);
    } else if (zero->strategy->shard_optimizer) {
        const Held shard = zero_held(zero, table, true);
        comm_reduce_scatter(zero->comm, &zero->comm->shard, full + shard.first, full, shard.count, grad_type());
    } else if (zero->comm->data.size > 1) {
        comm_all_reduce(zero->comm, &zero->comm->data, full, table->size, grad_type());
    }
    if (last_micro) zero_launched(zero, zero->grads_reduced[unit]);
}

// ---------------------------------------------------------------------------------------------------------------------
// The step

// wte stands on the first and the last stage, for the embedding and for the head: the sum of both gradients, after the
// reduction over data-parallel ranks, shard with shard.
static inline void zero_tie_embedding(Zero *zero) {
    const Group *tied = &zero->comm->tied;
    if (tied->size == 1) return;
    const int wte = zero->layout->wte;
    const bool reduced_to_shards = zero->strategy->shard_optimizer;
    const Unit *unit = &zero->layout->units[wte];
    const Held shard = zero_held(zero, unit, reduced_to_shards),
               held = zero_held(zero, unit, zero->strategy->shard_grads);
    comm_all_reduce(zero->comm, tied, zero->grads + held.at + (shard.first - held.first), shard.count, grad_type());
    zero_launched(zero, zero->grads_reduced[wte]);
}

// Reads zero->scalars: the loss, and the sum of squares of the part of the reduced gradient that this rank answers for:
// units in order, each waited for. loss_sum: device memory, or NULL:
// another rank counts it. The host waits once, for both.
static inline void zero_read_scalars(Zero *zero, const double *loss_sum) {
    for (int u = 0; u < zero->layout->n_units; u++) {
        const Held own = zero_own(zero, &zero->layout->units[u], zero->strategy->shard_grads);
        zero_wait(zero, zero->compute, zero->grads_reduced[u]);
        sum_of_squares(zero->ops, zero->sum_of_squares, zero->grads + own.at, own.count, u > 0);
    }
    zero->scalars[0] = 0;
    if (loss_sum != NULL)
        cuda_check(cudaMemcpyAsync(&zero->scalars[0], loss_sum, sizeof(double), cudaMemcpyDeviceToHost, zero->compute));
    cuda_check(cudaMemcpyAsync(&zero->scalars[1], zero->sum_of_squares, sizeof(double), cudaMemcpyDeviceToHost,
                               zero->compute));
    comm_wait(zero->comm, zero->compute, "the loss and the reduced gradient");
}

// AdamW on this rank's slice of a unit.
static inline void zero_update_unit(Zero *zero, const Unit *unit, AdamW *hyper) {
    const Held slice = zero_held(zero, unit, zero->strategy->shard_optimizer);
    const Held params = zero_held(zero, unit, zero->strategy->shard_params);
    const Held grads = zero_held(zero, unit, zero->strategy->shard_grads);
    floatX *p = zero->params + params.at + (slice.first - params.first);
    const gradX *g = zero->grads + grads.at + (slice.first - grads.first);
    const size_t decay = unit->decay_size > slice.first ? unit->decay_size - slice.first : 0;
    if (zero->master != NULL || sizeof(floatX) == sizeof(float)) {
        adamw_update(zero->ops, hyper, p, zero->master ? zero->master + slice.at : NULL, zero->m + slice.at,
                     zero->v + slice.at, g, slice.count, decay);
        return;
    }
    // Stochastic rounding depends on the tensor and the global index, so a piece at a time.
    PieceCursor cursor = {0, 0};
    Piece piece;
    while (unit_next_piece(unit, slice.first, slice.first + slice.count, &cursor, &piece)) {
        const size_t at = piece.at - slice.first;
        hyper->round_key = random_key(zero->seed, RANDOM_ROUND, (uint64_t)hyper->step, (uint64_t)piece.tensor->id);
        hyper->round_first = piece.global;
        adamw_update(zero->ops, hyper, p + at, NULL, zero->m + slice.at + at, zero->v + slice.at + at, g + at,
                     piece.count, piece.tensor->matrix ? piece.count : 0);
    }
}

enum { ZERO_SMALL_BYTES = 1 << 16 }; // of a unit whose collective costs its launch more than its bytes

// Gathers units [first, end), which have been updated, in one launch.
static inline void zero_gather_updated(Zero *zero, int first, int end) {
    for (int u = first; u < end; u++) zero_wait(zero, zero->comm->stream, zero->params_updated[u]);
    comm_begin_group(zero->comm);
    for (int u = first; u < end; u++) {
        const Unit *unit = &zero->layout->units[u];
        const Held shard = zero_held(zero, unit, true);
        floatX *full = zero->params + unit->offset;
        comm_name(zero->comm, unit->name);
        comm_all_gather(zero->comm, &zero->comm->shard, full, full + shard.first, shard.count, param_type());
    }
    comm_end_group(zero->comm);
    for (int u = first; u < end; u++) zero_launched(zero, zero->params_ready[u]);
}

// Updates all units and starts gathering what every rank needs in full: the next pass waits for it unit by unit. A
// small unit is gathered together with the one before it. hyper NULL: for a plan, which computes nothing.
static inline void zero_update(Zero *zero, AdamW *hyper) {
    const bool gather = zero->strategy->shard_optimizer && !zero->strategy->shard_params;
    const int n = zero->layout->n_units;
    for (int u = 0, first = 0; u < n; u++) {
        const Unit *unit = &zero->layout->units[u];
        if (hyper != NULL) {
            const int span = trace_begin(zero->comm->trace, TRACE_COMPUTE, zero->compute, "AdamW %s", unit->name);
            range_push("update");
            range_push(unit->name);
            zero_update_unit(zero, unit, hyper);
            range_pop();
            range_pop();
            trace_end(zero->comm->trace, span, zero->compute);
        }
        zero_record(zero, zero->params_updated[u], zero->compute);
        const bool joined = u + 1 < n && zero->layout->units[u + 1].size * sizeof(floatX) <= ZERO_SMALL_BYTES;
        if (!gather || joined) continue;
        zero_gather_updated(zero, first, u + 1);
        first = u + 1;
    }
}

// Ends a step: exchanges the scalars, computes the global norm, clips (grad_clip 0: does not), and updates. loss_sum:
// device memory, this rank's sum over its tokens of the step. hyper's grad_scale and step are set here. A step whose
// loss or norm is not finite changes nothing.
static inline StepResult zero_step(Zero *zero, AdamW *hyper, double grad_clip, const double *loss_sum, bool stop) {
    StepResult result = {0, 0, false, false};
    enum { SCALARS = 3 };
    double mine[SCALARS] = {0, 0, stop ? 1.0 : 0.0};
    zero_tie_embedding(zero);
    zero->comm->world.what = "loss and norm";
    if (zero->comm->planning) {
        comm_gather(zero->comm, mine, sizeof mine);
        zero_update(zero, NULL);
        return result;
    }
    zero_read_scalars(zero, loss_sum);
    mine[0] = zero->scalars[0];
    mine[1] = zero->scalars[1];
    const double *all = (const double *)comm_gather(zero->comm, mine, sizeof mine);
    double squares = 0;
    for (int r = 0; r < zero->comm->world_size; r++) {
        result.loss_sum += all[r * SCALARS];
        squares += all[r * SCALARS + 1];
        if (all[r * SCALARS + 2] != 0) result.stop = true;
    }
    result.grad_norm = sqrt(squares);
    result.updated = isfinite(result.loss_sum) && isfinite(result.grad_norm);
    if (!result.updated) return result;
    const bool clip = grad_clip > 0 && result.grad_norm > grad_clip;
    hyper->grad_scale = clip ? (float)(grad_clip / result.grad_norm) : 1.0f;
    hyper->step = ++zero->updates;
    zero_update(zero, hyper);
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Hashes

// The sum, modulo 2^64, over elements [first, first + count) of a unit of a mix of tensor id, global index and the bits
// of the fp32 value. A sum does not depend on the order. The values stand at `at` of the masters, or of the parameters.
static inline uint64_t zero_hash(const Zero *zero, const Unit *unit, Held range, bool masters) {
    float *values = (float *)table_alloc(ZERO_CHUNK, sizeof(float));
    floatX *rounded = (floatX *)table_alloc(ZERO_CHUNK, sizeof(floatX));
    uint64_t hash = 0;
    PieceCursor cursor = {0, 0};
    Piece piece;
    while (unit_next_piece(unit, range.first, range.first + range.count, &cursor, &piece)) {
        const uint64_t key = random_mix((uint64_t)piece.tensor->id + 1);
        for (size_t done = 0; done < piece.count; done += ZERO_CHUNK) {
            const size_t left = piece.count - done, count = left < (size_t)ZERO_CHUNK ? left : (size_t)ZERO_CHUNK;
            const size_t at = range.at + (piece.at + done - range.first);
            if (masters) {
                cuda_check(cudaMemcpy(values, zero->master + at, count * sizeof(float), cudaMemcpyDeviceToHost));
            } else {
                cuda_check(cudaMemcpy(rounded, zero->params + at, count * sizeof(floatX), cudaMemcpyDeviceToHost));
                for (size_t i = 0; i < count; i++) values[i] = floatX_to_float(rounded[i]);
            }
            for (size_t i = 0; i < count; i++) {
                uint32_t bits;
                memcpy(&bits, &values[i], sizeof bits);
                hash += random_mix(random_mix(key ^ (piece.global + done + i)) + bits);
            }
        }
    }
    free(values);
    free(rounded);
    return hash;
}

// Waits until both streams are done.
static inline void zero_finish(Zero *zero) {
    comm_wait(zero->comm, zero->compute, "the update of parameters");
    comm_finish(zero->comm);
}

// A hash of all parameters of the model (masters where they exist), however they are sharded: every rank hashes the
// part that it answers for.
static inline uint64_t zero_params_hash(Zero *zero) {
    const bool masters = zero->master != NULL;
    const bool sharded = masters ? zero->strategy->shard_optimizer : zero->strategy->shard_params;
    zero_finish(zero);
    uint64_t hash = 0;
    for (int u = 0; u < zero->layout->n_units; u++) {
        const Unit *unit = &zero->layout->units[u];
        hash += zero_hash(zero, unit, zero_own(zero, unit, sharded), masters);
    }
    const uint64_t *all = (const uint64_t *)comm_gather(zero->comm, &hash, sizeof hash);
    hash = 0;
    for (int r = 0; r < zero->comm->world_size; r++) hash += all[r];
    return hash;
}

// The name of the unit that begins with the tensor of this id, which may be another rank's.
static inline const char *zero_unit_name(const Zero *zero, int64_t id, char name[32]) {
    const int64_t block = (id - 2) / BLOCK_TENSORS;
    if (id < 2)
        snprintf(name, 32, "%s", id == 0 ? "wte" : "wpe");
    else if (block == zero->layout->shape.n_layer)
        snprintf(name, 32, "lnf");
    else
        snprintf(name, 32, "block %lld", (long long)block);
    return name;
}

// Checks what must be the same on several ranks: parameters that are held more than once, the count of updates, and the
// sequence of collectives so far. All ranks learn the first difference and end together.
static inline void zero_check_replicas(Zero *zero, int64_t step) {
    Comm *comm = zero->comm;
    const Group *shard = &comm->shard;
    const bool sharded = zero->strategy->shard_params;
    zero_finish(zero);
    const uint64_t counters[2] = {(uint64_t)zero->updates, comm->sequence};
    const uint64_t *all = (const uint64_t *)comm_gather(comm, counters, sizeof counters);
    const int stage_ranks = comm->world_size / comm->grid.pipeline;
    for (int r = 1; r < comm->world_size; r++)
        for (int i = 0; i < 2; i++) {
            const int first = i == 0 ? 0 : r / stage_ranks * stage_ranks; // stages differ in what they exchange
            if (all[2 * r + i] != all[2 * first + i])
                comm_die_together(comm, EXIT_RUN,
                                  "check_replicas: after step %lld rank %d differs from rank %d in %s: %llx, not %llx",
                                  (long long)step, r, first,
                                  i == 0 ? "the number of updates" : "its sequence of collectives",
                                  (unsigned long long)all[2 * r + i], (unsigned long long)all[2 * first + i]);
        }
    // Ranks hold different units: each is compared with the first rank that holds the same part of the same tensors.
    typedef struct {
        int64_t unit, shard, tensor; // which tensors, -1: none; which part; which slices
        uint64_t sliced, replicated; // hashes of what is sliced over tensor ranks, and of what is not
    } Replica;
    for (int u = 0; u < zero->layout->shape.n_layer + 3; u++) {
        Replica mine = {-1, sharded ? shard->rank : 0, comm->tensor.rank, 0, 0};
        if (u < zero->layout->n_units) {
            const Unit *unit = &zero->layout->units[u];
            const Held held = zero_held(zero, unit, sharded);
            const size_t end = held.first + held.count;
            const size_t cut = unit->replicated < held.first ? held.first
                               : unit->replicated < end      ? unit->replicated
                                                             : end;
            const Held sliced = {held.first, cut - held.first, held.at};
            const Held common = {cut, end - cut, held.at + (cut - held.first)};
            mine.unit = unit->tensors[0].id;
            mine.sliced = zero_hash(zero, unit, sliced, false);
            mine.replicated = zero_hash(zero, unit, common, false);
        }
        const Replica *replicas = (const Replica *)comm_gather(comm, &mine, sizeof mine);
        for (int r = 0; r < comm->world_size; r++)
            for (int other = 0; other < r && replicas[r].unit >= 0; other++) {
                const Replica *a = &replicas[other], *b = &replicas[r];
                if (a->unit != b->unit || a->shard != b->shard) continue;
                if (a->replicated == b->replicated && (a->tensor != b->tensor || a->sliced == b->sliced)) continue;
                char name[32];
                comm_die_together(
                    comm, EXIT_RUN,
                    "check_replicas: after step %lld rank %d differs from rank %d in the parameters of %s",
                    (long long)step, r, other, zero_unit_name(zero, b->unit, name));
            }
    }
}

#endif
