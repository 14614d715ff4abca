"""One rank of a world whose other ranks do not exist.

Everything of torch.distributed runs for real in this one process: process groups, device meshes, NCCL's streams and
buffers. Only what would come from another rank is answered here: the store, gloo's collectives, objects. The NCCL
stand-in answers small device buffers itself, as if every rank held what this one holds.

What only another rank can give (a pipeline stage's shapes, a broadcast setting) is what that rank gives when it is run
beside this one: see ``messages``.

Standard library and torch only: this runs inside the user's interpreter. Torch 2.4 to 2.14.
"""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from oomproof.phantom.messages import Answers, Messages, Values, ranks_of, replace

NCCL_ID_BYTES = 128  # ncclUniqueId, nccl.h
MESSAGES = "messages"


def environment(size: int, rank: int, local_size: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    nodes = -(-size // local_size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "ROLE_NAME": "default",
        "NODE_RANK": str(rank // local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "oomproof",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # symmetric memory's peers are this rank itself
        "TORCH_NCCL_ENABLE_MONITORING": "0",  # its thread would ask our store at exit
    }


class Layout:
    """The process groups that this rank is in: their ranks, and whether ranks in them send to single others."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], bool] = {}
        #: Who knows what tensors hold.
        self.values = Values()
        #: What ranks that do not exist leave each other.
        self.messages: Messages | None = None

    def add(self, ranks: tuple[int, ...]) -> None:
        """Note a group."""
        self._groups.setdefault(ranks, False)

    def sends(self, ranks: tuple[int, ...]) -> None:
        """Note that this rank sent to or received from one other rank of the group."""
        self._groups[ranks] = True

    def as_list(self) -> list[dict[str, Any]]:
        """Return the groups of more than one rank, for the findings."""
        return [{"ranks": list(ranks), "sends": sends} for ranks, sends in self._groups.items() if len(ranks) > 1]


def install(torch: ModuleType, config: dict[str, Any], next_split: Callable[[int], None]) -> Layout | None:
    """Have torch.distributed work with ranks that do not exist; return what is learned of the groups.

    ``config`` has ``size``, ``rank``, ``local_size``, ``folder``, where ranks leave their messages, and ``runner``, the
    process that starts them.
    ``next_split(ranks)`` tells the NCCL stand-in the size of communicators about to be split.
    """
    from torch import distributed

    if not distributed.is_available():
        return None
    layout = watch_groups(distributed, next_split)
    size, rank = config["size"], config["rank"]
    layout.messages = messages = Messages(Path(config["folder"]), rank, config["runner"])
    _answer_rendezvous(distributed, _store_class(distributed)(size, rank, messages), size, rank)
    _answer_gloo(distributed)
    _answer_cpu_collectives(torch, distributed)
    Answers(torch, distributed, messages, lambda: layout.values).install()
    _start_one_of_launched(config)
    return layout


def watch_groups(distributed: Any, next_split: Callable[[int], None]) -> Layout:
    """Note which groups are made, and tell the NCCL stand-in how many ranks they have; also in real worlds."""
    layout = Layout()
    c10d = distributed.distributed_c10d
    made = c10d._new_process_group_helper

    @functools.wraps(made)
    def new_process_group(group_size: int, group_rank: int, ranks: Any, *args: Any, **kwargs: Any) -> Any:
        next_split(group_size)
        try:
            result = made(group_size, group_rank, ranks, *args, **kwargs)
        finally:
            next_split(0)
        if group_rank is not None and group_rank >= 0:
            layout.add(tuple(ranks) or tuple(range(group_size)))
        return result

    c10d._new_process_group_helper = new_process_group
    split = getattr(distributed.ProcessGroup, "split_group", None)  # 2.9 and newer
    if split is not None:

        @functools.wraps(split)
        def split_group(self: Any, ranks: Any, *args: Any, **kwargs: Any) -> Any:
            next_split(len(ranks))
            try:
                result = split(self, ranks, *args, **kwargs)
            finally:
                next_split(0)
            if result is not None:
                members = distributed.get_process_group_ranks(self)
                layout.add(tuple(members[r] for r in ranks))
            return result

        distributed.ProcessGroup.split_group = split_group
    for name in ("send", "recv", "isend", "irecv"):
        replace(distributed, name, _noting_sends(distributed, getattr(distributed, name), layout))
    return layout


def _noting_sends(distributed: Any, original: Any, layout: Layout) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        layout.sends(ranks_of(distributed, signature.bind(*args, **kwargs).arguments.get("group")))
        return original(*args, **kwargs)

    return call


# ---- the store ---------------------------------------------------------------------------------------------------


def _store_class(distributed: Any) -> Any:
    """Return a store that answers at once, as if every other rank had done what this one did."""

    class Store(distributed.Store):  # type: ignore[misc] # torch has no types here
        def __init__(self, size: int, rank: int, messages: Messages) -> None:
            super().__init__()
            self._size = size
            self._rank = rank
            self._messages = messages
            self._values: dict[str, bytes] = {}
            self._counts: dict[str, int] = {}
            self._lock = threading.Lock()

        def set(self, key: str, value: Any) -> None:
            with self._lock:
                self._values[key] = _bytes(value)
            self._messages.set(key, _bytes(value))

        def get(self, key: str) -> bytes:
            with self._lock:
                if key in self._values:
                    return self._values[key]
                if key in self._counts:
                    return str(self._counts[key] * self._size).encode()
                if "cuda/" in key or "/cuda" in key:  # ProcessGroupNCCL asks its root for the communicator's id
                    return b"\0" * NCCL_ID_BYTES
                pattern = _DIGITS.sub("#", key)
                alike = [k for k in self._values if _DIGITS.sub("#", k) == pattern]
                if alike:  # what this rank set under its own number
                    return self._values[alike[-1]]
            if self._rank:
                return self._messages.get(key)
            raise RuntimeError(
                f"the store's {key!r} comes from another rank, which does not exist here; measure with real "
                "processes instead: oomproof run -- torchrun --nproc-per-node N"
            )

        def add(self, key: str, amount: int) -> int:
            with self._lock:
                self._counts[key] = self._counts.get(key, 0) + amount
                return self._counts[key] * self._size

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            with self._lock:
                expected, desired = _bytes(expected), _bytes(desired)
                if self._values.get(key, b"") in (expected, b""):
                    self._values[key] = desired
                return self._values[key]

        def check(self, keys: list[str]) -> bool:
            return all(key in self._values or key in self._counts for key in keys)

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            """Everybody has arrived."""

        def barrier(self, *args: Any, **kwargs: Any) -> None:
            """Everybody has arrived."""

        def append(self, key: str, value: Any) -> None:
            with self._lock:
                self._values[key] = self._values.get(key, b"") + _bytes(value)

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [self.get(key) for key in keys]

        def multi_set(self, keys: list[str], values: list[Any]) -> None:
            for key, value in zip(keys, values):  # noqa: B905 - Python 3.9
                self.set(key, value)

        def has_extended_api(self) -> bool:
            return True

        def delete_key(self, key: str) -> bool:
            with self._lock:
                return (self._values.pop(key, None) is not None) | (self._counts.pop(key, None) is not None)

        def num_keys(self) -> int:
            return len(self._values) + len(self._counts)

        def set_timeout(self, timeout: Any) -> None:
            """Nothing is ever waited for."""

        def clone(self) -> Any:
            return self

    return Store


_DIGITS = re.compile(r"\d+")


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _answer_rendezvous(distributed: Any, shared: Any, size: int, rank: int) -> None:
    """Give every way to initialise the answering store: env://, tcp://, file://, a store of the script's own."""
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # the name in the package is a function

    def handler(url: str, *args: Any, **kwargs: Any) -> Any:
        yield shared, _asked(url, "rank", rank), _asked(url, "world_size", size)
        raise RuntimeError("this rendezvous is made once")

    for scheme in ("env", "tcp", "file"):
        rendezvous._rendezvous_handlers[scheme] = handler
    for name in ("TCPStore", "FileStore"):
        original = getattr(distributed, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            return shared

        # symmetric memory of 2.6 takes the file store from the extension itself
        extension = sys.modules["torch._C._distributed_c10d"]
        for module in (distributed, distributed.distributed_c10d, rendezvous, extension):
            if getattr(module, name, None) is original:
                setattr(module, name, make)
    init = distributed.init_process_group
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("store") is not None:
            given["store"] = shared
        return init(**given)

    replace(distributed, "init_process_group", init_process_group)


def _asked(url: str, name: str, default: int) -> int:
    found = re.search(rf"[?&]{name}=(\d+)", url)
    return int(found.group(1)) if found else default


# ---- gloo --------------------------------------------------------------------------------------------------------


def _answer_gloo(distributed: Any) -> None:
    """Make CPU groups without connecting to anybody: torch's own FakeProcessGroup under gloo's name."""
    c10d = distributed.distributed_c10d
    fake = sys.modules["torch._C._distributed_c10d"].FakeProcessGroup

    def make(rank: int, size: int) -> Any:
        if hasattr(fake, "_create_internal"):  # 2.8 and newer
            options = getattr(fake, "Options", None)
            return fake._create_internal(rank, size, options() if options else None)
        return fake(rank, size)

    fake._set_sequence_number_for_group = lambda group: None  # up to 2.11 gloo is asked to, and fake cannot
    fake._get_sequence_number_for_group = lambda group: 0

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, fake)

    class ProcessGroupGloo(metaclass=Kind):
        def __new__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
            return make(rank, size)

    c10d.ProcessGroupGloo = ProcessGroupGloo
    _split_by_making(distributed)
    # 2.14 makes backends through a registry that it fills when they are first asked for; before it, by class name
    distributed.Backend._plugins["GLOO"] = distributed.Backend._BackendPlugin(
        lambda common, options: make(common.group_rank, common.group_size), True
    )

    def monitored_barrier(*args: Any, **kwargs: Any) -> None:
        """Everybody has arrived."""

    replace(distributed, "monitored_barrier", monitored_barrier)


def _split_by_making(distributed: Any) -> None:
    """Make a group anew where it cannot be split off another: up to 2.11 a fake CPU group beside NCCL's cannot."""
    split = getattr(distributed, "split_group", None)
    if split is None:  # before 2.5
        return
    signature = inspect.signature(split)

    @functools.wraps(split)
    def split_group(*args: Any, **kwargs: Any) -> Any:
        try:
            return split(*args, **kwargs)
        except RuntimeError as error:
            if "missing implementation of split" not in str(error):
                raise
        given = signature.bind(*args, **kwargs).arguments
        members = ranks_of(distributed, given.get("parent_pg"))
        for ranks in given["split_ranks"]:
            mine = [members[rank] for rank in ranks]
            if distributed.get_rank() in mine:
                options = {k: given[k] for k in ("timeout", "group_desc") if given.get(k) is not None}
                return distributed.new_group(mine, use_local_synchronization=True, **options)
        return distributed.GroupMember.NON_GROUP_MEMBER

    replace(distributed, "split_group", split_group)
    mesh = sys.modules.get("torch.distributed.device_mesh")
    if getattr(mesh, "split_group", None) is split:
        mesh.split_group = split_group  # type: ignore[union-attr]


def _answer_cpu_collectives(torch: Any, distributed: Any) -> None:
    """Fill the results of collectives on CPU tensors in kind, where FakeProcessGroup leaves them as they are."""

    def size_of(given: dict[str, Any]) -> int:
        return int(distributed.get_world_size(given.get("group")))

    def rank_of(given: dict[str, Any]) -> int:
        return int(distributed.get_rank(given.get("group")))

    def reduced(tensor: Any, given: dict[str, Any]) -> Any:
        operation = given.get("op", distributed.ReduceOp.SUM)
        if operation == distributed.ReduceOp.SUM:
            return tensor * size_of(given)
        if operation == distributed.ReduceOp.PRODUCT:
            return tensor ** size_of(given)
        return tensor

    def all_reduce(given: dict[str, Any]) -> None:
        given["tensor"].copy_(reduced(given["before"], given))

    def all_gather(given: dict[str, Any]) -> None:
        for into in given["tensor_list"]:
            into.copy_(given["tensor"])

    def all_gather_into_tensor(given: dict[str, Any]) -> None:
        part = given["input_tensor"].reshape(-1)
        given["output_tensor"].view(-1).copy_(part.repeat(size_of(given)))

    def gather(given: dict[str, Any]) -> None:
        for into in given.get("gather_list") or ():
            into.copy_(given["tensor"])

    def scatter(given: dict[str, Any]) -> None:
        if given.get("scatter_list"):
            given["tensor"].copy_(given["scatter_list"][rank_of(given)])

    def reduce_scatter(given: dict[str, Any]) -> None:
        given["output"].copy_(reduced(given["input_list"][rank_of(given)], given))

    def reduce_scatter_tensor(given: dict[str, Any]) -> None:
        part = given["input"].reshape(-1).chunk(size_of(given))[rank_of(given)]
        given["output"].view(-1).copy_(reduced(part, given))

    def all_to_all(given: dict[str, Any]) -> None:
        own = given["input_tensor_list"][rank_of(given)]
        for into in given["output_tensor_list"]:
            if into.shape == own.shape:
                into.copy_(own)

    def all_to_all_single(given: dict[str, Any]) -> None:
        if given.get("output_split_sizes") or given.get("input_split_sizes"):
            return
        own = given["input"].reshape(-1).chunk(size_of(given))[rank_of(given)]
        given["output"].view(-1).copy_(own.repeat(size_of(given)))

    for fill in (
        all_reduce, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter, reduce_scatter_tensor,
        all_to_all, all_to_all_single,
    ):  # fmt: skip
        replace(distributed, fill.__name__, _filled(torch, getattr(distributed, fill.__name__), fill))


def _filled(torch: Any, original: Any, fill: Callable[[dict[str, Any]], None]) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        first = next(iter(given.values()), None)
        first = first[0] if isinstance(first, (list, tuple)) and first else first
        if not isinstance(first, torch.Tensor) or first.device.type != "cpu":
            return original(*args, **kwargs)
        given["before"] = first.detach().clone()  # newer FakeProcessGroups change it, each in its way
        work = original(*args, **kwargs)
        with torch.no_grad():
            fill(given)
        return work

    return call


# ---- launchers ---------------------------------------------------------------------------------------------------


def _start_one_of_launched(config: dict[str, Any]) -> None:
    """Have torchrun, accelerate launch and multiprocessing.spawn start this rank alone, in their own process."""
    from torch import multiprocessing
    from torch.distributed.launcher import api

    def launch_agent(launch: Any, entrypoint: Any, args: Any, *rest: Any, **more: Any) -> dict[int, Any]:
        if not isinstance(entrypoint, str):
            return {config["rank"]: entrypoint(*args)}
        done = subprocess.run([entrypoint, *args])
        if done.returncode:
            sys.exit(done.returncode)
        return {config["rank"]: None}

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **more: Any) -> None:
        fn(config["rank"] % nprocs, *args)

    api.launch_agent = launch_agent
    modules: tuple[Any, ...] = (multiprocessing, sys.modules["torch.multiprocessing.spawn"])
    for module in modules:
        module.start_processes = module.spawn = spawn
