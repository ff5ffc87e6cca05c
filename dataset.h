// dataset.h: token shards and text files, and the windows in them.
//
// A data set is one file or the files that match a pattern. `*.bin` is a token shard as llm.c writes it: a header of
// 256 int32 (magic, version, number of tokens), then the tokens, uint16 (magic 20240520, version 1) or uint32 (magic
// 20240801, version 7). Anything else is text, read as bytes: a vocabulary of 256.
//
// A window is sequence_length inputs and, one later, as many targets; it never crosses from one file into the next.
//
// Files are untrusted: whatever is wrong with one is an Error that names it; nothing here exits or maps memory (a file
// that is cut while mapped would end the run by SIGBUS). A Dataset is not changed after it is opened, so any number of
// threads may read it, each with a WindowReader of its own.
#ifndef DATASET_H
#define DATASET_H

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include "checksum.h"
#include "error.h"

// ---------------------------------------------------------------------------------------------------------------------
// Data sets

enum {
    SHARD_HEADER_INTS = 256,
    SHARD_HEADER_BYTES = 256 * 4,
    SHARD_MAGIC_UINT16 = 20240520,
    SHARD_VERSION_UINT16 = 1,
    SHARD_MAGIC_UINT32 = 20240801,
    SHARD_VERSION_UINT32 = 7,
};

typedef struct {
    char *path;
    int64_t bytes;  // size of the file when it was opened
    int64_t tokens; // that it holds
} Shard;

typedef struct {
    Shard *shards; // sorted by name
    int count;
    int token_bytes;      // of one token in the files: 1 (text), 2 or 4
    int64_t header_bytes; // before the first token
    int64_t tokens;       // in all shards
} Dataset;

static inline void *data_alloc(size_t count, size_t size) {
    void *pointer = calloc(count > 0 ? count : 1, size);
    if (pointer == NULL) die("no memory for %zu x %zu bytes of data", count, size);
    return pointer;
}

static inline const char *token_bytes_name(int token_bytes) {
    return token_bytes == 1 ? "text" : token_bytes == 2 ? "uint16 tokens" : "uint32 tokens";
}

// Reads `bytes` bytes at `offset`, or says where the file ended.
static inline bool shard_pread(int fd, const Shard *shard, void *out, size_t bytes, int64_t offset, Error *error) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t got = pread(fd, (char *)out + done, bytes - done, (off_t)(offset + (int64_t)done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return error_set(error, "%s: reading %zu bytes at byte %lld failed: %s", shard->path, bytes - done,
                             (long long)(offset + (int64_t)done), strerror(errno));
        if (got == 0)
            return error_set(error, "%s: ends at byte %lld, but had %lld bytes when it was opened", shard->path,
                             (long long)(offset + (int64_t)done), (long long)shard->bytes);
        done += (size_t)got;
    }
    return true;
}

// Opens a shard's file; -1 and an error if it cannot be, or if it is no longer the file that the shard was read from.
static inline int shard_open(const Shard *shard, Error *error) {
    int fd = open(shard->path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) {
        error_set(error, "%s: cannot be read: %s", shard->path, strerror(errno));
    } else if ((int64_t)status.st_size != shard->bytes) {
        error_set(error, "%s: has %lld bytes, but had %lld when it was opened", shard->path, (long long)status.st_size,
                  (long long)shard->bytes);
    } else {
        return fd;
    }
    if (fd >= 0) close(fd);
    return -1;
}

// Reads what a header says; fills the width and the number of tokens.
static inline bool shard_read_header(const Shard *shard, const int32_t *header, int *token_bytes, int64_t *tokens,
                                     Error *error) {
    uint32_t magic = (uint32_t)header[0], swapped = __builtin_bswap32(magic);
    if (swapped == SHARD_MAGIC_UINT16 || swapped == SHARD_MAGIC_UINT32)
        return error_set(error, "%s: is a token shard in the other byte order; write it little-endian", shard->path);
    if (magic != SHARD_MAGIC_UINT16 && magic != SHARD_MAGIC_UINT32)
        return error_set(error,
                         "%s: is not a token shard: its first number is %u, not %d (uint16 tokens) or %d (uint32 "
                         "tokens); text must not be named *.bin",
                         shard->path, magic, SHARD_MAGIC_UINT16, SHARD_MAGIC_UINT32);
    int version = magic == SHARD_MAGIC_UINT16 ? SHARD_VERSION_UINT16 : SHARD_VERSION_UINT32;
    if (header[1] != version)
        return error_set(error, "%s: is a token shard of version %d, but with magic %u only version %d is known",
                         shard->path, header[1], magic, version);
    *token_bytes = magic == SHARD_MAGIC_UINT16 ? 2 : 4;
    *tokens = header[2];
    if (*tokens <= 0) return error_set(error, "%s: its header says that it holds %d tokens", shard->path, header[2]);
    int64_t expected = SHARD_HEADER_BYTES + *tokens * *token_bytes;
    if (shard->bytes != expected)
        return error_set(error, "%s: is %s: its header says %lld tokens, so %lld bytes, but it has %lld", shard->path,
                         shard->bytes < expected ? "truncated" : "foreign", (long long)*tokens, (long long)expected,
                         (long long)shard->bytes);
    return true;
}

// Looks at one file: is it text or a shard, and how many tokens does it hold?
static inline bool shard_inspect(Shard *shard, int *token_bytes, Error *error) {
    // stat before open: opening a pipe would wait for its writer.
    struct stat status;
    if (stat(shard->path, &status) != 0)
        return error_set(error, "%s: cannot be read: %s", shard->path, strerror(errno));
    if (S_ISDIR(status.st_mode))
        return error_set(error, "%s: is a directory; name a file, or files by a pattern such as '%s/*.bin'",
                         shard->path, shard->path);
    if (!S_ISREG(status.st_mode)) return error_set(error, "%s: is not a regular file", shard->path);
    shard->bytes = (int64_t)status.st_size;
    if (shard->bytes == 0) return error_set(error, "%s: is empty", shard->path);
    int fd = shard_open(shard, error);
    if (fd < 0) return false;

    int32_t header[SHARD_HEADER_INTS] = {0};
    size_t length = strlen(shard->path);
    bool named_bin = length >= 4 && strcmp(shard->path + length - 4, ".bin") == 0;
    size_t head_bytes = shard->bytes < (int64_t)sizeof header ? (size_t)shard->bytes : sizeof header;
    bool ok = shard_pread(fd, shard, header, head_bytes, 0, error);
    close(fd);
    if (!ok) return false;
    if (named_bin) {
        if (shard->bytes < SHARD_HEADER_BYTES)
            return error_set(error, "%s: is truncated: it has %lld bytes, the header of a token shard alone has %d",
                             shard->path, (long long)shard->bytes, SHARD_HEADER_BYTES);
        return shard_read_header(shard, header, token_bytes, &shard->tokens, error);
    }
    // A shard under another name would train on the bytes of its tokens and look almost right.
    if (header[0] == SHARD_MAGIC_UINT16 || header[0] == SHARD_MAGIC_UINT32)
        return error_set(error, "%s: is a token shard, but is not named *.bin, so it would be read as text",
                         shard->path);
    *token_bytes = 1;
    shard->tokens = shard->bytes;
    return true;
}

static inline void dataset_close(Dataset *data) {
    for (int i = 0; i < data->count; i++) free(data->shards[i].path);
    free(data->shards);
    memset(data, 0, sizeof *data);
}

// Opens a file, or all files that match a pattern of glob(7). On an error nothing remains open.
static inline bool dataset_open(Dataset *data, const char *pattern, Error *error) {
    memset(data, 0, sizeof *data);
    if (pattern[0] == '\0') return error_set(error, "no data file is named");
    // A file that is really named `a[1].txt` is meant by that name, so the pattern is tried as a name first.
    struct stat status;
    glob_t found;
    memset(&found, 0, sizeof found);
    bool named = stat(pattern, &status) == 0;
    if (!named && strpbrk(pattern, "*?[") == NULL)
        return error_set(error, "%s: cannot be read: %s", pattern, strerror(errno));
    if (!named && glob(pattern, 0, NULL, &found) != 0) {
        globfree(&found);
        return error_set(error, "%s: no file matches this pattern", pattern);
    }
    int count = named ? 1 : (int)found.gl_pathc;
    data->shards = (Shard *)data_alloc((size_t)count, sizeof(Shard));
    for (int i = 0; i < count; i++) {
        data->shards[i].path = strdup(named ? pattern : found.gl_pathv[i]);
        if (data->shards[i].path == NULL) die("no memory for the names of %d data files", count);
    }
    data->count = count;
    globfree(&found);

    bool ok = true;
    for (int i = 0; i < count && ok; i++) {
        Shard *shard = &data->shards[i];
        int token_bytes = 0;
        ok = shard_inspect(shard, &token_bytes, error);
        if (!ok) break;
        if (i > 0 && token_bytes != data->token_bytes)
            ok = error_set(error, "%s holds %s, but %s holds %s: the files of one data set must be of one kind",
                           shard->path, token_bytes_name(token_bytes), data->shards[0].path,
                           token_bytes_name(data->token_bytes));
        data->token_bytes = token_bytes;
        data->tokens += shard->tokens;
    }
    data->header_bytes = data->token_bytes == 1 ? 0 : SHARD_HEADER_BYTES;
    if (!ok) dataset_close(data);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// What a data set is known by: its content, not its names

typedef struct {
    uint64_t bytes, hash;
} DatasetIdentity;

enum {
    IDENTITY_SAMPLE = 1 << 16, // bytes
    IDENTITY_SAMPLES = 128,    // of a file; one that has no more than these is read as a whole: 8 MB
};

// The size of all files, and a checksum of them in their order: of each its size and its content; of a file above 8 MB
// 128 samples of 64 KB, evenly spread from its first byte to its last.
static inline bool dataset_identify(const Dataset *data, DatasetIdentity *identity, Error *error) {
    char *sample = (char *)data_alloc(1, IDENTITY_SAMPLE);
    Checksum sum;
    bool ok = true;
    checksum_begin(&sum);
    identity->bytes = 0;
    for (int i = 0; i < data->count && ok; i++) {
        const Shard *shard = &data->shards[i];
        const int fd = shard_open(shard, error);
        ok = fd >= 0;
        identity->bytes += (uint64_t)shard->bytes;
        checksum_add(&sum, &shard->bytes, sizeof shard->bytes);
        const int64_t all = (shard->bytes + IDENTITY_SAMPLE - 1) / IDENTITY_SAMPLE,
                      last = shard->bytes - IDENTITY_SAMPLE;
        for (int64_t k = 0; k < all && k < IDENTITY_SAMPLES && ok; k++) {
            const bool whole = all <= IDENTITY_SAMPLES;
            const int64_t first = whole ? k * IDENTITY_SAMPLE : last / (IDENTITY_SAMPLES - 1) * k;
            const int64_t at = !whole && k == IDENTITY_SAMPLES - 1 ? last : first, left = shard->bytes - at;
            const size_t count = left < IDENTITY_SAMPLE ? (size_t)left : (size_t)IDENTITY_SAMPLE;
            ok = shard_pread(fd, shard, sample, count, at, error);
            if (ok) checksum_add(&sum, sample, count);
        }
        if (fd >= 0) close(fd);
    }
    identity->hash = checksum_value(&sum);
    free(sample);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// Windows: where the samples are

typedef struct {
    const Dataset *data;
    int length;     // T: inputs of a window
    int64_t count;  // in all shards
    int64_t *first; // (shards + 1) the number of each shard's first window
} Windows;

// Window w of a shard of n tokens has inputs [w*T, w*T + T) and targets one later: there are (n-1)/T whole windows;
// `partial` counts the last, unfilled one too.
static inline void windows_open(Windows *windows, const Dataset *data, int length, bool partial) {
    windows->data = data;
    windows->length = length;
    windows->first = (int64_t *)data_alloc((size_t)data->count + 1, sizeof(int64_t));
    for (int i = 0; i < data->count; i++) {
        int64_t targets = data->shards[i].tokens - 1;
        windows->first[i + 1] = windows->first[i] + (targets + (partial ? length - 1 : 0)) / length;
    }
    windows->count = windows->first[data->count];
}

static inline void windows_close(Windows *windows) {
    free(windows->first);
    windows->first = NULL;
}

// The shard that holds a window, and the position of its first token there.
static inline int windows_locate(const Windows *windows, int64_t window, int64_t *token) {
    int low = 0, high = windows->data->count; // first[low] <= window < first[high]
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (windows->first[middle] <= window)
            low = middle;
        else
            high = middle;
    }
    *token = (window - windows->first[low]) * windows->length;
    return low;
}

// The targets that a window has: T, or fewer in a shard's last one; 0 past the end.
static inline int windows_targets(const Windows *windows, int64_t window) {
    if (window >= windows->count) return 0;
    int64_t token;
    int shard = windows_locate(windows, window, &token);
    int64_t targets = windows->data->shards[shard].tokens - 1 - token;
    return targets < windows->length ? (int)targets : windows->length;
}

// Reads windows. Keeps some files open; a data set may have more shards than a process may have open files.
enum { READER_FILES = 64 };

typedef struct {
    const Windows *windows;
    int vocab_size;
    int shard[READER_FILES]; // what fd is open on; slot = shard % READER_FILES
    int fd[READER_FILES];    // -1: nothing
    unsigned char *raw;      // (T + 1) tokens as in the file
} WindowReader;

static inline void reader_open(WindowReader *reader, const Windows *windows, int vocab_size) {
    reader->windows = windows;
    reader->vocab_size = vocab_size;
    reader->raw = (unsigned char *)data_alloc((size_t)windows->length + 1, (size_t)windows->data->token_bytes);
    for (int i = 0; i < READER_FILES; i++) reader->fd[i] = -1;
}

static inline void reader_close(WindowReader *reader) {
    if (reader->raw == NULL) return;
    for (int i = 0; i < READER_FILES; i++)
        if (reader->fd[i] >= 0) close(reader->fd[i]);
    free(reader->raw);
    reader->raw = NULL;
}

static inline int reader_file(WindowReader *reader, int shard, Error *error) {
    int slot = shard % READER_FILES;
    if (reader->fd[slot] >= 0 && reader->shard[slot] == shard) return reader->fd[slot];
    if (reader->fd[slot] >= 0) close(reader->fd[slot]);
    reader->shard[slot] = shard;
    reader->fd[slot] = shard_open(&reader->windows->data->shards[shard], error);
    return reader->fd[slot];
}

// Reads a window: inputs (T), targets (T). Where the file has no target, the target is -1 (masked) and the input 0.
// Every token is checked against the vocabulary.
static inline bool reader_read(WindowReader *reader, int64_t window, int *inputs, int *targets, Error *error) {
    const Windows *windows = reader->windows;
    const Dataset *data = windows->data;
    int valid = windows_targets(windows, window);
    if (valid > 0) {
        int64_t first;
        int shard = windows_locate(windows, window, &first);
        int fd = reader_file(reader, shard, error);
        if (fd < 0) return false;
        int width = data->token_bytes;
        if (!shard_pread(fd, &data->shards[shard], reader->raw, ((size_t)valid + 1) * (size_t)width,
                         data->header_bytes + first * width, error))
            return false;
        for (int i = 0; i <= valid; i++) {
            uint32_t token;
            if (width == 1) {
                token = reader->raw[i];
            } else if (width == 2) {
                uint16_t narrow;
                memcpy(&narrow, reader->raw + (size_t)i * 2, 2);
                token = narrow;
            } else {
                memcpy(&token, reader->raw + (size_t)i * 4, 4);
            }
            if (token >= (uint32_t)reader->vocab_size)
                return error_set(error, "%s: token %lld is %u, but the vocabulary has %d: ids 0 to %d",
                                 data->shards[shard].path, (long long)(first + i), token, reader->vocab_size,
                                 reader->vocab_size - 1);
            if (i < valid) inputs[i] = (int)token;
            if (i > 0) targets[i - 1] = (int)token;
        }
    }
    for (int i = valid; i < windows->length; i++) {
        inputs[i] = 0;
        targets[i] = -1;
    }
    return true;
}

#endif
