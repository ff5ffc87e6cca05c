// convert.h: between the storage types (floatX, gradX) and fp32, in which every operation computes; and the small
// arithmetic of sizes.
#ifndef CPU_CONVERT_H
#define CPU_CONVERT_H

#include "layout.h"

#if defined(PRECISION_BF16)
static inline float gradX_to_float(gradX value) {
    return __bfloat162float(value);
}
static inline gradX gradX_from(float value) {
    return __float2bfloat16(value);
}
#else
static inline float gradX_to_float(gradX value) {
    return value;
}
static inline gradX gradX_from(float value) {
    return value;
}
#endif

static inline size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static inline size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

#endif
