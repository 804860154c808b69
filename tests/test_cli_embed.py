"""`python -m fastbert.embed`: the vectors that the folder asks for, in order, from anything to anything."""

from __future__ import annotations

import fnmatch
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from fastbert import BertConfig, BertModel, UserError, sentence_encoder
from fastbert.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from fastbert.embed import embed, main
from fastbert.embed_io import npy_header
from fastbert.sentence_encoder import load_encoder
from tests.minilm import TEXTS, minilm_folder
from tests.small_models import SMALL, spread_weights

MAX_LENGTH = 24
POOLING = "pooling_mode_{}_tokens"


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a tokenizer, and no word of pooling."""
    folder = tmp_path_factory.mktemp("plain-bert")
    tokenizer = train_tokenizer(TEXTS * 3, vocab_size=300)
    torch.manual_seed(0)
    model = BertModel(BertConfig(**{**SMALL, "vocab_size": tokenizer.get_vocab_size()}))
    spread_weights(model)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """The same as a sentence-transformers folder of the older form."""
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    write_json(
        folder / "modules.json",
        [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds],
    )
    write_json(folder / "1_Pooling" / "config.json", {POOLING.format("mean"): True})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH, "do_lower_case": False})
    return folder


def token_vectors(folder: Path, text: str, max_length: int = MAX_LENGTH) -> Tensor:
    """[S, H] of one text by transformers, in fp64."""
    model = transformers.BertModel.from_pretrained(folder).double().eval()
    ids = load_tokenizer(folder).encode(text).ids
    with torch.no_grad():
        return model(torch.tensor([ids[: max_length - 1] + ids[-1:] if len(ids) > max_length else ids]))[0][0]


def by_hand(pooling: str, vectors: Tensor) -> Tensor:
    places = torch.arange(1, len(vectors) + 1)[:, None]
    return {
        "mean": vectors.mean(dim=0),
        "cls": vectors[0],
        "max": vectors.amax(dim=0),
        "mean_sqrt_len_tokens": vectors.sum(dim=0) / len(vectors) ** 0.5,
        "weightedmean": (vectors * places).sum(dim=0) / places.sum(),
        "lasttoken": vectors[-1],
    }[pooling]


def assert_close(ours: np.ndarray, expected: Tensor | np.ndarray, atol: float = 2e-5) -> None:
    np.testing.assert_allclose(ours, np.asarray(expected), atol=atol, rtol=atol)


# ---- values


@pytest.mark.parametrize("pooling", sentence_encoder.POOLINGS)
def test_every_pooling(folder, pooling):
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": pooling})
    expected = torch.stack([by_hand(pooling, token_vectors(folder, text)) for text in TEXTS])
    ours = embed(folder, TEXTS)
    assert ours.dtype == np.float32
    assert_close(ours, torch.nn.functional.normalize(expected, dim=-1))


def test_poolings_side_by_side_and_a_dense_module(folder):
    write_json(
        folder / "1_Pooling" / "config.json", {POOLING.format("mean"): True, "pooling_mode_cls_token": True}
    )
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(2, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    write_json(folder / "modules.json", modules)
    write_json(
        folder / "2_Dense" / "config.json",
        {
            "in_features": 128, "out_features": 5, "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
    )  # fmt: skip
    weight, bias = torch.randn(5, 128) / 10, torch.randn(5)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    rows = []
    for text in TEXTS:
        vectors = token_vectors(folder, text)
        pooled = torch.cat([by_hand("cls", vectors), by_hand("mean", vectors)])
        rows.append(torch.tanh(weight.double() @ pooled + bias))
    assert_close(embed(folder, TEXTS), torch.nn.functional.normalize(torch.stack(rows), dim=-1))


def test_mean_without_normalisation_where_the_folder_names_none(plain, capsys):
    ours = embed(plain, TEXTS[:3])
    expected = torch.stack([by_hand("mean", token_vectors(plain, text, 64)) for text in TEXTS[:3]])
    assert_close(ours, expected)
    assert "names no pooling: vectors are the mean" in capsys.readouterr().err


def test_order_and_values_do_not_depend_on_windows_and_batches(folder, monkeypatch):
    texts = [text[:length] for length in (0, 200, 3, 40, 7) for text in TEXTS]
    expected = embed(folder, texts)
    monkeypatch.setattr(sentence_encoder, "WINDOW_TEXTS", 4)
    assert_close(embed(folder, texts, tokens_per_batch=30), expected)
    monkeypatch.setattr(sentence_encoder, "WINDOW_CHARS", 1)
    assert_close(embed(folder, texts, tokens_per_batch=1), expected)


def test_input_is_not_read_far_ahead(folder, monkeypatch):
    monkeypatch.setattr(sentence_encoder, "WINDOW_TEXTS", 4)
    read = []

    def endless() -> Iterator[str]:
        while True:
            read.append(1)
            yield "text"

    vectors = next(load_encoder(folder).encode(endless()))
    assert vectors.shape == (4, 64)
    assert len(read) <= 13  # the window, the next one, and a text of the one behind


def test_prompts(folder, capsys):
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {"query": "A pack "}, "default_prompt_name": "query"},
    )
    plain_text, prompted = embed(folder, ["of", "A pack of"], prefix="")
    assert_close(embed(folder, ["of"])[0], prompted)
    assert "'A pack '" in capsys.readouterr().err
    assert_close(embed(folder, ["pack of"], prefix="A ")[0], prompted)
    assert np.abs(plain_text - prompted).max() > 0.01


def test_lengths(folder):
    long = "A pack of wolves. " * 30
    limits = {length: embed(folder, [long], max_length=length)[0] for length in (2, MAX_LENGTH, 64)}
    assert_close(embed(folder, [long])[0], limits[MAX_LENGTH])
    assert np.abs(limits[64] - limits[MAX_LENGTH]).max() > 1e-3
    assert_close(limits[2], embed(folder, [""])[0])
    (folder / "sentence_bert_config.json").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**config, "model_max_length": MAX_LENGTH})
    assert_close(embed(folder, [long])[0], limits[MAX_LENGTH])


def test_no_texts_and_wrong_texts(folder):
    assert embed(folder, []).shape == (0, 64)
    with pytest.raises(TypeError, match="one str"):
        embed(folder, "a text")
    with pytest.raises(TypeError, match="got int 3"):
        embed(folder, ["a", 3])


def test_bf16_is_close(folder):
    ours, expected = embed(folder, TEXTS, dtype=torch.bfloat16), embed(folder, TEXTS)
    cosine = (ours * expected).sum(axis=1)
    assert (cosine > 0.99).all() and not np.array_equal(ours, expected)


@pytest.mark.parametrize("tokens_per_batch", [64, 4096])
def test_minilm_equals_transformers(tokens_per_batch):
    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    expected = torch.nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)
    assert_close(embed(folder, TEXTS, tokens_per_batch=tokens_per_batch), expected)


def test_minilm_equals_sentence_transformers():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = minilm_folder()
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert_close(embed(folder, TEXTS), expected)


def test_folders_of_sentence_transformers_6(plain, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    modules = sentence_transformers.base.modules
    pooling = sentence_transformers.sentence_transformer.modules.Pooling(64, "weightedmean")
    model = sentence_transformers.SentenceTransformer(
        modules=[modules.Transformer(str(plain), max_seq_length=MAX_LENGTH), pooling, modules.Dense(64, 7)],
        device="cpu",
    )
    model.save_pretrained(str(tmp_path / "saved"))
    assert_close(embed(tmp_path / "saved", TEXTS), model.encode(TEXTS))


# ---- the command


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_formats(folder, tmp_path, capsys):
    texts = tmp_path / "texts.txt"
    texts.write_bytes("\ufeffShort\r\n\n대한민국의 수도는\nno end".encode())
    expected = embed(folder, ["Short", "", "대한민국의 수도는", "no end"])
    for name in ("a.npy", "a.jsonl", "a.parquet"):
        assert run(folder, texts, "--output", tmp_path / name) == 0
        assert "4 texts, " in capsys.readouterr().err
    assert np.load(tmp_path / "a.npy").dtype == np.float32
    assert_close(np.load(tmp_path / "a.npy"), expected)
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == [0, 1, 2, 3]
    assert_close(np.array([row["embedding"] for row in rows]), expected)
    column = pq.read_table(tmp_path / "a.parquet")["embedding"]
    assert_close(np.array(column.to_pylist()), expected)

    for name in ("b.npy", "b.parquet"):
        assert run(folder, texts, "--output", tmp_path / name, "--output-dtype", "fp16") == 0
    assert np.load(tmp_path / "b.npy").dtype == np.float16
    assert_close(np.load(tmp_path / "b.npy"), expected, atol=1e-3)
    assert str(pq.read_schema(tmp_path / "b.parquet").field(0).type).startswith("fixed_size_list<")
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_jsonl_input_and_several_files(folder, tmp_path):
    rows, more = tmp_path / "rows.jsonl", tmp_path / "more.jsonl"
    rows.write_text('{"text": "one", "title": "two"}\n{"text": "three\\u2028", "title": "four"}\n', "utf-8")
    more.write_text('{"title": "five", "text": ""}\n', "utf-8")
    assert run(folder, rows, more, "--output", tmp_path / "a.npy") == 0
    assert_close(np.load(tmp_path / "a.npy"), embed(folder, ["one", "three\u2028", ""]))
    assert run(folder, rows, more, "--field", "title", "--output", tmp_path / "b.npy") == 0
    assert_close(np.load(tmp_path / "b.npy"), embed(folder, ["two", "four", "five"]))


def test_no_input(folder, tmp_path):
    (tmp_path / "empty.txt").touch()
    for name, load in (("a.npy", np.load), ("a.parquet", pq.read_table)):
        assert run(folder, tmp_path / "empty.txt", "--output", tmp_path / name) == 0
        assert len(load(tmp_path / name)) == 0


@pytest.mark.parametrize("shape", [(0, 1), (10**15, 10**6)])
def test_npy_headers(shape, tmp_path):
    header = npy_header(shape, np.dtype(np.float16))
    (tmp_path / "a.npy").write_bytes(header)
    with (tmp_path / "a.npy").open("rb") as file:
        assert np.lib.format.read_magic(file) == (1, 0)
        assert np.lib.format.read_array_header_1_0(file) == (shape, False, np.dtype(np.float16))
        assert file.tell() == len(header) == 128


def test_a_redirected_file_is_written_as_it_goes(folder, tmp_path, monkeypatch, capfdbinary):
    (tmp_path / "texts").write_text("one\n\nthree", "utf-8")
    with (tmp_path / "texts").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        capfdbinary.readouterr()
        assert run(folder) == 0  # here standard output is a file
    assert_close(np.load(io.BytesIO(capfdbinary.readouterr().out)), embed(folder, ["one", "", "three"]))


def test_pipes(folder, tmp_path):
    """One that is read to its end, and one that closes early."""
    root = Path(__file__).parents[1]
    paths = os.pathsep.join([str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")])
    command = f'"{sys.executable}" -m fastbert.embed "{folder}"'
    script = f"""
        printf 'one\n\nthree' | {command} | cat > a.npy &
        yes text | head -n 1000 | {{ {command}; echo $? > status; }} | head -c 1 > first
        wait
    """
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_close(np.load(tmp_path / "a.npy"), embed(folder, ["one", "", "three"]))
    assert (tmp_path / "status").read_text() == "141\n"
    assert "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr


def test_a_hub_id_is_fetched_into_the_cache(folder, monkeypatch):
    import huggingface_hub

    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert name == "someone/model"
        asked.append(revision)
        assert any(fnmatch.fnmatch("model.safetensors", pattern) for pattern in allow_patterns)
        return str(folder)

    expected = embed(folder, TEXTS)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert np.array_equal(embed("someone/model", TEXTS), expected)
    assert np.array_equal(embed("someone/model@v1.0", TEXTS), expected)
    assert asked == [None, "v1.0"]


# ---- bad input


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said.strip()


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        (b"good\nb\xffd\n", "a.txt", r"line 2 of \S*a\.txt is not UTF-8 \(its byte 2\); convert"),
        (
            b'{"text": "x"}\n{"title": "y"}\n',
            "a.jsonl",
            r"line 2 of .* has no field 'text' \(it has: title\)",
        ),
        (b'{"text": 3}\n', "a.jsonl", r"line 1 of .* has no string 'text'"),
        (b"[1]\n", "a.jsonl", r"line 1 of .* has no field 'text' \(it has: list\)"),
        (b'{"text": "x"}\nplain\n', "a.jsonl", r"line 2 of .* is no JSON"),
    ],
)
def test_bad_texts(folder, tmp_path, capsys, content, name, says):
    (tmp_path / name).write_bytes(content)
    said = refused(capsys, folder, tmp_path / name, "--output", tmp_path / "out.npy")
    assert re.search(says, said), said
    assert not (tmp_path / "out.npy").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--output", "out.csv", r"has none of the suffixes \.npy, \.jsonl, \.parquet"),
        ("--output", "nowhere/out.npy", r"the folder nowhere does not exist"),
        ("--max-length", 65, r"--max-length 65 is out of range; the model takes 2 to 64 tokens"),
        ("--max-length", 1, r"--max-length 1 is out of range"),
        ("--tokens-per-batch", 0, r"--tokens-per-batch 0 is out of range"),
        ("--device", "nonsense", r"--device nonsense cannot be used here \(.*\); try cpu"),
    ],
)
def test_bad_options(folder, tmp_path, capsys, option, value, says):
    (tmp_path / "a.txt").write_text("x")
    said = refused(capsys, folder, tmp_path / "a.txt", option, value)
    assert re.search(says, said), said


def test_a_missing_file(folder, tmp_path, capsys):
    said = refused(capsys, folder, tmp_path / "none.txt", "--output", tmp_path / "a.npy")
    assert re.search(r"cannot read \S*none\.txt \(No such file or directory\)", said)


def _edit(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        write_json(folder / name, {**json.loads((folder / name).read_text()), **changes})

    return edit


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shutil.rmtree, "is no folder"),
        (
            lambda folder: [path.unlink() for path in folder.glob("*.json")],
            "neither a model nor a checkpoint",
        ),
        (lambda folder: [(folder / name).unlink() for name in ("tokenizer.json", "vocab.txt")], "tokenizer"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            r"cannot be loaded as a BERT: .*safetensors",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 20), "cannot be loaded as a BERT"),
        (lambda folder: (folder / "modules.json").write_text("{"), "not a readable JSON file"),
        (_edit("config.json", model_type="t5"), "a model of type 't5'; only BERT"),
        (_edit("config.json", is_decoder=True), "cannot be loaded as a BERT: .*is_decoder"),
        (_edit("1_Pooling/config.json", pooling_mode="median"), "the pooling 'median'; known are mean, cls"),
        (_edit("1_Pooling/config.json", include_prompt=False), "leaves the prompt out"),
        (
            lambda folder: write_json(folder / "modules.json", [{"path": "../other", "type": "x.Dense"}]),
            r"names a module outside its folder: \.\./other",
        ),
        (
            lambda folder: write_json(folder / "modules.json", [{"path": "", "type": "x.CLIPModel"}]),
            "names the module CLIPModel",
        ),
    ],
)
def test_bad_folders(folder, capsys, damage, says):
    damage(folder)
    with pytest.raises(UserError, match=says):
        embed(folder, ["text"])
    assert re.search(says, refused(capsys, folder, "--output", folder.parent / "a.npy"))
