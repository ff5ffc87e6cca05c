// Tests of what collectives in shared memory are made of (rank_sum.h, shared_memory.h); test_nccl.c runs them on ranks.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "nccl.h"

// Sums of bf16 are rounded as the type's own conversion does it: those of every bit pattern, NaNs and denormals, with
// sums between the numbers.
static void sums_of_every_bf16(void **state) {
    (void)state;
    enum { PATTERNS = 65536, ODD = PATTERNS - 5 }; // the end is not a whole vector
    static const uint16_t others[] = {0, 0x8000, 0x0001, 0x3f80, 0x3b03, 0x7f80, 0x7fc1};
    static __nv_bfloat16 x[PATTERNS], y[PATTERNS], z[PATTERNS], sum[PATTERNS];
    for (size_t o = 0; o < sizeof others / sizeof others[0]; o++)
        for (int inputs = 1; inputs <= 3; inputs++) {
            const void *const all[] = {x, y, z};
            for (int i = 0; i < PATTERNS; i++) {
                x[i].x = (uint16_t)i;
                y[i].x = others[o];
                z[i].x = (uint16_t)(i >> 1); // half a unit in the last place, or others
                sum[i].x = 0x1234;
            }
            rank_sum(sum, all, inputs, ODD, ncclBfloat16, ncclSum);
            for (int i = 0; i < ODD; i++) {
                float expected = __bfloat162float(x[i]);
                if (inputs > 1) expected += __bfloat162float(y[i]);
                if (inputs > 2) expected += __bfloat162float(z[i]);
                if (sum[i].x != __float2bfloat16(expected).x)
                    fail_msg("%d inputs, %04x and %04x: %04x", inputs, i, others[o], sum[i].x);
            }
            for (int i = ODD; i < PATTERNS; i++) assert_int_equal(sum[i].x, 0x1234);
        }
}

// Past the cache, from and to every alignment, nothing beside what was asked for.
static void streamed_copies(void **state) {
    (void)state;
    enum { ROOM = 512 };
    static const size_t lengths[] = {0, 1, 63, 64, 65, 130, 256, 300};
    static char from[ROOM], to[ROOM];
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
        for (size_t start = 0; start < 64; start++) {
            for (size_t i = 0; i < ROOM; i++) from[i] = (char)(i * 7 + 1);
            memset(to, 0x55, ROOM);
            const size_t source = start * 5 % 64;
            shared_stream(to + start, from + source, lengths[l]);
            assert_memory_equal(to + start, from + source, lengths[l]);
            for (size_t i = 0; i < ROOM; i++)
                if (i < start || i >= start + lengths[l]) assert_int_equal(to[i], 0x55);
        }
}

// Both ways are tried now and then, whatever was timed; the others follow what was.
static void way_of_writing(void **state) {
    (void)state;
    static const struct {
        double cached, streamed;
        SharedWay way;
    } timed[] = {{0, 0, SHARED_CACHED},
                 {1e-10, 1e-10, SHARED_CACHED},
                 {1.9e-10, 1e-10, SHARED_CACHED},
                 {2.1e-10, 1e-10, SHARED_STREAMED},
                 {1e-10, 5e-10, SHARED_CACHED}};
    for (size_t t = 0; t < sizeof timed / sizeof timed[0]; t++) {
        SharedMemory shared;
        memset(&shared, 0, sizeof shared);
        shared.seconds[SHARED_CACHED] = timed[t].cached;
        shared.seconds[SHARED_STREAMED] = timed[t].streamed;
        int seen[SHARED_WAYS] = {0, 0};
        for (uint64_t piece = 0; piece < SHARED_TIMED_PIECES; piece++) seen[shared_way(&shared, piece)]++;
        assert_int_equal(seen[timed[t].way], SHARED_TIMED_PIECES - 1);
        assert_int_equal(seen[SHARED_WAYS - 1 - timed[t].way], 1);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_of_every_bf16),
        cmocka_unit_test(streamed_copies),
        cmocka_unit_test(way_of_writing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
