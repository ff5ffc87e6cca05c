// Tests of spawn.h: this program as launcher and as ranks: exit codes, signals, output, and that ranks never outlive
// their launcher.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <sys/mman.h>
#include "launch.h"
#include "spawn.h"

// ---------------------------------------------------------------------------------------------------------------------
// What this program does as a launcher and as a rank: test_spawn run RANKS WHAT FOLDER

static void nap(int ms) {
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

// A rank notes its process id, and what it was told, in FOLDER/RANK.
static int rank_program(const Place *place, const char *what, const char *folder) {
    char name[256], all[256];
    const bool late = strcmp(what, "late") == 0;
    if (late) nap(1000);
    stop_on_signals();
    set_threads(place);
    snprintf(name, sizeof name, "%s/%d.new", folder, place->rank);
    snprintf(all, sizeof all, "%s/%d", folder, place->rank);
    FILE *file = fopen(name, "w");
    if (file == NULL) return 99;
    fprintf(file, "%d %d %d %d %d %s %s %s %d", (int)getpid(), place->rank, place->world_size, place->local_rank,
            place->local_size, getenv("MASTER_ADDR"), getenv("MASTER_PORT"), getenv("TRAIN_GPT_JOB"), place_threads());
    if (fclose(file) != 0 || rename(name, all) != 0) return 99;
    for (int rank = 0; rank < place->world_size; rank++) { // until all are there
        snprintf(all, sizeof all, "%s/%d", folder, rank);
        while (access(all, F_OK) != 0) nap(10);
    }
    if (strcmp(what, "wait") == 0 || late) {
        for (int i = 0; i < 2000 && !stop_requested(); i++) nap(10);
        if (place->rank == 0) { // the others end meanwhile, and it is given the time that it takes
            nap(2500);
            fprintf(stderr, "rank 0 is done\n");
        }
        return *stop_flag() == 1 ? EXIT_STOPPED : 98; // 1: by SIGUSR1 and nothing else
    }
    if (strcmp(what, "deaf") == 0) // takes no notice of being asked to stop
        for (;;) nap(1000);
    if (strcmp(what, "first") == 0) { // rank 1 fails, then rank 0, who still has something to say
        if (place->rank == 1) return 41;
        nap(700);
        fprintf(stderr, "rank %d knows why\n", place->rank);
        if (place->rank == 0) return 42;
        for (;;) nap(1000); // and another hangs
    }
    if (strcmp(what, "die") == 0) {
        if (place->rank == 1) raise(SIGSEGV);
        for (;;) nap(1000);
    }
    return atoi(what);
}

static int run_program(char **argv) {
    Error error = {""};
    const Place place = place_from_environment(&error);
    if (error.text[0] != '\0') die_input(&error);
    return place.launched ? rank_program(&place, argv[3], argv[4]) : spawn_ranks(atoi(argv[2]), argv);
}

// ---------------------------------------------------------------------------------------------------------------------
// Runs

typedef struct {
    char folder[64];
    int output, ranks;
    pid_t launcher;
} Run;

static Run start(int ranks, const char *what) {
    Run run;
    char count[16];
    snprintf(run.folder, sizeof run.folder, "/tmp/test_spawn.XXXXXX");
    assert_non_null(mkdtemp(run.folder));
    run.ranks = ranks;
    run.output = memfd_create("output", MFD_CLOEXEC);
    assert_true(run.output >= 0);
    snprintf(count, sizeof count, "%d", ranks);
    run.launcher = fork();
    assert_true(run.launcher >= 0);
    if (run.launcher > 0) return run;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(run.output, STDOUT_FILENO);
    dup2(run.output, STDERR_FILENO);
    unsetenv("OMP_NUM_THREADS");
    setenv("OMPI_COMM_WORLD_RANK", "0", 1); // as a launcher may itself have been started
    setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
    setenv("MASTER_ADDR", "elsewhere", 1);
    setenv("MASTER_PORT", "1", 1);
    execl("/proc/self/exe", "test_spawn", "run", count, what, run.folder, (char *)NULL);
    _exit(97);
}

// What a rank noted, once it is there.
static pid_t rank_note(const Run *run, int rank, char *text, size_t size) {
    char name[128];
    snprintf(name, sizeof name, "%s/%d", run->folder, rank);
    for (int i = 0; i < 3000; i++, nap(10)) {
        FILE *file = fopen(name, "r");
        if (file == NULL) continue;
        const size_t length = fread(text, 1, size - 1, file);
        text[length] = '\0';
        fclose(file);
        return atoi(text);
    }
    fail_msg("rank %d did not start", rank);
    return -1;
}

static pid_t rank_pid(const Run *run, int rank) {
    char text[256];
    return rank_note(run, rank, text, sizeof text);
}

// Waits until a launcher has forked all ranks.
static void wait_for_children(const Run *run) {
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/task/%d/children", (int)run->launcher, (int)run->launcher);
    for (int i = 0; i < 3000; i++, nap(10)) {
        FILE *file = fopen(name, "r");
        assert_non_null(file);
        int count = 0;
        for (int pid; fscanf(file, "%d", &pid) == 1;) count++;
        fclose(file);
        if (count == run->ranks) return;
    }
    fail_msg("the ranks did not start");
}

// Whether a process has ended; a zombie, whose new parent has not yet looked, has.
static bool is_gone(pid_t pid) {
    char name[64], text[512];
    snprintf(name, sizeof name, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(name, "r");
    if (file == NULL) return true;
    const size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    const char *after = strrchr(text, ')');
    return after == NULL || after[2] == 'Z' || after[2] == 'X';
}

// The exit code of a launcher, behind whom no rank is left; text: all that was printed.
static int finish(const Run *run, char *text, size_t size) {
    char name[128];
    int status = 0, tries = 0;
    for (; waitpid(run->launcher, &status, WNOHANG) == 0; nap(10))
        if (++tries > 3000) {
            kill(run->launcher, SIGKILL);
            fail_msg("still running after 30 s");
        }
    for (int r = 0; r < run->ranks; r++) {
        snprintf(name, sizeof name, "%s/%d", run->folder, r);
        FILE *file = fopen(name, "r");
        int pid = 0;
        if (file != NULL && fscanf(file, "%d", &pid) != 1) pid = 0;
        if (file != NULL) fclose(file);
        for (int i = 0; pid > 0 && !is_gone(pid); i++, nap(10))
            if (i > 300) fail_msg("rank %d lives on", r); // its launcher's end has to reach it
        remove(name);
    }
    assert_int_equal(rmdir(run->folder), 0);
    const ssize_t length = pread(run->output, text, size - 1, 0);
    assert_true(length >= 0);
    text[length] = '\0';
    close(run->output);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void expect_quiet(const Run *run, int code) {
    char text[4096];
    assert_int_equal(finish(run, text, sizeof text), code);
    assert_string_equal(text, "");
}

// What a rank is told.
static void test_environment(void **state) {
    (void)state;
    char text[256], address[64], first[96] = "", other[96] = "", job[2][64];
    for (int i = 0; i < 2; i++) {
        const Run run = start(3, "0");
        for (int r = 0; r < 3; r++) {
            int pid, rank, world_size, local_rank, local_size, port, threads;
            rank_note(&run, r, text, sizeof text);
            assert_int_equal(sscanf(text, "%d %d %d %d %d %63s %d %63s %d", &pid, &rank, &world_size, &local_rank,
                                    &local_size, address, &port, job[i], &threads),
                             9);
            assert_true(rank == r && local_rank == r && world_size == 3 && local_size == 3);
            assert_string_equal(address, "127.0.0.1");
            assert_in_range(port, MEETING_FIRST_PORT, MEETING_FIRST_PORT + MEETING_PORTS - 1);
            assert_int_equal(threads, machine_cores() > 3 ? machine_cores() / 3 : 1);
            snprintf(other, sizeof other, "%d %.63s", port, job[i]);
            if (r == 0) memcpy(first, other, sizeof first);
            assert_string_equal(first, other);
        }
        expect_quiet(&run, 0);
    }
    assert_string_not_equal(job[0], job[1]); // another run is another job
}

static void test_exit_codes(void **state) {
    (void)state;
    static const int codes[] = {0, EXIT_RUN, EXIT_INPUT, 99};
    Run runs[4];
    for (int i = 0; i < 4; i++) {
        char what[16];
        snprintf(what, sizeof what, "%d", codes[i]);
        runs[i] = start(2, what);
    }
    for (int i = 0; i < 4; i++) expect_quiet(&runs[i], codes[i]);
}

// The first process that a launcher started.
static pid_t first_child(const Run *run) {
    char name[64];
    int pid = 0;
    snprintf(name, sizeof name, "/proc/%d/task/%d/children", (int)run->launcher, (int)run->launcher);
    FILE *file = fopen(name, "r");
    assert_true(file != NULL && fscanf(file, "%d", &pid) == 1);
    fclose(file);
    return pid;
}

// Runs that end because a rank failed or because of a signal, all at once, as each takes its time.
static void test_ends(void **state) {
    (void)state;
    enum { NEVER, RANKS_LISTEN, RANKS_START };
    static const struct {
        const char *what;
        int when, to_launcher, to_rank; // signals
        int code;
        const char *says[2]; // a line each, and no other
    } runs[] = {
        {"first", NEVER, 0, 0, 41, {"rank 0 knows why\n", "rank 2 knows why\n"}},
        {"die",
         NEVER,
         0,
         0,
         EXIT_RUN,
         {"train_gpt: rank 1 of 3 on ", " was ended by signal 11 (Segmentation fault)\n"}},
        {"wait", RANKS_LISTEN, SIGTERM, 0, EXIT_STOPPED, {"rank 0 is done\n", ""}},
        {"wait", RANKS_LISTEN, SIGINT, 0, EXIT_STOPPED, {"rank 0 is done\n", ""}},
        {"wait", RANKS_LISTEN, SIGUSR1, 0, EXIT_STOPPED, {"rank 0 is done\n", ""}},
        {"late", RANKS_START, SIGTERM, 0, EXIT_STOPPED, {"rank 0 is done\n", ""}},
        // A rank that a signal to the job ended before it listened had nothing to save; one that nothing asked to stop
        // failed.
        {"late", RANKS_START, SIGTERM, SIGTERM, EXIT_STOPPED, {"", ""}},
        {"late",
         RANKS_START,
         0,
         SIGTERM,
         EXIT_RUN,
         {"train_gpt: rank 0 of 3 on ", " was ended by signal 15 (Terminated)\n"}},
    };
    enum { COUNT = sizeof runs / sizeof runs[0] };
    Run started[COUNT];
    for (int i = 0; i < COUNT; i++) started[i] = start(3, runs[i].what);
    for (int i = COUNT - 1; i >= 0; i--) {
        if (runs[i].when == RANKS_START) wait_for_children(&started[i]);
        for (int r = 0; r < 3 && runs[i].when == RANKS_LISTEN; r++) rank_pid(&started[i], r);
        if (runs[i].to_launcher != 0) kill(started[i].launcher, runs[i].to_launcher);
        if (runs[i].to_rank != 0) kill(first_child(&started[i]), runs[i].to_rank);
        // What the launcher passes on before they listen does not end them.
        for (int r = 0; r < 3 && runs[i].when == RANKS_START && runs[i].to_rank == 0; r++) rank_pid(&started[i], r);
    }
    for (int i = 0; i < COUNT; i++) {
        char text[4096];
        const int code = finish(&started[i], text, sizeof text);
        const bool said = strstr(text, runs[i].says[0]) != NULL && strstr(text, runs[i].says[1]) != NULL;
        int lines = 0;
        for (const char *c = text; *c != '\0'; c++) lines += *c == '\n';
        const int most = i == 0 ? 2 : runs[i].says[0][0] != '\0';
        if (code != runs[i].code || !said || lines != most) fail_msg("run %d: exit code %d\n%s", i, code, text);
    }
}

static void test_second_signal(void **state) {
    (void)state;
    const Run run = start(2, "deaf");
    const pid_t first = rank_pid(&run, 0), second = rank_pid(&run, 1);
    kill(run.launcher, SIGTERM);
    nap(500);
    assert_false(is_gone(first) || is_gone(second)); // asked once, they may finish their step
    kill(run.launcher, SIGINT);
    expect_quiet(&run, 128 + SIGINT);
}

static void test_ranks_die_with_the_launcher(void **state) {
    (void)state;
    const Run run = start(2, "deaf");
    rank_pid(&run, 0);
    rank_pid(&run, 1);
    kill(run.launcher, SIGKILL);
    expect_quiet(&run, -SIGKILL);
}

int main(int argc, char **argv) {
    if (argc == 5 && strcmp(argv[1], "run") == 0) return run_program(argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_environment),
        cmocka_unit_test(test_exit_codes),
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_second_signal),
        cmocka_unit_test(test_ranks_die_with_the_launcher),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
