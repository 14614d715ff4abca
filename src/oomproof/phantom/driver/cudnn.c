/* libcudnn: the backend (graph) API that convolutions and attention use, recurrent networks, and the older calls.
 *
 * Optional workspaces are not asked for. What a real cuDNN could have asked for is told to the observer as an
 * upper bound, since the choice among its plans is not public. */
#include "device.h"

#include <cudnn.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

#define API __attribute__((visibility("default")))

/* ---- library ---------------------------------------------------------------------------------------------------------- */

API size_t cudnnGetVersion(void) {
    TRACE();
    return CUDNN_VERSION;
}

API size_t cudnnGetCudartVersion(void) {
    TRACE();
    return (size_t)oom_driver_version();
}

API cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
    TRACE();
    *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
    return CUDNN_STATUS_SUCCESS;
}

API const char *cudnnGetErrorString(cudnnStatus_t status) {
    return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_INTERNAL_ERROR";
}

API void cudnnGetLastErrorString(char *message, size_t size) {
    TRACE();
    if (size) message[0] = 0;
}

struct handle {
    cudaStream_t stream;
};

API cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    TRACE();
    oom_ensure_context(oom_current_device());
    *handle = (cudnnHandle_t)oom_new_handle();
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    TRACE();
    oom_free_handle((uint64_t)handle);
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    TRACE();
    ((struct handle *)handle)->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
    TRACE();
    *stream = ((struct handle *)handle)->stream;
    return CUDNN_STATUS_SUCCESS;
}

static size_t type_size(int64_t type) {
    switch (type) {
    case CUDNN_DATA_DOUBLE:
    case CUDNN_DATA_INT64: return 8;
    case CUDNN_DATA_HALF:
    case CUDNN_DATA_BFLOAT16: return 2;
    case CUDNN_DATA_INT8:
    case CUDNN_DATA_UINT8:
    case CUDNN_DATA_BOOLEAN:
    case CUDNN_DATA_FP8_E4M3:
    case CUDNN_DATA_FP8_E5M2: return 1;
    default: return 4;
    }
}

/* ---- backend descriptors -------------------------------------------------------------------------------------------------- */

struct attribute {
    struct attribute *next;
    int name, type;
    int64_t count;
    char value[]; /* count elements */
};

struct descriptor {
    int type;
    struct attribute *attributes;
    struct descriptor *graph; /* of an engine or engine configuration that a heuristic filled in */
    int64_t bound;            /* of a plan: upper bound of its workspace; -1 until it is computed */
    int convolution;
};

static size_t element_size(int type) {
    switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    case CUDNN_TYPE_FRACTION: return 16;
    default: return 4; /* float, int32 and the enumerations */
    }
}

static const struct attribute *get(const struct descriptor *descriptor, int name) {
    const struct attribute *found = descriptor ? descriptor->attributes : NULL;
    while (found && found->name != name) found = found->next;
    return found;
}

static struct descriptor *get_descriptor(const struct descriptor *descriptor, int name) {
    const struct attribute *found = get(descriptor, name);
    return found && found->type == CUDNN_TYPE_BACKEND_DESCRIPTOR ? *(struct descriptor *const *)found->value : NULL;
}

API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *made) {
    TRACE();
    struct descriptor *descriptor = calloc(1, sizeof *descriptor);
    descriptor->type = (int)type;
    descriptor->bound = -1;
    *made = (cudnnBackendDescriptor_t)descriptor;
    return CUDNN_STATUS_SUCCESS;
}

/* Descriptors refer to each other and a plan outlives the graph it was made from, so only their values go. */
API cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t handle) {
    TRACE();
    struct descriptor *descriptor = (struct descriptor *)handle;
    if (descriptor && descriptor->type == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR) {
        for (struct attribute *next, *a = descriptor->attributes; a; a = next) next = a->next, free(a);
        free(descriptor);
    }
    return CUDNN_STATUS_SUCCESS;
}

static int64_t plan_bound(struct descriptor *plan);

API cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t handle) {
    TRACE();
    struct descriptor *descriptor = (struct descriptor *)handle;
    if (descriptor->type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) descriptor->bound = plan_bound(descriptor);
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t handle, cudnnBackendAttributeName_t name,
                                           cudnnBackendAttributeType_t type, int64_t count, const void *values) {
    TRACE();
    struct descriptor *descriptor = (struct descriptor *)handle;
    size_t size = (size_t)count * element_size((int)type);
    struct attribute *made = malloc(sizeof *made + size);
    *made = (struct attribute){descriptor->attributes, (int)name, (int)type, count};
    if (size && values) memcpy(made->value, values, size);
    descriptor->attributes = made; /* a later value hides an earlier one */
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t answer(int64_t *count, void *into, int64_t wanted, const void *value, size_t size) {
    if (count) *count = 1;
    if (into && wanted > 0) memcpy(into, value, size);
    return CUDNN_STATUS_SUCCESS;
}

/* The frontend passes descriptors of its own to be filled in; one engine configuration is offered. Workspace 0. */
API cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const handle, cudnnBackendAttributeName_t name,
                                           cudnnBackendAttributeType_t type, int64_t wanted, int64_t *count,
                                           void *values) {
    TRACE();
    struct descriptor *descriptor = (struct descriptor *)handle;
    const int64_t zero = 0, one = 1;
    switch ((int)name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
        if (values && wanted > 0)
            ((struct descriptor **)values)[0]->graph = get_descriptor(descriptor, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
        return answer(count, NULL, 0, NULL, 0);
    case CUDNN_ATTR_ENGINECFG_ENGINE: {
        struct descriptor *engine = get_descriptor(descriptor, CUDNN_ATTR_ENGINECFG_ENGINE);
        if (values && wanted > 0 && *(struct descriptor **)values)
            ((struct descriptor **)values)[0]->graph =
                engine ? get_descriptor(engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH) : descriptor->graph;
        return answer(count, NULL, 0, NULL, 0);
    }
    case 304: { /* CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED, an int32; without it the frontend rejects every plan */
        const int32_t none = 0;
        return answer(count, values, wanted, &none, sizeof none);
    }
    case 303: /* CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE */
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX: return answer(count, values, wanted, &zero, sizeof zero);
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: return answer(count, values, wanted, &one, sizeof one);
    default: break;
    }
    const struct attribute *found = get(descriptor, (int)name);
    if (!found || found->type != (int)type) {
        if (count) *count = 0; /* notes, knobs: none */
        return CUDNN_STATUS_SUCCESS;
    }
    int64_t given = wanted < found->count ? wanted : found->count;
    if (count) *count = found->count;
    if (values && given > 0) memcpy(values, found->value, (size_t)given * element_size(found->type));
    return CUDNN_STATUS_SUCCESS;
}

static int64_t tensor_bytes(const struct descriptor *tensor) {
    const struct attribute *dims = get(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS);
    const struct attribute *type = get(tensor, CUDNN_ATTR_TENSOR_DATA_TYPE);
    const struct attribute *is_virtual = get(tensor, CUDNN_ATTR_TENSOR_IS_VIRTUAL);
    if (!dims || !type || (is_virtual && is_virtual->value[0])) return 0;
    int32_t data_type;
    memcpy(&data_type, type->value, sizeof data_type);
    int64_t bytes = (int64_t)type_size(data_type);
    for (int64_t i = 0; i < dims->count; i++) bytes *= ((const int64_t *)dims->value)[i];
    return bytes;
}

/* Upper bound of the workspace of any plan for this graph that is worth having: one copy of every tensor it touches
 * (layout or precision conversion, split accumulation). Evidence and misses: docs/accuracy.md. */
static int64_t plan_bound(struct descriptor *plan) {
    struct descriptor *config = get_descriptor(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    struct descriptor *engine = get_descriptor(config, CUDNN_ATTR_ENGINECFG_ENGINE);
    struct descriptor *graph = config && config->graph ? config->graph
                               : engine && engine->graph ? engine->graph
                                                         : get_descriptor(engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH);
    const struct attribute *operations = get(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    int64_t bound = 0;
    for (int64_t i = 0; operations && i < operations->count; i++) {
        struct descriptor *operation = ((struct descriptor *const *)operations->value)[i];
        int type = operation->type;
        if (type == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR ||
            type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR ||
            type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR)
            plan->convolution = 1;
        for (const struct attribute *a = operation->attributes; a; a = a->next) {
            if (a->type != CUDNN_TYPE_BACKEND_DESCRIPTOR || a->count != 1) continue;
            struct descriptor *tensor = *(struct descriptor *const *)a->value;
            if (tensor && tensor->type == CUDNN_BACKEND_TENSOR_DESCRIPTOR) bound += tensor_bytes(tensor);
        }
    }
    return bound;
}

API cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan_handle,
                                      cudnnBackendDescriptor_t pack) {
    TRACE();
    (void)handle, (void)pack;
    struct descriptor *plan = (struct descriptor *)plan_handle;
    if (plan->bound > 0)
        oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, (uint64_t)plan->bound,
                  plan->convolution ? "cuDNN convolution" : "cuDNN attention");
    return CUDNN_STATUS_SUCCESS;
}

/* ---- classic descriptors ------------------------------------------------------------------------------------------------------ */

struct tensor {
    cudnnDataType_t type;
    cudnnTensorFormat_t format;
    int count, dims[8], strides[8];
};

static void set_tensor(struct tensor *tensor, cudnnDataType_t type, int count, const int *dims, const int *strides) {
    tensor->type = type;
    tensor->count = count > 8 ? 8 : count;
    for (int i = 0; i < tensor->count; i++) {
        tensor->dims[i] = dims[i];
        tensor->strides[i] = strides ? strides[i] : 1;
    }
}

static uint64_t bytes_of(const void *descriptor) {
    const struct tensor *tensor = descriptor;
    uint64_t bytes = tensor->count ? type_size(tensor->type) : 0;
    for (int i = 0; i < tensor->count; i++) bytes *= (uint64_t)tensor->dims[i];
    return bytes;
}

#define OPAQUE(type, create, destroy)                                         \
    API cudnnStatus_t create(type *made) {                                    \
        TRACE();                                                              \
        *made = (type)oom_new_handle();                                       \
        return CUDNN_STATUS_SUCCESS;                                          \
    }                                                                         \
    API cudnnStatus_t destroy(type handle) {                                  \
        TRACE();                                                              \
        oom_free_handle((uint64_t)handle);                                    \
        return CUDNN_STATUS_SUCCESS;                                          \
    }
OPAQUE(cudnnTensorDescriptor_t, cudnnCreateTensorDescriptor, cudnnDestroyTensorDescriptor)
OPAQUE(cudnnFilterDescriptor_t, cudnnCreateFilterDescriptor, cudnnDestroyFilterDescriptor)
OPAQUE(cudnnConvolutionDescriptor_t, cudnnCreateConvolutionDescriptor, cudnnDestroyConvolutionDescriptor)
OPAQUE(cudnnActivationDescriptor_t, cudnnCreateActivationDescriptor, cudnnDestroyActivationDescriptor)
OPAQUE(cudnnPoolingDescriptor_t, cudnnCreatePoolingDescriptor, cudnnDestroyPoolingDescriptor)
OPAQUE(cudnnDropoutDescriptor_t, cudnnCreateDropoutDescriptor, cudnnDestroyDropoutDescriptor)
OPAQUE(cudnnCTCLossDescriptor_t, cudnnCreateCTCLossDescriptor, cudnnDestroyCTCLossDescriptor)
OPAQUE(cudnnRNNDescriptor_t, cudnnCreateRNNDescriptor, cudnnDestroyRNNDescriptor)
OPAQUE(cudnnRNNDataDescriptor_t, cudnnCreateRNNDataDescriptor, cudnnDestroyRNNDataDescriptor)
OPAQUE(cudnnSpatialTransformerDescriptor_t, cudnnCreateSpatialTransformerDescriptor,
       cudnnDestroySpatialTransformerDescriptor)

API cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t handle, cudnnDataType_t type, int count,
                                             const int dims[], const int strides[]) {
    TRACE();
    set_tensor((struct tensor *)handle, type, count, dims, strides);
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t handle, int wanted, cudnnDataType_t *type,
                                             int *count, int dims[], int strides[]) {
    TRACE();
    const struct tensor *tensor = (const struct tensor *)handle;
    if (type) *type = tensor->type;
    if (count) *count = tensor->count;
    for (int i = 0; i < tensor->count && i < wanted; i++) {
        if (dims) dims[i] = tensor->dims[i];
        if (strides) strides[i] = tensor->strides[i];
    }
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnSetFilterNdDescriptor(cudnnFilterDescriptor_t handle, cudnnDataType_t type,
                                             cudnnTensorFormat_t format, int count, const int dims[]) {
    TRACE();
    set_tensor((struct tensor *)handle, type, count, dims, NULL);
    ((struct tensor *)handle)->format = format;
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnGetFilterNdDescriptor(const cudnnFilterDescriptor_t handle, int wanted, cudnnDataType_t *type,
                                             cudnnTensorFormat_t *format, int *count, int dims[]) {
    TRACE();
    *format = ((const struct tensor *)handle)->format;
    return cudnnGetTensorNdDescriptor((cudnnTensorDescriptor_t)handle, wanted, type, count, dims, NULL);
}

/* ---- convolutions through the older API (TORCH_CUDNN_V8_API_DISABLED=1) --------------------------------------------------------- */

#define ONE_ALGORITHM(perf_type)                                              \
    if (returned) *returned = requested > 0;                                  \
    if (requested > 0) memset(results, 0, sizeof(perf_type)), results->algo = 1, results->time = 1.0f

#define CONVOLUTION(kind, perf_type, a_type, b_type, d_type)                                                           \
    API cudnnStatus_t cudnnGetConvolution##kind##Algorithm_v7(                                                         \
        cudnnHandle_t handle, const a_type a, const b_type b, const cudnnConvolutionDescriptor_t convolution,          \
        const d_type d, const int requested, int *returned, perf_type *results) {                                      \
        TRACE();                                                                                                       \
        (void)handle, (void)convolution;                                                                               \
        oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, bytes_of(a) + bytes_of(b) + bytes_of(d), "cuDNN convolution");   \
        ONE_ALGORITHM(perf_type);                                                                                      \
        return CUDNN_STATUS_SUCCESS;                                                                                   \
    }                                                                                                                  \
    API cudnnStatus_t cudnnFindConvolution##kind##AlgorithmEx(                                                         \
        cudnnHandle_t handle, const a_type a, const void *a_data, const b_type b, const void *b_data,                  \
        const cudnnConvolutionDescriptor_t convolution, const d_type d, void *d_data, const int requested,             \
        int *returned, perf_type *results, void *workspace, size_t size) {                                             \
        TRACE();                                                                                                       \
        (void)handle, (void)a_data, (void)b_data, (void)convolution, (void)d_data, (void)workspace, (void)size;        \
        oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, bytes_of(a) + bytes_of(b) + bytes_of(d), "cuDNN convolution");   \
        ONE_ALGORITHM(perf_type);                                                                                      \
        return CUDNN_STATUS_SUCCESS;                                                                                   \
    }
CONVOLUTION(Forward, cudnnConvolutionFwdAlgoPerf_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t,
            cudnnTensorDescriptor_t)
CONVOLUTION(BackwardData, cudnnConvolutionBwdDataAlgoPerf_t, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t,
            cudnnTensorDescriptor_t)
CONVOLUTION(BackwardFilter, cudnnConvolutionBwdFilterAlgoPerf_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t,
            cudnnFilterDescriptor_t)

/* ---- batch normalisation ----------------------------------------------------------------------------------------------------------- */

/* NCHW needs neither space; the persistent NHWC kernels need a little that nobody published. */
static void batch_norm_sizes(cudnnBatchNormMode_t mode, const void *x, size_t *size) {
    if (mode == CUDNN_BATCHNORM_SPATIAL_PERSISTENT)
        oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, bytes_of(x), "cuDNN batch normalisation (NHWC)");
    *size = 0;
}

API cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t operations, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t scale,
    const cudnnActivationDescriptor_t activation, size_t *size) {
    TRACE();
    (void)handle, (void)operations, (void)z, (void)y, (void)scale, (void)activation;
    batch_norm_sizes(mode, x, size);
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t operations, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz,
    const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t scale,
    const cudnnActivationDescriptor_t activation, size_t *size) {
    TRACE();
    (void)handle, (void)operations, (void)y, (void)dy, (void)dz, (void)dx, (void)scale, (void)activation;
    batch_norm_sizes(mode, x, size);
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t operations,
    const cudnnActivationDescriptor_t activation, const cudnnTensorDescriptor_t x, size_t *size) {
    TRACE();
    (void)handle, (void)operations, (void)activation;
    batch_norm_sizes(mode, x, size);
    return CUDNN_STATUS_SUCCESS;
}

/* ---- recurrent networks --------------------------------------------------------------------------------------------------------------- */

struct rnn {
    cudnnRNNMode_t mode;
    cudnnRNNBiasMode_t bias;
    cudnnDataType_t type;
    int directions, input, hidden, projection, layers;
};

struct rnn_data {
    int steps, batch, width;
};

API cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t handle, cudnnRNNAlgo_t algorithm, cudnnRNNMode_t mode,
                                           cudnnRNNBiasMode_t bias, cudnnDirectionMode_t direction,
                                           cudnnRNNInputMode_t input_mode, cudnnDataType_t type,
                                           cudnnDataType_t precision, cudnnMathType_t math, int32_t input,
                                           int32_t hidden, int32_t projection, int32_t layers,
                                           cudnnDropoutDescriptor_t dropout, uint32_t flags) {
    TRACE();
    (void)algorithm, (void)input_mode, (void)precision, (void)math, (void)dropout, (void)flags;
    *(struct rnn *)handle = (struct rnn){mode, bias, type, direction == CUDNN_BIDIRECTIONAL ? 2 : 1,
                                         input, hidden, projection, layers};
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t handle, cudnnDataType_t type,
                                            cudnnRNNDataLayout_t layout, int steps, int batch, int width,
                                            const int lengths[], void *padding) {
    TRACE();
    (void)type, (void)layout, (void)lengths, (void)padding;
    *(struct rnn_data *)handle = (struct rnn_data){steps, batch, width};
    return CUDNN_STATUS_SUCCESS;
}

static int gates(const struct rnn *rnn) {
    return rnn->mode == CUDNN_LSTM ? 4 : rnn->mode == CUDNN_GRU ? 3 : 1;
}

static int output_width(const struct rnn *rnn) {
    return rnn->projection > 0 && rnn->projection < rnn->hidden ? rnn->projection : rnn->hidden;
}

static int matrix_count(const struct rnn *rnn) { return 2 * gates(rnn) + (output_width(rnn) < rnn->hidden); }

/* Matrix `id` of a pseudo-layer: input matrices first, then recurrent ones, then the projection. */
static size_t matrix_shape(const struct rnn *rnn, int layer, int id, int *rows, int *columns) {
    int from_below = layer == 0 ? rnn->input : output_width(rnn) * rnn->directions;
    *rows = id == 2 * gates(rnn) ? output_width(rnn) : rnn->hidden;
    *columns = id == 2 * gates(rnn) ? rnn->hidden : id < gates(rnn) ? from_below : output_width(rnn);
    return (size_t)*rows * (size_t)*columns;
}

static int has_bias(const struct rnn *rnn, int id) {
    if (id == 2 * gates(rnn) || rnn->bias == CUDNN_RNN_NO_BIAS) return 0;
    if (rnn->bias == CUDNN_RNN_SINGLE_INP_BIAS) return id < gates(rnn);
    if (rnn->bias == CUDNN_RNN_SINGLE_REC_BIAS) return id >= gates(rnn);
    return 1;
}

/* Elements before (layer, id) and, with bias, before its bias: all matrices come first, then all biases. */
static size_t offset_of(const struct rnn *rnn, int pseudo_layer, int id, int bias) {
    size_t offset = 0;
    int rows, columns;
    for (int l = 0; l < rnn->layers * rnn->directions; l++)
        for (int m = 0; m < matrix_count(rnn); m++) {
            if (!bias && l == pseudo_layer && m == id) return offset;
            offset += matrix_shape(rnn, l / rnn->directions, m, &rows, &columns);
        }
    for (int l = 0; bias && l < rnn->layers * rnn->directions; l++)
        for (int m = 0; m < matrix_count(rnn); m++) {
            if (l == pseudo_layer && m == id) return offset;
            if (has_bias(rnn, m)) offset += (size_t)rnn->hidden;
        }
    return offset;
}

/* PyTorch allocates the flat weight buffer with this size, so it must be the sum of all parameters. */
API cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t handle, cudnnRNNDescriptor_t descriptor, size_t *size) {
    TRACE();
    (void)handle;
    const struct rnn *rnn = (const struct rnn *)descriptor;
    *size = offset_of(rnn, -1, -1, 1) * type_size(rnn->type);
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t handle, cudnnRNNDescriptor_t descriptor, int32_t layer,
                                          size_t size, const void *weights, int32_t id, cudnnTensorDescriptor_t matrix,
                                          void **matrix_address, cudnnTensorDescriptor_t bias, void **bias_address) {
    TRACE();
    (void)handle, (void)size;
    const struct rnn *rnn = (const struct rnn *)descriptor;
    size_t element = type_size(rnn->type);
    int rows, columns;
    if (matrix_address) *matrix_address = NULL;
    if (bias_address) *bias_address = NULL;
    if (id >= matrix_count(rnn)) return CUDNN_STATUS_SUCCESS; /* the projection of a network without one */
    matrix_shape(rnn, layer / rnn->directions, id, &rows, &columns);
    if (matrix)
        set_tensor((struct tensor *)matrix, rnn->type, 3, (int[]){1, rows, columns}, (int[]){rows * columns, columns, 1});
    if (matrix_address) *matrix_address = (char *)weights + offset_of(rnn, layer, id, 0) * element;
    if (!has_bias(rnn, id)) return CUDNN_STATUS_SUCCESS;
    if (bias)
        set_tensor((struct tensor *)bias, rnn->type, 3, (int[]){1, rnn->hidden, 1}, (int[]){rnn->hidden, 1, 1});
    if (bias_address) *bias_address = (char *)weights + offset_of(rnn, layer, id, 1) * element;
    return CUDNN_STATUS_SUCCESS;
}

/* From what is public, with T time steps, B sequences, L layers, D directions, H hidden values and G gates:
 *   reserve space  T B H D (k L + L - 1) elements, k = 5 for LSTM, 6 for GRU: 736,000,000 and 864,000,000 bytes for 4
 *                  layers of 320 and T B = 25,000 (PyTorch issue 2895). For plain RNNs k = 1, what backward must have.
 *   workspace      a copy of the weights and B H D L (3 G - 1) elements: 17,730,560 and 13,169,920 bytes in the same issue
 * These are of cuDNN 6 and 7. A later one took a workspace of 21,496,576 bytes for T = 20, L = 2, H = 512, B = 64, plain
 * RNN, padded (TensorFlow pull request 30889), so the upper bound adds four values for each time step. */
API cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t handle, cudnnRNNDescriptor_t descriptor,
                                            cudnnForwardMode_t mode, cudnnRNNDataDescriptor_t x, size_t *workspace,
                                            size_t *reserve) {
    TRACE();
    (void)handle;
    const struct rnn *rnn = (const struct rnn *)descriptor;
    const struct rnn_data *data = (const struct rnn_data *)x;
    size_t layers = (size_t)rnn->layers, per_gate = rnn->mode == CUDNN_LSTM ? 5 : rnn->mode == CUDNN_GRU ? 6 : 1;
    size_t values = (size_t)data->batch * (size_t)rnn->hidden * (size_t)rnn->directions * type_size(rnn->type);
    size_t kept = mode == CUDNN_FWD_MODE_TRAINING ? values * (size_t)data->steps * (per_gate * layers + layers - 1) : 0;
    size_t scratch = offset_of(rnn, -1, -1, 0) * type_size(rnn->type) + values * layers * (3 * (size_t)gates(rnn) - 1);
    if (workspace) *workspace = scratch;
    if (reserve) *reserve = kept;
    oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, kept + scratch + 4 * values * layers * (size_t)data->steps, "cuDNN RNN");
    return CUDNN_STATUS_SUCCESS;
}

/* One generator state for each thread that can be resident. Which generator is not public: 16 bytes are Philox's
 * counter, 48 a state of cuRAND's default. */
API cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t handle, size_t *size) {
    TRACE();
    (void)handle;
    const struct oom_gpu *gpu = oom_gpu(oom_current_device());
    size_t threads = gpu ? (size_t)gpu->sm_count * (size_t)gpu->threads_per_sm : 0;
    *size = threads * 16;
    oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, threads * 32, "cuDNN dropout");
    return CUDNN_STATUS_SUCCESS;
}

/* ---- CTC ---------------------------------------------------------------------------------------------------------------------------------- */

API cudnnStatus_t cudnnGetCTCLossWorkspaceSize(cudnnHandle_t handle, const cudnnTensorDescriptor_t probabilities,
                                               const cudnnTensorDescriptor_t gradients, const int *labels,
                                               const int *label_lengths, const int *input_lengths,
                                               cudnnCTCLossAlgo_t algorithm, cudnnCTCLossDescriptor_t descriptor,
                                               size_t *size) {
    TRACE();
    (void)handle, (void)gradients, (void)labels, (void)label_lengths, (void)input_lengths, (void)algorithm;
    (void)descriptor;
    oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, 2 * bytes_of(probabilities), "cuDNN CTC loss");
    *size = 0;
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnGetCTCLossWorkspaceSize_v8(cudnnHandle_t handle, cudnnCTCLossAlgo_t algorithm,
                                                  cudnnCTCLossDescriptor_t descriptor,
                                                  const cudnnTensorDescriptor_t probabilities,
                                                  const cudnnTensorDescriptor_t gradients, size_t *size) {
    return cudnnGetCTCLossWorkspaceSize(handle, probabilities, gradients, NULL, NULL, NULL, algorithm, descriptor, size);
}
