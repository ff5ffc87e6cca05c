// Tests of tokenizer.h: decoding, prompts, every error of a vocabulary file, and the distribution of draws.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "tokenizer.h"

static char path[256];

typedef struct {
    unsigned char bytes[4096];
    size_t size;
} File;

static void header(File *file, uint32_t magic, uint32_t version, uint32_t vocab, uint32_t end) {
    uint32_t head[256] = {magic, version, vocab, end};
    memset(file, 0, sizeof *file);
    memcpy(file->bytes, head, sizeof head);
    file->size = sizeof head;
}

static void token(File *file, const char *bytes) {
    size_t length = strlen(bytes);
    file->bytes[file->size++] = (unsigned char)length;
    memcpy(file->bytes + file->size, bytes, length);
    file->size += length;
}

static void write_file(const File *file) {
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(file->bytes, 1, file->size, out), file->size);
    assert_int_equal(fclose(out), 0);
}

static const char *const vocabulary[] = {"a", "b", "c", " ", "ab", "abc", " a", "\x1b[31m", "\xc3\xa9", "<|end|>"};
enum { VOCAB = 10, END = 9 };

static File good_file(void) {
    File file;
    header(&file, TOKENIZER_MAGIC, 2, VOCAB, END);
    for (int i = 0; i < VOCAB; i++) token(&file, vocabulary[i]);
    return file;
}

static void expect_error(const File *file, const char *part) {
    Tokenizer tokenizer;
    Error error = {""};
    write_file(file);
    assert_false(tokenizer_open(&tokenizer, path, &error));
    if (strstr(error.text, path) == NULL || strstr(error.text, part) == NULL)
        fail_msg("the error is '%s', but should name '%s' and say '%s'", error.text, path, part);
    assert_null(tokenizer.bytes);
    assert_null(tokenizer.first);
}

static void test_bytes(void **state) {
    (void)state;
    Tokenizer tokenizer;
    Error error = {""};
    char text[TOKENIZER_TEXT_MAX];
    assert_true(tokenizer_open(&tokenizer, "", &error));
    assert_int_equal(tokenizer.vocab_size, 256);
    for (int i = 0; i < 256; i++) {
        char expected[8];
        memset(text, 0x55, sizeof text);
        if ((i < 32 && i != '\n' && i != '\t') || i == 127)
            snprintf(expected, sizeof expected, "\\x%02x", i);
        else
            snprintf(expected, sizeof expected, "%c", i);
        assert_int_equal(tokenizer_decode(&tokenizer, i, text), strlen(expected));
        assert_string_equal(text, expected);
    }
    tokenizer_decode(&tokenizer, 256, text);
    assert_string_equal(text, "<256>");
    tokenizer_decode(&tokenizer, -1, text);
    assert_string_equal(text, "<-1>");

    int tokens[4] = {-7, -7, -7, -7}, count = -7;
    assert_true(tokenizer_encode_prompt(&tokenizer, "a\xff", tokens, 4, &count, &error));
    assert_int_equal(count, 2);
    assert_int_equal(tokens[0], 'a');
    assert_int_equal(tokens[1], 255);
    assert_int_equal(tokens[2], -7);
    assert_true(tokenizer_encode_prompt(&tokenizer, "", tokens, 4, &count, &error));
    assert_int_equal(count, 1);
    assert_int_equal(tokens[0], '\n');
    assert_true(tokenizer_encode_prompt(&tokenizer, "1234", tokens, 4, &count, &error));
    assert_false(tokenizer_encode_prompt(&tokenizer, "12345", tokens, 4, &count, &error));
    assert_string_equal(error.text, "the prompt is longer than 4 tokens");
    tokenizer_close(&tokenizer);
}

static void test_vocabulary_file(void **state) {
    (void)state;
    Tokenizer tokenizer;
    Error error = {""};
    char text[TOKENIZER_TEXT_MAX];
    File file = good_file();
    write_file(&file);
    if (!tokenizer_open(&tokenizer, path, &error)) fail_msg("%s", error.text);
    assert_int_equal(tokenizer.vocab_size, VOCAB);
    assert_int_equal(tokenizer.start, END);
    for (int i = 0; i < VOCAB; i++) {
        tokenizer_decode(&tokenizer, i, text);
        assert_string_equal(text, i == 7 ? "\\x1b[31m" : vocabulary[i]);
    }
    tokenizer_decode(&tokenizer, VOCAB, text);
    assert_string_equal(text, "<10>");

    // The longest token at each place.
    int tokens[8], count;
    static const int expected[] = {5, 6, 1, 3, 2, 4};
    assert_true(tokenizer_encode_prompt(&tokenizer, "abc ab cab", tokens, 8, &count, &error));
    assert_int_equal(count, 6);
    assert_memory_equal(tokens, expected, sizeof expected);
    // Printing gives the prompt back.
    FILE *out = tmpfile();
    tokenizer_print(&tokenizer, tokens, count, out);
    rewind(out);
    memset(text, 0, sizeof text);
    assert_int_equal(fread(text, 1, sizeof text, out), 10);
    assert_string_equal(text, "abc ab cab");
    fclose(out);
    assert_true(tokenizer_encode_prompt(&tokenizer, "", tokens, 8, &count, &error));
    assert_int_equal(count, 1);
    assert_int_equal(tokens[0], END);
    assert_false(tokenizer_encode_prompt(&tokenizer, "abz", tokens, 8, &count, &error));
    assert_string_equal(error.text, "the vocabulary has no token for byte 0x7a of the prompt");
    tokenizer_close(&tokenizer);
}

// A token of 255 control bytes is the longest text; version 1 names no end of text.
static void test_longest_token_and_version_1(void **state) {
    (void)state;
    enum { MANY = TOKENIZER_VERSION_1_END + 1 };
    size_t size = TOKENIZER_HEADER_BYTES + 2 * (MANY - 1) + 256;
    unsigned char *bytes = malloc(size), *at = bytes + TOKENIZER_HEADER_BYTES;
    uint32_t head[256] = {TOKENIZER_MAGIC, 1, MANY, 3};
    memcpy(bytes, head, sizeof head);
    *at++ = 255;
    memset(at, 1, 255);
    at += 255;
    for (int i = 1; i < MANY; i++) {
        *at++ = 1;
        *at++ = 'x';
    }
    assert_ptr_equal(at, bytes + size);
    FILE *out = fopen(path, "wb");
    assert_int_equal(fwrite(bytes, 1, size, out), size);
    fclose(out);
    free(bytes);
    Tokenizer tokenizer;
    Error error = {""};
    char text[TOKENIZER_TEXT_MAX];
    if (!tokenizer_open(&tokenizer, path, &error)) fail_msg("%s", error.text);
    assert_int_equal(tokenizer.start, 50256);
    assert_int_equal(tokenizer_decode(&tokenizer, 0, text), TOKENIZER_TEXT_MAX - 1);
    for (int i = 0; i < 255; i++) assert_memory_equal(text + 4 * i, "\\x01", 4);
    tokenizer_close(&tokenizer);
}

static void test_bad_files(void **state) {
    (void)state;
    Tokenizer tokenizer;
    Error error = {""};
    unlink(path);
    assert_false(tokenizer_open(&tokenizer, path, &error));
    assert_non_null(strstr(error.text, "No such file"));
    error.text[0] = '\0';
    assert_false(tokenizer_open(&tokenizer, "/tmp", &error));
    assert_string_equal(error.text, "/tmp: is a directory");
    error.text[0] = '\0';
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_false(tokenizer_open(&tokenizer, path, &error));
    assert_non_null(strstr(error.text, "not a regular file"));
    unlink(path);

    File file = good_file();
    file.size = 0;
    expect_error(&file, "is truncated: it has 0 bytes");
    file.size = TOKENIZER_HEADER_BYTES - 1;
    expect_error(&file, "is truncated: it has 1023 bytes");
    header(&file, 20240520, 1, 4, 0);
    expect_error(&file, "is not a tokenizer file: its first number is 20240520, not 20240328");
    header(&file, TOKENIZER_MAGIC, 3, 4, 0);
    expect_error(&file, "version 3");
    header(&file, TOKENIZER_MAGIC, 2, 0, 0);
    expect_error(&file, "holds 0 tokens");
    header(&file, TOKENIZER_MAGIC, 2, 0xffffffffu, 0);
    expect_error(&file, "holds 4294967295 tokens");
    header(&file, TOKENIZER_MAGIC, 2, 4, 4);
    expect_error(&file, "end-of-text token is 4, but it holds only 4 tokens");
    header(&file, TOKENIZER_MAGIC, 1, 4, 0);
    expect_error(&file, "end-of-text token is 50256");
    header(&file, TOKENIZER_MAGIC, 2, 4, 0);
    expect_error(&file, "4 tokens take 8 to 1024 bytes after the header, but it has 0");
    header(&file, TOKENIZER_MAGIC, 2, 2, 0);
    token(&file, "abc");
    token(&file, "");
    expect_error(&file, "token 1 is empty");
    header(&file, TOKENIZER_MAGIC, 2, 2, 0);
    token(&file, "abc");
    expect_error(&file, "is truncated: it ends inside token 1 of 2");
    header(&file, TOKENIZER_MAGIC, 2, 2, 0);
    token(&file, "abc");
    token(&file, "abc");
    file.size--;
    expect_error(&file, "is truncated: it ends inside token 1 of 2");
    file = good_file();
    token(&file, "more");
    expect_error(&file, "is foreign: 5 bytes follow its last token");
}

// Files with random damage are either refused or decoded within bounds; AddressSanitizer sees what this test does not.
static void test_damaged_files(void **state) {
    (void)state;
    int opened = 0, refused = 0;
    for (uint64_t i = 0; i < 3000; i++) {
        File file = good_file();
        uint64_t r = random_mix(i + 1);
        int changes = (int)(r % 3);
        for (int k = 0; k <= changes; k++) {
            r = random_mix(r);
            // Header fields and the body, not the header's unused rest.
            size_t place = r % 2 ? (r >> 8) % 16 : TOKENIZER_HEADER_BYTES + (r >> 8) % (file.size - 1024);
            file.bytes[place] = (unsigned char)(r >> 40);
        }
        if (r % 5 == 0) file.size = (r >> 16) % (file.size + 1);
        write_file(&file);
        Tokenizer tokenizer;
        Error error = {""};
        if (!tokenizer_open(&tokenizer, path, &error)) {
            assert_non_null(strstr(error.text, path));
            refused++;
            continue;
        }
        opened++;
        char text[TOKENIZER_TEXT_MAX];
        int tokens[4], count;
        for (int t = 0; t < tokenizer.vocab_size; t++) {
            int length = tokenizer_decode(&tokenizer, t, text);
            assert_in_range(length, 1, TOKENIZER_TEXT_MAX - 1);
        }
        tokenizer_encode_prompt(&tokenizer, "abc", tokens, 4, &count, &error);
        tokenizer_close(&tokenizer);
    }
    assert_true(opened > 100 && refused > 100);
}

// ---------------------------------------------------------------------------------------------------------------------

static void test_argmax(void **state) {
    (void)state;
    float logits[] = {-3.0f, 2.0f, NAN, 2.0f, -INFINITY, 1.0f};
    for (int i = 0; i < 20; i++) {
        assert_int_equal(sample_token(logits, 6, 0.0, 0, 1, (uint64_t)i), 1); // the first of two
        assert_int_equal(sample_token(logits, 6, 1e-300, 1, 1, (uint64_t)i) % 2, 1);
    }
    float none[] = {NAN, NAN}, negative[] = {-INFINITY, -5.0f, -INFINITY}, infinite[] = {0.0f, INFINITY, 1.0f};
    for (int i = 0; i < 20; i++) {
        assert_in_range(sample_token(none, 2, 1.0, 0, 1, (uint64_t)i), 0, 1);
        assert_in_range(sample_token(none, 2, 1.0, 1, 1, (uint64_t)i), 0, 1);
        assert_int_equal(sample_token(negative, 3, 1.0, 0, 1, (uint64_t)i), 1);
        assert_int_equal(sample_token(negative, 3, 1.0, 2, 1, (uint64_t)i), 1);
        assert_int_equal(sample_token(infinite, 3, 1.0, 0, 1, (uint64_t)i), 1);
    }
}

// Draws follow softmax(logits / temperature) over the top_k: chi-square against double-precision probabilities. With
// 8 degrees of freedom 31.8 is exceeded with probability 1e-4, with fewer more rarely; the draws are fixed.
static void check_distribution(const float *logits, int V, double temperature, int top_k, double limit) {
    enum { DRAWS = 100000, MOST = 16 };
    int drawn[MOST] = {0};
    double probability[MOST], total = 0;
    for (int i = 0; i < V; i++) {
        int larger = 0;
        for (int j = 0; j < V; j++) larger += logits[j] > logits[i];
        probability[i] =
            top_k == 0 || larger < top_k ? exp(((double)logits[i] - (double)logits[0]) / temperature) : 0.0;
        total += probability[i];
    }
    uint64_t key = random_key(1337, RANDOM_SAMPLE, (uint64_t)top_k, (uint64_t)(temperature * 1000));
    for (uint64_t n = 0; n < DRAWS; n++) {
        int token = sample_token(logits, V, temperature, top_k, key, n);
        assert_in_range(token, 0, V - 1);
        drawn[token]++;
    }
    double chi2 = 0;
    for (int i = 0; i < V; i++) {
        double expected = probability[i] / total * DRAWS;
        if (expected == 0.0)
            assert_int_equal(drawn[i], 0);
        else
            chi2 += (drawn[i] - expected) * (drawn[i] - expected) / expected;
    }
    assert_true(chi2 < limit);
}

static void test_distribution(void **state) {
    (void)state;
    static const float logits[9] = {0.5f, -1.0f, 2.0f, 0.0f, 1.5f, -0.25f, -2.0f, 1.0f, 0.75f};
    check_distribution(logits, 9, 1.0, 0, 31.8);
    check_distribution(logits, 9, 0.7, 0, 31.8);
    check_distribution(logits, 9, 2.0, 0, 31.8);
    check_distribution(logits, 9, 1.0, 100, 31.8);
    for (int k = 1; k <= 9; k++) check_distribution(logits, 9, 1.0, k, 31.8);
    // Ties with the k-th take part: the same chances for equal logits.
    static const float ties[6] = {1.0f, 0.0f, 1.0f, 1.0f, -1.0f, 2.0f};
    check_distribution(ties, 6, 1.0, 2, 31.8);
    // What is not a number is never drawn and takes no one's place among the top_k.
    static const float holes[5] = {1.0f, 2.0f, NAN, 1.5f, NAN};
    int drawn[5] = {0};
    for (uint64_t n = 0; n < 1000; n++) drawn[sample_token(holes, 5, 1.0, 4, 1, n)]++;
    assert_int_equal(drawn[2] + drawn[4], 0);
    assert_true(drawn[0] > 100 && drawn[1] > 300 && drawn[3] > 200); // 186, 506, 307 are expected
    // Far from zero nothing overflows.
    float large[9];
    for (int i = 0; i < 9; i++) large[i] = logits[i] + 4096.0f;
    check_distribution(large, 9, 1.0, 0, 31.8);
}

// A draw depends on key and index alone, and both matter.
static void test_draws_are_addressed(void **state) {
    (void)state;
    float logits[64] = {0};
    int same_index = 0, same_key = 0;
    for (uint64_t n = 0; n < 1000; n++) {
        int token = sample_token(logits, 64, 1.0, 0, 11, n);
        assert_int_equal(token, sample_token(logits, 64, 1.0, 0, 11, n));
        same_index += token == sample_token(logits, 64, 1.0, 0, 12, n);
        same_key += token == sample_token(logits, 64, 1.0, 0, 11, n + 1);
    }
    assert_in_range(same_index, 2, 40); // 16 are expected
    assert_in_range(same_key, 2, 40);
}

// The threshold is the k-th largest, signs and ties included.
static void test_threshold(void **state) {
    (void)state;
    enum { V = 501 };
    float logits[V];
    for (int i = 0; i < V; i++) logits[i] = random_normal(3, (uint64_t)i) * (i % 7 == 0 ? 1e-20f : 3.0f);
    for (int i = 0; i < V; i += 10) logits[i] = logits[(i + 250) % V];
    for (int k = 1; k <= V; k++) {
        uint32_t threshold = sample_threshold(logits, V, k);
        int above = 0, at_least = 0;
        for (int i = 0; i < V; i++) {
            above += sample_rank(logits[i]) > threshold;
            at_least += sample_rank(logits[i]) >= threshold;
        }
        assert_true(above < k && at_least >= k);
    }
}

static int make_path(void **state) {
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(path, sizeof path, "%.200s/test_tokenizerXXXXXX", base != NULL && base[0] != '\0' ? base : "/tmp");
    int fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_path(void **state) {
    (void)state;
    return unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_vocabulary_file),
        cmocka_unit_test(test_longest_token_and_version_1),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_damaged_files),
        cmocka_unit_test(test_argmax),
        cmocka_unit_test(test_distribution),
        cmocka_unit_test(test_draws_are_addressed),
        cmocka_unit_test(test_threshold),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, make_path, remove_path);
}
