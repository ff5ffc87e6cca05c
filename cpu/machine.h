// machine.h: what this machine grants to the process: cores, memory, the processor's name.
//
// A container or a batch job often may use less than the machine has, so limits of control groups (versions 1 and 2)
// count as much as the hardware. Whatever cannot be read is taken as unlimited.
#ifndef CPU_MACHINE_H
#define CPU_MACHINE_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The number that follows `key` at the start of a line of the file `path` (key "": the file's first number), or
// `otherwise` if there is none ("max" is none).
static inline uint64_t machine_file_number(const char *path, const char *key, uint64_t otherwise) {
    FILE *file = fopen(path, "r");
    if (file == NULL) return otherwise;
    char line[512];
    uint64_t value = otherwise;
    while (fgets(line, sizeof line, file) != NULL) {
        size_t length = strlen(key);
        if (strncmp(line, key, length) != 0) continue;
        unsigned long long number;
        if (sscanf(line + length, " %llu", &number) == 1) value = number;
        break;
    }
    fclose(file);
    return value;
}

// The folders of the process's control group for `controller` and of all groups above it, whose limits hold too.
typedef struct {
    int version;      // 1 or 2; 0: there is none
    char root[128];   // where the hierarchy is mounted
    char folder[768]; // the group, then its ancestors
} MachineGroup;

static inline MachineGroup machine_group(const char *controller) {
    MachineGroup group;
    memset(&group, 0, sizeof group);
    FILE *file = fopen("/proc/self/cgroup", "r");
    char line[512];
    // A line is "number:controllers:path"; version 2 is "0::path". A controller bound to version 1 is not in version 2.
    while (file != NULL && group.version != 1 && fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *names = strchr(line, ':'), *path = names == NULL ? NULL : strchr(names + 1, ':');
        if (path == NULL) continue;
        *names++ = *path++ = '\0';
        bool version1 = false;
        char *rest = NULL;
        for (char *name = strtok_r(names, ",", &rest); name != NULL; name = strtok_r(NULL, ",", &rest))
            version1 = version1 || strcmp(name, controller) == 0;
        if (!version1 && strcmp(line, "0") != 0) continue;
        group.version = version1 ? 1 : 2;
        snprintf(group.root, sizeof group.root, "/sys/fs/cgroup%s%s", version1 ? "/" : "", version1 ? controller : "");
        snprintf(group.folder, sizeof group.folder, "%s%s", group.root, path);
    }
    if (file != NULL) fclose(file);
    return group;
}

// Moves to the group above; false at the root.
static inline bool machine_group_up(MachineGroup *group) {
    size_t length = strlen(group->folder), root = strlen(group->root);
    while (length > root && group->folder[length - 1] == '/') length--;
    if (length <= root) return false;
    while (length > root && group->folder[length - 1] != '/') length--;
    group->folder[length > root ? length - 1 : root] = '\0';
    return true;
}

static inline uint64_t machine_group_number(const MachineGroup *group, const char *name, const char *key,
                                            uint64_t otherwise) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", group->folder, name);
    return machine_file_number(path, key, otherwise);
}

// Cores that this process may keep busy: its affinity mask, less if a quota of processor time grants less.
static inline int machine_cores(void) {
    cpu_set_t mask;
    int cores = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1;
    MachineGroup group = machine_group("cpu");
    if (group.version == 0) return cores;
    do {
        uint64_t quota = 0, period = 0;
        if (group.version == 1) {
            quota = machine_group_number(&group, "cpu.cfs_quota_us", "", 0); // -1, unlimited, reads as a huge number
            period = machine_group_number(&group, "cpu.cfs_period_us", "", 0);
        } else {
            char path[1024];
            snprintf(path, sizeof path, "%s/cpu.max", group.folder);
            FILE *file = fopen(path, "r");
            unsigned long long granted, of;
            if (file != NULL && fscanf(file, "%llu %llu", &granted, &of) == 2) quota = granted, period = of;
            if (file != NULL) fclose(file);
        }
        if (quota == 0 || period == 0) continue;
        uint64_t granted = quota / period + (quota % period != 0);
        if (granted < (uint64_t)cores) cores = (int)granted;
    } while (machine_group_up(&group));
    return cores < 1 ? 1 : cores;
}

// Memory in bytes: all that the process could ever use, and what is left of it now. Files in the page cache count as
// free: the kernel gives them up when memory is asked for.
static inline void machine_memory(size_t *free_bytes, size_t *total_bytes) {
    uint64_t total = machine_file_number("/proc/meminfo", "MemTotal:", SIZE_MAX >> 10) << 10;
    uint64_t available = machine_file_number("/proc/meminfo", "MemAvailable:", SIZE_MAX >> 10) << 10;
    MachineGroup group = machine_group("memory");
    if (group.version != 0) do {
            bool v1 = group.version == 1;
            uint64_t limit = machine_group_number(&group, v1 ? "memory.limit_in_bytes" : "memory.max", "", UINT64_MAX);
            uint64_t used = machine_group_number(&group, "memory.stat", v1 ? "total_rss " : "anon ", 0) +
                            machine_group_number(&group, "memory.stat", v1 ? "total_shmem " : "shmem ", 0);
            uint64_t left = limit > used ? limit - used : 0;
            if (limit < total) total = limit;
            if (left < available) available = left;
        } while (machine_group_up(&group));
    *free_bytes = (size_t)available;
    *total_bytes = (size_t)total;
}

// The processor's name as the kernel knows it.
static inline void machine_name(char *name, size_t size) {
    snprintf(name, size, "CPU");
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[512];
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char *value = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || value == NULL) continue;
        value += 1 + strspn(value + 1, " ");
        value[strcspn(value, "\n")] = '\0';
        snprintf(name, size, "%s", value);
        break;
    }
    if (file != NULL) fclose(file);
}

#endif
