"""What ATen's own code reads back from the device: the answer where the inputs are known, else its bounds.

Some operators read a number that a kernel computed before they can go on: how many elements a mask selects, how many
values are unique. Which reads happen, in which order and how wide was seen with each torch of ``versions.TESTED``.

A count of unknown values lies between bounds that follow from shapes alone; each function here that yields ``Bounds``
says why.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from oomproof.measure import versions
from oomproof.measure.known import FLOATS, Known, NotHere, tensors_in

#: Operators that size an allocation by what they read.
SIZING = frozenset(
    "aten::" + name
    for name in (
        "nonzero", "argwhere", "masked_select", "masked_scatter", "masked_scatter_", "index", "index_put", "index_put_",
        "_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "_unique", "_unique2", "unique_dim",
        "unique_consecutive", "unique_dim_consecutive", "repeat_interleave", "bincount", "embedding_dense_backward",
        "_embedding_bag_dense_backward", "_coalesce", "coalesce", "_to_sparse", "to_sparse", "_ctc_loss", "where",
        "nonzero_numpy", "_use_cudnn_ctc_loss", "_cudnn_ctc_loss", "linalg_matrix_exp", "to_sparse_csr",
        "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr",
        "_to_sparse_bsc", "sparse_mask", "ctc_loss",
    )
) | {"torchvision::nms"}  # fmt: skip

#: Operators that read a floating-point range or an error code, and size nothing by it.
HARMLESS = frozenset(
    "aten::" + name for name in ("histc", "_linalg_check_errors", "segment_reduce", "mode", "cholesky", "inverse")
)

#: Operators that take masks among their indices, and whose backward reads how much these select again.
MASKED = frozenset(
    "aten::" + n for n in ("index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")
)

#: Operators that read nothing themselves, but whose backward reads how much the mask selects.
SCATTERED = frozenset(("aten::masked_scatter", "aten::masked_scatter_"))

#: Operators that give the script a yes or a no.
VERDICTS = frozenset(("aten::equal", "aten::allclose", "aten::is_nonzero"))

#: Operators by which the script itself asks.
ASKED = VERDICTS | frozenset("aten::" + n for n in ("item", "_local_scalar_dense", "_to_copy", "to", "copy_"))

#: In the names of the kernels of ``Tensor.all()`` and of ``a & b`` of booleans.
_ALL = ("and_kernel_cuda", "BitwiseAndFunctorIbE")


def is_check(operation: str, size: int, last_kernel: str) -> bool:
    """Return whether PyTorch's own code asks if all of something is so, which is taken to hold: else it would raise.

    That the input is finite, the repeats are not negative, the loss is well-defined. It asks ``any()`` for errors,
    which zero denies.
    """
    return size == 1 and operation not in ASKED and any(name in last_kernel for name in _ALL)


class Bounds(NamedTuple):
    """The smallest and the largest count that an operator can read; ``most`` is None where shapes do not tell.

    ``follows`` is the count that follows from values that are assumed already.
    """

    least: int
    most: int | None
    follows: int | None = None

    def answer(self, many: bool) -> int:
        """Return the count that follows, else the largest or the smallest."""
        if self.follows is not None:
            return self.follows
        return self.most if many and self.most is not None else self.least


def affects_memory(operation: str, dtype: Any) -> bool | None:
    """Return whether an unknown number read by this operator may change memory; None when the script decides."""
    if operation in SIZING:
        return True
    if operation in HARMLESS or operation.startswith("aten::linalg_"):  # error codes
        return False
    return False if dtype in FLOATS and operation not in VERDICTS else None


def expected_reads(name: str, func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | bytes | Bounds]:
    """Yield what the operator will read, in order; raises NotHere when nothing can be said of it.

    An int is a count, as wide as the read turns out to be, Bounds are those of a count of unknown values; bytes are a
    whole copied tensor.
    """
    namespace, _, short = name.partition("::")
    if namespace not in ("aten", "torchvision"):
        raise NotHere
    reader = _READERS.get(short.rstrip("_") if short.endswith("_") else short)
    if reader is None:
        raise NotHere
    yield from reader(func, args, kwargs or {}, known)


def count_true(mask: Any, known: Known) -> int:
    """Return how many elements are not zero."""
    entry = known.entry(mask) if mask.is_cuda else None
    if entry is not None and entry.pattern is not None:
        known.saw_assumed |= entry.assumed
        return mask.numel() if any(entry.pattern) else 0
    return int(torch.count_nonzero(known.host(mask)))


def _nonzero(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | Bounds]:
    yield _selected(args[0], known)


def _selected(mask: Any, known: Known) -> int | Bounds:
    """Return how many elements are not zero: of unknown ones none to all."""
    known.saw_assumed = False
    try:
        count = count_true(mask, known)
    except NotHere:
        return Bounds(0, mask.numel())
    return Bounds(0, mask.numel(), count) if known.saw_assumed else count


def _masked_select(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | Bounds]:
    source, mask = args[:2]
    times = math.prod(torch.broadcast_shapes(source.shape, mask.shape)) // mask.numel() if mask.numel() else 0
    count = _selected(mask, known)
    if isinstance(count, Bounds):
        yield Bounds(0, mask.numel() * times, None if count.follows is None else count.follows * times)
    else:
        yield count * times


def selected_by(mask: Any, shape: Any, known: Known) -> int:
    """Return how many elements of a tensor of this shape the mask selects, once it is expanded to it."""
    return count_true(mask, known) * (math.prod(shape) // mask.numel() if mask.numel() else 0)


def _masks(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | Bounds]:
    for index in tensors_in(args[1]):
        if index.dtype in (torch.bool, torch.uint8):
            yield _selected(index, known)


def _put_masks(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | Bounds]:
    """``x[mask] = y``: as many as y has rows, where it has some and the mask is the only index."""
    for count in _masks(func, args, kwargs, known):
        rows = _rows(args) if isinstance(count, Bounds) and count.follows is None else None
        yield count if rows is None else rows


def _rows(args: Any) -> int | None:
    into, indices, values = args[:3]
    masks = list(tensors_in(indices))
    before = next(place for place, index in enumerate(indices) if index is not None)
    after = into.dim() - before - masks[0].dim()  # dimensions of y after the one that counts
    if len(masks) > 1 or values.dim() <= after or values.size(-1 - after) == 1:
        return None
    return int(values.size(-1 - after))


def _distinct(count: int) -> Bounds:
    """Return the bounds of how many values differ: where there is any, one to all."""
    return Bounds(min(1, count), count)


def _unique(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | Bounds]:
    try:
        values = known.host(args[0])
    except NotHere:
        # of booleans ATen counts the trues, and one of several is enough for two values
        yield Bounds(0, int(args[0].numel() > 1)) if args[0].dtype == torch.bool else _distinct(args[0].numel())
        return
    if values.dtype == torch.bool:
        yield int(values.sum())  # counts the trues; how many values that makes it works out itself
    else:
        yield torch.unique(values).numel()


def _unique_consecutive(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | Bounds]:
    dim = args[3] if len(args) > 3 else kwargs.get("dim")
    try:
        yield _length(torch.unique_consecutive(known.host(args[0]), dim=dim), dim)
    except NotHere:
        yield _distinct(_length(args[0], dim))


def _unique_dim(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | Bounds]:
    try:
        yield _length(torch.unique(known.host(args[0]), dim=args[1]), args[1])
    except NotHere:
        yield _distinct(_length(args[0], args[1]))


def _length(values: Any, dim: int | None) -> int:
    return int(values.numel() if dim is None else values.size(dim))


def _repeat_interleave(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | Bounds]:
    try:
        repeats = known.host(args[0])
    except NotHere:
        yield Bounds(0, None)  # a repeat may be any number; and then ATen asks whether all are positive
        yield 1
        return
    yield int(repeats.sum())
    yield int((repeats >= 0).all())


def _bincount(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | Bounds]:
    try:
        values = known.host(args[0])
    except NotHere:
        yield 0  # ATen refuses negative values
        yield Bounds(0, None)  # the largest value may be any; below minlength it changes nothing
        return
    yield int(values.min())
    yield int(values.max())


def _coalesce(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | Bounds]:
    """Indices that are equal become one, so there are no more than places."""
    sparse = args[0]
    try:
        yield torch.unique(known.host(sparse._indices()), dim=1).size(1)
    except NotHere:
        yield _distinct(min(sparse._nnz(), math.prod(sparse.shape[: sparse.sparse_dim()])))


def _to_sparse(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[Bounds]:
    """Dense to sparse: ATen looks for what is not zero, once or several times; with dense dimensions, for rows."""
    dims = next((a for a in args[1:2] if isinstance(a, int)), args[0].dim())
    yield from itertools.repeat(Bounds(0, math.prod(args[0].shape[:dims])))


def _nms(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int | Bounds]:
    """Non-maximum suppression keeps the best box at least, and all where none overlap."""
    try:
        boxes, scores = (known.host(a) for a in args[:2])
        yield func(boxes, scores, args[2]).numel()
    except NotHere:
        yield _distinct(args[0].size(0))


def _segment_reduce(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int]:
    lengths = kwargs.get("lengths")
    if lengths is None:
        raise NotHere
    yield int(known.host(lengths).min())
    yield 1


def _verdict(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[int]:
    yield int(func(*(known.host(a) if isinstance(a, torch.Tensor) else a for a in args), **kwargs))


def _copied(func: Any, args: Any, kwargs: Any, known: Known) -> Iterator[bytes]:
    """Copies to the host that were converted or gathered on the device first."""
    name = func._schema.name
    source = args[1] if name == "aten::copy_" else args[0]
    values = known.host(source)
    dtype = args[0].dtype if name == "aten::copy_" else kwargs.get("dtype") or _dtype_in(args) or values.dtype
    for form in (values.to(dtype), values):
        whole = form.contiguous()
        yield ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())


def _dtype_in(args: Any) -> Any:
    return next((a for a in args if isinstance(a, torch.dtype)), None)


_Reader = Callable[[Any, Any, Any, Known], Iterator[Any]]  # of int, bytes or Bounds

_READERS: dict[str, _Reader] = {
    "nonzero": _nonzero, "argwhere": _nonzero, "nonzero_numpy": _nonzero,
    "masked_select": _masked_select,
    "index": _masks, "_unsafe_index": _masks, "index_put": _put_masks, "_unsafe_index_put": _put_masks,
    "_index_put_impl": _put_masks,
    "_unique": _unique, "_unique2": _unique, "unique_consecutive": _unique_consecutive,
    "unique_dim": _unique_dim, "unique_dim_consecutive": _unique_consecutive,
    "repeat_interleave": _repeat_interleave, "bincount": _bincount, "segment_reduce": _segment_reduce,
    "coalesce": _coalesce, "_coalesce": _coalesce, "nms": _nms,
    "_to_sparse": _to_sparse, "to_sparse": _to_sparse, "_to_sparse_csr": _to_sparse, "_to_sparse_csc": _to_sparse,
    "equal": _verdict, "is_nonzero": _verdict, "allclose": _verdict,
    "_to_copy": _copied, "to": _copied, "copy": _copied, "_local_scalar_dense": _copied, "item": _copied,
}  # fmt: skip


# ---- where zero would not do -------------------------------------------------------------------------------------


def assumed(name: str, args: Any, size: int, *, first: bool) -> bytes | None:
    """Return what an operator reads in place of a number that nobody knows; None where zero is as good as any."""
    if name == "aten::linalg_matrix_exp":
        return _matrix_exponential(args[0].shape, args[0].dtype, size, first)
    if name == "aten::mode" and size == _FOUND_BYTES:  # thrust's search for the value, which must be there
        return b"\1" + bytes(size - 1)
    return None


_FOUND_BYTES = 16  # a pair of bool and index
_LARGE_NORM = 2.0  # above the last limit but one, 1.47 for float and 1.1 for double: the longest approximation
_LONGEST = 5  # its number


def _matrix_exponential(shape: Any, dtype: Any, size: int, first: bool) -> bytes | None:
    """Take all matrices to need the approximation that holds the most temporaries.

    The norm of a single one is read and decides on the host. Then follow the number of (approximation, matrix) pairs,
    and the pairs.
    """
    batch = math.prod(shape[:-2])
    wide = dtype in (torch.float64, torch.complex128)
    if first and batch == 1:
        return struct.pack("d" if wide else "f", _LARGE_NORM)
    if size == struct.calcsize("q"):
        return struct.pack("q", batch)
    if size == batch * struct.calcsize("2q"):
        return struct.pack(f"{2 * batch}q", *itertools.chain.from_iterable((_LONGEST, i) for i in range(batch)))
    return None


def validates(frame: Any) -> bool:
    """Return whether torch.distributions is checking its arguments, which are taken to be valid."""
    for _ in range(_FRAMES_TO_VALIDATION):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name in ("__init__", "_validate_sample") and code.co_filename.endswith(_DISTRIBUTION):
            return True
        frame = frame.f_back
    return False


_FRAMES_TO_VALIDATION = 8
_DISTRIBUTION = os.path.join("torch", "distributions", "distribution.py")


def assumed_by(node: Any, size: int, *, first: bool) -> bytes | None:
    """Return what a node of the backward pass reads, as ``assumed`` does."""
    if node.name() != "LinalgMatrixExpBackward0":
        return None
    shape, dtype = versions.gradient_of(node)
    return _matrix_exponential((*shape[:-2], 2 * shape[-2], 2 * shape[-1]), dtype, size, first)


class MaskedBackward:
    """The counts that the backward of ``x[mask]``, ``x[mask] = y`` and ``x.masked_scatter(mask, y)`` reads.

    They are remembered from the forward pass.
    Backward runs without the mirror, and looking at the mask that a node saved would run its saved-tensor hooks. The
    node is found again by its sequence number, which is the last one given out while its operator runs.
    """

    _MOST = 65536
    _SLICES = "torch::autograd::CopySlices"  # wraps the node of x[..., :n][mask] = y, and comes right after it
    _NODES = frozenset(
        ("IndexBackward0", "IndexPutBackward0", "UnsafeIndexBackward0", "UnsafeIndexPutBackward0",
         "MaskedScatterBackward0")
    )  # fmt: skip

    def __init__(self) -> None:
        self._counts: dict[tuple[int, tuple[int, ...] | None], list[int]] = {}
        self._place = threading.local()

    def remember(self, args: Any, shape: Any, counts: list[Any]) -> None:
        """Remember what the operator that is running now, whose node has this shape, makes its backward read."""
        if not counts:
            return
        number = torch._C._autograd._get_sequence_nr() - 1
        # The shape tells apart nodes of a recomputation, which autograd's thread numbers afresh.
        keys: tuple[Any, ...] = ((number, tuple(shape)), (number, None))
        if any(t.requires_grad for t in tensors_in(args)):
            self._counts.update(dict.fromkeys(keys, counts))
        else:  # nothing follows, or torch.func, whose tensors tell of their gradients elsewhere
            for key in keys:
                self._counts.setdefault(key, counts)
        while len(self._counts) > self._MOST:
            del self._counts[next(iter(self._counts))]

    def next_count(self, node: Any) -> int | None:
        """Return what the node reads next on this thread, None for another node or an unknown mask."""
        name, number = node.name(), node._sequence_nr()
        if name == self._SLICES:
            key: tuple[int, tuple[int, ...] | None] = (number - 1, None)
        elif name in self._NODES:
            key = (number, self._shape(node, name))
        else:
            return None
        counts = self._counts.get(key)
        if not counts:
            return None
        place = self._place.__dict__
        at = place["at"] + 1 if place.get("key") == key else 0
        place.update(key=key, at=at)
        return counts[at % len(counts)]

    @staticmethod
    def _shape(node: Any, name: str) -> tuple[int, ...] | None:
        if name.endswith("IndexBackward0"):
            return tuple(int(size) for size in node._saved_self_sym_sizes)
        return versions.shape_of_gradient(node)
