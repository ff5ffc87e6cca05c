// train_gpt.cu: pretrains a GPT. main reads the configuration, checks it and the data, starts ranks where asked, and
// calls the trainer. The trainer is compiled once per precision: train_fp32, train_bf16, train_bf16_gradfp32.
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include "begin.h"
#include "bootstrap.h"
#include "config.h"
#include "dataloader.h"
#include "device.h"
#include "error.h"
#include "export.h"
#include "hellaswag.h"
#include "launch.h"
#include "tokenizer.h"

// Trains as configured, as one rank; returns an exit code.
#ifdef __cplusplus
#define DECLARE_TRAINER(name) extern "C" int name(const Config *config, const Place *place)
#else
#define DECLARE_TRAINER(name) int name(const Config *config, const Place *place)
#endif

// What main and the trainer both open: data and vocabulary.
typedef struct {
    bool trains, validates, answers; // which of the next three there are
    Dataset train, val;
    Hellaswag hellaswag;
    Tokenizer tokenizer;
} Inputs;

static inline bool inputs_open(Inputs *inputs, const Config *config, Error *error) {
    memset(inputs, 0, sizeof *inputs);
    inputs->trains = !config->eval_only;
    inputs->validates = config->val_data[0] != '\0' && (config->val_every > 0 || config->eval_only);
    inputs->answers = config->hellaswag[0] != '\0' && (config->hellaswag_every > 0 || config->eval_only);
    if (inputs->trains && !dataset_open(&inputs->train, config->train_data, error)) return false;
    if (inputs->validates && !dataset_open(&inputs->val, config->val_data, error)) return false;
    if (inputs->answers && !hellaswag_open(&inputs->hellaswag, config->hellaswag, (int)config->sequence_length,
                                           (int)config->vocab_size, error))
        return false;
    if (!tokenizer_open(&inputs->tokenizer, config->tokenizer, error)) return false;
    if (config->tokenizer[0] != '\0' && inputs->tokenizer.vocab_size > config->vocab_size)
        return error_set(error, "%s: has %d tokens, more than the model's vocab_size %lld", config->tokenizer,
                         inputs->tokenizer.vocab_size, (long long)config->vocab_size);
    return true;
}

// Windows of a validation: those of val_steps global batches; 0: all.
static inline int64_t val_windows(const Config *config) {
    const int64_t per_step = config->tokens_per_step / config->sequence_length;
    return config->val_steps > INT64_MAX / per_step ? INT64_MAX : config->val_steps * per_step;
}

static inline void inputs_close(Inputs *inputs) {
    tokenizer_close(&inputs->tokenizer);
    if (inputs->answers) hellaswag_close(&inputs->hellaswag);
    if (inputs->validates) dataset_close(&inputs->val);
    if (inputs->trains) dataset_close(&inputs->train);
}

#if defined(PRECISION_FP32) || defined(PRECISION_BF16) || defined(PRECISION_BF16_GRADFP32)

#include "checkpoint.h"
#include "evaluate.h"
#include "log.h"
#include "plan.h"
#include "profile.h"
#include "resume.h"

#if defined(PRECISION_FP32)
#define TRAIN train_fp32
#elif defined(PRECISION_BF16)
#define TRAIN train_bf16
#else
#define TRAIN train_bf16_gradfp32
#endif

DECLARE_TRAINER(TRAIN);

static double mean_of_ranks(Comm *comm, double mine) {
    const double *all = (const double *)comm_gather(comm, &mine, sizeof mine);
    double sum = 0;
    for (int r = 0; r < comm->world_size; r++) sum += all[r];
    return sum / comm->world_size;
}

static uint64_t largest_of_ranks(Comm *comm, uint64_t mine) {
    const uint64_t *all = (const uint64_t *)comm_gather(comm, &mine, sizeof mine);
    uint64_t largest = 0;
    for (int r = 0; r < comm->world_size; r++)
        if (all[r] > largest) largest = all[r];
    return largest;
}

// Takes memory, its plan and what is sent in a step from the rank with the highest peak of memory.
static void totals_of_fullest(Comm *comm, RunTotals *totals) {
    const uint64_t peak = totals->memory.peak;
    const uint64_t *peaks = (const uint64_t *)comm_gather(comm, &peak, sizeof peak);
    int fullest = 0;
    for (int r = 1; r < comm->world_size; r++)
        if (peaks[r] > peaks[fullest]) fullest = r;
    comm_broadcast(comm, fullest, &totals->memory, sizeof totals->memory);
    comm_broadcast(comm, fullest, &totals->planned, sizeof totals->planned);
    comm_broadcast(comm, fullest, &totals->communication, sizeof totals->communication);
    comm_broadcast(comm, fullest, &totals->communication_planned, sizeof totals->communication_planned);
    comm_broadcast(comm, fullest, &totals->padded_parameters, sizeof totals->padded_parameters);
}

// Finds what the run goes on from, if it does, or the weights that it begins with, if there are any, before anything is
// written. data: of the training data, where a checkpoint of training is read or written.
static void resume_or_begin(Resume *resume, Weights *weights, DatasetIdentity *data, const Config *config,
                            const Inputs *inputs, const Layout *layout, Comm *comm) {
    Error error = {""};
    const bool used = inputs->trains && (config->checkpoint_every > 0 || strcmp(config->resume, "never") != 0);
    memset(weights, 0, sizeof *weights);
    if (used && comm->rank == 0) dataset_identify(&inputs->train, data, &error);
    if (!comm_agree(comm, &error)) comm_die_together(comm, EXIT_INPUT, "%s", error.text);
    comm_broadcast(comm, 0, data, sizeof *data);
    if (resume_find(resume, config, comm, data, &error) && comm->rank == 0)
        resume_check_log_dir(resume, config, &error);
    if (!comm_agree(comm, &error)) comm_die_together(comm, EXIT_INPUT, "%s", error.text);
    if (resume->path != NULL || config->init_from[0] == '\0') return;
    if (!begin_open(weights, config->init_from, &layout->shape, comm, &error))
        comm_die_together(comm, EXIT_INPUT, "%s", error.text);
}

// Fills parameters, and optimizer state where a run goes on.
static bool load_or_init(Zero *zero, const Resume *resume, Weights *weights, Error *error) {
    if (resume->path != NULL) return zero_load(zero, resume, error);
    if (weights->kind == NULL) {
        zero_init_params(zero);
        return true;
    }
    const bool ok = zero_load_weights(zero, weights, error);
    weights_close(weights);
    return ok;
}

static void print_beginning(const Checkpoints *checkpoints, const Resume *resume) {
    const Config *config = checkpoints->config;
    if (config->checkpoint_every == 0 && resume->path == NULL && config->init_from[0] == '\0') return;
    if (resume->path == NULL && config->init_from[0] != '\0') printf("weights  from %s\n", config->init_from);
    if (config->eval_only && resume->path != NULL)
        printf("weights  from %s, after step %llu\n", resume->path, (unsigned long long)resume->manifest.step);
    if (config->checkpoint_every > 0)
        printf("save     a checkpoint every %lld steps, %.1f MB of host memory a rank for %s\n",
               (long long)config->checkpoint_every, (double)checkpoints->snapshot_bytes / 1e6,
               config->checkpoint_async ? "the snapshot" : "the copy");
    if (resume->path != NULL && !config->eval_only) {
        char *changes = manifest_changes(&resume->manifest, config);
        printf("resumed  from %s, after step %llu; %s%s\n", resume->path, (unsigned long long)resume->manifest.step,
               changes[0] != '\0' ? "changed: " : "nothing is changed", changes);
        free(changes);
    }
    printf("\n");
    fflush(stdout);
}

DECLARE_TRAINER(TRAIN) {
    Error error = {""};
    error_identify(place->rank, place->world_size);
    if (!config->plan)
        stop_on_signals(); // before there are other threads; the run ends in order, after a step at the latest
    set_threads(place);
    if (config->plan) return plan_run(config, (int)config->nproc);
    cudaStream_t compute, communication;
    int device_number = 0;
    device_choose(place->local_rank, place->local_size, &device_number, &error);
    if (place->world_size > 1) watchdog_start();
    bootstrap_meet(place, (double)config->timeout, &error);
    watchdog_begin("has not met the other ranks", (double)config->timeout); // to the end of comm_init()
    int least = 0, greatest = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cuda_check(cudaStreamCreate(&compute));
    cuda_check(cudaStreamCreateWithPriority(&communication, cudaStreamNonBlocking, greatest));

    // Build, and agree that every rank can read its data before anything is written.
    Trainer trainer;
    trainer_build(&trainer, config, place->rank, false, compute, communication);
    const Plan plan = plan_rank(config, place->rank);
    const int B = (int)config->micro_batch, T = (int)config->sequence_length, V = (int)config->vocab_size;
    const int micro_batches = (int)config->micro_batches, ranks = trainer.comm.data.size;
    Inputs inputs;
    Loader loader;
    Validation validation;
    Log log;
    bool ok = inputs_open(&inputs, config, &error);
    if (ok && inputs.trains)
        ok = loader_open(&loader, &inputs.train, T, B, micro_batches, trainer.comm.data.rank, ranks,
                         (uint64_t)config->seed, V, &error);
    if (ok && inputs.validates)
        ok = validation_open(&validation, &inputs.val, T, B, val_windows(config), trainer.comm.data.rank, ranks, V,
                             &error);
    if (!comm_agree(&trainer.comm, &error)) comm_die_together(&trainer.comm, EXIT_INPUT, "%s", error.text);
    DatasetIdentity data = {0, 0};
    Resume resume;
    Weights weights;
    resume_or_begin(&resume, &weights, &data, config, &inputs, &trainer.layout, &trainer.comm);
    const Manifest *from = resume.path != NULL ? &resume.manifest : NULL;
    // An evaluation in the log directory of a training run is told beside its log, which is left as it is.
    const bool beside = !inputs.trains && (resume.own || log_of_training(config->log_dir));
    log_open(&log, config, place->rank, beside ? "/eval" : "", from != NULL ? (int64_t)from->step : 0,
             resume.own && !beside ? (int64_t)from->log_bytes : -1, &error);
    if (!comm_agree(&trainer.comm, &error)) comm_die_together(&trainer.comm, EXIT_INPUT, "%s", error.text);
    if (log.speaks) resume_clear_log_dir(&resume, config);
    load_or_init(&trainer.zero, &resume, &weights, &error);
    if (!comm_agree(&trainer.comm, &error)) comm_die_together(&trainer.comm, EXIT_INPUT, "%s", error.text);
    Checkpoints checkpoints;
    checkpoints_open(&checkpoints, config, &trainer.zero, &data, log.metrics != NULL ? fileno(log.metrics) : -1);
    struct cudaDeviceProp device;
    cuda_check(cudaGetDeviceProperties(&device, device_number));
    log_header(&log, &trainer, device.name, place_threads(), inputs.trains ? inputs.train.tokens : 0,
               inputs.validates ? validation.tokens : 0, inputs.answers ? inputs.hellaswag.count : 0);
    if (log.speaks) print_beginning(&checkpoints, &resume);

    AdamW hyper;
    memset(&hyper, 0, sizeof hyper);
    hyper.beta1 = (float)config->beta1;
    hyper.beta2 = (float)config->beta2;
    hyper.epsilon = (float)config->epsilon;
    hyper.weight_decay = (float)config->weight_decay;

    RunTotals totals;
    memset(&totals, 0, sizeof totals);
    Trace trace;
    int64_t step = 0, bad_steps = 0, log_bytes = log_position(&log); // of the lines up to this step
    if (from != NULL) {
        step = (int64_t)from->step;
        bad_steps = (int64_t)from->bad_steps;
        log.last_loss = from->train_loss;
        if (resume.own) checkpoints.last = step;
    }
    double idle_ms = 0; // of this rank, in all steps
    bool stopped = false;
    for (;; step++) {
        const bool last = step == config->steps || config->eval_only;
        if (stopped) break;
        comm_phase(&trainer.comm, "evaluation after step", step);
        if (inputs.validates && (last || step % config->val_every == 0)) {
            const double begin = now_seconds();
            const double loss = evaluate_loss(&trainer, config, &validation, &stopped);
            if (!stopped) log_validation(&log, step, loss, now_seconds() - begin);
        }
        if (inputs.answers && !stopped && (last || step % config->hellaswag_every == 0)) {
            const double begin = now_seconds();
            const int64_t correct = evaluate_hellaswag(&trainer, config, &inputs.hellaswag, &stopped);
            if (!stopped) log_hellaswag(&log, step, correct, inputs.hellaswag.count, now_seconds() - begin);
        }
        if (config->sample_every > 0 && !stopped && (last || (step > 0 && step % config->sample_every == 0)))
            evaluate_sample(&trainer, config, &inputs.tokenizer, step, &stopped);
        if (last || stopped) break;

        const bool traced = step + 1 == config->trace;
        if (traced) {
            cuda_check(cudaDeviceSynchronize());
            comm_barrier(&trainer.comm);
            trace_start(&trace, compute);
            trainer.comm.trace = &trace;
        }
        if (step + 1 == config->profile_first) profile_start();
        comm_phase(&trainer.comm, "step", step + 1);
        range_push("step");
        const double begin = now_seconds();
        const CommCounts before = trainer.comm.counts;
        pipeline_begin_step(&trainer.pipeline);
        for (int i = 0; i < trainer.pipeline.n_items; i++) {
            const PipelineItem *item = &trainer.pipeline.items[i];
            MicroBatch batch;
            memset(&batch, 0, sizeof batch);
            batch.B = B;
            batch.T = T;
            batch.only_row = -1;
            batch.loss_scale = 1.0f / (float)config->tokens_per_step;
            batch.step = step;
            batch.first_sequence =
                ((uint64_t)item->micro * (uint64_t)ranks + (uint64_t)trainer.comm.data.rank) * (uint64_t)B;
            if (pipeline_reads(&trainer.pipeline, item) &&
                !loader_read(&loader, step, item->micro, &batch.inputs, &batch.targets, &error))
                die("%s", error.text);
            pipeline_run(&trainer.pipeline, i, &batch);
        }
        hyper.learning_rate = (float)config_learning_rate(config, step);
        const StepResult result =
            zero_step(&trainer.zero, &hyper, config->grad_clip, gpt_loss_sum(&trainer.model), stop_requested());
        if (result.updated) totals.communication = comm_counts_since(&trainer.comm, &before); // skipped: less
        log_step(&log, step + 1, &result, result.loss_sum / (double)config->tokens_per_step, hyper.learning_rate,
                 now_seconds() - begin);
        idle_ms += pipeline_idle_ms(&trainer.pipeline);
        range_pop();
        if (step + 1 == config->profile_last) profile_stop();
        if (traced) log_trace(&log, &trainer.comm, &trace, step + 1);
        if (config->check_replicas > 0 && (step + 1) % config->check_replicas == 0)
            zero_check_replicas(&trainer.zero, step + 1);
        bad_steps = result.updated ? 0 : bad_steps + 1;
        if (bad_steps >= config->max_bad_steps)
            comm_die_together(&trainer.comm, EXIT_RUN,
                              "loss or gradient norm were not finite in %lld steps in a row, up to step %lld: the run "
                              "has diverged. A lower learning_rate or a longer warmup_steps may help; max_bad_steps "
                              "says how many such steps are skipped",
                              (long long)bad_steps, (long long)step + 1);
        stopped = result.stop;
        log_bytes = log_position(&log);
        comm_phase(&trainer.comm, "checkpoint after step", step + 1);
        checkpoint_poll(&checkpoints);
        if (config->checkpoint_every > 0 && ((step + 1) % config->checkpoint_every == 0 || step + 1 == config->steps))
            checkpoint_save(&checkpoints, step + 1, bad_steps, log_bytes, log.last_loss);
    }
    if (config->checkpoint_every > 0 && stopped && checkpoints.last != step)
        checkpoint_save(&checkpoints, step, bad_steps, log_bytes, log.last_loss);
    checkpoint_wait(&checkpoints);
    comm_phase(&trainer.comm, "end after step", step);

    totals.params_hash = zero_params_hash(&trainer.zero);
    totals.memory = trainer.memory;
    totals.planned = plan.memory;
    totals.communication_planned = plan.communication;
    totals.padded_parameters = trainer.layout.size;
    totals.all_ranks = comm_sum_counts(&trainer.comm, &totals.communication);
    totals.planned_all_ranks = comm_sum_counts(&trainer.comm, &totals.communication_planned);
    totals.idle_share = log.train_seconds > 0 ? mean_of_ranks(&trainer.comm, 1e-3 * idle_ms / log.train_seconds) : 0;
    totals.checkpoints_begun = checkpoints.begun;
    totals.checkpoints_saved = checkpoints.saved;
    totals.checkpoints_held = checkpoints.held_seconds;
    totals.snapshot_bytes = largest_of_ranks(&trainer.comm, checkpoints.snapshot_bytes);
    totals_of_fullest(&trainer.comm, &totals);
    log_summary(&log, &trainer, &totals);
    if (stopped && log.speaks) {
        if (config->eval_only)
            printf("stopped by a signal before the evaluation was done\n");
        else
            printf("stopped by a signal after step %lld of %lld\n", (long long)step, (long long)config->steps);
    }
    fflush(stdout); // the first rank to exit with a code that is not 0 ends the others
    comm_barrier(&trainer.comm);
    log_close(&log);
    checkpoints_close(&checkpoints);
    resume_free(&resume);
    if (inputs.trains) loader_close(&loader);
    if (inputs.validates) validation_close(&validation);
    inputs_close(&inputs);
    trainer_free(&trainer);
    cuda_check(cudaStreamDestroy(communication));
    cuda_check(cudaStreamDestroy(compute));
    return stopped ? EXIT_STOPPED : 0;
}

#else

DECLARE_TRAINER(train_fp32);
DECLARE_TRAINER(train_bf16);
DECLARE_TRAINER(train_bf16_gradfp32);

// What somebody who runs the program without arguments needs to know.
static void greet(void) {
    printf(
        "train_gpt pretrains GPT-2/3 style models on CPUs and GPUs.\n"
        "\n"
        "  bash scripts/quickstart.sh                           trains a small model on English text, in minutes\n"
        "  ./train_gpt --train-data train.txt --val-data val.txt --steps 500\n"
        "                                                       trains on a text of yours, read as bytes\n"
        "  ./train_gpt configs/NAME.json --nproc 2              runs a configuration, on two ranks\n"
        "  ./train_gpt --export DIRECTORY --from runs/NAME      writes a checkpoint for Hugging Face's transformers\n"
        "  ./train_gpt --help                                   lists every option, its default and its range\n");
}

// Checks everything that can be checked before ranks start: data, vocabulary, prompt, and every token of the first step
// and of the first batch of validation on every rank.
static bool check_inputs(const Config *config, int world_size, Error *error) {
    Inputs inputs;
    const int T = (int)config->sequence_length, V = (int)config->vocab_size, B = (int)config->micro_batch;
    if (!inputs_open(&inputs, config, error)) return false;
    if (inputs.trains &&
        !loader_check_step(&inputs.train, T, config->tokens_per_step / T, (uint64_t)config->seed, V, 0, error))
        return false;
    if (inputs.validates) {
        Validation validation;
        const int *unused;
        if (!validation_open(&validation, &inputs.val, T, B, val_windows(config), 0, 1, V, error)) return false;
        for (int64_t k = 0; k < world_size && k < validation.batches; k++)
            if (!validation_read(&validation, k, &unused, &unused, error)) return false;
        validation_close(&validation);
    }
    if (config->sample_every > 0) {
        int *prompt = (int *)malloc((size_t)T * sizeof(int)), count = 0;
        if (prompt == NULL) die("no room for a prompt");
        if (!tokenizer_encode_prompt(&inputs.tokenizer, config->sample_prompt, prompt, T, &count, error)) return false;
        for (int i = 0; i < count; i++)
            if (prompt[i] >= V)
                return error_set(error, "sample_prompt: token %d is beyond the model's vocab_size %d", prompt[i], V);
        free(prompt);
    }
    inputs_close(&inputs);
    return true;
}

// Keeps what is freed in the heap, so that libraries that allocate and free large buffers in every step (oneDNN, MPI)
// do not fault the pages in each time: that can cost more than the work itself.
static void keep_heap(void) {
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, -1);
    mallopt(M_TOP_PAD, 256 << 20);
}

// How long a thread that waits for the others of a parallel loop spins before it sleeps. libgomp's 300,000 rounds make
// a step up to a hundred times slower as soon as another process wants a core (the waiting thread holds the core that
// the awaited one needs); with none, small models lose a third of their speed to waking up. Measured on 2 cores, a step
// of the default model in bf16, alone and beside one busy process: 300,000: 15 ms, 2500 ms; 0: 24 ms, 55 ms; 200 to
// 1000: 15 to 20 ms, 34 to 73 ms. libgomp reads the environment before main, hence the exec.
static void spin_briefly(char **argv) {
    if (getenv("GOMP_SPINCOUNT") != NULL || getenv("OMP_WAIT_POLICY") != NULL) return; // the user has chosen
    setenv("GOMP_SPINCOUNT", "500", 1);
    execv("/proc/self/exe", argv); // if it fails, the program runs as it would have
}

// Standard streams that were closed would let the next file that is opened take their number, and their text.
static void open_standard_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) _exit(EXIT_RUN);
}

int main(int argc, char **argv) {
    open_standard_streams();
    signal(SIGPIPE, SIG_IGN); // whoever reads the progress may leave: the run goes on
    signal(SIGXFSZ, SIG_IGN); // a file that may not grow is an error of its writing
    spin_briefly(argv);
    keep_heap();
    if (argc == 1) {
        greet();
        return 0;
    }
    Error error = {""};
    static Config config;
    Place place = place_from_environment(&error);
    if (error.text[0] != '\0' || !config_read(&config, argc, argv, &error)) die_input(&error);
    if (config.help) {
        config_help(stdout);
        return 0;
    }
    if (config_exports(&config)) return place.rank == 0 ? export_run(&config) : 0;
    error_identify(place.rank, place.world_size);
    if (!begin_take_shape(&config, &error)) {
        if (place.rank > 0) { // rank 0 says it and all end, unless it sees other files
            sleep(5);
            die("%s", error.text);
        }
        die_input(&error);
    }
    int world_size = place.launched ? place.world_size : (int)config.nproc;
    int node_ranks = place.launched ? place.local_size : world_size;
    if (config.plan && config.world_size > 0) { // ranks elsewhere, on machines of 8
        world_size = (int)config.world_size;
        node_ranks = world_size < 8 ? world_size : 8;
    }
    if (config.plan) place.local_size = node_ranks; // which share the cores, as in the run: scratch is per thread
    if (!config_check(&config, world_size, node_ranks, &error)) die_input(&error);
    if (!config.plan &&
        !(bootstrap_check(&place, world_size, &error) && (place.launched || device_check(world_size, &error))))
        die_input(&error);
    // Other ranks may see other files; what they find is agreed on later.
    if (!config.plan && place.rank == 0 && !check_inputs(&config, world_size, &error)) {
        if (place.launched) bootstrap_meet(&place, (double)config.timeout, &error); // which tells the others, if it can
        die_input(&error);
    }
    if (!config.plan && !place.launched && world_size > 1) return bootstrap_launch(world_size, argv);
    config.nproc = world_size;
    if (strcmp(config.precision, "fp32") == 0) return train_fp32(&config, &place);
    if (strcmp(config.gradient_dtype, "fp32") == 0) return train_bf16_gradfp32(&config, &place);
    return train_bf16(&config, &place);
}

#endif
