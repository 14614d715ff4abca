"""What ``oomproof plan`` prints: a table that can be read at 80 columns, code that runs, the verdicts of `run`."""

from __future__ import annotations

import io
import json
import re
import shlex
from dataclasses import replace

import pytest
from plan_samples import (
    CHECKPOINT,
    CHUNKED,
    CUT,
    GAN,
    LOOP,
    ONE,
    T4,
    adam,
    only_just,
    planned,
    trial,
    with_retries,
)
from rich.console import Console

from oomproof.plan.facts import BlockGroup
from oomproof.plan.planning import Planned
from oomproof.plan.technique import Change, techniques
from oomproof.report import plan as report
from oomproof.report.plan_code import code
from oomproof.report.plan_next import after
from oomproof.report.plan_page import page
from oomproof.report.plan_table import broken
from oomproof.report.sheet import print_sheet
from oomproof.report.verdict import headline
from oomproof.report.words import quoted, verbatim
from oomproof.units import GIB, MIB

SETS = (
    trial((CHUNKED, CUT), 9 * GIB, 1.01),
    trial((CUT,), 10 * GIB, 1.03),
    trial((LOOP,), 19 * GIB + 800 * MIB, 1.2),
    trial((CHECKPOINT,), 12 * GIB, 1.24),
    trial((Change("micro-batch", {"parts": 16, "unequal": ["loss"]}),), 8 * GIB, 1.1),
)


def text(plan: Planned, width: int = 80, emit: str | None = None) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_sheet(report.body(plan, emit), after(plan, None), console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def printed_code(plan: Planned, width: int = 80) -> str:
    return text(plan, width, "code").partition("Code (code)\n")[2].partition("\n\nNext:")[0]


# ---- the table ---------------------------------------------------------------------------------------------------


def test_the_table_at_80_columns() -> None:
    """Each set has a number, its whole name, and its figures on one line."""
    assert text(planned(*SETS)).split("\n\n")[1].splitlines() == [
        "   changes                                     peak   to spare    time  fidelity",
        "1  chunked-cross-entropy(use=torch)        9.00 GiB   5.56 GiB  1.01 x  maths",
        "     + micro-batch(parts=4)",
        "2  as it is                               20.00 GiB  -5.44 GiB  1.00 x  bits",
        "3  micro-batch(parts=4)                   10.00 GiB   4.56 GiB  1.03 x  maths",
        "4  checkpoint-blocks                      12.00 GiB   2.56 GiB  1.24 x  bits",
        "5  micro-batch(parts=16)                   8.00 GiB   6.56 GiB  1.10 x  approx.",
        "6  optimizer-implementation               19.78 GiB  -5.22 GiB  1.20 x  bits",
        "     (use=for-loop)",
    ]


def test_the_table_at_120_columns() -> None:
    """Where there is room the times have their ranges and the fidelity its words."""
    lines = text(planned(*SETS), 120).split("\n\n")[1].splitlines()
    assert lines[1].startswith("1  chunked-cross-entropy(use=torch) + micro-batch(parts=4)")
    assert lines[1].endswith("9.00 GiB   5.56 GiB  1.01 x (0.99 to 1.06)  same maths")
    assert len(lines) == 7


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120, 140, 200])
def test_no_line_of_the_table_is_wider_than_the_terminal_or_wraps(width: int) -> None:
    """No name is cut, whatever the width."""
    long = Change("block-actions", {"actions": {f"h.{i}": ("keep", "recompute", "offload")[i % 3] for i in range(12)}})
    settings = Change("allocator-settings", {"settings": "expandable_segments:True,max_split_size_mb:512"})
    failed = trial((LOOP, CUT), 9 * GIB, verdict="failed", measurement=None, reason="RuntimeError: " + "long " * 40)
    lines = text(planned(*SETS, trial((long, settings), 30 * GIB, None), failed), width).split("\n\n")[1].splitlines()
    assert max(map(len, lines)) <= width
    together = re.sub(r"\s+", "", "".join(re.sub(r"  +-?\d+\.\d\d GiB.*", "", line) for line in lines))
    assert sum(bool(re.match(r" ?\d  ", line)) for line in lines) == 8
    for part in ("micro-batch(parts=16)", "expandable_segments:True,max_split_size_mb:512)", "longlong"):
        assert part in together


@pytest.mark.parametrize("room", range(12, 60))
def test_a_label_in_pieces_is_the_label(room: int) -> None:
    """Each piece fits, and together they are all of it."""
    label = " + ".join(change.label for change in (CHUNKED, CUT, LOOP, Change("zero1", {"gpus": 2, "x": "y"})))
    pieces = broken(label, room)
    assert all(len(piece) <= room for piece in pieces)
    assert "".join(pieces).replace(" ", "") == label.replace(" ", "")


def test_numbers_in_the_text_are_those_of_the_table_and_of_the_json() -> None:
    plan = planned(*SETS)
    why = "\n".join(report.reasons(plan))
    assert "not #3 micro-batch(parts=4): it fits, but a step takes 1.03 x" in why
    numbers = {c["number"]: c["techniques"] for c in json.loads(report.to_json_text(plan))["candidates"]}
    assert numbers[1][0]["technique"] == "chunked-cross-entropy"
    assert numbers[4] == [{"technique": "checkpoint-blocks"}]


def test_a_set_that_fits_by_retries_does_not_show_as_over() -> None:
    tight = trial((CHECKPOINT,), 15 * GIB, 1.1, verdict="fits", measurement=with_retries(15 * GIB))
    shown = text(planned(*SETS[:1], tight))
    assert re.search(r"3  checkpoint-blocks +15.00 GiB  by retries", shown)
    assert "by retries: only because the allocator gives back its cache" in shown


# ---- unknown times -----------------------------------------------------------------------------------------------


def test_why_a_time_is_unknown_is_said_once() -> None:
    """The row says "unknown", and Mind gives the reason with the rows that it is true of."""
    reason = "a kernel of its own cannot be counted"
    unknown = [replace(trial((c,), 9 * GIB, None), time_reason=reason) for c in (CUT, CHECKPOINT)]
    shown = text(planned(SETS[0], *unknown), 120)
    assert shown.count(reason) == 1
    assert f"time of #3, #4 is unknown: {reason}" in shown
    assert re.search(r"3  .* unknown +same", shown)


def test_where_the_script_as_it_is_was_not_counted_that_is_the_reason() -> None:
    baseline = replace(trial((), 20 * GIB), time_reason="the script made no second step")
    shown = text(planned(trial((CUT,), 9 * GIB, None), baseline=baseline), 140)
    assert "time of #1 is unknown: of the script as it is nothing was counted: the script made no second step" in shown


# ---- verdicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measured", [only_just(), with_retries(T4.memory_bytes + MIB)], ids=["range", "retries"])
def test_a_plan_has_the_verdict_that_run_has(measured: object) -> None:
    """Of one measurement: with a change or without, and the reason is in Mind too."""
    told = headline(measured)  # type: ignore[arg-type]
    how = told.verdict.removeprefix("FITS")
    assert how == ", BUT ONLY JUST"
    winner = replace(trial((CUT,), 9 * GIB), measurement=measured)
    head = report.headline(planned(winner)).plain
    assert head.startswith(f" FITS WITH 1 CHANGE{how} ")
    assert head.endswith(told.detail.partition(": ")[2])
    baseline = replace(trial((), 9 * GIB), measurement=measured)
    assert report.headline(planned(baseline=baseline)).plain.startswith(f" FITS AS IT IS{how} ")
    assert any("only just" in line for line in report.mind(planned(winner)))


def test_where_nothing_fits_what_only_a_person_can_change_is_not_said_to_be_missing_memory() -> None:
    by_hand = trial((Change("drop-outputs"),), 9 * GIB)
    by_hand = replace(by_hand, candidate=replace(by_hand.candidate, by_hand=True))
    nothing = planned(by_hand)
    head = report.headline(replace(nothing, plan=None, found=replace(nothing.found, winner=None))).plain
    assert head.endswith("takes 9.00 GiB of 14.56 GiB on Tesla T4: only you can make this change")
    assert report.headline(planned(trial((CUT,), 19 * GIB))).plain.endswith("4.44 GiB are missing")


def test_a_plan_without_reservation_just_fits() -> None:
    assert report.headline(planned(*SETS)).plain.startswith(" FITS WITH 2 CHANGES  9.00 GiB of 14.56 GiB")


# ---- fidelity ----------------------------------------------------------------------------------------------------


def test_why_cutting_is_approximate_under_compile_is_said() -> None:
    """Of the winner in Mind, of another in Why: its loss is not seen in compiled code."""
    compiled = ONE._replace(uses=frozenset(("compile", "loss-other")))
    cut = trial((Change("micro-batch", {"parts": 4, "unequal": ["loss"]}),), 9 * GIB)
    assert any(
        "micro-batch is approximate" in m and "compiled code" in m for m in report.mind(planned(cut, facts=compiled))
    )
    others = planned(trial((CHECKPOINT,), 9 * GIB), cut, facts=compiled)
    assert any("#3" in line and "compiled code" in line for line in report.reasons(others))


# ---- code --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_code_on_the_terminal_is_python(width: int) -> None:
    """Indented and unwrapped, so that it can be copied."""
    for plan in (planned(*SETS), planned(trial((CHECKPOINT, LOOP), 9 * GIB)), planned(SETS[0], facts=GAN)):
        shown = printed_code(plan, width)
        compile(shown, "copied", "exec")
        assert shown.splitlines() == code(plan, "code").splitlines()
    assert "\n    x = checkpoint(block" in printed_code(planned(trial((CHECKPOINT,), 9 * GIB)), width)


@pytest.mark.parametrize("name", sorted(techniques()))
def test_each_techniques_code_for_plain_pytorch_is_python(name: str) -> None:
    """With blocks in lists too, whose names are numbers."""
    from test_techniques import FACTS

    numbered = BlockGroup("0.1", "Block", ("0.1.0", "0.1.1"), 1 << 20)
    inside = FACTS._replace(models=(FACTS.models[0]._replace(blocks=(numbered,), head="net.2"),))
    for facts in (FACTS, inside):
        for options in techniques()[name].variants(facts):
            compile(techniques()[name].code(options, "code", facts) or "", name, "exec")


def test_control_characters_in_the_code_do_nothing() -> None:
    """A module's name may hold anything."""
    group = BlockGroup("h\x1b[31m\n\rimport evil", "Block", ("a", "b"), 1)
    facts = ONE._replace(models=(ONE.models[0]._replace(kind="x\x1b]0;y\x07", blocks=(group,)),))
    shown = printed_code(planned(trial((CHECKPOINT,), 9 * GIB), facts=facts))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)
    assert "\nimport evil" not in shown
    compile(shown, "copied", "exec")
    assert verbatim("\tx = '\x1b[2J'\u202e", "ascii") == "    x = '\\x1b[2J'\\u202e"


def test_the_code_says_which_model_and_optimizer_it_is_for() -> None:
    """What differs between two models is there for each, what does not once for both."""
    said = ({"technique": "checkpoint-blocks", "what": "2 of 2 Block are computed again", "where": "decoder.blocks"},)
    shown = code(planned(trial((CHECKPOINT, LOOP, CUT), 9 * GIB, said=said), facts=GAN), "code")
    compile(shown, "copied", "exec")
    assert shown.count("# for each model: ") == 1, "an optimizer of one model says which"
    checkpoints, loops, cut = (
        shown.split("\n\n# optimizer-")[0],
        shown.split("# optimizer-")[1],
        shown.split("# micro")[1],
    )
    first, second = checkpoints.split("# model: Discriminator (1,000,000 parameters)")
    assert "# model: Generator (3,000,000 parameters)" in first
    assert "in model.decoder.blocks:" in first
    assert "in model.get_submodule('0.layers'):" in second
    assert "in this script: 2 of 2 Block are computed again (decoder.blocks)" in first
    assert "# optimizer: Adam of Generator\ntorch.optim.Adam(" in loops
    assert "# optimizer: AdamW of Discriminator\ntorch.optim.AdamW(" in loops
    assert "# for each optimizer: Adam of Generator, AdamW of Discriminator" in cut


def test_models_of_one_class_are_told_apart() -> None:
    twins = GAN._replace(models=(GAN.models[0], GAN.models[0]), optimizers=(adam(1), adam(2)))
    shown = code(planned(trial((CUT,), 9 * GIB), facts=twins), "code")
    assert "Generator no. 1 (3,000,000 parameters), Generator no. 2" in shown
    assert "Adam of 1 parameters, Adam of 2 parameters" in shown


def test_the_code_of_one_model_has_no_comment_on_which() -> None:
    assert "for each" not in code(planned(*SETS), "code")


# ---- the next command --------------------------------------------------------------------------------------------


OPTIONS: dict[str, str | None] = {
    "--gpu-file": "my gpu.toml",
    "--memory": "4GiB",
    "--gpus": "2",
    "--allow": "equal",
    "--only": "micro-batch,fsdp2",
    "--without": "zero1",
    "--explore": None,
    "--steps": "5",
    "--resume": "it's.jsonl",
}


def test_keeping_the_plan_in_a_file_takes_the_same_options() -> None:
    """Quoted for a shell, with the command after the dashes."""
    words = shlex.split(after(planned(*SETS), None, OPTIONS).command)
    own, command = words[: words.index("--")], words[words.index("--") + 1 :]
    assert command == ["python", "train.py", "--name", "a  b"]
    assert own[:2] == ["oomproof", "plan"]
    for name, value in OPTIONS.items():
        assert name in own
        assert value is None or own[own.index(name) + 1] == value
    assert own[-2:] == ["-o", "plan.toml"]
    assert "--gpu" not in own


def test_the_next_command_is_printed_as_it_is() -> None:
    """Two blanks in an argument are two blanks, and a line break does not end the command."""
    assert "'a  b'" in text(planned(*SETS))
    assert quoted(["it's", "x y", "z"]) == shlex.join(["it's", "x y", "z"])
    assert quoted(["a\nb'\x1b\\"]) == r"$'a\nb\'\x1b\\'"


def test_a_script_that_fits_is_run_with_the_options_of_a_run() -> None:
    words = shlex.split(after(planned(baseline=trial((), GIB)), None, OPTIONS).command)
    own = words[: words.index("--")]
    options = ["--gpu-file", "my gpu.toml", "--memory", "4GiB", "--steps", "5", "-o", "FILE.oomp"]
    assert own == ["oomproof", "run", *options]


def test_a_saved_plan_is_applied() -> None:
    following = after(planned(*SETS), "my plan.toml", OPTIONS)
    assert following.command == "oomproof apply 'my plan.toml' -- python train.py --name 'a  b'"


def test_where_nothing_fits_the_next_command_is_another() -> None:
    """It looks for longer, allows more or takes another GPU; never the same once more."""
    nothing = planned(trial((CUT,), 19 * GIB))
    everything = after(nothing, None, {"--gpu": "t4", "--only": "micro-batch", "--without": "lora", "--steps": "5"})
    assert everything.command.startswith("oomproof plan --gpu t4 --steps 5 -- ")
    assert "--steps 5 --allow changes-model" in after(nothing, None, {"--steps": "5"}).command
    most: dict[str, str | None] = {"--allow": "changes-model", "--steps": "5"}
    assert "--gpus 2" in after(nothing, None, most).command
    on_larger = after(replace(nothing, smallest=replace(T4, key="l4")), None, {**most, "--memory": "2GiB"}).command
    assert on_larger.startswith("oomproof run --gpu l4 --steps 5 --")
    stopped = planned(trial((CUT,), 19 * GIB), out_of_budget=True)
    assert "--candidates 40 --seconds 3600" in after(stopped, None, {"--candidates": "10"}).command


def test_a_plan_made_in_python_names_its_memory() -> None:
    less = replace(T4, memory_bytes=4 * GIB)
    assert f"--gpu t4 --memory {4 * GIB}" in after(replace(planned(*SETS), gpu=less), None).command
    assert "--memory" not in after(planned(*SETS), None).command


# ---- the page ----------------------------------------------------------------------------------------------------


def test_the_page_has_the_numbers_ranges_and_options_of_the_terminal() -> None:
    tight = trial((CHECKPOINT,), 15 * GIB, 1.1, verdict="fits", measurement=with_retries(15 * GIB))
    shown = page(planned(*SETS[:2], tight), "code", None, OPTIONS)
    assert re.search(r"<tr><td>3</td><td>micro-batch\(parts=4\)</td>.*?1.03 x \(1.01 to 1.08\)", shown)
    assert "<td>by retries</td>" in shown
    assert "--memory 4GiB --gpus 2" in shown
