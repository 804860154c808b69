"""The compile report: what it reads from the compilers, what fails it, its cache, and what is committed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

import triton
import triton.language as tl
from fastbert_kernels import bias_gelu
from fastbert_kernels.launch import ARCHITECTURES, MAX_SHARED_BYTES, CompileCase

from benchmarks import compile_cases, compile_report
from benchmarks.compile_cases import Row, compile_case
from benchmarks.compile_report import NumberedCase, ReportException, failures_of, judged

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

HALF_PRODUCT = Row(
    "_x_fwd_kernel", "64x64", "bf16", "sm_90", 4, 3, uses_dot=True, registers=90, matrix={"HGMMA": 4}
)


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, c_ptr, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * K + (start + k)[None, :])
        b = tl.load(b_ptr + n[None, :] * K + (start + k)[:, None])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * BLOCK_N + n[None, :], acc)


def product(block_m: int, block_n: int, num_warps: int, num_stages: int = 3) -> CompileCase:
    pointers = ("a_ptr", "b_ptr", "c_ptr")
    return CompileCase(
        kernel=_product_kernel,
        label=f"{block_m}x{block_n}",
        dtype="bf16",
        signature=dict.fromkeys(pointers, "*bf16") | {"K": "i32"},
        constexprs={"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 64},
        num_warps=num_warps,
        num_stages=num_stages,
        aligned=frozenset({*pointers, "K"}),
        uses_dot=True,
    )


# ---- compilers that really run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "instruction", "load"),
    [
        ("sm_80", "HMMA", "LDGSTS.128"),
        ("sm_90", "HGMMA", "LDGSTS.128"),
        ("sm_100", "UTCHMMA", "LDGSTS.128"),
        ("gfx942", "MFMA", "global_load.128"),
    ],
)
def test_a_product_is_seen_as_one(target: str, instruction: str, load: str) -> None:
    row = compile_case(product(64, 64, num_warps=4, num_stages=2), target)
    assert row.error == "" and list(row.matrix) == [instruction] and load in row.memory
    # two stages of two 64 x 64 tiles of 2 bytes are 32 KiB; sm_100 adds its barriers
    assert 0 < row.shared_bytes <= 33 * 1024
    assert 32 <= row.registers <= 255 and row.spill_bytes == row.stack_bytes == 0
    assert row.compile_s > 0 and row.binary_bytes > 1000
    assert failures_of(row) == []


def test_spills_and_too_much_shared_memory_are_seen() -> None:
    # 128 x 256 sums of 4 warps are 256 registers a thread, and a thread has 255
    row = compile_case(product(128, 256, num_warps=4, num_stages=6), "sm_90")
    assert row.spill_bytes > 0 and row.stack_bytes > 0 and row.registers == 255
    # six stages of (128 + 256) x 64 x 2 bytes are 288 KiB
    assert row.shared_bytes >= 5 * 48 * 1024 > MAX_SHARED_BYTES["sm_90"]
    assert [failure.failure for failure in failures_of(row)] == ["spills", "does not fit"]


def test_a_tile_too_small_for_hgmma_fails() -> None:
    # warp-group products have 64 rows
    row = compile_case(product(32, 64, num_warps=4), "sm_90")
    assert list(row.matrix) == ["HMMA"]
    (failure,) = failures_of(row)
    assert failure.message == "no HGMMA on sm_90, but ['HMMA']"


def test_a_case_that_does_not_compile_is_a_row_with_the_compilers_words() -> None:
    row = compile_case(product(63, 64, num_warps=4), "sm_90")
    (failure,) = failures_of(row)
    assert failure.failure == "does not compile" and "power of 2" in failure.message
    wrong = replace(product(64, 64, num_warps=4), signature={"a_ptr": "*bf16"})
    assert "the case names ['a_ptr', " in compile_case(wrong, "sm_90").error


# ---- what the compilers say -------------------------------------------------------------------------------

SASS = """
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.U16 R2, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E R5, [R2.64] ;
        /*0030*/              @!PT LDS RZ, [RZ] ;
        /*0040*/         @P1 LDGSTS.E.BYPASS.LTC128B.128 [R5], [R6.64] ;
        /*0050*/                   LDGDEPBAR ;
        /*0060*/                   LDSM.16.M88.4 R12, [R12] ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R12, R18, R4 ;
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0090*/             @!UP1 UTMALDG.2D [UR8], [UR4] ;
        /*00a0*/                   UTCHMMA gdesc[UR12], gdesc[UR10], tmem[UR6] ;
        /*00b0*/                   UTCBAR [UR8], URZ ;
        /*00c0*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00d0*/                   STG.E.128 desc[UR4][R2.64], R8 ;
"""


def test_sass_is_counted() -> None:
    assert compile_cases.sass_counts(SASS) == {
        "matrix": {"HGMMA": 1, "HMMA": 1, "UTCHMMA": 1},
        "memory": {
            "LDG.16": 1, "LDG.32": 1, "LDGSTS.128": 1, "LDS.32": 1, "LDSM": 1, "STG.128": 2, "UTMALDG": 1,
        },
    }  # fmt: skip


AMDGCN = """
_kernel:
\ts_load_dwordx4 s[8:11], s[0:1], 0x0
\tglobal_load_dwordx4 v[2:5], v[2:3], off
\tglobal_load_ushort v6, v[2:3], off
\tglobal_load_short_d16_hi v6, v[2:3], off
\tbuffer_load_dword v7, v8, s[4:7], 0 offen
\tds_read2st64_b64 v[2:5], v1
\tds_read_u16 v2, v1
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
\tglobal_store_dwordx2 v[2:3], v[4:5], off
    .private_segment_fixed_size: 24
    .vgpr_count:     104
    .vgpr_spill_count: 3
"""


def test_amd_assembly_is_counted() -> None:
    assert compile_cases.amdgcn_counts(AMDGCN) == {
        "matrix": {"MFMA": 1},
        "memory": {
            "buffer_load.32": 1, "ds_read.16": 1, "ds_read.64": 1, "global_load.128": 1, "global_load.16": 2,
            "global_store.64": 1,
        },
    }  # fmt: skip
    resources = compile_cases.amdgcn_resources(AMDGCN)
    assert resources == {"registers": 104, "spill_bytes": 12, "stack_bytes": 24}


def test_ptxas_log_is_read() -> None:
    log = """ptxas info    : Function properties for _kernel
    40 bytes stack frame, 36 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size"""
    resources = compile_cases.ptxas_resources(log)
    assert resources == {"registers": 255, "spill_bytes": 64, "stack_bytes": 40}
    with pytest.raises(RuntimeError, match="did its format change"):
        compile_cases.ptxas_resources("ptxas is silent")


# ---- what fails -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "failures"),
    [
        ({}, []),
        ({"spill_bytes": 8}, ["spills"]),
        ({"spill_bytes": 8, "target": "sm_80"}, ["spills"]),
        ({"spill_bytes": 8, "target": "sm_100", "matrix": {"UTCHMMA": 1}}, []),
        ({"shared_bytes": 227 * 1024}, []),
        ({"shared_bytes": 227 * 1024 + 1}, ["does not fit"]),
        # the A100 has 163 KiB, but the same configurations run on GPUs with 99
        ({"shared_bytes": 100 * 1024, "target": "sm_80"}, ["does not fit"]),
        ({"shared_bytes": 65 * 1024, "target": "gfx942"}, ["does not fit"]),
        ({"tensor_columns": 513, "target": "sm_100"}, ["does not fit"]),
        ({"matrix": {"HMMA": 8}}, ["no matrix instructions"]),
        ({"matrix": {"HMMA": 8}, "target": "sm_80"}, []),
        ({"matrix": {}, "target": "gfx942"}, ["no matrix instructions"]),
        # IEEE products of fp32 have none
        ({"matrix": {}, "dtype": "fp32"}, []),
        ({"matrix": {}, "uses_dot": False}, []),
        ({"error": "CompilationError", "spill_bytes": 0, "matrix": {}}, ["does not compile"]),
    ],
)  # fmt: skip
def test_what_fails(changes: dict[str, Any], failures: list[str]) -> None:
    row = replace(HALF_PRODUCT, **changes)
    assert [failure.failure for failure in failures_of(row)] == failures


def exception(**changes: Any) -> ReportException:
    fields = asdict(HALF_PRODUCT)
    same = {name: fields[name] for name in ("kernel", "label", "dtype", "target")}
    rest = {"failure": "spills", "triton": (triton.__version__,), "reason": "measured", "at_most": 16}
    return ReportException(**same | rest | changes)


def test_exceptions_excuse_what_they_name_and_no_more() -> None:
    spilling = replace(HALF_PRODUCT, spill_bytes=16)
    for excuse in (exception(), exception(label="64*", kernel="_x_???_kernel")):
        assert judged([spilling], [excuse]) == ([], [])
    for other in (
        exception(at_most=15),
        exception(label="64x128"),
        exception(target="sm_80"),
        exception(failure="no matrix instructions"),
    ):
        problems, unused = judged([spilling], [other])
        assert [problem.message for problem in problems] == ["spills 16 bytes a thread"]
        assert unused == [other]
    # said for another version: it excuses nothing here, and is not out of date either
    elsewhere = exception(triton=("0.1",))
    assert judged([spilling], [elsewhere])[1] == [] != judged([spilling], [elsewhere])[0]
    # what cannot be launched cannot be excused
    assert len(judged([replace(spilling, shared_bytes=2**20)], [exception()])[0]) == 1


def test_an_exception_that_no_longer_applies_is_reported() -> None:
    assert judged([HALF_PRODUCT], [exception()]) == ([], [exception()])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"failure": '"does not fit"'}, "'does not fit' is not one of spills, no matrix instructions, "),
        ({"reason": '" "'}, "needs a reason and the Triton versions"),
        ({"triton": "[]"}, "needs a reason and the Triton versions"),
        ({"colour": '"red"'}, "unexpected keyword argument 'colour'"),
    ],
)
def test_bad_exceptions_are_one_clear_error(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    entry = dict.fromkeys(("kernel", "label", "dtype", "target", "reason"), '"x"')
    entry |= {"failure": '"spills"', "triton": '["3.7.1"]'}
    file = tmp_path / "exceptions.toml"

    def write(entry: dict[str, str]) -> None:
        file.write_text("[[exception]]\n" + "".join(f"{name} = {value}\n" for name, value in entry.items()))

    write(entry)
    assert len(compile_report.read_exceptions(file)) == 1
    write(entry | changes)
    with pytest.raises(ValueError, match=message):
        compile_report.read_exceptions(file)


# ---- the table --------------------------------------------------------------------------------------------


def test_the_table_shows_the_worst_of_each_kernel_and_architecture() -> None:
    spilling = {
        "registers": 80,
        "spill_bytes": 8,
        "stack_bytes": 16,
        "memory": {"LDGSTS.128": 1, "LDS.64": 9},
    }
    rows = [
        replace(HALF_PRODUCT, shared_bytes=2048, memory={"LDG.32": 1, "UTMALDG": 2}, compile_s=0.5),
        replace(HALF_PRODUCT, label="b", **spilling),
        replace(HALF_PRODUCT, label="b", dtype="fp32", matrix={}, compile_s=1.25),
        replace(HALF_PRODUCT, target="gfx942", uses_dot=False),
    ]
    lines = compile_report.table(rows).splitlines()[2:]
    assert [line.strip("| ").split(" | ") for line in lines] == [
        [
            "`_x_fwd_kernel`", "sm_90", "3", "90", "8", "16", "2.0 of 227", "HGMMA in 2, none in 1",
            "TMA, 128, 32", "1.2",
        ],
        ["`_x_fwd_kernel`", "gfx942", "1", "90", "0", "0", "0.0 of 64", "-", "-", "0.0"],
    ]  # fmt: skip


def test_the_table_is_put_between_the_markers() -> None:
    begin, end = compile_report.BEGIN, compile_report.END
    text = f"before\n\n{begin}\n\nold\n\n{end}\n\nafter\n"
    new = compile_report.with_table(text, "new")
    assert new == text.replace("old", "new") and compile_report.between_markers(new) == "new"
    for broken in (f"{end} {begin}", begin, "", text + begin):
        with pytest.raises(ValueError, match=r"README.md must have <!-- compile report: begin -->"):
            compile_report.between_markers(broken)


def committed_rows() -> tuple[dict[str, Any], list[Row]]:
    report = json.loads(compile_report.REPORT.read_text(encoding="utf-8"))
    return report, [Row(**row) for row in report["rows"]]


def test_the_readme_shows_the_committed_rows() -> None:
    _, rows = committed_rows()
    text = compile_report.README.read_text(encoding="utf-8")
    assert compile_report.between_markers(text) == compile_report.table(rows), (
        "kernels/README.md and compile_report.json differ: run `python -m benchmarks.compile_report --write`"
    )


def test_the_committed_rows_are_of_these_sources() -> None:
    report, rows = committed_rows()
    cases = compile_report.all_cases()
    remedy = "run `python -m benchmarks.compile_report --write`"
    names = [compile_cases.empty_row(numbered.case, numbered.target).name for numbered in cases]
    assert [row.name for row in rows] == names, f"the cases changed: {remedy}"
    if triton.__version__ == report["triton"]:
        assert compile_report.module_digests(cases) == report["digests"], f"the kernels changed: {remedy}"
    assert judged(rows, compile_report.read_exceptions(compile_report.EXCEPTIONS))[0] == []


def test_every_kernel_is_in_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = compile_report.all_cases()
    assert compile_report.kernels_in_no_case(cases) == []
    forward = [numbered for numbered in cases if numbered.case.kernel.__name__ != "_bias_gelu_bwd_kernel"]
    assert compile_report.kernels_in_no_case(forward) == ["fastbert_kernels.bias_gelu._bias_gelu_bwd_kernel"]
    # a module that names no case at all
    monkeypatch.delattr(bias_gelu, "compile_cases")
    assert len(compile_report.kernels_in_no_case(compile_report.all_cases())) == 2


def test_two_cases_of_one_name_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = bias_gelu.compile_cases("sm_90")[:1] * 2
    monkeypatch.setattr(bias_gelu, "compile_cases", lambda arch: twice)
    with pytest.raises(ValueError, match=r"two cases called _bias_gelu_fwd_kernel erf fp32"):
        compile_cases.cases_of(bias_gelu, "sm_90")


# ---- the cache and the processes --------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fastbert" / "compile"


def test_rows_are_kept_by_what_they_depend_on(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = bias_gelu.compile_cases("sm_90")[0]
    row = replace(compile_cases.empty_row(case, "sm_90"), registers=47, memory={"LDG.128": 6})
    assert compile_cases.from_cache(case, "sm_90") is None
    compile_cases.to_cache(case, row)
    assert compile_cases.from_cache(case, "sm_90") == row
    assert [file.suffix for file in empty_cache.iterdir()] == [".json"], "a temporary file was left"
    for other in (
        replace(case, num_warps=8),
        replace(case, num_stages=4),
        replace(case, constexprs=case.constexprs | {"BLOCK_N": 512}),
        replace(case, signature=case.signature | {"x_ptr": "*fp16"}),
        replace(case, aligned=frozenset()),
        replace(case, uses_dot=True),
    ):
        assert compile_cases.from_cache(other, "sm_90") is None
    assert compile_cases.from_cache(case, "sm_80") is None
    with monkeypatch.context() as changed:
        changed.setattr(triton, "__version__", "3.99.0")
        assert compile_cases.from_cache(case, "sm_90") is None
    with monkeypatch.context() as changed:
        changed.setenv("TRITON_ANY_SWITCH", "1")
        assert compile_cases.from_cache(case, "sm_90") is None
    with monkeypatch.context() as changed:
        changed.setenv("TRITON_CACHE_DIR", "/elsewhere")
        assert compile_cases.from_cache(case, "sm_90") == row
    with monkeypatch.context() as changed:
        changed.setattr(compile_cases, "source_digest", lambda module: "another source")
        assert compile_cases.from_cache(case, "sm_90") is None


def test_the_source_digest_follows_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_code = "import triton.language as tl\n"
    imports = "from fastbert_kernels.helper import f\nfrom fastbert_kernels import rules\n"
    files = {"kernel": triton_code + imports, "helper": triton_code, "rules": "LIMIT = 1\n"}

    def load(name: str) -> ModuleType:
        module = ModuleType(name)
        module.__file__ = str(tmp_path / f"{name.split('.')[-1]}.py")
        return module

    monkeypatch.setattr(compile_cases.importlib, "import_module", load)

    def digest(**changes: str) -> str:
        for name, text in (files | changes).items():
            (tmp_path / f"{name}.py").write_text(text)
        return compile_cases.source_digest.__wrapped__("fastbert_kernels.kernel")

    plain = digest()
    assert digest() == plain
    assert digest(kernel=files["kernel"] + "# a comment\n") != plain
    assert digest(helper=files["helper"] + "X = 1\n") != plain
    # block sizes reach a kernel through its case, whose constants have their own part of the key
    assert digest(rules="LIMIT = 2\n") == plain


CRASHING = """
import os

def compile_numbered(module, target, number):
    if number == 1:
        os.abort()
    return f"row {number}"
"""


def numbered(count: int) -> list[NumberedCase]:
    case = bias_gelu.compile_cases("sm_90")[0]
    return [NumberedCase("module", "sm_90", number, case) for number in range(count)]


def test_a_compiler_that_aborts_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing_compiler.py").write_text(CRASHING)
    monkeypatch.syspath_prepend(tmp_path)
    import crashing_compiler  # type: ignore[import-not-found]

    monkeypatch.setattr(compile_report, "compile_numbered", crashing_compiler.compile_numbered)
    rows: dict[int, Any] = {n.number: row for n, row in compile_report.compiled_in_processes(numbered(4))}
    assert rows[1].error == "the compiler ended its process"
    assert {number: row for number, row in rows.items() if number != 1} == {
        0: "row 0",
        2: "row 2",
        3: "row 3",
    }


def test_a_second_run_compiles_nothing_and_failures_are_not_kept(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = bias_gelu.compile_cases("sm_90")[0]
    compiled: list[str] = []
    row = compile_cases.empty_row(case, "sm_90")

    def compile_all(cases: list[NumberedCase]) -> Any:
        for numbered in cases:
            compiled.append(numbered.case.label)
            yield numbered, row

    monkeypatch.setattr(compile_report, "compiled_in_processes", compile_all)
    one = [NumberedCase("fastbert_kernels.bias_gelu", "sm_90", 0, case)]
    assert list(compile_report.compiled(one, use_cache=False)) == [row] and not empty_cache.exists()
    assert list(compile_report.compiled(one, use_cache=True)) == [row] and len(compiled) == 2
    assert list(compile_report.compiled(one, use_cache=True)) == [row] and len(compiled) == 2
    assert list(compile_report.compiled(one, use_cache=False)) == [row] and len(compiled) == 3
    row = replace(row, error="out of memory")
    failing = [replace(one[0], case=replace(case, num_warps=8))]
    assert [list(compile_report.compiled(failing, use_cache=True)) for _ in range(2)] == [[row], [row]]
    assert len(compiled) == 5


# ---- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Row]:
    """bias_gelu alone, compiled to clean rows, or to the rows of their names that are put into the list."""
    bad: list[Row] = []

    def compile_all(cases: list[NumberedCase], *, use_cache: bool) -> Any:
        by_name = {row.name: row for row in bad}
        # processes finish in any order
        for numbered in reversed(cases):
            row = compile_cases.empty_row(numbered.case, numbered.target)
            yield by_name.get(row.name, row)

    monkeypatch.setattr(compile_report, "kernel_modules", lambda: [bias_gelu])
    monkeypatch.setattr(compile_report, "compiled", compile_all)
    for name in ("README", "REPORT", "EXCEPTIONS"):
        original = getattr(compile_report, name)
        copy = tmp_path / original.name
        copy.write_text(original.read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(compile_report, name, copy)
    compile_report.EXCEPTIONS.write_text("")
    monkeypatch.setattr(compile_report, "ROOT", tmp_path)
    return bad


def test_the_command_writes_both_files(fake_compiler: list[Row]) -> None:
    assert compile_report.main(["--write"]) == 0
    report, rows = committed_rows()
    cases = compile_report.all_cases()
    assert [row.name for row in rows] == [compile_cases.empty_row(n.case, n.target).name for n in cases]
    assert {row.target for row in rows} == set(ARCHITECTURES)
    assert report["triton"] == triton.__version__ and list(report["digests"]) == ["bias_gelu"]
    test_the_readme_shows_the_committed_rows()
    # a changed row is a changed line
    lines = compile_report.REPORT.read_text().splitlines()
    assert sum(line.startswith('  {"kernel"') for line in lines) == len(rows)


def test_the_command_fails_and_writes_nothing(
    fake_compiler: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = compile_report.REPORT.read_text()
    row = compile_cases.empty_row(bias_gelu.compile_cases("sm_90")[1], "sm_90")
    fake_compiler.append(replace(row, spill_bytes=24))
    assert compile_report.main(["--write"]) == 1
    assert f"{row.name}: spills 24 bytes a thread" in capsys.readouterr().err
    assert compile_report.REPORT.read_text() == before
    # excused, then no longer needed
    compile_report.EXCEPTIONS.write_text(
        f'[[exception]]\nkernel = "{row.kernel}"\nlabel = "erf"\ndtype = "fp32"\ntarget = "sm_90"\n'
        f'failure = "spills"\nat_most = 24\ntriton = ["{triton.__version__}"]\nreason = "measured"\n'
    )
    assert compile_report.main([]) == 0
    fake_compiler.clear()
    assert compile_report.main([]) == 1
    assert "this excuses nothing any more, delete it" in capsys.readouterr().err
    # a part of the kernels cannot tell that
    assert compile_report.main(["--only", "bias_gelu_fwd"]) == 0
    assert compile_report.main(["--only", "no such kernel"]) == 1
    assert "no case at all" in capsys.readouterr().err


@pytest.mark.parametrize("part", [["--only", "fwd"], ["--target", "sm_90"]], ids=str)
def test_a_part_cannot_be_written(part: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compile_report.main(["--write", *part])
    assert "--write needs every row: leave out --only and --target" in capsys.readouterr().err
