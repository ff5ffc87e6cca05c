// classifier.h: softmax cross-entropy over the vocabulary, loss and gradient in place.
#ifndef CPU_CLASSIFIER_H
#define CPU_CLASSIFIER_H

#include "convert.h"
#include "exp.h"

// A thread's row of exponentials.
static inline size_t classifier_workspace(const OpsShape *shape, int threads) {
    return (size_t)threads * (size_t)shape->Vp * sizeof(float);
}

OP void classifier(Ops *ops, floatX *logits, float *losses, const int *targets, size_t rows, int V, int Vp, float scale,
                   int want_gradient) {
    enum { STRIP = 1024 }; // logits that are summed in fp32; the strips are summed in double
#pragma omp parallel num_threads(ops->threads)
    {
        float *exponentials = (float *)ops->workspace + (size_t)omp_get_thread_num() * (size_t)Vp;
#pragma omp for schedule(static)
        for (size_t row = 0; row < rows; row++) {
            floatX *x = logits + row * (size_t)Vp;
            int target = targets[row];
            if (target == -1) {
                losses[row] = 0.0f;
                if (want_gradient) memset(x, 0, (size_t)Vp * sizeof(floatX)); // all bits 0 is 0.0
                continue;
            }
            float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
            for (int i = 0; i < V; i++) {
                float value = floatX_to_float(x[i]);
                largest = value > largest ? value : largest;
            }
            double sum = 0.0;
            for (int start = 0; start < V; start += STRIP) {
                float strip = 0.0f;
                int end = V - start < STRIP ? V : start + STRIP;
#pragma omp simd reduction(+ : strip)
                for (int i = start; i < end; i++) {
                    exponentials[i] = fast_exp(floatX_to_float(x[i]) - largest);
                    strip += exponentials[i];
                }
                sum += (double)strip;
            }
            losses[row] = (float)(log(sum) + (double)largest - (double)floatX_to_float(x[target]));
            if (!want_gradient) continue;
            float factor = (float)((double)scale / sum);
            float at_target = exponentials[target] * factor - scale;
#pragma omp simd
            for (int i = 0; i < V; i++) x[i] = floatX_from(exponentials[i] * factor);
            x[target] = floatX_from(at_target);
            memset(x + V, 0, (size_t)(Vp - V) * sizeof(floatX));
        }
    }
}

#endif
