"""Low-rank adapters beside linear layers of four bits a weight."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomproof.plan.adapters import CAUTION, Adapters, code_of_lora, unfit_for_adapters
from oomproof.plan.layers import is_conv1d, named_kind, option_of
from oomproof.plan.technique import CannotApply, Options, Technique
from oomproof.plan.techniques import lora

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts
    from oomproof.plan.injection import Injection


class QLoRA(Technique):
    """Linear layers become bitsandbytes' NF4 layers on their way to the GPU; adapters beside them are trained.

    Norms, embeddings and the head keep their precision. Options: those of ``lora``; ``double``: quantize the scales
    too, as by default.
    """

    name = "qlora"
    title = "keep the linear layers in 4 bits, and train low-rank adapters"
    fidelity = "changes-model"
    lowers = ("parameter", "gradient", "optimizer_state")
    keeps = (
        "the activations, which are hardly less; embeddings, norms and the head in their own precision; and one "
        "layer's weight at a time is there in full while it is used"
    )
    rests_on = "bitsandbytes.nn.Linear4bit(quant_type='nf4') and peft.inject_adapter_in_model(LoraConfig(...), model)"
    source = "https://huggingface.co/docs/bitsandbytes/fsdp_qlora"
    accepts = {**lora.TECHNIQUE.accepts, "double": bool}
    needs = ("peft", "bitsandbytes")
    extra = "peft bitsandbytes (or oomproof[qlora])"
    excludes = frozenset(("lora", "prune-channels", "share-blocks", "int8-frozen"))
    rank = 65

    def unfit(self, facts: Facts) -> str | None:
        missing = [name for name in self.needs if name not in facts.packages]
        if missing:
            names = " and ".join(missing)
            return f"{names} {'are' if missing[1:] else 'is'} not beside the script's torch; pip install {self.extra}"
        return unfit_for_adapters(facts)

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        largest = max(facts.models, key=lambda model: model.parameters, default=None)
        yield {"rank": 16, **(option_of(largest) if largest else {})}

    def caution(self, facts: Facts, options: Options) -> str | None:
        return CAUTION + ". The 4-bit weights are rounded: the model is no longer quite the one that was loaded"

    def install(self, injection: Injection, options: Options) -> None:
        adapters = Adapters(injection, self.name, options)
        convert = functools.partial(_to_four_bits, injection, bool(options.get("double", True)))

        def put_in(model: Any) -> None:
            chosen = named_kind(model, options.get("model"))
            if chosen is not None:
                adapters.put_in(chosen, convert)

        def moving(module: Any) -> None:
            # a module without trainable layers (a frozen teacher, a loss) is left alone
            chosen = named_kind(module, options.get("model"))
            if chosen is not None and adapters.wants(chosen):
                adapters.put_in(chosen, convert)

        injection.on_moving.append(moving)
        adapters.install(put_in)

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        if framework == "deepspeed":
            return None
        double = bool(options.get("double", True))
        load = (
            "from transformers import AutoModelForCausalLM, BitsAndBytesConfig\n\n"
            "config = BitsAndBytesConfig(\n"
            f'    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant={double}\n'
            ")\n"
            "model = AutoModelForCausalLM.from_pretrained(..., quantization_config=config)\n"
        )
        return code_of_lora(options, framework, load)


def _to_four_bits(injection: Injection, double: bool, model: Any, targets: list[str]) -> None:
    """Replace layers by Linear4bit with the same weights, which are quantized when they are moved or first used."""
    kind = importlib.import_module("bitsandbytes.nn").Linear4bit
    torch = injection.torch
    on_gpu = [name for name in targets if model.get_submodule(name).weight.is_cuda]
    for name in targets:
        old = model.get_submodule(name)
        transposed = is_conv1d(old)
        weight = old.weight.detach()
        if weight.is_meta:
            raise CannotApply(f"{name} has no weights yet (meta device): load the model in 4 bits instead")
        device = weight.device
        outputs, inputs = reversed(weight.shape) if transposed else weight.shape
        with torch.device("meta"):
            new = kind(inputs, outputs, bias=old.bias is not None, compress_statistics=double, quant_type="nf4")
        data = weight.t().contiguous() if transposed else weight
        new.weight = type(new.weight)(
            data, requires_grad=False, compress_statistics=double, quant_type="nf4", module=new
        )
        new.bias = old.bias
        new.train(old.training)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)
        del old, weight, data
        if device.type == "cuda":
            new.weight = new.weight.to(device)
        else:
            handle: list[Any] = []
            handle.append(new.register_forward_pre_hook(functools.partial(_quantize_first, handle)))
    what = f"{len(targets)} linear layers have 4-bit weights (NF4)"
    if on_gpu:
        held = torch.cuda.max_memory_allocated() / 2**30
        what += (
            f"; {len(on_gpu)} of them were on the GPU before, where {held:.2f} GiB had been allocated: "
            "build the model on the CPU, and the full weights never are there"
        )
    injection.say(QLoRA.name, what, type(model).__name__)


def _quantize_first(handle: list[Any], module: Any, _: Any) -> None:
    """A model that is trained where it was made, on the CPU, is never moved."""
    handle.pop().remove()
    if not module.weight.bnb_quantized:
        module.weight = module.weight.to(module.weight.device)


TECHNIQUE = QLoRA()
