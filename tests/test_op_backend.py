"""Which implementation runs: forcing it, asking for it, and what is said when it cannot."""

import importlib
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from fastbert import ops
from fastbert.errors import UserError
from fastbert.modeling import BertForPreTraining
from fastbert.ops import SequenceLayout, backend
from fastbert.ops.backend import EagerFallbackWarning
from tests.packed_batches import make_batches
from tests.small_models import small_config, spread_weights

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HEADS, DIM = 2, 16


def forget():
    backend._decide.cache_clear()
    backend._device_problem.cache_clear()
    backend._said.clear()
    backend._last_run.clear()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No earlier decision, warning or choice, now and afterwards; a CPU without the interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    forget()
    with backend.use("auto"):
        yield
    forget()


@pytest.fixture
def gpu(monkeypatch):
    """An H200, for what only asks about one; returns a function that makes it another GPU."""
    pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def capability(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        forget()

    capability(9, 0)
    return capability


def inputs(dtype=torch.float32, total=9):
    qkv = torch.randn(total, 3, HEADS, DIM).to(dtype).requires_grad_()
    return qkv, SequenceLayout.build(torch.tensor([0, 4, 9], dtype=torch.int32), 5, total)


# ---- choosing ---------------------------------------------------------------------------------------------


def test_use_is_a_call_and_a_context():
    qkv, layout = inputs()
    with backend.use("triton"), pytest.raises(UserError):
        ops.varlen_attention(qkv, layout)
    ops.varlen_attention(qkv, layout)  # the choice before came back
    with backend.use("eager"):
        with backend.use("triton"):
            assert backend.is_forced("triton")
        assert backend.is_forced("eager")
    with pytest.raises(RuntimeError, match="inside"), backend.use("triton"):
        raise RuntimeError("inside")
    assert backend.is_forced("auto")
    backend.use("eager")
    assert backend.explain("attention", CPU, torch.float32).reason == 'chosen by backend.use("eager")'
    with pytest.raises(ValueError, match="'cuda' is not one of auto, eager, triton, flash_attn"):
        backend.use("cuda")
    assert backend.is_forced("eager")


def test_a_cpu_runs_eagerly_and_says_nothing():
    qkv, layout = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.varlen_attention(qkv, layout)
    decision = backend.explain("attention", "cpu", torch.float32, 64)
    assert decision.implementation == "eager" and not decision.is_fallback
    assert "TRITON_INTERPRET=1" in decision.reason
    assert backend.last_run() == {"attention": "eager"}
    assert layout.schedule is None


def test_forced_kernels_that_cannot_run_are_one_clear_error():
    qkv, layout = inputs()
    linears = [nn.Linear(8, 8) for _ in range(3)]
    with backend.use("triton"):
        with pytest.raises(UserError, match=r"attention cannot run on triton: .* need TRITON_INTERPRET=1"):
            ops.varlen_attention(qkv, layout)
        with pytest.raises(UserError, match=r"qkv_projection cannot run on triton: .* TRITON_INTERPRET=1"):
            ops.qkv_projection(torch.randn(3, 8), *linears, 2)
        with pytest.raises(UserError, match="no version for meta"):
            ops.varlen_attention(qkv.to("meta"), layout)
    assert backend.last_run() == {}


def test_the_path_does_not_depend_on_dropout_or_training():
    model = BertForPreTraining(small_config(attention_probs_dropout_prob=0.1))
    batch = make_batches([5, 9], vocab_size=211)[0]
    runs = []
    for training in (True, False):
        model.train(training)
        forget()
        with torch.set_grad_enabled(training):
            model.loss_parts(batch)
        runs.append(backend.last_run())
    assert runs[0] == runs[1] and runs[0].items() >= {"attention": "eager", "qkv_projection": "eager"}.items()


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "reason"),
    [
        ((9, 0), torch.bfloat16, 64, ""),
        ((8, 0), torch.float16, 128, ""),
        ((12, 0), torch.float32, None, ""),
        ((9, 0), torch.float64, 64, "take float32, float16 and bfloat16, not float64"),
        ((9, 0), torch.float32, 129, "a head is 129 wide, and the Triton kernel takes at most 128"),
        ((7, 5), torch.float16, 64, "compute capability 7.5, but the Triton kernels need 8.0"),
    ],
)
def test_a_gpu_runs_the_kernels_or_says_why_not(capability, dtype, head_dim, reason, gpu):
    gpu(*capability)
    decision = backend.explain("attention", GPU, dtype, head_dim)
    assert (decision.implementation, decision.is_fallback) == (
        ("eager", True) if reason else ("triton", False)
    )
    assert reason in decision.reason
    with backend.use("triton"):
        if reason:
            with pytest.raises(UserError, match=f"attention cannot run on triton: .*{reason}"):
                backend.explain("attention", GPU, dtype, head_dim)
        else:
            assert backend.explain("attention", GPU, dtype, head_dim).implementation == "triton"


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0", "3.7.1", "3.9.0+git123", "3.10.0", "4.0.0", "strange"])
def test_only_tested_versions_of_triton_run(version, gpu, monkeypatch):
    monkeypatch.setattr(importlib.import_module("triton"), "__version__", version)
    decision = backend.explain("attention", GPU, torch.bfloat16, 64)
    if version[:3] in ("3.6", "3.7", "3.9"):
        assert decision.implementation == "triton"
    else:
        assert decision.implementation == "eager" and decision.is_fallback
        assert f"Triton {version} is not among" in decision.reason
        assert "install triton>=3.6,<3.10" in decision.reason


def test_without_triton_a_gpu_runs_eagerly(gpu, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name)
    )
    assert "pip install triton" in backend.explain("attention", GPU, torch.bfloat16, 64).reason
    assert not backend.kernels_expected(GPU)


def test_what_falls_back_on_a_gpu_is_named_once(gpu):
    half, double = (types.SimpleNamespace(device=GPU, dtype=dtype) for dtype in (torch.half, torch.double))
    with pytest.warns(EagerFallbackWarning, match=r"attention runs on eager: .* not float64") as seen:
        ran = [backend.implementation("attention", double, 64) for _ in range(3)]
    assert ran == ["eager"] * 3 and len(seen) == 1
    with pytest.warns(EagerFallbackWarning, match="qkv_projection runs on eager") as seen:
        assert backend.implementation("qkv_projection", double) == "eager"
    with pytest.warns(EagerFallbackWarning, match="attention runs on eager: a wish") as seen:
        ran = [backend.implementation("attention", half, 64, beyond_kernels="a wish") for _ in range(3)]
    assert ran == ["eager"] * 3 and len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend.implementation("attention", half, 64, key_mask=True) == "triton"


def test_wishes_that_only_eager_fulfils_are_silent_on_a_cpu():
    qkv = torch.randn(2, 5, 3, HEADS, DIM)
    layout = ops.PaddedLayout.build(torch.zeros(2, 1, 5, 5), 2, 5, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.padded_attention(qkv, layout, need_probabilities=True)
    assert backend.last_run() == {"attention": "eager"}


# ---- running ----------------------------------------------------------------------------------------------


def test_the_registration_is_left_out_only_where_nothing_needs_it():
    plain, wanted = torch.ones(1), torch.ones(1, requires_grad=True)

    def run(implementation, *inputs):
        paths = {name: lambda name=name: name for name in ("registered", "launch", "eager")}
        return backend.call(implementation, inputs, **paths)

    for implementation in ("eager", "cublaslt"):
        assert run(implementation, plain) == run(implementation, wanted) == "eager"
    assert run("triton", plain) == "launch"
    assert run("triton", plain, wanted) == "registered"
    with torch.no_grad():
        assert run("triton", wanted) == "launch"
    compiled = torch.compile(
        lambda: run("eager", plain) + run("triton", plain), backend="eager", fullgraph=True
    )
    assert compiled() == "registered" * 2


def test_importing_loads_neither_triton_nor_the_compiler():
    code = "import sys, fastbert, fastbert.modeling; print({'triton', 'torch._dynamo'} & sys.modules.keys())"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert child.stdout == "set()\n"


# ---- flash-attn -------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that puts a module called flash_attn on the path."""

    def make(source):
        (tmp_path / "flash_attn.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
        importlib.invalidate_caches()

    yield make
    sys.modules.pop("flash_attn", None)


ATTENTION = """
import torch

__version__ = "2.8.3"
calls = []


class _GarbageInGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_owned):
        ctx.save_for_backward(is_owned)
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx.masked_fill(~ctx.saved_tensors[0][:, None, None, None], float("nan")), None


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):
    assert cu_seqlens.dtype == torch.int32 and not causal
    calls.append((max_seqlen, dropout_p, softmax_scale, deterministic))
    qkv = _GarbageInGradient.apply(qkv, torch.arange(len(qkv)) < cu_seqlens[-1])
    out = torch.full_like(qkv[:, 0], float("nan"))
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        q, k, v = qkv[start:end].permute(1, 2, 0, 3).float()
        scores = q @ k.transpose(-1, -2) * softmax_scale
        context = (scores.softmax(-1) @ v).transpose(0, 1).to(qkv.dtype)
        out = torch.cat([out[:start], context, out[end:]])
    return out
"""


def test_flash_attn_runs_where_it_is_chosen(package, monkeypatch):
    monkeypatch.setattr(backend, "FLASH_ATTN_DEVICES", ("cpu",))
    package(ATTENTION)
    qkv, layout = inputs(torch.float16, total=12)
    with torch.no_grad():
        qkv[9:] = float("nan")
    results = []
    for choice in ("flash_attn", "eager"):
        with backend.use(choice):
            out = ops.varlen_attention(qkv, layout)
            (dqkv,) = torch.autograd.grad(out.sum(), qkv)
        assert backend.last_run()["attention"] == choice
        assert not out[9:].any() and not dqkv[9:].any()
        results.append((out, dqkv))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=0)
    with backend.use("flash_attn"):
        torch.use_deterministic_algorithms(True)
        try:
            ops.varlen_attention(qkv, layout, dropout_p=0.25)
        finally:
            torch.use_deterministic_algorithms(False)
    import flash_attn

    assert flash_attn.calls == [(5, 0.0, DIM**-0.5, False), (5, 0.25, DIM**-0.5, True)]


def test_a_whole_model_runs_on_flash_attn(package, monkeypatch):
    monkeypatch.setattr(backend, "FLASH_ATTN_DEVICES", ("cpu",))
    package(ATTENTION)
    model = BertForPreTraining(small_config()).bfloat16().eval()
    spread_weights(model)
    packed, padded = make_batches([5, 9, 2], vocab_size=211)
    expected = model.bert(packed).last_hidden_state.float()
    with backend.use("flash_attn"):
        for args in ((packed,), (padded.input_ids, padded.attention_mask, padded.token_type_ids)):
            hidden = model.bert(*args).last_hidden_state.float()
            kept = hidden if hidden.dim() == 2 else hidden[padded.attention_mask]
            assert (kept - expected).abs().max() < 0.1
        assert backend.last_run()["attention"] == "flash_attn"
        assert backend.last_run()["qkv_projection"] == "eager"
        # what flash-attn does not take
        model.set_attn_implementation("eager")
        with pytest.warns(EagerFallbackWarning, match="attention runs on eager: flash-attn takes no mask"):
            model.bert(padded.input_ids, padded.attention_mask)
        with pytest.warns(EagerFallbackWarning, match="attention runs on eager: probabilities are wanted"):
            model.bert(padded.input_ids, padded.attention_mask, output_attentions=True)
        assert backend.last_run()["attention"] == "eager"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "has no flash_attn_varlen_qkvpacked_func: install flash-attn 2.7 or newer"),
        ("flash_attn_varlen_qkvpacked_func = print", "version of flash_attn is unknown: install"),
        (ATTENTION.replace("2.8.3", "2.6.3"), "the version of flash_attn is 2.6.3: install flash-attn 2.7"),
        ("import libcudart_of_another_torch", "flash_attn cannot be imported: No module named 'libcudart"),
    ],
)  # fmt: skip
def test_a_module_that_only_has_the_name_is_recognised(source, problem, package):
    package(source)
    qkv, layout = inputs(torch.float16)
    with backend.use("flash_attn"), pytest.raises(UserError, match=f"cannot run on flash_attn: .*{problem}"):
        ops.varlen_attention(qkv, layout)
    # and harms nobody who did not choose it
    assert ops.varlen_attention(qkv, layout).isfinite().all()


def test_flash_attn_says_what_it_does_not_take(package, monkeypatch):
    if importlib.util.find_spec("flash_attn") is None:
        qkv, layout = inputs(torch.float16)
        with (
            backend.use("flash_attn"),
            pytest.raises(UserError, match="flash-attn is not installed: pip install"),
        ):
            ops.varlen_attention(qkv, layout)
    package(ATTENTION)
    with backend.use("flash_attn"):
        for device, dtype, head_dim, problem in [
            (CPU, torch.half, 64, "it needs a GPU, and the tensors are on cpu"),
            (GPU, torch.float32, 64, "it takes float16 and bfloat16, not float32"),
            (GPU, torch.half, 264, "a head is 264 wide, and it takes at most 256"),
        ]:
            with pytest.raises(UserError, match=f"attention cannot run on flash_attn: {problem}"):
                backend.explain("attention", device, dtype, head_dim)
        assert backend.explain("attention", GPU, torch.half, 256).implementation == "flash_attn"
