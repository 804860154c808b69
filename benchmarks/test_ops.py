"""What calling an operation costs besides its arithmetic: past the dispatcher, and through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from benchmarks.workloads import VOCAB_SIZE
from fastbert import ops
from fastbert.config import BertConfig
from fastbert.modeling import BertModel
from fastbert.ops import SequenceLayout, attention_eager, backend

CALLS = 50  # a measurement; one would be within the clock's noise


@contextmanager
def through_the_dispatcher() -> Iterator[None]:
    """Every operation runs as torch.compile would have it: the registered operator, with its own autograd."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "call", lambda *args, registered, **others: registered())
        yield


def repeated(call: Callable[[], object], registered: bool) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            call()

    def run_registered() -> None:
        with through_the_dispatcher():
            run()

    return run_registered if registered else run


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

    with through_the_dispatcher():
        through = attend()
    torch.testing.assert_close(through, attend(), rtol=0, atol=2e-6)
    torch.testing.assert_close(body_alone(), through, rtol=0, atol=2e-6)
    sides = {
        "bypass": repeated(attend, registered=False),
        "registered": repeated(attend, registered=True),
        "registered operators' bodies alone": repeated(body_alone, registered=False),
    }
    in_turns(sides, rounds=9, amount=CALLS, unit="calls")


def test_a_small_model(benchmark: BenchmarkFixture, in_turns: Callable[..., None]) -> None:
    """Inference through 4 layers of 256 on one row of 16 tokens."""
    model = BertModel(BertConfig.named("mini", vocab_size=VOCAB_SIZE)).eval()
    ids = torch.randint(5, VOCAB_SIZE, (1, 16))

    @torch.inference_mode()
    def encode() -> Tensor:
        return model(ids).last_hidden_state

    with through_the_dispatcher():
        through = encode()
    torch.testing.assert_close(through, encode(), rtol=0, atol=2e-5)
    sides = {"bypass": repeated(encode, registered=False), "registered": repeated(encode, registered=True)}
    in_turns(sides, rounds=9, amount=CALLS, unit="calls")
