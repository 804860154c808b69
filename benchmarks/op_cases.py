"""Every operation of the library as a task: through its public function, on any device, against its peers.

FLOPs and bytes are those that the work needs at least, a multiply-add being 2 and each tensor read or written
once: the floor is the same for every side. e is the size of an element, T the tokens, H the width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.machine import dtype_of
from benchmarks.task import OURS, Call, Roof, Task, is_the_basis, near
from benchmarks.workloads import mixed_lengths
from fastbert import ops
from fastbert.ops import SequenceLayout

EPS = 1e-12
MASKED = 0.15  # of the tokens
# norm of the difference of two ways to compute the same, relative
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    """Of a batch of Wikipedia's length mix at 512, and of the model it runs through."""

    tokens: int
    width: int
    heads: int
    vocab: int = 30522
    longest: int = 512

    @classmethod
    def fitting(cls, device: torch.device) -> Shape:
        """BERT-Large on a GPU, BERT-Base and fewer tokens on a CPU."""
        return cls(16_384, 1024, 16) if device.type == "cuda" else cls(1024, 768, 12)


class Inputs:
    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.lengths = sorted(mixed_lengths(shape.tokens, shape.longest), reverse=True)
        self.cu_seqlens = torch.tensor([0, *self.lengths], device=device).cumsum(0).int()
        self.keep = torch.arange(shape.longest, device=device) < self.cu_seqlens.diff()[:, None]
        self.indices = self.keep.flatten().nonzero().squeeze(1)

    def random(self, *sizes: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(sizes, device=self.device)).to(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Of a [T, H] tensor."""
        return self.shape.tokens * self.shape.width * self.dtype.itemsize


@dataclass(frozen=True)
class Op:
    """Sides of an operation: name -> function of the `leaves`; the first one is fastbert's.

    `flop` and `bytes` are (forward, forward and backward). `dout` is the gradient of the first output.
    """

    sides: dict[str, Callable[..., Any]]
    leaves: Sequence[Tensor]
    basis: str  # the side that the others are compared with
    flop: tuple[float, float]
    bytes: tuple[float, float]
    # of a side that may not be compared as it is timed, because it drops other elements
    checked: dict[str, Callable[..., Any]] | None = None


def task_of(op: Op, backward: bool, roof: Roof) -> Task:
    """The forward pass without gradients, or forward and backward; "tflop" or "gb" by what bounds it."""
    flop, num_bytes = op.flop[backward], op.bytes[backward]
    is_product = roof.bound(flop, num_bytes) == "product"
    amount, unit = (flop / 1e12, "tflop") if is_product else (num_bytes / 1e9, "gb")
    task = Task(amount, unit, flop=flop, bytes=num_bytes, roof=roof)
    # parameters, so that a module may hold them
    leaves = [nn.Parameter(leaf.detach(), requires_grad=backward) for leaf in op.leaves]
    douts: list[Tensor] = []

    def call_of(function: Callable[..., Any]) -> Call:
        def call() -> tuple[Tensor, ...]:
            with torch.set_grad_enabled(backward):
                out: Tensor = function(*leaves)
                if not backward:
                    return (out,)
                if not douts:
                    douts.append(torch.randn_like(out))
                return (out.detach(), *torch.autograd.grad(out, leaves, douts[0]))

        return call

    checked = op.checked or op.sides
    expected = call_of(checked[op.basis])()
    check = near(expected, TOLERANCE[leaves[0].dtype])
    for name, function in op.sides.items():
        make = functools.partial(call_of, function)
        make_checked = functools.partial(call_of, checked[name]) if op.checked else None
        task.admit(name, make, is_the_basis if name == op.basis else check, make_checked)
    return task


# ---- the operations ---------------------------------------------------------------------------------------


def embeddings(inputs: Inputs) -> Op:
    """A row of the word table read and one of y written a token; and the table's gradient written."""
    s, table_bytes = inputs.shape, inputs.shape.vocab * inputs.shape.width * inputs.dtype.itemsize
    words = torch.randint(s.vocab, (s.tokens,), device=inputs.device)
    places = torch.cat([torch.arange(n, device=inputs.device) for n in inputs.lengths])
    types = torch.zeros_like(words)
    tables = [inputs.random(rows, s.width) for rows in (s.vocab, 2, s.longest)]
    leaves = [*tables, inputs.random(s.width), inputs.random(s.width)]

    def torchs(word: Tensor, kind: Tensor, place: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = F.embedding(words, word) + F.embedding(types, kind) + F.embedding(places, place)
        return F.layer_norm(rows, (s.width,), weight, bias, EPS)

    return Op(
        {OURS: lambda *tensors: ops.embed(words, types, places, *tensors, EPS), "torch": torchs},
        leaves,
        "torch",
        (0.0, 0.0),
        (2.0 * inputs.row_bytes, 8.0 * inputs.row_bytes + table_bytes),
    )


def qkv(inputs: Inputs) -> Op:
    s, e = inputs.shape, inputs.dtype.itemsize
    modules = [nn.Linear(s.width, s.width).to(inputs.device, inputs.dtype) for _ in range(3)]
    x = inputs.random(s.tokens, s.width)

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        for module, weight, bias in zip(modules, parameters[::2], parameters[1::2]):
            module.weight, module.bias = weight, bias
        return ops.qkv_projection(x, *modules, s.heads)

    def torchs(x: Tensor, *parameters: Tensor) -> Tensor:
        products = [F.linear(x, w, b) for w, b in zip(parameters[::2], parameters[1::2])]
        return torch.stack(products, dim=1).view(s.tokens, 3, s.heads, -1)

    leaves = [x, *(p.detach() for module in modules for p in (module.weight, module.bias))]
    once = 4.0 * inputs.row_bytes + 3 * s.width**2 * e
    flop = 6.0 * s.tokens * s.width**2
    sides = {OURS: ours, "torch, three products": torchs}
    return Op(sides, leaves, "torch, three products", (flop, 3 * flop), (once, 3 * once))


def attention(inputs: Inputs) -> Op:
    """Variable lengths without dropout; torch's on the rows padded to the longest, as a padded model has it.

    Backward is five products, the scores made again among them, because no one keeps them.
    """
    s = inputs.shape
    layout = SequenceLayout.build(inputs.cu_seqlens, s.longest, s.tokens)
    qkv = inputs.random(s.tokens, 3, s.heads, s.width // s.heads)

    def packed(peer: Callable[..., Tensor], *more: Any) -> Callable[[Tensor], Tensor]:
        return lambda qkv: peer(*qkv.unbind(1), inputs.cu_seqlens, s.longest, *more)

    def sdpa_padded(qkv: Tensor) -> Tensor:
        rows = qkv.new_zeros(inputs.keep.numel(), *qkv.shape[1:]).index_copy(0, inputs.indices, qkv)
        q, k, v = rows.unflatten(0, inputs.keep.shape).unbind(2)
        return peers.padded_sdpa(q, k, v, inputs.keep, 0.0).flatten(0, 1)[inputs.indices]

    flop = 4.0 * s.width * sum(n * n for n in inputs.lengths)
    return Op(
        {
            OURS: lambda qkv: ops.varlen_attention(qkv, layout),
            "torch sdpa, padded": sdpa_padded,
            "torch varlen_attn": packed(peers.torch_varlen),
            "flash-attn": packed(peers.flash_attn_varlen, 0.0),
        },
        [qkv],
        "torch sdpa, padded",
        (flop, 3.5 * flop),
        (4.0 * inputs.row_bytes, 12.0 * inputs.row_bytes),
    )


def dropout_add_norm(inputs: Inputs, p: float = 0.0) -> Op:
    s = inputs.shape
    x, residual = inputs.random(s.tokens, s.width), inputs.random(s.tokens, s.width)
    weight, bias = inputs.random(s.width), inputs.random(s.width)

    def sides(p: float) -> dict[str, Callable[..., Tensor]]:
        def behind(norm_of: Callable[..., Any]) -> Callable[..., Tensor]:
            def run(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                norm = norm_of(weight, bias, EPS)
                norm.weight, norm.bias = weight, bias
                return norm(F.dropout(x, p) + residual)

            return run

        return {
            OURS: lambda x, residual, w, b: ops.dropout_add_norm(x, residual, w, b, EPS, p),
            "torch": lambda x, residual, w, b: F.layer_norm(
                F.dropout(x, p) + residual, (s.width,), w, b, EPS
            ),
            "apex FusedLayerNorm": behind(peers.fused_layer_norm),
            "Liger LayerNorm": behind(peers.liger_layer_norm),
        }

    return Op(
        sides(p),
        [x, residual, weight, bias],
        "torch",
        (0.0, 0.0),
        (3.0 * inputs.row_bytes, 8.0 * inputs.row_bytes),
        checked=sides(0.0),
    )


def linear_act(inputs: Inputs) -> Op:
    """The feed-forward product with its bias and GELU. With gradients the product is written beside y."""
    s, e = inputs.shape, inputs.dtype.itemsize
    x = inputs.random(s.tokens, s.width)
    weight = inputs.random(4 * s.width, s.width, scale=s.width**-0.5)
    bias = inputs.random(4 * s.width)
    flop, weight_bytes = 8.0 * s.tokens * s.width**2, 4 * s.width**2 * e
    return Op(
        {
            OURS: lambda x, w, b: ops.linear_act(x, w, b, "gelu"),
            "torch": lambda x, w, b: F.gelu(F.linear(x, w, b)),
        },
        [x, weight, bias],
        "torch",
        (flop, 3 * flop),
        (5 * inputs.row_bytes + weight_bytes, 31 * inputs.row_bytes + 3 * weight_bytes),
    )


def linear_cross_entropy(inputs: Inputs) -> Op:
    """The loss over the masked words, without whole logits."""
    s, e = inputs.shape, inputs.dtype.itemsize
    rows = round(MASKED * s.tokens)
    hidden, bias = inputs.random(rows, s.width), inputs.random(s.vocab)
    weight = inputs.random(s.vocab, s.width, scale=s.width**-0.5)
    labels = torch.randint(s.vocab, (rows,), device=inputs.device)

    def torchs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, reduction="sum")

    def mean(loss_sum: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *tensors: loss_sum(*tensors) / rows

    flop, once = 2.0 * rows * s.vocab * s.width, (s.vocab + rows) * s.width * e
    return Op(
        {
            OURS: mean(lambda *tensors: ops.linear_cross_entropy(*tensors, labels)[0]),
            "torch, whole logits": mean(torchs),
            "Liger cross-entropy": mean(lambda *tensors: peers.liger_cross_entropy(*tensors, labels)),
            "Liger linear cross-entropy": mean(
                lambda *tensors: peers.liger_linear_cross_entropy(*tensors, labels)
            ),
        },
        [hidden, weight, bias],
        "torch, whole logits",
        (flop, 3 * flop),
        (once, 3 * once),
    )


def unpad(inputs: Inputs) -> Op:
    s = inputs.shape
    x = inputs.random(*inputs.keep.shape, s.width)
    return Op(
        {
            OURS: lambda x: ops.unpad_rows(x, inputs.indices),
            "torch": lambda x: x.flatten(0, 1)[inputs.indices],
            "flash-attn bert_padding": lambda x: peers.flash_attn_unpad(x, inputs.indices),
        },
        [x],
        "torch",
        (0.0, 0.0),
        (2.0 * inputs.row_bytes, 3.0 * inputs.row_bytes + x.nbytes),
    )


def pad(inputs: Inputs) -> Op:
    s, (batch_size, seqlen) = inputs.shape, inputs.keep.shape
    rows = inputs.random(s.tokens, s.width)
    slots_bytes = inputs.keep.numel() * s.width * inputs.dtype.itemsize

    def torchs(rows: Tensor) -> Tensor:
        slots = rows.new_zeros(inputs.keep.numel(), s.width).index_copy(0, inputs.indices, rows)
        return slots.view(batch_size, seqlen, s.width)

    return Op(
        {
            OURS: lambda rows: ops.pad_rows(rows, inputs.indices, batch_size, seqlen),
            "torch": torchs,
            "flash-attn bert_padding": lambda rows: peers.flash_attn_pad(
                rows, inputs.indices, batch_size, seqlen
            ),
        },
        [rows],
        "torch",
        (0.0, 0.0),
        (inputs.row_bytes + slots_bytes, 3.0 * inputs.row_bytes + slots_bytes),
    )


OPS: dict[str, Callable[[Inputs], Op]] = {
    "embeddings": embeddings,
    "qkv": qkv,
    "attention": attention,
    "dropout_add_norm": dropout_add_norm,
    "dropout_add_norm, dropout 0.1": functools.partial(dropout_add_norm, p=0.1),
    "linear_act": linear_act,
    "linear_cross_entropy": linear_cross_entropy,
    "unpad": unpad,
    "pad": pad,
}


def op_task(name: str, backward: bool, device: torch.device, roof: Roof) -> Task:
    """The task of an operation at sizes that fit the device."""
    return task_of(OPS[name](Inputs(Shape.fitting(device), device, dtype_of(device))), backward, roof)
