"""From a header's prototypes to the C of functions that do nothing but give a plausible answer.

Functions that create something answer a handle; size queries answer 0 and tell the observer how much it could have
been; error codes in device memory are cleared, as after a success.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

#: Headers whose prototypes are known, by the library's stem.
HEADERS = {
    "libcublas": ("cublas_api.h",),
    "libcufft": ("cufft.h", "cufftXt.h"),
    "libcusolver": ("cusolverDn.h", "cusolverSp.h", "cusolverRf.h"),
    "libcusparse": ("cusparse.h",),
}

NVML_NOT_SUPPORTED = 3

#: What cuSOLVER's size queries can answer is not public. The bound, in copies of the matrix, is what LAPACK documents
#: for the same routine, rounded up: 2 n^2 for the eigenvectors of a symmetric matrix (syevd), 4 n^2 for singular
#: vectors (gesdd), else a block of columns, for which one copy is taken.
SOLVER_COPIES = ((r"syev|heev|syg|heg|geev", 2), (r"gesvd", 4), (r"", 1))
#: ... plus this for each call: a QR of 3 x 3 asks for 768 KiB (JAX's test data of geqrf, 2023).
SOLVER_BYTES = 4 << 20
#: ... plus this for each matrix of a batch, as syevjBatched asks for 1,024 + (n + 1)^2 elements: that is what the
#: figures of cupy issue 7261 give, 2,077 for one matrix of 4 x 4, 3,126 for two, and so on. Its size is answered so.
SOLVER_ELEMENTS = 2048
_JACOBI_BATCH = re.compile(r"cusolverDn[SDCZ](?:sy|he)evjBatched_bufferSize")

_SIZE_QUERY = re.compile(r"[bB]ufferSize|[wW]orkspaceSize")
_ELEMENT_BYTES = {"S": "4", "D": "8", "C": "8", "Z": "16"}
_INTEGERS = {"int": "int32_t", "cusolver_int_t": "int32_t", "int64_t": "int64_t"}


def parse(text: str) -> dict[str, list[str]]:
    """Return function -> parameters as the header writes them; ``text`` is the header without comments."""
    found = {}
    for name, parameters in re.findall(r"\b(cu[a-z]+\w+)\s*\(([^(){};]*)\)\s*;", text):
        found[name] = [" ".join(p.split()) for p in parameters.split(",")]
    return found


def source(stem: str, names: list[str], prototypes: Mapping[str, list[str]]) -> str:
    """Return C for functions that do nothing; where the prototype is known, outputs are set."""
    default = NVML_NOT_SUPPORTED if stem == "libnvidia-ml" else 0
    lines = ['#include "device.h"', '#define API __attribute__((visibility("default")))']
    for name in names:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            continue
        parameters, body = _function(stem, name, prototypes.get(name, []))
        lines.append(
            f"API long {name}({parameters}); API long {name}({parameters}) {{ TRACE(); {body}return {default}; }}"
        )
    return "\n".join(lines) + "\n"


def _function(stem: str, name: str, parameters: list[str]) -> tuple[str, str]:
    """Return the C parameters of a function and its body; without a known output both say nothing."""
    body = _created(name, parameters) or _sizes(name, parameters) or _error_codes(parameters)
    if not body:
        return "void", ""
    if _SIZE_QUERY.search(name):
        what, bound = f"{stem.removeprefix('lib')}: {name[:40]}", "0"
        if stem == "libcusolver" and (known := _solver_bound(name, parameters)):
            what, bound = "cuSOLVER", known
        if _JACOBI_BATCH.fullmatch(name):
            place = {_name(parameter): f"p{i}" for i, parameter in enumerate(parameters)}
            side, lwork, batch = f"({place['n']} + 1)", place["lwork"], place["batchSize"]
            body += f"*(int32_t *){lwork} = {batch} * (1024 + {side} * {side}) + 1028; "
        body += f'oom_event(OOM_EVENT_OPTIONAL_WORKSPACE, 0, {bound}, "{what}"); '
    declared = ", ".join(f"{_type(parameter)} p{i}" for i, parameter in enumerate(parameters))
    return declared, "".join(f"(void)p{i}; " for i in range(len(parameters))) + body


def _type(parameter: str) -> str:
    """Return the C type that takes the parameter: an int's register has no defined upper half."""
    plain = re.fullmatch(r"(?:const )?(\w+)(?: \w+)?", parameter)
    if plain and plain[1] in ("float", "double"):
        return plain[1]
    return _INTEGERS.get(plain[1], "uintptr_t") if plain else "uintptr_t"


def _name(parameter: str) -> str:
    found = re.search(r"(\w+)(?:\[\])?$", parameter)
    return found[1] if found else ""


def _pointee(parameter: str) -> str | None:
    """Return what a pointer that the function may write through points to."""
    if parameter.startswith("const"):
        return None
    pointer = re.match(r"(\w+) ?\* ?(?:\w*)(?:\[\])?$", parameter)
    return pointer[1] if pointer else None


def _created(name: str, parameters: list[str]) -> str:
    if not re.search(r"[cC]reate", name):
        return ""
    for index, parameter in enumerate(parameters):
        kind = _pointee(parameter)
        if kind and kind.endswith(("_t", "Info")) and kind not in ("size_t", "int64_t"):
            return f"if (p{index}) *(uint64_t *)p{index} = oom_new_handle(); "
    return ""


def _sizes(name: str, parameters: list[str]) -> str:
    if not re.search(r"Get|Nnz", name) and not _SIZE_QUERY.search(name):
        return ""
    widths = {"int": "uint32_t", "size_t": "uint64_t", "int64_t": "uint64_t"}
    return "".join(
        f"if (p{index}) *({widths[kind]} *)p{index} = 0; "
        for index, parameter in enumerate(parameters)
        if (kind := _pointee(parameter)) in widths
    )


def _error_codes(parameters: list[str]) -> str:
    """Clear ``int *info`` and the like: a host variable, or one code for each matrix of a batch on the device."""
    count = "1"
    for index, parameter in enumerate(parameters):
        if re.fullmatch(r"int(64_t)? (batchSize|batchCount|batch_count)", parameter):
            count = f"(size_t)p{index}"
    return "".join(
        f"oom_succeeded((void *)p{index}, {count}); "
        for index, parameter in enumerate(parameters)
        if _pointee(parameter) in ("int", "cusolver_int_t")
        and re.fullmatch(r"(d_?|dev)?info(Array|_array)?", _name(parameter), re.IGNORECASE)
    )


def _solver_bound(name: str, parameters: list[str]) -> str:
    """Return a C expression for the most bytes that a size query of cuSOLVER could have answered, "" if unknown."""
    place = {_name(parameter): f"(uint64_t)p{i}" for i, parameter in enumerate(parameters)}
    routine = re.fullmatch(r"cusolverDn(?:X|([SDCZ]))(\w+)_bufferSize", name)
    if routine is None or "n" not in place:
        return ""
    element = _ELEMENT_BYTES.get(routine[1] or "", "16")  # a query for any type: the widest
    copies = next(copies for pattern, copies in SOLVER_COPIES if re.search(pattern, routine[2]))
    matrix = f"{place.get('m', place['n'])} * {place['n']}"
    batch = place.get("batchSize", "1")
    extra = f" + {SOLVER_ELEMENTS}" if "batchSize" in place else ""
    return f"{batch} * ({copies} * {matrix}{extra}) * {element} + {SOLVER_BYTES}"
