"""Whole models as tasks, on any device: a training step, and encoding, on batches of given lengths.

Tokens are real ones, and the FLOPs of MFU are the model's on these (`fastbert.train.flops`): a pad is
nobody's gain. Our side gets, in training, the packed batch that the loader makes, and in inference the padded
batch with its mask that a caller of transformers has.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.machine import dtype_of
from benchmarks.peers import Compiler, ModelPeer, PaddedArguments, model_peers
from benchmarks.reference import ReferenceBert
from benchmarks.task import OURS, Call, Roof, Task, is_the_basis, near
from benchmarks.workloads import padded_arguments
from fastbert.batch import IGNORE_INDEX, PackedBatch
from fastbert.config import BertConfig
from fastbert.inference import use_cuda_graphs
from fastbert.modeling import BertForPreTraining, BertModel
from fastbert.optim import AdamW, Lamb, parameter_groups
from fastbert.train.flops import training_flops
from fastbert.train.trainer import Totals, Trainer

LR = 1e-4
# of losses and hidden states by other ways of computing them, relative
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
STATES_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
# batches that are sorted by length give each their own mean loss
SORTED_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Run:
    """What all sides of a row share."""

    config: BertConfig
    device: torch.device
    roof: Roof
    compiler: Compiler
    sorted_rows: int  # rows of a batch that is sorted by length
    forms: str = "all"  # of transformers, see `model_peers`; with "all" every other peer, too


def step_flop(config: BertConfig, batch: PackedBatch) -> float:
    """Model FLOPs of forward and backward on the batch's real tokens, its vocabulary on the asked rows."""
    lengths = batch.cu_seqlens[: batch.num_sequences() + 1].diff().double()
    asked = int((batch.masked_labels != IGNORE_INDEX).sum())
    return training_flops(config, batch.num_tokens, int((lengths**2).sum()), asked)


def notes(batch: PackedBatch, slots: int) -> dict[str, Any]:
    return {
        "tokens": batch.num_tokens,
        "sequences": batch.num_sequences(),
        "packed_slots": batch.num_slots,
        "padded_slots": slots,
    }


# ---- training ---------------------------------------------------------------------------------------------


def training_task(batch: PackedBatch, run: Run) -> Task:
    """Forward, backward, clipping and update. `batch` is on the CPU; on a GPU everything runs in bf16.

    A side is timed if its loss on the same weights, without dropout, is that of the textbook.
    """
    device, dtype = run.device, dtype_of(run.device)
    padded = batch.padded()
    arguments = {name: t.to(device) for name, t in padded_arguments(padded).items()}
    task = Task(
        batch.num_tokens,
        "token",
        clock="step",
        flop=step_flop(run.config, batch),
        roof=run.roof,
        is_model=True,
        notes=notes(batch, padded.num_slots),
    )
    model = BertForPreTraining(run.config).to(device)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    reference = ReferenceBert(run.config).to(device)
    reference.load_state_dict(state)
    textbook = PaddedSteps(reference, [arguments], device, dtype)
    loss = textbook.loss()  # before any step
    right, about_right = near(loss, LOSS_TOLERANCE[dtype]), near(loss, SORTED_TOLERANCE)
    steps = PackedSteps(model, batch, device)
    task.admit(OURS, lambda: steps.step, right, lambda: steps.loss)
    task.admit("reference", lambda: textbook.step, right, lambda: textbook.loss)
    kind = "BertForPreTraining"
    others = list(
        model_peers(kind, run.config, state, arguments, device, sorted_rows=run.sorted_rows, forms=run.forms)
    )
    if run.forms == "all":
        others.append(
            ModelPeer(
                "flash-attn BERT",
                lambda: peers.flash_attn_bert(run.config, state).to(device, dtype),
                [peers.flash_attn_arguments(arguments)],
            )
        )
    for peer in others:
        check = right if len(peer.batches) == 1 else about_right
        make = _Once(functools.partial(_training_peer, peer, run, dtype))
        task.admit(peer.name, lambda make=make: make().step, check, lambda make=make: make().loss)
    return task


class _Once:
    """A model is made for the check, and timed if it passed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made = make, None

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made


def _training_peer(peer: ModelPeer, run: Run, dtype: torch.dtype) -> PaddedSteps:
    steps = PaddedSteps(peer.make(), peer.batches, run.device, dtype)
    if peer.compiled:

        def warm_up(compiled: Any) -> None:
            steps.run_model = compiled
            steps.backward()
            steps.model.zero_grad()

        run.compiler(peer.name, steps.model, warm_up)
    return steps


class PackedSteps:
    """fastbert's trainer, on the batch that its loader would bring."""

    def __init__(self, model: BertForPreTraining, batch: PackedBatch, device: torch.device) -> None:
        # the optimizer of the command on that device
        optimizer_class = Lamb if device.type == "cuda" else AdamW
        optimizer = optimizer_class(parameter_groups(model, 0.01), lr=LR)
        precision = "bf16" if device.type == "cuda" else "fp32"
        self.trainer = Trainer(model, optimizer, lambda updates: LR, precision=precision)
        self.batch, self.totals = batch, Totals()

    def loss(self) -> float:
        """Of the weights as they are, without dropout."""
        return self.trainer.evaluate([self.batch])["loss"]

    def step(self) -> None:
        self.trainer.train_step([self.batch], self.totals)


class PaddedSteps:
    """A plain loop: autocast on a GPU, torch's fused AdamW, gradients of all batches in one update."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[PaddedArguments],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.run_model, self.batches = model, model, batches
        # of the tokens that are asked, so that the sum of all batches' means is about the mean of all
        asked = torch.tensor([int((b["labels"] > 0).sum()) for b in batches], dtype=torch.float64)
        self.shares = (asked / asked.sum()).tolist()
        groups = parameter_groups(model, 0.01)
        self.optimizer = torch.optim.AdamW(groups, lr=LR, eps=1e-6, fused=True)
        is_16_bit = next(model.parameters()).dtype != torch.float32
        self.precision = functools.partial(
            peers.precision, device, None if is_16_bit or dtype == torch.float32 else dtype
        )

    def _loss_of(self, arguments: PaddedArguments) -> Tensor:
        with self.precision():
            out: Any = self.run_model(**arguments)
        loss: Tensor = out if isinstance(out, Tensor) else out.loss
        return loss

    @torch.no_grad()
    def loss(self) -> float:
        """Of the weights as they are, without dropout."""
        self.model.eval()
        return sum(s * self._loss_of(b).item() for s, b in zip(self.shares, self.batches))

    def backward(self) -> None:
        self.model.train()
        for share, arguments in zip(self.shares, self.batches):
            (share * self._loss_of(arguments)).backward()

    def step(self) -> None:
        self.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


# ---- encoding ---------------------------------------------------------------------------------------------


def encoding_task(batch: PackedBatch, run: Run) -> Task:
    """Last hidden states of a padded batch, as a user of transformers.BertModel has it. `batch`: on the CPU.

    On a GPU in bf16. A side is timed if its states of the real tokens are those of the textbook.
    """
    device, dtype = run.device, dtype_of(run.device)
    padded = batch.padded()
    names = ("input_ids", "attention_mask", "token_type_ids")
    arguments = {name: getattr(padded, name).to(device) for name in names}
    flop = training_flops(run.config, batch.num_tokens, int((_lengths(arguments) ** 2).sum()), 0) / 3
    task = Task(
        batch.num_tokens,
        "token",
        clock="step",
        flop=flop,
        roof=run.roof,
        is_model=True,
        notes=notes(batch, padded.num_slots),
    )
    ours = BertModel(run.config, add_pooling_layer=False).to(device, dtype).eval()
    state = {name: t.clone() for name, t in ours.state_dict().items()}
    reference = ReferenceBert(run.config).bert.to(device, dtype).eval()
    reference.load_state_dict(state, strict=False)  # it has a pooler

    def textbook() -> list[Tensor]:
        return [reference(**arguments)]

    encode = torch.inference_mode()
    right = near(_rows(encode(textbook)(), [arguments]), STATES_TOLERANCE[dtype])

    def admit_ours(name: str, model: BertModel) -> None:
        states = encode(lambda: [model(**arguments).last_hidden_state])
        task.admit(name, lambda: states, _of(right, [arguments]))

    if device.type == "cuda":
        # launched one by one, a small batch waits for its launches
        admit_ours(f"{OURS}, without graphs", copy.deepcopy(ours))
        use_cuda_graphs(ours)
    admit_ours(OURS, ours)
    task.admit("reference", lambda: encode(textbook), is_the_basis)
    others = list(
        model_peers(
            "BertModel",
            run.config,
            state,
            arguments,
            device,
            dtype,
            sorted_rows=run.sorted_rows,
            forms=run.forms,
            add_pooling_layer=False,
        )
    )
    if run.forms == "all":
        others.append(
            ModelPeer(
                "flash-attn BERT",
                lambda: peers.flash_attn_encoder(run.config, state).to(device, dtype),
                [arguments],
            )
        )
    for peer in others:
        sides = functools.partial(_encoding_peer, peer, run)
        task.admit(peer.name, lambda sides=sides: encode(sides()), _of(right, peer.batches))
    return task


def _encoding_peer(peer: ModelPeer, run: Run) -> Call:
    model = peer.make().eval()

    def states_of(model: Any) -> list[Tensor]:
        return [model(**arguments).last_hidden_state for arguments in peer.batches]

    if peer.compiled:
        model = run.compiler(peer.name, model, torch.inference_mode()(states_of))
    return lambda: states_of(model)


def _lengths(arguments: PaddedArguments) -> Tensor:
    return arguments["attention_mask"].sum(dim=1)


def _of(check: Callable[[Any], str], batches: Sequence[PaddedArguments]) -> Callable[[Any], str]:
    return lambda states: check(_rows(states, batches))


def _rows(states: Sequence[Tensor], batches: Sequence[PaddedArguments]) -> Tensor:
    """Hidden states [tokens, H] of batches that may be sorted, ordered by what tells a text: its ids."""
    texts = []
    for hidden, arguments in zip(states, batches):
        for row, ids, keep in zip(hidden, arguments["input_ids"], arguments["attention_mask"].bool()):
            texts.append((ids[keep].tolist(), row[keep]))
    return torch.cat([row for _, row in sorted(texts, key=lambda text: text[0])])
