/* Which kernel was launched last, by its name: what a program then reads back may follow from that. And how many. */
#include "internal.h"

#include <stdatomic.h>
#include <stdlib.h>

/* Host function -> name of the kernel: open addressing, at most half full. torch registers some 30,000. */
static struct kernel { const void *function; const char *name; } *kernels;
static size_t capacity, registered;

static _Thread_local const void *last;
static atomic_uint_fast64_t launches, graph_launches;

static struct kernel *slot(struct kernel *table, size_t size, const void *function) {
    size_t at = ((size_t)function >> 4) * 0x9E3779B97F4A7C15u & (size - 1);
    while (table[at].function && table[at].function != function) at = (at + 1) & (size - 1);
    return &table[at];
}

void oom_register_kernel(const void *function, const char *name) {
    if (!function) return;
    pthread_mutex_lock(&oom_lock);
    if (2 * registered >= capacity) {
        size_t larger = capacity ? 2 * capacity : 1 << 15;
        struct kernel *table = calloc(larger, sizeof *table);
        if (table) {
            for (size_t i = 0; i < capacity; i++)
                if (kernels[i].function) *slot(table, larger, kernels[i].function) = kernels[i];
            free(kernels);
            kernels = table, capacity = larger;
        }
    }
    if (2 * registered < capacity) {
        struct kernel *entry = slot(kernels, capacity, function);
        registered += !entry->function;
        *entry = (struct kernel){function, name};
    }
    pthread_mutex_unlock(&oom_lock);
}

void oom_launched(const void *function) {
    last = function;
    oom_count_launch();
}

void oom_count_launch(void) { atomic_fetch_add_explicit(&launches, 1, memory_order_relaxed); }

uint64_t oom_launches(void) { return atomic_load_explicit(&launches, memory_order_relaxed); }

void oom_count_graph_launch(void) { atomic_fetch_add_explicit(&graph_launches, 1, memory_order_relaxed); }

uint64_t oom_graph_launches(void) { return atomic_load_explicit(&graph_launches, memory_order_relaxed); }

const char *oom_last_kernel(void) {
    pthread_mutex_lock(&oom_lock);
    const char *name = last && capacity ? slot(kernels, capacity, last)->name : NULL;
    pthread_mutex_unlock(&oom_lock);
    return name ? name : "";
}
