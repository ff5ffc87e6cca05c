// mpirun_output.h: what Open MPI's mpirun writes to its stderr: the ranks' own lines, which pass, and its own words.
//
// A run's error is one line, that of the rank that failed. mpirun adds to it, differently in each version, so a thread
// of the launcher reads mpirun's stderr and passes everything on at once, except
//  - what it says of signals, and reports of states, which launch.h asks for: the first rank that a signal ended is
//    noted. (Open MPI 4.1.4 prints the sentence that should say so in three runs of four.)
//  - blocks of help text between lines of dashes. Those that say no more than an exit code does are dropped. From any
//    other the user learns why mpirun itself failed: it is made one line, train_gpt: mpirun: ...
// Whatever mpirun wrote before it ended is passed on; a process that keeps the pipe open after that is not waited for.
#ifndef MPIRUN_OUTPUT_H
#define MPIRUN_OUTPUT_H

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

typedef struct {
    int signalled;     // the first rank that a signal ended, or -1
    char notice[1024]; // what mpirun said about that, in its words, or ""
    bool explained;    // a block has been passed on

    int out;          // where what passes goes
    char held[16384]; // the line being read; in a block, all of it so far
    size_t length, line;
    bool block;
    bool drop_empty; // an empty line is mpirun's

    int in, end; // mpirun's stderr; a pipe that is written to when mpirun has ended
    int end_writer;
    pthread_t thread;
} MpirunOutput;

static inline void mpirun_output_init(MpirunOutput *self, int out) {
    memset(self, 0, sizeof *self);
    self->signalled = -1;
    self->out = out;
}

static inline void mpirun_output_write(int out, const char *text, size_t length) {
    while (length > 0) {
        const ssize_t written = write(out, text, length);
        if (written < 0 && errno == EAGAIN) { // whoever shares the terminal can make it so
            struct pollfd ready = {out, POLLOUT, 0};
            poll(&ready, 1, -1);
        } else if (written > 0) {
            text += written;
            length -= (size_t)written;
        } else if (written == 0 || errno != EINTR) {
            return; // nobody reads it any more
        }
    }
}

// Passes on what is held: it is none of mpirun's texts, or will not be complete.
static inline void mpirun_output_flush(MpirunOutput *self) {
    mpirun_output_write(self->out, self->held, self->length);
    self->length = self->line = 0;
    self->block = false;
}

// ---------------------------------------------------------------------------------------------------------------------
// mpirun's texts

// A line of dashes, as mpirun prints before and after a block; it may stand behind a rank's unfinished line.
static inline char *mpirun_dashes(char *line) {
    enum { DASHES = 74 };
    const size_t length = strlen(line);
    size_t dashes = 0;
    while (dashes < length && line[length - 1 - dashes] == '-') dashes++;
    return dashes == DASHES ? line + length - DASHES : NULL;
}

// What mpirun says on one line, which may stand there too: of signals; and "[host:pid] [name] ACTIVATE PROC
// [[job,1],RANK] STATE ...". Version 5 names jobs otherwise, and repeats each report with ACTIVATING.
static inline char *mpirun_words(char *line) {
    static const char *const words[] = {"mpirun: Forwarding signal ", "prterun: Forwarding signal ",
                                        "Abort is in progress...hit ctrl-c again",
                                        "mpirun: abort is already in progress...hit ctrl-c again"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        char *found = strstr(line, words[i]);
        if (found != NULL) return found;
    }
    const char *verb = strstr(line, "] ACTIVAT");
    for (char *c = line; verb != NULL && c < verb; c++) {
        int end = 0;
        if (sscanf(c, "[%*[^][: ]:%*d] [%n", &end) == 0 && end > 0) return c;
    }
    return NULL;
}

// The rank that a report says was ended by a signal, or -1.
static inline int mpirun_signalled(const char *report) {
    const char *end = strstr(report, "] STATE ABORTED BY SIGNAL"), *number = end;
    while (number != NULL && number > report && isdigit((unsigned char)number[-1])) number--;
    return number == end || number[-1] != ',' ? -1 : atoi(number);
}

// Takes in a block, without its lines of dashes.
static inline void mpirun_output_block(MpirunOutput *self, const char *text) {
    static const char prefix[] = "train_gpt: mpirun: ";
    char line[sizeof self->held + sizeof prefix];
    size_t begin = sizeof prefix - 1, length = begin;
    memcpy(line, prefix, begin);
    for (const char *c = text; *c != '\0'; c++) {
        const bool space = isspace((unsigned char)*c) != 0;
        if (!space || (length > begin && line[length - 1] != ' ')) line[length++] = space ? ' ' : *c;
    }
    if (length > begin && line[length - 1] == ' ') length--;
    line[length] = '\0';
    if (length == begin || strstr(line, "exited with non-zero status") != NULL ||
        strstr(line, "Primary job terminated normally, but") != NULL)
        return;
    if (strstr(line, " exited on signal ") != NULL) {
        snprintf(self->notice, sizeof self->notice, "%.*s", (int)sizeof self->notice - 1, line + begin);
        return;
    }
    line[length++] = '\n';
    mpirun_output_write(self->out, line, length);
    self->explained = true;
}

// ---------------------------------------------------------------------------------------------------------------------
// The filter

// Takes in the line that has just become complete.
static inline void mpirun_output_line(MpirunOutput *self) {
    char *const line = self->held + self->line, *const newline = self->held + self->length - 1;
    *newline = '\0';
    char *const dashes = mpirun_dashes(line), *const words = dashes != NULL ? NULL : mpirun_words(line);
    const int rank = words != NULL ? mpirun_signalled(words) : -1;
    const bool empty = self->drop_empty && line == newline;
    self->drop_empty = words != NULL && strncmp(words, "Abort", 5) == 0; // version 5 prints an empty line after that
    *newline = '\n';
    if (self->signalled < 0) self->signalled = rank;
    if (self->block) {
        if (words != NULL) self->length = (size_t)(words - self->held); // a report that came between
        self->line = self->length;
        if (dashes != line) return;
        *dashes = '\0';
        mpirun_output_block(self, strchr(self->held, '\n'));
        self->length = self->line = 0;
        self->block = false;
    } else if (dashes != NULL) {
        mpirun_output_write(self->out, line, (size_t)(dashes - line));
        self->length -= (size_t)(dashes - line);
        memmove(self->held, dashes, self->length);
        self->line = self->length;
        self->block = true;
    } else if (words != NULL) {
        mpirun_output_write(self->out, line, (size_t)(words - line));
        self->length = 0;
    } else if (empty) {
        self->length = 0;
    } else {
        mpirun_output_flush(self);
    }
}

static inline void mpirun_output_feed(MpirunOutput *self, const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '\0') continue; // version 5 writes one after some blocks
        if (self->length == sizeof self->held) mpirun_output_flush(self);
        self->held[self->length++] = text[i];
        if (text[i] == '\n') mpirun_output_line(self);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The thread

static inline void *mpirun_output_run(void *argument) {
    enum { LINGER_MS = 100 }; // for the rest of a line or block: mpirun writes either at once
    MpirunOutput *self = (MpirunOutput *)argument;
    char text[4096];
    sigset_t all; // SIGPIPE, too: that nobody reads the errors does not end the run
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    for (;;) {
        struct pollfd ready[2] = {{self->in, POLLIN, 0}, {self->end, POLLIN, 0}};
        const int count = poll(ready, 2, self->length > 0 ? LINGER_MS : -1);
        if (count == 0) mpirun_output_flush(self);
        if (count <= 0) continue;
        const bool ended = ready[1].revents != 0;
        int left = (int)sizeof text; // once mpirun has ended: what is in the pipe now, and no more
        if (ended && ioctl(self->in, FIONREAD, &left) != 0) left = 0;
        ssize_t got = 0;
        do {
            got = read(self->in, text, left < (int)sizeof text ? (size_t)left : sizeof text);
            mpirun_output_feed(self, text, got > 0 ? (size_t)got : 0);
            left -= (int)got;
        } while (ended && got > 0 && left > 0);
        if (ended || got <= 0) break;
    }
    mpirun_output_flush(self);
    return NULL;
}

// Starts to pass on to `out` what arrives from `in`, mpirun's stderr. False, and errno set, if that cannot be.
static inline bool mpirun_output_start(MpirunOutput *self, int in, int out) {
    int end[2];
    mpirun_output_init(self, out);
    if (pipe2(end, O_CLOEXEC) != 0) return false;
    self->in = in;
    self->end = end[0];
    self->end_writer = end[1];
    errno = pthread_create(&self->thread, NULL, mpirun_output_run, self);
    return errno == 0;
}

// Call when mpirun has ended: passes on the rest, and what was learned can be read.
static inline void mpirun_output_finish(MpirunOutput *self) {
    mpirun_output_write(self->end_writer, "", 1);
    pthread_join(self->thread, NULL);
    close(self->end_writer);
    close(self->end);
    close(self->in);
}

#endif
