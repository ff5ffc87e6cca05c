// resume.h: going on from a checkpoint, on any grid of ranks.
//
// resume_find() chooses the checkpoint and checks all of it, before anything is written; zero_load() fills parameters
// and optimizer state. Every rank reads the parts that it needs from all files (checkpoint_weights.h). A run that
// begins anew with somebody's weights reads them likewise: begin_open(), zero_load_weights().
#ifndef RESUME_H
#define RESUME_H

#include "comm.h"
#include "config.h"
#include "layout.h"
#include "manifest.h"
#include "weights.h"
#include "zero.h"

// ---------------------------------------------------------------------------------------------------------------------
// Choosing what to go on from

// Whether two paths name one directory.
static inline bool same_directory(const char *a, const char *b) {
    struct stat first, second;
    return stat(a, &first) == 0 && stat(b, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

typedef struct {
    char *path; // NULL: the run begins anew
    bool own;   // it stands in log_dir, whose log goes on
    Manifest manifest;
} Resume;

static inline void resume_free(Resume *resume) {
    free(resume->path);
    manifest_free(&resume->manifest);
    resume->path = NULL;
}

// Whether the log of the run that a checkpoint is of, in the same directory, can be cut where the manifest says: after
// a line. A log that is shorter has lost lines, which is no reason to lose the checkpoint too (log.h tells it).
static inline bool resume_check_log(const Resume *resume, const Config *config, Error *error) {
    const uint64_t bytes = resume->manifest.log_bytes;
    char *path = path_join(config->log_dir, "/", "metrics.jsonl"), last = '\n';
    InputFile file;
    Error missing = {""};
    bool ok = true;
    if (bytes > 0 && input_open(&file, path, &missing)) {
        if ((uint64_t)file.bytes >= bytes) ok = input_read(&file, &last, 1, (int64_t)bytes - 1, error);
        input_close(&file);
    }
    free(path);
    // Every step writes a line.
    if (ok && (last != '\n' || (bytes == 0 && resume->manifest.step > 0)))
        ok = error_set(error, "%s/manifest.json: its log_bytes %llu is not the end of a line of metrics.jsonl",
                       resume->path, (unsigned long long)bytes);
    return ok;
}

// Reads the manifest of what is at resume->path and checks all files, the work shared by all ranks.
static inline bool resume_try(Resume *resume, const Config *config, Comm *comm, Error *error) {
    if (manifest_read(&resume->manifest, resume->path, error) &&
        manifest_verify(&resume->manifest, resume->path, comm->rank, comm->world_size, error) && comm->rank == 0 &&
        resume->own && !config->eval_only)
        resume_check_log(resume, config, error);
    if (comm_agree(comm, error)) return true;
    manifest_free(&resume->manifest);
    return false;
}

// The newest good checkpoint of log_dir; damaged ones are named. False: all that there are are damaged.
static inline bool resume_newest(Resume *resume, const Config *config, Comm *comm, Error *error) {
    int count = 0;
    uint64_t *steps = NULL;
    if (comm->rank == 0) steps = list_steps(config->log_dir, &count);
    comm_broadcast(comm, 0, &count, sizeof count);
    if (steps == NULL) steps = (uint64_t *)table_alloc((size_t)count + 1, sizeof(uint64_t));
    if (count > 0) comm_broadcast(comm, 0, steps, (size_t)count * sizeof(uint64_t));
    bool found = false;
    for (int i = 0; i < count && !found; i++) {
        char name[STEP_NAME];
        Error damage = {""};
        step_name(steps[i], "", name);
        resume->path = path_join(config->log_dir, "/", name);
        resume->own = true;
        found = resume_try(resume, config, comm, &damage);
        if (found) break;
        if (comm->rank == 0) {
            fflush(stdout);
            fprintf(stderr, "train_gpt: checkpoint %s cannot be used: %s\n", resume->path, damage.text);
        }
        free(resume->path);
        resume->path = NULL;
        resume->own = false;
    }
    free(steps);
    if (!found && count > 0)
        return error_set(error,
                         "%s: none of the %d checkpoints here can be used; with resume never and another "
                         "log_dir a run begins anew",
                         config->log_dir, count);
    return true;
}

// Finds what the run goes on from, if it does; the same on all ranks, errors too. data: of the training data.
static inline bool resume_find(Resume *resume, const Config *config, Comm *comm, const DatasetIdentity *data,
                               Error *error) {
    memset(resume, 0, sizeof *resume);
    const bool newest = strcmp(config->resume, "auto") == 0, never = strcmp(config->resume, "never") == 0;
    if (newest) {
        if (!resume_newest(resume, config, comm, error)) return false;
    } else if (!never) {
        resume->path = path_join(config->resume, "", "");
        for (size_t n = strlen(resume->path); n > 1 && resume->path[n - 1] == '/'; n--) resume->path[n - 1] = '\0';
        char *parent = path_join(resume->path, "/", "..");
        resume->own = config->log_dir[0] != '\0' && same_directory(parent, config->log_dir);
        free(parent);
        if (!resume_try(resume, config, comm, error)) return false;
    }
    if (newest && config->eval_only && resume->path == NULL && config->init_from[0] == '\0')
        return error_set(error, "%s: holds no checkpoint to evaluate, and init_from names no weights", config->log_dir);
    return resume->path == NULL || manifest_check(&resume->manifest, resume->path, config, data, error);
}

// A log directory with checkpoints of a run that this one does not go on from is not to be mixed with its own.
static inline bool resume_check_log_dir(const Resume *resume, const Config *config, Error *error) {
    int count = 0;
    if (config->log_dir[0] == '\0' || resume->own) return true;
    free(list_steps(config->log_dir, &count));
    if (count == 0) return true;
    return error_set(error,
                     "log_dir: %s holds %d checkpoint%s of another run; go on from the newest (--resume auto), "
                     "name another directory, or remove them (step_*)",
                     config->log_dir, count, count > 1 ? "s" : "");
}

// On rank 0, once the log directory is locked: clears it of what interrupted runs left, and of checkpoints after the
// one that the user has chosen to go on from.
static inline void resume_clear_log_dir(const Resume *resume, const Config *config) {
    if (config->log_dir[0] == '\0' || config->eval_only) return;
    remove_leftovers(config->log_dir);
    if (!resume->own || strcmp(config->resume, "auto") == 0) return;
    int count = 0;
    uint64_t *steps = list_steps(config->log_dir, &count);
    for (int i = 0; i < count; i++)
        if (steps[i] > resume->manifest.step) {
            remove_step(config->log_dir, steps[i]);
            printf("removed  the checkpoint after step %llu, later than the one to go on from\n",
                   (unsigned long long)steps[i]);
        }
    free(steps);
}

// ---------------------------------------------------------------------------------------------------------------------
// Loading

static inline bool zero_load_unit(Zero *zero, CheckpointFiles *all, const Unit *unit, float *values, floatX *rounded,
                                  Error *error) {
    const Held params = zero_held(zero, unit, zero->strategy->shard_params);
    const Held optimizer = zero_held(zero, unit, zero->strategy->shard_optimizer); // within what params hold
    if (!checkpoint_read(all, unit, params, STATE_PARAMS, values, error)) return false;
    for (size_t i = 0; i < params.count; i++) rounded[i] = floatX_from(values[i]);
    cuda_check(cudaMemcpy(zero->params + params.at, rounded, params.count * sizeof(floatX), cudaMemcpyHostToDevice));
    if (zero->master != NULL)
        cuda_check(cudaMemcpy(zero->master + optimizer.at, values + (optimizer.first - params.first),
                              optimizer.count * sizeof(float), cudaMemcpyHostToDevice));
    for (int state = STATE_M; state < STATES && zero->m != NULL; state++) {
        if (!checkpoint_read(all, unit, optimizer, state, values, error)) return false;
        cuda_check(cudaMemcpy((state == STATE_M ? zero->m : zero->v) + optimizer.at, values,
                              optimizer.count * sizeof(float), cudaMemcpyHostToDevice));
    }
    return true;
}

// Fills this rank's parameters and, where it trains, optimizer state.
static inline bool zero_load(Zero *zero, const Resume *resume, Error *error) {
    CheckpointFiles all;
    checkpoint_files_open(&all, resume->path, &resume->manifest);
    size_t largest = 1;
    for (int u = 0; u < zero->layout->n_units; u++)
        if (zero->layout->units[u].size > largest) largest = zero->layout->units[u].size;
    float *values = (float *)table_alloc(largest, sizeof(float));
    floatX *rounded = (floatX *)table_alloc(largest, sizeof(floatX));
    bool ok = true;
    for (int u = 0; u < zero->layout->n_units && ok; u++)
        ok = zero_load_unit(zero, &all, &zero->layout->units[u], values, rounded, error);
    cuda_check(cudaStreamSynchronize(NULL)); // the communication stream does not wait for the NULL stream
    zero->updates = (int64_t)resume->manifest.updates;
    free(values);
    free(rounded);
    checkpoint_files_close(&all);
    return ok;
}

// Opens the weights that a run of this shape begins with, and checks all of them, the work shared by all ranks; the
// same on all ranks, errors too.
static inline bool begin_open(Weights *weights, const char *path, const ModelShape *shape, Comm *comm, Error *error) {
    if (weights_open(weights, path, error) && weights_compare(weights, shape, error))
        weights_verify(weights, comm->rank, comm->world_size, error);
    return comm_agree(comm, error);
}

static inline bool begin_deliver(void *context, const Tensor *tensor, size_t first, size_t count, float *out,
                                 Error *error) {
    return weights_read((Weights *)context, tensor->id, first, count, out, error);
}

// Fills this rank's parameters, and its masters with the same values before they are rounded.
static inline bool zero_load_weights(Zero *zero, Weights *weights, Error *error) {
    return zero_fill(zero, begin_deliver, weights, error);
}

#endif
