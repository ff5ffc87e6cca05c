// What the emulator makes of the device language: indices, warps, barriers, tensor cores, copies, launches, counters.
// Expected values are computed by plain loops.
#include "check.h"

// Of language_second.cu: a kernel of the same name there is another one.
void second_unit_fills(float *out, int n);

static __global__ void fill_kernel(float *out, float value, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    __shared__ float s[256];
    s[threadIdx.x] = value;
    __syncthreads();
    if (i < n) out[i] = s[(threadIdx.x + 1) % blockDim.x];
}

static void units_linked_together() {
    enum { N = 1000 };
    float *first = device_array<float>(N), *second = device_array<float>(N);
    RUN(4, 256, 0, fill_kernel, first, 3.0f, N);
    second_unit_fills(second, N);
    for (int i = 0; i < N; i++) CHECK(first[i] == 3.0f && second[i] == (float)i);
    cuda_check(cudaFree(first));
    cuda_check(cudaFree(second));
}

// Each thread of each block once, whatever their shape.
static __global__ void index_kernel(int *count) {
    const unsigned in_block = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const unsigned of_grid = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    atomicAdd(count + of_grid * (blockDim.x * blockDim.y * blockDim.z) + in_block, 1);
}

static void indices_cover_every_shape() {
    const dim3 grids[] = {dim3(1), dim3(7), dim3(3, 5), dim3(2, 3, 4), dim3(1, 1, 6)};
    const dim3 blocks[] = {dim3(1), dim3(33), dim3(1024), dim3(8, 5), dim3(4, 4, 3), dim3(1, 1, 64)};
    for (dim3 grid : grids)
        for (dim3 shape : blocks) {
            const size_t n = (size_t)grid.x * grid.y * grid.z * shape.x * shape.y * shape.z;
            int *count = device_array<int>(n);
            cuda_check(cudaMemset(count, 0, n * sizeof(int)));
            cudaLaunchConfig_t config = launch_config(1, 1, 0, NULL);
            config.gridDim = grid;
            config.blockDim = shape;
            launch(config, index_kernel, count);
            cuda_check(cudaDeviceSynchronize());
            for (size_t i = 0; i < n; i++) CHECK(count[i] == 1);
            cuda_check(cudaFree(count));
        }
}

// One line of results per kind of shuffle and width.
static __global__ void shuffle_kernel(int *out, double *wide) {
    const int lane = threadIdx.x;
    int line = 0;
    for (int width = 2; width <= 32; width *= 2) {
        out[line++ * 32 + lane] = __shfl_sync(ALL_LANES, lane * 3, 5, width);
        out[line++ * 32 + lane] = __shfl_xor_sync(ALL_LANES, lane * 3, 3, width);
        out[line++ * 32 + lane] = __shfl_up_sync(ALL_LANES, lane * 3, 1, width);
        out[line++ * 32 + lane] = __shfl_down_sync(ALL_LANES, lane * 3, 2, width);
    }
    wide[lane] = __shfl_xor_sync(ALL_LANES, (double)lane + 1e-12, 16);
}

static void shuffles_move_as_documented() {
    int *out = device_array<int>(20 * 32);
    double *wide = device_array<double>(32);
    RUN(1, 32, 0, shuffle_kernel, out, wide);
    int line = 0;
    for (int width = 2; width <= 32; width *= 2, line += 4)
        for (int lane = 0; lane < 32; lane++) {
            const int first = lane / width * width, last = first + width - 1, other = lane ^ 3;
            const int expected[4] = {first + 5 % width, other <= last ? other : lane, lane > first ? lane - 1 : lane,
                                     lane + 2 <= last ? lane + 2 : lane};
            for (int k = 0; k < 4; k++) CHECK(out[(line + k) * 32 + lane] == expected[k] * 3);
        }
    for (int lane = 0; lane < 32; lane++) CHECK(wide[lane] == (double)(lane ^ 16) + 1e-12);
    cuda_check(cudaFree(out));
    cuda_check(cudaFree(wide));
}

static __global__ void vote_kernel(unsigned *out) {
    const int t = threadIdx.x, lane = t % 32;
    const unsigned odd = 0xaaaaaaaau;
    out[t] = __ballot_sync(ALL_LANES, t % 3 == 0);
    out[128 + t] = (unsigned)__any_sync(ALL_LANES, t == 40);
    out[256 + t] = (unsigned)__all_sync(ALL_LANES, t != 40);
    out[384 + t] = lane % 2 == 1 ? __ballot_sync(odd, lane > 16) : 0;
    out[512 + t] = (unsigned)__syncthreads_count(t % 5 == 0);
    out[640 + t] = (unsigned)__syncthreads_or(t == 77);
    out[768 + t] = (unsigned)__syncthreads_and(t != 77);
    out[896 + t] = (unsigned)__syncthreads_or(0) * 2 + (unsigned)__syncthreads_and(1);
}

static void votes_count() {
    unsigned *out = device_array<unsigned>(1024);
    RUN(1, 128, 0, vote_kernel, out);
    for (int t = 0; t < 128; t++) {
        unsigned thirds = 0, high = 0;
        for (int lane = 0; lane < 32; lane++) {
            thirds |= (unsigned)((t / 32 * 32 + lane) % 3 == 0) << lane;
            high |= (unsigned)(lane % 2 == 1 && lane > 16) << lane;
        }
        CHECK(out[t] == thirds && out[128 + t] == (t / 32 == 1) && out[256 + t] == (t / 32 != 1));
        CHECK(out[384 + t] == (t % 2 == 1 ? high : 0));
        CHECK(out[512 + t] == 26 && out[640 + t] == 1 && out[768 + t] == 0 && out[896 + t] == 1);
    }
    cuda_check(cudaFree(out));
}

// A block whose last warp is not full, with sums over all of it.
static __global__ void sum_kernel(float *out) {
    __shared__ float parts[WARP];
    out[threadIdx.x] = block_sum((float)threadIdx.x, parts);
    out[blockDim.x + threadIdx.x] = block_max((float)(threadIdx.x * 7 % blockDim.x), parts);
}

static __global__ void small_warp_kernel(int *out) {
    const unsigned mask = (1u << 20) - 1; // of a block of 20 threads
    out[threadIdx.x] = __shfl_sync(mask, (int)threadIdx.x * 2, 19);
    __syncwarp(mask);
    __syncthreads();
}

static void sums_over_blocks() {
    float *out = device_array<float>(2 * 1024);
    for (int threads = 32; threads <= 1024; threads += 96) {
        RUN(1, threads, 0, sum_kernel, out);
        for (int t = 0; t < threads; t++) {
            CHECK(out[t] == (float)(threads * (threads - 1) / 2));
            CHECK(out[threads + t] <= (float)(threads - 1) && out[threads + t] == out[threads]);
        }
    }
    int *small = device_array<int>(20);
    RUN(1, 20, 0, small_warp_kernel, small);
    for (int t = 0; t < 20; t++) CHECK(small[t] == 38);
    cuda_check(cudaFree(out));
    cuda_check(cudaFree(small));
}

// One product of tensor cores: a by rows through ldmatrix, b (16 x 8, by rows) through its transposed form.
static __global__ void product_kernel(float *d, const __nv_bfloat16 *a, const __nv_bfloat16 *b, const float *c) {
    __shared__ __align__(16) __nv_bfloat16 sa[16 * 16], sb[16 * 8];
    const int lane = threadIdx.x;
    cp_async16(sa + lane * 8, a + lane * 8);
    if (lane < 16) cp_async16(sb + lane * 8, b + lane * 8);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    uint32_t fa[4], fb[4], fbt[2];
    ldmatrix_x4(fa, sa + lane % 16 * 16 + lane / 16 * 8);
    ldmatrix_x4_transposed(fb, sb + lane % 16 * 8);
    fbt[0] = fb[0];
    fbt[1] = fb[1];
    float sum[4];
    for (int i = 0; i < 4; i++) sum[i] = c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
    mma_m16n8k16(sum, fa, fbt);
    for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

static void products_of_tensor_cores() {
    __nv_bfloat16 *a = device_array<__nv_bfloat16>(256), *b = device_array<__nv_bfloat16>(128);
    float *c = device_array<float>(128), *d = device_array<float>(128);
    for (int i = 0; i < 256; i++) a[i] = __float2bfloat16((float)(i * 37 % 101 - 50) / 16.0f);
    for (int i = 0; i < 128; i++) b[i] = __float2bfloat16((float)(i * 53 % 97 - 48) / 8.0f);
    for (int i = 0; i < 128; i++) c[i] = (float)(i % 11) * 0.25f;
    RUN(1, 32, 0, product_kernel, d, a, b, c);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            double sum = c[i * 8 + j]; // every partial sum is a multiple of 2^-7 below 2^13: exact in fp32
            for (int k = 0; k < 16; k++)
                sum += (double)__bfloat162float(a[i * 16 + k]) * (double)__bfloat162float(b[k * 8 + j]);
            CHECK(d[i * 8 + j] == (float)sum);
        }
    cuda_check(cudaFree(a));
    cuda_check(cudaFree(b));
    cuda_check(cudaFree(c));
    cuda_check(cudaFree(d));
}

// Copies of part of 16 bytes, the rest of which becomes zero.
static __global__ void partial_copy_kernel(unsigned char *out, const unsigned char *in) {
    DYNAMIC_SHARED(unsigned char, s);
    cp_async16(s + threadIdx.x * 16, in + threadIdx.x * 16, (int)threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    for (int i = 0; i < 16; i++) out[threadIdx.x * 16 + i] = s[threadIdx.x * 16 + i];
}

static void copies_of_parts_fill_with_zeros() {
    unsigned char *in = device_array<unsigned char>(17 * 16), *out = device_array<unsigned char>(17 * 16);
    for (int i = 0; i < 17 * 16; i++) in[i] = (unsigned char)(i % 255 + 1);
    RUN(1, 17, 17 * 16, partial_copy_kernel, out, in);
    for (int t = 0; t < 17; t++)
        for (int i = 0; i < 16; i++) CHECK(out[t * 16 + i] == (i < t ? in[t * 16 + i] : 0));
    cuda_check(cudaFree(in));
    cuda_check(cudaFree(out));
}

static __global__ void traffic_kernel(float *out, const float *in, int n) {
    DYNAMIC_SHARED(float, s);
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i + 4 <= n) {
        store<4, Cache::stream>(out + i, load<4, Cache::stream>(in + i));
        cp_async16(s + threadIdx.x * 4, in + i);
        store_one(out + i, load_one(in + i));
    }
    cp_async_commit();
    cp_async_wait<0>();
}

static void traffic_is_counted() {
    enum { N = 4096 };
    float *in = device_array<float>(N), *out = device_array<float>(N);
    uint64_t read, written, launches;
    cuda_check(cudaMemset(in, 0, N * sizeof(float)));
    cuda_check(cudaDeviceSynchronize());
    emulator_counts_reset();
    for (int times = 1; times <= 3; times++) {
        RUN(8, 128, 128 * 16, traffic_kernel, out, in, N);
        emulator_counts(&read, &written, &launches);
        CHECK(launches == (uint64_t)times);
        CHECK(read == (uint64_t)times * (2 * N * 4 + N) && written == (uint64_t)times * (N * 4 + N));
    }
    emulator_counts_reset();
    emulator_counts(&read, &written, &launches);
    CHECK(read == 0 && written == 0 && launches == 0);
    cuda_check(cudaFree(in));
    cuda_check(cudaFree(out));
}

static __global__ void empty_kernel(int *ran) {
    atomicAdd(ran, 1);
}

static cudaError_t try_launch(dim3 grid, dim3 shape, size_t shared_bytes, int *ran) {
    cudaLaunchConfig_t config = launch_config(1, 1, shared_bytes, NULL);
    config.gridDim = grid;
    config.blockDim = shape;
    return cudaLaunchKernelEx(&config, empty_kernel, ran);
}

static void impossible_launches_are_refused() {
    int *ran = device_array<int>(1);
    *ran = 0;
    const dim3 one(1);
    EXPECT(try_launch(dim3(0), one, 0, ran), cudaErrorInvalidConfiguration);
    EXPECT(cudaGetLastError(), cudaErrorInvalidConfiguration);
    EXPECT(cudaGetLastError(), cudaSuccess);
    EXPECT(try_launch(one, dim3(0), 0, ran), cudaErrorInvalidConfiguration);
    EXPECT(try_launch(one, dim3(1025), 0, ran), cudaErrorInvalidConfiguration);
    EXPECT(try_launch(one, dim3(32, 33), 0, ran), cudaErrorInvalidConfiguration);
    EXPECT(try_launch(one, dim3(1, 1, 65), 0, ran), cudaErrorInvalidConfiguration);
    EXPECT(try_launch(dim3(1, 65536), one, 0, ran), cudaErrorInvalidConfiguration);
    EXPECT(try_launch(dim3(1, 1, 65536), one, 0, ran), cudaErrorInvalidConfiguration);
    EXPECT(try_launch(dim3(0x80000000u), one, 0, ran), cudaErrorInvalidConfiguration);
    EXPECT(try_launch(one, one, (48 << 10) + 1, ran), cudaErrorInvalidConfiguration);
    EXPECT(try_launch(one, one, 48 << 10, ran), cudaSuccess);
    const cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    EXPECT(cudaFuncSetAttribute(empty_kernel, most, (163 << 10) + 1), cudaErrorInvalidValue);
    EXPECT(cudaFuncSetAttribute(empty_kernel, most, 100 << 10), cudaSuccess);
    EXPECT(try_launch(one, one, 100 << 10, ran), cudaSuccess);
    EXPECT(try_launch(one, one, (100 << 10) + 1, ran), cudaErrorInvalidConfiguration);
    EXPECT(try_launch(dim3(1, 65535), one, 0, ran), cudaSuccess);
    cuda_check(cudaDeviceSynchronize());
    CHECK(*ran == 2 + 65535);
    EXPECT(cudaGetLastError(), cudaErrorInvalidConfiguration);
    cuda_check(cudaFree(ran));
}

// What only one order of the threads, or one time of a copy, gives: that there are others.
static __global__ void first_kernel(unsigned *first) {
    atomicCAS(first + blockIdx.x, ALL_LANES, threadIdx.x);
}

static void orders_differ() {
    enum { BLOCKS = 20 };
    unsigned *first = device_array<unsigned>(BLOCKS);
    const char *const orders[] = {"ascending", "descending", "random:1", "random:2"};
    unsigned found[4][BLOCKS];
    CHECK(!emulator_set_threads("sideways") && !emulator_set_threads("random:") && !emulator_set_threads("random:1x"));
    CHECK(!emulator_set_cp_async("never") && !emulator_set_streams("lazy"));
    for (int k = 0; k < 4; k++) {
        CHECK(emulator_set_threads(orders[k]));
        cuda_check(cudaMemset(first, 0xff, sizeof found[k]));
        RUN(BLOCKS, 128, 0, first_kernel, first);
        memcpy(found[k], first, sizeof found[k]);
    }
    for (int i = 0; i < BLOCKS; i++) CHECK(found[0][i] == 0 && found[1][i] == 127);
    CHECK(memcmp(found[2], found[3], sizeof found[2]) != 0);
    cuda_check(cudaFree(first));
}

static __global__ void arithmetic_kernel(int *wrong) {
    const auto expect = [&](bool so) { *wrong += !so; };
    expect(__umulhi(0xffffffffu, 0xfffffffeu) == 0xfffffffdu);
    expect(__umul64hi(~0ull, ~0ull - 1) == ~0ull - 2);
    expect(__popc(0xf0f0u) == 8 && __clz(1) == 31 && __clz(0) == 32 && __ffs(8) == 4 && __brev(1) == 0x80000000u);
    expect(__byte_perm(0x33221100u, 0x77665544u, 0x7531) == 0x77553311u);
    expect(__float_as_uint(-0.0f) == 0x80000000u && __uint_as_float(0x3f800000u) == 1.0f);
    expect(min(3, -4) == -4 && max(3u, 4u) == 4u && min(2.0f, 1.0f) == 1.0f && max(-1L, 1L) == 1L);
    expect(fabsf(rsqrtf(4.0f) - 0.5f) < 1e-7f && __saturatef(2.0f) == 1.0f && __saturatef(-1.0f) == 0.0f);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(1.5f, -2.0f);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    expect(bits == 0xc0003fc0u); // the first one is the lower half
    expect(__bfloat1622float2(pair).x == 1.5f && __low2float(pair) == 1.5f && __high2float(pair) == -2.0f);
    expect(__bfloat16_as_ushort(__float2bfloat16_rz(1.9999f)) == 0x3fff);
    expect(__bfloat16_as_ushort(__float2bfloat16_rn(1.9999f)) == 0x4000);
}

static void arithmetic_is_that_of_the_gpu() {
    int *wrong = device_array<int>(1);
    *wrong = 0;
    RUN(1, 1, 0, arithmetic_kernel, wrong);
    CHECK(*wrong == 0);
    cuda_check(cudaFree(wrong));
}

// Sums that many blocks add up with atomics, on however many OS threads.
static __global__ void atomic_kernel(unsigned long long *sum, unsigned *most, unsigned *least) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(sum, (unsigned long long)i << 20);
    atomicMax(most, i);
    atomicMin(least, i + 5);
}

static void atomics_lose_nothing() {
    unsigned long long *sum = device_array<unsigned long long>(1);
    unsigned *ends = device_array<unsigned>(2);
    *sum = 0, ends[0] = 0, ends[1] = ~0u;
    RUN(300, 256, 0, atomic_kernel, sum, ends, ends + 1);
    const unsigned long long n = 300 * 256;
    CHECK(*sum == n * (n - 1) / 2 << 20 && ends[0] == n - 1 && ends[1] == 5);
    cuda_check(cudaFree(sum));
    cuda_check(cudaFree(ends));
}

int main() {
    units_linked_together();
    indices_cover_every_shape();
    shuffles_move_as_documented();
    votes_count();
    sums_over_blocks();
    products_of_tensor_cores();
    copies_of_parts_fill_with_zeros();
    traffic_is_counted();
    impossible_launches_are_refused();
    arithmetic_is_that_of_the_gpu();
    atomics_lose_nothing();
    orders_differ();
    printf("passed\n");
}
