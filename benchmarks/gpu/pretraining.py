"""Rows of whole models on a card: pre-training steps and encoding; and two minutes of real pre-training."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks import targets
from benchmarks.gpu.setting import REAL, Setting
from benchmarks.model_cases import Run, encoding_task, training_task
from benchmarks.peers import Compiler
from benchmarks.task import OURS, Case, Roof, Task, near
from benchmarks.workloads import mixed_lengths, packed_batch, python_docs_in_memory, vocabulary_of
from fastbert.config import BertConfig
from fastbert.data.loader import (
    LoaderSettings,
    PackedLoader,
    WindowBuilder,
    evaluation_batches,
)
from fastbert.modeling import BertForPreTraining
from fastbert.optim import Lamb, parameter_groups
from fastbert.train.trainer import Totals, Trainer

BATCH_SIZES = (1, 4, 16, 64, 256)  # of encoding, from what a server gets to what fills a card
COMPILE_SECONDS = 45.0
# of the loss of a step in bf16 with everything on, against the eager path
STEP_TOLERANCE = 5e-3
CHECKED_STEPS = 4


def _run(setting: Setting, fields: dict[str, int], compiler: Compiler, training: bool) -> Run:
    dropout = {} if training else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    roof = Roof(setting.peak_tflops or math.nan, setting.peak_gb or math.nan)
    return Run(BertConfig(**fields, **dropout), setting.device, roof, compiler, sorted_rows=16, forms="plain")


def _name(fields: dict[str, int]) -> str:
    return f"{fields['num_hidden_layers']} layers of {fields['hidden_size']}"


def workloads(setting: Setting) -> dict[str, list[int]]:
    """Sequence lengths of a batch; the mix first, which is what users have."""
    tokens, lengths = setting.sizes.tokens, setting.sizes.lengths
    return {
        "Wikipedia's mix": mixed_lengths(tokens, lengths[-1]),
        **{str(n): [n] * (tokens // n) for n in reversed(lengths)},
    }


def pretraining_cases(setting: Setting) -> Iterator[Case]:
    """BERT-Large, then Base, against the textbook and transformers; then also against it compiled."""
    models = tuple(reversed(setting.sizes.models))
    for fields in models:
        for workload, lengths in workloads(setting).items():
            name = f"pretraining[{_name(fields)}, {workload}]"
            is_target = setting.has_targets and fields is models[0]
            target = targets.PRETRAINING[workload] if is_target else None
            yield Case(name, functools.partial(_pretraining, fields, lengths, setting, target, False))
    # compiling takes as long as everything else together: the smaller model first
    for fields in setting.sizes.models:
        name = f"pretraining[{_name(fields)}, Wikipedia's mix, against compiled]"
        lengths = workloads(setting)["Wikipedia's mix"]
        yield Case(name, functools.partial(_pretraining, fields, lengths, setting, None, True))


def _pretraining(
    fields: dict[str, int], lengths: list[int], setting: Setting, target: float | None, compiled: bool
) -> Task:
    compiler = Compiler(COMPILE_SECONDS if setting.sizes is REAL else 0.0)
    run = replace(_run(setting, fields, compiler, training=True), forms="compiled" if compiled else "plain")
    task = training_task(packed_batch(lengths, fields["vocab_size"]), run)
    return _held_against(task, setting, target)


def _held_against(task: Task, setting: Setting, target: float | None) -> Task:
    """With the floor of the machine's product rate, in tokens a second."""
    if setting.peak_tflops:
        task.floor = 1e12 * setting.peak_tflops * task.amount / task.flop
    else:
        task.roof = None
    task.target = target
    return task


def inference_cases(setting: Setting) -> Iterator[Case]:
    """BERT-Base on 1 to 256 texts of mixed lengths: latency, and throughput."""
    fields = setting.sizes.models[0]
    sizes = BATCH_SIZES if setting.sizes is REAL else BATCH_SIZES[:2]
    for texts in sizes:
        name = f"inference[{_name(fields)}, {texts} texts of mixed lengths]"
        yield Case(name, functools.partial(_inference, fields, texts, setting))


def _inference(fields: dict[str, int], texts: int, setting: Setting) -> Task:
    longest = setting.sizes.lengths[-1]
    rng = np.random.default_rng(texts)
    # geometric lengths of mean 60 at 512: what searches and chats look like
    lengths = np.minimum(longest, 1 + rng.geometric(min(1.0, 8.5 / longest), texts)).tolist()
    compiler = Compiler(COMPILE_SECONDS if setting.sizes is REAL and texts == BATCH_SIZES[-1] else 0.0)
    run = _run(setting, fields, compiler, training=False)
    batch = packed_batch(lengths, fields["vocab_size"], masked=0.0)
    return _held_against(encoding_task(batch, run), setting, None)


# ---- a training step in bf16 ------------------------------------------------------------------------------


def step_problems(setting: Setting) -> list[str]:
    """What is wrong with the losses of some steps as the command takes them, against eager ones in fp32."""
    fields = {**setting.sizes.models[0], "num_hidden_layers": 2}
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**fields, **options)
    lengths = mixed_lengths(min(4096, setting.sizes.tokens), setting.sizes.lengths[-1])
    batch = packed_batch(lengths, config.vocab_size)
    on_gpu = setting.device.type == "cuda"
    losses: dict[str, list[float]] = {}
    torch.manual_seed(0)
    state = BertForPreTraining(config).state_dict()
    for name, choice, precision in (
        ("eager", "eager", "fp32"),
        ("fastbert", "auto" if on_gpu else "eager", "bf16" if on_gpu else "fp32"),
    ):
        losses[name] = _losses(config, state, batch, setting.device, choice, precision)
    problems = []
    for step, (right, ours) in enumerate(zip(losses["eager"], losses["fastbert"])):
        said = near(right, STEP_TOLERANCE)(ours)
        if said:
            problems.append(f"training step {step}: {said}: loss {ours:.4f}, not {right:.4f}")
    if not losses["fastbert"][-1] < losses["fastbert"][0]:
        problems.append(f"training does not lower the loss: {losses['fastbert']}")
    return problems


def _losses(
    config: BertConfig, state: dict[str, Any], batch: Any, device: torch.device, choice: str, precision: str
) -> list[float]:
    from fastbert.ops import backend

    with backend.use(choice):
        model = BertForPreTraining(config)
        model.load_state_dict(state)
        model.to(device)
        optimizer = Lamb(parameter_groups(model, 0.01), lr=1e-3)
        graph = None if choice == "auto" else False
        trainer = Trainer(model, optimizer, lambda _: 1e-3, precision=precision, cuda_graph=graph)
        losses = []
        for _ in range(CHECKED_STEPS):
            totals = Totals()
            trainer.train_step([batch], totals)
            losses.append(totals.metrics()["loss"])
    return losses


# ---- real pre-training ------------------------------------------------------------------------------------

SEQ_LEN = 128
PEAK_LR, WARM_UP, DECAY = 5e-3, 100, 1000  # updates up to the peak; in so many it falls by a root of two
EVALUATIONS = 12
EVALUATED_BATCHES = 8


def train_for(seconds: float, setting: Setting, say: Callable[[str], None] = print) -> dict[str, Any]:
    """A row: pre-training on Python's documentation for so long, with the held-out loss over time.

    Everything counts for the seconds, tokenizing and evaluations included; only steps for tokens a second.
    """
    on_gpu = setting.device.type == "cuda"
    started = time.monotonic()
    store, tokenizer = python_docs_in_memory(documents=None if on_gpu else 30)
    size, tokens = ("small", 16_384) if on_gpu else ("tiny", 128)
    settings = LoaderSettings(seq_len=SEQ_LEN if on_gpu else 32, tokens_per_batch=tokens, seed=12345)
    order = np.random.default_rng(settings.seed).permutation(len(store))
    held_out, training = np.split(order, [max(2, len(order) // 20)])
    vocabulary = vocabulary_of(tokenizer)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig.named(size, vocab_size=tokenizer.get_vocab_size(), **dropout)
    torch.manual_seed(settings.seed)
    model = BertForPreTraining(config).to(setting.device)
    evaluated = evaluation_batches(
        WindowBuilder(store, held_out, vocabulary, replace(settings, seed=0)),
        EVALUATED_BATCHES if on_gpu else 1,
    )

    def share_of_time() -> float:
        return min(1.0, (time.monotonic() - started) / seconds)

    def rate(updates: int) -> float:  # of no total: how many steps there will be is not known
        return PEAK_LR * min(1.0, (updates + 1) / WARM_UP) / math.sqrt(1 + updates / DECAY)

    trainer = Trainer(
        model, Lamb(parameter_groups(model, 0.01), lr=PEAK_LR), rate, precision="bf16" if on_gpu else "fp32"
    )
    stream = iter(PackedLoader(WindowBuilder(store, training, vocabulary, settings)))
    curve: list[dict[str, float]] = []
    steps = seen = 0
    training_s, next_evaluation = 0.0, 0.0

    def evaluate() -> None:
        metrics = trainer.evaluate(evaluated)
        curve.append(
            {
                "s": round(training_s, 1),
                "step": steps,
                "tokens": seen,
                "mlm_loss": round(metrics["mlm_loss"], 4),
            }
        )
        loss = curve[-1]["mlm_loss"]
        say(f"  step {steps}, {training_s:.0f} s, {seen:,} tokens: held-out MLM loss {loss:.3f}")

    while not steps or share_of_time() < 1.0:
        if share_of_time() >= next_evaluation:
            evaluate()
            next_evaluation += 1 / EVALUATIONS
        begin = time.monotonic()
        batch = next(stream)
        trainer.train_step([batch], Totals())
        if on_gpu and steps % 16 == 0:
            torch.cuda.synchronize()  # or the clock is the host's, which is ahead
        steps, seen = steps + 1, seen + batch.num_tokens
        training_s += time.monotonic() - begin
    evaluate()
    return {
        "name": f"training[{size}, Python's documentation, {seconds:.0f} s]",
        "clock": "wall",
        "size": size,
        "loss_curve": curve,
        "tokens_per_s": {OURS: round(seen / training_s)},
        "unigram_entropy": round(store.unigram_entropy, 4),
        "ln_vocab": round(math.log(config.vocab_size), 4),
        "captured": trainer.graphed_step is not None,
    }
