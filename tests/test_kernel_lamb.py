"""The kernels of LAMB and AdamW against fp64; and a training step through kernels against the eager one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels import lamb, tensor_table
from fastbert_kernels.lamb import GroupOptions, optimizer_step
from fastbert_kernels.launch import optimizer_config
from fastbert_kernels.tensor_table import Layout, StepCache, StepTensors, make_layout

from fastbert.ops import backend
from fastbert.optim import AdamW, Lamb, parameter_groups
from tests.kernel_testing import CAN_LAUNCH, DEVICE, assert_accurate, in_the_parent_only, run_interpreted
from tests.test_model_kernels import batches, loss_and_gradients, tiny_model

CONFIG = optimizer_config()
BLOCK, TILE = CONFIG.block, CONFIG.tile
# empty, one element, the ends of a block
SIZES = [0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1]
# the ends of a tile, and several tiles
LONG_SIZES = [TILE - 1, TILE, TILE + 1, 2 * TILE + BLOCK + 3]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# of parameters and of gradients
TYPES = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16), (BF16, FP32), (FP16, FP32)]
LAMB = GroupOptions(
    lr=0.01,
    beta1=0.9,
    beta2=0.999,
    eps=1e-6,
    weight_decay=0.01,
    bias_correction=True,
    use_trust_ratio=True,
)
ADAMW = LAMB._replace(use_trust_ratio=False)
UNDECAYED = ADAMW._replace(weight_decay=0.0)
OPTIONS = {
    "lamb": [LAMB],
    "adamw": [ADAMW],
    "two-groups": [LAMB._replace(weight_decay=0.1), UNDECAYED._replace(lr=0.003)],
    "three-groups": [UNDECAYED, LAMB._replace(lr=0.05, beta1=0.8, beta2=0.9, eps=0.1), LAMB],
    "no-bias-correction": [LAMB._replace(bias_correction=False)],
    "no-grad-averaging": [LAMB._replace(grad_averaging=False)],
    "l2": [LAMB._replace(adam_w_mode=False, weight_decay=0.2)],
    "l2-adam": [ADAMW._replace(adam_w_mode=False, weight_decay=0.2)],
    "always-adapt": [LAMB._replace(weight_decay=0.0)],
    "no-momentum": [LAMB._replace(beta1=0.0, beta2=0.0)],
    "no-rate": [LAMB._replace(lr=0.0)],
}
Columns = dict[str, list[Tensor]]


def plain_step(
    columns: Columns,
    grads: Sequence[Tensor],
    groups: Sequence[int],
    options: Sequence[GroupOptions],
    max_grad_norm: float | None,
    loss_scale: float,
) -> Tensor:
    """The step in plain torch, in the dtype of the columns, by the formulas of the paper and FusedLAMB."""
    grads = [g.to(columns["weights"][0].dtype) / loss_scale for g in grads]
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    if not norm.isfinite():
        return norm
    clip = max_grad_norm / norm if max_grad_norm and norm > max_grad_norm else 1.0
    for i, (g, group) in enumerate(zip(grads, groups)):
        o = options[group]
        p, m, v, step = (columns[name][i] for name in ("weights", "exp_avgs", "exp_avg_sqs", "steps"))
        step += 1
        c1, c2 = 1.0, 1.0
        if o.bias_correction:
            c1, c2 = 1 - o.beta1 ** float(step), 1 - o.beta2 ** float(step)
        g = g * clip
        if not o.adam_w_mode:
            g = g + o.weight_decay * p
        m.copy_(o.beta1 * m + (1 - o.beta1 if o.grad_averaging else 1.0) * g)
        v.copy_(o.beta2 * v + (1 - o.beta2) * g * g)
        u = (m / c1) / ((v / c2).sqrt() + o.eps)
        if o.adam_w_mode:
            u = u + o.weight_decay * p
        ratio = 1.0
        if o.use_trust_ratio and p.norm() > 0 and u.norm() > 0:
            ratio = p.norm() / u.norm()
        p -= o.lr * ratio * u
    return norm


class Problem:
    """Tensors between guards of NaN, gradients for some steps, and the step's options.

    `offset` elements before each tensor move it away from an aligned address.
    """

    def __init__(
        self,
        sizes: Sequence[int] = SIZES,
        param_dtype: torch.dtype = FP32,
        grad_dtype: torch.dtype = FP32,
        *,
        options: Sequence[GroupOptions] = (LAMB,),
        max_grad_norm: float | None = 1.0,
        loss_scale: float = 1.0,
        grad_size: float = 1.0,
        weight_size: float = 1.0,
        offset: int = 0,
        num_steps: int = 3,
    ) -> None:
        self.options, self.max_grad_norm, self.loss_scale = list(options), max_grad_norm, loss_scale
        self.guards: list[Tensor] = []
        self.offset = offset

        def draw(size: int, scale: float, dtype: torch.dtype) -> Tensor:
            return self.guarded((scale * torch.randn(size)).to(DEVICE, dtype))

        self.params = [draw(size, weight_size, param_dtype) for size in sizes]
        weights = [p if param_dtype == FP32 else self.guarded(p.float()) for p in self.params]
        zeros = [[self.guarded(torch.zeros(size, device=DEVICE)) for size in sizes] for _ in range(2)]
        steps = [torch.zeros((), device=DEVICE) for _ in sizes]
        self.columns: Columns = dict(
            zip(("weights", "exp_avgs", "exp_avg_sqs", "steps"), (weights, *zeros, steps))
        )
        size = grad_size * loss_scale
        # unequal steps: a moment shows what is left of the one before
        self.grads = [[draw(s, size * (1 + 2 * k), grad_dtype) for s in sizes] for k in range(num_steps)]
        self.groups = [i % len(self.options) for i in range(len(sizes))]

    def guarded(self, values: Tensor) -> Tensor:
        """The values with NaN before and behind them in memory."""
        room = torch.full(
            (values.numel() + 16 + self.offset,), float("nan"), dtype=values.dtype, device=DEVICE
        )
        inside = room[8 + self.offset :][: values.numel()].copy_(values)
        self.guards += [room[: 8 + self.offset], room[8 + self.offset + values.numel() :]]
        return inside

    def tensors(self, step: int) -> StepTensors:
        weights, *others = self.columns.values()
        return StepTensors(self.params, weights, self.grads[step], *others, self.groups)

    def copy(self, dtype: torch.dtype) -> Columns:
        """Weights and state in another dtype, for the plain step."""
        return {name: [t.detach().clone().to(dtype) for t in column] for name, column in self.columns.items()}

    def state(self) -> list[Tensor]:
        """Copies of all that a step may change."""
        return [t.clone() for column in (self.params, *self.columns.values()) for t in column]


def run(p: Problem, step: int, cache: StepCache, module: ModuleType = lamb) -> Tensor:
    scale = torch.full((1,), p.loss_scale, device=DEVICE) if p.loss_scale != 1.0 else None
    return module.optimizer_step(
        p.tensors(step), p.options, cache, max_grad_norm=p.max_grad_norm, loss_scale=scale
    )


def check(p: Problem, module: ModuleType = lamb) -> None:
    """All steps of the problem: norm, weights and moments against fp64, counts, parameters, guards."""
    plain, exact, cache = p.copy(FP32), p.copy(torch.float64), StepCache()
    before = [[g.clone() for g in grads] for grads in p.grads]
    for step, grads in enumerate(p.grads):
        norm = run(p, step, cache, module)
        norms = [
            plain_step(columns, grads, p.groups, p.options, p.max_grad_norm, p.loss_scale)
            for columns in (plain, exact)
        ]
        assert_accurate(norm, *norms)
    for name, column in p.columns.items():
        if name == "steps":
            assert [int(t) for t in column] == [len(p.grads)] * len(column)
            continue
        # of all tensors together: of a single element, plain torch may be right by chance
        assert_accurate(torch.cat(column), torch.cat(plain[name]), torch.cat(exact[name]))
    for param, weight in zip(p.params, p.columns["weights"]):
        assert_bits(param, weight.to(param.dtype))
    for one, other in zip(before, p.grads):
        assert_all_bits(one, other)
    assert all(guard.isnan().all() for guard in p.guards)


def assert_bits(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype and torch.equal(one, other)


def assert_all_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other):
        assert_bits(a, b)


def check_bad_step(bad: float, module: ModuleType = lamb, options: Sequence[GroupOptions] = (LAMB,)) -> None:
    """A step with a gradient that is not finite changes no bit, and the next one is as if it had not been."""
    p = Problem([5, BLOCK + 1, TILE + 1], options=options, num_steps=4)
    p.grads[2][2][-1] = bad
    cache = StepCache()
    plain, exact = p.copy(FP32), p.copy(torch.float64)
    for step in range(4):
        before = p.state()
        norm = run(p, step, cache, module)
        assert norm.isfinite() == (step != 2)
        if step == 2:
            assert_all_bits(before, p.state())
        for columns in (plain, exact):
            plain_step(columns, p.grads[step], p.groups, p.options, p.max_grad_norm, p.loss_scale)
    assert [int(t) for t in p.columns["steps"]] == [3, 3, 3]
    for name in ("weights", "exp_avgs", "exp_avg_sqs"):
        assert_accurate(torch.cat(p.columns[name]), torch.cat(plain[name]), torch.cat(exact[name]))


def check_norm_in_few_programs(module: ModuleType = lamb) -> None:
    """As it is in a model of more tiles than the norm has programs."""
    config = dataclasses.replace(CONFIG, norm_programs=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "optimizer_config", lambda: config)
        check(Problem([5, 70, TILE + 1, 9, 33], num_steps=1), module)


def check_parts(module: ModuleType = lamb, options: Sequence[GroupOptions] = (LAMB, UNDECAYED)) -> None:
    """Halves of tensors, of which another rank has the other, equal half: the step is that of the whole."""
    half = Problem([5, 70, 0, BLOCK + 1, 2 * TILE + 9, 33], options=options, loss_scale=8.0, num_steps=2)
    whole = [
        {
            name: [t if name == "steps" else t.repeat(2) for t in column]
            for name, column in half.copy(dtype).items()
        }
        for dtype in (FP32, torch.float64)
    ]
    cache, sent = StepCache(), []

    def sum_over_shards(tensor: Tensor) -> Tensor:
        sent.append(tensor.numel())
        return tensor.mul_(2)

    for step, grads in enumerate(half.grads):
        norm = module.optimizer_step(
            half.tensors(step),
            half.options,
            cache,
            max_grad_norm=half.max_grad_norm,
            loss_scale=torch.full((1,), half.loss_scale, device=DEVICE),
            sum_over_shards=sum_over_shards,
        )
        both = [g.repeat(2) for g in grads]
        norms = [
            plain_step(c, both, half.groups, options, half.max_grad_norm, half.loss_scale) for c in whole
        ]
        assert_accurate(norm, *norms)
    for name in ("weights", "exp_avgs", "exp_avg_sqs"):
        plain, exact = (torch.cat([t[: len(t) // 2] for t in columns[name]]) for columns in whole)
        assert_accurate(torch.cat(half.columns[name]), plain, exact)
    assert [int(t) for t in half.columns["steps"]] == [2] * 6  # the empty one counts, too
    assert sent == [1, 2 * 6] * 2 if options[0].use_trust_ratio else sent == [1] * 2


class FarAway(StepCache):
    """A layout in which the tensors are the ends of ones with more than 2^31 elements.

    Only the tiles at the end are listed; the addresses are those of the beginning, where there is nothing.
    """

    TILES_BEFORE = 2**31 // TILE + 5

    def layout(self, tensors: StepTensors) -> Layout:
        layout = make_layout(tensors)
        elements = self.TILES_BEFORE * TILE
        table, tiles = layout.table.clone(), layout.tiles.clone()
        for row, param, grad in zip(table, tensors.params, tensors.grads):
            row[0] += elements
            # weights, parameters, gradients, moments
            sizes = (4, param.element_size(), grad.element_size(), 4, 4)
            row[1:6] -= elements * torch.tensor(sizes)
        tiles[:, 1] += self.TILES_BEFORE
        return Layout(layout.launches, table.to(DEVICE), tiles.to(DEVICE))


def check_offsets_beyond_32_bits(module: ModuleType = lamb) -> None:
    """The ends of long tensors get the update that the same numbers get as short tensors."""
    for options in ([LAMB], [ADAMW]):
        torch.manual_seed(0)
        p = Problem([TILE + 3, 7], BF16, BF16, options=options, num_steps=1)
        torch.manual_seed(0)
        near = Problem([TILE + 3, 7], BF16, BF16, options=options, num_steps=1)
        norm = run(p, 0, FarAway(), module)
        assert_bits(norm, run(near, 0, StepCache()))
        for name in ("weights", "exp_avgs", "exp_avg_sqs"):
            assert_all_bits(p.columns[name], near.columns[name])
        assert_all_bits(p.params, near.params)


class CountedKernel:
    """A kernel that notes its launches."""

    def __init__(self, kernel: Any, launches: list[str]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.launches.append(self.kernel.__name__)
        return self.kernel[grid]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    for name in ("_grad_norm_kernel", "_moments_kernel", "_apply_kernel"):
        monkeypatch.setattr(lamb, name, CountedKernel(getattr(lamb, name), names))
    return names


@in_the_parent_only
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


class TestKernels:
    __test__ = CAN_LAUNCH

    @pytest.mark.parametrize(("param_dtype", "grad_dtype"), TYPES)
    @pytest.mark.usefixtures("nan_filled")
    def test_every_pair_of_types(self, param_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        check(Problem(SIZES, param_dtype, grad_dtype))

    @pytest.mark.parametrize("options", [[LAMB], [ADAMW]], ids=["lamb", "adamw"])
    @pytest.mark.usefixtures("nan_filled")
    def test_tensors_of_several_tiles(self, options: list[GroupOptions]) -> None:
        check(Problem(LONG_SIZES, BF16, BF16, options=options, num_steps=1))

    # clipped, not clipped, and with no limit
    @pytest.mark.parametrize(("max_grad_norm", "grad_size"), [(1.0, 1.0), (1.0, 1e-4), (None, 1.0), (0, 1.0)])
    @pytest.mark.parametrize("name", OPTIONS)
    def test_every_option(self, name: str, max_grad_norm: float | None, grad_size: float) -> None:
        check(
            Problem([5, 70, 1, 33], options=OPTIONS[name], max_grad_norm=max_grad_norm, grad_size=grad_size)
        )

    @pytest.mark.parametrize("loss_scale", [1024.0, 2.0**-10])
    @pytest.mark.parametrize("grad_dtype", [FP32, FP16])
    def test_scaled_gradients(self, grad_dtype: torch.dtype, loss_scale: float) -> None:
        check(Problem(SIZES, FP32, grad_dtype, loss_scale=loss_scale, options=OPTIONS["two-groups"]))

    def test_corrections_of_the_first_steps_are_precise(self) -> None:
        """1 - 0.999 in fp32 is 1e-5 off, which small weights show."""
        check(Problem([50], options=[UNDECAYED], weight_size=1e-3, max_grad_norm=None))

    def test_a_late_step(self) -> None:
        p = Problem([40])
        for step in p.columns["steps"]:
            step.fill_(6000)
        plain, exact = p.copy(FP32), p.copy(torch.float64)
        run(p, 0, StepCache())
        for columns in (plain, exact):
            plain_step(columns, p.grads[0], p.groups, p.options, p.max_grad_norm, 1.0)
        assert_accurate(p.columns["weights"][0], plain["weights"][0], exact["weights"][0])
        assert p.columns["steps"][0].item() == 6001

    def test_weights_of_zero_take_one_plain_step(self) -> None:
        p = Problem([20], weight_size=0.0, max_grad_norm=None, num_steps=1)
        run(p, 0, StepCache())
        grad = p.grads[0][0]
        torch.testing.assert_close(p.params[0], -0.01 * grad / (grad.abs() + 1e-6), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("options", [LAMB, LAMB._replace(weight_decay=0.0)], ids=["decay", "no-decay"])
    def test_gradients_of_zero(self, options: GroupOptions) -> None:
        """With decay the update is the decay, and the trust ratio makes it a step of the learning rate."""
        p = Problem([20, BLOCK + 5], grad_size=0.0, options=[options], num_steps=1)
        before = [w.clone() for w in p.params]
        assert run(p, 0, StepCache()) == 0
        for param, start in zip(p.params, before):
            shrunk = start * (1 - options.lr) if options.weight_decay else start
            torch.testing.assert_close(param, shrunk, rtol=1e-6, atol=0)

    @pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, for lanes beyond the end
    def test_an_eps_that_fp32_cannot_hold_reaches_no_other_element(self) -> None:
        p = Problem([BLOCK + 1], options=[LAMB._replace(eps=1e-60)], num_steps=1)
        run(p, 0, StepCache())
        assert p.params[0].isfinite().all()

    @pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
    @pytest.mark.parametrize("options", [[LAMB], [ADAMW]], ids=["lamb", "adamw"])
    def test_a_bad_step_changes_no_bit(self, options: list[GroupOptions], bad: float) -> None:
        check_bad_step(bad, options=options)

    def test_norm_in_few_programs(self) -> None:
        check_norm_in_few_programs()

    def test_offsets_beyond_32_bits(self) -> None:
        check_offsets_beyond_32_bits()

    @pytest.mark.parametrize("options", [[LAMB], [ADAMW]], ids=["lamb", "adamw"])
    def test_hundreds_of_tensors_in_one_launch_each(
        self, options: list[GroupOptions], launches: list[str]
    ) -> None:
        sizes = [1 + i % 7 for i in range(200)]
        check(Problem(sizes, BF16, BF16, options=options, num_steps=1))
        step = ["_grad_norm_kernel", "_moments_kernel", "_apply_kernel"]
        assert launches == step[: 3 if options == [LAMB] else 2]

    def test_tensors_that_need_other_code_share_norm_and_step(self, launches: list[str]) -> None:
        """fp32 and bf16 parameters, aligned and unaligned: one clip for all."""
        p = Problem([9, BLOCK + 2, 40], options=OPTIONS["two-groups"], num_steps=2)
        others = [
            Problem([30, 31], BF16, BF16, num_steps=2),
            Problem([BLOCK + 2, 17], offset=1, num_steps=2),
            Problem([33], BF16, BF16, offset=3, num_steps=2),
        ]
        for other in others:
            p.params += other.params
            for name, column in other.columns.items():
                p.columns[name] += column
            for step in range(2):
                p.grads[step] += other.grads[step]
            p.guards += other.guards
        p.groups = [i % 2 for i in range(len(p.params))]
        check(p)
        kernels = ("_grad_norm_kernel", "_moments_kernel", "_apply_kernel")
        assert launches == [name for _ in range(2) for name in kernels for _ in range(4)]

    def test_parts_of_tensors_have_the_norms_of_the_whole(self) -> None:
        check_parts()
        check_parts(options=[ADAMW])

    def test_two_runs_give_the_same_bits(self) -> None:
        results = []
        for _ in range(2):
            torch.manual_seed(1)
            p = Problem([2 * TILE + 9, 40, 0], FP16, FP16, num_steps=2)
            cache = StepCache()
            norms = [run(p, step, cache) for step in range(2)]
            results.append([*norms, *p.state()])
        assert_all_bits(*results)

    def test_launches_are_on_the_tensors_device(
        self, launches: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Case C-09: which device is current does not matter."""

        @contextlib.contextmanager
        def guard(x: Tensor) -> Iterator[None]:
            assert x.device == p.params[0].device
            launches.append("enter")
            yield
            launches.append("leave")

        monkeypatch.setattr(lamb, "device_guard", guard)
        p = Problem([5])
        run(p, 0, StepCache())
        assert launches == ["enter", "_grad_norm_kernel", "_moments_kernel", "_apply_kernel", "leave"]

    def test_a_learning_rate_in_a_tensor(self) -> None:
        rate = torch.tensor(0.02, device=DEVICE, dtype=torch.float64)
        p = Problem([5, 70], options=[LAMB._replace(lr=rate), UNDECAYED], num_steps=2)
        cache = StepCache()
        plain, exact = p.copy(FP32), p.copy(torch.float64)
        for step, lr in enumerate((0.02, 0.3)):
            rate.fill_(lr)
            run(p, step, cache)
            options = [LAMB._replace(lr=lr), UNDECAYED]
            for columns in (plain, exact):
                plain_step(columns, p.grads[step], p.groups, options, p.max_grad_norm, 1.0)
        assert_accurate(torch.cat(p.params), torch.cat(plain["weights"]), torch.cat(exact["weights"]))

    def test_tables_are_made_again_only_when_a_tensor_moves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = []
        monkeypatch.setattr(
            tensor_table, "make_layout", lambda tensors: made.append(1) or make_layout(tensors)
        )
        p = Problem([5, 70], num_steps=3)
        p.grads[1] = p.grads[0]
        cache = StepCache()
        for step in range(2):
            run(p, step, cache)
        assert len(made) == 1
        run(p, 2, cache)  # other gradients
        assert len(made) == 2
        p.groups[1] = 0
        p.columns["exp_avgs"][1] = p.columns["exp_avgs"][1].clone()
        run(p, 2, cache)
        assert len(made) == 3

    def test_what_no_kernel_can_take_is_refused(self) -> None:
        p = Problem([5, 6])

        def refused(message: str, **columns: list[Tensor]) -> None:
            with pytest.raises(ValueError, match=message):
                optimizer_step(p.tensors(0)._replace(**columns), p.options, StepCache())

        doubles, transposed = [t.double() for t in p.params], torch.ones(2, 3, device=DEVICE).t()
        refused(
            r"params\[0\] must be 5 contiguous elements of float32 or float16 or bfloat16", params=doubles
        )
        refused(r"weights\[0\] must be 5 contiguous elements of float32 .* torch.float64", weights=doubles)
        refused(r"exp_avgs\[1\] must be 6 .* but is \[3, 2\]", exp_avgs=[p.params[0], transposed])
        refused(r"grads\[1\] must be 6 contiguous .* \[5\]", grads=[p.params[0]] * 2)
        refused(r"steps\[0\] must be 1 .* \[5\]", steps=p.params)
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            optimizer_step(p.tensors(0)._replace(grads=p.grads[0] * 2), p.options, StepCache())

    @pytest.mark.parametrize("optimizer_class", [Lamb, AdamW])
    def test_a_training_step_is_the_eager_one(self, optimizer_class: type) -> None:
        """Forward, backward and update of a 2-layer model: losses, gradients and every parameter."""
        start = tiny_model(attention_probs_dropout_prob=0.1)
        batch = batches([9, 1, 12], filler=10, empty_ends=2, unused_slots=3)[0]
        results = []
        for path in ("eager", "triton"):
            model = copy.deepcopy(start)
            optimizer = optimizer_class(parameter_groups(model, 0.01), lr=1e-3)
            loss, gradients = loss_and_gradients(model, batch, path)
            with backend.use(path):
                optimizer.step()
            assert backend.last_run()[optimizer_class.__name__.lower()] == path
            results.append((loss, gradients, dict(model.named_parameters()), optimizer.grad_norm))
        (eager, ours) = results
        torch.testing.assert_close(ours[0], eager[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(ours[3], eager[3], atol=0, rtol=2e-5)
        before = dict(start.named_parameters())
        for name, parameter in eager[2].items():
            torch.testing.assert_close(ours[1][name], eager[1][name], atol=2e-5, rtol=0)
            torch.testing.assert_close(ours[2][name], parameter, atol=2e-5, rtol=0)
            assert not torch.equal(parameter, before[name]), name
