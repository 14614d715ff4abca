"""What to do about each kind: never what the log shows to be on already, and with a figure where there is one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from oomproof.triage.figures import Figures
from oomproof.triage.kinds import NOTABLE_OUTSIDE_BYTES
from oomproof.triage.result import NO_TEXT, Triage
from oomproof.triage.signatures import Kind
from oomproof.units import MIB, format_bytes

_MEASURE = "see where the peak is, and what would fit, without the GPU: oomproof run --gpu NAME -- your command"
_CONF = "PYTORCH_ALLOC_CONF"  # PyTorch before 2.9 knows only PYTORCH_CUDA_ALLOC_CONF
_CONF_NOTE = "PYTORCH_CUDA_ALLOC_CONF before PyTorch 2.9"
_OPTIMIZER = re.compile(r"torch/optim/|optimizer\.step|_init_group|_multi_tensor|transformers/optimization")
_EVALUATION = re.compile(r"\b(?:evaluat\w*|validat\w*|prediction_step|test_step|inference)\b")
_ATTENTION = re.compile(r"\bsoftmax\(|attn_weights|attention_scores|torch\.(?:matmul|baddbmm)\(.*key|scores = ")
_LOADING = re.compile(r"load_state_dict|from_pretrained|torch/serialization|_load_from|\.to\(.*device|\.cuda\(")


def advise(result: Triage, signature: str, context: Sequence[str]) -> tuple[str, ...]:
    """Return the advice for ``result``, the most useful first; ``context`` are its traceback's lines."""
    return tuple(_FOR[result.kind](result, signature, "\n".join(context)))


def _device_full(result: Triage, signature: str, context: str) -> Iterator[str]:
    f = result.figures
    if signature == "MPS":
        yield from _mps(result)
    if f.requested_bytes and f.total_bytes and f.requested_bytes > f.total_bytes:
        yield (
            f"the one tensor of {format_bytes(f.requested_bytes)} is larger than the GPU: look at its shape in the "
            "last frame of the traceback, and split that operation"
        )
    elif f.missing_bytes:
        yield f"{format_bytes(f.missing_bytes)} more was needed at that moment, and later peaks may need more"
    if _EVALUATION.search(context):
        yield "it happened in evaluation: run it under torch.no_grad(), in smaller batches, and move outputs to the CPU"
    if _LOADING.search(context) and not _OPTIMIZER.search(context):
        yield "it happened while loading: load with map_location='cpu' and in the dtype that is trained"
    if _OPTIMIZER.search(context):
        yield (
            "it happened in the optimizer: its states come with the first step; an 8-bit or sharded optimizer (ZeRO-1, "
            "FSDP) cuts them, a smaller batch does not"
        )
    if _ATTENTION.search(context):
        yield "attention's scores grow with the square of the length: use scaled_dot_product_attention"
    yield from _less_work(result)
    yield from _shares(f)
    yield _MEASURE


def _less_work(result: Triage) -> Iterator[str]:
    seen = result.settings
    if seen.batch_size is not None:
        name, value = seen.batch_size
        if value > 1:
            yield (
                f"lower {name} from {value} and accumulate gradients over as many more steps, which keeps the "
                "effective batch (not BatchNorm's)"
            )
        else:
            yield f"{name} is 1 already: shorten the sequences or shrink the images instead"
    else:
        yield "lower the batch, and accumulate gradients to keep the effective one"
    if not seen.checkpointing:
        yield "turn on gradient (activation) checkpointing: activations shrink for about a third more compute"
    if not seen.low_precision:
        yield "train under bfloat16 or float16 autocast: activations halve, weights and optimizer states do not"


def _shares(f: Figures) -> Iterator[str]:
    if f.others_bytes and f.total_bytes and f.others_bytes >= (f.missing_bytes or 0) > 0:
        yield f"other processes hold {format_bytes(f.others_bytes)} of this GPU, which would have sufficed: {_pids(f)}"
    reserved = f.reserved_bytes
    if f.unallocated_bytes and reserved and f.unallocated_bytes >= max(64 * MIB, reserved // 20):
        yield (
            f"{format_bytes(f.unallocated_bytes)} ({_percent(f.unallocated_bytes, reserved)} of what PyTorch reserved) "
            "was cached and unused: less fragmentation gains at most that"
        )
    if f.own_bytes and reserved is not None and f.own_bytes - reserved >= NOTABLE_OUTSIDE_BYTES:
        yield f"{format_bytes(f.own_bytes - reserved)} of this process is outside PyTorch (context, NCCL, CUDA graphs)"


def _fragmentation(result: Triage, signature: str, context: str) -> Iterator[str]:
    f, seen = result.figures, result.settings
    if f.unallocated_bytes and f.reserved_bytes:
        yield (
            f"{format_bytes(f.unallocated_bytes)} was cached and unused, "
            f"{_percent(f.unallocated_bytes, f.reserved_bytes)} of what PyTorch reserved"
        )
    if signature == "caching allocator" and f.free_bytes is None:
        yield "give cached memory back before that point: torch.xpu.empty_cache()"
    elif seen.expandable:
        yield (
            "expandable segments are on already; they do not join memory across streams or private pools, nor what was "
            "allocated before they were on"
        )
    elif seen.no_expandable or seen.windows:
        if "max_split_size_mb" not in seen.allocator:
            yield (
                "expandable segments do not exist on this platform: set "
                f"{_CONF}=max_split_size_mb:512 ({_CONF_NOTE}), and try other sizes"
            )
        if "garbage_collection_threshold" not in seen.allocator:
            yield f"let unused segments go earlier: {_CONF}=garbage_collection_threshold:0.8"
    else:
        yield f"set {_CONF}=expandable_segments:True ({_CONF_NOTE}; from 2.1 on): segments then grow"
    if f.private_pools_bytes and f.private_pools_bytes >= 64 * MIB:
        yield (
            f"{format_bytes(f.private_pools_bytes)} is in private pools (CUDA graphs), which nothing else may use: "
            "capture fewer shapes, or share one pool"
        )
    yield "keep shapes from changing: pad or bucket the lengths, and run the longest batch first"


def _process_cap(result: Triage, signature: str, context: str) -> Iterator[str]:
    f = result.figures
    held = f.reserved_bytes if f.reserved_bytes is not None else f.allocated_bytes
    if f.allowed_bytes and f.requested_bytes and held is not None:
        over = held + f.requested_bytes - f.allowed_bytes
        if over > 0:
            yield f"the limit of {format_bytes(f.allowed_bytes)} is {format_bytes(over)} too low for this request"
        if f.total_bytes:
            # two digits, rounded up: the fraction must not fall short
            least = min(1.0, -(-100 * (held + f.requested_bytes) // f.total_bytes) / 100)
            yield (
                f"raise it: torch.cuda.set_per_process_memory_fraction({least:.2f}) at least, or do not set it (the "
                "setting per_process_memory_fraction and libraries' gpu_memory_utilization do the same)"
            )
    elif result.figures.total_bytes is None or "larger" in result.why or "4 GiB" in result.why:
        yield "split the tensor: this platform refuses single blocks above 4 GiB, whatever is free"
    if f.unallocated_bytes and f.requested_bytes and f.unallocated_bytes >= f.requested_bytes:
        yield (
            f"{format_bytes(f.unallocated_bytes)} of it is cached and unused, more than was asked for: "
            "less fragmentation would do as well"
        )
        if not result.settings.expandable and not result.settings.no_expandable and not result.settings.windows:
            yield f"set {_CONF}=expandable_segments:True ({_CONF_NOTE})"


def _other_process(result: Triage, signature: str, context: str) -> Iterator[str]:
    f = result.figures
    reserved = f.reserved_bytes if f.reserved_bytes is not None else f.allocated_bytes
    if f.others:
        yield f"free the GPU or choose another (CUDA_VISIBLE_DEVICES): {_pids(f)}"
    if f.total_bytes and f.free_bytes is not None and f.own_bytes is not None:
        held = f.total_bytes - f.free_bytes - f.own_bytes
        if held > (f.others_bytes or 0) + 256 * MIB:
            yield (
                f"{format_bytes(held - (f.others_bytes or 0))} is held by processes that NVML did not name, such as "
                "those of another container or user"
            )
    elif f.total_bytes and f.free_bytes is not None and reserved is not None:
        yield (
            f"find who holds the {format_bytes(f.total_bytes - f.free_bytes - reserved)}: nvidia-smi (rocm-smi), and "
            "fuser -v /dev/nvidia* for processes that have lost their parent"
        )
    else:
        yield "see who holds the GPU: nvidia-smi, and fuser -v /dev/nvidia* for processes that have lost their parent"
    yield "where several ranks or workers share the node, check that each set its own device before its first tensor"


def _outside(result: Triage, signature: str, context: str) -> Iterator[str]:
    f = result.figures
    if signature == "MPS":
        yield from _mps(result)
        return
    reserved = f.reserved_bytes
    if f.own_bytes is not None and reserved is not None and f.own_bytes > reserved:
        yield (
            f"{format_bytes(f.own_bytes - reserved)} of this process is not PyTorch's: NCCL communicators, CUDA "
            "graphs, other libraries in the process (TensorFlow, JAX, cuDF, DALI, vLLM reserve ahead)"
        )
    if f.requested_bytes and f.free_bytes is not None and f.free_bytes >= f.requested_bytes:
        if result.settings.windows:
            yield "on Windows each GPU allocation is also counted against RAM and page file: enlarge the page file"
        else:
            yield (
                "see what else limits it: a vGPU or MIG share, a container's limit, a process that started and ended, "
                "on Windows and WSL the page file and the memory given to WSL"
            )
    elif f.requested_bytes is None:
        yield "leave memory for it: what PyTorch has cached is not free for others; torch.cuda.empty_cache() before it"
        yield "the line may be late: run once with CUDA_LAUNCH_BLOCKING=1, and look at nvidia-smi at that moment"
    elif f.free_bytes is None:
        yield "see how large one block may be on this device; some Intel GPUs grant none above 4 GiB"
    yield _MEASURE


def _mps(result: Triage) -> Iterator[str]:
    f = result.figures
    if f.allowed_bytes and f.requested_bytes:
        over = (f.allocated_bytes or 0) + (f.outside_bytes or 0) + f.requested_bytes - f.allowed_bytes
        if over > 0:
            yield f"{format_bytes(over)} too much for the limit of {format_bytes(f.allowed_bytes)}"
    if result.settings.mps_watermark not in ("0", "0.0"):
        yield (
            "the limit can be lifted with PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0, which may freeze the machine; "
            "torch.mps.empty_cache() first"
        )


def _library(result: Triage, signature: str, context: str) -> Iterator[str]:
    yield (
        "the library allocates past PyTorch: leave it room, by a smaller batch or by "
        "torch.cuda.set_per_process_memory_fraction(0.95)"
    )
    yield "make its handle before the memory is full: one small matrix product, convolution or FFT at the start"
    if signature in ("cuDNN", "cuDNN handle", "cuDNN algorithm"):
        yield "torch.backends.cudnn.benchmark = False avoids the largest workspaces"
    if signature in ("cuBLAS", "cuBLAS handle"):
        yield "see whether another process holds the GPU: nvidia-smi"
    if result.confidence != "high":
        yield (
            "rule out an earlier error, such as an index out of range: run once with CUDA_LAUNCH_BLOCKING=1, and the "
            "same step on the CPU"
        )


def _collective(result: Triage, signature: str, context: str) -> Iterator[str]:
    if "shared memory" in signature:
        yield "enlarge /dev/shm: docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory"
        return
    yield "NCCL's buffers lie outside PyTorch: leave them room, some hundred MiB for each communicator"
    yield (
        "make them first: init_process_group(device_id=...) connects at once, while the GPU is still empty; "
        "set the device before it, or all ranks put a context on GPU 0"
    )
    yield "fewer or smaller ones: fewer process groups, NCCL_BUFFSIZE=1048576, NCCL_MAX_NCHANNELS=4 (slower)"
    yield "see what they take: NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ALLOC"


def _pinned(result: Triage, signature: str, context: str) -> Iterator[str]:
    yield "set pin_memory=False in the DataLoader, or pin less: fewer workers, a smaller prefetch_factor and batch"
    yield "offloading optimizers pin as much RAM as their states take: turn pinning off there, or give the job more RAM"
    yield "see the limits: ulimit -l, the job's memory, and on Windows and WSL half of the RAM"


def _host(result: Triage, signature: str, context: str) -> Iterator[str]:
    f, seen = result.figures, result.settings
    if signature in ("shared memory", "SIGBUS"):
        yield "enlarge /dev/shm: docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory"
        yield "or torch.multiprocessing.set_sharing_strategy('file_system'), or fewer DataLoader workers"
        return
    if f.requested_bytes:
        yield f"one allocation of {format_bytes(f.requested_bytes)} of RAM failed: look at its shape in the last frame"
    if seen.workers is not None and seen.workers[1] > 0:
        yield (
            f"{seen.workers[0]} is {seen.workers[1]}: each worker holds its own copy of what the dataset keeps in "
            "Python objects; use fewer, or keep it in arrays or memory-mapped files"
        )
    elif seen.workers is None:
        yield "use fewer DataLoader workers: each holds its own copy of what the dataset keeps in Python objects"
    if signature == "page file":
        yield "enlarge the page file"
    elif signature == "SIGKILL":
        yield (
            "make sure: dmesg -T | grep -iE 'oom|killed', sacct -j JOB -o MaxRSS,State, kubectl describe pod; "
            "without such a line something else sent the signal"
        )
    yield "ask for more RAM: sbatch --mem, docker run --memory, the pod's limit; the GPU's memory is not the matter"
    yield (
        "when it dies while loading weights, load one rank at a time or with mmap=True, low_cpu_mem_usage=True, or on "
        "the meta device; when it grows by the step, look for lists that keep tensors"
    )


def _nvml(result: Triage, signature: str, context: str) -> Iterator[str]:
    yield "it is an out-of-memory of the GPU: what helps against one helps here"
    yield from _less_work(result)
    yield (
        "on a MIG slice check that it is the one meant (nvidia-smi -L, CUDA_VISIBLE_DEVICES=MIG-...), on a Jetson that "
        "RAM is free, which it shares; a newer PyTorch writes the message all the same"
    )
    yield "measure against the slice, without it: oomproof run --gpu NAME or --memory SIZE -- your command"


def _corrupt(result: Triage, signature: str, context: str) -> Iterator[str]:
    yield "look at the sizes in the last frame of the traceback: a negative or uninitialised one, or two swapped"
    yield (
        "sizes that other ranks send (object collectives, pickled state) are wrong when ranks call collectives in a "
        "different order or on a device that was not set"
    )
    yield "an extension that was compiled for another GPU returns garbage counts: rebuild it for this one"
    yield "an earlier CUDA error may have left it: run once with CUDA_LAUNCH_BLOCKING=1"


def _other_rank(result: Triage, signature: str, context: str) -> Iterator[str]:
    yield f"look at rank {result.rank}: its own log has the figures; this rank only lost its peer"
    if result.cause is not None and result.cause in _FOR and result.cause != "other-rank":
        yield from _FOR[result.cause](result, signature, context)


def _not_oom(result: Triage, signature: str, context: str) -> Iterator[str]:
    if result.survived:
        many = f"{result.survived} out-of-memory messages" if result.survived > 1 else "one out-of-memory message"
        yield f"the script went on from {many}: batch-size finders and retries do"
    if result.why == NO_TEXT:
        yield "give what the run printed to standard output and standard error"
    if "lost its peer" in result.why:
        yield "give the log of the rank that ended first"


def _pids(f: Figures) -> str:
    largest = sorted(f.others, key=lambda item: -item[1])
    shown = ", ".join(f"process {pid} with {format_bytes(size)}" for pid, size in largest[:5])
    return shown + (f" and {len(largest) - 5} more" if len(largest) > 5 else "")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"


_FOR: dict[Kind, Callable[[Triage, str, str], Iterator[str]]] = {
    "device-full": _device_full,
    "fragmentation": _fragmentation,
    "process-cap": _process_cap,
    "other-process": _other_process,
    "outside-pytorch": _outside,
    "library-workspace": _library,
    "collective-library": _collective,
    "pinned-host": _pinned,
    "host": _host,
    "nvml-assert": _nvml,
    "corrupt-size": _corrupt,
    "other-rank": _other_rank,
    "not-oom": _not_oom,
}
