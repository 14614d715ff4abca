"""Compiling the stand-in libraries for one installed torch.

For each NVIDIA library that will not start without a driver: the functions of ``driver/<name>.c`` plus, for every
other function that the real library exports, one that answers "success" and does nothing (``prototypes``), under the
real library's SONAME and symbol versions.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elftools.elf.elffile import ELFFile

import oomproof
from oomproof.errors import BuildError, EnvironmentMissingError
from oomproof.phantom import prototypes
from oomproof.phantom.standins import DEVICE_LIBRARY, DRIVER, MANIFEST, STEMS, library_folders, read_manifest

SOURCES = {stem: stem.removeprefix("lib") + ".c" for stem in STEMS} | {"libnvidia-ml": "nvml.c"}
DEVICE_SOURCES = ("device.c", "kernels.c", "memory.c", "values.c", "exchange.c")
VERSION_MACROS = {
    "OOM_CUBLAS_VERSION": (
        "cublas_api.h",
        r"#define CUBLAS_VER_(?:MAJOR|MINOR|PATCH) (\d+)",
        (10000, 100, 1),
    ),
    "OOM_CUFFT_VERSION": ("cufft.h", r"#define CUFFT_VER_(?:MAJOR|MINOR|PATCH) (\d+)", (1000, 100, 1)),
    "OOM_NCCL_VERSION": ("nccl.h", r"#define NCCL_VERSION_CODE (\d+)", (1,)),
}
FLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")


@dataclass(slots=True)
class Library:
    """One library to replace."""

    stem: str
    soname: str
    versions: dict[str, str] = field(default_factory=dict)  # exported function -> symbol version, "" for none


def find_compiler() -> list[str]:
    """Return the command of a C compiler: ``$CC``, cc, gcc or clang from PATH, else the ziglang package's.

    Raises EnvironmentMissingError when there is none.
    """
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise EnvironmentMissingError(
        "no C compiler for the phantom's stand-in libraries; either install one (apt install gcc, or load your "
        "cluster's gcc module), or without any rights: pip install ziglang"
    )


def build(torch: Path, folder: Path) -> dict[str, object]:
    """Compile the stand-ins for the torch in ``torch`` into ``folder`` and return their manifest.

    Several processes may call this at once: one builds, the others wait and take its result. The folder appears
    whole or not at all. Raises BuildError or EnvironmentMissingError.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.parent / f"{folder.name}.lock", "w")  # noqa: SIM115
    except OSError as error:
        raise EnvironmentMissingError(
            f"the cache folder {folder.parent} cannot be written ({error.strerror}); make room or set OOMPROOF_CACHE"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        manifest = read_manifest(folder)
        if manifest is not None:
            return manifest
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            manifest = _compile_all(torch, scratch)
            shutil.rmtree(folder, ignore_errors=True)
            scratch.rename(folder)
        except OSError as error:
            raise EnvironmentMissingError(
                f"the stand-ins could not be written to {folder.parent} ({error.strerror}); make room or set "
                "OOMPROOF_CACHE to a folder that has some"
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return manifest


def _compile_all(torch: Path, scratch: Path) -> dict[str, object]:
    compiler = find_compiler()
    includes = include_folders(torch)
    work = scratch / "work"
    work.mkdir()
    device = scratch / DEVICE_LIBRARY
    _run(
        [
            *compiler,
            *FLAGS,
            "-shared",
            f"-Wl,-soname,{DEVICE_LIBRARY}",
            *(str(DRIVER / name) for name in DEVICE_SOURCES),
            "-o",
            str(device),
            "-lpthread",
        ]
    )
    macros = [f"-D{name}={_header_version(includes, *rule)}" for name, rule in VERSION_MACROS.items()]
    options = [*macros, f"-I{DRIVER}", *(f"-I{folder}" for folder in includes)]
    libraries = find_libraries(torch, includes)
    idle: dict[str, list[str]] = {}
    loaded: list[str] = []
    for library in libraries:
        objects: list[str] = []
        own: set[str] = set()
        source = DRIVER / SOURCES[library.stem]
        if source.exists():
            target = work / f"{library.stem}.o"
            _run([*compiler, *FLAGS, *options, "-c", str(source), "-o", str(target)])
            own = defined_functions(target)
            objects.append(str(target))
        aliases = per_thread_aliases(library.versions, own)
        rest = sorted(set(library.versions) - own - set(aliases))
        stubs = work / f"{library.stem}_rest.c"
        headers = "".join(_read_header(includes, name) for name in prototypes.HEADERS.get(library.stem, ()))
        stubs.write_text(prototypes.source(library.stem, rest, prototypes.parse(headers)) + _jumps(aliases))
        target = work / f"{library.stem}_rest.o"
        _run([*compiler, *FLAGS, "-fno-builtin", f"-I{DRIVER}", "-c", str(stubs), "-o", str(target)])
        objects.append(str(target))
        script = work / f"{library.stem}.map"
        script.write_text(_version_script(library, own))
        link = [
            *compiler,
            "-shared",
            f"-Wl,-soname,{library.soname}",
            "-Wl,-rpath,$ORIGIN",
            *objects,
            str(device),
        ]
        if script.read_text():
            link.append(f"-Wl,--version-script,{script}")
        _run([*link, "-o", str(scratch / library.soname), "-lpthread", "-ldl"])
        idle[library.soname] = rest
        loaded.append(library.soname)
    shutil.rmtree(work)
    _driver_links(scratch, loaded)
    manifest: dict[str, object] = {
        "tool": oomproof.__version__,
        "torch": torch.as_posix(),
        "cuda_version": int(_header_version(includes, "cuda.h", r"#define CUDA_VERSION (\d+)", (1,))),
        "load": loaded,
        "files": {name: (scratch / name).stat().st_size for name in [DEVICE_LIBRARY, *loaded]},
        "idle_functions": idle,
    }
    (scratch / MANIFEST).write_text(json.dumps(manifest))
    return manifest


def _jumps(aliases: Mapping[str, str]) -> str:
    """Return C that makes each name go on to another function; in assembly, since not all have known prototypes."""
    lines = ["#ifdef __aarch64__", '#define JUMP(to) "b " to', "#else", '#define JUMP(to) "jmp " to "@PLT"', "#endif"]
    lines += [
        f'__asm__(".text\\n.globl {name}\\n.type {name}, %function\\n{name}: " JUMP("{function}") "\\n");'
        for name, function in sorted(aliases.items())
    ]
    return "\n".join(lines) + "\n" if aliases else ""


def _driver_links(folder: Path, names: Iterable[str]) -> None:
    """Triton links its launcher with ``-lcuda`` from TRITON_LIBCUDA_PATH: give it the plain name too."""
    for name in names:
        if name.startswith("libcuda.so"):
            (folder / "libcuda.so").symlink_to(name)


def include_folders(torch: Path) -> list[Path]:
    """Return the folders with CUDA's headers, those of torch's own wheels first.

    The triton wheel has a complete set for its CUDA version; the runtime wheel lacks ``crt/``. Raises
    EnvironmentMissingError when no CUDA header is found.
    """
    site = torch.parent
    triton = site / "triton" / "backends" / "nvidia" / "include"
    found = [*sorted(site.glob("nvidia/*/include")), triton, Path("/usr/local/cuda/include")]
    folders = [folder for folder in found if folder.is_dir()]
    if not any((folder / "cuda.h").exists() for folder in folders):
        raise EnvironmentMissingError(
            f"no CUDA headers beside {torch}; they come with triton, which torch asks for: pip install triton"
        )
    return [*folders, DRIVER / "fallback"]


def find_libraries(torch: Path, includes: list[Path]) -> list[Library]:
    """Return the libraries to replace with every function they must export.

    The functions are those of the installed real library and those that torch's libraries ask for.
    """
    folders = library_folders(torch)
    needed: dict[str, str] = {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"}
    asked: dict[str, dict[str, str]] = {}
    for path in sorted((torch / "lib").glob("*.so*")):
        with path.open("rb") as file:
            elf = ELFFile(file)
            dynamic = elf.get_section_by_name(".dynamic")
            if dynamic is None:
                continue
            for tag in dynamic.iter_tags("DT_NEEDED"):
                # auditwheel puts a hash in the name of what it bundles: libcusparseLt-f80c68d1.so.0 in torch 2.4
                stem = re.sub(r"-[0-9a-f]{8}$", "", tag.needed.partition(".so")[0])
                if stem in STEMS:
                    needed.setdefault(stem, tag.needed)
            for name, version in _undefined(elf):
                asked.setdefault(version, {})[name] = version
    libraries = []
    for stem in STEMS:
        if stem not in needed:
            continue
        library = Library(stem, needed[stem])
        real = next((f / library.soname for f in folders if (f / library.soname).exists()), None)
        if stem == "libcuda":
            library.versions = dict.fromkeys(_names_in_header(includes, "cuda.h", r"\b(cu[A-Z]\w+)\s*\("), "")
        elif stem == "libnvidia-ml":
            library.versions = dict.fromkeys(_nvml_names(), "")
        elif real is not None:
            library.versions = exported_functions(real)
            if stem == "libcusparseLt":  # before 0.8 it exports the CUDA runtime that is linked into it as well
                library.versions = {n: v for n, v in library.versions.items() if n.startswith("cusparseLt")}
        library.versions.update(asked.get(library.soname, {}))
        libraries.append(library)
    return libraries


def exported_functions(path: Path) -> dict[str, str]:
    """Return the functions that the shared library exports, each with its symbol version ("" for none)."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".dynsym")
        versions = elf.get_section_by_name(".gnu.version")
        definitions = elf.get_section_by_name(".gnu.version_d")
        names: dict[int, str] = {}
        if definitions is not None:
            for definition, auxiliaries in definitions.iter_versions():
                names[definition["vd_ndx"]] = next(iter(auxiliaries)).name
        found = {}
        for index, symbol in enumerate(table.iter_symbols()):
            if symbol["st_shndx"] == "SHN_UNDEF" or symbol["st_info"]["type"] not in (
                "STT_FUNC",
                "STT_GNU_IFUNC",
            ):
                continue
            number = versions.get_symbol(index)["ndx"] if versions is not None else 0
            found[symbol.name] = names.get(number & 0x7FFF, "") if isinstance(number, int) else ""
        return found


def per_thread_aliases(exported: Iterable[str], own: set[str]) -> dict[str, str]:
    """Return function -> the one of ours that it is, for code compiled with ``--default-stream per-thread``.

    That code calls ``cudaMemcpyAsync_ptsz`` for ``cudaMemcpyAsync``; with nothing ever running, streams are alike.
    """
    found = {name: re.sub(r"_pt[ds][sz]$", "", name) for name in exported}
    return {name: function for name, function in found.items() if name != function and function in own}


def defined_functions(path: Path) -> set[str]:
    """Return the global functions that an object file defines."""
    with path.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".symtab")
        return {
            s.name
            for s in table.iter_symbols()
            if s["st_info"]["type"] == "STT_FUNC"
            and s["st_info"]["bind"] == "STB_GLOBAL"
            and s["st_shndx"] != "SHN_UNDEF"
        }


def _undefined(elf: ELFFile) -> Iterable[tuple[str, str]]:
    table = elf.get_section_by_name(".dynsym")
    versions = elf.get_section_by_name(".gnu.version")
    needs = elf.get_section_by_name(".gnu.version_r")
    if table is None or versions is None or needs is None:
        return
    names = {aux["vna_other"]: aux.name for _, auxiliaries in needs.iter_versions() for aux in auxiliaries}
    for index, symbol in enumerate(table.iter_symbols()):
        number = versions.get_symbol(index)["ndx"]
        if symbol["st_shndx"] == "SHN_UNDEF" and isinstance(number, int) and number in names:
            yield symbol.name, names[number]


def _read_header(includes: list[Path], name: str) -> str:
    path = next((folder / name for folder in includes if (folder / name).exists()), None)
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(errors="replace"), flags=re.DOTALL) if path else ""


def _header_version(includes: list[Path], name: str, pattern: str, weights: tuple[int, ...]) -> int:
    figures = re.findall(re.sub(" +", r"\\s+", pattern), _read_header(includes, name))
    return sum(int(figure) * weight for figure, weight in zip(figures, weights, strict=False))


def _names_in_header(includes: list[Path], name: str, pattern: str) -> list[str]:
    text = _read_header(includes, name)
    renamed = re.findall(r"#define\s+cu[A-Z]\w*\s+(cu[A-Z]\w*_v\d+)\b", text)
    names = [n for n in re.findall(pattern, text) if not n.startswith("cuuint")]
    return sorted({*names, *renamed})


def _nvml_names() -> list[str]:
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise EnvironmentMissingError("nvidia-ml-py is not installed beside oomproof; pip install nvidia-ml-py")
    return sorted(set(re.findall(r"[\"'](nvml[A-Z]\w+)[\"']", Path(spec.origin).read_text())))


def _version_script(library: Library, own: set[str]) -> str:
    """Return a linker version script that gives each function the version torch asks for, "" when there are none."""
    nodes: dict[str, list[str]] = {}
    for name, version in library.versions.items():
        if version:
            nodes.setdefault(version, []).append(name)
    if not nodes:
        return ""
    first = next(iter(nodes))
    nodes[first] += sorted(own - set(library.versions))
    return "\n".join(f"{node} {{ global: {' '.join(f'{n};' for n in names)} }};" for node, names in nodes.items())


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(
            f"the phantom's stand-ins did not compile with {command[0]}; report this with what the compiler said:\n"
            f"{' '.join(command)}\n{done.stderr.strip()[-4000:]}"
        )


def main() -> int:
    """Build for ``sys.argv``: the torch folder and the target; write one message to stderr when it fails."""
    try:
        build(Path(sys.argv[1]), Path(sys.argv[2]))
    except (BuildError, EnvironmentMissingError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
