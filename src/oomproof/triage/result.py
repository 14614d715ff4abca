"""The result of a triage, and its JSON: ``oomproof.triage/1``."""

from __future__ import annotations

from dataclasses import dataclass, field

from oomproof.triage.figures import Figures
from oomproof.triage.kinds import MEANING
from oomproof.triage.settings import Settings
from oomproof.triage.signatures import Confidence, Kind

SCHEMA = "oomproof.triage/1"
NO_TEXT = "there is no log text in it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One line that the result rests on; ``line`` is None where the source has no lines."""

    line: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """What kind of out-of-memory it was, how sure that is, why, and what to do."""

    kind: Kind
    confidence: Confidence
    why: str
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()
    figures: Figures = field(default_factory=Figures)
    settings: Settings = field(default_factory=Settings)
    rank: int | None = None  # whose out-of-memory it was, where the log tells
    cause: Kind | None = None  # with "other-rank": the kind of the other rank's
    ooms: int = 0  # out-of-memory messages in all
    survived: int = 0  # of them, those that the script went on from

    @property
    def is_oom(self) -> bool:
        """Return whether an out-of-memory ended it."""
        return self.kind != "not-oom"

    @property
    def meaning(self) -> str:
        """Return the kind in words."""
        return MEANING[self.kind]

    def to_json(self) -> dict[str, object]:
        """Return plain dicts, lists, strings and numbers."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "confidence": self.confidence,
            "why": self.why,
            "evidence": [{"line": item.line, "text": item.text} for item in self.evidence],
            "advice": list(self.advice),
            "figures": self.figures.to_json(),
            "settings": self.settings.to_json(),
            "rank": self.rank,
            "cause": self.cause,
            "ooms": self.ooms,
            "survived": self.survived,
        }
