"""Text -> sentences: by line, then by sentence-final punctuation. Rules only, no model, no language setting.

What never ends a sentence: a dot inside a word (3.14, v2.0.1, www.python.org, setup.py), a dot after a common
abbreviation (Dr., e.g.), after a single initial (J. R. R. Tolkien) or after the number of a list item (3.).
Chinese and Japanese end marks need no space after them. In Korean text a space after the dot is often missing
("했다.그러나"): a usual verb ending before the dot and Hangul or an opening quote after it end a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_CLOSING = "\"'”’»」』）)\\]}】》"
_WIDE_ENDS = "。！？｡"
_OPENING_QUOTES = "“‘「『《"

# a run of end marks with the quotes and brackets that close behind it
_CANDIDATE = re.compile(rf"[.!?…{_WIDE_ENDS}]+[{_CLOSING}]*")
_WORD_BEFORE = re.compile(r"[\w.&-]*$")
_LIST_NUMBER = re.compile(r"\(?(\d{1,3}|[a-zA-Z])$")

# these are followed by more of the sentence, whatever comes next
_ABBREVIATION = re.compile(
    r"mrs?|ms|dr|prof|rev|hon|st|sr|jr|messrs|mme|mlle|gen|col|capt|lt|sgt|maj|cmdr|gov|sen|rep|pres|"
    r"e\.?g|i\.?e|vs|etc|cf|viz|al|ca|approx|esp|incl|resp|inc|ltd|co|corp|dept|univ|assn|bros|est|"
    r"jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|mt|ft|a\.m|p\.m|u\.s|u\.k|u\.n|d\.c|ph\.d|b\.[ac]|m\.a|a\.d",
    re.IGNORECASE,
)
# these are words or sentence ends of their own unless a number follows: "No. 5", "Fig. 2"
_BEFORE_NUMBER = re.compile(r"nos?|pp?|figs?|vols?|ch|chap|sect?|eqs?|arts?|op|v|ver", re.IGNORECASE)

_KOREAN_ENDINGS = frozenset("다요죠까음함임됨니오라지네")


def _is_hangul(char: str) -> bool:
    return "가" <= char <= "힣"


def _dot_is_inside(text: str, start: int, mark: int, following: str) -> bool:
    """Whether the single dot at `mark` belongs to an abbreviation, an initial or a list number."""
    found = _WORD_BEFORE.search(text, max(start, mark - 24), mark)
    word = found.group() if found else ""
    if not word:
        return False
    if _ABBREVIATION.fullmatch(word):
        return True
    if len(word) == 1 and word.isupper() and word != "I":  # "so am I." is more frequent than the initial
        return True
    if _BEFORE_NUMBER.fullmatch(word) and following.isdigit():
        return True
    return mark - start <= 4 and _LIST_NUMBER.fullmatch(text[start:mark].lstrip()) is not None


def _ends_sentence(text: str, start: int, mark: int, end: int) -> bool:
    """Whether the end marks text[mark:end] end the sentence that began at `start`; text[end] exists."""
    following = text[end]
    marks = text[mark:end]
    if any(char in _WIDE_ENDS for char in marks):
        return True
    if following.isspace():
        rest = text[end : end + 8].lstrip()
        return not (marks == "." and _dot_is_inside(text, start, mark, rest[:1]))
    # no space: only Korean endings count, "했다.그는", and an opening quote may stand between, '했다."나는'
    if text[mark - 1] not in _KOREAN_ENDINGS or mark == start:
        return False
    if marks[-1] in ".!?…":
        return _is_hangul(following) or following in _OPENING_QUOTES
    return False


def _split_line(line: str) -> Iterator[str]:
    start = 0
    for match in _CANDIDATE.finditer(line):
        mark, end = match.span()
        if mark < start:
            continue
        # a straight quote right behind a Korean ending opens the next sentence when none is open: 했다."나는
        if end - mark == 2 and line[end - 1] == '"' and end < len(line) and _is_hangul(line[end]):
            opens = line.count('"', start, mark) % 2 == 0
            end = end - 1 if opens else end
            if opens and line[mark - 1] in _KOREAN_ENDINGS and mark > start:
                yield line[start:end].strip()
                start = end
            continue
        if end < len(line) and _ends_sentence(line, start, mark, end):
            yield line[start:end].strip()
            start = end
    rest = line[start:].strip()
    if rest:
        yield rest


def split_sentences(text: str) -> list[str]:
    """text -> its sentences, each non-empty and without surrounding blanks. A line break ends one, too."""
    return [sentence for line in text.splitlines() for sentence in _split_line(line) if sentence]


def ends_in_punctuation(line: str) -> bool:
    """Whether a line closes with sentence-final punctuation, closing quotes and brackets aside."""
    stripped = line.rstrip().rstrip("\"'”’»」』）)]}】》")
    return stripped.endswith((".", "!", "?", "…", "。", "！", "？", "｡"))


def _joins_without_space(char: str) -> bool:
    """Han characters, kana and the punctuation written with them, which know no spaces."""
    return "\u2e80" <= char <= "\u9fff" or "\uf900" <= char <= "\ufaff" or "\uff00" <= char <= "\uffef"


def join_wrapped(lines: Iterable[str]) -> str:
    """The lines of a hard-wrapped paragraph -> one line, joined by a space (by nothing inside Chinese)."""
    joined = ""
    for line in lines:
        part = line.strip()
        if not part:
            continue
        if joined and not (_joins_without_space(joined[-1]) and _joins_without_space(part[0])):
            joined += " "
        joined += part
    return joined
