"""Small batches that do not wait for launches: static shapes, and a CUDA graph for each of them.

A pass of a BERT is a hundred launches and more, and a GPU is done with those of a small batch sooner than
Python brings the next. So a batch is filled up to one of few sizes and copied into static buffers; the pass
is recorded when a size comes for the second time, and replayed from then on.

    handle = use_cuda_graphs(model)     # a BertModel, or any head around one
    with torch.inference_mode():
        model(**inputs)                 # the same outputs

Sizes. Tokens go up to the next of 64, 80, 96, 112, 128, 160, …, four to a doubling. Right above a power of
two the filler is a fifth of all slots, over all batches 8 % on average (with two sizes to a doubling 16 %,
with one 28 %, for a quarter of the graphs). Filler belongs to no sequence, so attention passes over it.
Sequence slots go up to the next power of two, and the empty ones cost attention programs that end at once.
The kernels know two kinds of a longest sequence: up to 64 tokens, and more.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastbert import ops
from fastbert.modeling import BertModel
from fastbert.ops import backend
from fastbert.ops.backend import EagerFallbackWarning
from fastbert.train.capture import CannotCapture, Captured, capture, has_graphs

MIN_TOKENS, MIN_SEQUENCES, SHORT = 64, 8, 64
MAX_TOKENS = 16_384  # a larger batch keeps a GPU busy for longer than its launches take
MAX_BYTES = 512 << 20
_GRAPH_BYTES = 1 << 20  # what the nodes of a graph are counted as

Pass = Callable[..., tuple[Tensor, ...]]
Result = TypeVar("Result")


# ---- sizes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """What one graph computes."""

    tokens: int  # filler included
    sequences: int  # slots, empty ones included
    max_seqlen: int

    @classmethod
    def of(cls, num_tokens: int, num_sequences: int, max_seqlen: int, limit: int) -> Bucket:
        """The least one that holds such a batch, where no sequence may be longer than `limit`."""
        longest = min(SHORT, limit) if max_seqlen <= SHORT else limit
        return cls(token_bucket(num_tokens), sequence_bucket(num_sequences), longest)


def token_bucket(num_tokens: int) -> int:
    """The least of 64, 80, 96, 112, 128, 160, … that is not below `num_tokens`."""
    if num_tokens <= MIN_TOKENS:
        return MIN_TOKENS
    step = 1 << ((num_tokens - 1).bit_length() - 3)
    return -(-num_tokens // step) * step


def sequence_bucket(num_sequences: int) -> int:
    """The least of 8, 16, 32, … that is not below `num_sequences`."""
    return max(MIN_SEQUENCES, 1 << (max(1, num_sequences) - 1).bit_length())


# ---- what is recorded -------------------------------------------------------------------------------------


class _Watch:
    """What modules are made of, as it was when it was looked at.

    That is the modules themselves, their classes, and where their parameters and buffers lie: new values in
    the same memory are seen by a graph. Plain numbers, as an eps, are not looked at.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.roots = list(roots)
        self.modules = [module for root in self.roots for module in root.modules()]
        self._children = [module._modules for module in self.modules if module._modules]
        self._tensors = [d for module in self.modules for d in (module._parameters, module._buffers) if d]
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self._hooks = [getattr(module, kind) for module in self.modules for kind in kinds]
        self._state = self._look()

    def sees_a_change(self, roots: Iterable[nn.Module]) -> bool:
        """Whether a recording of these modules would be another one now."""
        return list(map(id, roots)) != list(map(id, self.roots)) or self._look() != self._state

    def _look(self) -> list[Any]:
        tensors = [tensor for d in self._tensors for tensor in d.values() if tensor is not None]
        return [
            [id(child) for children in self._children for child in children.values()],
            list(map(type, self.modules)),
            ["forward" in module.__dict__ for module in self.modules],
            list(map(Tensor.data_ptr, tensors)),
            list(map(attrgetter("dtype"), tensors)),
            list(map(attrgetter("shape"), tensors)),
        ]

    def is_training(self) -> bool:
        return any(map(attrgetter("training"), self.modules))

    def has_hooks(self) -> bool:
        return any(self._hooks)


# ---- replaying --------------------------------------------------------------------------------------------


@dataclass
class _Recorded:
    captured: Captured[tuple[Tensor, ...]]
    num_bytes: int = 0  # of its results


class BucketGraphs:
    """Recorded passes of one BERT, by size; any number of threads may call.

    At most `max_bytes` of results are kept, of the sizes that were used last; what passes need between their
    input and their results is one pool for all of them. Batches of more than `max_tokens` are not taken.
    `record` is what records a pass; another one than `capture` may run anywhere. A copy, or what is
    unpickled, starts without recordings.
    """

    _recorded: OrderedDict[tuple[Any, ...], _Recorded]  # the last used at the end
    _seen: set[tuple[Any, ...]]
    _inputs: list[Tensor]  # the static buffers: tokens
    _bounds: Tensor | None  # and cu_seqlens
    _pool: Any
    _done: Any = None  # an event behind the last replay

    def __init__(
        self,
        *,
        max_tokens: int = MAX_TOKENS,
        max_bytes: int = MAX_BYTES,
        record: Callable[..., Captured[tuple[Tensor, ...]]] = capture,
    ) -> None:
        self.max_tokens, self.max_bytes, self.record = max_tokens, max_bytes, record
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._forget(None)

    def __reduce__(self) -> Any:
        return _unpickled, (self.max_tokens, self.max_bytes, self.record)

    def __len__(self) -> int:
        """Sizes that are recorded."""
        return len(self._recorded)

    def clear(self) -> None:
        """Free all recordings."""
        with self._lock:
            self._forget(None)

    def run(
        self,
        function: Pass,
        model: Any,
        tokens: Sequence[Tensor],
        cu_seqlens: Tensor,
        max_seqlen: int,
        read: Callable[..., Result],
        *,
        others: Sequence[nn.Module] = (),
        key: Any = None,
    ) -> Result | None:
        """`read(*results)` of a recorded pass, or None where the caller has to compute without one.

        The first batch of a size is the caller's, the second is recorded.

        Args:
            function: (*tokens, cu_seqlens, max_seqlen) -> results; arithmetic on tensors, without a look at
                values. Rows from cu_seqlens[-1] on are filler, sequences without tokens are empty slots.
            model, others: every module that `function` calls; `model` has the `config` of a BERT.
            tokens: [T, ...] each, on the device of the model or on the CPU.
            cu_seqlens, max_seqlen: as in a PackedBatch.
            read: gets the results, those of filler and empty slots included; the next call overwrites them.
            key: what else `function` depends on.

        Not taken are batches of more than `max_tokens`, calls while a module is in training mode, and those
        that are part of somebody else's graph. What else keeps a pass from being recorded is said once, as an
        EagerFallbackWarning.
        """
        num_tokens, num_sequences = tokens[0].shape[0], cu_seqlens.shape[0] - 1
        if max(num_tokens, num_sequences) > self.max_tokens or torch.compiler.is_compiling():
            return None
        wants_gradients, device = torch.is_grad_enabled(), next(model.parameters()).device
        if has_graphs(device) and torch.cuda.is_current_stream_capturing():
            return None
        with self._lock, _on(device), torch.inference_mode(False), torch.no_grad():
            modules = (model, *others)
            if self._watch is None or self._watch.sees_a_change(modules) or self._inputs_differ(tokens):
                self._forget(_Watch(modules))
            assert self._watch is not None
            if self._watch.is_training():
                return None
            problem = self._problem(model, device, wants_gradients)
            if problem:
                self._refuse(problem)
                return None
            bucket = Bucket.of(num_tokens, num_sequences, max_seqlen, model.config.max_position_embeddings)
            whole_key = (bucket, *_settings(device), key)
            if not self._comes_again(whole_key):
                return None
            if self._done is not None:  # the last call may have been on another stream
                torch.cuda.current_stream(device).wait_event(self._done)
            inputs = self._fill(tokens, cu_seqlens, bucket, device)
            recorded = self._recorded.get(whole_key)
            if recorded is None:
                recorded = self._record(lambda: function(*inputs, bucket.max_seqlen), device)
            if recorded is None:
                self._refuse(self._failure)
                return None
            self._recorded[whole_key] = recorded
            self._recorded.move_to_end(whole_key)
            results = recorded.captured.replay()
            recorded.num_bytes = _GRAPH_BYTES + sum(result.nbytes for result in results)
            result = read(*results)
            if has_graphs(device):
                self._done = torch.cuda.Event()
                self._done.record(torch.cuda.current_stream(device))
                ops.raise_reported_ids()
            self._evict()
            return result

    # ---- refusing

    def _problem(self, model: Any, device: torch.device, wants_gradients: bool) -> str:
        """Why this pass is not to be recorded, or ""."""
        if wants_gradients:
            return "gradients are wanted (call the model under torch.inference_mode())"
        if self._watch is not None and self._watch.has_hooks():
            return "a module has hooks, which a replay would not call"
        if has_graphs(device):
            dtype = backend.autocast_dtype(device) or next(model.parameters()).dtype
            head_dim = model.config.hidden_size // model.config.num_attention_heads
            attention = backend.explain("attention", device, dtype, head_dim)
            if attention.implementation == "eager":
                return f"attention runs eagerly, for which filler is no less work ({attention.reason})"
        elif self.record is capture:
            return f"the model is on a device of type {device.type}, which has none"
        return self._failure

    def _refuse(self, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            warnings.warn(f"BERT runs without a CUDA graph: {problem}", EagerFallbackWarning, stacklevel=4)

    # ---- static buffers

    def _inputs_differ(self, tokens: Sequence[Tensor]) -> bool:
        kinds, given = ([(x.dtype, x.shape[1:]) for x in group] for group in (self._inputs, tokens))
        return bool(kinds) and kinds != given

    def _fill(
        self, tokens: Sequence[Tensor], cu_seqlens: Tensor, bucket: Bucket, device: torch.device
    ) -> list[Tensor]:
        """Copy a batch into the buffers; returns what the bucket reads of them, cu_seqlens last."""
        if self._bounds is None:
            most = token_bucket(self.max_tokens)
            self._inputs = [x.new_zeros(most, *x.shape[1:], device=device) for x in tokens]
            most = sequence_bucket(self.max_tokens)
            self._bounds = torch.zeros(most + 1, dtype=torch.int32, device=device)
        num_tokens, num_bounds = tokens[0].shape[0], cu_seqlens.shape[0]
        inputs, bounds = [x[: bucket.tokens] for x in self._inputs], self._bounds[: bucket.sequences + 1]
        for static, given in zip(inputs, tokens):
            static[:num_tokens].copy_(given)
            static[num_tokens:].zero_()
        bounds[:num_bounds].copy_(cu_seqlens)
        bounds[num_bounds:].copy_(bounds[num_bounds - 1 : num_bounds].expand(len(bounds) - num_bounds))
        return [*inputs, bounds]

    # ---- recordings

    def _comes_again(self, key: tuple[Any, ...]) -> bool:
        """Whether there has been such a batch before: recording costs as much as some passes."""
        is_known = key in self._seen
        self._seen.add(key)
        return is_known

    def _record(self, function: Callable[[], tuple[Tensor, ...]], device: torch.device) -> _Recorded | None:
        if self._pool is None and has_graphs(device):
            self._pool = torch.cuda.graph_pool_handle()
        try:
            return _Recorded(self.record(function, device, pool=self._pool))
        except CannotCapture as error:
            self._failure = str(error)
            return None

    def _evict(self) -> None:
        while len(self._recorded) > 1 and sum(r.num_bytes for r in self._recorded.values()) > self.max_bytes:
            self._synchronize()
            self._recorded.popitem(last=False)

    def _forget(self, watch: _Watch | None) -> None:
        """Drop every recording and its memory; from here on the modules are those of `watch`."""
        self._synchronize()
        self._watch = watch
        self._failure = ""  # why nothing more is recorded of these modules
        self._recorded = OrderedDict()
        self._seen = set()
        self._inputs = []
        self._bounds = self._pool = None

    def _synchronize(self) -> None:
        """Wait for the last replay: what it uses may not be freed before."""
        if self._done is not None:
            self._done.synchronize()


def _unpickled(max_tokens: int, max_bytes: int, record: Any) -> BucketGraphs:
    return BucketGraphs(max_tokens=max_tokens, max_bytes=max_bytes, record=record)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if has_graphs(device) else contextlib.nullcontext()


def _settings(device: torch.device) -> tuple[Any, ...]:
    """What else than sizes and modules decides which kernels run."""
    return (
        backend.autocast_dtype(device),
        backend.choice(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


# ---- models -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphHandle:
    """What `use_cuda_graphs` returned."""

    models: tuple[BertModel, ...]

    def restore(self) -> None:
        """Let the models run without graphs again, and free the graphs."""
        for model in self.models:
            if model.graphs is not None:
                model.graphs.clear()
            model.graphs = None


def use_cuda_graphs(
    model: nn.Module, *, max_tokens: int = MAX_TOKENS, max_bytes: int = MAX_BYTES
) -> GraphHandle:
    """Let every BertModel inside `model` replay CUDA graphs where it only infers, in place.

    `model` is a BertModel, a class with a head, or any module that holds one. Without gradients and in eval
    mode, batches of up to `max_tokens` kept tokens, padded or a PackedBatch, run as a graph of their size
    (`token_bucket`); the second batch of a size is recorded, and takes longer. Everything else runs as
    before: training, larger batches, inputs_embeds, output_hidden_states, output_attentions and the padded
    layout. What does not run as a graph for another reason is said once (EagerFallbackWarning).

    Outputs are the caller's own memory, and equal those without a graph up to the order of additions in a
    matrix product of another height. New weights are seen, in the same memory or in another (`half()`, `to`,
    `load_state_dict`); numbers that are no tensors, as a norm's eps, are those of the recording. Threads may
    share the model: one replays at a time. The graphs keep at most `max_bytes` of results: the sizes that
    were not used for the longest time are recorded again. ValueError if no BertModel is in `model`.
    """
    models = tuple(module for module in model.modules() if isinstance(module, BertModel))
    if not models:
        raise ValueError(f"no fastbert.BertModel is in this {type(model).__name__}")
    for bert in models:
        bert.graphs = BucketGraphs(max_tokens=max_tokens, max_bytes=max_bytes)
    return GraphHandle(models)
