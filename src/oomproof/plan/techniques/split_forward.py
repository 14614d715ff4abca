"""The model's forward slice by slice: the loss sees the whole batch, one slice's activations exist at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oomproof.plan import splitting
from oomproof.plan.activations import Activations, refuse_compiled, unfit_activations, unfit_compiled
from oomproof.plan.technique import CannotApply, Options, Technique
from oomproof.plan.techniques.micro_batch import MOST_PARTS
from oomproof.plan.wrapping import wrap_forward

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

_WRAPPERS = ("DistributedDataParallel", "DataParallel")  # they call the model that they hold


class SplitForward(Technique):
    """Run the model on ``parts`` slices of its batch, each computed again in the backward pass.

    Losses, counters and schedules stay as they are. Option ``unequal``: ["batch-norm"] where the model has some.
    """

    name = "split-forward"
    title = "run the model on slices of the batch, each computed again in the backward pass"
    fidelity = "equal"
    lowers = ("activation",)
    keeps = "parameters, gradients and optimizer states; and what the model returns, which stays whole, with its loss"
    rests_on = "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
    source = "https://docs.pytorch.org/docs/stable/checkpoint.html"
    accepts = {"parts": int, "unequal": list}
    excludes = frozenset(("micro-batch", "compile-budget"))
    rank = 30

    def fidelity_of(self, options: Options) -> str:
        return "approximate" if options.get("unequal") else "equal"

    def unfit(self, facts: Facts) -> str | None:
        if not facts.models:
            return "no module is trained"
        if facts.framework in ("trainer", "lightning"):
            return f"the model is called by {facts.framework}, which accumulates smaller batches by itself: micro-batch"
        if facts.framework in ("fsdp", "deepspeed") or "fsdp" in facts.uses:
            return "sharded parameters would be gathered for each slice, in both passes: lower the batch size"
        if facts.batch_size is not None and facts.batch_size < 2:
            return "a batch is one sample"
        return unfit_activations(facts) or unfit_compiled(facts)

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        unequal = {"unequal": ["batch-norm"]} if any(model.batch_norms for model in facts.models) else {}
        most = facts.batch_size or 16
        for parts in sorted({2**k for k in range(1, most.bit_length())} | {most}):
            if 1 < parts <= min(most, MOST_PARTS):
                yield {"parts": parts, **unequal}

    def less_faithful(self, facts: Facts, options: Options) -> str | None:
        return "batch norms see the statistics of a smaller batch" if options.get("unequal") else None

    def caution(self, facts: Facts, options: Options) -> str | None:
        told = ["it costs one more forward pass"]
        if any(model.dropouts for model in facts.models):
            told.append("dropout draws other random numbers")
        return "; ".join(told)

    def install(self, injection: Injection, options: Options) -> None:
        torch: Any = injection.torch
        parts = int(options["parts"])
        activations = Activations(injection, self.name)

        def sliced(model: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(getattr(model, "config", None), "use_cache", False) and "use_cache" in _parameters(model):
                kwargs.setdefault("use_cache", False)  # transformers' models would return a cache
            total = splitting.batch_size(torch, (args, kwargs))
            if total < 2:
                raise CannotApply("the model is given one sample")
            sizes = splitting.sizes(total, parts)
            found = [
                activations.recomputed(model, forward, *cut_args, **cut_kwargs)
                for cut_args, cut_kwargs in splitting.split(torch, (args, kwargs), sizes)
            ]
            injection.say(self.name, f"a batch runs through it in {len(sizes)} slices", type(model).__name__)
            return splitting.join(torch, found, sizes)

        def around(model: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            try:
                return sliced(model, forward, *args, **kwargs)
            except CannotApply as error:
                injection.refuse(self.name, str(error))

        def wrap(model: Any) -> None:
            refuse_compiled(model)
            while type(model).__name__ in _WRAPPERS:
                model = model.module
            wrap_forward(model, functools.partial(around, model))

        injection.on_model.append(wrap)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        return (
            "import torch\n"
            "from torch.utils.checkpoint import checkpoint\n\n"
            f"slices = inputs.chunk({options['parts']})\n"
            "outputs = torch.cat([checkpoint(model, part, use_reentrant=False) for part in slices])"
        )


def _parameters(model: Any) -> Mapping[str, Any]:
    return inspect.signature(type(model).forward).parameters


TECHNIQUE = SplitForward()
