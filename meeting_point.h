// meeting_point.h: where the ranks of a job meet over TCP, and by what they know one another, from the environment.
//
//  - Address: MASTER_ADDR; else this machine, if all ranks are on it; else the first host of SLURM's list of nodes,
//    where SLURM puts rank 0.
//  - Job: TRAIN_GPT_JOB, torchrun's run, or SLURM's job, step and restart. Ranks of another job are turned away.
//  - Port: MASTER_PORT; else one from 20000 to 29999 that follows from the job: below what Linux gives to outgoing
//    connections (32768 on), above the services' own. Under torchrun always the latter, where its agent listens on
//    MASTER_PORT itself.
//
// All ranks find the same without having exchanged a word.
#ifndef MEETING_POINT_H
#define MEETING_POINT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "error.h"
#include "place.h"

enum { MEETING_FIRST_PORT = 20000, MEETING_PORTS = 10000 };

typedef struct {
    char address[256]; // a name or a number, of either version of IP
    int port;
    uint64_t token;     // of the job
    const char *source; // of the address, for messages
} MeetingPoint;

// The first host of SLURM's "node[01-03,7],rack[1-2]gpu[05-08]": "node01". False: it is no such list.
static inline bool nodelist_first(const char *list, char *host, size_t size) {
    size_t length = 0;
    bool skip = false; // within brackets, behind the first number
    bool inside = false;
    const char *c = list;
    for (; *c != '\0' && (inside || *c != ','); c++) {
        const bool digit = *c >= '0' && *c <= '9';
        const bool letter = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || *c == '.' || *c == '_' || *c == '-';
        if (*c == '[' && !inside) {
            inside = true;
            skip = false;
            if (c[1] < '0' || c[1] > '9') return false;
        } else if (*c == ']' && inside) {
            inside = false;
        } else if (inside && (*c == '-' || *c == ',')) {
            skip = true;
        } else if (digit || (letter && !inside)) {
            if (skip && inside) continue;
            if (length + 1 >= size) return false;
            host[length++] = *c;
        } else {
            return false;
        }
    }
    host[length] = '\0';
    return length > 0 && !inside;
}

// FNV-1a.
static inline uint64_t meeting_hash(const char *text) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *text != '\0'; text++) hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    return hash;
}

static inline const char *meeting_variable(const char *name) {
    const char *text = getenv(name);
    return text == NULL ? "" : text;
}

// A text that the ranks of this job share, and no other job has. Where nothing tells jobs apart it is the number of
// ranks.
static inline uint64_t meeting_token(const Place *place) {
    char text[1024];
    const bool slurm = getenv("SLURM_JOB_ID") != NULL;
    if (getenv("TRAIN_GPT_JOB") != NULL)
        snprintf(text, sizeof text, "%s", getenv("TRAIN_GPT_JOB"));
    else if (getenv("TORCHELASTIC_RUN_ID") != NULL) // "none" unless it was named, hence the port
        snprintf(text, sizeof text, "torchrun %s %s %s", getenv("TORCHELASTIC_RUN_ID"),
                 meeting_variable("TORCHELASTIC_RESTART_COUNT"), meeting_variable("MASTER_PORT"));
    else if (slurm) // ranks that srun did not number may be of several steps
        snprintf(text, sizeof text, "SLURM %s.%s restart %s", getenv("SLURM_JOB_ID"),
                 place_by_slurm(place) ? meeting_variable("SLURM_STEP_ID") : "",
                 meeting_variable("SLURM_RESTART_COUNT"));
    else
        snprintf(text, sizeof text, "%d ranks", place->world_size);
    return meeting_hash(text);
}

// Finds where these ranks meet. False, and an error, where a variable is missing or makes no sense.
static inline bool meeting_point(const Place *place, MeetingPoint *point, Error *error) {
    memset(point, 0, sizeof *point);
    const char *given = meeting_variable("MASTER_ADDR");
    const char *nodes = getenv("SLURM_STEP_NODELIST") != NULL ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
    if (given[0] != '\0') {
        point->source = "MASTER_ADDR";
        if (strlen(given) >= sizeof point->address)
            return error_set(error, "MASTER_ADDR is \"%.40s...\", longer than a host's name can be", given);
        snprintf(point->address, sizeof point->address, "%s", given);
    } else if (place->local_size == place->world_size) {
        point->source = "MASTER_ADDR is not set, and all ranks seem to be on one machine";
        snprintf(point->address, sizeof point->address, "127.0.0.1");
    } else if (getenv(nodes) != NULL) {
        point->source = nodes;
        if (!nodelist_first(getenv(nodes), point->address, sizeof point->address))
            return error_set(error, "%s is \"%.80s\", which is no list of nodes", nodes, getenv(nodes));
    } else {
        return error_set(error,
                         "MASTER_ADDR is not set: ranks on several machines meet at rank 0's, whose name or address it "
                         "is to be");
    }
    point->token = meeting_token(place);
    const bool agent_listens = strcmp(meeting_variable("TORCHELASTIC_USE_AGENT_STORE"), "True") == 0;
    point->port = MEETING_FIRST_PORT + (int)(point->token % MEETING_PORTS);
    return agent_listens || getenv("MASTER_PORT") == NULL ||
           place_number("MASTER_PORT", 1, 65535, "", &point->port, error);
}

#endif
