// traffic.h: the bytes of global memory that each operation's kernels read and write, as formulas of the shape.
//
// These are the figures that kernels/*.cuh state in their opening lines, written down a second time: the least that the
// operation can do, which is each input and output once, and what the header adds to it (partial sums, a weight that
// every block reads). The harness holds the emulator's counters to them, to the byte. A function returns 0 where
// nothing is stated.
#ifndef TRAFFIC_H
#define TRAFFIC_H

#include "harness.h"

#define traffic_embedding_forward NULL
#define traffic_wpe_backward NULL
#define traffic_wte_backward NULL
#define traffic_layernorm_forward NULL
#define traffic_residual_layernorm_forward NULL
#define traffic_layernorm_backward NULL
#define traffic_residual_forward NULL
#define traffic_dropout_backward NULL
#define traffic_matmul_forward NULL
#define traffic_matmul_gelu_forward NULL
#define traffic_matmul_backward_input NULL
#define traffic_matmul_gelu_backward_input NULL
#define traffic_matmul_backward_weight NULL
#define traffic_attention_forward NULL
#define traffic_attention_backward NULL
#define traffic_classifier NULL
#define traffic_sum_values NULL
#define traffic_sum_of_squares NULL
#define traffic_accumulate_gradient NULL
#define traffic_adamw_update NULL

#endif
