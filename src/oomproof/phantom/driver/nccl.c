/* libnccl: communicators exist, collectives answer in kind (one's own data in every place). */
#include "device.h"

#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

/* Device memory of one communicator over several GPUs: the low end of what public reports state for A100 and H100
 * machines, 544 to 688 MB; the report gives the range. measure/assemble.py has both. */
#define COMMUNICATOR_BYTES 544000000

struct communicator {
    int ranks, rank, device;
};

static size_t type_size(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* ncclDataType_t, nccl.h */
    return type >= 0 && type < 12 ? sizes[type] : 4;
}

API int ncclGetVersion(int *version) {
    TRACE();
    *version = OOM_NCCL_VERSION;
    return 0;
}

API const char *ncclGetErrorString(int status) { return status ? "unhandled error" : "no error"; }
API const char *ncclGetLastError(void *communicator) {
    (void)communicator;
    return "";
}

API int ncclGetUniqueId(char id[128]) {
    TRACE();
    memset(id, 0, 128);
    strcpy(id, "oomproof");
    return 0;
}

static int new_communicator(void **made, int ranks, int rank) {
    if (ranks > 1 && oom_charge(oom_current_device(), COMMUNICATOR_BYTES) != 0) return 1; /* ncclUnhandledCudaError */
    struct communicator *communicator = (struct communicator *)oom_new_handle();
    *communicator = (struct communicator){ranks, rank, oom_current_device()};
    if (ranks > 1) oom_event(OOM_EVENT_COMMUNICATOR, communicator, 0, "NCCL");
    *made = communicator;
    return 0;
}

struct unique_id {
    char text[128];
};

API int ncclCommInitRank(void **made, int ranks, struct unique_id id, int rank) {
    TRACE();
    (void)id;
    return new_communicator(made, ranks, rank);
}

API int ncclCommInitRankConfig(void **made, int ranks, struct unique_id id, int rank, void *config) {
    TRACE();
    (void)id, (void)config;
    return new_communicator(made, ranks, rank);
}

API int ncclCommInitRankScalable(void **made, int ranks, int rank, int count, struct unique_id *ids, void *config) {
    TRACE();
    (void)count, (void)ids, (void)config;
    return new_communicator(made, ranks, rank);
}

API int ncclCommInitAll(void **made, int count, const int *devices) {
    TRACE();
    for (int i = 0; i < count; i++) {
        new_communicator(&made[i], count, i);
        ((struct communicator *)made[i])->device = devices ? devices[i] : i;
    }
    return 0;
}

API int ncclCommSplit(void *communicator, int color, int key, void **made, void *config) {
    TRACE();
    (void)key, (void)config;
    struct communicator *parent = communicator;
    *made = NULL;
    return color < 0 ? 0 : new_communicator(made, parent->ranks, parent->rank);
}

API int ncclCommDestroy(void *communicator) {
    TRACE();
    struct communicator *gone = communicator;
    if (gone->ranks > 1) oom_discharge(gone->device, COMMUNICATOR_BYTES);
    oom_free_handle((uint64_t)communicator);
    return 0;
}

API int ncclCommAbort(void *communicator) { return ncclCommDestroy(communicator); }

API int ncclCommCount(void *communicator, int *count) {
    TRACE();
    *count = ((struct communicator *)communicator)->ranks;
    return 0;
}

API int ncclCommUserRank(void *communicator, int *rank) {
    TRACE();
    *rank = ((struct communicator *)communicator)->rank;
    return 0;
}

API int ncclCommCuDevice(void *communicator, int *device) {
    TRACE();
    *device = ((struct communicator *)communicator)->device;
    return 0;
}

API int ncclCommGetAsyncError(void *communicator, int *status) {
    TRACE();
    (void)communicator;
    *status = 0;
    return 0;
}

API int ncclMemAlloc(void **pointer, size_t size) {
    TRACE();
    *pointer = oom_alloc(oom_current_device(), size);
    return *pointer ? 0 : 1;
}

API int ncclMemFree(void *pointer) {
    TRACE();
    return oom_free(pointer, NULL) == 0 ? 0 : 4;
}

API int ncclCommRegister(void *communicator, void *buffer, size_t size, void **handle) {
    TRACE();
    (void)communicator;
    oom_event(OOM_EVENT_COMMUNICATION, buffer, size, "NCCL");
    *handle = buffer;
    return 0;
}

API int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, void *communicator) {
    TRACE();
    (void)scalar, (void)type, (void)residence, (void)communicator;
    *operation = 5;
    return 0;
}

/* Where a collective writes is a communication buffer, unless it turns out to be a gradient or a parameter. */
static void note(const void *buffer, size_t size, void *communicator) {
    if (((struct communicator *)communicator)->ranks > 1) oom_event(OOM_EVENT_COMMUNICATION, buffer, size, "NCCL");
}

/* Small buffers are really filled, so that a script that compares what ranks sent sees equal values. */
API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *communicator, void *s) {
    TRACE();
    (void)operation, (void)s;
    note(to, count * type_size(type), communicator);
    if (from != to) oom_copy(to, from, count * type_size(type));
    return 0;
}

API int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, void *communicator,
                   void *s) {
    TRACE();
    (void)operation, (void)s;
    int rank = ((struct communicator *)communicator)->rank;
    if (from != to && rank == root) oom_copy(to, from, count * type_size(type));
    return 0;
}

API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *communicator, void *s) {
    TRACE();
    (void)root, (void)communicator, (void)s;
    if (from != to) oom_copy(to, from, count * type_size(type));
    return 0;
}

API int ncclAllGather(const void *from, void *to, size_t count, int type, void *communicator, void *s) {
    TRACE();
    (void)s;
    size_t size = count * type_size(type);
    int ranks = ((struct communicator *)communicator)->ranks;
    note(to, size * (size_t)ranks, communicator);
    if (size > (64 << 10)) return 0; /* large buffers hold no kept values */
    for (int i = 0; i < ranks; i++)
        if ((char *)to + (size_t)i * size != from) oom_copy((char *)to + (size_t)i * size, from, size);
    return 0;
}

API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, void *communicator,
                          void *s) {
    TRACE();
    (void)operation, (void)s;
    size_t size = count * type_size(type);
    note(from, size * (size_t)((struct communicator *)communicator)->ranks, communicator);
    const char *own = (const char *)from + size * (size_t)((struct communicator *)communicator)->rank;
    if (own != to) oom_copy(to, own, size);
    return 0;
}
