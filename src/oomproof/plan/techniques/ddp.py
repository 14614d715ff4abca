"""Data parallel training: the model on every GPU, a part of the batch on each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan import frameworks, spread
from oomproof.plan.ranks import Ranks
from oomproof.plan.technique import CannotApply, Options, Technique
from oomproof.plan.wrapping import wrap_forward

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

#: Options that DistributedDataParallel gets as they are.
PASSED = ("gradient_as_bucket_view", "bucket_cap_mb", "static_graph", "find_unused_parameters")


def parallelise(ranks: Ranks, options: Options) -> None:
    """Have the model that is trained run inside a DistributedDataParallel that the script does not see.

    The script keeps its model: names, attributes and state dict are its own. The wrapper is made when the model is
    first called for training: it must have been moved to its GPU.
    """
    injection = ranks.injection
    torch = injection.torch
    kwargs = {name: options[name] for name in PASSED if name in options}
    if kwargs and ranks.here:
        frameworks.pass_to_ddp(ranks, kwargs)

    def wrap(model: Any) -> None:
        if not ranks.here or ranks.theirs is not None or not any(p.requires_grad for p in model.parameters()):
            return
        norms = torch.nn.modules.batchnorm._BatchNorm
        if options.get("batch_norm") == "synchronised":
            _synchronise(torch, model)
        elif any(isinstance(m, norms) and not isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules()):
            what = "each GPU normalises with the statistics of its own part of the batch"
            injection.say(ranks.technique, what, "batch norms")

        class Inside(torch.nn.Module):  # type: ignore[misc, name-defined] # torch has no types here
            """What the wrapper calls: the model's own forward, and the model's parameters."""

            def __init__(self) -> None:
                super().__init__()
                self.model = model
                self.original: Any = None

            def forward(self, *args: Any, **kw: Any) -> Any:
                return self.original(*args, **kw)

        wrapper: list[Any] = []

        def around(forward: Any, *args: Any, **kw: Any) -> Any:
            if not torch.is_grad_enabled() or not model.training:
                return forward(*args, **kw)
            if not wrapper:
                ranks.start()
                inside = Inside()
                inside.train(model.training)
                try:
                    wrapper.append(torch.nn.parallel.DistributedDataParallel(inside, **kwargs))
                    injection.own(wrapper[0])
                except ValueError as error:
                    ranks.refuse(f"DistributedDataParallel: {error}")
                injection.say(ranks.technique, f"gradients are averaged over {ranks.size} GPUs", type(model).__name__)
            inside = wrapper[0].module
            inside.original = forward
            return wrapper[0](*args, **kw)

        wrap_forward(model, around)

    injection.on_model.append(_named(wrap, ranks.technique))


def _named(callback: Any, technique: str) -> Any:
    """Have a refusal name the technique that asked for it."""
    callback.technique = technique
    return callback


def _synchronise(torch: Any, model: Any) -> None:
    if isinstance(model, torch.nn.modules.batchnorm._BatchNorm):
        raise CannotApply("the model is a batch norm itself")
    torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # replaces the norms within it, with the same parameters


class DataParallel(Technique):
    """Keep parameters, gradients and optimizer states on every GPU, and run a part of each batch on it.

    Options: ``gpus``; ``gradient_as_bucket_view`` (default False, as in PyTorch), ``bucket_cap_mb``; ``batch_norm``
    "synchronised" has batch norms share their statistics, "own" has each GPU normalise with its part alone.
    """

    name = "ddp"
    title = "run a part of each batch on each of several GPUs"
    fidelity = "equal"
    lowers = ("activation", "input")
    keeps = "parameters, gradients and optimizer states: each GPU has them whole, and buckets of gradients beside them"
    rests_on = "torch.nn.parallel.DistributedDataParallel(..., gradient_as_bucket_view=True)"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
    accepts = {
        "gpus": int,
        "gradient_as_bucket_view": bool,
        "bucket_cap_mb": float,
        "static_graph": bool,
        "find_unused_parameters": bool,
        "batch_norm": ("synchronised", "own"),
    }
    excludes = frozenset(("fsdp2", "zero1", "tensor-parallel"))
    rank = 60

    def world_size(self, options: Options) -> int | None:
        return int(options["gpus"])

    def fidelity_of(self, options: Options) -> str:
        return "approximate" if options.get("batch_norm") == "own" else "equal"

    def less_faithful(self, facts: Facts, options: Options) -> str | None:
        own = options.get("batch_norm") == "own"
        return "batch norms of each GPU see the statistics of its own part of the batch" if own else None

    def unfit(self, facts: Facts) -> str | None:
        return spread.unfit(facts) or spread.no_switch(facts)

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        plain = {"gpus": facts.gpus, "gradient_as_bucket_view": True}
        if any(model.batch_norms for model in facts.models):
            yield {**plain, "batch_norm": "synchronised"}
            yield {**plain, "batch_norm": "own"}
        else:
            yield plain

    def only_proposed(self, facts: Facts, options: Options) -> bool:
        return spread.only_proposed(facts)

    def caution(self, facts: Facts, options: Options) -> str | None:
        return spread.caution(facts)

    def install(self, injection: Injection, options: Options) -> None:
        ranks = Ranks(injection, self.name, options["gpus"], switched=True)
        parallelise(ranks, options)
        ranks.one_writer()
        if ranks.here:
            frameworks.switch(ranks, options, fsdp=False)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        view = bool(options.get("gradient_as_bucket_view"))
        start = f"# torchrun --nproc-per-node {options['gpus']} train.py"
        if framework == "trainer":
            size = (
                f"{facts.batch_size} // {options['gpus']}" if facts.batch_size else f"batch_size // {options['gpus']}"
            )
            return f"{start}\nTrainingArguments(..., per_device_train_batch_size={size})"
        if framework == "lightning":
            strategy = f"DDPStrategy(gradient_as_bucket_view={view})"
            sync = ", sync_batchnorm=True" if options.get("batch_norm") == "synchronised" else ""
            return (
                "from lightning.pytorch.strategies import DDPStrategy\n"
                f"Trainer(..., devices={options['gpus']}, strategy={strategy}{sync})"
                f"  # and batch_size // {options['gpus']} in the DataLoader"
            )
        if framework == "accelerate":
            return (
                f"# accelerate launch --num_processes {options['gpus']} train.py\n"
                "from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs\n"
                "accelerator = Accelerator(\n"
                "    dataloader_config=DataLoaderConfiguration(split_batches=True),\n"
                f"    kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view={view})],\n"
                ")"
            )
        if framework != "code":
            return None
        given = "".join(f", {name}={options[name]}" for name in PASSED if name in options)
        sync = "model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n"
        return (
            f"{spread.start(options['gpus'])}\n{spread.batches(facts)}\nmodel.cuda()\n"
            + (sync if options.get("batch_norm") == "synchronised" else "")
            + "model = torch.nn.parallel.DistributedDataParallel(\n"
            f'    model, device_ids=[int(os.environ["LOCAL_RANK"])]{given}\n)'
        )


TECHNIQUE = DataParallel()
