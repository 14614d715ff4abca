/* What device memory holds, as far as it is kept, and the log for the observer. */
#define _GNU_SOURCE
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- values ------------------------------------------------------------------------------------------------------------ */

static void (*read_callback)(const void *, size_t);

/* The last copies that came from the host, also through further copies on the device. DDP's reducer sends a list of
 * its buckets to the device, broadcasts it and reads it back, all inside C++ where nothing else sees it. */
#define COPIES 1024
static struct { const void *start; size_t size; } host_copies[COPIES];
static size_t host_copy_count;

static int find_host_copy(const void *start, size_t size) {
    for (int i = 0; i < COPIES; i++)
        if (host_copies[i].start == start && host_copies[i].size == size) return i;
    return -1;
}

static void note_locked(const void *to, size_t size, int known) {
    int place = find_host_copy(to, size);
    if (!known) {
        if (place >= 0) host_copies[place].size = 0;
    } else if (place < 0) {
        host_copies[host_copy_count % COPIES].start = to;
        host_copies[host_copy_count++ % COPIES].size = size;
    }
}

static void note_copy(const void *to, const void *from, size_t size, int from_device) {
    pthread_mutex_lock(&oom_lock);
    note_locked(to, size, !from_device || find_host_copy(from, size) >= 0);
    pthread_mutex_unlock(&oom_lock);
}

void oom_note_values(const void *pointer, size_t size, int known) {
    pthread_mutex_lock(&oom_lock);
    note_locked(pointer, size, known);
    pthread_mutex_unlock(&oom_lock);
}

int oom_values_kept(void) { return oom_arena_writable; }

int oom_from_host(const void *pointer, size_t size) {
    pthread_mutex_lock(&oom_lock);
    int found = size > 0 && find_host_copy(pointer, size) >= 0;
    pthread_mutex_unlock(&oom_lock);
    return found;
}

void oom_on_read(void (*callback)(const void *, size_t)) { read_callback = callback; }

void oom_copy(void *to, const void *from, size_t size) {
    int to_device = oom_is_device_address(to), from_device = oom_is_device_address(from);
    if (size == 0) return;
    if (from_device && !to_device && read_callback) read_callback(from, size);
    if (to_device && !from_device && size >= 512) oom_event(OOM_EVENT_FROM_HOST, to, size, "");
    if ((to_device || from_device) && !oom_arena_writable) {
        if (!to_device && size <= oom_keep_bytes) memset(to, 0, size);
        return;
    }
    if (!to_device && !from_device) {
        memcpy(to, from, size);
    } else if (size <= oom_keep_bytes) {
        memmove(to, from, size);
        if (to_device) note_copy(to, from, size, from_device);
    } else if (to_device) {
        oom_fill(to, 0, 1, size); /* too large to keep: its values are not known, and no stale ones may remain */
    }
}

/* Whole pages of zeros are given back to the host instead of being written. */
void oom_fill(void *to, uint32_t value, size_t width, size_t count) {
    char *start = to;
    size_t size = width * count;
    if (!oom_is_device_address(to)) {
        /* pinned or managed memory is the host's own */
    } else if (!oom_arena_writable) {
        return;
    } else if (size > oom_keep_bytes) {
        char *first = (char *)oom_round_up((size_t)start, 4096), *last = (char *)((size_t)(start + size) / 4096 * 4096);
        if (last > first) madvise(first, (size_t)(last - first), MADV_DONTNEED);
        return;
    }
    if (width == 1) {
        memset(start, (int)value, size);
    } else if (width == 2) {
        for (size_t i = 0; i < count; i++) ((uint16_t *)to)[i] = (uint16_t)value;
    } else {
        for (size_t i = 0; i < count; i++) ((uint32_t *)to)[i] = value;
    }
}

void oom_succeeded(void *codes, size_t count) {
    if (!codes) return;
    if (oom_is_device_address(codes))
        oom_fill(codes, 0, sizeof(int), count);
    else
        *(int *)codes = 0; /* the batched calls of cuBLAS that check their arguments on the host */
}

static void (*answer_callback)(const char *);

void oom_on_answer(void (*callback)(const char *)) { answer_callback = callback; }

void oom_answer(const char *what) {
    if (answer_callback) answer_callback(what);
}

/* ---- the observer's log --------------------------------------------------------------------------------------------------- */

#define EVENT_CAPACITY 65536
static struct oom_event *events;
static size_t event_count;

void oom_event(int kind, const void *address, uint64_t size, const char *what) {
    pthread_mutex_lock(&oom_lock);
    if (!events) events = malloc(EVENT_CAPACITY * sizeof *events);
    for (size_t i = event_count; kind <= OOM_EVENT_COMMUNICATION && events && i > 0 && i + 64 > event_count; i--) {
        struct oom_event *last = &events[i - 1]; /* a workspace that is used again and again is one event */
        if (last->kind == kind && last->address == (uint64_t)address && last->size == size) goto done;
    }
    if (events && event_count < EVENT_CAPACITY) {
        struct oom_event *event = &events[event_count++];
        *event = (struct oom_event){oom_now_ns(), (uint64_t)address, size, kind, oom_current_device(), ""};
        snprintf(event->what, sizeof event->what, "%s", what);
    }
done:
    pthread_mutex_unlock(&oom_lock);
}

size_t oom_events(struct oom_event *into, size_t capacity) {
    pthread_mutex_lock(&oom_lock);
    size_t count = event_count < capacity ? event_count : capacity;
    if (count) {
        memcpy(into, events, count * sizeof *events);
        memmove(events, events + count, (event_count - count) * sizeof *events);
        event_count -= count;
    }
    pthread_mutex_unlock(&oom_lock);
    return count;
}

uint64_t oom_new_handle(void) { return (uint64_t)calloc(1, 1024); }
void oom_free_handle(uint64_t handle) { free((void *)handle); }
