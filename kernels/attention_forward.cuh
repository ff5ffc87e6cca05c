// attention_forward.cuh: flash attention (Dao, Fu, Ermon, Rudra, Ré, NeurIPS 2022; Dao, ICLR 2024), forward, bf16.
//
// A block of 4 warps owns 128 queries of a head, 32 a warp: with 32 rows each fragment of keys or values read from
// shared memory feeds two products, and shared memory keeps up with the tensor cores. It walks over the keys up to its
// last query in tiles of 64 (32 where HS > 96 or with dropout, for the sake of registers), two stages of keys and
// values in shared memory: one is computed on while the next is copied. A tile costs one barrier. Each row keeps the
// largest score so far and the sum of exponentials relative to it, rescaled when a larger one appears (online softmax);
// scores and probabilities stay in registers. Tiles after the diagonal are never loaded, warps skip those that they see
// nothing of, and only tiles on the diagonal are masked.
//
// Global memory, with R = 128 and tile = 64 or 32 as above, per head of T positions: reads queries once, 2 T HS bytes,
// and keys and values once for each block, 4 HS sum over blocks of min(T, R * (block + 1)) bytes, which for long T is
// 2 HS T^2 / R, most of it from L2; writes out once, 2 T HS bytes, and lse, 4 T bytes.
// Operations: 4 HS T^2 / 2 on tensor cores and T^2 / 2 exponentials, and what lies above the diagonal in its tiles.
#ifndef ATTENTION_FORWARD_CUH
#define ATTENTION_FORWARD_CUH

#include "attention_tile.cuh"

// Online softmax of a tile of scores, before scaling: scores become exp(scale * (score - largest)); largest, sum and
// result follow. `sum` is of this thread's columns alone. scale: log2(e) / sqrt(HS).
template <int M, int N, int R>
static __device__ __forceinline__ void online_softmax(float (&scores)[M][N][4], float (&largest)[M][2],
                                                      float (&sum)[M][2], float (&result)[M][R][4], float scale) {
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = largest[i][half];
#pragma unroll
            for (int n = 0; n < N; n++) most = fmaxf(most, fmaxf(scores[i][n][half * 2], scores[i][n][half * 2 + 1]));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
            const float offset = most * scale, correction = exp2_approx(largest[i][half] * scale - offset);
            largest[i][half] = most;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float *p = &scores[i][n][half * 2 + e];
                    *p = exp2_approx(*p * scale - offset);
                    total += *p;
                }
            sum[i][half] = sum[i][half] * correction + total;
            // After the first tiles a larger score is rare.
            if (correction != 1.0f)
#pragma unroll
                for (int n = 0; n < R; n++) {
                    result[i][n][half * 2] *= correction;
                    result[i][n][half * 2 + 1] *= correction;
                }
        }
}

template <int WIDTH, bool DROPOUT> struct AttentionForward {
    enum { M = 2, WARPS = 4, THREADS = WARPS * WARP, ROWS = WARPS * M * 16 };
    enum { BLOCKS = 2, KEYS = WIDTH <= 96 && !DROPOUT ? 64 : 32 };
    enum { SHARED_BYTES = (ROWS + 2 * 2 * KEYS) * WIDTH * 2 };
    enum { MASK_WORDS = ROWS * KEYS / 32 }; // of a stage, behind the rest where there is dropout
};

template <int WIDTH, bool DROPOUT>
static __global__ void __launch_bounds__(AttentionForward<WIDTH, DROPOUT>::THREADS,
                                         AttentionForward<WIDTH, DROPOUT>::BLOCKS)
    attention_forward_bf16_kernel(__nv_bfloat16 *out, float *lse, const __nv_bfloat16 *qkv, AttentionShape shape,
                                  DropoutMask mask) {
    typedef AttentionForward<WIDTH, DROPOUT> Tiles;
    constexpr int M = Tiles::M, THREADS = Tiles::THREADS, ROWS = Tiles::ROWS, KEYS = Tiles::KEYS;
    DYNAMIC_SHARED(__nv_bfloat16, queries);                                       // [ROWS][WIDTH]
    __nv_bfloat16 *stages = queries + ROWS * WIDTH;                               // [2][keys, values][KEYS][WIDTH]
    uint32_t *bits = reinterpret_cast<uint32_t *>(stages + 2 * 2 * KEYS * WIDTH); // [2][ROWS][KEYS / 32]
    const AttentionBlock block = attention_block(shape);
    const int T = shape.T, HS = shape.HS, lane = threadIdx.x % WARP, row = (int)threadIdx.x / WARP * M * 16;
    const int first = (shape.tiles - 1 - block.tile) * ROWS, first_row = first + row;
    const int end = T < first + ROWS ? T : first + ROWS; // of the keys that these queries see
    const __nv_bfloat16 *q = qkv + block.qkv, *k = q + block.C, *v = k + block.C;
    tile_load<WIDTH, ROWS, THREADS>(queries, q, block.qkv_stride, first, T, HS);
    tile_load<WIDTH, KEYS, THREADS>(stages, k, block.qkv_stride, 0, T, HS);
    tile_load<WIDTH, KEYS, THREADS>(stages + KEYS * WIDTH, v, block.qkv_stride, 0, T, HS);
    cp_async_commit();
    if constexpr (DROPOUT) draw_mask<ROWS, KEYS, THREADS>(bits, mask, shape, block.head, first, 0);

    float result[M][WIDTH / 8][4] = {}, largest[M][2], sum[M][2] = {};
#pragma unroll
    for (int i = 0; i < M; i++) largest[i][0] = largest[i][1] = -INFINITY;
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
        // Every row sees the first key of each tile from here on, so that `largest` is finite. Rows from T on too:
        // their queries are zero, and so are keys and values from T on.
        float scores[M][KEYS / 8][4] = {};
        multiply_by_rows<WIDTH>(scores, queries + row * WIDTH, keys);
        if (key + KEYS - 1 > first_row) mask_future<false>(scores, first_row, key);
        online_softmax(scores, largest, sum, result, shape.scale * LOG2_E);
        if constexpr (DROPOUT)
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint32_t *word = row_bits + (row + i * 16 + half * 8 + lane / 4) * (KEYS / 32);
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++) {
                        const uint32_t kept = word[n / 4] >> (n % 4 * 8 + lane % 4 * 2);
                        scores[i][n][half * 2] *= kept & 1 ? mask.scale : 0.0f;
                        scores[i][n][half * 2 + 1] *= kept & 2 ? mask.scale : 0.0f;
                    }
                }
        multiply<WIDTH>(result, scores, values);
    }

    if (first_row >= T) return;
    float inverse[M][2];
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[i][half];
            total += __shfl_xor_sync(ALL_LANES, total, 1);
            total += __shfl_xor_sync(ALL_LANES, total, 2);
            inverse[i][half] = 1.0f / total;
            const int t = first_row + i * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && t < T)
                store_one(lse + (size_t)block.head * (size_t)T + (size_t)t,
                          largest[i][half] * shape.scale + logf(total));
        }
    tile_store<WIDTH>(out + block.row, block.row_stride, first_row, T, HS, queries, row, result, inverse);
}

template <int WIDTH, bool DROPOUT>
static void attention_forward_run(cudaStream_t stream, __nv_bfloat16 *out, float *lse, const __nv_bfloat16 *qkv, int B,
                                  int T, int NH, int HS, DropoutMask mask) {
    typedef AttentionForward<WIDTH, DROPOUT> Tiles;
    const AttentionShape shape = attention_shape(B, T, NH, HS, Tiles::ROWS, 2 * (size_t)HS * sizeof *qkv);
    const int shared_bytes = Tiles::SHARED_BYTES + (DROPOUT ? 2 * Tiles::MASK_WORDS * 4 : 0);
    attention_allow_shared<attention_forward_bf16_kernel<WIDTH, DROPOUT>>(shared_bytes);
    cudaLaunchConfig_t config =
        launch_config((size_t)shape.heads * (size_t)shape.tiles, Tiles::THREADS, (size_t)shared_bytes, stream);
    launch(config, attention_forward_bf16_kernel<WIDTH, DROPOUT>, out, lse, qkv, shape, mask);
}

#endif
