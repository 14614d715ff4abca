"""From runs with one action applied to all blocks to the problem of choosing one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oomproof.plan.blocks import Action, BlockGroup, Observation, Problem

#: PyTorch's allocator doesn't split less than 1 MiB off a cached block, so equal blocks of a model differ by chance.
ALIKE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedBlock:
    """What a run showed of one block under the action that was applied to it."""

    retained_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a run showed with one action applied to all blocks; the figures are those of ``Problem``."""

    blocks: tuple[SurveyedBlock, ...]
    base_bytes: int
    tail_bytes: int
    tail_left_bytes: int
    front_forward_bytes: int
    front_backward_bytes: int
    optimizer_transient_bytes: int
    peak_bytes: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Survey:
        """Read what ``survey_blocks.BlockSurvey.result`` gives."""
        figures = {name: int(value) for name, value in data.items() if name != "blocks"}
        blocks = [{name: int(value) for name, value in block.items()} for block in data["blocks"]]
        return cls(blocks=tuple(SurveyedBlock(**block) for block in blocks), **figures)


def problem_from_surveys(
    surveys: Mapping[str, Survey],
    seconds: Mapping[str, Sequence[float]],
    *,
    gradients_resident: bool = False,
    alike_bytes: int = ALIKE_BYTES,
) -> Problem:
    """Return the problem that runs with one action each describe; ``seconds`` are per action and block.

    Successive blocks become one group when each figure differs by at most ``alike_bytes``; what the group retains
    and leaves is then the mean, its transients are the highest. What should not depend on the action is taken at its
    highest. The runs themselves are observations. Raises ValueError when they have different numbers of blocks.
    """
    counts = {name: len(survey.blocks) for name, survey in surveys.items()}
    counts |= {f"seconds of {name}": len(values) for name, values in seconds.items()}
    if not surveys or len(set(counts.values())) != 1 or set(seconds) != set(surveys):
        raise ValueError(f"surveys and seconds do not cover the same actions and blocks: {counts}")
    count = next(iter(counts.values()))
    groups: list[list[int]] = []
    for index in range(count):
        if groups and _alike(surveys, seconds, [*groups[-1], index], alike_bytes):
            groups[-1].append(index)
        else:
            groups.append([index])

    def highest(name: str) -> int:
        return max(int(getattr(survey, name)) for survey in surveys.values())

    return Problem(
        groups=tuple(_group(surveys, seconds, members) for members in groups),
        base_bytes=highest("base_bytes"),
        tail_bytes=highest("tail_bytes"),
        tail_left_bytes=highest("tail_left_bytes"),
        front_forward_bytes=highest("front_forward_bytes"),
        front_backward_bytes=highest("front_backward_bytes"),
        optimizer_transient_bytes=highest("optimizer_transient_bytes"),
        gradients_resident=gradients_resident,
        observations=tuple(
            Observation(actions=(name,) * count, peak_bytes=survey.peak_bytes, phase=None)
            for name, survey in surveys.items()
        ),
    )


_FIGURES = ("retained_bytes", "forward_transient_bytes", "backward_transient_bytes", "gradient_bytes")


def _alike(
    surveys: Mapping[str, Survey], seconds: Mapping[str, Sequence[float]], members: Sequence[int], alike_bytes: int
) -> bool:
    for name, survey in surveys.items():
        if len({seconds[name][index] for index in members}) > 1:
            return False
        for figure in _FIGURES:
            values = [getattr(survey.blocks[index], figure) for index in members]
            if max(values) - min(values) > alike_bytes:
                return False
    return True


def _group(surveys: Mapping[str, Survey], seconds: Mapping[str, Sequence[float]], members: Sequence[int]) -> BlockGroup:
    def figures(survey: Survey, figure: str) -> list[int]:
        return [getattr(survey.blocks[index], figure) for index in members]

    def mean(survey: Survey, figure: str) -> int:
        return -(-sum(figures(survey, figure)) // len(members))

    return BlockGroup(
        actions=tuple(
            Action(
                name=name,
                retained_bytes=mean(survey, "retained_bytes"),
                forward_transient_bytes=max(figures(survey, "forward_transient_bytes")),
                backward_transient_bytes=max(figures(survey, "backward_transient_bytes")),
                seconds=seconds[name][members[0]],
            )
            for name, survey in surveys.items()
        ),
        gradient_bytes=max(mean(survey, "gradient_bytes") for survey in surveys.values()),
        count=len(members),
    )
