// dataloader.h: token shards and text -> batches.
//
//  - Loader: batches for training. An epoch visits every window once, in a shuffled order that depends on the seed
//    alone; which windows make a step does not depend on how ranks and micro-batches share it. Any step can be asked
//    for at any time, and the batch that follows is read ahead by a thread.
//  - Validation: every target of every file once, in order; what does not fill a window or a batch is masked.
//
// No global state: several loaders may work at once, on one Dataset or on many. Errors in the data are returned, never
// fatal here.
#ifndef DATALOADER_H
#define DATALOADER_H

#include <pthread.h>
#include <signal.h>
#include "dataset.h"
#include "random.h"

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

// Must not be moved while open.
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

// Reads every window of the data set, or the first max_windows if that is not 0: the same windows however they fall
// into batches and ranks. `data` must outlive it. Fails if no file holds one whole window.
static inline bool validation_open(Validation *validation, const Dataset *data, int sequence_length, int micro_batch,
                                   int64_t max_windows, int rank, int ranks, int vocab_size, Error *error) {
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
    if (max_windows > 0 && max_windows < validation->windows.count) validation->windows.count = max_windows;
    int64_t per_batch = (int64_t)micro_batch * ranks, end = validation->windows.count;
    validation->batches = (end + per_batch - 1) / per_batch;
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
