/* libcusparseLt: 2:4 sparse matrices. The real library asks for a driver at cusparseLtInit. Its descriptors are
 * structures of the caller's, 512 bytes or more. */
#include "device.h"

#include <string.h>

#define API __attribute__((visibility("default")))

struct matrix {
    int64_t rows, columns;
    int32_t type; /* cudaDataType */
};

API int cusparseLtInit(void *handle) {
    TRACE();
    memset(handle, 0, 512);
    oom_ensure_context(oom_current_device());
    return 0;
}

API const char *cusparseLtGetErrorName(int status) { return status ? "CUSPARSE_STATUS_INTERNAL_ERROR" : "CUSPARSE_STATUS_SUCCESS"; }
API const char *cusparseLtGetErrorString(int status) { return status ? "an internal operation failed" : "success"; }

API int cusparseLtDenseDescriptorInit(const void *handle, struct matrix *made, int64_t rows, int64_t columns,
                                      int64_t leading, uint32_t alignment, int type, int order) {
    TRACE();
    (void)handle, (void)leading, (void)alignment, (void)order;
    *made = (struct matrix){rows, columns, type};
    return 0;
}

API int cusparseLtStructuredDescriptorInit(const void *handle, struct matrix *made, int64_t rows, int64_t columns,
                                           int64_t leading, uint32_t alignment, int type, int order, int sparsity) {
    TRACE();
    (void)handle, (void)leading, (void)alignment, (void)order, (void)sparsity;
    *made = (struct matrix){rows, columns, type};
    return 0;
}

static int64_t element_size(int type) {
    return type == 0 ? 4 : type == 2 || type == 14 ? 2 : 1; /* CUDA_R_32F; CUDA_R_16F, CUDA_R_16BF; 8 bits */
}

/* Half of the elements and two bits for each of these: 9/16 of the dense matrix, 10/16 where an element is a byte
 * (PyTorch computes with the same factors). The second size is that of a buffer, which is not public. */
static int compressed(const struct matrix *matrix, size_t *size, size_t *buffer) {
    int64_t dense = matrix->rows * matrix->columns * element_size(matrix->type);
    *size = (size_t)(dense * (element_size(matrix->type) == 1 ? 10 : 9) / 16);
    if (buffer) *buffer = 0;
    oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, (uint64_t)dense, "cuSPARSELt");
    return 0;
}

API int cusparseLtSpMMACompressedSize2(const void *handle, const struct matrix *matrix, size_t *size, size_t *buffer) {
    TRACE();
    (void)handle;
    return compressed(matrix, size, buffer);
}

/* Plans and matrix products point to their matrices. */
struct product {
    const struct matrix *a, *b, *d;
};

API int cusparseLtMatmulDescriptorInit(const void *handle, struct product *made, int op_a, int op_b,
                                       const struct matrix *a, const struct matrix *b, const struct matrix *c,
                                       const struct matrix *d, int compute) {
    TRACE();
    (void)handle, (void)op_a, (void)op_b, (void)c, (void)compute;
    *made = (struct product){a, b, d};
    return 0;
}

API int cusparseLtMatmulPlanInit(const void *handle, struct product *made, const struct product *product,
                                 const void *selection) {
    TRACE();
    (void)handle, (void)selection;
    *made = *product;
    return 0;
}

API int cusparseLtSpMMACompressedSize(const void *handle, const struct product *plan, size_t *size, size_t *buffer) {
    TRACE();
    (void)handle;
    return compressed(plan->a, size, buffer);
}

/* One algorithm, which splits nothing. */
API int cusparseLtMatmulAlgGetAttribute(const void *handle, const void *selection, int attribute, void *value,
                                        size_t size) {
    TRACE();
    (void)handle, (void)selection;
    const int one = 1;
    memset(value, 0, size);
    if ((attribute == 1 || attribute == 3) && size >= sizeof one) memcpy(value, &one, sizeof one); /* MAX_ID, SPLIT_K */
    return 0;
}

API int cusparseLtMatmulGetWorkspace(const void *handle, const struct product *plan, size_t *size) {
    TRACE();
    (void)handle;
    const struct matrix *d = plan->d;
    oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, (uint64_t)(d->rows * d->columns * 4), "cuSPARSELt");
    *size = 0;
    return 0;
}

API int cusparseLtSpMMAPruneCheck(const void *handle, const void *product, const void *in, int *valid, void *stream) {
    TRACE();
    (void)handle, (void)product, (void)in, (void)stream;
    const int yes = 0; /* 0: the matrix is pruned */
    oom_copy(valid, &yes, sizeof yes);
    return 0;
}
