"""Write the tables of docs/accuracy.md from results.jsonl; with ``--check`` only say whether they are up to date.

Everything between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` on the page is made here, the text around it is
not.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "accuracy.md"
MIB = 1 << 20
COMPARED = ("same", "other")
MISS = 0.01  # differences above it are told with their reason

Row = dict[str, Any]


def difference(row: Row) -> str:
    """Return phantom minus real in bytes and percent, or "0"."""
    delta = row["phantom_bytes"] - row["real_bytes"]
    if delta == 0:
        return "0"
    return f"{delta:+,} ({delta / row['real_bytes']:+.3%})".replace("%", " %")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; every column but the first is aligned right."""
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def comparison(rows: list[Row]) -> str:
    """Return the table of one source, allocated and reserved of a run side by side where both are known."""
    runs: dict[str, dict[str, Row]] = {}
    for row in rows:
        runs.setdefault(row["what"], {})[row["quantity"]] = row
    kinds = sorted({row["quantity"] for row in rows}, key=["allocated", "reserved", "held"].index)
    if kinds == ["allocated", "reserved"]:
        head = ["what ran", "allocated, real", "phantom", "difference", "reserved, real", "phantom", "difference"]
        body = [[what, *figures(run["allocated"]), *figures(run["reserved"])] for what, run in runs.items()]
    else:
        head = ["what ran", "compared", "real", "phantom", "difference"]
        body = [[row["what"], row["quantity"], *figures(row)] for row in rows]
    torch = sorted({(row["torch_real"], row["torch_phantom"]) for row in rows})
    gpus = sorted({row["gpu"] for row in rows})
    versions = "; ".join(f"{real} (phantom {phantom})" for real, phantom in torch)
    return f"GPU: {', '.join(gpus)}. torch: {versions}.\n\n{table(head, body)}"


def figures(row: Row) -> list[str]:
    """Return real, phantom and difference; a star where block sizes were guessed on both sides."""
    star = "\\*" if "*" in row["note"] and row["quantity"] == "allocated" else ""
    return [f"{row['real_bytes']:,}{star}", f"{row['phantom_bytes']:,}{star}", difference(row)]


def error(row: Row) -> float:
    """Return (phantom - real) / real."""
    return float(row["phantom_bytes"] / row["real_bytes"] - 1)


def percent(share: float, digits: int = 2, sign: str = "") -> str:
    """Return a share as "12.30 %"."""
    return f"{share:{sign}.{digits}%}".replace("%", " %")


BANDS = ((0.0, "to the byte"), (0.0001, "to 0.01 %"), (0.001, "to 0.1 %"), (0.01, "to 1 %"), (float("inf"), "more"))
GROUPS = (("same", "same torch release"), ("other", "another or an unknown torch version"))


def summary(rows: list[Row]) -> str:
    """Return how the differences of each group are distributed; each figure counts in one band."""
    body = []
    for group, name in GROUPS:
        errors = [error(row) for row in rows if row["group"] == group]
        counts, below = [], -1.0
        for limit, _ in BANDS:
            counts.append(str(sum(below < abs(e) <= limit for e in errors)))
            below = limit
        middle = percent(statistics.median(map(abs, errors)), 3)
        worst = [percent(min(0.0, *errors)), percent(max(0.0, *errors), sign="+")]
        body.append([name, str(len(errors)), *counts, middle, *worst])
    head = ["figures", "compared", *(name for _, name in BANDS), "median", "worst below", "worst above"]
    return table(head, body)


def misses(rows: list[Row]) -> str:
    """Return every compared figure that is off by more than 1 %, with its reason. ValueError when one has none."""
    missed = sorted((row for row in rows if row["group"] in COMPARED and abs(error(row)) > MISS), key=error)
    unexplained = [row["what"] for row in missed if not row.get("reason")]
    if unexplained:
        raise ValueError(f"give a reason for the miss of: {', '.join(unexplained)}")
    head = ["what ran", "compared", "difference", "why"]
    body = [[row["what"], row["quantity"], difference(row), row["reason"]] for row in missed]
    return table(head, body).replace("|---:|\n", "|---|\n", 1) if body else "None."


def messages(rows: list[Row]) -> str:
    """Return the out-of-memory messages beside each other."""
    head = ["what ran", "GPU", "request", "allocated, real", "phantom", "unallocated, real", "phantom", "free, real"]
    head += ["phantom"]
    body = []
    for row in rows:
        real, phantom = row["real"], row["phantom"]
        pairs = [text for key in ("allocated", "unallocated", "free") for text in (real[key], phantom[key])]
        body.append([row["what"], row["gpu"], real["requested"], *pairs])
    return table(head, body)


def devices(rows: list[Row]) -> str:
    """Return the table of runs whose device memory NVML measured, in MiB."""
    head = ["what ran", "GPU", "gradients go", "real", "phantom: allocated", "reserved", "difference"]
    head += ["with workspaces", "verdict"]
    places = {0: "first", 1: "before backward", 2: "last", None: "either way"}
    body = []
    for row in rows:
        where = places[row["zero_grad"]] + ("" if row["zero_grad_known"] or row["zero_grad"] is None else " (assumed)")
        real = f"{row['real_bytes'] // MIB:,}" + (" (out of memory)" if row["real_oom"] else "")
        delta = "" if row["real_oom"] else percent(error(row), 1, "+")
        shown = [f"{row[key] // MIB:,}" for key in ("phantom_allocated_bytes", "phantom_bytes", "phantom_high_bytes")]
        body.append([row["what"], row["gpu"], where, real, shown[0], shown[1], delta, shown[2], row["verdict"]])
    return table(head, body)


def coverage(rows: list[Row]) -> str:
    """Return in how many runs that fitted NVML's figure lies inside the report's range, and how wide that is."""
    fitted = [row for row in rows if not row["real_oom"]]
    runs = {row["what"] for row in fitted}
    outside = {
        row["what"] for row in fitted
        if not row["phantom_allocated_bytes"] <= row["real_bytes"] <= row["phantom_high_bytes"]
    }  # fmt: skip
    widths = [(row["phantom_high_bytes"] - row["phantom_allocated_bytes"]) / row["real_bytes"] for row in fitted]
    return (
        f"The report's range of the device, from *allocated* to *with workspaces*, holds the real figure in "
        f"{len(runs - outside)} of the {len(runs)} runs that fitted. Its median width is "
        f"{percent(statistics.median(widths), 1)} of the real figure ({percent(min(widths), 1)} to "
        f"{percent(max(widths), 1)})."
    )


def programs(rows: list[Row]) -> str:
    """Return the programs without a public figure, and the command of each."""
    body = [
        [row["what"], row["gpu"], row["torch_phantom"].partition("+")[0], f"{row['allocated_bytes']:,}",
         f"{row['reserved_bytes']:,}", row["verdict"], row["peak_in"]]
        for row in rows
    ]  # fmt: skip
    head = ["program", "GPU", "torch", "allocated", "reserved", "verdict", "peak in"]
    shown = table(head, body).replace("|---:|---:|---:|---:|---:|---:|", "|---|---:|---:|---:|---|---|", 1)
    commands = "\n".join(f"# {row['source']}\n{row['command']}" for row in rows)
    return f"{shown}\n\n<details><summary>Commands</summary>\n\n```\n{commands}\n```\n\n</details>"


def parts(rows: list[Row]) -> dict[str, Callable[[], str]]:
    """Return what stands at each mark of the page."""
    made: dict[str, Callable[[], str]] = {"summary": lambda: summary(rows), "misses": lambda: misses(rows)}
    for case in {row["case"]: None for row in rows if row["group"] in COMPARED}:
        made[case] = lambda case=case: comparison([row for row in rows if row["case"] == case])  # type: ignore[misc]
    made["messages"] = lambda: messages([row for row in rows if row["group"] == "message"])
    made["devices"] = lambda: devices([row for row in rows if row["group"] == "device"])
    made["coverage"] = lambda: coverage([row for row in rows if row["group"] == "device"])
    made["programs"] = lambda: programs([row for row in rows if row["group"] == "program"])
    return made


def render(page: str, rows: list[Row]) -> str:
    """Return the page with its marked parts made anew. Raises ValueError when a mark is missing."""
    for name, make in parts(rows).items():
        mark = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not mark.search(page):
            raise ValueError(f"{PAGE} has no mark <!-- begin {name} -->")
        text = make()
        page = mark.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)  # type: ignore[misc]
    return page


def main() -> int:
    """Write the page, or with ``--check`` say whether it is up to date."""
    rows = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines()]
    page = PAGE.read_text()
    made = render(page, rows)
    if "--check" in sys.argv:
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
