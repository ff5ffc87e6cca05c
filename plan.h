// plan.h: what a run is made of, and what it will take before anything is allocated.
//
// trainer_build() puts a run together from its configuration: layout, communicators, ops, sharded state, model. Given a
// planning Memory, the same code only counts: so the plan of a run is the run itself, walked without computing, and
// cannot drift from it. A run whose bytes differ from its plan's is a bug.
#ifndef PLAN_H
#define PLAN_H

#include "comm.h"
#include "config.h"
#include "gpt.h"
#include "layout.h"
#include "memory.h"
#include "ops.h"
#include "zero.h"

typedef struct {
    Memory memory;
    Layout layout;
    Comm comm;
    Ops ops;
    Zero zero;
    GPT model;
} Trainer;

// Builds one rank's part of a run, or counts what it takes. The trainer must not be moved afterwards.
static inline void trainer_build(Trainer *trainer, const Config *config, int rank, int world_size, bool planning,
                                 cudaStream_t compute, cudaStream_t communication) {
    memset(trainer, 0, sizeof *trainer);
    trainer->memory.planning = planning;
    const ModelShape shape = {(int)config->n_layer, (int)config->n_head, (int)config->n_embd,
                              (int)config->context_length, (int)config->vocab_size};
    const int B = (int)config->micro_batch, T = (int)config->sequence_length, chunks = (int)config->classifier_chunks;
    const Strategy *strategy = strategy_find(config->strategy);
    if (strategy == NULL) die("no strategy is called %s", config->strategy);

    comm_init(&trainer->comm, &trainer->memory, rank, world_size, (int)config->shard_ranks, config->timeout,
              communication);
    const LayoutCut cut = layout_whole(&shape, trainer->comm.data.size);
    layout_init(&trainer->layout, &shape, &cut);
    const OpsShape largest = {
        B, T, shape.n_embd, shape.n_head, shape.vocab_size, trainer->layout.padded_vocab, gpt_logit_rows(B, T, chunks)};
    ops_init(&trainer->ops, &trainer->memory, &largest, compute);
    const ZeroOptions sharding = {(int)config->prefetch, config->reshard_after_forward, config->overlap,
                                  config->master_weights};
    zero_init(&trainer->zero, &trainer->memory, &trainer->layout, strategy, &sharding, &trainer->comm, &trainer->ops,
              compute, (uint64_t)config->seed);
    const GPTOptions options = {B,
                                T,
                                (int)config->micro_batches,
                                chunks,
                                (float)config->dropout,
                                strcmp(config->recompute, "full") == 0,
                                (uint64_t)config->seed};
    gpt_init(&trainer->model, &trainer->memory, &trainer->layout, &trainer->ops, &trainer->zero, &options);
}

static inline void trainer_free(Trainer *trainer) {
    gpt_free(&trainer->model);
    zero_free(&trainer->zero);
    ops_free(&trainer->ops);
    comm_free(&trainer->comm);
    layout_free(&trainer->layout);
}

typedef struct {
    Memory memory;            // bytes by tag, and the peak
    CommCounts communication; // of one training step of this rank
} Plan;

// The plan of one rank: builds the run without allocating and walks the uses of one step without computing.
static inline Plan plan_rank(const Config *config, int rank, int world_size) {
    Trainer trainer;
    Plan plan;
    trainer_build(&trainer, config, rank, world_size, true, NULL, NULL);
    gpt_plan_step(&trainer.model);
    zero_step(&trainer.zero, NULL, 0, 0, false);
    plan.memory = trainer.memory;
    plan.communication = trainer.comm.counts;
    trainer_free(&trainer);
    return plan;
}

#endif
