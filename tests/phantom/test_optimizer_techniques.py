"""Techniques that change what an optimizer keeps: the bytes that theory says, and training that goes on as before."""

from __future__ import annotations

from pathlib import Path

import pytest
from child import has_module, torch_version
from optimizer_scripts import BIASES, WEIGHTS, farthest, resumed, training
from planning import Trial, measured, script, trained

from oomproof.plan.technique import Change

FUSED = Change("optimizer-implementation", {"use": "fused"})
FOR_LOOP = Change("optimizer-implementation", {"use": "for-loop"})
BITSANDBYTES = Change("optimizer-8bit", {"library": "bitsandbytes", "bits": 8})
TORCHAO_8 = Change("optimizer-8bit", {"library": "torchao", "bits": 8})
TORCHAO_4 = Change("optimizer-8bit", {"library": "torchao", "bits": 4})
PAGED = Change("optimizer-paged", {"bits": 32})
OFFLOAD = Change("offload-optimizer", {"gradients": False})
OFFLOAD_GRADIENTS = Change("offload-optimizer", {"gradients": True})
BF16 = Change("optimizer-bf16-states")
BACKWARD = Change("step-in-backward")
LION = Change("lion", {"library": "lion-pytorch", "bits": 32})
LION_8 = Change("lion", {"library": "bitsandbytes", "bits": 8})
SGD = Change("sgd", {"momentum": 0.9})
SGD_PLAIN = Change("sgd", {"momentum": 0.0})
ADAFACTOR = Change("adafactor", {"library": "torch"})

PARAMETERS = WEIGHTS + BIASES
LIBRARIES = {"bitsandbytes": "bitsandbytes", "torchao": "torchao", "lion-pytorch": "lion_pytorch"}


def needs(change: Change) -> None:
    """Skip where the tested interpreter cannot have this change."""
    library = LIBRARIES.get(change.options.get("library", ""), "bitsandbytes" if change.name == PAGED.name else "")
    if library and not has_module(library):
        pytest.skip(f"{library} is not installed beside the tested torch")
    if change == ADAFACTOR and torch_version() < (2, 5):
        pytest.skip("torch.optim.Adafactor came with 2.5")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """The training with AdamW as it is."""
    return measured(script(tmp_path_factory.mktemp("plain"), training()))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # a code an element of each moment, and a float32 scale for 256; biases of 1,024 keep float32
        (BITSANDBYTES, WEIGHTS * (2 + 2 * 4 / 256) + BIASES * 8),
        (PAGED, BIASES * 8),  # weights lie in managed memory
        (OFFLOAD, 0),
        (BF16, PARAMETERS * 4),
        (LION, PARAMETERS * 4),
        (LION_8, WEIGHTS * (1 + 4 / 256) + BIASES * 4),
        (SGD, PARAMETERS * 4),
        (SGD_PLAIN, 0),
        (ADAFACTOR, 8 * (1024 + 1024) * 4 + BIASES * 4),  # a row, a column; a vector in full
    ],
    ids=lambda value: value.label if isinstance(value, Change) else "",
)
def test_states_take_what_theory_says(plain: Trial, tmp_path: Path, change: Change, expected: float) -> None:
    """Parameters and gradients stay; of AdamW's 8 bytes a parameter what the technique says is left, within 3 %."""
    needs(change)
    changed = measured(script(tmp_path, training()), change)
    assert changed.refused is None
    assert changed.measurement.fits
    before, after = plain.measurement.breakdown, changed.measurement.breakdown
    assert before is not None
    assert after is not None
    assert before.optimizer_state_bytes == pytest.approx(8 * PARAMETERS, rel=0.01)
    # a tensor takes at least 512 bytes, and there are 16 with two or three states each
    assert after.optimizer_state_bytes == pytest.approx(expected, rel=0.03, abs=64 * 512)
    assert after.parameter_bytes == before.parameter_bytes
    assert changed.said


@pytest.mark.parametrize(
    ("change", "each", "temporaries"), [(TORCHAO_8, 2 + 2 * 4 / 256, 0), (TORCHAO_4, 1 + 2 * 4 / 128, 6)]
)
def test_torchaos_states_take_what_theory_says(tmp_path: Path, change: Change, each: float, temporaries: int) -> None:
    """The peak is the sum, after the first step, in which Inductor times its kernels with buffers of its own.

    Packing two codes into a byte is not fused: 4 bits have six temporaries of one parameter's size.
    """
    needs(change)
    changed = measured(script(tmp_path, training()), change).measurement
    assert changed.breakdown is not None
    last = changed.per_step[-1].allocated_bytes - changed.breakdown.workspace_bytes
    assert last == pytest.approx(PARAMETERS * (4 + 4 + each) + temporaries * 4 * 2**20, rel=0.02)


def test_without_foreach_its_temporaries_are_gone(plain: Trial, tmp_path: Path) -> None:
    """foreach makes two temporaries of the size of all parameters, fused none, the loop one of one parameter's."""
    program = script(tmp_path, training())
    before = plain.measurement.demand.allocated_bytes
    fused = measured(program, FUSED).measurement.demand.allocated_bytes
    loop = measured(program, FOR_LOOP).measurement.demand.allocated_bytes
    assert before - fused == pytest.approx(4 * PARAMETERS, rel=0.03)
    assert fused < loop < fused + 4 * 1.01 * 3 * 1024 * 1024


@pytest.mark.parametrize("change", [BACKWARD, OFFLOAD_GRADIENTS], ids=lambda change: change.name)
def test_gradients_go_as_soon_as_they_are_there(tmp_path: Path, change: Change) -> None:
    """Of eight layers' gradients and foreach's temporaries, what two or three layers need is left."""
    changed = measured(script(tmp_path, training()), change).measurement
    parts = changed.breakdown
    assert parts is not None
    assert parts.parameter_bytes == pytest.approx(4 * PARAMETERS, rel=0.01)
    assert parts.optimizer_state_bytes == pytest.approx(8 * PARAMETERS if change == BACKWARD else 0, rel=0.01)
    rest = parts.total_bytes() - parts.parameter_bytes - parts.optimizer_state_bytes - parts.workspace_bytes
    assert rest < 3 * 4 * 1024 * 1025


@pytest.mark.parametrize("change", [FOR_LOOP, OFFLOAD, OFFLOAD_GRADIENTS, BACKWARD], ids=lambda change: change.label)
def test_parameters_are_the_same_bits(tmp_path: Path, change: Change) -> None:
    """On the CPU the script's optimizer runs the same operations, with learning rates of its scheduler."""
    program = script(tmp_path, training())
    before, after = trained(program), trained(program, change)
    assert after[1]
    assert after[0] == before[0]


@pytest.mark.parametrize(
    ("change", "tolerance"),
    [(FUSED, 1e-6), (PAGED, 1e-6), (BF16, 1e-3), (BITSANDBYTES, 5e-3), (TORCHAO_8, 5e-3)],
    ids=lambda value: value.label if isinstance(value, Change) else "",
)
def test_parameters_are_nearly_the_same(tmp_path: Path, change: Change, tolerance: float) -> None:
    """Other kernels round otherwise; coarser states move each parameter by less than half a step of 1e-2."""
    needs(change)
    program = script(tmp_path, training())
    before, after = trained(program), trained(program, change)
    assert after[1]
    assert 0 < farthest(before[0], after[0]) < tolerance


@pytest.mark.parametrize("change", [OFFLOAD, OFFLOAD_GRADIENTS, BACKWARD], ids=lambda change: change.label)
def test_checkpoints_are_those_of_the_scripts_optimizer(tmp_path: Path, change: Change) -> None:
    """A training that saves and loads the optimizer in between ends as one without the technique does."""
    program = script(tmp_path, resumed())
    assert trained(program, change)[0] == trained(program)[0]


@pytest.mark.parametrize("change", [BITSANDBYTES, TORCHAO_8, BF16, SGD], ids=lambda change: change.label)
def test_a_changed_training_resumes(tmp_path: Path, change: Change) -> None:
    """Replaced optimizers save and load their states, and take rates that a script sets as numbers."""
    needs(change)
    _, said = trained(script(tmp_path, resumed()), change)
    assert said


@pytest.mark.parametrize("change", [BITSANDBYTES, TORCHAO_8, SGD], ids=lambda change: change.label)
def test_the_script_finds_the_optimizer_it_asked_for(tmp_path: Path, change: Change) -> None:
    """isinstance holds for what was asked for and what is there; an optimizer of the script's own is left alone."""
    needs(change)
    text = """
    class Own(torch.optim.SGD):
        pass
    own = Own([nn.Parameter(torch.zeros(2))], lr=0.1)
    assert type(own) is Own
    assert isinstance(optimizer, torch.optim.AdamW) and isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer).__name__ != "AdamW", type(optimizer)
    leave(model)
    """
    _, said = trained(script(tmp_path, training(loop="\n".join(line[4:] for line in text.split("\n")))), change)
    assert any("in place of AdamW" in entry["what"] for entry in said)
    assert any("Own is left as it is" in entry["what"] for entry in said)
