"""Warm processes: torch and a script's libraries are imported once, and each run of the script is a fork of that.

``inject.warm_child`` is the other end. A warm process serves runs that agree in all that may be looked at during
imports: the command, the folder, the environment but for a few variables, and most settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from oomproof.gpus import GPUSpec
from oomproof.inject.warm_child import MOST_BYTES, REQUEST
from oomproof.phantom import launch

#: Variables that nothing reads before the script runs. Not PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF: torch 2.6,
#: 2.11 and 2.14 read them when their libraries are loaded.
LATE_VARIABLES = ("OOMPROOF_RUN", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

#: Settings that nothing reads before the script runs.
LATE_SETTINGS = (
    "unlimited",
    "steps",
    "until_stable",
    "snapshot",
    "profile",
    "list_modules",
    "changes",
    "survey",
    "survey_blocks",
    "meter",
)

#: Options of Python that a warm process is started with just like any other; -E and -I keep the phantom out.
_PLAIN_OPTIONS = frozenset(("-u", "-O", "-OO", "-B", "-q", "-b", "-bb", "-d", "-v"))
_OPTIONS_WITH_VALUE = frozenset(("-W", "-X"))

GRACE_SECONDS = 5.0
IMPORT_SECONDS = 300.0  # for all modules; a library that waits for something must not stop everything
ANSWER_SECONDS = 60.0
MOST_DROPPED = 4  # packages that no fork can go on from; each costs a start, and what imports it is another


class Modules(NamedTuple):
    """The modules that a former run imported: those of libraries, in order, and the names of its own."""

    libraries: tuple[str, ...]
    own: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCommand:
    """``python [options] script arguments`` or ``python [options] -m module arguments``."""

    python: str
    options: tuple[str, ...]
    program: tuple[str, ...]  # ("train.py",) or ("-m", "package")
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, command: Sequence[str]) -> PythonCommand | None:
        """Return the parts of a command, None when it is anything else than a plain Python program."""
        if not _is_python(command[0]):
            return None
        position = 1
        while position < len(command) and command[position] in _PLAIN_OPTIONS | _OPTIONS_WITH_VALUE:
            position += 1 + (command[position] in _OPTIONS_WITH_VALUE)
        words = command[position:]
        length = 2 if words[:1] == ["-m"] else 1
        program = tuple(words[:length])
        if len(program) < length or (length == 1 and program[0].startswith("-")):
            return None
        if length == 2 and program[1] in _LAUNCHERS:
            return None
        return cls(
            python=command[0],
            options=tuple(command[1:position]),
            program=program,
            arguments=tuple(words[length:]),
        )


#: Modules that start other processes for the script.
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed")


def _is_python(program: str) -> bool:
    name = Path(program).name
    return name.rstrip("0123456789.") == "python"


class Key(NamedTuple):
    """What runs must have in common to be forks of one process."""

    command: PythonCommand  # without its arguments
    cwd: str
    env: tuple[tuple[str, str], ...]
    config: str

    @classmethod
    def of(cls, command: PythonCommand, cwd: Path, env: Mapping[str, str], config: Mapping[str, Any]) -> Key:
        """Return the key of a run with this environment and configuration."""
        early = {name: value for name, value in config.items() if name not in LATE_SETTINGS}
        if early.get("world"):
            early["world"] = {**early["world"], "folder": None}
        early["gpus"] = len(early["gpus"])  # to see more of them CUDA has to be started, which forbids forks
        return cls(
            replace(command, arguments=()),
            str(cwd),
            tuple(sorted((name, value) for name, value in env.items() if name not in LATE_VARIABLES)),
            json.dumps(early, sort_keys=True),
        )


class CannotWarm(Exception):
    """No warm process can be had for this command; the message says why."""


class WarmProcessLost(Exception):
    """A warm process has ended although nobody asked it to, and its runs with it; the message has its last words."""


class Process:
    """One run: what ``subprocess.Popen`` is for a process of its own."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None
        self.lost: str | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs. Raises WarmProcessLost."""
        if self.returncode is None:
            self._server.listen(0)
        if self.lost is not None:
            raise WarmProcessLost(self.lost)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(["(warm process)"], timeout or 0)
            self._server.listen(0.5 if left is None else min(left, 0.5))
        return self.returncode


class Server:
    """One warm process."""

    def __init__(
        self,
        command: PythonCommand,
        settings: launch.Settings,
        modules: Modules,
        *,
        env: Mapping[str, str] | None,
        cwd: Path,
    ) -> None:
        self._command = command
        self._settings = settings
        self._modules = modules
        self._env = env
        self._cwd = cwd
        self._folder = Path(tempfile.mkdtemp(prefix="oomproof-warm-"))
        self._socket: socket.socket | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._processes: dict[int, Process] = {}
        self._started: dict[str, int] = {}
        self._last_words = ""
        self._looked_at_gpu = False
        self.promised = 0  # runs that are about to be asked for
        self.dropped: dict[str, str] = {}  # packages that are left to the runs to import, and why

    def start(self) -> None:
        """Start the process and wait until it has imported everything. Raises CannotWarm."""
        names = [*self._modules.libraries, *self._settings.preload]
        while True:
            names = [name for name in names if not name.startswith(tuple(f"{d}." for d in self.dropped))]
            names = [name for name in names if name not in self.dropped]
            answer = self._start_once(names)
            if "ready" in answer:
                self._looked_at_gpu = answer["looked_at_gpu"]
                return
            self._end_process()
            at = answer.get("drop")
            if at is None:
                raise CannotWarm(answer.get("why") or f"it ended or stopped while it imported modules: {self._log()}")
            self.dropped[_package(at)] = answer["why"]
            if len(self.dropped) > MOST_DROPPED:
                names = names[: names.index(at)]  # those could be shared

    def _start_once(self, modules: list[str]) -> dict[str, Any]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        warm = {
            "socket": theirs.fileno(),
            "modules": modules,
            "own": self._modules.own,
            "late": LATE_VARIABLES,
        }
        config = {**self._settings.to_config(), "warm": warm}
        (self._folder / launch.CONFIG).write_text(json.dumps(config))
        command = self._command
        with theirs, open(self._folder / "output.txt", "wb") as log:
            self._popen = subprocess.Popen(
                [command.python, *command.options, *command.program, *command.arguments],
                env=launch.variables(self._settings, self._folder, self._env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._cwd,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        ours.settimeout(IMPORT_SECONDS)
        answer = self._receive() or {}
        ours.settimeout(ANSWER_SECONDS)
        return answer

    def run(
        self,
        settings: launch.Settings,
        arguments: Sequence[str],
        run_folder: Path,
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        env: Mapping[str, str] | None,
    ) -> Process:
        """Start a run. Raises WarmProcessLost."""
        command = self._command
        (run_folder / launch.CONFIG).write_text(json.dumps(settings.to_config()))
        request = {
            "arguments": list(arguments),
            "command": [command.python, *command.options, *command.program, *arguments],
            "env": launch.variables(settings, run_folder, env),
        }
        (run_folder / REQUEST).write_text(json.dumps(request))
        name = str(run_folder)
        with self._lock:
            if self._socket is None:
                raise WarmProcessLost(self._last_words)
            with contextlib.suppress(OSError):  # it is gone; receiving tells so too
                socket.send_fds(self._socket, [name.encode()], [stdin, stdout, stderr])
            while name not in self._started:
                self._take(self._receive())
                if self._socket is None:
                    raise WarmProcessLost(self._last_words)
            return self._processes[self._started.pop(name)]

    def listen(self, timeout: float) -> None:
        """Take in what the process tells, for at most ``timeout`` seconds."""
        with self._lock:
            if self._socket is None:
                return
            while select.select([self._socket], [], [], timeout)[0]:
                self._take(self._receive())
                timeout = 0
                if self._socket is None:
                    return

    def _receive(self) -> dict[str, Any] | None:
        assert self._socket is not None
        try:
            message = self._socket.recv(MOST_BYTES)
        except OSError:
            return None
        found: dict[str, Any] | None = json.loads(message) if message else None
        return found

    def _take(self, message: dict[str, Any] | None) -> None:
        if message is None:
            self._lost()
        elif "started" in message:
            self._started[message["folder"]] = message["started"]
            self._processes[message["started"]] = Process(self, message["started"])
        else:
            self._processes.pop(message["ended"]).returncode = message["code"]

    def _lost(self) -> None:
        self._end_process()
        self._last_words = f"the process that runs are forked from has ended: {self._log()}"
        for process in self._processes.values():
            process.lost = self._last_words
        self._processes = {}

    def can_run(self, settings: launch.Settings) -> bool:
        """Return whether what was imported would be the same for a run's GPU."""
        return not self._looked_at_gpu or _kind(settings.gpu) == _kind(self._settings.gpu)

    @property
    def alive(self) -> bool:
        """Whether more runs can be asked for."""
        return self._socket is not None and self._popen is not None and self._popen.poll() is None

    @property
    def running(self) -> int:
        """How many runs have not ended, or are about to begin."""
        return len(self._processes) + self.promised

    def _end_process(self) -> None:
        if self._socket is not None:
            self._socket.close()  # by this it knows, and ends its runs
            self._socket = None
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.returncode = -signal.SIGKILL
        if self._popen is not None:
            try:
                self._popen.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()

    def _log(self) -> str:
        return (self._folder / "output.txt").read_text(errors="replace")[-2000:].strip() or "it said nothing"

    def close(self) -> None:
        """End the process and all runs."""
        with self._lock:
            self._end_process()
            self._last_words = "it was closed"
        shutil.rmtree(self._folder, ignore_errors=True)


class Servers:
    """Warm processes by what they can run; the one that was not used for longest makes room for a new one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._servers: dict[Key, Server | CannotWarm] = {}
        self._lock = threading.Lock()
        self._starting: dict[Key, threading.Lock] = {}
        self._modules: dict[tuple[str, ...], Modules] = {}
        self._dropped: dict[str, str] = {}

    def learn(self, command: Sequence[str], folder: Path, pid: int) -> None:
        """Take the list of modules that a run with ``list_modules`` left in its folder."""
        path = folder / f"modules-{pid}.json"
        parsed = PythonCommand.parse(command)
        if parsed is None or not path.exists():
            return
        found = json.loads(path.read_text())
        self._modules[_name(parsed)] = Modules(tuple(found["libraries"]), tuple(found["own"]))

    def knows(self, command: Sequence[str]) -> bool:
        """Return whether a former run of the command told of its modules, or none can."""
        parsed = PythonCommand.parse(command)
        return parsed is None or _name(parsed) in self._modules

    def start(
        self,
        command: Sequence[str],
        settings: launch.Settings,
        run_folder: Path,
        *,
        stdout: int | IO[Any] | None,
        stderr: int | IO[Any] | None,
        env: Mapping[str, str] | None,
        cwd: Path,
    ) -> subprocess.Popen[bytes] | Process:
        """Start a command as ``launch.start`` does, from a warm process where one can be had."""
        parsed = PythonCommand.parse(command)
        modules = self._modules.get(_name(parsed)) if parsed else None
        server = None
        if parsed is not None and modules is not None:
            server = self._server(parsed, settings, modules, env, cwd)
        if server is None or parsed is None:
            return launch.start(command, settings, run_folder, stdout=stdout, stderr=stderr, env=env, cwd=cwd)
        try:
            with open(os.devnull, "rb") as nothing:
                return server.run(
                    settings,
                    parsed.arguments,
                    run_folder,
                    stdin=nothing.fileno(),
                    stdout=_descriptor(stdout, 1),
                    stderr=_descriptor(stderr, 2),
                    env=env,
                )
        finally:
            with self._lock:
                server.promised -= 1

    def _server(
        self,
        command: PythonCommand,
        settings: launch.Settings,
        modules: Modules,
        env: Mapping[str, str] | None,
        cwd: Path,
    ) -> Server | None:
        key = Key.of(command, cwd, launch.variables(settings, Path("/"), env), settings.to_config())
        with self._lock:
            starting = self._starting.setdefault(key, threading.Lock())
        with starting:
            with self._lock:
                found = self._servers.pop(key, None)
                if isinstance(found, Server) and not found.alive:
                    found.close()
                    found = None
                if found is not None:
                    self._servers[key] = found  # used last
                    if isinstance(found, CannotWarm) or not found.can_run(settings):
                        return None
                    found.promised += 1
                    return found
                self._make_room()
            server = Server(command, settings, modules, env=env, cwd=cwd)
            server.dropped.update(self._dropped)
            try:
                server.start()
            except CannotWarm as reason:
                server.close()
                with self._lock:
                    self._servers[key] = reason
                return None
            with self._lock:
                self._dropped.update(server.dropped)
                server.promised += 1
                self._servers[key] = server
            return server

    def _make_room(self) -> None:
        idle = [(key, s) for key, s in self._servers.items() if isinstance(s, Server) and not s.running]
        there = sum(isinstance(s, Server) for s in self._servers.values())
        for key, server in idle[: max(0, there + 1 - self._most)]:
            server.close()
            del self._servers[key]

    def close(self) -> None:
        """End them all."""
        for server in self._servers.values():
            if isinstance(server, Server):
                server.close()
        self._servers = {}

    @property
    def faults(self) -> list[str]:
        """Why runs were not forked though they might have been."""
        return [str(s) for s in self._servers.values() if isinstance(s, CannotWarm)]


def _kind(gpu: GPUSpec) -> GPUSpec:
    return replace(gpu, memory_bytes=0)


def _name(command: PythonCommand) -> tuple[str, ...]:
    return (command.python, *command.program)


def _package(module: str) -> str:
    """Return the package that is left out for one of its modules: torch is too large to be left out as a whole."""
    return ".".join(module.split(".")[: 2 if module.startswith("torch.") else 1])


def _descriptor(file: int | IO[Any] | None, usual: int) -> int:
    if file is None:
        return usual
    return file if isinstance(file, int) else file.fileno()
