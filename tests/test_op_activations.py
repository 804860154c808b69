"""Activations by name, the feed-forward half, the norm and the embedding lookups."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN

from fastbert import ops
from fastbert.ops import backend
from fastbert.ops.bias_gelu import _linear_act, _linear_act_backward

FORMS = {"none": F.gelu, "tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}


# values of the erf and the tanh form; the two differ by up to 4.7e-4
@pytest.mark.parametrize(
    ("hidden_act", "expected"),
    [
        ("gelu", [0.84134475, 2.69063917, -0.00936083, -0.15426877]),
        ("gelu_new", [0.84119199, 2.69111241, -0.00888759, -0.15428599]),
        ("gelu_pytorch_tanh", [0.84119199, 2.69111241, -0.00888759, -0.15428599]),
        ("relu", [1.0, 2.7, 0.0, 0.0]),
    ],
)
def test_activation_values(hidden_act, expected):
    x = torch.tensor([[1.0, 2.7, -2.7, -0.5]])
    y = ops.linear_act(x, torch.eye(4), torch.zeros(4), hidden_act)
    torch.testing.assert_close(y, torch.tensor([expected]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("hidden_act", sorted(ops.ACTIVATIONS))
def test_activation_and_its_derivative_match_transformers(hidden_act):
    x = torch.linspace(-6, 6, 241, dtype=torch.float64, requires_grad=True)
    ours, theirs = ops.activation(hidden_act)(x), ACT2FN[hidden_act](x)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)


def test_unknown_activation_is_an_error_and_a_function_is_taken():
    with pytest.raises(ValueError, match="hidden_act 'geluu' is not one of gelu"):
        ops.activation("geluu")
    assert ops.activation(torch.sin) is torch.sin


# ---- the product with bias and activation as an operator --------------------------------------------------


def act_inputs(dtype=torch.float64, bias_dtype=None, rows=5):
    """x [M, K], weight [N, K], bias [N]; the pre-activation is wide enough to reach both flat ends."""
    x, weight, bias = 3 * torch.randn(rows, 6), torch.randn(7, 6), torch.randn(7)
    return [
        t.to(kind).requires_grad_() for t, kind in ((x, dtype), (weight, dtype), (bias, bias_dtype or dtype))
    ]


def operator(x, weight, bias, form):
    return _linear_act(x, weight, bias, form, True)[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_linear_act_in_value_and_gradient(rows, form):
    x, weight, bias = act_inputs(rows=rows)
    direction = torch.randn(rows, 7, dtype=torch.float64)
    results = []
    for y in (operator(x, weight, bias, form), FORMS[form](F.linear(x, weight, bias))):
        results.append((y, *torch.autograd.grad((y * direction).sum(), (x, weight, bias))))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "bias_dtype"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)]
)
def test_the_operators_are_registered_as_they_should_be(dtype, bias_dtype, form):
    x, weight, bias = act_inputs(dtype, bias_dtype)
    opcheck(_linear_act, (x, weight, bias, form, True))
    with torch.no_grad():
        opcheck(_linear_act, (x, weight, bias, form, False))
    dy, h = torch.randn(5, 7).to(dtype), torch.randn(5, 7).to(dtype)
    parameters = [t.detach() for t in (x, weight, bias)]
    for wanted in ((True, True), (False, True), (True, False)):
        opcheck(_linear_act_backward, (dy, *parameters, h, form, *wanted))


@pytest.mark.parametrize("enabled", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_y_has_the_dtype_of_x_and_gradients_that_of_their_tensors(dtype, form, enabled):
    x, weight, bias = act_inputs(dtype, torch.float32)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        y = operator(x, weight, bias, form)
        gradients = torch.autograd.grad(y.float().square().sum(), (x, weight, bias))
    assert y.dtype == dtype and [g.dtype for g in gradients] == [dtype, dtype, torch.float32]
    right = FORMS[form](F.linear(*exact))
    eps = torch.finfo(dtype).eps
    # the product is rounded, and what the activation makes of it
    torch.testing.assert_close(y.double(), right, atol=20 * eps, rtol=2 * eps)
    for ours, theirs in zip(gradients, torch.autograd.grad(right.square().sum(), exact)):
        torch.testing.assert_close(ours.double(), theirs, atol=400 * eps, rtol=20 * eps)


def test_of_the_results_only_the_product_is_saved():
    x, weight, bias = act_inputs(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        operator(x, weight, bias, "none")
    assert [t.data_ptr() for t in saved[:3]] == [x.data_ptr(), weight.data_ptr(), bias.data_ptr()]
    assert len(saved) == 4
    torch.testing.assert_close(saved[3], F.linear(x, weight))


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "all but bias"])
def test_what_wants_no_gradient_costs_none(frozen):
    x, weight, bias = act_inputs()
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        tensor.requires_grad_(name == "bias" if frozen == "all but bias" else name != frozen)
    results = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.fastbert.linear_act_backward.default:
                results.append([t.numel() > 0 for t in result])
            return result

    y = operator(x, weight, bias, "none")
    with Record():
        y.sum().backward()
    assert results == [[x.requires_grad, weight.requires_grad, True]]
    assert [t.grad is not None for t in (x, weight, bias)] == [t.requires_grad for t in (x, weight, bias)]


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "relu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_the_same_bits_in_the_place_of_the_product(hidden_act, dtype):
    x, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((5, 6), (8, 6), (8,)))
    before = [t.clone() for t in (x, weight, bias)]
    ours = ops.linear_act(x, weight, bias, hidden_act)
    assert torch.equal(ours, ops.activation(hidden_act)(F.linear(x, weight, bias)))
    assert torch.equal(ours, ops.linear_act(x, weight.requires_grad_(), bias, hidden_act))
    assert all(torch.equal(a, b) for a, b in zip((x, weight, bias), before))


def test_any_leading_axes():
    for shape in ((6,), (4, 6), (2, 3, 6), (0, 6)):
        x, (_, weight, bias) = torch.randn(shape), act_inputs(torch.float32)
        torch.testing.assert_close(ops.linear_act(x, weight, bias, "gelu"), F.gelu(F.linear(x, weight, bias)))


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "relu", "silu", torch.sin])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_act_compiles_in_full(hidden_act, has_bias):
    torch.compiler.reset()
    x, weight = torch.randn(2, 3, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    bias = torch.randn(7, requires_grad=True) if has_bias else None
    leaves = [t for t in (x, weight, bias) if t is not None]

    def function(x, weight, bias):
        return ops.linear_act(x, weight, bias, hidden_act)

    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        y = run(x, weight, bias)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden_act", ["gelu", "silu"])
def test_linear_act_under_autocast(hidden_act, dtype):
    x, weight, bias = torch.randn(4, 5), torch.randn(7, 5, requires_grad=True), torch.randn(7)
    with torch.autocast("cpu", dtype):
        y = ops.linear_act(x, weight, bias, hidden_act)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    right = ops.activation(hidden_act)(F.linear(x, weight, bias))
    torch.testing.assert_close(y.float(), right, atol=5e-2, rtol=5e-2)


def test_what_goes_to_the_kernel(monkeypatch):
    """Tensors on "meta" stand for ones on a GPU."""
    computed = []

    def compute(chosen, config, x, weight, bias, form, save):
        computed.append((chosen, tuple(x.shape), bias, form, save))
        return x.new_empty(x.shape[0], weight.shape[0]), None

    monkeypatch.setattr(sys.modules["fastbert.ops.bias_gelu"], "_compute", compute)
    monkeypatch.setattr(
        sys.modules["fastbert.ops.bias_gelu"], "_choose", lambda x, weight: ("cublaslt", None)
    )
    with torch.no_grad(), torch.device("meta"):
        x, weight, bias = torch.randn(2, 3, 5), torch.randn(7, 5), torch.randn(7)
        forms = {
            "gelu": "none",
            F.gelu: "none",
            "gelu_new": "tanh",
            "gelu_pytorch_tanh": "tanh",
            "relu": "relu",
        }
        for hidden_act, form in forms.items():
            assert ops.linear_act(x, weight, bias, hidden_act).shape == (2, 3, 7)
            assert computed.pop() == ("cublaslt", (6, 5), bias, form, False)
        for hidden_act in ("silu", "quick_gelu", "tanh", torch.sin):
            ops.linear_act(x, weight, bias, hidden_act)
        ops.linear_act(x, weight, None, "gelu")
    assert not computed


def test_what_ran_is_recorded():
    backend._last_run.clear()
    x, weight, bias = act_inputs()
    ops.linear_act(x, weight, bias, "gelu")
    assert backend.last_run() == {"linear_act": "eager"}
    operator(x, weight, bias, "none").sum().backward()
    assert backend.last_run() == {"linear_act": "eager", "linear_act_backward": "eager"}


# ---- norm and embeddings ----------------------------------------------------------------------------------


# a constant row: the variance is 0 and eps vanishes in half precision; a row of 300s: squares overflow fp16
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [3.0, 300.0])
def test_norm_of_a_constant_row_is_the_bias(dtype, value):
    x = torch.full((2, 768), value, dtype=dtype)
    weight, bias = torch.ones(768, dtype=dtype), torch.full((768,), 0.5, dtype=dtype)
    y = ops.dropout_add_norm(x, None, weight, bias, 1e-12)
    assert torch.equal(y, torch.full_like(y, 0.5))


def test_dropout_add_norm_matches_torch():
    x, residual = torch.randn(5, 33), torch.randn(5, 33)
    weight, bias = torch.randn(33), torch.randn(33)
    y = ops.dropout_add_norm(x, residual, weight, bias, 1e-5, dropout_p=0.3, training=False)
    torch.testing.assert_close(y, F.layer_norm(x + residual, (33,), weight, bias, 1e-5))
    # all of x dropped: only the residual is left
    y = ops.dropout_add_norm(x, residual, weight, bias, 1e-5, dropout_p=1.0, training=True)
    torch.testing.assert_close(y, F.layer_norm(residual, (33,), weight, bias, 1e-5))
