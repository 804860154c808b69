"""What each process of a data-parallel test runs; a module of its own, so that it starts quickly."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastbert

CONFIG = fastbert.BertConfig(
    vocab_size=211,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def batches_of(step: int) -> list[torch.Tensor]:
    """One batch for each of two ranks, of equally many labels."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(1, 211, (2, 7), generator=generator) for _ in range(2)]


def masked_lm(with_checkpointing: bool) -> fastbert.BertForMaskedLM:
    torch.manual_seed(3)
    model = fastbert.BertForMaskedLM(CONFIG).train()
    if with_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def train_rank(process: int, rank: int, folder: str) -> None:
    """Two steps without and two with checkpointing; the parameters go into `folder`."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    results = []
    for with_checkpointing in (False, True):
        model = DistributedDataParallel(masked_lm(with_checkpointing), find_unused_parameters=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            ids = batches_of(step)[rank]
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        results.append([parameter.detach() for parameter in model.module.parameters()])
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
