/* Devices, and how much of their memory is in use. memory.c has the addresses, values.c the contents. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_PROCESSES 256

/* ---- configuration ---------------------------------------------------------------------------------------- */

static struct oom_gpu gpus[OOM_MAX_DEVICES];
static int physical_count;
static int visible[OOM_MAX_DEVICES]; /* physical index of each visible device */
static int visible_count = -1;       /* -1: CUDA_VISIBLE_DEVICES not read yet */
static int unlimited;
int oom_rising;
uint64_t oom_keep_bytes = 64 << 10;
static int driver_version = 13000;
pthread_mutex_t oom_lock = PTHREAD_MUTEX_INITIALIZER;
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
    _Atomic uint64_t peak[OOM_MAX_DEVICES]; /* of all processes together */
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

static void note_peak(int physical, uint64_t own) {
    if (own > peak[physical]) peak[physical] = own;
    uint64_t all = used_by_all(physical), before = atomic_load(&state->peak[physical]);
    while (all > before && !atomic_compare_exchange_weak(&state->peak[physical], &before, all)) continue;
}

static void after_fork_in_child(void) {
    pthread_mutex_init(&oom_lock, NULL);
    self = NULL; /* the child's memory is its own; a forked child may not use CUDA, as on a real GPU */
    memset(contexts, 0, sizeof contexts);
    if (state == &own_state) memset(&own_state, 0, sizeof own_state);
}

void oom_lift_limit(void) { unlimited = 1; }

void oom_configure(const struct oom_gpu *described, int count, const char *state_path, int no_limit,
                   int rising_addresses, uint64_t keep, int version) {
    if (count > OOM_MAX_DEVICES) count = OOM_MAX_DEVICES;
    memcpy(gpus, described, (size_t)count * sizeof *gpus);
    physical_count = count;
    visible_count = -1;
    unlimited = no_limit;
    oom_rising = rising_addresses;
    oom_keep_bytes = keep;
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
        pthread_mutex_lock(&oom_lock);
        if (visible_count < 0) read_visible();
        pthread_mutex_unlock(&oom_lock);
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

int oom_charge_locked(int physical, size_t size) {
    struct process *slot = own_slot();
    if (!unlimited && used_by_all(physical) + size > gpus[physical].memory) {
        refused++;
        return -1;
    }
    uint64_t now = atomic_fetch_add(&slot->used[physical], size) + size;
    note_peak(physical, now);
    return 0;
}

void oom_ensure_context_locked(int physical) {
    if (contexts[physical]) return;
    contexts[physical] = 1;
    struct process *slot = own_slot();
    uint64_t now = atomic_fetch_add(&slot->used[physical], gpus[physical].context) + gpus[physical].context;
    note_peak(physical, now);
}

void oom_ensure_context(int device) {
    int physical = oom_physical_index(device);
    if (physical < 0 || contexts[physical]) return;
    pthread_mutex_lock(&oom_lock);
    oom_ensure_context_locked(physical);
    pthread_mutex_unlock(&oom_lock);
}

int oom_has_context(int device) {
    int physical = oom_physical_index(device);
    return physical >= 0 && contexts[physical];
}

int oom_charge(int device, size_t size) {
    int physical = oom_physical_index(device);
    if (physical < 0) return -1;
    pthread_mutex_lock(&oom_lock);
    oom_ensure_context_locked(physical);
    int result = oom_charge_locked(physical, size);
    pthread_mutex_unlock(&oom_lock);
    return result;
}

void oom_discharge_locked(int physical, size_t size) { atomic_fetch_sub(&own_slot()->used[physical], size); }

void oom_discharge(int device, size_t size) {
    int physical = oom_physical_index(device);
    if (physical < 0) return;
    pthread_mutex_lock(&oom_lock);
    oom_discharge_locked(physical, size);
    pthread_mutex_unlock(&oom_lock);
}

void oom_memory_info(int device, uint64_t *free_bytes, uint64_t *total_bytes) {
    int physical = oom_physical_index(device);
    if (physical < 0) return;
    pthread_mutex_lock(&oom_lock);
    oom_ensure_context_locked(physical);
    uint64_t used = used_by_all(physical);
    pthread_mutex_unlock(&oom_lock);
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

uint64_t oom_device_peak(int device) {
    int physical = oom_physical_index(device);
    return physical >= 0 ? atomic_load(&state->peak[physical]) : 0;
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
