"""Running a script with changes in it: measured on the phantom, or trained on the CPU."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from child import PYTHON

from oomproof import api
from oomproof.measure.measurement import Measurement
from oomproof.phantom import launch
from oomproof.plan.facts import Facts
from oomproof.plan.injection import EXIT_REFUSED
from oomproof.plan.technique import Change, world_size
from oomproof.running import Runner


@dataclass(frozen=True)
class Trial:
    """What a run with changes showed."""

    measurement: Measurement
    facts: Facts
    said: list[dict[str, str]]  # what was changed where
    refused: str | None


def measured(script: Path, *changes: Change, arguments: Sequence[str] = (), **options: Any) -> Trial:
    """Run a script on the phantom with changes in it; ``options`` are those of ``oomproof.run``."""
    options.setdefault("gpu", "a100-80gb")
    job = api.prepare([PYTHON, str(script), *arguments], changes=changes, **options)
    job = replace(job, settings=replace(job.settings, survey=True))
    with contextlib.closing(Runner(job.program, job.folder, job.env, True, None, None)) as runner:
        result = api.measure(job, runner)
    record = result.limited.changes[0]
    return Trial(result.measurement, Facts.from_json(record["facts"]), record["said"], record["refused"])


#: Put at the end of a script that is to be trained: leaves its parameters and buffers for ``trained``.
LEAVE = """
import json as _json, os as _os
def leave(model):
    whole = lambda v: v.full_tensor() if hasattr(v, "full_tensor") else v
    state = {k: whole(v.detach()).float().flatten().tolist() for k, v in model.state_dict().items()}
    if _os.environ.get("RANK", "0") != "0":
        return
    with open(_os.environ["LEFT"], "w") as file:
        _json.dump(state, file)
"""


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    """Write a script; it can call ``leave(model)``."""
    path = folder / name
    path.write_text(LEAVE + textwrap.dedent(text))
    return path


#: Starts two or more processes of a script as ``oomproof apply`` does.
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def trained(script: Path, *changes: Change, arguments: Sequence[str] = ()) -> tuple[dict[str, list[float]], list[Any]]:
    """Run a script for real, without the phantom, with changes in it; return what it left, and what was changed.

    This is what ``oomproof apply`` does, over as many processes as the changes ask for. Fails when the script does.
    """
    left, said, log = attempted(script, *changes, arguments=arguments)
    assert left is not None, log[-4000:]
    return left, said


def attempted(
    script: Path, *changes: Change, arguments: Sequence[str] = ()
) -> tuple[dict[str, list[float]] | None, list[Any], str]:
    """Do what ``trained`` does, and return None for what is left where the script failed; and what it printed."""
    code, log, run_folder = _run(script, changes, arguments)
    made = json.loads((run_folder / "left.json").read_text()) if code == 0 else None
    return made, [entry for record in _records(run_folder) for entry in record["said"]], log


def refused(script: Path, *changes: Change, arguments: Sequence[str] = ()) -> str:
    """Run a script for real with changes that cannot be applied to it; return why not."""
    code, log, run_folder = _run(script, changes, arguments)
    assert code == EXIT_REFUSED, log[-4000:]
    return next(record["refused"] for record in _records(run_folder) if record["refused"])


def _run(script: Path, changes: Sequence[Change], arguments: Sequence[str]) -> tuple[int, str, Path]:
    run_folder = script.parent / f"run-{len(list(script.parent.glob('run-*')))}"
    run_folder.mkdir()
    size = world_size(tuple(changes))
    start = [PYTHON] if size is None else [*TORCHRUN, str(size)]
    program = launch.resolve_command([*start, str(script), *arguments])
    settings = launch.Settings(
        gpu=api.resolve_gpu(None), phantom=False, changes=tuple(change.to_json() for change in changes)
    )
    log = run_folder / "output.txt"
    with log.open("wb") as output:
        env = _with_left(run_folder / "left.json")
        process = launch.start(program, settings, run_folder, stdout=output, stderr=output, env=env)
        code = process.wait(300)
    return code, log.read_text(), run_folder


def _records(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run_folder.glob("changes-*.json"))]


def _with_left(left: Path) -> dict[str, str]:
    import os

    return {**os.environ, "LEFT": str(left)}
