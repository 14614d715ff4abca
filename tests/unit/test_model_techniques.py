"""Techniques that change the model: when they make no sense, and what a person would write instead."""

from __future__ import annotations

import ast

import pytest

from oomproof.plan.facts import BlockGroup, Facts, Model
from oomproof.plan.technique import FRAMEWORKS, techniques

NAMES = ("int8-frozen", "lora", "prune-channels", "qlora", "share-blocks")
PACKAGES = {"peft": "0.21", "bitsandbytes": "0.50", "torchao": "0.18", "torch-pruning": "1.6"}
BLOCKS = BlockGroup("h", "Block", tuple(f"h.{place}" for place in range(8)), 800)
MODEL = Model(
    kind="Net", module="__main__", parameters=100, trainable=90, parameter_bytes=400, dtypes=("float32",),
    blocks=(BLOCKS,), linear_layers=5, convolutions=3, frozen_linear_bytes=40,
)  # fmt: skip
FACTS = Facts(models=(MODEL,), packages=PACKAGES)


@pytest.mark.parametrize("name", NAMES)
def test_they_are_told_apart_from_what_keeps_the_model(name: str) -> None:
    technique = techniques()[name]
    assert technique.fidelity == "changes-model"
    assert technique.keeps
    assert technique.unfit(FACTS) is None
    assert list(technique.variants(FACTS))
    assert technique.caution(FACTS, {})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_code_is_code(name: str, framework: str) -> None:
    technique = techniques()[name]
    for options in technique.variants(FACTS):
        text = technique.code(options, framework, FACTS)
        if text is not None:
            ast.parse(text)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"share-blocks"}))
def test_a_missing_library_is_named_with_what_to_install(name: str) -> None:
    technique = techniques()[name]
    reason = technique.unfit(FACTS._replace(packages={}))
    assert reason is not None
    assert f"pip install {technique.extra}" in reason
    assert "oomproof[" in reason


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("lora", {"linear_layers": 1, "head": "fc"}, "no linear layers besides a head"),
        ("qlora", {"linear_layers": 0}, "no linear layers besides a head"),
        ("share-blocks", {"blocks": ()}, "no repeated blocks"),
        ("int8-frozen", {"frozen_linear_bytes": 0}, "no frozen linear layers"),
        ("prune-channels", {"convolutions": 0}, "no convolutions"),
    ],
)
def test_a_model_that_has_nothing_to_change_is_said_to_have_nothing(name: str, change: dict, reason: str) -> None:
    said = techniques()[name].unfit(FACTS._replace(models=(MODEL._replace(**change),)))
    assert said is not None
    assert reason in said


def test_frozen_layers_beside_the_trained_model_count() -> None:
    """A teacher or a text encoder is never trained."""
    facts = FACTS._replace(models=(MODEL._replace(frozen_linear_bytes=0),), frozen_linear_bytes=40)
    assert techniques()["int8-frozen"].unfit(facts) is None


def test_sharing_goes_from_half_as_many_sets_to_one() -> None:
    assert list(techniques()["share-blocks"].variants(FACTS)) == [
        {"groups": groups, "model": "Net"} for groups in (4, 2, 1)
    ]


def test_one_of_several_models_is_named() -> None:
    """With a GAN each technique is for one model, which its options name."""
    other = MODEL._replace(kind="Critic", blocks=(), convolutions=0, parameters=10)
    facts = FACTS._replace(models=(other, MODEL))
    for name in ("prune-channels", "share-blocks", "qlora"):
        assert all(options["model"] == "Net" for options in techniques()[name].variants(facts))


def test_facts_survive_a_file() -> None:
    facts = FACTS._replace(frozen_linear_bytes=40)
    assert Facts.from_json(facts.to_json()) == facts
