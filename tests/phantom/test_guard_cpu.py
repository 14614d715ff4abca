"""The guard on the CPU, with out-of-memory errors injected where they can happen."""

from __future__ import annotations

import pytest
from child import Child


def _oom(unallocated="10.00 MiB"):
    import torch

    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 14.58 GiB of which 1.00 MiB is "
        "free. Including non-PyTorch memory, this process has 14.57 GiB memory in use. Of the allocated memory "
        f"12.00 GiB is allocated by PyTorch, and {unallocated} is reserved by PyTorch but unallocated."
    )


def _model(norm=True):
    import torch

    class Fails(torch.autograd.Function):
        """The identity; raises what is in ``errors`` for its phase, once each."""

        errors: dict = {}  # noqa: RUF012

        @staticmethod
        def forward(ctx, x):
            if "forward" in Fails.errors:
                raise Fails.errors.pop("forward")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if "backward" in Fails.errors:
                raise Fails.errors.pop("backward")
            return gradient

    class Last(torch.nn.Module):
        def forward(self, x):
            return Fails.apply(x)

    torch.manual_seed(0)
    parts = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8) if norm else torch.nn.ReLU(), torch.nn.Dropout(0.5)]
    model = torch.nn.Sequential(*parts, Last(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), Fails


def _state(model, optimizer):
    import hashlib
    import random

    import torch

    parts = [*model.state_dict().values(), *[t for s in optimizer.state.values() for t in s.values()]]
    parts.append(torch.get_rng_state())
    digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in parts))
    digest.update(repr(random.random()).encode())
    return digest.hexdigest()


def _by_hand(sizes, steps=3, total=8, norm=True):
    """What the guard must equal: an uninterrupted loop with micro-batches of these sizes in each step."""
    import random

    import torch

    model, optimizer, _ = _model(norm)
    data, losses = torch.randn(steps, total, 4), []
    random.seed(0)
    for batch, parts in zip(data, sizes, strict=True):
        whole = 0.0
        for piece in batch.split(parts):
            share = len(piece) / total
            loss = model(piece * (1 + random.random())).square().mean()
            loss = loss * share if share != 1 else loss
            loss.backward()
            whole += loss.detach()
        losses.append(float(whole))
        optimizer.step()
        optimizer.zero_grad()
    return [losses, _state(model, optimizer)]


def _guarded(errors, steps=3, total=8, norm=True, **options):
    """The same with a guard; ``errors`` maps a step to what fails in it."""
    import random

    import torch

    import oomproof

    model, optimizer, fails = _model(norm)
    guard = oomproof.Guard(model, optimizer, **options)
    data, losses, sizes = torch.randn(steps, total, 4), [], []
    random.seed(0)
    for step, batch in enumerate(data):
        fails.errors.update(errors.get(step, {}))
        loss = guard.step(batch, lambda part: model(part * (1 + random.random())).square().mean())
        losses.append(float(loss))
        sizes.append(guard.size or total)
    return [losses, _state(model, optimizer)], sizes, guard.notes


_USES = (_oom, _model, _state, _by_hand, _guarded)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_interrupted_step_is_the_uninterrupted_one(child: Child, phase: str) -> None:
    """Parameters, optimizer, buffers and random states equal, in bits, a run that had small pieces at once."""

    def body(phase):
        found, sizes, notes = _guarded({1: {phase: _oom()}})
        return [found == _by_hand([8, 4, 4]), found == _by_hand([8, 8, 8]), sizes, notes]

    same, whole, sizes, notes = child(body, phase, uses=_USES)
    assert same
    assert not whole  # or the comparison could not tell
    assert sizes == [8, 4, 4]
    assert any("BatchNorm" in note for note in notes)
    assert any("dropout" in note for note in notes)


def test_a_fragmented_step_is_tried_once_more_at_its_size(child: Child) -> None:
    """Where the cache would have sufficed the size stays, and a second failure in that step goes down."""

    def body():
        return [
            _guarded({1: {"forward": _oom("2.00 GiB")}})[0] == _by_hand([8, 8, 8]),
            _guarded({1: {"forward": _oom("2.00 GiB"), "backward": _oom("2.00 GiB")}})[1],
        ]

    same, twice = child(body, uses=_USES)
    assert same
    assert twice == [8, 4, 4]


def test_sizes_are_the_users_and_grow_back(child: Child) -> None:
    """Sizes that do not divide the batch are weighted by samples; after good steps the next larger size is tried."""

    def body():
        found, sizes, notes = _guarded({0: {"forward": _oom()}}, steps=4, norm=False, sizes=[3], grow_after=2)
        # 8 in pieces of at most 3: 3, 3, 2
        return [found == _by_hand([3, 3, 8, 8], steps=4, norm=False), sizes, notes]

    same, sizes, notes = child(body, uses=_USES)
    assert same
    assert sizes == [3, 8, 8, 8]
    assert any("weighted by samples" in note for note in notes)


def test_failed_activations_are_gone_before_the_retry(child: Child) -> None:
    """No tensor of the failed attempt lives when the next begins, however its error was chained."""

    def body():
        import sys
        import weakref

        import torch

        import oomproof

        model, optimizer, _ = _model()
        refs, alive, errors = [], [], []

        def loss_fn(batch):
            alive.append(sum(ref() is not None for ref in refs))
            hidden = model[0](batch)
            refs.append(weakref.ref(hidden))
            if len(refs) == 1:
                try:
                    kept = hidden * 2
                    refs.append(weakref.ref(kept))
                    raise _oom()
                except torch.OutOfMemoryError as error:
                    errors.append(error)  # as an error tracker or an interactive prompt keeps it
                    sys.last_value = error
                    raise ValueError("the layer failed") from error
            return hidden.mean()

        oomproof.Guard(model, optimizer).step(torch.randn(8, 4), loss_fn)
        return [*alive[:2], hasattr(sys, "last_value")]

    assert child(body, uses=_USES) == [0, 0, False]


def test_other_errors_come_as_they_are(child: Child) -> None:
    """What is no out-of-memory is raised untouched, also inside a handler of one."""

    def body():
        import torch

        import oomproof

        model, optimizer, fails = _model()
        guard = oomproof.Guard(model, optimizer)
        mine, came = ValueError("mine"), []
        fails.errors["forward"] = mine
        try:
            raise _oom()
        except torch.OutOfMemoryError:
            try:
                guard.step(torch.randn(8, 4), lambda part: model(part).mean())
            except ValueError as error:
                came.append(error is mine and error.__traceback__ is not None)
        return came

    assert child(body, uses=_USES) == [True]


def test_gradients_of_before_are_put_back(child: Child) -> None:
    """Gradients accumulated before the step count once, whatever failed in between."""

    def body(fail):
        import torch

        import oomproof

        model, optimizer, fails = _model(norm=False)
        model[2].p = 0.0
        first, batch = torch.randn(2, 8, 4)
        model(first).mean().backward()
        count, sums = [], []

        def loss_fn(part):
            count.append(len(part))
            if fail and len(count) == 3:  # one piece of two has added its gradients
                fails.errors["backward"] = _oom()
            return model(part).mean()

        optimizer.register_step_pre_hook(lambda *_: sums.append(model[0].weight.grad.tolist()))
        guard = oomproof.Guard(model, optimizer)
        guard.size = 4 if fail else 2
        count.append(0)
        guard.step(batch, loss_fn)
        return [sums, count]

    failed, clean = child(body, True, uses=_USES), child(body, False, uses=_USES)
    assert failed[1] == [0, 4, 4, 2, 2, 2, 2]
    assert clean[1] == [0, 2, 2, 2, 2]
    assert failed[0] == clean[0]


def test_token_counts_weigh(child: Child) -> None:
    """With count= the gradient is that of the mean over all tokens, also where a piece has none."""

    def body():
        import torch

        import oomproof

        weight = torch.nn.Linear(1, 1, bias=False)
        batch = torch.tensor([[1.0], [2.0], [0.0], [0.0], [3.0], [0.0], [5.0], [6.0]])
        seen = []
        optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: seen.append(float(weight.weight.grad)))
        guard = oomproof.Guard(weight, optimizer, sizes=[2])
        for size in (None, 2):
            guard.size = size
            guard.step(
                batch, lambda part: weight(part[part != 0].reshape(-1, 1)).mean(), count=lambda p: (p != 0).sum()
            )
        return seen

    whole, pieces = child(body, uses=_USES)
    assert whole == pytest.approx(17 / 5)
    assert pieces == pytest.approx(whole)


def test_a_begun_write_is_refused_or_restored(child: Child) -> None:
    """An error inside optimizer.step ends with exit code 3; with restore= the step is the same step."""

    def body(restoring):
        import copy

        import torch

        import oomproof

        def run(fail, size):
            model, optimizer, _ = _model()
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])

            def restore():
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(copy.deepcopy(saved[1]))

            guard = oomproof.Guard(model, optimizer, restore=restore if restoring else None)
            guard.size = size

            def late(*_):
                if fail.pop("now", False):
                    with torch.no_grad():
                        model[0].weight.add_(1)
                    raise _oom()

            optimizer.register_step_pre_hook(late)
            guard.step(torch.randn(8, 4), lambda part: model(part).square().mean())
            return _state(model, optimizer)

        import random

        states = []
        for fail, size in (({"now": True}, None), ({}, 4), ({}, None)):
            random.seed(0)
            states.append(run(fail, size))
        return [states[0] == states[1], states[0] == states[2]]

    assert child(body, True, uses=_USES) == [True, False]
    ended = child.run(body, False, uses=_USES)
    assert ended.code == 3
    assert "had begun to write" in ended.stderr


def test_the_retry_budget_ends_with_one_error(child: Child) -> None:
    """A step that never fits ends with GuardError at the smallest size, or sooner when retries are spent."""

    def body(retries):
        import torch

        import oomproof

        model, optimizer, _ = _model()
        tried = []

        def loss_fn(part):
            tried.append(len(part))
            raise _oom()

        try:
            oomproof.Guard(model, optimizer, retries=retries).step(torch.randn(8, 4), loss_fn)
        except oomproof.GuardError as error:
            return [tried, str(error), error.__context__ is None]

    tried, why, alone = child(body, 12, uses=_USES)
    assert tried == [8, 4, 2, 1]
    assert "smallest" in why
    assert alone
    tried, why, _ = child(body, 1, uses=_USES)
    assert tried == [8, 4]
    assert "after 1 retries" in why
