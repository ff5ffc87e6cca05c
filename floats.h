// floats.h: fp32, bf16 and fp16 as files hold them, little-endian, to and from fp32.
//
// Decoding is exact, NaNs included. Encoding rounds to nearest, ties to even; what was decoded from a type encodes to
// the same bytes again.
#ifndef FLOATS_H
#define FLOATS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum {
    FLOAT_F32,
    FLOAT_BF16, // the upper half of an fp32
    FLOAT_F16   // IEEE 754 binary16
} FloatType;

enum { FLOATS_CHUNK = 16384 }; // halves converted at a time, so that their buffer fits a stack

static inline size_t float_type_size(FloatType type) {
    return type == FLOAT_F32 ? 4 : 2;
}

// How many of n values to convert next.
static inline size_t floats_chunk(size_t n) {
    return n < (size_t)FLOATS_CHUNK ? n : (size_t)FLOATS_CHUNK;
}

static inline float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float float_from_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return float_from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13); // infinity, NaN
    if (magnitude >= 0x0400) return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));     // biases 15 and 127
    const float value = (float)magnitude * 0x1p-24f; // subnormal, or zero
    return sign != 0 ? -value : value;
}

static inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000 && (bits & 0xffff) != 0) return (uint16_t)(bits >> 16 | 0x40); // stays a NaN
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Beyond 65504, the largest fp16, infinity.
static inline uint16_t float_to_f16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) // a NaN stays one, with the bits that there is room for
        return (uint16_t)(sign | 0x7c00 | (magnitude >> 13 & 0x3ff) | ((magnitude >> 13 & 0x3ff) == 0 ? 0x200 : 0));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);    // 65520, half way to the next
    if (magnitude < 0x38800000) {                                     // below 2^-14: in steps of 2^-24
        float steps = float_from_bits(magnitude) * 0x1p24f + 0x1p23f; // the sum is rounded to a whole number
        uint32_t rounded;
        memcpy(&rounded, &steps, sizeof rounded);
        return (uint16_t)(sign | (rounded & 0x7fffff));
    }
    return (uint16_t)(sign | ((magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

// Decodes n values of a type.   raw (n, as in the file), out (n)
static inline void floats_decode(FloatType type, const void *raw, size_t n, float *out) {
    if (type == FLOAT_F32) {
        memcpy(out, raw, n * 4);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, (const char *)raw + 2 * i, 2);
        out[i] = type == FLOAT_BF16 ? float_from_bits((uint32_t)half << 16) : float_from_f16(half);
    }
}

// Encodes n values.   values (n), raw (n, as in the file)
static inline void floats_encode(FloatType type, const float *values, size_t n, void *raw) {
    if (type == FLOAT_F32) {
        memcpy(raw, values, n * 4);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const uint16_t half = type == FLOAT_BF16 ? float_to_bf16(values[i]) : float_to_f16(values[i]);
        memcpy((char *)raw + 2 * i, &half, 2);
    }
}

#endif
