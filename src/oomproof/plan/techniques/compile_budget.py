"""torch.compile with a budget for what is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.technique import CannotApply, Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class CompileBudget(Technique):
    """The model is compiled in place; its compiler recomputes activations until the rest is within the budget.

    Option ``budget``: the share of the activations that may be kept; 1.0 is torch.compile's default, and itself often
    less than without compiling: fused operators keep less.
    """

    name = "compile-budget"
    title = "compile the model, with a budget for the activations that are kept"
    fidelity = "equal"
    lowers = ("activation", "temporary")
    keeps = "parameters, gradients and optimizer states; and what is computed where the compiler breaks the graph"
    rests_on = "torch.compile and torch._functorch.config.activation_memory_budget"
    source = "https://pytorch.org/blog/activation-checkpointing-techniques/"
    accepts = {"budget": float}
    excludes = frozenset(("checkpoint-blocks", "checkpoint-selective", "offload-activations", "chunked-cross-entropy"))
    rank = 40

    def slow_to_try(self, options: Options) -> bool:
        return True

    def unfit(self, facts: Facts) -> str | None:
        if "compile" in facts.uses:
            return "the script compiles by itself"
        if "checkpoint" in facts.uses:
            return "the script checkpoints by itself"
        if facts.framework in ("deepspeed", "fsdp"):
            return "compiling a sharded model is the script's to arrange"
        if facts.capability < (7, 0):
            return "Triton, which the compiled model runs on, needs compute capability 7.0 or later"
        return None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        for budget in (1.0, 0.5, 0.2, 0.0):
            yield {"budget": budget}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return (
            "a smaller budget can need more memory than a larger one (PyTorch issue 197838), so each has to be tried; "
            "what is computed again may all be computed at the start of the backward pass, whose peak then falls less; "
            "the first step compiles for minutes, and inputs of another shape compile again"
        )

    def install(self, injection: Injection, options: Options) -> None:
        import torch._functorch.config as config

        budget = float(options["budget"])
        if not hasattr(config, "activation_memory_budget"):
            raise CannotApply(f"torch {injection.torch.__version__} has no activation_memory_budget; 2.4 has")

        def compile_in_place(model: Any) -> None:
            config.activation_memory_budget = budget  # type: ignore[attr-defined, unused-ignore]
            model.compile()
            injection.say(self.name, f"compiled with an activation memory budget of {budget}", type(model).__name__)

        injection.on_model.append(compile_in_place)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        budget = f"torch._functorch.config.activation_memory_budget = {options['budget']}"
        start = f"import torch._functorch.config\n\n{budget}\n"
        if framework == "trainer":
            return f"{start}TrainingArguments(..., torch_compile=True)"
        if framework == "accelerate":
            return f'{start}Accelerator(dynamo_backend="inductor")'
        return f"{start}model.compile()  # before its first step"


TECHNIQUE = CompileBudget()
