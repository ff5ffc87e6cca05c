// exp.h: the exponential as straight-line arithmetic, so that loops over it become vector code (the C library's is a
// call per element).
#ifndef CPU_EXP_H
#define CPU_EXP_H

#include <stdint.h>
#include <string.h>

// e^x within 1.5 units in the last place. Results below 2^-125 (x < -86.64) are 0, those above the largest number are
// infinity; NaN stays NaN.
//
// x = n ln 2 + r with |r| <= ln(2)/2: e^x = 2^n e^r, and the Taylor series of e^r to r^7 is good to 6e-9. n comes from
// adding 1.5 * 2^23, which leaves the nearest integer in the low bits of the mantissa. ln 2 is split in two so that
// n * (upper part) is exact.
static inline float fast_exp(float x) {
    const float magic = 12582912.0f, smallest = -86.6434f;
    float bounded = x < smallest ? smallest : x;
    bounded = bounded > 89.0f ? 89.0f : bounded;
    float shifted = bounded * 1.44269504f + magic;
    float n = shifted - magic;
    float r = bounded - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // 2^n by its exponent bits, in the two factors 2^(n-1) and 2, since 2^128 is not a number.
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    uint32_t power_bits = ((uint32_t)bits + 126u) << 23;
    float power;
    memcpy(&power, &power_bits, sizeof power);
    float result = p * power * 2.0f;
    return x < smallest ? 0.0f : result;
}

#endif
