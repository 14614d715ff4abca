/* libcuda: the CUDA driver API, asked by c10 (expandable segments), Triton, NVRTC users and extension wheels. */
#define _GNU_SOURCE
#include "device.h"

#include <cuda.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define PAGE ((size_t)2 << 20)

/* ---- errors, versions, look-up -------------------------------------------------------------------------------------- */

API CUresult cuInit(unsigned flags) {
    TRACE();
    (void)flags;
    return oom_device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

API CUresult cuDriverGetVersion(int *version) {
    TRACE();
    *version = oom_driver_version();
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
    TRACE();
    *text = error == CUDA_SUCCESS                 ? "no error"
            : error == CUDA_ERROR_OUT_OF_MEMORY   ? "out of memory"
            : error == CUDA_ERROR_INVALID_VALUE   ? "invalid argument"
            : error == CUDA_ERROR_NOT_SUPPORTED   ? "operation not supported"
            : error == CUDA_ERROR_NO_DEVICE       ? "no CUDA-capable device is detected"
                                                  : "unknown error";
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char **text) {
    TRACE();
    *text = error == CUDA_SUCCESS                 ? "CUDA_SUCCESS"
            : error == CUDA_ERROR_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == CUDA_ERROR_INVALID_VALUE   ? "CUDA_ERROR_INVALID_VALUE"
            : error == CUDA_ERROR_NOT_SUPPORTED   ? "CUDA_ERROR_NOT_SUPPORTED"
            : error == CUDA_ERROR_NO_DEVICE       ? "CUDA_ERROR_NO_DEVICE"
                                                  : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}

/* The newest version of a function that is exported here: cuMemAlloc means cuMemAlloc_v2. */
static void *look_up(const char *symbol) {
    static void *self;
    if (!self) self = dlopen("libcuda.so.1", RTLD_LAZY);
    char name[160];
    for (int version = 3; version >= 2 && self; version--) {
        snprintf(name, sizeof name, "%s_v%d", symbol, version);
        void *found = dlsym(self, name);
        if (found) return found;
    }
    return self ? dlsym(self, symbol) : NULL;
}

#undef cuGetProcAddress
API CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    TRACE();
    (void)version, (void)flags;
    *function = look_up(symbol);
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *status) {
    TRACE();
    (void)version, (void)flags;
    *function = look_up(symbol);
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    TRACE();
    (void)id;
    *table = NULL;
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- devices and contexts ------------------------------------------------------------------------------------------------ */

API CUresult cuDeviceGetCount(int *count) {
    TRACE();
    *count = oom_device_count();
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    TRACE();
    *device = ordinal;
    return oom_gpu(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    TRACE();
    if (!oom_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "%s", oom_gpu(device)->name);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    TRACE();
    if (!oom_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    oom_uuid(oom_physical_index(device), (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    TRACE();
    if (!oom_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = oom_gpu(device)->memory;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    TRACE();
    if (!oom_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    char full[32];
    oom_pci_bus_id(oom_physical_index(device), full, sizeof full);
    snprintf(text, (size_t)length, "%s", full + 4);
    return CUDA_SUCCESS;
}

/* One table for both APIs: cudaDeviceGetAttribute asks here too. */
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    TRACE();
    const struct oom_gpu *gpu = oom_gpu(device);
    if (!gpu) return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 2147483647; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = (int)gpu->shared_per_block; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = (int)gpu->shared_per_block_optin; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = (int)gpu->shared_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *value = (int)gpu->shared_reserved; break;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH: *value = 2147483647; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = gpu->registers_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = gpu->clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = gpu->memory_clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = gpu->bus_bits; break;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: *value = 512; break;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT: *value = 512; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = gpu->sm_count; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = gpu->threads_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = gpu->blocks_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = (int)gpu->l2; break;
    case CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE: *value = (int)(gpu->major >= 8 ? gpu->l2 * 3 / 4 : 0); break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = gpu->major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = gpu->minor; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = oom_physical_index(device) + 1; break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 3; break;
    case CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO: *value = gpu->minor == 0 && gpu->major != 12 ? 2 : 64; break;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

static _Thread_local int context_device = -1;

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(0x1000 + device * 16); }

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    TRACE();
    if (flags) *flags = 0;
    *active = oom_has_context(device);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    TRACE();
    if (!oom_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    oom_ensure_context(device);
    *context = context_of(device);
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    TRACE();
    int device = oom_current_device();
    *context = context_device >= 0 || oom_has_context(device) ? context_of(device) : NULL;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
    TRACE();
    if (context) {
        context_device = (int)(((uintptr_t)context - 0x1000) / 16);
        oom_set_current_device(context_device);
    }
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxSetCurrent(context); }

API CUresult cuCtxPopCurrent(CUcontext *context) {
    TRACE();
    if (context) *context = context_of(oom_current_device());
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device) {
    TRACE();
    *device = oom_current_device();
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    TRACE();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

/* ---- memory ------------------------------------------------------------------------------------------------------------------- */

API CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) {
    TRACE();
    uint64_t free_now = 0, total_now = 0;
    oom_memory_info(oom_current_device(), &free_now, &total_now);
    *free_bytes = free_now;
    *total = total_now;
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size) {
    TRACE();
    *pointer = (CUdeviceptr)oom_alloc(oom_current_device(), size);
    return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t size, unsigned flags) {
    TRACE();
    (void)flags;
    *pointer = (CUdeviceptr)oom_host_alloc(size, OOM_MANAGED);
    return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAllocPitch(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element) {
    TRACE();
    (void)element;
    *pitch = (width + 511) / 512 * 512;
    *pointer = (CUdeviceptr)oom_alloc(oom_current_device(), *pitch * height);
    return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemFree(CUdeviceptr pointer) {
    TRACE();
    int freed = oom_free((void *)pointer, NULL) == 0 || oom_host_free((void *)pointer, OOM_MANAGED) == 0;
    return freed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
    TRACE();
    (void)flags;
    *pointer = oom_host_alloc(size, OOM_PINNED);
    return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAllocHost(void **pointer, size_t size) { return cuMemHostAlloc(pointer, size, 0); }

API CUresult cuMemFreeHost(void *pointer) {
    TRACE();
    return oom_host_free(pointer, OOM_PINNED) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    TRACE();
    void *start;
    size_t bytes;
    int device;
    if (oom_find_allocation((void *)pointer, &start, &bytes, &device) != 0) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = (CUdeviceptr)start;
    if (size) *size = bytes;
    return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    TRACE();
    void *base;
    size_t size;
    int device = oom_current_device();
    int on_device = oom_find_allocation((void *)pointer, &base, &size, &device) == 0 ||
                    oom_is_device_address((void *)pointer);
    int kind = on_device ? OOM_PINNED : oom_host_find((void *)pointer, &base, &size);
    if (kind < 0) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = context_of(device); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(CUmemorytype *)value = on_device || kind == OOM_MANAGED ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = pointer; break; /* Triton's launcher */
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)value = on_device ? NULL : (void *)pointer; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = device; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = (CUdeviceptr)base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = size; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(int *)value = kind == OOM_MANAGED; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)value = (unsigned long long)base; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

#define COPY(name, to_type, from_type)                                        \
    API CUresult name(to_type to, from_type from, size_t size) {              \
        TRACE();                                                              \
        oom_copy((void *)to, (const void *)from, size);                       \
        return CUDA_SUCCESS;                                                  \
    }
#define COPY_ASYNC(name, to_type, from_type)                                  \
    API CUresult name(to_type to, from_type from, size_t size, CUstream s) {  \
        TRACE();                                                              \
        (void)s;                                                              \
        oom_copy((void *)to, (const void *)from, size);                       \
        return CUDA_SUCCESS;                                                  \
    }
COPY(cuMemcpy, CUdeviceptr, CUdeviceptr)
COPY(cuMemcpyHtoD, CUdeviceptr, const void *)
COPY(cuMemcpyDtoH, void *, CUdeviceptr)
COPY(cuMemcpyDtoD, CUdeviceptr, CUdeviceptr)
COPY_ASYNC(cuMemcpyAsync, CUdeviceptr, CUdeviceptr)
COPY_ASYNC(cuMemcpyHtoDAsync, CUdeviceptr, const void *)
COPY_ASYNC(cuMemcpyDtoHAsync, void *, CUdeviceptr)
COPY_ASYNC(cuMemcpyDtoDAsync, CUdeviceptr, CUdeviceptr)

#define FILL(name, type, width)                                               \
    API CUresult name(CUdeviceptr to, type value, size_t count) {             \
        TRACE();                                                              \
        oom_fill((void *)to, value, width, count);                            \
        return CUDA_SUCCESS;                                                  \
    }
#define FILL_ASYNC(name, type, width)                                         \
    API CUresult name(CUdeviceptr to, type value, size_t count, CUstream s) { \
        TRACE();                                                              \
        (void)s;                                                              \
        oom_fill((void *)to, value, width, count);                            \
        return CUDA_SUCCESS;                                                  \
    }
FILL(cuMemsetD8, unsigned char, 1)
FILL(cuMemsetD16, unsigned short, 2)
FILL(cuMemsetD32, unsigned, 4)
FILL_ASYNC(cuMemsetD8Async, unsigned char, 1)
FILL_ASYNC(cuMemsetD16Async, unsigned short, 2)
FILL_ASYNC(cuMemsetD32Async, unsigned, 4)

/* ---- virtual memory: PYTORCH_ALLOC_CONF=expandable_segments:True ------------------------------------------------------------- */

/* A physical handle counts from its creation until it is released and no longer mapped. */
struct physical {
    int device; /* -1: the host's */
    size_t size;
    int references;
    int counted; /* taken off the device by this process */
};

struct mapping {
    struct mapping *next;
    CUdeviceptr start;
    struct physical *physical;
};

static struct mapping *mappings;
static pthread_mutex_t mapping_lock = PTHREAD_MUTEX_INITIALIZER;

static void release(struct physical *physical) {
    if (--physical->references > 0) return;
    if (physical->counted) oom_discharge(physical->device, physical->size);
    free(physical);
}

API CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *prop,
                                           CUmemAllocationGranularity_flags option) {
    TRACE();
    (void)prop, (void)option;
    *size = PAGE;
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr address,
                                 unsigned long long flags) {
    TRACE();
    (void)address, (void)flags;
    *pointer = (CUdeviceptr)oom_reserve_addresses(size, alignment);
    return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    TRACE();
    oom_release_addresses((void *)pointer, size);
    return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                         unsigned long long flags) {
    TRACE();
    (void)flags;
    struct physical *made = malloc(sizeof *made);
    int on_host = prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE;
    *made = (struct physical){on_host ? -1 : prop->location.id, size, 1, !on_host};
    if (!on_host && oom_charge(made->device, size) != 0) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (CUmemGenericAllocationHandle)made;
    return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    TRACE();
    pthread_mutex_lock(&mapping_lock);
    release((struct physical *)handle);
    pthread_mutex_unlock(&mapping_lock);
    return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags) {
    TRACE();
    (void)size, (void)offset, (void)flags;
    struct mapping *made = malloc(sizeof *made);
    pthread_mutex_lock(&mapping_lock);
    *made = (struct mapping){mappings, pointer, (struct physical *)handle};
    made->physical->references++;
    mappings = made;
    if (made->physical->device >= 0) oom_set_address_device((void *)pointer, made->physical->device);
    pthread_mutex_unlock(&mapping_lock);
    return CUDA_SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    TRACE();
    pthread_mutex_lock(&mapping_lock);
    for (struct mapping **link = &mappings; *link;) {
        struct mapping *mapping = *link;
        if (mapping->start < pointer || mapping->start >= pointer + size) {
            link = &mapping->next;
            continue;
        }
        *link = mapping->next;
        oom_fill((void *)mapping->start, 0, 1, mapping->physical->size);
        release(mapping->physical);
        free(mapping);
    }
    pthread_mutex_unlock(&mapping_lock);
    return CUDA_SUCCESS;
}

/* Symmetric memory passes its allocations between ranks as file descriptors; what a rank imports is counted by its owner. */
API CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                          CUmemAllocationHandleType type, unsigned long long flags) {
    TRACE();
    (void)flags;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    struct physical shared = *(struct physical *)handle;
    int file = memfd_create("oomproof", MFD_CLOEXEC);
    if (file < 0 || write(file, &shared, sizeof shared) != (ssize_t)sizeof shared) return CUDA_ERROR_UNKNOWN;
    *(int *)shareable = file;
    return CUDA_SUCCESS;
}

API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                            CUmemAllocationHandleType type) {
    TRACE();
    struct physical shared, *made = malloc(sizeof *made);
    int file = (int)(intptr_t)shareable, posix = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (!posix || pread(file, &shared, sizeof shared, 0) != (ssize_t)sizeof shared) {
        free(made);
        return posix ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED;
    }
    *made = (struct physical){shared.device, shared.size, 1, 0};
    *handle = (CUmemGenericAllocationHandle)made;
    return CUDA_SUCCESS;
}

/* ---- modules, kernels, streams, events ----------------------------------------------------------------------------------------- */

#define MAKES_HANDLE(handle_type, name, parameters, ...)                      \
    API CUresult name parameters {                                            \
        TRACE();                                                              \
        __VA_ARGS__;                                                          \
        *made = (handle_type)oom_new_handle();                                \
        return CUDA_SUCCESS;                                                  \
    }

MAKES_HANDLE(CUmodule, cuModuleLoad, (CUmodule *made, const char *file), (void)file)
MAKES_HANDLE(CUmodule, cuModuleLoadData, (CUmodule *made, const void *image), (void)image)
MAKES_HANDLE(CUmodule, cuModuleLoadFatBinary, (CUmodule *made, const void *image), (void)image)
MAKES_HANDLE(CUmodule, cuModuleLoadDataEx,
             (CUmodule *made, const void *image, unsigned count, CUjit_option *options, void **values),
             (void)image, (void)count, (void)options, (void)values)
MAKES_HANDLE(CUfunction, cuModuleGetFunction, (CUfunction *made, CUmodule module, const char *name),
             (void)module, (void)name)
MAKES_HANDLE(CUlibrary, cuLibraryLoadData,
             (CUlibrary *made, const void *code, CUjit_option *jit, void **jit_values, unsigned jit_count,
              CUlibraryOption *options, void **values, unsigned count),
             (void)code, (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count)
MAKES_HANDLE(CUkernel, cuLibraryGetKernel, (CUkernel *made, CUlibrary library, const char *name),
             (void)library, (void)name)
MAKES_HANDLE(CUmodule, cuLibraryGetModule, (CUmodule *made, CUlibrary library), (void)library)
MAKES_HANDLE(CUlinkState, cuLinkCreate,
             (unsigned count, CUjit_option *options, void **values, CUlinkState *made),
             (void)count, (void)options, (void)values)
MAKES_HANDLE(CUstream, cuStreamCreate, (CUstream *made, unsigned flags), (void)flags)
MAKES_HANDLE(CUstream, cuStreamCreateWithPriority, (CUstream *made, unsigned flags, int priority),
             (void)flags, (void)priority)
MAKES_HANDLE(CUevent, cuEventCreate, (CUevent *made, unsigned flags), (void)flags)

API CUresult cuLinkComplete(CUlinkState state, void **cubin, size_t *size) {
    TRACE();
    *cubin = state;
    *size = 1024;
    return CUDA_SUCCESS;
}

API CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    TRACE();
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetGlobal(CUdeviceptr *pointer, size_t *size, CUmodule module, const char *name) {
    TRACE();
    (void)module, (void)name;
    if (pointer) *pointer = (CUdeviceptr)oom_reserve_addresses(PAGE, 0);
    if (size) *size = 8;
    return CUDA_SUCCESS;
}

static CUresult function_attribute(int *value, CUfunction_attribute attribute) {
    const struct oom_gpu *gpu = oom_gpu(oom_current_device());
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break; /* Triton refuses launches above it */
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = oom_binary_version(oom_current_device()); break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = gpu ? (int)gpu->shared_per_block_optin : 0; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    TRACE();
    (void)function;
    return function_attribute(value, attribute);
}

API CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device) {
    TRACE();
    (void)kernel, (void)device;
    return function_attribute(value, attribute);
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int block_size,
                                                         size_t shared) {
    TRACE();
    (void)function, (void)shared;
    const struct oom_gpu *gpu = oom_gpu(oom_current_device());
    int threads = gpu ? gpu->threads_per_sm : 1024;
    *blocks = block_size > 0 && block_size <= threads ? threads / block_size : 1;
    return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    TRACE();
    (void)function, (void)config;
    *clusters = oom_gpu(oom_current_device()) ? oom_gpu(oom_current_device())->sm_count : 1;
    return CUDA_SUCCESS;
}

/* Triton's launcher and what is compiled by NVRTC; counted for the meter. */
API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **parameters,
                            void **extra) {
    TRACE();
    (void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared, (void)stream, (void)parameters, (void)extra;
    oom_count_launch();
    return CUDA_SUCCESS;
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    TRACE();
    (void)config, (void)function, (void)parameters, (void)extra;
    oom_count_launch();
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    TRACE();
    (void)stream;
    *context = context_of(oom_current_device());
    return CUDA_SUCCESS;
}

/* Streams, events, graphs and pools are the runtime's own objects, whichever API made them, and so are its answers: the
 * two number their errors alike. */
#define RUNTIME(name, parameters, to, types, arguments)                       \
    API CUresult name parameters {                                            \
        TRACE();                                                              \
        int(*call) types = (int(*) types)dlsym(RTLD_DEFAULT, to);             \
        return call ? (CUresult)call arguments : CUDA_ERROR_NOT_SUPPORTED;    \
    }
RUNTIME(cuEventRecord, (CUevent e, CUstream s), "cudaEventRecord", (void *, void *), (e, s))
RUNTIME(cuEventRecordWithFlags, (CUevent e, CUstream s, unsigned flags), "cudaEventRecordWithFlags",
        (void *, void *, unsigned), (e, s, flags))
RUNTIME(cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent end), "cudaEventElapsedTime",
        (float *, void *, void *), (milliseconds, start, end))
RUNTIME(cuStreamWaitEvent, (CUstream s, CUevent e, unsigned flags), "cudaStreamWaitEvent", (void *, void *, unsigned),
        (s, e, flags))
RUNTIME(cuStreamIsCapturing, (CUstream s, CUstreamCaptureStatus *status), "cudaStreamIsCapturing", (void *, void *),
        (s, status))
RUNTIME(cuStreamBeginCapture, (CUstream s, CUstreamCaptureMode mode), "cudaStreamBeginCapture", (void *, int),
        (s, (int)mode))
RUNTIME(cuStreamEndCapture, (CUstream s, CUgraph *graph), "cudaStreamEndCapture", (void *, void *), (s, graph))
RUNTIME(cuGraphCreate, (CUgraph *graph, unsigned flags), "cudaGraphCreate", (void *, unsigned), (graph, flags))
RUNTIME(cuGraphInstantiateWithFlags, (CUgraphExec *exec, CUgraph graph, unsigned long long flags),
        "cudaGraphInstantiateWithFlags", (void *, void *, unsigned long long), (exec, graph, flags))
RUNTIME(cuMemAllocAsync, (CUdeviceptr *pointer, size_t size, CUstream s), "cudaMallocAsync", (void *, size_t, void *),
        (pointer, size, s))
RUNTIME(cuMemFreeAsync, (CUdeviceptr pointer, CUstream s), "cudaFreeAsync", (void *, void *), ((void *)pointer, s))
RUNTIME(cuMemAllocFromPoolAsync, (CUdeviceptr *pointer, size_t size, CUmemoryPool pool, CUstream s),
        "cudaMallocFromPoolAsync", (void *, size_t, void *, void *), (pointer, size, pool, s))
RUNTIME(cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *properties), "cudaMemPoolCreate",
        (void *, const void *), (pool, properties))
RUNTIME(cuDeviceGetDefaultMemPool, (CUmemoryPool *pool, CUdevice device), "cudaDeviceGetDefaultMemPool",
        (void *, int), (pool, device))
RUNTIME(cuDeviceGetMemPool, (CUmemoryPool *pool, CUdevice device), "cudaDeviceGetMemPool", (void *, int),
        (pool, device))
RUNTIME(cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), "cudaMemPoolTrimTo", (void *, size_t), (pool, keep))
RUNTIME(cuMemPoolSetAttribute, (CUmemoryPool pool, CUmemPool_attribute attribute, void *value),
        "cudaMemPoolSetAttribute", (void *, int, void *), (pool, (int)attribute, value))
RUNTIME(cuMemPoolGetAttribute, (CUmemoryPool pool, CUmemPool_attribute attribute, void *value),
        "cudaMemPoolGetAttribute", (void *, int, void *), (pool, (int)attribute, value))
