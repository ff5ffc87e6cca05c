// ops_limits.h (CUDA): what the operations cannot do, for config.h to refuse by name.
#ifndef OPS_LIMITS_H
#define OPS_LIMITS_H

enum { OPS_MAX_HEAD_DIM = 128 }; // channels of an attention head: what fits registers (attention.cuh)

#endif
