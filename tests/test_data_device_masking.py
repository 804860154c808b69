"""Masks made on the device: counted against the loader's, equal after a resume, without a look at values."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fastbert import BertConfig, BertForPreTraining, Lamb, PackedBatch
from fastbert.batch import IGNORE_INDEX
from fastbert.data.device_masking import DeviceMasking, mask_tokens
from fastbert.data.loader import LoaderSettings, PackedLoader, Vocabulary, WindowBuilder
from fastbert.data.masking import num_to_predict
from fastbert.optim import parameter_groups
from fastbert.train.step import MICRO_BATCHES
from fastbert.train.trainer import Totals, Trainer
from tests.documents import random_store

CPU = torch.device("cpu")
# ids from 12 on are ordinary; 10 and 11 stand for unused pieces, which may be asked but are never drawn
VOCABULARY = Vocabulary(cls=2, sep=3, mask=4, unk=1, ordinary=np.arange(12, 100))


def make_batches(
    num: int, masks: bool, settings: LoaderSettings, unknown: bool = True
) -> tuple[list[PackedBatch], DeviceMasking]:
    store = random_store(200, vocab_size=100, seed=1)
    if unknown:
        for ids, _, _ in store._documents:
            ids[:: len(ids) // 2 + 1] = VOCABULARY.unk
    builder = WindowBuilder(store, np.arange(200), VOCABULARY, settings, masks)
    masking = DeviceMasking.of(settings, VOCABULARY, builder.shapes.num_predictions, CPU)
    return list(islice(PackedLoader(builder), num)), masking


def settings(**changed: Any) -> LoaderSettings:
    return LoaderSettings(**{"seq_len": 64, "tokens_per_batch": 512, "seed": 5, **changed})


def owners(batch: PackedBatch) -> Tensor:
    """The sequence of each target."""
    at = batch.masked_positions[batch.masked_labels != IGNORE_INDEX]
    return torch.searchsorted(batch.cu_seqlens[1:], at.int(), right=True)


def test_without_masks_the_loader_sends_the_same_text() -> None:
    masked, _ = make_batches(5, True, settings())
    plain, masking = make_batches(5, False, settings())
    for one, other in zip(masked, plain, strict=True):
        for field in fields(one):
            if field.name not in ("input_ids", "masked_positions", "masked_labels"):
                a, b = getattr(one, field.name), getattr(other, field.name)
                assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, field.name
        restored = one.input_ids.clone()
        asked = one.masked_labels != IGNORE_INDEX
        restored[one.masked_positions[asked]] = one.masked_labels[asked]
        assert torch.equal(restored, other.input_ids)
        assert other.masked_labels.eq(IGNORE_INDEX).all() and not other.masked_positions.any()
        assert other.masked_labels.shape == (masking.num_predictions,) == one.masked_labels.shape


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("max_predictions", [None, 3])
def test_each_sequence_is_asked_as_often_as_by_the_loader(max_predictions: int | None, packed: bool) -> None:
    chosen = settings(max_predictions=max_predictions)
    by_loader, _ = make_batches(8, True, chosen)
    plain, masking = make_batches(8, False, chosen)
    for number, (one, batch) in enumerate(zip(by_loader, plain, strict=True)):
        rows = batch if packed else batch.padded()
        masked = masking(rows, number)
        assert type(masked) is type(rows) and masked.input_ids.shape == rows.input_ids.shape
        at, labels = masked.masked_positions, masked.masked_labels
        assert at.shape == labels.shape == (masking.num_predictions,)
        used = labels != IGNORE_INDEX
        assert not at[~used].any() and (at[used].diff() > 0).all()
        # labels are what stood there, nothing else has changed, and only ordinary text is asked
        flat = rows.input_ids.flatten()
        assert torch.equal(flat[at[used]], labels[used])
        others = torch.ones_like(flat, dtype=torch.bool)
        others[at[used]] = False
        assert torch.equal(masked.input_ids.flatten()[others], flat[others])
        assert not torch.isin(labels[used], torch.tensor([0, 1, 2, 3, 4])).any()
        if packed:
            assert torch.equal(owners(masked), owners(one))
        else:
            owner = at[used] // rows.input_ids.shape[1]
            assert torch.equal(owner.bincount(), owners(one).bincount())
        seqlens = np.diff(batch.cu_seqlens.numpy())[: batch.num_sequences()]
        assert masking.num_asked(seqlens) == num_to_predict(seqlens, 0.15, max_predictions).sum()
        # next to no sequence has fewer words than are wanted
        assert masking.num_asked(seqlens) - 3 <= int(used.sum()) <= masking.num_asked(seqlens)


def test_shares_and_places_are_the_loaders() -> None:
    by_loader, _ = make_batches(150, True, settings(), unknown=False)
    plain, masking = make_batches(150, False, settings(), unknown=False)
    shares, places, drawn = [], [], []
    for side in (by_loader, [masking(batch, n) for n, batch in enumerate(plain)]):
        shown, labels, positions = [], [], []
        for batch in side:
            used = batch.masked_labels != IGNORE_INDEX
            at = batch.masked_positions[used]
            shown.append(batch.input_ids[at])
            labels.append(batch.masked_labels[used])
            positions.append(batch.position_ids[at])
        seen, label = torch.cat(shown), torch.cat(labels)
        is_mask, is_kept = seen == VOCABULARY.mask, seen == label
        shares.append([is_mask.double().mean().item(), is_kept.double().mean().item()])
        places.append(torch.cat(positions).bincount(minlength=64))
        drawn.append(seen[~is_mask & ~is_kept])
        num = len(label)
    assert num > 10_000
    for mask_share, kept_share in shares:
        # one of 88 drawn ids is the token itself
        for share, right in ((mask_share, 0.8), (kept_share, 0.1 + 0.1 / 88)):
            assert abs(share - right) < 4 * (right * (1 - right) / num) ** 0.5
    # the places in a sequence: two samples of one distribution differ by 4 sigma at most, sigma^2 = a + b
    a, b = (p.double() for p in places)
    assert ((a - b).abs() <= 4 * (a + b).sqrt() + 1).all() and a[0] == b[0] == 0
    for ids in drawn:
        assert ids.min() == 12 and ids.max() == 99
        counts = ids.bincount(minlength=100)[12:].double()
        mean = counts.mean()
        assert ((counts - mean).abs() <= 4.5 * mean.sqrt()).all()


def test_every_candidate_is_equally_likely_and_independent_of_its_number() -> None:
    num, length = 4000, 12
    ids = torch.full((num * length,), 50)
    cu_seqlens = torch.arange(0, num * length + 1, length, dtype=torch.int32)
    position = torch.arange(num * length) % length
    candidate = (position > 0) & (position < length - 1)
    chosen = []
    for number in (0, 1, MICRO_BATCHES, 2**40 + 7):
        _, at, _ = mask_tokens(
            ids,
            cu_seqlens,
            candidate,
            torch.full((num,), 3),
            torch.tensor([number]),
            torch.tensor([2**62 + 9]),
            num_predictions=3 * num,
            mask_id=4,
            ordinary=torch.arange(12, 100),
        )
        counts = (at % length).bincount(minlength=length)
        # each of 10 places is taken by 3/10 of the sequences: 1,200 +- 4 sigma (sqrt(4000 * 0.3 * 0.7))
        assert counts[0] == counts[11] == 0 and (counts[1:11] - 1200).abs().max() < 4 * 29
        chosen.append(torch.zeros(num * length).index_fill_(0, at, 1.0))
    for one, other in ((0, 1), (0, 2), (1, 3)):
        both = (chosen[one] * chosen[other])[candidate].mean()  # 0.3 * 0.3 of 40,000
        assert abs(both - 0.09) < 4 * (0.09 * 0.91 / 40_000) ** 0.5


@pytest.mark.parametrize("num_predictions", [1, 4, 40])
def test_small_and_empty_sequences(num_predictions: int) -> None:
    """Fewer candidates than wanted, none, empty sequences, tokens of no sequence, more slots than tokens."""
    ids = torch.tensor([2, 50, 3, 2, 3, 2, 51, 52, 53, 3, 60, 61])
    cu_seqlens = torch.tensor([0, 3, 3, 5, 10, 10], dtype=torch.int32)
    candidate = ids >= 10
    arguments = (
        ids,
        cu_seqlens,
        candidate,
        torch.tensor([2, 1, 1, 2, 1]),
        torch.tensor([0]),
        torch.tensor([1]),
    )
    seen, at, labels = mask_tokens(
        *arguments, num_predictions=num_predictions, mask_id=4, ordinary=torch.arange(70, 99)
    )
    assert at.shape == labels.shape == (num_predictions,)
    used = labels != IGNORE_INDEX
    assert int(used.sum()) == min(3, num_predictions) and at[0] == 1
    assert all(6 <= i <= 8 for i in at[used].tolist()[1:]) and torch.equal(ids[at[used]], labels[used])
    assert torch.equal(seen[[0, 2, 3, 4, 5, 9, 10, 11]], ids[[0, 2, 3, 4, 5, 9, 10, 11]])
    assert not torch.equal(seen, ids) or num_predictions == 1


def test_a_batch_is_masked_by_seed_and_number_only() -> None:
    (batch,), masking = make_batches(1, False, settings())
    first, second = masking(batch, 7), masking(batch, 8)
    torch.manual_seed(99)
    again = masking(batch, 7)
    assert torch.equal(first.input_ids, again.input_ids) and torch.equal(
        first.masked_labels, again.masked_labels
    )
    other_seed = replace(masking, seed=6)(batch, 7)
    for other in (second, other_seed):
        assert not torch.equal(first.masked_positions, other.masked_positions)


def test_no_value_is_looked_at() -> None:
    """Tensors without values run through: no host waits, and shapes are static."""
    (batch,), masking = make_batches(1, False, settings())
    for rows in (batch, batch.padded()):
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = replace(masking, ordinary=mode.from_tensor(masking.ordinary))
            tensors = {
                f.name: mode.from_tensor(value)
                for f in fields(rows)
                if isinstance(value := getattr(rows, f.name), Tensor)
            }
            masked = fake(replace(rows, **tensors), 3)  # type: ignore[arg-type]
        assert masked.masked_labels.shape == masked.masked_positions.shape == (masking.num_predictions,)


def test_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match="whole words are masked by the loader"):
        make_batches(1, False, settings(whole_word=True))


def test_a_resumed_trainer_masks_as_one_that_went_on() -> None:
    batches, masking = make_batches(8, False, settings(seq_len=32, tokens_per_batch=128))
    seen: list[Tensor] = []

    def remembered(batch: Any, number: int) -> Any:
        masked = masking(batch, number)
        seen.append(masked.masked_positions)
        return masked

    def trainer() -> Trainer:
        torch.manual_seed(0)
        model = BertForPreTraining(
            BertConfig(
                vocab_size=100,
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=32,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
        optimizer = Lamb(parameter_groups(model, 0.01), lr=1e-3)
        return Trainer(model, optimizer, lambda k: 1e-3, masking=remembered)  # type: ignore[arg-type]

    whole, totals = trainer(), Totals()
    for step in range(4):
        whole.train_step(batches[2 * step : 2 * step + 2], totals)
    assert totals.metrics()["mlm_loss"] == pytest.approx(np.log(100), abs=0.5)  # something was asked
    numbers = [MICRO_BATCHES * (i // 2) + i % 2 for i in range(8)]
    asked = [masking(batch, number).masked_labels != IGNORE_INDEX for batch, number in zip(batches, numbers)]
    assert totals.sums()["mlm_count"] == int(torch.cat(asked).sum())
    assert len({tuple(positions.tolist()) for positions in seen}) == 8

    first = trainer()
    for step in range(2):
        first.train_step(batches[2 * step : 2 * step + 2], Totals())
    second = trainer()
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.load_state_dict(first.state_dict())
    for step in range(2, 4):
        second.train_step(batches[2 * step : 2 * step + 2], Totals())
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
