"""A model folder that fine-tunes in seconds, and data that it can learn."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import torch

from fastbert.config import BertConfig
from fastbert.data.tokenizer import load_tokenizer, save_tokenizer
from fastbert.modeling import BertForPreTraining

GOOD = ["good", "great", "좋다"]
BAD = ["bad", "awful", "나쁘다"]
FILLER = ["the", "film", "was", "a", "story", "with", "actors", "and", "music", "quite", "it", "영화"]
_CHARS = "abcdefghijklmnopqrstuvwxyz0123456789.,'!?\""


def tiny_folder(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A random BERT of two layers of 32, with a tokenizer of the words above and all ASCII letters."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *FILLER]
    words += [char for char in _CHARS if char not in words] + [f"##{char}" for char in _CHARS]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    save_tokenizer(load_tokenizer(folder / "vocab.txt"), folder, model_max_length=64)
    defaults = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "initializer_range": 0.05,
    }
    torch.manual_seed(seed)
    BertForPreTraining(BertConfig(vocab_size=len(words), **{**defaults, **config})).save_pretrained(folder)
    return folder


def reviews(count: int, seed: int) -> list[tuple[str, str]]:
    """(text, label): four words of the label's among 1 to 6 others."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        label = rng.choice(["neg", "pos"])
        words = rng.choices(FILLER, k=rng.randint(1, 6)) + rng.choices(GOOD if label == "pos" else BAD, k=4)
        rng.shuffle(words)
        rows.append((" ".join(words), label))
    return rows


def write_csv(path: Path, header: list[str], rows: Any) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def review_files(folder: Path, train: int = 96, evaluation: int = 48) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    header = ["text", "label"]
    return (
        write_csv(folder / "train.csv", header, reviews(train, 1)),
        write_csv(folder / "dev.csv", header, reviews(evaluation, 2)),
    )
