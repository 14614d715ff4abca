"""Optimizer steps are found without touching the script, whatever it wraps around its loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from child import has_module

from oomproof.measure.measurement import Measurement

Measure = Callable[..., Measurement]
MIB = 1 << 20


def net_and_data():
    """Return torch, a small net on the GPU and a batch."""
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).cuda()
    return torch, net, torch.zeros(8, 64, device="cuda")


def plain(steps):
    torch, net, x = net_and_data()
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(steps):
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step)


def test_stops_after_three_steps(measure: Measure) -> None:
    """By default the third optimizer step is the last; the script's own exit code is then not known."""
    found = measure(plain, 10, uses=[net_and_data])
    assert (found.steps, found.ended, found.exit_code, found.verdict) == (3, "steps-reached", None, "fits")
    assert [step.step for step in found.per_step] == [1, 2, 3]
    assert found.peak.allocated_bytes == max(step.allocated_bytes for step in found.per_step)
    assert found.peak.phase is not None


def test_steps_all_runs_to_the_end(measure: Measure) -> None:
    """With steps=None the script ends by itself and its exit code is told."""
    found = measure(plain, 5, uses=[net_and_data], steps=None)
    assert (found.steps, found.ended, found.exit_code, found.verdict) == (5, "finished", 0, "fits")


def test_fewer_steps_than_asked_for(measure: Measure) -> None:
    """A script that ends before is reported with the steps that it made."""
    found = measure(plain, 2, uses=[net_and_data])
    assert (found.steps, found.ended, found.verdict) == (2, "finished", "fits")


def test_until_stable(measure: Measure) -> None:
    """until_stable goes on while peaks still rise and stops when two steps in a row have the same."""

    def body():
        torch, net, x = net_and_data()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(20):
            batch = x.repeat(1000 * min(step + 1, 5), 1)
            net(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            del batch

    found = measure(body, uses=[net_and_data], until_stable=True)
    assert found.ended == "stable"
    assert 5 <= found.steps <= 8
    assert found.per_step[-1].allocated_bytes == found.per_step[-2].allocated_bytes


def test_progress_is_told_step_by_step(measure: Measure) -> None:
    """on_step gets the steps in order, each with its peaks."""

    def body():
        import time

        torch, net, x = net_and_data()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(x).sum().backward()
            optimizer.step()
            time.sleep(0.3)

    told: list[int] = []
    measure(body, uses=[net_and_data], on_step=lambda step: told.append(step["step"]))
    assert told == sorted(set(told))
    assert set(told) <= {1, 2, 3}
    assert told


def test_the_script_cannot_swallow_the_stop(measure: Measure) -> None:
    """A loop that catches everything and cleans up for ever is stopped all the same."""

    def body():
        torch, net, x = net_and_data()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        while True:
            try:
                net(x).sum().backward()
                optimizer.step()
            except BaseException:  # noqa: BLE001
                pass

    assert measure(body, uses=[net_and_data]).ended == "steps-reached"


def accumulation():
    torch, net, x = net_and_data()
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(4):
        for _ in range(4):
            net(x).sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print("step", step)


def two_optimizers():
    torch, net, x = net_and_data()
    first = torch.optim.AdamW(net[0].parameters())
    second = torch.optim.SGD(net[2].parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        net(x).sum().backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        print("step", step)


def closure():
    torch, net, x = net_and_data()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def evaluate():
        optimizer.zero_grad()
        loss = net(x).pow(2).sum()
        loss.backward()
        return loss

    for step in range(4):
        optimizer.step(evaluate)
        print("step", step)


def own_optimizer():
    torch, net, x = net_and_data()

    class Own:
        def step(self):
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None

    optimizer = Own()
    for step in range(4):
        net(x).sum().backward()
        optimizer.step()
        print("step", step)
    net(x).sum().backward()


def scaled():
    torch, net, x = net_and_data()
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for step in range(4):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(x).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print("step", step)


def alternating():
    """Train a generator and a discriminator in turns."""
    torch, generator, x = net_and_data()
    _, discriminator, _ = net_and_data()
    optimizers = [torch.optim.Adam(m.parameters()) for m in (generator, discriminator)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
            discriminator(generator(x)).sum().backward()
            optimizer.step()
        print("step", step)


def part_by_part():
    """Show the optimizer one of its groups at a time, as DeepSpeed's ZeRO-1 and 2 do."""
    torch, net, x = net_and_data()
    optimizer = torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[2].parameters()}])
    groups = optimizer.param_groups
    for step in range(4):
        net(x).sum().backward()
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
            optimizer.param_groups = groups
            print("called")
        optimizer.zero_grad()
        print("step", step)


def states_first():
    """Step part by part, the first time on zeros before any forward pass, as DeepSpeed's ZeRO-3 does."""
    torch, net, x = net_and_data()
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for step in range(-1, 4):
        if step >= 0:
            net(x).sum().backward()
        for parameter in parameters:
            optimizer.param_groups[0]["params"] = [parameter]
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        if step >= 0:
            print("step", step)


def without_backward():
    """Neither module nor backward pass."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(8, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(4):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        print("step", step)


PROGRAMS = [
    accumulation, two_optimizers, closure, own_optimizer, scaled, alternating, part_by_part, states_first,
    without_backward,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_step_is_one_round_of_all_optimizers(
    measure: Measure, program: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """What the script calls four steps is reported as four, whatever happens within one."""
    found = measure(program, uses=[net_and_data], steps=None)
    assert found.steps == 4
    assert found.peak.allocated_bytes == max(step.allocated_bytes for step in found.per_step)
    stopped = measure(program, uses=[net_and_data], steps=2, quiet=False)
    assert stopped.steps == 2
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step")]
    assert printed in (["step 0"], ["step 0", "step 1"])  # the second round has ended, the third has not


def test_the_first_step_has_all_groups(measure: Measure, capfd: pytest.CaptureFixture[str]) -> None:
    """An optimizer that is shown two groups in turn has made its first step after the second."""
    assert measure(part_by_part, uses=[net_and_data], steps=1, quiet=False).steps == 1
    assert capfd.readouterr().out.count("called") == 1  # the process ends within the second call


@pytest.mark.usefixtures("transformers")
def test_hf_trainer(measure: Measure) -> None:
    """The Trainer's optimizer steps count, its micro-batches do not; phase, module and categories are told."""

    def body():
        import tempfile

        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

        data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(64)]
        net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=1000, n_positions=64))
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=8, report_to="none",
                save_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            Trainer(net, arguments, train_dataset=data).train()

    if not has_module("accelerate"):
        pytest.skip("accelerate is not installed beside the tested torch")
    found = measure(body)
    assert (found.steps, found.verdict) == (3, "fits")
    assert found.breakdown is not None
    layers = 2 * (12 * 128 * 128 + 13 * 128)
    parameters = (layers + 1000 * 128 + 64 * 128 + 2 * 128) * 4
    assert found.breakdown.parameter_bytes == pytest.approx(parameters, rel=0.02)
    assert found.breakdown.optimizer_state_bytes == pytest.approx(2 * parameters, rel=0.02)
    assert found.breakdown.unknown_bytes < 0.02 * found.peak.allocated_bytes


def test_accelerate(measure: Measure) -> None:
    """accelerate wraps the optimizer; a round of it is one step."""
    if not has_module("accelerate"):
        pytest.skip("accelerate is not installed beside the tested torch")

    def body():
        torch, net, x = net_and_data()
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=2)
        net, optimizer = accelerator.prepare(net.cpu(), torch.optim.AdamW(net.parameters()))
        for _ in range(12):
            with accelerator.accumulate(net):
                accelerator.backward(net(x).sum())
                optimizer.step()
                optimizer.zero_grad()

    found = measure(body, uses=[net_and_data], steps=None)
    assert (found.steps, found.ended, found.verdict) == (6, "finished", "fits")


def test_lightning(measure: Measure) -> None:
    """Lightning's loop with a closure around the step is stopped after three steps."""
    if not has_module("lightning"):
        pytest.skip("lightning is not installed beside the tested torch")

    def body():
        import lightning
        import torch

        class Net(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(64, 64)

            def training_step(self, batch, index):
                return self.layer(batch).sum()

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())

        loader = torch.utils.data.DataLoader(torch.zeros(64, 64), batch_size=4)
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Net(), loader)

    found = measure(body)
    assert (found.steps, found.ended, found.verdict) == (3, "steps-reached", "fits")


def test_inference_is_reported_by_call(measure: Measure) -> None:
    """A script that never steps runs to its end; each outermost module has its count and its peak."""

    def body():
        torch, net, x = net_and_data()
        with torch.no_grad():
            for _ in range(5):
                net(x)
            net(x.repeat(1000, 1))

    found = measure(body, uses=[net_and_data])
    assert (found.steps, found.ended, found.exit_code, found.verdict) == (0, "finished", 0, "fits")
    assert [(call.module, call.count) for call in found.calls] == [("Sequential", 6)]
    assert found.calls[0].allocated_bytes == found.peak.allocated_bytes


def container(steps):
    torch, net, x = net_and_data()

    class Several(torch.optim.Optimizer):
        def __init__(self, optimizers):
            self.optimizers = optimizers
            super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})

        def step(self):
            for optimizer in self.optimizers:
                optimizer.step()

    optimizer = Several([torch.optim.AdamW(net[i].parameters()) for i in (0, 2)])
    for _ in range(steps):
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_container_of_optimizers_steps_with_them(measure: Measure) -> None:
    """torchtitan's is an Optimizer itself: its inner ones never step alone, and still the first step ends in time."""
    found = measure(container, 9, uses=(net_and_data,), steps=3)
    assert found.steps == 3
    first, second, third = (step.allocated_bytes for step in found.per_step)
    assert first <= second == third
    assert found.breakdown is not None
    assert found.breakdown.optimizer_state_bytes >= 2 * 4 * 2 * 64 * 128  # two moments of the weights
