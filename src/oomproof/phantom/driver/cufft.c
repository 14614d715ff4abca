/* libcufft: plans are numbers; the work area that a real plan would ask for is told as an upper bound. */
#include "device.h"

#define API __attribute__((visibility("default")))

static int plan_count;

API int cufftCreate(int *plan) {
    TRACE();
    *plan = __atomic_add_fetch(&plan_count, 1, __ATOMIC_SEQ_CST);
    return 0;
}

API int cufftGetVersion(int *version) {
    TRACE();
    *version = OOM_CUFFT_VERSION;
    return 0;
}

/* Two copies of the complex data bound the out-of-place passes of any factorisation cuFFT documents. */
API int cufftXtMakePlanMany(int plan, int rank, long long *sizes, long long *in_embed, long long in_stride,
                            long long in_distance, int in_type, long long *out_embed, long long out_stride,
                            long long out_distance, int out_type, long long batch, size_t *work_size, int type) {
    TRACE();
    (void)plan, (void)in_embed, (void)in_stride, (void)in_distance, (void)in_type, (void)out_embed;
    (void)out_stride, (void)out_distance, (void)out_type, (void)type;
    uint64_t elements = (uint64_t)batch;
    for (int i = 0; i < rank; i++) elements *= (uint64_t)sizes[i];
    oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, 0, elements * 2 * 16, "cuFFT");
    *work_size = 0;
    return 0;
}

API int cufftGetSize(int plan, size_t *work_size) {
    TRACE();
    (void)plan;
    *work_size = 0;
    return 0;
}
