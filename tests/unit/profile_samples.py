"""Profiles for the tests of whatever reads them: a small transformer's training, allocated and freed event by event."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurement_samples import T4, fitting, peak
from measurement_samples import step as measured_step

from oomproof.capture import write_capture
from oomproof.measure.measurement import Breakdown, Demand, Measurement, Outside
from oomproof.measure.profile import CATEGORIES, Block, Growth, Point, Profile, Segments, Stack, StepRow
from oomproof.units import KIB, MIB

HOSTILE = '</script><img src=x onerror="document.title=1">\x1b[31m'
PARTS = (("attn", "Attention", 4), ("mlp", "MLP", 8))


class Tape:
    """An allocator in small: what lives, and every point on the way."""

    def __init__(self, *, most_points: int = 4096) -> None:
        self.event = 0
        self.live: dict[int, Block] = {}
        self.born: list[Block] = []
        self.totals = [0] * len(CATEGORIES)
        self.reserved = 0
        self.step = 1
        self.phase = "init"
        self.points: list[Point] = []
        self.rows: list[StepRow] = []
        self.segments: list[Segments] = []
        self.best = (0, 0)  # bytes, event
        self.freed: dict[int, tuple[int, int, str]] = {}
        self.most_points = most_points

    def alloc(self, size: int, category: str, stack: Stack, module: str | None = None, **more: Any) -> int:
        """Take a block and return its number."""
        self.event += 1
        self.live[self.event] = Block(
            0x7F00_0000_0000 + 512 * self.event, size, category, self.step, self.phase, module, stack,
            more.get("forward_stack", False), more.get("name"), more.get("shape"), more.get("dtype", "float32"),
            self.event, None, None, None,
        )  # fmt: skip
        self.born.append(self.live[self.event])
        self._change(category, size)
        total = sum(self.totals)
        if total > self.reserved:
            grown = -(-(total - self.reserved) // (20 * MIB)) * 20 * MIB
            self.reserved += grown
            self.segments.append(Segments(self.step, module, stack, grown // (20 * MIB), grown))
        if total > self.best[0]:
            self.best = (total, self.event)
        self._point()
        return self.event

    def free(self, number: int) -> None:
        """Give a block back."""
        self.event += 1
        block = self.live.pop(number)
        self.freed[number] = (self.event, self.step, self.phase)
        self._change(block.category, -block.size_bytes)
        self._point()

    def _change(self, category: str, size: int) -> None:
        self.totals[CATEGORIES.index(category)] += size

    def _point(self) -> None:
        self.points.append(Point(self.event, 10 * self.event, self.step, self.phase, self.reserved, tuple(self.totals)))

    def end_step(self) -> None:
        """Close the step with a row."""
        mine = [point for point in self.points if point.step == self.step]
        top = max(mine, key=lambda point: sum(point.category_bytes))
        self.rows.append(StepRow(self.step, self.reserved, sum(self.totals), self.reserved, top.category_bytes))
        self.step += 1

    def profile(self, **changes: Any) -> Profile:
        """Return what was seen as a profile."""
        allocated, event = self.best
        slack = 1536 * KIB
        known = []
        for block in self.born:
            freed = self.freed.get(block.born, (None, None, None))
            if block.born > event or (freed[0] or event + 1) <= event:
                continue
            known.append(block._replace(freed=freed[0], freed_step=freed[1], freed_phase=freed[2]))
        bucket = max(1, len(self.points) // self.most_points)
        points = [
            max(self.points[i : i + bucket], key=lambda point: sum(point.category_bytes))
            for i in range(0, len(self.points), bucket)
        ]
        base = Profile(
            source="run",
            device=0,
            events=self.event,
            peak_event=event,
            allocated_bytes=allocated + slack,
            reserved_bytes=max(allocated + slack, *(point.reserved_bytes for point in self.points)),
            limit_bytes=T4.memory_bytes,
            blocks=tuple(sorted(known, key=lambda block: -block.size_bytes)),
            slack_bytes=slack,
            points=tuple(points),
            steps=tuple(self.rows),
            growth=(),
            segments=tuple(sorted(self.segments, key=lambda row: -row.size_bytes)),
            notes=("made for a test",),
        )
        return base._replace(**changes)


def training(
    *,
    layers: int = 4,
    steps: int = 3,
    width: int = 512,
    leak_bytes: int = 0,
    fragment_bytes: int = 0,
    vary: bool = False,
    small: int = 0,
    most_points: int = 4096,
    prefix: str = "",
) -> Profile:
    """Return the profile of a GPT-like model's training.

    ``leak_bytes``: kept per step for good. ``fragment_bytes``: reserved more per step. ``vary``: the second step's
    batch is half as large. ``small``: so many small blocks on top of each layer's forward pass.
    """
    tape = Tape(most_points=most_points)
    main = ("train.py:9 main", "train.py:40 <module>")
    parameters: list[int] = []
    owners: list[tuple[str, str, int, tuple[int, ...]]] = [
        (f"{prefix}transformer.wte", "Embedding", 64 * width * width // 8, (8 * width, width))
    ]
    for layer in range(layers):
        owners += [
            (f"{prefix}transformer.h.{layer}.{part}", kind, factor * width * width * 4, (factor * width, width))
            for part, kind, factor in PARTS
        ]
    for module, kind, size, shape in owners:
        parameters.append(
            tape.alloc(
                size, "parameter", ("model.py:12 __init__", *main), f"{module} ({kind})",
                name=f"{module}.weight", shape=shape,
            )
        )  # fmt: skip
    for number in range(1, steps + 1):
        batch = 8 if not (vary and number == 2) else 4
        tape.phase = "forward"
        batch_input = tape.alloc(batch * 64 * KIB, "input", ("train.py:20 batch", *main), None, shape=(batch, 512))
        kept: dict[str, list[int]] = {}
        for module, kind, _, _ in owners:
            where = (f"model.py:{30 + len(kind)} forward", "model.py:80 forward", "train.py:24 step", *main)
            place = f"{module} ({kind})"
            scratch = tape.alloc(batch * width * 4 * KIB, "temporary", where, place)
            for _ in range(2):
                size = batch * width * 8 * KIB
                block = tape.alloc(size, "activation", where, place, shape=(batch, 512, 4 * width))
                kept.setdefault(place, []).append(block)
            kept[place] += [tape.alloc(512, "activation", where, place, shape=(2,)) for _ in range(small)]
            tape.free(scratch)
        logits = tape.alloc(batch * width * 64 * KIB, "activation", ("model.py:95 loss", *main), "GPT",
                            name="output of lm_head", shape=(batch, 512, 8192), dtype="bfloat16")  # fmt: skip
        tape.phase = "backward"
        scratch = tape.alloc(batch * width * 64 * KIB, "temporary", (), "GPT")
        tape.free(logits)
        tape.free(scratch)
        gradients = []
        for module, kind, size, shape in reversed(owners):
            grad = tape.alloc(
                size, "gradient", ("model.py:33 forward", *main), f"{module} ({kind})",
                name=f"{module}.weight.grad", shape=shape, forward_stack=True,
            )  # fmt: skip
            gradients.append(grad)
            for block in kept[f"{module} ({kind})"]:
                tape.free(block)
        tape.phase = "optimizer"
        if number == 1:
            for state in ("exp_avg", "exp_avg_sq"):
                for module, kind, size, shape in owners:
                    tape.alloc(size, "optimizer_state", ("train.py:28 step", *main), f"{module} ({kind})",
                               name=f"{state} of {module}.weight", shape=shape)  # fmt: skip
        scratch = tape.alloc(4 * width * width, "temporary", ("train.py:28 step", *main), None)
        tape.free(scratch)
        for grad in gradients:
            tape.free(grad)
        tape.free(batch_input)
        tape.phase = "other"
        if leak_bytes:
            tape.alloc(leak_bytes, "unknown", ("train.py:33 log", *main), None)
        if fragment_bytes and number > 1:
            tape.reserved += fragment_bytes
            tape.segments.append(Segments(number, None, ("data.py:7 collate", *main), 1, fragment_bytes))
        tape.end_step()
    growth = ()
    if leak_bytes and steps >= 3:
        growth = (Growth(("train.py:33 log", *main), None, "unknown", steps, steps * leak_bytes, steps, 1, steps),)
    return tape.profile(growth=growth)


def from_snapshot(**changes: Any) -> Profile:
    """Return a profile as a memory snapshot gives it: no steps, phases, modules, shapes or categories."""
    known = training()
    blocks = tuple(
        block._replace(
            category="unknown", step=None, phase=None, module=None, name=None, shape=None, dtype=None,
            freed_step=None, freed_phase=None, forward_stack=False,
        )
        for block in known.blocks
    )  # fmt: skip
    points = tuple(
        point._replace(step=None, phase=None, category_bytes=(*[0] * (len(CATEGORIES) - 1), sum(point.category_bytes)))
        for point in known.points
    )
    segments = tuple(row._replace(step=None) for row in known.segments)
    return known._replace(
        source="snapshot", blocks=blocks, points=points, segments=segments, steps=(), limit_bytes=None, **changes
    )


def bare() -> Profile:
    """Return a profile of a process that allocated next to nothing and recorded no events."""
    return Profile("run", 0, 0, 0, 0, 0, None, (), 0, (), (), (), (), ())


def hostile() -> Profile:
    """Return a profile whose every text tries to leave the page or move the cursor."""
    known = training()
    stack = tuple(f"{HOSTILE}.py:{n} {HOSTILE}" for n in range(3))
    return known._replace(
        blocks=tuple(
            block._replace(module=f"{HOSTILE}.h.{i % 5} ({HOSTILE})", stack=stack, name=HOSTILE, dtype=HOSTILE)
            for i, block in enumerate(known.blocks)
        ),
        growth=(Growth(stack, HOSTILE, "unknown", 3, 3 * MIB, 3, 1, 3),),
        segments=tuple(row._replace(stack=stack) for row in known.segments),
        notes=(HOSTILE,),
    )


def large() -> Profile:
    """Return a profile of 100,000 points and as many blocks."""
    known = training(layers=60, steps=2, width=256, small=827, most_points=10**9)
    return known._replace(points=known.points[-100_000:])


def measured(profile: Profile, **changes: Any) -> Measurement:
    """Return the Measurement that would lie beside a profile."""
    totals = [0] * len(CATEGORIES)
    for block in profile.blocks:
        totals[CATEGORIES.index(block.category)] += block.size_bytes
    totals[CATEGORIES.index("unknown")] += profile.slack_bytes
    top = peak(profile.allocated_bytes, profile.reserved_bytes, step=2, phase="backward", module="GPT")
    base: dict[str, Any] = {
        "peak": top,
        "demand": Demand(
            allocated_bytes=top.allocated_bytes, reserved_bytes=top.reserved_bytes, device_bytes=top.device_bytes
        ),
        "breakdown": Breakdown(**{f"{name}_bytes": size for name, size in zip(CATEGORIES, totals, strict=True)}),
        "outside": Outside(cached_bytes=profile.reserved_bytes - profile.allocated_bytes, context_bytes=100 * MIB),
        "per_step": tuple(measured_step(row.step, sum(row.category_bytes)) for row in profile.steps),
        "steps": len(profile.steps),
    }
    return fitting(**{**base, **changes})


def written(path: Path, profile: Profile | None = None, **changes: Any) -> Path:
    """Write a capture with ``profile`` to ``path`` and return the path."""
    profile = training() if profile is None else profile
    write_capture(path, measured(profile, **changes), profile=profile)
    return path


def every() -> Iterator[tuple[str, Profile]]:
    """Yield each kind of profile that a report must be able to show, with its name."""
    yield "training", training()
    yield "leaking", training(steps=8, leak_bytes=24 * MIB)
    yield "fragmenting", training(steps=8, fragment_bytes=60 * MIB)
    yield "varying", training(steps=6, vary=True)
    yield "one step", training(steps=1)
    yield "snapshot", from_snapshot()
    yield "bare", bare()
    yield "hostile", hostile()
