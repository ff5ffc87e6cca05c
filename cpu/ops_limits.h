// ops_limits.h (CPU): what the operations cannot do, for config.h to refuse by name.
#ifndef OPS_LIMITS_H
#define OPS_LIMITS_H

enum { OPS_MAX_HEAD_DIM = 1 << 30 }; // channels of an attention head: any

#endif
