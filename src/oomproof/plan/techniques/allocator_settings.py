"""Settings of PyTorch's caching allocator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oomproof.measure import versions
from oomproof.plan.technique import Options, Technique

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts

#: From 2.9 on PYTORCH_ALLOC_CONF comes first; before, only the older name is read. Both are set, so that one counts.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class AllocatorSettings(Technique):
    """Less of the reserved memory lies idle between blocks; what is allocated stays the same."""

    name = "allocator-settings"
    title = "have the allocator keep less memory idle"
    fidelity = "exact"
    lowers = ("cached",)
    keeps = "anything that is allocated: it lowers what is reserved beyond that"
    rests_on = "PYTORCH_ALLOC_CONF"
    source = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf"
    accepts = {"settings": str}
    rank = 0

    def shown(self, options: Options) -> str:
        return str(options["settings"])

    def unfit(self, facts: Facts) -> str | None:
        return "the script has allocator settings of its own" if facts.allocator_config else None

    def variants(self, facts: Facts) -> Iterator[dict[str, Any]]:
        yield {"settings": "expandable_segments:True"}

    def environment(self, options: Options, base: Mapping[str, str]) -> dict[str, str]:
        return dict.fromkeys(VARIABLES, str(options["settings"]))

    def code(self, options: Options, framework: str, facts: Facts) -> str | None:
        variable = VARIABLES[0] if versions.numbers(facts.torch)[:2] >= (2, 9) else VARIABLES[1]
        setting = f'os.environ["{variable}"] = "{options["settings"]}"  # before torch is imported'
        return f"import os\n\n{setting}\n# or in the shell: export {variable}={options['settings']}"


TECHNIQUE = AllocatorSettings()
