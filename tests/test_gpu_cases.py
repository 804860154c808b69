"""What a card must get right before anything is timed on it: sizes of real models, every dtype, faults that
others met. Without a GPU the same tests run in Triton's interpreter, at tiny sizes; those marked `gpu` need
the card itself: more memory than 2^31 elements, tensor cores, a second device.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

import triton
import triton.language as tl
from fastbert_kernels import attention, attention_bwd, linear, numerics
from fastbert_kernels.linear import qkv_fwd
from fastbert_kernels.linear_dw import qkv_bwd_dw
from fastbert_kernels.linear_dx import qkv_bwd_dx

from fastbert.batch import PackedBatch
from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining
from fastbert.ops import backend
from fastbert.optim import Lamb
from tests import test_kernel_attention as attention_tests
from tests import test_kernel_linear as linear_tests
from tests.kernel_testing import (
    CAN_LAUNCH,
    DEVICE,
    DTYPES,
    in_the_parent_only,
    run_interpreted,
)
from tests.packed_batches import make_batches
from tests.test_model_kernels import batches, loss_and_gradients, tiny_model

ROOT = Path(__file__).parents[1]
ON_GPU = DEVICE == "cuda"
# the widths that exist, and some that are no power of two
HEAD_DIMS = [8, 10, 20, 26, 32, 64, 80, 96, 128] if ON_GPU else [10]
WIDTH = 64 if ON_GPU else 16
FORMATS = DTYPES if ON_GPU else DTYPES[:2]
LAYERS = 2 if ON_GPU else 1
PRECISIONS = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]
# empty ones first and between, one token, a tile and one more token, BERT's limit
LENGTHS = [0, 1, 130, 64, 0, 257, 512] if ON_GPU else [0, 1, 0, 66]
SHORT = [0, 64, 1, 0, 37] if ON_GPU else [0, 16, 1]
# of TF32 products, relative to the largest result: 10 bits of the operands are left
TF32_TOLERANCE = 2e-3


@in_the_parent_only
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def tf32() -> Iterator[None]:
    """fp32 products may use TF32, torch's and the kernels'."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def problem(lengths: list[int], head_dim: int, dtype: torch.dtype, **form: object) -> attention_tests.Problem:
    """A batch whose rows without an owner hold NaN."""
    form.setdefault("num_heads", 2 if ON_GPU else 1)
    p = attention_tests.Problem(lengths, head_dim, dtype, **form)  # type: ignore[arg-type]
    if p.key_mask is not None:
        p.key_mask[: next(n for n in lengths if n)] = False  # a sequence without any key
    owned = int(p.cu_seqlens[-1])
    p.qkv[owned:], p.dout[owned:] = float("nan"), float("nan")
    return p


def needs_free_memory(num_bytes: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < num_bytes:
        pytest.skip(f"needs {num_bytes / 2**30:.0f} GiB of free GPU memory")


# launched as a model launches them: the configuration is the launcher's choice on this device
check_attention = functools.partial(attention_tests.check, config=None, dkdv_config=None)
run_attention = functools.partial(attention_tests.run, config=None, dkdv_config=None)


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr):
    offsets = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    c = numerics.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets), None, "ieee")
    tl.store(c_ptr + offsets, c)


# ---- the model --------------------------------------------------------------------------------------------


def captured(step: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """Replays of a CUDA graph of `step`, with results where the last ones were; on a CPU `step` itself."""
    if not ON_GPU:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return outputs

    return replay


def base_model(**overrides: object) -> BertForPreTraining:
    """BERT-Base without its vocabulary; under the interpreter, of its shape only."""
    sizes = {"vocab_size": 1024}
    if not ON_GPU:
        sizes = {"vocab_size": 61, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 24}
        overrides["num_hidden_layers"] = 1
    fields = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.1, **sizes, **overrides}
    return BertForPreTraining(BertConfig(**fields)).to(DEVICE).train()


def base_batch(seqlens: list[int] | None = None) -> PackedBatch:
    seqlens = seqlens or ([512, 3, 128, 301, 64] if ON_GPU else [9, 3])
    packed, _ = make_batches(seqlens, vocab_size=61, filler=5, empty_ends=2, unused_slots=3)
    return packed.to(DEVICE)


def distance(ours: dict[str, Tensor], right: dict[str, Tensor]) -> Tensor:
    return torch.stack([(ours[name].double() - right[name]).norm() for name in right]).norm()


# ---- in a process of its own, with a kernel cache of its own ----------------------------------------------


def in_new_processes(function: str, cache: Path, count: int = 1) -> list[object]:
    """What `function` of this file returns in `count` processes that start at once with one empty cache."""
    assert not cache.exists()
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    }
    code = f"import json; from tests import test_gpu_cases as t; print(json.dumps(t.{function}()))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, stdout=-1, stderr=-1
        )
        for _ in range(count)
    ]
    said = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        said.append(json.loads(out.splitlines()[-1]))
    assert cache.exists() == ON_GPU  # the interpreter compiles nothing
    return said


def num_binaries() -> int:
    """Compiled kernels in this process's cache."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", "/nonexistent"))
    return sum(1 for suffix in ("cubin", "hsaco") for _ in folder.rglob(f"*.{suffix}"))


def step(model: BertForPreTraining, batch: object, choice: str) -> list[Tensor]:
    """Loss, gradients and updated parameters of one step of LAMB."""
    optimizer = Lamb(model.parameters(), lr=1e-2)
    loss, gradients = loss_and_gradients(model, batch, choice)
    optimizer.step()
    return [loss, *gradients.values(), *(p.detach().clone() for p in model.parameters())]


def first_and_second_steps() -> list[bool | float]:
    """For two lengths: whether the first step with it is the second bit for bit; its distance from eager."""
    said: list[bool | float] = []
    for seqlen in (100, 101) if ON_GPU else (5, 6):
        options = {"max_position_embeddings": 128, "num_hidden_layers": LAYERS}
        model = tiny_model(attention_probs_dropout_prob=0.1, **options)
        batch = batches([seqlen])[0]
        twin, eager = copy.deepcopy(model), copy.deepcopy(model)
        first, second = step(model, batch, "triton"), step(twin, batch, "triton")
        said.append(all(torch.equal(a, b) for a, b in zip(first, second)))
        theirs = step(eager, batch, "eager")[: 1 + len(list(model.parameters()))]
        said.append(max((a - b).abs().max().item() for a, b in zip(first, theirs)))
    return said


def digest_of_a_step() -> str:
    """Of every bit of a step in bf16 with dropout."""
    torch.manual_seed(0)
    model = tiny_model(torch.bfloat16, attention_probs_dropout_prob=0.1, num_hidden_layers=LAYERS)
    results = step(model, batches([40, 17] if ON_GPU else [4])[0], "triton")
    return hashlib.sha256(b"".join(t.double().cpu().numpy().tobytes() for t in results)).hexdigest()


def binaries_by_length() -> list[int]:
    """Compiled kernels after a batch, and after batches of other numbers of tokens and sequences."""
    model = base_model(num_hidden_layers=1)
    counts = []
    for lengths in ([400] * 11, [401] * 11, [512, 77] * 8, [300, 299] * 9) if ON_GPU else ([9], [10]):
        loss_and_gradients(model, base_batch(lengths), "triton")
        counts.append(num_binaries())
    return counts


class TestKernels:
    __test__ = CAN_LAUNCH

    # ---- attention

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("dtype", FORMATS, ids=str)
    def test_attention_in_every_width(self, dtype: torch.dtype, head_dim: int) -> None:
        # tiles of 128 rows, then of 64
        for lengths, form in ((LENGTHS, {}), (SHORT, {"key_mask": True, "dropout_p": 0.1})):
            check_attention(problem(lengths, head_dim, dtype, **form))

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", FORMATS, ids=str)
    def test_attention_with_dropout_and_masked_keys(self, dtype: torch.dtype) -> None:
        check_attention(problem(LENGTHS, WIDTH, dtype, key_mask=True, dropout_p=0.1))
        check_attention(problem(LENGTHS, WIDTH, dtype, dropout_p=0.5))

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_attention_in_tf32(self, head_dim: int, tf32: None) -> None:
        p = problem(LENGTHS, head_dim, torch.float32, dropout_p=0.1)
        out, _, dqkv = run_attention(p)
        exact_out, _, exact_dqkv = p.reference(torch.float64)
        for ours, exact in ((out, exact_out), (dqkv, exact_dqkv)):
            error = (ours.double() - exact).abs().max()
            assert error <= TF32_TOLERANCE * exact.abs().max(), f"{error:.2e}"

    @pytest.mark.parametrize("dtype", FORMATS, ids=str)
    def test_attention_gives_the_same_bits_ten_times(self, dtype: torch.dtype) -> None:
        p = problem(LENGTHS, WIDTH, dtype, dropout_p=0.1)
        first = run_attention(p)
        for _ in range(9 if ON_GPU else 1):
            assert all(
                torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(first, run_attention(p))
            )

    @pytest.mark.parametrize("dtype", FORMATS, ids=str)
    def test_attention_of_long_sequences(self, dtype: torch.dtype) -> None:
        lengths = [8192, 5, 8192 - 63] if ON_GPU else [140, 5]
        check_attention(problem(lengths, WIDTH, dtype, num_heads=1))

    @pytest.mark.gpu
    def test_attention_of_more_elements_than_32_bits_count(self) -> None:
        # sequences of 512, 16 heads of 64: row 699,051 begins beyond element 2^31
        per_row, length = 3 * 16 * 64, 512
        count = 2**31 // (per_row * length) + 2
        needs_free_memory(6 * count * length * per_row)
        total = count * length
        qkv = torch.randn(total, 3, 16, 64, dtype=torch.bfloat16, device=DEVICE)
        dout = torch.randn(total, 16, 64, dtype=torch.bfloat16, device=DEVICE)
        assert qkv.numel() > 2**31

        def both(rows: slice) -> tuple[Tensor, Tensor]:
            q, k, v = qkv[rows].unbind(1)
            cu_seqlens = torch.arange(0, q.shape[0] + 1, length, dtype=torch.int32, device=DEVICE)
            schedule = attention.attention_schedule(cu_seqlens, q.shape[0], length)
            out, lse = attention.attention_fwd(q, k, v, schedule, length)
            return out, attention_bwd.attention_bwd(dout[rows], q, k, v, out, lse, schedule, length)

        whole = both(slice(None))
        for sequence in (0, count // 2, 2**31 // (per_row * length), count - 1):
            rows = slice(sequence * length, (sequence + 1) * length)
            for ours, alone in zip(whole, both(rows)):
                assert torch.equal(ours[rows], alone), f"sequence {sequence}"

    def test_attention_that_is_captured_reads_the_seed_anew(self) -> None:
        p = problem(SHORT, WIDTH, torch.float32, dropout_p=0.1)
        replay = captured(lambda: run_attention(p))
        results = []
        for seed in (5, 6, 5):
            p.seed.fill_(seed)
            results.append(tuple(t.clone() for t in replay()))
            assert all(torch.equal(a, b) for a, b in zip(results[-1], run_attention(p)))
        assert torch.equal(results[0][0], results[2][0]) and not torch.equal(results[0][0], results[1][0])

    # ---- the QKV projection

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_projection_products_of_small_integers_are_exact(self, dtype: torch.dtype) -> None:
        # the interpreter's own bf16 product is off by 1e10
        a, b = (torch.randint(-8, 9, (16, 16), device=DEVICE).to(dtype) for _ in range(2))
        c = torch.full((16, 16), float("nan"), device=DEVICE)
        _dot_kernel[(1,)](a, b, c)
        assert torch.equal(c.double(), a.double() @ b.double())

    @pytest.mark.usefixtures("nan_filled")
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_projection_with_every_candidate(self, dtype: torch.dtype) -> None:
        # BERT-Base's width; rows end inside a tile, and dW's are split
        shape = (4133 if dtype != torch.float32 else 517, 768, 768) if ON_GPU else (33, 64, 64)
        p = linear_tests.Problem(shape, dtype)
        for op, check, launch, tensors in (
            ("qkv_fwd", linear_tests.check_forward, qkv_fwd, (p.x, *p.weights)),
            ("qkv_bwd_dx", linear_tests.check_dx, qkv_bwd_dx, (p.dqkv, *p.weights)),
            ("qkv_bwd_dw", linear_tests.check_dw, qkv_bwd_dw, (p.dqkv, p.x)),
        ):
            pointers = linear._rule(op, "sm_80", linear.DTYPES[dtype], *shape, True)[1]
            for config in dict.fromkeys([*linear.candidates(op, *tensors)[1], *pointers]):
                check(launch, p, config)

    def test_projection_in_tf32(self, tf32: None) -> None:
        p = linear_tests.Problem((517, 768, 768) if ON_GPU else (33, 64, 64), torch.float32)
        y, dx = qkv_fwd(p.x, *p.weights, *p.biases), qkv_bwd_dx(p.dqkv, *p.weights)
        exacts = (p.forward(torch.float64), p.dx(torch.float64), *p.dw(torch.float64))
        for ours, exact in zip((y, dx, *qkv_bwd_dw(p.dqkv, p.x)), exacts):
            assert (ours.double() - exact).abs().max() <= TF32_TOLERANCE * exact.abs().max()

    @pytest.mark.gpu
    def test_projection_of_more_elements_than_32_bits_count(self) -> None:
        # row 932,068 of [T, 3, 768] begins beyond element 2^31
        T, width = 2**31 // 2304 + 200, 768
        needs_free_memory(16 * T * width)
        x = torch.randn(T, width, dtype=torch.bfloat16, device=DEVICE)
        weights = [torch.randn(width, width, dtype=torch.bfloat16, device=DEVICE) / 28 for _ in range(3)]
        biases = [torch.randn(width, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]
        last = slice(T - 256, T)
        by_default = linear.candidates("qkv_fwd", x, *weights)[1][0]
        pointers = linear._rule("qkv_fwd", "sm_80", "bf16", T, width, width, True)[1][0]
        for config in {by_default, pointers}:
            y = qkv_fwd(x, *weights, *biases, config=config)
            assert torch.equal(y[last], qkv_fwd(x[last], *weights, *biases, config=config))
            dx = qkv_bwd_dx(y, *weights, config=config)
            assert torch.equal(dx[last], qkv_bwd_dx(y[last], *weights, config=config))
            y[: T - 256] = 0  # adds zeros to the sums
            for ours, alone in zip(qkv_bwd_dw(y, x, config), qkv_bwd_dw(y[last], x[last], config)):
                # both are rounded once, after another split
                torch.testing.assert_close(ours, alone, rtol=2**-7, atol=2**-7 * alone.abs().max().item())

    # ---- the model

    @pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
    def test_model_is_as_near_to_fp64_as_the_eager_one(self, dtype: torch.dtype) -> None:
        exact = base_model()
        model, batch = copy.deepcopy(exact).to(dtype), base_batch()
        right_loss, right = loss_and_gradients(exact.double(), batch, "eager")
        loss, ours = loss_and_gradients(model, batch, "triton")
        assert set(backend.last_run().values()) == {"triton"}
        eager_loss, theirs = loss_and_gradients(model, batch, "eager")
        assert distance(ours, right) <= 2 * distance(theirs, right)
        budget = 2 * (eager_loss - right_loss).abs() + 4 * torch.finfo(dtype).eps * right_loss
        assert (loss - right_loss).abs() <= budget

    def test_model_replayed_from_a_graph_draws_new_masks(self) -> None:
        model, batch = base_model(num_hidden_layers=2, hidden_dropout_prob=0.1), base_batch()

        def training_step() -> tuple[Tensor, ...]:
            parts = model.loss_parts(batch)
            loss = parts.mlm_sum / parts.mlm_count + parts.nsp_sum / parts.nsp_count
            return (loss.detach(), *torch.autograd.grad(loss, list(model.parameters())))

        with backend.use("triton"):
            replay = captured(training_step)
            results = []
            for seed in (5, None, 5):
                if seed is not None:
                    torch.manual_seed(seed)
                results.append([t.clone() for t in replay()])
            torch.manual_seed(5)
            results.append(list(training_step()))
        first, second, again, uncaptured = results
        assert first[0] != second[0]
        assert first[0] == again[0]
        # cuBLAS may split its sums in another way; another mask would be of the size of the gradients
        for others in (again, uncaptured):
            for ours, theirs in zip(first, others):
                scale = theirs.abs().max().item()
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * scale)

    @pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
    def test_model_compiled_is_as_near_to_fp64_as_the_eager_one(self, dtype: torch.dtype) -> None:
        torch.compiler.reset()
        model = base_model(num_hidden_layers=2, attention_probs_dropout_prob=0.0).to(dtype)
        batch = base_batch()
        right = loss_and_gradients(copy.deepcopy(model).double(), batch, "eager")[1]
        theirs = loss_and_gradients(model, batch, "eager")[1]
        # inductor compiles the operations between the kernels; on a CPU it takes minutes
        compiler = "inductor" if ON_GPU else "aot_eager"
        model.loss_parts = torch.compile(model.loss_parts, fullgraph=True, backend=compiler)  # type: ignore[method-assign]
        ours = loss_and_gradients(model, batch, "triton")[1]
        assert set(backend.last_run().values()) == {"triton"}
        assert distance(ours, right) <= 2 * distance(theirs, right)
        torch.compiler.reset()

    def test_model_gives_the_same_bits_ten_times(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # torch asks for it: cuBLAS is deterministic with a workspace of its own only
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        seqlens = [384] * 4 if ON_GPU else [12, 9]
        model = base_model(num_hidden_layers=2, hidden_dropout_prob=0.1).bfloat16()
        batch = base_batch(seqlens)
        torch.use_deterministic_algorithms(True)
        try:
            first = loss_and_gradients(model, batch, "triton")
            for _ in range(9 if ON_GPU else 1):
                again = loss_and_gradients(model, batch, "triton")
                assert torch.equal(first[0], again[0])
                for name, gradient in first[1].items():
                    assert torch.equal(gradient, again[1][name]), name
        finally:
            torch.use_deterministic_algorithms(False)

    def test_model_steps_first_as_second_with_a_cold_cache(self, tmp_path: Path) -> None:
        said = (
            in_new_processes("first_and_second_steps", tmp_path / "cache")[0]
            if ON_GPU
            else first_and_second_steps()
        )
        assert said[0] is said[2] is True, said  # type: ignore[index]
        assert max(said[1], said[3]) < 2e-4, said  # type: ignore[index]

    def test_model_is_the_same_in_processes_with_one_cold_cache(self, tmp_path: Path) -> None:
        if not ON_GPU:
            digests: list[object] = [digest_of_a_step() for _ in range(2)]
        else:
            caches = [tmp_path / f"cache-{number}" for number in range(3)]
            digests = [d for cache in caches for d in in_new_processes("digest_of_a_step", cache, 4)]
        assert len(set(digests)) == 1, digests

    def test_model_compiles_nothing_for_another_number_of_tokens(self, tmp_path: Path) -> None:
        counts = (
            in_new_processes("binaries_by_length", tmp_path / "cache")[0] if ON_GPU else binaries_by_length()
        )
        assert len(set(counts)) == 1, counts  # type: ignore[arg-type]
        assert not ON_GPU or counts[0] >= 6  # type: ignore[index]

    @pytest.mark.gpu
    def test_model_on_a_second_gpu(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("this machine has one GPU")
        results = []
        for device in ("cuda:0", "cuda:1"):
            torch.manual_seed(0)
            model = base_model(num_hidden_layers=2, attention_probs_dropout_prob=0.0).to(device)
            assert torch.cuda.current_device() == 0
            results.append([t.cpu() for t in step(model, base_batch().to(device), "triton")])
        for ours, right in zip(*reversed(results)):
            torch.testing.assert_close(ours, right)


# ---- no kernel runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "kernels"),
    [
        (attention, ["_attention_fwd_kernel"]),
        (attention_bwd, ["_attention_dq_kernel", "_attention_dkdv_kernel"]),
    ],
    ids=["forward", "backward"],
)
@in_the_parent_only
def test_attention_launches_on_the_tensors_device(
    module: ModuleType, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one GPU can show of two: every launch is under the guard."""
    recorder = linear_tests.Recorder()
    for name in ("device_guard", *kernels):
        monkeypatch.setattr(module, name, recorder)
    monkeypatch.setattr(attention, "check_can_launch", lambda kernel, x: None)
    qkv = torch.zeros(5, 3, 2, 16)
    schedule = attention.attention_schedule(torch.tensor([0, 5], dtype=torch.int32), 5, 5)
    if module is attention:
        attention.attention_fwd(*qkv.unbind(1), schedule, 5)
    else:
        out, lse = torch.zeros(5, 2, 16), torch.zeros(2, 5)
        attention_bwd.attention_bwd(out, *qkv.unbind(1), out, lse, schedule, 5)
    assert [depth for depth, _ in recorder.launches] == [1] * len(kernels) and recorder.depth == 0


def test_the_declared_versions_of_triton_begin_where_the_tested_ones_do() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (declared,) = (d for d in project["dependencies"] if d.startswith("triton"))
    (major, minor), _ = backend.TESTED_TRITON
    assert declared.startswith(f"triton>={major}.{minor};"), declared
