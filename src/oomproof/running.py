"""Running a command under the phantom to its end, with what has to run beside it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol

from oomproof.errors import ScriptError
from oomproof.measure.assemble import Outcome, read_outcome
from oomproof.phantom import launch, messages

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # between asking a command's processes to end and ending them
STUCK_SECONDS = 60.0  # all ranks of a world wait for one another; a thread of one of them may still send


class Process(Protocol):
    """What is needed of a started command: ``subprocess.Popen``, or a fork of a warm process."""

    @property
    def pid(self) -> int:
        """The leader of its process group."""

    @property
    def returncode(self) -> int | None:
        """Its exit code once it was found to have ended."""

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""


class Start(Protocol):
    """How a command gets its process: ``launch.start``, or ``warm.Servers.start``."""

    def __call__(
        self,
        command: Sequence[str],
        settings: launch.Settings,
        run_folder: Path,
        *,
        stdout: int | IO[Any] | None,
        stderr: int | IO[Any] | None,
        env: Mapping[str, str] | None,
        cwd: Path,
    ) -> Process:
        """Start a command under the phantom, in a process group of its own."""


class Runner:
    """Runs a command, once or several times, each time in a folder of its own."""

    def __init__(
        self,
        program: Sequence[str],
        cwd: Path,
        env: Mapping[str, str] | None,
        quiet: bool,
        on_step: Callable[[dict[str, Any]], None] | None,
        stdout: int | IO[Any] | None,
        *,
        start: Start = launch.start,
        should_stop: Callable[[], bool] = lambda: False,
        on_failure: Callable[[str], object] = lambda text: sys.stderr.write(text),  # the one of that moment
    ) -> None:
        self.program = program
        self.cwd = cwd
        self.env = env
        self.quiet = quiet
        self.on_step = on_step
        self.stdout = stdout
        self.start_process = start
        self.should_stop = should_stop
        self.on_failure = on_failure  # gets the end of what a hidden command printed
        self.folders: list[Path] = []
        self.runs = 0
        self.senders: set[int] = set()  # ranks that were run for what they send to those that are measured

    def new_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="oomproof-"))
        self.folders.append(folder)
        return folder

    def start(self, settings: launch.Settings, *, hidden: bool) -> Started:
        folder = self.new_folder()
        log = open(folder / "output.txt", "wb") if hidden else None  # noqa: SIM115
        try:
            process = self.start_process(
                self.program,
                settings,
                folder,
                stdout=log or self.stdout,
                stderr=log,
                env=self.env,
                cwd=self.cwd,
            )
        finally:
            if log is not None:
                log.close()
        return Started(process, folder)

    def go(self, settings: launch.Settings, purpose: str = "gpu") -> Outcome:
        self.runs += 1
        hidden = self.quiet or self.runs > 1  # what the script prints was shown the first time
        started = self.start(settings, hidden=hidden)
        about = {
            "rank": settings.world.rank if settings.world else 0,
            "unlimited": settings.unlimited,
            "purpose": purpose,
        }
        interrupted = self._wait(started, settings, about)
        outcome = read_outcome(started.folder, started.process.wait(), interrupted=interrupted)
        failed = outcome.exit_code and not any(f["ended"] == "oom" for f in outcome.findings)
        if hidden and failed and not interrupted and purpose == "gpu":  # once is enough
            self.on_failure(started.output())
        return outcome

    def _wait(self, started: Started, settings: launch.Settings, about: dict[str, Any]) -> bool:
        seen = 0
        interrupted = False
        beside = Beside(self, settings, started)
        progress = started.folder / "progress.json"
        try:
            while started.process.poll() is None:
                if self.should_stop():
                    raise Stopped
                time.sleep(POLL_SECONDS)
                beside.look()
                if self.on_step is not None and progress.exists():
                    step = json.loads(progress.read_text())
                    if step["step"] != seen:
                        seen = step["step"]
                        self.on_step({**step, "run": self.runs, **about})
        except KeyboardInterrupt:
            interrupted = True
            started.signal(signal.SIGINT)
            started.wait()
        finally:
            beside.end()
        return interrupted

    def close(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


class Stopped(Exception):
    """A run was given up before its end; its processes have ended."""


class Started:
    """A command's processes, which are a group of their own, and the folder that they write to."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.process = process
        self.folder = folder

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)

    def end(self) -> None:
        self.signal(signal.SIGTERM)  # whatever the command left running
        self.wait()
        self.signal(signal.SIGKILL)
        self.process.wait()

    def output(self) -> str:
        """Return the end of what a hidden command printed."""
        return (self.folder / "output.txt").read_text(errors="replace")[-4000:]


class Beside:
    """The command that is measured, and the ranks of its world that are run beside it for what they send."""

    def __init__(self, runner: Runner, settings: launch.Settings, measured: Started) -> None:
        self._runner = runner
        self._settings = settings
        self._world = settings.world
        self._running = {self._world.rank if self._world else 0: measured}
        self._stuck_since: float | None = None

    def look(self) -> None:
        """Start the ranks that are waited for. Raises ScriptError when what they should send never comes."""
        if self._world is None:
            return
        waiting = messages.waiting(self._world.folder)
        for rank, source, message in waiting:
            sender = self._running.get(source)
            if sender is None:
                self._start(source, self._world)
            elif sender.process.poll() is not None and not message.exists():  # asked last: it may just have come
                if source == self._world.rank:
                    return  # it was measured to its end; a sender that goes on without it doesn't matter
                self._runner.on_failure(sender.output())
                raise ScriptError(_never_comes(rank, source, f"it ended with exit code {sender.process.returncode}"))
        alive = {rank for rank, started in self._running.items() if started.process.poll() is None}
        if alive and alive <= {rank for rank, *_ in waiting}:
            self._stuck_since = self._stuck_since or time.monotonic()
            if time.monotonic() - self._stuck_since > STUCK_SECONDS:
                rank, source, _ = waiting[0]
                raise ScriptError(_never_comes(rank, source, "all ranks wait for one another"))
        else:
            self._stuck_since = None

    def _start(self, rank: int, world: launch.World) -> None:
        steps = self._settings.steps
        settings = replace(
            self._settings,
            unlimited=True,
            steps=None if steps is None else steps + 1,  # one rank may be ahead by what it does after its last step
            until_stable=False,
            snapshot=False,
            profile=False,
            world=replace(world, rank=rank),
        )
        self._runner.senders.add(rank)
        self._running[rank] = self._runner.start(settings, hidden=True)

    def end(self) -> None:
        """End them all."""
        for started in self._running.values():
            started.end()
        if self._world is not None:
            messages.forget_waiting(self._world.folder)


def _never_comes(rank: int, source: int, why: str) -> str:
    return (
        f"rank {rank} waits for something that rank {source} does not send: {why}. If real ranks do not hang there, "
        "measure with real processes: oomproof run -- torchrun --nproc-per-node N"
    )
