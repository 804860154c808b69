"""Every operation against its floor and its peers; and what calling one costs besides its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from benchmarks.op_cases import OPS, op_task
from benchmarks.task import Roof, Task, is_the_basis, near
from benchmarks.workloads import VOCAB_SIZE
from fastbert import ops
from fastbert.config import BertConfig
from fastbert.modeling import BertModel
from fastbert.ops import SequenceLayout, attention_eager, backend


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward-backward"])
@pytest.mark.parametrize("name", OPS)
def test_op(
    name: str, backward: bool, device: torch.device, roof: Roof, in_turns: Callable[..., None]
) -> None:
    """At BERT-Base's sizes on a CPU, at BERT-Large's on a GPU; the peers are those of `benchmarks.peers`."""
    in_turns(op_task(name, backward, device, roof), rounds=5)


CALLS = 50  # a measurement; one would be within the clock's noise


@contextmanager
def through_the_dispatcher() -> Iterator[None]:
    """Every operation runs as torch.compile would have it: the registered operator, with its own autograd."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "call", lambda *args, registered, **others: registered())
        yield


def called(sides: dict[str, tuple[Callable[[], Tensor], bool]]) -> Task:
    """Name -> (call, whether it goes through the dispatcher): CALLS of each, with the first one's result."""
    task = Task(CALLS, "call")

    def repeated(call: Callable[[], Tensor], registered: bool) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with through_the_dispatcher() if registered else nullcontext():
                for _ in range(CALLS):
                    result = call()
            return result

        return run

    check = is_the_basis
    for name, (call, registered) in sides.items():
        task.admit(name, lambda call=call, registered=registered: repeated(call, registered), check)
        assert name in task.sides, task.refused
        check = near(task.sides[name](), 1e-5) if check is is_the_basis else check
    return task


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward-backward"])
def test_one_small_attention(
    backward: bool, benchmark: BenchmarkFixture, in_turns: Callable[..., None]
) -> None:
    """4 sequences of 8 tokens, 4 heads of 16."""
    cu_seqlens = torch.arange(0, 33, 8, dtype=torch.int32)
    layout = SequenceLayout.build(cu_seqlens, 8, 32)
    qkv = torch.randn(32, 3, 4, 16, requires_grad=backward)
    dout = torch.ones(32, 4, 16)

    def attend() -> Tensor:
        out = ops.varlen_attention(qkv, layout)
        return torch.autograd.grad(out, qkv, dout)[0] if backward else out

    @torch.no_grad()
    def body_alone() -> Tensor:
        arguments = (qkv, cu_seqlens, 8, None, None)
        out, lse = attention_eager.attention_reference(*arguments)
        return (
            attention_eager.attention_backward_reference(dout, qkv, out, lse, *arguments[1:])
            if backward
            else out
        )

    in_turns(
        called(
            {
                "bypass": (attend, False),
                "registered": (attend, True),
                "registered operators' bodies alone": (body_alone, False),
            }
        ),
        rounds=9,
    )


def test_a_small_model(benchmark: BenchmarkFixture, in_turns: Callable[..., None]) -> None:
    """Inference through 4 layers of 256 on one row of 16 tokens."""
    model = BertModel(BertConfig.named("mini", vocab_size=VOCAB_SIZE)).eval()
    ids = torch.randint(5, VOCAB_SIZE, (1, 16))

    @torch.inference_mode()
    def encode() -> Tensor:
        return model(ids).last_hidden_state

    in_turns(called({"bypass": (encode, False), "registered": (encode, True)}), rounds=9)
