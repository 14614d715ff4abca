/* Messages between the processes of one run: small values that ranks really send each other. One file a message. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define GIVE_UP_SECONDS 60 /* a rank may still be building its model; one that has died is not waited for */

static char folder[4000];
static _Atomic uint64_t unanswered;

void oom_share(const char *path) {
    if (path && mkdir(path, 0700) != 0 && errno != EEXIST) path = NULL;
    snprintf(folder, sizeof folder, "%s", path ? path : "");
}

int oom_shares(void) { return folder[0] != 0; }
uint64_t oom_unanswered(void) { return unanswered; }

struct header {
    uint64_t size;
    int64_t tag;
};

int oom_post(const char *key, const void *data, size_t size, int64_t tag) {
    char path[4200], scratch[4300];
    snprintf(path, sizeof path, "%s/%s", folder, key);
    snprintf(scratch, sizeof scratch, "%s.%d.tmp", path, (int)getpid());
    int file = open(scratch, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return -1;
    struct header header = {size, tag};
    int whole = write(file, &header, sizeof header) == (ssize_t)sizeof header &&
                write(file, data, size) == (ssize_t)size;
    close(file);
    return whole && rename(scratch, path) == 0 ? 0 : -1; /* a reader sees all of it or nothing */
}

void oom_unpost(const char *key) {
    char path[4200];
    snprintf(path, sizeof path, "%s/%s", folder, key);
    unlink(path);
}

static int read_message(const char *path, void *data, size_t size, int64_t *tag) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    struct header header;
    int fits = read(file, &header, sizeof header) == (ssize_t)sizeof header && header.size == size &&
               read(file, data, size) == (ssize_t)size;
    close(file);
    if (fits && tag) *tag = header.tag;
    return fits ? 0 : 1;
}

/* Waits for a message; 0, or -1 when its sender has ended (`sender` is its pid, 0 when that is not known), sends
 * something of another size, or takes too long. */
int oom_fetch(const char *key, void *data, size_t size, int64_t *tag, int sender) {
    char path[4200];
    snprintf(path, sizeof path, "%s/%s", folder, key);
    uint64_t until = oom_now_ns() + GIVE_UP_SECONDS * 1000000000ull;
    for (long pause = 20000; oom_now_ns() < until; pause = pause < 5000000 ? pause * 2 : pause) {
        int gone = sender > 0 && kill(sender, 0) != 0 && errno == ESRCH; /* asked first: its last message counts */
        int status = read_message(path, data, size, tag);
        if (status == 0) return 0;
        if (status > 0 || gone) break;
        nanosleep(&(struct timespec){0, pause}, NULL);
    }
    atomic_fetch_add(&unanswered, 1);
    return -1;
}

/* ---- what a collective's caller knows ------------------------------------------------------------------------------- */

static int split_ranks;
void oom_next_split(int ranks) { split_ranks = ranks; }
int oom_split_ranks(void) { return split_ranks; }

static _Thread_local int known_here, operations, unknown_operations;

void oom_collective_begin(int known) {
    known_here = known;
    operations = unknown_operations = 0;
}

int oom_collective_known_here(void) { return known_here; }

void oom_collective_done(int known) {
    operations++;
    unknown_operations += !known;
}

int oom_collective_end(void) {
    known_here = 0;
    return operations == 0 ? -1 : unknown_operations == 0;
}
