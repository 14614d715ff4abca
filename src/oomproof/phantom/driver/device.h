/* The phantom's devices: what they are, what is allocated on them, and what is told to the observer.
 *
 * Every stand-in library links to this one. It knows nothing of PyTorch. All sizes are bytes.
 */
#ifndef OOMPROOF_DEVICE_H
#define OOMPROOF_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#define OOM_MAX_DEVICES 16
#define OOM_EXPORT __attribute__((visibility("default")))

/* One GPU as its driver would describe it. Filled by Python through ctypes: keep in step with phantom/device.py. */
struct oom_gpu {
    char name[256];
    uint64_t memory;            /* total as cudaMemGetInfo and PyTorch report it */
    uint64_t nvml_memory;       /* total as NVML reports it */
    uint64_t context;           /* taken off by a process's CUDA context */
    uint64_t l2;
    uint64_t shared_per_block, shared_per_block_optin, shared_per_sm, shared_reserved;
    int32_t major, minor, sm_count;
    int32_t threads_per_sm, blocks_per_sm, registers_per_sm;
    int32_t clock_khz, memory_clock_khz, bus_bits;
    int32_t binary_version;     /* newest architecture among torch's kernels that runs here, 86 for sm_86 */
    int32_t mig;
    int32_t pad;
};

/* Something the observer wants to know about; see oom_event(). */
enum oom_event_kind {
    OOM_EVENT_WORKSPACE = 1,         /* address, size: a library was handed this block as its workspace */
    OOM_EVENT_COMMUNICATION = 2,     /* address, size: registered or used as a communication buffer */
    OOM_EVENT_OPTIONAL_WORKSPACE = 3, /* size: a library could have asked for up to this much and did not */
    OOM_EVENT_FROM_HOST = 4,          /* address, size: filled by a copy from the host */
    OOM_EVENT_COMMUNICATOR = 5        /* address, size: a communicator over so many ranks got its buffers */
};

struct oom_event {
    uint64_t time_ns; /* CLOCK_REALTIME */
    uint64_t address;
    uint64_t size;
    int32_t kind;
    int32_t device;
    char what[64];
};

/* Set-up, called by Python before torch is loaded. */
OOM_EXPORT void oom_configure(const struct oom_gpu *gpus, int count, const char *state_path, int unlimited,
                              int rising_addresses, uint64_t keep_bytes, int driver_version);
OOM_EXPORT void oom_set_binary_version(int version);
OOM_EXPORT void oom_lift_limit(void); /* no allocation fails from now on: what was measured is measured */

/* Devices. Numbers are those after CUDA_VISIBLE_DEVICES, read at the first call as the real driver does. */
OOM_EXPORT int oom_device_count(void);
OOM_EXPORT int oom_physical_count(void);
OOM_EXPORT const struct oom_gpu *oom_gpu(int device);
OOM_EXPORT const struct oom_gpu *oom_physical_gpu(int physical);
OOM_EXPORT int oom_physical_index(int device);
OOM_EXPORT int oom_current_device(void);
OOM_EXPORT int oom_set_current_device(int device); /* 0, or -1 when there is no such device */
OOM_EXPORT void oom_pci_bus_id(int physical, char *text, size_t size);
OOM_EXPORT void oom_uuid(int physical, unsigned char uuid[16]);
OOM_EXPORT int oom_driver_version(void);
OOM_EXPORT int oom_binary_version(int device);

/* Memory. */
OOM_EXPORT void oom_ensure_context(int device);
OOM_EXPORT int oom_has_context(int device);
OOM_EXPORT void *oom_alloc(int device, size_t size); /* NULL when the device is full */
OOM_EXPORT int oom_free(void *pointer, size_t *size); /* 0, or -1 when it is no allocation */
#define OOM_USUAL_PLACE ((void *)-1)
OOM_EXPORT void oom_on_place(void *(*place)(size_t size), void (*take_back)(void *pointer)); /* place: NULL refuses */
OOM_EXPORT int oom_charge(int device, size_t size);  /* counts without an address; -1 when the device is full */
OOM_EXPORT void oom_discharge(int device, size_t size);
OOM_EXPORT void *oom_reserve_addresses(size_t size, size_t alignment);
OOM_EXPORT void oom_release_addresses(void *pointer, size_t size);
OOM_EXPORT void oom_set_address_device(const void *pointer, int device); /* of reserved addresses: what is mapped there */
OOM_EXPORT void oom_memory_info(int device, uint64_t *free_bytes, uint64_t *total_bytes);
OOM_EXPORT int oom_is_device_address(const void *pointer);
OOM_EXPORT int oom_find_allocation(const void *pointer, void **base, size_t *size, int *device);
OOM_EXPORT uint64_t oom_process_used(int device);
OOM_EXPORT uint64_t oom_process_peak(int device);
OOM_EXPORT uint64_t oom_device_peak(int device); /* of all processes of the run together */
OOM_EXPORT int oom_device_processes(int physical, int *pids, uint64_t *used, int capacity);
OOM_EXPORT uint64_t oom_physical_used(int physical);

/* Pinned host memory, and managed memory, which the driver moves between host and GPU: it is never the cause of an
 * out-of-memory error, so it isn't counted on the device. */
enum oom_host_kind { OOM_PINNED, OOM_MANAGED, OOM_REGISTERED, OOM_HOST_KINDS };
OOM_EXPORT void *oom_host_alloc(size_t size, int kind);
OOM_EXPORT int oom_host_free(void *pointer, int kind); /* 0, or -1 when it is no allocation of this kind */
OOM_EXPORT int oom_host_register(void *pointer, size_t size);
OOM_EXPORT int oom_host_unregister(void *pointer);
OOM_EXPORT int oom_host_find(const void *pointer, void **base, size_t *size); /* its kind, or -1 */
OOM_EXPORT uint64_t oom_host_peak(void);
OOM_EXPORT uint64_t oom_managed_peak(void);

/* Values. Copies of at most keep_bytes are really made; larger ones only when they fill with zeros. */
OOM_EXPORT void oom_copy(void *to, const void *from, size_t size);
OOM_EXPORT void oom_fill(void *to, uint32_t value, size_t width, size_t count);
OOM_EXPORT int oom_from_host(const void *pointer, size_t size); /* 1: these bytes are a copy of the host's */
OOM_EXPORT uint64_t oom_refused(void);                          /* allocations that failed for want of memory */
OOM_EXPORT void oom_on_read(void (*callback)(const void *from, size_t size));
OOM_EXPORT void oom_succeeded(void *codes, size_t count); /* a library's int error codes, on the device or the host */

/* A library hands the host a number that a kernel would have computed; `what` is told like a read. */
OOM_EXPORT void oom_on_answer(void (*callback)(const char *what));
OOM_EXPORT void oom_answer(const char *what);

/* Kernels. */
OOM_EXPORT void oom_register_kernel(const void *function, const char *name);
OOM_EXPORT void oom_launched(const void *function); /* NULL: one that nobody registered */
OOM_EXPORT const char *oom_last_kernel(void);       /* mangled name of the last one that this thread launched, or "" */
OOM_EXPORT void oom_count_launch(void);             /* one that says nothing of what is read back, such as Triton's */
OOM_EXPORT uint64_t oom_launches(void);             /* kernels so far, those in graphs not among them */
OOM_EXPORT void oom_count_graph_launch(void);
OOM_EXPORT uint64_t oom_graph_launches(void);

OOM_EXPORT int oom_values_kept(void); /* 0 where the system forbids overcommit: device memory cannot be touched */
OOM_EXPORT void oom_note_values(const void *pointer, size_t size, int known); /* after writing to it directly */

/* Messages between the processes of a run, through files in a folder. */
OOM_EXPORT void oom_share(const char *folder);
OOM_EXPORT int oom_shares(void);
OOM_EXPORT int oom_post(const char *key, const void *data, size_t size, int64_t tag);
OOM_EXPORT void oom_unpost(const char *key);
OOM_EXPORT int oom_fetch(const char *key, void *data, size_t size, int64_t *tag, int sender);
OOM_EXPORT uint64_t oom_unanswered(void); /* messages that never came */

/* Around collectives. The value mirror says before one whether what it sends is known, and learns after it whether all
 * that came is. torch does not tell ncclCommSplit how many ranks the new communicator has: Python does. */
OOM_EXPORT void oom_collective_begin(int known);
OOM_EXPORT int oom_collective_end(void); /* -1: no operation of NCCL's ran */
OOM_EXPORT int oom_collective_known_here(void);
OOM_EXPORT void oom_collective_done(int known);
OOM_EXPORT void oom_next_split(int ranks);
OOM_EXPORT int oom_split_ranks(void);

/* What happened, for the observer. */
OOM_EXPORT void oom_event(int kind, const void *address, uint64_t size, const char *what);
OOM_EXPORT size_t oom_events(struct oom_event *into, size_t capacity); /* takes them out; returns how many */
OOM_EXPORT uint64_t oom_new_handle(void);                              /* unique, never 0, readable memory */
OOM_EXPORT void oom_free_handle(uint64_t handle);
OOM_EXPORT uint64_t oom_now_ns(void);

/* OOMPROOF_TRACE=1 writes each call to standard error. */
OOM_EXPORT extern int oom_tracing;
OOM_EXPORT void oom_trace(const char *name);
#define TRACE() do { if (__builtin_expect(oom_tracing, 0)) oom_trace(__func__); } while (0)

#endif
