"""Lamb and AdamW through their kernels: the backend's choice, states that move, CUDA graphs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="triton is not installed; it has no Windows or macOS build")

from fastbert_kernels.launch import optimizer_config

from fastbert.errors import UserError
from fastbert.ops import backend
from fastbert.ops.backend import EagerFallbackWarning
from fastbert.optim import AdamW, Lamb
from tests.kernel_testing import CAN_LAUNCH, DEVICE, in_the_parent_only, run_interpreted

TILE = optimizer_config().tile
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def gradients_for(params: Sequence[Tensor], step: int) -> list[Tensor]:
    """The same for every optimizer of these shapes, and different for each step."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(DEVICE, p.dtype) for p in params]


def optimizers_of(sizes: Sequence[int], optimizer_class: type, dtype: torch.dtype) -> list[Any]:
    """An optimizer of two groups, the same each time, with gradients there."""
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(size, generator=generator).to(DEVICE, dtype)) for size in sizes]
    for p, grad in zip(params, gradients_for(params, 0)):
        p.grad = grad
    groups = [{"params": params[:1], "lr": 0.02}, {"params": params[1:], "weight_decay": 0.0}]
    return [optimizer_class(groups, lr=0.01)]


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def steps_with(optimizer: Any, path: str, steps: Sequence[int] | range) -> None:
    params = params_of(optimizer)
    with backend.use(path):
        for step in steps:
            for p, grad in zip(params, gradients_for(params, step)):
                p.grad = grad
            optimizer.step()


def described(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with types and shapes for the tensors, and for the learning rate its type."""
    state = {
        key: {name: (t.dtype, t.shape) for name, t in values.items()}
        for key, values in state_dict["state"].items()
    }
    return {"state": state, "param_groups": state_dict["param_groups"]}


def assert_bits(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype and torch.equal(one, other)


@in_the_parent_only
def test_the_optimizers_under_the_interpreter() -> None:
    run_interpreted(__file__)


class TestKernels:
    __test__ = CAN_LAUNCH

    @pytest.mark.parametrize("optimizer_class", [Lamb, AdamW])
    def test_the_backend_chooses(self, optimizer_class: type) -> None:
        name = optimizer_class.__name__.lower()
        backend._said.clear()
        for choice, dtype, expected in (
            ("auto", FP32, "triton"),
            ("auto", torch.float64, "eager"),
            ("triton", BF16, "triton"),
            ("eager", FP32, "eager"),
            ("flash_attn", FP32, "triton"),  # about attention only
        ):
            with backend.use(choice), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                optimizers_of([7], optimizer_class, dtype)[0].step()
            assert backend.last_run()[name] == expected
            fallback = [str(w.message) for w in said if w.category is EagerFallbackWarning]
            takes = "the Triton kernels take float32, float16 and bfloat16, not float64"
            assert fallback == ([f"{name} runs on eager: {takes}"] if dtype == torch.float64 else [])
        with backend.use("triton"), pytest.raises(UserError, match=f"{name} cannot run on triton: .*float64"):
            optimizers_of([7], optimizer_class, torch.float64)[0].step()

    @pytest.mark.parametrize("optimizer_class", [Lamb, AdamW])
    @pytest.mark.parametrize("dtype", [FP32, BF16])
    def test_the_host_reads_nothing(
        self, optimizer_class: type, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        optimizer, *_ = optimizers_of([5, 70], optimizer_class, dtype)

        def read(tensor: Tensor, *_: object) -> None:
            raise AssertionError("the host waits for the device")

        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
                patch.setattr(Tensor, name, read)
            with backend.use("triton"):
                optimizer.step()
                optimizer.step()
                assert isinstance(optimizer.grad_norm, Tensor)
        assert not optimizer.step_was_skipped
        assert [int(s["step"]) for s in optimizer.state.values()] == [2, 2]

    @pytest.mark.parametrize("optimizer_class", [Lamb, AdamW])
    @pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
    def test_states_move_between_kernels_and_the_eager_step(
        self, optimizer_class: type, dtype: torch.dtype
    ) -> None:
        """Same keys, types and shapes; and a run that changes over gives what either gives alone."""
        pair = [optimizers_of([5, 70], optimizer_class, dtype)[0] for _ in range(2)]
        paths = ("eager", "triton")
        for optimizer, path in zip(pair, paths):
            steps_with(optimizer, path, range(2))
        eager, kernels = (optimizer.state_dict() for optimizer in pair)
        assert described(eager) == described(kernels)

        crossed = []
        for state, source, path in ((eager, pair[0], "triton"), (kernels, pair[1], "eager")):
            other = optimizers_of([5, 70], optimizer_class, dtype)[0]
            for ours, theirs in zip(params_of(other), params_of(source)):
                ours.data.copy_(theirs)
            other.load_state_dict(copy.deepcopy(state))
            steps_with(other, path, range(2, 4))
            crossed.append(other)
        for optimizer, path in zip(pair, paths):
            steps_with(optimizer, path, range(2, 4))
        for other in (pair[1], *crossed):
            for mine, want in zip(other.state.values(), pair[0].state.values()):
                assert mine["step"] == want["step"] == 4
                for name in set(want) - {"step"}:
                    torch.testing.assert_close(mine[name], want[name], rtol=1e-5, atol=1e-6)
            for mine, want in zip(params_of(other), params_of(pair[0])):
                torch.testing.assert_close(mine, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)

    @pytest.mark.parametrize("path", ["eager", "triton"])
    @pytest.mark.parametrize(("before", "after"), [(BF16, FP32), (FP32, BF16), (FP16, BF16)])
    def test_states_move_between_precisions(self, path: str, before: torch.dtype, after: torch.dtype) -> None:
        """Master weights go on where they are needed, and into the parameter where they are not."""
        source = optimizers_of([5, 70], Lamb, before)[0]
        steps_with(source, path, range(2))
        other = optimizers_of([5, 70], Lamb, after)[0]
        for ours, theirs in zip(params_of(other), params_of(source)):
            ours.data.copy_(theirs)
        other.load_state_dict(source.state_dict())
        weights = [source.state[p].get("master", p).detach().clone() for p in params_of(source)]
        for p, weight in zip(params_of(other), weights):
            state = other.state[p]
            assert ("master" in state) == (after != FP32 and before != FP32)
            if after == FP32 or before != FP32:
                assert_bits(state.get("master", p).detach(), weight)
        steps_with(other, path, range(2, 3))
        for p in params_of(other):
            state = other.state[p]
            assert ("master" in state) == (after != FP32)
            assert state["step"] == 3 and state["exp_avg"].dtype == FP32

    def test_a_run_may_change_over_at_any_step(self) -> None:
        ours, theirs = (optimizers_of([5, 70], Lamb, BF16)[0] for _ in range(2))
        for step in range(4):
            steps_with(ours, ("triton", "eager")[step % 2], [step])
            steps_with(theirs, "eager", [step])
        for mine, want in zip(ours.state.values(), theirs.state.values()):
            assert mine["step"] == want["step"] == 4
            torch.testing.assert_close(mine["master"], want["master"], rtol=1e-5, atol=1e-6)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [FP32, BF16])
    def test_a_cuda_graph_replays_steps(self, dtype: torch.dtype) -> None:
        """Learning rate, clipping, step count and refusal are the replay's, not the capture's."""
        results = []
        for captured in (False, True):
            optimizer = optimizers_of([5, 70, TILE + 3], Lamb, dtype)[0]
            params, rate = params_of(optimizer), torch.tensor(0.1, device=DEVICE)
            for group in optimizer.param_groups:
                group["lr"] = rate
            grads = [torch.zeros_like(p) for p in params]

            def load(step: int, params=params, grads=grads, rate=rate) -> None:
                for p, grad, values in zip(params, grads, gradients_for(params, step)):
                    p.grad = grad.copy_(values)
                if step == 3:
                    grads[1][0] = float("inf")
                rate.fill_(0.1 / (step + 1))

            replay = optimizer.step
            norms = []
            for step in range(5):
                load(step)
                if captured and step == 1:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        optimizer.step()
                    replay = graph.replay
                    load(step)
                replay()
                norms.append(optimizer.grad_norm.clone())
            results.append([*norms, *(t for s in optimizer.state.values() for t in s.values()), *params])
        for one, other in zip(*results):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
