"""What the ranks of a world that do not exist tell this one: objects, store keys and whole numbers.

Each rank that is run leaves what it sends in a folder that all share. A rank that waits for something that is not there
asks for its sender; ``oomproof.run`` then starts that rank beside it, until the message comes.

Standard library and torch only: this runs inside the user's interpreter. Torch 2.4 to 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WANTED = "wanted"
POLL_SECONDS = 0.02
#: Whole numbers up to this size are sent; the same limit as for values of the phantom's memory.
MOST_BYTES = 1 << 20


class Messages:
    """What ranks left for each other, a file each in a folder that they share."""

    def __init__(self, folder: Path, rank: int, runner: int) -> None:
        self._rank = rank
        self._numbers: dict[str, int] = {}
        self.move(folder, runner)

    def move(self, folder: Path, runner: int) -> None:
        """Use this folder; ``runner`` is the process that starts the senders."""
        self._folder = folder
        self._runner = runner
        (folder / WANTED).mkdir(exist_ok=True)

    def _path(self, what: str, source: int, to: object, ranks: tuple[int, ...]) -> Path:
        key = f"{what}-{source}-{to}-{len(ranks)}-{ranks[0]}-{ranks[-1]}"
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        return self._folder / f"{key}-{number}.pickle"

    def send(self, what: str, source: int, to: object, ranks: tuple[int, ...], value: Any) -> None:
        """Leave an object for another rank, or for all of a group (``to`` is "all")."""
        _write(self._path(what, source, to, ranks), pickle.dumps(value))

    def receive(self, what: str, source: int, to: object, ranks: tuple[int, ...]) -> Any:
        """Return what the source left; wait while it has left nothing."""
        return pickle.loads(self._wait_for(self._path(what, source, to, ranks), source))

    def set(self, key: str, value: bytes) -> None:
        """Leave what this rank set in the store."""
        _write(self._stored(key), value)

    def get(self, key: str) -> bytes:
        """Return what a rank set in the store; ask for rank 0, which is the one that sets what all read."""
        return self._wait_for(self._stored(key), 0)

    def _stored(self, key: str) -> Path:
        return self._folder / f"store-{hashlib.sha256(key.encode()).hexdigest()[:24]}"

    def _wait_for(self, path: Path, source: int) -> bytes:
        if not path.exists():
            asked = self._folder / WANTED / f"{self._rank}-{threading.get_ident()}"
            _write(asked, json.dumps({"rank": self._rank, "source": source, "message": path.name}).encode())
            while not path.exists():
                os.kill(self._runner, 0)  # raises where nobody is left to run the sender
                time.sleep(POLL_SECONDS)
            asked.unlink()
        return path.read_bytes()


def waiting(folder: Path) -> list[tuple[int, int, Path]]:
    """Return which ranks wait for which, and for the file of which message; not those whose message is there."""
    rows = []
    for path in sorted((folder / WANTED).glob("[0-9]*")):
        with contextlib.suppress(FileNotFoundError):  # it has just stopped waiting
            asked = json.loads(path.read_text())
            rows.append((asked["rank"], asked["source"], folder / asked["message"]))
    return [row for row in rows if not row[2].exists()]


def forget_waiting(folder: Path) -> None:
    """Forget ranks that have ended while they waited."""
    for path in (folder / WANTED).glob("*"):
        path.unlink()


def _write(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    scratch.write_bytes(data)
    scratch.replace(path)  # a reader sees all of it or nothing


class Values:
    """What is known of the values of tensors on the phantom; the observer puts its own in this place."""

    #: Collectives of whole numbers over ranks that do not exist.
    in_kind = 0

    def told(self, tensor: Any) -> Any:
        """Return what another rank has to be told of the tensor's values; None when nobody knows them."""

    def learn(self, tensor: Any, told: Any) -> None:
        """Give a tensor the values that another rank told."""


class Answers:
    """The functions of torch.distributed that bring what one certain rank has."""

    def __init__(self, torch: Any, distributed: Any, messages: Messages, values: Callable[[], Values]) -> None:
        self._torch = torch
        self._distributed = distributed
        self._messages = messages
        self._values = values
        self._in_batch = threading.local()

    def install(self) -> None:
        """Replace them in torch.distributed."""
        for name in (
            "gather_object", "send_object_list", "recv_object_list", "broadcast_object_list", "scatter_object_list",
            "broadcast", "scatter", "send", "isend", "recv", "irecv", "batch_isend_irecv",
            "all_reduce", "all_gather", "all_gather_into_tensor",
        ):  # fmt: skip
            original = getattr(self._distributed, name, None)
            if original is not None:
                replace(self._distributed, name, self._answered(original, getattr(self, name)))

    def _answered(self, original: Any, answer: Callable[[Any, dict[str, Any]], Any]) -> Any:
        signature = inspect.signature(original)
        outside = self._distributed.GroupMember.NON_GROUP_MEMBER

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(signature.bind(*args, **kwargs).arguments)
            return original(**given) if given.get("group") is outside else answer(original, given)

        return call

    def _place(self, given: dict[str, Any], name: str) -> tuple[int, tuple[int, ...]]:
        """Return the global rank that an argument such as src, or group_src, names; and the group's ranks."""
        ranks = ranks_of(self._distributed, given.get("group"))
        within = given.get(f"group_{name}")
        rank = given.get(name)
        return (ranks[within] if within is not None else rank if rank is not None else ranks[0]), ranks

    # ---- objects -------------------------------------------------------------------------------------------------

    def gather_object(self, original: Any, given: dict[str, Any]) -> None:
        """Gathered objects are this rank's own in every place."""
        target, ranks = self._place(given, "dst")
        own = [None] * len(ranks)
        self._distributed.all_gather_object(own, given["obj"], group=given.get("group"))
        if self._distributed.get_rank() == target and given.get("object_gather_list") is not None:
            given["object_gather_list"][:] = own

    def send_object_list(self, original: Any, given: dict[str, Any]) -> Any:
        """Leave the objects for the other rank."""
        target, ranks = self._place(given, "dst")
        self._messages.send("object", self._distributed.get_rank(), target, ranks, list(given["object_list"]))
        return original(**given)

    def recv_object_list(self, original: Any, given: dict[str, Any]) -> int:
        """Take what the other rank left."""
        source, ranks = self._place(given, "src")
        given["object_list"][:] = self._messages.receive("object", source, self._distributed.get_rank(), ranks)
        return source

    def broadcast_object_list(self, original: Any, given: dict[str, Any]) -> Any:
        """Leave the objects for all of the group, or take them."""
        source, ranks = self._place(given, "src")
        if len(ranks) == 1:
            return original(**given)
        if source == self._distributed.get_rank():
            self._messages.send("broadcast", source, "all", ranks, list(given["object_list"]))
            return original(**given)
        given["object_list"][:] = self._messages.receive("broadcast", source, "all", ranks)
        return None

    def scatter_object_list(self, original: Any, given: dict[str, Any]) -> None:
        """Leave all the objects, or take this rank's."""
        source, ranks = self._place(given, "src")
        if source == self._distributed.get_rank():
            self._messages.send("scatter", source, "all", ranks, list(given["scatter_object_input_list"]))
            values = given["scatter_object_input_list"]
        else:
            values = self._messages.receive("scatter", source, "all", ranks)
        given["scatter_object_output_list"][0] = values[ranks.index(self._distributed.get_rank())]

    # ---- tensors of whole numbers: lengths, shapes, token ids ------------------------------------------------------

    def _is_sent(self, tensor: Any) -> bool:
        """Return whether a tensor's values go from rank to rank: whole numbers and booleans of a plain tensor."""
        kinds = (self._torch.Tensor, self._torch.nn.Parameter)
        if type(tensor) not in kinds or tensor.is_floating_point() or tensor.is_complex():
            return False
        return bool(0 < tensor.numel() * tensor.element_size() <= MOST_BYTES)

    def _told(self, tensor: Any) -> Any:
        return (tensor.clone(), False) if tensor.device.type == "cpu" else self._values().told(tensor)

    def _learn(self, tensor: Any, told: Any) -> None:
        if tensor.device.type == "cpu":
            if told is not None:
                tensor.copy_(told[0].view(tensor.shape))
        else:
            self._values().learn(tensor, told)

    def broadcast(self, original: Any, given: dict[str, Any]) -> Any:
        """Leave the numbers for all of the group, or take them."""
        source, ranks = self._place(given, "src")
        own, tensor = self._distributed.get_rank(), given["tensor"]
        if len(ranks) == 1 or own not in ranks or not self._is_sent(tensor):
            return original(**given)
        if source == own:
            self._messages.send("numbers", source, "all", ranks, self._told(tensor))
            return original(**given)
        work = original(**given)
        self._learn(tensor, self._messages.receive("numbers", source, "all", ranks))
        return work

    def scatter(self, original: Any, given: dict[str, Any]) -> Any:
        """Leave the numbers for all of the group, or take this rank's."""
        source, ranks = self._place(given, "src")
        own, tensor = self._distributed.get_rank(), given["tensor"]
        if len(ranks) == 1 or own not in ranks or not self._is_sent(tensor):
            return original(**given)
        if source == own:
            self._messages.send("parts", source, "all", ranks, [self._told(part) for part in given["scatter_list"]])
            return original(**given)
        work = original(**given)
        self._learn(tensor, self._messages.receive("parts", source, "all", ranks)[ranks.index(own)])
        return work

    def send(self, original: Any, given: dict[str, Any]) -> Any:
        """Leave the numbers for the other rank."""
        self._send(given["tensor"], *self._place(given, "dst"))
        return original(**given)

    isend = send

    def _send(self, tensor: Any, target: int, ranks: tuple[int, ...]) -> None:
        if self._is_sent(tensor) and not self._batching():
            self._messages.send("numbers", self._distributed.get_rank(), target, ranks, self._told(tensor))

    def recv(self, original: Any, given: dict[str, Any]) -> Any:
        """Take the numbers that the other rank left."""
        result = original(**given)
        if self._from_one(given):
            self._receive(given["tensor"], *self._place(given, "src"))
        return result

    def _from_one(self, given: dict[str, Any]) -> bool:
        """Return whether a certain rank is named; from any rank, nobody knows which would be first."""
        return given.get("src") is not None or given.get("group_src") is not None

    def _receive(self, tensor: Any, source: int, ranks: tuple[int, ...]) -> None:
        if self._is_sent(tensor):
            self._learn(tensor, self._messages.receive("numbers", source, self._distributed.get_rank(), ranks))

    def irecv(self, original: Any, given: dict[str, Any]) -> Any:
        """Take them once they are waited for: this rank may have to send first."""
        work = original(**given)
        tensor = given["tensor"]
        if not self._is_sent(tensor) or self._batching() or not self._from_one(given):
            return work
        return _Awaited(work, functools.partial(self._receive, tensor, *self._place(given, "src")))

    def batch_isend_irecv(self, original: Any, given: dict[str, Any]) -> Any:
        """Leave all that is sent before waiting for what is received, whatever the order."""
        operations = given["p2p_op_list"]
        for operation in operations:
            if operation.op.__name__ == "isend":
                self._send(operation.tensor, operation.peer, ranks_of(self._distributed, operation.group))
        self._in_batch.now = True
        try:
            works = original(**given)
        finally:
            self._in_batch.now = False
        for operation in operations:
            if operation.op.__name__ == "irecv":
                self._receive(operation.tensor, operation.peer, ranks_of(self._distributed, operation.group))
        return works

    # ---- tensors of whole numbers over all ranks ---------------------------------------------------------------------

    def all_reduce(self, original: Any, given: dict[str, Any]) -> Any:
        """Note that what every rank has a part in is answered in kind: sizes may follow it."""
        return self._in_kind(original, given, given["tensor"])

    def all_gather(self, original: Any, given: dict[str, Any]) -> Any:
        """Note it likewise."""
        return self._in_kind(original, given, given["tensor"])

    def all_gather_into_tensor(self, original: Any, given: dict[str, Any]) -> Any:
        """Note it likewise."""
        return self._in_kind(original, given, given["input_tensor"])

    def _in_kind(self, original: Any, given: dict[str, Any], tensor: Any) -> Any:
        if self._is_sent(tensor) and len(ranks_of(self._distributed, given.get("group"))) > 1:
            self._values().in_kind += 1
        return original(**given)

    def _batching(self) -> bool:
        return bool(getattr(self._in_batch, "now", False))


class _Awaited:
    """An irecv's work, whose numbers arrive when it is waited for."""

    def __init__(self, work: Any, arrive: Callable[[], None]) -> None:
        self._work = work
        self._arrive: Callable[[], None] | None = arrive

    def wait(self, *args: Any) -> Any:
        """Wait, and take the numbers the first time."""
        result = self._work.wait(*args)
        if self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            arrive()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def ranks_of(distributed: Any, group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group, of the whole world for None."""
    return tuple(distributed.get_process_group_ranks(group if group is not None else distributed.group.WORLD))


def replace(distributed: Any, name: str, function: Any) -> None:
    """Put a function in the place of torch.distributed's of that name."""
    original = getattr(distributed, name)
    for module in (distributed, distributed.distributed_c10d):
        if getattr(module, name, None) is original:
            setattr(module, name, function)
