// attention_fp32.cuh: flash attention in fp32, on CUDA cores: the algorithm of the bf16 kernels (attention_forward.cuh,
// attention_backward.cuh) with exponentials to 2 ulp.
//
// A block of 128 threads owns 32 rows of a head (queries, or in the second backward kernel keys) and walks over tiles
// of 32. Thread (y, x) of 8 x 16 computes rows y + 8 i, i < 4, of every product: columns x + 16 j, so that 16 lanes
// hold a row. Probabilities pass through shared memory between the 16 lanes of their row.
//
// Global memory per head of T positions: as for bf16 with 4 bytes an element and 32 rows a block. Forward reads 4 T HS
// bytes of queries and for each block 8 HS min(T, 32 * (block + 1)) of keys and values, and writes 4 T HS + 4 T.
// Backward by queries reads 12 T HS + 64 T (lse by each of a row's 16 threads) and the same keys and values, and writes
// 4 T HS + 4 T; by keys it reads 8 T HS and for each block (8 HS + 64) (T - 32 * block) (lse and D by 8 threads each),
// and writes 8 T HS.
// Operations: those of the bf16 kernels.
#ifndef ATTENTION_FP32_CUH
#define ATTENTION_FP32_CUH

#include "attention_tile.cuh"

// Rows of a tile, of probabilities and of a thread; threads. Rows of shared memory are padded by four floats: 16 bytes
// at one column of eight neighbouring rows lie in different banks.
enum {
    FP32_TILE = 32,
    FP32_THREADS = 128,
    FP32_BLOCKS = 2,
    FP32_M = 4,
    FP32_PAD = 4,
    FP32_P_STRIDE = FP32_TILE + FP32_PAD
};

// tile (32, WIDTH) = rows of `from` (stride apart) starting at `first`; zeros from row T and from column HS on. To be
// waited for with cp_async_wait<0>() and a barrier.
template <int WIDTH>
static __device__ __forceinline__ void fp32_load(float *tile, const float *from, int stride, int first, int T, int HS) {
    constexpr int CHUNKS = WIDTH / 4;
    for (int i = (int)threadIdx.x; i < FP32_TILE * CHUNKS; i += FP32_THREADS) {
        const int row = i / CHUNKS, column = i % CHUNKS * 4, t = first + row;
        float *to = tile + row * (WIDTH + FP32_PAD) + column;
        if (HS % 4 == 0) {
            const bool inside = t < T && column < HS;
            cp_async16(to, inside ? from + (int64_t)t * stride + column : from, inside ? 16 : 0);
        } else {
            for (int e = 0; e < 4; e++)
                to[e] = t < T && column + e < HS ? load_one(from + (int64_t)t * stride + column + e) : 0.0f;
        }
    }
}

// d[i][j] = row y + 8 i of a . row x + 16 j of b, two tiles
template <int WIDTH>
static __device__ __forceinline__ void fp32_multiply_by_rows(float (&d)[FP32_M][2], const float *a, const float *b) {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < FP32_M; i++) d[i][0] = d[i][1] = 0.0f;
#pragma unroll 4
    for (int k = 0; k < WIDTH; k += 4) {
        float4 left[FP32_M], right[2];
#pragma unroll
        for (int i = 0; i < FP32_M; i++) memcpy(&left[i], a + (y + 8 * i) * (WIDTH + FP32_PAD) + k, 16);
#pragma unroll
        for (int j = 0; j < 2; j++) memcpy(&right[j], b + (x + 16 * j) * (WIDTH + FP32_PAD) + k, 16);
#pragma unroll
        for (int i = 0; i < FP32_M; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                d[i][j] +=
                    left[i].x * right[j].x + left[i].y * right[j].y + left[i].z * right[j].z + left[i].w * right[j].w;
    }
}

// d[i][c] += row y + 8 i of p (32, 32) . column x + 16 c of a tile
template <int WIDTH>
static __device__ __forceinline__ void fp32_multiply(float (&d)[FP32_M][WIDTH / 16], const float *p, const float *b) {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
    for (int s = 0; s < FP32_TILE; s += 4) {
        float left[FP32_M][4];
#pragma unroll
        for (int i = 0; i < FP32_M; i++) memcpy(left[i], p + (y + 8 * i) * FP32_P_STRIDE + s, 16);
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int c = 0; c < WIDTH / 16; c++) {
                const float right = b[(s + e) * (WIDTH + FP32_PAD) + x + 16 * c];
#pragma unroll
                for (int i = 0; i < FP32_M; i++) d[i][c] += left[i][e] * right;
            }
    }
}

// p (32, 32) = d, for the lanes of the same row to read after a __syncwarp(); they must have read what was there.
static __device__ __forceinline__ void fp32_share(float *p, const float (&d)[FP32_M][2]) {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < FP32_M; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) p[(y + 8 * i) * FP32_P_STRIDE + x + 16 * j] = d[i][j];
}

// Sum over the 16 lanes of a row, in each of them.
static __device__ __forceinline__ float fp32_row_sum(float value) {
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

// Rows first + y + 8 i of `to` = d times factor.
template <int WIDTH>
static __device__ __forceinline__ void fp32_store(float *to, int stride, int first, int T, int HS,
                                                  const float (&d)[FP32_M][WIDTH / 16], const float (&factor)[FP32_M]) {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < FP32_M; i++)
#pragma unroll
        for (int c = 0; c < WIDTH / 16; c++)
            if (first + y + 8 * i < T && x + 16 * c < HS)
                store_one(to + (int64_t)(first + y + 8 * i) * stride + x + 16 * c, d[i][c] * factor[i]);
}

// Bytes of shared memory: some tiles, some matrices of probabilities, and a word of the dropout mask for each query.
static constexpr int fp32_shared_bytes(int width, int tiles, int probabilities) {
    return (tiles * FP32_TILE * (width + FP32_PAD) + probabilities * FP32_TILE * FP32_P_STRIDE + FP32_TILE) * 4;
}

// Dropout factor of key `key` of 32, given its query's word of the mask.
template <bool DROPOUT>
static __device__ __forceinline__ float fp32_factor(const DropoutMask &mask, const uint32_t *word, int key) {
    if constexpr (DROPOUT) return *word >> key & 1 ? mask.scale : 0.0f;
    return 1.0f;
}

template <int WIDTH, bool DROPOUT>
static __global__ void __launch_bounds__(FP32_THREADS, FP32_BLOCKS)
    attention_forward_fp32_kernel(float *out, float *lse, const float *qkv, AttentionShape shape, DropoutMask mask) {
    constexpr int TILE = FP32_TILE * (WIDTH + FP32_PAD);
    DYNAMIC_SHARED(float, queries);
    float *keys = queries + TILE, *values = keys + TILE, *shared_p = values + TILE;
    [[maybe_unused]] uint32_t *bits = reinterpret_cast<uint32_t *>(shared_p + FP32_TILE * FP32_P_STRIDE);
    const AttentionBlock block = attention_block(shape);
    const int T = shape.T, HS = shape.HS, y = threadIdx.x / 16, x = threadIdx.x % 16;
    const int first = (shape.tiles - 1 - block.tile) * FP32_TILE;
    const float *q = qkv + block.qkv, *k = q + block.C, *v = k + block.C;
    fp32_load<WIDTH>(queries, q, block.qkv_stride, first, T, HS);
    float result[FP32_M][WIDTH / 16] = {}, largest[FP32_M], sum[FP32_M] = {};
#pragma unroll
    for (int i = 0; i < FP32_M; i++) largest[i] = -INFINITY;
    // Every row sees the first key of each tile, so that `largest` is finite; rows from T on as well.
    for (int key = 0; key <= first; key += FP32_TILE) {
        __syncthreads();
        fp32_load<WIDTH>(keys, k, block.qkv_stride, key, T, HS);
        fp32_load<WIDTH>(values, v, block.qkv_stride, key, T, HS);
        cp_async_commit();
        if constexpr (DROPOUT) draw_mask<FP32_TILE, FP32_TILE, FP32_THREADS>(bits, mask, shape, block.head, first, key);
        cp_async_wait<0>();
        __syncthreads();
        float p[FP32_M][2];
        fp32_multiply_by_rows<WIDTH>(p, queries, keys);
#pragma unroll
        for (int i = 0; i < FP32_M; i++) {
            const int t = first + y + 8 * i;
            float most = largest[i];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                p[i][j] = key + x + 16 * j > t ? -INFINITY : p[i][j] * shape.scale;
                most = fmaxf(most, p[i][j]);
            }
#pragma unroll
            for (int offset = 8; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, offset));
            const float correction = expf(largest[i] - most);
            largest[i] = most;
            sum[i] *= correction;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                p[i][j] = expf(p[i][j] - most);
                sum[i] += p[i][j];
                p[i][j] *= fp32_factor<DROPOUT>(mask, bits + y + 8 * i, x + 16 * j);
            }
#pragma unroll
            for (int c = 0; c < WIDTH / 16; c++) result[i][c] *= correction;
        }
        fp32_share(shared_p, p);
        __syncwarp();
        fp32_multiply<WIDTH>(result, shared_p, values);
    }
    float inverse[FP32_M];
#pragma unroll
    for (int i = 0; i < FP32_M; i++) {
        const float total = fp32_row_sum(sum[i]);
        inverse[i] = 1.0f / total;
        const int t = first + y + 8 * i;
        if (x == 0 && t < T) store_one(lse + (size_t)block.head * (size_t)T + (size_t)t, largest[i] + logf(total));
    }
    fp32_store<WIDTH>(out + block.row, block.row_stride, first, T, HS, result, inverse);
}

// D, and dq.
template <int WIDTH, bool DROPOUT>
static __global__ void __launch_bounds__(FP32_THREADS, FP32_BLOCKS)
    attention_backward_queries_fp32_kernel(float *dqkv, float *dots, const float *dout, const float *qkv,
                                           const float *out, const float *lse, AttentionShape shape, DropoutMask mask) {
    constexpr int STRIDE = WIDTH + FP32_PAD, TILE = FP32_TILE * STRIDE;
    DYNAMIC_SHARED(float, queries);
    float *dresult = queries + TILE, *keys = dresult + TILE, *values = keys + TILE, *shared_ds = values + TILE;
    [[maybe_unused]] uint32_t *bits = reinterpret_cast<uint32_t *>(shared_ds + FP32_TILE * FP32_P_STRIDE);
    const AttentionBlock block = attention_block(shape);
    const int T = shape.T, HS = shape.HS, y = threadIdx.x / 16, x = threadIdx.x % 16;
    const int first = (shape.tiles - 1 - block.tile) * FP32_TILE;
    const size_t head_rows = (size_t)block.head * (size_t)T;
    const float *q = qkv + block.qkv, *k = q + block.C, *v = k + block.C, *o = out + block.row;
    fp32_load<WIDTH>(queries, q, block.qkv_stride, first, T, HS);
    fp32_load<WIDTH>(dresult, dout + block.row, block.row_stride, first, T, HS);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float row_lse[FP32_M], dot[FP32_M], dq[FP32_M][WIDTH / 16] = {}, factor[FP32_M];
#pragma unroll
    for (int i = 0; i < FP32_M; i++) {
        const int r = y + 8 * i, t = first + r;
        dot[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < WIDTH / 16; c++)
            if (t < T && x + 16 * c < HS)
                dot[i] += dresult[r * STRIDE + x + 16 * c] * load_one(o + (int64_t)t * block.row_stride + x + 16 * c);
        dot[i] = fp32_row_sum(dot[i]);
        if (x == 0 && t < T) store_one(dots + head_rows + (size_t)t, dot[i]);
        row_lse[i] = t < T ? load_one(lse + head_rows + (size_t)t) : 0.0f;
        factor[i] = shape.scale;
    }
    for (int key = 0; key <= first; key += FP32_TILE) {
        __syncthreads();
        fp32_load<WIDTH>(keys, k, block.qkv_stride, key, T, HS);
        fp32_load<WIDTH>(values, v, block.qkv_stride, key, T, HS);
        cp_async_commit();
        if constexpr (DROPOUT) draw_mask<FP32_TILE, FP32_TILE, FP32_THREADS>(bits, mask, shape, block.head, first, key);
        cp_async_wait<0>();
        __syncthreads();
        float p[FP32_M][2], ds[FP32_M][2];
        fp32_multiply_by_rows<WIDTH>(p, queries, keys);
        fp32_multiply_by_rows<WIDTH>(ds, dresult, values);
#pragma unroll
        for (int i = 0; i < FP32_M; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int t = first + y + 8 * i, s = key + x + 16 * j;
                const float probability = s > t ? 0.0f : expf(p[i][j] * shape.scale - row_lse[i]);
                ds[i][j] = probability * (ds[i][j] * fp32_factor<DROPOUT>(mask, bits + y + 8 * i, x + 16 * j) - dot[i]);
            }
        fp32_share(shared_ds, ds);
        __syncwarp();
        fp32_multiply<WIDTH>(dq, shared_ds, keys);
    }
    fp32_store<WIDTH>(dqkv + block.qkv, block.qkv_stride, first, T, HS, dq, factor);
}

// dk and dv. Scores are transposed: keys by queries.
template <int WIDTH, bool DROPOUT>
static __global__ void __launch_bounds__(FP32_THREADS, FP32_BLOCKS)
    attention_backward_keys_fp32_kernel(float *dqkv, const float *dots, const float *dout, const float *qkv,
                                        const float *lse, AttentionShape shape, DropoutMask mask) {
    constexpr int TILE = FP32_TILE * (WIDTH + FP32_PAD);
    DYNAMIC_SHARED(float, keys);
    float *values = keys + TILE, *queries = values + TILE, *dresult = queries + TILE;
    float *shared_p = dresult + TILE, *shared_ds = shared_p + FP32_TILE * FP32_P_STRIDE;
    [[maybe_unused]] uint32_t *bits = reinterpret_cast<uint32_t *>(shared_ds + FP32_TILE * FP32_P_STRIDE);
    const AttentionBlock block = attention_block(shape);
    const int T = shape.T, HS = shape.HS, y = threadIdx.x / 16, x = threadIdx.x % 16, first = block.tile * FP32_TILE;
    const size_t head_rows = (size_t)block.head * (size_t)T;
    const float *q = qkv + block.qkv, *k = q + block.C, *v = k + block.C, *d = dout + block.row;
    fp32_load<WIDTH>(keys, k, block.qkv_stride, first, T, HS);
    fp32_load<WIDTH>(values, v, block.qkv_stride, first, T, HS);
    float dk[FP32_M][WIDTH / 16] = {}, dv[FP32_M][WIDTH / 16] = {}, factor[FP32_M], one[FP32_M];
#pragma unroll
    for (int i = 0; i < FP32_M; i++) {
        factor[i] = shape.scale;
        one[i] = 1.0f;
    }
    // Queries from T on have zero queries, dout, lse and D: they add zero.
    for (int query = first; query < T; query += FP32_TILE) {
        __syncthreads();
        fp32_load<WIDTH>(queries, q, block.qkv_stride, query, T, HS);
        fp32_load<WIDTH>(dresult, d, block.row_stride, query, T, HS);
        cp_async_commit();
        float row_lse[2], dot[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int t = query + x + 16 * j;
            row_lse[j] = t < T ? load_one(lse + head_rows + (size_t)t) : 0.0f;
            dot[j] = t < T ? load_one(dots + head_rows + (size_t)t) : 0.0f;
        }
        if constexpr (DROPOUT)
            draw_mask<FP32_TILE, FP32_TILE, FP32_THREADS>(bits, mask, shape, block.head, query, first);
        cp_async_wait<0>();
        __syncthreads();
        float p[FP32_M][2], ds[FP32_M][2];
        fp32_multiply_by_rows<WIDTH>(p, keys, queries);
        fp32_multiply_by_rows<WIDTH>(ds, values, dresult);
#pragma unroll
        for (int i = 0; i < FP32_M; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int t = query + x + 16 * j, s = first + y + 8 * i;
                const float dropout = fp32_factor<DROPOUT>(mask, bits + x + 16 * j, y + 8 * i);
                const float probability = s > t ? 0.0f : expf(p[i][j] * shape.scale - row_lse[j]);
                ds[i][j] = probability * (ds[i][j] * dropout - dot[j]);
                p[i][j] = probability * dropout;
            }
        fp32_share(shared_p, p);
        fp32_share(shared_ds, ds);
        __syncwarp();
        fp32_multiply<WIDTH>(dv, shared_p, dresult);
        fp32_multiply<WIDTH>(dk, shared_ds, queries);
    }
    float *to = dqkv + block.qkv;
    fp32_store<WIDTH>(to + block.C, block.qkv_stride, first, T, HS, dk, factor);
    fp32_store<WIDTH>(to + 2 * block.C, block.qkv_stride, first, T, HS, dv, one);
}

template <int WIDTH, bool DROPOUT>
static void attention_forward_run(cudaStream_t stream, float *out, float *lse, const float *qkv, int B, int T, int NH,
                                  int HS, DropoutMask mask) {
    const AttentionShape shape = attention_shape(B, T, NH, HS, FP32_TILE, 2 * (size_t)HS * sizeof *qkv);
    const size_t blocks = (size_t)shape.heads * (size_t)shape.tiles;
    constexpr int SHARED_BYTES = fp32_shared_bytes(WIDTH, 3, 1);
    attention_allow_shared<attention_forward_fp32_kernel<WIDTH, DROPOUT>>(SHARED_BYTES);
    cudaLaunchConfig_t config = launch_config(blocks, FP32_THREADS, SHARED_BYTES, stream);
    launch(config, attention_forward_fp32_kernel<WIDTH, DROPOUT>, out, lse, qkv, shape, mask);
}

// dots: (B, NH, T), scratch
template <int WIDTH, bool DROPOUT>
static void attention_backward_run(cudaStream_t stream, float *dots, float *dqkv, const float *dout, const float *qkv,
                                   const float *out, const float *lse, int B, int T, int NH, int HS, DropoutMask mask) {
    const AttentionShape shape = attention_shape(B, T, NH, HS, FP32_TILE, 2 * (size_t)HS * sizeof *qkv);
    const size_t blocks = (size_t)shape.heads * (size_t)shape.tiles;
    constexpr int QUERIES_BYTES = fp32_shared_bytes(WIDTH, 4, 1), KEYS_BYTES = fp32_shared_bytes(WIDTH, 4, 2);
    attention_allow_shared<attention_backward_queries_fp32_kernel<WIDTH, DROPOUT>>(QUERIES_BYTES);
    attention_allow_shared<attention_backward_keys_fp32_kernel<WIDTH, DROPOUT>>(KEYS_BYTES);
    cudaLaunchConfig_t config = launch_config(blocks, FP32_THREADS, QUERIES_BYTES, stream);
    launch(config, attention_backward_queries_fp32_kernel<WIDTH, DROPOUT>, dqkv, dots, dout, qkv, out, lse, shape,
           mask);
    config = launch_config(blocks, FP32_THREADS, KEYS_BYTES, stream);
    launch(config, attention_backward_keys_fp32_kernel<WIDTH, DROPOUT>, dqkv, dots, dout, qkv, lse, shape, mask);
}

#endif
