"""Compiles every Triton kernel for every supported GPU architecture, on a machine without a GPU.

    python benchmarks/compile_report.py [--json FILE]

One row per kernel, dtype and target: registers a thread, spilled bytes a thread, shared memory, matrix
instructions, size of the binary. The exit status is 1 if a kernel does not compile, spills more than its case
allows, or is in no case. Registers and spills come from `ptxas -v` (the one inside the Triton wheel) and from
the metadata in AMD's assembly, so nothing here is measured time: it says what fits, not what is fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import fastbert_kernels
import torch
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
# as they are spelled in PTX and in AMD's assembly
MATRIX_INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tcgen05": r"\btcgen05\.mma",
    "mfma": r"\bv_s?mfma",
}
NOT_KERNEL_MODULES = {"launch", "tune"}
AMD_REGISTER_BYTES = 4


@dataclass(frozen=True)
class Row:
    kernel: str
    label: str
    dtype: str
    target: str
    registers: int | None = None  # a thread; vector registers on AMD
    spill_bytes: int | None = None  # a thread
    shared_bytes: int | None = None  # a program
    matrix_instructions: str = ""  # "wgmma x 16", or "none"
    binary_bytes: int | None = None
    error: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error)


def kernel_modules() -> list[ModuleType]:
    """Every module of fastbert_kernels that holds kernels."""
    names = sorted(module.name for module in pkgutil.iter_modules(fastbert_kernels.__path__))
    return [importlib.import_module(f"fastbert_kernels.{n}") for n in names if n not in NOT_KERNEL_MODULES]


def kernels_in_no_case(module: ModuleType, cases: list[CompileCase]) -> list[str]:
    """Names of the module's kernels (`_*_kernel`) that it does not ask to be compiled."""
    covered = {case.kernel.__name__ for case in cases}
    kernels = {name for name, value in vars(module).items() if isinstance(value, triton.JITFunction)}
    return sorted(name for name in kernels - covered if name.endswith("_kernel"))


def compile_case(case: CompileCase, target: str) -> Row:
    row = Row(case.kernel.__name__, case.label, case.dtype, target)
    options = {"num_warps": case.num_warps}
    if case.num_stages is not None:
        options["num_stages"] = case.num_stages
    try:
        compiled = triton.compile(source_of(case), target=TARGETS[target], options=options)
    except Exception as error:  # whatever the compiler raises is a row of the report and a failed run
        return dataclasses.replace(row, error=f"{type(error).__name__}: {error}".strip())
    if "ptx" in compiled.asm:
        text, binary = compiled.asm["ptx"], compiled.asm["cubin"]
        registers, spill_bytes = ptxas_resources(text)
    else:
        text, binary = compiled.asm["amdgcn"], compiled.asm["hsaco"]
        registers, spill_bytes = amdgcn_resources(text)
    return dataclasses.replace(
        row,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=compiled.metadata.shared,
        matrix_instructions=matrix_instructions(text),
        binary_bytes=len(binary),
        error=f"spills {spill_bytes} bytes" if spill_bytes else "",
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


def ptxas_resources(ptx: str) -> tuple[int, int]:
    """Registers and spilled bytes (stores + loads) a thread, as `ptxas -v` says."""
    architecture = search(r"^\.target (sm_(\d+)\w*)", ptx)
    # Triton's wheel has a second ptxas for Blackwell
    tool = knobs.nvidia.ptxas_blackwell if int(architecture[2]) >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        log = subprocess.run(
            [tool.path, "-v", f"--gpu-name={architecture[1]}", source, "-o", Path(folder, "kernel.cubin")],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    spills = search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return int(search(r"Used (\d+) registers", log)[1]), int(spills[1]) + int(spills[2])


def amdgcn_resources(assembly: str) -> tuple[int, int]:
    """Vector registers, and bytes of spilled vector and scalar registers, from the kernel's metadata."""
    registers, vector, scalar = (
        int(search(rf"\.{key}:\s+(\d+)", assembly)[1])
        for key in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    )
    return registers, (vector + scalar) * AMD_REGISTER_BYTES


def matrix_instructions(assembly: str) -> str:
    counts = {name: len(re.findall(pattern, assembly)) for name, pattern in MATRIX_INSTRUCTIONS.items()}
    return ", ".join(f"{name} x {count}" for name, count in counts.items() if count) or "none"


def search(pattern: str, text: str) -> re.Match[str]:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"the compiler's output has no line like {pattern!r}: did its format change?")
    return match


def print_row(row: Row) -> None:
    cells = [row.registers, row.spill_bytes, row.shared_bytes, row.matrix_instructions, row.binary_bytes]
    numbers = " | ".join("-" if cell in (None, "") else str(cell) for cell in cells)
    status = row.error.splitlines()[0] if row.failed else "ok"
    print(f"| {row.kernel} {row.label} | {row.dtype} | {row.target} | {numbers} | {status} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    arguments = parser.parse_args()
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing; unset it")

    started = time.perf_counter()
    rows: list[Row] = []
    forgotten: list[str] = []
    print("| kernel | dtype | target | registers | spilled | shared | matrix instructions | binary | |")
    print("|---|---|---|---|---|---|---|---|---|")
    # an empty cache: what is reported was compiled now, by this compiler
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for module in kernel_modules():
            for target in TARGETS:
                cases = module.compile_cases(target)
                forgotten += [
                    f"{module.__name__}.{name} on {target}" for name in kernels_in_no_case(module, cases)
                ]
                for case in cases:
                    rows.append(compile_case(case, target))
                    print_row(rows[-1])

    failures = [row for row in rows if row.failed]
    elapsed_s = time.perf_counter() - started
    print(f"\n{len(rows)} kernels, {len(failures)} failed, {elapsed_s:.0f} s; triton {triton.__version__}")
    for row in failures:
        print(f"\n{row.kernel} {row.label} {row.dtype} {row.target}: {row.error}", file=sys.stderr)
    for name in forgotten:
        print(f"{name} is in no case of its module's compile_cases()", file=sys.stderr)
    if arguments.json:
        report = {
            "triton": triton.__version__,
            "torch": torch.__version__,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failures or forgotten or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
