"""Where the time of a training step goes: a profile of packed fastbert by kind of work.

    python -m benchmarks.profile_step [--record]

On a GPU, if torch sees one, it is the kernels' time (BERT-Base, bf16); else the processor's (mini,
as in `test_training_step[wikipedia-512]`). `--record` writes `results/profile-<kind>.json`, of which
`benchmarks.plot` makes a table.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import environment
from benchmarks.rows import RESULTS
from benchmarks.workloads import VOCAB_SIZE, typical_batch, wikipedia_512
from fastbert.config import BertConfig
from fastbert.modeling import BertForPreTraining
from fastbert.optim import Lamb, parameter_groups
from fastbert.train.trainer import Totals, Trainer

STEPS = 5
LR = 1e-4
# kind of work -> names of operations and kernels; the first that matches counts
KINDS = (
    ("attention", r"attention|sdpa|fmha"),
    ("matrix products", r"addmm|::mm|bmm|gemm|cublas|cutlass|_qkv_|linear_act|nvjet|xmma"),
    ("loss", r"log_softmax|_softmax|nll_loss|cross_entropy|argmax|scatter_add"),
    ("activation", r"gelu|relu|tanh"),
    ("dropout, residual, LayerNorm", r"layer_norm|dropout_add_norm|native_dropout|bernoulli|sum_partials"),
    ("embeddings", r"embedding|table_grad"),
    ("copies and gathers", r"copy_|::cat|index|gather|Memcpy|Memset|zero_|fill_|clone|stack"),
)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def is_in_optimizer(event: Any) -> bool:
    while event is not None:
        if event.name.startswith("Optimizer.step"):
            return True
        event = event.cpu_parent
    return False


def times_of(events: Any, on_gpu: bool) -> dict[tuple[str, str], float]:
    """(kind of work, operation or kernel) -> microseconds of its own."""
    times: dict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        own = [(kernel.name, kernel.duration) for kernel in event.kernels] if on_gpu else []
        if not on_gpu and event.self_cpu_time_total > 0:
            own = [(event.name, event.self_cpu_time_total)]
        for name, time in own:
            times["optimizer" if is_in_optimizer(event) else kind_of(name), name] += time
    return times


def shares(times: dict[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    """Kind -> {"share": of everything, name: its share, for names of a percent or more}."""
    whole = sum(times.values())
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: {"share": 0.0})
    for (kind_name, name), time in sorted(times.items(), key=lambda item: -item[1]):
        kind = kinds[kind_name]
        kind["share"] += time / whole
        if time >= 0.01 * whole:
            kind[name] = round(time / whole, 4)
    for kind in kinds.values():
        kind["share"] = round(kind["share"], 4)
    return dict(sorted(kinds.items(), key=lambda item: -item[1]["share"]))


def profile_step() -> dict[str, Any]:
    """A row: environment, milliseconds of a step, and the shares."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dropout = 0.1 if on_gpu else 0.0  # pretrain's defaults for base and mini
    size, tokens = ("base", 16_384) if on_gpu else ("mini", 4096)
    config = BertConfig.named(
        size, vocab_size=VOCAB_SIZE, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    torch.manual_seed(0)
    model = BertForPreTraining(config).to(device)
    optimizer = Lamb(parameter_groups(model, 0.01), lr=LR)
    # launched one by one: of a replayed graph nobody knows which kernel belongs to what
    precision = "bf16" if on_gpu else "fp32"
    trainer = Trainer(model, optimizer, lambda updates: LR, precision=precision, cuda_graph=False)
    batch = typical_batch(wikipedia_512(tokens_per_batch=tokens)).to(device)
    totals = Totals()

    def steps() -> None:
        for _ in range(STEPS):
            trainer.train_step([batch], totals)
        if on_gpu:
            torch.cuda.synchronize()

    steps()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiled:
        steps()
    times = times_of(profiled.events(), on_gpu)
    return {
        "name": f"profile of a training step, {size}, Wikipedia's length mix at 512",
        "tokens": batch.num_tokens,
        "ms": round(sum(times.values()) / 1e3 / STEPS, 2),
        "kinds": shares(times),
        **(environment.of_gpu(device, environment.commit()) if on_gpu else environment.of_cpu()),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_step", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--record", action="store_true", help="write it to benchmarks/results/")
    options = parser.parse_args(arguments)
    row = profile_step()
    print(f"{row['name']}: {row['ms']} ms a step")
    for kind, names in row["kinds"].items():
        each = ", ".join(f"{name} {share:.1%}" for name, share in names.items() if name != "share")
        print(f"{names['share']:7.1%}  {kind}: {each}")
    if options.record:
        file = RESULTS / f"profile-{row['host_kind']}.json"
        file.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
