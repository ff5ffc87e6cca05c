// Kernels with a bug each, and their correct twins: `bugs NAME [correct]` runs one and prints what it left. The bugs
// are those that a GPU forgives until it does not. test_emulator.py says by what each of them is caught.
#include "common.cuh"

enum { COUNT = 1002 }; // elements of `in` and of `out`

// ---------------------------------------------------------------------------------------------------- outside of
// memory

template <bool correct> static __global__ void past_the_end(float *out, const float *in) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (correct ? i < COUNT : i <= COUNT) store_one(out + i, in[0]);
}

template <bool correct> static __global__ void read_past_the_end(float *out, const float *in) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < COUNT) out[i] = load_one(in + (correct ? i : i + 1));
}

template <bool correct> static __global__ void vector_over_the_end(float *out, const float *in) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (correct ? i + 4 <= COUNT : i < COUNT) store(out + i, load<4>(in + i));
}

template <bool correct> static __global__ void past_dynamic_shared(float *out, const float *in) {
    DYNAMIC_SHARED(float, s);
    s[threadIdx.x + (correct ? 0 : 1)] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}

template <bool correct> static __global__ void past_static_shared(float *out, const float *in) {
    __shared__ float s[128];
    float *volatile to = s; // else UndefinedBehaviorSanitizer knows the bounds
    to[threadIdx.x + (correct ? 0 : 1)] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}

template <bool correct> static __global__ void misaligned_load(float *out, const float *in) {
    store(out + threadIdx.x * 4, load<4>(in + threadIdx.x * 4 + (correct ? 4 : 1)));
}

template <bool correct> static __global__ void misaligned_store(float *out, const float *in) {
    store(out + threadIdx.x * 4 + (correct ? 4 : 2), load<4>(in + threadIdx.x * 4));
}

template <bool correct> static __global__ void misaligned_copy(float *out, const float *in) {
    __shared__ __align__(16) float s[128 * 4];
    cp_async16(s + threadIdx.x * 4, in + threadIdx.x * 4 + (correct ? 4 : 3));
    cp_async_commit();
    cp_async_wait<0>();
    out[threadIdx.x] = s[threadIdx.x * 4];
}

// ---------------------------------------------------------------------------------------------------------- divergence

template <bool correct> static __global__ void early_return(float *out, const float *in) {
    __shared__ float s[128];
    const bool works = threadIdx.x < 100;
    if (!correct && !works) return;
    if (works) s[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    if (works) out[threadIdx.x] = s[99 - threadIdx.x];
}

template <bool correct> static __global__ void barrier_in_a_branch(float *out, const float *in) {
    if (correct) {
        __syncthreads();
    } else if (threadIdx.x < 64) {
        __syncthreads();
    } else {
        out[threadIdx.x] = in[0];
        __syncthreads();
    }
    out[threadIdx.x] = in[threadIdx.x];
}

template <bool correct> static __global__ void barrier_against_shuffle(float *out, const float *in) {
    float v = in[threadIdx.x];
    if (!correct && threadIdx.x == 5)
        __syncthreads();
    else
        v = __shfl_xor_sync(ALL_LANES, v, 1);
    out[threadIdx.x] = v;
}

template <bool correct> static __global__ void shuffle_with_ended_lanes(float *out, const float *in) {
    const bool works = threadIdx.x < 50;
    if (!correct && !works) return;
    const float sum = warp_sum(works ? in[threadIdx.x] : 0.0f);
    if (works) out[threadIdx.x] = sum;
}

template <bool correct> static __global__ void shuffle_from_an_absent_lane(float *out, const float *in) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, in[threadIdx.x], correct ? 12 : 20);
}

template <bool correct> static __global__ void mask_without_the_lane(float *out, const float *in) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(correct ? 0xffffu : 0xff00u, in[threadIdx.x], 1);
}

template <bool correct> static __global__ void different_shuffles(float *out, const float *in) {
    float v = in[threadIdx.x];
    if (correct || threadIdx.x % 2 == 0)
        v = __shfl_xor_sync(ALL_LANES, v, 2);
    else
        v = __shfl_xor_sync(ALL_LANES, v, 2);
    out[threadIdx.x] = v;
}

// ------------------------------------------------------------------------------------------------------- missing waits

template <bool correct> static __global__ void missing_barrier(float *out, const float *in) {
    __shared__ float s[128];
    s[threadIdx.x] = in[threadIdx.x];
    if (correct) __syncthreads();
    out[threadIdx.x] = s[127 - threadIdx.x];
}

template <bool correct> static __global__ void missing_barrier_of_a_sum(float *out, const float *in) {
    __shared__ float parts[WARP];
    const float sum = warp_sum(in[threadIdx.x]);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = sum;
    if (correct) __syncthreads();
    float total = 0;
    for (unsigned i = 0; i < blockDim.x / WARP; i++) total += parts[i];
    out[threadIdx.x] = total;
}

template <bool correct> static __global__ void missing_barrier_before_reuse(float *out, const float *in) {
    __shared__ float s[128];
    float sum = 0;
    for (int k = 0; k < 4; k++) {
        s[threadIdx.x] = in[threadIdx.x] * (float)(k + 1);
        __syncthreads();
        sum += s[(threadIdx.x + 37) % 128];
        if (correct) __syncthreads();
    }
    out[threadIdx.x] = sum;
}

template <bool correct> static __global__ void missing_syncwarp(float *out, const float *in) {
    __shared__ float s[WARP];
    s[threadIdx.x] = in[threadIdx.x];
    if (correct) __syncwarp();
    out[threadIdx.x] = s[threadIdx.x ^ 1];
}

template <bool correct> static __global__ void missing_copy_wait(float *out, const float *in) {
    DYNAMIC_SHARED(float, s);
    cp_async16(s + threadIdx.x * 4, in + threadIdx.x * 4);
    cp_async_commit();
    if (correct) cp_async_wait<0>();
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}

template <bool correct> static __global__ void missing_copy_commit(float *out, const float *in) {
    DYNAMIC_SHARED(float, s);
    cp_async16(s + threadIdx.x * 4, in + threadIdx.x * 4);
    if (correct) cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}

template <bool correct> static __global__ void wrong_group_count(float *out, const float *in) {
    DYNAMIC_SHARED(float, s);
    float *first = s, *second = s + blockDim.x * 4;
    cp_async16(first + threadIdx.x * 4, in + threadIdx.x * 4);
    cp_async_commit();
    cp_async16(second + threadIdx.x * 4, in + threadIdx.x * 4 + 4);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    float v = first[threadIdx.x];
    cp_async_wait<correct ? 0 : 1>();
    __syncthreads();
    out[threadIdx.x] = v + second[threadIdx.x];
}

template <bool correct> static __global__ void unset_shared(float *out, const float *in) {
    __shared__ float s[128];
    if (correct || threadIdx.x < 64) s[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}

template <bool correct> static __global__ void race_between_blocks(float *out, const float *in) {
    unsigned *sum = (unsigned *)out;
    const unsigned value = __float_as_uint(in[threadIdx.x]) >> 20;
    if (correct)
        atomicAdd(sum + threadIdx.x, value);
    else
        sum[threadIdx.x] += value;
}

template <bool correct> static __global__ void race_between_two_threads(float *out, const float *in) {
    if (threadIdx.x == blockIdx.x * 33 % 128) out[correct ? blockIdx.x : 0] += in[blockIdx.x];
}

template <bool correct> static __global__ void race_after_a_barrier(float *out, const float *in) {
    __shared__ float s[128];
    s[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[(correct ? blockIdx.x * blockDim.x : 0) + threadIdx.x] = s[127 - threadIdx.x];
}

// ------------------------------------------------------------------------------------------------------------ the
// table

typedef struct {
    const char *name;
    void (*bug)(float *, const float *), (*twin)(float *, const float *);
    int blocks, threads, shared_bytes;
} Case;

// clang-format off: it takes < and > for comparisons
#define CASE(name, ...) \
    { #name, name < false>, name < true>, __VA_ARGS__ }
// clang-format on
static const Case cases[] = {
    CASE(past_the_end, 8, 128, 0),
    CASE(read_past_the_end, 8, 128, 0),
    CASE(vector_over_the_end, 2, 128, 0),
    CASE(past_dynamic_shared, 1, 128, 512),
    CASE(past_static_shared, 1, 128, 0),
    CASE(misaligned_load, 1, 128, 0),
    CASE(misaligned_store, 1, 128, 0),
    CASE(misaligned_copy, 1, 128, 0),
    CASE(early_return, 1, 128, 0),
    CASE(barrier_in_a_branch, 1, 128, 0),
    CASE(barrier_against_shuffle, 1, 128, 0),
    CASE(shuffle_with_ended_lanes, 1, 64, 0),
    CASE(shuffle_from_an_absent_lane, 1, 32, 0),
    CASE(mask_without_the_lane, 1, 32, 0),
    CASE(different_shuffles, 1, 32, 0),
    CASE(missing_barrier, 1, 128, 0),
    CASE(missing_barrier_of_a_sum, 1, 128, 0),
    CASE(missing_barrier_before_reuse, 1, 128, 0),
    CASE(missing_syncwarp, 1, 32, 0),
    CASE(missing_copy_wait, 1, 128, 2048),
    CASE(missing_copy_commit, 1, 128, 2048),
    CASE(wrong_group_count, 1, 128, 4096),
    CASE(unset_shared, 1, 128, 0),
    CASE(race_between_blocks, 4, 128, 0),
    CASE(race_between_two_threads, 4, 128, 0),
    CASE(race_after_a_barrier, 4, 128, 0),
};

static void run(const Case *chosen, bool correct) {
    float host[COUNT], *in, *out;
    for (int i = 0; i < COUNT; i++) host[i] = 1.0f / (float)(i + 1);
    cuda_check(cudaMalloc(&in, sizeof host));
    cuda_check(cudaMalloc(&out, sizeof host));
    cuda_check(cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice));
    cuda_check(cudaMemset(out, 0, sizeof host));
    cudaLaunchConfig_t config = launch_config(chosen->blocks, chosen->threads, chosen->shared_bytes, NULL);
    launch(config, correct ? chosen->twin : chosen->bug, out, in);
    cuda_check(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    uint64_t checksum = 0;
    bool nan = false;
    for (int i = 0; i < COUNT; i++) {
        checksum = random_mix(checksum + __float_as_uint(host[i]));
        nan = nan || host[i] != host[i];
    }
    printf("%s %016llx%s\n", chosen->name, (unsigned long long)checksum, nan ? " NaN" : "");
    cuda_check(cudaFree(in));
    cuda_check(cudaFree(out));
}

int main(int argc, char **argv) {
    for (const Case &c : cases)
        if (argc == 1 || strcmp(argv[1], c.name) == 0) run(&c, argc == 1);
}
