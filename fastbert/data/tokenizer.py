"""WordPiece vocabularies: trained on a corpus, or brought along; saved so that transformers reads them.

Every Tokenizer returned here has truncation and padding switched off (a tokenizer.json may carry both) and
takes special-token strings in the text as text (`encode_special_tokens`): a literal "[MASK]" is no mask.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from fastbert.errors import UserError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# A piece is learned only when its parts stood together this often, so that its embedding can be learned, too:
# that is "as many pieces as the corpus supports". The built-in corpus of 2 MB supports about 7,700.
MIN_PIECE_COUNT = 4

TOKENIZER_CHARS = 500_000_000  # of the corpus a tokenizer is trained on: more text hardly changes it

_REPEATS = 10_000  # of a word in one string: "the" stands in a large corpus a hundred million times
_MAX_CHARS_PER_WORD = 100  # longer words become [UNK], as in Hugging Face's tokenizers
_UNUSED = re.compile(r"\[unused\d+\]")
# what each is for -> BERT's name and those of its relatives
_SPECIAL_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}

_HANGUL = re.compile("[가-힣]")
_KANA = re.compile("[\u3041-\u30fa]")
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff]")
_ASCII = frozenset(map(chr, range(0x21, 0x7F)))
# Latin-1 signs, dashes and quotes, wide punctuation
_PUNCTUATION = (
    (0xA1, 0xBF),
    (0x2010, 0x2027),
    (0x2030, 0x203E),
    (0x3001, 0x3011),
    (0x3014, 0x301B),
    (0xFF01, 0xFF5E),
)
_SCRIPT_SHARE = 0.01  # of a text's characters: a script with less is quoted, not the language of the text
_HANJA_SHARE = 0.001  # Korean text glosses words in Han characters, few of them twice
_ALPHABET_SHARE = 0.75  # of the vocabulary that characters not seen in the corpus may fill up

# words as far as they are certain: BERT's own splitting does the rest, on what this leaves together
_ROUGH_WORD = re.compile(
    r"[!-/:-@\[-`{-~]|[\u3400-\u4dbf\u4e00-\u9fff]|[^\s!-/:-@\[-`{-~\u3400-\u4dbf\u4e00-\u9fff]+"
)


@dataclass(frozen=True)
class SpecialIds:
    """The ids of the five special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


# training


def train_tokenizer(sentences: Iterable[str], *, vocab_size: int = 30522, cased: bool = False) -> Tokenizer:
    """Learn a WordPiece vocabulary of `vocab_size`, or of as many pieces as the text supports.

    Special tokens have the ids 0 to 4; then come the characters, then learned pieces, frequent ones first.
    Each character that words are made of is there in both forms, c and ##c. A Korean, Chinese or Japanese
    corpus also gets the everyday characters of its script that it lacks: other texts have next to no [UNK].
    Uncased lowercases, but strips no accents: stripping decomposes Hangul.

    The same sentences give the same vocabulary, in any order. Raises UserError for no text at all, and when
    the characters alone fill more than `vocab_size`.
    """
    counts: Counter[str] = Counter()
    for sentence in sentences:
        counts.update(_ROUGH_WORD.findall(sentence))
    if not counts:
        raise UserError("there is no text to train a tokenizer on: the corpus holds no sentence")

    tokenizer = _bert_tokenizer(models.WordPiece(unk_token="[UNK]"), lowercase=not cased, strip_accents=False)
    alphabet = _alphabet(tokenizer, counts, vocab_size)
    if len(SPECIAL_TOKENS) + len(alphabet) > vocab_size:
        raise UserError(
            f"vocabulary size {vocab_size} is too small: special tokens and the characters of the text are "
            f"{len(SPECIAL_TOKENS) + len(alphabet)} entries; ask for at least that many"
        )
    # The trainer numbers the ##c pieces in the order of a hash table, and breaks ties between pairs by these
    # numbers. Given as special tokens they have fixed ones, and the result is the same in every process.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_PIECE_COUNT,
        special_tokens=[*SPECIAL_TOKENS, *alphabet],
        limit_alphabet=0x110000,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_repeated(counts), trainer)
    return _wordpiece_tokenizer(tokenizer.get_vocab(), lowercase=not cased, strip_accents=False)


def _repeated(counts: Counter[str]) -> Iterator[str]:
    """Each word as often as it was counted: the trainer takes text, not counts."""
    for word in sorted(counts):
        for done in range(0, counts[word], _REPEATS):
            yield " ".join([word] * min(_REPEATS, counts[word] - done))


def _alphabet(tokenizer: Tokenizer, counts: Counter[str], vocab_size: int) -> list[str]:
    """Characters to start from: those of the text, then everyday ones of its scripts while there is room."""
    seen: set[str] = set()
    pieces: list[str] = []

    def with_joined_forms(chars: Iterable[str]) -> list[str]:
        new = [char for char in dict.fromkeys(chars) if char not in seen]
        return new + [f"##{char}" for char in new if _is_joined(tokenizer, char)]

    text_chars = set().union(*counts, _ASCII)
    for chars in (_normalised(tokenizer, text_chars), *_everyday_chars(counts)):
        new_pieces = with_joined_forms(chars)
        if not pieces or len(pieces) + len(new_pieces) <= _ALPHABET_SHARE * vocab_size:
            pieces += new_pieces
            seen.update(chars)
    return pieces


def _everyday_chars(counts: Counter[str]) -> Iterator[list[str]]:
    """For each script of the text the characters that its other texts will need, the most needed first."""
    num_chars = sum(count * len(word) for word, count in counts.items())

    def has(script: re.Pattern[str], share: float) -> bool:
        return sum(count * len(script.findall(word)) for word, count in counts.items()) >= share * num_chars

    korean, kana, chinese = has(_HANGUL, _SCRIPT_SHARE), has(_KANA, _SCRIPT_SHARE), has(_HAN, _SCRIPT_SHARE)
    if korean or kana or chinese:
        yield [chr(code) for first, last in _PUNCTUATION for code in range(first, last + 1)]
    if korean:
        yield _double_byte_chars("euc_kr", range(0xB0, 0xC9))  # KS X 1001: 2,350 syllables
        yield [chr(code) for code in range(0x3131, 0x3164)]  # single letters, as in a list or in ㅋㅋ
    if korean and has(_HAN, _HANJA_SHARE):
        yield _double_byte_chars("euc_kr", range(0xCA, 0xFE))  # KS X 1001: 4,888 hanja
    if kana:
        yield [chr(code) for code in (*range(0x3041, 0x3097), *range(0x30A1, 0x30FB), 0x30FC)]
        yield _double_byte_chars("euc_jp", range(0xB0, 0xD0))  # JIS X 0208 level 1: 2,965 kanji
    elif chinese and not korean:
        yield _double_byte_chars("gb2312", range(0xB0, 0xD8))  # level 1: 3,755 simplified
        yield _double_byte_chars("big5", range(0xA4, 0xC7))  # level 1: the 5,401 traditional and kana
        yield _double_byte_chars("gb2312", range(0xD8, 0xF8))  # level 2: 3,008 simplified


def _double_byte_chars(encoding: str, lead_bytes: range) -> list[str]:
    """The letters a national standard puts behind these lead bytes, in its order."""
    pairs = (bytes([lead, trail]) for lead in lead_bytes for trail in range(0x40, 0xFF))
    decoded = (unicodedata.normalize("NFC", pair.decode(encoding, errors="ignore")) for pair in pairs)
    # of a pair that does not exist, the codecs may leave the ASCII character of its second byte
    return [char for char in decoded if len(char) == 1 and not char.isascii() and char.isalpha()]


def _normalised(tokenizer: Tokenizer, chars: Iterable[str]) -> list[str]:
    """The characters that the normalizer makes of these, sorted."""
    text = " ".join(sorted(chars))
    return sorted({char for char in tokenizer.normalizer.normalize_str(text) if not char.isspace()})


def _is_joined(tokenizer: Tokenizer, char: str) -> bool:
    """Whether BERT leaves the character inside a word; punctuation and Han characters always stand alone."""
    text = tokenizer.normalizer.normalize_str(f"a{char}a")
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) == 1


def _bert_tokenizer(
    model: Any, *, lowercase: bool, strip_accents: bool | None, handle_chinese_chars: bool = True
) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=handle_chinese_chars,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _wordpiece_tokenizer(
    vocab: dict[str, int],
    *,
    lowercase: bool,
    strip_accents: bool | None,
    handle_chinese_chars: bool = True,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
) -> Tokenizer:
    """A vocabulary -> the whole tokenizer around it: [CLS] A [SEP] B [SEP], segments 0 and 1."""
    pieces = [token for token in vocab if len(token) > 2]
    foreign = not any(token.startswith("##") for token in pieces) and any(t.startswith("@@") for t in pieces)
    prefix = "@@" if foreign else "##"
    _, unk, cls, sep, _ = special_tokens
    model = models.WordPiece(
        vocab,
        unk_token=unk,
        continuing_subword_prefix=prefix,
        max_input_chars_per_word=_MAX_CHARS_PER_WORD,
    )
    tokenizer = _bert_tokenizer(
        model,
        lowercase=lowercase,
        strip_accents=strip_accents,
        handle_chinese_chars=handle_chinese_chars,
    )
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
    )
    tokenizer.decoder = decoders.WordPiece(prefix=prefix)
    return _for_corpora(tokenizer)


def _for_corpora(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


# loading and saving


def load_tokenizer(path: str | Path, *, cased: bool | None = None) -> Tokenizer:
    """A Hugging Face, run or data set folder, a tokenizer.json or a vocab.txt -> Tokenizer.

    Of a vocab.txt line n is id n; of a token that stands twice the later id counts. It does not say if it is
    cased: do_lower_case of a tokenizer_config.json beside it decides, else `cased`, else it is uncased as in
    Hugging Face. A tokenizer.json says it itself. Special tokens may have other names than BERT's when
    tokenizer_config.json or special_tokens_map.json give them.

    Raises UserError for a missing or unreadable file and for a tokenizer without its five special tokens.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        # of a run folder its newest checkpoint's, of a prepared data set its own
        folders = [path, path / "last", path / "tokenizer"]
        candidates = [folder / name for folder in folders for name in ("tokenizer.json", "vocab.txt")]
        found = next((file for file in candidates if file.is_file()), None)
        if found is None:
            raise UserError(f"the tokenizer folder {path} holds neither a tokenizer.json nor a vocab.txt")
    elif path.is_file():
        found = path
    else:
        raise UserError(
            f"the tokenizer {path} does not exist: name a Hugging Face folder, tokenizer.json or vocab.txt"
        )
    config = _read_json(found.parent / "special_tokens_map.json")
    config |= _read_json(found.parent / "tokenizer_config.json")
    names = _configured_names(config)
    if found.suffix != ".json":
        return _load_vocab(found, config, names, cased)
    try:
        tokenizer = Tokenizer.from_file(str(found))
    except Exception as error:  # the library raises no narrower type
        raise UserError(f"{found} is not a tokenizer.json of the tokenizers library ({error})") from error
    return _with_names(_for_corpora(tokenizer), names)


def _load_vocab(path: Path, config: dict[str, Any], names: dict[str, str], cased: bool | None) -> Tokenizer:
    try:
        # as the library does: only the line end is cut off, whatever else surrounds a token belongs to it
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the vocabulary {path} as UTF-8 text ({error})") from error
    vocab = {token: index for index, token in enumerate(lines) if token}
    tokenizer = _wordpiece_tokenizer(
        vocab,
        lowercase=config.get("do_lower_case", not cased),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        special_tokens=tuple(_find_name(vocab, role, names) for role in _SPECIAL_NAMES),
    )
    return _with_names(tokenizer, names)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a configuration file that may be missing."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable JSON file ({error}): mend or remove it") from error
    return config if isinstance(config, dict) else {}


def _configured_names(config: dict[str, Any]) -> dict[str, str]:
    """Role -> the special token's name in a Hugging Face configuration, which may write out an AddedToken."""
    names = {}
    for role in _SPECIAL_NAMES:
        name = config.get(f"{role}_token")
        name = name.get("content") if isinstance(name, dict) else name
        if isinstance(name, str):
            names[role] = name
    return names


def _with_names(tokenizer: Tokenizer, names: dict[str, str]) -> Tokenizer:
    """Keep the configured names on the tokenizer, which knows what is special, but not what it is for."""
    tokenizer.special_names = names  # type: ignore[attr-defined]
    special_ids(tokenizer)
    return tokenizer


def _find_name(vocab: dict[str, int], role: str, names: dict[str, str]) -> str:
    """The configured name of a special token, else the first of the usual ones in the vocabulary."""
    candidates = (names[role],) if names.get(role) in vocab else _SPECIAL_NAMES[role]
    for name in candidates:
        if name in vocab:
            return name
    raise UserError(
        f"the tokenizer has no {names.get(role, candidates[0])} token among its {len(vocab)} entries: "
        "use a tokenizer made for BERT"
    )


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, model_max_length: int = 512) -> None:
    """Write tokenizer.json, tokenizer_config.json and vocab.txt.

    transformers' AutoTokenizer and BertTokenizerFast load the folder and give the same ids.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    lines = [names.get(index, f"[unused-{index}]") for index in range(vocabulary_size(tokenizer))]
    (directory / "vocab.txt").write_text(
        "".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n"
    )

    special = special_ids(tokenizer)
    state = json.loads(tokenizer.to_str())
    normalizer = state["normalizer"] or {}
    config: dict[str, Any] = {"model_max_length": model_max_length, "clean_up_tokenization_spaces": False}
    config |= {f"{role}_token": names[getattr(special, role)] for role in _SPECIAL_NAMES}
    if state["model"]["type"] == "WordPiece" and normalizer.get("type") == "BertNormalizer":
        config["tokenizer_class"] = "BertTokenizer"
        config["do_lower_case"] = normalizer["lowercase"]
        config["strip_accents"] = normalizer["strip_accents"]
        config["tokenize_chinese_chars"] = normalizer["handle_chinese_chars"]
    else:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(f"{text}\n", encoding="utf-8")


# questions about a tokenizer


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Hex digest of everything that decides which ids a text gets."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """The rows an embedding table needs: the largest id + 1 (ids may have holes, so this is no count)."""
    return max(tokenizer.get_vocab().values()) + 1


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """The ids of the five special tokens; UserError naming the one that is missing."""
    vocab = tokenizer.get_vocab()
    names = getattr(tokenizer, "special_names", {})
    return SpecialIds(**{role: vocab[_find_name(vocab, role, names)] for role in _SPECIAL_NAMES})


def ordinary_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Sorted int64 ids that a random replacement may take: neither special nor an [unusedN] slot."""
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    special |= set(vars(special_ids(tokenizer)).values())
    vocab = tokenizer.get_vocab()
    ids = [i for token, i in vocab.items() if i not in special and not _UNUSED.fullmatch(token)]
    return np.array(sorted(ids), dtype=np.int64)
