"""Running requests in one process of one machine; every executor does its work through this."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from oomproof.bench.request import Done, Request
from oomproof.errors import OomproofError
from oomproof.phantom import launch
from oomproof.phantom.warm import PythonCommand, Servers, WarmProcessLost
from oomproof.running import Process, Runner, Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The command of a bench, and where it runs. Travels to other machines, which are taken to have the same files."""

    command: tuple[str, ...]  # resolved
    cwd: Path
    env: Mapping[str, str]

    def with_arguments(self, arguments: tuple[str, ...] | None) -> list[str]:
        """Return the command with these words after the script."""
        if arguments is None:
            return list(self.command)
        python = PythonCommand.parse(self.command)
        if python is None:
            raise OomproofError(f"{self.command[0]} is no Python script: its arguments cannot be told from its options")
        return [python.python, *python.options, *python.program, *arguments]


class Worker:
    """Runs requests, from warm processes where it can. Its methods may be called from several threads."""

    def __init__(self, program: Program, *, warm: bool = True, most_servers: int = 4) -> None:
        self._program = program
        self._servers = Servers(most_servers) if warm else None
        self._kept: list[Runner] = []

    def run(self, request: Request, should_stop: Callable[[], bool] = lambda: False) -> Done:
        """Run a request to its end, its time limit or until ``should_stop()``."""
        started = time.monotonic()
        limit = request.timeout_seconds

        def late() -> bool:
            since = attempt.since  # of the run itself: a warm process may have to be started first
            return limit is not None and since is not None and time.monotonic() - since > limit

        attempt = _Attempt(self._program, request, self._servers, lambda: late() or should_stop())
        error, outcome = None, None
        try:
            try:
                outcome = attempt.go()
            except WarmProcessLost:
                attempt.finish()
                attempt = _Attempt(self._program, request, None, lambda: late() or should_stop())
                outcome = attempt.go()
        except Stopped:
            error = "timed out" if late() else "stopped"
        except OomproofError as fault:
            error = str(fault)
        finally:
            if request.settings.snapshot or request.settings.profile:
                self._kept.append(attempt.runner)  # its findings name files
            else:
                attempt.finish()
        return Done(
            request=request,
            outcome=outcome,
            seconds=time.monotonic() - started,
            error=error,
            output="".join(attempt.printed),
            forked=attempt.forked,
        )

    @property
    def faults(self) -> list[str]:
        """Why runs were not forked from warm processes, and which packages these could not import."""
        return self._servers.faults if self._servers is not None else []

    def close(self) -> None:
        """End the warm processes and remove what runs left."""
        if self._servers is not None:
            self._servers.close()
        for runner in self._kept:
            runner.close()
        self._kept = []


class _Attempt:
    """One try at a request."""

    def __init__(
        self, program: Program, request: Request, servers: Servers | None, should_stop: Callable[[], bool]
    ) -> None:
        self.printed: list[str] = []
        self.forked = False
        self._command = program.with_arguments(request.arguments)
        self._servers = servers
        self._settings = request.settings
        self._first: tuple[Process, Path] | None = None
        self.since: float | None = None
        self.runner = Runner(
            self._command,
            program.cwd,
            {**program.env, **request.env},
            True,
            None,
            None,
            start=self._start,
            should_stop=should_stop,
            on_failure=self.printed.append,
        )

    def go(self) -> Any:
        learning = self._servers is not None and not self._servers.knows(self._command)
        outcome = self.runner.go(replace(self._settings, list_modules=True) if learning else self._settings)
        if learning and self._servers is not None and self._first is not None:
            process, folder = self._first
            self._servers.learn(self._command, folder, process.pid)
        return outcome

    def _start(
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
        start = launch.start if self._servers is None else self._servers.start
        process: Process = start(command, settings, run_folder, stdout=stdout, stderr=stderr, env=env, cwd=cwd)
        if self._first is None:
            self._first = process, run_folder
            self.since = time.monotonic()
            self.forked = not hasattr(process, "args")
        return process

    def finish(self) -> None:
        self.runner.close()


def processes_that_fit() -> int:
    """Return how many runs this machine's cores and free memory allow beside one another."""
    return max(1, min(len(os.sched_getaffinity(0)), (_free_bytes() - SPARE_BYTES) // BYTES_EACH))


#: Host memory of a run: torch and its libraries, Python objects, the trace. A GPT-2's has about 1 GiB.
BYTES_EACH = 3 << 29
SPARE_BYTES = 1 << 30


def _free_bytes() -> int:
    """Return the host's free memory, or what is left of the limit of this process's control group."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
