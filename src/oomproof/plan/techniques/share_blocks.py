"""One set of parameters for several of a model's repeated blocks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.layers import is_sharded, named_kind, option_of, unwrap
from oomproof.plan.repeated import find_blocks
from oomproof.plan.technique import CannotApply, Options, Technique, in_code

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class ShareBlocks(Technique):
    """Blocks of one group share one set of parameters, as in ALBERT; each keeps its own buffers.

    Options: ``groups``, how many sets there are for a list of blocks, one by default; ``model``: the class of the one
    to change.
    """

    name = "share-blocks"
    title = "let blocks share their parameters"
    fidelity = "changes-model"
    lowers = ("parameter", "gradient", "optimizer_state")
    keeps = (
        "activations and computation: every block still runs and keeps its own. The -71 % (all layers of BERT-base "
        "shared) and -89 % (all that ALBERT-base changes) that are quoted are of parameters alone"
    )
    rests_on = "block.weight = other_block.weight"
    source = "https://arxiv.org/abs/1909.11942"
    accepts = {"groups": int, "model": str}
    excludes = frozenset(("qlora", "prune-channels"))
    rank = 70

    def unfit(self, facts: Facts) -> str | None:
        if not facts.blocks:
            return "the model has no repeated blocks (two or more modules of one class in a ModuleList or Sequential)"
        if "fsdp" in facts.uses:
            return "the model is sharded before its optimizer is built"
        return None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        most = max((len(group.names) for group in facts.blocks), default=0)
        repeated = [model for model in facts.models if model.blocks]
        named = option_of(repeated[0]) if repeated else {}
        for groups in sorted({most // 2, most // 4, 1} - {0, most}, reverse=True):
            yield {"groups": groups, **named}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return "it is another model, to be trained from its start: weights that were trained apart do not work shared"

    def install(self, injection: Injection, options: Options) -> None:
        weak: Any = importlib.import_module("torch.utils.weak")
        gone: Any = weak.WeakTensorKeyDictionary()  # parameters that no module has any longer
        groups = int(options.get("groups", 1))
        if groups < 1:
            raise CannotApply("groups is the number of sets of parameters: 1 or more")
        done: Any = importlib.import_module("weakref").WeakSet()

        def share(model: Any) -> None:
            chosen = named_kind(unwrap(model), options.get("model"))
            if chosen is None or chosen in done:
                return
            if type(model).__name__ == "DistributedDataParallel":
                raise CannotApply("DistributedDataParallel was put around the model before: move it to the GPU first")
            if is_sharded(chosen):
                raise CannotApply("the model's parameters are sharded already; share them before sharding it")
            found = [(blocks, _tie(blocks.modules, groups, gone)) for blocks in find_blocks(chosen)]
            done.update(chosen.modules())
            for blocks, sets in found:
                if sets < len(blocks.names):
                    what = f"{len(blocks.names)} {blocks.kind} have {sets} sets of parameters"
                    injection.say(self.name, what, blocks.container or type(chosen).__name__)
            if not any(sets < len(blocks.names) for blocks, sets in found):
                raise CannotApply(
                    f"{type(chosen).__name__} has no two repeated blocks with parameters of the same shapes"
                )
            _save_copies(type(chosen))

        def moving(module: Any) -> None:
            # before the move, so that the parameters which go never are on the GPU
            chosen = named_kind(unwrap(module), options.get("model"))
            if chosen is not None and any(p.requires_grad for p in chosen.parameters()) and find_blocks(chosen):
                share(module)

        def left(model: Any, params: list[Any]) -> list[Any]:
            return [item for item in (_without(item, gone) for item in params) if item is not None]

        injection.on_moving.append(moving)
        injection.on_model.append(share)
        injection.on_parameters.append(left)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework in ("deepspeed", "fsdp"):
            return None
        groups = int(options.get("groups", 1))
        containers = [group.container for group in facts.blocks]
        return "\n".join(
            f"blocks = {in_code(container)}  # before the optimizer is built\n"
            f"size = -(-len(blocks) // {groups})\n"
            "for i, block in enumerate(blocks):\n"
            "    for name, parameter in blocks[i - i % size].named_parameters():\n"
            '        path, _, last = name.rpartition(".")\n'
            "        setattr(block.get_submodule(path), last, parameter)"
            for container in containers
        )


def _tie(modules: tuple[Any, ...], groups: int, gone: Any) -> int:
    """Give neighbours among modules of the same shapes one set of parameters; return how many sets there are then."""
    alike: dict[Any, list[Any]] = {}
    for module in modules:
        shapes = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters())
        alike.setdefault(shapes, []).append(module)
    sets = 0
    for same in alike.values():
        size = -(-len(same) // groups)
        for place, module in enumerate(same):
            owner = same[place - place % size]
            if owner is module:
                sets += 1
                continue
            for name, parameter in list(owner.named_parameters()):
                path, _, last = name.rpartition(".")
                inner = module.get_submodule(path)
                old = inner._parameters[last]
                if old is not parameter:
                    gone[old] = True
                    inner._parameters[last] = parameter
    return sets


def _save_copies(kind: Any) -> None:
    """Have transformers write each block's parameters: it refuses tied ones that the class does not know of."""
    base: Any = next((k for k in kind.__mro__ if k.__name__ == "PreTrainedModel"), None)
    if base is None or hasattr(base.save_pretrained, "__wrapped__"):
        return
    original = base.save_pretrained

    @functools.wraps(original)
    def save_pretrained(model: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        state = dict(model.state_dict() if state_dict is None else state_dict)
        for blocks in find_blocks(model):
            seen: set[int] = set()
            for prefix, block in zip(blocks.names, blocks.modules):
                for name, parameter in block.named_parameters():
                    if id(parameter) in seen and f"{prefix}.{name}" in state:
                        state[f"{prefix}.{name}"] = parameter.detach().cpu().clone()
                    seen.add(id(parameter))
        return original(model, *args, state_dict=state, **kwargs)

    base.save_pretrained = save_pretrained


def _without(item: Any, gone: Any) -> Any:
    """Return a tensor, a pair or a group without parameters that are gone; None where nothing is left of it."""
    if isinstance(item, dict):
        inner = item["params"]
        inner = list(inner) if isinstance(inner, (list, tuple)) else [inner]
        return {**item, "params": [p for p in inner if (p[1] if isinstance(p, tuple) else p) not in gone]}
    return None if (item[1] if isinstance(item, tuple) else item) in gone else item


TECHNIQUE = ShareBlocks()
