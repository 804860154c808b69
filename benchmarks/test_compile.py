"""torch.compile against running without it: a training step, and inference on a padded batch.

On a CPU, where inductor needs a C++ compiler; compiling itself is not timed, but noted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.workloads import VOCAB_SIZE, typical_batch, wikipedia_512
from fastbert.compiled import compile_losses, compiler_problem
from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining

TOKENS = 2048


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    problem = compiler_problem(torch.device("cpu"))
    if problem:
        pytest.skip(f"torch.compile does not work here: {problem}")


def model() -> BertForPreTraining:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForPreTraining(BertConfig.named("tiny", vocab_size=VOCAB_SIZE, **sizes))


def seconds_of(first_call: Callable[[], object]) -> float:
    started = time.perf_counter()
    first_call()
    return round(time.perf_counter() - started, 1)


def test_compiled_losses(benchmark: BenchmarkFixture, in_turns: Callable[..., None]) -> None:
    """Forward and backward of a packed batch."""
    batch = typical_batch(wikipedia_512(tokens_per_batch=TOKENS))

    def side(model: BertForPreTraining) -> Callable[[], float]:
        def step() -> float:
            model.zero_grad(set_to_none=True)
            parts = model.loss_parts(batch)
            loss = parts.mlm_sum / parts.mlm_count + parts.nsp_sum / parts.nsp_count
            loss.backward()
            return loss.item()

        return step

    compiled, plain = model().train(), model().train()
    compile_losses(compiled)
    sides = {"compiled": side(compiled), "plain": side(plain)}
    benchmark.extra_info |= {"tokens": batch.num_tokens, "compile_s": seconds_of(sides["compiled"])}
    assert sides["compiled"]() == pytest.approx(sides["plain"](), abs=1e-4)
    for ours, theirs in zip(compiled.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-4)
    in_turns(sides, rounds=5, amount=batch.num_tokens, unit="tokens")


def test_compiled_encode(benchmark: BenchmarkFixture, in_turns: Callable[..., None]) -> None:
    """Ids and an attention mask, as a caller of transformers has them."""
    batch = typical_batch(wikipedia_512(tokens_per_batch=TOKENS)).padded()
    plain = model().bert.eval()
    compiled = torch.compile(plain, fullgraph=True)

    def side(model: Any) -> Callable[[], torch.Tensor]:
        return lambda: model(batch.input_ids, batch.attention_mask, batch.token_type_ids).last_hidden_state

    sides = {"compiled": side(compiled), "plain": side(plain)}
    with torch.inference_mode():
        benchmark.extra_info |= {"tokens": batch.num_tokens, "compile_s": seconds_of(sides["compiled"])}
        torch.testing.assert_close(sides["compiled"](), sides["plain"](), rtol=0, atol=2e-5)
        in_turns(sides, rounds=5, amount=batch.num_tokens, unit="tokens")
