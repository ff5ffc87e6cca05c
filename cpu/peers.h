// peers.h: who the other ranks are, where they run, and which of them wait.
//
// A rank that has waited too long says for whom. That one may be waiting as well, and whoever it waits for. So the
// ranks of a node that wait note that on a board that they share, with a sign of life, and who gives up follows the
// notes to a rank that does not wait: it is stopped, or hangs, or is on another node, whose ranks will speak for
// themselves. One rank of a node speaks. A rank that need not wait notes nothing, so exchanges cost nothing.
#ifndef CPU_PEERS_H
#define CPU_PEERS_H

#include "collective.h"
#include "segment.h"

// A rank's entry on the board: the last one of its threads that looked whether its wait is over.
typedef struct {
    double looked; // when; atomic
    int waits_for; // the first rank that it waits for, -1: none that it knows; atomic
    char pad[52];  // a cache line each
} PeerNote;

typedef struct {
    uint64_t token; // segment.h
    int spoken;     // a rank of this node has said why it gives up; atomic
    char pad[52];
    PeerNote notes[1]; // of each rank of this node
} PeerBoard;

enum { PEER_HOST = 64 };

// All ranks of the run.
typedef struct {
    int rank, ranks;   // 0 ranks: not open
    char *hosts;       // (ranks, PEER_HOST)
    int *entry;        // of each rank: on this node's board, -1: it runs elsewhere
    PeerBoard *board;  // NULL: there is no room for one
    size_t board_size; // in bytes
} Peers;

static inline Peers *peers_all(void) {
    static Peers self = {0, 0, NULL, NULL, NULL, 0};
    return &self;
}

// Learns everybody's host and opens the board of this node; all ranks of the run call this. False: no memory.
static inline bool peers_open(MPI_Comm world, int rank, int ranks) {
    Peers *self = peers_all();
    self->hosts = (char *)calloc((size_t)ranks, PEER_HOST);
    self->entry = (int *)calloc((size_t)ranks, sizeof(int));
    int *on_node = (int *)calloc((size_t)ranks, sizeof(int));
    if (self->hosts == NULL || self->entry == NULL || on_node == NULL) return false;
    char host[PEER_HOST];
    snprintf(host, sizeof host, "%s", error_identity()->host);
    MPI_Allgather(host, PEER_HOST, MPI_CHAR, self->hosts, PEER_HOST, MPI_CHAR, world);
    MPI_Comm node;
    int count = 0, problem = 0;
    MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
    MPI_Comm_size(node, &count);
    MPI_Allgather(&rank, 1, MPI_INT, on_node, 1, MPI_INT, node);
    for (int r = 0; r < ranks; r++) self->entry[r] = -1;
    for (int i = 0; i < count; i++) self->entry[on_node[i]] = i;
    free(on_node);
    self->board_size = sizeof(PeerBoard) + (size_t)count * sizeof(PeerNote);
    self->board = (PeerBoard *)segment_open(node, self->board_size, &problem);
    MPI_Comm_free(&node);
    self->rank = rank;
    self->ranks = ranks;
    return true;
}

static inline void peers_close(void) {
    Peers *self = peers_all();
    if (self->board != NULL) munmap(self->board, self->board_size);
    free(self->hosts);
    free(self->entry);
    memset(self, 0, sizeof *self);
}

// ---------------------------------------------------------------------------------------------------------------------
// Waiting

// Ranks of the run, each once; of more than there is room for, the number.
enum { PEER_LIST = 8 };
typedef struct {
    int rank[PEER_LIST];
    int count;
} PeerList;

static inline void peer_list_add(PeerList *list, int rank) {
    for (int i = 0; i < list->count && i < PEER_LIST; i++)
        if (list->rank[i] == rank) return;
    if (list->count < PEER_LIST) list->rank[list->count] = rank;
    list->count++;
}

// "rank 1 on alpha, rank 3 on beta and 5 more"
static inline void peer_list_text(const PeerList *list, char *text, size_t size) {
    const Peers *self = peers_all();
    size_t length = 0;
    text[0] = '\0';
    for (int i = 0; i < list->count && length < size; i++) {
        if (i == PEER_LIST) {
            snprintf(text + length, size - length, " and %d more", list->count - PEER_LIST);
            return;
        }
        const int r = list->rank[i];
        const bool known = r >= 0 && r < self->ranks;
        length += (size_t)snprintf(text + length, size - length, "%srank %d%s%s", i > 0 ? ", " : "", r,
                                   known ? " on " : "", known ? self->hosts + (size_t)r * PEER_HOST : "");
    }
}

// The note of a rank of this node that has lately looked whether its wait is over; else NULL. A rank that waits looks
// every 0.2 s; one that is stopped had waited for less than the timeout, and has not looked since.
static inline const PeerNote *peer_waits(int rank) {
    const Peers *self = peers_all();
    if (self->board == NULL || rank < 0 || rank >= self->ranks || self->entry[rank] < 0) return NULL;
    const PeerNote *note = &self->board->notes[self->entry[rank]];
    const double half = 0.5 * *collective_timeout();
    double looked;
    __atomic_load(&note->looked, &looked, __ATOMIC_ACQUIRE);
    return watchdog_clock() - looked < (half < 2 ? half : 2) ? note : NULL;
}

// The last of those that `rank` waits for, who wait for one another.
static inline int peer_last(int rank) {
    for (int i = 0; i < peers_all()->ranks; i++) {
        const PeerNote *note = peer_waits(rank);
        const int next = note == NULL ? -1 : __atomic_load_n(&note->waits_for, __ATOMIC_RELAXED);
        if (next < 0) break;
        rank = next;
    }
    return rank;
}

// "block 3, step 17: reduce-scatter of 1.3 MB: waited 10 s for rank 1 on alpha; in the end for rank 3 on beta"
enum { PEERS_TEXT = 2000 };
static inline void peers_text(const Collective *c, const PeerList *missing, double waited, char text[PEERS_TEXT]) {
    PeerList last;
    memset(&last, 0, sizeof last);
    for (int i = 0; i < missing->count && i < PEER_LIST; i++) peer_list_add(&last, peer_last(missing->rank[i]));
    bool same = true, silent = false;
    for (int i = 0; i < last.count; i++) {
        same = same && i < missing->count && last.rank[i] == missing->rank[i];
        silent = silent || peer_waits(last.rank[i]) == NULL;
    }
    char purpose[PURPOSE_TEXT], ranks[700], others[700], more[800] = "", volume[32];
    peer_list_text(missing, ranks, sizeof ranks);
    peer_list_text(&last, others, sizeof others);
    if (!silent)
        snprintf(more, sizeof more, "; all of them wait for one another");
    else if (!same)
        snprintf(more, sizeof more, "; in the end for %s", others);
    const size_t bytes = c->count * rank_sum_type_bytes(c->type);
    if (bytes < 100000)
        snprintf(volume, sizeof volume, "%zu bytes", bytes);
    else
        snprintf(volume, sizeof volume, "%.3g MB", (double)bytes / 1e6);
    snprintf(text, PEERS_TEXT, "%s: %s of %s: waited %.0f s for %s%s", purpose_text(&c->purpose, purpose),
             collective_name(c->kind), volume, waited, ranks, more);
}

// Says why a rank of this node gives up. False: another one has.
static inline bool peers_say(const char *happened, const char *text) {
    PeerBoard *board = peers_all()->board;
    if (board != NULL && __atomic_exchange_n(&board->spoken, 1, __ATOMIC_ACQ_REL) != 0) return false;
    error_say(happened, text, __FILE__, __LINE__);
    return true;
}

// Ends the process: at once, if all has been said. A launcher ends all ranks as soon as one is gone, so a rank that has
// nothing to say, or whose run has ranks on other nodes, who began to wait at other moments, gives the others a second.
__attribute__((noreturn)) static inline void peers_give_up(const char *text) {
    const Peers *self = peers_all();
    bool together = true; // all on this node
    for (int r = 0; r < self->ranks; r++) together = together && self->entry[r] >= 0;
    if (peers_say("failed", text) && together) _exit(EXIT_RUN);
    const struct timespec second = {1, 0};
    nanosleep(&second, NULL);
    _exit(EXIT_RUN);
}

enum { PEERS_LOOK_MS = 200 }; // how often a rank that waits calls peers_look()

// A rank is waiting for others: notes it, and ends the process if it has for too long.
static inline void peers_look(const Collective *c, const PeerList *missing, Patience *patience) {
    Peers *self = peers_all();
    const double waited = patience_waited(patience);
    if (self->board != NULL) {
        PeerNote *note = &self->board->notes[self->entry[self->rank]];
        __atomic_store_n(&note->waits_for, missing->count > 0 ? missing->rank[0] : -1, __ATOMIC_RELAXED);
        __atomic_store(&note->looked, &patience->looked, __ATOMIC_RELEASE);
    }
    const bool over = waited >= *collective_timeout();
    if (!over && !watchdog_asked(waited, 0)) return;
    char text[PEERS_TEXT];
    peers_text(c, missing, waited, text);
    if (over) peers_give_up(text);
    peers_say("was asked to stop while it waited", text);
}

#endif
