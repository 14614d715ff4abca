/* libnvidia-ml: what nvidia-ml-py, nvitop and c10's expandable segments ask. The rest answers "not supported". */
#define _GNU_SOURCE
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef struct device *nvmlDevice_t; /* the physical index plus one */

struct memory {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

struct process_v1 {
    unsigned pid;
    unsigned long long used;
};

struct process_v2 {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

static int index_of(nvmlDevice_t device) { return (int)(uintptr_t)device - 1; }
static const struct oom_gpu *gpu_of(nvmlDevice_t device) { return oom_physical_gpu(index_of(device)); }

static int text(char *into, unsigned length, const char *value) {
    if (strlen(value) >= length) return INSUFFICIENT_SIZE;
    strcpy(into, value);
    return SUCCESS;
}

static int give(unsigned *into, unsigned value) {
    *into = value;
    return SUCCESS;
}

API int nvmlInit(void) { TRACE(); return SUCCESS; }
API int nvmlInit_v2(void) { TRACE(); return SUCCESS; }
API int nvmlInitWithFlags(unsigned flags) { TRACE(); (void)flags; return SUCCESS; }
API int nvmlShutdown(void) { TRACE(); return SUCCESS; }

API const char *nvmlErrorString(int status) {
    return status == SUCCESS ? "Success" : status == NOT_SUPPORTED ? "Not Supported" : status == NOT_FOUND ? "Not Found" : "Unknown Error";
}

API int nvmlSystemGetDriverVersion(char *into, unsigned length) { TRACE(); return text(into, length, "phantom"); }
API int nvmlSystemGetNVMLVersion(char *into, unsigned length) { TRACE(); return text(into, length, "phantom"); }
API int nvmlSystemGetCudaDriverVersion(int *version) { TRACE(); *version = oom_driver_version(); return SUCCESS; }
API int nvmlSystemGetCudaDriverVersion_v2(int *version) { TRACE(); *version = oom_driver_version(); return SUCCESS; }
API int nvmlDeviceGetCount(unsigned *count) { TRACE(); return give(count, (unsigned)oom_physical_count()); }
API int nvmlDeviceGetCount_v2(unsigned *count) { TRACE(); return give(count, (unsigned)oom_physical_count()); }

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    TRACE();
    *device = (nvmlDevice_t)(uintptr_t)(index + 1);
    return gpu_of(*device) ? SUCCESS : INVALID_ARGUMENT;
}
API int nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    TRACE();
    for (int i = 0; i < oom_physical_count(); i++) {
        char full[32];
        oom_pci_bus_id(i, full, sizeof full);
        *device = (nvmlDevice_t)(uintptr_t)(i + 1);
        if (strcasestr(full, bus_id) || strcasestr(bus_id, full)) return SUCCESS;
    }
    return NOT_FOUND;
}
API int nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device) { return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device); }

static void uuid_text(int physical, char into[64]) {
    unsigned char u[16];
    oom_uuid(physical, u);
    snprintf(into, 64, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             oom_physical_gpu(physical)->mig ? "MIG" : "GPU", u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8],
             u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    TRACE();
    for (int i = 0; i < oom_physical_count(); i++) {
        char own[64];
        uuid_text(i, own);
        *device = (nvmlDevice_t)(uintptr_t)(i + 1);
        if (strcmp(own, uuid) == 0) return SUCCESS;
    }
    return NOT_FOUND;
}

API int nvmlDeviceGetName(nvmlDevice_t device, char *into, unsigned length) { TRACE(); return text(into, length, gpu_of(device)->name); }

API int nvmlDeviceGetUUID(nvmlDevice_t device, char *into, unsigned length) {
    TRACE();
    char own[64];
    uuid_text(index_of(device), own);
    return text(into, length, own);
}

API int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) { TRACE(); return give(index, (unsigned)index_of(device)); }
API int nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *index) { TRACE(); return give(index, (unsigned)index_of(device)); }

API int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci_info *info) {
    TRACE();
    memset(info, 0, sizeof *info);
    oom_pci_bus_id(index_of(device), info->bus_id, sizeof info->bus_id);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%.15s", info->bus_id + 4);
    info->bus = (unsigned)index_of(device) + 1;
    return SUCCESS;
}
API int nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, struct pci_info *info) { return nvmlDeviceGetPciInfo_v3(device, info); }
API int nvmlDeviceGetPciInfo(nvmlDevice_t device, struct pci_info *info) { return nvmlDeviceGetPciInfo_v3(device, info); }

API int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory *memory) {
    TRACE();
    memory->total = gpu_of(device)->nvml_memory;
    memory->used = oom_physical_used(index_of(device)) + (memory->total - gpu_of(device)->memory);
    memory->free = memory->used < memory->total ? memory->total - memory->used : 0;
    return SUCCESS;
}

/* Version 2 tells the driver's own share apart. */
API int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_v2 *memory) {
    TRACE();
    memory->total = gpu_of(device)->nvml_memory;
    memory->reserved = memory->total - gpu_of(device)->memory;
    memory->used = oom_physical_used(index_of(device));
    memory->free = memory->used + memory->reserved < memory->total ? memory->total - memory->used - memory->reserved : 0;
    return SUCCESS;
}

static int processes(nvmlDevice_t device, unsigned *count, void *into, int version) {
    int pids[256];
    uint64_t used[256];
    unsigned found = (unsigned)oom_device_processes(index_of(device), pids, used, 256);
    unsigned room = *count;
    *count = found;
    if (found > room) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < found; i++) {
        if (version == 1)
            ((struct process_v1 *)into)[i] = (struct process_v1){(unsigned)pids[i], used[i]};
        else
            ((struct process_v2 *)into)[i] = (struct process_v2){(unsigned)pids[i], used[i], 0xFFFFFFFF, 0xFFFFFFFF};
    }
    return SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t d, unsigned *count, void *into) { TRACE(); return processes(d, count, into, 1); }
API int nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t d, unsigned *count, void *into) { TRACE(); return processes(d, count, into, 2); }
API int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *count, void *into) { TRACE(); return processes(d, count, into, 2); }
API int nvmlDeviceGetGraphicsRunningProcesses(nvmlDevice_t d, unsigned *count, void *into) { TRACE(); (void)d, (void)into; return give(count, 0); }
API int nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t d, unsigned *count, void *into) { TRACE(); (void)d, (void)into; return give(count, 0); }
API int nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t d, unsigned *count, void *into) { TRACE(); (void)d, (void)into; return give(count, 0); }
API int nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *count, void *into) { TRACE(); (void)d, (void)into; return give(count, 0); }

API int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, unsigned rates[2]) {
    TRACE();
    (void)device;
    rates[0] = rates[1] = 0;
    return SUCCESS;
}

API int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    TRACE();
    *major = gpu_of(device)->major;
    *minor = gpu_of(device)->minor;
    return SUCCESS;
}

/* nvmlGpuFabricInfoV_t, up to its state; expandable segments and symmetric memory of PyTorch ask. From Hopper on the call
 * works, and says that this GPU is in no NVLink domain of several machines. */
struct fabric_info {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
};

API int nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, struct fabric_info *info) {
    TRACE();
    if (gpu_of(device)->major < 9) return NOT_SUPPORTED;
    *info = (struct fabric_info){.version = info->version};
    return SUCCESS;
}

API int nvmlDeviceGetMemoryBusWidth(nvmlDevice_t device, unsigned *width) { TRACE(); return give(width, (unsigned)gpu_of(device)->bus_bits); }
API int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) { TRACE(); (void)device; return give(count, 0); }
API int nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is) { TRACE(); (void)device; return give(is, 0); }
API int nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned size, unsigned long *set) {
    TRACE();
    (void)device;
    memset(set, 0xFF, size * sizeof *set); /* accelerate and torch ask; every core will do */
    return SUCCESS;
}
