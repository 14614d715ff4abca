/* libcublas: matrix products are not computed; handles, modes and workspaces are kept. */
#include "device.h"

#include <string.h>

#define API __attribute__((visibility("default")))

/* OOM_CUBLAS_VERSION comes from the installed header, as torch compares it with the one it was built for. */

struct handle {
    void *stream;
    int pointer_mode, math_mode, atomics_mode;
};

/* A new handle each time: PyTorch keys its workspaces by (handle, stream), and the autograd thread makes its own. */
API int cublasCreate_v2(void **handle) {
    TRACE();
    oom_ensure_context(oom_current_device());
    *handle = (void *)oom_new_handle();
    return *handle ? 0 : 3;
}

API int cublasDestroy_v2(void *handle) {
    TRACE();
    oom_free_handle((uint64_t)handle);
    return 0;
}

API int cublasGetVersion_v2(void *handle, int *version) {
    TRACE();
    (void)handle;
    *version = OOM_CUBLAS_VERSION;
    return 0;
}

API int cublasGetProperty(int type, int *value) {
    TRACE();
    *value = type == 0 ? OOM_CUBLAS_VERSION / 10000 : type == 1 ? OOM_CUBLAS_VERSION / 100 % 100 : OOM_CUBLAS_VERSION % 100;
    return 0;
}

API size_t cublasGetCudartVersion(void) {
    TRACE();
    return (size_t)oom_driver_version();
}

API const char *cublasGetStatusString(int status) {
    return status == 0 ? "success" : status == 3 ? "the resource allocation failed" : "an error";
}

API const char *cublasGetStatusName(int status) {
    return status == 0 ? "CUBLAS_STATUS_SUCCESS" : status == 3 ? "CUBLAS_STATUS_ALLOC_FAILED" : "CUBLAS_STATUS_INTERNAL_ERROR";
}

API int cublasSetStream_v2(void *handle, void *stream) {
    TRACE();
    ((struct handle *)handle)->stream = stream;
    return 0;
}

API int cublasGetStream_v2(void *handle, void **stream) {
    TRACE();
    *stream = ((struct handle *)handle)->stream;
    return 0;
}

API int cublasSetWorkspace_v2(void *handle, void *workspace, size_t size) {
    TRACE();
    (void)handle;
    if (workspace && size) oom_event(OOM_EVENT_WORKSPACE, workspace, size, "cuBLAS");
    return 0;
}

#define MODE(field, set, get)                                                 \
    API int set(void *handle, int mode) {                                     \
        TRACE();                                                              \
        ((struct handle *)handle)->field = mode;                              \
        return 0;                                                             \
    }                                                                         \
    API int get(void *handle, int *mode) {                                    \
        TRACE();                                                              \
        *mode = ((struct handle *)handle)->field;                             \
        return 0;                                                             \
    }
MODE(pointer_mode, cublasSetPointerMode_v2, cublasGetPointerMode_v2)
MODE(math_mode, cublasSetMathMode, cublasGetMathMode)
MODE(atomics_mode, cublasSetAtomicsMode, cublasGetAtomicsMode)

API int cublasGetSmCountTarget(void *handle, int *count) {
    TRACE();
    (void)handle;
    *count = 0;
    return 0;
}
