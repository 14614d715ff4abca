/* libcudart: the CUDA runtime. Kernels are not run; everything that has an answer gives one. */
#define _GNU_SOURCE
#include "device.h"

#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

#if CUDART_VERSION < 12030 /* torch 2.4 */
typedef struct cudaGraphEdgeData_st cudaGraphEdgeData;
#endif

static _Thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

/* ---- errors and versions ------------------------------------------------------------------------------------------ */

API cudaError_t cudaGetLastError(void) {
    TRACE();
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

API cudaError_t cudaPeekAtLastError(void) {
    TRACE();
    return last_error;
}

API const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorSymbolNotFound: return "cudaErrorSymbolNotFound";
    default: return "cudaErrorUnknown";
    }
}

API const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorSymbolNotFound: return "named symbol not found";
    default: return "unknown error";
    }
}

API cudaError_t cudaDriverGetVersion(int *version) {
    TRACE();
    *version = oom_driver_version();
    return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int *version) {
    TRACE();
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* ---- devices --------------------------------------------------------------------------------------------------------- */

API cudaError_t cudaGetDeviceCount(int *count) {
    TRACE();
    *count = oom_device_count();
    return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int *device) {
    TRACE();
    *device = oom_current_device();
    return oom_device_count() ? cudaSuccess : fail(cudaErrorNoDevice);
}

API cudaError_t cudaSetDevice(int device) {
    TRACE();
    return oom_set_current_device(device) == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice);
}

/* ATen sizes grids, temporaries and the cuBLAS workspace from these, so they must be the named GPU's. */
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
    TRACE();
    const struct oom_gpu *gpu = oom_gpu(device);
    if (!gpu) return fail(cudaErrorInvalidDevice);
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "%s", gpu->name);
    oom_uuid(oom_physical_index(device), (unsigned char *)&prop->uuid);
    prop->totalGlobalMem = gpu->memory;
    prop->sharedMemPerBlock = gpu->shared_per_block;
    prop->sharedMemPerBlockOptin = gpu->shared_per_block_optin;
    prop->sharedMemPerMultiprocessor = gpu->shared_per_sm;
    prop->reservedSharedMemPerBlock = gpu->shared_reserved;
    prop->regsPerBlock = 65536;
    prop->regsPerMultiprocessor = gpu->registers_per_sm;
    prop->warpSize = 32;
    prop->memPitch = 2147483647;
    prop->maxThreadsPerBlock = 1024;
    prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
    prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = 2147483647;
    prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->totalConstMem = 65536;
    prop->major = gpu->major;
    prop->minor = gpu->minor;
    prop->textureAlignment = 512;
    prop->texturePitchAlignment = 32;
    prop->multiProcessorCount = gpu->sm_count;
    prop->canMapHostMemory = 1;
    prop->surfaceAlignment = 512;
    prop->concurrentKernels = 1;
    prop->pciBusID = oom_physical_index(device) + 1;
    prop->asyncEngineCount = 3;
    prop->unifiedAddressing = 1;
    prop->memoryBusWidth = gpu->bus_bits;
    prop->l2CacheSize = (int)gpu->l2;
    prop->persistingL2CacheMaxSize = (int)(gpu->major >= 8 ? gpu->l2 * 3 / 4 : 0);
    prop->maxThreadsPerMultiProcessor = gpu->threads_per_sm;
    prop->streamPrioritiesSupported = 1;
    prop->globalL1CacheSupported = prop->localL1CacheSupported = 1;
    prop->managedMemory = 1;
    prop->hostNativeAtomicSupported = 0;
    prop->concurrentManagedAccess = 1;
    prop->computePreemptionSupported = 1;
    prop->canUseHostPointerForRegisteredMem = 1;
    prop->cooperativeLaunch = 1;
    prop->maxBlocksPerMultiProcessor = gpu->blocks_per_sm;
    prop->hostRegisterSupported = 1;
    prop->memoryPoolsSupported = 1;
    prop->unifiedFunctionPointers = 0;
#if CUDART_VERSION < 13000
    prop->clockRate = gpu->clock_khz;
    prop->memoryClockRate = gpu->memory_clock_khz;
    prop->deviceOverlap = 1;
    prop->cooperativeMultiDeviceLaunch = 1;
#endif
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    TRACE();
    const struct oom_gpu *gpu = oom_gpu(device);
    if (!gpu) return fail(cudaErrorInvalidDevice);
    /* the driver API numbers the same attributes the same way; libcuda's table answers for both */
    static int (*get)(int *, int, int);
    if (!get) {
        void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
        get = driver ? (int (*)(int *, int, int))dlsym(driver, "cuDeviceGetAttribute") : NULL;
        if (!get) return fail(cudaErrorUnknown);
    }
    return get(value, (int)attribute, device) == 0 ? cudaSuccess : fail(cudaErrorInvalidValue);
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    TRACE();
    if (!oom_gpu(device)) return fail(cudaErrorInvalidDevice);
    char full[32];
    oom_pci_bus_id(oom_physical_index(device), full, sizeof full);
    snprintf(text, (size_t)length, "%s", full + 4); /* the runtime's domain has four digits, NVML's eight */
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text) {
    TRACE();
    for (int i = 0; i < oom_device_count(); i++) {
        char full[32];
        oom_pci_bus_id(oom_physical_index(i), full, sizeof full);
        if (strstr(full, text)) {
            *device = i;
            return cudaSuccess;
        }
    }
    return fail(cudaErrorInvalidDevice);
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    TRACE();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    TRACE();
    *can = device != peer && oom_gpu(device) && oom_gpu(peer);
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetP2PAttribute(int *value, enum cudaDeviceP2PAttr attribute, int source, int target) {
    TRACE();
    (void)attribute;
    *value = source != target;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetLimit(size_t *value, enum cudaLimit limit) {
    TRACE();
    *value = limit == cudaLimitStackSize ? 1024 : limit == cudaLimitMallocHeapSize ? 8u << 20 : 0;
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceFlags(unsigned *flags) {
    TRACE();
    *flags = 0;
    return cudaSuccess;
}

/* ---- streams, events, capture ------------------------------------------------------------------------------------------- */

struct stream {
    int priority;
    unsigned flags;
    unsigned long long capture_id; /* 0, or of a capture that has ended: not capturing */
};

/* A capture begins on one stream; others join it by waiting for an event that was recorded in it. PyTorch sends a
 * stream's allocations to the graph's pool by the capture's number. */
struct capture {
    struct capture *next;
    unsigned long long id;
    struct stream *origin;
    void *graph;
};

static struct capture *captures;
static unsigned long long capture_count;
static pthread_mutex_t capture_lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned long long capturing(cudaStream_t stream, void **graph);

static struct stream *real_stream(cudaStream_t stream) {
    return (uintptr_t)stream > 16 ? (struct stream *)stream : NULL; /* 0, 1 and 2 are the default streams */
}

static cudaError_t new_stream(cudaStream_t *stream, unsigned flags, int priority) {
    struct stream *made = (struct stream *)oom_new_handle();
    if (!made) return fail(cudaErrorMemoryAllocation);
    oom_ensure_context(oom_current_device());
    made->flags = flags;
    made->priority = priority < -5 ? -5 : priority > 0 ? 0 : priority;
    *stream = (cudaStream_t)made;
    return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    TRACE();
    return new_stream(stream, 0, 0);
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    TRACE();
    return new_stream(stream, flags, 0);
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    TRACE();
    return new_stream(stream, flags, priority);
}

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    TRACE();
    if (real_stream(stream)) oom_free_handle((uint64_t)stream);
    return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    TRACE();
    *priority = real_stream(stream) ? real_stream(stream)->priority : 0;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    TRACE();
    *flags = real_stream(stream) ? real_stream(stream)->flags : 0;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    TRACE();
    *id = (unsigned long long)stream;
    return cudaSuccess;
}

/* A callback runs at once: nothing on the phantom is ever still running. */
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    TRACE();
    if (!capturing(stream, NULL)) function(data);
    return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags) {
    TRACE();
    (void)flags;
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

static cudaError_t begin_capture(cudaStream_t stream, void *graph) {
    struct stream *real = real_stream(stream);
    struct capture *made = real ? malloc(sizeof *made) : NULL;
    if (!made) return fail(cudaErrorStreamCaptureUnsupported);
    pthread_mutex_lock(&capture_lock);
    *made = (struct capture){captures, ++capture_count, real, graph};
    captures = made;
    real->capture_id = made->id;
    pthread_mutex_unlock(&capture_lock);
    return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    TRACE();
    (void)mode;
    return begin_capture(stream, (void *)oom_new_handle());
}

API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *dependencies,
                                              const cudaGraphEdgeData *edges, size_t count,
                                              enum cudaStreamCaptureMode mode) {
    TRACE();
    (void)dependencies, (void)edges, (void)count, (void)mode;
    return begin_capture(stream, graph);
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    TRACE();
    struct stream *real = real_stream(stream);
    struct capture *ended = NULL;
    pthread_mutex_lock(&capture_lock);
    struct capture **link = &captures;
    while (*link && !(real && (*link)->origin == real && (*link)->id == real->capture_id)) link = &(*link)->next;
    if (*link) {
        ended = *link;
        *link = ended->next;
    }
    pthread_mutex_unlock(&capture_lock);
    if (!ended) return fail(cudaErrorIllegalState);
    *graph = (cudaGraph_t)ended->graph;
    free(ended);
    return cudaSuccess;
}

/* The number of the capture that a stream is in, 0 for none. */
static unsigned long long capturing(cudaStream_t stream, void **graph) {
    struct stream *real = real_stream(stream);
    unsigned long long found = 0;
    if (!real || !real->capture_id) return 0;
    pthread_mutex_lock(&capture_lock);
    for (struct capture *capture = captures; capture && !found; capture = capture->next) {
        if (capture->id != real->capture_id) continue;
        found = capture->id;
        if (graph) *graph = capture->graph;
    }
    pthread_mutex_unlock(&capture_lock);
    return found;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    TRACE();
    *status = capturing(stream, NULL) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

static void capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                         cudaGraph_t *graph, const cudaGraphNode_t **dependencies, size_t *count) {
    void *into = NULL;
    unsigned long long now = capturing(stream, &into);
    *status = now ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = now;
    if (graph) *graph = (cudaGraph_t)into;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
}

#if CUDART_VERSION >= 13000
#define GET_CAPTURE_INFO_WITH_EDGES cudaStreamGetCaptureInfo
#else
#define GET_CAPTURE_INFO_WITH_EDGES cudaStreamGetCaptureInfo_v3
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph,
                                         const cudaGraphNode_t **dependencies, size_t *count) {
    TRACE();
    capture_info(stream, status, id, graph, dependencies, count);
    return cudaSuccess;
}
#endif

API cudaError_t GET_CAPTURE_INFO_WITH_EDGES(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                            size_t *count) {
    TRACE();
    if (edges) *edges = NULL;
    capture_info(stream, status, id, graph, dependencies, count);
    return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    static _Thread_local enum cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
    TRACE();
    enum cudaStreamCaptureMode before = current;
    current = *mode;
    *mode = before;
    return cudaSuccess;
}

/* Kernels take no time here, so time is what orders events, and nothing else: 1 ms between any two. Whoever chooses by
 * time (Inductor, Triton's autotuner) then sees equals and takes the first, in each run the same. Host time would make
 * the choice, and with it the memory, a matter of noise. */
#define MILLISECONDS_BETWEEN_EVENTS 1.0f

struct event {
    uint64_t number;
    unsigned long long capture_id;
};

static cudaError_t new_event(cudaEvent_t *event) {
    *event = (cudaEvent_t)oom_new_handle();
    return *event ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaEventCreate(cudaEvent_t *event) {
    TRACE();
    return new_event(event);
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    TRACE();
    (void)flags;
    return new_event(event);
}

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    TRACE();
    oom_free_handle((uint64_t)event);
    return cudaSuccess;
}

static cudaError_t record(cudaEvent_t event, cudaStream_t stream) {
    static uint64_t count;
    struct event *recorded = (struct event *)event;
    recorded->number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    recorded->capture_id = capturing(stream, NULL);
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    TRACE();
    return record(event, stream);
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    TRACE();
    (void)flags;
    return record(event, stream);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    TRACE();
    (void)flags;
    struct event *awaited = (struct event *)event;
    if (real_stream(stream) && awaited && awaited->capture_id && !capturing(stream, NULL))
        real_stream(stream)->capture_id = awaited->capture_id;
    return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    TRACE();
    uint64_t first = ((struct event *)start)->number, last = ((struct event *)end)->number;
    *milliseconds = last > first ? MILLISECONDS_BETWEEN_EVENTS : last < first ? -MILLISECONDS_BETWEEN_EVENTS : 0;
    return cudaSuccess;
}

/* ---- graphs ------------------------------------------------------------------------------------------------------------------ */

API cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags) {
    TRACE();
    (void)flags;
    *graph = (cudaGraph_t)oom_new_handle();
    return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    TRACE();
    oom_free_handle((uint64_t)graph);
    return cudaSuccess;
}

/* One node, so that torch does not warn of an empty graph. */
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    TRACE();
    if (nodes && *count) nodes[0] = (cudaGraphNode_t)graph;
    *count = 1;
    return cudaSuccess;
}

static cudaError_t instantiate(cudaGraphExec_t *exec) {
    oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, 0, 0, "CUDA: instantiated graphs");
    *exec = (cudaGraphExec_t)oom_new_handle();
    return *exec ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    TRACE();
    (void)graph, (void)flags;
    return instantiate(exec);
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    TRACE();
    (void)graph, (void)flags;
    return instantiate(exec);
}

API cudaError_t cudaGraphInstantiateWithParams(cudaGraphExec_t *exec, cudaGraph_t graph,
                                               cudaGraphInstantiateParams *parameters) {
    TRACE();
    (void)graph;
    parameters->errNode_out = NULL;
    parameters->result_out = cudaGraphInstantiateSuccess;
    return instantiate(exec);
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    TRACE();
    oom_free_handle((uint64_t)exec);
    return cudaSuccess;
}

API cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *pointer, cudaHostFn_t destroy, unsigned count,
                                     unsigned flags) {
    TRACE();
    (void)pointer, (void)destroy, (void)count, (void)flags;
    *object = (cudaUserObject_t)oom_new_handle();
    return cudaSuccess;
}

/* ---- memory -------------------------------------------------------------------------------------------------------------------- */

API cudaError_t cudaMalloc(void **pointer, size_t size) {
    TRACE();
    *pointer = NULL;
    if (size == 0) return cudaSuccess;
    *pointer = oom_alloc(oom_current_device(), size);
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaFree(void *pointer) {
    TRACE();
    if (!pointer) {
        oom_ensure_context(oom_current_device()); /* cudaFree(0) is the idiom that creates the context */
        return cudaSuccess;
    }
    int freed = oom_free(pointer, NULL) == 0 || oom_host_free(pointer, OOM_MANAGED) == 0;
    return freed ? cudaSuccess : fail(cudaErrorInvalidValue);
}

API cudaError_t cudaMallocManaged(void **pointer, size_t size, unsigned flags) {
    TRACE();
    (void)flags;
    oom_ensure_context(oom_current_device());
    *pointer = oom_host_alloc(size, OOM_MANAGED); /* bitsandbytes' paged optimizers keep state here */
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height) {
    TRACE();
    *pitch = (width + 511) / 512 * 512;
    *pointer = oom_alloc(oom_current_device(), *pitch * height);
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    TRACE();
    uint64_t free_now = 0, total = 0;
    oom_memory_info(oom_current_device(), &free_now, &total);
    *free_bytes = free_now;
    *total_bytes = total;
    return total ? cudaSuccess : fail(cudaErrorNoDevice);
}

API cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    TRACE();
    (void)flags;
    *pointer = oom_host_alloc(size, OOM_PINNED);
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaMallocHost(void **pointer, size_t size) {
    TRACE();
    *pointer = oom_host_alloc(size, OOM_PINNED);
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaFreeHost(void *pointer) {
    TRACE();
    return !pointer || oom_host_free(pointer, OOM_PINNED) == 0 ? cudaSuccess : fail(cudaErrorInvalidValue);
}

API cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    TRACE();
    (void)flags;
    return oom_host_register(pointer, size) == 0 ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaHostUnregister(void *pointer) {
    TRACE();
    return oom_host_unregister(pointer) == 0 ? cudaSuccess : fail(cudaErrorInvalidValue);
}

API cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    TRACE();
    (void)flags;
    *device = host;
    return cudaSuccess;
}

API cudaError_t cudaHostGetFlags(unsigned *flags, void *pointer) {
    TRACE();
    void *base;
    size_t size;
    *flags = 0;
    return oom_host_find(pointer, &base, &size) >= 0 ? cudaSuccess : fail(cudaErrorInvalidValue);
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    TRACE();
    void *base;
    size_t size;
    int kind;
    memset(attributes, 0, sizeof *attributes);
    attributes->device = oom_current_device();
    if (oom_is_device_address(pointer)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)pointer;
        oom_find_allocation(pointer, &base, &size, &attributes->device);
    } else if ((kind = oom_host_find(pointer, &base, &size)) >= 0) {
        attributes->type = kind == OOM_MANAGED ? cudaMemoryTypeManaged : cudaMemoryTypeHost;
        attributes->devicePointer = attributes->hostPointer = (void *)pointer;
    } else {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -2;
        attributes->hostPointer = (void *)pointer;
    }
    return cudaSuccess;
}

/* Another process's memory: address space here, counted there. */
struct ipc_handle {
    uint64_t size, offset;
};

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    TRACE();
    void *base;
    size_t size;
    int device;
    if (oom_find_allocation(pointer, &base, &size, &device) != 0) return fail(cudaErrorInvalidValue);
    memset(handle, 0, sizeof *handle);
    struct ipc_handle made = {size, (uint64_t)((char *)pointer - (char *)base)};
    memcpy(handle, &made, sizeof made);
    return cudaSuccess;
}

API cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
    TRACE();
    (void)flags;
    struct ipc_handle opened;
    memcpy(&opened, &handle, sizeof opened);
    *pointer = oom_reserve_addresses(opened.size, 0);
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    TRACE();
    oom_release_addresses(pointer, 0);
    return cudaSuccess;
}

API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
    TRACE();
    (void)handle;
    return new_event(event);
}

/* ---- copies ------------------------------------------------------------------------------------------------------------------------ */

API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    TRACE();
    (void)kind;
    oom_copy(to, from, size);
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t s) {
    TRACE();
    (void)kind, (void)s;
    oom_copy(to, from, size);
    return cudaSuccess;
}

API cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t size) {
    TRACE();
    (void)to_device, (void)from_device;
    oom_copy(to, from, size);
    return cudaSuccess;
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                    cudaStream_t s) {
    TRACE();
    (void)to_device, (void)from_device, (void)s;
    oom_copy(to, from, size);
    return cudaSuccess;
}

static void copy_2d(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height) {
    for (size_t row = 0; row < height; row++) oom_copy(to + row * to_pitch, from + row * from_pitch, width);
}

API cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                             size_t height, enum cudaMemcpyKind kind) {
    TRACE();
    (void)kind;
    copy_2d(to, to_pitch, from, from_pitch, width, height);
    return cudaSuccess;
}

API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                  size_t height, enum cudaMemcpyKind kind, cudaStream_t s) {
    TRACE();
    (void)kind, (void)s;
    copy_2d(to, to_pitch, from, from_pitch, width, height);
    return cudaSuccess;
}

API cudaError_t cudaMemset(void *to, int value, size_t size) {
    TRACE();
    oom_fill(to, (uint32_t)(unsigned char)value, 1, size);
    return cudaSuccess;
}

API cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t s) {
    TRACE();
    (void)s;
    oom_fill(to, (uint32_t)(unsigned char)value, 1, size);
    return cudaSuccess;
}

API cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, cudaStream_t s) {
    TRACE();
    (void)s;
    for (size_t row = 0; row < height; row++) oom_fill((char *)to + row * pitch, (unsigned char)value, 1, width);
    return cudaSuccess;
}

/* Device variables of a program's own CUDA code. They lie in its modules, so their memory is part of the context; each
 * gets address space at the first question. */
static struct variable {
    struct variable *next;
    const void *symbol;
    void *pointer;
    size_t size;
} *variables;
static pthread_mutex_t variable_lock = PTHREAD_MUTEX_INITIALIZER;

static struct variable *register_variable(const void *symbol, size_t size) {
    struct variable *made = malloc(sizeof *made);
    if (!made) return NULL;
    *made = (struct variable){variables, symbol, NULL, size};
    return variables = made;
}

API void __cudaRegisterVar(void **handle, char *symbol, char *address, const char *name, int external, size_t size,
                           int constant, int global) {
    (void)handle, (void)address, (void)name, (void)external, (void)constant, (void)global;
    pthread_mutex_lock(&variable_lock);
    register_variable(symbol, size);
    pthread_mutex_unlock(&variable_lock);
}

static cudaError_t find_variable(const void *symbol, void **pointer, size_t *size) {
    pthread_mutex_lock(&variable_lock);
    struct variable *found = variables;
    while (found && found->symbol != symbol) found = found->next;
    if (!found) found = register_variable(symbol, 2 << 20); /* registered in a way that isn't seen here */
    if (found && !found->pointer) found->pointer = oom_reserve_addresses(found->size, 0);
    pthread_mutex_unlock(&variable_lock);
    if (!found || !found->pointer) return fail(cudaErrorMemoryAllocation);
    *pointer = found->pointer;
    *size = found->size;
    return cudaSuccess;
}

API cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    TRACE();
    size_t size;
    return find_variable(symbol, pointer, &size);
}

API cudaError_t cudaGetSymbolSize(size_t *size, const void *symbol) {
    TRACE();
    void *pointer;
    return find_variable(symbol, &pointer, size);
}

static cudaError_t copy_variable(const void *symbol, void *host, size_t size, size_t offset, int to_device) {
    void *start;
    size_t whole;
    cudaError_t found = find_variable(symbol, &start, &whole);
    if (found) return found;
    if (offset > whole || size > whole - offset) return fail(cudaErrorInvalidValue);
    char *there = (char *)start + offset;
    oom_copy(to_device ? there : host, to_device ? host : there, size);
    return cudaSuccess;
}

API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                                   enum cudaMemcpyKind kind) {
    TRACE();
    (void)kind;
    return copy_variable(symbol, (void *)from, size, offset, 1);
}

API cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t size, size_t offset,
                                        enum cudaMemcpyKind kind, cudaStream_t s) {
    TRACE();
    (void)kind, (void)s;
    return copy_variable(symbol, (void *)from, size, offset, 1);
}

API cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset,
                                     enum cudaMemcpyKind kind) {
    TRACE();
    (void)kind;
    return copy_variable(symbol, to, size, offset, 0);
}

API cudaError_t cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t size, size_t offset,
                                          enum cudaMemcpyKind kind, cudaStream_t s) {
    TRACE();
    (void)kind, (void)s;
    return copy_variable(symbol, to, size, offset, 0);
}

/* ---- memory pools: PYTORCH_ALLOC_CONF=backend:cudaMallocAsync ------------------------------------------------------------------------ */

/* The driver's own pooling is not public; here a pool never fragments and grows in 32 MiB steps. So `reserved` of this
 * backend is a lower bound, and the report says so. */
struct pool {
    int device;
    uint64_t used, used_high, reserved, reserved_high, threshold;
};

static struct pool pools[OOM_MAX_DEVICES];
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;

static void pool_trim(struct pool *pool, uint64_t keep) {
    uint64_t needed = (pool->used + (32u << 20) - 1) / (32u << 20) * (32u << 20);
    if (needed < keep) needed = keep;
    if (pool->reserved <= needed) return;
    oom_discharge(pool->device, pool->reserved - needed);
    pool->reserved = needed;
}

API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    TRACE();
    if (!oom_gpu(device)) return fail(cudaErrorInvalidDevice);
    pools[device].device = device;
    *pool = (cudaMemPool_t)&pools[device];
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }

/* A program's own pools are its device's one here: what they hold is counted, where is not told apart. */
API cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties) {
    TRACE();
    return cudaDeviceGetDefaultMemPool(pool, properties->location.id);
}

static cudaError_t pool_alloc(struct pool *pool, void **pointer, size_t size) {
    pthread_mutex_lock(&pool_lock);
    uint64_t used = pool->used + (size + 511) / 512 * 512;
    uint64_t needed = (used + (32u << 20) - 1) / (32u << 20) * (32u << 20);
    *pointer = NULL;
    if (needed <= pool->reserved || oom_charge(pool->device, needed - pool->reserved) == 0) {
        *pointer = oom_reserve_addresses(size, 0);
        pool->used = used;
        if (needed > pool->reserved) pool->reserved = needed;
        if (pool->used > pool->used_high) pool->used_high = pool->used;
        if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
    }
    pthread_mutex_unlock(&pool_lock);
    return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

API cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) {
    TRACE();
    (void)stream;
    int device = oom_current_device();
    pools[device].device = device;
    return pool_alloc(&pools[device], pointer, size);
}

API cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t size, cudaMemPool_t pool, cudaStream_t stream) {
    TRACE();
    (void)stream;
    return pool_alloc((struct pool *)pool, pointer, size);
}

API cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    TRACE();
    (void)stream;
    void *base;
    size_t size;
    int device;
    if (oom_find_allocation(pointer, &base, &size, &device) != 0) return fail(cudaErrorInvalidValue);
    oom_release_addresses(pointer, size);
    struct pool *pool = &pools[oom_current_device()];
    pthread_mutex_lock(&pool_lock);
    pool->used -= (size + 511) / 512 * 512;
    pool_trim(pool, pool->threshold);
    pthread_mutex_unlock(&pool_lock);
    return cudaSuccess;
}

API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, size_t keep) {
    TRACE();
    pthread_mutex_lock(&pool_lock);
    pool_trim((struct pool *)handle, keep);
    pthread_mutex_unlock(&pool_lock);
    return cudaSuccess;
}

API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value) {
    TRACE();
    struct pool *pool = (struct pool *)handle;
    if (attribute == cudaMemPoolAttrReleaseThreshold) pool->threshold = *(uint64_t *)value;
    if (attribute == cudaMemPoolAttrUsedMemHigh) pool->used_high = pool->used;
    if (attribute == cudaMemPoolAttrReservedMemHigh) pool->reserved_high = pool->reserved;
    return cudaSuccess;
}

API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value) {
    TRACE();
    struct pool *pool = (struct pool *)handle;
    switch (attribute) {
    case cudaMemPoolAttrReleaseThreshold: *(uint64_t *)value = pool->threshold; break;
    case cudaMemPoolAttrUsedMemCurrent: *(uint64_t *)value = pool->used; break;
    case cudaMemPoolAttrUsedMemHigh: *(uint64_t *)value = pool->used_high; break;
    case cudaMemPoolAttrReservedMemCurrent: *(uint64_t *)value = pool->reserved; break;
    case cudaMemPoolAttrReservedMemHigh: *(uint64_t *)value = pool->reserved_high; break;
    default: *(int *)value = 1;
    }
    return cudaSuccess;
}

/* ---- kernels -------------------------------------------------------------------------------------------------------------------------- */

/* CUB picks its tuning by binaryVersion; Triton and ATen size blocks by maxThreadsPerBlock. */
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    TRACE();
    (void)function;
    const struct oom_gpu *gpu = oom_gpu(oom_current_device());
    if (!gpu) return fail(cudaErrorNoDevice);
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = oom_binary_version(oom_current_device());
    attributes->maxDynamicSharedSizeBytes = (int)gpu->shared_per_block;
    attributes->preferredShmemCarveout = -1;
    return cudaSuccess;
}

static void occupancy(int *blocks, int block_size) {
    const struct oom_gpu *gpu = oom_gpu(oom_current_device());
    int threads = gpu ? gpu->threads_per_sm : 1024, most = gpu ? gpu->blocks_per_sm : 16;
    int fitting = block_size > 0 ? threads / block_size : 1;
    *blocks = fitting < 1 ? 1 : fitting > most ? most : fitting;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                              size_t shared) {
    TRACE();
    (void)function, (void)shared;
    occupancy(blocks, block_size);
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                       int block_size, size_t shared, unsigned flags) {
    TRACE();
    (void)function, (void)shared, (void)flags;
    occupancy(blocks, block_size);
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *function, const cudaLaunchConfig_t *config) {
    TRACE();
    (void)function, (void)config;
    const struct oom_gpu *gpu = oom_gpu(oom_current_device());
    *clusters = gpu ? gpu->sm_count : 1;
    return cudaSuccess;
}

API cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *size, const void *function, int blocks, int threads) {
    TRACE();
    (void)function, (void)blocks, (void)threads;
    const struct oom_gpu *gpu = oom_gpu(oom_current_device());
    *size = gpu ? gpu->shared_per_block : 48 << 10;
    return cudaSuccess;
}

struct launch_configuration {
    dim3 grid, block;
    size_t shared;
    void *stream;
};

static _Thread_local struct launch_configuration pending[16];
static _Thread_local int pending_count;

/* nvcc's <<<…>>> pushes the configuration and the kernel's host stub pops it. */
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    TRACE();
    if (pending_count == 16) return 1;
    pending[pending_count++] = (struct launch_configuration){grid, block, shared, stream};
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    TRACE();
    if (pending_count == 0) return fail(cudaErrorMissingConfiguration);
    struct launch_configuration *popped = &pending[--pending_count];
    *grid = popped->grid;
    *block = popped->block;
    *shared = popped->shared;
    *(void **)stream = popped->stream;
    return cudaSuccess;
}

API void **__cudaRegisterFatBinary(void *binary) {
    static void *registered;
    registered = binary;
    return &registered;
}

API void __cudaRegisterFunction(void **binary, const char *function, char *device_function, const char *name,
                                int thread_limit, void *thread, void *block, dim3 *block_size, dim3 *grid_size,
                                int *warp_size) {
    (void)binary, (void)device_function, (void)thread_limit, (void)thread, (void)block, (void)block_size;
    (void)grid_size, (void)warp_size;
    oom_register_kernel(function, name);
}

API cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                 cudaStream_t stream) {
    TRACE();
    (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    oom_launched(function);
    return cudaSuccess;
}

/* What nvcc calls from CUDA 13 on; the kernel comes from __cudaGetKernel. */
API cudaError_t __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                   cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

API cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                            size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function, void **arguments) {
    TRACE();
    (void)configuration, (void)arguments;
    oom_launched(function);
    return cudaSuccess;
}

/* The meter says how many graphs were replayed: what is in them cannot be seen. */
API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    TRACE();
    (void)graph, (void)stream;
    oom_count_graph_launch();
    return cudaSuccess;
}

API char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    TRACE();
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

API cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    TRACE();
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

API cudaError_t cudaGetFuncBySymbol(cudaFunction_t *function, const void *symbol) {
    TRACE();
    *function = (cudaFunction_t)symbol;
    return cudaSuccess;
}

#if CUDART_VERSION >= 12080
API cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **jit_values,
                                    unsigned jit_count, enum cudaLibraryOption *options, void **values,
                                    unsigned count) {
    TRACE();
    (void)code, (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    *library = (cudaLibrary_t)oom_new_handle();
    return cudaSuccess;
}

API cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    TRACE();
    (void)library, (void)name;
    *kernel = (cudaKernel_t)oom_new_handle();
    return cudaSuccess;
}
#endif

/* torch asks for driver functions through the runtime: expandable segments, NVML's neighbours, Triton's launcher. */
static cudaError_t entry_point(const char *symbol, void **function, enum cudaDriverEntryPointQueryResult *status) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    int (*get)(const char *, void **, int, uint64_t, int *) =
        driver ? (int (*)(const char *, void **, int, uint64_t, int *))dlsym(driver, "cuGetProcAddress_v2") : NULL;
    *function = NULL;
    if (get) get(symbol, function, oom_driver_version(), 0, NULL);
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function || status ? cudaSuccess : fail(cudaErrorSymbolNotFound);
}

#if CUDART_VERSION < 13000
API cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                        enum cudaDriverEntryPointQueryResult *status) {
    TRACE();
    (void)flags;
    return entry_point(symbol, function, status);
}
#endif

#if CUDART_VERSION >= 12050
API cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                                 unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *status) {
    TRACE();
    (void)flags, (void)version;
    return entry_point(symbol, function, status);
}
#endif

/* The runtime's private tables are for NVIDIA's own tools. */
API cudaError_t cudaGetExportTable(const void **table, const cudaUUID_t *id) {
    TRACE();
    (void)id;
    *table = NULL;
    return fail(cudaErrorNotSupported);
}
