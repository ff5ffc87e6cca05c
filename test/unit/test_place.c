// Tests of place.h: places from every launcher's variables, and threads.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "place.h"

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
    "TORCHELASTIC_RUN_ID",
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
    SPAWN_MARK,
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

// start: what started the ranks, by its name; NULL: nothing did. mpi: whether MPI can connect them.
static void expect_place(const char *settings, int rank, int world, int local_rank, int local_size, const char *start,
                         bool mpi) {
    Error error;
    const Place place = place_of(settings, &error);
    assert_string_equal(error.text, "");
    assert_int_equal(place.rank, rank);
    assert_int_equal(place.world_size, world);
    assert_int_equal(place.local_rank, local_rank);
    assert_int_equal(place.local_size, local_size);
    assert_int_equal(place.launched, start != NULL);
    assert_int_equal(error_identity()->rank, rank);
    assert_int_equal(error_identity()->world_size, world);
    if (start == NULL) {
        assert_null(place.start);
        return;
    }
    assert_string_equal(place.start->name, start);
    assert_int_equal(place.start->mpi, mpi);
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
    expect_place("", 0, 1, 0, 1, NULL, false);
    expect_place(OMPI, 5, 8, 1, 4, "mpirun", true);
    expect_place(OMPI " SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 PMIX_RANK=0 RANK=7 WORLD_SIZE=9", 5, 8, 1, 4, "mpirun",
                 true);
    expect_place(STEP " PMIX_RANK=3", 3, 4, 1, 2, "srun --mpi=pmix", true);
    expect_place(STEP " PMI_RANK=3 PMI_SIZE=4", 3, 4, 1, 2, "srun --mpi=pmi2", true);
    expect_place(STEP, 3, 4, 1, 2, "srun without --mpi", false);
    expect_place(STEP " RANK=0 WORLD_SIZE=2", 3, 4, 1, 2, "srun without --mpi", false);
    expect_place("SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=1,3 PMIX_RANK=3", 3,
                 4, 2, 1, "srun --mpi=pmix", true);                                         // unequal nodes
    expect_place("SLURM_JOB_ID=9 SLURM_PROCID=0 SLURM_LOCALID=0", 0, 1, 0, 1, NULL, false); // a batch script's shell
    expect_place("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", 0, 1, 0, 1, NULL, false);         // an interactive step
    expect_place("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 PMIX_RANK=0", 0, 1, 0, 1, NULL, false);
    expect_place("PMI_RANK=1 PMI_SIZE=3", 1, 3, 1, 3, "MPICH's mpirun", true);
    expect_place("PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", 1, 4, 1, 2, "MPICH's mpirun", true);
    expect_place("RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2", 2, 4, 0, 2, "RANK and WORLD_SIZE", false);
    expect_place("RANK=2 WORLD_SIZE=4 LOCAL_RANK=0", 2, 4, 0, 4, "RANK and WORLD_SIZE", false);
    expect_place("RANK=2", 0, 1, 0, 1, NULL, false); // somebody's variables of these names
    expect_place("WORLD_SIZE=2", 0, 1, 0, 1, NULL, false);
    expect_place("TORCHELASTIC_RUN_ID=x", 0, 1, 0, 1, NULL, false);
    expect_place("RANK=0 WORLD_SIZE=1 TORCHELASTIC_RUN_ID=x", 0, 1, 0, 1, NULL, false);
    // What was started within something else.
    expect_place("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x SLURM_PROCID=1 "
                 "SLURM_STEP_NUM_TASKS=2 PMIX_RANK=1",
                 5, 8, 1, 4, "torchrun", false);
    expect_place("RANK=2 WORLD_SIZE=3 LOCAL_RANK=2 LOCAL_WORLD_SIZE=3 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 "
                 "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 " SPAWN_MARK "=7",
                 2, 3, 2, 3, "--nproc", false);
    expect_place("RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 PMIX_RANK=0", 2, 4, 0, 4,
                 "RANK and WORLD_SIZE", false);

    expect_no_place("RANK=4 WORLD_SIZE=4 LOCAL_RANK=0", "RANK is \"4\", a whole number from 0 to 3 is needed");
    expect_no_place("RANK=-1 WORLD_SIZE=4", "RANK is \"-1\"");
    expect_no_place("RANK=x WORLD_SIZE=4", "RANK is \"x\"");
    expect_no_place("RANK=1x WORLD_SIZE=4", "RANK is \"1x\"");
    expect_no_place("RANK=1 WORLD_SIZE=0", "WORLD_SIZE is \"0\"");
    expect_no_place("RANK=1 WORLD_SIZE=99999999999999999999", "WORLD_SIZE is");
    expect_no_place("RANK=1 WORLD_SIZE=", "WORLD_SIZE is \"\"");
    expect_no_place("RANK=1 TORCHELASTIC_RUN_ID=x", "WORLD_SIZE is not set");
    expect_no_place("RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK is \"2\"");
    expect_no_place("RANK=1 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=5", "LOCAL_WORLD_SIZE is \"5\"");
    expect_no_place("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE is not set");
    expect_no_place("SLURM_PROCID=4 SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID is \"4\"");
    expect_no_place("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=x2",
                    "SLURM_STEP_TASKS_PER_NODE is");
    expect_no_place(LAUNCH_MARK "=1", "Open MPI's mpirun");
}

static void test_threads(void **state) {
    (void)state;
    const Place alone = {0, 1, 0, 1, false, NULL}, crowded = {0, 1000, 0, 1000, true, place_starts()};
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

    int threads = 0; // whatever kept OpenMP from granting them
    omp_set_dynamic(1);
    omp_set_max_active_levels(0);
    set_threads(&alone);
#pragma omp parallel reduction(+ : threads)
    threads++;
    assert_int_equal(threads, place_threads());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_threads),
    };
    forget();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
