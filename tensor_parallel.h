// tensor_parallel.h: tensor and sequence parallelism: what ranks that hold slices of the same layers exchange.
//
// A block's query/key/value and first MLP matrix are cut by columns (by heads, so that none is cut), its attention
// projection and second MLP matrix by rows (Shoeybi et al., "Megatron-LM", 2019). A pair of them needs one exchange
// forward, after the second, whose partial results are summed, and one backward, after the first. wte is cut by tokens:
// embedding, head and loss exchange partial results too, and logits are never gathered.
//
// Sequence parallelism (Korthikanti et al., "Reducing activation recomputation", 2022): what stands between those pairs
// (layer norms, residuals, dropout) is computed on 1/T of the rows by each rank. The sums become reduce-scatters, and
// before a pair stands an all-gather: the same bytes. All of it works on rows, tokens of the micro-batch one after the
// other, so which of B T rows a rank has is rows [rank B T / T', (rank + 1) B T / T') for T' ranks.
//
// Exchanges run on the compute stream: they are on the path of the computation. With one rank they are nothing.
#ifndef TENSOR_PARALLEL_H
#define TENSOR_PARALLEL_H

#include "comm.h"
#include "layout.h"
#include "ops.h"

typedef struct {
    Comm *comm;
    int rank, size;
    bool sequence;         // sequence parallelism
    Vocabulary vocabulary; // the tokens whose rows of wte this rank holds
    int vocab_rows;        // rows of its slice, padding included
} TensorParallel;

static inline void tensor_parallel_init(TensorParallel *tp, const Layout *layout, Comm *comm, bool sequence) {
    memset(tp, 0, sizeof *tp);
    tp->comm = comm;
    tp->rank = comm->tensor.rank;
    tp->size = comm->tensor.size;
    tp->sequence = sequence && tp->size > 1;
    tp->vocab_rows = layout->padded_vocab / tp->size;
    tp->vocabulary.first = tp->rank * tp->vocab_rows;
    const int left = layout->shape.vocab_size - tp->vocabulary.first;
    tp->vocabulary.count = left < 0 ? 0 : left < tp->vocab_rows ? left : tp->vocab_rows;
}

static inline ncclDataType_t activation_type(void) {
    return sizeof(floatX) == sizeof(float) ? ncclFloat32 : ncclBfloat16;
}

// Of `rows` rows, those that this rank computes between the pairs of matrices.
static inline size_t tp_rows(const TensorParallel *tp, size_t rows) {
    return tp->sequence ? rows / (size_t)tp->size : rows;
}

// The first of them.
static inline size_t tp_first_row(const TensorParallel *tp, size_t rows) {
    return tp->sequence ? rows / (size_t)tp->size * (size_t)tp->rank : 0;
}

// Before a pair (or, backward, behind it): all rows, from this rank's. Returns them: `all`, or what came in where it is
// all already.   mine (tp_rows, C), all (rows, C)
static inline const floatX *tp_gather(TensorParallel *tp, floatX *all, const floatX *mine, size_t rows, int C) {
    if (!tp->sequence) return mine;
    comm_all_gather(tp->comm, &tp->comm->tensor, all, mine, rows / (size_t)tp->size * (size_t)C, activation_type());
    return all;
}

// Behind a pair: the sum of all ranks' partial results, of this rank's rows: in place; returns where they begin.
//   partial (rows, C)
static inline floatX *tp_reduce(TensorParallel *tp, floatX *partial, size_t rows, int C) {
    if (tp->size == 1) return partial;
    const size_t count = rows * (size_t)C;
    if (!tp->sequence) {
        comm_all_reduce(tp->comm, &tp->comm->tensor, partial, count, activation_type());
        return partial;
    }
    floatX *mine = partial == NULL ? NULL : partial + count / (size_t)tp->size * (size_t)tp->rank;
    comm_reduce_scatter(tp->comm, &tp->comm->tensor, mine, partial, count / (size_t)tp->size, activation_type());
    return mine;
}

// The loss of a chunk of rows and the gradient of this rank's columns of their logits (see classifier() in ops.h). The
// ranks exchange three numbers a row. statistics: (1 + size, rows, 3), this rank's first, then all ranks'; unused with
// one rank.
static inline void tp_classifier(TensorParallel *tp, Ops *ops, floatX *logits, float *losses, float *statistics,
                                 const int *targets, size_t rows, int vocab_size, float scale, int want_gradient,
                                 bool planning) {
    if (tp->size == 1) {
        if (!planning) classifier(ops, logits, losses, targets, rows, vocab_size, tp->vocab_rows, scale, want_gradient);
        return;
    }
    float *all = planning ? NULL : statistics + 3 * rows;
    if (!planning) classifier_statistics(ops, statistics, logits, targets, rows, tp->vocab_rows, tp->vocabulary);
    comm_all_gather(tp->comm, &tp->comm->tensor, all, statistics, 3 * rows, ncclFloat32);
    if (!planning)
        classifier_sliced(ops, logits, losses, targets, all, tp->size, rows, tp->vocab_rows, tp->vocabulary, scale,
                          want_gradient);
}

#endif
