// How comm.h waits, where the device does not watch its own collectives, as on GPUs: what a rank says that gives up,
// and when it must not. Here work that takes long stands for a collective that does not end, and one rank for many.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <errno.h>
#include <sys/wait.h>
#include "comm.h"

static cudaStream_t busy, other; // streams with workers

static cudaError_t take_long(void *milliseconds) {
    usleep((useconds_t)(*(int *)milliseconds * 1000));
    return cudaSuccess;
}

static void put(cudaStream_t stream, int milliseconds) {
    assert_int_equal(cpu_stream_run(stream, take_long, &milliseconds, sizeof milliseconds), cudaSuccess);
}

// A rank of two that waits for the other for `timeout` seconds, in step 17.
static void open_comm(Comm *comm, int64_t timeout) {
    memset(comm, 0, sizeof *comm);
    comm->world_size = 2;
    comm->timeout = timeout;
    comm->calls = calloc(COMM_CALLS, sizeof *comm->calls);
    for (int i = 0; i < COMM_CALLS; i++) cudaEventCreateWithFlags(&comm->calls[i].event, cudaEventDisableTiming);
    comm_phase(comm, "step", 17);
    cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    error_identify(1, 2);
}

static Group group_of(cudaStream_t stream, const char *what) {
    Group group = comm_group(0, 1, 4, 1, 2, stream);
    group.what = what;
    return group;
}

// An exchange that takes so long.
static void exchange(Comm *comm, const Group *group, CommKind kind, uint64_t bytes, int milliseconds) {
    comm_issue(comm, kind, group, bytes);
    put(group->stream, milliseconds);
    comm_issued(comm);
}

// A process that does one of these things; all run side by side, as each takes seconds.
typedef struct {
    pid_t pid;
    int output;
} Child;

static Child begin(void (*function)(void)) {
    int ends[2];
    fflush(NULL);
    if (pipe(ends) != 0) die("pipe: %s", strerror(errno));
    const Child child = {fork(), ends[0]};
    if (child.pid == 0) {
        dup2(ends[1], STDERR_FILENO);
        function();
        _exit(0);
    }
    close(ends[1]);
    return child;
}

// What it says that is not expected to return, and ends with exit code 1; "" if it returned.
static const char *said_by(Child child) {
    static char text[1024];
    size_t length = 0;
    for (ssize_t got; (got = read(child.output, text + length, sizeof text - 1 - length)) > 0;) length += (size_t)got;
    text[length] = '\0';
    close(child.output);
    int status = 0;
    waitpid(child.pid, &status, 0);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), length > 0 ? 1 : 0);
    return text;
}

enum { ONE, GROUP, SLOW, STOPPED, CALLS, CHILDREN };
static Child children[CHILDREN];

static void expect(const char *text, const char *part) {
    if (strstr(text, part) == NULL) fail_msg("\"%s\" is not in: %s", part, text);
}

static void one_does_not_end(void) {
    Comm comm;
    open_comm(&comm, 0);
    const Group blocks = group_of(busy, "block 3"), scalars = group_of(busy, "loss and norm");
    const Group channel = group_of(other, "stage boundary");
    exchange(&comm, &channel, COMM_SEND, 1000, 0);
    exchange(&comm, &blocks, COMM_ALL_GATHER, 1000, 100);
    comm_phase(&comm, "step", 18);
    exchange(&comm, &blocks, COMM_REDUCE_SCATTER, 1300000, 20000);
    exchange(&comm, &scalars, COMM_SCALARS, 48, 0);
    exchange(&comm, &channel, COMM_SEND, 1000, 0);
    comm_wait(&comm, busy, "the scalars");
}

// The first that has not ended is named: those before it have, and those behind it would come by themselves.
static void the_collective_is_named(void **state) {
    (void)state;
    const char *text = said_by(children[ONE]);
    expect(text, "rank 1 of 2 on ");
    expect(text,
           " failed: block 3, step 18: reduce_scatter of 1.3 MB: waited 2 s for ranks 1 to 7 in steps of 2, and so for "
           "the scalars (");
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1); // one line
}

static void one_of_a_group_does_not_end(void) {
    Comm comm;
    open_comm(&comm, 0);
    const Group first = group_of(busy, "wte"), second = group_of(busy, "wpe");
    comm_begin_group(&comm); // nothing is in a stream before the end of the group
    comm_issue(&comm, COMM_ALL_GATHER, &first, 1000);
    comm_issued(&comm);
    comm_issue(&comm, COMM_ALL_GATHER, &second, 1000);
    comm_issued(&comm);
    comm_pass_done(&comm);
    if (comm.oldest != 0 || comm.recorded != 0) return;
    put(busy, 20000);
    comm_end_group(&comm);
    comm_wait(&comm, busy, "the parameters");
}

static void a_group_counts_from_its_end(void **state) {
    (void)state;
    expect(said_by(children[GROUP]), " failed: wte, step 17: all_gather of 0.001 MB: waited 2 s");
}

static void long_but_moving(void) {
    Comm comm;
    open_comm(&comm, 0);
    const Group blocks = group_of(busy, "block 3");
    put(other, 2800); // computes for longer than it would wait
    comm_wait(&comm, other, "the computation");
    for (int i = 0; i < 2 * COMM_CALLS + 2; i++) exchange(&comm, &blocks, COMM_ALL_GATHER, 1000, i < 3 ? 1000 : 0);
    comm_wait(&comm, busy, "four exchanges"); // longer than it would wait for one
    if (comm.oldest + COMM_CALLS < comm.issued) die("call %d is not done", (int)comm.oldest);
}

// Neither a rank that computes, nor one whose exchanges go on, is one that waits too long.
static void who_is_slow_goes_on(void **state) {
    (void)state;
    assert_string_equal(said_by(children[SLOW]), "");
}

static void stopped_while_waiting(void) {
    Comm comm;
    open_comm(&comm, 100);
    const Group blocks = group_of(busy, "block 3");
    exchange(&comm, &blocks, COMM_ALL_GATHER, 1000, 5000);
    *stop_flag() = 2;
    comm_wait(&comm, busy, "the parameters");
    _exit(EXIT_RUN); // as whoever asked will see to
}

static void who_is_asked_to_stop_says_what_it_waits_in(void **state) {
    (void)state;
    const char *text = said_by(children[STOPPED]);
    expect(text, " was asked to stop while it waited: block 3, step 17: all_gather of 0.001 MB: waited ");
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1); // once
}

static void calls_that_do_not_return(void) {
    watchdog_start();
    watchdog_begin("has not come back", 0.1);
    watchdog_end();
    usleep(500000); // it had
    purpose_now()->what = "block 3";
    purpose_now()->phase = "step";
    purpose_now()->step = 17;
    watchdog_begin("has not met the others", 0.5);
    sleep(20);
}

static void the_watchdog_ends_a_call(void **state) {
    (void)state;
    expect(said_by(children[CALLS]), "block 3, step 17: has not met the others within 0 s");
}

// Group i of a rank; the channels come last.
static const Group *group_number(const Comm *comm, int i) {
    const Group *const groups[] = {&comm->world, &comm->data, &comm->shard, &comm->replica, &comm->tensor, &comm->tied};
    return i < 6 ? groups[i] : &comm->channels[i - 6];
}

// The ranks that a message names are those of the group: each finds itself among them, where the group says (a
// channel's rank 0 is its sender, on whichever side), and as many as it has agree on them.
static void groups_know_their_ranks(void **state) {
    (void)state;
    static const Grid grids[] = {{1, 1, 1}, {2, 3, 2}, {2, 4, 3}, {1, 6, 4}, {4, 1, 2}, {3, 4, 1}};
    for (size_t n = 0; n < 2 * sizeof grids / sizeof grids[0]; n++) {
        const Grid grid = grids[n / 2];
        const int ranks = grid.tensor * grid.data * grid.pipeline;
        const CommOptions options = {grid, grid.data % 2 == 0 ? 2 : grid.data, n % 2 == 1, 1, true};
        Comm *comms = calloc((size_t)ranks, sizeof *comms);
        for (int r = 0; r < ranks; r++) {
            Memory memory;
            memset(&memory, 0, sizeof memory);
            memory.planning = true;
            comm_init(&comms[r], &memory, r, &options, NULL, NULL);
        }
        for (int r = 0; r < ranks; r++)
            for (int i = 0; i < 6 + CHANNELS; i++) {
                const Group *mine = group_number(&comms[r], i);
                if (mine->size <= 1) continue;
                const int at = (r - mine->first) / mine->stride;
                assert_int_equal(mine->first + at * mine->stride, r);
                assert_true(i < 6 ? at == mine->rank : at == 0 || at == 1);
                int members = 0;
                for (int other = 0; other < ranks; other++) {
                    const int end = i < 6 || other == r ? i : 6 + ((i - 6) ^ 1); // what one sends the other receives
                    const Group *group = group_number(&comms[other], end);
                    members +=
                        group->size == mine->size && group->first == mine->first && group->stride == mine->stride;
                }
                assert_int_equal(members, mine->size);
            }
        free(comms);
    }
}

int main(void) {
    void (*const functions[CHILDREN])(void) = {one_does_not_end, one_of_a_group_does_not_end, long_but_moving,
                                               stopped_while_waiting, calls_that_do_not_return};
    for (int i = 0; i < CHILDREN; i++) children[i] = begin(functions[i]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_collective_is_named),  cmocka_unit_test(a_group_counts_from_its_end),
        cmocka_unit_test(who_is_slow_goes_on),      cmocka_unit_test(who_is_asked_to_stop_says_what_it_waits_in),
        cmocka_unit_test(the_watchdog_ends_a_call), cmocka_unit_test(groups_know_their_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
