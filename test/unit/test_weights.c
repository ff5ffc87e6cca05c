// Tests of weights.h, huggingface.h and llmc.h: the models in test/golden/hf, which transformers wrote and PyTorch put
// into llm.c's form; round trips byte for byte; pieces for any grid; everything that is refused.
#include "scratch.h"
#include "weights.h"

#define GOLDEN TEST_DIR "/golden/hf/"

static const ModelShape GOLDEN_SHAPE = {2, 2, 8, 8, 13};

static void must_open(Weights *weights, const char *path) {
    Error error = {""};
    if (!weights_open(weights, path, &error)) fail_msg("%s", error.text);
    assert_string_equal(error.text, "");
}

// A whole tensor; to be freed.
static float *read_tensor(Weights *weights, int id) {
    const size_t elements = weights_elements(weights_tensor(&weights->layout, id));
    float *values = malloc((elements + 1) * sizeof(float));
    Error error = {""};
    memset(values, 0xff, (elements + 1) * sizeof(float)); // NaNs
    if (!weights_read(weights, id, 0, elements, values, &error)) fail_msg("%s", error.text);
    assert_true(values[elements] != values[elements]); // nothing behind the end
    return values;
}

// ---------------------------------------------------------------------------------------------------------------------

static void assert_same_weights(const char *path_a, const char *path_b, double tolerance) {
    Weights a, b;
    Error error = {""};
    must_open(&a, path_a);
    must_open(&b, path_b);
    assert_true(weights_compare(&a, &b.shape, &error));
    for (int id = 0; id < weights_tensors(&a.shape); id++) {
        float *x = read_tensor(&a, id), *y = read_tensor(&b, id);
        for (size_t i = 0; i < weights_elements(weights_tensor(&a.layout, id)); i++)
            if (!(fabs((double)x[i] - (double)y[i]) <= tolerance * fabs((double)y[i])))
                fail_msg("%s: tensor %d: element %zu is %g, in %s it is %g", path_a, id, i, x[i], path_b, y[i]);
        free(x);
        free(y);
    }
    weights_close(&a);
    weights_close(&b);
}

static void test_models_of_transformers(void **state) {
    (void)state;
    assert_same_weights(GOLDEN "fp32", GOLDEN "fp32.bin", 0);
    assert_same_weights(GOLDEN "sharded", GOLDEN "fp32.bin", 0);
    assert_same_weights(GOLDEN "buffers", GOLDEN "fp32.bin", 0);
    assert_same_weights(GOLDEN "bf16", GOLDEN "bf16.bin", 0);
    // Rounding to 11 bits; no weight there is so small that fp16 holds fewer.
    assert_same_weights(GOLDEN "fp16", GOLDEN "fp32.bin", 1.0 / 2048);
}

// Any piece of any tensor, whatever was read before, and however little of a matrix is kept.
static void test_any_piece(void **state) {
    (void)state;
    Weights whole, pieces;
    Error error = {""};
    must_open(&whole, GOLDEN "fp32.bin");
    must_open(&pieces, GOLDEN "fp32");
    uint32_t draw = 1;
    for (int round = 0; round < 4000; round++) {
        draw = draw * 1664525u + 1013904223u;
        ((Huggingface *)pieces.state)->window_limit = draw >> 26; // 0 to 63: rows have 8 or 32 elements
        draw = draw * 1664525u + 1013904223u;
        const int id = (int)((draw >> 16) % (uint32_t)weights_tensors(&whole.shape));
        const size_t elements = weights_elements(weights_tensor(&whole.layout, id));
        draw = draw * 1664525u + 1013904223u;
        const size_t first = (draw >> 8) % elements;
        draw = draw * 1664525u + 1013904223u;
        const size_t count = (draw >> 8) % (elements - first + 1);
        float got[300];
        memset(got, 0xff, sizeof got);
        if (!weights_read(&pieces, id, first, count, got, &error)) fail_msg("%s", error.text);
        float *expected = read_tensor(&whole, id);
        assert_memory_equal(got, expected + first, count * sizeof(float));
        assert_true(got[count] != got[count]);
        free(expected);
    }
    weights_close(&whole);
    weights_close(&pieces);
}

// A number that tells the element, exact in fp32.
static float mark(int id, size_t global) {
    return (float)(random_mix((uint64_t)id * 1000003 + global) % 16000000 + 1);
}

// Writes the parameters of a checkpoint as the ranks of a grid do, each the part that it answers for.
static void write_checkpoint(const ModelShape *shape, Grid grid, int shard_group, int chunks) {
    Manifest m;
    memset(&m, 0, sizeof m);
    m.shape = *shape;
    m.grid = grid;
    m.shard_group = shard_group;
    m.pipeline_chunks = chunks;
    m.data.bytes = m.tokens_per_step = m.sequence_length = 1;
    m.n_files = grid.tensor * grid.data * grid.pipeline;
    m.files = calloc((size_t)m.n_files, sizeof(ManifestFile));
    Error error = {""};
    for (int r = 0; r < m.n_files; r++) {
        Layout layout;
        const LayoutCut cut = {grid.data,     grid.tensor, r % grid.tensor,
                               grid.pipeline, chunks,      r / grid.tensor / grid.data};
        layout_init(&layout, shape, &cut);
        SafetensorsTensor tensors[16];
        char names[16][48];
        int n = 0;
        for (int u = 0; u < layout.n_units; u++) {
            const uint64_t count[1] = {unit_own(&layout.units[u], &grid, shard_group, r).count};
            if (count[0] == 0) continue;
            state_tensor_name(&layout.units[u], STATE_PARAMS, names[n]);
            tensors[n] = safetensors_describe(names[n], FLOAT_F32, 1, count);
            n++;
        }
        char *path = rank_path(scratch(""), r);
        SafetensorsWriter writer;
        assert_true(safetensors_create(&writer, path, tensors, n, NULL, &error));
        for (int u = 0; u < layout.n_units; u++) {
            const Held own = unit_own(&layout.units[u], &grid, shard_group, r);
            float *values = calloc(own.count + 1, sizeof(float));
            PieceCursor cursor = {0, 0};
            Piece piece;
            while (unit_next_piece(&layout.units[u], own.first, own.first + own.count, &cursor, &piece))
                for (size_t i = 0; i < piece.count; i++)
                    values[piece.at - own.first + i] = mark(piece.tensor->id, piece.global + i);
            assert_true(safetensors_write(&writer, values, own.count, &error));
            free(values);
        }
        m.files[r].bytes = (uint64_t)writer.file.written;
        m.files[r].checksum = checksum_value(&writer.file.checksum);
        assert_true(safetensors_finish(&writer, &error));
        free(path);
        layout_free(&layout);
    }
    assert_true(manifest_write(&m, scratch(""), "{}", &error));
    free(m.files);
}

// What a manifest says of its ranks takes memory only for those whose files are read.
static void test_layouts_when_needed(void **state) {
    (void)state;
    const ModelShape shape = {1000, 1024, 65536, 1, 2};
    Manifest m;
    memset(&m, 0, sizeof m);
    m.shape = shape;
    m.grid.tensor = m.n_files = 1024;
    m.grid.data = m.grid.pipeline = m.shard_group = m.pipeline_chunks = 1;
    CheckpointFiles files;
    checkpoint_files_open(&files, scratch("none"), &m);
    for (int t = 0; t < 1024; t++) assert_null(files.layouts[t].units);
    Layout whole;
    const LayoutCut cut = layout_whole(1);
    layout_init(&whole, &shape, &cut);
    const Unit *wte = &whole.units[0];
    const Held held = {0, 1, 0};
    float out = 0;
    Error error = {""};
    assert_false(checkpoint_read(&files, wte, held, STATE_PARAMS, &out, &error));
    assert_error(&error, "rank_00000.safetensors");
    assert_non_null(files.layouts[0].units);
    for (int t = 1; t < 1024; t++) assert_null(files.layouts[t].units);
    layout_free(&whole);
    checkpoint_files_close(&files);
}

// Any piece of any tensor out of a checkpoint of any grid, whatever was read before, and however little is kept.
static void test_checkpoints(void **state) {
    (void)state;
    const ModelShape shape = {4, 4, 20, 7, 261};
    static const Grid grids[] = {{1, 1, 1}, {1, 4, 1}, {2, 2, 1}, {4, 1, 2}, {2, 3, 2}};
    static const int groups[] = {1, 2, 2, 1, 3}, chunks[] = {1, 1, 1, 2, 1};
    uint32_t draw = 1;
    for (int g = 0; g < 5; g++) {
        write_checkpoint(&shape, grids[g], groups[g], chunks[g]);
        Weights weights;
        Error error = {""};
        must_open(&weights, scratch(""));
        assert_true(weights_compare(&weights, &shape, &error));
        assert_true(weights_verify(&weights, 0, 1, &error));
        for (int id = 0; id < weights_tensors(&shape); id++) {
            float *values = read_tensor(&weights, id);
            for (size_t i = 0; i < weights_elements(weights_tensor(&weights.layout, id)); i++)
                assert_true(values[i] == mark(id, i));
            free(values);
        }
        for (int round = 0; round < 2000; round++) {
            draw = draw * 1664525u + 1013904223u;
            ((CheckpointWeights *)weights.state)->window_limit = 1 + (draw >> 25);
            draw = draw * 1664525u + 1013904223u;
            const int id = (int)((draw >> 16) % (uint32_t)weights_tensors(&shape));
            const size_t elements = weights_elements(weights_tensor(&weights.layout, id));
            draw = draw * 1664525u + 1013904223u;
            const size_t first = (draw >> 8) % elements;
            draw = draw * 1664525u + 1013904223u;
            const size_t left = elements - first, count = (draw >> 8) % ((left < 300 ? left : 300) + 1);
            float got[301];
            memset(got, 0xff, sizeof got);
            if (!weights_read(&weights, id, first, count, got, &error)) fail_msg("%s", error.text);
            for (size_t i = 0; i < count; i++) assert_true(got[i] == mark(id, first + i));
            assert_true(got[count] != got[count]);
        }
        weights_close(&weights);
    }
    unlink(scratch("manifest.json"));
}

// Every rank of a grid fills its shards by global index alone; put together they are the model.
static void test_ranks_of_a_grid(void **state) {
    (void)state;
    enum { S = 2, D = 3 };
    Weights weights, reference;
    Error error = {""};
    must_open(&weights, GOLDEN "sharded");
    must_open(&reference, GOLDEN "fp32.bin");
    const int n = weights_tensors(&weights.shape);
    float **seen = calloc((size_t)n, sizeof(float *));
    for (int id = 0; id < n; id++)
        seen[id] = calloc(weights_elements(weights_tensor(&reference.layout, id)), sizeof(float));
    for (int s = 0; s < S; s++) {
        Layout layout;
        const LayoutCut cut = {D, S, s, 1, 1, 0};
        layout_init(&layout, &GOLDEN_SHAPE, &cut);
        for (int d = 0; d < D; d++)
            for (int u = 0; u < layout.n_units; u++) {
                const Unit *unit = &layout.units[u];
                PieceCursor cursor = {0, 0};
                Piece piece;
                while (unit_next_piece(unit, unit->size / D * (size_t)d, unit->size / D * (size_t)(d + 1), &cursor,
                                       &piece))
                    assert_true(weights_read(&weights, piece.tensor->id, piece.global, piece.count,
                                             seen[piece.tensor->id] + piece.global, &error));
            }
        layout_free(&layout);
    }
    for (int id = 0; id < n; id++) {
        float *expected = read_tensor(&reference, id);
        assert_memory_equal(seen[id], expected,
                            weights_elements(weights_tensor(&reference.layout, id)) * sizeof(float));
        free(expected);
        free(seen[id]);
    }
    free(seen);
    weights_close(&weights);
    weights_close(&reference);
}

// ---------------------------------------------------------------------------------------------------------------------

static void export_to(const char *from, const char *llmc, const char *huggingface, FloatType type) {
    Weights weights;
    Error error = {""};
    must_open(&weights, from);
    bool ok = true;
    if (llmc != NULL) ok = llmc_export(llmc, &weights.shape, type, weights_deliver, &weights, &error);
    if (huggingface != NULL)
        ok = huggingface_export(huggingface, &weights.shape, type, weights_deliver, &weights, &error) && ok;
    if (!ok) fail_msg("%s", error.text);
    weights_close(&weights);
}

static void test_round_trips(void **state) {
    (void)state;
    // The same bytes as transformers writes, and the same as llm.c's form of them, from either.
    export_to(GOLDEN "fp32.bin", scratch("again.bin"), scratch("hf"), FLOAT_F32);
    assert_same_files(scratch("again.bin"), GOLDEN "fp32.bin");
    assert_same_files(scratch("hf/model.safetensors"), GOLDEN "fp32/model.safetensors");
    export_to(GOLDEN "buffers", scratch("again.bin"), scratch("hf"), FLOAT_F32); // over what is there
    assert_same_files(scratch("again.bin"), GOLDEN "fp32.bin");
    assert_same_files(scratch("hf/model.safetensors"), GOLDEN "fp32/model.safetensors");
    export_to(scratch("hf"), scratch("again.bin"), NULL, FLOAT_F32); // config.json too can be read
    assert_same_files(scratch("again.bin"), GOLDEN "fp32.bin");
    export_to(GOLDEN "bf16.bin", scratch("again16.bin"), scratch("hf16"), FLOAT_BF16);
    assert_same_files(scratch("again16.bin"), GOLDEN "bf16.bin");
    export_to(scratch("hf16"), scratch("again16.bin"), NULL, FLOAT_BF16);
    assert_same_files(scratch("again16.bin"), GOLDEN "bf16.bin");
    // Rounding to bf16 on the way out is PyTorch's.
    export_to(GOLDEN "fp32", scratch("rounded.bin"), NULL, FLOAT_BF16);
    assert_same_files(scratch("rounded.bin"), GOLDEN "bf16.bin");
    assert_int_equal(access(scratch("hf/model.safetensors.tmp"), F_OK), -1);
    assert_int_equal(access(scratch("again.bin.tmp"), F_OK), -1);
    // To fp16 too.
    export_to(GOLDEN "fp32", NULL, scratch("half"), FLOAT_F16);
    assert_same_weights(scratch("half"), GOLDEN "fp16", 0);
}

// Every fp16 and back; every value half way between two goes to the even one, and a little off it to the nearer.
static void test_fp16(void **state) {
    (void)state;
    for (uint32_t half = 0; half < 65536; half++) {
        const bool is_nan = (half & 0x7fff) > 0x7c00;
        const float value = float_from_f16((uint16_t)half);
        assert_int_equal(float_to_f16(value), half);
        if (is_nan || (half & 0x7fff) >= 0x7bff) continue; // the next one is infinity
        const float next = float_from_f16((uint16_t)(half + 1)), middle = 0.5f * (value + next);
        assert_int_equal(float_to_f16(middle), half + (half & 1));
        assert_int_equal(float_to_f16(nextafterf(middle, value)), half);
        assert_int_equal(float_to_f16(nextafterf(middle, next)), half + 1);
    }
    assert_int_equal(float_to_f16(65519.99f), 0x7bff);
    assert_int_equal(float_to_f16(65520), 0x7c00);
    assert_int_equal(float_to_f16(-1e30f), 0xfc00);
    assert_int_equal(float_to_f16(1e-30f), 0);
}

static void expect_kept(bool ok, Error *error, const char *part) {
    assert_false(ok);
    assert_error(error, part);
    error->text[0] = '\0';
}

// What an export may replace: nothing, an empty directory, an export, what an interrupted one has left.
static void test_what_is_replaced(void **state) {
    (void)state;
    Error error = {""};
    assert_true(huggingface_may_replace(scratch("new"), &error));
    mkdir(scratch("new"), 0755);
    assert_true(huggingface_may_replace(scratch("new"), &error));
    scratch_write("new/model.safetensors.tmp", "x", 1);
    assert_true(huggingface_may_replace(scratch("new"), &error));
    scratch_write("new/config.json.tmp", "x", 1);
    scratch_write("new/model.safetensors", "x", 1); // interrupted between the names of the two
    assert_true(huggingface_may_replace(scratch("new"), &error));
    scratch_write("new/config.json", "{\"model_type\": \"gpt2\"}", 22);
    assert_true(huggingface_may_replace(scratch("new"), &error));
    scratch_write("new/notes.txt", "x", 1); // beside a model
    assert_true(huggingface_may_replace(scratch("new"), &error));
    scratch_write("new/config.json", "{\"model_type\": \"llama\"}", 23);
    expect_kept(huggingface_may_replace(scratch("new"), &error), &error, "new: holds notes.txt and no export");
    mkdir(scratch("alone"), 0755);
    scratch_write("alone/config.json", "{}", 2); // a run's configuration, say
    expect_kept(huggingface_may_replace(scratch("alone"), &error), &error, "alone: holds config.json and no export");
    expect_kept(huggingface_may_replace(scratch("new/notes.txt"), &error), &error, "cannot be exported to");
    assert_true(llmc_may_replace(scratch("model.bin"), GOLDEN "bf16.bin", &error));
    assert_true(llmc_may_replace(GOLDEN "bf16.bin", GOLDEN "bf16.bin", &error));
    expect_kept(llmc_may_replace(scratch("new/notes.txt"), GOLDEN "bf16.bin", &error), &error,
                "notes.txt: is there and no llm.c model");
    expect_kept(llmc_may_replace(scratch("new"), GOLDEN "bf16.bin", &error), &error,
                "new: is there and no llm.c model");
}

// A value for every element of every tensor; exact in bf16.
static bool invent(void *context, int id, size_t first, size_t count, float *out, Error *error) {
    (void)error;
    size_t *asked = context;
    if (count > *asked) *asked = count;
    for (size_t i = 0; i < count; i++)
        out[i] = (float)(((uint32_t)(first + i) * 2654435761u + (uint32_t)id * 97) >> 24) + 1;
    return true;
}

// GPT-2's vocabulary: 50257 rows out and 50257 rows in; tensors of several chunks.
static void test_gpt2_vocabulary(void **state) {
    (void)state;
    const ModelShape shape = {1, 3, 24, 5, 50257};
    const size_t C = 24;
    Error error = {""};
    size_t asked = 0;
    assert_true(llmc_export(scratch("gpt2.bin"), &shape, FLOAT_BF16, invent, &asked, &error));
    assert_true(huggingface_export(scratch("gpt2"), &shape, FLOAT_F32, invent, &asked, &error));
    assert_int_equal(asked, WEIGHTS_CHUNK); // and no more at a time
    const char *const paths[] = {scratch("gpt2.bin"), scratch("gpt2")};
    for (int p = 0; p < 2; p++) {
        Weights weights;
        must_open(&weights, paths[p]);
        assert_true(weights_compare(&weights, &shape, &error));
        for (int id = 0; id < weights_tensors(&shape); id++) {
            const size_t elements = weights_elements(weights_tensor(&weights.layout, id));
            if (id == 0) assert_int_equal(elements, 50257 * C);
            float *got = read_tensor(&weights, id), *expected = malloc(elements * sizeof(float));
            invent(&asked, id, 0, elements, expected, &error);
            assert_memory_equal(got, expected, elements * sizeof(float));
            free(got);
            free(expected);
        }
        weights_close(&weights);
    }
    // In between: rows 50257 to 50304 of llm.c's file, zeros.
    size_t size;
    char *bytes = read_whole(paths[0], &size);
    const uint16_t *rows = (const uint16_t *)(const void *)(bytes + LLMC_HEADER_BYTES);
    assert_int_equal(((const int32_t *)(const void *)bytes)[7], 50304);
    assert_int_not_equal(rows[50257 * C - 1], 0);
    for (size_t i = 50257 * C; i < 50304 * C; i++) assert_int_equal(rows[i], 0);
    assert_int_not_equal(rows[50304 * C], 0);
    free(bytes);
    // Rows of padding that hold something are nobody's tokens.
    bytes = read_whole(paths[0], &size);
    memset(bytes + LLMC_HEADER_BYTES + 50257 * C * 2, 0x7f, 47 * C * 2);
    scratch_write("dirty.bin", bytes, size);
    free(bytes);
    export_to(scratch("dirty.bin"), scratch("clean.bin"), NULL, FLOAT_BF16);
    assert_same_files(scratch("clean.bin"), paths[0]);
}

static bool fails_at_the_end(void *context, int id, size_t first, size_t count, float *out, Error *error) {
    (void)first;
    for (size_t i = 0; i < count; i++) out[i] = 0;
    if (id != *(int *)context) return true;
    return error_set(error, "tensor %d cannot be had", id);
}

// An export that fails leaves what was there.
static void test_failing_exports(void **state) {
    (void)state;
    Error error = {""};
    export_to(GOLDEN "fp32.bin", scratch("kept.bin"), scratch("kept"), FLOAT_F32);
    for (int id = 0; id < weights_tensors(&GOLDEN_SHAPE); id++) {
        char message[64];
        snprintf(message, sizeof message, "tensor %d cannot be had", id);
        error.text[0] = '\0';
        assert_false(llmc_export(scratch("kept.bin"), &GOLDEN_SHAPE, FLOAT_BF16, fails_at_the_end, &id, &error));
        assert_string_equal(error.text, message);
        error.text[0] = '\0';
        assert_false(huggingface_export(scratch("kept"), &GOLDEN_SHAPE, FLOAT_BF16, fails_at_the_end, &id, &error));
        assert_string_equal(error.text, message);
    }
    assert_same_files(scratch("kept.bin"), GOLDEN "fp32.bin");
    assert_same_files(scratch("kept/model.safetensors"), GOLDEN "fp32/model.safetensors");
    assert_int_equal(access(scratch("kept.bin.tmp"), F_OK), -1);
    assert_int_equal(access(scratch("kept/model.safetensors.tmp"), F_OK), -1);
    size_t asked = 0;
    error.text[0] = '\0';
    assert_false(llmc_export(scratch("no/where.bin"), &GOLDEN_SHAPE, FLOAT_F32, invent, &asked, &error));
    assert_error(&error, "no/where.bin.tmp: cannot be written: No such file");
    error.text[0] = '\0';
    assert_false(huggingface_export(scratch("no/where"), &GOLDEN_SHAPE, FLOAT_F32, invent, &asked, &error));
    assert_error(&error, "no/where: cannot be made: No such file");
    error.text[0] = '\0';
    assert_false(huggingface_export(scratch("kept.bin"), &GOLDEN_SHAPE, FLOAT_F32, invent, &asked, &error));
    assert_error(&error, "kept.bin/model.safetensors.tmp: cannot be written: Not a directory");
}

// ---------------------------------------------------------------------------------------------------------------------

static void expect_error(const char *path, const char *part) {
    Weights weights;
    Error error = {""};
    if (weights_open(&weights, path, &error)) fail_msg("%s was opened, but should say '%s'", path, part);
    assert_error(&error, part);
    assert_error(&error, path);
    assert_null(weights.path);
    assert_null(weights.layout.units);
}

static void test_unknown_kinds(void **state) {
    (void)state;
    expect_error(scratch("missing"), "cannot be read: No such file");
    mkdir(scratch("folder"), 0755);
    expect_error(scratch("folder"),
                 "holds no weights of a known kind; known are: a checkpoint (its directory step_00000100, or a log "
                 "directory), a Hugging Face directory (config.json and model.safetensors), an llm.c model file");
}

static void test_compare(void **state) {
    (void)state;
    Weights weights;
    Error error = {""};
    must_open(&weights, GOLDEN "fp32");
    assert_true(weights_compare(&weights, &GOLDEN_SHAPE, &error));
    const ModelShape other = {3, 4, 8, 9, 50257};
    assert_false(weights_compare(&weights, &other, &error));
    assert_error(&error,
                 "fp32: has n_layer 2, but 3 is configured; n_head 2, but 4 is configured; context_length 8, but "
                 "9 is configured; vocab_size 13, but 50257 is configured");
    weights_close(&weights);
}

static void test_malformed_llmc(void **state) {
    (void)state;
    static const struct {
        int place;
        int32_t value;
        const char *part;
    } cases[] = {
        {0, 20240520, "is not an llm.c model: its first number is 20240520, not 20240326"},
        {0, (int32_t)__builtin_bswap32(LLMC_MAGIC), "in the other byte order"},
        {1, 1, "of version 1; versions 3 (fp32) and 5 (bf16) are known"},
        {1, -3, "of version -3"},
        {1, 5, "is foreign: its header says"},
        {2, 0, "its context_length is 0, 1 to 1048576 are possible"},
        {2, 9, "is truncated: its header says"},
        {2, 7, "is foreign: its header says"},
        {3, -13, "its vocab_size is -13"},
        {3, 129, "its padded vocabulary is 128, smaller than its vocabulary of 129"},
        {3, 0x7fffffff, "its vocab_size is 2147483647"},
        {4, 1001, "its n_layer is 1001, 1 to 1000 are possible"},
        {4, 1000, "is truncated"},
        {5, 0, "its n_head is 0"},
        {5, 3, "its n_head 3 does not divide its n_embd 8"},
        {6, 65544, "its n_embd is 65544"},
        {6, 65536, "is truncated"},
        {7, -1, "its padded vocabulary is -1"},
        {7, 129, "is truncated"},
        {7, 0x7fffffff, "is truncated"},
        {7, 127, "is foreign"},
    };
    size_t size;
    char *good = read_whole(GOLDEN "fp32.bin", &size);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *bytes = malloc(size);
        memcpy(bytes, good, size);
        memcpy(bytes + 4 * cases[i].place, &cases[i].value, 4);
        scratch_write("bad.bin", bytes, size);
        expect_error(scratch("bad.bin"), cases[i].part);
        free(bytes);
    }
    scratch_write("bad.bin", good, size - 1);
    expect_error(scratch("bad.bin"), "is truncated: its header says 2848 parameters, so 12416 bytes, but it has 12415");
    scratch_write("bad.bin", good, 1023);
    expect_error(scratch("bad.bin"), "is truncated: it has 1023 bytes, the header of an llm.c model alone has 1024");
    scratch_write("bad.bin", "", 0);
    expect_error(scratch("bad.bin"), "is truncated: it has 0 bytes");
    // Cut while it is open.
    scratch_write("bad.bin", good, size);
    Weights weights;
    must_open(&weights, scratch("bad.bin"));
    assert_int_equal(truncate(scratch("bad.bin"), 2000), 0);
    float values[8];
    Error error = {""};
    assert_false(weights_read(&weights, weights_tensors(&weights.shape) - 1, 0, 8, values, &error));
    assert_error(&error, "bad.bin: ends at byte 12384, but had 12416 bytes");
    weights_close(&weights);
    free(good);
}

// A text with the first `from` in it replaced; to be freed.
static char *replace(const char *text, size_t size, const char *from, const char *to, size_t *new_size) {
    const char *at = memmem(text, size, from, strlen(from));
    if (at == NULL) fail_msg("nothing to replace: %s", from);
    const size_t before = (size_t)(at - text), after = size - before - strlen(from);
    char *result = malloc(size + strlen(to) + 1);
    memcpy(result, text, before);
    memcpy(result + before, to, strlen(to));
    memcpy(result + before + strlen(to), at + strlen(from), after);
    *new_size = before + strlen(to) + after;
    return result;
}

// Puts a Hugging Face directory into bad/, with one replacement in one of its files.
static void make_bad(const char *model, const char *changed, const char *from, const char *to) {
    static const char *const files[] = {"config.json",
                                        "model.safetensors",
                                        "model.safetensors.index.json",
                                        "model-00001-of-00003.safetensors",
                                        "model-00002-of-00003.safetensors",
                                        "model-00003-of-00003.safetensors"};
    mkdir(scratch("bad"), 0755);
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char source[600], target[100];
        snprintf(source, sizeof source, "%s%s/%s", GOLDEN, model, files[i]);
        snprintf(target, sizeof target, "bad/%s", files[i]);
        unlink(scratch(target));
        if (access(source, F_OK) != 0) continue;
        size_t size;
        char *bytes = read_whole(source, &size);
        if (strcmp(files[i], changed) == 0) {
            char *other = replace(bytes, size, from, to, &size);
            free(bytes);
            bytes = other;
        }
        scratch_write(target, bytes, size);
        free(bytes);
    }
}

static void test_malformed_huggingface(void **state) {
    (void)state;
    static const struct {
        const char *model, *file, *from, *to, *part;
    } cases[] = {
        {"fp32", "config.json", "{", "", "config.json: line"},
        {"fp32", "config.json", "\"n_layer\": 2", "\"n_layers\": 2", "config.json: n_layer is missing"},
        {"fp32", "config.json", "\"n_layer\": 2", "\"n_layer\": \"2\"", "config.json: n_layer is not a whole number"},
        {"fp32", "config.json", "\"n_layer\": 2", "\"n_layer\": 2.5", "config.json: n_layer is not a whole number"},
        {"fp32", "config.json", "\"n_layer\": 2", "\"n_layer\": -2", "config.json: n_layer is not a whole number"},
        {"fp32", "config.json", "\"n_layer\": 2", "\"n_layer\": 0", "its n_layer is 0, 1 to 1000 are possible"},
        {"fp32", "config.json", "\"n_layer\": 2", "\"n_layer\": 2, \"n_layer\": 2", "has \"n_layer\" twice"},
        {"fp32", "config.json", "\"n_layer\": 2", "\"n_layer\": 3",
         "holds 28 tensors, but a GPT-2 of n_layer 3 has 40"},
        {"fp32", "config.json", "\"n_layer\": 2", "\"n_layer\": 1", "which a GPT-2 of n_layer 1 does not have"},
        {"fp32", "config.json", "\"n_head\": 2", "\"n_head\": 3", "its n_head 3 does not divide its n_embd 8"},
        {"fp32", "config.json", "\"n_embd\": 8", "\"n_embd\": 16",
         "tensor transformer.wte.weight has shape [13, 8], config.json makes it [13, 16]"},
        {"fp32", "config.json", "\"vocab_size\": 13", "\"vocab_size\": 14",
         "tensor transformer.wte.weight has shape [13, 8], config.json makes it [14, 8]"},
        {"fp32", "config.json", "\"n_positions\": 8", "\"n_positions\": 9",
         "tensor transformer.wpe.weight has shape [8, 8], config.json makes it [9, 8]"},
        {"fp32", "config.json", "\"gpt2\"", "\"llama\"", "config.json: model_type is not gpt2, so this is not a GPT-2"},
        {"fp32", "config.json", "\"gelu_new\"", "\"relu\"",
         "activation_function is not gelu_new|gelu_pytorch_tanh, so this is not a GPT-2"},
        {"fp32", "config.json", "\"n_inner\": null", "\"n_inner\": 33", "n_inner is not 32, so"},
        {"fp32", "config.json", "1e-05", "1e-06", "layer_norm_epsilon is not 1e-05, so"},
        {"fp32", "config.json", "\"scale_attn_weights\": true", "\"scale_attn_weights\": false",
         "scale_attn_weights is not true, so"},
        {"fp32", "config.json", "idx\": false", "idx\": true", "scale_attn_by_inverse_layer_idx is not false, so"},
        {"fp32", "config.json", "\"use_cache\": true", "\"tie_word_embeddings\": false",
         "tie_word_embeddings is not true, so"},
        {"fp32", "config.json", "\"use_cache\": true", "\"add_cross_attention\": true",
         "add_cross_attention is not false, so"},
        {"fp32", "model.safetensors", "h.1.ln_2.bias", "h.2.ln_2.bias", "tensor transformer.h.1.ln_2.bias is missing"},
        {"fp32", "model.safetensors", "[8,24]", "[24,8]",
         "tensor transformer.h.0.attn.c_attn.weight has shape [24, 8], config.json makes it [8, 24]"},
        {"fp32", "model.safetensors", "{\"dtype\":\"F32\"", "{\"dtype\":\"I32\"",
         "tensor transformer.h.0.attn.c_attn.bias is of type I32; F32, F16 and BF16 can be read"},
        {"buffers", "model.safetensors", "lm_head.weight", "lm_tail.weight",
         "has tensor lm_tail.weight, which a GPT-2 of n_layer 2 does not have"},
        {"buffers", "model.safetensors", "h.0.attn.bias", "h.0.attn.beas", "has tensor h.0.attn.beas, which a GPT-2"},
        {"buffers", "model.safetensors", "\"wte.weight", "\"xte.weight", "tensor wte.weight is missing"},
        {"sharded", "model.safetensors.index.json", "\"model-00001", "\"sub/model-00001",
         "\"sub/model-00001-of-00003.safetensors\" is not the name of a file in this directory"},
        {"sharded", "model.safetensors.index.json", "\"weight_map\"", "\"weight_mop\"", "has no weight_map"},
        {"sharded", "model.safetensors.index.json", "\"model-00001", "\"../bad/model-00001",
         "is not the name of a file in this directory"},
        {"sharded", "model.safetensors.index.json", "\"model-00001-of-00003.safetensors\"", "3",
         "\"\" is not the name of a file in this directory"},
        {"sharded", "model.safetensors.index.json", "00001-of", "00007-of",
         "model-00007-of-00003.safetensors: cannot be read: No such file"},
        {"sharded", "model.safetensors.index.json", "\"model-00001-of-00003.safetensors\"", "\".\"",
         "is not the name of a file"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        make_bad(cases[i].model, cases[i].file, cases[i].from, cases[i].to);
        expect_error(scratch("bad"), cases[i].part);
    }
    // One tensor in two files.
    make_bad("sharded", "", "", "");
    const char *first = scratch("bad/model-00001-of-00003.safetensors");
    const char *second = scratch("bad/model-00002-of-00003.safetensors");
    unlink(second);
    assert_int_equal(link(first, second), 0);
    expect_error(scratch("bad"), "has tensor transformer.wte.weight, which ");
    // A head of its own: one bit of one element.
    make_bad("buffers", "", "", "");
    Weights weights;
    must_open(&weights, scratch("bad"));
    Huggingface *hf = weights.state;
    const SafetensorsTensor *head = safetensors_find(&hf->files[0], "lm_head.weight");
    assert_non_null(head);
    const off_t place = (off_t)(head->first + head->bytes - 4);
    weights_close(&weights);
    FILE *file = fopen(scratch("bad/model.safetensors"), "r+b");
    fseek(file, place, SEEK_SET);
    const int byte = fgetc(file);
    fseek(file, place, SEEK_SET);
    fputc(byte ^ 1, file);
    fclose(file);
    expect_error(scratch("bad"), "lm_head.weight differs from wte.weight; only a tied head is supported");
    // No weights, no config.json that can be read.
    make_bad("fp32", "", "", "");
    unlink(scratch("bad/model.safetensors"));
    expect_error(scratch("bad"), "bad/model.safetensors: cannot be read: No such file");
    unlink(scratch("bad/config.json"));
    mkdir(scratch("bad/config.json"), 0755);
    expect_error(scratch("bad"), "config.json: is a directory");
    rmdir(scratch("bad/config.json"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_models_of_transformers),
        cmocka_unit_test(test_any_piece),
        cmocka_unit_test(test_checkpoints),
        cmocka_unit_test(test_layouts_when_needed),
        cmocka_unit_test(test_ranks_of_a_grid),
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_fp16),
        cmocka_unit_test(test_what_is_replaced),
        cmocka_unit_test(test_gpt2_vocabulary),
        cmocka_unit_test(test_failing_exports),
        cmocka_unit_test(test_unknown_kinds),
        cmocka_unit_test(test_compare),
        cmocka_unit_test(test_malformed_llmc),
        cmocka_unit_test(test_malformed_huggingface),
    };
    return cmocka_run_group_tests_name("weights", tests, scratch_make, scratch_remove);
}
