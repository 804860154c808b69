"""How much memory torch has at once, counted without a GPU: tensors may be on "meta"."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """`bytes` is the most that was alive at once of what torch made inside; not what was given to it.

    What an operator makes within itself and gives back before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[StorageWeakRef, int] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        self._alive |= {storage: size for storage, size in _storages(out).items() if storage not in given}
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}
        self.bytes = max(self.bytes, sum(self._alive.values()))
        return out


def _storages(tree: object) -> dict[StorageWeakRef, int]:
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}
