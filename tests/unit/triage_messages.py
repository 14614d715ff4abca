"""Messages and what they are: real ones with the public report each comes from, and made ones where none was at hand.

Paths, user names, host names and addresses of the reports are replaced.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One message; ``source`` is the public report, or why it was made."""

    text: str
    kind: str
    source: str


SPLIT = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
    "  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
EXPANDABLE = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
    " fragmentation.  See documentation for Memory Management "
    " (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
GITHUB = "https://github.com/"

REAL = [
    # CUDA, PyTorch 1.0 to 1.3: the last figure is what is reserved less what is allocated
    Row(
        "RuntimeError: CUDA out of memory. Tried to allocate 1024.00 KiB (GPU 0; 11.17 GiB total capacity; 10.90 GiB "
        "already allocated; 576.00 KiB free; 30.96 MiB cached)",
        "fragmentation",
        GITHUB + "shllln/GenerativeGraph/issues/5",
    ),
    Row(
        "RuntimeError: CUDA out of memory. Tried to allocate 1.12 MiB (GPU 0; 22.37 GiB total capacity; 15.87 GiB "
        "already allocated; 3.56 MiB free; 787.74 MiB cached)",
        "fragmentation",
        GITHUB + "neurosim/DNN_NeuroSim_V1.3/issues/28",
    ),
    Row(
        "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB "
        "already allocated; 9.28 GiB free; 4.68 MiB cached)",
        "outside-pytorch",
        GITHUB + "pytorch/pytorch/issues/16417",
    ),
    Row(
        "RuntimeError: CUDA out of memory. Tried to allocate 8.13 GiB (GPU 0; 10.76 GiB total capacity; 643.57 MiB "
        "already allocated; 8.20 GiB free; 32.43 MiB cached)",
        "outside-pytorch",
        GITHUB + "RenYurui/StructureFlow/issues/35",
    ),
    # CUDA, PyTorch 1.4 to 2.0
    Row(
        "RuntimeError: CUDA out of memory. Tried to allocate 16.00 MiB (GPU 0; 3.94 GiB total capacity; 2.98 GiB "
        "already allocated; 14.25 MiB free; 3.00 GiB reserved in total by PyTorch)" + SPLIT,
        "fragmentation",
        GITHUB + "Strawberry-Eat-Mango/PCT_Pytorch/issues/27",
    ),
    Row(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.69 GiB (GPU 0; 14.56 GiB total "
        "capacity; 649.97 MiB already allocated; 1.31 GiB free; 1.01 GiB reserved in total by PyTorch)" + SPLIT,
        "other-process",
        GITHUB + "One-2-3-45/One-2-3-45/issues/25",
    ),
    Row(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB total "
        "capacity; 17.20 GiB already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch)" + SPLIT,
        "device-full",
        GITHUB + "YingqianWang/iPASSR/issues/9",
    ),
    Row(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 38.00 MiB (GPU 0; 4.00 GiB total "
        "capacity; 3.41 GiB already allocated; 0 bytes free; 3.44 GiB reserved in total by PyTorch)" + SPLIT,
        "device-full",
        GITHUB + "gjy3035/NWPU-Crowd-Sample-Code/issues/27",
    ),
    Row(
        "CUDA out of memory. Tried to allocate 10.84 GiB (GPU 0; 23.65 GiB total capacity; 1.06 GiB already "
        "allocated; 10.26 GiB free; 12.53 GiB reserved in total by PyTorch)",
        "fragmentation",
        GITHUB + "pytorch/pytorch/issues/35901",
    ),
    Row(
        "RuntimeError: CUDA out of memory. Tried to allocate 12.00 MiB (GPU 0; 23.70 GiB total capacity; 1.10 GiB "
        "already allocated; 10.56 MiB free; 1.18 GiB reserved in total by PyTorch)" + SPLIT,
        "other-process",
        GITHUB + "ltgoslo/norbench/issues/21",
    ),
    Row(
        "RuntimeError: CUDA out of memory. Tried to allocate 18.56 GiB (GPU 0; 79.15 GiB total capacity; 56.85 GiB "
        "already allocated; 17.20 GiB free; 61.32 GiB reserved in tot\nal by PyTorch)" + SPLIT,
        "device-full",
        GITHUB + "nanoporetech/dorado/issues/875",
    ),
    Row(
        "RuntimeError: CUDA out of memory. Tried to allocate 5.59 GiB (GPU 0; 11.17 GiB total capacity; 0 bytes "
        "already allocated; 10.91 GiB free; 5.59 GiB allowed; 0 bytes reserved in total by PyTorch)",
        "process-cap",
        GITHUB + "pytorch/pytorch/pull/48172",
    ),
    Row(
        "ERROR: an <class 'RuntimeError'> error occurred in the train loop: RuntimeError('CUDA out of memory. Tried "
        "to allocate 20.00 MiB (GPU 0; 7.80 GiB total capacity; 1.28 GiB already allocated; 5.44 MiB free; 1.32 GiB "
        "reserved in total by PyTorch)',)",
        "other-process",
        GITHUB + "VIAME/VIAME/issues/146",
    ),
    # CUDA, PyTorch 2.1 and later
    Row(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of "
        "6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB "
        "is reserved by PyTorch but unallocated.",
        "fragmentation",
        GITHUB + "carolchenyx/MGFN./issues/35",
    ),
    Row(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of "
        "31.47 GiB of which 12.73 GiB is free. Including non-PyTorch memory, this process has 18.73 GiB memory in "
        "use. Of the allocated memory 9.08 GiB is allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but "
        "unallocated." + EXPANDABLE,
        "device-full",
        GITHUB + "murong-xu/CADS/issues/4",
    ),
    Row(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1002.00 MiB. GPU 0 has a total capacity of "
        "8.00 GiB of which 0 bytes is free. Of the allocated memory 13.98 GiB is allocated by PyTorch, and 129.48 "
        "MiB is reserved by PyTorch but unallocated." + EXPANDABLE,
        "device-full",
        GITHUB + "huggingface/meshgen/issues/7",
    ),
    Row(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of "
        "14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in use. Of the allocated memory "
        "14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by PyTorch but unallocated.",
        "device-full",
        GITHUB + "FoundationVision/GenerateU/issues/10",
    ),
    Row(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 138.00 MiB.\nGPU 0 has a total capacty "
        "of 15.90 GiB of which 8.44 MiB is free.\nProcess 1246069 has 577.00 MiB memory in use. Including "
        "non-PyTorch memory,\nthis process has 15.32 GiB memory in use. Of the allocated memory\n14.12 GiB is "
        "allocated by PyTorch, and 410.41 MiB is reserved\nby PyTorch but unallocated.",
        "fragmentation",
        GITHUB + "pytorch/pytorch/pull/99699",
    ),
    Row(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacty of "
        "23.65 GiB of which 1.66 GiB is free. Including non-PyTorch memory, this process has 20.81 GiB memory in "
        "use. Of the allocated memory 12.09 GiB is allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but "
        "unallocated.",
        "fragmentation",
        GITHUB + "kerrj/lerf/issues/73",
    ),
    Row(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.57 GiB. GPU 0 has a total capacty of "
        "12.00 GiB of which 9.02 GiB is free. Of the allocated memory 984.52 MiB is allocated by PyTorch, and 463.48 "
        "MiB is reserved by PyTorch but unallocated.",
        "device-full",
        GITHUB + "wxian3/NeuroLens/issues/2",
    ),
    Row(
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 572.00 MiB. GPU 0 has a total "
        "capacity of 39.49 GiB of which 321.31 MiB is free. Process 3721648 has 414.00 MiB memory in use. Including "
        "non-PyTorch memory, this process has 37.46 GiB memory in use. Process 1374765 has 414.00 MiB memory in use. "
        "Process 1374763 has 414.00 MiB memory in use. Process 1374764 has 414.00 MiB memory in use. Of the "
        "allocated memory 36.04 GiB is allocated by PyTorch, and 321.37 MiB is reserved by PyTorch but unallocated.",
        "device-full",
        GITHUB + "awslabs/keys_values/issues/92",
    ),
    Row(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total capacty of "
        "4.00 GiB of which 41.56 MiB is free. Including non-PyTorch memory, this process has 3.44 GiB memory in use. "
        "Of the allocated memory 2.58 GiB is allocated by PyTorch, and 1.90 MiB is reserved by PyTorch but "
        "unallocated.",
        "device-full",
        GITHUB + "Synthintel0/MyGirlGPT/issues/11",
    ),
    Row(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 28.00 MiB. GPU 1 has a total capacity of 8.00 "
        "GiB of which 0 bytes is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in "
        "use. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of the allocated "
        "memory 6.93 GiB is allocated by PyTorch, and 21.00 MiB is reserved by PyTorch but unallocated.",
        "device-full",
        GITHUB + "mindverse/Second-Me/issues/209",
    ),
    Row(
        "[rank2]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 336.00 MiB. GPU  has a total "
        "capacity of 79.15 GiB of which 141.25 MiB is free. Process 2109115 has 78.99 GiB memory in use. Of the "
        "allocated memory 77.21 GiB is allocated by PyTorch, and 283.51 MiB is reserved by PyTorch but unallocated."
        + EXPANDABLE,
        "device-full",
        GITHUB + "modelscope/FunASR/issues/2006",
    ),
    Row(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.",
        "corrupt-size",
        GITHUB + "NVIDIA/nccl/issues/1284",
    ),
    Row(
        "RuntimeError: CUDA out of memory, trying to allocate 133792483MiB",
        "corrupt-size",
        GITHUB + "ashawkey/diff-gaussian-rasterization/issues/27",
    ),
    Row(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 218.96 GiB",
        "device-full",
        GITHUB + "Fannovel16/comfy_controlnet_preprocessors/issues/50",
    ),
    # the cudaMallocAsync back end
    Row(
        "OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated  "
        "   : 15.16 GiB\nRequested               : 512.00 KiB\nDevice limit            : 15.99 GiB\nFree (according "
        "to CUDA): 0 bytes\nPyTorch limit (set by user-supplied memory fraction)\n                        : "
        "17179869184.00 GiB",
        "device-full",
        GITHUB + "EvilBT/ComfyUI_SLK_joy_caption_two/issues/28",
    ),
    Row(
        "OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory) Currently allocated : "
        "12.20 GiB Requested : 1.88 GiB Device limit : 16.00 GiB Free (according to CUDA): 0 bytes PyTorch limit "
        "(set by user-supplied memory fraction) : 17179869184.00 GiB",
        "device-full",
        GITHUB + "continue-revolution/sd-webui-animatediff/issues/320",
    ),
    # HIP, XPU, MPS
    Row(
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.88 GiB. GPU 0 has a total capacity of 23.98 "
        "GiB of which 1.70 GiB is free. Of the allocated memory 21.65 GiB is allocated by PyTorch, and 279.78 MiB is "
        "reserved by PyTorch but unallocated." + EXPANDABLE,
        "device-full",
        GITHUB + "Tongyi-MAI/Z-Image/issues/103",
    ),
    Row(
        "HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB of which 7.12 GiB "
        "is free. Of the allocated memory 8.08 GiB is allocated by PyTorch, and 321.96 MiB is reserved by PyTorch "
        "but unallocated.",
        "outside-pytorch",
        GITHUB + "Comfy-Org/ComfyUI/issues/9529",
    ),
    Row(
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 15.24 "
        "GiB of which 15.09 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is "
        "reserved by PyTorch but unallocated.",
        "device-full",
        GITHUB + "ROCm/TheRock/issues/1054",
    ),
    Row(
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 128.00 "
        "GiB of which 780.24 MiB is free. Of the allocated memory 57.70 GiB is allocated by PyTorch, and 75.82 MiB "
        "is reserved by PyTorch but unallocated.",
        "other-process",
        GITHUB + "kyuz0/amd-strix-halo-image-video-toolboxes/issues/3",
    ),
    Row(
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 13.74 "
        "GiB. Of the allocated memory 10.10 GiB is allocated by PyTorch, and 3.47 GiB is reserved by PyTorch but "
        "unallocated. Please use `empty_cache` to release all unoccupied cached memory.",
        "device-full",
        GITHUB + "intel/intel-extension-for-pytorch/issues/851",
    ),
    Row(
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.11 "
        "GiB. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated. Please use `empty_cache` to release all unoccupied cached memory.",
        "outside-pytorch",
        GITHUB + "intel/intel-extension-for-pytorch/issues/846",
    ),
    Row(
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 11.59 "
        "GiB of which 9.01 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is "
        "reserved by PyTorch but unallocated.",
        "device-full",
        GITHUB + "intel/torch-xpu-ops/issues/3157",
    ),
    Row(
        "RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate "
        "6.85 GiB (GPU  0; 15.56 GiB total capacity; 0 bytes already allocated; 0 bytes reserved in total by PyTorch)",
        "process-cap",
        GITHUB + "intel/intel-extension-for-pytorch/issues/629",
    ),
    Row(
        "MPS backend out of memory (MPS allocated: 17.68 GB, other allocations: 3.95 MB, max allowed: 18.13 GB). "
        "Tried to allocate 1024.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper "
        "limit for memory allocations (may cause system failure).",
        "device-full",
        GITHUB + "Comfy-Org/ComfyUI/issues/7372",
    ),
    Row(
        "RuntimeError: MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max "
        "allowed: 27.20 GiB). Tried to allocate 292.50 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 "
        "to disable upper limit for memory allocations (may cause system failure).",
        "outside-pytorch",
        GITHUB + "Comfy-Org/ComfyUI/issues/7440",
    ),
    Row(
        "RuntimeError: NPU out of memory. Tried to allocate 48.78 GiB (NPU 0; 60.96 GiB total capacity; 13.22 GiB "
        "already allocated; 13.22 GiB current active; 40.54 GiB free; 54.86 GiB allowed; 13.86 GiB reserved in total "
        "by PyTorch)" + SPLIT,
        "device-full",
        "a public write-up of an Ascend NPU error, found by its text",
    ),
    # errors without figures
    Row(
        "THCudaCheck FAIL file=/home/user/torch/lib/THC/generic/THCStorage.cu line=66 error=2 : out of memory\n"
        'Traceback (most recent call last):\n  File "a.py", line 4, in <module>\nRuntimeError: cuda runtime error '
        "(2) : out of memory at /home/user/torch/lib/THC/generic/THCStorage.cu:66",
        "device-full",
        GITHUB + "pytorch/pytorch/issues/1829",
    ),
    Row(
        'Traceback (most recent call last):\n  File "demo.py", line 22, in <module>\n    im1_v = im1.cuda()\n'
        "RuntimeError: CUDA error: out of memory",
        "outside-pytorch",
        GITHUB + "vt-vl-lab/pwc-net.pytorch/issues/3",
    ),
    Row(
        'Traceback (most recent call last):\n  File "/opt/torch/distributed/distributed_c10d.py", line 2420, in '
        "barrier\n    work = default_pg.barrier(opts=opts)\nRuntimeError: CUDA error: out of memory\nKilling "
        "subprocess 31867\nKilling subprocess 31868",
        "collective-library",
        GITHUB + "MIC-DKFZ/nnUNet/issues/593",
    ),
    Row(
        "RuntimeError: Error while calling cudaMalloc(&data, new_size*sizeof(float)) in file "
        "/tmp/dlib/cuda/gpu_data.cpp:221. code: 2, reason: out of memory",
        "outside-pytorch",
        GITHUB + "davisking/dlib/issues/2340",
    ),
    Row(
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "library-workspace",
        GITHUB + "DeepMotionAIResearch/DenseMatchingBenchmark/issues/20",
    ),
    Row(
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "library-workspace",
        GITHUB + "yukkyo/PyTorch-FilterResponseNormalizationLayer/issues/4",
    ),
    Row(
        "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
        "library-workspace",
        GITHUB + "Lightning-AI/pytorch-lightning/issues/5897",
    ),
    Row(
        "RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED",
        "library-workspace",
        GITHUB + "pytorch/pytorch/issues/6511",
    ),
    Row(
        "node1:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n\n"
        "node1:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
        "collective-library",
        GITHUB + "NVIDIA/nccl/issues/1235",
    ),
    Row(
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, '
        "please report a bug to PyTorch. ",
        "nvml-assert",
        GITHUB + "hpcaitech/Open-Sora/issues/716",
    ),
    Row(
        "RuntimeError: NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
        '"../c10/cuda/CUDACachingAllocator.cpp":1123, please report a bug to PyTorch.',
        "nvml-assert",
        GITHUB + "pytorch/pytorch/issues/112950",
    ),
    Row(
        "❌ Error generating speech: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
        '"../c10/cuda/CUDACachingAllocator.cpp":995, please report a bug to PyTorch.',
        "nvml-assert",
        GITHUB + "pytorch/pytorch/issues/159149",
    ),
    # host memory
    Row(
        "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 132426121216 bytes. Error code 12 (Cannot allocate memory)",
        "host",
        GITHUB + "mxfold/mxfold2/issues/20",
    ),
    Row(
        "RuntimeError: [enforce fail at C:\\b\\work\\c10\\core\\impl\\alloc_cpu.cpp:81] data. DefaultCPUAllocator: "
        "not enough memory: you tried to allocate 1981808640 bytes.",
        "host",
        GITHUB + "MaximeVandegar/Papers-in-100-Lines-of-Code/issues/10",
    ),
    Row(
        "RuntimeError: [enforce fail at CPUAllocator.cpp:56] posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
        "host",
        GITHUB + "pytorch/pytorch/pull/20618",
    ),
    Row(
        "Epoch: [0][511/1736]\t Loss 0.5075 MAE 0.6153 RMSE 0.7073\nKilled\n(env) user@node:~/project$ ",
        "host",
        GITHUB + "ArjunaCluster/ArjunaUsers/issues/52",
    ),
    Row(
        "/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed                  python3 main.py --epochs "
        "400\nslurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes may "
        "have been killed by the cgroup out-of-memory handler.",
        "host",
        GITHUB + "ArjunaCluster/ArjunaUsers/issues/52",
    ),
    Row(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been OOM "
        "Killed.\nsrun: error: node1: task 0: Out Of Memory",
        "host",
        GITHUB + "nextflow-io/nextflow/issues/5932",
    ),
    Row(
        "srun: error: node107: task 0: Out Of Memory",
        "host",
        GITHUB + "brain-score/vision/pull/950",
    ),
    Row(
        'Traceback (most recent call last):\n  File "/env/torch/utils/data/_utils/signal_handling.py", line 66, in '
        "handler\n    _error_if_any_worker_fails()\nRuntimeError: DataLoader worker (pid 1817) is killed by signal: "
        "Killed. \n\nThe above exception was the direct cause of the following exception:\n\nTraceback (most recent "
        'call last):\n  File "train_meta.py", line 131, in <module>\n    val_loader=[x for x in val_loader]\n'
        "RuntimeError: DataLoader worker (pid(s) 1817) exited unexpectedly",
        "host",
        GITHUB + "pytorch/pytorch/issues/8976",
    ),
    Row(
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "============================================================\ngrpo.py FAILED\n"
        "------------------------------------------------------------\nFailures:\n  <NO_OTHER_FAILURES>\n"
        "------------------------------------------------------------\nRoot Cause (first observed failure):\n[0]:\n  "
        "time      : 2025-05-21_15:43:03\n  host      : node1\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 "
        "(pid: 14750)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 14750\n"
        "============================================================",
        "host",
        GITHUB + "lzhxmu/CPPO/issues/6",
    ),
    Row(
        "E0325 20:57:27.620000 2606 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] failed "
        "(exitcode: -9) local_rank: 5 (pid: 2630) of binary: /opt/python/bin/python",
        "host",
        GITHUB + "lmzpai/roboMamba/issues/10",
    ),
    Row(
        "RuntimeError: DataLoader worker (pid 40931) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your shared memory limit. ",
        "host",
        "a public training script's notes, found by their text",
    ),
    # found by their text in public write-ups
    Row(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 94.00 MiB.\n  GPU 0 has a total capacity of "
        "8.00 GiB of which 4.03 GiB is free.\n  2.94 GiB allowed; Of the allocated memory 2.81 GiB is allocated by "
        "PyTorch, and 40.00 MiB is reserved by PyTorch but unallocated.",
        "process-cap",
        "a public benchmark's report, found by its text (the last figure is made)",
    ),
    Row(
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 139.79 "
        "GiB of which 20.59 GiB is free. Including non-PyTorch memory, this process has 119.20 GiB memory in use. "
        "118.82 GiB allowed; Of the allocated memory 117.83 GiB is allocated by PyTorch, and 640.95 MiB is reserved "
        "by PyTorch but unallocated." + EXPANDABLE,
        "process-cap",
        "a public benchmark's report, found by its text",
    ),
    Row(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.79 GiB.\nGPU 0 has a total capacity of "
        "24.00 GiB of which 1.51 GiB is free. 22.08 GiB allowed;\nOf the allocated memory 17.16 GiB is allocated by "
        "PyTorch, and 4.04 GiB is reserved\nby PyTorch but unallocated.",
        "fragmentation",
        "a public report of a training run, found by its text",
    ),
    Row(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 768.00 MiB. GPU 0 has a total capacity of "
        "83.05 GiB of which 140.38 MiB is free. Including non-PyTorch memory, this process has 23.33 GiB memory in "
        "use. Of the allocated memory 21.92 GiB is allocated by PyTorch, with 104.00 MiB allocated in private pools "
        "(e.g., CUDA Graphs), and 797.79 MiB is reserved by PyTorch but unallocated." + EXPANDABLE,
        "other-process",
        "a public vLLM log, found by its text; other containers hold 59 GiB",
    ),
    Row(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 21.10 GiB. GPU 0 has a total capacity of "
        "22.30 GiB of which 50.00 MiB is free. Process 189021 has 22.28 GiB memory in use. Of the allocated memory "
        "20.94 GiB is allocated by PyTorch, with 22.00 MiB allocated in private pools (e.g., CUDA Graphs).",
        "device-full",
        "a public test's trace, found by its text",
    ),
    Row(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 47.53 "
        "GiB of which 896.00 KiB is free. Process 1686436 has 47.51 GiB memory in use. Of the allocated memory 47.00 "
        "GiB is allocated by PyTorch, with 46.22 GiB allocated in private pools (e.g., CUDA Graphs), and 149.10 MiB "
        "is reserved by PyTorch but unallocated." + EXPANDABLE,
        "fragmentation",
        "a public vLLM log, found by its text",
    ),
    # rarer wordings
    Row(
        "celery-slow_1  | [2021-08-25 23:24:53,573: ERROR/MainProcess] Process 'ForkPoolWorker-3' pid:27 exited with "
        "'signal 9 (SIGKILL)'\ncelery-slow_1  | billiard.exceptions.WorkerLostError: Worker exited prematurely: "
        "signal 9 (SIGKILL) Job: 3.",
        "host",
        GITHUB + "JeffreyCA/spleeter-web/issues/92",
    ),
    Row(
        "[2023-08-22 21:53:21 +0200] [171] [ERROR] Worker (pid:256) was sent SIGKILL! Perhaps out of memory?",
        "host",
        GITHUB + "celery/billiard/issues/380",
    ),
    Row(
        "(raylet) [2023-07-23 15:21:29,851 E 9751 9751] (raylet) node_manager.cc:3084: 4 Workers (tasks / actors) "
        "killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: b2, IP: 10.0.0.1) "
        "over the last time period.",
        "host",
        GITHUB + "flwrlabs/flower/issues/2157",
    ),
    Row(
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the node "
        "was 59.49GB / 62.58GB (0.950744), which exceeds the memory usage threshold of 0.95.",
        "host",
        GITHUB + "real-stanford/flingbot/issues/11",
    ),
    Row(
        "RuntimeError: unable to mmap 23802932552 bytes from file <./flux1-dev.safetensors>: Cannot allocate memory "
        "(12)",
        "host",
        GITHUB + "safetensors/safetensors/issues/528",
    ),
    Row(
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL",
        "host",
        GITHUB + "lyu-yx/ACUMEN/issues/4",
    ),
    Row(
        "RuntimeError: cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)",
        "library-workspace",
        GITHUB + "JIA-Lab-research/UVTR/issues/13",
    ),
    Row(
        "RuntimeError: cusolver error: 7, when calling `cusolverDnCreate(handle)`",
        "library-workspace",
        GITHUB + "jzhangbs/Vis-MVSNet/issues/38",
    ),
    Row(
        "Error out of memory at line 351 in file /home/user/bitsandbytes/csrc/pythonInterface.c",
        "outside-pytorch",
        GITHUB + "bitsandbytes-foundation/bitsandbytes/issues/464",
    ),
    Row(
        "RuntimeError: TensorStorage /io/include/tensorview/tensor.h 168\ncuda failed with error 2 out of memory. "
        "use CUDA_LAUNCH_BLOCKING=1 to get correct traceback.",
        "outside-pytorch",
        GITHUB + "junjie18/CMT/issues/15",
    ),
    Row(
        "RuntimeError: CUDA failed with error out of memory",
        "outside-pytorch",
        GITHUB + "Purfview/whisper-standalone-win/issues/255",
    ),
    Row(
        "2025-11-12T11:25:13.4971964Z FAILED [0.0005s] test/test_autograd.py::test_parameter_resize_cuda - "
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 "
        "GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by "
        "PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch "
        "but unallocated.",
        "process-cap",
        GITHUB + "ROCm/TheRock/issues/2118",
    ),
    Row(
        "(Runner pid=104449) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.12 GiB. GPU 0 has a "
        "total capacity of 79.19 GiB of which 2.11 GiB is free. Including non-PyTorch memory, this process has 76.96 "
        "GiB memory in use. Of the allocated memory 83.48 GiB is allocated by P\nyTorch, with 241.21 MiB allocated "
        "in private pools (e.g., CUDA Graphs), and 30.59 GiB is reserved by PyTorch but unallocated.\n(Runner "
        "pid=104449) wandb: train/loss 0.1\n(Runner pid=104449) wandb: train/global_step 12",
        "fragmentation",
        GITHUB + "markingprowlik/EasyR1/issues/9",
    ),
    Row(
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.62 GiB.\nGPU 0 has a total "
        "capacity of 31.35 GiB of which 1.42 GiB is free.\n... this process has 23.32 GiB memory in use.",
        "other-process",
        "a public report of a training run, found by its text",
    ),
    Row(
        "[2023-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] ['/usr/bin/python3', '-u', 'main.py', "
        "'--local_rank=0'] exits with return code = -9",
        "host",
        GITHUB + "deepspeedai/DeepSpeed/issues/3232",
    ),
    Row(
        "[2023-05-29 10:44:30,991] [ERROR] [launch.py:434:sigkill_handler] ['python', '-u', 'examples/finetune.py'] "
        "exits with return code = -7",
        "host",
        GITHUB + "OptimalScale/LMFlow/issues/430",
    ),
    Row(
        "command terminated with exit code 137",
        "host",
        GITHUB + "jupyter/docker-stacks/issues/736",
    ),
    Row(
        "Epoch 15 (validation) validation/acc/qa=1.000000:   2%|#4      | 20/1094 [00:41<11:04,  "
        '1.62it/s]/home/user/bin/jac-crun: line 6:  3305 Killed                  $JACROOT/bin/jac-run "$@"',
        "host",
        GITHUB + "vacancy/NSCL-PyTorch-Release/issues/23",
    ),
    Row(
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory "
        "(shm).\nTraceback (most recent call last):\nConnectionResetError: [Errno 104] Connection reset by peer",
        "host",
        GITHUB + "tengshaofeng/ResidualAttentionNetwork-pytorch/issues/2",
    ),
    Row(
        "OSError: [Errno 12] Cannot allocate memory",
        "host",
        GITHUB + "dusty-nv/jetson-inference/issues/806",
    ),
]

MADE = [
    Row(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8589934592.00 GiB. GPU 0 has a total capacity "
        "of 23.65 GiB of which 20.00 GiB is free. Of the allocated memory 1.00 GiB is allocated by PyTorch, and 0 "
        "bytes is reserved by PyTorch but unallocated.",
        "corrupt-size",
        "2^63 bytes",
    ),
    Row(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 "
        "GiB of which 1.00 GiB is free. Process 4001 has 11.50 GiB memory in use. Including non-PyTorch memory, this "
        "process has 11.10 GiB memory in use. Of the allocated memory 10.50 GiB is allocated by PyTorch, and 100.00 "
        "MiB is reserved by PyTorch but unallocated.",
        "other-process",
        "a listed process that holds half of the GPU",
    ),
    Row(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 "
        "GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.10 GiB memory in use. Of "
        "the allocated memory 60.50 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but "
        "unallocated.",
        "outside-pytorch",
        "17 GiB of the process outside PyTorch",
    ),
    Row(
        'Traceback (most recent call last):\n  File "/env/torch/utils/data/_utils/pin_memory.py", line 37, in '
        'do_one_step\n    data = pin_memory(data, device)\n  File "/env/torch/utils/data/_utils/pin_memory.py", '
        "line 57, in pin_memory\n    return data.pin_memory(device)\nRuntimeError: CUDA error: out of memory\nCUDA "
        "kernel errors might be asynchronously reported at some other API call",
        "pinned-host",
        "the DataLoader's pinning thread",
    ),
    Row(
        'Traceback (most recent call last):\n  File "/env/torch/cuda/__init__.py", line 298, in _lazy_init\n    '
        "torch._C._cuda_init()\nRuntimeError: CUDA error: out of memory",
        "other-process",
        "the context did not fit",
    ),
    Row(
        "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCCachingHostAllocator.cpp:278",
        "pinned-host",
        "PyTorch 1.x",
    ),
    Row(
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, "
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: "
        "Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'",
        "collective-library",
        "PyTorch 2.x",
    ),
    Row(
        "node1:12:90 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-XxYyZz to 9637892 bytes",
        "collective-library",
        "a container's default /dev/shm",
    ),
    Row(
        "RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "library-workspace",
        "cuSOLVER",
    ),
    Row(
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "outside-pytorch",
        "a kernel that could not be loaded",
    ),
    Row(
        "MemoryError",
        "host",
        "Python's own",
    ),
    Row(
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 12.3 GiB for an array with shape (1650000, "
        "1000) and data type float64",
        "host",
        "NumPy",
    ),
    Row(
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\nAborted (core "
        "dumped)",
        "host",
        "C++",
    ),
    Row(
        "train.sh: line 3:  4211 Killed                  torchrun --nproc_per_node 2 train.py",
        "host",
        "bash",
    ),
    Row(
        "zsh: killed     python train.py",
        "host",
        "zsh",
    ),
    Row(
        "Pod trainer-0 failed: container train terminated: exit code 137",
        "host",
        "Kubernetes",
    ),
    Row(
        "Last State:     Terminated\n  Reason:       OOMKilled\n  Exit Code:    137",
        "host",
        "kubectl describe pod",
    ),
    Row(
        "[123456.7] Out of memory: Killed process 4211 (python) total-vm:98304000kB",
        "host",
        "dmesg",
    ),
    Row(
        "OSError: [WinError 1455] The paging file is too small for this operation to complete. Error loading "
        '"C:\\env\\torch\\lib\\cudnn_ops64_9.dll" or one of its dependencies.',
        "host",
        "Windows",
    ),
    Row(
        "RuntimeError: unable to write to file </torch_4211_123>: No space left on device (28)",
        "host",
        "tensors shared between processes",
    ),
    Row(
        "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "device-full",
        "XPU",
    ),
    Row(
        "torch.OutOfMemoryError: Allocation on device",
        "device-full",
        "ComfyUI shortens the message",
    ),
]

#: What names memory but is no out-of-memory of PyTorch.
NEGATIVE = [
    Row(
        "java.lang.OutOfMemoryError: Java heap space",
        "not-oom",
        "another program's heap",
    ),
    Row(
        'Traceback (most recent call last):\n  File "efficientad.py", line 374, in map_normalization\n    '
        "q_st_start = torch.quantile(maps_st, q=0.9)\nRuntimeError: quantile() input tensor is too large",
        "not-oom",
        GITHUB + "nelson1425/EfficientAD/issues/40",
    ),
    Row(
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 65538, Hardware limit: "
        "65536. Reducing block sizes or `num_stages` may help.",
        "not-oom",
        GITHUB + "Yuliang-Liu/MonkeyOCR/issues/25",
    ),
    Row(
        'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    assert free > need, "out '
        'of memory budget"\nAssertionError: out of memory budget',
        "not-oom",
        "an assertion that mentions memory",
    ),
    Row(
        'Traceback (most recent call last):\n  File "train.py", line 9, in step\n    except '
        'torch.cuda.OutOfMemoryError:\n  File "train.py", line 4, in f\n    raise RuntimeError("CUDA error: out '
        'of memory")  # never\nValueError: bad shape',
        "not-oom",
        "source lines in a traceback",
    ),
    Row(
        "        except torch.cuda.OutOfMemoryError:\n            torch.cuda.empty_cache()",
        "not-oom",
        "source in a log",
    ),
    Row(
        "Epoch: [0]  [100/834]  loss: 6.94 (6.94)  time: 0.94  data: 0.29  max mem: 3344",
        "not-oom",
        "a progress line",
    ),
    Row(
        "usage: train.py [-h] [--skip-oom]\n\noptions:\n  --skip-oom  skip the batch when the GPU runs out of "
        "memory\n  --retry     retry after CUDA out of memory errors",
        "not-oom",
        "a help text",
    ),
    Row(
        "step 100 loss 2.31 mem 12.1GiB oom: 0\nstep 101 loss 2.30 mem 12.1GiB oom: 0\ndone",
        "not-oom",
        "a log of success",
    ),
    Row(
        "memory.events: low 0 high 0 max 0 oom 0 oom_kill 0",
        "not-oom",
        "a cgroup's counters, all 0",
    ),
    Row(
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "not-oom",
        "a wrong access",
    ),
    Row(
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
        "17179869184 bytes.",
        "not-oom",
        "JAX",
    ),
    Row(
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor with shape[64,512]",
        "not-oom",
        "TensorFlow",
    ),
    Row(
        "2018-03-14 11:33:52.456418: E tensorflow/stream_executor/cuda/cuda_driver.cc:924] failed to allocate "
        "968.17M (1015196672 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY",
        "not-oom",
        GITHUB + "ymgaq/AQ/issues/91",
    ),
    Row(
        "RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:784, unhandled cuda error, NCCL version "
        "2.7.8",
        "not-oom",
        "an NCCL error without its cause",
    ),
    Row(
        "OSError: [Errno 28] No space left on device: '/data/ckpt.pt'",
        "not-oom",
        "a full disk",
    ),
    Row(
        "slurmstepd: error: *** JOB 4211 ON node1 CANCELLED AT 2025-05-17T17:58:10 DUE TO TIME LIMIT ***\nsrun: "
        "error: node1: task 0: Killed",
        "not-oom",
        "a time limit",
    ),
    Row(
        "THCudaCheck FAIL file=/home/user/pytorch/aten/src/THC/generic/THCStorage.cu line=58 error=2 : out of "
        "memory\n| WARNING: ran out of memory, skipping batch\nTraceback (most recent call last):\n  File "
        "\"train.py\", line 189, in _backward_and_opt\n    p.grad.data.div_(grad_denom)\nAttributeError: 'NoneType' "
        "object has no attribute 'data'",
        "not-oom",
        GITHUB + "facebookresearch/fairseq/issues/168",
    ),
    Row(
        "| WARNING: ran out of memory with exception: CUDA out of memory. Tried to allocate 3.07 GiB (GPU 0; 31.72 "
        "GiB total capacity; 29.28 GiB already allocated; 767.56 MiB free; 556.92 MiB cached);\n Skipping batch\n"
        "Traceback (most recent call last):\nValueError: not enough values to unpack (expected 2, got 0)",
        "not-oom",
        GITHUB + "facebookresearch/fairseq/issues/1164",
    ),
    Row(
        "| WARNING: ran out of memory on GPU #2, skipping batch\n| epoch 001:   0%|# | 318/72115 [01:25<5:21:15,  "
        "3.72it/s, loss=12.26]\n| epoch 001:   1%|# | 594/72115 [02:39<5:20:00,  3.72it/s, loss=12.26]\n| epoch 001: "
        "  1%|# | 595/72115 [02:39<5:20:00,  3.72it/s, loss=12.26]",
        "not-oom",
        GITHUB + "facebookresearch/fairseq/issues/103",
    ),
    Row(
        "RuntimeError: !block->expandable_segment_ INTERNAL ASSERT FAILED at "
        '"../c10/cuda/CUDACachingAllocator.cpp":2814, please report a bug to PyTorch. ',
        "not-oom",
        GITHUB + "pytorch/pytorch/issues/119452",
    ),
    Row(
        "",
        "not-oom",
        "an empty log",
    ),
]
