"""NVIDIA's other libraries: forward and backward run, and what they allocate is what is public of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from child import Child

from oomproof.measure.measurement import Measurement

Measure = Callable[..., Measurement]


def attempt(cases):
    """Run each case and raise with all that failed."""
    import torch

    failed = []
    for name, case in cases.items():
        try:
            case()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - all failures are told at once
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failed, "\n".join(failed)


def backward(*outputs):
    """Call backward on all outputs that have a gradient."""
    import torch

    losses = [o.abs().float().sum() for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()


def draw(*shape, **options):
    """Return a random tensor on the GPU that wants a gradient."""
    import torch

    return torch.randn(*shape, device="cuda", requires_grad=True, **options)


def recurrent():
    """LSTM, GRU and RNN: types, depth, directions, dropout, projection, packed sequences, evaluation; and CTC."""
    import torch
    from torch import nn
    from torch.nn import functional

    def train(kind, dtype, options):
        net = getattr(nn, kind)(24, 32, **options).to("cuda", dtype)
        net.flatten_parameters()
        backward(net(draw(10, 4, 24, dtype=dtype))[0])
        packed = nn.utils.rnn.pack_padded_sequence(
            draw(10, 4, 24, dtype=dtype), torch.tensor([10, 8, 3, 2]), enforce_sorted=False
        )
        out, lengths = nn.utils.rnn.pad_packed_sequence(net(packed)[0])
        assert out.shape[0] == 10
        assert lengths.tolist() == [10, 8, 3, 2]
        backward(out)
        assert all(p.grad.shape == p.shape for p in net.parameters())
        net.eval()
        with torch.no_grad():
            net(draw(10, 4, 24, dtype=dtype))

    def ctc(dtype):
        targets = torch.randint(1, 20, (40,), dtype=dtype, device="cuda")
        lengths = [torch.full((4,), n, dtype=dtype, device="cuda") for n in (50, 10)]
        backward(functional.ctc_loss(draw(50, 4, 20).log_softmax(2), targets, *lengths))

    cases = {}
    for kind in ("LSTM", "GRU", "RNN"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for options in (
                {}, {"num_layers": 2, "bidirectional": True, "dropout": 0.1}, {"bias": False},
                *([{"proj_size": 16}] if kind == "LSTM" else []),
            ):  # fmt: skip
                cases[f"{kind} {dtype} {options}"] = lambda a=(kind, dtype, options): train(*a)
    cases["cuDNN's CTC loss"] = lambda: ctc(torch.int32)
    cases["CTC loss"] = lambda: ctc(torch.int64)
    attempt(cases)


def normalisation_and_attention():
    """Batch norm in both layouts and modes; every attention backend that the GPU has."""
    import os

    os.environ["TORCH_CUDNN_SDPA_ENABLED"] = "1"  # a switch of torch 2.4

    import torch
    from torch import nn
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def batch_norm(dtype, layout):
        net = nn.BatchNorm2d(16).cuda()
        backward(net(draw(8, 16, 20, 20, dtype=dtype).to(memory_format=layout)))
        net.eval()(draw(8, 16, 20, 20, dtype=dtype).to(memory_format=layout))

    def attend(backend):
        # torch 2.4 gives cuDNN this layout only, and nothing that wants a gradient
        learns = backend != SDPBackend.CUDNN_ATTENTION or not torch.__version__.startswith("2.4.")
        leaves = [draw(2, 128, 8, 64, dtype=torch.bfloat16).requires_grad_(learns) for _ in range(3)]
        q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
        with sdpa_kernel(backend):
            backward(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        assert all(not learns or leaf.grad.shape == leaf.shape for leaf in leaves)

    cases = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last):
            cases[f"{dtype} {layout}"] = lambda a=(dtype, layout): batch_norm(*a)
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        cases[name] = lambda name=name: attend(getattr(SDPBackend, name))
    attempt(cases)


def fourier():
    """Every transform, of powers of two and primes; the plan cache; short-time transforms."""
    import torch

    def transform(name, size):
        x = draw(3, size, size)
        if name in ("ifft", "ifft2", "ifftn", "irfft", "irfft2", "irfftn", "hfft", "hfft2"):
            x = torch.complex(x, x)
        backward(getattr(torch.fft, name)(x))

    def cached():
        cache = torch.backends.cuda.cufft_plan_cache
        cache.clear()
        for size in range(2, 40):
            torch.fft.fft(torch.zeros(size, device="cuda"))
        assert cache.size == 38
        cache.max_size = 8
        assert cache.size == 8

    def short():
        window = torch.hann_window(100, device="cuda")
        backward(torch.istft(torch.stft(draw(3, 1000), 100, window=window, return_complex=True), 100, window=window))

    names = [f"{inverse}{kind}{rank}" for kind in ("fft", "rfft") for inverse in ("", "i") for rank in ("", "2", "n")]
    names += ["hfft", "ihfft", "hfft2", "ihfft2"]
    cases = {f"{name} {size}": lambda a=(name, size): transform(*a) for name in names for size in (64, 101)}
    attempt({**cases, "plan cache": cached, "stft": short})


def dense_algebra():
    """All of torch.linalg, one matrix and batches, real and complex, each driver; backward where it has one."""
    import torch

    lin = torch.linalg

    def definite(*shape):
        return (torch.zeros(*shape, device="cuda") + torch.eye(shape[-1], device="cuda")).requires_grad_()

    cases = {}
    for batch in ((), (3,), (70,)):
        for n in (5, 40):
            square, tall = (*batch, n, n), (*batch, n, 3)
            for name, case in {
                **{f"svd {d}": lambda s=square, d=d: backward(*lin.svd(draw(*s), full_matrices=False, driver=d))
                   for d in (None, "gesvd", "gesvdj", "gesvda")},
                "svd tall": lambda s=tall: backward(*lin.svd(draw(*s), full_matrices=False)),
                "svdvals": lambda s=square: backward(lin.svdvals(draw(*s))),
                "eigh": lambda s=square: backward(*lin.eigh(draw(*s))),
                "eigvalsh": lambda s=square: backward(lin.eigvalsh(draw(*s))),
                "eig": lambda s=square: backward(*lin.eig(draw(*s))),
                "eig, values only": lambda s=square: backward(lin.eig(draw(*s))[0]),
                "eigvals": lambda s=square: backward(lin.eigvals(draw(*s))),
                "qr": lambda s=square: backward(*lin.qr(draw(*s))),
                "qr complete": lambda s=square: backward(*lin.qr(draw(*s), "complete")),
                "cholesky": lambda s=square: backward(lin.cholesky(definite(*s))),
                "cholesky_ex": lambda s=square: backward(lin.cholesky_ex(definite(*s), check_errors=True)[0]),
                "cholesky_solve": lambda s=square, t=tall: backward(torch.cholesky_solve(draw(*t), definite(*s))),
                "cholesky_inverse": lambda s=square: backward(torch.cholesky_inverse(definite(*s))),
                "lu": lambda s=square: backward(*lin.lu(draw(*s))),
                "lu_solve": lambda s=square, t=tall: backward(lin.lu_solve(*lin.lu_factor(draw(*s)), draw(*t))),
                "solve": lambda s=square, t=tall: backward(lin.solve(draw(*s), draw(*t))),
                "triangular": lambda s=square, t=tall: backward(
                    lin.solve_triangular(draw(*s), draw(*t), upper=True)),
                "lstsq": lambda s=square, t=tall: backward(lin.lstsq(draw(*s), draw(*t)).solution),
                "inv": lambda s=square: backward(lin.inv(draw(*s))),
                "det": lambda s=square: backward(lin.det(draw(*s))),
                "slogdet": lambda s=square: backward(*lin.slogdet(draw(*s))),
                "pinv": lambda s=square: backward(lin.pinv(draw(*s))),
                "matrix_exp": lambda s=square: backward(lin.matrix_exp(draw(*s))),
                "matrix_power": lambda s=square: backward(lin.matrix_power(draw(*s), 3)),
                "matrix_rank": lambda s=square: lin.matrix_rank(draw(*s)),
                "cond": lambda s=square: backward(lin.cond(draw(*s))),
                "nuclear norm": lambda s=square: backward(lin.matrix_norm(draw(*s), "nuc")),
                "ldl": lambda s=square, t=tall: lin.ldl_solve(*lin.ldl_factor(draw(*s).detach()), draw(*t).detach()),
                "householder": lambda s=square: backward(lin.householder_product(draw(*s), draw(*s[:-1]))),
                "ormqr": lambda s=square, t=tall: torch.ormqr(*(draw(*x).detach() for x in (s, s[:-1], t))),
                "geqrf": lambda s=square: torch.geqrf(draw(*s).detach()),
            }.items():  # fmt: skip
                cases[f"{name} {square}"] = case
    for name in ("svd", "eigh", "qr", "inv"):
        for dtype in (torch.float64, torch.complex64):
            cases[f"{name} {dtype}"] = lambda name=name, dtype=dtype: backward(
                *(lambda out: out if isinstance(out, tuple) else (out,))(getattr(lin, name)(draw(8, 8, dtype=dtype)))
            )
    cases["low rank"] = lambda: backward(*torch.svd_lowrank(draw(50, 40)))
    cases["MAGMA"] = lambda: (
        torch.backends.cuda.preferred_linalg_library("magma"),
        backward(*lin.eigh(draw(40, 40)), lin.cholesky(definite(40, 40))),
        torch.backends.cuda.preferred_linalg_library("default"),
    )
    cases["orthogonal"] = lambda: torch.nn.init.orthogonal_(torch.empty(40, 20, device="cuda"))
    attempt(cases)


def sparse_algebra():
    """COO and CSR: products, sums, triangular solves, sampled products, conversions between all layouts."""
    import torch

    def coo(gradient=True):
        indices = torch.stack([torch.randint(0, 50, (20,)), torch.randint(0, 50, (20,))]).cuda()
        return torch.sparse_coo_tensor(indices, draw(20).detach(), (50, 50)).coalesce().requires_grad_(gradient)

    def csr(gradient=False, dtype=torch.float32):
        return coo(False).to(dtype).to_sparse_csr().requires_grad_(gradient)

    def dense(*shape, dtype=torch.float32):
        return draw(*shape, dtype=dtype).detach()

    attempt({
        "coo @ dense": lambda: backward(torch.sparse.mm(coo(), draw(50, 7))),
        "coo @ vector": lambda: backward(coo() @ draw(50)),
        "addmm": lambda: backward(torch.sparse.addmm(draw(50, 7), coo(), draw(50, 7))),
        "coo @ coo": lambda: torch.sparse.sum(torch.sparse.mm(coo(), coo())).backward(),
        "coo + coo": lambda: torch.sparse.sum(coo() + coo()).backward(),
        "coo bmm": lambda: torch.bmm(torch.stack([coo(False)] * 3), dense(3, 50, 7)),
        "softmax": lambda: backward(torch.sparse.softmax(coo(), 1).to_dense()),
        "mask": lambda: dense(50, 50).sparse_mask(coo(False)),
        "to_sparse": lambda: dense(20, 20).to_sparse(),
        "to_sparse_csr": lambda: dense(20, 20).to_sparse_csr(),
        "to_sparse_csc": lambda: dense(20, 20).to_sparse_csc(),
        "to_sparse_bsr": lambda: dense(20, 20).to_sparse_bsr((4, 4)),
        "to_sparse_bsc": lambda: dense(20, 20).to_sparse_bsc((4, 4)),
        "csr @ dense": lambda: backward(csr(True) @ draw(50, 7)),
        "csr @ dense, half": lambda: csr(dtype=torch.float16) @ dense(50, 8, dtype=torch.float16),
        "csr addmm": lambda: torch.addmm(dense(50, 7), csr(), dense(50, 7)),
        "csr @ csr": lambda: csr() @ csr(),
        "csr + csr": lambda: csr() + csr(),
        "sampled": lambda: backward(torch.sparse.sampled_addmm(csr(True), draw(50, 8), draw(8, 50)).to_dense()),
        "triangular": lambda: torch.triangular_solve(dense(50, 7), csr()),
        "triangular, one": lambda: torch.triangular_solve(dense(50, 1), csr()),
        "conversions": lambda: (csr().to_dense(), csr().to_sparse(), csr().to_sparse_csc(), csr().t() @ dense(50, 7)),
        "bsr @ dense": lambda: torch.eye(32, device="cuda").to_sparse_bsr((16, 16)) @ dense(32, 32),
        "batches of csr": lambda: torch.bmm(torch.stack([torch.eye(8, device="cuda")] * 2).to_sparse_csr(),
                                            dense(2, 8, 3)),
    })  # fmt: skip


def random_and_indexing():
    """Generators, distributions and their checks; sorting, searching, indexing and embeddings with their backward."""
    import torch
    from torch import distributions, nn

    def generators():
        generator = torch.Generator(device="cuda")
        generator.manual_seed(3)
        state = generator.get_state()
        torch.randn(10, device="cuda", generator=generator)
        generator.set_state(state)
        assert torch.equal(generator.get_state(), state)

    def index():
        x, i = draw(100, 8), torch.randint(0, 100, (500,), device="cuda")
        column, values = i[:, None].expand(-1, 8), draw(500, 8)
        backward(x[i], x.index_select(0, i), x.gather(0, column), torch.zeros_like(x).index_add(0, i, values))
        backward(torch.zeros_like(x).scatter_add(0, column, values))
        torch.zeros_like(x).index_put((i,), values, accumulate=True)
        torch.zeros(100, device="cuda").put_(i, torch.zeros(500, device="cuda"), True)

    def embed(sparse):
        for mode in ("sum", "mean", *([] if sparse else ["max"])):
            bag = nn.EmbeddingBag(100, 8, mode=mode, sparse=sparse).cuda()
            offsets = torch.arange(0, 50, 5, device="cuda")
            backward(bag(torch.randint(0, 100, (50,), device="cuda"), offsets))
        table = nn.Embedding(100, 8, sparse=sparse).cuda()
        backward(table(torch.randint(0, 100, (5, 2000), device="cuda")))
        if sparse:
            torch.optim.SparseAdam(table.parameters()).step()

    def positive(n=4):
        return draw(n).abs() + 1

    attempt({
        "generators": generators,
        "dropout": lambda: backward(nn.functional.dropout(draw(100, 100), 0.1)),
        "multinomial": lambda: torch.multinomial(draw(4, 100).softmax(1).detach(), 10),
        "multinomial, replacing": lambda: torch.multinomial(draw(4, 100).softmax(1).detach(), 10, replacement=True),
        "multinomial, drawn": lambda: torch.multinomial(torch.rand(4, 100, device="cuda"), 10),
        "randperm": lambda: [torch.randperm(n, device="cuda") for n in (100, 100000)],
        "normal": lambda: distributions.Normal(draw(4), nn.functional.softplus(draw(4))).log_prob(draw(4)),
        "categorical": lambda: distributions.Categorical(draw(4, 6).softmax(1)).sample(),
        "gamma": lambda: backward(distributions.Gamma(positive(), positive()).rsample()),
        "dirichlet": lambda: backward(distributions.Dirichlet(positive()).rsample()),
        "sort": lambda: (backward(draw(3, 5000).sort()[0]), draw(2000000).sort(), draw(100, 3).argsort(0)),
        "topk": lambda: (backward(draw(3, 5000).topk(50)[0]), draw(2000000).topk(1000)),
        "median and mode": lambda: (backward(draw(3, 5000).median(1)[0]), draw(3, 5000).mode(1), draw(9).kthvalue(3)),
        "unique": lambda: (draw(100).unique(return_inverse=True, return_counts=True), draw(9).unique_consecutive()),
        "scans": lambda: backward(draw(3, 5000).cumsum(1), draw(3, 5000).cumprod(1), draw(3, 500).cummax(1)[0]),
        "nonzero": lambda: (draw(100).nonzero(), torch.masked_select(draw(10), draw(10) > 0)),
        "index": index,
        "embedding": lambda: embed(False),
        "sparse embedding": lambda: embed(True),
        "repeat_interleave": lambda: torch.repeat_interleave(draw(10), torch.full((10,), 3, device="cuda")),
        "segment_reduce": lambda: torch.segment_reduce(
            draw(10).detach(), "sum", lengths=torch.tensor([5, 5], device="cuda")),
    })  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [recurrent, normalisation_and_attention, fourier, dense_algebra, sparse_algebra, random_and_indexing],
    ids=lambda body: body.__name__,
)
def test_every_call_runs(measure: Measure, body: Callable[[], None]) -> None:
    """Under observation no call raises, and no workspace is counted as 0 without a word."""
    found = measure(body, uses=(attempt, backward, draw), gpu="h100-sxm")
    assert (found.ended, found.exit_code) == ("finished", 0), found.notes
    assert not any("is not public" in note for note in found.notes if "geam2" not in note), found.notes


def test_reserve_space_as_published(child: Child) -> None:
    """PyTorch issue 2895, on a P100: 4 layers of 320, 250 steps of 100 sequences of 123 features."""

    def body():
        import torch

        found = {}
        for kind in ("LSTM", "GRU"):
            net = getattr(torch.nn, kind)(123, 320, 4).cuda()
            net.flatten_parameters()
            x = torch.zeros(250, 100, 123, device="cuda")
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y, state = net(x)
            held = torch.cuda.memory_allocated()
            found[kind] = [held - before - 4 * y.numel(), torch.cuda.max_memory_allocated() - held]
            del y, state, net
        return found

    def rounded(size: int) -> int:
        return -(-size // 512) * 512

    states = 4 * 100 * 320 * 4
    published = {"LSTM": (736_000_000, 17_730_560, 4), "GRU": (864_000_000, 13_169_920, 2)}
    for kind, (kept, scratch) in child(body, gpu="t4").items():
        reserve, workspace, count = published[kind]
        assert scratch == rounded(workspace), kind
        assert 0 <= kept - reserve <= count * states + 2**20, kind


@pytest.mark.parametrize("shape", [(512, 512), (32, 512, 512), (100, 1500)])
def test_work_area_as_published(measure: Measure, shape: tuple[int, ...]) -> None:
    """cuFFT takes one copy of the complex data (CUDA.jl issue 894, arrayfire issue 1443), eight at most."""

    def transform(shape):
        import torch

        torch.fft.fftn(torch.zeros(*shape, dtype=torch.complex64, device="cuda"))

    found = measure(transform, shape)
    size = 8
    for length in shape:
        size *= length
    assert 3 * size <= found.peak.allocated_bytes < 3 * size + 2**20  # input, output, work area
    (work,) = (item for item in found.ranges if item.what == "cuFFT workspace")
    assert (work.low_bytes, work.high_bytes) == (0, 7 * size)


def test_nonzeros_of_results_are_told(measure: Measure) -> None:
    """A product and a sum have as many nonzeros as they can have if these lie evenly; the report lists both."""

    def combine():
        import torch

        size = 4096
        rows = torch.arange(size + 1, device="cuda") * 2
        columns = torch.arange(2 * size, device="cuda") // 2
        a = torch.sparse_csr_tensor(rows, columns, torch.ones(2 * size, device="cuda"), (size, size))
        assert (a @ a)._nnz() == 4 * size
        assert (a + a * 2)._nnz() == 4 * size  # a + a is a shortcut

    found = measure(combine)
    assert (found.ended, found.exit_code) == ("finished", 0), found.notes
    told = {read.operation: read.affects_memory for read in found.value_reads}
    assert told["cusparseSpGEMM (nonzeros of the product)"] is True
    assert told["cusparseXcsrgeam2Nnz (nonzeros of the sum)"] is True
    assert {"cuSPARSE product workspace"} <= {item.what for item in found.ranges}


def test_coalescing_counts_known_indices(measure: Measure) -> None:
    """Equal indices fall together where they are known; else one is left or all, and the report has the range."""

    def coalesce():
        import torch

        indices = torch.tensor([[0, 0, 1, 1, 0], [2, 2, 0, 0, 1]], device="cuda")
        values = torch.randn(5, 3, device="cuda")
        assert torch.sparse_coo_tensor(indices, values, (2, 3, 3)).coalesce()._nnz() == 3
        unknown = torch.randn(2, 5, device="cuda").argsort(1)
        assert torch.sparse_coo_tensor(unknown, values, (5, 5, 3)).coalesce()._nnz() in (1, 5)

    found = measure(coalesce)
    assert (found.ended, found.exit_code) == ("finished", 0), found.notes
    reads = [read for read in found.value_reads if "coalesce" in read.operation]
    assert [(read.count, read.affects_memory, read.least, read.most) for read in reads] == [(1, True, 1, 5)]


def test_semi_structured_weights(child: Child) -> None:
    """A 2:4 sparse matrix takes 9/16 of a dense one: half of the values and two bits for each."""

    def body():
        import torch
        from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

        SparseSemiStructuredTensor._FORCE_CUTLASS = False
        pattern = torch.tensor([0, 0, 1, 1], dtype=torch.float16, device="cuda").tile((1024, 1024))
        before = torch.cuda.memory_allocated()
        sparse = to_sparse_semi_structured(pattern)
        held = torch.cuda.memory_allocated() - before
        y = torch.mm(sparse, torch.zeros(4096, 64, dtype=torch.float16, device="cuda"))
        return [held, 2 * pattern.numel(), list(y.shape)]

    held, dense, shape = child(body, gpu="a100-40gb")
    assert held == dense * 9 // 16
    assert shape == [1024, 64]


def test_the_exponential_takes_the_longest_way(child: Child) -> None:
    """Norms are not known: matrix_exp is measured with the approximation of the highest degree, a batch like one."""

    def body():
        import torch

        found = []
        for batch in ((), (1,), (4,)):
            x = torch.randn(*batch, 256, 256, device="cuda")
            x @ x
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.linalg.matrix_exp(x)
            found.append((torch.cuda.max_memory_allocated() - before) / (4 * x.numel()))
        return found

    one, single, four = child(body, observe=True)
    assert one >= 9  # powers and partial sums of degree 18
    assert one == single
    assert abs(four - one) < 3


def test_splits_of_a_communicator_are_nccls(child: Child) -> None:
    """Only color -1 leaves a rank out, and no communicator at all is refused: torch 2.4 relies on both."""

    def body():
        import ctypes

        import torch

        torch.zeros(1, device="cuda")
        nccl = ctypes.CDLL("libnccl.so.2")

        class Id(ctypes.Structure):
            _fields_ = [("text", ctypes.c_char * 128)]

        name, whole, rank = Id(), ctypes.c_void_p(), ctypes.c_int(-7)
        nccl.ncclGetUniqueId(ctypes.byref(name))
        nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
        nccl.ncclCommInitRank(ctypes.byref(whole), 4, name, 2)
        made = []
        for color in (-1, -5, 3):
            part = ctypes.c_void_p()
            made.append([nccl.ncclCommSplit(whole, color, 2, ctypes.byref(part), None), bool(part)])
        asked = [nccl.ncclCommUserRank(c, ctypes.byref(rank)) for c in (None, whole)]
        summed = nccl.ncclAllReduce(None, None, 1, 7, 0, None, None)
        return [made, asked, rank.value, nccl.ncclCommDestroy(None), summed]

    assert child(body) == [[[0, False], [0, True], [0, True]], [4, 0], 2, 0, 4]
