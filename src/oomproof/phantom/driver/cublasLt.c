/* libcublasLt: descriptors are opaque, a heuristic query answers one algorithm without a workspace demand of its own. */
#include "device.h"

#include <string.h>

#define API __attribute__((visibility("default")))

/* cublasLtMatmulHeuristicResult_t of CUDA 11 to 13. */
struct heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

API size_t cublasLtGetVersion(void) {
    TRACE();
    return OOM_CUBLAS_VERSION;
}

API size_t cublasLtGetCudartVersion(void) {
    TRACE();
    return (size_t)oom_driver_version();
}

API const char *cublasLtGetStatusString(int status) { return status ? "an error" : "success"; }
API const char *cublasLtGetStatusName(int status) {
    return status ? "CUBLAS_STATUS_INTERNAL_ERROR" : "CUBLAS_STATUS_SUCCESS";
}

#define CREATE(name, parameters, ...)                                         \
    API int name parameters {                                                 \
        TRACE();                                                              \
        __VA_ARGS__;                                                          \
        *made = (void *)oom_new_handle();                                     \
        return 0;                                                             \
    }
#define DESTROY(name)                                                         \
    API int name(void *handle) {                                              \
        TRACE();                                                              \
        oom_free_handle((uint64_t)handle);                                    \
        return 0;                                                             \
    }
CREATE(cublasLtCreate, (void **made), (void)0)
CREATE(cublasLtMatmulDescCreate, (void **made, int compute, int scale), (void)compute, (void)scale)
CREATE(cublasLtMatrixLayoutCreate, (void **made, int type, uint64_t rows, uint64_t columns, int64_t leading),
       (void)type, (void)rows, (void)columns, (void)leading)
CREATE(cublasLtMatmulPreferenceCreate, (void **made), (void)0)
CREATE(cublasLtMatrixTransformDescCreate, (void **made, int scale), (void)scale)
DESTROY(cublasLtDestroy)
DESTROY(cublasLtMatmulDescDestroy)
DESTROY(cublasLtMatrixLayoutDestroy)
DESTROY(cublasLtMatmulPreferenceDestroy)
DESTROY(cublasLtMatrixTransformDescDestroy)

API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference,
                                       int requested, struct heuristic *results, int *returned) {
    TRACE();
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *returned = requested > 0;
    if (requested > 0) *results = (struct heuristic){.state = 0, .waves = 1.0f};
    return 0;
}

API int cublasLtMatmulAlgoCheck(void *handle, void *desc, void *a, void *b, void *c, void *d, const void *algorithm,
                                struct heuristic *result) {
    TRACE();
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)algorithm;
    *result = (struct heuristic){.state = 0, .waves = 1.0f};
    return 0;
}

API int cublasLtMatmulAlgoGetIds(void *handle, int compute, int scale, int a, int b, int c, int d, int requested,
                                 int *ids, int *returned) {
    TRACE();
    (void)handle, (void)compute, (void)scale, (void)a, (void)b, (void)c, (void)d;
    *returned = requested > 0;
    if (requested > 0) ids[0] = 0;
    return 0;
}

API int cublasLtMatmulAlgoConfigGetAttribute(const void *algorithm, int attribute, void *value, size_t size,
                                             size_t *written) {
    TRACE();
    (void)algorithm, (void)attribute;
    memset(value, 0, size);
    if (written) *written = size;
    return 0;
}

API int cublasLtMatmulAlgoCapGetAttribute(const void *algorithm, int attribute, void *value, size_t size,
                                          size_t *written) {
    return cublasLtMatmulAlgoConfigGetAttribute(algorithm, attribute, value, size, written);
}

API int cublasLtMatmul(void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b,
                       void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
                       const void *algorithm, void *workspace, size_t size, void *stream) {
    TRACE();
    (void)handle, (void)desc, (void)alpha, (void)a, (void)a_layout, (void)b, (void)b_layout, (void)beta, (void)c;
    (void)c_layout, (void)d, (void)d_layout, (void)algorithm, (void)stream;
    if (workspace && size) oom_event(OOM_EVENT_WORKSPACE, workspace, size, "cuBLASLt");
    return 0;
}
