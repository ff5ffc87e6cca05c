// tile.h: products of small matrices inside one thread, for attention.
#ifndef CPU_TILE_H
#define CPU_TILE_H

#include <stddef.h>
#include <string.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

// The machine's vectors, and how many sums fit its registers beside the operands: TILE_ROWS rows of TILE_WIDE vectors.
// TILE_PAD is what the sizes of matrices are padded to, a multiple of all of these.
#if defined(__AVX512F__)
enum { TILE_LANES = 16, TILE_ROWS = 8, TILE_WIDE = 2 };
#elif defined(__AVX__)
enum { TILE_LANES = 8, TILE_ROWS = 4, TILE_WIDE = 2 };
#else
enum { TILE_LANES = 4, TILE_ROWS = 4, TILE_WIDE = 2 };
#endif
enum { TILE_PAD = 16 };

typedef float TileVector __attribute__((vector_size(4 * TILE_LANES)));
typedef int TileIndex __attribute__((vector_size(4 * TILE_LANES)));

// Rows start anywhere, so vectors are not aligned in memory.
static inline TileVector tile_load(const float *from) {
    TileVector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

static inline void tile_store(float *to, TileVector vector) {
    memcpy(to, &vector, sizeof vector);
}

// Whether words may be pairs of bf16: their products are exact, and their sums fp32.
#if defined(__AVX512BF16__)
enum { TILE_HAS_PAIRS = 1 };
static inline TileVector tile_add_pairs(TileVector sum, float a, TileVector b) {
    __m512i a_word = _mm512_castps_si512(_mm512_set1_ps(a));
    return (TileVector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a_word, (__m512bh)b);
}
#else
enum { TILE_HAS_PAIRS = 0 };
static inline TileVector tile_add_pairs(TileVector sum, float a, TileVector b) {
    (void)a, (void)b;
    return sum;
}
#endif

// c (TILE_ROWS, vectors * TILE_LANES) (+)= a b over K. Elements of a and b are floats, or with `pairs` words of two
// bf16 each. `vectors` and `pairs` are constants where this is inlined.
static inline __attribute__((always_inline)) void tile_block(float *c, size_t ldc, const float *a, size_t a_row,
                                                             size_t a_col, const float *b, size_t ldb, int vectors,
                                                             int K, int accumulate, int pairs) {
    TileVector sums[TILE_ROWS][TILE_WIDE], zero = {0};
#pragma GCC unroll 8
    for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) {
            if (accumulate)
                sums[i][j] = tile_load(c + (size_t)i * ldc + j * TILE_LANES);
            else
                sums[i][j] = zero;
        }
    for (int k = 0; k < K; k++) {
        TileVector b_k[TILE_WIDE];
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) b_k[j] = tile_load(b + (size_t)k * ldb + j * TILE_LANES);
#pragma GCC unroll 8
        for (int i = 0; i < TILE_ROWS; i++) {
            float a_ik = a[(size_t)i * a_row + (size_t)k * a_col];
#pragma GCC unroll 2
            for (int j = 0; j < vectors; j++)
                sums[i][j] = pairs ? tile_add_pairs(sums[i][j], a_ik, b_k[j]) : sums[i][j] + a_ik * b_k[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) tile_store(c + (size_t)i * ldc + j * TILE_LANES, sums[i][j]);
}

// to (TILE_LANES, TILE_LANES) = the transpose of from; rows are ld_to and ld_from apart. Blocks off the diagonal change
// places, the halves first, then the halves of the quarters, down to single elements.
static inline void tile_transpose(float *to, size_t ld_to, const float *from, size_t ld_from) {
    TileVector row[TILE_LANES];
#pragma GCC unroll 16
    for (int i = 0; i < TILE_LANES; i++) row[i] = tile_load(from + (size_t)i * ld_from);
#pragma GCC unroll 4
    for (int size = TILE_LANES / 2; size > 0; size /= 2) {
        TileIndex upper, lower; // which of the lanes of two rows
#pragma GCC unroll 16
        for (int j = 0; j < TILE_LANES; j++) {
            upper[j] = j & size ? TILE_LANES + j - size : j;
            lower[j] = j & size ? TILE_LANES + j : j + size;
        }
#pragma GCC unroll 16
        for (int i = 0; i < TILE_LANES; i++)
            if (!(i & size)) {
                TileVector a = row[i], b = row[i + size];
                row[i] = __builtin_shuffle(a, b, upper);
                row[i + size] = __builtin_shuffle(a, b, lower);
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < TILE_LANES; i++) tile_store(to + (size_t)i * ld_to, row[i]);
}

static inline __attribute__((always_inline)) void tile_blocks(float *c, size_t ldc, const float *a, size_t a_row,
                                                              size_t a_col, const float *b, size_t ldb, int M, int N,
                                                              int K, int accumulate, int pairs) {
    int j = 0;
    for (; j + TILE_WIDE * TILE_LANES <= N; j += TILE_WIDE * TILE_LANES)
        for (int i = 0; i < M; i += TILE_ROWS)
            tile_block(c + (size_t)i * ldc + j, ldc, a + (size_t)i * a_row, a_row, a_col, b + j, ldb, TILE_WIDE, K,
                       accumulate, pairs);
    for (; j < N; j += TILE_LANES)
        for (int i = 0; i < M; i += TILE_ROWS)
            tile_block(c + (size_t)i * ldc + j, ldc, a + (size_t)i * a_row, a_row, a_col, b + j, ldb, 1, K, accumulate,
                       pairs);
}

// c (M, N) (+)= a (M, K) b (K, N). Element (i, k) of a is a[i * a_row + k * a_col], so a may be a transposed matrix;
// rows of b and c are ldb and ldc apart. M and N are multiples of TILE_PAD.
static inline void tile_product(float *c, size_t ldc, const float *a, size_t a_row, size_t a_col, const float *b,
                                size_t ldb, int M, int N, int K, int accumulate) {
    tile_blocks(c, ldc, a, a_row, a_col, b, ldb, M, N, K, accumulate, 0);
}

// c (M, N) = a b over K words of two bf16.   a (M, K), b (K, N)
static inline void tile_product_pairs(float *c, size_t ldc, const float *a, size_t a_row, const float *b, size_t ldb,
                                      int M, int N, int K) {
    tile_blocks(c, ldc, a, a_row, 1, b, ldb, M, N, K, 0, 1);
}

#endif
