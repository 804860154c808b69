"""What a user writes without fastbert: transformers, padded rows, torch's AdamW, for a given time.

    python benchmarks/plain_loop.py --seconds 220 --lr 5e-4

The same documents, tokenizer, pairs, masks and held-out set as `python -m fastbert.pretrain --packed` on its
built-in corpus; 4 x 256, batch 8 x 128, learning rate falling linearly with time, no dropout. Prints one JSON
row that can stand beside the last `eval_mlm_loss` of a run of the same length.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.workloads import python_docs
from fastbert.batch import IGNORE_INDEX, PackedBatch
from fastbert.data.loader import (
    LoaderSettings,
    PackedLoader,
    WindowBuilder,
    evaluation_batches,
)
from fastbert.data.order import split_documents

BATCH_SIZE, SEQ_LEN = 8, 128
SETTINGS = LoaderSettings(seq_len=SEQ_LEN, tokens_per_batch=2048, seed=12345)


def rows(batch: PackedBatch) -> dict[str, Tensor]:
    """transformers' arguments, every row padded to SEQ_LEN as a data collator with fixed length does."""
    padded = batch.padded()
    labels = torch.full((padded.input_ids.numel(),), IGNORE_INDEX)
    labels[padded.masked_positions] = padded.masked_labels
    missing = SEQ_LEN - padded.input_ids.shape[1]
    return {
        "input_ids": pad(padded.input_ids, (0, missing)),
        "token_type_ids": pad(padded.token_type_ids, (0, missing)),
        "attention_mask": pad(padded.attention_mask.long(), (0, missing)),
        "labels": pad(labels.view_as(padded.input_ids), (0, missing), value=IGNORE_INDEX),
        "next_sentence_label": padded.next_sentence_labels,
    }


def model_of(vocab_size: int) -> transformers.BertForPreTraining:
    return transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=vocab_size,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def step(
    model: transformers.BertForPreTraining, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> None:
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def batches(loader: Iterable[PackedBatch]) -> Iterator[dict[str, Tensor]]:
    left: dict[str, Tensor] = {}
    for packed in loader:
        new = rows(packed)
        left = {name: torch.cat([left[name], new[name]]) if left else new[name] for name in new}
        while len(left["input_ids"]) >= BATCH_SIZE:
            yield {name: values[:BATCH_SIZE] for name, values in left.items()}
            left = {name: values[BATCH_SIZE:] for name, values in left.items()}


@torch.no_grad()
def evaluate(model: transformers.BertForPreTraining, held_out: list[PackedBatch]) -> float:
    model.eval()
    total, count = 0.0, 0
    for batch in held_out:
        arguments = rows(batch)
        labels = arguments.pop("labels").flatten()
        arguments.pop("next_sentence_label")
        logits = model(**arguments).prediction_logits.flatten(0, 1)
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != IGNORE_INDEX).sum())
    model.train()
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=220.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    seconds, peak_lr = arguments.seconds, arguments.lr
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        store, vocabulary = python_docs(Path(folder))
        training, held_out = split_documents(len(store), SETTINGS.seed)
        loader = PackedLoader(WindowBuilder(store, training, vocabulary, SETTINGS))
        evaluation = evaluation_batches(
            WindowBuilder(store, held_out, vocabulary, replace(SETTINGS, seed=0)), 16
        )
        model = model_of(store.vocab_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr)
        steps = tokens = 0
        started = time.perf_counter()
        for batch in batches(loader):
            elapsed = time.perf_counter() - started
            if elapsed >= seconds:
                break
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * min(1.0, steps / 60) * (1 - elapsed / seconds)
            step(model, optimizer, batch)
            steps, tokens = steps + 1, tokens + int(batch["attention_mask"].sum())
        elapsed = time.perf_counter() - started
        row = {
            "loop": "transformers, padded, AdamW",
            "lr": peak_lr,
            "seconds": round(elapsed, 1),
            "steps": steps,
            "tokens_per_s": round(tokens / elapsed),
            "eval_mlm_loss": round(evaluate(model, evaluation), 4),
            "unigram_entropy": round(store.unigram_entropy, 4),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
