"""A prepared data set as the text of a run: in the place of a corpus."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from fastbert.data.files import location
from fastbert.data.store import DocumentStore, OnBadShard
from fastbert.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from fastbert.errors import UserError


class PreparedText:
    """The data set in a folder or behind an address.

    `name` is a short slug for a folder name, `description` one line on what is read. UserError for a folder
    that holds none.
    """

    def __init__(self, address: str, on_bad_shard: OnBadShard) -> None:
        self.address, self.on_bad_shard = address, on_bad_shard
        self._store: DocumentStore | None = None
        place = location(address)
        self.name = place.resolve().name if isinstance(place, Path) else place.stem
        self.description = f"prepared in {address}"
        if isinstance(place, Path):
            self._store = DocumentStore.open(place, on_bad_shard=on_bad_shard)
            self.description = f"{self._store.description}, {self.description}"

    def store(self, cache_dir: Path) -> DocumentStore:
        """Opened; what is behind an address is kept in `cache_dir`."""
        if self._store is None:
            self._store = DocumentStore.open(
                self.address, cache_dir=cache_dir, on_bad_shard=self.on_bad_shard
            )
        return self._store

    def tokenizer(self, cache_dir: Path, given: Path | None, resumed: Path | None) -> Tokenizer:
        """The data set's own. UserError if another one is asked for, or a checkpoint has another one."""
        tokenizer = load_tokenizer(self.store(cache_dir).tokenizer_folder)
        for path, remedy in (
            (given, "leave out --tokenizer, or prepare the data set with it"),
            (resumed, "choose another --output, or prepare the data set with the tokenizer of that run"),
        ):
            if path is not None and tokenizer_fingerprint(load_tokenizer(path)) != tokenizer_fingerprint(
                tokenizer
            ):
                raise UserError(f"the data set {self.address} has another tokenizer than {path}: {remedy}")
        return tokenizer
