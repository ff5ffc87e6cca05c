// rank_sum.h: the element types and operations of collectives, and the reduction that all of them use.
//
// A reduction goes in rank order: ((x0 + x1) + x2) + ..., element by element, so its bits depend neither on the
// collective, nor on how a buffer is cut into pieces, nor on which rank computes it. bf16 is accumulated in fp32 and
// rounded once, at the end. Integers wrap around. A NaN of any rank gives NaN, in minimum and maximum too.
#ifndef CPU_RANK_SUM_H
#define CPU_RANK_SUM_H

#include <cuda_bf16.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

// NCCL's values.
typedef enum {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6, // refused: the program does not use it
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9
} ncclDataType_t;

typedef enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4 // refused: the program scales before it sums
} ncclRedOp_t;

// Bytes of an element; 0 for types that are refused.
static inline size_t rank_sum_type_bytes(ncclDataType_t type) {
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 0, 4, 8, 2};
    return (unsigned)type < sizeof bytes / sizeof bytes[0] ? bytes[type] : 0;
}

enum { RANK_SUM_BLOCK = 512 }; // elements whose running sums stay in the first-level cache

// STORED: the type in memory. WIDE: of the running sum. MODULAR: what it is added and multiplied in; unsigned for
// integers, whose overflow is then defined. A pass over a block is a function of its own, never inlined: among the
// others gcc 12 makes code of it that takes ten times as long.
#define RANK_SUM_DEFINE(NAME, STORED, WIDE, MODULAR, LOAD, STORE, IS_NAN)                                           \
    static __attribute__((noinline)) void NAME##_pass(WIDE *__restrict sum, const STORED *__restrict x, size_t n,   \
                                                      ncclRedOp_t op) {                                             \
        if (op == ncclSum)                                                                                          \
            for (size_t i = 0; i < n; i++) sum[i] = (WIDE)((MODULAR)sum[i] + (MODULAR)LOAD(x[i]));                  \
        else if (op == ncclProd)                                                                                    \
            for (size_t i = 0; i < n; i++) sum[i] = (WIDE)((MODULAR)sum[i] * (MODULAR)LOAD(x[i]));                  \
        else                                                                                                        \
            for (size_t i = 0; i < n; i++) {                                                                        \
                WIDE value = LOAD(x[i]);                                                                            \
                int better = op == ncclMax ? value > sum[i] : value < sum[i];                                       \
                sum[i] = better || IS_NAN(value) ? value : sum[i];                                                  \
            }                                                                                                       \
    }                                                                                                               \
    static inline void NAME(void *out, const void *const *inputs, int ranks, size_t count, ncclRedOp_t op) {        \
        WIDE sum[RANK_SUM_BLOCK] __attribute__((aligned(64)));                                                      \
        for (size_t first = 0; first < count; first += RANK_SUM_BLOCK) {                                            \
            size_t n = count - first < (size_t)RANK_SUM_BLOCK ? count - first : (size_t)RANK_SUM_BLOCK;             \
            const STORED *x = (const STORED *)inputs[0] + first;                                                    \
            for (size_t i = 0; i < n; i++) sum[i] = LOAD(x[i]);                                                     \
            for (int rank = 1; rank < ranks; rank++) NAME##_pass(sum, (const STORED *)inputs[rank] + first, n, op); \
            STORED *y = (STORED *)out + first;                                                                      \
            for (size_t i = 0; i < n; i++) y[i] = STORE(sum[i]);                                                    \
        }                                                                                                           \
    }

#define RANK_SUM_SAME(x) (x)
#define RANK_SUM_NEVER(x) 0
#define RANK_SUM_IS_NAN(x) __builtin_isnan(x)
RANK_SUM_DEFINE(rank_sum_int8, int8_t, int8_t, uint8_t, RANK_SUM_SAME, RANK_SUM_SAME, RANK_SUM_NEVER)
RANK_SUM_DEFINE(rank_sum_uint8, uint8_t, uint8_t, uint8_t, RANK_SUM_SAME, RANK_SUM_SAME, RANK_SUM_NEVER)
RANK_SUM_DEFINE(rank_sum_int32, int32_t, int32_t, uint32_t, RANK_SUM_SAME, RANK_SUM_SAME, RANK_SUM_NEVER)
RANK_SUM_DEFINE(rank_sum_uint32, uint32_t, uint32_t, uint32_t, RANK_SUM_SAME, RANK_SUM_SAME, RANK_SUM_NEVER)
RANK_SUM_DEFINE(rank_sum_int64, int64_t, int64_t, uint64_t, RANK_SUM_SAME, RANK_SUM_SAME, RANK_SUM_NEVER)
RANK_SUM_DEFINE(rank_sum_uint64, uint64_t, uint64_t, uint64_t, RANK_SUM_SAME, RANK_SUM_SAME, RANK_SUM_NEVER)
RANK_SUM_DEFINE(rank_sum_float32, float, float, float, RANK_SUM_SAME, RANK_SUM_SAME, RANK_SUM_IS_NAN)
RANK_SUM_DEFINE(rank_sum_float64, double, double, double, RANK_SUM_SAME, RANK_SUM_SAME, RANK_SUM_IS_NAN)
RANK_SUM_DEFINE(rank_sum_bfloat16, __nv_bfloat16, float, float, __bfloat162float, __float2bfloat16, RANK_SUM_IS_NAN)

// Sums of bf16 where the processor converts them: running sums stay in registers, which is 1.4 times as fast. The
// instruction takes denormals for zeros and keeps a NaN's bits; what has one of these is rounded again.
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
enum { RANK_SUM_VECTORS = 1, RANK_SUM_RARE = 0x01 | 0x20 | 0x80 }; // quiet NaN, denormal, signalling NaN

// The forms with a mask: of the others' "undefined" vectors gcc's C++ compiler warns.
static inline __m512 rank_sum_widen(const __nv_bfloat16 *x) {
    __m256i half;
    memcpy(&half, x, sizeof half);
    const __mmask16 all = 0xffff;
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(all, _mm512_maskz_cvtepu16_epi32(all, half), 16));
}

static inline void rank_sum_vectors(__nv_bfloat16 *out, const void *const *inputs, int ranks, size_t count) {
    enum { N = 32 };
    size_t whole = count / N * N;
    for (size_t i = 0; i < whole; i += N) {
        const __nv_bfloat16 *x = (const __nv_bfloat16 *)inputs[0] + i;
        __m512 low = rank_sum_widen(x), high = rank_sum_widen(x + N / 2);
        for (int rank = 1; rank < ranks; rank++) {
            x = (const __nv_bfloat16 *)inputs[rank] + i;
            low = _mm512_add_ps(low, rank_sum_widen(x));
            high = _mm512_add_ps(high, rank_sum_widen(x + N / 2));
        }
        const __m512bh rounded = _mm512_cvtne2ps_pbh(high, low);
        memcpy(out + i, &rounded, sizeof rounded);
        if (_mm512_fpclass_ps_mask(low, RANK_SUM_RARE) != 0 || _mm512_fpclass_ps_mask(high, RANK_SUM_RARE) != 0) {
            float sums[N];
            memcpy(sums, &low, sizeof low);
            memcpy(sums + N / 2, &high, sizeof high);
            for (size_t j = 0; j < N; j++) out[i + j] = __float2bfloat16(sums[j]);
        }
    }
    for (size_t i = whole; i < count; i++) {
        float sum = __bfloat162float(((const __nv_bfloat16 *)inputs[0])[i]);
        for (int rank = 1; rank < ranks; rank++) sum += __bfloat162float(((const __nv_bfloat16 *)inputs[rank])[i]);
        out[i] = __float2bfloat16(sum);
    }
}
#else
enum { RANK_SUM_VECTORS = 0 };
static inline void rank_sum_vectors(__nv_bfloat16 *out, const void *const *inputs, int ranks, size_t count) {
    (void)out, (void)inputs, (void)ranks, (void)count;
}
#endif

// out[i] = inputs[0][i] op inputs[1][i] op ... for `count` elements. `out` may be one of the inputs.
static inline void rank_sum(void *out, const void *const *inputs, int ranks, size_t count, ncclDataType_t type,
                            ncclRedOp_t op) {
    switch (type) {
    case ncclInt8:
        rank_sum_int8(out, inputs, ranks, count, op);
        break;
    case ncclUint8:
        rank_sum_uint8(out, inputs, ranks, count, op);
        break;
    case ncclInt32:
        rank_sum_int32(out, inputs, ranks, count, op);
        break;
    case ncclUint32:
        rank_sum_uint32(out, inputs, ranks, count, op);
        break;
    case ncclInt64:
        rank_sum_int64(out, inputs, ranks, count, op);
        break;
    case ncclUint64:
        rank_sum_uint64(out, inputs, ranks, count, op);
        break;
    case ncclFloat32:
        rank_sum_float32(out, inputs, ranks, count, op);
        break;
    case ncclFloat64:
        rank_sum_float64(out, inputs, ranks, count, op);
        break;
    case ncclBfloat16:
        if (RANK_SUM_VECTORS && op == ncclSum)
            rank_sum_vectors((__nv_bfloat16 *)out, inputs, ranks, count);
        else
            rank_sum_bfloat16(out, inputs, ranks, count, op);
        break;
    case ncclFloat16:
        break; // has no size, so no collective gets here with it
    }
}

#endif
