/* Between the files of the device library; the stand-ins see device.h only. */
#ifndef OOMPROOF_INTERNAL_H
#define OOMPROOF_INTERNAL_H

#include "device.h"

#include <pthread.h>

extern pthread_mutex_t oom_lock; /* held around everything that is shared between threads */
extern int oom_rising;           /* segment addresses rise, as on WSL2 */
extern uint64_t oom_keep_bytes;  /* larger copies are not made */
extern int oom_arena_writable;   /* 0 where the system forbids overcommit: then no values are kept */

/* With the lock held, for a physical device. */
int oom_charge_locked(int physical, size_t size); /* -1 when the device is full */
void oom_discharge_locked(int physical, size_t size);
void oom_ensure_context_locked(int physical);

static inline size_t oom_round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

#endif
