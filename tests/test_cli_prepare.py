"""`python -m fastbert.prepare` and `pretrain --data` as their users run them."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastbert.data import preparation, shards
from fastbert.data.preparation import WORK
from fastbert.data.store import DocumentStore
from fastbert.data.tokenizer import load_tokenizer
from fastbert.prepare import main
from fastbert.pretrain import main as pretrain_main
from fastbert.train import checkpoint as ckpt
from tests.test_cli_pretrain import options as pretrain_options
from tests.test_cli_pretrain import write_corpus
from tests.test_data_shards import words_of

ROOT = Path(__file__).resolve().parents[1]
KOREAN = ["고양이가", "개가", "강가에서", "조용히", "오늘도", "새벽에", "산에서"]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def options(tmp_path: Path, output: str, *more: str, **changed: Any) -> list[str]:
    values = {
        "corpus": tmp_path / "corpus.txt",
        "output": tmp_path / output,
        "shard-mb": 0.004,
        "vocab-size": 400,
        "num-proc": 1,
        **changed,
    }
    return [*(str(part) for name, value in values.items() for part in (f"--{name}", value)), *more]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.txt", documents=150)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1, said
    return said.strip()


def korean_corpus(path: Path, documents: int = 60) -> Path:
    rng = random.Random(1)
    lines = []
    for _ in range(documents):
        lines += [f"{' '.join(rng.choices(KOREAN, k=4))} 노래한다." for _ in range(4)]
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


# ---- what it makes


def test_any_number_of_processes_writes_the_same_bytes(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more").mkdir()
    korean_corpus(tmp_path / "more" / "ko.txt")
    shutil.copy(corpus, tmp_path / "more" / "en.txt")
    for name, processes in (("one", 1), ("two", 2)):
        arguments = options(tmp_path, name, "--dedup", corpus=tmp_path / "more", **{"num-proc": processes})
        assert main(arguments) == 0
    one, two = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []
    assert sum(name.startswith("shards/") for name in one) > 5
    said = " ".join(capsys.readouterr().out.split())
    assert "data set: 210 documents" in said
    assert f"next: python -m fastbert.pretrain --packed --data {tmp_path / 'two'}" in said
    words = words_of(DocumentStore.open(tmp_path / "two"))
    assert sum("고양이가" in text for text in words) > 10


def test_copies_are_dropped_and_the_first_stays(tmp_path: Path, corpus: Path) -> None:
    texts = corpus.read_text().strip().split("\n\n")
    again = texts[:40] + texts + texts[100:] + ["Only here."]
    (tmp_path / "again.txt").write_text("\n\n".join(again))
    assert main(options(tmp_path, "data", "--dedup", corpus=tmp_path / "again.txt", **{"held-out": 0})) == 0
    store = DocumentStore.open(tmp_path / "data")
    expected = [" ".join(text.lower().split("\n")) for text in dict.fromkeys(again)]
    assert words_of(store) == expected
    assert store.manifest["dropped_documents"] == {"duplicate": len(again) - len(expected)}


def test_filters_drop_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = ["안녕.", "이 문서는 충분히 길고 글자로 되어 있다.", "1234567890 1234567890 1234567890"]
    (tmp_path / "corpus.txt").write_text("\n\n".join(documents), encoding="utf-8")
    arguments = {"min-chars": 10, "min-letters": 0.5, "held-out": 0, "format": "sentences"}
    assert main(options(tmp_path, "data", **arguments)) == 0
    store = DocumentStore.open(tmp_path / "data")
    assert words_of(store) == ["이 문서는 충분히 길고 글자로 되어 있다."]
    assert store.manifest["dropped_documents"] == {"min_chars": 1, "min_letters": 1}
    assert "dropped: 1 documents by min_chars, 1 documents by min_letters" in capsys.readouterr().out
    nothing = refused(options(tmp_path, "none", **{"min-chars": 1000, "format": "sentences"}), capsys)
    assert "after these documents were dropped; 3 by min_chars: loosen the filters" in nothing


def test_compressed_files_and_addresses(tmp_path: Path, corpus: Path) -> None:
    packed = tmp_path / "packed" / "corpus.txt.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    assert main(options(tmp_path, "plain")) == 0
    plain = words_of(DocumentStore.open(tmp_path / "plain"))
    for name, path in (
        ("gz", packed),
        ("url", f"file://{corpus}"),
        ("folder", f"file://{packed.parent}"),
        ("glob", f"file://{packed.parent}/*.gz"),
    ):
        assert main(options(tmp_path, name, corpus=path)) == 0
        assert Counter(words_of(DocumentStore.open(tmp_path / name))) == Counter(plain)


def test_special_tokens_in_the_text_are_text(tmp_path: Path) -> None:
    """Public case H-02."""
    (tmp_path / "corpus.txt").write_text("The user said [MASK] and [SEP] done.\n" * 20)
    assert main(options(tmp_path, "data", **{"held-out": 0})) == 0
    store = DocumentStore.open(tmp_path / "data")
    tokenizer = load_tokenizer(store.tokenizer_folder)
    ids = store.document(0)[0].tolist()
    assert not {tokenizer.token_to_id(name) for name in ("[MASK]", "[SEP]", "[CLS]")} & set(ids)
    assert "said [ mask ] and [ sep ] done" in tokenizer.decode(ids)


def test_hub_data_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"문서 {i}. This is number {i}." for i in range(200)]
    datasets.Dataset.from_dict({"n": list(range(200)), "body": texts}).save_to_disk(str(tmp_path / "ds"))
    given = options(tmp_path, "data", dataset=tmp_path / "ds", **{"held-out": 0, "shard-mb": 0.001})[2:]
    assert main(given) == 0
    store = DocumentStore.open(tmp_path / "data")
    assert words_of(store) == [text.lower() for text in texts]
    assert store.num_shards > 3
    assert "ds: 200 rows" in store.description
    said = refused([*given, "--text-column", "text", "--output", str(tmp_path / "x")], capsys)
    assert re.search(r"ds has no column 'text': its columns are 'n', 'body'", said)
    said = refused(["--dataset", str(tmp_path / "absent"), "--output", str(tmp_path / "x")], capsys)
    assert "absent cannot be loaded" in said
    assert not (tmp_path / "x").exists()


# ---- stopping and going on


def unfinished(tmp_path: Path, name: str, after: int, *more: str) -> None:
    """A preparation that is killed when its journal has `after` shards."""
    code = f"""
import os, signal, sys
from fastbert.data import preparation
from fastbert.prepare import main
add = preparation._Journal.add
count = 0
def kill(journal, entry):
    global count
    add(journal, entry)
    count += 1
    if count == {after}:
        os.kill(os.getpid(), signal.SIGKILL)
preparation._Journal.add = kill
main(sys.argv[1:])
"""
    command = [sys.executable, "-c", code, *options(tmp_path, name, *more)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_preparation_goes_on_behind_its_shards(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(options(tmp_path, "whole")) == 0
    unfinished(tmp_path, "parts", 3)
    folder = tmp_path / "parts"
    assert not (folder / "manifest.json").exists()
    with (folder / WORK / "shards.jsonl").open("a") as journal:
        journal.write('{"part": 9, "ordi')  # a line that the kill cut short
    (folder / "shards" / ".000007-000.arrow.123.partial").write_bytes(b"half")
    done = sorted((folder / "shards").glob("0*"))
    assert len(done) >= 3
    spoilt = bytearray(done[1].read_bytes())
    spoilt[-1] ^= 1
    done[1].write_bytes(spoilt)  # finished, and damaged since
    written: list[int] = []
    write_part = shards.write_part

    def counting(part: Any, *args: Any, **kwargs: Any) -> Any:
        written.append(part.number)
        return write_part(part, *args, **kwargs)

    monkeypatch.setattr("fastbert.data.preparation.write_part", counting)
    assert main(options(tmp_path, "parts")) == 0
    assert 0 not in written
    assert 2 not in written
    assert written[:2] == [1, 3]
    assert files_of(folder) == files_of(tmp_path / "whole")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_kill_while_copies_are_looked_for(tmp_path: Path, corpus: Path) -> None:
    text = corpus.read_text()
    corpus.write_text(f"{text}\n{text}")
    assert main(options(tmp_path, "whole", "--dedup")) == 0
    unfinished(tmp_path, "parts", 2, "--dedup")
    hashes = sorted((tmp_path / "parts" / WORK / "hashes").iterdir())
    assert hashes
    with hashes[0].open("ab") as file:
        file.write(b"half a record")
    assert main(options(tmp_path, "parts", "--dedup")) == 0
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    assert len(DocumentStore.open(tmp_path / "parts")) == 150


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt", documents=2000)
    assert main(options(tmp_path, "tok", corpus=korean_corpus(tmp_path / "ko.txt"))) == 0
    changed = {"num-proc": 2, "tokenizer": tmp_path / "tok"}
    command = [sys.executable, "-m", "fastbert.prepare", *options(tmp_path, "d", **changed)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | {"MARK": str(tmp_path)}
    )
    journal = tmp_path / "d" / WORK / "shards.jsonl"
    deadline = time.monotonic() + 120
    while not journal.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not (tmp_path / "d" / "manifest.json").exists()

    def alive() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"MARK={tmp_path}".encode() in entry.read_bytes():
                    found.append(entry.parent.name)
            except OSError:
                continue
        return found

    deadline = time.monotonic() + 30
    while alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive() == []


def test_ctrl_c_keeps_the_finished_shards(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(options(tmp_path, "whole")) == 0
    journal_add, count = preparation._Journal.add, 0

    def interrupted(journal: Any, entry: Any) -> None:
        nonlocal count
        journal_add(journal, entry)
        count += 1
        if count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(preparation._Journal, "add", interrupted)
    assert main(options(tmp_path, "parts")) == 130
    assert "stopped; finished shards are kept in" in capsys.readouterr().out
    assert main(options(tmp_path, "parts")) == 0
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


def test_a_full_disk_and_then_room(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(options(tmp_path, "whole")) == 0
    sync, count = shards._sync, 0

    def full(path: Path) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise OSError(28, "No space left on device")
        sync(path)

    monkeypatch.setattr(shards, "_sync", full)
    said = refused(options(tmp_path, "parts"), capsys)
    assert re.search(
        r"no space left for the tokenized corpus in \S+parts: free some or choose another folder; "
        r"3 finished shards are kept, and the same command goes on behind them",
        said,
    )
    assert not list((tmp_path / "parts" / "shards").glob(".*"))
    assert main(options(tmp_path, "parts")) == 0
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"vocab-size": 300},
            r"was begun with --vocab-size 400, but 300 is asked for; give the same options",
        ),
        ({"held-out": 0.5}, r"--held-out 0.01, but 0.5 is asked for"),
        ({"max-symbols": 0.2}, r"--max-symbols 1.0, but 0.2 is asked for"),
        ({"corpus": "other"}, r"was begun with other files than these, or they have changed; give the same"),
    ],
)
def test_other_options_are_refused_by_name(
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    says: str,
) -> None:
    if "corpus" in changed:
        changed = {"corpus": write_corpus(tmp_path / "other.txt", documents=149)}
    assert main(options(tmp_path, "data")) == 0
    capsys.readouterr()
    assert main(options(tmp_path, "data", **{"num-proc": 2})) == 0  # changes nothing
    assert "is finished already: 150 documents" in capsys.readouterr().out
    assert re.search(says, refused(options(tmp_path, "data", **changed), capsys))
    # of an unfinished one just the same
    manifest = tmp_path / "data" / "manifest.json"
    (tmp_path / "data" / WORK).mkdir()
    asked = json.loads(manifest.read_text())["options"]
    (tmp_path / "data" / WORK / "options.json").write_text(json.dumps(asked))
    manifest.unlink()
    assert re.search(says, refused(options(tmp_path, "data", **changed), capsys))


def test_the_second_on_one_folder_refuses(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    with ckpt.exclusive(tmp_path / "data"):
        code = "import sys; from fastbert.prepare import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, *options(tmp_path, "data")]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 2
    assert "is in use by another process" in second.stderr
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_text("mine")
    assert "holds notes.txt, which is no data set" in refused(options(tmp_path, "data"), capsys)


# ---- bad input


def test_bad_corpora(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    korean = tmp_path / "cp949.txt"
    korean.write_bytes("OK. 괜찮다.\n".encode("cp949") * 20)
    said = refused(options(tmp_path, "a", corpus=korean), capsys)
    assert re.search(r"cp949.txt is not UTF-8 text: byte 4 cannot be decoded; .* iconv -f ENCODING", said)
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt is empty" in refused(options(tmp_path, "a", corpus=tmp_path / "empty.txt"), capsys)
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(range(256)))
    said = refused(options(tmp_path, "a", corpus=picture), capsys)
    assert re.search(r"picture.png is no text .*: remove it from the corpus, or name the text files", said)
    packed = tmp_path / "broken.txt.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes())[:-300])
    assert "cannot read" in refused(options(tmp_path, "a", corpus=packed), capsys)
    assert "cannot read nosuch://" in refused(options(tmp_path, "a", corpus="nosuch://bucket/a.txt"), capsys)
    # an error in another process comes through, too; nothing is left in the way
    late = tmp_path / "late.txt"
    late.write_bytes(corpus.read_bytes() + b"\ncaf\xe9.\n")
    arguments = options(
        tmp_path, "b", corpus=late, tokenizer=tmp_path / "tok" / "tokenizer", **{"num-proc": 2}
    )
    assert main(options(tmp_path, "tok")) == 0
    said = refused(arguments, capsys)
    assert re.search(rf"late.txt is not UTF-8 text: byte {corpus.stat().st_size + 4} cannot be decoded", said)
    assert said.endswith("the same command goes on behind them")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"held-out": 1}, "--held-out 1.0 is out of range"),
        ({"min-letters": 2}, "--min-letters 2.0 is out of range; give a share from 0 to 1"),
        ({"num-proc": 0}, "--num-proc 0 is out of range; give at least 1"),
        ({"shard-mb": 0}, "--shard-mb 0.0 is out of range"),
        ({"dataset": "x"}, "--dataset x and --corpus are both given"),
    ],
)
def test_option_values(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], says: str
) -> None:
    assert says in refused(options(tmp_path, "data", **changed), capsys)
    assert not (tmp_path / "data").exists()


# ---- training on it


def trained(tmp_path: Path, name: str, arguments: list[str]) -> dict[str, torch.Tensor]:
    assert pretrain_main(arguments) == 0
    return load_file(tmp_path / name / "last" / "model.safetensors")


def without_corpus(arguments: list[str]) -> list[str]:
    """Without what says how text becomes tokens."""
    for name in ("--corpus", "--vocab-size"):
        at = arguments.index(name)
        arguments = arguments[:at] + arguments[at + 2 :]
    return arguments


def test_training_on_it_is_training_on_the_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also from an address, and resumed in the middle: the same bits each time."""
    given = {"steps": 6, "save-every": 3}
    direct = trained(tmp_path, "direct", pretrain_options(tmp_path, "direct", **given))
    prepare = options(tmp_path, "data", **{"held-out": 0, "vocab-size": 200, "shard-mb": 0.003})
    assert main(prepare) == 0
    assert DocumentStore.open(tmp_path / "data").num_shards > 3
    for name, data in (("local", tmp_path / "data"), ("remote", f"file://{tmp_path / 'data'}")):
        arguments = [*without_corpus(pretrain_options(tmp_path, name, **given)), "--data", str(data)]
        weights = trained(tmp_path, name, arguments)
        assert all(torch.equal(direct[key], weights[key]) for key in direct)
    shutil.rmtree(tmp_path / "remote" / "checkpoint-6")
    weights = trained(tmp_path, "remote", [*arguments, "--workers", "1"])
    assert "read from its beginning" not in capsys.readouterr().out
    assert all(torch.equal(direct[key], weights[key]) for key in direct)


def test_training_with_documents_held_out_and_a_bad_shard(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(tmp_path, "data", **{"held-out": 0.1})) == 0
    store = DocumentStore.open(tmp_path / "data")
    assert store.num_held_out
    arguments = [*without_corpus(pretrain_options(tmp_path, "run")), "--data", str(tmp_path / "data")]
    shard = tmp_path / "data" / "shards" / "000002-000.arrow"
    shard.unlink()
    capsys.readouterr()
    assert pretrain_main(arguments) == 2
    assert "the shard shards/000002-000.arrow of" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"left out: the shard shards/000002-000.arrow"):
        assert pretrain_main([*arguments, "--on-bad-shard", "skip"]) == 0
    assert "held-out loss" in capsys.readouterr().out


def test_options_of_data_that_do_not_fit(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(*more: str, corpus: bool = False) -> str:
        arguments = pretrain_options(tmp_path, "run")
        capsys.readouterr()
        assert pretrain_main([*(arguments if corpus else without_corpus(arguments)), *more]) == 2
        return capsys.readouterr().err

    assert main(options(tmp_path, "data")) == 0
    assert main(options(tmp_path, "other", "--cased")) == 0
    data = str(tmp_path / "data")
    assert "--data" in says("--data", data, corpus=True)
    for option in ("--cased", "--vocab-size=300", "--format=prose", "--text-column=body"):
        assert f"{option.split('=')[0]} is about text, and --data" in says("--data", data, option)
    assert "holds no prepared data set (it has no manifest.json)" in says("--data", str(tmp_path))
    said = says("--data", data, "--tokenizer", str(tmp_path / "other"))
    assert "has another tokenizer than" in said
    assert not (tmp_path / "run").exists()  # with nothing but its lock in it


def test_a_run_folder_is_a_tokenizer(tmp_path: Path, corpus: Path) -> None:
    assert pretrain_main(pretrain_options(tmp_path, "run", steps=1)) == 0
    assert main(options(tmp_path, "data", tokenizer=tmp_path / "run")) == 0
    one, two = (load_tokenizer(tmp_path / name) for name in ("run", "data"))
    assert one.to_str() == two.to_str()


# ---- size


@pytest.mark.skipif(sys.platform == "win32", reason="needs the resource module")
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Public case H-08: also while copies are dropped."""
    code = """
import random, resource, sys
from pathlib import Path
from fastbert.prepare import main
rng = random.Random(0)
words = ["w%d" % i for i in range(3000)]
folder = Path(sys.argv[1])
def prepare(name, megabytes):
    with open(folder / f"{name}.txt", "w") as file:
        for _ in range(megabytes * 100):
            for _ in range(10):
                file.write(" ".join(rng.choices(words, k=180)) + ".\\n")
            file.write("\\n")
    given = {"corpus": folder / f"{name}.txt", "tokenizer": folder / "tokenizer", "output": folder / name}
    others = ["--format", "sentences", "--num-proc", "1", "--dedup", "--shard-mb", "0.5"]
    assert main([*(str(p) for n, v in given.items() for p in (f"--{n}", v)), *others]) == 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from fastbert.data.tokenizer import save_tokenizer, train_tokenizer
save_tokenizer(train_tokenizer([" ".join(words)] * 4, vocab_size=4000), folder / "tokenizer")
print("peaks", prepare("small", 1), prepare("large", 5))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    small, large = map(int, done.stdout.split("peaks")[1].split())
    assert large < 1.15 * small
