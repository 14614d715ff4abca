"""A log's triage: which of its errors ended the run, and which kind of out-of-memory that was."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from oomproof.triage import events
from oomproof.triage.advice import advise
from oomproof.triage.events import Event, Reader
from oomproof.triage.kinds import Finding, classify, judge
from oomproof.triage.lines import Line, read_lines
from oomproof.triage.result import NO_TEXT, Evidence, Triage
from oomproof.triage.settings import Settings
from oomproof.triage.signatures import Confidence

#: So many different steps, epochs or losses after an error mean that the script went on from it. The bars that tqdm
#: draws once more as it dies repeat their last count.
WENT_ON = 3
#: Arguments are printed at the start: so much is read whatever its words.
HEAD_BYTES = 2**20
#: Lines after a worthwhile one that are read whatever their words: frames, and messages over several lines.
NEAR_LINES = 60
LAST_LINES = 12
MAX_EVENTS = 500
#: A log has more characters of text than so many times those that are none; any binary file has fewer.
MOST_OTHERS = 3
MAX_RANKS = 4096
MAX_EVIDENCE_TEXT = 600

_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f\ufffd]")

#: Every line that matters has one of them, in lower case. Progress lines must not, or large logs become slow: so it is
#: not "memory" and "error", which many print in each step.
_WORDS = (
    *("traceback", "error:", "error]", "error\n", "error\r", "error (", "error'", 'error"', "exception", "interrupt"),
    *("f memory", "ofmemory", "of_memory", "memoryerror", "memory limit", "memlimit", "low on memory", "exhausted"),
    *("memory pressure", "oom_kill", "oom-kill", "oomkill", "oom kill", "oom when", "tried to allocate", "bad_alloc"),
    *(
        "alloc_conf",
        "nvml_",
        "_status_",
        "outofresources",
        "winerror",
        "error 1455",
        "paging file",
        "/torch_",
        "failed",
    ),
    *("fatal", "segmentation", "crashed", "killed", "killing", "sigkill", "signal", "exit", "returned", "status"),
    *("timeout", "timed out", "time limit", "peer", "broken pipe", "bus error", "remote process", "communicator"),
    *("root cause", "elastic", 'file "', "uncaught", "ran out"),
)
_WORDS_IN_BYTES = tuple(word.encode() for word in _WORDS)


@dataclass(slots=True)
class Cluster:
    """Errors without progress between them."""

    items: list[Event] = field(default_factory=list)
    steps: set[str] = field(default_factory=set)
    ooms: int = 0
    launcher: bool = False

    def of(self, what: events.What) -> list[Event]:
        """Return the events of one sort, in order."""
        return [event for event in self.items if event.what == what]


class LogReader:
    """Reads a log line by line and keeps what its triage needs, in bounded memory."""

    def __init__(self) -> None:
        self.settings = Settings()
        self._cluster = Cluster()
        self._left: Cluster | None = None  # the last cluster that the script went on from and that raised an OOM
        self._ooms = self._survived = 0
        self._readers: dict[int | None, Reader] = {}
        self._open: dict[int | None, Event] = {}
        self._looked_at = 0
        self._near = 0
        self._newest: tuple[Event, int] | None = None  # and the last line of its message so far
        self._text_characters = self._other_characters = 0
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    def interesting(self, stretch: bytes) -> bool:
        """Return whether a stretch, in lower case, must be read line by line."""
        self._looked_at += len(stretch)
        if self._looked_at <= HEAD_BYTES or self._cluster.items or self._near > 0:
            return True
        return any(word in stretch for word in _WORDS_IN_BYTES)

    def take(self, line: Line) -> None:
        """Take the next line."""
        self._last.append(line.text[:400])
        if self._looked_at <= HEAD_BYTES:
            others = len(_NO_TEXT.findall(line.text))
            self._other_characters += others
            self._text_characters += len(line.text.strip()) - others
        low = line.text.lower()
        if any(word in low for word in _WORDS) or low.endswith("error"):
            self._near = NEAR_LINES
        elif self._near > 0:
            self._near -= 1
        else:
            if self._looked_at <= HEAD_BYTES:
                self.settings.look_at(line.text)
            if self._cluster.items:
                self._see_progress(*events.unprefixed(line.text))
            return
        text, rank = events.unprefixed(line.text)
        self.settings.look_at(text)
        reader = self._readers.get(rank)
        if reader is None:
            reader = self._readers[rank] = Reader()
            if len(self._readers) > MAX_RANKS:
                self._readers.pop(next(iter(self._readers)))
        if self._cluster.items and not self._cluster.launcher:
            self._cluster.launcher = bool(events.LAUNCHER.search(text))
        event = events.read(text, line.number, rank, reader)
        if event is not None:
            if event.signature is not None and event.signature.bare:
                # Frames of IPython and rich are not Python's own: the lines before it tell all the same.
                event.context += tuple(self._last)
            self._add(event, reader, line)
            return
        held = self._open.get(rank)
        if held is None and rank is None and self._newest is not None and self._newest[1] + 1 == line.number:
            held = self._newest[0]  # the launcher put the rank before the message's first line only
        if held is not None:
            if events.belongs(held, text):
                held.text += "\n" + text.strip()[:1000]
                held.room -= 1
                self._newest = (held, line.number)
            else:
                self._open.pop(held.rank, None)
        if self._cluster.items:
            self._see_progress(text, rank)

    def _add(self, event: Event, reader: Reader, line: Line) -> None:
        chain, reader.chain = reader.chain, None
        items = self._cluster.items
        if (
            line.continued
            and items
            and items[-1].line == line.number
            and items[-1].core
            and items[-1].core in event.text
        ):
            # The same message again, in the overlap of two pieces of one long line; in the second it is whole.
            last = items[-1]
            last.text, last.signature, last.core = event.text, event.signature, event.core
            return
        before = self._before(event)
        if chain is not None and before is not None and before.what == "oom" and event.what != "oom":
            before.ending, before.direct = event.text, "direct cause" in chain
            return
        if event.what == "oom":
            held = self._open.get(event.rank)
            if held is not None and self._same(held, event):
                held.text += "\n" + event.text
                if held.weak and not event.weak:
                    held.signature = event.signature
                return
            self._ooms += 1
            self._cluster.ooms += 1
        self._cluster.steps.clear()
        if len(items) >= MAX_EVENTS:
            items.pop(MAX_EVENTS // 2)
        items.append(event)
        self._open[event.rank] = event
        self._newest = (event, event.line)
        if len(self._open) > MAX_RANKS:
            self._open.pop(next(iter(self._open)))

    def _before(self, event: Event) -> Event | None:
        same = (item for item in reversed(self._cluster.items) if item.rank == event.rank)
        return next(same, None)

    @staticmethod
    def _same(held: Event, event: Event) -> bool:
        """Return whether ``event`` only continues the message of ``held``: NCCL and kill reports have several lines."""
        if held.what != "oom" or held.signature is None or event.signature is None or event.raised:
            return False
        return (
            held.line + 2 >= event.line and held.signature.kind == event.signature.kind and not event.signature.figured
        )

    def _see_progress(self, text: str, rank: int | None) -> None:
        ranks = {event.rank for event in self._cluster.items if event.what != "fall-out"}
        if rank is not None and None not in ranks and rank not in ranks:
            return  # other ranks print until they notice
        step = events.progress(text)
        if step is None:
            return
        self._cluster.steps.add(step)
        if len(self._cluster.steps) >= WENT_ON:
            self._survived += self._cluster.ooms
            if any(event.raised for event in self._cluster.of("oom")):
                self._left = self._cluster
            self._cluster = Cluster()
            self._open.clear()
            self._newest = None

    def result(self) -> Triage:
        """Return the triage of all lines taken."""
        chosen, cluster, late = self._chosen()
        if chosen is None:
            return self._not_oom()
        return self._of(chosen, _finding(chosen), cluster, late=late)

    def _chosen(self) -> tuple[Event | None, Cluster, bool]:
        cluster = self._cluster
        ooms = [event for event in cluster.of("oom") if not (event.weak and cluster.of("error"))]
        errors = cluster.of("error")
        if ooms and (not errors or _decides(ooms, errors[-1], cluster)):
            # One that a logger printed may have been caught; the first that was raised was not.
            strong = [event for event in ooms if not event.weak] or ooms
            return next((event for event in strong if event.raised), strong[0]), cluster, False
        peers = [event for event in cluster.of("fall-out") if events.PEER.search(event.text)]
        if not errors and peers and self._left is not None:
            # One rank died; the others went on until the next collective timed out.
            first = next(event for event in self._left.of("oom") if event.raised)
            if any(event.rank != first.rank for event in peers):
                return first, self._left, True
        return None, cluster, False

    def _of(self, chosen: Event, finding: Finding, cluster: Cluster, *, late: bool) -> Triage:
        evidence = [_evidence(chosen)]
        why, confidence = finding.why, finding.confidence
        kind, cause = finding.kind, None
        if chosen.ending is not None:
            evidence.append(Evidence(line=None, text=f"which led to: {_short(chosen.ending)}"))
            if not chosen.direct:
                confidence = _at_most(confidence, "medium")
        first = cluster.items[0]
        if (
            first.what == "fall-out"
            and (first.raised or "[E" in first.text)  # sockets also warn, at the start of runs that go well
            and events.PEER.search(first.text)
            and first.rank != chosen.rank
            and chosen.rank is not None
        ):
            kind, cause = "other-rank", finding.kind
            evidence.insert(0, _evidence(first))
            confidence = _at_most(confidence, "medium" if finding.confidence != "low" else "low")
            why = f"this rank lost its peer, and rank {chosen.rank} had an out-of-memory of its own: {finding.why}"
        elif peers := [event for event in cluster.of("fall-out") if event is not first and event.rank != chosen.rank]:
            evidence.append(_evidence(peers[0]))
        if late:
            confidence = _at_most(confidence, "medium")
        survived = self._survived - (1 if late else 0)
        result = Triage(
            kind=kind,
            confidence=confidence,
            why=why,
            evidence=tuple(evidence),
            figures=finding.figures,
            settings=self.settings,
            rank=chosen.rank,
            cause=cause,
            ooms=self._ooms,
            survived=survived,
        )
        return replace(result, advice=advise(result, finding.signature, chosen.context))

    def _has_text(self) -> bool:
        """Return whether what was read is a log at all, by its characters at the start."""
        return self._ooms > 0 or self._text_characters > MOST_OTHERS * self._other_characters

    def _not_oom(self) -> Triage:
        errors = self._cluster.of("error") or self._cluster.of("fall-out")
        survived = self._survived + self._cluster.ooms
        confidence: Confidence = "high"
        if not errors:
            why = "the log has no out-of-memory"
            if not self._has_text():
                why, confidence = NO_TEXT, "low"
            elif self._ooms:
                why, confidence = "the script went on from each, and no error ended it", "medium"
            evidence: tuple[Evidence, ...] = ()
        else:
            last = errors[-1]
            around = "\n".join(event.text for event in errors)
            known = next((meaning for pattern, meaning in events.LOOKALIKES if pattern.search(around)), None)
            why = known or "another error ended it"
            evidence = (_evidence(last),)
            if known is None and events.PEER.search(last.text):
                why = "this rank lost its peer; what ended the other is in the other's log"
                confidence = "low"
            elif self._cluster.ooms:
                confidence = "medium"
        result = Triage(
            kind="not-oom",
            confidence=confidence,
            why=why,
            evidence=evidence,
            settings=self.settings,
            ooms=self._ooms,
            survived=survived,
        )
        return replace(result, advice=advise(result, "", ()))


def triage_log(file: BinaryIO) -> Triage:
    """Return the triage of a log, read as a stream in bounded memory."""
    reader = LogReader()
    for line in read_lines(file, reader.interesting):
        reader.take(line)
    return reader.result()


def _decides(ooms: list[Event], error: Event, cluster: Cluster) -> bool:
    """Return whether an out-of-memory ended it though another error is there.

    A process ends with its last error. With several processes it is the first to die, and the others' errors may come
    after it.
    """
    if ooms[-1].line > error.line or (ooms[-1].line == error.line and cluster.items.index(ooms[-1]) > 0):
        return True
    raised = [event for event in ooms if event.raised]
    if not raised:
        return False
    if raised[0].rank is not None and error.rank is not None:
        return raised[0].rank != error.rank
    return cluster.launcher


def _finding(event: Event) -> Finding:
    """Judge an event by its first line's sentence; a vague one may be made precise by the lines that follow."""
    assert event.signature is not None  # only out-of-memories are judged
    if event.signature.loose and (finding := classify(event.text, event.context)) is not None:
        return finding
    return judge(event.signature, event.text, event.context)


def _evidence(event: Event) -> Evidence:
    return Evidence(line=event.line, text=_short(event.text))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_EVIDENCE_TEXT else line[: MAX_EVIDENCE_TEXT - 3].rstrip() + "..."


def _at_most(confidence: Confidence, limit: Confidence) -> Confidence:
    order: list[Confidence] = ["low", "medium", "high"]
    return min(confidence, limit, key=order.index)
