// The CPU device's collectives, on any number of ranks: run directly this is one rank, under mpirun it takes its place
// from OpenMPI's variables. Every collective is checked on every rank, through shared memory and through MPI, on the
// calling thread and on a worker.
//
// With the arguments "stall collective" or "stall message", and three ranks, the last one stays away, and the others
// have to end with exit code 1 and say so (test_faults.py).
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <nccl.h>
#include <malloc.h>
#include <math.h>
#include <sys/wait.h>
#include "random.h"

#define check(call) assert_int_equal((call), ncclSuccess)
#define check_cuda(call) assert_int_equal((call), cudaSuccess)

static int rank, ranks;            // of this process
static ncclComm_t world, over_mpi; // all ranks; the second one without shared memory
static cudaStream_t worker;
static ncclUniqueId id;

enum { WAYS = 4 }; // communicator and stream
static ncclComm_t way_comm(int way) {
    return way & 1 ? over_mpi : world;
}
static cudaStream_t way_stream(int way) {
    return way & 2 ? worker : NULL;
}

static const ncclDataType_t types[] = {ncclInt8,   ncclUint8,   ncclInt32,   ncclUint32,  ncclInt64,
                                       ncclUint64, ncclFloat32, ncclFloat64, ncclBfloat16};
enum { TYPES = sizeof types / sizeof types[0] };
static const ncclRedOp_t ops[] = {ncclSum, ncclProd, ncclMax, ncclMin};

// Element i of rank r's input of a test numbered `salt`. Magnitudes differ by up to 2^12, so the order of a sum shows.
static void input_element(void *out, ncclDataType_t type, int r, uint64_t salt, size_t i) {
    uint64_t whole = random_mix(salt * 1000003 + (uint64_t)r + ((uint64_t)i << 32));
    double real = (double)((int64_t)(whole & 0xffffff) - 0x800000) * (double)(1 << (whole >> 32) % 12) * 0x1p-23;
    float single = (float)real;
    __nv_bfloat16 half = __float2bfloat16(single);
    switch (type) {
    case ncclFloat32:
        memcpy(out, &single, sizeof single);
        break;
    case ncclFloat64:
        memcpy(out, &real, sizeof real);
        break;
    case ncclBfloat16:
        memcpy(out, &half, sizeof half);
        break;
    default:
        memcpy(out, &whole, rank_sum_type_bytes(type));
        break;
    }
}

static void *input_make(size_t count, ncclDataType_t type, int r, uint64_t salt) {
    size_t size = rank_sum_type_bytes(type);
    char *buffer = malloc(count * size + 1);
    for (size_t i = 0; i < count; i++) input_element(buffer + i * size, type, r, salt, i);
    return buffer;
}

#define COMBINE(a, b)                           \
    (op == ncclSum    ? (a) + (b)               \
     : op == ncclProd ? (a) * (b)               \
     : op == ncclMax  ? ((b) > (a) ? (b) : (a)) \
                      : ((b) < (a) ? (b) : (a)))

// The expected result of a reduction of element i, in rank order; as integers exactly, as bf16 rounded once.
static void expected_element(void *out, ncclDataType_t type, ncclRedOp_t op, int of, uint64_t salt, size_t i) {
    bool is_signed = type == ncclInt8 || type == ncclInt32 || type == ncclInt64;
    double real = 0;
    float single = 0;
    int64_t whole = 0;
    uint64_t natural = 0;
    size_t size = rank_sum_type_bytes(type);
    for (int r = 0; r < of; r++) {
        unsigned char bytes[8];
        input_element(bytes, type, r, salt, i);
        double x = 0;
        float y = 0;
        uint64_t n = 0;
        __nv_bfloat16 half;
        memcpy(&n, bytes, size);
        int64_t z = (int64_t)(n << (64 - 8 * size)) >> (64 - 8 * size); // with its sign
        memcpy(&x, bytes, sizeof x);
        memcpy(&half, bytes, sizeof half);
        if (type == ncclBfloat16)
            y = __bfloat162float(half);
        else
            memcpy(&y, bytes, sizeof y);
        real = r == 0 ? x : COMBINE(real, x);
        single = r == 0 ? y : COMBINE(single, y);
        natural = r == 0 ? n : COMBINE(natural, n);
        // Sums and products wrap around, and have the same low bits without a sign.
        if (op == ncclSum || op == ncclProd)
            whole = (int64_t)natural;
        else
            whole = r == 0 ? z : COMBINE(whole, z);
    }
    __nv_bfloat16 half = __float2bfloat16(single);
    if (type == ncclFloat64)
        memcpy(out, &real, size);
    else if (type == ncclFloat32)
        memcpy(out, &single, size);
    else if (type == ncclBfloat16)
        memcpy(out, &half, size);
    else
        memcpy(out, is_signed ? (void *)&whole : (void *)&natural, size);
}

static void assert_reduced(const void *result, size_t count, size_t first, ncclDataType_t type, ncclRedOp_t op, int of,
                           uint64_t salt) {
    size_t size = rank_sum_type_bytes(type);
    for (size_t i = 0; i < count; i++) {
        unsigned char expected[8];
        expected_element(expected, type, op, of, salt, first + i);
        if (memcmp(expected, (const char *)result + i * size, size) != 0)
            fail_msg("rank %d: element %zu of %zu (type %d, op %d) is wrong", rank, i, count, (int)type, (int)op);
    }
}

static void assert_input(const void *result, size_t count, ncclDataType_t type, int r, uint64_t salt) {
    size_t size = rank_sum_type_bytes(type);
    for (size_t i = 0; i < count; i++) {
        unsigned char expected[8];
        input_element(expected, type, r, salt, i);
        if (memcmp(expected, (const char *)result + i * size, size) != 0)
            fail_msg("rank %d: element %zu of %zu from rank %d is wrong", rank, i, count, r);
    }
}

// An output buffer filled with 0xff, with room behind it that has to stay so.
enum { BEHIND = 64 };
static void *output_make(size_t bytes) {
    void *buffer = malloc(bytes + BEHIND);
    memset(buffer, 0xff, bytes + BEHIND);
    return buffer;
}

static void assert_untouched(const void *buffer, size_t first, size_t bytes) {
    for (size_t i = first; i < first + bytes; i++) assert_int_equal(((const unsigned char *)buffer)[i], 0xff);
}

// ------------------------------------------------------------------------------------------------- before there is MPI

static void one_rank_needs_no_mpi(void **state) {
    (void)state;
    int started = 1, count = 0, self = -1, version = 0;
    ncclComm_t alone, split;
    check(ncclGetVersion(&version));
    assert_true(version >= 21800);
    check(ncclCommInitRank(&alone, 1, id, 0));
    check(ncclCommCount(alone, &count));
    check(ncclCommUserRank(alone, &self));
    assert_true(count == 1 && self == 0);
    for (int place = 0; place < 2; place++)
        for (int kind = 0; kind < 5; kind++) {
            enum { N = 1000 };
            float *send = input_make(N, ncclFloat32, 0, 1), *recv = place ? send : output_make(N * sizeof *recv);
            cudaStream_t stream = place ? NULL : worker;
            if (kind == 0) check(ncclAllReduce(send, recv, N, ncclFloat32, ncclSum, alone, stream));
            if (kind == 1) check(ncclReduceScatter(send, recv, N, ncclFloat32, ncclMax, alone, stream));
            if (kind == 2) check(ncclAllGather(send, recv, N, ncclFloat32, alone, stream));
            if (kind == 3) check(ncclBroadcast(send, recv, N, ncclFloat32, 0, alone, stream));
            if (kind == 4) check(ncclReduce(send, recv, N, ncclFloat32, ncclProd, 0, alone, stream));
            check_cuda(cudaStreamSynchronize(stream));
            assert_input(recv, N, ncclFloat32, 0, 1);
            if (!place) assert_untouched(recv, N * sizeof *recv, BEHIND);
            free(send);
            if (!place) free(recv);
        }
    int to[2] = {-1, -1}, from[2] = {7, 9};
    check(ncclGroupStart());
    check(ncclSend(&from[0], 1, ncclInt32, 0, alone, worker));
    check(ncclRecv(&to[0], 1, ncclInt32, 0, alone, worker));
    check(ncclRecv(&to[1], 1, ncclInt32, 0, alone, worker));
    check(ncclSend(&from[1], 1, ncclInt32, 0, alone, worker));
    check(ncclGroupEnd());
    check_cuda(cudaStreamSynchronize(worker));
    assert_true(to[0] == 7 && to[1] == 9);
    check(ncclCommSplit(alone, 3, 0, &split, NULL));
    check(ncclCommDestroy(split));
    check(ncclCommSplit(alone, NCCL_SPLIT_NOCOLOR, 0, &split, NULL));
    assert_null(split);
    check(ncclCommDestroy(alone));
    MPI_Initialized(&started);
    assert_false(started);
}

// A rank that waits for others that never come ends with a line that says so.
static void waiting_has_a_deadline(void **state) {
    (void)state;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        enum { RANKS = 12 };
        static uint32_t memory[1024];
        static const int members[RANKS] = {4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        SharedMemory shared;
        memset(&shared, 0, sizeof shared);
        shared.rank = 1;
        shared.ranks = RANKS;
        shared.members = members;
        shared.control = (SharedControl *)memory;
        shared.control->waits[3] = 1; // has come, too
        Collective collective;
        memset(&collective, 0, sizeof collective);
        collective.kind = COLLECTIVE_REDUCE_SCATTER;
        collective.count = 10;
        collective.type = ncclFloat32;
        collective.purpose = (Purpose){"block 3", "step", 17};
        cpu_nccl_set_timeout(0.1);
        shared_barrier(&shared, &collective);
        _exit(0);
    }
    close(ends[1]);
    char text[512] = "";
    ssize_t length = read(ends[0], text, sizeof text - 1);
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    assert_true(length > 0);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 1);
    assert_non_null(strstr(text, "block 3, step 17: reduce-scatter of 40 bytes: waited 0 s for rank 4, rank 6, rank 8, "
                                 "rank 9, rank 10, rank 11, rank 12, rank 13 and 2 more ("));
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1); // one line
}

// ------------------------------------------------------------------------------------------------------- with all
// ranks

static void the_world_opens(void **state) {
    (void)state;
    int count = 0, self = -1;
    check(ncclCommInitRank(&world, ranks, id, rank));
    check(ncclCommCount(world, &count));
    check(ncclCommUserRank(world, &self));
    assert_true(count == ranks && self == rank);
    setenv("TRAIN_GPT_SHARED_MEMORY", "0", 1);
    check(ncclCommSplit(world, 0, rank, &over_mpi, NULL));
    unsetenv("TRAIN_GPT_SHARED_MEMORY");
    assert_int_equal(over_mpi->shared.ranks, 0);
    if (ranks > 1 && world->shared.ranks == 0) print_message("shared memory is not tested: there is none\n");
    ncclComm_t wrong;
    if (ranks > 1) {
        assert_int_equal(ncclCommInitRank(&wrong, ranks + 1, id, rank), ncclInvalidArgument);
        assert_non_null(strstr(ncclGetLastError(NULL), "MPI started this process as"));
        assert_int_equal(ncclCommInitRank(&wrong, ranks, id, (rank + 1) % ranks), ncclInvalidArgument);
    }
    assert_int_equal(ncclCommInitRank(&wrong, 2, id, 2), ncclInvalidArgument);
}

// The last two do not fit in one piece, through shared memory or MPI.
static const size_t counts[] = {0, 1, 2, 3, 5, 64, 1000, 4099, 300007, 2500001};
enum { COUNTS = sizeof counts / sizeof counts[0] };

static void all_reduce_sums_in_rank_order(void **state) {
    (void)state;
    static const ncclDataType_t of[] = {ncclFloat32, ncclBfloat16};
    for (int t = 0; t < 2; t++)
        for (int k = 0; k < COUNTS; k++) {
            size_t count = counts[k], size = rank_sum_type_bytes(of[t]);
            void *send = input_make(count, of[t], rank, (uint64_t)k);
            void *first = NULL;
            for (int way = 0; way < WAYS; way++) {
                if (count > 1000000 && way >= 2) continue; // the stream is no different for large ones
                void *recv = output_make(count * size);
                bool in_place = way % 2 == (k & 1);
                if (in_place) memcpy(recv, send, count * size);
                check(
                    ncclAllReduce(in_place ? recv : send, recv, count, of[t], ncclSum, way_comm(way), way_stream(way)));
                check_cuda(cudaStreamSynchronize(way_stream(way)));
                assert_untouched(recv, count * size, BEHIND);
                if (first == NULL) { // one is checked, the others have to be the same
                    assert_reduced(recv, count, 0, of[t], ncclSum, ranks, (uint64_t)k);
                    first = recv;
                } else {
                    assert_memory_equal(recv, first, count * size);
                    free(recv);
                }
            }
            assert_input(send, count < 5000 ? count : 5000, of[t], rank, (uint64_t)k); // not written to
            free(first);
            free(send);
        }
}

// The inputs have to be such that another order would show, and the sums such that they are sums.
static void the_order_would_show(void **state) {
    (void)state;
    enum { N = 4096 };
    float *recv = output_make(N * sizeof *recv), *send = input_make(N, ncclFloat32, rank, 5);
    check(ncclAllReduce(send, recv, N, ncclFloat32, ncclSum, world, NULL));
    int differ = 0;
    double error = 0, norm = 0;
    for (size_t i = 0; i < N; i++) {
        float backwards = 0;
        double exact = 0;
        for (int r = ranks - 1; r >= 0; r--) {
            float x;
            input_element(&x, ncclFloat32, r, 5, i);
            backwards = r == ranks - 1 ? x : backwards + x;
            exact += x;
        }
        differ += backwards != recv[i];
        error += (recv[i] - exact) * (recv[i] - exact);
        norm += exact * exact;
    }
    assert_true(ranks < 3 ? differ == 0 : differ > N / 20);
    assert_true(sqrt(error / norm) < 1e-7 * ranks); // an fp32 addition errs by 6e-8 at most
    free(send);
    free(recv);
}

static void every_type_and_operation(void **state) {
    (void)state;
    enum { N = 1031 };
    for (int way = 0; way < 2; way++)
        for (int t = 0; t < TYPES; t++)
            for (int o = 0; o < 4; o++) {
                size_t bytes = N * rank_sum_type_bytes(types[t]);
                void *send = input_make(N, types[t], rank, 77), *recv = output_make(bytes);
                check(ncclAllReduce(send, recv, N, types[t], ops[o], way_comm(way), NULL));
                assert_reduced(recv, N, 0, types[t], ops[o], ranks, 77);
                assert_untouched(recv, bytes, BEHIND);
                free(send);
                free(recv);
            }
}

static void nan_of_any_rank_is_seen(void **state) {
    (void)state;
    for (int way = 0; way < 2; way++)
        for (int o = 0; o < 4; o++) {
            float x[64];
            for (int i = 0; i < 64; i++) x[i] = i % ranks == rank ? NAN : 1.0f;
            check(ncclAllReduce(x, x, 64, ncclFloat32, ops[o], way_comm(way), NULL));
            for (int i = 0; i < 64; i++) assert_true(isnan(x[i]));
        }
}

// All-reduce has the bits of reduce-scatter then all-gather; both also in place, and through both ways.
static void reduce_scatter_and_all_gather(void **state) {
    (void)state;
    static const ncclDataType_t of[] = {ncclFloat32, ncclBfloat16, ncclInt32};
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < COUNTS - 1; k++) {
            size_t count = counts[k], all = count * (size_t)ranks, size = rank_sum_type_bytes(of[t]);
            uint64_t salt = 100 + (uint64_t)k;
            void *send = input_make(all, of[t], rank, salt), *reduced = output_make(all * size);
            check(ncclAllReduce(send, reduced, all, of[t], ncclSum, world, NULL));
            for (int way = 0; way < WAYS; way++)
                for (int in_place = 0; in_place < 2; in_place++) {
                    char *full = output_make(all * size);
                    char *part = in_place ? full + (size_t)rank * count * size : output_make(count * size);
                    if (in_place) memcpy(full, send, all * size);
                    check(ncclReduceScatter(in_place ? full : send, part, count, of[t], ncclSum, way_comm(way),
                                            way_stream(way)));
                    check_cuda(cudaStreamSynchronize(way_stream(way)));
                    if (way == 0) assert_reduced(part, count, (size_t)rank * count, of[t], ncclSum, ranks, salt);
                    if (!in_place) assert_untouched(part, count * size, BEHIND);
                    check(ncclAllGather(part, full, count, of[t], way_comm(way), way_stream(way)));
                    check_cuda(cudaStreamSynchronize(way_stream(way)));
                    assert_memory_equal(full, reduced, all * size);
                    assert_untouched(full, all * size, BEHIND);
                    if (!in_place) free(part);
                    free(full);
                }
            free(send);
            free(reduced);
        }
}

static void broadcast_and_reduce_have_a_root(void **state) {
    (void)state;
    for (int way = 0; way < WAYS; way++)
        for (int root = 0; root < ranks; root++)
            for (int k = 0; k < COUNTS - 1; k++) {
                size_t count = counts[k];
                uint64_t salt = 200 + (uint64_t)root;
                float *send = input_make(count, ncclFloat32, rank, salt), *recv = output_make(count * sizeof *recv);
                bool is_root = rank == root;
                check(ncclBroadcast(is_root ? send : NULL, recv, count, ncclFloat32, root, way_comm(way),
                                    way_stream(way)));
                check_cuda(cudaStreamSynchronize(way_stream(way)));
                assert_input(recv, count, ncclFloat32, root, salt);
                assert_untouched(recv, count * sizeof *recv, BEHIND);
                memset(recv, 0xff, count * sizeof *recv);
                check(ncclReduce(send, is_root || k % 2 ? recv : NULL, count, ncclFloat32, ncclSum, root, way_comm(way),
                                 way_stream(way)));
                check_cuda(cudaStreamSynchronize(way_stream(way)));
                if (is_root) assert_reduced(recv, count, 0, ncclFloat32, ncclSum, ranks, salt);
                assert_untouched(recv, is_root ? count * sizeof *recv : 0, BEHIND);
                if (!is_root) assert_untouched(recv, 0, count * sizeof *recv);
                free(send);
                free(recv);
            }
}

// Many collectives under way at once, ranks out of step, buffers of a few pieces: none may disturb another.
static void many_collectives_in_a_row(void **state) {
    (void)state;
    enum { AT_ONCE = 8, ROUNDS = 12 };
    uint64_t draw = random_key(3, RANDOM_SAMPLE, 0, 0), own_draw = random_key(3, RANDOM_SAMPLE, 1, (uint64_t)rank);
    for (int round = 0; round < ROUNDS; round++) {
        ncclComm_t comm = way_comm(round);
        struct {
            int kind, root;
            size_t count;
            char *send, *recv;
        } item[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) {
            Random4 u = random4(draw, (uint64_t)(round * AT_ONCE + i));
            item[i].kind = (int)(u.word[0] % 5);
            item[i].root = (int)(u.word[1] % (unsigned)ranks);
            item[i].count = u.word[2] % (u.word[3] % 4 == 0 ? 150000 : 500);
            item[i].send = input_make(item[i].count * (size_t)ranks, ncclFloat32, rank, (uint64_t)(1000 + i));
            item[i].recv = output_make(item[i].count * (size_t)ranks * sizeof(float));
        }
        for (int i = 0; i < AT_ONCE; i++) {
            if (random_u32(own_draw, (uint64_t)(round * AT_ONCE + i)) % 4 == 0) usleep(2000);
            char *send = item[i].send, *recv = item[i].recv;
            size_t count = item[i].count;
            // Every fourth on the calling thread: in the order of calls all the same.
            cudaStream_t stream = i % 4 == 3 ? NULL : worker;
            if (item[i].kind == 0) check(ncclAllReduce(send, recv, count, ncclFloat32, ncclSum, comm, stream));
            if (item[i].kind == 1) check(ncclReduceScatter(send, recv, count, ncclFloat32, ncclSum, comm, stream));
            if (item[i].kind == 2) check(ncclAllGather(send, recv, count, ncclFloat32, comm, stream));
            if (item[i].kind == 3) check(ncclBroadcast(send, recv, count, ncclFloat32, item[i].root, comm, stream));
            if (item[i].kind == 4)
                check(ncclReduce(send, recv, count, ncclFloat32, ncclSum, item[i].root, comm, stream));
        }
        check_cuda(cudaStreamSynchronize(worker));
        for (int i = 0; i < AT_ONCE; i++) {
            uint64_t salt = (uint64_t)(1000 + i);
            size_t count = item[i].count;
            char *recv = item[i].recv;
            if (item[i].kind == 0 || (item[i].kind == 4 && item[i].root == rank))
                assert_reduced(recv, count, 0, ncclFloat32, ncclSum, ranks, salt);
            if (item[i].kind == 1) assert_reduced(recv, count, (size_t)rank * count, ncclFloat32, ncclSum, ranks, salt);
            if (item[i].kind == 2)
                for (int r = 0; r < ranks; r++)
                    assert_input(recv + (size_t)r * count * sizeof(float), count, ncclFloat32, r, salt);
            if (item[i].kind == 3) assert_input(recv, count, ncclFloat32, item[i].root, salt);
            free(item[i].send);
            free(recv);
        }
    }
}

// ---------------------------------------------------------------------------------------------------- send and receive

// Everybody sends to everybody, itself too, in one group; messages long enough that a send alone would block.
static void a_group_exchanges_with_everybody(void **state) {
    (void)state;
    enum { N = 100003 };
    for (int way = 0; way < WAYS; way++) {
        float *send = input_make(N, ncclFloat32, rank, 300), *recv = output_make((size_t)ranks * N * sizeof *recv);
        check(ncclGroupStart());
        for (int peer = 0; peer < ranks; peer++) {
            check(ncclGroupStart()); // groups nest
            check(ncclSend(send, N, ncclFloat32, peer, way_comm(way), way_stream(way)));
            check(ncclRecv(recv + (size_t)peer * N, N, ncclFloat32, peer, way_comm(way), way_stream(way)));
            check(ncclGroupEnd());
        }
        assert_untouched(recv, 0, BEHIND); // nothing happens before the group ends
        check(ncclGroupEnd());
        check_cuda(cudaStreamSynchronize(way_stream(way)));
        for (int peer = 0; peer < ranks; peer++) assert_input(recv + (size_t)peer * N, N, ncclFloat32, peer, 300);
        assert_untouched(recv, (size_t)ranks * N * sizeof *recv, BEHIND);
        free(send);
        free(recv);
    }
}

// A ring: to the next, from the one before; two communicators in one group.
static void a_group_passes_a_ring(void **state) {
    (void)state;
    enum { N = 20000 };
    int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    int *send = input_make(N, ncclInt32, rank, 301);
    int *recv = output_make(N * sizeof *recv), *other = output_make(N * sizeof *other);
    check(ncclGroupStart());
    check(ncclSend(send, N, ncclInt32, next, world, worker));
    check(ncclRecv(other, N, ncclInt32, next, over_mpi, worker));
    check(ncclSend(send, N, ncclInt32, before, over_mpi, worker));
    check(ncclRecv(recv, N, ncclInt32, before, world, worker));
    check(ncclGroupEnd());
    check_cuda(cudaStreamSynchronize(worker));
    assert_input(recv, N, ncclInt32, before, 301);
    assert_input(other, N, ncclInt32, next, 301);
    free(send);
    free(recv);
    free(other);
}

// Down the line without groups, a collective behind it on the same communicator.
static void a_send_meets_its_receive(void **state) {
    (void)state;
    enum { N = 50000 };
    for (int way = 0; way < WAYS; way++) {
        float *buffer = output_make(N * sizeof *buffer);
        if (rank == 0) {
            free(buffer);
            buffer = input_make(N, ncclFloat32, 0, 302);
        }
        double one = 1;
        if (rank > 0) check(ncclRecv(buffer, N, ncclFloat32, rank - 1, way_comm(way), way_stream(way)));
        if (rank < ranks - 1) check(ncclSend(buffer, N, ncclFloat32, rank + 1, way_comm(way), way_stream(way)));
        check(ncclAllReduce(&one, &one, 1, ncclFloat64, ncclSum, way_comm(way), way_stream(way)));
        check_cuda(cudaStreamSynchronize(way_stream(way)));
        assert_input(buffer, N, ncclFloat32, 0, 302);
        assert_true(one == ranks);
        free(buffer);
    }
}

// --------------------------------------------------------------------------------------------------------- the rest

static void split_communicators(void **state) {
    (void)state;
    ncclComm_t half, none, single;
    // Odd and even ranks, in reverse order.
    check(ncclCommSplit(world, rank % 2, -rank, &half, NULL));
    int count = 0, self = -1, members = (ranks + 1 - rank % 2) / 2;
    check(ncclCommCount(half, &count));
    check(ncclCommUserRank(half, &self));
    assert_int_equal(count, members);
    assert_int_equal(self, members - 1 - rank / 2);
    int numbers[64];
    memset(numbers, 0xff, sizeof numbers);
    assert_true(members <= 64);
    check(ncclAllGather(&rank, numbers, 1, ncclInt32, half, worker));
    check_cuda(cudaStreamSynchronize(worker));
    for (int i = 0; i < members; i++) assert_int_equal(numbers[i], (members - 1 - i) * 2 + rank % 2);
    double value = rank, whole = rank;
    check(ncclAllReduce(&value, &value, 1, ncclFloat64, ncclSum, half, worker)); // two communicators side by side
    check(ncclAllReduce(&whole, &whole, 1, ncclFloat64, ncclSum, world, NULL));
    check_cuda(cudaStreamSynchronize(worker));
    assert_true(value == members * (members - 1) + (rank % 2) * members);
    assert_true(whole == ranks * (ranks - 1) / 2.0);
    // Rank 0 takes no part.
    check(ncclCommSplit(world, rank == 0 ? NCCL_SPLIT_NOCOLOR : 4, 0, &none, NULL));
    if (rank == 0)
        assert_null(none);
    else {
        value = 1;
        check(ncclAllReduce(&value, &value, 1, ncclFloat64, ncclSum, none, NULL));
        assert_true(value == ranks - 1);
        check(ncclCommDestroy(none));
    }
    // Everybody for itself, from a communicator that came from a split.
    check(ncclCommSplit(half, self, 0, &single, NULL));
    check(ncclCommCount(single, &count));
    assert_int_equal(count, 1);
    value = 3;
    check(ncclAllReduce(&value, &value, 1, ncclFloat64, ncclSum, single, NULL));
    assert_true(value == 3);
    check(ncclCommDestroy(single));
    check(ncclCommDestroy(half));
    assert_int_equal(ncclCommSplit(world, -5, 0, &none, NULL), ncclInvalidArgument);
}

static void wrong_arguments_are_refused(void **state) {
    (void)state;
    float x = 1, y = 2;
    assert_int_equal(ncclAllReduce(NULL, &y, 1, ncclFloat32, ncclSum, world, NULL), ncclInvalidArgument);
    assert_int_equal(ncclAllReduce(&x, NULL, 1, ncclFloat32, ncclSum, world, NULL), ncclInvalidArgument);
    assert_int_equal(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, NULL, NULL), ncclInvalidArgument);
    assert_int_equal(ncclAllReduce(&x, &y, 1, ncclFloat16, ncclSum, world, NULL), ncclInvalidArgument);
    assert_int_equal(ncclAllReduce(&x, &y, 1, (ncclDataType_t)10, ncclSum, world, NULL), ncclInvalidArgument);
    assert_int_equal(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclAvg, world, NULL), ncclInvalidArgument);
    assert_int_equal(ncclAllReduce(&x, &y, SIZE_MAX / 2, ncclFloat32, ncclSum, world, NULL), ncclInvalidArgument);
    assert_int_equal(ncclBroadcast(&x, &y, 1, ncclFloat32, ranks, world, NULL), ncclInvalidArgument);
    assert_int_equal(ncclReduce(&x, &y, 1, ncclFloat32, ncclSum, -1, world, NULL), ncclInvalidArgument);
    assert_int_equal(ncclSend(&x, 1, ncclFloat32, ranks, world, NULL), ncclInvalidArgument);
    assert_int_equal(ncclRecv(NULL, 1, ncclFloat32, 0, world, NULL), ncclInvalidArgument);
    assert_non_null(strstr(ncclGetLastError(world), "NULL"));
    assert_int_equal(ncclGroupEnd(), ncclInvalidUsage);
    assert_int_equal(ncclSend(&x, 1, ncclFloat32, rank, world, NULL), ncclInvalidUsage); // to itself, not received
    assert_int_equal(ncclRecv(&x, 1, ncclFloat32, rank, world, NULL), ncclInvalidUsage);
    assert_true(x == 1 && y == 2);
    check(ncclAllReduce(NULL, NULL, 0, ncclFloat32, ncclSum, world, NULL)); // nothing is needed for nothing
    check(ncclSend(NULL, 0, ncclFloat32, rank, world, NULL));
    ncclResult_t asynchronous = ncclInternalError;
    check(ncclCommGetAsyncError(world, &asynchronous));
    assert_int_equal(asynchronous, ncclSuccess);
    assert_string_equal(ncclGetErrorString(ncclInvalidUsage), "invalid usage");
    void *buffer, *handle;
    check(ncclMemAlloc(&buffer, 1000));
    check(ncclCommRegister(world, buffer, 1000, &handle));
    check(ncclCommDeregister(world, handle));
    check(ncclMemFree(buffer));
}

static void a_step_allocates_nothing(void **state) {
    (void)state;
    if (ranks > 1 && world->shared.ranks == 0) skip(); // MPI allocates as it likes
    enum { N = 200000 };
    float *x = output_make(N * sizeof *x);
    memset(x, 0, N * sizeof *x);
    size_t before = 0;
    for (int step = 0; step < 20; step++) {
        if (step == 2) before = mallinfo2().uordblks;
        check(ncclAllReduce(x, x, N, ncclFloat32, ncclSum, world, worker));
        check(ncclReduceScatter(x, x + (size_t)rank * (N / (size_t)ranks), N / (size_t)ranks, ncclFloat32, ncclSum,
                                world, worker));
        check_cuda(cudaStreamSynchronize(worker));
    }
    assert_int_equal(mallinfo2().uordblks, before);
    free(x);
}

static void the_world_closes(void **state) {
    (void)state;
    int ended = 0;
    check(ncclCommDestroy(over_mpi));
    MPI_Finalized(&ended);
    assert_false(ended);
    check(ncclCommDestroy(world));
    MPI_Finalized(&ended);
    assert_true(ended || ranks == 1);
    if (ranks > 1) assert_int_equal(ncclCommInitRank(&world, ranks, id, rank), ncclInvalidUsage);
}

// Three ranks in a row: the first waits for the second, who waits for the third, who sleeps past the deadline. The
// others have to be gone by then, and say that it is the third, though the first rank's time is over first. how:
// "collective" or "message".
static int stall(const char *how) {
    ncclComm_t pair, unused;
    float x = 1;
    const bool message = strcmp(how, "message") == 0;
    cpu_nccl_set_timeout(3);
    if (ncclCommInitRank(&world, ranks, id, rank) != ncclSuccess) return 3;
    if (ncclCommSplit(world, rank < 2 ? 0 : 1, rank, &pair, NULL) != ncclSuccess) return 3;
    if (ncclCommSplit(world, rank > 0 ? 0 : 1, rank, rank == 1 ? &pair : &unused, NULL) != ncclSuccess) return 3;
    purpose_now()->phase = "step";
    purpose_now()->step = 5;
    if (rank == 0) {
        purpose_now()->what = "the first pair";
    } else if (rank == 1) {
        purpose_now()->what = "the second pair";
        usleep(700000);
    } else {
        sleep(20);
    }
    if (message)
        ncclRecv(&x, 1, ncclFloat32, 1, pair, worker);
    else
        ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, pair, worker);
    cudaStreamSynchronize(worker);
    return 4;
}

int main(int argc, char **argv) {
    rank = getenv("OMPI_COMM_WORLD_RANK") == NULL ? 0 : atoi(getenv("OMPI_COMM_WORLD_RANK"));
    ranks = getenv("OMPI_COMM_WORLD_SIZE") == NULL ? 1 : atoi(getenv("OMPI_COMM_WORLD_SIZE"));
    error_identify(rank, ranks);
    if (rank != 0 && freopen("/dev/null", "w", stdout) == NULL) return 3; // failures go to stderr
    cpu_nccl_set_timeout(60);                                             // a rank that fails leaves the others waiting
    ncclGetUniqueId(&id);
    cudaStreamCreateWithFlags(&worker, cudaStreamNonBlocking);
    if (argc > 1 && strcmp(argv[1], "stall") == 0) return stall(argc > 2 ? argv[2] : "");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank_needs_no_mpi),
        cmocka_unit_test(waiting_has_a_deadline),
        cmocka_unit_test(the_world_opens),
        cmocka_unit_test(all_reduce_sums_in_rank_order),
        cmocka_unit_test(the_order_would_show),
        cmocka_unit_test(every_type_and_operation),
        cmocka_unit_test(nan_of_any_rank_is_seen),
        cmocka_unit_test(reduce_scatter_and_all_gather),
        cmocka_unit_test(broadcast_and_reduce_have_a_root),
        cmocka_unit_test(many_collectives_in_a_row),
        cmocka_unit_test(a_group_exchanges_with_everybody),
        cmocka_unit_test(a_group_passes_a_ring),
        cmocka_unit_test(a_send_meets_its_receive),
        cmocka_unit_test(split_communicators),
        cmocka_unit_test(wrong_arguments_are_refused),
        cmocka_unit_test(a_step_allocates_nothing),
        cmocka_unit_test(the_world_closes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
