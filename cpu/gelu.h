// gelu.h: GELU in its tanh form (Hendrycks and Gimpel, 2016) and its derivative, by the identity
// 0.5 (1 + tanh u) = 1 / (1 + e^(-2u)), which keeps full relative accuracy where the tanh form cancels.
#ifndef CPU_GELU_H
#define CPU_GELU_H

#include "exp.h"

// s = 1 / (1 + e^(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3)
static inline float gelu_gate(float x) {
    const float two_root = 1.5957691216057308f; // 2 sqrt(2/pi)
    return 1.0f / (1.0f + fast_exp(-two_root * (x + 0.044715f * x * x * x)));
}

static inline float gelu(float x) {
    return x * gelu_gate(x);
}

// d/dx [x s] = s + x s (1 - s) 2u'
static inline float gelu_derivative(float x) {
    const float two_root = 1.5957691216057308f;
    float s = gelu_gate(x);
    return s + x * s * (1.0f - s) * two_root * (1.0f + 3.0f * 0.044715f * x * x);
}

#endif
