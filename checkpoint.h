// checkpoint.h: saving a run.
//
// Under every strategy rank r writes the part of each unit that it alone answers for (zero_own()): 1/N of it; what
// tensor ranks hold in common and the second copy of wte are written once. Its file rank_0000r.safetensors holds
// one-dimensional tensors "block 3.params", "block 3.m", "block 3.v" of this part: in fp32 (params are the masters
// where there are any), or params in bf16 where bf16 is all there is. The file's __metadata__ says for every unit which
// elements these are and where its tensors stand among them; the reader (resume.h) works that out again from the
// manifest's grid, through layout.h. So there is one format, and any grid reads any other's.
//
// A checkpoint is a snapshot after a step. With checkpoint_async training is held for the copy into host memory,
// allocated and touched at the start; a thread writes it, and the ranks ask one another after each step whether all are
// done. Then rank 0, in a thread too, writes the manifest and gives the checkpoint its name, and removes old ones. A
// checkpoint waits for the one before. If anything fails, training goes on, the failure is reported once, and the
// checkpoints that there are stay. Without checkpoint_async the same functions run one after the other.
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include <pthread.h>
#include <signal.h>
#include "comm.h"
#include "config.h"
#include "files.h"
#include "layout.h"
#include "manifest.h"
#include "safetensors.h"
#include "zero.h"

// One tensor of this rank's file.
typedef struct {
    const char *device; // where it stands
    size_t bytes, at;   // and goes to, in the snapshot
} CheckpointPart;

typedef enum { CHECKPOINT_IDLE, CHECKPOINT_WRITING, CHECKPOINT_PUBLISHING } CheckpointPhase; // the last: on rank 0

typedef struct {
    const Config *config;
    Zero *zero;
    Comm *comm;
    DatasetIdentity data;
    char *options; // the configuration as JSON
    int log_file;  // descriptor of metrics.jsonl, or -1

    int n_parts;
    CheckpointPart *parts;
    SafetensorsTensor *tensors; // of the parts
    char **metadata;            // key, text, ..., NULL
    char *snapshot;             // host, pinned: of all parts; without checkpoint_async of the largest
    size_t snapshot_bytes;

    CheckpointPhase phase;
    pthread_t thread;
    int written; // atomic: the thread has written this rank's file
    Manifest manifest;
    char *path, *temporary;
    uint64_t file_bytes, file_checksum; // of this rank's
    Error error;
    int64_t last;        // step of the newest that was begun, or that the run has come from; -1: none
    int64_t begun;       // how many, in this run
    int64_t saved;       // of them complete; on rank 0
    double held_seconds; // for how long training waited, in all
} Checkpoints;

// What a unit's part in this rank's file holds.
static inline char *checkpoint_describe(const Unit *unit, Held own) {
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    if (out == NULL) die("no memory for a description of %s", unit->name);
    fprintf(out, "elements %zu to %zu of %zu", own.first, own.first + own.count, unit->size);
    for (int t = 0; t < unit->n_tensors; t++) {
        const Tensor *tensor = &unit->tensors[t];
        fprintf(out, "; %s from %zu: %zu x %zu x %zu", tensor->name, tensor->offset, tensor->outer, tensor->sliced,
                tensor->inner);
        if (tensor->sliced != tensor->sliced_full)
            fprintf(out, ", the second being %zu to %zu of %zu", tensor->sliced_first,
                    tensor->sliced_first + tensor->sliced, tensor->sliced_full);
    }
    if (fclose(out) != 0) die("no memory for a description of %s", unit->name);
    return text;
}

// What this rank writes of a unit's state, and in which type; false: nothing.
static inline bool checkpoint_part(const Zero *zero, const Unit *unit, int state, Held *own, FloatType *type) {
    const bool params = state == STATE_PARAMS && !zero_has_masters(&zero->options);
    *own = zero_own(zero, unit, params ? zero->strategy->shard_params : zero->strategy->shard_optimizer);
    *type = params && sizeof(floatX) < sizeof(float) ? FLOAT_BF16 : FLOAT_F32;
    return own->count > 0;
}

// Gives a part its place in the snapshot, which has *snapshot_bytes so far: with checkpoint_async one of its own,
// otherwise the same as all others.
static inline size_t checkpoint_place(const Config *config, size_t part_bytes, size_t *snapshot_bytes) {
    const size_t room = round_up(part_bytes, 64), at = config->checkpoint_async ? *snapshot_bytes : 0;
    if (at + room > *snapshot_bytes) *snapshot_bytes = at + room;
    return at;
}

// Host memory that this rank's snapshot takes; 0 without checkpoints.
static inline size_t checkpoint_snapshot_bytes(const Config *config, const Zero *zero) {
    size_t bytes = 0;
    Held own;
    FloatType type;
    for (int state = 0; state < STATES && config->checkpoint_every > 0; state++)
        for (int u = 0; u < zero->layout->n_units; u++)
            if (checkpoint_part(zero, &zero->layout->units[u], state, &own, &type))
                checkpoint_place(config, own.count * float_type_size(type), &bytes);
    return bytes;
}

static inline char *checkpoint_text(const char *text) {
    char *copy = strdup(text);
    if (copy == NULL) die("no memory for the names of a checkpoint");
    return copy;
}

// Lists what this rank writes and allocates the snapshot. log_file: descriptor of metrics.jsonl, or -1.
static inline void checkpoints_open(Checkpoints *cp, const Config *config, Zero *zero, const DatasetIdentity *data,
                                    int log_file) {
    memset(cp, 0, sizeof *cp);
    cp->config = config;
    cp->zero = zero;
    cp->comm = zero->comm;
    cp->data = *data;
    cp->log_file = log_file;
    cp->last = -1;
    if (config->checkpoint_every == 0) return;
    Config copy = *config;
    OptionTable table = config_table(&copy);
    cp->options = options_to_json(&table);
    const int n_units = zero->layout->n_units;
    cp->parts = (CheckpointPart *)table_alloc((size_t)(STATES * n_units), sizeof(CheckpointPart));
    cp->tensors = (SafetensorsTensor *)table_alloc((size_t)(STATES * n_units), sizeof(SafetensorsTensor));
    cp->metadata = (char **)table_alloc((size_t)(2 * n_units) + 3, sizeof(char *));
    char text[64];
    int n_metadata = 0;
    snprintf(text, sizeof text, "train_gpt, rank %d of %d", cp->comm->rank, cp->comm->world_size);
    cp->metadata[n_metadata++] = checkpoint_text("written by");
    cp->metadata[n_metadata++] = checkpoint_text(text);
    for (int state = 0; state < STATES; state++)
        for (int u = 0; u < n_units; u++) {
            const Unit *unit = &zero->layout->units[u];
            Held own;
            FloatType type;
            if (!checkpoint_part(zero, unit, state, &own, &type)) continue;
            const float *optimizer = state == STATE_PARAMS ? zero->master : state == STATE_M ? zero->m : zero->v;
            CheckpointPart *part = &cp->parts[cp->n_parts];
            part->device =
                optimizer == NULL ? (const char *)(zero->params + own.at) : (const char *)(optimizer + own.at);
            part->bytes = own.count * float_type_size(type);
            part->at = checkpoint_place(config, part->bytes, &cp->snapshot_bytes);
            char name[48];
            state_tensor_name(unit, state, name);
            const uint64_t shape[1] = {own.count};
            cp->tensors[cp->n_parts++] = safetensors_describe(checkpoint_text(name), type, 1, shape);
            if (state > 0) continue;
            cp->metadata[n_metadata++] = checkpoint_text(unit->name);
            cp->metadata[n_metadata++] = checkpoint_describe(unit, own);
        }
    if (cp->snapshot_bytes == 0) return; // a rank of many, with a small model
    cuda_check(cudaMallocHost((void **)&cp->snapshot, cp->snapshot_bytes));
    memset(cp->snapshot, 0, cp->snapshot_bytes); // so that its pages are there
}

// Copies part i out of the buffers, which nothing writes; host memory holds it when the compute stream is done.
static inline void checkpoint_copy(Checkpoints *cp, int i) {
    const CheckpointPart *part = &cp->parts[i];
    cuda_check(
        cudaMemcpyAsync(cp->snapshot + part->at, part->device, part->bytes, cudaMemcpyDeviceToHost, cp->zero->compute));
}

// Writes this rank's file.
static inline void checkpoint_write_file(Checkpoints *cp) {
    char *path = rank_path(cp->temporary, cp->comm->rank);
    SafetensorsWriter writer;
    bool ok =
        safetensors_create(&writer, path, cp->tensors, cp->n_parts, (const char *const *)cp->metadata, &cp->error);
    for (int i = 0; i < cp->n_parts && ok; i++) {
        if (!cp->config->checkpoint_async) {
            checkpoint_copy(cp, i);
            comm_wait(cp->comm, cp->zero->compute, "the copy of a checkpoint");
        }
        ok = safetensors_write_bytes(&writer, cp->snapshot + cp->parts[i].at, cp->parts[i].bytes, &cp->error);
    }
    safetensors_finish(&writer, &cp->error);
    cp->file_bytes = (uint64_t)writer.file.written;
    cp->file_checksum = checksum_value(&writer.file.checksum);
    free(path);
    __atomic_store_n(&cp->written, 1, __ATOMIC_RELEASE);
}

static inline void *checkpoint_write_thread(void *argument) {
    checkpoint_write_file((Checkpoints *)argument);
    return NULL;
}

static inline void checkpoint_report(const Checkpoints *cp, const char *what) {
    if (cp->comm->rank != 0) return;
    fflush(stdout);
    fprintf(stderr, "train_gpt: the checkpoint after step %llu was not saved: %s; training goes on\n",
            (unsigned long long)cp->manifest.step, what);
}

// Removes checkpoints that are not to be kept, now that the one after `step` is complete; those with later steps are of
// a run that was given up, or damaged.
static inline void checkpoint_remove_old(const Config *config, uint64_t step) {
    int count = 0;
    uint64_t *steps = list_steps(config->log_dir, &count), major = (uint64_t)config->checkpoint_major_every;
    int64_t kept = 0;
    for (int i = 0; i < count; i++) {
        const bool later = steps[i] > step, is_major = major > 0 && steps[i] > 0 && steps[i] % major == 0;
        if (!later && kept++ < config->checkpoint_keep) continue;
        if (later || !is_major) remove_step(config->log_dir, steps[i]);
    }
    free(steps);
}

// Replaces the text file LOG_DIR/latest.
static inline bool checkpoint_name_latest(const char *directory, const char *name, Error *error) {
    char *path = path_join(directory, "/", "latest"), *temporary = path_join(path, "", ".new");
    OutputFile file;
    if (output_open(&file, temporary, error) && output_write(&file, name, strlen(name), error))
        output_write(&file, "\n", 1, error);
    const bool ok = output_finish(&file, error) && file_publish(temporary, path, error);
    free(path);
    free(temporary);
    return ok;
}

// Rank 0, when all files are written: the manifest, the name, the removal of old ones.
static inline void *checkpoint_publish(void *argument) {
    Checkpoints *cp = (Checkpoints *)argument;
    Error *error = &cp->error;
    const char *log_dir = cp->config->log_dir;
    // The log up to this step must be on disk no later than what continues it.
    if (cp->log_file >= 0 && fsync(cp->log_file) != 0 && errno != EINVAL)
        error_set(error, "%s/metrics.jsonl: writing to disk failed: %s", log_dir, strerror(errno));
    bool ok = error->text[0] == '\0' && manifest_write(&cp->manifest, cp->temporary, cp->options, error) &&
              directory_sync(cp->temporary, error);
    if (ok) {
        struct stat status;
        if (stat(cp->path, &status) == 0) remove_step(log_dir, cp->manifest.step); // a damaged one
        ok = file_publish(cp->temporary, cp->path, error);
    }
    if (!ok) {
        remove_directory(cp->temporary);
        checkpoint_report(cp, error->text);
        return NULL;
    }
    cp->saved++;
    char name[STEP_NAME];
    step_name(cp->manifest.step, "", name);
    if (!checkpoint_name_latest(log_dir, name, error)) {
        fflush(stdout);
        fprintf(stderr, "train_gpt: %s; the checkpoint itself is complete\n", error->text);
    }
    checkpoint_remove_old(cp->config, cp->manifest.step);
    return NULL;
}

// Starts a thread that takes no signals: they are for the one that waits for them.
static inline void checkpoint_start(Checkpoints *cp, void *(*function)(void *)) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int status = pthread_create(&cp->thread, NULL, function, cp);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0) die("the thread that writes checkpoints cannot be started: %s", strerror(status));
}

static inline void checkpoint_end(Checkpoints *cp) {
    free(cp->path);
    free(cp->temporary);
    cp->path = cp->temporary = NULL;
    cp->phase = CHECKPOINT_IDLE;
}

// All ranks have written their files, or failed: learns which, and lets rank 0 publish.
static inline void checkpoint_complete(Checkpoints *cp) {
    Comm *comm = cp->comm;
    if (cp->config->checkpoint_async) pthread_join(cp->thread, NULL);
    const bool ok = comm_agree(comm, &cp->error);
    const ManifestFile mine = {cp->file_bytes, cp->file_checksum};
    const ManifestFile *all = (const ManifestFile *)comm_gather(comm, &mine, sizeof mine);
    if (!ok) {
        checkpoint_report(cp, cp->error.text);
        if (comm->rank == 0) remove_directory(cp->temporary);
        checkpoint_end(cp);
        return;
    }
    if (comm->rank != 0) {
        checkpoint_end(cp);
        return;
    }
    memcpy(cp->manifest.files, all, (size_t)comm->world_size * sizeof mine);
    cp->phase = CHECKPOINT_PUBLISHING;
    if (cp->config->checkpoint_async) {
        checkpoint_start(cp, checkpoint_publish);
    } else {
        checkpoint_publish(cp);
        checkpoint_end(cp);
    }
}

// After each step: goes on with a checkpoint that is being written, if all ranks have written their files.
static inline void checkpoint_poll(Checkpoints *cp) {
    if (cp->phase != CHECKPOINT_WRITING) return;
    const char mine = (char)__atomic_load_n(&cp->written, __ATOMIC_ACQUIRE);
    const char *all = (const char *)comm_gather(cp->comm, &mine, 1);
    for (int r = 0; r < cp->comm->world_size; r++)
        if (!all[r]) return;
    checkpoint_complete(cp);
}

// Waits until no checkpoint is being written. All ranks call it.
static inline void checkpoint_wait(Checkpoints *cp) {
    if (cp->phase == CHECKPOINT_WRITING) checkpoint_complete(cp);
    if (cp->phase != CHECKPOINT_PUBLISHING) return;
    pthread_join(cp->thread, NULL);
    checkpoint_end(cp);
}

// Saves the state after `step` steps; all ranks call it. log_bytes: of metrics.jsonl up to this step.
static inline void checkpoint_save(Checkpoints *cp, int64_t step, int64_t bad_steps, int64_t log_bytes,
                                   double train_loss) {
    const Config *config = cp->config;
    Zero *zero = cp->zero;
    Comm *comm = cp->comm;
    const double begin = comm_seconds();
    checkpoint_wait(cp);
    cp->last = step;
    memset(&cp->error, 0, sizeof cp->error);
    __atomic_store_n(&cp->written, 0, __ATOMIC_RELEASE);
    Manifest *m = &cp->manifest;
    manifest_free(m);
    memset(m, 0, sizeof *m);
    m->step = (uint64_t)step;
    m->updates = (uint64_t)zero->updates;
    m->bad_steps = (uint64_t)bad_steps;
    m->shape = zero->layout->shape;
    m->grid = comm->grid;
    m->shard_group = comm->shard.size;
    m->pipeline_chunks = zero->layout->cut.pipeline_chunks;
    m->data = cp->data;
    m->seed = (uint64_t)config->seed;
    m->tokens_per_step = (uint64_t)config->tokens_per_step;
    m->sequence_length = (uint64_t)config->sequence_length;
    m->log_bytes = (uint64_t)log_bytes;
    m->train_loss = train_loss;
    m->n_files = comm->world_size;
    m->files = (ManifestFile *)table_alloc((size_t)m->n_files, sizeof(ManifestFile));
    char name[STEP_NAME], temporary[STEP_NAME];
    step_name(m->step, "", name);
    step_name(m->step, ".new", temporary);
    cp->path = path_join(config->log_dir, "/", name);
    cp->temporary = path_join(config->log_dir, "/", temporary);
    if (comm->rank == 0) {
        remove_directory(cp->temporary);
        if (mkdir(cp->temporary, 0777) != 0)
            error_set(&cp->error, "%s: cannot be made: %s", cp->temporary, strerror(errno));
    }
    if (!comm_agree(comm, &cp->error)) {
        checkpoint_report(cp, cp->error.text);
        checkpoint_end(cp);
        return;
    }
    cp->begun++;
    cp->phase = CHECKPOINT_WRITING;
    zero_finish(zero);
    if (config->checkpoint_async) {
        for (int i = 0; i < cp->n_parts; i++) checkpoint_copy(cp, i);
        comm_wait(comm, zero->compute, "the copy of a checkpoint");
        checkpoint_start(cp, checkpoint_write_thread);
    } else {
        checkpoint_write_file(cp);
        checkpoint_complete(cp);
    }
    cp->held_seconds += comm_seconds() - begin;
}

static inline void checkpoints_close(Checkpoints *cp) {
    checkpoint_wait(cp);
    manifest_free(&cp->manifest);
    for (int i = 0; i < cp->n_parts; i++) free(cp->tensors[i].name);
    for (int i = 0; cp->metadata != NULL && cp->metadata[i] != NULL; i++) free(cp->metadata[i]);
    if (cp->snapshot != NULL) cuda_check(cudaFreeHost(cp->snapshot));
    free(cp->options);
    free(cp->metadata);
    free(cp->tensors);
    free(cp->parts);
}

#endif
