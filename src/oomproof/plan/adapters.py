"""LoRA adapters in a script's model, in place, and in its optimizer. Runs in the user's process; Python 3.9."""

from __future__ import annotations

import functools
import importlib
import re
from typing import TYPE_CHECKING, Any

from oomproof.plan.layers import find_head, is_sharded, linear_layers, unwrap
from oomproof.plan.technique import CannotApply, Options

if TYPE_CHECKING:
    from oomproof.plan.injection import Injection

RANK = 16


class Adapters:
    """Puts adapters beside a model's linear layers, freezes the rest, and gives the optimizer what is left to train."""

    def __init__(self, injection: Injection, technique: str, options: Options) -> None:
        self._injection = injection
        self._torch = injection.torch
        self._technique = technique
        self._rank = int(options.get("rank", RANK))
        self._alpha = options.get("alpha", 2 * self._rank)
        self._targets = options.get("targets", "all-linear")
        weak: Any = importlib.import_module("torch.utils.weak")
        self._reference = weak.TensorWeakRef
        self._instead: Any = (
            weak.WeakTensorKeyDictionary()
        )  # parameters that are trained no longer, and what is in their place: [(name, p)]
        self._done: Any = weakref_set()
        self._unseen: list[Any] = []  # adapters whose gradients are still to be seen

    def install(self) -> None:
        """Have optimizers trained with the adapters, and what would silently leave them out corrected."""
        self._injection.on_parameters.append(self._parameters)
        self._keep_gradients_in_checkpoints()
        self._clip_what_is_trained()
        parallel = self._torch.nn.parallel.DistributedDataParallel
        original = parallel.__init__

        @functools.wraps(original)
        def init(wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            self._injection.guarded(self._technique, self.put_in, module)  # it looks at gradients once, when it is made
            original(wrapper, module, *args, **kwargs)

        parallel.__init__ = init

    def put_in(self, model: Any, convert: Any = None) -> None:
        """Put adapters into a model, once. ``convert(model, targets)`` replaces layers first: old -> new parameter."""
        model = unwrap(model)
        if model in self._done:
            return
        torch = self._torch
        if is_sharded(model):
            raise CannotApply("the model's parameters are sharded already; put the adapters in before sharding it")
        tuner = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
        if any(isinstance(module, tuner) for module in model.modules()):
            raise CannotApply("the script has peft adapters of its own")
        head = find_head(torch, model)
        targets = self._chosen(model, head)
        if not targets:
            raise CannotApply(f"{type(model).__name__} has no trainable linear layer besides its head")
        whole = [head.name] if head is not None and not head.vocabulary and _trains(head.module) else []
        before = {}  # weakly: what a conversion replaces is to be freed at once
        for name, p in model.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                self._instead[p] = []
                before[name] = self._reference(p)
        if convert is not None:
            convert(model, targets)
        self._inject(model, targets, whole)
        self._done.update(model.modules())
        after = {id(p): (n, p) for n, p in model.named_parameters() if p.requires_grad}
        for reference in before.values():
            if id(reference()) in after:
                self._instead.pop(reference(), None)
        for name in targets:
            layer = model.get_submodule(name)
            found = [after[id(p)] for p in layer.parameters() if id(p) in after]
            self._unseen += [p for _, p in found]
            self._stands_for(before[f"{name}.weight"](), found)
        for name in whole:
            for full, p in model.get_submodule(name).named_parameters():
                reference = before.get(f"{name}.{full.rpartition('.')[2]}")
                if reference is not None and p.requires_grad and reference() is not p:
                    self._stands_for(reference(), [after[id(p)]])  # peft trains a copy of a transformers head
        self._tell(model, head, targets, whole)

    def _stands_for(self, old: Any, new: list[Any]) -> None:
        if old is not None:
            self._instead[old] = self._instead.get(old, []) + new

    def _chosen(self, model: Any, head: Any) -> list[str]:
        names = [
            name
            for name, module in linear_layers(self._torch, model)
            if _trains(module) and (head is None or module is not head.module)
        ]
        if self._targets == "all-linear":
            return names
        wanted = self._targets
        if wanted == "architecture":
            known = importlib.import_module("peft.utils").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
            kind = getattr(getattr(model, "config", None), "model_type", None)
            if kind not in known:
                raise CannotApply(f"peft names no layers for {kind or type(model).__name__}: use targets=all-linear")
            wanted = known[kind]
        wanted = [wanted] if isinstance(wanted, str) else list(wanted)
        chosen = [name for name in names if any(name == w or name.endswith(f".{w}") for w in wanted)]
        if not chosen:
            raise CannotApply(f"no trainable linear layer of {type(model).__name__} is called {' or '.join(wanted)}")
        return chosen

    def _inject(self, model: Any, targets: list[str], whole: list[str]) -> None:
        peft = importlib.import_module("peft")
        transformers = any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)
        config = peft.LoraConfig(
            r=self._rank,
            lora_alpha=self._alpha,
            target_modules=_short(model, targets),
            modules_to_save=whole if transformers and whole else None,
        )
        if transformers and hasattr(model, "add_adapter"):
            model.add_adapter(config)  # and save_pretrained writes the adapter alone
        else:
            peft.inject_adapter_in_model(config, model)
            for name in whole:
                for p in model.get_submodule(name).parameters():
                    p.requires_grad_(True)
        encoder = self._torch.nn.TransformerEncoderLayer
        if any(isinstance(module, encoder) for module in model.modules()):
            self._torch.backends.mha.set_fastpath_enabled(False)  # it reads the weights and skips the adapters

    def _tell(self, model: Any, head: Any, targets: list[str], whole: list[str]) -> None:
        trained = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
        what = f"adapters of rank {self._rank} beside {len(targets)} linear layers: {sum(trained.values()):,} parameters are trained"
        if whole:
            what += f", the head {whole[0]} whole"
        elif head is not None and head.vocabulary:
            what += f"; {head.name} and the embeddings are frozen"
        self._injection.say(self._technique, what, type(model).__name__)

    # ---- the optimizer -------------------------------------------------------------------------------------------

    def _parameters(self, model: Any, groups: list[Any]) -> list[Any]:
        given: set[int] = set()
        changed = [self._group(item, given) for item in groups]
        flat = [item for items in changed for item in items]
        if not any(item["params"] if isinstance(item, dict) else True for item in flat):
            raise CannotApply("an optimizer is left without parameters: none of its layers has an adapter")
        self._watch_gradients()
        return flat

    def _group(self, item: Any, given: set[int]) -> list[Any]:
        """Return what stands in place of a tensor, a (name, tensor) pair or a group: adapters join their weight's."""
        if isinstance(item, dict):
            inner = item["params"]
            inner = [inner] if isinstance(inner, self._torch.Tensor) else list(inner)
            return [{**item, "params": [new for old in inner for new in self._group(old, given)]}]
        name, tensor = item if isinstance(item, tuple) else (None, item)
        instead = self._instead.get(tensor)
        new = [(name, tensor)] if instead is None else instead
        new = [(n, p) for n, p in new if id(p) not in given]
        given.update(id(p) for _, p in new)
        return [(n, p) if isinstance(item, tuple) else p for n, p in new]

    def _watch_gradients(self) -> None:
        """After the first step, tell of adapters that got no gradient: a layer whose weight is read, not called."""
        hook = importlib.import_module("torch.optim.optimizer").register_optimizer_step_pre_hook
        handle: list[Any] = []

        def look(optimizer: Any, *_: Any) -> None:
            mine = {id(p) for p in self._unseen}
            here = [p for group in optimizer.param_groups for p in group["params"] if id(p) in mine]
            if not here:
                return
            handle[0].remove()
            without = sum(p.grad is None for p in here)
            if without == len(here):
                self._injection.refuse(self._technique, "no adapter got a gradient: the model does not call its layers")
            if without:
                what = f"{without} of {len(here)} adapter weights got no gradient in the first step"
                self._injection.say(self._technique, what)
            self._unseen = []

        handle.append(hook(look))

    # ---- what scripts do that adapters must survive ---------------------------------------------------------------

    def _clip_what_is_trained(self) -> None:
        """A list of parameters made before the adapters were put in stands for what is trained now."""
        clip: Any = importlib.import_module("torch.nn.utils.clip_grad")
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            original = getattr(clip, name)

            def clipped(parameters: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if not isinstance(parameters, self._torch.Tensor):
                    given: set[int] = set()
                    parameters = list(parameters)
                    given.update(id(p) for p in parameters if p not in self._instead)
                    parameters = [p for p in parameters if p not in self._instead] + [
                        new for p in parameters if p in self._instead for new in self._group(p, given)
                    ]
                return _original(parameters, *args, **kwargs)

            functools.update_wrapper(clipped, original)
            setattr(clip, name, clipped)
            setattr(self._torch.nn.utils, name, clipped)

    def _keep_gradients_in_checkpoints(self) -> None:
        """Reentrant checkpoints give no gradients when no input needs one, as behind a frozen embedding."""
        module: Any = importlib.import_module("torch.utils.checkpoint")
        original = module.checkpoint
        torch = self._torch

        @functools.wraps(original)
        def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            needs = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
            if kwargs.get("use_reentrant") is not False and not needs and torch.is_grad_enabled():
                kwargs["use_reentrant"] = False
                self._injection.say(self._technique, "checkpoints whose inputs are frozen: use_reentrant=False")
            return original(function, *args, **kwargs)

        module.checkpoint = checkpoint


def weakref_set() -> Any:
    """Return a set that keeps no module alive."""
    return importlib.import_module("weakref").WeakSet()


def _trains(module: Any) -> bool:
    weight = module.weight
    return bool(weight.requires_grad and weight.is_floating_point())


def _short(model: Any, targets: list[str]) -> Any:
    """Return the last parts of the names where they mean these layers and no other, else a pattern of all of them."""
    suffixes = sorted({name.rpartition(".")[2] for name in targets})
    if not any(s.isdigit() for s in suffixes):
        meant = [n for n, _ in model.named_modules() if n.rpartition(".")[2] in suffixes]
        if sorted(meant) == sorted(targets):
            return suffixes
    return "|".join(re.escape(name) for name in targets)


def code_of_lora(options: Options, framework: str, load: str = "") -> str:
    """Return what a person would write."""
    rank = options.get("rank", RANK)
    targets = options.get("targets", "all-linear")
    named = "" if targets == "architecture" else f', target_modules="{targets}"'
    if isinstance(targets, (list, tuple)):
        named = f", target_modules={list(targets)!r}"
    config = f"LoraConfig(r={rank}, lora_alpha={options.get('alpha', 2 * int(rank))}{named})"
    where = {
        "trainer": "  # before Trainer(model=model, ...)",
        "lightning": "  # in the LightningModule's __init__",
    }.get(framework, "  # before the optimizer is built")
    return f"from peft import LoraConfig, get_peft_model\n\n{load}model = get_peft_model(model, {config}){where}"
