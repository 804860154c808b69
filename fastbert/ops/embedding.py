"""dropout(LayerNorm(word + token type + position rows)): what a BERT begins with."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from fastbert.ops import backend, philox
from fastbert.ops.dropout_add_norm import WIDTH_LIMIT, dropout_noise
from fastbert.ops.qkv import is_plain

# of ids and of the sizes of their tables, in the order of the arguments
_ID_NAMES = ("input_ids", "token_type_ids", "position_ids")
_LIMIT_NAMES = ("vocab_size", "type_vocab_size", "max_position_embeddings")

Three = tuple[Tensor, Tensor, Tensor]


def embed(
    input_ids: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    word_weight: Tensor,
    type_weight: Tensor,
    position_weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    dropout_p: float = 0.0,
    training: bool = True,
    *,
    padding_idx: int | None = None,
) -> Tensor:
    """dropout(LayerNorm(sum of three rows)) for ids [...] and tables [V, H], [types, H], [positions, H].

    -> [..., H] in the dtype of the tables, also under autocast; ids broadcast against each other. Sum, norm
    and dropout are fp32 at least, with one rounding at the end. The parameters of the norm are [H]. Elements
    are dropped as in `dropout_add_norm`: the eager path and the Triton kernel drop the same. Each gradient
    has the dtype of its tensor; the word row `padding_idx` gets none, rows that no id names are 0. Beside the
    ids, 8 bytes a token are saved. Deterministic, gradients included: no atomics.

    An id outside its table is an IndexError that names the id and the limit. On a CPU it comes before
    anything is read. On a GPU nobody waits for the device to look at the ids: the kernel reads nothing for
    such an id, its token becomes NaN, and the error comes with the next call of `embed` once the kernel has
    run, or from `raise_reported_ids`; the process goes on. The trainer checks batches on the CPU before they
    leave for a GPU. UserError for a forced backend that cannot run.
    """
    dropout_p = dropout_p if training else 0.0
    seed = philox.draw_seed(word_weight.device) if dropout_p > 0.0 else None
    ids = torch.broadcast_tensors(input_ids, token_type_ids, position_ids)
    tables = (word_weight, type_weight, position_weight)
    norm = (norm_weight, norm_bias)
    if norm_weight.dtype not in (word_weight.dtype, torch.float32):  # what the kernel takes beside the tables
        norm = (norm_weight.float(), norm_bias.float())
    flat = tuple(indices.reshape(-1).contiguous() for indices in ids)
    y = backend.call(
        _implementation(*tables),
        (*tables, *norm),
        registered=lambda: _embed(*flat, *tables, *norm, eps, padding_idx, seed, dropout_p)[0],
        launch=lambda: _launch(flat, tables, *norm, eps, seed, dropout_p)[0],
        eager=lambda: _eager(flat, tables, *norm, eps, padding_idx, seed, dropout_p),
    )
    return y.view(*ids[0].shape, y.shape[-1])


def can_embed(
    words: nn.Module, types: nn.Module, positions: nn.Module, norm: nn.Module, dropout: nn.Module
) -> bool:
    """Whether `embed` on the parameters of these modules is the same as calling them one by one."""
    for table in (words, types, positions):
        if not is_plain(table, nn.Embedding):
            return False
        if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
            return False
        if table.padding_idx is not None and table is not words:
            return False
    is_affine = is_plain(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None
    return is_affine and is_plain(dropout, nn.Dropout)


# ---- memory of gradients on a CPU -------------------------------------------------------------------------

_spare: Any = WeakTensorKeyDictionary()  # word table -> memory for its next gradient


def recycle_gradient(table: Tensor) -> None:
    """Take the gradient of a word table away, and let the next backward pass of `embed` write to its memory.

    In the place of `table.grad = None`, for who owns the gradient and has no more use for it: what else reads
    it sees it change. On a CPU fresh memory of that size costs more than all that is written to it; elsewhere
    nothing is kept.
    """
    grad, table.grad = table.grad, None
    if grad is not None and grad.device.type == "cpu" and grad.is_contiguous():
        _spare[table] = grad.detach()


class _Lookup(torch.autograd.Function):
    """F.embedding of rows [T], whose gradient is written to memory that is there."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding_idx: int | None, memory: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.memory = padding_idx, memory
        return F.embedding(ids, table, padding_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        if ctx.memory is None:
            raise RuntimeError("the gradient of a recycled word table can be computed once")
        # autograd makes it the table's gradient without a copy, if nobody else holds it
        memory, ctx.memory = ctx.memory.zero_(), None
        memory.index_add_(0, ids, dy)
        if ctx.padding_idx is not None:
            memory[ctx.padding_idx] = 0.0
        return None, memory, None, None


def _lookup(ids: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
    if table in _spare and torch.is_grad_enabled() and table.requires_grad:
        return _Lookup.apply(ids, table, padding_idx, _spare.pop(table))
    return F.embedding(ids, table, padding_idx)


# ---- bounds -----------------------------------------------------------------------------------------------


def check_ids(name: str, ids: Tensor, limit_name: str, limit: int) -> None:
    """IndexError naming both numbers if an id is outside [0, limit).

    Only where looking costs no device synchronisation, that is on CPU, and not while torch.compile traces.
    """
    if ids.numel() == 0 or not backend.host_may_read(ids):
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= limit:
        raise _outside(name, low if low < 0 else high, limit_name, limit)


def raise_reported_ids() -> None:
    """IndexError for an id outside its table that `embed` met on a GPU; once, and then the process goes on.

    Does not wait for the device: what it has not come to yet is seen by a later call.
    """
    if not torch.cuda.is_initialized():
        return
    report = _report("cuda")
    if not (report[:, 1] >= 0).any():
        return
    rows = report.tolist()
    report.fill_(-1)
    for name, limit_name, (outside, limit) in zip(_ID_NAMES, _LIMIT_NAMES, rows):
        if limit >= 0:
            raise _outside(name, outside, limit_name, limit, " (in an earlier batch, whose output has NaN)")


def _outside(name: str, outside: int, limit_name: str, limit: int, when: str = "") -> IndexError:
    return IndexError(
        f"{name} holds {outside}, the table has {limit_name} = {limit} rows (0..{limit - 1}){when}"
    )


@functools.cache
def _report(device_type: str) -> Tensor:
    """Where the kernels tell of ids outside their tables, (id, limit) a table: memory of the host.

    A GPU writes to pinned memory in the rare case, and the host reads it without a word to the GPU.
    """
    return torch.full((3, 2), -1, dtype=torch.int64, pin_memory=device_type == "cuda")


def _check_bounds(ids: Three, tables: Three) -> None:
    for name, indices, limit_name, table in zip(_ID_NAMES, ids, _LIMIT_NAMES, tables):
        check_ids(name, indices, limit_name, table.shape[0])


# ---- eager ------------------------------------------------------------------------------------------------


def _eager(
    ids: Three,
    tables: Three,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    padding_idx: int | None,
    seed: Tensor | None,
    dropout_p: float,
) -> Tensor:
    backend.ran("embed", "eager")
    _check_bounds(ids, tables)
    with backend.no_autocast(norm_weight.device):
        h = _sum(ids, tables, padding_idx)
        y = _dropped(_normalized(h, norm_weight, norm_bias, eps), seed, dropout_p)
    return y.to(_dtype(tables))


def _sum(ids: Three, tables: Three, padding_idx: int | None = None) -> Tensor:
    """The sum of each token's rows [T, H], in fp32 at least."""
    wide = torch.promote_types(_dtype(tables), torch.float32)
    words = _lookup(ids[0], tables[0], padding_idx)
    types, positions = (F.embedding(indices, table) for indices, table in zip(ids[1:], tables[1:]))
    return words.to(wide) + types.to(wide) + positions.to(wide)


def _normalized(h: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(h, weight.shape, weight.to(h.dtype), bias.to(h.dtype), eps)


def _dropped(x: Tensor, seed: Tensor | None, dropout_p: float) -> Tensor:
    return x if seed is None else x * dropout_noise(seed, x.shape[0], x.shape[1], dropout_p, x.dtype)


def _dtype(tables: Three) -> torch.dtype:
    words, types, positions = tables
    return torch.promote_types(torch.promote_types(words.dtype, types.dtype), positions.dtype)


# ---- registration -----------------------------------------------------------------------------------------


@torch.library.custom_op("fastbert::embed", mutates_args=())
def _embed(
    input_ids: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    words: Tensor,
    types: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    padding_idx: int | None,
    seed: Tensor | None,
    dropout_p: float,
) -> Three:
    """ids [T] and tables -> (y [T, H], mean [T], 1 / standard deviation [T])."""
    ids, tables = (input_ids, token_type_ids, position_ids), (words, types, positions)
    if _implementation(*tables) == "triton":
        return _launch(ids, tables, norm_weight, norm_bias, eps, seed, dropout_p)
    backend.ran("embed", "eager")
    _check_bounds(ids, tables)
    with backend.no_autocast(words.device):
        h = _sum(ids, tables)
        mean = h.mean(dim=1)
        rstd = ((h - mean[:, None]).square().mean(dim=1) + eps).rsqrt()
        y = _dropped(_normalized(h, norm_weight, norm_bias, eps), seed, dropout_p)
        return y.to(_dtype(tables)), mean, rstd


@_embed.register_fake
def _(
    input_ids: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    words: Tensor,
    types: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    padding_idx: int | None,
    seed: Tensor | None,
    dropout_p: float,
) -> Three:
    num_tokens, dtype = input_ids.shape[0], _dtype((words, types, positions))
    wide = torch.promote_types(dtype, torch.float32)
    mean, rstd = (words.new_empty(num_tokens, dtype=wide) for _ in range(2))
    return words.new_empty(num_tokens, words.shape[1], dtype=dtype), mean, rstd


@torch.library.custom_op("fastbert::embed_backward", mutates_args=())
def _embed_backward(
    dy: Tensor,
    input_ids: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    words: Tensor,
    types: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    padding_idx: int | None,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dwords, dtypes, dpositions, dnorm_weight, dnorm_bias)."""
    ids, tables = (input_ids, token_type_ids, position_ids), (words, types, positions)
    if _implementation(*tables) == "triton":
        from fastbert_kernels.embedding import embedding_bwd

        backend.ran("embed_backward", "triton")
        rows = (_rows(words), _rows(types), _rows(positions))
        return embedding_bwd(_rows(dy), ids, rows, norm_weight, mean, rstd, padding_idx, dropout_p, seed)
    backend.ran("embed_backward", "eager")
    with backend.no_autocast(words.device):
        h = _sum(ids, tables)
        xhat = (h - mean[:, None]) * rstd[:, None]
        dy = _dropped(dy.to(h.dtype), seed, dropout_p)
        dxhat = dy * norm_weight
        dh = dxhat - dxhat.mean(dim=1, keepdim=True) - xhat * (dxhat * xhat).mean(dim=1, keepdim=True)
        dh = dh * rstd[:, None]
        dwords, dtypes, dpositions = (
            torch.ops.aten.embedding_dense_backward(dh, indices, table.shape[0], padding, False).to(
                table.dtype
            )
            for indices, table, padding in zip(
                ids, tables, (-1 if padding_idx is None else padding_idx, -1, -1)
            )
        )
        dnorm_weight, dnorm_bias = ((dy * xhat).sum(dim=0), dy.sum(dim=0))
        return (
            dwords,
            dtypes,
            dpositions,
            dnorm_weight.to(norm_weight.dtype),
            dnorm_bias.to(norm_weight.dtype),
        )


@_embed_backward.register_fake
def _(
    dy: Tensor,
    input_ids: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    words: Tensor,
    types: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    padding_idx: int | None,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dwords, dtypes, dpositions, dweight, dbias = (
        t.new_empty(t.shape) for t in (words, types, positions, norm_weight, norm_weight)
    )
    return dwords, dtypes, dpositions, dweight, dbias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
    *tensors, _, _, ctx.padding_idx, seed, ctx.dropout_p = inputs  # neither the norm's bias nor eps
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(*tensors, mean, rstd, seed)


def _backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    gradients = _embed_backward(dy, *tensors, ctx.padding_idx, seed, ctx.dropout_p)
    return None, None, None, *gradients, None, None, None, None


_embed.register_autograd(_backward, setup_context=_setup_context)


# ---- helpers ----------------------------------------------------------------------------------------------


def _launch(
    ids: Any,
    tables: Three,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    seed: Tensor | None,
    dropout_p: float,
) -> Three:
    from fastbert_kernels.embedding import embedding_fwd

    backend.ran("embed", "triton")
    _check_bounds(ids, tables)
    raise_reported_ids()
    words, types, positions = tables
    rows = (_rows(words), _rows(types), _rows(positions))
    report = _report(words.device.type)
    return embedding_fwd(ids, rows, norm_weight, norm_bias, eps, report, dropout_p, seed)


def _implementation(words: Tensor, types: Tensor, positions: Tensor) -> str:
    beyond = ""
    if words.shape[-1] > WIDTH_LIMIT:
        beyond = f"a row is {words.shape[-1]} wide, and the Triton kernel takes at most {WIDTH_LIMIT}"
    elif not words.dtype == types.dtype == positions.dtype:
        beyond = "the tables have different dtypes, and the Triton kernel takes one"
    return backend.implementation("embed", words, beyond_kernels=beyond)


def _rows(x: Tensor) -> Tensor:
    """x, or a copy of it with adjacent columns."""
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()
