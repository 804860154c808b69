"""`python -m fastbert.fill_mask RUN "The [MASK] statement …"`: what a trained model puts in the gap."""

from __future__ import annotations

import sys
import unicodedata
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from fastbert import hub
from fastbert.data.tokenizer import load_tokenizer, special_ids, vocabulary_size
from fastbert.errors import UserError
from fastbert.heads import BertForMaskedLM
from fastbert.train.checkpoint import model_folder


@dataclass
class Options:
    model: tyro.conf.Positional[Path]
    """Run folder, checkpoint, any BERT folder with weights and tokenizer, or a hub id."""
    text: tyro.conf.Positional[str]
    """Text with one or more [MASK]."""
    top_k: int = 5
    """Candidates to show for each [MASK]."""


def fill_mask(folder: str | Path, text: str, top_k: int = 5) -> list[list[tuple[str, float]]]:
    """For each [MASK] of `text` the `top_k` most probable pieces with their probabilities.

    `folder` is a run folder (its newest intact checkpoint is used), a model folder or a hub id. Raises
    UserError for a text without [MASK], one too long for the model, a folder that holds no model, and a model
    without the head; OSError for weights that cannot be read.
    """
    folder = model_folder(hub.local_folder(folder), lambda message: print(message, file=sys.stderr))
    tokenizer = load_tokenizer(folder)
    tokenizer.encode_special_tokens = False  # here [MASK] is a question, not text
    ids = special_ids(tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is missing is judged here, what is not used does not matter
        model, loaded = BertForMaskedLM.from_pretrained(folder, output_loading_info=True)
    if loaded["missing_keys"]:
        raise UserError(
            f"{folder} has no head that guesses words (it lacks {min(loaded['missing_keys'])}); give a model "
            "that was trained to fill in masks"
        )
    if vocabulary_size(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"the tokenizer of {folder} has {vocabulary_size(tokenizer)} ids, but the embedding table has "
            f"{model.config.vocab_size} rows; put the model's own tokenizer there"
        )
    pieces = tokenizer.encode(unicodedata.normalize("NFC", text), add_special_tokens=False).ids
    if ids.mask not in pieces:
        raise UserError(f"the text {text!r} has no [MASK]; put one where a word is to be guessed")
    limit = model.config.max_position_embeddings
    if len(pieces) + 2 > limit:
        raise UserError(f"the text has {len(pieces) + 2} tokens, and the model takes {limit}; shorten it")
    input_ids = torch.tensor([[ids.cls, *pieces, ids.sep]])
    with torch.no_grad():
        logits = model(input_ids).logits[0]
    best = torch.softmax(logits[input_ids[0] == ids.mask].float(), dim=-1).topk(
        min(top_k, model.config.vocab_size)
    )
    return [
        [(str(tokenizer.id_to_token(int(i))), float(p)) for p, i in zip(probabilities, indices)]
        for probabilities, indices in zip(best.values, best.indices)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = tyro.cli(Options, args=arguments, prog="python -m fastbert.fill_mask", description=__doc__)
    try:
        if options.top_k < 1:
            raise UserError(f"--top-k {options.top_k} is out of range; give at least 1")
        answers = fill_mask(options.model, options.text, options.top_k)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    for number, answer in enumerate(answers, start=1):
        table = Table("piece", "probability", title=f"[MASK] {number}" if len(answers) > 1 else None)
        for piece, probability in answer:
            table.add_row(piece, f"{100 * probability:.2f} %")
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
