// convert.h: between the storage types (floatX, gradX) and fp32, in which every operation computes; and the small
// arithmetic of sizes.
#ifndef CPU_CONVERT_H
#define CPU_CONVERT_H

#if defined(PRECISION_FP32)
static inline float x_to_float(floatX value) {
    return value;
}
static inline floatX float_to_x(float value) {
    return value;
}
#else
static inline float x_to_float(floatX value) {
    return __bfloat162float(value);
}
static inline floatX float_to_x(float value) {
    return __float2bfloat16(value);
}
#endif

#if defined(PRECISION_BF16)
static inline float g_to_float(gradX value) {
    return __bfloat162float(value);
}
static inline gradX float_to_g(float value) {
    return __float2bfloat16(value);
}
#else
static inline float g_to_float(gradX value) {
    return value;
}
static inline gradX float_to_g(float value) {
    return value;
}
#endif

static inline size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static inline size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

static inline size_t round_up(size_t n, size_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

#endif
