"""What the survey of a run found out about a script: its models, blocks, optimizers, batches and libraries.

``plan.injection`` writes it inside the user's process; the planner reads it. Python 3.9, standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class BlockGroup(NamedTuple):
    """Modules of one class in one list: a model's repeated blocks."""

    container: str  # qualified name, such as "transformer.h"
    kind: str  # the class's name
    names: tuple[str, ...]
    parameter_bytes: int  # of all of them


class Model(NamedTuple):
    """A module that an optimizer trains or that the script called first."""

    kind: str  # class, such as "GPT2LMHeadModel"
    module: str  # where the class is defined, such as "transformers.models.gpt2.modeling_gpt2"
    parameters: int
    trainable: int
    parameter_bytes: int
    dtypes: tuple[str, ...]  # of its parameters, the most frequent first
    blocks: tuple[BlockGroup, ...] = ()
    batch_norms: int = 0
    dropouts: int = 0
    head: str | None = None  # the last Linear onto a vocabulary: "lm_head"
    vocabulary: int | None = None
    shared: bool = False  # some parameter is used by two modules
    linear_layers: int = 0  # that are called: an nn.MultiheadAttention's own is not
    convolutions: int = 0
    frozen_linear_bytes: int = 0  # weights of linear layers that are not trained


class Optimizer(NamedTuple):
    """An optimizer that the script built."""

    kind: str  # "AdamW"
    module: str  # "torch.optim.adamw"
    options: dict[str, Any]  # the first group's, numbers and booleans only
    parameters: int


class Loader(NamedTuple):
    """A DataLoader that the script made."""

    batch_size: int | None
    dataset: int | None  # samples; None where it has no length
    drop_last: bool
    used_in_training: bool


class Facts(NamedTuple):
    """All of them. Empty where nothing was seen, which is no proof that it is not there."""

    models: tuple[Model, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    loaders: tuple[Loader, ...] = ()
    framework: str = "code"  # "code", "trainer", "lightning", "accelerate", "deepspeed", "fsdp"
    packages: Mapping[str, str] = {}  # versions of the libraries techniques rest on
    torch: str = ""
    capability: tuple[int, int] = (0, 0)
    uses: frozenset[str] = frozenset()  # "autocast-bf16", "autocast-fp16", "grad-scaler", "clip-grad-norm", ...
    backwards_per_step: int = 1
    allocator_config: str = ""
    frozen_linear_bytes: int = 0  # weights of linear layers that were moved, in a trained model or beside it
    script: str = ""  # SHA-256 of the script's text
    gpus: int = 1  # that a plan may use; the planner says it, no run finds it out

    @property
    def blocks(self) -> tuple[BlockGroup, ...]:
        """All models' repeated blocks."""
        return tuple(group for model in self.models for group in model.blocks)

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch of the loader that training reads, None where no DataLoader gives them."""
        return next((loader.batch_size for loader in self.loaders if loader.used_in_training), None)

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` reads."""
        plain = self._asdict()
        plain["models"] = [{**m._asdict(), "blocks": [b._asdict() for b in m.blocks]} for m in self.models]
        plain["optimizers"] = [o._asdict() for o in self.optimizers]
        plain["loaders"] = [item._asdict() for item in self.loaders]
        plain["packages"] = dict(self.packages)
        plain["uses"] = sorted(self.uses)
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Facts:
        """Build Facts from what ``to_json`` gave."""
        models = []
        for m in data["models"]:
            groups = tuple(BlockGroup(**{**b, "names": tuple(b["names"])}) for b in m["blocks"])
            models.append(Model(**{**m, "dtypes": tuple(m["dtypes"]), "blocks": groups}))
        rest = {k: v for k, v in data.items() if k in cls._fields and k not in ("models", "optimizers", "loaders")}
        rest["uses"] = frozenset(rest["uses"])
        rest["capability"] = tuple(rest["capability"])
        return cls(
            models=tuple(models),
            optimizers=tuple(Optimizer(**o) for o in data["optimizers"]),
            loaders=tuple(Loader(**item) for item in data["loaders"]),
            **rest,
        )
