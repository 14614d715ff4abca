"""Requests on the machines of a Ray cluster: an actor for each run at a time, with warm processes of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from oomproof.bench.request import Done, Request
from oomproof.bench.worker import Program, Worker
from oomproof.errors import UsageError

TRIES = 2  # a request whose actor was lost, with its node or for want of memory, is run once more


class RemoteWorker:
    """What an actor runs: requests in one thread, the order to stop in another."""

    def __init__(self, program: Program, warm: bool) -> None:
        self._worker = Worker(program, warm=warm)
        self._stopping = threading.Event()

    def run(self, request: Request) -> Done:
        """Run a request."""
        return self._worker.run(request, self._stopping.is_set)

    def stop(self) -> None:
        """End what runs."""
        self._stopping.set()

    def close(self) -> None:
        """End the warm processes."""
        self._worker.close()


class Ray:
    """The executor of a Ray cluster: the one that RAY_ADDRESS names or that runs here, else one of this machine.

    The command's files have to be at the same place on every node. Raises UsageError when Ray is not installed.
    """

    def __init__(self, program: Program, workers: int | None, warm: bool) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise UsageError("the executor 'ray' needs Ray: pip install 'oomproof[ray]'") from None
        self._ray: Any = ray
        self._own = not ray.is_initialized()
        if self._own:
            ray.init(log_to_driver=False, include_dashboard=False)
        self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._make: Callable[[], Any] = lambda: ray.remote(num_cpus=1, max_concurrency=2)(RemoteWorker).remote(
            program, warm
        )
        self._actors: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._all: list[Any] = []
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="oomproof-ray")
        self._stopping = threading.Event()
        for _ in range(self.workers):
            self._actors.put(self._new())

    def _new(self) -> Any:
        actor = self._make()
        self._all.append(actor)
        return actor

    def submit(self, request: Request, answer: Callable[[Done], None]) -> None:
        """Run a request when there is room; ``answer`` is called in another thread."""
        self._pool.submit(lambda: answer(self._run(request)))

    def _run(self, request: Request) -> Done:
        lost = ""
        for _ in range(TRIES):
            if self._stopping.is_set():
                return Done(request=request, outcome=None, seconds=0.0, error="stopped")
            actor = self._actors.get()
            try:
                done: Done = self._ray.get(actor.run.remote(request))
            except self._ray.exceptions.RayError as error:
                lost = str(error).strip().splitlines()[0]
                self._all.remove(actor)
                actor = self._new()
                continue
            finally:
                self._actors.put(actor)
            return done
        return Done(request=request, outcome=None, seconds=0.0, error=f"Ray lost the run: {lost}")

    def stop(self) -> None:
        """End what runs and answer the rest with "stopped"."""
        self._stopping.set()
        for actor in self._all:
            actor.stop.remote()

    def close(self) -> None:
        """End everything, and the cluster if it was started here."""
        self.stop()
        self._pool.shutdown(wait=True)
        for actor in self._all:
            self._ray.get(actor.close.remote())
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()
