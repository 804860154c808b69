"""Block sizes, the device guard and the place check of the kernel launchers, without a GPU."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import bias_gelu
from fastbert_kernels.launch import (
    ARCHITECTURES,
    LaunchConfig,
    column_block,
    column_sum_config,
    device_guard,
    elementwise_config,
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
