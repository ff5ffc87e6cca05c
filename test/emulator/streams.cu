// Streams of the emulator: what CUDA promises, what it does not, and what a stuck program is told.
//   streams promises            what holds under every policy
//   streams latest              what the policy `latest` must leave undone
//   streams stuck               dies, naming the streams
//   streams step [MISSING]      prints the loss of three steps of data-parallel training, without one of its waits
#include "check.h"

static __global__ void add_kernel(float *to, const float *from, float value, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = (from != NULL ? from[i] : 0.0f) + value;
}

static void add(cudaStream_t stream, float *to, const float *from, float value, int n) {
    cudaLaunchConfig_t config = launch_config(divide_up((size_t)n, 32), 32, 0, stream);
    launch(config, add_kernel, to, from, value, n);
}

static cudaStream_t new_stream(unsigned flags) {
    cudaStream_t stream;
    cuda_check(cudaStreamCreateWithFlags(&stream, flags));
    return stream;
}

static cudaEvent_t new_event(unsigned flags) {
    cudaEvent_t event;
    cuda_check(cudaEventCreateWithFlags(&event, flags));
    return event;
}

static void count_call(void *count) {
    ++*(int *)count;
}

// ------------------------------------------------------------------------------------------------------------ promises

enum { N = 100 };

static void memory_is_aligned_and_full_of_nan() {
    for (size_t bytes = 1; bytes < 5000; bytes = bytes * 3 + 1) {
        unsigned char *pointer = device_array<unsigned char>(bytes), *pinned;
        cuda_check(cudaMallocHost(&pinned, bytes));
        CHECK((uintptr_t)pointer % 256 == 0);
        for (size_t i = 0; i < bytes; i++) CHECK(pointer[i] == 0xff && pinned[i] == 0xff);
        EXPECT(cudaFree(pinned), cudaErrorInvalidValue);
        EXPECT(cudaFree(pointer), cudaSuccess);
        EXPECT(cudaFree(pointer), cudaErrorInvalidValue);
        EXPECT(cudaFreeHost(pinned), cudaSuccess);
    }
    void *none = &none;
    EXPECT(cudaMalloc(&none, 0), cudaSuccess);
    CHECK(none == NULL);
    EXPECT(cudaMalloc(&none, (size_t)1 << 62), cudaErrorMemoryAllocation);
    EXPECT(cudaFree(NULL), cudaSuccess);
}

static void wrong_calls_are_refused() {
    float *device = device_array<float>(N), host[N + 1];
    cudaStream_t stream = new_stream(cudaStreamNonBlocking);
    memset(host, 0, sizeof host);
    EXPECT(cudaMemcpy(device, host, sizeof host, cudaMemcpyHostToDevice), cudaErrorInvalidValue); // past the end
    EXPECT(cudaMemcpy(device, host, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    EXPECT(cudaMemcpy(device, host, 4, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
    EXPECT(cudaMemcpy(host, device, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    EXPECT(cudaMemcpy(host, NULL, 4, cudaMemcpyDefault), cudaErrorInvalidValue);
    EXPECT(cudaMemset(host, 0, 4), cudaErrorInvalidValue);
    EXPECT(cudaMemset(device, 0, (N + 1) * sizeof(float)), cudaErrorInvalidValue);
    EXPECT(cudaMemcpy(NULL, NULL, 0, cudaMemcpyDefault), cudaSuccess);
    EXPECT(cudaLaunchHostFunc(stream, NULL, NULL), cudaErrorInvalidValue);
    EXPECT(cudaStreamDestroy(stream), cudaSuccess);
    EXPECT(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
    EXPECT(cudaStreamDestroy(NULL), cudaErrorInvalidResourceHandle);
    EXPECT(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
    EXPECT(cudaMemsetAsync(device, 0, 4, stream), cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    cuda_check(cudaFree(device));
}

// A chain through three streams and back, with an event recorded anew each time: every link sees the one before.
static void events_order_streams() {
    float *a = device_array<float>(N), *b = device_array<float>(N), host[N];
    cudaStream_t streams[3] = {new_stream(cudaStreamNonBlocking), new_stream(cudaStreamNonBlocking),
                               new_stream(cudaStreamNonBlocking)};
    cudaEvent_t event = new_event(cudaEventDisableTiming), never = new_event(cudaEventDisableTiming);
    cuda_check(cudaMemsetAsync(a, 0, N * sizeof(float), streams[0]));
    for (int k = 0; k < 30; k++) {
        add(streams[k % 3], b, a, 1.0f, N);
        add(streams[k % 3], a, b, 1.0f, N);
        cuda_check(cudaEventRecord(event, streams[k % 3]));
        cuda_check(cudaStreamWaitEvent(streams[(k + 1) % 3], event, 0));
        cuda_check(cudaStreamWaitEvent(streams[(k + 1) % 3], never, 0));
    }
    cuda_check(cudaMemcpyAsync(host, a, sizeof host, cudaMemcpyDeviceToHost, streams[0])); // complete: pageable
    for (int i = 0; i < N; i++) CHECK(host[i] == 60.0f);
    for (cudaStream_t stream : streams) cuda_check(cudaStreamDestroy(stream));
    cuda_check(cudaEventDestroy(event));
    cuda_check(cudaEventDestroy(never));
    cuda_check(cudaFree(a));
    cuda_check(cudaFree(b));
}

// Blocking streams and the NULL stream need no event between them.
static void the_null_stream_orders_blocking_streams() {
    float *a = device_array<float>(N), host[N];
    cudaStream_t first = new_stream(cudaStreamDefault), second = new_stream(cudaStreamDefault);
    cuda_check(cudaMemsetAsync(a, 0, N * sizeof(float), first));
    for (int k = 0; k < 10; k++) {
        add(first, a, a, 1.0f, N);
        add(NULL, a, a, 1.0f, N);
        add(second, a, a, 1.0f, N);
        add(NULL, a, a, 1.0f, N);
    }
    cuda_check(cudaMemcpy(host, a, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++) CHECK(host[i] == 40.0f);
    cuda_check(cudaStreamDestroy(first));
    cuda_check(cudaStreamDestroy(second));
    cuda_check(cudaFree(a));
}

static void asking_makes_progress() {
    cudaStream_t stream = new_stream(cudaStreamNonBlocking);
    cudaEvent_t event = new_event(cudaEventDefault), later = new_event(cudaEventDefault);
    int calls = 0, asked = 0;
    for (int i = 0; i < 20; i++) cuda_check(cudaLaunchHostFunc(stream, count_call, &calls));
    cuda_check(cudaEventRecord(event, stream));
    for (int i = 0; i < 20; i++) cuda_check(cudaLaunchHostFunc(stream, count_call, &calls));
    cuda_check(cudaEventRecord(later, stream));
    while (cudaEventQuery(event) == cudaErrorNotReady) asked++;
    CHECK(calls >= 20);
    while (cudaStreamQuery(stream) == cudaErrorNotReady) asked++;
    CHECK(calls == 40 && asked < 1000);
    float ms = -1.0f;
    EXPECT(cudaEventElapsedTime(&ms, event, later), cudaSuccess);
    CHECK(ms >= 0.0f && ms < 1e4f);
    cuda_check(cudaEventDestroy(event));
    cuda_check(cudaEventDestroy(later));
    cuda_check(cudaStreamDestroy(stream));
}

// What the caller may change or leave at once: arguments, pageable sources, streams.
static void callers_may_go_on() {
    cudaStream_t stream = new_stream(cudaStreamNonBlocking);
    float *a = device_array<float>(N), *b = device_array<float>(N), host[N], back[N];
    for (int i = 0; i < N; i++) host[i] = 1.0f;
    cuda_check(cudaMemcpyAsync(a, host, sizeof host, cudaMemcpyHostToDevice, stream));
    for (int i = 0; i < N; i++) host[i] = 2.0f;
    float value = 5.0f;
    cudaLaunchConfig_t config = launch_config(4, 32, 0, stream);
    launch(config, add_kernel, b, a, value, N);
    value = 7.0f;
    config = launch_config(1, 1, 0, NULL);
    cuda_check(cudaStreamDestroy(stream));
    cuda_check(cudaDeviceSynchronize());
    cuda_check(cudaMemcpy(back, b, sizeof back, cudaMemcpyDefault));
    for (int i = 0; i < N; i++) CHECK(back[i] == 6.0f);
    cuda_check(cudaMemcpy(back, host, sizeof back, cudaMemcpyHostToHost));
    CHECK(back[0] == 2.0f);
    cuda_check(cudaFree(a));
    cuda_check(cudaFree(b));
}

static void freeing_waits() {
    cudaStream_t stream = new_stream(cudaStreamNonBlocking);
    for (int k = 0; k < 20; k++) {
        float *a = device_array<float>(N);
        add(stream, a, NULL, 1.0f, N);
        cuda_check(cudaFree(a)); // AddressSanitizer would see the kernel use it
    }
    cuda_check(cudaStreamDestroy(stream));
}

static cudaError_t failing_item(void *) {
    return cudaErrorLaunchFailure;
}

// Last: nothing runs any more.
static void a_failure_is_sticky() {
    cudaStream_t stream = new_stream(cudaStreamNonBlocking);
    int nothing = 0, calls = 0;
    cpu_stream_run(stream, failing_item, &nothing, sizeof nothing);
    cudaLaunchHostFunc(stream, count_call, &calls);
    EXPECT(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
    CHECK(calls == 0);
    EXPECT(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
    EXPECT(cudaGetLastError(), cudaErrorLaunchFailure);
    EXPECT(cudaGetLastError(), cudaErrorLaunchFailure);
}

// ------------------------------------------------------------------------------------------------------ left undone

// Under `latest`, only what is waited for is done: nothing here that CUDA leaves open is so by luck.
static void latest_leaves_undone() {
    CHECK(emulator_set_streams("latest"));
    cudaStream_t blocking = new_stream(cudaStreamDefault), other = new_stream(cudaStreamNonBlocking);
    int of_null = 0, of_blocking = 0, of_other = 0;
    float *a = device_array<float>(N), *b = device_array<float>(N), *pinned, pageable[N];
    cuda_check(cudaMallocHost(&pinned, N * sizeof(float)));

    cuda_check(cudaLaunchHostFunc(other, count_call, &of_other));
    cuda_check(cudaLaunchHostFunc(blocking, count_call, &of_blocking));
    cuda_check(cudaLaunchHostFunc(NULL, count_call, &of_null));
    CHECK(of_null == 0 && of_blocking == 0 && of_other == 0);
    cuda_check(cudaStreamSynchronize(NULL));
    CHECK(of_null == 1 && of_blocking == 1 && of_other == 0); // NULL waits for blocking streams, and for no others
    cuda_check(cudaLaunchHostFunc(NULL, count_call, &of_null));
    cuda_check(cudaLaunchHostFunc(other, count_call, &of_other));
    cuda_check(cudaStreamSynchronize(other));
    CHECK(of_null == 1 && of_other == 2);
    cuda_check(cudaLaunchHostFunc(blocking, count_call, &of_blocking));
    cuda_check(cudaStreamSynchronize(blocking));
    CHECK(of_null == 2 && of_blocking == 2); // and blocking streams for NULL

    cuda_check(cudaMemset(a, 0, N * sizeof(float)));
    CHECK(a[0] != 0.0f); // asynchronous
    cuda_check(cudaMemcpy(b, a, N * sizeof(float), cudaMemcpyDeviceToDevice));
    CHECK(a[0] != 0.0f && b[0] != 0.0f); // so is this
    for (int i = 0; i < N; i++) pageable[i] = 3.0f;
    cuda_check(cudaMemcpy(a, pageable, sizeof pageable, cudaMemcpyHostToDevice));
    CHECK(b[0] == 0.0f && a[0] == 0.0f); // what came before is done; this one has been taken, not yet delivered
    add(NULL, a, a, 1.0f, N);
    CHECK(a[0] == 0.0f);
    cuda_check(cudaMemcpy(pinned, a, N * sizeof(float), cudaMemcpyDeviceToHost));
    CHECK(pinned[0] == 4.0f);
    cuda_check(cudaMemcpyAsync(b, pinned, N * sizeof(float), cudaMemcpyHostToDevice, other));
    pinned[0] = 9.0f; // too early
    cuda_check(cudaMemcpyAsync(pageable, b, sizeof pageable, cudaMemcpyDeviceToHost, other));
    CHECK(pageable[0] == 9.0f && pageable[1] == 4.0f);
    cuda_check(cudaMemcpyAsync(pinned, a, N * sizeof(float), cudaMemcpyDeviceToHost, other));
    CHECK(pinned[0] == 9.0f);
    EXPECT(cudaStreamQuery(other), cudaErrorNotReady);
    EXPECT(cudaStreamQuery(other), cudaSuccess);
    CHECK(pinned[0] == 4.0f);

    // A wait keeps the record that it found.
    cudaEvent_t event = new_event(cudaEventDisableTiming);
    cudaStream_t third = new_stream(cudaStreamNonBlocking);
    int of_third = 0;
    of_other = 0;
    cuda_check(cudaLaunchHostFunc(other, count_call, &of_other));
    cuda_check(cudaEventRecord(event, other));
    cuda_check(cudaStreamWaitEvent(third, event, 0));
    cuda_check(cudaLaunchHostFunc(other, count_call, &of_other));
    cuda_check(cudaEventRecord(event, other));
    cuda_check(cudaLaunchHostFunc(third, count_call, &of_third));
    cuda_check(cudaStreamSynchronize(third));
    CHECK(of_third == 1 && of_other == 1);
    EXPECT(cudaEventQuery(event), cudaErrorNotReady);
    cuda_check(cudaEventSynchronize(event));
    CHECK(of_other == 2);
    cuda_check(cudaStreamDestroy(other));
    cuda_check(cudaStreamDestroy(third));
    cuda_check(cudaStreamDestroy(blocking));
    cuda_check(cudaEventDestroy(event));
    cuda_check(cudaFree(a));
    cuda_check(cudaFree(b));
    cuda_check(cudaFreeHost(pinned));
}

// A ticket that nothing will fulfil, as of an event that is recorded by nobody.
static void get_stuck() {
    cudaStream_t first = new_stream(cudaStreamNonBlocking), second = new_stream(cudaStreamNonBlocking);
    CpuTicket ticket = cpu_stream_ticket(first);
    ticket.finished++;
    cuda_check(cpu_stream_wait(second, ticket));
    float *a = device_array<float>(N);
    add(second, a, NULL, 1.0f, N);
    cudaStreamSynchronize(second);
}

// -------------------------------------------------------------------------------------------------------------- a step

static __global__ void gradient_kernel(float *grads, const float *params, float x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) grads[i] = params[i] * x + (float)i;
}

static __global__ void update_kernel(float *params, const float *grads, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) params[i] -= 0.125f * grads[i];
}

static __global__ void loss_kernel(float *loss, const float *params, int n) {
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += WARP) sum += params[i];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) *loss = sum;
}

// Gradients of three parts on one stream, their reduction on another, update, loss to the host.
static void train_steps(const char *missing) {
    enum { PARTS = 3, EACH = 64, ALL = PARTS * EACH };
    const auto kept = [missing](const char *wait) { return strcmp(missing, wait) != 0; };
    cudaStream_t compute = new_stream(cudaStreamNonBlocking), communication = new_stream(cudaStreamNonBlocking);
    cudaEvent_t written[PARTS], reduced = new_event(cudaEventDisableTiming);
    float *params = device_array<float>(ALL), *grads = device_array<float>(ALL), *sums = device_array<float>(ALL);
    float *loss = device_array<float>(1), *input, *answer;
    cuda_check(cudaMallocHost(&input, ALL * sizeof(float)));
    cuda_check(cudaMallocHost(&answer, sizeof(float)));
    for (int i = 0; i < ALL; i++) input[i] = (float)i * 0.01f;
    cuda_check(cudaMemcpyAsync(params, input, ALL * sizeof(float), cudaMemcpyHostToDevice, compute));
    if (kept("upload")) cuda_check(cudaStreamSynchronize(compute));
    for (int i = 0; i < ALL; i++) input[i] = -1.0f;
    for (cudaEvent_t &event : written) event = new_event(cudaEventDisableTiming);
    cudaLaunchConfig_t config = launch_config(2, 32, 0, compute), one = launch_config(1, WARP, 0, compute);
    for (int step = 0; step < 3; step++) {
        if (kept("reduced") && step > 0) cuda_check(cudaStreamWaitEvent(compute, reduced, 0));
        for (int k = 0; k < PARTS; k++) {
            launch(config, gradient_kernel, grads + k * EACH, params + k * EACH, 1.0f + (float)step, EACH);
            cuda_check(cudaEventRecord(written[k], compute));
            if (kept("written")) cuda_check(cudaStreamWaitEvent(communication, written[k], 0));
            add(communication, sums + k * EACH, grads + k * EACH, 0.5f, EACH);
        }
        cuda_check(cudaEventRecord(reduced, communication));
        if (kept("reduced")) cuda_check(cudaStreamWaitEvent(compute, reduced, 0));
        cudaLaunchConfig_t all = launch_config(ALL / 32, 32, 0, compute);
        launch(all, update_kernel, params, sums, ALL);
        launch(one, loss_kernel, loss, params, ALL);
    }
    cuda_check(cudaMemcpyAsync(answer, loss, sizeof(float), cudaMemcpyDeviceToHost, compute));
    if (kept("download")) cuda_check(cudaStreamSynchronize(compute));
    printf("%a\n", (double)*answer);
    cuda_check(cudaDeviceSynchronize());
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "promises") == 0) {
        memory_is_aligned_and_full_of_nan();
        wrong_calls_are_refused();
        events_order_streams();
        the_null_stream_orders_blocking_streams();
        asking_makes_progress();
        callers_may_go_on();
        freeing_waits();
        a_failure_is_sticky();
    } else if (strcmp(what, "latest") == 0) {
        latest_leaves_undone();
    } else if (strcmp(what, "stuck") == 0) {
        get_stuck();
    } else if (strcmp(what, "step") == 0) {
        train_steps(argc > 2 ? argv[2] : "");
        return 0;
    } else {
        die("promises, latest, stuck, or step");
    }
    printf("passed\n");
}
