// resume.h: going on from a checkpoint, on any grid of ranks.
//
// resume_find() chooses the checkpoint and checks all of it, before anything is written; zero_load() fills parameters
// and optimizer state. Every rank reads the parts that it needs from all files, by global index: what each file holds
// follows from the grid of the run that wrote it, through layout.h and zero_own(), as it did then.
#ifndef RESUME_H
#define RESUME_H

#include <sys/resource.h>
#include "comm.h"
#include "config.h"
#include "layout.h"
#include "manifest.h"
#include "safetensors.h"
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

// Reads the manifest of what is at resume->path and checks all files, the work shared by all ranks.
static inline bool resume_try(Resume *resume, Comm *comm, Error *error) {
    if (manifest_read(&resume->manifest, resume->path, error))
        manifest_verify(&resume->manifest, resume->path, comm->rank, comm->world_size, error);
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
        found = resume_try(resume, comm, &damage);
        if (found) break;
        if (comm->rank == 0) {
            fflush(stdout);
            fprintf(stderr, "train_gpt: checkpoint %s cannot be used: %s\n", resume->path, damage.text);
        }
        free(resume->path);
        resume->path = NULL;
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
        if (!resume_try(resume, comm, error)) return false;
    }
    if (resume->path != NULL) {
        char *parent = path_join(resume->path, "/", "..");
        resume->own = newest || (config->log_dir[0] != '\0' && same_directory(parent, config->log_dir));
        free(parent);
        return manifest_check(&resume->manifest, resume->path, config, data, error);
    }
    return true;
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
    if (config->log_dir[0] == '\0') return;
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

// A rank of the run that wrote the checkpoint.
typedef struct {
    Layout *layout; // shared by the ranks of a stage and slice
    Comm comm;
    Zero zero;
    Safetensors file;
    bool open;
} Source;

typedef struct {
    const Resume *resume;
    int count, n_layouts;
    Source *sources;
    Layout *layouts; // by pipeline and tensor rank
    float *values;   // of a source's part of a unit
    size_t room;
} Sources;

static inline void sources_open(Sources *all, const Resume *resume) {
    const Manifest *m = &resume->manifest;
    const Grid *grid = &m->grid;
    memset(all, 0, sizeof *all);
    all->resume = resume;
    all->count = m->n_files;
    all->n_layouts = grid->pipeline * grid->tensor;
    all->sources = (Source *)table_alloc((size_t)all->count, sizeof(Source));
    all->layouts = (Layout *)table_alloc((size_t)all->n_layouts, sizeof(Layout));
    for (int p = 0; p < grid->pipeline; p++)
        for (int t = 0; t < grid->tensor; t++) {
            const LayoutCut cut = {grid->data, grid->tensor, t, grid->pipeline, m->pipeline_chunks, p};
            layout_init(&all->layouts[p * grid->tensor + t], &m->shape, &cut);
        }
    for (int r = 0; r < all->count; r++) {
        Source *source = &all->sources[r];
        Memory memory;
        memset(&memory, 0, sizeof memory);
        memory.planning = true;
        const CommOptions options = {*grid, m->shard_group, m->pipeline_chunks > 1, 1, true};
        comm_init(&source->comm, &memory, r, &options, NULL, NULL);
        source->layout = &all->layouts[source->comm.pipeline_rank * grid->tensor + source->comm.tensor.rank];
        source->zero.comm = &source->comm;
        source->zero.layout = source->layout;
    }
    struct rlimit files; // all of them may be open at once
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

static inline void sources_close(Sources *all) {
    for (int r = 0; r < all->count; r++)
        if (all->sources[r].open) safetensors_close(&all->sources[r].file);
    for (int i = 0; i < all->n_layouts; i++) layout_free(&all->layouts[i]);
    free(all->sources);
    free(all->layouts);
    free(all->values);
}

// Goes over the elements that are both among `own` of unit `from` and among `held` of unit `to`, the same unit on
// another grid: notes the first and the last of them in `from`, and copies values (from->elements beginning at
// values_first; NULL: does not) to where they belong in `out` (held.count). Returns how many there are.
static inline size_t unit_transfer(const Unit *from, Held own, const Unit *to, Held held, size_t *low, size_t *high,
                                   const float *values, size_t values_first, float *out) {
    size_t found = 0;
    PieceCursor cursor = {0, 0};
    Piece piece;
    while (unit_next_piece(from, own.first, own.first + own.count, &cursor, &piece)) {
        const Tensor *tensor = &to->tensors[piece.tensor - from->tensors];
        const bool whole = tensor->sliced == tensor->sliced_full;
        const size_t outer = tensor->sliced_full * tensor->inner, end = piece.global + piece.count;
        const size_t last = whole ? 0 : (end - 1) / outer;
        TensorRun run;
        for (size_t o = whole ? 0 : piece.global / outer; o <= last && tensor_run(tensor, o, &run); o++) {
            const size_t first = piece.global > run.global ? piece.global : run.global; // global
            const size_t stop = end < run.global + run.count ? end : run.global + run.count;
            if (first >= stop) continue;
            const size_t begin = tensor->offset + run.local + (first - run.global); // in `to`, of first
            const size_t held_end = held.first + held.count, begin_end = begin + (stop - first);
            const size_t at = begin > held.first ? begin : held.first;
            const size_t at_end = begin_end < held_end ? begin_end : held_end;
            if (at >= at_end) continue;
            const size_t source = piece.at + (first - piece.global) + (at - begin), count = at_end - at;
            if (source < *low) *low = source;
            if (source + count > *high) *high = source + count;
            if (values != NULL)
                memcpy(out + (at - held.first), values + (source - values_first), count * sizeof(float));
            found += count;
        }
    }
    return found;
}

// Opens a source's file and finds one of its tensors, which must be there as the layout says.
static inline const SafetensorsTensor *source_tensor(const Sources *all, int rank, const Unit *unit, int state,
                                                     size_t count, Error *error) {
    Source *source = &all->sources[rank];
    if (!source->open) {
        char *path = rank_path(all->resume->path, rank);
        source->open = safetensors_open(&source->file, path, error);
        free(path);
        if (!source->open) return NULL;
    }
    char name[48];
    state_tensor_name(unit, state, name);
    const SafetensorsTensor *tensor = safetensors_find(&source->file, name);
    if (tensor == NULL || tensor->rank != 1 || tensor->elements != count) {
        error_set(error, "%s: tensor %s is not there with %zu elements, as the manifest's grid of ranks needs it",
                  source->file.file.path, name, count);
        return NULL;
    }
    return tensor;
}

// Fills out (held.count) with the elements `held` of a unit, padding 0, from all files that hold any of them.
static inline bool sources_read(Sources *all, const Unit *unit, Held held, int state, float *out, Error *error) {
    memset(out, 0, held.count * sizeof(float));
    size_t expected = 0, found = 0;
    PieceCursor cursor = {0, 0};
    Piece piece;
    while (unit_next_piece(unit, held.first, held.first + held.count, &cursor, &piece)) expected += piece.count;
    for (int r = 0; r < all->count && found < expected; r++) {
        const Source *source = &all->sources[r];
        const Unit *from = NULL;
        for (int u = 0; u < source->layout->n_units && from == NULL; u++)
            if (source->layout->units[u].tensors[0].id == unit->tensors[0].id) from = &source->layout->units[u];
        if (from == NULL) continue;
        const Held own = zero_own(&source->zero, from, true);
        size_t low = SIZE_MAX, high = 0;
        if (own.count == 0 || unit_transfer(from, own, unit, held, &low, &high, NULL, 0, NULL) == 0) continue;
        const SafetensorsTensor *tensor = source_tensor(all, r, from, state, own.count, error);
        if (tensor == NULL) return false;
        if (high - low > all->room) {
            free(all->values);
            all->room = high - low;
            all->values = (float *)table_alloc(all->room, sizeof(float));
        }
        if (!safetensors_read(&source->file, tensor, low - own.first, high - low, all->values, error)) return false;
        found += unit_transfer(from, own, unit, held, &low, &high, all->values, low, out);
    }
    if (found != expected)
        return error_set(error, "%s: its files hold %zu of the %zu elements of %s.%s that are needed",
                         all->resume->path, found, expected, unit->name, state_name(state));
    return true;
}

static inline bool zero_load_unit(Zero *zero, Sources *all, const Unit *unit, float *values, floatX *rounded,
                                  Error *error) {
    const Held params = zero_held(zero, unit, zero->strategy->shard_params);
    const Held optimizer = zero_held(zero, unit, zero->strategy->shard_optimizer); // within what params hold
    if (!sources_read(all, unit, params, STATE_PARAMS, values, error)) return false;
    for (size_t i = 0; i < params.count; i++) rounded[i] = floatX_from(values[i]);
    cuda_check(cudaMemcpy(zero->params + params.at, rounded, params.count * sizeof(floatX), cudaMemcpyHostToDevice));
    if (zero->master != NULL)
        cuda_check(cudaMemcpy(zero->master + optimizer.at, values + (optimizer.first - params.first),
                              optimizer.count * sizeof(float), cudaMemcpyHostToDevice));
    for (int state = STATE_M; state < STATES; state++) {
        if (!sources_read(all, unit, optimizer, state, values, error)) return false;
        cuda_check(cudaMemcpy((state == STATE_M ? zero->m : zero->v) + optimizer.at, values,
                              optimizer.count * sizeof(float), cudaMemcpyHostToDevice));
    }
    return true;
}

// Fills this rank's parameters and optimizer state.
static inline bool zero_load(Zero *zero, const Resume *resume, Error *error) {
    Sources all;
    sources_open(&all, resume);
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
    sources_close(&all);
    return ok;
}

#endif
