// adamw.cuh: the optimizer's step: one launch, one pass over its buffers.
//
// Global memory for each parameter, with g = sizeof(gradX), s = sizeof(floatX):
//   with masters     reads g + 4 + 4 + 4 (gradient, master, m, v), writes s + 4 + 4 + 4
//   without masters  reads g + s + 4 + 4, writes s + 4 + 4
#ifndef ADAMW_CUH
#define ADAMW_CUH

#include <math.h>
#include "kernels/vector.cuh"

struct AdamWPass {
    // What a step's elements share, computed once, in double.
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float step_size;       // lr / (1 - beta1^step)
    float root_correction; // 1 / sqrt(1 - beta2^step)
    float epsilon, keep;   // keep = 1 - lr * decay, for elements [0, n_decay)
    float grad_scale;
    uint64_t round_key, round_first;
    size_t n_decay;
    floatX *params;
    float *master, *m, *v; // master: or NULL
    const gradX *grads;

    // Every buffer is used once in a step, and nothing of it would still be in a cache at the next: streamed.
    template <int N> __device__ __forceinline__ void at(size_t i) const {
        float p[N], g[N], mean[N], square[N];
        if (master != NULL)
            load_floats<N, Cache::stream>(p, master + i);
        else
            load_floats<N>(p, params + i);
        load_floats<N, Cache::stream>(g, grads + i);
        load_floats<N, Cache::stream>(mean, m + i);
        load_floats<N, Cache::stream>(square, v + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float gradient = g[j] * grad_scale;
            mean[j] = beta1 * mean[j] + one_minus_beta1 * gradient;
            square[j] = beta2 * square[j] + one_minus_beta2 * (gradient * gradient);
            p[j] = p[j] * (i + j < n_decay ? keep : 1.0f) -
                   step_size * (mean[j] / (sqrtf(square[j]) * root_correction + epsilon));
        }
        store_floats<N, Cache::stream>(m + i, mean);
        store_floats<N, Cache::stream>(v + i, square);
        if (master != NULL)
            store_floats<N, Cache::stream>(master + i, p);
        else if (sizeof(floatX) < sizeof(float))
            round_stochastically<N>(p, i);
        store_floats<N>(params + i, p);
    }

    // Rounds to bf16 up or down with the probability of the other's distance: adds 16 random bits below the last one
    // that stays, and cuts. The random word of an element depends on its place in the tensor alone.
    template <int N> __device__ __forceinline__ void round_stochastically(float (&p)[N], size_t i) const {
        uint32_t words[N];
        random_words<N>(words, round_key, round_first + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const uint32_t bits = (__float_as_uint(p[j]) + (words[j] >> 16)) & 0xffff0000u;
            p[j] = __uint_as_float(bits);
        }
    }
};

OP void adamw_update(Ops *ops, const AdamW *hyper, floatX *params, float *master, float *m, float *v,
                     const gradX *grads, size_t n, size_t n_decay) {
    RANGE("adamw_update");
    const double lr = (double)hyper->learning_rate, step = (double)hyper->step;
    AdamWPass pass;
    pass.beta1 = hyper->beta1;
    pass.beta2 = hyper->beta2;
    pass.one_minus_beta1 = (float)(1.0 - (double)hyper->beta1);
    pass.one_minus_beta2 = (float)(1.0 - (double)hyper->beta2);
    pass.step_size = (float)(lr / (1.0 - pow((double)hyper->beta1, step)));
    pass.root_correction = (float)(1.0 / sqrt(1.0 - pow((double)hyper->beta2, step)));
    pass.epsilon = hyper->epsilon;
    pass.keep = (float)(1.0 - lr * (double)hyper->weight_decay);
    pass.grad_scale = hyper->grad_scale;
    pass.round_key = hyper->round_key;
    pass.round_first = hyper->round_first;
    pass.n_decay = n_decay;
    pass.params = params;
    pass.master = master;
    pass.m = m;
    pass.v = v;
    pass.grads = grads;
    vector_pass(pass, n, aligned16(params, master, m, v, grads), ops->stream);
}

#endif
