"""Parameters that sharding put others in the place of: who held the old ones gets the new ones, or is told.

Runs in the user's process. Python 3.9; standard library and torch.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: A module, the name of a parameter in it, and the parameter.
Place = tuple[Any, str, Any]


class Replaced:
    """Knows which sharded parameter took the place of which.

    A script may have listed the parameters before they were sharded. Optimizers and gradient clipping are given the
    new ones; whatever else uses an old one is refused, since it would find no gradient and no value there.
    """

    def __init__(self, torch: Any, refuse: Callable[[str], None]) -> None:
        self._torch = torch
        self._new: dict[int, tuple[Any, Any]] = {}  # the old ones are kept, without their memory: their ids stay theirs
        self._stale: Any = None
        self._refuse = refuse

    @property
    def _tensor(self) -> Any:
        """The module that has DTensor."""
        module: Any = importlib.import_module("torch.distributed.tensor")
        return module if hasattr(module, "DTensor") else importlib.import_module("torch.distributed._tensor")  # 2.4

    @property
    def dtensor(self) -> Any:
        """The class DTensor."""
        return self._tensor.DTensor

    def before(self, module: Any) -> list[Place]:
        """Return a module's parameters that are whole: those that sharding will replace."""
        dtensor = self.dtensor
        return [
            (inner, name, p)
            for inner in module.modules()
            for name, p in inner._parameters.items()
            if p is not None and not isinstance(p, dtensor)
        ]

    def after(self, before: Iterable[Place]) -> None:
        """Note what replaced them, and let go of their memory."""
        for module, name, old in before:
            new = module._parameters[name]
            if new is not old and id(old) not in self._new:
                self._new[id(old)] = old, new
                with self._torch.no_grad():
                    old.data = old.data.new_empty(0)
                old.__class__ = self._stale_kind()

    def _stale_kind(self) -> Any:
        if self._stale is None:
            refuse = self._refuse

            class Parameter(self._torch.nn.Parameter):  # type: ignore[misc, name-defined] # torch has no types here
                """A parameter that was whole once."""

                @classmethod
                def __torch_function__(cls, func: Any, *args: Any, **kwargs: Any) -> Any:
                    refuse(
                        "the script uses a parameter that it took from the model before it was sharded "
                        f"({getattr(func, '__name__', func)}); take it from model.parameters() where it is used"
                    )

            self._stale = Parameter
        return self._stale

    def current(self, parameter: Any) -> Any:
        """Return the parameter that is in the model now."""
        return self._new.get(id(parameter), (None, parameter))[1]

    def had(self, groups: list[Any]) -> bool:
        """Return whether an optimizer is given any that were replaced."""
        for item in groups:
            inner = item["params"] if isinstance(item, dict) else item[1] if isinstance(item, tuple) else item
            if self.had(inner) if isinstance(inner, list) else id(inner) in self._new:
                return True
        return False

    def in_groups(self, groups: list[Any]) -> list[Any]:
        """Return what an optimizer is given, tensors, (name, tensor) pairs or groups of them, with those of now."""
        now: list[Any] = []
        for item in groups:
            if isinstance(item, dict):
                inner = item["params"]
                one = isinstance(inner, self._torch.Tensor) and not isinstance(inner, (list, tuple))
                now.append({**item, "params": self.current(inner) if one else self.in_groups(list(inner))})
            elif isinstance(item, tuple):
                now.append((item[0], self.current(item[1])))
            else:
                now.append(self.current(item))
        return now

    def watch_clipping(self) -> None:
        """Have gradients clipped where they are now, and the norm given back as a plain tensor."""
        clip = importlib.import_module("torch.nn.utils.clip_grad")
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrapped = self._clips(getattr(clip, name))
            for place in (clip, self._torch.nn.utils):
                setattr(place, name, wrapped)

    def _clips(self, original: Any) -> Any:
        @functools.wraps(original)
        def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            one = isinstance(parameters, self._torch.Tensor)
            now = self.current(parameters) if one else [self.current(p) for p in parameters]
            return self.plain(original(now, *args, **kwargs))

        return clipped

    # ---- what is saved and loaded ----------------------------------------------------------------------------------

    def plain(self, value: Any) -> Any:
        """Return a DTensor as the whole tensor: all ranks have to ask. Anything else as it is."""
        return value.full_tensor() if isinstance(value, self.dtensor) else value

    def whole(self, obj: Any) -> Any:
        """Return what a script saves with its parts made whole, on the host."""
        if isinstance(obj, self.dtensor):
            return obj.full_tensor().cpu()
        if isinstance(obj, self._torch.nn.Module):
            if any(isinstance(p, self.dtensor) for p in obj.parameters()):
                self._refuse("the script saves the model itself, which is sharded; save model.state_dict()")
            return obj
        if isinstance(obj, Mapping) and any(self._is_sharded(value) for value in obj.values()):
            made: Any = copy.copy(obj)
            for key, value in obj.items():
                made[key] = self.whole(value)
            return made
        if isinstance(obj, (list, tuple)) and not hasattr(obj, "_fields"):
            return type(obj)(self.whole(value) for value in obj)
        return obj

    def _is_sharded(self, value: Any) -> bool:
        return isinstance(value, (self.dtensor, self._torch.nn.Module, Mapping, list, tuple))

    def watch_loading(self) -> None:
        """Have whole tensors that a script loads into the model or the optimizer sharded as those there are."""
        kind = self._torch.nn.Module
        load_model = kind.load_state_dict

        @functools.wraps(load_model)
        def model_loads(module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            own = module.state_dict()
            made = {name: self._like(value, own.get(name)) for name, value in state_dict.items()}
            return load_model(module, made, *args, **kwargs)

        kind.load_state_dict = model_loads
        optimizer = self._torch.optim.Optimizer
        load_optimizer = optimizer.load_state_dict

        @functools.wraps(load_optimizer)
        def optimizer_loads(self_: Any, state_dict: Any) -> Any:
            flat = [p for group in self_.param_groups for p in group["params"]]
            state = {
                key: {name: self._like(value, flat[key]) for name, value in values.items()}
                for key, values in state_dict["state"].items()
            }
            return load_optimizer(self_, {**state_dict, "state": state})

        optimizer.load_state_dict = optimizer_loads

    def _like(self, value: Any, there: Any) -> Any:
        dtensor = self.dtensor
        if not isinstance(there, dtensor) or not isinstance(value, self._torch.Tensor) or isinstance(value, dtensor):
            return value
        if value.shape != there.shape:  # a step counter
            return value
        return self._tensor.distribute_tensor(value.to(there.to_local().device), there.device_mesh, there.placements)
