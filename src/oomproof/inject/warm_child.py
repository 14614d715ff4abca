"""A process that has imported torch and a script's libraries, and forks itself for each run of the script.

It is started with the script's own command line. Python imports ``sitecustomize`` before it looks at the script, and
that is where the process stays: it imports, then waits for requests. A fork takes on the folder, the environment and
the files of its request and returns, whereupon Python goes on to run the script as it would in a fresh process:
``__main__``, ``sys.path``, exit codes and the end of the interpreter are Python's own.

Runs inside the user's interpreter. Python 3.9, standard library and torch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oomproof.inject import bootstrap
from oomproof.measure.modules import is_library
from oomproof.phantom import world
from oomproof.phantom.device import Device

if TYPE_CHECKING:
    from oomproof.measure.observer import Observer

REQUEST = "request.json"
MOST_BYTES = 1 << 16  # of one message
POLL_SECONDS = 0.02
FILES = 3  # standard input, output, error
PR_SET_PDEATHSIG = 1  # sys/prctl.h

#: jemalloc (in pyarrow) starts its thread anew in a fork, when it needs one.
FORK_SAFE_THREADS = ("jemalloc_bg_thd",)


class Warm:
    """What a warm process holds: the imported modules, and what of the bootstrap belongs to a run."""

    def __init__(self, device: Device, config: dict[str, Any], cuda_version: int) -> None:
        self.observer: Observer | None = None
        self.layout: world.Layout | None = None
        self._device = device
        self._config = config
        self._environment = dict(os.environ)
        self._cuda_version = cuda_version
        self._wanted = config.pop("warm")
        self._socket = socket.socket(fileno=self._wanted["socket"])
        self._running: set[int] = set()  # processes

    def serve(self) -> None:
        """Import, then fork for each request; returns in the fork only."""
        before = self._environment
        looked = self._import(self._wanted["modules"])
        self._changed = {k: v for k, v in os.environ.items() if before.get(k) != v}
        self._gone = [k for k in before if k not in os.environ]
        self._tell({"ready": True, "looked_at_gpu": looked})
        while True:
            # not pidfds: a Python that was built on an old Linux, such as conda's, cannot open them
            ready, _, _ = select.select([self._socket], [], [], POLL_SECONDS if self._running else None)
            if ready:
                message, files, _, _ = socket.recv_fds(self._socket, MOST_BYTES, FILES)
                if not message:
                    self._leave()
                child = self._fork(Path(message.decode()), files)
                if child is None:
                    return
                self._running.add(child)
            self._report()

    # ---- importing -------------------------------------------------------------------------------------------------

    def _import(self, names: Iterable[str]) -> bool:
        """Import the modules and return whether they looked at the GPU.

        Ends the process at the first that a fork could not go on from; it's told which.
        """
        torch = importlib.import_module("torch")
        own = set(self._wanted["own"])
        asked = Asked()
        for name in names:
            if name in sys.modules:
                continue
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 # whatever a library's own code raises; it's told and left out
                self._drop(name, f"{type(error).__name__}: {error}")
            taken = [n for n in own.intersection(sys.modules) if is_library(_origin(sys.modules[n]))]
            if taken:
                self._drop(name, f"it imports {taken[0]}, which for the script is a module of its own")
            if _threads() and _threads_after_a_fork():
                self._drop(name, f"it starts a thread, {_threads()[0]}")
            if getattr(sys.modules.get("pynvml"), "nvmlLib", None) is not None:
                self._drop(name, "it asks NVML for GPUs, which differ between runs")
            if asked.cuda_started:
                self._drop(name, "it starts CUDA, after which torch refuses it in forked processes")
        asked.end()
        if _forks_badly(torch):
            self._drop(None, "torch refuses CUDA in processes forked from it")
        return asked.of_a_gpu

    def _drop(self, name: str | None, why: str) -> None:
        self._tell({"drop": name, "why": why})
        os._exit(1)

    # ---- requests --------------------------------------------------------------------------------------------------

    def _fork(self, folder: Path, files: list[int]) -> int | None:
        """Return the child's number; None in the child."""
        server = os.getpid()
        child = os.fork()
        if child:
            for file in files:
                os.close(file)
            self._tell({"started": child, "folder": str(folder)})
            return child
        self._become(folder, files, server)
        return None

    def _become(self, folder: Path, files: list[int], server: int) -> None:
        """Be the process of a run, as if it had been started for it."""
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        self._socket.close()
        for target, file in enumerate(files):
            os.dup2(file, target)
            os.close(file)
        request = json.loads((folder / REQUEST).read_text())
        os.environ.clear()
        os.environ.update(request["env"])
        os.environ.update({k: v for k, v in self._changed.items() if k not in self._wanted["late"]})
        for name in self._gone:
            os.environ.pop(name, None)
        sys.argv[1:] = request["arguments"]
        if hasattr(sys, "orig_argv"):
            sys.orig_argv[:] = request["command"]
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # from the system, as in a process of its own
        self._config.clear()
        self._config.update(json.loads((folder / bootstrap.CONFIG).read_text()))
        bootstrap.configure(self._device, self._config, folder, self._cuda_version)
        if self._config["world"] is None:
            self._device.share(str(folder / world.MESSAGES))
        elif self.layout is not None and self.layout.messages is not None:
            self.layout.messages.move(Path(self._config["world"]["folder"]), self._config["world"]["runner"])
        if self.observer is not None:
            self.observer.wake(folder)
        bootstrap.change(sys.modules["torch"], self._config, folder)

    def _report(self) -> None:
        """Tell of the runs that have ended."""
        for child in list(self._running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                self._running.remove(child)
                self._tell({"ended": child, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, what: dict[str, Any]) -> None:
        try:
            self._socket.send(json.dumps(what).encode()[:MOST_BYTES])
        except OSError:
            self._leave()

    def _leave(self) -> None:
        """End with all runs: whoever asked for them is gone."""
        for child in self._running:
            try:
                os.killpg(child, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has not made its group yet, and dies with this process
        os._exit(0)


def _origin(module: ModuleType) -> str:
    return (module.__spec__ and module.__spec__.origin) or "built-in"


#: What libraries ask during imports, and torch takes for a use of CUDA that forbids it in forks: of the machine,
_OF_THE_MACHINE = (("torch._C", "_cuda_getDeviceCount"), ("torch._C", "_cuda_getArchFlags"))
#: and of a GPU (torch 2.4 to 2.14).
_OF_A_GPU = (
    ("torch.cuda", "get_device_capability"),
    ("torch.cuda", "get_device_name"),
    ("torch.cuda", "is_bf16_supported"),
    ("torch.utils._triton", "has_triton"),
)


class Asked:
    """What is asked of CUDA during imports; a fork of its own answers where that is possible."""

    def __init__(self) -> None:
        self.cuda_started = False
        self.of_a_gpu = False  # what was imported may depend on the GPU
        self._importing = True
        self._undo: list[Callable[[], None]] = []
        for module, name in _OF_THE_MACHINE:
            self._replace(module, name, lambda original: self._elsewhere(original, of_a_gpu=False))
        for module, name in _OF_A_GPU:
            self._replace(module, name, lambda original: self._elsewhere(original, of_a_gpu=True))
        self._replace("torch._C", "_cuda_init", self._noting)

    def _replace(self, module: str, name: str, instead: Callable[[Any], Any]) -> None:
        place = importlib.import_module(module)
        original = getattr(place, name)
        setattr(place, name, instead(original))
        self._undo.append(lambda: setattr(place, name, original))

    def _noting(self, original: Any) -> Any:
        @functools.wraps(original)
        def call() -> Any:
            self.cuda_started = True
            return original()

        return call

    def _elsewhere(self, original: Any, *, of_a_gpu: bool) -> Any:
        answers: dict[str, Any] = {}

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._importing:  # a module has kept this function
                return original(*args, **kwargs)
            self.of_a_gpu |= of_a_gpu
            question = repr((args, kwargs))
            if question not in answers:
                answers[question] = _answer_of_fork(lambda: self._there(original, args, kwargs))
            return answers[question]

        return call

    def _there(self, original: Any, args: Any, kwargs: Any) -> Any:
        self._importing = False
        return original(*args, **kwargs)

    def end(self) -> None:
        """Have torch's own functions back."""
        self._importing = False
        for undo in self._undo:
            undo()


def _forks_badly(torch: Any) -> bool:
    """Return whether torch would refuse to use CUDA in a fork of this process."""
    return _code_of_fork(torch.cuda._is_in_bad_fork) != 0


def _threads() -> list[str]:
    """Return the names of the threads that a fork would miss."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    names.remove(Path("/proc/self/comm").read_text().strip())
    return [name for name in names if name not in FORK_SAFE_THREADS]


def _threads_after_a_fork() -> list[str]:
    """Return the threads that are left once this process has forked: OpenBLAS, for one, ends its own before."""
    _code_of_fork(lambda: 0)
    return _threads()


def _answer_of_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a fork of this process. Raises RuntimeError where it does not return."""
    read, write = os.pipe()

    def tell() -> int:
        os.write(write, pickle.dumps(function()))
        return 0

    try:
        code = _code_of_fork(tell)
    finally:
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read()
    if code:
        raise RuntimeError("CUDA could not be asked in a fork")
    return pickle.loads(answer)


def _code_of_fork(function: Callable[[], int]) -> int:
    child = os.fork()
    if not child:
        try:
            os._exit(int(function()))
        finally:
            os._exit(255)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
