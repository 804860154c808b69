"""LayerNorm(residual + dropout(x + bias)) as an operator and as the modules that it replaces."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.library import opcheck
from torch.nn.utils import parametrize

from fastbert import ops
from fastbert.modeling import BertModel
from fastbert.ops import backend, philox
from fastbert.ops.dropout_add_norm import (
    _dropout_add_norm,
    _dropout_add_norm_backward,
    dropout_noise,
)
from tests.packed_batches import make_batches
from tests.small_models import small_config

WIDTH = 10
SEED = 2**40 + 3


def tensors(dtype=torch.float64, other=None, rows=5):
    """x, residual [M, H], x_bias, weight, bias [H]; all but x of `other`."""
    shapes = [(rows, WIDTH), (rows, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,)]
    dtypes = [dtype] + [other or dtype] * 4
    return [torch.randn(shape).to(kind).requires_grad_() for shape, kind in zip(shapes, dtypes)]


def reference(x, residual, x_bias, weight, bias, seed=None, dropout_p=0.0, eps=1e-12):
    h = x if x_bias is None else x + x_bias
    if seed is not None:
        h = h * dropout_noise(seed, *x.shape, dropout_p, torch.float64)
    h = h if residual is None else h + residual
    centred = h - h.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def public(x, residual, x_bias, weight, bias, seed=None, dropout_p=0.0, eps=1e-12, fp32_out=False):
    return ops.dropout_add_norm(x, residual, weight, bias, eps, dropout_p, x_bias=x_bias, fp32_out=fp32_out)


def registered(x, residual, x_bias, weight, bias, seed=None, dropout_p=0.0, eps=1e-12, fp32_out=False):
    return _dropout_add_norm(x, residual, x_bias, weight, bias, eps, seed, dropout_p, fp32_out)[0]


@pytest.fixture
def fixed_seed(monkeypatch):
    seed = torch.tensor([SEED])
    monkeypatch.setattr(philox, "draw_seed", lambda device: seed)
    return seed


@pytest.mark.parametrize("dropout_p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("form", ["residual bias", "residual", "bias", ""])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("norm", [public, registered], ids=["public", "operator"])
def test_value_and_gradients(norm, rows, form, dropout_p, fixed_seed):
    inputs = tensors(rows=rows)
    if "residual" not in form:
        inputs[1] = None
    if "bias" not in form:
        inputs[2] = None
    leaves = [t for t in inputs if t is not None]
    direction = torch.randn(rows, WIDTH, dtype=torch.float64)
    seed = fixed_seed if dropout_p else None
    results = []
    for function in (norm, reference):
        y = function(*inputs, seed, dropout_p)
        # without a residual, everything dropped leaves a constant row, whose gradient is multiplied by 1e6
        results.append((y, *torch.autograd.grad((y * direction).sum(), leaves)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "other"), [(torch.float32, None), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("form", ["residual bias", ""])
def test_the_operators_are_registered_as_they_should_be(form, dtype, other, dropout_p):
    x, residual, x_bias, weight, bias = tensors(dtype, other)
    if not form:
        residual = x_bias = None
    seed = torch.tensor([SEED]) if dropout_p else None
    for fp32_out in (False, True):
        opcheck(_dropout_add_norm, (x, residual, x_bias, weight, bias, 1e-5, seed, dropout_p, fp32_out))
    leaves = [None if t is None else t.detach() for t in (x, residual, x_bias, weight, bias)]
    x, residual, x_bias, weight, bias = leaves
    y, mean, rstd = _dropout_add_norm(x, residual, x_bias, weight, bias, 1e-5, seed, dropout_p, False)
    dy = torch.randn_like(y)
    opcheck(_dropout_add_norm_backward, (dy, x, residual, x_bias, weight, mean, rstd, seed, dropout_p))


@pytest.mark.parametrize("shape", [(WIDTH,), (4, WIDTH), (2, 3, WIDTH), (0, WIDTH)])
def test_any_leading_axes(shape):
    x, residual, weight, bias = torch.randn(shape), torch.randn(shape), *torch.randn(2, WIDTH)
    y = ops.dropout_add_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(y, F.layer_norm(x + residual, (WIDTH,), weight, bias, 1e-5))


# ---- dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("norm", [public, registered], ids=["public", "operator"])
def test_y_has_the_dtype_of_x_and_gradients_that_of_their_tensors(norm, dtype, other, enabled, fixed_seed):
    inputs = tensors(dtype, other)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    direction = torch.randn(5, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        y = norm(*inputs, fixed_seed, 0.3)
        gradients = torch.autograd.grad((y * direction).sum(), inputs)
    right = reference(*exact, fixed_seed, 0.3)
    right_gradients = torch.autograd.grad((right * direction).sum(), exact)
    assert y.dtype == dtype
    # one rounding: the sum is not rounded before it is normalised
    eps = torch.finfo(dtype).eps
    assert (y.double() - right).abs().max() <= max(eps, 1e-6) * right.abs().max()
    for ours, given, theirs in zip(gradients, inputs, right_gradients):
        assert ours.dtype == given.dtype
        torch.testing.assert_close(ours.double(), theirs, atol=10 * eps, rtol=10 * eps)


def test_the_model_under_autocast_computes_in_its_dtype_and_answers_in_fp32():
    model, seen = BertModel(small_config()), []
    layer = model.encoder.layer[0]
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(make_batches([5, 9], vocab_size=211)[0], output_hidden_states=True)
    assert seen == [torch.bfloat16]
    assert [h.dtype for h in out.hidden_states] == [torch.float32, torch.bfloat16, torch.float32]
    assert out.last_hidden_state.dtype == torch.float32
    # what autocast leaves alone stays as it is
    with torch.autocast("cpu", torch.bfloat16):
        out = model.double()(make_batches([5, 9], vocab_size=211)[0])
    assert out.last_hidden_state.dtype == torch.float64


@pytest.mark.parametrize("norm", [public, registered], ids=["public", "operator"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fp32_out_is_fp32_at_least_and_not_rounded(norm, dtype, fixed_seed):
    inputs = tensors(dtype)
    y = norm(*inputs, fixed_seed, 0.3, fp32_out=True)
    assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    right = reference(*(t.double() for t in inputs), fixed_seed, 0.3)
    torch.testing.assert_close(y.double(), right, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(y.square().sum(), inputs)
    assert {g.dtype for g in gradients} == {dtype}


def test_dtypes_that_no_kernel_takes_together_are_widened(monkeypatch):
    """fp32 from a module in the dense's place, beside a bf16 residual and bf16 parameters."""
    if backend.kernels_expected(torch.device("cpu")):
        pytest.skip("the interpreter runs kernels on a CPU")
    inputs = tensors(torch.float32, torch.bfloat16)
    seen = []
    module = sys.modules[dropout_noise.__module__]
    operator = module._dropout_add_norm
    monkeypatch.setattr(module, "_dropout_add_norm", lambda *a: seen.extend(a[:5]) or operator(*a))
    monkeypatch.setattr(backend, "call", lambda *args, registered, **kwargs: registered())
    y = public(*inputs)
    assert y.dtype == torch.float32 and {t.dtype for t in seen} == {torch.float32}
    assert {g.dtype for g in torch.autograd.grad(y.sum(), inputs[1:])} == {torch.bfloat16}


# ---- dropout ----------------------------------------------------------------------------------------------


def test_dropped_share_and_scale():
    noise = dropout_noise(torch.tensor([SEED]), 130, 1000, 0.1, torch.float32)
    assert abs((noise == 0).float().mean() - 0.1) < 0.004
    assert noise.unique().tolist() == pytest.approx([0.0, 1 / 0.9])
    # independent of neighbours, also of those that come from one Philox call
    kept = noise > 0
    for lag in range(1, 9):
        assert abs((kept[:, lag:] == kept[:, :-lag]).float().mean() - 0.82) < 0.01
    assert abs((kept[1:] == kept[:-1]).float().mean() - 0.82) < 0.01
    for other in (SEED + 1, SEED + 2**32):
        another = dropout_noise(torch.tensor([other]), 130, 1000, 0.1, torch.float32) > 0
        assert abs((kept == another).float().mean() - 0.82) < 0.01


def test_noise_is_philox_at_the_place_and_made_in_pieces(monkeypatch):
    module = sys.modules[dropout_noise.__module__]
    seed = torch.tensor([-SEED])
    whole = dropout_noise(seed, 70, 21, 0.5, torch.float64)
    monkeypatch.setattr(module, "_CPU_PIECE", 100)
    assert torch.equal(dropout_noise(seed, 70, 21, 0.5, torch.float64), whole)
    assert torch.equal(dropout_noise(seed, 3, 5, 0.5, torch.float64), whole[:3, :5])
    # row 7, column 19 = 8 * 2 + 3: the upper half of word 1 of the counter (2, 7, 0, 0)
    key = ((-SEED) & 0xFFFFFFFF, ((-SEED) >> 32) & 0xFFFFFFFF)
    words = philox.philox4x32(tuple(torch.tensor(c) for c in (2, 7, 0, 0)), key)
    bits = (int(words[1]) & 0xFFFFFFFF) >> 16
    assert whole[7, 19] == (2.0 if bits >= 2**15 else 0.0)


def test_dropout_follows_the_generator_and_training():
    x, residual, weight, bias = torch.randn(50, 40), torch.randn(50, 40), *torch.randn(2, 40)

    def run(**options):
        return ops.dropout_add_norm(x, residual, weight, bias, 1e-5, 0.1, **options)

    torch.manual_seed(5)
    first, second = run(), run()
    unrelated = torch.empty(1000).normal_(generator=torch.Generator())
    torch.manual_seed(5)
    assert torch.equal(first, run()) and not torch.equal(first, second) and unrelated.any()
    state = torch.get_rng_state()
    still = run(training=False)
    assert torch.equal(still, F.layer_norm(x + residual, (40,), weight, bias, 1e-5))
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"dropout_p 1\.5 is not a probability"):
        ops.dropout_add_norm(x, residual, weight, bias, 1e-5, 1.5)


def test_gradcheck_through_dropout(fixed_seed):
    inputs = tensors(rows=3)
    assert torch.autograd.gradcheck(lambda *t: registered(*t, fixed_seed, 0.3, 1e-2), inputs)
    assert torch.autograd.gradcheck(lambda *t: public(*t, fixed_seed, 0.3, 1e-2), inputs)


# ---- torch.compile ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("has_residual", [True, False])
def test_compiled_in_full(has_residual, dropout_p):
    torch.compiler.reset()
    modules = nn.Linear(6, WIDTH), nn.Dropout(dropout_p), nn.LayerNorm(WIDTH)
    x, residual = torch.randn(2, 3, 6), torch.randn(2, 3, WIDTH)
    parameters = [*modules[0].parameters(), *modules[2].parameters()]

    def norm(x, residual):
        if has_residual:
            return ops.dense_dropout_add_norm(x, modules[0], modules[1], residual, modules[2])
        return ops.layer_norm(modules[0](x), modules[2])

    results = []
    for function in (norm, torch.compile(norm, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        y = function(x, residual)
        results.append((y, *torch.autograd.grad(y.square().sum(), parameters)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.compiler.reset()


# ---- modules ----------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("position", [0, 1, 2], ids=["dense", "dropout", "norm"])
@pytest.mark.parametrize("kind", ["hook", "pre-hook", "replaced forward", "parametrization", "subclass"])
def test_a_module_that_is_more_than_plain_is_called(kind, position):
    plain = [nn.Linear(6, WIDTH), nn.Dropout(0.0), nn.LayerNorm(WIDTH)]
    modules = copy.deepcopy(plain)
    changed = modules[position]
    x, residual = torch.randn(4, 6), torch.randn(4, WIDTH)
    if kind == "hook":
        changed.register_forward_hook(lambda module, inputs, output: 3 * output)
    elif kind == "pre-hook":
        changed.register_forward_pre_hook(lambda module, inputs: (4 * inputs[0] + 1,))
    elif kind == "replaced forward":
        changed.forward = lambda x: x.new_ones(4, WIDTH)
    elif kind == "parametrization":
        if position == 1:
            pytest.skip("dropout has no parameter")
        parametrize.register_parametrization(changed, "weight", Doubled())
    else:
        changed.__class__ = type("Sub", (type(changed),), {"forward": lambda self, x: x.new_ones(4, WIDTH)})
    dense, dropout, norm = modules
    expected = norm(dropout(dense(x)) + residual)
    y = ops.dense_dropout_add_norm(x, dense, dropout, residual, norm)
    torch.testing.assert_close(y, expected)
    if not (kind == "pre-hook" and position == 2):  # a norm does not see a scale
        assert not torch.allclose(y, ops.dense_dropout_add_norm(x, plain[0], plain[1], residual, plain[2]))
    if position == 2:
        states = torch.randn(4, WIDTH)
        torch.testing.assert_close(ops.layer_norm(states, norm), norm(states))


def test_a_norm_without_parameters_and_a_dense_without_bias():
    x, residual = torch.randn(4, 6), torch.randn(4, WIDTH)
    dropout, bare = nn.Dropout(0.5).eval(), nn.LayerNorm(WIDTH, elementwise_affine=False)
    dense = nn.Linear(6, WIDTH, bias=False)
    for norm in (bare, nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH)):
        y = ops.dense_dropout_add_norm(x, dense, dropout, residual, norm)
        torch.testing.assert_close(y, norm(dense(x) + residual))


# ---- the backend ------------------------------------------------------------------------------------------


def test_a_row_too_wide_for_the_kernel_runs_eagerly_and_says_so(monkeypatch):
    if backend.kernels_expected(torch.device("cpu")):
        pytest.skip("the interpreter runs kernels on a CPU")
    # as a GPU would decide
    decision = backend.Decision("triton", "the Triton kernels run on cuda")
    monkeypatch.setattr(backend, "_decide", lambda *args: decision)
    backend._said.clear()
    x, (weight, bias) = torch.randn(2, 8200), torch.randn(2, 8200)
    with pytest.warns(
        backend.EagerFallbackWarning, match="dropout_add_norm runs on eager: a row is 8200 wide"
    ):
        y = ops.dropout_add_norm(x, None, weight, bias, 1e-5)
    torch.testing.assert_close(y, F.layer_norm(x, (8200,), weight, bias, 1e-5))
    backend._said.clear()


def test_what_ran_is_recorded():
    backend._last_run.clear()
    x, residual, x_bias, weight, bias = tensors()
    public(x, residual, x_bias, weight, bias)
    assert backend.last_run() == {"dropout_add_norm": "eager"}
    registered(x, residual, x_bias, weight, bias).sum().backward()
    assert backend.last_run() == {"dropout_add_norm": "eager", "dropout_add_norm_backward": "eager"}


def test_the_bias_of_the_dense_goes_to_the_kernel(monkeypatch):
    """Tensors on "meta" stand for ones on a GPU."""
    launched = []

    def launch(x, residual, x_bias, *rest):
        launched.append(x_bias)
        return x.new_empty(x.shape), x.new_empty(x.shape[0]), x.new_empty(x.shape[0])

    monkeypatch.setattr(sys.modules[dropout_noise.__module__], "_launch", launch)
    monkeypatch.setattr(backend, "implementation", lambda *args, **kwargs: "triton")
    dropout = nn.Dropout(0.0)
    with torch.no_grad(), torch.device("meta"):
        norm, x, residual = nn.LayerNorm(WIDTH), torch.randn(4, 6), torch.randn(4, WIDTH)
        hooked = nn.Linear(6, WIDTH)
        hooked.register_forward_hook(lambda module, inputs, output: output)
        for dense in (nn.Linear(6, WIDTH), hooked, nn.Linear(6, WIDTH, bias=False)):
            ops.dense_dropout_add_norm(x, dense, dropout, residual, norm)
            expected = dense.bias if dense is not hooked else None
            assert launched.pop() is expected
