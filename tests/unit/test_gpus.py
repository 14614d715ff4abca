"""Laws of the GPU catalogue, of its look-up and of users' GPU files."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

import oomproof.gpus
from oomproof.errors import UnknownGPUError, UsageError
from oomproof.gpus import GPUSpec, all_gpus, default_gpu, get_gpu, load_gpu_file, with_memory
from oomproof.gpus.catalogue import SOURCE_GROUPS, capabilities
from oomproof.gpus.context import estimate_context_bytes
from oomproof.gpus.spec import DTYPES
from oomproof.units import GIB, MIB

SPECS = all_gpus()
BOARDS = [spec for spec in SPECS if not spec.mig]
SLICES = [spec for spec in SPECS if spec.mig]

# GiB of "total capacity" in published out-of-memory messages and properties, with the size on the box.
PUBLIC_TOTALS = {
    "p100-16gb": (15.90, 16),
    "v100-16gb": (15.77, 16),
    "v100-32gb": (31.73, 32),
    "t4": (14.56, 16),
    "rtx-2080-ti": (10.76, 11),
    "rtx-3060": (11.76, 12),
    "rtx-3080-10gb": (9.78, 10),
    "rtx-3090": (23.69, 24),
    "rtx-4060": (7.67, 8),
    "rtx-4070": (11.62, 12),
    "rtx-4080": (15.67, 16),
    "rtx-4090": (23.64, 24),
    "rtx-5090": (31.36, 32),
    "a10g": (22.06, 24),
    "a30": (23.60, 24),
    "a40": (44.34, 48),
    "a100-40gb": (39.39, 40),
    "a100-80gb": (79.25, 80),
    "a100-pcie-80gb": (79.25, 80),
    "a6000": (47.54, 48),
    "l4": (22.03, 24),
    "l40s": (44.39, 48),
    "rtx-6000-ada": (47.37, 48),
    "rtx-pro-6000": (94.97, 96),
    "h100-pcie-80gb": (79.11, 80),
    "h100-80gb": (79.18, 80),
    "h200-141gb": (139.80, 141),
    "gh200-96gb": (95.00, 96),
    "gh200-144gb": (142.81, 144),
    "b200-180gb": (178.35, 180),
    "b300-288gb": (267.69, 288),
    "a100-40gb-mig-1g.5gb": (4.75, 5),
    "a100-80gb-mig-1g.10gb": (9.50, 10),
    "a100-80gb-mig-2g.20gb": (19.50, 20),
    "h100-80gb-mig-1g.10gb": (9.75, 10),
    "h100-80gb-mig-3g.40gb": (39.38, 40),
    "h200-141gb-mig-1g.18gb": (16.00, 18),
    "h200-141gb-mig-2g.35gb": (32.50, 35),
}

# How many slices of each profile one board can hold (NVIDIA MIG User Guide).
MIG_INSTANCES = {
    "a100-40gb": {"1g.5gb": 7, "1g.10gb": 4, "2g.10gb": 3, "3g.20gb": 2, "4g.20gb": 1, "7g.40gb": 1},
    "a100-80gb": {"1g.10gb": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1},
    "h100-80gb": {"1g.10gb": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1},
    "h200-141gb": {"1g.18gb": 7, "1g.35gb": 4, "2g.35gb": 3, "3g.71gb": 2, "4g.71gb": 1, "7g.141gb": 1},
}

MINIMAL = """
name = "My GPU"
memory_bytes = "20GiB"
compute_capability = "8.6"
sm_count = 50
l2_bytes = "4MiB"
clock_khz = 1_500_000
memory_clock_khz = 7_001_000
memory_bus_bits = 256
memory_bandwidth_bytes_per_s = "448GB/s"
flops = { fp32 = 15e12, bf16 = 60e12 }
pcie_bytes_per_s = 31.5e9
"""


def by_key(spec: GPUSpec) -> str:
    return spec.key


@pytest.fixture
def gpu_file(tmp_path: Path):
    def write(text: str, name: str = "mine.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


class TestCatalogue:
    @pytest.mark.parametrize(("key", "gib"), [(key, gib) for key, (gib, _) in PUBLIC_TOTALS.items()])
    def test_memory_is_the_published_total(self, key: str, gib: float) -> None:
        """The total is the one that PyTorch's messages show, to 0.01 GiB."""
        assert get_gpu(key).memory_bytes / GIB == pytest.approx(gib, abs=0.01)

    @pytest.mark.parametrize(("key", "box"), [(key, box) for key, (_, box) in PUBLIC_TOTALS.items()])
    def test_memory_is_below_the_size_on_the_box(self, key: str, box: int) -> None:
        """No card has more memory than it is sold with, and none loses more than a tenth of it."""
        assert 0.88 * box * GIB <= get_gpu(key).memory_bytes <= box * GIB

    @pytest.mark.parametrize("spec", SPECS, ids=by_key)
    def test_every_figure_has_a_source(self, spec: GPUSpec) -> None:
        """Every figure, also one that does not exist, says where it comes from; no source is left over."""
        figures = {field.name for field in fields(GPUSpec)} - {"key", "aliases", "mig", "sources"}
        assert set(spec.sources) == figures
        assert all(len(text) > 4 and "{" not in text for text in spec.sources.values())

    @pytest.mark.parametrize("spec", SPECS, ids=by_key)
    def test_a_missing_figure_has_a_reason(self, spec: GPUSpec) -> None:
        """None stands only where the source says that there is no such thing, or that nobody published it."""
        for name in ("nvml_memory_bytes", "link_bytes_per_s"):
            if getattr(spec, name) is None:
                assert any(word in spec.sources[name] for word in ("unknown", "no NVLink", "without NVLink"))

    @pytest.mark.parametrize("spec", SPECS, ids=by_key)
    def test_bandwidth_is_bus_times_clock(self, spec: GPUSpec) -> None:
        """Bandwidth is twice the memory clock times the bus, to the 3 % by which data sheets round."""
        product = 2 * spec.memory_clock_khz * 1000 * spec.memory_bus_bits / 8
        assert product == pytest.approx(spec.memory_bandwidth_bytes_per_s, rel=0.03)

    @pytest.mark.parametrize("spec", BOARDS, ids=by_key)
    def test_fp32_peak_is_cores_times_clock(self, spec: GPUSpec) -> None:
        """The fp32 peak is two operations a core and cycle, to the 13 % by which boost clocks differ."""
        cores = 64 if spec.compute_capability in {(6, 0), (7, 0), (7, 5), (8, 0)} else 128
        product = 2 * cores * spec.sm_count * spec.clock_khz * 1000
        assert spec.flops["fp32"] == pytest.approx(product, rel=0.13)

    @pytest.mark.parametrize("spec", SPECS, ids=by_key)
    def test_flops_grow_as_precision_falls(self, spec: GPUSpec) -> None:
        """No dtype is slower than a wider one of the same kind, and all of them have known names."""
        assert set(spec.flops) <= set(DTYPES)
        floats = [spec.flops[dtype] for dtype in ("fp32", "tf32", "fp16", "fp8") if dtype in spec.flops]
        assert floats == sorted(floats)
        assert spec.flops.get("bf16", spec.flops["fp16"]) == spec.flops["fp16"]

    @pytest.mark.parametrize("spec", SPECS, ids=by_key)
    def test_dtypes_follow_the_capability(self, spec: GPUSpec) -> None:
        """bf16 and tf32 exist from 8.0 on, fp8 from 8.9 on."""
        assert ("bf16" in spec.flops) == ("tf32" in spec.flops) == (spec.compute_capability >= (8, 0))
        assert ("fp8" in spec.flops) == (spec.compute_capability >= (8, 9))

    @pytest.mark.parametrize("spec", SPECS, ids=by_key)
    def test_the_parts_fit_together(self, spec: GPUSpec) -> None:
        """PyTorch sees no more than nvidia-smi, a context leaves room, a block gets at most its SM's."""
        assert spec.nvml_memory_bytes is None or spec.memory_bytes <= spec.nvml_memory_bytes
        low, typical, high = spec.context_bytes
        assert 0 < low <= typical <= high < spec.memory_bytes // 5
        assert spec.shared_memory_per_block_bytes <= spec.shared_memory_per_block_optin_bytes
        reserved = spec.reserved_shared_memory_per_block_bytes
        assert spec.shared_memory_per_block_optin_bytes + reserved <= spec.shared_memory_per_sm_bytes

    def test_capability_limits_come_from_one_table(self) -> None:
        """Cards of one capability share its limits; the values are those of the CUDA programming guide."""
        for spec in SPECS:
            for name, value in capabilities()[spec.compute_capability].items():
                assert getattr(spec, name) == value
        t4, a100, rtx4090 = get_gpu("t4"), get_gpu("a100"), get_gpu("4090")
        assert (t4.max_threads_per_sm, t4.max_blocks_per_sm, t4.shared_memory_per_sm_bytes) == (
            1024,
            16,
            65536,
        )
        assert (a100.max_threads_per_sm, a100.shared_memory_per_block_optin_bytes) == (2048, 163 * 1024)
        assert (rtx4090.max_blocks_per_sm, rtx4090.shared_memory_per_block_optin_bytes) == (24, 99 * 1024)
        assert (t4.reserved_shared_memory_per_block_bytes, a100.reserved_shared_memory_per_block_bytes) == (
            0,
            1024,
        )

    @pytest.mark.parametrize("spec", SLICES, ids=by_key)
    def test_slices_fit_on_their_board(self, spec: GPUSpec) -> None:
        """As many slices as a board can hold have no more of anything than the board."""
        board_key, _, profile = spec.key.partition("-mig-")
        board, count = get_gpu(board_key), MIG_INSTANCES[board_key][profile]
        for name in (
            "memory_bytes",
            "sm_count",
            "l2_bytes",
            "memory_bandwidth_bytes_per_s",
            "memory_bus_bits",
        ):
            assert count * getattr(spec, name) <= getattr(board, name), name
        assert count * spec.flops["fp16"] <= board.flops["fp16"] * 1.000001
        assert spec.name == f"{board.name} MIG {profile}"
        assert spec.link_bytes_per_s is None

    def test_every_mig_profile_is_there(self) -> None:
        """The A100, H100 and H200 have all the slices of the MIG guide, with their SMs."""
        assert {spec.key for spec in SLICES} == {
            f"{board}-mig-{profile}" for board, profiles in MIG_INSTANCES.items() for profile in profiles
        }
        assert get_gpu("a100-40gb-mig-1g.5gb").sm_count == 14
        assert get_gpu("h100-80gb-mig-1g.10gb").sm_count == 16
        assert get_gpu("h100-80gb-mig-3g.40gb").sm_count == 60

    def test_a_slice_is_as_deviceQuery_saw_it(self) -> None:
        """A published run on a 1g.10gb slice of an A100 80GB: 14 SMs, 640 bits, 5 MiB of L2, 9,728 MiB."""
        spec = get_gpu("a100-80gb-mig-1g.10gb")
        assert (spec.sm_count, spec.memory_bus_bits, spec.l2_bytes) == (14, 640, 5 * MIB)
        assert spec.memory_bytes == 9728 * MIB

    @pytest.mark.parametrize(
        ("key", "bare_mib"),
        [
            ("rtx-5060-ti-16gb", 128),
            ("rtx-3090", 256),
            ("rtx-4090", 386),
            ("rtx-4090", 392),
            ("rtx-6000-ada", 426),
            ("a100-40gb", 418),
            ("h100-80gb", 595),
            ("b200-180gb", 612),
        ],
    )
    def test_published_bare_contexts_lie_in_the_range(self, key: str, bare_mib: int) -> None:
        """What public reports have lies between low and high, and within 15 % of the formula."""
        spec = get_gpu(key)
        assert spec.context_bytes[0] <= bare_mib * MIB <= spec.context_bytes[2]
        bare = estimate_context_bytes(spec.sm_count, spec.max_threads_per_sm)[1] - 70 * MIB
        assert bare == pytest.approx(bare_mib * MIB, rel=0.15)

    def test_measured_contexts_are_kept(self) -> None:
        """The T4's context is the measured one to the byte; the others are what training showed."""
        assert get_gpu("t4").context_bytes[1] == 141_426_688
        assert 478 * MIB <= get_gpu("4090").context_bytes[1] <= 484 * MIB
        assert 660 * MIB <= get_gpu("rtx-pro-6000").context_bytes[1] <= 668 * MIB

    def test_specs_can_be_handed_on(self) -> None:
        """A spec can be hashed, copied, pickled, compared and turned into a dict, but not changed."""
        spec = get_gpu("t4")
        assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
        assert len({*SPECS, *copy.deepcopy(SPECS)}) == len(SPECS)
        assert GPUSpec(**asdict(spec)) == spec
        with pytest.raises(AttributeError):
            spec.sm_count = 1  # type: ignore[misc]

    def test_importing_reads_no_catalogue_and_no_torch(self) -> None:
        """The import is lazy, and reading the catalogue takes neither torch nor more than a moment."""
        code = (
            "import sys, time, oomproof.gpus as g\n"
            "from oomproof.gpus import catalogue\n"
            "assert not catalogue._data.cache_info().currsize, 'read on import'\n"
            "best = 1e9\n"
            "for _ in range(5):\n"
            "    for cached in (catalogue._data, g.all_gpus, catalogue.capabilities):\n"
            "        cached.cache_clear()\n"
            "    start = time.process_time(); g.all_gpus(); best = min(best, time.process_time() - start)\n"
            "assert 'torch' not in sys.modules\n"
            "print(best)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert float(done.stdout) < 0.1  # 0.01 s on a usual machine; the limit is for a busy one

    def test_the_api_is_complete(self) -> None:
        """The package exports its public names, sorted, each with a docstring."""
        assert sorted(oomproof.gpus.__all__) == oomproof.gpus.__all__
        assert all(getattr(oomproof.gpus, name).__doc__ for name in oomproof.gpus.__all__)

    def test_source_groups_cover_each_field_once(self) -> None:
        """No field of the catalogue file belongs to two groups of sources."""
        assert max(Counter(name for names in SOURCE_GROUPS.values() for name in names).values()) == 1


class TestLookUp:
    @pytest.mark.parametrize("spec", SPECS, ids=by_key)
    def test_every_key_and_alias_finds_its_gpu(self, spec: GPUSpec) -> None:
        """Keys and aliases are unique."""
        for name in (spec.key, *spec.aliases):
            assert get_gpu(name) is spec

    @pytest.mark.parametrize("spec", SPECS, ids=by_key)
    def test_the_drivers_name_finds_the_smallest_card_of_that_name(self, spec: GPUSpec) -> None:
        """What get_device_name() prints can be pasted; cards that share a name give the smallest."""
        found = get_gpu(spec.name)
        assert found.name == spec.name
        assert found.memory_bytes == min(other.memory_bytes for other in SPECS if other.name == spec.name)

    @pytest.mark.parametrize(
        ("name", "key"),
        [
            ("A100 40GB", "a100-40gb"),
            ("nvidia a100-sxm4-40gb", "a100-40gb"),
            ("a100_80gb", "a100-80gb"),
            ("rtx4090", "rtx-4090"),
            ("RTX 4090", "rtx-4090"),
            ("4090", "rtx-4090"),
            ("GeForce RTX 3080 12GB", "rtx-3080-12gb"),
            ("4060 Ti 16GB", "rtx-4060-ti-16gb"),
            ("  Tesla   T4 ", "t4"),
            ("RTX A6000", "a6000"),
            ("rtx 6000 ada", "rtx-6000-ada"),
            ("RTX PRO 6000", "rtx-pro-6000"),
            ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-40gb-mig-1g.5gb"),
            ("a100 40gb mig 1g.5gb", "a100-40gb-mig-1g.5gb"),
            ("GH200", "gh200-96gb"),
        ],
    )
    def test_spelling_does_not_matter(self, name: str, key: str) -> None:
        """Case, blanks, dashes, underscores and vendor words do not matter."""
        assert get_gpu(name).key == key

    @pytest.mark.parametrize(
        ("name", "key"),
        [
            ("a100", "a100-40gb"),
            ("v100", "v100-16gb"),
            ("h100", "h100-80gb"),
            ("h200", "h200-141gb"),
            ("b200", "b200-180gb"),
            ("3080", "rtx-3080-10gb"),
            ("4060 ti", "rtx-4060-ti-8gb"),
            ("gh200", "gh200-96gb"),
        ],
    )
    def test_a_name_without_size_means_the_smallest(self, name: str, key: str) -> None:
        """Without a size the smallest card is meant: what fits there fits on the larger ones."""
        assert get_gpu(name).key == key

    def test_the_default_is_in_the_catalogue(self) -> None:
        """The default GPU is a whole one that scripts of most sizes fit on."""
        assert default_gpu().key == "h100-80gb"
        assert not default_gpu().mig

    @pytest.mark.parametrize(
        ("wrong", "near"),
        [
            ("a100-60", "a100-40gb"),
            ("5095", "rtx-5090"),
            ("h10", "h100-80gb"),
            ("rtx 4090 laptop gpu", "rtx-4090"),
            ("a100 mig 1g.5gb", "a100-40gb-mig-1g.5gb"),
            ("6000", "rtx-6000-ada"),
        ],
    )
    def test_a_wrong_name_suggests_the_nearest(self, wrong: str, near: str) -> None:
        """The error quotes the name, suggests real ones and names the command that lists them."""
        with pytest.raises(UnknownGPUError) as caught:
            get_gpu(wrong)
        assert repr(wrong) in str(caught.value)
        assert near in str(caught.value)
        assert "oomproof gpus" in str(caught.value)
        assert caught.value.exit_code == 64

    @pytest.mark.parametrize("wrong", ["", "   ", "nvidia", "???", "mi300x", "x" * 10_000])
    def test_a_hopeless_name_still_gets_the_cure(self, wrong: str) -> None:
        """Nothing near: the error still names the command that lists all GPUs."""
        with pytest.raises(UnknownGPUError, match="oomproof gpus"):
            get_gpu(wrong)


class TestGPUFile:
    def test_a_base_gives_what_the_file_leaves_out(self, gpu_file) -> None:
        """Figures of the base stay, given ones win, and the sources say which is which."""
        base = get_gpu("a100-40gb")
        spec = load_gpu_file(gpu_file('base = "A100 40GB"\nname = "Mine"\nmemory_bytes = "20GiB"\n'))
        changed = {"key", "name", "aliases", "memory_bytes", "nvml_memory_bytes", "sources"}
        assert (spec.key, spec.name, spec.memory_bytes, spec.nvml_memory_bytes) == (
            "mine",
            "Mine",
            20 * GIB,
            None,
        )
        for field in fields(GPUSpec):
            if field.name not in changed:
                assert getattr(spec, field.name) == getattr(base, field.name), field.name
        assert spec.sources["memory_bytes"] == "GPU file mine.toml"
        assert spec.sources["l2_bytes"] == base.sources["l2_bytes"]
        assert set(spec.sources) == set(base.sources)

    def test_a_whole_gpu_needs_no_base(self, gpu_file) -> None:
        """A file with the required figures is enough; limits and context follow from capability and SMs."""
        spec = load_gpu_file(gpu_file(MINIMAL))
        assert spec.memory_bytes == 20 * GIB
        assert spec.memory_bandwidth_bytes_per_s == 448 * 10**9
        assert (spec.max_threads_per_sm, spec.max_blocks_per_sm) == (1536, 16)
        assert spec.context_bytes == estimate_context_bytes(50, 1536)
        assert spec.link_bytes_per_s is None
        assert set(spec.sources) == set(get_gpu("t4").sources)

    def test_what_depends_on_a_given_figure_follows(self, gpu_file) -> None:
        """Another capability or SM count brings its own limits and context; a given context stays."""
        spec = load_gpu_file(gpu_file('base = "t4"\ncompute_capability = 8.9\nsm_count = 20\n'))
        assert (spec.max_threads_per_sm, spec.shared_memory_per_sm_bytes) == (1536, 102400)
        assert spec.context_bytes == estimate_context_bytes(20, 1536)
        text = 'base = "t4"\nsm_count = 20\ncontext_bytes = ["100MiB", "110MiB", "120MiB"]\n'
        assert load_gpu_file(gpu_file(text)).context_bytes == (100 * MIB, 110 * MIB, 120 * MIB)

    def test_sizes_and_capabilities_have_several_spellings(self, gpu_file) -> None:
        """Sizes are bytes or text, capabilities text, a number or a pair; 0 means no NVLink."""
        for memory in ("21474836480", '"20GiB"', '"20480 MiB"'):
            for capability in ('"8.9"', "8.9", "[8, 9]"):
                text = f"memory_bytes = {memory}\ncompute_capability = {capability}\nlink_bytes_per_s = 0"
                spec = load_gpu_file(gpu_file(f'base = "h100"\n{text}'))
                assert (spec.memory_bytes, spec.compute_capability) == (20 * GIB, (8, 9))
                assert spec.link_bytes_per_s is None

    def test_all_faults_come_at_once(self, gpu_file) -> None:
        """One error lists every fault of the file, each with its cure."""
        with pytest.raises(UsageError) as caught:
            load_gpu_file(
                gpu_file(
                    'base = "a100-60"\nmemroy_bytes = 5\nmemory_bytes = "lots"\nsm_count = -1\n'
                    'compute_capability = "3.5"\nflops = { fp4 = 1e12 }\n'
                    'context_bytes = [3, 2, 1]\nmig = "yes"\n'
                )
            )
        message = str(caught.value)
        assert "has 8 faults" in message
        assert message.count("\n  - ") == 8
        for cure in (
            "did you mean a100-40gb",
            "did you mean memory_bytes",
            "write it like 20GiB",
            "write a whole number above zero",
            "use one of 6.0",
            "use fp64, fp32",
            "the smallest first",
            "write one of them, without quotes",
        ):
            assert cure in message

    @pytest.mark.parametrize(
        ("text", "cure"),
        [
            ('name = "x"\n', "or start from the catalogue with base"),
            ("base = 5\n", 'write it like base = "a100-40gb"'),
            ('base = "t4"\nname = ""\n', "write at most 200 characters"),
            ('base = "t4"\nname = "a\\nb"\n', "write at most 200 characters"),
            ('base = "t4"\nname = 5\n', "write at most 200 characters"),
            ('base = "t4"\naliases = "x"\n', 'write it like ["mine", "my-card"]'),
            ('base = "t4"\nmemory_bytes = 0\n', 'write it like "20GiB"'),
            ('base = "t4"\nmemory_bytes = true\n', 'write it like "20GiB"'),
            ('base = "t4"\nmemory_bytes = 1.5\n', 'write it like "20GiB"'),
            ('base = "t4"\nmemory_bytes = "' + "9" * 400 + 'GiB"\n', "the number is too large"),
            ('base = "t4"\nmemory_bytes = 99999999999999999999999\n', 'write it like "20GiB"'),
            ('base = "t4"\nmemory_bytes = "100MiB"\n', "raise memory_bytes"),
            ('base = "t4"\nmemory_bytes = "15GiB"\nnvml_memory_bytes = "14GiB"\n', "swap them"),
            ('base = "t4"\nsm_count = 1.5\n', "write a whole number above zero"),
            ('base = "t4"\ncompute_capability = "sm_89"\n', 'write it like "8.9"'),
            ('base = "t4"\ncompute_capability = [8, 9, 1]\n', 'write it like "8.9"'),
            ('base = "t4"\npcie_bytes_per_s = "fast"\n', 'write it like "1555GB/s"'),
            ('base = "t4"\npcie_bytes_per_s = nan\n', 'write it like "1555GB/s"'),
            ('base = "t4"\nflops = {}\n', "write it like { fp32"),
            ('base = "t4"\nflops = { fp32 = "fast" }\n', "write FLOP/s like 19.5e12"),
            ('base = "t4"\nflops = { fp32 = inf }\n', "write FLOP/s like 19.5e12"),
            ('base = "t4"\ncontext_bytes = ["1GiB"]\n', "write low, typical and high"),
            ('base = "t4"\nshared_memory_per_block_optin_bytes = "1MiB"\n', "lower it"),
            ('base = "t4"\nsources = 5\n', "write it like { memory_bytes"),
            ('base = "t4"\nsources = { memmory_bytes = "x" }\n', "did you mean memory_bytes"),
            ('base = "t4"\nkey = "x"\n', "key is no field of a GPU; "),
            ("base = \n", "see https://toml.io"),
            ("a = " + "[" * 20_000, "see https://toml.io"),
            ("#" * 70_000, "is it a GPU file?"),
        ],
    )
    def test_a_fault_names_its_cure(self, gpu_file, text: str, cure: str) -> None:
        """A bad file is one UsageError with the cure, never another exception."""
        with pytest.raises(UsageError) as caught:
            load_gpu_file(gpu_file(text))
        assert cure in str(caught.value)
        assert "mine.toml" in str(caught.value)

    def test_unreadable_files_name_their_cure(self, tmp_path: Path) -> None:
        """A missing file, a folder and bytes that are no text are usage errors too."""
        with pytest.raises(UsageError, match="check the path"):
            load_gpu_file(tmp_path / "none.toml")
        with pytest.raises(UsageError, match="check the path"):
            load_gpu_file(tmp_path)
        (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UsageError, match="UTF-8"):
            load_gpu_file(str(tmp_path / "bytes.toml"))

    def test_the_example_of_the_documentation_loads(self, gpu_file) -> None:
        """The GPU files that docs/gpus.md shows are good ones."""
        page = Path(__file__).parents[2].joinpath("docs", "gpus.md").read_text("utf-8")
        examples = page.split("```toml\n")[1:]
        assert len(examples) >= 2
        for example in examples:
            assert load_gpu_file(gpu_file(example.partition("```")[0])).memory_bytes > 0


class TestWithMemory:
    def test_only_the_memory_changes(self) -> None:
        """Everything but the memory stays; the name says what it is now, nvidia-smi's figure is unknown."""
        base = get_gpu("a100-40gb")
        spec = with_memory(base, 20 * GIB)
        assert spec.name == "NVIDIA A100-SXM4-40GB with 20.00 GiB"
        assert (spec.memory_bytes, spec.nvml_memory_bytes) == (20 * GIB, None)
        assert spec.sources["memory_bytes"] == "set by hand"
        restored = replace(
            spec,
            name=base.name,
            memory_bytes=base.memory_bytes,
            nvml_memory_bytes=base.nvml_memory_bytes,
            sources=base.sources,
        )
        assert restored == base

    @pytest.mark.parametrize("size", [0, -1])
    def test_a_size_must_be_positive(self, size: int) -> None:
        """No memory at all is wrong usage."""
        with pytest.raises(UsageError, match="give a size like 20GiB"):
            with_memory(get_gpu("t4"), size)
