"""Writes docs/techniques.md from what the techniques say of themselves: ``python -m oomproof.plan.describe``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from oomproof.plan.facts import BlockGroup, Facts, Loader, Model, Optimizer
from oomproof.plan.technique import FIDELITIES, FRAMEWORKS, Technique, techniques

#: The script that the code is shown for: a GPT-2 on one GPU, with blocks in ``transformer.h``, AdamW, a DataLoader.
EXAMPLE = Facts(
    models=(
        Model(
            kind="GPT2LMHeadModel",
            module="transformers.models.gpt2.modeling_gpt2",
            parameters=124_439_808,
            trainable=124_439_808,
            parameter_bytes=497_759_232,
            dtypes=("float32",),
            blocks=(BlockGroup("transformer.h", "GPT2Block", ("transformer.h.0", "transformer.h.1"), 340_217_856),),
            head="lm_head",
            vocabulary=50257,
        ),
    ),
    optimizers=(Optimizer("AdamW", "torch.optim.adamw", {"lr": 3e-4, "foreach": None, "fused": None}, 124_439_808),),
    loaders=(Loader(16, 10_000, True, True),),
    packages=dict.fromkeys(
        ("bitsandbytes", "torchao", "peft", "liger-kernel", "cut-cross-entropy", "torch-pruning", "transformers"), "1"
    ),
    torch="2.14.1",
    capability=(9, 0),
    gpus=4,
)

_HEAD = """# Techniques

What `oomproof plan` tries and `oomproof apply` puts into a script. This page is written from the techniques' own words
by `python -m oomproof.plan.describe`.

| fidelity | what it means |
|---|---|
| exact | the same bits: parameters after a step are equal |
| equal | the same maths; rounding may differ |
| approximate | different arithmetic: fewer bits, or other statistics |
| changes-model | another model or another training; only with `--allow changes-model` |

A plan is made of exact and equal techniques where these do; of approximate ones only where they do not.
"""


def page() -> str:
    """Return the page."""
    found = sorted(techniques().values(), key=lambda t: (FIDELITIES.index(t.fidelity), t.rank, t.name))
    rows = [f"| [{t.name}](#{t.name}) | {t.fidelity} | {t.title} | {', '.join(_words(t.lowers))} |" for t in found]
    table = "\n".join(["| technique | fidelity | what it does | lowers |", "|---|---|---|---|", *rows])
    return "\n".join([_HEAD, table, "", *("\n".join(_section(t)) for t in found)])


def _section(technique: Technique) -> Iterator[str]:
    yield f"## {technique.name}"
    yield ""
    yield inspect.cleandoc(type(technique).__doc__ or technique.title).replace("``", "`")
    yield ""
    if technique.keeps:
        yield f"- **Does not save** {technique.keeps}."
    yield f"- **Rests on** {_code(technique.rests_on)}: <{technique.source}>"
    if technique.needs:
        yield f"- **Needs** {', '.join(technique.needs)}: `{technique.extra}`" if technique.extra else ""
    if technique.excludes:
        yield f"- **Not with** {', '.join(sorted(technique.excludes))}"
    variants = [", ".join(f"{k}={v}" for k, v in options.items()) for options in technique.variants(EXAMPLE)]
    variants = [v for v in variants if v]
    if variants:
        yield f"- **Variants** for the example below: {'; '.join(variants)}"
    options = next(technique.variants(EXAMPLE), None)
    if options is not None:
        for framework in FRAMEWORKS:
            text = technique.code(options, framework, EXAMPLE)
            if text and (framework == "code" or text != technique.code(options, "code", EXAMPLE)):
                yield ""
                yield f"{_TITLES[framework]}:"
                yield ""
                yield "```python" if not text.startswith(("export ", "accelerate ")) else "```console"
                yield text.rstrip()
                yield "```"
    yield ""


_TITLES = {
    "code": "By hand, in plain PyTorch",
    "trainer": "With the Hugging Face Trainer",
    "lightning": "With Lightning",
    "accelerate": "With accelerate",
    "deepspeed": "With DeepSpeed",
    "fsdp": "With FSDP",
}


def _words(lowers: tuple[str, ...]) -> list[str]:
    return [what.replace("_", " ") for what in lowers]


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    print(page(), end="")
