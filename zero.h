// zero.h: data parallelism: how parameters, gradients and optimizer state are sliced over the ranks, and which
// collectives run when.
//
// The model never names a strategy. A pass over the model is a list of uses (unit, kind, micro-batch), in order, and
// the model walks it through
//     zero_acquire_params(unit)               full parameters of the unit
//     zero_release_params(unit)               they may be freed again
//     zero_acquire_grads(unit, &accumulate)   a full-size buffer for the unit's gradient
//     zero_release_grads(unit, last_micro)    launches the reduction on the communication stream
//     zero_step()                             norm, clip, AdamW on this rank's slice
// Compute waits on events, per unit, never on the device: the reduction of unit u overlaps the backward of unit u-1.
//
// The norm of the gradient is summed from one partial sum per shard, in rank order, under every strategy, so that it
// has the same bits whether gradients are replicated or not.
#ifndef ZERO_H
#define ZERO_H

#include "comm.h"
#include "layout.h"
#include "memory.h"
#include "ops.h"
#include "random.h"

// One row per strategy: what is cut into one shard per data-parallel rank. What is not is held in full by every rank.
typedef struct {
    const char *name;
    bool shard_parameters, shard_gradients, shard_optimizer;
} Strategy;

static inline const Strategy *strategy_find(const char *name) {
    static const Strategy strategies[] = {{"ddp", false, false, false}};
    for (size_t i = 0; i < sizeof strategies / sizeof strategies[0]; i++)
        if (strcmp(strategies[i].name, name) == 0) return &strategies[i];
    return NULL;
}

typedef enum { USE_FORWARD, USE_HEAD, USE_BACKWARD } UseKind;

typedef struct {
    int unit;
    UseKind kind;
    int micro; // micro-batch
} Use;

typedef struct {
    const Layout *layout;
    const Strategy *strategy;
    Comm *comm;
    Ops *ops;
    cudaStream_t compute;
    bool overlap; // false: compute waits for every reduction at once
    int n, rank;  // data-parallel ranks, and this one

    floatX *params; // (layout->size)
    gradX *grads;   // (layout->size)
    float *master;  // (layout->size); NULL in fp32, where params are the masters
    float *m, *v;   // (layout->size)

    bool *accumulate;           // by unit: its gradient buffer holds a part of this step's gradient already
    cudaEvent_t *grads_written; // by unit, on the compute stream
    cudaEvent_t *grads_reduced; // by unit, on the communication stream
    int64_t updates;            // AdamW steps taken: skipped steps do not count
    double *sum_of_squares;     // device: this rank's partial sum of the norm
} Zero;

// What all ranks know after a step.
typedef struct {
    double loss_sum;  // over the tokens of the global batch
    double grad_norm; // before clipping
    bool updated;     // false: loss or norm is not finite, and nothing was changed
    bool stop;        // some rank asked to stop
} StepResult;

// The part of unit u that rank `shard` of n answers for, as a range of the unit.
typedef struct {
    size_t first, count;
} UnitRange;

static inline UnitRange zero_shard(const Unit *unit, int n, int shard) {
    UnitRange range = {(size_t)shard * (unit->size / (size_t)n), unit->size / (size_t)n};
    return range;
}

// Allocates this rank's parameters, gradients and optimizer state. `gradient_type`: the NCCL type of gradX.
static inline void zero_init(Zero *zero, Memory *memory, const Layout *layout, const Strategy *strategy, Comm *comm,
                             Ops *ops, cudaStream_t compute, bool overlap) {
    memset(zero, 0, sizeof *zero);
    zero->layout = layout;
    zero->strategy = strategy;
    zero->comm = comm;
    zero->ops = ops;
    zero->compute = compute;
    zero->overlap = overlap;
    zero->n = comm->data.size;
    zero->rank = comm->data.rank;
    const size_t size = layout->size;
    zero->params = (floatX *)memory_alloc(memory, MEMORY_PARAMETERS, size * sizeof(floatX));
    zero->grads = (gradX *)memory_alloc(memory, MEMORY_GRADIENTS, size * sizeof(gradX));
    // In fp32 the parameters are their own masters.
    if (sizeof(floatX) < sizeof(float))
        zero->master = (float *)memory_alloc(memory, MEMORY_OPTIMIZER, size * sizeof(float));
    zero->m = (float *)memory_alloc(memory, MEMORY_OPTIMIZER, size * sizeof(float));
    zero->v = (float *)memory_alloc(memory, MEMORY_OPTIMIZER, size * sizeof(float));
    zero->sum_of_squares = (double *)memory_alloc(memory, MEMORY_WORKSPACE, sizeof(double));
    const size_t units = (size_t)layout->n_units;
    zero->accumulate = (bool *)calloc(units, sizeof(bool));
    zero->grads_written = (cudaEvent_t *)calloc(units, sizeof(cudaEvent_t));
    zero->grads_reduced = (cudaEvent_t *)calloc(units, sizeof(cudaEvent_t));
    if (!zero->accumulate || !zero->grads_written || !zero->grads_reduced) die("no room for %zu events", units);
    if (memory->planning) return;
    for (size_t u = 0; u < units; u++) {
        cuda_check(cudaEventCreateWithFlags(&zero->grads_written[u], cudaEventDisableTiming));
        cuda_check(cudaEventCreateWithFlags(&zero->grads_reduced[u], cudaEventDisableTiming));
    }
}

static inline void zero_free(Zero *zero) {
    for (int u = 0; u < zero->layout->n_units && !zero->comm->planning; u++) {
        cuda_check(cudaEventDestroy(zero->grads_written[u]));
        cuda_check(cudaEventDestroy(zero->grads_reduced[u]));
    }
    free(zero->accumulate);
    free(zero->grads_written);
    free(zero->grads_reduced);
}

// Fills the masters and the parameters with GPT-2's initialisation. Every element depends on (seed, tensor, global
// index) alone.
static inline void zero_init_params(Zero *zero, uint64_t seed) {
    const size_t most = 1 << 18; // elements at a time
    float *values = (float *)malloc(most * sizeof(float));
    floatX *rounded = (floatX *)malloc(most * sizeof(floatX));
    if (values == NULL || rounded == NULL) die("no room to initialise parameters");
    for (int u = 0; u < zero->layout->n_units; u++) {
        const Unit *unit = &zero->layout->units[u];
        for (int t = 0; t < unit->n_tensors; t++) {
            const Tensor *tensor = &unit->tensors[t];
            if (tensor->init == INIT_ZERO) continue; // as allocated
            const uint64_t key = random_key(seed, RANDOM_INIT, (uint64_t)tensor->id, 0);
            TensorRun run;
            for (size_t r = 0; tensor_run(tensor, r, &run); r++) {
                for (size_t done = 0; done < run.count; done += most) {
                    const size_t count = run.count - done < most ? run.count - done : most;
                    const size_t to = unit->offset + tensor->offset + run.local + done;
#pragma omp parallel for
                    for (size_t i = 0; i < count; i++) {
                        values[i] = tensor->init == INIT_ONE
                                        ? 1.0f
                                        : tensor->init_std * random_normal(key, run.global + done + i);
                        rounded[i] = floatX_from(values[i]);
                    }
                    cuda_check(cudaMemcpy(zero->params + to, rounded, count * sizeof(floatX), cudaMemcpyHostToDevice));
                    if (zero->master != NULL)
                        cuda_check(
                            cudaMemcpy(zero->master + to, values, count * sizeof(float), cudaMemcpyHostToDevice));
                }
            }
        }
    }
    free(values);
    free(rounded);
}

// Before the first use of a step.
static inline void zero_begin_step(Zero *zero) {
    for (int u = 0; u < zero->layout->n_units; u++) zero->accumulate[u] = false;
}

// Full parameters of a unit, ready for the compute stream.
static inline const floatX *zero_acquire_params(Zero *zero, int unit) {
    return zero->params + zero->layout->units[unit].offset;
}

// The compute stream has been given the last operation that reads the unit's parameters in this use. Nothing is freed
// where parameters are held in full.
static inline void zero_release_params(Zero *zero, int unit) {
    (void)zero;
    (void)unit;
}

// A full-size buffer for the unit's gradient. *accumulate: 0, the buffer holds nothing yet and must be overwritten;
// 1, add to it.
static inline gradX *zero_acquire_grads(Zero *zero, int unit, int *accumulate) {
    *accumulate = zero->accumulate[unit];
    zero->accumulate[unit] = true;
    return zero->grads + zero->layout->units[unit].offset;
}

static inline ncclDataType_t gradient_type(void) {
    return sizeof(gradX) == sizeof(float) ? ncclFloat32 : ncclBfloat16;
}

// The compute stream has been given the last operation that writes the unit's gradient of a micro-batch; last_micro:
// it is complete for this step, and is reduced while compute goes on.
static inline void zero_release_grads(Zero *zero, int unit, bool last_micro) {
    const Unit *table = &zero->layout->units[unit];
    if (!last_micro || zero->n == 1) return;
    if (!zero->comm->planning) {
        cuda_check(cudaEventRecord(zero->grads_written[unit], zero->compute));
        cuda_check(cudaStreamWaitEvent(zero->comm->stream, zero->grads_written[unit], 0));
    }
    comm_all_reduce(zero->comm, &zero->comm->data, zero->grads + table->offset, table->size, gradient_type());
    if (zero->comm->planning) return;
    cuda_check(cudaEventRecord(zero->grads_reduced[unit], zero->comm->stream));
    if (!zero->overlap) cuda_check(cudaStreamWaitEvent(zero->compute, zero->grads_reduced[unit], 0));
}

// Sum of squares of this rank's shards of the reduced gradient: units in order, each waited for.
static inline double zero_partial_norm(Zero *zero) {
    double partial = 0;
    for (int u = 0; u < zero->layout->n_units; u++) {
        const Unit *unit = &zero->layout->units[u];
        const UnitRange shard = zero_shard(unit, zero->n, zero->rank);
        if (zero->n > 1) cuda_check(cudaStreamWaitEvent(zero->compute, zero->grads_reduced[u], 0));
        sum_of_squares(zero->ops, zero->sum_of_squares, zero->grads + unit->offset + shard.first, shard.count, u > 0);
    }
    cuda_check(cudaMemcpyAsync(&partial, zero->sum_of_squares, sizeof partial, cudaMemcpyDeviceToHost, zero->compute));
    cuda_check(cudaStreamSynchronize(zero->compute));
    return partial;
}

static inline void zero_update(Zero *zero, const AdamW *hyper) {
    for (int u = 0; u < zero->layout->n_units; u++) {
        const Unit *unit = &zero->layout->units[u];
        const size_t at = unit->offset;
        adamw_update(zero->ops, hyper, zero->params + at, zero->master ? zero->master + at : NULL, zero->m + at,
                     zero->v + at, zero->grads + at, unit->size, unit->decay_size);
    }
}

// Ends a step: exchanges the scalars, computes the global norm, clips (grad_clip 0: does not), and updates. loss_sum:
// this rank's sum over its tokens of the step. hyper's grad_scale and step are set here. A step whose loss or norm is
// not finite changes nothing.
static inline StepResult zero_step(Zero *zero, AdamW *hyper, double grad_clip, double loss_sum, bool stop) {
    StepResult result = {0, 0, false, false};
    enum { SCALARS = 3 };
    double mine[SCALARS] = {loss_sum, 0, stop ? 1.0 : 0.0};
    if (zero->comm->planning) {
        comm_gather(zero->comm, mine, sizeof mine);
        return result;
    }
    mine[1] = zero_partial_norm(zero);
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

// A hash of all parameters (masters where they exist): the sum, modulo 2^64, over all elements of a mix of tensor id,
// global index and the bits of the fp32 value. A sum does not depend on the order, so neither on how it is sharded:
// every rank hashes the shards it answers for.
static inline uint64_t zero_params_hash(Zero *zero) {
    const size_t most = 1 << 18; // elements at a time
    floatX *rounded = (floatX *)malloc(most * sizeof(floatX));
    float *values = (float *)malloc(most * sizeof(float));
    uint64_t hash = 0;
    if (rounded == NULL || values == NULL) die("no room to hash parameters");
    cuda_check(cudaStreamSynchronize(zero->compute));
    for (int u = 0; u < zero->layout->n_units; u++) {
        const Unit *unit = &zero->layout->units[u];
        const UnitRange shard = zero_shard(unit, zero->n, zero->rank);
        for (int t = 0; t < unit->n_tensors; t++) {
            const Tensor *tensor = &unit->tensors[t];
            const uint64_t key = random_mix((uint64_t)tensor->id + 1);
            TensorRun run;
            for (size_t r = 0; tensor_run(tensor, r, &run); r++) {
                // The part of the run that lies in the shard.
                const size_t begin = tensor->offset + run.local, end = begin + run.count;
                size_t at = begin > shard.first ? begin : shard.first;
                const size_t stop = end < shard.first + shard.count ? end : shard.first + shard.count;
                while (at < stop) {
                    const size_t count = stop - at < most ? stop - at : most;
                    if (zero->master != NULL) {
                        cuda_check(cudaMemcpy(values, zero->master + unit->offset + at, count * sizeof(float),
                                              cudaMemcpyDeviceToHost));
                    } else {
                        cuda_check(cudaMemcpy(rounded, zero->params + unit->offset + at, count * sizeof(floatX),
                                              cudaMemcpyDeviceToHost));
                        for (size_t i = 0; i < count; i++) values[i] = floatX_to_float(rounded[i]);
                    }
                    const size_t global = run.global + (at - begin);
                    for (size_t i = 0; i < count; i++) {
                        uint32_t bits;
                        memcpy(&bits, &values[i], sizeof bits);
                        hash += random_mix(random_mix(key ^ (global + i)) + bits);
                    }
                    at += count;
                }
            }
        }
    }
    const uint64_t *all = (const uint64_t *)comm_gather(zero->comm, &hash, sizeof hash);
    hash = 0;
    for (int r = 0; r < zero->comm->world_size; r++) hash += all[r];
    free(rounded);
    free(values);
    return hash;
}

#endif
