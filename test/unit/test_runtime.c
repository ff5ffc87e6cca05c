// The CPU device's runtime: bf16, memory, streams and events.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define check(call) assert_int_equal((call), cudaSuccess)

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void bf16_keeps_its_own_values(void **state) {
    (void)state;
    for (uint32_t u = 0; u < 65536; u++) {
        __nv_bfloat16 value = {(uint16_t)u};
        float wide = __bfloat162float(value);
        uint32_t bits;
        memcpy(&bits, &wide, sizeof bits);
        assert_int_equal(bits, u << 16);
        assert_int_equal(__float2bfloat16(wide).x, isnan(wide) ? 0x7fff : u);
    }
}

// Every fp32 between two neighbours goes to the nearer one; from the middle to the one whose last bit is 0.
static void bf16_rounds_to_nearest_even(void **state) {
    (void)state;
    static const uint32_t between[] = {0x0001, 0x4000, 0x7fff, 0x8000, 0x8001, 0xc000, 0xffff};
    for (uint32_t u = 0; u < 65536; u++) {
        if ((u & 0x7f80) == 0x7f80) continue; // infinities and NaN
        // Beyond the largest finite number stands 2^128, in place of infinity.
        bool largest = (u & 0x7fff) == 0x7f7f;
        double low = float_of(u << 16), high = largest ? copysign(ldexp(1, 128), low) : float_of((u + 1) << 16);
        for (size_t i = 0; i < sizeof between / sizeof between[0]; i++) {
            float value = float_of(u << 16 | between[i]);
            double below = fabs((double)value - low), above = fabs(high - (double)value);
            uint32_t expected = below < above || (below == above && u % 2 == 0) ? u : u + 1;
            assert_int_equal(__float2bfloat16(value).x, expected);
        }
    }
}

static void bf16_nan_and_infinity(void **state) {
    (void)state;
    static const uint32_t nans[] = {0x7f800001, 0x7f80ffff, 0x7fc00000, 0x7fffffff, 0xff800001, 0xffffffff};
    for (size_t i = 0; i < sizeof nans / sizeof nans[0]; i++)
        assert_true(isnan(__bfloat162float(__float2bfloat16(float_of(nans[i])))));
    assert_int_equal(__float2bfloat16(INFINITY).x, 0x7f80);
    assert_int_equal(__float2bfloat16(-INFINITY).x, 0xff80);
    assert_int_equal(__float2bfloat16(3.4028235e38f).x, 0x7f80); // the largest fp32 rounds up
}

static long page_faults(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt + usage.ru_majflt;
}

static void memory_is_aligned_zeroed_and_touched(void **state) {
    (void)state;
    size_t sizes[] = {1, 100, 4096, 4097, (2 << 20) - 1, 2 << 20, (16 << 20) + 12345};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        unsigned char *pointer = NULL;
        check(cudaMalloc((void **)&pointer, sizes[i]));
        assert_int_equal((uintptr_t)pointer % 4096, 0);
        long before = page_faults();
        for (size_t k = 0; k < sizes[i]; k++) assert_true(pointer[k] == 0);
        memset(pointer, 0xff, sizes[i]);
        long faults = page_faults() - before;
        assert_true(faults < 8); // the allocation has 4000 pages at its largest
        check(cudaFree(pointer));
    }
    void *none = &none;
    check(cudaMalloc(&none, 0));
    assert_null(none);
    check(cudaFree(NULL));
}

static void memory_that_is_not_there_is_refused(void **state) {
    (void)state;
    size_t left, total;
    check(cudaMemGetInfo(&left, &total));
    assert_true(left > 0 && left <= total);
    void *pointer = &left;
    assert_int_equal(cudaMalloc(&pointer, total + (1 << 20)), cudaErrorMemoryAllocation);
    assert_null(pointer);
    assert_int_equal(cudaMalloc(&pointer, (size_t)1 << 62), cudaErrorMemoryAllocation);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    check(cudaMalloc(&pointer, 8192));
    assert_int_equal(cudaFree((char *)pointer + 64), cudaErrorInvalidValue);
    check(cudaFree(pointer));
}

static void device_describes_itself(void **state) {
    (void)state;
    struct cudaDeviceProp properties;
    int count = 0, device = -1;
    check(cudaGetDeviceCount(&count));
    assert_int_equal(count, 1);
    check(cudaSetDevice(0));
    check(cudaGetDevice(&device));
    assert_int_equal(device, 0);
    assert_int_equal(cudaSetDevice(1), cudaErrorInvalidDevice);
    check(cudaGetDeviceProperties(&properties, 0));
    assert_true(strlen(properties.name) > 0);
    assert_in_range(properties.multiProcessorCount, 1, sysconf(_SC_NPROCESSORS_CONF));
    assert_true(properties.totalGlobalMem > 1 << 20);
    assert_string_equal(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady");
    assert_string_equal(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
}

// ------------------------------------------------------------------------------------------------- streams and events

static void pause_ms(int ms) {
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&pause, NULL);
}

// An item that waits until the test opens it.
typedef struct {
    int open;
} Gate;

static void gate_pass(void *argument) {
    Gate *gate = argument;
    while (!__atomic_load_n(&gate->open, __ATOMIC_ACQUIRE)) pause_ms(1);
}

static void gate_open(Gate *gate) {
    __atomic_store_n(&gate->open, 1, __ATOMIC_RELEASE);
}

// Waits up to 10 s for what should happen soon.
static bool soon(cudaStream_t stream) {
    for (int i = 0; i < 10000; i++) {
        if (cudaStreamQuery(stream) == cudaSuccess) return true;
        pause_ms(1);
    }
    return false;
}

static cudaStream_t worker_stream(void) {
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static cudaEvent_t plain_event(void) {
    cudaEvent_t event;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

static void note_thread(void *argument) {
    *(pthread_t *)argument = pthread_self();
}

static void streams_run_where_they_should(void **state) {
    (void)state;
    cudaStream_t plain, worker = worker_stream();
    check(cudaStreamCreate(&plain));
    pthread_t of_null, of_plain, of_worker;
    check(cudaLaunchHostFunc(NULL, note_thread, &of_null));
    check(cudaLaunchHostFunc(plain, note_thread, &of_plain));
    check(cudaLaunchHostFunc(worker, note_thread, &of_worker));
    check(cudaDeviceSynchronize());
    assert_true(pthread_equal(of_null, pthread_self()));
    assert_true(pthread_equal(of_plain, pthread_self()));
    assert_false(pthread_equal(of_worker, pthread_self()));
    int least = 1, greatest = 1;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t prioritised;
    check(cudaStreamCreateWithPriority(&prioritised, cudaStreamNonBlocking, greatest));
    check(cudaLaunchHostFunc(prioritised, note_thread, &of_null));
    check(cudaStreamSynchronize(prioritised));
    assert_false(pthread_equal(of_null, pthread_self()));
    check(cudaStreamDestroy(prioritised));
    check(cudaStreamDestroy(plain));
    check(cudaStreamDestroy(worker));
    assert_int_equal(cudaStreamDestroy(NULL), cudaErrorInvalidResourceHandle);
}

static void a_worker_overlaps_its_caller(void **state) {
    (void)state;
    cudaStream_t stream = worker_stream();
    Gate gate = {0};
    check(cudaLaunchHostFunc(stream, gate_pass, &gate)); // returns although the item cannot finish
    assert_int_equal(cudaStreamQuery(stream), cudaErrorNotReady);
    gate_open(&gate);
    check(cudaStreamSynchronize(stream));
    check(cudaStreamQuery(stream));
    check(cudaStreamDestroy(stream));
}

static int sequence_next, sequence_wrong;

static cudaError_t sequence_item(void *argument) {
    if (*(int *)argument != sequence_next) sequence_wrong++;
    sequence_next++;
    return cudaSuccess;
}

// Far more items than the queue holds: the caller blocks, nothing is lost, the order is kept.
static void a_full_queue_blocks(void **state) {
    (void)state;
    cudaStream_t stream = worker_stream();
    Gate gate = {0};
    sequence_next = sequence_wrong = 0;
    check(cudaLaunchHostFunc(stream, gate_pass, &gate));
    for (int i = 0; i < CPU_QUEUE - 1; i++) check(cpu_stream_run(stream, sequence_item, &i, sizeof i));
    assert_int_equal(stream->submitted - stream->finished, CPU_QUEUE); // full, and not blocked so far
    gate_open(&gate);
    for (int i = CPU_QUEUE - 1; i < 20 * CPU_QUEUE; i++) {
        check(cpu_stream_run(stream, sequence_item, &i, sizeof i));
        pthread_mutex_lock(&stream->mutex);
        assert_true(stream->submitted - stream->finished <= CPU_QUEUE);
        pthread_mutex_unlock(&stream->mutex);
    }
    check(cudaStreamSynchronize(stream));
    assert_int_equal(sequence_next, 20 * CPU_QUEUE);
    assert_int_equal(sequence_wrong, 0);
    char large[CPU_ARGUMENTS + 8] = {0};
    assert_int_equal(cpu_stream_run(stream, sequence_item, large, sizeof large), cudaErrorInvalidValue);
    check(cudaStreamDestroy(stream));
}

// Each copy sees what stood there at its place in the stream.
static void copies_keep_the_order_of_their_stream(void **state) {
    (void)state;
    enum { N = 100000 };
    unsigned char *a, *b, *c;
    check(cudaMalloc((void **)&a, N));
    check(cudaMalloc((void **)&b, N));
    check(cudaMallocHost((void **)&c, N));
    cudaStream_t stream = worker_stream();
    for (int round = 0; round < 20; round++) {
        Gate gate = {0};
        memset(b, 0xff, N);
        memset(c, 0xff, N);
        check(cudaLaunchHostFunc(stream, gate_pass, &gate));
        check(cudaMemsetAsync(a, 1, N, stream));
        check(cudaMemcpyAsync(b, a, N, cudaMemcpyDeviceToDevice, stream));
        check(cudaMemsetAsync(a, 2, N, stream));
        check(cudaMemcpyAsync(c, a, N - 1, cudaMemcpyDeviceToHost, stream));
        assert_int_equal(b[0], 0xff); // nothing runs ahead of the gate
        gate_open(&gate);
        check(cudaStreamSynchronize(stream));
        for (int i = 0; i < N; i++) assert_true(a[i] == 2 && b[i] == 1 && c[i] == (i < N - 1 ? 2 : 0xff));
    }
    check(cudaMemset(a, 7, N));
    check(cudaMemcpy(b, a, N, cudaMemcpyDefault));
    assert_true(b[0] == 7 && b[N - 1] == 7);
    assert_int_equal(cudaMemcpy(b, NULL, 1, cudaMemcpyDefault), cudaErrorInvalidValue);
    assert_int_equal(cudaMemset(NULL, 0, 1), cudaErrorInvalidValue);
    check(cudaMemcpy(NULL, NULL, 0, cudaMemcpyDefault));
    check(cudaStreamDestroy(stream));
    check(cudaFree(a));
    check(cudaFree(b));
    check(cudaFreeHost(c));
}

static void an_event_orders_two_workers(void **state) {
    (void)state;
    cudaStream_t first = worker_stream(), second = worker_stream();
    cudaEvent_t event = plain_event();
    for (int round = 0; round < 50; round++) {
        int value = 0, seen = -1;
        Gate gate = {0};
        check(cudaLaunchHostFunc(first, gate_pass, &gate));
        check(cudaMemsetAsync(&value, 1, sizeof value, first));
        check(cudaEventRecord(event, first));
        check(cudaStreamWaitEvent(second, event, 0));
        check(cudaMemcpyAsync(&seen, &value, sizeof value, cudaMemcpyDefault, second));
        assert_int_equal(cudaEventQuery(event), cudaErrorNotReady);
        if (round == 0) pause_ms(30); // time for a second stream that does not wait to go wrong
        assert_int_equal(cudaStreamQuery(second), cudaErrorNotReady);
        gate_open(&gate);
        check(cudaStreamSynchronize(second));
        assert_int_equal(seen, 0x01010101);
        check(cudaEventQuery(event));
        check(cudaEventSynchronize(event));
    }
    check(cudaEventDestroy(event));
    check(cudaStreamDestroy(first));
    check(cudaStreamDestroy(second));
}

static void late_set(void *argument) {
    pause_ms(20);
    __atomic_store_n((int *)argument, 1, __ATOMIC_RELEASE);
}

static void the_calling_thread_waits_for_an_event(void **state) {
    (void)state;
    cudaStream_t stream = worker_stream(), plain;
    cudaEvent_t event = plain_event();
    check(cudaStreamCreate(&plain));
    cudaStream_t inlines[] = {NULL, plain};
    for (int i = 0; i < 2; i++) {
        int value = 0;
        check(cudaLaunchHostFunc(stream, late_set, &value));
        check(cudaEventRecord(event, stream));
        check(cudaStreamWaitEvent(inlines[i], event, 0));
        assert_int_equal(__atomic_load_n(&value, __ATOMIC_ACQUIRE), 1);
    }
    check(cudaEventRecord(event, plain)); // what the calling thread has done is done
    check(cudaEventQuery(event));
    check(cudaEventDestroy(event));
    check(cudaStreamDestroy(plain));
    check(cudaStreamDestroy(stream));
}

static void an_event_never_recorded_is_not_waited_for(void **state) {
    (void)state;
    cudaStream_t first = worker_stream(), second = worker_stream();
    cudaEvent_t event = plain_event();
    Gate gate = {0};
    check(cudaLaunchHostFunc(first, gate_pass, &gate));
    check(cudaEventQuery(event));
    check(cudaStreamWaitEvent(second, event, 0));
    check(cudaEventRecord(event, first)); // too late for the wait above
    bool passed = soon(second);
    gate_open(&gate);
    assert_true(passed);
    check(cudaDeviceSynchronize());
    check(cudaEventDestroy(event));
    check(cudaStreamDestroy(first));
    check(cudaStreamDestroy(second));
}

// A wait keeps the record that it found; recording again concerns later waits only.
static void recording_again_gives_a_new_ticket(void **state) {
    (void)state;
    cudaStream_t first = worker_stream(), earlier = worker_stream(), later = worker_stream();
    cudaEvent_t event = plain_event();
    Gate begin = {0}, middle = {0};
    check(cudaLaunchHostFunc(first, gate_pass, &begin));
    check(cudaEventRecord(event, first));
    check(cudaStreamWaitEvent(earlier, event, 0));
    check(cudaLaunchHostFunc(first, gate_pass, &middle));
    check(cudaEventRecord(event, first));
    check(cudaStreamWaitEvent(later, event, 0));
    assert_int_equal(cudaStreamQuery(earlier), cudaErrorNotReady);
    gate_open(&begin);
    bool passed = soon(earlier);
    cudaError_t of_later = cudaStreamQuery(later), of_event = cudaEventQuery(event);
    gate_open(&middle);
    assert_true(passed);
    assert_int_equal(of_later, cudaErrorNotReady);
    assert_int_equal(of_event, cudaErrorNotReady);
    check(cudaStreamSynchronize(later));
    check(cudaEventQuery(event));
    // On another stream: the event is that stream's now, though the first one is busy.
    Gate busy = {0};
    check(cudaLaunchHostFunc(first, gate_pass, &busy));
    check(cudaEventRecord(event, first));
    check(cudaEventRecord(event, earlier));
    check(cudaEventSynchronize(event));
    gate_open(&busy);
    check(cudaDeviceSynchronize());
    check(cudaEventDestroy(event));
    check(cudaStreamDestroy(first));
    check(cudaStreamDestroy(earlier));
    check(cudaStreamDestroy(later));
}

static void sleep_item(void *argument) {
    pause_ms(*(int *)argument);
}

static void events_measure_time(void **state) {
    (void)state;
    cudaStream_t stream = worker_stream();
    cudaEvent_t start, stop, untimed = plain_event();
    check(cudaEventCreate(&start));
    check(cudaEventCreate(&stop));
    float ms = -1;
    assert_int_equal(cudaEventElapsedTime(&ms, start, stop), cudaErrorInvalidResourceHandle);
    int duration = 30;
    check(cudaEventRecord(start, stream));
    check(cudaLaunchHostFunc(stream, sleep_item, &duration));
    check(cudaEventRecord(stop, stream));
    assert_int_equal(cudaEventElapsedTime(&ms, start, stop), cudaErrorNotReady);
    check(cudaEventSynchronize(stop));
    check(cudaEventElapsedTime(&ms, start, stop));
    assert_true(ms >= 29.5f && ms < 3000);
    check(cudaEventRecord(untimed, stream));
    assert_int_equal(cudaEventElapsedTime(&ms, start, untimed), cudaErrorInvalidResourceHandle);
    // A destroyed event's stamp that is still queued does not reach the event's next owner.
    Gate gate = {0};
    check(cudaLaunchHostFunc(stream, gate_pass, &gate));
    check(cudaEventRecord(stop, stream));
    check(cudaEventDestroy(stop));
    check(cudaEventCreate(&stop));
    gate_open(&gate);
    check(cudaStreamSynchronize(stream));
    assert_int_equal(cudaEventElapsedTime(&ms, start, stop), cudaErrorInvalidResourceHandle);
    check(cudaEventDestroy(start));
    check(cudaEventDestroy(stop));
    check(cudaEventDestroy(untimed));
    check(cudaStreamDestroy(stream));
}

// Destroying a stream finishes its work; events recorded on it stay passed whatever its memory is used for.
static void destroyed_streams_leave_their_events_passed(void **state) {
    (void)state;
    cudaStream_t stream = worker_stream();
    cudaEvent_t event = plain_event();
    int value = 0;
    check(cudaLaunchHostFunc(stream, late_set, &value));
    check(cudaEventRecord(event, stream));
    check(cudaStreamDestroy(stream));
    assert_int_equal(value, 1);
    check(cudaEventQuery(event));
    cudaStream_t next = worker_stream();
    Gate gate = {0};
    check(cudaLaunchHostFunc(next, gate_pass, &gate));
    cudaError_t query = cudaEventQuery(event);
    gate_open(&gate);
    assert_int_equal(query, cudaSuccess);
    check(cudaStreamDestroy(next));
    check(cudaEventDestroy(event));
}

static void freeing_waits_for_queued_work(void **state) {
    (void)state;
    cudaStream_t stream = worker_stream();
    int *pointer, duration = 20;
    check(cudaMalloc((void **)&pointer, 4096));
    check(cudaLaunchHostFunc(stream, sleep_item, &duration));
    check(cudaMemsetAsync(pointer, 1, 4096, stream)); // would crash on freed memory
    check(cudaFree(pointer));
    check(cudaStreamQuery(stream));
    check(cudaStreamDestroy(stream));
}

static void a_step_allocates_nothing(void **state) {
    (void)state;
    cudaStream_t first = worker_stream(), second = worker_stream();
    cudaEvent_t event = plain_event();
    int a = 0, b = 0;
    size_t before = 0;
    for (int step = 0; step < 2000; step++) {
        if (step == 100) before = mallinfo2().uordblks;
        check(cudaMemsetAsync(&a, step, sizeof a, first));
        check(cudaEventRecord(event, first));
        check(cudaStreamWaitEvent(second, event, 0));
        check(cudaMemcpyAsync(&b, &a, sizeof a, cudaMemcpyDefault, second));
        check(cudaEventRecord(event, second));
        check(cudaStreamWaitEvent(first, event, 0));
    }
    check(cudaDeviceSynchronize());
    assert_int_equal(mallinfo2().uordblks, before);
    assert_int_equal(b, a);
    check(cudaEventDestroy(event));
    check(cudaStreamDestroy(first));
    check(cudaStreamDestroy(second));
}

static cudaError_t failing_item(void *argument) {
    (void)argument;
    return cudaErrorLaunchFailure;
}

// In a process of its own, as nothing works after it. The exit code says where it went wrong.
static int run_failing_worker(void) {
    cudaStream_t stream = worker_stream(), other = worker_stream();
    cudaEvent_t event = plain_event();
    int untouched = 0, nothing = 0;
    if (cpu_stream_run(stream, failing_item, &nothing, sizeof nothing) != cudaSuccess) return 1;
    cudaMemsetAsync(&untouched, 1, sizeof untouched, stream);
    cudaEventRecord(event, stream);
    if (cudaStreamSynchronize(stream) != cudaErrorLaunchFailure) return 2;
    if (untouched != 0) return 3;
    if (cudaEventSynchronize(event) != cudaErrorLaunchFailure) return 4;
    if (cudaStreamSynchronize(other) != cudaErrorLaunchFailure) return 5;
    if (cudaDeviceSynchronize() != cudaErrorLaunchFailure) return 6;
    if (cudaGetLastError() != cudaErrorLaunchFailure || cudaGetLastError() != cudaErrorLaunchFailure) return 7;
    if (cpu_stream_run(NULL, failing_item, &nothing, sizeof nothing) != cudaErrorLaunchFailure) return 8;
    return 0;
}

static void a_worker_failure_is_sticky(void **state) {
    (void)state;
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(run_failing_worker());
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bf16_keeps_its_own_values),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(bf16_nan_and_infinity),
        cmocka_unit_test(memory_is_aligned_zeroed_and_touched),
        cmocka_unit_test(memory_that_is_not_there_is_refused),
        cmocka_unit_test(device_describes_itself),
        cmocka_unit_test(streams_run_where_they_should),
        cmocka_unit_test(a_worker_overlaps_its_caller),
        cmocka_unit_test(a_full_queue_blocks),
        cmocka_unit_test(copies_keep_the_order_of_their_stream),
        cmocka_unit_test(an_event_orders_two_workers),
        cmocka_unit_test(the_calling_thread_waits_for_an_event),
        cmocka_unit_test(an_event_never_recorded_is_not_waited_for),
        cmocka_unit_test(recording_again_gives_a_new_ticket),
        cmocka_unit_test(events_measure_time),
        cmocka_unit_test(destroyed_streams_leave_their_events_passed),
        cmocka_unit_test(freeing_waits_for_queued_work),
        cmocka_unit_test(a_step_allocates_nothing),
        cmocka_unit_test(a_worker_failure_is_sticky),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
