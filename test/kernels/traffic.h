// traffic.h: the bytes of global memory that each operation's kernels read and write, as formulas of the shape.
//
// These are the figures that kernels/*.cuh and adamw.cuh state in their opening lines, written down a second time: the
// least that the operation can do, which is each input and output once, and what the header adds to it: partial sums,
// what every block reads again. The harness holds the emulator's counters to them, to the byte, or to the stated `most`
// more. Products are the library's business, and not counted. A function returns false where nothing is stated.
#ifndef TRAFFIC_H
#define TRAFFIC_H

#include "harness.h"

// What of a case is used everywhere.
#define AT(factor) ((size_t)c->value[factor])
#define ROWS (AT(F_B) * AT(F_T))
#define LEVEL(factor) (c->value[factor])

enum { S = sizeof(floatX), G = sizeof(gradX) };

static inline size_t divided_up(size_t a, size_t b) {
    return (a + b - 1) / b;
}

static bool state(Stated *stated, size_t read, size_t written) {
    stated->read = read;
    stated->written = written;
    return true;
}

static bool traffic_embedding_forward(const Case *c, Stated *stated) {
    if (LEVEL(F_VARIANT)) return false; // tokens that another rank holds are not read
    return state(stated, ROWS * (2 * AT(F_C) * S + 4), ROWS * AT(F_C) * S);
}

static bool traffic_wpe_backward(const Case *c, Stated *stated) {
    size_t positions = c->buffers[0].n; // of all channels
    size_t written = LEVEL(F_ACCUMULATE) ? AT(F_T) * AT(F_C) : positions;
    return state(stated, ROWS * AT(F_C) * S + (LEVEL(F_ACCUMULATE) ? written * G : 0), written * G);
}

static int by_value(const void *a, const void *b) {
    return *(const int *)a - *(const int *)b;
}

// Tokens sorted; then dout once, each token's gradient once, and a partial sum for each chunk of 64 rows that a token
// shares with another chunk. The sort and its list cost no channel, and are bounded: for each of up to three digits 20
// bytes of a row, and of each tile of 2048 rows its histogram; then the list for each tile of up to 256 channels, by
// whole warps.
static bool traffic_wte_backward(const Case *c, Stated *stated) {
    enum { CHUNK = 64, TILE = 2048, DIGITS = 256, LEAST_CHANNELS = 32, LANES = 32 };
    if (LEVEL(F_VARIANT)) return false; // gradients of tokens that another rank holds are not written
    size_t rows = ROWS, C = AT(F_C), tokens = 0, partial = 0;
    int *sorted = (int *)checked_malloc(rows * sizeof(int));
    memcpy(sorted, c->buffers[2].initial, rows * sizeof(int));
    qsort(sorted, rows, sizeof(int), by_value);
    for (size_t first = 0, end; first < rows; first = end) {
        for (end = first; end < rows && sorted[end] == sorted[first];) end++;
        size_t chunks = (end - 1) / CHUNK - first / CHUNK + 1;
        if (chunks > 1) partial += chunks;
        tokens++;
    }
    free(sorted);
    state(stated, rows * C * S + tokens * C * G + partial * C * 4, tokens * C * G + partial * C * 4);
    size_t channels = C % (16 / S) == 0 ? LEAST_CHANNELS * (16 / S) : LEAST_CHANNELS;
    size_t tiles = divided_up(rows, TILE), chunks = divided_up(rows, CHUNK), repeats = divided_up(C, channels);
    stated->most_read = 3 * (rows * 20 + tiles * tiles * DIGITS * 4) + repeats * (rows * 12 + chunks * LANES * 24);
    stated->most_written = 3 * (rows * 8 + tiles * DIGITS * 4);
    return true;
}

// A thread keeps so many accesses of a row in registers; wider rows are read again, which is not stated here.
static size_t layernorm_warps(size_t C, size_t packs_of_vectors, size_t packs_of_elements) {
    size_t warp = C % (16 / S) == 0 ? 32 * (16 / S) * packs_of_vectors : 32 * packs_of_elements;
    return divided_up(C, warp);
}
enum { LAYERNORM_MOST_WARPS = 8 };

static bool traffic_layernorm_forward(const Case *c, Stated *stated) {
    if (layernorm_warps(AT(F_C), 4, 16) > LAYERNORM_MOST_WARPS) return false;
    return state(stated, ROWS * 3 * AT(F_C) * S, ROWS * (AT(F_C) * S + 8));
}

static bool traffic_residual_layernorm_forward(const Case *c, Stated *stated) {
    if (layernorm_warps(AT(F_C), 4, 16) > LAYERNORM_MOST_WARPS) return false;
    return state(stated, ROWS * 4 * AT(F_C) * S, ROWS * (2 * AT(F_C) * S + 8));
}

// variant 1: dinp is written, not added to.
static bool traffic_layernorm_backward(const Case *c, Stated *stated) {
    enum { WARPS = 2048, BLOCK_ROWS = 8 };
    size_t C = AT(F_C), rows = ROWS, warps = layernorm_warps(C, 2, 8);
    if (warps > LAYERNORM_MOST_WARPS) return false;
    size_t block_rows = divided_up(rows, WARPS / warps);
    size_t blocks = divided_up(rows, block_rows > BLOCK_ROWS ? block_rows : BLOCK_ROWS), partial = blocks * 2 * C * 4;
    size_t read = rows * ((LEVEL(F_VARIANT) ? 2 : 3) * C * S + 8 * warps) + blocks * C * S + partial;
    return state(stated, read + (LEVEL(F_ACCUMULATE) ? 2 * C * G : 0), rows * C * S + partial + 2 * C * G);
}

static bool traffic_residual_forward(const Case *c, Stated *stated) {
    return state(stated, ROWS * AT(F_C) * 2 * S, ROWS * AT(F_C) * S);
}

static bool traffic_dropout_backward(const Case *c, Stated *stated) {
    return state(stated, ROWS * AT(F_C) * S, ROWS * AT(F_C) * S);
}

// sum over blocks of `rows` queries of the keys that they see: min(T, rows * (block + 1)); as many as the keys' blocks
// see queries, from the diagonal on, but for the last block's.
static size_t keys_seen(size_t T, size_t rows) {
    size_t sum = 0;
    for (size_t end = rows; end < T + rows; end += rows) sum += end < T ? end : T;
    return sum;
}

static size_t queries_seen(size_t T, size_t rows) {
    size_t sum = 0;
    for (size_t first = 0; first < T; first += rows) sum += T - first;
    return sum;
}

enum { ATTENTION_TILE = S == 2 ? 128 : 32 };

static bool traffic_attention_forward(const Case *c, Stated *stated) {
    size_t heads = AT(F_B) * AT(F_NH), T = AT(F_T), row = AT(F_HS) * S;
    return state(stated, heads * (T * row + 2 * row * keys_seen(T, ATTENTION_TILE)), heads * (T * row + 4 * T));
}

// The first kernel reads q, dout, out, lse, and of each of its blocks k and v; the second k, v, and of each of its
// blocks q, dout, lse and D. Every thread that works on a row reads lse, and in fp32 D, for itself.
static bool traffic_attention_backward(const Case *c, Stated *stated) {
    size_t heads = AT(F_B) * AT(F_NH), T = AT(F_T), row = AT(F_HS) * S;
    size_t row_threads = S == 2 ? 4 : 16, column_threads = S == 2 ? 1 : 8;
    size_t by_queries = 3 * T * row + row_threads * 4 * T + 2 * row * keys_seen(T, ATTENTION_TILE);
    size_t by_keys = 2 * T * row + (2 * row + column_threads * 8) * queries_seen(T, ATTENTION_TILE);
    return state(stated, heads * (by_queries + by_keys), heads * (3 * T * row + 4 * T));
}

static bool traffic_classifier(const Case *c, Stated *stated) {
    size_t V = AT(F_V), Vp = c->buffers[0].n / ROWS, pack = 16 / S, used = (V + pack - 1) / pack * pack;
    size_t read = 0, written = 0;
    for (size_t row = 0; row < ROWS; row++) {
        bool has_target = ((const int *)c->buffers[2].initial)[row] != -1;
        read += 4 + (has_target ? (LEVEL(F_VARIANT) ? 2 : 1) * used * S + S : 0);
        written += 4 + (LEVEL(F_VARIANT) ? Vp * S : 0);
    }
    return state(stated, read, written);
}

// Partial sums of at most 1024 blocks of a multiple of 4096 elements.
static bool traffic_sum(const Case *c, Stated *stated, size_t bytes) {
    enum { BLOCKS = 1024, BLOCK = 4096 };
    size_t n = AT(F_N), partial = 8 * divided_up(n, divided_up(divided_up(n, BLOCKS), BLOCK) * BLOCK);
    return state(stated, n * bytes + partial + (LEVEL(F_ACCUMULATE) ? 8 : 0), partial + 8);
}

static bool traffic_sum_values(const Case *c, Stated *stated) {
    return traffic_sum(c, stated, 4);
}

static bool traffic_sum_of_squares(const Case *c, Stated *stated) {
    return traffic_sum(c, stated, G);
}

static bool traffic_accumulate_gradient(const Case *c, Stated *stated) {
    return state(stated, AT(F_N) * 2 * G, AT(F_N) * G);
}

static bool traffic_adamw_update(const Case *c, Stated *stated) {
    bool masters = c->buffers[1].name != NULL;
    return state(stated, AT(F_N) * (G + (masters ? 4 : S) + 8), AT(F_N) * (S + (masters ? 4 : 0) + 8));
}

#endif
