/* Where device memory lies, and pinned host memory. */
#define _GNU_SOURCE
#include "internal.h"

#include <stdlib.h>
#include <sys/mman.h>

#define MIB ((size_t)1 << 20)
#define PAGE_GRANULARITY (2 * MIB) /* the driver maps device memory in 2 MiB pages */
#define CHUNK (32 * MIB)           /* Linux: address space comes in multiples of this (recorded snapshots) */

/* ---- addresses -------------------------------------------------------------------------------------------------------- */

/* Device memory is address space inside one arena. On Linux the driver hands out chunks of a multiple of 32 MiB, each
 * new one at the highest gap that fits; a segment goes to the newest chunk with a hole that fits, there to the smallest
 * such hole (ties: the lowest address), else to a new chunk; a chunk whose segments are all freed goes back. PyTorch's best fit
 * breaks ties by address, so this order decides which block it takes next. With `rising` (WSL2) a segment goes to the
 * lowest gap that fits, without chunks. */
struct segment {
    struct segment *next; /* in rising address order within the chunk */
    char *start;
    size_t size; /* address space taken; a multiple of 2 MiB */
    size_t asked;
};

struct chunk {
    struct chunk *next; /* falling addresses */
    char *start;
    size_t size;
    int physical;
    uint64_t number; /* in the order in which chunks were made */
    struct segment *segments;
};

/* A replay of a recorded run says itself where segments lie. Nothing is there: they can be counted, not touched. The
 * recorded addresses are another process's, so they may well lie inside this one's arena. */
struct elsewhere {
    struct elsewhere *next; /* falling addresses */
    char *start;
    size_t size, asked;
    int physical;
};

static char *arena, *arena_end;
int oom_arena_writable;
static struct chunk *chunks;
static uint64_t chunks_made;
static struct elsewhere *placed_elsewhere;

static int ensure_arena(void) {
    if (arena) return 0;
    for (size_t size = (size_t)32 << 40; size >= (size_t)1 << 30; size /= 2) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
        oom_arena_writable = map != MAP_FAILED;
        if (!oom_arena_writable) map = mmap(NULL, size, PROT_NONE, flags, -1, 0); /* overcommit forbidden: no values */
        if (map == MAP_FAILED) continue;
        madvise(map, size, MADV_NOHUGEPAGE); /* a kept value costs 4 KiB of host memory, not 2 MiB */
        madvise(map, size, MADV_DONTDUMP);
        arena = (char *)oom_round_up((size_t)map, CHUNK);
        arena_end = (char *)((size_t)((char *)map + size) / CHUNK * CHUNK);
        return 0;
    }
    return -1;
}

static struct segment *put(struct segment **link, char *start, size_t size, size_t asked) {
    struct segment *made = malloc(sizeof *made);
    if (!made) return NULL;
    *made = (struct segment){*link, start, size, asked};
    *link = made;
    return made;
}

/* In the newest of the device's chunks that has room: the smallest hole that fits, the lowest address among equals.
 * Newest first is what published snapshots show: docs/accuracy.md. */
static struct segment *place_in_hole(int physical, size_t size, size_t asked) {
    struct segment **best_link = NULL;
    char *best_start = NULL;
    size_t best_size = 0;
    uint64_t best_number = 0;
    for (struct chunk *chunk = chunks; chunk; chunk = chunk->next) {
        if (chunk->physical != physical || chunk->number < best_number) continue;
        char *cursor = chunk->start;
        for (struct segment **link = &chunk->segments;; link = &(*link)->next) {
            char *until = *link ? (*link)->start : chunk->start + chunk->size;
            size_t hole = (size_t)(until - cursor);
            if (hole >= size && (chunk->number > best_number || hole < best_size)) {
                best_link = link;
                best_start = cursor;
                best_size = hole;
                best_number = chunk->number;
            }
            if (!*link) break;
            cursor = (*link)->start + (*link)->size;
        }
    }
    return best_link ? put(best_link, best_start, size, asked) : NULL;
}

static size_t room(const char *lower, const char *upper) { return upper > lower ? (size_t)(upper - lower) : 0; }

/* The highest (or, rising, the lowest) gap below `upper` that fits, between chunks and what a replay placed. */
static char *find_gap(char *upper, size_t size, struct chunk ***where) {
    char *start = NULL;
    struct chunk **link = &chunks;
    const struct elsewhere *other = placed_elsewhere;
    size_t step = oom_rising ? PAGE_GRANULARITY : CHUNK;
    for (;;) {
        char *lower = arena, *next = arena;
        int at_chunk = *link && (!other || (*link)->start >= other->start);
        if (at_chunk) {
            lower = (*link)->start + (*link)->size;
            next = (*link)->start;
        } else if (other) {
            lower = (char *)oom_round_up((size_t)(other->start + other->size), step);
            next = (char *)((size_t)other->start / step * step);
        }
        if (lower < arena) lower = arena;
        if (room(lower, upper) >= size) {
            *where = link;
            start = oom_rising ? lower : upper - size;
            if (!oom_rising) return start;
        }
        if (at_chunk) link = &(*link)->next;
        else if (other) other = other->next;
        else return start;
        if (next < upper) upper = next;
    }
}

/* Below all that a replay placed, if there is room: above and below it would otherwise depend on where Linux put the
 * arena this time, and PyTorch prefers low addresses. */
static struct chunk *new_chunk(int physical, size_t size) {
    char *upper = arena_end;
    for (const struct elsewhere *other = placed_elsewhere; other && other->start > arena; other = other->next)
        if (other->start < upper) upper = (char *)((size_t)other->start / CHUNK * CHUNK);
    struct chunk **where = NULL;
    char *start = find_gap(upper, size, &where);
    if (!start) start = find_gap(arena_end, size, &where);
    struct chunk *made = start ? malloc(sizeof *made) : NULL;
    if (!made) return NULL;
    *made = (struct chunk){*where, start, size, physical, ++chunks_made, NULL};
    *where = made;
    return made;
}

static void *place(int physical, size_t size) {
    if (ensure_arena() != 0) return NULL;
    size_t taken = oom_round_up(size ? size : 1, PAGE_GRANULARITY);
    struct segment *segment = oom_rising ? NULL : place_in_hole(physical, taken, size);
    if (!segment) {
        struct chunk *chunk = new_chunk(physical, oom_rising ? taken : oom_round_up(taken, CHUNK));
        segment = chunk ? put(&chunk->segments, chunk->start, taken, size) : NULL;
    }
    return segment ? segment->start : NULL;
}

static struct segment *find(const void *pointer, struct chunk **in_chunk) {
    const char *address = pointer;
    for (struct chunk *chunk = chunks; chunk; chunk = chunk->next) {
        if (address < chunk->start || address >= chunk->start + chunk->size) continue;
        for (struct segment *segment = chunk->segments; segment; segment = segment->next) {
            if (address >= segment->start && address < segment->start + segment->size) {
                if (in_chunk) *in_chunk = chunk;
                return segment;
            }
        }
    }
    return NULL;
}

static void forget(char *start, size_t size) {
    if (oom_arena_writable) madvise(start, size, MADV_DONTNEED);
}

static void unplace(struct chunk *chunk, struct segment *segment) {
    struct segment **link = &chunk->segments;
    while (*link != segment) link = &(*link)->next;
    *link = segment->next;
    forget(segment->start, segment->size);
    free(segment);
    if (chunk->segments) return;
    struct chunk **at = &chunks;
    while (*at != chunk) at = &(*at)->next;
    *at = chunk->next;
    free(chunk);
}

static void *(*on_place)(size_t size);
static void (*on_take_back)(void *pointer);

void oom_on_place(void *(*place)(size_t size), void (*take_back)(void *pointer)) {
    on_place = place;
    on_take_back = take_back;
}

/* Returns -1 where something lies already: a record that contradicts itself gets no address twice. */
static int put_elsewhere(int physical, char *start, size_t taken, size_t asked) {
    for (const struct chunk *chunk = chunks; chunk; chunk = chunk->next)
        if (room(start, chunk->start + chunk->size) && room(chunk->start, start + taken)) return -1;
    struct elsewhere **link = &placed_elsewhere;
    while (*link && (*link)->start >= start + taken) link = &(*link)->next;
    if (*link && (*link)->start + (*link)->size > start) return -1;
    struct elsewhere *made = malloc(sizeof *made);
    if (!made) return -1;
    *made = (struct elsewhere){*link, start, taken, asked, physical};
    *link = made;
    return 0;
}

static int take_back_elsewhere_locked(void *pointer, size_t *size) {
    struct elsewhere **link = &placed_elsewhere;
    while (*link && (*link)->start != (char *)pointer) link = &(*link)->next;
    struct elsewhere *found = *link;
    if (!found) return 0;
    if (size) *size = found->asked;
    oom_discharge_locked(found->physical, found->size);
    *link = found->next;
    free(found);
    return 1;
}

void *oom_alloc(int device, size_t size) {
    int physical = oom_physical_index(device);
    if (physical < 0) return NULL;
    size_t taken = oom_round_up(size ? size : 1, PAGE_GRANULARITY);
    void *asked_for = on_place ? on_place(size) : OOM_USUAL_PLACE; /* without the lock: it may be Python */
    if (!asked_for) return NULL;
    void *pointer = NULL;
    pthread_mutex_lock(&oom_lock);
    oom_ensure_context_locked(physical);
    if (taken >= size && oom_charge_locked(physical, taken) == 0) {
        int usual = asked_for == OOM_USUAL_PLACE || put_elsewhere(physical, asked_for, taken, size) != 0;
        pointer = usual ? place(physical, size) : asked_for;
        if (!pointer) oom_discharge_locked(physical, taken);
    }
    pthread_mutex_unlock(&oom_lock);
    return pointer;
}

int oom_free(void *pointer, size_t *size) {
    if (on_take_back) on_take_back(pointer);
    pthread_mutex_lock(&oom_lock);
    if (take_back_elsewhere_locked(pointer, size)) {
        pthread_mutex_unlock(&oom_lock);
        return 0;
    }
    struct chunk *chunk = NULL;
    struct segment *segment = find(pointer, &chunk);
    int found = segment && segment->start == (char *)pointer;
    if (found) {
        if (size) *size = segment->asked;
        oom_discharge_locked(chunk->physical, segment->size);
        unplace(chunk, segment);
    }
    pthread_mutex_unlock(&oom_lock);
    return found ? 0 : -1;
}

/* Address space that is not memory yet: for cuMemAddressReserve and for opened IPC handles. */
void *oom_reserve_addresses(size_t size, size_t alignment) {
    if (alignment < PAGE_GRANULARITY) alignment = PAGE_GRANULARITY;
    void *pointer = NULL;
    pthread_mutex_lock(&oom_lock);
    if (ensure_arena() == 0) {
        size_t taken = oom_round_up(oom_round_up(size, PAGE_GRANULARITY), alignment > CHUNK ? alignment : CHUNK);
        struct chunk *chunk = new_chunk(-1, taken);
        if (chunk && put(&chunk->segments, chunk->start, taken, size)) pointer = chunk->start;
    }
    pthread_mutex_unlock(&oom_lock);
    return pointer;
}

void oom_release_addresses(void *pointer, size_t size) {
    (void)size;
    pthread_mutex_lock(&oom_lock);
    struct chunk *chunk = NULL;
    struct segment *segment = find(pointer, &chunk);
    if (segment) unplace(chunk, segment);
    pthread_mutex_unlock(&oom_lock);
}

void oom_set_address_device(const void *pointer, int device) {
    pthread_mutex_lock(&oom_lock);
    struct chunk *chunk = NULL;
    if (find(pointer, &chunk)) chunk->physical = oom_physical_index(device);
    pthread_mutex_unlock(&oom_lock);
}

int oom_is_device_address(const void *pointer) {
    return arena && (const char *)pointer >= arena && (const char *)pointer < arena_end;
}

int oom_find_allocation(const void *pointer, void **base, size_t *size, int *device) {
    if (!oom_is_device_address(pointer)) return -1;
    pthread_mutex_lock(&oom_lock);
    struct chunk *chunk = NULL;
    struct segment *segment = find(pointer, &chunk);
    if (segment) {
        *base = segment->start;
        *size = segment->asked;
        *device = 0;
        for (int i = 0; i < oom_device_count(); i++)
            if (oom_physical_index(i) == chunk->physical) *device = i;
    }
    pthread_mutex_unlock(&oom_lock);
    return segment ? 0 : -1;
}

/* ---- pinned and managed memory: both the host's here ----------------------------------------------------------------- */

struct host_block {
    struct host_block *next;
    char *start;
    size_t size;
    int kind;
};

static struct host_block *host_blocks;
static uint64_t host_used[OOM_HOST_KINDS], host_peak[OOM_HOST_KINDS];

static int host_add(void *start, size_t size, int kind) {
    struct host_block *block = malloc(sizeof *block);
    if (!block) return -1;
    int total = kind == OOM_MANAGED ? OOM_MANAGED : OOM_PINNED; /* registered memory is pinned too */
    pthread_mutex_lock(&oom_lock);
    *block = (struct host_block){host_blocks, start, size, kind};
    host_blocks = block;
    host_used[total] += size;
    if (host_used[total] > host_peak[total]) host_peak[total] = host_used[total];
    pthread_mutex_unlock(&oom_lock);
    return 0;
}

static int host_remove(void *pointer, int kind) {
    pthread_mutex_lock(&oom_lock);
    struct host_block **link = &host_blocks;
    while (*link && ((*link)->start != (char *)pointer || (*link)->kind != kind)) link = &(*link)->next;
    struct host_block *block = *link;
    if (block) {
        *link = block->next;
        host_used[kind == OOM_MANAGED ? OOM_MANAGED : OOM_PINNED] -= block->size;
    }
    pthread_mutex_unlock(&oom_lock);
    if (!block) return -1;
    if (kind != OOM_REGISTERED) munmap(block->start, block->size);
    free(block);
    return 0;
}

/* Pages come when they are touched, so a large staging buffer costs the host nothing. */
void *oom_host_alloc(size_t size, int kind) {
    size_t taken = oom_round_up(size ? size : 1, 4096);
    void *map = mmap(NULL, taken, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return NULL;
    if (host_add(map, taken, kind) == 0) return map;
    munmap(map, taken);
    return NULL;
}

int oom_host_free(void *pointer, int kind) { return host_remove(pointer, kind); }
int oom_host_register(void *pointer, size_t size) { return host_add(pointer, size, OOM_REGISTERED); }
int oom_host_unregister(void *pointer) { return host_remove(pointer, OOM_REGISTERED); }
uint64_t oom_host_peak(void) { return host_peak[OOM_PINNED]; }
uint64_t oom_managed_peak(void) { return host_peak[OOM_MANAGED]; }

int oom_host_find(const void *pointer, void **base, size_t *size) {
    int found = -1;
    pthread_mutex_lock(&oom_lock);
    for (struct host_block *block = host_blocks; block && found < 0; block = block->next) {
        if ((const char *)pointer < block->start || (const char *)pointer >= block->start + block->size) continue;
        *base = block->start;
        *size = block->size;
        found = block->kind;
    }
    pthread_mutex_unlock(&oom_lock);
    return found;
}
