// attention_backward.cuh: flash attention, backward, bf16.
//
// With p the probabilities, recomputed from lse, m the dropout factors and D = sum over d of dout * out:
//   dv = (p m)^T dout;   ds = p (m (dout v^T) - D);   dq = ds k / sqrt(HS);   dk = ds^T q / sqrt(HS)
// Two kernels, each of whose blocks owns the rows that it writes and adds to them in the order of its loop: no atomics,
// no order left to chance. The first owns queries, finds D, and sums dq over keys; the second owns keys, and sums dk
// and dv over queries. Both need p and ds, so two of seven products are computed twice; the other ways to add up
// dq, atomics in fp32 or a buffer for each block of keys, are not deterministic or take memory that grows with T^2.
//
// Both are built like the forward kernel: 128 rows in shared memory, two stages of what they are multiplied by, p and
// ds in registers. The second computes scores transposed, keys by queries, so that p^T and ds^T too are left operands
// as they are. Accumulators of dk and dv leave registers for 16 keys a warp, so there 8 warps share the 128 rows, as
// they do in the first where HS > 96; elsewhere 4 warps of 32 rows read half as much of shared memory for a product.
//
// Global memory per head of T positions: the first kernel reads queries, dout and out once, 6 T HS bytes, lse, 4 T by
// each of a row's 4 threads, and for each of its blocks keys and values up to the diagonal, sum of 4 HS min(T, 128 *
// (block + 1)) bytes; it writes dq, 2 T HS, and D, 4 T. The second reads keys and values once, 4 T HS, and for each of
// its blocks queries, dout, lse and D from the diagonal on, sum of (4 HS + 8) (T - 128 * block) bytes; it writes dk and
// dv, 4 T HS. For long T both sums are 2 HS T^2 / 128, most of it from L2.
// Operations: 14 HS T^2 / 2 on tensor cores, T^2 exponentials, and what lies above the diagonal in its tiles.
#ifndef ATTENTION_BACKWARD_CUH
#define ATTENTION_BACKWARD_CUH

#include "attention_tile.cuh"

template <int WIDTH> struct AttentionBackwardQueries {
    enum { M = WIDTH <= 96 ? 2 : 1, WARPS = WIDTH <= 96 ? 4 : 8, THREADS = WARPS * WARP, ROWS = WARPS * M * 16 };
    enum { BLOCKS = WIDTH <= 96 ? 2 : 1, KEYS = 32 };
    enum { SHARED_BYTES = (2 * ROWS + 2 * 2 * KEYS) * WIDTH * 2 + ROWS * 4 };
    enum { MASK_WORDS = ROWS * KEYS / 32 }; // of a stage, behind the rest where there is dropout
};

// dots[r], r < rows, = dout . out of query first + r, and the same to `to`, which begins at query 0. By one warp;
// dout: a tile, rows from `row` on. Queries from T on get 0.
template <int WIDTH>
static __device__ __forceinline__ void attention_dots(float *dots, float *to, const __nv_bfloat16 *dout, int row,
                                                      const __nv_bfloat16 *out, int stride, int first, int rows, int T,
                                                      int HS) {
    constexpr int LANES = WIDTH / 8 <= 8 ? 8 : 16; // of a row, a chunk each
    const int lane = threadIdx.x % WARP, chunk = lane % LANES;
#pragma unroll 4
    for (int r = lane / LANES; r < rows; r += WARP / LANES) {
        const int t = first + r;
        float dot = 0.0f;
        if (t < T && chunk * 8 < HS) {
            const __nv_bfloat16 *from = out + (int64_t)t * stride + chunk * 8;
            const __nv_bfloat16 *with = dout + tile_at<WIDTH>(row + r, chunk);
            if (HS % 8 == 0) {
                const Pack<__nv_bfloat16, 8> o = load<8>(from);
                Pack<__nv_bfloat16, 8> d;
                memcpy(&d, with, sizeof d);
#pragma unroll
                for (int e = 0; e < 8; e++) dot += to_float(o[e]) * to_float(d[e]);
            } else {
                for (int e = 0; e < 8 && chunk * 8 + e < HS; e++)
                    dot += to_float(load_one(from + e)) * to_float(with[e]);
            }
        }
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, offset);
        if (chunk == 0) {
            dots[r] = dot;
            if (t < T) store_one(to + t, dot);
        }
    }
}

template <int WIDTH, bool DROPOUT>
static __global__ void __launch_bounds__(AttentionBackwardQueries<WIDTH>::THREADS,
                                         AttentionBackwardQueries<WIDTH>::BLOCKS)
    attention_backward_queries_bf16_kernel(__nv_bfloat16 *dqkv, float *dots, const __nv_bfloat16 *dout,
                                           const __nv_bfloat16 *qkv, const __nv_bfloat16 *out, const float *lse,
                                           AttentionShape shape, DropoutMask mask) {
    typedef AttentionBackwardQueries<WIDTH> Tiles;
    constexpr int M = Tiles::M, THREADS = Tiles::THREADS, ROWS = Tiles::ROWS, KEYS = Tiles::KEYS;
    DYNAMIC_SHARED(__nv_bfloat16, queries);                                     // [ROWS][WIDTH]
    __nv_bfloat16 *dresult = queries + ROWS * WIDTH;                            // [ROWS][WIDTH]
    __nv_bfloat16 *stages = dresult + ROWS * WIDTH;                             // [2][keys, values][KEYS][WIDTH]
    float *row_dots = reinterpret_cast<float *>(stages + 2 * 2 * KEYS * WIDTH); // [ROWS]
    uint32_t *bits = reinterpret_cast<uint32_t *>(row_dots + ROWS);             // [2][ROWS][KEYS / 32]
    const AttentionBlock block = attention_block(shape);
    const int T = shape.T, HS = shape.HS, lane = threadIdx.x % WARP, row = (int)threadIdx.x / WARP * M * 16;
    const int first = (shape.tiles - 1 - block.tile) * ROWS, first_row = first + row;
    const int end = T < first + ROWS ? T : first + ROWS; // of the keys that these queries see
    const size_t head_rows = (size_t)block.head * (size_t)T;
    const __nv_bfloat16 *q = qkv + block.qkv, *k = q + block.C, *v = k + block.C;
    tile_load<WIDTH, ROWS, THREADS>(queries, q, block.qkv_stride, first, T, HS);
    tile_load<WIDTH, ROWS, THREADS>(dresult, dout + block.row, block.row_stride, first, T, HS);
    tile_load<WIDTH, KEYS, THREADS>(stages, k, block.qkv_stride, 0, T, HS);
    tile_load<WIDTH, KEYS, THREADS>(stages + KEYS * WIDTH, v, block.qkv_stride, 0, T, HS);
    cp_async_commit();
    if constexpr (DROPOUT) draw_mask<ROWS, KEYS, THREADS>(bits, mask, shape, block.head, first, 0);
    cp_async_wait<0>();
    __syncthreads();
    attention_dots<WIDTH>(row_dots + row, dots + head_rows, dresult, row, out + block.row, block.row_stride, first_row,
                          M * 16, T, HS);
    __syncwarp();
    const float scale = shape.scale * LOG2_E;
    float row_lse[M][2], dot[M][2]; // lse in base 2; rows from T on have zero queries, dout and D, hence zero dq
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = i * 16 + half * 8 + lane / 4, t = first_row + r;
            dot[i][half] = row_dots[row + r];
            row_lse[i][half] = t < T ? load_one(lse + head_rows + (size_t)t) * LOG2_E : 0.0f;
        }

    float dq[M][WIDTH / 8][4] = {};
    for (int key = 0; key < end; key += KEYS) {
        const int stage = key / KEYS % 2;
        const __nv_bfloat16 *keys = stages + stage * 2 * KEYS * WIDTH, *values = keys + KEYS * WIDTH;
        [[maybe_unused]] const uint32_t *row_bits = bits + stage * Tiles::MASK_WORDS;
        cp_async_wait<0>();
        __syncthreads(); // this stage is complete, and the other is no longer read
        if (key + KEYS < end) {
            __nv_bfloat16 *next = stages + (1 - stage) * 2 * KEYS * WIDTH;
            tile_load<WIDTH, KEYS, THREADS>(next, k, block.qkv_stride, key + KEYS, T, HS);
            tile_load<WIDTH, KEYS, THREADS>(next + KEYS * WIDTH, v, block.qkv_stride, key + KEYS, T, HS);
            if constexpr (DROPOUT)
                draw_mask<ROWS, KEYS, THREADS>(bits + (1 - stage) * Tiles::MASK_WORDS, mask, shape, block.head, first,
                                               key + KEYS);
        }
        cp_async_commit();
        if (first_row >= T || key >= first_row + M * 16) continue;
        float p[M][KEYS / 8][4] = {}, ds[M][KEYS / 8][4] = {};
        multiply_by_rows<WIDTH>(p, queries + row * WIDTH, keys);
        multiply_by_rows<WIDTH>(ds, dresult + row * WIDTH, values);
        if (key + KEYS - 1 > first_row) mask_future<false>(p, first_row, key);
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t kept = DROPOUT ? row_bits[row + i * 16 + half * 8 + lane / 4] : 0;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float *x = &ds[i][n][half * 2 + e];
                        if constexpr (DROPOUT) *x *= kept >> (n * 8 + lane % 4 * 2 + e) & 1 ? mask.scale : 0.0f;
                        *x = exp2_approx(p[i][n][half * 2 + e] * scale - row_lse[i][half]) * (*x - dot[i][half]);
                    }
            }
        multiply<WIDTH>(dq, ds, keys);
    }
    if (first_row >= T) return;
    float factor[M][2];
#pragma unroll
    for (int i = 0; i < M; i++) factor[i][0] = factor[i][1] = shape.scale;
    tile_store<WIDTH>(dqkv + block.qkv, block.qkv_stride, first_row, T, HS, queries, row, dq, factor);
}

template <int WIDTH> struct AttentionBackwardKeys {
    enum { M = 1, WARPS = 8, THREADS = WARPS * WARP, ROWS = WARPS * M * 16 };
    enum { BLOCKS = 1, QUERIES = WIDTH <= 96 ? 64 : 32 };
    enum { SHARED_BYTES = (2 * ROWS + 2 * 2 * QUERIES) * WIDTH * 2 + 2 * 2 * QUERIES * 4 };
    enum { MASK_WORDS = QUERIES * ROWS / 32 }; // of a stage, behind the rest where there is dropout
};

template <int WIDTH, bool DROPOUT>
static __global__ void __launch_bounds__(AttentionBackwardKeys<WIDTH>::THREADS, AttentionBackwardKeys<WIDTH>::BLOCKS)
    attention_backward_keys_bf16_kernel(__nv_bfloat16 *dqkv, const float *dots, const __nv_bfloat16 *dout,
                                        const __nv_bfloat16 *qkv, const float *lse, AttentionShape shape,
                                        DropoutMask mask) {
    typedef AttentionBackwardKeys<WIDTH> Tiles;
    constexpr int M = Tiles::M, THREADS = Tiles::THREADS, ROWS = Tiles::ROWS, QUERIES = Tiles::QUERIES;
    static_assert(2 * QUERIES <= THREADS, "a thread loads one lse or D of a tile");
    static_assert(ROWS % (2 * QUERIES) == 0, "a block begins with stage 0");
    DYNAMIC_SHARED(__nv_bfloat16, keys);           // [ROWS][WIDTH]
    __nv_bfloat16 *values = keys + ROWS * WIDTH;   // [ROWS][WIDTH]
    __nv_bfloat16 *stages = values + ROWS * WIDTH; // [2][queries, dout][QUERIES][WIDTH]
    float *stage_rows = reinterpret_cast<float *>(stages + 2 * 2 * QUERIES * WIDTH); // [2][lse, D][QUERIES]
    uint32_t *bits = reinterpret_cast<uint32_t *>(stage_rows + 2 * 2 * QUERIES);     // [2][QUERIES][ROWS / 32]
    const AttentionBlock block = attention_block(shape);
    const int T = shape.T, HS = shape.HS, lane = threadIdx.x % WARP, row = (int)threadIdx.x / WARP * M * 16;
    const int first = block.tile * ROWS, first_row = first + row;
    const __nv_bfloat16 *q = qkv + block.qkv, *k = q + block.C, *v = k + block.C, *d = dout + block.row;
    // Of a tile of queries, this thread copies one lse (in base 2) or one D, through a register.
    const int my_row = (int)threadIdx.x % QUERIES;
    const bool has_lse = (int)threadIdx.x < QUERIES, has_dot = !has_lse && (int)threadIdx.x < 2 * QUERIES;
    const float *my_column = (has_lse ? lse : dots) + (size_t)block.head * (size_t)T;
    auto row_value = [&](int query) {
        const int t = query + my_row;
        return (has_lse || has_dot) && t < T ? load_one(my_column + t) * (has_lse ? LOG2_E : 1.0f) : 0.0f;
    };
    tile_load<WIDTH, ROWS, THREADS>(keys, k, block.qkv_stride, first, T, HS);
    tile_load<WIDTH, ROWS, THREADS>(values, v, block.qkv_stride, first, T, HS);
    tile_load<WIDTH, QUERIES, THREADS>(stages, q, block.qkv_stride, first, T, HS);
    tile_load<WIDTH, QUERIES, THREADS>(stages + QUERIES * WIDTH, d, block.row_stride, first, T, HS);
    cp_async_commit();
    if (has_lse || has_dot) stage_rows[threadIdx.x] = row_value(first);
    if constexpr (DROPOUT) draw_mask<QUERIES, ROWS, THREADS>(bits, mask, shape, block.head, first, first);

    const float scale = shape.scale * LOG2_E;
    float dk[M][WIDTH / 8][4] = {}, dv[M][WIDTH / 8][4] = {};
    for (int query = first; query < T; query += QUERIES) {
        const int stage = query / QUERIES % 2;
        const __nv_bfloat16 *queries = stages + stage * 2 * QUERIES * WIDTH, *dresult = queries + QUERIES * WIDTH;
        const float *row_lse = stage_rows + stage * 2 * QUERIES, *row_dots = row_lse + QUERIES;
        [[maybe_unused]] const uint32_t *row_bits = bits + stage * Tiles::MASK_WORDS;
        cp_async_wait<0>();
        __syncthreads(); // this stage is complete, and the other is no longer read
        float next_row = 0.0f;
        if (query + QUERIES < T) {
            __nv_bfloat16 *next = stages + (1 - stage) * 2 * QUERIES * WIDTH;
            tile_load<WIDTH, QUERIES, THREADS>(next, q, block.qkv_stride, query + QUERIES, T, HS);
            tile_load<WIDTH, QUERIES, THREADS>(next + QUERIES * WIDTH, d, block.row_stride, query + QUERIES, T, HS);
            next_row = row_value(query + QUERIES);
            if constexpr (DROPOUT)
                draw_mask<QUERIES, ROWS, THREADS>(bits + (1 - stage) * Tiles::MASK_WORDS, mask, shape, block.head,
                                                  query + QUERIES, first);
        }
        cp_async_commit();
        if (first_row < T && query + QUERIES > first_row) {
            // Queries from T on have zero queries, dout, lse and D: they add zero.
            float p[M][QUERIES / 8][4] = {}, ds[M][QUERIES / 8][4] = {};
            multiply_by_rows<WIDTH>(p, keys + row * WIDTH, queries);
            multiply_by_rows<WIDTH>(ds, values + row * WIDTH, dresult);
            if (first_row + M * 16 - 1 > query) mask_future<true>(p, query, first_row);
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int column = n * 8 + lane % 4 * 2 + e;
                    const float l = row_lse[column], dot = row_dots[column];
                    // Bit 0: this thread's first key.
                    const uint32_t kept =
                        DROPOUT ? row_bits[column * (ROWS / 32) + row / 32] >> (row % 32 + lane / 4) : 0;
#pragma unroll
                    for (int i = 0; i < M; i++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            float *probability = &p[i][n][half * 2 + e], *x = &ds[i][n][half * 2 + e];
                            *probability = exp2_approx(*probability * scale - l);
                            if constexpr (DROPOUT) {
                                const float factor = kept >> (i * 16 + half * 8) & 1 ? mask.scale : 0.0f;
                                *x = *probability * (*x * factor - dot);
                                *probability *= factor;
                            } else {
                                *x = *probability * (*x - dot);
                            }
                        }
                }
            multiply<WIDTH>(dv, p, dresult);
            multiply<WIDTH>(dk, ds, queries);
        }
        if (has_lse || has_dot) stage_rows[(1 - stage) * 2 * QUERIES + (int)threadIdx.x] = next_row;
    }
    if (first_row >= T) return;
    float factor[M][2], one[M][2];
#pragma unroll
    for (int i = 0; i < M; i++) {
        factor[i][0] = factor[i][1] = shape.scale;
        one[i][0] = one[i][1] = 1.0f;
    }
    __nv_bfloat16 *to = dqkv + block.qkv;
    tile_store<WIDTH>(to + block.C, block.qkv_stride, first_row, T, HS, keys, row, dk, factor);
    tile_store<WIDTH>(to + 2 * block.C, block.qkv_stride, first_row, T, HS, values, row, dv, one);
}

// dots: (B, NH, T), scratch
template <int WIDTH, bool DROPOUT>
static void attention_backward_run(cudaStream_t stream, float *dots, __nv_bfloat16 *dqkv, const __nv_bfloat16 *dout,
                                   const __nv_bfloat16 *qkv, const __nv_bfloat16 *out, const float *lse, int B, int T,
                                   int NH, int HS, DropoutMask mask) {
    typedef AttentionBackwardQueries<WIDTH> Queries;
    AttentionShape shape = attention_shape(B, T, NH, HS, Queries::ROWS, 2 * (size_t)HS * sizeof *qkv);
    int shared_bytes = Queries::SHARED_BYTES + (DROPOUT ? 2 * Queries::MASK_WORDS * 4 : 0);
    attention_allow_shared<attention_backward_queries_bf16_kernel<WIDTH, DROPOUT>>(shared_bytes);
    cudaLaunchConfig_t config =
        launch_config((size_t)shape.heads * (size_t)shape.tiles, Queries::THREADS, (size_t)shared_bytes, stream);
    launch(config, attention_backward_queries_bf16_kernel<WIDTH, DROPOUT>, dqkv, dots, dout, qkv, out, lse, shape,
           mask);
    typedef AttentionBackwardKeys<WIDTH> Keys;
    shape = attention_shape(B, T, NH, HS, Keys::ROWS, 2 * (size_t)HS * sizeof *qkv);
    shared_bytes = Keys::SHARED_BYTES + (DROPOUT ? 2 * Keys::MASK_WORDS * 4 : 0);
    attention_allow_shared<attention_backward_keys_bf16_kernel<WIDTH, DROPOUT>>(shared_bytes);
    config = launch_config((size_t)shape.heads * (size_t)shape.tiles, Keys::THREADS, (size_t)shared_bytes, stream);
    launch(config, attention_backward_keys_bf16_kernel<WIDTH, DROPOUT>, dqkv, dots, dout, qkv, lse, shape, mask);
}

#endif
