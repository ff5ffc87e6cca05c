// watchdog.h: what this rank exchanges and what for, and an end to calls that do not return.
//
// A rank that waits for others too long says what it waits in. Whoever issues an exchange notes its purpose; whoever
// executes it (the stand-in for NCCL on the CPU, comm.h on GPUs) keeps a copy with the call. Some calls wait by
// themselves, without looking at a clock: ranks that meet or part, and NCCL's, which connects ranks at their first
// exchange. They stand between watchdog_begin() and watchdog_end(), and a thread ends the process if they take too
// long.
#ifndef WATCHDOG_H
#define WATCHDOG_H

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include "error.h"

// Both texts stay where they are until the process ends: a unit's name ("block 3") or what an exchange is for
// ("loss and norm"); and the part of the run, with its step unless that is negative ("evaluation after step", 20).
typedef struct {
    const char *what, *phase;
    int64_t step;
} Purpose;

// Of what this thread issues next.
static inline Purpose *purpose_now(void) {
    static __thread Purpose purpose = {NULL, NULL, -1};
    return &purpose;
}

enum { PURPOSE_TEXT = 160 };

// "block 3, step 17"; returns `text`, PURPOSE_TEXT bytes.
static inline const char *purpose_text(const Purpose *purpose, char *text) {
    char step[32] = "";
    if (purpose->step >= 0) snprintf(step, sizeof step, " %lld", (long long)purpose->step);
    snprintf(text, PURPOSE_TEXT, "%.60s%s%.60s%s", purpose->what != NULL ? purpose->what : "an exchange",
             purpose->phase != NULL ? ", " : "", purpose->phase != NULL ? purpose->phase : "", step);
    return text;
}

// What signals have asked this process for (launch.h): 0, nothing; 1, SIGUSR1, to stop after its step; 2, SIGTERM or
// SIGINT, the same, though who sends them may mean to end it at once.
static inline volatile sig_atomic_t *stop_flag(void) {
    static volatile sig_atomic_t flag = 0;
    return &flag;
}

// The signals that ask a run to stop.
static inline void stop_signals(sigset_t *signals) {
    sigemptyset(signals);
    sigaddset(signals, SIGTERM);
    sigaddset(signals, SIGINT);
    sigaddset(signals, SIGUSR1);
}

// From now on those, and that a process it has started ended, wait in a launcher until it takes them.
static inline void stop_signals_hold(sigset_t *signals) {
    stop_signals(signals);
    sigaddset(signals, SIGCHLD);
    signal(SIGCHLD, SIG_DFL);
    sigprocmask(SIG_BLOCK, signals, NULL);
}

static inline double watchdog_clock(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// How long this process has waited. Time in which it did not run, as a batch system may suspend a whole job, does not
// count: between two looks, which come much more often, no more than this passes.
enum { PATIENCE_PAUSE_SECONDS = 2 };

typedef struct {
    double begin, looked;
} Patience;

static inline Patience patience_begin(void) {
    const double now = watchdog_clock();
    const Patience patience = {now, now};
    return patience;
}

static inline double patience_waited(Patience *patience) {
    const double now = watchdog_clock(), pause = now - patience->looked;
    if (pause > PATIENCE_PAUSE_SECONDS) patience->begin += pause - PATIENCE_PAUSE_SECONDS;
    patience->looked = now;
    return now - patience->begin;
}

// The call at hand; atomic, as the thread reads it.
typedef struct {
    bool started;
    double begin, seconds; // begin 0: there is none
    const char *failure;   // what to say of this rank: "has not met the other ranks"
    Purpose purpose;
} Watchdog;

static inline Watchdog *watchdog(void) {
    static Watchdog self = {false, 0, 0, NULL, {NULL, NULL, -1}};
    return &self;
}

static inline void *watchdog_run(void *argument) {
    Watchdog *self = (Watchdog *)argument;
    const struct timespec pause = {0, 200000000};
    double watched = 0; // the beginning of the call that patience is for
    for (Patience patience = patience_begin();;) {
        nanosleep(&pause, NULL);
        double begin, seconds;
        __atomic_load(&self->begin, &begin, __ATOMIC_ACQUIRE);
        __atomic_load(&self->seconds, &seconds, __ATOMIC_RELAXED);
        if (begin != watched) patience.begin = begin;
        watched = begin;
        if (patience_waited(&patience) < seconds || begin == 0) continue;
        Purpose purpose;
        char text[PURPOSE_TEXT] = "";
        purpose.what = __atomic_load_n(&self->purpose.what, __ATOMIC_RELAXED);
        purpose.phase = __atomic_load_n(&self->purpose.phase, __ATOMIC_RELAXED);
        purpose.step = __atomic_load_n(&self->purpose.step, __ATOMIC_RELAXED);
        if (purpose.what != NULL) purpose_text(&purpose, text);
        die("%s%s%s within %.0f s", text, text[0] != '\0' ? ": " : "",
            __atomic_load_n(&self->failure, __ATOMIC_RELAXED), seconds);
    }
    return NULL;
}

// Starts the thread, which takes no signals; before the first call that it is to watch.
static inline void watchdog_start(void) {
    Watchdog *self = watchdog();
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int status = pthread_create(&thread, NULL, watchdog_run, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0) die("the thread that watches the clock cannot be started: %s", strerror(status));
    pthread_detach(thread);
    self->started = true;
}

// The calling thread is about to make a call that has to return within so many seconds. failure: what to say if not.
static inline void watchdog_begin(const char *failure, double seconds) {
    Watchdog *self = watchdog();
    if (!self->started) return;
    const Purpose *purpose = purpose_now();
    const double now = watchdog_clock();
    __atomic_store_n(&self->purpose.what, purpose->what, __ATOMIC_RELAXED);
    __atomic_store_n(&self->purpose.phase, purpose->phase, __ATOMIC_RELAXED);
    __atomic_store_n(&self->purpose.step, purpose->step, __ATOMIC_RELAXED);
    __atomic_store_n(&self->failure, failure, __ATOMIC_RELAXED);
    __atomic_store(&self->seconds, &seconds, __ATOMIC_RELAXED);
    __atomic_store(&self->begin, &now, __ATOMIC_RELEASE);
}

static inline void watchdog_end(void) {
    const double none = 0;
    __atomic_store(&watchdog()->begin, &none, __ATOMIC_RELEASE);
}

// Whether a rank that has waited so many seconds should say in what: once, when something ends the run that has found
// out before the deadline (mpirun, that it has lost a node). later: seconds that others in this process, who know more,
// have first.
static inline bool watchdog_asked(double waited, double later) {
    enum { LONG_SECONDS = 3 };
    static int said = 0;     // atomic
    static double asked = 0; // when somebody first noticed; atomic
    if (*stop_flag() != 2 || waited < LONG_SECONDS) return false;
    const double now = watchdog_clock();
    double since;
    __atomic_load(&asked, &since, __ATOMIC_RELAXED);
    if (since == 0) {
        since = now;
        __atomic_store(&asked, &since, __ATOMIC_RELAXED);
    }
    return now - since >= later && __atomic_exchange_n(&said, 1, __ATOMIC_RELAXED) == 0;
}

#endif
