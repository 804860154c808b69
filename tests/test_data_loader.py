"""The stream of packed batches: contents, static shapes, resume, ranks, workers."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fastbert.batch import IGNORE_INDEX, PackedBatch
from fastbert.data import loader as loader_module
from fastbert.data.loader import (
    LoaderSettings,
    PackedLoader,
    Shapes,
    Vocabulary,
    WindowBuilder,
    _batches_of_packs,
    batches_of,
    evaluation_batches,
    joined_states,
)
from fastbert.data.order import split_documents
from fastbert.errors import UserError
from tests.documents import ListStore, numbered_store, random_store

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = Vocabulary(cls=2, sep=3, mask=4, unk=1, ordinary=np.arange(10, 1000))


def builder(store: ListStore, **options: object) -> WindowBuilder:
    settings = LoaderSettings(**{"seq_len": 64, "tokens_per_batch": 512, "seed": 7, **options})  # type: ignore[arg-type]
    return WindowBuilder(store, np.arange(len(store)), VOCABULARY, settings)


def original_ids(batch: PackedBatch) -> torch.Tensor:
    ids = batch.input_ids.clone()
    asked = batch.masked_labels != IGNORE_INDEX
    ids[batch.masked_positions[asked]] = batch.masked_labels[asked]
    return ids


def sequences_of(batch: PackedBatch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """(original ids, segments, positions, label) of each sequence that is not filler."""
    ids, bounds = original_ids(batch), batch.cu_seqlens.tolist()
    return [
        (ids[a:b], batch.token_type_ids[a:b], batch.position_ids[a:b], int(batch.next_sentence_labels[i]))
        for i, (a, b) in enumerate(pairwise(bounds))
        if b > a and a < batch.num_tokens
    ]


def test_sequences_are_cls_a_sep_b_sep() -> None:
    store = numbered_store(200, sentences=6, tokens=7, first_id=10)  # an id tells its document: 42 ids each
    b = builder(store)
    labels = Counter()
    for batch in evaluation_batches(b, 100):
        for ids, segments, positions, label in sequences_of(batch):
            seps = (ids == 3).nonzero().flatten().tolist()
            assert ids[0] == 2
            assert len(seps) == 2
            assert seps[1] == len(ids) - 1
            assert segments.tolist() == [0] * (seps[0] + 1) + [1] * (len(ids) - seps[0] - 1)
            assert positions.tolist() == list(range(len(ids)))
            a, c = ids[1 : seps[0]], ids[seps[0] + 1 : -1]
            assert (a.diff() == 1).all()  # consecutive text
            assert (c.diff() == 1).all()
            same = (a[0] - 10) // 42 == (c[0] - 10) // 42
            assert same == (label == 0)
            labels[label] += 1
    assert labels.total() > 200


def test_shapes_are_static_and_the_rest_is_filler() -> None:
    b = builder(random_store(400, max_tokens=12), tokens_per_batch=500)
    shapes = b.shapes
    partial = 0
    for batch in evaluation_batches(b, 1000):
        assert batch.input_ids.shape == batch.token_type_ids.shape == batch.position_ids.shape == (500,)
        assert batch.cu_seqlens.shape == (shapes.num_sequences + 1,)
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.masked_positions.shape == batch.masked_labels.shape == (shapes.num_predictions,)
        assert batch.next_sentence_labels.shape == (shapes.num_sequences,)
        lengths = batch.cu_seqlens.diff()
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == 500
        assert (lengths >= 0).all()
        assert lengths.max() <= batch.max_seqlen == 64
        assert batch.position_ids.max() < 64
        # no loss reads filler
        asked = batch.masked_labels != IGNORE_INDEX
        assert (batch.masked_positions[asked] < batch.num_tokens).all()
        assert (batch.masked_positions[~asked] == 0).all()
        assert (batch.next_sentence_labels[batch.num_sequences() :] == IGNORE_INDEX).all()
        assert (batch.next_sentence_labels[: batch.num_sequences()] != IGNORE_INDEX).all()
        assert batch.input_ids[batch.num_tokens :].eq(0).all()
        partial += batch.num_tokens < 500 - 64
    assert partial >= 1  # a window's last batch


def test_masks_follow_the_rules() -> None:
    b = builder(random_store(800))
    asked = changed_to_mask = kept = total = 0
    for batch in evaluation_batches(b, 1000):
        live = batch.masked_labels != IGNORE_INDEX
        positions, labels = batch.masked_positions[live], batch.masked_labels[live]
        assert len(positions.unique()) == len(positions)
        assert (labels >= 10).all()  # specials are never asked
        untouched = torch.ones(512, dtype=torch.bool)
        untouched[positions] = False
        assert not (batch.input_ids[untouched] == 4).any()
        changed_to_mask += int((batch.input_ids[positions] == 4).sum())
        kept += int((batch.input_ids[positions] == labels).sum())
        asked, total = asked + len(positions), total + batch.num_tokens
    assert asked / total == pytest.approx(0.15, abs=0.005)
    assert changed_to_mask / asked == pytest.approx(0.8, abs=0.02)
    assert kept / asked == pytest.approx(0.1, abs=0.02)


def test_a_batch_is_closed_at_its_packs_or_its_sequences() -> None:
    shapes = Shapes(
        packs=3, pack_size=64, max_pack_sequences=12, max_sequences=8, num_sequences=10, num_predictions=9
    )
    assert _batches_of_packs(np.array([1, 2, 1, 4, 5, 1, 1, 1, 8, 1]), shapes).tolist() == [
        *(0, 0, 0),  # three packs
        1,  # 4 + 5 sequences would be nine
        *(2, 2, 2),
        3,  # 1 + 8 likewise
        4,
        5,
    ]


def test_fill_of_short_documents_and_of_mixed_ones() -> None:
    for store in (random_store(3000, max_sentences=2), random_store(600, max_sentences=40)):
        b = builder(store, seq_len=128, tokens_per_batch=1024)
        windows = [b[i] for i in range(b.num_windows)]
        tokens = sum(int(window["num_tokens"].sum()) for window in windows)
        slots = sum(window["input_ids"].numel() for window in windows)
        assert tokens / slots > 0.97


def test_unknown_tokens_are_never_asked() -> None:
    store = ListStore([[[1, 10, 1, 1, 11, 1, 1, 1]] * 4 for _ in range(20)])
    for batch in evaluation_batches(builder(store), 50):
        assert not (batch.masked_labels == 1).any()


def test_max_predictions_and_whole_words() -> None:
    rng = np.random.default_rng(0)
    documents = [[rng.integers(10, 1000, size=15).tolist() for _ in range(10)] for _ in range(100)]
    store = ListStore(documents, continuation=set(range(500, 1000)))
    b = builder(store, whole_word=True, max_predictions=5, mask_prob=0.3)
    for batch in evaluation_batches(b, 1000):
        live = batch.masked_labels != IGNORE_INDEX
        ids = original_ids(batch)
        asked = torch.zeros(512, dtype=torch.bool)
        asked[batch.masked_positions[live]] = True
        bounds = batch.cu_seqlens.tolist()
        for start, end in pairwise(bounds):
            assert asked[start:end].sum() <= 5
            for i in range(start + 1, end):
                if ids[i] >= 500 and ids[i - 1] >= 10:  # a continuation behind an ordinary token
                    assert asked[i] == asked[i - 1]


def test_without_nsp_there_is_one_segment_and_no_label() -> None:
    b = builder(random_store(100), nsp=False)
    for batch in evaluation_batches(b, 20):
        assert batch.token_type_ids.sum() == 0
        assert (batch.next_sentence_labels == IGNORE_INDEX).all()
        for ids, *_ in sequences_of(batch):
            assert (ids == 3).sum() == 1


def test_an_epoch_reads_every_document_once_and_the_next_one_differently() -> None:
    store = numbered_store(700, sentences=4, tokens=10, first_id=10)
    b = builder(store, nsp=False, tokens_per_batch=64)
    assert b.num_windows > 2

    def epoch_ids(epoch: int) -> list[int]:
        out: list[int] = []
        for window in range(epoch * b.num_windows, (epoch + 1) * b.num_windows):
            for batch in batches_of(b[window], 64):
                ids = original_ids(batch)[: batch.num_tokens]
                out += ids[ids >= 10].tolist()
        return out

    first, second = epoch_ids(0), epoch_ids(1)
    assert sorted(first) == sorted(second) == list(range(10, 10 + 700 * 40))
    assert first != second


def test_masks_are_new_in_each_epoch_and_equal_for_equal_seeds() -> None:
    store = random_store(40)
    one, same, other = builder(store), builder(store), builder(store, seed=8)
    assert one.num_windows == 1
    assert torch.equal(one[0]["input_ids"], same[0]["input_ids"])
    assert torch.equal(one[1]["masked_positions"], same[1]["masked_positions"])
    assert not torch.equal(one[0]["input_ids"], one[1]["input_ids"])
    assert not torch.equal(one[0]["input_ids"], other[0]["input_ids"])


def assert_same(one: PackedBatch, two: PackedBatch) -> None:
    for name in ("input_ids", "position_ids", "cu_seqlens", "masked_positions", "masked_labels"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert torch.equal(one.next_sentence_labels, two.next_sentence_labels)


# in the middle of a window, at its end, several epochs on
@pytest.mark.parametrize("consumed", [1, 17, 64, 150])
def test_resume_continues_the_stream(consumed: int) -> None:
    store = random_store(120)
    whole = list(islice(PackedLoader(builder(store)), consumed + 40))
    first = PackedLoader(builder(store))
    assert len(list(islice(first, consumed))) == consumed
    second = PackedLoader(builder(store))
    second.load_state_dict(first.state_dict())
    for resumed, expected in zip(islice(second, 40), whole[consumed:]):
        assert_same(resumed, expected)


def test_any_number_of_workers_gives_the_same_stream_and_resumes() -> None:
    store = random_store(120)
    reference = list(islice(PackedLoader(builder(store)), 60))
    with_workers = PackedLoader(builder(store), workers=2)
    for got, expected in zip(islice(with_workers, 30), reference):
        assert_same(got, expected)
    one_worker = PackedLoader(builder(store), workers=1)
    one_worker.load_state_dict(with_workers.state_dict())
    for got, expected in zip(islice(one_worker, 30), reference[30:]):
        assert_same(got, expected)


_KILLED_WHILE_A_WORKER_STARTS = """
import multiprocessing, os, time
from fastbert.data.loader import _init_worker

def worker(trainer):
    print(os.getpid(), flush=True)
    while os.getppid() == trainer:
        time.sleep(0.01)
    # torch would begin to watch its parent here, which is who adopted the worker by now
    _init_worker(0)
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=worker, args=(os.getpid(),)).start()
    time.sleep(600)
"""


def test_a_worker_whose_trainer_was_killed_while_it_started_ends(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(_KILLED_WHILE_A_WORKER_STARTS, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    trainer = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    worker = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    try:
        # the worker holds the pipe: its end is the pipe's
        assert select.select([trainer.stdout], [], [], 60)[0], "the worker goes on without a trainer"
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        trainer.stdout.close()


def test_a_killed_worker_is_said() -> None:
    batches = iter(PackedLoader(builder(random_store(40)), workers=1))
    next(batches)
    (worker,) = multiprocessing.active_children()
    worker.kill()
    with pytest.raises(UserError, match=r"that builds batches died \(.+\): .*--workers"):
        list(islice(batches, 1000))


@pytest.mark.parametrize("world_size", [2, 3, 7])  # 7: more than some windows have left
def test_ranks_are_dealt_the_stream_of_one_in_rounds(world_size: int) -> None:
    b = builder(random_store(150), tokens_per_batch=256)
    lengths = [len(b[window]["num_tokens"]) for window in range(3)]
    assert any(length % world_size for length in lengths)  # a round reaches into the next window
    rounds = sum(lengths) // world_size
    stream = list(islice(PackedLoader(b), rounds * world_size))
    for rank in range(world_size):
        dealt = islice(PackedLoader(b, rank=rank, world_size=world_size), rounds)
        for got, expected in zip(dealt, stream[rank::world_size], strict=True):
            assert_same(got, expected)


def test_another_number_of_ranks_goes_on_where_the_last_stopped() -> None:
    b = builder(random_store(40), tokens_per_batch=256)
    first_window = len(b[0]["num_tokens"])
    stream = iter(list(islice(PackedLoader(b), 30 + 3 * first_window)))
    state = PackedLoader(b).state_dict()
    # batches each takes; after 5 ranks the position lies beyond the window it names
    for world_size, rounds in ((2, 3), (1, 5), (5, first_window // 5 + 1), (3, 4), (1, 3)):
        expected = list(islice(stream, world_size * rounds))
        states = []
        for rank in range(world_size):
            loader = PackedLoader(b, rank=rank, world_size=world_size)
            loader.load_state_dict(state)
            for got, want in zip(islice(loader, rounds), expected[rank::world_size], strict=True):
                assert_same(got, want)
            states.append(loader.state_dict())
        state = json.loads(json.dumps(joined_states(states)))  # as a checkpoint keeps it


@pytest.fixture(scope="module")
def long_epoch() -> WindowBuilder:
    """An epoch of enough windows for eight lanes; of few batches each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "BATCHES_PER_WINDOW", 5)
        return builder(random_store(400), tokens_per_batch=128)


def test_lanes_take_turns(long_epoch: WindowBuilder) -> None:
    b = long_epoch
    assert b.num_lanes == 8 and b.num_windows >= 32
    assert len({len(b[window]["num_tokens"]) for window in range(16)}) > 1  # lanes drift apart
    lanes = [
        [batch for window in range(lane, 40, 8) for batch in batches_of(b[window], 64)] for lane in range(8)
    ]
    for number, batch in enumerate(islice(PackedLoader(b), 8 * 15)):
        assert_same(batch, lanes[number % 8][number // 8])


def test_an_epoch_of_few_windows_has_few_lanes() -> None:
    """Lanes of a short epoch would be in several epochs at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "BATCHES_PER_WINDOW", 5)
        found = {
            (b.num_windows, b.num_lanes)
            for count in range(10, 400, 15)
            for b in [builder(random_store(count), tokens_per_batch=128)]
        }
    assert {lanes for _, lanes in found} == {1, 2, 4, 8}
    for windows, lanes in found:
        assert lanes == 1 or windows >= 4 * lanes
        assert lanes == 8 or windows < 8 * lanes


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 12, 16])
def test_ranks_build_their_lanes_only(long_epoch: WindowBuilder, world_size: int) -> None:
    """And are dealt the stream of one; all together it is built max(1, ranks / 8) times."""
    rounds = 320 // world_size
    stream = list(islice(PackedLoader(long_epoch), rounds * world_size))
    built: list[int] = []

    class Recorded(WindowBuilder):
        def __init__(self) -> None:
            vars(self).update(vars(long_epoch))

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            built.append(index % 8)
            return long_epoch[index]

    for rank in range(world_size):
        built.clear()
        loader = PackedLoader(Recorded(), rank=rank, world_size=world_size)
        for got, expected in zip(islice(loader, rounds), stream[rank::world_size], strict=True):
            assert_same(got, expected)
        assert len(set(built)) == 8 // math.gcd(8, world_size)


def test_lanes_resume_with_any_number_of_ranks(long_epoch: WindowBuilder) -> None:
    stream = iter(list(islice(PackedLoader(long_epoch), 600)))
    state = PackedLoader(long_epoch).state_dict()
    for world_size, rounds in ((8, 7), (3, 5), (16, 9), (1, 37), (12, 4), (2, 30), (1, 50)):
        expected = list(islice(stream, world_size * rounds))
        states = []
        for rank in range(world_size):
            loader = PackedLoader(long_epoch, rank=rank, world_size=world_size)
            loader.load_state_dict(state)
            for got, want in zip(islice(loader, rounds), expected[rank::world_size], strict=True):
                assert_same(got, want)
            states.append(loader.state_dict())
        state = json.loads(json.dumps(joined_states(states)))
    workers = PackedLoader(long_epoch, workers=2)
    workers.load_state_dict(state)
    for got, want in zip(islice(workers, 40), islice(stream, 40), strict=True):
        assert_same(got, want)


def test_padded_holds_the_same_sequences() -> None:
    for batch in evaluation_batches(builder(random_store(80)), 30):
        padded = batch.padded()
        assert padded.num_sequences() == batch.num_sequences()
        assert int(padded.attention_mask.sum()) == batch.num_tokens == padded.num_tokens
        for row, (ids, segments, _, label) in enumerate(sequences_of(batch)):
            keep = padded.attention_mask[row]
            assert keep[: len(ids)].all()
            assert not keep[len(ids) :].any()
            assert torch.equal(padded.token_type_ids[row][keep], segments)
            assert padded.next_sentence_labels[row] == label
        flat = padded.input_ids.flatten()
        restored = flat.clone()
        restored[padded.masked_positions] = padded.masked_labels
        expected = torch.cat([ids for ids, *_ in sequences_of(batch)])
        assert torch.equal(restored[padded.attention_mask.flatten()], expected)
        live = batch.masked_labels != IGNORE_INDEX
        assert torch.equal(flat[padded.masked_positions], batch.input_ids[batch.masked_positions[live]])


def test_padded_drops_a_batch_of_nothing_but_filler() -> None:
    batch = evaluation_batches(builder(random_store(20)), 1)[0]
    empty = PackedBatch(
        input_ids=batch.input_ids * 0,
        token_type_ids=batch.token_type_ids * 0,
        position_ids=batch.position_ids,
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=64,
        masked_positions=batch.masked_positions * 0,
        masked_labels=torch.full_like(batch.masked_labels, IGNORE_INDEX),
        next_sentence_labels=torch.full_like(batch.next_sentence_labels, IGNORE_INDEX),
        num_tokens=0,
    )
    assert empty.padded().input_ids.shape == (0, 0)


def test_a_document_larger_than_a_window_leaves_no_hole() -> None:
    giant = [list(range(10, 60))] * 2000
    store = ListStore([giant, [[11, 12, 13]], [[14, 15]], [[16, 17, 18, 19]]])
    b = builder(store, nsp=False, tokens_per_batch=64)
    assert b.num_windows > 10
    total = sum(int(b[w]["num_tokens"].sum()) for w in range(b.num_windows))
    # two sentences of 50 tokens make a chunk, which is cut to 62
    assert total > 60_000


def test_nsp_needs_two_documents() -> None:
    with pytest.raises(ValueError, match="two documents, got 1"):
        builder(random_store(1))


def test_split_holds_out_a_twentieth_and_never_overlaps() -> None:
    training, held_out = split_documents(1000, seed=1)
    assert len(held_out) == 50
    assert sorted([*training, *held_out]) == list(range(1000))
    assert split_documents(9, seed=1)[1].size == 0
    assert split_documents(10, seed=1)[1].size == 2
    again = split_documents(1000, seed=1)
    np.testing.assert_array_equal(held_out, again[1])
