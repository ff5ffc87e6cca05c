// checkpoint_weights.h: what the files of a checkpoint hold, for any rank of any grid: to resume from (resume.h), and
// as one more kind of weights (weights.h).
//
// What each file holds follows from the grid of the run that wrote it, through layout.h, as it did then: any element is
// found by global index. As weights, a checkpoint is its directory, or a log directory, whose `latest` names it; they
// are the fp32 masters where the run had any.
#ifndef CHECKPOINT_WEIGHTS_H
#define CHECKPOINT_WEIGHTS_H

#include <sys/resource.h>
#include "manifest.h"
#include "safetensors.h"
#include "weights_kind.h"

typedef struct {
    const char *path;
    const Manifest *manifest;
    Layout *layouts;    // by pipeline and tensor rank of the run that wrote it; units NULL until it is needed
    Safetensors *files; // by rank
    bool *open;         // those that have been needed so far
    float *values;      // of a file's part of a unit
    size_t room;
} CheckpointFiles;

// Both must outlive it.
static inline void checkpoint_files_open(CheckpointFiles *all, const char *path, const Manifest *manifest) {
    const Grid *grid = &manifest->grid;
    memset(all, 0, sizeof *all);
    all->path = path;
    all->manifest = manifest;
    all->files = (Safetensors *)calloc((size_t)manifest->n_files, sizeof(Safetensors));
    all->open = (bool *)calloc((size_t)manifest->n_files, sizeof(bool));
    all->layouts = (Layout *)calloc((size_t)(grid->pipeline * grid->tensor), sizeof(Layout));
    if (all->files == NULL || all->open == NULL || all->layouts == NULL) die("no memory for the files of %s", path);
    struct rlimit files; // all of them may be open at once
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

static inline void checkpoint_files_close(CheckpointFiles *all) {
    for (int r = 0; r < all->manifest->n_files; r++)
        if (all->open[r]) safetensors_close(&all->files[r]);
    for (int i = 0; i < all->manifest->grid.pipeline * all->manifest->grid.tensor; i++) layout_free(&all->layouts[i]);
    free(all->files);
    free(all->open);
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

// Opens a rank's file and finds one of its tensors, which must be there as the layout says.
static inline const SafetensorsTensor *checkpoint_tensor(CheckpointFiles *all, int rank, const Unit *unit, int state,
                                                         size_t count, Error *error) {
    Safetensors *file = &all->files[rank];
    if (!all->open[rank]) {
        char *path = rank_path(all->path, rank);
        all->open[rank] = safetensors_open(file, path, error);
        free(path);
        if (!all->open[rank]) return NULL;
    }
    char name[48];
    state_tensor_name(unit, state, name);
    const SafetensorsTensor *tensor = safetensors_find(file, name);
    if (tensor == NULL || tensor->rank != 1 || tensor->elements != count) {
        error_set(error, "%s: tensor %s is not there with %zu elements, as the manifest's grid of ranks needs it",
                  file->file.path, name, count);
        return NULL;
    }
    return tensor;
}

// Fills out (held.count) with the elements `held` of a unit of any cut, padding 0, from all files that hold any of
// them.
static inline bool checkpoint_read(CheckpointFiles *all, const Unit *unit, Held held, int state, float *out,
                                   Error *error) {
    const Manifest *m = all->manifest;
    memset(out, 0, held.count * sizeof(float));
    size_t expected = 0, found = 0;
    PieceCursor cursor = {0, 0};
    Piece piece;
    while (unit_next_piece(unit, held.first, held.first + held.count, &cursor, &piece)) expected += piece.count;
    for (int r = 0; r < m->n_files && found < expected; r++) {
        const int stage = r / m->grid.tensor / m->grid.data;
        const int tensor_rank = r % m->grid.tensor;
        Layout *layout = &all->layouts[stage * m->grid.tensor + tensor_rank];
        if (layout->units == NULL) {
            const LayoutCut cut = {m->grid.data,     m->grid.tensor,     tensor_rank,
                                   m->grid.pipeline, m->pipeline_chunks, stage};
            layout_init(layout, &m->shape, &cut);
        }
        const Unit *from = NULL;
        for (int u = 0; u < layout->n_units && from == NULL; u++)
            if (layout->units[u].tensors[0].id == unit->tensors[0].id) from = &layout->units[u];
        if (from == NULL) continue;
        const Held own = unit_own(from, &m->grid, m->shard_group, r);
        size_t low = SIZE_MAX, high = 0;
        if (own.count == 0 || unit_transfer(from, own, unit, held, &low, &high, NULL, 0, NULL) == 0) continue;
        const SafetensorsTensor *tensor = checkpoint_tensor(all, r, from, state, own.count, error);
        if (tensor == NULL) return false;
        if (high - low > all->room) {
            free(all->values);
            all->room = high - low;
            all->values = (float *)malloc(all->room * sizeof(float));
            if (all->values == NULL) die("no memory for %zu elements of %s", all->room, all->path);
        }
        if (!safetensors_read(&all->files[r], tensor, low - own.first, high - low, all->values, error)) return false;
        found += unit_transfer(from, own, unit, held, &low, &high, all->values, low, out);
    }
    if (found != expected)
        return error_set(error, "%s: its files hold %zu of the %zu elements of %s.%s that are needed", all->path, found,
                         expected, unit->name, state_name(state));
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// As weights

typedef struct {
    char *directory; // of the checkpoint itself
    Manifest manifest;
    CheckpointFiles files; // .path NULL while they are not open
    // Elements [window_first, window_first + window_count) of tensor window_id, so that one who asks for a slice of a
    // matrix, row by row, does not have all files searched for each row.
    float *window;
    size_t window_limit; // elements it may hold
    int window_id;       // -1: none
    size_t window_first, window_count;
} CheckpointWeights;

static inline bool checkpoint_weights_has(const char *directory, const char *name) {
    char *path = path_join(directory, "/", name);
    struct stat status;
    const bool there = stat(path, &status) == 0;
    free(path);
    return there;
}

// The newest directory of a checkpoint that has a manifest, to be freed; NULL: there is none.
static inline char *checkpoint_weights_newest(const char *path) {
    int count = 0;
    uint64_t *steps = list_steps(path, &count);
    char *directory = NULL;
    for (int i = 0; i < count && directory == NULL; i++) {
        char name[STEP_NAME];
        step_name(steps[i], "", name);
        directory = path_join(path, "/", name);
        if (checkpoint_weights_has(directory, "manifest.json")) break;
        free(directory);
        directory = NULL;
    }
    free(steps);
    return directory;
}

// A checkpoint, or a log directory, also one without any checkpoint. Other programs too write a file latest beside a
// Hugging Face model (DeepSpeed does), which is none of ours.
static inline bool checkpoint_weights_recognises(const char *path) {
    if (checkpoint_weights_has(path, "model.safetensors") ||
        checkpoint_weights_has(path, "model.safetensors.index.json"))
        return false;
    if (checkpoint_weights_has(path, "manifest.json") || checkpoint_weights_has(path, "latest") ||
        checkpoint_weights_has(path, "metrics.jsonl"))
        return true;
    char *newest = checkpoint_weights_newest(path);
    free(newest);
    return newest != NULL;
}

// The directory of the checkpoint at a path, to be freed; NULL where a log directory has none. In a log directory it is
// the one that latest names; the newest, where there is no such file, or what it names is gone.
static inline char *checkpoint_weights_directory(const char *path, Error *error) {
    if (checkpoint_weights_has(path, "manifest.json")) return path_join(path, "", "");
    char *directory = NULL;
    if (!checkpoint_weights_has(path, "latest")) {
        directory = checkpoint_weights_newest(path);
        if (directory == NULL) error_set(error, "%s: is a log directory without a checkpoint", path);
        return directory;
    }
    char *latest = path_join(path, "/", "latest"), name[STEP_NAME] = "";
    InputFile file;
    uint64_t step = 0;
    if (input_open(&file, latest, error)) {
        const size_t bytes = file.bytes < STEP_NAME ? (size_t)file.bytes : STEP_NAME - 1;
        if (input_read(&file, name, bytes, 0, error)) {
            name[strcspn(name, "\n")] = '\0';
            if (step_of_name(name, "", &step))
                directory = path_join(path, "/", name);
            else
                error_set(error, "%s: does not name a checkpoint such as step_00000100", latest);
        }
    }
    input_close(&file);
    free(latest);
    if (directory != NULL && !checkpoint_weights_has(directory, "manifest.json")) {
        char *newest = checkpoint_weights_newest(path);
        if (newest != NULL) { // otherwise what latest names is told to be missing
            free(directory);
            directory = newest;
        }
    }
    return directory;
}

static inline bool checkpoint_weights_open(Weights *weights, Error *error) {
    CheckpointWeights *cp = (CheckpointWeights *)calloc(1, sizeof(CheckpointWeights));
    if (cp == NULL) die("no memory to open %s", weights->path);
    weights->state = cp;
    cp->window_id = -1;
    cp->window_limit = WEIGHTS_CHUNK;
    cp->window = (float *)malloc(cp->window_limit * sizeof(float));
    if (cp->window == NULL) die("no memory to read %s", weights->path);
    cp->directory = checkpoint_weights_directory(weights->path, error);
    // The files come before the shape, which sets how much memory is taken.
    if (cp->directory == NULL || !manifest_read(&cp->manifest, cp->directory, error) ||
        !manifest_check_files(&cp->manifest, cp->directory, error))
        return false;
    checkpoint_files_open(&cp->files, cp->directory, &cp->manifest);
    weights_set_shape(weights, &cp->manifest.shape);
    return true;
}

// Sizes of all files; checksums of this rank's share of them.
static inline bool checkpoint_weights_verify(Weights *weights, int rank, int ranks, Error *error) {
    const CheckpointWeights *cp = (const CheckpointWeights *)weights->state;
    return manifest_verify(&cp->manifest, cp->directory, rank, ranks, error);
}

static inline bool checkpoint_weights_read(Weights *weights, const Tensor *tensor, size_t first, size_t count,
                                           float *out, Error *error) {
    CheckpointWeights *cp = (CheckpointWeights *)weights->state;
    const Unit *unit = weights->layout.units;
    while (tensor < unit->tensors || tensor >= unit->tensors + unit->n_tensors) unit++;
    while (count > 0) {
        if (cp->window_id != tensor->id || first < cp->window_first || first >= cp->window_first + cp->window_count) {
            const size_t left = weights_elements(tensor) - first;
            const Held held = {tensor->offset + first, left < cp->window_limit ? left : cp->window_limit, 0};
            cp->window_id = -1;
            if (!checkpoint_read(&cp->files, unit, held, STATE_PARAMS, cp->window, error)) return false;
            cp->window_id = tensor->id;
            cp->window_first = first;
            cp->window_count = held.count;
        }
        const size_t at = first - cp->window_first, room = cp->window_count - at, n = count < room ? count : room;
        memcpy(out, cp->window + at, n * sizeof(float));
        first += n;
        out += n;
        count -= n;
    }
    return true;
}

static inline void checkpoint_weights_close(Weights *weights) {
    CheckpointWeights *cp = (CheckpointWeights *)weights->state;
    if (cp == NULL) return;
    if (cp->files.path != NULL) checkpoint_files_close(&cp->files);
    manifest_free(&cp->manifest);
    free(cp->directory);
    free(cp->window);
    free(cp);
}

static const WeightsKind CHECKPOINT_KIND = {"a checkpoint (its directory step_00000100, or a log directory)",
                                            checkpoint_weights_recognises,
                                            checkpoint_weights_open,
                                            checkpoint_weights_verify,
                                            checkpoint_weights_read,
                                            checkpoint_weights_close};

#endif
