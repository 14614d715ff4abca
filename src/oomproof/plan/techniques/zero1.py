"""Optimizer states spread over the GPUs of data parallel training."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan import spread
from oomproof.plan.ranks import Ranks
from oomproof.plan.technique import CannotApply, Options, Technique
from oomproof.plan.techniques import ddp

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class ZeroOne(Technique):
    """Have each GPU keep the states of a part of the parameters, step those, and send them to the others.

    Options: ``gpus``, and those of ``ddp``, which it includes.
    """

    name = "zero1"
    title = "spread the optimizer's states over the GPUs, and each batch"
    fidelity = "equal"
    lowers = ("optimizer_state", "activation", "input")
    keeps = "parameters and gradients: each GPU has them whole; whole parameters are spread, so one GPU may get more"
    rests_on = "torch.distributed.optim.ZeroRedundancyOptimizer, over DistributedDataParallel"
    source = "https://docs.pytorch.org/docs/stable/distributed.optim.html"
    accepts = ddp.TECHNIQUE.accepts
    excludes = frozenset(("ddp", "fsdp2", "tensor-parallel"))
    rank = 62

    def world_size(self, options: Options) -> int | None:
        return int(options["gpus"])

    def fidelity_of(self, options: Options) -> str:
        return ddp.TECHNIQUE.fidelity_of(options)

    def less_faithful(self, facts: Facts, options: Options) -> str | None:
        return ddp.TECHNIQUE.less_faithful(facts, options)

    def unfit(self, facts: Facts) -> str | None:
        if facts.framework in spread.THEIR_OWN:
            return f"{spread.THEIR_OWN[facts.framework]} makes the optimizer's wrapper itself"
        if not facts.optimizers:
            return "the script builds no optimizer of torch's kind"
        return spread.unfit(facts)

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        yield from ddp.TECHNIQUE.variants(facts)

    def only_proposed(self, facts: Facts, options: Options) -> bool:
        return ddp.TECHNIQUE.only_proposed(facts, options)

    def caution(self, facts: Facts, options: Options) -> str | None:
        return spread.caution(facts)

    def install(self, injection: Injection, options: Options) -> None:
        ranks = Ranks(injection, self.name, options["gpus"])
        ddp.parallelise(ranks, options)
        if not ranks.here:
            return
        cuda = injection.torch.cuda

        def instead(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            module = importlib.import_module("torch.distributed.optim.zero_redundancy_optimizer")
            base = module.ZeroRedundancyOptimizer
            if issubclass(kind, base):
                raise CannotApply("the script builds a ZeroRedundancyOptimizer by itself")
            if len(args) > 1:
                raise CannotApply(f"{kind.__name__} gets options without their names; write {kind.__name__}(..., lr=…)")
            ranks.start()
            given = dict(kwargs)
            parameters = args[0] if args else given.pop("params")

            class ZeroRedundancyOptimizer(base):  # type: ignore[misc, valid-type] # torch has no types here
                """One whose state dict is whole on rank 0 without being asked to gather it first."""

                def state_dict(self) -> Any:
                    if injection.rehearsal:
                        return self.optim.state_dict()  # the other ranks' parts do not exist there
                    self.consolidate_state_dict(to=0)
                    return super().state_dict() if ranks.rank == 0 else self.optim.state_dict()

            optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=kind, **given)
            if cuda.is_available() and any(not p.is_cuda for p in optimizer._all_params):
                raise CannotApply("the optimizer is built before the model is moved to its GPU; build it afterwards")
            injection.say(self.name, f"the states of {kind.__name__} are spread over {ranks.size} GPUs")
            return optimizer

        injection.other_optimizer.append(instead)
        ranks.one_writer()

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        wrapped = ddp.TECHNIQUE.code(options, framework, facts)
        if framework != "code" or wrapped is None:
            return None
        kind = facts.optimizers[0].kind if facts.optimizers else "AdamW"
        return (
            f"{wrapped}\nfrom torch.distributed.optim import ZeroRedundancyOptimizer\n"
            f"optimizer = ZeroRedundancyOptimizer(\n"
            f"    model.parameters(), optimizer_class=torch.optim.{kind}, **given  # what {kind} was given\n)"
        )


TECHNIQUE = ZeroOne()
