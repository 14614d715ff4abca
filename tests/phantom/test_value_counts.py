"""Peaks of what is sized by values: with the mirror, without it, and against what must come out."""

from __future__ import annotations

from typing import Any

import pytest
from child import has_module
from phantom_child import in_child

pytestmark = pytest.mark.phantom

#: Defines ``grown(make)``: by how much making something raises allocated bytes, and what ``make`` returned is kept.
GROWN = """
def size(count, item):
    "Bytes of a block: rounded up to 512."
    return -(-count * item // 512) * 512
def grown(make):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept.append(make())
    return torch.cuda.memory_allocated() - before
kept = []
"""


@pytest.fixture
def lines() -> Any:
    """Run lines of Python beside a mirror, or without one."""

    def run(code: str, **options: Any) -> Any:
        import textwrap

        result = in_child(GROWN + textwrap.dedent(code), **options)
        if result is None:
            pytest.skip("no CUDA build of torch")
        return result

    return run


#: Each makes something from a mask, some numbers and floats; ``truth`` is what it must take, by the CPU's counts.
SIZED = """
    host = {"mask": torch.rand(5000) > 0.7, "n": torch.randint(0, 40, (5000,)), "f": torch.randn(5000, 16)}
    there = {k: v.cuda() for k, v in host.items()}
    if not KNOWN:
        score = torch.randn(5000, device="cuda")
        there["mask"], there["n"] = score > 0.7, (score * 40).long()
    def put(v):
        y = v["f"] * 1
        y[v["mask"]] = v["f"][v["mask"]] * 2
        return y
    makers = {
        "nonzero": lambda v: v["mask"].nonzero(),
        "where": lambda v: torch.where(v["mask"])[0],
        "x[mask]": lambda v: v["f"][v["mask"]],
        "x[mask] = y": put,
        "masked_select": lambda v: v["f"].masked_select(v["mask"][:, None]),
        "unique": lambda v: torch.unique(v["n"]),
        "unique with inverse": lambda v: torch.unique(v["n"], return_inverse=True, return_counts=True),
        "unique_consecutive": lambda v: torch.unique_consecutive(v["n"]),
        "coalesce": lambda v: torch.sparse_coo_tensor(v["n"][None], v["f"], (40, 16)).coalesce(),
    }
    def bytes_of(name, value):
        "Of a result; unique makes its results, coalesce its indices as long as the input, and then calls them shorter."
        if isinstance(value, torch.Tensor) and value.is_sparse:
            value = (value._indices(), value._values())
        sizes = [size(t.numel(), t.element_size()) for t in (value if isinstance(value, tuple) else (value,))]
        if name.startswith("unique"):
            return len(sizes) * size(5000, 8)
        return sum(sizes) if name != "coalesce" else size(5000, 8) + sizes[1]
    result = {k: [grown(lambda: make(there)), bytes_of(k, make(host)), *(bounds[-1][1:3] if bounds else ())]
              for k, make in makers.items()}
"""


def test_known_values_size_what_they_should(lines: Any) -> None:
    """From a mask and numbers that the host sent, each operator makes as many bytes as the CPU's result has."""
    found = lines(SIZED.replace("KNOWN", "True"))
    for name, (grown, truth) in found.items():
        assert grown == truth > 512, name


@pytest.mark.parametrize("many", [False, True])
def test_unknown_values_size_between_bounds(lines: Any, many: bool) -> None:
    """From what a kernel would have computed, each makes the least or the most that any values could; it is told."""
    found = lines(SIZED.replace("KNOWN", "False"), many=many)
    block = lambda count, item: -(-count * item // 512) * 512  # noqa: E731
    long, rows = block(5000, 8), block(80000, 4)
    most = {
        "nonzero": long, "where": long, "x[mask]": rows, "masked_select": rows, "unique": long,
        "unique with inverse": 3 * long, "unique_consecutive": long, "coalesce": long + block(40 * 16, 4),
    }  # fmt: skip
    least = {
        "nonzero": 0, "where": 0, "x[mask]": 0, "masked_select": 0, "unique": long,
        "unique with inverse": 3 * long, "unique_consecutive": long, "coalesce": long + 512,
    }  # fmt: skip
    for name, expected in (most if many else least).items():
        grown, truth, low, high = found[name]
        assert grown == expected, name
        assert low in (0, 1), name
        assert (high == 40) if name == "coalesce" else (high in (5000, 80000)), name
        assert low <= truth, name


def test_kept_values_size_by_what_was_copied(lines: Any) -> None:
    """Without the mirror the same script goes on, with counts that are zero where nothing was computed."""
    found = lines("    device.on_read(KeptValues(told).on_read)\n" + SIZED.replace("KNOWN", "False"), mirrored=False)
    assert found["nonzero"][0] == found["x[mask]"][0] == found["masked_select"][0] == 0


def test_masks_in_backward(lines: Any) -> None:
    """Forward and backward of masked indexing raise the peak by what the kept rows need, known or not."""
    code = """
        host = torch.arange(4096) % 4 == 0
        mask = KNOWN
        x = torch.zeros(4096, 256, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        x[mask].exp().sum().backward()
        result = [torch.cuda.max_memory_allocated() - before, list(x.grad.shape), unknown]
        """
    known, shape, told = lines(code.replace("KNOWN", "host.cuda()"))
    rows = 1024 * 256 * 4
    assert known >= 4 * rows + rows  # the gradient of x, and the kept rows' exponentials
    assert shape == [4096, 256]
    assert told == []
    few, shape, told = lines(code.replace("KNOWN", "torch.randn(4096, device='cuda') > 0"))
    assert shape == [4096, 256]
    assert told == [["aten::index (float32)", True]]
    many, shape, _ = lines(code.replace("KNOWN", "torch.randn(4096, device='cuda') > 0"), many=True)
    assert shape == [4096, 256]
    assert few < known < many
    assert many - few >= 4 * rows  # all rows' copies instead of none


EMBEDDING = """
    import gc
    def peak(ids, **options):
        layer = torch.nn.Embedding(20000, 64, **options).cuda()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(ids).sum().backward()
        return torch.cuda.max_memory_allocated() - before
    host = torch.randint(0, 20000, (16, 2048))
    known = host.cuda()
    computed = torch.randn(16, 2048, device="cuda").long()
    result = {}
    for name, options in (("dense", {}), ("sparse", {"sparse": True}), ("padded", {"padding_idx": 0}),
                          ("scaled", {"scale_grad_by_freq": True}),
                          ("sparse padded", {"sparse": True, "padding_idx": 0})):
        for count in (32768, 1024):
            result[f"{name} {count}"] = [peak(known.flatten()[:count], **options),
                                         peak(computed.flatten()[:count], **options)]
    bag = torch.nn.EmbeddingBag(20000, 64, mode="sum").cuda()
    bag(known).sum().backward()
    result["bag"] = list(bag.weight.grad.shape)
    result["unknown"] = unknown
"""


def test_embedding_backward(lines: Any) -> None:
    """Dense and sparse gradients, with padding or scaled, many indices or few, take the same with and without mirror.

    ATen's kernels allocate for the most segments that there can be, and read none back: so known or computed indices
    make no difference either, but for a sparse gradient that leaves padding out.
    """
    mirrored, bare = lines(EMBEDDING), lines(EMBEDDING, mirrored=False)
    assert mirrored.pop("unknown") is not None
    bare.pop("unknown")
    assert mirrored["bag"] == bare["bag"] == [20000, 64]
    for name in mirrored.keys() - {"bag"}:
        if "sparse padded" in name:
            continue
        assert mirrored[name] == bare[name], name
        assert mirrored[name][0] == mirrored[name][1], name
    assert mirrored["dense 32768"][0] > 20000 * 64 * 4


def test_padded_batches(lines: Any) -> None:
    """pad_sequence, packed sequences and attention masks of lengths from the host come out as on the CPU."""
    code = """
        from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence, unpad_sequence
        r = result = {}
        parts = [torch.randn(n, 8) for n in (7, 5, 3)]
        padded = pad_sequence([p.cuda() for p in parts], batch_first=True)
        lengths = torch.tensor([7, 5, 3])
        packed = pack_padded_sequence(padded, lengths, batch_first=True)
        r["packed"] = list(packed.data.shape)
        r["unpacked"] = list(pad_packed_sequence(packed, batch_first=True)[0].shape)
        r["unsorted"] = list(pack_padded_sequence(padded, lengths.flip(0), batch_first=True, enforce_sorted=False)
                             .data.shape)
        r["unpadded"] = [list(p.shape) for p in unpad_sequence(padded, lengths, batch_first=True)]
        on_device = lengths.cuda()
        mask = torch.arange(on_device.max().item(), device="cuda")[None] < on_device[:, None]
        r["kept"] = list(padded[mask].shape)
        cumulative = F.pad(mask.sum(-1).cumsum(0, dtype=torch.int32), (1, 0))
        r["varlen"] = [cumulative.tolist(), mask.flatten().nonzero().flatten().numel(), mask.sum(-1).max().item()]
        labels = torch.where(mask, 5, -100)
        keep = labels != -100
        r["loss rows"] = list(padded[keep].shape) + [keep.sum().item()]
        r["unknown"] = unknown
        """
    assert lines(code) == {
        "packed": [15, 8], "unpacked": [3, 7, 8], "unsorted": [15, 8], "unpadded": [[7, 8], [5, 8], [3, 8]],
        "kept": [15, 8], "varlen": [[0, 7, 12, 15], 15, 7], "loss rows": [15, 8, 15], "unknown": [],
    }  # fmt: skip


def test_repeats_counts_and_losses(lines: Any, version: tuple[int, ...]) -> None:
    """repeat_interleave, bincount, CTC and nested tensors of known lengths take what the CPU's results have."""
    found = lines(
        """
        r = result = {}
        repeats = torch.tensor([3, 0, 5, 2], device="cuda")
        x = torch.randn(4, 8, device="cuda", requires_grad=True)
        y = x.repeat_interleave(repeats, 0)
        y.sum().backward()
        r["repeat_interleave"] = [list(y.shape), list(x.grad.shape)]
        r["bincount"] = [torch.bincount(repeats).tolist(), torch.bincount(repeats, minlength=9).tolist()]
        for place in ("cpu", "cuda"):
            logs = torch.randn(50, 4, 20, device="cuda").log_softmax(2).requires_grad_()
            targets = torch.randint(1, 20, (4, 30), device=place)
            lengths = torch.full((4,), 50, device=place), torch.tensor([10, 20, 30, 25], device=place)
            F.ctc_loss(logs, targets, *lengths).backward()
            r["ctc " + place] = list(logs.grad.shape)
        parts = [torch.randn(n, 8, device="cuda") for n in (3, 5)]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
        r["jagged"] = [list(nested.values().shape), nested.offsets().tolist()]
        if torch.__version__ >= (2, 6):  # before, jagged ones cannot be padded
            r["padded"] = list(nested.to_padded_tensor(0.0).shape)
        offsets = torch.tensor([0, 3, 8], device="cuda")
        again = torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)
        r["from offsets"] = [list(t.shape) for t in again.unbind()]
        r["unknown"] = unknown
        """
    )
    assert found == {
        "repeat_interleave": [[10, 8], [4, 8]], "bincount": [[1, 0, 1, 1, 0, 1], [1, 0, 1, 1, 0, 1, 0, 0, 0]],
        "ctc cpu": [50, 4, 20], "ctc cuda": [50, 4, 20], "jagged": [[8, 8], [0, 3, 8]],
        "from offsets": [[3, 8], [5, 8]], "unknown": [], **({"padded": [2, 5, 8]} if version >= (2, 6) else {}),
    }  # fmt: skip


def test_sizes_without_a_largest_are_the_least(lines: Any) -> None:
    """Unknown repeats and unknown numbers to count have no largest: both runs take the least, and no bound is told."""
    code = """
        n = torch.randn(100, device="cuda").long()
        made = [torch.repeat_interleave(n), torch.bincount(n), torch.bincount(n, minlength=8)]
        result = [[list(m.shape) for m in made], [b[1:3] for b in bounds]]
        """
    for many in (False, True):
        assert lines(code, many=many) == [[[0], [1], [8]], [[0, None]] * 3]


ROUTED = """
    logits = torch.randn(4096, 8, device="cuda", requires_grad=True)
    weights, chosen = logits.softmax(-1).topk(2, dim=-1)
    hot = F.one_hot(chosen, 8)
    per_expert = [
        [torch.where(hot.permute(2, 1, 0)[e])[0].numel() for e in range(8)],
        [(chosen == e).nonzero().size(0) for e in range(8)],
        torch.bincount(chosen.flatten(), minlength=8).tolist(),
        torch.histc(chosen.int(), bins=8, min=0, max=7).tolist(),
        [int(logits[(chosen == e).any(-1)].size(0)) for e in range(8)],
        torch.unique_consecutive(chosen.flatten().sort()[0], return_counts=True)[1].tolist(),
    ]
    distinct = (chosen[:, 0] != chosen[:, 1]).all().item()
    result = [per_expert, distinct, len(unknown) > 20, {b[0]: b[1:3] for b in bounds if b[1] is not None}]
"""


def test_routing_is_assumed_to_be_even(lines: Any) -> None:
    """A router's top choices spread evenly; every way to count them agrees, sums to tokens times k, and is told."""
    per_expert, distinct, told, between = lines(ROUTED)
    assert per_expert == [[1024] * 8] * 6
    assert distinct
    assert told
    assert between["aten::nonzero"] == [0, 8192]


def test_routing_with_many_is_as_uneven_as_it_can_be(lines: Any) -> None:
    """With the largest counts the first k experts get every token but for one that goes to each of the others."""
    per_expert, distinct, told, _ = lines(ROUTED, many=True)
    assert len(set(map(str, per_expert))) == 1
    assert per_expert[0] == [4096, 4090, 1, 1, 1, 1, 1, 1]
    assert sum(per_expert[0]) == 4096 * 2
    assert distinct
    assert told


def test_choices_of_few_rows_stay_unknown(lines: Any) -> None:
    """topk over a vocabulary, as beam search has it, is no routing: nothing is assumed of it."""
    assert lines(
        """
        chosen = torch.randn(4, 50000, device="cuda").topk(8)[1]
        result = [chosen.sum().item(), unknown, [b[-1] for b in bounds]]
        """
    ) == [0, [["aten::_local_scalar_dense (int64)", None]], [False]]


@pytest.mark.skipif(not has_module("torchvision"), reason="torchvision is not installed beside the tested torch")
def test_boxes_that_suppress_each_other(lines: Any) -> None:
    """Non-maximum suppression of unknown boxes keeps one or all; of few known ones what the CPU keeps."""
    code = """
        from torchvision.ops import nms
        known = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30]]), torch.tensor([0.9, 0.8, 0.7])
        kept = nms(*(t.cuda() for t in known), 0.5)
        untold = len(unknown)
        boxes, scores = torch.rand(2000, 4, device="cuda"), torch.rand(2000, device="cuda")
        result = [kept.tolist(), untold, nms(boxes, scores, 0.5).numel(), bounds[-1][:3]]
        """
    for many, count in ((False, 1), (True, 2000)):
        assert lines(code, many=many) == [[0, 2], 0, count, ["torchvision::nms", 1, 2000]]


@pytest.mark.usefixtures("transformers")
def test_padded_text_batches(lines: Any) -> None:
    """transformers' collators and models take a padded batch without one read of an unknown number but the loss."""
    found = lines(
        """
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import (BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, DataCollatorWithPadding,
                                  LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast)
        words = Tokenizer(models.WordLevel({"[PAD]": 0, "[MASK]": 1, "a": 2, "b": 3}, unk_token="[PAD]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]")
        texts = [tokenizer("a b " * n) for n in (3, 5, 9)]
        sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                 "num_attention_heads": 2}
        result = []
        for model, masked in ((LlamaForCausalLM(LlamaConfig(**sizes)), False),
                              (BertForMaskedLM(BertConfig(**sizes)), True)):
            collators = [DataCollatorForLanguageModeling(tokenizer, mlm=masked)]
            collators += [DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)]
            for collate in collators:
                batch = {k: v.cuda() for k, v in collate(texts).items()}
                batch.setdefault("labels", batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100))
                batch.pop("token_type_ids", None)
                model.cuda().train()(**batch).loss.backward()
                longest = batch["attention_mask"].sum(-1).max().item()
                learned = (batch["labels"] != -100).sum().item()
                result.append([list(batch["input_ids"].shape), longest, masked or learned])
        result.append(unknown)
        """
    )
    assert found == [[[3, 18], 18, 34], [[3, 24], 18, 34], [[3, 18], 18, True], [[3, 24], 18, True], []]


@pytest.mark.parametrize("many", [False, True])
def test_rows_that_are_put_tell_what_the_mask_keeps(lines: Any, many: bool) -> None:
    """x[mask] = y needs a mask that keeps as many as y has rows; where y is one row for all it says nothing."""
    assert lines(
        """
        x = torch.randn(100, 4, device="cuda")
        mask = x[:, 0] > 0
        x[mask] = torch.ones(60, 4, device="cuda")
        x.t()[:, mask] = torch.ones(4, 60, device="cuda")
        x[x > 0] = torch.ones(70, device="cuda")
        told = len(unknown)
        x[mask] = torch.ones(1, 4, device="cuda")
        x[mask] = torch.ones(4, device="cuda")
        result = [told, bounds]
        """,
        many=many,
    ) == [0, [["aten::index_put_", 0, 100, None, True]] * 2]
