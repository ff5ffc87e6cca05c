// ops_device.h: the CUDA device's context for the operations of ops.h.
//
// The kernels themselves are not in this version: the trainer compiles against their declarations and is not linked.
#ifndef OPS_DEVICE_H
#define OPS_DEVICE_H

struct Ops {
    cudaStream_t stream; // the compute stream
    void *workspace;
    size_t workspace_bytes;
};

#endif
