"""Compare the cost model with public measurements: runs each program on the phantom and writes the page's table.

    python benchmarks/cost/compare.py            # all, about 15 minutes on 2 cores; needs timm, torchao, bitsandbytes
    python benchmarks/cost/compare.py --render   # only docs/cost.md, from results.jsonl

The work of each program is kept in ``--keep FOLDER`` if given, so that another model can be tried on it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

from rows import CASES, Case  # noqa: E402

from oomproof.gpus import get_gpu  # noqa: E402
from oomproof.phantom import launch  # noqa: E402
from oomproof.plan.cost import Work, relative_time  # noqa: E402

RESULTS = HERE / "results.jsonl"
PAGE = HERE.parents[1] / "docs" / "cost.md"
BEGIN, END = "<!-- begin comparison -->\n", "<!-- end comparison -->\n"
RANKS_ON_NODE = 8


def work_of(case: Case, options: dict[str, Any], keep: Path | None) -> Work:
    """Return what a step of a program executes, from the kept ones if it is there."""
    words = [case.model, json.dumps(options, sort_keys=True)]
    place = f"{case.gpu}-{case.world}-{'-'.join(words)}"
    kept = keep / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.json" if keep else None
    if kept is not None and kept.exists():
        return Work.from_json(json.loads(kept.read_text()))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as messages:
        world = None
        if case.world is not None:
            world = launch.World(size=case.world, rank=0, local_size=RANKS_ON_NODE, folder=Path(messages))
        settings = launch.Settings(
            gpu=get_gpu(case.gpu),
            gpu_count=RANKS_ON_NODE if world else 1,
            unlimited=True,
            steps=2,
            meter=True,
            world=world,
        )
        launch.start([sys.executable, str(HERE / "program.py"), *words], settings, Path(folder)).wait()
        findings = [json.loads(path.read_text()) for path in Path(folder).glob("process-*.json")]
    found = max(findings, key=lambda f: f["reserved_bytes"])
    if found["work"] is None:
        raise SystemExit(f"{case.name}: {found['no_work']}: {found['error']}")
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found["work"]))
    return Work.from_json(found["work"])


def measure(case: Case, keep: Path | None) -> dict[str, Any]:
    """Return the row of a case."""
    ratio = relative_time(work_of(case, case.changed, keep), work_of(case, case.base, keep), get_gpu(case.gpu))
    print(f"{case.name}: {case.measured:.3f} in {ratio.low:.3f} {ratio.expected:.3f} {ratio.high:.3f}", flush=True)
    return {
        "name": case.name,
        "technique": case.technique,
        "source": case.source,
        "url": case.url,
        "what": case.what,
        "gpu": case.gpu,
        "model": case.model,
        "world": case.world,
        "base": case.base,
        "changed": case.changed,
        "assumed": case.assumed,
        "measured": round(case.measured, 4),
        "low": round(ratio.low, 4),
        "expected": round(ratio.expected, 4),
        "high": round(ratio.high, 4),
        "holds": ratio.low <= case.measured <= ratio.high,
        "reason": case.reason,
        "unknown": list(ratio.unknown),
    }


def render(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = ["| technique | measured, and where | ratio | ours | held |", "|---|---|---:|---:|---|"]
    for row in rows:
        where = f"{row['model']}, {row['gpu']}" + (f", {row['world']} GPUs" if row["world"] else "")
        assumed = f"; assumed: {row['assumed']}" if row["assumed"] else ""
        lines.append(
            f"| {row['technique']} | {row['what']} ({where}{assumed}): [{row['source']}]({row['url']}) "
            f"| {row['measured']:.3f} | {row['expected']:.3f} ({row['low']:.3f} to {row['high']:.3f}) "
            f"| {'yes' if row['holds'] else 'no: ' + row['reason']} |"
        )
    held = sum(row["holds"] for row in rows)
    off = [abs(row["expected"] / row["measured"] - 1) for row in rows]
    lines += [
        "",
        f"The range holds {held} of {len(rows)}. The expected ratio is off by {sum(off) / len(off):.1%} on average, "
        f"by {max(off):.1%} at most.",
    ]
    return "\n".join(lines) + "\n"


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page with the table in its place."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + render(rows) + END + rest.split(END)[1]


def _results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def main() -> None:
    """Measure and write, or only write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="do not run anything")
    parser.add_argument("--check", action="store_true", help="fail if rendering would change the page")
    parser.add_argument("--keep", type=Path, help="folder of the work of each program")
    parser.add_argument("--only", default="", help="measure the cases with this in their names; the others stay")
    given = parser.parse_args()
    if not given.render and not given.check:
        known = {row["name"]: row for row in _results()}
        known.update({case.name: measure(case, given.keep) for case in CASES if given.only in case.name})
        rows = [known[case.name] for case in CASES if case.name in known]
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page(_results())
    if given.check and text != PAGE.read_text():
        sys.exit("docs/cost.md is not what its data says: python benchmarks/cost/compare.py --render")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
