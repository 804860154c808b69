"""The QKV projection against three plain products, through its operators and as modules."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.library import opcheck
from torch.nn.utils import parametrize

from fastbert.ops import backend, qkv_projection, stack_qkv
from fastbert.ops.qkv import _choose, _qkv_projection, _qkv_projection_backward_w, _qkv_projection_backward_x

HEADS, INPUTS, FEATURES = 2, 6, 8


def tensors(dtype=torch.float64, rows=5):
    """x [T, K], three weights [N, K], three biases [N]."""
    shapes = [(rows, INPUTS), *[(FEATURES, INPUTS)] * 3, *[(FEATURES,)] * 3]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def three_products(x, wq, wk, wv, bq, bk, bv):
    return torch.cat([F.linear(x, wq, bq), F.linear(x, wk, bk), F.linear(x, wv, bv)], dim=-1)


def linears(dtype=torch.float32, **options):
    return [nn.Linear(INPUTS, FEATURES, dtype=dtype, **options) for _ in range(3)]


def stacked(x, modules):
    return torch.stack([module(x).unflatten(-1, (HEADS, -1)) for module in modules], dim=-3)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_operator_is_three_products_in_value_and_gradient(rows):
    inputs = tensors(rows=rows)
    direction = torch.randn(rows, 3 * FEATURES, dtype=torch.float64)
    results = []
    for function in (_qkv_projection, three_products):
        out = function(*inputs)
        results.append((out, *torch.autograd.grad((out * direction).sum(), inputs)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_gradients_that_nobody_wants_are_not_computed():
    for frozen, expected in [
        ((0,), {"qkv_projection_backward_w"}),
        ((1, 2, 3, 4, 5, 6), {"qkv_projection_backward_x"}),
        ((1, 4), {"qkv_projection_backward_w", "qkv_projection_backward_x"}),
    ]:
        inputs = tensors()
        for index in frozen:
            inputs[index].requires_grad_(False)
        backend._last_run.clear()
        _qkv_projection(*inputs).sum().backward()
        assert backend.last_run().keys() == expected | {"qkv_projection"}
        for index, x in enumerate(inputs):
            assert (x.grad is None) == (index in frozen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_are_registered_as_they_should_be(dtype):
    inputs = tensors(dtype)
    dqkv = torch.randn(5, 3 * FEATURES).to(dtype)
    x, *weights = (t.detach() for t in inputs[:4])
    opcheck(_qkv_projection, inputs)
    opcheck(_qkv_projection_backward_x, (dqkv, *weights))
    opcheck(_qkv_projection_backward_w, (dqkv, x))


@pytest.mark.parametrize("shape", [(INPUTS,), (4, INPUTS), (2, 3, INPUTS), (0, INPUTS)])
def test_any_leading_axes(shape):
    x, modules = torch.randn(shape), linears()
    out = qkv_projection(x, *modules, HEADS)
    assert out.shape == (*shape[:-1], 3, HEADS, FEATURES // HEADS)
    torch.testing.assert_close(out, stacked(x, modules))


# ---- autocast ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("through", ["public", "operator"])
def test_autocast_computes_in_its_dtype_and_gives_gradients_in_the_parameters(through, dtype):
    x, modules = torch.randn(5, INPUTS, requires_grad=True), linears()
    parameters = [p for name in ("weight", "bias") for p in (getattr(m, name) for m in modules)]
    direction = torch.randn(5, 3, HEADS, FEATURES // HEADS)
    results = []
    for plain in (False, True):
        with torch.autocast("cpu", dtype):
            if plain:
                out = stacked(x, modules)
            elif through == "public":
                out = qkv_projection(x, *modules, HEADS)
            else:
                out = _qkv_projection(*(t.to(dtype) for t in (x, *parameters))).view(direction.shape)
            assert out.dtype == dtype
        results.append((out.float(), *torch.autograd.grad((out * direction).sum(), [x, *parameters])))
    for ours, theirs in zip(*results):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, atol=3e-2, rtol=3e-2)


def test_autocast_leaves_fp64_alone():
    x, modules = torch.randn(5, INPUTS).double(), linears(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert qkv_projection(x, *modules, HEADS).dtype == torch.float64


# ---- modules that are more than their weights -------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def lora(linear):
    """What PEFT does: another module in its place, with a low-rank addition."""
    wrapped = nn.Sequential(linear)
    wrapped.register_forward_hook(lambda module, inputs, output: output + inputs[0].sum(-1, keepdim=True))
    return wrapped


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("kind", ["lora", "parametrization", "hook", "pre-hook", "replaced forward"])
def test_a_projection_that_is_no_plain_linear_is_called(kind, position):
    x, modules = torch.randn(4, INPUTS), linears()
    changed = modules[position]
    plain = qkv_projection(x, *modules, HEADS)
    if kind == "lora":
        modules[position] = lora(changed)
    elif kind == "parametrization":
        parametrize.register_parametrization(changed, "weight", Doubled())
    elif kind == "hook":
        changed.register_forward_hook(lambda module, inputs, output: 3 * output)
    elif kind == "pre-hook":
        changed.register_forward_pre_hook(lambda module, inputs: (4 * inputs[0],))
    else:
        changed.forward = lambda x: x.new_ones(x.shape[0], FEATURES)
    out = qkv_projection(x, *modules, HEADS)
    torch.testing.assert_close(out, stacked(x, modules))
    others = [index for index in range(3) if index != position]
    torch.testing.assert_close(out[:, others], plain[:, others])
    assert not torch.allclose(out[:, position], plain[:, position])


def test_projections_without_bias():
    x, modules = torch.randn(4, INPUTS), linears(bias=False)
    torch.testing.assert_close(qkv_projection(x, *modules, HEADS), stacked(x, modules))


# ---- kernel or cuBLASLt -----------------------------------------------------------------------------------


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Tensors on "meta" stand for ones on a GPU; returns the dict of what the tuning table says."""
    linear = pytest.importorskip("fastbert_kernels.linear", reason="triton is not installed")
    table = {}
    monkeypatch.setattr(backend, "implementation", lambda *args, **kwargs: "triton")
    monkeypatch.setattr(linear, "qkv_choice", lambda op, *tensors: table.get(op, linear.CUBLASLT))

    def launched(*args, config=None):
        raise InterruptedError(f"qkv_fwd with {config}")

    monkeypatch.setattr(linear, "qkv_fwd", launched)
    return table


def test_the_tuning_table_chooses_between_the_kernel_and_cublaslt(on_a_gpu):
    x, modules = torch.randn(5, INPUTS, device="meta"), linears(device="meta")
    assert qkv_projection(x, *modules, HEADS).shape == (5, 3, HEADS, FEATURES // HEADS)
    assert backend.last_run()["qkv_projection"] == "cublaslt"
    on_a_gpu["qkv_fwd"] = "a configuration"
    with pytest.raises(InterruptedError, match="qkv_fwd with a configuration"), torch.no_grad():
        qkv_projection(x, *modules, HEADS)
    # each product has its own row
    dqkv, weights = torch.randn(5, 3 * FEATURES, device="meta"), [m.weight for m in modules]
    _, config = _choose("qkv_bwd_dx", dqkv.view(5, 3, FEATURES), *weights)
    assert config is None
    on_a_gpu["qkv_bwd_dx"] = "another"
    assert _choose("qkv_bwd_dx", dqkv.view(5, 3, FEATURES), *weights) == ("triton", "another")


def test_a_forced_kernel_runs_whatever_the_table_says(on_a_gpu):
    x, modules = torch.randn(5, INPUTS, device="meta"), linears(device="meta")
    with backend.use("triton"):
        with pytest.raises(InterruptedError, match="qkv_fwd"), torch.no_grad():
            qkv_projection(x, *modules, HEADS)
        assert _choose("qkv_bwd_dw", x, x) == ("triton", None)


class TestStackedWeights:
    @staticmethod
    def modules(dtype=torch.float32):
        modules = [nn.Linear(6, 8, dtype=dtype) for _ in range(3)]
        x = torch.randn(5, 6, dtype=dtype)
        return modules, x, lambda: torch.stack([m(x) for m in modules], dim=1).view(5, 3, 2, 4)

    def test_no_copy_is_made_and_changes_are_seen(self, monkeypatch):
        modules, x, expected = self.modules()
        parameters = [p for m in modules for p in m.parameters()]
        stack_qkv(*modules)
        assert all(a is b for a, b in zip(parameters, (p for m in modules for p in m.parameters())))
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(torch, "cat", None)  # not called
            torch.testing.assert_close(qkv_projection(x, *modules, 2), expected())
            modules[1].weight.data += 1.0  # no version counter sees this
            modules[2].bias.mul_(2.0)
            torch.testing.assert_close(qkv_projection(x, *modules, 2), expected())
        modules[0].weight.data = torch.randn(8, 6)  # lies elsewhere now
        with torch.no_grad():
            torch.testing.assert_close(qkv_projection(x, *modules, 2), expected())

    def test_gradients_and_conversion(self):
        modules, x, expected = self.modules(torch.float64)
        stack_qkv(*modules)
        parameters = [p for m in modules for p in m.parameters()]
        ours = torch.autograd.grad(qkv_projection(x, *modules, 2).square().sum(), parameters)
        for a, b in zip(ours, torch.autograd.grad(expected().square().sum(), parameters)):
            torch.testing.assert_close(a, b)
        modules = [m.float() for m in modules]
        x = x.float()
        with torch.no_grad():
            plain = torch.stack([m(x) for m in modules], dim=1).view(5, 3, 2, 4)
            torch.testing.assert_close(qkv_projection(x, *modules, 2), plain)
