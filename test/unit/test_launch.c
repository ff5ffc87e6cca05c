// Tests of launch.h: places from every launcher's variables, and real runs of this very program as launcher and ranks:
// exit codes, signals, output, and that ranks never outlive their launcher.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "launch.h"

// ---------------------------------------------------------------------------------------------------------------------
// What this program does as a launcher and as a rank: test_launch run RANKS WHAT FILE

// A rank notes its process id in FILE.RANK, then does WHAT.
static int rank_program(const Place *place, const char *what, const char *file) {
    char name[128], pid[32];
    stop_on_signals();
    printf("rank %d of %d\n", place->rank, place->world_size);
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
    if (strcmp(what, "deaf") == 0) // takes no notice of being asked to stop
        for (int i = 0; i < 400; i++) usleep(50000);
    return atoi(what);
}

static int run_program(char **argv) {
    Error error = {""};
    const Place place = place_from_environment(&error);
    if (error.text[0] != '\0') die_input(&error);
    if (!place.launched) return launch_ranks(atoi(argv[2]), argv);
    return rank_program(&place, argv[3], argv[4]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Places

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

// The place that an environment of these settings, "NAME=value NAME=value", gives.
static Place place_of(const char *settings, Error *error) {
    forget();
    char copy[512], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", settings);
    for (char *setting = strtok_r(copy, " ", &rest); setting != NULL; setting = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(setting, '=');
        *value++ = '\0';
        setenv(setting, value, 1);
    }
    memset(error, 0, sizeof *error);
    error_identify(0, 1);
    const Place place = place_from_environment(error);
    prctl(PR_SET_PDEATHSIG, 0);
    forget();
    return place;
}

static void expect_place(const char *settings, int rank, int world, int local_rank, int local_size, bool launched) {
    Error error;
    const Place place = place_of(settings, &error);
    assert_string_equal(error.text, "");
    assert_int_equal(place.rank, rank);
    assert_int_equal(place.world_size, world);
    assert_int_equal(place.local_rank, local_rank);
    assert_int_equal(place.local_size, local_size);
    assert_int_equal(place.launched, launched);
    assert_int_equal(error_identity()->rank, launched ? rank : 0);
    assert_int_equal(error_identity()->world_size, world);
}

static void expect_no_place(const char *settings, const char *part) {
    Error error;
    place_of(settings, &error);
    if (strstr(error.text, part) == NULL) fail_msg("%s: \"%s\" is not in: %s", settings, part, error.text);
}

#define OMPI "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4"
#define STEP "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=2(x2)"

static void test_places(void **state) {
    (void)state;
    expect_place("", 0, 1, 0, 1, false);
    expect_place(OMPI, 5, 8, 1, 4, true);
    expect_place(OMPI " SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 PMIX_RANK=0 RANK=7 WORLD_SIZE=9", 5, 8, 1, 4, true);
    expect_place(STEP " PMIX_RANK=3", 3, 4, 1, 2, true);
    expect_place(STEP " PMI_RANK=3 PMI_SIZE=4", 3, 4, 1, 2, true);
    expect_place("SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=1,3 PMIX_RANK=3", 3,
                 4, 2, 1, true);                                                      // unequal nodes
    expect_place("SLURM_JOB_ID=9 SLURM_PROCID=0 SLURM_LOCALID=0", 0, 1, 0, 1, false); // a batch script's shell
    expect_place("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", 0, 1, 0, 1, false);         // an interactive step
    expect_place("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 PMIX_RANK=0", 0, 1, 0, 1, false);
    expect_place("PMI_RANK=1 PMI_SIZE=3", 1, 3, 1, 3, true);
    expect_place("PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", 1, 4, 1, 2, true);
    expect_place("RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2", 2, 4, 0, 2, true);
    expect_place("RANK=2 WORLD_SIZE=4 LOCAL_RANK=0", 2, 4, 0, 4, true);
    expect_place("RANK=2", 0, 1, 0, 1, false); // somebody's variable of that name

    expect_no_place("RANK=4 WORLD_SIZE=4 LOCAL_RANK=0", "RANK is \"4\", a whole number from 0 to 3 is needed");
    expect_no_place("RANK=-1 WORLD_SIZE=4", "RANK is \"-1\"");
    expect_no_place("RANK=x WORLD_SIZE=4", "RANK is \"x\"");
    expect_no_place("RANK=1x WORLD_SIZE=4", "RANK is \"1x\"");
    expect_no_place("RANK=1 WORLD_SIZE=0", "WORLD_SIZE is \"0\"");
    expect_no_place("RANK=1 WORLD_SIZE=99999999999999999999", "WORLD_SIZE is");
    expect_no_place("RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK is \"2\"");
    expect_no_place("RANK=1 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=5", "LOCAL_WORLD_SIZE is \"5\"");
    expect_no_place("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE is not set");
    expect_no_place(STEP, "srun started 4 tasks without MPI support");
    expect_no_place(LAUNCH_MARK "=1", "Open MPI's mpirun");
}

static void test_threads(void **state) {
    (void)state;
    const Place alone = {0, 1, 0, 1, false}, crowded = {0, 1000, 0, 1000, true};
    char *user = getenv("OMP_NUM_THREADS");
    user = user == NULL ? NULL : strdup(user);
    unsetenv("OMP_NUM_THREADS");
    set_threads(&alone);
    assert_int_equal(place_threads(), machine_cores());
    set_threads(&crowded);
    assert_int_equal(place_threads(), 1);
    setenv("OMP_NUM_THREADS", "3", 1); // the user's choice is left alone
    omp_set_num_threads(3);
    set_threads(&crowded);
    assert_int_equal(place_threads(), 3);
    if (user == NULL) unsetenv("OMP_NUM_THREADS");
    if (user != NULL) setenv("OMP_NUM_THREADS", user, 1);
    free(user);
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
            assert_non_null(strstr(printed(), "a rank was ended by signal 9"));
            continue;
        }
        // The ranks' lines, with nothing before them and nothing of mpirun's own.
        int lines = 0;
        char text[4096], *rest = NULL;
        snprintf(text, sizeof text, "%s", printed());
        for (char *line = strtok_r(text, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest), lines++)
            if (strcmp(line, "rank 0 of 2") != 0 && strcmp(line, "rank 1 of 2") != 0) fail_msg("printed: %s", line);
        assert_int_equal(lines, 2);
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
    for (int i = 0; i < RUNS; i++)
        assert_int_equal(finish(launchers[i], 20), EXIT_STOPPED); // a rank ends otherwise if not by SIGUSR1
}

static void test_second_signal(void **state) {
    (void)state;
    const pid_t launcher = start(2, "deaf"), first = rank_pid(0), second = rank_pid(1);
    kill(launcher, SIGINT);
    usleep(300000);
    assert_false(is_gone(first) || is_gone(second)); // asked once, they may finish their step
    kill(launcher, SIGINT);
    assert_int_equal(finish(launcher, 8), 128 + SIGINT);
    expect_gone(first, 1);
    expect_gone(second, 1);
}

static void test_ranks_die_with_the_launcher(void **state) {
    (void)state;
    const pid_t launcher = start(2, "deaf"), first = rank_pid(0), second = rank_pid(1);
    kill(launcher, SIGKILL);
    assert_int_equal(finish(launcher, 1), -SIGKILL);
    expect_gone(first, 3);
    expect_gone(second, 3);
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
        cmocka_unit_test(test_places),       cmocka_unit_test(test_threads),
        cmocka_unit_test(test_exit_codes),   cmocka_unit_test(test_signals),
        cmocka_unit_test(test_surroundings), cmocka_unit_test(test_ranks_die_with_the_launcher),
        cmocka_unit_test(test_no_mpirun),    cmocka_unit_test(test_second_signal),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
