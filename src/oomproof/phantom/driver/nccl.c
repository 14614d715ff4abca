/* libnccl: communicators exist, and small buffers are really exchanged.
 *
 * Between the processes of one run (torchrun) they go through exchange.c. A rank whose peers do not exist is answered
 * in kind, as if every rank held what it holds: its own data in every place, its own value times the number of ranks.
 */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

/* Larger buffers hold no kept values; the same limit as for copies. */
#define MOST_BYTES (1 << 20)
/* Messages of a communicator that stay readable; a rank that is further behind has given up. */
#define MESSAGES_KEPT 512
/* From 2.22 on connections, and so their buffers, are made at the first use (NCCL_RUNTIME_CONNECT=1). */
#define LAZY_VERSION 22200

#define SPLIT_NO_COLOR (-1)

/* As NCCL refuses no communicator at all. Torch 2.4 asks for the rank of what a split without a color left NULL, and
 * does not look at the answer. */
#define INVALID_ARGUMENT 4
#define NEEDS(communicator) \
    do { if ((communicator) == NULL) return INVALID_ARGUMENT; } while (0)

struct communicator {
    int ranks, rank, device;
    int in_kind;      /* its peers do not exist, or live in this process */
    int charged, all_to_all;
    uint64_t id;
    uint64_t made, splits, collectives;
    uint64_t *sent, *received; /* messages to and from each peer */
    int *pids;
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

/* ---- communicators ------------------------------------------------------------------------------------------------- */

static uint64_t hash(const void *data, size_t size, uint64_t seed) { /* FNV-1a */
    for (size_t i = 0; i < size; i++) seed = (seed ^ ((const unsigned char *)data)[i]) * 1099511628211ull;
    return seed;
}

struct unique_id {
    char text[128];
};

API int ncclGetUniqueId(struct unique_id *id) {
    TRACE();
    static int made;
    memset(id, 0, sizeof *id);
    snprintf(id->text, sizeof id->text, "oomproof %d %d %llu", (int)getpid(), made++,
             (unsigned long long)oom_now_ns());
    return 0;
}

/* The low end of what one communicator takes; measure/communicators.py has the sources, and the high end. */
static size_t lowest_bytes(const struct communicator *c) { return c->ranks > 2 ? 688000000 : 544000000; }

/* 0, or ncclUnhandledCudaError when the device has no room for the connections' buffers. */
static int connect(struct communicator *c) {
    if (c->charged || c->ranks < 2) return 0;
    if (oom_charge(c->device, lowest_bytes(c)) != 0) return 1;
    c->charged = 1;
    oom_event(OOM_EVENT_COMMUNICATOR, c, (uint64_t)c->ranks, "NCCL");
    return 0;
}

static int new_communicator(void **made, int ranks, int rank, uint64_t id, int in_kind) {
    struct communicator *c = calloc(1, sizeof *c);
    *c = (struct communicator){.ranks = ranks, .rank = rank, .device = oom_current_device(), .id = id};
    c->in_kind = in_kind || !oom_shares();
    c->sent = calloc((size_t)ranks, sizeof *c->sent);
    c->received = calloc((size_t)ranks, sizeof *c->received);
    c->pids = calloc((size_t)ranks, sizeof *c->pids);
    if (!c->in_kind && ranks > 1) {
        char key[64];
        snprintf(key, sizeof key, "%016llx-pid-%d", (unsigned long long)id, rank);
        oom_post(key, NULL, 0, (int)getpid());
    }
    *made = c;
    return OOM_NCCL_VERSION < LAZY_VERSION ? connect(c) : 0;
}

static uint64_t id_of(const struct unique_id *id) { return hash(id->text, sizeof id->text, 14695981039346656037ull); }

API int ncclCommInitRank(void **made, int ranks, struct unique_id id, int rank) {
    TRACE();
    return new_communicator(made, ranks, rank, id_of(&id), 0);
}

API int ncclCommInitRankConfig(void **made, int ranks, struct unique_id id, int rank, void *config) {
    TRACE();
    (void)config;
    return new_communicator(made, ranks, rank, id_of(&id), 0);
}

API int ncclCommInitRankScalable(void **made, int ranks, int rank, int count, struct unique_id *ids, void *config) {
    TRACE();
    (void)count, (void)config;
    return new_communicator(made, ranks, rank, id_of(ids), 0);
}

API int ncclCommInitAll(void **made, int count, const int *devices) {
    TRACE();
    int before = oom_current_device(), status = 0;
    for (int i = 0; i < count && status == 0; i++) {
        oom_set_current_device(devices ? devices[i] : i);
        status = new_communicator(&made[i], count, i, 0, 1);
    }
    oom_set_current_device(before);
    return status;
}

API int ncclCommSplit(void *communicator, int color, int key, void **made, void *config) {
    TRACE();
    NEEDS(communicator);
    (void)config;
    struct communicator *parent = communicator;
    uint64_t words[] = {parent->id, parent->splits++, (uint64_t)color};
    *made = NULL;
    if (color == SPLIT_NO_COLOR) return 0; /* other negative ones are colors: torch 2.4 hashes ranks into 64 bits */
    int ranks = oom_split_ranks() > 0 ? oom_split_ranks() : parent->ranks;
    return new_communicator(made, ranks, key, hash(words, sizeof words, 14695981039346656037ull), parent->in_kind);
}

API int ncclCommDestroy(void *communicator) {
    TRACE();
    struct communicator *gone = communicator;
    if (gone == NULL) return 0;
    if (gone->charged) oom_discharge(gone->device, lowest_bytes(gone));
    free(gone->sent);
    free(gone->received);
    free(gone->pids);
    free(gone);
    return 0;
}

API int ncclCommAbort(void *communicator) { return ncclCommDestroy(communicator); }

API int ncclCommCount(void *communicator, int *count) {
    TRACE();
    NEEDS(communicator);
    *count = ((struct communicator *)communicator)->ranks;
    return 0;
}

API int ncclCommUserRank(void *communicator, int *rank) {
    TRACE();
    NEEDS(communicator);
    *rank = ((struct communicator *)communicator)->rank;
    return 0;
}

API int ncclCommCuDevice(void *communicator, int *device) {
    TRACE();
    NEEDS(communicator);
    *device = ((struct communicator *)communicator)->device;
    return 0;
}

API int ncclCommGetAsyncError(void *communicator, int *status) {
    TRACE();
    NEEDS(communicator);
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
    return oom_free(pointer, NULL) == 0 ? 0 : INVALID_ARGUMENT;
}

API int ncclCommRegister(void *communicator, void *buffer, size_t size, void **handle) {
    TRACE();
    NEEDS(communicator);
    oom_event(OOM_EVENT_COMMUNICATION, buffer, size, "NCCL");
    *handle = buffer;
    return 0;
}

API int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, void *communicator) {
    TRACE();
    NEEDS(communicator);
    (void)scalar, (void)type, (void)residence;
    *operation = 5;
    return 0;
}

/* ---- arithmetic on small buffers ------------------------------------------------------------------------------------- */

enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE }; /* ncclRedOp_t */

#define FOLD(type)                                                              \
    do {                                                                        \
        type *a = into;                                                         \
        const type *b = other;                                                  \
        for (size_t i = 0; i < count; i++) {                                    \
            if (operation == SUM || operation == AVERAGE) a[i] = (type)(a[i] + b[i]); \
            else if (operation == PRODUCT) a[i] = (type)(a[i] * b[i]);          \
            else if (operation == MAXIMUM) a[i] = a[i] > b[i] ? a[i] : b[i];    \
            else a[i] = a[i] < b[i] ? a[i] : b[i];                              \
        }                                                                       \
    } while (0)

#define DIVIDE(type) \
    do { for (size_t i = 0; i < count; i++) ((type *)into)[i] = (type)(((type *)into)[i] / (type)ranks); } while (0)

/* Half precision is left as it is: nothing steers by it. */
static int computable(int type, int operation) {
    return operation >= SUM && operation <= AVERAGE && type >= 0 && type <= 8 && type != 6;
}

static void fold(void *into, const void *other, size_t count, int type, int operation) {
    switch (type) {
    case 0: FOLD(int8_t); break;
    case 1: FOLD(uint8_t); break;
    case 2: FOLD(int32_t); break;
    case 3: FOLD(uint32_t); break;
    case 4: FOLD(int64_t); break;
    case 5: FOLD(uint64_t); break;
    case 7: FOLD(float); break;
    case 8: FOLD(double); break;
    default: break;
    }
}

static void divide(void *into, size_t count, int type, int ranks) {
    switch (type) {
    case 0: DIVIDE(int8_t); break;
    case 1: DIVIDE(uint8_t); break;
    case 2: DIVIDE(int32_t); break;
    case 3: DIVIDE(uint32_t); break;
    case 4: DIVIDE(int64_t); break;
    case 5: DIVIDE(uint64_t); break;
    case 7: DIVIDE(float); break;
    case 8: DIVIDE(double); break;
    default: break;
    }
}

/* ---- operations ---------------------------------------------------------------------------------------------------- */

enum kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECEIVE };

struct operation {
    enum kind kind;
    const void *from;
    void *to;
    size_t count; /* elements that one rank holds or gets */
    int type, reduction, peer, known;
    uint64_t number;
    struct communicator *communicator;
};

static size_t bytes_of(const struct operation *o) { return o->count * type_size(o->type); }

/* Bytes that this rank gives to the others. */
static size_t given(const struct operation *o) {
    size_t size = bytes_of(o), ranks = (size_t)o->communicator->ranks;
    int own_root = o->peer == o->communicator->rank;
    switch (o->kind) {
    case REDUCE_SCATTER:
    case ALL_TO_ALL: return size * ranks;
    case BROADCAST: return own_root ? size : 0;
    case SCATTER: return own_root ? size * ranks : 0;
    case RECEIVE: return 0;
    default: return size;
    }
}

static int small(const struct operation *o) {
    size_t ranks = o->kind == SEND || o->kind == RECEIVE || o->kind == ALL_REDUCE ? 1 : (size_t)o->communicator->ranks;
    return bytes_of(o) * ranks <= MOST_BYTES && oom_values_kept();
}

static void key_of(char key[64], const struct operation *o, int sender) {
    unsigned long long id = (unsigned long long)o->communicator->id, number = (unsigned long long)o->number;
    if (o->kind == SEND)
        snprintf(key, 64, "%016llx-%d-%d-%llu", id, sender, o->peer, number);
    else if (o->kind == RECEIVE)
        snprintf(key, 64, "%016llx-%d-%d-%llu", id, sender, o->communicator->rank, number);
    else
        snprintf(key, 64, "%016llx-all-%d-%llu", id, sender, number);
}

static void post(struct operation *o) {
    struct communicator *c = o->communicator;
    if (o->kind == SEND) o->number = c->sent[o->peer]++;
    else if (o->kind == RECEIVE) o->number = c->received[o->peer]++;
    else o->number = c->collectives++;
    if (c->in_kind || c->ranks < 2 || !small(o) || o->kind == RECEIVE) return;
    char key[64];
    key_of(key, o, c->rank);
    if (given(o) && oom_post(key, o->from, given(o), o->known) != 0) c->in_kind = 1;
    if (o->number >= MESSAGES_KEPT) {
        struct operation old = *o;
        old.number -= MESSAGES_KEPT;
        key_of(key, &old, c->rank);
        oom_unpost(key);
    }
}

/* Waits for what another rank gave; -1 when it never comes, and then no more is expected of this communicator. */
static int fetch(struct operation *o, int sender, void *into, size_t size) {
    struct communicator *c = o->communicator;
    char key[64];
    int64_t tag = 0, pid = 0;
    if (c->in_kind) return -1;
    if (c->pids[sender] == 0) {
        snprintf(key, sizeof key, "%016llx-pid-%d", (unsigned long long)c->id, sender);
        if (oom_fetch(key, NULL, 0, &pid, 0) != 0) c->in_kind = 1;
        c->pids[sender] = (int)pid;
    }
    key_of(key, o, sender);
    if (c->in_kind || oom_fetch(key, into, size, &tag, c->pids[sender]) != 0) {
        c->in_kind = 1;
        return -1;
    }
    int from_one = o->kind == BROADCAST || o->kind == SCATTER || o->kind == RECEIVE; /* own values do not matter */
    o->known = tag && (from_one || o->known);
    return 0;
}

/* All that the ranks gave, one after another; in kind where they do not exist. NULL when nothing came. */
static char *gather(struct operation *o, size_t size) {
    struct communicator *c = o->communicator;
    char *all = malloc(size * (size_t)c->ranks + 1);
    for (int i = 0; i < c->ranks; i++)
        if (i == c->rank || fetch(o, i, all + (size_t)i * size, size) != 0) memcpy(all + (size_t)i * size, o->from, size);
    return all;
}

static void reduce(struct operation *o, void *to, size_t own_offset, size_t given_bytes) {
    struct communicator *c = o->communicator;
    size_t size = bytes_of(o);
    char *all = gather(o, given_bytes), *sum = malloc(size + 1);
    memcpy(sum, all + own_offset, size);
    if (computable(o->type, o->reduction)) {
        for (int i = 1; i < c->ranks; i++)
            fold(sum, all + (size_t)i * given_bytes + own_offset, o->count, o->type, o->reduction);
        if (o->reduction == AVERAGE) divide(sum, o->count, o->type, c->ranks);
    } else {
        memcpy(sum, all + (size_t)c->rank * given_bytes + own_offset, size);
        o->known = 0;
    }
    memcpy(to, sum, size);
    free(sum);
    free(all);
}

static void finish(struct operation *o, const struct operation *to_self) {
    struct communicator *c = o->communicator;
    size_t size = bytes_of(o), own = size * (size_t)c->rank;
    int root = o->peer == c->rank;
    if (size == 0) { /* nobody posts nothing: DeepSpeed's ZeRO-3 sends empty tensors */
        oom_collective_done(1);
        return;
    }
    if (!small(o)) { /* these hold no values; what was there before must not be read as the answer */
        if (o->kind == ALL_REDUCE || o->kind == BROADCAST || (o->kind == REDUCE && root)) {
            if (o->from != o->to) oom_copy(o->to, o->from, size);
        }
        oom_collective_done(0);
        return;
    }
    switch (o->kind) {
    case ALL_REDUCE:
        reduce(o, o->to, 0, size);
        break;
    case REDUCE:
        if (root) reduce(o, o->to, 0, size);
        break;
    case REDUCE_SCATTER:
        reduce(o, o->to, own, size * (size_t)c->ranks);
        break;
    case BROADCAST:
        if ((root || fetch(o, o->peer, o->to, size) != 0) && o->from != o->to) memcpy(o->to, o->from, size);
        break;
    case ALL_GATHER:
    case GATHER:
        if (o->kind == ALL_GATHER || root) {
            char *all = gather(o, size);
            memcpy(o->to, all, size * (size_t)c->ranks);
            free(all);
        }
        break;
    case ALL_TO_ALL: {
        size_t row = size * (size_t)c->ranks;
        char *all = gather(o, row);
        for (int i = 0; i < c->ranks; i++) memcpy((char *)o->to + (size_t)i * size, all + (size_t)i * row + own, size);
        free(all);
        break;
    }
    case SCATTER: {
        char *all = malloc(size * (size_t)c->ranks + 1);
        if (root) memcpy(o->to, (const char *)o->from + own, size);
        else if (fetch(o, o->peer, all, size * (size_t)c->ranks) == 0) memcpy(o->to, all + own, size);
        else o->known = 0;
        free(all);
        break;
    }
    case SEND:
        break;
    case RECEIVE: /* of an all-to-all that does not exist, the part that this rank would send itself */
        if (fetch(o, o->peer, o->to, size) == 0) break;
        if (to_self && bytes_of(to_self) == size) memmove(o->to, to_self->from, size);
        else o->known = 0;
        break;
    }
    oom_collective_done(o->known);
    if (o->kind != SEND && (o->kind != REDUCE || root) && (o->kind != GATHER || root))
        oom_note_values(o->to, o->kind == ALL_GATHER || o->kind == GATHER || o->kind == ALL_TO_ALL
                                   ? size * (size_t)c->ranks : size, o->known);
}

/* Operations between ncclGroupStart and ncclGroupEnd belong together: a rank sends before it waits. */
#define FIRST_QUEUE 64
static _Thread_local struct operation *queue;
static _Thread_local size_t queued, capacity;
static _Thread_local int depth;

static int run_queue(void) {
    int status = 0, received = 0;
    const struct operation *to_self = NULL;
    for (size_t i = 0; i < queued; i++) {
        struct operation *o = &queue[i];
        if (connect(o->communicator) != 0) status = 1;
        if (o->kind == SEND && o->peer == o->communicator->rank) to_self = o;
        received += o->kind == RECEIVE;
    }
    if (received > 2 && !queue[0].communicator->all_to_all) { /* each pair of ranks gets connections of its own */
        queue[0].communicator->all_to_all = 1;
        oom_event(OOM_EVENT_COMMUNICATOR, queue[0].communicator, (uint64_t)received, "NCCL all-to-all");
    }
    for (size_t i = 0; i < queued && status == 0; i++) post(&queue[i]);
    for (size_t i = 0; i < queued && status == 0; i++) finish(&queue[i], to_self);
    queued = 0;
    return status;
}

static int add(enum kind kind, const void *from, void *to, size_t count, int type, int reduction, int peer,
               void *communicator) {
    NEEDS(communicator);
    if (queued == capacity) {
        capacity = capacity ? 2 * capacity : FIRST_QUEUE;
        queue = realloc(queue, capacity * sizeof *queue);
    }
    struct communicator *c = communicator;
    queue[queued] = (struct operation){kind, from, to, count, type, reduction, peer, oom_collective_known_here(), 0, c};
    struct operation *o = &queue[queued++];
    size_t all = bytes_of(o) * (size_t)c->ranks;
    if (c->ranks > 1) { /* a communication buffer, unless it turns out to be a gradient or a parameter */
        if (kind == ALL_REDUCE) oom_event(OOM_EVENT_COMMUNICATION, to, bytes_of(o), "NCCL");
        if (kind == ALL_GATHER) oom_event(OOM_EVENT_COMMUNICATION, to, all, "NCCL");
        if (kind == REDUCE_SCATTER) oom_event(OOM_EVENT_COMMUNICATION, from, all, "NCCL");
    }
    o->known = o->known || (given(o) && oom_from_host(from, given(o)));
    return depth ? 0 : run_queue();
}

API int ncclGroupStart(void) {
    TRACE();
    depth++;
    return 0;
}

API int ncclGroupEnd(void) {
    TRACE();
    if (depth > 0) depth--;
    return depth ? 0 : run_queue();
}

API int ncclAllReduce(const void *from, void *to, size_t count, int type, int reduction, void *communicator, void *s) {
    TRACE();
    (void)s;
    return add(ALL_REDUCE, from, to, count, type, reduction, 0, communicator);
}

API int ncclReduce(const void *from, void *to, size_t count, int type, int reduction, int root, void *communicator,
                   void *s) {
    TRACE();
    (void)s;
    return add(REDUCE, from, to, count, type, reduction, root, communicator);
}

API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *communicator, void *s) {
    TRACE();
    (void)s;
    return add(BROADCAST, from, to, count, type, 0, root, communicator);
}

API int ncclBcast(void *buffer, size_t count, int type, int root, void *communicator, void *s) {
    return ncclBroadcast(buffer, buffer, count, type, root, communicator, s);
}

API int ncclAllGather(const void *from, void *to, size_t count, int type, void *communicator, void *s) {
    TRACE();
    (void)s;
    return add(ALL_GATHER, from, to, count, type, 0, 0, communicator);
}

API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int reduction, void *communicator,
                          void *s) {
    TRACE();
    (void)s;
    return add(REDUCE_SCATTER, from, to, count, type, reduction, 0, communicator);
}

API int ncclAlltoAll(const void *from, void *to, size_t count, int type, void *communicator, void *s) {
    TRACE();
    (void)s;
    return add(ALL_TO_ALL, from, to, count, type, 0, 0, communicator);
}

API int ncclGather(const void *from, void *to, size_t count, int type, int root, void *communicator, void *s) {
    TRACE();
    (void)s;
    return add(GATHER, from, to, count, type, 0, root, communicator);
}

API int ncclScatter(const void *from, void *to, size_t count, int type, int root, void *communicator, void *s) {
    TRACE();
    (void)s;
    return add(SCATTER, from, to, count, type, 0, root, communicator);
}

API int ncclSend(const void *from, size_t count, int type, int peer, void *communicator, void *s) {
    TRACE();
    (void)s;
    return add(SEND, from, NULL, count, type, 0, peer, communicator);
}

API int ncclRecv(void *to, size_t count, int type, int peer, void *communicator, void *s) {
    TRACE();
    (void)s;
    return add(RECEIVE, NULL, to, count, type, 0, peer, communicator);
}
