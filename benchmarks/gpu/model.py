"""Rows of a call and of whole models: what the host pays, and tokens a second of BERT's body."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from fastbert_kernels.attention import attention_fwd
from torch import Tensor

from benchmarks.gpu.setting import DTYPE, REAL, Setting, model_fields
from benchmarks.gpu.timing import equals
from benchmarks.task import OURS, Call, Case, Check, Task, is_the_basis, near
from benchmarks.workloads import mixed_lengths, packed_batch
from fastbert import ops
from fastbert.batch import PackedBatch
from fastbert.config import BertConfig
from fastbert.modeling import BertModel
from fastbert.ops import SequenceLayout, backend


def call_cases(setting: Setting) -> Iterator[Case]:
    yield Case("call[attention, 4 x 8 tokens]", functools.partial(_attention_call, setting))
    yield Case("call[model of 4 x 256, 16 tokens]", functools.partial(_model_call, setting))


def registered(call: Call) -> Call:
    """`call` with every operation going through the dispatcher, as torch.compile has it."""

    def through() -> Any:
        with mock.patch.object(backend, "call", lambda *args, registered, **others: registered()):
            return call()

    return through


def _attention_call(setting: Setting) -> Task:
    num_heads = 4 if setting.sizes is REAL else 1
    qkv = torch.randn(32, 3, num_heads, 16, device=setting.device).to(DTYPE)
    cu_seqlens = torch.arange(0, 33, 8, dtype=torch.int32, device=setting.device)
    layout = SequenceLayout.build(cu_seqlens, 8, 32)
    assert layout.schedule is not None
    schedule = layout.schedule
    expected = (ops.varlen_attention(qkv, layout),)
    task = Task(1, "call", clock="host")
    bypass = lambda: ops.varlen_attention(qkv, layout)  # noqa: E731
    task.admit(OURS, lambda: bypass, equals(expected))
    task.admit("through the dispatcher", lambda: registered(bypass), equals(expected))
    task.admit(
        "launcher alone",
        lambda: lambda: attention_fwd(*qkv.unbind(1), schedule, 8),
        equals(expected, lambda out: out[:1]),
    )
    return task


def _model_call(setting: Setting) -> Task:
    width = 256 if setting.sizes is REAL else 32
    config = BertConfig(
        **model_fields(width, 4 if setting.sizes is REAL else 1, width=width // 4, vocab_size=1000)
    )
    model = BertModel(config).to(setting.device, DTYPE).eval()
    ids = torch.randint(5, 1000, (1, 16), device=setting.device)
    encode = torch.inference_mode()(lambda: model(ids).last_hidden_state)
    task = Task(1, "call", clock="host")
    task.admit(OURS, lambda: encode, is_the_basis)
    task.admit("through the dispatcher", lambda: registered(encode), equals((encode(),)))
    return task


# ---- whole models -----------------------------------------------------------------------------------------

# of two bf16 models with the same weights, relative to the norm: a rounding in each of 24 layers
MODEL_TOLERANCE = 0.05


def model_cases(setting: Setting) -> Iterator[Case]:
    for fields in setting.sizes.models:
        shape = f"{fields['num_hidden_layers']} layers of {fields['hidden_size']}"
        for training in (False, True):
            name = f"model[{shape}, {'forward and backward, dropout 0.1' if training else 'forward'}]"
            yield Case(name, functools.partial(_body, fields, training, setting))


def _body(fields: dict[str, int], training: bool, setting: Setting) -> Task:
    """BERT's body in bf16 on Wikipedia's mix of lengths: packed, and padded for transformers."""
    lengths = sorted(mixed_lengths(setting.sizes.model_tokens, setting.sizes.lengths[-1]), reverse=True)
    batch = packed_batch(lengths, fields["vocab_size"], masked=0.0).to(setting.device)
    model = BertModel(BertConfig(**fields), add_pooling_layer=False).to(setting.device, DTYPE)
    layers, hidden_size = fields["num_hidden_layers"], fields["hidden_size"]
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    flops = layers * (24 * hidden_size**2 * tokens + 4 * hidden_size * squares) * (3 if training else 1)
    floor = None if setting.peak_tflops is None else setting.peak_tflops * 1e12 * tokens / flops
    task = Task(tokens, "token", clock="step", floor=floor)
    task.notes = {"sequences": len(lengths), "tflop": round(flops / 1e12, 3)}

    def ours(choice: str, training: bool) -> Call:
        def states() -> Tensor:
            with backend.use(choice):
                hidden: Tensor = model(batch).last_hidden_state
                return hidden

        return _step(model, states, training)

    expected = ours("triton", training=False)()
    for name, choice in ((OURS, "auto"), ("the eager path", "eager")):
        make = functools.partial(ours, choice)
        task.admit(name, functools.partial(make, training), _near(expected), functools.partial(make, False))
        if name == OURS:
            ran = backend.last_run().items()
            task.notes["ran"] = {op: how for op, how in ran if training or "backward" not in op}

    padded = batch_padded(batch, lengths)

    def theirs(training: bool) -> Call:
        import transformers

        config = transformers.BertConfig(**fields, attn_implementation="sdpa")
        other = transformers.BertModel(config, add_pooling_layer=False)
        other.load_state_dict(model.state_dict())
        other = other.to(setting.device, DTYPE)
        return _step(other, lambda: other(**padded).last_hidden_state, training)

    name = "transformers sdpa, padded"
    check = _near(expected, padded["attention_mask"])
    task.admit(name, functools.partial(theirs, training), check, functools.partial(theirs, False))
    return task


def _step(model: torch.nn.Module, states: Call, training: bool) -> Call:
    """The last hidden states [T, H]; or, in training, the gradients of every parameter."""
    if not training:

        def encode() -> Tensor:
            model.eval()
            with torch.no_grad():
                result: Tensor = states()
            return result

        return encode
    parameters = list(model.parameters())
    dout: list[Tensor] = []

    def train() -> tuple[Tensor, ...]:
        model.train()
        hidden = states()
        if not dout:
            dout.append(torch.randn_like(hidden))
        return torch.autograd.grad(hidden, parameters, dout[0])

    return train


def _near(expected: Tensor, mask: Tensor | None = None) -> Check:
    """`mask` [B, S]: which positions of a padded result are expected's rows."""
    return near(expected, MODEL_TOLERANCE, lambda hidden: hidden if mask is None else hidden[mask])


def batch_padded(batch: PackedBatch, lengths: list[int]) -> dict[str, Tensor]:
    """transformers' arguments [B, S], padded to the longest."""
    seqlens = torch.tensor(lengths, device=batch.input_ids.device)
    mask = torch.arange(batch.max_seqlen, device=seqlens.device) < seqlens[:, None]
    ids = torch.zeros_like(mask, dtype=torch.long).masked_scatter_(mask, batch.input_ids)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
