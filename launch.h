// launch.h: starting the ranks of this machine, and stopping in time.
//
// `--nproc N` at a prompt starts nothing by hand: launch_ranks() runs Open MPI's mpirun on this machine, passes signals
// on and returns the run's own exit code.
//
// Stopping: SIGTERM, SIGINT or SIGUSR1 ask a rank to end after its step with EXIT_STOPPED. The launcher turns all three
// into SIGUSR1, which mpirun hands to the ranks, and repeats it every second, as mpirun loses what arrives while it
// starts. So a rank takes any number of SIGUSR1 as one; a second SIGTERM or SIGINT ends it at once, with 128 + signal.
// Batch systems and service managers signal launcher, mpirun and ranks alike. So mpirun, which would end the ranks at
// once, has SIGTERM and SIGINT blocked; where one is pending there, the run is asked to stop.
#ifndef LAUNCH_H
#define LAUNCH_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include "cpu/machine.h"
#include "error.h"
#include "mpirun_output.h"
#include "place.h"
#include "watchdog.h"

// ---------------------------------------------------------------------------------------------------------------------
// Stopping a rank

static inline void stop_note(int number) {
    if (*stop_flag() == 2 && number != SIGUSR1) _exit(128 + number);
    if (number != SIGUSR1)
        *stop_flag() = 2;
    else if (*stop_flag() == 0)
        *stop_flag() = 1;
}

static inline void *stop_thread(void *argument) {
    sigset_t signals = *(sigset_t *)argument;
    free(argument);
    for (int number; sigwait(&signals, &number) == 0;) stop_note(number);
    return NULL;
}

// From now on SIGTERM, SIGINT and SIGUSR1 are noted for stop_requested(), in the same source file as this call. Must
// come before other threads start: a thread of its own waits for the signals, and all others block them. With a
// handler, which runs on the stack of a thread that computes, one stopped run in fifty ended in a corrupted heap,
// inside oneDNN (its generated kernels presumably keep data below the stack pointer); this way none in 250 did.
static inline void stop_on_signals(void) {
    sigset_t *signals = (sigset_t *)malloc(sizeof *signals);
    pthread_t thread;
    if (signals == NULL) die("no memory for a set of signals");
    stop_signals(signals);
    pthread_sigmask(SIG_BLOCK, signals, NULL);
    const int status = pthread_create(&thread, NULL, stop_thread, signals);
    if (status != 0) die("the thread that waits for signals cannot be started: %s", strerror(status));
    pthread_detach(thread);
}

// Whether this rank was asked to stop. Signals reach ranks at different moments: they have to agree.
static inline int stop_requested(void) {
    return *stop_flag() != 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Starting ranks

// The launcher's folder holds the files of mpirun and of its ranks, so that they can be removed even if mpirun was
// killed. A launcher that is killed itself leaves it behind, and the next one removes it: LAUNCH_LOCK in it is locked
// while its launcher or mpirun lives. It gets that name once it is locked, so a folder without it is nobody's to
// remove.
#define LAUNCH_FOLDER "train_gpt_mpirun."
#define LAUNCH_LOCK "lock"

static inline int launch_remove(const char *path, const struct stat *status, int type, struct FTW *place) {
    (void)status;
    (void)type;
    (void)place;
    remove(path);
    return 0;
}

static inline void launch_folder_remove(const char *folder) {
    if (folder[0] != '\0') nftw(folder, launch_remove, 16, FTW_DEPTH | FTW_PHYS);
}

// Removes the folders in `parent` that killed launchers have left.
static inline void launch_folder_sweep(const char *parent) {
    DIR *directory = opendir(parent);
    if (directory == NULL) return;
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        char folder[PATH_MAX], lock[PATH_MAX];
        if (strncmp(entry->d_name, LAUNCH_FOLDER, strlen(LAUNCH_FOLDER)) != 0) continue;
        if (snprintf(folder, sizeof folder, "%s/%s", parent, entry->d_name) >= (int)sizeof folder) continue;
        if (snprintf(lock, sizeof lock, "%s/" LAUNCH_LOCK, folder) >= (int)sizeof lock) continue;
        struct stat status;
        if (lstat(folder, &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != geteuid()) continue;
        const int file = open(lock, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        if (file < 0) continue;
        if (flock(file, LOCK_EX | LOCK_NB) == 0) launch_folder_remove(folder);
        close(file);
    }
    closedir(directory);
}

// Locks a new folder. The file stays open in mpirun.
static inline bool launch_folder_lock(const char *folder) {
    char early[PATH_MAX], lock[PATH_MAX];
    snprintf(early, sizeof early, "%s/" LAUNCH_LOCK ".new", folder);
    snprintf(lock, sizeof lock, "%s/" LAUNCH_LOCK, folder);
    const int file = open(early, O_WRONLY | O_CREAT | O_EXCL, 0600);
    return file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0 && rename(early, lock) == 0;
}

// Makes the folder where there is room: a rank that writes where there is none dies. "": nowhere, so Open MPI chooses.
static inline void launch_folder(char *folder, size_t size, int nproc) {
    // Open MPI 5 takes 16 MB for a rank, 4 takes 4. The program itself uses up to four segments of 24 MB in /dev/shm
    // (cpu/shared_memory.h), which are to have it for themselves where it is small.
    const double needed = 16e6 * nproc + 4 * 24e6;
    const char *const parents[] = {"/dev/shm", getenv("TMPDIR"), "/tmp"};
    for (size_t i = 0; i < sizeof parents / sizeof parents[0]; i++)
        if (parents[i] != NULL) launch_folder_sweep(parents[i]);
    for (size_t i = 0; i < sizeof parents / sizeof parents[0]; i++) {
        struct statvfs room;
        if (parents[i] == NULL || statvfs(parents[i], &room) != 0) continue;
        if ((double)room.f_bavail * (double)room.f_frsize < needed) continue;
        const int length = snprintf(folder, size, "%s/" LAUNCH_FOLDER "XXXXXX", parents[i]);
        if (length <= 0 || (size_t)length >= size || mkdtemp(folder) == NULL) continue;
        if (launch_folder_lock(folder)) return;
        launch_folder_remove(folder);
    }
    folder[0] = '\0';
}

// The environment that mpirun and the ranks get: nothing of a surrounding batch job or mpirun, which would send ranks
// elsewhere; and what Open MPI needs to work as root, in containers, and on one machine.
static inline void launch_environment(int nproc, const char *folder) {
    extern char **environ;
    static const char *const foreign[] = {"SLURM_", "PMI_", "PMIX_", "PRTE_", "OMPI_"};
    const bool nested = getenv("OMPI_COMM_WORLD_RANK") != NULL; // then OMPI_MCA_ variables are mpirun's, not the user's
    for (char **variable = environ; *variable != NULL;) {
        char name[256];
        bool drop = false;
        snprintf(name, sizeof name, "%.*s", (int)strcspn(*variable, "="), *variable);
        for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++)
            drop = drop || strncmp(name, foreign[i], strlen(foreign[i])) == 0;
        if (strncmp(name, "OMPI_MCA_", 9) == 0) drop = nested;
        if (drop && unsetenv(name) == 0)
            variable = environ; // unsetenv has moved the others
        else
            variable++;
    }
    const int cores = machine_cores();
    char number[16];
    snprintf(number, sizeof number, "%d", cores / nproc > 1 ? cores / nproc : 1);
    setenv("OMP_NUM_THREADS", number, 0);
    snprintf(number, sizeof number, "%d", (int)getppid());
    setenv(LAUNCH_MARK, number, 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMPI_MCA_plm", "isolated", 1); // no remote machines: needs no ssh
    setenv("OMPI_MCA_ras", "^slurm,tm,lsf,alps,gridengine", 1);
    setenv("OMPI_MCA_orte_default_hostfile", "none", 1);
    setenv("OMPI_MCA_state_base_verbose", "1", 1); // reports of states, for mpirun_output.h
    setenv("PRTE_MCA_state_base_verbose", "1", 1); // Open MPI 5's name for it
    setenv("HWLOC_HIDE_ERRORS", "2", 0);           // containers may have no /sys
    setenv("OMPI_MCA_btl", "self,vader", 0);
    setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0); // containers forbid reading another process's memory
    if (folder[0] != '\0') {
        setenv("OMPI_MCA_btl_vader_backing_directory", folder, 0);
        setenv("OMPI_MCA_orte_tmpdir_base", folder, 0);
        setenv("PRTE_MCA_prte_tmpdir_base", folder, 0); // Open MPI 5's name for it
    }
    if (nproc >= cores) setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
}

// In the forked process: becomes mpirun, whose stderr is `errors`. Returns only if there is none.
static inline void launch_exec(pid_t launcher, int errors, char *const *arguments) {
    setpgid(0, 0);                   // Ctrl-C is for the launcher, which passes it on
    prctl(PR_SET_PDEATHSIG, SIGHUP); // mpirun then ends the ranks and removes its files
    if (getppid() != launcher) _exit(EXIT_RUN);
    const int null = open("/dev/null", O_RDONLY);
    if (null >= 0) dup2(null, STDIN_FILENO);
    dup2(errors, STDERR_FILENO);
    signal(SIGHUP, SIG_DFL);
    signal(SIGUSR1, SIG_DFL);
    sigset_t
        blocked; // for mpirun; it starts ranks with none. SIGPIPE: that nobody reads a run's output does not end it.
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGTERM);
    sigaddset(&blocked, SIGINT);
    sigaddset(&blocked, SIGPIPE);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    execvp("mpirun.openmpi", arguments); // Debian's name where several MPIs are installed
    execvp("mpirun", arguments);
}

// Whether mpirun was sent SIGTERM or SIGINT, which it has blocked.
static inline bool launch_pending(pid_t mpirun) {
    char path[64], line[128];
    unsigned long long pending = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)mpirun);
    FILE *file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "ShdPnd: %llx", &pending) == 1) break;
    if (file != NULL) fclose(file);
    return (pending >> (SIGTERM - 1) & 1) != 0 || (pending >> (SIGINT - 1) & 1) != 0;
}

// Waits for mpirun, passing signals on. Returns its wait status; *asked: the run was asked to stop; *killed: the signal
// that, coming after another, ended it at once.
static inline int launch_wait(pid_t mpirun, const sigset_t *signals, bool *asked, int *killed) {
    const struct timespec second = {1, 0};
    int status = 0, stops = 0;
    while (waitpid(mpirun, &status, WNOHANG) == 0) {
        const int number = sigtimedwait(signals, NULL, &second);
        if (number == SIGCHLD) continue;
        if (number > 0 || launch_pending(mpirun)) *asked = true;
        if (number == SIGTERM || number == SIGINT) stops++;
        if (stops > 1 && *killed == 0) {
            *killed = number;
            kill(mpirun, SIGKILL); // the ranks die with it; asked otherwise while it ends, it may crash
        } else if (*asked) {
            kill(mpirun, SIGUSR1);
        }
    }
    return status;
}

// Starts nproc ranks of this program with these arguments on this machine and waits for them. Returns the run's exit
// code: that of the rank that failed first; EXIT_RUN if that died of a signal, which is then the message; EXIT_INPUT if
// there is no mpirun.
static inline int launch_ranks(int nproc, char **argv) {
    char program[PATH_MAX], ranks[16], host[32];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length < 0) die("/proc/self/exe: %s", strerror(errno));
    program[length] = '\0';
    snprintf(ranks, sizeof ranks, "%d", nproc);
    snprintf(host, sizeof host, "localhost:%d", nproc);
    const char *const options[] = {"mpirun", "--host", host, "--bind-to", "none", "-n", ranks, program};
    const int option_count = (int)(sizeof options / sizeof options[0]);
    int argc = 0;
    while (argv[argc] != NULL) argc++;
    char **arguments = (char **)calloc((size_t)(option_count + argc + 1), sizeof(char *));
    int failure[2], errors[2]; // carry errno when there is no mpirun; mpirun's stderr
    if (arguments == NULL || pipe2(failure, O_CLOEXEC) != 0 || pipe2(errors, O_CLOEXEC) != 0)
        die("mpirun: %s", strerror(errno));
    for (int i = 0; i < option_count; i++) arguments[i] = (char *)options[i];
    for (int i = 1; i < argc; i++) arguments[option_count + i - 1] = argv[i];

    sigset_t signals;
    stop_signals_hold(&signals);
    fflush(NULL);
    char folder[256];
    launch_folder(folder, sizeof folder, nproc);
    const pid_t launcher = getpid(), mpirun = fork();
    if (mpirun < 0) die("fork: %s", strerror(errno));
    if (mpirun == 0) {
        launch_environment(nproc, folder);
        launch_exec(launcher, errors[1], arguments);
        const int reason = errno;
        if (write(failure[1], &reason, sizeof reason) < 0) _exit(EXIT_RUN);
        _exit(EXIT_INPUT);
    }
    free(arguments);
    close(failure[1]);
    close(errors[1]);
    MpirunOutput output;
    if (!mpirun_output_start(&output, errors[0], STDERR_FILENO)) die("mpirun: %s", strerror(errno));
    int reason = 0, killed = 0;
    bool asked = false;
    if (read(failure[0], &reason, sizeof reason) != (ssize_t)sizeof reason) reason = 0;
    close(failure[0]);
    const int status = launch_wait(mpirun, &signals, &asked, &killed);
    mpirun_output_finish(&output);
    launch_folder_remove(folder);
    if (reason != 0) {
        fprintf(stderr,
                "train_gpt: error: --nproc %d needs Open MPI's mpirun, which cannot be started (%s): install the "
                "package openmpi-bin, or use --nproc 1\n",
                nproc, strerror(reason));
        return EXIT_INPUT;
    }
    if (killed != 0) return 128 + killed;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code <= 128) return code;
    const bool stop = code == 128 + SIGTERM || code == 128 + SIGINT || code == 128 + SIGUSR1;
    if (asked && stop && (WIFSIGNALED(status) || output.signalled >= 0))
        return EXIT_STOPPED; // before mpirun or the ranks listened: nothing was there to save
    char name[64] = "";
    gethostname(name, sizeof name - 1);
    if (WIFSIGNALED(status))
        fprintf(stderr, "train_gpt: mpirun on %s was ended by signal %d (%s)\n", name, code - 128,
                strsignal(code - 128));
    else if (output.signalled >= 0)
        fprintf(stderr, "train_gpt: rank %d of %d on %s was ended by signal %d (%s)\n", output.signalled, nproc, name,
                code - 128, strsignal(code - 128));
    else if (output.notice[0] != '\0')
        fprintf(stderr, "train_gpt: %s\n", output.notice);
    else if (!output.explained)
        fprintf(stderr, "train_gpt: mpirun on %s ended with exit code %d\n", name, code);
    return EXIT_RUN;
}

#endif
