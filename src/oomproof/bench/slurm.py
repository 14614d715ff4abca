"""Requests on the nodes of a Slurm cluster, through submitit.

Waiting in a queue for each run would take longer than the run. So the jobs are workers: they take requests from a
folder on the shared file system and leave answers there, until they are told to stop or nobody is there any more.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oomproof.bench.request import Done, Request
from oomproof.bench.worker import Program, Worker
from oomproof.errors import UsageError

DEFAULT_WORKERS = 8
POLL_SECONDS = 0.2
BEAT_SECONDS = 5.0  # between signs of life of the one who asks
PATIENCE_SECONDS = 120.0  # without one, before a worker ends
JOB_MINUTES = 60  # SBATCH_TIMELIMIT overrides it, as SBATCH_PARTITION and the like do the rest
JOB_GIB = 4

REQUESTS, TAKEN, ANSWERS, STOP, ALIVE = "requests", "taken", "answers", "stop", "alive"


class Slurm:
    """The executor of a Slurm cluster. The command's folder has to be on a file system that all nodes share.

    ``cluster`` is submitit's: None for Slurm, "local" for processes of this machine. Raises UsageError when submitit
    or Slurm is missing.
    """

    def __init__(self, program: Program, workers: int | None, warm: bool, cluster: str | None = None) -> None:
        try:
            import submitit
        except ModuleNotFoundError:
            raise UsageError("the executor 'slurm' needs submitit: pip install 'oomproof[slurm]'") from None
        if cluster is None and shutil.which("sbatch") is None:
            raise UsageError("the executor 'slurm' needs Slurm, and there is no sbatch here; run it on a login node")
        self.workers = workers or DEFAULT_WORKERS
        self._folder = Path(tempfile.mkdtemp(prefix=".oomproof-bench-", dir=program.cwd))
        for name in (REQUESTS, TAKEN, ANSWERS):
            (self._folder / name).mkdir()
        self._beat()
        executor: Any = submitit.AutoExecutor(folder=self._folder / "jobs", cluster=cluster or "slurm")
        executor.update_parameters(
            name="oomproof", timeout_min=JOB_MINUTES, cpus_per_task=1, mem_gb=JOB_GIB, tasks_per_node=1
        )
        self._submit_job: Callable[[], Any] = lambda: executor.submit(work, self._folder, program, warm)
        self._jobs: list[Any] = [self._submit_job() for _ in range(self.workers)]
        self._asked: dict[str, tuple[Request, Callable[[Done], None]]] = {}
        self._number = 0
        self._ended_early = 0  # jobs, since the last answer
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="oomproof-slurm", daemon=True)
        self._watcher.start()

    def submit(self, request: Request, answer: Callable[[Done], None]) -> None:
        """Run a request when there is room; ``answer`` is called in another thread."""
        with self._lock:
            if self._stopping.is_set():
                return answer(_stopped(request))
            name = f"{self._number:06d}"
            self._number += 1
            self._asked[name] = request, answer
            _write(self._folder / REQUESTS / name, request)
        return None

    def _watch(self) -> None:
        beat = 0.0
        while not self._closing.wait(POLL_SECONDS):
            for path in sorted((self._folder / ANSWERS).glob("[0-9]*")):
                done = pickle.loads(path.read_bytes())
                path.unlink()
                self._answer(path.name, done)
            if time.monotonic() - beat > BEAT_SECONDS:
                beat = time.monotonic()
                self._beat()
                self._look_at_jobs()

    def _answer(self, name: str, done: Done) -> None:
        with self._lock:
            _, answer = self._asked.pop(name)
        self._ended_early = 0
        answer(done)

    def _beat(self) -> None:
        (self._folder / ALIVE).write_text(str(time.monotonic()))

    def _look_at_jobs(self) -> None:
        """Replace jobs that have ended early, of a time limit or a node's failure, and ask anew for what they took."""
        if self._stopping.is_set():
            return
        for index, job in enumerate(self._jobs):
            if not job.done():
                continue
            for path in (self._folder / TAKEN).glob(f"*-{job.job_id}"):
                path.rename(self._folder / REQUESTS / path.name.partition("-")[0])
            self._ended_early += 1
            if self._ended_early > self.workers:
                self._fail(f"jobs end before they answer anything: {job.exception() or job.state}")
                return
            self._jobs[index] = self._submit_job()

    def _fail(self, why: str) -> None:
        with self._lock:
            asked, self._asked = self._asked, {}
        for request, answer in asked.values():
            answer(Done(request=request, outcome=None, seconds=0.0, error=why))

    def stop(self) -> None:
        """End what runs and answer the rest with "stopped"."""
        self._stopping.set()
        (self._folder / STOP).touch()
        with self._lock:
            waiting = []
            for name in list(self._asked):
                with contextlib.suppress(FileNotFoundError):  # a worker has it and will answer
                    (self._folder / REQUESTS / name).unlink()
                    waiting.append(self._asked.pop(name))
        for request, answer in waiting:
            answer(_stopped(request))

    def close(self) -> None:
        """End everything; jobs that wait in the queue are cancelled."""
        self.stop()
        end = time.monotonic() + 10 * BEAT_SECONDS
        while self._asked and not all(job.done() for job in self._jobs) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        self._closing.set()
        self._watcher.join()
        self._fail("stopped")
        end = time.monotonic() + BEAT_SECONDS
        while not all(job.done() for job in self._jobs) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        for job in self._jobs:
            if not job.done():
                job.cancel(check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


def work(folder: Path, program: Program, warm: bool) -> None:
    """Run requests from the folder until it says stop or nobody is there any more: what a job does."""
    import submitit

    worker = Worker(program, warm=warm)
    me = submitit.JobEnvironment().job_id
    life = _Life(folder)
    try:
        while not life.over():
            taken = _take(folder, me)
            if taken is None:
                time.sleep(POLL_SECONDS)
                continue
            done = worker.run(pickle.loads(taken.read_bytes()), life.over)
            _write(folder / ANSWERS / taken.name.partition("-")[0], done)
            taken.unlink()
    finally:
        worker.close()


def _take(folder: Path, me: str) -> Path | None:
    for path in sorted((folder / REQUESTS).glob("[0-9]*")):
        taken = folder / TAKEN / f"{path.name}-{me}"
        with contextlib.suppress(FileNotFoundError):  # another worker was faster
            return path.rename(taken)
    return None


class _Life:
    """Whether the one who asks is still there; looked at once a second, since the folder may be far away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked = 0.0
        self._over = False
        self._sign = ""
        self._changed = time.monotonic()

    def over(self) -> bool:
        """Return whether to end."""
        now = time.monotonic()
        if now - self._looked > 1.0:
            self._looked = now
            sign = (self._folder / ALIVE).read_text() if (self._folder / ALIVE).exists() else None
            if sign != self._sign:
                self._sign, self._changed = sign or "", now
            gone = sign is None or now - self._changed > PATIENCE_SECONDS
            self._over = gone or (self._folder / STOP).exists()
        return self._over


def _stopped(request: Request) -> Done:
    return Done(request=request, outcome=None, seconds=0.0, error="stopped")


def _write(path: Path, value: object) -> None:
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(pickle.dumps(value))
    scratch.replace(path)
