"""``oomproof doctor``: what this machine can do, and what is missing."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer
from rich.console import Console

from oomproof.errors import EXIT_FAILED
from oomproof.phantom import doctor


def main(
    symbols: Annotated[bool, typer.Option(help="List the stand-ins' functions that do nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether scripts can run on the phantom here, and say how to get what is missing."""
    if symbols:
        listed = doctor.idle_functions()
        if json:
            print(json_module.dumps(listed, indent=2))
        else:
            for library, names in listed.items():
                for name in names:
                    print(f"{library} {name}")
        return
    checks = doctor.examine()
    if json:
        print(json_module.dumps([_plain(check) for check in checks], indent=2))
    else:
        console = Console()
        for check in checks:
            state = {True: "[green]ok[/]", False: "[red]missing[/]", None: "[yellow]note[/]"}[check.ok]
            console.print(f"{state:>16}  [bold]{check.what}[/]: {check.found}", highlight=False)
            if check.cure:
                console.print(f"          {check.cure}", highlight=False)
    if any(check.ok is False for check in checks):
        raise typer.Exit(EXIT_FAILED)


def _plain(check: Any) -> dict[str, Any]:
    return {"what": check.what, "ok": check.ok, "found": check.found, "cure": check.cure}
