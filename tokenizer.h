// tokenizer.h: tokens -> text, for samples; and the draw of the next token.
//
// Two vocabularies: bytes (256, no file), and that of a file in the format of llm.c's tokenizer .bin: a header of 256
// uint32 (magic 20240328, version 1 or 2, number of tokens, end-of-text token in version 2), then for every token a
// length byte and that many bytes. dev/data/prepare.py writes one beside GPT-2 token shards.
//
// The file holds no merge rules, so prompts are not encoded by byte-pair encoding but by the longest token that matches
// at each place. The tokens spell the same text and are mostly those of byte-pair encoding, which is good enough for a
// prompt; training data is encoded by prepare.py.
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include "error.h"
#include "random.h"

enum {
    TOKENIZER_MAGIC = 20240328,
    TOKENIZER_HEADER_BYTES = 256 * 4,
    TOKENIZER_VERSION_1_END = 50256, // version 1 names no end-of-text token: it is that of GPT-2
    TOKENIZER_MAX_VOCAB = 1 << 22,
    TOKENIZER_TEXT_MAX = 255 * 4 + 1, // of a decoded token: 255 bytes, each shown as \xNN
};

typedef struct {
    int vocab_size;
    int start;            // what a sample without a prompt begins with: end-of-text, or a newline for bytes
    unsigned char *bytes; // of all tokens, one after the other; NULL: token i is byte i
    uint32_t *first;      // (vocab_size + 1) where each token's bytes begin
} Tokenizer;

static inline void tokenizer_close(Tokenizer *tokenizer) {
    free(tokenizer->bytes);
    free(tokenizer->first);
    memset(tokenizer, 0, sizeof *tokenizer);
}

// Reads a vocabulary file that is open.
static inline bool tokenizer_read(Tokenizer *tokenizer, const char *path, FILE *file, Error *error) {
    uint32_t header[TOKENIZER_HEADER_BYTES / 4];
    struct stat status;
    if (fstat(fileno(file), &status) != 0 || !S_ISREG(status.st_mode))
        return error_set(error, "%s: is not a regular file", path);
    if (fread(header, 1, sizeof header, file) != sizeof header)
        return error_set(error, "%s: is truncated: it has %lld bytes, the header of a tokenizer file alone has %d",
                         path, (long long)status.st_size, (int)TOKENIZER_HEADER_BYTES);
    if (header[0] != TOKENIZER_MAGIC)
        return error_set(error, "%s: is not a tokenizer file: its first number is %u, not %d", path, header[0],
                         (int)TOKENIZER_MAGIC);
    if (header[1] != 1 && header[1] != 2)
        return error_set(error, "%s: is a tokenizer file of version %u; versions 1 and 2 are known", path, header[1]);
    if (header[2] < 1 || header[2] > TOKENIZER_MAX_VOCAB)
        return error_set(error, "%s: its header says that it holds %u tokens; 1 to %d are possible", path, header[2],
                         (int)TOKENIZER_MAX_VOCAB);
    uint32_t end = header[1] == 1 ? (uint32_t)TOKENIZER_VERSION_1_END : header[3];
    if (end >= header[2])
        return error_set(error, "%s: its end-of-text token is %u, but it holds only %u tokens", path, end, header[2]);
    // Read as a whole: a length byte and at least one byte a token.
    int64_t body = (int64_t)status.st_size - TOKENIZER_HEADER_BYTES, vocab = (int64_t)header[2];
    if (body < 2 * vocab || body > 256 * vocab)
        return error_set(error,
                         "%s: is truncated or foreign: %lld tokens take %lld to %lld bytes after the header, "
                         "but it has %lld",
                         path, (long long)vocab, (long long)(2 * vocab), (long long)(256 * vocab), (long long)body);
    tokenizer->bytes = (unsigned char *)malloc((size_t)body);
    tokenizer->first = (uint32_t *)malloc(((size_t)vocab + 1) * sizeof(uint32_t));
    if (tokenizer->bytes == NULL || tokenizer->first == NULL)
        die("no memory for the %lld bytes of %s", (long long)body, path);
    if (fread(tokenizer->bytes, 1, (size_t)body, file) != (size_t)body)
        return error_set(error, "%s: cannot be read to its end: %s", path,
                         ferror(file) ? strerror(errno) : "it was truncated meanwhile");
    // Squeeze the length bytes out in place; `out` never overtakes `in`.
    int64_t in = 0, out = 0;
    for (int64_t token = 0; token < vocab; token++) {
        int64_t length = in < body ? tokenizer->bytes[in] : 0;
        if (in >= body || in + 1 + length > body)
            return error_set(error, "%s: is truncated: it ends inside token %lld of %lld", path, (long long)token,
                             (long long)vocab);
        if (length == 0) return error_set(error, "%s: token %lld is empty", path, (long long)token);
        tokenizer->first[token] = (uint32_t)out;
        memmove(tokenizer->bytes + out, tokenizer->bytes + in + 1, (size_t)length);
        in += 1 + length;
        out += length;
    }
    if (in != body)
        return error_set(error, "%s: is foreign: %lld bytes follow its last token", path, (long long)(body - in));
    tokenizer->first[vocab] = (uint32_t)out;
    tokenizer->vocab_size = (int)vocab;
    tokenizer->start = (int)end;
    return true;
}

// Opens a vocabulary file, or bytes if path is "". On an error nothing remains open.
static inline bool tokenizer_open(Tokenizer *tokenizer, const char *path, Error *error) {
    memset(tokenizer, 0, sizeof *tokenizer);
    if (path[0] == '\0') {
        tokenizer->vocab_size = 256;
        tokenizer->start = '\n';
        return true;
    }
    // stat before open: opening a pipe would wait for its writer.
    struct stat status;
    if (stat(path, &status) != 0) return error_set(error, "%s: cannot be read: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        return error_set(error, "%s: is %s", path, S_ISDIR(status.st_mode) ? "a directory" : "not a regular file");
    FILE *file = fopen(path, "rb");
    if (file == NULL) return error_set(error, "%s: cannot be read: %s", path, strerror(errno));
    bool ok = tokenizer_read(tokenizer, path, file, error);
    fclose(file);
    if (!ok) tokenizer_close(tokenizer);
    return ok;
}

// The text of a token, zero-terminated: its bytes, with control characters other than newline and tab shown as \xNN so
// that a sample cannot drive the terminal. A token beyond the vocabulary is shown as its number: <50300>. Returns the
// length. A token may hold a part of a UTF-8 character, so only a whole sample need be valid UTF-8.
static inline int tokenizer_decode(const Tokenizer *tokenizer, int token, char text[TOKENIZER_TEXT_MAX]) {
    if (token < 0 || token >= tokenizer->vocab_size) return snprintf(text, TOKENIZER_TEXT_MAX, "<%d>", token);
    unsigned char byte = (unsigned char)token;
    const unsigned char *bytes = &byte;
    uint32_t count = 1;
    if (tokenizer->bytes != NULL) {
        bytes = tokenizer->bytes + tokenizer->first[token];
        count = tokenizer->first[token + 1] - tokenizer->first[token];
    }
    int length = 0;
    for (uint32_t i = 0; i < count; i++) {
        unsigned char c = bytes[i];
        bool control = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f;
        if (control)
            length += snprintf(text + length, (size_t)(TOKENIZER_TEXT_MAX - length), "\\x%02x", c);
        else
            text[length++] = (char)c;
    }
    text[length] = '\0';
    return length;
}

// Prints tokens as text.
static inline void tokenizer_print(const Tokenizer *tokenizer, const int *tokens, int count, FILE *out) {
    char text[TOKENIZER_TEXT_MAX];
    for (int i = 0; i < count; i++) fwrite(text, 1, (size_t)tokenizer_decode(tokenizer, tokens[i], text), out);
}

// Encodes a prompt into at most `capacity` tokens; the number of them goes to count. An empty prompt is the start
// token. Fails if the prompt is too long, or holds a byte that no token of the vocabulary spells.
static inline bool tokenizer_encode_prompt(const Tokenizer *tokenizer, const char *prompt, int *tokens, int capacity,
                                           int *count, Error *error) {
    size_t length = strlen(prompt), at = 0;
    *count = 0;
    if (length == 0 && capacity > 0) tokens[(*count)++] = tokenizer->start;
    while (at < length) {
        if (*count == capacity) return error_set(error, "the prompt is longer than %d tokens", capacity);
        int best = -1;
        size_t best_length = 0;
        if (tokenizer->bytes == NULL) {
            best = (unsigned char)prompt[at];
            best_length = 1;
        } else {
            for (int token = 0; token < tokenizer->vocab_size; token++) {
                const unsigned char *bytes = tokenizer->bytes + tokenizer->first[token];
                size_t size = tokenizer->first[token + 1] - tokenizer->first[token];
                if (size > best_length && size <= length - at && memcmp(bytes, prompt + at, size) == 0) {
                    best = token;
                    best_length = size;
                }
            }
        }
        if (best < 0)
            return error_set(error, "the vocabulary has no token for byte 0x%02x of the prompt",
                             (unsigned char)prompt[at]);
        tokens[(*count)++] = best;
        at += best_length;
    }
    return true;
}

// A float as an integer of the same order; NaN below everything, so that it is never drawn.
static inline uint32_t sample_rank(float x) {
    uint32_t bits;
    if (x != x) return 0;
    memcpy(&bits, &x, 4);
    return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

// The smallest rank among the k largest of V logits, by bisection over all ranks: exact, and needs no memory.
static inline uint32_t sample_threshold(const float *logits, int V, int k) {
    uint32_t threshold = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t raised = threshold | (1u << bit);
        int count = 0;
        for (int i = 0; i < V; i++) count += sample_rank(logits[i]) >= raised;
        if (count >= k) threshold = raised;
    }
    return threshold;
}

// Draws a token from softmax(logits / temperature) over the top_k largest of V logits (0: all; logits equal to the
// k-th take part too). Temperature 0 takes the largest, the first if there are several. The draw is number `index` of
// the key, so every rank that has the logits draws the same.
static inline int sample_token(const float *logits, int V, double temperature, int top_k, uint64_t key,
                               uint64_t index) {
    int largest = 0;
    for (int i = 1; i < V; i++)
        if (sample_rank(logits[i]) > sample_rank(logits[largest])) largest = i;
    if (!(temperature > 0.0)) return largest;

    uint32_t threshold = top_k > 0 && top_k < V ? sample_threshold(logits, V, top_k) : 1;
    if (threshold < 1) threshold = 1; // NaN has rank 0
    double max = (double)logits[largest], total = 0.0, below = 0.0;
    Random4 random = random4(key, index);
    double uniform = ((double)(((uint64_t)random.word[0] << 20) | (random.word[1] >> 12)) + 0.5) * 0x1p-52;
    // Twice the same sum: first for the total, then up to the place where the draw falls.
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < V; i++) {
            if (sample_rank(logits[i]) < threshold) continue;
            double weight = logits[i] == logits[largest] ? 1.0 : exp(((double)logits[i] - max) / temperature);
            if (pass == 0) {
                total += weight;
            } else {
                below += weight;
                if (below > uniform * total) return i;
            }
        }
    }
    return largest; // no logit is a number, or the draw was rounded up to the total
}

#endif
