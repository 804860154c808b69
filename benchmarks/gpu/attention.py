"""Rows of attention: the kernels against torch's and flash-attn's on the same tokens, without padding.

A peer is named as what really runs. It gets q, k and v as views of one tensor, as a model has them, and its
gradients are those of the three, not put together into one tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fastbert_kernels.attention import attention_fwd, attention_schedule
from fastbert_kernels.attention_bwd import attention_bwd
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import targets
from benchmarks.gpu.setting import DTYPE, Setting
from benchmarks.gpu.timing import equals
from benchmarks.task import OURS, Call, Case, Task, near
from benchmarks.workloads import mixed_lengths
from fastbert.ops import attention_eager


class Batch:
    """Sequences end to end, longest first as flash-attention likes them; q, k, v [T, heads, D] are views."""

    def __init__(self, lengths: list[int], num_heads: int, head_dim: int, device: torch.device) -> None:
        self.lengths = sorted(lengths, reverse=True)
        self.longest, self.total = self.lengths[0], sum(self.lengths)
        shape = (self.total, 3, num_heads, head_dim)
        self.qkv = torch.randn(shape, device=device).to(DTYPE)
        self.q, self.k, self.v = self.qkv.unbind(1)
        self.dout = torch.randn(self.total, num_heads, head_dim, device=device).to(DTYPE)
        self.cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        self.schedule = attention_schedule(self.cu_seqlens, self.total, self.longest)
        self.seed = torch.tensor([2026], device=device)
        self.flops = 4 * sum(n * n for n in self.lengths) * num_heads * head_dim

    @property
    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def reference(self) -> tuple[Tensor, Tensor]:
        """(out, dqkv) of plain torch without dropout."""
        bounds = (self.cu_seqlens, self.longest, None, None)
        out, lse = attention_eager.attention_reference(self.qkv, *bounds)
        return out, attention_eager.attention_backward_reference(self.dout, self.qkv, out, lse, *bounds)

    def forward(self, p: float) -> tuple[Tensor, Tensor]:
        return attention_fwd(*self.views, self.schedule, self.longest, dropout_p=p, seed=self.seed)

    def backward(self, p: float) -> Call:
        out, lse = self.forward(p)
        form: dict[str, Any] = {"dropout_p": p, "seed": self.seed}
        return lambda: attention_bwd(self.dout, *self.views, out, lse, self.schedule, self.longest, **form)


@dataclass(frozen=True)
class Peer:
    """Another implementation: forward(q, k, v, dropout_p), and its layout from and to [T, heads, D]."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, float], Any]
    rows: Callable[[Any], Tensor] = lambda out: out
    like: Callable[[Tensor], Tensor] = lambda dout: dout
    has_backward: bool = True
    is_contiguous: bool = False  # gets copies of q, k and v that are not views of one tensor

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return tuple(x.contiguous() if self.is_contiguous else x for x in batch.views)

    def results(self, out: Any) -> tuple[Tensor, ...]:
        return (self.rows(out),)


SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention_peers(batch: Batch, dropout_p: float) -> Iterator[Peer]:
    if batch.lengths[0] == batch.lengths[-1]:
        for name, chosen in SDPA_BACKENDS.items():
            yield _batched(f"torch sdpa {name}, [B, H, L, D]", chosen, batch)
    else:
        yield _by_length(batch)
    yield _jagged(batch)
    if dropout_p == 0.0:  # torch's varlen_attn has no dropout
        yield _torch_varlen(batch)
    yield _flash_attn(batch)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, p: float, chosen: SDPBackend) -> Tensor:
    with sdpa_kernel(chosen):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p)


def _batched(name: str, chosen: SDPBackend, batch: Batch) -> Peer:
    count, length = len(batch.lengths), batch.longest

    def rows_first(x: Tensor) -> Tensor:  # a view: [T, H, D] -> [B, H, L, D]
        return x.unflatten(0, (count, length)).transpose(1, 2)

    return Peer(
        name,
        lambda q, k, v, p: _sdpa(rows_first(q), rows_first(k), rows_first(v), p, chosen),
        rows=lambda out: out.transpose(1, 2).reshape(batch.q.shape),
        like=rows_first,
    )


def _by_length(batch: Batch) -> Peer:
    runs = attention_eager.equal_runs(batch.cu_seqlens.cpu())

    def forward(q: Tensor, k: Tensor, v: Tensor, p: float) -> list[Tensor]:
        outputs = []
        for run in runs:
            rows = slice(run.start, run.start + run.count * run.length)
            parts = (x[rows].unflatten(0, (run.count, run.length)).transpose(1, 2) for x in (q, k, v))
            outputs.append(F.scaled_dot_product_attention(*parts, dropout_p=p))
        return outputs

    name = f"torch sdpa by default, one call for each of {len(runs)} lengths"
    # its gradients would be put together by copies that are no attention
    rows = lambda outs: torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])  # noqa: E731
    return Peer(name, forward, rows, has_backward=False)


def _jagged(batch: Batch) -> Peer:
    offsets = batch.cu_seqlens.long()
    bounds = {"min_seqlen": batch.lengths[-1], "max_seqlen": batch.longest}  # else they are read from the GPU

    def forward(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        nested = (
            torch.nested.nested_tensor_from_jagged(x, offsets, **bounds).transpose(1, 2) for x in (q, k, v)
        )
        return _sdpa(*nested, p, SDPBackend.FLASH_ATTENTION).transpose(1, 2).values()

    # strided ones would be copied in each call
    return Peer("torch sdpa flash, jagged, contiguous", forward, is_contiguous=True)


def _torch_varlen(batch: Batch) -> Peer:
    def forward(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        bounds = (batch.cu_seqlens, batch.cu_seqlens, batch.longest, batch.longest)
        return varlen_attn(q, k, v, *bounds)

    return Peer("torch varlen_attn", forward)


def _flash_attn(batch: Batch) -> Peer:
    def forward(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        bounds = (batch.cu_seqlens, batch.cu_seqlens, batch.longest, batch.longest)
        return flash_attn_varlen_func(q, k, v, *bounds, dropout_p=p)

    return Peer("flash-attn", forward)


TOLERANCE = 2e-2  # of bf16 results, relative to their norm


def attention_cases(setting: Setting) -> Iterator[Case]:
    sizes = setting.sizes
    mix = mixed_lengths(sizes.tokens, sizes.lengths[-1])
    equal = {f"of {n}": [n] * (sizes.tokens // n) for n in sizes.lengths}
    for number, (num_heads, head_dim) in enumerate(sizes.heads):
        for kind, lengths in {**({} if number else equal), "of Wikipedia's mix": mix}.items():
            for p in (0.0, 0.1):
                for direction in ("fwd", "bwd"):
                    target = None
                    if setting.has_targets and head_dim == 64 and kind == "of 512":
                        target = targets.ATTENTION_TFLOPS[direction]
                    yield Case(
                        f"attention_{direction}[{num_heads}x{head_dim}, {kind}, dropout {p:g}]",
                        functools.partial(
                            _attention, direction, lengths, num_heads, head_dim, p, setting, target
                        ),
                    )


def _attention(
    direction: str,
    lengths: list[int],
    num_heads: int,
    head_dim: int,
    p: float,
    setting: Setting,
    target: float | None,
) -> Task:
    batch = Batch(lengths, num_heads, head_dim, setting.device)
    factor = 1.0 if direction == "fwd" else 2.5
    task = Task(factor * batch.flops / 1e12, "tflop", floor=setting.peak_tflops, target=target)
    task.notes = {"tokens": batch.total, "sequences": len(batch.lengths)}
    out, dqkv = batch.reference()
    # other masks are dropped elsewhere, so results are compared without dropout: ours with the eager path,
    # which rounds elsewhere, and everyone else with ours
    if direction == "fwd":
        right = near(out, TOLERANCE, lambda result: result[0])
        task.admit(OURS, lambda: lambda: batch.forward(p), right, lambda: lambda: batch.forward(0.0))
        expected: tuple[Tensor, ...] = (batch.forward(0.0)[0],)
    else:
        task.admit(OURS, lambda: batch.backward(p), near(dqkv, TOLERANCE), lambda: batch.backward(0.0))
        expected = batch.backward(0.0)().unbind(1)
    for peer in attention_peers(batch, p):
        if direction == "fwd":
            make, check = functools.partial(_forward_of, peer, batch), equals(expected, peer.results)
        elif peer.has_backward:
            make, check = functools.partial(_backward_of, peer, batch), equals(expected, tuple)
        else:
            continue
        task.admit(peer.name, functools.partial(make, p), check, functools.partial(make, 0.0))
    return task


def _forward_of(peer: Peer, batch: Batch, p: float) -> Call:
    inputs = peer.inputs(batch)
    return torch.no_grad()(lambda: peer.forward(*inputs, p))


def _backward_of(peer: Peer, batch: Batch, p: float) -> Call:
    leaves = [x.detach().requires_grad_() for x in peer.inputs(batch)]
    out = peer.forward(*leaves, p)
    return functools.partial(torch.autograd.grad, out, leaves, peer.like(batch.dout), retain_graph=True)
