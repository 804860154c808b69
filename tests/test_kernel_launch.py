"""Configurations, the device guard, and a cold compiler cache shared by many processes, without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import bias_gelu, launch
from fastbert_kernels.launch import (
    ARCHITECTURES,
    MAX_SHARED_BYTES,
    AttentionConfig,
    LaunchConfig,
    MatmulConfig,
    architecture,
    architecture_of,
    column_block,
    column_sum_config,
    device_guard,
    elementwise_config,
    num_programs_persistent,
)

# BERT's feed-forward widths, then one column, an odd width, no power of two, and no good block at all
WIDTHS = [512, 1024, 2048, 3072, 4096, 1, 33, 1500, 1025, 100_003]


@pytest.mark.parametrize(
    ("num_cols", "limit", "block"),
    [
        (4096, 1024, 1024),  # divides
        (3072, 1024, 1024),
        (768, 1024, 256),  # 1024 and 512 would both waste a third of the row
        (1500, 1024, 512),  # 36 columns wasted; 1024 would waste 548
        (3000, 1024, 1024),  # 72 wasted
        (3072, 256, 256),
        (100, 1024, 64),  # 128 would waste 28 of 100
        (33, 1024, 64),
        (1, 1024, 64),
    ],
)
def test_column_block_wastes_little(num_cols: int, limit: int, block: int) -> None:
    assert column_block(num_cols, limit) == block


@pytest.mark.parametrize("num_cols", WIDTHS)
@pytest.mark.parametrize("num_rows", [1, 7, 128, 8192, 65_536])
def test_configs_are_valid_and_cover_the_matrix(num_rows: int, num_cols: int) -> None:
    for config in (elementwise_config(num_cols), column_sum_config(num_rows, num_cols)):
        for size in (config.block_m, config.block_n, config.num_warps):
            assert size > 0 and size & (size - 1) == 0, f"{config} has a size that is no power of two"
        threads = 32 * config.num_warps
        assert threads <= config.block_m * config.block_n <= 16 * threads, (
            "idle threads, or too many registers"
        )
        row_programs = config.num_row_programs(num_rows)
        assert (
            (row_programs - 1) * config.rows_per_program < num_rows <= row_programs * config.rows_per_program
        )
        col_programs = -(-num_cols // config.block_n)
        assert config.num_programs(num_rows, num_cols) == row_programs * col_programs


def test_column_sums_keep_partials_small_and_the_gpu_full() -> None:
    # one micro-batch of BERT-Base: 16384 tokens x 3072
    config = column_sum_config(16_384, 3072)
    assert config == LaunchConfig(block_m=8, block_n=256, tiles_m=16, num_warps=8)
    assert config.num_row_programs(16_384) == 128
    assert config.num_programs(16_384, 3072) == 1536
    # few rows: one tile a program
    assert column_sum_config(128, 3072).tiles_m == 1
    # never more than 16: the bound of the partial sums' size
    assert column_sum_config(2**24, 4096).tiles_m == 16


def test_number_of_rows_changes_only_tiles_m() -> None:
    # another batch must not compile another kernel, and tiles_m is a run-time argument
    blocks = {
        (c.block_m, c.block_n, c.num_warps) for c in (column_sum_config(m, 3072) for m in range(1, 9999, 97))
    }
    assert len(blocks) == 1


@pytest.mark.parametrize("config", [LaunchConfig(8, 256, tiles_m=3)])
def test_launch_config_is_frozen(config: LaunchConfig) -> None:
    assert config.rows_per_program == 24
    with pytest.raises(AttributeError):
        config.block_m = 16  # type: ignore[misc]


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((11, 0), "sm_100"),
        # consumer Blackwell: no tcgen05, 99 KiB of shared memory
        ((12, 0), "sm_80"),
        ((12, 1), "sm_80"),
    ],
)
def test_rules_of_an_nvidia_gpu(capability: tuple[int, int], arch: str) -> None:
    assert architecture_of(capability) == arch
    assert arch in ARCHITECTURES and arch in MAX_SHARED_BYTES


def test_a_gpu_that_is_too_old_is_one_clear_error() -> None:
    with pytest.raises(
        ValueError, match=r"capability 7\.5, but .* need 8\.0 or newer: use the eager backend"
    ):
        architecture_of((7, 5))


def test_the_interpreter_has_a_fixed_architecture_and_few_programs() -> None:
    x = torch.zeros(1)
    assert architecture(x) == "sm_80"
    # programs that share the tiles of a small test
    assert 1 < num_programs_persistent(x) < 8


def test_a_gpu_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    class Properties:
        multi_processor_count = 132

    def properties(device: torch.device) -> Properties:
        asked.append(device)
        return Properties()

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    x = _OnSecondGpu()
    for remembered in (launch._num_multiprocessors, launch._device_architecture):
        remembered.cache_clear()
    try:
        assert [num_programs_persistent(x) for _ in range(3)] == [132] * 3  # type: ignore[arg-type]
        assert asked == [x.device]
        assert architecture(x) == "sm_90"  # type: ignore[arg-type]
        launch._device_architecture.cache_clear()
        # ROCm has capabilities of its own, which mean something else
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert architecture(x) == "gfx942"  # type: ignore[arg-type]
    finally:
        for remembered in (launch._num_multiprocessors, launch._device_architecture):
            remembered.cache_clear()


def test_configurations_are_plain_values() -> None:
    # candidates are compared, looked up and written by value
    assert AttentionConfig(128, 64, 4, 3) == AttentionConfig(128, 64, num_warps=4, num_stages=3)
    assert str(AttentionConfig(128, 64, 4, 3)) == (
        "AttentionConfig(block_m=128, block_n=64, num_warps=4, num_stages=3)"
    )
    assert len({MatmulConfig(128, 64, 32, 8, 4, 3), MatmulConfig(128, 64, 32, 8, 4, 3)}) == 1


# one of four processes that compile one kernel into one empty cache, all beginning together, several times
RANK = """
import hashlib, json, os, sys, time
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fastbert_kernels import bias_gelu, launch

rank, folder, rounds = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
case = bias_gelu.compile_cases("sm_90")[-1]
source = ASTSource(
    fn=case.kernel,
    signature={name: case.signature.get(name, "constexpr") for name in case.kernel.arg_names},
    constexprs=case.constexprs,
)
said = []
for number in range(rounds):
    os.environ["TRITON_CACHE_DIR"] = str(folder / f"cache-{number}")
    (folder / f"ready-{number}-{rank}").touch()
    while not (folder / f"go-{number}").exists():
        time.sleep(0.001)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": case.num_warps})
    said.append(hashlib.sha256(compiled.asm["cubin"]).hexdigest())

# each rank on a GPU of its own, of one kind
launch.TUNED_FOLDER = folder
torch.cuda.get_device_name = lambda device: "NVIDIA Imaginary X100"
x = type("OnGpu", (), {"device": torch.device("cuda", rank)})()
said += [launch.choose("op", key, ("first", "second", "third"), x) for key in ("tuned", "not tuned")]
print(json.dumps(said))
"""


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_processes_with_one_cold_cache_agree(tmp_path: Path) -> None:
    ranks, rounds = 4, 5
    table = {"gpu": "NVIDIA Imaginary X100", "rows": [{"op": "op", "key": "tuned", "choice": "third"}]}
    (tmp_path / "nvidia-imaginary-x100.json").write_text(json.dumps(table))
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root / "kernels"), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path), str(rounds)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for number in range(rounds):
            ready = [tmp_path / f"ready-{number}-{rank}" for rank in range(ranks)]
            while not all(file.exists() for file in ready):
                ended = [process for process in processes if process.poll() not in (None, 0)]
                assert not ended, ended[0].communicate()[1]
                time.sleep(0.001)
            assert not (tmp_path / f"cache-{number}").exists(), "the cache is not cold"
            (tmp_path / f"go-{number}").touch()
        said = []
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            said.append(json.loads(out))
    finally:
        for process in processes:
            process.kill()
    assert all(words == said[0] for words in said), "the ranks did not get the same binaries"
    assert len(set(said[0][:rounds])) == 1, "another cold start gave another binary"
    assert said[0][rounds:] == ["third", "first"]


class _Entered(contextlib.AbstractContextManager):
    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self.depth = 0

    def __call__(self, device: torch.device) -> _Entered:
        self.devices.append(device)
        return self

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1


class _OnSecondGpu:
    device = torch.device("cuda:1")


def test_device_guard_enters_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = _Entered()
    monkeypatch.setattr(torch.cuda, "device", entered)
    with device_guard(_OnSecondGpu()):  # type: ignore[arg-type]
        assert entered.depth == 1
    assert entered.devices == [torch.device("cuda:1")]
    with device_guard(torch.zeros(1)):
        assert entered.depth == 0, "a CPU tensor has no CUDA device to enter"


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_bias_gelu_launches_under_the_guard(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, depths = _Entered(), []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
            return self

        def __call__(self, *args: object, **kwargs: object) -> None:
            depths.append(entered.depth)

    monkeypatch.setattr(bias_gelu, "device_guard", lambda x: entered(x.device))
    monkeypatch.setattr(bias_gelu, f"_bias_gelu_{direction}_kernel", Kernel())
    monkeypatch.setattr(bias_gelu, "check_can_launch", lambda kernel, x: None)
    x, bias = torch.zeros(3, 4), torch.zeros(4)
    if direction == "fwd":
        bias_gelu.bias_gelu_fwd(x, bias)
    else:
        bias_gelu.bias_gelu_bwd(x, x, bias)
    assert depths == [1]
    assert entered.devices == [x.device] and entered.depth == 0


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does run on a CPU")
def test_cpu_tensors_are_refused_with_the_remedy() -> None:
    x, bias = torch.zeros(3, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"x is on cpu, .* TRITON_INTERPRET=1"):
        bias_gelu.bias_gelu_fwd(x, bias)
    with pytest.raises(ValueError, match=r"x is on cpu"):
        bias_gelu.bias_gelu_bwd(x, x, bias)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter keeps no parameters")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compile_cases_are_what_is_launched(arch: str) -> None:
    kernels = {name for name in vars(bias_gelu) if name.endswith("_kernel")}
    cases = bias_gelu.compile_cases(arch)
    assert {case.kernel.__name__ for case in cases} == kernels
    assert {case.dtype for case in cases} == {"fp32", "fp16", "bf16"}
    for case in cases:
        assert sorted([*case.signature, *case.constexprs]) == sorted(case.kernel.arg_names)
        assert case.aligned <= case.signature.keys()
        unspecialised = {p.name for p in case.kernel.params if p.do_not_specialize}
        assert unspecialised == {"M", "tiles_m"} & case.signature.keys()
        assert not unspecialised & case.aligned
