/* libcufft: plans are numbers; a plan's work area is one copy of its complex data.
 *
 * NVIDIA documents eight copies as the most and one as the least "in some specific cases" (cuFFT API reference,
 * plans); one it was where figures are public: 2-D of 100 x 100 to 100 x 1500 (arrayfire issue 1443), 2-D and 3-D of
 * powers of two (CUDA.jl issue 894). */
#include "device.h"

#define API __attribute__((visibility("default")))

#define PLANS 65536
static int plan_count;
static size_t work_sizes[PLANS]; /* by number; old plans are long gone when a number comes again */

API int cufftCreate(int *plan) {
    TRACE();
    *plan = __atomic_add_fetch(&plan_count, 1, __ATOMIC_SEQ_CST) % PLANS;
    work_sizes[*plan] = 0;
    return 0;
}

API int cufftGetVersion(int *version) {
    TRACE();
    *version = OOM_CUFFT_VERSION;
    return 0;
}

static uint64_t complex_size(int type) { return type == 5 || type == 1 ? 16 : type == 6 || type == 2 ? 4 : 8; }

API int cufftXtMakePlanMany(int plan, int rank, long long *sizes, long long *in_embed, long long in_stride,
                            long long in_distance, int in_type, long long *out_embed, long long out_stride,
                            long long out_distance, int out_type, long long batch, size_t *work_size, int type) {
    TRACE();
    (void)in_embed, (void)in_stride, (void)in_distance, (void)out_embed, (void)out_stride, (void)out_distance;
    int real = in_type <= 2 || out_type <= 2; /* CUDA_R_32F, R_64F or R_16F on one side: half of the spectrum is kept */
    uint64_t elements = (uint64_t)batch, kept = (uint64_t)batch;
    for (int i = 0; i < rank; i++) {
        uint64_t size = (uint64_t)sizes[i];
        elements *= size;
        kept *= real && i == rank - 1 ? size / 2 + 1 : size;
    }
    *work_size = work_sizes[plan] = kept * complex_size(type);
    uint64_t most = 8 * elements * complex_size(type);
    oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, NULL, most > *work_size ? most - *work_size : 0, "cuFFT");
    return 0;
}

API int cufftGetSize(int plan, size_t *work_size) {
    TRACE();
    *work_size = work_sizes[plan];
    return 0;
}

API int cufftSetWorkArea(int plan, void *work_area) {
    TRACE();
    if (work_area && work_sizes[plan]) oom_event(OOM_EVENT_WORKSPACE, work_area, work_sizes[plan], "cuFFT");
    return 0;
}
