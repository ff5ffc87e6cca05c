// Tests of safetensors.h, floats.h and files.h: what is refused and with which words, reading, writing, failing writes.
#include "scratch.h"
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include "safetensors.h"

// Writes a file with this header and `data` bytes after it, byte i being i % 256.
static void write_safetensors(const char *name, const char *header, size_t data) {
    const uint64_t length = strlen(header);
    unsigned char *bytes = calloc(1, 8 + length + data);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, length);
    for (size_t i = 0; i < data; i++) bytes[8 + length + i] = (unsigned char)i;
    scratch_write(name, bytes, 8 + length + data);
    free(bytes);
}

static void expect_open_error(const char *name, const char *part) {
    Safetensors st;
    Error error = {""};
    if (safetensors_open(&st, scratch(name), &error)) fail_msg("%s was opened, but should say '%s'", name, part);
    assert_error(&error, part);
    assert_error(&error, scratch(name));
    assert_null(st.tensors);
    assert_int_equal(st.file.fd, -1);
}

#define ENTRY(dtype, shape, offsets) "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define F32_2 ENTRY("F32", "[2]", "[0,8]")

static void test_malformed_headers(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        const char *part;
    } cases[] = {
        {"[]", 0, "does not begin with {"},
        {" {}", 0, "does not begin with {"},
        {"{", 0, "not JSON: ends too early"},
        {"{} x", 0, "not JSON at: x"},
        {"{\"a\":}", 0, "not JSON at: }"},
        {"{\"a\":" F32_2 ",}", 8, "not JSON"},
        {"{\"a\":1}", 0, "tensor a: its entry is not an object"},
        {"{\"a\":{}}", 0, "tensor a: has no dtype"},
        {"{\"a\":{\"dtype\":3,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "tensor a: has no dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "tensor a: has no shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":{},\"data_offsets\":[0,8]}}", 8, "tensor a: has no shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "tensor a: has no data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8, "entry has an unknown key"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "entry has a key twice"},
        {"{\"a\":" ENTRY("F33", "[2]", "[0,8]") "}", 8, "tensor a: its dtype F33 is not known"},
        {"{\"a\":" ENTRY("f32", "[2]", "[0,8]") "}", 8, "tensor a: its dtype f32 is not known"},
        {"{\"a\":" ENTRY("F32", "[-2]", "[0,8]") "}", 8, "its shape has something that is not a size"},
        {"{\"a\":" ENTRY("F32", "[1.5]", "[0,6]") "}", 6, "its shape has something that is not a size"},
        {"{\"a\":" ENTRY("F32", "[\"2\"]", "[0,8]") "}", 8, "its shape has something that is not a size"},
        {"{\"a\":" ENTRY("F32", "[[2]]", "[0,8]") "}", 8, "its shape has something that is not a size"},
        {"{\"a\":" ENTRY("F32", "[9007199254740994]", "[0,8]") "}", 8, "its shape has something that is not a size"},
        {"{\"a\":" ENTRY("F32", "[1e400]", "[0,8]") "}", 8, "its shape has something that is not a size"},
        {"{\"a\":" ENTRY("F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]") "}", 8, "has more than 8 dimensions"},
        // 2^32 * 2^32 is 0 in 64 bits, 2^62 * 4 as well, 2^61 * 4 is beyond what an offset can be.
        {"{\"a\":" ENTRY("F32", "[4294967296,4294967296]", "[0,0]") "}", 0,
         "shape [4294967296, 4294967296] is too large"},
        {"{\"a\":" ENTRY("F32", "[2147483648,2147483648]", "[0,0]") "}", 0, "is too large"},
        {"{\"a\":" ENTRY("F32", "[2147483648,1073741824]", "[0,0]") "}", 0, "is too large"},
        {"{\"a\":" ENTRY("F32", "[2]", "[0]") "}", 8, "its data_offsets are not two positions"},
        {"{\"a\":" ENTRY("F32", "[2]", "[0,8,8]") "}", 8, "its data_offsets are not two positions"},
        {"{\"a\":" ENTRY("F32", "[2]", "[-8,0]") "}", 8, "its data_offsets are not two positions"},
        {"{\"a\":" ENTRY("F32", "[2]", "[0,\"8\"]") "}", 8, "its data_offsets are not two positions"},
        {"{\"a\":" ENTRY("F32", "[2]", "[8,0]") "}", 8, "data_offsets [8, 0] are not within the file's 8 bytes"},
        {"{\"a\":" F32_2 "}", 7, "data_offsets [0, 8] are not within the file's 7 bytes"},
        {"{\"a\":" ENTRY("F32", "[3]", "[0,8]") "}", 8,
         "shape [3] of F32 takes 12 bytes, but its data_offsets give it 8"},
        {"{\"a\":" ENTRY("BF16", "[2]", "[0,8]") "}", 8, "shape [2] of BF16 takes 4 bytes"},
        {"{\"a\":" ENTRY("F32", "[0,3]", "[0,8]") "}", 8, "shape [0, 3] of F32 takes 0 bytes"},
        {"{\"a\":" F32_2 ",\"a\":" ENTRY("F32", "[2]", "[8,16]") "}", 16, "its header has \"a\" twice"},
        {"{\"a\":" F32_2 ",\"\\u0061\":" ENTRY("F32", "[2]", "[8,16]") "}", 16, "its header has \"a\" twice"},
        {"{\"a\\u0000b\":" F32_2 "}", 8, "holds a zero character"},
        {"{\"a\":" F32_2 ",\"b\":" ENTRY("F32", "[2]", "[4,12]") "}", 12, "tensors a and b overlap"},
        {"{\"b\":" F32_2 ",\"a\":" F32_2 "}", 8, "tensors a and b overlap"},
        {"{\"a\":" F32_2 ",\"b\":" ENTRY("F32", "[0]", "[4,4]") "}", 8, "tensors a and b overlap"},
        {"{\"b\":" ENTRY("F32", "[2]", "[12,20]") ",\"a\":" F32_2 "}", 20,
         "4 bytes before tensor b belong to no tensor"},
        {"{\"a\":" ENTRY("F32", "[2]", "[1,9]") "}", 9, "1 bytes before tensor a belong to no tensor"},
        {"{\"a\":" F32_2 "}", 9, "1 bytes at its end belong to no tensor"},
        {"{}", 5, "5 bytes at its end belong to no tensor"},
        {"{\"__metadata__\":[]}", 0, "its __metadata__ is not an object"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "its __metadata__ has a, which is not a text"},
        {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "its __metadata__ has \"a\" twice"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_safetensors("bad.safetensors", cases[i].header, cases[i].data);
        expect_open_error("bad.safetensors", cases[i].part);
    }
}

static void test_malformed_files(void **state) {
    (void)state;
    Safetensors st;
    Error error = {""};
    assert_false(safetensors_open(&st, scratch("missing"), &error));
    assert_error(&error, "No such file");
    mkdir(scratch("directory"), 0755);
    expect_open_error("directory", "is a directory");
    assert_int_equal(mkfifo(scratch("pipe"), 0600), 0);
    expect_open_error("pipe", "is a pipe");
    scratch_write("empty", "", 0);
    expect_open_error("empty", "is truncated: it has 0 bytes");
    scratch_write("seven", "\7\0\0\0\0\0\0", 7);
    expect_open_error("seven", "is truncated: it has 7 bytes");
    scratch_write("none", "\0\0\0\0\0\0\0\0", 8);
    expect_open_error("none", "does not begin with {");
    scratch_write("short", "\3\0\0\0\0\0\0\0{}", 10);
    expect_open_error("short", "its header has 3 bytes, but 2 are left");
    scratch_write("large", "\1\xe1\xf5\5\0\0\0\0{}", 10);
    expect_open_error("large", "its header would have 100000001 bytes");
    scratch_write("negative", "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    expect_open_error("negative", "its header would have 18446744073709551615 bytes");
    scratch_write("zero", "\3\0\0\0\0\0\0\0{}\0", 11);
    expect_open_error("zero", "holds a zero character");

    // Nested deeper than cJSON goes, and as deep as it goes, which is no shape either.
    for (int deep = 0; deep <= 1; deep++) {
        const size_t depth = deep ? 50000 : CJSON_NESTING_LIMIT - 3;
        static char header[50000 + 100];
        static const char head[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":";
        size_t length = sizeof head - 1;
        memcpy(header, head, length);
        memset(header + length, '[', depth);
        length += depth;
        if (!deep) {
            memset(header + length, ']', depth);
            length += depth;
        }
        static const char tail[] = ",\"data_offsets\":[0,4]}}";
        memcpy(header + length, tail, sizeof tail);
        write_safetensors("deep", header, 4);
        expect_open_error("deep", deep ? "nested too deeply" : "is not a size");
    }
    // A name that is longer than a message.
    static char header[5000];
    memset(header, 'n', sizeof header);
    memcpy(header, "{\"", 2);
    strcpy(header + 4000, "\":3}");
    write_safetensors("long", header, 0);
    expect_open_error("long", "nnnn: its entry is not an object");
}

// ---------------------------------------------------------------------------------------------------------------------

static void test_reading(void **state) {
    (void)state;
    // Out of order, with empty and scalar tensors, types to be skipped, escapes, and blanks at the end.
    write_safetensors(
        "good",
        "{\"half\":" ENTRY(
            "F16", "[3]",
            "[20,26]") ",\"__metadata__\":{\"format\":\"pt\"},"
                       "\"none\":" ENTRY("F32", "[0,7]", "[20,20]") ",\"scalar\":" ENTRY(
                           "F32", "[]",
                           "[16,20]") ",\"brain\":" ENTRY("BF16", "[1,2]",
                                                          "[26,30]") ",\"a\\\"\\u00e4\":" ENTRY("F32", "[2,2]",
                                                                                                "[0,16]") ",\"mask\""
                                                                                                          ":" ENTRY(
                                                                                                              "BO"
                                                                                                              "O"
                                                                                                              "L",
                                                                                                              "[2"
                                                                                                              "]",
                                                                                                              "[3"
                                                                                                              "0,"
                                                                                                              "32"
                                                                                                              "]") "}  "
                                                                                                                   " ",
        32);
    size_t size;
    char *bytes = read_whole(scratch("good"), &size);
    const unsigned char *data = (const unsigned char *)bytes + size - 32;
    Safetensors st;
    Error error = {""};
    if (!safetensors_open(&st, scratch("good"), &error)) fail_msg("%s", error.text);
    assert_int_equal(st.count, 6);
    const char *const order[] = {"a\"\xc3\xa4", "scalar", "none", "half", "brain", "mask"};
    for (int i = 0; i < 6; i++) {
        assert_string_equal(st.tensors[i].name, order[i]);
        assert_ptr_equal(safetensors_find(&st, order[i]), &st.tensors[i]);
    }
    assert_null(safetensors_find(&st, "__metadata__"));
    assert_null(safetensors_find(&st, ""));
    assert_null(safetensors_find(&st, "zzz"));
    float out[8], expected[8];
    memset(out, 0xff, sizeof out);
    assert_true(safetensors_read(&st, &st.tensors[0], 1, 2, out, &error));
    assert_memory_equal(out, data + 4, 8);
    assert_true(isnan(out[2]));
    assert_true(safetensors_read(&st, &st.tensors[1], 0, 1, out, &error));
    assert_memory_equal(out, data + 16, 4);
    assert_true(safetensors_read(&st, &st.tensors[2], 0, 0, out, &error));
    assert_true(safetensors_read(&st, &st.tensors[3], 1, 2, out, &error));
    floats_decode(FLOAT_F16, data + 22, 2, expected);
    assert_memory_equal(out, expected, 8);
    assert_true(safetensors_read(&st, &st.tensors[4], 0, 2, out, &error));
    floats_decode(FLOAT_BF16, data + 26, 2, expected);
    assert_memory_equal(out, expected, 8);
    assert_string_equal(error.text, "");
    assert_false(safetensors_read(&st, &st.tensors[0], 3, 2, out, &error));
    assert_error(&error, "has no elements 3 to 5");
    error.text[0] = '\0';
    assert_false(safetensors_read(&st, &st.tensors[0], UINT64_MAX, 2, out, &error));
    assert_error(&error, "has no elements");
    error.text[0] = '\0';
    assert_false(safetensors_read(&st, &st.tensors[5], 0, 2, out, &error));
    assert_error(&error, "tensor mask is of type BOOL; F32, F16 and BF16 can be read");
    // Cut while it is open.
    error.text[0] = '\0';
    assert_int_equal(truncate(scratch("good"), (off_t)size - 30), 0);
    assert_false(safetensors_read(&st, &st.tensors[3], 0, 3, out, &error));
    assert_error(&error, "ends at byte");
    safetensors_close(&st);
    free(bytes);
}

// Every half, against its value by the definition of IEEE 754.
static void test_every_half(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        const uint16_t half = (uint16_t)i;
        const int exponent = (half >> 10) & 31, mantissa = half & 1023;
        float value;
        floats_decode(FLOAT_F16, &half, 1, &value);
        assert_int_equal(signbit(value) != 0, half >> 15);
        if (exponent == 31) {
            assert_true(mantissa != 0 ? isnan(value) : isinf(value));
            continue;
        }
        const double expected = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
        assert_true(fabs(value) == expected);
    }
    for (uint32_t i = 0; i < 65536; i++) { // bf16 to fp32 and back: the same bits, NaNs too
        const uint16_t half = (uint16_t)i;
        uint16_t again = (uint16_t)~half;
        float value;
        floats_decode(FLOAT_BF16, &half, 1, &value);
        floats_encode(FLOAT_BF16, &value, 1, &again);
        assert_int_equal(again, half);
    }
    // Rounding to nearest, ties to even; overflow to infinity; a NaN with bits only at its end stays a NaN.
    static const uint32_t bits[][2] = {{0x3f800000, 0x3f80}, {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80},
                                       {0x3f808001, 0x3f81}, {0x3f818000, 0x3f82}, {0xbf818000, 0xbf82},
                                       {0x7f7fffff, 0x7f80}, {0x00000001, 0x0000}, {0x7f800001, 0x7fc0},
                                       {0xff800000, 0xff80}, {0x80008001, 0x8001}};
    for (size_t i = 0; i < sizeof bits / sizeof bits[0]; i++) {
        const float value = float_from_bits(bits[i][0]);
        uint16_t half = 0x1234;
        floats_encode(FLOAT_BF16, &value, 1, &half);
        assert_int_equal(half, bits[i][1]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

static float value_of(int tensor, size_t i) {
    return (float)(tensor + 1) + (float)i * 0.03125f;
}

static void test_round_trip(void **state) {
    (void)state;
    enum { LONG = 3 * FLOATS_CHUNK + 5 };
    const uint64_t shapes[][3] = {{2, 3, 0}, {LONG, 0, 0}, {0, 4, 0}, {0, 0, 0}, {5, 1, 2}};
    const int ranks[] = {2, 1, 2, 0, 3};
    char names[][16] = {"b.weight", "a", "empty", "quote\"\\\n\t", "z\xc3\xa9"};
    const FloatType types[] = {FLOAT_F32, FLOAT_BF16, FLOAT_F32, FLOAT_F32, FLOAT_BF16};
    SafetensorsTensor table[5];
    for (int i = 0; i < 5; i++) table[i] = safetensors_describe(names[i], types[i], ranks[i], shapes[i]);
    const char *const metadata[] = {"format", "pt", "a \"note\"", "x", NULL};
    float *values = malloc(LONG * sizeof(float)), *read = malloc(LONG * sizeof(float));
    for (size_t piece = 1; piece <= LONG; piece = piece * 37 + 1) { // whatever the pieces
        SafetensorsWriter writer;
        Error error = {""};
        assert_true(safetensors_create(&writer, scratch("trip.tmp"), table, 5, metadata, &error));
        for (int t = 0; t < 5; t++) {
            for (size_t i = 0; i < table[t].elements; i++) values[i] = value_of(t, i);
            for (size_t i = 0; i < table[t].elements; i += piece) {
                const size_t left = table[t].elements - i;
                assert_true(safetensors_write(&writer, values + i, left < piece ? left : piece, &error));
            }
        }
        if (!safetensors_finish(&writer, &error)) fail_msg("%s", error.text);
        if (piece == 1)
            assert_true(file_publish(scratch("trip.tmp"), scratch("trip"), &error));
        else
            assert_same_files(scratch("trip.tmp"), scratch("trip"));
    }
    assert_int_equal(access(scratch("trip.tmp"), F_OK), 0);
    Safetensors st;
    Error error = {""};
    if (!safetensors_open(&st, scratch("trip"), &error)) fail_msg("%s", error.text);
    assert_int_equal(st.count, 5);
    assert_int_equal(st.tensors[0].first % 8, 0);
    for (int t = 0; t < 5; t++) {
        const SafetensorsTensor *tensor = safetensors_find(&st, names[t]);
        assert_non_null(tensor);
        assert_int_equal(tensor->rank, ranks[t]);
        assert_memory_equal(tensor->shape, table[t].shape, sizeof table[t].shape);
        memset(read, 0xff, LONG * sizeof(float));
        assert_true(safetensors_read(&st, tensor, 0, tensor->elements, read, &error));
        for (size_t i = 0; i < tensor->elements; i++) {
            const float wrote = value_of(t, i);
            const float expected =
                types[t] == FLOAT_BF16 ? float_from_bits((uint32_t)float_to_bf16(wrote) << 16) : wrote;
            assert_true(read[i] == expected);
        }
    }
    safetensors_close(&st);
    free(values);
    free(read);

    // The bytes of a small file, by hand.
    const uint64_t two = 2;
    SafetensorsTensor small = safetensors_describe(names[1], FLOAT_F32, 1, &two);
    SafetensorsWriter writer;
    const float pair[2] = {1, -2};
    assert_true(safetensors_create(&writer, scratch("small"), &small, 1, NULL, &error));
    assert_true(safetensors_write_bytes(&writer, pair, 8, &error));
    assert_true(safetensors_finish(&writer, &error));
    size_t size;
    char *bytes = read_whole(scratch("small"), &size);
    static const char expected[] = "\x38\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}"
                                   "  \0\0\x80\x3f\0\0\0\xc0";
    assert_int_equal(size, sizeof expected - 1);
    assert_memory_equal(bytes, expected, size);
    free(bytes);
}

static void test_failing_writes(void **state) {
    (void)state;
    const uint64_t shape = 100000;
    char name[] = "a";
    const SafetensorsTensor tensor = safetensors_describe(name, FLOAT_F32, 1, &shape);
    float *values = calloc(shape, sizeof(float));
    SafetensorsWriter writer;
    Error error = {""};
    // A full disk.
    if (access("/dev/full", W_OK) == 0) {
        assert_false(safetensors_create(&writer, "/dev/full", &tensor, 1, NULL, &error));
        assert_false(safetensors_write(&writer, values, shape, &error));
        assert_false(safetensors_finish(&writer, &error));
        assert_error(&error, "/dev/full: writing at byte 0 failed: No space left");
    }
    // A write that is short, because the file may grow no more, and then fails.
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 123456;
    signal(SIGXFSZ, SIG_IGN);
    error.text[0] = '\0';
    setrlimit(RLIMIT_FSIZE, &small);
    assert_true(safetensors_create(&writer, scratch("limited"), &tensor, 1, NULL, &error));
    const bool wrote = safetensors_write(&writer, values, shape, &error);
    const bool finished = safetensors_finish(&writer, &error);
    setrlimit(RLIMIT_FSIZE, &before);
    assert_false(wrote);
    assert_false(finished);
    assert_error(&error, "limited: writing at byte 123456 failed: File too large");
    // No directory; a directory in the way.
    error.text[0] = '\0';
    assert_false(safetensors_create(&writer, scratch("no/where"), &tensor, 1, NULL, &error));
    assert_false(safetensors_finish(&writer, &error));
    assert_error(&error, "no/where: cannot be written: No such file");
    error.text[0] = '\0';
    scratch_write("file", "x", 1);
    mkdir(scratch("occupied"), 0755);
    assert_false(file_publish(scratch("file"), scratch("occupied"), &error));
    assert_error(&error, "file: cannot be renamed to");
    // Left incomplete: the reason that the caller gives is kept.
    error.text[0] = '\0';
    assert_true(safetensors_create(&writer, scratch("partial"), &tensor, 1, NULL, &error));
    assert_true(safetensors_write(&writer, values, 10, &error));
    assert_false(safetensors_finish(&writer, &error));
    assert_error(&error, "partial: tensor a was not written to its end");
    error.text[0] = '\0';
    assert_true(safetensors_create(&writer, scratch("partial"), &tensor, 1, NULL, &error));
    error_set(&error, "the source failed");
    assert_false(safetensors_finish(&writer, &error));
    assert_string_equal(error.text, "the source failed");
    // Publishing where the path has no directory in it.
    error.text[0] = '\0';
    char *here = getcwd(NULL, 0);
    assert_int_equal(chdir(scratch_folder), 0);
    assert_true(file_publish("file", "named", &error));
    assert_true(file_publish("named", "./named2", &error));
    assert_int_equal(chdir(here), 0);
    assert_int_equal(access(scratch("named2"), F_OK), 0);
    free(here);
    free(values);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_malformed_headers), cmocka_unit_test(test_malformed_files),
        cmocka_unit_test(test_reading),           cmocka_unit_test(test_every_half),
        cmocka_unit_test(test_round_trip),        cmocka_unit_test(test_failing_writes),
    };
    return cmocka_run_group_tests_name("safetensors", tests, scratch_make, scratch_remove);
}
