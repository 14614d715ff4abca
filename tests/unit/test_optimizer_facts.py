"""Optimizer techniques: for which scripts, with which options, and the code that a person would write."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from oomproof.plan.facts import Facts, Model, Optimizer
from oomproof.plan.optimizers import STATES
from oomproof.plan.technique import FIDELITIES, FRAMEWORKS, techniques

NAMES = (*sorted(STATES), "optimizer-implementation", "step-in-backward", "clear-gradients")
EVERYTHING = {"bitsandbytes": "0.50.2", "torchao": "0.18.0", "lion-pytorch": "0.2.5", "transformers": "5.24.0"}


def facts(kind: str = "AdamW", module: str = "torch.optim.adamw", **changed: Any) -> Facts:
    options = changed.pop("options", {"lr": 1e-3, "weight_decay": 0.01, "foreach": None, "fused": None})
    changed.setdefault("models", (Model("GPT", "train", 10, 10, 40, ("float32",)),))
    changed.setdefault("packages", EVERYTHING)
    return Facts(optimizers=(Optimizer(kind, module, options, 10),), torch="2.14.1", **changed)


FIT = facts(uses=frozenset(("late-zero-grad", "keeps-gradients")))


@pytest.mark.parametrize("name", NAMES)
def test_each_fits_a_plain_script_and_says_what_it_is(name: str) -> None:
    technique = techniques()[name]
    assert technique.unfit(FIT) is None
    variants = list(technique.variants(FIT))
    assert variants
    for options in variants:
        assert technique.fidelity_of(options) in FIDELITIES
    assert technique.keeps
    assert technique.source.startswith("https://")
    for other in technique.excludes & techniques().keys():
        assert name != other


@pytest.mark.parametrize("name", NAMES)
def test_its_code_is_python_or_json(name: str) -> None:
    """In each framework for every option, up to the dots that a person fills in."""
    technique = techniques()[name]
    for options in technique.variants(FIT):
        assert technique.code(options, "code", FIT)
        for framework in FRAMEWORKS:
            code = technique.code(options, framework, FIT)
            if code is None:
                continue
            if framework == "deepspeed":
                json.loads(code.replace("...", "0"))
            else:
                # keywords may follow dots in prose, not in Python
                ast.parse(code.replace("(..., ", "(").replace(", ...", ""))


@pytest.mark.parametrize("name", sorted(STATES - {"optimizer-bf16-states"}))
def test_custom_optimizers_are_left_alone_with_the_reason(name: str) -> None:
    reason = techniques()[name].unfit(facts("Sophia", "train"))
    assert reason is not None
    assert "the script's optimizer is Sophia (train)" in reason


def test_a_missing_library_is_named_with_what_to_install() -> None:
    bare = facts(packages={})
    assert techniques()["optimizer-8bit"].unfit(bare) == (
        "bitsandbytes or torchao is not beside the script's torch; "
        "pip install bitsandbytes (or torchao; both: oomproof[optimizers])"
    )
    assert "pip install bitsandbytes" in (techniques()["optimizer-paged"].unfit(bare) or "")
    assert "pip install lion-pytorch" in (techniques()["lion"].unfit(bare) or "")


def test_torchao_takes_the_place_of_bitsandbytes_where_that_would_train_otherwise() -> None:
    """bitsandbytes' Adam decouples weight decay, and it does not know FSDP's tensors."""
    adam = facts("Adam", "torch.optim.adam")
    assert [o["library"] for o in techniques()["optimizer-8bit"].variants(adam)] == ["torchao", "torchao"]
    sharded = facts(uses=frozenset(("fsdp",)))
    assert [o["library"] for o in techniques()["optimizer-8bit"].variants(sharded)] == ["torchao", "torchao"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"uses": frozenset(("clip-grad-norm",))}, "the script clips the norm of all gradients"),
        ({"uses": frozenset(("grad-scaler",))}, "the script unscales and checks gradients (GradScaler)"),
        ({"uses": frozenset(("ddp",))}, "the script exchanges gradients between ranks after they are there"),
        ({"backwards_per_step": 4}, "a step takes the gradients of 4 backward passes"),
    ],
)
def test_gradients_that_are_needed_stay(changed: dict[str, Any], reason: str) -> None:
    script = facts(**changed)
    assert techniques()["step-in-backward"].unfit(script) == reason
    assert list(techniques()["offload-optimizer"].variants(script)) == [{"gradients": False}]


def test_bf16_parameters_have_bf16_states_already() -> None:
    script = facts(models=(Model("GPT", "train", 10, 10, 20, ("bfloat16",)),))
    assert "in bfloat16" in (techniques()["optimizer-bf16-states"].unfit(script) or "")


@pytest.mark.parametrize("name", ["adafactor", "lion", "sgd"])
def test_another_optimizer_says_that_the_rate_needs_a_change(name: str) -> None:
    technique = techniques()[name]
    assert technique.fidelity == "changes-model"
    for options in technique.variants(FIT):
        assert "rate" in (technique.caution(FIT, options) or "")
