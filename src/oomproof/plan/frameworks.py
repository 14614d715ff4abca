"""Frameworks that spread a script over GPUs by themselves: their own switches, set where the script left them alone.

Runs in the user's process. Python 3.9; standard library and torch.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomproof.plan.ranks import Ranks
    from oomproof.plan.technique import Options


def switch(ranks: Ranks, options: Options, *, fsdp: bool) -> None:
    """Have transformers.Trainer and accelerate do what ``options`` say, for DDP or for FSDP2."""
    switches = _Switches(ranks, options, fsdp)
    when_imported = ranks.injection.when_imported
    when_imported("transformers.training_args", switches.trainer)
    when_imported("accelerate.accelerator", switches.accelerate)


class _Switches:
    def __init__(self, ranks: Ranks, options: Options, fsdp: bool) -> None:
        self._ranks = ranks
        self._options = options
        self._fsdp = fsdp
        self._trainer = False

    def _say(self, what: str, where: str) -> None:
        self._ranks.injection.say(self._ranks.technique, what, where)

    def trainer(self, module: Any) -> None:
        """Give each process its part of the Trainer's batch, and switch FSDP on."""
        kind = module.TrainingArguments
        original = kind.__post_init__
        size = self._ranks.size

        @functools.wraps(original)
        def post_init(arguments: Any) -> None:
            self._trainer = True
            self._ranks.yield_to("transformers.Trainer")
            batch = arguments.per_device_train_batch_size
            if batch % size:
                self._ranks.refuse(f"per_device_train_batch_size={batch} is not a multiple of {size} GPUs")
            if arguments.fsdp or arguments.deepspeed:
                self._ranks.refuse("the TrainingArguments shard the model already")
            arguments.per_device_train_batch_size = batch // size
            said = f"per_device_train_batch_size={batch // size}"
            if self._fsdp:
                arguments.fsdp = "full_shard auto_wrap"
                arguments.fsdp_config = {
                    "version": 2,
                    "reshard_after_forward": bool(self._options.get("reshard_after_forward", True)),
                    "cpu_offload": bool(self._options.get("cpu_offload")),
                    **self._classes("transformer_layer_cls_to_wrap"),
                }
                said += f", fsdp_config={arguments.fsdp_config}"
            original(arguments)
            self._say(said, "TrainingArguments")

        kind.__post_init__ = post_init

    def _classes(self, name: str) -> dict[str, list[str]]:
        blocks = self._options.get("blocks")
        return {name: list(blocks)} if blocks else {}

    def accelerate(self, module: Any) -> None:
        """Have an Accelerator split the script's batches over the processes, and shard by FSDP2."""
        kind = module.Accelerator
        original = kind.__init__

        @functools.wraps(original)
        def init(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            if not self._trainer:
                self._ranks.yield_to("accelerate")
                self._accelerator(kwargs)
            original(accelerator, *args, **kwargs)

        kind.__init__ = init

    def _accelerator(self, kwargs: dict[str, Any]) -> None:
        utils: Any = importlib.import_module("accelerate.utils")
        config = kwargs.get("dataloader_config") or utils.DataLoaderConfiguration()
        config.split_batches = True
        kwargs["dataloader_config"] = config
        said = "DataLoaderConfiguration(split_batches=True)"
        if self._fsdp:
            if kwargs.get("fsdp_plugin") is not None or kwargs.get("deepspeed_plugin") is not None:
                self._ranks.refuse("the Accelerator shards the model already")
            kwargs["fsdp_plugin"] = utils.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=bool(self._options.get("reshard_after_forward", True)),
                cpu_offload=bool(self._options.get("cpu_offload")),
                auto_wrap_policy="transformer_based_wrap",
                **self._classes("transformer_cls_names_to_wrap"),
            )
            said += ", FullyShardedDataParallelPlugin(fsdp_version=2)"
        self._say(said, "Accelerator")


def pass_to_ddp(ranks: Ranks, given: dict[str, Any]) -> None:
    """Have the DistributedDataParallel that a framework makes get these arguments too."""
    kind = ranks.injection.torch.nn.parallel.DistributedDataParallel
    original = kind.__init__

    @functools.wraps(original)
    def init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        original(wrapper, *args, **{**kwargs, **given})

    kind.__init__ = init
