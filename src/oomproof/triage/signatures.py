"""The sentences by which out-of-memory errors are recognised; the first that matches decides.

They are the wordings of PyTorch, CUDA, ROCm, Intel's and Apple's back ends, NCCL, the Linux kernel, Slurm and shells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "device-full",
    "fragmentation",
    "process-cap",
    "other-process",
    "outside-pytorch",
    "library-workspace",
    "collective-library",
    "pinned-host",
    "host",
    "nvml-assert",
    "corrupt-size",
    "other-rank",
    "not-oom",
]
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)  # no slots, no kw_only: the guard uses it in the user's process, Python 3.9
class Signature:
    """One sentence: what it means by itself, and how far it must be looked into.

    ``figured`` messages are judged by their figures, ``bare`` ones by their frames. A ``loose`` sentence may also stand
    in source code or help texts and needs an exception's name or a line of its own. A ``weak`` one follows from many
    causes, so that any other error beside it decides.
    """

    name: str
    pattern: re.Pattern[str]
    kind: Kind
    confidence: Confidence
    why: str
    figured: bool = False
    bare: bool = False
    loose: bool = False
    weak: bool = False


def _s(name: str, pattern: str, kind: Kind, confidence: Confidence, why: str, **flags: bool) -> Signature:
    return Signature(name, re.compile(pattern, re.MULTILINE), kind, confidence, why, **flags)


_SIZE = r"(?<![\d.])\d{1,20}(?:\.\d{1,6})?\s?(?:[KMGT]i?B|bytes|B)\b"
_SHM = "shared memory (/dev/shm) of this machine or container was full"
_KILLED = "the process was killed by SIGKILL, as the kernel does when RAM runs out; a person or a scheduler could, too"

SIGNATURES: tuple[Signature, ...] = (
    _s(
        "NVML assert",
        r"NVML_SUCCESS == .{0,120}INTERNAL ASSERT FAILED|NVML_SUCCESS == r\b",
        "nvml-assert",
        "high",
        "PyTorch asks NVML who holds the GPU's memory only while it writes an out-of-memory message, and NVML refused",
    ),
    _s(
        "NCCL",
        r"(?i)NCCL WARN.{0,80}(?:out of memory|Failed to CUDA (?:m|c)alloc)|ncclUnhandledCudaError.{0,300}out of memory"
        r"|Cuda failure(?: \d+)? '?out of memory",
        "collective-library",
        "high",
        "NCCL itself reports that CUDA gave it no memory",
    ),
    _s(
        "NCCL shared memory",
        r"(?i)NCCL WARN.{0,120}(?:/dev/shm/nccl|shared memory segment)"
        r"|Error while creating shared memory segment /dev/shm/nccl",
        "collective-library",
        "high",
        f"NCCL could not make its segment: {_SHM}",
    ),
    _s(
        "pinned memory",
        r"(?i)(?:THCCachingHostAllocator|CachingHostAllocator|cudaHostAlloc|cudaHostRegister|cudaMallocHost)"
        r".{0,200}(?:out of memory|memory allocation|failed)|(?:out of memory).{0,120}(?:HostAllocator|cudaHostAlloc)",
        "pinned-host",
        "high",
        "the call that failed allocates page-locked host memory",
    ),
    _s(
        "caching allocator",
        rf"(?i:\b[A-Z]{{3,5}}) out of memory[.!]?\s*\(?Tried to allocate (?:{_SIZE}|more than 1EB)"
        rf"|Tried to allocate {_SIZE}[.]?\s*\(?GPU.{{0,6}}(?:; |has a total)"
        rf"|out of memory, trying to allocate \d"
        r"|can NOT allocate memory block with size larger than 4GB",
        "device-full",
        "high",
        "",
        figured=True,
    ),
    _s("MPS", r"MPS backend out of memory", "device-full", "high", "", figured=True),
    _s(
        "cudaMallocAsync",
        r"Allocation on device \d* ?would exceed allowed memory",
        "device-full",
        "high",
        "",
        figured=True,
    ),
    _s(
        "cuBLAS",
        r"CUBLAS_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED|rocblas_status_memory_error",
        "library-workspace",
        "high",
        "cuBLAS got no memory for its handle or workspace, which lie outside PyTorch's allocator",
    ),
    _s(
        "cuBLAS handle",
        r"CUBLAS_STATUS_NOT_INITIALIZED",
        "library-workspace",
        "medium",
        "cuBLAS could not make its handle: mostly for lack of memory, also after an earlier CUDA error",
    ),
    _s(
        "cuDNN",
        r"CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"
        r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|miopenStatusAllocFailed",
        "library-workspace",
        "high",
        "cuDNN got no memory for its handle or workspace",
    ),
    _s(
        "cuDNN handle",
        r"CUDNN_STATUS_NOT_INITIALIZED",
        "library-workspace",
        "medium",
        "cuDNN could not make its handle: mostly for lack of memory, also for a cuDNN that does not fit the driver",
    ),
    _s(
        "cuDNN algorithm",
        r"Unable to find a valid cuDNN algorithm to run convolution"
        r"|(?:FIND|GET) was unable to find an engine to execute this computation",
        "library-workspace",
        "low",
        "no algorithm could run, which PyTorch says also when each failed for lack of workspace",
    ),
    _s(
        "cuFFT",
        r"CUFFT_ALLOC_FAILED|HIPFFT_ALLOC_FAILED",
        "library-workspace",
        "high",
        "cuFFT got no memory for its plan",
    ),
    _s(
        "cuSOLVER",
        r"CUSOLVER_STATUS_ALLOC_FAILED|CUSPARSE_STATUS_ALLOC_FAILED|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"
        r"|MAGMA_ERR_DEVICE_ALLOC|[Cc]an ?not allocate memory for MAGMA",
        "library-workspace",
        "high",
        "the linear algebra library got no memory for its handle or workspace",
    ),
    _s(
        "cuSOLVER handle",
        r"CUSOLVER_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR).{0,40}cusolver\w*Create"
        r"|CUSPARSE_STATUS_NOT_INITIALIZED|error: \d+, when calling `cu\w+Create\b",
        "library-workspace",
        "medium",
        "the linear algebra library could not make its handle: mostly for lack of memory",
    ),
    _s(
        "host allocator",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|posix_memalign\(&data, gAlignment"
        r"|_ArrayMemoryError|numpy\.core\._exceptions\.MemoryError",
        "host",
        "high",
        "the allocation that failed is one of host RAM",
    ),
    _s(
        "kernel or cgroup",
        r"(?i)\boom[-_]kill(?:er|ed)?\b(?! ?[=:]? ?0\b)(?:\(s\))?.{0,40}(?:event|invoked|:|constraint|killed|detected)"
        r"|Detected \d+ oom[-_]kill event|Out of memory: Kill(?:ed)? process|Memory cgroup out of memory"
        r"|\bOOMKilled\b(?!\W{1,3}false)|cgroup out-of-memory handler|task \d+: Out Of Memory|State:? OUT_OF_MEMORY"
        r"|Exceeded (?:job|step) memory limit|TERM_MEMLIMIT|killed due to the node running low on memory"
        r"|killed due to memory pressure \(OOM\)"
        r"|session crashed after using all available RAM",
        "host",
        "high",
        "the kernel, the container or the scheduler says that the job's RAM ran out",
    ),
    _s(
        "DataLoader worker",
        r"DataLoader worker \(pid\(?s?\)? ?[\d, .]+\) is killed by signal: Killed",
        "host",
        "high",
        "a DataLoader worker was killed by SIGKILL, which the kernel does when RAM runs out",
    ),
    _s(
        "shared memory",
        r"is killed by signal: Bus error|Unexpected bus error encountered in worker"
        r"|out of shared memory\. Try to raise your shared memory limit"
        r"|unable to (?:mmap|write to file|resize file|allocate shared memory).{0,200}(?:/torch_|shm)"
        r".{0,100}(?:No space left|Cannot allocate memory|\(28\)|\(12\))",
        "host",
        "high",
        _SHM,
    ),
    _s(
        "mapping",
        r"unable to mmap \d+ bytes from file .{0,200}Cannot allocate memory",
        "host",
        "high",
        "a file could not be mapped: more than RAM, swap and the system's overcommit rule allow",
    ),
    _s(
        "page file",
        r"WinError 1455|os error 1455|paging file is too small",
        "host",
        "high",
        "Windows could commit no more memory: RAM and page file together were used up",
    ),
    _s(
        "no host memory",
        r"(?:^|[\s'\"(])std::bad_alloc\b|\[Errno 12\] Cannot allocate memory|(?:^|[\s.\]])MemoryError(?::|\s*$)",
        "host",
        "high",
        "the allocation that failed is one of host RAM",
        loose=True,
    ),
    _s(
        "Triton",
        r"Triton Error \[(?:CUDA|HIP)\]: out of memory",
        "outside-pytorch",
        "medium",
        "a kernel could not be loaded or launched for lack of memory outside PyTorch's allocator",
    ),
    _s(
        "CUDA graph",
        r"(?:cudaGraphInstantiate|cuGraphInstantiate|cudaGraphLaunch).{0,120}out of memory",
        "outside-pytorch",
        "high",
        "a CUDA graph's own memory lies outside PyTorch's allocator",
    ),
    _s(
        "old PyTorch",
        r"cuda runtime error \(2\) ?: out of memory at|THCudaCheck FAIL .{0,200}error=2 : out of memory",
        "device-full",
        "medium",
        "PyTorch before 0.4.1 gave no figures",
    ),
    _s(
        "CUDA call",
        r"CUDA (?:driver )?error: ?out of memory|HIP error: ?out of memory|hipErrorOutOfMemory"
        r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY(?! )|cuMemCreate.{0,80}out of memory"
        r"|code: 2, reason: out of memory|(?i:cuda failed with error) (?:\d+ )?out of memory"
        r"|Error out of memory at line \d+ in file",
        "outside-pytorch",
        "low",
        "",
        bare=True,
        loose=True,
    ),
    _s(
        "Intel driver",
        r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY|UR_RESULT_ERROR_OUT_OF_RESOURCES|PI_ERROR_OUT_OF_RESOURCES"
        r"|ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
        "device-full",
        "medium",
        "Intel's driver reports that the device's memory ran out",
    ),
    _s(
        "allocator without figures",
        r"\b(?:CUDA|HIP|XPU|NPU|MUSA) out of memory|(?:^|[\s\]])(?:torch\.(?:cuda\.)?)?OutOfMemoryError\b"
        r"|Allocation on device\s*\d*\s*$|ran out of memory with exception",
        "device-full",
        "low",
        "the message has no figures, so it is taken at its word",
        loose=True,
    ),
    _s(
        "SIGBUS",
        r"Signal 7 \(SIGBUS\)|exitcode {0,4}: ?-7\b|\(exitcode: -7\)|return code ?[=:] ?-7\b"
        r"|terminated with signal SIGBUS",
        "host",
        "low",
        f"the process was killed by SIGBUS, as it is when {_SHM}",
        weak=True,
    ),
    _s(
        "SIGKILL",
        r"[Ss]ignal 9 \(SIGKILL\)|was sent SIGKILL|exitcode {0,4}: ?-9\b|\(exitcode: -9\)|Signals\.SIGKILL: 9"
        r"|return code ?[=:] ?-9\b|: line \d{1,6}: {1,8}\d{1,9} Killed\b"
        r"|terminated with signal SIGKILL|exit code:? 137\b|exit status 137\b"
        r"|(?i:exit(?:ed)?(?: with)?[ _]?(?:code|status)|exitCode|return code|returned|status)\W{1,10}137\b"
        # what a shell prints: "Killed", "train.sh: line 3:  4211 Killed   python ...", "zsh: killed   python ..."
        r"|task \d{1,6}: Killed"
        r"|^(?:[\w./-]{1,200}: )?(?:line \d{1,6}: )?(?:\[\d{1,4}\])?[ \d+]{0,20}(?i:killed)"
        r"(?: {2,30}\S[^\n]*)?\s{0,30}$",
        "host",
        "medium",
        _KILLED,
        weak=True,
    ),
)
