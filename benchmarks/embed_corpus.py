"""`python -m benchmarks.embed_corpus MODEL`: the embed command against SentenceTransformer.encode.

100,000 short texts, sentences of Python's own documentation, from a file to an .npy file. Each side is a
process of its own: seconds from its start to its end, and the most memory that it ever held. Takes minutes,
so it is no part of `pytest benchmarks/`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import of_cpu
from fastbert.data.corpus import open_corpus

RESULTS = Path(__file__).parent / "results"
MAX_RSS_GB = 1.5  # of the embed command

THEIRS = """
import sys
import numpy as np
from sentence_transformers import SentenceTransformer

model, texts, output = sys.argv[1:]
lines = open(texts, encoding="utf-8").read().removesuffix("\\n").split("\\n")
np.save(output, SentenceTransformer(model, device="cpu").encode(lines, show_progress_bar=False))
"""


def short_texts(count: int) -> list[str]:
    """Sentences of the built-in corpus, with a number in front from the second time round on."""
    sentences = [sentence for document in open_corpus(None).documents() for sentence in document]
    sentences = [" ".join(sentence.split()) for sentence in sentences]
    rounds = (
        [f"{number} {sentence}" if number else sentence for sentence in sentences]
        for number in itertools.count()
    )
    return list(itertools.islice(itertools.chain.from_iterable(rounds), count))


def measured(command: list[str]) -> tuple[float, float]:
    """(seconds, peak GB of memory) of a process that must succeed."""
    started = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} … failed with status {process.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a sentence-transformers BERT")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--record", action="store_true", help="append the row to benchmarks/results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts, ours, theirs = (f"{folder}/{name}" for name in ("texts.txt", "ours.npy", "theirs.npy"))
        lines = short_texts(options.texts)
        Path(texts).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        commands = {
            "fastbert.embed": [
                sys.executable, "-m", "fastbert.embed", options.model, texts, "--output", ours,
                "--device", "cpu",
            ],
            "sentence-transformers": [sys.executable, "-c", THEIRS, options.model, texts, theirs],
        }  # fmt: skip
        results = {name: measured(command) for name, command in commands.items()}
        gap = float(np.abs(np.load(ours) - np.load(theirs)).max())
    if not gap <= 2e-5:
        raise SystemExit(f"the vectors differ by {gap}: not the same computation, so there is no row")
    seconds = {name: round(result[0], 1) for name, result in results.items()}
    row: dict[str, Any] = {
        "name": "embed_corpus",
        "texts": options.texts,
        "largest_difference": gap,
        "seconds": seconds,
        "peak_rss_gb": {name: round(result[1], 2) for name, result in results.items()},
        "times_faster_than": {
            "sentence-transformers": round(seconds["sentence-transformers"] / seconds["fastbert.embed"], 2)
        },
        **of_cpu(),
    }
    print(json.dumps(row, indent=2))
    if row["peak_rss_gb"]["fastbert.embed"] > MAX_RSS_GB:
        raise SystemExit(f"fastbert.embed held more than {MAX_RSS_GB} GB")
    if options.record:
        with (RESULTS / f"{row['host_kind']}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
