// log.h: what a run prints and writes.
//
// Rank 0 prints progress, and with a log directory writes config.json (the complete resolved configuration),
// metrics.jsonl (an object a line, floats with enough digits to be exact) and, at the end, summary.json. The directory
// is locked while a run writes to it. Files of an earlier run in the same directory are replaced, but for the metrics
// of a run that goes on from a checkpoint: those up to its step stay.
#ifndef LOG_H
#define LOG_H

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include "comm.h"
#include "config.h"
#include "error.h"
#include "json.h"
#include "memory.h"
#include "mfu.h"
#include "plan.h"

typedef struct {
    const Config *config;
    char path[OPTION_TEXT_SIZE + 8]; // of its directory; "": nothing is written
    bool speaks;                     // rank 0
    int directory;                   // open and locked, or -1
    FILE *metrics;                   // or NULL
    bool failing;                    // its last lines are not in the file yet
    int64_t first_step;              // steps taken before this run, which went on from a checkpoint
    double started, last_line;       // seconds
    float *step_ms;                  // of every step of this run so far
    int64_t steps;
    double train_seconds;            // spent in steps: without evaluation and samples
    double last_loss, last_val_loss; // NaN while there is none
    double last_hellaswag;           // accuracy, the same
    double peak_tokens_per_second;   // at an MFU of 1; NaN where the device's peak is not known
} Log;

static inline double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Makes a directory and those above it; *before: how many characters of the path name what was there
// already.
static inline bool make_directories(const char *path, size_t *before, Error *error) {
    char part[4096];
    const size_t length = strlen(path);
    *before = length;
    if (length >= sizeof part) return error_set(error, "log_dir: the path is too long");
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != '\0') continue;
        memcpy(part, path, i);
        part[i] = '\0';
        if (mkdir(part, 0777) == 0) {
            if (*before == length) *before = i - 1;
        } else if (errno != EEXIST) {
            return error_set(error, "log_dir: cannot make the directory %s: %s", part, strerror(errno));
        }
    }
    return true;
}

// Removes the directories of a path that make_directories() made, as far as they are empty.
static inline void remove_directories(const char *path, size_t before) {
    char part[4096];
    size_t length = strlen(path);
    if (length >= sizeof part) return;
    memcpy(part, path, length + 1);
    for (; length > before; length--)
        if (path[length] == '/' || path[length] == '\0') {
            part[length] = '\0';
            rmdir(part);
        }
}

// Whether a directory holds the log of a run that trains, or that cannot be told from one: its config.json does not say
// eval_only.
static inline bool log_of_training(const char *directory) {
    char path[OPTION_TEXT_SIZE + 32];
    struct stat status;
    snprintf(path, sizeof path, "%s/metrics.jsonl", directory);
    if (stat(path, &status) != 0) return false;
    snprintf(path, sizeof path, "%s/config.json", directory);
    Error unread = {""};
    cJSON *config = json_read_file(path, &unread); // NULL: it cannot be read
    const cJSON *run = cJSON_GetObjectItemCaseSensitive(config, "run");
    const bool evaluates = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(run, "eval_only"));
    cJSON_Delete(config);
    return !evaluates;
}

static inline FILE *log_create(const Log *log, const char *name, Error *error) {
    const int file = openat(log->directory, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    FILE *stream = file < 0 ? NULL : fdopen(file, "w");
    if (stream == NULL) {
        error_set(error, "log_dir: cannot write %s/%s: %s", log->path, name, strerror(errno));
        if (file >= 0) close(file);
    }
    return stream;
}

// Opens metrics.jsonl for lines that follow its first `bytes` bytes.
static inline bool log_continue(Log *log, int64_t bytes, Error *error) {
    const char *directory = log->path;
    const int file = openat(log->directory, "metrics.jsonl", O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    struct stat status;
    const bool ok = file >= 0 && fstat(file, &status) == 0;
    if (ok && (int64_t)status.st_size < bytes)
        fprintf(stderr, "train_gpt: %s/metrics.jsonl has %lld of the %lld bytes that it had at the checkpoint\n",
                directory, (long long)status.st_size, (long long)bytes);
    if (!ok || ((int64_t)status.st_size > bytes && ftruncate(file, (off_t)bytes) != 0) ||
        (log->metrics = fdopen(file, "a")) == NULL || fseeko(log->metrics, 0, SEEK_END) != 0) {
        error_set(error, "log_dir: cannot write %s/metrics.jsonl: %s", directory, strerror(errno));
        if (file >= 0 && log->metrics == NULL) close(file);
        return false;
    }
    return true;
}

// Opens and locks the directory and opens its files. config.json comes last: until then an earlier run's is untouched;
// but for metrics to go on with, which are cut when nothing else can fail. metrics_bytes: of them stay; -1: the log
// begins anew.
static inline bool log_open_files(Log *log, int64_t metrics_bytes, Error *error) {
    const char *directory = log->path;
    log->directory = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (log->directory < 0) return error_set(error, "log_dir: cannot open %s: %s", directory, strerror(errno));
    if (flock(log->directory, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return error_set(error, "log_dir: another run is writing to %s; wait for it, or name another directory",
                         directory);
    // Of an earlier run: this one is not finished.
    if (unlinkat(log->directory, "summary.json", 0) != 0 && errno != ENOENT)
        return error_set(error, "log_dir: cannot replace %s/summary.json: %s", directory, strerror(errno));
    if (metrics_bytes < 0 && (log->metrics = log_create(log, "metrics.jsonl", error)) == NULL) return false;
    char path[OPTION_TEXT_SIZE + 32];
    snprintf(path, sizeof path, "%s/config.json", directory);
    if (!config_write(log->config, path, error)) return false;
    if (metrics_bytes >= 0 && !log_continue(log, metrics_bytes, error)) return false;
    setvbuf(log->metrics, NULL, _IOFBF, 1 << 20); // room for many lines while the disk is full
    return true;
}

// Opens the log of a run that has taken first_step of its steps; on rank 0 makes and locks the directory, if there is
// one, and writes config.json there. folder: "", or "/..." for a folder in the log directory. metrics_bytes: of its
// metrics that stay; -1: the log begins anew.
static inline bool log_open(Log *log, const Config *config, int rank, const char *folder, int64_t first_step,
                            int64_t metrics_bytes, Error *error) {
    memset(log, 0, sizeof *log);
    log->config = config;
    log->speaks = rank == 0;
    log->first_step = first_step;
    log->directory = -1;
    log->started = log->last_line = now_seconds();
    log->last_loss = log->last_val_loss = log->last_hellaswag = log->peak_tokens_per_second = NAN;
    log->step_ms = (float *)calloc((size_t)config->steps + 1, sizeof(float));
    if (log->step_ms == NULL) return error_set(error, "steps: no room for the times of %lld", (long long)config->steps);
    if (!log->speaks || config->log_dir[0] == '\0') return true;
    snprintf(log->path, sizeof log->path, "%s%s", config->log_dir, folder);
    size_t before = 0;
    if (make_directories(log->path, &before, error) && log_open_files(log, metrics_bytes, error)) return true;
    if (log->metrics != NULL && metrics_bytes < 0) {
        fclose(log->metrics);
        unlinkat(log->directory, "metrics.jsonl", 0); // still empty
    }
    remove_directories(log->path, before);
    return false;
}

// Hands a line of metrics to the system. A full disk does not end the run: the lines wait in memory, and this is said
// once.
static inline void log_flush(Log *log) {
    const bool failed = fflush(log->metrics) != 0;
    if (failed && !log->failing) {
        const int reason = errno;
        fflush(stdout);
        fprintf(stderr,
                "train_gpt: cannot write %s/metrics.jsonl: %s; training goes on, the lines are kept in memory\n",
                log->path, strerror(reason));
    }
    if (failed) clearerr(log->metrics);
    log->failing = failed;
}

// Bytes of metrics.jsonl so far; 0 where this rank writes none.
static inline int64_t log_position(Log *log) {
    return log->metrics == NULL ? 0 : (int64_t)ftello(log->metrics);
}

static inline void log_close(Log *log) {
    if (log->metrics != NULL && fclose(log->metrics) != 0)
        die("cannot write %s/metrics.jsonl: %s", log->path, strerror(errno));
    if (log->directory >= 0) close(log->directory);
    free(log->step_ms);
}

// 1234567 -> "1.23M". For people: files get exact numbers.
static inline const char *human_count(double n, char *text, size_t size) {
    static const char *const units[] = {"", "k", "M", "B", "T"};
    int unit = 0;
    while (n >= 999.5 && unit < 4) {
        n /= 1000;
        unit++;
    }
    snprintf(text, size, unit == 0 ? "%.0f%s" : n < 9.995 ? "%.2f%s" : n < 99.95 ? "%.1f%s" : "%.0f%s", n, units[unit]);
    return text;
}

static inline const char *human_time(double seconds, char *text, size_t size) {
    const long long s = (long long)(seconds + 0.5);
    if (s < 3600)
        snprintf(text, size, "%lld:%02lld", s / 60, s % 60);
    else if (s < 86400)
        snprintf(text, size, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(text, size, "%lld d %lld h", s / 86400, s / 3600 % 24);
    return text;
}

// What is about to be trained (or, without training tokens, evaluated), on what: all ranks have a `device` of the same
// name.
static inline void log_header(Log *log, const Trainer *trainer, const char *device, int threads, int64_t train_tokens,
                              int64_t val_tokens, int hellaswag_examples) {
    const Config *c = log->config;
    const Layout *layout = &trainer->layout;
    const MfuKind kind = sizeof(floatX) < sizeof(float) ? MFU_BF16 : c->tf32 ? MFU_TF32 : MFU_FP32;
    log->peak_tokens_per_second = mfu_peak(device, kind) * (double)trainer->comm.world_size /
                                  mfu_flops_per_token(layout->parameters, layout->shape.n_layer, layout->shape.n_embd,
                                                      layout->shape.context_length, (int)c->sequence_length);
    if (!log->speaks) return;
    char a[32], b[32];
    printf("model    %lld layers, %lld heads, %lld wide, context %lld, vocabulary %lld: %s parameters\n",
           (long long)c->n_layer, (long long)c->n_head, (long long)c->n_embd, (long long)c->context_length,
           (long long)c->vocab_size, human_count((double)layout->parameters, a, sizeof a));
    printf("data     ");
    if (train_tokens > 0) printf("%s: %s tokens; ", c->train_data, human_count((double)train_tokens, a, sizeof a));
    if (val_tokens > 0)
        printf("validation %s: %s tokens", c->val_data, human_count((double)val_tokens, b, sizeof b));
    else
        printf("no validation");
    if (hellaswag_examples > 0) printf("; HellaSwag %s: %d examples", c->hellaswag, hellaswag_examples);
    printf("\n");
    printf("batch    %lld tokens a step: %d ranks x %lld micro-batches x %lld sequences x %lld tokens\n",
           (long long)c->tokens_per_step, trainer->comm.data.size, (long long)c->micro_batches,
           (long long)c->micro_batch, (long long)c->sequence_length);
    if (c->eval_only)
        printf("run      evaluation only");
    else
        printf("run      %lld steps, %.2f epochs", (long long)c->steps,
               (double)c->steps * (double)c->tokens_per_step / (double)train_tokens);
    printf(", strategy %s, %s, %s, %d thread%s a rank\n", c->strategy, c->precision, device, threads,
           threads == 1 ? "" : "s");
    printf("memory   %.1f MB a rank\n", (double)trainer->memory.peak / 1e6);
    if (log->path[0] != '\0') printf("log      %s\n", log->path);
    printf("\n");
    fflush(stdout);
}

// One training step, counted from 1.
static inline void log_step(Log *log, int64_t step, const StepResult *result, double loss, double lr, double seconds) {
    const Config *c = log->config;
    const double tokens_per_second = (double)c->tokens_per_step / seconds;
    const double mfu = tokens_per_second / log->peak_tokens_per_second;
    log->step_ms[log->steps++] = (float)(seconds * 1e3);
    log->train_seconds += seconds;
    log->last_loss = loss;
    if (!log->speaks) return;
    if (log->metrics != NULL) {
        char f[6][32];
        fprintf(log->metrics,
                "{\"step\": %lld, \"loss\": %s, \"grad_norm\": %s, \"lr\": %s, \"step_ms\": %s, "
                "\"tokens_per_second\": %s, \"mfu\": %s}\n",
                (long long)step, json_float(loss, f[0], sizeof f[0]), json_float(result->grad_norm, f[1], sizeof f[1]),
                json_float(lr, f[2], sizeof f[2]), json_float(seconds * 1e3, f[3], sizeof f[3]),
                json_float(tokens_per_second, f[4], sizeof f[4]), json_float(mfu, f[5], sizeof f[5]));
        log_flush(log);
    }
    // A line every two seconds, or every log_every steps; the first and the last always.
    const double now = now_seconds();
    const bool due = c->log_every > 0 ? step % c->log_every == 0 : now - log->last_line >= 2.0;
    if (!due && step != 1 && step != c->steps && result->updated) return;
    log->last_line = now;
    char rate[32], eta[32], share[32] = "";
    // The mean of all steps but the first, which opens files and compiles kernels.
    const double mean =
        log->steps > 1 ? (log->train_seconds - log->step_ms[0] * 1e-3) / (double)(log->steps - 1) : seconds;
    if (isfinite(mfu)) snprintf(share, sizeof share, " | MFU %4.1f %%", mfu * 100);
    printf("step %*lld/%lld | loss %7.4f | norm %6.3f | lr %.2e | %7.1f ms | %5s tokens/s%s | ETA %s%s\n",
           (int)snprintf(NULL, 0, "%lld", (long long)c->steps), (long long)step, (long long)c->steps, loss,
           result->grad_norm, lr, seconds * 1e3, human_count(tokens_per_second, rate, sizeof rate), share,
           human_time(mean * (double)(c->steps - step), eta, sizeof eta),
           result->updated ? "" : " | NOT FINITE: step skipped");
    fflush(stdout);
}

// The loss on the validation split after `step` steps.
static inline void log_validation(Log *log, int64_t step, double val_loss, double seconds) {
    log->last_val_loss = val_loss;
    log->last_line = now_seconds();
    if (!log->speaks) return;
    char f[32];
    if (log->metrics != NULL) {
        fprintf(log->metrics, "{\"step\": %lld, \"val_loss\": %s}\n", (long long)step,
                json_float(val_loss, f, sizeof f));
        log_flush(log);
    }
    printf("step %lld: validation loss %.4f (%.1f s)\n", (long long)step, val_loss, seconds);
    fflush(stdout);
}

// Right answers on HellaSwag after `step` steps.
static inline void log_hellaswag(Log *log, int64_t step, int64_t correct, int examples, double seconds) {
    log->last_hellaswag = (double)correct / examples;
    log->last_line = now_seconds();
    if (!log->speaks) return;
    char f[32];
    if (log->metrics != NULL) {
        fprintf(log->metrics,
                "{\"step\": %lld, \"hellaswag\": %s, \"hellaswag_correct\": %lld, \"hellaswag_examples\": %d}\n",
                (long long)step, json_float(log->last_hellaswag, f, sizeof f), (long long)correct, examples);
        log_flush(log);
    }
    printf("step %lld: HellaSwag %lld of %d, %.2f %% (%.1f s)\n", (long long)step, (long long)correct, examples,
           100 * log->last_hellaswag, seconds);
    fflush(stdout);
}

// Writes trace.json from the traces of all ranks; ends the recording. All ranks call it, after the step.
static inline void log_trace(Log *log, Comm *comm, Trace *trace, int64_t step) {
    cuda_check(cudaDeviceSynchronize());
    comm->trace = NULL;
    const int32_t mine = trace->count;
    const int32_t *counts = (const int32_t *)comm_gather(comm, &mine, sizeof mine);
    int most = 0;
    for (int r = 0; r < comm->world_size; r++) most = counts[r] > most ? counts[r] : most;
    Error error = {""};
    FILE *file = log->directory >= 0 ? log_create(log, "trace.json", &error) : NULL;
    if (log->directory >= 0 && file == NULL) die("%s", error.text);
    if (file != NULL) trace_write_begin(file, comm->world_size);
    for (int i = 0; i < most; i++) {
        const TraceRecord record = trace_record(trace, i);
        const TraceRecord *records = (const TraceRecord *)comm_gather(comm, &record, sizeof record);
        for (int r = 0; r < comm->world_size && file != NULL; r++) trace_write_record(file, r, &records[r]);
    }
    if (file != NULL) {
        trace_write_end(file, step);
        if (fclose(file) != 0) die("cannot write %s/trace.json: %s", log->path, strerror(errno));
        printf("step %lld: streams recorded in %s/trace.json\n", (long long)step, log->path);
    }
    trace_stop(trace);
}

static inline int compare_floats(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// Median, least and greatest time of a step, in ms; sorts the record.
typedef struct {
    double median, min, max;
} StepTimes;

static inline StepTimes log_step_times(Log *log) {
    StepTimes times = {NAN, NAN, NAN};
    const int64_t n = log->steps;
    if (n == 0) return times;
    qsort(log->step_ms, (size_t)n, sizeof(float), compare_floats);
    times.median = 0.5 * ((double)log->step_ms[(n - 1) / 2] + (double)log->step_ms[n / 2]);
    times.min = log->step_ms[0];
    times.max = log->step_ms[n - 1];
    return times;
}

// What the end of a run knows; of the rank with the highest peak of memory.
typedef struct {
    uint64_t params_hash;
    size_t padded_parameters;
    Memory memory, planned;
    CommCounts communication, communication_planned; // of one training step
    CommCounts all_ranks, planned_all_ranks;         // the same, summed over ranks
    int64_t checkpoints_begun, checkpoints_saved;
    uint64_t snapshot_bytes; // host memory that they take, of the rank with most
    double checkpoints_held; // seconds that training waited for them
    double idle_share;       // of the time of training steps that ranks waited for other stages: their mean
} RunTotals;

// The table of memory by component: allocated, planned, and bytes per padded parameter.
static inline void log_memory_table(const RunTotals *totals) {
    const double n = (double)totals->padded_parameters;
    printf("memory of the fullest rank  %12s %12s %18s\n", "allocated MB", "planned MB", "bytes a parameter");
    for (int tag = 0; tag < MEMORY_TAGS; tag++)
        printf("  %-24s  %12.3f %12.3f %18.3f\n", memory_tag_name(tag), (double)totals->memory.bytes[tag] / 1e6,
               (double)totals->planned.bytes[tag] / 1e6, (double)totals->memory.bytes[tag] / n);
    printf("  %-24s  %12.3f %12.3f\n", "peak", (double)totals->memory.peak / 1e6, (double)totals->planned.peak / 1e6);
}

// Prints how the run ended and writes summary.json, to a temporary name first, so that it is whole when it is there.
static inline void log_summary(Log *log, const Trainer *trainer, const RunTotals *totals) {
    const Config *c = log->config;
    const StepTimes times = log_step_times(log);
    const double tokens_per_second = times.median > 0 ? (double)c->tokens_per_step / (times.median * 1e-3) : NAN;
    const double mfu = tokens_per_second / log->peak_tokens_per_second;
    if (!log->speaks) return;
    char a[32], b[32];
    human_time(now_seconds() - log->started, a, sizeof a);
    if (c->eval_only)
        printf("\nevaluated in %s: ", a);
    else
        printf("\n%lld steps in %s: train loss %.4f, ", (long long)log->steps, a, log->last_loss);
    if (isfinite(log->last_val_loss)) printf("validation loss %.4f, ", log->last_val_loss);
    if (isfinite(log->last_hellaswag)) printf("HellaSwag %.2f %%, ", 100 * log->last_hellaswag);
    if (!c->eval_only) printf("%s tokens/s (median), ", human_count(tokens_per_second, b, sizeof b));
    if (isfinite(mfu)) printf("MFU %.1f %%, ", mfu * 100);
    printf("parameters %016llx\n\n", (unsigned long long)totals->params_hash);
    log_memory_table(totals);
    for (int kind = 0; kind < COMM_SCALARS; kind++) {
        const CommCount *count = &totals->communication.kind[kind];
        if (count->calls > 0)
            printf("%s in a step: %llu calls, %.3f MB of payload, %.3f MB sent by a rank\n", comm_kind_name(kind),
                   (unsigned long long)count->calls, (double)count->payload_bytes / 1e6,
                   (double)count->bus_bytes / 1e6);
    }
    const double bubble = plan_bubble(c);
    if (c->pipeline_parallel > 1 && !c->eval_only)
        printf("pipeline: planned bubble %.1f %% of the computation, %.1f %% of a step; ranks waited for other stages "
               "for %.1f %% of it\n",
               100 * bubble, 100 * bubble / (1 + bubble), 100 * totals->idle_share);
    if (totals->checkpoints_begun > 0)
        printf("checkpoints: %lld of %lld saved, training waited %.1f ms for each, %.2f %% of its time\n",
               (long long)totals->checkpoints_saved, (long long)totals->checkpoints_begun,
               1e3 * totals->checkpoints_held / (double)totals->checkpoints_begun,
               100 * totals->checkpoints_held / (totals->checkpoints_held + log->train_seconds));
    if (log->directory >= 0) {
        printf("written to %s: config.json, metrics.jsonl, summary.json\n", log->path);
        cJSON *root = cJSON_CreateObject();
        json_add_integer(root, "parameters", trainer->layout.parameters);
        json_add_integer(root, "padded_parameters", totals->padded_parameters);
        json_add_integer(root, "world_size", (uint64_t)trainer->comm.world_size);
        cJSON_AddStringToObject(root, "strategy", c->strategy);
        json_add_integer(root, "data_parallel", (uint64_t)trainer->comm.data.size);
        json_add_integer(root, "shard_group", (uint64_t)c->shard_ranks);
        json_add_integer(root, "tensor_parallel", (uint64_t)c->tensor_parallel);
        json_add_integer(root, "pipeline_parallel", (uint64_t)c->pipeline_parallel);
        cJSON_AddStringToObject(root, "precision", c->precision);
        json_add_integer(root, "steps", (uint64_t)(log->first_step + log->steps));
        if (c->eval_only) // of whatever steps the weights have seen
            cJSON_AddNullToObject(root, "tokens");
        else
            json_add_integer(root, "tokens", (uint64_t)((log->first_step + log->steps) * c->tokens_per_step));
        json_add_exact(root, "final_train_loss", log->last_loss);
        json_add_exact(root, "final_val_loss", log->last_val_loss);
        json_add_exact(root, "final_hellaswag", log->last_hellaswag);
        snprintf(a, sizeof a, "%016llx", (unsigned long long)totals->params_hash);
        cJSON_AddStringToObject(root, "params_hash", a);
        json_add_exact(root, "tokens_per_second", tokens_per_second);
        cJSON *step_ms = cJSON_AddObjectToObject(root, "step_ms");
        json_add_exact(step_ms, "median", times.median);
        json_add_exact(step_ms, "min", times.min);
        json_add_exact(step_ms, "max", times.max);
        json_add_exact(root, "mfu", mfu);
        json_add_exact(root, "pipeline_bubble", bubble);
        json_add_exact(root, "pipeline_idle_share", totals->idle_share);
        cJSON *checkpoints = cJSON_AddObjectToObject(root, "checkpoints");
        json_add_integer(checkpoints, "begun", (uint64_t)totals->checkpoints_begun);
        json_add_integer(checkpoints, "saved", (uint64_t)totals->checkpoints_saved);
        json_add_exact(checkpoints, "held_ms", 1e3 * totals->checkpoints_held);
        json_add_integer(checkpoints, "snapshot_bytes", totals->snapshot_bytes);
        json_add_memory(root, "memory_bytes", &totals->memory);
        json_add_memory(root, "memory_planned", &totals->planned);
        json_add_counts(json_add_counts(root, "communication_per_step", &totals->communication), "all_ranks",
                        &totals->all_ranks);
        json_add_counts(json_add_counts(root, "communication_planned", &totals->communication_planned), "all_ranks",
                        &totals->planned_all_ranks);
        char *text = cJSON_Print(root);
        Error error = {""};
        FILE *file = text == NULL ? NULL : log_create(log, "summary.json.new", &error);
        const bool written = file != NULL && fprintf(file, "%s\n", text) > 0 && fclose(file) == 0 &&
                             renameat(log->directory, "summary.json.new", log->directory, "summary.json") == 0;
        if (!written) die("cannot write %s/summary.json: %s", log->path, strerror(errno));
        cJSON_free(text);
        cJSON_Delete(root);
    }
    fflush(stdout);
}

#endif
