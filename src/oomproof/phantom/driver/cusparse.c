/* libcusparse: descriptors keep their sizes; the number of nonzeros of a result is estimated, since its caller
 * allocates by it; workspaces are not asked for, what they could be is told as an upper bound. */
#include "device.h"

#include <string.h>

#define API __attribute__((visibility("default")))

API const char *cusparseGetErrorName(int status) { return status ? "CUSPARSE_STATUS_INTERNAL_ERROR" : "CUSPARSE_STATUS_SUCCESS"; }
API const char *cusparseGetErrorString(int status) { return status ? "an internal operation failed" : "success"; }

struct matrix {
    int64_t rows, columns, nonzeros;
    int64_t bytes; /* of its values and indices */
};

static int64_t element_size(int type) { /* cudaDataType */
    switch (type) {
    case 1: case 4: return 8;   /* CUDA_R_64F, CUDA_C_32F */
    case 5: return 16;          /* CUDA_C_64F */
    case 2: case 14: return 2;  /* CUDA_R_16F, CUDA_R_16BF */
    case 3: case 8: return 1;   /* CUDA_R_8I, CUDA_R_8U */
    default: return 4;
    }
}

static int64_t index_size(int type) { return type == 3 ? 8 : type == 1 ? 2 : 4; } /* cusparseIndexType_t */

static int make(uint64_t *made, int64_t rows, int64_t columns, int64_t nonzeros, int64_t bytes) {
    *made = oom_new_handle();
    if (!*made) return 2; /* CUSPARSE_STATUS_ALLOC_FAILED */
    *(struct matrix *)*made = (struct matrix){rows, columns, nonzeros, bytes};
    return 0;
}

API int cusparseCreateCsr(uint64_t *made, int64_t rows, int64_t columns, int64_t nonzeros, void *offsets,
                          void *indices, void *values, int offset_type, int index_type, int base, int type) {
    TRACE();
    (void)offsets, (void)indices, (void)values, (void)base;
    return make(made, rows, columns, nonzeros,
                nonzeros * (element_size(type) + index_size(index_type)) + (rows + 1) * index_size(offset_type));
}

API int cusparseCreateCsc(uint64_t *made, int64_t rows, int64_t columns, int64_t nonzeros, void *offsets,
                          void *indices, void *values, int offset_type, int index_type, int base, int type) {
    TRACE();
    (void)offsets, (void)indices, (void)values, (void)base;
    return make(made, rows, columns, nonzeros,
                nonzeros * (element_size(type) + index_size(index_type)) + (columns + 1) * index_size(offset_type));
}

API int cusparseCreateCoo(uint64_t *made, int64_t rows, int64_t columns, int64_t nonzeros, void *row_indices,
                          void *column_indices, void *values, int index_type, int base, int type) {
    TRACE();
    (void)row_indices, (void)column_indices, (void)values, (void)base;
    return make(made, rows, columns, nonzeros, nonzeros * (element_size(type) + 2 * index_size(index_type)));
}

API int cusparseCreateBsr(uint64_t *made, int64_t rows, int64_t columns, int64_t blocks, int64_t block_rows,
                          int64_t block_columns, void *offsets, void *indices, void *values, int offset_type,
                          int index_type, int base, int type, int order) {
    TRACE();
    (void)offsets, (void)indices, (void)values, (void)base, (void)order;
    int64_t nonzeros = blocks * block_rows * block_columns;
    return make(made, rows * block_rows, columns * block_columns, nonzeros,
                nonzeros * element_size(type) + blocks * index_size(index_type) + (rows + 1) * index_size(offset_type));
}

#define CONST_TWIN(name, parameters, arguments)                               \
    API int cusparseCreateConst##name parameters { return cusparseCreate##name arguments; }
CONST_TWIN(Csr, (uint64_t *m, int64_t r, int64_t c, int64_t n, void *o, void *i, void *v, int ot, int it, int b, int t),
           (m, r, c, n, o, i, v, ot, it, b, t))
CONST_TWIN(Csc, (uint64_t *m, int64_t r, int64_t c, int64_t n, void *o, void *i, void *v, int ot, int it, int b, int t),
           (m, r, c, n, o, i, v, ot, it, b, t))
CONST_TWIN(Coo, (uint64_t *m, int64_t r, int64_t c, int64_t n, void *o, void *i, void *v, int it, int b, int t),
           (m, r, c, n, o, i, v, it, b, t))
CONST_TWIN(Bsr, (uint64_t *m, int64_t r, int64_t c, int64_t n, int64_t br, int64_t bc, void *o, void *i, void *v,
                 int ot, int it, int b, int t, int order),
           (m, r, c, n, br, bc, o, i, v, ot, it, b, t, order))

API int cusparseCreateDnMat(uint64_t *made, int64_t rows, int64_t columns, int64_t leading, void *values, int type,
                            int order) {
    TRACE();
    (void)leading, (void)values, (void)order;
    return make(made, rows, columns, rows * columns, rows * columns * element_size(type));
}

API int cusparseCreateDnVec(uint64_t *made, int64_t size, void *values, int type) {
    TRACE();
    (void)values;
    return make(made, size, 1, size, size * element_size(type));
}

#define DESTROY(name)                                                         \
    API int name(uint64_t descriptor) {                                       \
        TRACE();                                                              \
        oom_free_handle(descriptor);                                          \
        return 0;                                                             \
    }
DESTROY(cusparseDestroySpMat)
DESTROY(cusparseDestroyDnMat)
DESTROY(cusparseDestroyDnVec)

/* PyTorch allocates the result of a product by this. */
API int cusparseSpMatGetSize(const struct matrix *matrix, int64_t *rows, int64_t *columns, int64_t *nonzeros) {
    TRACE();
    *rows = matrix->rows, *columns = matrix->columns, *nonzeros = matrix->nonzeros;
    return 0;
}

/* ---- workspaces ---------------------------------------------------------------------------------------------- */

/* NVIDIA's documentation says for which algorithms there is one, not its size. The bound: one copy of each sparse
 * matrix (sorted or transposed) and of the result. */
static int optional(size_t *size, int64_t bytes) {
    *size = 0;
    oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, (uint64_t)bytes, "cuSPARSE");
    return 0;
}

API int cusparseSpMM_bufferSize(void *handle, int op_a, int op_b, const void *alpha, const struct matrix *a,
                                const struct matrix *b, const void *beta, const struct matrix *c, int type,
                                int algorithm, size_t *size) {
    TRACE();
    (void)handle, (void)op_a, (void)op_b, (void)alpha, (void)b, (void)beta, (void)type, (void)algorithm;
    return optional(size, a->bytes + c->bytes);
}

API int cusparseSpMV_bufferSize(void *handle, int op_a, const void *alpha, const struct matrix *a,
                                const struct matrix *x, const void *beta, const struct matrix *y, int type,
                                int algorithm, size_t *size) {
    TRACE();
    (void)handle, (void)op_a, (void)alpha, (void)x, (void)beta, (void)type, (void)algorithm;
    return optional(size, a->bytes + y->bytes);
}

API int cusparseSpSM_bufferSize(void *handle, int op_a, int op_b, const void *alpha, const struct matrix *a,
                                const struct matrix *b, const struct matrix *c, int type, int algorithm, void *state,
                                size_t *size) {
    TRACE();
    (void)handle, (void)op_a, (void)op_b, (void)alpha, (void)b, (void)type, (void)algorithm, (void)state;
    return optional(size, 2 * a->bytes + c->bytes);
}

API int cusparseSpSV_bufferSize(void *handle, int op_a, const void *alpha, const struct matrix *a,
                                const struct matrix *x, const struct matrix *y, int type, int algorithm, void *state,
                                size_t *size) {
    TRACE();
    (void)handle, (void)op_a, (void)alpha, (void)x, (void)type, (void)algorithm, (void)state;
    return optional(size, 2 * a->bytes + y->bytes);
}

API int cusparseSDDMM_bufferSize(void *handle, int op_a, int op_b, const void *alpha, const struct matrix *a,
                                 const struct matrix *b, const void *beta, const struct matrix *c, int type,
                                 int algorithm, size_t *size) {
    TRACE();
    (void)handle, (void)op_a, (void)op_b, (void)alpha, (void)a, (void)b, (void)beta, (void)type, (void)algorithm;
    return optional(size, c->bytes);
}

/* A radix sort keeps a second copy of its keys, two 32-bit indices each, and of the permutation. */
API int cusparseXcoosort_bufferSizeExt(void *handle, int m, int n, int nonzeros, const int *rows, const int *columns,
                                       size_t *size) {
    TRACE();
    (void)handle, (void)m, (void)n, (void)rows, (void)columns;
    return optional(size, 16 * (int64_t)nonzeros);
}

API int cusparseXcsrsort_bufferSizeExt(void *handle, int m, int n, int nonzeros, const int *offsets,
                                       const int *columns, size_t *size) {
    TRACE();
    (void)handle, (void)m, (void)n, (void)offsets, (void)columns;
    return optional(size, 16 * (int64_t)nonzeros);
}

/* ---- results whose size a kernel computes ------------------------------------------------------------------------ */

/* Products of single elements, if the nonzeros lie evenly. */
static int64_t products(const struct matrix *a, const struct matrix *b) {
    double all = (double)a->nonzeros * (double)b->nonzeros / (double)(a->columns > 0 ? a->columns : 1);
    return all < 9e18 ? (int64_t)(all + 0.999) : INT64_MAX / 2;
}

API int cusparseSpGEMM_workEstimation(void *handle, int op_a, int op_b, const void *alpha, const struct matrix *a,
                                      const struct matrix *b, const void *beta, struct matrix *c, int type,
                                      int algorithm, void *state, size_t *size, void *buffer) {
    TRACE();
    (void)handle, (void)op_a, (void)op_b, (void)alpha, (void)a, (void)b, (void)beta, (void)c, (void)type;
    (void)algorithm, (void)state, (void)buffer;
    *size = 0;
    return 0;
}

/* The result is taken to have one nonzero for each product, or to be full: too many where products fall together.
 * The buffer was 64 bytes for each product where a figure is public (91.6 GB at 1.42e9 products: ginkgo pull request
 * 1794). */
API int cusparseSpGEMM_compute(void *handle, int op_a, int op_b, const void *alpha, const struct matrix *a,
                               const struct matrix *b, const void *beta, struct matrix *c, int type, int algorithm,
                               void *state, size_t *size, void *buffer) {
    TRACE();
    (void)handle, (void)op_a, (void)op_b, (void)alpha, (void)beta, (void)type, (void)algorithm, (void)state;
    (void)buffer;
    int64_t count = products(a, b), full = a->rows * b->columns;
    if (buffer == NULL && c->nonzeros == 0) {
        oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, 64 * (uint64_t)count, "cuSPARSE product");
        oom_answer("cusparseSpGEMM (nonzeros of the product)");
    }
    c->nonzeros = count < full ? count : full;
    *size = 0;
    return 0;
}

/* A sum is taken to have all nonzeros of both. */
API int cusparseXcsrgeam2Nnz(void *handle, int m, int n, void *a, int nonzeros_a, const int *offsets_a,
                             const int *columns_a, void *b, int nonzeros_b, const int *offsets_b,
                             const int *columns_b, void *c, int *offsets_c, int *total, void *workspace) {
    TRACE();
    (void)handle, (void)a, (void)offsets_a, (void)columns_a, (void)b, (void)offsets_b, (void)columns_b, (void)c;
    (void)offsets_c, (void)workspace;
    int64_t both = (int64_t)nonzeros_a + nonzeros_b, full = (int64_t)m * n;
    int most = (int)(both < full ? both : full);
    oom_answer("cusparseXcsrgeam2Nnz (nonzeros of the sum)");
    if (total) oom_copy(total, &most, sizeof most);
    return 0;
}
