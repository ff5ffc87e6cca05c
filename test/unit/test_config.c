// Tests of config.h and options.h: every kind of message, presets, precedence, the resolved file, learning rates.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "config.h"
#include "random.h"

static char folder[] = "/tmp/test_config_XXXXXX", path[64], resolved[64];
static Config config;
static Error error;

static void write_bytes(const char *text, size_t length) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, length, file), length);
    assert_int_equal(fclose(file), 0);
}

// Reads `json` (NULL: no file) and the flags, a NULL-terminated list; checks for `ranks` ranks unless that is 0.
static bool read_run(int ranks, const char *json, const char *const *flags) {
    char *argv[64] = {"train_gpt"};
    int argc = 1;
    if (json != NULL) {
        write_bytes(json, strlen(json));
        argv[argc++] = path;
    }
    for (; flags != NULL && *flags != NULL; flags++) argv[argc++] = (char *)*flags;
    memset(&config, 0xFF, sizeof config);
    memset(&error, 0, sizeof error);
    return config_read(&config, argc, argv, &error) && (ranks == 0 || config_check(&config, ranks, ranks, &error));
}

#define FLAGS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define DATA "--train-data", "x"

static void accepted(int ranks, const char *json, const char *const *flags) {
    if (!read_run(ranks, json, flags)) fail_msg("refused: %s", error.text);
    assert_string_equal(error.text, "");
}

// Expects an error of one line that holds each of the parts, separated by '|' in `parts`.
static void refused(int ranks, const char *json, const char *const *flags, const char *parts) {
    if (read_run(ranks, json, flags)) fail_msg("accepted, expected an error with: %s", parts);
    if (strchr(error.text, '\n') != NULL) fail_msg("more than a line: %s", error.text);
    char copy[512], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", parts);
    for (char *part = strtok_r(copy, "|", &rest); part != NULL; part = strtok_r(NULL, "|", &rest))
        if (strstr(error.text, part) == NULL) fail_msg("\"%s\" is not in: %s", part, error.text);
}

// The file's part of a message that begins with its name.
static void refused_file(const char *json, const char *parts) {
    char all[512];
    snprintf(all, sizeof all, "%s|%s", path, parts);
    refused(0, json, NULL, all);
}

static void test_defaults(void **state) {
    (void)state;
    accepted(1, NULL, FLAGS(DATA));
    assert_int_equal(config.n_layer, 4);
    assert_int_equal(config.n_head, 4);
    assert_int_equal(config.n_embd, 128);
    assert_int_equal(config.context_length, 64);
    assert_int_equal(config.vocab_size, 256);
    assert_int_equal(config.sequence_length, 64);
    assert_int_equal(config.tokens_per_step, 12 * 64);
    assert_int_equal(config.micro_batches, 1);
    assert_int_equal(config.data_parallel, 1);
    assert_int_equal(config.padded_vocab_size, 256);
    assert_true(config.learning_rate == 1e-3 && config.min_learning_rate == 1e-4 && config.epsilon == 1e-8);
    assert_string_equal(config.strategy, "ddp");
    assert_string_equal(config.gradient_dtype, "bf16");
    assert_int_equal(config.val_every, 0); // no validation data
    assert_true(config.overlap && config.master_weights && !config.sequence_parallel);
    assert_int_equal(config.sources[CONFIG_train_data], FROM_FLAG);
    assert_int_equal(config.sources[CONFIG_steps], FROM_DEFAULT);
}

static void test_presets(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int64_t n_layer, n_head, n_embd, context_length;
        double parameters; // published, in millions
    } shapes[] = {
        {"gpt2-124M", 12, 12, 768, 1024, 124},   {"gpt2-350M", 24, 16, 1024, 1024, 355},
        {"gpt2-774M", 36, 20, 1280, 1024, 774},  {"gpt2-1558M", 48, 25, 1600, 1024, 1558},
        {"gpt3-125M", 12, 12, 768, 2048, 125},   {"gpt3-350M", 24, 16, 1024, 2048, 356},
        {"gpt3-760M", 24, 16, 1536, 2048, 760},  {"gpt3-1.3B", 24, 16, 2048, 2048, 1316},
        {"gpt3-2.7B", 32, 32, 2560, 2048, 2651}, {"gpt3-6.7B", 32, 32, 4096, 2048, 6658},
        {"gpt3-13B", 40, 40, 5120, 2048, 12853}, {"gpt3-175B", 96, 96, 12288, 2048, 174600},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        accepted(1, NULL, FLAGS(DATA, "--preset", shapes[i].name, "--micro-batch", "1"));
        assert_int_equal(config.n_layer, shapes[i].n_layer);
        assert_int_equal(config.n_head, shapes[i].n_head);
        assert_int_equal(config.n_embd, shapes[i].n_embd);
        assert_int_equal(config.context_length, shapes[i].context_length);
        assert_int_equal(config.sequence_length, shapes[i].context_length);
        assert_int_equal(config.vocab_size, 50257);
        assert_int_equal(config.padded_vocab_size, 50304);
        // The shape gives the published size: embeddings, 12 C^2 + 13 C per block, the last layer norm.
        double C = (double)config.n_embd;
        double n = (50257 + (double)config.context_length) * C + (double)config.n_layer * (12 * C * C + 13 * C) + 2 * C;
        assert_true(fabs(n / 1e6 - shapes[i].parameters) < 0.006 * shapes[i].parameters);
    }
}

static void test_precedence(void **state) {
    (void)state;
    const char *json =
        "{\"model\": {\"n_layer\": 6, \"preset\": \"gpt2-124M\", \"vocab_size\": 300}, \"run\": {\"steps\": 7}}";
    accepted(0, json, NULL); // keys beside a preset override it, wherever they stand
    assert_int_equal(config.n_layer, 6);
    assert_int_equal(config.n_embd, 768);
    assert_int_equal(config.vocab_size, 300);
    assert_int_equal(config.steps, 7);
    assert_int_equal(config.sources[CONFIG_n_layer], FROM_FILE);
    assert_int_equal(config.sources[CONFIG_n_embd], FROM_PRESET);
    accepted(0, json, FLAGS("--n-layer", "2", "--steps=9", "--steps", "10"));
    assert_int_equal(config.n_layer, 2);
    assert_int_equal(config.n_embd, 768);
    assert_int_equal(config.steps, 10);
    accepted(0, json, FLAGS("--preset", "gpt2-350M", "--n-head", "8")); // a preset flag replaces the file's shape
    assert_int_equal(config.n_layer, 24);
    assert_int_equal(config.n_head, 8);
    assert_int_equal(config.vocab_size, 50257);

    // Flags before the file, and booleans in all their forms.
    write_bytes(json, strlen(json));
    accepted(0, NULL, FLAGS("--steps", "8", "--sequence-parallel", path));
    assert_int_equal(config.steps, 8);
    assert_int_equal(config.n_layer, 6);
    assert_true(config.sequence_parallel);
    accepted(0, NULL, FLAGS("--overlap", "false", "--deterministic=false", "--sequence-parallel"));
    assert_true(!config.overlap && !config.deterministic && config.sequence_parallel);
    accepted(0, NULL, FLAGS("--overlap=false", "--overlap", "--steps", "3"));
    assert_true(config.overlap);
    accepted(0, NULL, FLAGS("--sample-prompt=--steps 3", "--learning-rate", "3e-4", "--steps", "1e3"));
    assert_string_equal(config.sample_prompt, "--steps 3");
    assert_true(config.learning_rate == 3e-4);
    assert_int_equal(config.steps, 1000);
    accepted(0, NULL, FLAGS("--help"));
    assert_true(config.help);
    accepted(0, "{\"run\": {\"seed\": 9007199254740991}}", NULL);
    assert_true(config.seed == 9007199254740991);
    accepted(0, "{\"published\": {\"n_layer\": [1, null, {\"steps\": \"x\"}]}, \"run\": {}}", NULL);
    accepted(0, "{}", NULL);
}

static void test_bad_values_in_files(void **state) {
    (void)state;
    refused_file("{\"batch\": {\"micro_batch\": -3}}",
                 ": batch.micro_batch: -3 is out of range, 1 to 1048576 is needed");
    refused_file("{\"batch\": {\"micro_batch\": 12.5}}", "batch.micro_batch|12.5|whole number");
    refused_file("{\"batch\": {\"micro_batch\": \"12\"}}", "batch.micro_batch|\"12\"|whole number");
    refused_file("{\"batch\": {\"micro_batch\": null}}", "batch.micro_batch|null|whole number");
    refused_file("{\"batch\": {\"micro_batch\": [1]}}", "batch.micro_batch|a list or an object|whole number");
    refused_file("{\"batch\": {\"micro_batch\": true}}", "batch.micro_batch|true|whole number");
    refused_file("{\"batch\": {\"micro_batch\": 1e400}}", "batch.micro_batch|out of range");
    refused_file("{\"run\": {\"seed\": 9007199254740993}}", "run.seed|out of range");
    refused_file("{\"optimizer\": {\"learning_rate\": 1e400}}", "optimizer.learning_rate|out of range");
    refused_file("{\"optimizer\": {\"learning_rate\": 0}}", "optimizer.learning_rate: 0 is out of range, more than 0");
    refused_file("{\"optimizer\": {\"learning_rate\": NaN}}", "line 1, column 33|not JSON at: NaN");
    refused_file("{\"optimizer\": {\"beta1\": 1}}", "optimizer.beta1: 1 is out of range");
    refused_file("{\"parallel\": {\"overlap\": 1}}", "parallel.overlap|1 is not a boolean|true or false");
    refused_file("{\"parallel\": {\"overlap\": \"true\"}}", "parallel.overlap|\"true\" is not a boolean");
    refused_file("{\"parallel\": {\"strategy\": \"dpp\"}}", "parallel.strategy|\"dpp\"|ddp, zero1, zero2, zero3");
    refused_file("{\"parallel\": {\"strategy\": 1}}", "parallel.strategy|1 is not a text|ddp");
    refused_file("{\"data\": {\"train_data\": 1}}", "data.train_data|1 is not a text");
    refused_file("{\"model\": {\"preset\": \"gpt2-124\"}}", "model.preset|\"gpt2-124\"|gpt2-124M, gpt2-350M");
    refused_file("{\"data\": {\"train_data\": \"a\\nb\", \"train_data\": \"\"}}", "data.train_data|given twice");
    refused_file("{\"run\": {\"steps\": 1}, \"run\": {}}", ": run:|section is given twice");
    refused_file("{\"run\": 1}", ": run:|not a section");
    refused_file("{\"rum\": {}}", ": rum: unknown section|run");
    refused_file("{\"steps\": 3}", ": steps:|{\"run\": {\"steps\": ...}}");
    refused_file("{\"model\": {\"steps\": 3}}", ": model.steps:|section run");
    refused_file("{\"batch\": {\"micro_batsh\": 3}}", ": batch.micro_batsh: unknown key|micro_batch");
    refused_file("{\"batch\": {\"published\": 3}}", ": batch.published: unknown key");
    refused_file("{\"batch\": {\"micro_batch\": \"a\\nb\"}}", "batch.micro_batch|\"a?b\"");

    char json[1200], text[1025];
    memset(text, 'a', sizeof text - 1);
    text[1024] = '\0';
    snprintf(json, sizeof json, "{\"data\": {\"train_data\": \"%s\"}}", text);
    refused_file(json, "data.train_data|1024 bytes|1023");
    refused(0, NULL, FLAGS("--log-dir", text), "--log-dir|1024 bytes|1023");
    text[1023] = '\0';
    accepted(0, NULL, FLAGS("--log-dir", text));
    assert_string_equal(config.log_dir, text);
}

static void test_bad_files(void **state) {
    (void)state;
    refused(0, NULL, FLAGS("/nonexistent/run.json"), "/nonexistent/run.json|No such file");
    refused(0, NULL, FLAGS(folder), "is a directory|JSON file");
    refused(0, NULL, FLAGS("/dev/null"), "/dev/null|pipe or a device");
    refused_file("", "is empty");
    refused_file(" \n\t ", "is empty");
    refused_file("{\"run\": {\n  \"steps\": 3,\n  oops}}", "line 3, column 3: not JSON at: oops}}");
    refused_file("{\"run\": {\"steps\": 3}", "line 1, column 21|ends too early");
    refused_file("{\"run\": {\"steps\": 3}} x", "line 1, column 23|not JSON at: x");
    refused_file("[1, 2]", "not a JSON object|{\"model\": {\"preset\": ...}}");
    refused_file("3", "not a JSON object");
    refused_file("n_layer: 3", "line 1, column 1|not JSON");
    static char big[OPTIONS_FILE_LIMIT + 2];
    memset(big, '[', sizeof big);
    big[100000] = '\0';
    refused_file(big, "line 1, column|nested too deeply");
    memset(big, ' ', sizeof big - 1);
    big[0] = '{', big[1] = '}', big[sizeof big - 1] = '\0';
    refused_file(big, "has 1048577 bytes|at most 1048576");
    big[sizeof big - 2] = '\0';
    accepted(0, big, NULL);
    write_bytes("{}\0x", 4);
    refused(0, NULL, FLAGS(path), "zero character");
    assert_int_equal(mkfifo(resolved, 0600), 0);
    refused(0, NULL, FLAGS(resolved), "pipe or a device");
    assert_int_equal(remove(resolved), 0);
}

static void test_bad_flags(void **state) {
    (void)state;
    refused(0, NULL, FLAGS("--micro_batch", "3"), "--micro_batch: unknown flag|--micro-batch");
    refused(0, NULL, FLAGS("--stepz=3"), "--stepz: unknown flag|--steps");
    refused(0, NULL, FLAGS("-steps", "3"), "-steps: unknown flag|--steps");
    refused(0, NULL, FLAGS("--steps"), "--steps: a value is missing|1 to 1000000000");
    refused(0, NULL, FLAGS("--steps", "--seed", "3"), "--steps: a value is missing");
    refused(0, NULL, FLAGS("--steps="), "--steps: \"\" is not a whole number");
    refused(0, NULL, FLAGS("--steps", "ten"), "--steps: \"ten\" is not a whole number|1 to 1000000000");
    refused(0, NULL, FLAGS("--steps", "0x10"), "--steps: \"0x10\" is not a whole number");
    refused(0, NULL, FLAGS("--steps", "-1"), "--steps: -1 is out of range|1 to 1000000000");
    refused(0, NULL, FLAGS("--steps", "2.5"), "--steps: 2.5 is not a whole number");
    refused(0, NULL, FLAGS("--steps", "1e400"), "--steps:|out of range");
    refused(0, NULL, FLAGS("--learning-rate", "nan"), "--learning-rate (|\"nan\" is not a number|more than 0");
    refused(0, NULL, FLAGS("--learning-rate", "1e400"), "--learning-rate|out of range");
    refused(0, NULL, FLAGS("--weight-decay", "-1"), "--weight-decay (|-1 is out of range|0 to 1000");
    refused(0, NULL, FLAGS("--overlap", "yes"), "--overlap: \"yes\" is not a boolean|true or false");
    refused(0, NULL, FLAGS("--strategy", "zero4"), "--strategy: \"zero4\"|zero3");
    refused(0, NULL, FLAGS("a.json", "b.json"), "b.json: a second configuration file after a.json");
    refused(0, NULL, FLAGS(""), "argument is empty");
}

static void test_cross_checks(void **state) {
    (void)state;
    refused(1, NULL, FLAGS("--steps", "3"), "data.train_data|--train-data|scripts/quickstart.sh");
    refused(1, NULL, FLAGS(DATA, "--n-head", "5"), "--n-head (|5|n_embd 128|4 or 8");
    refused(1, NULL, FLAGS(DATA, "--n-head", "200"), "--n-head (|200|n_embd 128|: 128");
    refused(1, "{\"model\": {\"n_embd\": 100, \"n_head\": 3}}", FLAGS(DATA), "model.n_head: 3|n_embd 100|2 or 4");
    refused(1, NULL, FLAGS(DATA, "--sequence-length", "65"), "--sequence-length (|65|context_length 64");
    refused(2, NULL, FLAGS(DATA, "--tokens-per-step", "2000"),
            "--tokens-per-step (|2000|micro_batch 12|sequence_length 64|2 data-parallel ranks|1536 or 3072");
    refused(2, NULL, FLAGS(DATA, "--tokens-per-step", "768"), "--tokens-per-step (|768|nearest: 1536");
    refused(1, NULL, FLAGS(DATA, "--micro-batch", "1048576", "--context-length", "4096"), "--micro-batch|524287");
    refused(1, NULL, FLAGS(DATA, "--classifier-chunks", "769"), "--classifier-chunks (|769|768 tokens");
    refused(1, NULL, FLAGS(DATA, "--min-learning-rate", "0.01"), "--min-learning-rate (|0.01|learning_rate 0.001");
    refused(1, NULL, FLAGS(DATA, "--schedule", "wsd", "--decay-steps", "1901"),
            "--decay-steps (|1901|1900|steps 2000|warmup_steps 100");
    refused(1, NULL, FLAGS(DATA, "--precision", "fp32", "--gradient-dtype", "bf16"),
            "--gradient-dtype (|bf16|precision");
    accepted(1, NULL, FLAGS(DATA, "--master-weights", "false"));
    refused(4, NULL, FLAGS(DATA, "--nproc", "2"), "--nproc: 2|one of 4 ranks");
    accepted(1, NULL, FLAGS(DATA, "--master-weights", "false", "--precision", "fp32"));

    // Accumulation and resolved values.
    accepted(3, "{\"run\": {\"nproc\": 2}}", FLAGS(DATA, "--tokens-per-step", "4608", "--vocab-size", "257"));
    assert_int_equal(config.micro_batches, 2);
    assert_int_equal(config.data_parallel, 3);
    assert_int_equal(config.nproc, 3);
    assert_int_equal(config.padded_vocab_size, 384);
    accepted(1, NULL, FLAGS(DATA, "--learning-rate", "3e-5", "--precision", "fp32", "--schedule", "wsd"));
    assert_true(config.min_learning_rate == 3e-5 / 10);
    assert_string_equal(config.gradient_dtype, "fp32");
    assert_int_equal(config.decay_steps, 400);
    accepted(1, NULL, FLAGS(DATA, "--val-every", "5"));
    assert_int_equal(config.val_every, 0); // nothing to validate on
    accepted(1, NULL, FLAGS(DATA, "--val-every", "5", "--val-data", "y"));
    assert_int_equal(config.val_every, 5);
    accepted(1, NULL, FLAGS(DATA, "--gradient-dtype", "fp32"));
    assert_string_equal(config.precision, "bf16");
}

static void test_sharding(void **state) {
    (void)state;
    accepted(4, NULL, FLAGS(DATA, "--strategy", "fsdp", "--shard-group", "2"));
    assert_string_equal(config.strategy, "zero3");
    assert_int_equal(config.shard_ranks, 2);
    accepted(6, NULL, FLAGS(DATA, "--strategy", "zero3"));
    assert_int_equal(config.shard_ranks, 6);
    accepted(6, NULL, FLAGS(DATA, "--strategy", "zero3", "--shard-group=node")); // the tests' node has all ranks
    assert_int_equal(config.shard_ranks, 6);
    accepted(4, "{\"parallel\": {\"strategy\": \"zero3\", \"shard_group\": \"node\"}}", FLAGS(DATA));
    accepted(4, NULL, FLAGS(DATA, "--strategy", "zero2", "--shard-group", "4"));
    refused(6, NULL, FLAGS(DATA, "--strategy", "zero3", "--shard-group", "4"), "--shard-group|4|6|1, 2, 3, 6");
    refused(4, NULL, FLAGS(DATA, "--strategy", "zero1", "--shard-group", "2"), "--shard-group|2|only zero3|zero1");
    refused(4, NULL, FLAGS(DATA, "--strategy", "zero3", "--shard-group", "rack"), "--shard-group|rack|or node");
    refused(4, NULL, FLAGS(DATA, "--strategy", "zero3", "--shard-group", "-1"), "--shard-group|-1|out of range");
}

// Which steps a profiler records: on the CPU refused by name, once they make sense.
static void test_profile_steps(void **state) {
    (void)state;
    static const char *const bad[] = {"3",    "3:",    ":3",  "0:3",  "5:3",  "-1:3",
                                      "1:-3", "1:3:5", "a:b", "1 :3", "1:11", "1:99999999999999999999",
                                      ":",    "+1:2"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char parts[128];
        snprintf(parts, sizeof parts, "--profile-steps (|\"%s\" is not A:B|1 <= A <= B <= steps 10", bad[i]);
        refused(1, NULL, FLAGS(DATA, "--steps", "10", "--profile-steps", bad[i]), parts);
    }
    refused(1, NULL, FLAGS(DATA, "--steps", "10", "--profile-steps", "3:10"),
            "--profile-steps (|3:10|not built for GPUs");
    refused(1, "{\"run\": {\"profile_steps\": \"1:1\"}}", FLAGS(DATA), "run.profile_steps: 1:1|not built for GPUs");
    accepted(1, NULL, FLAGS(DATA, "--profile-steps", ""));
    assert_true(config.profile_first == 0 && config.profile_last == 0);
}

// Where weights come from, and what is evaluated.
static void test_weights_and_evaluation(void **state) {
    (void)state;
    accepted(1, NULL, FLAGS(DATA, "--init-from", "w"));
    accepted(1, NULL, FLAGS(DATA, "--init-from", "w", "--resume", "auto", "--log-dir", "d"));
    refused(1, NULL, FLAGS(DATA, "--init-from", "w", "--resume", "d/step_00000001"),
            "--init-from|resume goes on from d/step_00000001; one of them is needed");
    refused(1, NULL, FLAGS("--eval-only", "--val-data", "v"), "--eval-only|random weights|--init-from PATH|--resume");
    refused(1, NULL, FLAGS("--eval-only", "--init-from", "w"), "--eval-only|nothing to evaluate|--val-data");
    accepted(1, NULL,
             FLAGS("--eval-only", "--init-from", "w", "--val-data", "v", "--checkpoint-every", "5", "--log-dir", "d"));
    assert_int_equal(config.checkpoint_every, 0);
    accepted(1, NULL, FLAGS("--eval-only", "--resume", "d", "--hellaswag", "h"));
    refused(1, NULL, FLAGS(DATA, "--hellaswag-every", "5"), "--hellaswag-every|--hellaswag FILE is needed");
    accepted(0, NULL, FLAGS("--export", "d", "--from", "w"));
    assert_true(config_exports(&config));
    assert_string_equal(config.export_directory, "d");
    refused(0, NULL, FLAGS("--export-dtype", "fp64"), "--export-dtype|fp32, bf16, fp16");
}

static void test_not_built(void **state) {
    (void)state;
    static const char *const flags[][3] = {
        {"--recompute", "block", "only none|full"},
        {"--offload", "optimizer", "only none"},
    };
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        char parts[128];
        snprintf(parts, sizeof parts, "%s|: %s is not built yet|%s", flags[i][0], flags[i][1], flags[i][2]);
        refused(1, NULL, FLAGS(DATA, flags[i][0], flags[i][1]), parts);
    }
}

// Checkpoints stand in log_dir; what is kept for good is what is written.
static void test_checkpoints(void **state) {
    (void)state;
    accepted(1, NULL, FLAGS(DATA, "--log-dir", "d", "--checkpoint-every", "5", "--checkpoint-major-every", "10"));
    accepted(1, NULL, FLAGS(DATA, "--log-dir", "d", "--resume", "auto"));
    accepted(1, NULL, FLAGS(DATA, "--resume", "d/step_00000005"));
    assert_string_equal(config.resume, "d/step_00000005");
    refused(1, NULL, FLAGS(DATA, "--checkpoint-every", "5"), "--checkpoint-every|log_dir, which is needed");
    refused(1, NULL, FLAGS(DATA, "--resume", "auto"), "--resume|log_dir, which is needed");
    refused(1, NULL, FLAGS(DATA, "--resume", ""), "--resume|never, auto or the directory");
    refused(1, NULL, FLAGS(DATA, "--log-dir", "d", "--checkpoint-every", "5", "--checkpoint-major-every", "12"),
            "--checkpoint-major-every|12 is not a multiple of checkpoint_every 5");
    refused(1, NULL, FLAGS(DATA, "--checkpoint-major-every", "5"), "--checkpoint-major-every|not a multiple");
}

// Grids of ranks: what follows, and what is refused, with what would be right.
static void test_grids(void **state) {
    (void)state;
    accepted(8, NULL, FLAGS(DATA, "--strategy", "tp", "--n-head", "8"));
    assert_true(config.tensor_parallel == 8 && config.data_parallel == 1 && config.padded_vocab_size == 1024);
    accepted(8, NULL, FLAGS(DATA, "--tensor-parallel", "2", "--pipeline-parallel", "2", "--strategy", "zero3"));
    assert_true(config.data_parallel == 2 && config.shard_ranks == 2 && config.padded_vocab_size == 256);
    refused(4, NULL, FLAGS(DATA, "--strategy", "tp", "--tensor-parallel", "2"), "--tensor-parallel|all 4 ranks");
    refused(8, NULL, FLAGS(DATA, "--tensor-parallel", "8"), "--tensor-parallel|n_head 4|what divides: 1, 2, 4");
    refused(3, NULL, FLAGS(DATA, "--strategy", "tp"), "--strategy|n_head 4|what divides: 1, 2, 4");
    refused(6, NULL, FLAGS(DATA, "--tensor-parallel", "4"), "--tensor-parallel|the 6 ranks|1, 2, 3, 6");
    refused(5, NULL, FLAGS(DATA, "--pipeline-parallel", "5"), "--pipeline-parallel|n_layer is 4");
    refused(4, NULL, FLAGS(DATA, "--pipeline-parallel", "3"), "--pipeline-parallel|the 4 ranks|1, 2, 4");
    refused(2, NULL, FLAGS(DATA, "--pipeline-chunks", "2"), "--pipeline-chunks|pipeline_parallel is 1");
    refused(2, NULL, FLAGS(DATA, "--pipeline-parallel", "2", "--pipeline-chunks", "3"), "--pipeline-chunks|at most 2");
    refused(2, NULL, FLAGS(DATA, "--pipeline-parallel", "2", "--pipeline-chunks", "2"),
            "--pipeline-chunks|multiples of pipeline_parallel 2, there are 1|1536");
    refused(2, NULL, FLAGS(DATA, "--sequence-parallel", "true"), "--sequence-parallel|tensor_parallel is 1");
    refused(2, NULL, FLAGS(DATA, "--tensor-parallel", "2", "--sequence-parallel", "true", "--sequence-length", "63"),
            "--sequence-parallel|sequence_length 63|nearest: 62");
    refused(1, NULL, FLAGS(DATA, "--trace", "3"), "--trace|log_dir");
    refused(1, NULL, FLAGS(DATA, "--trace", "30", "--steps", "3", "--log-dir", "x"), "--trace|steps is 3");
}

// Random values for every option that has room, then: what is written, read and checked is the same to the last bit.
static void test_round_trip(void **state) {
    (void)state;
    static Config written;
    for (uint64_t round = 0; round < 200; round++) {
        accepted(0, NULL, FLAGS(DATA));
        OptionTable table = config_table(&config);
        for (int i = 0; i < CONFIG_COUNT; i++) {
            const Option *option = &table.options[i];
            uint64_t bits = random_mix(round * 1000 + (uint64_t)i);
            void *value = option_at(&table, i);
            if (option->type == OPTION_NUMBER) {
                OptionInterval in = option_interval(option->allowed);
                *(double *)value = in.low + (in.high - in.low) * ((double)(bits >> 11) + 0.5) / 9007199254740992.0;
            }
            if (i == CONFIG_seed) *(int64_t *)value = (int64_t)(bits >> 11);
            if (i == CONFIG_sample_prompt)
                for (int c = 0; c < 40; c++) config.sample_prompt[c] = (char)(1 + random_mix(bits + (uint64_t)c) % 255);
            if (i == CONFIG_overlap) config.overlap = bits & 1;
        }
        config.min_learning_rate = config.learning_rate / 3;
        config.sources[CONFIG_min_learning_rate] = FROM_FLAG;
        config.micro_batch = 1 + (int64_t)(round % 5);
        config.tokens_per_step = config.micro_batch * 64 * 6;
        if (!config_check(&config, 1 + (int)(round % 3), 1, &error)) fail_msg("%s", error.text);
        if (!config_write(&config, resolved, &error)) fail_msg("%s", error.text);
        written = config;
        accepted(1 + (int)(round % 3), NULL, FLAGS(resolved));
        assert_memory_equal(&config, &written, offsetof(Config, sources));
    }
    // The file names every option, once.
    char *text = options_read_text(resolved, &error);
    cJSON *root = cJSON_Parse(text);
    free(text);
    assert_non_null(root);
    assert_null(cJSON_GetObjectItem(root, "published"));
    OptionTable table = config_table(&config);
    int keys = 0;
    for (cJSON *section = root->child; section != NULL; section = section->next) keys += cJSON_GetArraySize(section);
    assert_int_equal(keys, CONFIG_COUNT);
    for (int i = 0; i < CONFIG_COUNT; i++)
        assert_non_null(cJSON_GetObjectItem(cJSON_GetObjectItem(root, table.options[i].section), table.options[i].key));
    cJSON_Delete(root);
    assert_false(config_write(&config, "/dev/null/config.json", &error));
    assert_non_null(strstr(error.text, "/dev/null/config.json: cannot be written: Not a directory"));
}

static void test_keys_are_unique(void **state) {
    (void)state;
    OptionTable table = config_table(&config);
    for (int i = 0; i < CONFIG_COUNT; i++)
        for (int j = 0; j < i; j++) assert_string_not_equal(table.options[i].key, table.options[j].key);
}

static void test_help(void **state) {
    (void)state;
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    config_help(out);
    fclose(out);
    OptionTable table = config_table(&config);
    for (int i = 0; i < CONFIG_COUNT; i++) {
        char flag[64], line[80];
        snprintf(line, sizeof line, "\n  %s ", option_flag(flag, table.options[i].key));
        if (strstr(text, line) == NULL) fail_msg("--help lacks %s", flag);
        assert_non_null(strstr(text, table.options[i].help));
    }
    assert_non_null(strstr(text, "1 to 1048576; default: 12\n"));
    assert_non_null(strstr(text, "\noptimizer\n"));
    free(text);
}

static void rate(int64_t step, double expected) {
    double found = config_learning_rate(&config, step);
    if (fabs(found - expected) > 1e-12 * fabs(expected))
        fail_msg("step %d: %.17g, not %.17g", (int)step, found, expected);
}

static void test_learning_rate(void **state) {
    (void)state;
#define RUN DATA, "--steps", "1000", "--warmup-steps", "100", "--learning-rate", "0.01", "--min-learning-rate", "0.002"
    accepted(1, NULL, FLAGS(RUN, "--schedule", "cosine"));
    rate(0, 0.0001);
    rate(49, 0.005);
    rate(99, 0.01);
    rate(100, 0.01);
    rate(550, 0.006);                // halfway
    rate(400, 0.002 + 0.008 * 0.75); // a third: cos(pi / 3) = 1 / 2
    rate(999, 0.002 + 0.004 * (1 + cos(M_PI * 899 / 900)));
    rate(1000, 0.002);
    accepted(1, NULL, FLAGS(RUN, "--schedule", "linear"));
    rate(9, 0.001);
    rate(100, 0.01);
    rate(325, 0.008);
    rate(999, 0.01 - 0.008 * 899 / 900);
    rate(1000, 0.002);
    accepted(1, NULL, FLAGS(RUN, "--schedule", "constant"));
    rate(0, 0.0001);
    rate(999, 0.01);
    rate(5000, 0.01);
    accepted(1, NULL, FLAGS(RUN, "--schedule", "wsd", "--decay-steps", "400"));
    rate(0, 0.0001);
    rate(100, 0.01);
    rate(600, 0.01);
    rate(700, 0.008);
    rate(999, 0.01 - 0.008 * 399 / 400);
    rate(1000, 0.002);
    accepted(1, NULL, FLAGS(RUN, "--warmup-steps", "0", "--schedule", "cosine"));
    rate(0, 0.01);
    accepted(1, NULL, FLAGS(RUN, "--warmup-steps", "4000", "--schedule", "wsd")); // a run that ends in its warm-up
    assert_int_equal(config.decay_steps, 0);
    rate(999, 0.0025);
}

static int set_up(void **state) {
    (void)state;
    if (mkdtemp(folder) == NULL) return -1;
    snprintf(path, sizeof path, "%s/run.json", folder);
    snprintf(resolved, sizeof resolved, "%s/config.json", folder);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    remove(path);
    remove(resolved);
    return rmdir(folder); // fails if a test left anything else behind
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_presets),
        cmocka_unit_test(test_precedence),
        cmocka_unit_test(test_bad_values_in_files),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_bad_flags),
        cmocka_unit_test(test_cross_checks),
        cmocka_unit_test(test_sharding),
        cmocka_unit_test(test_profile_steps),
        cmocka_unit_test(test_not_built),
        cmocka_unit_test(test_weights_and_evaluation),
        cmocka_unit_test(test_checkpoints),
        cmocka_unit_test(test_grids),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_keys_are_unique),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_learning_rate),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
