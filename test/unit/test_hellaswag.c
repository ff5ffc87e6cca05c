// Tests of hellaswag.h: rows and targets of an example, the answer, and every error of a file.
#include "scratch.h"
#include "hellaswag.h"

enum { T = 8, VOCAB = 100, EXAMPLES = 3 };

// Three examples: numbers of header and stream. Example 1 fills rows of 8 to their end.
static const int32_t GOOD_HEADER[4] = {HELLASWAG_MAGIC, 1, EXAMPLES, 46};
static const uint16_t GOOD[] = {65535, 32, 0,  2, 4,  2,  11, 12, 1,  21, 1, 22, 1,  23, 1,  24, // 0: 16 numbers
                                65535, 46, 1,  0, 4,  4,  31, 32, 33, 34, 5, 41, 42, 43, 44, 45, 1,
                                51,    1,  61, 2, 71, 72,                                            // 1: 23
                                65535, 34, 2,  3, 4,  1,  99, 2,  1,  2,  1, 0,  2,  5,  6,  1,  7}; // 2: 17
enum { NUMBERS = 16 + 23 + 17 };

static void write_file(const int32_t *header, const uint16_t *numbers, size_t bytes) {
    char *file = calloc(1, HELLASWAG_HEADER_BYTES + bytes);
    memcpy(file, header, 4 * sizeof header[0]);
    memcpy(file + HELLASWAG_HEADER_BYTES, numbers, bytes);
    scratch_write("h.bin", file, HELLASWAG_HEADER_BYTES + bytes);
    free(file);
}

static void expect_error(int T_, int vocab, const char *part) {
    Hellaswag h;
    Error error = {""};
    if (hellaswag_open(&h, scratch("h.bin"), T_, vocab, &error))
        fail_msg("the file was opened, but should say '%s'", part);
    assert_error(&error, "h.bin: ");
    assert_error(&error, part);
    assert_null(h.places);
    assert_int_equal(h.file.fd, -1);
}

static void test_rows(void **state) {
    (void)state;
    uint16_t numbers[NUMBERS];
    memcpy(numbers, GOOD, sizeof GOOD);
    write_file(GOOD_HEADER, numbers, sizeof numbers);
    Hellaswag h;
    Error error = {""};
    if (!hellaswag_open(&h, scratch("h.bin"), T, VOCAB, &error)) fail_msg("%s", error.text);
    assert_int_equal(h.count, EXAMPLES);
    int inputs[4 * T + 1], targets[4 * T + 1], label = -1;
    static const int order[] = {2, 0, 1, 1};
    for (int i = 0; i < 4; i++) {
        memset(inputs, 0x7f, sizeof inputs);
        memset(targets, 0x7f, sizeof targets);
        if (!hellaswag_read(&h, order[i], inputs, targets, &label, &error)) fail_msg("%s", error.text);
        assert_int_equal(inputs[4 * T], 0x7f7f7f7f);
        assert_int_equal(targets[4 * T], 0x7f7f7f7f);
        static const int labels[] = {2, 0, 3};
        assert_int_equal(label, labels[order[i]]);
        if (order[i] == 0) {
            for (int c = 0; c < 4; c++) {
                const int in[T] = {11, 12}, out[T] = {-1, 21 + c, -1, -1, -1, -1, -1, -1};
                assert_memory_equal(inputs + c * T, in, sizeof in);
                assert_memory_equal(targets + c * T, out, sizeof out);
            }
        } else if (order[i] == 1) {
            const int in[4][T] = {
                {31, 32, 33, 34, 41, 42, 43, 44}, {31, 32, 33, 34}, {31, 32, 33, 34}, {31, 32, 33, 34, 71}};
            const int out[4][T] = {{-1, -1, -1, 41, 42, 43, 44, 45},
                                   {-1, -1, -1, 51, -1, -1, -1, -1},
                                   {-1, -1, -1, 61, -1, -1, -1, -1},
                                   {-1, -1, -1, 71, 72, -1, -1, -1}};
            assert_memory_equal(inputs, in, sizeof in);
            assert_memory_equal(targets, out, sizeof out);
        } else {
            const int in[4][T] = {{99, 1}, {99}, {99, 5}, {99}};
            const int out[4][T] = {{1, 2, -1, -1, -1, -1, -1, -1},
                                   {0, -1, -1, -1, -1, -1, -1, -1},
                                   {5, 6, -1, -1, -1, -1, -1, -1},
                                   {7, -1, -1, -1, -1, -1, -1, -1}};
            assert_memory_equal(inputs, in, sizeof in);
            assert_memory_equal(targets, out, sizeof out);
        }
    }
    // Changed, then cut, while it is open.
    FILE *file = fopen(scratch("h.bin"), "r+b");
    numbers[16 + 1] = 44;
    numbers[16 + 20] = 1; // shorter, and whole in itself
    fseek(file, HELLASWAG_HEADER_BYTES, SEEK_SET);
    fwrite(numbers, 1, sizeof numbers, file);
    fclose(file);
    assert_false(hellaswag_read(&h, 1, inputs, targets, &label, &error));
    assert_error(&error, "h.bin: example 1 is not what it was when the file was opened");
    error.text[0] = '\0';
    assert_int_equal(truncate(scratch("h.bin"), HELLASWAG_HEADER_BYTES + 40), 0);
    assert_false(hellaswag_read(&h, 2, inputs, targets, &label, &error));
    assert_error(&error, "h.bin: ends at byte");
    hellaswag_close(&h);
}

static void test_answer(void **state) {
    (void)state;
    const int length = 3, targets[12] = {-1, 5, -1, -1, 5, 6, -1, 5, 6, 7, 8, 9};
    float losses[12];
    // Means 3, 2, 2.5, 4; the places that are not counted would win.
    const float first[12] = {-100, 3, -100, -100, 1, 3, -100, 2, 3, 4, 4, 4};
    memcpy(losses, first, sizeof losses);
    assert_int_equal(hellaswag_answer(losses, targets, length), 1);
    losses[1] = 2; // equal: the first
    assert_int_equal(hellaswag_answer(losses, targets, length), 0);
    losses[9] = 1; // 3: the sum counts for nothing, the mean does
    assert_int_equal(hellaswag_answer(losses, targets, length), 0);
    losses[10] = 0, losses[11] = 1; // 2/3
    assert_int_equal(hellaswag_answer(losses, targets, length), 3);
    losses[11] = NAN;
    assert_int_equal(hellaswag_answer(losses, targets, length), 0);
    losses[1] = NAN;
    assert_int_equal(hellaswag_answer(losses, targets, length), 1);
    losses[4] = losses[8] = NAN;
    assert_int_equal(hellaswag_answer(losses, targets, length), -1);
    losses[1] = INFINITY;
    assert_int_equal(hellaswag_answer(losses, targets, length), 0);
}

static void test_malformed(void **state) {
    (void)state;
    static const struct {
        int place, value; // place below 0: number -place - 1 of the header
        const char *part;
    } cases[] = {
        {-1, 20240520, "is not a file of HellaSwag examples: its first number is 20240520, not 20240522"},
        {-2, 2, "is of version 2; version 1 is known"},
        {-3, 0, "its header says 0 examples, 1 to 3 are possible in its 1136 bytes"},
        {-3, -1, "its header says -1 examples"},
        {-3, 4, "its header says 4 examples"},
        {-3, 2, "is foreign: 34 bytes follow its last example"},
        {-4, 45, "example 1 has 46 bytes, an even number from 30 to 44 is needed"},
        {-4, 29, "its header says that an example has up to 29 bytes, 30 to 1136 are possible"},
        {-4, -1, "up to -1 bytes"},
        {-4, 1137, "up to 1137 bytes"},
        {0, 65534, "example 0 does not begin at byte 1024"},
        {2, 1, "example 0 does not begin at byte 1024"},
        {18, 0, "example 1 does not begin at byte 1056"},
        {1, 0, "example 0 has 0 bytes, an even number from 30 to 46 is needed"},
        {1, 28, "example 0 has 28 bytes"},
        {1, 33, "example 0 has 33 bytes"},
        {1, 65534, "example 0 has 65534 bytes"},
        {1, 30, "completion 3 of example 0 has 1 tokens, which its 30 bytes do not hold"},
        {1, 34, "example 0 has 2 bytes after its completions"},
        {3, 4, "example 0 has answer 4 of 4, an answer below 4 of 4 is needed"},
        {4, 3, "example 0 has answer 2 of 3"},
        {5, 0, "example 0 has a context of 0 tokens in 32 bytes"},
        {5, 11, "example 0 has a context of 11 tokens in 32 bytes"},
        {5, 65535, "example 0 has a context of 65535 tokens"},
        {5, 10, "completion 0 of example 0 has 0 tokens, which its 32 bytes do not hold"},
        {8, 0, "completion 0 of example 0 has 0 tokens"},
        {8, 8, "completion 0 of example 0 has 8 tokens, which its 32 bytes do not hold"},
        {14, 2, "completion 3 of example 0 has 2 tokens"},
        {14, 65535, "completion 3 of example 0 has 65535 tokens"},
        {6, 100, "example 0 has token 100, but the vocabulary has 100: ids 0 to 99"},
        {15, 100, "example 0 has token 100"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t header[4];
        uint16_t numbers[NUMBERS];
        memcpy(header, GOOD_HEADER, sizeof header);
        memcpy(numbers, GOOD, sizeof GOOD);
        if (cases[i].place < 0)
            header[-cases[i].place - 1] = cases[i].value;
        else
            numbers[cases[i].place] = (uint16_t)cases[i].value;
        write_file(header, numbers, sizeof numbers);
        expect_error(T, VOCAB, cases[i].part);
    }
    uint16_t numbers[NUMBERS + 1];
    memcpy(numbers, GOOD, sizeof GOOD);
    numbers[NUMBERS] = 0;
    write_file(GOOD_HEADER, numbers, sizeof numbers);
    expect_error(T, VOCAB, "is foreign: 2 bytes follow its last example");
    write_file(GOOD_HEADER, numbers, NUMBERS * 2 - 1);
    expect_error(T, VOCAB, "example 2 has 34 bytes, an even number from 30 to 33 is needed");
    write_file(GOOD_HEADER, numbers, NUMBERS * 2 - 6);
    expect_error(T, VOCAB, "is truncated: its header says 3 examples, but it ends in example 2");
    write_file(GOOD_HEADER, numbers, NUMBERS * 2);
    expect_error(T - 1, VOCAB, "example 1 has 9 tokens, the sequence length 7 allows 8");
    expect_error(T, 99, "example 2 has token 99");
    scratch_write("h.bin", GOOD_HEADER, sizeof GOOD_HEADER);
    expect_error(T, VOCAB, "is truncated: it has 16 bytes");
    numbers[6] = 65535; // no token, however large the vocabulary
    write_file(GOOD_HEADER, numbers, NUMBERS * 2);
    expect_error(T, 70000, "example 0 has token 65535");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_answer),
        cmocka_unit_test(test_malformed),
    };
    return cmocka_run_group_tests_name("hellaswag", tests, scratch_make, scratch_remove);
}
