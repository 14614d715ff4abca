"""What the planner asks of every technique that spreads a script over GPUs. Python 3.9; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomproof.plan.facts import Facts

#: Frameworks that shard by themselves: their own switches are the change, and the code says which.
THEIR_OWN = {
    "trainer": "transformers.Trainer",
    "lightning": "Lightning",
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
}

RANDOM_NUMBERS = "dropout draws other random numbers than on one GPU"


def unfit(facts: Facts) -> str | None:
    """Return why a script cannot be spread over GPUs, None where it can."""
    if facts.gpus < 2:
        return "it needs two GPUs or more: --gpus N"
    if facts.framework == "fsdp" or facts.uses & {"distributed", "ddp", "fsdp"}:
        return "the script spreads itself over GPUs"
    if len(facts.models) > 1:
        kinds = " and ".join(model.kind for model in facts.models[:2])
        return f"the script trains several models ({kinds}); each needs a wrapper of its own"
    if "compile" in facts.uses:
        return "the script compiles its model; what is compiled is not what would be sharded"
    size = facts.batch_size
    if size is not None and size < facts.gpus:
        return f"a batch of {size} has less than one sample for each of {facts.gpus} GPUs"
    return None


def no_switch(facts: Facts) -> str | None:
    """Return why the framework's own switches are left to the person, None where they are set for them."""
    if facts.framework in ("lightning", "deepspeed"):
        return f"{THEIR_OWN[facts.framework]} spreads a script by its own switches, which this leaves to you"
    if facts.framework == "trainer" and facts.batch_size is not None and facts.batch_size % facts.gpus:
        return f"the Trainer's batch of {facts.batch_size} is not a multiple of {facts.gpus} GPUs"
    return None


def only_proposed(facts: Facts) -> bool:
    """Return whether the person has to change the script: nobody can take a part of its own batches for it."""
    return facts.framework == "code" and has_own_batches(facts)


def has_own_batches(facts: Facts) -> bool:
    """Return whether the script makes its batches without a DataLoader: nobody can take a part of them for it."""
    return not any(loader.used_in_training for loader in facts.loaders)


def caution(facts: Facts) -> str:
    """Return what holds for every script that is spread over GPUs with a part of the batch on each."""
    if only_proposed(facts):
        return (
            "no DataLoader gives the batches: have each rank read a different part of the data. The figures are for "
            "the script's batch on each GPU"
        )
    said = [
        "every process runs the whole script: what it prints or writes to files by itself is done once in each",
        "the loss must be a mean over the samples, and one printed is that of the GPU's own part",
    ]
    if any(model.dropouts for model in facts.models):
        said.append(RANDOM_NUMBERS)
    tail = [
        loader.dataset % loader.batch_size
        for loader in facts.loaders
        if loader.used_in_training and loader.dataset and loader.batch_size and not loader.drop_last
    ]
    if any(0 < rest < facts.gpus for rest in tail):
        said.append("the last batch of an epoch has less samples than GPUs: give the DataLoader drop_last=True")
    return "; ".join(said)


START = """\
import os
import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
"""


def batches(facts: Facts) -> str:
    """Return the code that gives each rank its part of the data."""
    if has_own_batches(facts):
        return "torch.manual_seed(dist.get_rank())  # after the model is built: each rank reads a different part"
    return (
        "from torch.utils.data.distributed import DistributedSampler\n"
        "loader = DataLoader(dataset, batch_size=batch_size // dist.get_world_size(),\n"
        "                    sampler=DistributedSampler(dataset))  # and sampler.set_epoch(epoch)"
    )


def start(gpus: int) -> str:
    """Return the beginning of a script that torchrun starts on several GPUs."""
    return f"# torchrun --nproc-per-node {gpus} train.py\n{START}"
