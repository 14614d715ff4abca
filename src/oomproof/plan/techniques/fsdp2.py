"""Fully sharded data parallel: every GPU keeps a part of each parameter."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from oomproof.measure import versions
from oomproof.plan import frameworks, spread
from oomproof.plan.ranks import Ranks
from oomproof.plan.repeated import find_blocks
from oomproof.plan.replaced import Replaced
from oomproof.plan.technique import CannotApply, Options, Technique, in_code
from oomproof.plan.wrapping import own_kind

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

OLDEST = (2, 4)  # fully_shard in torch.distributed._composable.fsdp; public from 2.6 on


def public_name() -> str:
    """Return the module that has ``fully_shard``."""
    module: Any = importlib.import_module("torch.distributed.fsdp")
    return "torch.distributed.fsdp" if hasattr(module, "fully_shard") else "torch.distributed._composable.fsdp"


class FullyShard:
    """Shards a model in place, block by block."""

    def __init__(self, ranks: Ranks, options: Options) -> None:
        self.technique = ranks.technique
        self._ranks = ranks
        self._torch: Any = ranks.injection.torch
        self._options = options
        self._offloads = bool(options.get("cpu_offload"))
        self._replaced = Replaced(self._torch, ranks.refuse)
        self._kwargs: dict[str, Any] = {}
        self._fsdp: Any = None
        self._root: Any = None  # what was sharded last
        injection = ranks.injection
        injection.on_moving.append(self.moving)
        injection.on_model.append(self.model)
        injection.on_parameters.append(self.parameters)
        self._replaced.watch_clipping()
        self._replaced.watch_loading()
        ranks.one_writer(self._replaced.whole)

    def parameters(self, model: Any, groups: list[Any]) -> list[Any]:
        """Give the optimizer the sharded parameters."""
        now = self._replaced.in_groups(groups)
        if model is None and self._root is not None and self._replaced.had(groups):
            self._ranks.injection.model_ready(self._root)
        return now

    def moving(self, module: Any) -> None:
        """Shard a model when it goes to the GPU: a block is moved whole, and the next when its shard alone is left."""
        if self._ranks.theirs is not None or self._ranks.injection.moving_to != self._ranks.device_type:
            return
        if any(p.requires_grad for p in module.parameters()):
            self.shard(module)

    def model(self, model: Any) -> None:
        """Shard a model that was not moved: it was made on the GPU, or is trained on the CPU."""
        if self._ranks.theirs is None and any(p.requires_grad for p in model.parameters()):
            self.shard(model)

    def shard(self, model: Any) -> None:
        """Shard the repeated blocks, and the rest with the model itself."""
        ready = self._ready()
        if isinstance(model, ready.FSDPModule):
            return
        torch = self._torch
        if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            raise CannotApply(
                "batch norms would normalise with a part of the batch, and each GPU keep other statistics"
            )
        groups = find_blocks(model)
        blocks = [module for group in groups for module in group.modules]
        self._check(model, blocks)
        self._ranks.count_calls(model)
        size = f"over {self._ranks.size} GPUs"
        for group in groups:
            for module in group.modules:
                self._shard_one(module)
            what = f"{len(group.names)} {group.kind} are sharded {size}, one at a time is whole"
            self._ranks.injection.say(self.technique, what, group.container or own_kind(model).__name__)
        kind = own_kind(model).__name__
        self._shard_one(model)
        self._root = model
        what = f"what is in no block is sharded {size}, and whole in both passes"
        if not blocks:
            what = f"no repeated blocks: all of it is sharded {size} as one, and whole in both passes"
        self._ranks.injection.say(self.technique, what, kind)
        if self._offloads:
            self._keep_on_host(model)

    def _ready(self) -> Any:
        if self._fsdp is not None:
            return self._fsdp
        fsdp: Any = importlib.import_module(public_name())
        self._kwargs["mesh"] = self._ranks.mesh()
        if self._options.get("mixed_precision"):
            dtype = getattr(self._torch, self._options["mixed_precision"])
            policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=self._torch.float32)
            self._kwargs["mp_policy"] = policy
        if self._offloads:
            pins = self._ranks.device_type == "cuda"
            self._kwargs["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=pins)
        self._fsdp = fsdp
        return fsdp

    def _shard_one(self, module: Any) -> None:
        if isinstance(module, self._fsdp.FSDPModule):
            return
        reshard = self._options.get("reshard_after_forward", True)
        before = self._replaced.before(module)
        self._fsdp.fully_shard(module, reshard_after_forward=reshard, **self._kwargs)
        self._replaced.after(before)

    def _check(self, model: Any, blocks: list[Any]) -> None:
        """Refuse what FSDP2 would fail on later, or do otherwise than is meant."""
        block = {id(module): n for n, module in enumerate(blocks)}
        within = {"": -1}  # by module's name; -1: in no block
        used: dict[int, int] = {}
        dtypes: dict[int, set[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):  # parents first
            where = within[name] = block.get(id(module), within[name.rpartition(".")[0]])
            for own, p in module._parameters.items():
                if p is None or isinstance(p, self._replaced.dtensor):
                    continue
                full = f"{name}.{own}" if name else own
                if used.setdefault(id(p), where) != where:
                    raise CannotApply(
                        f"{full} is shared with another block or with what is in none: those cannot be sharded apart"
                    )
                if not p.is_floating_point():
                    raise CannotApply(f"{full} is {p.dtype}: quantised weights are not sharded")
                if p.requires_grad:
                    dtypes.setdefault(where, set()).add(str(p.dtype).replace("torch.", ""))
                if len(dtypes.get(where, ())) > 1:
                    found = " and ".join(sorted(dtypes[where]))
                    raise CannotApply(f"{full} is sharded together with others of another dtype ({found})")

    def _keep_on_host(self, model: Any) -> None:
        """Have ``model.to("cuda")`` leave the shards where the offload policy wants them."""
        kind = type(model)
        dtensor = self._replaced.dtensor
        original = kind._apply

        def _apply(module: Any, function: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
            return original(module, lambda t: t if isinstance(t, dtensor) else function(t), *args, **kwargs)

        model.__class__ = type(kind.__name__, (kind,), {"_apply": _apply, "__module__": kind.__module__})


class FullySharded(Technique):
    """Keep 1/N of each parameter, gradient and optimizer state on each GPU, and make a block whole when it runs.

    Options: ``gpus``; ``reshard_after_forward`` True (let go of a block's whole parameters after its forward pass, as
    is PyTorch's default), False (keep them until the backward pass) or the number of GPUs to keep them spread over
    meanwhile; ``mixed_precision`` "bfloat16" computes with parameters of that dtype; ``cpu_offload`` keeps shards and
    optimizer states on the host; ``blocks``, the classes of the repeated blocks, for the code.
    """

    name = "fsdp2"
    title = "spread parameters, gradients and optimizer states over the GPUs, and each batch"
    fidelity = "equal"
    lowers = ("parameter", "gradient", "optimizer_state", "activation", "input")
    keeps = "the block that runs, which is whole, and the next one, which is fetched meanwhile"
    rests_on = "torch.distributed.fsdp.fully_shard"
    source = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
    accepts = {
        "gpus": int,
        "reshard_after_forward": (bool, int),
        "mixed_precision": ("bfloat16", "float16"),
        "cpu_offload": bool,
        "blocks": list,
    }
    excludes = frozenset(("ddp", "zero1", "tensor-parallel"))
    rank = 64

    def world_size(self, options: Options) -> int | None:
        return int(options["gpus"])

    def fidelity_of(self, options: Options) -> str:
        return "approximate" if options.get("mixed_precision") else "equal"

    def less_faithful(self, facts: Facts, options: Options) -> str | None:
        dtype = options.get("mixed_precision")
        return f"it computes in {dtype}; the sharded parameters keep their own dtype" if dtype else None

    def unfit(self, facts: Facts) -> str | None:
        if versions.numbers(facts.torch)[:2] < OLDEST:
            return f"torch {facts.torch} has no fully_shard; it is there from 2.4 on"
        if any(model.batch_norms for model in facts.models):
            return "batch norms would normalise with a part of the batch, and keep other statistics on each GPU"
        return spread.unfit(facts) or spread.no_switch(facts)

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        plain: dict[str, Any] = {"gpus": facts.gpus, "blocks": sorted({group.kind for group in facts.blocks})}
        uses_bf16 = facts.models and facts.models[0].dtypes[:1] == ("bfloat16",)
        yield {**plain, "reshard_after_forward": False}
        yield {**plain, "reshard_after_forward": True}
        if "grad-scaler" not in facts.uses:
            yield {**plain, "reshard_after_forward": True, "cpu_offload": True}
        if not uses_bf16 and facts.capability >= (8, 0):
            yield {**plain, "reshard_after_forward": True, "mixed_precision": "bfloat16"}

    def only_proposed(self, facts: Facts, options: Options) -> bool:
        return spread.only_proposed(facts)

    def caution(self, facts: Facts, options: Options) -> str | None:
        said = [spread.caution(facts)]
        if not facts.blocks:
            said.append("the model has no repeated blocks: all its parameters are whole while it runs")
        if options.get("cpu_offload"):
            said.append("the optimizer steps on the host, and shards go there and back in every step")
        return "; ".join(said)

    def install(self, injection: Injection, options: Options) -> None:
        reshard = options.get("reshard_after_forward", True)
        if not isinstance(reshard, bool) and (not 1 < reshard < options["gpus"] or options["gpus"] % reshard):
            raise CannotApply(f"reshard_after_forward={reshard} is no divisor of {options['gpus']} between 1 and it")
        ranks = Ranks(injection, self.name, options["gpus"], switched=True)
        if ranks.here:
            FullyShard(ranks, options)
            frameworks.switch(ranks, options, fsdp=True)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        gpus, reshard = options["gpus"], options.get("reshard_after_forward", True)
        offload = bool(options.get("cpu_offload"))
        classes = options.get("blocks") or sorted({group.kind for group in facts.blocks})
        if framework == "trainer":
            size = f"{facts.batch_size} // {gpus}" if facts.batch_size else f"batch_size // {gpus}"
            return _TRAINER.format(gpus=gpus, size=size, reshard=reshard, offload=offload, classes=classes)
        if framework == "accelerate":
            return _ACCELERATE.format(gpus=gpus, reshard=reshard, offload=offload, classes=classes)
        if framework == "lightning":
            loop = "        for block in self.{}:\n            fully_shard(block, mesh=mesh)\n"
            return _LIGHTNING.format(gpus=gpus, loops="".join(loop.format(g.container) for g in facts.blocks))
        if framework not in ("code", "fsdp"):
            return None
        names = ["fully_shard"]
        given = f"reshard_after_forward={reshard}"
        if options.get("mixed_precision"):
            names.append("MixedPrecisionPolicy")
            policy = f"param_dtype=torch.{options['mixed_precision']}, reduce_dtype=torch.float32"
            given += f", mp_policy=MixedPrecisionPolicy({policy})"
        if offload:
            names.append("CPUOffloadPolicy")
            given += ", offload_policy=CPUOffloadPolicy()"
        public = versions.numbers(facts.torch)[:2] >= (2, 6)
        return _CODE.format(
            start=spread.start(options["gpus"]),
            module="torch.distributed.fsdp" if public else "torch.distributed._composable.fsdp",
            names=", ".join(sorted(names)),
            batches=spread.batches(facts),
            given=given,
            loops="".join(
                f"for block in {in_code(g.container)}:\n    fully_shard(block, **options)\n" for g in facts.blocks
            ),
        )


_CODE = """\
{start}
from {module} import {names}

{batches}
options = dict({given})
{loops}fully_shard(model, **options)  # before the optimizer is built
"""

_TRAINER = """\
# torchrun --nproc-per-node {gpus} train.py
TrainingArguments(
    ...,
    per_device_train_batch_size={size},
    fsdp="full_shard auto_wrap",
    fsdp_config={{
        "version": 2,
        "reshard_after_forward": {reshard},
        "cpu_offload": {offload},
        "transformer_layer_cls_to_wrap": {classes},
    }},
)
"""

_ACCELERATE = """\
# accelerate launch --num_processes {gpus} train.py
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin

accelerator = Accelerator(
    dataloader_config=DataLoaderConfiguration(split_batches=True),
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward={reshard},
        cpu_offload={offload},
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap={classes},
    ),
)
"""

_LIGHTNING = """\
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

class Module(LightningModule):
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
{loops}        fully_shard(self, mesh=mesh)

Trainer(..., devices={gpus}, strategy=ModelParallelStrategy())
"""

TECHNIQUE = FullySharded()
