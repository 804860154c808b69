"""`python -m fastbert.embed MODEL < texts > out.npy`: a vector for every line of text.

MODEL is a sentence-transformers folder, whose pooling, normalisation, length and prompt count, or any BERT
folder with a tokenizer.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fastbert.embed_io import TextReader, VectorWriter, open_writer
from fastbert.errors import UserError
from fastbert.sentence_encoder import SentenceEncoder, load_encoder

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BROKEN_PIPE = 141  # as a shell reports a death by SIGPIPE


@dataclass
class Options:
    model: tyro.conf.Positional[Path]
    """Model folder."""
    files: tyro.conf.Positional[tuple[str, ...]] = ()
    """Text files, a text a line, or .jsonl; standard input without any."""
    field: str | None = None
    """Read JSONL, and in it this field ("text" in files called .jsonl)."""
    output: str = "-"
    """.npy, .jsonl or .parquet; "-" writes .npy to standard output."""
    output_dtype: Literal["fp32", "fp16"] = "fp32"
    """Of the numbers that are written."""
    prefix: str | None = None
    """Put before every text, as "query: " for E5; "" leaves out the model's default prompt."""
    max_length: int | None = None
    """Tokens of a text at most; longer ones are cut (default: the model's)."""
    tokens_per_batch: int | None = None
    """Tokens that are computed at once (default: 2,048 on a CPU, 65,536 on a GPU)."""
    device: str | None = None
    """cpu, cuda, cuda:1, … (default: a GPU where there is one)."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """That the model computes in; bf16 is faster on GPUs and on CPUs with AMX."""


def embed(
    model: str | Path | SentenceEncoder,
    texts: Iterable[str],
    *,
    prefix: str | None = None,
    max_length: int | None = None,
    tokens_per_batch: int | None = None,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> np.ndarray:
    """Texts -> vectors, float32 [number of texts, dimension], in the order of the texts.

    `model` is a folder, or an encoder from `fastbert.sentence_encoder.load_encoder` (which fixes device,
    dtype, length and prefix). Equal to `SentenceTransformer(folder).encode(texts)` within 2e-5 in fp32. An
    empty text has a vector, too. UserError for what is no BERT folder with a tokenizer. Deterministic.
    """
    if isinstance(texts, str):
        raise TypeError("texts is one str: give a list of them, [text]")
    if tokens_per_batch is not None and tokens_per_batch < 1:
        raise UserError(f"tokens_per_batch {tokens_per_batch} is out of range; give at least 1")
    if not isinstance(model, SentenceEncoder):
        model = load_encoder(
            model, device=_device(device), dtype=dtype, max_length=max_length, prefix=prefix, say=_say
        )
    parts = list(model.encode(texts, tokens_per_batch=tokens_per_batch))
    return np.concatenate(parts) if parts else np.empty((0, model.dimension), dtype=np.float32)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status (0, 2 = bad input, 130 = interrupted, 141 = broken pipe)."""
    options = tyro.cli(Options, args=arguments, prog="python -m fastbert.embed", description=__doc__)
    try:
        _run(options)
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # nobody reads any more; Python must not flush into it on its way out, either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _BROKEN_PIPE
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(options: Options) -> None:
    if options.tokens_per_batch is not None and options.tokens_per_batch < 1:
        raise UserError(f"--tokens-per-batch {options.tokens_per_batch} is out of range; give at least 1")
    encoder = load_encoder(
        options.model,
        device=_device(options.device),
        dtype=_DTYPES[options.dtype],
        max_length=options.max_length,
        prefix=options.prefix,
        say=_say,
    )
    reader = TextReader(options.files or ("-",), options.field)
    dtype = np.dtype(np.float32 if options.output_dtype == "fp32" else np.float16)
    writer = open_writer(options.output, encoder.dimension, dtype)
    try:
        _encode(encoder, reader, writer, options.tokens_per_batch)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _encode(
    encoder: SentenceEncoder, reader: TextReader, writer: VectorWriter, tokens_per_batch: int | None
) -> None:
    started = time.perf_counter()
    counts = np.zeros(2, dtype=np.int64)
    with _progress() as show:

        def on_batch(num_texts: int, num_tokens: int) -> None:
            counts[:] += (num_texts, num_tokens)
            share = reader.bytes_read / reader.total_bytes if reader.total_bytes else None
            show(share, f"{counts[0]:,} texts, {counts[1] / (time.perf_counter() - started):,.0f} tokens/s")

        for vectors in encoder.encode(reader, tokens_per_batch=tokens_per_batch, on_batch=on_batch):
            writer.write(vectors)
    seconds = time.perf_counter() - started
    num_texts, num_tokens = counts
    _say(f"{num_texts:,} texts, {num_tokens:,} tokens in {seconds:.1f} s, {num_texts / seconds:,.0f} texts/s")


class _progress:
    """A bar on a terminal's stderr, nothing elsewhere; entering gives a function (share or None, words)."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Callable[[float | None, str], None]:
        self.bar.start()
        task = self.bar.add_task("", total=None)

        def show(share: float | None, words: str) -> None:
            self.bar.update(
                task, total=None if share is None else 1.0, completed=share or 0, description=words
            )

        return show

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name} cannot be used here ({reason}); try cpu") from error


def _say(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
