// hellaswag.h: HellaSwag, or any such choice between four endings, in llm.c's file format; and who is right.
//
// The format, little-endian: a header of 256 int32 (magic 20240522, version 1, number of examples, bytes of the longest
// example); then the examples, uint16: 65535, the example's bytes, its number, the right answer, 4, the length of the
// context, its tokens, and of each of the four completions its length and its tokens.
//
// An example becomes four rows of a batch: context and completion, one row for each. The targets are the completion's
// tokens; all other places are -1, not counted, as everywhere in the program. The model's answer is the completion with
// the lowest mean loss (Zellers et al. 2019; the mean is over tokens, so that length does not count).
//
// Files are untrusted: hellaswag_open() checks all examples, so what is wrong shows before anything is evaluated.
#ifndef HELLASWAG_H
#define HELLASWAG_H

#include <math.h>
#include "files.h"

enum {
    HELLASWAG_MAGIC = 20240522,
    HELLASWAG_VERSION = 1,
    HELLASWAG_HEADER_BYTES = 256 * 4,
    HELLASWAG_CHOICES = 4,
    HELLASWAG_START = 65535,                                      // begins an example; no token
    HELLASWAG_FIXED = 6,                                          // numbers of an example before its context
    HELLASWAG_LEAST = HELLASWAG_FIXED + 1 + 2 * HELLASWAG_CHOICES // numbers of the smallest example
};

typedef struct {
    InputFile file;
    int count;          // examples
    int T, vocab_size;  // tokens of a row, of the vocabulary
    int64_t *places;    // (count + 1) where examples begin in the file; then its end
    uint16_t *raw;      // an example as in the file
    size_t raw_numbers; // that it has room for
} Hellaswag;

static inline void hellaswag_close(Hellaswag *h) {
    input_close(&h->file);
    free(h->places);
    free(h->raw);
    h->places = NULL;
    h->raw = NULL;
}

static inline bool hellaswag_check_tokens(const Hellaswag *h, int example, const uint16_t *tokens, int n,
                                          Error *error) {
    for (int i = 0; i < n; i++)
        if (tokens[i] >= h->vocab_size || tokens[i] == HELLASWAG_START)
            return error_set(error, "%s: example %d has token %u, but the vocabulary has %d: ids 0 to %d", h->file.path,
                             example, tokens[i], h->vocab_size, h->vocab_size - 1);
    return true;
}

// Reads example number `example`, which begins at places[example], sets where the next one begins, and fills rows as
// hellaswag_read() says, unless inputs is NULL.
static inline bool hellaswag_parse(Hellaswag *h, int example, int *inputs, int *targets, int *label, Error *error) {
    const char *path = h->file.path;
    const int64_t place = h->places[example], left = h->file.bytes - place;
    uint16_t fixed[HELLASWAG_FIXED];
    if (left < 2 * HELLASWAG_LEAST)
        return error_set(error, "%s: is truncated: its header says %d examples, but it ends in example %d", path,
                         h->count, example);
    if (!input_read(&h->file, fixed, sizeof fixed, place, error)) return false;
    const size_t bytes = fixed[1];
    if (fixed[0] != HELLASWAG_START || fixed[2] != example)
        return error_set(error, "%s: example %d does not begin at byte %lld, where the one before ends", path, example,
                         (long long)place);
    if (fixed[3] >= HELLASWAG_CHOICES || fixed[4] != HELLASWAG_CHOICES)
        return error_set(error, "%s: example %d has answer %u of %u, an answer below 4 of 4 is needed", path, example,
                         fixed[3], fixed[4]);
    if (bytes % 2 != 0 || bytes < 2 * HELLASWAG_LEAST || (int64_t)bytes > left || bytes > 2 * h->raw_numbers)
        return error_set(error, "%s: example %d has %zu bytes, an even number from 30 to %zu is needed", path, example,
                         bytes, (int64_t)(2 * h->raw_numbers) < left ? 2 * h->raw_numbers : (size_t)left);
    if (!input_read(&h->file, h->raw, bytes, place, error)) return false;
    h->places[example + 1] = place + (int64_t)bytes;
    *label = fixed[3];

    const int numbers = (int)(bytes / 2), context = fixed[5];
    const uint16_t *tokens = h->raw + HELLASWAG_FIXED;
    int at = HELLASWAG_FIXED + context; // of the next completion's length
    if (context < 1 || at > numbers)
        return error_set(error, "%s: example %d has a context of %d tokens in %zu bytes", path, example, context,
                         bytes);
    if (!hellaswag_check_tokens(h, example, tokens, context, error)) return false;
    for (int c = 0; c < HELLASWAG_CHOICES; c++) {
        const int length = at < numbers ? h->raw[at] : 0;
        if (length < 1 || at + 1 + length > numbers)
            return error_set(error, "%s: completion %d of example %d has %d tokens, which its %zu bytes do not hold",
                             path, c, example, length, bytes);
        // The last token is a target alone.
        if (context + length - 1 > h->T)
            return error_set(error, "%s: example %d has %d tokens, the sequence length %d allows %d", path, example,
                             context + length, h->T, h->T + 1);
        const uint16_t *completion = h->raw + at + 1;
        if (!hellaswag_check_tokens(h, example, completion, length, error)) return false;
        at += 1 + length;
        if (inputs == NULL) continue;
        for (int t = 0; t < h->T; t++) {
            const int next = t + 1 - context; // of the completion's tokens the one to be predicted
            const bool counted = next >= 0 && next < length;
            inputs[c * h->T + t] = t < context ? tokens[t] : counted ? completion[next - 1] : 0;
            targets[c * h->T + t] = counted ? completion[next] : -1;
        }
    }
    if (at != numbers)
        return error_set(error, "%s: example %d has %d bytes after its completions", path, example, 2 * (numbers - at));
    return true;
}

static inline bool hellaswag_read_all(Hellaswag *h, Error *error) {
    const char *path = h->file.path;
    int32_t header[HELLASWAG_HEADER_BYTES / 4];
    if (h->file.bytes < HELLASWAG_HEADER_BYTES)
        return error_set(error, "%s: is truncated: it has %lld bytes, the header of such a file alone has %d", path,
                         (long long)h->file.bytes, (int)HELLASWAG_HEADER_BYTES);
    if (!input_read(&h->file, header, sizeof header, 0, error)) return false;
    if (header[0] != HELLASWAG_MAGIC)
        return error_set(error, "%s: is not a file of HellaSwag examples: its first number is %d, not %d", path,
                         header[0], (int)HELLASWAG_MAGIC);
    if (header[1] != HELLASWAG_VERSION)
        return error_set(error, "%s: is of version %d; version %d is known", path, header[1], (int)HELLASWAG_VERSION);
    const int64_t most = (h->file.bytes - HELLASWAG_HEADER_BYTES) / (2 * HELLASWAG_LEAST);
    if (header[2] < 1 || header[2] > HELLASWAG_START || header[2] > most)
        return error_set(error, "%s: its header says %d examples, 1 to %lld are possible in its %lld bytes", path,
                         header[2], (long long)(most < (int64_t)HELLASWAG_START ? most : (int64_t)HELLASWAG_START),
                         (long long)h->file.bytes);
    if (header[3] < 2 * HELLASWAG_LEAST || header[3] > 65535 || header[3] > h->file.bytes)
        return error_set(error, "%s: its header says that an example has up to %d bytes, %d to %lld are possible", path,
                         header[3], 2 * (int)HELLASWAG_LEAST,
                         (long long)(h->file.bytes < 65535 ? h->file.bytes : 65535));
    h->count = header[2];
    h->raw_numbers = (size_t)header[3] / 2;
    h->places = (int64_t *)calloc((size_t)h->count + 1, sizeof(int64_t));
    h->raw = (uint16_t *)malloc(h->raw_numbers * sizeof(uint16_t));
    if (h->places == NULL || h->raw == NULL) die("no memory for the examples of %s", path);
    h->places[0] = HELLASWAG_HEADER_BYTES;
    int label;
    for (int i = 0; i < h->count; i++)
        if (!hellaswag_parse(h, i, NULL, NULL, &label, error)) return false;
    if (h->places[h->count] != h->file.bytes)
        return error_set(error, "%s: is foreign: %lld bytes follow its last example", path,
                         (long long)(h->file.bytes - h->places[h->count]));
    return true;
}

// Opens a file and checks it against a model with rows of T tokens and this vocabulary. On an error nothing remains
// open.
static inline bool hellaswag_open(Hellaswag *h, const char *path, int T, int vocab_size, Error *error) {
    memset(h, 0, sizeof *h);
    h->T = T;
    h->vocab_size = vocab_size;
    if (!input_open(&h->file, path, error)) return false;
    const bool ok = hellaswag_read_all(h, error);
    if (!ok) hellaswag_close(h);
    return ok;
}

// Reads one example, 0 to count - 1: four rows, and the right one of them.   inputs, targets (4, T)
static inline bool hellaswag_read(Hellaswag *h, int example, int *inputs, int *targets, int *label, Error *error) {
    const int64_t next = h->places[example + 1];
    if (!hellaswag_parse(h, example, inputs, targets, label, error)) return false;
    if (h->places[example + 1] == next) return true;
    h->places[example + 1] = next;
    return error_set(error, "%s: example %d is not what it was when the file was opened", h->file.path, example);
}

// The model's answer: of the four rows that hellaswag_read() filled the one with the lowest mean of the losses whose
// targets are counted, the first of equals; -1 if no mean is a number.   losses, targets (4, T)
static inline int hellaswag_answer(const float *losses, const int *targets, int T) {
    int answer = -1;
    double lowest = 0;
    for (int c = 0; c < HELLASWAG_CHOICES; c++) {
        double sum = 0;
        int n = 0;
        for (int t = 0; t < T; t++) {
            if (targets[c * T + t] < 0) continue;
            sum += (double)losses[c * T + t];
            n++;
        }
        const double mean = sum / n; // NaN where nothing is counted
        if (isnan(mean) || (answer >= 0 && mean >= lowest)) continue;
        answer = c;
        lowest = mean;
    }
    return answer;
}

#endif
