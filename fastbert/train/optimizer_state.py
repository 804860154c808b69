"""The optimizer's state on a disk: safetensors of which every rank writes and reads its share (DCP).

A tensor is named after the weight that it belongs to, as `bert.pooler.dense.weight.exp_avg`. So a state fits
any number of ranks, whether they hold whole weights or parts. Master weights are left out: a checkpoint has
them as the model's weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.errors import UserError
from fastbert.train.distributed import Ranks

KINDS = ("step", "exp_avg", "exp_avg_sq")
# said of a run of one rank, which is told to do so
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def _fresh_copy(name: str, tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def host_copy(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    copy: Callable[[str, Tensor], Tensor] = _fresh_copy,
) -> dict[str, Tensor]:
    """The state by name, copied to the host: of a sharded parameter the part that this rank has.

    `copy(name, tensor)` makes the copies.
    """
    copies = {}
    for name, param in _trained(model, optimizer):
        for kind in KINDS:
            value = optimizer.state[param].get(kind)
            if value is not None:
                key = f"{name}.{kind}"
                copies[key] = copy(key, value)
                if kind != "step":
                    copies[key] = _as_part(copies[key], param, ranks)
    return copies


def write(folder: Path, state: dict[str, Tensor], ranks: Ranks) -> None:
    """Write a `host_copy` into a folder, together with the other ranks; each file is synced.

    Raises what the first rank that failed has raised.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(state, storage_writer=writer, process_group=ranks.writers, no_dist=ranks.alone)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """The other way round; all ranks have to call it. Load the weights afterwards.

    A parameter without a state in the folder has none then. UserError where the folder holds no state.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as load_into

    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: the checkpoint holds no optimizer state to go on from")
    reader = HuggingFaceStorageReader(str(folder))
    found: dict[str, Any] = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {}
    for name, param in _trained(model, optimizer):
        part: Any = param.to_local() if hasattr(param, "to_local") else param
        for kind in KINDS:
            if (key := f"{name}.{kind}") in found:
                value = torch.zeros(() if kind == "step" else part.shape, dtype=found[key].properties.dtype)
                state[key] = value if kind == "step" else _as_part(value, param, ranks)
    if state:
        load_into(state, storage_reader=reader, process_group=ranks.writers, no_dist=ranks.alone)
    for name, param in _trained(model, optimizer):
        values = {kind: state[f"{name}.{kind}"] for kind in KINDS if f"{name}.{kind}" in state}
        optimizer.state.pop(param, None)
        for kind, value in values.items():
            value = value.to_local() if hasattr(value, "to_local") else value
            # the optimizer takes the counts to where it wants them
            optimizer.state[param][kind] = value if kind == "step" else value.to(param.device)


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """The optimizer's parameters with their names in the model."""
    names = {param: name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield names[param], param


def _as_part(local: Tensor, param: Any, ranks: Ranks) -> Tensor:
    """What a rank holds of a state, sharded as its parameter is, but on the host."""
    if not hasattr(param, "to_local"):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, ranks.host_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
