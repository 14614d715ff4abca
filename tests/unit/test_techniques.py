"""plan/techniques: what each says of itself holds together."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from typing import Any

import pytest

from oomproof.measure.profile import CATEGORIES
from oomproof.plan.facts import BlockGroup, Facts, Loader, Model, Optimizer
from oomproof.plan.search import EVERYTHING
from oomproof.plan.technique import FIDELITIES, FRAMEWORKS, Change, Technique, conflict, in_code, techniques

BLOCKS = BlockGroup("transformer.h", "Block", ("transformer.h.0", "transformer.h.1"), 1 << 20)

#: A script that nearly every technique makes sense for.
FACTS = Facts(
    models=(
        Model(
            kind="GPT",
            module="model",
            parameters=1_000_000,
            trainable=1_000_000,
            parameter_bytes=4_000_000,
            dtypes=("float32",),
            blocks=(BLOCKS,),
            head="lm_head",
            vocabulary=50257,
            convolutions=2,
            linear_layers=8,
        ),
    ),
    optimizers=(Optimizer("AdamW", "torch.optim.adamw", {"lr": 1e-3, "foreach": None, "fused": None}, 1_000_000),),
    loaders=(Loader(16, 1000, True, True),),
    packages=dict.fromkeys(
        ("bitsandbytes", "torchao", "peft", "liger-kernel", "cut-cross-entropy", "torch-pruning", "transformers"), "1.0"
    ),
    torch="2.14.1+cu130",
    capability=(9, 0),
    gpus=2,
)
ALL = list(techniques().values())


def test_every_file_has_one_technique_of_its_own_name() -> None:
    from oomproof.plan import techniques as package

    files = {path.stem for path in __import__("pathlib").Path(package.__path__[0]).glob("*.py")} - {"__init__"}
    assert len(techniques()) == len(files)


@pytest.mark.parametrize("technique", ALL, ids=lambda t: t.name)
def test_it_says_what_it_is(technique: Technique) -> None:
    assert technique.fidelity in FIDELITIES
    assert technique.title
    assert technique.rests_on
    assert technique.source.startswith("https://")
    assert technique.lowers
    assert set(technique.lowers) <= {*CATEGORIES, *EVERYTHING}
    assert technique.excludes <= set(techniques()), "it excludes what is not there"
    assert not technique.needs or technique.extra, "a library is needed, and nothing says how to get it"


@pytest.mark.parametrize("technique", ALL, ids=lambda t: t.name)
def test_its_variants_are_json_have_a_fidelity_and_code(technique: Technique) -> None:
    variants = list(technique.variants(FACTS))
    for options in variants:
        assert technique.wrong(options) is None
        change = Change(technique.name, options)
        assert Change(change.to_json()["technique"], change.to_json().get("options", {})) == change
        assert technique.fidelity_of(options) in FIDELITIES
        assert technique.environment(options, {}) is not None
        texts = [technique.code(options, framework, FACTS) for framework in FRAMEWORKS]
        assert any(texts), "there is nothing that a person could write instead"
    assert len({Change(technique.name, options).label for options in variants}) == len(variants), "labels are alike"


@pytest.mark.parametrize("technique", ALL, ids=lambda t: t.name)
def test_where_it_is_less_faithful_than_mostly_it_says_why(technique: Technique) -> None:
    """And only there."""
    uses = frozenset(("loss-other", "loss-in-batch"))
    normed = FACTS._replace(models=(FACTS.models[0]._replace(batch_norms=2),), uses=uses)
    for facts in (FACTS, normed, normed._replace(uses=uses | {"compile"})):
        for options in technique.variants(facts):
            less = FIDELITIES.index(technique.fidelity_of(options)) > FIDELITIES.index(technique.fidelity)
            assert bool(technique.less_faithful(facts, options)) == less, options


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("", "model"),
        ("transformer.h", "model.transformer.h"),
        ("0.layers", "model.get_submodule('0.layers')"),
        ("a.class", "model.get_submodule('a.class')"),
    ],
)
def test_a_submodule_in_code_is_an_expression(name: str, code: str) -> None:
    assert in_code(name) == code


def test_no_two_techniques_disagree_about_excluding_each_other() -> None:
    """Exclusion holds both ways, whoever says it."""
    for one in ALL:
        for other in one.excludes:
            assert conflict((Change(one.name), Change(other))) is not None
            assert conflict((Change(other), Change(one.name))) is not None


def test_their_modules_import_nothing_but_the_standard_library_until_they_are_installed() -> None:
    """They are imported in the user's process before it is known whether they apply."""
    for technique in ALL:
        source = inspect.getsource(importlib.import_module(type(technique).__module__))
        top = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top]
        libraries = {str(name).partition(".")[0] for name in names} - set(sys.stdlib_module_names)
        assert libraries <= {"oomproof"}, technique.name


def test_batches_are_cut_into_no_more_pieces_than_help() -> None:
    large = FACTS._replace(loaders=(Loader(8000, 100_000, True, True),), framework="code")
    parts = [options["parts"] for options in techniques()["micro-batch"].variants(large)]
    assert parts == [2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("offload-activations", {"of": "bananas"}, "'blocks' or 'model'"),
        ("offload-activations", {"off": "blocks"}, "no option off; it has of"),
        ("micro-batch", {"parts": "2"}, "it can be int"),
        ("micro-batch", {"parts": True}, "it can be int"),
        ("optimizer-8bit", {"library": "torchao", "bits": 5}, "8 or 4"),
        ("drop-outputs", {"all": True}, "none"),
    ],
)
def test_options_that_there_are_not_are_told(name: str, options: dict[str, Any], said: str) -> None:
    assert said in str(techniques()[name].wrong(options))


def test_the_code_accumulates_what_the_script_does_times_the_pieces() -> None:
    """A Trainer that takes the gradients of two batches for a step takes those of four when each is cut in two."""
    facts = FACTS._replace(framework="trainer", backwards_per_step=2)
    assert "gradient_accumulation_steps=4" in str(techniques()["micro-batch"].code({"parts": 2}, "trainer", facts))
