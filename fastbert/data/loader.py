"""An endless, shuffled, sharded and resumable stream of PackedBatch.

    epoch: a permutation of the documents
      -> windows: runs of documents of equal token count, each built on its own
        -> instances -> packs -> masks -> batches of one window
      -> lanes: windows that are read side by side, one batch of each in turn

A window depends only on (settings, seed, epoch, window), never on who builds it. So any number of worker
processes gives the same stream, and a position in the stream is a few integers.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fastbert.batch import IGNORE_INDEX, PackedBatch
from fastbert.data.instances import Documents, InstancePlan, plan_instances
from fastbert.data.masking import choose_targets, num_to_predict, replace_targets
from fastbert.data.order import ShardedDocuments, document_order
from fastbert.data.packing import pack_sequences
from fastbert.errors import UserError

BATCHES_PER_WINDOW = 128  # a window's last batch is half empty on average: 1/256 of the slots
MAX_LANES = 8  # a process that takes the whole stream holds as many windows
MIN_LANE_WINDOWS = 4  # of an epoch: in a shorter one, lanes would be in several epochs at once
MIN_PACK_LIMIT = 12  # sequences a pack may hold: fills 99.8 % of Wikipedia at 512 (arXiv 2107.02027)


class Store(Documents, Protocol):
    @property
    def document_lengths(self) -> np.ndarray: ...


@dataclass(frozen=True)
class LoaderSettings:
    """What defines the stream (and so must be equal for an exact resume)."""

    seq_len: int
    tokens_per_batch: int
    seed: int
    mask_prob: float = 0.15
    max_predictions: int | None = None  # per sequence; None = as many as mask_prob says
    whole_word: bool = False
    nsp: bool = True


@dataclass(frozen=True)
class Vocabulary:
    """The token ids that instances and masks need."""

    cls: int
    sep: int
    mask: int
    unk: int
    ordinary: np.ndarray  # [..] int64, ids that a random replacement may take


@dataclass(frozen=True)
class Shapes:
    """Static sizes of every batch, worked out once from the settings and the mean sequence length."""

    packs: int  # in a batch, at most
    pack_size: int  # tokens a pack holds
    max_pack_sequences: int
    max_sequences: int  # in a batch, without filler
    num_sequences: int  # B
    num_predictions: int  # P

    @classmethod
    def of(cls, settings: LoaderSettings, mean_length: float) -> Shapes:
        # packs of about one sequence length, so that a batch is a random mixture of long and short: one pack
        # of the whole budget would sort them into batches of only long and batches of only short sequences
        packs = settings.tokens_per_batch // settings.seq_len
        pack_size = settings.tokens_per_batch // packs
        per_pack = max(MIN_PACK_LIMIT, int(np.ceil(4 * pack_size / mean_length)))
        # room for more than the average, so that next to no batch reaches it and is closed early
        average = settings.tokens_per_batch / mean_length
        real = max(per_pack, int(np.ceil(1.25 * average + 6 * np.sqrt(average))))
        filler = -(-settings.tokens_per_batch // settings.seq_len)
        # a sequence's share is rounded, and at least 1: never more than half or one above the exact share
        rounding = 0.5 if settings.mask_prob * 5 >= 0.5 else 1.0
        predictions = int(settings.tokens_per_batch * settings.mask_prob + rounding * real)
        if settings.max_predictions is not None:
            predictions = min(predictions, real * settings.max_predictions)
        return cls(packs, pack_size, per_pack, real, real + filler, predictions)


class WindowBuilder(Dataset):
    """Item g is window g of the endless stream: a dict of tensors, first axis = batch.

    Keys and row shapes: input_ids, token_type_ids, position_ids [T]; cu_seqlens [B+1]; masked_positions,
    masked_labels [P]; next_sentence_labels [B]; num_tokens []. In small types, since windows travel through
    shared memory, of which containers often have little. With masks=False no token is masked and all
    predictions are unused slots; sequences and batches are the same.
    """

    def __init__(
        self,
        store: Store,
        documents: np.ndarray | ShardedDocuments,
        vocabulary: Vocabulary,
        settings: LoaderSettings,
        masks: bool = True,
    ) -> None:
        if settings.nsp and len(documents) < 2:
            raise ValueError(f"next-sentence prediction needs two documents, got {len(documents)}")
        self.store, self.vocabulary, self.settings = store, vocabulary, settings
        self.masks = masks
        self.order = document_order(store, documents, settings.seed)
        tokens = self.order.num_tokens
        self.num_windows = max(1, round(tokens / (BATCHES_PER_WINDOW * settings.tokens_per_batch)))
        self.num_lanes = 1
        while self.num_lanes < MAX_LANES and self.num_windows >= 2 * self.num_lanes * MIN_LANE_WINDOWS:
            self.num_lanes *= 2
        self.shapes = Shapes.of(settings, self._mean_length())

    def _mean_length(self) -> float:
        """Mean sequence length of some documents."""
        rng = np.random.default_rng([self.settings.seed, 0])
        lengths = self._plan(*self.order.sample(rng), rng).lengths
        if not len(lengths):
            raise UserError("no document can be read: every shard that was tried is damaged or missing")
        return float(lengths.mean())

    def _plan(self, documents: np.ndarray, others: np.ndarray, rng: np.random.Generator) -> InstancePlan:
        s = self.settings
        return plan_instances(self.store, documents, seq_len=s.seq_len, nsp=s.nsp, others=others, rng=rng)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        epoch, window = divmod(int(index), self.num_windows)
        documents, others = self.order.window(epoch, window, self.num_windows)
        rng = np.random.default_rng([self.settings.seed, 2, epoch, window])
        plan = self._plan(documents, others, rng)
        order, pack_starts = pack_sequences(
            plan.lengths, self.shapes.pack_size, self.shapes.max_pack_sequences, rng
        )
        row = np.repeat(_batches_of_packs(np.diff(pack_starts), self.shapes), np.diff(pack_starts))
        # longest first inside a batch: sequences of equal length lie side by side, and attention takes a run
        # of them at once
        order = order[np.lexsort((-plan.lengths[order], row))]
        arrays = _build(
            self.store, plan, order, row, self.vocabulary, self.settings, self.shapes, rng, self.masks
        )
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _batches_of_packs(pack_sequences: np.ndarray, shapes: Shapes) -> np.ndarray:
    """Which batch each pack goes to, in order: full at `packs` packs or `max_sequences` sequences."""
    batch_of, batch, packs, sequences = [], 0, 0, 0
    for count in pack_sequences.tolist():
        if packs == shapes.packs or sequences + count > shapes.max_sequences:
            batch, packs, sequences = batch + 1, 0, 0
        batch_of.append(batch)
        packs, sequences = packs + 1, sequences + count
    return np.array(batch_of, dtype=np.int64)


def _gather_spans(
    store: Documents, plan: InstancePlan, order: np.ndarray, column: int, head: np.ndarray
) -> np.ndarray:
    """The A and B spans of the instances in `order`, end to end, with `head` [N, 2] free slots before each.

    `column` 0 takes input ids, 1 word starts. Free slots hold 0.
    """
    parts: list[np.ndarray] = []
    gap = [np.zeros(n, dtype=np.int64) for n in range(int(head.max(initial=0)) + 1)]
    for at, i in enumerate(order):
        a = store.document(int(plan.doc_a[i]))[column]
        b = store.document(int(plan.doc_b[i]))[column]
        parts.append(gap[head[at, 0]])
        parts.append(a[plan.start_a[i] : plan.start_a[i] + plan.len_a[i]])
        parts.append(gap[head[at, 1]])
        parts.append(b[plan.start_b[i] : plan.start_b[i] + plan.len_b[i]])
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _build(
    store: Documents,
    plan: InstancePlan,
    order: np.ndarray,
    row: np.ndarray,
    vocabulary: Vocabulary,
    settings: LoaderSettings,
    shapes: Shapes,
    rng: np.random.Generator,
    masks: bool,
) -> dict[str, np.ndarray]:
    """Tokens, masks and labels of a window: the i-th sequence is instance order[i], in batch row[i]."""
    tokens_per_batch, num_rows = settings.tokens_per_batch, int(row.max(initial=-1)) + 1
    len_a, len_b, lengths = plan.len_a[order], plan.len_b[order], plan.lengths[order]
    num_sequences = len(order)
    ends = np.cumsum(lengths)
    starts = ends - lengths

    # [CLS] A [SEP] B [SEP], all sequences end to end: each span behind its special tokens, the last [SEP] of
    # a sequence as a free slot before the [CLS] of the next
    pair = (len_b > 0).astype(np.int64)
    head = np.stack([np.full(num_sequences, 2), pair], axis=1)
    head[:1, 0] = 1
    ids = np.append(_gather_spans(store, plan, order, 0, head), 0).astype(np.int64)[: int(lengths.sum())]
    sep_a = starts + 1 + len_a
    ids[starts], ids[sep_a], ids[ends - 1] = vocabulary.cls, vocabulary.sep, vocabulary.sep

    sequence = np.repeat(np.arange(num_sequences), lengths)
    position = np.arange(len(ids)) - starts[sequence]
    segment = (position > (len_a + 1)[sequence]).astype(np.int64)

    candidate = ids != vocabulary.unk
    candidate[starts] = candidate[sep_a] = candidate[ends - 1] = False
    word_start = None
    if settings.whole_word and masks:
        word_start = np.append(_gather_spans(store, plan, order, 1, head), 0)[: len(ids)].astype(bool)
        word_start[starts + 1] = word_start[np.minimum(sep_a + 1, len(ids) - 1)] = True
    wanted = num_to_predict(lengths, settings.mask_prob, settings.max_predictions)
    # drawn last: the rest of a window is the same without masks
    targets = np.zeros(0, dtype=np.int64)
    if masks:
        targets = choose_targets(sequence, candidate, wanted, rng, word_start)
    labels = ids[targets]
    ids[targets] = replace_targets(ids, targets, vocabulary.mask, vocabulary.ordinary, rng)

    # where each sequence, token and target goes: row = batch, column = place in it
    row_tokens = np.bincount(row, weights=lengths, minlength=num_rows).astype(np.int64)
    column = starts - (np.cumsum(row_tokens) - row_tokens)[row]
    place = row[sequence] * tokens_per_batch + column[sequence] + position

    def spread(values: np.ndarray) -> np.ndarray:
        out = np.zeros(num_rows * tokens_per_batch, dtype=np.int64)
        out[place] = values
        return out.reshape(num_rows, tokens_per_batch)

    # filler: pieces of at most seq_len tokens of id 0 behind the last sequence, then sequences of length zero
    slot = np.arange(num_sequences) - np.searchsorted(row, row, side="left")
    row_sequences = np.bincount(row, minlength=num_rows)
    filler_index = np.arange(shapes.num_sequences + 1) - row_sequences[:, None]
    cu_seqlens = np.minimum(
        row_tokens[:, None] + np.maximum(filler_index, 0) * settings.seq_len, tokens_per_batch
    )
    cu_seqlens[:, 0] = 0
    cu_seqlens[row, slot + 1] = column + lengths
    place_in_row = np.arange(tokens_per_batch)
    position_ids = np.maximum(place_in_row - row_tokens[:, None], 0) % settings.seq_len
    position_ids.reshape(-1)[place] = position

    next_sentence_labels = np.full((num_rows, shapes.num_sequences), IGNORE_INDEX, dtype=np.int64)
    if settings.nsp:
        next_sentence_labels[row, slot] = plan.is_random[order]

    masked_positions = np.zeros((num_rows, shapes.num_predictions), dtype=np.int64)
    masked_labels = np.full((num_rows, shapes.num_predictions), IGNORE_INDEX, dtype=np.int64)
    target_row = row[sequence[targets]]
    target_slot = np.arange(len(targets)) - np.searchsorted(target_row, target_row, side="left")
    masked_positions[target_row, target_slot] = place[targets] - target_row * tokens_per_batch
    masked_labels[target_row, target_slot] = labels
    return {
        "input_ids": spread(ids).astype(np.int32),
        "token_type_ids": spread(segment).astype(np.uint8),
        "position_ids": position_ids.astype(np.int16),
        "cu_seqlens": cu_seqlens.astype(np.int32),
        "masked_positions": masked_positions.astype(np.int32),
        "masked_labels": masked_labels.astype(np.int32),
        "next_sentence_labels": next_sentence_labels.astype(np.int8),
        "num_tokens": row_tokens,
    }


def batch_of(window: dict[str, torch.Tensor], row: int, max_seqlen: int) -> PackedBatch:
    """The row-th PackedBatch of a window."""
    fields = {name: values[row].long() for name, values in window.items()}
    cu_seqlens, num_tokens = fields.pop("cu_seqlens").int(), int(fields.pop("num_tokens"))
    return PackedBatch(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, num_tokens=num_tokens, **fields)


def batches_of(window: dict[str, torch.Tensor], max_seqlen: int) -> Iterator[PackedBatch]:
    """The PackedBatches of a window."""
    for row in range(len(window["num_tokens"])):
        yield batch_of(window, row, max_seqlen)


def _init_worker(_: int) -> None:
    # Ctrl-C, `timeout` and job managers signal the whole process group; the trainer finishes its step and
    # then tells its workers to end, and a worker whose trainer is gone ends by itself
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_trainer, daemon=True).start()


def _end_with_the_trainer() -> None:
    # torch's own watch compares parent ids, and takes the first one when the worker has started: where the
    # trainer was killed before that, it is the id of who adopted the worker
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()  # waits for a pipe that closes with the trainer, however it ends
    os._exit(1)


def _of_living_workers(windows: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """The windows; UserError where a worker was killed. What one raises comes with its traceback already."""
    iterator: Any = iter(windows)
    try:
        yield from iterator
    except (RuntimeError, ConnectionError, EOFError) as error:
        # the last two where it died before this process had what it sent
        if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else "it closed the connection"
        raise UserError(
            f"a process that builds batches died ({reason}): if memory ran out, lower --workers; the same "
            "command continues from the last checkpoint"
        ) from error
    finally:
        # torch ends them when it frees the iterator, which what a worker raised keeps alive: the program
        # would wait for workers that nobody has told to end, and that ignore its SIGTERM
        if windows.num_workers:
            iterator._shutdown_workers()


class PackedLoader:
    """Iterates over PackedBatch without end; `state_dict` resumes it exactly, with any number of workers.

    Batch b of the stream is the next one of lane b modulo `builder.num_lanes`; lane l reads the windows l,
    l + num_lanes and so on. Batches are dealt out to the ranks in rounds, one each. So N ranks that take k
    batches a step see, step by step, what one rank sees that takes N * k, and another number of ranks may go
    on from a position. A rank builds the windows of those lanes only that it takes batches of: one of eight
    lanes where the ranks are a multiple of eight.

    Args:
        builder: makes the windows.
        workers: processes that build ahead; 0 builds in this one. UserError where one is killed.
        rank, world_size: this rank takes batch number `rank` of every `world_size`.
    """

    def __init__(
        self,
        builder: WindowBuilder,
        *,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.builder, self.workers = builder, workers
        self.rank, self.world_size = rank, world_size
        # batches of the stream before the next round; of each lane the window that it is in, and the number
        # of the lane's batches before that
        self._batches = 0
        self._lanes = {lane: (lane, 0) for lane in range(builder.num_lanes)}

    def __iter__(self) -> Generator[PackedBatch, None, None]:
        # spawned, not forked: a fork of a process with running threads may deadlock
        windows = DataLoader(
            self.builder,
            sampler=self._windows(),
            batch_size=None,
            num_workers=self.workers,
            multiprocessing_context="spawn" if self.workers else None,
            worker_init_fn=_init_worker,
            generator=torch.Generator(),  # its own: torch's would lose a number to each start of the loader
            prefetch_factor=1 if self.workers else None,  # one window ahead is minutes of training
        )
        built = zip(self._windows(), _of_living_workers(windows))
        here: dict[int, dict[str, torch.Tensor]] = {}
        for number in itertools.count(self._batches + self.rank, self.world_size):
            at, lane = divmod(number, len(self._lanes))
            while True:
                window, before = self._lanes[lane]
                while window not in here:
                    new, tensors = next(built)
                    # what workers send lies in shared memory, which is given back
                    here[new] = {k: v.clone() for k, v in tensors.items()} if self.workers else tensors
                num_batches = len(here[window]["num_tokens"])
                if at - before < num_batches:
                    break
                self._lanes[lane] = (window + len(self._lanes), before + num_batches)
                del here[window]
            # the state names the round after this one before the batch is handed out
            self._batches = number - self.rank + self.world_size
            yield batch_of(here[window], at - before, self.builder.settings.seq_len)

    @property
    def _mine(self) -> list[int]:
        """The lanes of which this rank takes batches."""
        first, num_lanes = self._batches + self.rank, len(self._lanes)
        return sorted({(first + turn * self.world_size) % num_lanes for turn in range(num_lanes)})

    def _windows(self) -> Iterator[int]:
        """The windows of this rank's lanes, from where they are."""
        first = {lane: self._lanes[lane][0] for lane in self._mine}
        for window in itertools.count(min(first.values())):
            lane = window % len(self._lanes)
            if lane in first and window >= first[lane]:
                yield window

    @property
    def epoch(self) -> int:
        """Passes over the documents that are finished in all lanes of this rank."""
        return min(self._lanes[lane][0] for lane in self._mine) // self.builder.num_windows

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is; `joined_states` makes one of those of all ranks."""
        return {
            "batches": self._batches,
            "lanes": {str(lane): list(self._lanes[lane]) for lane in self._mine},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the joined state of any number of ranks."""
        self._batches = int(state["batches"])
        self._lanes = {lane: tuple(state["lanes"][str(lane)]) for lane in self._lanes}


def joined_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of all ranks after the same round -> that of the stream."""
    lanes: dict[str, list[int]] = {}
    for state in states:
        for lane, (window, before) in state["lanes"].items():
            # of ranks that share a lane, one may be in the next window already
            lanes[lane] = min(lanes.get(lane, [window, before]), [window, before])
    return {"batches": states[0]["batches"], "lanes": lanes}


def evaluation_batches(builder: WindowBuilder, max_batches: int) -> list[PackedBatch]:
    """The first batches of one pass, always the same ones with the same masks."""
    batches: list[PackedBatch] = []
    for window in range(builder.num_windows):
        batches += batches_of(builder[window], builder.settings.seq_len)
        if len(batches) >= max_batches:
            break
    return batches[:max_batches]
