"""What the value mirror does with each operator, told from the operator's schema."""

from __future__ import annotations

from typing import Any

import torch

from oomproof.measure.answers import SCATTERED
from oomproof.measure.known import tensors_in

# Kinds of operators, cheapest first.
NOTHING, FRESH, TO_COPY, IN_PLACE, COPY_INTO, SEVERAL, GENERAL = range(7)

#: A list of more tensors than this is an optimizer's; it is not worth computing.
LONG_LIST = 64
#: Above this many elements a constant is noted instead of being written.
NOTED = 1 << 16

#: Nothing of a tensor's values changes.
UNTOUCHED = frozenset(("aten::record_stream", "aten::set_data", "aten::requires_grad_", "aten::set_", "aten::resize_"))
EMPTY = frozenset(
    "aten::" + n for n in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)
COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_dtensor"))
#: Of them, those that leave the values they are given as they are.
CHANGES_NOTHING = frozenset(("send", "barrier", "monitored_barrier_", "wait_tensor"))
COMPUTED = frozenset(("aten", "prims", "torchvision"))

#: Elementwise operators and reductions that give one value when their inputs have one value throughout.
KEEPS_UNIFORM = frozenset(
    "aten::" + n
    for n in (
        "mul", "logical_not", "logical_and", "logical_or", "logical_xor", "bitwise_not", "bitwise_and", "bitwise_or",
        "bitwise_xor", "eq", "ne", "all", "any", "amax", "amin", "clone", "_to_copy", "contiguous", "sum",
        "count_nonzero", "__and__", "__or__", "__xor__",
    )
)  # fmt: skip
COUNTS = frozenset(("aten::sum", "aten::count_nonzero"))
CONSTANTS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
FULL = {"full": 1, "full_like": 1, "new_full": 2}

#: What a comparison of a finite float with plus and minus infinity gives.
AGAINST_INFINITY = {
    "eq": (False, False), "ne": (True, True), "lt": (True, False), "le": (True, False),
    "gt": (False, True), "ge": (False, True),
}  # fmt: skip
OF_FINITE = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True}


class Plan:
    """What to do after one operator, worked out from its schema once."""

    __slots__ = ("call", "finite", "func", "kind", "name", "namespace", "needs_first", "overwrites", "random",
                 "shape_only", "written")  # fmt: skip

    def __init__(self, func: Any) -> None:
        #: An OpOverload's own __call__ only passes on; without it an operator costs 0.1 µs less.
        self.call = func._op if type(func) is torch._ops.OpOverload else func
        self.func = func  # keeps the id, by which plans are found, from being given to another operator
        self.written: list[tuple[int, str]] = []
        self.overwrites = self.random = self.shape_only = self.needs_first = False
        self.finite: str | None = None
        schema = getattr(func, "_schema", None)
        self.name: str = schema.name if schema is not None else ""
        parts = self.name.partition("::")
        self.namespace, short = parts[0], parts[2]
        if schema is None:  # a higher-order operator
            self.kind = NOTHING
            return
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.append((position, argument.name))
        if self.namespace == "c10d" and short not in CHANGES_NOTHING:  # their schemas do not all say what they write
            self.written = [(0, schema.arguments[0].name)]
        self.random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self.shape_only = short.endswith("_like") or short.startswith("new_")
        self.overwrites = (
            any(a.is_out for a in schema.arguments)
            or short in ("copy_", "fill_", "zero_")
            or (self.random and short.endswith("_") and short != "bernoulli_")
        )
        if short in OF_FINITE or short in AGAINST_INFINITY:
            self.finite = short
        self.kind = self._kind(schema, short)
        self.needs_first = (
            not self.written and self.finite is None and not self.shape_only
            and self.kind in (FRESH, GENERAL) and short != "lift_fresh" and self.namespace not in COLLECTIVES
        )  # fmt: skip

    def _kind(self, schema: Any, short: str) -> int:
        kinds = [str(r.type) for r in schema.returns]
        first = str(schema.arguments[0].type) if schema.arguments else ""
        if self.name in UNTOUCHED:
            return NOTHING
        if self.namespace in COLLECTIVES:
            return GENERAL
        if not self.written:
            if not any("Tensor" in k for k in kinds) or all(
                r.alias_info is not None or "Tensor" not in k for r, k in zip(schema.returns, kinds)
            ):
                return {"to": TO_COPY, "lift_fresh": FRESH}.get(short, NOTHING)
            if self.name in ("aten::_to_copy", "aten::to"):
                return TO_COPY
            return FRESH if kinds == ["Tensor"] and self.name not in SCATTERED else GENERAL
        if self.name in SCATTERED:
            return GENERAL
        if self.name == "aten::copy_":
            return COPY_INTO
        if self.written == [(0, schema.arguments[0].name)] and first == "Tensor":
            return IN_PLACE
        return SEVERAL

    def written_in(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the CUDA tensors that a call wrote into."""
        found: list[Any] = []
        for position, name in self.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            found += tensors_in(value)
        return found
