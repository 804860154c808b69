"""`python -m fastbert.inspect DIR`: what is in a prepared data set, or in a run's cache, with pictures."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from fastbert.data.loader import LoaderSettings, Vocabulary, WindowBuilder
from fastbert.data.order import training_documents
from fastbert.data.packing import pack_histogram, packing_efficiency
from fastbert.data.store import BadShard, DocumentStore
from fastbert.data.tokenizer import load_tokenizer, ordinary_ids, special_ids
from fastbert.errors import UserError
from fastbert.tasks.settings import shown

_BAR = 40  # characters of the longest bar
_WINDOW_TOKENS = 65536  # of a window's batches: enough sequences for a smooth histogram


@dataclass
class Settings:
    folder: tyro.conf.Positional[Path]
    """Folder of python -m fastbert.prepare, or of a run's cache (runs/cache/KEY)."""
    seq_len: int = 128
    """Longest sequence in tokens that instances are made for, special tokens included."""
    nsp: bool = True
    """Make sentence pairs, as pre-training does."""
    whole_word: bool = False
    """Mask whole words."""
    samples: int = 3
    """Instances to show in words."""
    seed: int = 12345
    """Of the instances."""
    pictures: Annotated[Path | None, shown("none", "DIR")] = None
    """Folder for PNG pictures of the lengths."""
    verify: bool = False
    """Read every shard and compare its checksum."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status (0; 1 = --verify found damage; 2 = bad input)."""
    settings = tyro.cli(
        Settings,
        args=sys.argv[1:] if arguments is None else arguments,
        prog="python -m fastbert.inspect",
        description="Show what is in a prepared data set: counts, lengths, what packing saves, instances.",
    )
    try:
        return inspect(settings, Console())
    except UserError as error:
        stderr = Console(stderr=True)
        stderr.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2


@dataclass(frozen=True)
class Sequences:
    """The sequences of some windows: how long they are, and what rows or packs hold of them."""

    lengths: np.ndarray  # [sequences]
    padded_fill: float  # share of the slots that hold a token, a row a sequence
    packed_fill: float  # the same in packs of the longest sequence (LPFHP)


def inspect(settings: Settings, console: Console) -> int:
    """Print the report; returns the exit status."""
    if not 8 <= settings.seq_len <= 512:
        raise UserError(f"--seq-len {settings.seq_len} is out of range; give a length from 8 to 512")
    if settings.samples < 0:
        raise UserError(f"--samples {settings.samples} is out of range; give at least 0")

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    store = DocumentStore.open(settings.folder)
    tokenizer = load_tokenizer(store.tokenizer_folder)
    say(store.description)
    console.print(_counts(store))
    say("documents by tokens")
    for line in _bars(store.manifest["document_length_histogram"]):
        say(line)
    damaged = 0
    if settings.verify:
        damaged = _verify(store, say)
        if damaged:
            return 1
    builder = _builder(store, tokenizer, settings)
    window = builder[0]
    sequences = measure(window, settings.seq_len)
    say(
        f"\nsequences of {settings.seq_len} tokens at most: mean {sequences.lengths.mean():.1f}; "
        f"a row a sequence is {100 * (1 - sequences.padded_fill):.1f} % padding, "
        f"packs are {100 * sequences.packed_fill:.2f} % full (LPFHP), "
        f"{sequences.packed_fill / sequences.padded_fill:.2f} times fewer slots"
    )
    for number in range(min(settings.samples, len(sequences.lengths))):
        say(f"\n{instance_in_words(window, number, tokenizer)}")
    if settings.pictures is not None:
        say(f"\npictures: {_draw(settings.pictures, store, sequences, settings.seq_len)}")
    return 0


def _counts(store: DocumentStore) -> Table:
    table = Table(show_header=False)
    size = int(store.column("size").sum())
    text_bytes = store.manifest["text_bytes"]
    entries = {
        "documents": f"{len(store):,}, {store.num_held_out:,} of them held out",
        "sentences": f"{store.num_sentences:,}, {store.num_sentences / len(store):.1f} a document",
        "tokens": f"{store.num_tokens:,}, {store.num_tokens / len(store):,.1f} a document",
        "text": f"{text_bytes / 1e6:,.1f} MB, {text_bytes / store.num_tokens:.2f} bytes a token",
        "unknown": f"{100 * store.unk_share:.3f} % of the tokens",
        "unigram entropy": f"{store.unigram_entropy:.2f} nats",
        "vocabulary": f"{store.vocab_size:,} ids, {int((store.unigram_counts > 0).sum()):,} of them used",
        "shards": f"{store.num_shards:,}, {size / 1e6:,.1f} MB",
    }
    for reason, count in store.manifest["dropped_documents"].items():
        entries[f"dropped by {reason}"] = f"{count:,} documents"
    for name, value in entries.items():
        table.add_row(name, value)
    return table


def _bars(histogram: dict[str, int]) -> list[str]:
    most = max(histogram.values())
    width = max(map(len, histogram))
    return [
        f"  {name:>{width}} {'█' * round(_BAR * count / most) or '▏'} {count:,}"
        for name, count in histogram.items()
    ]


def _verify(store: DocumentStore, say: Any) -> int:
    """Check every shard; returns how many are bad."""
    bad = 0
    for number in range(store.num_shards):
        try:
            store.shard(number)
        except BadShard as error:
            bad += 1
            say(str(error))
    say(f"{store.num_shards - bad:,} of {store.num_shards:,} shards are as the manifest says")
    return bad


def _builder(store: DocumentStore, tokenizer: Tokenizer, settings: Settings) -> WindowBuilder:
    ids = special_ids(tokenizer)
    vocabulary = Vocabulary(
        cls=ids.cls, sep=ids.sep, mask=ids.mask, unk=ids.unk, ordinary=ordinary_ids(tokenizer)
    )
    training, _ = training_documents(store, settings.seed)
    loader = LoaderSettings(
        seq_len=settings.seq_len,
        tokens_per_batch=max(1, _WINDOW_TOKENS // 128 // settings.seq_len) * settings.seq_len,
        seed=settings.seed,
        whole_word=settings.whole_word,
        nsp=settings.nsp and len(training) > 1,
    )
    return WindowBuilder(store, training, vocabulary, loader)


def measure(window: dict[str, Any], seq_len: int) -> Sequences:
    """The lengths of a window's sequences, and what padding and packing make of them."""
    rows = window["cu_seqlens"].numpy()
    real = np.minimum(rows, window["num_tokens"].numpy()[:, None])  # the filler behind is no sequence
    lengths = np.diff(real, axis=1).ravel()
    lengths = lengths[lengths > 0]
    packs = pack_histogram(np.bincount(lengths, minlength=seq_len + 1)[1:], seq_len)
    return Sequences(lengths, float(lengths.mean() / seq_len), packing_efficiency(packs, seq_len))


def instance_in_words(window: dict[str, Any], number: int, tokenizer: Tokenizer) -> str:
    """The number-th sequence of a window: its pieces, [MASK→piece] where one was to be guessed, its label."""
    rows = np.minimum(window["cu_seqlens"].numpy(), window["num_tokens"].numpy()[:, None])
    filled = np.argwhere(np.diff(rows, axis=1) > 0)
    row, slot = filled[number]
    begin, end = rows[row, slot], rows[row, slot + 1]
    ids = window["input_ids"][row].tolist()
    positions, labels = window["masked_positions"][row].tolist(), window["masked_labels"][row].tolist()
    asked = {position: label for position, label in zip(positions, labels) if label >= 0}
    words = []
    for position in range(begin, end):
        piece = tokenizer.id_to_token(ids[position]) or f"#{ids[position]}"
        label = asked.get(position)
        if label is None:
            words.append(piece)
        elif label == ids[position]:
            words.append(f"[{piece}, kept]")
        else:
            words.append(f"[{piece}→{tokenizer.id_to_token(label)}]")
    label = int(window["next_sentence_labels"][row][slot])
    kind = {0: "B continues A", 1: "B is from another document"}.get(label, "one segment")
    return f"{kind}, {end - begin} tokens, {sum(begin <= p < end for p in asked)} to guess: {' '.join(words)}"


def _draw(folder: Path, store: DocumentStore, sequences: Sequences, seq_len: int) -> Path:
    """lengths.png: documents, sequences, and the slots that rows and packs of them take."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    documents, lengths, slots = figure.subplots(1, 3)
    histogram = store.manifest["document_length_histogram"]
    documents.bar(range(len(histogram)), list(histogram.values()))
    documents.set_xticks(range(len(histogram)), list(histogram), rotation=60, ha="right", fontsize=7)
    documents.set(title=f"{len(store):,} documents", xlabel="tokens")
    lengths.hist(sequences.lengths, bins=min(64, seq_len), range=(0, seq_len))
    lengths.set(title=f"sequences at {seq_len}", xlabel="tokens")
    fills = [sequences.padded_fill, sequences.packed_fill]
    slots.bar(
        ["a row\na sequence", "packs"], [1 / fill for fill in fills], color="lightgrey", label="padding"
    )
    slots.bar(["a row\na sequence", "packs"], [1, 1], label="tokens")
    slots.set(title="slots a token takes")
    slots.legend(fontsize=8, loc="lower right")
    path = folder / "lengths.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / ".lengths.png"
        figure.savefig(partial, dpi=110, format="png")
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}): choose another --pictures") from error
    return path


if __name__ == "__main__":
    sys.exit(main())
