"""What a failed attempt may have changed, kept to be put back. Runs in the user's process; Python 3.9."""

from __future__ import annotations

import random
import sys
from typing import Any

_SMALL_BYTES = 2**20  # copies of larger tensors lie in host memory: the device's is what is lacking


class SafePoint:
    """Buffers, gradients, random states and the scaler's state as they were; parameters are watched, not copied."""

    def __init__(self, torch: Any, model: Any, optimizer: Any, scaler: Any) -> None:
        self._torch = torch
        self._scaler = scaler
        parameters = list(model.parameters()) + [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = list({id(p): p for p in parameters}.values())
        self._versions = [p._version for p in self._parameters]
        self._gradients = [
            (p.grad, None if p.grad is None else p.grad.detach().to("cpu", copy=True)) for p in self._parameters
        ]
        self._buffers = [
            (module, name, buffer, _copy(buffer))
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self._random = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._scale = scaler.state_dict() if scaler is not None else {}
        self._unscaled = _per_optimizer(scaler)

    def parameters_changed(self) -> bool:
        """Return whether anything wrote to a parameter since."""
        return any(p._version != version for p, version in zip(self._parameters, self._versions))

    def put_back(self) -> None:
        """Undo what the attempt changed; allocates nothing on the device."""
        torch = self._torch
        with torch.no_grad():
            for parameter, (gradient, copy) in zip(self._parameters, self._gradients):
                if gradient is not None:
                    gradient.copy_(copy)
                parameter.grad = gradient
            for module, name, buffer, copy in self._buffers:
                if buffer is not None:
                    buffer.copy_(copy)  # always: batch_norm writes without raising the version
                module._buffers[name] = buffer
        random.setstate(self._random)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._scale:
            self._scaler.load_state_dict(self._scale)
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()
            self._scaler._per_optimizer_states.update(self._unscaled)


def _copy(tensor: Any) -> Any:
    if tensor is None or tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
        return None if tensor is None else tensor.detach().clone()
    return tensor.detach().to("cpu", copy=True)


def _per_optimizer(scaler: Any) -> dict[Any, Any]:
    """Return a copy of which optimizers a scaler has unscaled the gradients of: its state_dict does not say."""
    return {} if scaler is None else {key: dict(state) for key, state in scaler._per_optimizer_states.items()}
