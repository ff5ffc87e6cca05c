// control_line.h: ranks that have met (rendezvous.h) watch over one another until they say goodbye.
//
// A thread of each rank says every second that it is alive, to rank 0, and rank 0's to all. A rank whose connection
// ends without a goodbye, or that is not heard from for the timeout (it is stopped, or cut off), is lost: rank 0 says
// which and where, and all ranks exit with EXIT_RUN. After a connection has ended they wait some seconds before that: a
// rank that ends may have a reason, which it, its launcher, or the others in an orderly end are about to say.
//
// The program calls control_start() and control_stop(); between them the connections are the thread's.
#ifndef CONTROL_LINE_H
#define CONTROL_LINE_H

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include "rendezvous.h"

enum { CONTROL_LAST_SECONDS = 4 }; // longer than a launcher waits before it ends what is left of a run (spawn.h)

// What a rank says: single bytes, which do not arrive in part. CONTROL_LOST: rank 0 has lost one, and says which.
enum { CONTROL_ALIVE = 'a', CONTROL_GOODBYE = 'g', CONTROL_LOST = 'l' };

typedef struct {
    Rendezvous *ranks;
    double *heard;         // [n_peers]: when, last
    struct pollfd *polled; // [n_peers + 1]: connections, -1 after a goodbye; and `wake`
    int wake;              // ends the thread
    int lost;              // the first that was lost, or -1
    const char *reason;    // why
    double end;            // of the run, for that
    bool running;
    pthread_t thread;
} ControlLine;

static inline void control_lose(ControlLine *self, int number, int status) {
    self->polled[number].fd = -1;
    if (self->lost >= 0) return;
    self->lost = number;
    self->reason = tcp_reason(status);
    self->end = tcp_now() + (status == ECONNRESET ? CONTROL_LAST_SECONDS : 0);
}

// Ends all ranks.
static inline void control_end(const ControlLine *self) {
    const Rendezvous *ranks = self->ranks;
    const RendezvousPeer *peer = &ranks->peers[self->lost];
    const char lost = CONTROL_LOST;
    for (int i = 0; i < ranks->n_peers && ranks->rank == 0; i++)
        if (self->polled[i].fd >= 0) send(ranks->peers[i].socket, &lost, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    die("rank %d on %s is lost: %s", peer->rank, peer->host, self->reason);
}

// Reads what a rank has said since.
static inline void control_hear(ControlLine *self, int number) {
    char said[64];
    ssize_t got;
    while ((got = recv(self->ranks->peers[number].socket, said, sizeof said, MSG_DONTWAIT)) > 0) {
        self->heard[number] = tcp_now();
        for (ssize_t i = 0; i < got; i++) {
            if (said[i] == CONTROL_LOST && self->ranks->rank > 0) {
                fflush(NULL);
                _exit(EXIT_RUN); // rank 0 says which
            }
            if (said[i] != CONTROL_GOODBYE) continue;
            self->polled[number].fd = -1;
            return;
        }
    }
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    control_lose(self, number, got == 0 ? ECONNRESET : errno);
}

static inline void *control_thread(void *argument) {
    ControlLine *self = (ControlLine *)argument;
    const Rendezvous *ranks = self->ranks;
    const int n = ranks->n_peers;
    const char alive = CONTROL_ALIVE;
    for (double beat = 0;;) {
        poll(self->polled, (nfds_t)n + 1, tcp_ms(beat));
        if (self->polled[n].revents != 0) return NULL;
        for (int i = 0; i < n; i++)
            if (self->polled[i].fd >= 0 && self->polled[i].revents != 0) control_hear(self, i);
        const double now = tcp_now();
        if (now < beat) continue;
        beat = now + 1;
        for (int i = 0; i < n; i++) {
            if (self->polled[i].fd < 0) continue;
            // Whether that arrives is found out by reading.
            send(ranks->peers[i].socket, &alive, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (now - self->heard[i] > ranks->timeout) control_lose(self, i, ETIMEDOUT);
        }
        if (self->lost >= 0 && now >= self->end) control_end(self);
    }
}

// From now on the loss of a rank ends all. ranks: as they have met, with nothing under way.
static inline void control_start(ControlLine *self, Rendezvous *ranks) {
    memset(self, 0, sizeof *self);
    self->ranks = ranks;
    self->lost = -1;
    self->heard = (double *)calloc((size_t)ranks->n_peers, sizeof *self->heard);
    self->polled = (struct pollfd *)calloc((size_t)ranks->n_peers + 1, sizeof *self->polled);
    self->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (self->heard == NULL || self->polled == NULL || self->wake < 0) die("no room to watch %d ranks", ranks->n_peers);
    for (int i = 0; i <= ranks->n_peers; i++) {
        self->polled[i].fd = i < ranks->n_peers ? ranks->peers[i].socket : self->wake;
        self->polled[i].events = POLLIN;
        if (i < ranks->n_peers) self->heard[i] = tcp_now();
    }
    sigset_t all, before; // signals are for other threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int status = pthread_create(&self->thread, NULL, control_thread, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0) die("the thread that watches the other ranks cannot be started: %s", strerror(status));
    self->running = true;
}

// Says goodbye: from now on this rank may end, and so may the others.
static inline void control_stop(ControlLine *self) {
    if (!self->running) return;
    const uint64_t one = 1;
    const char goodbye = CONTROL_GOODBYE;
    if (write(self->wake, &one, sizeof one) < 0) die("eventfd: %s", strerror(errno));
    pthread_join(self->thread, NULL);
    for (int i = 0; i < self->ranks->n_peers; i++)
        send(self->ranks->peers[i].socket, &goodbye, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(self->wake);
    free(self->heard);
    free(self->polled);
    self->running = false;
}

#endif
