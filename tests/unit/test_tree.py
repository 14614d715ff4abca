"""The tree of the peak: its sums, what it joins and folds, and how it looks."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from profile_samples import every, from_snapshot, large, training, written
from rich.console import Console

from oomproof.measure.profile import Block, Profile
from oomproof.report import tree
from oomproof.report.blocks import NO_MODULE, owner
from oomproof.report.sheet import print_sheet
from oomproof.report.source import load

SAMPLES = dict(every())


def shown(path: Path, by: str = "module", depth: int | None = None, width: int = 80) -> str:
    """Return the tree as text, without colour."""
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    source = load(path)
    print_sheet(tree.body(source, by, depth), tree.after(source, by), console)
    return console.export_text()


def block(**changes: Any) -> Block:
    """Return a block of 1,024 bytes, with changes."""
    known = training().blocks[0]._replace(size_bytes=1024, module=None, name=None, category="activation")
    return known._replace(**changes)


@pytest.mark.parametrize("by", tree.WAYS)
@pytest.mark.parametrize("profile", SAMPLES.values(), ids=SAMPLES)
def test_sums(profile: Profile, by: str) -> None:
    """Each branch is what is in it: the root is what is allocated, no branch is larger than the one it is on."""

    def check(node: tree.Node) -> None:
        assert sum(node.categories.values()) == node.size_bytes
        assert sum(child.size_bytes for child in node.children.values()) <= node.size_bytes
        for child in node.children.values():
            check(child)

    root = tree.build(profile, by)
    check(root)
    assert root.size_bytes == profile.allocated_bytes
    assert root.blocks == len(profile.blocks)


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal layers are one row, what is small is folded, and each row names its categories."""
    monkeypatch.chdir(tmp_path)
    assert shown(written(Path("a.oomp"), training(layers=12, prefix="model."))) == PICTURE


def test_layers_that_differ_stand_alone(tmp_path: Path) -> None:
    """A layer that holds more than the others is not counted among them."""
    known = training(layers=4)
    extra = known.blocks[0]._replace(module="transformer.h.2.attn (Attention)", size_bytes=5 * 2**20, born=10**6)
    text = shown(written(tmp_path / "a.oomp", known._replace(blocks=(*known.blocks, extra))))
    assert "0 to 1, 3 (3 alike)" in text
    assert "└─ 2 " in text


def test_owner_of_states() -> None:
    """What belongs to a parameter is its module's, also where no module ran when it was made."""
    assert owner(block(name="exp_avg of h.0.attn.weight", category="optimizer_state")) == "h.0.attn ()"
    assert owner(block(name="h.0.attn.weight.grad", category="gradient")) == "h.0.attn ()"
    assert owner(block(name="weight", category="parameter")) is None
    assert owner(block(name="output of h.0", category="activation")) is None


def test_without_modules_the_stack_tells(tmp_path: Path) -> None:
    """A snapshot has no modules; blocks without one are told by their lines."""
    root = tree.build(from_snapshot(), "module")
    assert "train.py:40 <module>" in root.children[NO_MODULE].children
    assert "model.py:80 forward" in shown(written(tmp_path / "a.oomp", from_snapshot()), by="stack")


def test_names_with_more_dots_than_any_model(tmp_path: Path) -> None:
    """A name with 50,000 dots is told, not a reason to end."""
    deep = block(module=".".join("a" * 50_000) + " (A)")
    profile = training()._replace(blocks=(deep,), allocated_bytes=1024, slack_bytes=0)
    path = written(tmp_path / "a.oomp", profile)
    assert "1.0 KiB" in shown(path)
    json.loads(tree.to_json_text(load(path), "module", None))


def test_json_has_every_branch(tmp_path: Path) -> None:
    """Nothing is folded in JSON, and --depth counts levels below the root."""
    source = load(written(tmp_path / "a.oomp", training(layers=12)))
    whole = json.loads(tree.to_json_text(source, "module", None))
    (layers,) = (child for child in whole["children"][0]["children"] if child["name"] == "h")
    assert [child["name"] for child in layers["children"]] == [str(n) for n in range(12)]
    assert layers["children"][0]["children"][0]["class"] == "MLP"
    cut = json.loads(tree.to_json_text(source, "module", 1))
    assert all("children" not in child for child in cut["children"])


def test_a_hundred_thousand_blocks() -> None:
    """A large model's tree is complete."""
    profile = large()
    assert len(profile.blocks) > 100_000
    assert tree.build(profile, "stack").size_bytes == profile.allocated_bytes


PICTURE = """\
Peak 2.49 GiB allocated in 128 blocks; step 2, backward; by module

  1.99 GiB   80 %  model.transformer          activation 79 %, optimizer 14 %, …
  1.92 GiB   77 %  ├─ h                       activation 78 %, optimizer 15 %, …
  1.92 GiB   77 %  │  └─ 0 to 11 (12 alike)   activation 78 %, optimizer 15 %, …
  1.03 GiB   41 %  │     ├─ mlp (MLP)         activation 73 %, optimizer 18 %, …
 912.0 MiB   36 %  │     └─ attn (Attention)  activation 84 %, optimizer 11 %, …
  70.0 MiB    3 %  └─ wte (Embedding)         activation 91 %, optimizer 6 %, …
 512.0 MiB   20 %  GPT                        activation 50 %, temporary 50 %
   2.0 MiB   <1 %  … 2 more                   unknown 75 %, input 25 %

Next: see which lines of code it comes from:
  oomproof tree a.oomp --by stack
"""
