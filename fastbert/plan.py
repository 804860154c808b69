"""`python -m fastbert.plan`: what pre-training on a cluster would take, before anybody pays for one.

A model of one step, with a source beside each figure: *measured* (a row of `benchmarks/results`), *computed*
(a formula over the others) or *assumed* (a data sheet, or a share that nobody has measured on this GPU).

- compute: the model's FLOPs (`train/flops.py`) at a share of the GPU's peak;
- optimizer: LAMB reads and writes weights, gradients and moments, bounded by memory bandwidth;
- communication: a ring over n ranks sends (n - 1) / n of the gradients in each of its two passes
  (reduce-scatter and all-gather). It runs beside the last micro-batch's backward pass, two thirds of that
  micro-batch's time; what is left over is waited for. Sharded, each micro-batch gathers the bf16 weights of
  the layers twice and those of the rest once, and the last one scatters the fp32 gradients; that runs beside
  all computing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from fastbert.config import BertConfig
from fastbert.errors import UserError
from fastbert.modeling import BertForPreTraining
from fastbert.tasks.settings import shown
from fastbert.train.flops import training_flops
from fastbert.train.report import PEAK_TFLOPS

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@dataclass(frozen=True)
class Gpu:
    """Figures of the vendor's data sheet; dense bf16 peaks are in `PEAK_TFLOPS`."""

    memory_gb: float
    memory_gb_s: float  # bandwidth
    link_gb_s: float  # to the other GPUs of a node, one direction


GPUS = {
    "a10g": Gpu(24, 600, 32),  # PCIe 4 x16
    "l40s": Gpu(48, 864, 32),
    "a100": Gpu(80, 2039, 300),  # SXM, 80 GB; NVLink 3
    "h100": Gpu(80, 3350, 450),  # SXM; NVLink 4
    "h200": Gpu(141, 4800, 450),
    "b200": Gpu(180, 8000, 900),  # NVLink 5
    "mi300x": Gpu(192, 5300, 448),  # seven Infinity Fabric links of 64
}
UTILISATION = 0.5  # of the peak, where no row of this GPU says better
ACTIVATIONS = 16.0  # elements a token, layer and hidden unit, where no row says better
LINK_SHARE = 0.8  # of a link's figure that collectives reach
MEMORY_SHARE = 0.8  # likewise of the memory's
FREE = 0.9  # of the memory: the rest is the driver's, the allocator's and NCCL's
MASKED = 0.15  # of the tokens
BACKWARD = 2 / 3  # of a micro-batch's time
LAMB_PASSES = 10  # over fp32 values: norms, then gradient, weight and two moments read, three written


@dataclass
class Settings:
    gpus: int = 8
    """Ranks in all."""
    gpu: Literal["a10g", "l40s", "a100", "h100", "h200", "b200", "mi300x"] = "h200"
    """Kind of GPU."""
    gpus_per_node: int = 8
    """GPUs that the node's own links connect."""
    network_gbit: float = 400.0
    """Network of a GPU to other nodes, in gigabits a second and direction."""
    model: Literal["tiny", "mini", "small", "medium", "base", "large"] = "base"
    """Size of the model."""
    vocab_size: int = 30522
    """Pieces of the tokenizer."""
    corpus_tokens: float = 3.3e9
    """Tokens of the corpus (Wikipedia and BookCorpus, as in the paper: 3.3e9 words)."""
    epochs: float = 1.0
    """Times that the corpus is read."""
    seq_len: int = 512
    """Length of every sequence in tokens: text of shorter ones costs less attention."""
    tokens_per_batch: int = 32768
    """Token budget of a rank's micro-batch."""
    accumulate: int = 1
    """Micro-batches a step and rank."""
    activation_checkpointing: bool = False
    """As in pre-training: inputs of the layers are kept, the rest is computed again."""
    shard: bool = False
    """As in pre-training: weights, gradients and moments are split among the ranks."""
    utilisation: Annotated[float | None, shown("measured, else 0.5", "FLOAT")] = None
    """Share of the GPU's peak that computing reaches."""
    json: bool = False
    """Print the figures as JSON."""


@dataclass
class Figure:
    """A line of the plan. `source`: measured, computed or assumed."""

    name: str
    value: float
    unit: str
    source: str
    how: str


@dataclass
class Plan:
    figures: list[Figure] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str, source: str, how: str) -> float:
        self.figures.append(Figure(name, value, unit, source, how))
        return value

    def __getitem__(self, name: str) -> float:
        return next(figure.value for figure in self.figures if figure.name == name)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status (0, 2 = bad input, or a model that does not fit)."""
    settings = tyro.cli(
        Settings,
        args=sys.argv[1:] if arguments is None else arguments,
        prog="python -m fastbert.plan",
        description="Estimate step time, memory, communication and hours of pre-training on a cluster.",
    )
    console = Console()
    try:
        made = plan(settings, rows_of(RESULTS))
        if settings.json:
            print(json.dumps([asdict(figure) for figure in made.figures], indent=1))
        else:
            console.print(_table(made))
        check_fit(settings, made)
    except UserError as error:
        stderr = Console(stderr=True)
        stderr.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    return 0


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of the benchmarks; none in an installed package, which has no benchmarks."""
    lines = (line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines())
    return [json.loads(line) for line in lines if line.strip()]


def plan(s: Settings, rows: Sequence[dict[str, Any]]) -> Plan:
    """Every figure, in the order in which they are made of each other. UserError for impossible settings."""
    _check(s)
    gpu, made = GPUS[s.gpu], Plan()
    config = BertConfig.named(s.model, vocab_size=s.vocab_size, max_position_embeddings=max(512, s.seq_len))
    with torch.device("meta"):
        model = BertForPreTraining(config)
    parameters = made.add(
        "parameters", sum(p.numel() for p in model.parameters()), "", "computed", "the model, on no device"
    )

    # ---- time of a micro-batch and of a step
    flops = made.add(
        "FLOPs of a micro-batch",
        training_flops(
            config, s.tokens_per_batch, s.tokens_per_batch * s.seq_len, MASKED * s.tokens_per_batch
        )
        * (4 / 3 if s.activation_checkpointing else 1),
        "TFLOP",
        "computed",
        "forward, backward"
        + (", and forward again" if s.activation_checkpointing else "")
        + f"; assumed: {MASKED:.0%} of the tokens masked",
    )
    peak = made.add("peak", PEAK_TFLOPS[s.gpu.upper()] * 1e12, "TFLOP/s", "assumed", "data sheet, dense bf16")
    share, source, how = _utilisation(s, rows)
    made.add("share of the peak", share, "%", source, how)
    compute = made.add("computing", s.accumulate * flops / (share * peak), "ms", "computed", "FLOPs / rate")
    optimizer = made.add(
        "LAMB",
        LAMB_PASSES * 4 * parameters / (s.gpus if s.shard else 1) / (MEMORY_SHARE * gpu.memory_gb_s * 1e9),
        "ms",
        "computed",
        f"{LAMB_PASSES} passes over fp32 values at {MEMORY_SHARE:.0%} of {gpu.memory_gb_s:,.0f} GB/s",
    )
    crosses = s.gpus > s.gpus_per_node
    link = made.add(
        "link",
        LINK_SHARE * (s.network_gbit / 8 if crosses else gpu.link_gb_s) * 1e9,
        "GB/s",
        "assumed",
        f"{LINK_SHARE:.0%} of "
        + (f"{s.network_gbit:g} Gbit/s between nodes" if crosses else "the node's own links (data sheet)"),
    )
    layers = sum(p.numel() for p in model.bert.encoder.parameters())
    rest, layer = parameters - layers, layers / config.num_hidden_layers
    sent, what = 2 * 4 * parameters, "fp32"
    beside, which = (
        BACKWARD * compute / s.accumulate,
        "the last micro-batch's backward pass; assumed: that is",
    )
    which += " two thirds of its time"
    if s.shard:
        sent, what = (
            s.accumulate * 2 * (2 * layers + rest) + 4 * parameters,
            "bf16 weights and fp32 gradients",
        )
        beside, which = compute, "all computing; assumed: it is never in its way"
    sent *= (s.gpus - 1) / s.gpus
    communication = made.add(
        "communication", sent / link, "ms", "computed", f"{sent / 1e9:.2f} GB from each rank: {what}"
    )
    waiting = made.add(
        "of it waited for", max(0.0, communication - beside), "ms", "computed", f"beside {which}"
    )
    step = made.add("step", compute + optimizer + waiting, "ms", "computed", "computing + LAMB + waiting")
    made.add(
        "scaling efficiency", (compute + optimizer) / step, "%", "computed", "step without waiting / step"
    )
    tokens = s.tokens_per_batch * s.accumulate * s.gpus
    rate = made.add(
        "tokens a second", tokens / step, "", "computed", f"{tokens:,} a step, all ranks, nothing padded"
    )
    made.add(
        "total",
        s.epochs * s.corpus_tokens / rate,
        "h",
        "computed",
        f"{s.epochs:g} x {s.corpus_tokens:g} tokens",
    )

    # ---- memory of a rank
    state = made.add(
        "weights, gradients, moments",
        16 * parameters / (s.gpus if s.shard else 1),
        "GB",
        "computed",
        "16 bytes a parameter "
        + ("(fp32), split among the ranks" if s.shard else "(fp32, under bf16 autocast)"),
    )
    whole = 0.0
    if s.shard:
        # bf16 weights of this layer, of the next one and of what is no layer, and their gradients: bf16, and
        # fp32 where they are summed
        whole = (2 + 2 + 4) * (2 * layer + rest) + (4 * parameters if s.accumulate > 1 else 0)
        more = ", and the fp32 gradients that micro-batches add up" if s.accumulate > 1 else ""
        how = f"at most: two layers and the embeddings with their gradients{more}"
        made.add("whole weights", whole, "GB", "computed", how)
    factor, how = _activations(rows)
    # of each layer its input, and of one layer at a time all
    kept = 1 + factor / config.num_hidden_layers if s.activation_checkpointing else factor
    activations = made.add(
        "activations",
        2 * kept * config.hidden_size * config.num_hidden_layers * s.tokens_per_batch,
        "GB",
        "assumed",
        how,
    )
    head = made.add(
        "logits of masked tokens",
        2 * 4 * MASKED * s.tokens_per_batch * s.vocab_size,
        "GB",
        "computed",
        "at most: fp32 logits and their gradient",
    )
    made.add(
        "memory of a rank",
        state + whole + activations + head,
        "GB",
        "computed",
        f"the sum; {gpu.memory_gb:g} GB on the data sheet",
    )
    return made


def check_fit(s: Settings, made: Plan) -> None:
    """UserError unless a rank's memory holds the plan."""
    needed, there = made["memory of a rank"], FREE * GPUS[s.gpu].memory_gb * 1e9
    if needed > there:
        raise UserError(
            f"a rank needs {needed / 1e9:.1f} GB, {(needed - there) / 1e9:.1f} GB more than the "
            f"{there / 1e9:.1f} GB that a {s.gpu} has for it; lower --tokens-per-batch and raise "
            "--accumulate, or try --activation-checkpointing or --shard"
        )


def _utilisation(s: Settings, rows: Sequence[dict[str, Any]]) -> tuple[float, str, str]:
    if s.utilisation is not None:
        return s.utilisation, "assumed", "--utilisation"
    found = [
        row
        for row in rows
        if row["name"].startswith("test_training_step[")
        and s.gpu in row["host_kind"].split("-")
        and row.get("size") == s.model
        and "mfu" in row
    ]
    if not found:
        return UTILISATION, "assumed", f"no row of a training step of BERT-{s.model} on a {s.gpu}"
    row = found[-1]
    return row["mfu"]["fastbert"], "measured", f"{row['name']} at {row['commit']}"


def _activations(rows: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """Elements that a layer keeps for the backward pass, a token and hidden unit, and where that is from.

    Counted in fp32 without dropout. That autocast on a GPU keeps each of them in bf16 and nothing beside
    them is an assumption: on a CPU with dropout, autocast keeps twice as much.
    """
    latest = {row["name"]: row for row in rows}
    pair = [latest.get(f"test_scaling[layers-{layers}]") for layers in (4, 8)]
    if None in pair:
        return ACTIVATIONS, f"{ACTIVATIONS} elements a token, layer and hidden unit, all in bf16, no dropout"
    few, many = (row for row in pair if row is not None)
    width = BertConfig.named("mini").hidden_size  # of these rows, in fp32
    tokens = round(many["tokens_per_s"] * many["median_s"])
    # of four layers in fp32; the joined weights of query, key and value are kept once, not for each token
    factor = (many["saved_bytes"] - few["saved_bytes"]) / (4 * 4 * width * tokens) - 3 * width / tokens
    return factor, (
        f"{factor:.1f} elements a token, layer and hidden unit (counted at {many['commit']} in fp32 on a CPU "
        "without dropout), all in bf16"
    )


def _check(s: Settings) -> None:
    for name, value, least in (
        ("--gpus", s.gpus, 1),
        ("--gpus-per-node", s.gpus_per_node, 1),
        ("--corpus-tokens", s.corpus_tokens, 1),
        ("--seq-len", s.seq_len, 8),
        ("--tokens-per-batch", s.tokens_per_batch, s.seq_len),
        ("--accumulate", s.accumulate, 1),
        ("--vocab-size", s.vocab_size, 5),
    ):
        if not value >= least:
            raise UserError(f"{name} {value:g} is out of range; give at least {least}")
    for name, number in (("--epochs", s.epochs), ("--network-gbit", s.network_gbit)):
        if not number > 0:
            raise UserError(f"{name} {number:g} is out of range; give more than 0")
    if s.utilisation is not None and not 0 < s.utilisation <= 1:
        raise UserError(f"--utilisation {s.utilisation:g} is out of range; give a share above 0, at most 1")


_SCALES = {
    "TFLOP": 1e12,
    "TFLOP/s": 1e12,
    "ms": 1e-3,
    "GB": 1e9,
    "GB/s": 1e9,
    "%": 0.01,
    "h": 3600.0,
    "": 1.0,
}


def _table(made: Plan) -> Table:
    table = Table("figure", "value", "source", "from")
    for figure in made.figures:
        value = figure.value / _SCALES[figure.unit]
        text = f"{value:,.0f}" if figure.unit == "" else f"{value:,.4g}"
        table.add_row(figure.name, f"{text} {figure.unit}".strip(), figure.source, figure.how)
    return table


if __name__ == "__main__":
    sys.exit(main())
