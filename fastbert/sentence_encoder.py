"""Texts -> vectors with a BERT folder, pooled as its sentence-transformers files say.

Texts are taken in windows, sorted by length within a window, and computed in batches of a fixed number of
tokens that hold no padding; results come in the order of the texts. Memory holds windows, not the input.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor, nn

from fastbert import hub, ops, weights
from fastbert.batch import PackedBatch
from fastbert.data.tokenizer import load_tokenizer, vocabulary_size
from fastbert.errors import UserError
from fastbert.inference import BucketGraphs
from fastbert.modeling import BertModel
from fastbert.paths import stays_inside
from fastbert.train.checkpoint import model_folder

POOLINGS = ("mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# the names of these in a Pooling module before sentence-transformers 6, in the order of their vectors
_LEGACY_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.linear.Identity": nn.Identity,
}
WINDOW_TEXTS = 8192
WINDOW_CHARS = 16_000_000


@dataclass
class SentenceEncoder:
    """A BERT with its tokenizer and everything that makes one vector of a text."""

    model: BertModel
    tokenizer: Tokenizer
    max_length: int  # tokens of a text with [CLS] and [SEP]; what is longer is cut
    poolings: tuple[str, ...] = ("mean",)  # their vectors are concatenated
    after: nn.Sequential = field(default_factory=nn.Sequential)  # Dense and Normalize modules
    prompt: str = ""  # put before every text
    lowercase: bool = False  # before the tokenizer, which usually does it itself
    graphs: BucketGraphs | None = None  # how small batches run; None: launch by launch

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""
        size = len(self.poolings) * self.model.config.hidden_size
        for module in self.after:
            size = module.out_features if isinstance(module, Dense) else size
        return size

    def encode(
        self,
        texts: Iterable[str],
        *,
        tokens_per_batch: int | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Iterator[np.ndarray]:
        """Vectors of the texts in their order: float32 arrays [n, dimension], one for each window of texts.

        `tokens_per_batch` bounds what is computed at once (a longer text is a batch of its own).
        `on_batch(texts, tokens)` is called behind every batch. The next window is tokenized meanwhile, so
        `texts` is read ahead, in another thread. Deterministic.
        """
        budget = tokens_per_batch or default_tokens_per_batch(self.model.device)
        windows = _windows(texts)
        following = _Ahead(self._next_window, windows)
        while (window := following.result()) is not None:
            following = _Ahead(self._next_window, windows)
            yield self._encode_window(window, budget, on_batch)

    def _next_window(self, windows: Iterator[list[str]]) -> list[list[int]] | None:
        """The token ids of the next texts, or None behind the last."""
        texts = next(windows, None)
        if texts is None:
            return None
        texts = [self.prompt + text for text in texts] if self.prompt else texts
        texts = [text.lower() for text in texts] if self.lowercase else texts
        encoded = self.tokenizer.encode_batch_fast(texts)
        return [encoding.ids[: self.max_length] for encoding in encoded]

    def _encode_window(
        self, window: list[list[int]], budget: int, on_batch: Callable[[int, int], None] | None
    ) -> np.ndarray:
        lengths = np.array([len(ids) for ids in window])
        vectors = np.empty((len(window), self.dimension), dtype=np.float32)
        # the longest first, so that too large a budget is noticed at once
        for rows in _batches(np.argsort(-lengths, kind="stable"), lengths, budget):
            vectors[rows] = self._encode_batch([window[row] for row in rows], lengths[rows])
            if on_batch is not None:
                on_batch(len(rows), int(lengths[rows].sum()))
        return vectors

    @torch.inference_mode()
    def _encode_batch(self, ids: list[list[int]], lengths: np.ndarray) -> np.ndarray:
        batch = _packed(ids, lengths)
        vectors = None
        if self.graphs is not None:
            vectors = self.graphs.run(
                lambda *parts: (self._vectors(_batch(*parts)),),
                self.model,
                (batch.input_ids, batch.token_type_ids, batch.position_ids),
                batch.cu_seqlens,
                batch.max_seqlen,
                lambda vectors: _on_host(vectors[: len(ids)]),
                others=(self.after,),
                key=self.poolings,
            )
        if vectors is None:
            vectors = _on_host(self._vectors(batch.to(self.model.device)))
        return vectors

    def _vectors(self, batch: PackedBatch) -> Tensor:
        """[B, dimension] on the device."""
        hidden = self.model(batch).last_hidden_state
        pooled = [_pool(hidden, batch, pooling) for pooling in self.poolings]
        vectors: Tensor = self.after(torch.cat(pooled, dim=-1) if len(pooled) > 1 else pooled[0])
        return vectors


def _on_host(vectors: Tensor) -> np.ndarray:
    """float32, in memory of its own."""
    host: np.ndarray = vectors.to("cpu", torch.float32, copy=True).numpy()
    return host


class _Ahead:
    """A call in a thread of its own, for which nobody waits who does not ask for the result."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        # a daemon: an interrupted program must end even while this waits for input
        self.thread = threading.Thread(target=self._run, args=(function, *arguments), daemon=True)
        self.thread.start()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            self.value = function(*arguments)
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        """What the call returned, or its exception."""
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.value


def default_tokens_per_batch(device: torch.device) -> int:
    """On a GPU what keeps it busy; on a CPU what the allocator reuses without asking the system for pages."""
    return 2048 if device.type == "cpu" else 65536


def _windows(texts: Iterable[str]) -> Iterator[list[str]]:
    window: list[str] = []
    num_chars = 0
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"texts hold str, got {type(text).__name__} {text!r}")
        window.append(text)
        num_chars += len(text)
        if len(window) == WINDOW_TEXTS or num_chars >= WINDOW_CHARS:
            yield window
            window, num_chars = [], 0
    if window:
        yield window


def _batches(order: np.ndarray, lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """`order` in pieces of at most `budget` tokens, each of at least one text."""
    ends = np.cumsum(lengths[order])
    start, done = 0, 0
    while start < len(order):
        stop = max(start + 1, int(np.searchsorted(ends, done + budget, side="right")))
        yield order[start:stop]
        start, done = stop, int(ends[stop - 1])


def _packed(ids: list[list[int]], lengths: np.ndarray) -> PackedBatch:
    total = int(lengths.sum())
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.repeat(cu_seqlens[:-1], lengths)
    return _batch(
        torch.from_numpy(np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=total)),
        torch.zeros(total, dtype=torch.long),
        torch.from_numpy(np.arange(total) - starts),
        torch.from_numpy(cu_seqlens.astype(np.int32)),
        int(lengths.max()),
    )


def _batch(ids: Tensor, types: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> PackedBatch:
    nothing = ids[:0]
    return PackedBatch(ids, types, positions, cu_seqlens, max_seqlen, nothing, nothing, nothing, len(ids))


def _pool(hidden: Tensor, batch: PackedBatch, pooling: str) -> Tensor:
    """hidden [T, H] -> [B, H], sums in fp32 at least; anything at all for a sequence without tokens."""
    starts, seqlens = batch.cu_seqlens[:-1].long(), batch.cu_seqlens.diff().long()
    if pooling == "cls":
        return hidden.index_select(0, starts.clamp(max=hidden.shape[0] - 1))
    if pooling == "lasttoken":
        return hidden.index_select(0, (starts + seqlens - 1).clamp(min=0))
    if pooling == "max":
        return torch.segment_reduce(hidden, "max", lengths=seqlens, axis=0, unsafe=True)
    weight = seqlens.sqrt() if pooling == "mean_sqrt_len_tokens" else seqlens.float()
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if pooling == "weightedmean":
        wide = wide * (batch.position_ids + 1)[:, None]
        weight = (seqlens * (seqlens + 1)) / 2
    # unsafe: without it the host looks whether the lengths add up, and waits for a GPU
    summed = torch.segment_reduce(wide, "sum", lengths=seqlens, axis=0, unsafe=True)
    return (summed / weight[:, None]).to(hidden.dtype)


class Dense(nn.Linear):
    """sentence-transformers' projection of a pooled vector."""

    def __init__(self, in_features: int, out_features: int, bias: bool, activation: nn.Module) -> None:
        super().__init__(in_features, out_features, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.activation(super().forward(x))
        return projected


class Normalize(nn.Module):
    """To length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1)


# ---- loading ----------------------------------------------------------------------------------------------


def load_encoder(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_length: int | None = None,
    prefix: str | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> SentenceEncoder:
    """The encoder that a sentence-transformers folder describes, or mean pooling over any BERT folder.

    `folder` may be a hub id, too: its files are fetched into huggingface_hub's cache.

    `max_length` replaces the folder's own; `prefix` replaces the prompt that the folder puts before texts by
    default, if it names one. A run folder stands for its newest intact checkpoint. What is decided here and
    stands in no file is told to `say`. Raises UserError for a folder that holds no BERT with a tokenizer, or
    modules that are not known here.
    """
    try:
        folder = model_folder(hub.local_folder(folder), say)
    except OSError as error:
        raise UserError(str(error)) from error
    modules = _read_json(folder / "modules.json", [])
    for module in modules:
        name = module.get("path", "")
        if name and not stays_inside(name):  # the first one has none: it lies in the folder itself
            raise UserError(f"{folder / 'modules.json'} names a module outside its folder: {name}")
    inner = folder / next((m["path"] for m in modules if _kind(m) == "Transformer"), "")
    model_type = _read_json(inner / "config.json", {}).get("model_type", "bert")
    if model_type != "bert":
        raise UserError(f"{inner} holds a model of type {model_type!r}; only BERT runs here")
    tokenizer = load_tokenizer(inner)
    tokenizer.encode_special_tokens = False  # a literal [SEP] is one, as in sentence-transformers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # heads that are not used
            model = BertModel.from_pretrained(inner, add_pooling_layer=False, dtype=dtype, device=device)
    except (OSError, ValueError, NotImplementedError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{inner} cannot be loaded as a BERT: {error}") from error
    for layer in model.encoder.layer:
        attention: Any = layer.attention.self
        ops.stack_qkv(attention.query, attention.key, attention.value)
    if vocabulary_size(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"the tokenizer of {inner} has {vocabulary_size(tokenizer)} ids, but the embedding table has "
            f"{model.config.vocab_size} rows; put the model's own tokenizer there"
        )
    settings = _read_json(inner / "sentence_bert_config.json", {})
    encoder = SentenceEncoder(
        model=model,
        tokenizer=tokenizer,
        max_length=_max_length(inner, settings, model.config.max_position_embeddings, max_length),
        lowercase=bool(settings.get("do_lower_case")),
    )
    tokenizer.enable_truncation(encoder.max_length)
    _read_modules(encoder, folder, modules)
    if not any(_kind(module) == "Pooling" for module in modules):
        say(f"{folder} names no pooling: vectors are the mean of the last hidden states, not normalised")
    encoder.after.to(device=device, dtype=dtype).eval()
    if model.device.type == "cuda":
        encoder.graphs = BucketGraphs()
    _set_prompt(encoder, folder, prefix, say)
    return encoder


def _read_modules(encoder: SentenceEncoder, folder: Path, modules: list[dict[str, Any]]) -> None:
    for module in modules:
        kind, config = _kind(module), _read_json(folder / module["path"] / "config.json", {})
        if kind == "Pooling":
            encoder.poolings = _poolings(config, folder / module["path"])
            if not config.get("include_prompt", True):
                raise UserError(f"{folder} leaves the prompt out of its pooling, which is not known here")
        elif kind == "Dense":
            encoder.after.append(_load_dense(config, folder / module["path"]))
        elif kind == "Normalize":
            encoder.after.append(Normalize())
        elif kind not in ("Transformer", "Dropout"):
            raise UserError(f"{folder / 'modules.json'} names the module {kind}, which is not known here")


def _load_dense(config: dict[str, Any], folder: Path) -> Dense:
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in _ACTIVATIONS or config.get("use_residual"):
        raise UserError(f"{folder} has the activation {activation} or a residual, which is not known here")
    dense = Dense(
        config["in_features"], config["out_features"], config.get("bias", True), _ACTIVATIONS[activation]()
    )
    try:
        tensors = weights.read(hub.open_files(folder, {}))
        dense.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in tensors.items()})
    except (OSError, RuntimeError) as error:
        raise UserError(f"{folder} cannot be loaded as a Dense module: {error}") from error
    return dense.eval()


def _poolings(config: dict[str, Any], folder: Path) -> tuple[str, ...]:
    chosen = config.get("pooling_mode")
    if chosen is None:
        chosen = [name for key, name in _LEGACY_POOLINGS.items() if config.get(key)] or "mean"
    poolings = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    unknown = [name for name in poolings if name not in POOLINGS]
    if unknown:
        raise UserError(f"{folder} asks for the pooling {unknown[0]!r}; known are {', '.join(POOLINGS)}")
    return poolings


def _max_length(folder: Path, settings: dict[str, Any], positions: int, asked: int | None) -> int:
    limit = settings.get("max_seq_length")
    if limit is None:  # where sentence-transformers keeps it since version 6
        limit = _read_json(folder / "tokenizer_config.json", {}).get("model_max_length")
    limit = min(int(limit), positions) if limit else positions
    if asked is None:
        return limit
    if not 2 <= asked <= positions:
        raise UserError(f"--max-length {asked} is out of range; the model takes 2 to {positions} tokens")
    return asked


def _set_prompt(
    encoder: SentenceEncoder, folder: Path, prefix: str | None, say: Callable[[str], None]
) -> None:
    config = _read_json(folder / "config_sentence_transformers.json", {})
    prompt = config.get("prompts", {}).get(config.get("default_prompt_name") or "", "")
    if prefix is not None:
        encoder.prompt = prefix
    elif prompt:
        encoder.prompt = prompt
        say(f"the default prompt of the model is put before every text: {prompt!r}")


def _kind(module: dict[str, Any]) -> str:
    return str(module["type"]).rpartition(".")[2]


def _read_json(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable JSON file ({error}): mend or remove it") from error
