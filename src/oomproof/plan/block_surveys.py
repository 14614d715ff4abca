"""From runs with one action applied to all blocks to the problem of choosing one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oomproof.plan.blocks import Action, BlockGroup, Problem


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
    surveys: Mapping[str, Survey], seconds: Mapping[str, Sequence[float]], *, gradients_resident: bool = False
) -> Problem:
    """Return the problem that runs with one action each describe; ``seconds`` are per action and block.

    What should not depend on the action is taken at its highest. Blocks with the same figures in a row become one
    group. Raises ValueError when the runs have different numbers of blocks.
    """
    counts = {name: len(survey.blocks) for name, survey in surveys.items()}
    counts |= {f"seconds of {name}": len(values) for name, values in seconds.items()}
    if not surveys or len(set(counts.values())) != 1 or set(seconds) != set(surveys):
        raise ValueError(f"surveys and seconds do not cover the same actions and blocks: {counts}")
    groups: list[BlockGroup] = []
    for index in range(next(iter(counts.values()))):
        actions = tuple(
            Action(
                name=name,
                retained_bytes=survey.blocks[index].retained_bytes,
                forward_transient_bytes=survey.blocks[index].forward_transient_bytes,
                backward_transient_bytes=survey.blocks[index].backward_transient_bytes,
                seconds=seconds[name][index],
            )
            for name, survey in surveys.items()
        )
        gradient = max(survey.blocks[index].gradient_bytes for survey in surveys.values())
        if groups and groups[-1].actions == actions and groups[-1].gradient_bytes == gradient:
            groups[-1] = replace(groups[-1], count=groups[-1].count + 1)
        else:
            groups.append(BlockGroup(actions=actions, gradient_bytes=gradient))

    def highest(name: str) -> int:
        return max(int(getattr(survey, name)) for survey in surveys.values())

    return Problem(
        groups=tuple(groups),
        base_bytes=highest("base_bytes"),
        tail_bytes=highest("tail_bytes"),
        tail_left_bytes=highest("tail_left_bytes"),
        front_forward_bytes=highest("front_forward_bytes"),
        front_backward_bytes=highest("front_backward_bytes"),
        optimizer_transient_bytes=highest("optimizer_transient_bytes"),
        gradients_resident=gradients_resident,
    )
