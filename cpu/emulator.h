// emulator.h: the CUDA device language for g++, so that the kernels' own source runs on the CPU.
//
// Included by cuda_runtime.h when TRAIN_GPT_EMULATOR is defined; C++17. emulator.cpp, linked once, runs what is
// launched.
//
//  - The threads of a block are fibers of one OS thread. A thread runs until it waits for others, at a barrier or at an
//    operation of its warp; then another one continues. The order is ascending, descending or random: a kernel whose
//    threads do not wait where they must gives different results in different orders.
//  - Shared memory is `static thread_local`: one copy per OS thread, which is one per block. It holds NaN when a block
//    begins. Under AddressSanitizer it is `static`, so that an access past its end is seen, and one OS thread runs all
//    blocks.
//  - Every operation of several threads knows the line that asked for it. Threads of a warp or block that meet at
//    different ones end the process with a message that names the kernel, the lines and the threads.
//  - A launch is an item of its stream, with a copy of its arguments, and runs when the stream comes to it.
//
// Environment: TRAIN_GPT_STREAMS=eager|latest|random:SEED: when items of streams run (emulator_stream.h; default
// eager), TRAIN_GPT_THREADS=ascending|descending|random:SEED (default ascending), TRAIN_GPT_CP_ASYNC=deferred|
// eager|random: when asynchronous copies happen (default deferred; random where threads are), and
// TRAIN_GPT_EMULATOR_WORKERS=N: OS threads that run blocks (default OMP_NUM_THREADS, or the cores).
//
// Not emulated: registers and their number, static shared memory over 48 KB, memory that is cached or slow, time.
#ifndef CPU_EMULATOR_H
#define CPU_EMULATOR_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <utility>

// --------------------------------------------------------------------------------------------------------- the words

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
// Always, so that no code of it is shared by objects that are compiled for different precisions: a type of the same
// name is another type there.
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

// Vector types, aligned as on the GPU. Three elements have no alignment of their own.
#define EMULATOR_VECTORS(T, name, align2, align4)              \
    struct alignas(align2) name##2 {                           \
        T x, y;                                                \
    };                                                         \
    struct name##3 {                                           \
        T x, y, z;                                             \
    };                                                         \
    struct alignas(align4) name##4 {                           \
        T x, y, z, w;                                          \
    };                                                         \
    static inline name##2 make_##name##2(T x, T y) {           \
        return {x, y};                                         \
    }                                                          \
    static inline name##3 make_##name##3(T x, T y, T z) {      \
        return {x, y, z};                                      \
    }                                                          \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { \
        return {x, y, z, w};                                   \
    }
EMULATOR_VECTORS(int, int, 8, 16)
EMULATOR_VECTORS(unsigned, uint, 8, 16)
EMULATOR_VECTORS(short, short, 4, 8)
EMULATOR_VECTORS(unsigned short, ushort, 4, 8)
EMULATOR_VECTORS(unsigned char, uchar, 2, 4)
EMULATOR_VECTORS(float, float, 8, 16)
EMULATOR_VECTORS(double, double, 16, 16)
#undef EMULATOR_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    operator uint3() const { return {x, y, z}; }
};

// Of the thread that runs now.
extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;
static constexpr int warpSize = 32;

// Where the source asked for an operation.
struct EmulatorLine {
    const char *file;
    int line;
};
static constexpr inline EmulatorLine emulator_line(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
}

// ---------------------------------------------------------------------------------------- what emulator.cpp does

// A message, the kernel and where its threads are; then abort().
[[noreturn]] void emulator_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

void emulator_barrier(EmulatorLine caller);
int emulator_barrier_or(int value, EmulatorLine caller);
int emulator_barrier_and(int value, EmulatorLine caller);
int emulator_barrier_count(int value, EmulatorLine caller);
void emulator_warp_barrier(unsigned mask, EmulatorLine caller);
int emulator_lane();
// The bits that lane `source` of the warp brought.
uint64_t emulator_shuffle(unsigned mask, uint64_t bits, int source, EmulatorLine caller);
unsigned emulator_ballot(unsigned mask, bool value, EmulatorLine caller);

// The twins of ptx.cuh.
void emulator_mma_m16n8k16(float *d, const uint32_t *a, const uint32_t *b, EmulatorLine caller);
void emulator_ldmatrix_x4(uint32_t *r, const void *row, bool transposed, EmulatorLine caller);
void emulator_cp_async16(void *shared, const void *global, int bytes);
void emulator_cp_async_commit();
void emulator_cp_async_wait(int groups);
void *emulator_dynamic_shared();

// Bytes of global memory that kernels have read and written.
struct EmulatorBytes {
    uint64_t read, written;
};
extern __thread EmulatorBytes emulator_bytes; // of this OS thread, since its launch began
__attribute__((no_sanitize("thread"))) static inline void emulator_count_read(size_t bytes) {
    emulator_bytes.read += bytes;
}
__attribute__((no_sanitize("thread"))) static inline void emulator_count_write(size_t bytes) {
    emulator_bytes.written += bytes;
}

static inline void emulator_check_aligned(const void *pointer, size_t bytes) {
    if (__builtin_expect((uintptr_t)pointer % bytes != 0, 0))
        emulator_die("address %p of a vector access is not aligned to %zu bytes", pointer, bytes);
}

extern "C" {
// Bytes that all launches since the last reset have read and written, and how many launches those were. Synchronise
// first.
void emulator_counts_reset(void);
void emulator_counts(uint64_t *read, uint64_t *written, uint64_t *launches);
// As the environment variables of these names; false: not one of the words.
bool emulator_set_threads(const char *order);
bool emulator_set_cp_async(const char *when);
bool emulator_set_streams(const char *policy);
// Under ThreadSanitizer: whether blocks may be taken as ordered, one after the other. Ordered, races within a block are
// found; unordered, those between blocks, and none in shared memory. TRAIN_GPT_BLOCKS=ordered|unordered
void emulator_set_blocks_unordered(bool unordered);
}

// ----------------------------------------------------------------------------------------------------------- launches

enum cudaLaunchAttributeID { cudaLaunchAttributeIgnore = 0 };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
};
typedef struct cudaLaunchConfig_st {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs; // none is emulated
} cudaLaunchConfig_t;

// A kernel that has been launched: what it is, and how one thread of it runs.
struct EmulatorLaunch {
    const char *text; // the arguments of the launch, as written
    EmulatorLine caller;
    dim3 grid, block;
    size_t shared_bytes;
    const void *kernel; // its address
    void *call;         // the kernel with its arguments; owned
    void (*run)(void *call);
    void (*release)(void *call);
};

// Checks the launch and puts it into the stream; takes launch.call over.
cudaError_t emulator_submit(const EmulatorLaunch &launch, cudaStream_t stream);

namespace { // of this object alone, as kernels and their parameters are

template <class... Parameters> struct EmulatorCall {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
    static void run(void *self) {
        const EmulatorCall *call = static_cast<EmulatorCall *>(self);
        std::apply(call->kernel, call->arguments);
    }
    static void release(void *self) { delete static_cast<EmulatorCall *>(self); }
};

} // namespace

template <class... Parameters, class... Arguments>
static inline cudaError_t emulator_launch(const char *text, EmulatorLine caller, const cudaLaunchConfig_t *config,
                                          void (*kernel)(Parameters...), Arguments &&...arguments) {
    typedef EmulatorCall<Parameters...> Call;
    Call *call = new Call{kernel, std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)};
    const EmulatorLaunch launch = {text,
                                   caller,
                                   config->gridDim,
                                   config->blockDim,
                                   config->dynamicSmemBytes,
                                   reinterpret_cast<const void *>(kernel),
                                   call,
                                   Call::run,
                                   Call::release};
    return emulator_submit(launch, config->stream);
}
// A macro: it takes down how and where the launch is written.
#define cudaLaunchKernelEx(...) emulator_launch(#__VA_ARGS__, {__FILE__, __LINE__}, __VA_ARGS__)

typedef enum {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
} cudaFuncAttribute;
cudaError_t emulator_set_attribute(const void *kernel, cudaFuncAttribute attribute, int value);
template <class Kernel>
static inline cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute attribute, int value) {
    return emulator_set_attribute(reinterpret_cast<const void *>(kernel), attribute, value);
}

// As the toolkit has it for C++: pointers of any type.
template <class T> static inline cudaError_t cudaMalloc(T **pointer, size_t bytes) {
    return cudaMalloc(reinterpret_cast<void **>(pointer), bytes);
}
template <class T> static inline cudaError_t cudaMallocHost(T **pointer, size_t bytes) {
    return cudaMallocHost(reinterpret_cast<void **>(pointer), bytes);
}

// ------------------------------------------------------------------------------------------------ blocks and warps

static inline void __syncthreads(EmulatorLine caller = emulator_line()) {
    emulator_barrier(caller);
}
static inline int __syncthreads_or(int value, EmulatorLine caller = emulator_line()) {
    return emulator_barrier_or(value, caller);
}
static inline int __syncthreads_and(int value, EmulatorLine caller = emulator_line()) {
    return emulator_barrier_and(value, caller);
}
static inline int __syncthreads_count(int value, EmulatorLine caller = emulator_line()) {
    return emulator_barrier_count(value, caller);
}
static inline void __syncwarp(unsigned mask = 0xffffffffu, EmulatorLine caller = emulator_line()) {
    emulator_warp_barrier(mask, caller);
}

template <class T> static inline T emulator_shuffle_value(unsigned mask, T value, int source, EmulatorLine caller) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulator_shuffle(mask, bits, source, caller);
    memcpy(&value, &bits, sizeof value);
    return value;
}
// Shuffles act within segments of `width` lanes; a source outside of the segment is the lane itself.
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EmulatorLine caller = emulator_line()) {
    const int first = emulator_lane() & ~(width - 1);
    return emulator_shuffle_value(mask, value, first | (source & (width - 1)), caller);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32,
                                EmulatorLine caller = emulator_line()) {
    const int lane = emulator_lane(), source = lane ^ bits;
    return emulator_shuffle_value(mask, value, source < (lane & ~(width - 1)) + width ? source : lane, caller);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32,
                                 EmulatorLine caller = emulator_line()) {
    const int lane = emulator_lane(), source = lane + (int)by;
    return emulator_shuffle_value(mask, value, source < (lane & ~(width - 1)) + width ? source : lane, caller);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32,
                               EmulatorLine caller = emulator_line()) {
    const int lane = emulator_lane(), source = lane - (int)by;
    return emulator_shuffle_value(mask, value, source >= (lane & ~(width - 1)) ? source : lane, caller);
}
static inline unsigned __ballot_sync(unsigned mask, int value, EmulatorLine caller = emulator_line()) {
    return emulator_ballot(mask, value != 0, caller);
}
static inline int __any_sync(unsigned mask, int value, EmulatorLine caller = emulator_line()) {
    return emulator_ballot(mask, value != 0, caller) != 0;
}
static inline int __all_sync(unsigned mask, int value, EmulatorLine caller = emulator_line()) {
    return emulator_ballot(mask, value == 0, caller) == 0;
}

// ----------------------------------------------------------------------------------------- atomics, on integers only

template <class T> static inline T emulator_fetch_add(T *to, T value) {
    emulator_check_aligned(to, sizeof *to);
    return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
static inline int atomicAdd(int *to, int value) {
    return emulator_fetch_add(to, value);
}
static inline unsigned atomicAdd(unsigned *to, unsigned value) {
    return emulator_fetch_add(to, value);
}
static inline unsigned long long atomicAdd(unsigned long long *to, unsigned long long value) {
    return emulator_fetch_add(to, value);
}

template <class T> static inline T emulator_compare_and_swap(T *at, T expected, T value) {
    emulator_check_aligned(at, sizeof *at);
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
static inline int atomicCAS(int *at, int expected, int value) {
    return emulator_compare_and_swap(at, expected, value);
}
static inline unsigned atomicCAS(unsigned *at, unsigned expected, unsigned value) {
    return emulator_compare_and_swap(at, expected, value);
}
static inline unsigned long long atomicCAS(unsigned long long *at, unsigned long long expected,
                                           unsigned long long value) {
    return emulator_compare_and_swap(at, expected, value);
}
static inline int atomicExch(int *at, int value) {
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}
static inline unsigned atomicExch(unsigned *at, unsigned value) {
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}

// Replaces *at by the larger (or smaller) one of it and value; returns what was there.
template <class T> static inline T emulator_fetch_larger(T *at, T value, bool larger) {
    T old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while ((larger ? old < value : value < old) &&
           !__atomic_compare_exchange_n(at, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}
static inline int atomicMax(int *at, int value) {
    return emulator_fetch_larger(at, value, true);
}
static inline unsigned atomicMax(unsigned *at, unsigned value) {
    return emulator_fetch_larger(at, value, true);
}
static inline int atomicMin(int *at, int value) {
    return emulator_fetch_larger(at, value, false);
}
static inline unsigned atomicMin(unsigned *at, unsigned value) {
    return emulator_fetch_larger(at, value, false);
}
static inline void __threadfence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence_block() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

// --------------------------------------------------------------------------------- loads and stores that name a cache

#define EMULATOR_LOAD(name)                               \
    template <class T> static inline T name(const T *p) { \
        emulator_check_aligned(p, alignof(T));            \
        return *p;                                        \
    }
#define EMULATOR_STORE(name)                                    \
    template <class T> static inline void name(T *p, T value) { \
        emulator_check_aligned(p, alignof(T));                  \
        *p = value;                                             \
    }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldca)
EMULATOR_LOAD(__ldcg)
EMULATOR_LOAD(__ldcs)
EMULATOR_LOAD(__ldlu)
EMULATOR_LOAD(__ldcv)
EMULATOR_STORE(__stwb)
EMULATOR_STORE(__stcg)
EMULATOR_STORE(__stcs)
EMULATOR_STORE(__stwt)
#undef EMULATOR_LOAD
#undef EMULATOR_STORE

// --------------------------------------------------------------------------------------------------------- arithmetic

// Macros, because math.h declares functions of these names. The GPU's are less accurate.
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __exp10f(x) powf(10.0f, x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanhf(x) tanhf(x)
#define __powf(x, y) powf(x, y)
static inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
static inline double rsqrt(double x) {
    return 1.0 / sqrt(x);
}
static inline float __frsqrt_rn(float x) {
    return 1.0f / sqrtf(x);
}
static inline float __fsqrt_rn(float x) {
    return sqrtf(x);
}
static inline float __frcp_rn(float x) {
    return 1.0f / x;
}
static inline float __fdividef(float x, float y) {
    return x / y;
}
static inline float __fdiv_rn(float x, float y) {
    return x / y;
}
static inline float __fmaf_rn(float x, float y, float z) {
    return fmaf(x, y, z);
}
// Never fused into a multiply-add, by compilers neither.
static inline float __fadd_rn(float x, float y) {
    volatile float sum = x + y;
    return sum;
}
static inline float __fsub_rn(float x, float y) {
    volatile float difference = x - y;
    return difference;
}
static inline float __fmul_rn(float x, float y) {
    volatile float product = x * y;
    return product;
}
static inline float __saturatef(float x) {
    return fminf(fmaxf(x, 0.0f), 1.0f); // NaN becomes 0
}

template <class To, class From> static inline To emulator_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
static inline unsigned __float_as_uint(float x) {
    return emulator_bits<unsigned>(x);
}
static inline int __float_as_int(float x) {
    return emulator_bits<int>(x);
}
static inline float __uint_as_float(unsigned x) {
    return emulator_bits<float>(x);
}
static inline float __int_as_float(int x) {
    return emulator_bits<float>(x);
}
static inline long long __double_as_longlong(double x) {
    return emulator_bits<long long>(x);
}
static inline double __longlong_as_double(long long x) {
    return emulator_bits<double>(x);
}
static inline int __float2int_rn(float x) {
    return (int)rintf(x);
}
static inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
static inline int __clz(int x) {
    return x != 0 ? __builtin_clz((unsigned)x) : 32;
}
static inline int __ffs(int x) {
    return __builtin_ffs(x);
}
static inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int i = 0; i < 32; i++) result |= (x >> i & 1) << (31 - i);
    return result;
}
static inline unsigned __umulhi(unsigned x, unsigned y) {
    return (unsigned)((uint64_t)x * y >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
// The four bytes that the four digits of `selector` name, of the eight of y:x.
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}

#define EMULATOR_MIN_MAX(T, A, B)         \
    static inline T min(A x, B y) {       \
        return (T)x < (T)y ? (T)x : (T)y; \
    }                                     \
    static inline T max(A x, B y) {       \
        return (T)x < (T)y ? (T)y : (T)x; \
    }
EMULATOR_MIN_MAX(int, int, int)
EMULATOR_MIN_MAX(unsigned, unsigned, unsigned)
EMULATOR_MIN_MAX(unsigned, int, unsigned)
EMULATOR_MIN_MAX(unsigned, unsigned, int)
EMULATOR_MIN_MAX(long, long, long)
EMULATOR_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMULATOR_MIN_MAX(long long, long long, long long)
EMULATOR_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef EMULATOR_MIN_MAX
static inline float min(float x, float y) {
    return fminf(x, y);
}
static inline float max(float x, float y) {
    return fmaxf(x, y);
}
static inline double min(double x, double y) {
    return fmin(x, y);
}
static inline double max(double x, double y) {
    return fmax(x, y);
}

// ---------------------------------------------------------------------------------------------------------- bf16 pairs

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
static inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    return __float2bfloat16(x);
}
// Toward zero: the upper half as it is.
static inline __nv_bfloat16 __float2bfloat16_rz(float x) {
    return x != x ? __float2bfloat16(x) : __nv_bfloat16{(uint16_t)(__float_as_uint(x) >> 16)};
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) {
    return x.x;
}
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) {
    return {x};
}
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) {
    return {x, y};
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16(x), __float2bfloat16(y)};
}
static inline __nv_bfloat162 __float22bfloat162_rn(float2 x) {
    return __floats2bfloat162_rn(x.x, x.y);
}
static inline __nv_bfloat162 __float2bfloat162_rn(float x) {
    return __floats2bfloat162_rn(x, x);
}
static inline float2 __bfloat1622float2(__nv_bfloat162 x) {
    return {__bfloat162float(x.x), __bfloat162float(x.y)};
}
static inline float __low2float(__nv_bfloat162 x) {
    return __bfloat162float(x.x);
}
static inline float __high2float(__nv_bfloat162 x) {
    return __bfloat162float(x.y);
}

#endif
