// embedding.cuh: token and position embeddings, forward and backward.
//
// Global memory, with s = sizeof(floatX), g = sizeof(gradX), for each row of C channels:
//   embedding_forward  reads 2 C s + 4, writes C s
//   wpe_backward       reads C s for each row of dout; for each position written, writes C g (reads it too when
//                      accumulating)
//   wte_backward       reads C s for each row of dout; reads and writes C g for each token that occurs. A token whose
//                      rows lie in several chunks of WTE_CHUNK sorted rows costs 4 C, written and read, for each.
//                      Sorting takes 12 bytes read and 8 written a row for the first digit of 8 bits, 16 and 8 for the
//                      others, and looking the sorted rows up 12 for every 32 N channels, N to an access
#ifndef EMBEDDING_CUH
#define EMBEDDING_CUH

#include "dropout.cuh"

// A warp works on a row, or on 32 N channels of it; a thread block on so many rows or chunks of rows.
enum { EMBEDDING_WARPS = 8 };

// How many blocks of 32 N channels cover C.
static inline unsigned channel_tiles(size_t C, int N) {
    return (unsigned)divide_up(C, (size_t)WARP * (size_t)N);
}

// Channels of a row are accessed 16 bytes at a time where every row begins on a 16-byte boundary.
static inline bool channels_packed(int C) {
    return C % pack<floatX>() == 0;
}

template <int N>
static __global__ void __launch_bounds__(EMBEDDING_WARPS *WARP)
    embedding_forward_kernel(floatX *out, const int *tokens, const floatX *wte, const floatX *wpe, size_t rows,
                             size_t T, size_t C, Vocabulary vocabulary, DropoutMask mask) {
    const int lane = threadIdx.x % WARP;
    const size_t row = (size_t)blockIdx.x * EMBEDDING_WARPS + threadIdx.x / WARP;
    if (row >= rows) return; // a whole warp, and no barrier follows
    const int token = __shfl_sync(ALL_LANES, lane == 0 ? load_one(tokens + row) : 0, 0);
    const uint32_t local = (uint32_t)(token - vocabulary.first); // below first: huge
    const floatX *x = wte + (size_t)local * C, *y = wpe + row % T * C;
    if (local >= (uint32_t)vocabulary.count) {
        const float zeros[N] = {0};
        for (size_t i = (size_t)lane * N; i < C; i += WARP * N) store_floats<N>(out + row * C + i, zeros);
        return;
    }
#pragma unroll 4
    for (size_t i = (size_t)lane * N; i < C; i += WARP * N) {
        float sum[N], position[N], factors[N];
        load_floats<N>(sum, x + i);
        load_floats<N>(position, y + i);
        dropout_factors<N>(factors, mask, row * C + i);
#pragma unroll
        for (int j = 0; j < N; j++) sum[j] = factors[j] * (sum[j] + position[j]);
        store_floats<N>(out + row * C + i, sum);
    }
}

OP void embedding_forward(Ops *ops, floatX *out, const int *tokens, const floatX *wte, const floatX *wpe, int B, int T,
                          int C, Vocabulary vocabulary, Dropout dropout) {
    RANGE("embedding_forward");
    const size_t rows = (size_t)B * (size_t)T;
    const DropoutMask mask = dropout_mask(&dropout);
    cudaLaunchConfig_t config = launch_config(divide_up(rows, EMBEDDING_WARPS), EMBEDDING_WARPS * WARP, 0, ops->stream);
    if (channels_packed(C))
        launch(config, embedding_forward_kernel<pack<floatX>()>, out, tokens, wte, wpe, rows, (size_t)T, (size_t)C,
               vocabulary, mask);
    else
        launch(config, embedding_forward_kernel<1>, out, tokens, wte, wpe, rows, (size_t)T, (size_t)C, vocabulary,
               mask);
}

// A warp sums 32 N channels (blockIdx.y) of one position over the batch.
template <int N>
static __global__ void __launch_bounds__(EMBEDDING_WARPS *WARP)
    wpe_backward_kernel(gradX *dwpe, const floatX *dout, int B, size_t T, size_t C, size_t positions, int accumulate) {
    const size_t t = (size_t)blockIdx.x * EMBEDDING_WARPS + threadIdx.x / WARP;
    const size_t channel = ((size_t)blockIdx.y * WARP + threadIdx.x % WARP) * N;
    if (t >= positions || channel >= C) return;
    gradX *to = dwpe + t * C + channel;
    float sum[N] = {0};
    if (t < T) {
#pragma unroll 4
        for (int b = 0; b < B; b++) {
            float d[N];
            load_floats<N>(d, dout + ((size_t)b * T + t) * C + channel);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] += d[j];
        }
    }
    if (accumulate) {
        float old[N];
        load_floats<N>(old, to);
#pragma unroll
        for (int j = 0; j < N; j++) sum[j] += old[j];
    }
    store_floats<N>(to, sum);
}

OP void wpe_backward(Ops *ops, gradX *dwpe, const floatX *dout, int B, int T, int C, int positions, int accumulate) {
    RANGE("wpe_backward");
    constexpr int N = pack<floatX>();
    const bool packed = channels_packed(C);
    if (accumulate && positions > T) positions = T; // the others stay as they are
    cudaLaunchConfig_t config =
        launch_config(divide_up((size_t)positions, EMBEDDING_WARPS), EMBEDDING_WARPS * WARP, 0, ops->stream);
    config.gridDim.y = channel_tiles((size_t)C, packed ? N : 1);
    if (packed)
        launch(config, wpe_backward_kernel<N>, dwpe, dout, B, (size_t)T, (size_t)C, (size_t)positions, accumulate);
    else
        launch(config, wpe_backward_kernel<1>, dwpe, dout, B, (size_t)T, (size_t)C, (size_t)positions, accumulate);
}

// -------------------------------------------------------------------------------------------------- rows sorted by
// token

// A stable radix sort, so that the rows of a token stand in order: 8 bits of the token at a time, from the lowest. A
// thread block works on SORT_TILE consecutive entries, each of its warps on an eighth of them, 32 at a time.
enum { SORT_BITS = 8, SORT_DIGITS = 256, SORT_THREADS = 256, SORT_WARPS = 8, SORT_ROUNDS = 8 };
enum { SORT_TILE = SORT_WARPS * SORT_ROUNDS * WARP };

// An entry of the list: as long as it is unsorted, entry i is row i.
struct SortedRows {
    uint32_t *tokens, *rows;
};

static inline int sort_passes(int V) {
    int passes = 1;
    while (passes < 4 && ((uint32_t)V - 1) >> (SORT_BITS * passes) != 0) passes++;
    return passes;
}

// The lanes whose digit is this lane's, among those that have an entry.
static __device__ __forceinline__ uint32_t lanes_with_digit(uint32_t digit, bool valid) {
    uint32_t same = __ballot_sync(ALL_LANES, valid);
#pragma unroll
    for (int bit = 0; bit < SORT_BITS; bit++) {
        const uint32_t ones = __ballot_sync(ALL_LANES, digit >> bit & 1);
        same &= digit >> bit & 1 ? ones : ~ones;
    }
    return same;
}

// ranks[round] = how many earlier entries of this warp have the entry's digit; counts[digit] = how many it has in all.
// counts: this warp's, zeroed.
static __device__ __forceinline__ void sort_warp(uint32_t (&ranks)[SORT_ROUNDS], const uint32_t (&digits)[SORT_ROUNDS],
                                                 size_t first, size_t n, uint32_t *counts) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int round = 0; round < SORT_ROUNDS; round++) {
        const bool valid = first + round * WARP + lane < n;
        const uint32_t same = lanes_with_digit(digits[round], valid);
        ranks[round] = counts[digits[round]] + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        // The last of the lanes with this digit counts them all.
        if (valid && same >> lane == 1) counts[digits[round]] = ranks[round] + 1;
        __syncwarp();
    }
}

static __device__ __forceinline__ void sort_digits(uint32_t (&digits)[SORT_ROUNDS], const uint32_t *tokens,
                                                   size_t first, size_t n, int shift) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int round = 0; round < SORT_ROUNDS; round++) {
        const size_t i = first + round * WARP + lane;
        digits[round] = i < n ? load_one(tokens + i) >> shift & (SORT_DIGITS - 1) : 0;
    }
}

// histogram[tile][digit] = how many entries of the tile have the digit
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_count_kernel(uint32_t *histogram, const uint32_t *tokens, size_t n, int shift) {
    __shared__ uint32_t counts[SORT_WARPS][SORT_DIGITS];
    const int warp = threadIdx.x / WARP;
    const size_t first = (size_t)blockIdx.x * SORT_TILE + (size_t)warp * (SORT_ROUNDS * WARP);
    for (int i = 0; i < SORT_WARPS; i++) counts[i][threadIdx.x] = 0;
    __syncthreads();
    uint32_t digits[SORT_ROUNDS], ranks[SORT_ROUNDS];
    sort_digits(digits, tokens, first, n, shift);
    sort_warp(ranks, digits, first, n, counts[warp]);
    __syncthreads();
    uint32_t count = 0;
    for (int i = 0; i < SORT_WARPS; i++) count += counts[i][threadIdx.x];
    store_one(histogram + (size_t)blockIdx.x * SORT_DIGITS + threadIdx.x, count);
}

// Moves the tile's entries to their places. rows NULL: entry i is row i.
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_move_kernel(SortedRows to, const uint32_t *tokens, const uint32_t *rows, const uint32_t *histogram, size_t n,
                     int shift) {
    __shared__ uint32_t counts[SORT_WARPS][SORT_DIGITS];
    __shared__ uint32_t totals[SORT_THREADS / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size_t first = (size_t)blockIdx.x * SORT_TILE + (size_t)warp * (SORT_ROUNDS * WARP);
    for (int i = 0; i < SORT_WARPS; i++) counts[i][threadIdx.x] = 0;
    __syncthreads();
    uint32_t digits[SORT_ROUNDS], ranks[SORT_ROUNDS];
    sort_digits(digits, tokens, first, n, shift);
    sort_warp(ranks, digits, first, n, counts[warp]);

    // Thread d: where digit d begins among all entries, and this tile's part of it.
    uint32_t total = 0, before = 0;
#pragma unroll 8
    for (unsigned tile = 0; tile < gridDim.x; tile++) {
        if (tile == blockIdx.x) before = total;
        total += load_one(histogram + (size_t)tile * SORT_DIGITS + threadIdx.x);
    }
    uint32_t sum = total; // inclusive over the lanes, then exclusive over all digits
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const uint32_t other = __shfl_up_sync(ALL_LANES, sum, offset);
        if (lane >= offset) sum += other;
    }
    if (lane == WARP - 1) totals[warp] = sum;
    __syncthreads(); // totals, and the counts of all warps
    uint32_t place = sum - total + before;
    for (int i = 0; i < warp; i++) place += totals[i];
    // counts[i][d] becomes the place of warp i's first entry with digit d.
    for (int i = 0; i < SORT_WARPS; i++) {
        const uint32_t count = counts[i][threadIdx.x];
        counts[i][threadIdx.x] = place;
        place += count;
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < SORT_ROUNDS; round++) {
        const size_t i = first + round * WARP + lane;
        if (i >= n) continue;
        const uint32_t at = counts[warp][digits[round]] + ranks[round];
        store_one(to.tokens + at, load_one(tokens + i));
        store_one(to.rows + at, rows == NULL ? (uint32_t)i : load_one(rows + i));
    }
}

// -------------------------------------------------------------------------------------------------------- dwte

// A warp sums 32 N channels of WTE_CHUNK sorted rows. A token whose rows all lie in one chunk goes to dwte at once.
// Otherwise a chunk leaves a partial sum: partial[chunk][0] of a token that began in an earlier chunk,
// partial[chunk][1] of one that begins here and goes on in the next. So no token keeps one warp busy for long, however
// frequent it is.
enum { WTE_CHUNK = 64, WTE_AHEAD = 4 };

// The list twice (a pass of the sort reads one and writes the other), the tiles' histograms, the partial sums.
typedef struct {
    SortedRows lists[2];
    uint32_t *histogram;
    float *partial; // (chunks, 2, C)
    size_t bytes;
} WteWorkspace;

static inline WteWorkspace wte_workspace(void *base, size_t rows, size_t C) {
    WteWorkspace space;
    char *at = (char *)base;
    const size_t list = round_up(rows * sizeof(uint32_t), 16), tiles = divide_up(rows, SORT_TILE);
    for (int i = 0; i < 2; i++) {
        space.lists[i].tokens = (uint32_t *)at, at += list;
        space.lists[i].rows = (uint32_t *)at, at += list;
    }
    space.histogram = (uint32_t *)at, at += tiles * SORT_DIGITS * sizeof(uint32_t);
    space.partial = (float *)at, at += divide_up(rows, WTE_CHUNK) * 2 * C * sizeof(float);
    space.bytes = (size_t)(at - (char *)base);
    return space;
}

static inline size_t wte_backward_workspace(const OpsShape *shape) {
    return wte_workspace(NULL, (size_t)shape->B * (size_t)shape->T, (size_t)shape->C).bytes;
}

// The token's row of dwte += sum, rounded once, if this rank holds it. channel: of the row's C.
template <int N>
static __device__ __forceinline__ void add_to_gradient(gradX *dwte, uint32_t token, Vocabulary vocabulary, size_t C,
                                                       size_t channel, const float (&sum)[N]) {
    const uint32_t local = token - (uint32_t)vocabulary.first; // below first: huge
    if (local >= (uint32_t)vocabulary.count) return;
    gradX *to = dwte + (size_t)local * C + channel;
    float total[N];
    load_floats<N>(total, to);
#pragma unroll
    for (int j = 0; j < N; j++) total[j] += sum[j];
    store_floats<N>(to, total);
}

template <int N>
static __global__ void __launch_bounds__(EMBEDDING_WARPS *WARP)
    wte_backward_kernel(gradX *dwte, float *partial, const floatX *dout, SortedRows sorted, size_t rows, size_t C,
                        Vocabulary vocabulary) {
    const int lane = threadIdx.x % WARP;
    const size_t chunk = (size_t)blockIdx.x * EMBEDDING_WARPS + threadIdx.x / WARP;
    const size_t first = chunk * WTE_CHUNK, channel = ((size_t)blockIdx.y * WARP + lane) * N;
    if (first >= rows) return; // a whole warp, and no barrier follows
    const size_t end = first + WTE_CHUNK < rows ? first + WTE_CHUNK : rows;
    const bool active = channel < C;
    float sum[N] = {0};
    // Whether the token at hand began in an earlier chunk.
    bool continues = first > 0 && load_one(sorted.tokens + first - 1) == load_one(sorted.tokens + first);
#pragma unroll 1
    for (size_t start = first; start < end; start += WARP) {
        // Each lane looks up an entry; then all take them one after the other, the loads WTE_AHEAD of the sums.
        const size_t mine = start + lane;
        const uint32_t token = mine < end ? load_one(sorted.tokens + mine) : 0;
        const uint32_t row = mine < end ? load_one(sorted.rows + mine) : 0;
        const bool goes_on = mine + 1 < rows && load_one(sorted.tokens + mine + 1) == token;
        const uint32_t open = __ballot_sync(ALL_LANES, goes_on);
        const uint32_t stops = __ballot_sync(ALL_LANES, mine < end && (!goes_on || mine + 1 == end));
        const int count = end - start < WARP ? (int)(end - start) : WARP;
#pragma unroll 1
        for (int ahead = 0; ahead < count; ahead += WTE_AHEAD) {
            Pack<floatX, N> d[WTE_AHEAD];
#pragma unroll
            for (int k = 0; k < WTE_AHEAD; k++) {
                const size_t at = (size_t)__shfl_sync(ALL_LANES, row, ahead + k) * C + channel;
                if (active && ahead + k < count) d[k] = load<N, Cache::stream>(dout + at);
            }
#pragma unroll
            for (int k = 0; k < WTE_AHEAD; k++) {
                const uint32_t v = __shfl_sync(ALL_LANES, token, ahead + k);
                if (active && ahead + k < count) {
#pragma unroll
                    for (int j = 0; j < N; j++) sum[j] += to_float(d[k][j]);
                }
                if (!(stops >> (ahead + k) & 1)) continue; // for all lanes
                if (active) {
                    if (continues || open >> (ahead + k) & 1)
                        store_floats<N>(partial + (chunk * 2 + (continues ? 0 : 1)) * C + channel, sum);
                    else
                        add_to_gradient<N>(dwte, v, vocabulary, C, channel, sum);
                }
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] = 0.0f;
                continues = false;
            }
        }
    }
}

// Adds up the partial sums of the token that begins in a chunk and goes on in the next: it stands at the head of every
// chunk that it reaches.
template <int N>
static __global__ void __launch_bounds__(EMBEDDING_WARPS *WARP)
    wte_backward_finish_kernel(gradX *dwte, const float *partial, const uint32_t *tokens, size_t rows, size_t C,
                               Vocabulary vocabulary) {
    const int lane = threadIdx.x % WARP;
    const size_t chunk = (size_t)blockIdx.x * EMBEDDING_WARPS + threadIdx.x / WARP;
    const size_t first = chunk * WTE_CHUNK, next = first + WTE_CHUNK;
    const size_t channel = ((size_t)blockIdx.y * WARP + lane) * N;
    if (next >= rows) return; // whole warps return, here and below, and no barrier follows
    const uint32_t token = load_one(tokens + next - 1);
    if (load_one(tokens + next) != token) return;
    if (first > 0 && load_one(tokens + first - 1) == token) return;
    size_t reached = 0; // chunks after this one
    for (uint32_t found = ALL_LANES; found == ALL_LANES;) {
        const size_t head = next + (reached + lane) * WTE_CHUNK;
        found = __ballot_sync(ALL_LANES, head < rows && load_one(tokens + head) == token);
        reached += __popc(found);
    }
    if (channel >= C) return;
    float sum[N];
    load_floats<N>(sum, partial + (chunk * 2 + 1) * C + channel);
#pragma unroll 8
    for (size_t i = 1; i <= reached; i++) {
        float part[N];
        load_floats<N>(part, partial + (chunk + i) * 2 * C + channel);
#pragma unroll
        for (int j = 0; j < N; j++) sum[j] += part[j];
    }
    add_to_gradient<N>(dwte, token, vocabulary, C, channel, sum);
}

template <int N>
static inline void wte_backward_sum(Ops *ops, gradX *dwte, const floatX *dout, const WteWorkspace *space,
                                    SortedRows sorted, size_t rows, size_t C, Vocabulary vocabulary) {
    const size_t chunks = divide_up(rows, WTE_CHUNK);
    cudaLaunchConfig_t config =
        launch_config(divide_up(chunks, EMBEDDING_WARPS), EMBEDDING_WARPS * WARP, 0, ops->stream);
    config.gridDim.y = channel_tiles(C, N);
    launch(config, wte_backward_kernel<N>, dwte, space->partial, dout, sorted, rows, C, vocabulary);
    launch(config, wte_backward_finish_kernel<N>, dwte, space->partial, sorted.tokens, rows, C, vocabulary);
}

OP void wte_backward(Ops *ops, gradX *dwte, const floatX *dout, const int *tokens, int B, int T, int C,
                     Vocabulary vocabulary) {
    RANGE("wte_backward");
    const size_t rows = (size_t)B * (size_t)T;
    const WteWorkspace space = wte_workspace(ops->workspace, rows, (size_t)C);
    SortedRows sorted = {(uint32_t *)tokens, NULL};
    cudaLaunchConfig_t config = launch_config(divide_up(rows, SORT_TILE), SORT_THREADS, 0, ops->stream);
    for (int pass = 0; pass < sort_passes(ops->shape.V); pass++) {
        const int shift = pass * SORT_BITS;
        launch(config, sort_count_kernel, space.histogram, sorted.tokens, rows, shift);
        launch(config, sort_move_kernel, space.lists[pass % 2], sorted.tokens, sorted.rows, space.histogram, rows,
               shift);
        sorted = space.lists[pass % 2];
    }
    if (channels_packed(C))
        wte_backward_sum<pack<floatX>()>(ops, dwte, dout, &space, sorted, rows, (size_t)C, vocabulary);
    else
        wte_backward_sum<1>(ops, dwte, dout, &space, sorted, rows, (size_t)C, vocabulary);
}

#endif
