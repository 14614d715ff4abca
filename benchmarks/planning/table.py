"""Plans for real scripts on GPUs where they do not fit: ``python benchmarks/planning/table.py [--only NAME]``.

Each script is planned for twice: on a GPU with its own peak divided by 1.3, and by 2. The plan is then applied on the
phantom as ``oomproof apply --phantom`` does, and its peak compared with the plan's. Rows go to results.jsonl, one at a
time; ``--render`` writes them into docs/planning.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from oomproof import api
from oomproof.plan.document import read_plan, write_plan
from oomproof.plan.planning import plan, rehearse
from oomproof.units import GIB

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.jsonl"
PAGE = ROOT / "docs" / "planning.md"
SHRINK = (1.3, 2.0)


@dataclass(frozen=True)
class Case:
    """A script, and the GPU whose memory is made smaller."""

    name: str
    command: tuple[str, ...]
    gpu: str
    folder: str | None = None  # the option that names where its repository is; None: this one


CASES = [
    Case("GPT-2 124M, HF Trainer, float32", ("examples/train_gpt2.py",), "t4"),
    Case("Llama-3-8B shape, plain loop, bf16", ("examples/train_llama.py",), "h200"),
    Case("ResNet-50, fp16 autocast, DataLoader", ("examples/train_resnet.py", "--fp16", "--workers", "0"), "t4"),
    Case("CNN of the NVML rows", ("benchmarks/accuracy/cnn.py", "VGG16", "Adam", "64", "0"), "rtx-4060"),
    Case(
        "nanoGPT, GPT-2 124M, bf16 autocast",
        ("train.py", "--dataset=openwebtext", "--compile=False", "--batch_size=12", "--eval_iters=1"),
        "a100-40gb",
        "nanogpt",
    ),
    Case(
        "cs336 language model, large, float32",
        (
            "cs336_systems/benchmark_nvtx.py", "--model-size", "large", "--context-length", "256", "--batch-size", "4",
            "--mode", "full_step", "--warmup-steps", "5", "--measurement-steps", "1", "--device", "cuda:0",
        ),
        "a100-40gb",
        "cs336",
    ),
    Case("U-Net, diffusers, accelerate", ("benchmarks/planning/scripts/train_unet.py",), "a100-40gb"),
    Case("ViT, DataLoader", ("benchmarks/planning/scripts/train_vit.py",), "a100-40gb"),
    Case("LSTM language model, clipping", ("benchmarks/planning/scripts/train_lstm.py",), "t4"),
    Case("DCGAN, two models", ("benchmarks/planning/scripts/train_gan.py",), "t4"),
]  # fmt: skip


def row(case: Case, shrink: float, demand: int, folder: Path) -> dict[str, object]:
    """Plan for one case and apply what was found."""
    memory = int(demand / shrink)
    started = time.monotonic()
    command = [sys.executable, *case.command]
    planned = plan(command, gpu=case.gpu, memory=memory, seconds=240, cwd=folder)
    seconds = time.monotonic() - started
    found = planned.found
    line: dict[str, object] = {
        "name": case.name,
        "command": list(case.command),
        "gpu": case.gpu,
        "memory_bytes": memory,
        "shrink": shrink,
        "demand_bytes": demand,
        "torch": found.baseline.measurement.torch.version if found.baseline.measurement is not None else None,
        "sets": len(found.trials),
        "seconds": round(seconds),
        "changes": [change.label for change in planned.plan.changes] if planned.plan else None,
        "fidelity": planned.plan.fidelity if planned.plan else None,
        "time": planned.plan.relative_time if planned.plan else None,
        "peak_bytes": planned.plan.device_bytes if planned.plan else found.closest.peak_bytes,
        "closest": None if planned.plan else found.closest.candidate.label,
        "fits_as_it_is": planned.fits_as_it_is,
    }
    if planned.plan is not None:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "plan.toml"
            write_plan(path, planned.plan)
            job = api.prepare(command, gpu=case.gpu, memory=memory, cwd=folder)
            applied = rehearse(job, read_plan(path).changes).measurement
        line["applied_bytes"] = [applied.peak.allocated_bytes, applied.peak.reserved_bytes]
        line["planned_bytes"] = [planned.plan.allocated_bytes, planned.plan.reserved_bytes]
    return line


def render(rows: list[dict[str, object]]) -> str:
    """Return the table of docs/planning.md."""
    lines = [
        "| script | GPU | peak as it is | memory | plan | peak with it | time of a step | applied |",
        "|---|---|---:|---:|---|---:|---|---|",
    ]
    for r in rows:
        memory, demand, peak = (float(r[k]) / GIB for k in ("memory_bytes", "demand_bytes", "peak_bytes"))  # type: ignore[arg-type]
        changes, time_ = r["changes"], r["time"]
        if isinstance(changes, list):
            what = " + ".join(changes)
        elif r.get("fits_as_it_is"):
            what = "nothing has to change: it fits where the allocator gives back what it has cached"
        else:
            what = f"nothing fits; closest: {r['closest']}"
        shown = f"{time_[1]:.2f} ({time_[0]:.2f} to {time_[2]:.2f})" if isinstance(time_, (list, tuple)) else ""
        same = "the same bytes" if r.get("applied_bytes") == r.get("planned_bytes") else str(r.get("applied_bytes"))
        lines.append(
            f"| {r['name']} | {r['gpu']} | {demand:.2f} | {memory:.2f} | {what} | {peak:.2f} | {shown} | "
            f"{same if changes else ''} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="part of a case's name")
    parser.add_argument("--nanogpt", type=Path, help="a clone of karpathy/nanoGPT with data in data/openwebtext")
    parser.add_argument(
        "--cs336", type=Path, help="the repository of docs/accuracy.md with cs336_systems/benchmark_nvtx.py"
    )
    parser.add_argument("--again", action="store_true", help="run cases that results.jsonl has already, too")
    parser.add_argument("--render", action="store_true", help="write the table from results.jsonl, run nothing")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    if not arguments.render:
        for case in CASES:
            folder = ROOT if case.folder is None else getattr(arguments, case.folder)
            if folder is None or (arguments.only and arguments.only not in case.name):
                continue
            done = {r["shrink"] for r in rows if r["name"] == case.name}
            if done.issuperset(SHRINK) and not arguments.again:
                continue
            measured = api.run([sys.executable, *case.command], gpu=case.gpu, memory="1TiB", cwd=folder)
            for shrink in SHRINK:
                if shrink in done and not arguments.again:
                    continue
                made = row(case, shrink, measured.demand.device_bytes, folder)
                rows = [r for r in rows if (r["name"], r["shrink"]) != (case.name, shrink)] + [made]
                RESULTS.write_text("".join(json.dumps(r) + "\n" for r in rows))
                print(json.dumps(made), flush=True)
    names = [case.name for case in CASES]
    rows.sort(key=lambda r: (names.index(r["name"]), r["shrink"]))
    RESULTS.write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = PAGE.read_text()
    before, _, rest = page.partition("<!-- begin scripts -->")
    _, _, after = rest.partition("<!-- end scripts -->")
    PAGE.write_text(f"{before}<!-- begin scripts -->\n{render(rows)}\n<!-- end scripts -->{after}")


if __name__ == "__main__":
    main()
