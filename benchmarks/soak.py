"""A long pre-training run of several ranks, watched from outside: does anything grow or slow down?

    python -m benchmarks.soak [--minutes 20] [--gigabytes 1] [--ranks 2] [--record]

Text is made up (words by Zipf's law, a tenth of them Korean), prepared by `fastbert.prepare` and trained on
by `torchrun -m fastbert.pretrain --data`, which saves and evaluates as it goes. Every few seconds the memory
and the open files of each rank and of its loader processes are read from /proc. Status 1 if a limit is
broken: `LIMITS`. `--record` appends a row, with the curves, to `results/soak-MACHINE.jsonl`.

Memory that a process owns (RssAnon) is what has to be flat. Pages of the data set (RssFile) are shared with
every other process and given back when somebody needs the memory; they come on top, and are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import of_cpu
from benchmarks.rows import RESULTS, Row

ROOT = Path(__file__).parents[1]
EVERY_S = 5.0
WARM_UP = 0.25  # of the time: what is allocated and mapped in it is no growth
FILES = 16
STEPS_A_SAVE = 100
SIZE = "tiny"
LIMITS = {
    "memory_growth": 0.03,  # of RssAnon, from after the warm-up to the end
    "file_growth": 0,  # open files
    "slowdown": 0.10,  # of tokens a second, likewise; the machine itself drifts
    "rank_mb": 1500,  # RssAnon and RssFile of a rank, without model and optimizer
}

Sample = dict[str, float]  # seconds, anon_mb, file_mb, open_files


# ---- text


def write_corpus(folder: Path, gigabytes: float, seed: int = 0) -> int:
    """Files of documents, a sentence a line; returns their bytes."""
    rng = np.random.default_rng(seed)
    syllables = [
        "".join(pair)
        for pair in np.stack(np.meshgrid(list("bdfgklmnprst"), list("aeiou")), -1).reshape(-1, 2)
    ]
    hangul = [chr(code) for code in rng.integers(0xAC00, 0xD7A4, 400)]
    words = [
        "".join(rng.choice(hangul if i % 10 == 0 else syllables, rng.integers(1, 4))) for i in range(30_000)
    ]
    odds = 1 / np.arange(2, len(words) + 2)
    odds /= odds.sum()
    lengths = rng.integers(4, 30, 50_000)
    drawn = np.split(rng.choice(len(words), lengths.sum(), p=odds), lengths.cumsum()[:-1])
    sentences = [" ".join(words[i] for i in sentence) + "." for sentence in drawn]
    folder.mkdir(parents=True)
    written, wanted = 0, int(gigabytes * 1e9)
    for number in range(FILES):
        with (folder / f"{number:02}.txt").open("wb") as file:
            while written < wanted * (number + 1) // FILES:
                picked = rng.integers(0, len(sentences), 5_000)
                ends = rng.random(len(picked)) < 0.05  # 20 sentences a document
                text = "".join(f"{sentences[i]}\n{chr(10) if end else ''}" for i, end in zip(picked, ends))
                written += file.write(text.encode())
    return written


# ---- watching


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def family(pid: int) -> list[int]:
    """The process, and what it started."""
    return [pid, *(other for child in children(pid) for other in family(child))]


def reading(pids: Sequence[int]) -> Sample:
    """Memory and open files of processes together; one that just ended counts nothing."""
    found = {"anon_mb": 0.0, "file_mb": 0.0, "open_files": 0.0}
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            files = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines())
        found["anon_mb"] += int(fields["RssAnon"].split()[0]) / 1000
        found["file_mb"] += (int(fields["RssFile"].split()[0]) + int(fields["RssShmem"].split()[0])) / 1000
        found["open_files"] += files
    return found


def watch(process: subprocess.Popen[bytes], ranks: int, minutes: float) -> list[list[Sample]]:
    """Samples of each rank, from when all are there until the time is over; then the run is asked to stop."""
    samples: list[list[Sample]] = [[] for _ in range(ranks)]
    started: float | None = None
    while process.poll() is None:
        pids = sorted(children(process.pid))
        if started is None and len(pids) == ranks:
            started = time.monotonic()
        if started is not None:
            seconds = time.monotonic() - started
            if seconds > 60 * minutes:
                process.send_signal(signal.SIGTERM)
                process.wait(120)
                break
            for found, pid in zip(samples, pids):
                found.append({"seconds": round(seconds, 1), **reading(family(pid))})
        time.sleep(EVERY_S)
    return samples


# ---- what it says


def growth(values: Sequence[float]) -> float:
    """The last quarter's median over that of the quarter after the warm-up, less 1."""
    quarter = max(1, int(len(values) * WARM_UP))
    first, last = values[quarter : 2 * quarter], values[-quarter:]
    return statistics.median(last) / statistics.median(first) - 1


def summary(samples: list[list[Sample]], rates: Sequence[float], model_mb: float) -> Row:
    """The figures that `LIMITS` are about, of the worst rank."""
    settled = [found[int(len(found) * WARM_UP) :] for found in samples]
    quarter = max(1, len(settled[0]) // 3)
    files = [
        [statistics.median(s["open_files"] for s in part) for part in (f[:quarter], f[-quarter:])]
        for f in settled
    ]
    return {
        "memory_growth": round(max(growth([s["anon_mb"] for s in found]) for found in samples), 4),
        "file_growth": max(last - first for first, last in files),
        "slowdown": round(-growth(rates), 4),
        "rank_mb": round(max(s["anon_mb"] + s["file_mb"] for found in samples for s in found) - model_mb, 1),
        "anon_mb": round(max(s["anon_mb"] for found in samples for s in found), 1),
        "model_mb": round(model_mb, 1),
        "tokens_per_s": round(statistics.median(rates), 1),
    }


def broken(row: Row) -> list[str]:
    return [f"{name} is {row[name]}, above {limit}" for name, limit in LIMITS.items() if row[name] > limit]


def thinned(values: Sequence[Any], points: int = 120) -> list[Any]:
    kept = np.unique(np.linspace(0, len(values) - 1, min(points, len(values))).astype(int))
    return [values[i] for i in kept]


# ---- the run


def run(folder: Path, minutes: float, gigabytes: float, ranks: int) -> Row:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    python = [sys.executable, "-m"]
    text, data, output = folder / "text", folder / "data", folder / "run"
    started = time.monotonic()
    size = write_corpus(text, gigabytes)
    print(f"{size / 1e9:.2f} GB of text made in {time.monotonic() - started:.0f} s", flush=True)
    started = time.monotonic()
    prepare = ["fastbert.prepare", "--corpus", str(text), "--format", "sentences", "--vocab-size", "8000"]
    subprocess.run([*python, *prepare, "--output", str(data)], env=environment, check=True)
    prepared = time.monotonic() - started
    command = ["torch.distributed.run", "--nproc-per-node", str(ranks), "--monitor-interval", "1"]
    command += ["-m", "fastbert.pretrain", "--packed", "--data", str(data), "--output", str(output)]
    command += ["--size", SIZE, "--steps", "1000000", "--schedule", "constant", "--warmup", "0"]
    command += ["--save-every", str(STEPS_A_SAVE), "--eval-every", str(5 * STEPS_A_SAVE), "--log-every", "10"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*python, *command], env=environment, stdout=log, stderr=log)
        samples = watch(process, ranks, minutes)
    if min(map(len, samples)) < 8:
        lines = (folder / "log").read_text().splitlines()
        raise SystemExit("the run ended too early:\n" + "\n".join(lines[:40]))
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rates = [row["tokens_per_s"] for row in metrics if "tokens_per_s" in row]
    steps = [row["step"] for row in metrics if "loss" in row]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise SystemExit("a step was logged twice")
    options = f"--minutes {minutes:g} --gigabytes {gigabytes:g} --ranks {ranks}"
    last = output / "last"
    model_mb = sum(file.stat().st_size for file in last.resolve().rglob("*") if file.is_file()) / 1e6
    return {
        "name": f"soak[{ranks}-ranks-{gigabytes:g}-gb]",
        "minutes": round(samples[0][-1]["seconds"] / 60, 1),
        "steps": steps[-1],
        "saves": steps[-1] // STEPS_A_SAVE,
        "text_gb": round(size / 1e9, 3),
        "prepare_s": round(prepared, 1),
        "model": SIZE,
        "ranks": ranks,
        **summary(samples, rates, model_mb),
        "curves": {"memory": [thinned(found) for found in samples], "tokens_per_s": thinned(rates)},
        "command": f"python -m benchmarks.soak {options}",
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20, help="of training")
    parser.add_argument("--gigabytes", type=float, default=1, help="of text")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="append a row to benchmarks/results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        row = run(Path(made), options.minutes, options.gigabytes, options.ranks)
    print(json.dumps({key: value for key, value in row.items() if key != "curves"}, indent=1))
    found = broken(row)
    for line in found:
        print(line)
    if options.record:
        environment = of_cpu()
        with (RESULTS / f"soak-{environment['host_kind']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | environment) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
