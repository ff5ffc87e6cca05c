// rendezvous.h: ranks meet over TCP and exchange a few bytes.
//
// Rank 0 listens at the meeting point; the others connect to it, however late it comes, and say what program, job and
// rank they are. It refuses what does not belong, with a reason that the refused rank gets to read, pays no attention
// to strangers who say something else, or nothing, and begins when all are there. Nobody waits for longer than the
// timeout (a name that does not resolve may take some seconds more: the resolver's own bound), and then it says who is
// missing.
//
// Then rank 0 gathers and broadcasts, until the connections are handed to control_line.h.
//
// What arrives is not trusted: its size is what the receiver expects or it is an error, and nothing is allocated by it.
// All ranks run the same program on the same kind of processor, so structs travel as they are.
#ifndef RENDEZVOUS_H
#define RENDEZVOUS_H

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include "error.h"
#include "meeting_point.h"
#include "tcp.h"

#define RENDEZVOUS_MAGIC "traingpt"
enum {
    RENDEZVOUS_VERSION = 1,
    RENDEZVOUS_ANSWER_SECONDS = 10, // that one side may take for a hello, the other for its answer
    RENDEZVOUS_CONNECT_SECONDS = 5, // for an address to accept a connection
    RENDEZVOUS_PORT_SECONDS = 1,    // that a port may stay in use, as by a rank that has met itself
    RENDEZVOUS_GUESTS = 256         // connections that have not yet said who they are
};

// The first words of a rank. Magic and version stand first in every version.
typedef struct {
    char magic[8];
    uint32_t version, world_size, rank, unused;
    uint64_t token;
    char host[64];
} RendezvousHello;

enum { RENDEZVOUS_WELCOME = 1, RENDEZVOUS_REFUSED, RENDEZVOUS_START, RENDEZVOUS_DATA, RENDEZVOUS_FAILED };

// Stands before everything that follows the hello: `bytes` more. REFUSED and FAILED bring a text.
typedef struct {
    char magic[8];
    uint32_t kind, unused;
    uint64_t bytes;
} RendezvousHeader;

// The rank at the other end of a connection.
typedef struct {
    int socket; // -1: none
    int rank;
    char host[64];
    bool left; // it was here, before all were
} RendezvousPeer;

typedef struct {
    int rank, world_size;
    double timeout;        // seconds
    char where[320];       // they meet
    RendezvousPeer *peers; // rank 0: of ranks 1, 2, ...; any other: rank 0 alone
    int n_peers;
    bool told; // this rank's error is what rank 0 has told it, and says itself
} Rendezvous;

// ---------------------------------------------------------------------------------------------------------------------
// Messages

static inline RendezvousHeader rendezvous_header(int kind, size_t bytes) {
    RendezvousHeader header;
    memset(&header, 0, sizeof header);
    memcpy(header.magic, RENDEZVOUS_MAGIC, sizeof header.magic);
    header.kind = (uint32_t)kind;
    header.bytes = bytes;
    return header;
}

// A text behind a header, to a socket that has room for it or is not worth waiting for.
static inline void rendezvous_tell(int socket, int kind, const char *text) {
    char message[sizeof(RendezvousHeader) + sizeof(Error)];
    const size_t length = strnlen(text, sizeof(Error) - 1);
    const RendezvousHeader header = rendezvous_header(kind, length);
    memcpy(message, &header, sizeof header);
    memcpy(message + sizeof header, text, length);
    if (send(socket, message, sizeof header + length, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;
}

// Printable, whatever came.
static inline void rendezvous_clean(char *text, size_t size) {
    text[size - 1] = '\0';
    for (char *c = text; *c != '\0'; c++)
        if ((unsigned char)*c < ' ' || (unsigned char)*c > 126) *c = '?';
}

// ---------------------------------------------------------------------------------------------------------------------
// Rank 0

// A loopback address is listened on alone; any other may be that of any of this machine's interfaces, so all are.
// -1, and an error, where that is not possible.
static inline int rendezvous_listen(const MeetingPoint *point, Error *error) {
    struct addrinfo hints, *found = NULL;
    memset(&hints, 0, sizeof hints);
    hints.ai_flags = AI_NUMERICHOST;
    hints.ai_socktype = SOCK_STREAM;
    struct sockaddr_in6 six;
    struct sockaddr_in four, numeric;
    memset(&six, 0, sizeof six);
    memset(&four, 0, sizeof four);
    six.sin6_family = AF_INET6;
    six.sin6_port = four.sin_port = htons((uint16_t)point->port);
    six.sin6_addr = in6addr_any;
    four.sin_family = AF_INET;
    bool only_four = false;
    if (getaddrinfo(point->address, NULL, &hints, &found) == 0) {
        if (found->ai_family == AF_INET) {
            memcpy(&numeric, found->ai_addr, sizeof numeric);
            only_four = ntohl(numeric.sin_addr.s_addr) >> 24 == 127;
            if (only_four) four.sin_addr = numeric.sin_addr;
        } else if (IN6_IS_ADDR_LOOPBACK(&((struct sockaddr_in6 *)found->ai_addr)->sin6_addr)) {
            six.sin6_addr = in6addr_loopback;
        }
        freeaddrinfo(found);
    }
    const int on = 1, off = 0;
    int status = 0;
    for (const double begin = tcp_now();; usleep(100000)) {
        int listener = only_four ? -1 : socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        const bool is_six = listener >= 0 && setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0;
        if (!is_six) { // a machine without IPv6
            if (listener >= 0) close(listener);
            listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        }
        if (listener < 0) {
            status = errno;
            break;
        }
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if ((is_six ? bind(listener, (struct sockaddr *)&six, sizeof six)
                    : bind(listener, (struct sockaddr *)&four, sizeof four)) == 0 &&
            listen(listener, 4096) == 0)
            return listener;
        status = errno;
        close(listener);
        if (status != EADDRINUSE || tcp_now() - begin > RENDEZVOUS_PORT_SECONDS) break;
    }
    if (status == EADDRINUSE)
        error_set(error,
                  "port %d, where the ranks are to meet, is in use on rank 0's machine, by another run or another "
                  "program: set MASTER_PORT to a free one",
                  point->port);
    else
        error_set(error, "cannot listen on port %d, where the ranks are to meet: %s", point->port, strerror(status));
    return -1;
}

// Files that a process may have open: with many ranks more than the usual 1024.
static inline void rendezvous_allow_files(int count) {
    struct rlimit limit;
    const rlim_t needed = (rlim_t)count + RENDEZVOUS_GUESTS + 256;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
    limit.rlim_cur = limit.rlim_max < needed ? limit.rlim_max : needed;
    setrlimit(RLIMIT_NOFILE, &limit);
}

// A connection that has not yet said who it is.
typedef struct {
    int socket;
    double deadline;
    size_t got; // bytes of the hello
    RendezvousHello hello;
} RendezvousGuest;

typedef struct {
    RendezvousGuest guests[RENDEZVOUS_GUESTS];
    int count;
    Error refused; // who was last, and why
} RendezvousDoor;

// Why a rank is not let in, or "".
static inline void rendezvous_judge(const Rendezvous *self, uint64_t token, const RendezvousHello *hello, Error *why) {
    const RendezvousPeer *peer =
        hello->rank >= 1 && hello->rank < (uint32_t)self->world_size ? &self->peers[hello->rank - 1] : NULL;
    if (hello->version != RENDEZVOUS_VERSION)
        error_set(why,
                  "its program meets by version %u of the protocol, rank 0's by version %d: all ranks need the same",
                  hello->version, (int)RENDEZVOUS_VERSION);
    else if (hello->token != token)
        error_set(why,
                  "it is of another job; if not, the variables that name the job (TRAIN_GPT_JOB, SLURM_JOB_ID, ...) "
                  "differ");
    else if (hello->world_size != (uint32_t)self->world_size)
        error_set(why, "it is one of %u ranks, rank 0 one of %d", hello->world_size, self->world_size);
    else if (hello->rank == 0)
        error_set(why, "two processes were started as rank 0, on %s and on %s", error_identity()->host, hello->host);
    else if (peer == NULL)
        error_set(why, "there is no rank %u of %d", hello->rank, self->world_size);
    else if (peer->socket >= 0)
        error_set(why, "two processes were started as rank %u, on %s and on %s", hello->rank, peer->host, hello->host);
}

// Ends a guest's stay at the door: lets it in as the rank that it says it is, or not. `complete`: the hello is all
// here.
static inline void rendezvous_decide(Rendezvous *self, RendezvousDoor *door, uint64_t token, int number,
                                     bool complete) {
    RendezvousGuest *guest = &door->guests[number];
    RendezvousHello *hello = &guest->hello;
    const bool ours = guest->got >= offsetof(RendezvousHello, world_size) &&
                      memcmp(hello->magic, RENDEZVOUS_MAGIC, sizeof hello->magic) == 0;
    rendezvous_clean(hello->host, sizeof hello->host);
    Error why = {""};
    if (ours && (complete || hello->version != RENDEZVOUS_VERSION)) rendezvous_judge(self, token, hello, &why);
    if (ours && complete && why.text[0] == '\0') {
        RendezvousPeer *peer = &self->peers[hello->rank - 1];
        memcpy(peer->host, hello->host, sizeof peer->host);
        peer->socket = guest->socket;
        peer->left = false;
        tcp_configure(peer->socket, self->timeout);
        rendezvous_tell(peer->socket, RENDEZVOUS_WELCOME, error_identity()->host);
    } else {
        if (why.text[0] != '\0') {
            char rest[256]; // what is left unread at close() would take the answer with it
            rendezvous_tell(guest->socket, RENDEZVOUS_REFUSED, why.text);
            while (recv(guest->socket, rest, sizeof rest, MSG_DONTWAIT) > 0) continue;
            memset(&door->refused, 0, sizeof door->refused);
            if (complete) error_set(&door->refused, "a rank %u on %s: %s", hello->rank, hello->host, why.text);
            error_set(&door->refused, "%s", why.text);
        }
        close(guest->socket);
    }
    *guest = door->guests[--door->count];
}

// Lets in whoever knocks. Where too many say nothing, the one that has done so for longest makes room.
static inline bool rendezvous_open_door(Rendezvous *self, RendezvousDoor *door, uint64_t token, int listener,
                                        Error *error) {
    for (;;) {
        const int socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (socket < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
        if (socket < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) {
            if (door->count == 0) return error_set(error, "cannot accept a connection: %s", strerror(errno));
        } else if (socket < 0) { // it is gone again
            continue;
        }
        if (socket < 0 || door->count == RENDEZVOUS_GUESTS) {
            int oldest = 0;
            for (int i = 1; i < door->count; i++)
                if (door->guests[i].deadline < door->guests[oldest].deadline) oldest = i;
            rendezvous_decide(self, door, token, oldest, false);
        }
        if (socket < 0) continue;
        RendezvousGuest *guest = &door->guests[door->count++];
        memset(guest, 0, sizeof *guest);
        guest->socket = socket;
        guest->deadline = tcp_now() + RENDEZVOUS_ANSWER_SECONDS;
    }
}

// Reads what a guest has said so far.
static inline void rendezvous_listen_to(Rendezvous *self, RendezvousDoor *door, uint64_t token, int number) {
    RendezvousGuest *guest = &door->guests[number];
    const size_t all = sizeof guest->hello, magic = sizeof guest->hello.magic;
    const ssize_t got = recv(guest->socket, (char *)&guest->hello + guest->got, all - guest->got, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR) && tcp_now() < guest->deadline) return;
    if (got > 0) guest->got += (size_t)got;
    const bool stranger = guest->got >= magic && memcmp(guest->hello.magic, RENDEZVOUS_MAGIC, magic) != 0;
    if (got <= 0 || stranger || guest->got == all) rendezvous_decide(self, door, token, number, guest->got == all);
}

// Who has not come: "rank 3", "ranks 1, 4-6".
static inline void rendezvous_missing(const Rendezvous *self, char *text, size_t size) {
    size_t length = 0;
    int count = 0;
    for (int r = 1; r < self->world_size; r++) count += self->peers[r - 1].socket < 0;
    length += (size_t)snprintf(text, size, count == 1 ? "rank" : "ranks");
    const char *separator = " ";
    for (int r = 1; r < self->world_size; r++) {
        if (self->peers[r - 1].socket >= 0) continue;
        int last = r;
        while (last + 1 < self->world_size && self->peers[last].socket < 0) last++;
        if (length + 32 > size) {
            snprintf(text + length, size - length, ", ...");
            return;
        }
        length += (size_t)snprintf(text + length, size - length, last == r ? "%s%d" : "%s%d-%d", separator, r, last);
        separator = ", ";
        r = last;
    }
}

static inline bool rendezvous_absent(const Rendezvous *self, const RendezvousDoor *door, Error *error) {
    char who[300], left[160] = "";
    rendezvous_missing(self, who, sizeof who);
    for (int i = 0; i < self->n_peers && left[0] == '\0'; i++)
        if (self->peers[i].socket < 0 && self->peers[i].left)
            snprintf(left, sizeof left, "; rank %d on %s had come, but left", i + 1, self->peers[i].host);
    const char *refused = door->refused.text;
    return error_set(error, "%s of %d did not come to %s within %.0f s%s%s%s", who, self->world_size, self->where,
                     self->timeout, left, refused[0] != '\0' ? "; refused was " : "", refused);
}

// Lets ranks in until all are there.
static inline bool rendezvous_host(Rendezvous *self, const MeetingPoint *point, Error *error) {
    rendezvous_allow_files(self->world_size);
    const double deadline = tcp_now() + self->timeout;
    const int listener = rendezvous_listen(point, error);
    if (listener < 0) return false;
    RendezvousDoor *door = (RendezvousDoor *)calloc(1, sizeof *door);
    struct pollfd *polled = (struct pollfd *)calloc(1 + (size_t)self->n_peers + RENDEZVOUS_GUESTS, sizeof *polled);
    if (door == NULL || polled == NULL) die("no room for %d ranks to meet", self->world_size);
    for (int missing = self->n_peers; missing > 0 && error->text[0] == '\0';) {
        double next = deadline;
        const int guests = door->count;
        polled[0].fd = listener;
        for (int i = 0; i < self->n_peers; i++) polled[1 + i].fd = self->peers[i].socket; // -1 is passed over
        for (int i = 0; i < guests; i++) {
            polled[1 + self->n_peers + i].fd = door->guests[i].socket;
            next = tcp_sooner(next, door->guests[i].deadline);
        }
        for (int i = 0; i < 1 + self->n_peers + guests; i++) polled[i].events = POLLIN;
        if (poll(polled, (nfds_t)(1 + self->n_peers + guests), tcp_ms(next)) < 0) {
            if (errno != EINTR) die("poll: %s", strerror(errno));
            continue;
        }
        for (int i = 0; i < self->n_peers; i++) { // a rank says nothing until all are there: it has gone
            if (polled[1 + i].fd < 0 || polled[1 + i].revents == 0) continue;
            close(self->peers[i].socket);
            self->peers[i].socket = -1;
            self->peers[i].left = true;
        }
        for (int i = guests - 1; i >= 0; i--) // from the last, as one that is decided on gives its place to the last
            if (polled[1 + self->n_peers + i].revents != 0 || tcp_now() >= door->guests[i].deadline)
                rendezvous_listen_to(self, door, point->token, i);
        if (polled[0].revents != 0) rendezvous_open_door(self, door, point->token, listener, error);
        missing = 0;
        for (int i = 0; i < self->n_peers; i++) missing += self->peers[i].socket < 0;
        if (missing > 0 && tcp_now() >= deadline) rendezvous_absent(self, door, error);
    }
    while (door->count > 0) rendezvous_decide(self, door, point->token, 0, false);
    close(listener);
    free(door);
    free(polled);
    for (int i = 0; i < self->n_peers; i++)
        if (self->peers[i].socket >= 0)
            rendezvous_tell(self->peers[i].socket, error->text[0] == '\0' ? RENDEZVOUS_START : RENDEZVOUS_FAILED,
                            error->text);
    return error->text[0] == '\0';
}

// ---------------------------------------------------------------------------------------------------------------------
// The other ranks

// A connection to one of the addresses of a name; -1, and the reason.
static inline int rendezvous_connect(const MeetingPoint *point, double deadline, Error *why) {
    struct addrinfo hints, *addresses = NULL;
    char port[16];
    memset(&hints, 0, sizeof hints);
    memset(why, 0, sizeof *why);
    hints.ai_flags = AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    snprintf(port, sizeof port, "%d", point->port);
    const int code = getaddrinfo(point->address, port, &hints, &addresses);
    if (code != 0) {
        error_set(why, "%s", code == EAI_SYSTEM ? strerror(errno) : gai_strerror(code));
        return -1;
    }
    int connected = -1;
    for (const struct addrinfo *address = addresses; address != NULL && connected < 0; address = address->ai_next) {
        const int fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0) continue;
        int status = connect(fd, address->ai_addr, address->ai_addrlen) == 0 ? 0 : errno;
        if (status == EINPROGRESS || status == EINTR) {
            socklen_t size = sizeof status;
            status = tcp_ready(fd, POLLOUT, tcp_sooner(deadline, tcp_now() + RENDEZVOUS_CONNECT_SECONDS));
            if (status == 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &status, &size) != 0) status = errno;
        }
        // Where nobody listens, and the port is one that Linux gives to outgoing connections, one may meet itself.
        struct sockaddr_storage own, other;
        socklen_t own_size = sizeof own, other_size = sizeof other;
        memset(&own, 0, sizeof own);
        memset(&other, 0, sizeof other);
        if (status == 0 && getsockname(fd, (struct sockaddr *)&own, &own_size) == 0 &&
            getpeername(fd, (struct sockaddr *)&other, &other_size) == 0 && memcmp(&own, &other, sizeof own) == 0)
            status = ECONNREFUSED;
        if (status == 0) {
            connected = fd;
        } else {
            memset(why, 0, sizeof *why);
            error_set(why, "%s", strerror(status));
            close(fd);
        }
    }
    freeaddrinfo(addresses);
    if (connected < 0) error_set(why, "no address");
    return connected;
}

// The text that follows a header; what is longer than a message is cut.
static inline void rendezvous_text(int socket, const RendezvousHeader *header, double deadline, Error *text) {
    const size_t length = header->bytes < sizeof text->text ? (size_t)header->bytes : sizeof text->text - 1;
    memset(text, 0, sizeof *text);
    if (tcp_receive(socket, text->text, length, deadline) != 0)
        snprintf(text->text, sizeof text->text, "it did not say why");
    rendezvous_clean(text->text, sizeof text->text);
}

// The next message of a rank, which is to be of this kind and size.
static inline bool rendezvous_expect(Rendezvous *self, RendezvousPeer *peer, int kind, size_t bytes, double deadline,
                                     Error *error) {
    RendezvousHeader header;
    Error text;
    const int status = tcp_receive(peer->socket, &header, sizeof header, deadline);
    if (status != 0) return error_set(error, "rank %d on %s is lost: %s", peer->rank, peer->host, tcp_reason(status));
    const bool magic = memcmp(header.magic, RENDEZVOUS_MAGIC, sizeof header.magic) == 0;
    if (magic && header.kind == RENDEZVOUS_FAILED && self->rank > 0) {
        rendezvous_text(peer->socket, &header, deadline, &text);
        self->told = true;
        return error_set(error, "%s", text.text);
    }
    if (!magic || header.kind != (uint32_t)kind || header.bytes != bytes)
        return error_set(error, "rank %d on %s sent something else than was expected: is it the same program?",
                         peer->rank, peer->host);
    return true;
}

// Connects to rank 0, trying until it is there, and waits until all others are.
static inline bool rendezvous_join(Rendezvous *self, const MeetingPoint *point, Error *error) {
    const double begin = tcp_now(), deadline = begin + self->timeout;
    RendezvousPeer *host = &self->peers[0];
    RendezvousHello hello;
    memset(&hello, 0, sizeof hello);
    memcpy(hello.magic, RENDEZVOUS_MAGIC, sizeof hello.magic);
    hello.version = RENDEZVOUS_VERSION;
    hello.world_size = (uint32_t)self->world_size;
    hello.rank = (uint32_t)self->rank;
    hello.token = point->token;
    memcpy(hello.host, error_identity()->host, sizeof hello.host);
    Error why = {""};
    for (unsigned int pause_us = 20000;; pause_us = pause_us < 500000 ? 2 * pause_us : pause_us) {
        const int fd = rendezvous_connect(point, deadline, &why);
        if (fd >= 0) {
            RendezvousHeader header;
            memset(&header, 0, sizeof header);
            const double answer = tcp_sooner(deadline, tcp_now() + RENDEZVOUS_ANSWER_SECONDS);
            int status = tcp_send(fd, &hello, sizeof hello, answer);
            if (status == 0) status = tcp_receive(fd, &header, sizeof header, answer);
            const bool ours = status == 0 && memcmp(header.magic, RENDEZVOUS_MAGIC, sizeof header.magic) == 0;
            if (ours && header.kind == RENDEZVOUS_REFUSED) {
                rendezvous_text(fd, &header, answer, &why);
                close(fd);
                return error_set(error, "rank 0 at %s refuses this rank: %s", self->where, why.text);
            }
            if (ours && header.kind == RENDEZVOUS_WELCOME) {
                rendezvous_text(fd, &header, answer, &why);
                snprintf(host->host, sizeof host->host, "%.63s", why.text);
                host->socket = fd;
                break;
            }
            close(fd);
            error_set(&why, "what is there does not answer as rank 0 would");
        }
        if (tcp_now() + 1e-6 * pause_us >= deadline)
            return error_set(error, "rank 0 cannot be reached at %s (%s), tried for %.0f s: %s", self->where,
                             point->source, tcp_now() - begin, why.text);
        // Not all ranks at the same moments.
        usleep(pause_us / 2 + (unsigned int)((uint64_t)pause_us * (uint64_t)self->rank / (uint64_t)self->world_size));
    }
    tcp_configure(host->socket, self->timeout);
    // Rank 0's own patience ends earlier, and it says what it has waited for.
    return rendezvous_expect(self, host, RENDEZVOUS_START, 0, tcp_now() + self->timeout + RENDEZVOUS_ANSWER_SECONDS,
                             error);
}

// ---------------------------------------------------------------------------------------------------------------------
// What all ranks call, in the same order

// Lets all ranks meet. timeout: seconds, for this and for every exchange. False, and an error: this rank, or some rank,
// cannot take part; self->told where rank 0 says so itself.
static inline bool rendezvous_open(Rendezvous *self, const MeetingPoint *point, int rank, int world_size,
                                   double timeout, Error *error) {
    memset(self, 0, sizeof *self);
    self->rank = rank;
    self->world_size = world_size;
    self->timeout = timeout;
    self->n_peers = rank == 0 ? world_size - 1 : 1;
    snprintf(self->where, sizeof self->where, strchr(point->address, ':') != NULL ? "[%s]:%d" : "%s:%d", point->address,
             point->port);
    self->peers = (RendezvousPeer *)calloc((size_t)self->n_peers + 1, sizeof *self->peers);
    if (self->peers == NULL) die("no room for %d ranks to meet", world_size);
    for (int i = 0; i < self->n_peers; i++) {
        self->peers[i].socket = -1;
        self->peers[i].rank = rank == 0 ? i + 1 : 0;
    }
    return rank == 0 ? rendezvous_host(self, point, error) : rendezvous_join(self, point, error);
}

// Rank 0 tells the others why it gives up.
static inline bool rendezvous_give_up(Rendezvous *self, const Error *error) {
    for (int i = 0; i < self->n_peers && self->rank == 0; i++)
        rendezvous_tell(self->peers[i].socket, RENDEZVOUS_FAILED, error->text);
    return false;
}

static inline bool rendezvous_give(const RendezvousPeer *peer, const void *data, size_t bytes, double deadline,
                                   Error *error) {
    const RendezvousHeader header = rendezvous_header(RENDEZVOUS_DATA, bytes);
    int status = tcp_send(peer->socket, &header, sizeof header, deadline);
    if (status == 0) status = tcp_send(peer->socket, data, bytes, deadline);
    return status == 0 || error_set(error, "rank %d on %s is lost: %s", peer->rank, peer->host, tcp_reason(status));
}

static inline bool rendezvous_take(Rendezvous *self, RendezvousPeer *peer, void *data, size_t bytes, double deadline,
                                   Error *error) {
    if (!rendezvous_expect(self, peer, RENDEZVOUS_DATA, bytes, deadline, error)) return false;
    const int status = tcp_receive(peer->socket, data, bytes, deadline);
    return status == 0 || error_set(error, "rank %d on %s is lost: %s", peer->rank, peer->host, tcp_reason(status));
}

// Every rank's `bytes` bytes, in rank order, to rank 0: `all` has room for world_size times as many there, and is not
// looked at elsewhere.
static inline bool rendezvous_gather(Rendezvous *self, const void *mine, size_t bytes, void *all, Error *error) {
    const double deadline = tcp_now() + self->timeout;
    if (self->rank > 0) return rendezvous_give(&self->peers[0], mine, bytes, deadline, error);
    memcpy(all, mine, bytes);
    for (int i = 0; i < self->n_peers; i++)
        if (!rendezvous_take(self, &self->peers[i], (char *)all + (size_t)(i + 1) * bytes, bytes, deadline, error))
            return rendezvous_give_up(self, error);
    return true;
}

// Rank 0's `bytes` bytes to every rank. Rank 0 may still be waiting for others, and says what for when it gives up: the
// patience of the ranks that wait for it ends later.
static inline bool rendezvous_broadcast(Rendezvous *self, void *data, size_t bytes, Error *error) {
    const double deadline = tcp_now() + self->timeout;
    if (self->rank > 0)
        return rendezvous_take(self, &self->peers[0], data, bytes, deadline + RENDEZVOUS_ANSWER_SECONDS, error);
    for (int i = 0; i < self->n_peers; i++)
        if (!rendezvous_give(&self->peers[i], data, bytes, deadline, error)) return rendezvous_give_up(self, error);
    return true;
}

static inline void rendezvous_close(Rendezvous *self) {
    for (int i = 0; i < self->n_peers; i++)
        if (self->peers[i].socket >= 0) close(self->peers[i].socket);
    free(self->peers);
    memset(self, 0, sizeof *self);
}

#endif
