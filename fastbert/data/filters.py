"""Quality filters that know no language: lengths, letters, symbols, repeated lines."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

# signs that are punctuation in Unicode, but stand in markup and code rather than in sentences
_MARKUP = frozenset("#{}[]\\_@*•§")
_LETTER, _SYMBOL, _SPACE, _OTHER = 0, 1, 2, 3


@dataclass(frozen=True)
class Filters:
    """What a document must be to be kept; the defaults keep all.

    Shares are of the characters that are no blanks. Letters are those of any script, with the marks that
    belong to them; symbols are Unicode's (currency, arithmetic, arrows, emoji, …) and the signs of markup and
    code.
    """

    min_chars: int = 0
    max_chars: int | None = None
    min_letters: float = 0.0
    max_symbols: float = 1.0
    max_repeated: float = 1.0  # share of the characters in sentences that stood in the document before

    def reason(self, sentences: Sequence[str]) -> str | None:
        """The filter that drops a document, or None."""
        num_chars = sum(map(len, sentences))
        if num_chars < self.min_chars:
            return "min_chars"
        if self.max_chars is not None and num_chars > self.max_chars:
            return "max_chars"
        if self.min_letters > 0 or self.max_symbols < 1:
            counts = _class_counts("".join(sentences))
            filled = num_chars - counts[_SPACE]
            if counts[_LETTER] < self.min_letters * filled:
                return "min_letters"
            if counts[_SYMBOL] > self.max_symbols * filled:
                return "max_symbols"
        if self.max_repeated < 1:
            distinct = sum(map(len, dict.fromkeys(sentences)))
            if num_chars - distinct > self.max_repeated * num_chars:
                return "max_repeated"
        return None


@cache
def _classes() -> np.ndarray:
    """The class of every code point, uint8 [0x110000]."""

    def of(char: str) -> int:
        kind = unicodedata.category(char)
        if char.isspace():
            return _SPACE
        if kind[0] in "LM":
            return _LETTER
        return _SYMBOL if kind[0] == "S" or char in _MARKUP else _OTHER

    return np.fromiter((of(chr(code)) for code in range(0x110000)), np.uint8, 0x110000)


def _class_counts(text: str) -> list[int]:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return np.bincount(_classes()[codes], minlength=4).tolist()
