"""Sharded data sets: what is in them, what damage does, how large ones are opened and shuffled."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastbert.data import order as order_module
from fastbert.data import store as store_module
from fastbert.data.corpus import open_corpus
from fastbert.data.filters import Filters
from fastbert.data.loader import LoaderSettings, PackedLoader, Vocabulary, WindowBuilder
from fastbert.data.order import BlockOrder, ShardedDocuments, training_documents
from fastbert.data.preparation import prepare_store
from fastbert.data.shards import ShardRecord, WriteOptions, write_index
from fastbert.data.store import BadShard, DocumentStore
from fastbert.data.tokenizer import load_tokenizer, save_tokenizer, special_ids, train_tokenizer
from fastbert.errors import UserError
from fastbert.paths import stays_inside
from tests.test_cli_pretrain import write_corpus

ROOT = Path(__file__).resolve().parents[1]
KOREAN = ["고양이가 잔다.", "개가 짖는다.", "강에 새가 있다.", "비가 온다.", "눈이 내린다."]


def prepared(folder: Path, text: Path, *, shard_bytes: int = 2000, **options: Any) -> DocumentStore:
    corpus = open_corpus([str(text)])
    tokenizer = train_tokenizer(corpus.sentences(1 << 30), vocab_size=500)
    save_tokenizer(tokenizer, folder / "tokenizer")
    return prepare_store(
        corpus,
        tokenizer,
        folder,
        WriteOptions(shard_bytes=shard_bytes, **options),
        {"corpus": corpus.description, "name": corpus.name},
        on_pass=lambda name, parts: lambda progress: None,
    )


def words_of(store: DocumentStore) -> list[str]:
    """Each document in words."""
    tokenizer = load_tokenizer(store.tokenizer_folder)
    return [tokenizer.decode(store.document(i)[0].tolist()) for i in range(len(store))]


@pytest.fixture
def store(tmp_path: Path) -> DocumentStore:
    return prepared(tmp_path / "data", write_corpus(tmp_path / "corpus.txt", documents=120))


def builder_of(store: DocumentStore, documents: Any, **settings: Any) -> WindowBuilder:
    ids = special_ids(load_tokenizer(store.tokenizer_folder))
    vocabulary = Vocabulary(cls=ids.cls, sep=ids.sep, mask=ids.mask, unk=ids.unk, ordinary=np.arange(5, 30))
    loader = LoaderSettings(**({"seq_len": 32, "tokens_per_batch": 64, "seed": 5} | settings))
    return WindowBuilder(store, documents, vocabulary, loader)


# ---- contents


def test_shards_hold_the_corpus_in_order(tmp_path: Path, store: DocumentStore) -> None:
    sentences = [" ".join(d).lower() for d in open_corpus([str(tmp_path / "corpus.txt")]).documents()]
    assert words_of(store) == sentences
    assert store.num_shards > 5
    assert len(store) == 120 == store.shard_starts[-1]
    assert store.num_tokens == store.document_lengths.sum() == store.column("tokens").sum()
    counts = Counter(int(i) for d in range(len(store)) for i in store.document(d)[0])
    assert {i: n for i, n in enumerate(store.unigram_counts.tolist()) if n} == counts
    lengths = store.manifest["document_length_histogram"]
    assert sum(lengths.values()) == 120
    inside = [(int(low), int(high)) for low, high in (name.split("-") for name in lengths)]
    assert all(
        count == sum(low <= n <= high for n in store.document_lengths)
        for (low, high), count in zip(inside, lengths.values())
    )


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "wiki_00", "wiki.txt", "a.parquet"])
def test_any_cut_of_a_file_gives_its_documents(tmp_path: Path, name: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"문서 {i} 이다. Number {i} stands here." + " 더 있다." * (i % 7) for i in range(60)]
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=7)
    else:
        path.write_text(
            {
                "a.txt": "\n \n\n".join(text.replace(". ", ".\n") for text in texts),
                "a.jsonl": "\n".join(json.dumps({"text": text}) for text in texts),
                "wiki_00": "".join(f"<doc id='{i}'>\n{text}\n</doc>\n" for i, text in enumerate(texts)),
                "wiki.txt": "".join(f" \n = Title {i} = \n \n {text} \n" for i, text in enumerate(texts)),
            }[name],
            encoding="utf-8",
        )
    corpus = open_corpus([str(path)])
    whole = list(corpus.documents())
    assert len(whole) == 60
    sizes = set()
    for target in (50, 333, 1000, 4000):
        parts = list(corpus.parts(target))
        assert [document for part in parts for document in part.documents()] == whole
        assert [part.number for part in parts] == list(range(len(parts)))
        sizes.add(len(parts))
    assert len(sizes) > 1
    assert max(sizes) > (5 if name == "a.parquet" else 30)


def test_a_part_that_cannot_be_cut_gives_several_shards(tmp_path: Path) -> None:
    import gzip

    text = write_corpus(tmp_path / "corpus.txt", documents=100)
    packed = tmp_path / "corpus.txt.gz"
    packed.write_bytes(gzip.compress(text.read_bytes()))
    one = prepared(tmp_path / "one", text, shard_bytes=1 << 20)
    several = prepared(tmp_path / "several", packed, shard_bytes=1500)
    assert (one.num_shards, several.num_shards) == (1, -(-text.stat().st_size // 3000))
    assert words_of(several) == words_of(one)


def test_held_out_documents_are_chosen_by_their_text(tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "a.txt", documents=300)
    doubled = tmp_path / "b.txt"
    doubled.write_text(f"{text.read_text()}\n{text.read_text()}")

    def held_out(store: DocumentStore) -> Counter[str]:
        words = words_of(store)
        borders = store.shard_starts[1:] - store.column("held_out_documents")
        rows = [i for b, e in zip(borders, store.shard_starts[1:]) for i in range(b, e)]
        assert len(rows) == store.num_held_out
        return Counter(words[i] for i in rows)

    one = held_out(prepared(tmp_path / "one", text, held_out=0.2, seed=1))
    # 300 draws at 0.2: 60 and 4 standard deviations of 6.9
    assert 32 < sum(one.values()) < 88
    assert held_out(prepared(tmp_path / "two", doubled, held_out=0.2, seed=1, shard_bytes=777)) == Counter(
        {words: 2 * n for words, n in one.items()}
    )
    assert held_out(prepared(tmp_path / "three", text, held_out=0.2, seed=2)) != one


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (Filters(), [0, 1, 2, 3, 4]),
        (Filters(min_chars=12), [1, 2, 3, 4]),
        (Filters(max_chars=30), [0, 1, 3]),
        (Filters(min_letters=0.6), [0, 1, 4]),
        (Filters(max_symbols=0.3), [0, 1, 2, 4]),
        (Filters(max_repeated=0.5), [0, 1, 2, 3]),
    ],
)
def test_filters_know_no_language(filters: Filters, kept: list[int]) -> None:
    documents = [
        ["짧다."],
        ["한국어 문장이다.", "Ein Satz, naïve."],
        ["12 34 56 78 90 12 34 56.", "7 8 9 10 11 words."],
        ["$$$ <b> {x} == #### ok"],
        ["같은 문장이 또 나온다."] * 4,  # three quarters of it are repeats
    ]
    assert [i for i, document in enumerate(documents) if filters.reason(document) is None] == kept


# ---- damage


def test_damaged_shards_are_named_or_left_out(tmp_path: Path, store: DocumentStore) -> None:
    paths = [store.path / path for path in store.index["path"].to_pylist()]
    starts = store.shard_starts
    paths[1].write_bytes(paths[1].read_bytes()[:-10])
    flipped = bytearray(paths[2].read_bytes())
    flipped[len(flipped) // 2] ^= 4
    paths[2].write_bytes(flipped)
    paths[3].unlink()
    opened = DocumentStore.open(store.path)  # does not read the shards
    opened.document(int(starts[0]))
    size = paths[1].stat().st_size
    for number, says in (
        (1, rf"shards/000001-000.arrow of .*data has {size} bytes, not {size + 10}"),
        (2, r"shards/000002-000.arrow of .* was altered \(its checksum is another\)"),
        (
            3,
            r"shards/000003-000.arrow of .* is missing: copy it again, or train without it by --on-bad-shard",
        ),
    ):
        with pytest.raises(BadShard, match=says):
            opened.document(int(starts[number]))
    skipping = DocumentStore.open(store.path, on_bad_shard="skip")
    skipping = pickle.loads(pickle.dumps(skipping))
    with pytest.warns(UserWarning, match=r"left out: the shard shards/000002-000.arrow"):
        assert [len(part) for part in skipping.document(int(starts[2]))] == [0, 0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told of once
        skipping.document(int(starts[2]) + 1)
    assert len(skipping.document(int(starts[4]))[0]) > 0
    # every batch is made of the other shards
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder = builder_of(skipping, np.arange(len(skipping)), tokens_per_batch=256)
        windows = [builder[i] for i in range(builder.num_windows)]
    bad = int(sum(store.lengths(int(starts[n]), int(starts[n + 1])).sum() for n in (1, 2, 3)))
    tokens = sum(int(window["num_tokens"].sum()) for window in windows)
    assert store.num_tokens - bad < tokens < 2 * (store.num_tokens - bad)


def test_a_process_of_the_loader_says_which_shard_is_bad_and_ends(store: DocumentStore) -> None:
    builder = builder_of(store, np.arange(int(store.shard_starts[2])), nsp=False)
    last = store.path / store.index["path"][1].as_py()
    last.write_bytes(b"x" * last.stat().st_size)
    stream = iter(PackedLoader(builder, workers=1))
    with pytest.raises(BadShard) as raised:
        next(stream)
    said = str(raised.value)
    assert said.startswith(f"the shard shards/000001-000.arrow of {store.path} was altered")
    assert said.endswith("--on-bad-shard skip")
    assert not multiprocessing.active_children()  # while the error is still held


def test_paths_cannot_leave_the_folder(tmp_path: Path, store: DocumentStore) -> None:
    (tmp_path / "outside.arrow").write_bytes(b"")
    for path in ("../outside.arrow", str(tmp_path / "outside.arrow"), "shards/../../outside.arrow", "C:\\x"):
        assert not stays_inside(path)
    assert stays_inside("shards/000001-000.arrow")
    manifest = store.path / "manifest.json"
    changed = json.loads(manifest.read_text())
    changed["files"]["../outside.arrow"] = {"size": 0, "sha256": ""}
    manifest.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=r"names a file outside its folder \(\.\./outside.arrow\)"):
        DocumentStore.open(store.path)
    with pytest.raises(UserError, match=r"names a file outside its folder \(\.\./outside.arrow\)"):
        DocumentStore.open(f"file://{store.path}", cache_dir=tmp_path / "cache")
    for name in ("C:x", "x::file:///etc/passwd", "%2e%2e/outside.arrow"):
        manifest.write_text(json.dumps(changed | {"files": {name: {"size": 0, "sha256": ""}}}))
        for place in (store.path, f"file://{store.path}"):
            with pytest.raises(UserError, match=f"names a file outside its folder \\({name}\\)"):
                DocumentStore.open(place, cache_dir=tmp_path / "cache")
    other = fake_store(tmp_path / "other", 1, documents=1, held_out=0, shards="..")
    with pytest.raises(UserError, match=r"names a file outside its folder \(\.\./000000-000.arrow\)"):
        other.document(0)


# ---- many shards


def fake_store(
    folder: Path, num_shards: int, documents: int, held_out: int, shards: str = "shards"
) -> DocumentStore:
    """The index of a store, without its shards."""
    folder.mkdir()
    tokenizer = train_tokenizer(["a b c"])
    tokens = 100 * documents

    def write_lengths(folder: Path, records: list[ShardRecord]) -> None:
        np.save(folder / "document_lengths.npy", np.full(documents * len(records), 100, np.uint32))

    records = [
        ShardRecord(
            part=n,
            ordinal=0,
            read=documents,
            last=True,
            path=f"{shards}/{n:06d}-000.arrow",
            size=1,
            sha256="0" * 64,
            documents=documents,
            tokens=tokens,
            held_out_documents=held_out,
            held_out_tokens=100 * held_out,
        )
        for n in range(num_shards)
    ]
    counts = np.zeros(20, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastbert.data.shards._write_lengths", write_lengths)
        write_index(folder, records, counts, tokenizer, {"corpus": "fake", "name": "fake"})
    return DocumentStore.open(folder)


def test_a_hundred_thousand_shards_are_not_opened(tmp_path: Path) -> None:
    fake_store(tmp_path / "data", 100_000, documents=3, held_out=1)
    code = f"""
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from fastbert.data.order import BlockOrder, training_documents
from fastbert.data.store import DocumentStore
folder = {str(tmp_path / "data")!r}
opened.clear()
store = DocumentStore.open(folder)
training, held_out = training_documents(store, 1)
order = BlockOrder(store, training, 1)
documents, others = order.window(0, 7, 1000)
files = [path for path in opened if path.startswith(folder)]
shards = {{d // 3 for d in others}}
print(len(store), len(training), order.num_tokens, len(documents), len(shards), len(files))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    documents, training, tokens, in_window, shards, files = map(int, done.stdout.split())
    assert (documents, training, tokens) == (300_000, 200_000, 20_000_000)
    assert in_window == 200
    assert shards <= 8 * order_module.BLOCK_SHARDS  # a window of 20,000 tokens, blocks of 6,400
    # manifest, index, lengths, counts and three tokenizer files, some read twice: never a file a shard
    assert files <= 20


def test_every_document_once_an_epoch_from_a_few_shards_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_module, "BLOCK_SHARDS", 4)
    store = fake_store(tmp_path / "data", 27, documents=10, held_out=2)
    training, held_out = training_documents(store, 3)
    assert isinstance(training, ShardedDocuments)
    assert set(held_out % 10) == {8, 9}
    order = BlockOrder(store, training, seed=3)
    orders = []
    for epoch in (0, 1):
        seen = []
        for window in range(13):
            documents, others = order.window(epoch, window, 13)
            seen += documents.tolist()
            assert set(documents) <= set(others)
            assert len({d // 10 for d in others}) <= 8  # two blocks at most
            assert abs(len(documents) - len(training) / 13) <= 1
            again = BlockOrder(store, training, seed=3).window(epoch, window, 13)
            assert np.array_equal(documents, again[0])
        assert sorted(seen) == [d for d in range(270) if d % 10 < 8]
        orders.append(seen)
    assert orders[0] != orders[1]


def test_a_large_store_without_held_out_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "BLOCK_SHARDS", 4)
    monkeypatch.setattr(order_module, "EVALUATION_SHARDS", 3)
    store = fake_store(tmp_path / "data", 9, documents=30, held_out=0)
    training, held_out = training_documents(store, 3)
    assert isinstance(training, ShardedDocuments)
    assert held_out.tolist() == [28, 29, 118, 119, 208, 209]  # 5 % of the shards 0, 3 and 6
    assert (training.ends - training.starts).tolist() == [28, 30, 30] * 3
    assert (training.tokens == 100 * (training.ends - training.starts)).all()


def test_a_large_store_trains_like_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = prepared(tmp_path / "data", write_corpus(tmp_path / "c.txt", documents=200), held_out=0.1)
    monkeypatch.setattr(order_module, "BLOCK_SHARDS", 3)
    training, held_out = training_documents(store, 5)
    assert len(held_out)
    builder = builder_of(store, training, nsp=False)
    ids = Counter(
        int(i) for w in range(builder.num_windows) for i in builder[w]["input_ids"].flatten() if i > 4
    )
    rows = [i for s, e in zip(training.starts, training.ends) for i in range(s, e)]  # type: ignore[union-attr]
    all_ids = Counter(int(i) for row in rows for i in store.document(row)[0])
    # 15 % are masked, a tenth of these is another word
    assert 0.8 < sum(ids.values()) / sum(all_ids.values()) < 0.95
    pairs = builder_of(store, training, nsp=True)
    whole = [batch for batch, _ in zip(PackedLoader(pairs), range(40))]
    loader = PackedLoader(builder_of(store, training, nsp=True))
    stream = iter(loader)
    for _ in range(17):
        next(stream)
    resumed = PackedLoader(builder_of(store, training, nsp=True))
    resumed.load_state_dict(loader.state_dict())
    for batch, later in zip(whole[17:], resumed):
        assert np.array_equal(batch.input_ids.numpy(), later.input_ids.numpy())


def test_what_is_behind_an_address_is_fetched_shard_by_shard(tmp_path: Path, store: DocumentStore) -> None:
    address = f"file://{store.path}"
    cache = tmp_path / "cache"
    remote = DocumentStore.open(address, cache_dir=cache)
    assert not list(remote.path.rglob("shards/*"))
    assert remote.key == store.key
    assert remote.document(0)[0].tolist() == store.document(0)[0].tolist()
    assert [path.name for path in remote.path.rglob("shards/*")] == ["000000-000.arrow"]
    assert words_of(pickle.loads(pickle.dumps(remote))) == words_of(store)
    # once fetched it is not read there again
    shutil.rmtree(store.path / "shards")
    assert words_of(DocumentStore.open(address, cache_dir=cache)) == words_of(remote)
    (remote.path / "shards" / "000001-000.arrow").unlink()
    with pytest.raises(BadShard, match=r"the shard shards/000001-000.arrow of file://.* is missing"):
        words_of(DocumentStore.open(address, cache_dir=cache))
    with pytest.raises(UserError, match="holds no prepared data set"):
        DocumentStore.open(f"file://{tmp_path}/nothing", cache_dir=cache)


def test_a_spoilt_copy_is_fetched_again(tmp_path: Path, store: DocumentStore) -> None:
    address = f"file://{store.path}"
    remote = DocumentStore.open(address, cache_dir=tmp_path / "cache")
    remote.document(0)
    copy = remote.path / "shards" / "000000-000.arrow"
    copy.write_bytes(b"x" * copy.stat().st_size)
    with pytest.raises(BadShard, match="altered"):
        DocumentStore.open(address, cache_dir=tmp_path / "cache").document(0)
    again = DocumentStore.open(address, cache_dir=tmp_path / "cache")
    assert again.document(0)[0].tolist() == store.document(0)[0].tolist()


def resident(folder: Path) -> int:
    """KiB of the files in a folder that are part of this process's memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="reads Linux's /proc")
def test_pages_that_were_read_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reads a large data set for days would have all of it in its memory."""
    text = write_corpus(tmp_path / "corpus.txt", documents=9000)
    path = prepared(tmp_path / "data", text, shard_bytes=300_000).path
    size = sum(file.stat().st_size for file in (path / "shards").iterdir()) // 1024
    assert size > 2000  # much more than the pages around a few documents
    found, texts = {}, {}
    for every in (10**9, 20):
        monkeypatch.setattr(store_module, "_RELEASE_EVERY", every)
        store = DocumentStore.open(path)
        kept = [store.document(index) for index in range(0, len(store), 600)]  # views stay readable
        texts[every] = [store.document(index)[0].tolist() for index in range(len(store))]
        found[every] = resident(path)
        assert [ids.tolist() for ids, _, _ in kept] == texts[every][::600]
        del store, kept
    assert texts[20] == texts[10**9]
    assert found[10**9] > 0.9 * size
    assert found[20] < 0.3 * size
