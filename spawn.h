// spawn.h: --nproc N where ranks need no mpirun: N processes of this program on this machine.
//
// Each rank finds its place, and where to meet (meeting_point.h), in its environment. The launcher passes signals on as
// launch.h's does: SIGTERM, SIGINT and SIGUSR1 become SIGUSR1, which a rank that does not listen yet finds waiting for
// it; a second SIGTERM or SIGINT ends all at once. The first rank that fails decides on the exit code; the others get
// some seconds to say what they have to say. Ranks die with their launcher.
#ifndef SPAWN_H
#define SPAWN_H

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "error.h"
#include "meeting_point.h"
#include "place.h"
#include "tcp.h"
#include "watchdog.h"

enum { SPAWN_LAST_SECONDS = 2 }; // for the others, once a rank has failed

typedef struct {
    int ranks, running;
    pid_t *pids;  // of those that run; 0: it has ended
    int first;    // the rank that failed first, or -1
    int status;   // its wait status
    bool stopped; // a rank ended because it was asked to
    bool asked;   // the run was asked to stop
    int killed;   // the signal that, coming after another, ended it at once
    double end;   // when what is left is killed; 0: not
} Spawn;

// A port of this machine that nobody has, of those that meeting_point() takes.
static inline int spawn_port(uint64_t random) {
    for (uint64_t i = 0; i < MEETING_PORTS; i++) {
        const int port = MEETING_FIRST_PORT + (int)((random + i) % MEETING_PORTS), on = 1;
        struct sockaddr_in address;
        memset(&address, 0, sizeof address);
        address.sin_family = AF_INET;
        address.sin_port = htons((uint16_t)port);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0) die("socket: %s", strerror(errno));
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on); // as rank 0 will
        const bool free_port = bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 1) == 0;
        close(fd);
        if (free_port) return port;
    }
    die("no port from %d on is free, at which ranks could meet", (int)MEETING_FIRST_PORT);
}

// What ranks share.
static inline void spawn_environment(int nproc) {
    uint64_t random[2];
    char text[64];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) die("getrandom: %s", strerror(errno));
    snprintf(text, sizeof text, "%016llx", (unsigned long long)random[0]);
    setenv("TRAIN_GPT_JOB", text, 1);
    unsetenv("TORCHELASTIC_USE_AGENT_STORE");
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    snprintf(text, sizeof text, "%d", spawn_port(random[1]));
    setenv("MASTER_PORT", text, 1);
    snprintf(text, sizeof text, "%d", nproc);
    setenv("WORLD_SIZE", text, 1);
    setenv("LOCAL_WORLD_SIZE", text, 1);
    snprintf(text, sizeof text, "%d", (int)getpid());
    setenv(SPAWN_MARK, text, 1);
}

// In the forked process: becomes a rank.
static inline void spawn_exec(int rank, pid_t launcher, char **argv) {
    char text[16];
    setpgid(0, 0);                    // Ctrl-C is for the launcher, which passes it on
    prctl(PR_SET_PDEATHSIG, SIGKILL); // stays over exec
    if (getppid() != launcher) _exit(EXIT_RUN);
    const int null = open("/dev/null", O_RDONLY);
    if (null >= 0) dup2(null, STDIN_FILENO);
    if (null > STDIN_FILENO) close(null);
    snprintf(text, sizeof text, "%d", rank);
    setenv("RANK", text, 1);
    setenv("LOCAL_RANK", text, 1);
    signal(SIGUSR1, SIG_DFL);
    sigset_t blocked; // until the rank waits for it (stop_on_signals())
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    execv("/proc/self/exe", argv);
    fprintf(stderr, "train_gpt: rank %d cannot be started: %s\n", rank, strerror(errno));
    _exit(EXIT_RUN);
}

static inline void spawn_signal(const Spawn *self, int number) {
    for (int r = 0; r < self->ranks; r++)
        if (self->pids[r] > 0) kill(self->pids[r], number);
}

// Notes which ranks have ended, and how.
static inline void spawn_reap(Spawn *self) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        int rank = 0;
        while (rank < self->ranks && self->pids[rank] != pid) rank++;
        if (rank == self->ranks) continue;
        self->pids[rank] = 0;
        self->running--;
        if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_STOPPED) self->stopped = true;
        if (WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == EXIT_STOPPED)) continue;
        if (self->first >= 0) continue;
        self->first = rank;
        self->status = status;
        self->end = tcp_now() + SPAWN_LAST_SECONDS;
    }
}

// The exit code of a run whose ranks have all ended.
static inline int spawn_code(const Spawn *self) {
    if (self->killed != 0) return 128 + self->killed;
    if (self->first < 0) return self->stopped ? EXIT_STOPPED : 0;
    if (WIFEXITED(self->status)) return WEXITSTATUS(self->status);
    const int number = WTERMSIG(self->status);
    if (self->asked && (number == SIGTERM || number == SIGINT || number == SIGUSR1))
        return EXIT_STOPPED; // before it listened: nothing was there to save
    char host[64] = "";
    gethostname(host, sizeof host - 1);
    fprintf(stderr, "train_gpt: rank %d of %d on %s was ended by signal %d (%s)\n", self->first, self->ranks, host,
            number, strsignal(number));
    return EXIT_RUN;
}

// Starts nproc ranks of this program with these arguments on this machine and waits for them. Returns the run's exit
// code: that of the rank that failed first; EXIT_RUN if that died of a signal, which is then the message.
static inline int spawn_ranks(int nproc, char **argv) {
    const struct timespec moment = {0, 200000000};
    Spawn self;
    memset(&self, 0, sizeof self);
    self.ranks = nproc;
    self.first = -1;
    self.pids = (pid_t *)calloc((size_t)nproc, sizeof(pid_t));
    if (self.pids == NULL) die("no room for %d ranks", nproc);
    sigset_t signals;
    stop_signals_hold(&signals);
    spawn_environment(nproc);
    fflush(NULL);
    const pid_t launcher = getpid();
    for (int r = 0; r < nproc; r++) {
        self.pids[r] = fork();
        if (self.pids[r] < 0) die("rank %d of %d cannot be started: %s", r, nproc, strerror(errno)); // ends the others
        if (self.pids[r] == 0) spawn_exec(r, launcher, argv);
        self.running++;
    }
    for (int stops = 0; self.running > 0;) {
        const int number = sigtimedwait(&signals, NULL, &moment);
        const bool stop = number == SIGTERM || number == SIGINT;
        if (stop && ++stops > 1 && self.killed == 0) self.killed = number;
        if (stop || number == SIGUSR1) self.asked = true;
        spawn_reap(&self);
        if (self.killed != 0 || (self.end > 0 && tcp_now() >= self.end))
            spawn_signal(&self, SIGKILL);
        else if (stop || number == SIGUSR1)
            spawn_signal(&self, SIGUSR1);
    }
    free(self.pids);
    return spawn_code(&self);
}

#endif
