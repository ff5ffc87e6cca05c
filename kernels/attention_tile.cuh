// attention_tile.cuh: what the attention kernels share: which tile of which head a block works on, tiles of bf16 in
// shared memory, and products of tiles on the tensor cores.
//
// A tile is rows x WIDTH elements, WIDTH being the head dimension HS rounded up to 64, 80, 96 or 128 with zeros. Its
// 16-byte chunks are permuted within each row so that the eight rows which an ldmatrix phase reads, at one chunk, lie
// in eight different groups of four banks, without padding: with S chunks a row, rows repeat their banks every 8 /
// gcd(S, 8) rows, and gcd(S, 8) neighbouring chunks are exchanged by xor with the number of the repetition.
#ifndef ATTENTION_TILE_CUH
#define ATTENTION_TILE_CUH

#include "dropout.cuh"

static constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// A head's tiles are blocks of one kernel. Blocks start in the order of their index: `group` heads at a time, as many
// as the L2 cache holds, so that the tiles of a head find its keys and values there; within a group the tiles with the
// most work first, so that none of these is the last to run.
typedef struct {
    int T, NH, HS;
    int heads; // B * NH
    int tiles; // of each head
    int group;
    float scale; // 1 / sqrt(HS)
} AttentionShape;

enum { ATTENTION_L2_BYTES = 16 << 20 };

// A head's rows are read again by each of its tiles: `row_bytes` of them for each position.
static inline AttentionShape attention_shape(int B, int T, int NH, int HS, int tile_rows, size_t row_bytes) {
    AttentionShape shape;
    shape.T = T;
    shape.NH = NH;
    shape.HS = HS;
    shape.heads = B * NH;
    shape.tiles = (int)divide_up((size_t)T, (size_t)tile_rows);
    const size_t group = ATTENTION_L2_BYTES / ((size_t)T * row_bytes);
    shape.group = group < 1 ? 1 : group < (size_t)shape.heads ? (int)group : shape.heads;
    shape.scale = 1.0f / sqrtf((float)HS);
    return shape;
}

// A kernel may use more than 48 KB of shared memory once this is set, for the rest of the program.
template <auto kernel> static void attention_allow_shared(int bytes) {
    static bool allowed = false;
    if (!allowed) cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    allowed = true;
}

// Where a block works. Offsets are in elements.
struct AttentionBlock {
    int head;                   // b * NH + h
    int tile;                   // in order of work: 0 has the most
    size_t qkv, row;            // of the head's first query in qkv, (B, T, 3, NH, HS), and in out, (B, T, NH, HS)
    int qkv_stride, row_stride; // from one position to the next
    int C;
};

static __device__ __forceinline__ AttentionBlock attention_block(const AttentionShape &shape) {
    const int per_group = shape.group * shape.tiles;
    const int first = (int)blockIdx.x / per_group * shape.group, within = (int)blockIdx.x % per_group;
    const int heads = shape.heads - first < shape.group ? shape.heads - first : shape.group;
    AttentionBlock block;
    block.head = first + within % heads;
    block.tile = within / heads;
    const size_t b = (size_t)(block.head / shape.NH), h = (size_t)(block.head % shape.NH), T = (size_t)shape.T;
    block.C = shape.NH * shape.HS;
    block.row = b * T * (size_t)block.C + h * (size_t)shape.HS;
    block.qkv = b * T * 3 * (size_t)block.C + h * (size_t)shape.HS;
    block.row_stride = block.C;
    block.qkv_stride = 3 * block.C;
    return block;
}

// Bit i: whether element index + i of the dropout mask is kept.
static __device__ __forceinline__ uint32_t dropout_bits(const DropoutMask &mask, uint64_t index) {
    const uint64_t at = mask.first + index;
    uint64_t bits = 0;
#pragma unroll 1                              // registers are short in the kernels that draw
    for (int group = 0; group < 9; group++) { // the last for indices that do not begin with a random4
        const Random4 words = random4(mask.key, (at >> 2) + (uint64_t)group);
#pragma unroll
        for (int i = 0; i < 4; i++) bits |= (uint64_t)(words.word[i] >= mask.threshold) << (group * 4 + i);
    }
    return (uint32_t)(bits >> (at & 3));
}

// bits (ROWS, KEYS / 32): the dropout mask of ROWS queries and KEYS keys. Drawn a word at a time and shared, since no
// thread of a product holds neighbouring elements enough to use the four numbers that are drawn together.
template <int ROWS, int KEYS, int THREADS>
static __device__ __forceinline__ void draw_mask(uint32_t *bits, const DropoutMask &mask, const AttentionShape &shape,
                                                 int head, int first_query, int first_key) {
    constexpr int WORDS = KEYS / 32;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < ROWS * WORDS; i += THREADS) {
        const uint64_t row = (uint64_t)(head % shape.NH) * (uint64_t)shape.T + (uint64_t)(first_query + i / WORDS);
        const uint64_t sequence = (uint64_t)(head / shape.NH) * mask.sequence_stride;
        bits[i] = dropout_bits(mask, sequence + row * (uint64_t)shape.T + (uint64_t)(first_key + i % WORDS * 32));
    }
}

// -------------------------------------------------------------------------------------------- tiles in shared memory

// How many chunks are exchanged.
template <int WIDTH> static constexpr __host__ __device__ int tile_exchanged() {
    static_assert(WIDTH % 16 == 0, "rows of an odd number of chunks need no permutation");
    return WIDTH % 64 == 0 ? 8 : WIDTH % 32 == 0 ? 4 : 2;
}

// Where chunk `chunk` of row `row` of a tile begins, in elements.
template <int WIDTH> static __device__ __forceinline__ int tile_at(int row, int chunk) {
    constexpr int EXCHANGED = tile_exchanged<WIDTH>();
    return (row * (WIDTH / 8) + (chunk ^ (row / (8 / EXCHANGED) % EXCHANGED))) * 8;
}

// tile_at(row, chunk + more), given `at` = tile_at(row, chunk), for chunk 0 or 1 and a constant, even `more`: few
// different values to keep in registers, and constants that are part of an instruction.
template <int WIDTH> static __device__ __forceinline__ int tile_at_chunk(int at, int more) {
    constexpr int EXCHANGED = tile_exchanged<WIDTH>();
    return (at ^ (more % EXCHANGED * 8)) + more / EXCHANGED * EXCHANGED * 8;
}

// tile = ROWS rows of `from` (stride apart) starting at `first`; zeros from row T and from column HS on. Asynchronous
// where rows are 16-byte aligned, else element by element.
template <int WIDTH, int ROWS, int THREADS>
static __device__ __forceinline__ void tile_load(__nv_bfloat16 *tile, const __nv_bfloat16 *from, int stride, int first,
                                                 int T, int HS) {
    constexpr int LANES = WIDTH <= 64 ? 8 : 16, STEP = THREADS / LANES; // threads to a row, rows at a time
    static_assert(STEP % 8 == 0 && ROWS % STEP == 0, "a thread's rows are permuted alike");
    const int row = (int)threadIdx.x / LANES, chunk = (int)threadIdx.x % LANES;
    if (chunk * 8 >= WIDTH) return;
    __nv_bfloat16 *to = tile + tile_at<WIDTH>(row, chunk);
    const __nv_bfloat16 *source = from + (int64_t)(first + row) * stride + chunk * 8;
    if (HS % 8 == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; r += STEP) {
            const bool inside = first + row + r < T && chunk * 8 < HS;
            cp_async16(to + r * WIDTH, inside ? source : from, inside ? 16 : 0);
            source += (int64_t)STEP * stride;
        }
    } else {
        for (int r = 0; r < ROWS; r += STEP) {
            for (int e = 0; e < 8; e++) {
                const bool inside = first + row + r < T && chunk * 8 + e < HS;
                to[r * WIDTH + e] = inside ? load_one(source + e) : from_float<__nv_bfloat16>(0.0f);
            }
            source += (int64_t)STEP * stride;
        }
    }
}

// ------------------------------------------------------------------------------------- products on the tensor cores
//
// A warp owns M * 16 rows. An array [M][N][4] is M x N accumulators of 16 x 8: with group = lane / 4 and pair = lane %
// 4
// * 2, element [i][n][half * 2 + e] stands at row i * 16 + half * 8 + group, column n * 8 + pair + e.

// d += a b^T: the first rows of a times the first rows of b, summed over columns. a and b are tiles, or begin at a row
// of one that is a multiple of 8: the permutation repeats after 8 rows.
template <int WIDTH, int M, int N>
static __device__ __forceinline__ void multiply_by_rows(float (&d)[M][N][4], const __nv_bfloat16 *a,
                                                        const __nv_bfloat16 *b) {
    static_assert(N % 2 == 0, "b comes in 16 rows at a time");
    const int lane = threadIdx.x % WARP;
    const int left_at = tile_at<WIDTH>(lane % 16, lane / 16);
    const int right_at = tile_at<WIDTH>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) {
        uint32_t left[M][4];
#pragma unroll
        for (int i = 0; i < M; i++) ldmatrix_x4(left[i], a + i * 16 * WIDTH + tile_at_chunk<WIDTH>(left_at, k * 2));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t right[4];
            ldmatrix_x4(right, b + n * 8 * WIDTH + tile_at_chunk<WIDTH>(right_at, k * 2));
            const uint32_t even[2] = {right[0], right[1]}, odd[2] = {right[2], right[3]};
#pragma unroll
            for (int i = 0; i < M; i++) {
                mma_m16n8k16(d[i][n], left[i], even);
                mma_m16n8k16(d[i][n + 1], left[i], odd);
            }
        }
    }
}

static __device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

// d += p b: p, rounded to bf16, times the first rows of b. Accumulators are laid out as the left operand's
// fragments are, two of 16 x 8 making one of 16 x 16, so p never leaves its registers.
template <int WIDTH, int M, int N>
static __device__ __forceinline__ void multiply(float (&d)[M][WIDTH / 8][4], const float (&p)[M][N][4],
                                                const __nv_bfloat16 *b) {
    const int lane = threadIdx.x % WARP, right_at = tile_at<WIDTH>(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        uint32_t left[M][4];
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int r = 0; r < 4; r++)
                left[i][r] = bf16_pair(p[i][k * 2 + r / 2][r % 2 * 2], p[i][k * 2 + r / 2][r % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 2) {
            uint32_t right[4];
            ldmatrix_x4_transposed(right, b + k * 16 * WIDTH + tile_at_chunk<WIDTH>(right_at, n));
            const uint32_t even[2] = {right[0], right[1]}, odd[2] = {right[2], right[3]};
#pragma unroll
            for (int i = 0; i < M; i++) {
                mma_m16n8k16(d[i][n], left[i], even);
                mma_m16n8k16(d[i][n + 1], left[i], odd);
            }
        }
    }
}

// Rows first .. of `to` (stride apart) = d, row by row times factor, rounded; rows from T and columns from HS on are
// left alone. Goes through the warp's own rows, `row` .., of a tile that nobody needs any more, so that a row is
// written 16 bytes at a time.
template <int WIDTH, int M>
static __device__ __forceinline__ void tile_store(__nv_bfloat16 *to, int stride, int first, int T, int HS,
                                                  __nv_bfloat16 *tile, int row, const float (&d)[M][WIDTH / 8][4],
                                                  const float (&factor)[M][2]) {
    constexpr int CHUNKS = WIDTH / 8;
    const int lane = threadIdx.x % WARP;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < CHUNKS; n++) {
                const float *x = &d[i][n][half * 2], f = factor[i][half];
                const uint32_t bits = bf16_pair(x[0] * f, x[1] * f);
                memcpy(tile + tile_at<WIDTH>(row + i * 16 + half * 8 + lane / 4, n) + lane % 4 * 2, &bits, sizeof bits);
            }
    __syncwarp();
    for (int i = lane; i < M * 16 * CHUNKS; i += WARP) {
        const int t = first + i / CHUNKS, chunk = i % CHUNKS;
        if (t >= T || chunk * 8 >= HS) continue;
        const __nv_bfloat16 *from = tile + tile_at<WIDTH>(row + i / CHUNKS, chunk);
        __nv_bfloat16 *at = to + (int64_t)t * stride + chunk * 8;
        if (HS % 8 == 0) {
            Pack<__nv_bfloat16, 8> values;
            memcpy(&values, from, sizeof values);
            store<8>(at, values);
        } else {
            for (int e = 0; e < 8 && chunk * 8 + e < HS; e++) store_one(at + e, from[e]);
        }
    }
}

// Sets scores of keys after their query to -infinity. Element (i, j) of `scores` is that of query first_query + i and
// key first_key + j, or, where ROWS_ARE_KEYS, of key first_key + i and query first_query + j.
template <bool ROWS_ARE_KEYS, int M, int N>
static __device__ __forceinline__ void mask_future(float (&scores)[M][N][4], int first_query, int first_key) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int r = i * 16 + e / 2 * 8 + lane / 4, c = n * 8 + lane % 4 * 2 + e % 2;
                const int query = first_query + (ROWS_ARE_KEYS ? c : r), key = first_key + (ROWS_ARE_KEYS ? r : c);
                if (key > query) scores[i][n][e] = -INFINITY;
            }
}

#endif
