"""What a person would write instead of applying a plan, with the models and optimizers that it is for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from oomproof.plan.facts import Facts
from oomproof.plan.planning import Planned
from oomproof.plan.technique import Change
from oomproof.report.words import clean


def code(planned: Planned, framework: str) -> str:
    """Return the code for a framework; that of plain PyTorch where a change has no way of the framework's own."""
    assert planned.plan is not None
    facts, winner = planned.facts, planned.found.winner
    several = len(facts.models) > 1 or len(facts.optimizers) > 1
    parts = []
    for change in planned.plan.changes:
        lines = [f"# {clean(change.label)}: {change.technique.title}", f"# {change.technique.source}"]
        if several and winner is not None:
            told = [entry for entry in winner.said if entry["technique"] == change.name]
            lines += [f"# in this script: {clean(entry['what'])} ({clean(entry['where'])})" for entry in told]
        for number, (comments, text) in enumerate(_texts(change, framework, facts)):
            lines += [*([""] if number else []), *(f"# {comment}" for comment in comments), text]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _text(change: Change, framework: str, facts: Facts) -> str:
    text = change.technique.code(change.options, framework, facts)
    if text is None and framework != "code":
        text = change.technique.code(change.options, "code", facts)
    return (text or "# nothing to write by hand").rstrip()


def _texts(change: Change, framework: str, facts: Facts) -> Iterator[tuple[list[str], str]]:
    """Yield each text that differs between the models and optimizers of a script, and comments on which it is for."""
    owners = _owners(facts)
    found: dict[str, list[tuple[int, int]]] = {}
    for i, model in enumerate(facts.models):
        for j, optimizer in enumerate(facts.optimizers):
            one = facts._replace(models=(model,), optimizers=(optimizer,))
            if owners[j] in (None, i) and change.technique.unfit(one) is None:
                found.setdefault(_text(change, framework, one), []).append((i, j))
    for text, pairs in found.items():
        models, optimizers = sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})
        of_optimizer = re.search(r"\boptimizer\b|\boptim\.", text) is not None
        of_model = re.search(r"\bmodel\b", text) is not None or (not of_optimizer and len(models) < len(facts.models))
        if of_optimizer and len(optimizers) == 1 and owners[optimizers[0]] is not None:
            of_model = False  # the optimizer's comment says it
        comments = _which("model", model_names(facts), models) if of_model else []
        comments += _which("optimizer", optimizer_names(facts), optimizers) if of_optimizer else []
        yield comments, text
    if not found:
        yield [], _text(change, framework, facts)


def _which(word: str, names: Sequence[str], places: Sequence[int]) -> list[str]:
    """Return the comment on what a word of the code stands for, where the script has several of it."""
    if len(names) == 1:
        return []
    chosen = ", ".join(names[place] for place in places)
    return [f"{word}: {chosen}" if len(places) == 1 else f"for each {word}: {chosen}"]


def _owners(facts: Facts) -> list[int | None]:
    """Return the model whose parameters each optimizer steps over, None where it is not certain."""
    owners = []
    for optimizer in facts.optimizers:
        same = [place for place, model in enumerate(facts.models) if model.trainable == optimizer.parameters]
        owners.append(same[0] if len(same) == 1 else None)
    return owners


def model_names(facts: Facts) -> list[str]:
    """Return the classes of the models, with what tells models of one class apart."""
    return [
        f"{name} ({model.parameters:,} parameters)"
        for name, model in zip(_apart(clean(m.kind) for m in facts.models), facts.models, strict=True)
    ]


def optimizer_names(facts: Facts) -> list[str]:
    """Return the classes of the optimizers, with the model whose parameters each steps over where that is certain."""
    names = _apart(clean(m.kind) for m in facts.models)
    return [
        f"{clean(optimizer.kind)} of {f'{optimizer.parameters:,} parameters' if owner is None else names[owner]}"
        for optimizer, owner in zip(facts.optimizers, _owners(facts), strict=True)
    ]


def _apart(kinds: Iterable[str]) -> list[str]:
    """Return names with a number after those that are there more than once."""
    all_of = list(kinds)
    counts, seen, found = Counter(all_of), Counter[str](), []
    for kind in all_of:
        seen[kind] += 1
        found.append(kind if counts[kind] == 1 else f"{kind} no. {seen[kind]}")
    return found
