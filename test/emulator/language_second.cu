// A second translation unit, whose kernel and shared variable have the names of language.cu's.
#include "check.h"

void second_unit_fills(float *out, int n);

static __global__ void fill_kernel(float *out, float, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    __shared__ float s[256];
    s[threadIdx.x] = (float)i;
    __syncthreads();
    const float next = s[(threadIdx.x + 1) % blockDim.x];
    if (i < n) out[i] = next == next ? s[threadIdx.x] : next;
}

void second_unit_fills(float *out, int n) {
    RUN(divide_up((size_t)n, 256), 256, 0, fill_kernel, out, 0.0f, n);
}
