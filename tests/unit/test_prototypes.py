"""Stand-ins made from prototypes: what they set, and what they tell of sizes nobody published."""

from __future__ import annotations

import pytest

from oomproof.phantom import prototypes

HEADER = """
cusolverStatus_t CUSOLVERAPI cusolverDnCreate(cusolverDnHandle_t *handle);
cusolverStatus_t CUSOLVERAPI cusolverDnSgetrf_bufferSize(
    cusolverDnHandle_t handle, int m, int n, float *A, int lda, int *Lwork);
cusolverStatus_t CUSOLVERAPI cusolverDnDsyevd_bufferSize(
    cusolverDnHandle_t handle, cusolverEigMode_t jobz, cublasFillMode_t uplo, int n, const double *A, int lda,
    const double *W, int *lwork);
cusolverStatus_t CUSOLVERAPI cusolverDnCheevjBatched_bufferSize(
    cusolverDnHandle_t handle, cusolverEigMode_t jobz, cublasFillMode_t uplo, int n, const cuComplex *A, int lda,
    const float *W, int *lwork, syevjInfo_t params, int batchSize);
cusolverStatus_t CUSOLVERAPI cusolverDnXgeqrf_bufferSize(
    cusolverDnHandle_t handle, cusolverDnParams_t params, int64_t m, int64_t n, cudaDataType dataTypeA, const void *A,
    int64_t lda, cudaDataType dataTypeTau, const void *tau, cudaDataType computeType, size_t *workspaceInBytesOnDevice,
    size_t *workspaceInBytesOnHost);
cusolverStatus_t CUSOLVERAPI cusolverDnSgetrf(
    cusolverDnHandle_t handle, int m, int n, float *A, int lda, float *Workspace, int *devIpiv, int *devInfo);
cusolverStatus_t CUSOLVERAPI cusolverDnSpotrfBatched(
    cusolverDnHandle_t handle, cublasFillMode_t uplo, int n, float *Aarray[], int lda, int *infoArray, int batchSize);
cublasStatus_t CUBLASWINAPI cublasSscal(cublasHandle_t handle, int n, const float *alpha, float *x, int incx);
"""
PARSED = prototypes.parse(HEADER)


def line(name: str, stem: str = "libcusolver") -> str:
    """Return the C of one function."""
    return prototypes.source(stem, [name], PARSED).splitlines()[-1]


def test_what_creates_gives_a_handle() -> None:
    """A pointer to a handle is given a new one."""
    assert "*(uint64_t *)p0 = oom_new_handle();" in line("cusolverDnCreate")


def test_what_sets_nothing_takes_nothing() -> None:
    """Without a known output the function is declared without parameters and only answers success."""
    assert line("cublasSscal", "libcublas").endswith("cublasSscal(void) { TRACE(); return 0; }")
    assert line("unknownToTheHeader").endswith("{ TRACE(); return 0; }")
    assert line("nvmlDeviceReset", "libnvidia-ml").endswith("{ TRACE(); return 3; }")


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        # LAPACK: a block of columns; 2 n^2 + 6 n + 1 elements of 8 bytes
        ("cusolverDnSgetrf_bufferSize", "1 * (1 * (uint64_t)p1 * (uint64_t)p2) * 4 + 4194304"),
        ("cusolverDnDsyevd_bufferSize", "1 * (2 * (uint64_t)p3 * (uint64_t)p3) * 8 + 4194304"),
        ("cusolverDnXgeqrf_bufferSize", "1 * (1 * (uint64_t)p2 * (uint64_t)p3) * 16 + 4194304"),
        ("cusolverDnCheevjBatched_bufferSize", "(uint64_t)p9 * (2 * (uint64_t)p3 * (uint64_t)p3 + 2048) * 8 + 4194304"),
    ],
)
def test_sizes_are_bounded(name: str, bound: str) -> None:
    """A size query tells the observer the bound, in copies of the matrix by what LAPACK documents."""
    assert f'oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, 0, {bound}, "cuSOLVER")' in line(name)


def test_sizes_are_zero_but_for_the_published_one() -> None:
    """cupy issue 7261: heevjBatched asks for 1,049 elements for each matrix of 4 x 4, and 1,028."""
    assert "if (p5) *(uint32_t *)p5 = 0;" in line("cusolverDnSgetrf_bufferSize")
    assert "*(int32_t *)p7 = p9 * (1024 + (p3 + 1) * (p3 + 1)) + 1028;" in line("cusolverDnCheevjBatched_bufferSize")
    for batch, elements in {1: 2077, 2: 3126, 8: 9420, 64: 68164, 256: 269572}.items():
        assert batch * (1024 + (4 + 1) ** 2) + 1028 == elements


def test_error_codes_are_cleared() -> None:
    """One code, or one for each matrix of a batch, is set to 0; pivots are left alone."""
    assert "oom_succeeded((void *)p7, 1);" in line("cusolverDnSgetrf")
    assert line("cusolverDnSgetrf").count("oom_succeeded") == 1
    assert "oom_succeeded((void *)p5, (size_t)p6);" in line("cusolverDnSpotrfBatched")


def test_integers_keep_their_width() -> None:
    """An int's register has no defined upper half, so an int is taken as one."""
    assert "uintptr_t p0, int32_t p1, int32_t p2, uintptr_t p3, int32_t p4" in line("cusolverDnSgetrf_bufferSize")
