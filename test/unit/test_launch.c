// Tests of launch.h and mpirun_output.h: what passes of mpirun's stderr; and real runs of this very program as launcher
// and ranks: exit codes, signals, output, and that ranks never outlive their launcher.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <sys/stat.h>
#include "launch.h"

// ---------------------------------------------------------------------------------------------------------------------
// What this program does as a launcher and as a rank: test_launch run RANKS WHAT FILE

// A rank notes its process id in FILE.RANK, then does WHAT.
static int rank_program(const Place *place, const char *what, const char *file) {
    char name[128], pid[32];
    if (strcmp(what, "unready") != 0) stop_on_signals();
    fprintf(place->rank == 0 ? stdout : stderr, "rank %d of %d\n", place->rank, place->world_size);
    fflush(stdout);
    snprintf(name, sizeof name, "%s.%d", file, place->rank);
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    FILE *out = fopen(name, "w");
    if (out == NULL || fputs(pid, out) < 0 || fclose(out) != 0) return 99;
    if (strcmp(what, "die") == 0 && place->rank == 1) raise(SIGKILL);
    if (strcmp(what, "wait") == 0) {
        for (int i = 0; i < 400 && !stop_requested(); i++) usleep(50000);
        return *stop_flag() == 1 ? EXIT_STOPPED : 98; // 1: by SIGUSR1 and nothing else
    }
    if (strcmp(what, "step") == 0) { // asked to stop by any signal, finishes what takes a while
        for (int i = 0; i < 400 && !stop_requested(); i++) usleep(50000);
        for (int i = 0; i < 10; i++) usleep(50000);
        return stop_requested() ? EXIT_STOPPED : 98;
    }
    if (strcmp(what, "talk") == 0) { // as main does, goes on when nobody listens
        signal(SIGPIPE, SIG_IGN);
        for (int i = 0; i < 50; i++) {
            fprintf(i % 2 == 0 ? stdout : stderr, "step %d\n", i);
            fflush(stdout);
            usleep(20000);
        }
        return 0;
    }
    if (strcmp(what, "deaf") == 0 || strcmp(what, "unready") == 0) // takes no notice of being asked to stop
        for (int i = 0; i < 400; i++) usleep(50000);
    // The first exit code that is not 0 ends the other ranks, who are to have said theirs.
    for (int rank = 0; rank < place->world_size; rank++) {
        snprintf(name, sizeof name, "%s.%d", file, rank);
        for (int i = 0; i < 200 && access(name, F_OK) != 0; i++) usleep(50000);
    }
    usleep(100000);
    return atoi(what);
}

static int run_program(char **argv) {
    Error error = {""};
    const Place place = place_from_environment(&error);
    if (error.text[0] != '\0') die_input(&error);
    if (!place.launched) return launch_ranks(atoi(argv[2]), argv);
    return rank_program(&place, argv[3], argv[4]);
}

// What a launcher's surroundings may hold.
static const char *const variables[] = {
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_JOB_ID",
    "SLURM_NODELIST",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NNODES",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    LAUNCH_MARK,
};

static void forget(void) {
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) unsetenv(variables[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// mpirun's stderr

#define DASHES "--------------------------------------------------------------------------\n"
#define REPORT4(name, state) "[vm:00978] [[28460,0],0] ACTIVATE " name " STATE " state " AT ../../orte/mca/x.c:1746\n"
#define REPORT5(name, state)                                                                               \
    "[my-host.example.org:01058] [prterun-vm-1058@0,0] [1796057879.645827] ACTIVATE " name " STATE " state \
    " AT ../../src/mca/x.c:1735\n"                                                                         \
    "[my-host.example.org:01058] [prterun-vm-1058@0,0] [1796057879.645830] ACTIVATING " name " STATE " state "\n"

// What mpirun of versions 4 and 5 wrote, what is to be passed on, and what learned.
static const struct {
    const char *written, *passed;
    int signalled;
    const char *notice;
    bool explained;
} texts[] = {
    {"", "", -1, "", false},
    {"rank 1 speaks\n\n  and again\nunfinished", "rank 1 speaks\n\n  and again\nunfinished", -1, "", false},
    // A rank's exit code is not 0.
    {"rank error\n" DASHES "Primary job  terminated normally, but 1 process returned\n"
     "a non-zero exit code. Per user-direction, the job has been aborted.\n" DASHES DASHES
     "mpirun detected that one or more processes exited with non-zero status, thus causing\n"
     "the job to be terminated. The first process to do so was:\n\n"
     "  Process name: [[4150,1],1]\n  Exit code:    1\n" DASHES "the last words",
     "rank error\nthe last words", -1, "", false},
    {"rank error\n" DASHES "prterun detected that one or more processes exited with non-zero status,\n"
     "thus causing the job to be terminated. The first process to do so was:\n\n"
     "   Process name: [prterun-vm-32343@1,1]\n   Exit code:    1\n" DASHES,
     "rank error\n", -1, "", false},
    // A signal ends a rank; then others.
    {REPORT4("JOB [28460,1]", "RUNNING") REPORT4("PROC [[28460,1],12]", "IOF COMPLETE")
         REPORT4("PROC [[28460,1],12]", "ABORTED BY SIGNAL") REPORT4("PROC [[28460,1],3]", "ABORTED BY SIGNAL") DASHES
     "Primary job  terminated normally, but 1 process returned\n"
     "a non-zero exit code. Per user-direction, the job has been aborted.\n" DASHES REPORT4("JOB NULL",
                                                                                            "DAEMONS TERMINATED") DASHES
     "mpirun noticed that process rank 12 with PID 0 on node vm exited on signal 9 (Killed).\n" DASHES,
     "", 12, "mpirun noticed that process rank 12 with PID 0 on node vm exited on signal 9 (Killed).", false},
    {REPORT5("JOB [INVALID]", "PENDING INIT") "to the end\n" REPORT5("PROC [prterun-vm-1058@1,1]", "ABORTED BY SIGNAL")
         DASHES "prterun noticed that process rank 1 with PID 1061 on node vm exited on\nsignal 11 (Segmentation "
                "fault).\n" DASHES,
     "to the end\n", 1,
     "prterun noticed that process rank 1 with PID 1061 on node vm exited on signal 11 (Segmentation fault).", false},
    // Behind a rank's unfinished line.
    {"step 1 ... " REPORT4(
         "PROC [[28460,1],0]",
         "ABORTED BY SIGNAL") "step 2 ... " DASHES
                              "Primary job  terminated normally, but 1 process returned\na non-zero exit code.\n" DASHES
                              "step 3\n",
     "step 1 ... step 2 ... step 3\n", 0, "", false},
    // Reports within a block.
    {DASHES "prterun noticed that process rank 0 with PID 9 on node vm exited on\n" REPORT5("JOB [x@1]", "NOTIFIED")
         REPORT5("PROC [x@1,0]", "ABORTED BY SIGNAL") "signal 15 (Terminated).\n" DASHES "end\n",
     "end\n", 0, "prterun noticed that process rank 0 with PID 9 on node vm exited on signal 15 (Terminated).", false},
    // mpirun is sent signals.
    {"step 1 ... mpirun: Forwarding signal 10 to job\nstep 2\n", "step 1 ... step 2\n", -1, "", false},
    {"a\nAbort is in progress...hit ctrl-c again to forcibly terminate\n\nb\n\n", "a\nb\n\n", -1, "", false},
    // mpirun fails for a reason of its own.
    {DASHES "mpirun was unable to launch the specified application as it could not access\nor execute an executable:\n"
            "\nExecutable: /nonexistent/x\nNode: vm\n\nwhile attempting to start process rank 0.\n" DASHES,
     "train_gpt: mpirun: mpirun was unable to launch the specified application as it could not access or execute an "
     "executable: Executable: /nonexistent/x Node: vm while attempting to start process rank 0.\n",
     -1, "", true},
    {"mpirun: Error: unknown option \"--frobnicate\"\nType 'mpirun --help' for usage.\n",
     "mpirun: Error: unknown option \"--frobnicate\"\nType 'mpirun --help' for usage.\n", -1, "", false},
    // A rank's own lines that look nearly like mpirun's; a block that does not end.
    {"-----\n[1] ACTIVATE x STATE ABORTED BY SIGNAL\n" DASHES "rank 1\n",
     "-----\n[1] ACTIVATE x STATE ABORTED BY SIGNAL\n" DASHES "rank 1\n", -1, "", false},
};

static MpirunOutput filter;
static char passed[100000];

// Reads what has been passed on to a pipe, which the filter no longer writes to.
static void read_passed(int pipe) {
    size_t length = 0;
    for (ssize_t got = 1; got > 0 && length<sizeof passed - 1; length += got> 0 ? (size_t)got : 0)
        got = read(pipe, passed + length, sizeof passed - 1 - length);
    passed[length] = '\0';
    close(pipe);
}

static void *read_late(void *pipe) {
    usleep(300000);
    read_passed(*(const int *)pipe);
    return NULL;
}

static void test_filter(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        for (size_t piece = 1; piece < 2000; piece = 3 * piece + 1) { // texts arrive in any pieces
            int out[2];
            assert_int_equal(pipe(out), 0);
            mpirun_output_init(&filter, out[1]);
            for (size_t at = 0, all = strlen(texts[i].written); at < all; at += piece)
                mpirun_output_feed(&filter, texts[i].written + at, piece < all - at ? piece : all - at);
            mpirun_output_flush(&filter);
            close(out[1]);
            read_passed(out[0]);
            assert_string_equal(passed, texts[i].passed);
            assert_int_equal(filter.signalled, texts[i].signalled);
            assert_string_equal(filter.notice, texts[i].notice);
            assert_int_equal(filter.explained, texts[i].explained);
        }
}

// A line or block longer than the filter holds passes as it is, whatever its length.
static void test_filter_long_texts(void **state) {
    (void)state;
    static char text[50000];
    for (size_t length = sizeof filter.held - 100; length < sizeof filter.held + 100; length++)
        for (int block = 0; block < 2; block++) {
            int out[2];
            const size_t dashes = block ? strlen(DASHES) : 0;
            memset(text, 'x', length);
            memcpy(text, DASHES, dashes);
            strcpy(text + length, "\nend\n");
            assert_int_equal(pipe(out), 0);
            mpirun_output_init(&filter, out[1]);
            mpirun_output_feed(&filter, text, strlen(text));
            mpirun_output_flush(&filter);
            close(out[1]);
            read_passed(out[0]);
            assert_string_equal(passed, text);
        }
}

// Waits until a pipe has had these words, some seconds at most.
static void expect_read(int pipe, const char *words) {
    char text[64] = "";
    struct pollfd ready = {pipe, POLLIN, 0};
    for (size_t length = 0; length < strlen(words);) {
        if (poll(&ready, 1, 5000) != 1) fail_msg("\"%s\" has not been passed on, only \"%s\"", words, text);
        const ssize_t got = read(pipe, text + length, strlen(words) - length);
        assert_true(got > 0);
        length += (size_t)got;
    }
    assert_string_equal(text, words);
}

// Through the thread: at once, unfinished lines too; to the end, though somebody keeps the pipe open and busy.
static void test_filter_thread(void **state) {
    (void)state;
    int in[2], out[2];
    assert_int_equal(pipe2(in, O_CLOEXEC), 0);
    assert_int_equal(pipe2(out, O_CLOEXEC), 0);
    assert_int_equal(fcntl(in[1], F_SETPIPE_SZ, 65536), 65536);
    assert_int_equal(fcntl(out[1], F_SETPIPE_SZ, 4096), 4096); // much is still to be read when the end comes
    assert_true(mpirun_output_start(&filter, in[0], out[1]));
    assert_int_equal(write(in[1], "a line\n", 7), 7);
    expect_read(out[0], "a line\n");
    assert_int_equal(write(in[1], "step 1 ...", 10), 10);
    expect_read(out[0], "step 1 ...");
    assert_int_equal(write(in[1], DASHES, 75), 75); // a rank's, and nothing follows
    expect_read(out[0], "---------------");
    for (size_t left = 75 - 15; left > 0;) left -= (size_t)read(out[0], passed, left);

    memset(passed, 'y', 60000);
    passed[60000 - 1] = '\n';
    assert_int_equal(write(in[1], passed, 60000), 60000);
    const pid_t busy = fork();
    assert_true(busy >= 0);
    if (busy == 0) {
        close(in[0]);
        close(out[0]);
        close(out[1]);
        signal(SIGPIPE, SIG_DFL);
        while (write(in[1], "busy\n", 5) > 0) continue;
        _exit(0);
    }
    pthread_t reader;
    assert_int_equal(pthread_create(&reader, NULL, read_late, &out[0]), 0);
    mpirun_output_finish(&filter);
    close(out[1]);
    pthread_join(reader, NULL);
    assert_int_equal(strspn(passed, "y"), 60000 - 1);
    kill(busy, SIGKILL);
    waitpid(busy, NULL, 0);
    close(in[1]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Runs

static char folder[] = "/tmp/test_launch_XXXXXX", output[64], mark[64];

// Runs go on side by side, as mpirun takes a second or two to end; each has its files.
enum { RUNS = 5 };
static void use_run(int run) {
    snprintf(output, sizeof output, "%s/%d.output", folder, run);
    snprintf(mark, sizeof mark, "%s/%d", folder, run);
}

// Starts `test_launch run RANKS WHAT`, output to a file.
static pid_t start(int ranks, const char *what) {
    char name[128], count[16];
    for (int rank = 0; rank < ranks; rank++) {
        snprintf(name, sizeof name, "%s.%d", mark, rank);
        remove(name);
    }
    snprintf(count, sizeof count, "%d", ranks);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0) return pid;
    const int out = open(output, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execl("/proc/self/exe", "test_launch", "run", count, what, mark, (char *)NULL);
    _exit(97);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// The process id of a rank, once it listens to signals.
static pid_t rank_pid(int rank) {
    char name[128];
    snprintf(name, sizeof name, "%s.%d", mark, rank);
    for (const double begin = now(); now() - begin < 30; usleep(10000)) {
        FILE *file = fopen(name, "r");
        int pid = 0, found = file != NULL && fscanf(file, "%d", &pid) == 1;
        if (file != NULL) fclose(file);
        if (found) return pid;
    }
    fail_msg("rank %d did not start", rank);
    return -1;
}

// Waits until a launcher has forked mpirun, which then takes a while to listen.
static void wait_for_mpirun(pid_t launcher) {
    char name[64];
    int pid = 0;
    snprintf(name, sizeof name, "/proc/%d/task/%d/children", (int)launcher, (int)launcher);
    for (const double begin = now(); pid == 0; usleep(500)) {
        FILE *file = fopen(name, "r");
        assert_non_null(file);
        if (fscanf(file, "%d", &pid) != 1) pid = 0;
        fclose(file);
        if (now() - begin > 30) fail_msg("mpirun did not start");
    }
}

// The exit code of a launcher, which has to end within some seconds.
static int finish(pid_t launcher, double seconds) {
    int status = 0;
    for (const double begin = now(); waitpid(launcher, &status, WNOHANG) == 0; usleep(10000))
        if (now() - begin > seconds) {
            kill(launcher, SIGKILL);
            waitpid(launcher, &status, 0);
            fail_msg("still running after %g s", seconds);
        }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// Whether a process has ended; a zombie, whose new parent has not yet looked, has.
static bool is_gone(pid_t pid) {
    char name[64], text[256] = "";
    snprintf(name, sizeof name, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(name, "r");
    if (file == NULL) return true;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    const char *after = length > 0 ? strrchr(text, ')') : NULL;
    return after == NULL || after[2] == 'Z' || after[2] == 'X';
}

static void expect_gone(pid_t pid, double seconds) {
    for (const double begin = now(); !is_gone(pid); usleep(10000))
        if (now() - begin > seconds) fail_msg("process %d lives on after %g s", (int)pid, seconds);
}

static const char *printed(void) {
    static char text[4096];
    FILE *file = fopen(output, "r");
    assert_non_null(file);
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    return text;
}

// The number of lines printed, which have to be the ranks' own, with nothing of mpirun's.
static int count_lines(void) {
    int lines = 0;
    char text[4096], *rest = NULL;
    snprintf(text, sizeof text, "%s", printed());
    assert_true(text[0] != '\n');
    assert_null(strstr(text, "\n\n"));
    for (char *line = strtok_r(text, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest), lines++)
        if (strcmp(line, "rank 0 of 2") != 0 && strcmp(line, "rank 1 of 2") != 0) fail_msg("printed: %s", line);
    return lines;
}

static void test_exit_codes(void **state) {
    (void)state;
    static const struct {
        const char *what;
        int code;
    } runs[RUNS] = {{"0", 0}, {"1", EXIT_RUN}, {"2", EXIT_INPUT}, {"75", EXIT_STOPPED}, {"die", EXIT_RUN}};
    pid_t launchers[RUNS];
    for (int i = 0; i < RUNS; i++) {
        use_run(i);
        launchers[i] = start(2, runs[i].what);
    }
    for (int i = 0; i < RUNS; i++) {
        use_run(i);
        assert_int_equal(finish(launchers[i], 30), runs[i].code);
        if (strcmp(runs[i].what, "die") == 0) {
            char host[64] = "", *own = NULL, message[256];
            gethostname(host, sizeof host - 1);
            snprintf(message, sizeof message, "train_gpt: rank 1 of 2 on %s was ended by signal 9 (Killed)\n", host);
            own = strstr(printed(), "train_gpt: ");
            assert_non_null(own);
            assert_string_equal(own, message); // one line, and the last
            assert_null(strstr(printed(), "--"));
            assert_null(strstr(printed(), "ACTIVATE"));
            continue;
        }
        assert_int_equal(count_lines(), 2);
    }
}

static void test_signals(void **state) {
    (void)state;
    static const int signals[RUNS] = {SIGTERM, SIGINT, SIGUSR1, SIGUSR1, SIGTERM};
    pid_t launchers[RUNS];
    for (int i = 0; i < RUNS; i++) {
        use_run(i);
        launchers[i] = start(2, "wait");
        if (i < 3) { // once the ranks listen
            rank_pid(0);
            rank_pid(1);
        } else { // while mpirun is starting
            wait_for_mpirun(launchers[i]);
        }
        kill(launchers[i], signals[i]);
    }
    for (int i = 0; i < RUNS; i++) {
        use_run(i);
        assert_int_equal(finish(launchers[i], 20), EXIT_STOPPED); // a rank ends otherwise if not by SIGUSR1
        const int lines = count_lines();
        assert_true(i < 3 ? lines == 2 : lines <= 2);
    }
}

static void test_second_signal(void **state) {
    (void)state;
    const pid_t launcher = start(2, "deaf"), first = rank_pid(0), second = rank_pid(1);
    kill(launcher, SIGINT);
    usleep(300000);
    assert_false(is_gone(first) || is_gone(second)); // asked once, they may finish their step
    kill(launcher, SIGINT);
    assert_int_equal(finish(launcher, 8), 128 + SIGINT);
    assert_int_equal(count_lines(), 2);
    expect_gone(first, 1);
    expect_gone(second, 1);
}

// The folder that a rank's launcher has made.
static const char *folder_of(pid_t rank) {
    static char environment[20000];
    static const char key[] = "OMPI_MCA_btl_vader_backing_directory=";
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/environ", (int)rank);
    FILE *variables = fopen(name, "r");
    assert_non_null(variables);
    const size_t length = fread(environment, 1, sizeof environment - 1, variables);
    fclose(variables);
    environment[length] = '\0';
    for (const char *c = environment; c < environment + length; c += strlen(c) + 1)
        if (strncmp(c, key, strlen(key)) == 0) return c + strlen(key);
    fail_msg("rank %d was not told of a folder", (int)rank);
    return NULL;
}

static void test_ranks_die_with_the_launcher(void **state) {
    (void)state;
    const pid_t launcher = start(2, "deaf"), first = rank_pid(0), second = rank_pid(1);
    const char *folder_name = folder_of(first);
    kill(launcher, SIGKILL);
    assert_int_equal(finish(launcher, 1), -SIGKILL);
    expect_gone(first, 3);
    expect_gone(second, 3);
    char parent[256];
    snprintf(parent, sizeof parent, "%.*s", (int)(strrchr(folder_name, '/') - folder_name), folder_name);
    for (const double begin = now(); access(folder_name, F_OK) == 0; usleep(50000)) { // mpirun ends, too
        launch_folder_sweep(parent);                                                  // as the next launcher does
        if (now() - begin > 10) fail_msg("%s is still there", folder_name);
    }
}

static pid_t parent_of(pid_t pid) {
    char name[64];
    int parent = 0;
    snprintf(name, sizeof name, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(name, "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%*d (%*[^)]) %*c %d", &parent), 1);
    fclose(file);
    return parent;
}

// As batch systems and service managers do it: all processes of the run get the signal. Then mpirun alone.
static void test_signals_to_the_job(void **state) {
    (void)state;
    static const int signals[RUNS] = {SIGTERM, SIGINT, SIGUSR1, SIGTERM, SIGINT};
    pid_t launchers[RUNS];
    for (int i = 0; i < RUNS; i++) {
        use_run(i);
        launchers[i] = start(2, "step");
        const pid_t first = rank_pid(0), second = rank_pid(1), mpirun = parent_of(first);
        assert_int_equal(parent_of(mpirun), launchers[i]);
        kill(mpirun, signals[i]);
        if (i >= 3) continue;
        kill(first, signals[i]);
        kill(second, signals[i]);
        kill(launchers[i], signals[i]);
    }
    for (int i = 0; i < RUNS; i++) {
        use_run(i);
        assert_int_equal(finish(launchers[i], 20), EXIT_STOPPED);
        assert_int_equal(count_lines(), 2);
    }
}

// A rank that a signal to the job ends before it listens had nothing to save; one that nothing asked to stop failed.
static void test_signals_before_ranks_listen(void **state) {
    (void)state;
    pid_t launchers[2];
    for (int asked = 0; asked < 2; asked++) {
        use_run(asked);
        launchers[asked] = start(2, "unready");
    }
    for (int asked = 0; asked < 2; asked++) {
        use_run(asked);
        const pid_t first = rank_pid(0);
        rank_pid(1);
        if (asked) kill(launchers[asked], SIGTERM);
        kill(first, SIGTERM);
        assert_int_equal(finish(launchers[asked], 20), asked ? EXIT_STOPPED : EXIT_RUN);
    }
}

// `train_gpt ... | head -1`: the run goes on to its end.
static void test_nobody_reads(void **state) {
    (void)state;
    int out[2];
    assert_int_equal(pipe2(out, O_CLOEXEC), 0);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        signal(SIGPIPE, SIG_IGN);
        dup2(out[1], STDOUT_FILENO);
        dup2(out[1], STDERR_FILENO);
        execl("/proc/self/exe", "test_launch", "run", "2", "talk", mark, (char *)NULL);
        _exit(97);
    }
    close(out[1]);
    char first;
    assert_int_equal(read(out[0], &first, 1), 1);
    close(out[0]);
    assert_int_equal(finish(pid, 20), 0);
}

// The launcher's folder is where there is room, and goes with all that a killed mpirun left.
static void test_folder(void **state) {
    (void)state;
    char path[256], file[300];
    launch_folder(path, sizeof path, 1 << 30); // there is no such room
    assert_string_equal(path, "");
    launch_folder_remove(path);
    launch_folder(path, sizeof path, 1);
    assert_true(path[0] == '/');
    snprintf(file, sizeof file, "%s/below", path);
    assert_int_equal(mkdir(file, 0700), 0);
    snprintf(file, sizeof file, "%s/below/segment", path);
    const int made = open(file, O_WRONLY | O_CREAT, 0600);
    assert_true(made >= 0);
    close(made);
    launch_folder_remove(path);
    assert_int_not_equal(access(path, F_OK), 0);

    const pid_t launcher = start(2, "deaf"), first = rank_pid(0), second = rank_pid(1);
    const char *folder_name = folder_of(first);
    assert_int_equal(access(folder_name, W_OK), 0);
    kill(parent_of(first), SIGKILL);
    assert_int_equal(finish(launcher, 5), EXIT_RUN);
    assert_int_not_equal(access(folder_name, F_OK), 0);
    expect_gone(first, 3);
    expect_gone(second, 3);
}

// What killed launchers have left goes; nothing else does.
static void test_sweep(void **state) {
    (void)state;
    static const struct {
        const char *name, *file;
        bool held, stays;
    } folders[] = {
        {LAUNCH_FOLDER "aaaaaa", LAUNCH_LOCK, false, false},
        {LAUNCH_FOLDER "bbbbbb", LAUNCH_LOCK, true, true},         // its launcher lives
        {LAUNCH_FOLDER "cccccc", LAUNCH_LOCK ".new", false, true}, // is being made
        {"train_gpt.dddddd", LAUNCH_LOCK, false, true},            // somebody's
    };
    enum { FOLDERS = (int)(sizeof folders / sizeof folders[0]) };
    char parent[128], path[FOLDERS][256], file[FOLDERS][300];
    int open_files[FOLDERS];
    snprintf(parent, sizeof parent, "%s/sweep", folder);
    assert_int_equal(mkdir(parent, 0700), 0);
    for (int i = 0; i < FOLDERS; i++) {
        snprintf(path[i], sizeof path[i], "%s/%s", parent, folders[i].name);
        snprintf(file[i], sizeof file[i], "%.200s/%s", path[i], folders[i].file);
        assert_int_equal(mkdir(path[i], 0700), 0);
        open_files[i] = open(file[i], O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        assert_true(open_files[i] >= 0);
        if (folders[i].held) assert_int_equal(flock(open_files[i], LOCK_EX), 0);
    }
    launch_folder_sweep(parent);
    for (int i = 0; i < FOLDERS; i++) {
        if ((access(file[i], F_OK) == 0) != folders[i].stays) fail_msg("%s", path[i]);
        close(open_files[i]);
        launch_folder_remove(path[i]);
    }
    assert_int_equal(rmdir(parent), 0);
}

// What surrounds the launcher does not move its ranks elsewhere.
static void test_surroundings(void **state) {
    (void)state;
    setenv("SLURM_JOB_ID", "77", 1);
    setenv("SLURM_NNODES", "2", 1);
    setenv("SLURM_NODELIST", "n[1-2]", 1);
    setenv("SLURM_TASKS_PER_NODE", "1(x2)", 1);
    setenv("SLURM_PROCID", "0", 1);
    assert_int_equal(finish(start(2, "0"), 30), 0);
    forget();
}

static void test_no_mpirun(void **state) {
    (void)state;
    char *path = strdup(getenv("PATH"));
    setenv("PATH", "/nonexistent", 1);
    const int code = finish(start(2, "0"), 30);
    setenv("PATH", path, 1);
    free(path);
    assert_int_equal(code, EXIT_INPUT);
    assert_non_null(strstr(printed(), "--nproc 2 needs Open MPI's mpirun"));
    assert_non_null(strstr(printed(), "openmpi-bin"));
    assert_ptr_equal(strchr(printed(), '\n'), printed() + strlen(printed()) - 1); // one line
}

// An mpirun that fails for a reason of its own is heard, and a process that it leaves behind is not waited for.
static void test_mpirun_fails(void **state) {
    (void)state;
    static const struct {
        const char *script, *said;
        int code;
    } runs[] = {
        {"cat >&2 <<END\n" DASHES "No room\n\nleft on $(uname).\n" DASHES "END\nexit 213",
         "train_gpt: mpirun: No room left on Linux.\n", EXIT_RUN},
        {"exit 213", "ended with exit code 213\n", EXIT_RUN},
        {"sleep 20 & echo No space >&2; exit 1", "No space\n", 1},
        {"kill -9 $$", "was ended by signal 9 (Killed)\n", EXIT_RUN},
    };
    char name[64], *path = strdup(getenv("PATH")), *changed = NULL;
    snprintf(name, sizeof name, "%s/mpirun.openmpi", folder);
    assert_true(asprintf(&changed, "%s:%s", folder, path) > 0);
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        FILE *file = fopen(name, "w");
        assert_non_null(file);
        fprintf(file, "#!/bin/sh\n%s\n", runs[i].script);
        assert_int_equal(fchmod(fileno(file), 0700), 0);
        fclose(file);
        setenv("PATH", changed, 1);
        const pid_t launcher = start(2, "0");
        setenv("PATH", path, 1);
        assert_int_equal(finish(launcher, 5), runs[i].code);
        const char *said = strstr(printed(), runs[i].said);
        if (said == NULL || strchr(printed(), '\n')[1] != '\0') fail_msg("%s: said %s", runs[i].script, printed());
    }
    remove(name);
    free(changed);
    free(path);
}

static int set_up(void **state) {
    (void)state;
    forget();
    if (mkdtemp(folder) == NULL) return -1;
    use_run(0);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    for (int run = 0; run < RUNS; run++) {
        char name[128];
        use_run(run);
        remove(output);
        for (int rank = 0; rank < 2; rank++) {
            snprintf(name, sizeof name, "%s.%d", mark, rank);
            remove(name);
        }
    }
    return rmdir(folder);
}

int main(int argc, char **argv) {
    if (argc == 5 && strcmp(argv[1], "run") == 0) return run_program(argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_filter),
        cmocka_unit_test(test_filter_long_texts),
        cmocka_unit_test(test_filter_thread),
        cmocka_unit_test(test_mpirun_fails),
        cmocka_unit_test(test_exit_codes),
        cmocka_unit_test(test_signals),
        cmocka_unit_test(test_surroundings),
        cmocka_unit_test(test_ranks_die_with_the_launcher),
        cmocka_unit_test(test_no_mpirun),
        cmocka_unit_test(test_second_signal),
        cmocka_unit_test(test_signals_to_the_job),
        cmocka_unit_test(test_signals_before_ranks_listen),
        cmocka_unit_test(test_nobody_reads),
        cmocka_unit_test(test_folder),
        cmocka_unit_test(test_sweep),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
