// pipeline_parallel.h: stages of blocks on different ranks, and the schedule in which micro-batches pass through them.
//
// A rank works through a list of items, each a forward or backward pass of a micro-batch through one of its chunks.
// 1F1B (Narayanan et al., "PipeDream", SOSP 2019; "Efficient large-scale language model training on GPU clusters",
// SC 2021): some forwards to fill the pipeline, then one forward and one backward in turn, so that rank p of P never
// keeps more than P - p micro-batches. With V chunks a rank (interleaved; P divides the micro-batches) the pipeline
// fills V times as fast: of the time of a step (P - 1) / (V M) is added by filling and emptying, for M micro-batches.
//
// What passes between neighbours has a channel for each way and direction (comm.h), each with its own stream: a send or
// receive waits for nothing but its buffer, and neither stops the computation, which waits for what it needs by events.
// Receives of the next item are started before this one is computed, where their buffer is free.
//
// Without a pipeline the items are forward and backward of each micro-batch in turn, and nothing is sent.
#ifndef PIPELINE_PARALLEL_H
#define PIPELINE_PARALLEL_H

#include "comm.h"
#include "gpt.h"

typedef struct {
    bool backward;
    int chunk, micro;
    int nth; // of the rank's forwards, or of its backwards
} PipelineItem;

// Item `index` of the forwards (or backwards) of a rank, in their order: P micro-batches pass through the first chunk,
// then through the next one, and so on, before the next P. Backwards begin with the last chunk.
static inline PipelineItem pipeline_nth(int P, int V, bool backward, int index) {
    const int group = index / (P * V), within = index % (P * V);
    PipelineItem item;
    item.backward = backward;
    item.nth = index;
    item.chunk = V == 1 ? 0 : backward ? V - 1 - within / P : within / P;
    item.micro = V == 1 ? index : group * P + within % P;
    return item;
}

// Lists the items of rank p in a step of M micro-batches: 2 V M of them. V > 1: P divides M.
static inline void pipeline_schedule(int P, int V, int p, int M, PipelineItem *items) {
    const int total = V * M, fill = V == 1 ? P - 1 - p : 2 * (P - 1 - p) + (V - 1) * P;
    int n = 0, forwards = 0, backwards = 0;
    while (forwards < total && forwards < fill) items[n++] = pipeline_nth(P, V, false, forwards++);
    while (backwards < total) {
        if (forwards < total) items[n++] = pipeline_nth(P, V, false, forwards++);
        items[n++] = pipeline_nth(P, V, true, backwards++);
    }
}

// Of each chunk, how many micro-batches are alive at once, between forward and backward: what its activations must
// hold.
static inline void pipeline_alive(const PipelineItem *items, int n, int V, int *alive) {
    int *now = (int *)table_alloc((size_t)V, sizeof(int));
    for (int c = 0; c < V; c++) alive[c] = 1;
    for (int i = 0; i < n; i++) {
        const int c = items[i].chunk;
        now[c] += items[i].backward ? -1 : 1;
        if (now[c] > alive[c]) alive[c] = now[c];
    }
    free(now);
}

typedef struct {
    Comm *comm;
    GPT *model;
    int micro_batches;
    PipelineItem *items; // of a step
    int n_items;
    Use *uses, *forward; // of a step, in the order of its items; of a pass that only goes forward
    int *first_use;      // (n_items + 1)
    int n_forward;

    // Events by chunk and slot of its activations, chunk after chunk; NULL without a pipeline.
    int *first_slot;                                 // (n_chunks + 1)
    cudaEvent_t *received, *computed, *forward_sent; // its input; its output; its output has left
    cudaEvent_t *released;                           // its backward is done: the input may be overwritten
    cudaEvent_t gradient_received[2], gradient_computed[2], gradient_sent[2]; // by dx buffer
    bool *posted;                                                             // by item: its receive has been started
    cudaEvent_t *waits; // two by item: around the wait for its input
} Pipeline;

// Which dx buffer a backward item uses: they take turns.
static inline int pipeline_gradient_buffer(const PipelineItem *item) {
    return item->nth % 2;
}

static inline cudaEvent_t *pipeline_events(int n, unsigned flags) {
    cudaEvent_t *events = (cudaEvent_t *)table_alloc((size_t)n, sizeof(cudaEvent_t));
    for (int i = 0; i < n; i++) cuda_check(cudaEventCreateWithFlags(&events[i], flags));
    return events;
}

static inline void pipeline_free_events(cudaEvent_t *events, int n) {
    for (int i = 0; i < n && events != NULL; i++) cuda_check(cudaEventDestroy(events[i]));
    free(events);
}

// items: those of pipeline_schedule(), whose memory this takes over.
static inline void pipeline_init(Pipeline *pipeline, Comm *comm, GPT *model, PipelineItem *items, int n_items,
                                 int micro_batches) {
    memset(pipeline, 0, sizeof *pipeline);
    const Layout *layout = model->layout;
    pipeline->comm = comm;
    pipeline->model = model;
    pipeline->items = items;
    pipeline->n_items = n_items;
    pipeline->micro_batches = micro_batches;
    pipeline->first_use = (int *)table_alloc((size_t)n_items + 1, sizeof(int));
    for (int list = 0; list < 2; list++) { // first only counted
        int n = 0;
        for (int i = 0; i < n_items; i++) {
            pipeline->first_use[i] = n;
            n += gpt_list_uses(layout, &layout->chunks[items[i].chunk], items[i].backward, true, items[i].micro,
                               list ? pipeline->uses + n : NULL);
        }
        pipeline->first_use[n_items] = n;
        if (!list) pipeline->uses = (Use *)table_alloc((size_t)n, sizeof(Use));
    }
    for (int list = 0; list < 2; list++) {
        int n = 0;
        for (int c = 0; c < layout->n_chunks; c++)
            n += gpt_list_uses(layout, &layout->chunks[c], false, false, 0, list ? pipeline->forward + n : NULL);
        pipeline->n_forward = n;
        if (!list) pipeline->forward = (Use *)table_alloc((size_t)n, sizeof(Use));
    }
    pipeline->first_slot = (int *)table_alloc((size_t)layout->n_chunks + 1, sizeof(int));
    for (int c = 0; c < layout->n_chunks; c++)
        pipeline->first_slot[c + 1] = pipeline->first_slot[c] + model->chunks[c].count;
    pipeline->posted = (bool *)table_alloc((size_t)n_items, sizeof(bool));
    if (comm->planning || comm->grid.pipeline == 1) return;
    const int slots = pipeline->first_slot[layout->n_chunks];
    pipeline->received = pipeline_events(slots, cudaEventDisableTiming);
    pipeline->computed = pipeline_events(slots, cudaEventDisableTiming);
    pipeline->forward_sent = pipeline_events(slots, cudaEventDisableTiming);
    pipeline->released = pipeline_events(slots, cudaEventDisableTiming);
    pipeline->waits = pipeline_events(2 * n_items, cudaEventDefault);
    for (int i = 0; i < 2; i++) {
        cuda_check(cudaEventCreateWithFlags(&pipeline->gradient_received[i], cudaEventDisableTiming));
        cuda_check(cudaEventCreateWithFlags(&pipeline->gradient_computed[i], cudaEventDisableTiming));
        cuda_check(cudaEventCreateWithFlags(&pipeline->gradient_sent[i], cudaEventDisableTiming));
    }
}

static inline void pipeline_free(Pipeline *pipeline) {
    if (pipeline->received != NULL) {
        const int slots = pipeline->first_slot[pipeline->model->layout->n_chunks];
        pipeline_free_events(pipeline->received, slots);
        pipeline_free_events(pipeline->computed, slots);
        pipeline_free_events(pipeline->forward_sent, slots);
        pipeline_free_events(pipeline->released, slots);
        pipeline_free_events(pipeline->waits, 2 * pipeline->n_items);
        for (int i = 0; i < 2; i++) {
            cuda_check(cudaEventDestroy(pipeline->gradient_received[i]));
            cuda_check(cudaEventDestroy(pipeline->gradient_computed[i]));
            cuda_check(cudaEventDestroy(pipeline->gradient_sent[i]));
        }
    }
    free(pipeline->items);
    free(pipeline->uses);
    free(pipeline->forward);
    free(pipeline->first_use);
    free(pipeline->first_slot);
    free(pipeline->posted);
}

static inline void pipeline_record(const Pipeline *pipeline, cudaEvent_t *event, cudaStream_t stream) {
    if (!pipeline->comm->planning) cuda_check(cudaEventRecord(*event, stream));
}

static inline void pipeline_wait(const Pipeline *pipeline, cudaStream_t stream, cudaEvent_t *event) {
    if (!pipeline->comm->planning) cuda_check(cudaStreamWaitEvent(stream, *event, 0));
}

static inline int pipeline_slot(const Pipeline *pipeline, const PipelineItem *item) {
    return pipeline->first_slot[item->chunk] + item->micro % pipeline->model->chunks[item->chunk].count;
}

// The elements that pass between stages: this rank's rows of a micro-batch.
static inline size_t pipeline_count(const Pipeline *pipeline, const MicroBatch *batch) {
    const size_t rows = tp_rows(pipeline->model->tp, (size_t)batch->B * (size_t)batch->T);
    return rows * (size_t)pipeline->model->layout->shape.n_embd;
}

// Whether an item begins with what another rank computed, and whether another rank needs what it computes.
static inline bool pipeline_receives(const Pipeline *pipeline, const PipelineItem *item) {
    const Chunk *chunk = &pipeline->model->layout->chunks[item->chunk];
    return item->backward ? !chunk->last : !chunk->first;
}

static inline bool pipeline_sends(const Pipeline *pipeline, const PipelineItem *item) {
    const Chunk *chunk = &pipeline->model->layout->chunks[item->chunk];
    return item->backward ? !chunk->first : !chunk->last;
}

// Whether an item's tokens are needed here: inputs by the first stage, targets by the last.
static inline bool pipeline_reads(const Pipeline *pipeline, const PipelineItem *item) {
    const Chunk *chunk = &pipeline->model->layout->chunks[item->chunk];
    return !item->backward && (chunk->first || chunk->last);
}

static inline cudaEvent_t *pipeline_event(cudaEvent_t *events, int i) {
    return events == NULL ? NULL : &events[i];
}

// Starts to receive an item's input into the buffer where it is computed from. The buffer's last reader or sender has
// been put into its stream before.
static inline void pipeline_post(Pipeline *pipeline, int i, const MicroBatch *batch) {
    const PipelineItem *item = &pipeline->items[i];
    if (pipeline->posted[i] || !pipeline_receives(pipeline, item)) return;
    pipeline->posted[i] = true;
    GPT *model = pipeline->model;
    const Group *channel = &pipeline->comm->channels[item->backward ? BACKWARD_IN : FORWARD_IN];
    if (item->backward) {
        const int buffer = pipeline_gradient_buffer(item);
        pipeline_wait(pipeline, channel->stream, &pipeline->gradient_sent[buffer]);
        comm_recv(pipeline->comm, channel, model->dx[buffer], pipeline_count(pipeline, batch), activation_type());
        pipeline_record(pipeline, &pipeline->gradient_received[buffer], channel->stream);
        return;
    }
    const int slot = pipeline_slot(pipeline, item);
    floatX *input = gpt_block_input(model, gpt_activations(model, item->chunk, item->micro), 0);
    pipeline_wait(pipeline, channel->stream, pipeline_event(pipeline->released, slot));
    comm_recv(pipeline->comm, channel, input, pipeline_count(pipeline, batch), activation_type());
    pipeline_record(pipeline, pipeline_event(pipeline->received, slot), channel->stream);
}

// Before the first item of a step.
static inline void pipeline_begin_step(Pipeline *pipeline) {
    zero_begin(pipeline->model->zero, pipeline->uses, pipeline->first_use[pipeline->n_items]);
    memset(pipeline->posted, 0, (size_t)pipeline->n_items * sizeof(bool));
}

// Whether the receive of item i + 1 may be started before item i: not if that frees its buffer.
static inline bool pipeline_may_post(const Pipeline *pipeline, int i) {
    const PipelineItem *now = &pipeline->items[i], *next = &pipeline->items[i + 1];
    if (next->backward) return true; // buffers take turns, and the one before has been sent, or is about to be
    return !now->backward || pipeline_slot(pipeline, now) != pipeline_slot(pipeline, next);
}

// Computes item i of a step, in order. batch: what all micro-batches have in common, and, where pipeline_reads(), the
// item's tokens.
static inline void pipeline_run(Pipeline *pipeline, int i, MicroBatch *batch) {
    const PipelineItem *item = &pipeline->items[i];
    GPT *model = pipeline->model;
    cudaStream_t compute = model->zero->compute;
    const int slot = pipeline_slot(pipeline, item);
    const int buffer = item->backward ? pipeline_gradient_buffer(item) : 0;
    const bool receives = pipeline_receives(pipeline, item), sends = pipeline_sends(pipeline, item);
    floatX *dx = model->dx[buffer];
    batch->micro = item->micro;
    batch->train = true;
    batch->last_micro = item->micro + 1 == pipeline->micro_batches;

    pipeline_post(pipeline, i, batch);
    if (i + 1 < pipeline->n_items && pipeline_may_post(pipeline, i)) pipeline_post(pipeline, i + 1, batch);
    if (pipeline_reads(pipeline, item)) gpt_upload(model, batch, item->chunk);
    if (receives) {
        pipeline_record(pipeline, pipeline_event(pipeline->waits, 2 * i), compute);
        pipeline_wait(pipeline, compute,
                      item->backward ? &pipeline->gradient_received[buffer] : pipeline_event(pipeline->received, slot));
        pipeline_record(pipeline, pipeline_event(pipeline->waits, 2 * i + 1), compute);
    }
    // What the output overwrites has left.
    if (sends && item->backward && !receives) pipeline_wait(pipeline, compute, &pipeline->gradient_sent[buffer]);
    if (sends && !item->backward) pipeline_wait(pipeline, compute, pipeline_event(pipeline->forward_sent, slot));
    const int span = trace_begin(pipeline->comm->trace, TRACE_COMPUTE, compute, "%c%d, stage %d",
                                 item->backward ? 'B' : 'F', item->micro, model->layout->chunks[item->chunk].stage);
    gpt_pass(model, batch, item->chunk, pipeline->uses + pipeline->first_use[i],
             pipeline->first_use[i + 1] - pipeline->first_use[i], dx);
    trace_end(pipeline->comm->trace, span, compute);
    if (pipeline->comm->grid.pipeline == 1) return;

    if (item->backward) pipeline_record(pipeline, pipeline_event(pipeline->released, slot), compute);
    if (!sends) {
        // A buffer that is not sent is free when it has been computed with.
        if (item->backward) pipeline_record(pipeline, &pipeline->gradient_sent[buffer], compute);
        return;
    }
    const Group *channel = &pipeline->comm->channels[item->backward ? BACKWARD_OUT : FORWARD_OUT];
    cudaEvent_t *computed =
        item->backward ? &pipeline->gradient_computed[buffer] : pipeline_event(pipeline->computed, slot);
    cudaEvent_t *sent =
        item->backward ? &pipeline->gradient_sent[buffer] : pipeline_event(pipeline->forward_sent, slot);
    const Activations *a = gpt_activations(model, item->chunk, item->micro);
    const floatX *output = item->backward ? dx : gpt_block_input(model, a, model->layout->chunks[item->chunk].n_layers);
    pipeline_record(pipeline, computed, compute);
    pipeline_wait(pipeline, channel->stream, computed);
    comm_send(pipeline->comm, channel, output, pipeline_count(pipeline, batch), activation_type());
    pipeline_record(pipeline, sent, channel->stream);
}

// A pass of one micro-batch that only goes forward, through all stages: batch->inputs and batch->targets on every rank.
static inline void pipeline_forward(Pipeline *pipeline, MicroBatch *batch) {
    GPT *model = pipeline->model;
    const Layout *layout = model->layout;
    cudaStream_t compute = model->zero->compute;
    batch->micro = 0;
    batch->train = false;
    zero_begin(model->zero, pipeline->forward, pipeline->n_forward);
    int first = 0;
    for (int c = 0; c < layout->n_chunks; c++) {
        const Chunk *chunk = &layout->chunks[c];
        const int n = gpt_list_uses(layout, chunk, false, false, 0, NULL), slot = pipeline->first_slot[c];
        const Activations *a = gpt_activations(model, c, 0);
        const Group *in = &pipeline->comm->channels[FORWARD_IN], *out = &pipeline->comm->channels[FORWARD_OUT];
        if (!chunk->first) {
            // Everything that used the buffer stands in the compute stream.
            cuda_check(cudaEventRecord(pipeline->released[slot], compute));
            cuda_check(cudaStreamWaitEvent(in->stream, pipeline->released[slot], 0));
            comm_recv(pipeline->comm, in, gpt_block_input(model, a, 0), pipeline_count(pipeline, batch),
                      activation_type());
            cuda_check(cudaEventRecord(pipeline->received[slot], in->stream));
            cuda_check(cudaStreamWaitEvent(compute, pipeline->received[slot], 0));
        }
        if (!chunk->last) cuda_check(cudaStreamWaitEvent(compute, pipeline->forward_sent[slot], 0));
        gpt_upload(model, batch, c);
        gpt_pass(model, batch, c, pipeline->forward + first, n, NULL);
        first += n;
        if (chunk->last) continue;
        cuda_check(cudaEventRecord(pipeline->computed[slot], compute));
        cuda_check(cudaStreamWaitEvent(out->stream, pipeline->computed[slot], 0));
        comm_send(pipeline->comm, out, gpt_block_input(model, a, chunk->n_layers), pipeline_count(pipeline, batch),
                  activation_type());
        cuda_check(cudaEventRecord(pipeline->forward_sent[slot], out->stream));
    }
}

// The time, in ms, that this rank's computation waited for other stages in the last step. After the step has ended.
static inline double pipeline_idle_ms(const Pipeline *pipeline) {
    double idle = 0;
    for (int i = 0; i < pipeline->n_items && pipeline->waits != NULL; i++) {
        if (!pipeline_receives(pipeline, &pipeline->items[i])) continue;
        float ms = 0;
        cuda_check(cudaEventElapsedTime(&ms, pipeline->waits[2 * i], pipeline->waits[2 * i + 1]));
        idle += (double)ms;
    }
    return idle;
}

// Walks a step without computing: what a plan counts. B, T: the shape of a micro-batch.
static inline void pipeline_plan_step(Pipeline *pipeline, int B, int T) {
    MicroBatch batch;
    memset(&batch, 0, sizeof batch);
    batch.B = B;
    batch.T = T;
    batch.only_row = -1;
    pipeline_begin_step(pipeline);
    for (int i = 0; i < pipeline->n_items; i++) pipeline_run(pipeline, i, &batch);
}

#endif
