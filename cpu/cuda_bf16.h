// cuda_bf16.h (CPU): the toolkit's bf16 type and its conversions: the upper half of an fp32, rounded to nearest even.
//
// Integer arithmetic without branches, so that loops over it become vector code on any instruction set and every
// machine gives the same bits, subnormal numbers included.
#ifndef CPU_CUDA_BF16_H
#define CPU_CUDA_BF16_H

#include <stdint.h>
#include <string.h>

typedef struct {
    uint16_t x; // sign, 8 bits of exponent, 7 bits of mantissa
} __nv_bfloat16;

static inline float __bfloat162float(__nv_bfloat16 value) {
    uint32_t bits = (uint32_t)value.x << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// Round to nearest, ties to even; overflow gives infinity; every NaN becomes 0x7fff, as on the GPU.
static inline __nv_bfloat16 __float2bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    // Half a unit in the last place, less one where the result would be even anyway: a tie then carries only from odd.
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    __nv_bfloat16 result;
    result.x = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
    return result;
}

#endif
