"""Write the tables of docs/accuracy.md from results.jsonl; with ``--check`` only say whether they are up to date.

Everything between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` on the page is made here, the text around it is
not.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "accuracy.md"
MIB = 1 << 20
COMPARED = ("same", "other")

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


def summary(rows: list[Row]) -> str:
    """Return how close each group is."""
    body = []
    for group, name in (("same", "same torch release"), ("other", "another or an unknown torch version")):
        errors = [row["phantom_bytes"] / row["real_bytes"] - 1 for row in rows if row["group"] == group]
        body.append(
            [
                name,
                str(len(errors)),
                str(sum(error == 0 for error in errors)),
                str(sum(abs(error) <= 0.001 for error in errors)),
                str(sum(abs(error) <= 0.01 for error in errors)),
                f"{min(min(errors), 0):.2%}".replace("%", " %"),
                f"{max(max(errors), 0):+.2%}".replace("%", " %"),
            ]
        )
    head = ["figures", "compared", "to the byte", "within 0.1 %", "within 1 %", "worst below", "worst above"]
    return table(head, body)


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
        delta = "" if row["real_oom"] else f"{row['phantom_bytes'] / row['real_bytes'] - 1:+.1%}".replace("%", " %")
        shown = [f"{row[key] // MIB:,}" for key in ("phantom_allocated_bytes", "phantom_bytes", "phantom_high_bytes")]
        body.append([row["what"], row["gpu"], where, real, shown[0], shown[1], delta, shown[2], row["verdict"]])
    return table(head, body)


def parts(rows: list[Row]) -> dict[str, Callable[[], str]]:
    """Return what stands at each mark of the page."""
    made: dict[str, Callable[[], str]] = {"summary": lambda: summary(rows)}
    for case in {row["case"]: None for row in rows if row["group"] in COMPARED}:
        made[case] = lambda case=case: comparison([row for row in rows if row["case"] == case])  # type: ignore[misc]
    made["messages"] = lambda: messages([row for row in rows if row["group"] == "message"])
    made["devices"] = lambda: devices([row for row in rows if row["group"] == "device"])
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
