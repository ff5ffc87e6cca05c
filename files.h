// files.h: reading a file at any place, and writing one so that it survives; whatever fails is an Error that names it.
//
// Files are read by pread and never mapped: one that is cut while mapped would end the run by SIGBUS. A file is written
// under a temporary name by output_*(), which ends with fsync, and gets its name from file_publish(): it appears whole
// or not at all, whatever stops the machine.
#ifndef FILES_H
#define FILES_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include "checksum.h"
#include "error.h"

// ---------------------------------------------------------------------------------------------------------------------
// Reading

typedef struct {
    char *path;
    int fd;        // -1: not open
    int64_t bytes; // size when it was opened
} InputFile;

static inline void input_close(InputFile *file) {
    if (file->fd >= 0) close(file->fd);
    free(file->path);
    file->path = NULL;
    file->fd = -1;
}

// Opens a regular file. On an error nothing remains open.
static inline bool input_open(InputFile *file, const char *path, Error *error) {
    file->path = NULL;
    file->fd = -1;
    file->bytes = 0;
    // stat before open: opening a pipe would wait for its writer.
    struct stat status;
    if (stat(path, &status) != 0) return error_set(error, "%s: cannot be read: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        return error_set(error, "%s: is %s, a file is needed", path,
                         S_ISDIR(status.st_mode) ? "a directory" : "a pipe or a device");
    file->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0 || fstat(file->fd, &status) != 0) {
        error_set(error, "%s: cannot be read: %s", path, strerror(errno));
        input_close(file);
        return false;
    }
    file->bytes = (int64_t)status.st_size;
    file->path = strdup(path);
    if (file->path == NULL) die("no memory to open %s", path);
    return true;
}

// Reads `bytes` bytes at `offset`; fewer are an error.
static inline bool input_read(const InputFile *file, void *out, size_t bytes, int64_t offset, Error *error) {
    size_t done = 0;
    while (done < bytes) {
        const ssize_t got = pread(file->fd, (char *)out + done, bytes - done, (off_t)(offset + (int64_t)done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return error_set(error, "%s: reading %zu bytes at byte %lld failed: %s", file->path, bytes - done,
                             (long long)(offset + (int64_t)done), strerror(errno));
        if (got == 0)
            return error_set(error, "%s: ends at byte %lld, but had %lld bytes when it was opened", file->path,
                             (long long)(offset + (int64_t)done), (long long)file->bytes);
        done += (size_t)got;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing

typedef struct {
    char *path;
    int fd;          // -1: not open
    int64_t written; // bytes so far
    Checksum checksum;
    bool failed;
} OutputFile;

// Creates a file, or empties it. After that output_finish() must be called, also when writing fails.
static inline bool output_open(OutputFile *file, const char *path, Error *error) {
    file->written = 0;
    checksum_begin(&file->checksum);
    file->path = strdup(path);
    if (file->path == NULL) die("no memory to write %s", path);
    file->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    file->failed = file->fd < 0;
    if (file->failed) error_set(error, "%s: cannot be written: %s", path, strerror(errno));
    return !file->failed;
}

// Appends `bytes` bytes.
static inline bool output_write(OutputFile *file, const void *data, size_t bytes, Error *error) {
    for (size_t done = 0; done < bytes && !file->failed;) {
        const ssize_t put = write(file->fd, (const char *)data + done, bytes - done);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) {
            file->failed = true;
            error_set(error, "%s: writing at byte %lld failed: %s", file->path, (long long)file->written,
                      put == 0 ? "nothing was taken" : strerror(errno));
        } else {
            checksum_add(&file->checksum, (const char *)data + done, (size_t)put);
            done += (size_t)put;
            file->written += put;
        }
    }
    return !file->failed;
}

// Closes the file; true if all of it has reached the disk.
static inline bool output_finish(OutputFile *file, Error *error) {
    if (!file->failed && fsync(file->fd) != 0) {
        file->failed = true;
        error_set(error, "%s: writing to disk failed: %s", file->path, strerror(errno));
    }
    if (file->fd >= 0 && close(file->fd) != 0 && !file->failed) {
        file->failed = true;
        error_set(error, "%s: closing failed: %s", file->path, strerror(errno));
    }
    file->fd = -1;
    free(file->path);
    file->path = NULL;
    return !file->failed;
}

// Makes a directory's entries survive.
static inline bool directory_sync(const char *directory, Error *error) {
    const int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    // EINVAL: a file system that has nothing to do for it.
    const bool ok = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL);
    if (!ok) error_set(error, "%s: writing the directory to disk failed: %s", directory, strerror(errno));
    if (fd >= 0) close(fd);
    return ok;
}

// first + separator + second, to be freed.
static inline char *path_join(const char *first, const char *separator, const char *second) {
    const size_t room = strlen(first) + strlen(separator) + strlen(second) + 1;
    char *path = (char *)malloc(room);
    if (path == NULL) die("no memory for a path");
    snprintf(path, room, "%s%s%s", first, separator, second);
    return path;
}

// Makes a temporary file, or takes one that is there as it is, for this process alone: another that is to write it too
// is refused, until the descriptor that is returned is closed, which must not be before the file is renamed or removed.
// -1: an error; target: what the message names.
static inline int file_claim(const char *temporary, const char *target, Error *error) {
    for (;;) {
        const int fd = open(temporary, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (fd < 0) {
            error_set(error, "%s: cannot be written: %s: %s", target, temporary, strerror(errno));
            return -1;
        }
        struct stat held, named;
        // Other errors: a file system without locks.
        const bool held_elsewhere = flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
        if (held_elsewhere)
            error_set(error, "%s: is being written by another process; wait for it, or name another", target);
        // Between open and flock another may have finished, and renamed the file away.
        else if (fstat(fd, &held) == 0 && stat(temporary, &named) == 0 && held.st_dev == named.st_dev &&
                 held.st_ino == named.st_ino)
            return fd;
        close(fd);
        if (held_elsewhere) return -1;
    }
}

// Gives a finished file (or directory) its name, replacing what has it, and makes that survive. Both names must be in
// one directory.
static inline bool file_publish(const char *temporary, const char *path, Error *error) {
    if (rename(temporary, path) != 0)
        return error_set(error, "%s: cannot be renamed to %s: %s", temporary, path, strerror(errno));
    char *directory = path_join(path, "", "");
    size_t end = strlen(directory);
    while (end > 1 && directory[end - 1] == '/') end--; // "a/b/" is b in a
    while (end > 0 && directory[end - 1] != '/') end--;
    while (end > 1 && directory[end - 1] == '/') end--;
    directory[end] = '\0';
    const bool ok = directory_sync(end > 0 ? directory : ".", error);
    free(directory);
    return ok;
}

#endif
