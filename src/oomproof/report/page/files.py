"""Putting the page together from its files, and writing it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from html import escape
from importlib.resources import files as package_files
from pathlib import Path
from string import Template

import oomproof
from oomproof.capture import replacing
from oomproof.errors import EnvironmentMissingError
from oomproof.report.page import parts
from oomproof.report.page.data import page_data
from oomproof.report.source import Source
from oomproof.report.words import clean


def page(source: Source, larger_gpu: str | None = None) -> str:
    """Return the page of one file. ``larger_gpu`` is the GPU to advise where this one is too small.

    Its content security policy allows nothing to be loaded, and no script to run but the two that are in it.
    Raises EnvironmentMissingError without plotly.
    """
    library, script = plotly(), file("page.js")
    profile, measured = source.profile, source.measurement
    title = " ".join(measured.command) if measured is not None else source.path
    data = page_data(profile)
    return Template(file("page.html")).substitute(
        policy=escape(policy(library, script)),
        title=escape(clean(title, limit=80)),
        css=file("page.css"),
        verdict=parts.verdict(source),
        warning=parts.warning(source),
        figures=parts.figures(source),
        breakdown=parts.breakdown(profile),
        ranks=parts.ranks(measured),
        steps=parts.steps(source),
        unknown=parts.unknowns(source),
        next=parts.following(source, larger_gpu),
        data=json_for_html(data),
        plotly=library,
        script=script,
        made_by=escape(f"oomproof {oomproof.__version__}"),
    )


def write_page(path: str | os.PathLike[str], text: str) -> None:
    """Write the page to ``path`` in one atomic step. Raises UsageError when the place cannot be written."""
    with replacing(Path(path)) as written:
        written.write(text.encode("utf-8", "backslashreplace"))


def plotly() -> str:
    """Return plotly.js. Raises EnvironmentMissingError without plotly."""
    try:
        from plotly.offline import get_plotlyjs  # here: the other verbs need not wait for it
    except ImportError:
        raise EnvironmentMissingError("the page needs plotly; install it: pip install plotly") from None
    return str(get_plotlyjs())


def file(name: str) -> str:
    """Return one of the page's own files."""
    return package_files("oomproof.report.page").joinpath(name).read_text(encoding="utf-8")


def policy(*scripts: str) -> str:
    """Return a content security policy under which these scripts run, and nothing is loaded."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def json_for_html(data: object) -> str:
    """Return JSON that cannot end the element it stands in, or begin a comment there."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
