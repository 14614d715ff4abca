"""Micro-batches: several backward passes for one optimizer step, at the same batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oomproof.plan.accumulation import Accumulation, Pieces, SplitBatches
from oomproof.plan.technique import CannotApply, Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

#: Why the pieces of a batch may not add up to it, for the option ``unequal``; "compiled" is what "loss" means where
#: the script compiles.
_REASONS = {
    "batch-norm": "batch norms see the statistics of a smaller batch",
    "loss": "the loss is none of torch's means: equal only when it is the mean over samples of what each gives alone",
    "compiled": "what the loss is cannot be told from compiled code: equal only when it is the mean over samples of "
    "what each gives alone",
    "in-batch": "the loss has as many classes as samples, so it may tell each sample from the others of its batch",
}


#: More pieces save next to nothing more, and a step waits for the launches of all of them.
MOST_PARTS = 64


class MicroBatch(Technique):
    """Run each batch in ``parts`` pieces and let the optimizer step after the last, on the sum of their shares.

    Options: ``parts``; ``loaders``, which of the script's DataLoaders are cut, by order, all that are iterated with
    gradients where it is missing; ``unequal``, keys of _REASONS.
    """

    name = "micro-batch"
    title = "run each batch in several pieces, one optimizer step for all"
    fidelity = "equal"
    lowers = ("activation", "input", "temporary")
    keeps = "parameters, gradients and optimizer states: gradients now stay from the first piece to the step"
    rests_on = "torch.autograd.backward, which adds to .grad"
    source = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
    accepts = {"parts": int, "loaders": list, "unequal": list}
    excludes = frozenset(("split-forward", "step-in-backward"))
    rank = 15

    def fidelity_of(self, options: Options) -> str:
        return "approximate" if options.get("unequal") else "equal"

    def unfit(self, facts: Facts) -> str | None:
        size = facts.batch_size
        if facts.framework == "deepspeed":
            return "DeepSpeed accumulates by itself: lower train_micro_batch_size_per_gpu in its configuration"
        if size is None:
            return "no DataLoader with a known batch size gives the training its batches (split-forward needs none)"
        if size < 2:
            return "a batch is one sample"
        if facts.framework != "trainer" and facts.backwards_per_step > 1:
            return (
                f"the script runs {facts.backwards_per_step} backward passes for an optimizer step: where it "
                "accumulates by itself, lower its batch size and raise its number of accumulated batches"
            )
        if any(o.kind == "LBFGS" for o in facts.optimizers):
            return "LBFGS runs the forward pass as often as it likes"
        return None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        size = facts.batch_size or 1
        unequal = self._unequal(facts)
        used = [place for place, loader in enumerate(facts.loaders) if loader.used_in_training]
        more: dict[str, Any] = {"unequal": unequal} if unequal else {}
        if len(used) == 1 and facts.framework not in ("trainer", "lightning"):
            more["loaders"] = used  # several: one is made for each epoch, or the like
        halves = {2**k for k in range(1, size.bit_length()) if 2**k <= size} | {size}
        for parts in sorted(halves):
            if parts <= MOST_PARTS and (facts.framework != "trainer" or size % parts == 0):
                yield {"parts": parts, **more}

    def _unequal(self, facts: Facts) -> list[str]:
        found = []
        if any(model.batch_norms for model in facts.models):
            found.append("batch-norm")
        if facts.framework != "trainer" and "loss-other" in facts.uses:
            found.append("loss")
        if "loss-in-batch" in facts.uses:
            found.append("in-batch")
        return found

    def less_faithful(self, facts: Facts, options: Options) -> str | None:
        keys = options.get("unequal", ())
        compiled = "compile" in facts.uses
        return "; ".join(_REASONS["compiled" if key == "loss" and compiled else key] for key in keys) or None

    def caution(self, facts: Facts, options: Options) -> str | None:
        told = []
        if any(model.dropouts for model in facts.models):
            told.append("dropout draws other random numbers")
        if facts.framework == "trainer":
            told.append(
                "a last batch that is cut unequally is weighed by tokens where the model takes num_items_in_batch, "
                "and as if cut equally where it does not"
            )
        elif facts.framework != "lightning":
            told.append(
                "the loop's body runs once for each piece: counters such as enumerate's, printed losses and weight "
                "averages of the script's own see pieces; optimizer, gradient scaler, clipping and torch's schedules "
                "see batches"
            )
        return "; ".join(told) or None

    def install(self, injection: Injection, options: Options) -> None:
        parts = int(options["parts"])
        by_samples = "loss" in options.get("unequal", ())
        accumulation = Accumulation(injection, self.name, by_samples)
        accumulation.install()
        loaders = _Loaders(injection, self.name, accumulation, parts, options.get("loaders"))
        frameworks = _Frameworks(injection, self.name, accumulation, loaders, parts)
        injection.on_loader.append(loaders.made)
        injection.on_batches.append(loaders.iterated)
        injection.when_imported("accelerate.data_loader", loaders.accelerate)
        injection.when_imported("transformers.trainer", frameworks.transformers)
        for package in ("lightning.pytorch", "pytorch_lightning"):
            injection.when_imported(
                f"{package}.trainer.trainer", functools.partial(frameworks.lightning, package=package)
            )

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        parts = options["parts"]
        steps = parts * facts.backwards_per_step  # of a script that accumulates already
        size = facts.batch_size
        micro = size // parts if size and size % parts == 0 else f"{size} // {parts}"
        if framework == "trainer":
            return f"TrainingArguments(..., per_device_train_batch_size={micro}, gradient_accumulation_steps={steps})"
        if framework == "lightning":
            return f"DataLoader(..., batch_size={micro})\nTrainer(..., accumulate_grad_batches={steps})"
        if framework == "deepspeed":
            return f'"train_micro_batch_size_per_gpu": {micro},\n"gradient_accumulation_steps": {steps}'
        if framework == "accelerate":
            return (
                f"accelerator = Accelerator(gradient_accumulation_steps={steps})\n"
                f"loader = DataLoader(..., batch_size={micro})\n\n"
                "for batch in loader:\n"
                "    with accelerator.accumulate(model):\n"
                "        loss = ...  # the forward pass\n"
                "        accelerator.backward(loss)\n"
                "        optimizer.step()\n"
                "        optimizer.zero_grad()"
            )
        return (
            "for inputs, targets in loader:\n"
            f"    for x, y in zip(inputs.chunk({parts}), targets.chunk({parts})):\n"
            "        loss = criterion(model(x), y) * len(x) / len(inputs)  # a mean over tokens: their share instead\n"
            "        loss.backward()\n"
            "    optimizer.step()\n"
            "    optimizer.zero_grad()"
        )


class _Loaders:
    """Cuts the batches of plain loops and of accelerate's."""

    def __init__(self, injection: Injection, name: str, accumulation: Accumulation, parts: int, chosen: Any) -> None:
        self._injection = injection
        self._name = name
        self._accumulation = accumulation
        self._parts = parts
        self._chosen = chosen
        self._order: dict[int, int] = {}  # a loader's id, its place among those made
        self._count = 0
        self._within: set[int] = set()  # loaders whose batches go through another that is cut
        self.active = True

    def made(self, loader: Any) -> None:
        """A DataLoader was made."""
        self._order[id(loader)] = self._count
        self._count += 1

    def iterated(self, loader: Any, iterator: Any) -> Any:
        """A DataLoader starts to give batches: return what gives pieces of them."""
        if id(loader) in self._within:
            return iterator
        return self._cut(loader, loader, iterator)

    def _cut(self, loader: Any, inner: Any, iterator: Any) -> Any:
        if not self.active or self._accumulation.busy or not self._injection.torch.is_grad_enabled():
            return iterator
        if self._chosen is not None and self._order.get(id(inner)) not in self._chosen:
            return iterator
        self._injection.say(self._name, f"each batch in {self._parts} pieces, one optimizer step for all of them")
        return Pieces(self._accumulation, self._injection, loader, iterator, self._parts)

    def accelerate(self, module: ModuleType) -> None:
        """Cut what accelerate's loaders give: they read one batch ahead of the loop."""
        for name in ("DataLoaderShard", "DataLoaderDispatcher"):
            kind = getattr(module, name)
            kind.__iter__ = self._outside(kind.__iter__)

    def _outside(self, original: Any) -> Any:
        @functools.wraps(original)
        def iterate(shard: Any) -> Any:
            inner = getattr(shard, "base_dataloader", shard)
            self._within |= {id(inner), id(shard)}
            return self._cut(shard, inner, original(shard))

        return iterate


class _Frameworks:
    """Has frameworks accumulate by themselves, over smaller batches."""

    def __init__(
        self, injection: Injection, name: str, accumulation: Accumulation, loaders: _Loaders, parts: int
    ) -> None:
        self._injection = injection
        self._name = name
        self._accumulation = accumulation
        self._loaders = loaders
        self._parts = parts

    # ---- transformers --------------------------------------------------------------------------------------------

    def transformers(self, module: Any) -> None:
        """Have transformers' Trainer make smaller batches and accumulate them."""
        kind = module.Trainer
        signature = inspect.signature(kind.__init__)
        init, train = kind.__init__, kind.train

        @functools.wraps(init)
        def made(trainer: Any, *args: Any, **kwargs: Any) -> None:
            self._loaders.active = False
            given = signature.bind(trainer, *args, **kwargs).arguments.get("args")
            self._guarded(self._shrink_arguments, given)
            init(trainer, *args, **kwargs)

        @functools.wraps(train)
        def trains(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._guarded(self._check_trainer, trainer, kind)
            return train(trainer, *args, **kwargs)

        kind.__init__, kind.train = made, trains

    def _shrink_arguments(self, given: Any) -> None:
        if given is None:
            raise CannotApply("the Trainer is built without TrainingArguments")
        if getattr(given, "_micro_batch", False):
            return  # two trainers, the same arguments
        size = given.per_device_train_batch_size
        if size % self._parts:
            raise CannotApply(f"per_device_train_batch_size={size} cannot be cut into {self._parts} equal pieces")
        given._micro_batch = True
        given.per_device_train_batch_size = size // self._parts
        given.gradient_accumulation_steps *= self._parts
        self._injection.say(
            self._name,
            f"per_device_train_batch_size={given.per_device_train_batch_size}, "
            f"gradient_accumulation_steps={given.gradient_accumulation_steps}",
        )

    def _check_trainer(self, trainer: Any, kind: Any) -> None:
        arguments, data = trainer.args, trainer.train_dataset
        full = arguments.per_device_train_batch_size * self._parts * arguments.world_size
        if arguments.dataloader_drop_last and hasattr(data, "__len__") and len(data) % full:
            raise CannotApply(
                "with dataloader_drop_last=True samples of the last batch would be trained: pieces of it are full"
            )
        own = type(trainer).compute_loss
        if (
            own is not kind.compute_loss
            and "site-packages" not in own.__code__.co_filename
            and trainer.model_accepts_loss_kwargs
            and trainer.compute_loss_func is None
            and getattr(trainer, "loss_is_scaled_for_ga", None) is None
        ):
            raise CannotApply(
                "the Trainer has a compute_loss of its own: whether it divides by num_items_in_batch is not known; "
                "say so with loss_is_scaled_for_ga (transformers 5) or model_accepts_loss_kwargs = False"
            )

    # ---- Lightning -----------------------------------------------------------------------------------------------

    def lightning(self, module: Any, package: str) -> None:
        """Have Lightning's Trainer accumulate the pieces that its training DataLoader gives."""
        import importlib

        connector: Any = importlib.import_module(f"{package}.trainer.connectors.data_connector")
        callback: Any = importlib.import_module(f"{package}.callbacks")
        training = importlib.import_module(f"{package}.trainer.states").RunningStage.TRAINING
        kind, parts, accumulation = module.Trainer, self._parts, self._accumulation
        init = kind.__init__
        samplers: list[SplitBatches] = []
        guarded = self._guarded

        class FollowPieces(callback.Callback):  # type: ignore[misc]
            def on_fit_start(self, trainer: Any, model: Any) -> None:
                if not model.automatic_optimization:
                    accumulation.refuse("the module optimizes by itself (automatic_optimization = False)")

            def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
                guarded(accumulation.begin, trainer, samplers[-1].pieces[batch_idx])

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                accumulation.end(trainer)

        @functools.wraps(init)
        def made(trainer: Any, *args: Any, **kwargs: Any) -> None:
            self._loaders.active = False
            init(trainer, *args, **kwargs)
            self._guarded(self._raise_accumulation, trainer, callback.GradientAccumulationScheduler)
            accumulation.scale = parts
            trainer.callbacks.append(FollowPieces())

        prepare = connector._DataConnector._prepare_dataloader

        @functools.wraps(prepare)
        def prepared(connected: Any, dataloader: Any, shuffle: bool, mode: Any) -> Any:
            result = prepare(connected, dataloader, shuffle, mode)
            if mode == training and not isinstance(getattr(result, "batch_sampler", None), SplitBatches):
                samplers.append(self._guarded(self._smaller, result, bool(samplers)))
            return result

        kind.__init__ = made
        connector._DataConnector._prepare_dataloader = prepared

    def _raise_accumulation(self, trainer: Any, scheduler: type) -> None:
        if trainer.accumulate_grad_batches != 1 or any(isinstance(c, scheduler) for c in trainer.callbacks):
            raise CannotApply(
                "the Trainer accumulates batches already: lower the batch size, raise accumulate_grad_batches"
            )
        trainer.accumulate_grad_batches = self._parts
        for name in ("limit_train_batches", "val_check_interval"):
            value = getattr(trainer, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                setattr(trainer, name, value * self._parts)  # counted in pieces now
        self._injection.say(self._name, f"Trainer(accumulate_grad_batches={self._parts}) over pieces of each batch")

    def _smaller(self, loader: Any, another: bool) -> SplitBatches:
        from torch.utils.data import IterableDataset as iterable

        sampler = getattr(loader, "batch_sampler", None)
        if another:
            raise CannotApply("several DataLoaders give the training its batches, or new ones are made on the way")
        if sampler is None or isinstance(loader.dataset, iterable):
            raise CannotApply("the training's batches are not drawn by a batch sampler")
        split = SplitBatches(sampler, self._parts)
        # DataLoader forbids it after __init__, as its other attributes would not follow; only this one is read
        object.__setattr__(loader, "batch_sampler", split)
        return split

    # ---- both ----------------------------------------------------------------------------------------------------

    def _guarded(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except CannotApply as error:
            self._injection.refuse(self._name, str(error))


TECHNIQUE = MicroBatch()
