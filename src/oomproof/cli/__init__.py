"""The command line: one file per verb, each thin over the Python API."""

from __future__ import annotations

import sys
from typing import Any

import typer

from oomproof.cli import (
    apply,
    diff,
    doctor,
    export,
    gpus,
    plan,
    replay,
    report,
    run,
    steps,
    table,
    timeline,
    tree,
    triage,
    watch,
)
from oomproof.cli.strict import Strict
from oomproof.errors import EXIT_FAILED, EXIT_FITS, EXIT_INTERRUPTED, EXIT_USAGE, OomproofError

#: Base of typer's own complaints: click's ClickException. Newer typers carry a click of their own, so it is found
#: as the base of what they export (BadParameter < UsageError < ClickException).
ArgumentsError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="oomproof",
    help="Run an unmodified PyTorch training script on a GPU that isn't there; learn its exact peak memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", context_settings={"allow_interspersed_args": False}, epilog=run.EPILOG)(run.main)
app.command("plan", cls=Strict, context_settings={"allow_interspersed_args": False}, epilog=plan.EPILOG)(plan.main)
app.command("apply", cls=Strict, context_settings={"allow_interspersed_args": False}, epilog=apply.EPILOG)(apply.main)
app.command("report")(report.main)
app.command("tree")(tree.main)
app.command("table")(table.main)
app.command("timeline")(timeline.main)
app.command("diff")(diff.main)
app.command("steps")(steps.main)
app.command("export")(export.main)
app.command("replay")(replay.main)
app.command("triage", epilog=triage.EPILOG)(triage.main)
app.command("watch")(watch.main)
app.command("gpus")(gpus.main)
app.command("doctor")(doctor.main)


@app.callback(invoke_without_command=True)
def _top(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        import oomproof

        print(f"oomproof {oomproof.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; every error ends here, as one message and its exit code."""
    try:
        code = app(standalone_mode=False)
    except OomproofError as error:
        print(f"oomproof: {error}", file=sys.stderr)
        code = error.exit_code
    except ArgumentsError as error:
        error.show()
        code = EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        print("oomproof: interrupted; the command's processes have ended", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has gone: nothing to tell it
        sys.stdout = None
        code = EXIT_FAILED
    sys.exit(code if isinstance(code, int) else EXIT_FITS)
