"""Rows of the embeddings with their norm and dropout, and of padding, against torch's operations."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from fastbert_kernels.embedding import embedding_bwd, embedding_fwd
from fastbert_kernels.gather_rows import gather_rows, inverse_index
from torch import Tensor

from benchmarks.gpu.setting import DTYPE, Setting
from benchmarks.gpu.timing import equals
from benchmarks.task import OURS, Call, Case, Task, is_the_basis
from benchmarks.workloads import mixed_lengths

DROPOUT_P, EPS = 0.1, 1e-12
TYPES, POSITIONS = 2, 512


def embedding_cases(setting: Setting) -> Iterator[Case]:
    """BERT's widths and vocabulary, over a batch in which every sequence begins with the same ids."""
    for fields in setting.sizes.models:
        width, vocab = fields["hidden_size"], fields["vocab_size"]
        name = f"[{setting.sizes.tokens} x {width}, {vocab} words, dropout {DROPOUT_P}]"
        for op, prepare in (("embed", _forward), ("embed_bwd", _backward)):
            yield Case(op + name, functools.partial(prepare, width, vocab, setting))


def padding_cases(setting: Setting) -> Iterator[Case]:
    """Hidden states of Wikipedia's lengths, to rows of the longest and back."""
    for width in setting.sizes.widths:
        for op in ("pad_rows", "unpad_rows"):
            name = f"{op}[{setting.sizes.tokens} x {width}]"
            yield Case(name, functools.partial(_padding, op, width, setting))


def _padding(op: str, width: int, setting: Setting) -> Task:
    device, tokens, longest = setting.device, setting.sizes.tokens, setting.sizes.lengths[-1]
    lengths = torch.tensor(mixed_lengths(tokens, longest), device=device)
    keep = torch.arange(longest, device=device) < lengths[:, None]
    indices, num_slots = keep.flatten().nonzero().squeeze(1), keep.numel()
    rows = torch.randn(tokens, width, device=device).to(DTYPE)
    slots = rows.new_zeros(num_slots, width).index_copy(0, indices, rows)
    if op == "unpad_rows":
        task = Task(2 * rows.nbytes / 1e9, "gb", floor=setting.peak_gb)
        ours, theirs, expected = lambda: gather_rows(slots, indices), lambda: slots[indices], rows
    else:
        task = Task((rows.nbytes + slots.nbytes) / 1e9, "gb", floor=setting.peak_gb)
        expected = slots
        ours = lambda: gather_rows(rows, inverse_index(indices, num_slots))  # noqa: E731
        theirs = lambda: rows.new_zeros(num_slots, width).index_copy(0, indices, rows)  # noqa: E731
    task.admit(OURS, lambda: ours, equals((expected,)))
    task.admit("torch", lambda: theirs, equals((expected,)))
    return task


class _Problem:
    def __init__(self, width: int, vocab: int, setting: Setting) -> None:
        device, tokens = setting.device, setting.sizes.tokens
        places = torch.arange(tokens, device=device) % min(POSITIONS, max(setting.sizes.lengths))
        # frequencies like those of words: a few ids are a large share
        words = (torch.rand(tokens, device=device) ** 4 * vocab).long().masked_fill(places == 0, 1)
        self.ids = (words, (places > 100).long(), places)
        self.tables = tuple(
            torch.randn(rows, width, device=device).to(DTYPE) for rows in (vocab, TYPES, POSITIONS)
        )
        self.weight, self.bias, self.dy = (
            torch.randn(shape, device=device).to(DTYPE) for shape in ((width,), (width,), (tokens, width))
        )
        self.seed = torch.tensor([7], device=device)
        report = torch.full((3, 2), -1, dtype=torch.int64)
        self.report = report.pin_memory() if device.type == "cuda" else report
        self.bytes = tokens * width * DTYPE.itemsize

    def fwd(self, dropout_p: float) -> tuple[Tensor, Tensor, Tensor]:
        return embedding_fwd(
            self.ids, self.tables, self.weight, self.bias, EPS, self.report, dropout_p, self.seed  # type: ignore[arg-type]
        )  # fmt: skip

    def torch_fwd(self, parameters: Any, dropout_p: float) -> Tensor:
        *tables, weight, bias = parameters
        words, types, positions = (F.embedding(i, table) for i, table in zip(self.ids, tables))
        return F.dropout(F.layer_norm(words + types + positions, weight.shape, weight, bias, EPS), dropout_p)


def _forward(width: int, vocab: int, setting: Setting) -> Task:
    """A row of the word table is read and one of y written for each token."""
    p = _Problem(width, vocab, setting)
    task = Task(2 * p.bytes / 1e9, "gb", floor=setting.peak_gb)
    parameters = (*p.tables, p.weight, p.bias)
    expected = (p.torch_fwd(parameters, 0.0),)
    task.admit(
        OURS,
        lambda: lambda: p.fwd(DROPOUT_P),
        equals(expected, lambda out: out[:1]),
        make_checked=lambda: lambda: p.fwd(0.0),
    )
    task.admit("torch", lambda: lambda: p.torch_fwd(parameters, DROPOUT_P), is_the_basis)
    return task


def _backward(width: int, vocab: int, setting: Setting) -> Task:
    """dy and the words' rows are read, the sum's gradient written and read thrice, the table's written."""
    p = _Problem(width, vocab, setting)
    table_bytes = sum(table.numel() for table in p.tables) * DTYPE.itemsize
    task = Task((6 * p.bytes + table_bytes) / 1e9, "gb", floor=setting.peak_gb)

    def ours(dropout_p: float) -> Call:
        _, mean, rstd = p.fwd(dropout_p)
        return lambda: embedding_bwd(
            p.dy, p.ids, p.tables, p.weight, mean, rstd, None, dropout_p, p.seed  # type: ignore[arg-type]
        )  # fmt: skip

    def torchs(dropout_p: float) -> Call:
        leaves = [t.clone().requires_grad_() for t in (*p.tables, p.weight, p.bias)]
        y = p.torch_fwd(leaves, dropout_p)
        return lambda: torch.autograd.grad(y, leaves, p.dy, retain_graph=True)

    # torch on a CPU adds up bf16 in bf16: compared with fp32
    leaves = [t.float().requires_grad_() for t in (*p.tables, p.weight, p.bias)]
    expected = torch.autograd.grad(p.torch_fwd(leaves, 0.0), leaves, p.dy.float())
    task.admit(
        OURS,
        lambda: ours(DROPOUT_P),
        equals(tuple(t.to(DTYPE) for t in expected), tuple),
        make_checked=lambda: ours(0.0),
    )
    # how torch adds up in 16 bits is its own
    task.admit("torch", lambda: torchs(DROPOUT_P), is_the_basis)
    return task
