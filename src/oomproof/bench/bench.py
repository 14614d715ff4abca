"""The bench: many runs of one command, whose answers come as they are ready."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from oomproof.bench.local import Local
from oomproof.bench.ray import Ray
from oomproof.bench.request import Done, Request
from oomproof.bench.slurm import Slurm
from oomproof.bench.worker import Program
from oomproof.errors import UsageError
from oomproof.phantom import launch


class Executor(Protocol):
    """Where requests are run."""

    workers: int

    def submit(self, request: Request, answer: Callable[[Done], None]) -> None:
        """Run a request when there is room; ``answer`` is called once, in any thread, also after ``stop``."""

    def stop(self) -> None:
        """End what runs, and run nothing more."""

    def close(self) -> None:
        """End everything, whatever still runs."""


MakeExecutor = Callable[[Program, "int | None", bool], Executor]

EXECUTORS: dict[str, MakeExecutor] = {"local": Local, "ray": Ray, "slurm": Slurm}


class Bench:
    """Runs many variants of one command, several at once.

    ``command`` is as for ``oomproof.run``. ``executor`` is "local", "ray", "slurm", or
    what makes another. ``workers`` is how many runs
    there are at once (default: what cores and memory of this machine allow, or what the cluster has). ``warm`` forks
    runs from processes that have imported torch and the script's libraries, wherever a run could not tell the
    difference; the figures are the same.

    Raises UsageError when the command cannot be found or the executor's package is not installed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        executor: str | MakeExecutor = "local",
        workers: int | None = None,
        warm: bool = True,
    ) -> None:
        folder = Path(cwd) if cwd is not None else Path.cwd()
        program = Program(
            command=tuple(launch.resolve_command(command, folder=folder)),
            cwd=folder.absolute(),
            env=dict(os.environ if env is None else env),
        )
        self._executor = _executor(executor, program, workers, warm)
        self._answers: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._pending = 0

    @property
    def workers(self) -> int:
        """How many runs there are at once."""
        return self._executor.workers

    def submit(self, request: Request) -> None:
        """Ask for a run; its answer comes from ``results``."""
        self._pending += 1
        self._executor.submit(request, self._answers.put)

    def results(self, *, seconds: float | None = None) -> Iterator[Done]:
        """Yield answers as they come, until nothing is left to wait for; requests may be added meanwhile.

        After ``seconds`` everything is stopped; what was running or waiting then is answered with the error "stopped".
        """
        end = None if seconds is None else time.monotonic() + seconds
        while self._pending:
            try:
                done = self._answers.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            except queue.Empty:
                self.stop()
                end = None
                continue
            self._pending -= 1
            yield done

    def run(self, requests: Iterable[Request], *, seconds: float | None = None) -> Iterator[Done]:
        """Ask for these runs and yield their answers as they come."""
        for request in requests:
            self.submit(request)
        return self.results(seconds=seconds)

    def stop(self) -> None:
        """End what runs and run nothing more."""
        self._executor.stop()

    def close(self) -> None:
        """End everything and remove what runs left, the files that findings name included."""
        self._executor.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _executor(name: str | MakeExecutor, program: Program, workers: int | None, warm: bool) -> Executor:
    if workers is not None and workers < 1:
        raise UsageError(f"workers is {workers}; it must be at least 1")
    if not isinstance(name, str):
        return name(program, workers, warm)
    if name not in EXECUTORS:
        raise UsageError(f"executor is {name!r}; it must be one of {', '.join(EXECUTORS)}")
    return EXECUTORS[name](program, workers, warm)
