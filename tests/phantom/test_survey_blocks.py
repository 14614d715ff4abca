"""What a survey finds of repeated blocks, against the allocator's own figures."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from child import Child

from oomproof.plan.block_surveys import Survey, problem_from_surveys
from oomproof.plan.blocks import Problem


def surveyed(choices, step, returns_itself):  # type: ignore[no-untyped-def]
    """Return for each list of actions the survey of a step, and the peak of a step that nobody looks at."""
    import functools

    import torch
    from torch.utils.checkpoint import checkpoint

    from oomproof.plan.survey_blocks import BlockSurvey

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(512)
            self.up = torch.nn.Linear(512, 2048)
            self.down = torch.nn.Linear(2048, 512)

        def forward(self, x, scale=1.0):  # type: ignore[no-untyped-def]
            return (x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) * scale,)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(1024, 512)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
            self.head = torch.nn.Linear(512, 1024)
            self.again = False  # as transformers does: the block is called again by its name in backward

        def forward(self, ids):  # type: ignore[no-untyped-def]
            x = self.embedding(ids)
            for block in self.blocks:
                if self.again:
                    x = checkpoint(functools.partial(block.__call__, scale=2.0), x, use_reentrant=False)[0]
                else:
                    x = block(x, scale=2.0)[0]
            return torch.nn.functional.cross_entropy(self.head(x), ids)

    net = Net().cuda()
    ids = torch.zeros(1024, dtype=torch.int64, device="cuda")
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    plain = [block.forward for block in net.blocks]

    def run():  # type: ignore[no-untyped-def]
        net(ids).backward()
        if step:
            optimizer.step()
        optimizer.zero_grad()

    results = []
    # Recomputing in autograd's thread makes a workspace of cuBLASLt for it (torch 2.11), which then stays.
    for names in [["recompute"] * 4, *choices]:
        net.again = returns_itself
        for block, forward, name in zip(net.blocks, plain, names):  # noqa: B905  (Python 3.9)
            again = functools.partial(checkpoint, forward, use_reentrant=False)
            block.forward = again if name == "recompute" and not returns_itself else forward
        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        bare = torch.cuda.max_memory_allocated()
        with BlockSurvey(net.blocks) as survey:
            run()
        assert torch.cuda.memory_allocated() == before
        results.append([survey.result(), bare])
    return results[1:]


#: With expandable segments the allocator splits blocks at 512 B, so it counts what is asked for.
AS_ASKED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
EVERYWHERE = [["keep"] * 4, ["recompute"] * 4]


def problem_of(results: Any) -> Problem:
    surveys = {name: Survey.from_dict(data) for name, (data, _) in zip(["keep", "recompute"], results, strict=True)}
    seconds = {"keep": [0.0] * 4, "recompute": [1.0] * 4}
    return problem_from_surveys(surveys, seconds, alike_bytes=0)


@pytest.mark.parametrize("step", [False, True])
def test_the_figures_add_up_to_the_peak(child: Child, step: bool) -> None:
    """What a survey says adds up, to the byte, to the peak of a step that nobody looks at."""
    for data, bare in child(surveyed, EVERYWHERE, step, False):
        assert data["peak_bytes"] == bare
        one = problem_from_surveys({"it": Survey.from_dict(data)}, {"it": [0.0] * 4}, alike_bytes=0)
        unlearned = Problem(**{name: getattr(one, name) for name in one.__dataclass_fields__ if name != "observations"})
        assert unlearned.predict(["it"] * 4).peak_bytes == bare


def test_every_mixture_is_predicted(child: Child) -> None:
    """From two surveys follows the peak of each of the 16 mixtures, to the byte."""
    problem = problem_of(child(surveyed, EVERYWHERE, False, False, env=AS_ASKED))
    mixtures = [list(names) for names in itertools.product(["keep", "recompute"], repeat=4)]
    results = child(surveyed, mixtures, False, False, env=AS_ASKED)
    predicted = [problem.predict(names).peak_bytes for names in mixtures]
    assert predicted == [bare for _, bare in results]
    assert len(set(predicted)) > 4


def test_a_block_called_again_in_backward_is_recomputing(child: Child) -> None:
    """A block that is called again during backward has the figures of one that recomputes inside."""
    inside, outside = (child(surveyed, EVERYWHERE[1:], False, again)[0][0] for again in (False, True))
    assert outside["blocks"][1] == inside["blocks"][1]
    assert outside["peak_bytes"] == inside["peak_bytes"]


def refused():  # type: ignore[no-untyped-def]
    """Return what result() says of blocks in another order and of a pass without backward."""
    import torch

    from oomproof.plan.survey_blocks import BlockSurvey

    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).cuda()
    x = torch.zeros(8, 8, device="cuda")
    said = []
    for blocks, run in [
        (list(net)[::-1], lambda: net(x).sum().backward()),
        (list(net), lambda: net(x)),
        (list(net), lambda: None),
    ]:
        with BlockSurvey(blocks) as survey:
            run()
        try:
            survey.result()
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_pass_that_is_not_whole_is_refused(child: Child) -> None:
    """Blocks in another order, and a pass without a backward, are told instead of being measured wrongly."""
    said = child(refused)
    assert len(said) == 3
    assert all("did not run once each" in text for text in said)
    assert "came where" in said[0]
    assert "backward of block 2 is missing" in said[1]
