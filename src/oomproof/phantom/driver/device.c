/* Devices, their memory accounting, the values that are kept, and the log for the observer. */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define PAGE_GRANULARITY (2 * MIB) /* the driver maps device memory in 2 MiB pages */
#define CHUNK (32 * MIB)           /* Linux: address space comes in multiples of this (recorded snapshots) */
#define MAX_PROCESSES 256

/* ---- configuration ---------------------------------------------------------------------------------------- */

static struct oom_gpu gpus[OOM_MAX_DEVICES];
static int physical_count;
static int visible[OOM_MAX_DEVICES]; /* physical index of each visible device */
static int visible_count = -1;       /* -1: CUDA_VISIBLE_DEVICES not read yet */
static int unlimited, rising;
static uint64_t keep_bytes = 64 << 10;
static int driver_version = 13000;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int current_device;

int oom_tracing;

void oom_trace(const char *name) {
    char line[192];
    int length = snprintf(line, sizeof line, "[oomproof %d] %s\n", (int)getpid(), name);
    if (write(STDERR_FILENO, line, (size_t)length) < 0) oom_tracing = 0; /* nobody listens */
}

uint64_t oom_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- memory in use, shared between the processes of one run ---------------------------------------------------- */

struct process {
    _Atomic int pid;
    _Atomic uint64_t used[OOM_MAX_DEVICES]; /* by physical device, contexts included */
};

struct shared_state {
    struct process processes[MAX_PROCESSES];
};

static struct shared_state own_state; /* used when there is no file to share */
static struct shared_state *state = &own_state;
static struct process *self;
static uint64_t peak[OOM_MAX_DEVICES];
static uint64_t refused;
static int contexts[OOM_MAX_DEVICES];

static int alive(int pid) { return pid > 0 && (kill(pid, 0) == 0 || errno == EPERM); }

/* Takes a slot for this process; slots of processes that have died are taken over. Called with the lock held. */
static struct process *own_slot(void) {
    if (self) return self;
    int me = (int)getpid();
    for (int i = 0; i < MAX_PROCESSES; i++) {
        struct process *slot = &state->processes[i];
        int owner = atomic_load(&slot->pid);
        if (owner != 0 && alive(owner) && owner != me) continue;
        if (!atomic_compare_exchange_strong(&slot->pid, &owner, me)) continue;
        for (int d = 0; d < OOM_MAX_DEVICES; d++) atomic_store(&slot->used[d], 0);
        return self = slot;
    }
    fprintf(stderr, "oomproof: more than %d processes use the phantom GPU at once\n", MAX_PROCESSES);
    abort();
}

static uint64_t used_by_all(int physical) {
    uint64_t sum = 0;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        struct process *slot = &state->processes[i];
        int pid = atomic_load(&slot->pid);
        if (pid == 0) continue;
        uint64_t used = atomic_load(&slot->used[physical]);
        if (used && (slot == self || alive(pid))) sum += used;
    }
    return sum;
}

static void after_fork_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    self = NULL; /* the child's memory is its own; a forked child may not use CUDA, as on a real GPU */
    memset(contexts, 0, sizeof contexts);
    if (state == &own_state) memset(&own_state, 0, sizeof own_state);
}

void oom_configure(const struct oom_gpu *described, int count, const char *state_path, int no_limit,
                   int rising_addresses, uint64_t keep, int version) {
    if (count > OOM_MAX_DEVICES) count = OOM_MAX_DEVICES;
    memcpy(gpus, described, (size_t)count * sizeof *gpus);
    physical_count = count;
    visible_count = -1;
    unlimited = no_limit;
    rising = rising_addresses;
    keep_bytes = keep;
    driver_version = version;
    const char *trace = getenv("OOMPROOF_TRACE");
    oom_tracing = trace && *trace && strcmp(trace, "0") != 0;
    pthread_atfork(NULL, NULL, after_fork_in_child);
    if (!state_path || !*state_path) return;
    int file = open(state_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file >= 0 && ftruncate(file, sizeof(struct shared_state)) == 0) {
        void *map = mmap(NULL, sizeof(struct shared_state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (map != MAP_FAILED) state = map;
    }
    if (file >= 0) close(file);
}

void oom_set_binary_version(int version) {
    for (int i = 0; i < physical_count; i++) gpus[i].binary_version = version;
}

int oom_driver_version(void) { return driver_version; }

/* ---- devices ------------------------------------------------------------------------------------------------------ */

/* CUDA_VISIBLE_DEVICES: indices or the beginnings of UUIDs; the first unknown entry ends the list, as documented. */
static void read_visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    if (!text) {
        for (int i = 0; i < physical_count; i++) visible[visible_count++] = i;
        return;
    }
    while (*text && visible_count < OOM_MAX_DEVICES) {
        int index = -1;
        while (*text == ' ') text++;
        if (strncmp(text, "GPU-", 4) == 0 || strncmp(text, "MIG-", 4) == 0) {
            size_t length = strcspn(text, ",");
            for (int i = 0; i < physical_count && index < 0; i++) {
                unsigned char u[16];
                char full[64];
                oom_uuid(i, u);
                snprintf(full, sizeof full, "%.4s%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
                         text, u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12],
                         u[13], u[14], u[15]);
                if (strncmp(full, text, length) == 0) index = i;
            }
            text += length;
        } else {
            char *end;
            long value = strtol(text, &end, 10);
            if (end == text) break;
            text = end;
            index = value >= 0 && value < physical_count ? (int)value : -1;
        }
        if (index < 0) break;
        visible[visible_count++] = index;
        while (*text == ' ' || *text == ',') text++;
    }
}

int oom_device_count(void) {
    if (visible_count < 0) {
        pthread_mutex_lock(&lock);
        if (visible_count < 0) read_visible();
        pthread_mutex_unlock(&lock);
    }
    return visible_count;
}

int oom_physical_count(void) { return physical_count; }

int oom_physical_index(int device) {
    return device >= 0 && device < oom_device_count() ? visible[device] : -1;
}

const struct oom_gpu *oom_physical_gpu(int physical) {
    return physical >= 0 && physical < physical_count ? &gpus[physical] : NULL;
}

const struct oom_gpu *oom_gpu(int device) { return oom_physical_gpu(oom_physical_index(device)); }

int oom_current_device(void) { return current_device; }

int oom_set_current_device(int device) {
    if (!oom_gpu(device)) return -1;
    current_device = device;
    return 0;
}

int oom_binary_version(int device) {
    const struct oom_gpu *gpu = oom_gpu(device);
    return gpu ? (gpu->binary_version ? gpu->binary_version : gpu->major * 10 + gpu->minor) : 0;
}

void oom_pci_bus_id(int physical, char *text, size_t size) {
    snprintf(text, size, "00000000:%02X:00.0", physical + 1);
}

void oom_uuid(int physical, unsigned char uuid[16]) {
    memcpy(uuid, "oomproofphantom", 15);
    uuid[15] = (unsigned char)physical;
}

/* ---- accounting ----------------------------------------------------------------------------------------------------- */

static int charge(int physical, size_t size) {
    struct process *slot = own_slot();
    if (!unlimited && used_by_all(physical) + size > gpus[physical].memory) {
        refused++;
        return -1;
    }
    uint64_t now = atomic_fetch_add(&slot->used[physical], size) + size;
    if (now > peak[physical]) peak[physical] = now;
    return 0;
}

static void ensure_context(int physical) {
    if (contexts[physical]) return;
    contexts[physical] = 1;
    struct process *slot = own_slot();
    uint64_t now = atomic_fetch_add(&slot->used[physical], gpus[physical].context) + gpus[physical].context;
    if (now > peak[physical]) peak[physical] = now;
}

void oom_ensure_context(int device) {
    int physical = oom_physical_index(device);
    if (physical < 0 || contexts[physical]) return;
    pthread_mutex_lock(&lock);
    ensure_context(physical);
    pthread_mutex_unlock(&lock);
}

int oom_has_context(int device) {
    int physical = oom_physical_index(device);
    return physical >= 0 && contexts[physical];
}

int oom_charge(int device, size_t size) {
    int physical = oom_physical_index(device);
    if (physical < 0) return -1;
    pthread_mutex_lock(&lock);
    ensure_context(physical);
    int result = charge(physical, size);
    pthread_mutex_unlock(&lock);
    return result;
}

void oom_discharge(int device, size_t size) {
    int physical = oom_physical_index(device);
    if (physical < 0) return;
    pthread_mutex_lock(&lock);
    atomic_fetch_sub(&own_slot()->used[physical], size);
    pthread_mutex_unlock(&lock);
}

void oom_memory_info(int device, uint64_t *free_bytes, uint64_t *total_bytes) {
    int physical = oom_physical_index(device);
    if (physical < 0) return;
    pthread_mutex_lock(&lock);
    ensure_context(physical);
    uint64_t used = used_by_all(physical);
    pthread_mutex_unlock(&lock);
    *total_bytes = gpus[physical].memory;
    *free_bytes = used < *total_bytes ? *total_bytes - used : 0;
}

uint64_t oom_process_used(int device) {
    int physical = oom_physical_index(device);
    return physical >= 0 && self ? atomic_load(&self->used[physical]) : 0;
}

uint64_t oom_process_peak(int device) {
    int physical = oom_physical_index(device);
    return physical >= 0 ? peak[physical] : 0;
}

uint64_t oom_refused(void) { return refused; }

uint64_t oom_physical_used(int physical) {
    return physical >= 0 && physical < physical_count ? used_by_all(physical) : 0;
}

int oom_device_processes(int physical, int *pids, uint64_t *used, int capacity) {
    int count = 0;
    for (int i = 0; i < MAX_PROCESSES && physical >= 0 && physical < physical_count; i++) {
        struct process *slot = &state->processes[i];
        int pid = atomic_load(&slot->pid);
        uint64_t bytes = atomic_load(&slot->used[physical]);
        if (!pid || !bytes || !alive(pid)) continue;
        if (count < capacity) {
            pids[count] = pid;
            used[count] = bytes;
        }
        count++;
    }
    return count;
}

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

static char *arena, *arena_end;
static int arena_writable;
static struct chunk *chunks;
static uint64_t chunks_made;

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

static int ensure_arena(void) {
    if (arena) return 0;
    for (size_t size = (size_t)32 << 40; size >= (size_t)1 << 30; size /= 2) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
        arena_writable = map != MAP_FAILED;
        if (!arena_writable) map = mmap(NULL, size, PROT_NONE, flags, -1, 0); /* overcommit forbidden: no values */
        if (map == MAP_FAILED) continue;
        madvise(map, size, MADV_NOHUGEPAGE); /* a kept value costs 4 KiB of host memory, not 2 MiB */
        madvise(map, size, MADV_DONTDUMP);
        arena = (char *)round_up((size_t)map, CHUNK);
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

/* A new chunk at the highest (or, rising, the lowest) gap between chunks that fits. */
static struct chunk *new_chunk(int physical, size_t size) {
    struct chunk **where = NULL;
    char *start = NULL, *upper = arena_end;
    for (struct chunk **link = &chunks;; link = &(*link)->next) {
        char *lower = *link ? (*link)->start + (*link)->size : arena;
        if ((size_t)(upper - lower) >= size) {
            where = link;
            start = rising ? lower : upper - size;
            if (!rising) break;
        }
        if (!*link) break;
        upper = (*link)->start;
    }
    struct chunk *made = where ? malloc(sizeof *made) : NULL;
    if (!made) return NULL;
    *made = (struct chunk){*where, start, size, physical, ++chunks_made, NULL};
    *where = made;
    return made;
}

static void *place(int physical, size_t size) {
    if (ensure_arena() != 0) return NULL;
    size_t taken = round_up(size ? size : 1, PAGE_GRANULARITY);
    struct segment *segment = rising ? NULL : place_in_hole(physical, taken, size);
    if (!segment) {
        struct chunk *chunk = new_chunk(physical, rising ? taken : round_up(taken, CHUNK));
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
    if (arena_writable) madvise(start, size, MADV_DONTNEED);
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

void *oom_alloc(int device, size_t size) {
    int physical = oom_physical_index(device);
    if (physical < 0) return NULL;
    size_t taken = round_up(size ? size : 1, PAGE_GRANULARITY);
    void *pointer = NULL;
    pthread_mutex_lock(&lock);
    ensure_context(physical);
    if (taken >= size && charge(physical, taken) == 0) {
        pointer = place(physical, size);
        if (!pointer) atomic_fetch_sub(&own_slot()->used[physical], taken);
    }
    pthread_mutex_unlock(&lock);
    return pointer;
}

int oom_free(void *pointer, size_t *size) {
    pthread_mutex_lock(&lock);
    struct chunk *chunk = NULL;
    struct segment *segment = find(pointer, &chunk);
    int found = segment && segment->start == (char *)pointer;
    if (found) {
        if (size) *size = segment->asked;
        atomic_fetch_sub(&own_slot()->used[chunk->physical], segment->size);
        unplace(chunk, segment);
    }
    pthread_mutex_unlock(&lock);
    return found ? 0 : -1;
}

/* Address space that is not memory yet: for cuMemAddressReserve and for opened IPC handles. */
void *oom_reserve_addresses(size_t size, size_t alignment) {
    if (alignment < PAGE_GRANULARITY) alignment = PAGE_GRANULARITY;
    void *pointer = NULL;
    pthread_mutex_lock(&lock);
    if (ensure_arena() == 0) {
        size_t taken = round_up(round_up(size, PAGE_GRANULARITY), alignment > CHUNK ? alignment : CHUNK);
        struct chunk *chunk = new_chunk(-1, taken);
        if (chunk && put(&chunk->segments, chunk->start, taken, size)) pointer = chunk->start;
    }
    pthread_mutex_unlock(&lock);
    return pointer;
}

void oom_release_addresses(void *pointer, size_t size) {
    (void)size;
    pthread_mutex_lock(&lock);
    struct chunk *chunk = NULL;
    struct segment *segment = find(pointer, &chunk);
    if (segment) unplace(chunk, segment);
    pthread_mutex_unlock(&lock);
}

int oom_is_device_address(const void *pointer) {
    return arena && (const char *)pointer >= arena && (const char *)pointer < arena_end;
}

int oom_find_allocation(const void *pointer, void **base, size_t *size, int *device) {
    if (!oom_is_device_address(pointer)) return -1;
    pthread_mutex_lock(&lock);
    struct chunk *chunk = NULL;
    struct segment *segment = find(pointer, &chunk);
    if (segment) {
        *base = segment->start;
        *size = segment->asked;
        *device = 0;
        for (int i = 0; i < oom_device_count(); i++)
            if (visible[i] == chunk->physical) *device = i;
    }
    pthread_mutex_unlock(&lock);
    return segment ? 0 : -1;
}

/* ---- pinned host memory ---------------------------------------------------------------------------------------------- */

struct host_block {
    struct host_block *next;
    char *start;
    size_t size;
    int mapped; /* ours to unmap */
};

static struct host_block *host_blocks;
static uint64_t host_used, host_peak;

static int host_add(void *start, size_t size, int mapped) {
    struct host_block *block = malloc(sizeof *block);
    if (!block) return -1;
    pthread_mutex_lock(&lock);
    *block = (struct host_block){host_blocks, start, size, mapped};
    host_blocks = block;
    host_used += size;
    if (host_used > host_peak) host_peak = host_used;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int host_remove(void *pointer) {
    pthread_mutex_lock(&lock);
    struct host_block **link = &host_blocks;
    while (*link && (*link)->start != (char *)pointer) link = &(*link)->next;
    struct host_block *block = *link;
    if (block) {
        *link = block->next;
        host_used -= block->size;
    }
    pthread_mutex_unlock(&lock);
    if (!block) return -1;
    if (block->mapped) munmap(block->start, block->size);
    free(block);
    return 0;
}

/* Pages come when they are touched, so a large staging buffer costs the host nothing. */
void *oom_host_alloc(size_t size) {
    size_t taken = round_up(size ? size : 1, 4096);
    void *map = mmap(NULL, taken, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return NULL;
    if (host_add(map, taken, 1) == 0) return map;
    munmap(map, taken);
    return NULL;
}

int oom_host_free(void *pointer) { return host_remove(pointer); }
int oom_host_register(void *pointer, size_t size) { return host_add(pointer, size, 0); }
int oom_host_unregister(void *pointer) { return host_remove(pointer); }
uint64_t oom_host_peak(void) { return host_peak; }

int oom_host_find(const void *pointer, void **base, size_t *size) {
    int found = -1;
    pthread_mutex_lock(&lock);
    for (struct host_block *block = host_blocks; block && found; block = block->next) {
        if ((const char *)pointer < block->start || (const char *)pointer >= block->start + block->size) continue;
        *base = block->start;
        *size = block->size;
        found = 0;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

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

static void note_copy(const void *to, const void *from, size_t size, int from_device) {
    pthread_mutex_lock(&lock);
    int known = find_host_copy(to, size);
    if (from_device && find_host_copy(from, size) < 0) {
        if (known >= 0) host_copies[known].size = 0;
    } else if (known < 0) {
        host_copies[host_copy_count % COPIES].start = to;
        host_copies[host_copy_count++ % COPIES].size = size;
    }
    pthread_mutex_unlock(&lock);
}

int oom_from_host(const void *pointer, size_t size) {
    pthread_mutex_lock(&lock);
    int found = size > 0 && find_host_copy(pointer, size) >= 0;
    pthread_mutex_unlock(&lock);
    return found;
}

void oom_on_read(void (*callback)(const void *, size_t)) { read_callback = callback; }

void oom_copy(void *to, const void *from, size_t size) {
    int to_device = oom_is_device_address(to), from_device = oom_is_device_address(from);
    if (size == 0) return;
    if (from_device && !to_device && read_callback) read_callback(from, size);
    if (to_device && !from_device && size >= 512) oom_event(OOM_EVENT_FROM_HOST, to, size, "");
    if ((to_device || from_device) && !arena_writable) {
        if (!to_device && size <= keep_bytes) memset(to, 0, size);
        return;
    }
    if (!to_device && !from_device) {
        memcpy(to, from, size);
    } else if (size <= keep_bytes) {
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
    } else if (!arena_writable) {
        return;
    } else if (size > keep_bytes) {
        char *first = (char *)round_up((size_t)start, 4096), *last = (char *)((size_t)(start + size) / 4096 * 4096);
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

/* ---- the observer's log --------------------------------------------------------------------------------------------------- */

#define EVENT_CAPACITY 65536
static struct oom_event *events;
static size_t event_count;

void oom_event(int kind, const void *address, uint64_t size, const char *what) {
    pthread_mutex_lock(&lock);
    if (!events) events = malloc(EVENT_CAPACITY * sizeof *events);
    for (size_t i = event_count; kind <= OOM_EVENT_COMMUNICATION && events && i > 0 && i + 64 > event_count; i--) {
        struct oom_event *last = &events[i - 1]; /* a workspace that is used again and again is one event */
        if (last->kind == kind && last->address == (uint64_t)address && last->size == size) goto done;
    }
    if (events && event_count < EVENT_CAPACITY) {
        struct oom_event *event = &events[event_count++];
        *event = (struct oom_event){oom_now_ns(), (uint64_t)address, size, kind, current_device, ""};
        snprintf(event->what, sizeof event->what, "%s", what);
    }
done:
    pthread_mutex_unlock(&lock);
}

size_t oom_events(struct oom_event *into, size_t capacity) {
    pthread_mutex_lock(&lock);
    size_t count = event_count < capacity ? event_count : capacity;
    if (count) {
        memcpy(into, events, count * sizeof *events);
        memmove(events, events + count, (event_count - count) * sizeof *events);
        event_count -= count;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

uint64_t oom_new_handle(void) { return (uint64_t)calloc(1, 1024); }
void oom_free_handle(uint64_t handle) { free((void *)handle); }
