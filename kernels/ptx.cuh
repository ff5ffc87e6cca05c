// ptx.cuh: what a GPU does in one instruction that C++ cannot say, each with a twin for the emulator.
//
// The only file with inline PTX, and the only one that asks who compiles it: nvcc sees the instruction, g++ the
// emulator's function of the same meaning (cpu/emulator.h). Semantics and the layout of fragments are those of the PTX
// ISA manual, sections "ldmatrix", "mma.m16n8k16", "ex2" and "cp.async".
#ifndef PTX_CUH
#define PTX_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define CALLER      // the emulator's hidden last parameter: the line that asked, for its messages
#define PASS_CALLER // hands it on
#else
#include "emulator.h"
#define CALLER , EmulatorLine caller = emulator_line()
#define PASS_CALLER , caller
#endif

// Dynamic shared memory of the block, as T *name; 128-byte aligned. Its size is the launch's dynamicSmemBytes.
#ifdef __CUDACC__
#define DYNAMIC_SHARED(T, name)                                       \
    extern __shared__ __align__(128) unsigned char dynamic_shared_[]; \
    T *name = reinterpret_cast<T *>(dynamic_shared_)
#else
#define DYNAMIC_SHARED(T, name) T *name = reinterpret_cast<T *>(emulator_dynamic_shared())
#endif

// Bytes of global memory that a thread reads and writes: the emulator adds them up, so that a test can hold a kernel to
// the traffic that its header states. A vector access that is not aligned faults on a GPU; on a CPU it may pass.
#ifdef __CUDACC__
static __device__ __forceinline__ void count_read(size_t) {}
static __device__ __forceinline__ void count_write(size_t) {}
static __device__ __forceinline__ void check_aligned(const void *, size_t) {}
#else
static inline void count_read(size_t bytes) {
    emulator_count_read(bytes);
}
static inline void count_write(size_t bytes) {
    emulator_count_write(bytes);
}
static inline void check_aligned(const void *pointer, size_t bytes) {
    emulator_check_aligned(pointer, bytes);
}
#endif

// d (16 x 8, fp32) += a (16 x 16, bf16, by rows) b (16 x 8, bf16, by columns), by the 32 lanes of a warp together.
// With group = lane / 4 and pair = lane % 4 * 2, a lane holds
//   a[0] (group, pair..+1)  a[1] (group + 8, pair..)  a[2] (group, pair + 8..)  a[3] (group + 8, pair + 8..)
//   b[0] (pair..+1, group)  b[1] (pair + 8.., group)
//   d[0..1] (group, pair..+1)  d[2..3] (group + 8, pair..+1)
static __device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                                    const uint32_t (&b)[2] CALLER) {
#ifdef __CUDACC__
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    emulator_mma_m16n8k16(d, a, b, caller);
#endif
}

// Four 8 x 8 matrices of 16-bit elements from shared memory. Lane l gives the address of row l % 8 of matrix l / 8: 16
// bytes, 16-byte aligned. r[i] receives elements (lane / 4, lane % 4 * 2 .. +1) of matrix i, or, transposed, elements
// (lane % 4 * 2 .. +1, lane / 4).
static __device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void *row CALLER) {
#ifdef __CUDACC__
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
#else
    emulator_ldmatrix_x4(r, row, false, caller);
#endif
}

static __device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], const void *row CALLER) {
#ifdef __CUDACC__
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
#else
    emulator_ldmatrix_x4(r, row, true, caller);
#endif
}

// 2^x to 2 ulp, results below 2^-126 flushed to zero: one instruction, where exp2f() takes four for the sake of those.
static __device__ __forceinline__ float exp2_approx(float x) {
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
#else
    return x < -126.0f ? 0.0f : exp2f(x);
#endif
}

// Starts copying 16 bytes from global to shared memory, both 16-byte aligned; the first `bytes` (0 to 16) are copied
// and the rest of the 16 is filled with zeros. Visible to this thread after cp_async_wait(), to others after a barrier
// as well.
static __device__ __forceinline__ void cp_async16(void *shared, const void *global, int bytes = 16) {
#ifdef __CUDACC__
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global), "r"(bytes) : "memory");
#else
    emulator_cp_async16(shared, global, bytes);
#endif
}

// Closes this thread's group of copies.
static __device__ __forceinline__ void cp_async_commit() {
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#else
    emulator_cp_async_commit();
#endif
}

// Waits until at most N of this thread's groups are under way.
template <int N> static __device__ __forceinline__ void cp_async_wait() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
#else
    emulator_cp_async_wait(N);
#endif
}

#endif
