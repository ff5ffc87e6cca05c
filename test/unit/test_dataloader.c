// Tests of dataset.h and dataloader.h: every error of a data file, the order of the windows, the batches, validation.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "dataloader.h"

static char folder[256];

static char *in_folder(const char *name) {
    static char paths[8][512];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const void *bytes, size_t size) {
    FILE *file = fopen(in_folder(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

// A header, then `size` bytes.
static void write_raw_shard(const char *name, int magic, int version, int count, const void *tokens, size_t size) {
    char *bytes = calloc(1, SHARD_HEADER_BYTES + size);
    int32_t header[3] = {magic, version, count};
    memcpy(bytes, header, sizeof header);
    if (size > 0) memcpy(bytes + SHARD_HEADER_BYTES, tokens, size);
    write_file(name, bytes, SHARD_HEADER_BYTES + size);
    free(bytes);
}

// uint32 tokens first, first + 1, ...: every token tells where it is from.
static void write_counting_shard(const char *name, int count, uint32_t first) {
    uint32_t *tokens = malloc((size_t)count * 4);
    for (int i = 0; i < count; i++) tokens[i] = first + (uint32_t)i;
    write_raw_shard(name, SHARD_MAGIC_UINT32, SHARD_VERSION_UINT32, count, tokens, (size_t)count * 4);
    free(tokens);
}

static void write_counting_shard16(const char *name, int count, uint16_t first) {
    uint16_t *tokens = malloc((size_t)count * 2);
    for (int i = 0; i < count; i++) tokens[i] = (uint16_t)(first + i);
    write_raw_shard(name, SHARD_MAGIC_UINT16, SHARD_VERSION_UINT16, count, tokens, (size_t)count * 2);
    free(tokens);
}

static void assert_error(const Error *error, const char *file, const char *part) {
    if (strstr(error->text, file) == NULL || strstr(error->text, part) == NULL)
        fail_msg("the error is '%s', but should name '%s' and say '%s'", error->text, file, part);
    assert_null(strchr(error->text, '\n'));
}

static void expect_open_error(const char *name, const char *part) {
    Dataset data;
    Error error = {""};
    assert_false(dataset_open(&data, in_folder(name), &error));
    assert_error(&error, in_folder(name), part);
    assert_null(data.shards);
}

static void must_open(Dataset *data, const char *name) {
    Error error = {""};
    if (!dataset_open(data, in_folder(name), &error)) fail_msg("%s", error.text);
}

// ---------------------------------------------------------------------------------------------------------------------

static void test_bad_files(void **state) {
    (void)state;
    uint16_t few[4] = {1, 2, 3, 4};
    expect_open_error("missing.bin", "No such file");
    expect_open_error("missing.txt", "No such file");
    expect_open_error("missing_*.bin", "no file matches");
    mkdir(in_folder("folder.bin"), 0755);
    expect_open_error("folder.bin", "is a directory");
    write_file("empty.txt", "", 0);
    expect_open_error("empty.txt", "is empty");
    write_file("empty.bin", "", 0);
    expect_open_error("empty.bin", "is empty");
    write_file("short.bin", few, sizeof few);
    expect_open_error("short.bin", "truncated: it has 8 bytes");
    char zeros[SHARD_HEADER_BYTES + 8] = {0};
    write_file("zeros.bin", zeros, sizeof zeros);
    expect_open_error("zeros.bin", "first number is 0, not 20240520 (uint16 tokens) or 20240801");
    write_raw_shard("magic.bin", 20240328, 1, 4, few, 8);
    expect_open_error("magic.bin", "20240328");
    write_raw_shard("swapped.bin", (int)__builtin_bswap32(SHARD_MAGIC_UINT16), 1, 4, few, 8);
    expect_open_error("swapped.bin", "byte order");
    write_raw_shard("swapped32.bin", (int)__builtin_bswap32(SHARD_MAGIC_UINT32), 1, 4, few, 8);
    expect_open_error("swapped32.bin", "byte order");
    write_raw_shard("version.bin", SHARD_MAGIC_UINT16, 7, 4, few, 8);
    expect_open_error("version.bin", "version 7, but with magic 20240520 only version 1");
    write_raw_shard("version32.bin", SHARD_MAGIC_UINT32, 1, 2, few, 8);
    expect_open_error("version32.bin", "version 1, but with magic 20240801 only version 7");
    write_raw_shard("none.bin", SHARD_MAGIC_UINT16, 1, 0, few, 0);
    expect_open_error("none.bin", "holds 0 tokens");
    write_raw_shard("negative.bin", SHARD_MAGIC_UINT16, 1, -5, few, 8);
    expect_open_error("negative.bin", "holds -5 tokens");
    write_raw_shard("truncated.bin", SHARD_MAGIC_UINT16, 1, 5, few, 8);
    expect_open_error("truncated.bin", "is truncated: its header says 5 tokens, so 1034 bytes, but it has 1032");
    write_raw_shard("foreign.bin", SHARD_MAGIC_UINT16, 1, 3, few, 8);
    expect_open_error("foreign.bin", "is foreign: its header says 3 tokens, so 1030 bytes, but it has 1032");
    // A count whose size needs more than 32 bits.
    write_raw_shard("huge.bin", SHARD_MAGIC_UINT32, 7, INT32_MAX, few, 8);
    expect_open_error("huge.bin", "8589935612 bytes");
    write_raw_shard("shard.txt", SHARD_MAGIC_UINT16, 1, 4, few, 8);
    expect_open_error("shard.txt", "not named *.bin");
    assert_int_equal(mkfifo(in_folder("pipe.txt"), 0644), 0);
    expect_open_error("pipe.txt", "not a regular file");

    Dataset data;
    Error error = {""};
    assert_false(dataset_open(&data, "", &error));
    assert_string_equal(error.text, "no data file is named");
}

static void test_unreadable(void **state) {
    (void)state;
    write_file("secret.txt", "text", 4);
    assert_int_equal(chmod(in_folder("secret.txt"), 0), 0);
    bool root = geteuid() == 0; // root may read everything: be someone else for a moment
    if (root && seteuid(65534) != 0) skip();
    expect_open_error("secret.txt", "Permission denied");
    if (root) assert_int_equal(seteuid(0), 0);
}

static void test_mixed_kinds(void **state) {
    (void)state;
    Dataset data;
    Error error = {""};
    write_counting_shard16("mixed_0.bin", 10, 0);
    write_counting_shard("mixed_1.bin", 10, 0);
    assert_false(dataset_open(&data, in_folder("mixed_*.bin"), &error));
    assert_error(&error, "mixed_1.bin", "uint32 tokens, but");
    write_file("mixed_2.txt", "text", 4);
    error.text[0] = '\0';
    assert_false(dataset_open(&data, in_folder("mixed_[02].*"), &error));
    assert_error(&error, "mixed_2.txt", "holds text, but");
}

static void test_patterns(void **state) {
    (void)state;
    Dataset data;
    write_counting_shard16("part_000002.bin", 30, 0);
    write_counting_shard16("part_000000.bin", 10, 0);
    write_counting_shard16("part_000001.bin", 20, 0);
    must_open(&data, "part_*.bin");
    assert_int_equal(data.count, 3);
    assert_int_equal(data.token_bytes, 2);
    assert_int_equal(data.tokens, 60);
    for (int i = 0; i < 3; i++) assert_int_equal(data.shards[i].tokens, 10 * (i + 1)); // sorted by name
    dataset_close(&data);
    // One bad file among many is named.
    write_file("part_000003.bin", "x", 1);
    Error error = {""};
    assert_false(dataset_open(&data, in_folder("part_*.bin"), &error));
    assert_error(&error, "part_000003.bin", "truncated");
    // A name that looks like a pattern.
    write_file("text[1].txt", "abcdef", 6);
    must_open(&data, "text[1].txt");
    assert_int_equal(data.token_bytes, 1);
    assert_int_equal(data.tokens, 6);
    dataset_close(&data);
}

// ---------------------------------------------------------------------------------------------------------------------

static void test_permutation(void **state) {
    (void)state;
    static const int sizes[] = {1023, 1024, 1025, 4095, 4096, 4097, 65535, 65536, 65537, 100003, 262145};
    char *seen = malloc(262145);
    for (int i = 0; i < 400 + (int)(sizeof sizes / sizeof *sizes); i++) {
        int n = i < 400 ? i + 1 : sizes[i - 400];
        memset(seen, 0, (size_t)n);
        for (int index = 0; index < n; index++) {
            int64_t x = permute(random_key(7, RANDOM_SHUFFLE, (uint64_t)n, 0), n, index);
            assert_in_range(x, 0, n - 1);
            assert_int_equal(seen[x]++, 0);
        }
    }
    free(seen);
    // Large domains: in range, and different indices differ.
    int64_t n = ((int64_t)1 << 40) + 12345, before = -1;
    for (int64_t index = n - 1000; index < n; index++) {
        int64_t x = permute(5, n, index);
        assert_true(x >= 0 && x < n && x != before);
        before = x;
    }
}

// Every index goes everywhere equally often, and neighbours do not stay neighbours. With 10 elements and 20000 keys a
// chi-square of 9 degrees of freedom is below 33.7 with probability 1 - 1e-4; the keys are fixed, so this is no
// lottery.
static void test_shuffle_is_uniform(void **state) {
    (void)state;
    enum { N = 10, KEYS = 20000 };
    int place[N][N] = {{0}}, next[N] = {0};
    for (int k = 0; k < KEYS; k++) {
        uint64_t key = random_key(1337, RANDOM_SHUFFLE, (uint64_t)k, 0);
        for (int i = 0; i < N; i++) place[i][permute(key, N, i)]++;
        next[(permute(key, N, 4) - permute(key, N, 3) + N) % N]++;
    }
    for (int i = 0; i < N; i++) {
        double chi2 = 0, expected = (double)KEYS / N;
        for (int x = 0; x < N; x++) chi2 += (place[i][x] - expected) * (place[i][x] - expected) / expected;
        assert_true(chi2 < 33.7);
    }
    assert_int_equal(next[0], 0);
    double chi2 = 0, expected = (double)KEYS / (N - 1);
    for (int x = 1; x < N; x++) chi2 += (next[x] - expected) * (next[x] - expected) / expected;
    assert_true(chi2 < 33.7);
}

// An order of n windows without a file.
static void fake_order(WindowOrder *order, int64_t n, int64_t per_step, uint64_t seed) {
    Windows windows = {.count = n, .length = 8};
    Error error = {""};
    assert_true(order_open(order, &windows, per_step, seed, &error));
}

static void test_epochs_and_steps(void **state) {
    (void)state;
    enum { MAX = 48, EPOCHS = 7 };
    int exchanged = 0;
    for (int n = 1; n <= MAX; n++) {
        for (int per_step = 1; per_step <= n; per_step++) {
            WindowOrder order, random_access;
            fake_order(&order, n, per_step, 42);
            fake_order(&random_access, n, per_step, 42);
            int steps = n * EPOCHS / per_step;
            int64_t in_order[MAX * EPOCHS];
            int epoch_of[MAX], step_of[MAX];
            for (int x = 0; x < MAX; x++) epoch_of[x] = step_of[x] = -1;
            for (int step = 0; step < steps; step++) {
                for (int j = 0; j < per_step; j++) {
                    int position = step * per_step + j;
                    int64_t x = in_order[position] = order_window(&order, step, j);
                    assert_in_range(x, 0, n - 1);
                    // Once an epoch: no epoch is left out and none has it twice.
                    assert_int_equal(epoch_of[x], position / n - 1);
                    epoch_of[x] = position / n;
                    // Once a step.
                    assert_int_not_equal(step_of[x], step);
                    step_of[x] = step;
                }
                exchanged += (int)order.exchanges;
            }
            // Any step can be addressed at random: the same windows, asked for in another order.
            for (int i = 0; i < steps; i++) {
                int step = (int)permute(99, steps, i);
                for (int j = per_step - 1; j >= 0; j -= 1 + per_step / 3)
                    assert_int_equal(order_window(&random_access, step, j), in_order[step * per_step + j]);
            }
            order_close(&order);
            order_close(&random_access);
        }
    }
    assert_true(exchanged > 1000); // the exchanges were really exercised
}

static void test_epochs_differ(void **state) {
    (void)state;
    WindowOrder a, b;
    fake_order(&a, 1000, 10, 1);
    fake_order(&b, 1000, 10, 2);
    int same_seed = 0, same_epoch = 0;
    for (int p = 0; p < 1000; p++) {
        same_seed += order_window(&a, p / 10, p % 10) == order_window(&b, p / 10, p % 10);
        same_epoch += order_window(&a, p / 10, p % 10) == order_window(&a, 100 + p / 10, p % 10);
    }
    assert_in_range(same_seed, 0, 8); // one is expected
    assert_in_range(same_epoch, 0, 8);
    order_close(&a);
    order_close(&b);
}

static void test_shorter_than_a_batch(void **state) {
    (void)state;
    Dataset data;
    Loader loader;
    Error error = {""};
    write_file("short.txt", "0123456789abcdefghijklmnopqrstuv", 32); // 31 targets: 3 windows of 8
    must_open(&data, "short.txt");
    assert_false(loader_open(&loader, &data, 8, 2, 2, 0, 1, 1, 256, &error));
    assert_error(&error, "short.txt", "its 32 tokens make 3 sequences of 8, but a step takes 4: at least 33 tokens");
    loader_close(&loader); // harmless after a failed open
    error.text[0] = '\0';
    assert_false(loader_check_step(&data, 8, 4, 1, 256, 0, &error));
    assert_error(&error, "short.txt", "at least 33 tokens");
    error.text[0] = '\0';
    assert_true(loader_check_step(&data, 8, 3, 1, 256, 0, &error));
    dataset_close(&data);
    write_file("enough.txt", "0123456789abcdefghijklmnopqrstuvw", 33);
    must_open(&data, "enough.txt");
    assert_true(loader_check_step(&data, 8, 4, 1, 256, 0, &error));
    dataset_close(&data);
}

// ---------------------------------------------------------------------------------------------------------------------

enum { T = 8, SHARDS = 3 };
static const int shard_tokens[SHARDS] = {8 * T + 1, 12 * T, 5 * T + 3}; // 8, 11 and 5 windows: 24
enum { WINDOWS = 24, VOCAB = SHARDS * 1000 };

static void open_three_shards(Dataset *data) {
    for (int i = 0; i < SHARDS; i++) {
        char name[32];
        snprintf(name, sizeof name, "three_%d.bin", i);
        write_counting_shard(name, shard_tokens[i], (uint32_t)(1000 * i));
    }
    must_open(data, "three_*.bin");
}

// The number of the window that a row of inputs and targets holds, by what is in it.
static int window_of(const int *inputs, const int *targets) {
    int shard = inputs[0] / 1000, w = inputs[0] % 1000 / T, before = 0;
    for (int i = 0; i < T; i++) {
        assert_int_equal(inputs[i], 1000 * shard + w * T + i);
        assert_int_equal(targets[i], 1000 * shard + w * T + i + 1);
    }
    assert_true(w * T + T < shard_tokens[shard]);
    for (int i = 0; i < shard; i++) before += (shard_tokens[i] - 1) / T;
    return before + w;
}

// The windows of steps [0, steps), in the order of their samples, however ranks and micro-batches share them.
static void collect(const Dataset *data, int B, int M, int D, int steps, int *windows) {
    for (int rank = 0; rank < D; rank++) {
        Loader loader;
        Error error = {""};
        assert_true(loader_open(&loader, data, T, B, M, rank, D, 1337, VOCAB, &error));
        for (int step = 0; step < steps; step++)
            for (int m = 0; m < M; m++) {
                const int *inputs = NULL, *targets = NULL;
                if (!loader_read(&loader, step, m, &inputs, &targets, &error)) fail_msg("%s", error.text);
                for (int b = 0; b < B; b++)
                    windows[step * B * M * D + (m * D + rank) * B + b] = window_of(inputs + b * T, targets + b * T);
            }
        loader_close(&loader);
    }
}

static void test_ranks_share_a_step(void **state) {
    (void)state;
    enum { STEPS = 11, W = 12 }; // epochs end inside and between steps
    Dataset data;
    open_three_shards(&data);
    int expected[STEPS * W], got[STEPS * W];
    collect(&data, W, 1, 1, STEPS, expected);
    int seen[WINDOWS] = {0};
    for (int i = 0; i < 5 * WINDOWS; i++) seen[expected[i]]++;
    for (int w = 0; w < WINDOWS; w++) assert_int_equal(seen[w], 5);
    static const int shares[][3] = {{1, 12, 1}, {1, 1, 12}, {3, 2, 2}, {2, 2, 3}, {4, 1, 3}, {1, 3, 4}, {6, 2, 1}};
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++) {
        memset(got, 0xff, sizeof got);
        collect(&data, shares[i][0], shares[i][1], shares[i][2], STEPS, got);
        assert_memory_equal(got, expected, sizeof got);
    }
    dataset_close(&data);
}

// Without being asked, the thread reads this batch.
static void assert_is_ahead(Loader *loader, int64_t step, int micro) {
    pthread_mutex_lock(&loader->lock);
    loader_wait(loader);
    assert_true(loader->asked);
    assert_int_equal(loader->batch[1 - loader->current].step, step);
    assert_int_equal(loader->batch[1 - loader->current].micro, micro);
    pthread_mutex_unlock(&loader->lock);
}

static void test_read_ahead_is_the_order(void **state) {
    (void)state;
    enum { B = 2, M = 3, D = 2, RANK = 1, W = B * M * D };
    Dataset data;
    open_three_shards(&data);
    Loader loader, second;
    WindowOrder order;
    Error error = {""};
    fake_order(&order, WINDOWS, W, 5);
    assert_true(loader_open(&loader, &data, T, B, M, RANK, D, 5, VOCAB, &error));
    assert_true(loader_open(&second, &data, T, B, M, 0, D, 5, VOCAB, &error));
    const int *inputs = NULL, *targets = NULL, *held = NULL, *ignored = NULL;
    // In order, then a jump ahead, back, the same batch twice, the middle of a step, then in order again.
    static const int asked[][2] = {{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {900, 2}, {901, 0},
                                   {3, 1}, {3, 1}, {3, 2}, {4, 0}, {0, 0}, {0, 1},   {1000000, 0},
                                   {1, 2}, {2, 0}, {2, 1}, {2, 2}, {3, 0}};
    int copy[B * T];
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        int step = asked[i][0], micro = asked[i][1];
        assert_true(loader_read(&loader, step, micro, &inputs, &targets, &error));
        for (int b = 0; b < B; b++)
            assert_int_equal(window_of(inputs + b * T, targets + b * T),
                             order_window(&order, step, (micro * D + RANK) * B + b));
        assert_ptr_not_equal(inputs, held); // double buffer: what the caller held is not where this one is
        held = inputs;
        // A second loader at work and the read-ahead leave the batch as it is.
        memcpy(copy, inputs, sizeof copy);
        assert_true(loader_read(&second, step, micro, &ignored, &ignored, &error));
        if (i % 2 == 0) assert_is_ahead(&loader, micro == M - 1 ? step + 1 : step, (micro + 1) % M);
        assert_memory_equal(inputs, copy, sizeof copy);
    }
    loader_close(&loader);
    loader_close(&second);
    loader_close(&second); // closing twice is harmless
    order_close(&order);
    dataset_close(&data);
}

static void test_open_and_close(void **state) {
    (void)state;
    Dataset data;
    open_three_shards(&data);
    for (int i = 0; i < 200; i++) {
        Loader loader;
        Error error = {""};
        const int *inputs = NULL, *targets = NULL;
        assert_true(loader_open(&loader, &data, T, 4, 1, 0, 1, (uint64_t)i, VOCAB, &error));
        if (i % 2) assert_true(loader_read(&loader, i, 0, &inputs, &targets, &error)); // closed while it reads ahead
        loader_close(&loader);
    }
    dataset_close(&data);
}

static void test_token_widths(void **state) {
    (void)state;
    Dataset data;
    Validation validation;
    Error error = {""};
    const int *inputs = NULL, *targets = NULL;
    // uint32: ids beyond 16 bits
    write_counting_shard("wide.bin", 9, 1000000);
    must_open(&data, "wide.bin");
    assert_int_equal(data.token_bytes, 4);
    assert_true(validation_open(&validation, &data, 8, 1, 0, 0, 1, 1000009, &error));
    assert_true(validation_read(&validation, 0, &inputs, &targets, &error));
    assert_int_equal(inputs[0], 1000000);
    assert_int_equal(targets[7], 1000008);
    validation_close(&validation);
    dataset_close(&data);
    // uint16: ids beyond 15 bits are not negative
    write_counting_shard16("narrow.bin", 9, 65527);
    must_open(&data, "narrow.bin");
    assert_true(validation_open(&validation, &data, 8, 1, 0, 0, 1, 65536, &error));
    assert_true(validation_read(&validation, 0, &inputs, &targets, &error));
    assert_int_equal(inputs[0], 65527);
    assert_int_equal(targets[7], 65535);
    validation_close(&validation);
    dataset_close(&data);
    // text: bytes beyond ASCII
    write_file("utf8.txt", "caf\xc3\xa9\n\xff\x00!", 9);
    must_open(&data, "utf8.txt");
    assert_true(validation_open(&validation, &data, 8, 1, 0, 0, 1, 256, &error));
    assert_true(validation_read(&validation, 0, &inputs, &targets, &error));
    static const int bytes[9] = {'c', 'a', 'f', 0xc3, 0xa9, '\n', 0xff, 0, '!'};
    for (int i = 0; i < 8; i++) {
        assert_int_equal(inputs[i], bytes[i]);
        assert_int_equal(targets[i], bytes[i + 1]);
    }
    validation_close(&validation);
    dataset_close(&data);
}

// The far end of files beyond 2 GB and, in bytes, beyond 4 GB. They are sparse: they take no room.
static void test_large_files(void **state) {
    (void)state;
    for (int width = 1; width <= 4; width *= 2) {
        int64_t tokens = width == 1 ? 5000000000ll : 2147483000ll, header = width == 1 ? 0 : SHARD_HEADER_BYTES;
        const char *name = width == 1 ? "large.txt" : "large.bin";
        if (width == 1)
            write_file(name, "\0", 1);
        else
            write_raw_shard(name, width == 2 ? SHARD_MAGIC_UINT16 : SHARD_MAGIC_UINT32, width == 2 ? 1 : 7, (int)tokens,
                            NULL, 0);
        int fd = open(in_folder(name), O_RDWR);
        assert_int_equal(ftruncate(fd, header + tokens * width), 0);
        // The last 17 tokens are 1 to 17.
        for (int i = 0; i < 17; i++) {
            uint32_t token = (uint32_t)i + 1;
            assert_int_equal(pwrite(fd, &token, (size_t)width, header + (tokens - 17 + i) * width), width);
        }
        close(fd);
        Dataset data;
        Validation validation;
        Error error = {""};
        const int *inputs = NULL, *targets = NULL;
        must_open(&data, name);
        assert_int_equal(data.tokens, tokens);
        assert_true(validation_open(&validation, &data, 8, 1, 0, 0, 1, 256, &error));
        assert_int_equal(validation.tokens, tokens - 1);
        // The last window, whole or not, ends with target 17.
        if (!validation_read(&validation, validation.batches - 1, &inputs, &targets, &error))
            fail_msg("%s", error.text);
        int last = (int)((tokens - 2) % 8);
        assert_int_equal(inputs[last], 16);
        assert_int_equal(targets[last], 17);
        if (last < 7) assert_int_equal(targets[last + 1], -1);
        validation_close(&validation);
        // And by the loader: some step of the first epoch has the last whole window.
        Loader loader;
        assert_true(loader_open(&loader, &data, 8, 4, 1, 0, 1, 3, 256, &error));
        assert_int_equal(loader.windows.count, (tokens - 1) / 8);
        int64_t token;
        assert_int_equal(windows_locate(&loader.windows, loader.windows.count - 1, &token), 0);
        assert_int_equal(token, (tokens - 1) / 8 * 8 - 8);
        assert_true(loader_read(&loader, (tokens - 1) / 8 / 4 - 1, 0, &inputs, &targets, &error));
        loader_close(&loader);
        dataset_close(&data);
        unlink(in_folder(name));
    }
}

// More shards than a reader keeps open.
static void test_many_shards(void **state) {
    (void)state;
    enum { MANY = READER_FILES + 40 };
    for (int i = 0; i < MANY; i++) {
        char name[32];
        snprintf(name, sizeof name, "many_%03d.bin", i);
        write_counting_shard(name, 2 * T + 1, (uint32_t)(100 * i));
    }
    Dataset data;
    Loader loader;
    Error error = {""};
    must_open(&data, "many_*.bin");
    assert_true(loader_open(&loader, &data, T, 2, 1, 0, 1, 3, 100 * MANY, &error));
    int seen[MANY][2] = {{0}};
    const int *inputs = NULL, *targets = NULL;
    for (int step = 0; step < MANY; step++) {
        if (!loader_read(&loader, step, 0, &inputs, &targets, &error)) fail_msg("%s", error.text);
        for (int b = 0; b < 2; b++) {
            int shard = inputs[b * T] / 100, w = inputs[b * T] % 100 / T;
            assert_int_equal(targets[b * T + T - 1], 100 * shard + w * T + T);
            assert_int_equal(seen[shard][w]++, 0);
        }
    }
    // A shard that disappears is missed as soon as it must be opened again.
    unlink(in_folder("many_007.bin"));
    bool ok = true;
    for (int step = MANY; step < 4 * MANY && ok; step++) ok = loader_read(&loader, step, 0, &inputs, &targets, &error);
    assert_false(ok);
    assert_error(&error, "many_007.bin", "No such file");
    loader_close(&loader);
    dataset_close(&data);
}

// ---------------------------------------------------------------------------------------------------------------------

static void test_bad_token(void **state) {
    (void)state;
    Dataset data;
    Loader loader;
    Validation validation;
    Error error = {""};
    const int *inputs = NULL, *targets = NULL;
    uint16_t tokens[33] = {0};
    tokens[19] = 50257;
    write_raw_shard("bad_token.bin", SHARD_MAGIC_UINT16, 1, 33, tokens, sizeof tokens);
    must_open(&data, "bad_token.bin");
    const char *message = "token 19 is 50257, but the vocabulary has 50257: ids 0 to 50256";
    assert_false(loader_check_step(&data, 8, 4, 1, 50257, 0, &error));
    assert_error(&error, "bad_token.bin", message);
    error.text[0] = '\0';
    assert_true(loader_check_step(&data, 8, 4, 1, 50258, 0, &error));
    // One window a step: the step that holds it fails, also when it was read ahead; the others do not.
    assert_true(loader_open(&loader, &data, 8, 1, 1, 0, 1, 1, 50257, &error));
    int failed = 0;
    for (int step = 0; step < 8; step++) {
        if (loader_read(&loader, step, 0, &inputs, &targets, &error)) continue;
        assert_error(&error, "bad_token.bin", message);
        error.text[0] = '\0';
        failed++;
    }
    assert_int_equal(failed, 2); // in each of two epochs
    loader_close(&loader);
    assert_true(validation_open(&validation, &data, 8, 1, 0, 0, 1, 50257, &error));
    for (int k = 0; k < 4; k++) {
        bool ok = validation_read(&validation, k, &inputs, &targets, &error);
        assert_int_equal(ok, k != 2);
        if (!ok) assert_error(&error, "bad_token.bin", message);
    }
    validation_close(&validation);
    dataset_close(&data);
    // The last token of a window is only a target; it is checked too. Text can be beyond a small vocabulary as well.
    write_file("bad_byte.txt", "aaaaaaaaz", 9);
    must_open(&data, "bad_byte.txt");
    error.text[0] = '\0';
    assert_false(loader_check_step(&data, 8, 1, 1, 'b', 0, &error));
    assert_error(&error, "bad_byte.txt", "token 8 is 122, but the vocabulary has 98");
    // An id beyond 31 bits is not mistaken for a negative one.
    uint32_t large[9] = {0, 0, 0xffffffffu};
    write_raw_shard("bad_large.bin", SHARD_MAGIC_UINT32, 7, 9, large, sizeof large);
    dataset_close(&data);
    must_open(&data, "bad_large.bin");
    error.text[0] = '\0';
    assert_false(loader_check_step(&data, 8, 1, 1, 50257, 0, &error));
    assert_error(&error, "bad_large.bin", "token 2 is 4294967295");
    dataset_close(&data);
}

static void test_cut_while_running(void **state) {
    (void)state;
    Dataset data;
    Loader loader;
    Error error = {""};
    const int *inputs = NULL, *targets = NULL;
    write_counting_shard("cut.bin", 64 * T + 1, 0);
    must_open(&data, "cut.bin");
    assert_true(loader_open(&loader, &data, T, 2, 1, 0, 1, 3, 1000, &error));
    assert_true(loader_read(&loader, 0, 0, &inputs, &targets, &error));
    assert_int_equal(truncate(in_folder("cut.bin"), SHARD_HEADER_BYTES + 100), 0);
    bool ok = true;
    for (int step = 1; step < 32 && ok; step++) ok = loader_read(&loader, step, 0, &inputs, &targets, &error);
    assert_false(ok);
    assert_error(&error, "cut.bin", "ends at byte");
    loader_close(&loader);
    // Changed between the look at it and the first read.
    error.text[0] = '\0';
    assert_false(loader_check_step(&data, T, 4, 1, 1000, 0, &error));
    assert_error(&error, "cut.bin", "has 1124 bytes, but had 3076 when it was opened");
    dataset_close(&data);
}

static void test_thread_takes_no_signals(void **state) {
    (void)state;
    sigset_t before, after;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    Dataset data;
    Loader loader;
    Error error = {""};
    open_three_shards(&data);
    assert_true(loader_open(&loader, &data, T, 4, 1, 0, 1, 1, VOCAB, &error));
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    assert_int_equal(sigismember(&after, SIGUSR1), sigismember(&before, SIGUSR1));
    // Sent to the reader thread alone it stays pending there; were it delivered, its default action ends this test.
    assert_int_equal(pthread_kill(loader.thread, SIGUSR1), 0);
    loader_close(&loader);
    dataset_close(&data);
}

// ---------------------------------------------------------------------------------------------------------------------

static void check_validation(const Dataset *data, int B, int D, int64_t max_windows) {
    int *seen = calloc(VOCAB, sizeof(int));
    int64_t tokens = 0, batches = 0, said = 0;
    for (int rank = 0; rank < D; rank++) {
        Validation validation;
        Error error = {""};
        assert_true(validation_open(&validation, data, T, B, max_windows, rank, D, VOCAB, &error));
        if (rank > 0) {
            assert_int_equal(validation.batches, batches);
            assert_int_equal(validation.tokens, said);
        }
        batches = validation.batches;
        said = validation.tokens;
        for (int64_t k = 0; k < batches; k++) {
            const int *inputs = NULL, *targets = NULL;
            memset(validation.inputs, 0x7f, (size_t)(B * T) * sizeof(int));
            memset(validation.targets, 0x7f, (size_t)(B * T) * sizeof(int));
            assert_true(validation_read(&validation, k, &inputs, &targets, &error));
            for (int i = 0; i < B * T; i++) {
                if (targets[i] == -1) {
                    assert_int_equal(inputs[i], 0);
                    continue;
                }
                assert_int_equal(targets[i], inputs[i] + 1);
                // Where in its window a target stands: at the place that its window gives it, in file order.
                assert_int_equal(inputs[i] % 1000 % T, i % T);
                assert_int_equal(seen[targets[i]]++, 0);
                tokens++;
            }
        }
        validation_close(&validation);
    }
    assert_int_equal(tokens, said);
    int64_t windows = 0, expected_windows = 0;
    for (int i = 0; i < SHARDS; i++) windows += (shard_tokens[i] - 1 + T - 1) / T;
    if (max_windows > 0 && max_windows < windows) windows = max_windows;
    assert_int_equal(batches, (windows + B * D - 1) / (B * D));
    // Every target of the windows covered once, none of the others; a shard's first token is nobody's target.
    for (int i = 0; i < SHARDS; i++)
        for (int t = 0; t < shard_tokens[i]; t++) {
            if (t % T == 1) expected_windows++;
            assert_int_equal(seen[1000 * i + t], t > 0 && expected_windows <= windows ? 1 : 0);
        }
    free(seen);
}

static void test_validation_covers_everything_once(void **state) {
    (void)state;
    Dataset data;
    open_three_shards(&data);
    for (int B = 1; B <= 6; B++)
        for (int D = 1; D <= 5; D++) {
            check_validation(&data, B, D, 0);
            check_validation(&data, B, D, 1);
            check_validation(&data, B, D, 2);
            check_validation(&data, B, D, 1000);
        }
    dataset_close(&data);
}

static void test_validation_rows_of_ranks(void **state) {
    (void)state;
    enum { B = 2, D = 3 };
    Dataset data;
    Error error = {""};
    const int *inputs = NULL, *targets = NULL;
    write_counting_shard("rows.bin", 13 * T + 1, 0);
    must_open(&data, "rows.bin");
    for (int rank = 0; rank < D; rank++) {
        Validation validation;
        assert_true(validation_open(&validation, &data, T, B, 0, rank, D, VOCAB, &error));
        assert_int_equal(validation.batches, 3);
        for (int k = 0; k < 3; k++) {
            assert_true(validation_read(&validation, k, &inputs, &targets, &error));
            for (int b = 0; b < B; b++) {
                int window = (k * D + rank) * B + b;
                assert_int_equal(inputs[b * T], window < 13 ? window * T : 0);
                assert_int_equal(targets[b * T], window < 13 ? window * T + 1 : -1);
            }
        }
        validation_close(&validation);
    }
    dataset_close(&data);
}

static void test_validation_too_short(void **state) {
    (void)state;
    Dataset data;
    Validation validation;
    Error error = {""};
    write_file("val.txt", "12345678", 8);
    must_open(&data, "val.txt");
    assert_false(validation_open(&validation, &data, 8, 1, 0, 0, 1, 256, &error));
    assert_error(&error, "val.txt", "it has 8 tokens, a sequence of 8 and its targets take 9");
    validation_close(&validation);
    error.text[0] = '\0';
    assert_true(validation_open(&validation, &data, 7, 1, 0, 0, 1, 256, &error));
    assert_int_equal(validation.tokens, 7);
    validation_close(&validation);
    dataset_close(&data);
}

// ---------------------------------------------------------------------------------------------------------------------

static int make_folder(void **state) {
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.200s/test_dataXXXXXX", base != NULL && base[0] != '\0' ? base : "/tmp");
    if (mkdtemp(folder) == NULL) return -1;
    return chmod(folder, 0755);
}

static int remove_folder(void **state) {
    (void)state;
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_unreadable),
        cmocka_unit_test(test_mixed_kinds),
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_permutation),
        cmocka_unit_test(test_shuffle_is_uniform),
        cmocka_unit_test(test_epochs_and_steps),
        cmocka_unit_test(test_epochs_differ),
        cmocka_unit_test(test_shorter_than_a_batch),
        cmocka_unit_test(test_ranks_share_a_step),
        cmocka_unit_test(test_read_ahead_is_the_order),
        cmocka_unit_test(test_open_and_close),
        cmocka_unit_test(test_token_widths),
        cmocka_unit_test(test_large_files),
        cmocka_unit_test(test_many_shards),
        cmocka_unit_test(test_bad_token),
        cmocka_unit_test(test_cut_while_running),
        cmocka_unit_test(test_thread_takes_no_signals),
        cmocka_unit_test(test_validation_covers_everything_once),
        cmocka_unit_test(test_validation_rows_of_ranks),
        cmocka_unit_test(test_validation_too_short),
    };
    return cmocka_run_group_tests_name("dataloader", tests, make_folder, remove_folder);
}
