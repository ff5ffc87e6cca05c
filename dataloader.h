// dataloader.h: token shards and text -> batches.
//
// A data set is one file or the files that match a pattern. `*.bin` is a token shard as llm.c writes it: a header of
// 256 int32 (magic, version, number of tokens), then the tokens, uint16 (magic 20240520, version 1) or uint32 (magic
// 20240801, version 7). Anything else is text, read as bytes: a vocabulary of 256.
//
// A window is sequence_length inputs and, one later, as many targets; it never crosses from one file into the next.
//  - Loader: batches for training. An epoch visits every window once, in a shuffled order that depends on the seed
//    alone; which windows make a step does not depend on how ranks and micro-batches share it. Any step can be asked
//    for at any time, and the batch that follows is read ahead by a thread.
//  - Validation: every target of every file once, in order; what does not fill a window or a batch is masked.
//
// Files are untrusted: whatever is wrong with one is an Error that names it; nothing here exits or maps memory (a file
// that is cut while mapped would end the run by SIGBUS). A Dataset is not changed after it is opened, so any number of
// loaders may share it.
#ifndef DATALOADER_H
#define DATALOADER_H

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include "error.h"
#include "random.h"

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
    size_t head_bytes = shard->bytes < SHARD_HEADER_BYTES ? (size_t)shard->bytes : SHARD_HEADER_BYTES;
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

// ---------------------------------------------------------------------------------------------------------------------
// Order: which window is where in the run

// Element `index` of a pseudorandom permutation of [0, count), by nothing but arithmetic: a balanced Feistel network
// permutes the next power of four; whoever lands beyond count is permuted again until it does not ("cycle walking",
// Black and Rogaway: "Ciphers with arbitrary finite domains", CT-RSA 2002).
static inline int64_t permute(uint64_t key, int64_t count, int64_t index) {
    int half_bits = 0;
    while (((int64_t)1 << (2 * half_bits)) < count) half_bits++;
    uint64_t mask = ((uint64_t)1 << half_bits) - 1, x = (uint64_t)index;
    do {
        uint64_t left = x >> half_bits, right = x & mask;
        for (uint64_t round = 0; round < 8; round++) {
            uint64_t mixed = left ^ (random_mix(key + round * 0x9e3779b97f4a7c15ull + right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half_bits | right;
    } while (x >= (uint64_t)count);
    return (int64_t)x;
}

// The run is one sequence of positions: step s has positions [s*W, (s+1)*W), epoch e has [e*n, (e+1)*n) for n windows.
// An epoch is a permutation. Where a step straddles two epochs, windows that the end of the old one has already put
// into the step are exchanged with later ones of the new, so that a step never holds a window twice.
typedef struct {
    uint64_t seed;
    int64_t windows;  // n: in an epoch
    int64_t per_step; // W <= n

    int64_t epoch;         // the rest is for this epoch; -1: none yet
    uint64_t key;          // of its permutation
    int64_t *tail;         // (W) windows of the epoch before in the step that straddles, sorted
    int64_t *early, *late; // (W) index early[i] of this epoch is exchanged with index late[i]; both ascend
    int64_t exchanges;
} WindowOrder;

// Fails if the data set has fewer windows than one step takes.
static inline bool order_open(WindowOrder *order, const Windows *windows, int64_t per_step, uint64_t seed,
                              Error *error) {
    memset(order, 0, sizeof *order);
    if (windows->count < per_step)
        return error_set(error,
                         "%s%s: is shorter than one batch: its %lld tokens make %lld sequences of %d, but a step takes "
                         "%lld: at least %lld tokens",
                         windows->data->shards[0].path, windows->data->count > 1 ? ", ..." : "",
                         (long long)windows->data->tokens, (long long)windows->count, windows->length,
                         (long long)per_step, (long long)(per_step * windows->length + 1));
    order->seed = seed;
    order->windows = windows->count;
    order->per_step = per_step;
    order->epoch = -1;
    order->tail = (int64_t *)data_alloc((size_t)per_step, sizeof(int64_t));
    order->early = (int64_t *)data_alloc((size_t)per_step, sizeof(int64_t));
    order->late = (int64_t *)data_alloc((size_t)per_step, sizeof(int64_t));
    return true;
}

static inline void order_close(WindowOrder *order) {
    free(order->tail);
    free(order->early);
    free(order->late);
    memset(order, 0, sizeof *order);
}

static inline int order_compare(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

// The place of a value in a sorted list, or -1.
static inline int64_t order_find(const int64_t *sorted, int64_t count, int64_t value) {
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (sorted[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && sorted[low] == value ? low : -1;
}

// With fewer windows than two steps take, every epoch has the same order: W <= n neighbours in the endless repetition
// of one permutation are distinct, and steps that hold more than half of all windows leave little to shuffle.
static inline uint64_t order_key(const WindowOrder *order, int64_t epoch) {
    if (order->windows < 2 * order->per_step) epoch = 0;
    return random_key(order->seed, RANDOM_SHUFFLE, (uint64_t)epoch, 0);
}

// Lists the exchanges of an epoch. Let the straddling step hold `tail` windows of the epoch before and `head` of this
// one, c of them in both. After the head come n - W + c windows that are not in the tail; of n >= 2W these are at least
// W + c, and fewer than W of them can stand among the indices that the *next* straddling step takes. So c of them are
// found before those: an epoch's exchanges never touch its own tail, which is why the tail of the epoch before is
// known without its exchanges, and any epoch without the ones before it.
static inline void order_begin_epoch(WindowOrder *order, int64_t epoch) {
    int64_t n = order->windows, tail = epoch * n % order->per_step, head = order->per_step - tail;
    order->epoch = epoch;
    order->key = order_key(order, epoch);
    order->exchanges = 0;
    if (tail == 0 || n < 2 * order->per_step) return;
    uint64_t before = order_key(order, epoch - 1);
    for (int64_t i = 0; i < tail; i++) order->tail[i] = permute(before, n, n - tail + i);
    qsort(order->tail, (size_t)tail, sizeof(int64_t), order_compare);
    int64_t late = head;
    for (int64_t early = 0; early < head; early++) {
        if (order_find(order->tail, tail, permute(order->key, n, early)) < 0) continue;
        while (order_find(order->tail, tail, permute(order->key, n, late)) >= 0) late++;
        order->early[order->exchanges] = early;
        order->late[order->exchanges++] = late++;
    }
}

// The window of sample j of a step, 0 <= j < W.
static inline int64_t order_window(WindowOrder *order, int64_t step, int64_t sample) {
    int64_t position = step * order->per_step + sample;
    int64_t epoch = position / order->windows, index = position % order->windows;
    if (epoch != order->epoch) order_begin_epoch(order, epoch);
    int64_t early = order_find(order->early, order->exchanges, index);
    int64_t late = order_find(order->late, order->exchanges, index);
    if (early >= 0) index = order->late[early];
    if (late >= 0) index = order->early[late];
    return permute(order->key, order->windows, index);
}

// ---------------------------------------------------------------------------------------------------------------------
// Loader: batches for training

typedef struct {
    int64_t step;
    int micro;    // which batch this is
    int *inputs;  // (B, T)
    int *targets; // (B, T)
    Error error;  // not empty: the batch could not be read
} LoaderBatch;

// One batch is with the caller, the other is being read or waits to be asked for. Must not be moved while open.
typedef struct {
    Windows windows;
    WindowReader reader;
    WindowOrder order;
    int micro_batch;   // B: rows of a batch
    int micro_batches; // of a step
    int rank, ranks;   // data-parallel

    LoaderBatch batch[2];
    int current; // the one that the caller has
    bool asked;  // batch[1 - current] names a batch: it is being read, or has been

    pthread_t thread;
    pthread_mutex_t lock; // guards `reading` and `stop`; a batch belongs to the thread while `reading` is its number
    pthread_cond_t changed;
    int reading; // -1: the thread is idle
    bool stop;
    bool open;
} Loader;

// Sample (micro * D + rank) * B + b of the step is row b: so a step is the same set of windows, in the same order, for
// any number of ranks and micro-batches.
static inline void loader_fill(Loader *loader, LoaderBatch *batch) {
    batch->error.text[0] = '\0';
    int length = loader->windows.length;
    int64_t first = ((int64_t)batch->micro * loader->ranks + loader->rank) * loader->micro_batch;
    for (int b = 0; b < loader->micro_batch; b++) {
        int64_t window = order_window(&loader->order, batch->step, first + b);
        if (!reader_read(&loader->reader, window, batch->inputs + (int64_t)b * length,
                         batch->targets + (int64_t)b * length, &batch->error))
            return;
    }
}

static inline void *loader_thread(void *argument) {
    Loader *loader = (Loader *)argument;
    pthread_mutex_lock(&loader->lock);
    while (!loader->stop) {
        if (loader->reading < 0) {
            pthread_cond_wait(&loader->changed, &loader->lock);
            continue;
        }
        LoaderBatch *batch = &loader->batch[loader->reading];
        pthread_mutex_unlock(&loader->lock);
        loader_fill(loader, batch);
        pthread_mutex_lock(&loader->lock);
        loader->reading = -1;
        pthread_cond_broadcast(&loader->changed);
    }
    pthread_mutex_unlock(&loader->lock);
    return NULL;
}

static inline void loader_close(Loader *loader) {
    if (loader->open) {
        pthread_mutex_lock(&loader->lock);
        loader->stop = true;
        pthread_cond_broadcast(&loader->changed);
        pthread_mutex_unlock(&loader->lock);
        pthread_join(loader->thread, NULL);
        pthread_cond_destroy(&loader->changed);
        pthread_mutex_destroy(&loader->lock);
    }
    for (int i = 0; i < 2; i++) {
        free(loader->batch[i].inputs);
        free(loader->batch[i].targets);
    }
    order_close(&loader->order);
    reader_close(&loader->reader);
    windows_close(&loader->windows);
    memset(loader, 0, sizeof *loader);
}

// Batches of micro_batch (B) windows of sequence_length (T), micro_batches of them a step, for `rank` of `ranks`
// data-parallel ranks. `data` must outlive the loader. Fails if the data set is shorter than one step.
static inline bool loader_open(Loader *loader, const Dataset *data, int sequence_length, int micro_batch,
                               int micro_batches, int rank, int ranks, uint64_t seed, int vocab_size, Error *error) {
    memset(loader, 0, sizeof *loader);
    loader->micro_batch = micro_batch;
    loader->micro_batches = micro_batches;
    loader->rank = rank;
    loader->ranks = ranks;
    windows_open(&loader->windows, data, sequence_length, false);
    if (!order_open(&loader->order, &loader->windows, (int64_t)micro_batch * micro_batches * ranks, seed, error)) {
        loader_close(loader);
        return false;
    }
    reader_open(&loader->reader, &loader->windows, vocab_size);
    for (int i = 0; i < 2; i++) {
        loader->batch[i].inputs = (int *)data_alloc((size_t)micro_batch * (size_t)sequence_length, sizeof(int));
        loader->batch[i].targets = (int *)data_alloc((size_t)micro_batch * (size_t)sequence_length, sizeof(int));
    }
    loader->reading = -1;
    pthread_mutex_init(&loader->lock, NULL);
    pthread_cond_init(&loader->changed, NULL);
    // The thread takes no signals: they are for the thread that trains.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&loader->thread, NULL, loader_thread, loader);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0) die("the thread that reads data cannot be started: %s", strerror(status));
    loader->open = true;
    return true;
}

// Gives batch[1 - current] to the thread, to be filled with a batch. Called with the lock held and the thread idle.
static inline void loader_ask(Loader *loader, int64_t step, int micro) {
    LoaderBatch *batch = &loader->batch[1 - loader->current];
    batch->step = step;
    batch->micro = micro;
    loader->asked = true;
    loader->reading = 1 - loader->current;
    pthread_cond_broadcast(&loader->changed);
}

static inline void loader_wait(Loader *loader) {
    while (loader->reading >= 0) pthread_cond_wait(&loader->changed, &loader->lock);
}

// Micro-batch `micro` of a step: inputs and targets, (B, T) each, valid until the next call. Any batch may be asked
// for; in order (micro by micro, then the next step) each has been read ahead.
static inline bool loader_read(Loader *loader, int64_t step, int micro, const int **inputs, const int **targets,
                               Error *error) {
    pthread_mutex_lock(&loader->lock);
    loader_wait(loader);
    const LoaderBatch *ahead = &loader->batch[1 - loader->current];
    if (!loader->asked || ahead->step != step || ahead->micro != micro) {
        loader_ask(loader, step, micro);
        loader_wait(loader);
    }
    loader->asked = false;
    bool ok = ahead->error.text[0] == '\0';
    if (ok) {
        loader->current = 1 - loader->current;
        bool last = micro + 1 == loader->micro_batches;
        loader_ask(loader, last ? step + 1 : step, last ? 0 : micro + 1);
    }
    pthread_mutex_unlock(&loader->lock);
    if (!ok) return error_set(error, "%s", ahead->error.text);
    *inputs = ahead->inputs;
    *targets = ahead->targets;
    return true;
}

// Reads and checks all windows of a step of `windows_per_step` (the global batch) without a loader: used on the first
// step before anything is written.
static inline bool loader_check_step(const Dataset *data, int sequence_length, int64_t windows_per_step, uint64_t seed,
                                     int vocab_size, int64_t step, Error *error) {
    Windows windows;
    WindowOrder order;
    windows_open(&windows, data, sequence_length, false);
    bool ok = order_open(&order, &windows, windows_per_step, seed, error);
    if (ok) {
        WindowReader reader;
        reader_open(&reader, &windows, vocab_size);
        int *tokens = (int *)data_alloc(2 * (size_t)sequence_length, sizeof(int));
        for (int64_t j = 0; j < windows_per_step && ok; j++)
            ok = reader_read(&reader, order_window(&order, step, j), tokens, tokens + sequence_length, error);
        free(tokens);
        reader_close(&reader);
        order_close(&order);
    }
    windows_close(&windows);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// Validation: the whole split, in order

typedef struct {
    Windows windows; // the last, partial ones of each shard too
    WindowReader reader;
    int micro_batch; // B: rows of a batch
    int rank, ranks; // data-parallel
    int64_t batches; // of every rank
    int64_t tokens;  // targets that are not masked, in all batches of all ranks
    int *inputs;     // (B, T)
    int *targets;    // (B, T)
} Validation;

static inline void validation_close(Validation *validation) {
    free(validation->inputs);
    free(validation->targets);
    reader_close(&validation->reader);
    windows_close(&validation->windows);
    memset(validation, 0, sizeof *validation);
}

// Reads every window of the data set, or those of the first val_steps batches if that is not 0. `data` must outlive
// it. Fails if no file holds one whole window.
static inline bool validation_open(Validation *validation, const Dataset *data, int sequence_length, int micro_batch,
                                   int64_t val_steps, int rank, int ranks, int vocab_size, Error *error) {
    memset(validation, 0, sizeof *validation);
    int64_t longest = 0;
    for (int i = 0; i < data->count; i++)
        if (data->shards[i].tokens > longest) longest = data->shards[i].tokens;
    if (longest < (int64_t)sequence_length + 1)
        return error_set(error, "%s: is too short: it has %lld tokens, a sequence of %d and its targets take %d",
                         data->shards[0].path, (long long)longest, sequence_length, sequence_length + 1);
    validation->micro_batch = micro_batch;
    validation->rank = rank;
    validation->ranks = ranks;
    windows_open(&validation->windows, data, sequence_length, true);
    reader_open(&validation->reader, &validation->windows, vocab_size);
    int64_t per_batch = (int64_t)micro_batch * ranks;
    validation->batches = (validation->windows.count + per_batch - 1) / per_batch;
    if (val_steps > 0 && val_steps < validation->batches) validation->batches = val_steps;

    int64_t end = validation->batches * per_batch; // of the windows read
    for (int i = 0; i < data->count; i++) {
        int64_t targets = data->shards[i].tokens - 1, before = validation->windows.first[i];
        int64_t room = end > before ? (end - before) * sequence_length : 0;
        validation->tokens += targets < room ? targets : room;
    }
    validation->inputs = (int *)data_alloc((size_t)micro_batch * (size_t)sequence_length, sizeof(int));
    validation->targets = (int *)data_alloc((size_t)micro_batch * (size_t)sequence_length, sizeof(int));
    return true;
}

// Batch k of this rank: rows b hold windows (k*D + rank)*B + b. inputs and targets, (B, T) each, are valid until the
// next call. Targets are -1 where the data has none.
static inline bool validation_read(Validation *validation, int64_t batch, const int **inputs, const int **targets,
                                   Error *error) {
    int length = validation->windows.length;
    int64_t first = (batch * validation->ranks + validation->rank) * validation->micro_batch;
    for (int b = 0; b < validation->micro_batch; b++)
        if (!reader_read(&validation->reader, first + b, validation->inputs + (int64_t)b * length,
                         validation->targets + (int64_t)b * length, error))
            return false;
    *inputs = validation->inputs;
    *targets = validation->targets;
    return true;
}

#endif
