// tile.h: products of small fp32 matrices inside one thread, for attention.
#ifndef CPU_TILE_H
#define CPU_TILE_H

#include <stddef.h>
#include <string.h>

// Sixteen floats; the compiler splits them over whatever registers the machine has. Aligned like a float, because rows
// start anywhere.
typedef float TileVector __attribute__((vector_size(64), aligned(4), may_alias));

enum { TILE_LANES = 16 };

// Sums held in registers: TILE_ROWS rows of TILE_WIDE vectors, as many as leave registers for the operands.
#ifdef __AVX512F__
enum { TILE_ROWS = 8, TILE_WIDE = 2 };
#else
enum { TILE_ROWS = 4, TILE_WIDE = 1 };
#endif

// c (TILE_ROWS, vectors * TILE_LANES) (+)= a b over K. `vectors` is a constant where this is inlined.
static inline __attribute__((always_inline)) void tile_block(float *c, size_t ldc, const float *a, size_t a_row,
                                                             size_t a_col, const float *b, size_t ldb, int vectors,
                                                             int K, int accumulate) {
    TileVector sums[TILE_ROWS][TILE_WIDE], zero = {0};
#pragma GCC unroll 8
    for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) {
            if (accumulate)
                sums[i][j] = *(const TileVector *)(c + (size_t)i * ldc + j * TILE_LANES);
            else
                sums[i][j] = zero;
        }
    for (int k = 0; k < K; k++) {
        TileVector b_k[TILE_WIDE];
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) b_k[j] = *(const TileVector *)(b + (size_t)k * ldb + j * TILE_LANES);
#pragma GCC unroll 8
        for (int i = 0; i < TILE_ROWS; i++) {
            float a_ik = a[(size_t)i * a_row + (size_t)k * a_col];
#pragma GCC unroll 2
            for (int j = 0; j < vectors; j++) sums[i][j] += a_ik * b_k[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) *(TileVector *)(c + (size_t)i * ldc + j * TILE_LANES) = sums[i][j];
}

// to (16, 16) = the transpose of from (16, 16); rows are ld_to and ld_from apart. Blocks of 8, 4, 2, 1 off the diagonal
// change places.
static inline void tile_transpose(float *to, size_t ld_to, const float *from, size_t ld_from) {
    typedef int TileIndex __attribute__((vector_size(64)));
    typedef float TileRow __attribute__((vector_size(64)));
    TileRow row[TILE_LANES];
#pragma GCC unroll 16
    for (int i = 0; i < TILE_LANES; i++) memcpy(&row[i], from + (size_t)i * ld_from, sizeof row[i]);
#pragma GCC unroll 4
    for (int size = TILE_LANES / 2; size > 0; size /= 2) {
        TileIndex upper, lower; // of the 32 lanes of two rows
#pragma GCC unroll 16
        for (int j = 0; j < TILE_LANES; j++) {
            upper[j] = j & size ? TILE_LANES + j - size : j;
            lower[j] = j & size ? TILE_LANES + j : j + size;
        }
#pragma GCC unroll 16
        for (int i = 0; i < TILE_LANES; i++)
            if (!(i & size)) {
                TileRow a = row[i], b = row[i + size];
                row[i] = __builtin_shuffle(a, b, upper);
                row[i + size] = __builtin_shuffle(a, b, lower);
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < TILE_LANES; i++) memcpy(to + (size_t)i * ld_to, &row[i], sizeof row[i]);
}

// c (M, N) (+)= a (M, K) b (K, N). Element (i, k) of a is a[i * a_row + k * a_col], so a may be a transposed matrix;
// rows of b and c are ldb and ldc apart. M is a multiple of 8, N of 16.
static inline void tile_product(float *c, size_t ldc, const float *a, size_t a_row, size_t a_col, const float *b,
                                size_t ldb, int M, int N, int K, int accumulate) {
    int j = 0;
    for (; j + TILE_WIDE * TILE_LANES <= N; j += TILE_WIDE * TILE_LANES)
        for (int i = 0; i < M; i += TILE_ROWS)
            tile_block(c + (size_t)i * ldc + j, ldc, a + (size_t)i * a_row, a_row, a_col, b + j, ldb, TILE_WIDE, K,
                       accumulate);
    for (; j < N; j += TILE_LANES)
        for (int i = 0; i < M; i += TILE_ROWS)
            tile_block(c + (size_t)i * ldc + j, ldc, a + (size_t)i * a_row, a_row, a_col, b + j, ldb, 1, K, accumulate);
}

#endif
