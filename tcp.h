// tcp.h: bytes over TCP, by a deadline. Sockets are non-blocking; a status is 0 or an errno.
#ifndef TCP_H
#define TCP_H

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

// Seconds, of a clock that nobody sets.
static inline double tcp_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static inline double tcp_sooner(double a, double b) {
    return a < b ? a : b;
}

// Milliseconds to wait for, at most, until a moment; rounded up, so that it has come when they are over.
static inline int tcp_ms(double deadline) {
    const double ms = 1e3 * (deadline - tcp_now()) + 1;
    return ms < 0 ? 0 : ms > 60000 ? 60000 : (int)ms;
}

// Waits until a socket is ready: 0, or an errno.
static inline int tcp_ready(int socket, short events, double deadline) {
    for (;;) {
        struct pollfd ready = {socket, events, 0};
        const int count = poll(&ready, 1, tcp_ms(deadline));
        if (count > 0) return 0;
        if (count < 0 && errno != EINTR) return errno;
        if (tcp_now() >= deadline) return ETIMEDOUT;
    }
}

// Sends, or receives, all bytes: 0, or an errno; ECONNRESET where the other side has closed.
static inline int tcp_send(int socket, const void *data, size_t bytes, double deadline) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t sent = send(socket, (const char *)data + done, bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) done += (size_t)sent;
        if (sent >= 0 || errno == EINTR) continue;
        if (errno != EAGAIN) return errno;
        const int status = tcp_ready(socket, POLLOUT, deadline);
        if (status != 0) return status;
    }
    return 0;
}

static inline int tcp_receive(int socket, void *data, size_t bytes, double deadline) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = recv(socket, (char *)data + done, bytes - done, MSG_DONTWAIT);
        if (got == 0) return ECONNRESET;
        if (got > 0) done += (size_t)got;
        if (got >= 0 || errno == EINTR) continue;
        if (errno != EAGAIN) return errno;
        const int status = tcp_ready(socket, POLLIN, deadline);
        if (status != 0) return status;
    }
    return 0;
}

static inline const char *tcp_reason(int status) {
    if (status == ECONNRESET || status == EPIPE) return "its connection was closed";
    return status == ETIMEDOUT ? "nothing was heard of it in time" : strerror(status);
}

// A silent loss of the other side, or of the way to it, is an error after the timeout: what is under way has to be
// acknowledged by then, and an idle connection is asked. No sooner: what ranks train over may be another network.
static inline void tcp_configure(int socket, double timeout) {
    const int on = 1, probes = 3, seconds = timeout < 4 ? 1 : timeout > 1000 ? 250 : (int)(timeout / 4);
    const unsigned int user_ms = timeout > 1000 ? 1000000 : (unsigned int)(1000 * timeout);
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_ms, sizeof user_ms);
}

#endif
