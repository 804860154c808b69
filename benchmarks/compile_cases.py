"""One kernel compiled for one GPU architecture without a GPU: what the compilers say about it.

Registers, spills and stack come from ptxas (the one inside Triton's wheel) and from the metadata in AMD's
assembly; matrix instructions and load widths are counted in the machine code. No kernel runs: this says what
fits, not what is fast.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import io
import json
import os
import pkgutil
import re
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import fastbert_kernels
import triton
from fastbert_kernels.launch import CompileCase
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
AMD_REGISTER_BYTES = 4
# variables that say where Triton keeps files, not what it compiles
ONLY_PLACES = {"TRITON_HOME", "TRITON_CACHE_DIR"}
# an instruction of SASS with its suffixes, behind its address and perhaps a predicate
SASS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
SASS_MATRIX = re.compile(r"^(UTC\w*MMA|\w*GMMA|[HIDQ]MMA)$")
SASS_MEMORY = {"LDG", "LDGSTS", "LDS", "LDSM", "UTMALDG", "STG", "UTMASTG"}
SASS_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
AMDGCN = re.compile(r"^\s+([a-z]\w+)", re.MULTILINE)
AMD_MEMORY = re.compile(r"^(global_load|buffer_load|ds_read|global_store|buffer_store)\w*?_([a-z]+\d*)")
AMD_WIDTHS = {
    "dword": 32,
    "dwordx2": 64,
    "dwordx3": 96,
    "dwordx4": 128,
    "ushort": 16,
    "sshort": 16,
    "short": 16,
}
AMD_WIDTHS |= {"ubyte": 8, "sbyte": 8, "byte": 8}


@dataclass(frozen=True)
class Row:
    """What the compilers say about one case; `error` is theirs if they failed, and the numbers are then 0."""

    kernel: str
    label: str
    dtype: str
    target: str
    num_warps: int
    num_stages: int | None
    uses_dot: bool
    registers: int = 0  # a thread; vector registers on AMD
    spill_bytes: int = 0  # a thread: stores + loads (NVIDIA), spilled vector registers (AMD)
    stack_bytes: int = 0  # a thread
    shared_bytes: int = 0  # a program
    tensor_columns: int = 0  # a program, of sm_100's tensor memory
    matrix: dict[str, int] = field(default_factory=dict)  # instruction -> how often it stands in the code
    memory: dict[str, int] = field(default_factory=dict)  # "LDG.128" -> how often, the width in bits
    binary_bytes: int = 0
    compile_s: float = 0.0
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.dtype} {self.label} on {self.target}"


def kernel_modules() -> list[ModuleType]:
    """Every module of fastbert_kernels that has a kernel of its own."""
    names = sorted(module.name for module in pkgutil.iter_modules(fastbert_kernels.__path__))
    modules = [importlib.import_module(f"fastbert_kernels.{name}") for name in names]
    return [module for module in modules if kernels_of(module)]


def kernels_of(module: ModuleType) -> set[str]:
    """Names of the kernels (`_*_kernel`) that the module defines."""
    return {
        name
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction)
        and name.endswith("_kernel")
        and value.__module__ == module.__name__
    }


def cases_of(module: ModuleType, target: str) -> list[CompileCase]:
    """The module's cases. ValueError if two have one name, for their rows could not be told apart."""
    if not hasattr(module, "compile_cases"):
        return []
    cases: list[CompileCase] = module.compile_cases(target)
    names = Counter((case.kernel.__name__, case.label, case.dtype) for case in cases)
    twice = sorted(" ".join(name) for name, count in names.items() if count > 1)
    if twice:
        raise ValueError(f"{module.__name__}.compile_cases({target!r}) has two cases called {twice[0]}")
    return cases


def empty_row(case: CompileCase, target: str) -> Row:
    return Row(
        kernel=case.kernel.__name__,
        label=case.label,
        dtype=case.dtype,
        target=target,
        num_warps=case.num_warps,
        num_stages=case.num_stages,
        uses_dot=case.uses_dot,
    )


def compile_case(case: CompileCase, target: str) -> Row:
    """The row of a case, compiled now in an empty cache of Triton's."""
    row = empty_row(case, target)
    options: dict[str, Any] = {"num_warps": case.num_warps}
    if case.num_stages is not None:
        options["num_stages"] = case.num_stages
    started = time.perf_counter()
    try:
        with (
            tempfile.TemporaryDirectory() as cache,
            knobs.cache.scope(),
            knobs.nvidia.scope(),
            contextlib.redirect_stdout(io.StringIO()) as ptxas_log,
        ):
            knobs.cache.dir = cache
            knobs.nvidia.dump_ptxas_log = True
            compiled = triton.compile(source_of(case), target=TARGETS[target], options=options)
    except Exception as error:  # whatever the compiler raises is a row of the report and a failed run
        return dataclasses.replace(row, error=f"{type(error).__name__}: {error}".strip())
    row = dataclasses.replace(
        row,
        compile_s=round(time.perf_counter() - started, 1),
        shared_bytes=compiled.metadata.shared,
        tensor_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
    )
    if "cubin" in compiled.asm:
        counts = sass_counts(disassemble(compiled.asm["cubin"]))
        return dataclasses.replace(
            row,
            **ptxas_resources(ptxas_log.getvalue()),
            **counts,
            binary_bytes=len(compiled.asm["cubin"]),
        )
    assembly = compiled.asm["amdgcn"]
    return dataclasses.replace(
        row,
        **amdgcn_resources(assembly),
        **amdgcn_counts(assembly),
        binary_bytes=len(compiled.asm["hsaco"]),
    )


def source_of(case: CompileCase) -> ASTSource:
    """The kernel with its argument types, and with the alignment that a launch would find in them."""
    names = case.kernel.arg_names
    if sorted([*case.signature, *case.constexprs]) != sorted(names):
        raise ValueError(f"the case names {[*case.signature, *case.constexprs]}, the kernel {names}")
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attrs: dict[tuple[int, ...], Any] = {
        (names.index(name),): [["tt.divisibility", 16]] for name in sorted(case.aligned)
    }
    return ASTSource(fn=case.kernel, signature=signature, constexprs=case.constexprs, attrs=attrs)


# ---- reading what the compilers say ----------------------------------------------------------------------


def ptxas_resources(log: str) -> dict[str, int]:
    """Registers, spilled bytes (stores + loads) and stack a thread, from `ptxas -v`."""
    line = search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return {
        "registers": int(search(r"Used (\d+) registers", log)[1]),
        "spill_bytes": int(line[2]) + int(line[3]),
        "stack_bytes": int(line[1]),
    }


def disassemble(cubin: bytes) -> str:
    """SASS, from the nvdisasm of Triton's wheel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", file]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def sass_counts(sass: str) -> dict[str, dict[str, int]]:
    """How often matrix instructions and memory instructions of each width stand in the code."""
    matrix: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    for instruction in SASS.findall(sass):
        name, *suffixes = instruction.split(".")
        if SASS_MATRIX.match(name):
            matrix[name] += 1
        elif name in SASS_MEMORY:
            # a tensor descriptor or ldmatrix has no width a thread; without a suffix it is one register
            plain = name.startswith("UTMA") or name == "LDSM"
            width = next((SASS_WIDTHS[s] for s in suffixes if s in SASS_WIDTHS), 32)
            memory[name if plain else f"{name}.{width}"] += 1
    return {"matrix": dict(sorted(matrix.items())), "memory": dict(sorted(memory.items()))}


def amdgcn_resources(assembly: str) -> dict[str, int]:
    """Vector registers, spilled ones and stack. Spilled scalar registers go to lanes of vector registers."""
    registers, spilled, stack = (
        int(search(rf"\.{key}:\s+(\d+)", assembly)[1])
        for key in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    )
    return {"registers": registers, "spill_bytes": spilled * AMD_REGISTER_BYTES, "stack_bytes": stack}


def amdgcn_counts(assembly: str) -> dict[str, dict[str, int]]:
    matrix: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    for instruction in AMDGCN.findall(assembly):
        if re.match(r"v_s?mfma", instruction):
            matrix["MFMA"] += 1
        elif match := AMD_MEMORY.match(instruction):
            # ds_read_b64, global_load_dwordx4, buffer_load_short_d16
            name, kind = match[1], match[2]
            width = AMD_WIDTHS.get(kind) or int(search(r"\d+", kind)[0])
            memory[f"{name}.{width}"] += 1
    return {"matrix": dict(sorted(matrix.items())), "memory": dict(sorted(memory.items()))}


def search(pattern: str, text: str) -> re.Match[str]:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"the compiler's output has no line like {pattern!r}: did its format change?")
    return match


# ---- what a row depends on, and the cache -----------------------------------------------------------------


@functools.cache
def source_digest(module: str) -> str:
    """Of the file of a module of fastbert_kernels and, in turn, of those that it imports Triton code from."""
    files: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in files:
            continue
        source = Path(importlib.import_module(name).__file__ or "").read_text(encoding="utf-8")
        # a module without Triton code reaches a kernel only through the case: launch.py's rules
        if name != module and "triton.language" not in source:
            continue
        files[name] = source
        waiting += [n for n in imported_modules(source) if n.startswith("fastbert_kernels.")]
    return digest([files[name] for name in sorted(files)])


def imported_modules(source: str) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "fastbert_kernels":
            names += [f"fastbert_kernels.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


def case_digest(case: CompileCase, target: str) -> str:
    """Of all that the row of a case depends on, except variables of the environment."""
    return digest(
        [
            triton.__version__,
            target,
            source_digest(case.kernel.__module__),
            source_digest_of_this_file(),
            [case.kernel.__name__, case.label, case.dtype, case.signature, case.uses_dot],
            {name: repr(value) for name, value in case.constexprs.items()},
            [case.num_warps, case.num_stages, sorted(case.aligned)],
        ]
    )


@functools.cache
def source_digest_of_this_file() -> str:
    return digest(Path(__file__).read_text(encoding="utf-8"))


def digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastbert" / "compile"


def cache_file(case: CompileCase, target: str) -> Path:
    compiler_options = {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(("TRITON_", "LLVM_")) or "PTXAS" in name) and name not in ONLY_PLACES
    }
    return cache_folder() / f"{digest([case_digest(case, target), compiler_options])}.json"


def from_cache(case: CompileCase, target: str) -> Row | None:
    try:
        return Row(**json.loads(cache_file(case, target).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def to_cache(case: CompileCase, row: Row) -> None:
    """Written beside and renamed, so that a run that starts meanwhile never reads half a row."""
    file = cache_file(case, row.target)
    write_whole(file, json.dumps(dataclasses.asdict(row)))


def write_whole(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as beside:
        beside.write(text)
    os.chmod(beside.name, 0o644)
    os.replace(beside.name, file)


def compile_numbered(module: str, target: str, number: int) -> Row:
    """The row of a module's case by its number: what a worker process can be told."""
    return compile_case(cases_of(importlib.import_module(module), target)[number], target)
