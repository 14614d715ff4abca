"""Requests on this machine, in threads that each wait for one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from oomproof.bench.request import Done, Request
from oomproof.bench.worker import Program, Worker, processes_that_fit


class Local:
    """The executor of this machine."""

    def __init__(self, program: Program, workers: int | None, warm: bool) -> None:
        self.workers = workers or processes_that_fit()
        self._worker = Worker(program, warm=warm)
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="oomproof-bench")
        self._stopping = threading.Event()

    def submit(self, request: Request, answer: Callable[[Done], None]) -> None:
        """Run a request when there is room; ``answer`` is called in another thread."""

        def run() -> None:
            if self._stopping.is_set():
                answer(Done(request=request, outcome=None, seconds=0.0, error="stopped"))
            else:
                answer(self._worker.run(request, self._stopping.is_set))

        self._pool.submit(run)

    def stop(self) -> None:
        """End what runs and answer the rest with "stopped"."""
        self._stopping.set()

    def close(self) -> None:
        """End everything."""
        self.stop()
        self._pool.shutdown(wait=True)
        self._worker.close()
