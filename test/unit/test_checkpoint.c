// What checkpoints are made of: checksums, manifests, names, and the way of every element from one grid to another.
#define PRECISION_FP32
#include "checkpoint.h"
#include "resume.h"
#include "scratch.h"

// The same whatever the pieces that it is fed in; another for any changed bit, length or order.
static void test_checksum(void **state) {
    (void)state;
    unsigned char bytes[300];
    for (int i = 0; i < 300; i++) bytes[i] = (unsigned char)(i * 7);
    for (size_t length = 0; length <= 300; length += 37) {
        Checksum whole;
        checksum_begin(&whole);
        checksum_add(&whole, bytes, length);
        const uint64_t value = checksum_value(&whole);
        for (size_t piece = 1; piece < 70; piece += 3) {
            Checksum parts;
            checksum_begin(&parts);
            for (size_t at = 0; at < length; at += piece)
                checksum_add(&parts, bytes + at, length - at < piece ? length - at : piece);
            assert_true(checksum_value(&parts) == value && parts.bytes == length);
        }
        for (size_t bit = 0; bit < 8 * length; bit++) {
            Checksum other;
            bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
            checksum_begin(&other);
            checksum_add(&other, bytes, length);
            assert_true(checksum_value(&other) != value);
            bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        }
        checksum_add(&whole, "", 1); // a zero more
        assert_true(checksum_value(&whole) != value);
    }
}

static void test_names(void **state) {
    (void)state;
    uint64_t step = 0;
    assert_true(step_of_name("step_00000100", "", &step) && step == 100);
    assert_true(step_of_name("step_1000000000", "", &step) && step == 1000000000);
    assert_true(step_of_name("step_00000100.new", ".new", &step) && step == 100);
    static const char *const others[] = {"step_100", "step_00000100.new", "step_0000010x", "step_",
                                         "latest",   "step_-0000001"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) assert_false(step_of_name(others[i], "", &step));
}

static Manifest example(ManifestFile files[4]) {
    Manifest m;
    memset(&m, 0, sizeof m);
    const ModelShape shape = {3, 2, 40, 40, 257};
    const Grid grid = {2, 2, 1};
    m.step = 100;
    m.updates = 98;
    m.bad_steps = 2;
    m.log_bytes = 12345;
    m.shape = shape;
    m.grid = grid;
    m.shard_group = 2;
    m.pipeline_chunks = 1;
    m.data.bytes = 9007199254740991ull;
    m.data.hash = 0xfedcba9876543210ull;
    m.seed = 7;
    m.tokens_per_step = 288;
    m.sequence_length = 24;
    m.train_loss = 0.1;
    m.n_files = 4;
    m.files = files;
    for (int r = 0; r < 4; r++) {
        files[r].bytes = (uint64_t)r * 1000;
        files[r].checksum = random_mix((uint64_t)r);
    }
    return m;
}

static void test_manifest(void **state) {
    (void)state;
    ManifestFile files[4];
    Manifest written = example(files), read;
    Error error = {""};
    assert_true(manifest_write(&written, scratch(""), "{\"run\": {\"steps\": 5}}", &error));
    assert_true(manifest_read(&read, scratch(""), &error));
    assert_int_equal(memcmp(read.files, files, sizeof files), 0);
    assert_true(cJSON_IsObject(read.config) && read.train_loss == 0.1 && read.n_files == 4);
    assert_true(read.step == 100 && read.updates == 98 && read.bad_steps == 2 && read.log_bytes == 12345);
    assert_int_equal(memcmp(&read.shape, &written.shape, sizeof read.shape), 0);
    assert_int_equal(memcmp(&read.grid, &written.grid, sizeof read.grid), 0);
    assert_int_equal(memcmp(&read.data, &written.data, sizeof read.data), 0);
    assert_true(read.seed == 7 && read.tokens_per_step == 288 && read.sequence_length == 24);
    manifest_free(&read);

    // Every field is needed, and checked.
    size_t size;
    char *text = read_whole(scratch("manifest.json"), &size);
    ManifestField fields[MANIFEST_FIELDS];
    manifest_fields(&written, fields);
    static const char *const bad[] = {"-1", "0.5", "1e300", "\"1\"", "null", "[]", "9007199254740993000"};
    for (int i = 0; i < MANIFEST_FIELDS; i++) {
        char key[48];
        snprintf(key, sizeof key, "\"%s\":", fields[i].key);
        char *at = strstr(text, key);
        assert_non_null(at);
        at += strlen(key);
        const size_t length = strcspn(at, ",\n");
        for (size_t b = 0; b <= sizeof bad / sizeof bad[0]; b++) {
            char *broken = NULL;
            size_t broken_size = 0;
            FILE *out = open_memstream(&broken, &broken_size);
            if (b < sizeof bad / sizeof bad[0])
                fprintf(out, "%.*s%s%s", (int)(at - text), text, bad[b], at + length);
            else // the key is another
                fprintf(out, "%.*sx%s", (int)(at - text - 2), text, at - 2);
            fclose(out);
            scratch_write("manifest.json", broken, broken_size);
            memset(&error, 0, sizeof error);
            assert_false(manifest_read(&read, scratch(""), &error));
            assert_error(&error, fields[i].key);
            assert_null(read.files);
            free(broken);
        }
    }
    free(text);
}

// Grids, and which part a rank of each holds of a unit, by the functions that training uses.
typedef struct {
    Layout layout;
    Comm comm;
    Zero zero;
} Rank;

static void rank_open(Rank *rank, const ModelShape *shape, Grid grid, int chunks, int group, int number) {
    Memory memory;
    memset(&memory, 0, sizeof memory);
    memset(rank, 0, sizeof *rank);
    memory.planning = true;
    const CommOptions options = {grid, group, chunks > 1, 1, true};
    comm_init(&rank->comm, &memory, number, &options, NULL, NULL);
    const LayoutCut cut = {grid.data,     grid.tensor, rank->comm.tensor.rank,
                           grid.pipeline, chunks,      rank->comm.pipeline_rank};
    layout_init(&rank->layout, shape, &cut);
    rank->zero.comm = &rank->comm;
    rank->zero.layout = &rank->layout;
}

// A number that tells the element, exact in fp32.
static float mark(const Piece *piece, size_t i) {
    return (float)(random_mix((uint64_t)piece->tensor->id * 1000003 + piece->global + i) % 16000000 + 1);
}

// From every grid to every other: what all ranks of the one own fills what any rank of the other holds, once.
static void test_transfer(void **state) {
    (void)state;
    typedef struct {
        Grid grid;
        int chunks, group;
    } Cut;
    static const Cut cuts[] = {{{1, 1, 1}, 1, 1}, {{1, 3, 1}, 1, 3}, {{1, 4, 1}, 1, 2}, {{2, 1, 1}, 1, 1},
                               {{4, 2, 1}, 1, 2}, {{1, 1, 2}, 2, 1}, {{2, 2, 3}, 1, 1}};
    const ModelShape shape = {4, 4, 20, 7, 261};
    const int n = (int)(sizeof cuts / sizeof cuts[0]);
    for (int a = 0; a < n; a++)
        for (int b = 0; b < n; b++) {
            const Cut *from = &cuts[a], *to = &cuts[b];
            const int sources = from->grid.tensor * from->grid.data * from->grid.pipeline;
            const int targets = to->grid.tensor * to->grid.data * to->grid.pipeline;
            Rank *source = (Rank *)table_alloc((size_t)sources, sizeof(Rank));
            for (int r = 0; r < sources; r++) rank_open(&source[r], &shape, from->grid, from->chunks, from->group, r);
            for (int r = 0; r < targets; r++) {
                Rank target;
                rank_open(&target, &shape, to->grid, to->chunks, to->group, r);
                for (int u = 0; u < 2 * target.layout.n_units; u++) {
                    const Unit *unit = &target.layout.units[u / 2];
                    const Held held = zero_held(&target.zero, unit, u % 2 == 1);
                    float *out = (float *)table_alloc(held.count, sizeof(float));
                    size_t found = 0, expected = 0;
                    for (int s = 0; s < sources; s++)
                        for (int v = 0; v < source[s].layout.n_units; v++) {
                            const Unit *other = &source[s].layout.units[v];
                            const Held own = zero_own(&source[s].zero, other, true);
                            if (other->tensors[0].id != unit->tensors[0].id || own.count == 0) continue;
                            float *values = (float *)table_alloc(own.count, sizeof(float));
                            PieceCursor cursor = {0, 0};
                            Piece piece;
                            while (unit_next_piece(other, own.first, own.first + own.count, &cursor, &piece))
                                for (size_t i = 0; i < piece.count; i++)
                                    values[piece.at + i - own.first] = mark(&piece, i);
                            size_t low = SIZE_MAX, high = 0;
                            found += unit_transfer(other, own, unit, held, &low, &high, values, own.first, out);
                            assert_true(high <= own.first + own.count && (high == 0 || low >= own.first));
                            free(values);
                        }
                    PieceCursor cursor = {0, 0};
                    Piece piece;
                    while (unit_next_piece(unit, held.first, held.first + held.count, &cursor, &piece)) {
                        expected += piece.count;
                        for (size_t i = 0; i < piece.count; i++)
                            assert_true(out[piece.at + i - held.first] == mark(&piece, i));
                    }
                    assert_int_equal(found, expected);
                    size_t filled = 0;
                    for (size_t i = 0; i < held.count; i++) filled += out[i] != 0;
                    assert_int_equal(filled, expected); // padding is left alone
                    free(out);
                }
                layout_free(&target.layout);
            }
            for (int r = 0; r < sources; r++) layout_free(&source[r].layout);
            free(source);
        }
}

// A data set is known by what is in it; in a large file by samples from its first byte to its last.
static void test_identity(void **state) {
    (void)state;
    const size_t sizes[] = {1, 1000, 3 << 20, (8 << 20) + 1};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        char *bytes = (char *)malloc(sizes[s]);
        for (size_t i = 0; i < sizes[s]; i++) bytes[i] = (char)random_mix(i);
        const size_t changes[] = {SIZE_MAX, 0, sizes[s] - 1, sizes[s] / 3};
        DatasetIdentity identities[4];
        const bool whole = sizes[s] <= 8 << 20;
        for (int c = 0; c < (whole ? 4 : 3); c++) {
            if (changes[c] < sizes[s]) bytes[changes[c]] ^= 1;
            scratch_write("data.txt", bytes, sizes[s]);
            if (changes[c] < sizes[s]) bytes[changes[c]] ^= 1;
            Dataset data;
            Error error = {""};
            assert_true(dataset_open(&data, scratch("data.txt"), &error));
            assert_true(dataset_identify(&data, &identities[c], &error));
            assert_true(identities[c].bytes == sizes[s]);
            if (c > 0) assert_true(identities[c].hash != identities[0].hash);
            dataset_close(&data);
        }
        free(bytes);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_checksum), cmocka_unit_test(test_names),    cmocka_unit_test(test_manifest),
        cmocka_unit_test(test_transfer), cmocka_unit_test(test_identity),
    };
    return cmocka_run_group_tests_name("checkpoint", tests, scratch_make, scratch_remove);
}
