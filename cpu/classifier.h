// classifier.h: softmax cross-entropy over the vocabulary, loss and gradient in place.
#ifndef CPU_CLASSIFIER_H
#define CPU_CLASSIFIER_H

#include "convert.h"
#include "exp.h"

// A thread's row of exponentials.
static inline size_t classifier_workspace(const OpsShape *shape, int threads) {
    return (size_t)threads * (size_t)shape->Vp * sizeof(float);
}

enum { CLASSIFIER_STRIP = 1024 }; // logits that are summed in fp32; the strips are summed in double

// The largest of count logits, and the sum of exp(x - largest); exponentials (count) keeps the terms.
static inline double classifier_sum(const floatX *x, int count, float *largest, float *exponentials) {
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int i = 0; i < count; i++) {
        float value = floatX_to_float(x[i]);
        most = value > most ? value : most;
    }
    double sum = 0.0;
    for (int start = 0; start < count; start += CLASSIFIER_STRIP) {
        float strip = 0.0f;
        int end = count - start < CLASSIFIER_STRIP ? count : start + CLASSIFIER_STRIP;
#pragma omp simd reduction(+ : strip)
        for (int i = start; i < end; i++) {
            exponentials[i] = fast_exp(floatX_to_float(x[i]) - most);
            strip += exponentials[i];
        }
        sum += (double)strip;
    }
    *largest = most;
    return sum;
}

OP void classifier(Ops *ops, floatX *logits, float *losses, const int *targets, size_t rows, int V, int Vp, float scale,
                   int want_gradient) {
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
            float largest;
            double sum = classifier_sum(x, V, &largest, exponentials);
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

OP void classifier_statistics(Ops *ops, float *statistics, const floatX *logits, const int *targets, size_t rows,
                              int Vp, Vocabulary vocabulary) {
#pragma omp parallel num_threads(ops->threads)
    {
        float *exponentials = (float *)ops->workspace + (size_t)omp_get_thread_num() * (size_t)Vp;
#pragma omp for schedule(static)
        for (size_t row = 0; row < rows; row++) {
            const floatX *x = logits + row * (size_t)Vp;
            const int target = targets[row] - vocabulary.first;
            const bool here = targets[row] >= 0 && target >= 0 && target < vocabulary.count;
            float *mine = statistics + 3 * row;
            mine[1] = (float)classifier_sum(x, vocabulary.count, &mine[0], exponentials);
            mine[2] = here ? floatX_to_float(x[target]) : 0.0f;
        }
    }
}

OP void classifier_sliced(Ops *ops, floatX *logits, float *losses, const int *targets, const float *all, int ranks,
                          size_t rows, int Vp, Vocabulary vocabulary, float scale, int want_gradient) {
#pragma omp parallel for schedule(static) num_threads(ops->threads)
    for (size_t row = 0; row < rows; row++) {
        floatX *x = logits + row * (size_t)Vp;
        if (targets[row] == -1) {
            losses[row] = 0.0f;
            if (want_gradient) memset(x, 0, (size_t)Vp * sizeof(floatX)); // all bits 0 is 0.0
            continue;
        }
        float largest = -INFINITY, target_logit = 0.0f;
        for (int r = 0; r < ranks; r++) {
            const float *theirs = all + ((size_t)r * rows + row) * 3;
            largest = theirs[0] > largest ? theirs[0] : largest;
            target_logit += theirs[2];
        }
        double sum = 0.0;
        for (int r = 0; r < ranks; r++) { // a rank that holds no token has maximum -infinity and sum 0
            const float *theirs = all + ((size_t)r * rows + row) * 3;
            if (theirs[1] > 0.0f) sum += (double)theirs[1] * exp((double)(theirs[0] - largest));
        }
        losses[row] = (float)(log(sum) + (double)largest - (double)target_logit);
        if (!want_gradient) continue;
        const float factor = (float)((double)scale / sum);
        const int target = targets[row] - vocabulary.first;
        const float at_target = target >= 0 && target < vocabulary.count
                                    ? fast_exp(floatX_to_float(x[target]) - largest) * factor - scale
                                    : 0.0f;
#pragma omp simd
        for (int i = 0; i < vocabulary.count; i++)
            x[i] = floatX_from(fast_exp(floatX_to_float(x[i]) - largest) * factor);
        if (target >= 0 && target < vocabulary.count) x[target] = floatX_from(at_target);
        memset(x + vocabulary.count, 0, (size_t)(Vp - vocabulary.count) * sizeof(floatX));
    }
}

#endif
