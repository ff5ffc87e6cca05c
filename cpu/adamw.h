// adamw.h: the optimizer's step, one streaming pass over its buffers.
#ifndef CPU_ADAMW_H
#define CPU_ADAMW_H

#include <string.h>
#include "convert.h"
#include "random.h"

// What a step's elements share, computed once, in double.
typedef struct {
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float step_size;       // lr / (1 - beta1^step)
    float root_correction; // 1 / sqrt(1 - beta2^step)
    float epsilon, keep;   // keep = 1 - lr * decay
    float grad_scale;
    uint64_t round_key, round_first;
} AdamWStep;

static inline float adamw_element(const AdamWStep *s, float p, float *m, float *v, float gradient) {
    float g = gradient * s->grad_scale;
    *m = s->beta1 * *m + s->one_minus_beta1 * g;
    *v = s->beta2 * *v + s->one_minus_beta2 * (g * g);
    return p * s->keep - s->step_size * (*m / (sqrtf(*v) * s->root_correction + s->epsilon));
}

// Rounds to bf16 up or down with the probability of the other's distance: adds 16 random bits below the last one that
// stays, and cuts. In fp32 there is nothing to round.
static inline floatX adamw_round(const AdamWStep *s, float p, size_t i) {
    if (sizeof(floatX) == sizeof(float)) return floatX_from(p);
    uint32_t bits;
    memcpy(&bits, &p, sizeof bits);
    bits = (bits + (random_u32(s->round_key, s->round_first + i) >> 16)) & 0xffff0000u;
    memcpy(&p, &bits, sizeof bits);
    return floatX_from(p); // exact
}

static inline void adamw_range(Ops *ops, AdamWStep s, floatX *params, float *master, float *m, float *v,
                               const gradX *grads, size_t start, size_t end) {
    if (master != NULL) {
#pragma omp parallel for simd schedule(static) num_threads(ops->threads)
        for (size_t i = start; i < end; i++) {
            master[i] = adamw_element(&s, master[i], &m[i], &v[i], gradX_to_float(grads[i]));
            params[i] = floatX_from(master[i]);
        }
    } else {
#pragma omp parallel for simd schedule(static) num_threads(ops->threads)
        for (size_t i = start; i < end; i++) {
            float p = adamw_element(&s, floatX_to_float(params[i]), &m[i], &v[i], gradX_to_float(grads[i]));
            params[i] = adamw_round(&s, p, i);
        }
    }
}

OP void adamw_update(Ops *ops, const AdamW *hyper, floatX *params, float *master, float *m, float *v,
                     const gradX *grads, size_t n, size_t n_decay) {
    AdamWStep s;
    double lr = (double)hyper->learning_rate, step = (double)hyper->step;
    s.beta1 = hyper->beta1;
    s.beta2 = hyper->beta2;
    s.one_minus_beta1 = (float)(1.0 - (double)hyper->beta1);
    s.one_minus_beta2 = (float)(1.0 - (double)hyper->beta2);
    s.step_size = (float)(lr / (1.0 - pow((double)hyper->beta1, step)));
    s.root_correction = (float)(1.0 / sqrt(1.0 - pow((double)hyper->beta2, step)));
    s.epsilon = hyper->epsilon;
    s.grad_scale = hyper->grad_scale;
    s.round_key = hyper->round_key;
    s.round_first = hyper->round_first;
    s.keep = (float)(1.0 - lr * (double)hyper->weight_decay);
    if (n_decay > n) n_decay = n;
    adamw_range(ops, s, params, master, m, v, grads, 0, n_decay);
    s.keep = 1.0f;
    adamw_range(ops, s, params, master, m, v, grads, n_decay, n);
}

#endif
