"""Lamb: the published vectors, the invariants of the method, and what a training loop relies on.

All of it is tested of the eager step, and of the kernels: in a child process, with Triton's interpreter.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import io
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fastbert.errors import UserError
from fastbert.ops import backend
from fastbert.ops.lamb import global_norm
from fastbert.ops.optimizer_cpu import CPU_PIECE
from fastbert.optim import AdamW, Lamb
from tests.kernel_testing import INTERPRETED, in_the_parent_only, run_interpreted

VECTORS = json.loads((Path(__file__).parent / "vectors" / "pretraining_vectors.json").read_text())["lamb"]
BOTH = pytest.mark.parametrize("optimizer_class", [Lamb, AdamW])
# the kernels have no fp64
EXACT = torch.float32 if INTERPRETED else torch.float64
RTOL = 1e-5 if INTERPRETED else 1e-12


@in_the_parent_only
def test_all_of_this_through_the_kernels() -> None:
    pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")
    run_interpreted(__file__, "")


@pytest.fixture(autouse=True)
def _path() -> Iterator[None]:
    with backend.use("triton" if INTERPRETED else "eager"):
        yield


def parameter(values: list[float] | Tensor, dtype: torch.dtype = EXACT) -> nn.Parameter:
    return nn.Parameter(torch.as_tensor(values, dtype=dtype).clone())


def random_problem(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], list[list[Tensor]]]:
    """Three tensors (a matrix, a vector, a scalar) and gradients for six steps."""
    params = [parameter(torch.randn(shape) * 0.5, dtype) for shape in ((7, 5), (9,), ())]
    grads = [[torch.randn(p.shape).to(dtype) for p in params] for _ in range(6)]
    return params, grads


def take_steps(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: list[list[Tensor]]
) -> None:
    for step_grads in grads:
        for p, grad in zip(params, step_grads):
            p.grad = grad.clone()
        optimizer.step()


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p][name] for p in params for name in sorted(optimizer.state[p])]
    return [tensor.detach().clone() for tensor in (*params, *states)]


def assert_same_bits(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6)] + [(torch.float64, 1e-12)] * (not INTERPRETED)
)
@pytest.mark.parametrize("case", VECTORS)
def test_lamb_matches_the_published_vectors(case: str, dtype: torch.dtype, tolerance: float) -> None:
    vector = VECTORS[case]
    options = dict(vector["options"])
    options["always_adapt"] = options.pop("use_nvlamb", False)
    groups = [{**g, "params": [parameter(p, dtype) for p in g["params"]]} for g in vector["groups"]]
    optimizer = Lamb(groups, **options)
    for step_grads, expected in zip(vector["grads"], vector["after"], strict=True):
        for group, group_grads in zip(optimizer.param_groups, step_grads, strict=True):
            for p, grad in zip(group["params"], group_grads, strict=True):
                p.grad = torch.tensor(grad, dtype=dtype)
        optimizer.step()
        for group, group_expected in zip(optimizer.param_groups, expected, strict=True):
            for p, want in zip(group["params"], group_expected, strict=True):
                state = optimizer.state[p]
                for ours, name in ((p, "p"), (state["exp_avg"], "m"), (state["exp_avg_sq"], "v")):
                    assert ours.dtype == dtype
                    target = torch.tensor(want[name], dtype=torch.float64)
                    torch.testing.assert_close(ours.detach().double(), target, rtol=0, atol=tolerance)


def test_clipping_is_by_one_norm_over_all_groups() -> None:
    """Case F-02: clipping each group by itself, or not at all, gives other numbers."""
    w1, w2 = parameter([3, 4]), parameter([1, -1])
    optimizer = Lamb([{"params": [w1]}, {"params": [w2]}], lr=0.1, weight_decay=0.01, max_grad_norm=1.0)
    steps = [[[0.6, 0], [0, 0.1]], [[3, 3], [0.1, 0.1]]]
    take_steps(optimizer, [w1, w2], [[torch.tensor(g, dtype=EXACT) for g in step] for step in steps])
    atol = 5e-7 + 4 * torch.finfo(EXACT).eps
    torch.testing.assert_close(w1.tolist(), [2.126865, 3.695186], rtol=0, atol=atol)
    torch.testing.assert_close(w2.tolist(), [0.895335, -1.252508], rtol=0, atol=atol)
    assert optimizer.grad_norm.item() == pytest.approx((9 + 9 + 0.01 + 0.01) ** 0.5)

    def alone(values: list[float], index: int, limit: float | None) -> list[float]:
        p = parameter(values)
        grads = [[torch.tensor(step[index], dtype=EXACT)] for step in steps]
        take_steps(Lamb([p], lr=0.1, max_grad_norm=limit), [p], grads)
        return p.tolist()

    torch.testing.assert_close(alone([1, -1], 1, 1.0), [0.906591, -1.261993], rtol=0, atol=atol)
    for no_limit in (None, 0):
        torch.testing.assert_close(alone([3, 4], 0, no_limit), [2.148318, 3.669109], rtol=0, atol=atol)


@pytest.mark.parametrize("grad_size", [1e-3, 1.0, 1e3])
def test_the_trust_ratio_fixes_the_length_of_a_step(grad_size: float) -> None:
    p = parameter(torch.randn(50, 3))
    before = p.detach().clone()
    take_steps(Lamb([p], lr=0.02), [p], [[torch.randn(50, 3, dtype=EXACT) * grad_size]])
    assert (p - before).norm().item() == pytest.approx(0.02 * before.norm().item(), rel=RTOL)


def test_a_tensor_without_gradient_signal_shrinks_by_the_learning_rate() -> None:
    p = parameter(torch.randn(20))
    before = p.detach().clone()
    take_steps(Lamb([p], lr=0.03), [p], [[torch.zeros(20, dtype=EXACT)]] * 4)
    torch.testing.assert_close(p.detach(), before * (1 - 0.03) ** 4, rtol=RTOL, atol=0)


def test_the_size_of_all_gradients_does_not_matter_without_clipping() -> None:
    start, grads = random_problem(EXACT)
    results = []
    for size in (1.0, 1e4):
        params = [parameter(p.detach()) for p in start]
        optimizer = Lamb(params, lr=0.01, max_grad_norm=None, eps=1e-20)
        take_steps(optimizer, params, [[g * size for g in step] for step in grads])
        results.append(torch.cat([p.detach().flatten() for p in params]))
    torch.testing.assert_close(results[0], results[1], rtol=100 * RTOL, atol=0)


def test_twenty_steps_in_fp32_stay_close_to_fp64() -> None:
    start, _ = random_problem()
    grads = [[torch.randn(p.shape) for p in start] for _ in range(20)]
    results = []
    for dtype in (torch.float32, torch.float64):
        params = [parameter(p.detach(), dtype) for p in start]
        with contextlib.nullcontext() if dtype == torch.float32 else backend.use("eager"):
            take_steps(Lamb(params, lr=0.01), params, [[g.to(dtype) for g in step] for step in grads])
        results.append(torch.cat([p.detach().double().flatten() for p in params]))
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_a_tensor_longer_than_one_piece_is_one_tensor_to_the_trust_ratio() -> None:
    """Large tensors are worked through in pieces on a CPU, and by many programs; norms must span them."""
    p = parameter(torch.randn(40_000 if INTERPRETED else 2 * CPU_PIECE + 7))
    start, grad, m, v = p.detach().double(), torch.randn(p.shape, dtype=EXACT), 0.0, 0.0
    optimizer = Lamb([p], lr=0.01)
    expected = start.clone()
    for t, size in enumerate((3.0, 0.5), start=1):
        take_steps(optimizer, [p], [[grad * size]])
        g = grad.double() * size / max((grad.double() * size).norm(), 1.0)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * expected
        expected = expected - 0.01 * expected.norm() / u.norm() * u
    atol = 1e-6 if INTERPRETED else 1e-15
    torch.testing.assert_close(p.detach().double(), expected, rtol=1e-12, atol=atol)


@in_the_parent_only
def test_global_norm_of_a_long_fp32_tensor_is_accurate() -> None:
    """One fp32 sum over all of it is 1e-5 off, and fp16 sums overflow."""
    x = torch.rand(8 * CPU_PIECE)
    expected = x.double().norm().item()
    assert global_norm([x]).item() == pytest.approx(expected, rel=2e-6)
    assert global_norm([x[:100].half(), x[100:].bfloat16()]).item() == pytest.approx(expected, rel=1e-3)
    halves = [torch.full((1000,), 200.0, dtype=torch.float16)] * 2
    assert global_norm(halves).item() == pytest.approx(200 * 2000**0.5, rel=1e-6)
    assert global_norm([]).item() == 0.0


@BOTH
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer_class: type, bad: float) -> None:
    params, grads = random_problem()
    optimizer = optimizer_class(params, lr=0.01)
    bad_grads = [g.clone() for g in grads[0]]
    bad_grads[1][3] = bad

    before = [p.detach().clone() for p in params]
    take_steps(optimizer, params, [bad_grads])  # as the first step, before there is any state
    assert optimizer.step_was_skipped
    assert not optimizer.grad_norm.isfinite()
    assert_same_bits(before, [p.detach() for p in params])

    take_steps(optimizer, params, grads[:2])
    assert not optimizer.step_was_skipped
    before = snapshot(optimizer)
    take_steps(optimizer, params, [bad_grads])
    assert optimizer.step_was_skipped
    assert_same_bits(before, snapshot(optimizer))
    assert optimizer.state[params[0]]["step"].item() == 2

    take_steps(optimizer, params, grads[2:3])
    assert not optimizer.step_was_skipped
    assert optimizer.state[params[0]]["step"].item() == 3


@BOTH
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_and_overflow(optimizer_class: type, unscale_first: bool) -> None:
    """Case F-05: scaled gradients give the step of unscaled ones; an overflow changes only the scale."""
    start, grads = random_problem()
    plain = [parameter(p.detach(), torch.float32) for p in start]
    reference = optimizer_class(plain, lr=0.01)
    scaled = [parameter(p.detach(), torch.float32) for p in start]
    optimizer = optimizer_class(scaled, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    for i, step_grads in enumerate(grads):
        overflow = i == 2
        before = snapshot(optimizer)
        scale = scaler.get_scale()
        scaler.scale(torch.zeros(()))  # what a loop does to its loss; sets the scaler up
        for p, g in zip(scaled, step_grads):
            p.grad = g * scale
        if overflow:
            scaled[0].grad[0, 0] = float("inf")
        if unscale_first:
            scaler.unscale_(optimizer)
        kept = [p.grad.clone() for p in scaled]
        scaler.step(optimizer)
        assert_same_bits(kept, [p.grad for p in scaled])
        scaler.update()
        assert optimizer.step_was_skipped == overflow
        if overflow:
            assert_same_bits(before, snapshot(optimizer))
            assert scaler.get_scale() == scale / 2
            continue
        take_steps(reference, plain, [step_grads])
        assert optimizer.grad_norm.item() == pytest.approx(reference.grad_norm.item(), rel=1e-6)
        for ours, want in zip(scaled, plain):
            torch.testing.assert_close(ours, want, rtol=1e-6, atol=1e-7)
    assert optimizer.state[scaled[0]]["step"].item() == len(grads) - 1


@BOTH
def test_gradients_are_left_as_they_were(optimizer_class: type) -> None:
    params, grads = random_problem()
    options = {"adam_w_mode": False} if optimizer_class is Lamb else {}
    optimizer = optimizer_class(params, max_grad_norm=0.1, **options)
    for p, g in zip(params, grads[0]):
        p.grad = g.clone()
    optimizer.step()
    assert_same_bits(grads[0], [p.grad for p in params])


@BOTH
def test_resuming_from_a_state_dict_gives_the_same_bits(optimizer_class: type) -> None:
    params, grads = random_problem()
    optimizer = optimizer_class(
        [{"params": params[:2], "lr": 0.02}, {"params": params[2:], "weight_decay": 0}]
    )
    take_steps(optimizer, params, grads[:3])

    resumed_params = [parameter(p.detach(), torch.float32) for p in params]
    resumed = optimizer_class([{"params": resumed_params[:2]}, {"params": resumed_params[2:]}])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.param_groups[0]["lr"] == 0.02
    take_steps(resumed, resumed_params, grads[3:])
    take_steps(optimizer, params, grads[3:])
    assert_same_bits(snapshot(optimizer), snapshot(resumed))


@BOTH
def test_a_loaded_state_is_not_shared(optimizer_class: type) -> None:
    params, grads = random_problem()
    optimizer = optimizer_class(params)
    take_steps(optimizer, params, grads[:1])
    before = snapshot(optimizer)
    others = [parameter(p.detach(), torch.float32) for p in params]
    other = optimizer_class(others)
    other.load_state_dict(optimizer.state_dict())
    take_steps(other, others, grads[1:])
    assert_same_bits(before, snapshot(optimizer))


@BOTH
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_an_optimizer_work(optimizer_class: type, copier) -> None:
    params, grads = random_problem()
    optimizer = optimizer_class(params, max_grad_norm=0.25)
    take_steps(optimizer, params, grads[:1])
    twin = copier(optimizer)
    twin_params = twin.param_groups[0]["params"]
    take_steps(twin, twin_params, grads[1:])
    take_steps(optimizer, params, grads[1:])
    assert_same_bits(snapshot(optimizer), snapshot(twin))


# bf16 keeps 8 bits: an update of lr 1e-4 is below half a unit of most weights and would be rounded away
@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_of_low_precision_weights_are_not_lost(
    optimizer_class: type, dtype: torch.dtype
) -> None:
    start = (torch.rand(64) + 1).to(dtype)
    grad = torch.randn(64).to(dtype)
    low, full = parameter(start, dtype), parameter(start.float(), torch.float32)
    optimizers = [optimizer_class([p], lr=1e-4) for p in (low, full)]
    for _ in range(100):
        take_steps(optimizers[0], [low], [[grad]])
        take_steps(optimizers[1], [full], [[grad.float()]])
    assert {name: t.dtype for name, t in optimizers[0].state[low].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq", "master"), torch.float32
    )
    assert not torch.equal(low.detach(), start)
    torch.testing.assert_close(optimizers[0].state[low]["master"], full.detach(), rtol=0, atol=1e-6)
    assert torch.equal(low.detach(), optimizers[0].state[low]["master"].to(dtype))

    resumed_param = parameter(low.detach(), dtype)
    resumed = optimizer_class([resumed_param], lr=1e-4)
    resumed.load_state_dict(optimizers[0].state_dict())
    for optimizer, p in ((optimizers[0], low), (resumed, resumed_param)):
        take_steps(optimizer, [p], [[grad]] * 3)
    assert_same_bits(snapshot(optimizers[0]), snapshot(resumed))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_layout_does_not_matter(optimizer_class: type, dtype: torch.dtype) -> None:
    values = torch.randn(6, 4).to(dtype)
    grads = [torch.randn(6, 4).to(dtype) for _ in range(3)]
    straight = parameter(values, dtype)
    transposed = nn.Parameter(values.t().contiguous().t())
    assert not transposed.is_contiguous()
    for p, layout in ((straight, lambda g: g), (transposed, lambda g: g.t().contiguous().t())):
        take_steps(optimizer_class([p], lr=0.01), [p], [[layout(g)] for g in grads])
    assert torch.equal(straight, transposed)


@BOTH
def test_groups_override_every_option(optimizer_class: type) -> None:
    _, grads = random_problem(EXACT)
    start = parameter(torch.randn(9))
    options = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.2, "bias_correction": False}
    if optimizer_class is Lamb:
        options |= {"grad_averaging": False, "adam_w_mode": False, "always_adapt": True}
    results = []
    for in_group in (True, False):
        p = parameter(start.detach())
        optimizer = (
            optimizer_class([{"params": [p], **options}], max_grad_norm=None)
            if in_group
            else optimizer_class([p], **options, max_grad_norm=None)
        )
        take_steps(optimizer, [p], [[step[1]] for step in grads])
        results.append(p.detach())
    assert torch.equal(*results)
    default = parameter(start.detach())
    take_steps(optimizer_class([default], max_grad_norm=None), [default], [[step[1]] for step in grads])
    assert not torch.allclose(results[0], default)


@BOTH
def test_parameters_without_gradient_are_left_alone(optimizer_class: type) -> None:
    params, grads = random_problem()
    optimizer = optimizer_class(params)
    params[0].grad = grads[0][0]
    untouched = [p.detach().clone() for p in params[1:]]
    optimizer.step()
    assert_same_bits(untouched, [p.detach() for p in params[1:]])
    assert list(optimizer.state) == [params[0]]
    assert optimizer.grad_norm.item() == pytest.approx(grads[0][0].norm().item())

    # a parameter that joins later counts its own steps
    take_steps(optimizer, params, grads[1:2])
    assert [optimizer.state[p]["step"].item() for p in params] == [2, 1, 1]


@BOTH
def test_no_gradient_at_all(optimizer_class: type) -> None:
    params, _ = random_problem()
    optimizer = optimizer_class(params)
    optimizer.step()
    assert optimizer.grad_norm.item() == 0
    assert not optimizer.step_was_skipped


@BOTH
def test_closure_and_scheduler(optimizer_class: type) -> None:
    p = parameter([1.0, 2.0])
    optimizer = optimizer_class([p], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.0 if k == 1 else 1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 5
    after_one = p.detach().clone()
    assert not torch.equal(after_one, torch.tensor([1.0, 2.0], dtype=EXACT))
    scheduler.step()
    optimizer.step(closure)  # at learning rate 0
    assert torch.equal(p.detach(), after_one)


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1e-3}, "lr -0.001 must be 0 or more"),
        ({"lr": float("nan")}, "lr nan must be 0 or more"),
        ({"betas": (1.0, 0.999)}, "first beta 1.0 must be at least 0 and below 1"),
        ({"betas": (0.9, -0.1)}, "second beta -0.1 must be at least 0 and below 1"),
        ({"eps": 0.0}, "eps 0.0 must be above 0"),
        ({"weight_decay": -0.01}, "weight_decay -0.01 must be 0 or more"),
        ({"max_grad_norm": -1.0}, "max_grad_norm -1.0 must be 0 or more"),
    ],
)
def test_bad_options_are_refused(optimizer_class: type, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        optimizer_class([parameter([1.0])], **options)
    with pytest.raises(ValueError, match=re.escape(message.split(" must")[0])):
        optimizer_class([{"params": [parameter([1.0])], **options}])


@BOTH
def test_bad_parameters_are_refused(optimizer_class: type) -> None:
    p = parameter([1.0])
    with pytest.raises(UserError, match="listed twice"):
        optimizer_class([p, p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer_class([{"params": [p]}, {"params": [p]}])
    with pytest.raises(UserError, match=r"complex64, but only real"):
        optimizer_class([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(UserError, match="one norm over all groups"):
        optimizer_class([{"params": [p], "max_grad_norm": 2.0}])
    with pytest.raises(TypeError, match="ordered"):
        optimizer_class([{"params": {p}}])


@BOTH
def test_sparse_gradients_are_refused(optimizer_class: type) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = optimizer_class(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UserError, match="sparse=False"):
        optimizer.step()


@BOTH
def test_documented_defaults_are_the_real_ones(optimizer_class: type) -> None:
    documentation = inspect.getdoc(optimizer_class)
    signature = inspect.signature(optimizer_class)
    options = {name: p.default for name, p in signature.parameters.items() if name != "params"}
    assert optimizer_class([parameter([1.0])]).defaults == options
    for name, default in options.items():
        found = re.search(rf"^ +{name}: .*?default (\(.*?\)|[\w-]+(?:\.\d+)?)", documentation, re.MULTILINE)
        assert found, f"{name} has no documented default"
        assert ast.literal_eval(found.group(1)) == default, name
