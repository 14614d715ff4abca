"""Tensor parallel: each GPU computes a part of every large matrix product, by a plan that a person gives."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from oomproof.measure import versions
from oomproof.plan import spread
from oomproof.plan.ranks import Ranks
from oomproof.plan.replaced import Replaced
from oomproof.plan.technique import CannotApply, Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection

OLDEST = (2, 5)

#: What a plan can say of a module: its style in PyTorch. Those in "sequence" have the rest of the model work on a
#: part of the sequence, dimension 1, in each rank.
STYLES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "colwise": ("ColwiseParallel", {}),
    "rowwise": ("RowwiseParallel", {}),
    "colwise_rep": ("ColwiseParallel", {"output_layouts": "Replicate()"}),
    "rowwise_rep": ("RowwiseParallel", {"input_layouts": "Replicate()"}),
    "sequence": ("SequenceParallel", {}),
    "colwise_sequence": ("ColwiseParallel", {"input_layouts": "Shard(1)"}),
    "rowwise_sequence": ("RowwiseParallel", {"output_layouts": "Shard(1)"}),
    "colwise_rep_sequence": ("ColwiseParallel", {"input_layouts": "Shard(1)", "output_layouts": "Replicate()"}),
    "rowwise_rep_sequence": ("RowwiseParallel", {"input_layouts": "Replicate()", "output_layouts": "Shard(1)"}),
}

#: Attributes in which models keep how many heads there are, and how wide one is.
_HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "num_key_value_heads", "n_kv_heads",
          "kv_heads", "num_kv_heads")  # fmt: skip
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")


class Parallel:
    """Puts a plan's styles on a model's modules."""

    def __init__(self, ranks: Ranks, plan: Mapping[str, str]) -> None:
        self.technique = ranks.technique
        self._ranks = ranks
        self._plan = plan
        self._torch: Any = ranks.injection.torch
        self._replaced = Replaced(self._torch, ranks.refuse)
        self._done: set[int] = set()
        injection = ranks.injection
        injection.on_moving.append(self.moving)
        injection.on_model.append(self.model)
        injection.on_parameters.append(lambda model, groups: self._replaced.in_groups(groups))
        self._replaced.watch_clipping()
        self._replaced.watch_loading()
        ranks.one_writer(self._replaced.whole)

    def moving(self, module: Any) -> None:
        """Split a model when it goes to the GPU, if it is the one that the plan is for."""
        if self._ranks.injection.moving_to == self._ranks.device_type and self._fits_plan(module):
            self.split(module)

    def model(self, model: Any) -> None:
        """Split a model that is trained; one that the plan is not for is refused."""
        if id(model) in self._done or not any(True for _ in model.parameters()):
            return
        if not self._fits_plan(model):
            names = {name for name, _ in model.named_modules()}
            missing = [pattern for pattern in self._plan if not any(fnmatch(name, pattern) for name in names)]
            raise CannotApply(f"the plan names {', '.join(missing)}, which {type(model).__name__} does not have")
        self.split(model)

    def _fits_plan(self, model: Any) -> bool:
        names = [name for name, _ in model.named_modules()]
        return all(any(fnmatch(name, pattern) for name in names) for pattern in self._plan)

    def _style(self, name: str) -> str | None:
        return next((style for pattern, style in self._plan.items() if fnmatch(name, pattern)), None)

    def split(self, model: Any) -> None:
        """Split the modules that the plan names, and keep the others whole on every GPU."""
        torch = self._torch
        styles: Any = importlib.import_module("torch.distributed.tensor.parallel")
        tensor: Any = importlib.import_module("torch.distributed.tensor")
        self._check(model)
        self._ranks.count_calls(model)
        self._done.add(id(model))
        mesh = self._ranks.mesh()
        layouts = {"Replicate()": tensor.Replicate(), "Shard(1)": tensor.Shard(1)}
        tied: dict[int, list[tuple[Any, str]]] = {}
        for module in model.modules():
            for own, p in module._parameters.items():
                if p is not None:
                    tied.setdefault(id(p), []).append((module, own))
        before = self._replaced.before(model)
        counts: dict[str, int] = {}
        for name, module in list(model.named_modules()):
            style = self._style(name)
            if style is not None:
                kind, arguments = STYLES[style]
                made = getattr(styles, kind)(**{key: layouts[layout] for key, layout in arguments.items()})
                styles.parallelize_module(module, mesh, made)
                counts[style] = counts.get(style, 0) + 1
            elif any(p is not None for p in module._parameters.values()):
                tensor.distribute_module(module, mesh, None, _whole_inputs(torch, tensor), _whole_outputs(tensor))
        for places in tied.values():
            first = places[0][0]._parameters[places[0][1]]
            for module, own in places[1:]:
                if module._parameters[own].placements != first.placements:
                    raise CannotApply(f"{own} is shared by modules that the plan splits in different ways")
                module._parameters[own] = first
        self._replaced.after(before)
        said = ", ".join(f"{count} {style}" for style, count in counts.items())
        where = type(model).__name__
        self._ranks.injection.say(self.technique, f"split over {self._ranks.size} GPUs: {said}", where)

    def _check(self, model: Any) -> None:
        size = self._ranks.size
        modules = dict(model.named_modules())
        for name, module in modules.items():
            style = self._style(name)
            if style is None:
                if any(p is not None for p in module._parameters.values()) and any(True for _ in module.children()):
                    raise CannotApply(
                        f"{name or type(model).__name__} has parameters of its own beside modules within; the plan "
                        "does not say how they are used"
                    )
                continue
            if style == "sequence":
                continue
            weight = getattr(module, "weight", None)
            if weight is None or weight.dim() != 2:
                raise CannotApply(f"{name} is no Linear or Embedding, so it has no rows or columns to split")
            embedding = isinstance(module, self._torch.nn.Embedding)
            dim = 0 if style.startswith("colwise") != embedding else 1
            if weight.shape[dim] % size:
                raise CannotApply(
                    f"{name} has {weight.shape[dim]} {'rows' if dim == 0 else 'columns'}, not a multiple of {size}"
                )
            if style.startswith("colwise") and not style.startswith("colwise_rep"):
                self._check_heads(modules.get(name.rpartition(".")[0]), name, weight.shape[0])

    def _check_heads(self, parent: Any, name: str, width: int) -> None:
        size = self._ranks.size
        for attribute in _HEADS:
            count = getattr(parent, attribute, None)
            if isinstance(count, int) and count % size:
                raise CannotApply(f"{name}: {count} heads ({attribute}) are not a multiple of {size} GPUs")
        for attribute in _HEAD_SIZES:
            head = getattr(parent, attribute, None)
            if isinstance(head, int) and head > 0 and width % head == 0 and (width // size) % head:
                raise CannotApply(
                    f"{name}: {width // head} heads of {head} ({attribute}) are not a multiple of {size} GPUs"
                )


def _written(style: str) -> str:
    kind, arguments = STYLES[style]
    return f"{kind}({', '.join(f'{key}={layout}' for key, layout in arguments.items())})"


def _whole_inputs(torch: Any, tensor: Any) -> Any:
    """Return what gives a module that every GPU has whole its inputs as such."""

    def prepare(module: Any, inputs: Any, mesh: Any) -> Any:
        return tuple(
            tensor.DTensor.from_local(value, mesh, [tensor.Replicate()], run_check=False)
            if isinstance(value, torch.Tensor) and not isinstance(value, tensor.DTensor)
            else value
            for value in inputs
        )

    return prepare


def _whole_outputs(tensor: Any) -> Any:
    def finish(module: Any, output: Any, mesh: Any) -> Any:
        return output.to_local() if isinstance(output, tensor.DTensor) else output

    return finish


class TensorParallel(Technique):
    """Split each Linear and Embedding that a plan names over the GPUs; all of them work on the same batch.

    Options: ``gpus``; ``plan``, a mapping of module names (with * for any) to a style: colwise, rowwise, colwise_rep
    (columns, its output whole again: a head), rowwise_rep (rows, of a whole input: an embedding), sequence and the
    ``…_sequence`` forms where the norms in between work on a part of the sequence.
    """

    name = "tensor-parallel"
    title = "split each large matrix product over the GPUs"
    fidelity = "equal"
    lowers = ("parameter", "gradient", "optimizer_state", "activation")
    keeps = "activations between the split modules, which every GPU has whole; and modules that the plan does not name"
    rests_on = "torch.distributed.tensor.parallel.parallelize_module"
    source = "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"
    accepts = {"gpus": int, "plan": dict}
    excludes = frozenset(("ddp", "zero1", "fsdp2"))
    rank = 66

    def world_size(self, options: Options) -> int | None:
        return int(options["gpus"])

    def unfit(self, facts: Facts) -> str | None:
        if versions.numbers(facts.torch)[:2] < OLDEST:
            return f"torch {facts.torch} has no public DTensor; it is there from 2.5 on"
        return spread.unfit(facts) or "it needs a plan that you give: which modules are split by rows, which by columns"

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        return iter(())

    def caution(self, facts: Facts, options: Options) -> str | None:
        said = "every process runs the whole script on the same batches, and writes its files once in each"
        return f"{said}; {spread.RANDOM_NUMBERS}" if any(model.dropouts for model in facts.models) else said

    def install(self, injection: Injection, options: Options) -> None:
        plan = options["plan"]
        unknown = sorted(set(plan.values()) - set(STYLES))
        if unknown:
            raise CannotApply(f"no style is called {', '.join(unknown)}; there are {', '.join(STYLES)}")
        ranks = Ranks(injection, self.name, options["gpus"], slices=False)
        if ranks.here:
            Parallel(ranks, plan)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework != "code":
            return None
        lines = "".join(f'    "{pattern}": {_written(style)},\n' for pattern, style in options["plan"].items())
        return (
            f"{spread.start(options['gpus'])}"
            "from torch.distributed.device_mesh import init_device_mesh\n"
            "from torch.distributed.tensor import Replicate, Shard\n"
            "from torch.distributed.tensor.parallel import (\n"
            "    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module,\n)\n\n"
            'mesh = init_device_mesh("cuda", (dist.get_world_size(),))\n'
            f"parallelize_module(model, mesh, {{\n{lines}}})  # before the optimizer is built"
        )


TECHNIQUE = TensorParallel()
