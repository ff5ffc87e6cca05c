// gelu.cuh: GELU in its tanh form (Hendrycks and Gimpel, 2016) and its derivative, by the identity
// 0.5 (1 + tanh u) = 1 / (1 + e^(-2u)), which keeps full relative accuracy where the tanh form cancels; and both as
// passes of their own, for products that cannot be fused with them.
//
// Global memory, with s = sizeof(floatX), for each element:
//   gelu_forward_pass   reads s, writes s
//   gelu_backward_pass  reads 2 s, writes s
#ifndef GELU_CUH
#define GELU_CUH

#include "vector.cuh"

// s = 1 / (1 + e^(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3)
static __device__ __forceinline__ float gelu_gate(float x) {
    const float two_root = 1.5957691216057308f; // 2 sqrt(2/pi)
    return 1.0f / (1.0f + expf(-two_root * (x + 0.044715f * x * x * x)));
}

static __device__ __forceinline__ float gelu(float x) {
    return x * gelu_gate(x);
}

// d/dx [x s] = s + x s (1 - s) 2u'
static __device__ __forceinline__ float gelu_derivative(float x) {
    const float two_root = 1.5957691216057308f;
    const float s = gelu_gate(x);
    return s + x * s * (1.0f - s) * two_root * (1.0f + 3.0f * 0.044715f * x * x);
}

struct GeluForwardPass {
    floatX *out;
    const floatX *pre;
    template <int N> __device__ __forceinline__ void at(size_t i) const {
        float x[N];
        load_floats<N>(x, pre + i);
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = gelu(x[j]);
        store_floats<N>(out + i, x);
    }
};

// out = gelu(pre).   n elements; out may be pre
static inline void gelu_forward_pass(Ops *ops, floatX *out, const floatX *pre, size_t n) {
    const GeluForwardPass pass = {out, pre};
    vector_pass(pass, n, aligned16(out, pre), ops->stream);
}

struct GeluBackwardPass {
    floatX *dpre;
    const floatX *pre;
    template <int N> __device__ __forceinline__ void at(size_t i) const {
        float d[N], x[N];
        load_floats<N>(d, dpre + i);
        load_floats<N>(x, pre + i);
#pragma unroll
        for (int j = 0; j < N; j++) d[j] *= gelu_derivative(x[j]);
        store_floats<N>(dpre + i, d);
    }
};

// dpre *= gelu'(pre), in place.   n elements
static inline void gelu_backward_pass(Ops *ops, floatX *dpre, const floatX *pre, size_t n) {
    const GeluBackwardPass pass = {dpre, pre};
    vector_pass(pass, n, aligned16(dpre, pre), ops->stream);
}

#endif
